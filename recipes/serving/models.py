"""Exported models that answer raw rows: probabilities of clicks, and the best items."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
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
  if (folder / CANDIDATES).exists():  # split over the mesh, zeros at the end; no device holds all
    rows = np.load(folder / CANDIDATES)
    rows = np.pad(rows, ((0, -len(rows) % mesh.size), (0, 0)))
    candidates = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
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
    names: of the scores: "score", or of several labels "score_<label>".
  """

  def __init__(self, served: Served):
    self.served, kinds = served, served.kinds
    self._transforms = Transforms.load(served.transforms)
    features = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Side)}
    self._reader = rows_lib.Reader(features, served.text_format.missing)
    self.columns = self._reader.columns
    self.names = ("score",)

  def predict(self, rows: Any, *, source: str = "rows", first_row: int = 1) -> np.ndarray:
    """Returns the probability of a click for every row, above 0 and below 1, float64 `[N]`.

    Of several labels `[N, len(model.names)]`.

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
    outputs = np.empty((len(table), len(self.names)))
    for part, places in _batches(len(outputs), _SCORED):
      batch = jax.tree.map(lambda x, places=places: x[places], inputs)
      logits = np.asarray(self.served.run(batch)).reshape(len(places), -1)
      outputs[part] = logits[: part.stop - part.start]
    # float32 has no number between 1 - 6e-8 and 1, and a log loss takes a 1 for a certainty.
    scores = np.clip(expit(outputs), np.finfo(float).tiny, 1 - np.finfo(float).epsneg)
    return scores if len(self.names) > 1 else scores[:, 0]


# --- recommendations ------------------------------------------------------------------------------


class Recommended(NamedTuple):
  """The best items of N rows, the best first; `top` of each.

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
  """

  def __init__(self, served: Served):
    self.served = served
    folder, about, kinds = served.transforms, served.about, served.kinds
    self._users, self._items = Entities.load(folder, "users"), Entities.load(folder, "items")
    self._history = np.load(folder / "history.npy", mmap_mode="r")
    self._offsets = np.load(folder / "history_offsets.npy")
    count = len(self._items.texts)
    popularity = np.bincount(self._history, minlength=count)
    if about.get("popularity"):  # scores have it, and rank a query of nothing in this order
      popularity = np.asarray(served.candidates)[:count, -1]
    self._popular = np.argsort(-popularity, kind="stable").astype(np.int32)
    self.user = spec.only(kinds, spec.User) or ""
    of_users = self._users.transforms.kinds
    self._features = [name for name in of_users if name in about.get("query", ())]
    read = {self.user: kinds[self.user]} if self.user else {}
    read |= of_users if self._features else {}
    read |= {_HISTORY: spec.Bag()}
    self._reader = rows_lib.Reader(read, served.text_format.missing, required=False)
    self.columns = self._reader.columns
    search = functools.partial(retrieval.top_k, mesh=served.mesh, size=count)
    self._top_k = jax.jit(search, static_argnames="k")

  def recommend(
    self, rows: Any, top: int | None = None, *, source: str = "rows", first_row: int = 1
  ) -> Recommended:
    """Returns the best items for every row.

    Args:
      rows: N of them; see `rows.as_table`.
      top: how many items, 1 to the number of items; None is 10, or all where they are fewer.
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
    values, count = self._reader.read(table, source, first_row), len(table)
    num_items, is_new = len(self._items.texts), self.served.about["exclude_seen"]
    top = min(10, num_items) if top is None else top
    if not 1 <= top <= num_items:
      raise UserError(f"top is {top}: choose 1 to {num_items}, the number of items")
    users = np.full(count, -1, np.int32)
    if self.user in values:
      users = self._users.codes.find(values[self.user])
    own = self._histories(users, values)
    inputs, is_known = self._inputs(users, own, values)
    ids, scores = np.full((count, top), -1, np.int32), np.full((count, top), np.nan, np.float32)
    for part, places in _batches(count, _RANKED):
      batch = jax.tree.map(lambda x, places=places: x[places], inputs)
      vectors = np.asarray(self.served.run(batch))  # for any number of devices
      lists = [own[place] for place in places]
      seen = _padded(lists, retrieval.list_width(max(map(len, lists)))) if is_new else None
      best = self._top_k(vectors, self.served.candidates, k=top, exclude=seen)
      scores[part], ids[part] = (np.asarray(x)[: part.stop - part.start] for x in best)
    scores[(ids < 0) | ~is_known[:, None]] = np.nan
    for row in np.flatnonzero(~is_known):
      liked = self._popular[: top + len(own[row])]
      liked = liked[~np.isin(liked, own[row])][:top] if is_new else liked[:top]
      ids[row] = [*liked, *[-1] * (top - len(liked))]
    texts = lambda each: np.array([*each, None], object)[ids]
    titles = None if self._items.titles is None else texts(self._items.titles)
    return Recommended(texts(self._items.texts), scores, titles, ~is_known)

  def _histories(self, users: np.ndarray, values: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the known items of rows, or else of their users."""
    given = values.get(_HISTORY, pa.nulls(len(users), pa.list_(pa.string())))
    items = self._items.codes.find(given.flatten())
    own, start = [], 0
    for user, count in zip(users.tolist(), lengths_of(given).tolist(), strict=True):
      row = items[start : (start := start + count)]
      if not count and user >= 0:
        row = self._history[self._offsets[user] : self._offsets[user + 1]]
      own.append(row[row >= 0])
    return own

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


def _is_given(ids: np.ndarray) -> np.ndarray:
  """Returns which rows of ids, `[N, ...]`, have one, bool `[N]`."""
  return (ids != -1).reshape(len(ids), -1).any(axis=1)


def _padded(lists: Sequence[np.ndarray], width: int) -> np.ndarray:
  """Returns lists of ids as int32 `[N, width]`, -1 after each."""
  items = np.concatenate([np.empty(0, np.int32), *lists])
  return packing.padded(items, [*map(len, lists)], width)
