"""The models: layers by hand, shapes, gradients that arrive, and learning what they can."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed
from recipes.dlrm import model as model_lib
from recipes.training import layers

DLRM = {"bottom": (8,), "top": (16,), "concat_tables": True}
DCNV2 = {"cross_layers": 2, "rank": 0, "deep": (16,), "structure": "parallel"}
MODELS = [
  (model_lib.DLRM, DLRM, 0),
  (model_lib.DLRM, DLRM | {"concat_tables": False, "bottom": ()}, 2),
  (model_lib.DCNV2, DCNV2 | {"structure": "stacked", "rank": 3, "bottom": (8, 4)}, 2),
]


def build(kind, settings, num_dense=2):
  features = {
    name: embed.FeatureConfig(embed.TableConfig(size, 5, name=name))
    for name, size in {"user": 9, "tags": 7}.items()
  }
  settings = settings | ({"dim": 4} if kind is model_lib.DLRM else {})
  rngs = nnx.Rngs(0)
  tables = embed.SparseEmbed(features, embed.adagrad(0.1), rngs=rngs)
  inputs = layers.Inputs(tables, num_dense, linear=1, rngs=rngs)
  return kind(tables, inputs, **settings, dropout=0.0, rngs=rngs)


def batch(rows=6, num_dense=2):
  draw = np.random.default_rng(0)
  return {
    "dense": draw.normal(size=(rows, num_dense)).astype(np.float32),
    "label": (np.arange(rows) % 2).astype(np.float32),
    "features": {
      "user": draw.integers(0, 9, rows).astype(np.int32),
      "tags": embed.Padded(draw.integers(-1, 7, (rows, 3)).astype(np.int32)),
    },
  }


def loss_fn(model, batch):
  return optax.sigmoid_binary_cross_entropy(model(batch), batch["label"]).mean()


@nnx.jit
def call(model, x):
  return model(x)


@pytest.mark.ci
def test_a_linear_model_is_the_last_column_of_everything():
  config = lambda name: embed.FeatureConfig(embed.TableConfig(4, 2, name=name))
  tables = embed.SparseEmbed({n: config(n) for n in ("movie", "city")}, rngs=nnx.Rngs(0))
  made = layers.Inputs(tables, 2, linear=1, rngs=nnx.Rngs(0))
  assert made.widths == {"movie": 1, "city": 1}
  made.wide.kernel[...] = jnp.array([[100.0], [1000.0]])
  rows = {"movie": np.float32([[1, 2]]), "city": np.float32([[5, 6]])}
  vectors, numbers, linear = nnx.jit(lambda made: made(rows, np.float32([[7, 11]])))(made)
  assert jax.tree.map(lambda x: x.tolist(), vectors) == {"movie": [[1]], "city": [[5]]}
  assert numbers.tolist() == [[7, 11]]
  assert linear.tolist() == [[2 + 6 + 700 + 11_000]]


@pytest.mark.programs(25, "layers are initialized")
def test_cross_by_hand():
  cross = layers.Cross(2, 2, rngs=nnx.Rngs(0))
  for layer in cross.up:
    layer.kernel[...] = jnp.array([[1.0, 0.0], [1.0, 1.0]])  # x W = [x0 + x1, x1]
    layer.bias[...] = jnp.array([0.0, 1.0])
  # x1 = [1, 2] * [3, 3] + [1, 2] = [4, 8]; x2 = [1, 2] * [12, 9] + [4, 8] = [16, 26]
  x = np.array([[1.0, 2.0]], np.float32)
  np.testing.assert_array_equal(call(cross, x), [[16.0, 26.0]])
  low = layers.Cross(2, 1, rank=1, rngs=nnx.Rngs(0))
  low.down[0].kernel[...] = jnp.array([[1.0], [1.0]])
  low.up[0].kernel[...] = jnp.array([[2.0, 3.0]])  # W = U V, x W = [6, 9]
  np.testing.assert_array_equal(call(low, x), [[7.0, 20.0]])


def test_dot_interaction_and_its_gradient():
  vectors = np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]], np.float32)
  np.testing.assert_array_equal(jax.jit(layers.dot_interaction)(vectors), [[11.0, 17.0, 39.0]])
  draw = np.random.default_rng(0)
  vectors, grads = (draw.normal(size=s).astype(np.float32) for s in [(2, 3, 4, 5), (2, 3, 6)])

  def plain(vectors):
    rows, columns = jnp.tril_indices(4, k=-1)
    return jnp.sum(vectors[..., rows, :] * vectors[..., columns, :], axis=-1)

  (expected,), (gradient,) = (
    jax.jit(lambda x, g, f=f: jax.vjp(f, x)[1](g))(vectors, grads)
    for f in (plain, layers.dot_interaction)
  )
  np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "settings", "num_dense"), MODELS)
def test_gradients_reach_everything_and_six_rows_are_learned_by_heart(kind, settings, num_dense):
  model, inputs = build(kind, settings, num_dense), batch(num_dense=num_dense)
  optimizer = embed.Optimizer(model, optax.adam(0.02))

  @nnx.jit(donate_argnames=("model", "optimizer"))
  def step(model, optimizer, inputs):
    loss, grads = embed.value_and_grad(loss_fn)(model, inputs)
    optimizer.update(model, grads)
    return loss, grads

  first, grads = step(model, optimizer, inputs)
  for path, leaf in jax.tree.leaves_with_path(grads.dense):
    # A ReLU may be dead for all of six rows, a whole layer may not.
    assert np.any(leaf != 0), jax.tree_util.keystr(path)
  assert set(grads.rows) == {"embed/user", "embed/tags"}
  for rows in grads.rows.values():
    assert np.any(rows.values != 0)
  for _ in range(60):
    last, _ = step(model, optimizer, inputs)
  assert last < first / 2
