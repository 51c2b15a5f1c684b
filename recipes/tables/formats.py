"""How text files are written: what a setting says, and what their first rows show."""

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ..errors import UserError

DELIMITERS = ("::", "\t", ",", ";", "|", " ")
_SAMPLE_ROWS = 20


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
    if self.delimiter == "\\t":  # as a shell passes it on
      object.__setattr__(self, "delimiter", "\t")
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


def records(sample: str, delimiter: str, quote: str, *, strict: bool) -> Iterator[list[str]]:
  """Yields the fields of the records in a text; `strict` raises csv.Error for an open quote."""
  if len(delimiter) > 1:
    yield from (line.split(delimiter) for line in sample.splitlines() if line)
    return
  yield from csv.reader(
    io.StringIO(sample, newline=""),
    delimiter=delimiter,
    quotechar=quote or None,
    quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
    strict=strict,
  )


def find_delimiter(sample: str, path: Path, format: Format) -> str:
  """Returns the delimiter that cuts the first records into the same number of fields, or ","."""
  best, best_score = ",", (False, False, False, False, 1)
  for delimiter in DELIMITERS:
    try:
      sample_records = records(sample, delimiter, format.quote, strict=False)
      counts = [len(record) for record in islice(sample_records, _SAMPLE_ROWS) if record]
    except csv.Error:
      continue
    common = counts[0] if counts else 1
    # Where the columns are named, the first line may be another one: a title, a comment.
    if 2 * counts.count(len(format.names)) > len(counts):
      common = len(format.names)
    if common == 1:
      continue
    agree = sum(count == common or format.rest for count in counts) >= 0.8 * len(counts)
    if delimiter == " " and not agree:
      continue
    is_suffix = delimiter == "\t" and path.name.lower().removesuffix(".gz").endswith(
      (".tsv", ".tab")
    )
    score = (common == len(format.names), is_suffix, agree, delimiter != " ", common)
    best, best_score = max((best, best_score), (delimiter, score), key=lambda pair: pair[1])
  return best
