"""Tables that outgrow a machine, as clicks: Spark reads, counts and encodes them file by file.

Each file is a task. A task runs the code of one machine on its file, so that values are cut,
checked and encoded by the same classes: it needs neither Spark's readers nor SQL in its dialect.
Spark schedules the tasks and counts the values of all of them. Vocabularies, means, splits and the
order of the rows are those of `clicks.OneMachine`, to the last bit:

- a task returns the sums of each chunk of numbers, which are added in the order of the files;
- values are ordered by count, then by their UTF-8, as DuckDB does;
- a split of a row depends on its content, or on facts of all files that are found first.

The columns are written as shards, one a file, in the format of prepared columns. A training process
opens those with its own rows and no others; see `shards.Shards` and `pipeline.own_rows`.

What this module calls of the code for one machine:

  rows       RowReader, Account and Bounds; thresholds, times_of, ordered
  clicks     count, write, Copy and Encoder; Counted
  fitting    Fit.join, Fit.supply and Fit.counts; SAMPLE
  values     spelled
"""

import contextlib
import dataclasses
import functools
import os
import pickle
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import arrays, files
from ..errors import UserError
from . import clicks, rows, shards, spec
from .entities import Codes
from .fitting import SAMPLE, Fit
from .settings import Table
from .source import Stage, num_rows
from .values import spelled

