"""The one training loop: every recipe prepares its parts and calls `train`.

A run is a folder, the workdir:

    config.json      what was asked for; another config in the same folder is refused
    metrics.jsonl    one line per log step and per evaluation
    tensorboard/     the same for TensorBoard
    checkpoints/     Orbax: the latest state and the best one on validation
    result.json      written when the state has been tested; complete when the baselines are in it
    run.lock         held by the process that writes; a second run in the folder is refused

Several processes share one workdir: the main one writes the files, all of them the checkpoints.

A run that is killed, at any time, and started again by the same command goes on from its latest
checkpoint and ends as if it had never stopped: the checkpoint holds the dense parameters, the
tables by name, both optimizers' states, the position in the data and the loop's own memory, and on
one machine every step is deterministic. A checkpoint does not know how many devices or processes
wrote it: the same command goes on from it on any other number, with the same batches.
"""

import contextlib
import dataclasses
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import preservation_policy

import embed
import embed.checkpoint
from recipes import arrays, files, hosts, isolation, results
from recipes.errors import DivergedError, MissingFileError, Stopped, UserError, from_settings
from recipes.journal import Journal, Silence

_LOCK = "run.lock"
_REMOVE = ": remove it, and the same command writes it again"
Baseline = Mapping[str, float] | Callable[[], Mapping[str, float]]  # its metrics, or what fits it
_MAX_ATTEMPTS = 2  # at a baseline during which the whole run ended


@dataclasses.dataclass
class _Progress:
  """What the loop itself has to remember across a kill.

  `losses` are those since the last log line; `best` is the best selection score so far, at
  `best_step`, and `stale` counts the evaluations since.
  """

  step: int = 0
  seconds: float = 0.0
  losses: list[float] = dataclasses.field(default_factory=list)
  best: float | None = None
  best_step: int = 0
  stale: int = 0
  stopped: bool = False
  data: dict[str, Any] = dataclasses.field(default_factory=dict)


def finished(config, workdir: str | Path) -> dict[str, Any] | None:
  """Returns the result if the workdir's run has ended already, and None if there is work to do.

  Call it first, after `hosts.start`: a finished run then reports without loading any data, and what
  `train` would refuse is refused at once. The main process looks, and all take its word for it.

  Raises:
    UserError: the workdir holds a run of another config; names the fields that differ. Or another
      process trains in it, or it cannot be written to, or it is a URL.
  """
  if "://" in str(workdir):
    raise UserError(
      f"--workdir={workdir} is a URL, and a run writes plain files. Mount the bucket (gcsfuse) and "
      "give the folder."
    )
  return hosts.from_main(lambda: _finished(config, Path(workdir)))


def _finished(config, workdir: Path) -> dict[str, Any] | None:
  _check_config(config, workdir)
  result = _result(workdir)
  if result is None or not _is_complete(result):
    parent = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
      raise UserError(
        f"--workdir={workdir} cannot be written to, because {parent} cannot: choose another one"
      )
    if (workdir / _LOCK).exists():
      _acquire(workdir).release()
    return None
  _say(f"{workdir} holds a run that has ended. To train again, choose another --workdir.")
  for name, failure in result.get("failed_baselines", {}).items():
    _say(f"its baseline {name} failed: {failure}. To fit it again, remove its result.json.")
  return result


def _check_config(config, workdir: Path) -> None:
  wanted, path = _plain(config), workdir / "config.json"
  if not path.exists():
    return
  found = arrays.read_json(path, _REMOVE)
  differing = [
    f"{name}: {found.get(name)!r} there, {wanted.get(name)!r} now"
    for name in sorted(found.keys() | wanted.keys())
    if found.get(name) != wanted.get(name)
  ]
  if differing:
    raise UserError(
      f"{workdir} holds a run of another config ({'; '.join(differing)}). Choose another "
      "--workdir, or remove that one."
    )


