"""Declarations: what the columns of a table are, and how its rows are read and split.

`config.columns` maps each column to its kind, by name or as a dict of the kind and its options:

    "columns": {
      "clicked": "label",
      "price": {"kind": "number", "log": True},
      "city": {"kind": "category", "min_count": 5},
      "tags": {"kind": "bag", "separator": "|"},
      "city_hour": {"kind": "cross", "columns": ("city", "hour"), "buckets": 10_000},
    }

The classes below are the kinds; their attributes are the options. Columns of the files that are
not declared are not read.
"""

import contextlib
import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import UserError
from .values import as_text

SIDES = ("", "user", "item")
CLICKS, NO_CLICKS = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")  # in lower case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A column and what it is used for.

  Attributes:
    column: the column of the files; "" reads the one that has the name of the declaration.
  """

  column: str = ""
  kind: ClassVar[str] = ""

  def check(self) -> None:
    """Raises ValueError for options that make no sense, without the name of the column."""
    for name, (is_valid, advice) in _VALID.items():
      if hasattr(self, name) and not is_valid(getattr(self, name)):
        raise ValueError(f"{name} is {getattr(self, name)!r}: {advice}")

  def sources(self, name: str) -> tuple[str, ...]:
    """Returns the columns of the files that a declaration of this name reads."""
    return getattr(self, "columns", ()) or (self.column or name,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label(Kind):
  """What is predicted: a click or none. 1, true and yes are clicks; 0, false and no are none.

  Attributes:
    positive: the values that are clicks, all others being none; () takes the values above. They
      are compared as texts are read: 5, 5.0 and "5.0" are one value, as are True and "true".
    at_least: the smallest number that is a click; None if the values are no numbers.
    drop: values whose rows are left out.
  """

  kind: ClassVar[str] = "label"
  positive: tuple[str, ...] = ()
  at_least: float | None = None
  drop: tuple[str, ...] = ()

  def check(self) -> None:
    super().check()
    if self.positive and self.at_least is not None:
      raise ValueError("give positive or at_least, not both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side(Kind):
  """A feature.

  Attributes:
    side: "user" or "item" for what is known about a user or an item, which two_tower uses; "" for
      what belongs to a row alone. The columns of a cross with a side must be of that side.
  """

  side: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedded(Side):
  """A feature with a vector for each of its values.

  Attributes:
    dim: the width of its table; 0 takes `config.dim`.
    optimizer: of its table, by name; "" takes `config.table.optimizer`.
  """

  dim: int = 0
  optimizer: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number(Embedded):
  """A number.

  Attributes:
    log: whether to take `sign(x) * log(1 + |x|)` first, for counts and prices.
    standardize: whether to subtract the mean of the training rows and divide by their deviation.
    missing: a missing value is the mean; "indicator" adds a feature that is 1 where it is missing,
      "mean" adds none.
    buckets: how many intervals with equally many training rows, or their boundaries, to learn a
      vector for each; 0 uses the number itself.
  """

  kind: ClassVar[str] = "number"
  log: bool = False
  standardize: bool = True
  missing: str = "mean"
  buckets: int | tuple[float, ...] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(Embedded):
  """A category, by a vocabulary of the training rows, a hash or its own number.

  Values outside the vocabulary share `oov` rows of the table, by hash. A missing value has no
  vector: it adds zeros. A dynamic vocabulary counts nothing beforehand: while training, a new value
  gets a row, if need be that of a value which has not been used for longest.

  Attributes:
    min_count: training rows that a value needs to be in the vocabulary. With 1, a tenth of the
      values that one row has are left out of a vocabulary of 100 or more, so that the vectors of
      unknown values are trained.
    oov: rows of the table for values outside the vocabulary; 0 gives them no vector.
    hash: the number of rows of the table if values are hashed instead of counted; 0 counts.
    size: the number of rows if the values are ids themselves, from 0 to `size - 1`; 0 counts.
    vocabulary: "counted", or "dynamic" for values that come and go. Users and items of rankings are
      counted.
    capacity: the number of rows of a dynamic vocabulary, a multiple of 16. A value without a row
      has no vector.
    eviction: which value of a dynamic vocabulary loses its row to a new one: "lfu", the one used
      least often, or "lru", the one used longest ago. See `embed.DynamicVocabulary`.
    half_life: the number of batches after which the counts of "lfu" halve; 0 never forgets.
    table: a name that columns have in common which share a table and a vocabulary; "" shares none.
    pattern: a regular expression with one group, which is the value; "" takes all of the text.
  """

  kind: ClassVar[str] = "category"
  min_count: int = 2
  oov: int = 1
  hash: int = 0
  size: int = 0
  vocabulary: str = "counted"
  capacity: int = 0
  eviction: str = "lfu"
  half_life: int = 1000
  table: str = ""
  pattern: str = ""

  @property
  def is_dynamic(self) -> bool:
    """Whether values get rows while training."""
    return self.vocabulary == "dynamic"

  def check(self) -> None:
    super().check()
    if self.hash and self.size:
      raise ValueError("give hash or size, not both")
    if self.is_dynamic and (self.capacity < 16 or self.capacity % 16):
      raise ValueError(
        f"capacity is {self.capacity}: give the number of rows, a multiple of 16, such as 65536"
      )
    if self.is_dynamic and (self.hash or self.size):
      raise ValueError("vocabulary is dynamic: remove hash and size, its rows are its capacity")
    if self.capacity and not self.is_dynamic:
      raise ValueError("capacity is for vocabulary='dynamic'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bag(Category):
  """Several categories in one field: a list column, or text that is cut at a separator.

  Attributes:
    separator: of the values in a text; list columns need none.
    max_length: values that are used of a row; 0 takes the most that a training row has, up to 64.
    combiner: "mean", "sum" or "sqrtn" of the vectors.
    columns: of flags: the values of a row are the names of those that are not 0.
  """

  kind: ClassVar[str] = "bag"
  separator: str = "|"
  max_length: int = 0
  combiner: str = "mean"
  columns: tuple[str, ...] = ()
  last: ClassVar[bool] = False  # whether the last values are used of a longer row

  def check(self) -> None:
    super().check()
    if not self.separator:
      raise ValueError("separator is empty: give the text between two values")
    if self.columns and (self.column or len(self.columns) < 2):
      raise ValueError(
        f"columns is {self.columns}: name two or more columns of flags, and no column"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordered(Bag):
  """As a bag, in the order of time: the last `max_length` values are used of a longer row."""

  kind: ClassVar[str] = "sequence"
  last: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cross(Embedded):
  """Combinations of several declared columns, by hash.

  Attributes:
    columns: the names of two or more declared columns: categories, users, items, or numbers with
      buckets.
    buckets: the number of rows of the table.
  """

  kind: ClassVar[str] = "cross"
  columns: tuple[str, ...] = ()
  buckets: int = 100_000

  def check(self) -> None:
    super().check()
    if len(self.columns) < 2:
      raise ValueError(f"columns is {self.columns}: name two or more declared columns")
    if self.column:
      raise ValueError("a cross has columns, not a column")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Id(Category):
  """The id of a user or an item: a category of dlrm, and what two_tower and sequence are about.

  Attributes:
    separator: of the ids in a field that holds several, as a list column or a text; "" for one.
  """

  min_count: int = 1
  separator: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class User(Id):
  """The user of a row."""

  kind: ClassVar[str] = "user"

  def check(self) -> None:
    super().check()
    if self.separator:
      raise ValueError("a row has one user: remove separator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item(Id):
  """The item of a row, or its items."""

  kind: ClassVar[str] = "item"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time(Kind):
  """When a row happened: a number that grows, or a date or time as ISO 8601 writes it.

  Attributes:
    columns: of a date in several: year, month, day, and perhaps hour, minute and second.
  """

  kind: ClassVar[str] = "time"
  columns: tuple[str, ...] = ()

  def check(self) -> None:
    super().check()
    if self.columns and (self.column or not 3 <= len(self.columns) <= 6):
      raise ValueError(
        f"columns is {self.columns}: name those of year, month, day, and perhaps hour, minute and "
        "second, and no column"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight(Kind):
  """The weight of a row in the loss and the metrics of dlrm: a number, at least 0."""

  kind: ClassVar[str] = "weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Kind):
  """The split of a row: train, valid (or validation, val, dev) or test."""

  kind: ClassVar[str] = "split"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Title(Kind):
  """The text that is shown for an item."""

  kind: ClassVar[str] = "title"


KINDS: dict[str, type[Kind]] = {
  cls.kind: cls
  for cls in (
    Label, Number, Category, Bag, Ordered, Cross, User, Item, Time, Weight, Split, Title,
  )
}  # fmt: skip
SINGLE = (Label, User, Item, Time, Weight, Split, Title)  # at most one column each


def parse(columns: Mapping[str, Any], setting: str = "config.columns") -> dict[str, Kind]:
  """Returns the declared kinds by name, in the order of the declaration.

  Raises:
    UserError: an unknown kind or option, or an option that makes no sense; names the column.

  >>> parse({"clicked": "label", "price": {"kind": "number", "log": True}})["price"].log
  True
  """
  if not hasattr(columns, "items"):
    raise UserError(f"{setting} is {columns!r}: give a dict of the columns and their kinds")
  for name in columns:
    if not isinstance(name, str):
      raise UserError(f"{setting} declares {name!r}: give the name of a column, as a text")
  kinds = {name: _parse_one(value, f"{setting}[{name!r}]") for name, value in columns.items()}
  if setting.endswith("_table.columns"):  # all of them are of that side
    kinds = {
      name: dataclasses.replace(kind, side="") if isinstance(kind, Side) else kind
      for name, kind in kinds.items()
    }
  for single in SINGLE:
    names = [name for name, kind in kinds.items() if isinstance(kind, single)]
    if len(names) > 1:
      raise UserError(f"{setting}: {' and '.join(names)} are both a {single.kind}: keep one")
  for name, kind in kinds.items():
    if isinstance(kind, Cross):
      for part in kind.columns:
        _check_part(part, kinds.get(part), kind.side, f"{setting}[{name!r}]")
  return kinds


def _check_part(part: str, kind: Kind | None, side: str, place: str) -> None:
  """Raises UserError for a column that a cross of that side cannot have."""
  is_bucketed = isinstance(kind, Number) and bool(kind.buckets)
  is_one = isinstance(kind, Category) and not isinstance(kind, Bag)
  if not (is_bucketed or is_one):
    raise UserError(
      f"{place} crosses {part!r}, which must be declared as a category, a user, an item, or a "
      "number with buckets"
    )
  assert isinstance(kind, Side)
  if isinstance(kind, Item) and kind.separator:
    raise UserError(
      f"{place} crosses {part!r}, of which a row has several: an item with a separator cannot be "
      "crossed"
    )
  own = kind.kind if isinstance(kind, Id) else kind.side
  if side and own != side:
    raise UserError(
      f"{place} has side={side!r} and crosses {part!r}, which has side={own!r}: declare both with "
      "the same side"
    )


def expand(
  columns: Mapping[str, Any], setting: str = "config.columns"
) -> dict[str, dict[str, Any]]:
  """Returns the declarations as dicts with all options, so that each can be set by a flag.

  >>> expand({"when": "time"})
  {'when': {'kind': 'time', 'column': ''}}
  """
  return as_dicts(parse(columns, setting))


def as_dicts(kinds: Mapping[str, Kind]) -> dict[str, dict[str, Any]]:
  """Returns kinds as the declarations that `parse` makes them of."""
  return {name: {"kind": kind.kind} | dataclasses.asdict(kind) for name, kind in kinds.items()}


def _parse_one(value: Any, place: str) -> Kind:
  if not isinstance(value, str) and not hasattr(value, "keys"):
    raise UserError(f"{place} is {value!r}: give a kind, or a dict of the kind and its options")
  options = {"kind": value} if isinstance(value, str) else dict(value)
  name = options.pop("kind", None)
  if not isinstance(name, str) or name not in KINDS:
    raise UserError(f"{place} is of the unknown kind {name!r}; {nearest(str(name), list(KINDS))}")
  fields = {field.name: field.default for field in dataclasses.fields(KINDS[name])}
  for option, given in options.items():
    if option not in fields:
      hint = nearest(str(option), list(fields))
      raise UserError(f"{place}: a {name} has no option {option!r}; {hint}")
    is_list = (name, option) == ("number", "buckets")
    options[option], wanted = _typed(
      given, fields[option], is_list=is_list, is_label=name == "label"
    )
    if wanted:
      raise UserError(f"{place}: {option} is {given!r}: give {wanted}")
  kind = KINDS[name](**options)
  try:
    kind.check()
  except ValueError as error:
    raise UserError(f"{place}: {error}") from None
  return kind


def _typed(value: Any, default: Any, *, is_list: bool, is_label: bool) -> tuple[Any, str]:
  """Returns an option's value, lists as tuples; and what to give instead, or ""."""
  is_many = isinstance(value, Sequence) and not isinstance(value, str | bytes)
  is_number = lambda each: isinstance(each, int | float) and not isinstance(each, bool)
  if isinstance(default, tuple):
    each = value if is_many else (value,)
    as_it_is = lambda text: as_text(text).strip() if is_label else str(text)  # as files' texts
    is_plain = all(isinstance(text, str | int | float) for text in each)
    return tuple(map(as_it_is, each)), "" if is_plain else "texts or numbers"
  if is_many and is_list:
    are_numbers = all(is_number(each) and math.isfinite(each) for each in value)
    return (tuple(map(float, value)), "") if are_numbers else ((), "boundaries as numbers")
  if is_many:
    return value, "a single value"
  if default is None:
    is_valid = value is None or is_number(value)
    return float(value) if is_valid and value is not None else None, "" if is_valid else "a number"
  is_alike = isinstance(value, type(default)) and isinstance(value, bool) == isinstance(
    default, bool
  )
  return value, "" if is_alike else f"a value like {default!r}"


