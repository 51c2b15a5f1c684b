"""Large pages: which memory is moved to them."""

import jax
import numpy as np
import pytest
from flax import nnx

import embed
from embed.engine import jax_internals
from embed.kernels import cpu as cpu_kernels
from embed.kernels.cpu import large_pages

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.ci]


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
