"""Declarations: what the columns of a table are, and how they are used.

`config.columns` maps each column to its kind, by name or as a dict of the kind and its options:

    "columns": {
      "clicked": "label",
      "price": {"kind": "number", "log": True},
      "city": {"kind": "category", "min_count": 5},
      "tags": {"kind": "bag", "separator": "|"},
      "seen": {"kind": "sequence", "table": "movie"},
    }

The classes below are the kinds; their attributes are the options.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import UserError

CLICKS, NO_CLICKS = ("1", "true", "yes", "y", "t"), ("0", "false", "no", "n", "f")  # lower case
WHOLE = r"^-?(0)\.0+$|^(-?[1-9]\d*)\.0+$"  # as files write an integer column with gaps


def _choice(*names: str) -> Any:
  """Makes an option with these values; the first is the default."""
  return dataclasses.field(default=names[0], metadata={"choices": names})


def as_text(value: str | int | float) -> str:
  """Returns a value as the texts of columns are spelled: 4.0 as 4, True as true."""
  text = str(value).strip()
  return text.lower() if text.lower() in ("true", "false") else re.sub(WHOLE, r"\1\2", text)


# --- files ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Format:
  """The format of text files; Parquet files and JSON Lines use `missing` alone.

  Attributes:
    delimiter: between two fields; "" finds `,`, tab, `;`, `|`, `::` or space in the first rows.
      Where it has several characters, quotes have no meaning.
    names: of the columns of files without a header; () reads the first line as the header.
    encoding: that Python knows: utf-8, utf-16, latin-1, cp1252 and others.
    missing: values that mean no value, as the empty one always does; spaces around are ignored.
    rest: the last of `names` takes the rest of the line; quotes have no meaning then.
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


def repeated(names: Sequence[str]) -> str | None:
  """Returns the first name that is there twice, or None."""
  return next((name for index, name in enumerate(names) if name in names[:index]), None)


