"""Adds predictions to rows, by a folder that `recipes.export` has written.

    python -m recipes.predict served < rows.csv > out.csv
    python -m recipes.predict served rows.parquet --top=5 > out.csv

Rows have the header of the training file, in any order of columns; columns that training has not
read may be there, and label, weight, split and time may be missing. They are written in their
order, as they were read, in UTF-8, with the delimiter that they have (Parquet: a comma). dlrm adds
`score`, the probability of a click, or of several labels `score_<label>` each; two_tower and
sequence add `item_1`, `score_1`, `title_1` (where a title is declared), `item_2`, … of raw ids. The
package `recipes.serving`, which does the same from Python, says what is done with unknown and
missing values.

Histories that dlrm has built of its log are lists in the rows, or with --log=log.csv what the user
of a row did before it in that log, which has the columns of the training file.

A row that cannot be read is an error, which names row and column. With --on_bad_row=skip it is
written without predictions; of a row with too many fields the last ones are cut off.
"""

import collections
import functools
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from . import errors, serving
from .errors import UserError
from .serving.rows import Chunk, Writer, bad_row, open_rows


def predict(
  folder: str,
  path: str,
  out: IO[str],
  *,
  top: int | None = None,
  on_bad_row: str = "raise",
  log: str = "",
) -> list[str]:
  """Reads rows, writes them with predictions, and returns lines about them.

  Args:
    folder: that `recipes.export` has written.
    path: of the rows; "-" is the standard input.
    top: how many items, of two_tower and sequence; None is 10, or all where they are fewer.
    on_bad_row: "raise", or "skip".
    log: of earlier rows, which histories of dlrm are taken of; "" takes lists in the rows.

  Raises:
    UserError: the folder or the rows cannot be read; names row and column.
  """
  model = serving.load(folder)
  ask: Callable[..., serving.Scored | serving.Recommended]
  if isinstance(model, serving.ClickModel):
    if top is not None:
      raise UserError("--top is for two_tower and sequence: dlrm predicts a score a row")
    names, ask = list(model.names), model.score
    if log:
      with open_rows(log, sys.stdin.buffer, model.served.text_format) as rows:
        for chunk in rows:
          _refuse(rows.source, chunk)
          model.remember(chunk.columns, source=rows.source, first_row=chunk.first_row)
  else:
    if log:
      raise UserError("--log is for dlrm: two_tower and sequence have the users' histories")
    top = model.checked_top(top)
    parts = ["item", "score", *(["title"] if model.has_titles else [])]
    names = [f"{part}_{i + 1}" for i in range(top) for part in parts]
    ask = functools.partial(model.recommend, top=top)
  format, counts = model.served.text_format, collections.Counter[str]()
  unknown, missing = collections.Counter[str](), collections.Counter[str]()  # rows by column
  with open_rows(path, sys.stdin.buffer, format) as rows:
    writer = Writer(out, rows, names, format)
    for chunk in rows:
      if on_bad_row == "raise":
        _refuse(rows.source, chunk)
      answers = ask(
        chunk.columns, on_bad_row=on_bad_row, source=rows.source, first_row=chunk.first_row
      )
      is_bad = answers.is_bad | np.isin(np.arange(len(chunk.fields)), list(chunk.faults))
      writer.write_header()  # not before the first rows are known to be good
      columns = _columns(answers)
      for row, fields in enumerate(chunk.fields):
        writer.write(fields, ["" if is_bad[row] else _shown(column[row]) for column in columns])
      out.flush()
      counts.update(rows=len(chunk.fields), bad=int(is_bad.sum()))
      unknown.update(answers.unknown)
      if isinstance(answers, serving.Scored):
        missing.update(answers.missing)
      else:
        popular = int((answers.is_popular & ~is_bad).sum())
        counts.update(popular=popular, unknown_items=answers.num_unknown_items)
    writer.write_header()
  notes = [f"{counts['rows']:,} rows"]
  for name, note in _NOTES.items():
    notes += [f"{counts[name]:,} {note}"] * bool(counts[name])
  for what, of_columns in (("unknown", unknown), ("missing", missing)):
    listed = ", ".join(f"{name} {count:,}" for name, count in of_columns.most_common())
    notes += [f"rows with {what} values by column: {listed}"] * bool(of_columns)
  return notes


_NOTES = {
  "bad": "cannot be read: no predictions",
  "popular": "without a known user, feature or history: the most popular items, no scores",
  "unknown_items": "unknown items in histories",
}


def _refuse(source: str, chunk: Chunk) -> None:
  """Raises UserError for the first row that cannot be read."""
  if chunk.faults:
    index = min(chunk.faults)
    raise bad_row(source, chunk.first_row + index, chunk.faults[index])


def _columns(answers: serving.Scored | serving.Recommended) -> list[np.ndarray]:
  """Returns the columns that are added."""
  if isinstance(answers, serving.Scored):
    return list(answers.scores.T.reshape(-1, len(answers.scores)))
  parts = [answers.items, answers.scores, answers.titles]
  return [part[:, i] for i in range(answers.items.shape[1]) for part in parts if part is not None]


def _shown(value: Any) -> str:
  if value is None or (isinstance(value, np.floating) and np.isnan(value)):
    return ""
  return str(value)  # of a number the fewest digits that give the same one


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.predict", __doc__)
  parser.add_argument("served", help="the folder of an export")
  parser.add_argument("rows", nargs="?", default="-", help="a file; default: the standard input")
  parser.add_argument("--top", type=int, help="two_tower, sequence: how many items; default: 10")
  parser.add_argument("--log", default="", help="dlrm: a file of earlier rows, for histories")
  parser.add_argument("--on_bad_row", default="raise", choices=["raise", "skip"])
  arguments = parser.parse_args(argv)
  # Bytes that are no text go out as they came in.
  stdout = open(  # noqa: SIM115 - the standard output stays open
    sys.stdout.fileno(), "w", encoding="utf-8", errors="surrogateescape", newline="", closefd=False
  )
  about = {"top": arguments.top, "on_bad_row": arguments.on_bad_row, "log": arguments.log}
  try:
    with errors.in_one_line(parser):
      notes = predict(arguments.served, arguments.rows, stdout, **about)
      stdout.flush()
      print("; ".join(notes), file=sys.stderr)
  except KeyboardInterrupt:
    parser.exit(130)


if __name__ == "__main__":
  main(sys.argv[1:])
