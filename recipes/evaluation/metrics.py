"""Metrics of clicks and of rankings: frozen dataclasses that are fed batch by batch.

    metrics = ClickMetrics.empty(mesh)
    for batch in batches:
      metrics = metrics.update(logits(batch), batch["label"])
    print(metrics.compute())

A metric is a JAX pytree, as in `clu.metrics`: `update` returns the metric with one more batch,
`merge` that of the examples of two, and `compute` numbers, the same in every process.

Streaming AUCs with a few hundred thresholds (keras and metrax with 200, torchmetrics with
`thresholds=`) approximate the curve, and the error grows as the scores crowd together near 0, as
click probabilities do; it can exceed the differences that papers report. `ClickMetrics` counts
logits in two million bins on the devices, for any number of examples, and knows how far off it may
be. `click_metrics` takes all scores at once, and is exact, and so is `GroupedClickMetrics`, which
keeps the rows: the AUC of a user has few of them, and there are too many users for bins.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.special import entr, expit
from sklearn.metrics import log_loss, roc_auc_score

from .. import hosts
from ..errors import UserError

CLICK_NAMES = ("auc", "logloss", "ne", "calibration")


def click_metrics(logits, labels, weights=None, *, strict: bool = True) -> dict[str, float]:
  """Returns the metrics of all examples at once, in float64, exactly as scikit-learn does.

  `auc` and `logloss` are scikit-learn's. `ne` is the normalised entropy, the log loss over that of
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
  _check_outcomes(clicks, total, finite=bool(np.isfinite(logits).all()), strict=strict)
  if not total:
    return {}
  # In float32 expit(17) is 1.0, and one such mistake would make the log loss infinite.
  predictions = expit(logits)
  loss = float(log_loss(labels, predictions, labels=[0, 1], sample_weight=weights))
  metrics = _of_sums(loss * total, float(weights @ predictions), clicks, total)
  if 0 < clicks < total:
    metrics = {"auc": float(roc_auc_score(labels, logits, sample_weight=weights))} | metrics
  return metrics


def _of_sums(loss: float, prediction: float, clicks: float, total: float) -> dict[str, float]:
  """Returns what sums over examples define: log loss, normalised entropy and calibration."""
  metrics, rate = {"logloss": loss / total}, clicks / total
  if 0 < rate < 1:
    metrics["ne"] = metrics["logloss"] / float(entr(rate) + entr(1 - rate))
  if clicks:
    metrics["calibration"] = prediction / clicks
  return metrics


def _check_outcomes(clicks: float, examples: float, *, finite: bool, strict: bool = True) -> None:
  """Raises UserError where there is no AUC; the numbers are weights where there are any."""
  if not finite:
    raise UserError("the model's logits are not finite: lower the learning rates")
  if strict and clicks in (0, examples):
    raise UserError(
      f"AUC needs both outcomes, but {clicks:.16g} of the {examples:.16g} examples are clicks: "
      "take a larger split"
    )


# --- sums on the devices --------------------------------------------------------------------------

# A sum is two float32, the nearest one and what it leaves out: 48 bits, as devices have no float64.
Double = tuple[jax.Array, jax.Array]


def plus(a: Double, b: Double) -> Double:
  """Returns the sum of two sums; the error of float32 is found by Knuth's TwoSum."""
  high = a[0] + b[0]
  part = high - a[0]
  low = (a[0] - (high - part)) + (b[0] - part) + (a[1] + b[1])
  total = high + low
  return total, low - (total - high)


def _run_sums(keys: jax.Array, amounts: jax.Array) -> Double:
  """Returns at the end of each run of equal keys `[..., B]` the sum of its amounts `[..., B]`.

  Other places hold sums of the run so far. It is the parallel prefix sum of Hillis and Steele.
  """
  size = keys.shape[-1]

  def step(i, sums):
    shift = jnp.left_shift(1, i)
    back = lambda x: jnp.roll(x, shift, axis=-1)
    is_run = (back(keys) == keys) & (jnp.arange(size) >= shift)
    return plus(sums, (jnp.where(is_run, back(sums[0]), 0), jnp.where(is_run, back(sums[1]), 0)))

  return jax.lax.fori_loop(0, max(size - 1, 0).bit_length(), step, (amounts, amounts * 0))


