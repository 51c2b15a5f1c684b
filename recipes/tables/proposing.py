"""The role of each column of a sample: its values decide, and names are hints."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError
from . import spec
from .profile import Column, Sample, evidence
from .values import NUMBER, same_value

_ROW_ID = 0.95  # distinct values per row from where on a column tells rows apart
_FEW_ROWS = 20  # too few to call a column an id
_FEW_CLICKS = 60  # of which a tenth may be none
_FEW_INTEGERS = 32
_LONG = 1e10  # integers beyond are ids
_MANY, _TOO_MANY = 100_000, 1_000_000  # expected distinct values
_HEAVY = 5.0  # 99th percentile by median
_INTERVALS = 16
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
_UNRELATED = {"birth", "born", "dob", "release", "released", "expiry", "expires", "founded"}
_PARTS = {"year": (1900, 2100), "month": (1, 12), "day": (1, 31), "hour": (0, 23)}
_COMMAS = (r"^[+-]?[\d.]*\d(,\d+)?$", r"^[+-]?\d{1,3}(,\d{3})*(\.\d+)?$")  # not of a bag
_SEPARATORS = {"|": 0.3, ";": 0.3, ",": 0.5, " ": 0.5}  # the share of rows that must have it
_NONE = re.compile(
  r"(?i)unknown|undefined|unspecified|missing|pending|none|nil|#?n/?a|null|not \w+|tbd|-+|\.|\?+"
)
_SIDES = ("user", "item")
_INPUTS = (*_SIDES, "history")  # of towers


class Proposal(NamedTuple):
  """A column's role.

  Attributes:
    kind: of `spec.KINDS`; "" leaves the column out.
    options: of the kind, where they differ from the defaults.
    why: a few words.
  """

  kind: str
  options: dict[str, Any]
  why: str = ""

  @property
  def declaration(self) -> Any:
    """The value in `config.columns`."""
    return {"kind": self.kind, **self.options} if self.options else self.kind

  def is_a(self, cls: type[spec.Kind]) -> bool:
    """Returns whether the kind is one of a class."""
    return issubclass(spec.KINDS.get(self.kind, spec.Kind), cls)


class Roles(NamedTuple):
  """The columns whose role is known, and the label's positive value; "" where they are not."""

  label: str = ""
  user: str = ""
  item: str = ""
  time: str = ""
  positive: str = ""


@dataclasses.dataclass
class Plan:
  """What is proposed for a table.

  Attributes:
    columns: proposals by column, in the order of the table.
    more: proposals that read columns under other names.
    settings: of the config besides files, format and columns.
    missing: texts that mean no value, besides those of `Format`.
    recipes: names of the recipes that the config trains, the first being the one to try first.
    notes: sentences for the user.
    side: "user" or "item" for a table with one row for each of them, "" for others.
  """

  columns: dict[str, Proposal]
  more: dict[str, Proposal]
  settings: dict[str, Any]
  missing: tuple[str, ...]
  recipes: tuple[str, ...]
  notes: list[str]
  side: str = ""

  @property
  def declared(self) -> dict[str, Any]:
    """The value of `config.columns`."""
    every = {name: each for name, each in {**self.columns, **self.more}.items() if each.kind}
    return {name: each.declaration for name, each in every.items()}


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


def feature(column: Column, total: int, y: np.ndarray | None = None) -> Proposal:
  """Returns what a column without a role of its own is.

  Args:
    column: of the sample, of N rows.
    total: rows of the table.
    y: float64 `[N]`, the label, NaN of rows that are left out; None without one.
  """
  known = None
  if column.stored == "nested":
    return Proposal("", {}, "holds structs")
  if not column.present:
    return Proposal("", {}, "no values")
  if column.distinct == 1 and not column.missing:
    return Proposal("", {}, "constant")
  if y is not None and (column.missing or not column.is_dated):
    known = evidence(column, y)
    if known.is_leak:
      filled = f"filled in for {('no click', 'clicks')[known.only or 0]} only"
      return Proposal("", {}, f"a leak, {f'AUC {known.auc:.3f}' if known.only is None else filled}")
  if column.stored == "list":
    return Proposal("bag", {}, "lists")
  if column.is_dated:
    return Proposal("", {}, "a time, missing in places" if column.missing else "another time")
  if column.numbers is not None:
    return _number(column, total, known.favors if known else "")
  return Proposal("category", {}) if column.stored == "yes/no" else _text(column, total)