def _buckets_fault(buckets: int | tuple[float, ...]) -> bool:
  """Whether a number of intervals is one, or boundaries do not increase."""
  if isinstance(buckets, int):
    return buckets < 0 or buckets == 1
  return any(a >= b for a, b in itertools.pairwise(buckets))


def _has_one_group(pattern: str) -> bool:
  """Whether a text is "" or a regular expression with one group."""
  with contextlib.suppress(re.error):
    return not pattern or re.compile(pattern).groups == 1
  return False


_NOT_NEGATIVE = (lambda value: value >= 0, "choose 0 or more")
# By option: whether a value is valid, and what else to write.
_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
  "side": (lambda side: side in SIDES, "choose 'user', 'item' or ''"),
  "dim": (lambda dim: dim >= 0, "choose a width, or 0 for config.dim"),
  "missing": (lambda how: how in ("mean", "indicator"), "choose 'mean' or 'indicator'"),
  "buckets": (
    lambda buckets: not _buckets_fault(buckets),
    "choose 2 or more, 0 for none, or boundaries that increase",
  ),
  "min_count": (lambda count: count >= 1, "choose 1 or more"),
  **dict.fromkeys(("oov", "hash", "size", "half_life", "max_length"), _NOT_NEGATIVE),
  "pattern": (_has_one_group, "write a regular expression with one group, which is the value"),
  "vocabulary": (lambda how: how in ("counted", "dynamic"), "choose 'counted' or 'dynamic'"),
  "eviction": (lambda how: how in ("lru", "lfu"), "choose 'lru' or 'lfu'"),
  "combiner": (lambda how: how in ("mean", "sum", "sqrtn"), "choose mean, sum or sqrtn"),
}


