"""The meaning of a raw value of a file, as SQL: texts, numbers, times, lists and labels."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import DamagedFileError
from . import spec

_SPACES = ("' '", "chr(9)", "chr(10)", "chr(13)")
_LARGEST = "3.4028234663852886e38"  # float32
_TEXTS = ("VARCHAR", "JSON", "BLOB")
_CLOCKS = ("%H:%M:%S.%f", "%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p")
_ITEM = (
  r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,\[\]\s'"][^,\[\]]*"""  # of a list as Python writes it
)
MISSING = 10_000  # added to `bad` of a value that is missing where it must not be
SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}


def literal(value: object) -> str:
  """Returns a value as SQL writes it."""
  if isinstance(value, list | tuple):
    return f"[{', '.join(map(literal, value))}]"
  if isinstance(value, int | float):
    return repr(value) if np.isfinite(value) else "CAST('infinity' AS DOUBLE)"
  return "'" + str(value).replace("'", "''") + "'"


def identifier(name: str) -> str:
  """Returns the name of a column as SQL writes it."""
  return '"' + name.replace('"', '""') + '"'


def among(text: str, values: Sequence[str | float]) -> str:
  """Returns the SQL of a value among others; DuckDB would make a join of `IN`, with its memory."""
  return f"list_contains({literal(list(values))}, {text})"


def is_time(stored: str) -> bool:
  """Returns True if a type of DuckDB is a date or a time."""
  return stored.startswith("TIMESTAMP") or stored == "DATE"


def trimmed(raw: str, stored: str) -> str:
  """Returns the SQL of a value as a text without spaces around."""
  if stored in ("FLOAT", "DOUBLE"):
    return f"CASE WHEN NOT isnan({raw}) THEN CAST({raw} AS VARCHAR) END"
  if is_time(stored):
    kind = "VARCHAR" if stored == "DATE" else "TIMESTAMP"
    return f"replace(CAST(CAST({raw} AS {kind}) AS VARCHAR), ' ', 'T')"
  if stored not in _TEXTS:
    return f"CAST({raw} AS VARCHAR)"
  raw = f"TRY(decode({raw}))" if stored == "BLOB" else raw
  ends = " OR ".join(f"suffix({raw}, {space})" for space in _SPACES)
  # `trim` takes as long as all else, and values hardly ever begin or end in spaces.
  return f"CASE WHEN {raw} < '!' OR {ends} THEN trim({raw}, {' || '.join(_SPACES)}) ELSE {raw} END"


def present(text: str, missing: Sequence[str]) -> str:
  """Returns the SQL of a text that is null where it means no value."""
  absent = sorted({"", *missing, *map(spec.as_text, missing)})
  longest = max(len(each.encode()) for each in absent)
  return f"CASE WHEN strlen({text}) > {longest} OR NOT {among(text, absent)} THEN {text} END"


def _spelled(text: str) -> str:
  """Returns the SQL of a text in one spelling: 12 for 12.0, true for True."""
  whole = rf"regexp_replace({text}, {literal(spec.WHOLE)}, '\1\2')"
  is_flag = among(f"lower({text})", ("true", "false"))
  return (
    f"CASE WHEN contains({text}, '.0') THEN {whole} "
    f"WHEN strlen({text}) < 6 AND {is_flag} THEN lower({text}) ELSE {text} END"
  )


def _each(items: str, expression: str) -> str:
  """Returns the SQL of a list with an expression of `x`, an item, in place of each."""
  return f"list_transform({items}, lambda x: {expression})"


class Column(NamedTuple):
  """A column of a file: its name, an expression, and its type."""

  name: str
  raw: str
  stored: str


class Value(NamedTuple):
  """A declared column of a query.

  Attributes:
    steps: expressions by name, each of those in the step before: texts, texts that are null where
      missing, and what the value is converted to. DuckDB would compute nested ones again and again.
    sql: the value, null where there is none.
    bad: a condition of rows whose value has no meaning.
    problem: what is wrong with such a value, and what to write.
    raw: the value as it is, for the error text.
  """

  steps: tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]
  sql: str
  bad: str = "false"
  problem: str = ""
  raw: str = "NULL"


