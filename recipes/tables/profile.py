"""A sample of a table's rows: the values of its columns, and what they say of the label."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sklearn.metrics import roc_auc_score

from ..errors import DamagedFileError
from . import source, spec
from .formats import Format
from .transforms import indices_of, numbers_of
from .values import Column as FileColumn
from .values import typed, value_of

JOIN = "\x1f"  # of the items of a list in its text
_PLACES = 5  # files, or row groups of a Parquet file, that rows are read of
_BAD = 0.2  # the share of rows that cannot be read, from where on the file or an option is wrong
_OFTEN = 20  # rows of a value from where on its outcomes are no chance
_FEW_TEXTS = 3  # that stand for a missing value in a column of numbers


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


def leak(column: Column, y: np.ndarray) -> str:
  """Returns how a column alone tells the outcome, as none known before could; "" if it does not.

  Args:
    column: of N rows.
    y: float64 `[N]`, 1 for a click, 0 for none, NaN for rows that are left out.
  """
  is_filled = ~np.isnan(y) & (column.codes >= 0)
  codes, filled, rate = column.codes[is_filled], y[is_filled], np.nanmean(y)
  rows, clicks = np.bincount(codes), np.bincount(codes, filled)
  if filled.size and filled.min() == filled.max():
    chance = len(filled) * np.log(rate if filled[0] else 1 - rate)  # of one outcome alone
    return ("no clicks", "clicks only")[int(filled[0])] if chance < -14 else ""
  is_pure = (rows >= _OFTEN) & ((clicks == 0) | (clicks == rows))
  if rows[is_pure].sum() >= 0.99 * len(filled) > 0:
    return "tells the outcome"
  if column.numbers is not None and min(filled.sum(), (1 - filled).sum()) >= 10:
    numbers = np.nan_to_num(column.of_rows[is_filled])
    auc = float(roc_auc_score(filled, numbers))
    return f"AUC {max(auc, 1 - auc):.3f}" if max(auc, 1 - auc) >= 0.99 else ""
  return ""


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

  def split(self, columns: Sequence[str]) -> np.ndarray:
    """Returns the part of each row in a split by hash of columns: 0 train, 1 valid, 2 test."""
    places = {name: f"f{place}" for place, name in enumerate(self.columns)}
    texts = [f"CAST({places[name]} AS VARCHAR)" for name in sorted(columns)]
    query = f"SELECT {source.hashed(0, texts)} AS hash FROM {self.relation}"
    answer = self.con.execute(query).to_arrow_table()
    hashes = answer["hash"].to_numpy()
    bounds = [round(share * 2**32) for share in (0.2, 0.1)]
    return sum((hashes < bound).astype(np.int8) for bound in bounds)


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
