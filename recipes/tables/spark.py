"""Tables that outgrow a machine, as clicks: Spark reads, counts and encodes them.

Each file is a task. A task runs the reader and the encoder of one machine on its file, so that
values are cut, checked and encoded by the same classes, and needs none of Spark's own readers of
text. The rows that have been read are Parquet files, of which Spark answers the queries of `fit`:
standard SQL, the same for DuckDB. So the transforms, the splits and the order of the rows are those
of one machine:

- values are ordered by count, then by their UTF-8, and what depends on an order has a number of the
  row in all files;
- the split of a row depends on its content, or on facts of all files that are found first;
- means are stored with fewer digits than the order of a sum changes.

The columns are written as shards, one a file, in the format of prepared columns. A training process
opens those with its own rows and no others; see `Shards` and `pipeline.own_rows`.
"""

import contextlib
import dataclasses
import functools
import glob
import os
import pickle
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import cache, files
from ..errors import UserError
from . import clicks, rows
from .encoding import Encoder
from .settings import Table
from .source import Stage, literal
from .store import Store

_INSTALL = (
  "config.engine='spark' needs PySpark 4 and Java 17 or later: pip install -e '.[spark]', "
  "and set JAVA_HOME or PATH"
)
_TIMES = "times.npy"
_SHARDS = "shards"  # in the folder of the prepared data


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Prepares a table as `clicks.build`, on the active Spark session or a new one.

  Raises:
    UserError: PySpark or Java is missing; or as `clicks.build`.
  """
  view = f"rows_{uuid.uuid4().hex}"
  with _session() as session:
    try:
      return clicks.build(settings, folder, functools.partial(Cluster, session, view))
    finally:
      session.catalog.dropTempView(view)


@contextlib.contextmanager
def _session() -> Iterator[Any]:
  """Yields the active session, or one that ends with the block."""
  os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of the tasks; else any on the PATH
  try:
    import pandas  # noqa: F401  # asked for by Spark where it passes Arrow
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


@dataclasses.dataclass(frozen=True)
class _File:
  """A file of a table, for a task."""

  whole: Table  # with all files
  number: int  # among the files
  by: str  # how rows are split
  stage: Path  # the folder for what is removed at the end, which all tasks and the driver share

  @property
  def table(self) -> Table:
    """The table with this file alone."""
    files = [(split, path) for split, each in self.whole.rows.files.items() for path in each]
    split, path = files[self.number]
    rows = dataclasses.replace(self.whole.rows, files={split: (path,)})
    return dataclasses.replace(self.whole, rows=rows)

  def folder(self, name: str) -> Path:
    """Where the task of a name has written, in the stage."""
    return self.stage / f"{name}_{self.number:05d}"

  @property
  def rows(self) -> Path:
    """The Parquet file with the rows that have been read."""
    return self.folder("rows") / f"rows_{self.number:05d}.parquet"


class Cluster:
  """Reads the rows of a table in tasks of Spark, and writes their columns as shards.

  Args:
    view: a name in the session for the rows that have been read.
    table, by, folder, stage: as of `clicks.OneMachine`. All executors read the files of the table
      and the folder, and write to it, at the paths of the driver.
  """

  def __init__(self, session: Any, view: str, table: Table, by: str, folder: Path, stage: Stage):
    self._view = view
    self._session, self._table, self._by, self._folder = session, table, by, folder.absolute()
    self._stage, self._paths = stage, table.rows.all_files
    self._files = [
      _File(table, number, by, stage.folder.absolute()) for number in range(len(self._paths))
    ]
    self._sizes: list[np.ndarray] = []  # rows by split, of the files
    self._digests: dict[Path, str] = {}
    # Checks the settings, and joins what tasks have left out.
    self._reader = rows.RowReader(table, by, stage=stage, bounds=rows.Bounds())

  def read(self) -> tuple[Store, list[str]]:
    """Copies all rows, and writes their splits; see `clicks.OneMachine`."""
    split = files.new_folder(self._folder / "split.parquet")
    read = self._run(functools.partial(_read, bounds=self._bounds()))
    for file, path, (account, sizes, digest) in zip(self._files, self._paths, read, strict=True):
      self._reader.account.join(account)
      self._sizes.append(sizes)
      self._digests[path] = digest
      (file.folder("rows") / "split.parquet").rename(split / f"{file.number:05d}.parquet")
    parts = {file.rows: sizes for file, sizes in zip(self._files, self._sizes, strict=True)}
    store = _Rows(self._session, self._view, self._table, self._stage, parts)
    return store, self._reader.notes

  def write(self, encoder: Encoder, serve: Path, sizes: np.ndarray) -> dict[str, Any]:
    """Writes a shard for each file with rows; see `clicks.OneMachine`."""
    del encoder, sizes  # tasks load the encoder; each file has its sizes
    files.new_folder(self._folder / _SHARDS)
    self._run(
      functools.partial(_write, serve=serve.absolute(), target=self._folder, sizes=self._sizes)
    )
    written = [number for number, sizes in enumerate(self._sizes) if sizes.sum()]
    formats = cache.Columns(_shard(self._folder, written[0]))
    return {
      "sha256": {
        name: self._digests.get(path) or files.digest(path)
        for path, name in self._table.names.items()
      },
      "shards": [{"number": number, "sizes": self._sizes[number].tolist()} for number in written],
      "formats": {name: [x.dtype.str, x.shape[1:]] for name, x in formats.items()},
    }

  def _run(self, task: Callable[[_File], Any]) -> list[Any]:
    """Runs a task for each file; returns the results in the order of the files."""
    numbers = self._session.range(0, len(self._files), 1, len(self._files))
    call = functools.partial(_call, task, self._files[0])
    answers = numbers.mapInArrow(call, "number long, result binary").toArrow()
    results = [pickle.loads(each) for each in answers.sort_by("number")["result"].to_pylist()]
    if error := next((each for each in results if isinstance(each, UserError)), None):
      raise error
    return results

  def _bounds(self) -> rows.Bounds:
    if self._by == "time":
      return rows.Bounds(rows.thresholds(self._table, self._times))
    if self._by == "order":
      return rows.in_order(dict(zip(self._paths, self._run(_num_rows), strict=True)))
    return rows.Bounds()

  def _times(self) -> np.ndarray:
    self._run(_read_times)
    times = (np.load(file.folder("times") / _TIMES, mmap_mode="r") for file in self._files)
    return rows.sampled(times)


class _Rows(Store):
  """The rows that tasks have read, of which Spark answers queries.

  `parts` has the number of rows by split, of the Parquet files in their order.
  """

  EXPLODE, LENGTH, IS_LOCAL = "explode", "size", False

  def __init__(
    self, session: Any, view: str, table: Table, stage: Stage, parts: dict[Path, np.ndarray]
  ):
    self.stage, self._session, self._view = stage, session, view
    self.columns = clicks.store_of(table, stage).columns
    sizes = [int(each.sum()) for each in parts.values()]
    self._len = sum(sizes)
    firsts = dict(zip((path.name for path in parts), np.cumsum([0, *sizes]).tolist(), strict=False))
    read = session.read.parquet(*map(_uri, parts)).select(
      "*", "_metadata.file_name", "_metadata.row_index"
    )
    first = session.createDataFrame(list(firsts.items()), "file_name string, first long")
    joined = read.join(first.hint("broadcast"), "file_name")
    joined.withColumn("file_row_number", joined["first"] + joined["row_index"]).createTempView(
      self._view
    )

  def __len__(self) -> int:
    return self._len

  @property
  def scan(self) -> str:
    return self._view

  def query(self, sql: str) -> pa.Table:
    answer = self._session.sql(sql).toArrow()
    plain = lambda stored: pa.string() if pa.types.is_large_string(stored) else stored
    return answer.cast(pa.schema([(f.name, plain(f.type)) for f in answer.schema]))

  def table(self, name: str, sql: str) -> str:
    """Has Spark write the answer to a query to the stage; returns SQL for it."""
    path = self.stage.path(name).absolute()
    self._session.sql(sql).write.parquet(f"file://{path}")
    return f"read_parquet({literal(glob.escape(str(path)) + '/*.parquet')})"


def _shard(folder: Path, number: int) -> Path:
  return folder / _SHARDS / f"{number:05d}"


def _uri(path: Path) -> str:
  """Returns a path as Spark reads it, which would expand patterns in the names of folders."""
  return "file://" + re.sub(r"([\\*?\[\]{}])", r"\\\1", str(path))


# --- in the tasks ---------------------------------------------------------------------------------


def _call(
  task: Callable[[_File], Any], some: _File, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
  """Runs a task for files by number, one column; an error of the user's is a result."""
  for batch in batches:
    for number in batch.column(0).to_pylist():
      try:
        result = task(dataclasses.replace(some, number=number))
      except UserError as error:
        result = error
      yield pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]})


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
  """Yields a new folder that becomes `target`; of two attempts at a task, the first one's does."""
  partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
  partial.mkdir()
  try:
    yield partial
    try:
      partial.rename(target)
    except OSError:
      if not target.exists():
        raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _num_rows(file: _File) -> int:
  with Stage() as stage:
    (opened,) = rows.open_source(file.table.rows, file.table.on_bad_row, stage=stage).files
    return rows.num_rows(opened, stage)


