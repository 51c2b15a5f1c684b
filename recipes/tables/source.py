"""Rows of files as typed columns of DuckDB: read once, checked, and split by a view.

    con = connect(folder)
    rows = read(con, source, on_bad_row="raise")       # one pass over the files
    rows.split("hash", settings)                       # adds the column `split`
    con.execute(f"SELECT avg({rows.columns['price']}) FROM {rows.view} WHERE split = 0")

Text, Parquet and JSON Lines differ in where a raw value comes from, and in nothing else: a raw
value becomes a text, a number, a time or a list by the same expressions, for training and serving.
A value that has no such meaning makes its row bad.
"""

import codecs
import dataclasses
import functools
import glob
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from .. import cache, files
from ..errors import DamagedFileError, UserError
from . import spec
from .formats import (
  Format,
  fields_of,
  file_format,
  find_delimiter,
  named,
)
from .values import (
  MISSING,
  SPLIT_NAMES,
  SPLITS,
  Column,
  Value,
  among,
  identifier,
  is_time,
  literal,
  outcome,
  present,
  trimmed,
  typed,
  value_of,
)

_MEMORY = "400MB"  # of DuckDB, which spills beyond it to its folder
_HEAD = 200  # lines that show how a file is written
_LONGEST_LINE = 2 << 20  # bytes
_CUT = "chr(31)"  # between fields of files that are read line by line: in no text
_AGAIN = "Copy or download it again."
_MAGIC = {
  b"PAR1": "is a Parquet file: name it so",
  b"\x1f\x8b": "is compressed with gzip: add .gz to its name",
  b"\x28\xb5\x2f\xfd": "is compressed with zstd: add .zst to its name",
  b"PK\x03\x04": "is a zip archive or a spreadsheet: unpack it, or save the sheet as CSV",
}


def connect(folder: Path | None = None) -> duckdb.DuckDBPyConnection:
  """Returns a connection that spills to a folder, by default to a temporary one."""
  if folder is None:
    folder = Path(tempfile.mkdtemp(prefix="sparse_embed_"))
  files.new_folder(folder)
  settings = {"memory_limit": _MEMORY, "temp_directory": str(folder)}
  con = duckdb.connect(config={**settings, "threads": min(os.cpu_count() or 1, 8)})
  weakref.finalize(con, shutil.rmtree, folder, ignore_errors=True)
  # The bar would write to stdout. `SET enable_progress_bar` needs ipywidgets in a notebook.
  con.execute("PRAGMA disable_progress_bar; SET TimeZone = 'UTC'")
  return con


# --- files ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class File:
  """A file as a relation.

  Attributes:
    path: of the file, or a URL.
    relation: what a query names after FROM.
    columns: an expression and its type by the name of the column; JSON Lines has any path.
    bad: a condition of rows that are no rows, and what they are called.
  """

  path: str
  relation: str
  columns: Mapping[str, tuple[str, str]]
  bad: tuple[str, str] = ("false", "")

  def column(self, name: str) -> Column:
    """Returns a column; raises DamagedFileError where there is none."""
    if name in self.columns:
      return Column(name, *self.columns[name])
    top, *below = name.split(".")
    if below and self.columns.get(top, ("", ""))[1] == "JSON":
      return Column(name, _field(top, *below), "VARCHAR")
    raise DamagedFileError(
      f"{self.path} has no column {name!r}; {spec.nearest(name, [*self.columns][:30])}. If the "
      "first line is a row, name the columns: config.format.names=('…', '…')"
    )


def open_file(con: duckdb.DuckDBPyConnection, path: str, format: Format) -> File:
  """Returns a file by its suffix: Parquet, JSON Lines, or else text.

  Raises:
    DamagedFileError: the file is empty, damaged, or its header cannot be read.
    UserError: the format does not fit the file.
  """
  kind = file_format(path)
  if kind == "parquet":
    return _parquet(con, path)
  check_magic(path)
  lines = head(con, path, format)
  return _json(con, path, format, lines) if kind == "json" else _text(path, format, lines)


