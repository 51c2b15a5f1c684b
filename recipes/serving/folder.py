"""The folder that `recipes.export` writes: its description, its program, and the arrays of both."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import files
from ..tables import spec
from ..tables.spec import Format

NAME = "served.json"
MODEL = "model.npz"
TRANSFORMS = "transforms"
CANDIDATES = "candidates.npy"


@dataclasses.dataclass(frozen=True)
class Served:
  """An exported model, in memory."""

  transforms: Path  # the folder of transforms, users and items
  about: Mapping[str, Any]
  kinds: Mapping[str, spec.Kind]  # the declared columns of the training rows
  text_format: Format  # of the training rows
  run: Callable[[Any], jax.Array]  # the program, compiled for each new number of rows
  candidates: jax.Array | None  # of the items, float32 `[items, D]`, zeros at the end; None of dlrm
  mesh: Mesh  # that the candidates are split over


def read(folder: str | Path) -> Served:
  """Reads an export; raises MissingFileError for another folder."""
  folder = Path(folder)
  advice = "`python -m recipes.export RUN --out=FOLDER` writes a folder to give here"
  about = files.read_json(files.require(folder, NAME, hint=advice))
  with np.load(folder / MODEL) as file:
    stored = dict(file)
  program = jax.export.deserialize(bytearray(stored.pop("program.bin")))
  mesh = Mesh(np.array(jax.local_devices()), ("data",))
  return Served(
    transforms=folder / TRANSFORMS,
    about=about,
    kinds=spec.parse(about["columns"]),
    text_format=Format(**about["text"]),
    run=functools.partial(jax.jit(program.call), jax.device_put(stored)),
    candidates=_split(folder / CANDIDATES, mesh) if (folder / CANDIDATES).exists() else None,
    mesh=mesh,
  )


def _split(path: Path, mesh: Mesh) -> jax.Array:
  """Returns the rows of a file split over the mesh, zeros at the end; no device holds all."""
  rows = np.load(path)
  padded = np.pad(rows, ((0, -len(rows) % mesh.size), (0, 0)))
  return jax.device_put(padded, NamedSharding(mesh, PartitionSpec("data")))
