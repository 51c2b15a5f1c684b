"""Baselines of two towers, ranked as the model is: popularity, item kNN and EASE."""

from collections.abc import Callable, Mapping

import numpy as np
import scipy.sparse

from ..evaluation import baselines
from .data import RetrievalData

_EARLIER = {"valid": ("train",), "test": ("train", "valid")}  # the splits that a split may see


def tasks(data: RetrievalData, config) -> Mapping[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics.

  Recent popularity ranks by what is added to the model's scores, alone.
  """
  histories, relevant = {}, {}
  for split, earlier in _EARLIER.items():
    users, relevant[split] = _examples(data, split, config.examples)
    histories[split] = data.matrix(*earlier)[users]
  recent = None
  if data.ordered and config.popularity.weight:
    half_life = config.popularity.half_life
    recent = {split: data.popularity(half_life, *each) for split, each in _EARLIER.items()}
  return baselines.ranking_tasks(
    data.matrix("train"),
    histories,
    relevant,
    config.ks,
    exclude_seen=config.exclude_seen,
    ease_l2=config.baseline.ease_l2,
    recent=recent,
  )


def _examples(
  data: RetrievalData, split: str, by: str
) -> tuple[np.ndarray, scipy.sparse.csr_matrix]:
  """Returns the user of each of a split's examples and their relevant items `[examples, items]`.

  `by` is the config's `examples`: "users" or "rows".
  """
  if by == "users":
    return np.arange(data.num_users), data.matrix(split)
  rows = slice(*data.splits[split])
  items = data.columns["item"][rows]
  pairs, shape = (np.arange(len(items)), items), (len(items), data.num_items)
  matrix = scipy.sparse.csr_matrix((np.ones(len(items), np.float32), pairs), shape)
  return data.columns["user"][rows], matrix
