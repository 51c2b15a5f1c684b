"""`value_and_grad`: the loss traced once, then run with a tap at every lookup.

The traced loss is a program (a jaxpr) whose inputs are the parameters and the tables of the model,
and in which every lookup is marked. A lookup belongs to the model if the table it reads is one of
those inputs, by whatever way it got there: nested modules, `nnx.jit`, a model that was rebuilt from
its state. Running the program with a tap at each of these lookups, and differentiating with respect
to the parameters and the taps, gives dense gradients and the gradients of all activations; the ids
behind them come out too. Every other use of a table is an error, as is a lookup where a tap cannot
work, so that no gradient is lost. This file is the only one that reads jaxprs.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core as jex_core

from embed.engine import lookup
from embed.engine import mesh as sharding
from embed.engine.exchange import Call
from embed.engine.lookup import Owner
from embed.engine.stack import Stack
from embed.gradients import Grads, Rows
from embed.layer import SlotVariable, SparseEmbed, Table, changing

_INLINED = ("jit", "pjit", "closed_call", "core_call")  # run in place
_REMAT = ("checkpoint", "remat", "remat2")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_UNCHANGED = ("sharding_constraint", "reshard", "copy", "copy_p")  # the table itself comes out
_STORED = nnx.Any(Table, SlotVariable)


class _Source(NamedTuple):
  """The Variable that an input of the traced loss comes from."""

  owner: Owner | None  # None: of another argument than the model
  name: str  # "parameters" or a slot


class _Mark(NamedTuple):
  """A lookup in the model's tables: what it returned, and the shapes of what it read."""

  owner: Owner
  activations: list[Any]  # abstract values
  reads: lookup.Reads  # of ShapeDtypeStructs


class _Part(NamedTuple):
  """One equation with lookups of the model in it, or a run of equations without."""

  eqns: list[Any]
  marks: list[_Mark]
  inner: list["_Scope"]


class _Scope(NamedTuple):
  """A jaxpr, annotated: its equations in parts, its lookups, and where its outputs come from."""

  jaxpr: Any
  parts: list[_Part]
  marks: list[_Mark]
  outputs: list[_Source | None]


def _sub_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(item, jex_core.ClosedJaxpr):
        yield item.jaxpr
      elif isinstance(item, jex_core.Jaxpr):
        yield item


def _reads_of(eqn: Any) -> lookup.Reads:
  struct = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=v.aval.sharding)
  leaves = [struct(v) for v in eqn.invars[eqn.params["number"] + 1 :]]
  return jax.tree.unflatten(eqn.params["treedef"], leaves)


