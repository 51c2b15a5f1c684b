"""Where a recipe's tables are, by one strategy or a plan; and clipped gradients."""

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


def test_all_tables_have_one_strategy_or_a_plan_chooses(capsys):
  is_split = lambda layer: {name: layer.spec.stack_of[name].is_split for name in FEATURES}
  assert is_split(abstract("replicated")) == {"user": False, "country": False}
  assert is_split(abstract("div")) == {"user": True, "country": True}
  # A table of 16 rows moves fewer bytes when it is replicated, says the plan.
  assert is_split(abstract(hbm_bytes=10**9)) == {"user": True, "country": False}
  said = capsys.readouterr().err
  assert "strategy" in said
  assert "fits" in said
  abstract(hbm_bytes=10, inputs=None, devices=1)  # what is not trained needs no plan
  assert not capsys.readouterr().err


def test_mistakes():
  cases = [
    (("mod", {"hbm_bytes": 1000}), "more than hbm_bytes=1,000: use more devices"),
    (("rows", {}), "'rows'"),
  ]
  refused(cases, lambda given: abstract(given[0], **given[1]))


@pytest.mark.programs(20, "a layer is initialized")
def test_gradients_are_clipped_to_a_global_norm():
  """Of a row of a table and a dense kernel together: 3, 4 and 12 have norm 13."""

  class Model(nnx.Module):
    def __init__(self):
      table = embed.TableConfig(4, 1, name="t")
      features = {"f": embed.FeatureConfig(table)}
      self.embed = embed.SparseEmbed(features, embed.sgd(0.1), rngs=nnx.Rngs(0))
      self.kernel = nnx.Param(np.zeros(2, np.float32))

  def loss(model):
    kernel = model.kernel[...]
    return 3 * model.embed({"f": np.array([2])})["f"].sum() + kernel @ np.array([4.0, 12.0])

  @nnx.jit
  def clipped(model):
    grads = embed.value_and_grad(loss)(model)[1]
    return build.clipped(grads, 1.3)

  grads, metrics = clipped(Model())
  np.testing.assert_allclose(metrics["grad_norm"], 13.0, rtol=1e-6)
  np.testing.assert_allclose(jax.tree.leaves(grads.dense)[0], [0.4, 1.2], rtol=1e-6)
  rows = grads.rows["embed/t"]
  np.testing.assert_allclose(rows.values[rows.ids == 2], [[0.3]], rtol=1e-6)
  assert build.clipped(grads, 0.0) == (grads, {})
