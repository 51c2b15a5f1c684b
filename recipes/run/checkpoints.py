"""The checkpoints of a run: what the loop remembers, model and optimizer, in full or as deltas.

    checkpoints/20/                full: tables and everything else, as Orbax stores arrays
    checkpoints/30/                a delta: the rows that changed since step 20, and the rest
    checkpoints/30/manifest.json   the checksum of every file, written last: see `manifest`

A checkpoint does not know how many devices or processes wrote it: tables are saved by name. It
counts from the moment that its manifest is written. A **chain** is what makes up the state of a
step: a full checkpoint and the deltas after it.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import embed
import embed.checkpoint

from .. import hosts, manifest, schemas
from ..errors import DamagedFileError, MissingFileError, UserError, from_settings

STATE, DELTA, _PROGRESS = "state", "delta", "progress"  # the folders of a checkpoint
_DAMAGED = "damaged_checkpoints"  # next to the folder of the checkpoints
_REMOVED = ".removed"


@dataclasses.dataclass
class Progress:
  """The state of the loop itself that has to survive a kill.

  Attributes:
    step: how many were taken.
    seconds: that they took.
    logged: values since the last log line, by name.
    best: the best selection score so far, None before the first evaluation.
    best_step: the step of that score.
    scores: the metrics of that evaluation, or without a selection of the last one.
    stale: evaluations since.
    stopped: whether validation has stopped improving.
    data: the position in the batches.
  """

  step: int = 0
  seconds: float = 0.0
  logged: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  best: float | None = None
  best_step: int = 0
  scores: dict[str, float] = dataclasses.field(default_factory=dict)
  stale: int = 0
  stopped: bool = False
  data: dict[str, Any] = dataclasses.field(default_factory=dict)


class _DeltaHandler(ocp.CheckpointHandler):
  """Makes a delta an item of Orbax's checkpoints, which appear when all processes have written."""

  def save(self, directory, args: "_DeltaArgs") -> None:
    embed.deltas.write(directory, args.delta)

  def restore(self, directory, args: Any = None) -> embed.deltas.Delta:
    del args
    return embed.deltas.read(directory)


