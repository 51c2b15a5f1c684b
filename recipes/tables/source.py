"""Reads files of rows. DuckDB converts text to Parquet, which is staged."""

import codecs
import csv
import functools
import glob
import gzip
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import files
from ..errors import DamagedFileError, UserError
from .faults import Fault, shown
from .formats import DELIMITERS, Format, find_delimiter, records, repeated

_AGAIN = "Copy or download it again."
_PEEK = 1 << 18  # bytes that show how a file is written
_BLOCK = 1 << 20
_MEMORY = "400MB"  # of DuckDB, which spills beyond it to the folder of a `Stage`
_LONGEST_LINE = 8 << 20  # bytes
_CELLS = 1 << 22  # of a row group in a staged file, which is held in memory
_LINE = "\x1f"  # a delimiter for files whose lines are cut by SQL; a control character
_MAGIC = {
  b"PAR1": "is a Parquet file. Name it so: {stem}.parquet",
  b"\x1f\x8b": "is compressed with gzip. Name it so: {path}.gz",
  b"PK\x03\x04": "is a zip archive or a spreadsheet. Unpack it, or save the sheet as CSV",
  b"\x28\xb5\x2f\xfd": "is compressed with zstd. Unpack it first",
  b"BZh": "is compressed with bzip2. Unpack it first",
  b"\xfd7zXZ": "is compressed with xz. Unpack it first",
}
_DECODING_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, UnicodeError)


class Chunk(NamedTuple):
  """N rows of a file.

  Attributes:
    file: they are from.
    rows: int64 [N], their numbers in the file: the first row below the header is row 1.
    places: int64 [N], their places among the rows that the file is stored with, from 0 on.
    columns: by name, N values each, as they are stored or as `Reader` was asked for them.
  """

  file: Path
  rows: np.ndarray
  places: np.ndarray
  columns: dict[str, Any]

  def take(self, kept: np.ndarray) -> "Chunk":
    """Returns the rows for which a bool [N] holds, or those at integer indices."""
    indices = np.flatnonzero(kept) if kept.dtype == bool else kept
    columns = {
      name: values[indices] if isinstance(values, np.ndarray) else values.take(pa.array(indices))
      for name, values in self.columns.items()
    }
    return Chunk(self.file, self.rows[indices], self.places[indices], columns)


class Stage:
  """Temporary folder and DuckDB connection for reading one table; for `with`.

  Args:
    folder: an empty or missing one; None creates a temporary folder.
  """

  def __init__(self, folder: Path | None = None):
    if folder is None:
      folder = Path(tempfile.mkdtemp(prefix="sparse_embed_"))
      weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
    else:
      folder = files.new_folder(folder)
    self.folder = folder
    self._texts: dict[tuple[Path, Format], tuple[Path, list[Fault]]] = {}

  @functools.cached_property
  def engine(self) -> Any:
    """A connection to DuckDB."""
    import duckdb  # not for predictions, which read no files by it

    settings = {"memory_limit": _MEMORY, "temp_directory": str(self.folder)}
    connection = duckdb.connect(config={**settings, "threads": min(os.cpu_count() or 1, 8)})
    connection.execute("SET enable_progress_bar = false")  # it would write to stdout
    return connection

  def __enter__(self) -> "Stage":
    return self

  @functools.cached_property
  def background(self) -> futures.Executor:
    """One thread for queries that run while others are answered."""
    return futures.ThreadPoolExecutor(1)

  def __exit__(self, *error: object) -> None:
    """Removes the folder."""
    if "background" in self.__dict__:
      self.background.shutdown(cancel_futures=True)
    if "engine" in self.__dict__:
      self.engine.close()
    shutil.rmtree(self.folder, ignore_errors=True)

  def table(self, query: str, file: "File") -> pa.Table:
    """Answers a query on a file, in any thread; raises DamagedFileError if it cannot be read."""
    import duckdb

    try:
      with self.engine.cursor() as cursor:
        return cursor.execute(query).to_arrow_table()
    except duckdb.InvalidInputException as error:
      reason = str(error).partition("\n")[0]
      raise DamagedFileError(f"{file.path} cannot be read ({reason}). {_AGAIN}") from error

  def text(self, file: "TextFile") -> tuple[Path, list[Fault]]:
    """Returns the Parquet file with a text file's rows, and the rejected rows."""
    key = (file.path, file.format)
    if key not in self._texts:
      self._texts[key] = _Text(file, self, len(self._texts)).rows()
    return self._texts[key]


