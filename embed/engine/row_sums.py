"""Sums of row gradients: one gradient for each distinct row."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from embed.engine import update_cpu
from embed.engine.bags import UNUSED
from embed.engine.grads import DistinctRows, GradRows, flat_ids, with_ids
from embed.engine.packing import Lines
from embed.engine.update_cpu import DROP


def cumsum(x: jax.Array, block: int = 512) -> jax.Array:
  """Cumulative sum in two levels: XLA:TPU compiles a flat one of a million for half a minute."""
  n = x.shape[0]
  blocks = jnp.pad(x, (0, -n % block)).reshape(-1, block)
  within = jnp.cumsum(blocks, axis=1)
  before = jnp.cumsum(within[:, -1]) - within[:, -1]
  return (within + before[:, None]).reshape(-1)[:n]


def distinct_by_sort(ids: jax.Array, fill: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The distinct ids of integers `[N]`, ascending; `fill` is greater than any of them.

  For accelerators, where sorting is fast and loops are slow; for CPU see `update_cpu.distinct`.

  Returns:
    Each id's position among the distinct ones, int32 `[N]`, N where it equals `fill`; the distinct
    ids, then `fill`, `[N]`; and how many they are, an int32 scalar.
  """
  n = ids.shape[0]
  ordered, order = jax.lax.sort((ids, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=False)
  new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != fill)
  rank = cumsum(new.astype(jnp.int32)) - 1
  unique = jnp.full(n, fill, ids.dtype).at[jnp.where(new, rank, n)].set(ordered, **DROP)
  rank_or_none = jnp.where(ordered == fill, n, rank)
  position = jnp.zeros(n, jnp.int32).at[order].set(rank_or_none, unique_indices=True)
  return position, unique, rank[-1] + 1


CHUNK = 1 << 22  # numbers that an accelerator works on at a time, 16 MiB of float32
_SMALLEST = 8  # entries of a chunk


def in_chunks(
  body: Callable[..., Any], carry: Any, size: int, ids: jax.Array, *arrays: jax.Array
) -> Any:
  """`carry = body(carry, ids, *arrays)` for chunks of ids and of arrays with as many entries.

  All entries at once would need memory for copies of the arrays.

  Args:
    body: gets chunks of the ids and of each array. The last chunk begins within the one before it,
      since padding would copy the arrays; there, ids of entries that it has had are `UNUSED`.
    carry: what it starts from.
    size: the numbers of an entry, of which a chunk has `CHUNK`.
    ids: int32 `[N, ...]`.
    *arrays: `[N, ...]`.
  """
  count, chunk = ids.shape[0], max(_SMALLEST, CHUNK // max(size, 1))
  if count <= chunk:
    return body(carry, ids, *arrays)

  def one(k, carry):
    start = jnp.minimum(k * chunk, count - chunk)
    at, *chunks = (jax.lax.dynamic_slice_in_dim(x, start, chunk) for x in (ids, *arrays))
    is_new = (start + jnp.arange(chunk) >= k * chunk).reshape(-1, *[1] * (ids.ndim - 1))
    return body(carry, jnp.where(is_new, at, UNUSED), *chunks)

  return jax.lax.fori_loop(0, -(-count // chunk), one, carry)


def add_in_chunks(to: Any, parts: Sequence[GradRows]) -> Any:
  """`add_rows` for accelerators.

  In chunks: XLA adds in the order of the rows, for which it sorts a copy of the gradients.
  """

  def add(to, ids, grads, *gains):
    values = GradRows(grads, ids, *gains).expanded()
    if isinstance(to, Lines):
      return to.add(ids.reshape(-1), values)
    return to.at[ids.reshape(-1)].add(values.astype(to.dtype), **DROP)

  for part in parts:
    gains = () if part.gains is None else (part.gains,)
    numbers = part.grads.shape[1] * part.ids.shape[1]
    to = in_chunks(add, to, numbers, part.ids, part.grads, *gains)
  return to


def add_rows(to: jax.Array, parts: Sequence[GradRows]) -> jax.Array:
  """Adds gain * gradient of every id to its row of `to` `[V, D]`; out of range is dropped."""
  return jax.lax.platform_dependent(to, list(parts), cpu=update_cpu.add_rows, default=add_in_chunks)


def sum_per_row(parts: Sequence[GradRows], size: int) -> DistinctRows:
  """The sum of the gradients of every row that was looked up, over duplicates, features and calls.

  A row counts as looked up also with gain 0 or with gradients that cancel.

  Returns:
    Ids `[N]`, `size` in unused entries; N is the number of ids of `parts`.
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
    cpu=functools.partial(sum_by, update_cpu.distinct, update_cpu.add_rows),
    default=functools.partial(sum_by, distinct_by_sort, add_in_chunks),
  )


def expand_rows(parts: Sequence[GradRows], size: int) -> tuple[jax.Array, jax.Array]:
  """Ids `[N]` and gradients `[N, D]`, an entry for each id in batch order."""
  ids = flat_ids(parts, size)
  values = jnp.concatenate([part.expanded() for part in parts])
  return ids, jnp.where((ids < size)[:, None], values, 0)
