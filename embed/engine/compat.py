"""Names of JAX that changed between the versions of `pyproject.toml`."""

import functools


@functools.cache
def has_sparse_core_indices() -> bool:
  """Tells whether Pallas has `tpu_sc.Indices`, which SparseCore kernels take; JAX 0.10.2 has."""
  try:
    from jax.experimental.pallas import tpu_sc
  except ImportError:
    return False
  return hasattr(tpu_sc, "Indices")
