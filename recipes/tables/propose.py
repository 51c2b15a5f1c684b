"""The role of each column of a sample: its values and the label decide, and names are hints."""

import dataclasses
import re
import shlex
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import UserError
from . import spec
from .profile import Column, Sample
from .values import among, outcome

_ROW_ID = 0.95  # distinct values per row from where on a column tells rows apart
_FEW_ROWS = 20  # too few to call a column an id, or its values' outcomes no chance
_REPEATS = 0.1  # of the rows, as recipes.tables.interactions says
_SAME = 1.01  # distinct pairs of an id and a value per distinct id, for a value that an id has
_LEAK = 0.99  # AUC of a number alone, or the share of rows whose value has one outcome
_SIDES = ("user", "item")
_WORDS = {  # that a name consists of, besides those of `_IDS`
  "user": {"user", "uid", "visitor", "customer", "client", "member", "account", "reader"},
  "item": {"item", "iid", "product", "movie", "film", "track", "song", "video", "book", "sku"},
  "time": {"time", "timestamp", "datetime", "date", "ts", "day", "when", "created", "at", "event"},
}
_IDS = {"id", "ids", "code", "hash", "key"}
_OTHER_TIMES = {"birth", "born", "release", "released", "published", "expiry", "expires"}


class Proposal(NamedTuple):
  """A column's role: a kind of `spec.KINDS`, "" to leave it out, and why in a few words."""

  kind: str
  why: str = ""
  options: Mapping[str, Any] = types.MappingProxyType({})  # where they differ from the defaults

  @property
  def is_feature(self) -> bool:
    """Whether a column is a feature and no id."""
    return self.kind in ("number", "category", "bag")


@dataclasses.dataclass
class Plan:
  """What is proposed for a table: its columns, settings, recipes, and sentences for the user.

  The recipe to try first is the first one. Without one, the last sentence says what to give.
  """

  columns: dict[str, Proposal] = dataclasses.field(default_factory=dict)
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  recipes: tuple[str, ...] = ()
  notes: list[str] = dataclasses.field(default_factory=list)


def propose(sample: Sample, roles: dict[str, str], positive: str = "") -> Plan:
  """Returns what each column is, and the recipes that the columns serve.

  Args:
    roles: the columns that are known to be the label, user, item or time, by role.
    positive: the value of the label that is a click, or "".

  Raises:
    UserError: a column does not exist or cannot have its role, or none is left to learn from.
  """
  plan, columns, y = Plan(), sample.columns, ""
  _check(roles, positive, columns)
  roles = roles | _ids(roles, columns, plan)
  sides = _sides(sample, roles)
  roles = roles | _time(sample, roles, sides)
  for name, column in columns.items():
    plan.columns[name] = _feature(sample, column, columns.get(roles.get("time", "")))
  if {*_SIDES} <= {*roles}:
    for name, side in sides.items():
      _set_side(plan, columns[name], side, columns[roles[side]])
  plan.columns |= {name: Proposal(role) for role, name in roles.items()}
  if "label" in roles:
    plan.columns[roles["label"]], y = _label(sample, columns[roles["label"]], positive, plan)
    _leave_out_leaks(sample, y, plan)
  if absent := [name for name in roles.values() if columns[name].missing]:
    plan.notes.append(f"Rows without a value are left out: {', '.join(absent)}.")
  if absent or sample.skipped:
    plan.settings["on_bad_row"] = "skip"
  if {*_SIDES} <= {*roles} and _has_rankings(sample, roles, y, plan):
    plan.recipes = ("sequence", "two_tower") if "time" in roles else ("two_tower",)
  if y:
    plan.recipes = ("dlrm", *reversed(plan.recipes))
    _set_split(sample, roles, y, plan)
    _set_vectors(columns, plan)
  elif plan.recipes:
    _leave_out_varying(columns, plan)
  elif not {*_SIDES} <= {*roles}:
    guesses = [n for n, each in columns.items() if each.distinct == 2 and not each.missing]
    listed = f" ({', '.join(guesses[:5])}?)" * bool(guesses)
    plan.notes.append(
      f"For a config, name the column that is predicted, --label{listed}, or --user and --item."
    )
  return plan


