"""The role of each column of a sample: what the data show decides, and names are hints."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError
from . import spec
from .sample import Column, Sample

_ROW_ID = 0.95  # distinct values per row from where on a column tells rows apart
_FEW_ROWS = 20  # too few to call a column an id
_FEW_INTEGERS = 32
_LONG = 1e10  # integers beyond are ids
_MANY, _TOO_MANY = 100_000, 1_000_000  # expected distinct values
_HEAVY = 5.0  # 99th percentile by median
_REPEATS = 0.1  # of the rows, as recipes.tables.interactions says
_SAME = 1.01  # distinct pairs of an id and a value per distinct id, for a value that an id has
_EXAMPLES = 5

_NAMES = {
  "user": "user uid visitor customer client member account reader buyer viewer listener person",
  "item": "item iid product movie film track song video book article sku asin listing recipe "
  "business place location poi artist game restaurant",
  "time": "time timestamp datetime date ts day when unixtime created at event",
}
_IDS = {"id", "ids", "code", "hash", "key"}  # words that a name may have besides
_CODES = _IDS | {"zip", "zipcode", "postcode", "postal", "type", "cat", "category"}
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


@dataclasses.dataclass(frozen=True)
class Roles:
  """The columns whose role is known, and the label's positive value; "" where they are not."""

  label: str = ""
  user: str = ""
  item: str = ""
  time: str = ""
  positive: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is proposed for a table.

  Attributes:
    columns: proposals by column, in the order of the table.
    settings: of the config besides files, format and columns.
    recipes: names of the recipes that the config trains, the first being the one to try first.
    notes: sentences for the user.
  """

  columns: dict[str, Proposal]
  settings: dict[str, Any]
  recipes: tuple[str, ...]
  notes: list[str]


def propose(sample: Sample, roles: Roles) -> Plan:
  """Returns the roles of all columns, and the recipes that they serve.

  Raises:
    UserError: a role's column does not exist or cannot have the role; says what to write.
  """
  columns = {column.name: column for column in sample.columns}
  _check(roles, columns)
  notes: list[str] = []
  roles = _completed(roles, columns, notes)
  proposals: dict[str, Proposal] = {}
  clicked = np.ones(sample.num_rows, bool)
  if roles.label:
    proposals[roles.label], clicked = _label(columns[roles.label], roles.positive, notes)
  if roles.user:
    proposals[roles.user] = Proposal("user", {}, _many(columns[roles.user]))
  if roles.item:
    proposals[roles.item] = _item(columns[roles.item])
  if roles.time:
    proposals[roles.time] = Proposal("time", {}, "")
  for name, column in columns.items():
    if name not in proposals:
      proposals[name] = feature(column, sample.total or sample.num_rows)
  proposals = {name: proposals[name] for name in columns}
  settings = _rows_without(roles, columns, notes, sample)
  placeholders = [
    text for name, column in columns.items() for text in _replaced(column, proposals[name])
  ]
  if placeholders:
    settings["placeholders"] = tuple(dict.fromkeys(placeholders))
  recipes = _recipes(roles, proposals)
  if roles.user and roles.item and not proposals[roles.item].options:
    proposals = _with_sides(proposals, columns, roles)
  if recipes and recipes[0] != "dlrm":
    proposals = {name: _of_a_side(proposal) for name, proposal in proposals.items()}
  if len(recipes) > 0 and roles.user and roles.item:
    settings |= _repeats(columns[roles.user].codes, columns[roles.item].codes, clicked, notes)
  if "dlrm" in recipes and roles.time and sample.is_all:
    settings |= _split(columns[roles.time], clicked, notes)
  if not recipes:
    notes.append(_ask(proposals, columns))
  return Plan(proposals, settings, recipes, notes)


def _check(roles: Roles, columns: Mapping[str, Column]) -> None:
  named = {role: getattr(roles, role) for role in ("label", "user", "item", "time")}
  for role, name in named.items():
    if name and name not in columns:
      raise UserError(f"--{role}={name}: no column; {spec.nearest(name, list(columns))}")
    same = [other for other, value in named.items() if value == name and other != role]
    if name and same:
      raise UserError(f"--{role} and --{same[0]} are both {name!r}: a column has one role")
    if name and not columns[name].present:
      raise UserError(f"--{role}={name}: the column has no value in the sample")
  if roles.positive and not roles.label:
    raise UserError(f"--positive={roles.positive} is a value of the label: give --label too")
  if roles.time and columns[roles.time].times is None:
    example = columns[roles.time].texts[0].as_py()
    raise UserError(
      f"--time={roles.time} has values as {example!r}: a time is a number that grows, or a date "
      "such as 2024-12-31 or 2024-12-31T23:59:59"
    )


def _completed(roles: Roles, columns: Mapping[str, Column], notes: list[str]) -> Roles:
  """Returns the roles with user and item by their names and data, and the time."""
  given = {roles.label, roles.user, roles.item, roles.time}
  free = {name: column for name, column in columns.items() if name not in given}
  pair = {
    side: getattr(roles, side) or next((n for n, c in free.items() if _is_id(c, side)), "")
    for side in ("user", "item")
  }
  if all(pair.values()):
    guessed = [f"--{side}={name}" for side, name in pair.items() if not getattr(roles, side)]
    if guessed:
      notes.append(f"By name and values: {' '.join(guessed)}.")
    roles = dataclasses.replace(roles, **pair)
  if not roles.time:
    times = [
      name
      for name, column in free.items()
      if name not in pair.values() and not column.missing and _is_time(column)
    ]
    times.sort(key=lambda name: not _hinted(name, "time"))  # stable
    roles = dataclasses.replace(roles, time=times[0] if times else "")
  return roles


def _tokens(name: str) -> list[str]:
  words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
  return [word.lower() for word in words]


def _hinted(name: str, role: str) -> bool:
  words = _tokens(name)
  core = [word for word in words if word not in _IDS | {"number", "no", "event"}] or words
  known = _NAMES[role].split()
  return all(word in known for word in core)


def _is_id(column: Column, side: str) -> bool:
  is_discrete = column.stored in ("text", "number") and (column.numbers is None or column.is_whole)
  repeats = 1 < column.distinct <= _ROW_ID * column.present
  return is_discrete and repeats and not column.is_dated and _hinted(column.name, side)


def _is_time(column: Column) -> bool:
  if column.distinct < 2:
    return False
  if column.is_dated:
    return True
  if not column.is_whole or column.placeholders or not _hinted(column.name, "time"):
    return False
  assert column.numbers is not None
  low, high = column.numbers.min(), column.numbers.max()
  epochs = ((3e8 * scale, 4.2e9 * scale) for scale in (1, 1e3, 1e6, 1e9))
  days = (19_000_101, 21_001_231)  # as 20241231
  return any(first <= low and high <= last for first, last in (days, *epochs))


def _label(column: Column, positive: str, notes: list[str]) -> tuple[Proposal, np.ndarray]:
  """Returns the label's declaration, and which rows are clicks."""
  texts, name = column.texts.to_pylist(), column.name
  listed = ", ".join(texts[:_EXAMPLES]) + (" …" if len(texts) > _EXAMPLES else "")
  if positive:
    if positive not in texts:
      hint = spec.nearest(positive, texts[:20])
      raise UserError(f"--positive={positive}: no value of {name!r} in the sample; {hint}")
    proposal = Proposal("label", {"positive": (positive,)}, f"{positive} is a click")
    is_click = np.array([text == positive for text in texts])
  elif len(texts) == 1:
    raise UserError(
      f"--label={name} has one value in the sample, {texts[0]!r}, and a label needs two: read more "
      "with --rows, or leave the label out and give --user and --item"
    )
  elif all(text.lower() in spec.CLICKS + spec.NO_CLICKS for text in texts):
    is_click = np.array([text.lower() in spec.CLICKS for text in texts])
    proposal = Proposal("label", {}, "")
  elif column.numbers is not None and not column.placeholders:
    values = column.of_rows()
    least = float(np.median(values))
    if least == values.min():
      least = float(values[values > least].min())
    least = int(least) if least.is_integer() else least
    proposal = Proposal("label", {"at_least": least}, f"{least} or more is a click")
    is_click = column.numbers >= least
  elif len(texts) == 2:
    proposal = Proposal("label", {"positive": (texts[1],)}, f"{texts[1]} is a click")
    is_click = np.array([False, True])
    notes.append(
      f"{texts[1]!r} is the rarer value of {name}; --positive={_quoted(texts[0])} takes the other."
    )
  else:
    raise UserError(
      f"--label={name} has {len(texts):,} values ({listed}): say which is a click, "
      f"--positive={_quoted(texts[0])}"
    )
  clicked = np.append(is_click, False)[column.codes]
  share = clicked.sum() / column.present
  why = proposal.why and f": {proposal.why}"
  if "at_least" in proposal.options:
    why += ", by the median"
  notes.append(f"{share:.1%} of the rows are clicks{why}.")
  if len(np.unique(is_click)) == 1:
    raise UserError(f"--positive={positive} is the only value of {name!r} in the sample")
  return proposal, clicked


