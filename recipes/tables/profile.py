"""A sample of a table's first rows in DuckDB, and what each of its columns holds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import DamagedFileError
from . import source, spec
from .spec import Format
from .values import Column as FileColumn
from .values import typed, value_of

_BAD = 0.2  # the share of rows that cannot be read, from where on the file or an option is wrong
_FINITE = "CASE WHEN abs(TRY_CAST(text AS DOUBLE)) <= 3.4e38 THEN TRY_CAST(text AS DOUBLE) END"
_SHAPES = {  # of texts that would be categories of what has an order, fields or items
  "objects, whose fields are columns as user.id": r"(\{|\[[\[{]).*",
  "numbers of a vector: declare its width": r"\[(-?\d+(\.\d+(e[-+]?\d+)?|e[-+]\d+)(, *)?)+\]",
  "list": r"\[.*\]",
  "numbers with commas": r"[+-]?([\d.]*,\d+|\d{1,3}(,\d{3})+(\.\d+)?|\d+(\.\d+)?)",
  "dates, not as 2024-12-31": r"(\d\d?[/-]\d\d?[/-](\d\d)?\d\d|\d\d?\.\d\d?\.(19|20)\d\d|"
  r"(19|20)\d\d[/.]\d\d?[/.]\d\d?)([T ,].*)?",
}


def _sql(query: str | Mapping[str, str], default: Any = "") -> Any:
  """Makes an attribute of SQL over a column's values, or the first text whose condition holds."""
  if not isinstance(query, str):
    cases = (f"WHEN {condition} THEN '{text}'" for text, condition in query.items())
    query = f"CASE {' '.join(cases)} ELSE '' END"
  return dataclasses.field(default=default, metadata={"sql": query})


@dataclasses.dataclass(frozen=True)
class Column:
  """What a column holds in the rows of a sample."""

  name: str
  number: int  # in the order of the columns
  text: str  # SQL of a value of the relation `sample` as a text, null where it is missing
  missing: float = 1.0  # share of the rows
  rows: int = _sql("sum(rows)::BIGINT", 0)  # with a value
  distinct: int = _sql("count(*)", 0)
  numbers: int = _sql("any_value(of_numbers)::BIGINT", 0)  # rows whose value is a number
  is_whole: bool = _sql("bool_and(number % 1 = 0)", False)
  has_zeros: bool = _sql(r"bool_or(regexp_matches(text, '^[+-]?0\d'))", False)  # as in 0123
  low: float = _sql("min(number)", 0.0)
  median: float = _sql("min(number) FILTER (below >= 0.5 * of_numbers)", 0.0)
  tail: float = _sql("min(number) FILTER (below >= 0.99 * of_numbers)", 0.0)
  high: float = _sql("max(number)", 0.0)
  is_dated: bool = _sql("bool_and(TRY_CAST(text AS TIMESTAMPTZ) IS NOT NULL)", False)
  shape: str = _sql({k: f"bool_and(regexp_full_match(text, '{v}'))" for k, v in _SHAPES.items()})
  separator: str = _sql(
    {k: f"sum(rows) FILTER (contains(text, '{k}')) >= 0.3 * sum(rows)" for k in "|;,"}
  )
  top: Sequence[str] = _sql("arg_min(text, (-rows, text), 6)", ())  # the most frequent values
  counts: Sequence[int] = _sql("max(rows, 6)", ())  # their rows

  @property
  def type(self) -> str:
    """The type of the values in a word."""
    if self.rows == self.numbers:
      return "number" if self.rows else "empty"
    return "time" if self.is_dated else "list" if self.shape == "list" else "text"

  @property
  def value(self) -> str:
    """SQL of a number or a time, in whose order the values are."""
    return f"TRY_CAST({self.text} AS {'DOUBLE' if self.type == 'number' else 'TIMESTAMPTZ'})"


class Sample(NamedTuple):
  """The first rows of a table."""

  con: Any  # with `sample`, and `counts`: a column's number `n`, a value `text` and its `rows`
  columns: dict[str, Column]
  rows: int
  is_all: bool  # whether the table has no other rows
  skipped: list[str]  # what is wrong with rows that cannot be read

  def ask(self, query: str) -> list[tuple]:
    """Answers a query of the relations."""
    return self.con.execute(query).fetchall()


def read(paths: Sequence[str], format: Format, num_rows: int) -> Sample:
  """Reads the first rows of files; raises DamagedFileError where many of them cannot be read."""
  con, rows, names, skipped = source.connect(), 0, list[str](), list[str]()
  for path in paths:
    file, values = source.open_file(con, path, format), {}
    names = names or list(file.columns)
    for n, name in enumerate(names):
      raw = FileColumn(name, f"CAST({file.column(name).raw} AS VARCHAR)", "VARCHAR")
      values[f"c{n}"] = value_of(spec.Category(), [raw], format.missing, place=n)
    query = typed(file.relation, values, [f"WHEN {file.bad[0]} THEN 0"])
    into = "INSERT INTO sample" if rows else "CREATE OR REPLACE TABLE sample AS"
    con.execute("DROP TABLE IF EXISTS reject_errors; DROP TABLE IF EXISTS reject_scans")
    source.asked(con, path, f"{into} SELECT * FROM ({query}) LIMIT {num_rows - rows}")
    problems = source.rejected(con, file, format, "skip")
    bad = sum(count for count, _ in problems.values())
    if no_rows := con.execute("DELETE FROM sample WHERE bad = 0").fetchall()[0][0]:
      problems[file.bad[1]] = no_rows, path
    before, rows = rows, source.count(con, "sample")
    if bad > _BAD * (rows - before + bad):
      source.rejected(con, file, format, "raise")  # says what to write
    skipped += [f"{n:,} rows: {what} (first: {first})." for what, (n, first) in problems.items()]
    if rows == num_rows:
      break
  if not rows:
    raise DamagedFileError(f"{paths[0]} has a header and no rows.")
  con.execute(
    f"CREATE TABLE counts AS SELECT n, text, count(*) AS rows, any_value({_FINITE}) AS number FROM "
    f"(SELECT unnest(range({len(names)})) AS n, unnest([{', '.join(values)}]) AS text FROM sample) "
    "WHERE text IS NOT NULL GROUP BY n, text"
  )
  queries = {f.name: f.metadata["sql"] for f in dataclasses.fields(Column) if f.metadata}
  found = con.execute(
    f"SELECT n, {', '.join(queries.values())} FROM (SELECT *, sum(rows) OVER (PARTITION BY n "
    "ORDER BY number) AS below, sum(rows) FILTER (number IS NOT NULL) OVER (PARTITION BY n) AS "
    "of_numbers FROM counts) GROUP BY n"
  )
  columns = {name: Column(name, n, f"c{n}") for n, name in enumerate(names)}
  for n, *answers in found.fetchall():
    known = {key: x for key, x in zip(queries, answers, strict=True) if x is not None}
    known["missing"] = 1 - known["rows"] / rows
    columns[names[n]] = dataclasses.replace(columns[names[n]], **known)
  return Sample(con, columns, rows, rows < num_rows, skipped)
