"""How the tests call the library: only what its users can see, compared as plain NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed


class Model(nnx.Module):
  """One embedding layer and one dense parameter, which stays 1."""

  def __init__(self, features, optimizer=None, **where):
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


def key_of(grads_rows, table):
  """Row gradients are keyed by "<module path>/<table>"."""
  (key,) = [key for key in grads_rows if key.split("/")[-1] == table]
  return key


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


def dropped(model):
  """Ids that a call inside jit dropped, as `report` counts them."""
  return sum(int(np.sum(leaf)) for leaf in jax.tree.leaves(nnx.as_pure(model.embed.report)))


def without_ids(batch=8):
  """Inputs of every kind that hold no id: some have no bags, some no columns, some no values.

  Returns:
    `{name: (features, weights or None, arguments of FeatureConfig)}`.
  """
  ids = lambda *shape: np.zeros(shape, np.int32)
  sparse = lambda *shape: embed.Sparse(ids(0, len(shape)), ids(0), shape)
  sequence = {"max_sequence_length": 4}
  inputs = {
    "dense": (ids(0), {}),
    "dense, no columns": (ids(batch, 0), {}),
    "padded, no bags": (embed.Padded(ids(0, 2)), {}),
    "padded, no columns": (embed.Padded(ids(batch, 0)), {}),
    "padded, neither": (embed.Padded(ids(0, 0)), {}),
    "padded, rank 3": (embed.Padded(ids(batch, 0, 2)), {}),
    "ragged": (embed.Ragged(ids(0), ids(batch + 1)), {}),
    "ragged, no bags": (embed.Ragged(ids(0), ids(1)), {}),
    "ragged, no bags but a buffer": (embed.Ragged(ids(3), ids(1)), {}),
    "ragged, valency": (embed.Ragged(ids(0), ids(batch + 1), max_valency=3), {}),
    "ragged, valency, no bags": (embed.Ragged(ids(0), ids(1), max_valency=3), {}),
    "sparse": (sparse(batch, 3), {}),
    "sparse, no bags": (sparse(0, 3), {}),
    "sparse, no columns": (sparse(batch, 0), {}),
    "sparse, rank 3": (sparse(batch, 0, 3), {}),
    "sequence, no columns": (embed.Padded(ids(batch, 0)), sequence),
    "sequence, no bags": (embed.Padded(ids(0, 3)), sequence),
    "sequence, ragged": (embed.Ragged(ids(0), ids(batch + 1)), sequence),
    "sequence, sparse, no bags": (sparse(0, 0), sequence),
  }

  def weights(x, settings):
    if settings or isinstance(x, np.ndarray):
      return None
    return dataclasses.replace(x, values=x.values.astype(np.float32))

  plain = {name: (x, None, settings) for name, (x, settings) in inputs.items()}
  weighted = {
    f"{name}, weighted": (x, weights(x, settings), settings)
    for name, (x, settings) in inputs.items()
    if weights(x, settings) is not None
  }
  return plain | weighted
