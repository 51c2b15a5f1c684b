"""Typed rows to ids and numbers by fitted transforms: the same in training and serving."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embed import transforms

from .. import files
from ..training.features import Feature
from . import spec

Values = Mapping[str, Any]  # by declared name: Arrow arrays of texts, lists and numbers, `[N]`
_VALUES = pa.large_list(pa.large_string())  # of a vocabulary in its file


def numbers_of(values: Any) -> np.ndarray:
  """Returns numbers as float64 `[N]`, NaN where null."""
  return values.cast(pa.float64()).to_numpy(zero_copy_only=False)


def lengths_of(lists: pa.Array) -> np.ndarray:
  """Returns how many items each list has, `[N]`; 0 where null."""
  return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _taken(flat: np.ndarray, first: np.ndarray, kept: np.ndarray, width: int) -> np.ndarray:
  """Returns `kept` values of a flat array from `first` on, `[B, width]`, -1 after."""
  places = np.arange(width)
  index, inside = np.minimum(first[:, None] + places, max(len(flat) - 1, 0)), places < kept[:, None]
  return np.where(inside, flat[index], -1) if len(flat) else np.full(index.shape, -1, np.int32)


def vocabulary_of(name: str, kind: spec.Kind) -> str | None:
  """Returns the name of the vocabulary of a column; None of a column without."""
  if not isinstance(kind, spec.Category) or kind.hash or kind.size:
    return None
  return spec.table_of(name, kind)


def _by_distinct(ids_of: Callable[[pa.Array], np.ndarray], texts: pa.Array) -> np.ndarray:
  """Returns int32 ids `[N]` of texts by a function of distinct ones; -1 for null."""
  encoded = texts.dictionary_encode()
  ids = np.append(ids_of(encoded.dictionary), np.int32(-1))
  return ids[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)]


class Codes:
  """Finds the numbers of texts.

  Args:
    texts: in the order of their numbers, each once.
  """

  def __init__(self, texts: Sequence[str]):
    self._texts = pa.array(texts, pa.string())

  @functools.cached_property
  def _codes(self) -> dict[str, int]:
    return {text: code for code, text in enumerate(self._texts.to_pylist())}

  def of_distinct(self, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, int32 `[N]`; -1 for unknown ones."""
    if 4 * len(texts) > len(self._texts):  # Arrow hashes all of its texts at each call
      return np.array(pc.fill_null(pc.index_in(texts, self._texts), -1))
    return np.array([self._codes.get(text, -1) for text in texts.to_pylist()], np.int32)

  def find(self, texts: pa.Array) -> np.ndarray:
    """Returns as `of_distinct` for texts that repeat; -1 for null too."""
    return _by_distinct(self.of_distinct, texts)


