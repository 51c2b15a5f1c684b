"""Rows of files as typed columns: read once, checked, and split by a view.

    rows = read(con, source, folder, on_bad_row="raise")   # one pass over the files
    rows.split("hash", settings)                           # adds the column `split`
    con.execute(f"SELECT avg({rows.columns['price']}) FROM {rows.view} WHERE split = 0")

Arrow reads text, Parquet and JSON Lines in batches, and DuckDB types the raw values of each: they
become texts, numbers, times or lists by the same expressions, for training and serving. A value
that has no such meaning makes its row bad. What is typed lies in a folder, as a Parquet file for
each batch, so that a table may be larger than the memory.
"""

import codecs
import collections
import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from .. import cache, files
from ..errors import DamagedFileError, UserError
from . import spec
from .formats import Format, fields_of, file_format, find_delimiter, named
from .values import (
  MISSING,
  SPLIT_NAMES,
  SPLITS,
  Column,
  Value,
  among,
  is_time,
  literal,
  typed,
  value_of,
)

_MEMORY = "400MB"  # of DuckDB, which spills beyond it
_HEAD, _HEAD_LINES = 1 << 20, 200  # bytes and lines that show how a file is written
_BLOCK = 4 << 20  # bytes of text that Arrow cuts at once, and of the longest row; it reads 32 ahead
_BLOCKS = 4  # of a text in a batch
_ROWS = 1 << 16  # of a Parquet file in a batch
_TOGETHER = 3  # files of typed rows that are read at once
_LINE = ["line"], "\x1f", ""  # a field, between fields, and around: neither is in a text
WORKERS = min(os.cpu_count() or 1, 8)


def connect(threads: int = WORKERS) -> duckdb.DuckDBPyConnection:
  """Returns a connection that spills to a folder of temporary files."""
  spilled = tempfile.mktemp(prefix="sparse_embed_")  # made and removed by DuckDB
  limits: Any = {"memory_limit": _MEMORY, "temp_directory": spilled, "threads": threads}
  con = duckdb.connect(config=limits)
  # The bar would write to stdout. `SET enable_progress_bar` needs ipywidgets in a notebook.
  con.execute("PRAGMA disable_progress_bar; SET TimeZone = 'UTC'")
  return con


