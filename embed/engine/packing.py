"""Narrow rows side by side in lines of 128 columns, which is how TPUs store arrays.

A TPU keeps the columns of an array in tiles of 128. A table of fewer is either filled up to 128 in
memory, or laid out by columns, in which case XLA copies all of it into another layout at every step
that reads or writes rows. Packed, such a table is an array `[L, 128]`: row r is in line
`r // rows_per_line`, and no step copies it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from embed.engine import switches

SWITCH = "SPARSE_EMBED_PACKED"
LANES = 128  # columns of a line
_NARROWEST = 8  # columns that a row takes at least


def row_width(width: int) -> int:
  """The columns that a packed row of `width` columns takes: 8, 16, 32, 64 or a multiple of 128.

  >>> [row_width(width) for width in (1, 10, 64, 100, 200)]
  [8, 16, 64, 128, 256]
  """
  if width > LANES // 2:
    return -(-width // LANES) * LANES
  return max(_NARROWEST, 1 << (width - 1).bit_length())


def rows_per_line(width: int) -> int:
  """The number of rows of `width` columns in a line."""
  return max(1, LANES // row_width(width))


def obstacle(width: int, moves_every_row: bool) -> str | None:
  """Why rows of `width` columns on a device are not packed, or None."""
  if width % LANES == 0:
    return f"its rows have {width} columns on a device, a multiple of {LANES}"
  if moves_every_row:
    return "its optimizer moves every row in a step, and would unpack all of them"
  return None


def is_wanted(setting: bool | None, device_kind: str) -> bool:
  """Whether tables are packed if they can be: by their setting, the environment, or on TPUs."""
  return switches.is_on(SWITCH, device_kind.startswith("TPU")) if setting is None else setting


def describe(width: int) -> str:
  """Describes in words how rows of `width` columns are packed.

  >>> describe(16), describe(100)
  ('packed, 8 rows to a line of 128 columns', 'packed, filled up to 128 columns')
  """
  each = rows_per_line(width)
  if each == 1:
    return f"packed, filled up to {row_width(width)} columns"
  return f"packed, {each} rows to a line of {LANES} columns"


def has_lines(device_kind: str) -> bool:
  """Whether rows are read and written as parts of lines.

  Not on CPUs and GPUs: they store rows one after another, so that lines and rows are the same
  bytes, and what reads and writes rows runs as if nothing was packed.
  """
  return device_kind.startswith("TPU")


# --- arrays ---------------------------------------------------------------------------------------


def pack(rows: jax.Array) -> jax.Array:
  """Lines `[V / rows_per_line, ...]` of rows `[V, D]`; V divides by the rows of a line."""
  width = row_width(rows.shape[1])
  filled = jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))
  return filled.reshape(-1, max(width, LANES))


def unpack(lines: jax.Array, width: int) -> jax.Array:
  """Rows `[V, width]` of lines; the inverse of `pack`."""
  return lines.reshape(-1, row_width(width))[:, :width]


_CHUNK = 1 << 12  # lines


@functools.partial(jax.jit, static_argnums=1)
def unpack_in_chunks(lines: jax.Array, width: int) -> jax.Array:
  """`unpack` for TPUs, where all rows at once would be filled up to 128 columns in between."""
  each, count = rows_per_line(width), lines.shape[0]
  chunk = min(count, _CHUNK)

  def step(i, rows):
    first = jnp.minimum(i * chunk, count - chunk)
    unpacked = unpack(lax.dynamic_slice_in_dim(lines, first, chunk), width)
    return lax.dynamic_update_slice_in_dim(rows, unpacked, first * each, 0)

  return lax.fori_loop(0, -(-count // chunk), step, jnp.zeros((count * each, width), lines.dtype))


@jax.jit
def pack_in_chunks(rows: jax.Array) -> jax.Array:
  """`pack` for TPUs; see `unpack_in_chunks`."""
  each, taken = rows_per_line(rows.shape[1]), row_width(rows.shape[1])
  count = rows.shape[0] // each
  chunk = min(count, _CHUNK)

  def step(i, lines):
    first = jnp.minimum(i * chunk, count - chunk)
    packed = pack(lax.dynamic_slice_in_dim(rows, first * each, chunk * each))
    return lax.dynamic_update_slice_in_dim(lines, packed, first, 0)

  shape = count, max(taken, LANES)
  return lax.fori_loop(0, -(-count // chunk), step, jnp.zeros(shape, rows.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lines:
  """Rows `[V, D]` that are read and written as parts of lines, without unpacking the table.

  Attributes:
    array: the lines.
    width: D.
  """

  array: jax.Array
  width: int = dataclasses.field(metadata={"static": True})

  @property
  def shape(self) -> tuple[int, int]:
    return self.array.shape[0] * rows_per_line(self.width), self.width

  @property
  def dtype(self) -> Any:
    return self.array.dtype

  @property
  def ndim(self) -> int:
    return 2

  def take(self, ids: jax.Array) -> jax.Array:
    """The rows `[N, D]` of ids int32 `[N]`, zeros for ids outside."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
    window = (1, row_width(self.width))
    rows = lax.gather(self.array, self._starts(ids), numbers, window, mode="fill", fill_value=0)
    return rows[:, : self.width]

  def put(self, ids: jax.Array, rows: jax.Array) -> "Lines":
    """Replaces the rows at distinct ids by `[N, D]`; ids outside are skipped."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
    lines = lax.scatter(
      self.array, self._starts(ids), self._filled(rows), numbers, unique_indices=True, mode="drop"
    )
    return dataclasses.replace(self, array=lines)

  def add(self, ids: jax.Array, rows: jax.Array) -> "Lines":
    """Adds `[N, D]` to the rows at ids; ids outside are skipped."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
    lines = lax.scatter_add(self.array, self._starts(ids), self._filled(rows), numbers, mode="drop")
    return dataclasses.replace(self, array=lines)

  def linear(self) -> jax.Array:
    """The rows `[V, row_width]`, for kernels that read memory without tiles: the same bytes."""
    return self.array.reshape(-1, row_width(self.width))

  def _filled(self, rows: jax.Array) -> jax.Array:
    missing = row_width(self.width) - self.width
    return jnp.pad(rows.astype(self.dtype), ((0, 0), (0, missing)))

  def _starts(self, ids: jax.Array) -> jax.Array:
    """Line and column `[N, 2]` of each row."""
    each = rows_per_line(self.width)
    return jnp.stack([ids // each, ids % each * row_width(self.width)], axis=-1)
