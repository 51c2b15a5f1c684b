"""One step of rows, the same on every device and for every formulation of an update."""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from embed.engine import collectives, jax_internals, mesh, rounding, xla
from embed.engine.layout import Columns
from embed.engine.stack import Arrays, StackSpec
from embed.optimizers import WHOLE_ROWS, RowOptimizer, Slots


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

  def after(self, token: jax.Array) -> "StepScalars":
    """The same scalars for a step after the lookups that a token depends on: see `xla`.

    The learning rate carries the order. Outside of jitted functions there is nothing to order.
    """
    if not jax_internals.is_traced(token):
      return self
    zero = mesh.scalar_for(self.rate, xla.zero_of(token))
    return self._replace(rate=self.rate + zero.astype(jnp.float32))


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


def step_stored(
  stack: StackSpec,
  scalars: StepScalars,
  local_rows: jax.Array,
  g: jax.Array,
  arrays: Arrays,
  occurrence: Any = 0,
) -> Arrays:
  """New rows of a table, of its dtype, and their slots.

  Args:
    stack: of the table.
    scalars: of the step.
    local_rows: int32 `[n]`.
    g: float32 `[n, D]`, their gradients.
    arrays: the rows and their slots, `[n, D]` or `[n]`.
    occurrence: how often the rows have stepped in this step.
  """
  assert stack.optimizer is not None
  slots = {name: x for name, x in arrays.items() if name != "parameters"}
  dtype, w = arrays["parameters"].dtype, arrays["parameters"].astype(jnp.float32)
  new, slots = step_rows(stack.optimizer, g, w, slots, scalars.rate, stack.columns)
  if stack.uses_stochastic_rounding:
    new = _round(stack, scalars.step, new, local_rows, occurrence)
  return {"parameters": new.astype(dtype), **slots}


def _round(
  stack: StackSpec, step: Any, new: jax.Array, local_rows: jax.Array, occurrence: Any
) -> jax.Array:
  """New rows float32 `[n, width]`, stochastically rounded, of some local rows."""
  own = collectives.device_index(stack.placement.row_axes)
  keys = jnp.zeros(local_rows.shape, jnp.uint32)
  for i, (name, size) in enumerate(zip(stack.tables, stack.layout.sizes, strict=True)):
    ids = stack.layout.ids(i, own, local_rows)
    of_table = rounding.key(ids, zlib.crc32(name.encode()), step, occurrence)
    keys = jnp.where(ids < size, of_table, keys)
  columns = jnp.arange(stack.width, dtype=jnp.uint32)
  if stack.placement.column_axes:
    first = collectives.device_index(stack.placement.column_axes) * stack.width
    columns += first.astype(jnp.uint32)
  return rounding.to_bfloat16(new, rounding.noise(keys, columns))


def rounding_rules(stack: StackSpec, scalars: StepScalars) -> jax.Array | None:
  """What `_round` computes from local rows and columns, in numbers; None without such rounding.

  Returns:
    uint32 `[T, 5]`, for each table the first local row f, and scale, base, shared and column: the
    key of local row r is `((r - f) * scale + base) ^ shared`, and the noise of column c is
    `scramble(scramble(key) + (column + c) * GOLDEN)`.
  """
  if not stack.uses_stochastic_rounding:
    return None
  assert scalars.step is not None
  own, column = collectives.device_index(stack.placement.row_axes), jnp.uint32(0)
  if stack.placement.column_axes:
    first = collectives.device_index(stack.placement.column_axes) * stack.width
    column = first.astype(jnp.uint32)
  scale = 1 if stack.layout.contiguous else stack.layout.shards
  rules = []
  for i, (name, first_row) in enumerate(zip(stack.tables, stack.layout.offsets, strict=True)):
    base = stack.layout.ids(i, own, jnp.int32(first_row)).astype(jnp.uint32)
    shared = rounding.key(jnp.uint32(0), zlib.crc32(name.encode()), scalars.step, 0)
    rules.append(jnp.stack([jnp.uint32(first_row), jnp.uint32(scale), base, shared, column]))
  return jnp.stack(rules)
