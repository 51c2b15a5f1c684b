"""Text files with a record a line, read strictly: damage is named by file and line."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from . import files
from .errors import DamagedFileError

_WHOLE = "whole numbers up to 2**63 - 1"


def whole(text: str) -> int | None:
  """Returns the whole number that a text is; None if it is none, negative, or beyond int64.

  >>> whole("12"), whole("-1"), whole("1.5"), whole(str(2**63))
  (12, None, None, None)
  """
  if not (text.isascii() and text.isdecimal()) or len(text) > 19:
    return None
  number = int(text)
  return number if number < 1 << 63 else None


@dataclasses.dataclass(frozen=True)
class TextFile:
  """A file of records, and what to do where it is damaged.

  Attributes:
    path: of the file.
    hint: ends every error; says how to mend the file.
  """

  path: Path
  hint: str = "Is the file complete? Unpack the archive again, or repair the line."

  def error(self, line: int, problem: str) -> DamagedFileError:
    """Returns the error for a problem in a line, which counts from 1."""
    return DamagedFileError(f"{self.path}, line {line}: {problem}. {self.hint}")

  def records(
    self, separator: str, count: int, *, skip_empty: bool = False
  ) -> Iterator[tuple[int, list[str]]]:
    """Yields every line's number and its `count` fields.

    Args:
      separator: between two fields.
      count: of the fields.
      skip_empty: empty lines are passed over.

    Raises:
      DamagedFileError: a line has another number of fields, or the file is empty.
    """
    line = 0
    # GroupLens publishes latin-1; as UTF-8 the accents in the titles fail to decode.
    with self.path.open(encoding="latin-1", newline="\n") as file:
      for line, text in enumerate(file, start=1):
        fields = text.rstrip("\r\n").split(separator)
        if skip_empty and fields == [""]:
          continue
        if len(fields) != count:
          problem = f"found {len(fields)} fields separated by {separator!r}, expected {count}"
          raise self.error(line, problem)
        yield line, fields
    if line == 0:
      raise self.error(1, "the file is empty")

  def numbers(self) -> Iterator[tuple[int, list[int]]]:
    """Yields every line's number and the whole numbers in it, which spaces or tabs separate.

    Raises:
      DamagedFileError: a line holds something else, or the file is empty.
    """
    line = 0
    with (
      self.path.open(encoding="ascii", errors="replace") as file,
      files.progress(f"reading {self.path.name}", self.path.stat().st_size, "B") as bar,
    ):
      for line, text in enumerate(file, start=1):
        numbers = []
        for field in text.split():
          number = whole(field)
          if number is None:
            raise self.error(line, f"found {field[:40]!r}, expected {_WHOLE}")
          numbers.append(number)
        yield line, numbers
        bar.update(len(text))
    if line == 0:
      raise self.error(1, "the file is empty")

  def number(self, line: int, name: str, text: str) -> int:
    """Returns the whole number in a field.

    Raises:
      DamagedFileError: it holds something else; calls the field by its name.
    """
    number = whole(text)
    if number is None:
      raise self.error(line, f"the {name} is {text!r}, expected a whole number")
    return number

  def add_id(self, line: int, ids: dict[str, int], text: str) -> None:
    """Numbers the id in a field by its place among the ids of the file.

    Raises:
      DamagedFileError: it is no whole number, or appears a second time.
    """
    self.number(line, "id", text)
    if text in ids:
      raise self.error(line, f"{text!r} appears a second time")
    ids[text] = len(ids)