def _number(column: Column, total: int, favored: str) -> Proposal:
  distinct, present, words = column.distinct, column.present, set(tokens(column.name))
  tells_rows = distinct >= _ROW_ID * present and present >= _FEW_ROWS
  is_named = any((words & _CODES, *(is_hinted(column.name, side) for side in ("user", "item"))))
  values = column.of_rows[~np.isnan(column.of_rows)]
  low, median, tail, high = np.quantile(values, (0, 0.5, 0.99, 1))
  is_long = max(abs(low), abs(high)) >= _LONG
  if pc.any(pc.match_substring_regex(column.texts, r"^[+-]?0\d")).as_py():
    return _category(column, total, "leading zeros")
  if distinct <= (3 if column.is_whole and 5 * distinct <= present else 2):
    return _category(column, total, "two values" if distinct <= 2 else "few integers")
  if column.is_whole:
    if tells_rows and (is_named or is_long or (np.diff(values) > 0).all()):
      return Proposal("", {}, "unique per row")
    if favored == "category":
      return _category(column, total, "tells by value")
    if favored != "number":
      if distinct <= _FEW_INTEGERS and 5 * distinct <= present:
        return _category(column, total, "few integers")
      if is_named or is_long:
        return _category(column, total, "ids by name" if is_named else "long integers")
  options: dict[str, Any] = {}
  if low >= -high / 100 and high >= 20 and tail > _HEAVY * max(median, 1.0):
    options["log"] = True
  if column.missing or column.placeholders:
    options["missing"] = "indicator"
  why = "tells by order" if favored and column.is_whole else ""
  return Proposal("number", options, "heavy tail" if options.get("log") else why)


def _text(column: Column, total: int) -> Proposal:
  has = lambda pattern: pc.all(pc.match_substring_regex(column.texts, pattern)).as_py()
  if any(map(has, _COMMAS)) or has(r"^\[.*\]$"):
    return Proposal("", {}, "numbers with commas" if any(map(has, _COMMAS)) else "lists in brackets")
  if separator := _separator(column):
    options = {} if separator == spec.Bag.separator else {"separator": separator}
    return Proposal("bag", options, f"cut at {separator!r}")
  num_words = pc.mean(pc.list_value_length(pc.utf8_split_whitespace(column.texts))).as_py()
  if column.present >= _FEW_ROWS:
    if num_words >= 4 and column.distinct > column.present / 2:
      return Proposal("", {}, "free text")
    if column.distinct >= _ROW_ID * column.present:
      return Proposal("", {}, "unique per row")
  return _category(column, total, "")


def _category(column: Column, total: int, why: str) -> Proposal:
  """Returns a category, with what its number of values asks for."""
  # Good 1953: the share of values seen once is the chance that the next one is new.
  once, unseen = (column.counts == 1).sum(), total - len(column.codes)
  expected = column.distinct + once / column.present * unseen
  if expected <= _MANY:
    return Proposal("category", {}, why)
  short = f"{expected / 1e6:.1f}M" if expected >= 1e6 else f"{expected / 1e3:.0f}k"
  options = {"hash": _TOO_MANY} if expected > _TOO_MANY else {"min_count": 5}
  return Proposal("category", options, f"about {short} values")


def _separator(column: Column) -> str:
  """Returns the text that cuts most texts into parts that repeat; "" if nothing does."""
  for separator, share in _SEPARATORS.items():
    has_it = pc.match_substring(column.texts, separator).to_numpy(zero_copy_only=False)
    if column.counts[has_it].sum() < share * column.present:
      continue
    _, values, _ = column.items(separator)
    repeats = 2 <= len(values) < column.distinct and values.sum() >= 2 * len(values)
    if separator == " ":  # titles and addresses have words of their own
      few = (values == 1).sum() < 0.05 * column.distinct
      repeats &= bool(few) and 2 * len(values) <= column.distinct
    if repeats:
      return separator
  return ""


