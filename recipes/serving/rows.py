"""Rows to predict for, as training has read its own: of Python, of tables and of files."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DamagedFileError, MissingFileError, UserError
from ..tables import source as source_lib
from ..tables import spec
from ..tables.spec import Format
from ..tables.values import Column, Value, identifier, typed, value_of

_CHUNK = 4096


def as_table(rows: Any) -> pa.Table:
  """Returns rows as an Arrow table.

  Args:
    rows: a mapping of columns to lists or arrays, a list of dicts, or a table of Arrow or pandas.
      None and NaN are missing.

  >>> as_table([{"city": "Oslo"}, {"city": "Rome", "price": 3}])["price"].to_pylist()
  [None, 3]
  """
  if isinstance(rows, list | tuple):
    names = dict.fromkeys(name for row in rows for name in row)
    rows = {name: [row.get(name) for row in rows] for name in names}
  if isinstance(rows, Mapping):
    is_arrow = lambda column: isinstance(column, pa.Array | pa.ChunkedArray)
    listed = lambda column: column if is_arrow(column) else pa.array([*column], from_pandas=True)
    rows = {name: listed(column) for name, column in rows.items()}
  table = pa.table(rows)
  if (name := spec.repeated(table.column_names)) is not None:
    raise UserError(f"the rows have two columns {name!r}: rename one")
  return table


class Reader:
  """Reads the columns of rows by the declarations of training.

  Args:
    kinds: by declared name; columns that rows lack are left out where they are not `required`.
    missing: texts that mean no value.

  Attributes:
    columns: of the rows, that are read.
  """

  def __init__(
    self, kinds: Mapping[str, spec.Kind], missing: Sequence[str], *, required: bool = True
  ):
    self.kinds, self._missing, self._required = dict(kinds), missing, required
    sources = (column for name, kind in self.kinds.items() for column in kind.sources(name))
    self.columns = tuple(dict.fromkeys(sources))
    self._con = source_lib.connect(threads=1)

  def read(self, table: pa.Table, source: str = "rows", first_row: int = 1) -> dict[str, Any]:
    """Returns values by declared name.

    Args:
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: a column is missing, or of a type that cannot be read, or a row cannot be read;
        names row, column and value.
    """
    places = {name: f"f{place}" for place, name in enumerate(table.column_names)}
    values = dict[str, Value]()
    columns = {
      name: f"c{place}"
      for place, (name, kind) in enumerate(self.kinds.items())
      if self._required or all(column in places for column in kind.sources(name))
    }
    with self._con.cursor() as con:
      con.register("given", table.rename_columns(list(places.values())))
      described = con.execute("DESCRIBE SELECT * FROM given").fetchall()
      stored = {name: "VARCHAR" if kind == '"NULL"' else kind for name, kind, *_ in described}
      for place, (name, own) in enumerate(columns.items()):
        kind = self.kinds[name]
        for lacking in (column for column in kind.sources(name) if column not in places):
          hint = spec.nearest(lacking, table.column_names)
          raise UserError(f"{source} has no column {lacking!r}, which training has read: {hint}")
        read = [Column(c, places[c], stored[places[c]]) for c in kind.sources(name)]
        try:
          values[own] = value_of(kind, read, self._missing, place=place)
        except DamagedFileError as error:
          raise UserError(f"{source}: {error}") from error
      answer = con.execute(typed("given", values)).to_arrow_table()
    bad = answer["bad"].is_valid().to_numpy()
    if bad.any():
      row = int(np.argmax(bad))
      name, value = [*columns][answer["bad"][row].as_py() - 1], answer["value"][row].as_py()
      raise UserError(
        f"{source}, row {first_row + row}, column {self.kinds[name].sources(name)[0]!r}: {value!r} "
        f"{values[columns[name]].problem}. Repair the row, or leave it out"
      )
    return {name: answer[column].combine_chunks() for name, column in columns.items()}


def of_file(path: str, format: Format, needed: Sequence[str]) -> Iterator[pa.Table]:
  """Yields the rows of a file in their order, a few thousand at once; texts have a header.

  Args:
    format: of the text files of training.
    needed: columns that are read as paths into objects of JSON Lines.

  Raises:
    DamagedFileError: the file is damaged, or a line of it is no row; names it.
  """
  if not Path(path).is_file():
    raise MissingFileError(f"{path} does not exist, or is no file")
  format = dataclasses.replace(format, names=(), rest=False)
  file = source_lib.open_file(path, format)
  below = [name for name in needed if "." in name and name not in file.columns]
  columns = [file.column(name) for name in [*file.columns, *below]]
  chosen = ", ".join(f"{column.raw} AS {identifier(column.name)}" for column in columns)
  number = 0
  with source_lib.connect() as con:
    for raw in itertools.chain(file.batches(columns), [file.schema.empty_table()]):
      for line, problem, _ in file.unreadable:
        raise DamagedFileError(f"{path}, line {line} {problem}. Repair it")
      con.register("raw", raw)
      bad = con.execute(f"SELECT {file.bad[0]} AS bad FROM raw").to_arrow_table()["bad"].to_numpy()
      if bad.any():
        raise DamagedFileError(f"{path}, row {number + bad.argmax() + 1} {file.bad[1]}. Repair it")
      number += len(raw)
      batches = con.execute(f"SELECT {chosen} FROM raw").to_arrow_reader(_CHUNK)
      yield from (pa.table(batch) for batch in batches)
