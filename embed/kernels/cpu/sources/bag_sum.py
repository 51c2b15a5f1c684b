"""The kernel of a lookup: sums of rows. `build` compiles this file; nothing imports it.

Arguments: a table `[V, D]` of dtype `TABLE`, ids int32 `[B, L]` and gains float32 `[B, L]`,
`[B, 1]`, or `[0]` for none. Ragged bags: ids `[N]`, segments int32 `[N]`, gains `[N]` or `[0]`. The
result is float32 `[B, D]`. Ids that are no row of the table add nothing.
"""

import llvmlite.binding
import numba
import numpy as np
from numba import types

from embed.kernels.cpu import cache
from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem

TASK = "sparse_embed_task"
TABLE = "float32"
_TABLE, _SIZE, _DIM, _IDS, _LENGTH, _GAINS, _GAINS_LENGTH, _OUT, _BAGS = range(9)
_SEGMENTS, _COUNT, _BAGS_PER_PART, _ZEROS, _ONE, _WORK_WORDS = range(9, 15)
ALONE = 1 << 16  # elements that a thread sums faster than another one wakes up
PART = 1 << 15  # elements of a part, at least
LARGE = 4 << 20  # bytes of whole pages
BLOCK = 1 << 12  # ids of ragged bags whose rows are found at a time
ONE = np.float32(1)
DTYPE, WIDTH = ffi.TABLES[TABLE], 4 if TABLE == "float32" else 2  # bytes
weighted_sum = mem.weighted_sum if TABLE == "float32" else mem.weighted_sum_bfloat16


@numba.njit(**mem.OPTIONS)
def find_rows(work, ids, count, rows):
  """Writes the address of each id's row; padding gets the address of a row of zeros."""
  table, size = mem.read_word(work, _TABLE), mem.read_word(work, _SIZE)
  width, zeros = WIDTH * mem.read_word(work, _DIM), mem.read_word(work, _ZEROS)
  for i in range(count):
    id = np.int64(mem.read_int(ids, i))
    mem.write_word(rows, i, table + width * id if 0 <= id < size else zeros)


@numba.njit(**mem.OPTIONS)
def rows_of(work, count):
  """Memory for the addresses of `count` rows, followed by those that `weighted_sum` reads ahead."""
  rows = mem.malloc(8 * (count + mem.AHEAD))
  for i in range(count, count + mem.AHEAD):
    mem.write_word(rows, i, mem.read_word(work, _ZEROS))
  return rows


@numba.njit(**mem.OPTIONS)
def sum_bags(work, start, end):
  """Sums the bags of `length` positions from `start` to `end`."""
  dim, length = mem.read_word(work, _DIM), mem.read_word(work, _LENGTH)
  ids, gains = mem.read_word(work, _IDS), mem.read_word(work, _GAINS)
  gains_length, zeros = mem.read_word(work, _GAINS_LENGTH), mem.read_word(work, _ZEROS)
  per_id, per_bag = gains_length == length, gains_length == 1 and length != 1
  first, count = start * length, (end - start) * length
  rows = rows_of(work, count)
  find_rows(work, ids + 4 * first, count, rows)
  for i in range(min(count, mem.AHEAD)):
    mem.prefetch(mem.read_word(rows, i), WIDTH * dim)
  of_one, stride = work + 8 * _ONE, 0
  for bag in range(end - start):
    of_bag, scale = of_one, ONE
    if per_id:
      of_bag, stride = gains + 4 * (first + bag * length), 1
    elif per_bag:
      scale = mem.read_float(gains, start + bag)
    total = mem.read_word(work, _OUT) + 4 * dim * (start + bag)
    of_rows = rows + 8 * bag * length
    weighted_sum(total, zeros, dim, of_rows, of_bag, stride, length, scale)
  mem.free(rows)


@numba.njit(**mem.OPTIONS)
def sum_segments(work, start, end):
  """Sums the ragged bags from `start` to `end`, whose ids may be anywhere."""
  dim, out = mem.read_word(work, _DIM), mem.read_word(work, _OUT)
  ids, segments = mem.read_word(work, _IDS), mem.read_word(work, _SEGMENTS)
  gains, has_gains = mem.read_word(work, _GAINS), mem.read_word(work, _GAINS_LENGTH) > 0
  mem.memset(out + 4 * dim * start, 0, 4 * dim * (end - start))
  count, rows = mem.read_word(work, _COUNT), rows_of(work, BLOCK)
  for base in range(0, count, BLOCK):
    stop, known = min(base + BLOCK, count), min(base + BLOCK + mem.AHEAD, count)
    for i in range(known - base, BLOCK + mem.AHEAD):  # after the last id
      mem.write_word(rows, i, mem.read_word(work, _ZEROS))
    i, found = base, base
    while i < stop:  # a run of ids of one bag at a time
      bag, n = np.int64(mem.read_int(segments, i)), 1
      while i + n < stop and np.int64(mem.read_int(segments, i + n)) == bag:
        n += 1
      if start <= bag < end:
        found, ahead = max(found, i), min(i + n + mem.AHEAD, known)
        find_rows(work, ids + 4 * found, ahead - found, rows + 8 * (found - base))
        found = ahead
        total, of_run = out + 4 * dim * bag, gains + 4 * i if has_gains else work + 8 * _ONE
        of_rows = rows + 8 * (i - base)
        weighted_sum(total, total, dim, of_rows, of_run, np.int64(has_gains), n, ONE)
      i += n
  mem.free(rows)


