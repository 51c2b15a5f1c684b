"""Typed rows to ids and numbers by fitted transforms: the same in training and serving."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import embed
from embed import transforms

from .. import files
from ..training.features import Feature
from . import spec
from .histories import History, Log, Part, taken

Values = Mapping[str, Any]  # by declared name: Arrow arrays of texts, lists and numbers, `[N]`
_FEW_KNOWN = 16  # known values for each one that is looked up


def logarithm(numbers: np.ndarray) -> np.ndarray:
  """Returns `sign(x) * log(1 + |x|)`."""
  return np.sign(numbers) * np.log1p(np.abs(numbers))


def numbers_of(values: Any) -> np.ndarray:
  """Returns numbers as float64 `[N]`, NaN where null."""
  if isinstance(values, np.ndarray):
    return values
  return values.cast(pa.float64()).to_numpy(zero_copy_only=False)


def lengths_of(lists: pa.Array) -> np.ndarray:
  """Returns how many items each list has, `[N]`; 0 where null."""
  return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def indices_of(array: pa.DictionaryArray) -> np.ndarray:
  """Returns the place of each value in the dictionary, `[N]`; -1 where null."""
  return pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False)


def stacked(vectors: pa.ListArray, width: int) -> np.ndarray:
  """Returns lists as float32 `[N, width]`, zeros for missing ones."""
  rows = np.zeros((len(vectors), width), np.float32)
  rows[lengths_of(vectors) > 0] = (
    vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
  )
  return rows


def vocabulary_of(name: str, kind: spec.Kind) -> str | None:
  """Returns the name of the vocabulary of a column; None of a column without."""
  if not isinstance(kind, spec.Category) or kind.hash or kind.size or kind.is_dynamic:
    return None
  return spec.table_of(name, kind)


class Transforms:
  """The transforms of declared columns: values to ids and numbers, the same in every process.

  Args:
    kinds: the declared features by name.
    vocabularies: the values of each table that has a vocabulary, the first being id 0.
    numbers: mean, deviation, what a missing value is, and boundaries of numbers by name.
    widths: the most values used of each bag by name.
  """

  def __init__(
    self,
    kinds: Mapping[str, spec.Kind],
    vocabularies: Mapping[str, tuple[str, ...]],
    numbers: Mapping[str, Mapping[str, Any]],
    widths: Mapping[str, int],
  ):
    self.kinds, self.vocabularies = dict(kinds), dict(vocabularies)
    self.numbers = {name: dict(each) for name, each in numbers.items()}
    self.widths = dict(widths)
    self._values = {table: pa.array(each, pa.string()) for table, each in vocabularies.items()}
    columns = {name: self._column(name, kind) for name, kind in self.kinds.items()}
    self._columns = {name: column for name, column in columns.items() if column is not None}

  def _column(self, name: str, kind: Any) -> Any:
    """Returns the transform of a feature to ids; None of numbers that are used as they are."""
    if isinstance(kind, spec.Vector):
      return None
    if isinstance(kind, spec.Number):
      boundaries = self.numbers[name]["boundaries"]
      return transforms.Bucketized(boundaries, default_value=-1) if boundaries else None
    if kind.hash:
      return transforms.HashBucket(kind.hash)
    if kind.size:
      return transforms.Identity(kind.size, default_value=-1)
    if kind.is_dynamic:
      return transforms.RawIds()
    values = self.vocabularies[kind.table or name]
    if not values:
      return transforms.HashBucket(kind.oov)
    return transforms.Vocabulary(
      values, **({"num_oov_buckets": kind.oov} if kind.oov else {"default_value": -1})
    )

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features, in the order of the declaration."""
    return tuple(map(self._feature, self._columns))

  def _feature(self, name: str) -> Feature:
    kind: Any = self.kinds[name]
    is_dynamic = getattr(kind, "is_dynamic", False)
    return Feature(
      name,
      kind.capacity if is_dynamic else self._columns[name].vocabulary_size,
      valency=self.widths.get(name, 1),
      combiner=getattr(kind, "combiner", "mean"),
      table=getattr(kind, "table", ""),
      dim=kind.dim,
      optimizer=kind.optimizer,
      history=name if isinstance(kind, spec.Ordered) else "",
      **({"eviction": kind.eviction, "half_life": kind.half_life} if is_dynamic else {}),
    )

  def vocabulary(self, name: str) -> tuple[str, ...]:
    """Returns the values of the first rows of a feature's table; none if it has no vocabulary."""
    return self.vocabularies.get(vocabulary_of(name, self.kinds[name]) or "", ())

  def rest_of_rows(self, name: str) -> str:
    """Returns what the rows after the vocabulary depend on, as in "hash 1000"."""
    kind: Any = self.kinds[name]
    if isinstance(kind, spec.Number):
      return f"buckets {self._columns[name].boundaries}"
    if kind.is_dynamic:
      return f"dynamic {kind.capacity}"
    return "identity" if kind.size else f"hash {kind.hash}" if kind.hash else f"oov {kind.oov}"

  @property
  def _dense(self) -> list[tuple[str, spec.Number]]:
    numbers = [(n, k) for n, k in self.kinds.items() if isinstance(k, spec.Number)]
    return [(name, kind) for name, kind in numbers if name not in self._columns]

  @property
  def dense_names(self) -> tuple[str, ...]:
    """The names of the columns of `dense`."""
    of_vectors = (f"{name} {i}" for name, k in self._vectors.items() for i in range(k.width))
    return (*(name for name, _ in self._dense), *of_vectors)

  @property
  def _vectors(self) -> dict[str, spec.Vector]:
    return {name: kind for name, kind in self.kinds.items() if isinstance(kind, spec.Vector)}

  @property
  def vectors(self) -> dict[str, tuple[int, int]]:
    """The columns of `dense` of each vector, from the first to past the last."""
    places, start = dict[str, tuple[int, int]](), len(self._dense)
    for name, kind in self._vectors.items():
      places[name] = start, (start := start + kind.width)
    return places

  def dense(self, values: Values, rows: int) -> np.ndarray:
    """Returns numbers, standardized as declared, and vectors after them, float32 `[rows, K]`."""
    dense = np.empty((rows, len(self.dense_names)), np.float32)
    for place, (name, kind) in enumerate(self._dense):
      numbers, about = numbers_of(values[name]), self.numbers[name]
      numbers = logarithm(numbers) if kind.log else numbers
      filled = np.where(np.isnan(numbers), about["fill"], numbers)
      dense[:, place] = (filled - about["mean"]) / about["deviation"]
    for name, (start, stop) in self.vectors.items():
      dense[:, start:stop] = stacked(values[name], stop - start)
    return dense

  def ids(self, values: Values, name: str) -> np.ndarray:
    """Returns a feature's ids, int32 `[N]`, or of a bag `[N, valency]`; -1 is no value.

    Of a dynamic vocabulary the halves of raw ids, int32 `[..., 2]`.
    """
    kind, column = self.kinds[name], self._columns[name]
    if isinstance(kind, spec.Number):
      return column.ids(numbers_of(values[name]))
    is_bag = isinstance(kind, spec.Bag)
    ids = self._of_texts(name, values[name].flatten() if is_bag else values[name])
    if not isinstance(kind, spec.Bag):
      return ids
    lengths = lengths_of(values[name])
    stops, kept = np.cumsum(lengths, dtype=np.int64), np.minimum(lengths, self.widths[name])
    return taken(ids, stops - (kept if kind.last else lengths), kept, self.widths[name])

  def _of_texts(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of a category's texts, int32 `[N]`, or halves `[N, 2]`; -1 for null."""
    encoded = texts.dictionary_encode()
    return _with_none(self._of_distinct(name, encoded.dictionary))[indices_of(encoded)]

  def _of_distinct(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of texts, int32 `[N]`, or halves of raw ids `[N, 2]`."""
    kind: Any = self.kinds[name]
    column, known = self._columns[name], self._values.get(vocabulary_of(name, kind) or "")
    if kind.size:
      is_id = lambda t: t.isascii() and t.isdecimal() and len(t) < 19
      numbers = [int(text) if is_id(text) else -1 for text in texts.to_pylist()]
      return column.ids(np.array(numbers, np.int64)).astype(np.int32)
    if kind.is_dynamic:
      return embed.raw_ids(column.ids(np.array(texts.to_pylist(), object))).view(np.int32)
    # Arrow hashes all known values at every call; a transform has a dict of them.
    if known is None or len(known) > _FEW_KNOWN * len(texts):
      return _looked_up(column, texts)
    ids = pc.fill_null(pc.index_in(texts, known), -1).to_numpy(zero_copy_only=False).copy()
    unknown = ids < 0
    if kind.oov == 1:
      ids[unknown] = len(known)
    elif kind.oov:
      ids[unknown] = _looked_up(column, texts.filter(pa.array(unknown)))
    return ids

  def merged(self, other: "Transforms") -> "Transforms":
    """Returns the transforms of both; no name is in both."""
    names = ("kinds", "vocabularies", "numbers", "widths")
    return Transforms(*(getattr(self, name) | getattr(other, name) for name in names))

  def save(self, folder: Path, name: str) -> None:
    """Writes `<name>.json` and `<name>.parquet`, the vocabularies."""
    tables = [table for table, values in self.vocabularies.items() for _ in values]
    values = [value for values in self.vocabularies.values() for value in values]
    columns = {"table": pa.array(tables, pa.string()), "value": pa.array(values, pa.large_string())}
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    about = {"kinds": spec.as_dicts(self.kinds), "tables": list(self.vocabularies)}
    about |= {"numbers": self.numbers, "widths": self.widths}
    files.write_json(folder / f"{name}.json", about)

  @classmethod
  def load(cls, folder: Path, name: str) -> "Transforms":
    """Returns what `save` has written."""
    about = json.loads((folder / f"{name}.json").read_text())
    table = pq.read_table(folder / f"{name}.parquet")
    vocabularies = {
      key: tuple(table.filter(pc.equal(table["table"], key))["value"].to_pylist())
      for key in about["tables"]
    }
    return cls(spec.parse(about["kinds"]), vocabularies, about["numbers"], about["widths"])


def _looked_up(column: Any, texts: pa.Array) -> np.ndarray:
  """Returns the ids of texts by a transform, int32 `[N]`."""
  keys = np.array(texts.to_pylist(), object)
  return column.ids(keys).astype(np.int32) if len(keys) else np.empty(0, np.int32)


def _with_none(ids: np.ndarray) -> np.ndarray:
  """Returns ids int32 `[N, ...]` with those of null behind them."""
  return np.concatenate([ids, np.full_like(ids, -1, shape=(1, *ids.shape[1:]))])


class Codes:
  """Finds the numbers of texts.

  Args:
    texts: in the order of their numbers, each once.
  """

  def __init__(self, texts: Iterable[str]):
    self.texts = list(texts)
    self._codes = {text: code for code, text in enumerate(self.texts)}

  def find(self, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, int32 `[N]`; -1 for null and unknown ones."""
    encoded = texts.dictionary_encode()
    codes = [self._codes.get(text, -1) for text in encoded.dictionary.to_pylist()]
    return np.array([*codes, -1], np.int32)[indices_of(encoded)]


@dataclasses.dataclass(frozen=True)
class Entities:
  """Users or items by number.

  Attributes:
    texts: raw ids.
    transforms: the transforms of the features.
    ids: of each feature, int32 `[entities]` or, of bags, `[entities, valency]`.
    dense: the numbers, float32 `[entities, K]`.
    titles: texts to show, None where no title is declared.
  """

  texts: list[str]
  transforms: Transforms
  ids: Mapping[str, np.ndarray]
  dense: np.ndarray
  titles: list[str | None] | None = None

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features."""
    return self.transforms.features

  @property
  def vectors(self) -> dict[str, np.ndarray]:
    """The vectors by name, float32 `[entities, width]`."""
    return {name: self.dense[:, a:b] for name, (a, b) in self.transforms.vectors.items()}

  @functools.cached_property
  def codes(self) -> Codes:
    """Finds the numbers of raw ids."""
    return Codes(self.texts)

  def of_rows(self, at: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the features' ids and the numbers of entities by number, of -1 as if missing."""
    known = at >= 0
    pick = lambda x: np.where(known.reshape(-1, *[1] * (x.ndim - 1)), x[at], -1).astype(np.int32)
    none = dict.fromkeys(self.transforms.kinds, pa.nulls(1, pa.list_(pa.float32())))
    none |= {name: np.array([np.nan]) for name in self.transforms.numbers}
    dense = np.where(known[:, None], self.dense[at], self.transforms.dense(none, 1))
    return {name: pick(ids) for name, ids in self.ids.items()}, dense.astype(np.float32)

  def numbered(self, texts: list[str]) -> "Entities":
    """Returns the entities of these raw ids in their order; unknown ones have no features."""
    at = self.codes.find(pa.array(texts, pa.string()))
    titles = self.titles and [self.titles[i] if i >= 0 else None for i in at]
    return Entities(texts, self.transforms, *self.of_rows(at), titles)

  def save(self, folder: Path, name: str) -> None:
    """Writes the raw ids and titles to `<name>.parquet`, and the transforms beside them."""
    columns = {"id": pa.array(self.texts, pa.large_string())}
    if self.titles is not None:
      columns["title"] = pa.array(self.titles, pa.large_string())
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    self.transforms.save(folder, f"{name}_features")
    with (folder / f"{name}_features.npz").open("wb") as file:
      stored: dict[str, Any] = {f"ids/{key}": ids for key, ids in self.ids.items()}
      np.savez(file, dense=self.dense, **stored)

  @classmethod
  def load(cls, folder: Path, name: str) -> "Entities":
    """Returns what `save` has written."""
    columns = pq.read_table(folder / f"{name}.parquet").to_pydict()
    with np.load(folder / f"{name}_features.npz") as stored:
      ids = {key.removeprefix("ids/"): stored[key] for key in stored.files if key != "dense"}
      dense = stored["dense"]
    return cls(
      columns["id"], Transforms.load(folder, f"{name}_features"), ids, dense, columns.get("title")
    )


class Encoder:
  """Turns rows into `dense` and `ids`: their own features, and those of their user and item.

  Args:
    transforms: the transforms of the rows' columns.
    sides: users and items of tables of their own by the name of the column with their ids.
    histories: that are built of earlier rows.
  """

  def __init__(
    self, transforms: Transforms, sides: Mapping[str, Entities], histories: Sequence[History] = ()
  ):
    self.transforms, self.sides, self.histories = transforms, dict(sides), tuple(histories)

  @property
  def own_features(self) -> tuple[Feature, ...]:
    """The features of the row itself, in the order of their columns in what `encode` returns."""
    return tuple(feature for each in self.all_transforms for feature in each.features)

  @property
  def vectors(self) -> dict[str, tuple[int, int]]:
    """The columns of `dense` of each vector, from the first to past the last."""
    places, start = dict[str, tuple[int, int]](), 0
    for each in self.all_transforms:
      places |= {name: (start + a, start + b) for name, (a, b) in each.vectors.items()}
      start += len(each.dense_names)
    return places

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features, in the order of their columns in `ids`, histories last."""
    own = {feature.name: feature for feature in self.own_features}
    return (*own.values(), *(f for history in self.histories for f in history.features(own)))

  @property
  def places(self) -> dict[str, slice]:
    """Where the row's own features are in `ids`."""
    widths = [feature.columns for feature in self.own_features]
    ends = np.cumsum(widths).tolist()
    names = [feature.name for feature in self.own_features]
    return {n: slice(end - w, end) for n, end, w in zip(names, ends, widths, strict=True)}

  @property
  def dense_names(self) -> tuple[str, ...]:
    """The names of the columns of `dense`."""
    return tuple(name for each in self.all_transforms for name in each.dense_names)

  @property
  def all_transforms(self) -> tuple[Transforms, ...]:
    """The transforms of the rows' columns, of users and of items."""
    return (self.transforms, *(side.transforms for side in self.sides.values()))

  def encode(self, values: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
    """Returns `dense` float32 `[rows, K]` and `ids` int32 `[rows, W]`, without histories."""
    ids = [self.transforms.ids(values, feature.name) for feature in self.transforms.features]
    dense = [self.transforms.dense(values, rows)]
    for name, side in self.sides.items():
      of_side, numbers = side.of_rows(side.codes.find(values[name]))
      ids += [of_side[feature.name] for feature in side.features]
      dense.append(numbers)
    wide = [block.reshape(rows, math.prod(block.shape[1:])) for block in ids]
    empty = np.empty((rows, 0), np.int32)
    return {"dense": np.concatenate(dense, axis=1), "ids": np.concatenate([empty, *wide], axis=1)}

  def log(self, history: History, values: Values, times: np.ndarray | None) -> Log:
    """Returns the log of M values of each part of a history by the part's name; labels are int."""
    ids_of: dict[str, Callable[[Part], np.ndarray]] = {
      "row": lambda part: self.transforms.ids({part.of: values[part.name]}, part.of),
      "table": lambda part: self._of_table(history, values)[part.of],
      "label": lambda part: values[part.name],
    }
    ids = [ids_of[part.by](part) for part in history.parts if part.by != "time"]
    return Log.joined([x if x.ndim == 2 else x[:, None] for x in ids], times, history.width)

  def _of_table(self, history: History, values: Values) -> Mapping[str, np.ndarray]:
    side = self.sides[history.parts[0].of]
    return side.of_rows(side.codes.find(values[history.name]))[0]

  def save(self, folder: Path) -> None:
    """Writes the transforms and the tables of users and items, for `load`."""
    self.transforms.save(folder, "columns")
    for number, side in enumerate(self.sides.values()):
      side.save(folder, f"side_{number}")
    files.write_json(folder / "sides.json", list(self.sides))
    files.write_json(folder / "histories.json", [*map(dataclasses.asdict, self.histories)])

  @classmethod
  def load(cls, folder: Path) -> "Encoder":
    """Returns what `save` has written."""
    names = files.read_json(folder / "sides.json")
    sides = {name: Entities.load(folder, f"side_{n}") for n, name in enumerate(names)}
    histories = map(History.loaded, files.read_json(folder / "histories.json"))
    return cls(Transforms.load(folder, "columns"), sides, [*histories])
