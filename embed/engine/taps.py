"""The taps behind `value_and_grad`: lookups recorded in a traced loss, and a way out for gradients.

A lookup's activations pass through a primitive, `lookup_tap_p`, that carries the table and the
record of the lookup and computes nothing. `Program` finds these in the traced loss (a jaxpr): a
lookup belongs to the model if the table it reads is an input of the program, passed on by any
number of equations. Running the program attaches a **tap** to each lookup: an input of zeros of the
activations' shape, whose cotangent, by the custom VJP `attach`, is the gradient of the activations.
With the record that is all of the row gradients, in O(batch) memory; a `[V, D]` gradient never
exists.

Every other use of a table is an error, as is a lookup where a tap cannot work, so that no gradient
is lost. This file is the only one that reads the jaxpr of a loss.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from embed.engine import compat, jax_internals, mesh
from embed.engine.bags import LookupRecord
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
  """The taps of a lookup's activations, or None, and the activations if they were made ahead."""

  taps: list[jax.Array] | None
  ahead: list[jax.Array] | None = None


Run = tuple[list[Any], list[Lookup]]  # outputs, and the lookups that were made
Followed = tuple[list[Lookup], list[Source | None]]  # lookups, and where the outputs come from
Sources = dict[Any, Source | None]  # of the variables of a jaxpr


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


