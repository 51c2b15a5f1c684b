"""The softmax over sampled candidates, and an estimate of how often items are sampled.

B queries, C candidates; query i's positive is candidate i.
"""

import jax
import jax.numpy as jnp
from flax import nnx

_NEVER = -1e9  # not -inf: where everything else is left out, gradients would not be numbers


def sampled_softmax(
  logits_BxC: jax.Array,
  ids_C: jax.Array,
  *,
  log_expected: jax.Array | None = None,
  remove_accidental_hits: bool = True,
) -> jax.Array:
  """Returns the cross-entropy of each query's positive among all candidates, float32 `[B]`.

  Args:
    logits_BxC: the candidates after the first B are negatives for all queries.
    ids_C: the candidates' items.
    log_expected: `[C]`, the log of how often each candidate's item is expected among them.
      Subtracted, also for the positive, it makes the loss equal a softmax over the whole catalogue,
      however unevenly items are sampled (the logQ correction: Bengio and Senecal 2008, Yi et al.
      2019). None corrects nothing.
    remove_accidental_hits: leaves out candidates that are the positive's item once more.
  """
  batch, candidates = logits_BxC.shape
  if log_expected is not None:
    logits_BxC = logits_BxC - log_expected
  left_out_BxC = jnp.arange(batch)[:, None] == jnp.arange(candidates)
  if remove_accidental_hits:
    left_out_BxC |= ids_C[:batch, None] == ids_C
  positive_B = jnp.diagonal(logits_BxC)
  negative_BxC = jnp.where(left_out_BxC, _NEVER, logits_BxC)
  return jnp.logaddexp(positive_B, jax.nn.logsumexp(negative_BxC, axis=1)) - positive_B


class Estimate(nnx.Variable):
  """The arrays of a `Frequency`, by name."""


class Frequency(nnx.Module):
  """The streaming estimator of Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling".

  It keeps the batch that had an item last, and a moving average of the intervals between the
  batches that have the item; the item's rate is one over that. A large batch may have an item
  several times, for which the paper has no room: a second moving average keeps how often, and the
  expected number of an item in a batch is this count over the interval. Both averages weigh all
  observations equally until there are `1 / rate` of them, so that the first interval does not
  linger.

  Args:
    num_items: the size of the catalogue.
    rate: of the moving averages.
  """

  def __init__(self, num_items: int, *, rate: float = 0.02):
    self._rate = rate
    self.estimate = Estimate(
      {
        "batch": jnp.int32(0),
        "seen": jnp.zeros(num_items, jnp.int32),  # batches that had the item
        "last": jnp.full(num_items, -1, jnp.int32),  # the batch before the first one
        "interval": jnp.ones(num_items, jnp.float32),
        "count": jnp.zeros(num_items, jnp.float32),
      }
    )

  def update(self, ids_B: jax.Array) -> None:
    """Counts a batch's items in place."""
    state = dict(self.estimate.get_value())
    batch, seen_B = state["batch"], state["seen"][ids_B] + 1
    counts_B = jnp.zeros_like(state["count"]).at[ids_B].add(1.0)[ids_B]
    rate_B = jnp.maximum(1.0 / seen_B.astype(jnp.float32), self._rate)
    interval_B = (batch - state["last"][ids_B]).astype(jnp.float32)
    # Several of one item write the same values, so their order does not matter.
    average = lambda old, new: old.at[ids_B].set((1 - rate_B) * old[ids_B] + rate_B * new)
    self.estimate.set_value(
      {
        "batch": batch + 1,
        "seen": state["seen"].at[ids_B].set(seen_B),
        "last": state["last"].at[ids_B].set(batch),
        "interval": average(state["interval"], interval_B),
        "count": average(state["count"], counts_B),
      }
    )

  def known(self, ids: jax.Array) -> jax.Array:
    """Returns the ids `[...]`, -1 in place of items that no batch has had."""
    return jnp.where(self.estimate.get_value()["seen"][jnp.maximum(ids, 0)] > 0, ids, -1)

  def expected(self, ids: jax.Array) -> jax.Array:
    """Returns how often each item `[...]` is expected in a batch, float32.

    An item that was never seen is taken to come in the next batch, once.
    """
    state = self.estimate.get_value()
    waited = (state["batch"] + 1).astype(jnp.float32)
    rates = state["count"][ids] / state["interval"][ids]
    return jnp.where(state["seen"][ids] > 0, rates, 1.0 / waited)
