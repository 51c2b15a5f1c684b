"""Metrics of clicks, on all rows of a split, and of rankings, fed batch by batch."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import entr, expit
from sklearn.metrics import log_loss, roc_auc_score

from ..errors import UserError

CLICK_NAMES = ("auc", "logloss", "ne", "calibration")


def click_metrics(logits, labels, weights=None, *, strict: bool = True) -> dict[str, float]:
  """Returns the metrics of examples, in float64, as scikit-learn does.

  `auc` and `logloss` are scikit-learn's. `ne` is the normalized entropy, the log loss over that of
  predicting the rate of clicks for every example (He et al. 2014, equation 1): below 1 is better
  than that rate. `calibration` is the mean prediction over the rate of clicks; 1 is best.

  Args:
    logits: float `[N]`, before the sigmoid.
    labels: `[N]`, 0 or 1.
    weights: float `[N]`, 0 or more, how often an example counts; None counts each once.
    strict: False leaves out what the examples do not define, instead of raising: `auc` and `ne`
      need both outcomes, `calibration` needs clicks, and all need examples with a weight.

  Raises:
    UserError: there is no click or nothing but clicks, so that AUC is undefined; or a logit is not
      a number.

  >>> found = click_metrics([0.0, 1.0, -1.0], [1, 0, 0])
  >>> found["auc"]  # of the two pairs, one is in order
  0.5
  >>> round(found["calibration"], 6)  # predictions of 1/2 on average, and a click in 3
  1.5
  """
  logits, labels = np.asarray(logits, np.float64), np.asarray(labels)
  weights = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
  clicks, total = float(weights[labels == 1].sum()), float(weights.sum())
  if not np.isfinite(logits).all():
    raise UserError("the model's logits are not finite: lower the learning rates")
  if strict and clicks in (0, total):
    raise UserError(
      f"AUC needs both outcomes, but {clicks:.16g} of the {total:.16g} examples are clicks: take a "
      "larger split"
    )
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


def reliability(logits, labels, weights, bins: int = 20) -> np.ndarray:
  """Returns the reliability histogram: bins of examples in the order of their predictions.

  Bins have about equally many examples, since clicks are rare, and equal widths would leave nearly
  all predictions in the first one.

  Args:
    logits: float `[N]`, before the sigmoid.
    labels: `[N]`, 0 or 1.
    weights: float `[N]`, how often an example counts.
    bins: at most so many; examples with one prediction are in one bin.

  Returns:
    float64 `[bins, 3]`: mean prediction, rate of clicks, and the share of the examples.
  """
  values, place = np.unique(np.asarray(logits, np.float64), return_inverse=True)
  amount, clicks = (np.bincount(place, weights * x) for x in (np.ones(len(labels)), labels))
  middle = (np.cumsum(amount) - amount / 2) / amount.sum()
  of = np.minimum((middle * bins).astype(int), bins - 1)
  sums = [np.bincount(of, x, bins) for x in (amount * expit(values), clicks, amount)]
  predicted, clicked, total = np.stack(sums)[:, sums[2] > 0]
  return np.stack([predicted / total, clicked / total, total / amount.sum()], axis=1)


# --- clicks, by user and by slice -----------------------------------------------------------------


def gauc(logits, labels, users, weights=None) -> tuple[float | None, float]:
  """Returns the AUC within users, and the share of the examples that it is of.

  The AUC of each user's examples is weighted by their number (Zhou et al. 2018, equation 7), or by
  the sum of their weights. Users with one outcome have no AUC, and are left out.

  Args:
    logits: float `[N]`.
    labels: `[N]`, 0 or 1.
    users: int `[N]`, which user each example is of.
    weights: float `[N]`, 0 or more, how often an example counts; None counts each once.

  Returns:
    The AUC, None where no user has both outcomes, and the share, from 0 to 1.

  >>> gauc([1.0, 2.0, 3.0, 5.0], [1, 0, 1, 1], [7, 7, 7, 8])  # of user 7 one pair of two
  (0.5, 0.75)
  """
  logits, users = np.asarray(logits, np.float64), np.asarray(users)
  weights = np.ones(len(logits)) if weights is None else np.asarray(weights, np.float64)
  order = np.lexsort((logits, users))
  logits, users, weights = logits[order], users[order], weights[order]
  clicks = np.where(np.asarray(labels)[order] == 1, weights, 0)
  is_new_user = np.append(True, users[1:] != users[:-1])[: len(users)]
  is_new = np.append(True, is_new_user[1:] | (logits[1:] != logits[:-1]))[: len(users)]
  tie = np.cumsum(is_new) - 1  # examples of one user and one logit
  user = (np.cumsum(is_new_user) - 1)[is_new]
  clicks, misses = np.bincount(tie, clicks), np.bincount(tie, weights - clicks)
  of_user = lambda x: np.bincount(user, x)
  below = np.cumsum(misses) - 0.5 * misses
  before = np.append(0, np.cumsum(of_user(misses)))[:-1]  # of earlier users
  in_order, pairs = of_user(clicks * (below - before[user])), of_user(clicks) * of_user(misses)
  amount = of_user(clicks + misses)
  has_both = pairs > 0
  share = float(amount[has_both].sum() / max(amount.sum(), 1e-300))
  if not has_both.any():
    return None, 0.0
  return float(np.average(in_order[has_both] / pairs[has_both], weights=amount[has_both])), share


@dataclasses.dataclass(frozen=True)
class Groups:
  """The groups of examples that are measured apart.

  Attributes:
    user: the feature with the user of each example; "" where none is known.
    num_users: the ids of `user` that are of one user each, the first ones; the others are shared by
      users that training has not seen, and have no part in GAUC. None: every id is a user's.
    slices: features, and what each of their ids is called.
  """

  user: str = ""
  num_users: int | None = None
  slices: tuple[tuple[str, tuple[str, ...]], ...] = ()

  def __bool__(self) -> bool:
    return bool(self.user or self.slices)

  @property
  def features(self) -> tuple[str, ...]:
    """The features whose ids tell the groups."""
    return tuple({name: None for name in (self.user, *dict(self.slices)) if name})

  @property
  def names(self) -> tuple[str, ...]:
    """The names that select a state, each of which is there if its group has both outcomes."""
    slices = [f"{name}={value}" for name, values in self.slices for value in values]
    of_users = ("gauc",) if self.user else ()
    return (*of_users, *(f"{metric}[{each}]" for each in slices for metric in CLICK_NAMES))


def group_metrics(
  groups: Groups, logits, labels, weights, ids: Mapping[str, Any]
) -> dict[str, float]:
  """Returns the metrics of users and slices by name.

  With users `gauc` and `gauc_share`; see `gauc`. For each slice the metrics of `click_metrics` that
  its rows define, as `auc[sex=F]`, and for a column some of whose slices have rows of one outcome
  only, how many these are: `one_outcome[sex]`.

  Args:
    groups: what to measure.
    logits, labels, weights: `[N]` each, as of `click_metrics`.
    ids: int32 `[N]` of the groups' features, negative where there is none; raw ids of a dynamic
      vocabulary uint32 `[N, 2]`.

  >>> groups = Groups("user", slices=(("sex", ("F", "M")),))
  >>> ids = {"user": np.array([0, 0, 1, 1]), "sex": np.array([0, 0, 0, 1])}
  >>> rows = np.array([1.0, 0.0, 2.0, 3.0]), np.array([1, 0, 0, 1]), np.ones(4)
  >>> found = group_metrics(groups, *rows, ids)
  >>> found["gauc"], found["auc[sex=F]"], found["one_outcome[sex]"]
  (1.0, 0.5, 1.0)
  """
  examples, metrics = (logits, labels, weights), dict[str, float]()
  if groups.user:
    users = _as_users(ids[groups.user], groups.num_users)
    known = users >= 0
    logit, label, amount = (x[known] for x in examples)
    within, share = gauc(logit, label, users[known], amount)
    metrics |= {"gauc": within} if within is not None else {}
    of_all = weights.sum(dtype=np.float64) or 1.0
    metrics["gauc_share"] = share * float(amount.sum(dtype=np.float64) / of_all)
  for name, values in groups.slices:
    one_outcome = 0
    for value, text in enumerate(values):
      found = click_metrics(*(x[ids[name] == value] for x in examples), strict=False)
      metrics |= {f"{metric}[{name}={text}]": x for metric, x in found.items()}
      one_outcome += bool(found) and "auc" not in found
    metrics |= {f"one_outcome[{name}]": float(one_outcome)} if one_outcome else {}
  return metrics


def _as_users(ids: np.ndarray, num_users: int | None) -> np.ndarray:
  """Returns a number for each user, int64 `[N]`; -1 for none, and for ids that users share."""
  if ids.ndim == 2:  # halves of a raw id, all of whose bits are set where there is none
    whole = ids.astype(np.uint64) @ np.array([1 << 32, 1], np.uint64)
    codes = np.unique(whole, return_inverse=True)[1].astype(np.int64)
    return np.where(whole == np.uint64(2**64 - 1), -1, codes)
  return np.where(ids < (2**31 - 1 if num_users is None else num_users), ids, -1).astype(np.int64)


# --- rankings -------------------------------------------------------------------------------------


def ranking_names(ks: Sequence[int], num_items: int) -> tuple[str, ...]:
  """Returns the names of what a run's `RankingMetrics` computes that can select a state.

  Raises:
    UserError: a cutoff is not between 1 and the number of items; says which ones to write.

  >>> ranking_names([10], 40)
  ('recall@10', 'ndcg@10', 'hr@10', 'precision@10', 'coverage@10', 'mrr')
  """
  if not ks or not all(0 < k <= num_items for k in ks):
    fit = tuple(k for k in ks if 0 < k <= num_items) or (num_items,)
    raise UserError(
      f"config.ks is {tuple(ks)}, and the catalogue has {num_items} items: cutoffs are from 1 to "
      f"that number. Write --config.ks='{fit}', and for example "
      f"--config.select=valid_ndcg@{fit[0]}"
    )
  each = ("recall", "ndcg", "hr", "precision", "coverage")
  return (*(f"{name}@{k}" for k in ks for name in each), "mrr")


@dataclasses.dataclass(frozen=True)
class RankingMetrics:
  """What was recommended and what was right, averaged over the examples, in float64 on the host.

  Recall@k is the hits among the first k over the number of relevant items, the definition of
  RecBole and LightGCN; precision@k the hits over k; HR@k whether there was a hit; NDCG@k discounts
  by log2(rank + 1) and divides by what min(k, relevant) hits at the top would get; MRR is 1 / rank
  of the first hit among all recommended items, 0 without one. An example without a relevant item
  does not count.

  Coverage@k is the share of the catalogue that was among the first k of an example, and
  popularity@k the mean popularity of the items there, as RecBole's ItemCoverage and
  AveragePopularity.

  Attributes:
    sums: of the examples so far, float64 by name.
    examples: how many.
    best: int32 `[items]`, the best place, from 0, that an item has had; `[0]` without a catalogue.
    popularity: `[items]`, how often each item is in training; `[0]` if it is not known.

  >>> metrics = RankingMetrics.empty([2], popularity=[7, 3, 0])
  >>> found = metrics.update([[1, 0], [1, 0]], [[0], [1]]).compute()
  >>> found["hr@2"], found["precision@2"], found["popularity@2"], round(found["coverage@2"], 4)
  (1.0, 0.5, 5.0, 0.6667)
  """

  ks: tuple[int, ...]
  sums: dict[str, Any]
  examples: int
  best: np.ndarray
  popularity: np.ndarray

  @classmethod
  def empty(
    cls, ks: Sequence[int], *, num_items: int = 0, popularity: Any = None
  ) -> "RankingMetrics":
    """Returns the metric of no example.

    Args:
      num_items: the catalogue, for coverage; 0 measures none.
      popularity: `[items]`, how often each item is in training, for popularity and coverage.
    """
    popularity = np.empty(0) if popularity is None else np.asarray(popularity)
    best = np.full(len(popularity) or num_items, _NEVER, np.int32)
    return cls(tuple(ks), {}, 0, best, popularity)

  def update(self, top_ids, relevant, mask=None) -> "RankingMetrics":
    """Returns the metric with one batch more.

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
    if top_ids.shape[1] < max(self.ks):
      raise ValueError(f"{top_ids.shape[1]} ids a row, for metrics at {max(self.ks)}")
    counted = (relevant >= 0).any(axis=1) & (True if mask is None else np.asarray(mask))
    top_ids, relevant = top_ids[counted], relevant[counted]
    for name, ids in (("top_ids", top_ids), ("relevant", relevant)):
      ordered = np.sort(ids, axis=1)
      if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError(f"an id appears twice in a row of {name}: every hit counts once")
    hits = _member(top_ids, relevant)
    totals = (relevant >= 0).sum(axis=1)
    values = dict(_ranking(hits, totals, self.ks))
    if len(self.popularity):
      popular = np.where(top_ids >= 0, self.popularity[top_ids], 0)
      first = lambda x, k: x[:, :k].sum(axis=1)
      count = lambda k: np.maximum(first(top_ids >= 0, k), 1)
      values |= {f"popularity@{k}": first(popular, k) / count(k) for k in self.ks}
    best = self.best.copy()
    if len(best):
      places = np.broadcast_to(np.arange(top_ids.shape[1], dtype=np.int32), top_ids.shape)
      np.minimum.at(best, top_ids[top_ids >= 0], places[top_ids >= 0])
    sums = {name: self.sums.get(name, 0.0) + x.sum(dtype=np.float64) for name, x in values.items()}
    return dataclasses.replace(self, sums=sums, examples=self.examples + len(hits), best=best)

  def compute(self) -> dict[str, float]:
    """Returns `{"recall@k", "ndcg@k", "hr@k", "precision@k" for every k, "mrr"}`.

    With popularities `popularity@k`, and with a catalogue `coverage@k`.

    Raises:
      ValueError: there was no example with a relevant item.
    """
    if not self.examples:
      raise UserError("no example has a relevant item: take a larger split")
    metrics = {name: float(x / self.examples) for name, x in self.sums.items()}
    ks = self.ks if len(self.best) else ()
    return metrics | {f"coverage@{k}": float(np.mean(self.best < k)) for k in ks}


_NEVER = np.iinfo(np.int32).max


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


def _member(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
  """Returns bool `[B, K]`: whether each id is in its row of `of` `[B, R]`; a negative one never is.

  A row's ids are shifted into a range of their own, so that one sorted search answers for all.
  """
  size = max(ids.max(initial=0), of.max(initial=0)) + 1
  shift = size * np.arange(len(ids), dtype=np.int64)[:, None]
  return np.isin(ids + shift, (of + shift)[of >= 0]) & (ids >= 0)
