"""Softmax over sampled candidates. B queries, C candidates; query i's positive is candidate i."""

import jax
import jax.numpy as jnp

_NEVER = -1e9  # not -inf: where everything else is left out, gradients would not be numbers


def sampled_softmax(
  logits: jax.Array,
  ids: jax.Array,
  *,
  log_expected: jax.Array | None = None,
  remove_accidental_hits: bool = True,
  hard_negatives: int = 0,
) -> jax.Array:
  """Returns the cross-entropy of each query's positive among all candidates, float32 `[B]`.

  Args:
    logits: `[B, C]`, C at least B; the candidates after the first B are negatives for all.
    ids: int `[C]`, the candidates' items; a negative one is an empty place.
    log_expected: `[C]`, the log of how often each candidate's item is expected among the
      candidates. Subtracted, the positive's included, it makes the loss equal a softmax over the
      whole catalogue, however unevenly items are sampled (the logQ correction: Bengio and Senecal
      2008, Yi et al. 2019). None corrects nothing.
    remove_accidental_hits: leaves out candidates that are the positive's item once more.
    hard_negatives: how many of a query's negatives count, the ones of the largest corrected logits;
      0 counts all.

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
  out = own | (ids < 0)
  if remove_accidental_hits:
    out |= ids[:batch, None] == ids
  negative = jnp.where(out, _NEVER, logits)
  if hard_negatives and hard_negatives < logits.shape[1]:
    negative = jax.lax.top_k(negative, hard_negatives)[0]
  return jnp.logaddexp(positive, jax.nn.logsumexp(negative, axis=1)) - positive