def nearest(name: str, known: list[str]) -> str:
  """Returns a hint at the known name that is most like one that is not known."""
  close = difflib.get_close_matches(name, known, 1)
  return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def only(kinds: Mapping[str, Kind], cls: type[Kind]) -> str | None:
  """Returns the name of the column of a kind that at most one column has; None without one."""
  return next((name for name, kind in kinds.items() if isinstance(kind, cls)), None)


def has_table(kind: Kind) -> bool:
  """Whether a column has vectors; a number without buckets has none."""
  return isinstance(kind, Embedded) and not (isinstance(kind, Number) and not kind.buckets)


def check_shared(kinds: Mapping[str, Kind], setting: str) -> None:
  """Raises UserError where columns that share a table declare it in different ways."""
  shared = (
    "min_count", "oov", "hash", "size", "vocabulary", "capacity", "eviction", "half_life", "dim",
    "optimizer",
  )  # fmt: skip
  first: dict[tuple[str, str], tuple[str, Category]] = {}
  named = {kind.table for kind in kinds.values() if isinstance(kind, Category) and kind.table}
  for name, kind in kinds.items():
    if isinstance(kind, Number | Cross) and has_table(kind) and name in named:
      raise UserError(
        f"{setting}: the table {name!r} has the name of the column {name!r}, which has a table of "
        "its own: choose another name"
      )
    if isinstance(kind, Category) and (kind.table or name) in named:
      # A single value has no combiner: any bag's gives its vector.
      options = (*shared, "combiner") if isinstance(kind, Bag) else shared
      # The table of a column's own name is filled as that column says.
      for option in options if kind.table else options[1:]:
        other, known = first.setdefault((kind.table or name, option), (name, kind))
        if getattr(known, option) != getattr(kind, option):
          raise UserError(
            f"{setting}: {other!r} and {name!r} share the table {kind.table or name!r}, but differ "
            f"in {option}: {getattr(known, option)!r} and {getattr(kind, option)!r}"
          )


def check_between(settings: Mapping[str, Mapping[str, Kind]]) -> None:
  """Raises UserError where columns of different files share a table, and not the vocabulary."""
  for first, second in itertools.permutations(settings, 2):
    named = {getattr(kind, "table", "") for kind in settings[first].values()} - {""}
    for name, kind in settings[second].items():
      table = getattr(kind, "table", "") or name
      if has_table(kind) and table in named:
        raise UserError(
          f"{second}.columns[{name!r}] has the table {table!r} of columns in {first}.columns: only "
          "columns of the same files can share one, so choose another name"
        )
