"""The raw ids of a run's table rows, by which another run finds the rows that it starts from."""

from pathlib import Path

from ..warm_start import RowIds
from .transforms import Encoder, Entities, Transforms


def read(serve: Path) -> dict[str, RowIds]:
  """Returns the raw ids of the tables by name that a run keeps in its folder `serve`."""
  if (serve / "users.parquet").exists():  # two_tower and sequence
    tables = {}
    for side in ("user", "item"):
      entities = Entities.load(serve, f"{side}s")
      tables[side] = RowIds(tuple(entities.texts))
      tables |= {f"{side}_{name}": ids for name, ids in _of(entities.transforms).items()}
    return tables | {"history": tables["item"]}
  return _of(Encoder.load(serve).transforms)


def inputs(serve: Path) -> list[str]:
  """Returns the names of what a model reads besides users and items, in their order."""
  if (serve / "users.parquet").exists():
    sides = (Entities.load(serve, f"{side}s") for side in ("user", "item"))
    return [name for side in sides for name in side.transforms.kinds]
  encoder = Encoder.load(serve)
  return [*(feature.name for feature in encoder.features), *encoder.transforms.dense_names]


def _of(transforms: Transforms) -> dict[str, RowIds]:
  return {
    feature.table or feature.name: RowIds(
      transforms.vocabulary(feature.name), transforms.rest_of_rows(feature.name)
    )
    for feature in transforms.features
  }
