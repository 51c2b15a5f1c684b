"""Baselines without a neural network, so that every result has a number to be measured against."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from recipes.metrics import ClickMetrics


def one_hot(
  ids: np.ndarray, vocabulary_sizes: Sequence[int], dense: np.ndarray | None = None
) -> scipy.sparse.csr_matrix:
  """Returns the design matrix of a linear model.

  Args:
    ids: int `[N, W]`; -1 is padding and sets nothing.
    vocabulary_sizes: of each of the W columns' features. Columns of one bag are given as
      `size, 0, 0, ...`: a column of size 0 shares the block of the column before it.
    dense: float `[N, K]`, appended as they are.

  Returns:
    float32 `[N, sum(vocabulary_sizes) + K]`.
  """
  ends = np.cumsum(vocabulary_sizes)
  starts = np.where(np.asarray(vocabulary_sizes) > 0, ends - vocabulary_sizes, -1)
  starts = np.maximum.accumulate(starts)
  present = ids >= 0
  columns = (ids + starts)[present]
  row_ends = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
  matrix = scipy.sparse.csr_matrix(
    (np.ones(columns.size, np.float32), columns, row_ends), shape=(len(ids), int(ends[-1]))
  )
  if dense is None or dense.shape[1] == 0:
    return matrix
  return scipy.sparse.hstack([matrix, scipy.sparse.csr_matrix(dense)], format="csr")


def logistic_regression(
  matrices: Mapping[str, scipy.sparse.csr_matrix],
  labels: Mapping[str, np.ndarray],
  *,
  inverse_penalties: Sequence[float],
) -> dict[str, float]:
  """Fits L2-regularised logistic regressions and tests the one that validation prefers.

  Args:
    matrices: `[N, columns]` by split: `train`, `valid`, `test`.
    labels: `[N]`, 0 or 1, by split.
    inverse_penalties: values of scikit-learn's `C` to choose from.

  Returns:
    `{"valid_auc", "valid_logloss", "test_auc", "test_logloss", "c", "rows"}` of the chosen fit.
  """
  best: dict[str, float] = {}
  for c in inverse_penalties:
    # scikit-learn's default tolerance is on the gradient of the mean loss, in which an id seen once
    # in ten thousand rows hardly shows: rare ids would stay untrained.
    model = LogisticRegression(C=c, solver="lbfgs", max_iter=200, tol=1e-7)
    with warnings.catch_warnings():
      # A weak penalty may not converge in 200 rounds; validation decides whether that matters.
      warnings.simplefilter("ignore", ConvergenceWarning)
      model.fit(matrices["train"], labels["train"])
    scores = _scores(model, matrices["valid"], labels["valid"], "valid")
    if not best or scores["valid_auc"] > best["valid_auc"]:
      best = scores | _scores(model, matrices["test"], labels["test"], "test") | {"c": float(c)}
  return best | {"rows": int(matrices["train"].shape[0])}


def _scores(model, matrix, labels, split: str) -> dict[str, float]:
  metrics = ClickMetrics()
  metrics.update(model.decision_function(matrix), labels)
  return {f"{split}_{name}": value for name, value in metrics.compute().items()}
