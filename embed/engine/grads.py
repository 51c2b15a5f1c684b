"""The forms of a gradient (of activations, rows or distinct rows), and the sum for each row.

The sum has two equivalent formulations. On CPU, sorting is slow, loops are cheap, and untouched
memory costs nothing: a hash table finds the distinct ids. Accelerators sort all ids. With the
accelerators' formulation, a step on CPU takes 2 to 16 times as long for Adagrad and Adam (4,096 to
524,288 ids, D of 16 and 128, two cores), and up to 1.8 times as long for SGD.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from embed.engine.bags import UNUSED, Bags, LookupRecord, is_row
from embed.engine.rows import Lines


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGrads:
  """The gradients of a lookup's activations, `[*batch, D]` for each feature, and its record."""

  grads: tuple[jax.Array, ...]
  record: LookupRecord


class GradRows(NamedTuple):
  """Gradients and the rows that receive them: row `ids[b, l]` gets `gains[b, l] * grads[b]`.

  Attributes:
    grads: float32 `[B, D]`.
    ids: int32 `[B, L]`; ids outside the table are padding.
    gains: float32 `[B, L]`, or None for 1.
  """

  grads: jax.Array
  ids: jax.Array
  gains: jax.Array | None = None

  def expanded(self) -> jax.Array:
    """One gradient for each id, `[B * L, D]`."""
    rows = jnp.repeat(self.grads, self.ids.shape[1], axis=0)
    return rows if self.gains is None else rows * self.gains.reshape(-1, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistinctRows:
  """One gradient for each row that was looked up.

  Attributes:
    ids: int32 `[M]`, each row at most once, and padding; on a mesh, local rows of each shard, one
      shard after another.
    values: float32 `[M, D]`, 0 at padding.
  """

  ids: jax.Array
  values: jax.Array

  def as_grad_rows(self) -> GradRows:
    return GradRows(self.values, self.ids[:, None])


def from_activations(grads: jax.Array, bags: Bags) -> GradRows:
  """Converts the gradients of one feature's activations, `[*batch, D]`, to gradients of rows."""
  grads, gains, dim = grads.astype(jnp.float32), bags.gains, grads.shape[-1]
  if bags.is_ragged:
    rows = bags.per_id(grads)
    return GradRows(rows if gains is None else rows * gains[:, None], bags.ids[:, None])
  count, length = math.prod(bags.batch), bags.ids.shape[-1]
  if gains is not None and gains.shape[-1] != length:
    grads, gains = grads * gains, None  # one gain for each activation
  gains = None if gains is None else gains.reshape(count, length)
  return GradRows(grads.reshape(count, dim), bags.ids.reshape(count, length), gains)


def flat_ids(parts: Sequence[GradRows], size: int) -> jax.Array:
  """All ids `[N]`, in order; `size` for ids that are not rows of the table."""
  ids = jnp.concatenate([part.ids.reshape(-1) for part in parts])
  return jnp.where(is_row(ids, size), ids, size)


def with_ids(parts: Sequence[GradRows], ids: jax.Array) -> list[GradRows]:
  """The same gradients, with their ids replaced with the flat `ids`, `[N]`."""
  sizes = [part.ids.size for part in parts]
  ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
  return [
    part._replace(ids=some.reshape(part.ids.shape))
    for part, some in zip(parts, jnp.split(ids, ends), strict=True)
  ]


# --- sums in the forms that XLA:CPU compiles well -------------------------------------------------


# No index here counts from the end: without these options, JAX emits a select per index.
IN_BOUNDS: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}

DROP: Any = {"mode": "drop", "wrap_negative_indices": False}

CACHED = 1 << 15  # elements stepped at a time: fit in the inner caches, with slots and temporaries


