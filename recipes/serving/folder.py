"""The folder that `recipes.export` writes: its description, its program, and the arrays of both."""

import dataclasses
import functools
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import arrays, files
from ..errors import DamagedFileError, MissingFileError, UserError
from ..tables import spec
from ..tables.formats import Format

PACKAGE = __package__.rpartition(".")[0]
FORMAT = 2  # 1: the program of dlrm returned probabilities, in float32
NAME = "served.json"
TRANSFORMS = "transforms"
CANDIDATES = "candidates.npy"
_SCHEMA = {
  "format": int, "recipe": str, "step": int, "columns": {str: dict}, "text": dict, "ann": bool,
  "exclude_seen": bool,
}  # fmt: skip
_SMALLEST = 16  # rows of the smallest batch: powers of two, since each size is compiled


def float32(rows: jax.Array) -> jax.Array:
  """Returns a table of `embed.export` as float32; it stores bfloat16 as uint16 of the same bits.

  >>> float32(jax.numpy.array([0x3F80, 0xC000], jax.numpy.uint16)).tolist()
  [1.0, -2.0]
  """
  if rows.dtype == np.uint16:
    rows = jax.lax.bitcast_convert_type(rows, jax.numpy.bfloat16)
  return rows.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Served:
  """An exported model.

  Attributes:
    folder: that holds it.
    about: the content of served.json.
    manifest: of its files when it was opened.
  """

  folder: Path
  about: Mapping[str, Any]
  manifest: Mapping[str, Any]

  @classmethod
  def open(cls, folder: str | Path) -> "Served":
    """Opens a folder of `recipes.export`, all files of which are as they were written.

    Raises:
      UserError: it is none, or of another version; or a file is missing, changed, or of another
        export, and is named.
    """
    path = files.latest(Path(folder)) / NAME
    if not os.path.lexists(path):
      raise MissingFileError(_advice(path.parent))
    try:
      content = arrays.check_manifest(path.parent)
      about = arrays.read_json(path, schema=_SCHEMA)
    except UserError as error:
      raise type(error)(f"{error}: export the run again") from error
    if about.get("format") != FORMAT:
      raise UserError(f"{path} is of another version of recipes: export the run again")
    return cls(path.parent, about, content)

  def check_unchanged(self) -> None:
    """Raises UserError if another export has replaced the folder since it was opened."""
    if arrays.read_manifest(self.folder) != self.manifest:
      raise UserError(f"another export has replaced {self.folder} meanwhile: load it again")

  @property
  def recipe(self) -> str:
    """The recipe that has trained the model."""
    return self.about["recipe"]

  @property
  def transforms(self) -> Path:
    """The folder of transforms, users and items."""
    return self.folder / TRANSFORMS

  @functools.cached_property
  def kinds(self) -> dict[str, spec.Kind]:
    """The declared columns of the training rows."""
    return spec.parse(self.about["columns"])

  @functools.cached_property
  def text_format(self) -> Format:
    """The format of the training rows, where they were text."""
    values: dict[str, Any] = dict(self.about["text"])
    values |= {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
    return Format(**values)

  @functools.cached_property
  def arrays(self) -> dict[str, jax.Array]:
    """The arrays of the program, on the device.

    Raises:
      UserError: the file is damaged or missing, or of another export.
    """
    path = self.folder / "arrays.npz"
    try:
      with np.load(path) as stored:
        read = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
      raise _damaged(path, error) from error
    self.check_unchanged()
    return jax.device_put(read)

  @functools.cached_property
  def candidates(self) -> jax.Array:
    """The vectors of the items, float32 `[items, D]`, on the device."""
    name = self.about["candidates"]
    if name != CANDIDATES:
      return float32(self.arrays[name])
    try:
      candidates = np.load(self.folder / name)
    except (OSError, ValueError, EOFError) as error:
      raise _damaged(self.folder / name, error) from error
    self.check_unchanged()
    return jax.device_put(candidates)

  @functools.cached_property
  def _call(self) -> Any:
    path = self.folder / "program.bin"
    try:
      program = jax.export.deserialize(bytearray(path.read_bytes()))
    except Exception as error:  # flatbuffers names no exceptions of its own
      raise _damaged(path, error) from error
    self.check_unchanged()
    return jax.jit(program.call)

  def run(self, inputs: Any) -> jax.Array:
    """Runs the program on inputs of as many rows as `batches` gives them."""
    return self._call(self.arrays, inputs)


def _advice(folder: Path) -> str:
  """Returns what to do with a folder that is no export."""
  exports = [*folder.glob(f"*/{NAME}"), *folder.glob(f"*/*/{NAME}")]  # also of `recipes.days`
  if exports:
    newest = max(exports, key=lambda path: path.stat().st_mtime)
    return f"{folder} has no {NAME}, but {newest.parent} has one: give that folder"
  is_run = (folder / "config.json").exists()
  out = folder / "served" if is_run or (folder.is_dir() and any(folder.iterdir())) else folder
  command = f"python -m {PACKAGE}.export {folder if is_run else 'RUN'} --out={out}"
  return f"{folder} has no {NAME}: `{command}` writes {out}, which predictions take"


def _damaged(path: Path, error: Exception) -> DamagedFileError:
  reason = str(error).partition("\n")[0] or type(error).__name__
  return DamagedFileError(f"{path} is missing or damaged ({reason}): export the run again")


def batches(rows: int, largest: int) -> Iterator[tuple[slice, np.ndarray]]:
  """Cuts rows into batches of few sizes.

  Yields:
    A range of rows, and the indices of a batch within the range, filled up by its last row.
  """
  for start in range(0, rows, largest):
    count = min(largest, rows - start)
    size = _SMALLEST
    while size < count:
      size *= 2
    yield slice(start, start + count), np.minimum(np.arange(min(size, largest)), count - 1)
