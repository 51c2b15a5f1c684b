"""One step of rows, the same on every device and for every formulation of an update."""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from embed.engine import collectives, rounding
from embed.engine.layout import Columns
from embed.engine.stack import Arrays, RowStep, StackSpec
from embed.row_optimizer import WHOLE_ROWS, RowOptimizer, Slots


class StepScalars(NamedTuple):
  """Per-step scalars: learning rate, optional gradient multiplier, and the step's index.

  The step is None unless rows are stochastically rounded.
  """

  rate: jax.Array
  multiplier: jax.Array | None
  step: jax.Array | None

  @classmethod
  def at(cls, stack: StackSpec, step: Any) -> "StepScalars":
    """The scalars of the 0-based step of a stack that has an optimizer."""
    assert stack.optimizer is not None
    multiplier = stack.optimizer.gradient_multiplier_at(step)
    return cls(
      jnp.asarray(stack.optimizer.learning_rate_at(step), jnp.float32),
      None if multiplier is None else jnp.asarray(multiplier, jnp.float32),
      jnp.asarray(step, jnp.int32) if stack.uses_stochastic_rounding else None,
    )


def step_rows(
  optimizer: RowOptimizer,
  g: jax.Array,
  w: jax.Array,
  slots: Slots,
  learning_rate: Any,
  columns: Columns = WHOLE_ROWS,
) -> tuple[jax.Array, Slots]:
  """One step of rows: the only place where a row update is defined.

  Args:
    optimizer: the table's.
    g: float32 `[..., D]`, the rows' gradients, summed.
    w: float32 `[..., D]`, the rows.
    slots: float32 `[..., D]` or `[...]` each.
    learning_rate: this step's, a scalar.
    columns: which of their columns `g`, `w` and `slots` hold on this device; by default all.

  Returns:
    The new rows and slots.
  """
  assert optimizer.equation is not None
  if optimizer.clipvalue is not None:
    g = jnp.clip(g, *optimizer.clipvalue)
  if optimizer.weight_decay_factor:
    decay = optimizer.weight_decay_factor
    if optimizer.multiply_weight_decay_factor_by_learning_rate:
      decay = decay * learning_rate
    w = w - decay * w
  split = (columns,) if optimizer.across_row else ()
  w, slots = optimizer.equation(g, w, slots, learning_rate, *split)
  if optimizer.clip_weight_min is not None or optimizer.clip_weight_max is not None:
    w = jnp.clip(w, optimizer.clip_weight_min, optimizer.clip_weight_max)
  return w, slots


def row_step_of(stack: StackSpec, scalars: StepScalars) -> RowStep:
  """A function of local rows `[n]`, their gradients `[n, D]`, and their table and slots by name.

  It returns the new rows, of the table's dtype, and slots. Its last argument says how often the
  rows have stepped in this step.
  """
  optimizer = stack.optimizer
  assert optimizer is not None

  def row_step(at: jax.Array, g: jax.Array, rows: Arrays, time: Any = 0) -> Arrays:
    slots = {name: x for name, x in rows.items() if name != "parameters"}
    dtype, w = rows["parameters"].dtype, rows["parameters"].astype(jnp.float32)
    new, slots = step_rows(optimizer, g, w, slots, scalars.rate, stack.columns)
    if stack.uses_stochastic_rounding:
      new = _round(stack, scalars.step, new, at, time)
    return {"parameters": new.astype(dtype), **slots}

  return row_step


def _round(stack: StackSpec, index, new: jax.Array, at: jax.Array, time) -> jax.Array:
  """New rows float32 `[n, width]`, stochastically rounded, of the local rows `at`."""
  keys, own = jnp.zeros(at.shape, jnp.uint32), collectives.index(stack.placement.rows)
  for i, (name, size) in enumerate(zip(stack.tables, stack.layout.sizes, strict=True)):
    ids = stack.layout.ids(i, own, at)
    keys = jnp.where(ids < size, rounding.key(ids, zlib.crc32(name.encode()), index, time), keys)
  columns = jnp.arange(stack.width, dtype=jnp.uint32)
  if stack.placement.columns:
    first = collectives.index(stack.placement.columns) * stack.width
    columns += first.astype(jnp.uint32)
  return rounding.to_bfloat16(new, rounding.noise(keys, columns))
