"""Baselines without a neural network, so that every result has a number to be measured against."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.linalg
import scipy.sparse
import threadpoolctl
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from .. import files, packing
from ..errors import UserError
from .metrics import RankingMetrics, click_metrics

# EASE inverts a dense [items, items] matrix in float64, in place: 5 GB of this many items.
_MAX_EASE_ITEMS = 25_000
_EASE_BLOCK = 1_024
_NEIGHBOURS, _KNN_BLOCK = 100, 128
# Pairs of items of one user, over all users: a minute or two.
_MAX_KNN_PAIRS = 10**10


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
  weights: Mapping[str, np.ndarray],
  *,
  inverse_penalties: Sequence[float],
) -> dict[str, float]:
  """Fits L2-regularised logistic regressions and tests the one that validation prefers.

  Args:
    matrices: `[N, columns]` by split: `train`, `valid` and `test`, which may have no rows.
    labels: `[N]`, 0 or 1, by split.
    weights: `[N]`, how much a row counts in the loss and the metrics, by split.
    inverse_penalties: values of scikit-learn's `C` to choose from.

  Returns:
    `{"valid_auc", "valid_logloss", "test_auc", "test_logloss", "c", "rows"}` of the chosen fit, the
    test's if it has rows.
  """

  def scores(model, split: str) -> dict[str, float]:
    if not matrices[split].shape[0]:
      return {}
    metrics = click_metrics(model.decision_function(matrices[split]), labels[split], weights[split])
    return {f"{split}_{name}": value for name, value in metrics.items()}

  best: dict[str, float] = {}
  with files.progress("logistic regression", len(inverse_penalties), "fit") as bar:
    for c in inverse_penalties:
      # scikit-learn's default tolerance is on the gradient of the mean loss, in which an id seen
      # once in ten thousand rows hardly shows: rare ids would stay untrained.
      model = LogisticRegression(C=c, solver="lbfgs", max_iter=200, tol=1e-7)
      with warnings.catch_warnings():
        # A weak penalty may not converge in 200 rounds; validation decides whether that matters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(matrices["train"], labels["train"], weights["train"])
      valid = scores(model, "valid")
      if not best or valid["valid_auc"] > best["valid_auc"]:
        best = valid | scores(model, "test") | {"c": float(c)}
      bar.update()
  return best | {"rows": int(matrices["train"].shape[0])}


# --- rankings ------------------------------------------------------------------------------------

Scores = Callable[[int, int], np.ndarray]  # (start, stop) -> [stop - start, items]
Scorer = Callable[[scipy.sparse.csr_matrix], np.ndarray]  # histories [B, items] -> [B, items]


def ranking(
  scores: Scores,
  relevant: scipy.sparse.csr_matrix,
  seen: scipy.sparse.csr_matrix | None,
  ks: Sequence[int],
  counts: np.ndarray | None = None,
  *,
  batch: int = 512,
) -> dict[str, float]:
  """Returns the metrics of full rankings; see `RankingMetrics`.

  Args:
    scores: returns the scores of all items for the examples from `start` to `stop`.
    relevant: `[examples, items]`, nonzero where an item is right.
    seen: `[examples, items]`, nonzero where an item is left out of the ranking; None leaves out
      nothing.
    counts: `[items]`, how often each item is in training, for its popularity; None is not known.
    batch: examples at once; `batch * items` scores are held.
  """
  metrics = RankingMetrics.empty(ks, num_items=relevant.shape[1], popularity=counts)
  best = jax.jit(jax.lax.top_k, static_argnums=1)  # of equal scores the lower id is first
  with files.progress("ranking", relevant.shape[0], "row") as bar:
    for start in range(0, relevant.shape[0], batch):
      stop = min(start + batch, relevant.shape[0])
      ranked = np.array(scores(start, stop), np.float32)
      if seen is not None:
        ranked[seen[start:stop].nonzero()] = -np.inf
      values, ids = map(np.asarray, best(np.where(ranked == 0, 0.0, ranked), max(ks)))  # no -0.0
      wanted, top_ids = relevant[start:stop], np.where(values == -np.inf, -1, ids)
      lengths = np.diff(wanted.indptr)
      width = max(int(lengths.max(initial=0)), 1)
      metrics = metrics.update(top_ids, packing.padded(wanted.indices, lengths, width))
      bar.update(stop - start)
  return metrics.compute()


def scorer(name: str, train: scipy.sparse.csr_matrix, l2: float = 0.0) -> Scorer:
  """Fits a baseline, and returns what scores all items for histories, ones in `[B, items]`.

  Args:
    name: "popularity", "item kNN" or "EASE".
    train: `[users, items]`, ones.
    l2: the penalty of EASE.
  """
  if name == "popularity":
    popular = popularity(train)
    return lambda histories: np.tile(popular, (histories.shape[0], 1))
  if name == "item kNN":
    nearest = item_knn(train)
    return lambda histories: (histories @ nearest).toarray()
  weights = ease(train, l2)
  return lambda histories: histories @ weights


def popularity(train: scipy.sparse.csr_matrix) -> np.ndarray:
  """Returns how often each item is in `train` `[users, items]`: the same scores for all."""
  return np.asarray(train.sum(axis=0)).ravel()


def can_fit_knn(lengths: np.ndarray) -> bool:
  """Returns whether users with so many training items, `[users]`, are few enough for item kNN."""
  return bool(np.square(lengths, dtype=np.float64).sum() <= _MAX_KNN_PAIRS)


def item_knn(train: scipy.sparse.csr_matrix, neighbours: int = _NEIGHBOURS):
  """Returns sparse weights W `[items, items]`, of which `train @ W` are the scores.

  `W[i, j]` is the cosine of the users of i and j if i is among the `neighbours` items that are most
  like j, else 0, as on the diagonal (Sarwar et al. 2001, "Item-Based Collaborative Filtering").
  """
  items = train.shape[1]
  unit = train @ scipy.sparse.diags(1 / np.sqrt(np.maximum(popularity(train), 1)))
  by_item, columns, values = unit.T.tocsr(), [], []
  for rows in _blocks(items, _KNN_BLOCK):
    block = (by_item[rows] @ unit).tocsr()
    for item, start, stop in zip(
      range(rows.start, rows.stop), block.indptr, block.indptr[1:], strict=False
    ):
      near, cosine = block.indices[start:stop], block.data[start:stop]
      near, cosine = near[near != item], cosine[near != item]
      best = np.argsort(-cosine, kind="stable")[:neighbours]
      columns.append(near[best])
      values.append(cosine[best])
  ends = np.cumsum([0, *map(len, columns)])
  parts = np.concatenate(values), np.concatenate(columns), ends
  return scipy.sparse.csr_matrix(parts, (items, items)).T.tocsr()


def ease(train: scipy.sparse.csr_matrix, l2: float) -> np.ndarray:
  """Returns EASE's weights W `[items, items]`, of which `train @ W` are the scores.

  Steck 2019, "Embarrassingly Shallow Autoencoders for Sparse Data": with `P` the inverse of
  `train.T @ train + l2`, `W[i, j] = -P[i, j] / P[j, j]` and 0 on the diagonal.

  Raises:
    ValueError: there are so many items that the dense matrix would not fit into memory.
  """
  items = train.shape[1]
  if items > _MAX_EASE_ITEMS:
    raise UserError(
      f"EASE inverts a dense matrix of {items} x {items} items, {items**2 * 8 / 1e9:.0f} GB: it is "
      f"made for up to {_MAX_EASE_ITEMS}. Leave it out: config.baseline.ease_l2."
    )
  gram, by_item = np.empty((items, items)), train.T.astype(np.float64).tocsr()
  for rows in _blocks(items):  # the sparse product as a whole may be larger than the dense one
    gram[rows] = (by_item[rows] @ train).toarray()
  gram[np.diag_indices(items)] += l2
  # A positive definite matrix: by Cholesky, in place, half the work of a general inverse. LAPACK
  # counts columns first, so that its upper triangle is the lower one here.
  # One thread: OpenBLAS 0.3.30 ends in a segmentation fault when several factorize 16,000 columns.
  with threadpoolctl.threadpool_limits(1, user_api="blas"):
    factor, failed = scipy.linalg.lapack.dpotrf(gram.T, lower=0, overwrite_a=1)
    if not failed:
      factor, failed = scipy.linalg.lapack.dpotri(factor, lower=0, overwrite_c=1)
  if failed:
    raise UserError(
      f"EASE's matrix of {items} items is not positive definite with a penalty of {l2}: raise it"
    )
  weights = factor.T  # rows first again: a product with a sparse matrix would copy it otherwise
  for rows in _blocks(items):
    weights[: rows.start, rows] = weights[rows, : rows.start].T
    square = np.tril(weights[rows, rows])
    weights[rows, rows] = square + np.tril(square, -1).T
  weights /= -np.diag(weights).copy()
  weights[np.diag_indices(items)] = 0.0
  return weights


def _blocks(size: int, block: int | None = None) -> Iterator[slice]:
  block = block or _EASE_BLOCK
  for start in range(0, size, block):
    yield slice(start, min(start + block, size))


def ranking_tasks(
  train: scipy.sparse.csr_matrix,
  histories: Mapping[str, scipy.sparse.csr_matrix],
  relevant: Mapping[str, scipy.sparse.csr_matrix],
  ks: Sequence[int],
  *,
  ease_l2: Sequence[float] = (),
  **options: Any,
) -> dict[str, Callable[[], dict[str, float]]]:
  """Returns, by name, functions that fit popularity, item kNN or EASE and return its metrics.

  Item kNN is left out where users have too many items in all, EASE where it has no penalty.

  Args:
    train: `[users, items]`, ones.
    histories, relevant, ks, options: as for `best_ranking`.
    ease_l2: penalties of EASE to choose from.
  """
  penalties: dict[str, Sequence[float]] = {
    "popularity": (0.0,),
    "item kNN": (0.0,) if can_fit_knn(np.diff(train.indptr)) else (),
    "EASE": tuple(ease_l2),
  }

  def fit(name: str) -> dict[str, float]:
    candidates = {l2: functools.partial(scorer, name, train, l2) for l2 in penalties[name]}
    return best_ranking(candidates, histories, relevant, ks, **options)

  return {name: functools.partial(fit, name) for name, values in penalties.items() if values}


def best_ranking(
  candidates: Mapping[float, Callable[[], Scorer]],
  histories: Mapping[str, scipy.sparse.csr_matrix],
  relevant: Mapping[str, scipy.sparse.csr_matrix],
  ks: Sequence[int],
  *,
  exclude_seen: bool,
  counts: np.ndarray | None = None,
  select: str = "",
) -> dict[str, float]:
  """Fits one model per hyperparameter and tests the one that validation prefers.

  Args:
    candidates: by the hyperparameter, a function that fits; see `scorer`.
    histories: by split, `valid` and `test`, the items that each example asks with.
    relevant: by split, as for `ranking`.
    exclude_seen: whether items of the history are left out of the ranking.
    counts: as for `ranking`.
    select: the metric that chooses one of several, as "ndcg@10".

  Returns:
    `{"valid_...", "test_...", "chosen"}`; `chosen` is the hyperparameter. A split without a
    relevant item has no metrics.

  Raises:
    ValueError: there are several hyperparameters and no validation to choose by.
  """
  if len(candidates) > 1 and not relevant["valid"].nnz:
    raise UserError(f"nothing is held out to choose one of {list(candidates)} on: give one value")
  best: dict[str, float] = {}
  for value, fit in candidates.items():
    scores = fit()

    def ranked(split: str, scores=scores) -> dict[str, float]:
      if not relevant[split].nnz:
        return {}
      of = lambda start, stop: scores(histories[split][start:stop])
      seen = histories[split] if exclude_seen else None
      metrics = ranking(of, relevant[split], seen, ks, counts)
      return {f"{split}_{name}": value for name, value in metrics.items()}

    valid = ranked("valid")
    if not best or valid[f"valid_{select}"] > best[f"valid_{select}"]:
      best = valid | ranked("test") | {"chosen": float(value)}
    del scores, ranked  # EASE's weights take gigabytes, and the next fit as much
  return best
