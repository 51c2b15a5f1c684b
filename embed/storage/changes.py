"""Rows that differ from an earlier state: noticed by fingerprints, taken out, and put elsewhere.

A **fingerprint** is 64 bits for each stored row, over the bits of the row and of its slots, as two
uint32 arrays. It is computed where the row is; nothing is remembered while a model trains. Each
word goes through a mixing function of its own, which is a bijection, and the results are added up:
a change of a single word is always noticed, any other with a probability of 1 - 2**-64.

A **digest** is 64 bits for a table, of its rows without slots: the sum of its rows' fingerprints,
each mixed with the id of its row. It does not depend on how the table is stored.
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
from embed.engine.stack import Arrays, StackSpec
from embed.storage import tables as stored_tables

Lanes = tuple[jax.Array, jax.Array]  # uint32 `[rows]` each, split as the rows are

_CHUNK = 1 << 16  # rows that are taken out, or put in, by one program
_LEAST = 1 << 8  # rows: smaller numbers share a program


# --- fingerprints --------------------------------------------------------------------------------


def _words(x: jax.Array) -> jax.Array:
  """The bits of an array `[rows]` or `[rows, n]` as uint32 `[rows, words]`."""
  bits = x.dtype.itemsize * 8
  x = x.reshape(x.shape[0], -1)
  if bits >= 32:
    return lax.bitcast_convert_type(x, jnp.uint32).reshape(x.shape[0], -1)
  return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _mix(x: jax.Array, shift: int, first: int, second: int) -> jax.Array:
  """A bijection of uint32 in which every bit of the argument changes half of the result's bits."""
  x = (x ^ (x >> 16)) * jnp.uint32(first)
  x = (x ^ (x >> shift)) * jnp.uint32(second)
  return x ^ (x >> 16)


# The finalizer of MurmurHash3, and "lowbias32" of C. Wellons' hash-prospector.
_MIXERS = ((13, 0x85EBCA6B, 0xC2B2AE35), (15, 0x7FEB352D, 0x846CA68B))


def _totals(words: jax.Array, position: jax.Array, number: int) -> list[jax.Array]:
  """The sums, uint32 `[rows]` twice, of the mixed words of an array, by their positions in a row.

  Words at negative positions do not count. `number` tells the arrays of a row apart.
  """
  mixed = []
  for i, mixer in enumerate(_MIXERS):
    salt = _mix(position.astype(jnp.uint32) + jnp.uint32(number << 24), *_MIXERS[1 - i])
    mixed.append(jnp.where(position[None] < 0, 0, _mix(words + salt[None], *mixer)))
  # One reduction, which XLA:CPU fuses with the mixing: two of them take 14 times as long.
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])
  return list(lax.reduce(tuple(mixed), (jnp.uint32(0),) * 2, add, (1,)))


def _digest(totals: list[jax.Array], ids: jax.Array, size: Any) -> jax.Array:
  """The digest uint32 `[2]` of the rows of some ids; those of id `size` do not count."""
  mixed = [
    _mix(total ^ _mix(ids.astype(jnp.uint32), *_MIXERS[1 - i]), *_MIXERS[i])
    for i, total in enumerate(totals)
  ]
  return jnp.stack([jnp.where(ids < size, x, 0).sum(dtype=jnp.uint32) for x in mixed])


def as_text(digest: Any) -> str:
  """A digest as 16 hexadecimal digits."""
  return "".join(f"{int(x):08x}" for x in np.asarray(digest))


@functools.partial(jax.jit, static_argnums=0)
def fingerprints(
  stacks: tuple[StackSpec, ...], arrays: list[Arrays]
) -> tuple[list[Lanes], dict[str, jax.Array]]:
  """The fingerprints of the stored rows of each stack, and the digest of each table.

  Without slots in `arrays`, the fingerprints are of the rows alone.
  """
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
  """Per device: the fingerprints of its rows, from all of their columns, and the digests."""
  placement, layout = stack.placement, stack.layout
  lanes = [jnp.zeros(layout.shard_rows, jnp.uint32) for _ in _MIXERS]
  digests = []
  for number, array in enumerate(arrays):
    words = _words(rows_lib.unpacked(rows_lib.opened(stack, array)))
    position = jnp.arange(words.shape[1], dtype=jnp.int32)
    totals = _totals(words, position, number)
    if not number:
      shard = mesh_lib.device_index(placement.row_axes)
      for index, (size, first) in enumerate(zip(layout.sizes, layout.offsets, strict=True)):
        ids = layout.own_ids(index, shard)
        digest = _digest([x[first : first + len(ids)] for x in totals], ids, size)
        digests.append(lax.psum(digest, placement.row_axes) if placement.row_axes else digest)
    lanes = [lane + total for lane, total in zip(lanes, totals, strict=True)]
  return (lanes[0], lanes[1]), digests


