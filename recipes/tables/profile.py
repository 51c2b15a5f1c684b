"""A sample of a table's rows: the values of its columns, and what they say of the label."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedFileError
from .formats import Format
from .reading import Ledger, Reader
from .source import File, Stage, TextFile, batches, open_file, opened
from .splitting import by_hash
from .values import as_lists, as_numbers, as_texts, as_times, indices_of, plain, refusal

JOIN = "\x1f"  # of the items of a list in its text
_PLACES = 5  # files, or row groups of a Parquet file, that rows are read of
_BAD = 0.2  # the share of rows that cannot be read, from where on the file or an option is wrong
_ROWS = 1 << 16  # that are hashed at once
_FEW_TEXTS = 3  # that stand for a missing value in a column of numbers
_FOLDS = 5
_SEED = 8_675_309  # of folds, and hardly of made data, whose values would be one with the folds
_PRIOR = 10  # rows that the label's mean weighs in the mean of a value
_INTERVALS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
  """The values of a column in N rows, V of them distinct.

  Attributes:
    stored: "text", "list", "number", "time", "yes/no", or "nested", which no recipe reads.
    codes: int64 `[N]`, the index of each row's value in `texts`; -1 where it is missing.
    texts: `[V]`, the values as text, the most frequent first; a list's items joined by `JOIN`.
    counts: int64 `[V]`, the rows of each.
    numbers: float64 `[V]`, NaN for placeholders; None if the values are no numbers.
    placeholders: the few texts that seem to say that a number is missing, as "-" or "unknown".
  """

  name: str
  stored: str
  codes: np.ndarray
  texts: pa.StringArray
  counts: np.ndarray
  numbers: np.ndarray | None
  placeholders: tuple[str, ...]

  @functools.cached_property
  def distinct(self) -> int:
    """V."""
    return len(self.texts)

  @functools.cached_property
  def present(self) -> int:
    """How many rows have a value."""
    return int(self.counts.sum())

  @property
  def missing(self) -> float:
    """The share of rows without a value."""
    return 1 - self.present / len(self.codes)

  @functools.cached_property
  def of_rows(self) -> np.ndarray:
    """The numbers, float64 `[N]`, NaN where there is none."""
    assert self.numbers is not None
    return np.append(self.numbers, np.nan)[self.codes]

  @functools.cached_property
  def is_whole(self) -> bool:
    """Whether the values are whole numbers."""
    return self.numbers is not None and bool((np.nan_to_num(self.numbers) % 1 == 0).all())

  @functools.cached_property
  def times(self) -> np.ndarray | None:
    """The values as times, int64 or float64 `[V]`; None if one is neither a number nor a date."""
    if self.stored not in ("text", "number", "time") or as_times(self.texts[:20], {}, "")[1]:
      return None
    times, problems = as_times(self.texts, {}, "")
    return None if problems else times

  @functools.cached_property
  def is_dated(self) -> bool:
    """Whether the values are dates, or dates with times of day."""
    return bool(self.present) and self.numbers is None and self.times is not None

  def type(self) -> str:
    """Returns the type that the values have."""
    if not self.distinct:
      return "nested" if self.stored == "nested" else "empty"
    if self.numbers is not None:
      return "integer" if self.is_whole else "number"
    return "time" if self.is_dated else self.stored

  def items(self, separator: str) -> tuple[pa.StringArray, np.ndarray, np.ndarray]:
    """Returns the parts of the values, and of each part: how many values have it, how many rows."""
    lists = as_lists(self.texts, separator, ())[0]
    parts = lists.flatten().dictionary_encode()
    of_part, lengths = parts.indices.to_numpy(), pc.list_value_length(lists).to_numpy()
    size = len(parts.dictionary)
    rows = np.bincount(of_part, np.repeat(self.counts, lengths), size)
    return parts.dictionary, np.bincount(of_part, minlength=size), rows


class Evidence(NamedTuple):
  """What a column alone says of the label, on rows that its means are not from.

  Attributes:
    leak: how it tells the outcome, as no column known before could; "" if it does not.
    favors: "number" or "category", where the label tells which of the two it is; else "".
    gain: nats that intervals of the numbers save of a constant's log loss, over all rows.
  """

  leak: str
  favors: str
  gain: float


def evidence(column: Column, y: np.ndarray) -> Evidence:
  """Compares means of the label by value with means by up to 256 intervals of numbers.

  Args:
    column: of N rows; a missing value is a value like others.
    y: float64 `[N]`, 1 for a click, 0 for none, NaN for rows that are left out.
  """
  known = ~np.isnan(y)
  y, codes = y[known], column.codes[known] + 1
  rate, intervals = y.mean(), np.zeros(column.distinct + 1, np.int64)
  if column.numbers is not None:
    order = np.argsort(column.numbers)  # placeholders are last
    middle = (np.cumsum(column.counts[order]) - column.counts[order] / 2) / column.present
    number = min(max(column.distinct // 4, 2), _INTERVALS)
    intervals[order + 1] = 1 + (number * middle).astype(int)
  means = [_means(codes, y), _means(intervals[codes], y)]
  saved = [np.log(np.where(y > 0, p / rate, (1 - p) / (1 - rate))) for p in means]
  # A frequent value has an interval of its own, and tells no order.
  is_shared = np.bincount(intervals[1:])[intervals[codes]] > 1
  by_value, by_order = (float(each[is_shared].sum()) for each in saved)
  noise = max(np.sqrt((each[is_shared] ** 2).sum()) for each in saved)  # of both sums, by chance
  favors = ""
  if max(by_value, by_order) > 3 * noise:
    favors = "number" if by_order > 0.8 * by_value else ""
    favors = "category" if by_value - by_order > max(0.2 * by_value, 2 * noise) else favors
  leak, filled = "", y[codes > 0]
  if min(y.sum(), (1 - y).sum()) >= 10 and (auc := max(_auc(p, y) for p in means)) >= 0.99:
    leak = f"AUC {auc:.3f}"
  elif 0 < len(filled) < len(y) and filled.min() == filled.max():
    chance = len(filled) * np.log(rate if filled[0] else 1 - rate)  # of one outcome alone
    leak = ("no clicks", "clicks only")[int(filled[0])] if chance < -14 else ""
  return Evidence(leak, favors, float(saved[1].sum()))


def _means(codes: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns the mean of each row's code in the rows of other folds, drawn to the mean of all."""
  size = int(codes.max()) + 1
  folds = np.random.default_rng(_SEED).integers(_FOLDS, size=len(y))
  cells = folds * size + codes
  clicks = np.bincount(codes, y)[codes] - np.bincount(cells, y)[cells]
  rows = np.bincount(codes)[codes] - np.bincount(cells)[cells]
  return (clicks + _PRIOR * y.mean()) / (rows + _PRIOR)


