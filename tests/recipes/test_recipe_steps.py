"""The steps of the recipes: parts against whole batches, and both dtypes, on small data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_runs
from flax import nnx
from parts import prepare
from suites import slow_unless

import embed
from recipes.training import train_step
from recipes.training.train_step import Options

pytestmark = pytest.mark.ci


def prepared(recipe, folder, **changes):
  """The parts of a smoke run without dropout, and its first batch."""
  config = recipe_runs.load(f"{recipe}.synthetic", "smoke")
  with config.unlocked():
    config.update_from_flattened_dict({"cache_dir": str(folder), "dropout": 0.0})
    for name, value in changes.items():
      node, _, key = name.rpartition(".")
      (config[node] if node else config)[key] = value
  training = prepare(recipe, config)
  return training, next(iter(training.batches))


def state(training):
  tables = training.model.embed.variables
  return jax.tree.map(np.asarray, (tables, nnx.to_pure_dict(nnx.state(training.model, nnx.Param))))


def assert_close(x, y):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), x, y)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
  ("recipe", "changes"),
  slow_unless(
    [
      ("dlrm", {}),
      ("sequence", {"loss": "softmax"}),
      ("sequence", {"loss": "gbce", "negatives.shared": True}),
      ("sequence", {"loss": "sampled_softmax", "negatives.shared": False}),
      ("sequence", {"model": "bert4rec", "loss": "softmax"}),
    ],
    lambda recipe, changes: recipe == "dlrm" or "model" in changes,
  ),
)
def test_four_parts_are_the_whole_batch(recipe, changes, folder):
  """Also where the parts have different numbers of targets, and of rows with a weight."""
  losses, states = [], []
  # Adam would turn the rounding of a gradient of nearly 0 into a whole step.
  changes = (
    changes | {"table.optimizer": "sgd", "dense_optimizer": "adagrad"}
    if recipe == "dlrm"
    else changes | {"table.optimizer": "sgd"}
  )
  for parts in (1, 4):
    training, batch = prepared(recipe, folder, **changes)
    if recipe == "dlrm":
      batch["weight"] = jnp.arange(batch["label"].shape[0]) % 3 / 3
    step = train_step.make_train_step(training.loss_fn, Options(accumulate=parts))
    losses.append(float(step(training.model, training.optimizer, batch)["loss"]))
    states.append(state(training))
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
  assert_close(states[1][0], states[0][0])


def test_a_query_meets_the_candidates_of_its_part(folder):
  """And all drawn negatives: two parts are the mean of the losses of two smaller batches."""
  changes = {"negatives.number": 16, "table.optimizer": "sgd"}
  training, batch = prepared("two_tower", folder, **changes)
  step = train_step.make_train_step(training.loss_fn, Options(accumulate=2))
  loss = float(step(training.model, training.optimizer, batch)["loss"])
  other, _ = prepared("two_tower", folder, **changes)
  drawn = {name: x for name, x in batch.items() if name.startswith("negative")}
  parts = []
  for i in range(2):
    half = jax.tree.map(lambda x, i=i: x[i::2], {n: x for n, x in batch.items() if n not in drawn})
    parts.append(embed.value_and_grad(other.loss_fn.loss_fn)(other.model, half | drawn))
  grads = embed.accumulate([grads.map(lambda g: g / 2) for _, grads in parts])
  other.optimizer.update(other.model, grads)
  np.testing.assert_allclose(loss, np.mean([float(value) for value, _ in parts]), rtol=1e-5)
  assert_close(state(training)[0], state(other)[0])


@pytest.mark.parametrize("recipe", slow_unless(["dlrm", "two_tower", "sequence"], "dlrm".__eq__))
def test_bfloat16_computes_and_stores_what_it_says(recipe, folder):
  losses = {}
  for dtype in ("float32", "bfloat16"):
    training, batch = prepared(recipe, folder, dtype=dtype, table_dtype=dtype)
    loss_fn = training.loss_fn.loss_fn
    params = jax.tree.leaves(nnx.state(training.model, nnx.Param))
    assert {x.dtype for x in params} == {jnp.dtype(jnp.float32)}
    tables = training.model.embed.tables
    assert {x.dtype.name for x in tables.values()} == {dtype}
    graph, values = nnx.split(training.model)
    program = jax.make_jaxpr(lambda v, b: loss_fn(nnx.merge(graph, v), b))(values, batch)  # noqa: B023
    products = [line for line in str(program).splitlines() if " = dot_general" in line]
    narrow = [line for line in products if ":bf16[" in line]
    assert bool(narrow) == (dtype == "bfloat16")
    before = {name: np.asarray(x, np.float32) for name, x in tables.items()}
    step = train_step.make_train_step(training.loss_fn)
    losses[dtype] = [
      float(step(training.model, training.optimizer, batch)["loss"]) for _ in range(3)
    ]
    for name, x in training.model.embed.tables.items():
      assert np.any(np.asarray(x, np.float32) != before[name]), name
  np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)
