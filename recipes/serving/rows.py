"""Rows to predict for: of Python, tables, files and streams, and written back with more columns."""

import codecs
import contextlib
import csv
import difflib
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DamagedFileError, MissingFileError, UserError
from ..tables import spec
from ..tables.encoding import Fitted
from ..tables.formats import Format, find_delimiter, free, named, quoting, repeated
from ..tables.values import Problem, ReadAs, bits, converted, lengths_of, plain, refusal

Wanted = dict[str, tuple[tuple[str, ...], ReadAs]]  # columns and way of reading by name


def as_columns(rows: Any) -> dict[str, pa.Array]:
  """Returns rows as Arrow arrays by column.

  Args:
    rows: a mapping of columns to lists or arrays, a list of dicts, or a table: of Arrow, pandas, or
      another library with Arrow's interface. None and NaN are missing.

  Raises:
    UserError: rows are of another type, or a column holds values of several types.

  >>> as_columns([{"city": "Oslo"}, {"city": "Rome", "price": 3}])["price"].to_pylist()
  [None, 3]
  """
  if isinstance(rows, Mapping):
    columns = {str(name): _array(name, values) for name, values in rows.items()}
  elif isinstance(rows, Sequence) and not isinstance(rows, str):
    if not all(isinstance(row, Mapping) for row in rows):
      raise UserError("rows are a list, and not every one of them is a dict of columns")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {str(name): _array(name, [row.get(name) for row in rows]) for name in names}
  else:
    try:
      table = pa.table(rows)
    except (TypeError, pa.ArrowException) as error:
      raise UserError(
        f"rows are {type(rows).__name__}: give a dict of columns, a list of dicts, or a table"
      ) from error
    given = named(table.column_names)
    if (name := repeated(given)) is not None:
      raise UserError(f"the rows have two columns {name!r}: rename one")
    columns = {n: _array(n, values) for n, values in zip(given, table.columns, strict=True)}
  lengths = {name: len(array) for name, array in columns.items()}
  if len(set(lengths.values())) > 1:
    raise UserError(f"the columns of the rows are of different lengths: {lengths}")
  return columns


def _array(name: Any, values: Any) -> pa.Array:
  if not isinstance(values, pa.Array | pa.ChunkedArray):
    values = list(values) if getattr(values, "ndim", 1) == 2 else values  # vectors, a row each
    try:
      values = pa.array(values, from_pandas=True)
    except (TypeError, ValueError, pa.ArrowException) as error:
      raise UserError(f"column {name!r} of the rows cannot be read: {error}") from error
  return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def require(columns: Sequence[str], needed: Sequence[str], source: str) -> None:
  """Raises UserError where a column is missing; names it and what is most like it."""
  missing = [name for name in needed if name not in columns]
  if missing:
    close = difflib.get_close_matches(missing[0], columns, 1)
    hint = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(columns) or 'none'}."
    names = ", ".join(map(repr, missing))
    raise UserError(f"{source} has no column {names}, which training has read. {hint}")


def read(
  columns: Mapping[str, pa.Array],
  wanted: Wanted,
  missing: Sequence[str],
  on_bad_row: str,
  source: str,
  first_row: int,
  clocks: dict[str, int] | None = None,
) -> tuple[dict[str, Any], np.ndarray]:
  """Returns values by declared name, as `tables.reading.Reader` does, and which rows are bad.

  Args:
    wanted: columns and way by name; names with a column that is missing are left out.
    on_bad_row: "raise", or "skip", which marks rows that cannot be read, bool `[N]`.
    source, first_row: what error texts call the rows, and the number of the first.

  Raises:
    UserError: a column is of a type that cannot be read so, or a row cannot be read and is not
      skipped; names row and column.
  """
  if on_bad_row not in ("raise", "skip"):
    raise UserError(f"on_bad_row is {on_bad_row!r}: choose 'raise' or 'skip'")
  values: dict[str, Any] = {}
  clocks = {} if clocks is None else clocks
  problems: list[tuple[str, Problem]] = []
  for name, (names, way) in wanted.items():
    if not all(column in columns for column in names):
      continue
    for column in names:
      reason = refusal(plain(columns[column]).type, way if len(names) == 1 else "number")
      if reason is not None:
        raise UserError(f"{source}, column {column!r} {reason}")
    values[name], found = converted([columns[each] for each in names], way, missing, clocks, names)
    problems += [(names[0], problem) for problem in found]
  rows = len(next(iter(columns.values())))
  return values, refused(problems, rows, on_bad_row, source, first_row)


