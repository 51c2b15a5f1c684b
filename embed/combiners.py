"""Which bags are combined inside a lookup, and the combination of the others after it.

The built-in combiners are per-id weights of a lookup, from `engine.bags.Bags.normalized`.
Rows for an `embed.CustomCombiner`, or for weights with a gradient, are looked up one by one,
uncombined, and combined by differentiable operations.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed.config import CustomCombiner, FeatureConfig, TableConfig
from embed.engine import bags as bags_lib
from embed.engine import lookup
from embed.engine.bags import Bags, Parts
from embed.engine.stack import StackSpec
from embed.inputs import Input


class CombinerWeights(nnx.Param):
  """The learned weights of an `embed.CustomCombiner`, trained at its own rate.

  An `nnx.Param` type, float32 `[num_weights]`, so `embed.value_and_grad` gives their gradient among
  the dense ones. `sparse_embed.combiner_weights` has them by table name.

  >>> average = embed.CustomCombiner(
  ...   lambda valency, vectors, weights: weights @ vectors,
  ...   max_valency=2, num_weights=2, initializer=jax.nn.initializers.constant(0.5))
  >>> table = embed.TableConfig(4, 2, combiner=average, name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> layer.combiner_weights["movie"][...].tolist()
  [0.5, 0.5]
  """


def make_weights(combiner: CustomCombiner, key: jax.Array) -> nnx.Param:
  """The initial learned weights of a combiner: an `nnx.Param` for optax if it has no rate."""
  assert combiner.initializer is not None
  shape = (combiner.num_weights,)
  value = combiner.initializer(key, shape, jnp.float32)
  if np.shape(value) != shape:
    raise ValueError(f"A combiner's initializer returned {np.shape(value)}, not {shape}.")
  by_optax = combiner.combiner_weights_learning_rate is None
  return (nnx.Param if by_optax else CombinerWeights)(jnp.asarray(value, jnp.float32))


def learning_rate(name: str, table: TableConfig) -> float:
  """The rate of a table's learned weights."""
  assert isinstance(table.combiner, CustomCombiner)
  rate = table.combiner.combiner_weights_learning_rate
  if rate is None:
    raise ValueError(
      f"Table {name!r}: the weights of its combiner are trained by the dense optimizer, since "
      "combiner_weights_learning_rate is None. Use embed.value_and_grad and embed.Optimizer, or "
      "give a rate."
    )
  return rate


class Uncombined(NamedTuple):
  """The rows of a feature that were looked up one by one, and what combines them.

  Attributes:
    rows: `[..., L, D]`.
    ids: int32 `[..., L]`.
    weights: float32 `[..., L]`, or None.
    learned: float32 `[num_weights]` as they were at the lookup, or None.
  """

  rows: jax.Array
  ids: jax.Array
  weights: jax.Array | None
  learned: jax.Array | None


class Prepared(NamedTuple):
  """The bags of some features.

  Attributes:
    bags: for a lookup, normalized; bags of one id each for a feature that is combined after it.
    dropped: how many ids were dropped, an int32 scalar.
    uncombined: ids and weights of each feature that is combined after the lookup, or None.
  """

  bags: tuple[Bags, ...]
  dropped: jax.Array
  uncombined: tuple[tuple[jax.Array, jax.Array | None] | None, ...]


def prepare(
  inputs: Sequence[Input],
  combiner: str | None,
  arrays: Sequence[Parts],
) -> Prepared:
  """The bags of some features.

  Args:
    inputs: the features.
    combiner: of all features; None is that of each one's table.
    arrays: the parts of each input, traced or not.
  """
  prepared: list[Any] = []
  for x, parts in zip(inputs, arrays, strict=True):
    table, size = x.feature.table, x.feature.table.vocabulary_size
    bags, dropped = bags_lib.from_input(parts, x.form, size)
    custom = isinstance(table.combiner, CustomCombiner)
    is_later = custom or (x.feature.differentiate_weights and bags.gains is not None)
    if is_later and combiner is None and not x.form.length:
      bags, lost = bags_lib.in_positions(bags, size, positions(x.name, x.feature, parts))
      weights = bags.gains
      if weights is not None and not x.feature.differentiate_weights:
        weights = jax.lax.stop_gradient(weights)
      prepared.append((Bags(bags.ids[..., None]), dropped + lost, (bags.ids, weights)))
    else:
      how = combiner or ("sum" if custom else str(table.combiner))  # a sequence has bags of one id
      prepared.append((bags.normalized(how, size), dropped, None))
  all_bags, all_dropped, uncombined = zip(*prepared, strict=True)
  return Prepared(all_bags, functools.reduce(jnp.add, all_dropped), uncombined)


def positions(name: str, feature: FeatureConfig, parts: Parts) -> int | None:
  """The positions of a bag that is combined after the lookup; None for those that it has."""
  if isinstance(feature.table.combiner, CustomCombiner):
    return feature.table.combiner.max_valency
  if parts.kind in ("dense", "padded") or (parts.kind == "ragged" and parts.length):
    return None
  if parts.kind == "sparse":
    return min(parts.length, max(parts.ids.shape[0], 1))
  raise ValueError(
    f"Feature {name!r}: differentiate_weights needs bags of known length. Give "
    "embed.Ragged(..., max_valency=...), or embed.to_padded(...)."
  )


# Compiled once for each shape: a computation with a loop or a branch would be compiled again at
# every call outside of jit.
@functools.partial(jax.jit, static_argnums=(0, 1))
def combine(table: TableConfig, stack: StackSpec, looked_up: Uncombined) -> jax.Array:
  """One vector `[..., D]` for each bag, split over devices as activations are."""
  of_bags = lambda x: lookup.combine_rows(table, *x)
  act = stack.placement.prepare(of_bags, looked_up, like=looked_up.rows)
  return stack.placement.split_batch(act, act.shape[0])


def split_gradient(
  table: TableConfig, stack: StackSpec, looked_up: Uncombined, grad: jax.Array
) -> tuple[jax.Array, Any]:
  """The gradients of rows, and of the learned weights, from the gradient of the combined ones."""
  return _pull_back(table, stack, looked_up, stack.placement.split_batch(grad, grad.shape[0]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pull_back(table: TableConfig, stack: StackSpec, looked_up: Uncombined, grad: jax.Array) -> Any:
  of = lambda rows, learned: combine(table, stack, looked_up._replace(rows=rows, learned=learned))
  out, vjp = jax.vjp(of, looked_up.rows, looked_up.learned)
  return vjp(grad.astype(out.dtype))
