"""Baselines of sequence models, ranked as the model is: popularity, item kNN and EASE."""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from ..evaluation import baselines
from . import data as data_lib


def tasks(data: data_lib.SequenceData, config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns what fits each baseline and returns its metrics, by its name.

  `config.baseline.ease_l2` is EASE's penalty; 0 leaves it out. Item kNN is fitted where the users'
  lists are short enough.
  """
  fit = functools.partial(fit_baseline, data, ks=tuple(config.ks), exclude_seen=config.exclude_seen)
  chosen: dict[str, Callable[[], Mapping[str, float]]] = {
    "popularity": functools.partial(fit, "popularity")
  }
  if baselines.can_fit_knn(data_lib.train_lengths(data.lengths)):
    chosen["item kNN"] = functools.partial(fit, "item kNN")
  if config.baseline.ease_l2:
    chosen["EASE"] = functools.partial(fit, "EASE", l2=config.baseline.ease_l2)
  return chosen


def fit_baseline(
  data: data_lib.SequenceData,
  name: str,
  *,
  ks: tuple[int, ...],
  exclude_seen: bool,
  l2: float = 0.0,
) -> dict[str, float]:
  """Returns the metrics of a baseline that is asked with all earlier items, as the models are.

  Args:
    data: the data set; the baseline learns from its training items.
    name, l2: as for `baselines.scorer`.
    ks, exclude_seen: as in the config.
  """
  everyone, users = np.arange(len(data.lengths)), data.evaluated
  train = data_lib.matrix(data, everyone, data_lib.HELD_OUT["train"])
  score, scores = baselines.scorer(name, train, l2), dict[str, float]()
  for split in ("valid", "test"):
    histories = data_lib.matrix(data, users, data_lib.HELD_OUT[split])
    relevant = data_lib.targets(data, users, data_lib.HELD_OUT[split])
    ask = lambda start, stop, histories=histories: score(histories[start:stop])
    metrics = baselines.ranking(ask, relevant, histories if exclude_seen else None, ks)
    scores |= {f"{split}_{metric}": value for metric, value in metrics.items()}
  return scores
