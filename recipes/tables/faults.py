"""Rows that cannot be used: raised with file, row and column, or counted and left out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DamagedFileError, UserError

_SKIP = "config.on_bad_row='skip'"
UNUSABLE = "has a value that cannot be used"


def shown(value: object) -> str:
  """Returns a value for an error text, cut to 60 characters.

  >>> shown("abc"), shown(2.5)
  ("'abc'", '2.5')
  """
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


class Fault(NamedTuple):
  """A row that was dropped while its file was read.

  Attributes:
    row: number in its file.
    column: where the fault is, or None for the row as a whole.
    kind: names the fault as a predicate, such as "is not UTF-8"; faults are counted by it.
    value: the value, for the error text, or "".
    hint: says what to write.
    is_told: whether the value says itself what is wrong; an error text then leaves out the kind.
  """

  row: int
  column: str | None
  kind: str
  value: str
  hint: str = ""
  is_told: bool = False


class Problem(NamedTuple):
  """Values of one column that cannot be read as they were asked for.

  Attributes:
    bad: bool [N], the rows.
    kind: as in `Fault`.
    value: of a row's index in the chunk; the value for the error text.
    hint: of a row's index in the chunk; says what to write.
    is_told: as in `Fault`.
  """

  bad: np.ndarray
  kind: str
  value: Callable[[int], str]
  hint: Callable[[int], str] = lambda index: ""
  is_told: bool = False

  def at(self, indices: np.ndarray) -> "Problem":
    """Returns the problem of rows that refer to the values by index, `[rows]`; -1 is none."""
    value, hint = self.value, self.hint
    return Problem(
      np.append(self.bad, False)[indices],
      self.kind,
      lambda row: value(int(indices[row])),
      lambda row: hint(int(indices[row])),
      self.is_told,
    )


@dataclasses.dataclass
class _Tally:
  count: int
  first: str


class Ledger:
  """Raises for the first fault, or counts all of them.

  Attributes:
    rows: number of the rows that were left out.
  """

  def __init__(self, on_bad_row: str):
    if on_bad_row not in ("raise", "skip"):
      raise UserError(f"config.on_bad_row={on_bad_row!r} is unknown: write 'raise' or 'skip'")
    self._skips = on_bad_row == "skip"
    self._tallies: dict[tuple[str | None, str], _Tally] = {}
    self.rows = 0

  def add(self, file: Path, faults: list[Fault]) -> None:
    """Counts rows of a file that are left out, one fault a row, in the order of the rows.

    Raises:
      DamagedFileError: bad rows are not skipped; names file, row and column of the first.
    """
    if faults and not self._skips:
      raise DamagedFileError(_message(file, faults[0]))
    for fault in faults:
      first = ", ".join(filter(None, (str(file), f"row {fault.row}", fault.value)))
      self._tallies.setdefault((fault.column, fault.kind), _Tally(0, first)).count += 1
    self.rows += len(faults)

  def join(self, other: "Ledger") -> None:
    """Adds the counts of another ledger, of later files."""
    for key, tally in other._tallies.items():
      self._tallies.setdefault(key, _Tally(0, tally.first)).count += tally.count
    self.rows += other.rows

  def lines(self) -> list[str]:
    """Returns one line per kind of fault, with the first row that has it."""
    lines = []
    for (column, kind), tally in self._tallies.items():
      where = "" if column is None else f"column {column!r} "
      rows = "1 row" if tally.count == 1 else f"{tally.count} rows"
      lines.append(f"{rows}: {where}{kind} (first: {tally.first})")
    return lines


def _message(file: Path, fault: Fault) -> str:
  where = f"{file}, row {fault.row}"
  if fault.column is None:
    problem = f"{where} has {fault.kind}: {fault.value}"
  else:
    value = f": {fault.value}" if fault.value else ""
    kind = "" if fault.is_told else f" {fault.kind}"
    problem = f"{where}, column {fault.column!r}{value}{kind}"
  hint = f" {fault.hint}" if fault.hint else ""
  return f"{problem}.{hint} Repair the row, or write {_SKIP} to leave such rows out."
