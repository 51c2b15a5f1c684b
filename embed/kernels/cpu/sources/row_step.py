"""The kernel of an update: sums the gradients of each row and steps it. `build` compiles this file.

It is the same for all optimizers, and calls the `row_equation` of one.

Arguments: a table `[V, D]` and its slots, which the results take the place of; the learning rate
float32 `[]`; what else the equation reads, uint32 `[K]`; and of each part of the gradients
float32 `[B, D]`, ids int32 `[B, L]` and gains float32 `[B, L]`, or `[0]` for 1. Ids that are no
row of the table are skipped.

Ids are spread over partitions by a hash of the row, each of which fits a core's caches and is a
thread's own: no two threads ever step one row. Within a row, gradients are added in the order of
the batch, whatever the number of threads.
"""

import llvmlite.binding
import numba
import numpy as np
from numba import types

from embed.kernels.cpu import cache
from embed.kernels.cpu import frame as ffi
from embed.kernels.cpu import memory as mem

TASK = "sparse_embed_task"
UPDATE = "sparse_embed_update"

_STATE, _SIZE, _DIM, _RATE, _WORDS, _INPUTS, _INPUT_COUNT, _COUNT = range(8)
_BLOCKS, _BITS, _ENTRIES, _ENDS, _EQUATION, _SLOTS, _ZEROS, _WORK_SIZE = range(8, 16)
# Of each part of the gradients.
_GRADS, _IDS, _GAINS, _LENGTH, _FIRST, _LAST, _INPUT_SIZE = range(7)
_SPREAD_COUNT, _SPREAD, _STEP = range(3)  # phases
ALONE = 1 << 12  # ids that a thread handles faster than another one wakes up
PARTITION = 512  # ids in a partition, about
ROWS_AHEAD = 8  # rows to step that are asked for ahead of time
ENTRY = 16  # bytes: row int32, gain float32, address of a gradient
ONE = np.float32(1)


@numba.njit(**mem.OPTIONS)
def scrambled(row):
  """32 bits of which the upper ones depend on all of a row's."""
  return (row * 0x9E3779B1) & 0xFFFFFFFF


@numba.njit(**mem.OPTIONS)
def spread(work, phase, block):
  """Counts a block's ids in each partition, or puts them there."""
  count, blocks = mem.read_word(work, _COUNT), mem.read_word(work, _BLOCKS)
  size, dim, bits = (
    mem.read_word(work, _SIZE),
    mem.read_word(work, _DIM),
    mem.read_word(work, _BITS),
  )
  entries, ends = (
    mem.read_word(work, _ENTRIES),
    mem.read_word(work, _ENDS) + 8 * (block << bits),
  )
  begin, end = count * block // blocks, count * (block + 1) // blocks
  for k in range(mem.read_word(work, _INPUT_COUNT)):
    part = mem.read_word(work, _INPUTS) + 8 * _INPUT_SIZE * k
    first, length = mem.read_word(part, _FIRST), mem.read_word(part, _LENGTH)
    ids, gains = mem.read_word(part, _IDS), mem.read_word(part, _GAINS)
    start = max(begin, first) - first
    stop = min(end, mem.read_word(part, _LAST)) - first
    bag = start // length
    grad, left = mem.read_word(part, _GRADS) + 4 * dim * bag, (bag + 1) * length - start
    for i in range(start, stop):
      row = np.int64(mem.read_int(ids, i))
      if 0 <= row < size:
        partition = scrambled(row) >> (32 - bits)
        position = mem.read_word(ends, partition)
        mem.write_word(ends, partition, position + 1)
        if phase == _SPREAD:
          entry = entries + ENTRY * position
          mem.write_int(entry, 0, np.int32(row))
          mem.write_float(entry, 1, mem.read_float(gains, i) if gains else ONE)
          mem.write_word(entry, 1, grad)
      left -= 1
      if left == 0:
        grad, left = grad + 4 * dim, length


