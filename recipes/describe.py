"""A first look at a table: what its columns hold, and a config that trains on it.

    python -m recipes.describe clicks.csv --label=clicked --out=my.py

reads a sample of any file that the recipes read, prints what each column holds and what it could
be used for, and writes a config, which trains as it is and is for editing. The values and the label
decide what a column is; names are hints.
--positive is the value of the label that is a click; --names are for a file without a header.
"""

import argparse
import collections
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embed.planning import aligned

from . import errors
from .errors import DamagedFileError, UserError, terminal
from .tables import source, spec
from .tables.formats import Format, file_format, free, paths
from .tables.values import Column as FileColumn
from .tables.values import literal, outcome, typed, value_of, with_point

_ROLES = ("label", "user", "item", "time")
_NUMERIC = r"[-+]?[\d.]+(e[-+]?\d+)?|[\d:/-]*\d[\d:/-]*([T ][\d:.]+Z?)?"
_FINITE = "CASE WHEN abs(TRY_CAST(text AS DOUBLE)) <= 3.4e38 THEN TRY_CAST(text AS DOUBLE) END"
_MARKS = "numbers with marks: write them plainly, or declare decimal and thousands"
_DATES = "dates: declare their format"
_IMPRESSIONS = "items, each with 0 or 1 for its click: write a row for each of them"
_SHAPES = {  # texts that are no categories: what they are, and the pattern of all of them
  "objects, whose fields are columns as user.id": r'\{".*|\{\}',
  "objects or lists of them, which no recipe reads": r"(\{|\[[\[{]|\[\]).*",
  "numbers of a vector, which no recipe reads": r"\[(-?\d+(\.\d+(e[-+]?\d+)?|e[-+]\d+)(, *)?)+\]",
  _IMPRESSIONS: r"""[\['"]*[^\s,|;'"]+[-:][01]([\s,|;'"]+[^\s,|;'"]+[-:][01])*['"\]]*""",
  "list": r"\[.*\]",
  _DATES: r"(\d\d?[/-]\d\d?[/-](\d\d)?\d\d|\d\d?\.\d\d?\.(\d\d)?\d\d|"
  r"(19|20)\d\d[/.-]\d\d?[/.-]\d\d?|[A-Z][a-z]+ \d\d?,? \d{4}|\d\d?[ -][A-Z][a-z]+[ -]\d{4})"
  r"([T ,].*)?",
  _MARKS: r"[$€£]? ?[+-]?(\d{1,3}([ '.,]\d{3})*|\d*)([.,]\d+)? ?[%€$£]?",
}
_TWO_CLICKS = r"[-:][01]\W.*[-:][01]"  # an id alone may end in -1
_WAYS: list[dict[str, Any]] = [  # options of numbers, in the order that they are tried
  {"decimal": ","},
  {"thousands": ","},
  {"thousands": "'"},
  {"thousands": " "},
  {"decimal": ",", "thousands": " "},
]
_CALENDARS = (
  "%Y/%m/%d", "%Y.%m.%d", "%Y-%m-%d", "%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%d/%m/%y", "%m/%d/%Y",
  "%m/%d/%y", "%d-%m-%Y", "%m-%d-%Y", "%b %d, %Y", "%B %d, %Y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y",
)  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_FORMATS = [f"{date}{clock}" for date in _CALENDARS for clock in _CLOCKS]
_FEW_GAPS = 0.01  # share of the rows that may lack a time, or be out of its order
_ROW_ID = 0.95  # distinct values per row from where on a column tells rows apart
_FEW_ROWS = 20  # too few to call a column an id, or its values' outcomes no chance
_REPEATS = 0.1  # of the rows, as recipes.tables.interactions says
_SAME = 1.01  # distinct pairs of an id and a value per distinct id, for a value that an id has
_SIDES = ("user", "item")
_FEATURES = ("number", "category", "bag", "sequence")
_RESERVED = (*_SIDES, "history")  # names that recipes give a meaning
_WORDS = {  # parts of names, in addition to those of `_IDS`
  "user": {"user", "uid", "visitor", "customer", "client", "member", "account", "session"},
  "item": {"item", "iid", "product", "movie", "film", "track", "song", "video", "book", "sku"},
  "time": {
    *("time", "stamp", "datetime", "date", "ts", "day", "when", "created", "at", "event", "utc"),
  },
}
_IDS = {"id", "ids", "code", "hash", "key"}
_OTHER_TIMES = {"birth", "born", "release", "released", "published", "expiry", "expires"}


