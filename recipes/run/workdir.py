"""The folder of a run, the workdir: its config, its lock, its result, and what serving needs.

    config.json      the settings; only those of `settings.MAY_CHANGE` may differ later. `decided`
                     in it has those that the data have decided, as a batch size of 0
    run.log          everything that the run printed, with times
    metrics.jsonl    one line per log step and per evaluation
    tensorboard/     the same for TensorBoard
    checkpoints/     the last two states and the best on validation: see `recipes.run.checkpoints`
    damaged_checkpoints/    those that could not be used when the run resumed
    serve/           transforms and raw ids of a table, which exports and later runs read
    data.json        hashes of the data, and of the transforms fitted on them
    split.parquet    which row of which file is in which split
    init/serve/      the transforms of the run that this one started from
    result.json      written when the state has been tested; `recipes.baselines` adds to it
    result-500.json  the result after 500 steps of a run that was lengthened then
    run.lock         held by the process that writes; a second run in the folder is refused

Several processes share one workdir: the main one writes the files, all of them the checkpoints.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock
import jax
from flax import nnx
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

import embed

from .. import arrays, files, hosts
from ..errors import DamagedFileError, MissingFileError, UserError
from ..tables import row_ids
from ..training import train_step
from . import checkpoints, settings

RECIPES = ("dlrm", "two_tower", "sequence")
_DECIDED = "decided"
_LOCK, _SERVE, _INIT = "run.lock", "serve", "init"
_REMOVE = ": remove it, and the same command writes it again"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "scikit-learn")


# --- the result -----------------------------------------------------------------------------------


def device() -> dict[str, Any]:
  """Returns what the run computed on."""
  first = jax.devices()[0]
  return {
    "platform": first.platform,
    "kind": first.device_kind,
    "count": jax.device_count(),
    "processes": jax.process_count(),
    "host": platform.machine(),
    "host_cores": os.cpu_count(),
  }


def versions() -> dict[str, str]:
  """Returns the versions that a number depends on."""
  installed = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {"python": platform.python_version(), "sparse-embed": embed.__version__} | installed


def plain(config) -> dict[str, Any]:
  """Returns the config as JSON would give it back: tuples are lists."""
  return json.loads(json.dumps(config.to_dict()))


def result(workdir: Path) -> dict[str, Any] | None:
  """Returns the content of result.json, or None before it is written."""
  path = workdir / "result.json"
  return arrays.read_json(path, _REMOVE, settings.RESULT) if os.path.lexists(path) else None


def _is_of(result: Mapping[str, Any], config) -> bool:
  """Returns whether a result is of a run as long as configured."""
  stored, wanted = result["config"], plain(config)
  return all(stored.get(name) == wanted.get(name) for name in settings.LENGTH)


def set_aside(workdir: Path, config) -> None:
  """Renames the result of a run that is lengthened, to `result-<steps>.json`.

  Raises:
    UserError: another process has finished the run of this config since `finished`.
  """
  stale = result(workdir)
  if stale is not None and _is_of(stale, config):
    raise UserError(f"another process has finished {workdir}: the same command shows its result")
  if stale is not None:
    (workdir / "result.json").rename(workdir / f"result-{stale['steps']}.json")


# --- the config and the lock ----------------------------------------------------------------------


def has_checkpoint(workdir: Path) -> bool:
  """Returns whether a run has saved a state."""
  return bool(checkpoints.steps(workdir / "checkpoints"))


def finished(config, workdir: str | Path) -> dict[str, Any] | None:
  """Returns the result if the workdir's run has ended already, and None if there is work to do.

  Call it first, after `hosts.start`: a finished run then reports without loading any data, and a
  workdir that `held` would reject is rejected at once. The main process decides for all.

  Raises:
    UserError: the workdir holds a run of another config; names the fields that differ. Or another
      process trains in it, or it cannot be written to, or it is a URL.
  """
  if "://" in str(workdir):
    raise UserError(
      f"--workdir={workdir} is a URL, and a run writes plain files. Mount the bucket (gcsfuse) and "
      "give the folder."
    )
  folder = Path(workdir)

  def known() -> dict[str, Any] | None:
    _check_config(config, folder)
    ended = result(folder)
    if ended is not None and _is_of(ended, config):
      hosts.say(f"{workdir} holds a run that has ended. To train again, choose another --workdir.")
      return ended
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
      raise UserError(
        f"--workdir={workdir} cannot be written to, because {parent} cannot: choose another one"
      )
    if (folder / _LOCK).exists():
      _acquire(folder).release()
    return None

  return hosts.from_main(known)


def _check_config(config, workdir: Path) -> None:
  wanted, path = _fixed(plain(config)), workdir / "config.json"
  # What has failed before its first checkpoint, as by a typo in a setting, binds nobody.
  if not path.exists() or not (has_checkpoint(workdir) or (workdir / "result.json").exists()):
    return
  stored = _fixed(arrays.read_json(path, _REMOVE, {}))
  differing = [
    f"{name}: {old!r:.200} there, {new!r:.200} now"
    for name in sorted(stored.keys() | wanted.keys())
    if (old := stored.get(name)) != (new := wanted.get(name))
  ]
  if differing:
    raise UserError(
      f"{workdir} holds a run of another config ({'; '.join(differing)}). Choose another "
      f"--workdir, or remove that one. Only these may change: {', '.join(settings.MAY_CHANGE)}."
    )


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings that may not change by dotted name; of files, the splits that they are."""
  is_leaf = lambda path, value: len(path) == 2 or path == ("files",)
  flat = flatten_dict({**config, _DECIDED: None}, sep=".", is_leaf=is_leaf)
  files = flat.get("files")
  flat["splits of files"] = sorted(files) if isinstance(files, dict) else None
  may_change = {*settings.MAY_CHANGE, "user_table.files", "item_table.files"}
  return {name: value for name, value in flat.items() if name not in may_change}


