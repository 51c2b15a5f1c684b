"""The SparseCores of TPUs as a back end: they read and write rows, and sum bags of float32 rows.

XLA computes everything between a read and a write, such as the optimizer's equation.

The kernels have not run on a TPU: they are compiled for v5p, v6e and TPU7x, and checked on CPU by
emulation. They are therefore off unless a table's `TablePlan.storage` is "sparse_core". For tests,
`SPARSE_EMBED_SPARSE_CORES=1` in the environment turns them on for all tables that they support.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from embed.engine import backends, compat, update
from embed.engine import rows as rows_lib
from embed.engine.bags import Bags, is_row
from embed.engine.grads import GradRows
from embed.engine.rows import Lines
from embed.engine.stack import Arrays, RowStep, StackSpec, row_width
from embed.engine.update import StepScalars

NAME = "sparse_core"
SWITCH = "SPARSE_EMBED_SPARSE_CORES"
_VECTOR = 16  # columns that the subcores of TPU7x add at a time
KINDS = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")  # kinds that have SparseCores


def unsupported_reason(
  kind: str, width: int = 128, dtype: np.dtype | type = np.float32
) -> str | None:
  """The reason that SparseCores of a device kind cannot handle rows of `width` columns, or None."""
  if kind not in KINDS:
    return f"devices of kind {kind} are not known to have any"
  if not compat.has_sparse_core_indices():
    return f"JAX {jax.__version__} lacks parts that the kernels need; 0.10.2 has them"
  if width > _kernels().WIDEST:
    return f"its rows have {width} columns on a device, more than {_kernels().WIDEST}"
  if dtype != np.float32:
    return f"its rows are {np.dtype(dtype).name}, not float32"
  return None


def _kernels() -> Any:
  """Imports the kernels, which need parts of JAX that not every version has."""
  from embed.kernels import sparse_core_pallas

  return sparse_core_pallas


def look_up(stack: StackSpec, table: Any, bags: Bags) -> jax.Array | None:
  """Sums the rows of each bag; None for ragged or weighted bags, or for sums of narrow rows."""
  length, gains = bags.ids.shape[-1], bags.gains
  is_weighted = gains is not None and gains.shape[-1] == length > 1
  if bags.is_ragged or not length or is_weighted:
    return None
  rows, ids = _linear(table), bags.ids.reshape(-1, length)
  if length == 1:
    sums = _kernels().take(rows, ids[:, 0])
    sums = jnp.where(is_row(ids, rows.shape[0]), sums, 0)
  elif row_width(stack.dim) < _VECTOR:
    return None
  else:
    sums = _kernels().bag_sum(rows, ids)
  if gains is not None:
    sums = sums * gains.reshape(-1, 1)
  return sums.reshape(*bags.batch, rows.shape[1])[..., : stack.dim]


def step(
  stack: StackSpec,
  scalars: StepScalars,
  arrays: Arrays,
  parts: Sequence[GradRows],
  is_distinct: bool,
) -> Arrays:
  """Steps the rows that have gradients, which XLA sums."""
  step_part = functools.partial(_step_part, stack)
  return update.step_sorted(stack, scalars, arrays, parts, is_distinct, step_part)


def _step_part(
  stack: StackSpec, row_step: RowStep, arrays: Arrays, at: jax.Array, g: jax.Array
) -> Arrays:
  """Steps the distinct rows `at`; XLA reads and writes arrays that are not float32 rows."""
  own = [name for name, x in arrays.items() if x.ndim == 2 and x.dtype == np.float32]
  others = {name: x for name, x in arrays.items() if name not in own}
  linear = {name: _linear(arrays[name]) for name in own}
  taken = {name: _kernels().take(x, at)[:, : stack.dim] for name, x in linear.items()}
  new = row_step(at, g, jax.lax.optimization_barrier(taken | rows_lib.read(others, at)))
  new = jax.lax.optimization_barrier(new)
  pad = lambda rows, x: jnp.pad(rows, ((0, 0), (0, x.shape[1] - stack.dim)))
  put = _kernels().put(list(linear.values()), at, [pad(new[name], x) for name, x in linear.items()])
  written = rows_lib.write(others, at, new)
  for name, rows in zip(own, put, strict=True):
    x = arrays[name]
    written[name] = Lines(rows.reshape(x.array.shape), x.width) if isinstance(x, Lines) else rows
  return {name: written[name] for name in arrays}


def _linear(table: Any) -> jax.Array:
  """Rows as the kernels read them, padded to whole vectors; lines are not copied."""
  if isinstance(table, Lines):
    return table.linear()
  filling = row_width(table.shape[1]) - table.shape[1]  # of rows received
  return jnp.pad(table, ((0, 0), (0, filling))) if filling else table


backends.BACK_ENDS[NAME] = cast(backends.BackEnd, sys.modules[__name__])
