"""Rows by the SparseCores of TPUs: the one place that chooses them.

Rows are read and written, and bags of float32 rows summed, by the kernels of `kernels`, which
`rows` calls; what is computed between a read and a write, as every optimizer's equation, is
XLA's. The formulations of `lookup` and `rows` define the meaning, and run everywhere else.

No TPU has run the kernels: they are compiled for v5p, v6e and TPU7x, and checked on CPU by
emulation. Hence they are off, unless a table's `TablePlan.storage` is "sparse_core". For tests,
`SPARSE_EMBED_SPARSE_CORES=1` in the environment turns them on for all tables that can.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from embed.engine import backends, compat
from embed.engine import stack as stack_lib
from embed.engine.bags import Bags
from embed.engine.stack import StackSpec

SWITCH = "SPARSE_EMBED_SPARSE_CORES"
_VECTOR = 16  # columns that the subcores of TPU7x add at a time
KINDS = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")  # devices that have them


def unsupported_reason(
  kind: str, width: int = 128, dtype: np.dtype | type = np.float32
) -> str | None:
  """Why rows of `width` columns cannot be on the SparseCores of devices of a kind, or None."""
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
  """The kernels, whose import takes parts of JAX that not every version has."""
  from embed.kernels.sparse_core import kernels

  return kernels


# --- per device -----------------------------------------------------------------------------------


def sums_bags(stack: StackSpec, bags: Bags) -> bool:
  """Whether `gather_and_combine` can sum the rows of these bags of a stack on SparseCores."""
  if bags.is_ragged:
    return False
  return bags.ids.shape[-1] > 0 and stack_lib.row_width(stack.dim) >= _VECTOR


def gather_and_combine(table: jax.Array, bags: Bags) -> jax.Array:
  """`lookup.gather_and_combine` of float32 rows, for bags of one length."""
  length, gains = bags.ids.shape[-1], bags.gains
  ids = bags.ids.reshape(-1, length)
  per_id = gains is not None and gains.shape[-1] == length
  each = gains.reshape(-1, length) if gains is not None and per_id else None
  sums = _kernels().bag_sum(table, ids, each).reshape(*bags.batch, table.shape[1])
  return sums if gains is None or per_id else sums * gains


def take(table: jax.Array, ids: jax.Array) -> jax.Array:
  """The rows `[N, width]` of ids; see `kernels.take`."""
  return _kernels().take(table, ids)


def put(tables: Sequence[jax.Array], ids: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
  """Tables with new rows at distinct ids; see `kernels.put`."""
  return _kernels().put(tables, ids, rows)


backends.register("sparse_core", sys.modules[__name__])
