"""Large pages of memory for tables on CPU.

A step reads rows from all over a table, and each page of memory that it reads takes an entry of the
processor's TLB. A page of 4 kB holds 16 rows of 64 floats; one of 2 MB holds 8,192.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable

import jax

from embed.engine import jax_internals
from embed.kernels import cpu as cpu_kernels

PAGE = 1 << 21  # bytes; 2 MB on x86-64, and on 64-bit ARM with small pages of 4 kB
_COLLAPSE = 25  # MADV_COLLAPSE of <linux/mman.h>, since Linux 6.1


def use(arrays: Iterable[jax.Array]) -> int:
  """Asks the system to move arrays to large pages, which takes up to two seconds for each GB.

  A step that writes arrays in place keeps their pages. Nothing happens to arrays of less than a
  page, inside of jitted functions, and where the compiled kernels are off.

  Returns:
    The bytes of the arrays that are wholly in large pages now.
  """
  large = [x for x in arrays if not jax_internals.is_traced(x) and x.nbytes >= PAGE]
  advise = _madvise()
  if not large or advise is None or not cpu_kernels.is_on():
    return 0
  moved = 0
  for array in jax.block_until_ready(large):
    for shard in array.addressable_shards:
      start = jax_internals.address(shard.data)
      first, end = -(-start // PAGE) * PAGE, (start + shard.data.nbytes) // PAGE * PAGE
      # The system ends at the first page that it has no memory for, and leaves the rest as it is.
      if end > first and advise(first, end - first, _COLLAPSE) == 0:
        moved += end - first
  return moved


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
  """The function of the C library; None where there is no Linux."""
  if sys.platform != "linux":
    return None
  madvise = ctypes.CDLL(None).madvise
  madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  return madvise
