"""SparseCore kernels against NumPy, emulated on CPU; and writes that the emulator must refuse."""

import jax
import numpy as np
import pytest
from sparse_cores import emulated

from embed.kernels import sparse_core_pallas as kernels

SHAPES = {  # V, D, N
  "TPU_V5P": (777, 16, 500),
  "TPU_V6E": (3000, 128, 1501),
  "TPU_7X": (90, 256, 1),
}


def problem(rows, dim, count):
  """A table, distinct ids of which some are no row, and new rows."""
  draw = np.random.default_rng(0)
  table = draw.normal(size=(rows, dim)).astype(np.float32)
  ids = draw.permutation(rows)[:count].astype(np.int32)
  ids[::7] = draw.choice([-1, -5, rows, rows + 3, np.iinfo(np.int32).max], len(ids[::7]))
  return table, ids, draw.normal(size=(count, dim)).astype(np.float32)


def is_row(ids, rows):
  return (ids >= 0) & (ids < rows)


def assert_takes(rows, dim, count):
  table, ids, _ = problem(rows, dim, count)
  ids = np.concatenate([ids, ids[: count // 2]])  # rows may be asked for twice
  kept = is_row(ids, rows)
  taken = np.asarray(jax.jit(kernels.take)(table, ids))
  assert taken.shape == (len(ids), dim)
  np.testing.assert_array_equal(taken[kept], table[ids[kept]])


def assert_puts(rows, dim, count):
  table, ids, new = problem(rows, dim, count)
  kept = is_row(ids, rows)
  put = jax.jit(lambda tables, ids, new: kernels.put(tables, ids, [new, -new]))
  for sign, x in zip((1, -1), put([table, -table], ids, new), strict=True):
    expected = table.copy()
    expected[ids[kept]] = new[kept]
    np.testing.assert_array_equal(x, sign * expected)


def assert_sums(rows, dim, count, length):
  draw = np.random.default_rng(1)
  table = draw.normal(size=(rows, dim)).astype(np.float32)
  ids = draw.integers(-2, rows + 2, (count, length)).astype(np.int32)
  picked = table[np.where(is_row(ids, rows), ids, 0)] * is_row(ids, rows)[..., None]
  sums = jax.jit(kernels.bag_sum)(table, ids)
  np.testing.assert_allclose(sums, picked.astype(np.float64).sum(axis=1), rtol=1e-6, atol=1e-6)


def on_chip(chip):
  return pytest.param(chip, marks=pytest.mark.ci if chip == "TPU_V6E" else pytest.mark.weekly)


@pytest.mark.parametrize("chip", [on_chip(chip) for chip in SHAPES])
def test_rows_are_taken_put_and_summed(chip):
  with emulated(chip):
    assert_takes(*SHAPES[chip])
    assert_puts(*SHAPES[chip])
    assert_sums(*SHAPES[chip], 3)


@pytest.mark.weekly
@pytest.mark.parametrize("fault", ["a row behind the table", "a row twice"])
def test_writes_that_must_not_be_are_found(fault, monkeypatch):
  table, ids, new = problem(900, 128, 300)
  if fault == "a row twice":
    ids[1] = ids[2]
  else:
    beyond = lambda ids, size, window: original(ids, size + 10, window)
    original, _ = kernels._whole_windows, monkeypatch.setattr(kernels, "_whole_windows", beyond)
  with emulated():
    put = np.asarray(jax.jit(lambda *x: kernels.put([x[0]], x[1], [x[2]]))(table, ids, new)[0])
  assert np.isnan(put).any()