def propose(sample: Sample, roles: Roles) -> Plan:
  """Returns the roles of all columns, and the recipes that they serve.

  Raises:
    UserError: a role's column does not exist or cannot have the role; says what to write.
  """
  _check(roles, sample.columns)
  planner = _Planner(sample, roles)
  planner.fill()
  return planner.plan


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
    raise UserError(
      f"--time={roles.time} has values as {columns[roles.time].texts[0].as_py()!r}: a time is a "
      "number that grows, or a date such as 2024-12-31 or 2024-12-31T23:59:59"
    )


class _Planner:
  """Fills in a plan.

  Args:
    sample: of the table.
    roles: that the user has given.
  """

  def __init__(self, sample: Sample, roles: Roles):
    self.sample, self.columns = sample, sample.columns
    self.plan = Plan({}, {}, {}, (), (), [])
    self.roles = self._completed(roles)
    self.y: np.ndarray | None = None
    self.clock: np.ndarray | None = None  # float64 [N], NaN without a time

  def fill(self) -> None:
    plan, roles, columns = self.plan, self.roles, self.columns
    known: dict[str, Proposal] = {}
    if roles.label:
      known[roles.label] = self._label(columns[roles.label])
    if roles.user:
      known[roles.user] = Proposal("user", {}, _rows_each(columns[roles.user]))
    if roles.item:
      known[roles.item] = _item(columns[roles.item])
    if roles.time:
      known[roles.time] = Proposal("time", {})
      times = columns[roles.time].times
      self.clock = np.append(times, np.nan)[columns[roles.time].codes]
    elif parts := _date_parts(columns):
      self._date(parts, known)
    for name, column in columns.items():
      plan.columns[name] = known.get(name) or feature(column, self.sample.total, self.y)
    self._settings()
    numbers = [columns[name] for name, each in plan.columns.items() if each.kind == "number"]
    plan.missing = tuple(dict.fromkeys(text for each in numbers for text in each.placeholders))
    if plan.missing:
      plan.notes.append(f"Taken for missing numbers: {', '.join(map(repr, plan.missing))}.")
    self._note_oddities()
    sides = [side for side in ("user", "item") if getattr(roles, side)]
    ids = columns[getattr(roles, sides[0])] if len(sides) == 1 else None
    if not plan.recipes and ids and ids.distinct == self.sample.num_rows:
      plan.side = sides[0]
      plan.notes.append(f"Each row is {'an item' if plan.side == 'item' else 'a user'} of its own.")
      names = (name for name in columns if plan.columns[name].kind in ("", "category"))
      if title := next((n for n in names if sides[0] == "item" and self._names_items(n)), ""):
        plan.columns[title] = Proposal("title", {}, "of the item")
    elif not plan.recipes and not roles.label and len(sides) < 2:
      plan.notes.append(self._question())

  def _completed(self, roles: Roles) -> Roles:
    """Returns the roles with user and item by their names and data, and the time."""
    free = {name: column for name, column in self.columns.items() if name not in roles[:4]}
    pair = {
      side: getattr(roles, side) or next((n for n, c in free.items() if _is_id(c, side)), "")
      for side in ("user", "item")
    }
    if all(pair.values()):
      guessed = [f"--{side}={name}" for side, name in pair.items() if not getattr(roles, side)]
      self.plan.notes += [f"Guessed by name and values: {' '.join(guessed)}."] * bool(guessed)
      roles = roles._replace(**pair)
    if roles.time:
      return roles
    ids = {side: self.columns[name] for side, name in pair.items() if name}
    times = [
      name
      for name, column in free.items()
      if name not in pair.values()
      and _is_time(column)
      and (is_hinted(name, "time") or not _side(column, ids))  # not a date of the item
    ]
    times.sort(key=lambda name: not is_hinted(name, "time"))  # stable
    return roles._replace(time=times[0] if times else "")

  def _date(self, parts: list[Column], known: dict[str, Proposal]) -> None:
    """Makes one time of the columns year, month, day and perhaps hour."""
    names = tuple(column.name for column in parts)
    name = next(each for each in ("time", "date", "date_and_time") if each not in self.columns)
    self.plan.more[name] = Proposal("time", {"columns": names})
    self.plan.notes.append(f"{', '.join(names)} are one time.")
    self.clock = _seconds(parts)
    for column in (parts[0], parts[2]):
      known.setdefault(column.name, Proposal("", {}, "in the time"))

  def _label(self, column: Column) -> Proposal:
    """Returns the label's declaration, and sets `y`."""
    name, positive, notes = column.name, self.roles.positive, self.plan.notes
    counts = dict(zip(column.texts.to_pylist(), column.counts.tolist(), strict=True))
    clicks = [text for text in counts if positive and _same(text, positive)]
    if positive and not clicks:
      hint = spec.nearest(positive, list(counts)[:20])
      raise UserError(f"--positive={positive}: no value of {name!r} in the sample; {hint}")
    unknown = [text for text in counts if _NONE.fullmatch(text) and text not in clicks]
    dropped = unknown if len(counts) - len(unknown) >= 2 else []
    texts, options = [text for text in counts if text not in dropped], {}
    if positive:
      options["positive"] = (positive,)
    elif all(text.lower() in spec.CLICKS + spec.NO_CLICKS for text in texts):
      clicks = [text for text in texts if text.lower() in spec.CLICKS]
    elif len(texts) > 1 and all(re.match(NUMBER, text) for text in texts):
      values = np.array(texts, float)
      least = np.median(np.repeat(values, [counts[text] for text in texts]))
      least = float(least if least > values.min() else values[values > least].min())
      options["at_least"] = int(least) if least.is_integer() else least
      clicks = [text for text, value in zip(texts, values, strict=True) if value >= least]
    elif len(texts) == 2:
      options, clicks = {"positive": (texts[1],)}, texts[1:]
      which = f"--positive={_quoted(texts[0])} takes the other"
      notes.append(f"{texts[1]!r} is the rarer value of {name}; {which}.")
    elif len(texts) > 2:
      listed = ", ".join(texts[:_EXAMPLES]) + (" …" if len(texts) > _EXAMPLES else "")
      raise UserError(
        f"--label={name} has {len(texts):,} values ({listed}): say which is a click, "
        f"--positive={_quoted(texts[0])}"
      )
    if len(clicks) in (0, len(texts)) or len(texts) == 1:
      raise UserError(
        f"--label={name} has one value in these rows, {texts[0]!r}, and a label needs two: read "
        "more of a longer file with --rows, or leave the label out and give --user and --item"
      )
    of_text = [np.nan if text in dropped else float(text in clicks) for text in counts]
    self.y = np.append(of_text, np.nan)[column.codes]
    rate, why = np.nanmean(self.y), ""
    if options:
      least = options.get("at_least")
      why = f"{clicks[0]} is a click" if least is None else f"{least} or more is a click"
    by = f": {why}{', by the median' if 'at_least' in options else ''}" if why else ""
    notes.append(f"{rate:.{1 if rate >= 0.01 else 2}%} of the rows are clicks{by}.")
    if dropped:
      options["drop"] = tuple(dropped)
      share = sum(counts[text] for text in dropped) / column.present
      notes.append(f"Rows with the label {', '.join(map(repr, dropped))} are left out: {share:.1%}.")
    return Proposal("label", options, why)

  def _settings(self) -> None:
    """Fills in recipes and settings, and what features have to be for them."""
    plan, roles, columns = self.plan, self.roles, self.columns
    needed = [columns[name] for name in roles[:4] if name]
    absent = [f"{each.name} {each.missing:.1%}" for each in needed if each.missing]
    if absent:
      plan.notes.append(f"Rows without a value are left out: {', '.join(absent)}.")
    if absent or self.sample.skipped:
      plan.settings["on_bad_row"] = "skip"
    is_list = bool(roles.item) and "separator" in plan.columns[roles.item].options
    if not is_list and roles.user and roles.item:
      self._add_sides()
    if roles.item and (is_list or (roles.user and self._has_rankings())):
      plan.recipes = ("two_tower",) if self.clock is None else ("sequence", "two_tower")
    if self.y is None or is_list:
      for name, each in plan.columns.items() if plan.recipes else ():
        if each.is_a(spec.Side) and not each.is_a(spec.Id) and "side" not in each.options:
          plan.columns[name] = Proposal("", {}, "varies by row")
      return
    if self._split() and self._has_vectors():
      plan.recipes = ("dlrm", *reversed(plan.recipes))

  def _add_sides(self) -> None:
    """Adds the side to features that a user or an item always has alike; one text is the title."""
    plan, ids = self.plan, {side: self.columns[getattr(self.roles, side)] for side in _SIDES}
    for name, proposal in list(plan.columns.items()):
      column = self.columns[name]
      side = _side(column, ids) if name not in self.roles[:4] and column.present else ""
      if not side:
        continue
      has_title = any(each.kind == "title" for each in plan.columns.values())
      if side == "item" and not has_title and self._names_items(name):
        plan.columns[name] = Proposal("title", {}, "of the item")
      elif column.distinct >= _ROW_ID * ids[side].distinct and proposal.kind == "category":
        plan.columns[name] = Proposal("", {}, f"as good as {ids[side].name}")
      elif proposal.is_a(spec.Side):
        options = proposal.options | {"side": side}
        plan.columns[name] = Proposal(proposal.kind, options, f"of the {side}")
        if name in _INPUTS:
          plan.more[f"{name}_"] = Proposal(proposal.kind, {"column": name, **options})
          plan.columns[name] = Proposal("", {}, f"read as {name}_")

  def _has_rankings(self) -> bool:
    """Returns whether a user has three items, two to be held out; and keeps many repeats."""
    users, items = self.columns[self.roles.user].codes, self.columns[self.roles.item].codes
    known = (users >= 0) & (items >= 0) & (True if self.y is None else self.y == 1)
    pairs, rows = np.unique(np.stack([users[known], items[known]]), axis=1)[0], known.sum()
    if len(pairs) == 0 or np.bincount(pairs).max() < 3:
      self.plan.notes.append("No user has three items, and rankings hold out two of them.")
      return False
    if rows - len(pairs) > _REPEATS * rows:
      self.plan.settings["exclude_seen"] = False
      self.plan.notes.append(
        f"{1 - len(pairs) / rows:.0%} of the rows repeat a user and an item, so exclude_seen is "
        "False: what a user has had can be recommended."
      )
    return True

  def _split(self) -> bool:
    """Sets a split whose parts have both outcomes, the first values of all features, or returns False."""
    plan, y, parts = self.plan, self.y, None
    if not self.sample.is_all:
      return True
    has_both = lambda parts: all(len(np.unique(y[(parts == n) & ~np.isnan(y)])) == 2 for n in range(3))
    if self.clock is not None:
      parts = np.searchsorted(np.nanquantile(self.clock, (0.8, 0.9)), self.clock, side="right")
      if not has_both(parts):
        plan.notes.append("By time, a part would have only clicks or none: the split is by hash.")
        plan.settings["split"] = {"by": "hash"}
        parts = None
    if parts is None:
      for share, seed in itertools.product((0.1, 0.25), range(20)):
        parts = self.sample.split(share, seed)
        if has_both(parts):
          break
      else:
        plan.notes.append("There are too few clicks, or rows without, to have some in each split.")
        return False
      if (share, seed) != (0.1, 0):
        plan.settings["split"] = {"by": "hash", "valid": share, "test": share, "seed": seed}
    rare, training = int(min((y == 1).sum(), (y == 0).sum())), (parts == 0) & ~np.isnan(y)
    if rare < _FEW_CLICKS:
      which = "clicks" if rare == (y == 1).sum() else "rows without a click"
      plan.notes.append(f"There are only {rare} {which}: too few to tell one model from another.")
    for name, each in plan.columns.items():
      if each.is_a(spec.Embedded) and not (self.columns[name].codes[training] >= 0).any():
        plan.columns[name] = Proposal("", {}, "no value to train on")
    return True

  def _has_vectors(self) -> bool:
    """Returns whether dlrm has a feature with vectors, after making one of a number or the time."""
    plan, time = self.plan, self.columns.get(self.roles.time)
    if any(each.is_a(spec.Category) for each in (*plan.columns.values(), *plan.more.values())):
      return True
    assert self.y is not None
    numbers = [name for name, each in plan.columns.items() if each.kind == "number"]
    if numbers:
      name = max(numbers, key=lambda name: evidence(self.columns[name], self.y).by_order)
      options = {k: v for k, v in plan.columns[name].options.items() if k != "log"}
      options["buckets"] = _INTERVALS
      plan.columns[name] = Proposal("number", options, "")
      plan.notes.append(f"All features are numbers: the intervals of {name} get vectors.")
    elif time is not None and time.numbers is None:
      hours = len(pc.unique(pc.utf8_slice_codeunits(time.texts, 11, 13)))
      part, pattern = ("hour", r"[T ](\d\d)") if hours > 1 else ("day", r"^\d{4}.\d\d.(\d\d)")
      plan.more[f"{time.name}_{part}"] = Proposal(
        "category", {"column": time.name, "pattern": pattern}
      )
      plan.notes.append(f"Only the time is left to learn from: its {part} is a category.")
    elif time is not None:
      options = {"column": time.name, "buckets": _INTERVALS}
      plan.more[f"{time.name}_interval"] = Proposal("number", options)
      plan.notes.append("Only the time is left to learn from: its intervals get vectors.")
    else:
      plan.notes.append("No column is left to learn from: see above why each is left out.")
      return False
    return True

  def _note_oddities(self) -> None:
    notes, proposals = self.plan.notes, self.plan.columns
    if leaks := [name for name, each in proposals.items() if each.why.startswith("a leak")]:
      notes.append(
        f"Leaks are left out, as they tell the outcome: {', '.join(leaks)}. Declare one only if "
        "its value is known before the outcome is."
      )
    suspects = [
      f"{name} {text!r} ({rows / len(column.codes):.0%})"
      for name, column in self.columns.items()
      if proposals[name].kind not in ("", "label", "time")
      for text, rows in _suspects(column)
    ]
    if suspects:
      more = f" and {len(suspects) - _EXAMPLES} more" if len(suspects) > _EXAMPLES else ""
      listed = f"{', '.join(suspects[:_EXAMPLES])}{more}"
      notes.append(f"Taken as values, perhaps none: {listed}. Name what is none in format.missing.")
    if (share := self.sample.repeated()) >= 0.005:
      notes.append(f"{share:.1%} of the rows repeat another one in all columns.")
    if nameless := [name for name in self.columns if re.fullmatch(r"column \d+", name)]:
      notes.append(f"Called by their place, as the header has no name: {', '.join(nameless)}.")

  def _names_items(self, name: str) -> bool:
    """Whether a text names items: nearly all have their own, and it has letters and words."""
    column, items = self.columns[name], self.columns[self.roles.item]
    if column.type() != "text" or name == items.name or column.distinct < 0.8 * items.distinct:
      return False
    spaced = pc.mean(pc.match_substring(column.texts, " ").cast(pa.int8())).as_py()
    return bool(set(tokens(name)) & {"title", "name"}) or spaced > 0.5

  def _question(self) -> str:
    """Returns the question that is left where no recipe fits, with columns that may answer it."""
    columns, proposals = self.columns, self.plan.columns
    labels = [name for name, each in columns.items() if each.distinct == 2 and not each.missing]
    ids = [name for name, each in proposals.items() if each.kind == "category"]
    ids.sort(key=lambda name: -columns[name].distinct)
    sides = " and ".join(f"--{side}" for side in _SIDES if not getattr(self.roles, side))
    listed = lambda names: f" ({', '.join(names[:_EXAMPLES])}?)" if names else ""
    predicted = f"the column that is predicted, --label{listed(labels)}"
    return f"For a config, name {predicted}, or {sides}{listed(ids)}."


