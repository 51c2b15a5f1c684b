"""Raw rows to ids and numbers by fitted transforms: all that predictions need of a table."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import arrays, files
from ..training.features import Feature
from .fitting import Fitted
from .values import indices_of, spelled, spelling_of


class Codes:
  """Finds the numbers of texts.

  Args:
    texts: in the order of their numbers, each once.
  """

  def __init__(self, texts: Iterable[str]):
    self.texts = list(texts)
    self._codes = {text: code for code, text in enumerate(self.texts)}
    self._spelling = "whole" if spelling_of(pa.array(self.texts, pa.string())) else ""

  def find(self, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, int32 `[N]`; -1 for null and unknown ones.

    An id with ".0" is the one without where no text has the ending.
    """
    encoded = spelled(texts.dictionary_encode(), self._spelling)
    codes = [self._codes.get(text, -1) for text in encoded.dictionary.to_pylist()]
    return np.array([*codes, -1], np.int32)[indices_of(encoded)]


@dataclasses.dataclass(frozen=True)
class Entities:
  """Users or items by number.

  Attributes:
    texts: raw ids.
    fitted: the transforms of the features.
    ids: of each feature, int32 `[entities]` or, of bags, `[entities, valency]`.
    dense: the numbers, float32 `[entities, K]`.
    titles: texts to show, None where no title is declared.
  """

  texts: list[str]
  fitted: Fitted
  ids: Mapping[str, np.ndarray]
  dense: np.ndarray
  titles: list[str | None] | None = None

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features."""
    return self.fitted.features

  @functools.cached_property
  def codes(self) -> Codes:
    """Finds the numbers of raw ids."""
    return Codes(self.texts)

  def of_rows(self, at: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the features' ids and the numbers of entities by number, of -1 as if missing."""
    known = at >= 0
    pick = lambda x: np.where(known.reshape(-1, *[1] * (x.ndim - 1)), x[at], -1).astype(np.int32)
    none = {name: np.array([np.nan]) for name in self.fitted.numbers}
    dense = np.where(known[:, None], self.dense[at], self.fitted.dense(none, 1))
    return {name: pick(ids) for name, ids in self.ids.items()}, dense.astype(np.float32)

  def numbered(self, texts: list[str]) -> "Entities":
    """Returns the entities of these raw ids in their order; unknown ones have no features."""
    at = self.codes.find(pa.array(texts, pa.string()))
    titles = self.titles and [self.titles[i] if i >= 0 else None for i in at]
    return Entities(texts, self.fitted, *self.of_rows(at), titles)

  def save(self, folder: Path, name: str) -> None:
    """Writes the raw ids and titles to `<name>.parquet`, and the transforms beside them."""
    columns = {"id": pa.array(self.texts, pa.large_string())}
    if self.titles is not None:
      columns["title"] = pa.array(self.titles, pa.large_string())
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    self.fitted.save(folder, f"{name}_features")
    with files.replacing(folder / f"{name}_features.npz") as file:
      stored: dict[str, Any] = {f"ids/{key}": ids for key, ids in self.ids.items()}
      np.savez(file, dense=self.dense, **stored)

  @classmethod
  def load(cls, folder: Path, name: str) -> "Entities":
    """Returns what `save` has written."""
    columns = pq.read_table(folder / f"{name}.parquet").to_pydict()
    with np.load(folder / f"{name}_features.npz") as stored:
      ids = {key.removeprefix("ids/"): stored[key] for key in stored.files if key != "dense"}
      dense = stored["dense"]
    fitted = Fitted.load(folder, f"{name}_features")
    return cls(columns["id"], fitted, ids, dense, columns.get("title"))


class Encoder:
  """Turns rows into `dense` and `ids`: their own features, and those of their user and item.

  Args:
    fitted: the transforms of the rows' columns.
    sides: users and items of tables of their own by the name of the column with their ids.

  Attributes:
    fitted, sides: the same.
  """

  def __init__(self, fitted: Fitted, sides: Mapping[str, Entities]):
    self.fitted, self.sides = fitted, dict(sides)

  @property
  def features(self):
    """The categorical features, in the order of their columns in `ids`."""
    return tuple(feature for fitted in self.all_fitted for feature in fitted.features)

  @property
  def dense_names(self) -> tuple[str, ...]:
    """The names of the columns of `dense`."""
    return tuple(name for fitted in self.all_fitted for name in fitted.dense_names)

  @property
  def all_fitted(self) -> tuple[Fitted, ...]:
    """The transforms of the rows' columns, of users and of items."""
    return (self.fitted, *(side.fitted for side in self.sides.values()))

  def encode(self, values: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
    """Returns `dense` float32 `[rows, K]` and `ids` int32 `[rows, W]`."""
    ids = [self.fitted.ids(values, feature.name) for feature in self.fitted.features]
    dense = [self.fitted.dense(values, rows)]
    for name, side in self.sides.items():
      of_side, numbers = side.of_rows(side.codes.find(values[name]))
      ids += [of_side[feature.name] for feature in side.features]
      dense.append(numbers)
    wide = [block.reshape(rows, math.prod(block.shape[1:])) for block in ids]
    empty = np.empty((rows, 0), np.int32)
    return {"dense": np.concatenate(dense, axis=1), "ids": np.concatenate([empty, *wide], axis=1)}

  def save(self, folder: Path) -> None:
    """Writes the transforms and the tables of users and items, for `load`."""
    self.fitted.save(folder, "columns")
    for number, side in enumerate(self.sides.values()):
      side.save(folder, f"side_{number}")
    arrays.write_json(folder / "sides.json", list(self.sides))

  @classmethod
  def load(cls, folder: Path) -> "Encoder":
    """Returns what `save` has written."""
    names = arrays.read_json(folder / "sides.json")
    sides = {name: Entities.load(folder, f"side_{n}") for n, name in enumerate(names)}
    return cls(Fitted.load(folder, "columns"), sides)
