"""Ways to write a training step, for a model with a table of each of two optimizers.

The gradients of most do not depend on what was looked up, so that nothing but the library says that
a table is read before it is updated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import embed

OPTIMIZERS = {"sgd": embed.sgd(0.1), "adam": embed.adam(0.1)}  # plain sums, and steps of rows


class Model(nnx.Module):
  """A table for each optimizer, of different sizes, looked up as bags and as single ids."""

  def __init__(self, rows: int, dim: int, mesh: Any = None):
    self.dim = dim
    zeros = jax.nn.initializers.zeros
    tables = [
      embed.TableConfig(rows + 8 * i, dim, zeros, optimizer, "sum", name)
      for i, (name, optimizer) in enumerate(OPTIMIZERS.items())
    ]
    features = {
      kind: {table.name: embed.FeatureConfig(table) for table in tables} for kind in ("bag", "one")
    }
    self.embed = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh)
    self.head = nnx.Linear(dim, 1, rngs=nnx.Rngs(0))

  def __call__(self, batch):
    return list(self.embed({"bag": batch["bag"]})["bag"].values())

  def one(self, batch):
    return list(self.embed({"one": batch["one"]})["one"].values())


def batch_of(ids):
  """The batch of ids `[B, L]`: bags of them, and the first of each bag."""
  return {
    "bag": {name: embed.Padded(ids) for name in OPTIMIZERS},
    "one": dict.fromkeys(OPTIMIZERS, ids[:, 0]),
  }


def total(acts):
  return sum(jnp.sum(x) for x in acts)


def plain(m, batch):
  return total(m(batch))


def in_a_branch(m, batch):
  return nnx.cond(
    jnp.sum(m.head.bias[...]) > 0, lambda m: plain(m, batch), lambda m: 2 * plain(m, batch), m
  )


def rematerialized(m, batch):
  return nnx.remat(plain)(m, batch)


def attended(m, batch):
  ids, query = batch["one"]["sgd"], jnp.ones((2, m.dim))
  return sum(jnp.sum(m.embed.attend(query, name, ids)) for name in OPTIMIZERS)


def train(f, model, optimizer, batch, **options):
  value, grads = embed.value_and_grad(f, **options)(model, batch)
  optimizer.update(model, grads)
  return value


WAYS: dict[str, Callable[..., Any]] = {}


def way(f):
  """Registers a step `f(model, optimizer, batch) -> anything`."""
  WAYS[f.__name__] = f
  return f


@way
def a_sum(model, optimizer, batch):
  return train(plain, model, optimizer, batch)


@way
def a_lookup_in_a_branch(model, optimizer, batch):
  return train(in_a_branch, model, optimizer, batch)


@way
def remat(model, optimizer, batch):
  return train(rematerialized, model, optimizer, batch)


@way
def candidates_of_attend(model, optimizer, batch):
  return train(attended, model, optimizer, batch)


@way
def a_prediction_before_the_step(model, optimizer, batch):
  before = model.one(batch)
  return before, train(plain, model, optimizer, batch)


@way
def another_lookup_as_aux(model, optimizer, batch):
  loss_fn = lambda m, b: (plain(m, b), m.one(b))
  return train(loss_fn, model, optimizer, batch, has_aux=True)


class Around(nnx.Module):
  """Another model that shares the layer."""

  def __init__(self, layer):
    self.embed = layer


@way
def two_models_that_share_the_layer(model, optimizer, batch):
  other = Around(model.embed)
  second = embed.Optimizer(other, optax.sgd(0.1))
  a, of_model = embed.value_and_grad(plain)(model, batch)
  f = lambda m, b: total(m.embed({"one": b["one"]})["one"].values())
  b, of_other = embed.value_and_grad(f)(other, batch)
  optimizer.update(model, of_model)
  second.update(other, of_other)
  return a, b


@way
def apply_gradients_of_activations(model, optimizer, batch):
  acts, residual = model.embed.lookup(batch)
  model.embed.apply_gradients(acts, residual, step=0)
  return acts


@way
def accumulate(model, optimizer, batch):
  f = embed.value_and_grad(plain)
  (a, first), (b, second) = f(model, batch), f(model, batch)
  optimizer.update(model, embed.accumulate([first, second]))
  return a, b


@way
def cond_around_the_update(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  update = lambda model, optimizer: optimizer.update(model, grads)
  nnx.cond(jnp.isfinite(value), update, lambda model, optimizer: None, model, optimizer)
  return value


@way
def scan_of_steps(model, optimizer, batch):
  graphdef, state = nnx.split((model, optimizer))

  def body(state, _):
    model, optimizer = nnx.merge(graphdef, state)
    value = train(plain, model, optimizer, batch)
    return nnx.state((model, optimizer)), value

  state, values = jax.lax.scan(body, state, None, 3)
  nnx.update((model, optimizer), state)
  return values
