"""Names of JAX that changed between the versions of `pyproject.toml`, and what arrays are."""

import functools
from typing import Any

import jax


def is_traced(tree: Any) -> bool:
  """Whether any leaf of a tree has no value yet, inside a transformed or jitted function."""
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


@functools.cache
def has_sparse_core_indices() -> bool:
  """Whether Pallas has `tpu_sc.Indices`, which SparseCore kernels take. Seen in JAX 0.10.2."""
  try:
    from jax.experimental.pallas import tpu_sc
  except ImportError:
    return False
  return hasattr(tpu_sc, "Indices")
