"""The stored arrays of stacks: made, read as tables, and written.

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

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from embed import initializers
from embed.config import TableConfig
from embed.engine import host, packing, views
from embed.engine.stack import Arrays, StackSpec
from embed.engine.views import View
from embed.row_optimizer import Slot
from embed.tools import text

Makers = tuple[tuple[str, initializers.RowWise], ...]  # of rows, by table
Replacements = Mapping[str, Mapping[str, Any]]  # of "parameters" and each slot, arrays by table

# --- initial values ------------------------------------------------------------------------------


def make(
  stack: StackSpec, tables: Mapping[str, TableConfig], keys: Mapping[str, jax.Array]
) -> Arrays:
  """Initial rows and slots, each device's own rows made by it.

  Args:
    stack: what to make.
    tables: the config of each table, for its initializer.
    keys: a random key for each table.

  Raises:
    MemoryError: if they do not fit.
    ValueError: if an initializer returns another shape than the table's.
  """
  try:
    return {"parameters": _make_rows(stack, tables, keys), **_make_slots(stack, keys)}
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise MemoryError(_does_not_fit(stack)) from error


def _does_not_fit(stack: StackSpec) -> str:
  rows = stack.layout.rows * stack.row_width * np.dtype(stack.dtype).itemsize
  columns = [1 if slot.per_row else stack.row_width for slot in stack.slots.values()]
  itemsizes = [np.dtype(slot.dtype).itemsize for slot in stack.slots.values()]
  per_row = sum(n * size for n, size in zip(columns, itemsizes, strict=True))
  total = rows + stack.layout.rows * per_row
  slots = f", {text.size(total)} with slots ({', '.join(stack.slots)})" if stack.slots else ""
  tables = ", ".join(map(repr, stack.tables[:3])) + (", ..." if len(stack.tables) > 3 else "")
  return (
    f"Out of memory while making {'tables' if len(stack.tables) > 1 else 'table'} {tables}: rows "
    f"take {text.size(rows)}{slots}, on each device. Print embed.plan(features, mesh, batch, "
    "optimizer, hbm_bytes=...) to see what every table takes, and SparseEmbed(plan=...) spreads "
    'them over the mesh so that they fit, or plan[table].memory = "host" keeps them off it. '
    "Rows of bfloat16, or an optimizer of fewer slots, such as embed.rowwise_adagrad, take less."
  )


def _make_rows(
  stack: StackSpec, tables: Mapping[str, TableConfig], keys: Mapping[str, jax.Array]
) -> jax.Array:
  row_wise: dict[str, initializers.RowWise] = {}
  whole = {}
  for name in stack.tables:
    table = tables[name]
    if table.initializer is None:
      row_wise[name] = initializers.truncated_normal_rows
    elif isinstance(table.initializer, initializers.RowWise):
      row_wise[name] = table.initializer
    else:
      shape = (table.vocabulary_size, table.dim)
      rows = table.initializer(keys[name], shape, table.dtype)
      if np.shape(rows) != shape:
        raise ValueError(f"Table {name!r}: its initializer returned {np.shape(rows)}, not {shape}.")
      whole[name] = rows
  if stack.is_in_host and not _traced(keys):
    rows = _drawn_in_host(stack, row_wise, keys)
  else:
    makers = tuple(row_wise.items())
    rows = _drawing(stack, makers, stack.dtype)({name: keys[name] for name in row_wise})
  return store_all([stack], [{"rows": rows}], [{"rows": whole}])[0]["rows"]


def _drawn_in_host(
  stack: StackSpec, makers: Mapping[str, initializers.RowWise], keys: Mapping[str, jax.Array]
) -> jax.Array:
  """The initial rows of the one table of a stack, chunk by chunk into the memory of the host.

  A program that made all of them would hold them on the device, which has no room for them.
  """
  layout, (name,) = stack.layout, stack.tables
  columns = stack.width * stack.placement.column_shards

  @functools.partial(jax.jit, static_argnums=0)
  def draw(maker, key, ids):
    rows = maker.rows(key[None], jnp.zeros_like(ids), ids, stack.dim, stack.dtype)
    return jnp.pad(rows, ((0, 0), (0, columns - stack.dim)))

  def part(index: Any) -> np.ndarray:
    shard, of_device = (index[0].start or 0) // layout.rows, index[1]
    rows = np.zeros((layout.rows, columns), stack.dtype)[:, of_device]
    chunk = min(layout.rows, initializers.ROWS_AT_A_TIME)
    for start in range(0, layout.rows if name in makers else 0, chunk):
      first = min(start, layout.rows - chunk)
      ids = np.asarray(layout.ids(0, shard, first + jnp.arange(chunk, dtype=jnp.int32)))
      new = np.asarray(draw(makers[name], keys[name], ids))[:, of_device]
      is_row = ids < layout.sizes[0]
      rows[first : first + chunk][is_row] = new[is_row]
    return rows

  return _from_parts(stack, (layout.rows * layout.shards, columns), part)


def _from_parts(
  stack: StackSpec, shape: tuple[int, ...], part: Callable[[Any], np.ndarray]
) -> jax.Array:
  """An array in the memory of the host, from a function of the index of each device's part."""
  where = stack.placement.in_host(stack.specs[len(shape)])
  if stack.placement.is_local:  # from a callback it would be in the memory of the device
    return jax.device_put(part((slice(None),) * len(shape)), where)
  return jax.make_array_from_callback(shape, where, part)


