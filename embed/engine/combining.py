"""Combining rows that were looked up one by one, where a gradient has to pass the combination.

The built-in combiners are folded into the lookup: a sum of rows times gains, whose gradient leaves
as one vector per bag. A custom combiner, or a gradient with respect to the user's weights, needs
the rows themselves: then every id has an activation of its own, `[..., L, D]`, and this is what
follows, in plain differentiable operations.
"""

import jax
import jax.numpy as jnp

from embed import config as config_lib
from embed.engine import lookup


def combine(
  table: config_lib.TableConfig,
  rows: jax.Array,
  ids: jax.Array,
  weights: jax.Array | None,
  learned: jax.Array | None,
) -> jax.Array:
  """One vector for each bag.

  Args:
    table: whose combiner it is.
    rows: float `[..., L, D]`, zeros at padding.
    ids: int32 `[..., L]`, `vocabulary_size` being padding.
    weights: the user's, float32 `[..., L]`, or None.
    learned: the weights of a custom combiner, float32 `[num_weights]`.

  Returns:
    `[..., D]` of the rows' dtype, computed in float32.
  """
  valid, vectors = ids < table.vocabulary_size, rows.astype(jnp.float32)
  if isinstance(table.combiner, config_lib.CustomCombiner):
    if weights is not None:
      vectors = vectors * weights[..., None]
    out = _custom(table.combiner, jnp.sum(valid, -1, dtype=jnp.int32), vectors, learned)
  else:
    gains = lookup.gains(valid.astype(jnp.float32) if weights is None else weights, table.combiner)
    out = jnp.sum(vectors * gains[..., None], axis=-2)
  return out.astype(rows.dtype)


def _custom(combiner, valency: jax.Array, vectors: jax.Array, learned) -> jax.Array:
  """`computation` of every bag."""
  learned = jnp.zeros(0, jnp.float32) if learned is None else learned
  # A computation may divide by the valency. Guarded inside: where only the result is left out, the
  # gradient of what went into it is NaN.
  empty = valency == 0
  valency = jnp.where(empty, 1, valency)
  of_bag = lambda valency, vectors: combiner.computation(valency, vectors, learned)
  for _ in range(valency.ndim):
    of_bag = jax.vmap(of_bag)
  out = of_bag(valency, vectors)
  wanted = (*valency.shape, vectors.shape[-1])
  if jnp.shape(out) != wanted:
    raise ValueError(
      f"A custom combiner returned shape {jnp.shape(out)[valency.ndim :]} for a bag; it must "
      f"return [dim], {wanted[-1:]}."
    )
  return jnp.where(empty[..., None], 0, out)
