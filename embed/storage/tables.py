"""Reads the stored arrays of stacks as logical tables, and writes them.

JAX splits an array evenly or not at all, so a logical table `[V, D]` cannot always be split like
its storage. Its **view** is, in this order of preference: "rows" (consecutive rows, if the number
of shards divides V), "columns" (if it divides D), or "whole" (all rows on every shard). The first
two take one all-to-all, and as much memory as the storage.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embed.engine import rows as rows_lib
from embed.engine.mesh import Placement, current_mesh, settled
from embed.engine.stack import Arrays, Layout, StackSpec
from embed.engine.xla import is_traced

Replacements = Mapping[str, Mapping[str, Any]]  # arrays by table, of "parameters" and each slot

# --- views: from a device's shard of the storage to its part of a view, and back ------------------


class View(NamedTuple):
  """The split of a logical table or slot: `kind` is "rows", "columns" or "whole"."""

  kind: str
  spec: P
  row_axes: tuple[str, ...]  # of the storage


def view(stack: StackSpec, table: str, ndim: int) -> View:
  """The view of a table (ndim 2), or of a slot with one value per row (ndim 1)."""
  axes, shards = stack.placement.row_axes, stack.layout.shards
  if axes and stack.size(table) % shards == 0:
    return View("rows", P(*(axes, None)[:ndim]), axes)
  if axes and ndim == 2 and stack.dim % shards == 0:
    return View("columns", P(None, axes), axes)
  return View("whole", P(), axes)


def read_view(layout: Layout, table: int, view: View, block: jax.Array) -> jax.Array:
  """A device's part of the view, computed from the table rows that each device stores."""
  if not view.row_axes:
    return block[: layout.sizes[table]]
  n, height = layout.shards, layout.heights[table]
  if view.kind == "rows":
    if layout.contiguous:
      return block
    local_rows, rows = _exchanged_rows(layout, table, view)
    return _exchange(view, block, local_rows, rows)
  if view.kind == "columns":
    parts = jnp.moveaxis(block.reshape(height, n, -1), 1, 0)
    block = lax.all_to_all(parts, view.row_axes, 0, 0).reshape(n * height, -1)
  else:
    block = lax.all_gather(block, view.row_axes, tiled=True)
  ids = jnp.arange(layout.sizes[table], dtype=jnp.int32)
  shard, local_row = layout.locate(table, ids)
  order = shard * height + local_row - layout.offsets[table]  # among the blocks of all shards
  return block.at[order].get(mode="promise_in_bounds")


def write_view(layout: Layout, table: int, view: View, value: jax.Array) -> jax.Array:
  """The rows of a table that a device stores, from its part of the view."""
  n, height = layout.shards, layout.heights[table]
  if view.kind == "rows":
    if layout.contiguous:
      return value
    local_rows, rows = _exchanged_rows(layout, table, view)
    return _exchange(view, value, rows, local_rows)
  if view.kind == "columns":
    shards = jnp.arange(n, dtype=jnp.int32)
    ids = jax.vmap(lambda s: layout.own_ids(table, s))(shards)  # [n, height]
    parts = value.at[ids].get(mode="fill", fill_value=0)
    parts = lax.all_to_all(parts, view.row_axes, 0, 0)
    return jnp.moveaxis(parts, 0, 1).reshape(height, -1)
  me = lax.axis_index(view.row_axes) if view.row_axes else 0
  return value.at[layout.own_ids(table, me)].get(mode="fill", fill_value=0)


# Every device has `each` consecutive rows of the view, and stores as many rows: under "mod", every
# n-th row of the table. From the rows that shard s stores, device d sees at most each // n + 1, the
# first at local row ceil((d * each - s) / n).


