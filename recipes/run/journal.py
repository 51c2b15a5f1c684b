"""The log of a run while it trains: metrics.jsonl, TensorBoard, a progress bar or lines."""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import SummaryWriter
from tqdm import tqdm

from .. import arrays, files, hosts, schemas

_UNSAID = ("exchange_rounds", "buffer_fill")  # of the metrics, in lines for a reader


class Writer(Protocol):
  """Takes the metrics of a run to where its user reads them, as to Weights & Biases or MLflow.

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


class _ClosedOnce:
  def __init__(self, writer: Writer):
    self.write, self._writer, self._is_open = writer.write, writer, True

  def close(self) -> None:
    if self._is_open:
      self._is_open = False
      self._writer.close()


def closes_writers(run: Callable[..., Any]) -> Callable[..., Any]:
  """Makes `run(config, workdir, writers)` close its writers, also where no run has begun."""

  @functools.wraps(run)
  def closing(config, workdir: str, writers: Sequence[Writer] = ()) -> Any:
    with contextlib.ExitStack() as stack:
      once = [_ClosedOnce(writer) for writer in writers]
      for writer in once:
        stack.callback(writer.close)
      return run(config, workdir, once)

  return closing


class Journal:
  """Writes the metrics of a run; a context manager.

  Args:
    workdir: where `metrics.jsonl` and `tensorboard/` are.
    step: the step that the run resumes from. Later lines were written by a run that was killed
      before its next checkpoint; they are removed and written again, the same.
    steps: of the whole run.
    batch_size: examples in a step.
    writers: get the metrics too; the caller closes them.
  """

  def __init__(
    self,
    workdir: Path,
    *,
    step: int,
    steps: int,
    batch_size: int,
    writers: Sequence[Writer] = (),
  ):
    self._path = workdir / "metrics.jsonl"
    truncate(self._path, step)
    self._file = files.append(self._path)
    self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)
    self._bar = tqdm(total=steps, initial=step, unit="step", disable=None, dynamic_ncols=True)
    self._doing, self._writers = "", tuple(writers)
    self._step, self._steps, self._batch_size = step, steps, batch_size
    self._since, self._timed = time.perf_counter(), 0

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def close(self) -> None:
    """Ends the bar and closes the files; does nothing the second time."""
    if not self._file.closed:
      self.doing("")
      self._bar.close()
      self._board.close()
      self._file.close()

  def stepped(self) -> None:
    """Counts one training step, for the bar and the rate."""
    self._step += 1
    self._timed += 1
    self.doing("")
    self._bar.update()

  def doing(self, what: str) -> None:
    """Names what takes the time, before the bar; "" are steps, which the rate of the bar counts."""
    if what != self._doing:
      self._doing = what
      self._bar.set_description(what, refresh=bool(what))
      if not what:
        self._bar.unpause()

  def log_train(self, metrics: dict[str, float]) -> None:
    """Logs training metrics of the current step, with the rate since the last log."""
    seconds = time.perf_counter() - self._since
    rate = self._timed * self._batch_size / max(seconds, 1e-9)
    self._write({"step": self._step, **metrics, "examples_per_second": rate})
    shown = {name: f"{value:.4g}" for name, value in metrics.items() if name not in _UNSAID}
    self._bar.set_postfix(shown | {"examples": f"{rate:,.0f}/s"}, refresh=False)
    left = (self._steps - self._step) * self._batch_size / rate if rate else 0
    said = "  ".join(f"{name} {value}" for name, value in shown.items())
    self._say(f"{said}  {rate:,.0f} examples/s  {_time(left)} left")
    self.restart_clock()

  def log_eval(self, metrics: dict[str, float]) -> None:
    """Logs metrics of an evaluation at the current step; its time does not count in the rate."""
    if not metrics:  # nothing is held out to evaluate on
      return
    self._write({"step": self._step, **metrics})
    self._say("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()), keep=True)

  def restart_clock(self) -> None:
    """Leaves the time until now out of the next rate, and begins to count again."""
    self._since, self._timed = time.perf_counter(), 0

  def sync(self) -> None:
    """Puts everything written so far on the disk; call it before a checkpoint of this step."""
    self._file.flush()
    os.fsync(self._file.fileno())
    self._board.flush()

  def _write(self, line: dict[str, Any]) -> None:
    self._file.write(json.dumps(line, allow_nan=False) + "\n")
    self._file.flush()
    metrics = {name: value for name, value in line.items() if name != "step"}
    for name, value in metrics.items():
      self._board.add_scalar(name, value, line["step"])
    for writer in self._writers:
      writer.write(line["step"], metrics)

  def _say(self, text: str, keep: bool = False) -> None:
    text = f"step {self._step}/{self._steps}  {text}"
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


class Silence:
  """A journal that nobody reads: for the processes that do not write the run's files."""

  def __enter__(self) -> "Silence":
    return self

  def __exit__(self, *unused: Any) -> None:
    pass

  def _nothing(self, *unused: Any) -> None:
    pass

  stepped = doing = log_train = log_eval = restart_clock = sync = close = _nothing


def truncate(path: Path, step: int) -> None:
  """Removes lines after `step` from a metrics.jsonl, and one that a kill has cut in half."""
  if not path.exists():
    return
  kept = 0
  for line in files.read(path, at_most=1 << 30).splitlines(keepends=True):
    if not line.endswith(b"\n") or _step(line, path) > step:
      break
    kept += len(line)
  os.truncate(path, kept)


def _step(line: bytes, path: Path) -> int:
  return arrays.parse_json(line, str(path), schema=schemas.LINE)["step"]
