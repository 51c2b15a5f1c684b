"""Users and items as the columns that two towers train on, of your own table and of drawn pairs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import cache
from ..errors import UserError
from ..tables import interactions, spec
from ..tables.settings import Table, parsed, serve_folder
from ..tables.values import SPLITS
from ..training.features import Feature


def write(
  folder: Path,
  pairs: tuple[np.ndarray, np.ndarray, np.ndarray],
  sizes: Mapping[str, int],
  features: Mapping[str, Mapping[Feature, np.ndarray]],
  *,
  seed: int,
  ordered: bool = False,
) -> dict[str, Any]:
  """Writes a data set's columns and returns its meta, but for `sha256`.

  `user`, `item` int32 hold the three splits one after another, each ordered by user, and a user's
  rows in random order, or in that of time if they are `ordered`. `<split>_offsets` int64
  `[users + 1]` say where each user's begin. `place` int32 counts a user's rows of a split from 0.
  `user_<n>`, `item_<n>` int32 are the ids of a feature, in the order of the meta.

  Args:
    pairs: user, item and the index of the split in `SPLITS`, `[N]` each.
    sizes: numbers of each "user" and "item".
    features: of "user" and "item", with the ids of all of them.
    seed: of the order of a user's rows.
    ordered: whether the pairs are in the order of time, and later splits come later.
  """
  user, item, split = pairs
  columns = {
    name: cache.column(folder, name, user.shape, np.int32) for name in ("user", "item", "place")
  }
  generator, start, splits = np.random.default_rng(seed), 0, {}
  for index, name in enumerate(SPLITS):
    rows = np.flatnonzero(split == index)
    if not ordered:
      rows = rows[generator.permutation(len(rows))]
    rows = rows[np.argsort(user[rows], kind="stable")]
    counts = np.bincount(user[rows], minlength=sizes["user"])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(len(rows)) - np.repeat(offsets[:-1], counts)
    stop = start + len(rows)
    for column, found in (("user", user[rows]), ("item", item[rows]), ("place", place)):
      columns[column][start:stop] = found
    cache.column(folder, f"{name}_offsets", offsets.shape, np.int64)[:] = start + offsets
    splits[name], start = (start, stop), stop
  for side, own in features.items():
    for place, ids in enumerate(own.values()):
      cache.column(folder, f"{side}_{place}", ids.shape, np.int32)[:] = ids
  return {
    "splits": splits,
    "users": sizes["user"],
    "items": sizes["item"],
    "features": {side: [*map(dataclasses.asdict, own)] for side, own in features.items()},
    "ordered": ordered,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns of `write`, and what serving needs; returns the meta.

  Raises:
    UserError: no user or item is declared, or a split is empty.
    DamagedFileError: a row cannot be read; names file, row and column.
  """
  table = parsed(settings)
  _check(table)
  by = table.split_by(timed="last", untimed="user")
  log = interactions.read(table, by, folder)
  split, sides = log.split, {"user": log.users, "item": log.items}
  for index, name in enumerate(SPLITS):
    if not (split == index).any() and (name != "valid" or table.split["valid"]):
      raise UserError(f"the {name} split is empty: the data set is too small for it")
  meta = write(
    folder,
    (log.user, log.item, split),
    {side: len(entities.texts) for side, entities in sides.items()},
    {side: entities.by_feature for side, entities in sides.items()},
    seed=table.split["seed"],
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
  return meta | {"notes": notes, "sha256": table.digests()}


def _check(table: Table) -> None:
  """Raises UserError for features that the towers cannot take."""
  for name in ("user", "item", "history"):
    kind = table.kinds.get(name)
    if isinstance(kind, spec.Side) and kind.side and not isinstance(kind, spec.Id):
      raise UserError(
        f"{name!r} is the name of an input of the towers: declare the column by another name, "
        f"with column={name!r}"
      )
