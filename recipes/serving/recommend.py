"""The best items by an exported two_tower or sequence model."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError
from ..evaluation import retrieval
from ..sequence import packing
from ..tables import spec
from ..tables.entities import Codes, Entities
from ..tables.fitting import extracted
from ..tables.store import ways
from ..tables.values import ReadAs
from ..training.features import Feature
from . import columns as columns_lib
from .folder import Served, batches

HISTORY = "history"  # the column with a user's own items
_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Recommended:
  """The best items of N rows, the best first; `top` of each.

  Attributes:
    items: raw ids, object `[N, top]`, None where there are fewer candidates.
    scores: float32 `[N, top]`, NaN where there is no item, or no score.
    titles: object `[N, top]`, None where training has declared no title.
    is_popular: bool `[N]`, rows that name nothing known: they have the most popular items, without
      scores.
    is_bad: bool `[N]`, rows that cannot be read and are left out.
    num_unknown_items: items of histories that training has not seen.
    unknown: by column, how many rows have a user or a feature's value that training has not seen.
  """

  items: np.ndarray
  scores: np.ndarray
  titles: np.ndarray | None
  is_popular: np.ndarray
  is_bad: np.ndarray
  num_unknown_items: int
  unknown: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class _Queries:
  """What N rows say: users, -1 for unknown ones, their items in the order of time, features."""

  users: np.ndarray
  histories: list[np.ndarray]
  features: dict[str, np.ndarray]

  def cut(self, part: slice, index: np.ndarray) -> "_Queries":
    histories = self.histories[part]
    features = {name: ids[part][index] for name, ids in self.features.items()}
    return _Queries(self.users[part][index], [histories[i] for i in index], features)


class Recommender:
  """Recommends items to users.

  Args:
    served: of the recipes two_tower or sequence.
  """

  def __init__(self, served: Served):
    self.served = served
    folder, about = served.transforms, served.about
    self._users, self._items = Entities.load(folder, "users"), Entities.load(folder, "items")
    self._codes = {"user": Codes(self._users.texts), "item": Codes(self._items.texts)}
    self._history = np.load(folder / "history.npy", mmap_mode="r")
    self._offsets = np.load(folder / "history_offsets.npy")
    counts = np.bincount(self._history, minlength=len(self._items.texts))
    self._popular = np.argsort(-counts, kind="stable").astype(np.int32)
    kinds = served.kinds
    self._user_column = spec.only(kinds, spec.User)
    self._wanted: dict[str, tuple[tuple[str, ...], ReadAs]] = {}
    if self._user_column:
      column = kinds[self._user_column].column or self._user_column
      self._wanted[""] = (column,), "text"
    item = spec.only(kinds, spec.Item) or spec.only(kinds, spec.Ordered)
    self._patterns = {
      side: getattr(kinds[name], "pattern", "") if name else ""
      for side, name in (("user", self._user_column), ("item", item))
    }
    self._own = self._own_history(kinds)
    self._features = {}
    if served.recipe == "two_tower":
      self._features = {n: k for n, k in self._users.fitted.kinds.items() if n in about["query"]}
      parts = {p for k in self._features.values() if isinstance(k, spec.Cross) for p in k.columns}
      needed = {n: k for n, k in self._users.fitted.kinds.items() if n in parts} | self._features
      self._wanted |= ways(needed)
    index = retrieval.Approximate(np.asarray(served.candidates)) if about["ann"] else None
    self._approximate = index
    self._exact = functools.partial(jax.jit, static_argnames="k")(retrieval.top_k)

  @staticmethod
  def _own_history(kinds: Mapping[str, spec.Kind]) -> dict[str, ReadAs]:
    """Returns the columns that may hold a row's own history, and the separators of its items."""
    ways: dict[str, ReadAs] = {HISTORY: ("list", "|")}
    name = spec.only(kinds, spec.Item) or spec.only(kinds, spec.Ordered)
    if name is not None and (separator := getattr(kinds[name], "separator", "")):
      ways[kinds[name].column or name] = ("list", separator)
    return ways

  @property
  def has_titles(self) -> bool:
    """Whether the items have titles."""
    return self._items.titles is not None

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that rows may have, of which they need at least one."""
    columns = [column for names, _ in self._wanted.values() for column in names]
    return tuple(dict.fromkeys([*columns, *self._own]))

  def recommend(
    self,
    rows: Any,
    top: int | None = None,
    *,
    on_bad_row: str = "raise",
    source: str = "rows",
    first_row: int = 1,
  ) -> Recommended:
    """Returns the best items for every row.

    Args:
      rows: N of them; see `columns.as_columns`.
      top: how many items, 1 to the number of items; None is 10, or all where they are fewer.
      on_bad_row: "raise", or "skip", which leaves out a row that cannot be read.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: there are not `top` items, no column is of use, or a row cannot be read; names row
        and column.
    """
    top = self.checked_top(top)
    arrays = columns_lib.as_columns(rows)
    if not any(column in arrays for column in self.columns):
      raise UserError(
        f"{source} has none of the columns {', '.join(self.columns)}: give one that says for whom "
        f"to recommend; it has {', '.join(arrays) or 'none'}"
      )
    count = len(next(iter(arrays.values())))
    own = next((column for column in self._own if column in arrays), None)
    wanted = self._wanted | ({"own": ((own,), self._own[own])} if own else {})
    missing = self.served.text_format.missing
    values, problems = columns_lib.read(arrays, wanted, missing, source)
    bad = columns_lib.bad_rows(problems, count, on_bad_row, source, first_row)
    return self.answers(values, bad, top)

  def checked_top(self, top: int | None) -> int:
    """Returns `top` of `recommend` as a number; raises UserError where there are not so many."""
    count = len(self._items.texts)
    if top is None:
      return min(10, count)
    if not 1 <= top <= count:
      raise UserError(f"top is {top}: choose 1 to {count}, the number of items")
    return top

  def answers(
    self, values: Mapping[str, Any], bad: np.ndarray, top: int, *, is_cut: bool = False
  ) -> Recommended:
    """Returns as `recommend`, for values as training reads them.

    Args:
      values: users by the name "", their own items by "own", and features by declared name.
      bad: bool `[N]`, rows to leave out.
      top: how many items.
      is_cut: whether ids are cut by the patterns of their columns already.
    """
    count = len(bad)
    queries, unknown = self._queries(values, count, is_cut)
    ids = np.full((count, top), -1, np.int32)
    scores = np.full((count, top), np.nan, np.float32)
    popular = np.zeros(count, bool)
    for part, index in batches(count, _BATCH):
      size = part.stop - part.start
      ids[part], scores[part], popular[part] = (
        x[:size] for x in self._best(queries.cut(part, index), top)
      )
    ids[bad], scores[bad], popular[bad] = -1, np.nan, False
    named = lambda texts: np.array([*texts, None], object)[ids]
    titles = None if self._items.titles is None else named(self._items.titles)
    unseen = {
      name: columns_lib.unseen(self._users.fitted, name, values)
      if name
      else (queries.users < 0) & ~columns_lib.absent(values[""])
      for name in self._wanted
      if name in values
    }
    counts = columns_lib.rows_by_column(unseen, self._wanted, bad)
    return Recommended(named(self._items.texts), scores, titles, popular, bad, unknown, counts)

  def leaves_out(self, users: pa.Array, items: pa.Array) -> np.ndarray:
    """Returns whether an item is never recommended to a user, who has had it; bool `[N]`.

    Args:
      users, items: N raw ids each, cut by the patterns of their columns.
    """
    if not self.served.about["exclude_seen"]:
      return np.zeros(len(users), bool)
    user, item = self._codes["user"].find(users), self._codes["item"].find(items)
    owners = np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._offsets))
    count = len(self._items.texts)
    had = np.isin(user.astype(np.int64) * count + item, owners * count + self._history)
    return had & (user >= 0) & (item >= 0)

  def _queries(self, values: Mapping[str, Any], count: int, is_cut: bool) -> tuple[_Queries, int]:
    """Returns what rows say, and how many items of their histories are unknown."""
    users = np.full(count, -1, np.int32)
    if "" in values:
      users = self._find("user", values[""], is_cut)
    own: pa.ListArray = values.get("own", pa.nulls(count, pa.list_(pa.string())))
    lengths = pc.list_value_length(own).fill_null(0).to_numpy(zero_copy_only=False)
    items = self._find("item", own.flatten().cast(pa.string()), is_cut)
    stops = np.cumsum(lengths)
    histories = []
    for user, start, stop in zip(users.tolist(), stops - lengths, stops, strict=True):
      if stop > start:
        history = items[start:stop]
        histories.append(history[history >= 0])
      elif user >= 0:
        histories.append(self._history[self._offsets[user] : self._offsets[user + 1]])
      else:
        histories.append(items[:0])
    features = {name: self._feature(name, users, values) for name in self._features}
    return _Queries(users, histories, features), int((items < 0).sum())

  def _find(self, side: str, texts: pa.Array, is_cut: bool) -> np.ndarray:
    """Returns the numbers of ids, as they are or cut by the pattern of their column; or -1."""
    found = self._codes[side].find(texts)
    if (pattern := self._patterns[side]) and not is_cut:
      found = np.where(found < 0, self._codes[side].find(extracted(texts, pattern)), found)
    return found

  def _feature(self, name: str, users: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
    """Returns a feature's ids: of the row where it has one, else of the user, else -1."""
    stored = self._users.ids[name]
    known = (users >= 0).reshape(-1, *[1] * (stored.ndim - 1))
    ids = np.where(known, stored[users], -1).astype(np.int32)
    kind = self._features[name]
    parts: Sequence[str] = kind.columns if isinstance(kind, spec.Cross) else (name,)
    if all(part in values for part in parts):
      row = self._users.fitted.ids(values, name)
      # Halves of raw ids may be negative.
      has = (row != -1).reshape(len(row), -1).any(axis=1).reshape(-1, *[1] * (row.ndim - 1))
      ids = np.where(has, row, ids)
    return ids

  def _best(self, queries: _Queries, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids and scores `[B, top]`, and which rows have the popular items, `[B]`."""
    about = self.served.about
    inputs, known = (
      _two_tower_inputs(queries, about, self._users.features)
      if self.served.recipe == "two_tower"
      else _sequence_inputs(queries, about)
    )
    vectors, candidates = self.served.run(inputs), self.served.candidates
    seen = _wide(queries.histories) if about["exclude_seen"] else None
    k = min(top, len(candidates))
    if self._approximate is None:
      scores, ids = (np.asarray(x) for x in self._exact(vectors, candidates, k, seen))
    else:
      scores, ids = self._approximate.top_k(np.asarray(vectors), k, seen)
    fill = ((0, 0), (0, top - ids.shape[1]))
    ids = np.pad(ids, fill, constant_values=-1)
    scores = np.where(ids >= 0, np.pad(scores, fill), np.nan)
    for row in np.flatnonzero(~known).tolist():
      ids[row], scores[row] = -1, np.nan
      popular = self._popular[: top + len(queries.histories[row])]
      if about["exclude_seen"]:
        popular = popular[~np.isin(popular, queries.histories[row])]
      ids[row, : len(popular[:top])] = popular[:top]
    return ids, scores, ~known


def _two_tower_inputs(
  queries: _Queries, about: Mapping[str, Any], features: Sequence[Feature]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns the query tower's features, histories evenly thinned out, and who has any, `[B]`."""
  width = about["eval_history"]
  history = np.full((len(queries.users), width), -1, np.int32)
  for row, items in enumerate(queries.histories):
    count = min(len(items), width)
    history[row, :count] = items[np.arange(count) * len(items) // max(count, 1)]
  inputs = {"user": queries.users, HISTORY: history} | queries.features
  inputs = {name: inputs[name] for name in about["query"]}
  known = [(ids != -1).reshape(len(ids), -1).any(axis=1) for ids in inputs.values()]
  raw = {f.name: f.ids(inputs[f.name]) for f in features if f.is_dynamic and f.name in inputs}
  return inputs | raw, np.any(known, axis=0)


def _sequence_inputs(
  queries: _Queries, about: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns rows as `sequence.data.EvalBatches` does, and which of them have items, `[B]`."""
  width, ask = about["max_length"], about["ask"]
  kept = np.array([min(len(items), width - ask) for items in queries.histories])
  lengths = np.maximum(kept + ask, 1)  # without any item the answer is not used
  inside = np.arange(width) < lengths[:, None]
  items = np.full(inside.shape, -1, np.int32)
  for row, (history, count) in enumerate(zip(queries.histories, kept.tolist(), strict=True)):
    items[row, :count] = history[len(history) - count :]
  positions = np.zeros(inside.shape, np.int32)
  positions[inside] = packing.positions(lengths, width, about["positions"])
  inputs = {
    "items": items,
    "segments": np.where(inside, 0, -1).astype(np.int32),
    "positions": positions,
    "last": (lengths - 1).astype(np.int32),
  }
  return inputs, kept > 0


def _wide(lists: Sequence[np.ndarray]) -> np.ndarray:
  """Returns lists of ids as int32 `[B, E]`, -1 after each."""
  width = retrieval.list_width(max(len(each) for each in lists))
  wide = np.full((len(lists), width), -1, np.int32)
  for row, each in enumerate(lists):
    wide[row, : len(each)] = each
  return wide
