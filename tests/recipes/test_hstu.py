"""HSTU's block against slow NumPy: its bias of distance, with any mask."""

import numpy as np
import pytest
from flax import nnx

from recipes.training import transformer

LENGTH, COLUMNS = 16, 6


def norm(x):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def silu(x):
  return x / (1 + np.exp(-x))


def slowly(model, x, mask, bias):
  """Equations 1 to 3 of the paper; `bias` is of a row, a column, and one that it looks at."""
  parts = silu(norm(x) @ np.asarray(model.uvqk.kernel[...]))
  gate, value, query, key = np.split(parts, 4, axis=-1)
  mixed = np.zeros_like(x)
  for row, one, other in zip(*np.nonzero(mask), strict=True):
    for head in (slice(0, 4), slice(4, 8)):
      score = query[row, one, head] @ key[row, other, head] + bias(row, one, other)
      mixed[row, one, head] += silu(score) / LENGTH * value[row, other, head]
  return x + (norm(mixed) * gate) @ np.asarray(model.out.kernel[...])


@pytest.mark.ci
def test_the_block_adds_a_bias_of_distance_to_the_scores():
  model = transformer.HSTUBlock(8, 2, LENGTH, dropout=0.0, rngs=nnx.Rngs(0))
  draw = np.random.default_rng(0)
  x = draw.normal(size=(2, COLUMNS, 8)).astype(np.float32)
  mask = (draw.random((2, COLUMNS, COLUMNS)) < 0.6) & np.tri(COLUMNS, dtype=bool)
  bias = lambda row, one, other: float(model.bias[...][one - other])
  found = nnx.jit(lambda model: model(x, mask))(model)
  np.testing.assert_allclose(found, slowly(model, x, mask, bias), rtol=1e-4, atol=1e-5)
