"""Initial values of tables, drawn row by row, so that each shard draws only its own rows."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROWS_AT_A_TIME = 1 << 14
_THREEFRY = "threefry2x32"


@dataclasses.dataclass(frozen=True, eq=False)
class RowWise:
  """Draws each row from its own key; two are equal if they wrap the same function object."""

  initializer: Callable[..., Any]

  def __eq__(self, other: object) -> bool:
    return isinstance(other, RowWise) and self.initializer is other.initializer

  def __hash__(self) -> int:
    return id(self.initializer)

  def __call__(self, key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """Draws a whole table `[V, D]`."""
    return _rows(self, key, shape, jnp.dtype(dtype))

  def rows(
    self, keys: jax.Array, tables: jax.Array, ids: jax.Array, dim: int, dtype: Any
  ) -> jax.Array:
    """Draws rows `[N, dim]` of T tables from the tables' random keys `[T]`.

    Each row has a table, int32 `[N]`, and an id, int32 `[N]`, or a raw id, uint32 `[N, 2]`.
    """
    keys = threefry(keys)

    def row(table, id):
      key = keys[table]
      for word in id.reshape(-1):
        key = jax.random.fold_in(key, word)
      value = jnp.asarray(self.initializer(key, (1, dim), jnp.float32), jnp.float32)
      if value.shape not in ((1, dim), (dim,)):
        raise ValueError(f"An initializer returned {value.shape} for one row, not (1, {dim}).")
      return value.reshape(dim).astype(dtype)

    with jax.threefry_partitionable(True):  # else a row's bits depend on how many are drawn
      return jax.vmap(row)(tables, ids)


def threefry(keys: jax.Array) -> jax.Array:
  """Converts keys `[T]` to threefry; under vmap, "rbg" would draw all rows from the first key."""
  if jax.random.key_impl(keys) == _THREEFRY:
    return keys
  seeds = [jax.random.bits(keys[i], (2,), jnp.uint32) for i in range(keys.shape[0])]
  return jax.random.wrap_key_data(jnp.stack(seeds), impl=_THREEFRY)


def row_wise(initializer: Callable[..., Any]) -> Callable[..., jax.Array]:
  """Makes an initializer draw every row from a key of its own.

  A row's key is the table's key with the row's id folded in, so that each device draws only the
  rows that it stores, and a mesh changes at most the last bits of a value. Any other initializer
  is called once with the whole table's shape, on every host.

  Args:
    initializer: `f(key, shape, dtype)` as in `jax.nn.initializers`, traceable; called with shape
      `(1, dim)`. One that depends on the number of rows would see 1.

  >>> small = embed.row_wise(jax.nn.initializers.normal(0.01))
  >>> movie = embed.TableConfig(100, 4, initializer=small, name="movie")
  """
  if not callable(initializer):
    raise ValueError(f"row_wise takes an initializer f(key, shape, dtype). Got {initializer!r}.")
  return initializer if isinstance(initializer, RowWise) else RowWise(initializer)


def _truncated_normal(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
  values = jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)
  return values / math.sqrt(shape[-1])


truncated_normal_rows = RowWise(_truncated_normal)
"""The default, row by row: a normal of standard deviation s = `1 / sqrt(dim)`, truncated at 2 s.

As in TensorFlow, truncation is not corrected for: the standard deviation of the samples is 0.88 s.
"""


def fill(
  rows: jax.Array,
  start: int,
  end: int,
  draw: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  at_a_time: int = ROWS_AT_A_TIME,
) -> jax.Array:
  """Fills rows `start` to `end - 1` of `[M, D]` with drawn values.

  `draw(indices)` returns values `[N, D]` and a mask of the drawn ones, bool `[N]` or `[N, D]`, for
  `at_a_time` rows at most: the random bits of a whole table would be as large as the table.
  """
  chunk = min(end - start, at_a_time)

  def step(i, rows):
    # The last chunk may overlap the one before; the rows in both come out the same.
    first = jnp.minimum(start + i * chunk, end - chunk)
    values, is_drawn = draw(first + jnp.arange(chunk, dtype=jnp.int32))
    old = jax.lax.dynamic_slice_in_dim(rows, first, chunk)
    new = jnp.where(is_drawn.reshape(chunk, -1), values, old)
    return jax.lax.dynamic_update_slice_in_dim(rows, new, first, axis=0)

  return jax.lax.fori_loop(0, -(-(end - start) // chunk), step, rows)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _rows(initializer: RowWise, key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
  def draw(ids):
    values = initializer.rows(key[None], jnp.zeros_like(ids), ids, shape[1], dtype)
    return values, jnp.ones(ids.shape, bool)

  return fill(jnp.zeros(shape, dtype), 0, shape[0], draw)