# --- what columns hold ----------------------------------------------------------------------------


def _sql(query: str | Mapping[str, str], default: Any = "") -> Any:
  """Makes an attribute of SQL over a column's values, or the first text whose condition holds."""
  if not isinstance(query, str):
    cases = (f"WHEN {condition} THEN '{text}'" for text, condition in query.items())
    query = f"CASE {' '.join(cases)} ELSE '' END"
  return dataclasses.field(default=default, metadata={"sql": query})


@dataclasses.dataclass
class Column:
  """The content of a column in a sample of rows, and the kind that is proposed for it."""

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
  dated: float = _sql(  # share of the rows with a value
    "sum(rows) FILTER (TRY_CAST(text AS TIMESTAMPTZ) IS NOT NULL) / sum(rows)", 0.0
  )
  shape: str = _sql(
    {
      name: f"bool_and(regexp_full_match(text, {literal(pattern)}))"
      + f" AND bool_or(regexp_matches(text, {literal(_TWO_CLICKS)}))" * (name == _IMPRESSIONS)
      for name, pattern in _SHAPES.items()
    }
  )
  has_digits: bool = _sql(r"sum(rows) FILTER (text SIMILAR TO '.*\d.*') >= 0.5 * sum(rows)", False)
  separator: str = _sql(
    {
      mark: f"sum(rows) FILTER (contains(text, '{mark}')) >= 0.3 * sum(rows) AND "
      f"bool_and(regexp_full_match(text, '{pattern}'))"
      for mark, pattern in {**dict.fromkeys("|;,", ".*"), " ": r"\S*\d\S*( \S*\d\S*)*"}.items()
    }
  )
  top: Sequence[str] = _sql("arg_min(text, (-rows, text), 6)", ())  # the most frequent values
  counts: Sequence[int] = _sql("max(rows, 6)", ())  # their rows
  kind: str = ""  # of `spec.KINDS`; "" leaves it out
  why: str = ""  # in a few words
  options: dict[str, Any] = dataclasses.field(default_factory=dict)  # that are not the defaults
  written: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of numbers or times

  def become(self, kind: str, why: str = "", **options: Any) -> None:
    """Proposes what the column is."""
    written = {key: x for key, x in self.written.items() if kind and hasattr(spec.KINDS[kind], key)}
    self.kind, self.why, self.options = kind, why, written | options

  @property
  def type(self) -> str:
    """The type of the values in a word."""
    if self.rows == self.numbers:
      return "number" if self.rows else "empty"
    if self.dated >= 1 - _FEW_GAPS or "format" in self.written:
      return "time"
    return "list" if self.shape == "list" else "text"

  @property
  def value(self) -> str:
    """SQL of a number or a time, in whose order the values are."""
    if "format" in self.written:
      return f"try_strptime({self.text}, {literal(self.written['format'])})"
    if self.type != "number":
      return f"TRY_CAST({self.text} AS TIMESTAMPTZ)" if self.type == "time" else self.text
    return f"TRY_CAST({with_point(self.text, spec.Number(**self.written))} AS DOUBLE)"


@dataclasses.dataclass
class Sample:
  """The first rows of a table, and what is proposed for it."""

  con: Any  # with `sample`, and `counts`: a column's number `n`, a value `text` and its `rows`
  columns: dict[str, Column]
  rows: int
  notes: list[str]  # sentences for the user, of which the first are about rows that cannot be read
  settings: dict[str, Any]  # of the config, apart from files, format and columns
  recipes: Sequence[str] = ()  # that the config trains, the first being the one to try first

  def ask(self, query: str) -> list[tuple]:
    """Answers a query of the relations."""
    return self.con.execute(query).fetchall()


