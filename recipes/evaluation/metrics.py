"""Metrics of clicks and of rankings, fed batch by batch.

Streaming AUCs with a few hundred thresholds (keras and metrax with 200, torchmetrics with
`thresholds=`) approximate the curve, and the error grows as the scores crowd together near 0, as
click probabilities do; it can exceed the differences that papers report. `click_metrics` takes all
scores at once, and is exact. `BinnedClickMetrics` counts logits in two
million bins on the devices, for any number of examples, and knows how far off it may be.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from ..errors import UserError


def click_metrics(logits, labels, weights=None) -> dict[str, float]:
  """Returns `{"auc", "logloss"}` of all examples at once, exactly as scikit-learn does.

  Args:
    logits: float `[N]`, before the sigmoid.
    labels: `[N]`, 0 or 1.
    weights: float `[N]`, 0 or more, how often an example counts; None counts each once.

  Raises:
    UserError: there is no click or nothing but clicks, so that AUC is undefined; or a logit is not
      a number.

  >>> click_metrics([0.0, 1.0, -1.0], [1, 0, 0])["auc"]  # of the two pairs, one is in order
  0.5
  """
  logits, labels = np.asarray(logits, np.float64), np.asarray(labels)
  weights = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
  clicks, total = float(weights[labels == 1].sum()), float(weights.sum())
  _check_outcomes(clicks, total, finite=bool(np.isfinite(logits).all()))
  # In float32 expit(17) is 1.0, and one such mistake would make the log loss infinite.
  return {
    "auc": float(roc_auc_score(labels, logits, sample_weight=weights)),
    "logloss": float(log_loss(labels, expit(logits), sample_weight=weights)),
  }


# The bins of logits: 2**16 for every unit from -16 to 16, and beyond that 2**10 for every power of
# two up to the largest float32.
_UNIT, _EDGE, _TAIL_BITS = 1 << 16, 16, 10
_EDGE_BITS = int(np.float32(_EDGE).view(np.int32))
_TAIL = (int(np.float32(np.inf).view(np.int32)) - _EDGE_BITS) >> (23 - _TAIL_BITS)
_MIDDLE = _UNIT * _EDGE
_BINS = 2 * (_TAIL + _MIDDLE) + 1  # the last one is for what is not finite
# scikit-learn clips probabilities to [eps, 1 - eps] of float64, which is logits to this.
_MAX_LOGIT = float(-np.log(np.finfo(np.float64).eps))
_MAX_COUNT = (1 << 32) - 1  # of a bin on a device
_MAX_WEIGHTED = 1 << 16  # examples whose weights are summed in float32 on a device
_PENDING = 8  # batches whose losses are not fetched: the host runs ahead of the devices by these


class BinnedClickMetrics:
  """Counts logits in fixed bins on the devices, and computes AUC (ROC) and log loss from that.

  Memory does not grow with the examples: a device holds 2 * 2.35 million counts, 19 MB, and the
  host 38 MB. On a mesh every device counts its own part of a batch, and nothing is sent before
  `compute`, which returns the same in every process.

  The AUC is the share of the pairs of a click and a non-click that are in order, ties counted half.
  Bins are in the order of the logits, so that a pair from two bins is counted as it is. A pair from
  one bin is counted as a tie, which is off by a half if it is not one. Hence the bound:

      |auc - exact auc| <= (pairs from one bin) / (2 * all pairs)

  `auc_error` returns it for the examples seen. Bins are 2**-16 wide for logits between -16 and 16,
  and 0.1 % of the logit beyond. Where scores have a spread of 1 or more, some 6e-6 of the pairs are
  from one bin or fewer: the bound is below 3e-6. As non-ties fall on both sides, the difference
  from scikit-learn is far smaller, around 1e-8 for a million examples. It is large where nearly all
  logits are equal to four digits, as those of a model that has not been trained.

  The weights of a bin are summed in float32 for up to 65,536 examples, and then in float64: the sum
  of n examples is off by at most 6e-8 * n of itself, .4 % if all logits are equal. The bound leaves
  that out, and the log loss does not depend on it.

  Args:
    mesh: over which the batches are split; None is one device.
    weighted: whether examples have weights; the bound is then of pairs by the product of theirs.

  >>> metrics = BinnedClickMetrics()
  >>> metrics.update(jnp.array([0.0, 1.0, -1.0, 9.0]), jnp.array([1, 0, 0, 1]), np.arange(4) < 3)
  >>> metrics.compute()["auc"], metrics.auc_error()
  (0.5, 0.0)
  """

  def __init__(self, mesh: Mesh | None = None, *, weighted: bool = False):
    self._zeros, self._add, self._sum = _compiled(mesh, jnp.float32 if weighted else jnp.uint32)
    self._counts, self._count = self._zeros(), 0  # on the devices; of examples, filling included
    self._most = _MAX_WEIGHTED if weighted else _MAX_COUNT
    self._total = np.zeros((2, _BINS), np.float64 if weighted else np.int64)
    self._loss = self._weight = 0.0
    self._sums: collections.deque[list[jax.Array]] = collections.deque()
    self._weighted = weighted

  def update(
    self,
    logits: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None = None,
    weight: jax.Array | None = None,
  ) -> None:
    """Adds one batch, without waiting for it.

    Args:
      logits: float `[B]`, before the sigmoid; on a mesh, a global array split over it.
      labels: `[B]`, 0 or 1.
      mask: bool `[B]`, False for rows that only fill up the last batch; None counts all rows.
      weight: float `[B]`, 0 or more, how often a row counts; given if `weighted`.

    Raises:
      ValueError: the shapes differ or are not `[B]`; or weights are missing, or given without
        `weighted`.
    """
    if self._weighted != (weight is not None):
      raise ValueError("give weights for all batches, with weighted=True, or for none")
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    mask = jnp.ones_like(labels, bool) if mask is None else jnp.asarray(mask)
    weight = mask if weight is None else jnp.asarray(weight)
    if not logits.shape == labels.shape == mask.shape == weight.shape or logits.ndim != 1:
      raise ValueError(
        f"logits {logits.shape}, labels {labels.shape}, mask {mask.shape} and weight "
        f"{weight.shape} must all be [batch]"
      )
    if self._count + logits.size > self._most:
      self._empty()
    self._count += logits.size
    self._counts, *sums = self._add(self._counts, logits, labels, jnp.where(mask, weight, 0))
    self._sums.append(sums)
    self._fetch(_PENDING)

  def compute(self) -> dict[str, float]:
    """Returns `{"auc": ..., "logloss": ...}` of all examples so far.

    The log loss is scikit-learn's, which counts a logit beyond +-36 as 36; a batch's is summed in
    float32 on the device, and the batches in float64.

    Raises:
      UserError: there is no click or nothing but clicks, so that AUC is undefined; or a logit is
        not a number.
    """
    misses, clicks = self._histogram()
    # Doubles: the pairs of 10**10 examples are more than an int64 counts.
    below = np.cumsum(misses) - misses
    in_order = np.dot(clicks.astype(np.float64), below + 0.5 * misses)
    self._fetch(0)
    pairs = float(clicks.sum()) * float(misses.sum())
    return {"auc": float(in_order / pairs), "logloss": self._loss / self._weight}

  def auc_error(self) -> float:
    """Returns the bound on the error of the AUC so far: see the class.

    Raises:
      UserError: as `compute`.
    """
    misses, clicks = self._histogram().astype(np.float64)
    return float(np.dot(clicks, misses) / (2 * clicks.sum() * misses.sum()))

  def _histogram(self) -> np.ndarray:
    """Returns the number or weight of non-clicks and clicks in each bin with any, `[2, N]`."""
    self._empty()
    totals = self._total.sum(axis=1)
    _check_outcomes(totals[1].item(), totals.sum().item(), finite=not self._total[:, -1].any())
    return self._total[:, self._total.any(axis=0)]

  def _fetch(self, pending: int) -> None:
    """Adds the loss and the weight of all but the last batches to those on the host."""
    while len(self._sums) > pending:
      loss, weight = self._sums.popleft()
      self._loss, self._weight = self._loss + float(loss), self._weight + float(weight)

  def _empty(self) -> None:
    """Moves the counts from the devices to the host."""
    if self._count:
      self._total += np.asarray(self._sum(self._counts)).reshape(2, _BINS)
      self._counts, self._count = self._zeros(), 0


def _bins(logits: jax.Array) -> jax.Array:
  """Returns the bins of float32 logits, int32; no larger logit has a smaller bin.

  Both steps are exact: a multiple of a power of two, and the leading bits of a float's magnitude.
  """
  tail = (jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.int32) - _EDGE_BITS) >> (
    23 - _TAIL_BITS
  )
  middle = jnp.floor(jnp.clip(logits, -_EDGE, _EDGE) * _UNIT).astype(jnp.int32)
  bins = jnp.where(logits < 0, -1 - tail - _MIDDLE, tail + _MIDDLE)
  bins = jnp.where(jnp.abs(logits) < _EDGE, middle, bins) + _MIDDLE + _TAIL
  return jnp.where(jnp.isfinite(logits), bins, _BINS - 1)


def _count(counts, logits, labels, amount) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns counts `[1, 2 * bins]` with a batch's, and its loss and weight `[1]`, on one device.

  `amount` `[B]` is how often each example counts: a mask, or weights.
  """
  logits, is_click = logits.astype(jnp.float32), labels != 0
  index = _bins(logits) + jnp.where(is_click, _BINS, 0)
  index = jnp.where(amount > 0, index, 2 * _BINS)
  counts = counts.at[0, index].add(amount.astype(counts.dtype), mode="drop")
  margin = jnp.clip(jnp.where(is_click, -logits, logits), -_MAX_LOGIT, _MAX_LOGIT)
  losses = jnp.where(amount > 0, amount * jax.nn.softplus(margin), 0)
  return counts, losses.sum(keepdims=True), amount.sum(keepdims=True, dtype=jnp.float32)


