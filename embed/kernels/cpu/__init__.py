"""Compiled kernels of the CPU for lookups and updates: the one place that chooses them.

XLA:CPU gathers and scatters rows at a fraction of what memory allows. With the extra `cpu`, a
lookup and an update are calls of compiled Python instead: `bag_sum`, `count_beyond`, `find_rows`
and `row_step`, by way of `frame`, XLA's interface for foreign functions, and of `equations`, which
turns what JAX traces of an optimizer into machine code. The formulations of `lookup`, `update` and
`admission` define the meaning: they are what a kernel is tested against, what other platforms and
exported programs run, and what is differentiated. Neither this file nor anything that it imports at
once needs Numba.

A kernel is taken for float32 and bfloat16 tables on the backend "cpu" if Numba is installed, unless
the environment variable `SPARSE_EMBED_KERNELS` is 0 when a stack's lookup or update is first
traced.
"""

import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embed.config import QuantizationConfig
from embed.engine import backends, jax_internals, lookup
from embed.engine import bags as bags_lib
from embed.engine.bags import Bags
from embed.engine.grads import GradRows
from embed.engine.rows import Lines
from embed.engine.stack import Arrays, StackSpec

SWITCH = "SPARSE_EMBED_KERNELS"
DTYPES = ("float32", "bfloat16")  # of tables
OLDEST_NUMBA = (0, 68)  # as in pyproject.toml

_kernel_p = jax_internals.kernel_primitive("sparse_embed_kernel")


def is_on() -> bool:
  """Whether kernels are taken where there is one."""
  return backends.is_on(SWITCH, default=True) and jax.default_backend() == "cpu" and _is_supported()


@functools.cache
def _is_supported() -> bool:
  """Whether the extra is installed and fits; warns if it is installed and does not."""
  if os.name != "posix" or importlib.util.find_spec("numba") is None:
    return False
  try:
    reason = _misfit()
  except Exception as error:  # of the header, of Numba, or of XLA, which does not take the probe
    reason = f"they do not know JAX {jax.__version__} as it is installed here: {error}"
  if reason is not None:
    warnings.warn(
      f"The CPU kernels are off: {reason}. XLA's own operations run instead. Set {SWITCH}=0 to "
      "silence this.",
      stacklevel=2,
    )
  return reason is None


def _misfit() -> str | None:
  """Why kernels cannot be compiled here, though Numba is installed; raises what goes wrong."""
  import numba

  if tuple(map(int, numba.__version__.split(".")[:2])) < OLDEST_NUMBA:
    return f"Numba {numba.__version__} is too old: pip install -U numba"
  if numba.config.DISABLE_JIT:
    return "NUMBA_DISABLE_JIT is set"
  from embed.kernels.cpu import build

  if not build.is_interface_known():
    return f"they do not know JAX {jax.__version__}'s foreign function interface"
  return None


def _are_sizes(dimensions: Sequence[Any]) -> bool:
  """Whether dimensions are numbers above 0: those of an exported program may be symbols."""
  return all(isinstance(n, int) and n > 0 for n in dimensions)


def _has_sizes(*arrays: jax.Array) -> bool:
  """Whether `_are_sizes` holds for all dimensions of arrays."""
  return all(_are_sizes(x.shape) for x in arrays)


def _result(
  target: str, by_xla: Callable[..., Any], operands: Any, shape: Sequence[int], dtype: Any
) -> jax.Array:
  """The result of a kernel that has one; `by_xla(*operands)`, a list, is what it means."""
  outputs = (jax.ShapeDtypeStruct(shape, dtype),)
  return _kernel_p.bind(
    *operands, formulation=by_xla, target=target, outputs=outputs, in_place=False
  )[0]


# --- lookups --------------------------------------------------------------------------------------


def looks_up(stack: StackSpec) -> bool:
  """Whether a kernel makes all activations that are looked up in a stack on one device.

  Bags of symbolic sizes, as in exported programs, are left out: no update follows them.
  """
  is_plain = not (stack.is_packed or stack.sparse_core)
  return is_plain and _has_bag_sum(stack.dtype, stack.quantization)


def _has_bag_sum(dtype: np.dtype, quantization: QuantizationConfig | None) -> bool:
  """Whether the kernel of lookups takes a table."""
  return is_on() and dtype in DTYPES and quantization is None


def count_beyond(ids: jax.Array, size: int) -> jax.Array:
  """`bags.count_beyond`, by a kernel where there is one."""
  formulation = functools.partial(bags_lib.count_beyond, size=size)
  if not is_on() or ids.dtype != np.int32 or not _has_sizes(ids):
    return formulation(ids)
  from embed.kernels.cpu import build

  by_xla, operands = lambda ids, _: [formulation(ids)], (ids, jnp.int32(size))
  return _result(build.kernel("count_beyond"), by_xla, operands, (), jnp.int32)


def find_rows(
  formulation: Callable[..., jax.Array], ids: jax.Array, buckets: jax.Array, numbers: jax.Array
) -> jax.Array:
  """`admission.find_rows`, the formulation, by a kernel where there is one."""
  if not is_on() or not _has_sizes(ids, buckets):
    return formulation(ids, buckets, numbers)
  from embed.kernels.cpu import build

  by_xla, operands = lambda *operands: [formulation(*operands)], (ids, buckets, numbers)
  return _result(build.kernel("find_rows"), by_xla, operands, ids.shape[:1], jnp.int32)


