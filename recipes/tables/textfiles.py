"""Rows of text files."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from ..errors import DamagedFileError, UserError
from .batches import Batch, Way, rebatched
from .faults import Fault, shown
from .formats import DELIMITERS, Format, find_delimiter, records, repeated
from .streams import Stream, is_undecoded, original
from .values import bits

_BLOCK = 1 << 20  # Arrow reads up to 32 ahead
_LINES = "\x1f"  # Arrow's delimiter for files whose lines are cut here; a control character
_END = "\0" * 8


class TextFile:
  """A text file with a row a line, or several lines where a quoted value has line ends.

  Empty lines are no rows. A column that the header leaves unnamed, such as the index that pandas
  writes, is called by its place, as `column 1`.

  Attributes:
    names: of the columns, in order.

  Raises:
    DamagedFileError: the file is empty, no text, or its header cannot be read.
    UserError: the format does not fit the file.
  """

  def __init__(self, path: Path, format: Format):
    self.path, self.format = path, format
    with Stream(path, format.encoding) as stream:
      sample = stream.peek().decode("utf-8", "replace")
    self.delimiter = format.delimiter or find_delimiter(sample, path, format)
    self.by_line = format.rest or len(self.delimiter) > 1
    quote = "" if self.by_line else format.quote
    try:
      self._first = [
        name.strip() for name in next(records(sample, self.delimiter, quote, strict=True))
      ]
    except csv.Error as error:
      if not format.names:
        raise DamagedFileError(
          f"{path}: the header cannot be read ({error}). Close its quotes, or write "
          "config.format.quote='' if quotes have no meaning."
        ) from error
      self._first = []
    self.names = self._header(self._first)
    self.types: Mapping[str, pa.DataType] = dict.fromkeys(self.names, pa.string())

  def _header(self, first: list[str]) -> tuple[str, ...]:
    if names := self.format.names:
      if [name.lower() for name in first] == [name.lower() for name in names]:
        raise UserError(
          f"{self.path}: the first line is a header. Leave out config.format.names, which is for "
          "files without one."
        )
      return names
    for place, name in enumerate(first, start=1):
      if (name_bytes := original(name, "utf-8")) != name.encode() and "\0" not in name:
        raise DamagedFileError(
          f"{self.path}, header, column {place}: {shown(name_bytes)} is not "
          f"{self.format.encoding}. Write config.format.encoding='latin-1'."
        )
      if "\0" in name:
        raise DamagedFileError(
          f"{self.path}, header, column {place}: {shown(name)} has a NUL byte, so that the file is "
          "no text, or one in UTF-16: then write config.format.encoding='utf-16'."
        )
    if not any(first):
      raise DamagedFileError(
        f"{self.path}: the header names no column. Name them in the file, or remove that line and "
        "write config.format.names=('…', '…')."
      )
    names = tuple(name or f"column {place}" for place, name in enumerate(first, start=1))
    if (duplicate := repeated(names)) is not None:
      places = [place for place, name in enumerate(names, start=1) if name == duplicate]
      raise DamagedFileError(
        f"{self.path}: the header names columns {places[0]} and {places[1]} "
        f"{duplicate!r}. Rename one, or if that line is a row, name the columns: "
        "config.format.names=('…', '…')."
      )
    return names

  def advice(self) -> str:
    """Returns what to try where a column is missing, or ""."""
    if self.format.names:
      return "The names are from config.format.names."
    if len(self.names) == 1 and (delimiter := _other_delimiter(self.names[0], self.delimiter)):
      return f"The delimiter seems another: write config.format.delimiter={delimiter!r}."
    if any(_is_number(name) for name in self.names):
      return (
        "The first line seems a row, not a header: name the columns, "
        "config.format.names=('…', '…')."
      )
    return ""

  def batches(self, ways: Mapping[str, Way], chunk_rows: int) -> Iterator[Batch]:
    """Yields the rows in their order, with the columns of `ways` as text.

    Raises:
      DamagedFileError: a quote is not closed, or a compressed file is incomplete or damaged.
    """
    with Stream(self.path, self.format.encoding) as stream:
      num_fields = 1 if self.by_line else len(self.names)
      stream.sentinel = (_LINES if self.by_line else self.delimiter).join([_END] * num_fields)
      rows = _Rows(self, stream, tuple(ways))
      try:
        yield from rebatched(rows.batches(), chunk_rows)
      except pa.ArrowInvalid as error:
        if stream.error is not None:
          raise _broken(self.path, rows.done, stream.error) from error
        if "straddling" not in str(error):
          raise
        raise _unclosed(self.path, rows.done + 1, None) from error


class _Rows:
  """One pass over the rows of a file."""

  def __init__(self, file: TextFile, stream: Stream, wanted: tuple[str, ...]):
    self._file, self._stream = file, stream
    self._places = {name: file.names.index(name) for name in wanted}
    self._header = 0 if file.format.names else 1
    self._next_row = 1
    self._ragged: list[tuple[int, int, str]] = []  # row, number of fields, text

  @property
  def done(self) -> int:
    """Number of the last row that was read."""
    return max([self._next_row - 1, *(row for row, _, _ in self._ragged[-1:])])

  def _refuse(self, row: pa.csv.InvalidRow) -> str:
    self._ragged.append((row.number - self._header, row.actual_columns, row.text))
    return "skip"

  def _open(self) -> pa.csv.CSVStreamingReader:
    file = self._file
    num_fields = 1 if file.by_line else len(file.names)
    quote = False if file.by_line or not file.format.quote else file.format.quote
    stored = [0] if file.by_line else sorted(set(self._places.values())) or [0]
    columns = [str(place) for place in range(num_fields)]
    return pa.csv.open_csv(
      self._stream,
      # Only the serial reader numbers the rows that it refuses.
      read_options=pa.csv.ReadOptions(
        use_threads=False,
        block_size=_BLOCK,
        column_names=columns,
        skip_rows_after_names=self._header,
      ),
      parse_options=pa.csv.ParseOptions(
        delimiter=_LINES if file.by_line else file.delimiter,
        quote_char=quote,
        newlines_in_values=bool(quote),
        invalid_row_handler=self._refuse,
      ),
      convert_options=pa.csv.ConvertOptions(
        check_utf8=False,
        column_types={column: pa.binary() for column in columns},
        include_columns=[str(place) for place in stored],
        strings_can_be_null=False,
      ),
    )

  def batches(self) -> Iterator[Batch]:
    """Yields the rows, those before the end of the file one block late."""
    position, ended = 0, False
    previous: Batch | None = None
    with self._open() as reader:
      for stored in reader:
        if len(stored) and stored.column(0)[-1].as_py() == _END.encode():
          stored, ended = stored.slice(0, len(stored) - 1), True
        if previous is not None:
          yield previous
        previous = self._batch(stored, self._stream.position - position)
        position = self._stream.position
      if self._stream.error is not None:
        raise _broken(self._file.path, self.done - 1, self._stream.error)
      # An open quote takes all that follows it, the last line that was added to the file too.
      if not ended:
        raise _unclosed(self._file.path, *self._last())
      if previous is not None:
        yield previous
      if self._ragged:
        self._next_row = self.done + 1
        yield self._batch(stored.slice(0, 0), 0)

  def _last(self) -> tuple[int, str]:
    """Returns the number of the last row, and the column that it breaks off in."""
    names = self._file.names
    if self._ragged and self._ragged[-1][0] >= self._next_row:
      row, num_fields, _ = self._ragged[-1]
      return row, names[min(num_fields, len(names)) - 1]
    return self._next_row - 1, names[-1]

  def _batch(self, stored: pa.RecordBatch, size: int) -> Batch:
    rows, ragged = self._numbered(len(stored))
    faults = {row: self._ragged_fault(row, count, text) for row, count, text in ragged}
    if self._file.by_line:
      rows, fields = self._fields(stored.column(0), rows, faults)
    else:
      fields = {name: stored.column(str(place)) for name, place in self._places.items()}
    good = np.ones(len(rows), bool)
    texts = {}
    for name, values in fields.items():
      texts[name] = values.cast(pa.string())
      for bad, make_fault in self._bad_bytes(values):
        good &= ~bad
        for index in np.flatnonzero(bad).tolist():
          row = int(rows[index])
          faults.setdefault(row, make_fault(row, name, texts[name][index].as_py()))
    if not good.all():
      rows, kept = rows[good], pa.array(good)
      texts = {name: values.filter(kept) for name, values in texts.items()}
    return Batch(rows, texts, [faults[row] for row in sorted(faults)], size)

  def _numbered(self, count: int) -> tuple[np.ndarray, list[tuple[int, int, str]]]:
    """Returns the numbers of the next good rows, and the ragged ones before the last of them.

    Arrow may have met more ragged rows, ahead of the good ones that it gave.
    """
    stop = self._next_row + count + len(self._ragged)
    rows = np.arange(self._next_row, stop, dtype=np.int64)
    if self._ragged:
      rows = np.setdiff1d(rows, [row for row, _, _ in self._ragged], assume_unique=True)
    rows = rows[:count]
    if count:
      self._next_row = int(rows[-1]) + 1
    passed = [ragged for ragged in self._ragged if ragged[0] < self._next_row]
    self._ragged = self._ragged[len(passed) :]
    return rows, passed

  def _fields(
    self, lines: pa.BinaryArray, rows: np.ndarray, faults: dict[int, Fault]
  ) -> tuple[np.ndarray, dict[str, pa.BinaryArray]]:
    """Cuts lines at the delimiter; returns the rows that have all fields, and their columns."""
    file, num_fields = self._file, len(self._file.names)
    texts = lines.cast(pa.string())
    if file.delimiter == " ":
      texts = pc.ascii_trim(texts, " ")
    max_splits = num_fields - 1 if file.format.rest else None
    cut = pc.split_pattern(texts, file.delimiter, max_splits=max_splits)
    counts = pc.list_value_length(cut).to_numpy()
    starts = np.cumsum(counts) - counts
    # Where the rest of a line is empty, its delimiter is missing too.
    good = (counts == num_fields) | (file.format.rest & (counts == num_fields - 1))
    for index in np.flatnonzero(~good).tolist():
      row = int(rows[index])
      line = lines[index].as_py().decode()
      faults[row] = self._ragged_fault(row, int(counts[index]), line)
    values = cut.flatten().cast(pa.binary())
    fields = {}
    for name, place in self._places.items():
      absent = place >= counts[good]
      fields[name] = values.take(pa.array(starts[good] + place, mask=absent))
    return rows[good], fields

  def _ragged_fault(self, row: int, count: int, text: str) -> Fault:
    file, num_fields = self._file, len(self._file.names)
    if count < num_fields:
      kind = "too few fields"
      value = f"{count} instead of {num_fields}, none for column {file.names[count]!r}"
    else:
      kind = "too many fields"
      value = f"{count} instead of {num_fields}, more after column {file.names[-1]!r}"
    hint = ""
    if count == 1 and (delimiter := _other_delimiter(text, file.delimiter)):
      hint = f"Is the delimiter {delimiter!r}? Write config.format.delimiter={delimiter!r}."
    elif "\n" in text.strip():
      hint = (
        "A quote in it closes lines later. Write config.format.quote='' if quotes have no meaning."
      )
    elif count > num_fields and not file.by_line:
      hint = f"Quote a value that holds {file.delimiter!r}."
    return Fault(row, None, kind, value, hint)

  def _bad_bytes(
    self, values: pa.BinaryArray
  ) -> Iterator[tuple[np.ndarray, Callable[[int, str, str], Fault]]]:
    """Yields the values that no text has, bool [N], and what makes their faults."""
    if self._stream.has_undecoded:
      yield bits(is_undecoded(values)), self._undecoded_fault
    if self._stream.has_nul:
      yield bits(pc.greater_equal(pc.find_substring(values, b"\0"), 0)), _nul_fault

  def _undecoded_fault(self, row: int, name: str, text: str) -> Fault:
    encoding = self._file.format.encoding
    value = shown(original(text, encoding))
    another = "='latin-1', or" if encoding.lower().startswith("utf") else ""
    hint = f"Write config.format.encoding{another} as the file is written."
    return Fault(row, name, f"is not {encoding}", value, hint)


def _nul_fault(row: int, name: str, text: str) -> Fault:
  return Fault(row, name, "has a NUL byte", shown(text), "Remove it, for example by tr -d '\\000'.")


def _broken(path: Path, row: int, error: Exception) -> DamagedFileError:
  return DamagedFileError(
    f"{path} breaks off or is damaged after row {row} ({error}). Copy or download it again."
  )


def _unclosed(path: Path, row: int, column: str | None) -> DamagedFileError:
  where = f"row {row}" if column is None else f"row {row}, column {column!r}"
  return DamagedFileError(
    f"{path}, {where}: a quote is not closed. Close it, or write config.format.quote='' if quotes "
    "have no meaning."
  )


def _other_delimiter(text: str, delimiter: str) -> str | None:
  candidates = [other for other in DELIMITERS if other != delimiter and other != " "]
  return max(
    (other for other in candidates if other in text),
    key=lambda other: text.count(other),
    default=None,
  )


def _is_number(name: str) -> bool:
  try:
    float(name)
  except ValueError:
    return False
  return True
