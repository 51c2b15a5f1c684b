"""The training step: parts of a batch, clipping and phases, by hand and against the whole."""

import re
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from cases import refused
from flax import nnx

import embed
from recipes import errors, hosts
from recipes.run import settings
from recipes.training import train_step
from recipes.training.train_step import Objective, Options, Step

ROWS = 40


def config(**changes):
  sizes = {"batch_size": 16, "eval_batch_size": 16, "steps": 20}
  return ml_collections.ConfigDict(settings.RUN | sizes | changes)


def batch(size=64, seed=0):
  draw = np.random.default_rng(seed)
  return {
    "features": {
      "one": draw.integers(0, ROWS, size).astype(np.int32),
      "bag": embed.Padded(draw.integers(-1, ROWS, (size, 3)).astype(np.int32)),
    },
    "label": draw.normal(size=size).astype(np.float32),
    "weight": draw.uniform(0.1, 3, size).astype(np.float32),
  }


# --- by hand -------------------------------------------------------------------------------------


class Sum(nnx.Module):
  """A table of zeros of one column, and a bias: row + bias."""

  def __init__(self):
    table = embed.TableConfig(
      4, 1, initializer=jax.nn.initializers.zeros, optimizer=embed.sgd(1.0), name="t"
    )
    self.embed = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
    self.bias = nnx.Param(jnp.zeros(()))

  def __call__(self, ids):
    return self.embed(ids)[:, 0] + self.bias[...]


def state_of_sum():
  model = Sum()
  return {"model": model, "optimizer": embed.Optimizer(model, optax.sgd(1.0))}


def stepped(objective, options, inputs):
  """The loss of a step, and the rows and the bias after it."""
  state = state_of_sum()
  metrics, model = Step(objective, **state, options=options)(inputs), state["model"]
  return float(metrics["loss"]), rows_of(model), float(model.bias[...])


def rows_of(model):
  return np.asarray(model.embed.tables["t"])[:, 0].tolist()


IDS = np.array([1, 1, 2, 3])