@numba.njit(**mem.OPTIONS)
def find_distinct(entries, n, bits, memory):
  """Puts a partition's entries in the order of their rows; returns how many distinct rows it has.

  Memory holds, for n entries: the addresses of the gradients, row by row, int64 `[n + mem.AHEAD]`,
  the last `mem.AHEAD` of them left to the caller; their gains, float32 `[n]`; the distinct rows,
  int32 `[n]`; where the entries of each end, int32 `[n + 1]`; the number of each entry's row, int32
  `[n]`; and the cells of a hash table, int32 `[2 ** bits]`.
  """
  gains = memory + 8 * (n + mem.AHEAD)
  rows, ends, numbers, cells = gains + 4 * n, gains + 8 * n, gains + 12 * n + 4, gains + 16 * n + 4
  mem.memset(cells, 255, 4 << bits)
  mem.memset(ends, 0, 4 * n + 4)
  mask, shift, count = (1 << bits) - 1, 32 - bits, 0
  for i in range(n):
    row = mem.read_int(entries + ENTRY * i, 0)
    cell = (scrambled(np.int64(row)) * 0x85EBCA6B >> shift) & mask
    number = np.int64(mem.read_int(cells, cell))
    while number >= 0 and mem.read_int(rows, number) != row:
      cell = (cell + 1) & mask
      number = np.int64(mem.read_int(cells, cell))
    if number < 0:
      number = np.int64(count)
      mem.write_int(cells, cell, np.int32(number))
      mem.write_int(rows, number, row)
      count += 1
    mem.write_int(numbers, i, np.int32(number))
    mem.write_int(ends, number + 1, np.int32(mem.read_int(ends, number + 1) + 1))
  for j in range(count):
    mem.write_int(ends, j + 1, np.int32(mem.read_int(ends, j) + mem.read_int(ends, j + 1)))
  for i in range(n):  # `ends` of the row before moves from its first entry to behind its last
    number = np.int64(mem.read_int(numbers, i))
    position = np.int64(mem.read_int(ends, number))
    mem.write_word(memory, position, mem.read_word(entries + ENTRY * i, 1))
    mem.write_float(gains, position, mem.read_float(entries + ENTRY * i, 1))
    mem.write_int(ends, number, np.int32(position + 1))
  return count


@numba.njit(**mem.OPTIONS)
def sum_of(work, grads, gains, count, total):
  """The address of the sum of gain * gradient of a row's entries, one after another."""
  dim = mem.read_word(work, _DIM)
  if count == 1 and mem.read_float(gains, 0) == ONE:
    mem.prefetch(mem.read_word(grads, mem.AHEAD), 4 * dim)
    return mem.read_word(grads, 0)
  mem.weighted_sum(total, mem.read_word(work, _ZEROS), dim, grads, gains, 1, count, ONE)
  return total


@numba.njit(**mem.OPTIONS)
def prefetch_row(work, row):
  """Asks for a row and its slots."""
  state, slots = mem.read_word(work, _STATE), mem.read_word(work, _SLOTS)
  for k in range(slots + 1):
    width = mem.read_word(state, slots + 1 + k)
    mem.prefetch(mem.read_word(state, k) + width * row, width)


@numba.njit(**mem.OPTIONS)
def step_partition(work, partition):
  """Sums the gradients of each row of a partition, and steps it."""
  bits, dim = mem.read_word(work, _BITS), mem.read_word(work, _DIM)
  ends = mem.read_word(work, _ENDS) + 8 * ((mem.read_word(work, _BLOCKS) - 1) << bits)
  start = mem.read_word(ends, partition - 1) if partition else 0
  n = mem.read_word(ends, partition) - start
  if n == 0:
    return
  entries = mem.read_word(work, _ENTRIES) + ENTRY * start
  table_bits = 4
  while (1 << table_bits) < 2 * n:
    table_bits += 1
  size = 8 * mem.AHEAD + 24 * n + 4 + (4 << table_bits)
  grads = mem.malloc(size + 4 * dim)
  gains, total = grads + 8 * (n + mem.AHEAD), grads + size
  rows, ends = gains + 4 * n, gains + 8 * n
  count = find_distinct(entries, n, table_bits, grads)
  for i in range(n, n + mem.AHEAD):
    mem.write_word(grads, i, mem.read_word(work, _ZEROS))
  equation, state = mem.read_word(work, _EQUATION), mem.read_word(work, _STATE)
  rate, words = mem.read_word(work, _RATE), mem.read_word(work, _WORDS)
  for i in range(min(mem.AHEAD, n)):
    mem.prefetch(mem.read_word(grads, i), 4 * dim)
  for j in range(min(ROWS_AHEAD, count)):
    prefetch_row(work, np.int64(mem.read_int(rows, j)))
  first = np.int64(0)
  for j in range(count):
    if j + ROWS_AHEAD < count:
      prefetch_row(work, np.int64(mem.read_int(rows, j + ROWS_AHEAD)))
    last = np.int64(mem.read_int(ends, j))
    grad = sum_of(work, grads + 8 * first, gains + 4 * first, last - first, total)
    row = np.int64(mem.read_int(rows, j))
    mem.call(equation, (grad, state, row, dim, rate, words))
    first = last
  mem.free(grads)


