"""The role of each column of a sample: its values and the label decide, and names are hints."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ..errors import UserError
from . import spec
from .formats import free
from .profile import JOIN, Column, Sample, leak, numbers_in
from .spec import as_text

_ROW_ID = 0.95  # distinct values per row from where on a column tells rows apart
_FEW_ROWS = 20  # too few to call a column an id
_FEW_CLICKS = 60
_FEW_INTEGERS = 32
_LONG = 1e10  # integers beyond are ids
_MANY, _TOO_MANY = 100_000, 1_000_000  # expected distinct values
_HEAVY = 5.0  # 99th percentile by median
_INTERVALS = 16
_REPEATS = 0.1  # of the rows, as recipes.tables.interactions says
_SAME = 1.01  # distinct pairs of an id and a value per distinct id, for a value that an id has
_EXAMPLES = 5
_SIDES = ("user", "item")
_INPUTS = (*_SIDES, "history")  # of towers

_NAMES = {
  "user": "user uid visitor customer client member account reader buyer viewer listener person",
  "item": "item iid product movie film track song video book article sku asin listing recipe "
  "business place location poi artist game restaurant",
  "time": "time timestamp datetime date ts day when unixtime created at event",
}
_IDS = {"id", "ids", "code", "hash", "key"}  # words that a name may have besides
_CODES = _IDS | {"zip", "zipcode", "postcode", "postal", "type", "cat", "category"}
_UNRELATED = {"birth", "born", "dob", "release", "released", "expiry", "expires", "founded"}
_UNREAD = {  # by what is said of them: texts that would be categories of what has an order
  "numbers with commas": r"^[+-]?([\d.]*\d(,\d+)?|\d{1,3}(,\d{3})*(\.\d+)?)$",
  "dates, not as 2024-12-31": r"^(\d\d?[/-]\d\d?[/-](\d\d)?\d\d|\d\d?\.\d\d?\.(19|20)\d\d|"
  r"(19|20)\d\d[/.]\d\d?[/.]\d\d?)([T ,].*)?$",
  "lists in brackets": r"^\[.*\]$",
}
_SEPARATORS = {"|": 0.3, ";": 0.3, ",": 0.5, " ": 0.5}  # the share of rows that must have it
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_NONE = re.compile(
  r"(?i)unknown|undefined|unspecified|missing|pending|none|nil|#?n/?a|null|not \w+|tbd|-+|\.|\?+"
)


class Proposal(NamedTuple):
  """A column's role: a kind of `spec.KINDS`, "" to leave it out, and why in a few words."""

  kind: str
  options: dict[str, Any]  # where they differ from the defaults
  why: str = ""

  @property
  def declaration(self) -> Any:
    """The value in `config.columns`."""
    return {"kind": self.kind, **self.options} if self.options else self.kind

  def is_a(self, cls: type[spec.Kind]) -> bool:
    """Returns whether the kind is one of a class."""
    return issubclass(spec.KINDS.get(self.kind, spec.Kind), cls)


def _left_out(why: str) -> Proposal:
  return Proposal("", {}, why)


class Roles(NamedTuple):
  """The columns whose role is known, and the label's positive value; "" where they are not."""

  label: str = ""
  user: str = ""
  item: str = ""
  time: str = ""
  positive: str = ""
  more: tuple[str, ...] = ()  # further labels

  @property
  def pairs(self) -> list[tuple[str, str]]:
    """The roles that are known, and their columns."""
    single = {"label": self.label, "user": self.user, "item": self.item, "time": self.time}
    pairs = [(role, name) for role, name in single.items() if name]
    return [*pairs, *(("label", name) for name in self.more)]

  @property
  def names(self) -> tuple[str, ...]:
    """The columns with a role."""
    return tuple(name for _, name in self.pairs)


@dataclasses.dataclass
class Plan:
  """What is proposed for a table.

  Attributes:
    columns: proposals by column of the table, and of names for what else is read of its columns.
    settings: of the config besides files, format and columns.
    missing: texts that mean no value, besides those of `Format`.
    recipes: names of the recipes that the config trains, the first being the one to try first.
    notes: sentences for the user.
    side: "user" or "item" for a table with one row for each of them, "" for others.
    items: how many there are in the sample's interactions; 0 where they are not counted.
  """

  columns: dict[str, Proposal] = dataclasses.field(default_factory=dict)
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  missing: tuple[str, ...] = ()
  recipes: tuple[str, ...] = ()
  notes: list[str] = dataclasses.field(default_factory=list)
  side: str = ""
  items: int = 0

  @property
  def declared(self) -> dict[str, Any]:
    """The value of `config.columns`."""
    return {name: each.declaration for name, each in self.columns.items() if each.kind}

  @property
  def sources(self) -> list[str]:
    """The columns of the table that are declared."""
    declared = [(n, each.options) for n, each in self.columns.items() if each.kind]
    names = (of.get("columns", (of.get("column", name),)) for name, of in declared)
    return list(dict.fromkeys(itertools.chain(*names)))


