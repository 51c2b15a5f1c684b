"""Baselines of click models, on the same rows: a constant rate and a logistic regression."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.sparse
from scipy.special import logit

from ..evaluation import baselines
from ..results import scalars
from ..training.features import cut_ids
from . import tasks as tasks_lib
from .data import ClickData

_ROWS = 1 << 22  # labels that are read at once


def tasks(data: ClickData, config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics."""
  chosen: dict[str, Callable[[], Mapping[str, float]]] = {
    "constant rate": functools.partial(constant_rate, data)
  }
  can_choose = len(range(*data.splits["valid"])) > 0
  if config.baseline.max_rows and can_choose:
    chosen["logistic regression"] = functools.partial(
      logistic_regression,
      data,
      max_rows=config.baseline.max_rows,
      inverse_penalties=tuple(config.baseline.inverse_penalties),
    )
  return chosen


def constant_rate(data: ClickData) -> dict[str, float]:
  """Returns the metrics of the training rows' rate of clicks, predicted for every row."""
  constants = np.array([_constant(data, column) for column in range(len(data.labels))])
  scores: dict[str, float] = {}
  for split in ("valid", "test"):
    rows = slice(*data.splits[split])
    if targets := len(range(*data.splits[split])):
      outputs = np.broadcast_to(constants, (targets, len(constants)))
      examples = outputs, np.asarray(data.columns["label"][rows], np.float32), _weights(data, rows)
      scores |= scalars(split, tasks_lib.metrics(data.labels, *examples))
  return scores


def _constant(data: ClickData, column: int) -> float:
  """Returns the best constant output of a label for the training rows."""
  total, amount = 0.0, 0.0
  start, stop = data.splits["train"]
  for first in range(start, stop, _ROWS):
    rows = slice(first, min(first + _ROWS, stop))
    target, weight = _target(data, column, rows), _weights(data, rows)
    target, weight = target[~np.isnan(target)], weight[~np.isnan(target)]
    total += weight @ target
    amount += weight.sum(dtype=np.float64)
  return logit(np.clip(total / amount, 1e-15, 1 - 1e-15))


def _target(data: ClickData, column: int, rows: slice) -> np.ndarray:
  """Returns one label of some rows, float64 `[N]`, NaN where it does not count."""
  labels = np.asarray(data.columns["label"][rows], np.float64)
  return labels.reshape(len(labels), -1)[:, column]


def _weights(data: ClickData, rows: slice) -> np.ndarray:
  if "weight" in data.columns:
    return np.asarray(data.columns["weight"][rows])
  return np.ones(rows.stop - rows.start, np.float32)


def _ids(data: ClickData, rows: slice) -> dict[str, np.ndarray]:
  """Returns the ids of each feature; raw ids of a dynamic vocabulary hashed to as many rows."""
  ids = cut_ids(data.columns["ids"][rows], data.features)
  for feature in (feature for feature in data.features if feature.is_dynamic):
    high, low = np.moveaxis(ids[feature.name], -1, 0)
    is_none = (high == 2**32 - 1) & (low == 2**32 - 1)
    hashed = (low % feature.vocabulary_size).astype(np.int32)
    ids[feature.name] = np.where(is_none, np.int32(-1), hashed)
  return ids


def logistic_regression(
  data: ClickData, *, max_rows: int, inverse_penalties: Sequence[float]
) -> dict[str, float]:
  """Returns the metrics of a linear model of the same rows, one for each label of clicks.

  At most `max_rows` rows of each split are used, the last ones, because the one-hot matrix is in
  memory; `rows` in the result is their number in training. Vectors that the model projects are left
  out: they would be most of it.
  """
  last_rows = {
    split: slice(max(start, stop - max_rows), stop) for split, (start, stop) in data.splits.items()
  }
  matrices, fits = {}, {}
  for split, rows in last_rows.items():
    dense = np.asarray(data.columns["dense"][rows])[:, list(data.numbers)]
    ids = _ids(data, rows)
    blocks = [baselines.one_hot(ids[x.name], x.vocabulary_size) for x in data.features]
    matrices[split] = scipy.sparse.hstack([*blocks, scipy.sparse.csr_matrix(dense)], format="csr")
  for column, name in enumerate(data.labels):
    targets = {split: _target(data, column, rows) for split, rows in last_rows.items()}
    counts = {split: np.flatnonzero(~np.isnan(x)) for split, x in targets.items()}
    fits[name] = baselines.logistic_regression(
      {split: matrices[split][kept] for split, kept in counts.items()},
      {split: targets[split][kept] for split, kept in counts.items()},
      {split: _weights(data, last_rows[split])[kept] for split, kept in counts.items()},
      inverse_penalties=inverse_penalties,
    )
  if len(data.labels) == 1:
    return next(iter(fits.values()))
  scores: dict[str, float] = {}
  for split in ("valid", "test"):
    metrics = lambda fit, split=split: {
      name.removeprefix(f"{split}_"): x for name, x in fit.items() if name.startswith(f"{split}_")
    }
    by_label = {name: metrics(fit) for name, fit in fits.items()}
    scores |= scalars(split, tasks_lib.named(data.labels, by_label))
  return scores
