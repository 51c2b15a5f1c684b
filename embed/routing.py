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
from embed.module import SlotVariable, SparseEmbed, Table
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


Taps = list[list[jax.Array]]  # one for each activation of each lookup
Run = tuple[list[Any], list[lookup.Reads]]


def _run(jaxpr: Any, consts: Any, args: Any, taps: Taps) -> Run:
  """Evaluates a jaxpr with a tap at every mark; returns its outputs and what was read."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, jex_core.Literal) else env[v]
  records: list[lookup.Reads] = []
  taps = list(taps)
  for eqns in _segments(jaxpr.eqns):
    marks = _count_marks(eqns[0])
    if not marks:
      inputs, outputs = _boundary(eqns)
      plain = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=eqns)
      out = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(plain, []))(*map(read, inputs))
    else:
      (eqn,), mine, taps = eqns, taps[:marks], taps[marks:]
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
  reads = [v for eqn in eqns for v in eqn.invars if not isinstance(v, jex_core.Literal)]
  return list(dict.fromkeys(v for v in reads if v not in set(made))), made


def _run_marked(eqn: Any, values: list[Any], taps: Taps) -> Run:
  """One equation with lookups in it."""
  name = eqn.primitive.name
  if eqn.primitive is lookup.mark_p:
    number = eqn.params["number"]
    reads = jax.tree.unflatten(eqn.params["treedef"], values[number:])
    return list(map(lookup.attach, values[:number], taps[0])), [reads]
  if name in _INLINED:
    closed = next(p for p in eqn.params.values() if isinstance(p, jex_core.ClosedJaxpr))
    return _run(closed.jaxpr, closed.consts, values, taps)
  if name in _REMAT:
    run = lambda values, taps: _run(eqn.params["jaxpr"], (), values, taps)
    again = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return again(values, taps)
  index, *operands = values
  return jax.lax.switch(index, _branches(eqn.params["branches"]), operands, taps)


def _branches(closed: Any) -> list[Callable[..., Run]]:
  """The branches of a conditional, each recording the others' lookups as not made."""
  marks = [_marks(branch.jaxpr) for branch in closed]

  def run(i, operands, taps):
    start = sum(map(len, marks[:i]))
    out, mine = _run(closed[i].jaxpr, closed[i].consts, operands, taps[start:][: len(marks[i])])
    records = [mine if j == i else [_unused(m) for m in marks[j]] for j in range(len(marks))]
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
  """Every `SparseEmbed` of a model by its path, "a/b"; a shared one under its first path."""
  return {
    "/".join(map(str, path)): module
    for path, module in nnx.iter_modules(model)
    if isinstance(module, SparseEmbed)
  }


def row_keys(model: Any) -> dict[str, tuple[SparseEmbed, str]]:
  """The module and table behind each key of `Grads.rows`."""
  return {
    f"{path}/{name}" if path else name: (module, name)
    for path, module in sparse_embeds(model).items()
    for name in module.spec.tables
  }


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


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
  """The value of a loss and its gradients: dense ones for `nnx.Param`s, rows for tables.

  Args:
    loss_fn: `f(model, *args)` returning a scalar, or `(scalar, aux)`. It is traced, as under jit:
      `aux` must be arrays, and values cannot be branched on in Python.
    has_aux: whether it returns `(scalar, aux)`.

  Returns:
    `f(model, *args)` returning `(loss, Grads)`, or `((loss, aux), Grads)`. Changes that the loss
    makes to the model's other state (batch statistics, random counters, `report`) are kept; changes
    to `nnx.Param`s and to Python attributes are not. A model that the loss closes over, rather than
    gets as its first argument, is a constant.

  Raises:
    ValueError: when called, if a lookup is where its gradient would be lost (scan, vmap, ...) or
      if `tables` is read inside. TypeError: if the first argument is no `nnx.Module`, or the loss
      is not a float scalar.

  >>> import embed, optax
  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> loss, grads = value_and_grad(lambda m, ids: m(ids).sum())(layer, jnp.array([3, 3]))
  >>> grads.rows["t"].ids.tolist(), grads.rows["t"].values.tolist()
  ([3, 10], [[2.0, 2.0], [0.0, 0.0]])
  """

  @functools.wraps(loss_fn)
  def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(model, nnx.Module):
      raise TypeError(
        "embed.value_and_grad differentiates with respect to its first argument, which must be "
        f"an nnx.Module. Got {type(model)}."
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
      if isinstance(out, tuple) != has_aux:
        wanted = "(loss, aux)" if has_aux else "a scalar; for (loss, aux) pass has_aux=True"
        raise TypeError(f"With has_aux={has_aux} the loss must return {wanted}. Got {type(out)}.")
      loss, aux = out if has_aux else (out, None)
      if jnp.shape(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
          f"The loss must be a float scalar, got shape {jnp.shape(loss)} of "
          f"{jnp.result_type(loss)}."
        )
      changed = nnx.state(copy, nnx.Not(nnx.Any(nnx.Param, Table, SlotVariable)))
      return loss, aux, changed, {i: nnx.state(arg) for i, arg in merged.items()}

    closed, shapes = jax.make_jaxpr(pure, return_shape=True)(params)
    marks = _marks(closed.jaxpr)
    stacks = _stacks(model)
    taps = [_taps(stacks, mark) for mark in marks]

    def tapped(params, taps):
      out, records = _run(closed.jaxpr, closed.consts, jax.tree.leaves(params), taps)
      out = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]  # no literals
      loss, *rest = jax.tree.unflatten(jax.tree.structure(shapes), out)
      return loss, (rest, records)

    differentiate = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
    if any(s.placement is not None and s.placement.needs_jit() for s in stacks.values()):
      differentiate = jax.jit(differentiate, keep_unused=True)  # for the mesh that they are on
    (loss, ((aux, changed, node_states), records)), (dense, cotangents) = differentiate(
      params, taps
    )
    nnx.update(model, changed)
    for i, arg in nodes.items():
      nnx.update(arg, node_states[i])
    grads = Grads(dense, _rows(stacks, marks, cotangents, records))
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


def _rows(stacks: dict[str, Stack], marks, cotangents, records) -> Rows:
  """Every table's entry, from the activation gradients of all lookups of it."""
  sent: dict[str, list[Call]] = {key: [] for key in stacks}
  for mark, grads, reads in zip(marks, cotangents, records, strict=True):
    if any(occ.ids.size for occ in reads.parts):
      sent[mark.owner.key].append(Call(tuple(grads), reads))
  return Rows(sent, stacks)