def _make_slots(stack: StackSpec, keys: Mapping[str, jax.Array]) -> Arrays:
  made = {}
  inits = dict(stack.optimizer.slot_init) if stack.optimizer is not None else {}
  for i, (slot_name, slot) in enumerate(stack.slots.items()):
    init = inits.get(slot_name)
    seeds = {name: jax.random.fold_in(key, i) for name, key in keys.items()}
    if isinstance(init, initializers.RowWise) and not slot.per_row:
      if stack.is_in_host and not _traced(keys):
        same_dtype = dataclasses.replace(stack, dtype=np.dtype(slot.dtype))
        made[slot_name] = _drawn_in_host(same_dtype, dict.fromkeys(stack.tables, init), seeds)
        continue
      makers = tuple((name, init) for name in stack.tables)
      made[slot_name] = _drawing(stack, makers, slot.dtype)(seeds)
      continue
    value = _filled(stack, slot, keys)
    if init is not None:
      whole = {}
      for name, size in zip(stack.tables, stack.layout.sizes, strict=True):
        shape = (size,) if slot.per_row else (size, stack.dim)
        whole[name] = jnp.asarray(init(seeds[name], shape, slot.dtype), slot.dtype)
      value = store_all([stack], [{"slot": value}], [{"slot": whole}])[0]["slot"]
    made[slot_name] = value
  return made


def _filled(stack: StackSpec, slot: Slot, keys: Any) -> jax.Array:
  """A slot as it is stored, full of its initial value."""
  if not stack.is_in_host or _traced(keys):
    return _filling(stack, slot)()
  placement, ndim = stack.placement, 1 if slot.per_row else 2
  columns = stack.width * placement.column_shards
  shape = (stack.layout.rows * stack.layout.shards, columns)[:ndim]
  same = np.broadcast_to(np.asarray(slot.initial, slot.dtype), shape)
  return _from_parts(stack, shape, lambda index: same[index])


# Compiled once for equal stacks. Initializers are often made with their config, for one layer: only
# the last few programs are kept.


@functools.lru_cache(maxsize=16)
def _drawing(
  stack: StackSpec, makers: Makers, dtype: Any
) -> Callable[[Mapping[str, jax.Array]], jax.Array]:
  """A function of keys by table: stored rows that are made row by row, zeros of other tables."""

  layout = stack.layout
  by_maker: dict[initializers.RowWise, list[str]] = {}
  for name, maker in makers:
    by_maker.setdefault(maker, []).append(name)

  def draw(maker, names, shard, keys, places):
    tables, is_drawn = jnp.zeros_like(places), jnp.zeros(places.shape, bool)
    # Keys of the kind "rbg" draw a chunk from its first row's: no two shards may begin alike.
    ids = ~(shard * layout.rows + places)
    for number, name in enumerate(names):
      own = layout.ids(stack.indices[name], shard, places)
      is_own = own < stack.size(name)
      tables, ids = jnp.where(is_own, number, tables), jnp.where(is_own, own, ids)
      is_drawn |= is_own
    keys = jnp.stack([keys[name] for name in names])
    return stack.columns.own(maker.rows(keys, tables, ids, stack.dim, dtype)), is_drawn

  def draw_lines(drawing, lines):
    places = lines[:, None] * layout.unit + jnp.arange(layout.unit, dtype=jnp.int32)[None]
    rows, is_drawn = drawing(places.reshape(-1))
    is_drawn = jnp.broadcast_to(is_drawn[:, None], rows.shape)
    return packing.pack(rows), packing.pack(is_drawn)

  def per_device(keys):
    shard = stack.placement.index(stack.placement.rows)
    rows: Any = _full(stack, stack.stored_shape, 0, dtype)
    rows = host.HostRows(rows) if stack.is_in_host else rows
    # One loop for all tables of an initializer, which takes most of the time to compile.
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
    return rows.array if stack.is_in_host else rows

  return jax.jit(stack.placement.run(per_device, (P(),), stack.specs[2]))


