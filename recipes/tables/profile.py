"""A sample of a table's rows: the values of its columns, and what they say of the label."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import DamagedFileError
from . import source, spec
from .formats import Format
from .transforms import indices_of, numbers_of
from .values import Column as FileColumn
from .values import typed, value_of

JOIN = "\x1f"  # of the items of a list in its text
_PLACES = 5  # files, or row groups of a Parquet file, that rows are read of
_BAD = 0.2  # the share of rows that cannot be read, from where on the file or an option is wrong
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
    if self.stored not in ("text", "number", "time"):
      return None
    if self.numbers is not None:
      return None if self.placeholders else self.numbers
    return times_of(self.texts)

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
    lists = pc.split_pattern(self.texts, separator)
    items = pc.utf8_trim_whitespace(lists.flatten())
    lists = pa.ListArray.from_arrays(lists.offsets, items)
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
    relation: of the connection, with the rows.
  """

  columns: dict[str, Column]
  total: int
  places: int
  skipped: list[str]
  con: Any
  relation: str

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
    places = {name: f"f{place}" for place, name in enumerate(self.columns)}
    texts = [f"CAST({places[name]} AS VARCHAR)" for name in sorted(columns)]
    query = f"SELECT {source.hashed(seed, texts)} AS hash FROM {self.relation}"
    answer = self.con.execute(query).to_arrow_table()
    hashes = answer["hash"].to_numpy()
    bounds = [round(each * 2**32) for each in (2 * share, share)]
    return sum((hashes < bound).astype(np.int8) for bound in bounds)

  def repeated(self) -> float:
    """Returns the share of rows that repeat another row in all columns."""
    codes = [column.codes for column in self.columns.values()]
    rows = pa.table(codes, [*map(str, range(len(codes)))])  # Arrow takes "a.b" for a path
    return 1 - rows.group_by(rows.column_names).aggregate([]).num_rows / self.num_rows


def times_of(texts: pa.StringArray) -> np.ndarray | None:
  """Returns texts as microseconds since 1970, int64 `[V]`; None if one is no date."""
  with source.connect() as con:
    con.register("texts", pa.table({"t": texts}))
    time = "epoch_us(TRY_CAST(t AS TIMESTAMPTZ))"
    for limit in ("LIMIT 20", ""):
      answer = con.execute(f"SELECT {time} FROM (FROM texts {limit})").to_arrow_table()[0]
      if answer.null_count:
        return None
  return answer.to_numpy()


def dates_of(parts: Sequence[np.ndarray]) -> np.ndarray | None:
  """Returns year, month, day and so on, `[N]` each, as microseconds; None if one is no date."""
  names = [f"f{place}" for place in range(len(parts))]
  with source.connect() as con:
    con.register("parts", pa.table([*map(pa.array, parts)], names))
    kind = spec.Time(columns=tuple(names))
    value = value_of(kind, [FileColumn(name, name, "DOUBLE") for name in names], ())
    answer = con.execute(typed("parts", {"c0": value})).to_arrow_table()
  return None if answer["c0"].null_count else answer["c0"].to_numpy()


def numbers_in(texts: pa.StringArray) -> np.ndarray:
  """Returns texts as numbers, float64 `[V]`; NaN for those that are none."""
  with source.connect() as con:
    con.register("texts", pa.table({"f0": texts}))
    value = value_of(spec.Number(), [FileColumn("", "f0", "VARCHAR")], ())
    answer = con.execute(typed("texts", {"c0": value})).to_arrow_table()
  return numbers_of(answer["c0"].combine_chunks())