# --- files ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class File:
  """A file in batches.

  Attributes:
    path: of the file, or a URL.
    columns: an expression and its type by the name of the column; fields of objects are read by
      their path, as `user.id`.
    schema: of the batches, whose fields the expressions name.
    read: yields batches of the named fields.
    fields: paths of fields in the objects of the first lines.
    bad: a condition of malformed rows, and the text of the error.
    unreadable: line, problem and text of rows that `read` has left out so far, since they cannot be
      cut into fields. Lines that are blank, and those within quotes, do not count.
  """

  path: str
  columns: Mapping[str, tuple[str, str]]
  schema: pa.Schema
  read: Callable[[Sequence[str]], Iterator[pa.Table]]
  fields: Sequence[str] = ()
  bad: tuple[str, str] = ("false", "")
  unreadable: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)

  def column(self, name: str) -> Column:
    """Returns a column; raises DamagedFileError where there is none."""
    if name in self.columns:
      return Column(name, *self.columns[name])
    top, *below = name.split(".")
    raw, stored = self.columns.get(top, ("", ""))
    if below and stored in ("JSON", "VARCHAR"):
      return Column(name, _field(raw, *below), "VARCHAR")
    hint = " (If the first line is a row, name the columns: config.format.names=('…', '…').)"
    raise DamagedFileError(
      f"{self.path} has no column {name!r}; {spec.nearest(name, [*self.columns][:30])}"
      + hint * (file_format(self.path) != "parquet")
    )

  def batches(self, columns: Sequence[Column]) -> Iterator[pa.Table]:
    """Yields the rows with the fields of these columns; raises DamagedFileError if it cannot."""
    asked = {column.raw for column in columns}
    fields = [name for name in self.schema.names if name in asked] or self.schema.names
    with reading(self.path):
      yield from self.read(fields)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Turns the error of a file that cannot be read into one that names the file."""
  try:
    yield
  except UserError:
    raise
  except (pa.ArrowException, duckdb.Error, OSError, UnicodeError, ImportError) as error:
    raise DamagedFileError(
      f"{path} cannot be read ({error}). Copy or download it again; if it is a text of another "
      "encoding, write config.format.encoding, as 'latin-1' or 'utf-16'."
    ) from error


def _opened(path: str) -> Any:
  """Opens a file, or a URL by fsspec, which needs a package for some."""
  if os.path.exists(path):
    return path
  import fsspec

  return fsspec.open(path).open()


def _stream(path: str) -> Any:
  """Opens a text, unpacked."""
  packed = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path.lower())[1])
  return pa.input_stream(_opened(path), compression=packed)


def open_file(path: str, format: Format) -> File:
  """Returns a file by its suffix: Parquet, JSON Lines, or else text.

  Raises:
    DamagedFileError: the file is empty, damaged, or its header cannot be read.
    UserError: the format does not fit the file.
  """
  kind = file_format(path)
  with reading(path):
    if kind == "parquet":
      return _parquet(path)
    lines, is_all = head(path, format)
    return _json(path, format, lines) if kind == "json" else _text(path, format, lines, is_all)


def _parquet(path: str) -> File:
  def read(fields: Sequence[str]) -> Iterator[pa.Table]:
    chosen = [name for name, field in zip(names, schema.names, strict=True) if field in fields]
    with pq.ParquetFile(_opened(path), pre_buffer=False) as file:
      for batch in file.iter_batches(_ROWS, columns=chosen):
        yield pa.table(batch.columns, fields).cast(pa.schema([schema.field(f) for f in fields]))

  with pq.ParquetFile(_opened(path)) as file:
    stored = file.schema_arrow
  if (name := spec.repeated(names := stored.names)) is not None:
    raise DamagedFileError(f"{path} has two columns {name!r}: rename one")
  # DuckDB has no half floats.
  plain = lambda kind: pa.float32() if kind == pa.float16() else kind
  schema = pa.schema([(f"f{place}", plain(field.type)) for place, field in enumerate(stored)])
  types = duckdb.from_arrow(schema.empty_table()).types
  stored_as = {"NULL": "VARCHAR", '"NULL"': "VARCHAR"}
  columns = {
    name: (field, stored_as.get(str(kind), str(kind)))
    for name, field, kind in zip(named(names), schema.names, types, strict=True)
  }
  return File(path, columns, schema, read)


def head(path: str, format: Format) -> tuple[list[str], bool]:
  """Returns the first lines of a text, one at least, and whether they are all of it."""
  size, lines, is_all = _HEAD, [""], False
  while len(lines) < 2 and not is_all:
    with reading(path), _stream(path) as stream:
      start = stream.read(size)
      text = codecs.getincrementaldecoder(format.encoding)().decode(start)  # the end may be cut
    lines, is_all = re.split("\r\n|\n|\r", text.removeprefix("\ufeff")), len(start) < size
    size *= 2
  if not text.strip():
    raise DamagedFileError(f"{path} is empty")
  return lines if is_all else lines[:-1], is_all


def _cut(
  path: str,
  format: Format,
  fields: Sequence[str],
  delimiter: str,
  quote: str,
  *,
  skip: int = 0,
  after: int = 0,
) -> dict[str, Any]:
  """Returns what `File` has of a text that a delimiter cuts into fields.

  `skip` lines are passed over, and `after` rows.
  """
  unreadable = list[tuple[int, str, str]]()
  schema = pa.schema([(field, pa.string()) for field in fields])

  def leave_out(row: Any) -> str:
    many = "many" if row.actual_columns > row.expected_columns else "few"
    problem = f"has too {many} fields for {row.expected_columns} columns"
    if quote and quote in row.text:
      problem += " (write config.format.quote='' if quotes have no meaning)"
    unreadable.append((row.number, problem, row.text))
    return "skip"

  def read(chosen: Sequence[str]) -> Iterator[pa.Table]:
    # With threads of its own, Arrow would not count the rows that it leaves out.
    how = csv.ReadOptions(
      use_threads=False, block_size=_BLOCK, encoding=format.encoding, column_names=schema.names,
      skip_rows=skip, skip_rows_after_names=after,
    )  # fmt: skip
    parse = csv.ParseOptions(
      delimiter=delimiter, quote_char=quote or False, newlines_in_values=bool(quote),
      invalid_row_handler=leave_out,
    )  # fmt: skip
    texts = csv.ConvertOptions(
      column_types=schema, include_columns=list(chosen), strings_can_be_null=False
    )
    with _stream(path) as stream:
      reader = csv.open_csv(stream, how, parse, texts)
      while blocks := [*itertools.islice(reader, _BLOCKS)]:
        yield pa.Table.from_batches(blocks)

  return {"schema": schema, "read": read, "unreadable": unreadable}


def _field(text: str, *keys: str) -> str:
  """Returns the SQL of a field in an object written as JSON, by its keys from the outside in."""
  quoted = (key.replace("\\", "\\\\").replace('"', '\\"') for key in keys)
  path = "$" + "".join(f'."{key}"' for key in quoted)
  return f"CASE WHEN json_valid({text}) THEN {text} ->> {literal(path)} END"


_PYTHON_TO_JSON = (
  "'import ast, json, sys; [print(json.dumps(ast.literal_eval(x))) for x in sys.stdin]'"
)


def _object(text: str) -> dict[str, Any]:
  """Returns an object written as JSON; an empty one of another text."""
  try:
    found = json.loads(text)
  except ValueError:
    return {}
  return found if isinstance(found, dict) else {}


def _paths(rows: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns the paths of the fields in objects that rows hold, as `user.id`."""
  objects = ((name, x) for row in rows for name, x in row.items() if isinstance(x, dict))
  return [*dict.fromkeys(f"{name}.{key}" for name, found in objects for key in found)]


