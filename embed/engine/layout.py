"""Maps rows of tables to shards and local rows: arithmetic on numbers, without any array of rows.

Tables of equal width, dtype and optimizer may share one array, a **stack**, and a stack may be cut
into shards. Shard s of a stack holds, one table after another, the rows of each table that it owns.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Layout:
  """How the rows of some tables are laid out over shards.

  A **local row** is the index of a row within its shard. Every shard has `shard_rows` of them;
  where a table's rows do not divide, the last of its local rows on some shards hold nothing.

  Args:
    sizes: the number of rows of each table.
    shards: how many shards there are.
    contiguous: False is "mod", row r on shard `r % shards`; True is "div", consecutive rows, the
      first `size % shards` shards having one row more than the others.
    unit: the first local row of each table, and the number of local rows, are multiples of it.

  >>> Layout((5, 3), shards=2).locate(0, jnp.array([0, 1, 2, 5]))[1].tolist()  # 5: padding
  [0, 0, 1, 5]
  """

  sizes: tuple[int, ...]
  shards: int = 1
  contiguous: bool = False
  unit: int = 1

  @functools.cached_property
  def heights(self) -> tuple[int, ...]:
    """The number of local rows for each table's rows."""
    return tuple(-(-size // self.shards) for size in self.sizes)

  @functools.cached_property
  def offsets(self) -> tuple[int, ...]:
    """The first local row of each table."""
    return tuple(itertools.accumulate(self._taken, initial=0))[:-1]

  @functools.cached_property
  def shard_rows(self) -> int:
    """The number of local rows of a shard; used as a local row, it means padding."""
    return sum(self._taken)

  @property
  def _taken(self) -> tuple[int, ...]:
    """The local rows that each table takes, with those that fill up its last unit."""
    return tuple(-(-height // self.unit) * self.unit for height in self.heights)

  def _first(self, table: int, shard: Any) -> Any:
    """The first of the consecutive rows of a shard."""
    few, more = divmod(self.sizes[table], self.shards)
    return shard * few + shard.__array_namespace__().minimum(shard, more)

  def locate(self, table: int, ids: Any) -> tuple[Any, Any]:
    """The shard and the local row of each id; shard 0 and local row `shard_rows` for ids outside.

    They have the ids' dtype. NumPy arrays stay such.
    """
    xp = ids.__array_namespace__()
    size, offset = self.sizes[table], self.offsets[table]
    valid = (ids >= 0) & (ids < size)
    if self.shards == 1:
      return xp.zeros_like(ids), xp.where(valid, ids + offset, self.shard_rows)
    if self.contiguous:
      few, more = divmod(size, self.shards)
      longer = more * (few + 1)  # the rows of the shards that have one row more
      late = more + (ids - longer) // max(few, 1)
      shard = xp.where(ids < longer, ids // (few + 1), late)
      local_row = ids - self._first(table, shard)
    else:
      shard, local_row = ids % self.shards, ids // self.shards
    return xp.where(valid, shard, 0), xp.where(valid, local_row + offset, self.shard_rows)

  def ids(self, table: int, shard: jax.Array | int, local_rows: jax.Array) -> jax.Array:
    """The id of each local row of a shard; the table's size where there is none of it."""
    size, height = self.sizes[table], self.heights[table]
    shard = jnp.asarray(shard, jnp.int32)
    row = local_rows - self.offsets[table]
    inside = (row >= 0) & (row < height)
    if self.contiguous:
      few, more = divmod(size, self.shards)
      inside &= row < few + (shard < more).astype(jnp.int32)
      ids = self._first(table, shard) + row
    else:
      ids = row * self.shards + shard
    return jnp.where(inside & (ids < size), ids, size)

  def own_ids(self, table: int, shard: jax.Array | int) -> jax.Array:
    """The ids of a table that a shard owns, in the order of their local rows: int32 `[height]`."""
    height = self.heights[table]
    local_rows = self.offsets[table] + jnp.arange(height, dtype=jnp.int32)
    return self.ids(table, shard, local_rows)


class Columns(NamedTuple):
  """Columns over mesh axes, as many on each device: D of them, filled up with zeros.

  Both functions are for use inside `jax.shard_map`; without axes they change nothing.
  """

  axes: tuple[str, ...]
  dim: int

  def own(self, x: jax.Array) -> jax.Array:
    """This device's columns of `[..., D]`."""
    if not self.axes:
      return x
    count, last = jax.lax.axis_size(self.axes), x.ndim - 1
    width = -(-self.dim // count)
    x = jnp.pad(x, [(0, 0)] * last + [(0, width * count - self.dim)])
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * width, width, last)

  def whole(self, x: jax.Array) -> jax.Array:
    """`[..., D]` from every device's own columns."""
    if not self.axes:
      return x
    x = jax.lax.all_gather(x, self.axes, axis=x.ndim - 1, tiled=True)
    return jax.lax.slice_in_dim(x, 0, self.dim, axis=x.ndim - 1)