def refused(
  problems: Sequence[tuple[str, Problem]], rows: int, on_bad_row: str, source: str, first_row: int
) -> np.ndarray:
  """Returns which of N rows have a problem, bool `[N]`; or raises for the first, as `read`."""
  bad = np.zeros(rows, bool)
  for _, problem in problems:
    bad |= problem.bad
  if bad.any() and on_bad_row == "raise":
    index = int(np.argmax(bad))
    column, problem = next((c, p) for c, p in problems if p.bad[index])
    text = f", column {column!r}: {problem.value(index)} {problem.kind}. {problem.hint}"
    raise bad_row(source, first_row + index, text)
  return bad


def bad_row(source: str, row: int, problem: str) -> UserError:
  """Returns the error of a row that cannot be read; `problem` follows its number."""
  return UserError(
    f"{source}, row {row}{problem.rstrip()} Repair the row, or set on_bad_row=skip, which leaves "
    "its score blank."
  )


def absent(values: Any) -> np.ndarray:
  """Returns which of N texts, lists or numbers are missing, bool `[N]`."""
  return np.isnan(values) if isinstance(values, np.ndarray) else _lengths(values) == 0


def _lengths(values: pa.Array) -> np.ndarray:
  """Returns how many values lists hold; of a text 1, or 0 if it is null."""
  is_list = pa.types.is_list(values.type)
  return lengths_of(values) if is_list else bits(values.is_valid()).astype(np.int64)


def unseen(fitted: Fitted, name: str, values: Any, ids: Any) -> np.ndarray:
  """Returns which rows, of N values and their ids, are outside a feature's vocabulary, bool `[N]`.

  Numbers and crosses have no vocabulary, and a dynamic one is in the model; a hashed value counts
  only if its pattern does not match.
  """
  kind = fitted.kinds.get(name)
  if not isinstance(kind, spec.Category) or kind.is_dynamic:
    return np.zeros(len(values), bool)
  ids = ids[:, None] if ids.ndim == 1 else ids
  inside = np.arange(ids.shape[1]) < _lengths(values)[:, None]
  known = kind.hash or kind.size or len(fitted.vocabulary(name))
  return np.any(inside & ((ids < 0) | (ids >= known)), axis=1)


def rows_by_column(
  rows: Mapping[str, np.ndarray], wanted: Wanted, bad: np.ndarray
) -> dict[str, int]:
  """Returns how many rows are marked by column; columns without any are left out.

  Args:
    rows: bool `[N]` by declared name.
    wanted: as of `read`; several columns of a name count as the first.
    bad: bool `[N]`, rows that do not count.
  """
  columns: dict[str, np.ndarray] = {}
  for name, marked in rows.items():
    column = wanted[name][0][0]
    columns[column] = columns.get(column, False) | (marked & ~bad)
  return {column: int(marked.sum()) for column, marked in columns.items() if marked.any()}


# --- files ----------------------------------------------------------------------------------------

_CHUNK = 4096
_SAMPLE = 1 << 16
# First bytes of files that are no text, and what to do with them.
_NO_TEXT = {
  b"PAR1": "is a Parquet file: give it by a name that ends in .parquet",
  b"\x1f\x8b": "is compressed with gzip: unpack it, or give it by a name that ends in .gz",
  b"PK\x03\x04": "is a zip archive or a spreadsheet: unpack it, or save the sheet as CSV",
  codecs.BOM_UTF16_LE: "is written in UTF-16: convert it, as by `iconv -f UTF-16 -t UTF-8`",
  codecs.BOM_UTF16_BE: "is written in UTF-16: convert it, as by `iconv -f UTF-16 -t UTF-8`",
}
_END = "\0end"  # a last line, which an open quote would take


class Chunk(NamedTuple):
  """N rows.

  Attributes:
    first_row: the number of the first; the first row below the header is row 1.
    fields: texts `[N][columns]`, as they were read.
    columns: by name, the same for the transforms.
    faults: texts that follow the number of a row that cannot be read, by index in the chunk.
  """

  first_row: int
  fields: list[list[str]]
  columns: dict[str, pa.Array]
  faults: dict[int, str]