def value_of(
  kind: spec.Kind,
  columns: Sequence[Column],
  missing: Sequence[str],
  *,
  place: int = 0,
) -> Value:
  """Returns how a declared column is read.

  Args:
    columns: of the files, that it reads.
    missing: texts that mean no value.
    place: a number for the names of the steps.

  Raises:
    DamagedFileError: the column is stored in a way that cannot be read so.
  """
  (name, raw, stored), *_ = columns
  is_list = stored.endswith("]")
  if re.match("STRUCT|MAP|UNION", stored) or stored.endswith("[][]"):
    raise DamagedFileError(f"column {name!r} holds {stored}: store its fields as columns")
  if is_list and not kind.is_list:
    raise DamagedFileError(f"column {name!r} holds lists: declare it as a bag or a sequence")
  if is_time(stored) and isinstance(kind, spec.Number | spec.Weight):
    raise DamagedFileError(f"column {name!r} holds times: declare it as time")
  texts = {f"t{place}_{n}": trimmed(*column[1:]) for n, column in enumerate(columns) if not is_list}
  is_integer = re.fullmatch("U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?", stored) is not None
  is_plain = is_integer and not _numbers(missing)
  filled = {f"m{t[1:]}": t if is_plain else present(t, missing) for t in texts}
  typed, text = f"x{place}", f"m{place}_0"

  def value(converted: str, sql: str = typed, bad: str = "false", problem: str = "") -> Value:
    shown = ", ".join(f"CAST({column.raw} AS VARCHAR)" for column in columns)
    return Value(
      (texts, filled, {typed: converted}), sql, bad, problem, f"concat_ws(', ', {shown})"
    )

  if isinstance(kind, spec.Time):
    time, problem = _time(kind, columns, [*filled], _numbers(missing))
    return value(time, bad=f"{typed} IS NULL", problem=problem)
  if isinstance(kind, spec.Number | spec.Weight):
    number = f"n{place}"
    plain, written, converted = _number(columns[0], missing, number, text, kind)
    texts, filled = {number: plain}, {text: written}
    within = f"CASE WHEN abs({typed}) <= {_LARGEST} THEN {typed} END"
    is_number = f"NOT isnan({number}) AND abs({number}) > {_LARGEST}"
    bad = f"({text} IS NOT NULL OR ({is_number})) AND {within} IS NULL"
    problem = "is no number"
    if isinstance(kind, spec.Weight):
      bad = f"coalesce(NOT {typed} BETWEEN 0 AND {_LARGEST}, true)"
      problem = "is no weight, a number of 0 or more"
    else:
      problem += " within float32. With decimal commas, declare decimal=','"
      problem += "; with commas between thousands, thousands=','"
    return value(converted, within, bad, problem)
  if kind.is_list:
    cut = _items(columns[0], text, getattr(kind, "separator", ""))
    items = _each(cut, present("x", missing))
    spelled = _each(typed, _spelled("x"))
    # A news log writes what it has shown as `N1-0 N2-1`, where N2 was clicked.
    shown = _each(typed, "regexp_full_match(x, '.+[-:][01]')")
    bad = f"coalesce(len({typed}) > 1 AND list_bool_and({shown}), false)"
    sql = f"coalesce(list_filter({spelled}, lambda x: x IS NOT NULL), [])"
    problem = "holds items, each with 0 or 1 for its click: write a row for each of them"
    return value(items, sql, bad, problem)
  spelled = text if is_integer else _spelled(text)
  if _numbers(missing):  # -999.0 is missing where -999 is
    spelled = present(f"({spelled})", missing)
  if isinstance(kind, spec.Label):
    return value(spelled, outcome(kind, typed), *_bad_label(kind, typed))
  if isinstance(kind, spec.Split):
    is_none = f"NOT coalesce({among(typed, list(SPLIT_NAMES))}, false)"
    return value(f"lower({text})", typed, is_none, "is no split: write train, valid or test")
  is_damaged = f"{raw} IS NOT NULL AND TRY(decode({raw})) IS NULL"
  bad = is_damaged if stored == "BLOB" else "false"
  return value(spelled, typed, bad, "is not UTF-8")


