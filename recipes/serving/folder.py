"""The folder that `recipes.export` writes: its description, its program, and the arrays of both."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import files
from ..errors import MissingFileError, UserError
from ..tables import spec
from ..tables.spec import Format

PACKAGE = __package__.rpartition(".")[0]
FORMAT = 2  # 1: the program of dlrm returned probabilities, in float32
NAME = "served.json"
MODEL = "model.npz"
TRANSFORMS = "transforms"
CANDIDATES = "candidates.npy"


@dataclasses.dataclass(frozen=True)
class Served:
  """An exported model, in memory.

  Attributes:
    transforms: the folder of transforms, users and items.
    kinds: the declared columns of the training rows.
    text_format: of the training rows, where they were text.
    arrays: of the program, on one device.
    program: the compiled `(arrays, inputs) -> array`.
    candidates: the vectors of the items, float32 `[items, D]`, with zeros at the end so that the
      devices' parts are equally large; None of dlrm.
    mesh: the devices that the candidates are split over; None for one.
  """

  transforms: Path
  about: Mapping[str, Any]
  kinds: Mapping[str, spec.Kind]
  text_format: Format
  arrays: Mapping[str, jax.Array]
  program: Callable[[Any, Any], jax.Array]
  candidates: jax.Array | None
  mesh: Mesh | None

  def run(self, inputs: Any) -> jax.Array:
    """Runs the program on inputs of some rows; compiles it for each new number of them."""
    return self.program(self.arrays, inputs)


def read(folder: str | Path) -> Served:
  """Reads an export.

  Raises:
    UserError: the folder is no export, or of another version; says what to do.
  """
  path = Path(folder) / NAME
  if not path.exists():
    raise MissingFileError(_advice(path.parent))
  about = files.read_json(path)
  if about.get("format") != FORMAT:
    raise UserError(f"{path} is of another version of recipes: export the run again")
  return _read(path.parent, about)


def _read(folder: Path, about: dict[str, Any]) -> Served:
  text: dict[str, Any] = about["text"]
  with np.load(folder / MODEL) as file:
    stored = dict(file)
  name = about.get("candidates")
  program = jax.export.deserialize(bytearray(stored.pop("program.bin")))
  read = jax.device_put(stored)
  devices = jax.local_devices()
  mesh = Mesh(np.array(devices), ("data",)) if len(devices) > 1 else None
  return Served(
    transforms=folder / TRANSFORMS,
    about=about,
    kinds=spec.parse(about["columns"]),
    text_format=Format(**text),
    arrays=read,
    program=jax.jit(program.call),
    candidates=None if name is None else split(candidates(folder, name, read), mesh),
    mesh=mesh,
  )


def candidates(folder: Path, name: str, read: Mapping[str, Any]) -> np.ndarray | jax.Array:
  """Returns the vectors of an export's items: a file, or one of the program's arrays by name."""
  return np.load(folder / name) if name == CANDIDATES else float32(read[name])


def split(rows: np.ndarray | jax.Array, mesh: Mesh | None) -> jax.Array:
  """Returns rows split over the mesh, zeros at the end; without a mesh, rows on the device."""
  if mesh is None:
    return jax.device_put(rows)
  # On the host, so that no device has to hold all rows of a file.
  padded = np.pad(np.asarray(rows), ((0, -len(rows) % mesh.size), (0, 0)))
  return jax.device_put(padded, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def float32(rows: jax.Array) -> jax.Array:
  """Returns a table of `embed.export` as float32; it stores bfloat16 as uint16 of the same bits.

  >>> float32(jax.numpy.array([0x3F80, 0xC000], jax.numpy.uint16)).tolist()
  [1.0, -2.0]
  """
  if rows.dtype == np.uint16:
    rows = jax.lax.bitcast_convert_type(rows, jax.numpy.bfloat16)
  return rows.astype(np.float32)


def _advice(folder: Path) -> str:
  """Returns what to do with a folder that is no export."""
  exports = [*folder.glob(f"*/{NAME}"), *folder.glob(f"*/*/{NAME}")]
  if exports:
    newest = max(exports, key=lambda path: path.stat().st_mtime)
    return f"{folder} has no {NAME}, but {newest.parent} has one: give that folder"
  is_run = (folder / "config.json").exists()
  out = folder / "served" if is_run or (folder.is_dir() and any(folder.iterdir())) else folder
  command = f"python -m {PACKAGE}.export {folder if is_run else 'RUN'} --out={out}"
  return f"{folder} has no {NAME}: `{command}` writes {out}, which predictions take"