@functools.lru_cache(maxsize=16)
def _filling(stack: StackSpec, slot: Slot) -> Callable[[], jax.Array]:
  """A function that returns a slot as it is stored, full of its initial value."""
  shape = (stack.layout.rows,) if slot.per_row else stack.stored_shape
  make = lambda: _full(stack, shape, slot.initial, slot.dtype)
  return jax.jit(stack.placement.run(make, (), stack.specs[len(shape)]))


def _full(stack: StackSpec, shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
  """A stored array of one value, in a jitted function."""
  make = host.full if stack.is_in_host else jnp.full
  return make(shape, value, dtype)


# --- tables and slots as users see them ----------------------------------------------------------


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
  return stack.placement.put(host.to_device(rows), P())


# Eager code cannot move a device's part of an array from one memory to the other.
_read_compiled = jax.jit(read, static_argnums=(0, 2))


def _store(
  stack: StackSpec, stored: jax.Array, tables: Mapping[str, Any], compact: bool = False
) -> jax.Array:
  """The stored array with some tables replaced by arrays in the form of `read`."""
  for name, value in tables.items():
    index = stack.indices[name]
    if stack.placement.is_local:
      value = _copied(stack, value, stored)  # a donated step deletes what we store
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


def _copied(stack: StackSpec, value: Any, stored: jax.Array) -> jax.Array:
  """A copy of a whole table or slot on one device, in the memory that stores it."""
  if not stack.is_in_host:
    return jnp.array(value, stored.dtype, copy=True)
  if isinstance(value, jax.core.Tracer) or isinstance(stored, jax.core.Tracer):
    return host.to_host(jnp.array(value, stored.dtype, copy=True))
  return jax.device_put(np.array(value, stored.dtype), stored.sharding)


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
  return stack.placement.compact(chosen.kept, chosen.parts)


def _reshaped(stack: StackSpec, x: jax.Array, table: str) -> jax.Array:
  """`[V, D]` or `[V]` of what `read` returns of a compact view; outside of jitted functions."""
  where = _where(stack, view(stack, table, x.ndim, compact=True))
  return x if isinstance(where, P) else stack.placement.same_parts(x, stack.dim, where)


def _place(stack: StackSpec, value: Any, table: str, stored: jax.Array, compact: bool) -> jax.Array:
  """A table or slot as `_store` takes it."""
  chosen = view(stack, table, stored.ndim, compact)
  where = _where(stack, chosen)
  if stack.is_in_host and not isinstance(value, jax.core.Tracer):
    return stack.placement.place_whole(value, stored.dtype, stack.placement.in_host(where))
  value = stack.placement.place_whole(value, stored.dtype, where)
  if isinstance(where, P):
    return value
  columns = stack.dim // chosen.parts * stack.layout.shards
  return stack.placement.same_parts(value, columns, chosen.spec)


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
  compact = compact and not _traced(arrays)
  for stack, stored in zip(stacks, arrays, strict=True):
    if stack.placement.is_local:
      tables |= _read_stack(stack, stored)
  if spread:
    of_mesh = tuple(stacks[i] for i in spread)
    views_of = _read_spread(of_mesh, [arrays[i] for i in spread], compact)
    if compact:
      of = {name: stack for stack in of_mesh for name in stack.tables}
      views_of = {
        name: {key: _reshaped(of[name], x, name) for key, x in table.items()}
        for name, table in views_of.items()
      }
    tables |= views_of
  return tables


def _traced(arrays: Any) -> bool:
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))


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
  compact = not _traced((arrays, replacements))
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
    spread = _store_spread(tuple(stacks[i] for i, _ in where), olds, values, compact)
    for (i, key), value in zip(where, spread, strict=True):
      new[i][key] = value
  return new


@functools.partial(jax.jit, static_argnums=(0, 3))
def _store_spread(
  stacks: tuple[StackSpec, ...], stored: Any, values: Any, compact: bool
) -> list[jax.Array]:
  each = zip(stacks, stored, values, strict=True)
  return [_store(stack, old, tables, compact) for stack, old, tables in each]
