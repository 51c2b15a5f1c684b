"""The taps behind `value_and_grad`: lookups recorded in a traced loss, and a way out for gradients.

A lookup's activations pass through a primitive, `lookup_tap_p`, that carries the table and the
record of the lookup and computes nothing. `Annotator` finds these in the traced loss (a jaxpr): a
lookup belongs to the model if the table it reads is an input of the program, by whatever way it got
there. Running the program attaches a **tap** to each lookup: an input of zeros of the activations'
shape, whose cotangent, by the custom VJP `attach`, is the gradient of the activations. With the
record that is all of the row gradients, in O(batch) memory; a `[V, D]` gradient never exists.

Every other use of a table is an error, as is a lookup where a tap cannot work, so that no gradient
is lost. This file is the only one that reads the jaxpr of a loss.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from embed.engine import jax_internals, mesh
from embed.engine.lookup import LookupRecord
from embed.engine.stack import StackSpec

# --- the primitives ------------------------------------------------------------------------------


class Owner(NamedTuple):
  """A stack or a table of a model: the path of its module, "a/b", and its own name."""

  path: str
  name: str

  @property
  def key(self) -> str:
    return f"{self.path}/{self.name}" if self.path else self.name


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
  """The SparseEmbed of a lookup: a weak reference, and whether it has tables to train."""

  ref: weakref.ref
  trains: bool


def tap(
  activations: Sequence[jax.Array], record: LookupRecord, table: jax.Array, layer: Layer
) -> list[jax.Array]:
  """The activations themselves, with the table and the record of their lookup on record."""
  leaves, treedef = jax.tree.flatten(record)
  return lookup_tap_p.bind(
    *activations, table, *leaves, treedef=treedef, number=len(activations), layer=layer,
    batched=False,
  )  # fmt: skip


def read_tables(arrays: Any, purpose: str) -> Any:
  """Tables and slots themselves, with the purpose on record: "lookup", "tables" or "update".

  A loss may read tables for a lookup; the other purposes are errors there.
  """
  leaves, treedef = jax.tree.flatten(arrays)
  read = table_read_p.bind(*leaves, purpose=purpose, number=len(leaves), batched=False)
  return jax.tree.unflatten(treedef, read)


def _tap_jvp(primals, tangents, *, number, **params):
  if any(not jax_internals.is_zero_tangent(t) for t in tangents[: number + 1]):
    record = jax.tree.unflatten(params["treedef"], primals[number + 1 :])
    raise ValueError(
      f"Table {record.tables[0]!r} is being differentiated by JAX directly, which would build a "
      "dense gradient of the whole table. Write embed.value_and_grad(loss_fn)(model, ...) instead "
      "of nnx.value_and_grad, and leave embed.Table out of `wrt` and `argnums`."
    )
  return lookup_tap_p.bind(*primals, number=number, **params), list(tangents[:number])


def _read_jvp(primals, tangents, **params):
  return table_read_p.bind(*primals, **params), list(tangents)


# *activations, table, *leaves of the record -> activations
lookup_tap_p = jax_internals.identity_primitive("sparse_embed_lookup", _tap_jvp)
# *tables -> tables
table_read_p = jax_internals.identity_primitive("sparse_embed_table", _read_jvp)


@jax.custom_vjp
def attach(act: jax.Array, tap: jax.Array) -> jax.Array:
  """`act`, and the cotangent of it goes to `tap`: the row gradient's way out of the loss."""
  del tap
  return act


attach.defvjp(lambda act, tap: (act, None), lambda _, cotangent: (None, cotangent))


# --- the program that a loss is ------------------------------------------------------------------

_INLINED = ("jit", "pjit", "closed_call", "core_call")  # run in place
_REMAT = ("checkpoint", "remat", "remat2")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_UNCHANGED = ("sharding_constraint", "reshard", "copy", "copy_p")  # the table itself comes out