_INSTALL = (
  "config.engine='spark' needs PySpark 4 and Java 17 or later: pip install 'sparse-embed[spark]', "
  "and set JAVA_HOME or PATH"
)
_COUNTED = "value string, count long"
_PER_COLUMN = pa.schema({"column": pa.string(), "value": pa.string(), "count": pa.int64()})


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Prepares a table as `clicks.build`, on the active Spark session or a new one.

  Raises:
    UserError: PySpark or Java is missing; or as `clicks.build`.
  """
  with _session() as session:
    return clicks.build(settings, folder, functools.partial(Cluster, session))


@contextlib.contextmanager
def _session() -> Iterator[Any]:
  """Yields the active session, or one that ends with the block."""
  os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of the tasks; else any on the PATH
  try:
    import pandas  # noqa: F401  # asked for by Spark where it passes Arrow
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    session = active or SparkSession.builder.appName("sparse-embed").getOrCreate()
  except ImportError as error:
    raise UserError(f"{_INSTALL} ({error})") from error
  except PySparkRuntimeError as error:  # Java does not start
    raise UserError(f"{_INSTALL} ({error})") from error
  try:
    yield session
  finally:
    if active is None:
      session.stop()


@dataclasses.dataclass(frozen=True)
class _File:
  """A file of a table, for a task.

  Attributes:
    whole: the table, with all files.
    number: among the files.
    by: how rows are split.
    stage: the folder for what is removed at the end, which all tasks and the driver share.
  """

  whole: Table
  number: int
  by: str
  stage: Path

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


class Cluster:
  """Reads the rows of a table in tasks of Spark, and writes their columns as shards.

  Args:
    session: of Spark.
    table, by, folder, stage: as of `clicks.OneMachine`. All executors read the files of the table
      and the folder, and write to it, at the paths of the driver.
  """

  def __init__(self, session: Any, table: Table, by: str, folder: Path, stage: Stage):
    self._session, self._table, self._by, self._folder = session, table, by, folder
    self._stage = stage
    self._sampled = [
      name
      for name, kind in table.kinds.items()
      if isinstance(kind, spec.Number) and isinstance(kind.buckets, int) and kind.buckets
    ]
    self._paths = table.rows.all_files
    self._files = [
      _File(table, number, by, stage.folder.absolute()) for number in range(len(self._paths))
    ]
    self._sizes: list[np.ndarray] = []  # rows by split, of the files
    self._digests: dict[Path, str] = {}
    # The settings of all files; checked before a task runs.
    self._reader = rows.RowReader(table, by, stage=stage, bounds=rows.Bounds())

  def read(self, fit: Fit) -> tuple[clicks.Counted, list[str]]:
    """Reads all files, and fits the training rows; see `OneMachine.read`."""
    bounds = self._bounds()
    parts = self._run(functools.partial(_read, bounds=bounds, sampled=self._sampled))
    total = clicks.Counted(np.zeros((3, 2), np.int64), np.zeros((3, 2)), {})
    for path, (part, counted, account, digest) in zip(self._paths, parts, strict=True):
      fit.join(part)
      self._reader.account.join(account)
      total.rows += counted.rows
      total.weights += counted.weights
      self._sizes.append(counted.rows.sum(axis=1))
      self._digests[path] = digest
    total.ids = self._ids()
    kinds = self._table.kinds
    counted_in = [name for name in kinds if isinstance(kinds[name], spec.Category)]
    fit.supply(
      {name: _Counts(frame) for name, frame in self._by_column("counts", counted_in).items()},
      {name: self._sample("rows", str(place)) for place, name in enumerate(self._sampled)},
    )
    split = arrays.subfolder(self._folder, "split.parquet")
    for file in self._files:
      (file.folder("rows") / "split.parquet").rename(split / f"{file.number:05d}.parquet")
    return total, self._reader.notes

  def write(self, encoder: clicks.Encoder, serve: Path, sizes: np.ndarray) -> dict[str, Any]:
    """Writes a shard for each file with rows; see `OneMachine.write`."""
    del encoder, sizes  # tasks load the encoder; each file has its sizes
    target = self._folder.absolute()
    arrays.subfolder(target, shards.FOLDER)
    task = functools.partial(_write, serve=serve.absolute(), target=target, sizes=self._sizes)
    written = self._run(task)
    some = next(number for number, columns in enumerate(written) if columns)
    formats = arrays.Columns(shards.folder(target, some))
    return {
      "sha256": {
        name: self._digests.get(path) or files.digest(path)
        for path, name in self._table.names.items()
      },
      "shards": [
        {"number": number, "sizes": sizes.tolist(), "columns": columns}
        for number, (sizes, columns) in enumerate(zip(self._sizes, written, strict=True))
        if columns
      ],
      "formats": {name: [x.dtype.str, x.shape[1:]] for name, x in formats.items()},
    }

  def _run(self, task: Callable[[_File], Any]) -> list[Any]:
    """Runs a task for each file; returns the results in the order of the files.

    Raises:
      UserError: of the first file whose task raised one.
    """
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
      sizes = self._run(_num_rows)
      return rows.ordered(dict(zip(self._paths, sizes, strict=True)))
    return rows.Bounds()

  def _times(self) -> np.ndarray:
    self._run(_read_times)
    return self._sample("times", "times")

  def _sample(self, task: str, name: str) -> np.ndarray:
    """Returns an even sample of numbers that tasks have written: the one that `Moments` takes."""
    paths = [file.folder(task) / name for file in self._files]
    parts = [np.memmap(path, np.float64, "r") for path in paths if path.stat().st_size]
    total, before, step, sample = sum(map(len, parts)), 0, 1, []
    while -(-total // step) > SAMPLE:
      step *= 2
    for part in parts:
      sample.append(part[-before % step :: step])
      before += len(part)
    return np.concatenate([np.empty(0), *sample])

  def _ids(self) -> dict[str, Codes]:
    """Returns the ids of training rows by side, in the order of their first rows."""
    ids = {}
    for side, frame in self._by_column("ids", self._table.sides).items():
      first = frame.groupBy("value").agg({"count": "min"}).toDF("value", "place")
      ids[side] = Codes(first.orderBy("place").toArrow()["value"].to_pylist())
    return ids

  def _by_column(self, name: str, columns: Collection[str]) -> dict[str, Any]:
    """Returns what all tasks have written about each column, as Spark's data frames."""
    if not columns:
      return {}
    # Without the backslashes, Spark would expand a pattern in the name of a folder.
    escape = lambda path: "file://" + re.sub(r"([\\*?\[\]{}])", r"\\\1", str(path))
    paths = [escape(file.folder("rows") / f"{name}.parquet") for file in self._files]
    lines = self._session.read.schema(f"column string, {_COUNTED}").parquet(*paths)
    return {
      column: lines.where(lines["column"] == column).select("value", "count") for column in columns
    }