def digest_of(table: np.ndarray) -> str:
  """The digest of a table `[vocabulary_size, dim]`, a chunk of rows after the other."""
  size = len(table)
  chunk, total = min(_padded(size), _CHUNK), np.zeros(2, np.uint32)
  for start in range(0, size, chunk):
    rows = table[start : start + chunk]
    rows = np.pad(rows, ((0, chunk - len(rows)), (0, 0)))
    ids = np.minimum(np.arange(start, start + chunk), size).astype(np.int32)
    total += np.asarray(_digest_of_chunk(*jax.device_put((rows, ids, np.int32(size)))))
  return as_text(total)


@jax.jit
def _digest_of_chunk(rows: jax.Array, ids: jax.Array, size: jax.Array) -> jax.Array:
  words = _words(rows)
  return _digest(_totals(words, jnp.arange(words.shape[1], dtype=jnp.int32), 0), ids, size)


# --- taking rows out -----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def changed(
  stacks: tuple[StackSpec, ...], old: list[Lanes], new: list[Lanes]
) -> tuple[list[jax.Array], jax.Array]:
  """A mask of the stored rows of each stack, and how many a shard has at most, `[stacks]`."""
  masks, counts = [], []

  def per_device(placement, before, after):
    mask = (before[0] != after[0]) | (before[1] != after[1])
    count = mask.sum(dtype=jnp.int32)
    return mask, lax.pmax(count, placement.row_axes) if placement.row_axes else count

  for stack, before, after in zip(stacks, old, new, strict=True):
    spec = stack.specs[1]
    f = functools.partial(per_device, stack.placement)
    mask, count = stack.placement.run(f, ((spec, spec), (spec, spec)), (spec, P()))(before, after)
    masks.append(mask)
    counts.append(count)
  return masks, jnp.stack(counts)


class TableRows(NamedTuple):
  """Some rows of a table: "ids" int32 `[K]`, and arrays `[K, dim]` or `[K]` by name."""

  ids: Any
  values: Arrays


def take(stack: StackSpec, stored: Arrays, mask: jax.Array, count: int) -> dict[str, TableRows]:
  """The rows of a mask by table, as NumPy: those of this process's shards, by ascending id.

  Args:
    stack: of the rows.
    stored: its arrays.
    mask: as `changed` returns it.
    count: the most rows of it that a shard has.
  """
  parts: list[tuple[np.ndarray, np.ndarray, Arrays]] = []  # table, ids and values
  if count:
    local_rows = _local_rows(stack, _padded(count), mask)
    chunk = min(_padded(count), _CHUNK)
    for start in range(0, count, chunk):
      rows = _take_chunk(
        stack, chunk, stored, local_rows, _everywhere(stack, np.array(start, np.int32))
      )
      jax.block_until_ready(rows)  # or XLA:CPU may run two programs that communicate at once
      parts.append(jax.tree.map(_of_this_process, rows))
  taken: dict[str, TableRows] = {}
  for index, table in enumerate(stack.tables):
    masks = [part[0] == index for part in parts]

    def joined(arrays, shape, dtype, masks=masks):
      pieces = [x[mask] for x, mask in zip(arrays, masks, strict=True)]
      return np.concatenate([np.zeros((0, *shape), dtype), *pieces])

    ids = joined([part[1] for part in parts], (), np.int32)
    order = np.argsort(ids)
    values = {}
    for key in ("parameters", *stack.slots):
      shape = (stack.dim,) if stored[key].ndim == 2 else ()
      values[key] = joined([part[2][key] for part in parts], shape, stored[key].dtype)[order]
    taken[table] = TableRows(ids[order], values)
  return taken


