"""Rows to predict for, as training has read its own: of Python, of tables and of files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedFileError, UserError
from ..tables import source as source_lib
from ..tables import spec
from ..tables.formats import Format, fields_of, find_delimiter, named, repeated
from ..tables.transforms import Transforms, lengths_of
from ..tables.values import Column, Value, identifier, typed, value_of

_CHUNK = 4096


def as_table(rows: Any) -> pa.Table:
  """Returns rows as an Arrow table.

  Args:
    rows: a mapping of columns to lists or arrays, a list of dicts, or a table: of Arrow, pandas, or
      another library with Arrow's interface. None and NaN are missing.

  Raises:
    UserError: rows are of another type, or a column holds values of several types.

  >>> as_table([{"city": "Oslo"}, {"city": "Rome", "price": 3}])["price"].to_pylist()
  [None, 3]
  """
  if isinstance(rows, Sequence) and not isinstance(rows, str):
    if not all(isinstance(row, Mapping) for row in rows):
      raise UserError("rows are a list, and not every one of them is a dict of columns")
    names = dict.fromkeys(name for row in rows for name in row)
    rows = {name: [row.get(name) for row in rows] for name in names}
  try:
    if isinstance(rows, Mapping):
      # A matrix is a vector a row.
      listed = lambda x: list(x) if getattr(x, "ndim", 1) == 2 else x
      arrays = {
        str(name): x
        if isinstance(x, pa.Array | pa.ChunkedArray)
        else pa.array(listed(x), from_pandas=True)
        for name, x in rows.items()
      }
      table = pa.table(arrays)
    else:
      table = pa.table(rows)
  except (TypeError, ValueError, pa.ArrowException) as error:
    raise UserError(
      f"rows are {type(rows).__name__}: give a dict of columns, a list of dicts, or a table "
      f"({error})"
    ) from error
  columns = named(table.column_names)
  if (name := repeated(columns)) is not None:
    raise UserError(f"the rows have two columns {name!r}: rename one")
  # DuckDB knows no half floats of Arrow.
  plain = [
    pa.chunked_array([x.to_pylist()]) if "halffloat" in str(x.type) else x for x in table.columns
  ]
  return pa.table(plain, list(columns))


class Reader:
  """Reads the columns of rows by the declarations of training.

  Args:
    kinds: by name; columns that rows lack are left out where they are not `required`.
    missing: texts that mean no value.
    has_dates: whether times are dates, as in training.
    aligned: names of lists that keep their missing items.
  """

  def __init__(
    self,
    kinds: Mapping[str, spec.Kind],
    missing: Sequence[str],
    *,
    has_dates: bool = False,
    required: bool = True,
    aligned: Sequence[str] = (),
  ):
    self.kinds = kinds
    self._missing, self._clock = missing, "date" if has_dates else "fraction"
    self._required, self._aligned = required, set(aligned)
    self._con = duckdb.connect(config={"threads": 1})
    self._con.execute("SET TimeZone = 'UTC'")

  def connection(self) -> Any:
    """Returns a cursor for further queries."""
    return self._con.cursor()

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns of the files that are read."""
    sources = (column for name, kind in self.kinds.items() for column in kind.sources(name))
    return tuple(dict.fromkeys(sources))

  def read(
    self, table: pa.Table, on_bad_row: str, source: str = "rows", first_row: int = 1
  ) -> tuple[dict[str, Any], np.ndarray]:
    """Returns values by declared name, and which rows are bad, bool `[N]`.

    Args:
      on_bad_row: "raise", or "skip", which marks rows that cannot be read.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: a column is missing, or of a type that cannot be read, or a row cannot be read and
        is not skipped; names row and column.
    """
    if on_bad_row not in ("raise", "skip"):
      raise UserError(f"on_bad_row is {on_bad_row!r}: choose 'raise' or 'skip'")
    places = {name: f"f{place}" for place, name in enumerate(table.column_names)}
    values, columns = dict[str, Value](), dict[str, str]()
    with self._con.cursor() as con:
      con.register("given", table.rename_columns(list(places.values())))
      described = con.execute("DESCRIBE SELECT * FROM given").fetchall()
      stored = {name: "VARCHAR" if kind == '"NULL"' else kind for name, kind, *_ in described}
      for place, (name, kind) in enumerate(self.kinds.items()):
        lacking = [column for column in kind.sources(name) if column not in places]
        if lacking and self._required:
          hint = spec.nearest(lacking[0], table.column_names)
          raise UserError(f"{source} has no column {lacking[0]!r}, which training has read: {hint}")
        if not lacking:
          read = [Column(c, places[c], stored[places[c]]) for c in kind.sources(name)]
          columns[name] = f"c{place}"
          try:
            values[columns[name]] = value_of(
              kind, read, self._missing, self._clock, place=place, aligned=name in self._aligned
            )
          except DamagedFileError as error:
            raise UserError(f"{source}: {error}") from error
      answer = con.execute(typed("given", values)).to_arrow_table()
    bad = answer["bad"].is_valid().to_numpy()
    if bad.any() and on_bad_row == "raise":
      index = int(np.argmax(bad))
      name, value = list(values)[answer["bad"][index].as_py() - 1], answer["value"][index].as_py()
      (column,) = [self.kinds[n].sources(n)[0] for n, c in columns.items() if c == name]
      problem = f"column {column!r}: {value!r} {values[name].problem}"
      raise bad_row(source, first_row + index, problem)
    return {name: answer[column].combine_chunks() for name, column in columns.items()}, bad


