"""A layer of one table "t", and compiled functions that the tests share with their programs."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import embed

V, D = 11, 3
ROWS = np.arange(V * D, dtype=np.float32).reshape(V, D) / 4


def one_table(optimizer=None, rows=ROWS, combiner="sum", where=None, feature=None, **table):
  """A layer of the table "t", which starts with `rows` `[V, D]` and is stepped by SGD at rate 1."""
  size, dim = rows.shape
  config = embed.TableConfig(
    size, dim, lambda *_: jnp.asarray(rows), optimizer or embed.sgd(1.0), combiner, "t", **table
  )
  features = embed.FeatureConfig(config, **(feature or {}))
  return embed.SparseEmbed(features, rngs=nnx.Rngs(0), **(where or {}))


@nnx.jit
def predict(layer, inputs, weights=None):
  return layer(inputs, weights)


@nnx.jit
def step(layer, inputs, grads, number=0):
  """One step at the mid level: `grads` are the gradients of the activations of `inputs`."""
  _, residual = layer.lookup(inputs)
  layer.apply_gradients(grads, residual, step=number)


def update(layer, rows):
  """One step from the rows of `embed.Grads`; the layer is the whole model."""
  embed.Optimizer(layer, optax.identity()).update(layer, embed.Grads(nnx.State({}), rows))
