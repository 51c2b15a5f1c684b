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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from embed.engine import host, packing
from embed.engine.jax_internals import is_traced
from embed.engine.mesh import settled
from embed.engine.stack import Arrays, StackSpec
from embed.storage import placing, views
from embed.storage.views import View

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
    rows = block(stack, stored, index)
    if not stack.is_in_host or views.is_stored_so(stack.layout, chosen):
      return views.read(stack.layout, index, stack.dim, chosen, rows)
    rows = views.read(stack.layout, index, stack.dim, chosen, host.to_device(rows))
    return host.to_host(rows)

  return stack.placement.run(per_device, (stack.specs[stored.ndim],), chosen.spec)(stored)


def block(stack: StackSpec, stored: jax.Array, index: int) -> jax.Array:
  """The rows of a table on this device, `[height, D]` or `[height]`; the array itself if alone."""
  start, height = stack.layout.offsets[index], stack.layout.heights[index]
  if stack.is_packed and stored.ndim == 2:
    unit = stack.layout.unit
    lines = stored[start // unit : -(-(start + height) // unit)]
    in_chunks = packing.has_lines(stack.placement.device_kind)
    unpack = packing.unpack_in_chunks if in_chunks else packing.unpack
    return unpack(lines, stack.width)[:height]
  return stored if height == stored.shape[0] else stored[start : start + height]


def with_block(stack: StackSpec, stored: jax.Array, index: int, rows: jax.Array) -> jax.Array:
  """The array that a device stores, with the rows of one table replaced."""
  start, rows = stack.layout.offsets[index], rows.astype(stored.dtype)
  if stack.is_packed and stored.ndim == 2:
    unit = stack.layout.unit
    in_chunks = packing.has_lines(stack.placement.device_kind)
    pack = packing.pack_in_chunks if in_chunks else packing.pack
    rows = pack(jnp.pad(rows, ((0, -rows.shape[0] % unit), (0, 0))))
    start //= unit
  if rows.shape == stored.shape:
    return rows
  return jax.lax.dynamic_update_slice_in_dim(stored, rows, start, 0)


@jax.named_scope("lookup")
def read_whole(stack: StackSpec, stored: jax.Array, table: str) -> jax.Array:
  """A table on every device, for scores against all of its rows."""
  rows = (_read_compiled if stack.is_in_host else read)(stack, stored, table)
  return settled(stack.placement.put(host.to_device(settled(rows)), P()))


# Eager code cannot move a device's part of an array from one memory to the other.
_read_compiled = jax.jit(read, static_argnums=(0, 2))


def _store(
  stack: StackSpec, stored: jax.Array, tables: Mapping[str, Any], compact: bool = False
) -> jax.Array:
  """The stored array with some tables replaced by arrays in the form of `read`."""
  for name, value in tables.items():
    index = stack.indices[name]
    if stack.placement.is_local:
      value = placing.copied_like(value, stored)  # a donated step deletes what we store
      stored = with_block(stack, stored, index, value)
      continue
    chosen, spec = view(stack, name, stored.ndim, compact), stack.specs[stored.ndim]

    def per_device(stored, value, index=index, chosen=chosen):
      is_moved = stack.is_in_host and not views.is_stored_so(stack.layout, chosen)
      value = host.to_device(value) if is_moved else value
      rows = views.write(stack.layout, index, stack.dim, chosen, value)
      new = with_block(stack, stored, index, rows)
      return host.to_host(new) if stack.is_in_host else new

    stored = stack.placement.run(per_device, (spec, chosen.spec), spec)(stored, value)
  return stored


def shapes(
  stack: StackSpec, arrays: Arrays, table: str, compact: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
  """A table and its slots as `read_all` returns them, as shapes with shardings."""

  def shape(stored: Any) -> jax.ShapeDtypeStruct:
    where: Any = getattr(stored, "sharding", None)
    if not stack.placement.is_local:
      where = _where(stack, view(stack, table, stored.ndim, compact))
      if isinstance(where, P):
        where = stack.placement.sharding(where)
        where = where.with_memory_kind(host.KIND) if stack.is_in_host else where
    dims = (stack.size(table), stack.dim)[: stored.ndim]
    return jax.ShapeDtypeStruct(dims, stored.dtype, sharding=where)

  return {key: shape(arrays[key]) for key in ("parameters", *stack.slots)}


def view(stack: StackSpec, table: str, ndim: int, compact: bool = False) -> View:
  """How a table, or a slot of one value per row, is split where users see it."""
  compact = compact and not stack.is_in_host
  return views.choose(stack.layout, stack.indices[table], stack.dim, ndim, stack.placement, compact)


def _where(stack: StackSpec, chosen: View) -> Any:
  """A view's spec, or its sharding where the mesh of the storage has none for it."""
  if chosen.kind != "columns" or chosen.parts == stack.layout.shards:
    return chosen.spec
  return placing.compact(stack.placement, chosen.kept, chosen.parts)


def _reshaped(stack: StackSpec, x: jax.Array, table: str) -> jax.Array:
  """`[V, D]` or `[V]` of what `read` returns of a compact view; outside of jitted functions."""
  where = _where(stack, view(stack, table, x.ndim, compact=True))
  return x if isinstance(where, P) else placing.same_parts(stack.placement, x, stack.dim, where)


def _place(stack: StackSpec, value: Any, table: str, stored: jax.Array, compact: bool) -> jax.Array:
  """A table or slot as `_store` takes it."""
  chosen = view(stack, table, stored.ndim, compact)
  where = _where(stack, chosen)
  if stack.is_in_host and not is_traced(value):
    return placing.place_whole(
      stack.placement, value, stored.dtype, placing.in_host(stack.placement, where)
    )
  value = placing.place_whole(stack.placement, value, stored.dtype, where)
  if isinstance(where, P):
    return value
  columns = stack.dim // chosen.parts * stack.layout.shards
  return placing.same_parts(stack.placement, value, columns, chosen.spec)


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