def _number(
  column: Column, missing: Sequence[str], number: str, text: str, kind: Any
) -> tuple[str, str, str]:
  """Returns the SQL of a plain number, of the text of another value, and of the number of both.

  Most texts are plain numbers, and only the others are trimmed and compared.
  """
  plain, written = f"CAST({column.raw} AS DOUBLE)", "CAST(NULL AS VARCHAR)"
  other, absent = with_point(text, kind), _numbers(missing)
  if column.stored in _TEXTS:
    raw = f"TRY(decode({column.raw}))" if column.stored == "BLOB" else column.raw
    plain = f"TRY_CAST({raw} AS DOUBLE)" if other == text else "CAST(NULL AS DOUBLE)"
    trim = f"trim({raw}, {' || '.join(_SPACES)})"
    written = (
      f"CASE WHEN coalesce(NOT abs({number}) <= {_LARGEST}, true) THEN {present(trim, missing)} END"
    )
  flag = f"CASE lower({text}) WHEN 'true' THEN 1 WHEN 'false' THEN 0 END"
  converted = f"coalesce({number}, TRY_CAST({other} AS DOUBLE), {flag})"
  if absent:
    converted = f"(CASE WHEN NOT {among(converted, absent)} THEN {converted} END)"
  return plain, written, converted


def with_point(text: str, kind: Any) -> str:
  """Returns the SQL of a number's text with a decimal point alone; null where its marks are wrong.

  Args:
    kind: a number, whose `decimal` and `thousands` are the marks.
  """
  decimal, thousands = getattr(kind, "decimal", "."), getattr(kind, "thousands", "")
  if decimal == "." and not thousands:
    return text
  thousands = thousands or "."
  groups = rf"[1-9]\d{{0,2}}({re.escape(thousands)}\d{{3}})+"
  pattern = rf"[+-]?({groups}|\d*)({re.escape(decimal)}\d+)?(e[+-]?\d+)?"
  plain = f"replace(replace({text}, {literal(thousands)}, ''), {literal(decimal)}, '.')"
  return f"CASE WHEN regexp_full_match(lower({text}), {literal(pattern)}) THEN {plain} END"


def _numbers(missing: Sequence[str]) -> list[float]:
  return [float(text) for text in missing if re.fullmatch(r"[-+]?\d+(\.\d*)?", text)]


def _items(column: Column, text: str, separator: str) -> str:
  """Returns the SQL of a list of texts: a list, a list as JSON or Python writes it, or cut text."""
  if column.stored.endswith("]"):
    return _each(column.raw, trimmed("x", column.stored.rpartition("[")[0]))
  cut = f"string_split({text}, {literal(separator)})" if separator else f"[{text}]"
  # Without its quotes, and what is escaped in them.
  bare = "regexp_replace(x[2:-2], '\\\\(.)', '\\1', 'g')"
  unquoted = f"CASE WHEN x[1] IN (chr(39), chr(34)) THEN {bare} ELSE x END"
  python = _each(f"regexp_extract_all({text}, {literal(_ITEM)})", unquoted)
  listed = f"coalesce(TRY(from_json({text}, '[\"VARCHAR\"]')), {python})"
  is_listed = f"prefix({text}, '[') AND suffix({text}, ']')"
  items = f"CASE WHEN {is_listed} THEN {listed} WHEN {text} IS NOT NULL THEN {cut} END"
  return _each(items, trimmed("x", "VARCHAR"))


