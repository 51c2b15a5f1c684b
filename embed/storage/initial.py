"""Initial rows and slots of stacks; each device makes its own."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from embed import initializers
from embed.config import TableConfig
from embed.engine import mesh as mesh_lib
from embed.engine import rows as rows_lib
from embed.engine.stack import Arrays, StackSpec
from embed.storage import tables as stored_tables

if TYPE_CHECKING:
  from embed.optimizers import Slot

Makers = tuple[tuple[str, initializers.RowWise], ...]  # of rows, by table


def make(
  stack: StackSpec, tables: Mapping[str, TableConfig], keys: Mapping[str, jax.Array]
) -> Arrays:
  """Makes initial rows and slots by name, from the config and random key of each table."""
  slots = {name: _filling(stack, slot)() for name, slot in stack.slots.items()}
  return {"parameters": _make_rows(stack, tables, keys), **slots}


def _make_rows(
  stack: StackSpec, tables: Mapping[str, TableConfig], keys: Mapping[str, jax.Array]
) -> jax.Array:
  row_wise: dict[str, initializers.RowWise] = {}
  whole = {}
  for name in stack.tables:
    given, shape = tables[name].initializer, (stack.size(name), stack.dim)
    given = given or initializers.truncated_normal_rows
    if isinstance(given, initializers.RowWise):
      row_wise[name] = given
      continue
    whole[name] = rows = given(keys[name], shape, stack.dtype)
    if np.shape(rows) != shape:
      raise ValueError(f"Table {name!r}: its initializer returned {np.shape(rows)}, not {shape}.")
  makers = tuple(row_wise.items())
  rows = _drawing(stack, makers, stack.dtype)({name: keys[name] for name in row_wise})
  return stored_tables.store_all([stack], [{"rows": rows}], [{"rows": whole}])[0]["rows"]


@functools.lru_cache(maxsize=16)
def _filling(stack: StackSpec, slot: "Slot") -> Callable[[], jax.Array]:
  """Makes a function that returns a slot, as it is stored, filled with its initial value."""
  shape = (stack.layout.shard_rows,) if slot.per_row else stack.stored_shape
  fill = functools.partial(jnp.full, shape, slot.initial, slot.dtype)
  return jax.jit(stack.placement.run(fill, (), stack.specs[len(shape)]))


# --- rows that change hands ----------------------------------------------------------------------

_NEW_ROWS = 1 << 9  # rows of a chunk: a batch has few new rows


def reset(
  stack: StackSpec, table: str, maker: Any, arrays: Arrays, key: Any, new: Any, ids: Any
) -> Arrays:
  """Sets rows and slots of new owners to initial values, in place.

  The values depend only on the table's key, uint32 `[2]`, and the raw ids, uint32 `[N, 2]`. `new`,
  int32 `[N]`, are the rows of these ids, or the size of the table in unused entries.
  """
  chunk, n = min(_NEW_ROWS, new.shape[0]), new.shape[0]

  def values(key, ids):
    tables = jnp.zeros(chunk, jnp.int32)
    made = {"parameters": maker.rows(key[None], tables, ids, stack.dim, stack.dtype)}
    for name, slot in stack.slots.items():
      shape = (chunk,) if slot.per_row else (chunk, stack.dim)
      made[name] = jnp.full(shape, slot.initial, slot.dtype)
    return made

  def per_device(arrays, key, new, ids):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    shard, local_row = stack.layout.locate(stack.indices[table], new)
    is_own = (shard == mesh_lib.device_index(stack.placement.row_axes)) & (new < stack.size(table))
    slot = jnp.where(is_own, jnp.cumsum(is_own, dtype=jnp.int32) - 1, n + chunk)
    unused = jnp.full(n + chunk, stack.layout.shard_rows, jnp.int32)
    local_rows = unused.at[slot].set(local_row, mode="drop")
    index = jnp.zeros(n + chunk, jnp.int32)
    index = index.at[slot].set(jnp.arange(n, dtype=jnp.int32), mode="drop")

    def body(i, arrays):
      part = lambda x: jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk)
      made = values(key, ids.at[part(index)].get(mode="promise_in_bounds"))
      return rows_lib.write(arrays, part(local_rows), made)

    count = jnp.sum(is_own, dtype=jnp.int32)
    rows = rows_lib.as_rows(stack, arrays)
    return rows_lib.as_stored(stack, jax.lax.fori_loop(0, -(-count // chunk), body, rows))

  specs = {name: stack.specs[x.ndim] for name, x in arrays.items()}
  return stack.placement.run(per_device, (specs, P(), P(), P()), specs)(arrays, key, new, ids)


# Keeps only the last few programs, since initializers are often made anew for each config.
@functools.lru_cache(maxsize=16)
def _drawing(
  stack: StackSpec, makers: Makers, dtype: Any
) -> Callable[[Mapping[str, jax.Array]], jax.Array]:
  """Makes a function from keys by table to stored rows, drawn row by row; zeros elsewhere."""
  layout = stack.layout
  by_maker: dict[initializers.RowWise, list[str]] = {}
  for name, maker in makers:
    by_maker.setdefault(maker, []).append(name)

  def draw(maker, names, shard, keys, local_rows):
    tables = ids = jnp.zeros_like(local_rows)
    is_drawn = jnp.zeros(local_rows.shape, bool)
    for number, name in enumerate(names):
      own = layout.ids(stack.indices[name], shard, local_rows)
      is_own = own < stack.size(name)
      tables, ids = jnp.where(is_own, number, tables), jnp.where(is_own, own, ids)
      is_drawn |= is_own
    keys = jnp.stack([keys[name] for name in names])
    return maker.rows(keys, tables, ids, stack.dim, dtype), is_drawn

  def draw_lines(drawing, lines):
    local_rows = lines[:, None] * layout.unit + jnp.arange(layout.unit, dtype=jnp.int32)[None]
    rows, is_drawn = drawing(local_rows.reshape(-1))
    is_drawn = jnp.broadcast_to(is_drawn[:, None], rows.shape)
    return rows_lib.pack(rows), rows_lib.pack(is_drawn)

  def per_device(keys):
    shard = mesh_lib.device_index(stack.placement.row_axes)
    rows = jnp.zeros(stack.stored_shape, dtype)
    # One loop for all tables of an initializer, since its code takes most of the compile time.
    for maker, names in by_maker.items():
      indices = [stack.indices[name] for name in names]
      start = layout.offsets[min(indices)]
      end = layout.offsets[max(indices)] + layout.heights[max(indices)]
      drawing = functools.partial(draw, maker, names, shard, keys)
      if stack.is_packed:
        drawing = functools.partial(draw_lines, drawing)
      unit = layout.unit
      at_a_time = initializers.ROWS_AT_A_TIME // unit
      rows = initializers.fill(rows, start // unit, -(-end // unit), drawing, at_a_time)
    return rows

  return jax.jit(stack.placement.run(per_device, (P(),), stack.specs[2]))