def _quoted(text: str) -> str:
  return text if re.fullmatch(r"[\w.+-]+", text) else f"'{text}'"


def _item(column: Column) -> Proposal:
  if column.stored == "list":
    return Proposal("item", {"separator": "|"}, "a list")
  separator = _separator(column) if column.numbers is None else ""
  if separator:
    return Proposal("item", {"separator": separator}, f"several, cut at {separator!r}")
  return Proposal("item", {}, _many(column))


def _many(column: Column) -> str:
  return f"{column.present / column.distinct:.1f} rows each"


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
  distinct, present, words = column.distinct, column.present, set(_tokens(column.name))
  tells_rows = distinct >= _ROW_ID * present and present >= _FEW_ROWS
  largest = np.nanmax(np.abs(column.numbers))
  if pc.any(pc.match_substring_regex(column.texts, r"^[+-]?0\d")).as_py():
    return _category(column, total, "leading zeros")
  if column.is_whole:
    if distinct <= _FEW_INTEGERS and (distinct <= 3 or 5 * distinct <= present):
      return _category(column, total, "few integers")
    in_order = column.numbers[column.codes]
    if tells_rows and (words & _CODES or largest >= _LONG or (np.diff(in_order) > 0).all()):
      return Proposal("", {}, "each row has its own")
    if words & _CODES:
      return _category(column, total, "ids by name")
    if largest >= _LONG:
      return _category(column, total, "long integers")
  if distinct <= 2:
    return _category(column, total, "two values")
  values = column.of_rows()
  options: dict[str, Any] = {}
  median, tail = np.quantile(values, (0.5, 0.99))
  if values.min() >= 0 and values.max() >= 20 and tail > _HEAVY * max(median, 1.0):
    options["log"] = True
  if column.missing or column.placeholders:
    options["missing"] = "indicator"
  return Proposal("number", options, "heavy tail" if options.get("log") else "")


