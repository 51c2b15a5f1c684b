"""NVIDIA GPUs as a back end: a lookup in one kernel, and an update over the runs of equal ids.

XLA's formulation of an update sums all occurrences of an id into an array `[N, D]`, by atomic
additions, and then reads, steps and writes rows. Here ids are sorted with their positions, so that
equal ids are a **run**. A program of the kernel takes a **block** of sorted ids: it sums the runs
that begin among them, steps their rows by the optimizer's own equation, and writes them in place.
There is no array of N rows, and the work does not depend on how often an id repeats.

A run may go on in later blocks. The part of it that lies in a later block is the **head** of that
block. The heads are again gradients of rows, at most one for each block, with equal rows side by
side, so their runs are summed in the same way. Every sum has one order: the same inputs give the
same bits.

Pallas' Triton backend compiles the kernels: no other compiler traces an equation in JAX and reads
rows at any address. JAX 0.10 to 0.12 have it; since 0.11, JAX announces its removal. Where it is
missing or cannot compile an equation, XLA's formulation steps the rows. That also defines what the
kernels compute.
"""

import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from embed.engine import backends, compat, update
from embed.engine.bags import Bags
from embed.engine.grads import GradRows, flat_ids
from embed.engine.mesh import LOCAL
from embed.engine.stack import Arrays, StackSpec
from embed.engine.update import StepScalars

NAME = "gpu"
triton: Any = compat.pallas_triton()

_BLOCK = 8  # ids of a program: their rows and slots fit in its registers
_COLUMNS_PER_WARP = 128  # 16 bytes of float32 for each thread
_WIDEST = 4096  # columns: 32 warps, the most that a program may have