def _json(path: str, format: Format, lines: Sequence[str]) -> File:
  rows = [*map(_object, lines)]
  keys = {key for row in rows for key in row}
  if not keys:
    advice = "write one a line"
    if any(re.match(r"\{u?'", line) for line in lines):
      advice = (
        f"its lines are Python's. Convert them: python -c {_PYTHON_TO_JSON} < FILE > NEW.jsonl"
      )
    raise DamagedFileError(f"{path} has no JSON object in its first lines: {advice}")
  no_object = "CASE WHEN json_valid(line) THEN json_type(line) <> 'OBJECT' ELSE true END"
  columns = {key: (_field("line", key), "JSON") for key in sorted(keys)}
  bad = no_object, "is no JSON object"
  return File(path, columns, fields=_paths(rows), bad=bad, **_cut(path, format, *_LINE))


def _text(path: str, format: Format, lines: Sequence[str], is_all: bool) -> File:
  skip = next(place for place, line in enumerate(lines) if line.strip())
  has_rows, lines = any(map(str.strip, lines[skip + 1 :])), lines[skip:][:_HEAD_LINES]
  delimiter = format.delimiter or find_delimiter(lines, path, format)
  quote = "" if format.rest or len(delimiter) > 1 else format.quote
  first, *others = fields_of(lines, delimiter, quote) or [[]]
  names = _names(path, format, [name.strip() for name in first])
  has_header = not format.names
  if format.rest or len(delimiter) > 1:
    last = len(names) - 1
    parts = f"string_split(trim(line, ' '), {literal(delimiter)})"
    columns = {name: (f"{parts}[{place + 1}]", "VARCHAR") for place, name in enumerate(names)}
    wrong = f"len({parts}) <> {len(names)}", f"has not {len(names)} fields"
    if format.rest:
      rest = f"array_to_string({parts}[{last + 1}:], {literal(delimiter)})"
      columns[names[-1]] = (rest, "VARCHAR")
      wrong = f"len({parts}) < {last}", "has too few fields"
    return File(path, columns, bad=wrong, **_cut(path, format, *_LINE, skip=skip + has_header))
  fields = [f"f{place}" for place in range(len(names))]
  rows = [dict(zip(names, map(_object, row), strict=False)) for row in others]
  columns = {name: (field, "VARCHAR") for name, field in zip(names, fields, strict=True)}
  about = _cut(path, format, fields, delimiter, quote, skip=skip, after=int(has_header))
  if has_header and is_all and not has_rows:
    about["read"] = lambda chosen: iter(())  # which Arrow takes for damaged
  return File(path, columns, fields=_paths(rows), **about)


def _names(path: str, format: Format, first: list[str]) -> tuple[str, ...]:
  """Returns the names of the columns of a text file, given its first line."""
  if names := format.names:
    if [name.lower() for name in first] == [name.lower() for name in names]:
      raise UserError(f"{path}: the first line is a header: leave out config.format.names")
    return names
  names = named(first)
  if not any(first) or (duplicate := spec.repeated(names)) is not None:
    problem = f"two columns {duplicate!r}" if any(first) else "no column"
    raise DamagedFileError(
      f"{path}: the header names {problem}. Mend it, or if that line is a row, name the columns: "
      "config.format.names=('…', '…')"
    )
  return names


