"""Criteo's 1 TB click logs as MLPerf's DLRM-DCNv2 benchmark uses them: 24 days, bags of ids.

The files are `day_0` to `day_23`, unpacked or `.gz`, in the format of `recipes.dlrm.criteo`. Days 0
to 22 train; the first half of day 23 validates and the second tests. The id of a category is its 32
bits modulo the size of its table, and 0 where it is blank. (MLPerf numbers the values of a feature
by first appearance and takes that modulo the size, so its small tables have no collisions.)

Only one id per feature is published. MLPerf draws the other ids of a bag at random, once for each
id of a table, which makes its multi-hot data synthetic; so are these. Here a bag of valency L is

    id, h(1), ..., h(L - 1)    with h(k) = floor(size * u / 2^32)

where u are the upper 32 bits of splitmix64(id + feature * 2^32 + k * 2^40), features counting from
0. One id always has one bag, uniform like MLPerf's, on every machine and without a file. Bags are
made when rows are read: stored, they would take 3.7 TB.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays, files
from ..datasets import Prepared
from ..errors import UserError
from . import criteo

_DAYS = 24
_CHUNK = 512  # rows whose intermediate values stay in the inner caches: four times as fast
_HALF = np.uint64(32)
_HINT = (
  "The days are not downloaded because their licence has to be accepted: get Criteo's 1 TB Click "
  "Logs from Criteo's page and pass --config.data_dir=<folder of day_0 to day_23>, plain or .gz."
)


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  folder = files.data_folder(config.data_dir, _HINT)
  days = [files.require(folder, f"day_{i}", f"day_{i}.gz", hint=_HINT) for i in range(_DAYS)]
  return {
    "format": 1,
    "files": [files.stamp(path) for path in days],
    "features": features(config),
  }


def features(config) -> list[dict[str, Any]]:
  """Returns the 26 features, which are the config's alone and need no data.

  Raises:
    ValueError: the config does not name 26 sizes and valencies.
  """
  sizes, valencies = config.vocabulary_sizes, config.valencies
  if not len(sizes) == len(valencies) == criteo.NUM_CATEGORIES:
    raise UserError(
      f"vocabulary_sizes and valencies must have {criteo.NUM_CATEGORIES} entries each, found "
      f"{len(sizes)} and {len(valencies)}"
    )
  return [
    {"name": f"c{i + 1:02d}", "vocabulary_size": size, "valency": valency, "combiner": "sum"}
    for i, (size, valency) in enumerate(zip(sizes, valencies, strict=True))
  ]


def describe(config) -> Prepared:
  """Returns the columns without rows, and the features: all that a model has to know."""
  columns: dict[str, np.ndarray] = {
    "label": np.zeros(0, np.uint8),
    "dense": np.zeros((0, criteo.NUM_INTEGERS), np.float32),
    "ids": np.zeros((0, criteo.NUM_CATEGORIES), np.int32),
  }
  return view(Prepared(columns, {"splits": {}, "features": features(config), "sha256": {}}))


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; `dense` as for Criteo Kaggle, `ids` the 26 single ids."""
  paths = [Path(stamp[0]) for stamp in settings["files"]]
  days = _survey(paths, folder)
  sizes = np.array([feature["vocabulary_size"] for feature in settings["features"]])
  sources = [(path, day["rows"]) for path, day in zip(paths, days, strict=True)]
  criteo.write(
    folder, sources, lambda categories: (np.maximum(categories, 0) % sizes).astype(np.int32)
  )
  total = sum(day["rows"] for day in days)
  last = days[-1]["rows"]
  train, valid = total - last, total - last // 2  # the odd row validates, as in MLPerf
  return {
    "splits": {"train": (0, train), "valid": (train, valid), "test": (valid, total)},
    "features": settings["features"],
    "sha256": {path.name: day["sha256"] for path, day in zip(paths, days, strict=True)},
  }


def _survey(paths: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
  """Returns rows and hash of every file, saved file by file: reading them all takes hours."""
  saved = folder / "days.json"
  days = arrays.read_json(saved) if saved.exists() else []
  with files.progress("counting rows", len(paths), "file") as bar:
    bar.update(len(days))
    for path in paths[len(days) :]:
      days.append({"rows": criteo.count_rows(path), "sha256": files.digest(path)})
      arrays.write_json(saved, days)
      bar.update()
  return days


def view(prepared: Prepared) -> Prepared:
  """Returns the data set with `ids` as bags, which are made when rows are read."""
  columns = BagColumns(prepared.columns, prepared.meta["features"])
  return dataclasses.replace(prepared, columns=columns)


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
      mixed = criteo.splitmix64(ids[:, feature, None].astype(np.uint64) + drawn)
      bags[:, column + 1 : column + valency] = (mixed >> _HALF) * np.uint64(size) >> _HALF
      column += valency
