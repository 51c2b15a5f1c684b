"""Applying row gradients to a table: find the distinct rows, sum, step them in place.

Cost and memory follow the batch, never the vocabulary. Two formulations of one meaning: on CPU a
hash table names the distinct ids without sorting and rows are stepped in chunks, as many as there
are; on accelerators, where a loop is slow and sorting fast, everything happens at once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from embed.lookup import Occurrences
from embed.optimizers import RowOptimizer, Slots, step_rows

CHUNK = 4096  # rows stepped at a time on CPU: their temporaries stay in cache


class Piece(NamedTuple):
  """The gradient of one lookup's activations, float `[*batch, D]`, and what they were made of."""

  grads: jax.Array
  occurrences: Occurrences


class Distinct(NamedTuple):
  """The distinct ids among N: `place` `[N]` is each id's index in `ids` (N for padding)."""

  place: jax.Array  # int32 [N]
  ids: jax.Array  # int32 [N]: `count` distinct ids, then padding
  count: jax.Array  # int32 scalar


class SummedRows(NamedTuple):
  """One gradient per touched row; the entries from `count` on are padding."""

  ids: jax.Array  # int32 [M]
  values: jax.Array  # float32 [M, D]
  count: jax.Array


def _cumsum(x: jax.Array, block: int = 512) -> jax.Array:
  """Two-level: a flat one of a million elements takes the TPU compiler half a minute."""
  n = x.shape[0]
  blocks = jnp.pad(x, (0, -n % block)).reshape(-1, block)
  within = jnp.cumsum(blocks, axis=1)
  before = jnp.cumsum(within[:, -1]) - within[:, -1]
  return (within + before[:, None]).reshape(-1)[:n]


