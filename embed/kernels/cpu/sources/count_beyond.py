"""The kernel that counts ids beyond a table. `build` compiles this file; nothing imports it.

Arguments: ids, int32 of any shape, and the rows of the table, int32 `[]`. The result is int32 `[]`.
"""

import numba
import numpy as np
from numba import types

from embed.kernels.cpu import cache
from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem


@numba.njit(**mem.OPTIONS)
def count_beyond(ids, count, size):
  beyond = np.int32(0)
  for i in range(count):
    beyond += np.int32(mem.read_int(ids, i) >= size)
  return beyond


@cache.compiled(types.int64(types.int64))
def handler(frame):
  """What XLA calls."""
  if ffi.is_query(frame):
    return 0
  ids, size, out = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
  count = ffi.elements(ids)
  fits = ffi.holds(ids, ffi.S32, count) and ffi.holds(size, ffi.S32, 1)
  if not fits or not ffi.holds(out, ffi.S32, 1):
    return ffi.misfit(frame)
  beyond = count_beyond(ffi.data(ids), count, mem.read_int(ffi.data(size), 0))
  mem.write_int(ffi.data(out), 0, beyond)
  return 0
