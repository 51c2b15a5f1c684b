"""Users and items as the columns that two towers train on, of your own table and of drawn pairs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import cache
from ..errors import UserError
from ..tables import interactions, spec
from ..tables.settings import Table, parsed, serve_folder
from ..tables.values import SPLITS
from ..training.features import Feature, column_name

Pairs = tuple[np.ndarray, np.ndarray]  # users and items of the same length


def write(
  folder: Path,
  pairs: Mapping[str, Pairs],
  sizes: tuple[int, int],
  features: Mapping[str, Sequence[tuple[Feature, np.ndarray]]],
  sha256: Mapping[str, str],
  *,
  vectors: Mapping[str, Mapping[str, np.ndarray]] | None = None,
  seed: int,
  may_be_empty: Sequence[str] = (),
  may_repeat: Sequence[str] = (),
  when: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
  """Writes a data set's columns and returns its meta.

  `user`, `item` int32 hold the three splits one after another, each ordered by user, and a user's
  rows in random order, or in that of `pairs` if there is `when`, a column int64;
  `<split>_offsets` int64 `[users + 1]` say where each user's begin. `place` int32 counts a user's
  rows of a split from 0. Features are `user_<name>` and `item_<name>`, int32 `[users or items]` or,
  of bags, `[..., valency]`; vectors have such names too, float32 `[users or items, width]`.

  Args:
    sizes: numbers of users and items.
    features: of "user" and "item", each with the ids of all users or items.
    sha256: hashes of the sources by name.
    vectors: of all users or items by name, of "user" and "item".
    seed: of the order of a user's rows.
    may_be_empty: splits that need no pairs.
    may_repeat: splits that may hold a pair more than once.
    when: by split, the place of each pair in the log of all splits, of pairs in the order of time.

  Raises:
    ValueError: a split is empty, or holds a pair twice.
  """
  rows = sum(len(pairs[split][0]) for split in SPLITS)
  columns = {
    name: cache.column(folder, name, (rows,), np.int32) for name in ("user", "item", "place")
  }
  if when is not None:
    columns["when"] = cache.column(folder, "when", (rows,), np.int64)
  generator, start, splits = np.random.default_rng(seed), 0, {}
  for split in SPLITS:
    user, item = pairs[split]
    if not len(user) and split not in may_be_empty:
      raise UserError(f"the {split} split is empty: the data set is too small for it")
    keys = np.sort(user.astype(np.int64) * sizes[1] + item)
    if (again := keys[1:][keys[1:] == keys[:-1]]).size and split not in may_repeat:
      who, what = divmod(int(again[0]), sizes[1])
      raise UserError(f"user {who} has item {what} twice in the {split} split: keep it once")
    order = generator.permutation(len(user)) if when is None else np.arange(len(user))
    order = order[np.argsort(user[order], kind="stable")]
    counts = np.bincount(user, minlength=sizes[0])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    stop = start + len(user)
    columns["user"][start:stop], columns["item"][start:stop] = user[order], item[order]
    columns["place"][start:stop] = np.arange(len(user)) - np.repeat(offsets[:-1], counts)
    if when is not None:
      columns["when"][start:stop] = when[split][order]
    cache.column(folder, f"{split}_offsets", offsets.shape, np.int64)[:] = start + offsets
    splits[split], start = (start, stop), stop
  for side, owned in features.items():
    for feature, ids in owned:
      cache.column(folder, column_name(side, feature.name), ids.shape, np.int32)[:] = ids
  vectors = vectors or {}
  for side, by_name in vectors.items():
    for name, block in by_name.items():
      cache.column(folder, column_name(side, name), block.shape, np.float32)[:] = block
  return {
    "splits": splits,
    "users": sizes[0],
    "items": sizes[1],
    "features": {
      side: [dataclasses.asdict(f) for f, _ in owned] for side, owned in features.items()
    },
    "vectors": {
      side: {name: block.shape[1] for name, block in each.items()} for side, each in vectors.items()
    },
    "ordered": when is not None,
    "sha256": dict(sha256),
  }


def _check(table: Table) -> None:
  """Raises UserError for names and widths of features that the towers cannot take."""
  for source in (table.rows, *table.sides.values()):
    for name, kind in source.kinds.items():
      if not isinstance(kind, spec.Side) or isinstance(kind, spec.Id):
        continue
      if (kind.side or source.key) and name in ("user", "item", "history"):
        raise UserError(
          f"{name!r} is the name of an input of the towers: declare the column by another name, "
          f"with column={name!r}"
        )
      if (kind.side or source.key) and isinstance(kind, spec.Embedded) and kind.dim:
        raise UserError(
          f"column {name!r} has dim {kind.dim}: all tables of two_tower have config.dim"
        )


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
  when = {name: np.flatnonzero(log.split == i) for i, name in enumerate(SPLITS)}
  if table.refit:
    when |= {"train": np.flatnonzero(log.split != SPLITS.index("test")), "valid": when["valid"][:0]}
  pairs = {name: (log.user[rows], log.item[rows]) for name, rows in when.items()}
  features = {
    side: [(feature, entities.ids[feature.name]) for feature in entities.transforms.features]
    for side, entities in (("user", log.users), ("item", log.items))
  }
  meta = write(
    folder,
    pairs,
    (len(log.users.texts), len(log.items.texts)),
    features,
    table.digests(),
    vectors={"user": log.users.vectors, "item": log.items.vectors},
    seed=table.split["seed"],
    may_be_empty=("valid",) if table.refit else (),
    may_repeat=("train",),
    # Where later items are held out, training asks with earlier ones as well.
    when=when if table.name_of(spec.Time) is not None and by in ("last", "time") else None,
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
  return meta | {"notes": notes}