def tokens(name: str) -> list[str]:
  """Returns the words of a name in lower case.

  >>> tokens("lastVisit_at2")
  ['last', 'visit', 'at', '2']
  """
  return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def is_hinted(name: str, role: str) -> bool:
  """Returns whether a name is a usual one for a "user", an "item" or a "time".

  >>> is_hinted("movieId", "item"), is_hinted("product_category", "item")
  (True, False)
  """
  words = tokens(name)
  core = [word for word in words if word not in _IDS | {"number", "no", "event"}] or words
  return bool(core) and all(word in _NAMES[role].split() for word in core)


def feature(column: Column, total: int, y: np.ndarray | None = None) -> Proposal:
  """Returns what a column without a role of its own is.

  Args:
    column: of the sample, of N rows.
    total: rows of the table.
    y: float64 `[N]`, the label, NaN for rows that are left out; None without one.
  """
  if column.stored == "nested":
    return _left_out("holds structs")
  if not column.present:
    return _left_out("no values")
  if column.distinct == 1 and not column.missing:
    return _left_out("constant")
  if y is not None and (how := leak(column, y)):
    return _left_out(f"leak, {how}")
  if column.is_dated:
    return _left_out("a time, missing in places" if column.missing else "another time")
  if column.stored == "list":
    width = _width_of_vectors(column)
    return Proposal("vector", {"width": width}, "") if width else Proposal("bag", {}, "lists")
  if column.numbers is not None:
    return _number(column, total)
  return Proposal("category", {}) if column.stored == "yes/no" else _text(column, total)


def _width_of_vectors(column: Column) -> int:
  """Returns how many numbers all lists of a column have, some with fractions; else 0."""
  lists = pc.split_pattern(column.texts, JOIN)
  numbers = numbers_in(lists.flatten())
  widths = pc.unique(pc.list_value_length(lists)).to_pylist()
  has_gaps = len(widths) != 1 or np.isnan(numbers).any()
  return 0 if has_gaps or widths[0] < 2 or not (numbers % 1).any() else widths[0]


