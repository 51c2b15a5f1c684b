"""Baselines of two towers, ranked as the model is: popularity, item kNN and EASE."""

import functools
from collections.abc import Callable, Mapping

import numpy as np
import scipy.sparse

from ..evaluation import baselines
from .data import RetrievalData


def tasks(data: RetrievalData, config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns what fits each baseline and returns its metrics, by its name.

  EASE is fitted as configured, item kNN where the users' lists are short enough.
  """
  fit = functools.partial(
    fit_baseline,
    data,
    examples_by=config.examples,
    exclude_seen=config.exclude_seen,
    ks=tuple(config.ks),
    select=config.baseline.select,
  )
  can_fit_knn = baselines.can_fit_knn(np.diff(data.columns["train_offsets"]))
  penalties = {
    "popularity": (0.0,),
    "item kNN": (0.0,) if can_fit_knn else (),
    "EASE": tuple(config.baseline.ease_l2),
  }
  return {
    name: functools.partial(fit, name, values) for name, values in penalties.items() if values
  }


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
  pairs = np.arange(stop - start), items
  shape = (stop - start, data.num_items)
  matrix = scipy.sparse.csr_matrix((np.ones(stop - start, np.float32), pairs), shape)
  return np.asarray(data.columns["user"][start:stop]), matrix


def fit_baseline(
  data: RetrievalData,
  name: str,
  penalties: tuple[float, ...],
  *,
  examples_by: str,
  exclude_seen: bool,
  ks: tuple[int, ...],
  select: str,
) -> dict[str, float]:
  """Returns the metrics of a baseline, by the models' own ranking.

  Args:
    data: the data set.
    name: as for `baselines.scorer`.
    penalties: of which the one is tested that validation prefers by the metric `select`.
    examples_by, exclude_seen, ks: as in the config.
  """
  relevant, histories = {}, {}
  for split, earlier in (("valid", ("train",)), ("test", ("train", "valid"))):
    users, relevant[split] = examples(data, split, examples_by)
    histories[split] = data.matrix(*earlier)[users]
  fit = functools.partial(baselines.scorer, name, data.matrix("train"))
  candidates = {l2: functools.partial(fit, l2) for l2 in penalties}
  return baselines.best_ranking(
    candidates, histories, relevant, ks, exclude_seen=exclude_seen, select=select
  )
