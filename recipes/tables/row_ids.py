"""The raw ids of a run's table rows, by which another run finds the rows that it starts from."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from .settings import READING
from .transforms import Encoder, Entities, Transforms


@dataclasses.dataclass(frozen=True)
class RowIds:
  """The raw ids of a table's first rows, and a name for the rows after them.

  The rows after them correspond to those of another table only if both have the same name and
  number. Rows of "identity" are their own numbers, and correspond in tables of any size.
  """

  texts: tuple[str, ...]  # raw ids of the rows 0, 1, …
  rest: str = ""  # what the rows after them depend on, such as "hash 1000"


def read(serve: Path) -> dict[str, RowIds]:
  """Returns the raw ids of the tables by name that a run keeps in its folder `serve`."""
  if (serve / "users.parquet").exists():  # two_tower and sequence
    tables = {}
    for side in ("user", "item"):
      entities = Entities.load(serve, f"{side}s")
      tables[side] = RowIds(tuple(entities.texts))
      tables |= {f"{side}_{name}": ids for name, ids in _of(entities.transforms).items()}
    return tables | {"history": tables["item"]}
  encoder = Encoder.load(serve)
  return {name: ids for each in encoder.all_transforms for name, ids in _of(each).items()}


def inputs(serve: Path) -> list[str]:
  """Returns the names of what a model reads besides users and items, in their order."""
  if (serve / "users.parquet").exists():
    sides = (Entities.load(serve, f"{side}s") for side in ("user", "item"))
    return [name for side in sides for name in side.transforms.kinds]
  encoder = Encoder.load(serve)
  return [*(feature.name for feature in encoder.features), *encoder.dense_names]


def digest(serve: Path) -> str:
  """Returns a hash of the fitted transforms: raw ids by row, numbers, and declarations."""
  paths = sorted(path for path in serve.glob("*.json") if path.name != READING)
  content = [path.read_text() for path in paths], sorted(read(serve).items(), key=str)
  return hashlib.sha256(repr(content).encode()).hexdigest()


def _of(transforms: Transforms) -> dict[str, RowIds]:
  return {
    feature.table or feature.name: RowIds(
      transforms.vocabulary(feature.name), transforms.rest_of_rows(feature.name)
    )
    for feature in transforms.features
  }


def correspondence(old: RowIds, old_size: int, new: RowIds, new_size: int) -> np.ndarray:
  """Returns the old row of each new row, int32 `[new_size]`; -1 for rows that have none.

  >>> correspondence(RowIds(("b", "a"), "oov 1"), 3, RowIds(("a", "c", "b"), "oov 1"), 4).tolist()
  [1, -1, 0, 2]
  """
  rows = np.full(new_size, -1, np.int32)
  at = {text: row for row, text in enumerate(old.texts)}
  rows[: len(new.texts)] = [at.get(text, -1) for text in new.texts]
  old_rest, new_rest = old_size - len(old.texts), new_size - len(new.texts)
  count = min(old_rest, new_rest)
  if old.rest == new.rest and (old_rest == new_rest or new.rest == "identity"):
    rows[len(new.texts) : len(new.texts) + count] = np.arange(count) + len(old.texts)
  return rows
