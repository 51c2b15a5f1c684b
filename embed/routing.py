"""`value_and_grad`: the loss traced once, then run with a tap at every lookup.

The traced loss is a program (a jaxpr) in which every lookup is marked. Running it with the marks
replaced by taps, and differentiating with respect to the parameters and the taps, gives dense
gradients and the gradients of all activations; the ids behind them come out beside. A mark cannot
be missed, wherever the module was called from, so a lookup where taps cannot work is an error and
never a gradient lost. This file is the only one that reads jaxprs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core as jex_core

from embed import lookup
from embed.exchange import Call
from embed.grads import Grads, Rows
from embed.module import SlotVariable, SparseEmbed, Table, changing
from embed.stack import Stack

_INLINED = ("jit", "pjit", "closed_call", "core_call")  # run in place
_REMAT = ("checkpoint", "remat", "remat2")


class _Mark(NamedTuple):
  """A lookup found in the loss: what it returns, and the shapes of what it read."""

  owner: lookup.Owner
  activations: list[Any]  # abstract values
  reads: lookup.Reads  # of ShapeDtypeStructs


def _sub_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(item, jex_core.ClosedJaxpr):
        yield item.jaxpr
      elif isinstance(item, jex_core.Jaxpr):
        yield item


def _struct(var: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _refuse(eqn: Any, where: str) -> None:
  table = _reads_of(eqn).tables[0]
  raise ValueError(
    f"A lookup of table {table!r} is under {where} inside the loss, where its row gradient would "
    "be lost. Look up outside of it and pass the activations in. Several calls, nnx.jit, "
    "nnx.remat and nnx.cond are fine."
  )


def _reads_of(eqn: Any) -> lookup.Reads:
  leaves = [_struct(v) for v in eqn.invars[eqn.params["number"] :]]
  return jax.tree.unflatten(eqn.params["treedef"], leaves)


def _marks(jaxpr: Any) -> list[_Mark]:
  """The differentiated lookups of a jaxpr in the order in which `_run` meets them."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive is lookup.mark_p and eqn.params["owner"].path is not None:
      if eqn.params["batched"]:
        _refuse(eqn, "vmap")
      activations = [v.aval for v in eqn.outvars]
      found.append(_Mark(eqn.params["owner"], activations, _reads_of(eqn)))
    elif eqn.primitive is lookup.read_p and eqn.params["owner"].path is not None:
      raise ValueError(
        "sparse_embed.tables (or .variables) was read inside the loss, where no gradient comes "
        f"back to table {eqn.params['owner'].name!r}. Write sparse_embed.attend(query, "
        f"{eqn.params['owner'].name!r}) to score against its rows, or read it outside."
      )
    else:
      inner = [mark for sub in _sub_jaxprs(eqn.params) for mark in _marks(sub)]
      name = eqn.primitive.name
      if inner and name not in (*_INLINED, *_REMAT, "cond"):
        _refuse(_first_mark(eqn), f"a JAX transformation ({name})")
      found += inner
  return found


def _first_mark(eqn: Any) -> Any:
  for sub in _sub_jaxprs(eqn.params):
    for inner in sub.eqns:
      if inner.primitive is lookup.mark_p:
        return inner
      deeper = _first_mark(inner)
      if deeper is not None:
        return deeper
  return None


def _count_marks(eqn: Any) -> int:
  if eqn.primitive is lookup.mark_p:
    return int(eqn.params["owner"].path is not None)
  return sum(_count_marks(inner) for sub in _sub_jaxprs(eqn.params) for inner in sub.eqns)


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
  owner: lookup.Owner = dataclasses.field(metadata={"static": True})


Run = tuple[list[Any], list[_Lookup]]


