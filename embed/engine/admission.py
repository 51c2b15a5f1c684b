"""Admits raw 64-bit ids to the rows of a table of fixed capacity, in arrays of fixed shapes.

A **raw id** is two uint32, the high and the low half; all ones is padding. Rows form **buckets** of
`bucket_width` adjacent rows. A raw id hashes to one bucket, where it is compared with the owner of
each row. A newcomer takes the lowest-ranked row of its bucket: an empty or expired one, or else the
first that the eviction policy selects. Rows used in this batch are never taken; a newcomer that
finds none is turned away. Buckets are independent, so the result is the same on every mesh.

Newcomers to a bucket are served in the order of a hash of their raw ids, whatever their order in
the batch. All arithmetic is on integers, exact on every backend.

The state of a table:

- `buckets`: uint32 `[buckets, words * bucket_width]`. The high halves of the raw ids of a bucket's
  rows, then the low halves, then the number of the batch that last used each row (0: empty) and,
  with "lfu", its count. Buckets are split like the rows if the number of shards divides the number
  of buckets; otherwise each device has all of them and makes the same changes.
- `step`: int32, the number of batches admitted.
- `filled`: int32, the number of rows with an owner.
- `batch`: int32 `[5]`, the counts named in `COUNTS`, for the last batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.config import DynamicVocabulary
from embed.engine.hashes import scramble
from embed.engine.mesh import Names, Placement, device_index
from embed.engine.stack import Arrays

State = dict[str, Any]

EMPTY = np.uint32(2**32 - 1)  # in both halves: no raw id
COUNTS = ("ids", "hits", "admissions", "evictions", "turned_away")
OWNERS = ("raw_ids", "last_used", "uses")  # who owns a row; "uses" with "lfu" only

_HIGH, _LOW, _LAST, _COUNT = range(4)  # words of a row
_SALTS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xC2B2AE3D)
_NEVER = np.uint32(2**32 - 1)  # the rank of a row that must not be taken
_MOST = 2**20  # the largest count of uses
_PARTS = (64, 8, 1)  # newcomers are settled in the smallest 1 / part of a batch that holds them


class Admitted(NamedTuple):
  """The rows of a batch of N raw ids, replicated on every device."""

  rows: jax.Array  # int32 `[N]`, -1 for padding and for ids without a row
  is_new: jax.Array  # bool `[N]`, true at one occurrence of each id that was given a row


# --- hashes --------------------------------------------------------------------------------------


def mixed(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Maps 64 bits, as two uint32, one to one to 64 bits: a Feistel network of four rounds."""
  for salt in _SALTS:
    high, low = low, high ^ scramble(low ^ jnp.uint32(salt))
  return high, low


def scaled_to(h: jax.Array, size: int) -> jax.Array:
  """Scales uint32 `h` to int32 `h * size // 2**32`, which is below `size` and monotonic in `h`."""
  a, b = h >> 16, h & jnp.uint32(0xFFFF)
  c, d = jnp.uint32(size >> 16), jnp.uint32(size & 0xFFFF)
  middle = ((b * d) >> 16) + ((b * c) & jnp.uint32(0xFFFF)) + a * d
  return (a * c + ((b * c) >> 16) + (middle >> 16)).astype(jnp.int32)


def bucket_of(vocabulary: DynamicVocabulary, ids: jax.Array) -> jax.Array:
  """The buckets, int32 `[N]`, of raw ids, uint32 `[N, 2]`."""
  return scaled_to(mixed(ids[:, 0], ids[:, 1])[0], vocabulary.buckets)


# --- state ---------------------------------------------------------------------------------------


def owner_names(vocabulary: DynamicVocabulary) -> tuple[str, ...]:
  """The names of the arrays that `read_owners` returns."""
  return OWNERS if vocabulary.eviction == "lfu" else OWNERS[:-1]


def _words(vocabulary: DynamicVocabulary) -> int:
  return 1 + len(owner_names(vocabulary))  # a raw id takes two words


def _axes(vocabulary: DynamicVocabulary, placement: Placement) -> Names:
  """The mesh axes that the buckets are split over."""
  return placement.row_axes if vocabulary.buckets % placement.shards == 0 else ()


