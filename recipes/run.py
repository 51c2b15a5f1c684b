"""The workdir, the folder of a run: its config, its result, and what serving needs.

    config.json     the settings, with those that the data have decided
    data.json       hashes of the data by file
    metrics.jsonl   a line per log step and per evaluation
    tensorboard/    the same for TensorBoard
    checkpoints/    the last two states and the best on validation: see `recipes.checkpoints`
    serve/          transforms and raw ids of a table, which exports and later runs read
    result.json     written when the state has been tested; `recipes.baselines` adds to it

Several processes share one workdir: the main one writes these files, all of them the checkpoints.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

import embed

from . import checkpoints, files, log, warm_start
from . import config as config_lib
from . import mesh as mesh_lib
from .errors import MissingFileError, UserError

_CONFIG, _DATA, _RESULT, _SERVE = "config.json", "data.json", "result.json", "serve"
# Values of settings that the data decide: see `config.with_schedule`, and of two_tower
# `train.decide`.
_UNDECIDED = {
  "batch_size": 0, "steps": 0, "eval_every": 0, "log_every": 0, "warmup_steps": -1, "query": [],
  "candidate": [],
}  # fmt: skip
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "scikit-learn")


# --- before training ------------------------------------------------------------------------------


def resumed(config: ConfigDict, workdir: epath.Path) -> ConfigDict:
  """Checks the config of a run that may be resumed; returns it with its first batch size."""
  if not (workdir / _RESULT).exists() and not checkpoints.steps(workdir):
    return config
  is_leaf = lambda path, _: len(path) == 2 or path == ("files",)  # a column is one value
  stored = files.read_json(workdir / _CONFIG)
  before, now = (flatten_dict(x, sep=".", is_leaf=is_leaf) for x in (stored, plain(config)))
  differing = [
    f"{name}: {before.get(name)!r:.200} there, {now.get(name)!r:.200} now"
    for name in {**now, **before}
    if not {name, name.partition(".")[0]} & {*config_lib.MAY_CHANGE} and _differs(name, before, now)
  ]
  if differing:
    raise UserError(
      f"{workdir} holds a run of another config ({'; '.join(differing)}). Choose another "
      f"--workdir. Only these may change: {', '.join(config_lib.MAY_CHANGE)}"
    )
  return config_lib.copied(config, batch_size=config.batch_size or stored["batch_size"])


def _differs(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
  """Returns whether a setting is another one, and not one that the data decide again."""
  return now.get(name) not in (before.get(name), _UNDECIDED.get(name, before.get(name)))


def finished(config: ConfigDict, workdir: epath.Path) -> dict[str, Any] | None:
  """Returns the result of the workdir's run if it has ended, and None if there is work to do."""
  if not (workdir / _RESULT).exists():
    return None
  result = files.read_json(workdir / _RESULT)
  if any(_differs(name, result["config"], plain(config)) for name in config_lib.LENGTH):
    return None
  mesh_lib.say(f"{workdir} holds a run that has ended. To train again, choose another --workdir.")
  return result


@contextlib.contextmanager
def begun(
  config: ConfigDict, workdir: epath.Path, data: Any, model: nnx.Module, optimizer: embed.Optimizer
) -> Iterator[tuple[log.Log, ocp.CheckpointManager, Callable[[int], bool]]]:
  """Begins a run or restores its last checkpoint; yields its log, its checkpoints, and `stops`.

  The log's `step` is the number of steps taken. `stops` is of `stop_signal`.
  """
  begin(config, workdir, data, model)
  with stop_signal() as stops, checkpoints.opened(workdir, config.select) as manager:
    start, memory = checkpoints.restore(manager, model=model, optimizer=optimizer)
    if start == 0:
      warm_start.take(config, model, data.serve)
    with log.Log(workdir, config, start, memory) as writer:
      yield writer, manager, stops


def begin(config: ConfigDict, workdir: epath.Path, data: Any, model: nnx.Module) -> None:
  """Writes config.json, copies what serving needs into the workdir, and prints what is trained.

  Args:
    config: with what the data have decided.
    data: has `sha256`, hashes by file, `statistics`, numbers by name, and `serve`, the folder of
      what serving needs; None if there is none.
  """
  taken = max(checkpoints.steps(workdir), default=0)
  if taken and list(files.read_json(workdir / _DATA).values()) != list(data.sha256.values()):
    raise UserError(
      f"the data have changed since the run in {workdir} began: choose another --workdir"
    )
  if taken > config.steps:
    raise UserError(f"{workdir} has taken {taken} steps: config.steps cannot be {config.steps}")
  numbers = data.statistics.items()
  shown = (f"{x:,} {name}" if isinstance(x, int) else f"{name} {x:.4g}" for name, x in numbers)
  mesh_lib.say(f"data: {', '.join(shown)}\n{log.trained(model)}")
  if mesh_lib.is_main():
    workdir.mkdir(parents=True, exist_ok=True)
    files.write_json(workdir / _CONFIG, plain(config))
    files.write_json(workdir / _DATA, dict(data.sha256))
    for path in data.serve.rglob("*") if data.serve is not None else ():
      if path.is_file():  # each by itself, since the workdir may be in a bucket
        copy = workdir / _SERVE / path.relative_to(data.serve).as_posix()
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
  multihost_utils.sync_global_devices("begin")


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
  """Yields a function that returns, at every step, whether to save and end: after a SIGTERM.

  Slurm, Kubernetes and the clouds send it some seconds, 30 as a rule, before SIGKILL. With several
  processes JAX's handler passes the signal on, so that all of them end at one step.
  """
  if jax.process_count() > 1:
    yield multihost_utils.reached_preemption_sync_point
    return
  received = threading.Event()
  previous = signal.signal(signal.SIGTERM, lambda number, frame: received.set())
  try:
    yield lambda step: received.is_set()
  finally:
    signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