def check_magic(path: str) -> None:
  """Raises DamagedFileError where a file of text begins as another format does."""
  if os.path.exists(path) and not path.endswith((".gz", ".zst")):
    with open(path, "rb") as file:
      start = file.read(4)
    for magic, problem in _MAGIC.items():
      if start.startswith(magic):
        raise DamagedFileError(f"{path} {problem}.")


def check_whole(path: str) -> None:
  """Raises DamagedFileError where a compressed file breaks off, which DuckDB takes for its end."""
  if path.endswith((".gz", ".zst")) and os.path.exists(path):
    try:
      with pa.input_stream(path) as stream:
        while stream.read(1 << 20):
          pass
    except OSError as error:
      raise DamagedFileError(f"{path} breaks off or is damaged ({error}). {_AGAIN}") from error


def _pattern(path: str) -> str:
  """Returns the SQL of a pattern that fits one path; DuckDB expands none in a URL."""
  return literal(glob.escape(path) if os.path.exists(path) else path)


def _parquet(con: duckdb.DuckDBPyConnection, path: str) -> File:
  relation = f"read_parquet({_pattern(path)}, hive_partitioning=false)"
  described = asked(con, path, f"DESCRIBE SELECT * FROM {relation}").fetchall()
  names = named([name for name, *_ in described])
  chosen = ", ".join(f"{identifier(name)} AS f{n}" for n, (name, *_) in enumerate(described))
  columns = {
    name: (f"f{n}", stored)
    for n, (name, (_, stored, *_)) in enumerate(zip(names, described, strict=True))
  }
  return File(path, f"(SELECT {chosen} FROM {relation})", columns)


def _lines(path: str, format: Format, **options: Any) -> str:
  """Returns a relation with the column `line`."""
  more = "".join(f", {name}={value}" for name, value in options.items())
  return (
    f"read_csv({_pattern(path)}, columns={{'line': 'VARCHAR'}}, delim={_CUT}, "
    f"quote='', escape='', header=false, auto_detect=false, strict_mode=false, "
    f"encoding={literal(format.codec)}, "
    f"max_line_size={_LONGEST_LINE}{more})"
  )


def head(con: duckdb.DuckDBPyConnection, path: str, format: Format) -> list[str]:
  """Returns the first lines of a text; empty ones before its first one are ""."""
  if os.path.exists(path):
    try:
      with pa.input_stream(path) as stream:
        first = stream.read(1 << 16).partition(b"\n")[0]
      codecs.getincrementaldecoder(format.encoding)().decode(first)  # the end may be cut
    except UnicodeDecodeError as error:
      raise DamagedFileError(
        f"{path}: the first line is not {format.encoding}: write config.format.encoding='utf-16' "
        "or 'latin-1'."
      ) from error
    except OSError as error:
      raise DamagedFileError(f"{path} cannot be read ({error}). {_AGAIN}") from error
  limited = f"SELECT line FROM {_lines(path, format, ignore_errors='true')} LIMIT {_HEAD}"
  lines = [line or "" for (line,) in asked(con, path, limited).fetchall()]
  if not any(line.strip() for line in lines):
    raise DamagedFileError(f"{path} is empty, or no {format.encoding} text. {_AGAIN}")
  return lines


def _field(*keys: str) -> str:
  """Returns the SQL of a field in the object of a line, by its keys from the outside in."""
  quoted = (key.replace("\\", "\\\\").replace('"', '\\"') for key in keys)
  path = "$" + "".join(f'."{key}"' for key in quoted)
  return f"CASE WHEN json_valid(line) THEN line ->> {literal(path)} END"


