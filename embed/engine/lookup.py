"""Gathering rows and combining them: pure arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from embed import config as config_lib
from embed.engine.bags import Bags, inverse_norm, is_row, scaled

UNROLLED = 8  # positions of a bag gathered in one fused loop; longer bags loop over them


def quantize(x: jax.Array, config: config_lib.QuantizationConfig) -> jax.Array:
  """The nearest of the quantized values, halves up: `floor(x + 0.5)`, not NumPy's half-to-even."""
  step = (config.upper - config.lower) / (config.num_buckets - 1)
  x = jnp.clip(x.astype(jnp.float32), config.lower, config.upper)
  return jnp.floor((x - config.lower) / step + 0.5) * step + config.lower


def gather_and_combine(
  table: Any,
  bags: Bags,
  quantization: config_lib.QuantizationConfig | None = None,
  dtype: Any = None,
) -> jax.Array:
  """Activations `[*batch, D]`: the sum of gain * row of each bag, accumulated in float32.

  Args:
    table: `[V, D]`, an array or `rows.Lines`; ids that are no row of it are padding.
    bags: normalized.
    quantization: applied to rows before they are summed.
    dtype: of the activations; None is the table's.
  """
  dtype = table.dtype if dtype is None else dtype
  size, dim = table.shape
  batch = bags.batch

  def rows(ids, gains=None):
    """Rows `[n, D]` times their gains; zeros for padding."""
    # Multiplied in any case: on its own, XLA:CPU makes a gather one scalar load per element.
    one = is_row(ids, size).astype(jnp.float32)
    if not isinstance(table, jax.Array):
      picked = table.take(ids)
    else:
      picked = table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    picked = picked.astype(jnp.float32)
    if quantization is not None:
      picked = quantize(picked, quantization)
    return picked * (one if gains is None else one * gains)[:, None]

  if bags.is_ragged:
    return bags.sum_segments(rows(bags.ids, bags.gains)).reshape(*batch, dim).astype(dtype)
  length = bags.ids.shape[-1]
  if length == 0:
    return jnp.zeros((*batch, dim), dtype)
  per_id = bags.gains is not None and bags.gains.shape[-1] == length
  # Columns of gathers added up: on CPU each is a row copy, ten times as fast as gather-and-reduce.
  ids = bags.ids.reshape(-1, length).T
  gains = bags.gains.reshape(-1, length).T if bags.gains is not None and per_id else None

  def add(first, columns, act):
    for k in range(columns):
      at = lambda x, k=k: jax.lax.dynamic_index_in_dim(x, first + k, keepdims=False)
      picked = rows(at(ids), None if gains is None else at(gains))
      act = picked if act is None else act + picked
    return act

  start = length % UNROLLED or UNROLLED
  act = add(0, start, None)
  if length > start:
    more = lambda j, act: add(start + j * UNROLLED, UNROLLED, act)
    act = jax.lax.fori_loop(0, (length - start) // UNROLLED, more, act)
  act = act.reshape(*batch, dim)
  if bags.gains is not None and not per_id:
    act = act * bags.gains
  return act.astype(dtype)


# --- rows that are combined after they were looked up one by one ---------------------------------

# The built-in combiners are folded into the gains, and a gradient leaves as one vector per bag. A
# custom combiner, or a gradient with respect to the user's weights, needs the rows themselves:
# every id has an activation of its own, `[..., L, D]`, and what follows is differentiable.


def combine_rows(
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
    ids: int32 `[..., L]`; what is no row of the table is padding.
    weights: the user's, float32 `[..., L]`, or None.
    learned: the weights of a custom combiner, float32 `[num_weights]`.

  Returns:
    `[..., D]` of the rows' dtype, computed in float32.
  """
  valid, vectors = is_row(ids, table.vocabulary_size), rows.astype(jnp.float32)
  if isinstance(table.combiner, config_lib.CustomCombiner):
    if weights is not None:
      vectors = vectors * weights[..., None]
    out = _custom(table.combiner, jnp.sum(valid, -1, dtype=jnp.int32), vectors, learned)
  else:
    gains = valid.astype(jnp.float32) if weights is None else weights
    if table.combiner != "sum":
      if weights is not None:
        sizes = jnp.abs(jax.lax.stop_gradient(weights))
        gains = scaled(weights, jnp.max(sizes, axis=-1, keepdims=True, initial=0))
      power = gains if table.combiner == "mean" else gains * gains
      gains = gains * inverse_norm(jnp.sum(power, axis=-1, keepdims=True), table.combiner)
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
  expected = (*valency.shape, vectors.shape[-1])
  if jnp.shape(out) != expected:
    raise ValueError(
      f"A custom combiner returned shape {jnp.shape(out)[valency.ndim :]} for a bag; it must "
      f"return [dim], {expected[-1:]}."
    )
  return jnp.where(empty[..., None], 0, out)
