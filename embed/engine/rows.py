"""Sums of row gradients: one gradient for each distinct row."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from embed.engine import update_cpu
from embed.engine.grads import DistinctRows, GradRows, flat_ids, with_ids
from embed.engine.update_cpu import DROP


def cumsum(x: jax.Array, block: int = 512) -> jax.Array:
  """Two-level: a flat one of a million elements takes the TPU compiler half a minute."""
  n = x.shape[0]
  blocks = jnp.pad(x, (0, -n % block)).reshape(-1, block)
  within = jnp.cumsum(blocks, axis=1)
  before = jnp.cumsum(within[:, -1]) - within[:, -1]
  return (within + before[:, None]).reshape(-1)[:n]


Unique = tuple[jax.Array, jax.Array, jax.Array]


def distinct_by_sort(ids: jax.Array, fill: int) -> Unique:
  """`distinct` for accelerators, where sorting is fast and loops are slow."""
  n = ids.shape[0]
  ordered, order = jax.lax.sort((ids, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=False)
  new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != fill)
  rank = cumsum(new.astype(jnp.int32)) - 1
  unique = jnp.full(n, fill, jnp.int32).at[jnp.where(new, rank, n)].set(ordered, **DROP)
  rank_or_none = jnp.where(ordered == fill, n, rank)
  position = jnp.zeros(n, jnp.int32).at[order].set(rank_or_none, unique_indices=True)
  return position, unique, rank[-1] + 1


def distinct(ids: jax.Array, fill: int) -> Unique:
  """The distinct ids of int32 `[N]`, in no particular order.

  Returns:
    Each id's position among the distinct ones, int32 `[N]`, N where it equals `fill`; the distinct
    ids, then `fill`, int32 `[N]`; and how many they are, an int32 scalar.
  """
  return jax.lax.platform_dependent(
    ids,
    cpu=functools.partial(update_cpu.distinct, fill=fill),
    default=functools.partial(distinct_by_sort, fill=fill),
  )


def add_at_once(to: jax.Array, parts: Sequence[GradRows]) -> jax.Array:
  """`add_rows` for accelerators."""
  for part in parts:
    to = to.at[part.ids.reshape(-1)].add(part.expanded().astype(to.dtype), **DROP)
  return to


def add_rows(to: jax.Array, parts: Sequence[GradRows]) -> jax.Array:
  """Adds gain * gradient of every id to its row of `to` `[V, D]`; out of range is dropped."""
  return jax.lax.platform_dependent(to, list(parts), cpu=update_cpu.add_rows, default=add_at_once)


def sum_rows(parts: Sequence[GradRows], size: int) -> DistinctRows:
  """The sum of the gradients of every row that was looked up, over duplicates, features and calls.

  A row counts as looked up also with gain 0 or with gradients that cancel.

  Returns:
    Ids `[N]`, `size` in unused entries; N is the number of ids of `parts`.
  """
  ids = flat_ids(parts, size)
  position, unique, count = distinct(ids, size)
  sums = jnp.zeros((ids.shape[0], parts[0].grads.shape[-1]), jnp.float32)
  return DistinctRows(unique, add_rows(sums, with_ids(parts, position)), count)


def expand_rows(parts: Sequence[GradRows], size: int) -> tuple[jax.Array, jax.Array]:
  """Ids `[N]` and gradients `[N, D]`, an entry for each id in batch order."""
  ids = flat_ids(parts, size)
  values = jnp.concatenate([part.expanded() for part in parts])
  return ids, jnp.where((ids < size)[:, None], values, 0)
