"""Interactions of users with items: read from a table, cleaned, split and numbered."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import arrays
from ..errors import UserError
from . import entities, sharing, spec, splitting
from .entities import Codes, Entities
from .fitting import extracted
from .rows import RowReader, Rows, split_file
from .settings import SPLITS, Table
from .source import Stage
from .values import spelled, spelling_of

_BUCKETS = 16  # of a number without buckets: towers take vectors only
_REPEATS = 0.1  # of the interactions, from where on the log is said to be full of repeats


@dataclasses.dataclass(frozen=True)
class Interactions:
  """Interactions in the order of time, or of the files where no time is declared.

  Attributes:
    user, item: int32 `[N]`.
    split: int8 `[N]`, the index in `SPLITS`.
    users, items: with their features.
    notes: lines for the user about what was counted, dropped or merged.
  """

  user: np.ndarray
  item: np.ndarray
  split: np.ndarray
  users: Entities
  items: Entities
  notes: list[str]

  def history(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns all items of each user in the order of time, and where they begin, `[users + 1]`."""
    order = np.argsort(self.user, kind="stable")
    lengths = np.bincount(self.user, minlength=len(self.users.texts))
    return self.item[order], np.concatenate([[0], np.cumsum(lengths)])

  def save(self, folder: Path) -> None:
    """Writes what serving needs into a folder: raw ids, transforms, and every user's items."""
    items, offsets = self.history()
    arrays.column(folder, "history", items.shape, np.int32)[:] = items
    arrays.column(folder, "history_offsets", offsets.shape, np.int64)[:] = offsets
    self.users.save(folder, "users")
    self.items.save(folder, "items")


def read(table: Table, by: str, folder: Path) -> Interactions:
  """Returns the interactions of a table, and writes their splits to `split.parquet`.

  Args:
    table: the settings.
    by: how they are split: "user", "last", "time", "order", "hash", "column" or "files".
    folder: of the prepared data.

  Raises:
    UserError: no item is declared, a row has no user or item, or nothing is left; or the engine is
      another one.
  """
  if table.engine != "duckdb":
    raise UserError(
      f"config.engine is {table.engine!r}, which prepares rows with a label, for recipes.dlrm: "
      "two_tower and sequence hold their interactions in memory, so leave the engine 'duckdb'"
    )
  with Stage(folder / "stage") as stage:
    interactions = _read(table, by, folder, stage)
  table.check_unchanged()
  return interactions


def _read(table: Table, by: str, folder: Path, stage: Stage) -> Interactions:
  log = _Log(table, by, stage)
  user, item, split, row, order = log.read()
  notes = log.notes
  if order is not None:
    user, item, split, row = user[order], item[order], split[order], row[order]
  if table.by_number:
    user, item = log.by_number("user")[user], log.by_number("item")[item]
  repeats = ~splitting.first_of_pairs(user, item)
  notes += _about_repeats(table, int(repeats.sum()), len(user))
  merge = table.duplicates == "merge" or (not table.duplicates and table.exclude_seen)
  if merge and repeats.any():
    user, item, split, row = (x[~repeats] for x in (user, item, split, row))
  if table.core:
    kept = splitting.k_core(user, item, table.core)
    notes.append(
      f"{len(kept):,} of {len(user):,} interactions are of users and items with {table.core} or "
      "more"
    )
    user, item, split, row = (x[kept] for x in (user, item, split, row))
  if not len(user):
    also = "".join(f"; {note}" for note in notes)
    raise UserError(
      f"no interaction is left: lower config.core, or check the label's settings{also}"
    )
  settings = table.split
  if by == "user":
    split = splitting.per_user(
      user, settings["valid"], settings["seed"], test_fraction=settings["test"]
    )
  elif by == "last":
    split = splitting.leave_one_out(user)
  elif by == "files" and "valid" not in table.rows.files:
    train = np.flatnonzero(split == 0)
    held_out = splitting.per_user(
      user[train], settings["valid"], settings["seed"], test_fraction=0.0
    )
    split[train[held_out == 1]] = 1
  if not merge:  # an evaluation has each item of a user once
    once = (split == 0) | splitting.first_of_pairs(user, item, split)
    if table.exclude_seen:  # what is left out of a ranking cannot be found in it
      seen = (split > 0) & ~splitting.first_of_pairs(user, item)
      once &= ~seen
      notes.append(
        f"{int(seen.sum()):,} repeats are not validated or tested on, since exclude_seen leaves "
        "them out of the ranking"
      )
    user, item, split, row = (x[once] for x in (user, item, split, row))
  # Numbered again, without those that have no interaction left.
  used_users, user = np.unique(user, return_inverse=True)
  used_items, item = np.unique(item, return_inverse=True)
  training = split == 0
  users, items = log.entities(
    (used_users, np.isin(np.arange(len(used_users)), user[training])),
    (used_items, np.isin(np.arange(len(used_items)), item[training])),
  )
  log.write_split(folder, row, split)
  _check_counts(table, (len(users.texts), len(items.texts), len(user)))
  notes += _about_splits(user, item, split, len(users.texts), len(items.texts))
  return Interactions(user.astype(np.int32), item.astype(np.int32), split, users, items, notes)