class _Again(io.RawIOBase):
  """A stream whose first bytes have been read, from its beginning; closing leaves it open."""

  def __init__(self, first: bytes, rest: Any):
    self._first, self._rest = first, rest

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    block = self._first[: len(buffer)] or self._rest.read1(len(buffer))
    self._first = self._first[len(block) :]
    buffer[: len(block)] = block
    return len(block)


class TextRows:
  """Rows of a text with a header.

  Where training files had no header, neither has this text, or a first line that names columns.

  Args:
    stream: of bytes, buffered; it is read once, and stays open.
    format: of the training files; a delimiter that it leaves open is found here as well.

  Raises:
    DamagedFileError: the text is empty or none, or its header names a column twice.
  """

  def __init__(self, stream: IO[bytes], source: str, format: Format):
    self.source, self._format = source, format
    codec = codecs.lookup(format.encoding).name
    with self._reading("cannot be read"):
      first = stream.read(_SAMPLE)  # waits for a slow pipe
    if not codec.startswith(("utf-16", "utf-32")):
      for magic, problem in _NO_TEXT.items():
        if first.startswith(magic):
          raise DamagedFileError(f"{source} {problem}")
      if b"\0" in first.partition(b"\n")[0]:
        raise DamagedFileError(
          f"{source} has NUL bytes in its first line, as texts in UTF-16 have: convert it, as by "
          "`iconv -f UTF-16LE -t UTF-8`"
        )
    sample = first[: first.rfind(b"\n") + 1] or first
    text = sample.decode(format.encoding, "replace").removeprefix("\ufeff")
    known = {name.lower() for name in (*format.names, "history")}
    # A header of one column has no delimiter, even if the values below it contain one.
    has_one_column = text.partition("\n")[0].strip().lower() in known
    likely = "," if has_one_column else find_delimiter(text, Path(source), format)
    self.delimiter = format.delimiter or likely
    self.by_line = format.rest or len(self.delimiter) > 1
    encoding = "utf-8-sig" if codec == "utf-8" else format.encoding
    whole = io.BufferedReader(_Again(first, stream))
    lines = io.TextIOWrapper(whole, encoding, errors="surrogateescape", newline="")
    self._records = self._cut(lines)
    with self._reading("cannot be read"):
      names = next(self._records, None)
    if names is None:
      raise DamagedFileError(f"{source} is empty: it needs a header, and rows")
    given = [name.strip() for name in names]
    # Where training files have none, a row of as many fields may have a name as a value.
    are_known = [name.lower() in known for name in given]
    has_names = all(are_known) if len(given) == len(format.names) else any(are_known)
    self.has_header = not format.names or has_names
    if self.has_header:
      lower = {name.lower(): name for name in format.names}
      given = [lower.get(name.lower(), name) for name in given]
      self.names = named(given)
    else:
      self.names, self._records = format.names, chain([names], self._records)
    if (name := repeated(self.names)) is not None:
      raise DamagedFileError(f"{source}: the header names two columns {name!r}. Rename one.")

  @contextlib.contextmanager
  def _reading(self, problem: str) -> Iterator[None]:
    try:
      yield
    except (csv.Error, EOFError, OSError, UnicodeError) as error:
      raise DamagedFileError(f"{self.source} {problem} ({error})") from error

  def _cut(self, lines: io.TextIOWrapper) -> Iterator[list[str]]:
    """Yields the fields of each row; empty lines are none."""
    if self.by_line:
      most = len(self._format.names) - 1 if self._format.rest else -1
      for line in lines:
        if line := line.rstrip("\r\n"):
          yield (line.strip(" ") if self.delimiter == " " else line).split(self.delimiter, most)
      return
    how = quoting(self.delimiter, self._format.quote)
    records = csv.reader(chain(lines, [_END]), **how)
    for record in records:
      if record == [_END]:
        return
      if record:
        yield record
    raise DamagedFileError(
      f"{self.source}: a quote is not closed, in the last row that is read or before. Close it"
    )

  def __iter__(self) -> Iterator[Chunk]:
    first_row = 1
    while True:
      with self._reading(f"breaks off or is damaged after row {first_row - 1}"):
        fields = list(islice(self._records, _CHUNK))
      if not fields:
        return
      yield self._chunk(first_row, fields)
      first_row += len(fields)

  def _chunk(self, first_row: int, fields: list[list[str]]) -> Chunk:
    count, faults = len(self.names), {}
    for index, record in enumerate(fields):
      if len(record) == count - 1 and self._format.rest:
        record.append("")
      if len(record) != count:
        hint = "" if self.has_header else " A first line may name the columns."
        faults[index] = f" has {len(record)} fields instead of {count}.{hint}"
        fields[index] = [*record, *[""] * count][:count]
    columns = {}
    for name, values in zip(self.names, zip(*fields, strict=True), strict=True):
      columns[name], undecoded = _texts(values)
      for index in undecoded:
        faults.setdefault(index, f", column {name!r}: a value is not {self._format.encoding}.")
    return Chunk(first_row, fields, columns, faults)


