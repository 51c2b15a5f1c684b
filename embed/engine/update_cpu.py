"""Rows on CPU: distinct ids, sums and steps in the forms that XLA:CPU compiles well.

`row_sums` and `update` define the meaning; this is the formulation for one backend, where sorting
is slow, loops are cheap, memory not touched is memory not paid for, and a fusion re-reads a table
wherever it can. What XLA compiles to vector code and what to one scalar at a time shaped every
function here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from embed.engine.grads import GradRows, with_ids
from embed.engine.stack import Arrays, RowStep

# No index here counts from the end: without these JAX emits a select per index.
IN_BOUNDS: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
DROP: Any = {"mode": "drop", "wrap_negative_indices": False}

CHUNK = 1 << 15  # elements stepped at a time: with slots and temporaries, the inner caches
SPAN = 1 << 13  # rows whose gradients are summed at a time, at least


# --- distinct ids --------------------------------------------------------------------------------


def distinct(ids: jax.Array, fill: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`row_sums.distinct_by_sort` for CPU, in no particular order.

  Every occurrence writes its position to a cell and reads back who won it: if that one has the
  same id, it is settled. Whoever lost its cell to another id tries again with another hash. Each
  round settles an id at least, so it ends, and is exact, for any ids; two rounds are usual.
  """
  n = ids.shape[0]
  bits = max(4, (4 * n - 1).bit_length())
  position = jnp.arange(n, dtype=jnp.int32)
  key = ids.astype(jnp.uint32)

  def attempt(carry):
    k, winner, cells, _ = carry
    odd = (k * jnp.uint32(0x85EBCA6B) + jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    cell = ((key * odd) >> jnp.uint32(32 - bits)).astype(jnp.int32)
    # Cells are not cleared between rounds: a stale position has another id, or the right one.
    cells = cells.at[jnp.where(winner < 0, cell, 1 << bits)].set(position, **DROP)
    other = cells.at[cell].get(**IN_BOUNDS)
    settled = (winner < 0) & (ids.at[other].get(**IN_BOUNDS) == ids)
    winner = jnp.where(settled, other, winner)
    return k + jnp.uint32(1), winner, cells, jnp.any(winner < 0)

  padding = ids == fill
  carry = (
    jnp.uint32(0),
    jnp.where(padding, 0, -1).astype(jnp.int32),
    jnp.zeros(1 << bits, jnp.int32),
    jnp.any(~padding),
  )
  winner = lax.while_loop(lambda c: c[3], attempt, carry)[1]
  rank, count = _rank((winner == position) & ~padding)
  where = jnp.where(padding, n, rank.at[winner].get(**IN_BOUNDS))
  # All occurrences write, the same value: selecting one of each would cost a branch per id.
  unique = jnp.full(n, fill, jnp.int32).at[where].set(ids, **DROP)
  return where, unique, count


def _rank(chosen: jax.Array, rows: int = 64) -> tuple[jax.Array, jax.Array]:
  """Numbers the chosen positions 0, 1, ... in some order, and how many they are.

  A running sum down the columns of a grid adds whole rows, eight times as fast as `cumsum` here.
  """
  n = chosen.shape[0]
  columns = -(-n // rows)
  grid = jnp.pad(chosen.astype(jnp.int32), (0, rows * columns - n)).reshape(rows, columns)
  totals, before = lax.scan(lambda t, row: (t + row, t), jnp.zeros(columns, jnp.int32), grid)
  starts = jnp.cumsum(totals) - totals
  return (before + starts[None]).reshape(-1)[:n], starts[-1] + totals[-1]


# --- sums and steps ------------------------------------------------------------------------------


def add_rows(
  to: jax.Array,
  parts: Sequence[GradRows],
  offset: jax.Array | int = 0,
  step: Callable[[jax.Array], jax.Array] = lambda g: g,
) -> jax.Array:
  """Adds gain * step(gradient) of every id to `to[id - offset]`, if there is such a row.

  One scatter per column of the bags and block of the batch: a scatter of rows is vector code that
  skips those out of range at a nanosecond each, a block of gradients stays in cache for all its
  columns, and no `[B, L, D]` is ever made.
  """
  for part in parts:
    if not part.ids.size:
      continue
    batch = part.grads.shape[0]
    gains = None if part.gains is None else part.gains.T
    columns = part._replace(ids=part.ids.T - offset, gains=gains)
    block = min(max(1, CHUNK // to.shape[1]), batch)

    def add(start, size, to, columns=columns):
      return _add_block(to, columns, start, size, step)

    to = lax.fori_loop(
      0, batch // block, lambda i, to, add=add, block=block: add(i * block, block, to), to
    )
    if batch % block:
      to = add(batch - batch % block, batch % block, to)
  return to


def _add_block(to, columns: GradRows, start, size, step) -> jax.Array:
  """`add_rows` of the activations `[start, start + size)`; `ids` and `gains` are `[L, B]`."""
  grads = step(lax.dynamic_slice_in_dim(columns.grads, start, size))
  ids = lax.dynamic_slice_in_dim(columns.ids, start, size, axis=1)
  gains = columns.gains
  if gains is not None:
    gains = lax.dynamic_slice_in_dim(gains, start, size, axis=1)

  def add(k, to):
    rows = grads if gains is None else grads * gains[k][:, None]
    return to.at[ids[k]].add(rows.astype(to.dtype), **DROP)

  return add(0, to) if ids.shape[0] == 1 else lax.fori_loop(0, ids.shape[0], add, to)


def step_summed(
  arrays: Arrays, ids: jax.Array, parts: Sequence[GradRows], row_step: RowStep
) -> Arrays:
  """Sums the gradients of the distinct rows and steps them, a span of rows at a time.

  A span is an eighth of the ids: little memory, and seldom more than one or two spans, since ids
  repeat. `ids` `[N]` are those of `parts`, sanitised to V for padding.
  """
  size, dim = arrays["parameters"].shape
  position, unique, count = distinct(ids, size)
  parts = with_ids(parts, position)  # padding's position, N, is never that of an id
  n = ids.shape[0]
  chunk = min(max(1, CHUNK // dim), n)
  span = -(-min(n, max(SPAN, -(-n // 8))) // chunk) * chunk
  unique = jnp.pad(unique, (0, -n % span), constant_values=size)

  def step_span(i, arrays):
    sums = add_rows(jnp.zeros((span, dim), jnp.float32), parts, i * span)
    of_span = lax.dynamic_slice_in_dim(unique, i * span, span)
    number = jnp.minimum(count - i * span, span)
    return step_distinct(arrays, of_span, number, sums, row_step)

  return lax.fori_loop(0, (count + span - 1) // span, step_span, arrays)


def step_distinct(
  arrays: Arrays, ids: jax.Array, number: jax.Array, sums: jax.Array, row_step: RowStep
) -> Arrays:
  """Steps the first `number` of the distinct rows `ids` `[M]` by their gradients `[M, D]`.

  In place, in chunks that stay in cache between being read, stepped and written.
  """
  size, dim = arrays["parameters"].shape
  chunk = min(max(2, CHUNK // dim), max(2, ids.shape[0]))
  pad = -ids.shape[0] % chunk
  if pad:
    ids = jnp.pad(ids, (0, pad), constant_values=size)
    sums = jnp.pad(sums, ((0, pad), (0, 0)))

  def step_chunk(i, arrays):
    at = lax.dynamic_slice_in_dim(ids, i * chunk, chunk)
    g = lax.dynamic_slice_in_dim(sums, i * chunk, chunk)
    new = row_step(at, g, _read(arrays, at, size, number))
    write = lambda x, v: x.at[at].set(v.astype(x.dtype), unique_indices=True, **DROP)
    return jax.tree.map(write, arrays, new)

  return lax.fori_loop(0, (number + chunk - 1) // chunk, step_chunk, arrays)


def _read(arrays: Arrays, at: jax.Array, size: int, number: jax.Array) -> Arrays:
  """The rows `at` of a table and its slots, zeros for padding; `number` is positive.

  Alone, XLA:CPU compiles a gather to one scalar load per element; multiplied by something, to
  vector loads, four times as fast. Where a read has two uses, as in Adagrad, it leaves the gather
  alone; what is inside a conditional it does not see.
  """
  valid = at < size
  safe = jnp.minimum(at, size - 1)

  def row(x):
    one = valid.astype(x.dtype)
    return x.at[safe].get(**IN_BOUNDS) * one.reshape(-1, *[1] * (x.ndim - 1))

  read = lambda: jax.tree.map(row, arrays)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros((at.shape[0], *x.shape[1:]), x.dtype), arrays)
  return lax.cond(number > 0, read, zeros)