@dataclasses.dataclass(frozen=True)
class Pairs:
  """The users of a table and the items they have had, each pair once.

  Attributes:
    user, item: int32 `[N]`.
    users, items: raw ids by number.
    values: of the users' features, from the first row of each, by declared name.
  """

  user: np.ndarray
  item: np.ndarray
  users: pa.Array
  items: pa.Array
  values: Mapping[str, Any]


def pairs(table: Table) -> Pairs:
  """Returns the pairs in a table, without splitting it or reading features from other files.

  Raises:
    UserError: no user or item is declared, or a row has none.
  """
  with Stage() as stage:
    log = _Log(table, "", stage)
    user, item, *_ = log.read()
  first = splitting.first_of_pairs(user, item)
  users, items = (pa.array(log.texts(side), pa.string()) for side in ("user", "item"))
  return Pairs(user[first], item[first], users, items, log.user_values())


class _Log:
  """Reads the rows of a table as interactions, and the features that the rows hold."""

  def __init__(self, table: Table, by: str, stage: Stage):
    self._table, self._stage = table, stage
    self._user = table.name_of(spec.User)
    self._item = table.name_of(spec.Item) or table.name_of(spec.Ordered)
    if self._item is None:
      table.require(spec.Item, "and recommendations need one")
    if self._user is None and not self._is_list():
      table.require(spec.User, "and recommendations need one")
    self._time = table.name_of(spec.Time)
    required = [name for name in (self._user, None if self._is_list() else self._item) if name]
    by = by if by in ("time", "order", "hash", "column", "files") else ""
    self._reader = RowReader(table, by, required, holds_out=False, stage=stage)
    self._codes = {"user": Codes(), "item": Codes()}
    self._without_items = 0  # rows
    self._first_rows: dict[Path, int] = {}  # of the files, less one, if rows are numbered through
    self._num_rows = 0
    sides = {
      side: {
        name: kind
        for name, kind in table.kinds.items()
        if isinstance(kind, spec.Side | spec.Title)
        and not isinstance(kind, spec.Id)
        and (kind.side if isinstance(kind, spec.Side) else "item") == side
        and name != self._item
      }
      for side in ("user", "item")
    }
    for name, kind in {**sides["user"], **sides["item"]}.items():
      if isinstance(kind, spec.Cross) and {self._user, self._item} & set(kind.columns):
        raise UserError(
          f"column {name!r} crosses {' and '.join(kind.columns)}, and every user and item has a "
          "row of its own: cross features alone"
        )
    self._collected = {side: entities.Collected(kinds) for side, kinds in sides.items()}
    self.notes = [
      f"column {name!r}: {', '.join(options)} of its declaration is for dlrm, and has no effect "
      "here: every user and item has a row of its own, and config.core leaves out rare ones"
      for name in (self._user, self._item)
      if name and (options := _options_of_clicks(table.kinds[name]))
    ]
    if self._is_list() and self._collected["item"].kinds:
      raise UserError(
        "rows with several items cannot hold features of an item: use config.item_table"
      )

  def _is_list(self) -> bool:
    kind = self._table.kinds[str(self._item)]
    return isinstance(kind, spec.Bag) or bool(getattr(kind, "separator", ""))

  def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the interactions in the order of the files: user, item, split and row of each.

    Rows are numbered through all files. The last array is the order of time, None without.
    """
    names = ("user", "item", "split", "row", "time")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    rows = positive = 0
    for part in self._reader:
      rows += len(part.chunk.rows)
      if part.label is not None:
        clicked = part.label == 1
        part = Rows(part.chunk.take(clicked), part.split[clicked], part.label[clicked])
      positive += len(part.chunk.rows)
      for name, array in self._interactions(part, rows).items():
        parts[name].append(array)
    user, item, split, row, time = (
      np.concatenate(parts.pop(name)) if parts[name] else np.empty(0, np.int64) for name in names
    )
    self.notes += self._reader.notes
    if self._without_items:
      self.notes.append(
        f"{self._without_items:,} of {rows:,} rows have no item in column {self._item!r}"
      )
    if self._table.name_of(spec.Label):
      self.notes.append(
        f"{positive:,} of {rows:,} rows are positive by the label, and are the interactions"
      )
    return user, item, split, row, np.argsort(time, kind="stable") if self._time else None

  def _interactions(self, part: Rows, rows: int) -> dict[str, np.ndarray]:
    chunk = part.chunk
    columns, parents = chunk.columns, np.arange(len(chunk.rows))
    items = columns[str(self._item)]
    if self._is_list():
      parents = pc.list_parent_indices(items).to_numpy(zero_copy_only=False)
      self._without_items += len(items) - len(np.unique(parents))
      items = items.flatten()
    if self._user is None:
      first = rows - len(chunk.rows)
      users = pa.array([str(first + i + 1) for i in range(len(chunk.rows))], pa.string())
    else:
      users = columns[self._user]
    users, items = self._matched(self._user, users), self._matched(self._item, items)
    user, item = self._codes["user"].add(users), self._codes["item"].add(items)
    self._collected["user"].add(user, columns)
    if not self._is_list():
      self._collected["item"].add(item, columns)
    if chunk.file not in self._first_rows:
      self._first_rows[chunk.file] = self._num_rows
    row = self._first_rows[chunk.file] + chunk.rows
    self._num_rows = int(row[-1]) if len(row) else self._num_rows
    whole = {
      "user": user[parents],
      "item": item,
      "split": part.split[parents],
      "row": row[parents],
    }
    return whole | {"time": columns[self._time][parents] if self._time else np.empty(0, np.int64)}

  def texts(self, side: str) -> list[str]:
    """Returns the ids of the "user"s or "item"s by number."""
    codes = self._codes[side]
    texts = spelled(codes.array, spelling_of(codes.array)).to_pylist()
    return texts if len(set(texts)) == len(codes) else codes.texts

  def write_split(self, folder: Path, row: np.ndarray, split: np.ndarray) -> None:
    """Writes `split.parquet`; see `rows.split_file`.

    Args:
      folder: where to.
      row, split: of each interaction; several in a row are several lines.
    """
    order = np.argsort(row, kind="stable")
    row, split = row[order], split[order]
    paths, first = list(self._first_rows), np.array([*self._first_rows.values()])
    with split_file(folder, self._table.names) as write:
      for path, start, stop in zip(paths, first, [*first[1:], np.inf], strict=True):
        of_file = slice(*np.searchsorted(row, (start, stop), side="right"))
        write(path, row[of_file] - start, split[of_file])

  def by_number(self, side: str) -> np.ndarray:
    """Numbers users or items anew, in the order of their ids; returns the number of each before.

    Raises:
      UserError: an id is no whole number.
    """
    texts = self.texts(side)
    if wrong := [text for text in texts if not (text.isascii() and text.isdecimal())]:
      raise UserError(f"found {wrong[0]!r} as the {side} of a row, expected a whole number")
    order = np.argsort(np.array([int(text) for text in texts]), kind="stable")
    self._codes[side] = Codes(texts[old] for old in order.tolist())
    return np.argsort(order)

  def user_values(self) -> dict[str, Any]:
    """Returns the values of the users' features by declared name."""
    return self._collected["user"].values()

  def _matched(self, name: str | None, texts: pa.Array) -> pa.Array:
    """Returns ids as the pattern of their column cuts them; raises UserError where none matches."""
    kind = self._table.kinds[name] if name else None
    if not isinstance(kind, spec.Category) or not kind.pattern:
      return texts
    matched = extracted(texts, kind.pattern)
    if matched.null_count:
      text = texts.filter(matched.is_null())[0].as_py()
      raise UserError(f"column {name!r}: the pattern {kind.pattern!r} does not match {text!r}")
    return matched

  def entities(
    self, users: tuple[np.ndarray, np.ndarray], items: tuple[np.ndarray, np.ndarray]
  ) -> tuple[Entities, Entities]:
    """Returns users and items, with their features.

    Args:
      users, items: their numbers, and which of them training rows have.
    """
    made = []
    for side, (kept, trained) in (("user", users), ("item", items)):
      texts = self.texts(side)
      is_trained = np.zeros(len(texts), bool)
      is_trained[kept[trained]] = True
      base = None
      if self._table.base is not None and (self._table.base / f"{side}s.parquet").exists():
        base = Entities.load(self._table.base, f"{side}s").fitted
      own = self._collected[side].entities(texts, is_trained, _BUCKETS, base, self._stage)
      own = own.numbered([texts[i] for i in kept])
      if side in self._table.sides:
        ids = Codes(texts[i] for i in kept[trained])
        other, notes = entities.read(
          self._table.sides[side], side, self._table.on_bad_row, ids, _BUCKETS, base, self._stage
        )
        self.notes += notes
        own = joined(own, other.numbered(own.texts), side)
      made.append(own)
    return made[0], made[1]