def _refuse(eqn: Any, where: str) -> None:
  raise ValueError(
    f"A lookup of table {_reads_of(eqn).tables[0]!r} is under {where} inside the loss, where its "
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
_CHANGED = (
  "The rows of {name} were replaced inside the loss, as by load_tables, or their layer was: that "
  "would be lost. Replace them outside."
)


class _Annotator:
  """Follows tables from the inputs of a jaxpr to the lookups that read them."""

  def __init__(self, stacks: dict[Owner, Stack]):
    self.stacks = stacks
    self.outside: list[Any] = []  # lookups in tables that are not inputs

  def error(self, source: _Source, message: str) -> ValueError:
    """With the tables and the layer of a source in place of `name`."""
    owner = source.owner
    assert owner is not None
    layer = f"the SparseEmbed at {owner.path!r}" if owner.path else "the SparseEmbed"
    tables = ", ".join(map(repr, self.stacks[owner].names))
    return ValueError(message.format(name=f"{tables} in {layer}"))

  def scope(self, jaxpr: Any, sources: Sequence[_Source | None]) -> _Scope:
    known = {v: s for v, s in zip(jaxpr.invars, sources, strict=True) if s is not None}
    of = lambda v: None if isinstance(v, jex_core.Literal) else known.get(v)
    parts: list[_Part] = []
    for eqn in jaxpr.eqns:
      part, outputs = self._equation(eqn, [of(v) for v in eqn.invars])
      known.update({v: s for v, s in zip(eqn.outvars, outputs, strict=False) if s is not None})
      if not part.marks and parts and not parts[-1].marks:
        parts[-1].eqns.append(eqn)
      else:
        parts.append(part)
    marks = [mark for part in parts for mark in part.marks]
    return _Scope(jaxpr, parts, marks, [of(v) for v in jaxpr.outvars])

  def _equation(self, eqn: Any, sources: list[_Source | None]):
    """The part of one equation, and where its outputs come from."""
    primitive, name = eqn.primitive, eqn.primitive.name
    if primitive is lookup.mark_p:
      return _Part([eqn], self._lookup(eqn, sources[eqn.params["number"]]), []), []
    if primitive is lookup.read_p:
      source, purpose = sources[0], eqn.params["purpose"]
      if source is not None and source.owner is not None and purpose in _READ:
        raise self.error(source, _READ[purpose])
      return _Part([eqn], [], []), []
    own = [s for s in sources if s is not None and s.owner is not None]
    inner, outputs = self._inner(eqn, sources)
    marks = [mark for scope in inner for mark in scope.marks]
    if marks and name not in (*_INLINED, *_REMAT, "cond"):
      _refuse(_first_mark(eqn), f"a JAX transformation ({name})")
    if inner:
      return _Part([eqn], marks, inner), outputs
    if name in _UNCHANGED:
      return _Part([eqn], [], []), sources[:1]
    if own:
      if _first_mark(eqn) is not None:
        _refuse(_first_mark(eqn), f"a JAX transformation ({name})")
      raise self.error(own[0], _COMPUTED_WITH)
    return _Part([eqn], [], []), []

  def _lookup(self, eqn: Any, source: _Source | None) -> list[_Mark]:
    if source is None:
      self.outside.append(eqn)
    if source is None or source.owner is None:
      return []
    if eqn.params["batched"]:
      _refuse(eqn, "vmap")
    return [_Mark(source.owner, [v.aval for v in eqn.outvars], _reads_of(eqn))]

  def _inner(self, eqn: Any, sources: list[_Source | None]):
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


def _carried(before: Sequence[_Source | None], body: _Scope) -> list[_Source | None]:
  """Where the carry of a loop comes from, if a round of it leaves it as it was."""
  pairs = zip(before, body.outputs, strict=False)
  return [source if source == after else None for source, after in pairs]


def _first_mark(eqn: Any) -> Any:
  for sub in _sub_jaxprs(eqn.params):
    for inner in sub.eqns:
      if inner.primitive is lookup.mark_p:
        return inner
      deeper = _first_mark(inner)
      if deeper is not None:
        return deeper
  return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Feed:
  """What a lookup is given: a tap for each of its activations, and these where they were made
  ahead. None for taps: they are not needed."""

  taps: list[jax.Array] | None
  ahead: list[jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Lookup:
  """A lookup that was run: what it returned, for one without taps, what it read, and of what."""

  activations: list[jax.Array] | None
  reads: lookup.Reads
  owner: Owner = dataclasses.field(metadata={"static": True})


Run = tuple[list[Any], list[_Lookup]]


def _run(scope: _Scope, consts: Any, args: Any, feeds: list[_Feed]) -> Run:
  """Evaluates a jaxpr with a feed for every lookup; returns its outputs and the lookups."""
  jaxpr = scope.jaxpr
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, jex_core.Literal) else env[v]
  records: list[_Lookup] = []
  for part in scope.parts:
    if not part.marks:
      inputs, outputs = _boundary(part.eqns)
      plain = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=part.eqns)
      out = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(plain, []))(*map(read, inputs))
    else:
      (eqn,), number = part.eqns, len(part.marks)
      outputs = eqn.outvars
      with eqn.ctx.manager:
        out, made = _run_marked(part, [read(v) for v in eqn.invars], feeds[:number])
      feeds = feeds[number:]
      records += made
    env.update(zip(outputs, out, strict=True))
  return [read(v) for v in jaxpr.outvars], records


def _boundary(eqns: list[Any]) -> tuple[list[Any], list[Any]]:
  """The variables that a run of equations reads from outside, and those that it defines."""
  made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, jex_core.DropVar)]
  known = set(made)
  reads = [v for eqn in eqns for v in eqn.invars if not isinstance(v, jex_core.Literal)]
  return list(dict.fromkeys(v for v in reads if v not in known)), made


