"""Baselines of rankings without a neural network: what a result has to be better than."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.linalg
import scipy.sparse
import threadpoolctl
from ml_collections import ConfigDict
from scipy.sparse import csr_matrix

from .. import packing
from ..errors import UserError
from ..run import scalars
from .metrics import RankingMetrics

# EASE inverts a dense [items, items] matrix in float64, in place: 5 GB of this many items.
_MAX_EASE_ITEMS = 25_000
_NEIGHBOURS, _BLOCK = 100, 128
_EXAMPLES = 512  # ranked at once, by the scores of all items
# Pairs of items of one user, over all users: a minute or two.
_MAX_KNN_PAIRS = 10**10


Scorer = Callable[[csr_matrix], np.ndarray]  # of histories to scores, both `[B, items]`
Task = Callable[[], Mapping[str, float]]  # fits a baseline and returns its metrics


def tasks(
  train: csr_matrix,
  histories: Mapping[str, csr_matrix],
  relevant: Mapping[str, csr_matrix],
  config: ConfigDict,
) -> dict[str, Task]:
  """Returns functions that fit a baseline and return its metrics, by the baseline's name.

  Item kNN is left out where users have too many items in all.

  Args:
    train: `[users, items]`, ones.
    histories: by split, `valid` and `test`, the items that each example asks with.
    relevant: by split, as for `ranking`; a split without a relevant item has no metrics.
    config: `ks`, `exclude_seen` and `baseline.ease_l2`.
  """
  popular = popularity(train)
  fits: dict[str, Callable[[], Scorer]] = {
    "popularity": lambda: lambda rows: np.tile(popular, (rows.shape[0], 1))
  }
  if np.square(np.diff(train.indptr), dtype=np.float64).sum() <= _MAX_KNN_PAIRS:
    fits["item kNN"] = lambda: _product(item_knn(train))
  if config.baseline.ease_l2:
    fits["EASE"] = lambda: _product(ease(train, config.baseline.ease_l2))

  def measured(fit: Callable[[], Scorer]) -> dict[str, float]:
    scorer, metrics = fit(), dict[str, float]()
    for split, rows in histories.items():
      if relevant[split].nnz:
        scores = lambda start, stop, rows=rows: scorer(rows[start:stop])
        seen = rows if config.exclude_seen else None
        metrics |= scalars(split, ranking(scores, relevant[split], seen, config.ks))
    return metrics

  return {name: functools.partial(measured, fit) for name, fit in fits.items()}


def _product(weights: Any) -> Scorer:
  dense = lambda scores: scores.toarray() if scipy.sparse.issparse(scores) else scores
  return lambda rows: dense(rows @ weights)


def ranking(
  scores: Callable[[int, int], np.ndarray],
  relevant: csr_matrix,
  seen: csr_matrix | None,
  ks: Sequence[int],
) -> dict[str, float]:
  """Computes the metrics of full rankings; see `RankingMetrics`.

  Args:
    scores: `(start, stop) -> [stop - start, items]`, the scores of all items for these examples.
    relevant: `[examples, items]`, nonzero where an item is right.
    seen: `[examples, items]`, nonzero where an item is left out of the ranking; None leaves out
      nothing.
    ks: cutoffs of the metrics.
  """
  metrics = RankingMetrics(ks)
  best = jax.jit(jax.lax.top_k, static_argnums=1)  # of equal scores the lower id is first
  for start in range(0, relevant.shape[0], _EXAMPLES):
    stop = min(start + _EXAMPLES, relevant.shape[0])
    ranked = np.array(scores(start, stop), np.float32)
    if seen is not None:
      ranked[seen[start:stop].nonzero()] = -np.inf
    values, ids = map(np.asarray, best(np.where(ranked == 0, 0.0, ranked), max(ks)))  # no -0.0
    targets, top_ids = relevant[start:stop], np.where(values == -np.inf, -1, ids)
    lengths = np.diff(targets.indptr)
    width = max(int(lengths.max(initial=0)), 1)
    metrics.update(top_ids, packing.padded(targets.indices, lengths, width))
  return metrics.compute()


def ones(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
  """Returns a float32 matrix with 1 at these places, which may come more than once."""
  matrix = csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape)
  matrix.data[:] = 1  # the same places were added up
  return matrix


def popularity(train: csr_matrix) -> np.ndarray:
  """Returns how often each item is in `train` `[users, items]`: the same scores for all."""
  return np.asarray(train.sum(axis=0)).ravel()


def item_knn(train: csr_matrix, neighbours: int = _NEIGHBOURS) -> csr_matrix:
  """Returns sparse weights W `[items, items]`; scores are `train @ W`.

  `W[i, j]` is the cosine of the users of i and j if i is among the `neighbours` items that are most
  like j, else 0, as on the diagonal (Sarwar et al. 2001, "Item-Based Collaborative Filtering").
  """
  items = train.shape[1]
  unit = train @ scipy.sparse.diags(1 / np.sqrt(np.maximum(popularity(train), 1)))
  by_item, columns, values = unit.T.tocsr(), [], []
  for rows in _blocks(items):
    block = (by_item[rows] @ unit).tocsr()
    for place, item in enumerate(range(rows.start, rows.stop)):
      row = slice(*block.indptr[place : place + 2])
      near, cosine = block.indices[row], block.data[row]
      near, cosine = near[near != item], cosine[near != item]
      best = np.argsort(-cosine, kind="stable")[:neighbours]
      columns.append(near[best])
      values.append(cosine[best])
  ends = np.cumsum([0, *map(len, columns)])
  parts = np.concatenate(values), np.concatenate(columns), ends
  return csr_matrix(parts, (items, items)).T.tocsr()


def ease(train: csr_matrix, l2: float) -> np.ndarray:
  """Returns EASE's weights W `[items, items]`; scores are `train @ W`.

  Steck 2019, "Embarrassingly Shallow Autoencoders for Sparse Data": with `P` the inverse of
  `train.T @ train + l2`, `W[i, j] = -P[i, j] / P[j, j]` and 0 on the diagonal.
  """
  items = train.shape[1]
  if items > _MAX_EASE_ITEMS:
    raise UserError(
      f"EASE inverts a dense matrix of {items} x {items} items, {items**2 * 8 / 1e9:.0f} GB: it is "
      f"made for up to {_MAX_EASE_ITEMS}. Leave it out: config.baseline.ease_l2."
    )
  weights, by_item = np.empty((items, items)), train.T.astype(np.float64).tocsr()
  for rows in _blocks(items):  # the sparse product as a whole may be larger than the dense one
    weights[rows] = (by_item[rows] @ train).toarray()
  weights[np.diag_indices(items)] += l2
  # One thread: OpenBLAS 0.3.30 ends in a segmentation fault when several factorize 16,000 columns.
  with threadpoolctl.threadpool_limits(1, user_api="blas"):
    weights = scipy.linalg.inv(weights, overwrite_a=True, check_finite=False)
  weights /= -np.diag(weights).copy()
  weights[np.diag_indices(items)] = 0.0
  return weights


def _blocks(size: int) -> Iterator[slice]:
  for start in range(0, size, _BLOCK):
    yield slice(start, min(start + _BLOCK, size))
