"""The role of each column of a sample: what the data show decides, and names are hints."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError
from . import spec
from .kinds import (
  FEW_ROWS,
  ROW_ID,
  Proposal,
  feature,
  is_hinted,
  is_unrelated,
  separator_of,
  tokens,
)
from .sample import Column, Sample

_REPEATS = 0.1  # of the rows, as recipes.tables.interactions says
_SAME = 1.01  # distinct pairs of an id and a value per distinct id, for a value that an id has
_EXAMPLES = 5


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
    missing: texts that mean no value, besides those of `Format`.
    recipes: names of the recipes that the config trains, the first being the one to try first.
    notes: sentences for the user.
    side: "user" or "item" for a table with one row for each of them, "" for others.
  """

  columns: dict[str, Proposal]
  settings: dict[str, Any]
  missing: tuple[str, ...]
  recipes: tuple[str, ...]
  notes: list[str]
  side: str = ""


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
  missing = [
    text
    for name, proposal in proposals.items()
    if proposal.kind == "number"
    for text in columns[name].placeholders
  ]
  settings = _rows_without(roles, columns, notes, sample)
  recipes = _recipes(roles, proposals)
  if roles.user and roles.item:
    if "separator" not in proposals[roles.item].options:
      proposals = _with_sides(proposals, columns, roles)
    settings |= _repeats(columns[roles.user].codes, columns[roles.item].codes, clicked, notes)
  if recipes and recipes[0] != "dlrm":
    proposals = {name: _of_a_side(proposal) for name, proposal in proposals.items()}
  if "dlrm" in recipes and roles.time and sample.is_all:
    settings |= _split(columns[roles.time], clicked, notes)
  if missing:
    notes.append(f"Taken for missing numbers: {', '.join(map(repr, dict.fromkeys(missing)))}.")
  side = "" if recipes else _side_of_table(roles, columns)
  if side:
    notes.append(f"Each row is {'an item' if side == 'item' else 'a user'} of its own.")
  elif not recipes:
    notes.append(_ask(roles, proposals, columns))
  if side == "item":
    proposals = _with_title(proposals, columns, columns[roles.item])
  return Plan(proposals, settings, tuple(dict.fromkeys(missing)), recipes, notes, side)


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
  named = {roles.label, roles.user, roles.item, roles.time}
  free = {name: column for name, column in columns.items() if name not in named}
  pair = {
    side: getattr(roles, side) or next((n for n, c in free.items() if _is_id(c, side)), "")
    for side in ("user", "item")
  }
  if all(pair.values()):
    guessed = [f"--{side}={name}" for side, name in pair.items() if not getattr(roles, side)]
    if guessed:
      notes.append(f"Guessed by name and values: {' '.join(guessed)}.")
    roles = dataclasses.replace(roles, **pair)
  if not roles.time:
    sides = {side: columns[name] for side, name in pair.items() if name}
    times = [
      name
      for name, column in free.items()
      if name not in pair.values()
      and _is_time(column)
      and (is_hinted(name, "time") or not _side(column, sides))  # not a date of the item
    ]
    times.sort(key=lambda name: not is_hinted(name, "time"))  # stable
    roles = dataclasses.replace(roles, time=times[0] if times else "")
  return roles


def _is_id(column: Column, side: str) -> bool:
  is_discrete = column.stored in ("text", "number") and (column.numbers is None or column.is_whole)
  repeats = 1 < column.distinct <= ROW_ID * column.present
  return is_discrete and repeats and not column.is_dated and is_hinted(column.name, side)


