"""Interactions of users with items: read from a table, cleaned, split and numbered."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import cache
from ..errors import UserError
from . import source, spec, splitting
from .clicks import hashing
from .fit import fit
from .settings import Table
from .transforms import Entities, Transforms
from .values import SPLITS

_BUCKETS = 16  # of a number without buckets: towers take vectors only
_SIDES = ("user", "item")


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
    lengths = np.bincount(self.user, minlength=len(self.users.texts))
    order = np.argsort(self.user, kind="stable")
    return self.item[order], np.concatenate([[0], np.cumsum(lengths)])

  def save(self, folder: Path) -> None:
    """Writes what serving needs into a folder: raw ids, transforms, and every user's items."""
    items, offsets = self.history()
    cache.column(folder, "history", items.shape, np.int32)[:] = items
    cache.column(folder, "history_offsets", offsets.shape, np.int64)[:] = offsets
    self.users.save(folder, "users")
    self.items.save(folder, "items")


def read(table: Table, by: str, folder: Path) -> Interactions:
  """Returns the interactions of a table.

  Args:
    by: how they are split: "user", "last", "time", "order", "hash", "column" or "files".

  Raises:
    UserError: no item is declared, a row has no user or item, or nothing is left.
  """
  with source.connect() as con, tempfile.TemporaryDirectory(dir=folder) as stage:
    log = _Log(con, table, by, Path(stage))
    user, item, split = _cleaned(table, by, log)
    # Numbered again, without those that have no interaction left.
    users, user = np.unique(user, return_inverse=True)
    items, item = np.unique(item, return_inverse=True)
    training = split == 0
    made = {
      "user": log.entities("user", users, users[np.unique(user[training])]),
      "item": log.entities("item", items, items[np.unique(item[training])]),
    }
  table.check_unchanged()
  notes = log.notes + _about_splits(user, item, split)
  return Interactions(
    user.astype(np.int32), item.astype(np.int32), split, made["user"], made["item"], notes
  )


def _cleaned(table: Table, by: str, log: "_Log") -> list[np.ndarray]:
  """Returns user, item and split of the interactions left, in the order of time."""
  rows = log.numbered()
  repeats = ~splitting.first_of_pairs(*rows[:2])
  if repeats.any():
    log.notes.append(_about_repeats(int(repeats.sum()), len(repeats), table.exclude_seen))
  # A ranking cannot find the items that it leaves out.
  if table.exclude_seen and repeats.any():
    rows = [each[~repeats] for each in rows]
  if table.core:
    kept, count = splitting.k_core(rows[0], rows[1], table.core), len(rows[0])
    rows, of = [each[kept] for each in rows], f"users and items with {table.core} or more"
    log.notes.append(f"{len(kept):,} of {count:,} interactions are of {of}")
  user, item, split = rows
  if not len(user):
    also = "".join(f"; {note}" for note in log.notes)
    raise UserError(
      f"no interaction is left: lower config.core, or check the label's settings{also}"
    )
  valid, test, seed = (table.split[name] for name in ("valid", "test", "seed"))
  if by == "user":
    split = splitting.per_user(user, valid, seed, test_fraction=test)
  elif by == "last":
    split = splitting.leave_one_out(user)
  elif by == "files" and "valid" not in table.rows.files:
    train = np.flatnonzero(split == 0)
    held_out = splitting.per_user(user[train], valid, seed, test_fraction=0.0)
    split[train[held_out == 1]] = 1
  rows = [user, item, split]
  if not table.exclude_seen:  # an evaluation has each item of a user once
    once = (split == 0) | splitting.first_of_pairs(user, item, split)
    rows = [each[once] for each in rows]
  return rows