def owners_spec(vocabulary: DynamicVocabulary, placement: Placement) -> P:
  """The spec of the buckets and of the arrays that `read_owners` returns."""
  return P(_axes(vocabulary, placement) or None)


def _specs(vocabulary: DynamicVocabulary, placement: Placement) -> dict[str, P]:
  split = {"buckets": owners_spec(vocabulary, placement)}
  return split | dict.fromkeys(("step", "filled", "batch"), P())


def bytes_on_device(vocabulary: DynamicVocabulary, placement: Placement) -> int:
  """The bytes that the buckets take on a device."""
  shards = placement.shards if _axes(vocabulary, placement) else 1
  return 4 * _words(vocabulary) * vocabulary.capacity // shards


def empty(vocabulary: DynamicVocabulary, placement: Placement) -> State:
  """The state of a table that has no raw ids yet."""
  width = vocabulary.bucket_width
  local = vocabulary.buckets // (placement.shards if _axes(vocabulary, placement) else 1)

  def make():
    buckets = jnp.zeros((local, _words(vocabulary) * width), jnp.uint32)
    return {
      "buckets": buckets.at[:, : 2 * width].set(EMPTY),
      "step": jnp.int32(0),
      "filled": jnp.int32(0),
      "batch": jnp.zeros(len(COUNTS), jnp.int32),
    }

  return jax.jit(placement.run(make, (), _specs(vocabulary, placement)))()


# --- owners by row, as users and checkpoints see them --------------------------------------------


def owner_shapes(
  vocabulary: DynamicVocabulary, placement: Placement
) -> dict[str, jax.ShapeDtypeStruct]:
  """The arrays that `read_owners` returns, as shapes with shardings."""
  where = None if placement.is_local else placement.sharding(owners_spec(vocabulary, placement))
  scores = jax.ShapeDtypeStruct((vocabulary.capacity,), jnp.int32, sharding=where)
  ids = jax.ShapeDtypeStruct((vocabulary.capacity, 2), jnp.uint32, sharding=where)
  return dict.fromkeys(owner_names(vocabulary), scores) | {"raw_ids": ids}


@functools.partial(jax.jit, static_argnums=(0, 1))
def read_owners(vocabulary: DynamicVocabulary, placement: Placement, buckets: jax.Array) -> Arrays:
  """Reads the owners of the rows, in row order, independent of the mesh.

  Returns:
    "raw_ids", uint32 `[V, 2]`, all ones for a row without an owner; "last_used", int32 `[V]`, a
    batch number, 0 for a row without an owner; with "lfu", also "uses", int32 `[V]`.
  """

  def per_device(buckets):
    words = buckets.reshape(buckets.shape[0], -1, vocabulary.bucket_width)
    words = jnp.moveaxis(words, 1, 0).reshape(words.shape[1], -1)
    raw_ids, scores = words[:_LAST].T, words[_LAST:].astype(jnp.int32)
    return dict(zip(owner_names(vocabulary), [raw_ids, *scores], strict=True))

  spec = owners_spec(vocabulary, placement)
  return placement.run(per_device, (spec,), spec)(buckets)


@functools.partial(jax.jit, static_argnums=(0, 1))
def from_owners(vocabulary: DynamicVocabulary, placement: Placement, arrays: Arrays) -> State:
  """The "buckets" and "filled" of a state, from arrays as `read_owners` returns them."""
  axes, spec = _axes(vocabulary, placement), owners_spec(vocabulary, placement)

  def per_device(arrays):
    raw_ids, *scores = (arrays[name] for name in owner_names(vocabulary))
    words = [raw_ids[:, 0], raw_ids[:, 1], *scores]
    words = [x.reshape(-1, vocabulary.bucket_width).astype(jnp.uint32) for x in words]
    filled = jnp.sum(arrays["last_used"] > 0, dtype=jnp.int32)
    return jnp.concatenate(words, axis=1), lax.psum(filled, axes) if axes else filled

  run = placement.run(per_device, (dict.fromkeys(arrays, spec),), (spec, P()))
  return dict(zip(("buckets", "filled"), run(arrays), strict=True))


