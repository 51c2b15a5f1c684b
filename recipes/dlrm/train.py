"""Trains a click model: `run` reads from top to bottom; what it calls is below it.

A second loss, a teacher or a further metric is a change of this file; `tasks` has the losses of
several labels. `loss_fn` returns the loss to minimise, or `(loss, {name: scalar})`, whose scalars
are logged beside it, as means since the last line. `run.steps` takes a function that adds a
teacher's outputs to each batch, and `warm_start.take` loads the teacher from its run. `run.log`
logs any further scalar.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import embed

from .. import hosts
from ..errors import UserError, from_settings
from ..evaluation import groups
from ..run import settings, warm_start
from ..run import workdir as runs
from ..run.journal import Writer
from ..run.loop import Run, check_select
from ..training import build, train_step
from . import data as data_lib
from . import histories, tasks
from .model import build_model

_PENDING = 8  # batches of an evaluation by which the host runs ahead of the devices


def run(config, workdir: str, writers: Sequence[Writer] = ()) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call on a laptop, a GPU node or in every process of a pod; see `hosts.start`.

  Args:
    config: of the run, or a plain dict that declares a table; see `settings.completed`.
    writers: get the metrics as well, and are closed at the end; see `journal.Writer`.

  Raises:
    UserError: a setting is wrong, a file of the data is missing or damaged; or as `Run`.
  """
  mesh, asked = hosts.start(), settings.completed("dlrm", config)
  if (result := runs.finished(asked, workdir)) is not None:
    return result
  config = runs.resumed(asked, workdir)
  check(config, mesh)

  data = data_lib.load(config)
  config = decide(config, data, mesh)
  model, optimizer = make_state(config, data, mesh)
  evaluate = evaluator(data, config, mesh)
  rate = build.rate(config)
  epoch = lambda steps: steps * config.batch_size / data.num_examples

  with Run(
    "dlrm", config, workdir, asked=asked, model=model, optimizer=optimizer, mesh=mesh, data=data,
    writers=writers,
  ) as run:  # fmt: skip
    warm_start.start(run)
    objective_ = objective(config, data, mesh)
    step = train_step.Step(objective_, model, optimizer, train_step.options(config), mesh)
    for batch in run.steps(data_lib.train_batches(data, config)):
      run.log(**step(batch), learning_rate=rate, epoch=epoch)
      if run.evaluates:
        run.score(evaluate(model, "valid"))
    return run.finish(evaluate(run.best(), "test") if config.test else {})


def loss_fn(model, batch) -> Any:
  """Returns the mean cross-entropy of a batch's labels `[B]`, by `weight` `[B]` if there is one."""
  outputs = model(batch)
  losses = optax.sigmoid_binary_cross_entropy(outputs, batch["label"])
  # A batch without any weight has no loss, and no gradient.
  return jnp.sum(losses * batch.get("weight", 1.0)) / jnp.maximum(total_weight(batch), 1e-30)


def total_weight(batch) -> jax.Array:
  """Returns the sum of a batch's row weights, or its number of rows: its weight in a mean."""
  if "weight" in batch:
    return jnp.sum(batch["weight"], dtype=jnp.float32)
  return jnp.float32(batch["label"].shape[0])


def admit(model, batch, ahead: bool = False):
  """Returns the batch with rows for raw ids, of columns with a dynamic vocabulary."""
  return batch | {"features": model.embed.admit(batch["features"], ahead=ahead)}


OBJECTIVE = train_step.Objective(loss_fn, total_weight, prepare=admit)


def objective(config, data: data_lib.ClickData, mesh: jax.sharding.Mesh | None = None):
  """Returns what training minimises."""
  del config, mesh
  if tasks.is_one_click(data.labels):
    return OBJECTIVE
  loss = functools.partial(tasks.loss_fn, labels=data.labels)
  prepare = lambda model, batch, ahead=False: admit(model, tasks.with_weights(batch), ahead)
  return train_step.Objective(loss, total_weight, prepare=prepare)


@nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
def predict(model, batch) -> jax.Array:
  """Returns a batch's outputs, `[B]` or `[B, O]`; compiled."""
  return logits(model, batch)


def logits(model, batch) -> jax.Array:
  """Returns a batch's outputs, `[B]` or `[B, O]`, without admitting raw ids."""
  return model(batch | {"features": model.embed.translate(batch["features"])})


def evaluator(data: data_lib.ClickData, config, mesh: jax.sharding.Mesh | None = None):
  """Returns `(model, split) -> metrics` over all rows of the split, in every process.

  They are those of `tasks.Metrics`: of users where a table declares one, and of `config.slices`. A
  row counts by its `weight`, if there is one. A split without rows has no metrics.
  """
  grouping = groups.of_clicks(data.features, config.slices, data.serve)

  def evaluate(model, split: str) -> dict[str, Any]:
    if len(range(*data.splits[split])) == 0:
      return {}
    view, metrics = train_step.evaluated(model), tasks.Metrics.empty(data.labels, grouping, mesh)
    batches = data_lib.eval_batches(
      data, split, config.eval_batch_size, num_workers=config.num_workers
    )
    pending = collections.deque[jax.Array]()
    for batch in hosts.put_ahead(mesh, batches):
      outputs, weight = predict(view, batch), batch.get("weight")
      pending.append(outputs)
      if len(pending) > _PENDING:
        pending.popleft().block_until_ready()
      metrics = metrics.update(outputs, batch["label"], batch["features"], batch["mask"], weight)
    return metrics.compute()

  return evaluate


# --- what is trained ------------------------------------------------------------------------------


def check(config, mesh: jax.sharding.Mesh | None) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  settings.check(config)
  histories.check(config)
  train_step.check(config, mesh)


def decide(config, data: data_lib.ClickData, mesh: jax.sharding.Mesh | None = None):
  """Returns the config with what the number of rows decides; checks what the data tell."""
  has_valid = len(range(*data.splits["valid"])) > 0
  grouping = groups.of_clicks(data.features, config.slices, data.serve)
  names = tasks.metric_names(data.labels, grouping) if has_valid else ()
  check_select(config.select, [f"valid_{name}" for name in names])
  return train_step.with_schedule(config, data.num_examples, mesh)


def make_state(
  config, data: data_lib.ClickData, mesh: jax.sharding.Mesh | None = None
) -> tuple[nnx.Module, embed.Optimizer]:
  """Returns the model on its devices, and the optimizer of its dense parameters and tables."""
  with from_settings():
    inputs = lambda: data_lib.batch_shapes(data, config)["features"]
    model = build_model(config, data, mesh, inputs)
    train_step.keep_averages(model, config.ema)
    return model, embed.Optimizer(model, dense_optimizer(config))


def dense_optimizer(config) -> optax.GradientTransformation:
  """Returns `config.dense_optimizer` for everything but the tables: "adamw" or "adagrad".

  Adagrad starts from 0 and takes epsilon 1e-8, the values that MLPerf fixes for DLRM-DCNv2
  (mlcommons/training, recommendation_v2/torchrec_dlrm/dlrm_main.py).
  """
  if config.dense_optimizer == "adamw":
    rate, (b1, b2) = build.schedule(config, config.learning_rate), config.adam_betas
    return optax.adamw(rate, b1, b2, weight_decay=config.weight_decay)
  if config.dense_optimizer == "adagrad":
    rate = build.schedule(config, config.learning_rate)
    # torch adds its epsilon to the root, optax under it.
    return optax.adagrad(rate, initial_accumulator_value=0.0, eps=1e-8**2)
  raise UserError(f"unknown dense optimizer {config.dense_optimizer!r}: choose adamw or adagrad")