def distinct_by_hash(ids: jax.Array, fill: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Does the same as `distinct_by_sort`, for CPU, with the ids in no particular order.

  Every occurrence writes its position to a cell and reads the cell back: it is settled if the
  winner has the same id, and otherwise tries again with another hash. Each round settles at least
  one id, so the loop ends, and the result is exact for any ids; two rounds are typical.
  """
  n = ids.shape[0]
  bits = max(4, (4 * n - 1).bit_length())
  position = jnp.arange(n, dtype=jnp.int32)
  key = ids.astype(jnp.uint32)

  def attempt(carry):
    k, winner, cells, _ = carry
    odd = (k * jnp.uint32(0x85EBCA6B) + jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    cell = ((key * odd) >> jnp.uint32(32 - bits)).astype(jnp.int32)
    # Cells are not cleared between rounds: a stale position holds another id, or the right one.
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
  # All occurrences of an id write the same value: selecting one would cost a branch per id.
  unique = jnp.full(n, fill, jnp.int32).at[where].set(ids, **DROP)
  return where, unique, count


def _rank(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Numbers the chosen positions 0, 1, ... in some order; also returns how many there are.

  A running sum down the columns of a grid adds whole rows, eight times as fast as `cumsum` here.
  """
  n, rows = chosen.shape[0], 64
  columns = -(-n // rows)
  grid = jnp.pad(chosen.astype(jnp.int32), (0, rows * columns - n)).reshape(rows, columns)
  totals, before = lax.scan(lambda t, row: (t + row, t), jnp.zeros(columns, jnp.int32), grid)
  starts = jnp.cumsum(totals) - totals
  return (before + starts[None]).reshape(-1)[:n], starts[-1] + totals[-1]


def add_rows_on_cpu(
  to: jax.Array,
  parts: Sequence[GradRows],
  offset: jax.Array | int = 0,
  step: Callable[[jax.Array], jax.Array] = lambda g: g,
) -> jax.Array:
  """Adds gain * step(gradient) for every id to `to[id - offset]`, if there is such a row.

  Uses one scatter per column of the bags and block of the batch: a scatter of rows is vector code
  that skips rows out of range in a nanosecond each, a block of gradients stays in cache for all its
  columns, and no `[B, L, D]` array is ever made.
  """
  for part in parts:
    if not part.ids.size:
      continue
    batch = part.grads.shape[0]
    gains = None if part.gains is None else part.gains.T
    columns = part._replace(ids=part.ids.T - offset, gains=gains)
    block = min(max(1, CACHED // to.shape[1]), batch)

    def add(start, size, to, columns=columns):
      return _add_block(to, columns, start, size, step)

    to = lax.fori_loop(
      0, batch // block, lambda i, to, add=add, block=block: add(i * block, block, to), to
    )
    if batch % block:
      to = add(batch - batch % block, batch % block, to)
  return to


def _add_block(to, columns: GradRows, start, size, step) -> jax.Array:
  """Does `add_rows_on_cpu` for activations `[start, start + size)`; ids and gains are `[L, B]`."""
  grads = step(lax.dynamic_slice_in_dim(columns.grads, start, size))
  ids = lax.dynamic_slice_in_dim(columns.ids, start, size, axis=1)
  gains = columns.gains
  if gains is not None:
    gains = lax.dynamic_slice_in_dim(gains, start, size, axis=1)

  def add(k, to):
    rows = grads if gains is None else grads * gains[k][:, None]
    return to.at[ids[k]].add(rows.astype(to.dtype), **DROP)

  return add(0, to) if ids.shape[0] == 1 else lax.fori_loop(0, ids.shape[0], add, to)


# --- one sum for each row -------------------------------------------------------------------------


def cumsum(x: jax.Array) -> jax.Array:
  """Cumulative sum in two levels: XLA:TPU takes half a minute to compile one level of a million."""
  n, block = x.shape[0], 512
  blocks = jnp.pad(x, (0, -n % block)).reshape(-1, block)
  within = jnp.cumsum(blocks, axis=1)
  before = jnp.cumsum(within[:, -1]) - within[:, -1]
  return (within + before[:, None]).reshape(-1)[:n]


def distinct_by_sort(ids: jax.Array, fill: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the distinct ids among integers `[N]`, ascending; `fill`, greater than any, is padding.

  For accelerators, where sorting is fast and loops are slow; for CPU see `distinct_by_hash`.

  Returns:
    Each id's position among the distinct ones, int32 `[N]`, N where it equals `fill`; the distinct
    ids, then `fill`, `[N]`; and their number, an int32 scalar.
  """
  n = ids.shape[0]
  ordered, order = jax.lax.sort((ids, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=False)
  new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != fill)
  rank = cumsum(new.astype(jnp.int32)) - 1
  unique = jnp.full(n, fill, ids.dtype).at[jnp.where(new, rank, n)].set(ordered, **DROP)
  rank_or_none = jnp.where(ordered == fill, n, rank)
  position = jnp.zeros(n, jnp.int32).at[order].set(rank_or_none, unique_indices=True)
  return position, unique, rank[-1] + 1


CHUNK = 1 << 22  # elements that an accelerator works on at a time, 16 MiB of float32
_SMALLEST = 8  # the fewest entries of a chunk


def in_chunks(
  body: Callable[..., Any],
  carry: Any,
  size: int,
  ids: jax.Array,
  *arrays: jax.Array,
  chunk: int | None = None,
  used: jax.Array | None = None,
) -> Any:
  """Runs `carry = body(carry, ids, *arrays)` on chunks of ids and of arrays of the same length.

  Processing all entries at once would need memory for copies of the arrays.

  Args:
    body: takes chunks of the ids and of each array. The last chunk begins within the one before it,
      since padding would copy the arrays; ids that it repeats are `UNUSED`.
    carry: the first argument of the first call.
    size: elements per entry.
    ids: int32 `[N, ...]`.
    *arrays: `[N, ...]`.
    chunk: elements that a chunk holds, `CHUNK` if None.
    used: the number of entries to process, N if None.
  """
  count = ids.shape[0]
  chunk = max(_SMALLEST, (CHUNK if chunk is None else chunk) // max(size, 1))
  if count <= chunk:
    return body(carry, ids, *arrays)

  def one(k, carry):
    start = jnp.minimum(k * chunk, count - chunk)
    at, *chunks = (jax.lax.dynamic_slice_in_dim(x, start, chunk) for x in (ids, *arrays))
    is_new = (start + jnp.arange(chunk) >= k * chunk).reshape(-1, *[1] * (ids.ndim - 1))
    return body(carry, jnp.where(is_new, at, UNUSED), *chunks)

  chunks = -(-count // chunk) if used is None else (used + chunk - 1) // chunk
  return jax.lax.fori_loop(0, chunks, one, carry)


def add_in_chunks(to: Any, parts: Sequence[GradRows], chunk: int | None = None) -> Any:
  """Implements `add_rows` for accelerators.

  Works in chunks, since XLA adds in the order of the rows, and sorts a copy of the gradients first.
  """

  def add(to, ids, grads, *gains):
    values = GradRows(grads, ids, *gains).expanded()
    if isinstance(to, Lines):
      return to.add(ids.reshape(-1), values)
    return to.at[ids.reshape(-1)].add(values.astype(to.dtype), **DROP)

  for part in parts:
    gains = () if part.gains is None else (part.gains,)
    numbers = part.grads.shape[1] * part.ids.shape[1]
    to = in_chunks(add, to, numbers, part.ids, part.grads, *gains, chunk=chunk)
  return to


def add_rows(to: jax.Array, parts: Sequence[GradRows]) -> jax.Array:
  """Adds gain * gradient for every id to its row of `to`, `[V, D]`; drops ids out of range."""
  return jax.lax.platform_dependent(to, list(parts), cpu=add_rows_on_cpu, default=add_in_chunks)


def sum_per_row(parts: Sequence[GradRows], size: int, chunk: int | None = None) -> DistinctRows:
  """Sums the gradients of every row that was looked up, over duplicates, features and calls.

  A row counts as looked up even if its gain is 0 or its gradients cancel. Accelerators add `chunk`
  elements at a time, `CHUNK` if None.

  Returns:
    Ids `[N]`, `size` in unused entries, and their sums; N is the number of ids in `parts`.
  """
  ids, dim = flat_ids(parts, size), parts[0].grads.shape[-1]
  if not ids.size:
    return DistinctRows(ids, jnp.zeros((0, dim), jnp.float32))

  def sum_by(distinct, add, ids, parts):
    position, unique, _ = distinct(ids, size)
    sums = jnp.zeros((ids.shape[0], dim), jnp.float32)
    return DistinctRows(unique, add(sums, with_ids(parts, position)))

  return jax.lax.platform_dependent(
    ids,
    list(parts),
    cpu=functools.partial(sum_by, distinct_by_hash, add_rows_on_cpu),
    default=functools.partial(
      sum_by, distinct_by_sort, functools.partial(add_in_chunks, chunk=chunk)
    ),
  )
