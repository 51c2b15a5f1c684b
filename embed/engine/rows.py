"""Gradients of rows: from activations to one gradient for each distinct row."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from embed.engine import update_cpu
from embed.engine.bags import Bags
from embed.engine.lookup import LookupRecord
from embed.engine.update_cpu import DROP


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGrads:
  """The gradients of a lookup's activations, `[*batch, D]` of each feature, and its record."""

  grads: tuple[jax.Array, ...]
  record: LookupRecord


class GradRows(NamedTuple):
  """Gradients and the rows that they go to: row `ids[b, l]` gets `gains[b, l] * grads[b]`.

  Attributes:
    grads: float32 `[B, D]`.
    ids: int32 `[B, L]`; what is no row of the table is padding.
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
    ids: int32 `[M]`, each row at most once, then padding; on a mesh, local rows of each shard.
    values: float32 `[M, D]`, 0 at padding.
    count: how many are used, an int32 scalar; None if used entries may be anywhere.
  """

  ids: jax.Array
  values: jax.Array
  count: jax.Array | None = None

  def as_grad_rows(self) -> GradRows:
    return GradRows(self.values, self.ids[:, None])


def from_activations(grads: jax.Array, bags: Bags) -> GradRows:
  """The gradient of one feature's activations, `[*batch, D]`, as gradients of rows."""
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
  """All ids `[N]` in order; `size` for those that are no row of the table."""
  ids = jnp.concatenate([part.ids.reshape(-1) for part in parts])
  return jnp.where((ids >= 0) & (ids < size), ids, size)


def with_ids(parts: Sequence[GradRows], ids: jax.Array) -> list[GradRows]:
  """The same gradients for other rows, of flat ids `[N]`."""
  sizes = [part.ids.size for part in parts]
  ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
  return [
    part._replace(ids=some.reshape(part.ids.shape))
    for part, some in zip(parts, jnp.split(ids, ends), strict=True)
  ]


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


def any_row(parts: Sequence[GradRows]) -> list[GradRows]:
  """The parts that have ids."""
  return [part for part in parts if part.ids.size]
