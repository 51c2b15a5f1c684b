"""The parts of training that settings name: dtypes, learning rates, optimizers, and the tables."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import embed

from .. import mesh as mesh_lib
from ..errors import UserError

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def table_initializer(config) -> Any:
  """Returns the initializer of tables: normal, with the deviation `config.table.init_scale`.

  Row-wise: a process draws only the rows that it keeps, and they are the same on any mesh.
  """
  return embed.row_wise(jax.nn.initializers.normal(config.table.init_scale))


def dtype(config, setting: str) -> Any:
  """Returns the dtype that a setting names: `dtype`, of computation, or `table_dtype`, of rows."""
  name = config[setting]
  if name not in _DTYPES:
    raise UserError(f"{setting} is {name!r}: choose {' or '.join(_DTYPES)}")
  return _DTYPES[name]


def schedule(config, peak: float) -> optax.Schedule:
  """Returns a rate that rises over `warmup_steps` and then falls as a cosine to `final_rate`.

  Raises:
    ValueError: training ends before the rate has risen.
  """
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
  """Returns the dense learning rate of the last of so many steps, for the log."""
  of = schedule(config, config.learning_rate)
  return lambda steps: float(of(steps - 1))


def clipped(grads: embed.Grads, max_norm: float) -> tuple[embed.Grads, dict[str, jax.Array]]:
  """Clips gradients to a norm; returns them and `grad_norm` before, to log. 0 does neither."""
  if not max_norm:
    return grads, {}
  with jax.named_scope("update"):
    return embed.clip_by_global_norm(grads, max_norm), {"grad_norm": embed.global_norm(grads)}


def dense_optimizer(config) -> optax.GradientTransformation:
  """Returns AdamW, for everything but the tables."""
  return optax.adamw(schedule(config, config.learning_rate), weight_decay=config.weight_decay)


def table_optimizer(config, name: str = "") -> Any:
  """Returns a sparse optimizer of `embed` by name, by default `config.table.optimizer`."""
  name = name or config.table.optimizer
  make: dict[str, Callable[..., embed.RowOptimizer]] = {
    "adagrad": embed.adagrad,
    "adam": embed.adam,
    "rowwise_adagrad": embed.rowwise_adagrad,
    "sgd": embed.sgd,
  }
  if name not in make:
    raise UserError(f"unknown table optimizer {name!r}: choose one of {sorted(make)}")
  # Adagrad begins at 0.1, far above a squared gradient of a mean loss, so a row's step is that of
  # SGD, and rows of rare ids stay small.
  rate = config.table.learning_rate
  if rate < 0:
    rate = 2e-3 if name == "adam" else 0.2
  more: dict[str, float] = {}
  if name.endswith("adagrad") and "initial_accumulator" in config.table:
    start = config.table.initial_accumulator
    more = {"initial_accumulator_value": start, "epsilon": 0.0 if start else 1e-8}
  return make[name](
    **more,
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
  """Returns the layer of a model's tables, placed as the config says, and prints the plan of it.

  `config.table.sharding` is a strategy for all tables, or a dict of strategies by table; a table
  that it leaves out is as the plan has it, or "mod". With `config.hbm_bytes`, `embed.plan` chooses
  in place of one strategy for all.

  Args:
    optimizer: of tables that have none of their own.
    rngs: draws the rows.
    mesh: the devices; None is one device.
    inputs: returns the layer's inputs for a whole batch, of `jax.ShapeDtypeStruct`; None for a
      model that is not trained, which needs no plan.

  Raises:
    UserError: the sharding names no table of the model, or the tables need more than `hbm_bytes`.
    ValueError: there is no such strategy.
  """
  strategies, limit = config.table.sharding, config.hbm_bytes
  if limit < 0:
    raise UserError(f"hbm_bytes is {limit}: write the bytes of a device, or 0 to plan nothing")
  is_planned = limit > 0 and inputs is not None
  if isinstance(strategies, str) and not is_planned:
    return embed.SparseEmbed(features, optimizer, rngs=rngs, mesh=mesh, sharding=strategies)
  if limit and inputs is not None:
    plan = embed.plan(features, mesh, inputs(), optimizer, hbm_bytes=limit)
  else:
    plan = embed.Plan.uniform(features, optimizer, mesh, mesh_lib.AXIS, "mod")
  by_table = {} if isinstance(strategies, str) else dict(strategies)
  if unknown := sorted(by_table.keys() - set(plan)):
    raise UserError(
      f"table.sharding names {', '.join(unknown)}, and the tables are {', '.join(sorted(plan))}: "
      "write one of these"
    )
  for name, strategy in by_table.items():
    plan[name].strategy = strategy
  if is_planned:
    mesh_lib.say(str(plan))
    if not plan.fits:
      raise UserError(
        f"the tables need {plan.bytes_per_device:,} bytes on each device, more than "
        f"hbm_bytes={limit:,}: use more devices, table_dtype='bfloat16' or a table.optimizer of "
        "fewer slots"
      )
  return embed.SparseEmbed(plan=plan, rngs=rngs)
