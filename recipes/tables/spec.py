"""Declarations: what the columns of a table are, and how its rows are read and split.

`config.columns` maps each column to its kind, by name or as a dict of the kind and its options:

    "columns": {
      "clicked": "label",
      "price": {"kind": "number", "log": True},
      "city": {"kind": "category", "min_count": 5},
      "tags": {"kind": "bag", "separator": "|"},
      "city_hour": {"kind": "cross", "columns": ("city", "hour"), "buckets": 10_000},
      "seen": {"kind": "sequence", "of": "movie", "beside": ("genre", "clicked", "when")},
    }

The classes below are the kinds; their attributes are the options, whose fields say what is valid.
Columns of the files that are not declared are not read.
"""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

from ..errors import UserError
from .values import ReadAs, as_text

CLICKS, NO_CLICKS = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")  # in lower case


# --- options: a default, a conversion that raises where a value is wrong, and what to write ------


def _option(default: Any, convert: Callable[[Any], Any], advice: str) -> Any:
  return dataclasses.field(default=default, metadata={"convert": convert, "advice": advice})


def _require(value: Any, is_valid: bool) -> Any:
  if not is_valid:
    raise ValueError(value)
  return value


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(default: bool) -> Any:
  return _option(default, lambda value: _require(value, type(value) is bool), "write True or False")


def _count(default: int, least: int = 0) -> Any:
  convert = lambda value: _require(value, type(value) is int and value >= least)
  return _option(default, convert, f"choose {least} or more")


def _choice(*names: str) -> Any:
  """The first name is the default."""
  advice = f"choose {' or '.join(map(repr, names))}"
  return _option(names[0], lambda value: _require(value, value in names), advice)


def _text(default: str = "", is_valid: Callable[[str], bool] = lambda _: True, advice="") -> Any:
  convert = lambda value: _require(value, isinstance(value, str) and is_valid(value))
  return _option(default, convert, advice or "write a text")


def _texts(as_it_is: Callable[[Any], str] = str) -> Any:
  """A tuple of texts, or one."""

  def convert(value: Any) -> tuple[str, ...]:
    is_many = isinstance(value, Sequence) and not isinstance(value, str)
    each = value if is_many else (value,)
    return tuple(as_it_is(_require(x, isinstance(x, str | int | float))) for x in each)

  return _option((), convert, "give texts or numbers")


def _boundaries(value: Any) -> int | tuple[float, ...]:
  if isinstance(value, int):
    return _require(value, type(value) is int and value >= 0 and value != 1)
  numbers = tuple(float(_require(x, _is_number(x) and math.isfinite(x))) for x in value)
  return _require(numbers, all(a < b for a, b in itertools.pairwise(numbers)))


