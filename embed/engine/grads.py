"""The forms of a gradient: of activations, of rows, and of distinct rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from embed.engine.bags import Bags, is_row
from embed.engine.lookup import LookupRecord


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
  return jnp.where(is_row(ids, size), ids, size)


def with_ids(parts: Sequence[GradRows], ids: jax.Array) -> list[GradRows]:
  """The same gradients for other rows, of flat ids `[N]`."""
  sizes = [part.ids.size for part in parts]
  ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
  return [
    part._replace(ids=some.reshape(part.ids.shape))
    for part, some in zip(parts, jnp.split(ids, ends), strict=True)
  ]


def non_empty(parts: Sequence[GradRows]) -> list[GradRows]:
  """Drops the parts without ids."""
  return [part for part in parts if part.ids.size]
