"""Histories: what the user of a row did before it, as positions beside the row's own ids.

A history of 50 positions in every row would be a hundred times the log. So the log is stored once,
in the order of users and times, and each row stores where its part of it starts and stops: 16 bytes
a row, and 4 for each value of a position. Positions are cut out when a batch is read.

Rows of an earlier time are seen, whatever their split; rows of the same time and of later times are
never in the part of a row. Training, evaluation and serving cut with the same functions.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import cache, files
from ..errors import UserError
from ..training.features import Feature
from . import spec

if TYPE_CHECKING:  # predictions do without what they import
  from . import source
  from .settings import Table

AGES = 64  # rows of the table of ages: powers of two of the unit of time
_LONGEST = 64  # positions where `max_length` leaves them open


@dataclasses.dataclass(frozen=True)
class Part:
  """A value at each position of a history.

  Attributes:
    name: of its feature, and of the list column that has it in rows to predict for.
    of: the declared column.
    by: "row", where the value is of the earlier row, "table" of a file of items or users by their
      ids, "label" or "time".
    size: rows of its table, of labels and times.
  """

  name: str
  of: str
  by: str = "row"
  size: int = 0


@dataclasses.dataclass(frozen=True)
class History:
  """A history that is built of the log.

  Attributes:
    parts: the values at a position; the age is the last one.
    where: a label that is 1 in its rows; "" is any row.
    combiner: of vectors that are pooled.
    separator: between two positions of a text.
    has_dates: whether times are dates, not numbers.
  """

  name: str
  parts: tuple[Part, ...]
  width: int
  where: str = ""
  combiner: str = "mean"
  separator: str = "|"
  has_dates: bool = False

  @classmethod
  def loaded(cls, about: Mapping[str, Any]) -> "History":
    """Returns what `dataclasses.asdict` has made a dict of."""
    return cls(**{**about, "parts": tuple(Part(**part) for part in about["parts"])})

  @property
  def labels(self) -> tuple[str, ...]:
    """The labels that it is of."""
    labels = [part.of for part in self.parts if part.by == "label"]
    return (*filter(None, [self.where]), *labels)

  @property
  def has_ages(self) -> bool:
    """Whether positions tell how long ago they were."""
    return self.parts[-1].by == "time"

  def features(self, own: Mapping[str, Feature]) -> Iterator[Feature]:
    """Yields the feature of each part, given those of the rows by name."""
    for part in self.parts:
      like = Feature(part.name, part.size) if part.size else own[part.of]
      table = like.table or like.name
      about: Any = {"name": part.name, "table": "" if table == part.name else table}
      about |= {"valency": self.width, "combiner": self.combiner, "history": self.name}
      about |= {"candidate": "" if part.size else part.of}
      yield dataclasses.replace(like, **about)


def declared(table: "Table") -> list[History]:
  """Returns the declared histories; a width of 0 is left to the data.

  Raises:
    UserError: a history names what is no column of its kind, or user or time are not declared.
  """
  kinds, found = table.kinds, []
  for side, source in table.sides.items():
    for name, kind in source.kinds.items():
      if spec.is_history(kind):
        raise UserError(
          f"config.{side}_table.columns[{name!r}] has `of`: declare it in config.columns"
        )
  for name, kind in kinds.items():
    if not spec.is_history(kind):
      continue
    place = f"config.columns[{name!r}]"
    table.require(spec.User, f"whose earlier rows {name!r} holds")
    table.require(spec.Time, f"which says what rows {name!r} holds")
    if kind.where and not isinstance(kinds.get(kind.where), spec.Label):
      raise UserError(f"{place}.where is {kind.where!r}: name a declared label")
    if not _is_single(kinds.get(kind.of)):
      raise UserError(
        f"{place}.of is {kind.of!r}: name a declared item, or a category of one value"
      )
    parts = [Part(name, kind.of)]
    parts += [_beside(table, name, kind.of, each) for each in kind.beside]
    for part in parts[1:]:
      if part.name in kinds:
        raise UserError(f"{place} makes a feature {part.name!r}, which is declared too: rename one")
    parts.sort(key=lambda part: part.by == "time")
    found.append(
      History(name, tuple(parts), kind.max_length, kind.where, kind.combiner, kind.separator)
    )
    table_of = spec.table_of(kind.of, kinds[kind.of])
    for other, each in kinds.items():  # one table has one combiner
      if isinstance(each, spec.Bag) and each.combiner != kind.combiner:
        owner = each.of if spec.is_history(each) else other
        if owner in kinds and spec.table_of(owner, kinds[owner]) == table_of:
          raise UserError(f"{place} and {other!r} share a table: give both one combiner")
  return found


def _is_single(kind: spec.Kind | None) -> bool:
  return isinstance(kind, spec.Category) and not kind.is_list


def _beside(table: "Table", name: str, of: str, column: str) -> Part:
  """Returns the values of a declared column beside those of a history."""
  kind, part = table.kinds.get(column), functools.partial(Part, f"{name}_{column}", column)
  if isinstance(kind, spec.Label):
    return part("label", 2)
  if isinstance(kind, spec.Time):
    return part("time", AGES)
  if _is_single(kind):
    return part()
  side = table.kinds[of].kind  # "user" or "item", or a kind without a table
  if side in table.sides and _is_single(table.sides[side].kinds.get(column)):
    return part("table")
  raise UserError(
    f"config.columns[{name!r}].beside names {column!r}: name categories of one value, of the rows "
    f"or in the table of {of!r}, the time, or labels"
  )


# --- which rows -----------------------------------------------------------------------------------


class Order:
  """Rows in the order of users and, of each, of time.

  Args:
    users: int `[N]`, -1 where a row has none.
    times: numbers `[N]`.
    kept: bool `[N]`, the rows that histories hold.

  Attributes:
    rows: the numbers of these rows in order; those of one time are in the order they came in.

  >>> order = Order(np.array([0, 1, 0, 0]), np.array([30, 10, 10, 30]), np.ones(4, bool))
  >>> order.rows.tolist(), order.before(np.array([0, 1, 0]), np.array([30, 30, 31])).tolist()
  ([2, 0, 3, 1], [[0, 1], [3, 4], [0, 3]])
  """

  def __init__(self, users: np.ndarray, times: np.ndarray, kept: np.ndarray):
    self._clock = np.unique(times)
    rows = np.flatnonzero(kept & (users >= 0))
    keys = self._keys(users[rows], times[rows])
    order = np.argsort(keys, kind="stable")
    self.rows, self._sorted = rows[order], keys[order]

  def _keys(self, users: np.ndarray, times: np.ndarray) -> np.ndarray:
    ticks = np.searchsorted(self._clock, times)
    return users.astype(np.int64) * (len(self._clock) + 1) + ticks

  def before(self, users: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns where the rows of these users start, and those before these times stop: `[n, 2]`."""
    first = users.astype(np.int64) * (len(self._clock) + 1)
    ends = np.stack([first, self._keys(users, times)], axis=1)
    return np.where((users >= 0)[:, None], np.searchsorted(self._sorted, ends), 0)


