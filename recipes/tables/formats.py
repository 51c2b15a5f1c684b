"""The files that a setting names, and how text files are written."""

import csv
import dataclasses
import glob
import io
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import MissingFileError, UserError

DELIMITERS = ("::", "\t", ",", ";", "|", " ")
_SAMPLE_ROWS = 20
_SUFFIXES = {
  "Parquet": r"\.(parquet|pq)$",
  "text": r"\.(csv|tsv|tab|txt|dat|data)(\.gz)?$",
}
_KNOWN = "known are .parquet, .csv, .tsv, .txt, .dat or .data (text also with .gz)"
_OTHERS = {  # formats that no recipe reads, and what to do
  r"\.(zip|bz2|xz|zst|7z|tar|tgz)$": f"Unpack it first; {_KNOWN}.",
  r"\.(xlsx?|ods)$": "Save the sheet as CSV.",
  r"\.(jsonl?|avro|orc|feather|np[yz]|pkl|h5|db|md|pdf)$": f"Convert it: {_KNOWN}.",
}


@dataclasses.dataclass(frozen=True)
class Format:
  """How text files are written.

  Parquet files use `missing` alone, for numbers as well as for texts.

  Attributes:
    delimiter: between two fields; "" finds it in the first rows, among `,`, tab, `;`, `|`, `::`
      and space. Where it has several characters, quotes have no meaning.
    names: of the columns of files without a header; () reads the first line as the header.
    encoding: utf-8, with or without a byte order mark, or another codec of Python, as latin-1.
    missing: values that mean no value, as the empty one always does; spaces around are ignored.
    rest: the last of `names` takes the rest of the line, as in lines `user item item …`. Quotes
      have no meaning then.
    quote: around fields that hold delimiters or line ends; "" gives quotes no meaning.
  """

  delimiter: str = ""
  names: tuple[str, ...] = ()
  encoding: str = "utf-8"
  missing: tuple[str, ...] = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?", "\\N")
  rest: bool = False
  quote: str = '"'

  def __post_init__(self):
    object.__setattr__(self, "delimiter", self.delimiter.replace("\\t", "\t"))  # from a shell
    object.__setattr__(self, "names", tuple(self.names))
    object.__setattr__(self, "missing", tuple(str(value).strip() for value in self.missing))
    if (
      len(self.quote) > 1 or "\n" in self.delimiter or (self.quote and self.quote in self.delimiter)
    ):
      raise UserError(
        f"config.format.delimiter={self.delimiter!r} and config.format.quote={self.quote!r} do not "
        "go together: write a delimiter without line ends, and another character or '' as quote"
      )
    if (name := repeated(self.names)) is not None:
      raise UserError(f"config.format.names has {name!r} twice: give each column its own name")
    if self.rest and not self.names:
      raise UserError("config.format.rest needs names: write config.format.names=('…', '…')")
    try:
      "".encode(self.encoding)
    except LookupError:
      raise UserError(
        f"config.format.encoding={self.encoding!r} is unknown: write 'utf-8', 'latin-1' or another "
        "codec of Python"
      ) from None


def repeated(names: Sequence[str]) -> str | None:
  """Returns the first name that is there twice, or None."""
  return next((name for index, name in enumerate(names) if name in names[:index]), None)


