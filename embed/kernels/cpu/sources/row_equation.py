"""An optimizer's equation, and what XLA calls to step its rows. `build` compiles this file."""

import llvmlite.binding
import numba
from numba import types

from embed.kernels.cpu import equations
from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem

EQUATION = "sparse_embed_equation"
UPDATE = "sparse_embed_update"
PROGRAM = equations.SGD
step_row = equations.compiled(PROGRAM)


@numba.cfunc(types.void(*[types.int64] * 6), cache=True)
def step(grad, state, row, dim, rate, numbers):
  """What `row_step` calls for each row."""
  step_row(grad, state, row, dim, rate, numbers)


llvmlite.binding.add_symbol(EQUATION, step.address)


@numba.cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  """What XLA calls."""
  if not ffi.is_query(frame):
    mem.call(mem.address_of(UPDATE), (frame, mem.address_of(EQUATION)))
  return 0
