"""What a sample of batches looks up, counted by hand and against what the exchange reports."""

import dataclasses

import harness
import numpy as np
import pytest
from flax import nnx
from meshes import make_mesh

import embed
from embed.engine import cost
from embed.engine.bags import Bags


def two_tables():
  """A table of two features, and one of its own."""
  movie = embed.TableConfig(50, 8, name="movie")
  user = embed.TableConfig(9, 8, name="user")
  return {
    "watched": embed.FeatureConfig(movie),
    "seen": embed.FeatureConfig(movie),
    "user": embed.FeatureConfig(user),
  }


@pytest.mark.ci
def test_counts_of_every_kind_of_input():
  batches = [
    {
      "watched": embed.Padded([[3, 7, 3], [-1, -1, -1]]),
      "seen": embed.Ragged([7, 8, 9, 9], [0, 1, 3]),  # the last 9 is behind the splits
      "user": np.array([4, -1]),
    },
    {"watched": embed.Sparse([[1, 0]], [7], (2, 3))},
  ]
  found = embed.profile(two_tables(), batches).tables
  movie, user = found["movie"], found["user"]
  # Bags: [3 7 3], [], [7], [8 9]; and in the second batch [], [7].
  assert movie.bags.tolist() == [2, 2, 1, 1]
  assert (movie.ids.tolist(), movie.distinct.tolist()) == ([6, 1], [4, 1])
  assert (movie.rows.tolist(), movie.counts.tolist()) == ([3, 7, 8, 9], [2, 3, 1, 1])
  assert (movie.mean_valency, movie.max_valency) == (7 / 6, 3)
  assert movie.top_share(1 / 50) == 3 / 7
  assert user.bags.tolist() == [1, 1]
  assert (user.ids.tolist(), user.distinct.tolist()) == ([1, 0], [1, 0])


def test_load_by_hand():
  """Two devices, two shards: row r is on shard r % 2."""
  table = embed.TableConfig(10, 4, name="t")
  plan = embed.Plan.uniform(embed.FeatureConfig(table), None, make_mesh(shape=(2,)), "data", "mod")
  batches = [
    embed.Padded([[0, 2, 4], [4, 1, -1], [6, 6, 6]]),  # bags 0 and 1 are on device 0
    embed.Padded([[1, 1, 1], [1, 1, 1]]),
  ]
  (found,) = embed.profile(None, batches, plan).stacks.values()
  # First, device 0 asks for rows 0, 2, 4 of shard 0 and 1 of shard 1; device 1 for row 6.
  assert found.pairs.tolist() == [3, 1]
  assert found.shards.tolist() == [4, 3]
  assert found.imbalance == 4 / 3.5


@pytest.mark.ci
def test_load_is_what_the_exchange_reports():
  """Also of a batch that does not divide, of several features and of several tables in a stack."""
  features = two_tables()
  draw = np.random.default_rng(0)
  batch = {
    "watched": embed.Padded(draw.integers(-1, 50, (37, 5))),
    "seen": embed.Padded(draw.integers(-1, 50, (37, 3))),
    "user": draw.integers(-1, 9, (37, 2)),
  }
  plan = embed.plan(features, make_mesh(), batch, embed.sgd(0.1))
  for name in plan:
    plan[name].strategy, plan[name].exchange = "mod", "all_to_all"
  model = harness.Model(None, plan=plan)
  nnx.jit(lambda model, batch: model.embed(batch))(model, batch)
  (stack,) = embed.profile(None, [batch], plan).stacks.values()
  fill, capacity = float(model.embed.report["buffer_fill"]), capacity_of(model, batch)
  assert stack.tables == ("movie", "user")
  assert stack.pairs.tolist() == [round(fill * capacity)]


def capacity_of(model, batch):
  (stack,) = model.embed.spec.stacks.values()
  bags = [Bags(batch[f].values) for f in ("watched", "seen")] + [Bags(batch["user"][..., None])]
  demand = cost.batch_demand(stack, bags, ["movie", "movie", "user"])
  return cost.choose_exchange(stack, demand).capacity


@pytest.mark.ci
def test_saved_and_loaded(tmp_path):
  features = two_tables()
  plan = embed.Plan.uniform(features, None, make_mesh(), "data", "mod")
  batch = {"watched": embed.Padded([[3, 7, 3]]), "user": np.arange(9)}
  profile = embed.profile(features, [batch, batch], plan)
  profile.save(tmp_path / "sample.npz")
  loaded = embed.Profile.load(tmp_path / "sample.npz")
  assert repr(loaded) == repr(profile)
  for kind in ("tables", "stacks"):
    for name, wanted in getattr(profile, kind).items():
      found = getattr(loaded, kind)[name]
      for field in dataclasses.fields(wanted):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(wanted, field.name))
