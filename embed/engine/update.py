"""Applying row gradients to a table: find the distinct rows, sum, step them in place.

Cost and memory follow the batch, never the vocabulary. Two formulations of one meaning: on CPU
(`cpu`) a hash table names the distinct ids without sorting, and as many rows are summed and stepped
as there are; on accelerators, where loops are slow and sorting is fast, everything happens at once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from embed.engine import update_cpu as cpu
from embed.engine.layout import Columns
from embed.engine.lookup import Occurrences
from embed.row_optimizer import WHOLE_ROWS, RowOptimizer, Slots


class Piece(NamedTuple):
  """The gradient of one lookup's activations, float `[*batch, D]`, and what they were made of."""

  grads: jax.Array
  occurrences: Occurrences


class SummedRows(NamedTuple):
  """One gradient per touched row; the entries from `number` on are padding."""

  ids: jax.Array  # int32 [M]
  values: jax.Array  # float32 [M, D]
  number: jax.Array  # int32 scalar


def cumsum(x: jax.Array, block: int = 512) -> jax.Array:
  """Two-level: a flat one of a million elements takes the TPU compiler half a minute."""
  n = x.shape[0]
  blocks = jnp.pad(x, (0, -n % block)).reshape(-1, block)
  within = jnp.cumsum(blocks, axis=1)
  before = jnp.cumsum(within[:, -1]) - within[:, -1]
  return (within + before[:, None]).reshape(-1)[:n]


def _distinct_by_sort(ids: jax.Array, fill: int) -> cpu.Distinct:
  n = ids.shape[0]
  ordered, order = jax.lax.sort((ids, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=False)
  new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != fill)
  rank = cumsum(new.astype(jnp.int32)) - 1
  found = jnp.full(n, fill, jnp.int32).at[jnp.where(new, rank, n)].set(ordered, **cpu.DROP)
  rank_or_none = jnp.where(ordered == fill, n, rank)
  place = jnp.zeros(n, jnp.int32).at[order].set(rank_or_none, unique_indices=True)
  return cpu.Distinct(place, found, rank[-1] + 1)


def distinct(ids: jax.Array, fill: int) -> cpu.Distinct:
  """The distinct ids of int32 `[N]`, in no particular order; entries equal to `fill` are none."""
  return jax.lax.platform_dependent(
    ids,
    cpu=functools.partial(cpu.distinct, fill=fill),
    default=functools.partial(_distinct_by_sort, fill=fill),
  )


# --- expanding activation gradients to rows ------------------------------------------------------


def _flat_ids(pieces: Sequence[Piece], vocabulary_size: int) -> jax.Array:
  """All ids `[N]` in order, whatever is not a row of the table as padding."""
  ids = jnp.concatenate([p.occurrences.ids.reshape(-1) for p in pieces])
  return jnp.where((ids >= 0) & (ids < vocabulary_size), ids, vocabulary_size)


def addends_of(pieces: Sequence[Piece], places: jax.Array) -> list[cpu.Addend]:
  """The pieces as gradients `[B, D]` that go to `[B, L]` of the flat `places` `[N]`."""
  sizes = [p.occurrences.ids.size for p in pieces]
  addends = []
  for piece, place in zip(pieces, jnp.split(places, np.cumsum(sizes)[:-1]), strict=True):
    grads, occ = piece.grads.astype(jnp.float32), piece.occurrences
    gains, dim = occ.gains, piece.grads.shape[-1]
    if occ.segments is not None:
      rows = grads.reshape(-1, dim).at[occ.segments].get(mode="fill", fill_value=0)
      rows = rows if gains is None else rows * gains[:, None]
      addends.append(cpu.Addend(rows, place[:, None], None))
      continue
    bags, length = math.prod(occ.batch), occ.ids.shape[-1]
    if gains is not None and gains.shape[-1] != length:
      grads, gains = grads * gains, None  # one gain per activation
    gains = None if gains is None else gains.reshape(bags, length)
    addends.append(cpu.Addend(grads.reshape(bags, dim), place.reshape(bags, length), gains))
  return addends


def _expand(addend: cpu.Addend) -> jax.Array:
  """One row per occurrence, `[B * L, D]`."""
  rows = jnp.repeat(addend.grads, addend.place.shape[1], axis=0)
  return rows if addend.gains is None else rows * addend.gains.reshape(-1, 1)


