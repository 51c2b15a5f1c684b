"""Where a recipe's tables are: one strategy, one for each table, a plan; and their dtypes."""

import jax
import ml_collections
import numpy as np
import pytest
from flax import nnx

import embed
from recipes import errors, hosts
from recipes.run.settings import RUN
from recipes.training import build

FEATURES = {
  name: embed.FeatureConfig(embed.TableConfig(rows, 8, name=name))
  for name, rows in {"user": 80_000, "country": 16}.items()
}


def inputs():
  ids = jax.ShapeDtypeStruct((64,), np.int32)
  return {"user": ids, "country": ids}


def make(sharding="mod", inputs=inputs, devices=8, **settings):
  config = ml_collections.ConfigDict(RUN | {"table": {"sharding": sharding}} | settings)
  mesh = hosts.start() if devices == 8 else None
  optimizer = embed.sgd(0.1)
  return build.tables(config, FEATURES, optimizer, rngs=nnx.Rngs(0), mesh=mesh, inputs=inputs)


def bytes_of(layer, table):
  """Bytes of a table's stack on one device."""
  array = layer.arrays[layer.spec.stack_of[table].name]["parameters"].get_value()
  return array.addressable_shards[0].data.nbytes


def test_one_strategy_for_all_tables():
  layer = make("replicated")
  assert not any(stack.is_split for stack in layer.spec.stacks.values())
  assert all(stack.is_split for stack in make("div").spec.stacks.values())


def test_a_strategy_for_each_table():
  """A table that is left out is split: 80,000 rows of 8 floats over 8 devices."""
  layer = make({"country": "replicated"})
  assert bytes_of(layer, "country") == 16 * 8 * 4
  assert bytes_of(layer, "user") == 80_000 * 8 * 4 // 8
  ids = {"user": np.array([79_999]), "country": np.array([3])}
  one = make("mod", devices=1)(ids)
  jax.tree.map(np.testing.assert_array_equal, layer(ids), one)  # rows do not depend on it


def test_a_plan_is_printed_and_a_dict_has_the_last_word(capsys):
  planned = make(hbm_bytes=10**9)
  said = capsys.readouterr().err
  assert "strategy" in said
  assert "fits" in said
  assert not planned.spec.stack_of["country"].is_split  # moves fewer bytes, says the plan
  assert planned.spec.stack_of["user"].is_split
  assert make({"country": "mod"}, hbm_bytes=10**9).spec.stack_of["country"].is_split


def test_a_model_that_is_not_trained_needs_no_plan(capsys):
  make(hbm_bytes=10, inputs=None, devices=1)
  assert not capsys.readouterr().err


@pytest.mark.parametrize(
  ("sharding", "settings", "message"),
  [
    ({"contry": "mod"}, {}, "names contry, and the tables are country, user: write one of"),
    ("mod", {"hbm_bytes": 1000}, "more than hbm_bytes=1,000: use more devices"),
    ("mod", {"hbm_bytes": -1}, "hbm_bytes is -1: write the bytes of a device, or 0"),
  ],
)
def test_mistakes(sharding, settings, message):
  with pytest.raises(errors.UserError, match=message):
    make(sharding, **settings)


def test_an_unknown_strategy_is_named():
  with pytest.raises(ValueError, match="'rows'"):
    make({"user": "rows"})
