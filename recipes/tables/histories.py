"""Histories: what the user of a row did before it, as positions beside the row's own ids.

The log is stored once, in the order of users and times, and each row stores where its part of it
starts and stops: 16 bytes a row, and 4 for each value of a position. Positions are cut out when a
batch is read.

Rows of an earlier time are seen, whatever their split; rows of the same time and of later times are
never in the part of a row.
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
    by: "row", "label" or "time".
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
    has_dates: whether times are dates, not numbers.
  """

  name: str
  parts: tuple[Part, ...]
  width: int
  where: str = ""
  combiner: str = "mean"
  has_dates: bool = False

  @classmethod
  def loaded(cls, about: Mapping[str, Any]) -> "History":
    """Returns what `dataclasses.asdict` has made a dict of."""
    return cls(**{**about, "parts": tuple(Part(**part) for part in about["parts"])})

  @property
  def has_ages(self) -> bool:
    """Whether positions tell how long ago they were."""
    return self.parts[-1].by == "time"

  def features(self, own: Mapping[str, Feature]) -> Iterator[Feature]:
    """Yields the feature of each part, given those of the rows by name."""
    for part in self.parts:
      feature = Feature(part.name, part.size)
      if not part.size:
        table = own[part.of].table or part.of
        feature = dataclasses.replace(own[part.of], name=part.name, table=table, candidate=part.of)
      yield dataclasses.replace(
        feature, valency=self.width, combiner=self.combiner, history=self.name
      )


def declared(table: "Table") -> list[History]:
  """Returns the declared histories; a width of 0 is left to the data."""
  kinds, found = table.kinds, []
  for name, kind in kinds.items():
    if not spec.is_history(kind):
      continue
    place, beside = f"config.columns[{name!r}]", []
    table.require(spec.User, f"whose earlier rows {name!r} holds")
    table.require(spec.Time, f"which says what rows {name!r} holds")
    if kind.where and not isinstance(kinds.get(kind.where), spec.Label):
      raise UserError(f"{place}.where is {kind.where!r}: name a declared label")
    if not _is_single(kinds.get(kind.of)):
      raise UserError(
        f"{place}.of is {kind.of!r}: name a declared item, or a category of one value"
      )
    for column in kind.beside:
      beside.append(part := _beside(table, name, kind.of, column))
      if part.name in kinds:
        raise UserError(f"{place} makes a feature {part.name!r}, which is declared too: rename one")
    parts = sorted([Part(name, kind.of), *beside], key=lambda part: part.by == "time")
    found.append(History(name, tuple(parts), kind.max_length, kind.where, kind.combiner))
  return found


def _is_single(kind: spec.Kind | None) -> bool:
  return isinstance(kind, spec.Category) and not kind.is_list


def _beside(table: "Table", name: str, of: str, column: str) -> Part:
  kind, part = table.kinds.get(column), functools.partial(Part, f"{name}_{column}", column)
  if isinstance(kind, spec.Label):
    return part("label", 2)
  if isinstance(kind, spec.Time):
    return part("time", AGES)
  if _is_single(kind):
    return part()
  raise UserError(
    f"config.columns[{name!r}].beside names {column!r}: name categories of one value, the "
    "time, or labels"
  )


# --- which rows -----------------------------------------------------------------------------------


