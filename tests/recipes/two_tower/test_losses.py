"""The sampled softmax by hand, the frequency estimate against known rates, the queue in order."""

import math

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx

from recipes.two_tower import losses
from recipes.two_tower.losses import Frequency, Queue

LOGITS = jnp.array([[2.0, 1.0, 0.0, 3.0], [0.5, 1.5, -1.0, 0.0]])  # two queries, two extra ones


def entropy(positive, *negatives):
  return math.log(sum(map(math.exp, (positive, *negatives)))) - positive


def test_by_hand():
  found = losses.sampled_softmax(LOGITS, jnp.array([7, 8, 9, 4]))
  wanted = [entropy(2.0, 1.0, 0.0, 3.0), entropy(1.5, 0.5, -1.0, 0.0)]
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_accidental_hits_by_hand():
  ids = jnp.array([7, 8, 7, 8])  # the third is the first's positive, the fourth the second's
  found = losses.sampled_softmax(LOGITS, ids)
  np.testing.assert_allclose(found, [entropy(2.0, 1.0, 3.0), entropy(1.5, 0.5, -1.0)], rtol=1e-6)
  kept = losses.sampled_softmax(LOGITS, ids, remove_accidental_hits=False)
  wanted = [entropy(2.0, 1.0, 0.0, 3.0), entropy(1.5, 0.5, -1.0, 0.0)]
  np.testing.assert_allclose(kept, wanted, rtol=1e-6)


def test_two_queries_of_one_item_are_not_each_others_negatives():
  found = losses.sampled_softmax(LOGITS[:, :2], jnp.array([7, 7]))
  np.testing.assert_allclose(found, [0.0, 0.0], atol=1e-6)
  grads = jax.grad(lambda x: losses.sampled_softmax(x, jnp.array([7, 7])).sum())(LOGITS[:, :2])
  assert grads.tolist() == [[0, 0], [0, 0]]


def test_logq_by_hand():
  log_expected = jnp.log(jnp.array([1.0, 2.0, 0.5, 4.0]))
  found = losses.sampled_softmax(LOGITS, jnp.arange(4), log_expected=log_expected)
  logs = [math.log(x) for x in (1.0, 2.0, 0.5, 4.0)]
  rows = [[x - log for x, log in zip(row, logs, strict=True)] for row in LOGITS.tolist()]
  wanted = [entropy(*rows[0]), entropy(rows[1][1], rows[1][0], *rows[1][2:])]
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_hard_negatives_are_the_best_scored_of_each_query():
  found = losses.sampled_softmax(LOGITS, jnp.arange(4), hard_negatives=1)
  np.testing.assert_allclose(found, [entropy(2.0, 3.0), entropy(1.5, 0.5)], rtol=1e-6)
  all_of_them = losses.sampled_softmax(LOGITS, jnp.arange(4), hard_negatives=3)
  np.testing.assert_allclose(all_of_them, losses.sampled_softmax(LOGITS, jnp.arange(4)), rtol=1e-6)
  # One that is the positive once more is never a hard negative.
  found = losses.sampled_softmax(LOGITS, jnp.array([0, 1, 2, 0]), hard_negatives=1)
  np.testing.assert_allclose(found[0], entropy(2.0, 1.0), rtol=1e-6)


def test_cosine_contrastive_by_hand():
  positive, negative = jnp.array([0.8, -0.2]), jnp.array([[0.9, 0.3, 0.6], [0.7, 0.5, 0.1]])
  hits = jnp.array([[False, False, True], [False, False, False]])
  found = losses.cosine_contrastive(positive, negative, hits, margin=0.4, weight=30.0)
  # The hit of the first query costs nothing, and is counted in the mean.
  wanted = [0.2 + 30 * 0.5 / 3, 1.2 + 30 * (0.3 + 0.1) / 3]
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


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
      values = losses.sampled_softmax(
        logits, ids, log_expected=log_expected, remove_accidental_hits=False
      )
      return values.mean()

    return jax.grad(loss)(scores)

  keys = jax.random.split(jax.random.key(1), 100)
  wanted = jax.nn.softmax(scores) - popularity
  mean = lambda corrected: jax.lax.map(lambda key: estimate(key, corrected), keys).mean(axis=0)
  assert np.abs(mean(True) - wanted).max() < 0.004
  assert np.abs(mean(False) - wanted).max() > 0.02