def _add_at_once(to: jax.Array, addends: Sequence[cpu.Addend]) -> jax.Array:
  for addend in addends:
    to = to.at[addend.place.reshape(-1)].add(_expand(addend).astype(to.dtype), **cpu.DROP)
  return to


def add_rows(to: jax.Array, addends: Sequence[cpu.Addend]) -> jax.Array:
  """Adds gain * gradient of every occurrence at its place in `to`; out of range is dropped."""
  return jax.lax.platform_dependent(to, addends, cpu=cpu.add_rows, default=_add_at_once)


def sum_rows(pieces: Sequence[Piece], vocabulary_size: int) -> SummedRows:
  """The sum of the gradients of every touched row, over duplicates, features and calls.

  Touched is an id that was looked up, even with weight 0 or a gradient that cancels.

  Returns:
    ids `[N]` with `vocabulary_size` in unused entries, values `[N, D]` with 0 there, N being the
    number of ids given.
  """
  ids = _flat_ids(pieces, vocabulary_size)
  found = distinct(ids, vocabulary_size)
  sums = jnp.zeros((ids.shape[0], pieces[0].grads.shape[-1]), jnp.float32)
  return SummedRows(found.ids, add_rows(sums, addends_of(pieces, found.place)), found.number)


def expand_rows(pieces: Sequence[Piece], vocabulary_size: int) -> SummedRows:
  """One entry per occurrence in batch order: what `use_gradient_accumulation=False` steps on."""
  ids = _flat_ids(pieces, vocabulary_size)
  values = [_expand(addend) for addend in addends_of(pieces, ids)]
  stacked = jnp.where((ids < vocabulary_size)[:, None], jnp.concatenate(values), 0)
  return SummedRows(ids, stacked, jnp.int32(ids.shape[0]))


# --- stepping ------------------------------------------------------------------------------------

State = tuple[jax.Array, Slots]
Write = Callable[[jax.Array, jax.Array, jax.Array | int], jax.Array]


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


@dataclasses.dataclass(frozen=True)
class Rule:
  """How rows step.

  `optimizer`: the table's. `rate`: the learning rate, a scalar. `write`: of new rows float32
  `[n, D]`, where they are in the table `[n]`, and how often they have stepped in this step, the
  rows as they are stored; None rounds to the nearest. `columns`: which columns of the rows are on
  this device.
  """

  optimizer: RowOptimizer
  rate: jax.Array
  write: Write | None = None
  columns: Columns = WHOLE_ROWS

  def __call__(
    self, at: jax.Array, g: jax.Array, w: jax.Array, slots: Any, time: jax.Array | int = 0
  ) -> State:
    """The rows `at`, of gradients `g` `[n, D]`, as they are stored after the step."""
    w32 = w.astype(jnp.float32)
    new, slots = step_rows(self.optimizer, g, w32, slots, self.rate, self.columns)
    return new.astype(w.dtype) if self.write is None else self.write(new, at, time), slots


def _step_at(
  rule: Rule, state: State, at: jax.Array, g: jax.Array, time: jax.Array | int = 0
) -> State:
  """Steps the distinct rows `at` of the table and its slots; out of range steps nothing.

  Barriers keep XLA from fusing the reads into two consumers, after which it copies the table.
  """
  table, slots = state
  read = lambda x: x.at[at].get(mode="clip")
  rows, old = jax.lax.optimization_barrier((read(table), {k: read(s) for k, s in slots.items()}))
  w, new = jax.lax.optimization_barrier(rule(at, g, rows, old, time))
  write = lambda x, v: x.at[at].set(v.astype(x.dtype), mode="drop", unique_indices=True)
  return write(table, w), {k: write(s, new[k]) for k, s in slots.items()}


def _step_in_order(rule: Rule, state: State, rows: SummedRows) -> State:
  # Beside each occurrence an entry that steps nothing: a scatter of one row would become a slice
  # that XLA fuses with its reads, and pays for with a copy of the table at every occurrence.
  nothing = jnp.full(1, np.iinfo(np.int32).max, jnp.int32)

  def body(n, state):
    at = jnp.concatenate([jax.lax.dynamic_slice_in_dim(rows.ids, n, 1), nothing])
    g = jnp.pad(jax.lax.dynamic_slice_in_dim(rows.values, n, 1), ((0, 1), (0, 0)))
    return _step_at(rule, state, at, g, n)

  return jax.lax.fori_loop(0, rows.ids.shape[0], body, state)