def _padded(count: int) -> int:
  """A power of two that is not smaller: few numbers, since each is compiled."""
  return max(_LEAST, 1 << (count - 1).bit_length())


def _of_this_process(x: jax.Array) -> np.ndarray:
  """The shards of an array that this process saves: of copies, one process saves the first."""
  shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
  shards.sort(key=lambda shard: shard.index[0].start or 0)
  empty = np.zeros((0, *x.shape[1:]), x.dtype)
  return np.concatenate([empty, *(np.asarray(shard.data) for shard in shards)])


def _local_rows(stack: StackSpec, size: int, mask: jax.Array) -> jax.Array:
  """Per shard the local rows of a mask, `[size]`, filled up with the number of rows.

  NumPy finds them 100 times as fast as XLA:CPU, and the mask has one byte per row to fetch.
  """
  rows = stack.layout.shard_rows
  by_shard: dict[int, np.ndarray] = {}
  parts = []
  for shard in mask.addressable_shards:
    start = shard.index[0].start or 0
    if start not in by_shard:
      local_rows = np.flatnonzero(np.asarray(shard.data)).astype(np.int32)
      by_shard[start] = np.pad(local_rows, (0, size - len(local_rows)), constant_values=rows)
    parts.append(jax.device_put(by_shard[start], shard.device))
  shape = (mask.shape[0] // rows * size,)
  return jax.make_array_from_single_device_arrays(shape, mask.sharding, parts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _take_chunk(
  stack: StackSpec, chunk: int, stored: Arrays, local_rows: jax.Array, start: Any
) -> tuple[jax.Array, jax.Array, Arrays]:
  """Some of the local rows of each shard as whole rows: their tables (-1: none), ids and values."""

  def per_device(local_rows, start, stored):
    shard = mesh_lib.device_index(stack.placement.row_axes)
    local_rows = lax.dynamic_slice_in_dim(local_rows, start, chunk)
    table, ids = jnp.full(chunk, -1, jnp.int32), jnp.zeros(chunk, jnp.int32)
    for index, size in enumerate(stack.layout.sizes):
      own = stack.layout.ids(index, shard, local_rows)
      table, ids = jnp.where(own < size, index, table), jnp.where(own < size, own, ids)
    rows = rows_lib.read(stack, rows_lib.opened(stack, stored), local_rows)
    return table, ids, rows

  by_rows = stack.specs[1]
  specs = (by_rows, P(), {key: stack.specs[x.ndim] for key, x in stored.items()})
  return stack.placement.run(per_device, specs, by_rows)(local_rows, start, stored)


# --- putting rows in -----------------------------------------------------------------------------


def put(stack: StackSpec, stored: Arrays, table: str, rows: TableRows) -> Arrays:
  """The stored arrays with some rows of a table replaced; the old ones stay as they are.

  Args:
    stack: of the table.
    stored: its arrays.
    table: the name.
    rows: NumPy, the same in every process, each id once; "parameters" and any of the slots.
  """
  count = len(rows.ids)
  chunk = min(_padded(count), _CHUNK) if count else 1
  new = dict(stored)
  for start in range(0, count, chunk):
    piece = slice(start, start + chunk)
    missing = chunk - len(rows.ids[piece])

    def padded(x, value, piece=piece, missing=missing):
      widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
      return _everywhere(stack, np.pad(x[piece], widths, constant_values=value))

    ids = padded(rows.ids.astype(np.int32), stack.size(table))
    values = {key: padded(x, np.zeros((), x.dtype)) for key, x in rows.values.items()}
    # The first copies the arrays, which requests may be reading; the others write to the copy.
    f = _put_in_place if start else _put
    new |= jax.block_until_ready(f(stack, table, {key: new[key] for key in values}, ids, values))
  return new


def _everywhere(stack: StackSpec, x: np.ndarray) -> jax.Array:
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
    rows = rows_lib.write(stack, rows_lib.opened(stack, stored), local_rows, values)
    return rows_lib.closed(stack, rows)

  specs = {key: stack.specs[x.ndim] for key, x in stored.items()}
  return stack.placement.run(per_device, (P(), P(), specs), specs)(ids, values, stored)


_put = jax.jit(_put_chunk, static_argnums=(0, 1))
_put_in_place = jax.jit(_put_chunk, static_argnums=(0, 1), donate_argnums=2)
