"""Baselines of a label of clicks, on the same rows: a constant rate and a logistic regression."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.sparse
from scipy.special import logit

from ..evaluation import baselines
from ..evaluation.metrics import click_metrics
from ..results import scalars
from ..training.features import cut_ids
from .data import ClickData


def tasks(data: ClickData, config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics.

  There are none of several labels, and no regression without validation rows to choose one on.
  """
  if len(data.labels) > 1:
    return {}
  fits: dict[str, Callable[[], Mapping[str, float]]] = {
    "constant rate": functools.partial(constant_rate, data)
  }
  if config.baseline.max_rows and len(range(*data.splits["valid"])):
    fits["logistic regression"] = functools.partial(
      logistic_regression,
      data,
      max_rows=config.baseline.max_rows,
      inverse_penalties=config.baseline.inverse_penalties,
    )
  return fits


def constant_rate(data: ClickData) -> dict[str, float]:
  """Returns the metrics of the training rows' rate of clicks, predicted for every row."""
  train = slice(*data.splits["train"])
  rate = np.average(data.columns["label"][train], weights=_weights(data, train))
  constant, scores = logit(np.clip(rate, 1e-15, 1 - 1e-15)), dict[str, float]()
  for split in ("valid", "test"):
    rows = slice(*data.splits[split])
    label = data.columns["label"][rows]
    logits = np.full(len(label), constant)
    scores |= scalars(split, click_metrics(logits, label, _weights(data, rows)))
  return scores


def _weights(data: ClickData, rows: slice) -> np.ndarray:
  if "weight" in data.columns:
    return data.columns["weight"][rows]
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
  """Returns the metrics of a linear model of the same rows.

  At most `max_rows` rows of each split are used, the last ones, because the one-hot matrix is in
  memory; `rows` in the result is their number in training. Vectors that the model projects are left
  out: they would be most of it.
  """
  matrices, labels, weights = {}, {}, {}
  for split, (start, stop) in data.splits.items():
    rows = slice(max(start, stop - max_rows), stop)
    dense = np.asarray(data.columns["dense"][rows])[:, list(data.numbers)]
    ids = _ids(data, rows)
    blocks = [baselines.one_hot(ids[x.name], x.vocabulary_size) for x in data.features]
    matrices[split] = scipy.sparse.hstack([*blocks, scipy.sparse.csr_matrix(dense)], format="csr")
    labels[split], weights[split] = data.columns["label"][rows], _weights(data, rows)
  return baselines.logistic_regression(
    matrices, labels, weights, inverse_penalties=inverse_penalties
  )
