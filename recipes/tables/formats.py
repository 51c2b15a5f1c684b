"""The files that a setting names, and how their rows are written."""

import csv
import glob
import itertools
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingFileError, UserError
from .spec import Format

DELIMITERS = ("::", "\t", ",", ";", "|", " ")
_PACKED = r"(\.gz|\.zst)?$"
_SUFFIXES = {
  "parquet": r"\.(parquet|pq)$",
  "json": rf"\.(jsonl|ndjson|json){_PACKED}",
  "text": rf"\.(csv|tsv|tab|txt|dat|data){_PACKED}",
}
_OTHER = r"\.(zip|bz2|xz|7z|tar|tgz|xlsx?|ods|avro|orc|feather|np[yz]|pkl|h5|db|md|pdf)$"
_KNOWN = "known are .parquet, .jsonl, .csv, .tsv and .txt, all but the first also with .gz or .zst"
_REMOTE = re.compile(r"^\w+://")


def named(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the names of columns; one without is called by its place, as `column 1`."""
  return tuple(name or f"column {place}" for place, name in enumerate(names, start=1))


def free(name: str, names: Collection[str]) -> str:
  """Returns the name, or a longer one where a column has it."""
  return next(each for n in itertools.count() if (each := name + n * "_") not in names)


def fields_of(lines: Sequence[str], delimiter: str, quote: str) -> list[list[str]]:
  """Returns the fields of lines; an open quote takes the lines that follow."""
  if len(delimiter) > 1:
    return [line.split(delimiter) for line in lines if line]
  quoting: Any = csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE
  ended = (f"{line}\n" for line in lines)
  try:
    return [*csv.reader(ended, delimiter=delimiter, quotechar=quote or None, quoting=quoting)]
  except csv.Error:
    return []


def find_delimiter(lines: Sequence[str], path: str, format: Format) -> str:
  """Returns the delimiter that cuts the first lines into the same number of fields, or ","."""
  scores, is_tabbed = {}, re.search(rf"\.(tsv|tab){_PACKED}", path, re.IGNORECASE)
  for delimiter in DELIMITERS:
    counts = [len(record) for record in fields_of(lines, delimiter, format.quote) if record] or [1]
    # Where the columns are named, the first line may be another one: a title, a comment.
    has_names = 2 * counts.count(len(format.names)) > len(counts)
    common = len(format.names) if has_names else counts[0]
    agree = sum(count == common or format.rest for count in counts) >= 0.8 * len(counts)
    if common > 1 and (agree or delimiter != " "):
      of_suffix, of_names = bool(is_tabbed) and delimiter == "\t", common == len(format.names)
      scores[delimiter] = (of_names, of_suffix, agree, delimiter != " ", common)
  return max(scores, key=lambda each: scores[each], default=",")


def file_format(path: str | Path) -> str | None:
  """Returns "parquet", "json" or "text", as the suffix says; None if it says nothing.

  >>> file_format("clicks.csv.gz"), file_format("clicks.xlsx")
  ('text', None)
  """
  suffixes = _SUFFIXES.items()
  return next((n for n, each in suffixes if re.search(each, str(path), re.IGNORECASE)), None)


def paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
  """Returns the data files of a setting, each once.

  Args:
    files: a file, a folder, a glob, or several of them. A folder gives its data files and its
      sub-folders' in the order of their paths; files whose name begins with `.` or `_`, as
      `_SUCCESS`, and those of other formats are passed over. `~` is the home folder. A URL
      (`gs://`, `s3://`, `https://`) is read by fsspec, and names one file.

  Raises:
    MissingFileError: there is no such file, or a folder has no data file.
    UserError: the suffix of a file is of another format.
  """
  patterns = [os.fspath(p) for p in ([files] if isinstance(files, str | os.PathLike) else files)]
  if not any(patterns):
    raise MissingFileError("config.files is empty: write the file, folder or glob of your table")
  found = list(dict.fromkeys(path for pattern in patterns for path in _matching(pattern)))
  for path in found:
    if re.search(_OTHER, path, re.IGNORECASE):
      raise UserError(f"{path} cannot be read: unpack or convert it; {_KNOWN}")
  return found


def _matching(pattern: str) -> list[str]:
  if _REMOTE.match(pattern):
    return [pattern]
  path = Path(pattern).expanduser()
  if path.is_dir():
    members = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    is_hidden = lambda file: any(part.startswith((".", "_")) for part in file.parts)
    if found := [str(path / f) for f in members if not is_hidden(f) and file_format(f)]:
      return found
    raise MissingFileError(f"the folder {path} has no data file; {_KNOWN}")
  if path.exists():
    return [str(path)]
  if found := [m for m in sorted(glob.glob(str(path), recursive=True)) if Path(m).is_file()]:
    return found
  raise MissingFileError(f"there is no file {path}; a path is relative to {Path.cwd()}")
