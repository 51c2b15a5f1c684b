"""Initial values of tables."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

ROWS_AT_A_TIME = 1 << 14


@functools.partial(jax.jit, static_argnums=(1, 2))
def truncated_normal_rows(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
  """The default: a normal of standard deviation `1 / sqrt(dim)` cut at two of them, row by row.

  No correction for the cut, as in TensorFlow: the sample deviation is 0.88 / sqrt(dim). The key of
  a row is folded from the table's and the row's number, so that any shard can make its own rows,
  and the values do not depend on how many shards there are.

  Args:
    key: the table's key.
    shape: `(vocabulary_size, dim)`.
    dtype: of the result.
  """
  rows, dim = shape

  def row(i):
    values = jax.random.truncated_normal(jax.random.fold_in(key, i), -2.0, 2.0, (dim,), jnp.float32)
    return (values / math.sqrt(dim)).astype(dtype)

  # Some rows at a time: the random bits of a whole table would be as large as the table. The last
  # ones overlap the ones before, which come out the same.
  some = min(rows, ROWS_AT_A_TIME)

  def fill(i, table):
    start = jnp.minimum(i * some, rows - some)
    values = jax.vmap(row)(start + jnp.arange(some))
    return jax.lax.dynamic_update_slice_in_dim(table, values, start, axis=0)

  return jax.lax.fori_loop(0, -(-rows // some), fill, jnp.zeros(shape, dtype))