def _run_marked(part: _Part, values: list[Any], feeds: list[_Feed]) -> Run:
  """One equation with lookups in it."""
  eqn, name = part.eqns[0], part.eqns[0].primitive.name
  if eqn.primitive is lookup.mark_p:
    number, feed, owner = eqn.params["number"], feeds[0], part.marks[0].owner
    reads = jax.tree.unflatten(eqn.params["treedef"], values[number + 1 :])
    activations = sharding.settled(list(values[:number]) if feed.ahead is None else feed.ahead)
    if feed.taps is None:
      return activations, [_Lookup(activations, reads, owner)]
    # Marked again, for a loss around this one that is differentiated as well.
    activations = lookup.mark_p.bind(*activations, *values[number:], **eqn.params)
    return list(map(lookup.attach, activations, feed.taps)), [_Lookup(None, reads, owner)]
  if name in _INLINED:
    closed = next(p for p in eqn.params.values() if isinstance(p, jex_core.ClosedJaxpr))
    return _run(part.inner[0], closed.consts, values, feeds)
  if name in _REMAT:
    run = lambda values, feeds: _run(part.inner[0], (), values, feeds)
    again = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return again(values, feeds)
  if feeds[0].taps is None or feeds[0].ahead is not None:
    table = part.marks[0].reads.tables[0]
    raise ValueError(
      f"A lookup of table {table!r} is in one branch of a conditional: which one is not known "
      "ahead. Look up outside of it, or train without embed.look_ahead."
    )
  index, *operands = values
  branches = _branches(part.inner, [closed.consts for closed in eqn.params["branches"]])
  return jax.lax.switch(index, branches, operands, feeds)


def _branches(scopes: list[_Scope], consts: list[Any]) -> list[Callable[..., Run]]:
  """The branches of a conditional, each recording the others' lookups as not made."""

  def run(i, operands, feeds):
    start = sum(len(scope.marks) for scope in scopes[:i])
    own = feeds[start:][: len(scopes[i].marks)]
    out, made = _run(scopes[i], consts[i], operands, own)
    unused = lambda mark: _Lookup(None, _unused(mark), mark.owner)
    records = [made if s is scopes[i] else [unused(m) for m in s.marks] for s in scopes]
    return out, [record for branch in records for record in branch]

  return [functools.partial(run, i) for i in range(len(scopes))]


def _unused(mark: _Mark) -> lookup.Reads:
  """What a lookup that was not made read: nothing."""
  zeros = jax.tree.map(sharding.zeros_like_type, mark.reads)
  none = lambda ids: jnp.full_like(ids, jnp.iinfo(ids.dtype).max)
  parts = tuple(dataclasses.replace(occ, ids=none(occ.ids)) for occ in zeros.parts)
  route = None if zeros.route is None else zeros.route.unused()
  return dataclasses.replace(zeros, parts=parts, route=route)


# --- the model around it -------------------------------------------------------------------------


def sparse_embeds(model: Any) -> dict[str, SparseEmbed]:
  """Every `SparseEmbed` of a model by its path, "a/b"; a shared one under its first path.

  Raises:
    ValueError: if two have one path, a key of an `nnx.Dict` having a "/" in it.
  """
  layers: dict[str, SparseEmbed] = {}
  for path, module in nnx.iter_modules(model):
    if isinstance(module, SparseEmbed):
      name = "/".join(map(str, path))
      if name in layers:
        raise ValueError(
          f"Two SparseEmbed layers of the model have the path {name!r}. Rename one of the keys "
          'that have a "/" in them.'
        )
      layers[name] = module
  return layers


def row_keys(model: Any) -> dict[str, tuple[SparseEmbed, str]]:
  """The module and table of each key of `Grads.rows` and of checkpoints.

  Raises:
    ValueError: if two tables of the model have one key.
  """
  keys: dict[str, tuple[SparseEmbed, str]] = {}
  paths: dict[str, str] = {}
  for path, module in sparse_embeds(model).items():
    for name in module.spec.tables:
      key = Owner(path, name).key
      if key in keys:
        raise ValueError(
          f"Two tables of the model have the key {key!r} of gradients and checkpoints: table "
          f"{keys[key][1]!r} of the layer at {paths[key]!r}, and table {name!r} of the layer at "
          f"{path!r}. Rename one of the tables, in its TableConfig."
        )
      keys[key], paths[key] = (module, name), path
  return keys