class Source(NamedTuple):
  """The Variable that an input of the traced loss comes from."""

  owner: Owner | None  # None: of another argument than the model
  name: str  # "parameters" or a slot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookup:
  """A lookup in the model's tables: what it returned, what it read, and of what.

  Found in a program, it holds shapes. Run, it holds arrays, and activations only if it was run
  without taps.
  """

  activations: list[Any] | None
  record: LookupRecord
  owner: Owner = dataclasses.field(metadata={"static": True})


class _Part(NamedTuple):
  """One equation with lookups of the model in it, or a run of equations without."""

  eqns: list[Any]
  lookups: list[Lookup]
  inner: list["Scope"]


class Scope(NamedTuple):
  """A jaxpr, annotated: its equations in parts, its lookups, and where its outputs come from."""

  jaxpr: Any
  parts: list[_Part]
  lookups: list[Lookup]
  outputs: list[Source | None]

  @property
  def rereads(self) -> bool:
    """Whether the gradient of the program looks up again, as under `nnx.remat`."""
    return any(
      part.eqns[0].primitive.name in _REMAT or any(scope.rereads for scope in part.inner)
      for part in self.parts
      if part.lookups
    )


def _sub_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(item, jax_internals.ClosedJaxpr):
        yield item.jaxpr
      elif isinstance(item, jax_internals.Jaxpr):
        yield item


def record_of(eqn: Any) -> LookupRecord:
  struct = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=v.aval.sharding)
  leaves = [struct(v) for v in eqn.invars[eqn.params["number"] + 1 :]]
  return jax.tree.unflatten(eqn.params["treedef"], leaves)


def _refuse(eqn: Any, where: str) -> None:
  raise ValueError(
    f"A lookup of table {record_of(eqn).tables[0]!r} is under {where} inside the loss, where its "
    "row gradient would be lost. Look up outside of it and pass the activations in. Several calls, "
    "nnx.jit, nnx.remat and nnx.cond are fine."
  )


_READ = {
  "tables": (
    "sparse_embed.tables (or .variables) was read inside the loss, where no gradient comes back to "
    "{name}. Write sparse_embed.attend(query, table_name) to score against its rows, or read it "
    "outside."
  ),
  "update": (
    "Rows of {name} were updated inside the loss, where the update would be lost. Return the "
    "gradients, and call embed.Optimizer.update, apply_gradients or apply_row_gradients outside."
  ),
}
_COMPUTED_WITH = (
  "The stored rows of {name} were used inside the loss other than by a lookup, as "
  "nnx.state(model, embed.Table) gives them: no gradient comes back from there. To regularise the "
  "rows of a batch, use the activations of a lookup, or weight_decay_factor of the table's "
  "optimizer; to score against rows, sparse_embed.attend(query, table_name); to keep a copy of the "
  "model constant, jax.lax.stop_gradient of what it returns."
)
CHANGED = (
  "The rows of {name} were replaced inside the loss, as by load_tables, or their layer was: that "
  "would be lost. Replace them outside."
)