def _exchanged_rows(layout: Layout, table: int, view: View) -> tuple[jax.Array, jax.Array]:
  """The rows that this device exchanges with each device of a "rows" view under "mod".

  Returns:
    The local rows that it stores of the other's part of the view, and the rows of its own part that
    the other stores: int32 `[shards, M]` each, the table's height where there is no row.
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
  """Sends rows of `x` to each device; returns an array of the same shape with the received rows."""
  parts = x.at[sent].get(mode="fill", fill_value=0)
  parts = lax.all_to_all(parts, view.row_axes, 0, 0)
  flat = parts.reshape(-1, *x.shape[1:])
  return jnp.zeros_like(x).at[received.reshape(-1)].set(flat, mode="drop")


# --- placing arrays -------------------------------------------------------------------------------


def place_whole(placement: Placement, x: Any, dtype: Any, where: P) -> jax.Array:
  """Splits a whole array, the same on every host, over devices; none gets a full copy of it."""
  if is_traced(x):
    return placement.put(x.astype(dtype), where)
  sharding = NamedSharding(_mesh_of_devices(placement), where)
  if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
    return jax.device_put(x.astype(dtype), sharding)
  whole = np.asarray(x)
  part = lambda index: whole[index].astype(dtype)
  return jax.make_array_from_callback(whole.shape, sharding, part)


def _mesh_of_devices(placement: Placement) -> Any:
  """The concrete mesh; a layer that was made inside a jitted function has only an abstract one."""
  mesh = current_mesh() if isinstance(placement.mesh, AbstractMesh) else placement.active_mesh
  if mesh is None:
    raise ValueError(
      "This SparseEmbed was made inside a jitted function, under jax.set_mesh. Use it under "
      "jax.set_mesh too, or pass mesh=... where it is made."
    )
  return mesh


def dtype_of(x: Any) -> Any:
  """The dtype of an array, of nested lists, or of the metadata of a stored array."""
  is_known = isinstance(x, jax.Array) or isinstance(getattr(x, "dtype", None), np.dtype)
  return x.dtype if is_known else np.asarray(x).dtype


def misfit(x: Any, wanted: Any) -> str | None:
  """The reason that an array, or the metadata of a stored one, cannot replace another, or None."""
  shape = getattr(x, "shape", None)  # None in the metadata of a leaf that is not an array
  shape, given = np.shape(x) if shape is None else tuple(shape), dtype_of(x)
  if shape != wanted.shape:
    return f"has shape {shape}, the model's has {wanted.shape}"
  is_real = given == np.bool_ or jnp.issubdtype(given, jnp.number)
  if jnp.issubdtype(given, jnp.complexfloating):
    is_real = jnp.issubdtype(wanted.dtype, jnp.complexfloating)
  return None if is_real else f"has dtype {given}, the model's is {wanted.dtype}"


def copied_like(value: Any, old: jax.Array) -> jax.Array:
  """A copy of a value, on the devices of the array that it replaces."""
  if is_traced((value, old)):
    return jnp.array(value, old.dtype, copy=True)
  if isinstance(value, jax.Array) and value.is_fully_addressable:
    # Arrays that Orbax restores are committed to their device; a step on a mesh rejects them.
    is_elsewhere = value.sharding != old.sharding or (value.committed and not old.committed)
    value = np.asarray(value) if is_elsewhere else value
  # Moves NumPy arrays by an explicit transfer, which jax_transfer_guard allows.
  copy = jnp.array if isinstance(value, jax.Array) else np.array
  copied = copy(value, old.dtype, copy=True)
  return jax.device_put(copied, old.sharding if old.committed else None)


# --- one table ------------------------------------------------------------------------------------


def block(stack: StackSpec, stored: jax.Array, index: int) -> jax.Array:
  """The rows of a table on this device, `[height, D]` or `[height]`; all of `stored` if alone."""
  start, height = stack.layout.offsets[index], stack.layout.heights[index]
  if stack.is_packed and stored.ndim == 2:
    unit = stack.layout.unit
    lines = stored[start // unit : -(-(start + height) // unit)]
    return rows_lib.unpack(lines, stack.dim)[:height]
  return stored if height == stored.shape[0] else stored[start : start + height]


def with_block(stack: StackSpec, stored: jax.Array, index: int, rows: jax.Array) -> jax.Array:
  """The array that a device stores, with the rows of one table replaced."""
  start, rows = stack.layout.offsets[index], rows.astype(stored.dtype)
  if stack.is_packed and stored.ndim == 2:
    unit = stack.layout.unit
    rows = rows_lib.pack(jnp.pad(rows, ((0, -rows.shape[0] % unit), (0, 0))))
    start //= unit
  if rows.shape == stored.shape:
    return rows
  return lax.dynamic_update_slice_in_dim(stored, rows, start, 0)


def read(stack: StackSpec, stored: jax.Array, table: str) -> jax.Array:
  """A table or slot with its rows in order, `[V, D]` or `[V]`, split as its view says."""
  index, chosen = stack.indices[table], view(stack, table, stored.ndim)
  if stack.placement.is_local:
    return block(stack, stored, index)

  def per_device(stored):
    return read_view(stack.layout, index, chosen, block(stack, stored, index))

  return stack.placement.run(per_device, (stack.specs[stored.ndim],), chosen.spec)(stored)


@jax.named_scope("lookup")
def read_whole(stack: StackSpec, stored: jax.Array, table: str) -> jax.Array:
  """A whole table, copied to every device, to score queries against all of its rows."""
  rows = settled(read(stack, stored, table))
  return settled(stack.placement.put(rows, P()))


def stored_bytes(stack: StackSpec) -> tuple[int, int]:
  """The bytes that a stack's rows take on a device, and the bytes that its slots take."""
  per_row = sum(
    (1 if slot.per_row else stack.row_width) * np.dtype(slot.dtype).itemsize
    for slot in stack.slots.values()
  )
  rows = stack.layout.shard_rows
  return rows * stack.row_width * np.dtype(stack.dtype).itemsize, rows * per_row


