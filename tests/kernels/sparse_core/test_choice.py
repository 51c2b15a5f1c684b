"""Which tables SparseCores read and write."""

import jax.numpy as jnp
import numpy as np
import pytest
from stored_tables import TwoTables

import embed
from embed.engine import compat
from embed.engine import mesh as mesh_lib
from embed.kernels import sparse_core

SETUP = TwoTables(61)
CHIP = "TPU v5"
knows_indices = pytest.mark.skipif(
  not compat.has_sparse_core_indices(), reason="this JAX has no kernels for SparseCores"
)


def planned(storage="auto", dim=128, **settings):
  plan = embed.plan(SETUP.features(embed.adagrad(0.5), dim, **settings), None, SETUP.batch(0))
  plan["a"].storage = plan["b"].storage = storage
  return plan


@pytest.mark.parametrize(
  ("kind", "width", "dtype", "reason"),
  [
    ("cpu", 128, np.float32, "devices of kind cpu"),
    pytest.param(CHIP, 2176, np.float32, "2176 columns", marks=knows_indices),
    pytest.param(CHIP, 128, jnp.bfloat16, "bfloat16", marks=knows_indices),
    pytest.param(CHIP, 128, np.float32, None, marks=knows_indices),
  ],
)
def test_which_rows_can_be_on_sparse_cores(kind, width, dtype, reason, monkeypatch):
  found = sparse_core.unsupported_reason(kind, width, dtype)
  assert found is None if reason is None else reason in found
  monkeypatch.setattr(mesh_lib.Placement, "device_kind", kind)
  plan = planned("sparse_core", width, dtype=dtype)
  assert ("a, b: not on SparseCores" in repr(plan)) == (reason is not None)
  (stack,) = plan.stacks().values()
  assert (stack.back_end is not None) == (reason is None)


@knows_indices
def test_the_environment_decides_where_a_plan_does_not(monkeypatch):
  monkeypatch.setattr(mesh_lib.Placement, "device_kind", CHIP)
  plan = planned()
  plan["b"].storage = "rows"
  assert "SparseCores" not in repr(plan)
  monkeypatch.setenv(sparse_core.SWITCH, "1")
  assert "a: on SparseCores" in repr(plan)
  assert "b: " not in repr(plan).partition("received")[2]
