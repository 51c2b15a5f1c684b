"""Rows that differ from an earlier state: found by fingerprint, taken out, and put elsewhere.

A **fingerprint** is a 64-bit hash of a stored row, as two uint32, over the bits of the row and its
slots; it is computed where the row is stored. Each word goes through its own mixing function, a
bijection, and the results are added up: a change to a single word is always detected, any other
change with a probability of 1 - 2**-64.

A **digest** is a 64-bit hash of a table, over its rows without slots: the sum of their
fingerprints, each mixed with the id of its row. It does not depend on how the table is stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.engine import mesh as mesh_lib
from embed.engine import rows as rows_lib
from embed.engine.hashes import scramble
from embed.engine.stack import Arrays, StackSpec
from embed.storage import tables as stored_tables

Lanes = tuple[jax.Array, jax.Array]  # uint32 `[rows]` each, split as the rows are

_CHUNK = 1 << 16  # rows that one program takes out or puts in
_LEAST = 1 << 8  # smaller numbers of rows share a program


class TableRows(NamedTuple):
  """Some rows of a table: int32 ids `[K]`, and arrays `[K, dim]` or `[K]` by name."""

  ids: Any
  values: Arrays


def _words(x: jax.Array) -> jax.Array:
  """The bits of an array `[rows]` or `[rows, n]` as uint32 `[rows, words]`."""
  bits = x.dtype.itemsize * 8
  x = x.reshape(x.shape[0], -1)
  if bits >= 32:
    return lax.bitcast_convert_type(x, jnp.uint32).reshape(x.shape[0], -1)
  return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _mix_twice(x: Lanes, salts: jax.Array) -> Lanes:
  """Mixes two lanes, each with its own salt."""
  return scramble(x[0] + scramble(salts)), scramble(x[1] + scramble(~salts))


def _totals(words: jax.Array, number: int) -> Lanes:
  """Sums of the mixed words of each row; `number` distinguishes its arrays."""
  position = jnp.arange(words.shape[1], dtype=jnp.uint32) + jnp.uint32(number << 24)
  mixed = _mix_twice((words, ~words), position[None])
  # One reduction, which XLA:CPU fuses with the mixing: two of them take 14 times as long.
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])
  return lax.reduce(mixed, (jnp.uint32(0),) * 2, add, (1,))


def _digest(totals: Lanes, ids: jax.Array, size: Any) -> jax.Array:
  """The digest, uint32 `[2]`, of rows and their ids; rows with the id `size` do not count."""
  mixed = _mix_twice(totals, ids.astype(jnp.uint32))
  return jnp.stack([jnp.where(ids < size, x, 0).sum(dtype=jnp.uint32) for x in mixed])


def as_text(digest: Any) -> str:
  """A digest as 16 hexadecimal digits."""
  return "".join(f"{int(x):08x}" for x in np.asarray(digest))


@functools.partial(jax.jit, static_argnums=0)
def fingerprints(
  stacks: tuple[StackSpec, ...], arrays: list[Arrays]
) -> tuple[list[Lanes], dict[str, jax.Array]]:
  """The fingerprints of the stored rows of each stack, and the digest of each table."""
  lanes: list[Lanes] = []
  digests: dict[str, jax.Array] = {}
  for stack, stored in zip(stacks, arrays, strict=True):
    ordered = [stored[key] for key in ("parameters", *stack.slots) if key in stored]
    f = functools.partial(_fingerprints_of_shard, stack)
    specs = tuple(stack.specs[x.ndim] for x in ordered)
    of_rows, of_tables = stack.placement.run(f, specs, ((stack.specs[1],) * 2, P()))(*ordered)
    lanes.append(of_rows)
    digests |= dict(zip(stack.tables, of_tables, strict=True))
  return lanes, digests


def _fingerprints_of_shard(stack: StackSpec, *arrays: jax.Array) -> tuple[Lanes, list[jax.Array]]:
  """The fingerprints of a device's rows, and the digests of all tables."""
  words = [_words(rows_lib.unpacked(rows_lib.as_rows(stack, x))) for x in arrays]
  totals = [_totals(x, number) for number, x in enumerate(words)]
  axes, layout = stack.placement.row_axes, stack.layout
  shard, digests = mesh_lib.device_index(axes), []
  for table, (size, first) in enumerate(zip(layout.sizes, layout.offsets, strict=True)):
    ids = layout.own_ids(table, shard)
    own = slice(first, first + len(ids))
    digest = _digest((totals[0][0][own], totals[0][1][own]), ids, size)
    digests.append(lax.psum(digest, axes) if axes else digest)
  first_lane, second_lane = (sum(lanes[1:], lanes[0]) for lanes in zip(*totals, strict=True))
  return (first_lane, second_lane), digests


@functools.partial(jax.jit, static_argnums=0)
def changed(stack: StackSpec, old: Lanes, new: Lanes) -> tuple[jax.Array, jax.Array]:
  """A mask of the stored rows that differ, and the largest number of them on a shard."""

  def per_device(old, new):
    mask = (old[0] != new[0]) | (old[1] != new[1])
    count, axes = mask.sum(dtype=jnp.int32), stack.placement.row_axes
    return mask, lax.pmax(count, axes) if axes else count

  spec = stack.specs[1]
  return stack.placement.run(per_device, ((spec, spec),) * 2, (spec, P()))(old, new)


