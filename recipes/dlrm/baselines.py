"""Baselines of click models, on the same rows: a constant rate and a logistic regression."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from sklearn.metrics import roc_auc_score

from ..evaluation import baselines
from ..training.features import cut_ids
from .data import ClickData

_ROWS = 1 << 22  # labels that are read at once


def tasks(data: ClickData, config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns what fits each baseline and returns its metrics, by its name."""
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
  """Returns the metrics of predicting the training rows' rate of clicks for every row."""
  rates = {split: _rate(data, *rows) for split, rows in data.splits.items() if len(range(*rows))}
  odds = np.clip(rates.pop("train"), 1e-15, 1 - 1e-15)
  scores: dict[str, float] = {}
  for split, rate in rates.items():
    logloss = -rate * np.log(odds) - (1 - rate) * np.log1p(-odds)
    scores |= {f"{split}_auc": 0.5, f"{split}_logloss": float(logloss)}
  return scores


def _rate(data: ClickData, start: int, stop: int) -> float:
  clicks = total = 0.0
  for first in range(start, stop, _ROWS):
    part = slice(first, min(first + _ROWS, stop))
    weights = _weights(data, part).astype(np.float64)
    clicks, total = clicks + np.vdot(weights, data.columns["label"][part]), total + weights.sum()
  return clicks / total


def _weights(data: ClickData, rows: slice) -> np.ndarray:
  if "weight" in data.columns:
    return np.asarray(data.columns["weight"][rows])
  return np.ones(rows.stop - rows.start, np.float32)


def most_telling(data: ClickData, max_rows: int = 1_000_000) -> tuple[str, float]:
  """Returns the column that ranks held-out rows best by itself, and the AUC of its ranking.

  A number ranks by its size, in either direction; ids by the rates of clicks of their training
  rows.

  Args:
    data: the data set; of each split the last rows are used.
    max_rows: how many.
  """
  held_out = next(name for name in ("test", "valid") if len(range(*data.splits[name])))
  train, test = (
    slice(max(start, stop - max_rows), stop)
    for start, stop in (data.splits["train"], data.splits[held_out])
  )
  label, weights = np.asarray(data.columns["label"][train]), _weights(data, train)
  clicks, mean = weights * label, np.average(label, weights=weights)
  names = data.dense_names or [f"number {i + 1}" for i in range(data.num_dense)]
  scores = dict(zip(names, np.asarray(data.columns["dense"][test]).T, strict=True))
  known, asked = (_ids(data, rows) for rows in (train, test))
  for feature in data.features:
    ids, size = known[feature.name].reshape(len(label), -1) + 1, feature.vocabulary_size + 1
    sums = lambda x, ids=ids, size=size: sum(np.bincount(each, x, size) for each in ids.T)
    rates = (sums(clicks) + mean) / (sums(weights) + 1)  # of no value at 0
    at = asked[feature.name] + 1
    scores[feature.name] = rates[at] if at.ndim == 1 else rates[at].mean(axis=1)
  label, weights = np.asarray(data.columns["label"][test]), _weights(data, test)
  aucs = {name: roc_auc_score(label, x, sample_weight=weights) for name, x in scores.items()}
  aucs = {name: float(max(auc, 1 - auc)) for name, auc in aucs.items()}
  best = max(aucs, key=lambda name: aucs[name])
  return best, aucs[best]


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
  """Returns the metrics of a linear model on the same rows; see `baselines.logistic_regression`.

  At most `max_rows` rows of each split are used, the last ones, because the one-hot matrix is held
  in memory; the `rows` in the result say how many there were.
  """
  blocks = [
    size
    for feature in data.features
    for size in (feature.vocabulary_size, *[0] * (feature.valency - 1))
  ]
  matrices, labels, weights = {}, {}, {}
  for split, (start, stop) in data.splits.items():
    first = max(start, stop - max_rows)
    dense = np.asarray(data.columns["dense"][first:stop])
    ids = _ids(data, slice(first, stop)).values()
    wide = [np.empty((stop - first, 0), np.int32), *(x.reshape(len(x), -1) for x in ids)]
    matrices[split] = baselines.one_hot(np.concatenate(wide, axis=1), blocks, dense)
    labels[split] = np.asarray(data.columns["label"][first:stop])
    weights[split] = _weights(data, slice(first, stop))
  return baselines.logistic_regression(
    matrices, labels, weights, inverse_penalties=inverse_penalties
  )
