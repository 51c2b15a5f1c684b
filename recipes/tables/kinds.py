"""The kinds of features by their values: a number, a category, a bag, or nothing to learn from."""

import re
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import spec
from .sample import Column

ROW_ID = 0.95  # distinct values per row from where on a column tells rows apart
FEW_ROWS = 20  # too few to call a column an id
_FEW_INTEGERS = 32
_LONG = 1e10  # integers beyond are ids
_MANY, _TOO_MANY = 100_000, 1_000_000  # expected distinct values
_HEAVY = 5.0  # 99th percentile by median

_NAMES = {
  "user": "user uid visitor customer client member account reader buyer viewer listener person",
  "item": "item iid product movie film track song video book article sku asin listing recipe "
  "business place location poi artist game restaurant",
  "time": "time timestamp datetime date ts day when unixtime created at event",
}
_IDS = {"id", "ids", "code", "hash", "key"}  # words that a name may have besides
_CODES = _IDS | {"zip", "zipcode", "postcode", "postal", "type", "cat", "category"}
_UNRELATED = {"birth", "born", "dob", "release", "released", "expiry", "expires", "founded"}
_COMMAS = (r"^[+-]?[\d.]*\d(,\d+)?$", r"^[+-]?\d{1,3}(,\d{3})*(\.\d+)?$")  # not of a bag
_SEPARATORS = {"|": 0.3, ";": 0.3, ",": 0.5, " ": 0.5}  # the share of rows that must have it


class Proposal(NamedTuple):
  """A column's role.

  Attributes:
    kind: of `spec.KINDS`; "" leaves the column out.
    options: of the kind, where they differ from the defaults.
    why: a few words.
  """

  kind: str
  options: dict[str, Any]
  why: str

  @property
  def declaration(self) -> Any:
    """The value in `config.columns`."""
    return {"kind": self.kind, **self.options} if self.options else self.kind


def tokens(name: str) -> list[str]:
  """Returns the words of a name in lower case.

  >>> tokens("lastVisit_at2")
  ['last', 'visit', 'at', '2']
  """
  words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
  return [word.lower() for word in words]


def is_hinted(name: str, role: str) -> bool:
  """Returns whether a name is a usual one for a "user", an "item" or a "time".

  >>> is_hinted("movieId", "item"), is_hinted("product_category", "item")
  (True, False)
  """
  words = tokens(name)
  core = [word for word in words if word not in _IDS | {"number", "no", "event"}] or words
  known = _NAMES[role].split()
  return all(word in known for word in core)


def is_unrelated(name: str) -> bool:
  """Returns whether a time of that name is not when its row happened, as a date of birth."""
  return bool(set(tokens(name)) & _UNRELATED)


def feature(column: Column, total: int) -> Proposal:
  """Returns what a column without a role of its own is.

  Args:
    column: of the sample.
    total: rows of the table.
  """
  if column.stored == "nested":
    return Proposal("", {}, "holds structs")
  if not column.present:
    return Proposal("", {}, "no values")
  if column.distinct == 1 and not column.missing:
    return Proposal("", {}, "constant")
  if column.stored == "list":
    return Proposal("bag", {}, "lists")
  if column.is_dated:
    return Proposal("", {}, "a time, missing in places" if column.missing else "another time")
  if column.numbers is not None:
    return _number(column, total)
  return Proposal("category", {}, "") if column.stored == "yes/no" else _text(column, total)


def _number(column: Column, total: int) -> Proposal:
  assert column.numbers is not None
  distinct, present, words = column.distinct, column.present, set(tokens(column.name))
  tells_rows = distinct >= ROW_ID * present and present >= FEW_ROWS
  is_named = any((words & _CODES, *(is_hinted(column.name, side) for side in ("user", "item"))))
  largest = np.nanmax(np.abs(column.numbers))
  if pc.any(pc.match_substring_regex(column.texts, r"^[+-]?0\d")).as_py():
    return _category(column, total, "leading zeros")
  if column.is_whole:
    if distinct <= _FEW_INTEGERS and (distinct <= 3 or 5 * distinct <= present):
      return _category(column, total, "two values" if distinct <= 2 else "few integers")
    in_order = column.numbers[column.codes]
    if tells_rows and (is_named or largest >= _LONG or (np.diff(in_order) > 0).all()):
      return Proposal("", {}, "unique per row")
    if is_named:
      return _category(column, total, "ids by name")
    if largest >= _LONG:
      return _category(column, total, "long integers")
  if distinct <= 2:
    return _category(column, total, "two values")
  values = column.of_rows()
  options: dict[str, Any] = {}
  median, tail = np.quantile(values, (0.5, 0.99))
  if (
    values.min() >= -values.max() / 100 and values.max() >= 20 and tail > _HEAVY * max(median, 1.0)
  ):
    options["log"] = True
  if column.missing or column.placeholders:
    options["missing"] = "indicator"
  return Proposal("number", options, "heavy tail" if options.get("log") else "")


def _text(column: Column, total: int) -> Proposal:
  distinct, present = column.distinct, column.present
  if any(_all_match(column.texts, pattern) for pattern in _COMMAS):
    return Proposal("", {}, "numbers with commas")
  if _all_match(column.texts, r"^\[.*\]$"):
    return Proposal("", {}, "lists in brackets")
  if separator := separator_of(column):
    options = {} if separator == spec.Bag.separator else {"separator": separator}
    return Proposal("bag", options, f"cut at {separator!r}")
  num_words = pc.mean(pc.list_value_length(pc.utf8_split_whitespace(column.texts))).as_py()
  if num_words >= 4 and distinct > present / 2 and present >= FEW_ROWS:
    return Proposal("", {}, "free text")
  if distinct >= ROW_ID * present and present >= FEW_ROWS:
    return Proposal("", {}, "unique per row")
  return _category(column, total, "")


def _all_match(texts: pa.StringArray, pattern: str) -> bool:
  return pc.all(pc.match_substring_regex(texts, pattern)).as_py()


def _category(column: Column, total: int, why: str) -> Proposal:
  """Returns a category, with what its number of values asks for."""
  once = int((column.counts == 1).sum())
  # Good 1953: the share of values seen once is the chance that the next one is new.
  expected = column.distinct + once / column.present * max(total - column.rows, 0)
  if expected > _TOO_MANY:
    return Proposal("category", {"hash": _TOO_MANY}, f"about {_short(expected)} values")
  if expected > _MANY:
    return Proposal("category", {"min_count": 5}, f"about {_short(expected)} values")
  return Proposal("category", {}, why)


def _short(number: float) -> str:
  return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


def separator_of(column: Column) -> str:
  """Returns the text that cuts most texts into parts that repeat; "" if nothing does."""
  for separator, share in _SEPARATORS.items():
    parts, lengths = column.items(separator)
    rows = column.counts[lengths > 1].sum()
    counted = pc.value_counts(parts).field("counts").to_numpy()
    if rows < share * column.present or len(counted) < 2:
      continue
    repeats = len(counted) < column.distinct and counted.sum() >= 2 * len(counted)
    if separator == " ":  # titles and addresses have words of their own
      once = (counted == 1).sum() / column.distinct
      repeats &= once < 0.05 and 2 * len(counted) <= column.distinct
    if repeats:
      return separator
  return ""
