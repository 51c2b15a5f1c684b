"""Adds predictions to rows, by a folder that `recipes.export` has written.

    python -m recipes.predict served < rows.csv > out.csv
    python -m recipes.predict served rows.parquet --top=5 --out=out.parquet
    python -m recipes.predict served rows.csv --allow=in_stock.txt --deny=recalled.txt
    python -m recipes.predict served ids.csv --similar=item

Rows are CSV, Parquet or JSON Lines, with the columns of the training file in any order; text has a
header. Columns that training has not read may be there, and label, weight, split and time may be
missing. Rows are written in their order, as CSV in UTF-8 or as Parquet, with more columns: of dlrm
`score`, the probability of a click, and of two_tower and sequence `item_1`, `score_1`, `title_1`
(where a title is declared), `item_2`, … of raw ids.
`--similar` reads the column of items or users alone, and adds those like them. The package
`recipes.serving`, which does the same from Python, says what is done with lists, and with unknown
and missing values.
"""

import contextlib
import csv
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import errors, serving
from .errors import UserError
from .serving.rows import of_file
from .tables import spec
from .tables.formats import free
from .tables.source import reading


def predict(
  folder: str,
  path: str,
  out: Any,
  *,
  top: int | None = None,
  allow: str | None = None,
  deny: str | None = None,
  similar: str | None = None,
) -> str:
  """Reads rows, writes them with predictions, and returns a line about them.

  Args:
    folder: that `recipes.export` has written.
    path: of the rows; "-" is CSV from the standard input.
    out: a file for CSV, or the path of a Parquet file.
    top: how many items, of two_tower and sequence; None is 10, or all where they are fewer.
    allow, deny: files of raw ids, one a line: the only items to recommend, and items not to.
    similar: "item" or "user" adds those like the ones in the rows.

  Raises:
    UserError: the folder or the rows cannot be read; names row, column and value.
  """
  model = serving.load(folder)
  options = {"top": top, "allow": allow, "deny": deny, "similar": similar}
  given = [f"--{name}" for name, value in options.items() if value is not None]
  if isinstance(model, serving.ClickModel) and given:
    raise UserError(f"{given[0]} is for two_tower and sequence: dlrm predicts a score a row")
  if similar and (allow or deny):
    raise UserError("--similar ranks all items or users: leave out --allow and --deny")
  encoding = model.served.text_format.encoding
  allowed, denied = (_lines(file, encoding) for file in (allow, deny))
  rows, blank, writer = 0, 0, None
  with tempfile.TemporaryDirectory() as temporary:
    source = path
    if path == "-":
      path, source = str(Path(temporary) / "rows.csv"), "standard input"
      with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    for table in of_file(path, model.served.text_format, model.columns):
      where: Any = {"source": source, "first_row": rows + 1}
      if isinstance(model, serving.ClickModel):
        added = {"score": pa.array(model.predict(table, **where))}
      else:
        if similar is None:
          answers = model.recommend(table, top, allow=allowed, deny=denied, **where)
        elif (name := model.ids[similar]) in table.column_names:
          answers = model.similar(table[name].to_pylist(), similar, top)
        else:
          hint = spec.nearest(name, table.column_names)
          raise UserError(f"{source} has no column {name!r}, with the raw ids: {hint}")
        added = _added(similar or "item", answers)
        blank += added["score_1"].null_count
      for name, column in added.items():
        table = table.append_column(free(name, table.column_names), column)
      if isinstance(out, str):
        writer = writer or pq.ParquetWriter(out, table.schema)
        writer.write_table(table)
      else:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerows([] if rows else [table.column_names])
        lines.writerows(zip(*(column.to_pylist() for column in texts_of(table)), strict=True))
      rows += len(table)
  if writer is not None:
    writer.close()
  why = "an unknown id" if similar else "no known user, feature or history, or no item left"
  return f"{rows:,} rows" + f", {blank:,} without scores: {why}" * (blank > 0)


def _lines(path: str | None, encoding: str) -> list[str] | None:
  if path is None:
    return None
  with reading(path):
    return Path(path).read_text(encoding).removeprefix("\ufeff").split("\n")


def texts_of(table: pa.Table) -> list[pa.ChunkedArray]:
  """Returns the columns of a table as the texts that CSV holds, with lists joined by `|`."""
  columns = []
  for column in table.columns:
    if pa.types.is_nested(column.type):
      join = lambda x: "|".join(map(str, x)) if isinstance(x, list) else x and str(x)
      column = pa.chunked_array([pa.array(map(join, column.to_pylist()), pa.string())])
    columns.append(column.cast(pa.string()))
  return columns


def _added(of: str, answers: serving.Recommended) -> dict[str, pa.Array]:
  """Returns the columns of items or users that are added, by name; what is missing is null."""
  parts = {of: answers.items, "score": answers.scores, "title": answers.titles}
  type_of = lambda name: pa.float32() if name == "score" else pa.string()
  return {
    f"{name}_{place + 1}": pa.array(part[:, place], type_of(name), from_pandas=True)
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
  parser.add_argument("--allow", metavar="FILE", help="a raw id a line: recommend only these items")
  parser.add_argument("--deny", metavar="FILE", help="a raw id a line: recommend none of these")
  parser.add_argument("--similar", choices=("item", "user"), help="add those like the ones in rows")
  arguments = parser.parse_args(argv)
  out: Any = arguments.out or sys.stdout
  with errors.in_one_line(parser), contextlib.ExitStack() as stack:
    if arguments.out and not arguments.out.endswith((".parquet", ".pq")):
      out = stack.enter_context(open(out, "w", encoding="utf-8", newline=""))
    options = {name: getattr(arguments, name) for name in ("top", "allow", "deny", "similar")}
    print(predict(arguments.served, arguments.rows, out, **options), file=sys.stderr)


if __name__ == "__main__":
  main(sys.argv[1:])
