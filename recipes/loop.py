"""The one training loop: every recipe prepares its parts, and `run` does the rest.

A run is a folder, the workdir; `recipes.runs` lists its files.

A run that is killed, at any time, and started again by the same command goes on from its latest
checkpoint and ends as if it had never stopped: the checkpoint holds the dense parameters, the
tables by name, both optimizers' states, the position in the data and the loop's own memory, and on
one machine every step is deterministic. A checkpoint does not know how many devices or processes
wrote it: the same command goes on from it on any other number, with the same batches.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import embed

from . import (
  arrays,
  checkpoints,
  days,
  escaping,
  hosts,
  isolation,
  keeping,
  preemption,
  results,
  runs,
  settings,
  train_step,
  warm_start,
)
from .checkpoints import Progress
from .errors import DivergedError, MissingFileError, Preempted, UserError
from .journal import Journal, Silence, Writer

Baseline = Mapping[str, float] | Callable[[], Mapping[str, float]]  # its metrics, or what fits it
_MAX_ATTEMPTS = 2  # at a baseline during which the whole run ended


@dataclasses.dataclass(frozen=True)
class Training:
  """The parts that a recipe prepares.

  Attributes:
    model: trained in place.
    optimizer: of the model's dense parameters and tables.
    loss_fn: `(model, batch) -> scalar`, or a `train_step.Objective`, which says more about it.
    batches: a Grain `IterDataset` of at least `config.steps` batches, each this process's part.
    evaluate: `(model, split) -> {metric: value}`, for the splits `valid` and `test`; the same in
      every process.
    baselines: returns, in the main process, each baseline's metrics or a function that fits it.
      The functions run after `result.json` is written, in a process of their own; see
      `isolation.outcomes`. One that fails is named in the result and costs nothing else.
    data_sha256: hashes of the data by file.
    metrics: names of the metrics that `evaluate` returns for `valid`; None if they are not known.
    config: the settings with those that the data have decided; None if they decide nothing.
    serve: a folder of what serving needs besides the model, which is copied into the workdir.
    writers: get the metrics of the run as well, in the main process; see `journal.Writer`.
    telling: returns the column that tells most of a label, and its AUC; see `results.notes`.
  """

  model: nnx.Module
  optimizer: embed.Optimizer
  loss_fn: train_step.Objective | train_step.LossFn
  batches: Any
  evaluate: Callable[[Any, str], dict[str, float]]
  baselines: Callable[[], Mapping[str, Baseline]]
  data_sha256: Mapping[str, str]
  metrics: Sequence[str] | None = None
  config: Any = None
  serve: Path | None = None
  writers: Sequence[Writer] = ()
  telling: Callable[[], tuple[str, float]] | None = None

  @property
  def state(self) -> dict[str, Any]:
    """The parts that training changes: `model` and `optimizer`."""
    return {"model": self.model, "optimizer": self.optimizer}


def run(
  recipe: str,
  config,
  workdir: str,
  prepare: Callable[[Any, jax.sharding.Mesh | None], Training],
  writers: Sequence[Writer] = (),
) -> dict[str, Any]:
  """Trains as configured, or reports the run that the workdir holds; returns its result.json.

  The same call on a laptop, a GPU node or in every process of a pod; see `hosts.start`.

  Args:
    recipe: its name, for the result.
    config: as for `train`, or of a table as `tables.settings.complete` takes it, as a plain dict.
    workdir: the run's folder.
    prepare: `(config, mesh) -> Training`; called only if there is work to do.
    writers: get the metrics of the run as well; see `journal.Writer`. They are closed at the end.

  Returns:
    The content of result.json, or with `config.days` `{"days": ...}` as `days.run` returns them.

  Raises:
    UserError: as `runs.finished` and `train`.
  """
  with contextlib.ExitStack() as stack:
    hosts.start()
    for writer in writers if hosts.is_main() else ():
      stack.callback(writer.close)
    if isinstance(config, Mapping):
      config = settings.completed(recipe, config)
    settings.check(config)
    if config.get("days"):
      again = functools.partial(_run, recipe, prepare=prepare, writers=writers)
      return {"days": days.run(recipe, config, workdir, again)}
    return _run(recipe, config, workdir, prepare, writers)


def _run(
  recipe: str,
  config,
  workdir: str,
  prepare: Callable[[Any, jax.sharding.Mesh | None], Training],
  writers: Sequence[Writer],
) -> dict[str, Any]:
  mesh = hosts.start()
  result = runs.finished(config, workdir)
  if result is None:
    train_step.check(config, mesh)
    training = prepare(keeping.with_own_base(config, Path(workdir)), mesh)
    if training.config is not None:
      training.config.init_from = config.get("init_from", "")
    training = dataclasses.replace(training, writers=writers)
    result = train(config, workdir, training, recipe=recipe, mesh=mesh)
  if hosts.is_main():
    print(escaping.terminal(results.report(result)))
  return result


def train(
  config,
  workdir: str | Path,
  training: Training,
  *,
  recipe: str,
  mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
  """Trains, evaluates, checkpoints, and tests once at the end.

  Args:
    config: needs `seed`, `steps`, `batch_size`, `log_every`, `eval_every`, `checkpoint_every` (0:
      at evaluations, and as the settings of `settings.RUN` say), `select` (the validation metric
      whose best state is tested, as "valid_auc", a name that ends in "loss" being minimised; ""
      tests the final state) and `patience` (evaluations without improvement until training stops;
      0 never). `pipelined`, if it is set and True, looks up each batch during the step before it:
      see `embed.look_ahead`. Evaluations and checkpoints come between two steps of which neither
      waits for the other.
    workdir: the run's folder, for which `runs.finished` has returned None.
    training: the parts of the recipe.
    recipe: its name, for the result.
    mesh: from `hosts.start`; everything but the tables is copied to all of its devices.

  Returns:
    The content of result.json.

  Raises:
    FloatingPointError: the loss is not finite.
    FileNotFoundError: the processes do not share the workdir.
    UserError: another process trains in the workdir, or the run has taken more steps already.
    Stopped: Ctrl-C; says at which step, and how to go on.
    Preempted: SIGTERM; the same.
  """
  workdir = Path(workdir).resolve()
  if training.metrics is not None:
    _check_select(config.select, [f"valid_{name}" for name in training.metrics])
  progress = Progress()
  config_of_data = training.config or config
  with runs.held(config, workdir), runs.stoppable(config_of_data, workdir, progress):
    if not hosts.everywhere((workdir / "config.json").exists()):
      raise MissingFileError(
        f"not every process sees the config.json that process 0 has written to {workdir}: "
        "--workdir must be a folder that all hosts share"
      )
    result = hosts.from_main(lambda: runs.result(workdir))
    if result is not None and not runs.is_of(result, config):  # the run is longer now
      result = None
    if result is not None and runs.is_complete(result):  # another run has ended since
      return result
    if result is None:
      hosts.replicate(mesh, *training.state.values())
      is_new = not runs.has_checkpoint(workdir)
      sha256 = dict(training.data_sha256)
      hosts.from_main(lambda: keeping.keep(training.serve, sha256, workdir, is_new=is_new))
      tested_step, metrics = _train(config_of_data, workdir, progress, training, mesh)
      result = {
        "recipe": recipe,
        "config": runs.plain(config),
        "seed": config.seed,
        "steps": progress.step,
        "tested_step": tested_step,
        "seconds": progress.seconds,
        "metrics": metrics,
        "baselines": {},
        "failed_baselines": {},
        "device": results.device(),
        "versions": results.versions(),
        "data_sha256": dict(training.data_sha256),
        "pending_baselines": {},
      }
    return hosts.from_main(lambda: _with_baselines(workdir, result, training))


def _train(
  config,
  workdir: Path,
  progress: Progress,
  training: Training,
  mesh: jax.sharding.Mesh | None,
) -> tuple[int, dict[str, float]]:
  """Trains from the latest checkpoint on; returns the step of the tested state and its metrics."""
  with (
    contextlib.closing(iter(hosts.put_ahead(mesh, training.batches))) as iterator,
    checkpoints.Manager(
      workdir / "checkpoints", full_every=settings.value(config, "full_checkpoint_every")
    ) as manager,
  ):
    if (latest := manager.newest()) is not None:
      hosts.say(f"{workdir}: going on from step {latest}")
      if latest > config.steps:
        raise UserError(
          f"{workdir} has taken {latest} steps, and config.steps is {config.steps}: a run can be "
          "lengthened, not shortened"
        )
      vars(progress).update(checkpoints.restore(manager, latest, training.state))
      progress.stopped = _has_stalled(config, progress)
      iterator.set_state(progress.data)
    elif settings.value(config, "init_from"):
      other = warm_start.source(config)
      hosts.from_main(lambda: keeping.keep_base(other, workdir))
      warm_start.start(config, training)
      progress.data = iterator.get_state()
      # The other run may go on, or be removed: from here on this run does not need it.
      checkpoints.save(manager, progress, training.state)
    hosts.from_main(lambda: runs.set_aside(workdir))
    steps = train_step.of_run(
      config,
      training.state,
      training.loss_fn,
      iterator,
      mesh=mesh,
      workdir=workdir,
      taken=progress.step,
    )
    with _journal(config, workdir, progress.step, training.writers) as journal, steps:
      _take_steps(config, progress, training, steps, iterator, journal, manager)
    tested_step = progress.best_step if config.select else progress.step
    hosts.say(f"testing the state of step {tested_step}")
    if tested_step != progress.step:
      checkpoints.restore(manager, tested_step, training.state)
    evaluate = lambda split: _named(split, training.evaluate(training.model, split))
    metrics = evaluate("valid") | evaluate("test")
    tested = {name: value for name, value in metrics.items() if name.startswith("test_")}
    for writer in training.writers if hosts.is_main() and tested else ():
      writer.write(progress.step, tested)
    return tested_step, metrics


def _with_baselines(workdir: Path, result: dict[str, Any], training: Training) -> dict[str, Any]:
  """Writes the result, then once more after every baseline; returns it complete, with its notes.

  A result with `pending_baselines`, which count the attempts at each, is not complete: the same
  command fits the missing ones.
  """
  path = workdir / "result.json"
  arrays.write_json(path, result)
  hosts.say("fitting the baselines")
  wanted, known, failed = training.baselines(), result["baselines"], result["failed_baselines"]
  known |= {name: dict(each) for name, each in wanted.items() if not callable(each)}
  attempts = result["pending_baselines"]
  for name in [name for name, count in attempts.items() if count >= _MAX_ATTEMPTS]:
    failed[name] = f"the run ended {_MAX_ATTEMPTS} times while it was fitted"
  tasks: dict[str, Any] = {n: f for n, f in wanted.items() if n not in known and n not in failed}
  outcomes = isolation.outcomes(tasks)
  for name in tasks:
    attempts[name] = attempts.get(name, 0) + 1
    arrays.write_json(path, result)
    try:
      value, failure = next(outcomes)
    except KeyboardInterrupt:  # the user's or the machine's doing, not the baseline's
      attempts[name] -= 1
      arrays.write_json(path, result)
      raise
    if failure is None:
      known[name] = value
    else:
      hosts.say(f"baseline {name} failed: {failure}")
      failed[name] = failure
    attempts.pop(name)
  result["baselines"] = {name: known[name] for name in wanted if name in known}
  del result["pending_baselines"]
  if not failed:
    del result["failed_baselines"]
  result["notes"] = results.notes(result, training.telling)
  arrays.write_json(path, result)
  return result


def _journal(config, workdir: Path, step: int, writers: Sequence[Writer]) -> Journal | Silence:
  if not hosts.is_main():
    return Silence()
  return Journal(
    workdir, step=step, steps=config.steps, batch_size=config.batch_size, writers=writers
  )


def _take_steps(
  config,
  progress: Progress,
  training: Training,
  steps: train_step.Steps,
  iterator: Any,
  journal: Journal | Silence,
  manager: checkpoints.Manager,
) -> None:
  """Takes the steps that are left, up to the last one or until validation stops improving.

  Raises:
    Preempted: SIGTERM has come, and the state is saved.
  """
  every = lambda period, step: bool(period) and step % period == 0
  saved_at, saved_step = time.perf_counter(), progress.step
  began = saved_at - progress.seconds
  losses: list[Any] = list(progress.losses)  # on the device; fetched only where they are needed

  def save() -> None:
    nonlocal saved_at, saved_step
    progress.losses = [float(loss) for loss in losses]
    progress.seconds = time.perf_counter() - began
    progress.data = iterator.get_state()
    journal.sync()
    journal.doing("saving")
    checkpoints.save(manager, progress, training.state)
    journal.restart_clock()
    saved_at, saved_step = time.perf_counter(), progress.step

  journal.doing("compiling")
  with preemption.Notice() as notice:
    while progress.step < config.steps and not progress.stopped:
      preempted = notice.is_due(progress.step)
      if preempted and not steps.is_pending:
        if progress.step > saved_step:
          save()
        raise Preempted
      progress.step += 1
      last = progress.step == config.steps
      logged = last or every(config.log_every, progress.step)
      evaluated = last or every(config.eval_every, progress.step)
      saved = evaluated or preempted or every(config.checkpoint_every, progress.step)
      saved = saved or _is_overdue(config, saved_at, logged)
      losses.append(steps.take(pause=saved))
      journal.stepped()
      if logged:
        journal.log_train({"loss": _mean(losses, progress.step)} | _reports(training.model))
        losses = []
      if evaluated:
        journal.doing("evaluating")
        scores = _named("valid", training.evaluate(training.model, "valid"))
        journal.log_eval(scores)
        _select(config, progress, scores)
      if saved:
        save()
      if preempted:
        raise Preempted
    if notice.is_due(progress.step):
      raise Preempted


def _is_overdue(config, saved_at: float, logged: bool) -> bool:
  """Returns whether `checkpoint_minutes` have passed since the last save.

  Several processes, whose clocks differ, ask the main one, and only where they wait for each other
  anyway.
  """
  minutes = settings.value(config, "checkpoint_minutes")
  if not minutes or config.get("pipelined", False) or (hosts.shard()[1] > 1 and not logged):
    return False
  return hosts.from_main(lambda: time.perf_counter() - saved_at >= 60 * minutes)


def _select(config, progress: Progress, scores: dict[str, float]) -> None:
  """Remembers the best evaluation so far, the later of two equal ones, and when to give up."""
  if not config.select:
    return
  _check_select(config.select, scores)
  score = _rank(config.select, scores)
  if progress.best is None or score >= progress.best:
    progress.best, progress.best_step, progress.stale = score, progress.step, 0
  else:
    progress.stale += 1
  progress.stopped = _has_stalled(config, progress)


def _has_stalled(config, progress: Progress) -> bool:
  return bool(config.patience) and progress.stale >= config.patience


def _check_select(select: str, metrics: Collection[str]) -> None:
  """Raises UserError unless validation has the metric that selects; "" selects nothing."""
  if select and not metrics:
    raise UserError(
      f"config.select is {select!r}, and no rows validate: pass --config.select= to test the state "
      "of the last step"
    )
  if select and select not in metrics:
    raise UserError(f"config.select is {select!r}; the metrics are {sorted(metrics)}")


def _rank(select: str, scores: Mapping[str, float]) -> float:
  return -scores[select] if select.endswith("loss") else scores[select]


def _mean(losses: list[Any], step: int) -> float:
  mean = float(np.mean([float(loss) for loss in losses], dtype=np.float64))
  if not np.isfinite(mean):
    raise DivergedError(
      f"the loss is {mean} before step {step}: lower the learning rates, or clip the gradients"
    )
  return mean


def _reports(model: nnx.Module) -> dict[str, float]:
  """Returns the reports of the model's SparseEmbeds: the sum of dropped ids, else the largest."""
  values: dict[str, list[float]] = {}
  for _, module in nnx.iter_modules(model):
    if isinstance(module, embed.SparseEmbed):
      for name, value in module.report.get_value().items():
        values.setdefault(name, []).append(np.asarray(value).item())
  return {name: sum(v) if name == "dropped_ids" else max(v) for name, v in values.items()}


def _named(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
  return {f"{split}_{name}": float(value) for name, value in metrics.items()}
