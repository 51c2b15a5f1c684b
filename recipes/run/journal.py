"""What a run records while it trains: its metrics, a bar or lines of them, and a profile.

`metrics.jsonl` has a line per log step and per evaluation. Writers get the same: those that
`config.writers` names, and objects of a caller's own.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from flax import nnx
from tqdm import tqdm

import embed
from embed.planning import aligned

from .. import arrays, files, hosts
from . import settings

_UNSAID = ("exchange_rounds", "buffer_fill")  # of the metrics, in lines for a reader
PROFILE = "profile"  # folder of a profile, in the workdir


# --- writers --------------------------------------------------------------------------------------


class Writer(Protocol):
  """Takes the metrics of a run to where its user reads them.

  Steps rise, but for a run that resumes from a checkpoint: it writes the steps since the checkpoint
  once more, the same numbers. What a writer raises ends the run, at its last checkpoint.
  """

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Takes metrics by name: of training every `log_every` steps, of evaluations, of the test.

    They are called as in `metrics.jsonl`: `loss`, `examples_per_second`, `valid_auc`; the test's,
    `test_auc`, come at the last step.
    """

  def close(self) -> None:
    """Is called once, when the run has ended, failed or been stopped."""


class TensorBoard:
  """Writes `<workdir>/tensorboard`; steps after the one that the run resumes from are replaced."""

  def __init__(self, workdir: Path, config: Mapping[str, Any], step: int):
    from tensorboardX import SummaryWriter

    del config
    self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
      self._board.add_scalar(name, value, step)
    self._board.flush()  # a kill loses nothing that a checkpoint is after

  def close(self) -> None:
    self._board.close()


