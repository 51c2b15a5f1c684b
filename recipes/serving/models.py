"""Models that answer raw rows: probabilities of clicks, and the best items."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from scipy.special import expit

from .. import packing
from ..errors import UserError
from ..evaluation import retrieval
from ..tables import spec
from ..tables.transforms import Encoder, Entities, lengths_of, stacked
from ..training.features import Feature, cut_ids
from . import histories
from . import rows as rows_lib
from .folder import Served

HISTORY = "history"  # the column with a user's own items
_SCORED, _RANKED = 4096, 256  # rows of the largest batch
_SMALLEST = 16  # rows of the smallest batch: powers of two, since each size is compiled


def _batches(rows: int, largest: int) -> Iterator[tuple[slice, np.ndarray]]:
  """Yields ranges of rows, and their numbers filled up by the last one to one of few sizes."""
  for start in range(0, rows, largest):
    stop = min(start + largest, rows)
    size = min(max(_SMALLEST, 1 << (stop - start - 1).bit_length()), largest)
    yield slice(start, stop), np.minimum(np.arange(start, start + size), stop - 1)


# --- clicks ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scored:
  """Probabilities of N rows, and how many rows have values that say little about them.

  Attributes:
    scores: float64 `[N]`, above 0 and below 1; NaN of rows that cannot be read. Of several labels
      `[N, len(model.names)]`: a probability of each label of clicks and of each class, and the
      value of a regression.
    is_bad: bool `[N]`, rows that cannot be read and are left out.
    unknown: by column, how many rows have a value that training has not seen, or, of users and
      items with features in a table of their own, that this table lacks.
    missing: by column, how many rows have no value.
  """

  scores: np.ndarray
  is_bad: np.ndarray
  unknown: Mapping[str, int]
  missing: Mapping[str, int]


class ClickModel:
  """Predicts the probability of a click.

  Attributes:
    names: of the scores: "score", or of several labels "score_<label>".
    labels: what is predicted, in the order of the scores.
  """

  def __init__(self, served: Served):
    self.served = served
    self.encoder = Encoder.load(served.transforms)
    missing = served.text_format.missing
    self._features = {
      name: kind
      for name, kind in served.kinds.items()
      if isinstance(kind, spec.Side) and not spec.is_history(kind)
    }
    self.labels = spec.labels(served.kinds)
    self._lists = histories.Lists(self.encoder, served.kinds, missing)
    self._reader = rows_lib.Reader(
      self._features | self._lists.kinds,
      missing,
      has_dates=self._lists.has_dates,
      aligned=self._lists.lists,
    )
    several = tuple(f"score_{name}" for name in self.labels)
    self.names = several if len(several) > 1 else ("score",)

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that rows must have."""
    return self._reader.columns

  def predict(
    self, rows: Any, *, on_bad_row: str = "raise", source: str = "rows", first_row: int = 1
  ) -> np.ndarray:
    """Returns the probability of a click for every row, float64 `[N]`: `scores` of `score`.

    Of several labels `[N, len(model.names)]`.
    """
    return self.score(rows, on_bad_row=on_bad_row, source=source, first_row=first_row).scores

  def score(
    self, rows: Any, *, on_bad_row: str = "raise", source: str = "rows", first_row: int = 1
  ) -> Scored:
    """Returns the probability of a click for every row, and counts of unknown and missing values.

    Args:
      rows: N of them; see `rows.as_table`.
      on_bad_row: "raise", or "skip", which makes the score of a row that cannot be read NaN.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: a column is missing, or a row cannot be read; names row and column.
    """
    values, bad = self._reader.read(rows_lib.as_table(rows), on_bad_row, source, first_row)
    positions, wrong = self._lists.positions(values, on_bad_row, source, first_row)
    bad = bad | wrong if len(wrong) else bad
    inputs = self.inputs(values, len(bad), positions)
    absent = {name: rows_lib.absent(values[name]) for name in self._features}
    of_row = lambda name: (name, values[name], inputs["features"].get(name))
    transforms = self.encoder.transforms
    unseen = {name: rows_lib.unseen(transforms, *of_row(name)) for name in self._features}
    for name, side in self.encoder.sides.items():
      unseen[name] |= ~absent[name] & (side.codes.find(values[name]) < 0)
    scores = self.scores(inputs)
    scores[bad] = np.nan
    return Scored(
      scores,
      bad,
      rows_lib.by_column(unseen, self._features, bad),
      rows_lib.by_column(absent, self._features, bad),
    )

  def inputs(
    self, values: Mapping[str, Any], count: int, positions: Sequence[np.ndarray] = ()
  ) -> dict[str, Any]:
    """Returns the program's inputs `dense` and `features`.

    Args:
      values: N texts, numbers or lists by declared name, as training reads them.
      count: N.
      positions: the histories' columns of `ids`.
    """
    encoded = self.encoder.encode(values, count)
    ids = np.concatenate([encoded["ids"], *positions], axis=1)
    return {"dense": encoded["dense"], "features": cut_ids(ids, self.encoder.features)}

  def scores(self, inputs: Mapping[str, Any]) -> np.ndarray:
    """Returns `scores` of `Scored` for inputs of N rows."""
    count = len(inputs["dense"])
    outputs = np.empty((count, len(self.names)))
    for part, places in _batches(count, _SCORED):
      batch = jax.tree.map(lambda x, places=places: x[places], inputs)
      found = np.asarray(self.served.run(batch))[: part.stop - part.start]
      outputs[part] = found.reshape(len(found), -1)
    # float32 has no number between 1 - 6e-8 and 1, and a log loss takes a 1 for a certainty.
    scores = np.clip(expit(outputs), np.finfo(float).tiny, 1 - np.finfo(float).epsneg)
    return scores if len(self.names) > 1 else scores[:, 0]


