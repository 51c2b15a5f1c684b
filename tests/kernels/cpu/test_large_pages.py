"""Large pages: what the system reports of a table's memory, and what a step leaves of them."""

import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

import embed
from embed.engine import jax_internals
from embed.kernels import cpu as cpu_kernels
from embed.kernels.cpu import large_pages

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.ci]

ROWS, DIM = 250_000, 64  # 61 MiB: allocated for itself, in a mapping of its own or a neighbor's
HALF = ROWS * DIM * 4 / 2  # bytes; the system may have no memory for some pages


def in_large_pages(x):
  """The bytes in large pages of the mapping that an array is in, as Linux counts them.

  A system short of memory may say yes and give none: the tests that read this run every week.
  """
  # A step returns before it ends, and what is read meanwhile lacks what it allocates.
  address = jax_internals.address(x.block_until_ready())
  mappings = pathlib.Path("/proc/self/smaps").read_text()
  for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", mappings, flags=re.MULTILINE)[1:]:
    start, end = (int(part, 16) for part in text.split(maxsplit=1)[0].split("-"))
    if start <= address < end:
      return 1024 * int(re.search(r"AnonHugePages: *(\d+)", text).group(1))
  raise AssertionError("The array is in no mapping.")


def make_layer(optimizer):
  table = embed.TableConfig(ROWS, DIM, optimizer=optimizer, name="table")
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))


def use_or_skip(arrays, use=large_pages.use):
  """Asks for large pages; a system may have none, or none left beside other processes."""
  moved = use(arrays)
  if moved < HALF:
    pytest.skip(f"the system had large pages for {moved} bytes only")
  return moved


@pytest.mark.weekly
def test_a_loaded_table_is_in_large_pages_and_stays_there_in_a_step(monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(large_pages, "use", lambda arrays: 0)  # only what is loaded is moved
    layer = make_layer(embed.sgd(0.1))
  (stack,) = layer.arrays.values()
  rows = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
  monkeypatch.setattr(large_pages, "use", use_or_skip)
  layer.load_tables({"table": rows})
  assert in_large_pages(stack["parameters"].get_value()) >= HALF

  @nnx.jit(donate_argnames="layer", graph=False)
  def train_step(layer, ids):
    activations, residual = layer.lookup(ids)
    layer.apply_gradients(activations, residual)

  train_step(layer, np.arange(8))
  assert in_large_pages(stack["parameters"].get_value()) >= HALF
  np.testing.assert_array_equal(layer.tables["table"][8:], rows[8:])


def test_what_is_not_moved(monkeypatch):
  calls = []
  advise = lambda start, size, advice: calls.append((start, size)) or 0
  monkeypatch.setattr(large_pages, "_madvise", lambda: advise)
  assert large_pages.use([jax.numpy.ones(large_pages.PAGE // 4 - 1)]) == 0
  large = jax.numpy.ones(4 * large_pages.PAGE // 4)
  jax.eval_shape(lambda x: large_pages.use([x]), large)
  monkeypatch.setenv(cpu_kernels.SWITCH, "0")
  assert large_pages.use([large]) == 0
  assert calls == []
  monkeypatch.setenv(cpu_kernels.SWITCH, "1")
  moved = large_pages.use([large])
  ((start, size),) = calls
  assert moved == size >= 3 * large_pages.PAGE
  assert start % large_pages.PAGE == size % large_pages.PAGE == 0
  address = jax_internals.address(large)
  assert address <= start < start + size <= address + large.nbytes


def test_only_what_was_replaced_is_moved(monkeypatch):
  tables = [embed.TableConfig(8, dim, name=name) for name, dim in (("one", 128), ("other", 64))]
  layer = embed.SparseEmbed([embed.FeatureConfig(t) for t in tables], rngs=nnx.Rngs(0))
  moved = []
  monkeypatch.setattr(large_pages, "use", lambda arrays: moved.extend(arrays))
  layer.load_tables({"one": np.ones((8, 128))})
  assert len(moved) == 1