class Preempted(SystemExit):
  """Ends the program after a SIGTERM, with the step saved; the same command resumes."""

  def __init__(self, step: int):
    super().__init__(os.EX_TEMPFAIL)  # 75
    mesh_lib.say(f"stopped at step {step}; the same command resumes there")


def is_due(step: int, period: int) -> bool:
  """Returns whether a step ends a period of so many steps; a period of 0 never ends."""
  return period > 0 and step % period == 0


# --- the result -----------------------------------------------------------------------------------


def check_select(select: str, metrics: Collection[str]) -> None:
  """Raises UserError unless validation has the metric that selects; "" selects nothing."""
  if select and select not in metrics:
    instead = f"choose one of {sorted(metrics)}, or" if metrics else "no rows validate:"
    raise UserError(
      f"config.select is {select!r}: {instead} pass --config.select= to test the last state"
    )


def scalars(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the metrics of a split by their names in a result."""
  return {f"{split}_{name}": float(x) for name, x in metrics.items()}


def finish(
  recipe: str,
  config: ConfigDict,
  workdir: epath.Path,
  data: Any,
  model: nnx.Module,
  writer: log.Log,
  manager: ocp.CheckpointManager,
  evaluate: Callable[[nnx.Module, str], Mapping[str, float]],
) -> dict[str, Any]:
  """Tests the best state on validation, or the last one; writes result.json, returns its content.

  Args:
    model: of any state; it gets the tested one.
    evaluate: `(model, split) -> metrics`.
  """
  chosen = manager.best_step() if config.select else manager.latest_step()
  tested_step, _ = checkpoints.restore(manager, chosen, model=model)
  scores = scalars("test", evaluate(model, "test")) if config.test else {}
  result = {
    "recipe": recipe,
    "config": plain(config),
    "seed": config.seed,
    "steps": writer.step,
    "tested_step": tested_step,
    "seconds": writer.seconds,
    "metrics": writer.scores(tested_step) | scores,
    "baselines": {},
    "device": device(),
    "versions": versions(),
    "data": dict(data.statistics),
    "data_sha256": dict(data.sha256),
  }
  writer.eval(writer.step, scores)
  if mesh_lib.is_main():
    files.write_json(workdir / _RESULT, result)
  return result


def device() -> dict[str, Any]:
  """Returns the devices and the machine of the run."""
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


# --- a run that has ended -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that has ended."""

  workdir: epath.Path
  config: ConfigDict  # with what the data have decided
  result: dict[str, Any]

  @property
  def recipe(self) -> str:
    return self.result["recipe"]

  @property
  def train(self) -> ModuleType:
    """The `train` module of its recipe."""
    return importlib.import_module(f"..{self.recipe}.train", __name__)

  @property
  def serve(self) -> Path:
    """The folder of transforms and raw ids; MissingFileError for a run that is not on a table."""
    if not (folder := Path(self.workdir) / _SERVE).is_dir():
      raise MissingFileError(
        f"{self.workdir} has no folder {_SERVE}, of transforms and raw ids, as only runs on tables "
        "have"
      )
    return folder

  def load(self) -> Any:
    """Returns the data that the run was trained on; UserError if they have changed."""
    data = self.train.data_lib.load(self.config)
    if dict(data.sha256) != self.result["data_sha256"]:
      raise UserError(f"the data of {self.workdir} have changed since it was trained")
    return data

  def model(self, data: Any, mesh: jax.sharding.Mesh | None = None) -> nnx.Module:
    """Returns the model in its tested state, on the devices of the mesh."""
    model, _ = self.train.make_state(self.config, data, mesh)
    self.restore(model)
    return model

  def restore(self, model: nnx.Module) -> None:
    """Loads the tested state into a model, on any devices."""
    checkpoints.load(checkpoints.folder(self.workdir, self.result["tested_step"]), model=model)


def opened(workdir: str | os.PathLike[str]) -> Run:
  """Opens a run that has ended; raises MissingFileError if there is none."""
  folder = epath.Path(workdir).resolve()
  if not (folder / _RESULT).exists():
    raise MissingFileError(f"{folder} has no {_RESULT}: give the --workdir of a run that has ended")
  result = files.read_json(folder / _RESULT)
  stored = files.read_json(folder / _CONFIG)
  return Run(folder, config_lib.complete(result["recipe"], stored), result)


def plain(config: ConfigDict) -> dict[str, Any]:
  """Returns the config as JSON would give it back: tuples are lists."""
  return json.loads(json.dumps(config.to_dict()))