# --- rows -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
  """Files with rows, and the declared columns of them."""

  files: Mapping[str, tuple[str, ...]]  # by split; one entry "" where all splits are together
  format: Format  # of text files
  kinds: Mapping[str, spec.Kind]  # by declared name
  stamps: Mapping[str, list[Any]]  # when the settings were made; see `files.stamp`

  @property
  def all_files(self) -> list[str]:
    """The files of all splits."""
    return [path for paths in self.files.values() for path in paths]


class Rows:
  """Typed rows in the Parquet files of a folder, and a view of them.

  Attributes:
    con: the connection.
    view: its name. It has the columns `columns`, `place`, the number of a row over all files, and
      `split`, an index in `SPLITS`.
    columns: names in the view by declared name.
    total: rows of the files, with those that were left out for a bad value.
    starts: the first row of each file.
    left_out: how many rows were left out by what is wrong with them, and where the first is.
  """

  def __init__(self, con: Any, source: Source, folder: Path, on_bad_row: str):
    self.con, self.source, self.folder, self.on_bad_row = con, source, folder, on_bad_row
    self.view, self.stored = "rows", f"read_parquet({literal(f'{glob.escape(str(folder))}/*')})"
    self.columns = {each: f"c{place}" for place, each in enumerate(source.kinds)}
    self.left_out: dict[str, tuple[int, str]] = {}
    self.total, self.starts = 0, list[int]()

  @property
  def notes(self) -> list[str]:
    """Lines about rows that were left out."""
    return [
      f"{count:,} row{'s' * (count > 1)}: {problem} (first: {first})"
      for problem, (count, first) in self.left_out.items()
    ]

  def __len__(self) -> int:
    return self.query(f"SELECT count(*) AS n FROM {self.view}")["n"][0].as_py()

  def define(self, split: str = "0") -> None:
    """Makes the view; `split` is the SQL of the index in `SPLITS`."""
    columns = ", ".join([*self.columns.values(), "place", f"CAST({split} AS TINYINT) AS split"])
    query = f"SELECT {columns} FROM {self.stored}"
    self.con.execute(f"CREATE OR REPLACE VIEW {self.view} AS {query}")

  def query(self, sql: str) -> pa.Table:
    """Answers a query."""
    return self.con.execute(sql).to_arrow_table()

  def parts(self) -> Iterator[tuple[list[Path], np.ndarray]]:
    """Yields files of the folder, in the order of the rows, and the splits of their rows, int8."""
    split = self.query(f"SELECT split FROM {self.view}")["split"].to_numpy()
    paths, start = sorted(self.folder.iterdir()), 0
    for first in range(0, len(paths), _TOGETHER):
      group = paths[first : first + _TOGETHER]
      stop = start + sum(pq.read_metadata(path).num_rows for path in group)
      yield group, split[start:stop]
      start = stop

  def values(self, parts: Sequence[Path], names: Sequence[str]) -> dict[str, pa.Array]:
    """Reads the values of declared columns from files of the folder; texts are dictionaries."""
    own = [self.columns[name] for name in names]
    table = pq.read_table([*map(str, parts)], columns=own, read_dictionary=own)
    return {n: table[column].combine_chunks() for n, column in zip(names, own, strict=True)}

  def split(self, by: str, settings: Mapping[str, Any], *, holds_out: bool = True) -> None:
    """Splits the rows: by "hash", "time", "order", "column" or "files"; by "" none is held out.

    Args:
      settings: `config.split`.
      holds_out: whether a part of the training files validates where no file does.
    """
    valid, test, kinds = settings["valid"], settings["test"], self.source.kinds
    by_hash = lambda shares: " + ".join(
      f"CAST(hash < {round(share * 2**32)} AS INTEGER)" for share in (sum(shares), shares[1])
    )
    split = "0"
    if by == "hash":
      split = by_hash((valid, test))
    elif by == "time":
      column = self.columns[str(spec.only(kinds, spec.Time))]
      split = _at_or_after(column, self._first_times(column, (valid + test, test)))
    elif by == "order":
      ranges = cache.cut(self.total, valid, test)
      split = _at_or_after("place", (ranges["valid"][0], ranges["test"][0]))
    elif by == "column":
      column = self.columns[str(spec.only(kinds, spec.Split))]
      names = " ".join(f"WHEN {literal(n)} THEN {index}" for n, index in SPLIT_NAMES.items())
      split = f"CASE {column} {names} END"
    elif by == "files":
      of_file = [name for name, paths in self.source.files.items() for _ in paths]
      index = [str(SPLITS.index(name)) for name in of_file]
      if holds_out and "valid" not in self.source.files:
        index = [
          by_hash((valid, 0.0)) if name == "train" else i
          for name, i in zip(of_file, index, strict=True)
        ]
      before = zip(self.starts[1:], index, strict=False)
      cases = " ".join(f"WHEN place < {end} THEN {i}" for end, i in before)
      split = f"CASE WHEN false THEN 0 {cases} ELSE {index[-1]} END"
    self.define(split)

  def _first_times(self, column: str, shares: Sequence[float]) -> list[float]:
    """Returns the first time of the last share of the rows, for each share."""
    times = f"quantile_cont(CAST({column} AS DOUBLE), {literal([1 - share for share in shares])})"
    answer = self.query(f"SELECT {times} AS t FROM {self.view}")["t"][0].as_py()
    found = zip(answer or [None] * len(shares), shares, strict=True)
    return [time if share and time is not None else float("inf") for time, share in found]


