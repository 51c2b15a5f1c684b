"""The compiled training step: gradients of a batch or of its parts, clipped, and one update.

Operations carry the names of their phases, which profiles and compiled programs show: `dense` is
the loss and its gradient; `lookup`, within it, gathers and combines rows; `update` steps tables and
dense parameters; `exchange`, within both of these, moves ids, rows and gradients between devices.
The innermost name is the phase of an operation.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from .. import hosts
from ..errors import UserError
from ..run import settings
from ..tables.settings import steps_of_data
from . import build

LossFn = Callable[[Any, Any], Any]  # (model, batch) -> loss, or (loss, {name: scalar})


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss, and how the parts of a batch add up to it.

  Attributes:
    loss_fn: `(model, batch) -> loss`, a mean over the batch, or `-> (loss, {name: scalar})` with
      means to log beside it.
    prepare: `(model, batch, ahead) -> batch`, what changes the model before the loss, such as the
      admission of raw ids; `ahead` says that an update is still to come. None changes nothing.
    weight: `batch -> scalar`, the weight of the batch in a mean over several: the number of its
      targets, or the sum of their weights. None if it is the same for all batches of one size.
    shared: the names of the entries of a batch that all of its examples share, as drawn negatives:
      every part of the batch has them whole.
  """

  loss_fn: LossFn
  weight: Callable[[Any], jax.Array] | None = None
  shared: tuple[str, ...] = ()
  prepare: Callable[[Any, Any, bool], Any] | None = None

  def prepared(self, model: nnx.Module, batch: Any, *, ahead: bool = False) -> Any:
    """Returns the batch that the loss takes."""
    return self.prepare(model, batch, ahead) if self.prepare else batch

  def __call__(self, model: nnx.Module, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss and all that is logged of it, by name."""
    value = self.loss_fn(model, batch)
    loss, metrics = value if isinstance(value, tuple) else (value, {})
    return loss, {"loss": loss, **metrics}


@dataclasses.dataclass(frozen=True)
class Options:
  """The settings of a step; `recipes.run.settings.RUN` describes them."""

  clip_norm: float = 0.0
  accumulate: int = 1
  ema: float = 0.0


def options(config) -> Options:
  """Returns the options of a run, checked.

  Raises:
    UserError: a setting makes no sense, or two exclude each other; says what to write instead.
  """
  chosen = Options(config.clip_norm, config.accumulate, config.ema)
  if not 0 <= chosen.clip_norm < float("inf"):
    raise UserError(f"clip_norm is {chosen.clip_norm}: choose a positive norm, or 0 for none")
  if chosen.accumulate < 1:
    raise UserError(f"accumulate is {chosen.accumulate}: choose 1 or more parts of a batch")
  if not 0 <= chosen.ema < 1:
    raise UserError(f"ema is {chosen.ema}: choose a decay below 1, such as 0.999, or 0 for none")
  return chosen


def units(config, mesh: jax.sharding.Mesh | None) -> int:
  """Returns the number of equal pieces of a batch: its parts, each on all devices."""
  return options(config).accumulate * (1 if mesh is None else mesh.size)


def check(config, mesh: jax.sharding.Mesh | None) -> None:
  """Checks the settings of the steps, before any data is read; a batch size of 0 is not known yet.

  Raises:
    UserError: as `options`, or a batch cannot be cut into equal parts on all devices.
  """
  for name in ("dtype", "table_dtype"):
    build.dtype(config, name)
  parts, pieces, size = options(config).accumulate, units(config, mesh), config.batch_size
  if parts > 1 and size % pieces:
    where = f" on each of the {pieces // parts} devices" if pieces > parts else ""
    raise UserError(
      f"batch_size is {size}, which accumulate={parts} cannot cut into equal parts{where}: choose "
      f"{max(size // pieces, 1) * pieces}"
    )
  hosts.check_batch_sizes(mesh, batch_size=size or pieces)
  settings.at_least(config, {"eval_batch_size": 1})


def with_schedule(config, examples: int, mesh: jax.sharding.Mesh | None, **how: int):
  """Returns the config with what the number of examples decides, and even batches of evaluations.

  `eval_batch_size` is rounded up to what the devices can share; last batches are filled up anyway.
  """
  config = steps_of_data(config, examples, units(config, mesh), **how)
  count, size = 1 if mesh is None else mesh.size, config.eval_batch_size
  return settings.copied(config, eval_batch_size=-(-size // count) * count)


def make_train_step(
  objective: Objective | LossFn, options: Options = Options(), mesh: Any = None
) -> Callable[..., dict[str, jax.Array]]:
  """Returns the compiled `(model, optimizer, batch) -> {"loss": ...}`, which trains in place.

  Args:
    objective: what to minimise; a loss function alone is a mean over examples of equal weight.
    mesh: of the batch, which is split over its axis; None is one device.
  """
  # A donated model's tables are updated in their own memory.
  return nnx.jit(_train_step(objective, options, mesh), donate_argnames=("model", "optimizer"))


def _train_step(
  objective: Objective | LossFn, options: Options, mesh: Any
) -> Callable[..., dict[str, jax.Array]]:
  """Returns `(model, optimizer, batch) -> metrics`, not compiled."""
  objective = _objective(objective)

  def step(model, optimizer, batch):
    batch = objective.prepared(model, batch)
    with jax.named_scope("dense"):
      if options.accumulate == 1:
        (_, metrics), grads = embed.value_and_grad(objective, has_aux=True)(model, batch)
      else:
        metrics, grads = _of_parts(objective, options.accumulate, mesh, model, batch)
    return metrics | _update(model, optimizer, grads, options)

  return step


def _objective(objective: Objective | LossFn) -> Objective:
  return objective if isinstance(objective, Objective) else Objective(objective)


def _update(
  model: nnx.Module, optimizer: Any, grads: embed.Grads, options: Options
) -> dict[str, jax.Array]:
  if options.clip_norm:
    with jax.named_scope("update"):
      norm = embed.global_norm(grads)
      grads = embed.clip_by_global_norm(grads, options.clip_norm)
  optimizer.update(model, grads)  # names itself
  if options.ema:
    with jax.named_scope("update"):
      _average(model, optimizer.step[...], options.ema)
  return {"grad_norm": norm} if options.clip_norm else {}


class Step:
  """The compiled training step of a model: `step(batch)` trains on a batch, in place.

  Args:
    model, optimizer: trained in place. The step belongs to their Variables as they are now, and
      does not see a submodule that is replaced, or `model.eval()`.
  """

  def __init__(
    self,
    objective: Objective | LossFn,
    model: nnx.Module,
    optimizer: Any,
    options: Options = Options(),
    mesh: jax.sharding.Mesh | None = None,
  ):
    self._step = embed.jit_step(_train_step(objective, options, mesh), model, optimizer)

  def __call__(self, batch: Any) -> dict[str, jax.Array]:
    """Trains on a batch; returns `{"loss": ...}`, what the loss logs, and a clipped `grad_norm`."""
    return self._step(batch)


# --- moving averages ------------------------------------------------------------------------------


class Average(nnx.Variable):
  """The moving average of a dense parameter."""


def keep_averages(model: Any, decay: float) -> None:
  """Gives a model `averages`, a moving average for each dense parameter; none for a decay of 0.

  After update t the average is `d * average + (1 - d) * parameter` with `d = min(decay, 1 - 1/t)`:
  the mean of all updates until there are 1 / (1 - decay) of them, whatever the parameters were
  before. Rows of tables have no average: it would take their memory again, and most of them do not
  change in a step.
  """
  if decay:
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    model.averages = nnx.List([Average(jnp.copy(x)) for x in params])


def _average(model: Any, step: jax.Array, decay: float) -> None:
  keep = jnp.minimum(decay, 1 - 1 / step.astype(jnp.float32))
  for average, x in zip(model.averages, jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True):
    average[...] = keep * average[...] + (1 - keep) * x


def take_averages(model: Any) -> None:
  """Puts the averages of a model, if it has any, in the place of its parameters."""
  if hasattr(model, "averages"):
    params = nnx.state(model, nnx.Param)
    values = [average[...] for average in model.averages]
    del model.averages
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(params), values))


def evaluated(model: nnx.Module) -> nnx.Module:
  """Returns the model as it is evaluated: without dropout, and by its averages if it has any.

  It has the tables of the model, not copies.
  """
  view = nnx.merge(*nnx.split(model), copy=True)
  take_averages(view)
  view.eval()
  return view


# --- parts of a batch ----------------------------------------------------------------------------


def _of_parts(
  objective: Objective, number: int, mesh: Any, model: nnx.Module, batch: Any
) -> tuple[dict[str, jax.Array], embed.Grads]:
  """The metrics and the gradients of a batch of which one part at a time is in memory."""
  shared = {name: batch[name] for name in objective.shared if name in batch}
  split = {name: x for name, x in batch.items() if name not in shared}
  parts = jax.tree.map(lambda x: cut(x, number, mesh), split)
  if objective.weight is None:
    shares = jnp.full(number, 1 / number, jnp.float32)
  else:
    weights = jax.lax.map(lambda part: objective.weight(part | shared), parts)
    shares = weights / jnp.maximum(jnp.sum(weights), 1e-30)  # without any weight there is no loss
  # The tables, slots and parameters do not change before the update: every part reads the same.
  fixed = nnx.Any(nnx.Param, embed.Table, embed.SlotVariable)
  graph, *states = nnx.split(model, fixed, ...)
  constant, state = states

  def take(state, inputs):
    share, part = inputs
    model = nnx.merge(graph, constant, state, copy=True)
    weighted = lambda model, batch: jax.tree.map(lambda x: share * x, objective(model, batch))
    (_, metrics), grads = embed.value_and_grad(weighted, has_aux=True)(model, part | shared)
    return nnx.state(model, nnx.Not(fixed)), (metrics, grads)

  state, (metrics, stacked) = jax.lax.scan(take, state, (shares, parts))
  nnx.update(model, state)
  grads = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(number)]
  return {name: jnp.sum(x) for name, x in metrics.items()}, embed.accumulate(grads)


def cut(x: jax.Array, number: int, mesh: Any = None) -> jax.Array:
  """Returns the rows of `[B, ...]` in parts, `[number, B / number, ...]`.

  Part i has the rows i, i + number, i + 2 number, ...: the same on any number of devices, each of
  which cuts its own rows.

  >>> cut(jnp.arange(6), 2).tolist()
  [[0, 2, 4], [1, 3, 5]]
  """
  parts = jnp.swapaxes(x.reshape(x.shape[0] // number, number, *x.shape[1:]), 0, 1)
  if mesh is None:
    return parts
  over_rows = jax.sharding.PartitionSpec(None, hosts.AXIS)
  return jax.lax.with_sharding_constraint(parts, jax.sharding.NamedSharding(mesh, over_rows))
