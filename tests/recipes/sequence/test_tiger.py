"""TIGER: the trie by hand, beams against a slow ranking of every item, and the whole run."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import recipe_runs
from flax import nnx

from recipes.sequence import tiger

CODES = np.array([[1, 0, 2], [0, 3, 1], [1, 0, 2], [1, 0, 0], [2, 1, 1], [0, 0, 1]])
COUNTS = np.array([3, 9, 7, 1, 1, 1])
POPULAR = np.arange(12)[::-1] % 5


@pytest.mark.ci
def test_the_trie_by_hand():
  """Prefixes 0, 1, 2; then 00, 03, 10, 21; then 001, 031, 100, 102, 211, of which 102 has two."""
  trie = tiger.Trie(CODES, COUNTS)
  assert trie.widest == (3, 2, 2, 2)
  children, is_there = trie.children(1, np.array([0, 1, 2]))
  assert is_there.tolist() == [[True, True], [True, False], [True, False]]
  assert children[is_there].tolist() == [0, 1, 2, 3]
  assert trie.prefixes(2, children[is_there]).tolist() == [[0, 0], [0, 3], [1, 0], [2, 1]]
  children, is_there = trie.children(2, np.array([2]))
  assert trie.prefixes(3, children)[0].tolist() == [[1, 0, 0], [1, 0, 2]]
  places, is_there = trie.children(3, np.array([3, 4]))
  assert trie.items[...][places][is_there].tolist() == [2, 0, 4]  # 2 is more popular than 0


@nnx.jit
def logits(made, query):
  """Of all codes of every level, after the codes of every item: `[M, B, N, K]`."""
  codes = made.codes[...]
  hidden = jnp.broadcast_to(query[:, None], (len(query), len(codes), query.shape[1]))
  outputs = made.decode(hidden, jnp.broadcast_to(codes[:, :-1], (*hidden.shape[:2], 2)))
  return jnp.stack([made.embed.attend(outputs[:, :, i], f"code_{i}") for i in range(3)])


def ranking(made, query, exclude):
  """Log-probabilities of all items, by a softmax over what continues a prefix; and their order."""
  codes, found = np.asarray(made.codes[...]), np.asarray(logits(made, query))
  score = np.zeros((len(query), len(codes)))
  for item, code in enumerate(codes):
    for level in range(3):
      siblings = sorted({c[level] for c in codes.tolist() if c[:level] == code[:level].tolist()})
      scores = found[level][:, item]
      score[:, item] += scores[:, code[level]] - np.log(np.exp(scores[:, siblings]).sum(axis=1))
  for row, items in enumerate(exclude):
    score[row, items[items >= 0]] = -np.inf
  return score, np.lexsort((np.broadcast_to(-POPULAR, score.shape), -score.round(4)))


@functools.partial(nnx.jit, static_argnums=2)
def top_k(made, query, k, exclude):
  return tiger.top_k(made, query, k, exclude)


@pytest.fixture
def small():
  """A model of 12 items in which three share their codes, with weights far from their start."""
  config = recipe_runs.load("sequence.synthetic", "smoke")
  changes = {"model": "tiger", "tiger.beam": 27, "table.init_scale": 1.0, "heads": 2, "seed": 1}
  config.update_from_flattened_dict(changes)
  codes = np.random.default_rng(3).integers(3, size=(12, 3))
  codes[[4, 7]] = codes[2]
  made = tiger.build_model(config, codes, POPULAR)
  made.eval()
  return made


@pytest.mark.ci
def test_a_wide_beam_ranks_as_the_probabilities_of_all_items(small):
  query = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
  exclude = np.full((5, 4), -1, np.int32)
  exclude[1, 0], exclude[2] = 2, [0, 4, 7, 7]
  scores, order = ranking(small, query, exclude)
  assert np.exp(scores[0, [0, 1, 2, 3, 5, 8, 9, 10]]).sum() == pytest.approx(1, rel=1e-4)
  found_scores, found = map(np.asarray, top_k(small, query, 12, exclude))
  for row in range(5):
    left = int(np.isfinite(scores[row]).sum())
    assert left == 12 - len(set(exclude[row][exclude[row] >= 0].tolist()))
    assert found[row].tolist() == [*order[row][:left], *[-1] * (12 - left)]
    np.testing.assert_allclose(found_scores[row][:left], scores[row][found[row][:left]], atol=1e-4)
