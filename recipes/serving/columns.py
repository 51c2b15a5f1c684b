"""Rows to predict for, as columns of the types that the transforms of training take."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError
from ..tables.faults import Problem
from ..tables.formats import repeated
from ..tables.values import ReadAs, as_lists, as_numbers, as_texts, plain, refusal

Columns = Mapping[str, pa.Array]


def as_columns(rows: Any) -> dict[str, pa.Array]:
  """Returns rows as Arrow arrays by column.

  Args:
    rows: a mapping of columns to lists or arrays, a list of dicts, or a table: of Arrow, pandas, or
      another library with Arrow's interface. None and NaN are missing.

  Raises:
    UserError: rows are of another type, or a column holds values of several types.

  >>> as_columns([{"city": "Oslo"}, {"city": "Rome", "price": 3}])["price"].to_pylist()
  [None, 3]
  """
  if isinstance(rows, Mapping):
    columns = {str(name): _array(name, values) for name, values in rows.items()}
  elif isinstance(rows, Sequence) and not isinstance(rows, str):
    if not all(isinstance(row, Mapping) for row in rows):
      raise UserError("rows are a list, and not every one of them is a dict of columns")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {str(name): _array(name, [row.get(name) for row in rows]) for name in names}
  else:
    try:
      table = pa.table(rows)
    except (TypeError, pa.ArrowException) as error:
      raise UserError(
        f"rows are {type(rows).__name__}: give a dict of columns, a list of dicts, or a table"
      ) from error
    if (name := repeated(table.column_names)) is not None:
      raise UserError(f"the rows have two columns {name!r}: rename one")
    columns = {name: _whole(table[name]) for name in table.column_names}
  lengths = {name: len(array) for name, array in columns.items()}
  if len(set(lengths.values())) > 1:
    raise UserError(f"the columns of the rows are of different lengths: {lengths}")
  return columns


def _array(name: Any, values: Any) -> pa.Array:
  if isinstance(values, pa.Array | pa.ChunkedArray):
    return _whole(values)
  try:
    return _whole(pa.array(values, from_pandas=True))
  except (TypeError, ValueError, pa.ArrowException) as error:
    raise UserError(f"column {name!r} of the rows cannot be read: {error}") from error


def _whole(values: pa.Array | pa.ChunkedArray) -> pa.Array:
  return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def require(columns: Sequence[str], needed: Sequence[str], source: str) -> None:
  """Raises UserError where a column is missing; names it and what is most like it."""
  missing = [name for name in needed if name not in columns]
  if missing:
    close = difflib.get_close_matches(missing[0], columns, 1)
    hint = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(columns) or 'none'}."
    names = ", ".join(map(repr, missing))
    raise UserError(f"{source} has no column {names}, which training has read. {hint}")


def read(
  columns: Columns, wanted: Mapping[str, tuple[str, ReadAs]], missing: Sequence[str], source: str
) -> tuple[dict[str, Any], list[tuple[str, Problem]]]:
  """Returns values by declared name, as `tables.reading.Reader` does, and what cannot be read.

  Args:
    columns: N values each.
    wanted: column and way by name; names of columns that are missing are left out.
    missing: texts that mean no value.
    source: of the rows, for error texts.

  Raises:
    UserError: a column is of a type that cannot be read so.
  """
  values: dict[str, Any] = {}
  problems: list[tuple[str, Problem]] = []
  for name, (column, way) in wanted.items():
    if column not in columns:
      continue
    array = plain(columns[column])
    if (reason := refusal(array.type, way)) is not None:
      raise UserError(f"{source}, column {column!r} {reason}")
    if isinstance(way, tuple):
      values[name], bad = as_lists(array, way[1], missing)
    elif way == "number":
      values[name], bad = as_numbers(array, missing)
    else:
      values[name], bad = as_texts(array, missing)
    problems += [(column, problem) for problem in bad]
  return values, problems


def bad_rows(
  problems: Sequence[tuple[str, Problem]], rows: int, on_bad_row: str, source: str, first_row: int
) -> np.ndarray:
  """Returns which rows cannot be read, bool `[rows]`.

  Raises:
    UserError: there is one and `on_bad_row` is "raise"; names row and column.
  """
  if on_bad_row not in ("raise", "skip"):
    raise UserError(f"on_bad_row is {on_bad_row!r}: choose 'raise' or 'skip'")
  bad = np.zeros(rows, bool)
  for _, problem in problems:
    bad |= problem.bad
  if bad.any() and on_bad_row == "raise":
    index = int(np.argmax(bad))
    column, problem = next((c, p) for c, p in problems if p.bad[index])
    text = f", column {column!r}: {problem.value(index)} {problem.kind}. {problem.hint(index)}"
    raise UserError(bad_row(source, first_row + index, text))
  return bad


def bad_row(source: str, row: int, problem: str) -> str:
  """Returns the error text of a row that cannot be read; `problem` follows its number."""
  return (
    f"{source}, row {row}{problem.rstrip()} Repair the row, or set on_bad_row=skip, which leaves "
    "its score blank."
  )
