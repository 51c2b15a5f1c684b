"""Reads and writes the rows that a device stores: an array `[V, D]`, or lines of 128 columns.

Code between a read and a write, such as an optimizer's equation, is the same for both.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from embed.engine import lookup
from embed.engine.backends import BACK_ENDS
from embed.engine.bags import Bags
from embed.engine.stack import LANES, Arrays, StackSpec, row_width, rows_per_line

# --- lines of 128 columns -------------------------------------------------------------------------


_INTO = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))  # rows into their columns of lines
_CHUNK = 1 << 12  # lines that are packed at a time: a TPU pads rows to 128 columns in between


@functools.partial(jax.jit, static_argnums=1)
def unpack(lines: jax.Array, width: int) -> jax.Array:
  """Unpacks lines to rows `[V, width]`; the inverse of `pack`."""
  rows_of = lambda x: x.reshape(-1, row_width(width))[:, :width]
  return _in_chunks(rows_of, lines, 1, rows_per_line(width))


@jax.jit
def pack(rows: jax.Array) -> jax.Array:
  """Packs rows `[V, D]` to lines `[V / rows_per_line, ...]`; `rows_per_line` divides V."""
  width = row_width(rows.shape[1])
  filling = ((0, 0), (0, width - rows.shape[1]))
  lines_of = lambda x: jnp.pad(x, filling).reshape(-1, max(width, LANES))
  return _in_chunks(lines_of, rows, rows_per_line(rows.shape[1]), 1)


def _in_chunks(
  f: Callable[[jax.Array], jax.Array], x: jax.Array, read: int, made: int
) -> jax.Array:
  """Computes `f(x)` in chunks: `read` entries of x become `made` entries of the result."""
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
    """The rows `[N, D]` at `ids`, int32 `[N]`; zeros for ids outside the table."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
    window = (1, row_width(self.width))
    rows = lax.gather(self.array, self._starts(ids), numbers, window, mode="fill", fill_value=0)
    return rows[:, : self.width]

  def put(self, ids: jax.Array, rows: jax.Array) -> "Lines":
    """Replaces the rows at distinct `ids` with `rows` `[N, D]`; skips ids outside the table."""
    lines = lax.scatter(
      self.array, self._starts(ids), self._filled(rows), _INTO, unique_indices=True, mode="drop"
    )
    return dataclasses.replace(self, array=lines)

  def add(self, ids: jax.Array, rows: jax.Array) -> "Lines":
    """Adds `rows` `[N, D]` to the rows at `ids`; skips ids outside the table."""
    lines = lax.scatter_add(self.array, self._starts(ids), self._filled(rows), _INTO, mode="drop")
    return dataclasses.replace(self, array=lines)

  def linear(self) -> jax.Array:
    """The rows `[V, row_width]`, for kernels that read untiled memory: the same bytes."""
    return self.array.reshape(-1, row_width(self.width))

  def _filled(self, rows: jax.Array) -> jax.Array:
    missing = row_width(self.width) - self.width
    return jnp.pad(rows.astype(self.dtype), ((0, 0), (0, missing)))

  def _starts(self, ids: jax.Array) -> jax.Array:
    """The line and first column of each row, `[N, 2]`."""
    each = rows_per_line(self.width)
    return jnp.stack([ids // each, ids % each * row_width(self.width)], axis=-1)


Rows = jax.Array | Lines  # `[V, D]`


# --- from what is stored to rows, and back --------------------------------------------------------


def as_rows(stack: StackSpec, stored: Any) -> Any:
  """Views a tree of a device's tables and slots as rows `[V, D]`, or `[V]` with one value each."""
  in_lines = lambda x: Lines(x, stack.dim) if stack.is_packed and x.ndim == 2 else x
  return jax.tree.map(in_lines, stored)


def as_stored(stack: StackSpec, rows: Any) -> Any:
  """The inverse of `as_rows`."""
  is_lines = lambda x: isinstance(x, Lines)
  return jax.tree.map(lambda x: x.array if is_lines(x) else x, rows, is_leaf=is_lines)


def unpacked(rows: Rows) -> jax.Array:
  """Converts rows to an array, for code that reads all of them."""
  return unpack(rows.array, rows.width) if isinstance(rows, Lines) else rows


# --- some rows ------------------------------------------------------------------------------------


def gather_and_combine(stack: StackSpec, table: Rows, bags: Bags) -> jax.Array:
  """Does the same as `lookup.gather_and_combine`, on rows of a table or on received rows."""
  if stack.back_end is not None:
    acts = BACK_ENDS[stack.back_end].look_up(stack, table, bags)
    if acts is not None:
      return acts
  return lookup.gather_and_combine(table, bags)


def take(stack: StackSpec, table: Rows, ids: jax.Array) -> jax.Array:
  """The rows `[N, D]` at `ids`, int32 `[N]`, to send; undefined for ids outside the table."""
  if stack.back_end is not None and table.dtype == jnp.float32:  # narrower rows stay narrow
    return gather_and_combine(stack, table, Bags(ids[:, None]))
  return read({"": table}, ids)[""]


def read(arrays: Arrays, at: jax.Array) -> Arrays:
  """The rows `at` of a table and its slots, by name; undefined for ids outside the table."""

  def rows(x):
    if isinstance(x, Lines):
      return x.take(at)
    return x.at[at].get(mode="clip", wrap_negative_indices=False)

  return {name: rows(x) for name, x in arrays.items()}


def write(arrays: Arrays, at: jax.Array, new: Arrays) -> Arrays:
  """Writes new rows of a table and its slots at the distinct ids `at`; skips ids out of range."""

  def put(x, rows):
    if isinstance(x, Lines):
      return x.put(at, rows)
    return x.at[at].set(rows.astype(x.dtype), mode="drop", unique_indices=True)

  return {name: put(x, new[name]) for name, x in arrays.items()}