@dataclasses.dataclass(frozen=True)
class Log:
  """The values of rows in order, of which spans are histories.

  Attributes:
    ids: int32 `[M, C]`, the values of the parts side by side, but for the age.
    times: `[M]`; None where no age is asked for.
    width: positions of a history.
    columns: how many each part has in `ids`: two for a raw id of a dynamic vocabulary.
  """

  ids: np.ndarray
  times: np.ndarray | None
  width: int
  columns: Sequence[int]

  @classmethod
  def joined(cls, blocks: Sequence[np.ndarray], times: np.ndarray | None, width: int) -> "Log":
    """Returns the log of parts, int `[M, columns]` each."""
    ids = np.concatenate(blocks, axis=1).astype(np.int32)
    return cls(ids, times, width, [block.shape[1] for block in blocks])

  @property
  def row(self) -> int:
    """The columns of a history in `ids` of a row."""
    return self.width * (sum(self.columns) + (self.times is not None))

  def positions(self, spans: np.ndarray, now: np.ndarray | None) -> list[np.ndarray]:
    """Returns the last positions of B spans for each part, int32 `[B, width * columns]`, -1 after.

    Args:
      spans: where each starts and stops, `[B, 2]`.
      now: the times that ages are counted to, `[B]`.
    """
    kept = np.minimum(spans[:, 1] - spans[:, 0], self.width)
    first = spans[:, 1] - kept
    blocks = taken(self.ids, first, kept, self.width)
    ids = np.split(blocks, np.cumsum(self.columns)[:-1], axis=-1)
    if self.times is not None:
      assert now is not None
      passed = now[:, None] - taken(self.times, first, kept, self.width)
      inside = np.arange(self.width) < kept[:, None]
      ids.append(np.where(inside, ages(passed), np.int32(-1)))
    return [np.ascontiguousarray(part).reshape(len(spans), -1) for part in ids]