def shapes(stack: StackSpec, arrays: Arrays, table: str) -> dict[str, jax.ShapeDtypeStruct]:
  """A table and its slots as `read_all` returns them, as shapes with shardings."""

  def shape(stored: Any) -> jax.ShapeDtypeStruct:
    where: Any = getattr(stored, "sharding", None)
    if not stack.placement.is_local:
      where = stack.placement.sharding(view(stack, table, stored.ndim).spec)
    dims = (stack.size(table), stack.dim)[: stored.ndim]
    return jax.ShapeDtypeStruct(dims, stored.dtype, sharding=where)

  return {key: shape(arrays[key]) for key in ("parameters", *stack.slots)}


# --- all tables -----------------------------------------------------------------------------------

# All in one program: if many communicating programs are started one after another, XLA:CPU may run
# so many at once that none has enough threads to finish.


def read_all(stacks: Sequence[StackSpec], arrays: Sequence[Arrays]) -> dict[str, Arrays]:
  """Every table and slot as users see it, `{table: {"parameters": array, slot: array}}`."""
  if all(stack.placement.is_local for stack in stacks):
    return _read_stacks(tuple(stacks), arrays)
  return settled(_read_stacks_together(tuple(stacks), list(arrays)))


def _read_stacks(stacks: tuple[StackSpec, ...], arrays: Sequence[Arrays]) -> dict[str, Arrays]:
  return {
    name: {key: read(stack, stored[key], name) for key in ("parameters", *stack.slots)}
    for stack, stored in zip(stacks, arrays, strict=True)
    for name in stack.tables
  }


_read_stacks_together = jax.jit(_read_stacks, static_argnums=0)


def store_all(
  stacks: Sequence[StackSpec], arrays: Sequence[Arrays], replacements: Sequence[Replacements]
) -> list[Arrays]:
  """Returns stored arrays with some tables and slots replaced, given as `read_all` returns them."""
  where = [(i, key) for i, given in enumerate(replacements) for key in given if given[key]]
  chosen = tuple(stacks[i] for i, _ in where)
  olds = [arrays[i][key] for i, key in where]
  values = [_placed(stacks[i], arrays[i][key], replacements[i][key]) for i, key in where]
  if all(stack.placement.is_local for stack in stacks):
    stored = _store(chosen, olds, values)
  else:
    stored = settled(_store_together(chosen, olds, values))
  new = [dict(x) for x in arrays]
  for (i, key), x in zip(where, stored, strict=True):
    new[i][key] = x
  return new


def _placed(stack: StackSpec, old: jax.Array, tables: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Copies tables to the devices that store them, split as their views are."""
  if stack.placement.is_local:
    return {name: copied_like(x, old) for name, x in tables.items()}
  spec_of = lambda name: view(stack, name, old.ndim).spec
  place = functools.partial(place_whole, stack.placement, dtype=old.dtype)
  return {name: place(x, where=spec_of(name)) for name, x in tables.items()}


def _store(stacks: tuple[StackSpec, ...], arrays: Any, values: Any) -> list[jax.Array]:
  new = []
  for stack, stored, tables in zip(stacks, arrays, values, strict=True):
    for name, value in tables.items():
      stored = _store_table(stack, stored, name, value)
    new.append(stored)
  return new


_store_together = jax.jit(_store, static_argnums=0)


def _store_table(stack: StackSpec, stored: jax.Array, table: str, value: jax.Array) -> jax.Array:
  index = stack.indices[table]
  if stack.placement.is_local:
    return with_block(stack, stored, index, value)
  chosen, spec = view(stack, table, stored.ndim), stack.specs[stored.ndim]

  def per_device(stored, value):
    return with_block(stack, stored, index, write_view(stack.layout, index, chosen, value))

  return stack.placement.run(per_device, (spec, chosen.spec), spec)(stored, value)