def _is_id(column: Column, side: str) -> bool:
  is_discrete = column.stored in ("text", "number") and (column.numbers is None or column.is_whole)
  repeats = 1 < column.distinct <= _ROW_ID * column.present
  return is_discrete and repeats and not column.is_dated and is_hinted(column.name, side)


def _is_time(column: Column) -> bool:
  if column.missing or column.distinct < 2 or set(tokens(column.name)) & _UNRELATED:
    return False
  if column.numbers is None or column.placeholders or not is_hinted(column.name, "time"):
    return column.is_dated
  low, high = column.numbers.min(), column.numbers.max()
  epochs = ((3e8 * scale, 4.2e9 * scale) for scale in (1, 1e3, 1e6, 1e9))
  days = (19_000_101, 21_001_231)  # as 20241231
  return any(first <= low and high <= last for first, last in epochs) or (
    column.is_whole and days[0] <= low and high <= days[1]
  )


def _date_parts(columns: Mapping[str, Column]) -> list[Column]:
  """Returns the columns year, month, day, and hour if there is one, that are dates together."""
  found: dict[tuple[str, ...], dict[str, Column]] = {}
  for name, column in columns.items():
    *words, part = tokens(name) or [""]
    low, high = _PARTS.get(part, (0, -1))
    if column.is_whole and not column.missing and not column.placeholders:
      if low <= column.numbers.min() and column.numbers.max() <= high:
        found.setdefault(tuple(words), {})[part] = column
  for parts in found.values():
    date = [parts[part] for part in _PARTS if part in parts]
    if {"year", "month", "day"} <= set(parts) and not np.isnan(_seconds(date)).any():
      return date
  return []


