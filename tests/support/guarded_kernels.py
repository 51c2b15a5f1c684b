"""Calls the CPU's kernels with every array between pages that may not be touched.

A program of its own: a kernel that reads or writes outside of an array, or of its own memory, or
after it has freed that, ends it by SIGSEGV. Results are compared with XLA's formulation.
"""

import ctypes
import itertools
import mmap
import sys
import threading

import jax.numpy as jnp
import llvmlite.binding
import numpy as np
import optax

import embed
from embed.engine import update
from embed.engine.bags import Bags
from embed.engine.grads import GradRows
from embed.engine.stack import Layout, StackSpec
from embed.kernels import cpu as cpu_kernels
from embed.kernels.cpu import build, frame

DTYPES = [
  *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
  *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "complex64"),
]
SIZES = (1, 7, 1000, 100_000)
CODES = {"float32": frame.F32, "int32": frame.S32, "uint32": frame.U32, "bfloat16": frame.BF16}


# --- memory ---------------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
Word = ctypes.c_int64
_regions: dict[int, tuple[int, int]] = {}


def allocate(size, align, at_end=True):
  """The address of memory that ends, or begins, at a page that may not be touched."""
  pages = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
  no_access, private = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  region = LIBC.mmap(None, pages + 2 * mmap.PAGESIZE, no_access, private, -1, 0)
  assert region != 2**64 - 1, "no memory"
  first = region + mmap.PAGESIZE
  assert LIBC.mprotect(first, pages, mmap.PROT_READ | mmap.PROT_WRITE) == 0
  address = first + (pages - -(-size // align) * align if at_end else 0)
  _regions[address] = region, pages + 2 * mmap.PAGESIZE
  return address


def release(address):
  region = _regions.pop(address, None)
  if region is None:
    LIBC.free(address)
  else:
    LIBC.munmap(*region)


def guarded(array, at_end):
  """A copy of an array between such pages; the caller releases it."""
  array = np.asarray(array)
  address = allocate(array.nbytes, array.itemsize, at_end)
  copy = np.frombuffer((ctypes.c_byte * array.nbytes).from_address(address), array.dtype)
  copy = copy.reshape(array.shape)
  copy[...] = array
  return copy, address


def of_c(result, *arguments):
  """A decorator: a function for C, which lives as long as the program."""

  def wrap(function):
    made = ctypes.CFUNCTYPE(result, *arguments)(function)
    _functions.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value

  return wrap


_functions: list = []


@of_c(Word, Word)
def malloc(size):
  address = allocate(size, 8)
  ctypes.memset(address, 0xAB, size)  # no zeros that a kernel forgot to write
  return address


@of_c(Word, Word, Word)
def calloc(count, size):
  return allocate(count * size, 8)


@of_c(Word, Word)
def free(address):
  release(address)
  return 0


# --- calls ----------------------------------------------------------------------------------------


def words(*numbers):
  return np.array(numbers, np.int64)


def fields(address, count):
  return (Word * count).from_address(address)


@of_c(Word, Word)
def schedule(call):
  _, _, _, task, job = fields(call, 5)
  run = ctypes.CFUNCTYPE(None, Word)(task)
  thread = threading.Thread(target=run, args=(job,))
  _threads.append(thread)
  thread.start()
  return 0


@of_c(Word, Word)
def thread_count(call):
  fields(fields(call, 4)[3], 1)[0] = 3
  return 0


@of_c(Word, Word)
def error(call):
  print(ctypes.string_at(fields(call, 3)[2]).decode())
  return 1


_threads: list[threading.Thread] = []
_handlers: dict = {}


def invoke(target, arguments, results):
  """Calls a kernel as XLA does; returns whether it succeeded."""
  api = words(*[0] * (frame._API_BYTES // 8))
  for index, function in (
    (frame._SCHEDULE, schedule),
    (frame._NUM_THREADS, thread_count),
    (frame._ERROR, error),
  ):
    api[index] = function
  alive = [api]

  def list_of(arrays):
    buffers = []
    for x in arrays:
      dims = words(*x.shape)
      code = CODES.get(str(x.dtype), 1)
      alive.append(dims)
      buffers.append(words(48, 0, code, x.ctypes.data, x.ndim, dims.ctypes.data))
    addresses = words(*(x.ctypes.data for x in buffers))
    alive.extend([*buffers, addresses])
    return [40, 0, len(arrays), 0, addresses.ctypes.data]

  call = words(168, 0, api.ctypes.data, 0, 3, *list_of(arguments), *list_of(results), *[0] * 6)
  answer = _handlers[target].ctypes(call.ctypes.data)
  while _threads:
    _threads.pop().join()
  return answer == 0


class Guarded:
  """Takes the place of the primitive by which kernels are called."""

  def __init__(self):
    self.calls = 0

  def bind(self, *arguments, formulation, target, outputs, in_place):
    expected = formulation(*arguments)
    for at_end in (True, False):
      copies = [guarded(x, at_end) for x in arguments]
      inputs = [array for array, _ in copies]
      if in_place:
        results = inputs[: len(outputs)]
      else:
        copies += [guarded(np.full(x.shape, 77, x.dtype), at_end) for x in outputs]
        results = [array for array, _ in copies[len(inputs) :]]
      assert invoke(target, inputs, results), target
      for actual, right in zip(results, expected, strict=True):
        actual, right = (np.asarray(x).astype(np.float32) for x in (actual, right))
        tolerance = 0.01 if results[0].dtype == jnp.bfloat16 else 2e-4
        np.testing.assert_allclose(actual, right, rtol=tolerance, atol=1e-4)
      for _, address in copies:
        release(address)
      self.calls += 1
    assert not _regions, "a kernel did not free its memory"
    return expected


def install():
  """Kernels that are built from now on are called by `Guarded`."""
  for name, function in (("malloc", malloc), ("calloc", calloc), ("free", free)):
    llvmlite.binding.add_symbol(name, function)

  def registered(name, module):
    _handlers[name] = module.handler
    return name

  build._registered = registered
  build.is_interface_known = lambda: True
  cpu_kernels._kernel_p = Guarded()
  return cpu_kernels._kernel_p


# --- cases ----------------------------------------------------------------------------------------


def step(optimizer, size, dim, rng, dtype=np.float32, is_random=False):
  """An update."""
  value = lambda *shape: jnp.asarray(rng.uniform(0.1, 1, shape), jnp.float32)
  arrays = {"parameters": value(size, dim).astype(dtype)}
  for name, slot in optimizer.slots(dim).items():
    shape = (size,) if slot.per_row else (size, dim)
    arrays[name] = (value(*shape) * 2).astype(slot.dtype)
  parts = []
  for bags, length, has_gains in (
    (20, 5, True),
    (7, 1, False),
    (3000 if size > 1000 else 9, 2, True),
  ):
    ids = rng.integers(-1, size + 1, (bags, length)).astype(np.int32)
    ids.flat[-1], ids.flat[0] = 2**31 - 1, size - 1  # the last row, next to the guard
    gains = value(bags, length) if has_gains else None
    parts.append(GradRows(value(bags, dim) / 30, jnp.asarray(ids), gains))
  stack = StackSpec(
    "t", ("t",), Layout((size,)), dim, np.dtype(dtype), optimizer, stochastic_rounding=is_random
  )
  scalars = update.StepScalars(jnp.float32(0.1), None, jnp.int32(3) if is_random else None)
  update.step_table(stack, scalars, arrays, parts)


def count_up(g, w, slots, rate):
  """Changes a slot of any dtype."""
  s = slots["s"]
  if s.dtype == bool:
    return w - rate * g, {"s": ~s}
  is_wide = s.dtype in (jnp.int32, jnp.float32)
  new = s + 1 if is_wide else (s.astype(jnp.float32) + 1).astype(s.dtype)
  return w - rate * g, {"s": new}


def slots(rng, guard):
  """Slots of every dtype: the tested ones by a kernel, all others by XLA's operations."""
  for dtype, per_row, size in itertools.product(DTYPES, (True, False), SIZES):
    slot = embed.Slot(0, per_row=per_row, dtype=jnp.dtype(dtype))
    before = guard.calls
    for dim in (1, 5) if size == 7 else (5,):
      step(embed.custom_optimizer(count_up, {"s": slot}), size, dim, rng)
    assert (guard.calls > before) == (dtype in frame.SLOTS), dtype


def optimizers(rng, guard):
  for optimizer, size, dim in itertools.product(
    (embed.sgd(), embed.adagrad(), embed.rowwise_adagrad(), embed.adam(), embed.ftrl(),
     embed.from_optax(optax.adam(0.1))), SIZES, (1, 8, 19),
  ):  # fmt: skip
    before = guard.calls
    step(optimizer, size, dim, rng)
    assert guard.calls > before


def bfloat16(rng, guard):
  for optimizer, size, dim, is_random in itertools.product(
    (embed.sgd(), embed.rowwise_adagrad()), SIZES, (1, 8, 19), (False, True)
  ):
    before = guard.calls
    step(optimizer, size, dim, rng, jnp.bfloat16, is_random)
    assert guard.calls > before


def lookups(rng, guard):
  for dtype, size, dim, count, length in itertools.product(
    frame.TABLES, SIZES, (1, 8, 67), (1, 40, 3000), (1, 3)
  ):
    table = jnp.asarray(rng.normal(size=(size, dim)), dtype)
    ids = rng.integers(-1, size + 1, (count, length)).astype(np.int32)
    ids.flat[0], ids.flat[-1] = 2**31 - 1, size - 1
    value = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    segments = jnp.asarray(np.sort(rng.integers(0, count + 1, ids.size)), jnp.int32)
    flat = jnp.asarray(ids.reshape(-1))
    for bags in (
      *(Bags(jnp.asarray(ids), gains) for gains in (None, value(count, 1), value(count, length))),
      *(Bags(flat, gains, segments, (count,)) for gains in (None, value(ids.size))),
    ):
      cpu_kernels.gather_and_combine(table, bags)
    cpu_kernels.count_beyond(jnp.asarray(ids), size)


def misfits(rng, guard):
  """Arrays that a kernel was not compiled for are an error of the call."""
  step(embed.custom_optimizer(count_up, {"s": embed.Slot(0, True, jnp.int32)}), 7, 5, rng)
  f32, s32 = lambda *shape: np.zeros(shape, np.float32), lambda *shape: np.zeros(shape, np.int32)
  words = np.zeros(0, np.uint32)
  good = [f32(7, 5), s32(7), f32(), words, f32(2, 5), s32(2, 3), f32(2, 3)]
  (target,) = (name for name in _handlers if "row_equation" in name)
  assert invoke(target, good, good[:2])
  for i, bad in (
    (0, s32(7, 5)), (0, np.zeros((7, 5), jnp.bfloat16)), (3, f32(0)),
    (1, np.zeros(7, bool)), (1, s32(6)), (1, f32(7)),
    (2, f32(2)), (4, f32(2, 4)), (4, np.zeros((2, 5), np.float16)), (5, np.zeros((2, 3), np.int64)),
    (5, s32(3, 3)), (6, f32(2, 2)),
  ):  # fmt: skip
    arguments = [*good[:i], bad, *good[i + 1 :]]
    assert not invoke(target, arguments, arguments[:2]), (i, bad.dtype, bad.shape)
  assert not invoke(target, good, [good[0], s32(7)])
  assert not invoke(target, good[:-1], good[:2])


if __name__ == "__main__":
  primitive = install()
  globals()[sys.argv[1]](np.random.default_rng(0), primitive)
  print(primitive.calls)