def read(data_files: Sequence[str], format: Format, num_rows: int) -> Sample:
  """Reads the first rows of files; raises DamagedFileError where there is none."""
  con, rows, names, notes = source.connect(), 0, list[str](), list[str]()
  for path in data_files:
    file, values, problems = source.open_file(path, format), {}, collections.Counter[str]()
    names = names or [*file.columns, *file.fields]
    raws = [file.column(name) for name in names]
    for n, column in enumerate(raws):
      text = FileColumn(column.name, f"CAST({column.raw} AS VARCHAR)", "VARCHAR")
      values[f"c{n}"] = value_of(spec.Category(), [text], format.missing, place=n)
    query = typed("raw", values, [f"WHEN {file.bad[0]} THEN 0"])
    for batch in file.batches(raws):
      con.register("raw", batch)
      con.execute(f"CREATE TABLE IF NOT EXISTS sample AS {query} LIMIT 0")
      con.execute(f"INSERT INTO sample {query} LIMIT {num_rows - rows}")
      problems[file.bad[1]] += con.execute("DELETE FROM sample WHERE bad = 0").fetchall()[0][0]
      rows = con.execute("SELECT count(*) FROM sample").fetchall()[0][0]
      if rows == num_rows:
        break
    problems.update(problem for _, problem, _ in file.unreadable)
    notes += [f"{n:,} row{'s' * (n > 1)}: {what}." for what, n in problems.items() if n]
    if rows == num_rows:
      break
  if not rows:
    why = " ".join(notes) or "it has a header alone."
    raise DamagedFileError(f"{data_files[0]} has no rows: {why}")
  con.execute(
    f"CREATE TABLE counts AS SELECT n, text, count(*) AS rows, any_value({_FINITE}) AS number FROM "
    f"(SELECT unnest(range({len(names)})) AS n, unnest([{', '.join(values)}]) AS text FROM sample) "
    "WHERE text IS NOT NULL GROUP BY n, text"
  )
  written = _written(con)
  queries = {f.name: f.metadata["sql"] for f in dataclasses.fields(Column) if f.metadata}
  found = con.execute(
    f"SELECT n, {', '.join(queries.values())} FROM (SELECT *, sum(rows) OVER (PARTITION BY n "
    "ORDER BY number) AS below, sum(rows) FILTER (number IS NOT NULL) OVER (PARTITION BY n) AS "
    "of_numbers FROM counts) GROUP BY n"
  )
  columns = {name: Column(name, n, f"c{n}") for n, name in enumerate(names)}
  for n, *answers in found.fetchall():
    known = {key: x for key, x in zip(queries, answers, strict=True) if x is not None}
    known |= {"missing": 1 - known["rows"] / rows, "written": written.get(n, {})}
    columns[names[n]] = dataclasses.replace(columns[names[n]], **known)
  settings = {"on_bad_row": "skip"} if notes else {}
  return Sample(con, columns, rows, notes, settings)


def _written(con: Any) -> dict[int, dict[str, Any]]:
  """Returns how numbers and dates are written, by column, and fills in the numbers.

  Of texts that can be read in two ways, as 1/2/2024 and 1,234, it returns nothing.
  """
  written = dict[int, dict[str, Any]]()
  ask = lambda tests, n: con.execute(f"SELECT {tests} FROM counts WHERE n = {n}").fetchone()
  matches = lambda name: f"bool_and(regexp_full_match(text, {literal(_SHAPES[name])}))"
  is_new = "bool_or(TRY_CAST(text AS TIMESTAMPTZ) IS NULL)"
  about = f"{matches(_MARKS)}, {matches(_DATES)} AND {is_new}, bool_and(number IS NOT NULL)"
  number = lambda way: _FINITE.replace("text", with_point("text", spec.Number(**way)))
  years = (f"year(try_strptime(text, {literal(each)})) BETWEEN 1900 AND 2100" for each in _FORMATS)
  is_date = ", ".join(f"bool_and(coalesce({year}, false))" for year in years)
  for n, has_marks, has_dates, are_numbers in con.execute(
    f"SELECT n, {about} FROM counts GROUP BY n"
  ).fetchall():
    if has_dates:
      formats = [each for each, fits in zip(_FORMATS, ask(is_date, n), strict=True) if fits]
      if len({each.replace("%B", "%b") for each in formats}) == 1:  # May is short and long
        written[n] = {"format": formats[0]}
    elif has_marks:
      reads = ", ".join(f"bool_and(({number(way)}) IS NOT NULL)" for way in _WAYS)
      marked = (
        "count(*) FILTER (regexp_matches(text, '[.,]')), bool_or(regexp_full_match(text, '\\d+'))"
      )
      *fits, count, has_plain = ask(f"{reads}, {marked}", n)
      ways = [way for way, fit in zip(_WAYS, fits, strict=True) if fit]
      if are_numbers and not (fits[0] and count and has_plain):
        continue
      if are_numbers or (fits[0] and fits[1]):
        # Beside 62, the point of 28.486 may mark thousands, and the comma of 28,486 often does.
        ways = _WAYS[1:2] if count >= _FEW_ROWS and has_plain and not are_numbers else []
      written[n] = ways[0] if ways else {}
      sql = number(ways[0]) if ways else "NULL"
      con.execute(f"UPDATE counts SET number = {sql} WHERE n = {n}")
  return written


