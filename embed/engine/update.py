"""Turns row gradients into new rows: sums them at the shards that store the rows, and steps these.

Cost and memory scale with the batch, never with the vocabulary. XLA has two equivalent
formulations: on CPU, a hash table finds the distinct ids without sorting, and no more rows than
there are distinct ids are summed and stepped; on accelerators, all ids are sorted, and their rows
summed and stepped in large chunks. A kernel may replace either.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.engine import cost, exchange, mesh, xla
from embed.engine import grads as grads_lib
from embed.engine import rows as rows_lib
from embed.engine.backends import BACK_ENDS
from embed.engine.bags import Bags
from embed.engine.grads import ActivationGrads, DistinctRows, GradRows
from embed.engine.hashes import GOLDEN, scramble
from embed.engine.rows import Lines
from embed.engine.stack import Arrays, RowStep, StackSpec
from embed.engine.xla import is_traced

if TYPE_CHECKING:
  from embed.optimizers import RowOptimizer, Slots

# --- one step of rows, for every formulation of an update -----------------------------------------


class StepScalars(NamedTuple):
  """Per-step scalars: the learning rate and the step's index.

  The step is None unless rows are stochastically rounded.
  """

  rate: jax.Array
  step: jax.Array | None

  @classmethod
  def at(cls, stack: StackSpec, step: Any) -> "StepScalars":
    """The scalars of a stack at a 0-based step."""
    assert stack.optimizer is not None
    rate = jnp.asarray(stack.optimizer.learning_rate_at(step), jnp.float32)
    return cls(rate, jnp.asarray(step, jnp.int32) if stack.uses_stochastic_rounding else None)

  def after(self, token: jax.Array) -> "StepScalars":
    """The same scalars, for a step ordered after the lookups that a token depends on: see `xla`.

    The learning rate carries the order. Outside jitted functions, there is nothing to order.
    """
    if not is_traced(token):
      return self
    zero = mesh.like(xla.zero_of(token), self.rate)
    return self._replace(rate=self.rate + zero.astype(jnp.float32))


def step_rows(
  optimizer: "RowOptimizer",
  g: jax.Array,
  w: jax.Array,
  slots: "Slots",
  learning_rate: Any,
  dim: int | None = None,
) -> "tuple[jax.Array, Slots]":
  """Steps rows: clips gradients, decays weights, applies the equation, and clips weights.

  Args:
    optimizer: the optimizer of the table.
    g: float32 `[..., D]`, the summed gradients of the rows.
    w: float32 `[..., D]`, the rows.
    slots: `[..., D]` or `[...]` each.
    learning_rate: the learning rate of this step, a scalar.
    dim: D, where a kernel has padded the rows with zeros.
  """
  assert optimizer.equation is not None
  if optimizer.clipvalue is not None:
    g = jnp.clip(g, *optimizer.clipvalue)
  if optimizer.weight_decay_factor:
    decay = optimizer.weight_decay_factor
    if optimizer.multiply_weight_decay_factor_by_learning_rate:
      decay = decay * learning_rate
    w = w - decay * w
  of_rows = {"dim": dim} if optimizer.takes_dim else {}
  w, slots = optimizer.equation(g, w, slots, learning_rate, **of_rows)
  if optimizer.clip_weight_min is not None or optimizer.clip_weight_max is not None:
    w = jnp.clip(w, optimizer.clip_weight_min, optimizer.clip_weight_max)
  return w, slots


def step_stored(
  stack: StackSpec, scalars: StepScalars, local_rows: jax.Array, g: jax.Array, arrays: Arrays
) -> Arrays:
  """Computes new rows of a table, in its dtype, and their slots.

  Args:
    stack: the stack of the table.
    scalars: the scalars of the step.
    local_rows: int32 `[n]`, the local rows to step.
    g: float32 `[n, D]`, their gradients.
    arrays: the rows and their slots, `[n, D]` or `[n]`.
  """
  keys = rounding_keys(stack, scalars.step, local_rows)
  return step_in_dtype(stack, scalars.rate, keys, g, arrays)


def step_in_dtype(
  stack: StackSpec, rate: jax.Array, keys: jax.Array | None, g: jax.Array, arrays: Arrays
) -> Arrays:
  """Does what `step_stored` does, for rows that a kernel may have padded with zeros.

  `keys`, uint32 `[n]`, are those of `rounding_keys`.
  """
  assert stack.optimizer is not None
  slots = {name: x for name, x in arrays.items() if name != "parameters"}
  dtype, w = arrays["parameters"].dtype, arrays["parameters"].astype(jnp.float32)
  new, slots = step_rows(stack.optimizer, g, w, slots, rate, stack.dim)
  if keys is not None:
    new = to_bfloat16(new, rounding_noise(keys, jnp.arange(new.shape[1], dtype=jnp.int32)))
  return {"parameters": new.astype(dtype), **slots}


def rounding_keys(stack: StackSpec, step: Any, local_rows: jax.Array) -> jax.Array | None:
  """A key for the noise of each row, uint32 `[n]`, from its table, step and id.

  None if rows are not rounded at random.
  """
  if not stack.uses_stochastic_rounding:
    return None
  shard = mesh.device_index(stack.placement.row_axes)
  keys = jnp.zeros(local_rows.shape, jnp.uint32)
  for i, (name, size) in enumerate(zip(stack.tables, stack.layout.sizes, strict=True)):
    ids = stack.layout.ids(i, shard, local_rows)
    key = rounding_key(zlib.crc32(name.encode()), step)
    keys = jnp.where(ids < size, ids.astype(jnp.uint32) ^ key, keys)
  return keys


StackGrads = ActivationGrads | DistinctRows


# --- all devices ---------------------------------------------------------------------------------


def step(
  stack: StackSpec, arrays: Arrays, grads: Sequence[StackGrads], scalars: StepScalars
) -> Arrays:
  """Steps a stack's optimizer once; rows that were not looked up stay bit-identical."""
  grads, specs, sums_tables = _split(stack, grads)

  def per_device(arrays, scalars, *grads):
    body = functools.partial(step_table, stack, scalars)
    arrays = rows_lib.as_rows(stack, arrays)
    arrays = exchange.for_each_round(grads, stack, sums_tables, body, arrays)
    return rows_lib.as_stored(stack, arrays)

  of_arrays = {name: stack.specs[x.ndim] for name, x in arrays.items()}
  run = stack.placement.run(per_device, (of_arrays, P(), *specs), of_arrays)
  return run(arrays, scalars, *grads)