def named(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the names of columns; one without is called by its place, as `column 1`."""
  return tuple(name or f"column {place}" for place, name in enumerate(names, start=1))


def free(name: str, names: Collection[str]) -> str:
  """Returns the name, or a longer one where a column has it."""
  return next(each for n in itertools.count() if (each := name + n * "_") not in names)


def quoting(delimiter: str, quote: str) -> dict[str, Any]:
  """Returns the options of `csv.reader`."""
  how = csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE
  return {"delimiter": delimiter, "quotechar": quote or None, "quoting": how}


def records(sample: str, delimiter: str, quote: str, *, strict: bool) -> Iterator[list[str]]:
  """Yields the fields of the records in a text; `strict` raises csv.Error for an open quote."""
  if len(delimiter) > 1:
    return (line.split(delimiter) for line in sample.splitlines() if line)
  return csv.reader(io.StringIO(sample, newline=""), strict=strict, **quoting(delimiter, quote))


def find_delimiter(sample: str, path: Path, format: Format) -> str:
  """Returns the delimiter that cuts the first records into the same number of fields, or ","."""
  scores, is_tabbed = {}, re.search(r"\.(tsv|tab)(\.gz)?$", path.name, re.IGNORECASE)
  for delimiter in DELIMITERS:
    try:
      lines = islice(records(sample, delimiter, format.quote, strict=False), _SAMPLE_ROWS)
      counts = [len(record) for record in lines if record] or [1]
    except csv.Error:
      continue
    # Where the columns are named, the first line may be another one: a title, a comment.
    has_names = 2 * counts.count(len(format.names)) > len(counts)
    common = len(format.names) if has_names else counts[0]
    agree = sum(count == common or format.rest for count in counts) >= 0.8 * len(counts)
    if common > 1 and (agree or delimiter != " "):
      is_suffix = bool(is_tabbed) and delimiter == "\t"
      of_names = common == len(format.names)
      scores[delimiter] = (of_names, is_suffix, agree, delimiter != " ", common)
  return max(scores, key=lambda each: scores[each], default=",")


def other_delimiter(text: str, delimiter: str) -> str:
  """Returns the most frequent delimiter of a text but one; "" without any."""
  counts = {each: text.count(each) for each in DELIMITERS if each not in (delimiter, " ")}
  best = max(counts, key=lambda each: counts[each])
  return best if counts[best] else ""


def file_format(path: Path) -> str | None:
  """Returns "Parquet" or "text", as the suffix says; None if it says nothing.

  >>> file_format(Path("clicks.csv.gz")), file_format(Path("clicks.xlsx"))
  ('text', None)
  """
  found = (n for n, each in _SUFFIXES.items() if re.search(each, path.name, re.IGNORECASE))
  return next(found, None)


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
  found = dict.fromkeys(path for pattern in patterns for path in _matching(pattern))
  examples: dict[str, Path] = {}
  for path in found:
    for suffix, advice in _OTHERS.items():
      if re.search(suffix, path.name, re.IGNORECASE):
        raise UserError(f"{path}: the suffix {path.suffix!r} is unknown. {advice}")
    examples.setdefault(file_format(path) or "text", path)  # data often have their own suffixes
  if len(examples) > 1:
    parquet = examples["Parquet"]
    shard = re.search(r"(\.\w+)-\d+-of-\d+$", str(parquet))
    of_one = parquet.parent / (f"*{shard[1]}*" if shard else f"*{parquet.suffix}")
    raise UserError(
      f"the files are of several formats ({', '.join(map(str, examples.values()))}). Name those of "
      f"one format, for example with a glob: config.files='{of_one}'"
    )
  return list(found)


def _matching(pattern: str) -> list[Path]:
  path = Path(pattern).expanduser()
  if path.is_dir():
    members = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    is_hidden = lambda file: any(part.startswith((".", "_")) for part in file.parts)
    if found := [path / file for file in members if not is_hidden(file) and file_format(file)]:
      return found
    content = f"it holds {', '.join(map(str, members[:5]))}" if members else "it is empty"
    raise MissingFileError(f"the folder {path} has no data file ({content}); {_KNOWN}.")
  if path.exists():
    return [path]
  if found := [Path(m) for m in sorted(glob.glob(str(path), recursive=True)) if Path(m).is_file()]:
    return found
  if glob.has_magic(pattern):
    raise MissingFileError(f"no file fits {pattern}. Check the folder and the pattern.")
  raise MissingFileError(f"{path} does not exist. Check the path; it is relative to {Path.cwd()}.")