@numba.njit(**mem.OPTIONS)
def read_inputs(frame, inputs, first, count):
  """Describes the parts of the gradients; returns the number of ids."""
  total = 0
  for k in range(count):
    at, part = first + 3 * k, inputs + 8 * _INPUT_SIZE * k
    ids, gains = ffi.argument(frame, at + 1), ffi.argument(frame, at + 2)
    has_gains = ffi.dimension(gains, ffi.rank(gains) - 1) > 0
    mem.write_word(part, _GRADS, ffi.data(ffi.argument(frame, at)))
    mem.write_word(part, _IDS, ffi.data(ids))
    mem.write_word(part, _GAINS, ffi.data(gains) if has_gains else 0)
    mem.write_word(part, _LENGTH, ffi.dimension(ids, 1))
    mem.write_word(part, _FIRST, total)
    total += ffi.dimension(ids, 0) * ffi.dimension(ids, 1)
    mem.write_word(part, _LAST, total)
  return total


@numba.njit(**mem.OPTIONS)
def put_in_order(ends, blocks, partitions):
  """Turns counts into where each block's entries of each partition begin."""
  position = 0
  for partition in range(partitions):
    for block in range(blocks):
      count = mem.read_word(ends, block * partitions + partition)
      mem.write_word(ends, block * partitions + partition, position)
      position += count


@numba.njit(**mem.OPTIONS)
def read_state(frame, slots):
  """The addresses of the table and its slots, and then the bytes that each has for a row."""
  state = mem.malloc(16 * (slots + 1))
  for k in range(slots + 1):
    array = ffi.result(frame, k)
    mem.write_word(state, k, ffi.data(array))
    width = ffi.dimension(array, 1) if ffi.rank(array) == 2 else 1
    mem.write_word(state, slots + 1 + k, width * ffi.width(array))
  return state


@numba.njit(**mem.OPTIONS)
def step_rows(frame, equation):
  """Reads the arguments and shares the work."""
  work, slots = mem.malloc(8 * _WORK_SIZE), ffi.results(frame) - 1
  state = read_state(frame, slots)
  input_count = (ffi.arguments(frame) - slots - 3) // 3
  inputs = mem.malloc(8 * _INPUT_SIZE * input_count)
  count = read_inputs(frame, inputs, slots + 3, input_count)
  helpers = 0 if count < ALONE else ffi.threads(frame) - 1
  blocks, bits = 2 * helpers + 1, 0
  while (PARTITION << bits) < count and bits < 12:
    bits += 1
  entries, ends = mem.malloc(ENTRY * count), mem.calloc(blocks << bits, 8)
  mem.write_word(work, _EQUATION, equation)
  mem.write_word(work, _SLOTS, slots)
  mem.write_word(work, _ZEROS, mem.calloc(ffi.dimension(ffi.argument(frame, 0), 1), 4))
  mem.write_word(work, _STATE, state)
  mem.write_word(work, _SIZE, ffi.dimension(ffi.argument(frame, 0), 0))
  mem.write_word(work, _DIM, ffi.dimension(ffi.argument(frame, 0), 1))
  mem.write_word(work, _RATE, ffi.data(ffi.argument(frame, slots + 1)))
  mem.write_word(work, _WORDS, ffi.data(ffi.argument(frame, slots + 2)))
  mem.write_word(work, _INPUTS, inputs)
  mem.write_word(work, _INPUT_COUNT, input_count)
  mem.write_word(work, _COUNT, count)
  mem.write_word(work, _BLOCKS, blocks)
  mem.write_word(work, _BITS, bits)
  mem.write_word(work, _ENTRIES, entries)
  mem.write_word(work, _ENDS, ends)
  task = mem.address_of(TASK)
  ffi.share(task, frame, helpers, _SPREAD_COUNT, blocks, work)
  put_in_order(ends, blocks, 1 << bits)
  ffi.share(task, frame, helpers, _SPREAD, blocks, work)
  ffi.share(task, frame, helpers, _STEP, 1 << bits, work)
  mem.free(mem.read_word(work, _ZEROS))
  mem.free(ends)
  mem.free(entries)
  mem.free(inputs)
  mem.free(state)
  mem.free(work)


@cache.compiled(types.void(types.int64))
def do_parts(job):
  """What all threads run."""
  work, phase = ffi.work(job), ffi.phase(job)
  part = ffi.next_part(job)
  while part >= 0:
    if phase == _STEP:
      step_partition(work, part)
    else:
      spread(work, phase, part)
    ffi.part_done(job)
    part = ffi.next_part(job)
  ffi.let_go(job)


llvmlite.binding.add_symbol(TASK, do_parts.address)


@cache.compiled(types.void(types.int64, types.int64))
def update(frame, equation):
  """What the handler of an equation calls."""
  step_rows(frame, equation)


llvmlite.binding.add_symbol(UPDATE, update.address)
