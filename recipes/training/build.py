"""Objects that settings name: dtypes, learning rates, optimizers, and strategies of tables."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import embed

from .. import mesh as mesh_lib
from ..errors import UserError

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
TABLE_OPTIMIZERS: dict[str, Callable[..., embed.RowOptimizer]] = {
  "adagrad": embed.adagrad,
  "adam": embed.adam,
  "rowwise_adagrad": embed.rowwise_adagrad,
  "sgd": embed.sgd,
}


def check_choice(setting: str, name: str, known: Collection[str]) -> None:
  """Raises UserError for a name that a setting does not know.

  >>> check_choice("dtype", "float16", DTYPES)
  Traceback (most recent call last):
  recipes.errors.UserError: config.dtype is 'float16': choose float32, bfloat16
  """
  if name not in known:
    raise UserError(f"config.{setting} is {name!r}: choose {', '.join(known)}")


def table_initializer(config) -> Any:
  """Returns a normal initializer with the deviation `config.table.init_scale`.

  Row-wise: a process draws only the rows that it keeps, and they are the same on any mesh.
  """
  return embed.row_wise(jax.nn.initializers.normal(config.table.init_scale))


def dtype(config, setting: str) -> Any:
  """Returns the dtype that `dtype`, of computation, or `table_dtype`, of rows, names."""
  check_choice(setting, config[setting], DTYPES)
  return DTYPES[config[setting]]


def schedule(config, peak: float) -> optax.Schedule:
  """Returns a rate that rises over `warmup_steps` and then falls as a cosine to `final_rate`."""
  if config.warmup_steps >= config.steps:
    raise UserError(
      f"config.warmup_steps is {config.warmup_steps}, of {config.steps} steps: choose fewer"
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if config.warmup_steps else peak,
    peak_value=peak,
    warmup_steps=config.warmup_steps,
    decay_steps=config.steps,
    end_value=peak * config.final_rate,
  )


def rate(config) -> Callable[[int], float]:
  """Returns the dense learning rate as a function of the number of steps taken, for the log."""
  at_step = schedule(config, config.learning_rate)
  return lambda steps: float(at_step(steps - 1))


def clipped(grads: embed.Grads, max_norm: float) -> tuple[embed.Grads, dict[str, jax.Array]]:
  """Clips gradients to a global norm; returns them and `grad_norm` before. 0 does neither."""
  if not max_norm:
    return grads, {}
  with jax.named_scope("update"):
    return embed.clip_by_global_norm(grads, max_norm), {"grad_norm": embed.global_norm(grads)}


def dense_optimizer(config) -> optax.GradientTransformation:
  """Returns AdamW, for everything but the tables."""
  return optax.adamw(schedule(config, config.learning_rate), weight_decay=config.weight_decay)


def table_optimizer(config, name: str = "") -> embed.RowOptimizer:
  """Returns a sparse optimizer by name, by default `config.table.optimizer`."""
  name = name or config.table.optimizer
  check_choice("table.optimizer", name, TABLE_OPTIMIZERS)
  # Adagrad begins at 0.1, far above a squared gradient of a mean loss, so a row's step is SGD's,
  # and rows of rare ids stay small.
  rate = config.table.learning_rate
  if rate < 0:
    rate = 2e-3 if name == "adam" else 0.2
  return TABLE_OPTIMIZERS[name](
    learning_rate=schedule(config, rate),
    weight_decay_factor=config.table.weight_decay or None,
    multiply_weight_decay_factor_by_learning_rate=True,
  )


def tables(
  config,
  features: Any,
  optimizer: embed.RowOptimizer | None,
  *,
  rngs: nnx.Rngs,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> embed.SparseEmbed:
  """Returns the layer of a model's tables, by one strategy for all or as a plan chooses.

  Args:
    config: `table.sharding` is the strategy. With `hbm_bytes`, `embed.plan` chooses one for each
      table instead, and the plan is printed.
    optimizer: of tables that have none of their own.
    inputs: returns the layer's inputs for a whole batch, of `jax.ShapeDtypeStruct`; None for a
      model that is not trained, and needs no plan.

  Raises:
    UserError: the tables need more than `hbm_bytes`.
    ValueError: there is no such strategy.
  """
  limit = config.hbm_bytes
  if not limit or inputs is None:
    sharding = config.table.sharding
    return embed.SparseEmbed(features, optimizer, rngs=rngs, mesh=mesh, sharding=sharding)
  plan = embed.plan(features, mesh, inputs(), optimizer, hbm_bytes=limit)
  mesh_lib.say(str(plan))
  if not plan.fits:
    raise UserError(
      f"the tables need {plan.bytes_per_device:,} bytes on each device, more than "
      f"hbm_bytes={limit:,}: use more devices, table_dtype='bfloat16' or a table.optimizer of "
      "fewer slots"
    )
  return embed.SparseEmbed(plan=plan, rngs=rngs)
