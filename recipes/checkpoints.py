"""The checkpoints of a run: model and optimizer as Orbax stores them, the last two and the best.

    checkpoints/20/state/      tables by name, dense parameters, both optimizers' states
    checkpoints/20/metrics/    of the evaluation at this step, if there was one

A checkpoint is independent of the devices and processes that wrote it, and whole or not there.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

import embed.checkpoint

from . import mesh as mesh_lib
from .errors import from_settings
from .evaluation.metrics import gain

_STATE = "state"


def opened(workdir: epath.Path, select: str) -> ocp.CheckpointManager:
  """Returns the manager of a run's checkpoints, a context manager.

  It keeps the last two checkpoints, and with `select`, a metric of validation, the best one: of
  equally good ones the latest.

  On CPU a save ends when its files are written: a save in the background would read the very
  buffers that the next step, whose arguments are donated, overwrites.
  """
  policies: list[Any] = [checkpoint_managers.LatestN(2)]
  score = (lambda metrics: gain(select, metrics[select])) if select else None
  if score:
    policies.append(
      checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
    )
  return ocp.CheckpointManager(
    workdir / "checkpoints",
    options=ocp.CheckpointManagerOptions(
      best_fn=score,
      preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
      enable_async_checkpointing=jax.default_backend() != "cpu",
      cleanup_tmp_directories=True,
    ),
    item_handlers={_STATE: ocp.PyTreeCheckpointHandler()},
  )


def save(
  manager: ocp.CheckpointManager,
  step: int,
  model: Any,
  optimizer: Any,
  metrics: dict[str, float],
  memory: dict[str, Any],
) -> None:
  """Saves model and optimizer after a step.

  Args:
    metrics: of the evaluation at this step; {} if there was none.
    memory: JSON values that a resumed run needs; see `log.Log.memory`.
  """
  tree = embed.checkpoint.to_tree(model=model, optimizer=optimizer)
  items = ocp.args.Composite(**{_STATE: ocp.args.PyTreeSave(tree)})
  manager.save(step, args=items, metrics=metrics or None, custom_metadata=memory, force=True)


def restore(
  manager: ocp.CheckpointManager, step: int | None = None, **nodes: Any
) -> tuple[int, dict[str, Any]]:
  """Loads a checkpoint, the latest by default; returns its step and memory, `(0, {})` of none.

  Args:
    **nodes: "model", and "optimizer" if its state is wanted, on any devices.

  Raises:
    UserError: the checkpoint holds other tables or parameters; names them with both shapes.
  """
  manager.wait_until_finished()
  if step is None:
    if (step := manager.latest_step()) is None:
      return 0, {}
    mesh_lib.say(f"resuming from step {step}")
  load(folder(manager.directory.parent, step), **nodes)
  return step, dict(manager.metadata(step).custom_metadata or {})


def steps(workdir: epath.Path) -> list[int]:
  """Returns the steps of the checkpoints in a workdir."""
  path = workdir / "checkpoints"
  names = [child.name for child in path.iterdir()] if path.exists() else []
  return sorted(int(name) for name in names if name.isdecimal())


def folder(workdir: epath.Path, step: int) -> epath.Path:
  """Returns the folder of a checkpoint's arrays."""
  return workdir / "checkpoints" / str(step) / _STATE


def load(path: epath.Path, **nodes: Any) -> None:
  """Loads the arrays of a checkpoint into models and optimizers; raises as `restore` does."""
  with from_settings():  # before Orbax, which would advise to pad or cut tables
    embed.checkpoint.check(metadata(path), **nodes)
  embed.checkpoint.from_tree(read(path, embed.checkpoint.like(**nodes)), **nodes)


def metadata(path: epath.Path) -> Any:
  """Returns the tree of a checkpoint, with the shape and dtype of each array."""
  # The tree's own: a checkpointer's would warn of a file that only the folder above has.
  return ocp.PyTreeCheckpointHandler().metadata(path).tree


def read(path: epath.Path, like: Any) -> Any:
  """Reads a part of a checkpoint's tree: the arrays of `like`, onto their shardings."""
  restore_args = ocp.checkpoint_utils.construct_restore_args(like)
  args = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
  with ocp.PyTreeCheckpointer() as reader:
    return reader.restore(path, args=args)
