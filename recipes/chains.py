"""Which checkpoints a run's folder holds, and which of them are whole.

    checkpoints/20/                full: tables and everything else, as Orbax stores arrays
    checkpoints/30/                a delta: the rows that changed since step 20, and the rest
    checkpoints/30/manifest.json   the checksum of every file: see `manifest`

A **chain** is what makes up the state of a step: a full checkpoint and the deltas after it.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import orbax.checkpoint as ocp

import embed

from . import hosts, manifest, schemas
from .errors import DamagedFileError, MissingFileError, UserError

STATE, DELTA = "state", "delta"  # the folders of a full checkpoint's arrays, and of a delta's
_DAMAGED = "damaged_checkpoints"  # next to the folder of the checkpoints
_REMOVED = ".removed"


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
  """Returns the chain of the newest checkpoint that can be used; empty if there is none at all.

  It is the newest one of which every file is as it was written. Only if there is no such
  checkpoint, the newest full one without a manifest is used, which earlier versions wrote. What is
  passed over, and why, is said on stderr.

  Raises:
    UserError: there are checkpoints, and none can be used.
  """
  chain, faults = _newest(folder)
  for line in faults:
    hosts.say(line)
  return chain


def _newest(folder: Path) -> tuple[list[int], list[str]]:
  """The chain of `newest`, and what to say."""
  faults: dict[int, str] = {}
  for step in reversed(steps(folder)):
    try:
      return _verified(folder, step), list(faults.values())
    except MissingFileError as error:
      faults[step] = f"the checkpoint of step {step} is not complete: {error}"
    except DamagedFileError as error:
      faults[step] = f"the checkpoint of step {step} is damaged: {error}"
  for step in faults:
    if _is_without_manifest(folder, step):
      faults[step] = _unverified(step)
      return [step], list(faults.values())[: list(faults).index(step) + 1]
  if faults:
    raise UserError(
      f"no checkpoint in {folder} can be used ({'; '.join(list(faults.values())[:3])}): put the "
      "files back from a copy, or remove that folder to begin again"
    )
  return [], []


def of_step(folder: Path, step: int) -> list[int]:
  """Returns the chain of a step, of which every file is as it was written.

  A full checkpoint without a manifest, which earlier versions wrote, is taken as it is; that is
  said on stderr.

  Raises:
    MissingFileError: a checkpoint of the chain, or its manifest, is missing; names it.
    DamagedFileError: a file has changed, is missing, or was added; names it.
  """
  try:
    return _verified(folder, step)
  except (DamagedFileError, MissingFileError) as error:
    if _is_without_manifest(folder, step):
      hosts.say(_unverified(step))
      return [step]
    raise type(error)(
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


def _is_without_manifest(folder: Path, step: int) -> bool:
  path = folder / str(step)
  is_full = (path / STATE).is_dir() and not os.path.lexists(path / manifest.NAME)
  return is_full and ocp.utils.is_checkpoint_finalized(path)


def _unverified(step: int) -> str:
  return (
    f"the checkpoint of step {step} is used without verification: it has no {manifest.NAME}, as an "
    "earlier version wrote it, or the run was killed while it was finished"
  )


def set_aside(folder: Path, step: int) -> None:
  """Moves the checkpoints after a step out of the way, to `damaged_checkpoints` in the workdir.

  A run that goes on from the step writes its own.
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


def prune(folder: Path, best_step: int | None) -> None:
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
