"""A DLRM that TorchRec trained on MovieLens 100k, imported: its scores, and how it goes on.

`make_dlrm.py` wrote `dlrm.npz`, with the versions in it.
"""

import functools
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import parity_problem as problem
import pytest
from flax import nnx

import embed

FILE = pathlib.Path(__file__).parent / "dlrm.npz"
TABLES = {"user": problem.USERS, "item": problem.ITEMS}


@functools.cache
def theirs():
  with np.load(FILE) as file:
    return dict(file)


class Mlp(nnx.Module):
  """Two layers with ReLU between them."""

  def __init__(self, sizes, rngs):
    self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

  def __call__(self, x):
    return self.layers[1](nnx.relu(self.layers[0](x)))


class Dlrm(nnx.Module):
  """TorchRec's: dot products of all pairs of the dense part and the tables."""

  def __init__(self, rngs):
    optimizer = embed.rowwise_adagrad(0.05, 0.0, epsilon=1e-10)
    tables = [
      embed.TableConfig(rows, problem.CLICK_DIM, name=name, combiner="sum", optimizer=optimizer)
      for name, rows in TABLES.items()
    ]
    self.embed = embed.SparseEmbed({t.name: embed.FeatureConfig(t) for t in tables}, rngs=rngs)
    self.dense = Mlp((problem.DENSE, 16, problem.CLICK_DIM), rngs)
    self.over = Mlp((problem.CLICK_DIM + 3, 16, 1), rngs)

  def __call__(self, users, items, dense):
    act, dense = self.embed({"user": users, "item": items}), nnx.relu(self.dense(dense))
    x_BxFxD = jnp.stack([dense, act["user"], act["item"]], axis=1)
    pairs_BxFxF = jnp.einsum("bid,bjd->bij", x_BxFxD, x_BxFxD)
    first, second = np.triu_indices(3, 1)
    return self.over(jnp.concatenate([dense, pairs_BxFxF[:, first, second]], axis=1))[:, 0]


def imported():
  weights = {k.removeprefix("model/"): x for k, x in theirs().items() if k[:6] == "model/"}
  model = Dlrm(nnx.Rngs(0))
  of_tables = [name for name in weights if "embedding_bags" in name]
  for i, name in enumerate(of_tables):
    slots = {"accumulators": theirs()[f"sum/{i}"].reshape(-1)}
    model.embed.load_variables({name.split(".")[-2]: {"parameters": weights[name], **slots}})
  names = {
    "dense_arch.model._mlp.0._linear": model.dense.layers[0],
    "dense_arch.model._mlp.1._linear": model.dense.layers[1],
    "over_arch.model.0._mlp.0._linear": model.over.layers[0],
    "over_arch.model.1": model.over.layers[1],
  }
  for name, layer in names.items():
    layer.kernel[...] = jnp.asarray(weights[f"{name}.weight"].T)
    layer.bias[...] = jnp.asarray(weights[f"{name}.bias"])
  return model


@pytest.mark.ci
def test_its_scores():
  users, items, dense, _ = next(problem.clicks(0, 1))
  scores = nnx.jit(lambda model, *batch: model(*batch))(imported(), users, items, dense)
  np.testing.assert_allclose(scores, theirs()["scores"], rtol=1e-5, atol=1e-5)


@pytest.mark.weekly
def test_it_goes_on():
  """Each of 100 losses, in the same order of clicks; far closer than another order would be."""
  model = imported()
  optimizer = embed.Optimizer(model, optax.sgd(0.05))

  def loss_fn(model, users, items, dense, labels):
    return optax.sigmoid_binary_cross_entropy(model(users, items, dense), labels).mean()

  @nnx.jit
  def step(model, optimizer, *batch):
    loss, grads = embed.value_and_grad(loss_fn)(model, *batch)
    optimizer.update(model, grads)
    return loss

  losses = np.array([step(model, optimizer, *batch) for batch in problem.clicks(1, 100)])
  expected = [theirs()[f"losses/{seed}"] for seed in (1, 2, 3)]
  ends = [x[-20:].mean() for x in expected]
  noise = np.ptp(ends)
  assert abs(losses[-20:].mean() - ends[0]) < noise / 100
  np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
  assert ends[0] < expected[0][:20].mean()  # it learns
