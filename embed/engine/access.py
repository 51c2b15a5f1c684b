"""Reads and writes the rows that a device stores, in each of the ways to store them.

Rows are stored as an array `[V, D]`, in lines (`packing`) or in the memory of the host (`host`),
and SparseCores may read and write them. Code between a read and a write, such as an optimizer's
equation, is the same for all of these.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embed.engine import host, packing
from embed.engine.bags import Bags
from embed.engine.host import HostRows
from embed.engine.packing import Lines
from embed.engine.stack import Arrays, StackSpec
from embed.kernels import cpu as cpu_kernels
from embed.kernels import sparse_core

Rows = jax.Array | Lines | HostRows  # `[V, D]`


# --- from what is stored to rows, and back --------------------------------------------------------


def opened(stack: StackSpec, stored: Any) -> Any:
  """A tree of a device's tables and slots as rows `[V, D]`, or, of one value per row, as `[V]`."""

  def rows_of(x: jax.Array) -> Rows:
    if stack.is_in_host:
      return HostRows(x)
    if not (stack.is_packed and x.ndim == 2):
      return x
    in_lines = packing.has_lines(stack.placement.device_kind)
    return Lines(x, stack.width) if in_lines else packing.unpack(x, stack.width)

  return jax.tree.map(rows_of, stored)


def closed(stack: StackSpec, rows: Any) -> Any:
  """The inverse of `opened`."""

  def stored(x: Rows) -> jax.Array:
    if isinstance(x, (Lines, HostRows)):
      return x.array
    return packing.pack(x) if stack.is_packed and x.ndim == 2 else x

  return jax.tree.map(stored, rows, is_leaf=lambda x: isinstance(x, (Lines, HostRows)))


def unpacked(rows: Rows) -> jax.Array:
  """Rows as an array on the device, for what reads all of them."""
  if isinstance(rows, HostRows):
    return host.to_device(rows.array)
  return packing.unpack_in_chunks(rows.array, rows.width) if isinstance(rows, Lines) else rows


def is_direct(stack: StackSpec, table: Rows) -> bool:
  """Whether rows must be read and written by the functions below, and by no other formulation."""
  return stack.sparse_core or isinstance(table, (Lines, HostRows))


# --- some rows ------------------------------------------------------------------------------------


def take(stack: StackSpec, table: Rows, ids: jax.Array) -> jax.Array:
  """The rows `[N, ...]` of ids int32 `[N]`; undefined for ids outside the table."""
  if _is_by_kernel(stack, table):
    from embed.kernels.sparse_core import kernels

    return kernels.take(_linear(table), ids)[:, : stack.width]
  if isinstance(table, (Lines, HostRows)):
    return table.take(ids)
  return table.at[ids].get(mode="clip", wrap_negative_indices=False)


def gather_and_combine(stack: StackSpec, table: Rows, bags: Bags) -> jax.Array:
  """`lookup.gather_and_combine` of rows of the table, or of rows received, in float32."""
  if sparse_core.sums_bags(stack, bags):
    return sparse_core.gather_and_combine(_linear(table), bags)[..., : stack.width]
  if isinstance(table, HostRows):
    table, bags = table.of_bags(bags)
  return cpu_kernels.gather_and_combine(table, bags, stack.quantization, jnp.float32)


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
  if isinstance(x, (Lines, HostRows)):
    return x.put(at, new)
  return x.at[at].set(new.astype(x.dtype), mode="drop", unique_indices=True)


def _is_by_kernel(stack: StackSpec, x: Any) -> bool:
  """Whether SparseCores read and write an array: not slots of one value per row."""
  return stack.sparse_core and x.ndim == 2 and x.dtype == np.float32


def _put_by_kernel(
  stack: StackSpec, tables: Sequence[Rows], at: jax.Array, new: Sequence[jax.Array]
) -> list[Rows]:
  from embed.kernels.sparse_core import kernels

  linear = [_linear(table) for table in tables]
  filling = ((0, 0), (0, linear[0].shape[1] - stack.width))
  put = kernels.put(linear, at, [jnp.pad(rows, filling) for rows in new])
  return [
    Lines(rows.reshape(table.array.shape), table.width) if isinstance(table, Lines) else rows
    for table, rows in zip(tables, put, strict=True)
  ]


def _linear(table: Any) -> jax.Array:
  """Rows as kernels read them, filled up to whole vectors; lines are not copied for it."""
  if isinstance(table, Lines):
    return table.linear()
  filling = packing.row_width(table.shape[1]) - table.shape[1]  # of rows received
  return jnp.pad(table, ((0, 0), (0, filling))) if filling else table
