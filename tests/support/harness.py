"""How the tests call the library: only what its users can see, compared as plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed


class Model(nnx.Module):
  """One embedding layer and one dense parameter, which stays 1."""

  def __init__(self, features=None, optimizer=None, **where):
    self.embed = embed.SparseEmbed(features, optimizer, rngs=nnx.Rngs(0), **where)
    self.scale = nnx.Param(jnp.ones(()))


def loss_fn(model, features, weights, cotangents):
  """sum(activations * cotangents): the gradient of an activation is its cotangent."""
  activations = model.embed(features, weights)
  products = jax.tree.map(lambda a, c: jnp.sum(a * c), activations, cotangents)
  loss = jax.tree.reduce(jnp.add, products, jnp.zeros(()))
  return model.scale[...] * loss, activations


value_and_grad = embed.value_and_grad(loss_fn, has_aux=True)


def train_step(model, optimizer, features, weights, cotangents):
  (_, activations), grads = value_and_grad(model, features, weights, cotangents)
  optimizer.update(model, grads)
  return activations, grads.rows


def rows(row_grads, vocabulary_size):
  """{row: gradient} of the used entries; a row listed twice has not been summed."""
  ids, values = np.asarray(row_grads.ids), np.asarray(row_grads.values)
  assert ids.ndim == 1
  assert values.ndim == 2
  assert len(ids) == len(values)
  assert np.all((ids >= 0) & (ids <= vocabulary_size)), ids
  used = ids < vocabulary_size
  assert len(set(ids[used].tolist())) == used.sum(), f"a row is listed twice: {ids}"
  return dict(zip(ids[used].tolist(), values[used], strict=True))


def assert_rows(actual, wanted, *, rtol, atol):
  """The touched rows are the same, and so are their gradients."""
  assert sorted(actual) == sorted(wanted), "touched rows differ"
  for row in wanted:
    np.testing.assert_allclose(actual[row], wanted[row], rtol=rtol, atol=atol, err_msg=f"row {row}")


def variables(model, table):
  """{"parameters": array, slot: array} of one table."""
  return {key: np.asarray(value) for key, value in model.embed.variables[table].items()}
