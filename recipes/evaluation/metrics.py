"""Metrics of clicks, also within users, and of rankings, fed batch by batch."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.special import entr, expit
from sklearn.metrics import log_loss, roc_auc_score

from ..errors import UserError

CLICK_NAMES = ("auc", "logloss", "ne", "calibration")


def click_metrics(logits, labels, weights=None) -> dict[str, float]:
  """Computes the metrics that the examples define, in float64, by scikit-learn.

  `auc` and `logloss` are scikit-learn's. `ne` is the normalized entropy, the log loss over the one
  of predicting the rate of clicks for every example (He et al. 2014, equation 1): below 1 is better
  than that rate. `calibration` is the mean prediction over the rate of clicks; 1 is best.

  `auc` and `ne` need both outcomes, `calibration` needs clicks, and all need a positive weight.

  Args:
    logits: float `[N]`, before the sigmoid.
    labels: `[N]`, 0 or 1.
    weights: float `[N]`, 0 or more, how often an example counts; None counts each once.

  >>> metrics = click_metrics([0.0, 1.0, -1.0], [1, 0, 0])
  >>> metrics["auc"]  # of the two pairs, one is in order
  0.5
  >>> round(metrics["calibration"], 6)  # predictions of 1/2 on average, and a click in 3
  1.5
  """
  logits, labels = np.asarray(logits, np.float64), np.asarray(labels)
  weights = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
  if not np.isfinite(logits).all():
    raise UserError("the model's logits are not finite: lower the learning rates")
  clicks, total = float(weights[labels == 1].sum()), float(weights.sum())
  if not total:
    return {}
  # In float32 expit(17) is 1.0, and one such mistake would make the log loss infinite.
  predictions, rate = expit(logits), clicks / total
  loss = float(log_loss(labels, predictions, labels=[0, 1], sample_weight=weights))
  metrics = {"logloss": loss}
  if 0 < rate < 1:
    auc = float(roc_auc_score(labels, logits, sample_weight=weights))
    metrics = {"auc": auc, "logloss": loss, "ne": loss / float(entr(rate) + entr(1 - rate))}
  if clicks:
    metrics["calibration"] = float(weights @ predictions) / clicks
  return metrics


def gain(metric: str, value: float) -> float:
  """Returns a number that is larger the better the value of a metric is.

  Losses and normalized entropies are best small, a calibration at 1, all else large. The name may
  begin with a split, as "valid_auc".

  >>> gain("test_logloss", 0.5), gain("calibration", 0.75), gain("ndcg@10", 0.2)
  (-0.5, -0.25, 0.2)
  """
  metric = metric.rpartition("_")[2]
  if metric == "calibration":
    return -abs(value - 1)
  return -value if metric.endswith("loss") or metric == "ne" else value


# --- users ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Users:
  """The users of examples, for GAUC.

  Attributes:
    feature: with the user of each example; "" where none is declared.
    known: its first ids, each of which is one user; users that training has not seen share the
      others, which have no part in GAUC. 0: every id is a user.
  """

  feature: str = ""
  known: int = 0

  def codes(self, ids: Any) -> np.ndarray:
    """Returns `ids` as numbers of users, int `[N]`, of which negative ones have no part in GAUC.

    Args:
      ids: int32 `[N]`, negative where there is none.

    >>> Users("user", known=2).codes(np.array([0, 1, 2, -1])).tolist()
    [0, 1, -1, -1]
    """
    return np.where(ids < (self.known or np.inf), ids, -1)


def gauc(logits, labels, users, weights) -> dict[str, float]:
  """Computes the mean AUC of users, and the share of the examples that it covers.

  The AUC of each user's examples is weighted by the sum of their weights (Zhou et al. 2018,
  equation 7). Users with one outcome have no AUC, and are left out.

  Args:
    logits, labels, weights: `[N]` each, as for `click_metrics`.
    users: int `[N]`; examples of a negative one are left out.

  Returns:
    `gauc`, where some user has both outcomes, and `gauc_share`, from 0 to 1.

  >>> gauc([1.0, 2.0, 3.0, 5.0], [1, 0, 1, 1], [7, 7, 7, 8], np.ones(4))  # one pair of two
  {'gauc': 0.5, 'gauc_share': 0.75}
  """
  total, users = float(np.sum(weights, dtype=np.float64)), np.asarray(users)
  order = np.lexsort((logits, users))[np.count_nonzero(users < 0) :]
  logits, labels, users, weights = (
    np.asarray(x, np.float64)[order] for x in (logits, labels, users, weights)
  )
  # Examples of one user and one logit are a tie; `user` numbers the user of each tie.
  starts_user = np.diff(users, prepend=np.nan) != 0
  starts_tie = starts_user | (np.diff(logits, prepend=np.nan) != 0)
  tie, user = np.cumsum(starts_tie) - 1, (np.cumsum(starts_user) - 1)[starts_tie]
  clicks, misses = (np.bincount(tie, weights * x) for x in (labels, 1 - labels))
  by_user = lambda x: np.bincount(user, x)
  below = np.cumsum(misses) - 0.5 * misses  # half of a tie is in order
  of_earlier_users = np.cumsum(by_user(misses)) - by_user(misses)
  in_order = by_user(clicks * (below - of_earlier_users[user]))
  pairs, amount = by_user(clicks) * by_user(misses), by_user(clicks + misses)
  counted = pairs > 0
  if not counted.any():
    return {"gauc_share": 0.0}
  value = np.average(in_order[counted] / pairs[counted], weights=amount[counted])
  return {"gauc": float(value), "gauc_share": float(amount[counted].sum()) / total}


# --- rankings -------------------------------------------------------------------------------------


def ranking_names(ks: Sequence[int], num_items: int) -> tuple[str, ...]:
  """Returns the names of the metrics of a run's rankings that can select a state.

  Raises:
    UserError: a cutoff is larger than the catalogue.

  >>> ranking_names([10], 40)
  ('recall@10', 'ndcg@10', 'hr@10', 'precision@10', 'mrr')
  """
  if not all(0 < k <= num_items for k in ks):
    fit = tuple(k for k in ks if 0 < k <= num_items) or (num_items,)
    raise UserError(
      f"config.ks is {tuple(ks)}, and the catalogue has {num_items} items: write "
      f"--config.ks='{fit}', and for example --config.select=valid_ndcg@{fit[0]}"
    )
  names = ("recall", "ndcg", "hr", "precision")
  return (*(f"{name}@{k}" for k in ks for name in names), "mrr")


class RankingMetrics:
  """Metrics of recommended items, averaged over the examples, in float64 on the host.

  Recall@k is the hits among the first k over the number of relevant items, the definition of
  RecBole and LightGCN; precision@k the hits over k; HR@k whether there was a hit; NDCG@k discounts
  by log2(rank + 1) and divides by what min(k, relevant) hits at the top would get; MRR is 1 / rank
  of the first hit among all recommended items, 0 without one. An example without a relevant item
  does not count.

  Args:
    ks: cutoffs.

  >>> metrics = RankingMetrics([2])
  >>> metrics.update([[1, 0], [1, 0]], [[0], [1]])
  >>> metrics.compute()["hr@2"], metrics.compute()["precision@2"]
  (1.0, 0.5)
  """

  def __init__(self, ks: Sequence[int]):
    self._ks, self._examples, self._sums = tuple(ks), 0, dict[str, float]()

  def update(self, top_ids, relevant, mask=True) -> None:
    """Adds a batch.

    Args:
      top_ids: int `[B, K]`, the best first, each id once; negative where there is none.
      relevant: int `[B, R]`, in any order, each id once; negative where there is none.
      mask: bool `[B]`, False for examples that only fill up the last batch; True counts all.
    """
    top_ids, relevant = np.asarray(top_ids), np.asarray(relevant)
    counted = (relevant >= 0).any(axis=1) & mask
    top_ids, relevant = top_ids[counted], relevant[counted]
    hits, totals = _is_member(top_ids, relevant), (relevant >= 0).sum(axis=1)
    self._examples += len(hits)
    for name, x in _ranking(hits, totals, self._ks):
      self._sums[name] = self._sums.get(name, 0.0) + x.sum(dtype=np.float64)

  def compute(self) -> dict[str, float]:
    """Returns `{"recall@k", "ndcg@k", "hr@k", "precision@k" for every k, "mrr"}`."""
    if not self._examples:
      raise UserError("no example has a relevant item: take a larger split")
    return {name: float(x / self._examples) for name, x in self._sums.items()}


def _ranking(
  hits: np.ndarray, totals: np.ndarray, ks: Sequence[int]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the values of every example, from hits bool `[B, K]` and numbers of relevant items."""
  discounts = 1 / np.log2(np.arange(2, hits.shape[1] + 2))
  ideal = np.concatenate([[0.0], np.cumsum(discounts)])
  for k in ks:
    first = hits[:, :k]
    yield f"recall@{k}", first.sum(axis=1) / totals
    yield f"ndcg@{k}", (first @ discounts[:k]) / ideal[np.minimum(totals, k)]
    yield f"hr@{k}", np.asarray(first.any(axis=1))
    yield f"precision@{k}", first.sum(axis=1) / k
  yield "mrr", np.where(hits.any(axis=1), 1 / (1 + hits.argmax(axis=1)), 0.0)


def _is_member(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """Returns bool `[B, K]`: whether each id is in its row of `rows` `[B, R]`; negative ones are not.

  A row's ids are shifted into a range of their own, so that one sorted search answers for all.
  """
  size = max(ids.max(initial=0), rows.max(initial=0)) + 1
  shift = size * np.arange(len(ids), dtype=np.int64)[:, None]
  return np.isin(ids + shift, (rows + shift)[rows >= 0]) & (ids >= 0)