def _check(roles: dict[str, str], positive: str, columns: dict[str, Column]) -> None:
  """Raises UserError where a column cannot have the role that it is given."""
  if positive and "label" not in roles:
    raise UserError(f"--positive={positive} is a value of the label: give --label too")
  for role, name in roles.items():
    if name not in columns:
      raise UserError(f"--{role}={name}: no column; {spec.nearest(name, list(columns))}")
    if [*roles.values()].count(name) > 1:
      raise UserError(f"--{role}={name}: {name!r} has another role, and a column has one")
    if not columns[name].rows:
      raise UserError(f"--{role}={name}: the column has no value in the sample")
    if role == "time" and not columns[name].is_number and columns[name].type != "time":
      raise UserError(
        f"--time={name} has values as {columns[name].top[0]!r}: a time is a number that grows, or "
        "a date such as 2024-12-31 or 2024-12-31T23:59:59"
      )


def _words(name: str) -> set[str]:
  """Returns the words of a name in lower case, as of `lastVisit_at`."""
  return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _is_called(column: Column, role: str) -> bool:
  core = _words(column.name) - _IDS
  return bool(core) and core <= _WORDS[role]


def _ids(roles: dict[str, str], columns: dict[str, Column], plan: Plan) -> dict[str, str]:
  """Returns the user and the item that are not given: of those called so, with most values."""
  found = dict[str, str]()
  for column in sorted(columns.values(), key=lambda each: each.distinct):
    repeats = 1 < column.distinct <= _ROW_ID * column.rows
    if repeats and column.type in ("text", "integer") and column.name not in roles.values():
      sides = [side for side in _SIDES if side not in roles and _is_called(column, side)]
      found |= dict.fromkeys(sides, column.name)
  if not found or not {*_SIDES} <= {*roles, *found}:
    return {}
  guessed = " ".join(f"--{side}={found[side]}" for side in _SIDES if side in found)
  plan.notes.append(f"Guessed by name and values: {guessed}.")
  return found


def _sides(sample: Sample, roles: dict[str, str]) -> dict[str, str]:
  """Returns the side of each column that a user, or an item, always has alike."""
  found = {}
  for side in (side for side in _SIDES if side in roles):
    ids = sample.columns[roles[side]]
    pairs = [f"count(DISTINCT hash({ids.text}, {c.text}))" for c in sample.columns.values()]
    query = f"SELECT {', '.join(pairs)} FROM sample WHERE {ids.text} IS NOT NULL"
    for name, count in zip(sample.columns, sample.ask(query)[0], strict=True):
      has_evidence = ids.rows - ids.distinct >= _FEW_ROWS
      if has_evidence and count <= _SAME * ids.distinct and name not in roles.values():
        found[name] = side
  return found


def _is_moment(column: Column) -> bool:
  """Whether a column may say when: by dates, seconds since 1970, or days as 20241231."""
  if column.missing or column.distinct < 2 or _words(column.name) & _OTHER_TIMES:
    return False
  spans = [(3e8 * scale, 4.2e9 * scale) for scale in (1, 1e3, 1e6, 1e9)]
  spans += [(19_000_101, 21_001_231)] * column.is_whole
  is_within = any(first <= column.low and column.high <= last for first, last in spans)
  return column.type == "time" or (column.is_number and is_within)


def _time(sample: Sample, roles: dict[str, str], sides: dict[str, str]) -> dict[str, str]:
  """Returns the time if none is given: the finest column that says when a row happened."""
  others = {*roles.values(), *sides}
  moments = [each for n, each in sample.columns.items() if n not in others and _is_moment(each)]
  named = [each for each in moments if _is_called(each, "time")]
  named = named or [each for each in moments if each.type == "time"]
  if not named or "time" in roles:
    return {}
  first = max(named, key=lambda each: each.distinct)
  finer = [each for each in moments if _follows(sample, first.value, each)]
  return {"time": max([first, *finer], key=lambda each: each.distinct).name}