def take(stack: StackSpec, stored: Arrays, mask: jax.Array, count: int) -> dict[str, TableRows]:
  """Takes the changed rows on this process's shards, by table, as NumPy arrays sorted by id."""
  # NumPy finds them 100 times as fast as XLA:CPU; fetching the mask takes one byte per row.
  local_rows = {x.device: np.flatnonzero(x.data) for x in mask.addressable_shards}
  chunk = _chunk_for(count)
  parts = []
  for start in range(0, max(count, 1), chunk):
    rows_of = {device: rows[start : start + chunk] for device, rows in local_rows.items()}
    taken = _take_chunk(stack, stored, _per_shard(stack, chunk, rows_of, mask))
    jax.block_until_ready(taken)  # or XLA:CPU may run two communicating programs at once
    parts.append(jax.tree.map(_of_this_process, taken))
  number, ids, values = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  tables = {}
  for index, table in enumerate(stack.tables):
    chosen = np.flatnonzero(number == index)
    chosen = chosen[np.argsort(ids[chosen])]
    of_table = {key: values[key][chosen] for key in ("parameters", *stack.slots)}
    tables[table] = TableRows(ids[chosen], of_table)
  return tables


def _chunk_for(count: int) -> int:
  """The number of rows per program: a power of two, since each number compiles a program."""
  return min(max(_LEAST, 1 << (count - 1).bit_length()), _CHUNK)


def _per_shard(
  stack: StackSpec, chunk: int, rows_of: dict[Any, np.ndarray], mask: jax.Array
) -> jax.Array:
  """The local rows of each shard, int32 `[shards * chunk]`, padded with `layout.shard_rows`."""
  fill = stack.layout.shard_rows
  pad = lambda x: np.pad(x.astype(np.int32), (0, chunk - len(x)), constant_values=fill)
  parts = [jax.device_put(pad(rows), device) for device, rows in rows_of.items()]
  shape = (mask.shape[0] // fill * chunk,)
  return jax.make_array_from_single_device_arrays(shape, mask.sharding, parts)


def _of_this_process(x: jax.Array) -> np.ndarray:
  """Joins the shards of an array that this process saves: only the first replica of each."""
  shards = [np.asarray(x.data) for x in x.addressable_shards if x.replica_id == 0]
  return np.concatenate([np.zeros((0, *x.shape[1:]), x.dtype), *shards])


@functools.partial(jax.jit, static_argnums=0)
def _take_chunk(
  stack: StackSpec, stored: Arrays, local_rows: jax.Array
) -> tuple[jax.Array, jax.Array, Arrays]:
  """The index of the table (-1: none), the id, and the values of each local row."""

  def per_device(local_rows, stored):
    shard = mesh_lib.device_index(stack.placement.row_axes)
    table, ids = jnp.full_like(local_rows, -1), jnp.zeros_like(local_rows)
    for index, size in enumerate(stack.layout.sizes):
      own = stack.layout.ids(index, shard, local_rows)
      table, ids = jnp.where(own < size, index, table), jnp.where(own < size, own, ids)
    return table, ids, rows_lib.read(rows_lib.as_rows(stack, stored), local_rows)

  by_rows = stack.specs[1]
  specs = (by_rows, {key: stack.specs[x.ndim] for key, x in stored.items()})
  return stack.placement.run(per_device, specs, by_rows)(local_rows, stored)


def put(stack: StackSpec, stored: Arrays, table: str, rows: TableRows) -> Arrays:
  """Returns stored arrays with some rows of a table replaced.

  `rows` are NumPy arrays, equal in every process, of distinct ids: "parameters" and any slots.
  """
  count, new = len(rows.ids), dict(stored)
  chunk = _chunk_for(count)
  for start in range(0, count, chunk):
    pad = functools.partial(_padded, stack, start, chunk)
    ids = pad(rows.ids.astype(np.int32), stack.size(table))
    values = {key: pad(x, np.zeros((), x.dtype)) for key, x in rows.values.items()}
    # The first call copies the arrays, which requests may be reading; later ones write to the copy.
    f = _put_in_place if start else _put
    new |= jax.block_until_ready(f(stack, table, {key: new[key] for key in values}, ids, values))
  return new


def _padded(stack: StackSpec, start: int, chunk: int, x: np.ndarray, fill: Any) -> jax.Array:
  """Pads a chunk of an array to its full size, and copies it to every device."""
  x = x[start : start + chunk]
  widths = [(0, chunk - len(x))] + [(0, 0)] * (x.ndim - 1)
  x = np.pad(x, widths, constant_values=fill)
  if stack.placement.is_local:
    return jax.device_put(x)
  return stored_tables.place_whole(stack.placement, x, x.dtype, P())


def _put_chunk(
  stack: StackSpec, table: str, stored: Arrays, ids: jax.Array, values: Arrays
) -> Arrays:
  def per_device(ids, values, stored):
    shard, local_rows = stack.layout.locate(stack.indices[table], ids)
    own = mesh_lib.device_index(stack.placement.row_axes)
    local_rows = jnp.where(shard == own, local_rows, stack.layout.shard_rows)
    rows = rows_lib.write(rows_lib.as_rows(stack, stored), local_rows, values)
    return rows_lib.as_stored(stack, rows)

  specs = {key: stack.specs[x.ndim] for key, x in stored.items()}
  return stack.placement.run(per_device, (P(), P(), specs), specs)(ids, values, stored)


_put = jax.jit(_put_chunk, static_argnums=(0, 1))
_put_in_place = jax.jit(_put_chunk, static_argnums=(0, 1), donate_argnums=2)
