"""Exported models that answer raw rows: probabilities of clicks, and the best items."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.special import expit

from .. import files, packing
from ..errors import UserError
from ..evaluation import retrieval
from ..tables import spec
from ..tables.transforms import Entities, Transforms, lengths_of
from ..training.features import cut_ids
from . import rows as rows_lib

# The files of an export.
NAME = "served.json"
MODEL = "model.npz"
TRANSFORMS = "transforms"
CANDIDATES = "candidates.npy"

_HISTORY = "history"  # the column with a user's own items
_ALLOW, _DENY = "allow", "deny"  # those with the only items to recommend, and with items not to
_SCORED, _RANKED = 4096, 256  # rows of the largest batch
_SMALLEST = 16  # rows of the smallest batch: powers of two, since each size is compiled


# --- exports --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Served:
  """An exported model, in memory."""

  transforms: Path  # the folder of transforms, users and items
  about: Mapping[str, Any]
  kinds: Mapping[str, spec.Kind]  # the declared columns of the training rows
  text_format: spec.Format  # of the training rows
  run: Callable[[Any], jax.Array]  # the program, compiled for each new number of rows
  candidates: jax.Array | None  # of the items, float32 `[items, D]`, zeros at the end; None of dlrm
  mesh: Mesh  # that the candidates are split over


def load(folder: str | Path) -> "ClickModel | Recommender":
  """Opens a folder that `recipes.export` has written: a `ClickModel` of dlrm, or a `Recommender`.

  Raises:
    MissingFileError: the folder is no export.
  """
  folder = Path(folder)
  advice = "`python -m recipes.export RUN --out=FOLDER` writes a folder to give here"
  about = files.read_json(files.require(folder, NAME, hint=advice))
  with np.load(folder / MODEL) as file:
    stored = dict(file)
  program = jax.export.deserialize(bytearray(stored.pop("program.bin")))
  mesh, candidates = Mesh(np.array(jax.local_devices()), ("data",)), None
  if (folder / CANDIDATES).exists():
    candidates = _split(np.load(folder / CANDIDATES), mesh)
  served = Served(
    transforms=folder / TRANSFORMS,
    about=about,
    kinds=spec.parse(about["columns"]),
    text_format=spec.Format(**about["text"]),
    run=functools.partial(jax.jit(program.call), jax.device_put(stored)),
    candidates=candidates,
    mesh=mesh,
  )
  return ClickModel(served) if about["recipe"] == "dlrm" else Recommender(served)


def _split(vectors: np.ndarray, mesh: Mesh) -> jax.Array:
  """Splits vectors over the mesh, zeros at the end; no device holds all."""
  padded = np.pad(vectors, ((0, -len(vectors) % mesh.size), (0, 0)))
  return jax.device_put(padded, NamedSharding(mesh, PartitionSpec("data")))


def _batches(rows: int, largest: int) -> Iterator[tuple[slice, np.ndarray]]:
  """Yields ranges of rows, and their numbers filled up by the last one to one of few sizes."""
  for start in range(0, rows, largest):
    stop = min(start + largest, rows)
    size = min(max(_SMALLEST, 1 << (stop - start - 1).bit_length()), largest)
    yield slice(start, stop), np.minimum(np.arange(start, start + size), stop - 1)


# --- clicks ---------------------------------------------------------------------------------------


class ClickModel:
  """Predicts the probability of a click.

  Attributes:
    columns: that rows must have.
  """

  def __init__(self, served: Served):
    self.served, kinds = served, served.kinds
    self._transforms = Transforms.load(served.transforms)
    features = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Side)}
    self._reader = rows_lib.Reader(features, served.text_format.missing)
    self.columns = self._reader.columns

  def predict(self, rows: Any, *, source: str = "rows", first_row: int = 1) -> np.ndarray:
    """Returns the probability of a click for every row, above 0 and below 1, float64 `[N]`.

    Args:
      rows: N of them; see `rows.as_table`.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: a column is missing, or a row cannot be read; names row, column and value.
    """
    table = rows_lib.as_table(rows)
    values = self._reader.read(table, source, first_row)
    encoded = self._transforms.encode(values, len(table))
    features = cut_ids(encoded["ids"], self._transforms.features)
    inputs = {"dense": encoded["dense"], "features": features}
    logits = np.empty(len(table))
    for part, places in _batches(len(logits), _SCORED):
      batch = jax.tree.map(lambda x, places=places: x[places], inputs)
      logits[part] = np.asarray(self.served.run(batch))[: part.stop - part.start]
    # float32 has no number between 1 - 6e-8 and 1, and a log loss takes a 1 for a certainty.
    return np.clip(expit(logits), np.finfo(float).tiny, 1 - np.finfo(float).epsneg)


# --- recommendations ------------------------------------------------------------------------------


class Recommended(NamedTuple):
  """The best items of N rows, the best first, or users like others; `top` of each.

  Attributes:
    items: raw ids, object `[N, top]`, None where there are fewer candidates.
    scores: float32 `[N, top]`, NaN where there is no item, or no score.
    titles: object `[N, top]`, None where training has declared no title.
    is_popular: bool `[N]`, rows that name nothing known: they have the most popular items, without
      scores.
  """

  items: np.ndarray
  scores: np.ndarray
  titles: np.ndarray | None
  is_popular: np.ndarray


class Recommender:
  """Recommends items to users.

  Attributes:
    user: the name of the user's declaration; "" where training has none.
    columns: that rows may have, of which they need at least one.
    ids: the names of the columns with raw ids, of each "item" and "user".
  """

  def __init__(self, served: Served):
    assert served.candidates is not None
    self.served, self._candidates = served, served.candidates
    folder, about, kinds = served.transforms, served.about, served.kinds
    self._users, self._items = Entities.load(folder, "users"), Entities.load(folder, "items")
    self._history = np.load(folder / "history.npy", mmap_mode="r")
    self._offsets = np.load(folder / "history_offsets.npy")
    count = len(self._items.texts)
    popularity = np.bincount(self._history, minlength=count)
    if about.get("popularity"):  # scores have it, and rank a query of nothing in this order
      popularity = np.asarray(self._candidates)[:count, -1]
    self._popular = np.argsort(-popularity, kind="stable").astype(np.int32)
    self.user = spec.only(kinds, spec.User) or ""
    of_users = self._users.transforms.kinds
    self._features = [name for name in of_users if name in about.get("query", ())]
    read = {self.user: kinds[self.user]} if self.user else {}
    read |= of_users if self._features else {}
    read |= {_HISTORY: spec.Bag()}
    missing, lists = served.text_format.missing, {_ALLOW: spec.Bag(), _DENY: spec.Bag()}
    self._reader = rows_lib.Reader(read, missing, required=False)
    self._list_reader = rows_lib.Reader(lists, missing, required=False)
    self.columns = self._reader.columns
    self._declared = {column for name, kind in kinds.items() for column in kind.sources(name)}
    item = spec.only(kinds, spec.Item) or spec.only(kinds, spec.Ordered)
    named = {"item": item, "user": self.user}
    self.ids = {of: kinds[name].sources(name)[0] if name else of for of, name in named.items()}
    self._directions: dict[str, tuple[np.ndarray, jax.Array]] = {}
    self._top_k = jax.jit(functools.partial(retrieval.top_k, mesh=served.mesh), static_argnames="k")

  def recommend(
    self,
    rows: Any,
    top: int | None = None,
    *,
    allow: Iterable[Any] | None = None,
    deny: Iterable[Any] | None = None,
    source: str = "rows",
    first_row: int = 1,
  ) -> Recommended:
    """Returns the best items for every row.

    Args:
      rows: N of them; see `rows.as_table`.
      top: how many items, 1 to the number of items; None is 10, or all where they are fewer.
      allow: raw ids of the only items to recommend to any row; None is all.
      deny: raw ids of items that are recommended to none.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: there are not `top` items, no column is of use, or a row cannot be read; names row,
        column and value.
    """
    table = rows_lib.as_table(rows)
    if not any(column in table.column_names for column in self.columns):
      raise UserError(
        f"{source} has none of the columns {', '.join(self.columns)}: give one that says for whom "
        f"to recommend; it has {', '.join(table.column_names) or 'none'}"
      )
    entities, top = self._entities("item", top)
    every = np.arange(len(entities.texts))
    among = np.ones(len(every), bool)
    if allow is not None:
      among &= np.isin(every, self._numbers(entities, allow, _ALLOW))
    if deny is not None:
      among &= np.isin(every, self._numbers(entities, deny, _DENY), invert=True)
    values = self._reader.read(table, source, first_row)
    users = np.full(len(table), -1, np.int32)
    if self.user in values:
      users = self._users.codes.find(values[self.user])
    vectors, own, is_known = self._queries(users, values)
    listed, only = self._listed(table, own, source, first_row)
    ids, scores = self._best(vectors, self._candidates, top, listed, only, among)
    scores[~is_known] = np.nan
    for row in np.flatnonzero(~is_known):
      is_left = among[self._popular] & (np.isin(self._popular, listed[row]) == only[row])
      liked = self._popular[is_left][:top]
      ids[row] = [*liked, *[-1] * (top - len(liked))]
    return _answers(entities, ids, scores, ~is_known)

  def similar(self, ids: Iterable[Any], side: str = "item", top: int | None = None) -> Recommended:
    """Returns those most like each of N raw ids, without itself; blanks for an unknown one.

    Scores are cosines of vectors without popularity.

    Args:
      side: "item" or "user".
      top: as for `recommend`.

    Raises:
      UserError: there are not `top` of them, or no such side.
    """
    entities, top = self._entities(side, top)
    codes = self._numbers(entities, ids, "ids")
    if side not in self._directions:
      vectors = self.vectors(side)[1][:, : -1 if self.served.about.get("popularity") else None]
      lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
      unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
      self._directions[side] = unit, _split(unit, self.served.mesh)
    unit, split = self._directions[side]
    every = np.ones(len(unit), bool)
    # An unknown id may find nothing but its list, which is empty.
    best = self._best(unit[codes], split, top, [*codes[:, None]], codes < 0, every)
    return _answers(entities, *best, np.zeros(len(codes), bool))

  def vectors(self, side: str) -> tuple[list[str], np.ndarray]:
    """Returns the raw ids and the vectors, float32 `[N, D]`, of all items or users.

    Dot products of the two are the scores of `recommend` for users as training has stored them.

    Args:
      side: "item" or "user".
    """
    texts = self._entities(side)[0].texts
    if side == "item":
      return texts, np.asarray(self._candidates)[: len(texts)]
    users = np.arange(len(texts), dtype=np.int32)
    parts = np.split(users, range(_SCORED, len(users), _SCORED))
    return texts, np.concatenate([self._queries(part, {})[0] for part in parts])

  def _entities(self, side: str, top: int | None = None) -> tuple[Entities, int]:
    """Returns the items or users, and how many of them are asked for; UserError for no such."""
    if side not in self.ids:
      raise UserError(f"side is {side!r}: choose 'item' or 'user'")
    entities = self._items if side == "item" else self._users
    most = len(entities.texts)
    top = min(10, most) if top is None else top
    if not 1 <= top <= most:
      raise UserError(f"top is {top}: choose 1 to {most}, the number of {side}s")
    return entities, top

  def _numbers(self, entities: Entities, ids: Iterable[Any], name: str) -> np.ndarray:
    """Returns the numbers of raw ids, int32 `[N]`; -1 for unknown ones."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
      raise UserError(f"{name} is {ids!r}: give a list of raw ids")
    texts = [None if each is None else spec.as_text(each) for each in ids]
    return entities.codes.of_distinct(pa.array(texts, pa.string()))

  def _best(
    self,
    vectors: np.ndarray,
    candidates: jax.Array,
    top: int,
    listed: Sequence[np.ndarray],
    only: np.ndarray,
    among: np.ndarray,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of the best candidates, -1 and NaN where none is left; see `top_k`."""
    among = np.pad(among, (0, len(candidates) - len(among)))
    ids, scores = (np.empty((len(vectors), top), kind) for kind in (np.int32, np.float32))
    for part, places in _batches(len(vectors), _RANKED):
      lists = [listed[place] for place in places]
      padded = _padded(lists, retrieval.list_width(max(map(len, lists))))
      lists_of = {"listed": padded, "only": only[places], "among": among}
      best = self._top_k(vectors[places], candidates, k=top, **lists_of)
      scores[part], ids[part] = (np.asarray(x)[: part.stop - part.start] for x in best)
    scores[ids < 0] = np.nan
    return ids, scores

  def _queries(
    self, users: np.ndarray, values: Mapping[str, Any]
  ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Returns vectors float32 `[N, D]`, known items and what is known; see `_inputs`."""
    own = self._histories(users, values)
    inputs, is_known = self._inputs(users, own, values)
    vectors = np.empty((len(users), self._candidates.shape[1]), np.float32)
    for part, places in _batches(len(users), _RANKED):
      batch = jax.tree.map(lambda x, places=places: x[places], inputs)
      vectors[part] = np.asarray(self.served.run(batch))[: part.stop - part.start]
    return vectors, own, is_known

  def _lists(self, values: Mapping[str, Any], name: str, rows: int) -> list[np.ndarray]:
    """Returns the items in the lists of a column, -1 for unknown ones; none without the column."""
    lists = values.get(name, pa.nulls(rows, pa.list_(pa.string())))
    items = self._items.codes.find(lists.flatten())
    return np.split(items, np.cumsum(lengths_of(lists)))[:-1]

  def _histories(self, users: np.ndarray, values: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the known items of rows, or else of their users."""
    own = self._lists(values, _HISTORY, len(users))
    for row, user in enumerate(users.tolist()):
      if not len(own[row]) and user >= 0:
        own[row] = self._history[self._offsets[user] : self._offsets[user + 1]]
    return [items[items >= 0] for items in own]

  def _listed(
    self, table: pa.Table, own: Sequence[np.ndarray], source: str, first_row: int
  ) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the items that each row leaves out, or the only ones where `only` `[N]` is True."""
    given = [name for name in (_ALLOW, _DENY) if name in table.column_names]
    if clash := [name for name in given if name in self._declared]:
      raise UserError(
        f"{source} has the column {clash[0]!r}, of lists of items, but training has declared it as "
        "something else: leave it out, or rename it in the table and train again"
      )
    values = self._list_reader.read(table, source, first_row) if given else {}
    allow, deny = (self._lists(values, name, len(own)) for name in (_ALLOW, _DENY))
    only = np.zeros(len(own), bool)
    if _ALLOW in given:
      only = _is_list(table[_ALLOW], self.served.text_format.missing)
    if self.served.about["exclude_seen"]:
      deny = [np.concatenate(pair) for pair in zip(deny, own, strict=True)]
    every = np.arange(len(self._items.texts), dtype=np.int32)
    for row, items in enumerate(deny):
      if not only[row] and 2 * len(items) > len(every):  # what is left is the shorter list
        allow[row], only[row] = every, True
      if only[row]:
        deny[row] = allow[row][~np.isin(allow[row], items)]
    return deny, only

  def _feature(self, name: str, users: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
    """Returns a feature's ids: of the row where it has one, else of the user."""
    stored = self._users.ids[name]
    as_mask = lambda rows: rows.reshape(-1, *[1] * (stored.ndim - 1))
    ids = np.where(as_mask(users >= 0), stored[users], -1)
    if name not in values:
      return ids
    row = self._users.transforms.ids(values, name)
    return np.where(as_mask(_is_given(row)), row, ids)

  def _inputs(
    self, users: np.ndarray, own: Sequence[np.ndarray], values: Mapping[str, Any]
  ) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the program's inputs of N rows, and which rows name anything known, bool `[N]`."""
    about = self.served.about
    if about["recipe"] == "sequence":
      width = about["max_length"]
      rows = _padded([items[-width:] for items in own], width)
      inputs = packing.inference_batch(rows, places=width, aligned=about["positions"])
      return inputs, _is_given(rows)
    width, thinned = about["eval_history"], []
    for items in own:  # evenly
      count = min(len(items), width)
      thinned.append(items[np.arange(count) * len(items) // max(count, 1)])
    every = {"user": users, _HISTORY: _padded(thinned, width)}
    every |= {name: self._feature(name, users, values) for name in self._features}
    inputs = {name: every[name] for name in about["query"]}
    is_known = np.any([_is_given(x) for x in inputs.values()], axis=0)
    features = (f for f in self._users.transforms.features if f.name in inputs)
    return inputs | {f.name: f.ids(inputs[f.name]) for f in features}, is_known


def _answers(
  entities: Entities, ids: np.ndarray, scores: np.ndarray, is_popular: np.ndarray
) -> Recommended:
  listed = lambda texts: [texts[place] if place >= 0 else None for place in ids.flat]
  shown = lambda texts: np.array(listed(texts), object).reshape(ids.shape)
  titles = None if entities.titles is None else shown(entities.titles)
  return Recommended(shown(entities.texts), scores, titles, is_popular)


def _is_list(cells: pa.ChunkedArray, missing: Sequence[str]) -> np.ndarray:
  """Returns which cells have a list, bool `[N]`: an empty list is one, an empty text is none."""
  if pa.types.is_nested(cells.type):
    return cells.is_valid().to_numpy()
  texts = pc.utf8_trim_whitespace(cells.cast(pa.string()))
  return ~pc.is_in(texts, pa.array(["", None, *missing])).to_numpy()


def _is_given(ids: np.ndarray) -> np.ndarray:
  """Returns which rows of ids, `[N, ...]`, have one, bool `[N]`."""
  return (ids != -1).reshape(len(ids), math.prod(ids.shape[1:])).any(axis=1)


def _padded(lists: Sequence[np.ndarray], width: int) -> np.ndarray:
  """Returns lists of ids as int32 `[N, width]`, -1 after each."""
  items = np.concatenate([np.empty(0, np.int32), *lists])
  return packing.padded(items, [*map(len, lists)], width)