def _at_or_after(column: str, bounds: Sequence[float]) -> str:
  return " + ".join(f"CAST({column} >= {literal(bound)} AS INTEGER)" for bound in bounds)


def read(
  con: duckdb.DuckDBPyConnection,
  source: Source,
  folder: Path,
  on_bad_row: str = "raise",
  *,
  required: Sequence[str] = (),
  seed: int | None = None,
  on: str = "",
) -> Rows:
  """Reads the declared columns of files, once.

  Args:
    folder: an empty one, for the typed rows.
    on_bad_row: "raise", or "skip" to leave out and count rows that cannot be read.
    required: declared names in which every row must have a value.
    seed, on: of the hash of each row that a split goes by: over the seed and the declared columns
      of the files in the order of their names, joined by a unit separator; or over a declared name
      alone. It is the start of their MD5, the same in every version and process. None makes none.

  Raises:
    DamagedFileError: a file lacks a column, or is damaged, or a row cannot be read; names file,
      row, column and value.
  """
  kinds = source.kinds
  opened = [open_file(path, source.format) for path in source.all_files]
  rows = Rows(con, source, folder, on_bad_row)
  required = [*required, *filter(None, [spec.only(kinds, spec.Label)])]
  parts = (folder / f"{number:06d}.parquet" for number in itertools.count())
  bar = files.progress("reading", len(opened), "file")
  with futures.ThreadPoolExecutor(WORKERS) as pool, bar:
    for file in opened:
      rows.starts.append(rows.total)
      query = _query(file, source, rows.columns, required, seed, on)
      with reading(file.path):
        _read_file(pool, rows, file, query, parts)
      bar.update()
  rows.define()
  if len(rows.query(f"SELECT DISTINCT is_date FROM {rows.stored}")) > 1:
    raise DamagedFileError("the column of times has dates and numbers: write all of them alike")
  if not len(rows):
    first, why = source.all_files[0], "; ".join(rows.notes)
    raise DamagedFileError(
      f"{first}: every row was left out: {why}" if why else f"{first} has a header and no rows"
    )
  return rows


class _Query(NamedTuple):
  """A query that types the rows of a file."""

  columns: list[Column]  # of the file
  sql: str  # of the typed columns, `bad`, `value` and `place`
  checks: dict[int, tuple[str, str]]  # column and problem by what is in `bad`


def _read_file(
  pool: futures.Executor, rows: Rows, file: File, query: _Query, parts: Iterator[Path]
) -> None:
  """Types the batches of a file, several at once, and counts or refuses rows that are bad."""
  pending = collections.deque[Any]()
  submit = lambda table: pool.submit(_type, table, query.sql, rows.total, next(parts))
  for table in file.batches(query.columns):
    pending.append(submit(table))
    rows.total += len(table)
    if len(pending) >= WORKERS:
      _refuse(rows, file, query, pending.popleft().result())
  if rows.total == rows.starts[-1]:
    pending.append(submit(file.schema.empty_table()))
  while pending:
    _refuse(rows, file, query, pending.popleft().result())


