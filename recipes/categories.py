"""Texts as ids of a vocabulary, in sorted order."""

from collections.abc import Sequence

import numpy as np


def codes(values: Sequence[str]) -> tuple[np.ndarray, int]:
  """Returns the values as ids int32 `[N]`, and the size of the vocabulary.

  >>> ids, size = codes(["b", "a", "b"])
  >>> ids.tolist(), size
  ([1, 0, 1], 2)
  """
  names, ids = np.unique(values, return_inverse=True)
  return ids.astype(np.int32), len(names)


def bags(values: Sequence[Sequence[str]]) -> tuple[np.ndarray, int]:
  """Returns lists of values as ids int32 `[N, longest]`, and the size of the vocabulary.

  -1 fills up a row; width and size are at least 1.

  >>> ids, size = bags([["b", "a"], [], ["a"]])
  >>> ids.tolist(), size
  ([[1, 0], [-1, -1], [0, -1]], 2)
  """
  names = {name: i for i, name in enumerate(sorted({name for bag in values for name in bag}))}
  padded = np.full((len(values), max(1, *map(len, values))), -1, np.int32)
  for row, bag in enumerate(values):
    padded[row, : len(bag)] = [names[name] for name in bag]
  return padded, max(len(names), 1)
