"""Steps on SparseCores against XLA's; emulated on CPU."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_cases import STEPS
from sparse_cores import emulated
from stored_tables import TwoTables, fetched, wave

import embed
from embed import check
from embed.engine import stack as stack_lib
from embed.kernels import sparse_core
from embed.kernels import sparse_core_pallas as kernels

SETUP = TwoTables(61)


@pytest.fixture
def used(monkeypatch):
  """The CPU as a chip with SparseCores; the names of the kernels that were traced."""
  names = set()
  monkeypatch.setenv(stack_lib.PACKING_SWITCH, "0")

  def noted(name):
    kernel = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *args: names.add(name) or kernel(*args))

  for name in ("take", "put", "bag_sum"):
    noted(name)
  monkeypatch.setattr(sparse_core, "KINDS", (*sparse_core.KINDS, "cpu"))
  with emulated():
    yield names


def weights(step):
  draw = np.random.default_rng(step)
  return {"x": None, "y": embed.Padded(draw.random((16, 4)).astype(np.float32)), "z": None}


def trained(given, steps=3, **settings):
  """Loss, activations, and all rows and slots after some steps."""
  layer = SETUP.made(given, **settings)
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))

  loss_fn = lambda layer, ids, weights: sum(map(wave, layer(ids, weights).values()))

  @nnx.jit
  def step(layer, optimizer, ids, weights):
    loss, grads = embed.value_and_grad(loss_fn)(layer, ids, weights)
    optimizer.update(layer, grads)
    return loss, layer(ids, weights)

  for i in range(steps):
    loss, activations = step(layer, optimizer, SETUP.batch(i), weights(i))
  return fetched((loss, activations, layer.variables))


def assert_close(x, y):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), x, y)


@pytest.mark.weekly
@pytest.mark.parametrize("kind", STEPS)
def test_which_kernels_step(used, kind):
  given = SETUP.features(STEPS[kind], 128)
  off = trained(given, steps=1, storage="rows")
  assert not used
  assert_close(trained(given, steps=1, storage="sparse_core"), off)
  assert used == {"take", "put", "bag_sum"}


@pytest.mark.weekly
@pytest.mark.parametrize("dim", [8, 100])
def test_packed_tables(used, dim):
  """Rows of 8 columns are too narrow for the sums of bags on TPU7x."""
  given = SETUP.features(embed.adagrad(0.5), dim)
  on, off = (trained(given, storage=way) for way in ("sparse_core", "rows"))
  assert_close(on, off)
  assert used == ({"take", "put"} if dim == 8 else {"take", "put", "bag_sum"})


@pytest.mark.weekly
def test_the_self_test_passes_on_sparse_cores(used, monkeypatch):
  monkeypatch.setenv(sparse_core.SWITCH, "1")
  assert "rows by sparse_core" in check.header()
  results = check.check(*check.places()["one device, 128 columns"])
  assert [name for name, (error, tolerance, _) in results.items() if error > tolerance] == []
  assert used == {"take", "put", "bag_sum"}
