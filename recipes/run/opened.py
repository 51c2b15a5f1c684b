"""A run that has ended, opened from its workdir: its config, data, model and tested state."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

import embed.checkpoint

from .. import arrays, hosts
from ..errors import DamagedFileError, MissingFileError, UserError
from . import checkpoints
from . import workdir as runs
from .settings import completed

RECIPES = ("dlrm", "two_tower", "sequence")


@dataclasses.dataclass(frozen=True)
class Opened:
  """A run that has ended.

  Attributes:
    workdir: of the run.
    config: its settings, with those that the data decided filled in.
    result: the content of result.json.
  """

  workdir: Path
  config: ConfigDict
  result: dict[str, Any]

  @property
  def recipe(self) -> str:
    return self.result["recipe"]

  @property
  def train(self) -> ModuleType:
    """The `train` module of its recipe."""
    return importlib.import_module(f"..{self.recipe}.train", __package__)

  def load(self) -> Any:
    """Returns the data that the run was trained on.

    Raises:
      UserError: they have changed, or cannot be read.
    """
    data = self.train.data_lib.load(runs.with_own_base(self.config, self.workdir))
    if dict(data.sha256) != self.result["data_sha256"]:
      raise UserError(f"the data of {self.workdir} have changed since it was trained")
    return data

  def model(self, data: Any, mesh: jax.sharding.Mesh | None = None) -> nnx.Module:
    """Returns the model in its tested state, on the devices of the mesh."""
    config = self.train.decide(self.config, data, mesh)
    model, _ = self.train.make_state(config, data, mesh)
    hosts.replicate(mesh, model)
    restore(self.workdir, self.result["tested_step"], model)
    return model


def open_run(workdir: str | Path) -> Opened:
  """Opens a run that has ended.

  Raises:
    UserError: there is none, or it has not ended.
    DamagedFileError: its files are not what was written.
  """
  workdir = Path(workdir).resolve()
  path = workdir / "config.json"
  if not path.exists():
    raise MissingFileError(f"{workdir} is no run: it has no config.json. Give a --workdir")
  stored, result = arrays.read_json(path, schema={}), runs.result(workdir)
  if result is None:
    raise UserError(f"{workdir} has no result.json: the run has not ended. Its command resumes it")
  if result["recipe"] not in RECIPES:
    raise DamagedFileError(f"{workdir / 'result.json'} names no recipe: train again")
  if not isinstance(decided := stored.pop(runs.DECIDED, None), dict):
    raise DamagedFileError(f"{path} is damaged (it has no {runs.DECIDED!r}): train again")
  try:
    config = completed(result["recipe"], stored | decided)
  except (UserError, AttributeError) as error:  # of values that no run has written
    raise DamagedFileError(f"{path} is damaged ({error}): train again") from error
  return Opened(workdir, config, result)


def restore(workdir: Path, step: int, model: nnx.Module) -> None:
  """Loads a checkpoint into the model of a run, on any devices.

  Raises:
    UserError: the checkpoint is missing or damaged.
  """
  folder = workdir / "checkpoints"
  if not (folder / str(step)).is_dir():
    raise MissingFileError(f"{folder / str(step)}, the tested state, is missing: train again")
  chain = checkpoints.of_step(folder, step)
  path = checkpoints.base(folder, chain)
  try:
    embed.checkpoint.restore(path, model=model)
  except ValueError as error:
    reason = str(error).partition("\n")[0]
    raise DamagedFileError(f"{path} cannot be restored ({reason}): train again") from error
  checkpoints.apply_deltas(folder, chain, model=model)
