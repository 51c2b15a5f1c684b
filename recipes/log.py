"""Reports of a run while it trains: metrics.jsonl, TensorBoard, and a progress bar.

`metrics.jsonl` and TensorBoard get a line every `log_every` steps and for each evaluation.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx
from tqdm import tqdm

import embed
from embed.planning import aligned

from . import files
from . import mesh as mesh_lib
from .errors import UserError
from .evaluation.metrics import gain

FILE = "metrics.jsonl"
_COMPILING = 2  # steps that may compile, which the rate leaves out


class Log:
  """The metrics of a run; a context manager.

  All processes call the same methods; only the main one writes.

  Args:
    workdir: has `metrics.jsonl`. Lines after `start` are of a run that was killed after its
      checkpoint; they are removed and written again, the same.
    config: of the run; with `tensorboard`, `<workdir>/tensorboard` gets the metrics too.
    start: the step that the run resumes from; 0 begins it.
    memory: what `memory` returned at that step; {} at step 0.
  """

  def __init__(self, workdir: epath.Path, config: Any, start: int, memory: Mapping[str, Any]):
    self.step = start  # the number of steps taken
    self._config, self._path = config, workdir / FILE
    self._lines = [line for line in lines(self._path) if line["step"] <= start]
    self._values: dict[str, list[Any]] = {  # since the last line
      name: list(values) for name, values in memory.get("values", {}).items()
    }
    self._seconds = memory.get("seconds", 0.0)
    self._board = None
    if config.tensorboard and mesh_lib.is_main():
      from tensorboardX import SummaryWriter

      # Without the steps after the one that the run resumes from.
      self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)
    self._bar = tqdm(
      total=config.steps,
      initial=start,
      unit="step",
      disable=None if mesh_lib.is_main() else True,
      dynamic_ncols=True,
    )
    self._began, self._timed_after = time.perf_counter(), start + _COMPILING
    self._restart_clock(start)

  def __enter__(self) -> "Log":
    return self

  def __exit__(self, *error: Any) -> None:
    self._bar.close()
    if self._board is not None:
      self._board.close()

  def train(self, step: int, model: nnx.Module, values: Mapping[str, Any]) -> None:
    """Logs a step: means of its values since the last line, every `log_every` steps.

    Args:
      step: the number of steps taken, this one included.
      model: whose `SparseEmbed`s report dropped ids.
      values: scalars by name, on the device or not.
    """
    for name, x in values.items():
      self._values.setdefault(name, []).append(x)
    self.step = step
    self._bar.update()
    if step <= self._timed_after:
      self._restart_clock(step)
    if step % self._config.log_every and step < self._config.steps:
      return
    metrics = {name: float(np.mean(x)) for name, x in self._fetched(step).items()}
    self._values = {}
    shown = {name: f"{value:.4g}" for name, value in metrics.items()}
    metrics |= _reports(model)
    if steps := step - self._clock_step:
      rate = steps * self._config.batch_size / max(time.perf_counter() - self._clock, 1e-9)
      metrics["examples_per_second"] = rate
      shown["examples"] = f"{rate:,.0f}/s"
    self._write(step, metrics)
    self._bar.set_postfix(shown, refresh=False)
    if self._bar.disable:
      self._say(step, "  ".join(f"{name} {value}" for name, value in shown.items()))
    self._restart_clock(step)

  def eval(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the scalars of an evaluation; {} logs nothing."""
    if metrics:
      self._write(step, metrics)
      self._say(step, "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

  def memory(self, step: int) -> dict[str, Any]:
    """Returns what a run that resumes after this step needs, as JSON values."""
    self._timed_after = step + 1  # so that the rate leaves out the evaluation and the save
    return {"values": self._fetched(step), "seconds": self.seconds}

  @property
  def seconds(self) -> float:
    """The seconds that the run has taken, over all starts."""
    return self._seconds + time.perf_counter() - self._began

  def has_stalled(self, select: str, patience: int) -> bool:
    """Tells if a metric has not improved in the last `patience` evaluations; 0 is False."""
    if not patience:  # every step asks
      return False
    gains = [gain(select, line[select]) for line in self._lines if select in line]
    if stalled := len(gains) > patience and max(gains[-patience:]) < max(gains):
      self._say(self.step, f"ends: {select} has not improved in {patience} evaluations (patience)")
    return stalled

  def scores(self, step: int) -> dict[str, float]:
    """Returns the validation metrics of the last evaluation up to a step; {} if there was none."""
    lines = [line for line in self._lines if line["step"] <= step]
    valid = [{name: line[name] for name in line if name.startswith("valid_")} for line in lines]
    return next((metrics for metrics in reversed(valid) if metrics), {})

  def _fetched(self, step: int) -> dict[str, list[float]]:
    """Returns the values since the last line as floats; raises UserError for one that is none."""
    fetched = {name: [float(x) for x in values] for name, values in self._values.items()}
    for name, values in fetched.items():
      if not np.isfinite(values).all():
        raise UserError(
          f"the {name} is not finite before step {step}: lower the learning rates, or clip the "
          "gradients"
        )
    return fetched

  def _write(self, step: int, metrics: Mapping[str, float]) -> None:
    self._lines.append({"step": step, **metrics})
    if mesh_lib.is_main():
      # As a whole: a store of objects, such as gs://, cannot append.
      files.write(self._path, "".join(f"{json.dumps(line)}\n" for line in self._lines))
    if self._board is not None:
      for name, value in metrics.items():
        self._board.add_scalar(name, value, step)
      self._board.flush()  # or a kill would lose steps before the run's last checkpoint

  def _say(self, step: int, text: str) -> None:
    if mesh_lib.is_main():
      self._bar.write(f"step {step}/{self._config.steps}  {text}", file=sys.stderr)

  def _restart_clock(self, step: int) -> None:
    """Begins to count the steps after this one, and their time, for the next rate."""
    self._clock, self._clock_step = time.perf_counter(), step


def lines(path: Any) -> list[dict[str, Any]]:
  """Returns the lines of a `metrics.jsonl`; [] of a file that does not exist."""
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(model: nnx.Module) -> str:
  """Returns a table of a model's tables with their slots, and a line about all other parameters."""
  rows = [("table", "rows", "columns", "MB", "slots")]
  for module in _layers(model):
    for name, arrays in module.variable_shapes.items():
      size, dim = arrays["parameters"].shape
      megabytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values()) / 1e6
      slots = ", ".join(slot for slot in arrays if slot != "parameters")
      rows.append((name, f"{size:,}", f"{dim:,}", f"{megabytes:,.1f}", slots or "none"))
  number = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
  return (
    f"{aligned(rows, left=(0, 4))}\n{number:,} dense parameters, on {jax.devices()[0].device_kind}"
    f" x {jax.device_count()}"
  )


def _reports(model: nnx.Module) -> dict[str, float]:
  """Returns the reports of the model's tables: the sum of dropped ids, else the largest."""
  values: dict[str, list[float]] = {}
  for module in _layers(model):
    for name, value in module.report.get_value().items():
      values.setdefault(name, []).append(np.asarray(value).item())
  return {name: sum(v) if name == "dropped_ids" else max(v) for name, v in values.items()}


def _layers(model: nnx.Module) -> list[embed.SparseEmbed]:
  return [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, embed.SparseEmbed)]