def fits(vocabulary: DynamicVocabulary, raw_ids: Any) -> bool:
  """Returns True if each raw id, uint32 `[V, 2]` by row, is in the bucket that it hashes to."""
  ids = jnp.asarray(raw_ids)
  bucket = jnp.arange(len(ids), dtype=jnp.int32) // vocabulary.bucket_width
  return bool(jnp.all(_is_empty(ids) | (bucket_of(vocabulary, ids) == bucket)))


# --- finding -------------------------------------------------------------------------------------


class _Found(NamedTuple):
  """The places of raw ids `[N]` in a device's buckets; ids of other devices have none."""

  is_own: jax.Array  # not padding, and its bucket is on this device
  bucket: jax.Array  # local; 0 if not own
  is_hit: jax.Array
  lane: jax.Array  # the row within the bucket; 0 if not a hit


def _is_empty(ids: jax.Array) -> jax.Array:
  return (ids[:, 0] == EMPTY) & (ids[:, 1] == EMPTY)


def _word(bucket_words: jax.Array, number: int, width: int) -> jax.Array:
  return bucket_words[:, number * width : (number + 1) * width]


def _is_live(vocabulary: DynamicVocabulary, last: jax.Array, step: jax.Array) -> jax.Array:
  """Marks the rows that have an owner whose time to live has not expired."""
  live = last > 0
  if vocabulary.time_to_live is not None:
    live &= step - last.astype(jnp.int32) <= vocabulary.time_to_live
  return live


def _find(
  vocabulary: DynamicVocabulary, axes: Names, buckets: jax.Array, ids: jax.Array, step: jax.Array
) -> _Found:
  width = vocabulary.bucket_width
  bucket = bucket_of(vocabulary, ids) - device_index(axes) * buckets.shape[0]
  is_own = ~_is_empty(ids) & (bucket >= 0) & (bucket < buckets.shape[0])
  bucket = jnp.where(is_own, bucket, 0)
  # Reads only the words to compare: an empty row matches no id, but an expired one may.
  read = (3 if vocabulary.time_to_live is not None else 2) * width
  there = buckets.at[bucket, :read].get(mode="promise_in_bounds")
  same = (_word(there, _HIGH, width) == ids[:, :1]) & (_word(there, _LOW, width) == ids[:, 1:])
  if vocabulary.time_to_live is not None:
    same &= _is_live(vocabulary, _word(there, _LAST, width), step)
  # At most one row matches, and one reduction finds it.
  lane = jnp.max(jnp.where(same, jnp.arange(width, dtype=jnp.int32)[None], -1), axis=1)
  is_hit = is_own & (lane >= 0)
  return _Found(is_own, bucket, is_hit, jnp.where(is_hit, lane, 0))


def _global_rows(vocabulary: DynamicVocabulary, axes: Names, buckets: Any, found: _Found):
  """The global rows of the ids that this device found, -1 for all other ids."""
  first = device_index(axes) * buckets.shape[0]
  rows = (found.bucket + first) * vocabulary.bucket_width + found.lane
  return jnp.where(found.is_hit, rows, -1)


def _merged(x: jax.Array, axes: Names) -> jax.Array:
  """The elementwise maximum over devices: an id has its row on one device, and -1 on the others."""
  return lax.pmax(x, axes) if axes else x


def translate(
  vocabulary: DynamicVocabulary, placement: Placement, state: State, ids: jax.Array
) -> jax.Array:
  """The rows, int32 `[N]`, of raw ids, uint32 `[N, 2]`, -1 for none; does not change the state."""
  axes = _axes(vocabulary, placement)

  def per_device(buckets, step, ids):
    found = _find(vocabulary, axes, buckets, ids, step)
    return _merged(_global_rows(vocabulary, axes, buckets, found), axes)

  run = placement.run(per_device, (owners_spec(vocabulary, placement), P(), P()), P())
  return run(state["buckets"], state["step"], ids)


# --- admitting -----------------------------------------------------------------------------------


