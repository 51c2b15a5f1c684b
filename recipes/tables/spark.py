"""Tables that outgrow a machine, as clicks: Spark counts, and its tasks read and encode files.

Each file is a task, which types its rows as one machine does and writes them as Parquet. Spark
answers the queries of `clicks.fitted` on these, as `sqlglot` writes them for it. So vocabularies,
splits and the order of the rows are those of one machine. The columns are written as shards, one a
file; a training process opens those with its own rows and no others: see `Shards`.
"""

import contextlib
import dataclasses
import functools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import cache, files
from ..errors import UserError
from . import clicks, source
from .settings import Table, parsed, serve_folder
from .splitting import write_splits
from .transforms import Encoder

_INSTALL = (
  "config.engine='spark' needs PySpark 4 and Java 17 or later: pip install -e '.[spark]', "
  "and set JAVA_HOME or PATH"
)
_SHARDS = "shards"


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Prepares a table as `clicks.build`, on the active Spark session or a new one.

  All executors read the files of the table and the folder, and write to it, at the paths of the
  driver.

  Raises:
    UserError: PySpark or Java is missing; or as `clicks.build`.
  """
  table, folder = parsed(settings), folder.absolute()
  by, stage = clicks.check(table), files.new_folder(folder / "stage")
  with _session() as session, source.connect() as con:
    task = _Task(table, by, folder)
    read = _run(session, task.read, len(table.rows.all_files))
    rows = _Rows(session, con, table, task, read)
    rows.split(by, table.split)
    encoder, notes, sizes = clicks.fitted(table, rows, clicks.base_of(table))
    notes.append(clicks.summary(encoder))
    encoder.save(serve_folder(settings, folder))
    for name in ("split.parquet", _SHARDS):
      files.new_folder(folder / name)
    write = functools.partial(task.write, split=rows.split_sql, starts=rows.starts)
    shards = _run(session, write, len(read))
  table.check_unchanged()
  files.new_folder(stage).rmdir()
  written = [number for number, rows_of in enumerate(shards) if sum(rows_of)]
  formats = cache.Columns(_shard(folder, written[0]))
  return clicks.meta(table, encoder, notes, sizes) | {
    "sha256": table.digests(),
    "shards": [{"number": number, "sizes": shards[number]} for number in written],
    "formats": {name: [x.dtype.str, x.shape[1:]] for name, x in formats.items()},
  }


@contextlib.contextmanager
def _session() -> Iterator[Any]:
  """Yields the active session, or one that ends with the block."""
  os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of the tasks; else any on the PATH
  try:
    import pandas  # noqa: F401  # asked for by Spark where it passes Arrow
    import sqlglot  # noqa: F401
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    session = active or SparkSession.builder.appName("sparse-embed").getOrCreate()
  except (ImportError, RuntimeError) as error:  # Java does not start
    raise UserError(f"{_INSTALL} ({error})") from error
  try:
    yield session
  finally:
    if active is None:
      session.stop()


def _run(session: Any, task: Callable[[int], Any], count: int) -> list[Any]:
  """Runs a task for each file; returns the results in the order of the files."""
  numbers = session.range(0, count, 1, count)
  answers = numbers.mapInArrow(functools.partial(_call, task), "number long, result binary")
  results = answers.toArrow().sort_by("number")["result"].to_pylist()
  found = [pickle.loads(each) for each in results]
  if error := next((each for each in found if isinstance(each, UserError)), None):
    raise error
  return found


def _call(
  task: Callable[[int], Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
  """Runs a task for files by number, one column; an error of the user's is a result."""
  for batch in batches:
    for number in batch.column(0).to_pylist():
      try:
        result = task(number)
      except UserError as error:
        result = error
      yield pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]})