# --- what columns are -----------------------------------------------------------------------------


def propose(sample: Sample, given: Mapping[str, str], positive: str = "") -> None:
  """Proposes what each column is, given names of columns by "label", "user", "item" or "time"."""
  columns, y = sample.columns, ""
  for role, name in given.items():
    if name not in columns:
      raise UserError(f"--{role}={name}: no column; {spec.nearest(name, list(columns))}")
  roles = {role: columns[name] for role, name in given.items()}
  roles |= _guessed(sample, roles)
  for column in columns.values():
    _propose_feature(sample, column, roles.get("time"))
  if "item" in given and roles["item"].shape == _IMPRESSIONS:
    raise UserError(f"--item={given['item']} holds {_IMPRESSIONS}")
  for role, column in roles.items():
    mark = "|" if column.type == "list" else column.separator.strip(",")
    column.become(role, **{"separator": mark} if role == "item" and mark else {})
  if "item" in roles:
    _find_histories(sample, roles["item"])
  if "label" in roles:
    y = _propose_label(sample, roles["label"], positive)
    _leave_out_leaks(sample, y)
  is_whole = lambda column: not column.missing and (column.type != "time" or column.dated in (0, 1))
  if absent := [column.name for column in roles.values() if not is_whole(column)]:
    sample.notes.append(f"Rows without a value are left out: {', '.join(absent)}.")
    sample.settings["on_bad_row"] = "skip"
  if {*_SIDES} <= {*roles}:
    sample.recipes = ("sequence", "two_tower") if "time" in roles else ("two_tower",)
    _complete_rankings(sample, roles, y)
  if y and {column.kind for column in columns.values()} & {*_FEATURES, *_SIDES}:
    sample.recipes = ("dlrm", *reversed(sample.recipes))
    _give_vectors(sample)


def _words(name: str) -> set[str]:
  """Returns the words of a name in lower case, as of `lastVisit_at` or `visitorid`."""
  words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
  cut = (re.sub(r"(...)(id|stamp)$", r"\1 \2", word.lower()).split() for word in words)
  return {part for word in cut for part in word}


def _is_called(column: Column, role: str) -> bool:
  return bool(core := _words(column.name) - _IDS) and core <= _WORDS[role]


def _is_moment(column: Column) -> bool:
  """Returns True if a column may be a time: dates, seconds since 1970, or days as 20241231."""
  if column.missing > _FEW_GAPS or column.distinct < 2 or _words(column.name) & _OTHER_TIMES:
    return False
  spans = [(3e8 * scale, 4.2e9 * scale) for scale in (1, 1e3, 1e6, 1e9)] + [(19e6, 21.1e6)]
  is_within = any(first <= column.low and column.high <= last for first, last in spans)
  return column.type == "time" or (column.type == "number" and is_within)


def _guessed(sample: Sample, roles: dict[str, Column]) -> dict[str, Column]:
  """Returns the user and the item, by names and values, and the finest time of a row."""
  columns = [each for each in sample.columns.values() if each not in roles.values()]
  found: dict[str, Column] = {}
  ids = [column for column in columns if _repeats_ids(column)]
  # The last of several counts: one with few gaps, a user before a session, with the most values.
  order = lambda each: (each.missing < 0.3, "session" not in _words(each.name), each.distinct)
  for column in sorted(ids, key=order):
    found |= {side: column for side in _SIDES if _is_called(column, side)}
  moments = [column for column in columns if _is_moment(column)]
  named = [column for column in moments if _is_called(column, "time")]
  if named := named or [column for column in moments if column.type == "time"]:
    first = max(named, key=lambda column: column.distinct)
    finer = [column for column in moments if _follows(sample, first.value, column)]
    found["time"] = max([first, *finer], key=lambda column: column.distinct)
  found = {role: column for role, column in found.items() if role not in roles}
  found |= _guessed_by_shape(sample, roles | found, ids)
  guessed = [f"--{side}={found[side].name}" for side in _SIDES if side in found]
  sample.notes.extend(f"Guessed by name and values: {option}." for option in guessed)
  return found