def _acquire(workdir: Path) -> filelock.BaseFileLock:
  try:
    return files.acquire(workdir / _LOCK, wait=False)
  except filelock.Timeout:
    raise UserError(
      f"another process trains in {workdir}: wait for it to end, or choose another --workdir"
    ) from None


@contextlib.contextmanager
def held(asked, config, workdir: Path) -> Iterator[None]:
  """Holds the workdir, in the main process for all of them, and writes config.json.

  Args:
    asked: the config of the run, as asked for.
    config: the same after the data have decided what it leaves open.
    workdir: of the run; errors are as of `finished`.
  """
  locks, chosen = [], plain(config)
  decided = {name: chosen[name] for name in settings.DECIDED if name in chosen}

  def begin() -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    locks.append(_acquire(workdir))
    _check_config(asked, workdir)  # a run may have begun, and ended, since `finished`
    arrays.write_json(workdir / "config.json", plain(asked) | {_DECIDED: decided})

  try:
    hosts.from_main(begin)
    yield
  finally:
    for lock in locks:
      lock.release()


def resumed(config, workdir: str | Path) -> Any:
  """Returns the config to prepare data and model with, of a run that may be resumed.

  A batch size of 0 is the one that the run began with, on any number of devices, and `init_from`
  is the run's own copy; see `keep_base`.
  """
  workdir = Path(workdir)

  def stored() -> int:
    if config.get("batch_size") != 0 or not has_checkpoint(workdir):
      return 0
    return arrays.read_json(workdir / "config.json", _REMOVE, {})[_DECIDED]["batch_size"]

  if batch_size := hosts.from_main(stored):
    config = settings.copied(config, batch_size=batch_size)
  return with_own_copy(config, workdir)


