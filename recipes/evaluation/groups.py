"""Which users and slices a click model is measured by: from its features and their transforms."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..tables import spec
from ..tables.transforms import Encoder, Transforms
from ..training.features import Feature
from .metrics import Groups

_MAX_VALUES = 32  # of the column of a slice
_OTHERS = "(other)"  # values that training has not seen, or too rarely


def of_clicks(features: Sequence[Feature], slices: Sequence[str], serve: Path | None) -> Groups:
  """Returns the groups that `config.slices` asks for, and the user of each row if one is declared.

  Args:
    serve: the folder of a table's transforms, which name the values; None calls them by their ids.

  Raises:
    UserError: a slice is no feature, has several values in a row, or too many in all.
  """
  encoder = Encoder.load(serve) if serve is not None and (serve / "sides.json").exists() else None
  known = {name: each for each in encoder.all_transforms for name in each.kinds} if encoder else {}
  named = []
  by_name = {feature.name: feature for feature in features}
  for name in slices:
    feature, single = by_name.get(name), [f.name for f in features if not _fault(f)]
    about = "which is no feature with ids" if feature is None else _fault(feature)
    if feature is None or about:
      raise UserError(f"config.slices has {name!r}, {about}: choose some of {single}")
    named.append((name, _values(feature, known.get(name))))
  user = spec.only(encoder.transforms.kinds, spec.User) if encoder else None
  if encoder is None or user is None:
    return Groups(slices=tuple(named))
  num_users = len(encoder.transforms.vocabulary(user)) or None
  return Groups(user, num_users, tuple(named))


def _fault(feature: Feature) -> str:
  """Returns why metrics cannot be sliced by a feature; "" if they can."""
  if feature.valency > 1:
    return "of which a row has several values"
  if feature.is_dynamic:
    return "whose vocabulary is dynamic"
  if feature.vocabulary_size > _MAX_VALUES:
    return f"which has {feature.vocabulary_size:,} values, more than {_MAX_VALUES}"
  return ""


def _values(feature: Feature, transforms: Transforms | None) -> tuple[str, ...]:
  """Returns what the ids of a feature are called."""
  ids = range(feature.vocabulary_size)
  values = transforms.vocabulary(feature.name) if transforms is not None else ()
  if not values:
    return tuple(map(str, ids))
  others = (_OTHERS, *(f"{_OTHERS[:-1]} {i})" for i in ids[1:]))
  return (*values, *others)[: len(ids)]