def _repeats_ids(column: Column) -> bool:
  """Returns True if a column may hold ids, each of which several rows have."""
  is_id = column.is_whole if column.type == "number" else column.type == "text" and not column.shape
  return is_id and 1 < column.distinct <= _ROW_ID * column.rows


def _guessed_by_shape(
  sample: Sample, roles: dict[str, Column], ids: Sequence[Column]
) -> dict[str, Column]:
  """Returns a user or an item that no name tells: many ids, each with many of the other side's.

  Columns that follow from another one, as an artist from a track, are features of it.
  """
  pairs = lambda a, b: sample.ask(
    f"SELECT count(DISTINCT hash({a.text}, {b.text})) FROM sample WHERE {a.text} IS NOT NULL AND "
    f"{b.text} IS NOT NULL"
  )[0][0]
  follow = lambda a, b: pairs(a, b) <= _SAME * max(a.distinct, b.distinct)
  is_named = lambda c: bool(_words(c.name) & _IDS) or c.has_zeros or c.low >= 1e8
  is_id = lambda c: is_named(c) if c.type == "number" else c.has_digits and not c.separator
  is_many = lambda c: c not in roles.values() and c.distinct**2 >= max(c.rows, 100)
  others = sorted(filter(is_many, filter(is_id, ids)), key=lambda column: -column.distinct)
  known, kept = [roles[side] for side in _SIDES if side in roles], list[Column]()
  if len(known) == 2 or len(others) > 6:  # as the hashed categories of an ad
    return {}
  for column in others:
    is_ordered = "time" in roles and _follows(sample, roles["time"].value, column)
    if is_ordered or any(follow(column, each) for each in known):
      continue
    finer = next((each for each in kept if follow(column, each)), None)
    if finer is None:
      kept.append(column)
      continue
    own, other = _words(column.name), _words(finer.name)
    is_better = own & other if other & _IDS else own & (other | _IDS)
    if is_better and 2 * column.distinct >= finer.distinct:
      kept[kept.index(finer)] = column  # the same things, as parents of variants
  if known and kept:
    named = [column for column in kept if _words(column.name) & _IDS]
    side = "item" if "user" in roles else "user"
    return {side: (named or kept)[0]} if len(named or kept) == 1 else {}
  # The most frequent item stands out more than the busiest user does.
  kept.sort(key=lambda column: column.counts[0] * column.distinct / column.rows)
  return dict(zip(_SIDES, kept, strict=True)) if len(kept) == 2 else {}


def _follows(sample: Sample, order: str, column: Column) -> bool:
  """Returns True if the values hardly ever fall, or hardly ever rise, in an order of the rows."""
  query = (
    "SELECT avg((x >= low)::INT), avg((x <= high)::INT) FROM "
    "(SELECT x, lag(x) OVER (ORDER BY t, x) AS low, lag(x) OVER (ORDER BY t, x DESC) AS high FROM "
    f"(SELECT {order} AS t, {column.value} AS x FROM sample) WHERE x IS NOT NULL)"
  )
  return max(x or 0 for x in sample.ask(query)[0]) >= 1 - _FEW_GAPS