def bad_row(source: str, row: int, problem: str) -> UserError:
  """Returns the error of a row that cannot be read."""
  return UserError(
    f"{source}, row {row}, {problem}. Repair the row, or set on_bad_row=skip, which leaves its "
    "score blank"
  )


def absent(values: Any) -> np.ndarray:
  """Returns which of N texts, lists or numbers are missing, bool `[N]`."""
  return _lengths(values) == 0


def _lengths(values: pa.Array) -> np.ndarray:
  """Returns how many values lists hold; of a text or number 1, or 0 if it is null."""
  if pa.types.is_list(values.type):
    return lengths_of(values)
  return values.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)


def unseen(transforms: Transforms, name: str, values: Any, ids: Any) -> np.ndarray:
  """Returns which rows, of N values and their ids, are outside a feature's vocabulary, bool `[N]`.

  Numbers have no vocabulary, and a dynamic one is in the model.
  """
  kind = transforms.kinds.get(name)
  if not isinstance(kind, spec.Category) or kind.is_dynamic:
    return np.zeros(len(values), bool)
  ids = ids[:, None] if ids.ndim == 1 else ids
  inside = np.arange(ids.shape[1]) < _lengths(values)[:, None]
  known = kind.hash or len(transforms.vocabulary(name))
  return np.any(inside & ((ids < 0) | (ids >= known)), axis=1)


def by_column(
  rows: Mapping[str, np.ndarray], kinds: Mapping[str, spec.Kind], bad: np.ndarray
) -> dict[str, int]:
  """Returns how many rows are marked by column; columns without any are left out.

  Args:
    rows: bool `[N]` by declared name.
    kinds: by declared name; several columns of a name count as the first.
    bad: bool `[N]`, rows that do not count.
  """
  columns: dict[str, np.ndarray] = {}
  for name, marked in rows.items():
    column = kinds[name].sources(name)[0]
    columns[column] = columns.get(column, False) | (marked & ~bad)
  return {column: int(marked.sum()) for column, marked in columns.items() if marked.any()}


def of_file(path: str, format: Format, needed: Sequence[str]) -> Iterator[pa.Table]:
  """Yields the rows of a file in their order, a few thousand at once.

  Lists of texts are texts of JSON.

  Args:
    format: of the text files of training; a first line that names one of its columns is a header.
    needed: columns that are read as paths into objects of JSON Lines.

  Raises:
    DamagedFileError: the file is damaged, or a line of it is no row; names it.
  """
  with source_lib.connect() as con:
    file = _opened(con, path, format)
    if file.bad[0] != "false":
      row = con.execute(
        f"SELECT min(row) FROM (SELECT {file.bad[0]} AS bad, row_number() OVER () AS row FROM "
        f"{file.relation}) WHERE bad"
      ).fetchone()
      if row and row[0]:
        raise DamagedFileError(f"{path}, row {row[0]} {file.bad[1]}. Repair it")
    file = source_lib.readable(con, file)
    source_lib.rejected(con, file, format, "raise")
    chosen = dict.fromkeys(
      [*file.columns, *(c for c in needed if "." in c and c not in file.columns)]
    )
    columns = ", ".join(f"{file.column(name).raw} AS {identifier(name)}" for name in chosen)
    for batch in con.execute(f"SELECT {columns} FROM {file.relation}").to_arrow_reader(_CHUNK):
      yield pa.table(batch)


def _opened(con: Any, path: str, format: Format) -> source_lib.File:
  if not Path(path).is_file():
    raise DamagedFileError(f"{path} does not exist, or is no file")
  if format.names and not path.endswith((".parquet", ".pq")):
    lines = source_lib.head(con, path, format)
    delimiter = format.delimiter or find_delimiter(lines, path, format)
    first = next(iter(fields_of(lines, delimiter, format.quote)), [])
    known = {name.lower() for name in (*format.names, "history")}
    are_names = [name.strip().lower() in known for name in first]
    # A row of as many fields may have a name as a value.
    if all(are_names) if len(first) == len(format.names) else any(are_names):
      format = Format(delimiter=format.delimiter, encoding=format.encoding, quote=format.quote)
  return source_lib.open_file(con, path, format)


def texts_of(table: pa.Table) -> pa.Table:
  """Returns a table as the texts that CSV holds, with lists joined by `|`."""
  columns = []
  for column in table.columns:
    if pa.types.is_list(column.type):
      column = pc.binary_join(column.cast(pa.list_(pa.string())), "|")
    columns.append(column.cast(pa.string()))
  return pa.table(columns, table.column_names)