@functools.cache
def _compiled(mesh: Mesh | None, dtype: Any) -> tuple[Any, Any, Any]:
  """Returns `() -> counts`, `(counts, batch) -> (counts, loss, weight)` and `counts -> sum`.

  Counts are `[devices, 2 * bins]`, each device's its own; adding donates them. Their sum is
  `[2 * bins]` on every device.
  """
  devices, count, split, whole = 1, _count, None, None
  if mesh is not None:
    part = P(mesh.axis_names)
    devices, split, whole = mesh.size, NamedSharding(mesh, part), NamedSharding(mesh, P())
    count = jax.shard_map(_count, mesh=mesh, in_specs=part, out_specs=part)

  def add(counts, logits, labels, amount):
    counts, losses, weights = count(counts, logits, labels, amount)
    return counts, losses.sum(), weights.sum()

  return (
    jax.jit(lambda: jnp.zeros((devices, 2 * _BINS), dtype), out_shardings=split),
    jax.jit(add, donate_argnames="counts", out_shardings=(split, whole, whole)),
    jax.jit(lambda counts: counts.sum(axis=0), out_shardings=whole),
  )


def _check_outcomes(clicks: float, examples: float, *, finite: bool) -> None:
  """Raises UserError where there is no AUC; the numbers are weights where there are any."""
  if not finite:
    raise UserError("the model's logits are not finite: lower the learning rates")
  if clicks in (0, examples):
    raise UserError(
      f"AUC needs both outcomes, but {clicks:.16g} of the {examples:.16g} examples are clicks: "
      "take a larger split"
    )


