"""Adds predictions to rows, by a folder that `recipes.export` has written.

    python -m recipes.predict served < rows.csv > out.csv
    python -m recipes.predict served rows.parquet --top=5 > out.csv

Rows have the header of the training file, in any order of columns; columns that training has not
read may be there, and label, weight, split and time may be missing. They are written in their
order, as they were read, in UTF-8, with the delimiter that they have (Parquet: a comma). dlrm adds
`score`, the probability of a click; two_tower and sequence add `item_1`, `score_1`, `title_1`
(where a title is declared), `item_2`, … of raw ids. The package `recipes.serving`, which does the
same from Python, says what is done with unknown and missing values.

A row that cannot be read is an error, which names row and column. With --on_bad_row=skip it is
written without predictions; of a row with too many fields the last ones are cut off.
"""

import argparse
import collections
import os
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from . import serving
from .errors import UserError, in_one_line
from .serving import files
from .serving.columns import bad_row
from .serving.files import Chunk


class _Predictions:
  """Makes the columns that are added, and counts the rows that have something particular."""

  def __init__(
    self, model: serving.ClickModel | serving.Recommender, top: int | None, on_bad_row: str
  ):
    self._model, self._on_bad_row, self._top = model, on_bad_row, 0
    if isinstance(model, serving.Recommender):
      self._top = model.checked_top(top)
    elif top is not None:
      raise UserError("--top is for two_tower and sequence: dlrm predicts a score a row")
    self.rows = self.num_bad = self.num_popular = self.num_unknown_items = 0
    self.unknown: collections.Counter[str] = collections.Counter()  # rows by column
    self.missing: collections.Counter[str] = collections.Counter()

  def names(self) -> list[str]:
    """Returns the names of the columns."""
    if isinstance(self._model, serving.ClickModel):
      return ["score"]
    parts = ["item", "score", *(["title"] if self._model.has_titles else [])]
    return [f"{part}_{i + 1}" for i in range(self._top) for part in parts]

  def add(self, chunk: Chunk, source: str) -> Iterator[list[str]]:
    """Yields the fields that are added to each row.

    Raises:
      UserError: a row cannot be read, and is not to be skipped.
    """
    if chunk.faults and self._on_bad_row == "raise":
      index = min(chunk.faults)
      raise UserError(bad_row(source, chunk.first_row + index, chunk.faults[index]))
    self.rows += len(chunk.fields)
    faulty = np.isin(np.arange(len(chunk.fields)), list(chunk.faults))
    about: dict[str, Any] = {
      "on_bad_row": self._on_bad_row,
      "source": source,
      "first_row": chunk.first_row,
    }
    blank = [""] * len(self.names())
    if isinstance(self._model, serving.ClickModel):
      scored = self._model.score(chunk.columns, **about)
      bad = faulty | scored.is_bad
      self.num_bad += int(bad.sum())
      self.unknown.update(scored.unknown)
      self.missing.update(scored.missing)
      for score, is_bad in zip(scored.scores, bad, strict=True):
        yield blank if is_bad else [_number(score)]
      return
    answers = self._model.recommend(chunk.columns, self._top, **about)
    bad = faulty | answers.is_bad
    self.num_bad += int(bad.sum())
    self.num_popular += int((answers.is_popular & ~bad).sum())
    self.num_unknown_items += answers.num_unknown_items
    self.unknown.update(answers.unknown)
    parts = [answers.items, answers.scores]
    parts += [] if answers.titles is None else [answers.titles]
    for row, is_bad in enumerate(bad):
      fields = [[_shown(part[row, i]) for part in parts] for i in range(self._top)]
      yield blank if is_bad else [field for each in fields for field in each]

  def notes(self) -> list[str]:
    """Returns lines about the rows."""
    notes = [f"{self.rows:,} rows"]
    if self.num_bad:
      notes.append(f"{self.num_bad:,} cannot be read: no predictions")
    if self.num_popular:
      notes.append(
        f"{self.num_popular:,} without a known user, feature or history: the most popular items, "
        "no scores"
      )
    if self.num_unknown_items:
      notes.append(f"{self.num_unknown_items:,} unknown items in histories")
    for what, counts in (("unknown", self.unknown), ("missing", self.missing)):
      if counts:
        columns = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
        notes.append(f"rows with {what} values by column: {columns}")
    return notes


def _number(score: np.floating) -> str:
  return "" if np.isnan(score) else str(score)  # the fewest digits that give the same number


def _shown(value) -> str:
  if value is None:
    return ""
  return _number(value) if isinstance(value, np.floating) else str(value)


def predict(
  folder: str,
  path: str,
  out: IO[str],
  *,
  top: int | None = None,
  on_bad_row: str = "raise",
) -> list[str]:
  """Reads rows, writes them with predictions, and returns lines about them.

  Args:
    folder: that `recipes.export` has written.
    path: of the rows; "-" is the standard input.
    out: where to.
    top: how many items, of two_tower and sequence; None is 10, or all where they are fewer.
    on_bad_row: "raise", or "skip".

  Raises:
    UserError: the folder or the rows cannot be read; names row and column.
  """
  model = serving.load(folder)
  format = model.served.text_format
  predictions = _Predictions(model, top, on_bad_row)
  with files.open_rows(path, sys.stdin.buffer, format) as rows:
    writer, added = files.Writer(out, rows, format), predictions.names()
    files.check_names(rows.names, added, rows.source)
    is_written = not rows.has_header
    for chunk in rows:
      for fields, new in zip(chunk.fields, predictions.add(chunk, rows.source), strict=True):
        if not is_written:
          writer.write(rows.names, added)
          is_written = True
        writer.write(fields, new)
      out.flush()
    if not is_written:
      writer.write(rows.names, added)
  return predictions.notes()


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    f"python -m {__package__}.predict",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("served", help="the folder of an export")
  parser.add_argument("rows", nargs="?", default="-", help="a file; default: the standard input")
  parser.add_argument("--top", type=int, help="two_tower, sequence: how many items; default: 10")
  parser.add_argument("--on_bad_row", default="raise", choices=["raise", "skip"])
  arguments = parser.parse_args(argv)
  # Bytes that are no text go out as they came in.
  stdout = open(  # noqa: SIM115 - the standard output stays open
    sys.stdout.fileno(), "w", encoding="utf-8", errors="surrogateescape", newline="", closefd=False
  )
  about = {"top": arguments.top, "on_bad_row": arguments.on_bad_row}
  try:
    with in_one_line(parser, but=(BrokenPipeError,)):
      notes = predict(arguments.served, arguments.rows, stdout, **about)
      stdout.flush()
  except BrokenPipeError:  # as by `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return
  except KeyboardInterrupt:
    parser.exit(130)
  print("; ".join(notes), file=sys.stderr)


if __name__ == "__main__":
  main(sys.argv[1:])
