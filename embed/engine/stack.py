"""Stacks of tables with equal width, dtype and optimizer, and the layout of their rows.

The tables of a stack share an array, which may be split into shards. A shard stores the rows that
it owns, one table after another. Arithmetic gives the position of a row, without any index array.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from embed.engine.mesh import LOCAL, Placement

if TYPE_CHECKING:
  from embed.optimizers import RowOptimizer, Slot


@dataclasses.dataclass(frozen=True)
class Layout:
  """The positions of tables' rows in shards.

  A **local row** is the index of a row within its shard. Every shard has `shard_rows` of them. If a
  table's rows do not divide evenly, its last local row is unused on some shards.

  Args:
    sizes: the number of rows of each table.
    shards: the number of shards.
    contiguous: False means "mod", row r on shard `r % shards`; True means "div", consecutive rows,
      with one more row on the first `size % shards` shards than on the others.
    unit: the number that divides the first local row of each table and the number of local rows.
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
    """The number of local rows that each table takes, including the padding of its last unit."""
    return tuple(-(-height // self.unit) * self.unit for height in self.heights)

  def _first(self, table: int, shard: Any) -> Any:
    """The first of a shard's consecutive rows, in the "div" layout."""
    few, more = divmod(self.sizes[table], self.shards)
    return shard * few + shard.__array_namespace__().minimum(shard, more)

  def locate(self, table: int, ids: Any) -> tuple[Any, Any]:
    """The shard and local row of each id; shard 0 and `shard_rows` for ids outside the table.

    Both have the dtype of `ids`, and are NumPy arrays if `ids` is one.
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
    """The id of each local row of a shard; the table's size for local rows without an id."""
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


# --- packing -------------------------------------------------------------------------------------

# A TPU stores the columns of an array in tiles of 128. A narrower table is either padded to 128
# columns in memory, or stored by columns, and then XLA copies all of it to another layout in each
# step that reads or writes rows. When packed, such a table is an array `[L, 128]`: row r is in line
# `r // rows_per_line`, and no step copies the table.

PACKING_SWITCH = "SPARSE_EMBED_PACKED"
LANES = 128  # columns of a line
_NARROWEST = 8  # the fewest columns that a row takes


def row_width(width: int) -> int:
  """The columns that a packed row of `width` columns takes: 8, 16, 32, 64 or a multiple of 128."""
  if width > LANES // 2:
    return -(-width // LANES) * LANES
  return max(_NARROWEST, 1 << (width - 1).bit_length())


def rows_per_line(width: int) -> int:
  """The number of rows of `width` columns in a line."""
  return max(1, LANES // row_width(width))


# "parameters" and slots: `[rows, width]`, packed `[lines, columns]`, or one value per row `[rows]`.
Arrays = dict[str, Any]
# `f(local_rows, gradients, arrays) -> new arrays`, see `update.step_stored`.
RowStep = Callable[..., Arrays]


@dataclasses.dataclass(frozen=True)
class StackSpec:
  """Static facts about a stack, hashed and compared by value: equal stacks share compiled programs.

  Attributes:
    name: the name of the stack in its layer.
    tables: the names of the tables, in the order of `layout.sizes`.
    layout: the position of each row.
    dim: D, the number of columns.
    dtype: the dtype of the rows.
    optimizer: the optimizer of the tables, or None.
    placement: the devices.
    stochastic_rounding: whether new rows narrower than float32 are rounded at random.
    exchange: "all_to_all", "gather", or None for the one that moves less.
    capacity: the rows that a pair of devices exchanges in a round; None derives it from each call.
    back_end: the name of the back end that reads and writes rows in XLA's place, or None for XLA.
    is_packed: whether narrow rows are stored side by side, in lines: see `rows.Lines`.
  """

  name: str
  tables: tuple[str, ...]
  layout: Layout
  dim: int
  dtype: np.dtype
  optimizer: "RowOptimizer | None" = None
  placement: Placement = LOCAL
  stochastic_rounding: bool = False
  exchange: str | None = None
  capacity: int | None = None
  back_end: str | None = None
  is_packed: bool = False

  @functools.cached_property
  def indices(self) -> dict[str, int]:
    """The position of each table in the layout."""
    return {table: i for i, table in enumerate(self.tables)}

  @functools.cached_property
  def row_width(self) -> int:
    """The columns that a row takes on a device as it is stored."""
    return row_width(self.dim) if self.is_packed else self.dim

  @functools.cached_property
  def specs(self) -> dict[int, Any]:
    """The PartitionSpecs of stored rows (2) and of slots with one value per row (1)."""
    return {ndim: self.placement.stored_spec(ndim) for ndim in (1, 2)}

  @functools.cached_property
  def slots(self) -> "dict[str, Slot]":
    """The optimizer's state per row, by name."""
    return {} if self.optimizer is None else self.optimizer.slots(self.dim)

  @functools.cached_property
  def uses_stochastic_rounding(self) -> bool:
    """True if new rows are rounded at random."""
    return self.stochastic_rounding and self.dtype != np.float32

  def size(self, table: str) -> int:
    """The `vocabulary_size` of a table."""
    return self.layout.sizes[self.indices[table]]

  @functools.cached_property
  def _hash(self) -> int:  # compiled functions ask for it at every call
    return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

  def __hash__(self) -> int:
    return self._hash

  def __getstate__(self) -> dict[str, Any]:  # another process hashes strings differently
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @property
  def stored_shape(self) -> tuple[int, int]:
    """The shape of the rows on a device as they are stored."""
    each = rows_per_line(self.dim) if self.is_packed else 1
    return self.layout.shard_rows // each, self.row_width * each

  @property
  def is_split(self) -> bool:
    """True if rows are split over several devices, and must be exchanged."""
    return self.layout.shards > 1
