"""A dynamic vocabulary in plain Python: slow, one id at a time, and by the same rules."""

import collections
import dataclasses

MASK = 2**32 - 1
EMPTY = 2**64 - 1
SALTS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xC2B2AE3D)
MOST = 2**20


def finalize(h):
  h = (h ^ (h >> 16)) * 0x7FEB352D & MASK
  h = (h ^ (h >> 15)) * 0x846CA68B & MASK
  return h ^ (h >> 16)


def mixed(raw):
  high, low = raw >> 32, raw & MASK
  for salt in SALTS:
    high, low = low, high ^ finalize(low ^ salt)
  return high, low


@dataclasses.dataclass
class Row:
  raw: int = EMPTY
  last: int = 0
  count: int = 0


class Reference:
  """`admit` gives rows by raw id (None for none), and which ids are new."""

  def __init__(self, vocabulary):
    self.vocabulary = v = vocabulary
    self.buckets = [[Row() for _ in range(v.bucket_width)] for _ in range(v.buckets)]
    self.step = 0
    self.counts = [0] * 5

  def bucket(self, raw):
    return mixed(raw)[0] * self.vocabulary.buckets >> 32

  def is_live(self, row):
    ttl = self.vocabulary.time_to_live
    return row.last > 0 and (ttl is None or self.step - row.last <= ttl)

  def find(self, raw):
    if raw == EMPTY:
      return None
    bucket = self.bucket(raw)
    for lane, row in enumerate(self.buckets[bucket]):
      if row.raw == raw and self.is_live(row):
        return bucket * self.vocabulary.bucket_width + lane
    return None

  def row(self, number):
    return self.buckets[number // self.vocabulary.bucket_width][
      number % self.vocabulary.bucket_width
    ]

  def faded(self, row):
    half_life = self.vocabulary.half_life
    if half_life is None:
      return row.count
    return row.count >> min(31, self.step // half_life - row.last // half_life)

  def admit(self, raws, keeps_previous=False):
    v = self.vocabulary
    self.step += 1
    batch = collections.Counter(raw for raw in raws if raw != EMPTY)
    found = {raw: self.find(raw) for raw in batch}
    for raw, number in found.items():
      if number is not None:
        row = self.row(number)
        row.count = min(self.faded(row), MOST) + batch[raw]
        row.last = self.step
    newcomers = [raw for raw, number in found.items() if number is None]
    new, evictions = {}, 0
    ranked = collections.defaultdict(list)
    for raw in sorted(newcomers, key=mixed):
      ranked[self.bucket(raw)].append(raw)
    for bucket, asking in ranked.items():
      rows = self.buckets[bucket]
      kept = self.step - int(keeps_previous)
      free = [lane for lane, row in enumerate(rows) if not 0 < row.last >= kept]
      free.sort(key=lambda lane: (*self.rank(rows[lane]), lane))
      for raw, lane in zip(asking, free, strict=False):
        evictions += rows[lane].last > 0
        rows[lane] = Row(raw, self.step, batch[raw])
        new[raw] = bucket * v.bucket_width + lane
    answers = {raw: number if number is not None else new.get(raw) for raw, number in found.items()}
    hits = sum(n for raw, n in batch.items() if found[raw] is not None)
    away = sum(n for raw, n in batch.items() if answers[raw] is None)
    self.counts = [sum(batch.values()), hits, len(new), evictions, away]
    return [answers.get(raw) for raw in raws], set(new)

  def rank(self, row):
    if not self.is_live(row):
      return (0, 0)
    return (row.last, 0) if self.vocabulary.eviction == "lru" else (self.faded(row) + 1, row.last)

  @property
  def filled(self):
    return sum(row.last > 0 for rows in self.buckets for row in rows)
