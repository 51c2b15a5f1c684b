"""The rows of a user's files, in chunks; bad ones raise with file, row and column, or count."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import files
from ..errors import DamagedFileError, UserError
from .formats import Format
from .source import Chunk, Fault, File, Stage, batches, open_file
from .values import Problem, ReadAs, converted, refusal, shown

_AS_FOUND = Format()


class Ledger:
  """Raises for the first fault, or counts all of them.

  Args:
    on_bad_row: "raise" or "skip".

  Attributes:
    rows: number of the rows that were left out.
  """

  def __init__(self, on_bad_row: str):
    if on_bad_row not in ("raise", "skip"):
      raise UserError(f"config.on_bad_row={on_bad_row!r} is unknown: write 'raise' or 'skip'")
    self._skips = on_bad_row == "skip"
    self._counts: dict[tuple[str | None, str], tuple[int, str]] = {}
    self.rows = 0

  def add(self, file: Path, faults: Sequence[Fault]) -> None:
    """Counts rows of a file that are left out, one fault a row, in the order of the rows.

    Raises:
      DamagedFileError: bad rows are not skipped; names file, row and column of the first.
    """
    for row, column, kind, value, hint in faults:
      if not self._skips:
        where = f"{file}, row {row}" + (f", column {column!r}" if column else "")
        problem = f"{where}: {value} {kind}" if column and value else f"{where} {kind}"
        problem += f": {value}" if not column else ""
        raise DamagedFileError(
          f"{problem}. {hint and hint + ' '}Repair the row, or write config.on_bad_row='skip' to "
          "leave such rows out."
        )
      self._count((column, kind), 1, ", ".join(filter(None, (str(file), f"row {row}", value))))

  def join(self, other: "Ledger") -> None:
    """Adds the counts of another ledger, of later files."""
    for key, (count, first) in other._counts.items():
      self._count(key, count, first)

  def _count(self, key: tuple[str | None, str], count: int, first: str) -> None:
    before, first = self._counts.get(key, (0, first))
    self._counts[key] = before + count, first
    self.rows += count

  def lines(self) -> list[str]:
    """Returns one line per kind of fault, with the first row that has it."""
    return [
      f"{count} row{'s' * (count > 1)}: {f'column {column!r} ' if column else ''}{kind} "
      f"(first: {first})"
      for (column, kind), (count, first) in self._counts.items()
    ]


class Reader:
  """Reads the columns of a table, file after file, in constant memory.

  Iterating yields `Chunk`s, and starts over every time, with the counts at zero.

  Args:
    paths: of the files, as `paths` returns them. Their columns may be in any order, and there may
      be more of them than are read.
    ways: by name, how to read the column; see `values.converted`.
    columns: the columns of a name in the files, where they are others than the one of this name.
      Several names may read one column, in different ways.
    on_bad_row: "raise", or "skip" to leave out and count rows that cannot be read.
    stage: where text is kept while it is read; None makes one of its own.
    may_be_empty: whether the files may have no rows, as a part of a table.
    seed: of the hashes of the rows' values in the columns that are read; None leaves them out.

  Attributes:
    names: all columns of the first file, in order.

  Raises:
    DamagedFileError: a file has no column of a name, of the right kind, or is damaged; and while
      iterating, a row cannot be read. Names file, row and column.
    UserError: a setting does not fit the files.

  Example:
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "clicks.csv"
    >>> _ = file.write_text("item,price\\na,1\\nb,\\n")
    >>> for chunk in Reader([file], {"item": "text", "price": "number"}):
    ...   print(chunk.rows, chunk.columns["item"].to_pylist(), chunk.columns["price"])
    [1 2] ['a', 'b'] [ 1. nan]
  """

  def __init__(
    self,
    paths: Sequence[Path],
    ways: Mapping[str, ReadAs],
    *,
    columns: Mapping[str, tuple[str, ...]] | None = None,
    format: Format = _AS_FOUND,
    on_bad_row: str = "raise",
    chunk_rows: int = 65_536,
    stage: Stage | None = None,
    may_be_empty: bool = False,
    seed: int | None = None,
  ):
    self._may_be_empty, self._seed = may_be_empty, seed
    self._paths, self._ways = [Path(path) for path in paths], dict(ways)
    self._columns = {name: (columns or {}).get(name, (name,)) for name in ways}
    self._missing, self._on_bad_row, self._chunk_rows = format.missing, on_bad_row, chunk_rows
    self.ledger, self._clocks = Ledger(on_bad_row), dict[str, int]()
    self._stage = stage or Stage()
    self.files = [open_file(path, format) for path in self._paths]
    self.names = self.files[0].names
    for file in self.files:
      self._check(file)

  @property
  def has_dates(self) -> bool | None:
    """Whether the times that have been read are dates, not numbers; None before any."""
    return any(self._clocks.values()) if self._clocks else None

  def __iter__(self) -> Iterator[Chunk]:
    self.ledger, self._clocks = Ledger(self._on_bad_row), {}
    num_rows, wanted = 0, list(dict.fromkeys(c for each in self._columns.values() for c in each))
    texts = [self._columns[name][0] for name, way in self._ways.items() if way == "text"]
    with files.progress("reading", len(self.files), "file") as bar:
      for file in self.files:
        for stored, faults in batches(
          file, self._stage, wanted, self._chunk_rows, texts, seed=self._seed
        ):
          chunk = self._converted(stored, faults)
          num_rows += len(chunk.rows)
          if len(chunk.rows):
            yield chunk
        bar.update()
    if num_rows == 0 and not self._may_be_empty:
      more = f" and {len(self._paths) - 1} more files" if len(self._paths) > 1 else ""
      left_out = "; ".join(self.ledger.lines())
      why = f": every row was left out: {left_out}" if left_out else " has a header and no rows"
      raise DamagedFileError(f"{self._paths[0]}{more}{why}.")

  def refuse(
    self, chunk: Chunk, bad: np.ndarray, name: str, kind: str = "has no value", hint: str = ""
  ) -> Chunk:
    """Raises for the first bad row, or leaves out and counts all of them.

    Args:
      bad: bool [N].
      kind, hint: as of `values.Problem`.

    Raises:
      DamagedFileError: `on_bad_row` is "raise"; names file, row, column and value.
    """
    values = chunk.columns[name]
    item = lambda row: values[row].item() if isinstance(values, np.ndarray) else values[row].as_py()
    value = lambda row: "" if item(row) is None else shown(item(row))
    return self._without(chunk, {}, [(self._columns[name][0], Problem(bad, kind, value, hint))])

  def _check(self, file: File) -> None:
    """Raises if a file lacks a column, or stores it in a way that cannot be read as it should."""
    for name, way in self._ways.items():
      for column in self._columns[name]:
        if column not in file.names:
          close = difflib.get_close_matches(column, file.names, n=1)
          listed = ", ".join(map(repr, file.names[:30])) + " …" * (len(file.names) > 30)
          other = f", which {self._paths[0]} has" if column in self.names else ""
          meant = f" Did you mean {close[0]!r}?" if close else ""
          raise DamagedFileError(
            f"{file.path} has no column {column!r}{other}.{meant} Its columns are {listed}. "
            f"{file.advice}".rstrip()
          )
        problem = refusal(file.types[column], way if len(self._columns[name]) == 1 else "number")
        if problem is not None:
          raise DamagedFileError(f"{file.path}, column {column!r} {problem}.")

  def _converted(self, chunk: Chunk, dropped: Sequence[Fault]) -> Chunk:
    problems: list[tuple[str, Problem]] = []
    columns = {}
    for name, way in self._ways.items():
      of_name = self._columns[name]
      arrays = [chunk.columns[column] for column in of_name]
      columns[name], bad = converted(arrays, way, self._missing, self._clocks, of_name)
      problems += [(of_name[0], problem) for problem in bad]
    faults = {fault.row: fault for fault in dropped}
    return self._without(chunk._replace(columns=columns), faults, problems)

  def _without(
    self, chunk: Chunk, faults: dict[int, Fault], problems: list[tuple[str, Problem]]
  ) -> Chunk:
    """Counts every bad row once, or raises; returns the rows without problems."""
    kept = np.ones(len(chunk.rows), bool)
    for column, problem in problems:
      for index in np.flatnonzero(problem.bad & kept).tolist():
        row = int(chunk.rows[index])
        faults[row] = Fault(row, column, problem.kind, problem.value(index), problem.hint)
      kept &= ~problem.bad
    self.ledger.add(chunk.file, [faults[row] for row in sorted(faults)])
    return chunk if kept.all() else chunk.take(kept)
