"""An optimizer's equation, and what XLA calls to step its rows. `build` compiles this file."""

import llvmlite.binding
import numba
from numba import types

from embed.kernels.cpu import cache, equations
from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem

EQUATION = "sparse_embed_equation"
UPDATE = "sparse_embed_update"
PROGRAM = equations.SGD
DTYPES = (ffi.TABLES[PROGRAM.table], *(ffi.SLOTS[dtype] for dtype in PROGRAM.slot_dtypes))
IS_ROW = (True, *PROGRAM.slots)
WORDS = equations.words(PROGRAM)
step_row = equations.compiled(PROGRAM)


@cache.compiled(types.void(*[types.int64] * 6))
def step(grad, state, row, dim, rate, words):
  """What `row_step` calls for each row."""
  step_row(grad, state, row, dim, rate, words)


llvmlite.binding.add_symbol(EQUATION, step.address)


@numba.njit(**mem.OPTIONS)
def fits(frame):
  """Whether the arrays have the dtypes and shapes that the program and `row_step` read."""
  states, inputs = len(DTYPES), len(DTYPES) + 2
  if ffi.results(frame) != states or (ffi.arguments(frame) - inputs) % 3 != 0:
    return False
  table, words = ffi.argument(frame, 0), ffi.argument(frame, states + 1)
  size, dim = ffi.dimension(table, 0), ffi.dimension(table, 1)
  known = ffi.holds(ffi.argument(frame, states), ffi.F32, 1)
  known &= ffi.holds(words, ffi.U32, max(WORDS, ffi.elements(words)))
  for k in range(states):
    old, new, count = ffi.argument(frame, k), ffi.result(frame, k), size * (dim if IS_ROW[k] else 1)
    known &= ffi.holds(old, DTYPES[k], count) and ffi.holds(new, DTYPES[k], count)
    known &= ffi.data(old) == ffi.data(new)
  for k in range(inputs, ffi.arguments(frame), 3):
    grads, ids = ffi.argument(frame, k), ffi.argument(frame, k + 1)
    gains, bags = ffi.argument(frame, k + 2), ffi.dimension(ids, 0)
    count = bags * ffi.dimension(ids, 1)
    known &= ffi.holds(grads, ffi.F32, bags * dim) and ffi.holds(ids, ffi.S32, count)
    known &= ffi.holds(gains, ffi.F32, count) or ffi.holds(gains, ffi.F32, 0)
  return known


@cache.compiled(types.int64(types.int64))
def handler(frame):
  """What XLA calls."""
  if ffi.is_query(frame):
    return 0
  if not fits(frame):
    return ffi.misfit(frame)
  mem.call(mem.address_of(UPDATE), (frame, mem.address_of(EQUATION)))
  return 0
