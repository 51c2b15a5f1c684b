"""Where a recipe's tables are: one strategy, one for each table, a plan; and their dtypes."""

import jax
import ml_collections
import numpy as np
import pytest
from cases import refused
from flax import nnx

import embed
from recipes import mesh as mesh_lib
from recipes.config import RUN
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
  mesh = mesh_lib.start() if devices == 8 else None
  optimizer = embed.sgd(0.1)
  return build.tables(config, FEATURES, optimizer, rngs=nnx.Rngs(0), mesh=mesh, inputs=inputs)


def abstract(*args, **settings):
  """The layer without its rows."""
  return nnx.eval_shape(lambda: make(*args, **settings))


def test_each_table_has_its_strategy_or_all_have_one():
  is_split = lambda *args: {name: abstract(*args).spec.stack_of[name].is_split for name in FEATURES}
  assert is_split("replicated") == {"user": False, "country": False}
  assert is_split("div") == {"user": True, "country": True}
  assert is_split({"country": "replicated"}) == {"user": True, "country": False}


@pytest.mark.ci
def test_rows_do_not_depend_on_the_strategy():
  ids = {"user": np.array([79_999]), "country": np.array([3])}
  several, one = (make(*args) for args in (({"country": "replicated"},), ("mod", inputs, 1)))
  jax.tree.map(np.testing.assert_array_equal, several(ids), one(ids))
  array = several.arrays[several.spec.stack_of["user"].name]["parameters"].get_value()
  assert array.addressable_shards[0].data.nbytes == 80_000 * 8 * 4 // 8


@pytest.mark.ci
def test_a_plan_is_printed_and_a_dict_has_the_last_word(capsys):
  planned = abstract(hbm_bytes=10**9)
  said = capsys.readouterr().err
  assert "strategy" in said
  assert "fits" in said
  assert not planned.spec.stack_of["country"].is_split  # moves fewer bytes, says the plan
  assert planned.spec.stack_of["user"].is_split
  assert abstract({"country": "mod"}, hbm_bytes=10**9).spec.stack_of["country"].is_split


def test_mistakes(capsys):
  cases = [
    (({"contry": "mod"}, {}), "names contry, and the tables are country, user: write one of"),
    (("mod", {"hbm_bytes": 1000}), "more than hbm_bytes=1,000: use more devices"),
    (("mod", {"hbm_bytes": -1}), "hbm_bytes is -1: write the bytes of a device, or 0"),
    (({"user": "rows"}, {}), "'rows'"),
  ]
  refused(cases, lambda given: abstract(given[0], **given[1]))
  capsys.readouterr()
  abstract(hbm_bytes=10, inputs=None, devices=1)  # what is not trained needs no plan
  assert not capsys.readouterr().err