def _add_steps(rule: Rule, table, pieces) -> jax.Array:
  """For a linear optimizer without further ado: adds every occurrence's own step."""
  none = jnp.zeros((), jnp.float32)
  move = lambda g: step_rows(rule.optimizer, g, none, {}, rule.rate)[0]
  addends = addends_of(pieces, _flat_ids(pieces, table.shape[0]))

  def on_cpu(table, addends):
    # XLA:CPU ignores barriers and would fuse the lookup's reads of the table into the additions,
    # and then copy the table. It cannot look through a loop; this one runs once, or not at all.
    runs = sum(jnp.any(a.place < table.shape[0]).astype(jnp.int32) for a in addends)
    add = lambda _, table: cpu.add_rows(table, addends, step=move)
    return jax.lax.fori_loop(0, jnp.minimum(runs, 1), add, table)

  def at_once(table, addends):
    return _add_at_once(table, [a._replace(grads=move(a.grads)) for a in addends])

  return jax.lax.platform_dependent(table, addends, cpu=on_cpu, default=at_once)


def _is_plain_sum(optimizer: RowOptimizer, table: jax.Array) -> bool:
  plain = (
    optimizer.linear
    and optimizer.clipvalue is None
    and not optimizer.weight_decay_factor
    and optimizer.clip_weight_min is None
    and optimizer.clip_weight_max is None
  )
  return plain and table.dtype == jnp.float32  # a narrower table would round at every addition


def step(
  table: jax.Array,
  slots: Slots,
  pieces: Sequence[Piece],
  rule: Rule,
  *,
  distinct_ids: bool = False,
) -> State:
  """One optimizer step of a table.

  Args:
    table: `[V, D]`; donate it and the slots, they are updated in place.
    slots: by name, `[V, D]` or `[V]`.
    pieces: activation gradients with what was looked up.
    rule: how its rows step.
    distinct_ids: whether the pieces are one piece of rows already summed.

  Returns:
    The new table and slots. Rows that were not looked up keep their bits.
  """
  size, optimizer = table.shape[0], rule.optimizer
  pieces = [p for p in pieces if p.occurrences.ids.size]
  if optimizer.equation is None:
    return table, slots
  if not optimizer.lazy:
    g = jnp.zeros(table.shape, jnp.float32)
    g = add_rows(g, addends_of(pieces, _flat_ids(pieces, size))) if pieces else g
    return rule(jnp.arange(size, dtype=jnp.int32), g, table, slots)
  if not pieces:
    return table, slots
  if _is_plain_sum(optimizer, table):
    return _add_steps(rule, table, pieces), slots
  if not optimizer.use_gradient_accumulation:
    return _step_in_order(rule, (table, slots), expand_rows(pieces, size))
  ids = _flat_ids(pieces, size)
  if distinct_ids:
    values = pieces[0].grads.astype(jnp.float32)
    rows = SummedRows(ids, values, jnp.int32(ids.shape[0]))
    return _step_distinct(rule, (table, slots), rows)
  return _step_summed(rule, (table, slots), (ids, pieces))


def _step_summed(rule: Rule, state: State, given) -> State:
  """Sums and steps: on CPU span by span, elsewhere all at once."""

  def on_cpu(state, given):
    ids, pieces = given
    found = cpu.distinct(ids, state[0].shape[0])
    return cpu.step_summed(state[0], state[1], found, addends_of(pieces, found.place), rule)

  def at_once(state, given):
    rows = sum_rows(given[1], state[0].shape[0])
    return _step_at(rule, state, rows.ids, rows.values)

  return jax.lax.platform_dependent(state, given, cpu=on_cpu, default=at_once)


def _step_distinct(rule: Rule, state: State, rows: SummedRows) -> State:
  def on_cpu(state, rows):
    return cpu.step_rows(state[0], state[1], rows.ids, rows.number, rows.values, rule)

  def at_once(state, rows):
    return _step_at(rule, state, rows.ids, rows.values)

  return jax.lax.platform_dependent(state, rows, cpu=on_cpu, default=at_once)
