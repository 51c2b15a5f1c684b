"""From a device's shard of the storage to its part of a table's view, and back; see `tables`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.engine.layout import Columns, Layout
from embed.engine.mesh import Placement


class View(NamedTuple):
  """How a logical table or slot is split.

  `row_axes`, `column_axes`: they split the storage; `kept`: those of `column_axes` that split the
  view as well; `parts`: how many parts columns are split into besides, in "columns".
  """

  kind: str  # "rows", "columns" or "whole"
  spec: P
  row_axes: tuple[str, ...]
  column_axes: tuple[str, ...]
  kept: tuple[str, ...]
  parts: int = 1


def choose(
  layout: Layout, table: int, dim: int, ndim: int, placement: Placement, compact: bool = False
) -> View:
  """The view of a table (ndim 2) or a slot of one value per row (ndim 1)."""
  n = layout.shards
  columns = placement.column_axes if ndim == 2 else ()
  kept = columns if dim % placement.column_shards == 0 else ()
  make = lambda kind, rows, over, parts=1: View(
    kind, P(*(rows or None, over or None)[:ndim]), placement.row_axes, columns, kept, parts
  )
  if not placement.row_axes:
    return make("whole", (), kept)
  if layout.sizes[table] % n == 0:
    return make("rows", placement.row_axes, kept)
  parts = math.gcd(n, dim // placement.column_shards if kept else dim)
  if ndim == 2 and (parts == n or (compact and parts > 1)):
    return make("columns", (), (*kept, *placement.row_axes), parts)
  return make("whole", (), kept)


def is_stored_so(layout: Layout, view: View) -> bool:
  """Whether a device's part of a view is what it stores: nothing is moved nor computed."""
  return view.kind == "rows" and layout.contiguous and view.column_axes == view.kept


def read(layout: Layout, table: int, dim: int, view: View, block: jax.Array) -> jax.Array:
  """A device's part of the view, from the rows of the table that it stores."""
  height = layout.heights[table]
  if view.column_axes != view.kept:
    block = Columns(view.column_axes, dim).whole(block)
  if not view.row_axes:
    return block[: layout.sizes[table]]
  if view.kind == "rows":
    return _read_rows(layout, table, view, block)
  n = layout.shards
  if view.kind == "columns":
    parts = jnp.moveaxis(block.reshape(height, view.parts, -1), 1, 0)
    # A gather: of repeats XLA:CPU makes an all-to-all with operands of two layouts, and refuses it.
    parts = parts.at[jnp.arange(n) % view.parts].get(mode="promise_in_bounds")
    block = lax.all_to_all(parts, view.row_axes, 0, 0).reshape(n * height, -1)
  else:
    block = lax.all_gather(block, view.row_axes, tiled=True)
  return block.at[_order(layout, table)].get(mode="promise_in_bounds")


def write(layout: Layout, table: int, dim: int, view: View, value: jax.Array) -> jax.Array:
  """The rows of a table that a device stores, from its part of the view."""
  height = layout.heights[table]
  n = layout.shards
  if view.kind == "rows":
    block = _write_rows(layout, table, view, value)
  elif view.kind == "columns":
    shards = jnp.arange(n, dtype=jnp.int32)
    ids = jax.vmap(lambda s: layout.own_ids(table, s))(shards)  # [n, height]
    parts = value.at[ids].get(mode="fill", fill_value=0)
    parts = lax.all_to_all(parts, view.row_axes, 0, 0)[: view.parts]
    block = jnp.moveaxis(parts, 0, 1).reshape(height, -1)
  else:
    me = lax.axis_index(view.row_axes) if view.row_axes else 0
    block = value.at[layout.own_ids(table, me)].get(mode="fill", fill_value=0)
  if view.column_axes != view.kept:
    block = Columns(view.column_axes, dim).own(block)
  return block


def _order(layout: Layout, table: int) -> jax.Array:
  """Where each row of a table is among the shards' blocks, one after another."""
  ids = jnp.arange(layout.sizes[table], dtype=jnp.int32)
  shard, local_row = layout.locate(table, ids)
  return shard * layout.heights[table] + local_row - layout.offsets[table]


# Rows: every device has `each` consecutive rows of the view, and of the storage as many, which are
# the view's in "div", and every n-th of the table in "mod". Of those that shard s stores, device d
# sees those from ceil((d * each - s) / n) on; there are at most each // n + 1 of them.


def _first_local_row(device, shard, each: int, n: int):
  return -(-(device * each - shard) // n)


def _exchanged_rows(layout: Layout, table: int, view: View) -> tuple[jax.Array, jax.Array]:
  """The rows that this device exchanges with each device of a "rows" view of a table under "mod".

  Returns:
    Local rows that it stores of the other's part of the view, and rows of its own part that the
    other stores: int32 `[shards, M]` each, the height of a shard where there is none.
  """
  n, each = layout.shards, layout.heights[table]
  me = lax.axis_index(view.row_axes)
  others = jnp.arange(n, dtype=jnp.int32)
  steps = jnp.arange(each // n + 1, dtype=jnp.int32)[None]
  local_rows = _first_local_row(others, me, each, n)[:, None] + steps
  rows = (_first_local_row(me, others, each, n)[:, None] + steps) * n + others[:, None] - me * each
  inside = local_rows * n + me < (others[:, None] + 1) * each
  return jnp.where(inside, local_rows, each), jnp.where(rows < each, rows, each)


def _read_rows(layout: Layout, table: int, view: View, block: jax.Array) -> jax.Array:
  if layout.contiguous:
    return block
  local_rows, rows = _exchanged_rows(layout, table, view)
  parts = block.at[local_rows].get(mode="fill", fill_value=0)
  parts = lax.all_to_all(parts, view.row_axes, 0, 0)
  flat = parts.reshape(-1, *block.shape[1:])
  return jnp.zeros_like(block).at[rows.reshape(-1)].set(flat, mode="drop")


def _write_rows(layout: Layout, table: int, view: View, value: jax.Array) -> jax.Array:
  if layout.contiguous:
    return value
  local_rows, rows = _exchanged_rows(layout, table, view)
  parts = value.at[rows].get(mode="fill", fill_value=0)
  parts = lax.all_to_all(parts, view.row_axes, 0, 0)
  flat = parts.reshape(-1, *value.shape[1:])
  return jnp.zeros_like(value).at[local_rows.reshape(-1)].set(flat, mode="drop")
