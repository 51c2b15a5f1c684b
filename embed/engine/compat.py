"""JAX names that differ between the versions that `pyproject.toml` allows."""

import functools
from typing import Any


@functools.cache
def has_sparse_core_indices() -> bool:
  """Returns True if Pallas has `tpu_sc.Indices`, which the kernels need; JAX 0.10.2 has it."""
  try:
    from jax.experimental.pallas import tpu_sc
  except ImportError:
    return False
  return hasattr(tpu_sc, "Indices")


def pallas_triton() -> Any:
  """Pallas' Triton backend, or None; JAX 0.10 to 0.12 have it."""
  try:
    from jax.experimental.pallas import triton
  except ImportError:
    return None
  return triton
