"""Interactions of users with items: read from a table, cleaned, split and numbered."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import cache
from ..errors import UserError
from . import entities, spec, splitting
from .encoding import Entities, extracted
from .rows import RowReader, split_file
from .settings import SPLITS, Table
from .source import Stage
from .store import Store
from .values import plain, shown, spelled, spelling_of

_BUCKETS = 16  # of a number without buckets: towers take vectors only
_REPEATS = 0.1  # of the interactions, from where on the log is said to be full of repeats
_SIDES = ("user", "item")


@dataclasses.dataclass(frozen=True)
class Interactions:
  """Interactions in the order of time, or of the files where no time is declared.

  Attributes:
    user, item: int32 `[N]`.
    split: int8 `[N]`, the index in `SPLITS`.
    users, items: with their features.
    notes: lines for the user about what was counted, dropped or merged.
    time: int32 `[N]`, in seconds since the first; numbers that are no dates are taken as seconds.
      None where no time is declared.
  """

  user: np.ndarray
  item: np.ndarray
  split: np.ndarray
  users: Entities
  items: Entities
  notes: list[str]
  time: np.ndarray | None = None

  def history(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns all items of each user in the order of time, and where they begin, `[users + 1]`."""
    lengths = np.bincount(self.user, minlength=len(self.users.texts))
    return self.item[self._by_user()], np.concatenate([[0], np.cumsum(lengths)])

  def _by_user(self) -> np.ndarray:
    return np.argsort(self.user, kind="stable")

  def history_times(self) -> np.ndarray | None:
    """Returns the times of the items of `history`."""
    return None if self.time is None else self.time[self._by_user()]

  def save(self, folder: Path) -> None:
    """Writes what serving needs into a folder: raw ids, transforms, and every user's items."""
    items, offsets = self.history()
    cache.column(folder, "history", items.shape, np.int32)[:] = items
    cache.column(folder, "history_offsets", offsets.shape, np.int64)[:] = offsets
    cache.column(folder, "history_when", items.shape, np.int64)[:] = self._by_user()
    self.users.save(folder, "users")
    self.items.save(folder, "items")


def read(table: Table, by: str, folder: Path) -> Interactions:
  """Returns the interactions of a table, and writes their splits to `split.parquet`.

  Args:
    by: how they are split: "user", "last", "time", "order", "hash", "column" or "files".

  Raises:
    UserError: no item is declared, a row has no user or item, or nothing is left; or the engine is
      another one.
  """
  if table.engine != "duckdb":
    raise UserError(
      f"config.engine is {table.engine!r}, which prepares rows with a label, for recipes.dlrm: "
      "two_tower and sequence hold their interactions in memory, so leave the engine 'duckdb'"
    )
  if table.labels and not table.is_one_click:
    raise UserError(
      f"the labels are {', '.join(table.labels)}, and two_tower and sequence take one, of clicks, "
      "which are the interactions: remove the others from config.columns"
    )
  with Stage(folder / "stage") as stage:
    log = _Log(table, by, stage)
    user, item, split, place = _cleaned(table, by, log)
    # Numbered again, without those that have no interaction left.
    users, user = np.unique(user, return_inverse=True)
    items, item = np.unique(item, return_inverse=True)
    training = split == 0
    made = {
      "user": log.entities("user", users, users[np.unique(user[training])]),
      "item": log.entities("item", items, items[np.unique(item[training])]),
    }
    log.write_split(folder, place, split)
    time = log.seconds(place)
  table.check_unchanged()
  counts = len(users), len(items), len(user)
  if table.counts and counts != table.counts:
    listed = "{:,} users, {:,} items and {:,} interactions".format(*counts)
    raise UserError(
      f"{table.rows.all_files[0]} has {listed}; the published file has "
      f"{', '.join(f'{number:,}' for number in table.counts)}: pass --config.counts='()' for "
      "another one."
    )
  notes = log.notes + _about_splits(user, item, split, counts)
  return Interactions(
    user.astype(np.int32), item.astype(np.int32), split, made["user"], made["item"], notes, time
  )