def gather_and_combine(
  table: jax.Array | Lines,
  bags: Bags,
  quantization: QuantizationConfig | None = None,
  dtype: Any = None,
) -> jax.Array:
  """`lookup.gather_and_combine`, by a kernel where there is one."""
  has_kernel = (
    not isinstance(table, Lines)
    and _has_bag_sum(table.dtype, quantization)
    and bags.ids.dtype == np.int32
    and _has_sizes(table, bags.ids)
    and _are_sizes(bags.batch)
  )
  if not has_kernel:
    return lookup.gather_and_combine(table, bags, quantization, dtype)
  from embed.kernels.cpu import build

  batch, flat = bags.batch, bags.flat()
  gains = jnp.zeros(0) if flat.gains is None else flat.gains
  gains = gains.astype(jnp.float32)

  def by_xla(table, ids, *rest):
    gains = rest[-1] if flat.gains is not None else None
    same = Bags(ids, gains, *((rest[0], (flat_size,)) if bags.is_ragged else ()))
    return [lookup.gather_and_combine(table, same, dtype=jnp.float32)]

  flat_size = int(np.prod(batch))
  segments = (flat.bag_indices(),) if flat.is_ragged else ()
  target = build.kernel("bag_sum", TABLE=repr(str(table.dtype)))
  operands, shape = (table, flat.ids, *segments, gains), (flat_size, table.shape[1])
  act = _result(target, by_xla, operands, shape, jnp.float32)
  return act.reshape(*batch, table.shape[1]).astype(table.dtype if dtype is None else dtype)


# --- updates --------------------------------------------------------------------------------------


def step(
  step_rows: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
  formulation: Callable[..., Arrays],
  arrays: Arrays,
  rate: jax.Array,
  parts: Sequence[GradRows],
  index: jax.Array | None = None,
  rules: jax.Array | None = None,
) -> Arrays:
  """The table and its slots after a step, in their place, by a kernel where there is one.

  Args:
    step_rows: `f(g, w, slots, rate) -> (w, slots)` of one row `[D]`.
    formulation: `f(arrays, rate, parts, index) -> arrays`, what the kernel means.
    arrays: the table `[V, D]` and slots `[V, D]` or `[V]`, by name.
    rate: the learning rate, float32 `[]`.
    parts: the gradients; ids that are no row of the table are skipped.
    index: the step's, int32 `[]`, where rows are rounded at random.
    rules: of that rounding, uint32 `[T, 5]`; None for rounding to the nearest.
  """
  names = ["parameters", *(name for name in arrays if name != "parameters")]
  stored = [arrays[name] for name in names]
  rule_count = 0 if rules is None else rules.shape[0]
  kernel = _row_step(step_rows, names, stored, parts, rule_count)
  if kernel is None:
    return formulation(arrays, rate, parts, index)
  target, numbers = kernel
  words = jnp.asarray(numbers.view(np.uint32))
  if rules is not None:
    assert index is not None
    words = jnp.concatenate([rules.reshape(-1), index.astype(jnp.uint32)[None], words])
  has_gains = [part.gains is not None for part in parts]

  def by_xla(*operands):
    size = len(names)
    of_parts = [operands[i : i + 3] for i in range(size + 2, len(operands), 3)]
    same = [
      GradRows(grads, ids, gains if has else None)
      for (grads, ids, gains), has in zip(of_parts, has_gains, strict=True)
    ]
    step = None if rules is None else operands[size + 1][rules.size].astype(jnp.int32)
    new = formulation(dict(zip(names, operands, strict=False)), operands[size], same, step)
    return [new[name] for name in names]

  flat = []
  for part in parts:
    gains = part.gains
    flat += [part.grads, part.ids, jnp.zeros(0, jnp.float32) if gains is None else gains]
  new = _kernel_p.bind(
    *stored,
    rate,
    words,
    *flat,
    formulation=by_xla,
    target=target,
    outputs=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored),
    in_place=True,
  )
  return dict(zip(names, new, strict=True))


def _row_step(
  step_rows: Callable[..., Any],
  names: Sequence[str],
  stored: Sequence[jax.Array],
  parts: Sequence[GradRows],
  rules: int,
) -> tuple[str, np.ndarray] | None:
  """The name by which XLA finds the kernel of an update, and its equation's numbers, or None."""
  table, *slots = stored
  if not is_on() or table.dtype not in DTYPES or not _has_sizes(table, *(p.ids for p in parts)):
    return None
  if any(p.ids.dtype != np.int32 for p in parts):
    return None
  if any(x.dtype != np.float32 for p in parts for x in (p.grads, p.gains) if x is not None):
    return None
  from embed.kernels.cpu import build, equations

  def step(g, w, slots, rate):
    w, new = step_rows(g, w, dict(zip(names[1:], slots, strict=True)), rate)
    return w, [new[name] for name in names[1:]]

  try:
    program, numbers = equations.program(
      step, table.shape[1], [(x.ndim == 2, x.dtype) for x in slots], str(table.dtype), rules
    )
  except equations.Unsupported:
    return None
  return build.row_step(program), numbers


backends.register("cpu", sys.modules[__name__])
