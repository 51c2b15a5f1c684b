"""Baselines of a label of clicks, on the same rows: a constant rate and a logistic regression."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from scipy.sparse import csr_matrix
from scipy.special import logit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from .. import cache
from ..evaluation.metrics import click_metrics
from ..run import scalars
from ..training.features import cut_ids

if TYPE_CHECKING:  # the data import this module
  from .data import ClickData


def tasks(data: "ClickData", config) -> dict[str, Callable[[], Mapping[str, float]]]:
  """Returns, by name, functions that fit a baseline and return its metrics.

  There is no regression without validation rows to choose one on.
  """
  fits: dict[str, Callable[[], Mapping[str, float]]] = {
    "constant rate": lambda: constant_rate(data)
  }
  if config.baseline.max_rows and len(range(*data.splits["valid"])):
    fits["logistic regression"] = lambda: regression(data, config)[1]
  return fits


def constant_rate(data: "ClickData") -> dict[str, float]:
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


def _weights(data: "ClickData", rows: slice) -> np.ndarray:
  if "weight" in data.columns:
    return data.columns["weight"][rows]
  return np.ones(rows.stop - rows.start, np.float32)


def regression(data: "ClickData", config) -> tuple[np.ndarray, dict[str, float]]:
  """Returns what `logistic_regression` does, fitted once for the data and kept in the cache."""
  settings = {"data": data.name, "features": data.meta["features"]} | config.baseline.to_dict()

  def build(folder: Path) -> dict[str, Any]:
    weights, scores = logistic_regression(data, **config.baseline)
    np.save(folder / "weights.npy", weights)
    return {"scores": scores}

  columns, meta = cache.prepared(config.cache_dir, "regression", settings, build)
  return np.array(columns["weights"]), meta["scores"]


def logistic_regression(
  data: "ClickData", *, max_rows: int, inverse_penalties: Sequence[float]
) -> tuple[np.ndarray, dict[str, float]]:
  """Fits L2-regularised linear models to the same rows and tests the best one on validation.

  At most `max_rows` rows of each split are used, the last ones, because the one-hot matrix is in
  memory.

  Args:
    inverse_penalties: values of scikit-learn's `C` to choose from.

  Returns:
    The weights of the chosen fit, float32: of the ids of each feature, the numbers, and the bias;
    and its metrics, as "test_auc", its `c`, and the number of `rows` in training.
  """
  parts = {
    split: _part(data, slice(max(start, stop - max_rows), stop))
    for split, (start, stop) in data.splits.items()
  }
  best: dict[str, float] = {}
  for c in inverse_penalties:
    # scikit-learn's default tolerance is on the gradient of the mean loss, where an id that is in
    # one of ten thousand rows hardly shows: rare ids would stay untrained.
    model = LogisticRegression(C=c, solver="lbfgs", max_iter=200, tol=1e-7)
    with warnings.catch_warnings():
      # A weak penalty may not converge in 200 rounds; validation decides whether that matters.
      warnings.simplefilter("ignore", ConvergenceWarning)
      model.fit(*parts["train"])
    scores = {"c": float(c), "rows": len(parts["train"][1])}
    for split in ("valid", "test"):
      matrix, label, weight = parts[split]
      if len(label):
        scores |= scalars(split, click_metrics(model.decision_function(matrix), label, weight))
    if not best or scores["valid_auc"] > best["valid_auc"]:
      best, weights = scores, np.append(model.coef_, model.intercept_).astype(np.float32)
  return weights, best


def _part(data: "ClickData", rows: slice) -> tuple[csr_matrix, np.ndarray, np.ndarray]:
  """Returns one-hot ids and numbers `[N, columns]`, labels `[N]` and weights `[N]` of some rows.

  The ids of a bag have the weights of its combiner, as in the model.
  """
  blocks, ids = [], cut_ids(data.columns["ids"][rows], data.features)
  for feature in data.features:
    own, size = ids[feature.name].reshape(-1, feature.valency), feature.vocabulary_size
    counts = (own >= 0).sum(axis=1)
    power = {"sum": 0.0, "sqrtn": -0.5, "mean": -1.0}[feature.combiner]
    shares = np.repeat(np.maximum(counts, 1).astype(np.float32) ** power, counts)
    ends = np.cumsum([0, *counts])
    blocks.append(csr_matrix((shares, own[own >= 0], ends), (len(own), size)))
  blocks.append(csr_matrix(np.asarray(data.columns["dense"][rows])))
  matrix = scipy.sparse.hstack(blocks, format="csr")
  return matrix, data.columns["label"][rows], _weights(data, rows)