def _cleaned(table: Table, by: str, log: "_Log") -> list[np.ndarray]:
  """Returns user, item, split and place of the interactions left, in the order of time."""
  rows = log.rows()
  repeats = ~splitting.first_of_pairs(*rows[:2])
  if repeats.any():
    log.notes.append(_about_repeats(table, int(repeats.sum()), len(repeats)))
  merge = table.duplicates == "merge" or (not table.duplicates and table.exclude_seen)
  if merge and repeats.any():
    rows = [each[~repeats] for each in rows]
  if table.core:
    kept, count = splitting.k_core(rows[0], rows[1], table.core), len(rows[0])
    rows, of = [each[kept] for each in rows], f"users and items with {table.core} or more"
    log.notes.append(f"{len(kept):,} of {count:,} interactions are of {of}")
  user, item, split, place = rows
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
  rows = [user, item, split, place]
  if not merge:  # an evaluation has each item of a user once
    once = (split == 0) | splitting.first_of_pairs(user, item, split)
    if table.exclude_seen:  # what is left out of a ranking cannot be found in it
      seen = (split > 0) & ~splitting.first_of_pairs(user, item)
      once &= ~seen
      log.notes.append(
        f"{int(seen.sum()):,} repeats are not validated or tested on, since exclude_seen leaves "
        "them out of the ranking"
      )
    rows = [each[once] for each in rows]
  return rows


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
    user, item, *_ = log.rows()
    first = splitting.first_of_pairs(user, item)
    return Pairs(user[first], item[first], log.texts["user"], log.texts["item"], log.values("user"))


