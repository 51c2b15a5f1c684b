"""The steps of the recipes in both dtypes, on small data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_runs
from flax import nnx
from parts import prepare


def prepared(recipe, folder, **changes):
  """The parts of a smoke run without dropout, and its first batch."""
  config = recipe_runs.load(f"{recipe}.synthetic", "smoke")
  config.update_from_flattened_dict({"cache_dir": str(folder), "dropout": 0.0} | changes)
  training = prepare(recipe, config)
  return training, next(iter(training.batches))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


def products(training, batch):
  """The matrix products of the step as lines of its program."""
  graph, values = nnx.split((training.model, training.optimizer))
  step = lambda values, batch: training.step(*nnx.merge(graph, values), batch)
  program = jax.make_jaxpr(step)(values, batch)
  return [line for line in str(program).splitlines() if " = dot_general" in line]


@pytest.mark.ci
def test_bfloat16_computes_and_stores_what_it_says(folder):
  losses = {}
  for dtype in ("float32", "bfloat16"):
    training, batch = prepared("dlrm", folder, dtype=dtype, table_dtype=dtype)
    params = jax.tree.leaves(nnx.state(training.model, nnx.Param))
    assert {x.dtype for x in params} == {jnp.dtype(jnp.float32)}
    tables = training.model.embed.tables
    assert {x.dtype.name for x in tables.values()} == {dtype}
    narrow = [line for line in products(training, batch) if ":bf16[" in line]
    assert bool(narrow) == (dtype == "bfloat16")
    before = {name: np.asarray(x, np.float32) for name, x in tables.items()}
    step = nnx.jit(training.step, donate_argnums=(0, 1))
    losses[dtype] = [
      float(step(training.model, training.optimizer, batch)["loss"]) for _ in range(3)
    ]
    for name, x in training.model.embed.tables.items():
      assert np.any(np.asarray(x, np.float32) != before[name]), name
  np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)


@pytest.mark.ci
@pytest.mark.parametrize("recipe", ["two_tower", "sequence"])
def test_products_of_other_recipes_are_of_bfloat16(recipe, folder):
  training, batch = prepared(recipe, folder, dtype="bfloat16", table_dtype="bfloat16")
  assert {x.dtype.name for x in training.model.embed.tables.values()} == {"bfloat16"}
  assert [line for line in products(training, batch) if ":bf16[" in line]
