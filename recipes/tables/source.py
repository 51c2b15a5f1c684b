"""Files of rows. DuckDB converts text to Parquet, which is staged."""

import codecs
import contextlib
import csv
import functools
import glob
import gzip
import io
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import files
from ..errors import DamagedFileError, UserError
from .formats import (
  Format,
  file_format,
  find_delimiter,
  named,
  other_delimiter,
  quoting,
  records,
  repeated,
)
from .values import plain, shown

_AGAIN = "Copy or download it again."
_PEEK = 1 << 18  # bytes that show how a file is written
_MEMORY = "400MB"  # of DuckDB, which spills beyond it to the folder of a `Stage`
_LONGEST_LINE = 8 << 20  # bytes
_OPEN = 1000  # lines of a value within quotes, at most, at the end of a sample
_CELLS = 1 << 22  # of a row group in a staged file, or of a batch, which are held in memory
_CUT = "\x1f"  # a delimiter for lines that are cut here; a control character
_MAGIC = {
  b"PAR1": "is a Parquet file. Name it so: {stem}.parquet",
  b"\x1f\x8b": "is compressed with gzip. Name it so: {path}.gz",
  b"PK\x03\x04": "is a zip archive or a spreadsheet. Unpack it, or save the sheet as CSV",
  b"\x28\xb5\x2f\xfd": "is compressed with zstd. Unpack it first",
  b"BZh": "is compressed with bzip2. Unpack it first",
  b"\xfd7zXZ": "is compressed with xz. Unpack it first",
}
_UTF16 = "is written in UTF-16. Write config.format.encoding='utf-16'"
_QUOTE = "write config.format.quote='' if quotes have no meaning."
_DECODING_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, UnicodeError)


class Fault(NamedTuple):
  """A row that cannot be used."""

  row: int  # number in its file; the first row below the header is row 1
  column: str | None  # where the fault is, or None for the row as a whole
  kind: str  # the fault as a predicate, such as "is not utf-8"; faults are counted by it
  value: str  # for the error text, or ""
  hint: str = ""  # says what to write


class Stored(NamedTuple):
  """The Parquet file with a file's rows, those that are not in it, and the share that was read."""

  path: Path
  faults: list[Fault]
  share: float = 1.0


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
    self.texts: dict[Any, Stored] = {}
    self._num_paths = 0

  @functools.cached_property
  def engine(self) -> Any:
    """A connection to DuckDB."""
    import duckdb  # not for predictions, which read no files by it

    settings = {"memory_limit": _MEMORY, "temp_directory": str(self.folder)}
    connection = duckdb.connect(config={**settings, "threads": min(os.cpu_count() or 1, 8)})
    # It would write to stdout. `SET enable_progress_bar` needs ipywidgets in a notebook.
    connection.execute("PRAGMA disable_progress_bar")
    return connection

  @functools.cached_property
  def background(self) -> futures.Executor:
    """One thread for what is done beside the rows."""
    return futures.ThreadPoolExecutor(1)

  def __enter__(self) -> "Stage":
    return self

  def __exit__(self, *error: object) -> None:
    """Removes the folder."""
    if "background" in self.__dict__:
      self.background.shutdown(cancel_futures=True)
    if "engine" in self.__dict__:
      self.engine.close()
    shutil.rmtree(self.folder, ignore_errors=True)

  def path(self, name: str) -> Path:
    """Returns the path of a new file."""
    self._num_paths += 1
    return self.folder / f"{self._num_paths}_{name}"

  def table(self, query: str) -> pa.Table:
    """Answers a query, in any thread; raises DamagedFileError for a file that cannot be read."""
    import duckdb

    try:
      with self.engine.cursor() as cursor:
        return cursor.execute(query).to_arrow_table()
    except (duckdb.InvalidInputException, duckdb.IOException) as error:
      reason = str(error).partition("\n")[0]
      raise DamagedFileError(f"a file cannot be read ({reason}). {_AGAIN}") from error


class ParquetFile:
  """A Parquet file.

  Raises:
    DamagedFileError: the file is no Parquet, incomplete, or names two columns alike.
  """

  advice = ""

  def __init__(self, path: Path):
    self.path = path
    with opened(path) as file:
      schema = file.schema_arrow
    self.names = named(schema.names)
    if (duplicate := repeated(self.names)) is not None:
      raise DamagedFileError(f"{path} has two columns {duplicate!r}. Rename one.")
    self.types: Mapping[str, pa.DataType] = dict(zip(self.names, schema.types, strict=True))
    self.stored_names: Mapping[str, str] = dict(zip(self.names, schema.names, strict=True))

  def stored(self, stage: Stage, limit: int = 0) -> Stored:
    """Returns the file itself."""
    return Stored(self.path, [])