def ranking_names(ks: Sequence[int], num_items: int) -> tuple[str, ...]:
  """Returns the names of what `RankingMetrics(ks)` computes.

  Args:
    ks: the cutoffs, `config.ks`.
    num_items: the catalogue.

  Raises:
    UserError: a cutoff is not between 1 and the number of items; says which ones to write.

  >>> ranking_names([10], 40)
  ('recall@10', 'ndcg@10', 'hr@10', 'mrr')
  """
  if not ks or not all(0 < k <= num_items for k in ks):
    fit = tuple(k for k in ks if 0 < k <= num_items) or (num_items,)
    raise UserError(
      f"config.ks is {tuple(ks)}, and the catalogue has {num_items} items: cutoffs are from 1 to "
      f"that number. Write --config.ks='{fit}', and for example "
      f"--config.select=valid_ndcg@{fit[0]}"
    )
  return (*(f"{name}@{k}" for k in ks for name in ("recall", "ndcg", "hr")), "mrr")


class RankingMetrics:
  """Collects what was recommended and what was right, and averages over the examples.

  Recall@k is the hits among the first k over the number of relevant items, the definition of
  RecBole and LightGCN; HR@k whether there was a hit; NDCG@k discounts by log2(rank + 1) and divides
  by what min(k, relevant) hits at the top would get; MRR is 1 / rank of the first hit among all
  recommended items, 0 without one. An example without a relevant item does not count.

  Args:
    ks: the cutoffs.
  """

  def __init__(self, ks: Sequence[int]):
    self._ks = tuple(ks)
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
      ordered = np.sort(ids, axis=1)
      if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError(f"an id appears twice in a row of {name}: every hit counts once")
    hits = _member(top_ids, relevant)
    totals = (relevant >= 0).sum(axis=1)
    for name, values in _ranking(hits, totals, self._ks):
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
  hits: np.ndarray, totals: np.ndarray, ks: Sequence[int]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields each metric's value of every example, from hits bool `[B, K]` and relevant items."""
  discounts = 1 / np.log2(np.arange(2, hits.shape[1] + 2))
  ideal = np.concatenate([[0.0], np.cumsum(discounts)])
  for k in ks:
    first = hits[:, :k]
    yield f"recall@{k}", first.sum(axis=1) / totals
    yield f"ndcg@{k}", (first @ discounts[:k]) / ideal[np.minimum(totals, k)]
    yield f"hr@{k}", np.asarray(first.any(axis=1))
  yield "mrr", np.where(hits.any(axis=1), 1 / (1 + hits.argmax(axis=1)), 0.0)


def _member(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
  """Returns bool `[B, K]`: whether each id is in its row of `of` `[B, R]`; a negative one never is.

  A row's ids are shifted into a range of their own, so that one sorted search answers for all.
  """
  size = max(ids.max(initial=0), of.max(initial=0)) + 1
  shift = size * np.arange(len(ids), dtype=np.int64)[:, None]
  return np.isin(ids + shift, (of + shift)[of >= 0]) & (ids >= 0)