def _number(column: Column, total: int) -> Proposal:
  distinct, present, words = column.distinct, column.present, set(tokens(column.name))
  values = column.of_rows[~np.isnan(column.of_rows)]
  low, median, tail, high = np.quantile(values, (0, 0.5, 0.99, 1))
  is_named = bool(words & _CODES) or any(is_hinted(column.name, side) for side in _SIDES)
  is_long, is_few = max(abs(low), abs(high)) >= _LONG, 5 * distinct <= present
  if pc.any(pc.match_substring_regex(column.texts, r"^[+-]?0\d")).as_py():
    return _category(column, total, "leading zeros")
  if distinct <= (3 if column.is_whole and is_few else 2):
    return _category(column, total, "two values" if distinct <= 2 else "few integers")
  if column.is_whole:
    is_id = is_named or is_long or (np.diff(values) > 0).all()
    if is_id and distinct >= _ROW_ID * present and present >= _FEW_ROWS:
      return _left_out("unique per row")
    reasons = {
      "few integers": distinct <= _FEW_INTEGERS and is_few,
      "ids by name": is_named,
      "long integers": is_long,
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
      return _category(column, total, why)
  options: dict[str, Any] = {}
  if low >= -high / 100 and high >= 20 and tail > _HEAVY * max(median, 1.0):
    options["log"] = True
  return Proposal("number", options, "heavy tail" if options.get("log") else "")


def _text(column: Column, total: int) -> Proposal:
  are_all = lambda pattern: pc.all(pc.match_substring_regex(column.texts, pattern)).as_py()
  has_comma = pc.any(pc.match_substring(column.texts, ",")).as_py()  # long numbers have none
  for what, pattern in _UNREAD.items():
    if are_all(pattern) and (has_comma or "commas" not in what):
      return _left_out(what)
  if separator := _separator(column):
    options = {} if separator == spec.Bag.separator else {"separator": separator}
    return Proposal("bag", options, f"cut at {separator!r}")
  num_words = pc.mean(pc.list_value_length(pc.utf8_split_whitespace(column.texts))).as_py()
  if column.present >= _FEW_ROWS:
    if num_words >= 4 and column.distinct > column.present / 2:
      return _left_out("free text")
    if column.distinct >= _ROW_ID * column.present:
      return _left_out("unique per row")
  return _category(column, total, "")


def _category(column: Column, total: int, why: str) -> Proposal:
  """Returns a category, with what its number of values asks for."""
  # Good 1953: the share of values seen once is the chance that the next one is new.
  once, unread = (column.counts == 1).sum(), total - len(column.codes)
  expected = column.distinct + once / column.present * unread
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
    values = column.items(separator)[1]
    repeats = 2 <= len(values) < column.distinct and values.sum() >= 2 * len(values)
    if separator == " ":  # titles and addresses have words of their own
      few = (values == 1).sum() < 0.05 * column.distinct
      repeats = repeats and few and 2 * len(values) <= column.distinct
    if repeats:
      return separator
  return ""


def propose(sample: Sample, roles: Roles) -> Plan:
  """Returns the roles of all columns, and the recipes that they serve.

  Raises:
    UserError: a role's column does not exist or cannot have the role; says what to write.
  """
  columns, named = sample.columns, roles.pairs
  if roles.positive and (not roles.label or roles.more):
    how = "give one label alone" if roles.more else "give --label too"
    raise UserError(f"--positive={roles.positive} is a value of the label: {how}")
  for role, name in named:
    if name not in columns:
      raise UserError(f"--{role}={name}: no column; {spec.nearest(name, list(columns))}")
    if len(same := [other for other, value in named if value == name]) > 1:
      raise UserError(f"--{same[0]} and --{same[1]} are both {name!r}: a column has one role")
    if not columns[name].present:
      raise UserError(f"--{role}={name}: the column has no value in the sample")
  if roles.time and columns[roles.time].times is None:
    raise UserError(
      f"--time={roles.time} has values as {columns[roles.time].texts[0].as_py()!r}: a time is a "
      "number that grows, or a date such as 2024-12-31 or 2024-12-31T23:59:59"
    )
  return _Planner(sample, roles).plan


class _Planner:
  """Makes a plan of a sample and the roles that the user has given."""

  def __init__(self, sample: Sample, roles: Roles):
    self.sample, self.columns, self.plan = sample, sample.columns, Plan()
    self.ys: list[np.ndarray] = []  # of each label [N], 1 for a click, 0 for none, NaN without
    self.clock: np.ndarray | None = None  # [N], the times as numbers, NaN without one
    self.roles = self._completed(roles)
    known = self._with_roles()
    for name, column in self.columns.items():
      if name in known:
        self.plan.columns[name] = known[name]
        continue
      ys: list[np.ndarray | None] = [*self.ys] or [None]
      found = [feature(column, sample.total, y) for y in ys]
      leaks = [each for each in found if each.why.startswith("leak")]
      self.plan.columns[name] = (leaks or found)[0]
    self._set_recipes()
    self._rename()
    self.plan.notes[:0] = self._oddities()  # the last note says why there is no config

  def _rename(self) -> None:
    """Reads columns by another name where their own one means something else."""
    for name, each in list(self.plan.columns.items()):
      if each.kind and (hasattr(object, name) or (name in _INPUTS and "side" in each.options)):
        other = free(f"{name}_", self.plan.columns)
        self.plan.columns[other] = each._replace(options={"column": name, **each.options})
        self.plan.columns[name] = _left_out(f"read as {other}")

  def _column(self, name: str) -> Column:
    """Returns the column that a proposal reads."""
    return self.columns[self.plan.columns[name].options.get("column", name)]

  def _completed(self, roles: Roles) -> Roles:
    """Returns the roles with user and item by their names and data, and the time."""
    free = {name: column for name, column in self.columns.items() if name not in roles.names}
    hinted = lambda side: next((n for n, c in free.items() if _is_id(c, side)), "")
    pair = {side: getattr(roles, side) or hinted(side) for side in _SIDES}
    if all(pair.values()):
      guessed = [f"--{side}={name}" for side, name in pair.items() if not getattr(roles, side)]
      self.plan.notes += [f"Guessed by name and values: {' '.join(guessed)}."] * bool(guessed)
      roles = roles._replace(user=pair["user"], item=pair["item"])
    ids = {side: self.columns[name] for side, name in pair.items() if name}
    times = [name for name, each in free.items() if name not in pair.values() and _is_time(each)]
    # Hinted ones first, and no dates of the item.
    times = [name for name in times if is_hinted(name, "time")] or [
      name for name in times if not _side(self.columns[name], ids)
    ]
    return roles._replace(time=roles.time or next(iter(times), ""))

  def _with_roles(self) -> dict[str, Proposal]:
    """Returns the proposals for the columns with a role, and sets `ys` and `clock`."""
    roles, columns, known = self.roles, self.columns, {}
    for name in (*[roles.label] * bool(roles.label), *roles.more):
      known[name] = self._label(columns[name])
    if roles.user:
      known[roles.user] = Proposal("user", {}, _rows_each(columns[roles.user]))
    if roles.item:
      known[roles.item] = _item(columns[roles.item])
    if roles.time:
      times, codes = columns[roles.time].times, columns[roles.time].codes
      assert times is not None
      self.clock, known[roles.time] = np.append(times, np.nan)[codes], Proposal("time", {})
    return known

  def _label(self, column: Column) -> Proposal:
    name, positive, notes = column.name, self.roles.positive, self.plan.notes
    counts = dict(zip(column.texts.to_pylist(), column.counts.tolist(), strict=True))
    clicks = [text for text in counts if positive and as_text(text) == as_text(positive)]
    if positive and not clicks:
      hint = spec.nearest(positive, list(counts)[:20])
      raise UserError(f"--positive={positive}: no value of {name!r} in the sample; {hint}")
    unknown = [text for text in counts if _NONE.fullmatch(text) and text not in clicks]
    dropped = unknown if len(counts) - len(unknown) >= 2 else []
    texts = [text for text in counts if text not in dropped]
    options: dict[str, Any] = {"drop": tuple(dropped)} if dropped else {}
    why, by = "", ""
    if positive:
      options, why = {"positive": (positive,)} | options, f"{positive} is a click"
    elif all(text.lower() in spec.CLICKS + spec.NO_CLICKS for text in texts):
      clicks = [text for text in texts if text.lower() in spec.CLICKS]
    elif len(texts) > 1 and all(re.fullmatch(_NUMBER, text) for text in texts):
      values = np.array(texts, float)
      median = np.median(np.repeat(values, [counts[text] for text in texts]))
      least = float(median if median > values.min() else values[values > median].min())
      options = {"at_least": int(least) if least.is_integer() else least} | options
      why, by = f"{options['at_least']} or more is a click", ", by the median"
      clicks = [text for text, value in zip(texts, values, strict=True) if value >= least]
    elif len(texts) == 2:
      options, clicks = {"positive": (texts[1],)} | options, texts[1:]
      why, other = f"{texts[1]} is a click", f"--positive={shlex.quote(texts[0])} takes the other"
      notes.append(f"{texts[1]!r} is the rarer value of {name}; {other}.")
    elif len(texts) > 2:
      listed = ", ".join(texts[:_EXAMPLES]) + " …" * (len(texts) > _EXAMPLES)
      hint = f"say which is a click, --positive={shlex.quote(texts[0])}"
      if self.roles.more:
        hint = "leave it out, and declare it in the config, by its positive or its classes"
      raise UserError(f"--label={name} has {len(texts):,} values ({listed}): {hint}")
    if len(clicks) in (0, len(texts)):
      raise UserError(
        f"--label={name} has one value in these rows, {texts[0]!r}, and a label needs two: read "
        "more of a longer file with --rows, or leave the label out and give --user and --item"
      )
    of_text = [np.nan if text in dropped else float(text in clicks) for text in counts]
    self.ys.append(np.append(of_text, np.nan)[column.codes])
    rate, of_label = np.nanmean(self.ys[-1]), f" by {name}" * bool(self.roles.more)
    notes.append(f"{_rate(rate)} of the rows are clicks{of_label}{why and f': {why}'}{by}.")
    if rate < 0.01:
      notes.append("Clicks are so rare that models differ in AUC and log loss, not in accuracy.")
    if dropped:
      share = sum(counts[text] for text in dropped) / column.present
      listed = ", ".join(map(repr, dropped))
      notes.append(f"Rows with the label {listed} are left out: {share:.1%}.")
    return Proposal("label", options, why)

  def _set_recipes(self) -> None:
    """Fills in recipes and settings, and changes features as they need it."""
    plan, roles, columns = self.plan, self.roles, self.columns
    # A row without one of several labels counts for the others.
    needed = [columns[n] for role, n in roles.pairs if role != "label" or not roles.more]
    absent = [f"{each.name} {each.missing:.1%}" for each in needed if each.missing]
    plan.notes += [f"Rows without a value are left out: {', '.join(absent)}."] * bool(absent)
    if absent or self.sample.skipped:
      plan.settings["on_bad_row"] = "skip"
    is_list = bool(roles.item) and "separator" in plan.columns[roles.item].options
    if not is_list and roles.user and roles.item:
      self._add_sides()
    can_rank = roles.item and not roles.more  # rankings are of one label
    if can_rank and (is_list or (roles.user and self._has_rankings())):
      plan.recipes = ("two_tower",) if self.clock is None else ("sequence", "two_tower")
    if self.ys and not is_list:
      if self._has_split(self.ys) and self._has_vectors(self.ys[0]):
        plan.recipes = ("dlrm", *reversed(plan.recipes))
    elif plan.recipes:
      for name, each in plan.columns.items():
        if each.is_a(spec.Side) and not each.is_a(spec.Id) and "side" not in each.options:
          plan.columns[name] = _left_out("varies by row")
    else:
      self._ask()

  def _add_sides(self) -> None:
    """Adds the side to features that a user or an item always has alike; one text is the title."""
    plan, ids = self.plan, {side: self.columns[getattr(self.roles, side)] for side in _SIDES}
    has_title = False
    for name, column in self.columns.items():
      proposal = plan.columns[name]
      side = _side(column, ids) if name not in self.roles.names and column.present else ""
      if side == "item" and not has_title and self._names_items(column):
        plan.columns[name], has_title = Proposal("title", {}, "of the item"), True
      elif side and proposal.kind == "category" and column.distinct >= _ROW_ID * ids[side].distinct:
        plan.columns[name] = _left_out(f"as good as {ids[side].name}")
      elif side and proposal.is_a(spec.Side):
        options = proposal.options | {"side": side}
        plan.columns[name] = Proposal(proposal.kind, options, f"of the {side}")

  def _has_rankings(self) -> bool:
    """Returns whether a user has three items, of which two are held out; keeps many repeats."""
    users, items = self.columns[self.roles.user].codes, self.columns[self.roles.item].codes
    known = (users >= 0) & (items >= 0) & (self.ys[0] == 1 if self.ys else True)
    pairs, rows = np.unique(np.stack([users[known], items[known]]), axis=1)[0], known.sum()
    if not len(pairs) or np.bincount(pairs).max() < 3:
      self.plan.notes.append("No user has three items, and rankings hold out two of them.")
      return False
    self.plan.items = len(np.unique(items[known]))
    if rows - len(pairs) > _REPEATS * rows:
      self.plan.settings["exclude_seen"] = False
      self.plan.notes.append(
        f"{1 - len(pairs) / rows:.0%} of the rows repeat a user and an item, so exclude_seen is "
        "False: what a user has had can be recommended."
      )
    return True

  def _has_split(self, ys: Sequence[np.ndarray]) -> bool:
    """Returns whether a split has both outcomes in each part: by time, or else by hash."""
    plan, y = self.plan, ys[0]
    rare = int(min((y == 1).sum(), (y == 0).sum()))
    if rare < _FEW_CLICKS:
      which = "clicks" if rare == (y == 1).sum() else "rows without a click"
      plan.notes.append(f"There are only {rare} {which}: too few to tell one model from another.")
    if not (self.sample.is_all and {*plan.sources} - {self.roles.label, *self.roles.more}):
      return True
    outcomes = lambda y, part: len(np.unique(y[part & ~np.isnan(y)]))
    has_both = lambda parts: all(outcomes(y, parts == n) == 2 for y in ys for n in range(3))

    def in_order(x: Any) -> np.ndarray:
      return np.asarray(np.searchsorted(np.nanquantile(x, (0.8, 0.9)), x, side="right"))

    tries: dict[str, Callable[[], np.ndarray]] = {
      "time": lambda: in_order(self.clock),
      "hash": lambda: self.sample.split(plan.sources),
      "order": lambda: in_order(np.arange(len(y))),
    }
    default = "hash" if self.clock is None else "time"
    for by, parts in tries.items():
      if (by != "time" or self.clock is not None) and has_both(parts()):
        if by != default:
          plan.notes.append(f"By {default}, a part would have one outcome: the split is by {by}.")
          plan.settings["split"] = {"by": by}
        return True
    plan.notes.append("No split has both outcomes in each part: too few rows differ.")
    return False

  def _has_vectors(self, y: np.ndarray) -> bool:
    """Returns whether dlrm has a feature with vectors, after making one of a number."""
    plan = self.plan
    if any(each.is_a(spec.Category) for each in plan.columns.values()):
      return True
    numbers = [name for name, each in plan.columns.items() if each.kind == "number"]
    if not numbers:
      plan.notes.append("No column is left to learn from: see above why each is left out.")
      return False
    ranks = {
      name: np.nan_to_num(self._column(name).of_rows).argsort().argsort() for name in numbers
    }
    known = ~np.isnan(y)
    tells = lambda name: abs(np.corrcoef(ranks[name][known], y[known])[0, 1])
    name = max(numbers, key=tells)
    options = {key: value for key, value in plan.columns[name].options.items() if key != "log"}
    plan.columns[name] = Proposal("number", options | {"buckets": _INTERVALS})
    plan.notes.append(f"All features are numbers: the intervals of {name} get vectors.")
    return True

  def _ask(self) -> None:
    """Says what a table of users or items is for, or what to give for a config."""
    plan, columns = self.plan, self.columns
    sides = [side for side in _SIDES if getattr(self.roles, side)]
    if len(sides) == 1 and columns[getattr(self.roles, sides[0])].distinct == self.sample.num_rows:
      plan.side = sides[0]
      plan.notes.append(f"Each row is {'an item' if plan.side == 'item' else 'a user'} of its own.")
      names = [name for name, each in plan.columns.items() if each.kind in ("", "category")]
      if plan.side == "item":
        titles = [name for name in names if self._names_items(columns[name])][:1]
        plan.columns |= dict.fromkeys(titles, Proposal("title", {}, "of the item"))
    elif len(sides) < 2:
      labels = [name for name, each in columns.items() if each.distinct == 2 and not each.missing]
      ids = [name for name, each in plan.columns.items() if each.kind == "category"]
      ids.sort(key=lambda name: -columns[name].distinct)
      wanted = " and ".join(f"--{side}" for side in _SIDES if side not in sides)
      listed = lambda names: f" ({', '.join(names[:_EXAMPLES])}?)" if names else ""
      predicted = f"the column that is predicted, --label{listed(labels)}"
      plan.notes.append(f"For a config, name {predicted}, or {wanted}{listed(ids)}.")

  def _oddities(self) -> list[str]:
    """Returns notes on values that may be none, leaks, repeated rows and columns without name."""
    plan, notes, columns = self.plan, [], self.columns
    numbers = [self._column(n) for n, each in plan.columns.items() if each.kind == "number"]
    plan.missing = tuple(dict.fromkeys(text for each in numbers for text in each.placeholders))
    if plan.missing:
      notes.append(f"Taken for missing numbers: {', '.join(map(repr, plan.missing))}.")
    if leaks := [name for name, each in plan.columns.items() if each.why.startswith("leak")]:
      notes.append(
        f"Leaks are left out, as they tell the outcome: {', '.join(leaks)}. Declare one only if "
        "its value is known before the outcome is."
      )
    if nameless := [name for name in columns if re.fullmatch(r"column \d+", name)]:
      notes.append(f"Called by their place, as the header has no name: {', '.join(nameless)}.")
    return notes

  def _names_items(self, column: Column) -> bool:
    """Whether a text names items: nearly all have their own, and it has letters and words."""
    items = self.columns[self.roles.item]
    if column.type() != "text" or column is items or column.distinct < 0.8 * items.distinct:
      return False
    spaced = pc.match_substring(column.texts, " ").true_count
    return bool(set(tokens(column.name)) & {"title", "name"}) or spaced > column.distinct / 2


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
  seconds = any(3e8 * scale <= low and high <= 4.2e9 * scale for scale in (1, 1e3, 1e6, 1e9))
  return seconds or (column.is_whole and low >= 19_000_101 and high <= 21_001_231)  # as 20241231


def _rate(rate: float) -> str:
  return f"{rate:.1%}" if rate >= 0.01 else f"{rate:.2%}"


def _item(column: Column) -> Proposal:
  if column.stored == "list":
    return Proposal("item", {"separator": "|"}, "a list")
  if column.numbers is None and (separator := _separator(column)):
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
    has_evidence = len(pairs) - ids.distinct >= _FEW_ROWS
    if has_evidence and len(np.unique(pairs)) <= _SAME * ids.distinct:
      fitting.append((ids.distinct, side))
  return min(fitting)[1] if fitting else ""
