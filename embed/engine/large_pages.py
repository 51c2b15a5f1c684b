"""Large pages of memory for tables on CPU.

A step reads rows from all over a table, and each page of memory that it reads takes an entry of the
processor's TLB. A page of 4 kB holds 16 rows of 64 floats; one of 2 MB holds 8,192.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterable

import jax

from embed.engine import jax_internals, native

PAGE = 1 << 21  # bytes; 2 MB on x86-64, and on 64-bit ARM with small pages of 4 kB
_COLLAPSE = 25  # MADV_COLLAPSE of <linux/mman.h>, since Linux 6.1


def use(arrays: Iterable[jax.Array]) -> int:
  """Asks the system to move arrays to large pages, which takes up to two seconds for each GB.

  A step that writes arrays in place keeps their pages. Nothing happens to arrays of less than a
  page, inside of jitted functions, and where the compiled kernels are off.

  Returns:
    How many bytes are in large pages; 0 where the system has none.
  """
  advise = _madvise()
  if advise is None or not native.is_on():
    return 0
  moved = 0
  for array in arrays:
    if jax_internals.is_traced(array) or array.nbytes < PAGE:
      continue
    for shard in jax.block_until_ready(array).addressable_shards:
      start = jax_internals.address(shard.data)
      first, end = -(-start // PAGE), (start + shard.data.nbytes) // PAGE
      for page in range(first, end):  # one by one: for some the system may have no memory
        moved += PAGE * (advise(page * PAGE, PAGE, _COLLAPSE) == 0)
  return moved


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
  """The function of the C library; None where it knows no large pages."""
  if os.name != "posix" or os.uname().sysname != "Linux":
    return None
  madvise = ctypes.CDLL(None).madvise
  madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  return madvise