def _options_of_clicks(kind: spec.Kind) -> list[str]:
  """Returns the options of a user's or item's declaration that interactions have no use for."""
  options = ("min_count", "oov", "hash", "size", "table", "dim", "optimizer")
  default = type(kind)()
  return [name for name in options if getattr(kind, name) != getattr(default, name)]


def joined(own: Entities, other: Entities, side: str) -> Entities:
  """Returns entities with the features of both; raises UserError where two have one name."""
  for name in own.ids.keys() & other.ids.keys():
    raise UserError(f"{name!r} is declared in config.columns and in config.{side}_table: keep one")
  sharing.check_between({"config": own.fitted.kinds, f"config.{side}_table": other.fitted.kinds})
  fitted = own.fitted.merged(other.fitted)
  titles = own.titles if other.titles is None else other.titles
  return Entities(own.texts, fitted, {**own.ids, **other.ids}, own.dense, titles)


def _check_counts(table: Table, counts: tuple[int, ...]) -> None:
  """Raises UserError for other numbers than the published ones."""
  if table.counts and counts != table.counts:
    listed = "{:,} users, {:,} items and {:,} interactions".format(*counts)
    raise UserError(
      f"{table.rows.all_files[0]} has {listed}; the published file has "
      f"{', '.join(f'{number:,}' for number in table.counts)}: pass --config.counts='()' for "
      "another one."
    )


def _about_repeats(table: Table, repeats: int, rows: int) -> list[str]:
  if not repeats:
    return []
  note = f"{repeats:,} of {rows:,} interactions repeat an earlier one of the same user and item"
  if table.exclude_seen:
    note += ", and are merged with it" if table.duplicates != "keep" else ", and are kept"
    if repeats > _REPEATS * rows:
      note += (
        ". If people come back to the same items, set config.exclude_seen=False: repeats are then "
        "kept, and can be recommended"
      )
  elif table.duplicates == "merge":
    note += ", and are merged with it"
  return [note]


def _about_splits(
  user: np.ndarray, item: np.ndarray, split: np.ndarray, users: int, items: int
) -> list[str]:
  counts = np.bincount(split, minlength=3)
  notes = [
    f"{users:,} users, {items:,} items, "
    + ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))
  ]
  trained = {"user": np.unique(user[split == 0]), "item": np.unique(item[split == 0])}
  for name, ids in (("user", user), ("item", item)):
    unknown = int((~np.isin(ids[split == 2], trained[name])).sum())
    if unknown:
      notes.append(
        f"{unknown:,} of {counts[2]:,} test interactions are of {name}s that training never sees; "
        "they count in the metrics"
      )
  return notes
