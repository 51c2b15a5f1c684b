"""A sample of a table's rows, and the statistics of its columns."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .finding import file_format
from .formats import Format
from .reading import Reader, columns_of
from .values import as_lists, as_numbers, as_texts, as_times, plain, refusal

JOIN = "\x1f"  # of the items of a list in its text
_PLACES = 5  # files, or row groups of a Parquet file, that rows are read of
_CHUNK = 20_000
_BAD = 0.2  # the share of rows that cannot be read, from where on the file or an option is wrong
_FEW_TEXTS = 3  # that stand for a missing value in a column of numbers


@dataclasses.dataclass(frozen=True)
class Column:
  """The values of a column in N rows.

  Attributes:
    name: of the column.
    stored: "text", "list", "number", "time", "yes/no", or "nested", which no recipe reads.
    codes: int64 `[N]`, the index of each row's value in `texts`; -1 where it is missing.
    texts: the distinct values as text, the most frequent first; a list's items joined by `JOIN`.
    counts: int64, how often each of them occurs.
    bytes: of all values as text.
  """

  name: str
  stored: str
  codes: np.ndarray
  texts: pa.StringArray
  counts: np.ndarray
  bytes: int

  @property
  def rows(self) -> int:
    return len(self.codes)

  @property
  def distinct(self) -> int:
    return len(self.texts)

  @property
  def present(self) -> int:
    """How many rows have a value."""
    return int(self.counts.sum())

  @property
  def missing(self) -> float:
    """The share of rows without a value."""
    return 1 - self.present / self.rows

  @functools.cached_property
  def unreadable(self) -> np.ndarray:
    """Which of `texts` are no numbers, bool."""
    problems = as_numbers(self.texts, ())[1]
    return np.logical_or.reduce([np.zeros(self.distinct, bool), *(each.bad for each in problems)])

  @functools.cached_property
  def placeholders(self) -> tuple[str, ...]:
    """The few texts that seem to say that a number is missing, as "-" or "unknown"."""
    bad = np.flatnonzero(self.unreadable)
    if self.stored != "text" or not 0 < len(bad) <= _FEW_TEXTS or self.distinct < 20 + len(bad):
      return ()
    texts = tuple(self.texts[int(index)].as_py() for index in bad)
    is_word = all(not any(letter.isdigit() for letter in text) for text in texts)
    return texts if is_word and self.counts[bad].sum() < self.present / 2 else ()

  @functools.cached_property
  def numbers(self) -> np.ndarray | None:
    """The texts as float64, nan where one is a placeholder; None if they are no numbers."""
    if self.stored not in ("text", "number") or not self.distinct:
      return None
    if self.unreadable.any() and not self.placeholders:
      return None
    return np.where(self.unreadable, np.nan, as_numbers(self.texts, self.placeholders)[0])

  @functools.cached_property
  def is_whole(self) -> bool:
    """Whether the values are whole numbers."""
    if self.numbers is None:
      return False
    finite = self.numbers[~np.isnan(self.numbers)]
    return bool((np.trunc(finite) == finite).all())

  @functools.cached_property
  def is_dated(self) -> bool:
    """Whether the values are dates or times of day and date."""
    if self.stored == "time":
      return True
    if self.stored != "text" or not self.distinct or self.numbers is not None:
      return False
    return not as_times(self.texts, {}, self.name)[1]

  @functools.cached_property
  def times(self) -> np.ndarray | None:
    """The texts as times, int64; None if they are neither numbers nor dates."""
    times, problems = as_times(self.texts, {}, self.name)
    return None if problems else times

  def of_rows(self) -> np.ndarray:
    """Returns the numbers of all rows that have one, float64."""
    assert self.numbers is not None
    values = self.numbers[self.codes[self.codes >= 0]]
    return values[~np.isnan(values)]

  def type(self) -> str:
    """Returns the type that the values have."""
    if not self.distinct:
      return "nested" if self.stored == "nested" else "empty"
    if self.numbers is not None:
      return "integer" if self.is_whole else "number"
    return "time" if self.is_dated else self.stored

  def items(self, separator: str) -> tuple[pa.StringArray, np.ndarray]:
    """Returns the items of each distinct value one after the other, and how many each has."""
    lists = as_lists(self.texts, separator, ())[0]
    return lists.flatten(), pc.list_value_length(lists).to_numpy(zero_copy_only=False)


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rows of a table.

  Attributes:
    columns: in the order of the files.
    num_rows: how many rows were read.
    total: rows of the table; an estimate for text files that were not read whole, 0 if unknown.
    is_all: whether all rows were read.
    places: in the files that the rows are from.
    skipped: lines about rows that cannot be read.
  """

  columns: list[Column]
  num_rows: int
  total: int
  is_all: bool
  places: int
  skipped: list[str]


