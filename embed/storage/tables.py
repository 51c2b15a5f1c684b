"""The stored arrays of stacks, read as tables and written.

A JAX array is split evenly or not at all, so a logical table `[V, D]` cannot always be split by
rows as its storage is. Its **view** is, in this order of preference: "rows" (consecutive ones,
where V divides by the number of shards), "columns" (where the D of a shard does), or "whole" (all
rows on every shard). Columns that are split already stay so where they divide. The first two are
one all-to-all from the storage and take as much memory as it does.

A **compact** view splits columns into as many parts as they divide into, if that is fewer than
there are shards, and shard r has part `r % parts`: 256 shards of a table of 128 columns hold two
copies of it instead of 256. Such an array is of a mesh of another shape, which jitted functions do
not mix with their own, so only what is saved and restored is compact.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embed.engine import jax_internals
from embed.engine import rows as rows_lib
from embed.engine.jax_internals import is_traced
from embed.engine.mesh import Columns, Names, Placement, current_mesh, settled
from embed.engine.stack import Arrays, Layout, StackSpec

# --- views: from a device's shard of the storage to its part of a view, and back ------------------


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


def choose_view(
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


def read_view(layout: Layout, table: int, dim: int, view: View, block: jax.Array) -> jax.Array:
  """A device's part of the view, from the rows of the table that it stores."""
  height = layout.heights[table]
  if view.column_axes != view.kept:
    block = Columns(view.column_axes, dim).whole(block)
  if not view.row_axes:
    return block[: layout.sizes[table]]
  n = layout.shards
  if view.kind == "rows" and layout.contiguous:
    return block
  if view.kind == "rows":
    local_rows, rows = _exchanged_rows(layout, table, view)
    return _exchange(view, block, local_rows, rows)
  if view.kind == "columns":
    parts = jnp.moveaxis(block.reshape(height, view.parts, -1), 1, 0)
    # A gather: of repeats XLA:CPU makes an all-to-all with operands of two layouts, and refuses it.
    parts = parts.at[jnp.arange(n) % view.parts].get(mode="promise_in_bounds")
    block = lax.all_to_all(parts, view.row_axes, 0, 0).reshape(n * height, -1)
  else:
    block = lax.all_gather(block, view.row_axes, tiled=True)
  return block.at[_order(layout, table)].get(mode="promise_in_bounds")


