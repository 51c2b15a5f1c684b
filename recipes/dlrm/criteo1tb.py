"""Criteo's 1 TB click logs as MLPerf's DLRM-DCNv2 benchmark uses them: 24 days, bags of ids.

Only one id per feature is published. MLPerf draws the other ids of a bag at random, once for each
id of a table, which makes its multi-hot data synthetic; so are these. Here a bag of valency L is

    id, h(1), ..., h(L - 1)    with h(k) = floor(size * u / 2^32)

where u are the upper 32 bits of splitmix64(id + feature * 2^32 + k * 2^40), features counting from
0. One id always has one bag, uniform like MLPerf's, on every machine and without a file. Bags are
made when rows are read: stored, they would take 3.7 TB.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import files
from ..cache import Prepared
from ..errors import UserError

INTEGERS = tuple(f"i{i + 1:02d}" for i in range(13))
CATEGORIES = tuple(f"c{i + 1:02d}" for i in range(26))
# A row is a label, integers and hexadecimal categories, which may be blank.
FORMAT: dict[str, Any] = {
  "delimiter": "\t",
  "names": ("label", *INTEGERS, *CATEGORIES),
  "quote": "",
}
NUMBER = {"kind": "number", "log": True, "standardize": False}
_DAYS = 24
_CHUNK = 512  # rows whose intermediate values stay in the inner caches: four times as fast
_HALF = np.uint64(32)
_HINT = (
  "The days are not downloaded because their licence has to be accepted: get Criteo's 1 TB Click "
  "Logs from Criteo's page and pass --config.data_dir=<folder of day_0 to day_23>, plain or .gz."
)


def table(config) -> dict[str, Any]:
  """Returns the declaration of the days: the last rows validate, and those after them test.

  Raises:
    MissingFileError: a day is missing; names it.
    UserError: the config does not name 26 sizes and valencies.
  """
  days = [
    files.require(config.data_dir, f"day_{i}", f"day_{i}.gz", hint=_HINT) for i in range(_DAYS)
  ]
  columns: dict[str, Any] = {"label": "label", **dict.fromkeys(INTEGERS, NUMBER)}
  for feature in _features(config):
    columns[feature["name"]] = {"kind": "category", "hash": feature["vocabulary_size"]}
  return {
    "files": days,
    "format": FORMAT,
    "columns": columns,
    "split": {"by": "order", "valid": config.valid_fraction, "test": config.test_fraction},
  }


def _features(config) -> list[dict[str, Any]]:
  sizes, valencies = config.vocabulary_sizes, config.valencies
  if not len(sizes) == len(valencies) == len(CATEGORIES):
    raise UserError(
      f"vocabulary_sizes and valencies must have {len(CATEGORIES)} entries each, found "
      f"{len(sizes)} and {len(valencies)}"
    )
  return [
    {"name": name, "vocabulary_size": size, "valency": valency, "combiner": "sum"}
    for name, size, valency in zip(CATEGORIES, sizes, valencies, strict=True)
  ]


def describe(config) -> Prepared:
  """Returns the columns without rows, and the features: all that a model has to know."""
  columns: dict[str, np.ndarray] = {
    "label": np.zeros(0, np.uint8),
    "dense": np.zeros((0, len(INTEGERS)), np.float32),
    "ids": np.zeros((0, len(CATEGORIES)), np.int32),
  }
  return view(Prepared(columns, {"splits": {}, "sha256": {}}), config)


def view(prepared: Prepared, config) -> Prepared:
  """Returns the data set with `ids` as bags, which are made when rows are read."""
  features = _features(config)
  columns = BagColumns(prepared.columns, features)
  meta = {**prepared.meta, "features": features}
  return dataclasses.replace(prepared, columns=columns, meta=meta)


def splitmix64(x: np.ndarray) -> np.ndarray:
  """Mixes the bits of uint64s: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
  generators", the mixing function."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


class BagColumns(Mapping[str, Any]):
  """The stored columns, of which `ids` are seen as `Bags`."""

  def __init__(self, columns: Mapping[str, np.ndarray], features: Sequence[Mapping[str, Any]]):
    self._columns = columns
    self._sizes = [feature["vocabulary_size"] for feature in features]
    self._valencies = [feature["valency"] for feature in features]

  def __getitem__(self, name: str) -> Any:
    column = self._columns[name]
    return Bags(column, self._sizes, self._valencies) if name == "ids" else column

  def __iter__(self) -> Iterator[str]:
    return iter(self._columns)

  def __len__(self) -> int:
    return len(self._columns)


class Bags:
  """Single ids `[N, 26]` seen as bags, int32 `[N, sum(valencies)]`; indexing makes them."""

  def __init__(self, ids: np.ndarray, sizes: Sequence[int], valencies: Sequence[int]):
    self._ids, self._sizes, self._valencies = ids, sizes, valencies
    self.shape, self.dtype = (len(ids), sum(valencies)), np.dtype(np.int32)

  def __len__(self) -> int:
    return len(self._ids)

  def __getitem__(self, rows: Any) -> np.ndarray:
    ids = self._ids[rows]
    bags = np.empty((len(ids), self.shape[1]), np.int32)
    for start in range(0, len(ids), _CHUNK):
      self._make(ids[start : start + _CHUNK], bags[start : start + _CHUNK])
    return bags

  def _make(self, ids: np.ndarray, bags: np.ndarray) -> None:
    column = 0
    for feature, (size, valency) in enumerate(zip(self._sizes, self._valencies, strict=True)):
      bags[:, column] = ids[:, feature]
      drawn = (np.arange(1, valency, dtype=np.uint64) << np.uint64(40)) + np.uint64(feature << 32)
      mixed = splitmix64(ids[:, feature, None].astype(np.uint64) + drawn)
      of_bag = bags[:, column + 1 : column + valency]
      of_bag[:] = (mixed >> _HALF) * np.uint64(size) >> _HALF
      of_bag[ids[:, feature] < 0] = -1  # a blank category has no vector
      column += valency
