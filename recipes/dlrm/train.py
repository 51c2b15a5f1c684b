"""Trains a click model: what to train, on what, and how it is measured."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import embed

from .. import features as features_lib
from .. import hosts, layers, loop, optimizers, placement, train_step
from ..errors import UserError, from_settings
from ..metrics import BinnedClickMetrics
from ..tables.settings import steps_of_data
from . import data as data_lib
from . import model as model_lib


def run(config, workdir: str, writers: Sequence[loop.Writer] = ()) -> dict[str, Any]:
  """Trains as configured, or reports the run that the workdir holds; see `loop.run`."""
  return loop.run("dlrm", config, workdir, prepare, writers)


def prepare(config, mesh: jax.sharding.Mesh | None) -> loop.Training:
  """Returns the parts of a run: loads the data, builds the model and its optimizer.

  Raises:
    UserError: a setting is wrong, or a file of the data is missing or damaged.
  """
  units = train_step.units(config, mesh)
  hosts.check_batch_sizes(
    mesh, batch_size=config.batch_size or units, eval_batch_size=config.eval_batch_size
  )
  data = data_lib.load(config)
  start, stop = data.splits["train"]
  config = steps_of_data(config, stop - start, units)
  with from_settings():
    inputs = lambda: data_lib.batch_shapes(data, config.batch_size)["features"]
    model = build_model(config, data, mesh, inputs)
    optimizer = embed.Optimizer(model, dense_optimizer(config))
  return loop.Training(
    model=model,
    optimizer=optimizer,
    loss_fn=OBJECTIVE,
    batches=data_lib.train_batches(data, config),
    evaluate=evaluator(data, config, mesh),
    baselines=functools.partial(baselines, data, config),
    data_sha256=data.sha256,
    metrics=("auc", "logloss") if len(range(*data.splits["valid"])) else (),
    config=config,
    serve=data.serve,
    telling=functools.partial(data_lib.most_telling, data),
  )


def build_model(
  config,
  data: data_lib.ClickData,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> nnx.Module:
  """Returns the model that `config.model` names, its tables with the configured optimizer.

  `inputs` returns the shapes of a batch's features, for a plan; see `placement.make_tables`.
  """
  initializer = layers.table_initializer(config)
  features = features_lib.feature_configs(
    data.features,
    config.dim,
    initializer=initializer,
    optimizer=lambda name: optimizers.table_optimizer(config, name),
    dtype=layers.dtype(config, "table_dtype"),
  )
  rngs, optimizer = nnx.Rngs(config.seed), optimizers.table_optimizer(config)
  common: Any = {
    "tables": placement.make_tables(
      config, features, optimizer, rngs=rngs, mesh=mesh, inputs=inputs
    ),
    "num_dense": data.num_dense,
    "dropout": config.dropout,
    "dtype": layers.dtype(config, "dtype"),
    "rngs": rngs,
  }
  if config.model == "dlrm":
    return model_lib.DLRM(**common, dim=config.dim, **config.dlrm)
  if config.model == "dcnv2":
    return model_lib.DCNV2(**common, **config.dcnv2)
  raise UserError(f"unknown model {config.model!r}: choose dlrm or dcnv2")


def dense_optimizer(config) -> optax.GradientTransformation:
  """Returns `config.dense_optimizer` for everything but the tables: "adamw" or "adagrad".

  Adagrad starts from 0 and takes epsilon 1e-8, the values that MLPerf fixes for DLRM-DCNv2
  (mlcommons/training, recommendation_v2/torchrec_dlrm/dlrm_main.py).
  """
  if config.dense_optimizer == "adamw":
    return optimizers.dense_optimizer(config)
  if config.dense_optimizer == "adagrad":
    rate = optimizers.schedule(config, config.learning_rate)
    # torch adds its epsilon to the root, optax under it.
    return optax.adagrad(rate, initial_accumulator_value=0.0, eps=1e-8**2)
  raise UserError(f"unknown dense optimizer {config.dense_optimizer!r}: choose adamw or adagrad")


def loss_fn(model, batch) -> jax.Array:
  """Returns the mean cross-entropy of a batch's labels `[B]`, by `weight` `[B]` if there is one."""
  losses = optax.sigmoid_binary_cross_entropy(model(batch), batch["label"])
  if "weight" not in batch:
    return losses.mean()
  # A batch without any weight has no loss, and no gradient.
  return jnp.sum(losses * batch["weight"]) / jnp.maximum(jnp.sum(batch["weight"]), 1e-30)


def weight(batch) -> jax.Array:
  """Returns the weight of a batch in the mean over several: of its rows in all, float32."""
  if "weight" in batch:
    return jnp.sum(batch["weight"], dtype=jnp.float32)
  return jnp.float32(batch["label"].shape[0])


OBJECTIVE = train_step.Objective(loss_fn, weight)


@nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
def predict(model, batch) -> jax.Array:
  """Returns a batch's logits `[B]`; compiled."""
  return model(batch)


def evaluator(data: data_lib.ClickData, config, mesh: jax.sharding.Mesh | None = None):
  """Returns `(model, split) -> {"auc", "logloss"}` over all rows of the split, in every process.

  A row counts by its `weight`, if there is one. A split without rows has no metrics.
  """

  def evaluate(model, split: str) -> dict[str, float]:
    if len(range(*data.splits[split])) == 0:
      return {}
    view = nnx.view(model, deterministic=True)
    metrics = BinnedClickMetrics(mesh, weighted="weight" in data.columns)
    batches = data_lib.eval_batches(
      data, split, config.eval_batch_size, num_workers=config.num_workers
    )
    for batch in hosts.put_ahead(mesh, batches):
      metrics.update(predict(view, batch), batch["label"], batch["mask"], batch.get("weight"))
    return metrics.compute()

  return evaluate


def baselines(data: data_lib.ClickData, config) -> dict[str, loop.Baseline]:
  """Returns what fits the constant rate of clicks and a logistic regression, and the best possible.

  The metrics of the best possible are there where they are known.
  """
  fit = functools.partial(
    data_lib.logistic_regression,
    data,
    max_rows=config.baseline.max_rows,
    inverse_penalties=tuple(config.baseline.inverse_penalties),
  )
  can_choose = len(range(*data.splits["valid"])) > 0
  chosen: dict[str, loop.Baseline] = {
    "constant rate": functools.partial(data_lib.constant_rate, data),
    "logistic regression": fit if config.baseline.max_rows and can_choose else {},
  }
  if data.best:
    chosen["best possible"] = dict(data.best)
  return chosen