def _follows(sample: Sample, order: str, column: Column) -> bool:
  """Returns whether the values never fall, or never rise, in an order of the rows."""
  query = (
    "SELECT bool_and(low >= high_before), bool_and(high <= low_before) FROM (SELECT min(x) AS low, "
    "max(x) AS high, lag(min(x)) OVER (ORDER BY t) AS low_before, lag(max(x)) OVER (ORDER BY t) AS "
    f"high_before FROM (SELECT {order} AS t, {column.value} AS x FROM sample) WHERE x IS NOT NULL "
    "GROUP BY t)"
  )
  return any(sample.ask(query)[0])


def _feature(sample: Sample, column: Column, time: Column | None) -> Proposal:
  """Returns what a column without a role of its own is."""
  if why := _why_left_out(sample, column, time):
    return Proposal("", why)
  if column.type == "list":
    return Proposal("bag")
  if column.separator and column.type == "text" and _has_parts(sample, column):
    return Proposal("bag", "", {"separator": column.separator})
  distinct, rows, is_id = column.distinct, column.rows, _is_id(column)
  is_number = column.is_number and not column.has_zeros
  is_row = not is_number or (column.is_whole and (is_id or _follows(sample, "rowid", column)))
  if is_row and distinct >= _ROW_ID * rows and rows >= _FEW_ROWS:
    return Proposal("", "free text" if column.words >= 4 else "unique per row")
  is_few = distinct <= 2 or (distinct <= 32 and 5 * distinct <= rows)
  if is_number and distinct > 2 and not (column.is_whole and (is_few or is_id)):
    options: dict[str, Any] = {"missing": "indicator"} if column.missing else {}
    is_positive = column.low >= -column.high / 100 and column.high >= 20
    if is_positive and column.tail > 5 * max(column.median, 1.0):
      return Proposal("number", "heavy tail", {"log": True} | options)
    return Proposal("number", "", options)
  return Proposal("category", "", {"min_count": 5} if distinct > 20_000 else {})


def _why_left_out(sample: Sample, column: Column, time: Column | None) -> str:
  """Returns why a column is left out however often its values repeat, or ""."""
  is_text = column.type == "text"
  if not column.rows or (column.distinct == 1 and not column.missing):
    return "constant" if column.rows else "no values"
  if hasattr(object, column.name) or column.name in (*_SIDES, "history"):
    return "its name has another meaning"
  if column.type == "time" or (_is_called(column, "time") and _is_moment(column)):
    return "another time"
  if time and column.is_number and column.distinct > 2 and _follows(sample, time.value, column):
    return "follows the time"
  if is_text and column.numbers / column.rows > 0.9:
    return "numbers, and texts that config.format.missing may name"
  return column.shape if is_text else ""


def _is_id(column: Column) -> bool:
  is_named = _words(column.name) & _IDS or any(_is_called(column, side) for side in _SIDES)
  return bool(is_named) or max(abs(column.low), abs(column.high)) >= 1e10


def _has_parts(sample: Sample, column: Column) -> bool:
  """Returns whether the separator cuts texts into parts that repeat."""
  parts = f"unnest(string_split(text, '{column.separator}'))"
  query = f"SELECT count(DISTINCT trim(part)), count(*) FROM (SELECT {parts} AS part FROM counts"
  distinct, total = sample.ask(f"{query} WHERE n = {column.text[1:]})")[0]
  return 2 <= distinct < column.distinct and total >= 2 * distinct


