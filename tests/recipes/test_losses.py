"""Losses by hand, and what holds between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.training import losses

NO_HITS = jnp.zeros((1, 2), bool)
BCE = functools.partial(losses.generalized_bce, beta=1.0)


def log(*values):
  return jnp.log(jnp.array(values, jnp.float32))


def test_cross_entropy_by_hand():
  scores = log(1.0, 2.0, 5.0)[None]  # probabilities 1/8, 2/8, 5/8
  np.testing.assert_allclose(losses.cross_entropy(scores, jnp.array([1])), [np.log(4)], rtol=1e-6)
  assert np.isfinite(losses.cross_entropy(scores, jnp.array([-1]))).all()


def test_sampled_softmax_by_hand():
  positive, negative = log(2.0), log(1.0, 5.0)[None]
  found = losses.sampled_softmax(positive, negative, NO_HITS)
  np.testing.assert_allclose(found, [np.log(8 / 2)], rtol=1e-6)
  # Expected half a time, the first sample stands for two items; expected five times, for a fifth.
  found = losses.sampled_softmax(positive, negative, NO_HITS, log(0.5, 5.0))
  np.testing.assert_allclose(found, [np.log((2 + 2 + 1) / 2)], rtol=1e-6)


def test_an_accidental_hit_does_not_count():
  positive, negative = log(2.0), log(2.0, 6.0)[None]
  hits = jnp.array([[True, False]])
  found = losses.sampled_softmax(positive, negative, hits)
  np.testing.assert_allclose(found, [np.log(8 / 2)], rtol=1e-6)
  for loss in (BCE, losses.sampled_softmax):
    slope = jax.grad(lambda n, loss=loss: loss(positive, n, hits).sum())(negative)
    assert slope[0, 0] == 0
    assert slope[0, 1] > 0


@pytest.mark.parametrize("draws", [1, 3])
def test_all_items_sampled_is_the_full_softmax(draws):
  """Every item `draws` times, with the correction for as often: the sum over all items."""
  generator = np.random.default_rng(0)
  scores = jnp.asarray(generator.normal(0, 2, (4, 7)), jnp.float32)
  targets = jnp.array([0, 3, 6, 3])
  candidates = jnp.tile(jnp.arange(7), draws)
  sampled = losses.sampled_softmax(
    scores[jnp.arange(4), targets],
    scores[:, candidates],
    targets[:, None] == candidates,
    jnp.full(len(candidates), np.log(draws), jnp.float32),
  )
  np.testing.assert_allclose(sampled, losses.cross_entropy(scores, targets), rtol=1e-5)


def test_logq_makes_the_sum_unbiased():
  """The estimate of the partition sum, over many draws from a skewed distribution."""
  generator = np.random.default_rng(1)
  scores = generator.normal(0, 1, 20)
  probabilities = generator.dirichlet(np.ones(20))
  drawn = generator.choice(20, (20_000, 8), p=probabilities)
  loss = losses.sampled_softmax(
    jnp.full(len(drawn), scores[5]),
    jnp.asarray(scores[drawn]),
    jnp.asarray(drawn == 5),
    jnp.asarray(np.log(8 * probabilities))[drawn],
  )
  estimate = np.mean(np.exp(np.asarray(loss, np.float64) + scores[5]))
  assert estimate == pytest.approx(np.exp(scores).sum(), rel=0.05)


def test_binary_cross_entropy_by_hand():
  # sigmoid(log 3) = 3/4, sigmoid(0) = 1/2, sigmoid(-log 3) = 1/4
  found = BCE(log(3.0), log(1.0, 1 / 3)[None], NO_HITS)
  expected = -(np.log(3 / 4) + np.log(1 / 2) + np.log(3 / 4)) / 3
  np.testing.assert_allclose(found, [expected], rtol=1e-6)


def test_gbce_by_hand():
  # a = 4 / (17 - 1) = 1/4; t = 1/2: beta = (1/2 (1 - 4) + 4) / 4 = 5/8
  beta = losses.gbce_beta(4, 17, 0.5)
  assert beta == pytest.approx(5 / 8)
  found = losses.generalized_bce(log(3.0), log(1.0, 1 / 3)[None], NO_HITS, beta=beta)
  # The paper's form: BCE of sigmoid ** beta.
  expected = -(np.log((3 / 4) ** beta) + np.log(1 / 2) + np.log(3 / 4)) / 3
  np.testing.assert_allclose(found, [expected], rtol=1e-6)
  assert losses.gbce_beta(4, 17, 0.0) == pytest.approx(1.0)
  assert losses.gbce_beta(4, 17, 1.0) == pytest.approx(0.25)
  with pytest.raises(ValueError, match=r"calibration of gBCE must be in \[0, 1\], got 2"):
    losses.gbce_beta(4, 17, 2)


def test_mean_leaves_padding_out():
  assert losses.mean(jnp.array([1.0, 5.0, jnp.nan]), jnp.array([True, True, False])) == 3
  assert losses.mean(jnp.array([1.0]), jnp.array([False])) == 0