_of_thread = threading.local()


def _type(table: pa.Table, query: str, start: int, path: Path) -> list[dict[str, Any]]:
  """Types rows, writes the good ones, and returns number, first place and value of bad ones."""
  if not hasattr(_of_thread, "con"):
    _of_thread.con = connect(1)
  place = pa.array(np.arange(start, start + len(table)))
  _of_thread.con.register("raw", table.append_column("place", place))
  answer = _of_thread.con.execute(query).to_arrow_table()
  bad = answer.select(["bad", "place", "value"]).filter(answer["bad"].is_valid())
  good = answer.filter(answer["bad"].is_null()) if len(bad) else answer
  good = good.drop(["bad", "value"])
  texts = [field.name for field in good.schema if field.type == pa.string()]
  pq.write_table(good, path, use_dictionary=texts, compression="none", write_statistics=False)
  about = [("place", "count"), ("place", "first"), ("value", "first")]
  return bad.group_by("bad", use_threads=False).aggregate(about).to_pylist()


_DROPPED = "left out by the label's drop"


def _query(
  file: File,
  source: Source,
  columns: Mapping[str, str],
  required: Sequence[str],
  seed: int | None,
  on: str,
) -> _Query:
  checks = {0: ("", file.bad[1]), -1: ("", _DROPPED)}
  values, read = dict[str, Value](), dict[str, Column]()
  cases, is_date = [f"WHEN {file.bad[0]} THEN 0"], "true"
  for number, (declared, kind) in enumerate(source.kinds.items(), start=1):
    own = [file.column(name) for name in kind.sources(declared)]
    read |= {column.name: column for column in own}
    try:
      value = value_of(kind, own, source.format.missing, place=number)
    except DamagedFileError as error:
      raise DamagedFileError(f"{file.path}: {error}") from error
    name = columns[declared]
    values[name], checks[number] = value, (own[0].name, value.problem)
    if declared in required:
      code = number + MISSING
      cases.append(f"WHEN ({value.bad}) IS NOT TRUE AND {name} IS NULL THEN {code}")
      checks[code] = own[0].name, "has no value"
    if isinstance(kind, spec.Time) and not (kind.format or kind.columns or is_time(own[0].stored)):
      is_date = f"TRY_CAST(m{number}_0 AS DOUBLE) IS NULL"
    if isinstance(kind, spec.Label) and kind.drop:
      cases.insert(1, f"WHEN {among(f'x{number}', kind.drop)} THEN -1")
  more = ["place", f"{is_date} AS is_date"]
  if seed is not None:
    raws = (f"CAST({read[name].raw} AS VARCHAR)" for name in sorted(read))
    more.append(f"{hashed(seed, [columns[on]] if on else [*raws])} AS hash")
  return _Query([*read.values()], typed("raw", values, cases, more), checks)


def hashed(seed: int, texts: Sequence[str]) -> str:
  """Returns the SQL of the hash of rows, given that of their values; see `read`."""
  digest = f"md5(concat_ws(chr(31), {', '.join([literal(str(seed)), *texts])}))"
  return f"CAST('0x' || substr({digest}, 1, 8) AS UINTEGER)"


def _refuse(rows: Rows, file: File, query: _Query, bad: Sequence[Mapping[str, Any]]) -> None:
  """Raises for the first row of a batch that is bad, or counts all of them."""
  found: list[Any] = [(f"line {line}", "", *about, 1) for line, *about in file.unreadable]
  file.unreadable.clear()
  for each in sorted(bad, key=lambda each: each["place_first"]):
    where = f"row {each['place_first'] - rows.starts[-1] + 1}"
    found.append((where, *query.checks[each["bad"]], each["value_first"], each["place_count"]))
  for where, column, problem, value, count in found:
    shown, at = _shown(value) if value else "", f"{file.path}, {where}"
    said = " ".join(filter(None, [f"column {column!r}" * bool(column), problem]))
    if rows.on_bad_row == "raise" and problem != _DROPPED:
      place = at + f", column {column!r}" * bool(column)
      raise DamagedFileError(
        f"{place}{f': {shown}' * bool(shown)} {problem}. Repair the row, or write "
        "config.on_bad_row='skip' to leave such rows out."
      )
    before, first = rows.left_out.get(said, (0, f"{at} {shown}".rstrip()))
    rows.left_out[said] = before + count, first


def _shown(value: str) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"