def stream(frequency, probability, batches, batch_size, seed=0):
  draw = np.random.default_rng(seed)
  update = nnx.jit(lambda frequency, ids: frequency.update(ids))
  for _ in range(batches):
    update(frequency, jnp.asarray(draw.choice(len(probability), batch_size, p=probability)))


@pytest.mark.ci
def test_the_estimate_converges_to_the_rates():
  """From many in a batch to one in twenty batches."""
  probability = np.array([0.5, 0.3, 0.15, 0.045, 0.0042, 0.0008])
  frequency = Frequency(6, 6, rate=0.01)
  stream(frequency, probability, 4_000, 64)
  found = frequency.expected(jnp.arange(6))
  np.testing.assert_allclose(found, 64 * probability, rtol=0.2)


def test_the_estimate_follows_a_change():
  frequency = Frequency(2, 2, rate=0.05)
  stream(frequency, np.array([0.9, 0.1]), 200, 16)
  stream(frequency, np.array([0.2, 0.8]), 200, 16)
  np.testing.assert_allclose(frequency.expected(jnp.arange(2)), [3.2, 12.8], rtol=0.2)


def test_the_estimate_by_hand():
  frequency = Frequency(4, 4, rate=0.1)
  frequency.update(jnp.array([0, 0, 2]))
  np.testing.assert_allclose(frequency.expected(jnp.array([0, 2, 1])), [2, 1, 1 / 2])
  frequency.update(jnp.array([1, 1, 1]))
  frequency.update(jnp.array([0, 1, 1]))
  # 0: intervals 1 and 2, counts 2 and 1. 1: intervals 2 and 1, counts 3 and 2. Never seen: 1 / 4.
  wanted = [1.5 / 1.5, 2.5 / 1.5, 1.0, 1 / 4]
  np.testing.assert_allclose(frequency.expected(jnp.arange(4)), wanted, rtol=1e-6)


def test_hashed_items_that_share_a_place_are_one():
  frequency = Frequency(3, 1_000, rate=0.1)
  stream(frequency, np.full(1_000, 1 / 1_000), 50, 90)
  rates = np.asarray(frequency.expected(jnp.arange(1_000)))
  assert len(np.unique(rates)) == 3
  np.testing.assert_allclose(np.unique(rates).sum(), 90, rtol=0.1)


def test_the_estimate_over_a_mesh_is_the_same():
  mesh, draw = meshes.make_mesh(), np.random.default_rng(3)
  one, spread = Frequency(20, 20, rate=0.1), Frequency(20, 20, rate=0.1)
  update = nnx.jit(lambda frequency, ids: frequency.update(ids))
  for _ in range(10):
    ids = jnp.asarray(draw.integers(0, 20, 32))
    update(one, ids)
    update(spread, jax.device_put(ids, jax.NamedSharding(mesh, jax.P("data"))))
  same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
  jax.tree.map(same, nnx.state(one), nnx.state(spread))


def test_the_queue_forgets_the_oldest():
  queue = Queue(6, 2)
  rows = lambda *ids: (jnp.array(ids), jnp.array(ids, jnp.float32)[:, None] * jnp.ones((1, 2)))
  for ids in ((1, 2), (3, 4)):
    queue.put(*rows(*ids), jnp.array(ids, jnp.float32))
  assert queue.read()[0].tolist() == [1, 2, 3, 4, -1, -1]
  for ids in ((5, 6), (7, 8)):
    queue.put(*rows(*ids), jnp.array(ids, jnp.float32))
  ids, vectors, rates = queue.read()
  assert ids.tolist() == [7, 8, 3, 4, 5, 6]
  assert vectors[:, 1].tolist() == rates.tolist() == [7, 8, 3, 4, 5, 6]
