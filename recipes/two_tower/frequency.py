"""The expected count of each item in a batch, estimated from the stream of batches alone."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError


class Estimate(nnx.Variable):
  """The arrays of a `Frequency`, by name."""


class Frequency(nnx.Module):
  """The streaming estimator of Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling".

  For each item it keeps the batch in which the item was seen last, and a moving average of the
  intervals between the batches it is seen in; the item's rate is one over that. An item may come up
  several times in one batch of a large size, for which the paper has no room: a second moving
  average keeps how often, and the expected number of an item in a batch is this count over the
  interval. Both averages weigh all observations equally until there are `1 / rate` of them, so that
  the first interval does not linger.

  The state is a Variable of the model: it goes through jit, over a mesh and into checkpoints.

  Args:
    buckets: places to count in. With as many as there are items each has its own; with fewer,
      items are hashed and those that share a place are taken for one.
    vocabulary_size: the number of items.
    rate: of the moving averages.
  """

  def __init__(self, buckets: int, vocabulary_size: int, *, rate: float):
    if buckets < 1 or not 0 < rate <= 1:
      raise UserError(f"buckets must be positive and rate in (0, 1], got {buckets} and {rate}")
    self._buckets, self._direct, self._rate = buckets, buckets >= vocabulary_size, rate
    self.estimate = Estimate(
      {
        "batch": jnp.int32(0),
        "seen": jnp.zeros(buckets, jnp.int32),  # batches that the item was in
        "last": jnp.full(buckets, -1, jnp.int32),  # the batch before the first one
        "interval": jnp.ones(buckets, jnp.float32),
        "count": jnp.zeros(buckets, jnp.float32),
      }
    )

  def _place(self, ids: jax.Array) -> jax.Array:
    if self._direct:
      return ids
    # Multiplicative hashing (Knuth): neighbouring ids, often alike, do not share places.
    mixed = ids.astype(jnp.uint32) * jnp.uint32(2654435769)
    return ((mixed ^ (mixed >> 15)) % jnp.uint32(self._buckets)).astype(jnp.int32)

  def update(self, ids: jax.Array) -> None:
    """Counts a batch's items, int `[B]`, in place."""
    state: dict[str, Any] = dict(self.estimate.get_value())
    place, batch = self._place(ids), state["batch"]
    counts = jnp.zeros(self._buckets, jnp.float32).at[place].add(1.0)[place]
    seen = state["seen"][place] + 1
    rate = jnp.maximum(1.0 / seen.astype(jnp.float32), self._rate)
    interval = (batch - state["last"][place]).astype(jnp.float32)
    # Several of one item write the same values, so it does not matter who comes last.
    average = lambda old, new: old.at[place].set((1 - rate) * old[place] + rate * new)
    self.estimate.set_value(
      {
        "batch": batch + 1,
        "seen": state["seen"].at[place].set(seen),
        "last": state["last"].at[place].set(batch),
        "interval": average(state["interval"], interval),
        "count": average(state["count"], counts),
      }
    )

  def expected(self, ids: jax.Array) -> jax.Array:
    """Returns how often each item `[...]` is expected in a batch, float32.

    An item that was never seen is taken to come in the next batch, once.
    """
    state, place = self.estimate.get_value(), self._place(ids)
    waited = (state["batch"] + 1).astype(jnp.float32)
    seen = state["seen"][place] > 0
    return jnp.where(seen, state["count"][place] / state["interval"][place], 1.0 / waited)