def _run(jaxpr: Any, consts: Any, args: Any, feeds: list[_Feed]) -> Run:
  """Evaluates a jaxpr with a feed for every mark; returns its outputs and the lookups."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, jex_core.Literal) else env[v]
  records: list[_Lookup] = []
  for eqns in _segments(jaxpr.eqns):
    marks = _count_marks(eqns[0])
    if not marks:
      inputs, outputs = _boundary(eqns)
      plain = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=eqns)
      out = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(plain, []))(*map(read, inputs))
    else:
      (eqn,), mine, feeds = eqns, feeds[:marks], feeds[marks:]
      outputs = eqn.outvars
      with eqn.ctx.manager:
        out, new = _run_marked(eqn, [read(v) for v in eqn.invars], mine)
      records += new
    env.update(zip(outputs, out, strict=True))
  return [read(v) for v in jaxpr.outvars], records


def _segments(eqns: Any) -> Iterator[list[Any]]:
  """Equations with lookups in them one by one, and the runs of others between them."""
  for marked, group in itertools.groupby(eqns, key=lambda eqn: bool(_count_marks(eqn))):
    if marked:
      yield from ([eqn] for eqn in group)
    else:
      yield list(group)


def _boundary(eqns: list[Any]) -> tuple[list[Any], list[Any]]:
  """The variables that a run of equations reads from outside, and those that it defines."""
  made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, jex_core.DropVar)]
  known = set(made)
  reads = [v for eqn in eqns for v in eqn.invars if not isinstance(v, jex_core.Literal)]
  return list(dict.fromkeys(v for v in reads if v not in known)), made


def _run_marked(eqn: Any, values: list[Any], feeds: list[_Feed]) -> Run:
  """One equation with lookups in it."""
  name = eqn.primitive.name
  if eqn.primitive is lookup.mark_p:
    number, feed = eqn.params["number"], feeds[0]
    reads = jax.tree.unflatten(eqn.params["treedef"], values[number:])
    activations = list(values[:number]) if feed.ahead is None else feed.ahead
    if feed.taps is None:
      return activations, [_Lookup(activations, reads, eqn.params["owner"])]
    record = _Lookup(None, reads, eqn.params["owner"])
    return list(map(lookup.attach, activations, feed.taps)), [record]
  if name in _INLINED:
    closed = next(p for p in eqn.params.values() if isinstance(p, jex_core.ClosedJaxpr))
    return _run(closed.jaxpr, closed.consts, values, feeds)
  if name in _REMAT:
    run = lambda values, feeds: _run(eqn.params["jaxpr"], (), values, feeds)
    again = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return again(values, feeds)
  if feeds[0].taps is None or feeds[0].ahead is not None:
    table = _reads_of(_first_mark(eqn)).tables[0]
    raise ValueError(
      f"A lookup of table {table!r} is in one branch of a conditional: which one is not known "
      "ahead. Look up outside of it, or train without embed.look_ahead."
    )
  index, *operands = values
  return jax.lax.switch(index, _branches(eqn.params["branches"]), operands, feeds)


def _branches(closed: Any) -> list[Callable[..., Run]]:
  """The branches of a conditional, each recording the others' lookups as not made."""
  marks = [_marks(branch.jaxpr) for branch in closed]

  def run(i, operands, feeds):
    start = sum(map(len, marks[:i]))
    out, mine = _run(closed[i].jaxpr, closed[i].consts, operands, feeds[start:][: len(marks[i])])
    unused = lambda mark: _Lookup(None, _unused(mark), mark.owner)
    records = [mine if j == i else [unused(m) for m in marks[j]] for j in range(len(marks))]
    return out, [record for branch in records for record in branch]

  return [functools.partial(run, i) for i in range(len(marks))]