class Transforms:
  """The transforms of declared columns: values to ids and numbers.

  Args:
    kinds: the declared features by name.
    vocabularies: the values of each table that has a vocabulary, the first being id 0.
    numbers: mean, deviation, what a missing value is, and boundaries of numbers by name.
    widths: the most values used of each bag by name.

  Attributes:
    features: the categorical features, in the order of the declaration.
    dense_names: the names of the columns of `dense`.
  """

  def __init__(
    self,
    kinds: Mapping[str, spec.Kind],
    vocabularies: Mapping[str, tuple[str, ...]],
    numbers: Mapping[str, Mapping[str, Any]],
    widths: Mapping[str, int],
  ):
    self.kinds, self.vocabularies = dict(kinds), dict(vocabularies)
    self.numbers, self.widths = dict(numbers), dict(widths)
    self._dense = {
      name: kind
      for name, kind in self.kinds.items()
      if isinstance(kind, spec.Number) and not self.numbers[name]["boundaries"]
    }
    self.features = tuple(
      self._feature(name, kind)
      for name, kind in self.kinds.items()
      if isinstance(kind, spec.Side) and name not in self._dense
    )
    self.dense_names = tuple(self._dense)

  def _feature(self, name: str, kind: Any) -> Feature:
    about = {"optimizer": kind.optimizer}
    if isinstance(kind, spec.Number):
      return Feature(name, len(self.numbers[name]["boundaries"]) + 1, **about)
    about |= {"table": kind.table, "valency": self.widths.get(name, 1)}
    if isinstance(kind, spec.Bag):
      about |= {"combiner": kind.combiner}
    if isinstance(kind, spec.Ordered):
      about |= {"history": kind.table or name}
    counted = len(self.vocabulary(name)) + kind.oov
    return Feature(name, kind.hash or kind.size or counted, **about)

  def vocabulary(self, name: str) -> tuple[str, ...]:
    """Returns the values of the first rows of a feature's table; none if it has no vocabulary."""
    return self.vocabularies.get(vocabulary_of(name, self.kinds[name]) or "", ())

  def row_ids(self) -> dict[str, "RowIds"]:
    """Returns the raw ids of the rows of each table."""
    found = {}
    for feature in self.features:
      name = feature.name
      kind: Any = self.kinds[name]
      if isinstance(kind, spec.Number):
        rest = f"buckets {tuple(self.numbers[name]['boundaries'])}"
      else:
        rest = "identity" if kind.size else f"hash {kind.hash}" if kind.hash else f"oov {kind.oov}"
      found[feature.table or name] = RowIds(self.vocabulary(name), rest)
    return found

  def encode(self, values: Values, rows: int) -> dict[str, np.ndarray]:
    """Returns `dense` float32 `[rows, K]` and `ids` int32 `[rows, W]`, of each feature in turn."""
    ids = [self.ids(values, feature.name) for feature in self.features]
    wide = [block if block.ndim == 2 else block[:, None] for block in ids]
    none = np.empty((rows, 0), np.int32)
    return {"dense": self.dense(values, rows), "ids": np.concatenate([none, *wide], axis=1)}

  def dense(self, values: Values, rows: int) -> np.ndarray:
    """Returns numbers, standardized as declared, float32 `[rows, K]`."""
    dense = np.empty((rows, len(self.dense_names)), np.float32)
    for place, (name, kind) in enumerate(self._dense.items()):
      numbers, about = numbers_of(values[name]), self.numbers[name]
      numbers = np.sign(numbers) * np.log1p(np.abs(numbers)) if kind.log else numbers
      filled = np.where(np.isnan(numbers), about["fill"], numbers)
      dense[:, place] = (filled - about["mean"]) / about["deviation"]
    return dense

  def ids(self, values: Values, name: str) -> np.ndarray:
    """Returns a feature's ids, int32 `[N]`, or of a bag `[N, valency]`; -1 is no value."""
    kind = self.kinds[name]
    if isinstance(kind, spec.Number):
      numbers = numbers_of(values[name])
      buckets = np.searchsorted(self.numbers[name]["boundaries"], numbers, side="right")
      return np.where(np.isnan(numbers), -1, buckets).astype(np.int32)
    if not isinstance(kind, spec.Bag):
      return _by_distinct(functools.partial(self._of_distinct, name), values[name])
    lists, width = values[name], self.widths[name]
    ids = _by_distinct(functools.partial(self._of_distinct, name), lists.flatten())
    lengths = lengths_of(lists)
    stops, kept = np.cumsum(lengths, dtype=np.int64), np.minimum(lengths, width)
    return _taken(ids, stops - (kept if isinstance(kind, spec.Ordered) else lengths), kept, width)

  def _of_distinct(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of texts, int32 `[N]`."""
    kind: Any = self.kinds[name]
    keys = lambda texts: np.array(texts.to_pylist(), object)
    if kind.size:
      is_id = lambda t: t.isascii() and t.isdecimal() and len(t) < 19 and int(t) < kind.size
      return np.array([int(text) if is_id(text) else -1 for text in keys(texts)], np.int32)
    if kind.hash:
      return transforms.HashBucket(kind.hash).ids(keys(texts))
    table = spec.table_of(name, kind)
    ids = self._codes[table].of_distinct(texts)
    if kind.oov:
      unknown = ids < 0
      ids[unknown] = len(self.vocabularies[table])
      if kind.oov > 1:
        rest = keys(texts.filter(pa.array(unknown)))
        ids[unknown] += transforms.HashBucket(kind.oov).ids(rest)
    return ids

  @functools.cached_property
  def _codes(self) -> dict[str, Codes]:
    return {table: Codes(values) for table, values in self.vocabularies.items()}

  def save(self, folder: Path, name: str = "columns") -> None:
    """Writes `<name>.json`, and the vocabularies to `<name>.parquet`."""
    columns = {table: pa.array([each], _VALUES) for table, each in self.vocabularies.items()}
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    about = {"kinds": spec.as_dicts(self.kinds), "numbers": self.numbers, "widths": self.widths}
    files.write_json(folder / f"{name}.json", about)

  @classmethod
  def load(cls, folder: Path, name: str = "columns") -> "Transforms":
    """Returns what `save` has written."""
    about = files.read_json(folder / f"{name}.json")
    table = pq.read_table(folder / f"{name}.parquet")
    vocabularies = {key: tuple(table[key][0].values.to_pylist()) for key in table.column_names}
    return cls(spec.parse(about["kinds"]), vocabularies, about["numbers"], about["widths"])


@dataclasses.dataclass(frozen=True)
class Entities:
  """Users or items by number.

  Attributes:
    texts: raw ids.
    transforms: the transforms of the features.
    ids: of each feature, int32 `[entities]` or, of bags, `[entities, valency]`.
    titles: texts to show, None where no title is declared.
  """

  texts: list[str]
  transforms: Transforms
  ids: Mapping[str, np.ndarray]
  titles: list[str | None] | None = None

  @property
  def by_feature(self) -> dict[Feature, np.ndarray]:
    """The ids by feature."""
    return {feature: self.ids[feature.name] for feature in self.transforms.features}

  @functools.cached_property
  def codes(self) -> Codes:
    """Finds the numbers of raw ids."""
    return Codes(self.texts)

  def save(self, folder: Path, name: str) -> None:
    """Writes files with this name, for `load`."""
    columns: dict[str, Any] = {"id": self.texts} | ({"title": self.titles} if self.titles else {})
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    self.transforms.save(folder, f"{name}_features")
    np.savez(folder / f"{name}_features.npz", *self.by_feature.values())

  @classmethod
  def load(cls, folder: Path, name: str) -> "Entities":
    """Returns what `save` has written."""
    columns = pq.read_table(folder / f"{name}.parquet").to_pydict()
    transforms = Transforms.load(folder, f"{name}_features")
    with np.load(folder / f"{name}_features.npz") as stored:
      ids = stored.values()
      by_name = dict(zip((feature.name for feature in transforms.features), ids, strict=True))
    return cls(columns["id"], transforms, by_name, columns.get("title"))


class RowIds(NamedTuple):
  """The raw ids of a table's first rows, and a name for the rows after them.

  The rows after them correspond to those of another table only if both have the same name and
  number. Rows of "identity" are their own numbers, and correspond in tables of any size.
  """

  texts: Sequence[str]  # raw ids of the rows 0, 1, …
  rest: str = ""  # what the rows after them depend on, such as "hash 1000"


def stored_rows(serve: Path) -> tuple[dict[str, RowIds], list[str]]:
  """Returns the raw ids by table, and what a model reads besides ids, of a run's folder `serve`."""
  if not (serve / "users.parquet").exists():  # dlrm
    transforms = Transforms.load(serve)
    names = (feature.name for feature in transforms.features)
    return transforms.row_ids(), [*names, *transforms.dense_names]
  tables, inputs = dict[str, RowIds](), list[str]()
  for side in ("user", "item"):
    entities = Entities.load(serve, f"{side}s")
    tables[side] = RowIds(entities.texts)
    tables |= {f"{side}_{name}": ids for name, ids in entities.transforms.row_ids().items()}
    inputs += entities.transforms.kinds
  return tables | {"history": tables["item"]}, inputs