def _seconds(parts: Sequence[Column]) -> np.ndarray:
  """Returns the seconds of dates in several columns, float64 `[N]`, NaN where a month has no such day."""
  year, month, day, *hour = (column.of_rows.astype(int) for column in parts)
  months = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
  dates = months.astype("datetime64[D]") + (day - 1)
  seconds = dates.astype("datetime64[s]").astype(float) + 3600 * sum(hour)
  return np.where(dates.astype("datetime64[M]") == months, seconds, np.nan)


def _same(text: str, other: str) -> bool:
  return len(same_value(pa.array([text, other])).unique()) == 1


def _quoted(text: str) -> str:
  return text if re.fullmatch(r"[\w.+-]+", text) else f"'{text}'"


def _item(column: Column) -> Proposal:
  if column.stored == "list":
    return Proposal("item", {"separator": "|"}, "a list")
  if separator := "" if column.numbers is not None else _separator(column):
    return Proposal("item", {"separator": separator}, f"several, cut at {separator!r}")
  return Proposal("item", {}, _rows_each(column))


def _rows_each(column: Column) -> str:
  rows = column.present / column.distinct
  return "one row each" if rows == 1 else f"{rows:.1f} rows each"


def _side(column: Column, sides: Mapping[str, Column]) -> str:
  """Returns the side that always has one value, the one with fewer ids if both have."""
  fitting = []
  for side, ids in sides.items():
    known = ids.codes >= 0
    pairs = ids.codes[known] * (column.distinct + 1) + column.codes[known] + 1
    has_evidence = known.sum() - ids.distinct >= _FEW_ROWS
    if has_evidence and len(np.unique(pairs)) <= _SAME * ids.distinct:
      fitting.append((ids.distinct, side))
  return min(fitting)[1] if fitting else ""


def _suspects(column: Column) -> list[tuple[str, int]]:
  """Returns values that others write where there is none, and the rows with each."""
  texts, numbers = column.texts.to_pylist()[:_EXAMPLES], column.numbers
  if numbers is None:
    return [(t, n) for t, n in zip(texts, column.counts, strict=False) if _NONE.fullmatch(t)]
  found = []
  for text, number, rows in zip(texts, numbers, column.counts, strict=False):
    others = numbers[numbers != number]
    is_apart = others.min() >= 0 if number < 0 else others.max() < number / 2
    if re.fullmatch(r"-1|-?99+(\.0+)?", text) and len(others) and is_apart:
      found.append((text, rows))
  return found
