"""Reads and writes the rows that a device stores, in each of the ways to store them.

Rows are stored as an array `[V, D]` or in lines of 128 columns, and SparseCores may read and write
them. Code between a read and a write, such as an optimizer's equation, is the same for all of
these.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from embed.engine import backends, lookup
from embed.engine.bags import Bags
from embed.engine.stack import LANES, Arrays, StackSpec, row_width, rows_per_line

# --- lines of 128 columns -------------------------------------------------------------------------


def has_lines(device_kind: str) -> bool:
  """Whether rows are read and written as parts of lines.

  Not on CPUs and GPUs: they store rows one after another, so that lines and rows are the same
  bytes, and what reads and writes rows runs as if nothing was packed.
  """
  return device_kind.startswith("TPU")


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
  return _in_chunks(lambda x: unpack(x, width), lines, 1, rows_per_line(width))


@jax.jit
def pack_in_chunks(rows: jax.Array) -> jax.Array:
  """`pack` for TPUs; see `unpack_in_chunks`."""
  return _in_chunks(pack, rows, rows_per_line(rows.shape[1]), 1)


def _in_chunks(
  f: Callable[[jax.Array], jax.Array], x: jax.Array, read: int, made: int
) -> jax.Array:
  """`f(x)` by lines: `read` entries of x become `made` entries of the result."""
  count, out = x.shape[0] // read, jax.eval_shape(f, x)
  chunk = min(count, _CHUNK)

  def step(i, out):
    first = jnp.minimum(i * chunk, count - chunk)
    part = f(lax.dynamic_slice_in_dim(x, first * read, chunk * read))
    return lax.dynamic_update_slice_in_dim(out, part, first * made, 0)

  return lax.fori_loop(0, -(-count // chunk), step, jnp.zeros(out.shape, out.dtype))


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


Rows = jax.Array | Lines  # `[V, D]`


# --- from what is stored to rows, and back --------------------------------------------------------


def opened(stack: StackSpec, stored: Any) -> Any:
  """A tree of a device's tables and slots as rows `[V, D]`, or, of one value per row, as `[V]`."""

  def rows_of(x: jax.Array) -> Rows:
    if not (stack.is_packed and x.ndim == 2):
      return x
    in_lines = has_lines(stack.placement.device_kind)
    return Lines(x, stack.dim) if in_lines else unpack(x, stack.dim)

  return jax.tree.map(rows_of, stored)


def closed(stack: StackSpec, rows: Any) -> Any:
  """The inverse of `opened`."""

  def stored(x: Rows) -> jax.Array:
    if isinstance(x, Lines):
      return x.array
    return pack(x) if stack.is_packed and x.ndim == 2 else x

  return jax.tree.map(stored, rows, is_leaf=lambda x: isinstance(x, Lines))


def unpacked(rows: Rows) -> jax.Array:
  """Rows as an array, for what reads all of them."""
  return unpack_in_chunks(rows.array, rows.width) if isinstance(rows, Lines) else rows


def is_direct(stack: StackSpec, table: Rows) -> bool:
  """Whether rows must be read and written by the functions below, and by no other formulation."""
  return stack.sparse_core or isinstance(table, Lines)


# --- some rows ------------------------------------------------------------------------------------


def take(stack: StackSpec, table: Rows, ids: jax.Array) -> jax.Array:
  """The rows `[N, ...]` of ids int32 `[N]`; undefined for ids outside the table."""
  if _is_by_kernel(stack, table):
    return backends.backend("sparse_core").take(_linear(table), ids)[:, : stack.dim]
  if isinstance(table, Lines):
    return table.take(ids)
  return table.at[ids].get(mode="clip", wrap_negative_indices=False)


def gather_and_combine(stack: StackSpec, table: Rows, bags: Bags) -> jax.Array:
  """`lookup.gather_and_combine` of rows of the table, or of rows received, in float32."""
  if stack.sparse_core and backends.backend("sparse_core").sums_bags(stack, bags):
    return backends.backend("sparse_core").gather_and_combine(_linear(table), bags)[
      ..., : stack.dim
    ]
  return lookup.gather_and_combine(table, bags)


def read(stack: StackSpec, arrays: Arrays, at: jax.Array) -> Arrays:
  """The rows `at` of a table and its slots, by name; undefined for ids outside the table."""
  return {name: take(stack, x, at) for name, x in arrays.items()}


def write(stack: StackSpec, arrays: Arrays, at: jax.Array, new: Arrays) -> Arrays:
  """A table and its slots with new rows at the distinct ids `at`; those outside are skipped."""
  by_kernel = [name for name, x in arrays.items() if _is_by_kernel(stack, x)]
  written = {name: _put(x, at, new[name]) for name, x in arrays.items() if name not in by_kernel}
  if by_kernel:  # together: they share the list of rows
    tables, rows = ([of[name] for name in by_kernel] for of in (arrays, new))
    written |= dict(zip(by_kernel, _put_by_kernel(stack, tables, at, rows), strict=True))
  return {name: written[name] for name in arrays}


def _put(x: Rows, at: jax.Array, new: jax.Array) -> Rows:
  if isinstance(x, Lines):
    return x.put(at, new)
  return x.at[at].set(new.astype(x.dtype), mode="drop", unique_indices=True)


def _is_by_kernel(stack: StackSpec, x: Any) -> bool:
  """Whether SparseCores read and write an array: not slots of one value per row."""
  return stack.sparse_core and x.ndim == 2 and x.dtype == np.float32


def _put_by_kernel(
  stack: StackSpec, tables: Sequence[Rows], at: jax.Array, new: Sequence[jax.Array]
) -> list[Rows]:
  linear = [_linear(table) for table in tables]
  filling = ((0, 0), (0, linear[0].shape[1] - stack.dim))
  put = backends.backend("sparse_core").put(linear, at, [jnp.pad(rows, filling) for rows in new])
  return [
    Lines(rows.reshape(table.array.shape), table.width) if isinstance(table, Lines) else rows
    for table, rows in zip(tables, put, strict=True)
  ]


def _linear(table: Any) -> jax.Array:
  """Rows as kernels read them, filled up to whole vectors; lines are not copied for it."""
  if isinstance(table, Lines):
    return table.linear()
  filling = row_width(table.shape[1]) - table.shape[1]  # of rows received
  return jnp.pad(table, ((0, 0), (0, filling))) if filling else table