def _unused(mark: _Mark) -> lookup.Reads:
  """What a lookup that was not made read: nothing."""
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), mark.reads)
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
      key = lookup.Owner(path, name).key
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
  mine = {id(module) for module in sparse_embeds(model).values()}
  for name, node in nodes.items():
    for _, module in nnx.iter_modules(node):
      if id(module) in mine:
        raise ValueError(
          f"Argument {name!r} of the loss holds a SparseEmbed of the model, whose row gradients "
          "from there would be lost. Use the one inside the model."
        )


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
    graphdef, params, *others = nnx.split(model, nnx.Param, ...)
    split_nodes = {i: nnx.split(arg) for i, arg in nodes.items()}

    def pure(params):
      copy = nnx.merge(graphdef, params, *others, copy=True)
      for path, module in sparse_embeds(copy).items():
        module._path = path
      merged = {i: nnx.merge(parts[0], parts[1], copy=True) for i, parts in split_nodes.items()}
      given = inputs | merged
      out = loss_fn(copy, *(given[i] for i in range(len(args))), **{k: given[k] for k in kwargs})
      loss, aux = _checked(out, has_aux)
      changed = nnx.state(copy, nnx.Not(nnx.Any(nnx.Param, Table, SlotVariable)))
      return loss, aux, changed, {i: nnx.state(arg) for i, arg in merged.items()}

    self._closed, self._shapes = jax.make_jaxpr(pure, return_shape=True)(params)
    self.model, self.params, self.nodes = model, params, nodes
    self.marks = _marks(self._closed.jaxpr)
    self.stacks = _stacks(model)

  def run(self, params: Any, feeds: list[_Feed]) -> tuple[Any, list[_Lookup]]:
    """`(loss, aux, state of the model, state of other nodes)`, and the lookups."""
    out, found = _run(self._closed.jaxpr, self._closed.consts, jax.tree.leaves(params), feeds)
    out = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]  # no literals
    return jax.tree.unflatten(jax.tree.structure(self._shapes), out), found

  def compiled(self, f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, under jit where eager JAX would not know the mesh."""
    placements = [s.placement for s in self.stacks.values()]
    needed = any(p is not None and p.needs_jit() for p in placements)
    return jax.jit(f, keep_unused=True) if needed else f

  def update(self, changed: Any, node_states: dict[Any, Any]) -> None:
    """Keeps what the loss changed."""
    with changing("embed.value_and_grad, which keeps what the loss changes,"):
      nnx.update(self.model, changed)
      for i, node in self.nodes.items():
        nnx.update(node, node_states[i])


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
    to any `nnx.Param` and to Python attributes are not. A model that the loss closes over, rather
    than gets as its first argument, is a constant. Where `ahead` is of other ids than those of this
    call, the loss is NaN and all gradients are 0.

  Raises:
    ValueError: when called, if a lookup is where its gradient would be lost (scan, vmap, ...), if
      `tables` is read inside, or if `ahead` is of another loss or of inputs of another shape.
    TypeError: if the first argument is no `nnx.Module`, or the loss is not a float scalar.

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
    early = [None] * len(marks) if ahead is None else ahead._of(marks)
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

    differentiate = traced.compiled(jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True))
    (loss, ((aux, *states), reads)), (dense, cotangents) = differentiate(traced.params, taps, early)
    traced.update(*states)
    grads = Grads(dense, _rows(stacks, marks, cotangents, reads))
    return ((loss, aux), grads) if has_aux else (loss, grads)

  return wrapped


def _taps(stacks: dict[str, Stack], mark: _Mark) -> list[jax.Array]:
  """Zeros for each activation of a lookup, with its sharding."""
  placement = stacks[mark.owner.key].placement
  if placement is None:
    return [jnp.zeros(act.shape, act.dtype) for act in mark.activations]
  return [placement.zeros(act) for act in mark.activations]


def _stacks(model: Any) -> dict[str, Stack]:
  """Every stack of a model, "<module path>/<stack>"."""
  return {
    lookup.Owner(path, stack.name).key: stack
    for path, module in sparse_embeds(model).items()
    for stack in module.spec.stacks.values()
  }


def _rows(stacks: dict[str, Stack], marks, cotangents, all_reads) -> Rows:
  """Every table's entry, from the activation gradients of all lookups of it."""
  sent: dict[str, list[Call]] = {key: [] for key in stacks}
  for mark, grads, reads in zip(marks, cotangents, all_reads, strict=True):
    if any(occ.ids.size for occ in reads.parts):
      sent[mark.owner.key].append(Call(tuple(grads), reads))
  return Rows(sent, stacks)


# --- lookups ahead of their step -----------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
  """The lookups of a loss, made ahead of its step by `look_ahead`: a pytree, to carry along.

  It goes in and out of `nnx.jit`; `value_and_grad(..., ahead=...)` takes it.
  """

  lookups: tuple[_Lookup, ...]

  def _of(self, marks: list[_Mark]) -> list[_Lookup]:
    """The lookups, checked against those of the loss that they are given to."""
    shapes = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    wanted = [_Lookup(mark.activations, mark.reads, mark.owner) for mark in marks]
    if shapes(list(self.lookups)) != shapes(wanted):
      raise ValueError(
        "`ahead` is of another loss, or of inputs of another shape. Write embed.look_ahead("
        "loss_fn)(model, *args) with the loss and the arguments of the step that it is for; a last "
        "batch of another size needs a look ahead of its own."
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
    found = traced.compiled(run)(traced.params)
    modules = sparse_embeds(model)
    ordered = []
    for made in found:
      assert made.owner.path is not None
      assert made.activations is not None
      rows = modules[made.owner.path].arrays[made.owner.name]["parameters"]
      activations, table = lookup.in_order(made.activations, rows.get_value(), made.reads)
      with changing("embed.look_ahead"):
        rows.set_value(table)
      ordered.append(dataclasses.replace(made, activations=activations))
    return Ahead(tuple(ordered))

  return wrapped
