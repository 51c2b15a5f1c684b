"""Rows as they have been read, in a Parquet file that the engine queries: files are parsed once."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .source import Stage, ahead, opened, scan
from .spec import Kind, ways

_TEXT = pa.dictionary(pa.int32(), pa.string())
_TYPES: dict[Any, pa.DataType] = {"number": pa.float64(), "text": _TEXT}


class Store:
  """Rows in a Parquet file; missing values are null.

  Args:
    kinds: the columns, as `reading.Reader` reads them; crosses and times are left out.
    more: the types of further columns, NumPy arrays; a declared column may have the same name.
    path: of the file; None makes one in the stage.

  Attributes:
    columns: the names in the file of the columns by declared name.
  """

  EXPLODE, LENGTH = "unnest", "len"  # functions of lists; other SQL over rows is common to Spark
  IS_LOCAL = True  # whether the rows are in the stage's engine

  def __init__(
    self,
    stage: Stage,
    kinds: Mapping[str, Kind],
    more: Mapping[str, Any],
    path: Path | None = None,
  ):
    self.stage, self._path = stage, path or stage.path("rows.parquet")
    stored = {name: how for name, (_, how) in ways(kinds).items() if how != "time"}
    self.columns = {name: f"c{place}" for place, name in enumerate(stored)}  # equal in any case
    types = [
      pa.list_(pa.float32() if how[0] == "vector" else pa.string()) if isinstance(how, tuple)
      else _TYPES[how]
      for how in stored.values()
    ]  # fmt: skip
    fields = zip(self.columns.values(), types, strict=True)
    self._schema, self._more = pa.schema([*fields, *more.items()]), tuple(more)
    self._texts = [field.name for field in self._schema if field.type == _TEXT]

  @contextlib.contextmanager
  def writer(self) -> Iterator[Callable[..., None]]:
    """Yields a function that writes N values by declared name, and further ones as keywords."""
    options: Any = {"compression": "none", "write_statistics": False, "use_dictionary": self._texts}
    with pq.ParquetWriter(self._path, self._schema, **options) as file:

      def write(values: Mapping[str, Any], **more: np.ndarray) -> None:
        arrays = []
        every = [*map(values.__getitem__, self.columns), *map(more.__getitem__, self._more)]
        for array, field in zip(every, self._schema, strict=True):
          is_text = pa.types.is_dictionary(field.type)
          array = array.dictionary_encode() if is_text else array
          arrays.append(
            pa.array(array, field.type, from_pandas=True)
            if isinstance(array, np.ndarray)
            else array
          )
        file.write_table(pa.table(arrays, schema=self._schema))  # dictionaries stay as they are

      yield write

  def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yields the values by declared name, and further ones by theirs, as they were written."""
    is_array = [pa.types.is_primitive(field.type) for field in self._schema]
    with opened(self._path, self._texts) as file:
      for batch in ahead(file.iter_batches(1 << 16, use_threads=False)):
        arrays = [
          array.to_numpy(zero_copy_only=False) if plain else array
          for array, plain in zip(batch.columns, is_array, strict=True)
        ]
        declared, further = arrays[: len(self.columns)], arrays[len(self.columns) :]
        yield (
          dict(zip(self.columns, declared, strict=True)),
          dict(zip(self._more, further, strict=True)),
        )

  def __len__(self) -> int:
    return pq.read_metadata(self._path).num_rows

  @property
  def scan(self) -> str:
    """SQL for the rows, with their places as `file_row_number`."""
    return scan(self._path)

  def query(self, sql: str) -> pa.Table:
    """Answers a query in the engine, whose tables the next queries see."""
    return self.stage.engine.execute(sql).to_arrow_table()

  def table(self, name: str, sql: str) -> str:
    """Keeps the answer to a query as a table of DuckDB; returns SQL for it."""
    self.stage.engine.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {sql}")
    return name