def _text(column: Column, total: int) -> Proposal:
  distinct, present = column.distinct, column.present
  if _all_match(column.texts, r"^[+-]?[\d.]*\d,\d+$"):
    return Proposal("", {}, "decimal commas")
  if separator := _separator(column):
    options = {} if separator == spec.Bag.separator else {"separator": separator}
    return Proposal("bag", options, f"cut at {separator!r}")
  num_words = pc.mean(pc.list_value_length(pc.utf8_split_whitespace(column.texts))).as_py()
  if num_words >= 4 and distinct > present / 2 and present >= _FEW_ROWS:
    return Proposal("", {}, "free text")
  if distinct >= _ROW_ID * present and present >= _FEW_ROWS:
    return Proposal("", {}, "each row has its own")
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


def _separator(column: Column) -> str:
  """Returns what cuts most texts into parts that repeat; "" if nothing does."""
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


def _rows_without(
  roles: Roles, columns: Mapping[str, Column], notes: list[str], sample: Sample
) -> dict[str, Any]:
  """Returns the setting that leaves out rows without a value that they need."""
  needed = [name for name in (roles.label, roles.user, roles.item, roles.time) if name]
  absent = [f"{name} {columns[name].missing:.1%}" for name in needed if columns[name].missing]
  if absent:
    notes.append(f"Rows without a value are left out: {', '.join(absent)}.")
  return {"on_bad_row": "skip"} if absent or sample.skipped else {}


def _replaced(column: Column, proposal: Proposal) -> tuple[str, ...]:
  return column.placeholders if proposal.kind == "number" else ()


def _recipes(roles: Roles, proposals: Mapping[str, Proposal]) -> tuple[str, ...]:
  is_list = bool(roles.item) and "separator" in proposals[roles.item].options
  rankings: tuple[str, ...] = ()
  if roles.item and (roles.user or is_list):
    rankings = ("sequence", "two_tower") if roles.time else ("two_tower",)
  if roles.label and not is_list:
    return ("dlrm", *reversed(rankings))
  return rankings


