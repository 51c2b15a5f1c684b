"""`value_and_grad`: a loss differentiated with respect to parameters and to zeros at every lookup.

A lookup inside the loss adds zeros, its **tap**, to its activations, and keeps what it looked
up, its **record**. Both are Variables of the layer, in its `variables.Tape`, so that Flax carries
them in and out of its transformations. The gradient of the tap is the gradient of the activations:
with the record, it gives all row gradients, in memory proportional to the batch. A first pass,
over shapes alone, finds the lookups.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from embed.engine.grads import ActivationGrads
from embed.engine.stack import StackSpec
from embed.engine.xla import is_traced
from embed.gradients import Grads, Owner, Rows
from embed.layer import SparseEmbed, layers_of, sparse_embeds
from embed.variables import LOSSES, Tap, Tape


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
  """Differentiates a loss with respect to every `nnx.Param`, and to the rows that it looks up.

  Lookups may be inside `nnx.jit`, `nnx.remat` or both branches of `nnx.cond`, if these get the
  model as an argument. The loss is traced twice; outside jit, an id out of range raises.

  Args:
    loss_fn: `f(model, *args, **kwargs)` returning a float scalar, or `(scalar, aux)`.
    has_aux: whether `loss_fn` returns `(scalar, aux)`.

  Returns:
    `f(model, *args, **kwargs)` returning `(loss, Grads)`, or `((loss, aux), Grads)`. Changes that
    the loss makes to the model's state (batch statistics, random counters, `report`) are kept. The
    loss is NaN if a lookup does not run exactly as often as it was traced.

  Raises:
    ValueError: when called, if the gradient of a lookup would be lost: under `jax.jit`, `vmap` or a
      loop, in a copy of the model, or in a layer that is in no argument; and if the loss
      reads, replaces or updates tables.
    TypeError: if the first argument is not an `nnx.Module`.

  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> loss, grads = embed.value_and_grad(lambda m, ids: m(ids).sum())(layer, jnp.array([3, 3]))
  >>> grads.rows["t"].ids.tolist(), grads.rows["t"].values.tolist()
  ([3, 10], [[2.0, 2.0], [0.0, 0.0]])
  """

  @functools.wraps(loss_fn)
  def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(model, nnx.Module):
      raise TypeError(
        "The loss is differentiated with respect to its first argument, which must be an "
        f"nnx.Module. Got {type(model)}."
      )
    layers = sparse_embeds(model)
    loss, nodes = _with_nodes_alone(loss_fn, args, kwargs)
    others = [layer for node in nodes for _, layer in layers_of(node)]
    if {*map(id, layers.values())} & {*map(id, others)}:
      raise ValueError(
        "Another argument of the loss holds a SparseEmbed of the model, whose row gradients from "
        "there would be lost. Use the one inside the model."
      )
    before = {layer: getattr(layer, "tape", _ABSENT) for layer in (*layers.values(), *others)}
    outer = {layer: tape for layer, tape in before.items() if isinstance(tape, Tape)}
    token = LOSSES.set((*LOSSES.get(), 0))
    try:
      # A loss around this one sees the second pass alone.
      _set_tapes(dict.fromkeys(layers.values(), _ABSENT) | dict.fromkeys(others))
      found = _find_lookups(loss, model, nodes)
      _set_tapes({layer: outer.get(layer) for layer in others})  # constant here
      for path, lookups in found.items():
        layer = layers[path]
        layer.tape = Tape(_zeros(layer, lookups), outer.get(layer))
      wrt = nnx.DiffState(0, nnx.Any(nnx.Param, Tap))
      value, grads = nnx.value_and_grad(loss, argnums=wrt, has_aux=has_aux)(model, nodes)
      taps, dense = nnx.split_state(grads, Tap, ...)
      rows, is_whole = _rows(model, layers, taps)
    finally:
      LOSSES.reset(token)
      _set_tapes(before)
    value, dense, rows = _checked(is_whole, value, dense, rows)
    return value, Grads(dense, rows)

  return wrapped


def _with_nodes_alone(
  loss_fn: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], list[Any]]:
  """Returns a loss `f(model, nodes)`, and `nodes`: the NNX objects in `args` and `kwargs`.

  All other arguments stay as they are: NumPy ids are checked, and Python code may branch on them.
  """
  is_node = lambda x: isinstance(x, (nnx.Pytree, nnx.Variable))
  leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda x: is_node(x) or x is None)
  at = [i for i, leaf in enumerate(leaves) if is_node(leaf)]

  def loss(model, nodes):
    given = list(leaves)
    for i, node in zip(at, nodes, strict=True):
      given[i] = node
    args, kwargs = jax.tree.unflatten(treedef, given)
    return loss_fn(model, *args, **kwargs)

  return loss, [leaves[i] for i in at]


_ABSENT = object()  # in place of a tape: outside a loss, or in a layer that the loss does not get


def _set_tapes(tapes: Mapping[SparseEmbed, Any]) -> None:
  for layer, tape in tapes.items():
    if hasattr(layer, "tape"):
      del layer.tape  # Flax does not let an attribute change from None to a module
    if tape is not _ABSENT:
      layer.tape = tape


Lookups = list[tuple[Any, Any]]  # the tap, and the record and mark, of each


def _find_lookups(loss: Callable[..., Any], model: Any, nodes: Any) -> dict[str, Lookups]:
  """The lookups of each layer as shapes, by path."""

  def lookups(model, nodes):
    copies = sparse_embeds(model)
    for layer in copies.values():
      layer.tape = Tape()
    loss(model, nodes)
    return {path: _tape(layer).read() for path, layer in copies.items()}

  try:
    return nnx.eval_shape(lookups, model, nodes)
  except TypeError as error:
    if LOSSES.get()[-1]:
      error.add_note(
        "A lookup inside embed.value_and_grad adds to the state of its layer. Look up in both "
        "branches of nnx.cond, or outside of it; and outside of scans and loops."
      )
    raise


def _tape(layer: SparseEmbed) -> Tape:
  assert layer.tape is not None
  return layer.tape


def _zeros(layer: SparseEmbed, found: Lookups) -> Lookups:
  """Zero taps and records for the start of the second pass."""

  def of(lookup):
    _, (record, _) = lookup
    return jax.tree.map(layer.spec.stack_of[record.tables[0]].placement.zeros, lookup)

  return list(map(of, found))


def _rows(model: Any, layers: dict[str, SparseEmbed], taps: Any) -> tuple[Rows, Any]:
  """The row gradients of the lookups, and whether every lookup was used just as it was made."""
  gradient_of = dict(nnx.to_flat_state(taps))
  first_path = {id(layer): path for path, layer in reversed(list(layers_of(model)))}
  grads: dict[Owner, list[ActivationGrads]] = {}
  stacks: dict[Owner, StackSpec] = {}
  is_whole: Any = True
  for path, layer in layers.items():
    of_layer = {Owner(path, name): stack for name, stack in layer.spec.stacks.items()}
    stacks |= of_layer
    grads |= {owner: [] for owner in of_layer}
    for number, (_, (record, mark)) in enumerate(_tape(layer).read()):
      key = (*first_path[id(layer)], "tape", "lookups", number, "tap")
      of_tap, used = gradient_of[key].get_value()
      is_whole &= (used == 0) | (used == mark)  # 0: the loss does not depend on it
      owner = Owner(path, layer.spec.stack_of[record.tables[0]].name)
      if record.used:
        grads[owner].append(ActivationGrads(tuple(of_tap), record))
  return Rows(grads, stacks), is_whole


def _checked(is_whole: Any, value: Any, dense: Any, rows: Rows) -> tuple[Any, Any, Rows]:
  """Raises ValueError if a lookup is not whole; under jit, sets the loss to NaN, gradients to 0."""
  if is_traced(is_whole):
    loss, *aux = value if isinstance(value, tuple) else (value,)
    loss = jnp.where(is_whole, loss, jnp.nan)
    dense = jax.tree.map(lambda g: jnp.where(is_whole, g, 0), dense)
    factor = jnp.where(is_whole, 1.0, 0.0)
    return (loss, *aux) if aux else loss, dense, rows.scale(factor)
  if not is_whole:
    raise ValueError(
      "A lookup of the loss is made in a copy of the model, or repeated by a transformation, so "
      "that its row gradient would be wrong. Look up once, in the model that the loss gets."
    )
  return value, dense, rows
