"""Rows of files and streams, in chunks, and the same rows written back with more columns."""

import codecs
import contextlib
import csv
import gzip
import io
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DamagedFileError, MissingFileError, UserError
from ..tables.formats import Format, find_delimiter, repeated

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
    source: its name, for error texts.
    format: of the training files; a delimiter that it leaves open is found here as well.

  Attributes:
    names: of the columns, in order.
    has_header: whether the text has one.

  Raises:
    DamagedFileError: the text is empty or none, or its header names a column twice.
  """

  def __init__(self, stream: IO[bytes], source: str, format: Format):
    self.source, self._format = source, format
    codec = codecs.lookup(format.encoding).name
    try:
      first = stream.read(_SAMPLE)  # waits for a slow pipe
    except (OSError, EOFError) as error:
      raise DamagedFileError(f"{source} cannot be read: {error}") from error
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
    try:
      names = next(self._records, None)
    except (csv.Error, EOFError, OSError, UnicodeError) as error:
      raise DamagedFileError(f"{source} cannot be read ({error})") from error
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
      self.names = tuple(name or f"column {i}" for i, name in enumerate(given, start=1))
    else:
      self.names, self._records = format.names, chain([names], self._records)
    if (name := repeated(self.names)) is not None:
      raise DamagedFileError(f"{source}: the header names two columns {name!r}. Rename one.")

  def _cut(self, lines: io.TextIOWrapper) -> Iterator[list[str]]:
    """Yields the fields of each row; empty lines are none."""
    if self.by_line:
      most = len(self._format.names) - 1 if self._format.rest else -1
      for line in lines:
        if line := line.rstrip("\r\n"):
          yield (line.strip(" ") if self.delimiter == " " else line).split(self.delimiter, most)
      return
    quote = self._format.quote
    records = csv.reader(
      chain(lines, [_END]),
      delimiter=self.delimiter,
      quotechar=quote or None,
      quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
    )
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
      try:
        fields = list(islice(self._records, _CHUNK))
      except (csv.Error, EOFError, OSError, UnicodeError) as error:
        raise DamagedFileError(
          f"{self.source} breaks off or is damaged after row {first_row - 1} ({error})"
        ) from error
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
    bad = [i for i, text in enumerate(values) if any("\ud800" <= char <= "\udfff" for char in text)]
    return pa.array([None if i in set(bad) else v for i, v in enumerate(values)], pa.string()), bad


class ParquetRows:
  """Rows of a Parquet file; its attributes are of `TextRows`."""

  has_header, by_line, delimiter = True, False, ","

  def __init__(self, stream: IO[bytes], source: str):
    self.source = source
    try:
      self._file = pq.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
      raise DamagedFileError(f"{source} is no whole Parquet file ({error})") from error
    self.names = tuple(self._file.schema_arrow.names)
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

  Args:
    out: of text.
    rows: that are read.
    format: of the training files.
  """

  def __init__(self, out: IO[str], rows: TextRows | ParquetRows, format: Format):
    self._out, self._csv = out, None
    # After the rest of a line no column could be told from it.
    self._delimiter = "\t" if format.rest else rows.delimiter
    if not rows.by_line and format.quote:
      self._csv = csv.writer(
        out, delimiter=self._delimiter, quotechar=format.quote, lineterminator="\n"
      )

  def write(self, fields: Sequence[str], added: Sequence[str]) -> None:
    """Writes a row; without quotes a delimiter in what is added becomes a space."""
    if self._csv is not None:
      self._csv.writerow([*fields, *added])
      return
    clean = [" ".join(text.replace(self._delimiter, " ").splitlines()) for text in added]
    self._out.write(self._delimiter.join([*fields, *clean]) + "\n")


def check_names(names: Sequence[str], added: Sequence[str], source: str) -> None:
  """Raises UserError where a column that is added is there already."""
  for name in added:
    if name in names:
      raise UserError(f"{source} has a column {name!r}, which predictions add: rename it")
