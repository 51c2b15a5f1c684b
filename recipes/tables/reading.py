"""The rows of a user's files, in chunks."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import files
from ..errors import DamagedFileError
from .faults import UNUSABLE, Fault, Ledger, Problem
from .finding import file_format, paths
from .formats import Format
from .source import Chunk, File, ParquetFile, Stage, TextFile, batches
from .values import ReadAs, are_dates, converted, refusal

__all__ = ["Chunk", "Format", "Reader", "columns_of", "paths"]

_AS_FOUND = Format()


class Reader:
  """Reads the columns of a table, file after file, in constant memory.

  Iterating yields `Chunk`s, and starts over every time, with the counts at zero.

  Args:
    paths: of the files, as `paths` returns them. Their columns may be in any order, and there may
      be more of them than are read.
    ways: by name, how to read the column:
      "text": pa.StringArray, or a dictionary of one, trimmed, null where missing. Numbers and
        booleans become text, 12.0 "12" and True "true", and timestamps ISO 8601; texts stay as they
        are.
      "number": float64 [N], nan where missing. Texts true and false are 1 and 0.
      "time": int64 [N], or float64 where numbers have fractions. Dates and timestamps are
        microseconds since 1970, in UTC where they name no zone; numbers are taken as they are, in
        whatever unit they count. A column has one or the other, and none missing.
      ("list", separator): pa.ListArray of texts as above, without the missing ones; a list, or a
        text cut at the separator. A missing list is empty.
      "any": the Arrow array as it is stored.
    columns: the column of a name in the files, where it is another one, or several; see
      `values.converted`. Several names may read one column, in different ways.
    format: of text files.
    on_bad_row: "raise", or "skip" to leave out and count rows that cannot be read.
    chunk_rows: at most, of a chunk.
    stage: where text is kept while it is read; None makes one of its own.
    may_be_empty: whether the files may have no rows, as a part of a table.

  Attributes:
    names: all columns of the first file, in order.
    files: the files as they are stored.

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
    columns: Mapping[str, str | tuple[str, ...]] | None = None,
    format: Format = _AS_FOUND,
    on_bad_row: str = "raise",
    chunk_rows: int = 65_536,
    stage: Stage | None = None,
    may_be_empty: bool = False,
  ):
    self._may_be_empty = may_be_empty
    self._paths, self._ways = [Path(path) for path in paths], dict(ways)
    of_name = {name: (columns or {}).get(name, name) for name in ways}
    self._columns = {n: (c,) if isinstance(c, str) else c for n, c in of_name.items()}
    self._format, self._on_bad_row, self._chunk_rows = format, on_bad_row, chunk_rows
    self._ledger = Ledger(on_bad_row)
    self._clocks: dict[str, int] = {}
    self._stage = stage or Stage()
    self.files = [_open(path, format) for path in self._paths]
    self.names = self.files[0].names
    for path, source in zip(self._paths, self.files, strict=True):
      self._check(path, source)

  @property
  def skipped(self) -> list[str]:
    """One line per kind of bad row that was left out, with the first of them."""
    return self._ledger.lines()

  @property
  def num_skipped(self) -> int:
    """Number of the rows that were left out."""
    return self._ledger.rows

  def __iter__(self) -> Iterator[Chunk]:
    self._ledger = Ledger(self._on_bad_row)
    self._clocks = {}
    num_rows, wanted = 0, list(dict.fromkeys(c for each in self._columns.values() for c in each))
    texts = [self._columns[name][0] for name, way in self._ways.items() if way == "text"]
    total = sum(path.stat().st_size for path in self._paths)
    with files.progress("reading", total, "B") as bar:
      for path, source in zip(self._paths, self.files, strict=True):
        bar.set_description(f"reading {path.name}")
        for stored, faults, size in batches(source, self._stage, wanted, self._chunk_rows, texts):
          chunk = self._converted(stored, faults)
          bar.update(size)
          num_rows += len(chunk.rows)
          if len(chunk.rows):
            yield chunk
    if num_rows or self._may_be_empty:
      return
    if not self._ledger.rows:
      raise DamagedFileError(f"{_listed(self._paths)} has a header and no rows.")
    raise DamagedFileError(f"every row was left out: {'; '.join(self.skipped)}")

  @property
  def ledger(self) -> Ledger:
    """The counts of the rows that were left out."""
    return self._ledger

  @property
  def has_dates(self) -> bool | None:
    """Whether the times that have been read are dates, not numbers; None before any."""
    return are_dates(self._clocks)

  def refuse(
    self,
    chunk: Chunk,
    bad: np.ndarray,
    column: str,
    problem: Callable[[int], str],
    kind: str = UNUSABLE,
  ) -> Chunk:
    """Raises for the first bad row, or leaves out and counts all of them.

    Args:
      chunk: with N rows.
      bad: bool [N].
      column: whose values are bad.
      problem: of a row's index in the chunk; says what is wrong, as "'3' is neither 0 nor 1".
      kind: for the count.

    Returns:
      The rows that are not bad.

    Raises:
      DamagedFileError: `on_bad_row` is "raise"; names file, row and column.
    """
    return self._without(chunk, {}, [(column, Problem(bad, kind, problem, is_told=True))])

  def _check(self, path: Path, source: File) -> None:
    """Raises if a file lacks a column, or stores it in a way that cannot be read as it should."""
    for name, way in self._ways.items():
      columns = self._columns[name]
      for column in columns:
        if column not in source.names:
          raise DamagedFileError(self._missing(path, source, column))
        problem = refusal(source.types[column], way if len(columns) == 1 else "number")
        if problem is not None:
          raise DamagedFileError(f"{path}, column {column!r} {problem}.")

  def _missing(self, path: Path, source: File, name: str) -> str:
    listed = ", ".join(map(repr, source.names[:30])) + (" …" if len(source.names) > 30 else "")
    close = difflib.get_close_matches(name, source.names, n=1)
    sentences = [
      f"{path} has no column {name!r}"
      + (f", which {self._paths[0]} has." if name in self.names else "."),
      f"Did you mean {close[0]!r}?" if close else "",
      f"Its columns are {listed}.",
      source.advice(),
    ]
    return " ".join(filter(None, sentences))

  def _converted(self, chunk: Chunk, dropped: Sequence[Fault]) -> Chunk:
    problems: list[tuple[str, Problem]] = []
    columns = {}
    for name, way in self._ways.items():
      of_name = self._columns[name]
      arrays = [chunk.columns[column] for column in of_name]
      columns[name], bad = converted(arrays, way, self._format.missing, self._clocks, of_name)
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
        faults[row] = Fault(
          row, column, problem.kind, problem.value(index), problem.hint(index), problem.is_told
        )
      kept &= ~problem.bad
    self._ledger.add(chunk.file, [faults[row] for row in sorted(faults)])
    return chunk if kept.all() else chunk.take(kept)


def columns_of(paths: Sequence[Path], format: Format = _AS_FOUND) -> tuple[str, ...]:
  """Returns the columns of the first file, without reading its rows.

  Raises:
    DamagedFileError: it is empty, damaged, or its header cannot be read.
    UserError: the format does not fit the file.
  """
  return _open(paths[0], format).names


def _open(path: Path, format: Format) -> File:
  return (ParquetFile if file_format(path) == "Parquet" else TextFile)(path, format)


def _listed(paths: Sequence[Path]) -> str:
  return str(paths[0]) if len(paths) == 1 else f"each of {len(paths)} files from {paths[0]} on"