def squared_norm(stack: StackSpec, grads: Sequence[StackGrads]) -> jax.Array:
  """The squared L2 norm of the summed row gradients."""
  grads, specs, sums_tables = _split(stack, grads)

  def per_device(*grads):
    def body(total, received):
      return total + jnp.sum(jnp.square(_summed(stack, received).values))

    total = exchange.for_each_round(grads, stack, sums_tables, body, jnp.zeros(()))
    names = stack.placement.row_axes
    return jax.lax.psum(total, names) if names else total

  return stack.placement.run(per_device, specs, P())(*grads) if grads else jnp.zeros(())


def sum_rows(stack: StackSpec, grads: Sequence[StackGrads]) -> DistinctRows:
  """The summed gradients of all rows that were looked up, at the shards that store them."""
  grads, specs, sums_tables = _split(stack, grads)
  if not grads:
    return DistinctRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, stack.dim), jnp.float32))
  ids_of = lambda x: (
    x.ids.size if isinstance(x, DistinctRows) else sum(bags.ids.size for bags in x.record.bags)
  )
  size = min(stack.layout.shard_rows, sum(map(ids_of, grads)))

  def put(to, x, start):
    pad = [(0, x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jax.lax.dynamic_update_slice_in_dim(jnp.pad(to, pad), x, start, 0)[:size]

  def body(carry, received):
    sums, count = carry
    new = _summed(stack, received)
    if isinstance(received, DistinctRows) or stack.placement.devices == 1:
      return new, count  # the sum over all calls: there is nothing to add it to
    is_used = new.ids < stack.layout.shard_rows
    values = jnp.where(is_used[:, None], new.values, 0)
    # Only the first entries of a round are used; the next round overwrites the rest.
    sums = DistinctRows(put(sums.ids, new.ids, count), put(sums.values, values, count))
    return sums, count + jnp.sum(is_used, dtype=jnp.int32)

  def per_device(*grads):
    none = jnp.full(size, stack.layout.shard_rows, jnp.int32)
    empty = DistinctRows(none, jnp.zeros((size, stack.dim), jnp.float32))
    return exchange.for_each_round(grads, stack, sums_tables, body, (empty, jnp.int32(0)))[0]

  return stack.placement.run(per_device, specs, _spec(stack))(*grads)


def most_rows(stack: StackSpec, grads: Sequence[StackGrads], table: str) -> int:
  """The most rows of a table for which a shard can have gradients."""
  number = 0
  for x in grads:
    if isinstance(x, DistinctRows):
      return stack.layout.heights[stack.indices[table]]
    bags = zip(x.record.bags, x.record.tables, strict=True)
    number += sum(bag.ids.size for bag, name in bags if name == table)
  return min(number, stack.layout.heights[stack.indices[table]])


def pick_table(
  stack: StackSpec, summed: DistinctRows, table: str, number: int | None
) -> tuple[jax.Array, jax.Array]:
  """Picks a table's row gradients from a stack's: ids `[N]` and values `[N, D]`.

  N is `number` per shard; if None, the entries of other tables stay in place, as padding.
  """
  index, size = stack.indices[table], stack.size(table)

  def pick(summed):
    shard = mesh.device_index(stack.placement.row_axes)
    ids, values = stack.layout.ids(index, shard, summed.ids), summed.values
    if number is not None and number < ids.shape[0]:
      (at,) = jnp.nonzero(ids < size, size=number, fill_value=ids.shape[0])
      ids = ids.at[at].get(mode="fill", fill_value=size)
      values = values.at[at].get(mode="fill", fill_value=0)
    return ids, jnp.where((ids < size)[:, None], values, 0)

  spec = _spec(stack)
  return stack.placement.run(pick, (spec,), (spec.ids, spec.values))(summed)


def scaled(grads: Sequence[StackGrads], factor: jax.Array) -> list[StackGrads]:
  """Multiplies gradients by a scalar, in float32: before or after summing is the same."""
  times = lambda x: x.astype(jnp.float32) * mesh.like(factor, x)

  def scale(x: StackGrads) -> StackGrads:
    if isinstance(x, DistinctRows):
      return dataclasses.replace(x, values=times(x.values))
    return dataclasses.replace(x, grads=tuple(map(times, x.grads)))

  return [scale(x) for x in grads]


def _split(stack: StackSpec, grads: Sequence[StackGrads]):
  """Returns gradients padded for all devices, their specs, and whether to add up whole tables."""
  placement = stack.placement
  padded: list[StackGrads] = []
  specs: list[Any] = []
  bags: list[Bags] = []
  tables: list[str] = []
  for x in grads:
    if isinstance(x, DistinctRows):
      padded.append(x)
      specs.append(_spec(stack))
      continue
    if not x.record.used:
      continue  # the call looked up nothing at all
    record, spec = exchange.pad_to_devices(stack, x.record)
    values = tuple(placement.pad_batch(x.grads[i], 0) for i in x.record.used)
    padded.append(ActivationGrads(values, record))
    specs.append(ActivationGrads(placement.work, spec))  # type: ignore[arg-type]
    bags += record.bags
    tables += record.tables
  if placement.is_local:
    return padded, tuple(specs), False
  chosen = cost.choose_exchange(stack, cost.batch_demand(stack, bags, tables))
  return padded, tuple(specs), chosen.kind == "sum"


def _spec(stack: StackSpec) -> Any:
  return DistinctRows(stack.specs[1], stack.specs[2])


# --- per device ----------------------------------------------------------------------------------


def _summed(stack: StackSpec, received: exchange.Received) -> DistinctRows:
  if isinstance(received, DistinctRows):
    return received
  return grads_lib.sum_per_row(received, stack.layout.shard_rows)


def step_table(
  stack: StackSpec, scalars: StepScalars, arrays: Arrays, received: exchange.Received
) -> Arrays:
  """Steps the rows of a device that have gradients; all other rows stay bit-identical.

  `arrays` are the table `[V, D]` and slots `[V, D]` or `[V]`, as `rows.as_rows` returns them; they
  are updated in place if they are donated.
  """
  is_distinct = isinstance(received, DistinctRows)
  parts = [received.as_grad_rows()] if isinstance(received, DistinctRows) else received
  parts = [part for part in parts if part.ids.size]
  if not parts:
    return arrays
  optimizer, table = stack.optimizer, arrays["parameters"]
  assert optimizer is not None
  zero = xla.zero_after(scalars.rate)  # orders the step even if its equation does not use the rate
  parts = [part._replace(ids=part.ids + zero) for part in parts]
  if stack.back_end is not None:
    return BACK_ENDS[stack.back_end].step(stack, scalars, arrays, parts, is_distinct)
  if _is_plain_sum(optimizer, table):
    return arrays | {"parameters": _add_steps(optimizer, scalars.rate, table, parts)}

  def on_cpu(arrays, parts):
    row_step = functools.partial(step_stored, stack, scalars)
    ids = grads_lib.flat_ids(parts, table.shape[0])
    if is_distinct:
      return step_distinct(arrays, ids, jnp.int32(ids.size), parts[0].grads, row_step)
    return step_summed(arrays, ids, parts, row_step)

  def on_accelerator(arrays, parts):
    return step_sorted(stack, scalars, arrays, parts, is_distinct)

  if isinstance(table, Lines):
    return on_accelerator(arrays, parts)
  return jax.lax.platform_dependent(arrays, parts, cpu=on_cpu, default=on_accelerator)


def step_sorted(
  stack: StackSpec,
  scalars: StepScalars,
  arrays: Arrays,
  parts: Sequence[GradRows],
  is_distinct: bool,
  step_part: Callable[..., Arrays] | None = None,
  chunk: int | None = None,
) -> Arrays:
  """Sums the gradients of each row after a sort, and steps these rows in chunks.

  Old and new rows and slots of a chunk take little memory compared with the gradients.

  Args:
    stack: the stack of the table.
    scalars: the scalars of the step.
    arrays: the table and its slots.
    parts: gradients, with at least one id.
    is_distinct: whether no row has two gradients.
    step_part: `f(row_step, arrays, at, g)`, which steps the rows of a chunk; None leaves it to XLA.
    chunk: the elements of a chunk, `grads.CHUNK` if None.
  """
  size, row_step = arrays["parameters"].shape[0], functools.partial(step_stored, stack, scalars)
  if is_distinct:
    rows = DistinctRows(grads_lib.flat_ids(parts, size), parts[0].grads)
  else:
    rows = grads_lib.sum_per_row(parts, size, chunk)
  entries = jnp.arange(1, rows.ids.shape[0] + 1, dtype=jnp.int32)
  used = jnp.max(jnp.where(rows.ids < size, entries, 0))  # later entries hold no rows
  step = functools.partial(step_part or _step_part, row_step)
  return grads_lib.in_chunks(step, arrays, stack.dim, rows.ids, rows.values, chunk=chunk, used=used)


def _step_part(row_step: RowStep, arrays: Arrays, at: jax.Array, g: jax.Array) -> Arrays:
  """Steps the distinct rows `at` of a table and its slots together; skips ids out of range.

  Barriers keep XLA from fusing the reads into two consumers, which would make it copy the table.
  """
  old = jax.lax.optimization_barrier(rows_lib.read(arrays, at))
  new = jax.lax.optimization_barrier(row_step(at, g, old))
  return rows_lib.write(arrays, at, new)


def _add_steps(
  optimizer: "RowOptimizer", rate: jax.Array, table: rows_lib.Rows, parts: Sequence[GradRows]
) -> rows_lib.Rows:
  """Adds the step of each id separately, for a linear optimizer."""
  none = jnp.zeros((), jnp.float32)
  move = lambda g: step_rows(optimizer, g, none, {}, rate)[0]
  parts = grads_lib.with_ids(parts, grads_lib.flat_ids(parts, table.shape[0]))

  def on_cpu(table, parts):
    # XLA:CPU ignores barriers and would fuse the lookup's reads of the table into the additions,
    # and then copy the table. It cannot see through a loop; this one runs at most once.
    runs = sum(jnp.any(part.ids < table.shape[0]).astype(jnp.int32) for part in parts)
    add = lambda _, table: grads_lib.add_rows_on_cpu(table, parts, step=move)
    return jax.lax.fori_loop(0, jnp.minimum(runs, 1), add, table)

  def on_accelerator(table, parts):
    steps = [part._replace(grads=move(part.grads)) for part in parts]
    return grads_lib.add_in_chunks(table, steps)

  if isinstance(table, Lines):
    return on_accelerator(table, parts)
  return jax.lax.platform_dependent(table, parts, cpu=on_cpu, default=on_accelerator)


def _is_plain_sum(optimizer: "RowOptimizer", table: rows_lib.Rows) -> bool:
  plain = (
    optimizer.linear
    and optimizer.clipvalue is None
    and not optimizer.weight_decay_factor
    and optimizer.clip_weight_min is None
    and optimizer.clip_weight_max is None
  )
  return plain and table.dtype == jnp.float32  # a narrower table would round at every addition


# --- steps in the forms that XLA:CPU compiles well ------------------------------------------------


SPAN = 1 << 13  # the fewest rows whose gradients are summed at a time


def step_summed(
  arrays: Arrays, ids: jax.Array, parts: Sequence[GradRows], row_step: RowStep
) -> Arrays:
  """Sums the gradients of the distinct rows and steps them, a span of rows at a time.

  A span is an eighth of the ids: it takes little memory, and there are rarely more than two spans,
  since ids repeat. `ids`, `[N]`, are the ids of `parts`, V for padding.
  """
  size, dim = arrays["parameters"].shape
  position, unique, count = grads_lib.distinct_by_hash(ids, size)
  parts = grads_lib.with_ids(parts, position)  # no id has the position of padding, N
  n = ids.shape[0]
  chunk = min(max(1, grads_lib.CACHED // dim), n)
  span = -(-min(n, max(SPAN, -(-n // 8))) // chunk) * chunk
  unique = jnp.pad(unique, (0, -n % span), constant_values=size)

  def step_span(i, arrays):
    sums = grads_lib.add_rows_on_cpu(jnp.zeros((span, dim), jnp.float32), parts, i * span)
    of_span = lax.dynamic_slice_in_dim(unique, i * span, span)
    number = jnp.minimum(count - i * span, span)
    return step_distinct(arrays, of_span, number, sums, row_step)

  return lax.fori_loop(0, (count + span - 1) // span, step_span, arrays)


def step_distinct(
  arrays: Arrays, ids: jax.Array, number: jax.Array, sums: jax.Array, row_step: RowStep
) -> Arrays:
  """Steps the first `number` of the distinct rows `ids`, `[M]`, by their gradients, `[M, D]`.

  Works in place, in chunks that stay in cache while they are read, stepped and written.
  """
  size, dim = arrays["parameters"].shape
  chunk = min(max(2, grads_lib.CACHED // dim), max(2, ids.shape[0]))
  pad = -ids.shape[0] % chunk
  if pad:
    ids = jnp.pad(ids, (0, pad), constant_values=size)
    sums = jnp.pad(sums, ((0, pad), (0, 0)))

  def step_chunk(i, arrays):
    at = lax.dynamic_slice_in_dim(ids, i * chunk, chunk)
    g = lax.dynamic_slice_in_dim(sums, i * chunk, chunk)
    new = row_step(at, g, _read_on_cpu(arrays, at, size, number))
    write = lambda x, v: x.at[at].set(v.astype(x.dtype), unique_indices=True, **grads_lib.DROP)
    return jax.tree.map(write, arrays, new)

  return lax.fori_loop(0, (number + chunk - 1) // chunk, step_chunk, arrays)


def _read_on_cpu(arrays: Arrays, at: jax.Array, size: int, number: jax.Array) -> Arrays:
  """The rows `at` of a table and its slots, zeros for padding; `number` is always positive.

  XLA:CPU compiles a gather on its own to one scalar load per element; a gather multiplied by
  something becomes vector loads, four times as fast. If a read has two uses, as in Adagrad, XLA
  leaves the gather on its own; inside a conditional, it does not see both uses.
  """
  valid = at < size
  safe = jnp.minimum(at, size - 1)

  def row(x):
    one = valid.astype(x.dtype)
    return x.at[safe].get(**grads_lib.IN_BOUNDS) * one.reshape(-1, *[1] * (x.ndim - 1))

  read = lambda: jax.tree.map(row, arrays)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros((at.shape[0], *x.shape[1:]), x.dtype), arrays)
  return lax.cond(number > 0, read, zeros)


# --- stochastic rounding --------------------------------------------------------------------------


def rounding_noise(keys: jax.Array, columns: jax.Array) -> jax.Array:
  """Random bits, uint32 `[..., D]`, for rows with keys `[...]` and columns with numbers `[D]`."""
  columns = columns.astype(jnp.uint32) * jnp.uint32(GOLDEN)
  columns = columns.reshape(*[1] * keys.ndim, -1)
  return scramble(scramble(keys.astype(jnp.uint32))[..., None] + columns)


def rounding_key(*numbers: jax.Array | int) -> jax.Array:
  """Mixes integers, such as the numbers of a table and a step, into a uint32 key."""
  key = jnp.uint32(0)
  for number in numbers:
    number = jnp.uint32(number) if isinstance(number, int) else number.astype(jnp.uint32)
    key = scramble(key ^ number) + jnp.uint32(GOLDEN)
  return key


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
  """Rounds float32 `x` at random to an adjacent bfloat16; the closer one is more likely.

  `bits` are random uint32. Values that bfloat16 can represent, infinities and NaN do not change.
  """
  whole = jax.lax.bitcast_convert_type(x, jnp.uint32)
  # A float's bits grow with its magnitude: noise below one bfloat16 unit carries into the last bit.
  carried = (whole + (bits & jnp.uint32(0xFFFF))) >> jnp.uint32(16)
  rounded = jax.lax.bitcast_convert_type(carried.astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