class Annotator:
  """Follows tables from the inputs of a jaxpr to the lookups that read them."""

  def __init__(self, stacks: Mapping[Owner, StackSpec]):
    self.stacks = stacks
    self.outside: list[Any] = []  # lookups in tables that are not inputs

  def error(self, source: Source, message: str) -> ValueError:
    """With the tables and the layer of a source in place of `name`."""
    owner = source.owner
    assert owner is not None
    layer = f"the SparseEmbed at {owner.path!r}" if owner.path else "the SparseEmbed"
    tables = ", ".join(map(repr, self.stacks[owner].tables))
    return ValueError(message.format(name=f"{tables} in {layer}"))

  def scope(self, jaxpr: Any, sources: Sequence[Source | None]) -> Scope:
    known = {v: s for v, s in zip(jaxpr.invars, sources, strict=True) if s is not None}
    of = lambda v: None if isinstance(v, jax_internals.Literal) else known.get(v)
    parts: list[_Part] = []
    for eqn in jaxpr.eqns:
      part, outputs = self._equation(eqn, [of(v) for v in eqn.invars])
      known.update({v: s for v, s in zip(eqn.outvars, outputs, strict=False) if s is not None})
      if not part.lookups and parts and not parts[-1].lookups:
        parts[-1].eqns.append(eqn)
      else:
        parts.append(part)
    lookups = [lookup for part in parts for lookup in part.lookups]
    return Scope(jaxpr, parts, lookups, [of(v) for v in jaxpr.outvars])

  def _equation(self, eqn: Any, sources: list[Source | None]):
    """The part of one equation, and where its outputs come from."""
    primitive, name = eqn.primitive, eqn.primitive.name
    own = [s for s in sources if s is not None and s.owner is not None]
    if primitive is lookup_tap_p:
      return _Part([eqn], self._lookup(eqn, sources[eqn.params["number"]]), []), []
    if primitive is table_read_p:
      if own and eqn.params["purpose"] in _READ:
        raise self.error(own[0], _READ[eqn.params["purpose"]])
      return _Part([eqn], [], []), []
    inner, outputs = self._inner(eqn, sources)
    lookups = [lookup for scope in inner for lookup in scope.lookups]
    if lookups and name not in (*_INLINED, *_REMAT, "cond"):
      _refuse(_first_lookup(eqn), f"a JAX transformation ({name})")
    if inner:
      return _Part([eqn], lookups, inner), outputs
    if name in _UNCHANGED:
      return _Part([eqn], [], []), sources[:1]
    if own:
      if _first_lookup(eqn) is not None:
        _refuse(_first_lookup(eqn), f"a JAX transformation ({name})")
      raise self.error(own[0], _COMPUTED_WITH)
    return _Part([eqn], [], []), []

  def _lookup(self, eqn: Any, source: Source | None) -> list[Lookup]:
    if source is None:
      self.outside.append(eqn)
    if source is None or source.owner is None:
      return []
    if eqn.params["batched"]:
      _refuse(eqn, "vmap")
    return [Lookup([v.aval for v in eqn.outvars], record_of(eqn), source.owner)]

  def _inner(self, eqn: Any, sources: list[Source | None]):
    """Sub-jaxprs whose inputs map to the equation's, and the sources of its outputs."""
    name, params, subs = eqn.primitive.name, eqn.params, list(_sub_jaxprs(eqn.params))
    if name == "cond":
      scopes = [self.scope(sub, sources[1:]) for sub in subs]
      every = zip(*(scope.outputs for scope in scopes), strict=True)
      return scopes, [branch[0] if len(set(branch)) == 1 else None for branch in every]
    if name in (*_INLINED, *_REMAT, *_CUSTOM) and subs:
      scope = self.scope(subs[0], sources)
      return [scope], scope.outputs
    if name == "scan":
      consts, carry = params["num_consts"], params["num_carry"]
      if any(source is not None for source in sources[consts + carry :]):
        return [], []  # scanned over, row by row: refused
      scope = self.scope(subs[0], sources)
      return [scope], _carried(sources[consts : consts + carry], scope)
    if name == "while":
      of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
      carried = sources[of_cond + of_body :]
      self.scope(params["cond_jaxpr"].jaxpr, [*sources[:of_cond], *carried])
      between = sources[of_cond : of_cond + of_body]
      scope = self.scope(params["body_jaxpr"].jaxpr, [*between, *carried])
      return [scope], _carried(carried, scope)
    return [], []


def _carried(before: Sequence[Source | None], body: Scope) -> list[Source | None]:
  """Where the carry of a loop comes from, if a round of it leaves it as it was."""
  pairs = zip(before, body.outputs, strict=False)
  return [source if source == after else None for source, after in pairs]


def _first_lookup(eqn: Any) -> Any:
  for sub in _sub_jaxprs(eqn.params):
    for inner in sub.eqns:
      if inner.primitive is lookup_tap_p:
        return inner
      deeper = _first_lookup(inner)
      if deeper is not None:
        return deeper
  return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
  """The taps of a lookup's activations, or None, and the activations if they were made ahead."""

  taps: list[jax.Array] | None
  ahead: list[jax.Array] | None = None


