"""Baselines on the histories of a sequence model, ranked as the model is."""

from collections.abc import Callable, Mapping

import numpy as np

from ..evaluation import baselines
from . import data as data_lib


def tasks(data: data_lib.SequenceData, config) -> Mapping[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline on training items and return its metrics."""
  users, held_out = data.evaluated, data_lib.HELD_OUT
  return baselines.ranking_tasks(
    data_lib.matrix(data, np.arange(len(data.lengths)), held_out["train"]),
    {split: data_lib.matrix(data, users, held_out[split]) for split in ("valid", "test")},
    {split: data_lib.targets(data, users, held_out[split]) for split in ("valid", "test")},
    config.ks,
    exclude_seen=config.exclude_seen,
    ease_l2=config.baseline.ease_l2,
  )