def _is_time(column: Column) -> bool:
  if column.missing or column.distinct < 2 or is_unrelated(column.name):
    return False
  if column.is_dated:
    return True
  if column.numbers is None or column.placeholders or not is_hinted(column.name, "time"):
    return False
  low, high = column.numbers.min(), column.numbers.max()
  epochs = ((3e8 * scale, 4.2e9 * scale) for scale in (1, 1e3, 1e6, 1e9))
  days = (19_000_101, 21_001_231)  # as 20241231
  return any(first <= low and high <= last for first, last in epochs) or (
    column.is_whole and days[0] <= low and high <= days[1]
  )


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
      f"--label={name} has one value in these rows, {texts[0]!r}, and a label needs two: read more "
      "of a longer file with --rows, or leave the label out and give --user and --item"
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
  separator = separator_of(column) if column.numbers is None else ""
  if separator:
    return Proposal("item", {"separator": separator}, f"several, cut at {separator!r}")
  return Proposal("item", {}, _many(column))


def _many(column: Column) -> str:
  rows = column.present / column.distinct
  return "one row each" if rows == 1 else f"{rows:.1f} rows each"


def _rows_without(
  roles: Roles, columns: Mapping[str, Column], notes: list[str], sample: Sample
) -> dict[str, Any]:
  """Returns the setting that leaves out rows without a value that they need."""
  needed = [name for name in (roles.label, roles.user, roles.item, roles.time) if name]
  absent = [f"{name} {columns[name].missing:.1%}" for name in needed if columns[name].missing]
  if absent:
    notes.append(f"Rows without a value are left out: {', '.join(absent)}.")
  return {"on_bad_row": "skip"} if absent or sample.skipped else {}


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
    elif side and column.distinct >= ROW_ID * sides[side].distinct and proposal.kind == "category":
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
    if evidence >= FEW_ROWS and len(np.unique(pairs)) <= _SAME * ids.distinct:
      fitting.append((ids.distinct, side))
  return min(fitting)[1] if fitting else ""


def _side_of_table(roles: Roles, columns: Mapping[str, Column]) -> str:
  """Returns the side that the table has one row for each of, or ""."""
  sides = [side for side in ("user", "item") if getattr(roles, side)]
  column = columns[getattr(roles, sides[0])] if len(sides) == 1 else None
  return sides[0] if column is not None and column.distinct == column.rows else ""


def _with_title(
  proposals: Mapping[str, Proposal], columns: Mapping[str, Column], items: Column
) -> dict[str, Proposal]:
  """Returns the proposals with the first text that is not used, and names items, as their title."""
  names = (
    name
    for name, proposal in proposals.items()
    if proposal.kind in ("", "category") and _names_items(columns[name], items)
  )
  title = next(names, None)
  return {**proposals, **({title: Proposal("title", {}, "of the item")} if title else {})}


def _names_items(column: Column, items: Column) -> bool:
  """Whether a text names items: nearly all have their own, and it has letters and words."""
  if column.stored != "text" or column.numbers is not None or column.is_dated:
    return False
  if column is items or column.distinct < 0.8 * items.distinct:
    return False
  is_named = bool(set(tokens(column.name)) & {"title", "name"})
  return is_named or pc.mean(pc.match_substring(column.texts, " ").cast(pa.int8())).as_py() > 0.5


def _of_a_side(proposal: Proposal) -> Proposal:
  """Leaves out a feature that rankings do not use: it changes from row to row."""
  if issubclass(spec.KINDS.get(proposal.kind, spec.Kind), spec.Side) and not (
    proposal.kind in ("user", "item") or "side" in proposal.options
  ):
    return Proposal("", {}, "varies by row")
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


def _ask(roles: Roles, proposals: Mapping[str, Proposal], columns: Mapping[str, Column]) -> str:
  """Returns the question that is left where no recipe fits, with columns that may answer it."""
  named = {roles.user, roles.item, roles.time}
  labels = [name for name, column in columns.items() if column.distinct == 2 and not column.missing]
  ids = [name for name, each in proposals.items() if each.kind == "category" and name not in named]
  ids.sort(key=lambda name: -columns[name].distinct)
  sides = [side for side in ("user", "item") if not getattr(roles, side)]
  listed = lambda names: f" ({', '.join(names[:_EXAMPLES])}?)" if names else ""
  return (
    f"For a config, name the column that is predicted, --label{listed(labels)}, or "
    f"{' and '.join(f'--{side}' for side in sides)}{listed(ids)}."
  )