def ages(differences: np.ndarray) -> np.ndarray:
  """Returns the buckets of ages, int32: powers of two of the unit that times have.

  >>> ages(np.array([0.5, 1, 2, 3, 4, 1000])).tolist()
  [0, 0, 1, 1, 2, 9]
  """
  buckets = np.floor(np.log2(np.maximum(differences, 1)))
  return np.minimum(buckets, AGES - 1).astype(np.int32)


def taken(flat: np.ndarray, first: np.ndarray, kept: np.ndarray, width: int) -> np.ndarray:
  """Returns `kept` values of a flat array from `first` on, `[B, width, ...]`, -1 after."""
  places = np.arange(width)
  index, inside = np.minimum(first[:, None] + places, max(len(flat) - 1, 0)), places < kept[:, None]
  none = np.full((*index.shape, *flat.shape[1:]), -1, np.int32)
  inside = inside.reshape(*inside.shape, *[1] * (flat.ndim - 1))
  return np.where(inside, flat[index], none) if len(flat) else none


# --- prepared tables ------------------------------------------------------------------------------

_PREFIX = "history_"  # of the columns that batches do not have


class Rows:
  """Users, times, splits and labels of all rows of a table, while it is prepared."""

  def __init__(self, table: "Table", declared: Sequence[History], rows: "source.Rows"):
    self._declared, self._has_dates = declared, rows.has_dates
    self._user, self._time = str(table.name_of(spec.User)), str(table.name_of(spec.Time))
    self._labels = {label for history in declared for label in history.labels}
    parts = [*rows.batches([self._user, self._time, *self._labels])]
    users = [part.values[self._user].dictionary_encode() for part in parts]
    merged = pa.chunked_array(users).unify_dictionaries().combine_chunks()
    self._users = pc.fill_null(merged.indices, -1).to_numpy(zero_copy_only=False)
    column = lambda name: np.concatenate([part.values[name].to_numpy(False) for part in parts])
    self._split, times = np.concatenate([part.split for part in parts]), column(self._time)
    labels = {name: np.nan_to_num(column(name).astype(float), nan=-1) for name in self._labels}
    self._values = {self._time: times} | {n: each.astype(np.int32) for n, each in labels.items()}

  def ordered(self, widths: Mapping[str, int]) -> tuple[list[History], list[str]]:
    """Puts the rows in order; returns the histories with their widths, and lines about them.

    Args:
      widths: of an earlier run, which do not shrink.
    """
    users, times = self._users, self._values[self._time]
    self._made, made, notes = [], [], []
    for history in self._declared:
      kept = self._values[history.where] == 1 if history.where else np.ones(len(times), bool)
      order = Order(users, times, kept)
      spans = order.before(users, times)
      lengths = (spans[:, 1] - spans[:, 0])[self._split == 0]
      longest = max(int(lengths.max(initial=0)), widths.get(history.name, 1))
      width = history.width or min(longest, _LONGEST)
      used = f", of which the last {width} are used: its max_length says how many"
      notes.append(
        f"history {history.name!r}: {lengths.mean():.1f} earlier rows in a training row, at "
        f"most {longest:,}{used if longest > width else ''}"
      )
      made.append(dataclasses.replace(history, width=width, has_dates=self._has_dates))
      self._made.append((order, spans))
    return made, notes

  def write(
    self, folder: Path, histories: Sequence[History], places: Mapping[str, slice]
  ) -> list[Any]:
    """Writes the log of each history, and the spans of the table's rows; returns their meta.

    Args:
      folder: with `ids` of all rows, those of a split together.
      places: of the features in `ids`.
    """
    by_split = np.argsort(self._split, kind="stable")
    at = np.empty_like(by_split)
    at[by_split] = np.arange(len(at))
    ids, about = np.load(folder / "ids.npy", mmap_mode="r"), []
    _write(folder, "now", self.times[by_split])
    for number, (log, spans) in enumerate(self.logs(histories, places, ids, at)):
      _write(folder, f"{number}_spans", spans[by_split])
      _write(folder, f"{number}_ids", log.ids)
      if log.times is not None:
        _write(folder, f"{number}_times", log.times)
      about.append((log.width, log.columns, log.times is not None))
    return about

  def logs(
    self, histories: Sequence[History], places: Mapping[str, slice], ids: np.ndarray, at: np.ndarray
  ) -> list[tuple[Log, np.ndarray]]:
    """Returns the log of each history, and the spans of all N rows in it.

    Args:
      places: of the features in `ids`.
      ids: int32 `[N, W]`.
      at: of each row, its place in `ids`.
    """
    logs = []
    for history, (order, spans) in zip(histories, self._made, strict=True):
      rows, blocks = order.rows, []
      for part in history.parts:
        if part.by == "label":
          blocks.append(self._values[part.of][rows][:, None])
        elif part.by != "time":
          blocks.append(ids[:, places[part.of]][at[rows]])
      times = self.times[rows] if history.has_ages else None
      logs.append((Log.joined(blocks, times, history.width), spans))
    return logs

  @property
  def times(self) -> np.ndarray:
    """The times of the rows, `[N]`."""
    return self._values[self._time]