Run = tuple[list[Any], list[Lookup]]


def run(scope: Scope, consts: Any, args: Any, feeds: list[Feed]) -> Run:
  """Evaluates a jaxpr with a feed for every lookup; returns its outputs and the lookups."""
  jaxpr = scope.jaxpr
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, jax_internals.Literal) else env[v]
  lookups: list[Lookup] = []
  for part in scope.parts:
    if not part.lookups:
      inputs, outputs = _boundary(part.eqns)
      plain = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=part.eqns)
      out = jax_internals.jaxpr_as_fun(jax_internals.ClosedJaxpr(plain, []))(*map(read, inputs))
    else:
      (eqn,), number = part.eqns, len(part.lookups)
      outputs = eqn.outvars
      with eqn.ctx.manager:
        out, made = _run_with_lookups(part, [read(v) for v in eqn.invars], feeds[:number])
      feeds = feeds[number:]
      lookups += made
    env.update(zip(outputs, out, strict=True))
  return [read(v) for v in jaxpr.outvars], lookups


def _boundary(eqns: list[Any]) -> tuple[list[Any], list[Any]]:
  """The variables that a run of equations reads from outside, and those that it defines."""
  made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, jax_internals.DropVar)]
  known = set(made)
  reads = [v for eqn in eqns for v in eqn.invars if not isinstance(v, jax_internals.Literal)]
  return list(dict.fromkeys(v for v in reads if v not in known)), made


def _run_with_lookups(part: _Part, values: list[Any], feeds: list[Feed]) -> Run:
  """One equation with lookups in it."""
  eqn, name = part.eqns[0], part.eqns[0].primitive.name
  if eqn.primitive is lookup_tap_p:
    number, feed, owner = eqn.params["number"], feeds[0], part.lookups[0].owner
    record = jax.tree.unflatten(eqn.params["treedef"], values[number + 1 :])
    activations = mesh.settled(list(values[:number]) if feed.ahead is None else feed.ahead)
    if feed.taps is None:
      return activations, [Lookup(activations, record, owner)]
    # Tapped again, for a loss around this one that is differentiated as well.
    activations = lookup_tap_p.bind(*activations, *values[number:], **eqn.params)
    return list(map(attach, activations, feed.taps)), [Lookup(None, record, owner)]
  if name in _INLINED:
    closed = next(p for p in eqn.params.values() if isinstance(p, jax_internals.ClosedJaxpr))
    return run(part.inner[0], closed.consts, values, feeds)
  if name in _REMAT:
    inner = functools.partial(run, part.inner[0], ())
    again = jax.checkpoint(
      inner, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return again(values, feeds)
  if feeds[0].taps is None or feeds[0].ahead is not None:
    table = part.lookups[0].record.tables[0]
    raise ValueError(
      f"A lookup of table {table!r} is in one branch of a conditional: which one is not known "
      "ahead. Look up outside of it, or train without embed.look_ahead."
    )
  index, *operands = values
  branches = _branches(part.inner, [closed.consts for closed in eqn.params["branches"]])
  return jax.lax.switch(index, branches, operands, feeds)


def _branches(scopes: list[Scope], consts: list[Any]) -> list[Callable[..., Run]]:
  """The branches of a conditional, each recording the others' lookups as not made."""

  def branch(i, operands, feeds):
    start = sum(len(scope.lookups) for scope in scopes[:i])
    own = feeds[start:][: len(scopes[i].lookups)]
    out, made = run(scopes[i], consts[i], operands, own)
    lookups = [made if s is scopes[i] else list(map(_unused, s.lookups)) for s in scopes]
    return out, [lookup for each in lookups for lookup in each]

  return [functools.partial(branch, i) for i in range(len(scopes))]


def _unused(lookup: Lookup) -> Lookup:
  """A lookup that was not made: its record has the same shapes and no id."""
  record = jax.tree.map(mesh.zeros_like_type, lookup.record).unused()
  return Lookup(None, record, lookup.owner)