# --- kinds ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A column and what it is used for."""

  kind: ClassVar[str] = ""
  read_as: ClassVar[Any] = "text"  # a `ReadAs`; see `values.converted`
  column: str = _text()  # of the files; "" reads the one with the name of the declaration

  def sources(self, name: str) -> tuple[str, ...]:
    """Returns the columns of the files that a declaration of this name reads."""
    return getattr(self, "columns", ()) or (self.column or name,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label(Kind):
  """What is predicted: a click or none. 1, true and yes are clicks; 0, false and no are none.

  Values are compared as texts are read: 5, 5.0 and "5.0" are one value, as are True and "true".
  One model of dlrm predicts several labels. Then a row without a value of one of them counts for
  the others; a row without the only label cannot be read.
  """

  kind: ClassVar[str] = "label"
  positive: tuple[str, ...] = _texts(as_text)  # the values that are clicks; all others are none
  at_least: float | None = _option(  # the smallest number that is a click
    None, lambda x: None if x is None else float(_require(x, _is_number(x))), "give a number"
  )
  drop: tuple[str, ...] = _texts(as_text)  # values whose rows are left out
  # Cross-entropy of a click, or of one of several classes, or the squared error of log(1 + value).
  loss: str = _choice("binary", "softmax", "squared_log")
  classes: tuple[str, ...] = _texts(as_text)  # the values of softmax
  mask: str = _text()  # a label of clicks: this one counts where that one is a click
  weight: float = _option(  # of the loss in the sum over labels
    1.0, lambda x: float(_require(x, _is_number(x) and 0 < x < math.inf)), "give a number above 0"
  )

  @property
  def num_outputs(self) -> int:
    """The number of a model's outputs that are of this label."""
    return len(self.classes) or 1

  @property
  def metric(self) -> str:
    """The name of the metric that is the loss."""
    return "squared_loss" if self.loss == "squared_log" else "logloss"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side(Kind):
  """A feature: of the user or the item, which two_tower uses, or of a row alone."""

  side: str = _choice("", "user", "item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedded(Side):
  """A feature with a vector for each of its values."""

  dim: int = _count(0)  # the width of its table; 0 takes `config.dim`
  optimizer: str = _text()  # of its table, by name; "" takes `config.table.optimizer`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number(Embedded):
  """A number; a missing one is the mean of the training rows."""

  kind: ClassVar[str] = "number"
  read_as: ClassVar[Any] = "number"
  log: bool = _flag(False)  # take `sign(x) * log(1 + |x|)` first
  standardize: bool = _flag(True)  # by mean and deviation of the training rows
  missing: str = _choice("mean", "indicator")  # which adds a feature that is 1 where it is missing
  # Intervals with equally many training rows, or their boundaries, with a vector each; 0: none.
  buckets: int | tuple[float, ...] = _option(
    0, _boundaries, "choose 2 or more, 0 for none, or give boundaries as numbers that increase"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(Embedded):
  """A category, by a vocabulary of the training rows, a hash or its own number.

  Values outside the vocabulary share `oov` rows of the table, by hash. A missing value has no
  vector: it adds zeros. A dynamic vocabulary counts nothing beforehand: while training, a new value
  gets a row, if need be that of a value which has not been used for longest; see
  `embed.DynamicVocabulary`. With `min_count` 1, a tenth of the values that one row has are left out
  of a vocabulary of 100 or more, so that the vectors of unknown values are trained.
  """

  kind: ClassVar[str] = "category"
  min_count: int = _count(2, least=1)  # training rows that a value of the vocabulary has
  oov: int = _count(1)  # rows of the table for other values; 0 gives them no vector
  hash: int = _count(0)  # rows of the table if values are hashed instead of counted
  size: int = _count(0)  # rows of the table if values are ids themselves, from 0 to `size - 1`
  vocabulary: str = _choice("counted", "dynamic")  # rankings count their users and items
  capacity: int = _count(0)  # rows of a dynamic vocabulary; a value without one has no vector
  # Which value loses its row: "lfu", the one used least often, or "lru", the one used longest ago.
  eviction: str = _choice("lfu", "lru")
  half_life: int = _count(1000)  # batches after which the counts of "lfu" halve; 0 never forgets
  table: str = _text()  # the name of a table and vocabulary that several columns share
  pattern: str = _text(  # its group is the value; "" takes all of the text
    is_valid=lambda text: not text or re.compile(text).groups == 1,
    advice="write a regular expression with one group, which is the value",
  )

  @property
  def is_dynamic(self) -> bool:
    """Whether values get rows while training."""
    return self.vocabulary == "dynamic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bag(Category):
  """Several categories in one field: a list column, or text that is cut at a separator."""

  kind: ClassVar[str] = "bag"
  last: ClassVar[bool] = False  # whether the last values are used of a longer row
  separator: str = _text("|", bool, "give the text between two values")
  max_length: int = _count(0)  # values used of a row; 0: as many as a training row has, up to 64
  combiner: str = _choice("mean", "sum", "sqrtn")  # of the vectors
  columns: tuple[str, ...] = _texts()  # of flags: the values are the names of those that are not 0

  @property
  def read_as(self) -> ReadAs:
    return ("list", self.separator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordered(Bag):
  """As a bag, in the order of time: the last `max_length` values are used of a longer row.

  With `of` it is the history of the row's user, and no column of the files: the values that this
  category has in the user's rows of an earlier time, whatever their split. Rows of the same time
  are not seen. The values share the table of their column.
  """

  kind: ClassVar[str] = "sequence"
  last: ClassVar[bool] = True
  of: str = _text()  # a declared category, such as the item
  # Declared columns whose values in the same earlier rows go along: categories, of the row or in a
  # table of the users or items, the label, or the time, which tells how long ago the row was.
  beside: tuple[str, ...] = _texts()
  where: str = _text()  # the label: only rows where it is 1 are in the history; "" takes all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vector(Side):
  """Numbers that another model has computed, such as the embedding of a text or an image.

  They are not trained. A missing vector is zeros.
  """

  kind: ClassVar[str] = "vector"
  width: int = _count(0)  # how many numbers
  separator: str = _text("|", bool, "give the text between two values")
  # Whether a learned linear layer takes them to `config.dim`; else they are numbers like others.
  project: bool = _flag(True)

  @property
  def read_as(self) -> ReadAs:
    return ("vector", self.separator, str(self.width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cross(Embedded):
  """Combinations of several declared columns, by hash."""

  kind: ClassVar[str] = "cross"
  columns: tuple[str, ...] = _texts()  # declared names of categories, ids, numbers with buckets
  buckets: int = _count(100_000, least=2)  # rows of the table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Id(Category):
  """The id of a user or an item: a category of dlrm, and what two_tower and sequence are about."""

  min_count: int = _count(1, least=1)
  separator: str = _text()  # of ids in a field that holds several; "" for one

  @property
  def read_as(self) -> ReadAs:
    return ("list", self.separator) if self.separator else "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class User(Id):
  """The user of a row."""

  kind: ClassVar[str] = "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item(Id):
  """The item of a row, or its items."""

  kind: ClassVar[str] = "item"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time(Kind):
  """When a row happened: a number that grows, or a date or time as ISO 8601 writes it."""

  kind: ClassVar[str] = "time"
  read_as: ClassVar[Any] = "time"
  columns: tuple[str, ...] = (
    _texts()
  )  # of a date in several: year, month, day, hour, minute, second


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight(Kind):
  """The weight of a row in the loss and the metrics of dlrm: a number, at least 0."""

  kind: ClassVar[str] = "weight"
  read_as: ClassVar[Any] = "number"


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
    Label, Number, Category, Bag, Ordered, Vector, Cross, User, Item, Time, Weight, Split,
    Title,
  )
}  # fmt: skip
SINGLE = (User, Item, Time, Weight, Split, Title)  # at most one column each
OF_TABLE = (  # options that columns of one table share
  "min_count", "oov", "hash", "size", "vocabulary", "capacity", "eviction", "half_life", "dim",
  "optimizer",
)  # fmt: skip
_OF_COLUMN = ("column", "columns", "side", "table", "pattern", *OF_TABLE)
# Options that contradict each other: of which kinds, when, and what to write.
_CONTRADICTIONS: tuple[tuple[type[Kind], Callable[[Any], Any], str], ...] = (
  (Label, lambda k: k.positive and k.at_least is not None, "give positive or at_least, not both"),
  (
    Label,
    lambda k: k.loss != "binary" and (k.positive or k.at_least is not None),
    "positive and at_least tell clicks: remove them, or loss={loss!r}",
  ),
  (
    Label,
    lambda k: len(set(k.classes)) < 2 if k.loss == "softmax" else k.classes,
    "classes are the values of loss='softmax', two or more: give both or none",
  ),
  (Category, lambda k: k.hash and k.size, "give hash or size, not both"),
  (
    Category,
    lambda k: k.is_dynamic and (k.capacity < 16 or k.capacity % 16),
    "capacity is {capacity}: give the number of rows, a multiple of 16, such as 65536",
  ),
  (
    Category,
    lambda k: k.is_dynamic and (k.hash or k.size),
    "vocabulary is dynamic: remove hash and size, its rows are its capacity",
  ),
  (Category, lambda k: k.capacity and not k.is_dynamic, "capacity is for vocabulary='dynamic'"),
  (
    Bag,
    lambda k: k.columns and (k.column or len(k.columns) < 2),
    "columns is {columns}: name two or more columns of flags, and no column",
  ),
  (Vector, lambda k: not k.width, "width is 0: give the number of values in each vector"),
  (
    Ordered,
    lambda k: not k.of and (k.beside or k.where),
    "beside and where are for a history: name its column with of",
  ),
  (
    Ordered,
    lambda k: (
      k.of and dataclasses.replace(k, **{name: getattr(Ordered, name) for name in _OF_COLUMN}) != k
    ),
    "of is {of!r}, whose values in earlier rows these are, in its table: remove all options but "
    "beside, where, max_length, combiner and separator",
  ),
  (
    Cross,
    lambda k: k.column or len(k.columns) < 2,
    "columns is {columns}: name two or more declared columns, and no column",
  ),
  (User, lambda k: k.separator, "a row has one user: remove separator"),
  (
    Time,
    lambda k: k.columns and (k.column or not 3 <= len(k.columns) <= 6),
    "columns is {columns}: name those of year, month, day, and perhaps hour, minute and second, "
    "and no column",
  ),
)


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
    if hasattr(object, name):
      raise UserError(
        f"{setting} declares {name!r}, a name that Python reserves. Declare it under another name: "
        f"{name + '_'!r}: {{'kind': ..., 'column': {name!r}}}"
      )
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
    mask = getattr(kind, "mask", "")
    of = kinds.get(mask)
    if mask and not (mask != name and isinstance(of, Label) and of.loss == "binary"):
      raise UserError(f"{setting}[{name!r}]: mask is {mask!r}: name another label, of clicks")
  for name, kind in kinds.items():
    for part in kind.columns if isinstance(kind, Cross) else ():
      if fault := _fault_of_part(kinds.get(part), kind.side):  # type: ignore[attr-defined]
        raise UserError(f"{setting}[{name!r}] crosses {part!r}, {fault}")
  return kinds


def _parse_one(value: Any, place: str) -> Kind:
  if not isinstance(value, str) and not hasattr(value, "keys"):
    raise UserError(f"{place} is {value!r}: give a kind, or a dict of the kind and its options")
  given = {"kind": value} if isinstance(value, str) else dict(value)
  name = given.pop("kind", None)
  if not isinstance(name, str) or name not in KINDS:
    raise UserError(f"{place} is of the unknown kind {name!r}; {nearest(str(name), list(KINDS))}")
  fields = {field.name: field for field in dataclasses.fields(KINDS[name])}
  for option, each in given.items():
    if option not in fields:
      hint = nearest(str(option), list(fields))
      raise UserError(f"{place}: a {name} has no option {option!r}; {hint}")
    about = fields[option].metadata
    try:
      given[option] = about["convert"](each)
    except (ValueError, TypeError, re.error):
      raise UserError(f"{place}: {option} is {each!r}: {about['advice']}") from None
  kind = KINDS[name](**given)
  for cls, is_contradiction, advice in _CONTRADICTIONS:
    if isinstance(kind, cls) and is_contradiction(kind):
      raise UserError(f"{place}: {advice.format(**dataclasses.asdict(kind))}")
  return kind


def _fault_of_part(part: Kind | None, side: str) -> str:
  """Returns why a cross of that side cannot have a column, or ""."""
  is_one = isinstance(part, Category) and not isinstance(part, Bag)
  is_bucketed = isinstance(part, Number) and bool(part.buckets)
  if not isinstance(part, Side) or not (is_one or is_bucketed):
    return "which must be declared as a category, a user, an item, or a number with buckets"
  if part.read_as not in ("text", "number"):
    return "of which a row has several: an item with a separator cannot be crossed"
  own = part.kind if isinstance(part, Id) else part.side
  if side and own != side:
    return f"which has side={own!r}, and has side={side!r} itself: declare both with the same side"
  return ""


def as_dicts(kinds: Mapping[str, Kind]) -> dict[str, dict[str, Any]]:
  """Returns kinds as declarations with all options, so that each can be set by a flag.

  >>> as_dicts(parse({"when": "split"}))
  {'when': {'kind': 'split', 'column': ''}}
  """
  return {name: {"kind": kind.kind} | dataclasses.asdict(kind) for name, kind in kinds.items()}


def labels(kinds: Mapping[str, Kind]) -> dict[str, Label]:
  """Returns the labels by name, in the order of the declaration."""
  return {name: kind for name, kind in kinds.items() if isinstance(kind, Label)}


def ways(kinds: Mapping[str, Kind]) -> dict[str, tuple[tuple[str, ...], ReadAs]]:
  """Returns the columns and the way of reading of each declared name that is in the files."""
  return {
    name: (kind.sources(name), kind.read_as)
    for name, kind in kinds.items()
    if not isinstance(kind, Cross) and not is_history(kind)
  }


def is_one_click(labels: Mapping[str, Label]) -> bool:
  """Whether there is one label, a click or none: then it and a model's output are `[B]`."""
  return [label.loss for label in labels.values()] == ["binary"]


def is_history(kind: Kind) -> TypeGuard[Ordered]:
  """Whether a column is a sequence that is built of earlier rows."""
  return isinstance(kind, Ordered) and bool(kind.of)


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


def table_of(name: str, kind: Kind) -> str:
  """Returns the name of the table of a column with vectors."""
  return getattr(kind, "table", "") or name


def check_shared(kinds: Mapping[str, Kind], setting: str) -> None:
  """Raises UserError where columns that share a table declare it in different ways."""
  first: dict[tuple[str, str], tuple[str, Category]] = {}
  named = {kind.table for kind in kinds.values() if isinstance(kind, Category)} - {""}
  for name, kind in kinds.items():
    if not has_table(kind) or is_history(kind) or table_of(name, kind) not in named:
      continue
    if not isinstance(kind, Category):
      raise UserError(
        f"{setting}: the table {name!r} has the name of the column {name!r}, which has a table of "
        "its own: choose another name"
      )
    # A single value has no combiner: any bag's gives its vector.
    options = (*OF_TABLE, "combiner") if isinstance(kind, Bag) else OF_TABLE
    # The table of a column's own name is filled as that column says.
    for option in options if kind.table else options[1:]:
      other, known = first.setdefault((table_of(name, kind), option), (name, kind))
      if getattr(known, option) != getattr(kind, option):
        raise UserError(
          f"{setting}: {other!r} and {name!r} share the table {table_of(name, kind)!r}, but differ "
          f"in {option}: {getattr(known, option)!r} and {getattr(kind, option)!r}"
        )


def check_between(settings: Mapping[str, Mapping[str, Kind]]) -> None:
  """Raises UserError where columns of different files share a table, and not the vocabulary."""
  for first, second in itertools.permutations(settings, 2):
    named = {getattr(kind, "table", "") for kind in settings[first].values()} - {""}
    for name, kind in settings[second].items():
      if has_table(kind) and table_of(name, kind) in named:
        raise UserError(
          f"{second}.columns[{name!r}] has the table {table_of(name, kind)!r} of columns in "
          f"{first}.columns: only columns of the same files can share one, so choose another name"
        )