@dataclasses.dataclass(frozen=True)
class _Read:
  """What is known of a file that was read; see `source.Rows`."""

  rows: int
  left_out: dict[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class _Task:
  """What tasks do with a file of a table, given by its number."""

  table: Table
  by: str
  folder: Path

  def path(self, number: int) -> Path:
    """The folder of the typed rows of a file."""
    return self.folder / "stage" / f"{number:05d}"

  def source(self, number: int) -> source.Source:
    """Returns the source of one file."""
    by_split = [(split, path) for split, paths in self.table.rows.files.items() for path in paths]
    split, path = by_split[number]
    return dataclasses.replace(self.table.rows, files={split: (path,)})

  def read(self, number: int) -> _Read:
    """Types the rows of a file."""
    how = clicks.hashing(self.table, self.by)
    with files.replacing_folder(self.path(number)) as folder, source.connect() as con:
      part, on_bad_row = self.source(number), self.table.on_bad_row
      rows = source.read(con, part, folder, on_bad_row, may_be_empty=True, **how)
      return _Read(rows.total, rows.left_out)

  def write(self, number: int, *, split: str, starts: Sequence[int]) -> list[int]:
    """Writes the columns of a file's rows as a shard; returns how many rows each split has."""
    with source.connect() as con:
      rows = source.Rows(con, self.source(number), self.path(number))
      rows.stored = f"(SELECT * REPLACE (place + {starts[number]} AS place) FROM {rows.stored})"
      rows.define(split)
      counts = rows.query("SELECT split FROM rows")["split"].to_numpy()
      sizes = np.bincount(counts, minlength=3)
      shard = _shard(self.folder, number)
      if sizes.sum():
        with files.replacing_folder(shard) as folder:
          encoder = _encoder(self.folder / "serve")
          clicks.write_columns(rows, self.table, encoder, folder, sizes)
        rows.starts = [starts[number]]
        with files.replacing_folder(self.folder / "split.parquet" / f"{number:05d}") as folder:
          write_splits(rows, folder, self.table.names)
      return sizes.tolist()


class _Rows(source.Rows):
  """Rows that tasks have typed, of which Spark answers queries."""

  def __init__(self, session: Any, con: Any, table: Table, task: _Task, read: Sequence[_Read]):
    super().__init__(con, table.rows, task.folder)
    self._session, self.stored = session, "stored"
    *self.starts, self.total = np.cumsum([0, *(each.rows for each in read)]).tolist()
    for problem, (rows, first) in (item for each in read for item in each.left_out.items()):
      self.leave_out(problem, rows, first)
    paths = [str(task.path(number)) for number in range(len(read))]
    # Spark would expand patterns in the names of folders.
    escaped = (re.sub(r"([\\*?\[\]{}])", r"\\\1", path) for path in paths)
    stored = session.read.parquet(*(f"file://{path}" for path in escaped))
    starts = dict(zip((Path(path).name for path in paths), self.starts, strict=True))
    first = session.createDataFrame(list(starts.items()), "folder string, first long")
    folder = "element_at(split(_metadata.file_path, '/'), -2) AS folder"
    joined = stored.selectExpr("*", folder).join(first, "folder")
    placed = joined.withColumn("place", joined["place"] + joined["first"])
    placed.createOrReplaceTempView(self.stored)

  def define(self, split: str = "0") -> None:
    """Makes the view in the session."""
    self.split_sql = split
    query = self._translated(self.selected(split))
    self._session.sql(query).createOrReplaceTempView(self.view)

  def query(self, sql: str) -> pa.Table:
    answer = self._session.sql(self._translated(sql)).toArrow()
    plain = lambda stored: pa.string() if pa.types.is_large_string(stored) else stored
    return answer.cast(pa.schema([(f.name, plain(f.type)) for f in answer.schema]))

  @staticmethod
  def _translated(sql: str) -> str:
    import sqlglot

    translated = sqlglot.transpile(sql, read="duckdb", write="spark")[0]
    return translated.replace("PERCENTILE_CONT(", "PERCENTILE(")  # an aggregate over groups there


@functools.lru_cache(1)
def _encoder(serve: Path) -> Encoder:
  """Returns the encoder that the driver has saved, loaded once in a process of an executor."""
  return Encoder.load(serve)


def _shard(folder: Path, number: int) -> Path:
  return folder / _SHARDS / f"{number:05d}"


# --- in training ----------------------------------------------------------------------------------


class Shards(cache.Columns):
  """Columns in shards, memory-mapped on first use: the rows of train, then valid, then test.

  Each shard holds rows of all splits in this order. A column is read by a slice or an array of row
  numbers, which opens the shards that hold these rows and no others.
  """

  def __init__(self, folder: str | Path):
    super().__init__(folder)
    meta = files.read_json(self.folder / "meta.json")
    self._shards, self._formats = meta["shards"], meta["formats"]
    self._names = tuple(self._formats)
    self._opened: dict[int, cache.Columns] = {}
    sizes = np.array([shard["sizes"] for shard in self._shards])
    self.ends = np.cumsum(sizes.T)  # of each shard's rows of train, of valid, of test
    # What is added to a row's number for its place in the shard.
    self.shifts = (np.cumsum(sizes, axis=1) - sizes).T.ravel() - (self.ends - sizes.T.ravel())

  def __getitem__(self, name: str) -> Any:
    if name not in self._names:
      raise KeyError(f"{self.folder} has no column {name!r}; it has {list(self._names)}")
    return _Column(self, name, *self._formats[name])

  def shard(self, part: int) -> cache.Columns:
    """Returns the columns of the shard with a part of the rows."""
    number = part % len(self._shards)
    if number not in self._opened:
      shard = self._shards[number]
      path = _shard(self.folder, shard["number"])
      self._opened[number] = cache.Columns(path)
    return self._opened[number]


class _Column:
  """A column in shards: an array that is read by slices and by arrays of rows."""

  def __init__(self, shards: Shards, name: str, dtype: str, shape: Sequence[int]):
    self._shards, self._name, self.dtype = shards, name, np.dtype(dtype)
    self.shape = (int(shards.ends[-1]), *shape)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
    wanted = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
    found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
    parts = np.searchsorted(self._shards.ends, wanted, side="right")
    for part in np.unique(parts):
      at = parts == part
      array = self._shards.shard(int(part))[self._name]
      found[at] = array[wanted[at] + self._shards.shifts[part]]
    return found
