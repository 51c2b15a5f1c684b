"""Histories: what the user of a row did before it, as positions beside the row's own ids.

The log is stored once, in the order of users and times, and each row stores where its part of it
starts and stops: 16 bytes a row, and 4 for each of its ids. Positions are cut out when a batch is
read.

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

_LONGEST = 64  # positions where `max_length` leaves them open


@dataclasses.dataclass(frozen=True)
class History:
  """A history that is built of the log.

  Attributes:
    name: of its feature, and of the list column that has it in rows to predict for.
    of: the declared column whose ids it holds.
    width: positions.
    where: a label that is 1 in its rows; "" is any row.
    combiner: of vectors that are pooled.
  """

  name: str
  of: str
  width: int
  where: str = ""
  combiner: str = "mean"

  def feature(self, own: Mapping[str, Feature]) -> Feature:
    """Returns its feature, given those of the rows by name."""
    return dataclasses.replace(
      own[self.of],
      name=self.name,
      table=own[self.of].table or self.of,
      valency=self.width,
      combiner=self.combiner,
      history=self.of,
    )


def declared(table: "Table") -> list[History]:
  """Returns the declared histories; a width of 0 is left to the data."""
  kinds, found = table.kinds, []
  for name, kind in kinds.items():
    if not spec.is_history(kind):
      continue
    place, of = f"config.columns[{name!r}]", kinds.get(kind.of)
    table.require(spec.User, f"whose earlier rows {name!r} holds")
    table.require(spec.Time, f"which says what rows {name!r} holds")
    if kind.where and not isinstance(kinds.get(kind.where), spec.Label):
      raise UserError(f"{place}.where is {kind.where!r}: name a declared label")
    if not isinstance(of, spec.Category) or of.is_list:
      raise UserError(
        f"{place}.of is {kind.of!r}: name a declared item, or a category of one value"
      )
    found.append(History(name, kind.of, kind.max_length, kind.where, kind.combiner))
  return found


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
  """The ids of M rows in order, of which spans are the histories of N rows.

  Attributes:
    width: positions of a history.
    ids: int32 `[M, C]`: C is 2 for raw ids of a dynamic vocabulary, else 1.
    spans: where the history of a row starts and stops, `[N, 2]`.
  """

  width: int
  ids: np.ndarray
  spans: np.ndarray

  def positions(self, rows: Any) -> np.ndarray:
    """Returns the last positions of B rows, int32 `[B, width * C]`, -1 after."""
    spans = self.spans[rows]
    kept = np.minimum(spans[:, 1] - spans[:, 0], self.width)
    return taken(self.ids, spans[:, 1] - kept, kept, self.width).reshape(len(spans), -1)


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
    labels = {history.where for history in declared if history.where}
    parts = [*rows.batches([user, time, *labels])]
    column = lambda name: pa.chunked_array([part.values[name] for part in parts])
    encoded = column(user).dictionary_encode().combine_chunks()
    users = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    split, times = np.concatenate([part.split for part in parts]), column(time).to_numpy()
    by_split = np.argsort(split, kind="stable")
    self._places = np.argsort(by_split)
    self.histories, self.notes, self._spans = list[History](), list[str](), []
    for history in declared:
      kept = np.ones(len(times), bool)
      if history.where:
        kept = pc.fill_null(pc.equal(column(history.where), 1), False).to_numpy()
      order, spans = ordered(users, times, kept)
      lengths = (spans[:, 1] - spans[:, 0])[split == 0]
      longest = max(int(lengths.max(initial=0)), widths.get(history.name, 1))
      width = history.width or min(longest, _LONGEST)
      used = f", of which the last {width} are used: its max_length says how many"
      self.notes.append(
        f"history {history.name!r}: {lengths.mean():.1f} earlier rows in a training row, at "
        f"most {longest:,}{used if longest > width else ''}"
      )
      self.histories.append(dataclasses.replace(history, width=width))
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
      yield Log(history.width, ids[:, of[history.of]][self._places[order]], spans)

  def write(self, folder: Path, features: Sequence[Feature]) -> list[int]:
    """Writes the logs for `Columns`, and returns their widths; see `logs`."""
    past, widths = files.new_folder(folder / _FOLDER), list[int]()
    for log in self.logs(features, np.load(folder / "ids.npy", mmap_mode="r")):
      np.save(past / f"{len(widths)}_ids", log.ids)
      np.save(past / f"{len(widths)}_spans", log.spans)
      widths.append(log.width)
    return widths


class Columns(cache.Columns):
  """Prepared columns; `ids` have the positions of histories behind them when they are read."""

  def __getitem__(self, name: str) -> Any:
    return self._ids if name == "ids" else super().__getitem__(name)

  @functools.cached_property
  def _ids(self) -> "_Ids":
    past = cache.Columns(self.folder / _FOLDER)
    widths = files.read_json(self.folder / cache.META)["histories"]
    logs = [Log(width, past[f"{n}_ids"], past[f"{n}_spans"]) for n, width in enumerate(widths)]
    return _Ids(super().__getitem__("ids"), logs)


class _Ids:
  """Ids int32 `[N, W]` of rows and of their histories; indexing makes those."""

  def __init__(self, ids: np.ndarray, logs: Sequence[Log]):
    self._ids, self._logs = ids, logs
    self.shape, self.dtype = (len(ids), self[:1].shape[1]), ids.dtype

  def __len__(self) -> int:
    return len(self._ids)

  def __getitem__(self, rows: Any) -> np.ndarray:
    positions = (log.positions(rows) for log in self._logs)
    return np.concatenate([self._ids[rows], *positions], axis=1)
