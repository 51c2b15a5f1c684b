"""Metrics of clicks within users and by the values of a column."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..tables import spec
from ..training.features import Feature
from .metrics import click_metrics

_MAX_VALUES = 32  # of a column that slices
_OTHER = "(other)"  # values that training has not seen, or too rarely


@dataclasses.dataclass(frozen=True)
class Groups:
  """Groups of examples that have metrics of their own.

  Attributes:
    user: the feature with the user of each example; "" where none is known.
    num_users: its first ids, each of which is one user; users that training has not seen share the
      others, which have no part in GAUC. 0: every id is a user.
    slices: by feature, the names of its ids; larger ids have the last name too.
  """

  user: str = ""
  num_users: int = 0
  slices: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  @property
  def features(self) -> tuple[str, ...]:
    """The features that name the groups."""
    return tuple(dict.fromkeys(filter(None, (self.user, *self.slices))))


def of_clicks(features: Sequence[Feature], slices: Sequence[str], serve: Path | None) -> Groups:
  """Returns the slices by `config.slices`, and the user if the table declares one.

  Args:
    features: of the data.
    slices: names of features with a single id, of at most 32 values.
    serve: the folder of a table's transforms, which name users and values; None knows no users, and
      calls values by their ids.
  """
  sizes = {
    feature.name: feature.vocabulary_size
    for feature in features
    if feature.columns == 1 and feature.vocabulary_size <= _MAX_VALUES
  }
  if not sizes.keys() >= set(slices):
    raise UserError(f"config.slices is {tuple(slices)}: choose some of {sorted(sizes)}")
  named = {name: tuple(map(str, range(sizes[name]))) for name in slices}
  if serve is None:
    return Groups(slices=named)
  from ..tables.transforms import Encoder  # imports what reads tables

  encoder = Encoder.load(serve)
  for each in encoder.all_transforms:
    for name in named.keys() & each.kinds.keys():
      if values := each.vocabulary(name):
        named[name] = (*values, _OTHER)
  user = spec.only(encoder.transforms.kinds, spec.User)
  if user is None:
    return Groups(slices=named)
  return Groups(user, len(encoder.transforms.vocabulary(user)), named)


def group_metrics(
  groups: Groups, logits, labels, weights, ids: Mapping[str, Any]
) -> dict[str, float]:
  """Computes the metrics of users and slices by name.

  With users `gauc` and `gauc_share`; see `gauc`. For each slice the metrics that its rows define,
  as `auc[sex=F]`.

  Args:
    groups: what to measure.
    logits, labels, weights: `[N]` each, as for `click_metrics`.
    ids: int32 `[N]` of the groups' features, negative where there is none; raw ids of a dynamic
      vocabulary uint32 `[N, 2]`.

  >>> groups = Groups("user", slices={"sex": ("F", "M")})
  >>> ids = {"user": np.array([0, 0, 1, 1]), "sex": np.array([0, 0, 0, 1])}
  >>> rows = np.array([1.0, 0.0, 2.0, 3.0]), np.array([1, 0, 0, 1]), np.ones(4)
  >>> metrics = group_metrics(groups, *rows, ids)
  >>> metrics["gauc"], metrics["gauc_share"], metrics["auc[sex=F]"]
  (1.0, 1.0, 0.5)
  """
  examples, metrics = (logits, labels, weights), dict[str, float]()
  if groups.user:
    users, limit = ids[groups.user], groups.num_users or np.inf
    if users.ndim == 2:  # every bit is set where there is no raw id
      is_none = (users == np.iinfo(np.uint32).max).all(axis=1)
      users = np.where(is_none, -1, np.unique(users, axis=0, return_inverse=True)[1])
    known = (users >= 0) & (users < limit)
    metrics |= gauc(logits, labels, np.where(known, users, -1), weights)
  for name, values in groups.slices.items():
    codes = np.minimum(ids[name], len(values) - 1)
    for code, value in enumerate(values):
      scores = click_metrics(*(x[codes == code] for x in examples))
      metrics |= {f"{metric}[{name}={value}]": x for metric, x in scores.items()}
  return metrics


def gauc(logits, labels, users, weights) -> dict[str, float]:
  """Computes the mean AUC of users, and the share of the examples that it covers.

  The AUC of each user's examples is weighted by the sum of their weights (Zhou et al. 2018,
  equation 7). Users with one outcome have no AUC, and are left out.

  Args:
    logits: float `[N]`.
    labels: `[N]`, 0 or 1.
    users: int `[N]`; examples of a negative one are left out.
    weights: float `[N]`, 0 or more.

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