def _json(con: duckdb.DuckDBPyConnection, path: str, format: Format, lines: Sequence[str]) -> File:
  keys = con.execute(
    "SELECT DISTINCT key FROM (SELECT unnest(json_keys(line)) AS key FROM (SELECT unnest(?) AS "
    "line) WHERE json_valid(line) AND json_type(line) = 'OBJECT') ORDER BY key",
    [list(lines)],
  ).fetchall()
  if not keys:
    raise DamagedFileError(f"{path} has no JSON object in its first lines: write one a line")
  no_object = "CASE WHEN json_valid(line) THEN json_type(line) <> 'OBJECT' ELSE true END"
  columns = {key: (_field(key), "JSON") for (key,) in keys}
  relation = f"(SELECT line FROM {_lines(path, format)} WHERE line IS NOT NULL)"
  return File(path, relation, columns, (no_object, "is no JSON object"))


def _text(path: str, format: Format, lines: Sequence[str]) -> File:
  skip = next(place for place, line in enumerate(lines) if line.strip())
  lines = lines[skip:]
  delimiter = format.delimiter or find_delimiter(lines, path, format)
  quote = "" if format.rest or len(delimiter) > 1 else format.quote
  first = next(iter(fields_of(lines, delimiter, quote)), [])
  names = _names(path, format, [name.strip() for name in first])
  if format.rest:
    last = len(names) - 1
    parts = f"string_split(trim(line, ' '), {literal(delimiter)})"
    columns = {name: (f"{parts}[{place + 1}]", "VARCHAR") for place, name in enumerate(names[:-1])}
    rest = f"array_to_string({parts}[{last + 1}:], {literal(delimiter)})"
    columns[names[-1]] = (rest, "VARCHAR")
    few = (f"len({parts}) < {last}", "has too few fields")
    return File(path, f"(FROM {_lines(path, format)} WHERE line IS NOT NULL)", columns, few)
  declared = ", ".join(f"'f{place}': 'VARCHAR'" for place in range(len(names)))
  relation = (
    f"read_csv({_pattern(path)}, columns={{{declared}}}, skip={skip}, "
    f"header={'false' if format.names else 'true'}, delim={literal(delimiter)}, "
    f"quote={literal(quote)}, escape={literal(quote)}, auto_detect=false, strict_mode=true, "
    f"encoding={literal(format.codec)}, store_rejects=true, max_line_size={_LONGEST_LINE})"
  )
  if len(names) == 1:  # an empty line is a row of one column to DuckDB
    relation = f"(FROM {relation} WHERE f0 IS NOT NULL)"
  columns = {name: (f"f{place}", "VARCHAR") for place, name in enumerate(names)}
  return File(path, relation, columns)


def _names(path: str, format: Format, first: list[str]) -> tuple[str, ...]:
  """Returns the names of the columns of a text file, given its first line."""
  if names := format.names:
    if [name.lower() for name in first] == [name.lower() for name in names]:
      raise UserError(f"{path}: the first line is a header: leave out config.format.names")
    return names
  names = named(first)
  if any("\0" in name for name in names):
    raise DamagedFileError(
      f"{path} has NUL bytes: in UTF-16, write config.format.encoding='utf-16'"
    )
  if not any(first) or (duplicate := spec.repeated(names)) is not None:
    problem = f"two columns {duplicate!r}" if any(first) else "no column"
    raise DamagedFileError(
      f"{path}: the header names {problem}. Mend it, or if that line is a row, name the columns: "
      "config.format.names=('…', '…')"
    )
  return names


def asked(con: duckdb.DuckDBPyConnection, path: str, query: str) -> duckdb.DuckDBPyConnection:
  """Answers a query; raises DamagedFileError for a file that cannot be read."""
  try:
    try:
      return con.execute(query)
    except duckdb.InvalidInputException as error:
      if "invalid state" not in str(error) or "strict_mode=true" not in query:
        raise
      return con.execute(query.replace("strict_mode=true", "strict_mode=false"))  # mixed line ends
  except duckdb.OutOfMemoryException:
    raise
  except duckdb.Error as error:
    reason = str(error).partition("\n")[0]
    raise DamagedFileError(f"{path} cannot be read ({reason}). {_AGAIN}") from error


