"""The checkpoints of a run: model and optimizer, in full or as deltas, and the loop's progress.

    checkpoints/20/                full: tables and everything else, as Orbax stores arrays
    checkpoints/30/                a delta: the rows that changed since step 20, and the rest
    checkpoints/30/manifest.json   the loop's progress, the step that the delta follows, and the
                                   checksum of every file; see `recipes.arrays`

Orbax gives a checkpoint its name when all processes have written their parts and the manifest is
there. A checkpoint does not know how many devices or processes wrote it: tables are saved by name.
A **chain** is what makes up the state of a step: a full checkpoint and the deltas after it.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import embed
import embed.checkpoint

from .. import arrays, hosts
from ..errors import DamagedFileError, MissingFileError, UserError, from_settings

_STATE, _DELTA = "state", "delta"  # the folders of a checkpoint
_DAMAGED = "damaged_checkpoints"  # next to the folder of the checkpoints
_SCHEMA = {"follows": (int, None), "progress": {"step": int, "best_step": int}}


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
  """Writes the checkpoints of a run that is going on; a context manager.

  Args:
    full_every: every so many saves are full, and those in between are deltas.
  """

  def __init__(self, folder: Path, *, full_every: int = 1):
    self.folder, self._full_every = folder, full_every
    self._fingerprints: embed.deltas.Fingerprints | None = None  # of the last checkpoint's rows
    self._num_deltas = 0  # since the last full checkpoint
    self._about: dict[str, Any] = {}  # of the last save
    self._orbax = ocp.CheckpointManager(
      folder,
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        preservation_policy=self,
        async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
      ),
      item_handlers={_STATE: ocp.StandardCheckpointHandler(), _DELTA: _DeltaHandler()},
    )

  def __enter__(self) -> "Manager":
    return self

  def __exit__(self, *exception: object) -> None:
    try:
      self.wait()
    finally:
      self._orbax.close()

  def wait(self) -> None:
    """Returns when the last save is on the disk.

    Raises:
      OSError: the disk is full; names the folder.
    """
    with _full_disk_named(self.folder):
      self._orbax.wait_until_finished()

  def newest(self) -> list[int]:
    """Returns the chain of the newest checkpoint that can be used, empty if there is none at all.

    Later ones, which are damaged, are moved to `damaged_checkpoints` in the workdir, and that is
    said on stderr: a run that resumes writes its own.

    Raises:
      UserError: there are checkpoints, and none can be used.
    """

    def choose() -> list[int]:
      chain = newest(self.folder)
      for later in steps(self.folder):
        if chain and later > chain[-1]:
          target = self.folder.parent / _DAMAGED / str(later)
          shutil.rmtree(target, ignore_errors=True)
          target.parent.mkdir(exist_ok=True)
          (self.folder / str(later)).rename(target)
          hosts.say(f"the checkpoint of step {later} has been moved to {target}")
      return chain

    # One process decides: another may still see an older listing of the shared folder.
    chain = hosts.from_main(choose)
    self._orbax.reload()
    return chain

  def restore(self, chain: Sequence[int], **nodes: Any) -> Progress:
    """Loads a checkpoint of this run; arguments and errors are as of `restore`."""
    self.wait()
    restore(self.folder, chain, **nodes)
    self._num_deltas = len(chain) - 1
    if self._full_every > 1:
      self._fingerprints = embed.deltas.fingerprint(chain[-1], **nodes)
    about = arrays.read_manifest(self.folder / str(chain[-1]), _SCHEMA)
    return Progress(**about["progress"])

  def save(self, progress: Progress, **nodes: Any) -> None:
    """Saves progress, model and optimizer at the current step: in full, or what has changed.

    On an accelerator files are written while training goes on: the arrays have been copied to the
    host when this returns. On CPU it waits, since Orbax would read the very buffers that the next,
    donated, step overwrites, and they would have to be copied before. For a table of 1M x 64 with
    Adagrad's slots (512 MB, 2 cores) a save takes 1.6 to 2.0 s. Copied and written in the
    background, it stops training for 0.3 to 0.6 s and slows the steps down by another 0.1 to 1.4 s:
    too little for twice the memory.

    Args:
      progress: whose `step` names the checkpoint, and whose `best_step` is kept.
      **nodes: "model" and "optimizer".

    Raises:
      OSError: the disk is full; names the folder.
    """
    self.wait()
    since = self._fingerprints if self._num_deltas + 1 < self._full_every else None
    fingerprints = None
    if since is not None:
      delta, fingerprints = embed.deltas.changes(since, progress.step, **nodes)
      items = {_DELTA: _DeltaArgs(delta)}
    else:
      items = {_STATE: ocp.args.StandardSave(embed.checkpoint.to_tree(**nodes))}
      if self._full_every > 1:
        fingerprints = embed.deltas.fingerprint(progress.step, **nodes)
    follows = None if since is None else since.step
    self._about = {"follows": follows, "progress": dataclasses.asdict(progress)}
    with _full_disk_named(self.folder):
      self._orbax.save(progress.step, args=ocp.args.Composite(**items), force=True)
    self._fingerprints = fingerprints
    self._num_deltas = 0 if since is None else self._num_deltas + 1
    if not _is_asynchronous():
      self.wait()

  def _write_manifest(self) -> None:
    """Writes the manifest of a save, in the main process, before Orbax gives it its name."""
    step, follows = self._about["progress"]["step"], self._about["follows"]
    (partial,) = self.folder.glob(f"{step}.orbax-checkpoint-tmp*")
    size = arrays.write_manifest(partial, self._about)
    if self._full_every > 1:
      since = "in full" if follows is None else f"since step {follows}"
      hosts.say(f"saved step {step} {since}: {size / 1e6:.1f} MB")

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Tells Orbax which checkpoints the last two or the best one need.

    Two, so that a damaged one costs the steps since the one before. The best one that the earlier
    of them knew is kept with it. Orbax asks at a save, and removes the others when it is finished.
    """
    del context
    held = [info.step for info in checkpoints]
    needed: set[int] = set()
    pending = list(held[-2:])
    if best_step := self._about["progress"]["best_step"]:  # no evaluation is of step 0
      pending.append(best_step)
    while pending:
      step = pending.pop()
      if step in needed or step not in held:
        continue
      needed.add(step)
      about = self._about
      if step != held[-1]:
        try:
          about = arrays.read_manifest(self.folder / str(step), _SCHEMA)
        except UserError:
          continue  # it is damaged, and needs nothing
      if about["follows"] is not None:
        pending.append(about["follows"])
      if step in held[-2:] and about["progress"]["best_step"]:
        pending.append(about["progress"]["best_step"])
    return [step in needed for step in held]