class TextFile:
  """A text file with a row a line, or several lines where a quoted value has line ends.

  Empty lines are no rows. A column that the header leaves unnamed, such as the index that pandas
  writes, is called by its place, as `column 1`.

  Attributes:
    names, types: of the columns, in order; all are text.
    stored_names: of the columns in the staged file: DuckDB's names are equal in any case.
    delimiter: between two fields.
    skip: lines before the first row.

  Raises:
    DamagedFileError: the file is empty, no text, or its header cannot be read.
    UserError: the format does not fit the file.
  """

  def __init__(self, path: Path, format: Format):
    self.path, self.format = path, format
    sample, empty_lines = peek(path, format.encoding)
    self.delimiter = format.delimiter or find_delimiter(sample, path, format)
    self.quote = "" if format.rest or len(self.delimiter) > 1 else format.quote
    try:
      lines = records(sample, self.delimiter, self.quote, strict=not format.names)
      header = next(lines)
    except csv.Error as error:
      raise DamagedFileError(
        f"{path}: the header cannot be read ({error}). Close its quotes, or {_QUOTE}"
      ) from error
    self.names = self._header([name.strip() for name in header])
    # A header that spans lines has to end as those do, or DuckDB skips all rows with it.
    self._has_lines = not format.names and bool(re.search("[\r\n]", "".join(header)))
    self.types: Mapping[str, pa.DataType] = dict.fromkeys(self.names, pa.string())
    self.stored_names = {name: f"c{place}" for place, name in enumerate(self.names)}
    self.skip = 0 if format.names else empty_lines + 1
    # DuckDB takes delimiters of up to 4 bytes.
    self._is_cut = format.rest or len(self.delimiter.encode()) > 4
    self._delimiter = _CUT if self._is_cut else self.delimiter

  def _header(self, first: list[str]) -> tuple[str, ...]:
    name_them = "name the columns: config.format.names=('…', '…')."
    if names := self.format.names:
      if [name.lower() for name in first] == [name.lower() for name in names]:
        raise UserError(
          f"{self.path}: the first line is a header. Leave out config.format.names, which is for "
          "files without one."
        )
      return names
    for place, name in enumerate(first, start=1):
      if "\0" in name or re.search("[\udc80-\udcff]", name):
        text = shown(name.encode("utf-8", "surrogateescape"))
        problem = "has a NUL byte, and is no text" if "\0" in name else "cannot be decoded"
        raise DamagedFileError(
          f"{self.path}, header, column {place}: {text} {problem}. Is it in another encoding? "
          "Write config.format.encoding='latin-1', or 'utf-16'."
        )
    if not any(first):
      raise DamagedFileError(
        f"{self.path}: the header names no column. Name them, or remove that line and {name_them}"
      )
    names = named(first)
    if (duplicate := repeated(names)) is not None:
      places = [place for place, name in enumerate(names, start=1) if name == duplicate]
      raise DamagedFileError(
        f"{self.path}: the header names columns {places[0]} and {places[1]} {duplicate!r}. Rename "
        f"one, or if that line is a row, {name_them}"
      )
    return names

  @property
  def advice(self) -> str:
    """What to try where a column is missing, or ""."""
    if self.format.names:
      return "The names are from config.format.names."
    if len(self.names) == 1 and (delimiter := other_delimiter(self.names[0], self.delimiter)):
      return f"The delimiter seems another: write config.format.delimiter={delimiter!r}."
    if any(re.fullmatch(r"[-+.\d]+", name) for name in self.names):
      seems = "The first line seems a row, not a header: name the columns, "
      return f"{seems}config.format.names=('…', '…')."
    return ""

  @contextlib.contextmanager
  def open(self) -> Iterator[Any]:
    """Opens the bytes of the text, unpacked."""
    stream, raw = _bytes_of(self.path)
    with raw:
      yield stream

  def stored(self, stage: Stage, limit: int = 0) -> Stored:
    """Returns the Parquet file with the rows, or with the first `limit` ones.

    Raises:
      DamagedFileError: a quote is not closed, or a compressed file is incomplete or damaged.
    """
    key = (self.path, self.format, limit)
    if key not in stage.texts:
      stage.texts[key] = self._converted(stage, limit)
    return stage.texts[key]

  def _converted(self, stage: Stage, limit: int) -> Stored:
    import duckdb

    target, text, share = stage.path("text.parquet"), stage.path("text"), 1.0
    is_text = _codec(self.format.encoding) == "utf-8" and self.path.suffix.lower() != ".gz"
    if is_text and not (limit or self._is_cut or self._has_lines or _has_nul(self.path)):
      text.symlink_to(self.path.absolute())  # whose name has no glob characters
    else:
      share = self._rewrite(text, limit, ends=self._has_lines)
    try:
      try:
        self._convert(stage, text, target)
      except duckdb.InvalidInputException as error:
        if "invalid state" not in str(error):
          raise
        self._rewrite(text, limit, ends=True)  # lines that end in several ways
        self._convert(stage, text, target)
    except duckdb.InvalidInputException as error:
      reason = str(error).partition("\n")[0]
      raise DamagedFileError(f"{self.path} cannot be read ({reason}). {_AGAIN}") from error
    except duckdb.Error as error:  # no memory, a full disk
      reason = str(error).partition("\n")[0]
      raise UserError(f"{self.path} cannot be converted to {target} ({reason})") from error
    faults = self._faults(stage, text)
    text.unlink()
    return Stored(target, faults, share)

  def _rewrite(self, target: Path, limit: int, *, ends: bool = False) -> float:
    """Writes the text unpacked, in UTF-8, and with one kind of line ends if `ends`.

    Bytes that cannot be decoded stay as they are, and are no UTF-8 then; a NUL byte, which DuckDB
    would take, comes after one that is none. Returns the share of the text that is written: all,
    or `limit` rows and what closes their quotes.
    """
    count, quotes = 0, 0
    target.unlink(missing_ok=True)
    stream, raw = _bytes_of(self.path)
    newline = None if ends or self._is_cut else ""
    codec = _codec(self.format.encoding)
    lines = io.TextIOWrapper(stream, codec, "surrogateescape", newline=newline)
    last = limit + self.skip if limit else float("inf")
    with raw, target.open("wb") as file:
      try:
        for line in lines:
          is_open = bool(self.quote) and quotes % 2 > 0
          if count >= last and not (is_open and count < last + _OPEN):
            is_ahead = raw is not stream or codec != "utf-8"  # of what is written, by some blocks
            read = raw.tell() if is_ahead else file.tell()
            return min(read / max(self.path.stat().st_size, 1), 1.0)
          quotes += line.count(self.quote) if self.quote else 0
          count += 1
          text = self._cut(line) if self._is_cut else line
          file.write(text.encode("utf-8", "surrogateescape").replace(b"\0", b"\xff\0"))
        return 1.0
      except _DECODING_ERRORS as error:
        row = count - self.skip
        raise DamagedFileError(
          f"{self.path} breaks off or is damaged after row {row} ({error}). {_AGAIN}"
        ) from error

  def _cut(self, line: str) -> str:
    """Returns a line with the delimiter of lines that are cut here; `rest` ends the last field."""
    delimiter, width = self.delimiter, len(self.names)
    line = line.rstrip("\n").replace(_CUT, " ")
    line = line.strip(" ") if delimiter == " " else line
    fields = line.split(delimiter, width - 1 if self.format.rest else -1)
    # Where the rest of a line is empty, its delimiter is missing too.
    empty = [""] * (self.format.rest and bool(line) and len(fields) == width - 1)
    return _CUT.join(fields + empty) + "\n"

  def _convert(self, stage: Stage, text: Path, target: Path) -> None:
    width, quote = len(self.names), literal(self.quote)
    for name in ("reject_errors", "reject_scans"):
      stage.engine.execute(f"DROP TABLE IF EXISTS {name}")
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(width))
    scanned = (
      f"read_csv({literal(text)}, columns={{{columns}}}, header=false, skip={self.skip}, "
      f"delim={literal(self._delimiter)}, quote={quote}, escape={quote}, auto_detect=false, "
      f"strict_mode=true, store_rejects=true, max_line_size={_LONGEST_LINE})"
    )
    # An empty line is a row of one column to DuckDB.
    query = f"SELECT * FROM {scanned}" + " WHERE c0 IS NOT NULL" * (width == 1)
    group = max(2048, min(122_880, _CELLS // width))
    options = f"(FORMAT parquet, ROW_GROUP_SIZE {group})"
    stage.engine.execute(f"COPY ({query}) TO {literal(target)} {options}")

  def _faults(self, stage: Stage, text: Path) -> list[Fault]:
    """Returns the rows that DuckDB has left out, in their order."""
    faults = dict[int, Fault]()
    rejected = stage.engine.execute(
      "SELECT line, column_name, error_type, left(csv_line, 1000), "
      "contains(trim(csv_line, chr(10) || chr(13)), chr(10)), error_message, line_byte_position "
      "FROM reject_errors ORDER BY line"
    ).fetchall()
    empty = self._empty_lines(text) if rejected else np.empty(0, np.int64)
    for line, column, kind, content, has_lines, message, start in rejected:
      row = line - bool(self.skip) - int(np.searchsorted(empty, line))
      column = self.names[int(column[1:])] if column else None
      at = f"{self.path}, row {row}" + (f", column {column!r}" if column else "")
      if kind == "LINE SIZE OVER MAXIMUM":
        size = f"{_LONGEST_LINE >> 20} MiB"
        raise DamagedFileError(f"{self.path}, row {row}: a line of more than {size} is too long.")
      if kind == "UNQUOTED VALUE" and has_lines:
        raise DamagedFileError(f"{at}: a quote is not closed. Close it, or {_QUOTE}")
      if kind in ("MISSING COLUMNS", "TOO MANY COLUMNS"):
        fault = self._ragged(row, int(re.findall(r"\d+", message)[-1]), content)
      elif kind == "INVALID ENCODING":
        fault = self._undecoded(row, column, text, start - 1)
      else:
        hint = f"Double a quote within a quoted value, or {_QUOTE}"
        fault = Fault(row, column, "has an unescaped quote", shown(content.strip()), hint)
      faults.setdefault(row, fault)
    return [faults[row] for row in sorted(faults)]

  def _empty_lines(self, text: Path) -> np.ndarray:
    """Returns which of DuckDB's lines are empty, in order; the header is line 1."""
    csv.field_size_limit(1 << 30)  # an open quote takes all that follows
    delimiter = self._delimiter if self.quote else _CUT
    with text.open(encoding="utf-8", errors="replace", newline="") as file:
      lines = csv.reader(file, **quoting(delimiter, self.quote))
      return np.array([n for n, fields in enumerate(lines, start=1) if not fields], np.int64)

  def _ragged(self, row: int, count: int, text: str) -> Fault:
    width, hint = len(self.names), ""
    few = count < width
    where = f"none for column {self.names[count]!r}" if few else f"more after {self.names[-1]!r}"
    if count == 1 and (delimiter := other_delimiter(text, self.delimiter)):
      hint = f"Is the delimiter {delimiter!r}? Write config.format.delimiter={delimiter!r}."
    elif "\n" in text.strip():
      hint = f"A quote in it closes lines later: {_QUOTE}"
    elif not few and self.quote:
      hint = f"Quote a value that holds {self.delimiter!r}."
    value = f"{count} instead of {width}, {where}"
    return Fault(row, None, f"has too {'few' if few else 'many'} fields", value, hint)

  def _undecoded(self, row: int, column: str | None, text: Path, start: int) -> Fault:
    """Returns the fault of the first field that is no UTF-8 in the line that begins at a byte."""
    encoding, is_utf8 = self.format.encoding, lambda x: x.decode("utf-8", "replace").encode() == x
    with text.open("rb") as file:
      file.seek(start)
      line = next(line.rstrip(b"\r\n") for line in file if line.strip())  # it may begin at an end
    fields = line.split(self._delimiter.encode())
    place = next(i for i, field in enumerate(fields) if not is_utf8(field))
    value = fields[place].strip(self.quote.encode() or None)
    column = column or self.names[min(place, len(self.names) - 1)]
    if b"\0" in value:
      shown_text = shown(value.replace(b"\xff\0", b"\0").decode("utf-8", "replace"))
      return Fault(row, column, "has a NUL byte", shown_text, "Remove it: tr -d '\\000'.")
    another = "='latin-1', or" if _codec(encoding) == "utf-8" else ""
    hint = f"Write config.format.encoding{another} as the file is written."
    return Fault(row, column, f"is not {encoding}", shown(value), hint)


File = ParquetFile | TextFile


def open_file(path: Path, format: Format) -> File:
  """Returns a file by its suffix: Parquet, or else text."""
  return ParquetFile(path) if file_format(path) == "Parquet" else TextFile(path, format)


def _codec(encoding: str) -> str:
  name = codecs.lookup(encoding).name
  return "utf-8" if name in ("utf-8-sig", "ascii") else name


def _bytes_of(path: Path) -> tuple[Any, Any]:
  """Opens a file; returns its bytes, unpacked and packed."""
  try:
    raw = path.open("rb")
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror}") from error
  return (gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw), raw


def _has_nul(path: Path) -> bool:
  with path.open("rb") as file:
    return any(b"\0" in block for block in iter(lambda: file.read(1 << 20), b""))


def peek(path: Path, encoding: str) -> tuple[str, int]:
  """Returns the beginning of a text, from its first line on, and the number of empty lines before.

  Raises:
    DamagedFileError: the file is empty, or no text.
  """
  stream, raw = _bytes_of(path)
  with raw:
    try:
      sample = stream.read(_PEEK)
    except _DECODING_ERRORS as error:
      raise DamagedFileError(
        f"{path} breaks off or is damaged at its beginning ({error}). {_AGAIN}"
      ) from error
  magic = _MAGIC
  if _codec(encoding) == "utf-8":
    magic = magic | {codecs.BOM_UTF16_LE: _UTF16, codecs.BOM_UTF16_BE: _UTF16}
  for first, problem in magic.items():
    if sample.startswith(first):
      raise DamagedFileError(f"{path} {problem.format(path=path, stem=path.with_suffix(''))}.")
  decoder = codecs.getincrementaldecoder(_codec(encoding))(errors="surrogateescape")
  text = decoder.decode(sample).removeprefix("\ufeff")
  started = text.lstrip("\r\n")
  if not started.strip():
    raise DamagedFileError(f"{path} is empty. {_AGAIN.removesuffix('.')}, or leave it out.")
  before = text[: len(text) - len(started)]
  return started, before.count("\n") or before.count("\r")


# --- rows -----------------------------------------------------------------------------------------


class Chunk(NamedTuple):
  """N rows of a file."""

  file: Path
  rows: np.ndarray  # int64 [N], their numbers; the first row below the header is row 1
  columns: dict[str, Any]  # by name, as they are stored or as `Reader` was asked for them
  content: np.ndarray | None = None  # uint32 [N], hashes of its values, if they were asked for

  def take(self, kept: np.ndarray) -> "Chunk":
    """Returns the rows for which a bool [N] holds, or those at integer indices."""
    indices = np.flatnonzero(kept) if kept.dtype == bool else kept
    columns = {
      name: values[indices] if isinstance(values, np.ndarray) else values.take(pa.array(indices))
      for name, values in self.columns.items()
    }
    content = None if self.content is None else self.content[indices]
    return Chunk(self.file, self.rows[indices], columns, content)


def batches(
  file: File,
  stage: Stage,
  columns: Sequence[str],
  num_rows: int,
  dictionaries: Sequence[str] = (),
  *,
  seed: int | None = None,
  limit: int = 0,
) -> Iterator[tuple[Chunk, list[Fault]]]:
  """Yields the rows of a file in their order, up to `num_rows` at once.

  With them come the rows among and before them that were dropped.

  Args:
    dictionaries: columns of text that come as such, which saves the work on repeated values.
    seed: of the hashes of the rows' values in `columns`; None leaves them out.
    limit: of `TextFile.stored`.

  Raises:
    DamagedFileError: the file is damaged; names the row before.
  """
  path, faults, _ = file.stored(stage, limit)
  left_out = np.array([fault.row for fault in faults], np.int64)
  before = left_out - np.arange(len(left_out))  # rows that are kept, up to each of them
  start, passed = 0, 0
  texts = [file.stored_names[n] for n in dictionaries if pa.types.is_string(file.types[n])]
  num_rows = min(num_rows, max(2048, _CELLS // len(columns)))

  def read() -> Iterator[dict[str, pa.Array]]:
    row = 0
    try:
      stored = [file.stored_names[name] for name in columns]
      for batch in parquet.iter_batches(num_rows, columns=stored, use_threads=False):
        row += len(batch)
        yield {name: batch.column(file.stored_names[name]) for name in columns}
    except (pa.ArrowException, OSError) as error:
      raise DamagedFileError(f"{path} is damaged after row {row} ({error}). {_AGAIN}") from error

  def hashed() -> Iterator[tuple[dict[str, pa.Array], np.ndarray | None]]:
    for arrays in ahead(read()):
      yield arrays, None if seed is None else _content(stage, arrays, seed)

  with opened(path, texts) as parquet, contextlib.closing(ahead(hashed())) as read_ahead:
    for arrays, content in read_ahead:
      count = len(next(iter(arrays.values())))
      places = np.arange(start, start := start + count)
      rows = places + 1 + np.searchsorted(before, places + 1, side="right")
      stop = int(np.searchsorted(left_out, rows[-1]))
      yield Chunk(file.path, rows, arrays, content), faults[passed:stop]
      passed = stop
  if passed < len(faults):
    none = {name: pa.nulls(0, file.types[name]) for name in columns}
    content = None if seed is None else np.empty(0, np.uint32)
    yield Chunk(file.path, np.empty(0, np.int64), none, content), faults[passed:]


def ahead(items: Iterator[Any]) -> Generator[Any, None, None]:
  """Yields items, none of them None; a thread makes the next one meanwhile."""
  with futures.ThreadPoolExecutor(1) as thread:
    task = thread.submit(next, items, None)
    while (item := task.result()) is not None:
      task = thread.submit(next, items, None)
      yield item


def _content(stage: Stage, columns: Mapping[str, pa.Array], seed: int) -> np.ndarray:
  """Returns a hash of each row, uint32 `[N]`: the same wherever it is, and for equal rows.

  The MD5 covers the seed and the values that are not missing, in the order of the column names,
  joined by a unit separator (0x1F); its first eight hexadecimal digits are the hash. MD5 and not
  the engine's hash, which its next version may change.
  """
  arrays = {f"v{i}": _hashable(columns[name]) for i, name in enumerate(sorted(columns))}
  texts = [
    f"hex({name})" if pa.types.is_binary(array.type) else f"CAST({name} AS VARCHAR)"
    for name, array in arrays.items()
  ]
  joined = f"concat_ws(chr(31), {literal(seed)}, {', '.join(texts)})"
  with stage.engine.cursor() as engine:  # of this thread
    engine.register("batch", pa.table(arrays))
    query = f"SELECT CAST('0x' || substr(md5({joined}), 1, 8) AS UINTEGER) AS hash FROM batch"
    return engine.execute(query).to_arrow_table()["hash"].to_numpy()


def _hashable(array: pa.Array) -> pa.Array:
  """Returns values that DuckDB writes as text in one way; Arrow is faster at floats."""
  if pa.types.is_dictionary(array.type) and pa.types.is_string(array.type.value_type):
    return array
  array = plain(array)
  if pa.types.is_floating(array.type):
    is_half = pa.types.is_float16(array.type)
    return (array.cast(pa.float32()) if is_half else array).cast(pa.string())
  if pa.types.is_timestamp(array.type):
    array = array.cast(pa.timestamp("us", array.type.tz), safe=False)
  if pa.types.is_timestamp(array.type) or pa.types.is_duration(array.type):
    return array.cast(pa.int64())
  if pa.types.is_fixed_size_binary(array.type):
    return array.cast(pa.binary())
  if re.search("halffloat|decimal256", str(array.type)):  # alone or in lists; DuckDB has none
    return pa.array([None if each is None else str(each) for each in array.to_pylist()])
  return array


def opened(path: Path, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
  """Opens a Parquet file that is read in pages, not by whole columns of a row group."""
  options: dict[str, Any] = {"buffer_size": 1 << 20, "pre_buffer": False}
  try:
    return pq.ParquetFile(
      path, page_checksum_verification=True, read_dictionary=list(dictionaries), **options
    )
  except (pa.ArrowException, OSError) as error:
    raise DamagedFileError(f"{path} is not a complete Parquet file ({error}). {_AGAIN}") from error


def literal(text: object) -> str:
  """Returns a text as SQL writes it."""
  return "'" + str(text).replace("'", "''") + "'"


def scan(path: Path) -> str:
  """Returns SQL for the rows of a Parquet file, in order, with their places as `file_row_number`.

  The engine would expand patterns, and take folders called x=1 for a column.
  """
  options = "hive_partitioning=false, file_row_number=true"
  return f"read_parquet({literal(glob.escape(str(path)))}, {options})"
