"""Adds predictions to rows, by a folder that `recipes.export` has written.

    python -m recipes.predict served < rows.csv > out.csv
    python -m recipes.predict served rows.parquet --top=5 --out=out.parquet

Rows are CSV, Parquet or JSON Lines, with the columns of the training file in any order; columns
that training has not read may be there, and label, weight, split and time may be missing. They are
written in their order, as CSV in UTF-8 or as Parquet, with more columns. dlrm adds `score`, the
probability of a click, or of several labels `score_<label>` each; two_tower and sequence add
`item_1`, `score_1`, `title_1` (where a title is declared), `item_2`, … of raw ids. The package
`recipes.serving`, which does the same from Python, says what is done with unknown and missing
values. Histories that dlrm has built of its log are lists in the rows.

A row that cannot be read is an error, which names row and column. With --on_bad_row=skip a value
that cannot be read leaves the row without predictions.
"""

import collections
import csv
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import errors, serving
from .errors import UserError
from .serving.rows import of_file, texts_of
from .tables.formats import free


def predict(
  folder: str, path: str, out: Any, *, top: int | None = None, on_bad_row: str = "raise"
) -> list[str]:
  """Reads rows, writes them with predictions, and returns lines about them.

  Args:
    folder: that `recipes.export` has written.
    path: of the rows; "-" is CSV from the standard input.
    out: a file for CSV, or the path of a Parquet file.
    top: how many items, of two_tower and sequence; None is 10, or all where they are fewer.
    on_bad_row: "raise", or "skip".

  Raises:
    UserError: the folder or the rows cannot be read; names row and column.
  """
  model = serving.load(folder)
  ask: Callable[..., serving.Scored | serving.Recommended]
  if isinstance(model, serving.ClickModel):
    if top is not None:
      raise UserError("--top is for two_tower and sequence: dlrm predicts a score a row")
    ask = model.score
  else:
    ask = functools.partial(model.recommend, top=model.checked_top(top))
  format, counts, row, writer = model.served.text_format, collections.Counter[str](), 1, None
  unknown, missing = collections.Counter[str](), collections.Counter[str]()  # rows by column
  with tempfile.TemporaryDirectory() as temporary:
    source = path
    if path == "-":
      path, source = str(Path(temporary) / "rows.csv"), "standard input"
      with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    for table in of_file(path, format, model.columns):
      answers = ask(table, on_bad_row=on_bad_row, source=source, first_row=row)
      for name, column in _columns(model, answers).items():
        table = table.append_column(free(name, table.column_names), column)
      if isinstance(out, str):
        writer = writer or pq.ParquetWriter(out, table.schema)
        writer.write_table(table)
      else:
        rows = zip(*(column.to_pylist() for column in texts_of(table).columns), strict=True)
        lines = csv.writer(out, lineterminator="\n")
        lines.writerows([table.column_names, *rows] if row == 1 else rows)
      row += len(table)
      counts.update(rows=len(table), bad=int(answers.is_bad.sum()))
      unknown.update(answers.unknown)
      if isinstance(answers, serving.Scored):
        missing.update(answers.missing)
      else:
        popular = int((answers.is_popular & ~answers.is_bad).sum())
        counts.update(popular=popular, unknown_items=answers.num_unknown_items)
  if writer is not None:
    writer.close()
  notes = [f"{counts['rows']:,} rows"]
  for name, note in _NOTES.items():
    notes += [f"{counts[name]:,} {note}"] * bool(counts[name])
  for what, columns in (("unknown", unknown), ("missing", missing)):
    listed = ", ".join(f"{name} {count:,}" for name, count in columns.most_common())
    notes += [f"rows with {what} values by column: {listed}"] * bool(columns)
  return notes


_NOTES = {
  "bad": "cannot be read: no predictions",
  "popular": "without a known user, feature or history: the most popular items, no scores",
  "unknown_items": "unknown items in histories",
}


def _columns(model: Any, answers: serving.Scored | serving.Recommended) -> dict[str, pa.Array]:
  """Returns the columns that are added, by name; what is missing is null."""
  if isinstance(answers, serving.Scored):
    scores = answers.scores.reshape(len(answers.scores), -1).T
    return {n: pa.array(x, from_pandas=True) for n, x in zip(model.names, scores, strict=True)}
  parts = {"item": answers.items, "score": answers.scores, "title": answers.titles}
  types = {"item": pa.string(), "score": pa.float32(), "title": pa.string()}
  return {
    f"{name}_{place + 1}": pa.array(part[:, place], types[name], from_pandas=True)
    for place in range(answers.items.shape[1])
    for name, part in parts.items()
    if part is not None
  }


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.predict", __doc__)
  parser.add_argument("served", help="the folder of an export")
  parser.add_argument("rows", nargs="?", default="-", help="a file; default: the standard input")
  parser.add_argument("--out", default="", help="a .csv or .parquet file; default: standard output")
  parser.add_argument("--top", type=int, help="two_tower, sequence: how many items; default: 10")
  parser.add_argument("--on_bad_row", default="raise", choices=["raise", "skip"])
  arguments = parser.parse_args(argv)
  about = {"top": arguments.top, "on_bad_row": arguments.on_bad_row}
  with errors.in_one_line(parser):
    if arguments.out.endswith((".parquet", ".pq")):
      notes = predict(arguments.served, arguments.rows, arguments.out, **about)
    elif arguments.out:
      with open(arguments.out, "w", encoding="utf-8", newline="") as file:
        notes = predict(arguments.served, arguments.rows, file, **about)
    else:
      notes = predict(arguments.served, arguments.rows, sys.stdout, **about)
    print("; ".join(notes), file=sys.stderr)


if __name__ == "__main__":
  main(sys.argv[1:])