class _Log:
  """Reads the rows of a table as interactions, and the features that the rows hold."""

  def __init__(self, table: Table, by: str, stage: Stage):
    self._table, self._stage, kinds = table, stage, table.kinds
    user, item = table.name_of(spec.User), table.name_of(spec.Item) or table.name_of(spec.Ordered)
    item = item or table.require(spec.Item, "and recommendations need one")
    self._is_list = kinds[item].read_as != "text"
    if not self._is_list:
      user = table.require(spec.User, "and recommendations need one")
    self._names, self._time = {"user": user, "item": item}, table.name_of(spec.Time)
    self._kinds: dict[str, dict[str, spec.Kind]] = {"user": {}, "item": {}}
    for name, kind in kinds.items():
      side = kind.side if isinstance(kind, spec.Side) else "item"
      if isinstance(kind, spec.Side | spec.Title) and side and name not in (user, item):
        self._kinds[side][name] = kind
      if isinstance(kind, spec.Cross) and side and {user, item} & set(kind.columns):
        raise UserError(
          f"column {name!r} crosses {' and '.join(kind.columns)}, and every user and item has a "
          "row of its own: cross features alone"
        )
    if self._is_list and self._kinds["item"]:
      raise UserError(
        "rows with several items cannot hold features of an item: use config.item_table"
      )
    by = by if by in ("time", "order", "hash", "column", "files") else ""
    required = [name for name in (user, None if self._is_list else item) if name]
    self._reader = RowReader(table, by, required, holds_out=False, stage=stage)
    stored = {n: kinds[n] for n in (user, item) if n} | self._kinds["user"] | self._kinds["item"]
    self._store = Store(stage, stored, {"split": pa.int8(), "file": pa.int32(), "row": pa.int64()})
    self._files: dict[Path, int] = {}  # by their numbers in the store
    self.texts: dict[str, pa.Array] = {}  # the ids of the "user"s and "item"s by number
    self.notes = [
      f"column {name!r}: {', '.join(options)} of its declaration is for dlrm, and has no effect "
      "here: every user and item has a row of its own, and config.core leaves out rare ones"
      for name in (user, item)
      if name and (options := _differing(kinds[name], (*spec.OF_TABLE, "table")))
    ]

  def rows(self) -> list[np.ndarray]:
    """Returns user, item, split and place in the store of each interaction, in the order of time.

    Users and items are numbered in the order of their first rows, or of their ids if those are
    whole numbers and the table says so.
    """
    time, rows, positive = [np.empty(0, np.int64)], 0, 0
    with self._store.writer() as write:
      for chunk, split, label in self._reader:
        rows += len(chunk.rows)
        if label is not None:
          chunk, split = chunk.take(label == 1), split[label == 1]
        positive += len(chunk.rows)
        file = np.full(len(chunk.rows), self._files.setdefault(chunk.file, len(self._files)))
        ids = {
          name: self._matched(name, chunk.columns[name]) for name in self._names.values() if name
        }
        write(chunk.columns | ids, split=split, file=file, row=chunk.rows)
        time += [chunk.columns[self._time]] if self._time else []
    self.notes += self._reader.notes
    if self._table.name_of(spec.Label):
      what = "rows are positive by the label, and are the interactions"
      self.notes.append(f"{positive:,} of {rows:,} {what}")
    self._times = np.concatenate(time)
    return self._numbered(self._times, rows)

  def seconds(self, place: np.ndarray) -> np.ndarray | None:
    """Returns the time of interactions by their places; see `Interactions`."""
    if not self._time:
      return None
    time = self._times[place]
    seconds = (time - time.min()) // (1_000_000 if self._reader.account.has_dates else 1)
    if seconds.max(initial=0) > np.iinfo(np.int32).max:
      self.notes.append(
        f"column {self._time!r} spans more than 68 years if its numbers are seconds, so that no "
        "model has times: declare dates, or divide milliseconds by 1000"
      )
      return None
    return seconds.astype(np.int32)

  def _matched(self, name: str, texts: pa.Array) -> pa.Array:
    """Returns ids as the pattern of their column cuts them; raises UserError where none matches."""
    pattern = getattr(self._table.kinds[name], "pattern", "")
    if not pattern:
      return texts
    flat = texts.flatten() if self._is_list and name == self._names["item"] else texts
    matched = extracted(flat, pattern)
    if matched.null_count:
      text = flat.filter(matched.is_null())[0].as_py()
      raise UserError(f"column {name!r}: the pattern {pattern!r} does not match {text!r}")
    return matched if flat is texts else pa.ListArray.from_arrays(texts.offsets, matched)

  def _numbered(self, time: np.ndarray, num_rows: int) -> list[np.ndarray]:
    store, query, columns = self._store, self._store.query, self._store.columns
    of_row = "(file_row_number + 1)::VARCHAR"  # is a user where none is declared
    who, what = (columns[name] if name else of_row for name in self._names.values())
    query(
      f"CREATE TEMP TABLE log AS SELECT file_row_number AS place, {who} AS user, "
      f"{f'unnest({what})' if self._is_list else what} AS item, split FROM {store.scan}"
    )
    with_items = "SELECT count(DISTINCT place) FROM log"
    if self._is_list and (empty := len(store) - query(with_items)[0][0].as_py()):
      listed = f"{empty:,} of {num_rows:,} rows have no item in column {self._names['item']!r}"
      self.notes.append(listed)
    for side in _SIDES:
      order = "first"
      if self._table.by_number:
        order = f"{side}::UBIGINT"
        wrong = query(f"SELECT {side} FROM log WHERE NOT regexp_full_match({side}, '\\d+') LIMIT 1")
        if len(wrong):
          text = shown(wrong[0][0].as_py())
          raise UserError(f"found {text} as the {side} of a row, expected a whole number")
      query(
        f"CREATE TEMP TABLE {side}s AS SELECT *, row_number() OVER (ORDER BY {order}) - 1 AS code "
        f"FROM (SELECT {side}, min(rowid) AS first, min(place) AS place FROM log GROUP BY {side})"
      )
      texts = query(f"SELECT {side} FROM {side}s ORDER BY code")[side].combine_chunks()
      one = spelled(texts, spelling_of(texts))
      self.texts[side] = one if len(one.unique()) == len(texts) else texts
    (count,) = query("SELECT count(*) FROM log")[0].to_pylist()
    rows = [np.empty(count, each) for each in (np.int32, np.int32, np.int8, np.uint32)]
    at = 0
    for batch in self._stage.engine.execute(
      "SELECT users.code::INTEGER, items.code::INTEGER, split, log.place::UINTEGER "
      "FROM log JOIN users USING (user) JOIN items USING (item) ORDER BY log.rowid"
    ).to_arrow_reader(1 << 16):
      for array, column in zip(rows, batch.columns, strict=True):
        array[at : at + len(batch)] = column.to_numpy()
      at += len(batch)
    if self._time:
      in_time = np.argsort(time[rows[3]], kind="stable")
      for number in range(len(rows)):  # one after the other: they may be most of the memory
        rows[number] = rows[number][in_time]
    return rows

  def values(self, side: str) -> dict[str, Any]:
    """Returns the values of the features of users or items, from the first row of each."""
    columns = {n: c for n, c in self._store.columns.items() if n in self._kinds[side]}
    if not columns:
      return {}
    found = self._store.query(
      f"SELECT {', '.join(f's.{column}' for column in columns.values())} FROM {self._store.scan} s "
      f"JOIN {side}s ON s.file_row_number = {side}s.place ORDER BY code"
    )
    values = {}
    for name, column in zip(columns, found.columns, strict=True):
      array = plain(column.combine_chunks())
      values[name] = (
        array.to_numpy(zero_copy_only=False) if pa.types.is_floating(array.type) else array
      )
    return values

  def write_split(self, folder: Path, place: np.ndarray, split: np.ndarray) -> None:
    """Writes `split.parquet`; see `rows.split_file`.

    Args:
      place, split: of each interaction; several in a row of a file are several lines.
    """
    order = np.argsort(place, kind="stable")  # files are one after the other in the store
    stored = lambda name: self._store.query(
      f"SELECT {name} FROM {self._store.scan} ORDER BY file_row_number"
    )[name].to_numpy()[place[order]]
    file, row = stored("file"), stored("row")  # one after the other: they may be large
    with split_file(folder, self._table.names) as write:
      for path, number in self._files.items():
        of_file = slice(*np.searchsorted(file, (number, number + 1)))
        write(path, row[of_file], split[order[of_file]])

  def entities(self, side: str, kept: np.ndarray, trained: np.ndarray) -> Entities:
    """Returns users or items with their features.

    Args:
      side: "user" or "item".
      kept: the numbers of those that are left.
      trained: the numbers of those that training rows have.
    """
    table, texts = self._table, self.texts[side]
    is_trained, base = np.isin(np.arange(len(texts)), trained), None
    if table.base is not None and (table.base / f"{side}s.parquet").exists():
      base = Entities.load(table.base, f"{side}s").fitted
    options: dict[str, Any] = {"stage": self._stage, "bucketed": _BUCKETS, "base": base}
    listed = texts.to_pylist()
    made = entities.encoded(listed, self._kinds[side], self.values(side), is_trained, **options)
    made = made.numbered([listed[number] for number in kept])
    if side in table.sides:
      ids = texts.take(pa.array(trained))
      other, notes = entities.read(table.sides[side], side, table.on_bad_row, ids, **options)
      self.notes += notes
      made = _joined(made, other.numbered(made.texts), side)
    return made


