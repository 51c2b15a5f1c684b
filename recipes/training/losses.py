"""Losses over the scores of the right item and of wrong ones, one value per position `[...]`."""

import jax
import jax.numpy as jnp

_NEVER = -1e9  # not -inf: a position whose samples are all hits would get NaN gradients


def mean(losses: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean over the positions where `mask` is True; 0 if there are none."""
  return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def cross_entropy(scores: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the cross-entropy of a softmax over all items: scores `[..., N]`, targets `[...]`.

  A target that is no item, such as padding, gives a finite value to be masked.
  """
  targets = jnp.clip(targets, 0, scores.shape[-1] - 1)
  right = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(scores, axis=-1) - right


def sampled_softmax(
  positive: jax.Array, negative: jax.Array, hits: jax.Array, log_expected: jax.Array
) -> jax.Array:
  """Returns the cross-entropy of a softmax over the right item and the sampled ones.

  Args:
    positive: `[...]`, scores of the right items.
    negative: `[..., K]`, scores of the sampled items.
    hits: bool like `negative`, samples that are the right item; they are left out.
    log_expected: `[K]` or like `negative`, the log of the expected number of draws of each sample
      (the logQ correction, Bengio and Senecal 2008): the sum over samples becomes an unbiased
      estimate of the sum over all wrong items. The right item, always there, is not corrected.
  """
  negative = jnp.where(hits, _NEVER, negative - log_expected)
  return jnp.logaddexp(positive, jax.nn.logsumexp(negative, axis=-1)) - positive
