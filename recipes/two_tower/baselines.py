"""Baselines of two towers, ranked as the model is: popularity, item kNN and EASE."""

from collections.abc import Callable, Mapping

import numpy as np

from ..evaluation import baselines
from .data import EARLIER, RetrievalData


def tasks(data: RetrievalData, config) -> Mapping[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics."""
  histories = {split: data.matrix(*earlier) for split, earlier in EARLIER.items()}
  relevant = {split: data.matrix(split) for split in EARLIER}
  if config.examples == "rows":
    for split in EARLIER:
      user, item = (data.columns[name][data.rows(split)] for name in ("user", "item"))
      histories[split] = histories[split][user]
      relevant[split] = baselines.ones(np.arange(len(item)), item, (len(item), data.num_items))
  return baselines.ranking_tasks(
    data.matrix("train"),
    histories,
    relevant,
    config.ks,
    exclude_seen=config.exclude_seen,
    ease_l2=config.baseline.ease_l2,
  )