def ordered(
  users: np.ndarray, times: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows in the order of users and times, and the spans in it of what was before each row.

  Args:
    users: int `[N]`, -1 where a row has none.
    times: numbers `[N]`; rows of one time stay in their order.
    kept: bool `[N]`, the rows that histories hold.

  >>> rows, spans = ordered(np.array([0, 1, 0, 0]), np.array([30, 10, 10, 30]), np.ones(4, bool))
  >>> rows.tolist(), spans.tolist()
  ([2, 0, 3, 1], [[0, 1], [3, 3], [0, 0], [0, 1]])
  """
  clock, ticks = np.unique(times, return_inverse=True)
  starts = users.astype(np.int64) * len(clock)
  keys = starts + ticks
  rows = np.flatnonzero(kept & (users >= 0))
  rows = rows[np.argsort(keys[rows], kind="stable")]
  spans = np.searchsorted(keys[rows], np.stack([starts, keys], axis=1))
  return rows, np.where((users >= 0)[:, None], spans, 0)


@dataclasses.dataclass(frozen=True)
class Log:
  """The values of M rows in order, of which spans are the histories of N rows.

  Attributes:
    width: positions of a history.
    parts: the values of each part but for the age, int32 `[M, C]`: C is 2 for raw ids of a dynamic
      vocabulary, else 1.
    spans: where the history of a row starts and stops, `[N, 2]`.
    times, now: `[M]`, and of the rows `[N]`, if they have ages.
  """

  width: int
  parts: Sequence[np.ndarray]
  spans: np.ndarray
  times: np.ndarray | None = None
  now: np.ndarray | None = None

  def positions(self, rows: Any) -> list[np.ndarray]:
    """Returns the last positions of B rows for each part, int32 `[B, width * C]`, -1 after."""
    spans = self.spans[rows]
    kept = np.minimum(spans[:, 1] - spans[:, 0], self.width)
    first = spans[:, 1] - kept
    blocks = [taken(part, first, kept, self.width) for part in self.parts]
    if self.times is not None and self.now is not None:
      passed = self.now[rows][:, None] - taken(self.times, first, kept, self.width)
      inside = np.arange(self.width) < kept[:, None]
      blocks.append(np.where(inside, ages(passed), np.int32(-1)))
    return [block.reshape(len(spans), -1) for block in blocks]


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

_FOLDER = "histories"  # of prepared columns


class Rows:
  """The rows of a table in the order of users and times, while it is prepared.

  Args:
    widths: of the histories of an earlier run, which do not shrink.

  Attributes:
    histories: with their widths.
    notes: a line about each.
  """

  def __init__(
    self,
    table: "Table",
    declared: Sequence[History],
    rows: "source.Rows",
    widths: Mapping[str, int],
  ):
    user, time = str(table.name_of(spec.User)), str(table.name_of(spec.Time))
    parts = [*rows.batches([user, time, *table.labels])]
    column = lambda name: pa.chunked_array([part.values[name] for part in parts])
    encoded = column(user).dictionary_encode().combine_chunks()
    users = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    split, times = np.concatenate([part.split for part in parts]), column(time).to_numpy()
    self._labels = {
      name: pc.fill_null(column(name).cast(pa.int32()), -1).to_numpy() for name in table.labels
    }
    by_split = np.argsort(split, kind="stable")
    self._places = np.argsort(by_split)
    self._times, self.histories, self.notes = times[by_split], list[History](), list[str]()
    self._spans = []
    for history in declared:
      kept = self._labels[history.where] == 1 if history.where else np.ones(len(times), bool)
      order, spans = ordered(users, times, kept)
      lengths = (spans[:, 1] - spans[:, 0])[split == 0]
      longest = max(int(lengths.max(initial=0)), widths.get(history.name, 1))
      width = history.width or min(longest, _LONGEST)
      used = f", of which the last {width} are used: its max_length says how many"
      self.notes.append(
        f"history {history.name!r}: {lengths.mean():.1f} earlier rows in a training row, at "
        f"most {longest:,}{used if longest > width else ''}"
      )
      self.histories.append(dataclasses.replace(history, width=width, has_dates=rows.has_dates))
      self._spans.append((order, spans[by_split]))

  def logs(self, features: Sequence[Feature], ids: np.ndarray) -> Iterator[Log]:
    """Yields the log of each history.

    Args:
      features: in the order of their columns in `ids`.
      ids: int32 `[N, W]`, the rows of a split together.
    """
    ends = np.cumsum([feature.columns for feature in features])
    of = {f.name: slice(end - f.columns, end) for f, end in zip(features, ends, strict=True)}
    for history, (order, spans) in zip(self.histories, self._spans, strict=True):
      places, parts = self._places[order], []
      for part in history.parts:
        if part.by == "label":
          parts.append(self._labels[part.of][order][:, None])
        elif part.by != "time":
          parts.append(ids[:, of[part.of]][places])
      timed = (self._times[places], self._times) if history.has_ages else ()
      yield Log(history.width, parts, spans, *timed)

  def write(self, folder: Path, features: Sequence[Feature]) -> list[Any]:
    """Writes the logs for `Columns`, and returns their meta; see `logs`."""
    past, about = files.new_folder(folder / _FOLDER), list[Any]()
    for log in self.logs(features, np.load(folder / "ids.npy", mmap_mode="r")):
      arrays = {"spans": log.spans, "times": log.times, "now": log.now}
      arrays |= {str(place): part for place, part in enumerate(log.parts)}
      for name, array in arrays.items():
        if array is not None:
          np.save(past / f"{len(about)}_{name}", array)
      about.append((log.width, len(log.parts)))
    return about


class Columns(cache.Columns):
  """Prepared columns; `ids` have the positions of histories behind them when they are read."""

  def __getitem__(self, name: str) -> Any:
    return self._ids if name == "ids" else super().__getitem__(name)

  @functools.cached_property
  def _ids(self) -> "_Ids":
    past, logs = cache.Columns(self.folder / _FOLDER), []
    about = files.read_json(self.folder / cache.META)["histories"]
    for number, (width, count) in enumerate(about):
      parts = [past[f"{number}_{place}"] for place in range(count)]
      times, now = (past.get(f"{number}_{name}") for name in ("times", "now"))
      logs.append(Log(width, parts, past[f"{number}_spans"], times, now))
    return _Ids(super().__getitem__("ids"), logs)


class _Ids:
  """Ids int32 `[N, W]` of rows and of their histories; indexing makes those."""

  def __init__(self, ids: np.ndarray, logs: Sequence[Log]):
    self._ids, self._logs = ids, logs
    self.shape, self.dtype = (len(ids), self[:1].shape[1]), ids.dtype

  def __len__(self) -> int:
    return len(self._ids)

  def __getitem__(self, rows: Any) -> np.ndarray:
    blocks = [self._ids[rows], *(x for log in self._logs for x in log.positions(rows))]
    return np.concatenate(blocks, axis=1)
