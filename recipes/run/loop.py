"""What a training loop needs besides its model, its data and its step: one object, `Run`.

    with Run("dlrm", config, workdir, model=model, optimizer=optimizer) as run:
      for batch in run.steps(batches):
        run.log(loss=step(batch))
        if run.evaluates:
          run.score(evaluate(model, "valid"))
      return run.finish(evaluate(run.best(), "test"))

A run is a folder, the workdir; `recipes.run.workdir` lists its files. A run that is killed, at any
time, and started again by the same command resumes from its latest checkpoint and ends as if it had
never stopped: the checkpoint holds the dense parameters, the tables by name, both optimizers'
states, the position in the data and the loop's own memory, and on one machine every step is
deterministic. The same command resumes it on any number of devices or processes, with the same
batches.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grain
import jax
import numpy as np
from flax import nnx

import embed

from .. import arrays, hosts
from ..errors import DivergedError, MissingFileError, Preempted, Stopped, UserError
from . import checkpoints, journal, results
from . import workdir as runs

_COMPILING = 2  # steps that may compile, and are not timed


class Run:
  """One training run in its workdir; a context manager.

  Within it the workdir is locked, `model` and `optimizer` hold the state of the latest checkpoint,
  and Ctrl-C or SIGTERM end the program with a message that says where the run resumes.

  Args:
    recipe: its name, for the result.
    config: has the settings of `settings.RUN`, `select` (the validation metric whose best state is
      tested, as "valid_auc"; see `results.gain` for which is best; "" tests the final state)
      and `patience` (evaluations without improvement until training stops; 0 never).
    workdir: the run's folder, for which `runs.finished` has returned None.
    model: trained in place; everything but its tables is copied to all devices of the mesh.
    optimizer: of the model's dense parameters and tables.
    mesh: from `hosts.start`.
    asked: the config before the data have decided what it leaves open; None: it leaves nothing.
    data: has `sha256`, hashes of the data by file, `statistics`, numbers by name, and `serve`, a
      folder of what serving needs besides the model, which is copied into the workdir. None:
      nothing is known of the data.
    writers: get the metrics as well as those that `config.writers` names, in the main process; the
      run closes them when it ends.

  Attributes:
    step: the number of steps taken.
    evaluates: whether the current step is one after which to call `score`.
    is_new: whether the run begins here, and is not resumed.
    serve: the folder of what serving needs, where the data set was prepared; or None.

  Raises:
    FileNotFoundError: the processes do not share the workdir.
    UserError: another process trains in the workdir, it holds a run of another config, or one that
      has taken more steps already.
    Stopped: Ctrl-C; says at which step, and where the run resumes.
    Preempted: SIGTERM; the same.
  """

  def __init__(
    self,
    recipe: str,
    config,
    workdir: str | Path,
    *,
    model: nnx.Module,
    optimizer: embed.Optimizer,
    mesh: jax.sharding.Mesh | None = None,
    asked: Any = None,
    data: Any = None,
    writers: Sequence[journal.Writer] = (),
  ):
    self.recipe, self.config, self.workdir = recipe, config, Path(workdir).resolve()
    self.model, self.optimizer, self.mesh = model, optimizer, mesh
    self.asked = config if asked is None else asked
    self.is_new, self.evaluates = True, False
    self._sha256 = {} if data is None else dict(data.sha256)
    self._statistics = {} if data is None else dict(data.statistics)
    self.serve = None if data is None else data.serve
    self._writers = tuple(writers) if hosts.is_main() else ()
    self._progress, self._stack = checkpoints.Progress(), contextlib.ExitStack()
    self._values: dict[str, list[Any]] = {}  # on the device; fetched where they are written
    self._iterator: Any = None
    self._writes = self._saves = False
    self._latest: Any = None  # value of the last step, which a profile waits for

  @property
  def step(self) -> int:
    return self._progress.step

  # --- from the first line to the last one --------------------------------------------------------

  def __enter__(self) -> "Run":
    with contextlib.ExitStack() as stack:
      for writer in self._writers:
        stack.callback(writer.close)
      stack.enter_context(runs.held(self.asked, self.config, self.workdir))
      self._notice = stack.enter_context(hosts.PreemptionNotice())
      if not hosts.everywhere((self.workdir / "config.json").exists()):
        raise MissingFileError(
          f"not every process sees the config.json that process 0 has written to {self.workdir}: "
          "--workdir must be a folder that all hosts share"
        )
      try:
        self._restore(stack)
      except KeyboardInterrupt as stop:
        raise self._stopped(stop) from None
      self._stack = stack.pop_all()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._stack.__exit__(kind, error, traceback)
    if isinstance(error, KeyboardInterrupt):
      raise self._stopped(error) from None

  def _stopped(self, stop: KeyboardInterrupt) -> Stopped:
    latest = max(checkpoints.steps(self.workdir / "checkpoints"), default=0)
    return (Preempted if isinstance(stop, Preempted) else Stopped)(
      f"stopped at step {self.step} of {self.config.steps}; the same command resumes from step "
      f"{latest}"
    )

  def _restore(self, stack: contextlib.ExitStack) -> None:
    """Loads the latest checkpoint if there is one, and opens what is written while training."""
    config, workdir = self.config, self.workdir
    self._state = {"model": self.model, "optimizer": self.optimizer}
    hosts.replicate(self.mesh, *self._state.values())
    self._manager = stack.enter_context(
      checkpoints.Manager(workdir / "checkpoints", full_every=config.full_checkpoint_every)
    )
    chain = self._manager.newest()
    self.is_new = not chain
    hosts.from_main(lambda: runs.keep(self.serve, self._sha256, workdir, is_new=self.is_new))
    if chain:
      hosts.say(f"{workdir}: resuming from step {chain[-1]}")
      if chain[-1] > config.steps:
        raise UserError(
          f"{workdir} has taken {chain[-1]} steps, and config.steps is {config.steps}: a run can "
          "be lengthened, not shortened"
        )
      self._progress = self._manager.restore(chain, **self._state)
      self._progress.stopped = self._has_stalled()
      self._values = {name: list(values) for name, values in self._progress.logged.items()}
    hosts.from_main(lambda: runs.set_aside(workdir, self.asked))
    self._profile = journal.Profile(workdir / journal.PROFILE, config.profile_steps)
    stack.callback(self._profile.close)
    if hosts.is_main():
      stack.enter_context(hosts.logged_to(workdir / "run.log"))
      for name in config.writers:
        writer = journal.WRITERS[name](workdir, runs.plain(config), self.step)
        self._writers = (*self._writers, stack.enter_context(contextlib.closing(writer)))
    self._journal = stack.enter_context(
      contextlib.closing(journal.Journal(workdir, self.step, config, self._writers))
    )
    self._saved_at, self._saved_step = time.perf_counter(), self.step
    self._began, self._resumed_at = self._saved_at - self._progress.seconds, self.step

  # --- between two steps --------------------------------------------------------------------------

  def steps(
    self, batches: grain.IterDataset, prepare: Callable[[Any], Any] = lambda batch: batch
  ) -> Iterator[Any]:
    """Yields the batch of each step that is left, up to the last or until the run stops early.

    After the body of the loop the run is saved, where that is due.

    Args:
      batches: at least `config.steps` of them, each this process's part.
      prepare: of a batch on its devices; returns the batch of the step, as with the outputs of a
        teacher: `lambda batch: batch | {"teacher": predict(teacher, batch)}`.

    Raises:
      Preempted: SIGTERM has come, and the state is saved.
    """
    config, progress, notice = self.config, self._progress, self._notice
    every = lambda period: bool(period) and progress.step % period == 0
    self._prepare = prepare
    self._iterator = self._stack.enter_context(
      contextlib.closing(iter(hosts.put_ahead(self.mesh, batches)))
    )
    if progress.data:
      self._iterator.set_state(progress.data)
    if self.is_new:
      if self._statistics:
        hosts.say(f"data: {_shown(self._statistics)}")
      hosts.say(journal.trained(self.model))
    self._journal.doing("compiling")
    notice.is_deferred = True
    while progress.step < config.steps and not progress.stopped:
      preempted = notice.is_due(progress.step)
      if preempted:
        if progress.step > self._saved_step:
          self.save()
        raise Preempted
      progress.step += 1
      last = progress.step == config.steps
      self._writes = last or every(config.log_every)
      self.evaluates = last or every(config.eval_every)
      self._saves = self.evaluates or every(config.checkpoint_every)
      self._saves = self._saves or self._is_overdue()
      batch = self._prepare(next(self._iterator))
      with self._profile.step(progress.step):
        yield batch
      self._profile.stepped(progress.step, self._latest)
      self._journal.stepped()
      if self._saves:
        self.save()
    self.evaluates = False
    if notice.is_due(progress.step):
      raise Preempted
    notice.is_deferred = False

  def log(self, **values: Any) -> None:
    """Logs values of the current step; call it once in a step.

    Args:
      **values: scalars, of which the mean since the last line is written every `log_every` steps;
        or functions of the number of steps, which are called then.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    line = {name: value for name, value in values.items() if callable(value)}
    for name, value in values.items():
      if name not in line:
        self._values.setdefault(name, []).append(value)
        self._latest = value
    if self.step <= self._resumed_at + _COMPILING:
      self._journal.restart_clock(self.step)
    if self._writes:
      line = {name: float(f(self.step)) for name, f in line.items()}
      means = {name: float(np.mean(x, dtype=np.float64)) for name, x in self._fetched().items()}
      self._journal.log_train(self.step, means | line | _reports(self.model))
      self._values = {}
    if self.evaluates:
      self._journal.doing("evaluating")

  def score(self, metrics: Mapping[str, Any]) -> None:
    """Logs metrics of validation, remembers whether they are the best, and may end the run early.

    The best state is the later one of two that are equal. Only scalars are logged.
    """
    config, progress = self.config, self._progress
    scores = results.scalars("valid", metrics)
    self._journal.log_eval(self.step, scores)
    if not config.select:
      progress.scores = scores
      return
    check_select(config.select, scores)
    score = results.gain(config.select, scores[config.select])
    if progress.best is None or score >= progress.best:
      progress.best, progress.best_step, progress.stale = score, progress.step, 0
      progress.scores = scores
    else:
      progress.stale += 1
    progress.stopped = self._has_stalled()
    if progress.stopped and progress.step < config.steps:
      hosts.say(
        f"stopping early at step {progress.step} of {config.steps}: {config.select} has not "
        f"improved in {progress.stale} evaluations, since {progress.scores[config.select]:.4f} at "
        f"step {progress.best_step}"
      )

  def save(self) -> None:
    """Saves the run as it is.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    progress = self._progress
    progress.logged = self._fetched()
    progress.seconds = time.perf_counter() - self._began
    progress.data = self._iterator.get_state() if self._iterator is not None else {}
    self._journal.sync()
    self._journal.doing("saving")
    self._manager.save(progress, **self._state)
    self._journal.restart_clock(progress.step)
    self._saved_at, self._saved_step = time.perf_counter(), progress.step

  def _fetched(self) -> dict[str, list[float]]:
    """Returns the values that were logged since the last line."""
    fetched = {name: [float(x) for x in values] for name, values in self._values.items()}
    for name, values in fetched.items():
      if not np.isfinite(mean := float(np.mean(values))):
        raise DivergedError(
          f"the {name} is {mean} before step {self.step}: lower the learning rates, or clip the "
          "gradients"
        )
    return fetched

  def _is_overdue(self) -> bool:
    """Returns whether `checkpoint_minutes` have passed since the last save.

    Several processes, whose clocks differ, ask the main one, and only where they wait for each
    other anyway.
    """
    minutes = self.config.checkpoint_minutes
    waits = self._writes or hosts.shard()[1] == 1
    if not minutes or not waits:
      return False
    return hosts.from_main(lambda: time.perf_counter() - self._saved_at >= 60 * minutes)

  def _has_stalled(self) -> bool:
    return bool(self.config.patience) and self._progress.stale >= self.config.patience

  # --- after the last step ------------------------------------------------------------------------

  def best(self) -> nnx.Module:
    """Returns the model as validation prefers it, or in its last state without `select`."""
    self._journal.close()
    self._notice.is_deferred = False
    step = self._tested_step
    hosts.say(f"testing the state of step {step}")
    if step != self.step:
      self._manager.wait()
      chain = hosts.from_main(lambda: checkpoints.of_step(self._manager.folder, step))
      self._manager.restore(chain, **self._state)
    return self.model

  @property
  def _tested_step(self) -> int:
    return self._progress.best_step if self.config.select else self.step

  def finish(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Writes result.json and returns its content.

    Args:
      metrics: of the test rows, {} of a run that is not tested; the validation's are those of the
        state that is tested. Scalars are among the result's `metrics`, and arrays `[points,
        columns]` among its `curves`.
    """
    tested = results.scalars("test", metrics)
    for writer in self._writers if tested else ():
      writer.write(self.step, tested)
    result = {
      "recipe": self.recipe,
      "config": runs.plain(self.asked),
      "seed": self.config.seed,
      "steps": self.step,
      "tested_step": self._tested_step,
      "seconds": self._progress.seconds,
      "metrics": self._progress.scores | tested,
      "curves": {f"test_{n}": np.asarray(x).tolist() for n, x in metrics.items() if np.ndim(x)},
      "baselines": {},
      "device": runs.device(),
      "versions": runs.versions(),
      "data": self._statistics,
      "data_sha256": self._sha256,
    }
    hosts.from_main(lambda: arrays.write_json(self.workdir / "result.json", result))
    return result


def check_select(select: str, metrics: Collection[str]) -> None:
  """Raises UserError unless validation has the metric that selects; "" selects nothing."""
  if select and not metrics:
    raise UserError(
      f"config.select is {select!r}, and no rows validate: pass --config.select= to test the state "
      "of the last step"
    )
  if select and select not in metrics:
    raise UserError(f"config.select is {select!r}; the metrics are {sorted(metrics)}")


def _reports(model: nnx.Module) -> dict[str, float]:
  """Returns the reports of the model's SparseEmbeds: the sum of dropped ids, else the largest."""
  values: dict[str, list[float]] = {}
  for _, module in nnx.iter_modules(model):
    if isinstance(module, embed.SparseEmbed):
      for name, value in module.report.get_value().items():
        values.setdefault(name, []).append(np.asarray(value).item())
  return {name: sum(v) if name == "dropped_ids" else max(v) for name, v in values.items()}


def _shown(statistics: Mapping[str, float]) -> str:
  """Returns numbers in words.

  >>> _shown({"users": 6040, "density": 0.0447})
  '6,040 users, density 0.0447'
  """
  return ", ".join(
    f"{value:,} {name}" if isinstance(value, int) else f"{name} {value:.4g}"
    for name, value in statistics.items()
  )
