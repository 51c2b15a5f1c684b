"""The files that a setting names, and their formats."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import MissingFileError, UserError

_SUFFIXES = {
  "Parquet": r"\.(parquet|pq)$",
  "text": r"\.(csv|tsv|tab|txt|dat|data)(\.gz)?$",
}
_PACKED = (".zip", ".bz2", ".xz", ".zst", ".7z", ".tar", ".tgz")
_SHEETS = (".xls", ".xlsx", ".ods")
_STORES = (".json", ".jsonl", ".avro", ".orc", ".feather", ".npy", ".npz", ".pkl", ".h5", ".db")
_OTHERS = (*_PACKED, *_SHEETS, *_STORES, ".md", ".pdf")
_KNOWN = ".parquet, .csv, .tsv, .txt, .dat or .data (text also with .gz)"


def file_format(path: Path) -> str | None:
  """Returns "Parquet" or "text", as the suffix says; None if it says nothing.

  >>> file_format(Path("clicks.csv.gz")), file_format(Path("clicks.xlsx"))
  ('text', None)
  """
  for name, pattern in _SUFFIXES.items():
    if re.search(pattern, path.name, re.IGNORECASE):
      return name
  return None


def paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
  """Returns the data files of a setting, each once.

  Args:
    files: a file, a folder, a glob, or several of them. A folder gives its data files and its
      sub-folders' in the order of their paths; files whose name begins with `.` or `_`, as
      `_SUCCESS`, and those of other formats are passed over. `~` is the home folder.

  Raises:
    MissingFileError: a file or a folder does not exist, a folder has no data file, or a glob fits
      none.
    UserError: the suffix of a file is of another format, or the files are of several formats.
  """
  patterns = [os.fspath(p) for p in ([files] if isinstance(files, str | os.PathLike) else files)]
  if not any(patterns):
    raise MissingFileError("config.files is empty: write the file, folder or glob of your table")
  data_files: dict[Path, str] = {}
  for pattern in patterns:
    for path in _matching(pattern):
      name = file_format(path)
      if name is None and path.suffix.lower() in _OTHERS:
        raise UserError(f"{path}: the suffix {path.suffix!r} is unknown. {_advice(path)}")
      data_files[path] = name or "text"  # files of data often have suffixes of their own
  formats = sorted(set(data_files.values()))
  if len(formats) > 1:
    examples = [next(str(path) for path in data_files if data_files[path] == f) for f in formats]
    glob_of_one = Path(examples[0]).parent / f"*{_suffix(examples[0])}"
    raise UserError(
      f"the files are of several formats ({', '.join(examples)}). Name those of one format, for "
      f"example with a glob: config.files='{glob_of_one}'"
    )
  return list(data_files)


def _matching(pattern: str) -> list[Path]:
  path = Path(pattern).expanduser()
  if path.is_dir():
    members = sorted(file for file in path.rglob("*") if file.is_file())
    visible = [
      file
      for file in members
      if not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    ]
    if data_files := [file for file in visible if file_format(file)]:
      return data_files
    names = ", ".join(str(file.relative_to(path)) for file in members[:5])
    content = f"it holds {names}" if names else "it is empty"
    raise MissingFileError(f"the folder {path} has no data file ({content}). Known are {_KNOWN}.")
  if path.exists():
    return [path]
  matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
  if data_files := [match for match in matches if match.is_file()]:
    return data_files
  if glob.has_magic(pattern):
    raise MissingFileError(f"no file fits {pattern}. Check the folder and the pattern.")
  raise MissingFileError(f"{path} does not exist. Check the path; it is relative to {Path.cwd()}.")


def _suffix(name: str) -> str:
  if shard := re.search(r"(\.\w+)-\d+-of-\d+$", name):
    return f"{shard[1]}*"
  return "".join(Path(name).suffixes[-2:] if name.endswith(".gz") else Path(name).suffixes[-1:])


def _advice(path: Path) -> str:
  if path.suffix.lower() in _PACKED:
    return f"Unpack it first; known are {_KNOWN}."
  if path.suffix.lower() in _SHEETS:
    return "Save the sheet as CSV."
  return f"Rename the file: known are {_KNOWN}."
