"""Losses over scores of one right item and sampled wrong ones.

Scores are floats: `positive` `[...]` of the right item, `negative` `[..., K]` of sampled ones. A
`hit` marks a sampled item that happens to be the right one (an accidental hit): it must not count
as wrong. Every loss is one value per position, `[...]`; `mean` puts them together.
"""

import jax
import jax.numpy as jnp

from ..errors import UserError

_NEVER = -1e9  # not -inf: a position whose samples are all hits would get NaN gradients


def mean(losses: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean of the positions that `mask`, bool like `losses`, lets through; 0 of none."""
  return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def cross_entropy(scores: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the cross-entropy of a softmax over all items: scores `[..., N]`, targets `[...]`.

  Targets that no item has, as padding, give a finite value to be masked.
  """
  targets = jnp.clip(targets, 0, scores.shape[-1] - 1)
  right = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(scores, axis=-1) - right


def sampled_softmax(
  positive: jax.Array,
  negative: jax.Array,
  hits: jax.Array,
  log_expected: jax.Array | None = None,
) -> jax.Array:
  """Returns the cross-entropy of a softmax over the right item and the sampled ones.

  Args:
    hits: bool like `negative`; those samples are left out.
    log_expected: `[K]` or like `negative`, the log of how often each sample was expected to be
      drawn (the logQ correction: Bengio and Senecal 2008). With it the sum over samples estimates
      that over all wrong items without bias. The right item is there with certainty: it is not
      corrected. None corrects nothing.
  """
  if log_expected is not None:
    negative = negative - log_expected
  negative = jnp.where(hits, _NEVER, negative)
  return jnp.logaddexp(positive, jax.nn.logsumexp(negative, axis=-1)) - positive


def generalized_bce(
  positive: jax.Array, negative: jax.Array, hits: jax.Array, *, beta: float
) -> jax.Array:
  """Returns `-(beta log s(p) + sum log(1 - s(n))) / (K + 1)`, s the sigmoid; hits count as 0.

  This is gBCE, see `gbce_beta`. A beta of 1 makes it the binary cross-entropy; with one sample,
  that is SASRec's loss (Kang and McAuley 2018, equation 6) but for the factor.
  """
  wrong = jnp.sum(jnp.where(hits, 0, jax.nn.softplus(negative)), axis=-1)
  return (wrong + beta * jax.nn.softplus(-positive)) / (negative.shape[-1] + 1)


def gbce_beta(num_negatives: int, num_items: int, calibration: float) -> float:
  """Returns the power of gBCE: `a * (t * (1 - 1/a) + 1/a)`, `a = num_negatives / (num_items - 1)`.

  Petrov and Macdonald 2023 (gSASRec), equations 8 and 12. Calibration t = 0 is BCE; at 1 the
  probabilities equal BCE's over all items.
  """
  if not 0 <= calibration <= 1:
    raise UserError(f"the calibration of gBCE must be in [0, 1], got {calibration}")
  rate = num_negatives / (num_items - 1)
  return rate * (calibration * (1 - 1 / rate) + 1 / rate)