def look_up(stack: StackSpec, table: jax.Array, bags: Bags) -> jax.Array | None:
  """Sums the rows of each bag, in an expression that XLA:GPU makes one kernel of.

  None for ragged bags. Other compilers would store all rows, `[N, D]`.
  """
  if bags.is_ragged:
    return None
  rows = table.at[bags.ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
  rows, gains = rows.astype(jnp.float32), bags.gains
  if gains is not None and gains.shape == bags.ids.shape:
    rows, gains = rows * gains[..., None], None
  act = jnp.sum(rows, axis=-2)
  return act if gains is None else act * gains


def step(
  stack: StackSpec,
  scalars: StepScalars,
  arrays: Arrays,
  parts: Sequence[GradRows],
  is_distinct: bool,
) -> Arrays:
  """Steps the rows that have gradients, in place."""
  by_xla = functools.partial(update.step_sorted, stack, is_distinct=is_distinct, chunk=sys.maxsize)
  if not is_supported(stack):
    return by_xla(scalars, arrays, parts)
  by_runs = functools.partial(step_runs, stack, is_distinct=is_distinct)
  # A layer that was made for a GPU may be lowered for another device.
  return lax.platform_dependent(scalars, arrays, parts, cuda=by_runs, default=by_xla)


def step_runs(
  stack: StackSpec,
  scalars: StepScalars,
  arrays: Arrays,
  parts: Sequence[GradRows],
  is_distinct: bool = False,
  interpret: bool = False,
) -> Arrays:
  """Implements `step` by kernels; `interpret` runs them as JAX operations, on any device."""
  size = arrays["parameters"].shape[0]
  entries = _sort(parts, size, is_distinct)
  keys = update.rounding_keys(stack, scalars.step, entries.rows)
  inputs = entries, _tails(entries, size, interpret), scalars.rate.reshape(1), keys
  first = len(jax.tree.leaves(inputs))
  kernel = functools.partial(_step_kernel, stack=stack, size=size)
  aliases = {first + i: i for i in range(len(arrays))}
  return _call(kernel, arrays, (*inputs, arrays), interpret, input_output_aliases=aliases)


@functools.cache
def is_supported(stack: StackSpec) -> bool:
  """Returns True if Pallas can lower the step of a stack's rows for Triton."""
  if triton is None or stack.dim > _WIDEST or not _allows_padding(stack):
    return False
  array = lambda *shape, dtype=np.float32: cast(Any, jax.ShapeDtypeStruct(shape, dtype))
  shape = lambda slot: (1,) if slot.per_row else (1, stack.dim)
  arrays = {name: array(*shape(slot), dtype=slot.dtype) for name, slot in stack.slots.items()}
  arrays["parameters"] = array(1, stack.dim, dtype=stack.dtype)
  part = GradRows(array(1, stack.dim), array(1, 2 * _BLOCK, dtype=np.int32), array(1, 2 * _BLOCK))
  scalars = StepScalars(array(), array(dtype=np.int32))
  on_one = functools.partial(step_runs, dataclasses.replace(stack, placement=LOCAL))
  try:
    with warnings.catch_warnings(action="ignore"):  # the program itself still warns of the removal
      jax.jit(on_one).trace(scalars, arrays, [part]).lower(lowering_platforms=("cuda",))
  except Exception:  # an operation that Triton lacks; XLA reports what else is wrong
    return False
  return True


def _allows_padding(stack: StackSpec) -> bool:
  """Returns True if the step of a row stays the same with zeros behind its columns.

  A user's equation may reduce over the row in any way: its rows must not need padding.
  """
  optimizer = stack.optimizer
  assert optimizer is not None
  reduces = optimizer.name == "custom_optimizer" or optimizer.arguments.get("per_row", False)
  return not reduces or stack.dim == _width(stack.dim)


# --- entries --------------------------------------------------------------------------------------


class Entries(NamedTuple):
  """Gradients by row: entry i adds `gains[i] * grads[sources[i]]` to row `rows[i]`.

  Attributes:
    rows: int32 `[N]`, with equal rows side by side; N is a multiple of the block.
    sources: int32 `[N]`, indices of `grads`; None for i itself.
    gains: float32 `[N]`, or None for 1.
    grads: float32 `[M, D]`.
  """

  rows: Any
  sources: Any
  gains: Any
  grads: Any


def _sort(parts: Sequence[GradRows], size: int, is_distinct: bool) -> Entries:
  """Sorts gradients by row; ids that are no rows become `size`, the last one."""
  ids = flat_ids(parts, size)
  positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
  if not is_distinct:
    ids, positions = lax.sort((ids, positions), num_keys=1, is_stable=False)
  flat = lambda arrays: jnp.concatenate([x.reshape(-1) for x in arrays])
  sort = lambda arrays: _filled(flat(arrays).at[positions].get(mode="promise_in_bounds"), 0)
  gains, sources, first = None, list[jax.Array](), 0
  for part in parts:
    sources.append(first + lax.broadcasted_iota(jnp.int32, part.ids.shape, 0))
    first += part.grads.shape[0]
  if any(part.gains is not None for part in parts):
    gains = sort(jnp.ones(x.ids.shape) if x.gains is None else x.gains for x in parts)
  grads = jnp.concatenate([part.grads for part in parts])
  return Entries(_filled(ids, size), sort(sources), gains, grads)


def _filled(x: jax.Array, value: int) -> jax.Array:
  """Fills the last block of `[N]`."""
  return jnp.pad(x, (0, -x.shape[0] % _BLOCK), constant_values=value)


def _tails(entries: Entries, size: int, interpret: bool) -> jax.Array:
  """Sums the part of each run that lies in later blocks, float32 `[N / _BLOCK, D]`.

  The sum is stored at the first of these blocks; other entries are undefined.
  """
  blocks = entries.rows.shape[0] // _BLOCK
  sums = jax.ShapeDtypeStruct((blocks, entries.grads.shape[1]), jnp.float32)
  if blocks == 1:
    return jnp.zeros(sums.shape, sums.dtype)  # there are no later ones
  heads = _call(functools.partial(_head_kernel, size=size), sums, (entries,), interpret)
  first, last = entries.rows[::_BLOCK], entries.rows[_BLOCK - 1 :: _BLOCK]
  rows = jnp.where(jnp.pad(first[1:] == last[:-1], (1, 0)), first, size)  # `size` without a head
  of_heads = Entries(_filled(rows, size), None, None, heads)
  inputs = of_heads, _tails(of_heads, size, interpret)
  return _call(functools.partial(_sum_kernel, size=size), sums, inputs, interpret)


def _call(kernel: Any, like: Any, inputs: Any, interpret: bool, **options: Any) -> Any:
  """Runs a kernel with a program for each block of entries; returns new arrays `like` these."""
  entries = inputs[0]
  out = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
  if not interpret:
    warps = max(1, _width(entries.grads.shape[1]) // _COLUMNS_PER_WARP)
    options["compiler_params"] = triton.CompilerParams(num_warps=warps, num_stages=1)
  grid = (entries.rows.shape[0] // _BLOCK,)
  return pl.pallas_call(kernel, out, grid=grid, interpret=interpret, **options)(*inputs)


# --- kernels --------------------------------------------------------------------------------------

# Arrays of Triton have a power of two elements, so a row is `[1, width]`, with zeros behind its
# columns. Loops over the entries of a block are unrolled, and read all rows before they write any:
# the compiler then has many reads under way at once.


def _width(dim: int) -> int:
  return 1 << (dim - 1).bit_length()


def _load(ref: Any, row: Any, mask: Any) -> Any:
  """The row `[1, width]` of a table, or `[1]` of a slot with one value for each row; or zeros."""
  part, mask = _at(ref, row, mask)
  return triton.load(part, mask=mask, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, row: Any, mask: Any, value: Any) -> None:
  part, mask = _at(ref, row, mask)
  triton.store(part, value.astype(ref.dtype), mask=mask)


def _at(ref: Any, row: Any, mask: Any) -> tuple[Any, Any]:
  if len(ref.shape) == 1:
    return ref.at[row], mask
  columns = jnp.arange(_width(ref.shape[1]), dtype=jnp.int32)[None]
  return ref.at[row[:, None], columns], mask[:, None] & (columns < ref.shape[1])


def _entry(array: Any, i: Any) -> Any:
  return array[pl.ds(i, 1)]


def _gradient(entries: Entries, i: Any, mask: Any) -> Any:
  """Gain * gradient of an entry, `[1, width]`; zeros where the mask is False."""
  source = jnp.full(1, i) if entries.sources is None else _entry(entries.sources, i)
  g = _load(entries.grads, source, mask)
  if entries.gains is None:
    return g
  return jnp.where(mask[:, None], g * _entry(entries.gains, i)[:, None], 0)


def _block(entries: Entries, size: int) -> tuple[Any, Any, Any, Any]:
  """The number of a program's block, its first entry, its rows, and whether it has a head."""
  block = pl.program_id(0)
  start = block * _BLOCK
  rows = [_entry(entries.rows, start + k) for k in range(_BLOCK)]
  before = _entry(entries.rows, jnp.maximum(start - 1, 0))
  return block, start, rows, (block > 0) & (before == rows[0]) & (before < size)


def _head_kernel(entries: Entries, heads: Any, *, size: int) -> None:
  """Writes the head of a block that has one."""
  block, start, rows, has_head = _block(entries, size)
  masks = [has_head & (row == rows[0]) for row in rows]
  parts = [_gradient(entries, start + k, mask) for k, mask in enumerate(masks)]
  _store(heads, jnp.full(1, block), has_head, functools.reduce(jnp.add, parts))


def _runs(entries: Entries, tails: Any, size: int) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
  """For each entry of a block: its number, its row, the first entry of its run, a mask, a sum.

  The mask is True at the last entry here of each run that begins here; the sum is that of the run.
  """
  block, start, rows, has_head = _block(entries, size)
  after = jnp.minimum(start + _BLOCK, entries.rows.shape[0] - 1)
  first: Any = start
  total: Any = 0
  for k, row in enumerate(rows):
    g = _gradient(entries, start + k, row < size)
    begins = row != rows[k - 1] if k else jnp.full(1, True)
    first = jnp.where(begins, start + k, first)
    total = jnp.where(begins[:, None], g, total + g)
    mask = (row < size) & ~(has_head & (row == rows[0]))
    if k + 1 < _BLOCK:
      yield start + k, row, first, mask & (row != rows[k + 1]), total
    else:
      goes_on = (after == start + _BLOCK) & (_entry(entries.rows, after) == row) & mask
      yield start + k, row, first, mask, total + _load(tails, jnp.full(1, block + 1), goes_on)


def _sum_kernel(entries: Entries, tails: Any, sums: Any, *, size: int) -> None:
  """Writes the sum of each run in the place of its first entry."""
  for _, _, first, mask, total in _runs(entries, tails, size):
    _store(sums, first, mask, total)


def _step_kernel(
  entries: Entries, tails: Any, rate: Any, keys: Any, old: Any, new: Any, *, stack: Any, size: int
) -> None:
  """Steps the rows of a block's runs; the arrays `new` are in the memory of `old`."""
  runs = list(_runs(entries, tails, size))
  read = lambda row, mask: {name: _load(ref, row, mask) for name, ref in new.items()}
  arrays = [read(row, mask) for _, row, _, mask, _ in runs]
  for (i, row, _, mask, total), of_row in zip(runs, arrays, strict=True):
    key = None if keys is None else _entry(keys, i)
    stepped = update.step_in_dtype(stack, rate[0], key, total, of_row)
    for name, value in stepped.items():
      _store(new[name], row, mask, value)


backends.BACK_ENDS[NAME] = cast(backends.BackEnd, sys.modules[__name__])