def _propose_feature(sample: Sample, column: Column, time: Column | None) -> None:
  """Proposes what a column without a role of its own is."""
  name, distinct, rows = column.name, column.distinct, column.rows
  if not rows or (distinct == 1 and not column.missing):
    return column.become("", "constant" if rows else "no values")
  if column.type == "time" or (_is_called(column, "time") and _is_moment(column)):
    return column.become("", "another time" if time else "a time with gaps: pass it as --time")
  is_ordered = column.type in ("number", "text") and distinct > 2
  if is_ordered and time and _follows(sample, time.value, column):
    return column.become("", "follows the time")
  if column.type == "number" and column.is_whole and 2 * distinct > rows and _is_moment(column):
    return column.become("", "may be a time: pass it as --time")
  if column.type == "text" and (column.shape or column.numbers > 0.9 * rows):
    return column.become("", column.shape or "numbers and texts: name those in format.missing")
  options: dict[str, Any] = {"column": name} if name in _RESERVED else {}
  if column.type == "list":
    return column.become("bag", **options)
  if column.separator and column.type == "text":
    parts = f"SELECT unnest(string_split(text, '{column.separator}')) AS part FROM counts"
    query = f"SELECT count(DISTINCT trim(part)), count(*) FROM ({parts} WHERE n = {column.number})"
    of_values, total = sample.ask(query)[0]
    if 2 <= of_values < distinct and total >= 2 * of_values:
      return column.become("bag", separator=column.separator, **options)
  is_number = column.type == "number" and not column.has_zeros
  is_id = bool(_words(name) & _IDS) or any(_is_called(column, side) for side in _SIDES)
  is_id |= max(abs(column.low), abs(column.high)) >= 1e10
  is_row = not is_number or (column.is_whole and (is_id or _follows(sample, "rowid", column)))
  if is_row and distinct >= _ROW_ID * rows and rows >= _FEW_ROWS:
    return column.become("", "unique per row")
  is_few = distinct <= 2 or (distinct <= 32 and 5 * distinct <= rows)
  if is_number and distinct > 2 and not (column.is_whole and (is_few or is_id)):
    is_positive = column.low >= -column.high / 100 and column.high >= 20
    if is_positive and column.tail > 5 * max(column.median, 1.0):
      return column.become("number", "heavy tail", log=True, **options)
    return column.become("number", **options)
  options |= {"min_count": 5} if distinct > 20_000 else {}
  return column.become("category", **options)


def _find_histories(sample: Sample, item: Column) -> None:
  """Turns bags that mostly hold items into histories, which share the table of the item."""
  known = f"part IN (SELECT text FROM counts WHERE n = {item.number})"
  for column in sample.columns.values():
    if column.kind == "bag" and "separator" in column.options:
      texts = f"SELECT text FROM counts WHERE n = {column.number}"
      parts = f"SELECT unnest(string_split(text, '{column.options['separator']}')) FROM ({texts})"
      (share,) = sample.ask(f"SELECT avg(({known})::INT) FROM ({parts}) AS parts(part)")[0]
      if share >= 0.5:
        column.become("sequence", "a history of items", **column.options, table=item.name)


def _propose_label(sample: Sample, column: Column, positive: str) -> str:
  """Proposes the label; returns SQL of its outcome, 1 for a click and 0 for none."""
  texts, options, why = column.top, dict[str, Any](), ""
  are_flags = {text.lower() for text in texts} <= {*spec.CLICKS, *spec.NO_CLICKS}
  if positive:
    options, why = {"positive": (positive,)}, f": {positive} is a click, and all else is none"
  elif column.type == "number" and not are_flags:
    least = column.median
    if least == column.low:  # of more than half of the rows
      above = f"FROM counts WHERE n = {column.number} AND number > {least}"
      least = sample.ask(f"SELECT coalesce(min(number), {least}) {above}")[0][0]
    options = {"at_least": int(least) if least.is_integer() else least}
    why = f": {options['at_least']} or more is a click, by the median"
  elif column.distinct == 2 and not are_flags:
    options, why = {"positive": (texts[1],)}, f": {texts[1]}, the rarer value, is a click"
  column.become("label", **options)
  y = outcome(spec.Label(**column.options), column.text)
  clicks, rows = sample.ask(f"SELECT coalesce(sum({y}), 0)::BIGINT, count({y}) FROM sample")[0]
  if clicks in (0, rows):
    listed = ", ".join(texts[:5]) + " …" * (column.distinct > 5)
    raise UserError(
      f"--label={column.name} has {column.distinct:,} values ({listed}), and needs clicks and "
      "others: say which is a click, as --positive=VALUE"
    )
  sample.notes.append(f"{clicks / rows:.2%} of the rows are clicks{why}.")
  return y


