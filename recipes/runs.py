"""The folder of a run, the workdir: its config, its lock, its result, Ctrl-C and SIGTERM.

    config.json      the settings; only those of `settings.MAY_CHANGE` may differ later
    metrics.jsonl    one line per log step and per evaluation
    tensorboard/     the same for TensorBoard
    checkpoints/     the last two states and the best one on validation; see `recipes.chains`
    damaged_checkpoints/    those that could not be used when the run went on
    result.json      written when the state has been tested; complete when the baselines are in it
    result-500.json  the result after 500 steps of a run that was lengthened then
    run.lock         held by the process that writes; a second run in the folder is refused

Several processes share one workdir: the main one writes the files, all of them the checkpoints.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from . import arrays, chains, files, hosts, preemption, schemas, settings
from .checkpoints import Progress
from .errors import Preempted, Stopped, UserError

_LOCK = "run.lock"
_REMOVE = ": remove it, and the same command writes it again"


def plain(config) -> dict[str, Any]:
  """Returns the config as JSON would give it back: tuples are lists."""
  return json.loads(json.dumps(config.to_dict()))


def result(workdir: Path) -> dict[str, Any] | None:
  """Returns the content of result.json, or None before it is written.

  Raises:
    DamagedFileError: it is not JSON, or lacks what every result has.
  """
  path = workdir / "result.json"
  return arrays.read_json(path, _REMOVE, schemas.RESULT) if os.path.lexists(path) else None


def is_complete(result: Mapping[str, Any]) -> bool:
  """Returns whether the baselines are in a result."""
  return "pending_baselines" not in result


def is_of(result: Mapping[str, Any], config) -> bool:
  """Returns whether a result is of a run as long as configured."""
  stored, wanted = result["config"], plain(config)
  return all(stored.get(name) == wanted.get(name) for name in settings.LENGTH)


def has_checkpoint(workdir: Path) -> bool:
  """Returns whether a run has saved a state."""
  return bool(chains.steps(workdir / "checkpoints"))


def set_aside(workdir: Path) -> None:
  """Renames the result of a run that is going on, to `result-<steps>.json`."""
  stale = result(workdir)
  if stale is not None:
    (workdir / "result.json").rename(workdir / f"result-{stale['steps']}.json")


def finished(config, workdir: str | Path) -> dict[str, Any] | None:
  """Returns the result if the workdir's run has ended already, and None if there is work to do.

  Call it first, after `hosts.start`: a finished run then reports without loading any data, and a
  workdir that `held` would refuse is refused at once. The main process decides for all.

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
  known = result(workdir)
  if known is None or not is_complete(known) or not is_of(known, config):
    _check_writable(workdir)
    return None
  hosts.say(f"{workdir} holds a run that has ended. To train again, choose another --workdir.")
  for name, failure in known.get("failed_baselines", {}).items():
    hosts.say(f"its baseline {name} failed: {failure}. To fit it again, remove its result.json.")
  return known


def _check_config(config, workdir: Path) -> None:
  wanted, path = plain(config), workdir / "config.json"
  # What has failed before its first checkpoint, as by a typo in a setting, binds nobody.
  if not path.exists() or not (has_checkpoint(workdir) or (workdir / "result.json").exists()):
    return
  stored = arrays.read_json(path, _REMOVE, {})
  missing = object()  # of an earlier version, or not set: the default
  # Only tables have these.
  defaults = settings.defaults() | {"days": "", "days_window": 0, "on_bad_row": "raise"}
  value_of = lambda known, name: known.get(name, defaults.get(name, missing))
  shown = lambda value: "not set" if value is missing else repr(value)
  differing = [
    f"{name}: {shown(value_of(stored, name))} there, {shown(value_of(wanted, name))} now"
    for name in sorted((stored.keys() | wanted.keys()) - set(settings.MAY_CHANGE))
    if value_of(stored, name) != value_of(wanted, name)
  ]
  if differing:
    raise UserError(
      f"{workdir} holds a run of another config ({'; '.join(differing)}). Choose another "
      f"--workdir, or remove that one. Only these may change: {', '.join(settings.MAY_CHANGE)}."
    )


def _check_writable(workdir: Path) -> None:
  parent = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
  if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
    raise UserError(
      f"--workdir={workdir} cannot be written to, because {parent} cannot: choose another one"
    )
  if (workdir / _LOCK).exists():
    _acquire(workdir).release()


def _acquire(workdir: Path) -> filelock.BaseFileLock:
  try:
    return files.acquire(workdir / _LOCK, wait=False)
  except filelock.Timeout:
    raise UserError(
      f"another process trains in {workdir}: wait for it to end, or choose another --workdir"
    ) from None


@contextlib.contextmanager
def held(config, workdir: Path) -> Iterator[None]:
  """Holds the workdir, in the main process for all of them, and writes config.json.

  Raises:
    UserError: another process trains in the workdir, or it holds a run of another config.
  """
  locks = []

  def begin() -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    locks.append(_acquire(workdir))
    _check_config(config, workdir)  # a run may have begun, and ended, since `finished`
    arrays.write_json(workdir / "config.json", plain(config))

  try:
    hosts.from_main(begin)
    yield
  finally:
    for lock in locks:
      lock.release()


@contextlib.contextmanager
def stoppable(config, workdir: Path, progress: Progress) -> Iterator[None]:
  """Says after Ctrl-C or SIGTERM at which step a run has stopped, and from which it goes on.

  Raises:
    Stopped: in place of KeyboardInterrupt.
    Preempted: SIGTERM; at once, but for the steps of `preemption.Notice`.
  """
  try:
    with preemption.raised():
      yield
  except KeyboardInterrupt as stop:
    known = result(workdir)
    if known is not None and is_of(known, config):
      text = "stopped while fitting the baselines; the same command fits those that are missing"
    else:
      latest = max(chains.steps(workdir / "checkpoints"), default=0)
      text = f"stopped at step {progress.step} of {config.steps}; the same command goes on from "
      text += f"step {latest}"
    raise (Preempted if isinstance(stop, Preempted) else Stopped)(text) from None