def write_view(layout: Layout, table: int, dim: int, view: View, value: jax.Array) -> jax.Array:
  """The rows of a table that a device stores, from its part of the view."""
  height = layout.heights[table]
  n = layout.shards
  if view.kind == "rows" and layout.contiguous:
    block = value
  elif view.kind == "rows":
    local_rows, rows = _exchanged_rows(layout, table, view)
    block = _exchange(view, value, rows, local_rows)
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
  first = lambda device, shard: -(-(device * each - shard) // n)
  local_rows = first(others, me)[:, None] + steps
  rows = (first(me, others)[:, None] + steps) * n + others[:, None] - me * each
  inside = local_rows * n + me < (others[:, None] + 1) * each
  return jnp.where(inside, local_rows, each), jnp.where(rows < each, rows, each)


def _exchange(view: View, x: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
  """Sends rows of `x` to each device, and returns an array of its shape with the received rows."""
  parts = x.at[sent].get(mode="fill", fill_value=0)
  parts = lax.all_to_all(parts, view.row_axes, 0, 0)
  flat = parts.reshape(-1, *x.shape[1:])
  return jnp.zeros_like(x).at[received.reshape(-1)].set(flat, mode="drop")


# --- placing arrays -------------------------------------------------------------------------------


def place_whole(placement: Placement, x: Any, dtype: Any, where: P | NamedSharding) -> jax.Array:
  """A whole array, the same on every host, split over devices without a copy of it on any."""
  if jax_internals.is_traced(x):
    assert isinstance(where, P)
    return placement.put(x.astype(dtype), where)
  sharding = _on_devices(placement, where)
  if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
    return jax.device_put(x.astype(dtype), sharding)
  whole = np.asarray(x)
  part = lambda index: whole[index].astype(dtype)
  return jax.make_array_from_callback(whole.shape, sharding, part)


def dtype_of(x: Any) -> Any:
  """The dtype of an array, of nested lists, or of the metadata of a stored array."""
  is_known = isinstance(x, jax.Array) or isinstance(getattr(x, "dtype", None), np.dtype)
  return x.dtype if is_known else np.asarray(x).dtype


def converts(x: Any, dtype: Any) -> bool:
  """Whether all values of an array are numbers of a dtype, but for their rounding."""
  given = dtype_of(x)
  if jnp.issubdtype(given, jnp.complexfloating):
    return jnp.issubdtype(dtype, jnp.complexfloating)
  return given == np.bool_ or jnp.issubdtype(given, jnp.number)


def copied_like(value: Any, old: jax.Array) -> jax.Array:
  """A copy of a value, on the devices of the array that it replaces."""
  if jax_internals.is_traced((value, old)):
    return jnp.array(value, old.dtype, copy=True)
  if isinstance(value, jax.Array) and value.is_fully_addressable:
    # What Orbax restores is committed to its device, and a step on a mesh refuses it.
    is_elsewhere = value.sharding != old.sharding or (value.committed and not old.committed)
    value = np.asarray(value) if is_elsewhere else value
  # NumPy arrays by an explicit transfer, which jax_transfer_guard allows.
  copy = jnp.array if isinstance(value, jax.Array) else np.array
  copied = copy(value, old.dtype, copy=True)
  return jax.device_put(copied, old.sharding if old.committed else None)


def same_parts(
  placement: Placement, x: jax.Array, columns: int, where: P | NamedSharding
) -> jax.Array:
  """An array `[V, columns]` of which each device has its part of `x`.

  For use outside of jitted functions.
  """
  sharding = _on_devices(placement, where)
  parts = [shard.data for shard in x.addressable_shards]
  return jax.make_array_from_single_device_arrays((x.shape[0], columns), sharding, parts)


def compact_sharding(placement: Placement, columns: Names, parts: int) -> NamedSharding:
  """Columns over `columns` and `parts`, of which shard r of the rows has number `r % parts`.

  That is no sharding of this mesh, but of its devices in another shape.
  """
  mesh = _devices_mesh(placement)
  other_axes = tuple(name for name in mesh.axis_names if name not in placement.row_axes)
  order = [mesh.axis_names.index(name) for name in (*other_axes, *placement.row_axes)]
  shape = [mesh.shape[name] for name in other_axes]
  devices = mesh.devices.transpose(order).reshape(*shape, placement.shards // parts, parts)
  # Named after the axes they are cut from, so that they differ from all others.
  copies, cut = (f"{kind} of {', '.join(placement.row_axes)}" for kind in ("copies", "parts"))
  return NamedSharding(Mesh(devices, (*other_axes, copies, cut)), P(None, (*columns, cut)))


def _on_devices(placement: Placement, where: P | NamedSharding) -> NamedSharding:
  return NamedSharding(_devices_mesh(placement), where) if isinstance(where, P) else where


def _devices_mesh(placement: Placement) -> Any:
  """Outside of jitted functions, where a layer made inside of one only knows an abstract mesh."""
  mesh = current_mesh() if isinstance(placement.mesh, AbstractMesh) else placement.active_mesh
  if mesh is None:
    raise ValueError(
      "This SparseEmbed was made inside a jitted function, under jax.set_mesh. Use it under "
      "jax.set_mesh too, or pass mesh=... where it is made."
    )
  return mesh


# --- tables ---------------------------------------------------------------------------------------


Replacements = Mapping[str, Mapping[str, Any]]  # of "parameters" and each slot, arrays by table


def read(stack: StackSpec, stored: jax.Array, table: str, compact: bool = False) -> jax.Array:
  """A table or slot with its rows in order: `[V, D]` or `[V]`.

  On a mesh the result is split over devices as evenly as its shape allows. The columns of a compact
  view occur as often as there are copies of them: see `_reshaped`.
  """
  index = stack.indices[table]
  if stack.placement.is_local:
    return block(stack, stored, index)
  chosen = view(stack, table, stored.ndim, compact)

  def per_device(stored):
    return read_view(stack.layout, index, stack.dim, chosen, block(stack, stored, index))

  return stack.placement.run(per_device, (stack.specs[stored.ndim],), chosen.spec)(stored)


def block(stack: StackSpec, stored: jax.Array, index: int) -> jax.Array:
  """The rows of a table on this device, `[height, D]` or `[height]`; the array itself if alone."""
  start, height = stack.layout.offsets[index], stack.layout.heights[index]
  if stack.is_packed and stored.ndim == 2:
    unit = stack.layout.unit
    lines = stored[start // unit : -(-(start + height) // unit)]
    in_chunks = rows_lib.has_lines(stack.placement.device_kind)
    unpack = rows_lib.unpack_in_chunks if in_chunks else rows_lib.unpack
    return unpack(lines, stack.width)[:height]
  return stored if height == stored.shape[0] else stored[start : start + height]


def with_block(stack: StackSpec, stored: jax.Array, index: int, rows: jax.Array) -> jax.Array:
  """The array that a device stores, with the rows of one table replaced."""
  start, rows = stack.layout.offsets[index], rows.astype(stored.dtype)
  if stack.is_packed and stored.ndim == 2:
    unit = stack.layout.unit
    in_chunks = rows_lib.has_lines(stack.placement.device_kind)
    pack = rows_lib.pack_in_chunks if in_chunks else rows_lib.pack
    rows = pack(jnp.pad(rows, ((0, -rows.shape[0] % unit), (0, 0))))
    start //= unit
  if rows.shape == stored.shape:
    return rows
  return jax.lax.dynamic_update_slice_in_dim(stored, rows, start, 0)


@jax.named_scope("lookup")
def read_whole(stack: StackSpec, stored: jax.Array, table: str) -> jax.Array:
  """A table on every device, for scores against all of its rows."""
  rows = settled(read(stack, stored, table))
  return settled(stack.placement.put(rows, P()))


def _store(
  stack: StackSpec, stored: jax.Array, tables: Mapping[str, Any], compact: bool = False
) -> jax.Array:
  """The stored array with some tables replaced by arrays in the form of `read`."""
  for name, value in tables.items():
    index = stack.indices[name]
    if stack.placement.is_local:
      value = copied_like(value, stored)  # a donated step deletes what we store
      stored = with_block(stack, stored, index, value)
      continue
    chosen, spec = view(stack, name, stored.ndim, compact), stack.specs[stored.ndim]

    def per_device(stored, value, index=index, chosen=chosen):
      rows = write_view(stack.layout, index, stack.dim, chosen, value)
      return with_block(stack, stored, index, rows)

    stored = stack.placement.run(per_device, (spec, chosen.spec), spec)(stored, value)
  return stored


def stored_bytes(stack: StackSpec) -> tuple[int, int]:
  """The bytes of the rows and of the slots of a stack on a device."""
  per_row = sum(
    (1 if slot.per_row else stack.row_width) * np.dtype(slot.dtype).itemsize
    for slot in stack.slots.values()
  )
  rows = stack.layout.shard_rows
  return rows * stack.row_width * np.dtype(stack.dtype).itemsize, rows * per_row


def shapes(
  stack: StackSpec, arrays: Arrays, table: str, compact: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
  """A table and its slots as `read_all` returns them, as shapes with shardings."""

  def shape(stored: Any) -> jax.ShapeDtypeStruct:
    where: Any = getattr(stored, "sharding", None)
    if not stack.placement.is_local:
      where = _where(stack, view(stack, table, stored.ndim, compact))
      where = stack.placement.sharding(where) if isinstance(where, P) else where
    dims = (stack.size(table), stack.dim)[: stored.ndim]
    return jax.ShapeDtypeStruct(dims, stored.dtype, sharding=where)

  return {key: shape(arrays[key]) for key in ("parameters", *stack.slots)}


def view(stack: StackSpec, table: str, ndim: int, compact: bool = False) -> View:
  """How a table, or a slot of one value per row, is split where users see it."""
  return choose_view(stack.layout, stack.indices[table], stack.dim, ndim, stack.placement, compact)


def _where(stack: StackSpec, chosen: View) -> Any:
  """A view's spec, or its sharding where the mesh of the storage has none for it."""
  if chosen.kind != "columns" or chosen.parts == stack.layout.shards:
    return chosen.spec
  return compact_sharding(stack.placement, chosen.kept, chosen.parts)


def _reshaped(stack: StackSpec, x: jax.Array, table: str) -> jax.Array:
  """`[V, D]` or `[V]` of what `read` returns of a compact view; outside of jitted functions."""
  where = _where(stack, view(stack, table, x.ndim, compact=True))
  return x if isinstance(where, P) else same_parts(stack.placement, x, stack.dim, where)


def _place(stack: StackSpec, value: Any, table: str, stored: jax.Array, compact: bool) -> jax.Array:
  """A table or slot as `_store` takes it."""
  chosen = view(stack, table, stored.ndim, compact)
  where = _where(stack, chosen)
  value = place_whole(stack.placement, value, stored.dtype, where)
  if isinstance(where, P):
    return value
  columns = stack.dim // chosen.parts * stack.layout.shards
  return same_parts(stack.placement, value, columns, chosen.spec)


# All tables in one program: of many that communicate, started one after another, XLA:CPU may run
# so many at a time that none has threads enough to end.


def read_all(
  stacks: Sequence[StackSpec], arrays: Sequence[Arrays], compact: bool = False
) -> dict[str, Arrays]:
  """Every table and slot as users see it, `{table: {"parameters": array, slot: array}}`.

  `compact`: in a view of less memory, where there is one, outside of jitted functions.
  """
  tables: dict[str, Arrays] = {}
  spread = [i for i, stack in enumerate(stacks) if not stack.placement.is_local]
  compact = compact and not is_traced(arrays)
  for stack, stored in zip(stacks, arrays, strict=True):
    if stack.placement.is_local:
      tables |= _read_stack(stack, stored)
  if spread:
    of_mesh = tuple(stacks[i] for i in spread)
    views_of = settled(_read_spread(of_mesh, [arrays[i] for i in spread], compact))
    if compact:
      of = {name: stack for stack in of_mesh for name in stack.tables}
      views_of = {
        name: {key: _reshaped(of[name], x, name) for key, x in table.items()}
        for name, table in views_of.items()
      }
    tables |= views_of
  return tables


def _read_stack(stack: StackSpec, stored: Arrays, compact: bool = False) -> dict[str, Arrays]:
  keys = ("parameters", *stack.slots)
  of = lambda name: {k: read(stack, stored[k], name, compact) for k in keys}
  return {name: of(name) for name in stack.tables}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _read_spread(
  stacks: tuple[StackSpec, ...], arrays: Sequence[Arrays], compact: bool
) -> dict[str, Arrays]:
  pairs = zip(stacks, arrays, strict=True)
  each = [_read_stack(stack, stored, compact) for stack, stored in pairs]
  return {name: tables[name] for tables in each for name in tables}


def store_all(
  stacks: Sequence[StackSpec], arrays: Sequence[Arrays], replacements: Sequence[Replacements]
) -> list[Arrays]:
  """The stored arrays with some tables and slots replaced by arrays in the form of `read_all`."""
  new = [dict(stored) for stored in arrays]
  compact = not is_traced((arrays, replacements))
  where: list[tuple[int, str]] = []
  olds, values = [], []
  for i, stack in enumerate(stacks):
    for key, tables in replacements[i].items():
      old = arrays[i][key]
      if stack.placement.is_local:
        new[i][key] = _store(stack, old, tables)
      elif tables:
        where.append((i, key))
        olds.append(old)
        values.append({name: _place(stack, x, name, old, compact) for name, x in tables.items()})
  if where:
    spread = settled(_store_spread(tuple(stacks[i] for i, _ in where), olds, values, compact))
    for (i, key), value in zip(where, spread, strict=True):
      new[i][key] = value
  return new


@functools.partial(jax.jit, static_argnums=(0, 3))
def _store_spread(
  stacks: tuple[StackSpec, ...], stored: Any, values: Any, compact: bool
) -> list[jax.Array]:
  each = zip(stacks, stored, values, strict=True)
  return [_store(stack, old, tables, compact) for stack, old, tables in each]
