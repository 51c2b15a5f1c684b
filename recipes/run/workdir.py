"""The folder of a run, the workdir: its config, its lock, its result.

    config.json      the settings; only those of `settings.MAY_CHANGE` may differ later. `decided`
                     in it has those that the data have decided, as a batch size of 0
    run.log          everything that the run printed, with times
    metrics.jsonl    one line per log step and per evaluation
    tensorboard/     the same for TensorBoard
    checkpoints/     the last two states and the best on validation: see `recipes.run.checkpoints`
    damaged_checkpoints/    those that could not be used when the run resumed
    result.json      written when the state has been tested; `recipes.baselines` adds to it
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

from .. import arrays, files, hosts, schemas
from ..errors import UserError
from . import checkpoints, keeping, settings

_LOCK, DECIDED = "run.lock", "decided"
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


def is_of(result: Mapping[str, Any], config) -> bool:
  """Returns whether a result is of a run as long as configured."""
  stored, wanted = result["config"], plain(config)
  return all(stored.get(name) == wanted.get(name) for name in settings.LENGTH)


def has_checkpoint(workdir: Path) -> bool:
  """Returns whether a run has saved a state."""
  return bool(checkpoints.steps(workdir / "checkpoints"))


def set_aside(workdir: Path, config) -> None:
  """Renames the result of a run that is lengthened, to `result-<steps>.json`.

  Raises:
    UserError: another process has finished the run of this config since `finished`.
  """
  stale = result(workdir)
  if stale is not None and is_of(stale, config):
    raise UserError(f"another process has finished {workdir}: the same command shows its result")
  if stale is not None:
    (workdir / "result.json").rename(workdir / f"result-{stale['steps']}.json")


def finished(config, workdir: str | Path) -> dict[str, Any] | None:
  """Returns the result if the workdir's run has ended already, and None if there is work to do.

  Call it first, after `hosts.start`: a finished run then reports without loading any data, and a
  workdir that `held` would reject is rejected at once. The main process decides for all.

  Args:
    config: of the run, as asked for.
    workdir: of the run.

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
  if known is None or not is_of(known, config):
    _check_writable(workdir)
    return None
  hosts.say(f"{workdir} holds a run that has ended. To train again, choose another --workdir.")
  return known


def _check_config(config, workdir: Path) -> None:
  wanted, path = plain(config), workdir / "config.json"
  # What has failed before its first checkpoint, as by a typo in a setting, binds nobody.
  if not path.exists() or not (has_checkpoint(workdir) or (workdir / "result.json").exists()):
    return
  stored, unset = arrays.read_json(path, _REMOVE, {}), object()
  shown = lambda value: "not set" if value is unset else f"{value!r:.200}"
  differing = [
    f"{name}: {shown(old)} there, {shown(new)} now"
    for name in sorted((stored.keys() | wanted.keys()) - {*settings.MAY_CHANGE, DECIDED})
    for old, new in _differences(stored.get(name, unset), wanted.get(name, unset))
  ]
  if differing:
    raise UserError(
      f"{workdir} holds a run of another config ({'; '.join(differing)}). Choose another "
      f"--workdir, or remove that one. Only these may change: {', '.join(settings.MAY_CHANGE)}."
    )


def _differences(old: Any, new: Any) -> list[tuple[Any, Any]]:
  """Returns the pairs of values that differ; of two groups of settings, the settings that do."""
  if not isinstance(old, dict) or not isinstance(new, dict):
    return [(old, new)] if old != new else []
  differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
  part = lambda group: {name: group[name] for name in differ if name in group}
  return [(part(old), part(new))] if differ else []


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
def held(asked, config, workdir: Path) -> Iterator[None]:
  """Holds the workdir, in the main process for all of them, and writes config.json.

  Args:
    asked: the config of the run, as asked for.
    config: the same after the data have decided what it leaves open.
    workdir: of the run.

  Raises:
    UserError: another process trains in the workdir, or it holds a run of another config.
  """
  locks, chosen, written = [], plain(config), plain(asked)
  decided = {name: chosen[name] for name in settings.DECIDED if name in chosen}

  def begin() -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    locks.append(_acquire(workdir))
    _check_config(asked, workdir)  # a run may have begun, and ended, since `finished`
    arrays.write_json(workdir / "config.json", written | {DECIDED: decided})

  try:
    hosts.from_main(begin)
    yield
  finally:
    for lock in locks:
      lock.release()


def resumed(config, workdir: str | Path) -> Any:
  """Returns the config to prepare data and model with, of a run that may be resumed.

  A batch size of 0 is the one that the run began with, on any number of devices, and `init_from` is
  the run's own copy of the transforms that it started from; see `keeping.keep_base`.
  """
  workdir = Path(workdir)

  def stored() -> int:
    if config.get("batch_size") != 0 or not has_checkpoint(workdir):
      return 0
    return arrays.read_json(workdir / "config.json", _REMOVE, {})[DECIDED]["batch_size"]

  if batch_size := hosts.from_main(stored):
    config = settings.copied(config, batch_size=batch_size)
  return keeping.with_own_base(config, workdir)
