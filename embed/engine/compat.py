"""Names that changed between the versions of JAX in `pyproject.toml`, each with the version."""

import functools
from collections.abc import Mapping
from typing import Any


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
  """The numbers of constants and of carries among the inputs of a `scan` equation.

  JAX 0.11.0 replaced `num_consts` and `num_carry` by the tree of all inputs, `ft_in`.
  """
  if "ft_in" not in params:
    return params["num_consts"], params["num_carry"]
  consts, carry, _ = params["ft_in"].unpack()
  return len(consts), len(carry)


@functools.cache
def has_sparse_core_indices() -> bool:
  """Whether Pallas has `tpu_sc.Indices`, which SparseCore kernels take. Seen in JAX 0.10.2."""
  try:
    from jax.experimental.pallas import tpu_sc
  except ImportError:
    return False
  return hasattr(tpu_sc, "Indices")
