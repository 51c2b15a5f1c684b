"""Softmax over sampled candidates, how often items are sampled, and a cosine loss.

B queries, C candidates; query i's positive is candidate i.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError

_NEVER = -1e9  # not -inf: where everything else is left out, gradients would not be numbers


def sampled_softmax(
  logits: jax.Array,
  ids: jax.Array,
  *,
  log_expected: jax.Array | None = None,
  remove_accidental_hits: bool = True,
) -> jax.Array:
  """Returns the cross-entropy of each query's positive among all candidates, float32 `[B]`.

  Args:
    logits: `[B, C]`, C at least B; the candidates after the first B are negatives for all.
    ids: int `[C]`, the candidates' items.
    log_expected: `[C]`, the log of how often each candidate's item is expected among the
      candidates. Subtracted, the positive's included, it makes the loss equal a softmax over the
      whole catalogue, however unevenly items are sampled (the logQ correction: Bengio and Senecal
      2008, Yi et al. 2019). None corrects nothing.
    remove_accidental_hits: leaves out candidates that are the positive's item once more.

  Raises:
    ValueError: shapes do not fit.
  """
  batch = logits.shape[0]
  if logits.ndim != 2 or ids.shape != logits.shape[1:] or batch > logits.shape[1]:
    raise ValueError(
      f"logits {logits.shape} must be [queries, candidates] and ids {ids.shape} [candidates], with "
      "each query's positive among them"
    )
  if log_expected is not None:
    logits = logits - log_expected
  own = jnp.arange(batch)[:, None] == jnp.arange(logits.shape[1])
  positive = jnp.diagonal(logits)
  out = own
  if remove_accidental_hits:
    out |= ids[:batch, None] == ids
  negative = jnp.where(out, _NEVER, logits)
  return jnp.logaddexp(positive, jax.nn.logsumexp(negative, axis=1)) - positive


def cosine_contrastive(
  positive: jax.Array, negative: jax.Array, hits: jax.Array, *, margin: float, weight: float
) -> jax.Array:
  """Returns SimpleX's loss `1 - p + weight * mean(max(0, n - margin))`, float32 `[B]`.

  Mao et al. 2021, "SimpleX: A Simple and Strong Baseline for Collaborative Filtering", equation 1.

  Args:
    positive: `[B]`, the cosine of each query and its item.
    negative: `[B, M]`, the cosines of each query and the drawn items.
    hits: bool `[B, M]`, drawn items that are the query's own; their terms are 0.
    margin: the cosine up to which a drawn item costs nothing.
    weight: of all drawn items of a query together.

  >>> no_hits = jnp.zeros((1, 2), bool)
  >>> options = {"margin": 0.5, "weight": 3.0}
  >>> one = cosine_contrastive(jnp.array([0.5]), jnp.array([[0.9, 0.1]]), no_hits, **options)
  >>> print(f"{one[0]:.2f}")  # 0.5 + 3 * (0.4 + 0) / 2
  1.10
  """
  above = jnp.where(hits, 0.0, jax.nn.relu(negative - margin))
  return 1 - positive + weight * above.mean(axis=1)


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

  def known(self, ids: jax.Array) -> jax.Array:
    """Returns the ids `[...]`, -1 in place of items that no batch has had."""
    seen = self.estimate.get_value()["seen"][self._place(jnp.maximum(ids, 0))] > 0
    return jnp.where(seen, ids, -1)

  def expected(self, ids: jax.Array) -> jax.Array:
    """Returns how often each item `[...]` is expected in a batch, float32.

    An item that was never seen is taken to come in the next batch, once.
    """
    state, place = self.estimate.get_value(), self._place(ids)
    waited = (state["batch"] + 1).astype(jnp.float32)
    seen = state["seen"][place] > 0
    return jnp.where(seen, state["count"][place] / state["interval"][place], 1.0 / waited)