def read(paths: Sequence[str], format: Format, num_rows: int) -> Sample:
  """Reads a sample: the first rows, and of several files or row groups some of each.

  Raises:
    DamagedFileError: a file or many of its rows cannot be read, or it has no rows; names it.
    UserError: the format does not fit the files.
  """
  con, counts = source.connect(), dict[str, tuple[int, str]]()
  chosen = [paths[index] for index in _spread(len(paths))]
  files = [source.open_file(con, path, format) for path in chosen]
  names = list(files[0].columns)
  places, rows, total = 0, 0, 0
  for index, file in enumerate(files):
    limit = max((num_rows - rows) // (len(files) - index), 1)
    relation, parts, count = _some_of(con, file, limit)
    chosen_columns = ", ".join(f"{file.column(name).raw} AS f{n}" for n, name in enumerate(names))
    into = "INSERT INTO sample" if index else "CREATE TABLE sample AS"
    source.asked(con, file.path, f"{into} SELECT {chosen_columns} FROM {relation} LIMIT {limit}")
    read = source.count(con, "sample") - rows
    bad, left_out = source.rejected(con, file, format, "skip")
    counts |= left_out
    if len(bad) > _BAD * (read + len(bad)):
      source.rejected(con, file, format, "raise")  # says what to write
    rows, places = rows + read, places + parts
    total += count or _estimate(con, file, read, limit, names)
  if not rows:
    raise DamagedFileError(f"{paths[0]} has a header and no rows.")
  if len(files) < len(paths):
    sizes = (sum(map(os.path.getsize, group)) for group in (paths, chosen))
    total = max(int(total * next(sizes) / next(sizes)), rows + 1)
  columns = {
    name: column_of(con, "sample", name, f"f{n}", files[0].column(name).stored, format.missing)
    for n, name in enumerate(names)
  }
  skipped = [f"{n:,} rows: {problem} (first: {first})" for problem, (n, first) in counts.items()]
  return Sample(columns, total, places, skipped, con, "sample")


def _spread(count: int) -> list[int]:
  """Returns the indices of up to `_PLACES` of `count` places, the first and the last included."""
  return np.unique(np.linspace(0, count - 1, min(count, _PLACES)).astype(int)).tolist()


def _some_of(con: Any, file: source.File, limit: int) -> tuple[str, int, int]:
  """Returns a relation of some rows, of how many places they are, and how many the file has.

  The last is 0 where it is not known.
  """
  if not os.path.exists(file.path) or "read_parquet" not in file.relation:
    return file.relation, 1, 0
  parquet = pq.ParquetFile(file.path)
  total, groups = parquet.metadata.num_rows, _spread(parquet.num_row_groups)
  if total <= limit:
    return file.relation, 1, total
  size = max(limit // len(groups), 1)
  tables = [parquet.read_row_group(group).slice(0, size) for group in groups]
  table = pa.concat_tables(tables)
  con.register("groups", table.rename_columns([f"f{n}" for n in range(table.num_columns)]))
  return "groups", len(groups), total


def _estimate(con: Any, file: source.File, read: int, limit: int, names: Sequence[str]) -> int:
  """Returns about how many rows a text file has, of which `read` are in the sample."""
  if read < limit:
    return read
  if file.path.endswith((".gz", ".zst")) or not os.path.exists(file.path):
    return max(source.count(con, file.relation), read)
  widths = " + ".join(f"coalesce(strlen(CAST(f{n} AS VARCHAR)), 0) + 1" for n in range(len(names)))
  (mean,) = con.execute(f"SELECT avg({widths}) FROM sample").fetchone()
  return max(int(os.path.getsize(file.path) / mean), read + 1)


def column_of(
  con: Any, relation: str, name: str, column: str, stored: str, missing: Sequence[str]
) -> Column:
  """Returns a column of a relation, "" and `missing` being none."""
  kind = "list" if stored.endswith("]") and "STRUCT" not in stored else _stored(stored)
  if kind == "nested":
    sql = "NULL::VARCHAR"
  else:
    of = spec.Bag() if kind == "list" else spec.Category()
    value = value_of(of, [FileColumn(name, column, stored)], missing)
    sql = typed(relation, {"c": value})
    joined = "nullif(array_to_string(c, chr(31)), '')" if kind == "list" else "c"
    sql = f"SELECT {joined} AS text FROM ({sql})"
  sql = sql if sql.startswith("SELECT") else f"SELECT {sql} AS text FROM {relation}"
  encoded = con.execute(sql).to_arrow_table()["text"].combine_chunks().dictionary_encode()
  codes = indices_of(encoded).astype(np.int64)
  counts = np.bincount(codes[codes >= 0], minlength=len(encoded.dictionary))
  order = np.argsort(-counts, kind="stable")
  codes, counts = np.append(np.argsort(order), -1)[codes], counts[order]  # -1 takes the last
  texts = encoded.dictionary.take(pa.array(order)).cast(pa.string())
  numbers, placeholders = None, ()
  if kind in ("text", "number") and len(texts):
    numbers = numbers_in(texts)
    bad = np.isnan(numbers)
    few = texts.filter(pa.array(bad)).to_pylist() if bad.sum() <= _FEW_TEXTS else []
    are_words = not any(letter.isdigit() for text in few for letter in text)
    is_rare = len(texts) >= 20 + len(few) and counts[bad].sum() < counts.sum() / 2
    if bad.any() and not (few and kind == "text" and are_words and is_rare):
      numbers = None
    else:
      placeholders = tuple(few)
  return Column(name, kind, codes, texts, counts, numbers, placeholders)


def _stored(stored: str) -> str:
  """Returns the type of a column by DuckDB's."""
  if re.match("STRUCT|MAP|UNION", stored) or stored.endswith("]"):
    return "nested"
  if stored == "BOOLEAN":
    return "yes/no"
  if re.match("TIMESTAMP|DATE", stored):
    return "time"
  return "text" if stored in ("VARCHAR", "JSON", "BLOB") or stored.startswith("ENUM") else "number"
