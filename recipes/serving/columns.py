"""Rows to predict for, as columns of the types that the transforms of training take."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError
from ..tables import spec
from ..tables.fitting import Fitted
from ..tables.formats import repeated
from ..tables.values import Problem, ReadAs, converted, plain, refusal

Columns = Mapping[str, pa.Array]
Wanted = Mapping[str, tuple[tuple[str, ...], ReadAs]]  # columns and way of reading by name


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
  columns: Columns, wanted: Wanted, missing: Sequence[str], source: str
) -> tuple[dict[str, Any], list[tuple[str, Problem]]]:
  """Returns values by declared name, as `tables.reading.Reader` does, and what cannot be read.

  Args:
    columns: N values each.
    wanted: columns and way by name; names of which a column is missing are left out.
    missing: texts that mean no value.
    source: of the rows, for error texts.

  Raises:
    UserError: a column is of a type that cannot be read so.
  """
  values: dict[str, Any] = {}
  problems: list[tuple[str, Problem]] = []
  for name, (names, way) in wanted.items():
    if any(column not in columns for column in names):
      continue
    for column in names:
      stored = plain(columns[column]).type
      if (reason := refusal(stored, way if len(names) == 1 else "number")) is not None:
        raise UserError(f"{source}, column {column!r} {reason}")
    values[name], bad = converted([columns[each] for each in names], way, missing, {}, names)
    problems += [(names[0], problem) for problem in bad]
  return values, problems


def absent(values: Any) -> np.ndarray:
  """Returns which of N texts, lists or numbers are missing, bool `[N]`."""
  if isinstance(values, np.ndarray):
    return np.isnan(values)
  return _lengths(values) == 0


def _lengths(values: pa.Array) -> np.ndarray:
  """Returns how many values lists hold; of a text 1, or 0 if it is null."""
  if not pa.types.is_list(values.type):
    return values.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
  return pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)


def unseen(fitted: Fitted, name: str, values: Mapping[str, Any]) -> np.ndarray:
  """Returns which rows hold a value outside the vocabulary of a feature, bool `[N]`.

  Numbers and crosses have no vocabulary; a hashed value counts only if its pattern does not match.
  """
  kind, rows = fitted.kinds.get(name), len(values[name])
  if not isinstance(kind, spec.Category):
    return np.zeros(rows, bool)
  ids = fitted.ids(values, name)
  ids = ids[:, None] if ids.ndim == 1 else ids
  inside = np.arange(ids.shape[1]) < _lengths(values[name])[:, None]
  known = kind.hash or kind.size or len(fitted.vocabulary(name))
  return np.any(inside & ((ids < 0) | (ids >= known)), axis=1)


def rows_by_column(
  rows: Mapping[str, np.ndarray], wanted: Wanted, bad: np.ndarray
) -> dict[str, int]:
  """Returns how many rows are marked by column; columns without any are left out.

  Args:
    rows: bool `[N]` by declared name.
    wanted: as of `read`; several columns of a name count as the first.
    bad: bool `[N]`, rows that do not count.
  """
  columns: dict[str, np.ndarray] = {}
  for name, marked in rows.items():
    column = wanted[name][0][0]
    columns[column] = columns.get(column, False) | (marked & ~bad)
  return {column: int(marked.sum()) for column, marked in columns.items() if marked.any()}


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
    text = f", column {column!r}: {problem.value(index)} {problem.kind}. {problem.hint}"
    raise UserError(bad_row(source, first_row + index, text))
  return bad


def bad_row(source: str, row: int, problem: str) -> str:
  """Returns the error text of a row that cannot be read; `problem` follows its number."""
  return (
    f"{source}, row {row}{problem.rstrip()} Repair the row, or set on_bad_row=skip, which leaves "
    "its score blank."
  )