def _write(folder: Path, name: str, values: np.ndarray) -> None:
  cache.column(folder, _PREFIX + name, values.shape, values.dtype)[:] = values


class Columns(cache.Columns):
  """Prepared columns; `ids` have the positions of histories behind them when they are read."""

  def __init__(self, folder: str | Path):
    super().__init__(folder)
    self._histories = files.read_json(self.folder / "meta.json")["histories"]

  def __iter__(self) -> Iterator[str]:
    return (name for name in self._names if not name.startswith(_PREFIX))

  def __len__(self) -> int:
    return sum(1 for _ in self)

  def __getitem__(self, name: str) -> Any:
    column = super().__getitem__
    if name != "ids":
      return column(name)
    logs = []
    for number, (width, columns, has_ages) in enumerate(self._histories):
      of = lambda what, number=number: column(f"{_PREFIX}{number}_{what}")
      times = of("times") if has_ages else None
      logs.append((Log(of("ids"), times, width, columns), of("spans")))
    return _Ids(column("ids"), column(f"{_PREFIX}now"), logs)


class _Ids:
  """Ids int32 `[N, W]` of rows and of their histories; indexing makes those."""

  def __init__(self, ids: np.ndarray, now: np.ndarray, logs: Sequence[tuple[Log, np.ndarray]]):
    self._ids, self._now, self._logs = ids, now, logs
    self.shape = (len(ids), ids.shape[1] + sum(log.row for log, _ in logs))
    self.dtype = ids.dtype

  def __len__(self) -> int:
    return len(self._ids)

  def __getitem__(self, rows: Any) -> np.ndarray:
    blocks, now = [self._ids[rows]], self._now[rows]
    for log, spans in self._logs:
      blocks += log.positions(spans[rows], now)
    return np.concatenate(blocks, axis=1)