# --- recommendations ------------------------------------------------------------------------------


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

  def at(self, places: np.ndarray) -> "_Queries":
    histories = [self.histories[place] for place in places]
    features = {name: ids[places] for name, ids in self.features.items()}
    return _Queries(self.users[places], histories, features)


class Recommender:
  """Recommends items to users."""

  def __init__(self, served: Served):
    self.served = served
    folder, about, kinds = served.transforms, served.about, served.kinds
    self._is_towers = about["recipe"] == "two_tower"
    self._users, self._items = Entities.load(folder, "users"), Entities.load(folder, "items")
    self._history = np.load(folder / "history.npy", mmap_mode="r")
    self._offsets = np.load(folder / "history_offsets.npy")
    counts = np.bincount(self._history, minlength=len(self._items.texts))
    # Where scores have popularity, they rank a query of nothing in this order.
    liked = counts
    if about.get("popularity"):
      liked = np.asarray(served.candidates)[: len(counts), -1]
    self._popular = np.argsort(-liked, kind="stable").astype(np.int32)
    user = spec.only(kinds, spec.User)
    item = spec.only(kinds, spec.Item) or spec.only(kinds, spec.Ordered)
    pattern = lambda name: getattr(kinds[name], "pattern", "") if name else ""
    self._codes = {
      "user": (self._users.codes, pattern(user)), "item": (self._items.codes, pattern(item))
    }  # fmt: skip
    # What is read of rows: the user, as "", features of the user, and own items from one of `_own`.
    self._kinds: dict[str, spec.Kind] = {}
    if user:
      (column,) = kinds[user].sources(user)
      self._kinds[""] = spec.User(column=column)
    self._own: dict[str, spec.Kind] = {HISTORY: spec.Bag(column=HISTORY)}
    if item and (separator := getattr(kinds[item], "separator", "")):
      column = kinds[item].column or item
      self._own[column] = spec.Bag(column=column, separator=separator)
    of_users = self._users.transforms.kinds
    self._features = {
      n: kind for n, kind in of_users.items() if self._is_towers and n in about["query"]
    }
    self._kinds |= self._features
    missing = served.text_format.missing
    self._readers = {
      own: rows_lib.Reader(
        self._kinds | ({"own": self._own[own]} if own else {}), missing, required=False
      )
      for own in ("", *self._own)
    }
    self._parts = {n: (n,) for n in self._features if n not in self._users.vectors}
    search = functools.partial(retrieval.top_k, mesh=served.mesh, size=len(self._items.texts))
    self._exact = jax.jit(search, static_argnames="k")

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that rows may have, of which they need at least one."""
    return tuple(dict.fromkeys([*self._readers[""].columns, *self._own]))

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
      rows: N of them; see `rows.as_table`.
      top: how many items, 1 to the number of items; None is 10, or all where they are fewer.
      on_bad_row: "raise", or "skip", which leaves out a row that cannot be read.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: there are not `top` items, no column is of use, or a row cannot be read; names row
        and column.
    """
    top = self.checked_top(top)
    table = rows_lib.as_table(rows)
    if not any(column in table.column_names for column in self.columns):
      raise UserError(
        f"{source} has none of the columns {', '.join(self.columns)}: give one that says for whom "
        f"to recommend; it has {', '.join(table.column_names) or 'none'}"
      )
    own = next((column for column in self._own if column in table.column_names), "")
    values, bad = self._readers[own].read(table, on_bad_row, source, first_row)
    return self.answers(values, bad, top)

  def checked_top(self, top: int | None) -> int:
    """Returns `top` of `recommend` as a number; raises UserError where there are not so many."""
    count = len(self._items.texts)
    if top is None:
      return min(10, count)
    if not 1 <= top <= count:
      raise UserError(f"top is {top}: choose 1 to {count}, the number of items")
    return top

  def answers(self, values: Mapping[str, Any], bad: np.ndarray, top: int) -> Recommended:
    """Returns as `recommend`, for values as training reads them.

    Args:
      values: users by the name "", their own items by "own", and features by declared name.
      bad: bool `[N]`, rows to leave out.
    """
    count, transforms = len(bad), self._users.transforms
    given = [n for n, parts in self._parts.items() if all(part in values for part in parts)]
    own = {name: transforms.ids(values, name) for name in given}
    queries, unknown = self._queries(values, own, count)
    ids = np.full((count, top), -1, np.int32)
    scores = np.full((count, top), np.nan, np.float32)
    popular = np.zeros(count, bool)
    for part, places in _batches(count, _RANKED):
      best = self._best(queries.at(places), top)
      ids[part], scores[part], popular[part] = (x[: part.stop - part.start] for x in best)
    ids[bad], scores[bad], popular[bad] = -1, np.nan, False
    named = lambda texts: np.array([*texts, None], object)[ids]
    titles = None if self._items.titles is None else named(self._items.titles)
    unseen = {
      name: rows_lib.unseen(transforms, name, values[name], own.get(name))
      if name
      else (queries.users < 0) & ~rows_lib.absent(values[""])
      for name in self._kinds
      if name in values
    }
    counts = rows_lib.by_column(unseen, self._kinds, bad)
    return Recommended(named(self._items.texts), scores, titles, popular, bad, unknown, counts)

  def leaves_out(self, users: pa.Array, items: pa.Array) -> np.ndarray:
    """Returns whether an item is never recommended to a user, who has had it; bool `[N]`.

    Args:
      users, items: N raw ids each, cut by the patterns of their columns.
    """
    if not self.served.about["exclude_seen"]:
      return np.zeros(len(users), bool)
    user, item = self._users.codes.find(users), self._items.codes.find(items)
    owners = np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._offsets))
    count = len(self._items.texts)
    had = np.isin(user.astype(np.int64) * count + item, owners * count + self._history)
    return had & (user >= 0) & (item >= 0)

  def _queries(
    self, values: Mapping[str, Any], ids: Mapping[str, np.ndarray], count: int
  ) -> tuple[_Queries, int]:
    """Returns what rows with `ids` of features say, and how many items of histories are unknown."""
    users = np.full(count, -1, np.int32)
    if "" in values:
      users = self._find("user", values[""])
    own: pa.ListArray = values.get("own", pa.nulls(count, pa.list_(pa.string())))
    lengths = lengths_of(own)
    items = self._find("item", own.flatten().cast(pa.string()))
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
    features = {name: self._feature(name, users, values, ids) for name in self._features}
    return _Queries(users, histories, features), int((items < 0).sum())

  def _find(self, side: str, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of ids, as they are or cut by the pattern of their column; or -1."""
    codes, pattern = self._codes[side]
    found = codes.find(texts)
    if pattern:
      matches = [re.search(pattern, text or "") for text in texts.to_pylist()]
      cut = pa.array([match[1] if match else None for match in matches], pa.string())
      found = np.where(found < 0, codes.find(cut), found)
    return found

  def _feature(
    self, name: str, users: np.ndarray, values: Mapping[str, Any], of_rows: Mapping[str, np.ndarray]
  ) -> np.ndarray:
    """Returns a feature's ids: of the row where it has one, else of the user, else -1.

    Of a vector its numbers, else zeros.
    """
    if name in (vectors := self._users.vectors):
      own = np.where(users[:, None] >= 0, vectors[name][users], np.float32(0))
      row = stacked(values[name], own.shape[1]) if name in values else np.zeros_like(own)
      return np.where(row.any(axis=1, keepdims=True), row, own)
    stored = self._users.ids[name]
    known = (users >= 0).reshape(-1, *[1] * (stored.ndim - 1))
    ids = np.where(known, stored[users], -1).astype(np.int32)
    if name in of_rows:
      row = of_rows[name]
      # Halves of raw ids may be negative.
      has = (row != -1).reshape(len(row), -1).any(axis=1).reshape(-1, *[1] * (row.ndim - 1))
      ids = np.where(has, row, ids)
    return ids

  def _best(self, queries: _Queries, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids and scores `[B, top]`, and which rows have the popular items, `[B]`."""
    about = self.served.about
    inputs, known = (
      _two_tower_inputs(queries, about, self._users.features)
      if self._is_towers
      else _sequence_inputs(queries, about)
    )
    vectors, seen = np.asarray(self.served.run(inputs)), None  # for any number of devices
    if about["exclude_seen"]:
      width = retrieval.list_width(max(map(len, queries.histories)))
      seen = _padded(queries.histories, width)
    found = self._exact(vectors, self.served.candidates, k=top, exclude=seen)
    scores, ids = map(np.array, found)
    scores[ids < 0] = np.nan
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
  width, histories = about["eval_history"], []
  for items in queries.histories:
    count = min(len(items), width)
    histories.append(items[np.arange(count) * len(items) // max(count, 1)])
  history = _padded(histories, width)
  inputs = {"user": queries.users, HISTORY: history} | queries.features
  inputs = {name: inputs[name] for name in about["query"]}
  none = lambda x: 0 if x.dtype == np.float32 else -1  # of a vector, of ids
  known = [(x != none(x)).reshape(len(x), -1).any(axis=1) for x in inputs.values()]
  raw = {f.name: f.ids(inputs[f.name]) for f in features if f.is_dynamic and f.name in inputs}
  return inputs | raw, np.any(known, axis=0)


def _sequence_inputs(
  queries: _Queries, about: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns the `packing.inference_batch` of the last items, and which rows have any, `[B]`."""
  width, ask = about["max_length"], about["ask"]
  kept = np.array([min(len(items), width - ask) for items in queries.histories])
  latest = zip(queries.histories, kept.tolist(), strict=True)
  items = np.concatenate([history[len(history) - count :] for history, count in latest])
  how = {"places": width, "aligned": about["positions"], "ask": ask}
  return packing.inference_batch(items, kept, width, **how), kept > 0


def _padded(lists: Sequence[np.ndarray], width: int) -> np.ndarray:
  """Returns lists of ids as int32 `[B, width]`, -1 after each."""
  return packing.padded(np.concatenate(lists), [*map(len, lists)], width)