# --- a run that has ended -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Opened:
  """A run that has ended.

  Attributes:
    config: its settings, with those that the data decided filled in.
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
    return importlib.import_module(f"...{self.recipe}.train", __name__)

  def load(self) -> Any:
    """Returns the data that the run was trained on; UserError if they have changed."""
    data = self.train.data_lib.load(with_own_copy(self.config, self.workdir))
    if dict(data.sha256) != self.result["data_sha256"]:
      raise UserError(f"the data of {self.workdir} have changed since it was trained")
    return data

  def model(self, data: Any, mesh: jax.sharding.Mesh | None = None) -> nnx.Module:
    """Returns the model in its tested state, on the devices of the mesh."""
    config = self.train.decide(self.config, data, mesh)
    model, _ = self.train.make_state(config, data, mesh)
    hosts.replicate(mesh, model)
    self.restore(model)
    return model

  def restore(self, model: nnx.Module) -> None:
    """Loads the tested state into a model, on any devices."""
    folder, step = self.workdir / "checkpoints", self.result["tested_step"]
    path = folder / str(step)
    if not path.is_dir():
      raise MissingFileError(f"{path}, the tested state, is missing: train again")
    chain = checkpoints.of_step(folder, step)
    train_step.keep_averages(model, self.config.ema)
    try:
      checkpoints.restore(folder, chain, model=model)
    except UserError as error:  # config.json is of another model
      reason = str(error).partition("\n")[0]
      raise DamagedFileError(f"{path} cannot be restored ({reason}): train again") from error
    train_step.take_averages(model)


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
  stored, ended = arrays.read_json(path, schema={}), result(workdir)
  if ended is None:
    raise UserError(f"{workdir} has no result.json: the run has not ended. Its command resumes it")
  if ended["recipe"] not in RECIPES:
    raise DamagedFileError(f"{workdir / 'result.json'} names no recipe: train again")
  if not isinstance(decided := stored.pop(_DECIDED, None), dict):
    raise DamagedFileError(f"{path} is damaged (it has no {_DECIDED!r}): train again")
  try:
    config = settings.completed(ended["recipe"], stored | decided)
  except (UserError, AttributeError) as error:  # of values that no run has written
    raise DamagedFileError(f"{path} is damaged ({error}): train again") from error
  return Opened(workdir, config, ended)


# --- what serving needs, so that a run depends on no cache and on no other run --------------------


def keep(serve: Path | None, data_sha256: dict[str, str], workdir: Path, *, is_new: bool) -> None:
  """Copies what serving needs into the workdir; a copy that a kill has cut short is made again.

  Args:
    serve: the folder that was prepared with the data; None if there is none.
    data_sha256: hashes of the data by file.
    is_new: whether the run has no checkpoint yet, so that an earlier copy is replaced; else data
      or transforms that are not those of the copy raise UserError.
  """
  path, about = workdir / "data.json", dict(data_sha256)
  if serve is not None:
    about["transforms"] = row_ids.digest(serve)
  if not is_new:
    stored = arrays.read_json(path, schema={})  # by name, and files may have other ones by now
    if list(stored.values()) != list(about.values()):
      raise UserError(
        f"the data have changed since the run in {workdir} began: choose another --workdir"
      )
    return
  if serve is not None:
    _copy(serve, workdir / _SERVE)
    split = serve.parent / "split.parquet"
    if split.is_dir():  # of several files, prepared on a cluster
      _copy(split, workdir / split.name)
    elif split.exists():
      with split.open("rb") as rows, files.replacing(workdir / split.name) as file:
        shutil.copyfileobj(rows, file)
  arrays.write_json(path, about)


def keep_base(other: Path, workdir: Path) -> None:
  """Copies the transforms of the run that this one starts from, if it has any."""
  source = files.latest(other / _SERVE)
  if source.is_dir():
    (workdir / _INIT).mkdir(parents=True, exist_ok=True)
    _copy(source, workdir / _INIT / _SERVE)


def with_own_copy(config, workdir: Path) -> Any:
  """Returns the config to prepare data with, whose `init_from` is the run's own copy."""
  if config.get("init_from") and files.latest(workdir / _INIT / _SERVE).is_dir():
    return settings.copied(config, init_from=str(workdir / _INIT))
  return config


def _copy(source: Path, target: Path) -> None:
  with files.replacing_folder(target) as partial:
    files.copy_folder(source, partial)