def _leave_out_leaks(sample: Sample, y: str) -> None:
  """Leaves out columns that alone tell the outcome, with the values of few rows taken together."""
  columns, leaks = [*sample.columns.values()], list[str]()
  texts = ", ".join(each.text for each in columns)
  groups = (
    "SELECT n, sum(rows) AS rows, sum(clicks) AS clicks FROM (SELECT n, text, count(*) AS rows, "
    f"sum(y) AS clicks FROM (SELECT {y} AS y, unnest(range({len(columns)})) AS n, "
    f"unnest([{texts}]) AS text FROM sample) WHERE y IS NOT NULL AND text IS NOT NULL GROUP BY n, "
    f"text) GROUP BY n, CASE WHEN rows >= {_FEW_ROWS} THEN text END"
  )
  errors = "least(sum(clicks), sum(rows - clicks)), sum(least(clicks, rows - clicks))"
  (rate,) = sample.ask(f"SELECT avg({y}) FROM sample")[0]
  for n, rows, clicks, rare, wrong in sample.ask(
    f"SELECT n, sum(rows), sum(clicks), {errors} FROM ({groups}) GROUP BY n ORDER BY n"
  ):
    # Where all rows with a value have one outcome, the other one must be no chance.
    absent = rows * (1 - rate if clicks else rate)
    is_leak = wrong <= 0.01 * rare if rare else absent >= _FEW_ROWS
    if is_leak and columns[n].kind in _FEATURES:
      columns[n].become("", "leak of the label")
      leaks.append(columns[n].name)
  if leaks:
    known = "Declare one only if its value is known before the outcome is."
    sample.notes.append(f"Left out, as they tell the outcome: {', '.join(leaks)}. {known}")


def _complete_rankings(sample: Sample, roles: dict[str, Column], y: str) -> None:
  """Gives features their side, leaves out others without a label, and keeps many repeats."""
  for side, ids in ((side, roles[side]) for side in _SIDES):
    counts = [f"count(DISTINCT hash({ids.text}, {c.text}))" for c in sample.columns.values()]
    query = f"SELECT {', '.join(counts)} FROM sample WHERE {ids.text} IS NOT NULL"
    for column, count in zip(sample.columns.values(), sample.ask(query)[0], strict=True):
      if count <= _SAME * ids.distinct and ids.rows - ids.distinct >= _FEW_ROWS:
        is_own = column.kind not in _SIDES and column.distinct >= _ROW_ID * ids.distinct
        if side == "item" and is_own and _words(column.name) & {"title", "name"}:
          column.become("title")
        elif column.kind in _FEATURES:
          column.options["side"] = side
  others = list[str]()
  for column in sample.columns.values():
    if column.kind in _FEATURES and "side" not in column.options and not y:
      column.become("", "varies by row")
      others.append(column.name)
  if not y:
    candidates = f" ({', '.join(others)})" * bool(others)
    sample.notes.append(
      f"Every row counts as liked. --label=COLUMN{candidates} counts clicks alone."
    )
  user, item = (roles[side].text for side in _SIDES)
  clicked = f"{user} IS NOT NULL AND {item} IS NOT NULL" + f" AND {y} = 1" * bool(y)
  pairs = f"SELECT count(*), count(DISTINCT hash({user}, {item})) FROM sample WHERE {clicked}"
  rows, distinct = sample.ask(pairs)[0]
  if rows - distinct > _REPEATS * rows:
    sample.settings["exclude_seen"] = False
    share = f"{1 - distinct / rows:.0%} of the rows repeat a user and an item"
    sample.notes.append(f"{share}, so exclude_seen is False: they can be recommended again.")


def _give_vectors(sample: Sample) -> None:
  """Gives one of the numbers vectors where no other feature has any, which dlrm needs."""
  columns = sample.columns.values()
  numbers = [column for column in columns if column.kind == "number"]
  if numbers and not {column.kind for column in columns} & {"category", "bag", *_SIDES}:
    column = max(numbers, key=lambda column: column.distinct)
    column.options["buckets"] = 16
    sample.notes.append(f"All features are numbers: the intervals of {column.name} get vectors.")


# --- what is shown and written --------------------------------------------------------------------


def report(sample: Sample) -> str:
  """Returns the columns as a table, and the notes below it."""
  rows = [["column", "type", "distinct", "missing", "proposed", "values"]]
  for name, column in sample.columns.items():
    options = [f"{key}={value!r}" for key, value in column.options.items()]
    said = ", ".join([column.kind or "left out", *options]) + f": {column.why}" * bool(column.why)
    missing = f"{column.missing:.0%}" if column.missing else "-"
    cells = [name, column.type, f"{column.distinct:,}", missing, said]
    rows.append([_cut(cell, 36) for cell in cells] + [_values(column)])
  lines = [_cut(line, 100) for line in aligned(rows, left=range(6)).splitlines()]
  return "\n".join([*lines, "", *sample.notes]).rstrip()


def _values(column: Column) -> str:
  """Returns the range of the values, or the most frequent ones."""
  if column.type == "number" and column.distinct > 20:
    return " … ".join(f"{number:.10g}" for number in (column.low, column.median, column.high))
  pairs = zip(column.top, column.counts, strict=True)
  return ", ".join(f"{_cut(text, 30)} {count / column.rows:.0%}" for text, count in pairs)