def _auc(scores: np.ndarray, y: np.ndarray) -> float:
  of_row = np.unique(scores.round(12), return_inverse=True)[1]
  clicks, others = np.bincount(of_row, y), np.bincount(of_row, 1 - y)
  return float(clicks @ (np.cumsum(others) - others / 2) / (clicks.sum() * others.sum()))


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rows of a table.

  Attributes:
    columns: by name, in the order of the files.
    total: rows of the table, an estimate for text files that were not read whole.
    places: in the files that the rows are from.
    skipped: lines about rows that cannot be read.
    files: of the table, or some of them.
    limits: rows that were read of each file, at most.
  """

  columns: dict[str, Column]
  total: int
  places: int
  skipped: list[str]
  files: list[File]
  stage: Stage
  limits: dict[Path, int]

  @property
  def num_rows(self) -> int:
    """How many rows were read."""
    return len(next(iter(self.columns.values())).codes)

  @property
  def is_all(self) -> bool:
    """Whether all rows were read."""
    return self.num_rows == self.total

  def split(self, columns: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Returns the part of each row in a split by hash of columns: 0 train, 1 valid, 2 test."""
    hashes = [
      chunk.content
      for file in self.files
      for chunk, _ in batches(
        file, self.stage, columns, _ROWS, seed=seed, limit=self.limits[file.path]
      )
      if chunk.content is not None
    ]
    return by_hash(np.concatenate(hashes), (share, share))

  def repeated(self) -> float:
    """Returns the share of rows that repeat another row in all columns."""
    codes = [column.codes for column in self.columns.values()]
    rows = pa.table(codes, [*map(str, range(len(codes)))])  # Arrow takes "a.b" for a path
    return 1 - rows.group_by(rows.column_names).aggregate([]).num_rows / self.num_rows


