"""Metrics of clicks and of rankings: exact, fed batch by batch.

The scores of clicks are kept and not binned, because streaming AUCs with constant memory (keras and
metrax with 200 thresholds, torchmetrics with `thresholds=`) approximate the curve, and the error
grows as the scores crowd together near 0, as click probabilities do; it can exceed the differences
that papers report. Exact AUC needs the order of all scores. That costs 5 bytes an example on the
host, 30 MB for the test day of Criteo Kaggle, and the log loss comes from the same scores.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from .errors import UserError


class ClickMetrics:
  """Collects logits and labels, and computes AUC (ROC) and log loss over all of them."""

  def __init__(self) -> None:
    self._logits: list[np.ndarray] = []
    self._labels: list[np.ndarray] = []

  def update(self, logits, labels, mask=None) -> None:
    """Adds one batch.

    Args:
      logits: float `[B]`, before the sigmoid.
      labels: `[B]`, 0 or 1.
      mask: bool `[B]`, False for rows that only fill up the last batch; None counts all rows.

    Raises:
      ValueError: the shapes differ or are not `[B]`.
    """
    logits, labels = np.asarray(logits), np.asarray(labels)
    mask = np.ones(labels.shape, bool) if mask is None else np.asarray(mask)
    if not logits.shape == labels.shape == mask.shape or logits.ndim != 1:
      raise ValueError(
        f"logits {logits.shape}, labels {labels.shape} and mask {mask.shape} must all be [batch]"
      )
    self._logits.append(logits[mask].astype(np.float32))
    self._labels.append(labels[mask].astype(np.uint8))

  def compute(self) -> dict[str, float]:
    """Returns `{"auc": ..., "logloss": ...}`.

    Raises:
      ValueError: there is no click or nothing but clicks, so that AUC is undefined; or a logit is
        not a number.
    """
    logits = np.concatenate([np.empty(0, np.float32), *self._logits])
    labels = np.concatenate([np.empty(0, np.uint8), *self._labels])
    if not np.isfinite(logits).all():
      raise UserError("the model's logits are not finite: lower the learning rates")
    clicks = int(labels.sum())
    if clicks in (0, labels.size):
      raise UserError(
        f"AUC needs both outcomes, but {clicks} of the {labels.size} examples are clicks: "
        "take a larger split"
      )
    # In float32 expit(17) is 1.0, and one such mistake would make the log loss infinite.
    probabilities = expit(logits.astype(np.float64))
    return {
      "auc": float(roc_auc_score(labels, logits)),
      "logloss": float(log_loss(labels, probabilities)),
    }


class RankingMetrics:
  """Collects what was recommended and what was right, and averages over the examples.

  Recall@k is the hits among the first k over the number of relevant items, the definition of
  RecBole and LightGCN; HR@k whether there was a hit; NDCG@k discounts by log2(rank + 1) and divides
  by what min(k, relevant) hits at the top would get; MRR is 1 / rank of the first hit among all
  recommended items, 0 without one. An example without a relevant item does not count.

  Args:
    ks: the cutoffs.
    mrr: whether to compute it.
  """

  def __init__(self, ks: Sequence[int], *, mrr: bool = True):
    self._ks, self._mrr = tuple(ks), mrr
    self._sums: dict[str, float] = {}
    self._examples = 0

  def update(self, top_ids, relevant, mask=None) -> None:
    """Adds one batch.

    Args:
      top_ids: int `[B, K]`, the best first, each id once; negative where there is none.
      relevant: int `[B, R]`, in any order, each id once; negative where there is none.
      mask: bool `[B]`, False for examples that only fill up the last batch; None counts all.

    Raises:
      ValueError: shapes do not fit, K is less than the largest cutoff, or an id appears twice.
    """
    top_ids, relevant = np.asarray(top_ids), np.asarray(relevant)
    if top_ids.ndim != 2 or relevant.ndim != 2 or len(top_ids) != len(relevant):
      raise ValueError(
        f"top_ids {top_ids.shape} and relevant {relevant.shape} must be [batch, K] and [batch, R]"
      )
    if top_ids.shape[1] < max(self._ks):
      raise ValueError(f"{top_ids.shape[1]} ids a row, for metrics at {max(self._ks)}")
    counted = (relevant >= 0).any(axis=1) & (True if mask is None else np.asarray(mask))
    top_ids, relevant = top_ids[counted], relevant[counted]
    for name, ids in (("top_ids", top_ids), ("relevant", relevant)):
      if _repeats(ids):
        raise ValueError(f"an id appears twice in a row of {name}: every hit counts once")
    hits = _member(top_ids, relevant)
    totals = (relevant >= 0).sum(axis=1)
    for name, values in _ranking(hits, totals, self._ks, self._mrr):
      self._sums[name] = self._sums.get(name, 0.0) + float(values.sum(dtype=np.float64))
    self._examples += len(hits)

  def compute(self) -> dict[str, float]:
    """Returns `{"recall@k", "ndcg@k", "hr@k" for every k, "mrr"}`.

    Raises:
      ValueError: there was no example with a relevant item.
    """
    if not self._examples:
      raise UserError("no example has a relevant item: take a larger split")
    return {name: total / self._examples for name, total in self._sums.items()}


def _ranking(
  hits: np.ndarray, totals: np.ndarray, ks: Sequence[int], mrr: bool
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields each metric's value of every example, from hits bool `[B, K]` and relevant items."""
  discounts = 1 / np.log2(np.arange(2, hits.shape[1] + 2))
  ideal = np.concatenate([[0.0], np.cumsum(discounts)])
  for k in ks:
    first = hits[:, :k]
    yield f"recall@{k}", first.sum(axis=1) / totals
    yield f"ndcg@{k}", (first @ discounts[:k]) / ideal[np.minimum(totals, k)]
    yield f"hr@{k}", np.asarray(first.any(axis=1))
  if mrr:
    yield "mrr", np.where(hits.any(axis=1), 1 / (1 + hits.argmax(axis=1)), 0.0)


def _repeats(ids: np.ndarray) -> bool:
  ordered = np.sort(ids, axis=1)
  return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def _member(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
  """Returns bool `[B, K]`: whether each id is in its row of `of` `[B, R]`; a negative one never is.

  A row's ids are shifted into a range of their own, so that one sorted search answers for all.
  """
  size = max(ids.max(initial=0), of.max(initial=0)) + 1
  shift = size * np.arange(len(ids), dtype=np.int64)[:, None]
  return np.isin(ids + shift, (of + shift)[of >= 0]) & (ids >= 0)
