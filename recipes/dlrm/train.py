"""Trains a click model: `run` reads from top to bottom; what it calls is below it."""

import collections
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils

import embed

from .. import checkpoints
from .. import config as config_lib
from .. import mesh as mesh_lib
from .. import run as run_lib
from ..errors import from_settings
from ..evaluation.metrics import CLICK_NAMES, Users, click_metrics, gauc
from ..run import check_select, scalars
from ..training import build
from . import data as data_lib
from .model import CHOICES, build_model

_PENDING = 8  # batches that an evaluation sends to the devices ahead of their results
# Where a regression has the first-order effects, the gradients of small vectors vanish for epochs.
_SPREAD = 10  # of its run's new vectors, by which `table.init_scale` is multiplied
_BETTER = 1e-4  # of validation AUC, than the regression that a run starts as
_TINY = 1e-30  # a batch whose weights are 0 has no loss, and no gradient


def run(config, workdir: str) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call resumes a run that was stopped, on any number of devices and processes.

  Args:
    config: of the run, or a plain dict that declares a table; see `config.complete`.
    workdir: the folder of the run; see `recipes.run`.

  Raises:
    UserError: a setting is wrong, a file of the data is missing or damaged, or the workdir holds
      another run.
    Preempted: after a SIGTERM, once the state is saved.
  """
  mesh, folder = mesh_lib.start(), epath.Path(workdir).resolve()
  config = run_lib.resumed(config_lib.complete("dlrm", config), folder)
  if (result := run_lib.finished(config, folder)) is not None:
    return result
  check(config, mesh)
  data = data_lib.load(config)
  config = decide(config, data, mesh)
  model, optimizer = make_state(config, data, mesh)
  step_fn = embed.jit_step(make_train_step(config, data, mesh), model, optimizer)
  evaluate, rate = evaluator(data, config, mesh), build.rate(config)

  with run_lib.begun(config, folder, data, model, optimizer) as (writer, manager, stops):
    if manager.latest_step() is None and starts_linear(config, data):
      start_linear(model, data, config, mesh)
      metrics = scalars("valid", evaluate(model, "valid"))
      writer.eval(0, metrics)
      checkpoints.save(manager, 0, model, optimizer, metrics, writer.memory(0))
    batches = data_lib.train_batches(data, config, writer.step)
    for step, batch in enumerate(mesh_lib.prefetch_to_device(mesh, batches), writer.step + 1):
      if writer.has_stalled(config.select, config.patience):
        break
      writer.train(step, model, step_fn(batch) | {"learning_rate": rate(step)})
      evaluates = step == config.steps or run_lib.is_due(step, config.eval_every)
      metrics = scalars("valid", evaluate(model, "valid")) if evaluates else {}
      writer.eval(step, metrics)
      is_last = stops(step)
      if evaluates or is_last or run_lib.is_due(step, config.checkpoint_every):
        if metrics.get("valid_auc", 0) < writer.scores(0).get("valid_auc", -1) + _BETTER:
          metrics = {}  # a state that does not rank better than the run's start is not selected
        checkpoints.save(manager, step, model, optimizer, metrics, writer.memory(step))
      if is_last:
        raise run_lib.Preempted(step)
    return run_lib.finish("dlrm", config, folder, data, model, writer, manager, evaluate)


def make_train_step(
  config, data: data_lib.ClickData, mesh: jax.sharding.Mesh | None = None
) -> Callable[..., dict[str, jax.Array]]:
  """Returns `(model, optimizer, batch) -> {"loss": ...}`, which trains in place, not compiled.

  Every scalar that it returns is logged, as its mean since the last line. A teacher is the model of
  a run that has ended, `run_lib.opened(workdir).model(data, mesh)`.
  """
  del data, mesh

  def train_step(model, optimizer, batch):
    with jax.named_scope("dense"):
      loss, grads = embed.value_and_grad(loss_fn)(model, batch)
    grads, norm = build.clipped(grads, config.clip_norm)
    optimizer.update(model, grads)
    return {"loss": loss} | norm

  return train_step


def loss_fn(model: Any, batch: Any) -> jax.Array:
  """Returns the mean cross-entropy of a batch, by its `weight` if there is one."""
  losses = optax.sigmoid_binary_cross_entropy(model(batch), batch["label"])
  weights = batch.get("weight", jnp.ones_like(losses))
  return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), _TINY)


@nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
def predict(model, batch) -> jax.Array:
  """Returns the logits of a batch, `[B]`; compiled."""
  return model(batch)


def evaluator(data: data_lib.ClickData, config, mesh: jax.sharding.Mesh | None = None):
  """Returns `(model, split) -> metrics` over all rows of the split, in every process.

  See `click_metrics`; with `gauc` where a table declares users. A row counts by its `weight`, if
  there is one. A split without rows has no metrics.
  """
  users = Users(**data.meta.get("user", {}))

  def evaluate(model, split: str) -> dict[str, float]:
    if len(range(*data.splits[split])) == 0:
      return {}
    view = nnx.view(model, deterministic=True, raise_if_not_found=False)
    batches = data_lib.eval_batches(data, split, config.eval_batch_size)
    ahead, rows = collections.deque[Any](), list[Any]()
    for batch in mesh_lib.prefetch_to_device(mesh, batches):
      amount = batch["mask"] * batch.get("weight", jnp.float32(1))
      ids = batch["features"].get(users.feature)  # None where no user is declared
      ahead.append((predict(view, batch), batch["label"], amount, ids))
      if len(ahead) > _PENDING:
        rows.append(mesh_lib.gather(ahead.popleft()))
    rows += map(mesh_lib.gather, ahead)
    *parts, ids = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    counts = parts[-1] > 0
    outputs, targets, weights = (part[counts] for part in parts)
    metrics = click_metrics(outputs, targets, weights)
    if ids is not None and counts.any():
      metrics |= gauc(outputs, targets, users.codes(ids)[counts], weights)
    return metrics

  return evaluate


# --- what is trained ------------------------------------------------------------------------------


def check(config, mesh: jax.sharding.Mesh | None) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  config_lib.check(config, mesh)
  for setting, known in CHOICES.items():
    build.check_choice(setting, operator.attrgetter(setting)(config), known)


def decide(config, data: data_lib.ClickData, mesh: jax.sharding.Mesh | None = None):
  """Returns the config with what the number of rows decides; checks what the data tell."""
  has_valid = len(range(*data.splits["valid"])) > 0
  names = (*CLICK_NAMES, *["gauc"] * ("user" in data.meta)) if has_valid else ()
  check_select(config.select, [f"valid_{name}" for name in names])
  return config_lib.with_schedule(config, data.num_examples, mesh)


def make_state(
  config, data: data_lib.ClickData, mesh: jax.sharding.Mesh | None = None
) -> tuple[nnx.Module, embed.Optimizer]:
  """Returns the model on its devices, and the optimizer of its dense parameters and tables."""
  with from_settings():
    inputs = lambda: data_lib.batch_shapes(data, config)["features"]
    model = build_model(config, data, mesh, inputs)
    optimizer = embed.Optimizer(model, dense_optimizer(config))
  mesh_lib.replicate(mesh, model, optimizer)
  return model, optimizer


def starts_linear(config, data: data_lib.ClickData) -> bool:
  """Returns whether a new run starts as its logistic regression; see `start` in the defaults."""
  return (
    config.start == "regression"
    and config.linear
    and not config.init_from
    and "logistic regression" in data.baseline_tasks(config)
    and data.num_examples <= config.baseline.max_rows
    and not any(feature.table for feature in data.features)
  )


def start_linear(
  model: Any, data: data_lib.ClickData, config, mesh: jax.sharding.Mesh | None = None
) -> None:
  """Makes the logits those of the logistic regression, in place: the head returns its bias."""
  from . import baselines

  mesh_lib.say("starting from the logistic regression")
  weights, _ = baselines.regression(data, config)
  # One process decides: the last digits of a fit may differ between machines.
  weights = np.asarray(multihost_utils.broadcast_one_to_all(weights))
  ends = np.cumsum([feature.vocabulary_size for feature in data.features])
  *of_ids, rest = np.split(weights, ends)
  tables, new = model.embed.tables, {}
  start = lambda rows, own: (_SPREAD * rows).at[:, -1].set(own)
  for feature, own in zip(data.features, of_ids, strict=True):
    rows = tables[feature.name]
    new[feature.name] = jax.jit(start, out_shardings=rows.sharding)(rows, own)
  model.embed.load_tables(new)
  if data.num_dense:
    model.inputs.wide.kernel.set_value(jnp.asarray(rest[:-1, None]))
  model.head.kernel.set_value(jnp.zeros(model.head.kernel.shape))
  model.head.bias.set_value(jnp.asarray(rest[-1:]))
  mesh_lib.replicate(mesh, model)


def dense_optimizer(config) -> optax.GradientTransformation:
  """Returns `config.dense_optimizer` for everything but the tables: "adamw" or "adagrad".

  Adagrad starts from 0 and takes epsilon 1e-8, the values that MLPerf fixes for DLRM-DCNv2
  (mlcommons/training, recommendation_v2/torchrec_dlrm/dlrm_main.py).
  """
  if config.dense_optimizer == "adamw":
    return build.dense_optimizer(config)
  rate = build.schedule(config, config.learning_rate)
  # torch adds its epsilon to the root, optax under it.
  return optax.adagrad(rate, initial_accumulator_value=0.0, eps=1e-8**2)