def _read_times(file: _File) -> None:
  with Stage() as stage, _written(file.folder("times")) as folder:
    times = rows.times_of(file.table, stage, may_be_empty=True)
    np.save(folder / _TIMES, np.concatenate([np.empty(0), *times]))


def _read(file: _File, *, bounds: rows.Bounds) -> tuple[rows.Account, np.ndarray, str]:
  """Copies the rows of a file; returns what was left out, the rows by split, and the SHA-256."""
  table, holds_out = file.table, "valid" not in file.whole.rows.files
  with Stage() as stage, _written(file.folder("rows")) as folder:
    reader = rows.RowReader(table, file.by, holds_out=holds_out, stage=stage, bounds=bounds)
    store = clicks.store_of(table, stage, folder / file.rows.name)
    clicks.copy_rows(table, reader, store, folder)
    split = store.query(f"SELECT split FROM {store.scan}")["split"].to_numpy()
    sizes = np.bincount(split, minlength=3)
    return reader.account, sizes, files.digest(table.rows.all_files[0])


def _write(file: _File, *, serve: Path, target: Path, sizes: Sequence[np.ndarray]) -> None:
  """Writes the columns of a file's rows."""
  if not sizes[file.number].sum():
    return
  shard = _shard(target, file.number)
  with Stage() as stage, _written(shard) as folder:
    store = clicks.store_of(file.table, stage, file.rows)
    clicks.write_columns(store, file.table, _encoder(serve), folder, sizes[file.number])


@functools.lru_cache(1)
def _encoder(serve: Path) -> Encoder:
  """Returns the encoder that the driver has saved, loaded once in a process of an executor."""
  return Encoder.load(serve)


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