def _refuse(record: LookupRecord, where: str) -> None:
  raise ValueError(
    f"A lookup of table {record.tables[0]!r} is under {where} inside the loss, where its "
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


class Program:
  """A traced loss: a jaxpr, and the model's lookups in it.

  Each equation is followed: which tables of the model it reads, which of them come out of it, and
  which lookups it holds. A run follows them again, evaluates those without lookups as they are, and
  enters the others.

  Attributes:
    lookups: in the order in which they are made.
    outputs: where each output of the program comes from, or None.
    outside: equations of lookups in tables that are not inputs.
    rereads: whether the gradient of the program looks up again, as under `nnx.remat`.
  """

  def __init__(
    self, closed: Any, sources: Sequence[Source | None], stacks: Mapping[Owner, StackSpec]
  ):
    self.stacks, self.outside, self.rereads = stacks, list[Any](), False
    self._closed, self._sources = closed, sources
    self.lookups, self.outputs = self._follow(closed.jaxpr, sources)

  def run(self, args: Sequence[Any], feeds: list[Feed]) -> Run:
    """Evaluates the program with a feed for every lookup; returns its outputs and the lookups."""
    return self._run(self._closed.jaxpr, self._closed.consts, args, self._sources, feeds)

  def error(self, source: Source, message: str) -> ValueError:
    """With the tables and the layer of a source in place of `name`."""
    owner = source.owner
    assert owner is not None
    layer = f"the SparseEmbed at {owner.path!r}" if owner.path else "the SparseEmbed"
    tables = ", ".join(map(repr, self.stacks[owner].tables))
    return ValueError(message.format(name=f"{tables} in {layer}"))

  # --- following ----------------------------------------------------------------------------------

  def _walk(self, jaxpr: Any, known: Sources) -> Iterator[tuple[Any, Any, list[Lookup]]]:
    """Each equation, the sources of its inputs, and its lookups; adds the outputs to `known`."""
    for eqn in jaxpr.eqns:
      sources = _sources(eqn.invars, known)
      lookups, outputs = self._equation(eqn, sources)
      known.update(zip(eqn.outvars, outputs, strict=False))
      yield eqn, sources, lookups

  def _follow(self, jaxpr: Any, sources: Sequence[Source | None]) -> Followed:
    """The lookups of a jaxpr, and where its outputs come from."""
    known = dict(zip(jaxpr.invars, sources, strict=True))
    lookups = [lookup for *_, found in self._walk(jaxpr, known) for lookup in found]
    return lookups, _sources(jaxpr.outvars, known)

  def _equation(self, eqn: Any, sources: list[Source | None]) -> Followed:
    """The lookups of one equation, and where its outputs come from."""
    primitive, name = eqn.primitive, eqn.primitive.name
    own = [s for s in sources if s is not None and s.owner is not None]
    if primitive is lookup_tap_p:
      source = sources[eqn.params["number"]]
      if source is None:
        self.outside.append(eqn)
      if source is None or source.owner is None:
        return [], []
      if eqn.params["batched"]:
        _refuse(record_of(eqn), "vmap")
      return [Lookup([v.aval for v in eqn.outvars], record_of(eqn), source.owner)], []
    if primitive is table_read_p:
      if own and eqn.params["purpose"] in _READ:
        raise self.error(own[0], _READ[eqn.params["purpose"]])
      return [], []
    followed = self._inner(eqn, sources)
    if followed is not None:
      lookups, outputs = followed
      if lookups and name not in (*_INLINED, *_REMAT, "cond"):
        _refuse(lookups[0].record, f"a JAX transformation ({name})")
      self.rereads |= bool(lookups) and name in _REMAT
      return lookups, outputs
    if name in _UNCHANGED:
      return [], sources[:1]
    if own:
      for inner in _equations(eqn):
        if inner.primitive is lookup_tap_p:
          _refuse(record_of(inner), f"a JAX transformation ({name})")
      raise self.error(own[0], _COMPUTED_WITH)
    return [], []

  def _inner(self, eqn: Any, sources: list[Source | None]) -> Followed | None:
    """What is inside of an equation whose inputs are those of a jaxpr in it; None for others."""
    name, params, subs = eqn.primitive.name, eqn.params, list(_sub_jaxprs(eqn.params))
    if name == "cond":
      found, outputs = zip(*(self._follow(sub, sources[1:]) for sub in subs), strict=True)
      same = [of[0] if len(set(of)) == 1 else None for of in zip(*outputs, strict=True)]
      return list(itertools.chain(*found)), same
    if name in (*_INLINED, *_REMAT, *_CUSTOM) and subs:
      return self._follow(subs[0], sources)
    if name == "scan":
      consts, carry = compat.scan_sizes(params)
      if any(source is not None for source in sources[consts + carry :]):
        return None  # scanned over, row by row: refused
      before = sources[consts : consts + carry]
      lookups, after = self._follow(subs[0], sources)
    elif name == "while":
      of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
      before = sources[of_cond + of_body :]
      in_condition = self._follow(params["cond_jaxpr"].jaxpr, [*sources[:of_cond], *before])[0]
      lookups, after = self._follow(params["body_jaxpr"].jaxpr, sources[of_cond:])
      lookups += in_condition
    else:
      return None
    # A carry is what it was before the loop if a round of it leaves it as it was.
    same = [x if x == y else None for x, y in zip(before, after, strict=False)]
    return lookups, same

  # --- running ------------------------------------------------------------------------------------

  def _run(self, jaxpr: Any, consts: Any, args: Any, sources: Any, feeds: list[Feed]) -> Run:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda v: v.val if isinstance(v, jax_internals.Literal) else env[v]
    plain: list[Any] = []  # equations that wait to be evaluated together
    made: list[Lookup] = []
    for eqn, inputs, lookups in self._walk(jaxpr, dict(zip(jaxpr.invars, sources, strict=True))):
      if not lookups:
        plain.append(eqn)
        continue
      _evaluate(jaxpr, plain, env)
      plain, own = [], feeds[len(made) : len(made) + len(lookups)]
      with eqn.ctx.manager:
        out, these = self._enter(eqn, [read(v) for v in eqn.invars], inputs, lookups, own)
      env.update(zip(eqn.outvars, out, strict=True))
      made += these
    _evaluate(jaxpr, plain, env)
    return [read(v) for v in jaxpr.outvars], made

  def _enter(
    self, eqn: Any, values: list[Any], sources: Any, lookups: list[Lookup], feeds: list[Feed]
  ) -> Run:
    """Runs one equation with lookups in it."""
    name, params = eqn.primitive.name, eqn.params
    if eqn.primitive is lookup_tap_p:
      return _tapped(eqn, values, lookups[0].owner, feeds[0])
    if name in _INLINED:
      closed = next(p for p in params.values() if isinstance(p, jax_internals.ClosedJaxpr))
      return self._run(closed.jaxpr, closed.consts, values, sources, feeds)
    if name in _REMAT:
      inner = lambda values, feeds: self._run(params["jaxpr"], (), values, sources, feeds)
      again = jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])
      return again(values, feeds)
    if feeds[0].taps is None or feeds[0].ahead is not None:
      table = lookups[0].record.tables[0]
      raise ValueError(
        f"A lookup of table {table!r} is in one branch of a conditional: which one is not known "
        "ahead. Look up outside of it, or train without embed.look_ahead."
      )
    numbers = [len(self._follow(x.jaxpr, sources[1:])[0]) for x in params["branches"]]

    def branch(closed, start, end, operands, feeds):
      out, made = self._run(closed.jaxpr, closed.consts, operands, sources[1:], feeds[start:end])
      return out, [*map(_unused, lookups[:start]), *made, *map(_unused, lookups[end:])]

    ends = list(itertools.accumulate(numbers))
    branches = [
      functools.partial(branch, closed, end - number, end)
      for closed, number, end in zip(params["branches"], numbers, ends, strict=True)
    ]
    index, *operands = values
    return jax.lax.switch(index, branches, operands, feeds)