def readable(con: duckdb.DuckDBPyConnection, file: File) -> File:
  """Reads a file to its end, and returns it as it can be read."""
  columns = ", ".join(f"count({sql})" for sql, _ in file.columns.values())
  query = (
    f"SELECT {columns} FROM {file.relation}"  # of a column that is not read, no text is checked
  )
  check_whole(file.path)
  try:
    con.execute(query).fetchall()
  except duckdb.InvalidInputException:
    asked(con, file.path, query).fetchall()
    lenient = file.relation.replace("strict_mode=true", "strict_mode=false")
    return dataclasses.replace(file, relation=lenient)
  return file


# --- rows -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
  """Files with rows, and the declared columns of them."""

  files: Mapping[str, tuple[str, ...]]  # by split; one entry "" where all splits are together
  format: Format  # of text files
  kinds: Mapping[str, spec.Kind]  # by declared name
  stamps: Mapping[str, list[Any]]  # when the settings were made; see `files.stamp`
  key: str = ""  # the column with the ids, of the features of users or items

  @property
  def all_files(self) -> list[str]:
    """The files of all splits."""
    return [path for paths in self.files.values() for path in paths]

  @functools.cached_property
  def read_kinds(self) -> dict[str, spec.Kind]:
    """The kinds that columns of the files have, the key's by the name ""."""
    kinds = {name: kind for name, kind in self.kinds.items() if not spec.is_history(kind)}
    return kinds | ({"": spec.User(column=self.key)} if self.key else {})


def clock_of(con: duckdb.DuckDBPyConnection, file: File, source: Source) -> str:
  """Returns "date", "whole" or "fraction", as the first times of a file are; "" without a time."""
  name, missing = spec.only(source.kinds, spec.Time), source.format.missing
  if name is None:
    return ""
  kind: Any = source.kinds[name]
  _, raw, stored = file.column(kind.sources(name)[0])
  if kind.format or kind.columns or is_time(stored):
    return "date"
  sample = f"(SELECT {trimmed(raw, stored)} AS t FROM {file.relation} LIMIT 1000)"
  query = (
    "SELECT first(TRY_CAST(t AS DOUBLE) IS NOT NULL), bool_or(contains(t, '.')) FROM "
    f"(SELECT {present('t', missing)} AS t FROM {sample}) WHERE t IS NOT NULL"
  )
  is_number, has_fractions = asked(con, file.path, query).fetchone() or (True, False)
  if is_number is False:
    return "date"
  return "fraction" if has_fractions else "whole"  # nanoseconds are beyond a double's integers


class Relation(NamedTuple):
  """Rows that can be asked, with the columns `place` and `split`.

  Attributes:
    con: the connection.
    view: its name.
    columns: names in the view by declared name.
  """

  con: duckdb.DuckDBPyConnection
  view: str
  columns: Mapping[str, str]

  def query(self, sql: str) -> pa.Table:
    """Answers a query."""
    return self.con.execute(sql).to_arrow_table()


class Batch(NamedTuple):
  """N rows: values by declared name, places in all files, and splits, int8."""

  values: dict[str, pa.Array]
  place: np.ndarray
  split: np.ndarray


