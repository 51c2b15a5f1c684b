"""Baselines of click models, on the same rows: a constant rate and a logistic regression.

Each label has its own; the logistic regression is of labels of clicks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.sparse
from scipy.special import entr

from ..evaluation import baselines
from ..tables.spec import Label
from ..training.features import cut_ids
from . import tasks as tasks_lib
from .data import ClickData

_ROWS = 1 << 22  # labels that are read at once


def tasks(data: ClickData, config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns what fits each baseline and returns its metrics, by its name."""
  chosen: dict[str, Callable[[], Mapping[str, float]]] = {
    "constant rate": functools.partial(constant_rate, data)
  }
  can_choose = len(range(*data.splits["valid"])) > 0
  has_clicks = any(label.loss == "binary" for label in data.labels.values())
  # Sequences of many targets have no columns for a regression.
  if config.baseline.max_rows and can_choose and has_clicks and "dense" in data.columns:
    chosen["logistic regression"] = functools.partial(
      logistic_regression,
      data,
      max_rows=config.baseline.max_rows,
      inverse_penalties=tuple(config.baseline.inverse_penalties),
    )
  return chosen


def constant_rate(data: ClickData) -> dict[str, float]:
  """Returns the metrics of predicting the training rows' rate of clicks for every row.

  Of classes it predicts their rates, of a regression the mean of log(1 + value).
  """
  sums = {
    split: [_sums(data, place, label, *rows) for place, label in enumerate(data.labels.values())]
    for split, rows in data.splits.items()
    if len(range(*rows))
  }
  train, scores = sums.pop("train"), dict[str, float]()
  for split, held_out in sums.items():
    by_label = zip(data.labels.items(), train, held_out, strict=True)
    metrics = {name: _of_constant(label, *moments) for (name, label), *moments in by_label}
    scores |= _named(data, split, metrics)
  return scores


def _of_constant(label: Label, train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
  if label.loss == "squared_log":
    total, first, second = held_out
    mean = train[1] / train[0]
    return {"squared_loss": float((second - 2 * mean * first) / total + mean**2)}
  known, rates = (x / x.sum() for x in (train, held_out))
  logloss = float(-rates @ np.log(np.clip(known, 1e-15, 1)))
  if label.loss == "binary":
    ne, calibration = logloss / max(entr(rates).sum(), 1e-300), known[1] / max(rates[1], 1e-300)
    return {"auc": 0.5, "logloss": logloss, "ne": float(ne), "calibration": float(calibration)}
  return {"accuracy": float(rates[known.argmax()]), "logloss": logloss}


def _sums(data: ClickData, place: int, label: Label, start: int, stop: int) -> np.ndarray:
  """Returns the weight of each outcome of a label, or of a regression the first three moments."""
  total = np.zeros(3 if label.loss == "squared_log" else max(label.num_outputs, 2))
  for first in range(start, stop, _ROWS):
    part = slice(first, min(first + _ROWS, stop))
    target, weight = _label(data, place, part), _weights(data, part).astype(np.float64)
    counts = ~np.isnan(target)
    target, weight = target[counts], weight[counts]
    if label.loss == "squared_log":
      total += weight @ (target[:, None] ** np.arange(3))
    else:
      total += np.bincount(target.astype(int), weight, len(total))
  return total


def _label(data: ClickData, place: int, rows: slice) -> np.ndarray:
  """Returns one label of some rows, float64 `[N]`, NaN where it does not count.

  Of rows with several targets, those one after the other.
  """
  label = np.asarray(data.columns["label"][rows], np.float64)
  is_one = tasks_lib.is_one_click(data.labels)
  return label.ravel() if is_one else label.reshape(len(label), -1)[:, place]


def _named(
  data: ClickData, split: str, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
  """Returns the metrics of a split by their names, given those of each label."""
  metrics = tasks_lib.named(data.labels, scores)
  return {f"{split}_{name}": value for name, value in metrics.items()}


def _weights(data: ClickData, rows: slice) -> np.ndarray:
  if "weight" in data.columns:
    return np.asarray(data.columns["weight"][rows]).ravel()
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
  """Returns the metrics of a linear model on the same rows; see `baselines.logistic_regression`.

  At most `max_rows` rows of each split are used, the last ones, because the one-hot matrix is in
  memory; `rows` in the result is their number in training. Vectors that the model projects are left
  out: they would be most of it.
  """
  clicks = {n: p for p, (n, x) in enumerate(data.labels.items()) if x.loss == "binary"}
  matrices, weights = {}, {}
  labels: dict[str, dict[str, np.ndarray]] = {name: {} for name in clicks}
  for split, (start, stop) in data.splits.items():
    first = max(start, stop - max_rows)
    rows = slice(first, stop)
    ids, dense = _ids(data, rows), np.asarray(data.columns["dense"][rows])[:, list(data.numbers)]
    blocks = [baselines.one_hot(ids[x.name], x.vocabulary_size) for x in data.features]
    matrices[split] = scipy.sparse.hstack([*blocks, scipy.sparse.csr_matrix(dense)], format="csr")
    weights[split] = _weights(data, rows)
    for name, place in clicks.items():
      labels[name][split] = _label(data, place, rows)
  fits = {}
  for name, label in labels.items():
    counts = {split: np.flatnonzero(~np.isnan(x)) for split, x in label.items()}
    of_rows = (
      {split: x[split][rows] for split, rows in counts.items()} for x in (matrices, label, weights)
    )
    fits[name] = baselines.logistic_regression(*of_rows, inverse_penalties=inverse_penalties)
  if tasks_lib.is_one_click(data.labels):
    return next(iter(fits.values()))
  scores: dict[str, float] = {}
  for split in ("valid", "test"):
    of_split = lambda fit, split=split: {
      name.removeprefix(f"{split}_"): x for name, x in fit.items() if name.startswith(f"{split}_")
    }
    scores |= _named(data, split, {name: of_split(fit) for name, fit in fits.items()})
  return scores