def _sources(variables: Sequence[Any], known: Sources) -> list[Source | None]:
  is_literal = lambda v: isinstance(v, jax_internals.Literal)
  return [None if is_literal(v) else known.get(v) for v in variables]


def _equations(eqn: Any) -> Iterator[Any]:
  """The equations inside of one, at any depth."""
  for sub in _sub_jaxprs(eqn.params):
    for inner in sub.eqns:
      yield inner
      yield from _equations(inner)


def _evaluate(jaxpr: Any, eqns: list[Any], env: dict[Any, Any]) -> None:
  """Evaluates equations of a jaxpr, and adds what they define to the values of its variables."""
  if not eqns:
    return
  made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, jax_internals.DropVar)]
  known = set(made)
  reads = [v for eqn in eqns for v in eqn.invars if not isinstance(v, jax_internals.Literal)]
  inputs = list(dict.fromkeys(v for v in reads if v not in known))
  plain = jaxpr.replace(constvars=[], invars=inputs, outvars=made, eqns=eqns)
  f = jax_internals.jaxpr_as_fun(jax_internals.ClosedJaxpr(plain, []))
  env.update(zip(made, f(*(env[v] for v in inputs)), strict=True))


def _tapped(eqn: Any, values: list[Any], owner: Owner, feed: Feed) -> Run:
  """A lookup whose activations have taps, unless the feed has none."""
  number = eqn.params["number"]
  record = jax.tree.unflatten(eqn.params["treedef"], values[number + 1 :])
  activations = mesh.settled(list(values[:number]) if feed.ahead is None else feed.ahead)
  if feed.taps is None:
    return activations, [Lookup(activations, record, owner)]
  # Tapped again, for a loss around this one that is differentiated as well.
  activations = lookup_tap_p.bind(*activations, *values[number:], **eqn.params)
  return list(map(attach, activations, feed.taps)), [Lookup(None, record, owner)]


def _unused(lookup: Lookup) -> Lookup:
  """A lookup that was not made: its record has the same shapes and no id."""
  zeros = lambda x: mesh.like(jnp.zeros(x.shape, x.dtype), x)
  record = jax.tree.map(zeros, lookup.record).unused()
  return Lookup(None, record, lookup.owner)
