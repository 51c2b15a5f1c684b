"""The checkpoints of a run: what the loop remembers, model and optimizer; the latest and the best.

A checkpoint does not know how many devices or processes wrote it: tables are saved by name.
"""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

import embed
import embed.checkpoint

from .errors import from_settings


@dataclasses.dataclass
class Progress:
  """The state of the loop itself that has to survive a kill.

  Attributes:
    step: how many were taken.
    seconds: that they took.
    losses: since the last log line.
    best: the best selection score so far, None before the first evaluation.
    best_step: the step of that score.
    stale: evaluations since.
    stopped: whether validation has stopped improving.
    data: the position in the batches.
  """

  step: int = 0
  seconds: float = 0.0
  losses: list[float] = dataclasses.field(default_factory=list)
  best: float | None = None
  best_step: int = 0
  stale: int = 0
  stopped: bool = False
  data: dict[str, Any] = dataclasses.field(default_factory=dict)


class _LatestAndBest(preservation_policy.PreservationPolicy):
  """Keeps the latest checkpoint and the best one, which a restart knows from its progress.

  Orbax's own ranking goes by metrics that it forgets when a process ends.
  """

  def __init__(self, progress: Progress):
    self._progress = progress

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    latest = max((info.step for info in checkpoints), default=None)
    return [info.step in (latest, self._progress.best_step) for info in checkpoints]


def manager(folder: Path, progress: Progress) -> ocp.CheckpointManager:
  """Returns the manager of a run's checkpoints; a context manager.

  Args:
    folder: of the checkpoints.
    progress: of the run, whose `best_step` is kept.
  """
  return ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=_LatestAndBest(progress),
      # On CPU an asynchronous save reads the very buffers that the next, donated, step overwrites.
      enable_async_checkpointing=False,
    ),
    # The handlers tell `restore` what a checkpoint holds before it is opened.
    item_handlers={
      "state": ocp.StandardCheckpointHandler(),
      "progress": ocp.JsonCheckpointHandler(),
    },
  )


def save(manager: ocp.CheckpointManager, progress: Progress, state: dict[str, Any]) -> None:
  """Saves progress, model and optimizer at the current step.

  Args:
    manager: as `manager` returns it.
    progress: whose `step` names the checkpoint.
    state: `{"model": ..., "optimizer": ...}`.

  Raises:
    OSError: the disk is full; names the folder.
  """
  items = ocp.args.Composite(
    state=ocp.args.StandardSave(embed.checkpoint.to_tree(**state)),
    progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
  )
  try:
    manager.save(progress.step, args=items, force=True)
  except Exception as error:
    # Each library below Orbax has an exception of its own for a full disk.
    if os.strerror(errno.ENOSPC) not in str(error):
      raise
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(manager.directory)) from error


def restore(manager: ocp.CheckpointManager, step: int, state: dict[str, Any]) -> dict[str, Any]:
  """Loads a checkpoint into model and optimizer, and returns the progress saved with it.

  Raises:
    UserError: it holds other tables or parameters; names them, with both shapes.
  """
  with from_settings():  # before Orbax, which would advise to pad or cut tables
    embed.checkpoint.check(manager.item_metadata(step).state.tree, **state)
  like = embed.checkpoint.like(**state)
  items = ocp.args.Composite(state=ocp.args.StandardRestore(like), progress=ocp.args.JsonRestore())
  restored = manager.restore(step, args=items)
  embed.checkpoint.from_tree(restored.state, **state)
  return restored.progress
