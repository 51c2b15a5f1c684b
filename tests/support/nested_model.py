"""A model with its layer two modules deep, a loss of two calls, and row gradients made dense."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

V, D = 20, 3
A, B = np.array([1, 2, 2, 3]), np.array([3, 3, 4, 5])


class Model(nnx.Module):
  """The layer two modules deep, in a container."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    table = embed.TableConfig(V, D, combiner="sum", name="t", optimizer=embed.sgd(0.1))
    features = {"a": embed.FeatureConfig(table), "b": embed.FeatureConfig(table)}
    self.inner = nnx.Dict(e=embed.SparseEmbed(features, rngs=rngs))
    self.out = nnx.Linear(D, 1, rngs=rngs)

  def encode(self, key, ids):
    return self.inner["e"]({key: ids})[key]

  def head(self, x):
    return self.out(x).sum()


def dense(row_grads):
  out = np.zeros((V + 1, D))
  np.add.at(out, np.asarray(row_grads.ids), np.asarray(row_grads.values))
  return out[:V]


def twice(m):
  return m.head(jnp.tanh(m.encode("a", A))) + m.head(jnp.sin(m.encode("b", B)))