def admit(
  vocabulary: DynamicVocabulary,
  placement: Placement,
  state: State,
  ids: jax.Array,
  keeps_previous: bool = False,
) -> tuple[Admitted, State]:
  """Finds or assigns a row for each raw id of a batch, uint32 `[N, 2]`, whole on every device.

  With `keeps_previous`, rows used in the previous batch are not taken either.
  """
  n = ids.shape[0]
  if not n:  # avoids scatters of empty arrays
    ids = jnp.full((1, 2), EMPTY)
  specs = _specs(vocabulary, placement)
  f = functools.partial(_admit_on_device, vocabulary, _axes(vocabulary, placement), keeps_previous)
  (rows, is_new), state = placement.run(f, (specs, P()), (P(), specs))(state, ids)
  return Admitted(rows[:n], is_new[:n]), state


def _admit_on_device(vocabulary, axes: Names, keeps_previous: bool, state: State, ids: jax.Array):
  step = state["step"] + 1
  found = _find(vocabulary, axes, state["buckets"], ids, step)
  buckets = _touch(vocabulary, state["buckets"], found, step)
  hits = _global_rows(vocabulary, axes, buckets, found)
  is_miss = found.is_own & ~found.is_hit
  settle = functools.partial(_settle, vocabulary, axes, keeps_previous)
  # Loops of at most one round: a conditional would copy the buckets.
  count, least, n = jnp.sum(is_miss, dtype=jnp.int32), 0, ids.shape[0]
  carry = (buckets, jnp.full(n, -1, jnp.int32), jnp.zeros(n, bool), jnp.int32(0))
  for size in sorted({-(-n // part) for part in _PARTS}):
    rounds = ((count > least) & (count <= size)).astype(jnp.int32)

    def body(i, carry, size=size, rounds=rounds):
      # Depends on `i`, or XLA would hoist it out of the loop and compute it even with no rounds.
      return settle(size, carry[0], ids, found, is_miss & (i < rounds), step)

    carry, least = lax.fori_loop(0, rounds, body, carry), size
  buckets, given, is_new, evictions = carry
  rows = jnp.maximum(hits, given)
  masks = (found.is_own, found.is_hit, is_new, found.is_own & (rows < 0))
  *counts, turned_away = (jnp.sum(mask, dtype=jnp.int32) for mask in masks)
  batch = jnp.stack([*counts, evictions, turned_away])
  batch = lax.psum(batch, axes) if axes else batch
  filled = state["filled"] + batch[2] - batch[3]
  new = {"buckets": buckets, "step": step, "filled": filled, "batch": batch}
  is_new = _merged(is_new.astype(jnp.int32), axes) > 0
  return Admitted(_merged(rows, axes), is_new), new


def _faded(vocabulary: DynamicVocabulary, counts: jax.Array, last: jax.Array, step: Any):
  """Halves each count once per epoch that has begun since its row was last used."""
  if vocabulary.half_life is None:
    return counts
  epochs = step // vocabulary.half_life - last.astype(jnp.int32) // vocabulary.half_life
  return counts >> jnp.clip(epochs, 0, 31).astype(jnp.uint32)


def _touch(vocabulary, buckets: jax.Array, found: _Found, step: jax.Array) -> jax.Array:
  """Marks the rows of found ids as used in this batch."""
  width = vocabulary.bucket_width
  bucket = jnp.where(found.is_hit, found.bucket, buckets.shape[0])
  column = lambda word: buckets.at[bucket, word * width + found.lane]
  if vocabulary.eviction == "lfu":
    old = lambda word: column(word).get(mode="fill", fill_value=0)
    count = _faded(vocabulary, old(_COUNT), old(_LAST), step)
    buckets = column(_COUNT).set(jnp.minimum(count, _MOST), mode="drop")
    buckets = column(_COUNT).add(jnp.uint32(1), mode="drop")
  return column(_LAST).set(step.astype(jnp.uint32), mode="drop")


def _settle(vocabulary, axes, keeps_previous, size, buckets, ids, found, is_miss, step):
  """Gives rows to newcomers, which have at most `size` occurrences.

  Returns:
    The new buckets; the rows given to newcomers, -1 for other ids; the mask `is_new`, as in
    `Admitted`; and the number of evictions.
  """
  n = is_miss.shape[0]
  width, local = vocabulary.bucket_width, buckets.shape[0]
  # Distinct newcomers, the first of each run, ordered by hash and therefore by bucket.
  slot = jnp.where(is_miss, jnp.cumsum(is_miss, dtype=jnp.int32) - 1, size)
  index = jnp.full(size, n, jnp.int32).at[slot].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
  of = lambda x, fill: x.at[index].get(mode="fill", fill_value=fill)
  hashes = mixed(of(ids[:, 0], EMPTY), of(ids[:, 1], EMPTY))
  ordered = [jnp.where(index < n, h, EMPTY) for h in hashes]  # unused entries come last
  h1, h2, index = lax.sort((*ordered, index), num_keys=3)
  is_used = index < n
  differs = lambda x: jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])
  is_first = differs(h1) | differs(h2)
  run = jnp.cumsum(is_first, dtype=jnp.int32) - 1
  is_asking = is_first & is_used
  bucket = jnp.where(is_used, of(found.bucket, 0), local)

  # The r-th newcomer to a bucket takes its r-th lowest-ranked row, unless that row is kept.
  before = jnp.cumsum(is_asking, dtype=jnp.int32) - is_asking
  rank = before - lax.cummax(jnp.where(differs(bucket), before, 0))
  there = buckets.at[bucket].get(mode="fill", fill_value=0)
  ranks = _ranks(vocabulary, there, step, keeps_previous)
  lane, is_free = _nth_lowest(ranks, rank)
  is_given = is_asking & is_free
  old = jnp.take_along_axis(_word(there, _LAST, width), lane[:, None], 1)[:, 0]
  evictions = jnp.sum(is_given & (old > 0), dtype=jnp.int32)

  values = [of(ids[:, 0], EMPTY), of(ids[:, 1], EMPTY), jnp.full(size, step, jnp.uint32)]
  if vocabulary.eviction == "lfu":
    occurrences = jnp.zeros(size, jnp.uint32).at[run].add(is_used.astype(jnp.uint32))
    values.append(occurrences.at[run].get(mode="promise_in_bounds"))
  to = jnp.where(is_given, bucket, local)
  for word, value in enumerate(values):
    buckets = buckets.at[to, word * width + lane].set(value, mode="drop")

  row = jnp.where(is_given, (bucket + device_index(axes) * local) * width + lane, -1)
  of_run = jnp.full(size, -1, jnp.int32).at[run].max(row)
  rows = of_run.at[run].get(mode="promise_in_bounds")
  rows = jnp.full(n, -1, jnp.int32).at[index].set(rows, mode="drop")
  is_new = jnp.zeros(n, bool).at[index].set(is_given, mode="drop")
  return buckets, rows, is_new, evictions


def _ranks(vocabulary, there: jax.Array, step: jax.Array, keeps_previous: bool):
  """Ranks rows by the order to take them in: two uint32 `[n, W]`, the second to break ties."""
  width = vocabulary.bucket_width
  last = _word(there, _LAST, width)
  is_live = _is_live(vocabulary, last, step)
  is_kept = (last.astype(jnp.int32) >= step - int(keeps_previous)) & (last > 0)
  major, minor = last, jnp.zeros_like(last)
  if vocabulary.eviction == "lfu":
    count = _faded(vocabulary, _word(there, _COUNT, width), last, step)
    major, minor = count + 1, last  # a count may have faded to 0, the rank of free rows
  return tuple(jnp.where(is_kept, _NEVER, jnp.where(is_live, x, 0)) for x in (major, minor))


def _nth_lowest(ranks, n: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The lane of the n-th lowest rank in each row `[N, W]`, ties by lane, and whether it is free.

  Compares all pairs: W is small, and a sort along an axis is slower on every backend.
  """
  width = ranks[0].shape[1]
  a_major, a_minor = (x[:, :, None] for x in ranks)
  b_major, b_minor = (x[:, None, :] for x in ranks)
  lanes = jnp.arange(width, dtype=jnp.int32)
  is_before = (lanes[:, None] < lanes[None, :])[None]
  is_less = (a_major < b_major) | (
    (a_major == b_major) & ((a_minor < b_minor) | ((a_minor == b_minor) & is_before))
  )
  position = jnp.sum(is_less, axis=1, dtype=jnp.int32)
  is_nth = position == n[:, None]
  return jnp.argmax(is_nth, 1).astype(jnp.int32), (is_nth & (ranks[0] != _NEVER)).any(1)
