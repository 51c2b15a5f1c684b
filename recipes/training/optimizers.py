"""Optimizers by the names that configs give them, and the rate that they share."""

from collections.abc import Callable
from typing import Any

import optax

import embed

from ..errors import UserError


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


def dense_optimizer(config) -> optax.GradientTransformation:
  """Returns AdamW, for everything but the tables."""
  return optax.adamw(schedule(config, config.learning_rate), weight_decay=config.weight_decay)


def table_optimizer(config, name: str = "") -> Any:
  """Returns a sparse optimizer of `embed` by name, by default `config.table.optimizer`.

  Raises:
    ValueError: the name is unknown.
  """
  name = name or config.table.optimizer
  make: dict[str, Callable[..., embed.RowOptimizer]] = {
    "adagrad": embed.adagrad,
    "adam": embed.adam,
    "rowwise_adagrad": embed.rowwise_adagrad,
    "sgd": embed.sgd,
  }
  if name not in make:
    raise UserError(f"unknown table optimizer {name!r}: choose one of {sorted(make)}")
  return make[name](
    learning_rate=schedule(config, config.table.learning_rate),
    weight_decay_factor=config.table.weight_decay or None,
    multiply_weight_decay_factor_by_learning_rate=True,
  )
