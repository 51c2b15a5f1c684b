"""Pipelined steps: activations one update behind, every update applied once, nothing copied."""

import conformance
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from flax import nnx

import embed

CASES = {case["id"]: case for case in conformance.load("pipeline")["cases"]}
V, D = 12, 3


class Model(nnx.Module):
  """Rows beside a linear layer, and scores of candidates."""

  def __init__(self, optimizer, **where):
    rngs = nnx.Rngs(0)
    table = embed.TableConfig(V, D, combiner="sum", name="t")
    features = {"bag": embed.FeatureConfig(table), "one": embed.FeatureConfig(table)}
    self.embed = embed.SparseEmbed(features, optimizer, rngs=rngs, **where)
    self.out = nnx.Linear(D, D, rngs=rngs)

  def __call__(self, batch):
    bag = self.embed({"bag": embed.Padded(batch["bag"])})["bag"]
    query = self.out(bag) + self.embed({"one": batch["one"]})["one"]
    return self.embed.attend(query, "t", candidates=batch["one"][:4])


def of_case(case):
  """The layer of a recorded case."""
  make = getattr(embed, conformance.OPTIMIZERS[case["optimizer"]])
  return layers.one_table(make(case["lr"], **case["config"]), rows=case["table"])


def loss_fn(model, batch):
  return jnp.mean((model(batch) - 1.0) ** 2)


def batches(number, seed=0):
  draw = np.random.default_rng(seed)
  ids = lambda *shape: draw.integers(-1, V, shape).astype(np.int32)
  return [{"bag": jnp.asarray(ids(8, 4)), "one": jnp.asarray(ids(8))} for _ in range(number)]


@pytest.mark.programs(30, "an eager look-ahead compiles each operation")
def test_padding_may_be_any_number_below_0():
  """An eager lookup of a NumPy batch and a compiled step see the same rows."""
  layer = layers.one_table()
  bags = embed.Padded(np.array([[3, -7], [np.iinfo(np.int16).min, -1]], np.int16))
  loss_fn = lambda layer, bags: jnp.sum(layer(bags) ** 2)
  ahead = embed.look_ahead(loss_fn)(layer, bags)
  step = nnx.jit(lambda layer, ahead, bags: embed.value_and_grad(loss_fn, ahead=ahead)(layer, bags))
  loss, _ = step(layer, ahead, embed.Padded(bags.values.astype(np.int32)))
  np.testing.assert_allclose(loss, (layers.ROWS[3] ** 2).sum(), rtol=1e-6)


# --- the recorded cases ---------------------------------------------------------------------------


def test_recorded_cases():
  case = CASES["sgd/pipelined=1"]
  model = of_case(case)
  optimizer = embed.Optimizer(model, optax.sgd(0.0))

  def loss(model, ids, target):
    act = model(embed.Padded(ids))
    return 0.5 * jnp.sum((act - target) ** 2), act

  @nnx.jit
  def step(model, optimizer, ahead, now, then):
    (_, act), grads = embed.value_and_grad(loss, has_aux=True, ahead=ahead)(model, *now)
    ahead = embed.look_ahead(loss, has_aux=True)(model, *then)
    optimizer.update(model, grads)
    return act, ahead

  data = list(zip(map(np.array, case["ids"]), map(np.array, case["targets"]), strict=True))
  ahead = nnx.jit(embed.look_ahead(loss, has_aux=True))(model, *data[0])
  for i, now in enumerate(data):
    act, ahead = step(model, optimizer, ahead, now, data[(i + 1) % len(data)])
    np.testing.assert_allclose(act, case["activations"][i], **case["tol"])
  for key, value in case["final"].items():
    np.testing.assert_allclose(model.variables["t"][key], value, **case["tol"], err_msg=key)


@nnx.jit
def look_up(model, bags):
  return model.lookup(bags)


@nnx.jit
def look_up_and_apply(model, grads, residual, bags):
  ahead = model.lookup(bags)
  model.apply_gradients(grads, residual)
  return ahead


def test_recorded_cases_by_hand():
  """The mid level: a look-up before the update of the step before it."""
  case = CASES["adam/pipelined=1"]
  model = of_case(case)
  bags = [embed.Padded(np.array(ids)) for ids in case["ids"]]
  act, residual = look_up(model, bags[0])
  for i, target in enumerate(case["targets"]):
    np.testing.assert_allclose(act, case["activations"][i], **case["tol"])
    grads = np.asarray(act) - target
    act, residual = look_up_and_apply(model, grads, residual, bags[(i + 1) % len(bags)])
  np.testing.assert_allclose(
    model.variables["t"]["parameters"], case["final"]["parameters"], **case["tol"]
  )


# --- what it means --------------------------------------------------------------------------------


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_lookups_of_another_batch_give_nan_and_no_gradient():
  model = Model(embed.sgd(0.1))
  one, other = batches(2)
  ahead = embed.look_ahead(loss_fn)(model, one)
  loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, other)
  assert np.isnan(loss)
  assert float(embed.global_norm(grads)) == 0.0


# --- what it costs --------------------------------------------------------------------------------