class _Counts:
  """Counts of a column's values, in the place of `fitting.Counts`.

  Args:
    frame: of Spark, `value` and `count`; a value may have several lines.
  """

  def __init__(self, frame: Any):
    self._frame = frame

  def joined(self, parts: Sequence[tuple["_Counts", str]]) -> "_Counts":
    """Returns the counts of several columns, each in its spelling."""
    frames = [
      counts._frame.mapInArrow(functools.partial(_respell, spelling), _COUNTED)
      for counts, spelling in parts
    ]
    return _Counts(functools.reduce(lambda one, other: one.union(other), frames))

  def most_frequent(self, min_count: int = 1) -> pa.Table:
    """Returns `value` and `count` of the values seen that often, sorted by it."""
    counted = self._frame.groupBy("value").agg({"count": "sum"}).toDF("value", "count")
    kept = counted.where(counted["count"] >= min_count)
    table = kept.orderBy(kept["count"].desc(), kept["value"]).toArrow()
    return table.cast(pa.schema({"value": pa.string(), "count": pa.int64()}))


# --- in the tasks ---------------------------------------------------------------------------------


def _call(
  task: Callable[[_File], Any], some: _File, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
  """Runs a task for the files with the numbers in each batch; an error of the user's is a result.

  Args:
    task: to run.
    some: any file of the table.
    batches: with one column, the numbers.
  """
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
    return num_rows(opened, stage)


def _read_times(file: _File) -> None:
  table = file.table
  with (
    Stage() as stage,
    _written(file.folder("times")) as folder,
    (folder / "times").open("wb") as target,
  ):
    for times in rows.times_of(table, table.rows.files, stage, may_be_empty=True):
      target.write(times.tobytes())


def _read(
  file: _File, *, bounds: rows.Bounds, sampled: Sequence[str]
) -> tuple[Fit, clicks.Counted, rows.Account, str]:
  """Copies, counts and splits the rows of a file; returns what `Cluster.read` adds up."""
  table, holds_out = file.table, "valid" not in file.whole.rows.files
  with Stage() as stage, _written(file.folder("rows")) as folder:
    reader = rows.RowReader(table, file.by, holds_out=holds_out, stage=stage, bounds=bounds)
    fit, copy = Fit(table.kinds, stage=stage), clicks.Copy(folder / "rows.arrow", table.kinds)
    counted = clicks.count(table, reader, fit, folder, copy)
    ids = {side: codes.texts for side, codes in counted.ids.items()}
    with pq.ParquetWriter(folder / "counts.parquet", _PER_COLUMN) as writer:
      for name, counts in fit.counts().items():
        values = counts.most_frequent()
        writer.write_table(values.add_column(0, "column", [[name] * len(values)]))
    with pq.ParquetWriter(folder / "ids.parquet", _PER_COLUMN) as writer:
      for side, texts in ids.items():
        places = np.arange(len(texts)) + (file.number << 40)
        writer.write_table(pa.table([[side] * len(texts), texts, places], schema=_PER_COLUMN))
    for place, name in enumerate(sampled):
      with (folder / str(place)).open("wb") as target:
        for split, _, values in copy:
          numbers = values[name][split == 0]
          target.write(numbers[~np.isnan(numbers)].tobytes())
    return (
      fit,
      dataclasses.replace(counted, ids={}),
      reader.account,
      files.digest(table.rows.all_files[0]),
    )


def _write(
  file: _File, *, serve: Path, target: Path, sizes: Sequence[np.ndarray]
) -> dict[str, dict[str, Any]]:
  """Writes the columns of a file's rows; returns the sizes and hashes of what it has written."""
  of_file = sizes[file.number]
  if not of_file.sum():
    return {}
  shard = shards.folder(target, file.number)
  with _written(shard) as folder:
    copy = clicks.Copy(file.folder("rows") / "rows.arrow", file.table.kinds)
    clicks.write(file.table, copy, _encoder(serve), folder, of_file)
  return arrays.stamped(shard)


@functools.lru_cache(1)
def _encoder(serve: Path) -> clicks.Encoder:
  """Returns the encoder that the driver has saved, loaded once in a process of an executor."""
  return clicks.Encoder.load(serve)


def _respell(spelling: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
  for batch in batches:
    values = spelled(batch.column("value").cast(pa.string()), spelling)
    yield pa.RecordBatch.from_arrays([values, batch.column("count")], ["value", "count"])
