"""The kernel that counts ids beyond a table. `build` compiles this file; nothing imports it.

Arguments: ids, int32 of any shape, and the rows of the table, int32 `[]`. The result is int32 `[]`.
"""

import numba
import numpy as np
from numba import types

from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem


@numba.njit(**mem.OPTIONS)
def count_beyond(ids, count, size):
  beyond = np.int32(0)
  for i in range(count):
    beyond += np.int32(mem.read_int(ids, i) >= size)
  return beyond


@numba.cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  """What XLA calls."""
  if not ffi.is_query(frame):
    ids, count = ffi.argument(frame, 0), 1
    for axis in range(ffi.rank(ids)):
      count *= ffi.dimension(ids, axis)
    size = mem.read_int(ffi.data(ffi.argument(frame, 1)), 0)
    beyond = count_beyond(ffi.data(ids), count, size)
    mem.write_int(ffi.data(ffi.result(frame, 0)), 0, beyond)
  return 0