def test_parts_by_hand():
  """The gradient of a mean of w (row + bias) is w / 4 for each example, at rate 1."""
  objective = Objective(lambda model, batch: jnp.mean(batch["w"] * model(batch["ids"])))
  inputs = {"ids": IDS, "w": np.float32([4, 8, 12, 16])}
  assert stepped(objective, Options(accumulate=2), inputs) == (0.0, [0, -3, -3, -4], -10.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_may_return_metrics_beside_it(parts):
  """A mean of 4, 8, 12, 16 is 10, also of two parts {4, 12} and {8, 16}."""
  loss = lambda model, batch: (jnp.mean(model(batch["ids"])), {"w": jnp.mean(batch["w"])})
  step = Step(loss, **state_of_sum(), options=Options(accumulate=parts))
  inputs = {"ids": IDS, "w": np.float32([4, 8, 12, 16])}
  assert jax.tree.map(float, step(inputs)) == {"loss": 0.0, "w": 10.0}


def test_parts_of_unequal_weight_by_hand():
  """Parts {0, 2} and {1, 3} weigh 1 + 3 and 2 + 0; each example's gradient is its weight over 6."""
  loss = lambda model, batch: (
    jnp.sum(batch["w"] * model(batch["ids"])) / jnp.maximum(jnp.sum(batch["w"]), 1)
  )
  objective = Objective(loss, weight=lambda batch: jnp.sum(batch["w"]))
  inputs = {"ids": IDS, "w": np.float32([1, 2, 3, 0])}
  _, rows, bias = stepped(objective, Options(accumulate=2), inputs)
  assert rows == pytest.approx([0, -0.5, -0.5, 0])
  assert bias == pytest.approx(-1)


def test_every_part_has_what_is_shared():
  """A sum over 3 shared ids in each of 2 parts: the mean of the parts is that of one of them."""
  loss = lambda model, batch: jnp.sum(model(batch["shared"])) + 0 * jnp.mean(batch["x"])
  objective = Objective(loss, shared=("shared",))
  inputs = {"shared": np.array([1, 2, 2]), "x": np.zeros(4, np.float32)}
  assert stepped(objective, Options(accumulate=2), inputs) == (0.0, [0, -1, -2, 0], -3.0)


def test_a_norm_counts_tables_and_dense_parameters():
  """Gradients of row 1 and of the bias are 3 + 3 and 8: a norm of 10, which is clipped to 5."""

  def loss(model, batch):
    row = model.embed(batch["ids"])[:, 0]
    return jnp.sum(3 * row) * (2 / row.size) + 8 * model.bias[...]

  inputs = {"ids": np.array([1, 1])}
  assert stepped(Objective(loss), Options(clip_norm=5.0), inputs) == (0.0, [0, -3, 0, 0], -4.0)
  assert stepped(Objective(loss), Options(clip_norm=10.0), inputs) == (0.0, [0, -6, 0, 0], -8.0)


def test_steps_go_on_from_what_is_restored_and_evaluated_in_between():
  state = state_of_sum()
  model = state["model"]
  model.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  state["optimizer"] = embed.Optimizer(model, optax.sgd(1.0))
  loss = lambda model, ids: jnp.sum(model(ids)) * model.dropout(jnp.ones(64)).sum()
  step, ids, row = Step(loss, **state), np.array([1]), lambda: rows_of(model)[1]
  before = jax.tree.map(np.array, embed.checkpoint.to_tree(model=model))
  step(ids)
  first = row()
  step(ids)
  assert row() - first != first  # the second mask is another one
  embed.checkpoint.from_tree(before, model=model)
  predict = nnx.jit(lambda model, ids: model(ids), graph=False)
  assert predict(nnx.view(model, deterministic=True), ids).tolist() == [0.0]
  step(ids)
  assert row() == first < 0  # the masks begin again as well
  model.embed.load_tables({"t": np.zeros((4, 1))})
  step(ids)
  assert row() not in (0, first)


def test_steps_write_tables_in_their_own_memory():
  state = state_of_sum()
  step = Step(lambda model, ids: jnp.sum(model.embed(ids)), **state)
  (before,) = jax.tree.leaves(nnx.state(state["model"], embed.Table))
  step(np.array([1]))
  assert before.is_deleted()


@pytest.mark.ci
def test_a_cut_takes_every_nth_row_from_where_it_is():
  mesh = hosts.start()
  x = hosts.to_global(mesh, np.arange(64).reshape(32, 2))
  cut = jax.jit(lambda x: train_step.cut(x, 4, mesh)).lower(x).compile()
  parts = cut(x)
  np.testing.assert_array_equal(parts[1], np.arange(64).reshape(32, 2)[1::4])
  assert {shard.data.shape for shard in parts.addressable_shards} == {(4, 1, 2)}
  assert not re.search("all-|collective", cut.as_text())


# --- against the whole batch ---------------------------------------------------------------------


# --- traces --------------------------------------------------------------------------------------


# --- mistakes ------------------------------------------------------------------------------------


def test_settings_that_make_no_sense():
  cases = [
    ({"clip_norm": -1.0}, "clip_norm is -1.0: choose a positive norm, or 0"),
    ({"clip_norm": float("nan")}, "clip_norm is nan: choose a positive norm, or 0"),
    ({"accumulate": 0}, "accumulate is 0: choose 1 or more"),
    ({"accumulate": 4, "batch_size": 40}, "each of the 8 devices: choose 32"),
    ({"accumulate": 3, "batch_size": 16}, "accumulate=3 cannot cut .*: choose 24"),
    ({"eval_batch_size": 0}, "eval_batch_size is 0: choose 1 or more"),
    ({"dtype": "float16"}, "dtype is 'float16': choose float32 or bfloat16"),
    ({"table_dtype": "int8"}, "table_dtype is 'int8': choose float32 or bfloat16"),
  ]
  mesh = hosts.start()
  # A batch of a size that the data choose is checked when it is known.
  train_step.check(config(batch_size=0, accumulate=3), None)
  call = lambda changes: train_step.check(config(**changes), mesh)
  refused(cases, call, errors.UserError)
  profiles = [
    ((3,), r"profile_steps is \(3,\): write the first and the last"),
    ((5, 4), r"profile_steps is \(5, 4\): write the first and the last"),
    ((0, 4), "write the first and the last"),
    ((30, 40), "the run has 20 steps: choose earlier ones"),
  ]
  call = lambda steps: settings.check(config(profile_steps=steps))
  refused(profiles, call, errors.UserError)


def test_any_number_of_devices_shares_an_evaluation():
  for count in (3, 5, 6, 7, 12):
    mesh, given = types.SimpleNamespace(size=count), config(batch_size=count, eval_batch_size=8192)
    train_step.check(given, mesh)
    size = train_step.with_schedule(given, 1000, mesh).eval_batch_size
    assert size % count == 0 <= size - 8192 < count
