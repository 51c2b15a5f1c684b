"""HSTU's block against slow NumPy: its biases of distance and time, with any mask."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.training import hstu

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
def test_the_block_adds_both_biases_to_the_scores():
  model = hstu.HSTUBlock(8, 2, LENGTH, dropout=0.0, buckets=8, rngs=nnx.Rngs(0))
  time_bias = np.array([*range(8)]) / 4 - 1
  model.time_bias[...] = jnp.array(time_bias)
  draw = np.random.default_rng(0)
  x = draw.normal(size=(2, COLUMNS, 8)).astype(np.float32)
  mask = (draw.random((2, COLUMNS, COLUMNS)) < 0.6) & np.tri(COLUMNS, dtype=bool)
  times = np.array([[0, 1, 3, 6, 7, 100], [0, 0, 0, 50, 50, 51]], np.int32)
  # Seconds to bucket, by hand: floor(log(s) / 0.301), and 7 from 9 seconds on.
  bucket, distance_bias = {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 5: 5, 6: 5, 7: 6}, model.bias[...]

  def bias(row, one, other):
    apart = abs(int(times[row, one] - times[row, other]))
    return time_bias[bucket.get(apart, 7)] + float(distance_bias[one - other])

  found = nnx.jit(lambda model: model(x, mask, times_BxL=times))(model)
  np.testing.assert_allclose(found, slowly(model, x, mask, bias), rtol=1e-4, atol=1e-5)
