"""The sampled softmax by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.two_tower import train

LOGITS = np.array([[2.0, 1.0, 0.0, 3.0], [0.5, 1.5, -1.0, 0.0]], np.float32)  # two extra ones
OPTIONS = ("remove_accidental_hits",)
sampled_softmax = jax.jit(train.sampled_softmax, static_argnames=OPTIONS)


def entropy(positive, *negatives):
  return math.log(sum(map(math.exp, (positive, *negatives)))) - positive


def test_accidental_hits_by_hand():
  ids = np.array([7, 8, 7, 8])  # the third is the first's positive, the fourth the second's
  found = sampled_softmax(LOGITS, ids)
  np.testing.assert_allclose(found, [entropy(2.0, 1.0, 3.0), entropy(1.5, 0.5, -1.0)], rtol=1e-6)
  kept = sampled_softmax(LOGITS, ids, remove_accidental_hits=False)
  wanted = [entropy(2.0, 1.0, 0.0, 3.0), entropy(1.5, 0.5, -1.0, 0.0)]
  np.testing.assert_allclose(kept, wanted, rtol=1e-6)


def test_two_queries_of_one_item_are_not_each_others_negatives():
  total = lambda x: train.sampled_softmax(x, np.array([7, 7])).sum()
  found, grads = jax.jit(jax.value_and_grad(total))(LOGITS[:, :2])
  np.testing.assert_allclose(found, 0.0, atol=1e-6)
  assert grads.tolist() == [[0, 0], [0, 0]]


@pytest.mark.ci
def test_with_logq_the_samples_estimate_the_whole_softmax():
  """The gradient at the scores of 12 items, averaged over batches, is that of the full softmax.

  The popularity of items spans a factor of 12, and without the correction the estimate is far off.
  """
  size, batch = 12, 400
  popularity = np.arange(1, size + 1) / np.arange(1, size + 1).sum()
  scores = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)

  def estimate(key, corrected):
    ids = jax.random.choice(key, size, (batch,), p=jnp.asarray(popularity))
    log_expected = jnp.log(batch * jnp.asarray(popularity, jnp.float32))[ids] if corrected else None

    def loss(scores):  # all queries score alike
      logits = jnp.broadcast_to(scores[ids], (batch, batch))
      values = sampled_softmax(logits, ids, log_expected=log_expected, remove_accidental_hits=False)
      return values.mean()

    return jax.grad(loss)(scores)

  keys = jax.random.split(jax.random.key(1), 100)
  wanted = jax.nn.softmax(scores) - popularity
  mean = lambda corrected: jax.lax.map(lambda key: estimate(key, corrected), keys).mean(axis=0)
  assert np.abs(mean(True) - wanted).max() < 0.004
  assert np.abs(mean(False) - wanted).max() > 0.02
