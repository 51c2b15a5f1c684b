"""Admission of raw 64-bit ids to the rows of a table of fixed capacity, in arrays of fixed shapes.

A **raw id** is two uint32, the high and the low half; all ones is padding. Rows lie in **buckets**
of `bucket_width` neighbours. A raw id hashes to one bucket, where it is compared with the owner of
each row. A newcomer takes the row of the lowest rank in its bucket: an empty or expired one, else
the row that eviction ranks first. Rows of this batch are never taken; a newcomer that finds none is
turned away. The rest follows from buckets: what happens in one depends on nothing outside, so that
devices that own different buckets decide alike, whatever the mesh.

The order of the newcomers of a bucket is that of a hash of their raw ids, which no order of the
batch and no device changes. Everything is in integers, exact on every backend.

The state of a table:

- `buckets`: uint32 `[buckets, words * bucket_width]`. For each row of a bucket the high half of its
  raw id, then for each the low half, the number of the batch that used it last (0: empty) and, if
  eviction is by frequency, its count.
- `sightings`: uint32 `[buckets, 4 * bucket_width]`, a count-min sketch of ids without rows: two
  hashes into as many cells each as two buckets' rows. A cell is 8 bits of an epoch and 24 of a
  count. Absent if ids are admitted at once.
- `step`: int32, the number of batches admitted.
- `filled`: int32, the number of rows with an owner.
- `batch`: int32 `[5]`, the counts of `COUNTS` in the last batch.
- `totals`: uint32 `[5, 2]`, the same since the start, high and low halves.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.config import DynamicVocabulary
from embed.engine.mesh import Placement, device_index

State = dict[str, Any]

EMPTY = np.uint32(2**32 - 1)  # both halves: no raw id
COUNTS = ("ids", "hits", "admissions", "evictions", "turned_away")

_HIGH, _LOW, _LAST, _COUNT = range(4)  # words of a row
_SALTS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xC2B2AE3D)
_NEVER = np.uint32(2**32 - 1)  # the rank of a row that is not taken
_MOST = 2**20  # a count of sightings or uses is at most this
_PARTS = (64, 8, 1)  # newcomers are settled as this part of a batch, the smallest that holds them


class Admitted(NamedTuple):
  """What a batch of N raw ids gets: everything is whole on every device.

  Attributes:
    rows: int32 `[N]`, -1 for padding and for ids without a row.
    is_new: bool `[N]`, true at one occurrence of each id that was given a row.
  """

  rows: jax.Array
  is_new: jax.Array


# --- hashes --------------------------------------------------------------------------------------


def finalize(h: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3, a bijection of uint32."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


def mixed(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A bijection of 64 bits as two uint32: a Feistel network of four rounds."""
  for salt in _SALTS:
    high, low = low, high ^ finalize(low ^ jnp.uint32(salt))
  return high, low


def scaled_to(h: jax.Array, size: int) -> jax.Array:
  """`h * size // 2**32` of uint32, below `size` and in the order of h: int32."""
  a, b = h >> 16, h & jnp.uint32(0xFFFF)
  c, d = jnp.uint32(size >> 16), jnp.uint32(size & 0xFFFF)
  middle = ((b * d) >> 16) + ((b * c) & jnp.uint32(0xFFFF)) + a * d
  return (a * c + ((b * c) >> 16) + (middle >> 16)).astype(jnp.int32)


# --- state ---------------------------------------------------------------------------------------


def words(vocabulary: DynamicVocabulary) -> int:
  """The uint32 that a row takes in `buckets`."""
  return 4 if vocabulary.eviction == "lfu" else 3


def specs(vocabulary: DynamicVocabulary, placement: Placement) -> dict[str, P]:
  """How each array of a state is split: by buckets, over the axes that split rows."""
  by_buckets = P(placement.row_axes or None)
  split = {"buckets": by_buckets}
  if vocabulary.sightings > 1:
    split["sightings"] = by_buckets
  return split | dict.fromkeys(("step", "filled", "batch", "totals"), P())