def _with_sides(
  proposals: Mapping[str, Proposal], columns: Mapping[str, Column], roles: Roles
) -> dict[str, Proposal]:
  """Returns the proposals with the side of features that a user or an item always has alike."""
  sides = {"user": columns[roles.user], "item": columns[roles.item]}
  title = ""
  changed = dict(proposals)
  for name, proposal in proposals.items():
    column = columns[name]
    if column is sides["user"] or column is sides["item"] or not column.present:
      continue
    side = _side(column, sides)
    if side == "item" and not title and _names_items(column, sides["item"]):
      title = name
      changed[name] = Proposal("title", {}, "of the item")
    elif side and column.distinct >= _ROW_ID * sides[side].distinct and proposal.kind == "category":
      changed[name] = Proposal("", {}, f"as good as {sides[side].name}")
    elif side and issubclass(spec.KINDS.get(proposal.kind, spec.Kind), spec.Side):
      options = proposal.options | {"side": side}
      changed[name] = Proposal(proposal.kind, options, f"of the {side}")
  return changed


def _side(column: Column, sides: Mapping[str, Column]) -> str:
  """Returns the side that always has one value, the one with fewer ids if both have."""
  fitting = []
  for side, ids in sides.items():
    known = ids.codes >= 0
    pairs = ids.codes[known] * (column.distinct + 1) + column.codes[known] + 1
    evidence = known.sum() - ids.distinct
    if evidence >= _FEW_ROWS and len(np.unique(pairs)) <= _SAME * ids.distinct:
      fitting.append((ids.distinct, side))
  return min(fitting)[1] if fitting else ""


def _names_items(column: Column, items: Column) -> bool:
  """Whether a text names items: nearly all have their own, and it has letters and words."""
  if column.stored != "text" or column.numbers is not None or column.is_dated:
    return False
  if column.distinct < 0.8 * items.distinct:
    return False
  is_named = bool(set(_tokens(column.name)) & {"title", "name"})
  return is_named or pc.mean(pc.match_substring(column.texts, " ").cast(pa.int8())).as_py() > 0.5


def _of_a_side(proposal: Proposal) -> Proposal:
  """Leaves out a feature that rankings do not use: it changes from row to row."""
  if issubclass(spec.KINDS.get(proposal.kind, spec.Kind), spec.Side) and not (
    proposal.kind in ("user", "item") or "side" in proposal.options
  ):
    return Proposal("", {}, "of neither user nor item")
  return proposal


def _repeats(
  users: np.ndarray, items: np.ndarray, clicked: np.ndarray, notes: list[str]
) -> dict[str, Any]:
  known = clicked & (users >= 0) & (items >= 0)
  pairs = users[known] * (items.max(initial=0) + 1) + items[known]
  repeats = len(pairs) - len(np.unique(pairs))
  if repeats <= _REPEATS * max(len(pairs), 1):
    return {}
  notes.append(
    f"{repeats / len(pairs):.0%} of the rows repeat a user and an item, so exclude_seen is False: "
    "what a user has had can be recommended."
  )
  return {"exclude_seen": False}


def _split(column: Column, clicked: np.ndarray, notes: list[str]) -> dict[str, Any]:
  """Returns a split by hash where one by time would leave a split without clicks or others."""
  known = column.codes >= 0
  assert column.times is not None
  times, clicked = column.times[column.codes[known]], clicked[known]
  valid, test = np.quantile(times, (0.8, 0.9))
  of_row = (times >= valid).astype(int) + (times >= test)
  sizes, clicks = np.bincount(of_row, minlength=3), np.bincount(of_row, clicked, minlength=3)
  if ((clicks > 0) & (clicks < sizes)).all():
    return {}
  notes.append("By time, a split would have only clicks or none, so the split is by hash.")
  return {"split": {"by": "hash"}}


def _ask(proposals: Mapping[str, Proposal], columns: Mapping[str, Column]) -> str:
  labels = [name for name in proposals if columns[name].distinct == 2 and not columns[name].missing]
  ids = sorted(
    (name for name, proposal in proposals.items() if proposal.kind in ("category", "user", "item")),
    key=lambda name: -columns[name].distinct,
  )
  labels_text = f" ({', '.join(labels[:_EXAMPLES])}?)" if labels else ""
  ids_text = f" ({', '.join(ids[:_EXAMPLES])}?)" if ids else ""
  return (
    f"For a config, name what is predicted with --label{labels_text}, or --user and --item"
    f"{ids_text}."
  )
