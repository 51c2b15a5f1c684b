"""Losses by hand, and what holds between them."""

import jax
import numpy as np

from recipes.sequence import train

NO_HITS = np.zeros((1, 2), bool)
AS_THEY_ARE = np.zeros(2, np.float32)  # each sample is expected once
sampled_softmax = jax.jit(train.sampled_softmax)


def log(*values):
  return np.log(np.array(values, np.float32))


def test_sampled_softmax_by_hand():
  positive, negative = log(2.0), log([1.0, 5.0])
  found = sampled_softmax(positive, negative, NO_HITS, AS_THEY_ARE)
  np.testing.assert_allclose(found, [np.log(8 / 2)], rtol=1e-6)
  # Expected half a time, the first sample stands for two items; expected five times, for a fifth.
  found = sampled_softmax(positive, negative, NO_HITS, log(0.5, 5.0))
  np.testing.assert_allclose(found, [np.log((2 + 2 + 1) / 2)], rtol=1e-6)


def test_an_accidental_hit_does_not_count():
  positive, negative = log(2.0), log([2.0, 6.0])
  hits = np.array([[True, False]])
  found = sampled_softmax(positive, negative, hits, AS_THEY_ARE)
  np.testing.assert_allclose(found, [np.log(8 / 2)], rtol=1e-6)
  softmax = lambda negative: train.sampled_softmax(positive, negative, hits, AS_THEY_ARE).sum()
  slope = jax.jit(jax.grad(softmax))(negative)
  np.testing.assert_allclose(slope, [[0, 6 / 8]], rtol=1e-6)


def test_logq_makes_the_sum_unbiased():
  """The expectation of the estimate, over all draws from a skewed distribution."""
  generator = np.random.default_rng(1)
  scores = generator.normal(0, 1, 20).astype(np.float32)
  probabilities = generator.dirichlet(np.ones(20))
  drawn, expected = np.arange(20), np.log(probabilities).astype(np.float32)
  is_hit = drawn == 5
  loss = sampled_softmax(
    np.full(20, scores[5]), scores[:, None], is_hit[:, None], expected[:, None]
  )
  estimates = np.exp(np.asarray(loss, np.float64) + scores[5])
  np.testing.assert_allclose(probabilities @ estimates, np.exp(scores).sum(), rtol=1e-6)


def test_mean_leaves_padding_out():
  mean, values = jax.jit(train.mean), np.array([1.0, 5.0, np.nan], np.float32)
  assert mean(values, np.array([True, True, False])) == 3
  assert mean(values, np.array([False, False, False])) == 0
