"""Baselines of two towers, ranked as the model is: popularity, item kNN and EASE."""

import functools
from collections.abc import Callable, Mapping

import numpy as np
import scipy.sparse

from ..evaluation import baselines
from .data import RetrievalData


def tasks(data: RetrievalData, config) -> Mapping[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics."""
  histories, relevant = {}, {}
  for split, earlier in (("valid", ("train",)), ("test", ("train", "valid"))):
    users, relevant[split] = examples(data, split, config.examples)
    histories[split] = data.matrix(*earlier)[users]

  repeated = lambda scores, start, stop: np.tile(scores, (stop - start, 1))

  def recent() -> dict[str, float]:
    """Ranks by the column of popularity that the model's scores have, alone."""
    metrics: dict[str, float] = {}
    for split, earlier in (("valid", ("train",)), ("test", ("train", "valid"))):
      values = baselines.ranking(
        functools.partial(repeated, data.popularity(config.popularity.half_life, *earlier)),
        relevant[split],
        histories[split] if config.exclude_seen else None,
        config.ks,
        data.train_counts(),
      )
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
  start, stop = data.splits[split]
  items = np.asarray(data.columns["item"][start:stop])
  pairs, shape = (np.arange(stop - start), items), (stop - start, data.num_items)
  matrix = scipy.sparse.csr_matrix((np.ones(stop - start, np.float32), pairs), shape)
  return np.asarray(data.columns["user"][start:stop]), matrix
