"""Your own table as interactions: the columns that two towers train on."""

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..tables import interactions, spec
from ..tables.settings import SPLITS, Table, parsed, serve_folder
from . import splits


def _check(table: Table) -> None:
  """Raises UserError for names and widths of features that the towers cannot take."""
  for source in (table.rows, *table.sides.values()):
    for name, kind in source.kinds.items():
      if not isinstance(kind, spec.Embedded) or isinstance(kind, spec.Id):
        continue
      if (kind.side or source.key) and name in ("user", "item", "history"):
        raise UserError(
          f"{name!r} is the name of an input of the towers: declare the column by another name, "
          f"with column={name!r}"
        )
      if (kind.side or source.key) and kind.dim:
        raise UserError(
          f"column {name!r} has dim {kind.dim}: all tables of two_tower have config.dim"
        )


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns of `splits.write`, and what serving needs; returns the meta.

  Raises:
    UserError: no user or item is declared, or a split is empty.
    DamagedFileError: a row cannot be read; names file, row and column.
  """
  table = parsed(settings)
  _check(table)
  by = table.split_by(timed="last", untimed="user")
  log = interactions.read(table, by, folder)
  pairs = {
    name: (log.user[log.split == i], log.item[log.split == i]) for i, name in enumerate(SPLITS)
  }
  if table.refit:
    trains = log.split != SPLITS.index("test")
    pairs["train"] = log.user[trains], log.item[trains]
    pairs["valid"] = pairs["valid"][0][:0], pairs["valid"][1][:0]
  features, described = {}, {}
  for side, entities in (("user", log.users), ("item", log.items)):
    sizes = {feature.name: feature.vocabulary_size for feature in entities.features}
    features[side] = {name: (ids, sizes[name]) for name, ids in entities.ids.items()}
    described[side] = [dataclasses.asdict(feature) for feature in entities.features]
  meta = splits.write(
    folder,
    pairs,
    (len(log.users.texts), len(log.items.texts)),
    features,
    table.digests(),
    seed=table.split["seed"],
    may_be_empty=("valid",) if table.refit else (),
    may_repeat=("train",),
    # Where later items are held out, training asks with earlier ones as well.
    ordered=table.name_of(spec.Time) is not None and by in ("last", "time"),
  )
  log.save(serve_folder(settings, folder))
  unused = [
    name
    for name, kind in table.kinds.items()
    if isinstance(kind, spec.Side)
    and not isinstance(kind, spec.Id | spec.Ordered)
    and not kind.side
  ]
  notes = log.notes
  if unused:
    notes.append(
      f"not used: {', '.join(unused)}; a feature needs side='user' or side='item' to be in a tower"
    )
  return meta | {"features": described, "notes": notes}