# --- clicks, in bins ------------------------------------------------------------------------------

# The bins of logits: 2**16 for every unit from -16 to 16, and beyond that 2**10 for every power of
# two up to the largest float32.
_UNIT, _EDGE, _TAIL_BITS = 1 << 16, 16, 10
_EDGE_BITS = int(np.float32(_EDGE).view(np.int32))
_TAIL = (int(np.float32(np.inf).view(np.int32)) - _EDGE_BITS) >> (23 - _TAIL_BITS)
_MIDDLE = _UNIT * _EDGE
_BINS = 2 * (_TAIL + _MIDDLE) + 1  # the last one is for what is not finite
_SUMS = 2 * _BINS + 2  # of bins without and with a click, of predictions, and of losses
# scikit-learn clips probabilities to [eps, 1 - eps] of float64, which is logits to this.
_MAX_LOGIT = float(-np.log(np.finfo(np.float64).eps))


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=("high", "low"), meta_fields=("mesh",)
)
@dataclasses.dataclass(frozen=True)
class ClickMetrics:
  """Counts logits in fixed bins on the devices, and computes AUC (ROC), log loss and calibration.

  Memory does not grow with the examples: a device holds 38 MB, and the host as much in `compute`.
  On a mesh every device counts its own part of a batch, and nothing is sent before `compute`.

  The AUC is the share of the pairs of a click and a non-click that are in order, ties counted half.
  Bins are in the order of the logits, so that a pair from two bins is counted as it is. A pair from
  one bin is counted as a tie, which is off by a half if it is not one. Hence the bound:

      |auc - exact auc| <= (pairs from one bin) / (2 * all pairs)

  `auc_error` returns it for the examples seen. Bins are 2**-16 wide for logits between -16 and 16,
  and 0.1 % of the logit beyond. Where scores have a spread of 1 or more, some 6e-6 of the pairs are
  from one bin or fewer: the bound is below 3e-6. As non-ties fall on both sides, the difference
  from scikit-learn is far smaller, around 1e-8 for a million examples. It is large where nearly all
  logits are equal to four digits, as those of a model that has not been trained.

  All sums are of 48 bits: counts are exact, and weights as good as in float64. A loss and a
  prediction are float32, off by some 1e-7 of themselves.

  Attributes:
    high, low: float32 `[devices, sums]`; a sum is `high + low`, and `low` the rounding of `high`.
    mesh: over which the batches are split; None is one device.

  >>> metrics = ClickMetrics.empty()
  >>> logits, labels = jnp.array([0.0, 1.0, -1.0, 9.0]), jnp.array([1, 0, 0, 1])
  >>> metrics = metrics.update(logits, labels, mask=jnp.arange(4) < 3)
  >>> metrics.compute()["auc"], metrics.auc_error()
  (0.5, 0.0)
  """

  high: jax.Array
  low: jax.Array
  mesh: Mesh | None = None

  @classmethod
  def empty(cls, mesh: Mesh | None = None) -> "ClickMetrics":
    """Returns the metric of no example."""
    high, low = _compiled(mesh)[0]()
    return cls(high, low, mesh)

  def update(
    self,
    logits: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None = None,
    weight: jax.Array | None = None,
  ) -> "ClickMetrics":
    """Returns the metric with one batch more, without waiting for it.

    It takes over the memory of this one, which cannot be used any more.

    Args:
      logits: float `[B]`, before the sigmoid; on a mesh, a global array split over it.
      labels: `[B]`, 0 or 1.
      mask: bool `[B]`, False for rows that only fill up the last batch; None counts all rows.
      weight: float `[B]`, 0 or more, how often a row counts; None counts each once.

    Raises:
      ValueError: the shapes differ or are not `[B]`.
    """
    logits, labels, amount = _checked(logits, labels, mask, weight)
    high, low = _compiled(self.mesh)[1](self.high, self.low, logits, labels, amount)
    return ClickMetrics(high, low, self.mesh)

  def merge(self, other: "ClickMetrics") -> "ClickMetrics":
    """Returns the metric of the examples of both, which are over one mesh."""
    high, low = _merged((self.high, self.low), (other.high, other.low))
    return ClickMetrics(high, low, self.mesh)

  def compute(self) -> dict[str, float]:
    """Returns `{"auc", "logloss", "ne", "calibration"}`; see `click_metrics`.

    A logit beyond +-36 counts as 36 in the log loss, as scikit-learn has it.

    Raises:
      UserError: there is no click or nothing but clicks, so that AUC is undefined; or a logit is
        not a number.
    """
    misses, clicks = self._counts
    # Doubles: the pairs of 10**10 examples are more than an int64 counts.
    in_order = np.dot(clicks, np.cumsum(misses) - 0.5 * misses)
    auc = float(in_order / (clicks.sum() * misses.sum()))
    prediction, loss = self._total[2 * _BINS :].tolist()
    total = float(clicks.sum() + misses.sum())
    return {"auc": auc} | _of_sums(loss, prediction, float(clicks.sum()), total)

  def auc_error(self) -> float:
    """Returns the bound on the error of the AUC so far: see the class."""
    misses, clicks = self._counts
    return float(np.dot(clicks, misses) / (2 * clicks.sum() * misses.sum()))

  def reliability(self, bins: int = 20) -> np.ndarray:
    """Returns the reliability histogram: bins of examples in the order of their predictions.

    Bins have about equally many examples, since clicks are rare, and equal widths would leave
    nearly all predictions in the first one.

    Args:
      bins: at most so many; examples with one prediction are in one bin.

    Returns:
      float64 `[bins, 3]`: mean prediction, rate of clicks, and the share of the examples.
    """
    misses, clicks = self._counts
    amount, prediction = misses + clicks, expit(_middles()[self._total_bins])
    middle = (np.cumsum(amount) - amount / 2) / amount.sum()
    place = np.minimum((middle * bins).astype(int), bins - 1)
    sums = [np.bincount(place, x, bins) for x in (amount * prediction, clicks, amount)]
    predicted, clicked, total = np.stack(sums)[:, sums[2] > 0]
    return np.stack([predicted / total, clicked / total, total / amount.sum()], axis=1)

  @functools.cached_property
  def _total(self) -> np.ndarray:
    """The sums over all devices, float64 `[_SUMS]`."""
    high, low = _compiled(self.mesh)[2](self.high, self.low)
    return (np.asarray(high, np.float64) + np.asarray(low))[:_SUMS]

  @functools.cached_property
  def _total_bins(self) -> np.ndarray:
    """The bins with any examples."""
    return np.flatnonzero(self._total[: 2 * _BINS].reshape(2, _BINS).any(axis=0))

  @functools.cached_property
  def _counts(self) -> np.ndarray:
    """The number or weight of non-clicks and clicks in each bin with any, float64 `[2, N]`."""
    counts = self._total[: 2 * _BINS].reshape(2, _BINS)
    totals = counts.sum(axis=1)
    _check_outcomes(totals[1].item(), totals.sum().item(), finite=not counts[:, -1].any())
    return counts[:, self._total_bins]