def _time(
  kind: spec.Time, columns: Sequence[Column], texts: Sequence[str], absent: Sequence[float]
) -> tuple[str, str]:
  """Returns the SQL of times, and what is wrong with one that is null.

  Times are microseconds since 1970, in UTC where no zone is named, or numbers as they are.
  """
  (name, raw, stored), *_ = columns
  if len(kind.columns) == 2:
    date, clock = texts
    day = f"try_strptime({date}, {literal(kind.format or '%Y%m%d')})"
    if not kind.format:
      day = f"coalesce({day}, TRY_CAST({date} AS TIMESTAMP))"
    within = f"epoch_us(CAST(try_strptime({clock}, {literal(_CLOCKS)}) AS TIME))"
    within = f"coalesce(TRY_CAST({clock} AS DOUBLE) * 1000, {within})"
    return f"epoch_us({day}) + CAST({within} AS BIGINT)", "is no date with a time or milliseconds"
  if kind.columns:
    parts = [f"TRY_CAST({text} AS DOUBLE)" for text in texts] + ["0"] * (6 - len(texts))
    whole = (f"CASE WHEN {part} = trunc({part}) THEN CAST({part} AS BIGINT) END" for part in parts)
    return f"epoch_us(TRY(make_timestamp({', '.join(whole)})))", "is no date"
  if is_time(stored):
    zoned = "TIMESTAMPTZ" if "TIME ZONE" in stored else "TIMESTAMP"
    return f"epoch_us(CAST({raw} AS {zoned}))", "is missing"
  if kind.format:
    time = f"epoch_us(try_strptime({texts[0]}, {literal(kind.format)}))"
    return time, f"is no time of the format {kind.format!r}"
  number, date = (f"TRY_CAST({texts[0]} AS {kind})" for kind in ("DOUBLE", "TIMESTAMPTZ"))
  is_given = f"isfinite({number})" + f" AND NOT {among(number, absent)}" * bool(absent)
  return f"coalesce(CASE WHEN {is_given} THEN {number} END, epoch_us({date}))", (
    "is no time: write a number, 2024-12-31 or 2024-12-31T23:59:59, or declare the format of "
    f"{name!r}, as format='%d.%m.%Y'"
  )


def _bad_label(kind: spec.Label, text: str) -> tuple[str, str]:
  """Returns the condition of a label's text that says nothing, and what to write."""
  problem = (
    "is neither 0 nor 1. Give the values that are clicks as positive of the label in "
    "config.columns, or the smallest as at_least"
  )
  if kind.at_least is not None:
    problem = "is no number"
  is_kept = f" AND NOT {among(text, kind.drop)}" * bool(kind.drop)
  return f"{text} IS NOT NULL{is_kept} AND ({outcome(kind, text)}) IS NULL", problem


def outcome(kind: spec.Label, text: str) -> str:
  """Returns the SQL of 1 for a click and 0 for none, given that of a label's text."""
  if kind.at_least is not None:
    number = f"TRY_CAST({with_point(text, kind)} AS DOUBLE)"
    return f"CASE WHEN isfinite({number}) THEN CAST({number} >= {kind.at_least!r} AS INTEGER) END"
  if kind.positive:
    return f"CAST({among(text, kind.positive)} AS INTEGER)"
  clicks, others = (among(f"lower({text})", each) for each in (spec.CLICKS, spec.NO_CLICKS))
  return f"CASE WHEN {clicks} THEN 1 WHEN {others} THEN 0 END"


def typed(
  relation: str, values: Mapping[str, Value], cases: Sequence[str] = (), more: Sequence[str] = ()
) -> str:
  """Returns the query of typed columns by name, of `bad` and of `value`.

  `bad` is the number of the first value that is bad, from 1, or null; `value` is the raw one.

  Args:
    values: by the name of the column.
    cases: branches of a CASE before those of the values.
    more: further columns.
  """
  for step in range(3):
    made = (f", {x} AS {name}" for v in values.values() for name, x in v.steps[step].items())
    relation = f"(SELECT *{''.join(made)} FROM {relation})"
  finished = ", ".join(f"{value.sql} AS {name}" for name, value in values.items())
  numbered = [*enumerate(values.values(), start=1)]
  bad = [*cases, *(f"WHEN {v.bad} THEN {n}" for n, v in numbered if v.bad != "false")]
  code = f"CAST(CASE {' '.join(bad)} END AS SMALLINT)" if bad else "CAST(NULL AS SMALLINT)"
  raw = " ".join(f"WHEN {n} THEN {v.raw}" for n, v in numbered)
  relation = f"(SELECT *, {code} AS bad FROM (SELECT *, {finished} FROM {relation}))"
  columns = [*values, "bad", f"CASE bad % {MISSING} {raw} END AS value", *more]
  return f"SELECT {', '.join(columns)} FROM {relation}"
