"""Draws from a fixed distribution over ids, by the inverse of its cumulative sum."""

import numpy as np


def cumulative(weights: np.ndarray) -> np.ndarray:
  """Returns the cumulative distribution of weights `[N]`, float64 `[N]`; the last value is 1.

  Rounding must not leave it below 1, or a draw close to 1 would get the id N.

  >>> cumulative(np.array([1.0, 3.0])).tolist()
  [0.25, 1.0]
  """
  sums = np.cumsum(weights)
  return sums / sums[-1]


def draw(generator: np.random.Generator, cumulative: np.ndarray, shape) -> np.ndarray:
  """Returns ids int32 of the given shape, drawn with replacement.

  >>> draw(np.random.default_rng(0), cumulative(np.array([0.0, 2.0, 0.0])), 3).tolist()
  [1, 1, 1]
  """
  ids = np.searchsorted(cumulative, generator.random(shape), side="right")
  return ids.astype(np.int32)
