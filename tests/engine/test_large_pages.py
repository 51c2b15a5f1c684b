"""Large pages: what the system reports of a table's memory, and what a step leaves of them."""

import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

import embed
from embed.engine import jax_internals, large_pages, native

pytestmark = pytest.mark.usefixtures("kernels")

ROWS, DIM = 250_000, 64  # 61 MiB: allocated for itself, in a mapping of its own or a neighbor's
HALF = ROWS * DIM * 4 / 2  # bytes; the system may have no memory for some pages


def in_large_pages(x):
  """The bytes in large pages of the mapping that an array is in, as Linux counts them."""
  mappings = pathlib.Path("/proc/self/smaps").read_text()
  for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", mappings, flags=re.MULTILINE)[1:]:
    start, end = (int(part, 16) for part in text.split(maxsplit=1)[0].split("-"))
    if start <= jax_internals.address(x) < end:
      return 1024 * int(re.search(r"AnonHugePages: *(\d+)", text).group(1))
  raise AssertionError("The array is in no mapping.")


def make_layer():
  table = embed.TableConfig(ROWS, DIM, optimizer=embed.adagrad(0.1), name="table")
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))


@pytest.fixture
def has_large_pages(kernels):
  if not large_pages.use([jax.numpy.ones(8 * large_pages.PAGE // 4)]):
    pytest.skip("this system has no large pages")


@pytest.mark.usefixtures("has_large_pages")
def test_tables_and_slots_are_in_large_pages():
  (stack,) = make_layer().arrays.values()
  for variable in stack.values():
    assert in_large_pages(variable.get_value()) >= HALF


@pytest.mark.usefixtures("has_large_pages")
def test_a_loaded_table_is_in_large_pages_and_stays_there_in_a_step():
  layer = make_layer()
  rows = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
  layer.load_tables({"table": rows})

  @nnx.jit(donate_argnames="layer", graph=False)
  def train_step(layer, ids):
    activations, residual = layer.lookup(ids)
    layer.apply_gradients(activations, residual)

  train_step(layer, np.arange(8))
  (stack,) = layer.arrays.values()
  assert in_large_pages(stack["parameters"].get_value()) >= HALF
  np.testing.assert_array_equal(layer.tables["table"][8:], rows[8:])


def test_what_is_not_moved(monkeypatch):
  calls = []
  monkeypatch.setattr(large_pages, "_madvise", lambda: lambda *args: calls.append(args))
  small = jax.numpy.ones(large_pages.PAGE // 4 - 1)
  assert large_pages.use([small]) == 0
  large = jax.numpy.ones(4 * large_pages.PAGE // 4)
  jax.eval_shape(lambda x: large_pages.use([x]), large)
  monkeypatch.setenv(native.SWITCH, "0")
  assert large_pages.use([large]) == 0
  assert calls == []
  monkeypatch.setenv(native.SWITCH, "1")
  large_pages.use([large])
  start, end = jax_internals.address(large), jax_internals.address(large) + large.nbytes
  assert len(calls) >= 3
  for at, size, _ in calls:
    assert at % large_pages.PAGE == 0
    assert size == large_pages.PAGE
    assert start <= at < at + size <= end