def _result(workdir: Path) -> dict[str, Any] | None:
  path = workdir / "result.json"
  return arrays.read_json(path, _REMOVE) if path.exists() else None


def _is_complete(result: Mapping[str, Any]) -> bool:
  return "pending_baselines" not in result


def _acquire(workdir: Path) -> filelock.BaseFileLock:
  """Takes the lock of a workdir, which its process loses in whatever way it ends.

  Raises:
    UserError: another process holds it, or it is a link, which is not followed.
  """
  try:
    return files.acquire(workdir / _LOCK, wait=False)
  except filelock.Timeout:
    raise UserError(
      f"another process trains in {workdir}: wait for it to end, or choose another --workdir"
    ) from None


def train(
  config,
  workdir: str | Path,
  *,
  recipe: str,
  model: nnx.Module,
  optimizer: embed.Optimizer,
  loss_fn: Callable[[Any, Any], jax.Array],
  batches: Any,
  evaluate: Callable[[Any, str], dict[str, float]],
  baselines: Callable[[], Mapping[str, Baseline]],
  data_sha256: Mapping[str, str],
  mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
  """Trains, evaluates, checkpoints, and tests once at the end.

  Args:
    config: needs `seed`, `steps`, `batch_size`, `log_every`, `eval_every`, `checkpoint_every` (0:
      at evaluations only), `select` (the validation metric whose best state is tested, as
      "valid_auc", a name that ends in "loss" being minimised; "" tests the final state) and
      `patience` (evaluations without improvement until training stops; 0 never). `pipelined`, if
      it is there and True, looks up each batch beside the step before it: see `embed.look_ahead`.
      Evaluations and checkpoints come between two steps of which neither waits for the other.
    workdir: the run's folder, for which `finished` has returned None.
    recipe: its name, for the result.
    model: trained in place.
    optimizer: of the model's dense parameters and tables.
    loss_fn: `(model, batch) -> scalar`.
    batches: a Grain `IterDataset` of at least `steps` batches, each this process's part.
    evaluate: `(model, split) -> {metric: value}`, for the splits `valid` and `test`; the same in
      every process.
    baselines: returns, in the main process, each baseline's metrics or a function that fits it.
      The functions run after `result.json` is written, in a process of their own; see
      `isolation.outcomes`. One that fails is named in the result and costs nothing else.
    data_sha256: hashes of the data by file.
    mesh: from `hosts.start`; everything but the tables is copied to all of its devices.

  Returns:
    The content of result.json.

  Raises:
    FloatingPointError: the loss is not finite.
    FileNotFoundError: the processes do not share the workdir.
    UserError: another process trains in the workdir.
    Stopped: Ctrl-C; says at which step, and how to go on.
  """
  workdir = Path(workdir).resolve()
  progress = _Progress()
  with _held(config, workdir), _stoppable(config, workdir, progress):
    if not hosts.everywhere((workdir / "config.json").exists()):
      raise MissingFileError(
        f"not every process sees the config.json that process 0 has written to {workdir}: "
        "--workdir must be a folder that all hosts share"
      )
    result = hosts.from_main(lambda: _result(workdir))
    if result is not None and _is_complete(result):  # another run has ended since
      return result
    if result is None:
      state = {"model": model, "optimizer": optimizer}
      hosts.replicate(mesh, *state.values())
      tested_step, metrics = _train(
        config, workdir, progress, iter(batches), mesh, loss_fn, evaluate, state
      )
      result = {
        "recipe": recipe,
        "config": _plain(config),
        "seed": config.seed,
        "steps": progress.step,
        "tested_step": tested_step,
        "seconds": progress.seconds,
        "metrics": metrics,
        "baselines": {},
        "failed_baselines": {},
        "device": results.device(),
        "versions": results.versions(),
        "data_sha256": dict(data_sha256),
        "pending_baselines": {},
      }
    return hosts.from_main(lambda: _with_baselines(workdir, result, baselines))


def _train(
  config,
  workdir: Path,
  progress: _Progress,
  iterator: Any,
  mesh: jax.sharding.Mesh | None,
  loss_fn: Callable,
  evaluate: Callable,
  state: dict[str, Any],
) -> tuple[int, dict[str, float]]:
  """Trains from the latest checkpoint on; returns the step of the tested state and its metrics."""
  with _manager(workdir / "checkpoints", progress) as manager:
    # Said by one process: another may still see an older listing of the shared folder.
    if (latest := hosts.from_main(manager.latest_step)) is not None:
      _say(f"{workdir}: going on from step {latest}")
      vars(progress).update(_restore(manager, latest, state))
      iterator.set_state(progress.data)
    with _journal(config, workdir, progress.step) as journal:
      _run(config, progress, iterator, mesh, loss_fn, evaluate, journal, manager, state)
    tested_step = progress.best_step if config.select else progress.step
    _say(f"testing the state of step {tested_step}")
    if tested_step != progress.step:
      _restore(manager, tested_step, state)
    model = state["model"]
    metrics = _named("valid", evaluate(model, "valid")) | _named("test", evaluate(model, "test"))
  return tested_step, metrics


def _with_baselines(
  workdir: Path, result: dict[str, Any], baselines: Callable[[], Mapping[str, Baseline]]
) -> dict[str, Any]:
  """Writes the result, then once more after every baseline; returns it complete.

  While `pending_baselines` is there it is not: the same command fits those that are missing. Its
  values count how often each was begun.
  """
  path = workdir / "result.json"
  arrays.write_json(path, result)
  _say("fitting the baselines")
  asked, known, failed = baselines(), result["baselines"], result["failed_baselines"]
  known |= {name: dict(each) for name, each in asked.items() if not callable(each)}
  begun = result["pending_baselines"]
  for name in [name for name, attempts in begun.items() if attempts >= _MAX_ATTEMPTS]:
    failed[name] = f"the run ended {_MAX_ATTEMPTS} times while it was fitted"
  tasks: dict[str, Any] = {n: f for n, f in asked.items() if n not in known and n not in failed}
  outcomes = isolation.outcomes(tasks)
  for name in tasks:
    begun[name] = begun.get(name, 0) + 1
    arrays.write_json(path, result)
    value, failure = next(outcomes)
    if failure is None:
      known[name] = value
    else:
      _say(f"baseline {name} failed: {failure}")
      failed[name] = failure
    begun.pop(name)
  result["baselines"] = {name: known[name] for name in asked if name in known}
  del result["pending_baselines"]
  if not failed:
    del result["failed_baselines"]
  arrays.write_json(path, result)
  return result


@contextlib.contextmanager
def _held(config, workdir: Path) -> Iterator[None]:
  """Holds the workdir, in the main process for all of them, and notes the config in it."""
  locks = []

  def begin() -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    locks.append(_acquire(workdir))
    _check_config(config, workdir)  # again: another run may have begun, and ended, since
    arrays.write_json(workdir / "config.json", _plain(config))

  try:
    hosts.from_main(begin)
    yield
  finally:
    for lock in locks:
      lock.release()


@contextlib.contextmanager
def _stoppable(config, workdir: Path, progress: _Progress) -> Iterator[None]:
  """Says where Ctrl-C has stopped a run, and from where it goes on."""
  try:
    yield
  except KeyboardInterrupt:
    if (workdir / "result.json").exists():
      text = "stopped while fitting the baselines; the same command fits those that are missing"
    else:
      names = (path.name for path in (workdir / "checkpoints").glob("*"))
      latest = max((int(name) for name in names if name.isdecimal()), default=0)
      text = f"stopped at step {progress.step} of {config.steps}; the same command goes on from "
      text += f"step {latest}"
    raise Stopped(text) from None


def _say(text: str) -> None:
  if hosts.is_main():
    print(text, file=sys.stderr, flush=True)


def _journal(config, workdir: Path, step: int) -> Journal | Silence:
  if not hosts.is_main():
    return Silence()
  return Journal(workdir, step=step, steps=config.steps, batch_size=config.batch_size)


def make_train_step(loss_fn: Callable[[Any, Any], jax.Array]) -> Callable[..., jax.Array]:
  """Returns the compiled `(model, optimizer, batch) -> loss`, which trains both in place."""

  # Donation lets the tables be updated in their own memory; without it a step copies every table.
  @nnx.jit(donate_argnames=("model", "optimizer"))
  def train_step(model, optimizer, batch):
    loss, grads = embed.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

  return train_step


def make_pipelined_step(loss_fn: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
  """Returns the compiled `(model, optimizer, ahead, batch, next_batch) -> (loss, ahead)`.

  It trains on `batch`, whose lookups are `ahead` (None: not made yet), and beside that looks up
  `next_batch` (None: no further), without this step's update; see `embed.look_ahead`.
  """

  @nnx.jit(donate_argnames=("model", "optimizer"))
  def train_step(model, optimizer, ahead, batch, next_batch):
    loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, batch)
    ahead = None if next_batch is None else embed.look_ahead(loss_fn)(model, next_batch)
    optimizer.update(model, grads)
    return loss, ahead

  return train_step


class _Steps:
  """Takes one step after another, pipelined or not."""

  def __init__(self, loss_fn: Callable, batches: Iterator[Any], pipelined: bool):
    make = make_pipelined_step if pipelined else make_train_step
    self._step, self._batches, self._pipelined = make(loss_fn), batches, pipelined
    self._pending: Any = None  # the batch that was looked up ahead
    self._ahead: embed.Ahead | None = None

  def take(self, state: Mapping[str, Any], pause: bool) -> jax.Array:
    """Trains on the next batch; returns its loss. At a pause nothing is left pending."""
    args = state["model"], state["optimizer"]
    if not self._pipelined:
      return self._step(*args, next(self._batches))
    batch = next(self._batches) if self._ahead is None else self._pending
    self._pending = None if pause else next(self._batches)
    loss, self._ahead = self._step(*args, self._ahead, batch, self._pending)
    return loss


def _run(
  config,
  progress: _Progress,
  iterator: Iterator,
  mesh: jax.sharding.Mesh | None,
  loss_fn: Callable,
  evaluate: Callable,
  journal: Journal | Silence,
  manager: ocp.CheckpointManager,
  state: dict[str, Any],
) -> None:
  """Takes the steps that are left, up to the last one or until validation stops improving."""
  model = state["model"]
  batches = (hosts.to_global(mesh, batch) for batch in iterator)
  steps = _Steps(loss_fn, batches, config.get("pipelined", False))
  every = lambda period, step: bool(period) and step % period == 0
  began = time.perf_counter() - progress.seconds
  losses: list[Any] = list(progress.losses)  # on the device; fetched only where they are needed
  journal.doing("compiling")
  while progress.step < config.steps and not progress.stopped:
    progress.step += 1
    last = progress.step == config.steps
    evaluated = last or every(config.eval_every, progress.step)
    saved = evaluated or every(config.checkpoint_every, progress.step)
    losses.append(steps.take(state, pause=saved))
    journal.stepped()
    if last or every(config.log_every, progress.step):
      journal.log_train({"loss": _mean(losses, progress.step)} | _reports(model))
      losses = []
    if evaluated:
      journal.doing("evaluating")
      scores = _named("valid", evaluate(model, "valid"))
      journal.log_eval(scores)
      _select(config, progress, scores)
    if saved:
      progress.losses = [float(loss) for loss in losses]
      progress.seconds = time.perf_counter() - began
      progress.data = iterator.get_state()  # type: ignore[attr-defined]
      journal.sync()
      journal.doing("saving")
      _save(manager, progress, state)
      journal.restart_clock()


def _select(config, progress: _Progress, scores: dict[str, float]) -> None:
  """Remembers the best evaluation so far, the later of two equal ones, and when to give up."""
  if not config.select:
    return
  if config.select not in scores:
    raise UserError(f"config.select is {config.select!r}; the metrics are {sorted(scores)}")
  score = _rank(config.select, scores)
  if progress.best is None or score >= progress.best:
    progress.best, progress.best_step, progress.stale = score, progress.step, 0
  else:
    progress.stale += 1
  progress.stopped = bool(config.patience) and progress.stale >= config.patience


def _rank(select: str, scores: Mapping[str, float]) -> float:
  return -scores[select] if select.endswith("loss") else scores[select]


def _mean(losses: list[Any], step: int) -> float:
  mean = float(np.mean([float(loss) for loss in losses], dtype=np.float64))
  if not np.isfinite(mean):
    raise DivergedError(
      f"the loss is {mean} before step {step}: lower the learning rates, or clip the gradients"
    )
  return mean


class _LatestAndBest(preservation_policy.PreservationPolicy):
  """Keeps the latest checkpoint and the best one, which a restart knows from its progress.

  Orbax's own ranking goes by metrics that it forgets when a process ends.
  """

  def __init__(self, progress: _Progress):
    self._progress = progress

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    latest = max((info.step for info in checkpoints), default=None)
    return [info.step in (latest, self._progress.best_step) for info in checkpoints]


def _manager(folder: Path, progress: _Progress) -> ocp.CheckpointManager:
  return ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=_LatestAndBest(progress),
      # On CPU an asynchronous save reads the very buffers that the next, donated, step overwrites.
      enable_async_checkpointing=False,
    ),
    # Given here, since what a checkpoint holds is asked for before it is restored.
    item_handlers={
      "state": ocp.StandardCheckpointHandler(),
      "progress": ocp.JsonCheckpointHandler(),
    },
  )