def _number(first: jax.Array, ids: jax.Array, fill: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Numbers the positions where `first` holds: each position's number, their ids, and how many."""
  n = ids.shape[0]
  rank = _cumsum(first.astype(jnp.int32)) - 1
  to = jnp.where(first, rank, n)
  distinct = jnp.full(n, fill, jnp.int32).at[to].set(ids, mode="drop", unique_indices=True)
  return rank, distinct, rank[-1] + 1


def _distinct_by_hash(ids: jax.Array, fill: int) -> Distinct:
  """Every id writes its position to a bucket; who reads its own id back is settled.

  The rest tries again with another hash. Of the ids in a bucket one settles per round, so it ends
  for any ids, in two or three rounds for most.
  """
  n = ids.shape[0]
  bits = max(4, (4 * n - 1).bit_length())
  position = jnp.arange(n, dtype=jnp.int32)
  key = ids.astype(jnp.uint32)

  def round_(carry):
    r, winner, todo = carry
    odd = (2 * r + 1) * jnp.uint32(2654435761)
    mixed = (key ^ (r * jnp.uint32(0x9E3779B9))) * odd
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    bucket = (mixed >> (32 - bits)).astype(jnp.int32)
    table = jnp.zeros(1 << bits, jnp.int32)
    table = table.at[jnp.where(todo, bucket, 1 << bits)].set(position, mode="drop")
    candidate = table.at[bucket].get(mode="promise_in_bounds")
    settled = todo & (ids.at[candidate].get(mode="promise_in_bounds") == ids)
    return r + 1, jnp.where(settled, candidate, winner), todo & ~settled

  carry = jnp.uint32(0), jnp.full(n, n, jnp.int32), ids != fill
  _, winner, _ = jax.lax.while_loop(lambda c: jnp.any(c[2]), round_, carry)
  rank, distinct, count = _number(winner == position, ids, fill)
  place = rank.at[winner].get(mode="fill", fill_value=n)
  return Distinct(place, distinct, count)


def _distinct_by_sort(ids: jax.Array, fill: int) -> Distinct:
  n = ids.shape[0]
  ordered, order = jax.lax.sort((ids, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=False)
  new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
  rank, distinct, count = _number(new & (ordered != fill), ordered, fill)
  place = jnp.zeros(n, jnp.int32).at[order].set(
    jnp.where(ordered == fill, n, rank), unique_indices=True
  )
  return Distinct(place, distinct, count)


def distinct(ids: jax.Array, fill: int) -> Distinct:
  """The distinct ids of int32 `[N]`, in no particular order; entries equal to `fill` are none."""
  if ids.shape[0] == 0:
    return Distinct(ids, ids, jnp.int32(0))
  return jax.lax.platform_dependent(
    ids,
    cpu=functools.partial(_distinct_by_hash, fill=fill),
    default=functools.partial(_distinct_by_sort, fill=fill),
  )


# --- expanding activation gradients to rows ------------------------------------------------------


def _flat_ids(pieces: Sequence[Piece], vocabulary_size: int) -> jax.Array:
  """All ids `[N]` in order, whatever is not a row of the table as padding."""
  ids = jnp.concatenate([p.occurrences.ids.reshape(-1) for p in pieces])
  return jnp.where((ids >= 0) & (ids < vocabulary_size), ids, vocabulary_size)


def _per_activation(piece: Piece) -> tuple[jax.Array, jax.Array | None]:
  """Gradients float32 `[B, D]` with per-activation gains applied, and per-id gains if any."""
  grads, occ = piece.grads.astype(jnp.float32), piece.occurrences
  gains = occ.gains
  if occ.segments is None and gains is not None and gains.shape[-1] != occ.ids.shape[-1]:
    grads, gains = grads * gains, None
  return grads.reshape(-1, grads.shape[-1]), gains


def _scatter_add(to: jax.Array, place: jax.Array, piece: Piece) -> jax.Array:
  """Adds gain * gradient of every occurrence at `to[place]`; out of range is dropped.

  One scatter per place in the bag, so that no `[N, D]` of expanded gradients is made.
  """
  grads, gains = _per_activation(piece)
  occ = piece.occurrences
  if occ.segments is not None:
    rows = grads.at[occ.segments].get(mode="fill", fill_value=0)
    rows = rows if gains is None else rows * gains[:, None]
    return to.at[place].add(rows.astype(to.dtype), mode="drop")
  length = occ.ids.shape[-1]
  place = place.reshape(-1, length)
  gains = None if gains is None else gains.reshape(-1, length)

  def add(k, to):
    at = jax.lax.dynamic_index_in_dim(place, k, axis=1, keepdims=False)
    rows = grads
    if gains is not None:
      rows = rows * jax.lax.dynamic_index_in_dim(gains, k, axis=1)
    return to.at[at].add(rows.astype(to.dtype), mode="drop")

  if length <= 16:
    for k in range(length):
      to = add(k, to)
    return to
  return jax.lax.fori_loop(0, length, add, to)


def _places(pieces: Sequence[Piece], flat: jax.Array) -> list[jax.Array]:
  sizes = [p.occurrences.ids.size for p in pieces]
  return list(jnp.split(flat, np.cumsum(sizes)[:-1]))


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
  for piece, place in zip(pieces, _places(pieces, found.place), strict=True):
    sums = _scatter_add(sums, place, piece)
  return SummedRows(found.ids, sums, found.count)


def expand_rows(pieces: Sequence[Piece], vocabulary_size: int) -> SummedRows:
  """One entry per occurrence in batch order: what `use_gradient_accumulation=False` steps on."""
  ids = _flat_ids(pieces, vocabulary_size)
  values = []
  for piece in pieces:
    grads, gains = _per_activation(piece)
    occ = piece.occurrences
    if occ.segments is not None:
      rows = grads.at[occ.segments].get(mode="fill", fill_value=0)
    else:
      rows = jnp.repeat(grads, occ.ids.shape[-1], axis=0)
    values.append(rows if gains is None else rows * gains.reshape(-1, 1))
  stacked = jnp.where((ids < vocabulary_size)[:, None], jnp.concatenate(values), 0)
  return SummedRows(ids, stacked, jnp.int32(ids.shape[0]))


# --- stepping ------------------------------------------------------------------------------------

State = tuple[jax.Array, Slots]


def _step_at(
  optimizer: RowOptimizer, state: State, at: jax.Array, g: jax.Array, rate: jax.Array
) -> State:
  """Steps the distinct rows `at` of the table and its slots; out of range steps nothing.

  Barriers keep XLA from fusing the reads into two consumers, after which it copies the table.
  """
  table, slots = state
  read = lambda x: x.at[at].get(mode="clip")
  rows, old = jax.lax.optimization_barrier((read(table), {k: read(s) for k, s in slots.items()}))
  w, new = step_rows(optimizer, g, rows.astype(jnp.float32), old, rate)
  w, new = jax.lax.optimization_barrier((w.astype(table.dtype), new))
  write = lambda x, v: x.at[at].set(v.astype(x.dtype), mode="drop", unique_indices=True)
  return write(table, w), {k: write(s, new[k]) for k, s in slots.items()}


def _step_chunks(optimizer, table, slots, rows: SummedRows, rate):
  """As many chunks as there are distinct rows: time follows the distinct ids, not the batch."""
  size = rows.ids.shape[0]
  chunk = min(CHUNK, size)
  pad = -size % chunk
  ids = jnp.pad(rows.ids, (0, pad), constant_values=np.iinfo(np.int32).max)
  values = jnp.pad(rows.values, ((0, pad), (0, 0))) if pad else rows.values

  def body(i, state):
    at = jax.lax.dynamic_slice_in_dim(ids, i * chunk, chunk)
    g = jax.lax.dynamic_slice_in_dim(values, i * chunk, chunk)
    return _step_at(optimizer, state, at, g, rate)

  return jax.lax.fori_loop(0, (rows.count + chunk - 1) // chunk, body, (table, slots))


def _step_in_order(optimizer, state: State, rows: SummedRows, rate) -> State:
  # Beside each occurrence an entry that steps nothing: a scatter of one row would become a slice
  # that XLA fuses with its reads, and pays for with a copy of the table at every occurrence.
  nothing = jnp.full(1, np.iinfo(np.int32).max, jnp.int32)

  def body(n, state):
    at = jnp.concatenate([jax.lax.dynamic_slice_in_dim(rows.ids, n, 1), nothing])
    g = jnp.pad(jax.lax.dynamic_slice_in_dim(rows.values, n, 1), ((0, 1), (0, 0)))
    return _step_at(optimizer, state, at, g, rate)

  return jax.lax.fori_loop(0, rows.ids.shape[0], body, state)


def _add_steps(optimizer, table, pieces, rate) -> jax.Array:
  """For a linear optimizer without further ado: adds every occurrence's own step."""
  none = jnp.zeros((), jnp.float32)
  moves = [
    p._replace(grads=step_rows(optimizer, p.grads.astype(jnp.float32), none, {}, rate)[0])
    for p in pieces
  ]
  flat = _flat_ids(pieces, table.shape[0])

  def add(table, moves, flat):
    for move, at in zip(moves, _places(pieces, flat), strict=True):
      table = _scatter_add(table, at, move)
    return table

  def add_in_loop(table, moves, flat):
    # XLA:CPU ignores barriers and would fuse the lookup's reads of the table into the additions,
    # and then copy the table. It cannot look through a loop; this one runs once, or not at all.
    runs = jnp.any(flat < table.shape[0]).astype(jnp.int32)
    return jax.lax.fori_loop(0, runs, lambda _, table: add(table, moves, flat), table)

  return jax.lax.platform_dependent(table, moves, flat, cpu=add_in_loop, default=add)


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
  optimizer: RowOptimizer,
  table: jax.Array,
  slots: Slots,
  pieces: Sequence[Piece],
  rate: jax.Array,
  *,
  distinct_ids: bool = False,
) -> State:
  """One optimizer step of a table.

  Args:
    optimizer: the table's.
    table: `[V, D]`; donate it and the slots, they are updated in place.
    slots: by name, `[V, D]` or `[V]`.
    pieces: activation gradients with what was looked up.
    rate: the learning rate, a scalar.
    distinct_ids: whether the pieces are one piece of rows already summed.

  Returns:
    The new table and slots. Rows that were not looked up keep their bits.
  """
  size = table.shape[0]
  if optimizer.equation is None:
    return table, slots
  if not optimizer.lazy:
    g = jnp.zeros(table.shape, jnp.float32)
    flat = _flat_ids(pieces, size) if pieces else None
    for piece, at in zip(pieces, _places(pieces, flat) if pieces else (), strict=True):
      g = _scatter_add(g, at, piece)
    w, slots = step_rows(optimizer, g, table.astype(jnp.float32), slots, rate)
    return w.astype(table.dtype), slots
  pieces = [p for p in pieces if p.occurrences.ids.size]
  if not pieces:
    return table, slots
  if _is_plain_sum(optimizer, table):
    return _add_steps(optimizer, table, pieces, rate), slots
  if not optimizer.use_gradient_accumulation:
    return _step_in_order(optimizer, (table, slots), expand_rows(pieces, size), rate)
  if distinct_ids:
    (piece,) = pieces
    values, ids = piece.grads.astype(jnp.float32), _flat_ids(pieces, size)
    rows = SummedRows(ids, values, jnp.int32(ids.shape[0]))
  else:
    rows = sum_rows(pieces, size)
  return jax.lax.platform_dependent(
    table,
    slots,
    rows,
    rate,
    cpu=functools.partial(_step_chunks, optimizer),
    default=lambda t, s, r, rate: _step_at(optimizer, (t, s), r.ids, r.values, rate),
  )