@ocp.args.register_with_handler(_DeltaHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _DeltaArgs(ocp.args.CheckpointArgs):
  delta: embed.deltas.Delta


class Manager:
  """The checkpoints of a run that is going on; a context manager.

  Args:
    folder: of the checkpoints.
    full_every: every so many saves are full, and those in between are deltas.

  Attributes:
    orbax: writes and reads the items of checkpoints.
    fingerprints: of the last checkpoint's rows, if the next one may be a delta.
    num_deltas: since the last full checkpoint.
  """

  def __init__(self, folder: Path, *, full_every: int = 1):
    self.folder, self.full_every = folder, full_every
    self.fingerprints: embed.deltas.Fingerprints | None = None
    self.num_deltas = 0
    self._thread = ThreadPoolExecutor(1)
    self._finishing: Future[None] | None = None
    # Orbax removes nothing: see `_prune`.
    self.orbax = ocp.CheckpointManager(
      folder,
      options=ocp.CheckpointManagerOptions(enable_async_checkpointing=_is_asynchronous()),
      # The handlers tell what a checkpoint holds before it is opened.
      item_handlers={
        STATE: ocp.StandardCheckpointHandler(),
        DELTA: _DeltaHandler(),
        _PROGRESS: ocp.JsonCheckpointHandler(),
      },
    )

  def __enter__(self) -> "Manager":
    return self

  def __exit__(self, *exception: object) -> None:
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self.orbax.close()

  def wait(self) -> None:
    """Returns when the last save is on the disk, with its manifest.

    Raises:
      OSError: the disk is full; names the folder.
    """
    finishing, self._finishing = self._finishing, None
    with _full_disk_named(self.folder):
      if finishing is not None:
        finishing.result()
      self.orbax.wait_until_finished()

  def newest(self) -> list[int]:
    """Returns the chain of the newest checkpoint that can be used, empty if there is none at all.

    Later ones, which are damaged, are moved out of the way, and that is said on stderr.

    Raises:
      UserError: there are checkpoints, and none can be used.
    """

    def choose() -> list[int]:
      remove_parts(self.folder)
      chain = newest(self.folder)
      set_aside(self.folder, chain[-1] if chain else -1)
      return chain

    # One process decides: another may still see an older listing of the shared folder.
    chain = hosts.from_main(choose)
    self.orbax.reload()
    return chain

  def read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
    """Returns an item of a checkpoint."""
    return self.orbax.restore(step, args=ocp.args.Composite(**{item: args}))[item]

  def finish(self, about: dict[str, Any]) -> None:
    """Writes the manifest of a save when it is committed, then removes what is not needed.

    Args:
      about: what the manifest holds but the files: "step", "follows" (the step that a delta begins
        from, None for a full checkpoint) and "best_step".
    """
    if hosts.is_main():
      self._finishing = self._thread.submit(self._finish, about)
    if not _is_asynchronous():
      self.wait()

  def _finish(self, about: dict[str, Any]) -> None:
    self.orbax.wait_until_finished()
    size = manifest.write(self.folder / str(about["step"]), about)
    if self.full_every > 1:
      since = "in full" if about["follows"] is None else f"since step {about['follows']}"
      hosts.say(f"saved step {about['step']} {since}: {size / 1e6:.1f} MB")
    _prune(self.folder, about["best_step"])


def restore(manager: Manager, chain: Sequence[int], state: dict[str, Any]) -> dict[str, Any]:
  """Loads a checkpoint into model and optimizer; returns the progress saved with it.

  Args:
    manager: of the run.
    chain: of the checkpoint, as `Manager.newest` or `of_step` has verified it.
    state: `{"model": ..., "optimizer": ...}`.

  Raises:
    UserError: the checkpoint holds other tables or parameters, which are named with both shapes.
  """
  manager.wait()
  like = embed.checkpoint.like(**state)
  shapes = manager.orbax.item_metadata(chain[0])[STATE].tree
  with from_settings():  # before Orbax, which would advise to pad or cut tables
    embed.checkpoint.check(shapes, **state)
  tree = manager.read(chain[0], STATE, ocp.args.StandardRestore(like))
  progress = manager.read(chain[-1], _PROGRESS, ocp.args.JsonRestore())
  embed.checkpoint.from_tree(tree, **state)
  apply_deltas(manager.folder, chain, **state)
  manager.num_deltas = len(chain) - 1
  if manager.full_every > 1:
    manager.fingerprints = embed.deltas.fingerprint(chain[-1], **state)
  return progress


def save(manager: Manager, progress: Progress, state: dict[str, Any]) -> None:
  """Saves progress, model and optimizer at the current step: in full, or what has changed.

  Args:
    manager: of the run.
    progress: whose `step` names the checkpoint, and whose `best_step` is kept.
    state: `{"model": ..., "optimizer": ...}`.

  Raises:
    OSError: the disk is full; names the folder.
  """
  manager.wait()
  since = manager.fingerprints if manager.num_deltas + 1 < manager.full_every else None
  args: dict[str, Any] = {_PROGRESS: ocp.args.JsonSave(dataclasses.asdict(progress))}
  fingerprints = None
  if since is not None:
    delta, fingerprints = embed.deltas.changes(since, progress.step, **state)
    args[DELTA] = _DeltaArgs(delta)
  else:
    args[STATE] = ocp.args.StandardSave(embed.checkpoint.to_tree(**state))
    if manager.full_every > 1:
      fingerprints = embed.deltas.fingerprint(progress.step, **state)
  with _full_disk_named(manager.folder):
    manager.orbax.save(progress.step, args=ocp.args.Composite(**args), force=True)
  manager.fingerprints = fingerprints
  manager.num_deltas = 0 if since is None else manager.num_deltas + 1
  follows = None if since is None else since.step
  best_step = progress.best_step or None  # no evaluation is of step 0
  manager.finish({"step": progress.step, "follows": follows, "best_step": best_step})


def _is_asynchronous() -> bool:
  """Whether files are written while training goes on.

  On an accelerator the arrays have been copied to the host when a save returns. On CPU Orbax would
  read the very buffers that the next, donated, step overwrites, and they would have to be copied
  before. For a table of 1M x 64 with Adagrad's slots (512 MB, 2 cores) a save takes 1.6 to 2.0 s.
  Copied and written in the background, it stops training for 0.3 to 0.6 s and slows the steps down
  by another 0.1 to 1.4 s: too little for twice the memory.
  """
  return jax.default_backend() != "cpu"


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
  try:
    yield
  except Exception as error:
    # Each library below Orbax has an exception of its own for a full disk.
    if os.strerror(errno.ENOSPC) not in str(error):
      raise
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error


def apply_deltas(folder: Path, chain: Sequence[int], **nodes: Any) -> None:
  """Applies the deltas of a chain to models and optimizers that hold its full checkpoint."""
  at = chain[0]
  for delta in deltas(folder, chain):
    at = embed.deltas.apply(delta, at, **nodes)


# --- which checkpoints a folder holds, and which of them are valid --------------------------------


def steps(folder: Path) -> list[int]:
  """Returns the steps of all checkpoints in a folder, ascending, whole or not."""
  names = (path.name for path in folder.glob("*") if path.is_dir())
  return sorted(int(name) for name in names if name.isdecimal())


def base(folder: Path, chain: Sequence[int]) -> Path:
  """Returns the folder of a chain's full tree of arrays, which Orbax reads."""
  return folder / str(chain[0]) / STATE


def deltas(folder: Path, chain: Sequence[int]) -> list[embed.deltas.Delta]:
  """Reads the deltas of a chain, in their order."""
  return [embed.deltas.read(folder / str(step) / DELTA) for step in chain[1:]]


def newest(folder: Path) -> list[int]:
  """Returns the chain of the newest checkpoint that can be used; empty if none was completed.

  Every file of it is as it was written. stderr has what is passed over, and why. A folder in which
  no checkpoint was completed holds one at most, that of a first save that did not finish.

  Raises:
    UserError: there are checkpoints, and none can be used.
  """
  faults: list[str] = []
  found = steps(folder)
  is_damaged = len(found) > 1 or any((folder / str(x) / manifest.NAME).exists() for x in found)
  for step in reversed(found):
    try:
      chain = of_step(folder, step)
    except MissingFileError as error:
      faults.append(f"the checkpoint of step {step} is not complete: {error}")
    except DamagedFileError as error:
      faults.append(str(error))
    else:
      break
  else:
    chain = []
  if not chain and is_damaged:
    raise UserError(
      f"no checkpoint in {folder} can be used ({'; '.join(faults[:3])}): put the files back from a "
      "copy, or remove that folder to begin again"
    )
  for line in faults:
    hosts.say(line)
  return chain


def of_step(folder: Path, step: int) -> list[int]:
  """Returns the chain of a step, of which every file is as it was written.

  Raises:
    MissingFileError: a checkpoint of the chain, or its manifest, is missing; names it.
    DamagedFileError: a file has changed, is missing, or was added; names it.
  """
  try:
    return _verified(folder, step)
  except DamagedFileError as error:
    raise DamagedFileError(
      f"the checkpoint of step {step} is damaged: {error}. Put the file back from a copy, or train "
      "again in another --workdir"
    ) from error


def _verified(folder: Path, step: int) -> list[int]:
  chain = [step]
  while (
    follows := manifest.check(folder / str(chain[0]), schemas.CHECKPOINT)["follows"]
  ) is not None:
    if not 0 <= follows < chain[0]:
      path = folder / str(chain[0]) / manifest.NAME
      raise DamagedFileError(f"{path} follows step {follows}, which is not an earlier one")
    chain.insert(0, follows)
  return chain


def set_aside(folder: Path, step: int) -> None:
  """Moves the checkpoints after a step out of the way, to `damaged_checkpoints` in the workdir.

  A run that resumes from the step writes its own.
  """
  for later in steps(folder):
    if later > step:
      target = folder.parent / _DAMAGED / str(later)
      shutil.rmtree(target, ignore_errors=True)
      target.parent.mkdir(exist_ok=True)
      (folder / str(later)).rename(target)
      hosts.say(f"the checkpoint of step {later} has been moved to {target}")


def remove_parts(folder: Path) -> None:
  """Removes what kills have left of saves and of removals; call it where nobody else saves."""
  for pattern in ("*.orbax-checkpoint-tmp*", f"*{_REMOVED}"):
    for path in folder.glob(pattern):
      shutil.rmtree(path)


def _prune(folder: Path, best_step: int | None) -> None:
  """Removes the checkpoints that neither the last two nor the best one need.

  Two, so that a damaged one costs the steps since the one before. The best one that the earlier of
  them knew is kept with it.

  Args:
    folder: of the checkpoints, whose last one is complete.
    best_step: of the best one so far; None if there is none.
  """
  held = steps(folder)
  kept: set[int] = set()
  pending = [best_step, *held[-2:]]
  while pending:
    step = pending.pop()
    if step in kept or step not in held:
      continue
    kept.add(step)
    try:
      about = manifest.read(folder / str(step), schemas.CHECKPOINT)
    except UserError:  # without a manifest, or damaged
      continue
    pending += [about["follows"]] if about["follows"] is not None else []
    pending += [about["best_step"]] if step in held[-2:] else []
  for step in held:
    if step not in kept:  # renamed first: a kill leaves no part that looks like a whole
      (folder / str(step)).rename(folder / f"{step}{_REMOVED}")
  for path in folder.glob(f"*{_REMOVED}"):
    shutil.rmtree(path)