class _Log:
  """Reads the rows of a table as interactions, and the features that the rows hold."""

  def __init__(self, con: Any, table: Table, by: str, stage: Path):
    self._table, self._con, kinds = table, con, table.kinds
    user, item = table.name_of(spec.User), table.name_of(spec.Item) or table.name_of(spec.Ordered)
    item = item or table.require(spec.Item, "and recommendations need one")
    self._is_list = kinds[item].is_list
    if not self._is_list:
      user = table.require(spec.User, "and recommendations need one")
    self._names, self._time = {"user": user, "item": item}, table.name_of(spec.Time)
    self._kinds: dict[str, dict[str, spec.Kind]] = {"user": {}, "item": {}}
    for name, kind in kinds.items():
      side = kind.side if isinstance(kind, spec.Side) else "item"
      if isinstance(kind, spec.Side | spec.Title) and side and name not in (user, item):
        self._kinds[side][name] = kind
    if self._is_list and self._kinds["item"]:
      raise UserError(
        "rows with several items cannot hold features of an item: write a row for each item"
      )
    by = by if by in ("time", "order", "hash", "column", "files") else ""
    required = [name for name in (user, None if self._is_list else item) if name]
    how = hashing(table, "" if by == "files" else by)
    self.rows = source.read(con, table.rows, stage, table.on_bad_row, required=required, **how)
    self.rows.split(by, table.split, holds_out=False)
    self.texts: dict[str, pa.Array] = {}  # the ids of the "user"s and "item"s by number
    self.notes = list(self.rows.notes)

  def numbered(self) -> list[np.ndarray]:
    """Returns user, item and split of each interaction, in the order of time.

    Users and items are numbered in the order of their first rows.
    """
    con, columns, label = self._con, self.rows.columns, self._table.name_of(spec.Label)
    positive = f" WHERE {columns[label]} = 1" if label else ""
    if label:
      liked = self.rows.query(f"SELECT count(*) FROM {self.rows.view}{positive}")[0][0].as_py()
      what = "rows are positive by the label, and are the interactions"
      self.notes.append(f"{liked:,} of {len(self.rows):,} {what}")
    # A row is a user where none is declared. Rows of one time stay in the order of the files.
    who, what = (columns[name] if name else "(place + 1)::VARCHAR" for name in self._names.values())
    time = columns[self._time] if self._time else "0"
    con.execute(
      "CREATE TEMP TABLE log AS SELECT * FROM ("
      f"SELECT {who} AS user, split, place, {time} AS time, "
      f"{f'unnest({what})' if self._is_list else what} AS item FROM {self.rows.view}{positive}"
      ") WHERE item IS NOT NULL"
    )
    for side in _SIDES:
      first = f"SELECT {side}, min(rowid) AS first, min(place) AS place FROM log GROUP BY {side}"
      con.execute(
        f"CREATE TEMP TABLE {side}s AS SELECT *, row_number() OVER (ORDER BY first) - 1 AS code "
        f"FROM ({first})"
      )
      found = self.rows.query(f"SELECT {side} FROM {side}s ORDER BY code")
      self.texts[side] = found[0].combine_chunks()
    answer = self.rows.query(
      "SELECT users.code::INTEGER, items.code::INTEGER, split FROM log JOIN users USING (user) "
      "JOIN items USING (item) ORDER BY time, log.rowid"
    )
    return [np.array(column.to_numpy()) for column in answer.columns]

  def values(self, side: str) -> dict[str, Any]:
    """Returns the values of the features of users or items, from the first row of each."""
    columns = {n: c for n, c in self.rows.columns.items() if n in self._kinds[side]}
    if not columns:
      return {}
    found = self.rows.query(
      f"SELECT {', '.join(f's.{column}' for column in columns.values())} FROM {self.rows.view} s "
      f"JOIN {side}s ON s.place = {side}s.place ORDER BY code"
    )
    return {n: x.combine_chunks() for n, x in zip(columns, found.columns, strict=True)}

  def entities(self, side: str, kept: np.ndarray, trained: np.ndarray) -> Entities:
    """Returns users or items, whose features are fitted on and computed of their values.

    Args:
      side: "user" or "item".
      kept: the numbers of those that are left.
      trained: the numbers of those that training rows have, which are fitted on.
    """
    kinds, base = self._kinds[side], None
    if self._table.base is not None and (self._table.base / f"{side}s.parquet").exists():
      base = Entities.load(self._table.base, f"{side}s").transforms
    texts = self.texts[side].take(pa.array(kept)).to_pylist()
    values = {name: x.take(pa.array(kept)) for name, x in self.values(side).items()}
    features = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Side)}
    for name, kind in features.items():
      if isinstance(kind, spec.Number):
        features[name] = dataclasses.replace(kind, buckets=kind.buckets or _BUCKETS)
    transforms = Transforms({}, {}, {}, {})
    if features:
      columns = {name: f"c{place}" for place, name in enumerate(values)}
      split, place = (~np.isin(kept, trained)).astype(np.int8), np.arange(len(texts))
      names = [*columns.values(), "split", "place"]
      self._con.register("entities", pa.table([*values.values(), split, place], names))
      transforms, _ = fit(self._con, "entities", columns, features, base)
    ids = {feature.name: transforms.ids(values, feature.name) for feature in transforms.features}
    title = spec.only(kinds, spec.Title)
    titles = values[title].to_pylist() if title else None
    return Entities(texts, transforms, ids, titles)


def _about_repeats(repeats: int, rows: int, exclude_seen: bool) -> str:
  note = f"{repeats:,} of {rows:,} interactions repeat an earlier one of the same user and item"
  if not exclude_seen:
    return note
  return note + (
    ", and are merged with it. If people come back to the same items, set "
    "config.exclude_seen=False: repeats are then kept, and can be recommended"
  )


def _about_splits(user: np.ndarray, item: np.ndarray, split: np.ndarray) -> list[str]:
  counts = np.bincount(split, minlength=3)
  parts = [f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True)]
  notes = [f"{user.max() + 1:,} users, {item.max() + 1:,} items, {', '.join(parts)}"]
  for name, ids in (("user", user), ("item", item)):
    if unknown := int((~np.isin(ids[split == 2], np.unique(ids[split == 0]))).sum()):
      notes.append(
        f"{unknown:,} of {counts[2]:,} test interactions are of {name}s that training never sees; "
        "they count in the metrics"
      )
  return notes
