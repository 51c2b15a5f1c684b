"""Published click data sets, declared as tables; see `recipes.tables.settings`.

Criteo's logs are 13 integers and 26 categories a row. Of the 1 TB set, 24 days, MLPerf's DLRM-DCNv2
benchmark makes bags of ids. Only one id per feature is published, and MLPerf draws the others at
random, once for each id of a table, which makes its multi-hot data synthetic; so are these. Here a
bag of valency L is

    id, h(1), ..., h(L - 1)    with h(k) = floor(size * u / 2^32)

where u are the upper 32 bits of splitmix64(id + feature * 2^32 + k * 2^40), features counting from
0. One id always has one bag, uniform like MLPerf's, on every machine and without a file. Bags are
made when rows are read: stored, they would take 3.7 TB.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import files, movielens
from ..cache import Prepared
from ..errors import UserError

_INTEGERS = tuple(f"i{i + 1:02d}" for i in range(13))
_CATEGORIES = tuple(f"c{i + 1:02d}" for i in range(26))
_DAYS = 24
_CHUNK = 512  # rows whose intermediate values stay in the inner caches: four times as fast
_HALF = np.uint64(32)
_KAGGLE = (
  "It is not downloaded because its licence has to be accepted: get the Criteo Display Advertising "
  "Challenge from Criteo's or Kaggle's page, unpack train.txt, and pass --config.data_dir=<folder> "
  "(and --config.data_file=<name> where the file is called otherwise)."
)
_TERABYTE = (
  "The days are not downloaded because their licence has to be accepted: get Criteo's 1 TB Click "
  "Logs from Criteo's page and pass --config.data_dir=<folder of day_0 to day_23>, plain or .gz."
)


def movielens1m(config) -> dict[str, Any]:
  """Returns MovieLens 1M as clicks, by RecBole's protocol for context-aware models, as a table.

  Ratings of 3 are dropped and 4 or more is a click: 739,012 rows, 78 % of them clicks, of a user
  with gender, age and occupation on a movie with year and genres, split at random 80/10/10.
  """
  rating = {"kind": "label", "at_least": 4, "drop": ("3",)}
  return movielens.table(config, rating) | {"split": {"by": "hash", "seed": config.split_seed}}


def criteo(config) -> dict[str, Any]:
  """Returns the declaration of Criteo's display advertising logs of the Kaggle challenge of 2014.

  Raises:
    MissingFileError: the file is missing; says where it comes from.
  """
  path = files.require(config.data_dir, config.data_file, hint=_KAGGLE)
  return _criteo(config, path, {name: {"min_count": config.min_count} for name in _CATEGORIES})


def criteo_1tb(config) -> dict[str, Any]:
  """Returns the declaration of Criteo's 24 days, with one id for each feature.

  Raises:
    MissingFileError: a day is missing; names it.
    UserError: the config does not name 26 sizes and valencies.
  """
  days = [
    files.require(config.data_dir, f"day_{i}", f"day_{i}.gz", hint=_TERABYTE) for i in range(_DAYS)
  ]
  sizes = {each["name"]: {"hash": each["vocabulary_size"]} for each in _features(config)}
  return _criteo(config, days, sizes)


def _criteo(config, paths: Any, categories: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Returns a declaration in the order of time: the last rows validate, and those after test.

  A row is a label, integers and hexadecimal categories, which may be blank.
  """
  number = {"kind": "number", "log": True, "standardize": False}
  of_categories = {name: {"kind": "category", **options} for name, options in categories.items()}
  return {
    "files": paths,
    "format": {"delimiter": "\t", "names": ("label", *_INTEGERS, *_CATEGORIES), "quote": ""},
    "columns": {"label": "label", **dict.fromkeys(_INTEGERS, number), **of_categories},
    "split": {"by": "order", "valid": config.valid_fraction, "test": config.test_fraction},
  }


# --- bags of Criteo 1 TB --------------------------------------------------------------------------


def _features(config) -> list[dict[str, Any]]:
  sizes, valencies = config.vocabulary_sizes, config.valencies
  if not len(sizes) == len(valencies) == len(_CATEGORIES):
    raise UserError(
      f"vocabulary_sizes and valencies must have {len(_CATEGORIES)} entries each, found "
      f"{len(sizes)} and {len(valencies)}"
    )
  return [
    {"name": name, "vocabulary_size": size, "valency": valency, "combiner": "sum"}
    for name, size, valency in zip(_CATEGORIES, sizes, valencies, strict=True)
  ]


def describe_bags(config) -> Prepared:
  """Returns the columns without rows, and the features: all that a model has to know."""
  columns: dict[str, np.ndarray] = {
    "label": np.zeros(0, np.uint8),
    "dense": np.zeros((0, len(_INTEGERS)), np.float32),
    "ids": np.zeros((0, len(_CATEGORIES)), np.int32),
  }
  return with_bags(Prepared(columns, {"splits": {}, "sha256": {}}), config)


def with_bags(prepared: Prepared, config) -> Prepared:
  """Returns the data set with `ids` as bags, which are made when rows are read."""
  meta = {**prepared.meta, "features": _features(config)}
  bags = tuple(zip(config.vocabulary_sizes, config.valencies, strict=True))
  columns = {**prepared.columns, "ids": Bags(prepared.columns["ids"], bags)}
  return dataclasses.replace(prepared, columns=columns, meta=meta)


def splitmix64(x: np.ndarray) -> np.ndarray:
  """Mixes the bits of uint64s: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
  generators", the mixing function."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


class Bags:
  """Single ids `[N, F]` seen as bags, int32 `[N, sum of valencies]`; indexing makes them."""

  def __init__(self, ids: Any, bags: Sequence[tuple[int, int]]):
    self._ids, self._bags = ids, bags
    self.shape, self.dtype = (len(ids), sum(valency for _, valency in bags)), np.dtype(np.int32)

  def __len__(self) -> int:
    return len(self._ids)

  def __getitem__(self, rows: Any) -> np.ndarray:
    ids = self._ids[rows]
    made = np.empty((len(ids), self.shape[1]), np.int32)
    for start in range(0, len(ids), _CHUNK):
      chunk, column = ids[start : start + _CHUNK], 0
      for feature, (size, valency) in enumerate(self._bags):
        of_bag = made[start : start + _CHUNK, column : (column := column + valency)]
        id, places = chunk[:, feature, None], np.arange(1, valency, dtype=np.uint64)
        mixed = splitmix64(
          id.astype(np.uint64) + (places << np.uint64(40)) + np.uint64(feature << 32)
        )
        of_bag[:, :1], of_bag[:, 1:] = id, (mixed >> _HALF) * np.uint64(size) >> _HALF
        of_bag[id[:, 0] < 0] = -1  # a blank category has no vector
    return made