def read(paths: Sequence[Path], format: Format, num_rows: int) -> Sample:
  """Reads a sample: the first rows, and of several files or row groups some of each.

  Args:
    paths: of the files.
    format: of text files.
    num_rows: to read, at most.

  Raises:
    DamagedFileError: a file or many of its rows cannot be read, or it has no rows; names it.
    UserError: the format does not fit the files.
  """
  names = columns_of(paths, format)
  if len(paths) <= _PLACES:
    Reader(paths, dict.fromkeys(names, "any"), format=format)  # names a file that lacks a column
  files = [paths[index] for index in _spread(len(paths))]
  pieces: list[dict[str, pa.Array]] = []
  skipped, left, is_all, places = [], num_rows, len(files) == len(paths), 0
  for index, path in enumerate(files):
    share = max(left // (len(files) - index), 1)
    reader = Reader(
      [path], dict.fromkeys(names, "any"), format=format, on_bad_row="skip", chunk_rows=_CHUNK
    )
    groups = _groups(path, share)
    rows = 0
    for arrays in _of_groups(path, names, groups, share) if groups else _of_chunks(reader, share):
      pieces.append({name: array[: share - rows] for name, array in arrays.items()})
      rows += len(arrays[names[0]])
    is_all &= rows <= share and not groups
    places += max(len(groups), 1)
    left -= min(rows, share)
    skipped += reader.skipped
    if reader.num_skipped > _BAD * (rows + reader.num_skipped):
      for _ in Reader([path], dict.fromkeys(names, "any"), format=format):
        pass  # until it raises for the first bad row, and says what to write
  columns = [_column(name, [piece[name] for piece in pieces], format) for name in names]
  rows = columns[0].rows
  total = rows if is_all else _total(paths, columns)
  return Sample(columns, rows, total, is_all, places, skipped)


def _spread(count: int) -> list[int]:
  """Returns the indices of up to `_PLACES` of `count` places, the first and the last included."""
  return np.unique(np.linspace(0, count - 1, min(count, _PLACES)).astype(int)).tolist()


def _groups(path: Path, num_rows: int) -> list[int]:
  """Returns row groups of a Parquet file with more rows than are read; [] reads its first rows."""
  if file_format(path) != "Parquet":
    return []
  metadata = pq.read_metadata(path)
  if metadata.num_rows <= num_rows or metadata.num_row_groups == 1:
    return []
  return _spread(metadata.num_row_groups)


def _of_groups(
  path: Path, names: Sequence[str], groups: list[int], num_rows: int
) -> Iterator[dict[str, pa.Array]]:
  """Yields the first rows of each row group."""
  with pq.ParquetFile(path, pre_buffer=False) as file:
    for group in groups:
      stored = file.iter_batches(
        max(num_rows // len(groups), 1), row_groups=[group], columns=list(names), use_threads=False
      )
      if (batch := next(stored, None)) is not None:
        yield {name: batch.column(name) for name in names}


def _of_chunks(reader: Reader, num_rows: int) -> Iterator[dict[str, pa.Array]]:
  """Yields rows until there are more than `num_rows`, or all."""
  rows = 0
  for chunk in reader:
    yield chunk.columns
    rows += len(chunk.rows)
    if rows > num_rows:
      return


def _column(name: str, arrays: Sequence[pa.Array], format: Format) -> Column:
  parts = [_as_text(plain(array), format.missing) for array in arrays]
  texts = pa.chunked_array([part.cast(pa.large_string()) for part in parts]).combine_chunks()
  encoded = texts.dictionary_encode()
  codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
  counts = np.bincount(codes[codes >= 0], minlength=len(encoded.dictionary))
  order = np.argsort(-counts, kind="stable")
  renamed = np.append(np.argsort(order), -1)  # the code -1 takes the last
  num_bytes = pc.sum(pc.binary_length(texts)).as_py() or 0
  values = encoded.dictionary.take(pa.array(order)).cast(pa.string())
  return Column(name, _stored(arrays), renamed[codes], values, counts[order], num_bytes)


def _as_text(array: pa.Array, missing: Sequence[str]) -> pa.StringArray:
  """Returns values as text, null where missing, and what no recipe reads as null."""
  if pa.types.is_list(array.type):
    if refusal(array.type, ("list", "")) is not None:
      return pa.nulls(len(array), pa.string())
    joined = pc.binary_join(as_lists(array, "", missing)[0], JOIN)
    return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)
  if pa.types.is_nested(array.type):
    return pa.nulls(len(array), pa.string())
  return as_texts(array, missing)[0]


def _stored(arrays: Sequence[pa.Array]) -> str:
  """Returns the type of the first array that has one; "text" where they differ."""
  types = dict.fromkeys(_type(plain(array).type) for array in arrays)
  types.pop("null", None)
  return next(iter(types)) if len(types) == 1 else "text"


def _type(stored: pa.DataType) -> str:
  if pa.types.is_null(stored):
    return "null"
  if pa.types.is_list(stored):
    return "nested" if pa.types.is_nested(stored.value_type) else "list"
  if pa.types.is_nested(stored):
    return "nested"
  if pa.types.is_boolean(stored):
    return "yes/no"
  if pa.types.is_timestamp(stored) or pa.types.is_date(stored):
    return "time"
  if pa.types.is_integer(stored) or pa.types.is_floating(stored) or pa.types.is_decimal(stored):
    return "number"
  return "text"


def _total(paths: Sequence[Path], columns: Sequence[Column]) -> int:
  """Returns the number of rows of files that were read in part, 0 if it cannot be estimated."""
  if all(file_format(path) == "Parquet" for path in paths):
    return sum(pq.read_metadata(path).num_rows for path in paths)
  if any(path.suffix.lower() == ".gz" or file_format(path) == "ArrayRecord" for path in paths):
    return 0
  row = sum(column.bytes for column in columns) / columns[0].rows + len(columns)
  return int(sum(path.stat().st_size for path in paths) / row)