class Rows:
  """Rows of a source in a table of DuckDB, and a view of the good ones: a `Relation`.

  Attributes:
    con: the connection.
    view: its name; the columns are `columns`, `place`, that of a row in all files, and `split`, the
      index in `SPLITS`.
    columns: names in the view by declared name.
    left_out: how many rows were left out by what is wrong with them, and where the first is.
  """

  def __init__(self, con: duckdb.DuckDBPyConnection, source: Source, name: str):
    self.con, self.source = con, source
    self.table, self.view = f"{name}_stored", name
    self.columns = {each: f"c{place}" for place, each in enumerate(source.read_kinds)}
    self.left_out: dict[str, tuple[int, str]] = {}
    self.starts: list[int] = []  # the first row of each file
    self.place = "rowid"  # in `table`: where a row is in all files

  @property
  def notes(self) -> list[str]:
    """Lines about rows that were left out."""
    return [
      f"{count:,} row{'s' * (count > 1)}: {problem} (first: {first})"
      for problem, (count, first) in self.left_out.items()
    ]

  def leave_out(self, problem: str, count: int, first: str) -> None:
    """Counts rows that are left out."""
    before, earlier = self.left_out.get(problem, (0, first))
    self.left_out[problem] = before + count, earlier

  def __len__(self) -> int:
    return self.query(f"SELECT count(*) AS n FROM {self.view}")["n"][0].as_py()

  def define(self, split: str = "0") -> None:
    """Makes the view; `split` is the SQL of the index in `SPLITS`."""
    self.con.execute(
      f"CREATE OR REPLACE VIEW {self.view} AS SELECT {self.values}, rowid AS place, "
      f"CAST({split} AS TINYINT) AS split FROM {self.table} WHERE bad IS NULL"
    )

  @property
  def values(self) -> str:
    """The SQL of the columns of the view, given those of `table`."""
    kinds = zip(self.columns.values(), self.source.read_kinds.values(), strict=True)
    of_label = lambda column, kind: f"{outcome(kind, column)} AS {column}"
    return ", ".join(of_label(c, k) if isinstance(k, spec.Label) else c for c, k in kinds)

  def query(self, sql: str) -> pa.Table:
    """Answers a query."""
    return self.con.execute(sql).to_arrow_table()

  def batches(self, columns: Sequence[str] = ()) -> Iterator[Batch]:
    """Yields the rows in their order, with all columns or those of these declared names."""
    names = list(columns or self.columns)
    chosen = ", ".join([self.columns[name] for name in names] + ["place", "split"])
    # A cursor of its own: queries between two batches would end the answer.
    with self.con.cursor() as cursor:
      for batch in cursor.execute(f"SELECT {chosen} FROM {self.view}").to_arrow_reader(1 << 16):
        *values, place, split = batch.columns
        yield Batch(dict(zip(names, values, strict=True)), place.to_numpy(), split.to_numpy())

  def numbers_of(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file of rows by their places, `[N]`, and their numbers in it, the first being 1.

    Lines with another number of fields and empty ones do not count.
    """
    file = np.searchsorted(self.starts, place, side="right") - 1
    return file, place - np.array(self.starts)[file] + 1

  def split(self, by: str, settings: Mapping[str, Any], *, holds_out: bool = True) -> None:
    """Splits the rows: by "hash", "time", "order", "column" or "files"; by "" none is held out.

    Args:
      settings: `config.split`.
      holds_out: whether a part of the training files validates where no file does.
    """
    valid, test, kinds = settings["valid"], settings["test"], self.source.read_kinds
    by_hash = lambda shares: " + ".join(
      f"CAST(hash < {round(share * 2**32)} AS INTEGER)" for share in (sum(shares), shares[1])
    )
    split = "0"
    if by == "hash":
      split = by_hash((valid, test))
    elif by == "time":
      column = self.columns[str(spec.only(kinds, spec.Time))]
      first = [self._first_time(column, share) for share in (valid + test, test)]
      split = _at_or_after(column, first)
    elif by == "order":
      rows = self.query(f"SELECT count(*) AS n FROM {self.table}")["n"][0].as_py()
      ranges = cache.cut(rows, valid, test)
      split = _at_or_after(self.place, (ranges["valid"][0], ranges["test"][0]))
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
      cases = " ".join(f"WHEN {self.place} < {end} THEN {i}" for end, i in before)
      split = f"CASE WHEN false THEN 0 {cases} ELSE {index[-1]} END"
    self.define(split)

  def _first_time(self, column: str, share: float) -> float:
    """Returns the first time of the last share of the rows."""
    if not share:
      return float("inf")
    time = f"quantile_cont(CAST({column} AS DOUBLE), {1 - share!r})"
    answer = self.query(f"SELECT {time} AS t FROM {self.table} WHERE bad IS NULL")["t"][0].as_py()
    return float("inf") if answer is None else answer


def _at_or_after(column: str, bounds: Sequence[float]) -> str:
  return " + ".join(f"CAST({column} >= {literal(bound)} AS INTEGER)" for bound in bounds)


def read(
  con: duckdb.DuckDBPyConnection,
  source: Source,
  on_bad_row: str = "raise",
  *,
  name: str = "rows",
  required: Sequence[str] = (),
  seed: int | None = None,
  on: str = "",
  clock: str | None = None,
  may_be_empty: bool = False,
) -> Rows:
  """Reads the declared columns of files, once.

  Args:
    on_bad_row: "raise", or "skip" to leave out and count rows that cannot be read.
    name: of the view.
    required: declared names in which every row must have a value.
    seed, on: of the hash of each row that a split goes by: over the seed and the declared columns
      of the files in the order of their names, joined by a unit separator; or over a declared name
      alone. It is the start of their MD5, the same in every version and process. None makes none.
    clock: as of `clock_of`; None looks at the first file.
    may_be_empty: whether the files may have no rows, as a part of a table.

  Raises:
    DamagedFileError: a file lacks a column, or is damaged, or a row cannot be read; names file,
      row, column and value.
  """
  kinds = source.read_kinds
  opened = [open_file(con, path, source.format) for path in source.all_files]
  clock = clock_of(con, opened[0], source) if clock is None else clock
  rows = Rows(con, source, name)
  labels = [declared for declared, kind in kinds.items() if isinstance(kind, spec.Label)]
  required = [*required, *labels] if len(labels) == 1 else [*required]
  con.execute(f"DROP VIEW IF EXISTS {name}; DROP TABLE IF EXISTS {rows.table}")
  with files.progress("reading", len(opened), "file") as bar:
    for number, file in enumerate(opened):
      check_whole(file.path)
      query, checks = _query(file, source, rows.columns, clock, required, seed, on)
      for table in ("reject_errors", "reject_scans"):
        con.execute(f"DROP TABLE IF EXISTS {table}")
      into = f"INSERT INTO {rows.table}" if number else f"CREATE TABLE {rows.table} AS"
      rows.starts.append(count(con, rows.table) if number else 0)
      asked(con, file.path, f"{into} {query}")
      for problem, (number_of, first) in rejected(con, file, source.format, on_bad_row).items():
        rows.leave_out(problem, number_of, first)
      _refuse(rows, file, checks, on_bad_row)
      bar.update()
  rows.define()
  if not may_be_empty and not count(con, name):
    why = "; ".join(rows.notes)
    raise DamagedFileError(
      f"{source.all_files[0]}: every row was left out: {why}"
      if why
      else f"{source.all_files[0]} has a header and no rows"
    )
  return rows


def count(con: duckdb.DuckDBPyConnection, relation: str) -> int:
  return con.execute(f"SELECT count(*) FROM {relation}").fetchone()[0]  # type: ignore[index]


_DROPPED = -1  # of `bad`: a row that `drop` of a label leaves out


def _query(
  file: File,
  source: Source,
  columns: Mapping[str, str],
  clock: str,
  required: Sequence[str],
  seed: int | None,
  on: str,
) -> tuple[str, dict[int, tuple[str, str]]]:
  """Returns the query of a file's typed rows; column and problem by what is in `bad`."""
  checks = {0: ("", file.bad[1]), _DROPPED: ("", "left out by the label's drop")}
  values, raws, cases = dict[str, Value](), dict[str, str](), [f"WHEN {file.bad[0]} THEN 0"]
  for number, (declared, kind) in enumerate(source.read_kinds.items(), start=1):
    read = [file.column(name) for name in kind.sources(declared or source.key)]
    raws |= {column.name: column.raw for column in read}
    try:
      value = value_of(kind, read, source.format.missing, clock, place=number)
    except DamagedFileError as error:
      raise DamagedFileError(f"{file.path}: {error}") from error
    name = columns[declared]
    values[name], checks[number] = value, (read[0].name, value.problem)
    if declared in required or not declared:
      code = number + MISSING
      cases.append(f"WHEN ({value.bad}) IS NOT TRUE AND {name} IS NULL THEN {code}")
      fits = " that its pattern fits" * bool(getattr(kind, "pattern", ""))
      checks[code] = read[0].name, f"has no value{fits}"
    if isinstance(kind, spec.Label) and kind.drop:
      cases.insert(1, f"WHEN {among(name, kind.drop)} THEN {_DROPPED}")
  if seed is None:
    return typed(file.relation, values, cases), checks
  texts = [columns[on]] if on else [f"CAST({raws[each]} AS VARCHAR)" for each in sorted(raws)]
  return typed(file.relation, values, cases, [f"{hashed(seed, texts)} AS hash"]), checks


def hashed(seed: int, texts: Sequence[str]) -> str:
  """Returns the SQL of the hash of rows, given that of their values; see `read`."""
  digest = f"md5(concat_ws(chr(31), {', '.join([literal(str(seed)), *texts])}))"
  return f"CAST('0x' || substr({digest}, 1, 8) AS UINTEGER)"


def _refuse(rows: Rows, file: File, checks: Mapping[int, tuple[str, str]], on_bad_row: str) -> None:
  """Raises for the first bad row of the last file, or counts all of them."""
  start = rows.starts[-1]
  found = rows.con.execute(
    f"SELECT bad, count(*), min(rowid), arg_min(value, rowid) FROM {rows.table} "
    f"WHERE rowid >= {start} AND bad IS NOT NULL GROUP BY bad ORDER BY min(rowid)"
  ).fetchall()
  for number, count, row, value in found:
    column, problem = checks[number]
    text = f"{_shown(value)} " if value else ""
    place = int(rows.numbers_of(np.array([row]))[1][0])
    at = f"{file.path}, row {place}"
    if number >= 0 and on_bad_row == "raise":
      of_column = f", column {column!r}" + ":" * bool(text) if column else ""
      raise DamagedFileError(
        f"{at}{of_column} {text}{problem}. Repair the row, or write config.on_bad_row='skip' to "
        "leave such rows out."
      )
    said = f"column {column!r} {problem}" if column else problem
    rows.leave_out(said, count, f"{at} {text}".rstrip())


def _shown(value: str) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


def rejected(
  con: duckdb.DuckDBPyConnection, file: File, format: Format, on_bad_row: str
) -> dict[str, tuple[int, str]]:
  """Raises for the first line that DuckDB has left out; or returns `left_out` of all of them."""
  left_out: dict[str, tuple[int, str]] = {}
  tables = "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors'"
  if not con.execute(tables).fetchone()[0]:  # type: ignore[index]
    return left_out
  found = con.execute(
    "SELECT line, any_value(error_type), any_value(left(csv_line, 200)) FROM reject_errors "
    "GROUP BY line ORDER BY line"
  ).fetchall()
  for line, error, content in found:
    problem = {
      "MISSING COLUMNS": f"has too few fields for {len(file.columns)} columns",
      "TOO MANY COLUMNS": f"has too many fields for {len(file.columns)} columns",
      "UNQUOTED VALUE": "has a quote that is not closed, or not doubled: mend it, or write "
      "config.format.quote='' if quotes have no meaning",
      "INVALID ENCODING": f"is not {format.encoding}: write config.format.encoding, as 'latin-1'",
      "LINE SIZE OVER MAXIMUM": f"is longer than {_LONGEST_LINE >> 20} MiB",
    }.get(error, error.lower())
    at = f"{file.path}, line {line}"
    if on_bad_row == "raise":
      text = (content or "").strip("\r\n")
      raise DamagedFileError(
        f"{at} {problem}: {_shown(text)}. Repair it, or write config.on_bad_row='skip' to leave "
        "such lines out."
      )
    before, first = left_out.get(problem, (0, at))
    left_out[problem] = before + 1, first
  return left_out