def _is_asynchronous() -> bool:
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


# --- reading --------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
  """Returns the steps of all checkpoints in a folder, ascending, damaged or not."""
  names = (path.name for path in folder.glob("*") if path.is_dir())
  return sorted(int(name) for name in names if name.isdecimal())


def newest(folder: Path) -> list[int]:
  """Returns the chain of the newest checkpoint that can be used; empty if there is none at all.

  Every file of it is as it was written. stderr has what is passed over, and why.

  Raises:
    UserError: there are checkpoints, and none can be used.
  """
  chain, faults = list[int](), list[str]()
  for step in reversed(steps(folder)):
    try:
      chain = of_step(folder, step)
    except DamagedFileError as error:
      faults.append(str(error))
    else:
      break
  if faults and not chain:
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
    DamagedFileError: a file has changed, is missing, or was added; names it.
  """
  chain = [step]
  try:
    while True:
      path = folder / str(chain[0])
      follows = arrays.check_manifest(path, _SCHEMA)["follows"]
      if follows is None:
        return chain
      if not 0 <= follows < chain[0]:
        raise DamagedFileError(
          f"{path / arrays.MANIFEST} follows step {follows}, which is not an earlier one"
        )
      chain.insert(0, follows)
  except (DamagedFileError, MissingFileError) as error:
    raise DamagedFileError(
      f"the checkpoint of step {step} is damaged: {error}. Put the file back from a copy, or train "
      "again in another --workdir"
    ) from error


def base(folder: Path, chain: Sequence[int]) -> Path:
  """Returns the folder of a chain's full tree of arrays, which Orbax reads."""
  return folder / str(chain[0]) / _STATE


def deltas(folder: Path, chain: Sequence[int]) -> list[embed.deltas.Delta]:
  """Reads the deltas of a chain, in their order."""
  return [embed.deltas.read(folder / str(step) / _DELTA) for step in chain[1:]]


def restore(folder: Path, chain: Sequence[int], **nodes: Any) -> None:
  """Loads a checkpoint into models and optimizers, on any devices.

  Args:
    chain: of the checkpoint, as `newest` or `of_step` has verified it.
    **nodes: "model", and "optimizer" if its state is wanted.

  Raises:
    UserError: the checkpoint holds other tables or parameters, which are named with both shapes.
  """
  with from_settings():  # before Orbax, which would advise to pad or cut tables
    embed.checkpoint.restore(base(folder, chain), **nodes)
  at = chain[0]
  for delta in deltas(folder, chain):
    at = embed.deltas.apply(delta, at, **nodes)