def _set_side(plan: Plan, column: Column, side: str, ids: Column) -> None:
  """Adds the side to a feature that a user or an item always has alike; a name is the title."""
  each, is_own = plan.columns[column.name], column.distinct >= _ROW_ID * ids.distinct
  if side == "item" and is_own and _words(column.name) & {"title", "name"}:
    plan.columns[column.name] = Proposal("title")
  elif is_own and each.kind == "category":
    plan.columns[column.name] = Proposal("", f"as good as {ids.name}")
  elif each.is_feature:
    plan.columns[column.name] = Proposal(
      each.kind, f"of the {side}", {**each.options, "side": side}
    )


def _label(sample: Sample, column: Column, positive: str, plan: Plan) -> tuple[Proposal, str]:
  """Returns a label, and SQL of its outcome, 1 for a click and 0 for none."""
  name, texts, options, why = column.name, column.top, dict[str, Any](), ""
  are_flags = {text.lower() for text in texts} <= {*spec.CLICKS, *spec.NO_CLICKS}
  if positive := spec.as_text(positive):
    if not sample.ask(f"SELECT 1 FROM sample WHERE {among(column.text, [positive])} LIMIT 1"):
      hint = spec.nearest(positive, texts)
      raise UserError(f"--positive={positive}: no value of {name!r} in the sample; {hint}")
    options, why = {"positive": (positive,)}, f": {positive} is a click, and all else is none"
  elif column.is_number and not are_flags and column.distinct > 1:
    above = f"SELECT min({column.value}) FROM sample WHERE {column.value} > {column.low}"
    least = column.median if column.median > column.low else sample.ask(above)[0][0]
    options = {"at_least": int(least) if least.is_integer() else least}
    why = f": {options['at_least']} or more is a click, by the median"
  elif column.distinct == 2 and not are_flags:
    options, why = {"positive": (texts[1],)}, f": {texts[1]}, the rarer value, is a click"
  elif column.distinct > 2 and not are_flags:
    listed = ", ".join(texts[:5]) + " …" * (column.distinct > 5)
    hint = f"say which is a click, --positive={shlex.quote(texts[0])}"
    raise UserError(f"--label={name} has {column.distinct:,} values ({listed}): {hint}")
  y = outcome(spec.Label(**options), column.text)
  clicks, rows = sample.ask(f"SELECT coalesce(sum({y}), 0)::BIGINT, count({y}) FROM sample")[0]
  if clicks in (0, rows):
    raise UserError(
      f"--label={name} has one value in these rows, {texts[0]!r}, and a label needs two: read "
      "more of a longer file with --rows, or leave the label out and give --user and --item"
    )
  plan.notes.append(f"{clicks / rows:.2%} of the rows are clicks{why}.")
  return Proposal("label", "", options), y


def _leave_out_leaks(sample: Sample, y: str, plan: Plan) -> None:
  """Leaves out columns that alone tell the outcome."""
  columns = [*sample.columns.values()]
  texts = ", ".join(each.text for each in columns)
  rows = (
    f"SELECT {y} AS y, unnest(range({len(columns)})) AS n, unnest([{texts}]) AS text FROM sample"
  )
  # Of each value: its rows and clicks, and the rows without a click of smaller numbers.
  below = "sum(rows - clicks) OVER (PARTITION BY n ORDER BY TRY_CAST(text AS DOUBLE))"
  values = (
    f"SELECT *, {below} - (rows - clicks) / 2 AS below FROM (SELECT n, text, count(*) AS rows, "
    f"sum(y) AS clicks FROM ({rows}) WHERE y + length(text) IS NOT NULL GROUP BY n, text)"
  )
  found = sample.ask(
    "SELECT n, sum(rows), least(sum(clicks), sum(rows - clicks)), sum(rows) FILTER (rows >= "
    f"{_FEW_ROWS} AND clicks IN (0, rows)) / sum(rows), sum(clicks * below) / (sum(clicks) * "
    f"nullif(sum(rows - clicks), 0)) FROM ({values}) GROUP BY n ORDER BY n"
  )
  leaks = []
  for n, present, rare, pure, auc in found:
    is_ranked = columns[n].is_number and rare >= _FEW_ROWS
    is_leak = (pure or 0) >= _LEAK or (is_ranked and max(auc, 1 - auc) >= _LEAK)
    is_filled_once = not rare and present >= 10 * _FEW_ROWS  # for rows of one outcome
    proposal = plan.columns[columns[n].name]
    if (is_leak or is_filled_once) and (proposal.is_feature or proposal.why == "another time"):
      leaks.append(columns[n].name)
  plan.columns |= dict.fromkeys(leaks, Proposal("", "leak of the label"))
  if leaks:
    plan.notes.append(
      f"Leaks are left out, as they tell the outcome: {', '.join(leaks)}. Declare one only if its "
      "value is known before the outcome is."
    )


