"""Baselines of two towers, ranked as the model is: popularity, item kNN and EASE."""

from collections.abc import Callable, Mapping

import numpy as np
import scipy.sparse

from ..evaluation import baselines
from .data import RetrievalData

_EARLIER = {"valid": ("train",), "test": ("train", "valid")}  # the splits that a split may see


def tasks(data: RetrievalData, config) -> Mapping[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics."""
  histories, relevant = {}, {}
  for split, earlier in _EARLIER.items():
    users, relevant[split] = examples(data, split, config.examples)
    histories[split] = data.matrix(*earlier)[users]

  def recent() -> dict[str, float]:
    """Ranks by the popularity that is added to the model's scores, alone."""
    metrics: dict[str, float] = {}
    for split, earlier in _EARLIER.items():
      scores = data.popularity(config.popularity.half_life, *earlier)
      seen = histories[split] if config.exclude_seen else None
      ranked = lambda start, stop, scores=scores: np.tile(scores, (stop - start, 1))
      values = baselines.ranking(ranked, relevant[split], seen, config.ks, data.train_counts())
      metrics |= {f"{split}_{name}": value for name, value in values.items()}
    return metrics

  timed = {"recent popularity": recent} if data.ordered and config.popularity.weight else {}
  return timed | baselines.ranking_tasks(
    data.matrix("train"),
    histories,
    relevant,
    config.ks,
    exclude_seen=config.exclude_seen,
    counts=data.train_counts(),
    ease_l2=config.baseline.ease_l2,
    select=config.baseline.select,
  )


def examples(
  data: RetrievalData, split: str, by: str
) -> tuple[np.ndarray, scipy.sparse.csr_matrix]:
  """Returns the user of each of a split's examples and their relevant items `[examples, items]`.

  `by` is the config's `examples`: "users" or "rows".
  """
  if by == "users":
    return np.arange(data.num_users), data.matrix(split)
  items = np.asarray(data.columns["item"][slice(*data.splits[split])])
  pairs, shape = (np.arange(len(items)), items), (len(items), data.num_items)
  matrix = scipy.sparse.csr_matrix((np.ones(len(items), np.float32), pairs), shape)
  return np.asarray(data.columns["user"][slice(*data.splits[split])]), matrix
