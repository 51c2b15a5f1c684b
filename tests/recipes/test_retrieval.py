"""The best k equal a slow ranking, ties included, however candidates are cut and spread."""

import functools

import jax
import meshes
import numpy as np
import pytest

from recipes import mesh as mesh_lib
from recipes.evaluation import retrieval

K = 7
top_k = jax.jit(retrieval.top_k, static_argnames=("k", "mesh", "size"))


def slow(scores, k, exclude=None):
  """By sorting Python pairs: larger scores first, then lower ids; what is left out is gone."""
  best_scores, best_ids = [], []
  for row, all_scores in enumerate(scores):
    out = set() if exclude is None else set(exclude[row].tolist())
    ranked = sorted((-float(s), i) for i, s in enumerate(all_scores) if i not in out)[:k]
    ranked += [(np.inf, -1)] * (k - len(ranked))
    best_scores.append([-s for s, _ in ranked])
    best_ids.append([i for _, i in ranked])
  return np.array(best_scores, np.float32), np.array(best_ids)


def draw(seed, batch=5, size=83, dim=4):
  """Small whole numbers: products are exact, and most scores are tied."""
  generator = np.random.default_rng(seed)
  query = generator.integers(-2, 3, (batch, dim)).astype(np.float32)
  candidates = generator.integers(-1, 2, (size, dim)).astype(np.float32)
  exclude = generator.integers(-1, size, (batch, 9)).astype(np.int32)
  return query, candidates, exclude


def in_chunks(monkeypatch, max_scores, *arguments, **options):
  """Returns the answer where a device holds no more scores at once."""
  monkeypatch.setattr(retrieval, "_MAX_SCORES", max_scores)
  compiled = jax.jit(functools.partial(retrieval.top_k, **options), static_argnums=2)
  return compiled(*arguments)


def check(found, wanted):
  scores, ids = (np.asarray(x) for x in found)
  np.testing.assert_array_equal(ids, wanted[1])
  np.testing.assert_array_equal(scores, wanted[0])
  assert ids.dtype == np.int32


def test_ties_in_chunks_and_over_a_mesh(monkeypatch):
  query, candidates, exclude = draw(0)
  wanted = slow(query @ candidates.T, K, exclude)
  assert len(np.unique(wanted[0])) < wanted[0].size / 2  # the test is about ties
  check(top_k(query, candidates, K, exclude), wanted)
  check(in_chunks(monkeypatch, 5 * 10, query, candidates, K, exclude), wanted)
  mesh = meshes.make_mesh()
  check(in_chunks(monkeypatch, 5 * 4, query, candidates, K, exclude, mesh=mesh), wanted)
  check(in_chunks(monkeypatch, 5 * 10, query, candidates, K), slow(query @ candidates.T, K))


def test_what_fills_up_chunks_and_shards_never_wins(monkeypatch):
  """All scores are negative; a row of zeros would be the best."""
  query, candidates = np.ones((2, 3), np.float32), -np.ones((21, 3), np.float32)
  scores, ids = in_chunks(monkeypatch, 4, query, candidates, 21, mesh=meshes.make_mesh())
  assert ids.tolist() == [list(range(21))] * 2
  assert (np.asarray(scores) == -3).all()


@pytest.mark.parametrize(
  ("size", "spread"), [(83, False), pytest.param(3, True, marks=pytest.mark.ci)]
)
def test_a_catalogue_that_every_device_encodes_in_part(size, spread):
  mesh = meshes.make_mesh() if spread else None
  query, candidates, exclude = draw(1, size=size)
  batches = retrieval.catalogue_batches(size, 16, mesh)
  assert set(batches.ravel()) == set(range(size))
  place = (lambda x: x) if mesh is None else functools.partial(mesh_lib.to_global, mesh)
  whole = retrieval.joined([place(candidates[items]) for items in batches], mesh)
  np.testing.assert_array_equal(np.asarray(whole)[:size], candidates)
  if mesh is not None:
    assert whole.sharding.shard_shape(whole.shape)[0] == len(whole) // 8
  k = min(K, size)
  found = top_k(query, whole, k, exclude, mesh, size=size)
  check(found, slow(query @ candidates.T, k, exclude))


@pytest.mark.ci
def test_nothing_as_large_as_all_scores_or_a_catalogue_is_made():
  """Only queries and the k best of each device are sent."""
  mesh, batch, size, dim = meshes.make_mesh(), 16, 4096, 8
  split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
  args = [jax.ShapeDtypeStruct((rows, dim), np.float32, sharding=split) for rows in (batch, size)]
  text = top_k.lower(*args, K, mesh=mesh, size=size - 5).compile().as_text()
  assert f"f32[{batch},{size // 8}]" in text
  assert f"f32[{batch},{size}]" not in text
  assert f"f32[{size // 8},{dim}]" in text
  assert f"f32[{size},{dim}]" not in text
  join = jax.jit(lambda *x: retrieval.joined(x, mesh))
  piece = jax.ShapeDtypeStruct((size // 4, dim), np.float32, sharding=split)
  text = join.lower(*[piece] * 4).compile().as_text()
  assert f"f32[{size},{dim}]" not in text
  for sent in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
    assert sent not in text


def test_only_listed_ids_and_those_among_which_all_search(monkeypatch):
  found = top_k(np.ones((2, 1), np.float32), np.arange(4, dtype=np.float32)[:, None], 4,
                np.array([[3, 1, -1]] * 2, np.int32), only=np.array([False, True]))  # fmt: skip
  assert found[1].tolist() == [[2, 0, -1, -1], [3, 1, -1, -1]]
  query, candidates, listed = draw(2)
  only, among = np.arange(5) % 2 == 0, np.arange(83) % 3 > 0
  kept = [
    among & (np.isin(np.arange(83), ids) == row) for ids, row in zip(listed, only, strict=True)
  ]
  wanted = slow(query @ candidates.T, K, [np.flatnonzero(~each) for each in kept])
  assert -1 in wanted[1]
  lists = {"only": only, "among": among}
  check(in_chunks(monkeypatch, 5 * 10, query, candidates, K, listed, **lists), wanted)
  mesh = meshes.make_mesh()
  check(in_chunks(monkeypatch, 5 * 4, query, candidates, K, listed, mesh=mesh, **lists), wanted)


def test_few_are_left():
  scores = np.array([[3.0, -0.0, 0.0, -1.0]], np.float32)
  exclude = np.array([[0, -1, 3]], np.int32)
  found, ids = top_k(np.ones((1, 1), np.float32), scores.T, 4, exclude)
  assert ids.tolist() == [[1, 2, -1, -1]]  # -0.0 equals 0.0
  assert found.tolist() == [[0.0, 0.0, -np.inf, -np.inf]]
