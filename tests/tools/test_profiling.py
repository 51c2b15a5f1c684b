"""What a sample of batches looks up, counted by hand and against what the exchange reports."""

import harness
import numpy as np
import pytest
from flax import nnx
from meshes import make_mesh

import embed


def test_load_by_hand(tmp_path):
  """Two devices, two shards: row r is on shard r % 2. Saved and loaded, it says the same."""
  table = embed.TableConfig(10, 4, name="t")
  plan = embed.Plan.uniform(embed.FeatureConfig(table), None, make_mesh(shape=(2,)), "data", "mod")
  batches = [
    embed.Padded([[0, 2, 4], [4, 1, -1], [6, 6, 6]]),  # bags 0 and 1 are on device 0
    embed.Padded([[1, 1, 1], [1, 1, 1]]),
  ]
  profile = embed.profile(None, batches, plan)
  (found,) = profile.stacks.values()
  # First, device 0 asks for rows 0, 2, 4 of shard 0 and 1 of shard 1; device 1 for row 6.
  assert found.pairs.tolist() == [3, 1]
  assert found.shards.tolist() == [4, 3]
  assert found.imbalance == 4 / 3.5
  profile.save(tmp_path / "sample.npz")
  assert repr(embed.Profile.load(tmp_path / "sample.npz")) == repr(profile)


@pytest.mark.ci
def test_load_is_what_the_exchange_reports():
  """Also of a batch that does not divide, and of several tables in a stack."""
  tables = [embed.TableConfig(size, 8, name=name) for name, size in (("movie", 50), ("user", 9))]
  features = {table.name: embed.FeatureConfig(table) for table in tables}
  draw = np.random.default_rng(0)
  batch = {
    "movie": embed.Padded(draw.integers(-1, 50, (37, 5))),
    "user": draw.integers(-1, 9, (37, 2)),
  }
  plan = embed.plan(features, make_mesh(), batch, embed.sgd(0.1))
  for name in plan:
    plan[name].strategy, plan[name].exchange, plan[name].capacity = "mod", "all_to_all", 4
  model = harness.Model(None, plan=plan)
  nnx.jit(lambda model, batch: model.embed(batch))(model, batch)
  (stack,) = embed.profile(None, [batch], plan).stacks.values()
  assert stack.tables == ("movie", "user")
  assert stack.pairs.tolist() == [round(float(model.embed.report["buffer_fill"]) * 4)]
