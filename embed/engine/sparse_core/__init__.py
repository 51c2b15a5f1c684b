"""Rows by the SparseCores of TPUs: the one place that chooses them.

Rows are read and written, and bags of float32 rows summed, by the kernels of `kernels`; what is
computed between a read and a write, as every optimizer's equation, is XLA's. The formulations of
`lookup`, `exchange` and `update` define the meaning, and run everywhere else.

No TPU has run the kernels: they are compiled for v5p, v6e and TPU7x, and checked on CPU by
emulation. Hence they are off, unless a table's `TablePlan.sparse_core` is True or the environment
variable `SPARSE_EMBED_SPARSE_CORES` is 1 when a layer is made.
"""

import functools
import os

import jax
import numpy as np

from embed.engine.bags import Bags
from embed.engine.stack import Arrays, StackSpec

SWITCH = "SPARSE_EMBED_SPARSE_CORES"
KINDS = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")  # devices that have them


def is_wanted(setting: bool | None) -> bool:
  """Whether a table should use SparseCores if it can: its own setting, else the environment's."""
  return os.environ.get(SWITCH, "0") == "1" if setting is None else setting


def obstacle_of(kind: str) -> str | None:
  """Why no table can be on the SparseCores of devices of this kind, or None."""
  if kind not in KINDS:
    return f"devices of kind {kind} are not known to have any"
  if not _are_known_to_jax():
    return f"JAX {jax.__version__} lacks parts that the kernels need; 0.10.2 has them"
  return None


def obstacle(stack: StackSpec) -> str | None:
  """Why a stack cannot be on SparseCores, or None."""
  if reason := obstacle_of(stack.placement.device_kind):
    return reason
  from embed.engine.sparse_core import kernels

  if stack.width % kernels.LANES:
    return f"its rows have {stack.width} columns on a device, not a multiple of {kernels.LANES}"
  if stack.width > kernels.WIDEST:
    return f"its rows have {stack.width} columns on a device, more than {kernels.WIDEST}"
  if stack.dtype != np.float32:
    return f"its rows are {stack.dtype.name}, not float32"
  return None


@functools.cache
def _are_known_to_jax() -> bool:
  try:
    from jax.experimental.pallas import tpu_sc
  except ImportError:
    return False
  return hasattr(tpu_sc, "Indices")


def is_on(stack: StackSpec) -> bool:
  """Whether SparseCores read and write the rows of a stack."""
  return stack.sparse_core and obstacle(stack) is None


# --- per device -----------------------------------------------------------------------------------


def take(stack: StackSpec, table: jax.Array, ids: jax.Array) -> jax.Array:
  """The rows `[N, D]` of ids int32 `[N]`; undefined for ids outside the table `[V, D]`."""
  if not is_on(stack):
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
  from embed.engine.sparse_core import kernels

  return kernels.take(table, ids)


def sums_bags(stack: StackSpec, bags: Bags) -> bool:
  """Whether `gather_and_combine` can sum the rows of these bags."""
  is_covered = not bags.is_ragged and bags.ids.shape[-1] > 0 and stack.quantization is None
  return is_covered and is_on(stack)


def gather_and_combine(table: jax.Array, bags: Bags) -> jax.Array:
  """`lookup.gather_and_combine` of float32 rows, for bags of one length."""
  from embed.engine.sparse_core import kernels

  length, gains = bags.ids.shape[-1], bags.gains
  ids = bags.ids.reshape(-1, length)
  per_id = gains is not None and gains.shape[-1] == length
  each = gains.reshape(-1, length) if gains is not None and per_id else None
  sums = kernels.bag_sum(table, ids, each).reshape(*bags.batch, table.shape[1])
  return sums if gains is None or per_id else sums * gains


def read(stack: StackSpec, arrays: Arrays, at: jax.Array) -> Arrays:
  """The rows `at` of a table and its slots, by name; undefined for ids outside the table."""
  wide = _wide(stack, arrays)
  return {
    name: take(stack, x, at) if name in wide else x.at[at].get(mode="clip")
    for name, x in arrays.items()
  }


def write(stack: StackSpec, arrays: Arrays, at: jax.Array, new: Arrays) -> Arrays:
  """A table and its slots with new rows at the distinct ids `at`; those outside are skipped."""
  wide = _wide(stack, arrays)
  written = {
    name: x.at[at].set(new[name].astype(x.dtype), mode="drop", unique_indices=True)
    for name, x in arrays.items()
    if name not in wide
  }
  if wide:
    from embed.engine.sparse_core import kernels

    put = kernels.put([arrays[name] for name in wide], at, [new[name] for name in wide])
    written |= dict(zip(wide, put, strict=True))
  return {name: written[name] for name in arrays}


def _wide(stack: StackSpec, arrays: Arrays) -> list[str]:
  """The arrays that SparseCores read and write: not slots of one value per row."""
  if not is_on(stack):
    return []
  return [name for name, x in arrays.items() if x.ndim == 2 and x.dtype == np.float32]