def _cut(text: str, length: int) -> str:
  text = re.sub(r"\s", " ", text)
  return text if len(text) <= length else f"{text[: length - 1]}…"


def config(sample: Sample, settings: Mapping[str, Any], command: str) -> str:
  """Returns a Python file whose `get_config()` declares the table."""
  columns = []
  for name, column in sample.columns.items():
    value = {"kind": column.kind, **column.options} if column.options else column.kind
    left = f"      # {name!r}: left out, {column.why}"
    declared = free(f"{name}_", sample.columns) if "column" in column.options else name
    columns.append(f"      {declared!r}: {value!r}," if column.kind else left)
  groups = (settings, sample.settings)
  before, after = ([f"    {name!r}: {x!r}," for name, x in each.items()] for each in groups)
  lines = ['"""The table as first proposed; written by the command below."""', ""]
  lines += [f"# {repr(command)[1:-1]}", "", "", "def get_config():", "  return {", *before]
  return "\n".join([*lines, "    'columns': {", *columns, "    },", *after, "  }", ""])


def run(arguments: argparse.Namespace, command: str) -> Iterator[str]:
  """Yields the blocks of text to print, and writes the config."""
  out, files = arguments.out, arguments.files
  given = {key: getattr(arguments, key) for key in ("delimiter", "encoding", "quote")}
  given["names"] = tuple(name.strip() for name in arguments.names.split(",") if arguments.names)
  format = {key: value for key, value in given.items() if value != getattr(Format(), key)}
  data_files = paths(files)
  sample = read(data_files, Format(**format), arguments.rows)
  names = list(sample.columns)
  numeric = sum(bool(re.fullmatch(_NUMERIC, name)) for name in names)
  again = sample.ask(f"SELECT count(*) FROM counts WHERE text = {literal(names)}[n + 1]")[0][0]
  has_header = file_format(data_files[0]) == "text" and "names" not in format
  if has_header and (2 * numeric > len(names) or 1 < again > len(names) / 3):
    called = ",".join(f"c{place}" for place in range(1, len(names) + 1))
    raise UserError(f"{data_files[0]}: the first line seems a row: name them, as --names={called}")
  roles = {role: name for role in _ROLES if (name := getattr(arguments, role))}
  propose(sample, roles, arguments.positive)
  table = files[0] if len(files) == 1 else tuple(files)
  rows = f"{'all' if sample.rows < arguments.rows else 'the first'} {sample.rows:,} rows"
  yield f"{', '.join(files)}: {len(names)} columns, {rows}"
  yield report(sample)
  if not sample.recipes:
    left = [f"{c.name} is left out: {c.why}" for c in sample.columns.values() if not c.kind]
    advice = "give --label, the column to predict, or --user and --item"
    raise UserError(f"nothing to train on: {advice}{'; '.join(['', *left])}")
  if out:
    settings = {"files": table} | ({"format": format} if format else {})
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with open(out, "x", encoding="utf-8") as file:  # a config that has been edited is kept
      file.write(config(sample, settings, command))
  lines = [f"{out} is written. Train on it:" if out else "--out=my.py writes a config, for", ""]
  for recipe in sample.recipes:
    workdir = f"runs/{Path(out).stem or 'my'}" + f"_{recipe}" * (recipe != sample.recipes[0])
    quoted = map(shlex.quote, (out or "my.py", workdir))
    lines.append("python -m {}.{} --config={} --workdir={}".format(__package__, recipe, *quoted))
  yield "\n".join(lines)


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.describe", __doc__)
  parser.add_argument("files", nargs="+", metavar="FILE", help="a file, a folder or a pattern")
  for option in (*_ROLES, "positive", "out", "names", "delimiter"):
    parser.add_argument(f"--{option}", default="")
  parser.add_argument("--encoding", default="utf-8")
  parser.add_argument("--quote", default='"', help="around fields; '' gives quotes no meaning")
  parser.add_argument("--rows", type=int, default=200_000, help="of the sample; %(default)s")
  command = shlex.join(["python", "-m", f"{__package__}.describe", *argv])
  with errors.in_one_line(parser):
    for block in run(parser.parse_args(argv), command):
      print(terminal(block), end="\n\n", flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
