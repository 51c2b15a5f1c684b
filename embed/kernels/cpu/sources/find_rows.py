"""The kernel that finds raw ids in their buckets. `build` compiles this file; nothing imports it.

Arguments: raw ids, uint32 `[N, 2]`; buckets, uint32 `[B, words]`; and int32 `[5]`, the number of
the batch, the time to live or -1, the rows of a bucket, the buckets of all devices, and the first
one here. The result is int32 `[N]`, as `engine.admission.find_rows` defines it.
"""

import numba
import numpy as np
from numba import types

from embed.kernels.cpu import cache
from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem

BLOCK = 32  # ids whose buckets are asked for ahead of time
MASK = 0xFFFFFFFF
NONE = -(2**31)


@numba.njit(**mem.OPTIONS)
def finalize(h):
  h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
  h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
  return h ^ (h >> 16)


@numba.njit(**mem.OPTIONS)
def bucket_of(high, low, buckets):
  """As `engine.admission.mixed` and `scaled_to`."""
  if high == MASK and low == MASK:
    return -1
  high, low = low, high ^ finalize(low ^ 0x9E3779B1)
  high, low = low, high ^ finalize(low ^ 0x7FEB352D)
  high, low = low, high ^ finalize(low ^ 0x846CA68B)
  high, low = low, high ^ finalize(low ^ 0xC2B2AE3D)
  return (high * buckets) >> 32


@numba.njit(**mem.OPTIONS)
def find_rows(ids, count, table, local, words, numbers, out):
  step, live = np.int64(mem.read_int(numbers, 0)), np.int64(mem.read_int(numbers, 1))
  width, total = np.int64(mem.read_int(numbers, 2)), np.int64(mem.read_int(numbers, 3))
  first = np.int64(mem.read_int(numbers, 4))
  for start in range(0, count, BLOCK):
    end = min(start + BLOCK, count)
    for i in range(start, end):
      high = np.int64(mem.read_int(ids, 2 * i)) & MASK
      low = np.int64(mem.read_int(ids, 2 * i + 1)) & MASK
      bucket = bucket_of(high, low, total)
      is_own = bucket >= first and bucket < first + local
      mem.write_int(out, i, np.int32(bucket - first if is_own else NONE))
      if is_own:
        mem.prefetch(table + (bucket - first) * words * 4, width * 8)
    for i in range(start, end):
      bucket = np.int64(mem.read_int(out, i))
      if bucket == NONE:
        continue
      high, low = mem.read_int(ids, 2 * i), mem.read_int(ids, 2 * i + 1)
      row, found = table + bucket * words * 4, -1 - bucket
      for lane in range(width):
        if mem.read_int(row, lane) == high and mem.read_int(row, width + lane) == low:
          last = np.int64(mem.read_int(row, 2 * width + lane))
          if live < 0 or (last > 0 and step - last <= live):
            found = bucket * width + lane
            break
      mem.write_int(out, i, np.int32(found))


@cache.compiled(types.int64(types.int64))
def handler(frame):
  """What XLA calls."""
  if ffi.is_query(frame):
    return 0
  ids, table = ffi.argument(frame, 0), ffi.argument(frame, 1)
  numbers, out = ffi.argument(frame, 2), ffi.result(frame, 0)
  count, local = ffi.elements(ids) // 2, ffi.dimension(table, 0)
  fits = ffi.holds(ids, ffi.U32, 2 * count) and ffi.holds(table, ffi.U32, ffi.elements(table))
  if not fits or not ffi.holds(numbers, ffi.S32, 5) or not ffi.holds(out, ffi.S32, count):
    return ffi.misfit(frame)
  words = ffi.dimension(table, 1)
  find_rows(ffi.data(ids), count, ffi.data(table), local, words, ffi.data(numbers), ffi.data(out))
  return 0