def _save(manager: ocp.CheckpointManager, progress: _Progress, state: dict[str, Any]) -> None:
  items = ocp.args.Composite(
    state=ocp.args.StandardSave(embed.checkpoint.to_tree(**state)),
    progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
  )
  try:
    manager.save(progress.step, args=items, force=True)
  except Exception as error:
    if os.strerror(errno.ENOSPC) not in str(error):
      raise
    # Of the libraries below each has an exception of its own for a full disk.
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(manager.directory)) from error


def _restore(manager: ocp.CheckpointManager, step: int, state: dict[str, Any]) -> dict[str, Any]:
  """Loads a checkpoint into model and optimizer, and returns the progress saved with it.

  Raises:
    UserError: it is of other tables or parameters; names them, with both shapes.
  """
  with from_settings():  # before Orbax, which would advise to pad or cut tables
    embed.checkpoint.check(manager.item_metadata(step).state.tree, **state)
  like = embed.checkpoint.like(**state)
  items = ocp.args.Composite(state=ocp.args.StandardRestore(like), progress=ocp.args.JsonRestore())
  restored = manager.restore(step, args=items)
  embed.checkpoint.from_tree(restored.state, **state)
  return restored.progress


def _reports(model: nnx.Module) -> dict[str, float]:
  """Returns what the model's SparseEmbeds report: dropped ids added up, of all else the largest."""
  found: dict[str, list[float]] = {}
  for _, module in nnx.iter_modules(model):
    if isinstance(module, embed.SparseEmbed):
      for name, value in module.report.get_value().items():
        found.setdefault(name, []).append(np.asarray(value).item())
  return {name: sum(v) if name == "dropped_ids" else max(v) for name, v in found.items()}


def _named(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
  return {f"{split}_{name}": float(value) for name, value in metrics.items()}


def _plain(config) -> dict[str, Any]:
  """Returns the config as JSON would give it back: tuples are lists."""
  return json.loads(json.dumps(config.to_dict()))