def _is_node(value: Any) -> bool:
  return isinstance(value, nnx.Pytree)


def _has_node(arg: Any) -> bool:
  return any(map(_is_node, jax.tree.leaves(arg, is_leaf=_is_node)))


def _refuse_sharing(model: nnx.Module, nodes: dict[Any, Any]) -> None:
  """A layer that the loss gets twice would be two copies, one of them not differentiated."""
  own = {id(module) for module in sparse_embeds(model).values()}
  for name, node in nodes.items():
    for _, module in nnx.iter_modules(node):
      if id(module) in own:
        raise ValueError(
          f"Argument {name!r} of the loss holds a SparseEmbed of the model, whose row gradients "
          "from there would be lost. Use the one inside the model."
        )


class _Split(NamedTuple):
  """An NNX object taken apart, its tables and slots as a list of arrays."""

  graphdef: Any
  states: tuple[Any, ...]
  stored: list[tuple[Any, nnx.Variable]]  # (path, Variable)

  @classmethod
  def of(cls, node: Any, *filters: Any) -> "_Split":
    graphdef, stored, *states = nnx.split(node, _STORED, *filters, ...)
    return cls(graphdef, tuple(states), list(nnx.to_flat_state(stored)))

  @property
  def arrays(self) -> list[jax.Array]:
    return [variable.get_value() for _, variable in self.stored]

  def merge(self, arrays: Sequence[jax.Array], *states: Any) -> Any:
    """A copy with other arrays and, first of the states, others."""
    pairs = zip(self.stored, arrays, strict=True)
    stored = nnx.from_flat_state([(path, v.replace(array)) for (path, v), array in pairs])
    return nnx.merge(self.graphdef, stored, *states, *self.states[len(states) :], copy=True)

  def sources(self, layers: dict[str, SparseEmbed]) -> list[_Source]:
    """Where each array comes from; layers are those of the model by path, none for others."""
    of_layers = {
      (path, stack, name): _Source(Owner(path, stack), name)
      for path, layer in layers.items()
      for stack, variables in layer.arrays.items()
      for name in variables
    }
    # What is in no layer, such as an average of a table that a module keeps, is an ordinary array.
    return [of_layers.get(_array_key(path), _Source(None, "")) for path, _ in self.stored]


def _array_key(path: tuple[Any, ...]) -> tuple[str, str, str]:
  """Path of the layer, stack and name of an array, from its path in the model's state."""
  names = list(map(str, path))
  return "/".join(names[:-3]), "".join(names[-2:-1]), names[-1]