def padded_buckets(vocabulary: DynamicVocabulary, placement: Placement) -> int:
  """The buckets of all shards, each with as many: the last ones may be unused."""
  return -(-vocabulary.buckets // placement.shards) * placement.shards


def bytes_on_device(vocabulary: DynamicVocabulary, placement: Placement) -> int:
  """The bytes of the buckets and sightings that a device has."""
  columns = words(vocabulary) + 4 * (vocabulary.sightings > 1)
  local = padded_buckets(vocabulary, placement) // placement.shards
  return 4 * columns * vocabulary.bucket_width * local


def empty(vocabulary: DynamicVocabulary, placement: Placement) -> State:
  """The state of a table without a raw id, each device's part made by it."""
  width, local = vocabulary.bucket_width, padded_buckets(vocabulary, placement) // placement.shards

  def make():
    keys = jnp.full((local, 2 * width), EMPTY)
    others = jnp.zeros((local, (words(vocabulary) - 2) * width), jnp.uint32)
    state = {"buckets": jnp.concatenate([keys, others], axis=1)}
    if vocabulary.sightings > 1:
      state["sightings"] = jnp.zeros((local, 4 * width), jnp.uint32)
    zeros = {"step": (), "filled": (), "batch": (len(COUNTS),)}
    state |= {name: jnp.zeros(shape, jnp.int32) for name, shape in zeros.items()}
    return state | {"totals": jnp.zeros((len(COUNTS), 2), jnp.uint32)}

  return jax.jit(placement.run(make, (), specs(vocabulary, placement)))()


# --- finding -------------------------------------------------------------------------------------


_NOT_HERE = np.int32(-(2**31))  # padding, or an id of another device's bucket


class _Found(NamedTuple):
  """Raw ids `[N]` in the buckets of a device; other devices' ids are in none."""

  is_own: jax.Array  # no padding, and the bucket is here
  bucket: jax.Array  # local; 0 if not own
  is_hit: jax.Array
  lane: jax.Array  # the row in the bucket, of a hit

  def word(self, buckets: jax.Array, number: int, width: int) -> jax.Array:
    """A word of each id's row."""
    return buckets.at[self.bucket, number * width + self.lane].get(mode="promise_in_bounds")


def _word(bucket_words: jax.Array, number: int, width: int) -> jax.Array:
  return bucket_words[:, number * width : (number + 1) * width]


def _is_live(vocabulary: DynamicVocabulary, last: jax.Array, step: jax.Array) -> jax.Array:
  """Whether rows have an owner whose time to live is not over."""
  live = last > 0
  if vocabulary.time_to_live is not None:
    live &= step - last.astype(jnp.int32) <= vocabulary.time_to_live
  return live


def find_rows(
  vocabulary: DynamicVocabulary, ids: jax.Array, buckets: jax.Array, numbers: jax.Array
) -> jax.Array:
  """The local row of each raw id: int32 `[N]`.

  -1 - b for an id that is not in its bucket b, and -2**31 for padding and for ids whose bucket is
  not here.

  Args:
    vocabulary: the policy.
    ids: raw ids, uint32 `[N, 2]`.
    buckets: of this device.
    numbers: int32 `[5]`, the number of the batch, the time to live or -1, the width and the number
      of all buckets, and the first one here.
  """
  width, (high, low) = vocabulary.bucket_width, (ids[:, 0], ids[:, 1])
  bucket = scaled_to(mixed(high, low)[0], vocabulary.buckets) - numbers[4]
  is_own = ~((high == EMPTY) & (low == EMPTY)) & (bucket >= 0) & (bucket < buckets.shape[0])
  bucket = jnp.where(is_own, bucket, 0)
  # Only the words that are compared: an empty row has no id's, an expired one may.
  read = (3 if vocabulary.time_to_live is not None else 2) * width
  dimensions = lax.GatherDimensionNumbers((1,), (0,), (0,))
  there = lax.gather(buckets, bucket[:, None], dimensions, (1, read), mode="promise_in_bounds")
  same = (_word(there, _HIGH, width) == high[:, None]) & (_word(there, _LOW, width) == low[:, None])
  if vocabulary.time_to_live is not None:
    same &= _is_live(vocabulary, _word(there, _LAST, width), numbers[0])
  # One at most is the same, and one reduction finds it.
  lane = jnp.max(jnp.where(same, jnp.arange(width, dtype=jnp.int32)[None], -1), axis=1)
  row = jnp.where(lane < 0, -1 - bucket, bucket * width + lane)
  return jnp.where(is_own, row, _NOT_HERE)


def _find(
  vocabulary: DynamicVocabulary, placement: Placement, buckets: jax.Array, ids: jax.Array, step: Any
) -> _Found:
  width, ttl = vocabulary.bucket_width, vocabulary.time_to_live
  first = device_index(placement.row_axes) * buckets.shape[0]
  known = (-1 if ttl is None else ttl, width, vocabulary.buckets)
  numbers = jnp.stack([step, *(jnp.int32(x) for x in known), first])
  row = find_rows(vocabulary, ids, buckets, numbers)
  is_own, is_hit = row != _NOT_HERE, row >= 0
  bucket = jnp.where(is_hit, row // width, -1 - row)
  return _Found(is_own, jnp.where(is_own, bucket, 0), is_hit, jnp.where(is_hit, row % width, 0))


def translate(
  vocabulary: DynamicVocabulary, placement: Placement, state: State, ids: jax.Array
) -> jax.Array:
  """The rows int32 `[N]` of raw ids uint32 `[N, 2]`, -1 for none; changes nothing."""

  def per_device(buckets, step, ids):
    found = _find(vocabulary, placement, buckets, ids, step)
    return _whole(placement, _global_row(vocabulary, placement, buckets, found))

  split = specs(vocabulary, placement)
  run = placement.run(per_device, (split["buckets"], P(), P()), P())
  return run(state["buckets"], state["step"], ids)


def owners(
  vocabulary: DynamicVocabulary, placement: Placement, buckets: jax.Array, rows: jax.Array
) -> jax.Array:
  """The raw ids uint32 `[..., 2]` that own rows int32 `[...]`; all ones without an owner."""
  width = vocabulary.bucket_width

  def per_device(buckets, rows):
    bucket = rows // width - device_index(placement.row_axes) * buckets.shape[0]
    is_own = (rows >= 0) & (rows < vocabulary.capacity) & (bucket >= 0)
    bucket = jnp.where(is_own, bucket, buckets.shape[0])
    columns = jnp.stack([rows % width, rows % width + width], axis=-1)
    ids = buckets.at[bucket[..., None], columns].get(mode="fill", fill_value=EMPTY)
    return lax.pmin(ids, placement.row_axes) if placement.row_axes else ids

  spec = specs(vocabulary, placement)["buckets"]
  return placement.run(per_device, (spec, P()), P())(buckets, rows)


def _global_row(vocabulary, placement, buckets, found: _Found) -> jax.Array:
  """The row of each hit plus 1, 0 for all others."""
  first = device_index(placement.row_axes) * buckets.shape[0]
  row = (found.bucket + first) * vocabulary.bucket_width + found.lane
  return jnp.where(found.is_hit, row + 1, 0)


def _whole(placement: Placement, rows: jax.Array) -> jax.Array:
  """Rows of which one device at most knows each, plus 1, on all devices; -1 for none."""
  return (lax.psum(rows, placement.row_axes) if placement.row_axes else rows) - 1


# --- admitting -----------------------------------------------------------------------------------


def admit(
  vocabulary: DynamicVocabulary,
  placement: Placement,
  state: State,
  ids: jax.Array,
  keeps_previous: bool = False,
) -> tuple[Admitted, State]:
  """Gives the raw ids uint32 `[N, 2]` of a batch rows, and those without a row new ones.

  Args:
    vocabulary: the policy.
    placement: the devices; all of them get the whole batch.
    state: of the table.
    ids: the raw ids of all features of the table.
    keeps_previous: whether rows of the batch before are kept like rows of this one.
  """
  n = ids.shape[0]
  if not n:  # nothing of no elements is scattered
    ids = jnp.full((1, 2), EMPTY)
  split = specs(vocabulary, placement)
  f = functools.partial(_admit_on_device, vocabulary, placement, keeps_previous)
  admitted, state = placement.run(f, (split, P()), (P(), split))(state, ids)
  return (Admitted(admitted.rows[:n], admitted.is_new[:n]) if not n else admitted), state


def _admit_on_device(vocabulary, placement, keeps_previous, state, ids):
  step = state["step"] + 1
  found = _find(vocabulary, placement, state["buckets"], ids, step)
  buckets = _touch(vocabulary, state["buckets"], found, step)
  is_miss = found.is_own & ~found.is_hit
  new = dict(state, buckets=buckets)
  arrays = {key: new[key] for key in ("buckets", "sightings") if key in new}
  settle = functools.partial(_settle, vocabulary, placement, keeps_previous)
  # Loops of one round or none: a conditional would copy the arrays.
  count, least, n = jnp.sum(is_miss, dtype=jnp.int32), 0, ids.shape[0]
  carry = (arrays, jnp.zeros(n, jnp.int32), jnp.zeros(n, bool), jnp.int32(0))
  for size in sorted({-(-n // part) for part in _PARTS}):
    rounds = ((count > least) & (count <= size)).astype(jnp.int32)

    def body(i, carry, size=size, rounds=rounds):
      # What does not depend on the round, XLA would compute before the loop, also without a round.
      return settle(size, carry[0], ids, found, is_miss & (i < rounds), step)

    carry, least = lax.fori_loop(0, rounds, body, carry), size
  arrays, rows, is_new, evictions = carry
  rows = jnp.where(found.is_hit, _global_row(vocabulary, placement, buckets, found), rows)
  masks = (found.is_own, found.is_hit, is_new, found.is_own & (rows == 0))
  *counts, turned_away = (jnp.sum(mask, dtype=jnp.int32) for mask in masks)
  counts += [evictions, turned_away]
  batch = jnp.stack(counts)
  if placement.row_axes:
    batch, is_new = lax.psum((batch, is_new.astype(jnp.int32)), placement.row_axes)
    is_new = is_new > 0
  new |= {"step": step, "batch": batch, "totals": _added(state["totals"], batch)}
  new |= {str(key): x for key, x in arrays.items()}
  new["filled"] = state["filled"] + batch[2] - batch[3]
  return Admitted(_whole(placement, rows), is_new), new


def _added(totals: jax.Array, counts: jax.Array) -> jax.Array:
  """64-bit sums as halves, plus counts."""
  low = totals[:, 1] + counts.astype(jnp.uint32)
  high = totals[:, 0] + (low < totals[:, 1]).astype(jnp.uint32)
  return jnp.stack([high, low], axis=1)


def _faded(vocabulary: DynamicVocabulary, counts: jax.Array, last: jax.Array, step: Any):
  """Counts halved once for each epoch that has begun since they were last used."""
  if vocabulary.half_life is None:
    return counts
  epochs = step // vocabulary.half_life - last.astype(jnp.int32) // vocabulary.half_life
  return counts >> jnp.clip(epochs, 0, 31).astype(jnp.uint32)


def _touch(vocabulary, buckets: jax.Array, found: _Found, step: jax.Array) -> jax.Array:
  """Marks the rows of the ids that were found as used in this batch."""
  width = vocabulary.bucket_width
  bucket = jnp.where(found.is_hit, found.bucket, buckets.shape[0])
  column = lambda word: buckets.at[bucket, word * width + found.lane]
  if vocabulary.eviction == "lfu":
    of_row = lambda word: found.word(buckets, word, width)
    count = _faded(vocabulary, of_row(_COUNT), of_row(_LAST), step)
    buckets = column(_COUNT).set(jnp.minimum(count, _MOST), mode="drop")
    buckets = column(_COUNT).add(jnp.uint32(1), mode="drop")
  return column(_LAST).set(step.astype(jnp.uint32), mode="drop")


def _settle(vocabulary, placement, keeps_previous, size, arrays, ids, found, is_miss, step):
  """Gives newcomers rows, at most `size` occurrences of them.

  Returns:
    The new arrays; of each id of the batch the row that a newcomer was given, plus 1, and whether
    it is the occurrence that stands for its id; and the number of evictions.
  """
  n = is_miss.shape[0]
  width, local = vocabulary.bucket_width, arrays["buckets"].shape[0]
  # Distinct newcomers, the first of each run, in the order of their hashes and so of their buckets.
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
  occurrences = jnp.zeros(size, jnp.uint32).at[run].add(is_used.astype(jnp.uint32))
  occurrences = occurrences.at[run].get(mode="promise_in_bounds")
  is_asking = is_first & is_used
  bucket = jnp.where(is_used, of(found.bucket, 0), local)

  buckets, new = arrays["buckets"], dict(arrays)
  if vocabulary.sightings > 1:
    where = jnp.where(is_asking, bucket, local)
    new["sightings"], seen = _see(vocabulary, arrays["sightings"], where, h2, occurrences, step)
    is_asking &= seen >= vocabulary.sightings
  if vocabulary.probability < 1:
    draw = finalize(h1 ^ finalize(h2 ^ finalize(step.astype(jnp.uint32) ^ _seed(vocabulary))))
    is_asking &= draw < jnp.uint32(round(vocabulary.probability * 2**32))

  # The r-th newcomer of a bucket takes the row of the r-th lowest rank, if that is to be had.
  before = jnp.cumsum(is_asking, dtype=jnp.int32) - is_asking
  rank = before - lax.cummax(jnp.where(differs(bucket), before, 0))
  there = buckets.at[bucket].get(mode="fill", fill_value=0)
  ranks = _ranks(vocabulary, there, step, keeps_previous)
  if vocabulary.trains_unknown:
    last_row = vocabulary.buckets - 1 - device_index(placement.row_axes) * local
    is_reserved = (bucket == last_row)[:, None] & (jnp.arange(width) == width - 1)[None]
    ranks = tuple(jnp.where(is_reserved, _NEVER, x) for x in ranks)
  lane, is_free = _nth_lowest(ranks, rank)
  is_given = is_asking & is_free
  old = jnp.take_along_axis(_word(there, _LAST, width), lane[:, None], 1)[:, 0]
  evictions = jnp.sum(is_given & (old > 0), dtype=jnp.int32)

  to = jnp.where(is_given, bucket, local)
  values = [of(ids[:, 0], EMPTY), of(ids[:, 1], EMPTY), jnp.full(size, step, jnp.uint32)]
  values += [occurrences] if vocabulary.eviction == "lfu" else []
  for word, value in enumerate(values):
    buckets = buckets.at[to, word * width + lane].set(value, mode="drop")
  new["buckets"] = buckets

  first_bucket = device_index(placement.row_axes) * local
  row = jnp.where(is_given, (bucket + first_bucket) * width + lane + 1, 0)
  of_run = jnp.zeros(size, jnp.int32).at[run].max(row)
  rows = of_run.at[run].get(mode="promise_in_bounds")
  rows = jnp.zeros(n, jnp.int32).at[index].set(rows, mode="drop")
  is_new = jnp.zeros(n, bool).at[index].set(is_given, mode="drop")
  return new, rows, is_new, evictions


def _seed(vocabulary: DynamicVocabulary) -> jax.Array:
  return jnp.uint32((vocabulary.seed * _SALTS[0]) % 2**32)


def _see(vocabulary, sketch, bucket, h2, occurrences, step):
  """Counts ids without rows in a sketch; returns it and how often each has been seen, at least."""
  cells = 2 * vocabulary.bucket_width
  second = finalize(h2 ^ jnp.uint32(_SALTS[1]))
  columns = jnp.stack([scaled_to(finalize(h2), cells), cells + scaled_to(second, cells)], axis=1)
  bucket = bucket[:, None]
  epoch = jnp.uint32(0)
  if vocabulary.half_life is not None:
    epoch = ((step // vocabulary.half_life) & 0xFF).astype(jnp.uint32)
  old = sketch.at[bucket, columns].get(mode="fill", fill_value=0)
  halvings = jnp.minimum((epoch - (old >> 24)) & jnp.uint32(0xFF), 31)
  count = jnp.minimum((old & jnp.uint32(0xFFFFFF)) >> halvings, _MOST)
  sketch = sketch.at[bucket, columns].set((epoch << 24) | count, mode="drop")
  sketch = sketch.at[bucket, columns].add(occurrences[:, None], mode="drop")
  now = sketch.at[bucket, columns].get(mode="fill", fill_value=0) & jnp.uint32(0xFFFFFF)
  return sketch, now.min(axis=1)


def _ranks(vocabulary, there: jax.Array, step, keeps_previous: bool):
  """The order in which rows of buckets are taken: uint32 `[n, W]` twice, the second for ties."""
  width = vocabulary.bucket_width
  last = _word(there, _LAST, width)
  is_live = _is_live(vocabulary, last, step)
  is_kept = (last.astype(jnp.int32) >= step - int(keeps_previous)) & (last > 0)
  ranks = [last]
  if vocabulary.eviction == "lfu":
    count = _faded(vocabulary, _word(there, _COUNT, width), last, step)
    ranks = [count + 1, last]  # a count may have faded to 0, which is for free rows
  ranks = [jnp.where(is_kept, _NEVER, jnp.where(is_live, x, 0)) for x in ranks]
  return (*ranks, jnp.zeros_like(last))[:2]


def _nth_lowest(ranks, n: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The lane of the n-th lowest rank of each row `[N, W]`, ties by lane, and whether it is taken.

  By comparing all pairs: W is small, and no sort along an axis is as fast on any backend.
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