def _has_rankings(sample: Sample, roles: dict[str, str], y: str, plan: Plan) -> bool:
  """Returns whether a user has three items, of which two are held out; keeps many repeats."""
  user, item = (sample.columns[roles[side]].text for side in _SIDES)
  clicked = f"{user} IS NOT NULL AND {item} IS NOT NULL" + f" AND {y} = 1" * bool(y)
  users = f"SELECT count(*) AS n, count(DISTINCT {item}) AS items FROM sample WHERE {clicked}"
  query = f"SELECT sum(n)::BIGINT, sum(items)::BIGINT, max(items) FROM ({users} GROUP BY {user})"
  rows, pairs, most = sample.ask(query)[0]
  if (most or 0) < 3:
    plan.notes.append("No user has three items, and rankings hold out two of them.")
    return False
  if rows - pairs > _REPEATS * rows:
    plan.settings["exclude_seen"] = False
    plan.notes.append(
      f"{1 - pairs / rows:.0%} of the rows repeat a user and an item, so exclude_seen is False: "
      "what a user has had can be recommended."
    )
  return True


def _leave_out_varying(columns: dict[str, Column], plan: Plan) -> None:
  """Leaves out what is neither a user's nor an item's; says so of ratings."""
  for name, each in plan.columns.items():
    if each.is_feature and "side" not in each.options:
      plan.columns[name], column = Proposal("", "varies by row"), columns[name]
      if column.is_number and 3 <= column.distinct <= 11 and column.low >= 0 and column.high <= 10:
        plan.notes.append(
          f"Every row counts, whatever its {name}; --label={name} takes {column.median:g} or more."
        )


def _set_split(sample: Sample, roles: dict[str, str], y: str, plan: Plan) -> None:
  """Splits by hash where a split by time has a part with one outcome."""
  if "time" not in roles:
    return
  place = f"percent_rank() OVER (ORDER BY {sample.columns[roles['time']].value})"
  part = f"CASE WHEN {place} >= 0.9 THEN 2 WHEN {place} >= 0.8 THEN 1 ELSE 0 END"
  parts = f"SELECT {y} AS y, {part} AS part FROM sample"
  outcomes = sample.ask(f"SELECT count(DISTINCT y) FROM ({parts}) GROUP BY part")
  if outcomes != [(2,)] * 3:
    plan.settings["split"] = {"by": "hash"}
    plan.notes.append("By time, a part would have one outcome: the split is by hash.")


def _set_vectors(columns: dict[str, Column], plan: Plan) -> None:
  """Gives intervals of a number vectors where no other feature has them, as dlrm needs one."""
  kinds = {name: each.kind for name, each in plan.columns.items()}
  if {*kinds.values()} & {"category", "bag", "user", "item"}:
    return
  numbers = [columns[name] for name, kind in kinds.items() if kind == "number"]
  if not numbers:
    reasons = "; ".join(f"{n}: {each.why}" for n, each in plan.columns.items() if not each.kind)
    raise UserError(f"No column is left to learn from ({reasons}): declare one in a config")
  name = max(numbers, key=lambda column: column.distinct).name
  plan.columns[name] = Proposal("number", "", {**plan.columns[name].options, "buckets": 16})
  plan.notes.append(f"All features are numbers: the intervals of {name} get vectors.")