class _Loss:
  """A loss traced at a model and arguments: a program of the model's parameters."""

  def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, model: Any, args, kwargs):
    if not isinstance(model, nnx.Module):
      raise TypeError(
        "The loss is differentiated with respect to its first argument, which must be an "
        f"nnx.Module. Got {type(model)}."
      )
    inputs = dict(enumerate(args)) | kwargs
    nodes = {i: arg for i, arg in inputs.items() if _has_node(arg)}
    _refuse_sharing(model, nodes)
    self.model, self.nodes = model, nodes
    self.layers, self.stacks = sparse_embeds(model), _stacks(model)
    whole = _Split.of(model, nnx.Param)
    split_nodes = {i: _Split.of(arg) for i, arg in nodes.items()}
    self.params, self.stored = whole.states[0], whole.arrays
    self.stored_of_nodes = {i: split.arrays for i, split in split_nodes.items()}
    inputs = self._without_types({i: x for i, x in inputs.items() if i not in nodes})

    def pure(params, stored, stored_of_nodes):
      copy = whole.merge(stored, params)
      merged = {i: split.merge(stored_of_nodes[i]) for i, split in split_nodes.items()}
      given = inputs | merged
      out = loss_fn(copy, *(given[i] for i in range(len(args))), **{k: given[k] for k in kwargs})
      loss, aux = _checked(out, has_aux)
      changed = nnx.state(copy, nnx.Not(nnx.Any(nnx.Param, _STORED)))
      after = [v.get_value() for _, v in nnx.to_flat_state(nnx.state(copy, _STORED))]
      return loss, aux, changed, {i: nnx.state(arg) for i, arg in merged.items()}, after

    trace = jax.make_jaxpr(pure, return_shape=True)
    with sharding.explained():
      self._closed, self._shapes = trace(*self._inputs(self.params))
    self._annotate(
      whole.sources(self.layers), [s for x in split_nodes.values() for s in x.sources({})]
    )

  def _inputs(self, params: Any) -> tuple[Any, ...]:
    return params, self.stored, self.stored_of_nodes

  def _without_types(self, inputs: Any) -> Any:
    """Inputs on Explicit axes as inputs on Auto ones, if the model is not on Explicit axes."""
    spread = any(stack.placement is not None for stack in self.stacks.values())
    typed = sharding.current_mesh() is not None or sharding.is_explicit((self.params, self.stored))
    return sharding.without_types(inputs) if spread and not typed else inputs

  def _annotate(self, own: list[_Source], of_nodes: list[_Source]) -> None:
    """Finds the lookups; raises for what would lose a gradient."""
    annotator = _Annotator(self.stacks)
    params = [None] * len(jax.tree.leaves(self.params))
    self.scope = annotator.scope(self._closed.jaxpr, [*params, *own, *of_nodes])
    self.marks = self.scope.marks
    if own:
      for source, after in zip(own, self.scope.outputs[-len(own) :], strict=True):
        if source != after:
          raise annotator.error(source, _CHANGED)
    _warn_about_outside_layers(annotator.outside, self.layers)

  def run(self, params: Any, feeds: list[_Feed]) -> tuple[Any, list[_Lookup]]:
    """`(loss, aux, state of the model, state of other nodes)`, and the lookups."""
    leaves = jax.tree.leaves(self._inputs(params))
    out, records = _run(self.scope, self._closed.consts, leaves, feeds)
    out = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]  # no literals
    return jax.tree.unflatten(jax.tree.structure(self._shapes), out)[:-1], records

  def specs(self, lookups: Sequence[Any]) -> tuple[Any, ...]:
    """What each lookup's layer is: the same for copies of a layer, and for layers of one config."""
    return tuple(self.layers[made.owner.path]._spec for made in lookups)

  def update(self, changed: Any, node_states: dict[Any, Any]) -> None:
    """Keeps what the loss changed."""
    with changing("embed.value_and_grad, which keeps what the loss changes,"):
      nnx.update(self.model, changed)
      for i, node in self.nodes.items():
        nnx.update(node, node_states[i])


def _warn_about_outside_layers(eqns: Sequence[Any], layers: dict[str, SparseEmbed]) -> None:
  """Warns of lookups in layers that the loss was not given.

  Raises:
    ValueError: for the model around the loss, which is a mistake in any case.
  """
  names: dict[Any, list[str]] = {}
  for eqn in eqns:
    names.setdefault(eqn.params["layer"], []).extend(_reads_of(eqn).tables)
  for layer, tables in names.items():
    table = ", ".join(map(repr, dict.fromkeys(tables)))
    if any(layer.ref() is module for module in layers.values()):
      raise ValueError(
        f"The loss looks up table {table} in the model around it, not in the one that it gets as "
        "its first argument, so no gradient would come back. Use the argument."
      )
    if layer.trains:
      warnings.warn(
        f"The loss looks up table {table} in a SparseEmbed that is not in its first argument: the "
        "rows are constants here and get no gradient. Use the layer in the model that the loss "
        "gets. To keep the layer fixed, give its tables optimizer=embed.frozen(), or pass it to "
        "the loss as another argument.",
        stacklevel=5,
      )


def _checked(out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
  """The loss and aux that a loss function returned."""
  if isinstance(out, tuple) != has_aux:
    wanted = "(loss, aux)" if has_aux else "a scalar; for (loss, aux) pass has_aux=True"
    raise TypeError(f"With has_aux={has_aux} the loss must return {wanted}. Got {type(out)}.")
  loss, aux = out if has_aux else (out, None)
  dtype = jnp.result_type(loss)
  if jnp.shape(loss) or not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"The loss must be a float scalar, got shape {jnp.shape(loss)} of {dtype}.")
  return loss, aux