def read(paths: Sequence[Path], format: Format, num_rows: int) -> Sample:
  """Reads a sample: the first rows, and of several files or row groups some of each.

  Raises:
    DamagedFileError: a file or many of its rows cannot be read, or it has no rows; names it.
    UserError: the format does not fit the files.
  """
  names, stage, ledger = open_file(paths[0], format).names, Stage(), Ledger("skip")
  chosen = [paths[index] for index in _spread(len(paths))]
  files = Reader(chosen, dict.fromkeys(names, "any"), format=format, stage=stage).files
  pieces: dict[str, list[pa.Array]] = {name: [] for name in names}  # all files have them
  limits, places, rows, total = dict[Path, int](), 0, 0, 0
  for index, file in enumerate(files):
    limit, read = max((num_rows - rows) // (len(files) - index), 1), 0
    limits[file.path] = limit
    _, faults, share = file.stored(stage, limit)
    tables, count = _tables(file, stage, limit)
    for table in tables:
      for name, stored in file.stored_names.items():
        if name in pieces:
          pieces[name] += table[stored].slice(0, limit - read).chunks
      read += min(len(table), limit - read)
    ledger.add(file.path, faults)
    if len(faults) > _BAD * (read + len(faults)):
      Ledger("raise").add(file.path, faults)  # says what to write
    rows, places = rows + read, places + len(tables)
    total += count if share == 1 else max(int(read / share), read + 1)
  if not rows:
    raise DamagedFileError(f"{paths[0]} has a header and no rows.")
  if len(files) < len(paths):
    sizes = (sum(path.stat().st_size for path in group) for group in (paths, chosen))
    total = max(int(total * next(sizes) / next(sizes)), rows + 1)
  columns = {name: of_arrays(name, parts, format.missing) for name, parts in pieces.items()}
  return Sample(columns, total, places, ledger.lines(), files, stage, limits)


def _spread(count: int) -> list[int]:
  """Returns the indices of up to `_PLACES` of `count` places, the first and the last included."""
  return np.unique(np.linspace(0, count - 1, min(count, _PLACES)).astype(int)).tolist()


def _tables(file: File, stage: Stage, num_rows: int) -> tuple[list[pa.Table], int]:
  """Returns all rows of a stored file, or the first ones of some row groups; how many there are."""
  with opened(file.stored(stage, num_rows).path) as parquet:
    total, count = parquet.metadata.num_rows, parquet.num_row_groups
    is_all = total <= num_rows or isinstance(file, TextFile)
    groups = [list(range(count))] if is_all else [[group] for group in _spread(count)]
    size = max(total if is_all else num_rows // len(groups), 1)
    try:
      batches = (next(parquet.iter_batches(size, row_groups=each), None) for each in groups)
      return [pa.table(batch) for batch in batches if batch], total
    except (pa.ArrowException, OSError) as error:
      raise DamagedFileError(f"{file.path} is damaged ({error}). Copy it again.") from error


def of_arrays(name: str, arrays: Sequence[pa.Array], missing: Sequence[str]) -> Column:
  """Returns a column of values as they are stored, "" and `missing` being none."""
  parts = [_as_text(plain(array), missing).cast(pa.large_string()) for array in arrays]
  encoded = pa.chunked_array(parts).combine_chunks().dictionary_encode()
  codes = indices_of(encoded).astype(np.int64)
  counts = np.bincount(codes[codes >= 0], minlength=len(encoded.dictionary))
  order = np.argsort(-counts, kind="stable")
  codes, counts = np.append(np.argsort(order), -1)[codes], counts[order]  # -1 takes the last
  texts = encoded.dictionary.take(pa.array(order)).cast(pa.string())
  stored, numbers, placeholders = _stored(arrays), None, ()
  if stored in ("text", "number") and len(texts):
    numbers, problems = as_numbers(texts, ())
    bad = np.logical_or.reduce([np.zeros(len(texts), bool), *(each.bad for each in problems)])
    few = texts.filter(pa.array(bad)).to_pylist() if bad.sum() <= _FEW_TEXTS else []
    are_words = not any(letter.isdigit() for text in few for letter in text)
    is_rare = len(texts) >= 20 + len(few) and counts[bad].sum() < counts.sum() / 2
    if bad.any() and not (few and stored == "text" and are_words and is_rare):
      numbers = None
    else:
      numbers, placeholders = np.where(bad, np.nan, numbers), tuple(few)
  return Column(name, stored, codes, texts, counts, numbers, placeholders)


def _as_text(array: pa.Array, missing: Sequence[str]) -> pa.StringArray:
  """Returns values as text, null where missing, and what no recipe reads as null."""
  if not pa.types.is_nested(array.type):
    return as_texts(array, missing)[0].dictionary_decode()
  if not pa.types.is_list(array.type) or refusal(array.type, ("list", "")) is not None:
    return pa.nulls(len(array), pa.string())
  joined = pc.binary_join(as_lists(array, "", missing)[0], JOIN)
  return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)


def _stored(arrays: Sequence[pa.Array]) -> str:
  """Returns the type that all arrays with one have; "text" where they differ."""
  types = {_type(plain(array).type) for array in arrays} - {"null"}
  return types.pop() if len(types) == 1 else "text"


def _type(stored: pa.DataType) -> str:
  if pa.types.is_list(stored) and not pa.types.is_nested(stored.value_type):
    return "list"
  kinds = {
    "null": (pa.types.is_null,),
    "nested": (pa.types.is_nested,),
    "yes/no": (pa.types.is_boolean,),
    "time": (pa.types.is_timestamp, pa.types.is_date),
    "number": (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
  }
  return next((name for name, tests in kinds.items() if any(t(stored) for t in tests)), "text")