class ParquetFile:
  """A Parquet file.

  Attributes:
    names: of the columns, in order.
    types: of the columns.

  Raises:
    DamagedFileError: the file is no Parquet, incomplete, or names two columns alike.
  """

  def __init__(self, path: Path, format: Format):
    self.path = path
    with _opened(path) as file:
      schema = file.schema_arrow
    self.names = tuple(schema.names)
    if (duplicate := repeated(self.names)) is not None:
      raise DamagedFileError(f"{path} has two columns {duplicate!r}. Rename one.")
    self.types: Mapping[str, pa.DataType] = dict(zip(schema.names, schema.types, strict=True))

  def advice(self) -> str:
    """Returns what to try where a column is missing, or ""."""
    return ""

  def stored(self, stage: Stage) -> tuple[Path, list[Fault]]:
    """Returns the Parquet file with the rows, and the rejected rows."""
    return self.path, []

  def stored_name(self, name: str) -> str:
    """Returns the name of a column in that file."""
    return name


class TextFile:
  """A text file with a row a line, or several lines where a quoted value has line ends.

  Empty lines are no rows. A column that the header leaves unnamed, such as the index that pandas
  writes, is called by its place, as `column 1`.

  Attributes:
    names: of the columns, in order.
    types: of the columns: all are text.
    delimiter: between two fields.
    by_line: whether quotes have no meaning.
    skip: lines before the first row.

  Raises:
    DamagedFileError: the file is empty, no text, or its header cannot be read.
    UserError: the format does not fit the file.
  """

  def __init__(self, path: Path, format: Format):
    self.path, self.format = path, format
    sample, empty_lines = _peek(path, format.encoding)
    self.delimiter = format.delimiter or find_delimiter(sample, path, format)
    self.by_line = format.rest or len(self.delimiter) > 1
    quote = "" if self.by_line else format.quote
    try:
      first = [name.strip() for name in next(records(sample, self.delimiter, quote, strict=True))]
    except csv.Error as error:
      if not format.names:
        raise DamagedFileError(
          f"{path}: the header cannot be read ({error}). Close its quotes, or write "
          "config.format.quote='' if quotes have no meaning."
        ) from error
      first = []
    self.names = self._header(first)
    self.types: Mapping[str, pa.DataType] = dict.fromkeys(self.names, pa.string())
    self.skip = 0 if format.names else empty_lines + 1

  def _header(self, first: list[str]) -> tuple[str, ...]:
    if names := self.format.names:
      if [name.lower() for name in first] == [name.lower() for name in names]:
        raise UserError(
          f"{self.path}: the first line is a header. Leave out config.format.names, which is for "
          "files without one."
        )
      return names
    for place, name in enumerate(first, start=1):
      where = f"{self.path}, header, column {place}"
      if "\0" in name:
        raise DamagedFileError(
          f"{where}: {shown(name)} has a NUL byte, so that the file is no text, or one in UTF-16: "
          "then write config.format.encoding='utf-16'."
        )
      if re.search("[\udc80-\udcff]", name):
        raise DamagedFileError(
          f"{where}: {shown(name.encode('utf-8', 'surrogateescape'))} is not "
          f"{self.format.encoding}. Write config.format.encoding='latin-1'."
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
    if any(re.fullmatch(r"[-+.\d]+", name) for name in self.names):
      return (
        "The first line seems a row, not a header: name the columns, "
        "config.format.names=('…', '…')."
      )
    return ""

  def stored(self, stage: Stage) -> tuple[Path, list[Fault]]:
    """Returns the Parquet file with the rows, and the rejected rows.

    Raises:
      DamagedFileError: a quote is not closed, or a compressed file is incomplete or damaged.
    """
    return stage.text(self)

  def stored_name(self, name: str) -> str:
    """Returns the name of a column in that file: DuckDB's names are equal in any case."""
    return f"c{self.names.index(name)}"


File = ParquetFile | TextFile


def batches(
  file: File, stage: Stage, columns: Sequence[str], num_rows: int, categories: Sequence[str] = ()
) -> Iterator[tuple[Chunk, list[Fault], int]]:
  """Yields the rows of a file in their order, up to `num_rows` at once.

  With them come the rows among and before them that were dropped, and bytes read of the file.

  Args:
    file: of the rows.
    stage: where text is kept.
    columns: to read.
    num_rows: of a batch, at most.
    categories: columns of text that come as dictionaries, which saves the work on repeated values.

  Raises:
    DamagedFileError: the file is damaged; names the row before.
  """
  path, faults = file.stored(stage)
  left_out = np.array([fault.row for fault in faults], np.int64)
  before = left_out - np.arange(len(left_out))  # rows that are kept, up to each of them
  start, size = 0, file.path.stat().st_size
  names = {name: file.stored_name(name) for name in columns}
  as_dictionaries = [names[name] for name in categories if pa.types.is_string(file.types[name])]
  with _opened(path, as_dictionaries) as opened, futures.ThreadPoolExecutor(1) as ahead:
    total = max(opened.metadata.num_rows, 1)
    read = opened.iter_batches(num_rows, columns=list(names.values()), use_threads=False)
    following = ahead.submit(next, read, None)
    while True:
      try:
        batch = following.result()
      except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(
          f"{path} is damaged after row {start} ({error}). {_AGAIN}"
        ) from error
      if batch is None:
        break
      following = ahead.submit(next, read, None)
      places = np.arange(start, start + len(batch))
      rows = places + 1 + np.searchsorted(before, places + 1, side="right")
      passed = int(np.searchsorted(left_out, rows[-1])) if len(rows) else 0
      arrays = {name: batch.column(stored) for name, stored in names.items()}
      read_bytes = size * len(batch) // total
      yield Chunk(file.path, rows, places, arrays), faults[:passed], read_bytes
      faults, start = faults[passed:], start + len(batch)
      left_out = left_out[passed:]
  if faults:
    none = {name: pa.nulls(0, file.types[name]) for name in columns}
    yield Chunk(file.path, np.empty(0, np.int64), np.empty(0, np.int64), none), faults, 0


def _opened(path: Path, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
  try:
    # With a buffer, a column of a row group is read in pages, not as a whole.
    return pq.ParquetFile(
      path,
      buffer_size=1 << 20,
      pre_buffer=False,
      page_checksum_verification=True,
      read_dictionary=list(dictionaries),
    )
  except (pa.ArrowException, OSError) as error:
    raise DamagedFileError(f"{path} is not a complete Parquet file ({error}). {_AGAIN}") from error


def literal(text: object) -> str:
  """Returns a text as SQL writes it."""
  return "'" + str(text).replace("'", "''") + "'"


def scan(file: File, stage: Stage) -> str:
  """Returns SQL for the rows of a file, in order; columns are c0, c1, …"""
  # The engine would expand patterns, and take folders called x=1 for a column.
  path = literal(glob.escape(str(file.stored(stage)[0])))
  columns = ", ".join(f"c{place}" for place in range(len(file.names)))
  return f"read_parquet({path}, hive_partitioning=false) AS rows({columns})"


def num_rows(file: File, stage: Stage) -> int:
  """Returns the number of rows in a file, without the rejected ones."""
  return pq.read_metadata(file.stored(stage)[0]).num_rows


# --- text ----------------------------------------------------------------------------------------


def _is_utf8(encoding: str) -> bool:
  return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")


def _bytes_of(path: Path) -> IO[bytes]:
  try:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _has_nul(path: Path) -> bool:
  with path.open("rb") as file:
    return any(b"\0" in block for block in iter(lambda: file.read(_BLOCK), b""))


def _peek(path: Path, encoding: str) -> tuple[str, int]:
  """Returns the beginning of a text, from its first line on, and the number of empty lines before.

  Raises:
    DamagedFileError: the file is empty, or no text.
  """
  with _bytes_of(path) as stream:
    try:
      sample = stream.read(_PEEK)
    except _DECODING_ERRORS as error:
      raise DamagedFileError(
        f"{path} breaks off or is damaged at its beginning ({error}). {_AGAIN}"
      ) from error
  for magic, problem in _MAGIC.items():
    if sample.startswith(magic):
      stem = path.with_suffix("")
      raise DamagedFileError(f"{path} {problem.format(path=path, stem=stem)}.")
  if _is_utf8(encoding) and sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    raise DamagedFileError(f"{path} is written in UTF-16. Write config.format.encoding='utf-16'.")
  decoder = codecs.getincrementaldecoder("utf-8" if _is_utf8(encoding) else encoding)
  text = decoder(errors="surrogateescape").decode(sample).removeprefix("\ufeff")
  started = text.lstrip("\r\n")
  if not started.strip():
    raise DamagedFileError(f"{path} is empty. {_AGAIN.removesuffix('.')}, or leave it out.")
  before = text[: len(text) - len(started)]
  return started, before.count("\n") or before.count("\r")


class _Text:
  """The conversion of a text file to Parquet."""

  def __init__(self, file: TextFile, stage: Stage, number: int):
    self._file, self._stage = file, stage
    self._target = stage.folder / f"text_{number}.parquet"
    self._plain = self._target.with_suffix(".txt")

  def rows(self) -> tuple[Path, list[Fault]]:
    """Returns the Parquet file, and the rows that are not in it."""
    import duckdb

    path = self._file.path
    is_packed = path.suffix.lower() == ".gz"
    if is_packed or not _is_utf8(self._file.format.encoding) or _has_nul(path):
      self._rewrite()
    else:
      self._plain.symlink_to(path.absolute())  # whose name has no glob characters
    try:
      try:
        self._convert()
      except duckdb.InvalidInputException as error:
        if "invalid state" not in str(error):
          raise
        self._rewrite(ends=True)  # lines that end in several ways
        self._convert()
    except duckdb.InvalidInputException as error:
      reason = str(error).partition("\n")[0]
      raise DamagedFileError(f"{path} cannot be read ({reason}). {_AGAIN}") from error
    except duckdb.Error as error:  # no memory, a full disk
      reason = str(error).partition("\n")[0]
      raise UserError(f"{path} cannot be converted to {self._target} ({reason})") from error
    faults = self._faults()
    self._plain.unlink()
    return self._target, faults

  def _rewrite(self, *, ends: bool = False) -> None:
    """Writes the text unpacked, in UTF-8, and with one kind of line ends if `ends`.

    Bytes that cannot be decoded stay as they are, and are no UTF-8 then; a NUL byte, which DuckDB
    would take, comes after one that is none.
    """
    encoding, lines = self._file.format.encoding, 0
    codec = "utf-8" if _is_utf8(encoding) else encoding
    decode = codecs.getincrementaldecoder(codec)(errors="surrogateescape").decode
    self._plain.unlink(missing_ok=True)
    with _bytes_of(self._file.path) as stream, self._plain.open("wb") as target:
      try:
        while True:
          block = stream.read(_BLOCK)
          text = decode(block, final=not block)
          if ends:
            text = re.sub("\r\n?", "\n", text + "\n" * text.endswith("\r"))
          lines += text.count("\n")
          target.write(text.encode("utf-8", "surrogateescape").replace(b"\0", b"\xff\0"))
          if not block:
            return
      except _DECODING_ERRORS as error:
        row = lines - self._file.skip
        raise DamagedFileError(
          f"{self._file.path} breaks off or is damaged after row {row} ({error}). {_AGAIN}"
        ) from error

  def _convert(self) -> None:
    file, engine = self._file, self._stage.engine
    for name in ("reject_errors", "reject_scans"):
      engine.execute(f"DROP TABLE IF EXISTS {name}")
    width = 1 if self._is_cut else len(file.names)
    columns = ", ".join(f"'c{place}': 'VARCHAR'" for place in range(width))
    quote = literal("" if file.by_line else file.format.quote)
    scanned = (
      f"read_csv({literal(self._plain)}, columns={{{columns}}}, header=false, skip={file.skip}, "
      f"delim={literal(_LINE if self._is_cut else file.delimiter)}, quote={quote}, "
      f"escape={quote}, auto_detect=false, strict_mode=true, store_rejects=true, "
      f"max_line_size={_LONGEST_LINE})"
    )
    # An empty line is a row of one column to DuckDB.
    query = f"SELECT * FROM {scanned}" + " WHERE c0 IS NOT NULL" * (width == 1)
    if self._is_cut:
      query = self._cut(query)
    group = max(2048, min(122_880, _CELLS // len(file.names)))
    target = f"{literal(self._target)} (FORMAT parquet, ROW_GROUP_SIZE {group})"
    engine.execute(f"COPY ({query}) TO {target}")

  @property
  def _is_cut(self) -> bool:
    """Whether lines are read whole and cut by SQL; DuckDB takes delimiters of up to 4 bytes."""
    return self._file.format.rest or len(self._file.delimiter.encode()) > 4

  def _cut(self, lines: str) -> str:
    """Returns the query that cuts lines at the delimiter; with `rest`, the last takes the rest."""
    file, delimiter = self._file, literal(self._file.delimiter)
    line = f"trim(c0, {delimiter})" if file.delimiter == " " else "c0"
    last = len(file.names)
    fields = [f"fields[{place + 1}] AS c{place}" for place in range(last)]
    if file.format.rest:
      fields[-1] = f"array_to_string(fields[{last}:], {delimiter}) AS c{last - 1}"
    self._stage.engine.execute(
      f"CREATE OR REPLACE TEMP TABLE cut AS SELECT row_number() OVER () AS row, "
      f"string_split({line}, {delimiter}) AS fields FROM ({lines})"
    )
    return f"SELECT {', '.join(fields)} FROM cut WHERE {self._has_fields}"

  @property
  def _has_fields(self) -> str:
    last = len(self._file.names)
    # Where the rest of a line is empty, its delimiter is missing too.
    return f"len(fields) >= {last - 1}" if self._file.format.rest else f"len(fields) = {last}"

  def _faults(self) -> list[Fault]:
    """Returns the rows that DuckDB has left out, in their order."""
    file, engine = self._file, self._stage.engine
    faults: dict[int, Fault] = {}
    rejected = engine.execute(
      "SELECT line, column_name, error_type, left(csv_line, 1000), "
      "contains(trim(csv_line, chr(10) || chr(13)), chr(10)), error_message, byte_position, "
      "line_byte_position "
      "FROM reject_errors ORDER BY line"
    ).fetchall()
    empty = self._empty_lines() if rejected else np.empty(0, np.int64)
    for line, column, kind, text, has_lines, message, position, start in rejected:
      row = line - bool(file.skip) - int(np.searchsorted(empty, line))
      if kind == "LINE SIZE OVER MAXIMUM":
        size = f"{_LONGEST_LINE >> 20} MiB"
        raise DamagedFileError(f"{file.path}, row {row}: a line of more than {size} is too long.")
      column = file.names[int(column[1:])] if column and not self._is_cut else column
      if kind == "UNQUOTED VALUE" and has_lines:
        raise DamagedFileError(
          f"{file.path}, row {row}"
          + (f", column {column!r}" if column else "")
          + ": a quote is not closed. Close it, or write config.format.quote='' if quotes have no "
          "meaning."
        )
      if kind in ("MISSING COLUMNS", "TOO MANY COLUMNS"):
        counts = re.findall(r"\d+", message)
        fault = self._ragged(row, int(counts[-1]), text)
      elif kind == "INVALID ENCODING":
        fault = self._undecoded(row, column, position - 1, start - 1)
      else:
        fault = Fault(row, column, "has an unescaped quote", shown(text.strip()), _QUOTES)
      faults.setdefault(row, fault)
    if self._is_cut:
      text = f"array_to_string(fields, {literal(file.delimiter)})"
      short = engine.execute(
        f"SELECT row, len(fields), {text} FROM cut WHERE NOT ({self._has_fields})"
      ).fetchall()
      rows = np.array([row for row, _, _ in short], np.int64)
      left_out = np.array(sorted(faults), np.int64)
      rows += np.searchsorted(left_out - np.arange(len(left_out)), rows, side="right")
      for row, (_, count, text) in zip(rows.tolist(), short, strict=True):
        faults[row] = self._ragged(row, count, text)
      engine.execute("DROP TABLE cut")
    return [faults[row] for row in sorted(faults)]

  def _empty_lines(self) -> np.ndarray:
    """Returns which of DuckDB's lines are empty, in order; the header is line 1."""
    quote = "" if self._file.by_line else self._file.format.quote
    csv.field_size_limit(1 << 30)  # an open quote takes all that follows
    with self._plain.open(encoding="utf-8", errors="replace", newline="") as file:
      lines = csv.reader(
        file,
        delimiter=_LINE if self._file.by_line else self._file.delimiter,
        quotechar=quote or None,
        quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
      )
      return np.array([n for n, fields in enumerate(lines, start=1) if not fields], np.int64)

  def _ragged(self, row: int, count: int, text: str) -> Fault:
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

  def _undecoded(self, row: int, column: str | None, position: int, start: int) -> Fault:
    """Returns the fault of a value that begins at a byte of a line that begins at another one."""
    encoding = self._file.format.encoding
    with self._plain.open("rb") as file:
      file.seek(start)
      line = file.read(position - start + 200)
    try:
      line.decode()
    except UnicodeDecodeError as error:
      position = start + error.start
    delimiter, bad = self._file.delimiter.encode(), position - start
    if self._is_cut:  # to DuckDB a line is one column
      names = self._file.names
      column = names[min(line[:bad].count(delimiter), len(names) - 1)]
    ends = re.escape(delimiter) + b"|[\r\n]"
    value = re.split(ends, line[:bad])[-1] + re.split(ends, line[bad:])[0]
    value = value.strip(self._file.format.quote.encode())
    if b"\0" in value:
      text = value.replace(b"\xff\0", b"\0").decode("utf-8", "replace")
      return Fault(row, column, "has a NUL byte", shown(text), "Remove it: tr -d '\\000'.")
    another = "='latin-1', or" if _is_utf8(encoding) else ""
    hint = f"Write config.format.encoding{another} as the file is written."
    return Fault(row, column, f"is not {encoding}", shown(value), hint)


_QUOTES = "Double a quote within a quoted value, or write config.format.quote=''."


def _other_delimiter(text: str, delimiter: str) -> str | None:
  candidates = [other for other in DELIMITERS if other != delimiter and other != " "]
  return max(
    (other for other in candidates if other in text),
    key=lambda other: text.count(other),
    default=None,
  )
