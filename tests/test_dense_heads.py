"""A model around the layer trains on any mesh as on one device, with nothing written for it."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx

import embed

V, D, L = 40, 8, 3


class Ranker(nnx.Module):
  """What models are made of: attention, einsum, norm, dropout, linear layers, a plain parameter."""

  def __init__(self, **where):
    rngs = nnx.Rngs(0)
    movie = embed.TableConfig(V, D, combiner="mean", name="movie", optimizer=embed.adagrad(0.1))
    user = embed.TableConfig(V, D, name="user")
    features = {
      "watched": embed.FeatureConfig(movie),
      "history": embed.FeatureConfig(movie, max_sequence_length=L),
      "user": embed.FeatureConfig(user),
    }
    self.embed = embed.SparseEmbed(features, embed.adam(0.01), rngs=rngs, **where)
    self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
    self.norm = nnx.LayerNorm(3 * D, rngs=rngs)
    self.dropout = nnx.Dropout(0.0, rngs=rngs)
    self.scale = nnx.Param(jnp.ones(D))
    self.mlp = nnx.Sequential(nnx.Linear(3 * D, 4, rngs=rngs), jax.nn.relu)
    self.head = nnx.Linear(4, 1, rngs=rngs)

  def __call__(self, batch):
    act = self.embed(batch)
    history = self.attention(act["history"])
    history = jnp.einsum("bld,bd->bd", history, act["watched"] * self.scale[...])
    x = jnp.concatenate([act["user"], act["watched"], history], axis=-1)
    return self.head(self.mlp(self.dropout(self.norm(x))))[:, 0]


def loss_fn(model, batch, label):
  return optax.sigmoid_binary_cross_entropy(model(batch), label).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model, optimizer, batch, label):
  loss, grads = embed.value_and_grad(loss_fn)(model, batch, label)
  optimizer.update(model, embed.clip_by_global_norm(grads, 1.0))
  return loss


@nnx.jit(graph=False)
def predict(model, batch):
  return model(batch)


def batch(step, size):
  draw = np.random.default_rng(step)
  ids = {name: draw.integers(-1, V, (size, L)) for name in ("watched", "history")}
  inputs = {name: embed.Padded(x) for name, x in ids.items()}
  return inputs | {"user": draw.integers(0, V, size)}, draw.integers(0, 2, size).astype(np.float32)


def train(**where):
  """Losses, tables, dense parameters and predictions after two steps."""
  model = Ranker(**where)
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  steps = [batch(step, 16) for step in range(2)]
  losses = [float(train_step(model, optimizer, *inputs)) for inputs in steps]
  scores = predict(model, steps[0][0])
  dense = jax.tree.leaves(nnx.state(model, nnx.Param))
  return jax.tree.map(np.asarray, (losses, model.embed.variables, dense, scores))


@pytest.mark.ci
def test_trains_as_on_one_device():
  """On a mesh that the layer is given, and on one that is set."""
  alone = train()
  meshes.assert_close(train(mesh=meshes.make_mesh("auto", (2,))), alone, scale=1e-5)
  with jax.set_mesh(meshes.make_mesh("explicit")):
    meshes.assert_close(train(), alone, scale=1e-5)


@pytest.mark.ci
def test_conditionals_on_explicit_axes():
  """The branch not taken returns arrays of the same types as the one that is."""
  features = {"user": embed.FeatureConfig(embed.TableConfig(V, D, name="user"))}
  ids = np.arange(16) % V

  def loss(layer, flag):
    look_up = lambda layer: layer({"user": ids})["user"]
    x = nnx.cond(flag, look_up, lambda layer: look_up(layer) * 2, layer)
    y = nnx.switch(jnp.int32(1), [look_up, lambda layer: -look_up(layer)], layer)
    return jnp.sum(x**2) + jnp.sum(jnp.tanh(y))

  def rows(**where):
    layer = embed.SparseEmbed(features, embed.adam(0.01), rngs=nnx.Rngs(0), **where)
    found = nnx.jit(embed.value_and_grad(loss))(layer, False)[1].rows["user"]
    dense = np.zeros((V + 1, D), np.float32)
    np.add.at(dense, np.asarray(found.ids), np.asarray(found.values))
    return dense[:V]

  np.testing.assert_allclose(rows(mesh=meshes.make_mesh("explicit")), rows(), rtol=1e-5, atol=1e-6)