@numba.njit(**mem.OPTIONS)
def ask_for_large_pages(start, size):
  """Lets the system back new memory by large pages: a page of 4 kB takes as long to get as to fill.

  Memory that has pages keeps them for now.
  """
  first, end = (start + mem.PAGE - 1) // mem.PAGE * mem.PAGE, (start + size) // mem.PAGE * mem.PAGE
  if mem.IS_LINUX and end - first >= LARGE:
    mem.madvise(first, end - first, mem.HUGEPAGE)


@numba.njit(**mem.OPTIONS)
def fits(frame):
  """Whether the arrays have the dtypes and shapes of the first lines of this file."""
  table, ids, out = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
  bags, count, is_ragged = ffi.dimension(out, 0), ffi.elements(ids), ffi.rank(ids) == 1
  gains = ffi.argument(frame, 2 + is_ragged)
  size = ffi.elements(gains)
  has_gains = size == count or size == 0 or (size == bags and not is_ragged)
  if is_ragged and not ffi.holds(ffi.argument(frame, 2), ffi.S32, count):
    return False
  return (
    ffi.holds(table, DTYPE, ffi.dimension(table, 0) * ffi.dimension(out, 1))
    and ffi.holds(ids, ffi.S32, count if is_ragged else bags * ffi.dimension(ids, 1))
    and ffi.holds(gains, ffi.F32, size)
    and ffi.holds(out, ffi.F32, bags * ffi.dimension(table, 1))
    and has_gains
  )


@numba.njit(**mem.OPTIONS)
def sum_rows(frame):
  """Reads the arguments and shares the work."""
  work = mem.malloc(8 * _WORK_WORDS)
  table, ids, out = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
  is_ragged = ffi.rank(ids) == 1
  gains = ffi.argument(frame, 2 + is_ragged)
  dim, bags = ffi.dimension(table, 1), ffi.dimension(out, 0)
  length = 0 if is_ragged else ffi.dimension(ids, 1)
  count = ffi.dimension(ids, 0) if is_ragged else bags * length
  mem.write_word(work, _TABLE, ffi.data(table))
  mem.write_word(work, _SIZE, ffi.dimension(table, 0))
  mem.write_word(work, _DIM, dim)
  mem.write_word(work, _IDS, ffi.data(ids))
  mem.write_word(work, _LENGTH, length)
  mem.write_word(work, _GAINS, ffi.data(gains))
  mem.write_word(work, _GAINS_LENGTH, ffi.dimension(gains, ffi.rank(gains) - 1))
  mem.write_word(work, _OUT, ffi.data(out))
  mem.write_word(work, _BAGS, bags)
  mem.write_word(work, _SEGMENTS, ffi.data(ffi.argument(frame, 2)))
  mem.write_word(work, _COUNT, count)
  zeros = mem.calloc(dim, 4)
  mem.write_word(work, _ZEROS, zeros)
  mem.write_float(work + 8 * _ONE, 0, ONE)
  helpers = 0 if count * dim < ALONE else ffi.threads(frame) - 1
  parts = helpers + 1 if is_ragged else min(max(count * dim // PART, 1), 8 * (helpers + 1))
  per_part = max((bags + parts - 1) // parts, 1)
  mem.write_word(work, _BAGS_PER_PART, per_part)
  parts = (bags + per_part - 1) // per_part
  ask_for_large_pages(ffi.data(out), 4 * bags * dim)
  ffi.share(mem.address_of(TASK), frame, helpers, 0, parts, work)
  mem.free(zeros)
  mem.free(work)


@cache.compiled(types.void(types.int64))
def do_parts(job):
  """What all threads run."""
  work, part = ffi.work(job), ffi.next_part(job)
  while part >= 0:  # without a part of its own, a task may begin when the work is gone
    per_part = mem.read_word(work, _BAGS_PER_PART)
    start = part * per_part
    end = min(start + per_part, mem.read_word(work, _BAGS))
    if mem.read_word(work, _LENGTH) == 0:
      sum_segments(work, start, end)
    else:
      sum_bags(work, start, end)
    ffi.part_done(job)
    part = ffi.next_part(job)
  ffi.let_go(job)


llvmlite.binding.add_symbol(TASK, do_parts.address)


@cache.compiled(types.int64(types.int64))
def handler(frame):
  """What XLA calls."""
  if ffi.is_query(frame):
    return 0
  if not fits(frame):
    return ffi.misfit(frame)
  sum_rows(frame)
  return 0