def _texts(values: Sequence[str]) -> tuple[pa.Array, list[int]]:
  """Returns texts as an array, and the indices of those with bytes that are no text."""
  try:
    return pa.array(values, pa.string()), []
  except (UnicodeEncodeError, pa.ArrowException):
    bad = {i for i, text in enumerate(values) if any("\ud800" <= char <= "\udfff" for char in text)}
    texts = [None if i in bad else text for i, text in enumerate(values)]
    return pa.array(texts, pa.string()), sorted(bad)


class ParquetRows:
  """Rows of a Parquet file; its attributes are of `TextRows`."""

  has_header, by_line, delimiter = True, False, ","

  def __init__(self, stream: IO[bytes], source: str):
    self.source = source
    try:
      self._file = pq.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
      raise DamagedFileError(f"{source} is no whole Parquet file ({error})") from error
    self.names = named(self._file.schema_arrow.names)
    if (name := repeated(self.names)) is not None:
      raise DamagedFileError(f"{source} has two columns {name!r}. Rename one.")

  def __iter__(self) -> Iterator[Chunk]:
    first_row = 1
    for batch in self._file.iter_batches(_CHUNK):
      columns = dict(zip(self.names, batch.columns, strict=True))
      texts = [[_shown(value) for value in array.to_pylist()] for array in batch.columns]
      yield Chunk(first_row, [list(row) for row in zip(*texts, strict=True)], columns, {})
      first_row += len(batch)


def _shown(value: Any) -> str:
  if value is None:
    return ""
  return "|".join(map(_shown, value)) if isinstance(value, list) else str(value)


@contextlib.contextmanager
def open_rows(path: str, stdin: Any, format: Format) -> Iterator[TextRows | ParquetRows]:
  """Opens a file of rows by its suffix, text if it is no other; "-" is the standard input.

  Raises:
    UserError: the file does not exist, or holds no rows.
  """
  if path == "-":
    yield TextRows(stdin, "standard input", format)
    return
  file = Path(path).expanduser()
  if not file.is_file():
    raise MissingFileError(f"{file} does not exist, or is no file")
  suffix = file.suffix.lower()
  open_file: Any = gzip.open if suffix == ".gz" else open
  with open_file(file, "rb") as stream:
    if suffix in (".parquet", ".pq"):
      yield ParquetRows(stream, str(file))
    else:
      yield TextRows(stream, str(file), format)


class Writer:
  """Writes rows as they were read, with more columns, in UTF-8.

  What is added under the name of a column of the rows ends in `_`.
  """

  def __init__(
    self, out: IO[str], rows: TextRows | ParquetRows, added: Sequence[str], format: Format
  ):
    names = list(rows.names)
    for name in added:
      names.append(free(name, names))
    added = names[len(rows.names) :]
    # After the rest of a line no column could be told from it.
    self._out, self._delimiter = out, "\t" if format.rest else rows.delimiter
    self._csv = None
    if not rows.by_line and format.quote:
      quoted: Any = {"quotechar": format.quote, "lineterminator": "\n"}
      self._csv = csv.writer(out, delimiter=self._delimiter, **quoted)
    self._header = (rows.names, added) if rows.has_header else None

  def write_header(self) -> None:
    """Writes the names of the columns where the rows that are read have them, once."""
    if self._header is not None:
      header, self._header = self._header, None
      self.write(*header)

  def write(self, fields: Sequence[str], added: Sequence[str]) -> None:
    """Writes a row; without quotes a delimiter in what is added becomes a space."""
    if self._csv is not None:
      self._csv.writerow([*fields, *added])
      return
    clean = [" ".join(text.replace(self._delimiter, " ").splitlines()) for text in added]
    self._out.write(self._delimiter.join([*fields, *clean]) + "\n")