def _checked(logits, labels, mask, weight) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns logits, labels, and how often each row counts, float32; raises ValueError by shape."""
  logits, labels = jnp.asarray(logits), jnp.asarray(labels)
  mask = jnp.ones_like(labels, bool) if mask is None else jnp.asarray(mask)
  weight = mask if weight is None else jnp.asarray(weight)
  if not logits.shape == labels.shape == mask.shape == weight.shape or logits.ndim != 1:
    raise ValueError(
      f"logits {logits.shape}, labels {labels.shape}, mask {mask.shape} and weight "
      f"{weight.shape} must all be [batch]"
    )
  return logits, labels, jnp.where(mask, weight, 0).astype(jnp.float32)


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


@functools.cache
def _middles() -> np.ndarray:
  """Returns a logit of each bin, float64 `[_BINS]`: its middle, and beyond the edge +-the edge."""
  middles = (np.arange(_BINS) - _TAIL - _MIDDLE + 0.5) / _UNIT
  return np.clip(middles, -_EDGE, _EDGE)


def _add(high, low, logits, labels, amount) -> Double:
  """Returns the sums `[1, sums]` of one device with a batch's.

  A bin that several examples of the batch are in is written once.
  """
  logits, is_click, counts = logits.astype(jnp.float32), labels != 0, amount > 0
  bins = jnp.where(counts, _bins(logits) + jnp.where(is_click, _BINS, 0), _SUMS)
  margin = jnp.clip(jnp.where(is_click, -logits, logits), -_MAX_LOGIT, _MAX_LOGIT)
  factors = jnp.stack([jnp.ones_like(logits), jax.nn.sigmoid(logits), jax.nn.softplus(margin)])
  amounts, order = jnp.where(counts, amount * factors, 0), jnp.argsort(bins)
  whole = jnp.full((2, bins.size), 2 * _BINS) + jnp.arange(2)[:, None]
  keys = jnp.concatenate([bins[order][None], whole])
  sums = _run_sums(keys, amounts[:, order])
  is_last = jnp.concatenate([keys[:, 1:] != keys[:, :-1], jnp.ones((3, 1), bool)], axis=1)
  at = jnp.where(is_last & (keys < _SUMS), keys, high.shape[1])
  known = [x[0].at[keys].get(mode="fill", fill_value=0) for x in (high, low)]
  high_sum, low_sum = plus((known[0], known[1]), sums)
  put = lambda x, new: x.at[0, at].set(new, mode="drop")
  return put(high, high_sum), put(low, low_sum)


_merged = jax.jit(plus)


@functools.cache
def _compiled(mesh: Mesh | None) -> tuple[Any, Any, Any]:
  """Returns `() -> sums`, `(*sums, batch) -> sums`, which donates them, and `sums -> total`.

  Sums are `[devices, sums]`, each device's its own; the total is `[sums]` on every device.
  """
  devices, add, total, split, whole = 1, _add, lambda *x: (x[0][0], x[1][0]), None, None
  if mesh is not None:
    part, devices = P(mesh.axis_names), mesh.size
    split, whole = NamedSharding(mesh, part), NamedSharding(mesh, P())

    def total_of_own(*sums):
      # Each device adds up a part of the sums: a float32 all-reduce would round them.
      cut = lambda x: x.reshape(devices, -1)
      high, low = (jax.lax.all_to_all(cut(x), mesh.axis_names, 0, 0) for x in sums)
      return functools.reduce(plus, zip(high, low, strict=True))

    add = jax.shard_map(_add, mesh=mesh, in_specs=part, out_specs=part)
    total = jax.shard_map(total_of_own, mesh=mesh, in_specs=part, out_specs=part)
  width = -(-_SUMS // devices) * devices
  zeros = lambda: (jnp.zeros((devices, width)), jnp.zeros((devices, width)))
  return (
    jax.jit(zeros, out_shardings=split),
    jax.jit(add, donate_argnums=(0, 1), out_shardings=split),
    jax.jit(total, out_shardings=whole),
  )


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


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=("batches",), meta_fields=("groups",)
)
@dataclasses.dataclass(frozen=True)
class GroupedClickMetrics:
  """Keeps rows, and computes GAUC and the click metrics of slices from all of them, exactly.

  A row takes 9 bytes, 4 more for each slice, and 4 or 8 for the user, on the devices that its batch
  is split over; in `compute` the host of every process holds all rows, twice. Ten million rows with
  users are 130 MB. A slice or user with one outcome has no AUC: it is left out, and counted.

  Attributes:
    batches: arrays `[B]` of each batch; `merge` joins them.

  >>> metrics = GroupedClickMetrics(Groups("user", slices=(("sex", ("F", "M")),)))
  >>> ids = {"user": jnp.array([0, 0, 1, 1]), "sex": jnp.array([0, 0, 0, 1])}
  >>> metrics = metrics.update(jnp.array([1.0, 0.0, 2.0, 3.0]), jnp.array([1, 0, 0, 1]), ids)
  >>> found = metrics.compute()
  >>> found["gauc"], found["auc[sex=F]"], found["one_outcome[sex]"]
  (1.0, 0.5, 1.0)
  """

  groups: Groups
  batches: tuple[Mapping[str, jax.Array], ...] = ()

  def update(
    self,
    logits: jax.Array,
    labels: jax.Array,
    ids: Mapping[str, Any],
    mask: jax.Array | None = None,
    weight: jax.Array | None = None,
  ) -> "GroupedClickMetrics":
    """Returns the metric with one batch more.

    Args:
      logits, labels, mask, weight: as `ClickMetrics.update`.
      ids: int32 `[B]` of the groups' features, negative where there is none; raw ids of a dynamic
        vocabulary uint32 `[B, 2]`. Other features have no effect.
    """
    logits, labels, amount = _checked(logits, labels, mask, weight)
    batch = {"logit": logits, "label": labels.astype(bool), "amount": amount}
    for name in self.groups.features:
      batch[f"of {name}"] = jnp.asarray(ids[name])
      if len(ids[name]) != len(logits):
        raise UserError(
          f"{name!r} has {len(ids[name])} ids for {len(logits)} labels: slices and users need data "
          "with one id for each label"
        )
    return dataclasses.replace(self, batches=(*self.batches, batch))

  def merge(self, other: "GroupedClickMetrics") -> "GroupedClickMetrics":
    """Returns the metric of the rows of both."""
    return dataclasses.replace(self, batches=self.batches + other.batches)

  def compute(self) -> dict[str, float]:
    """Returns the metrics by name.

    With users `gauc` and `gauc_share`; see the function `gauc`. For each slice the metrics of
    `click_metrics` that its rows define, as `auc[sex=F]`, and for a column some of whose slices
    have rows of one outcome only, how many these are: `one_outcome[sex]`.

    Raises:
      UserError: a logit is not a number.
    """
    batches = [hosts.gather(batch) for batch in self.batches]
    if not batches:
      return {}
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    counts = rows["amount"] > 0
    rows = {name: column[counts] for name, column in rows.items()}
    examples, metrics = (rows["logit"], rows["label"], rows["amount"]), dict[str, float]()
    if self.groups.user:
      users = _as_users(rows[f"of {self.groups.user}"], self.groups.num_users)
      known = users >= 0
      logit, label, amount = (x[known] for x in examples)
      within, share = gauc(logit, label, users[known], amount)
      metrics |= {"gauc": within} if within is not None else {}
      of_all = examples[2].sum(dtype=np.float64) or 1.0
      metrics["gauc_share"] = share * float(amount.sum(dtype=np.float64) / of_all)
    for name, values in self.groups.slices:
      ids, one_outcome = rows[f"of {name}"], 0
      for value, text in enumerate(values):
        found = click_metrics(*(x[ids == value] for x in examples), strict=False)
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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("sums", "examples", "best", "popularity"),
  meta_fields=("ks",),
)
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
    examples: int `[]`, how many.
    best: int32 `[items]`, the best place, from 0, that an item has had; `[0]` without a catalogue.
    popularity: `[items]`, how often each item is in training; `[0]` if it is not known.

  >>> metrics = RankingMetrics.empty([2], popularity=[7, 3, 0])
  >>> found = metrics.update([[1, 0], [1, 0]], [[0], [1]]).compute()
  >>> found["hr@2"], found["precision@2"], found["popularity@2"], round(found["coverage@2"], 4)
  (1.0, 0.5, 5.0, 0.6667)
  """

  ks: tuple[int, ...]
  sums: dict[str, Any]
  examples: np.ndarray
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
    return cls(tuple(ks), {}, np.zeros((), np.int64), best, popularity)

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
    sums = added(self.sums, {name: x.sum(dtype=np.float64) for name, x in values.items()})
    return dataclasses.replace(self, sums=sums, examples=self.examples + len(hits), best=best)

  def merge(self, other: "RankingMetrics") -> "RankingMetrics":
    """Returns the metric of the examples of both."""
    return dataclasses.replace(
      self,
      sums=added(self.sums, other.sums),
      examples=self.examples + other.examples,
      best=np.minimum(self.best, other.best),
    )

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


def added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the sums of float64 numbers or arrays by name; those that one side lacks are 0."""
  of = lambda sums, name: np.asarray(sums.get(name, 0), np.float64)
  return {name: of(a, name) + of(b, name) for name in {**a, **b}}


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