def _differing(kind: spec.Kind, options: tuple[str, ...]) -> list[str]:
  """Returns the options of a declaration that are not the defaults of its kind."""
  default = type(kind)()
  return [name for name in options if getattr(kind, name) != getattr(default, name)]


def _joined(own: Entities, other: Entities, side: str) -> Entities:
  """Returns entities with the features of both; raises UserError where two have one name."""
  for name in own.fitted.kinds.keys() & other.fitted.kinds.keys():
    raise UserError(f"{name!r} is declared in config.columns and in config.{side}_table: keep one")
  spec.check_between({"config": own.fitted.kinds, f"config.{side}_table": other.fitted.kinds})
  titles = own.titles if other.titles is None else other.titles
  fitted, ids = own.fitted.merged(other.fitted), {**own.ids, **other.ids}
  dense = np.concatenate([own.dense, other.dense], axis=1)  # vectors: all numbers are bucketed
  return Entities(own.texts, fitted, ids, dense, titles)


def _about_repeats(table: Table, repeats: int, rows: int) -> str:
  note = f"{repeats:,} of {rows:,} interactions repeat an earlier one of the same user and item"
  if table.exclude_seen:
    note += ", and are merged with it" if table.duplicates != "keep" else ", and are kept"
    if repeats > _REPEATS * rows:
      note += (
        ". If people come back to the same items, set config.exclude_seen=False: repeats are then "
        "kept, and can be recommended"
      )
  return note + ", and are merged with it" * (
    not table.exclude_seen and table.duplicates == "merge"
  )


def _about_splits(
  user: np.ndarray, item: np.ndarray, split: np.ndarray, sizes: tuple[int, int, int]
) -> list[str]:
  counts = np.bincount(split, minlength=3)
  parts = [f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True)]
  notes = [f"{sizes[0]:,} users, {sizes[1]:,} items, {', '.join(parts)}"]
  for name, ids in (("user", user), ("item", item)):
    if unknown := int((~np.isin(ids[split == 2], np.unique(ids[split == 0]))).sum()):
      notes.append(
        f"{unknown:,} of {counts[2]:,} test interactions are of {name}s that training never sees; "
        "they count in the metrics"
      )
  return notes