def value_and_grad(
  loss_fn: Callable[..., Any], has_aux: bool = False, *, ahead: "Ahead | None" = None
) -> Callable[..., Any]:
  """The value of a loss and its gradients: dense ones of every `nnx.Param`, rows of tables.

  Args:
    loss_fn: `f(model, *args)` returning a scalar, or `(scalar, aux)`. It is traced, as under jit:
      `aux` must be arrays, and values cannot be branched on in Python.
    has_aux: whether it returns `(scalar, aux)`.
    ahead: the lookups of this call, if `look_ahead` has made them already.

  Returns:
    `f(model, *args)` returning `(loss, Grads)`, or `((loss, aux), Grads)`. Changes that the loss
    makes to the model's other state (batch statistics, random counters, `report`) are kept; changes
    to any `nnx.Param` and to Python attributes are not. Where `ahead` is of other ids than those of
    this call, the loss is NaN and all gradients are 0.

  Raises:
    ValueError: when called, if a lookup is where its gradient would be lost (scan, vmap, ...), if
      rows are read, replaced or updated inside other than by a lookup, if the loss looks up in the
      model outside rather than in its first argument, or if `ahead` is of another loss or model or
      of inputs of another shape.
    TypeError: if the first argument is no `nnx.Module`, or the loss is not a float scalar.

  Warns:
    UserWarning: if the loss looks up in a layer that it was not given: its rows are constants.

  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> loss, grads = embed.value_and_grad(lambda m, ids: m(ids).sum())(layer, jnp.array([3, 3]))
  >>> grads.rows["t"].ids.tolist(), grads.rows["t"].values.tolist()
  ([3, 10], [[2.0, 2.0], [0.0, 0.0]])
  """

  @functools.wraps(loss_fn)
  def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    traced = _Loss(loss_fn, has_aux, model, args, kwargs)
    stacks, marks = traced.stacks, traced.marks
    early = [None] * len(marks) if ahead is None else ahead._of(traced)
    taps = [_taps(stacks, mark) for mark in marks]

    def tapped(params, taps, early):
      feeds = [
        _Feed(tap, None if made is None else made.activations)
        for tap, made in zip(taps, early, strict=True)
      ]
      (loss, *rest), found = traced.run(params, feeds)
      if ahead is not None:
        loss = jnp.where(_same_ids(found, early), loss, jnp.nan)
        found = early
      return loss, (rest, [x.reads for x in found])

    differentiate = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
    with sharding.explained():
      value, (dense, cotangents) = differentiate(traced.params, taps, early)
    loss, ((aux, *states), reads) = value
    traced.update(*states)
    grads = Grads(dense, _rows(stacks, marks, cotangents, reads))
    return ((loss, aux), grads) if has_aux else (loss, grads)

  return wrapped


def _taps(stacks: dict[Owner, Stack], mark: _Mark) -> list[jax.Array]:
  """Zeros for each activation of a lookup, with its sharding."""
  placement = stacks[mark.owner].placement
  if placement is None:
    return [jnp.zeros(act.shape, act.dtype) for act in mark.activations]
  return [placement.zeros(act) for act in mark.activations]


def _stacks(model: Any) -> dict[Owner, Stack]:
  """Every stack of a model."""
  return {
    Owner(path, stack.name): stack
    for path, module in sparse_embeds(model).items()
    for stack in module.spec.stacks.values()
  }


def _rows(stacks: dict[Owner, Stack], marks, cotangents, all_reads) -> Rows:
  """Every table's entry, from the activation gradients of all lookups of it."""
  sent: dict[Owner, list[Call]] = {owner: [] for owner in stacks}
  for mark, grads, reads in zip(marks, cotangents, all_reads, strict=True):
    if any(occ.ids.size for occ in reads.parts):
      sent[mark.owner].append(Call(tuple(grads), reads))
  return Rows(sent, stacks)