class WandB:
  """Writes a run of Weights & Biases; a run that resumes goes on in it, by the workdir's path.

  `WANDB_PROJECT` and the other variables of wandb say where it is.
  """

  def __init__(self, workdir: Path, config: Mapping[str, Any], step: int):
    del step
    wandb = importlib.import_module("wandb")
    name = hashlib.sha256(str(workdir).encode()).hexdigest()[:16]
    self._run = wandb.init(
      id=name, name=workdir.name, dir=str(workdir), config=dict(config), resume="allow"
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    self._run.log(dict(metrics), step=step)

  def close(self) -> None:
    self._run.finish()


class MLflow:
  """Writes a run of MLflow, whose id is in `<workdir>/mlflow.json`; `MLFLOW_TRACKING_URI` is read.

  MLflow allows few characters in a name: `ndcg@10` is `ndcg_at_10` there, and `auc[gender=F]` is
  `auc_gender_F`.
  """

  def __init__(self, workdir: Path, config: Mapping[str, Any], step: int):
    del step
    self._mlflow = mlflow = importlib.import_module("mlflow")
    path = workdir / "mlflow.json"
    known = arrays.read_json(path, schema={"run_id": str})["run_id"] if path.exists() else None
    run = mlflow.start_run(run_id=known, run_name=workdir.name)
    if known is None:
      arrays.write_json(path, {"run_id": run.info.run_id})
      mlflow.log_dict(dict(config), "config.json")

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    plain = lambda name: re.sub(r"[^\w\-. :/]+", "_", name.replace("@", "_at_")).rstrip("_")
    named = {plain(name): value for name, value in metrics.items()}
    self._mlflow.log_metrics(named, step=step)

  def close(self) -> None:
    self._mlflow.end_run()


WRITERS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


# --- the log --------------------------------------------------------------------------------------


def trained(model: nnx.Module) -> str:
  """Returns a table of what a model trains: its tables with their slots, and all else in a line."""
  lines = [("table", "rows", "columns", "MB", "slots")]
  for _, module in nnx.iter_modules(model):
    for name, of in module.variable_shapes.items() if isinstance(module, embed.SparseEmbed) else ():
      rows, columns = of["parameters"].shape
      size = sum(math.prod(x.shape) * x.dtype.itemsize for x in of.values()) / 1e6
      slots = ", ".join(slot for slot in of if slot != "parameters")
      lines.append((name, f"{rows:,}", f"{columns:,}", f"{size:,.1f}", slots or "none"))
  number = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
  return (
    f"{aligned(lines, left=(0, 4))}\n{number:,} dense parameters, on {jax.devices()[0].device_kind}"
    f" x {jax.device_count()}"
  )


class Journal:
  """Writes the metrics of a run; in processes other than the main one it does nothing.

  Args:
    workdir: where `metrics.jsonl` is.
    step: the step that the run resumes from. Later lines were written by a run that was killed
      before its next checkpoint; they are removed and written again, the same.
    config: has `steps` and `batch_size`.
    writers: get the metrics too; the caller closes them.
  """

  def __init__(self, workdir: Path, step: int, config: Any, writers: Sequence[Writer] = ()):
    path, is_main = workdir / "metrics.jsonl", hosts.is_main()
    self._file = None
    if is_main:
      _truncate(path, step)
      self._file = files.append(path)
    self._bar = tqdm(
      total=config.steps,
      initial=step,
      unit="step",
      disable=None if is_main else True,
      dynamic_ncols=True,
    )
    self._doing, self._writers = "", tuple(writers)
    self._steps, self._batch_size = config.steps, config.batch_size
    self.restart_clock(step)

  def close(self) -> None:
    """Ends the bar and closes the file; does nothing the second time."""
    if self._file is not None:
      self.doing("")
      self._bar.close()
      self._file.close()
      self._file = None

  def stepped(self) -> None:
    """Counts one training step for the bar."""
    self.doing("")
    self._bar.update()

  def doing(self, what: str) -> None:
    """Names what takes the time, before the bar; "" are steps, which the rate of the bar counts."""
    if what != self._doing:
      self._doing = what
      self._bar.set_description(what, refresh=bool(what))
      if not what:
        self._bar.unpause()

  def log_train(self, step: int, metrics: dict[str, float]) -> None:
    """Logs training metrics, with the rate since the last line if steps have been timed."""
    shown = {name: f"{value:.4g}" for name, value in metrics.items() if name not in _UNSAID}
    said = "  ".join(f"{name} {value}" for name, value in shown.items())
    if steps := step - self._clock_step:
      rate = steps * self._batch_size / max(time.perf_counter() - self._clock, 1e-9)
      metrics = {**metrics, "examples_per_second": rate}
      shown["examples"] = f"{rate:,.0f}/s"
      left = _time((self._steps - step) * self._batch_size / rate)
      said += f"  {rate:,.0f} examples/s  {left} left"
    self._write(step, metrics)
    self._bar.set_postfix(shown, refresh=False)
    self._say(step, said)
    self.restart_clock(step)

  def log_eval(self, step: int, metrics: dict[str, float]) -> None:
    """Logs metrics of an evaluation, if anything is held out to evaluate on."""
    if metrics:
      self._write(step, metrics)
      said = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
      self._say(step, said, keep=True)

  def restart_clock(self, step: int) -> None:
    """Begins to count the steps after this one, and their time, for the next rate."""
    self._clock, self._clock_step = time.perf_counter(), step

  def sync(self) -> None:
    """Puts everything written so far on the disk; call it before a checkpoint of this step."""
    if self._file is not None:
      self._file.flush()
      os.fsync(self._file.fileno())

  def _write(self, step: int, metrics: dict[str, float]) -> None:
    if self._file is None:
      return
    self._file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
    self._file.flush()
    for writer in self._writers:
      writer.write(step, metrics)

  def _say(self, step: int, text: str, keep: bool = False) -> None:
    if self._file is None:
      return
    text = f"step {step}/{self._steps}  {text}"
    hosts.write_log(text)
    if self._bar.disable:
      print(text, file=sys.stderr, flush=True)
    elif keep:  # evaluations stay readable above the bar
      self._bar.write(text)


def _time(seconds: float) -> str:
  """Returns a time as a reader counts it.

  >>> _time(59.6), _time(3600)
  ('1:00', '1:00:00')
  """
  minutes, second = divmod(round(seconds), 60)
  hour, minute = divmod(minutes, 60)
  return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _truncate(path: Path, step: int) -> None:
  """Removes lines after `step` from a metrics.jsonl, and one that a kill has cut in half."""
  if not path.exists():
    return
  kept = 0
  for line in files.read(path, at_most=1 << 30).splitlines(keepends=True):
    parsed = lambda line=line: arrays.parse_json(line, str(path), schema=settings.LINE)
    if not line.endswith(b"\n") or parsed()["step"] > step:
      break
    kept += len(line)
  os.truncate(path, kept)


# --- the profile ----------------------------------------------------------------------------------


class Profile:
  """Writes a trace of steps `first` to `last`, for TensorBoard or XProf.

  Args:
    steps: the first and the last step, counted from 1; () traces nothing. In a run of several
      processes, the main one traces itself.
  """

  def __init__(self, folder: Path, steps: Sequence[int]):
    self._folder, self._steps = folder, tuple(steps) if hosts.is_main() else ()
    self._is_running = False

  def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
    """Returns what traces step `number` around it, if it is one of those wanted."""
    if not self._steps or not self._steps[0] <= number <= self._steps[1]:
      return contextlib.nullcontext()
    if not self._is_running:
      jax.profiler.start_trace(self._folder)
      self._is_running = True
    return jax.profiler.StepTraceAnnotation("train", step_num=number)

  def stepped(self, number: int, result: Any) -> None:
    """Ends the trace after its last step, for whose result it waits."""
    if self._is_running and number == self._steps[1]:
      jax.block_until_ready(result)
      self.close()

  def close(self) -> None:
    """Writes the trace, if the run ends before its last step."""
    if self._is_running:
      self._is_running = False
      jax.profiler.stop_trace()
      hosts.say(f"profile: tensorboard --logdir={self._folder}")