# --- kinds ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A column and its use."""

  kind: ClassVar[str] = ""
  is_list: ClassVar[Any] = False  # whether a row has several values
  column: str = ""  # of the files; "" reads the one with the name of the declaration

  def sources(self, name: str) -> tuple[str, ...]:
    """Returns the columns of the files that a declaration of this name reads."""
    return getattr(self, "columns", ()) or (self.column or name,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label(Kind):
  """The predicted value: a click (1, true, yes) or none (0, false, no).

  Values are compared as texts are read: 5, 5.0 and "5.0" are one value, as are True and "true".
  """

  kind: ClassVar[str] = "label"
  positive: tuple[str, ...] = ()  # the values that are clicks; all others are none
  at_least: float | None = None  # the smallest number that is a click
  drop: tuple[str, ...] = ()  # values whose rows are left out
  decimal: str = _choice(".", ",")  # the mark before the fraction of numbers

  def __post_init__(self):
    for name in ("positive", "drop"):
      object.__setattr__(self, name, tuple(map(as_text, getattr(self, name))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side(Kind):
  """A feature: of the user or the item, which two_tower uses, or of a row alone."""

  side: str = _choice("", "user", "item")
  optimizer: str = ""  # of its table, by name; "" takes `config.table.optimizer`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number(Side):
  """A number; a missing one is the mean of the training rows."""

  kind: ClassVar[str] = "number"
  log: bool = False  # take `sign(x) * log(1 + |x|)` first
  standardize: bool = True  # by mean and deviation of the training rows
  buckets: int | tuple[float, ...] = 0  # quantiles, or boundaries, of intervals with vectors
  decimal: str = _choice(".", ",")  # the mark before the fraction in texts
  thousands: str = _choice("", ",", ".", " ", "'")  # between thousands; "." where decimal is ","


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(Side):
  """A category, by a vocabulary of the training rows, a hash or its own number.

  Values outside the vocabulary share `oov` rows of the table, by hash. A missing value adds zeros.
  With `min_count` 1, a tenth of the values that one row has are left out of a vocabulary of 100 or
  more, so that the vectors of unknown values are trained.
  """

  kind: ClassVar[str] = "category"
  min_count: int = 2  # training rows that a value of the vocabulary has
  oov: int = 1  # rows of the table for other values; 0 gives them no vector
  hash: int = 0  # rows of the table if values are hashed instead of counted
  size: int = 0  # rows of the table if values are ids themselves, from 0 to `size - 1`
  table: str = ""  # the name of a table and vocabulary that several columns share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bag(Category):
  """Several categories in one field: a list column, a JSON list, or text cut at a separator."""

  kind: ClassVar[str] = "bag"
  is_list: ClassVar[Any] = True
  separator: str = "|"
  max_length: int = 0  # values used of a row; 0: as many as a training row has, up to 64
  combiner: str = _choice("mean", "sum", "sqrtn")  # of the vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordered(Bag):
  """A bag in the order of time: the last `max_length` values are used of a longer row."""

  kind: ClassVar[str] = "sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Id(Category):
  """The id of a user or an item: a category of dlrm, and what two_tower and sequence are about."""

  min_count: int = 1


class User(Id):
  """The user of a row."""

  kind: ClassVar[str] = "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item(Id):
  """The item of a row, or its items."""

  kind: ClassVar[str] = "item"
  separator: str = ""  # of ids in a field that holds several; "" for one

  @property
  def is_list(self) -> bool:
    return bool(self.separator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time(Kind):
  """When a row happened: a number that grows, or a date or time as ISO 8601 writes it."""

  kind: ClassVar[str] = "time"
  # Year, month, day, hour, minute, second; or a date and a time of day or milliseconds within it.
  columns: tuple[str, ...] = ()
  format: str = ""  # of other texts, as `strptime` takes it: "%d.%m.%Y %H:%M"


class Weight(Kind):
  """The weight of a row in the loss and the metrics of dlrm: a number, at least 0."""

  kind: ClassVar[str] = "weight"


class Split(Kind):
  """The split of a row: train, valid (or validation, val, dev) or test."""

  kind: ClassVar[str] = "split"


class Title(Kind):
  """The text that is shown for an item."""

  kind: ClassVar[str] = "title"


_SINGLE = (Label, User, Item, Time, Weight, Split, Title)  # at most one column each
_KINDS: tuple[type[Kind], ...] = (*_SINGLE, Number, Category, Bag, Ordered)
KINDS = {cls.kind: cls for cls in _KINDS}
OF_TABLE = ("oov", "hash", "size", "optimizer")  # options that columns of one table share


def _faults(kind: Any) -> Iterator[str]:
  """Yields what to write instead of options that make no sense, alone or together."""
  for field in dataclasses.fields(kind):
    value, choices = getattr(kind, field.name), field.metadata.get("choices")
    if choices and value not in choices:
      yield f"{field.name} is {value!r}: choose {' or '.join(map(repr, choices))}"
  if isinstance(kind, Label) and kind.positive and kind.at_least is not None:
    yield "give positive or at_least, not both"
  if isinstance(kind, Number) and kind.decimal == kind.thousands:
    yield "decimal and thousands are the same mark"
  boundaries = getattr(kind, "buckets", 0)
  if isinstance(boundaries, tuple) and sorted(set(boundaries)) != [*boundaries]:
    yield "buckets has boundaries that do not increase"
  if isinstance(kind, Category) and kind.hash and kind.size:
    yield "give hash or size, not both"
  if isinstance(kind, Bag) and not kind.separator:
    yield "separator is the text between two values, and not empty"


def parse(columns: Mapping[str, Any]) -> dict[str, Kind]:
  """Returns the declared kinds by name, in the order of the declaration.

  Raises:
    UserError: an unknown kind or option, or an option that makes no sense; names the column.

  >>> parse({"clicked": "label", "price": {"kind": "number", "log": True}})["price"].log
  True
  """
  kinds = {name: _parse_one(value, f"config.columns[{name!r}]") for name, value in columns.items()}
  for single in _SINGLE:
    names = [name for name, kind in kinds.items() if isinstance(kind, single)]
    if len(names) > 1:
      raise UserError(f"config.columns: {' and '.join(names)} are both a {single.kind}: keep one")
  return kinds


def _parse_one(value: Any, place: str) -> Kind:
  given = dict(value) if hasattr(value, "keys") else {"kind": value}
  name = str(given.pop("kind", None))
  if name not in KINDS:
    raise UserError(f"{place} is of the unknown kind {name!r}; {nearest(name, list(KINDS))}")
  known = {field.name: field.default for field in dataclasses.fields(KINDS[name])}
  if _is_many(given.get("buckets")):
    known["buckets"] = ()
  kind = KINDS[name](**merged(known, given, place))
  for fault in _faults(kind):
    raise UserError(f"{place}: {fault}")
  return kind


def merged(known: Mapping[str, Any], given: Mapping[str, Any], place: str) -> dict[str, Any]:
  """Returns known settings with the values that are given, group by group.

  Raises:
    UserError: a setting is unknown, or of another type than its default; names it below `place`.
  """
  settings = {
    key: dict(value) if isinstance(value, Mapping) else value for key, value in known.items()
  }
  for key, value in given.items():
    if key not in known:
      raise UserError(f"{place} has no setting {key!r}; {nearest(str(key), list(known))}")
    settings[key] = _typed(value, known[key], f"{place}.{key}")
  return settings


def _typed(value: Any, default: Any, place: str) -> Any:
  """Returns the value of a setting as the type of its default; raises UserError for another one."""
  if default == {}:  # of columns, which `parse` checks
    return value
  if place.endswith(".files"):
    return _as_texts(value)
  if isinstance(default, Mapping) and isinstance(value, Mapping):
    return merged(default, value, place)
  if isinstance(default, str) and isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(default, tuple) and (_is_many(value) or isinstance(value, str | int | float)):
    return tuple(value) if _is_many(value) else (value,)
  if isinstance(default, float | None) and type(value) in (int, float):
    return float(value)
  if type(value) is not type(default):
    raise UserError(
      f"{place} is {value!r}: give a value like {0.0 if default is None else default!r}"
    )
  return value


def _is_many(value: Any) -> bool:
  return isinstance(value, Sequence) and not isinstance(value, str)


def _as_texts(files: Any) -> Any:
  """Returns files, several of them, or those of each split, with every path as text."""
  if isinstance(files, Mapping):
    return {split: _as_texts(each) for split, each in files.items()}
  is_one = isinstance(files, str | os.PathLike)
  return os.fspath(files) if is_one else [os.fspath(each) for each in files]


def as_dicts(kinds: Mapping[str, Kind]) -> dict[str, dict[str, Any]]:
  """Returns kinds as declarations with all options, so that each can be set by a flag."""
  return {name: {"kind": kind.kind} | dataclasses.asdict(kind) for name, kind in kinds.items()}


def nearest(name: str, known: Sequence[str]) -> str:
  """Returns a hint at the known name that is most like one that is not known."""
  close = difflib.get_close_matches(name, known, 1)
  return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def only(kinds: Mapping[str, Kind], cls: type[Kind]) -> str | None:
  """Returns the name of the column of a kind that at most one column has; None without one."""
  return next((name for name, kind in kinds.items() if isinstance(kind, cls)), None)


def has_table(kind: Kind) -> bool:
  """Returns True if a column has vectors; a number without buckets has none."""
  return isinstance(kind, Side) and not (isinstance(kind, Number) and not kind.buckets)


def table_of(name: str, kind: Kind) -> str:
  """Returns the name of the table of a column with vectors."""
  return getattr(kind, "table", "") or name


def check_tables(kinds: Mapping[str, Kind]) -> None:
  """Raises UserError where columns of one table differ."""
  first: dict[tuple[str, str], str] = {}  # column of each table that has an option
  for name, kind in kinds.items():
    table = table_of(name, kind)
    for option in (*OF_TABLE, "combiner"):
      if has_table(kind) and hasattr(kind, option):
        other = first.setdefault((table, option), name)
        if getattr(kind, option) != getattr(kinds[other], option):
          raise UserError(
            f"config.columns: {other!r} and {name!r} share the table {table!r}, and differ in "
            f"{option}"
          )