# --- lookups ahead of their step -----------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
  """The lookups of a loss, made ahead of its step by `look_ahead`: a pytree, to carry along.

  It goes in and out of `nnx.jit`; `value_and_grad(..., ahead=...)` takes it.
  """

  lookups: tuple[_Lookup, ...]
  specs: tuple[Any, ...] = dataclasses.field(metadata={"static": True})  # of each one's layer

  def _of(self, traced: _Loss) -> list[_Lookup]:
    """The lookups, checked against those of the loss that they are given to."""
    marks = traced.marks
    shapes = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    wanted = [_Lookup(mark.activations, mark.reads, mark.owner) for mark in marks]
    if shapes(list(self.lookups)) != shapes(wanted) or self.specs != traced.specs(marks):
      raise ValueError(
        "`ahead` is of another loss or model, or of inputs of another shape. Write "
        "embed.look_ahead(loss_fn)(model, *args) with the loss and the arguments of the step that "
        "it is for; a last batch of another size needs a look ahead of its own."
      )
    return list(self.lookups)


def _same_ids(found: list[_Lookup], early: list[_Lookup]) -> jax.Array:
  same = jnp.bool_(True)
  for mine, theirs in zip(found, early, strict=True):
    for a, b in zip(mine.reads.parts, theirs.reads.parts, strict=True):
      same &= jnp.all(a.ids == b.ids)
      if a.segments is not None:
        same &= jnp.all(a.segments == b.segments)
  return same


def look_ahead(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Ahead]:
  """Makes the lookups of a loss ahead of the step that needs them, to overlap with another step.

  A step of pipelined training computes the gradients of this batch, looks up the next batch, and
  updates: the lookup needs nothing of the gradients, so it runs beside them, and the exchange of
  rows between devices hides behind dense work. It sees the tables without this step's update:
  activations of step t are those after the updates 0 .. t - 2. Updates are all applied, once each,
  in order, to the newest tables (TensorFlow's `pipeline_execution_with_tensor_core`).

  The first look ahead has no step to hide behind, the last step looks no further ahead; a step
  without `ahead` is an ordinary one. Before a checkpoint or an evaluation take a step that does not
  look further, and begin again after it: then nothing is pending.

  Args:
    loss_fn: as of `value_and_grad`, with the same inputs for the same lookups.
    has_aux: likewise.

  Returns:
    `f(model, *args)` returning the `Ahead` for `value_and_grad(loss_fn, ahead=...)(model, *args)`.
    Nothing of the model changes. Under jit, what the lookups do not need is not computed. The
    user's weights are those of the look ahead, as the ids are. Where a lookup depends on random
    state, look ahead once for each step, after the step before it has drawn.

  Raises:
    ValueError: as `value_and_grad`, and for lookups in a branch of a conditional.

  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> model = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> optimizer = embed.Optimizer(model, optax.sgd(0.1))
  >>> loss_fn = lambda model, ids: jnp.sum(model(ids) ** 2)
  >>> @nnx.jit(donate_argnames=("model", "optimizer"))
  ... def train_step(model, optimizer, ahead, ids, next_ids):
  ...   loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, ids)
  ...   ahead = embed.look_ahead(loss_fn)(model, next_ids)  # before the update
  ...   optimizer.update(model, grads)
  ...   return loss, ahead
  >>> batches = jnp.array([[3, 3], [3, 4], [5, 5]])
  >>> ahead = embed.look_ahead(loss_fn)(model, batches[0])
  >>> for ids, next_ids in zip(batches[:-1], batches[1:]):
  ...   loss, ahead = train_step(model, optimizer, ahead, ids, next_ids)
  >>> loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, batches[-1])
  >>> optimizer.update(model, grads)
  """

  @functools.wraps(loss_fn)
  def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Ahead:
    traced = _Loss(loss_fn, has_aux, model, args, kwargs)
    run = lambda params: traced.run(params, [_Feed(None)] * len(traced.marks))[1]
    found = run(traced.params)
    modules = sparse_embeds(model)
    ordered = []
    for made in found:
      assert made.activations is not None
      rows = modules[made.owner.path].arrays[made.owner.name]["parameters"]
      table, placement = rows.get_value(), traced.stacks[made.owner].placement
      if placement is not None:
        table = placement.put(table, placement.array(2))
      activations, table = lookup.in_order(made.activations, table, made.reads)
      with changing("embed.look_ahead"):
        rows.set_value(table)
      ordered.append(dataclasses.replace(made, activations=activations))
    return Ahead(tuple(ordered), traced.specs(ordered))

  return wrapped
