"""Some fifty ways to write a training step, for a model with a table of each of four optimizers.

The gradients of most do not depend on what was looked up, so that nothing but the library says that
a table is read before it is updated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import embed

OPTIMIZERS = {
  "sgd": embed.sgd(0.1),
  "rowwise_adagrad": embed.rowwise_adagrad(0.1),
  "adagrad": embed.adagrad(0.1),
  "adam": embed.adam(0.1),
}


class Model(nnx.Module):
  """A table for each optimizer, of different sizes, looked up as bags and as single ids."""

  def __init__(
    self,
    rows: int,
    dim: int,
    mesh: Any = None,
    sharding: str = "mod",
    dtype: Any = jnp.float32,
  ):
    self.dim = dim
    shared = {"combiner": "sum", "initializer": jax.nn.initializers.zeros, "dtype": dtype}
    tables = [
      embed.TableConfig(rows + 8 * i, dim, optimizer=optimizer, name=name, **shared)
      for i, (name, optimizer) in enumerate(OPTIMIZERS.items())
    ]
    features = {
      kind: {table.name: embed.FeatureConfig(table) for table in tables} for kind in ("bag", "one")
    }
    self.embed = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh, sharding=sharding)
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


# --- ways to write a step -------------------------------------------------------------------------


def total(acts):
  return sum(jnp.sum(x) for x in acts)


def plain(m, batch):
  return total(m(batch))


def pairs(m, batch):
  a, b, c, d = m(batch)
  return jnp.sum(a * b) + jnp.sum(c * d)


def chain(m, batch):
  a, b, c, d = m(batch)
  return jnp.sum(a * b) + jnp.sum(b * c) + jnp.sum(c * d)


def all_but_one_stopped(m, batch):
  first, *others = m(batch)
  return jnp.sum(first * jax.lax.stop_gradient(sum(others)))


def one_stopped(m, batch):
  first, *others = m(batch)
  return jnp.sum(jax.lax.stop_gradient(first)) + total(others)


def policy_gradient(m, batch):
  acts = sum(m(batch))
  return -jnp.mean(jnp.arange(len(acts), dtype=jnp.float32)[:, None] * acts)


def attend(m, batch):
  ids, query = batch["one"]["sgd"], jnp.ones((2, m.dim))
  return sum(jnp.sum(m.embed.attend(query, name, ids)) for name in OPTIMIZERS)


# `f(model, batch)`, each trained by the usual step.
LOSSES = {
  "a_sum": plain,
  "a_square": lambda m, b: total([x**2 for x in m(b)]),
  "a_mean_of_a_linear_head": lambda m, b: jnp.mean(m.head(sum(m(b)))),
  "a_linear_head_without_its_parameters": lambda m, b: jnp.mean(
    jax.lax.stop_gradient(m.head.kernel[...]).T * sum(m(b))
  ),
  "a_weighted_sum": lambda m, b: total([x * jnp.arange(m.dim, dtype=jnp.float32) for x in m(b)]),
  "a_policy_gradient": policy_gradient,
  "a_constant": lambda m, b: (m(b), jnp.float32(3))[1],
  "a_loss_that_leaves_the_activations_out": lambda m, b: (m(b), jnp.sum(m.head.kernel[...] ** 2))[
    1
  ],
  "stop_gradient_of_one_table": one_stopped,
  "stop_gradient_of_all_but_one": all_but_one_stopped,
  "a_linear_and_a_square_lookup": lambda m, b: total(m(b)) + total([x**2 for x in m.one(b)]),
  "two_linear_lookups": lambda m, b: total(m(b)) + total(m.one(b)),
  "a_dot_product_of_tables": pairs,
  "a_product_in_a_chain": chain,
  "the_largest_of_each_row": lambda m, b: sum(jnp.sum(jnp.max(x, axis=1)) for x in m(b)),
  "a_hinge": lambda m, b: jnp.sum(jnp.maximum(0, 1 - sum(m(b)))),
  "half_precision": lambda m, b: total([x.astype(jnp.bfloat16) for x in m(b)]).astype(jnp.float32),
  "a_lookup_in_a_branch": lambda m, b: nnx.cond(
    jnp.sum(m.head.bias[...]) > 0, lambda m: total(m(b)), lambda m: 0.0, m
  ),
  "remat": lambda m, b: nnx.remat(plain)(m, b),
  "remat_of_a_dot_product": lambda m, b: nnx.remat(pairs)(m, b),
  "nested_jit": lambda m, b: nnx.jit(plain)(m, b),
  "candidates_of_attend": attend,
}


def train(f, model, optimizer, batch, change=lambda grads: grads, **options):
  value, grads = embed.value_and_grad(f, **options)(model, batch)
  optimizer.update(model, change(grads))
  return value


def named(name, f, **options):
  """The step `(model, optimizer, batch)` of a loss."""
  step: Any = functools.partial(train, f, **options)
  step.__name__ = name
  return step


WAYS: dict[str, Callable[..., Any]] = {name: named(name, f) for name, f in LOSSES.items()}
for name, f, options in (
  ("activations_as_aux", lambda m, b: (total(acts := m(b)), acts), {"has_aux": True}),
  ("another_lookup_as_aux", lambda m, b: (plain(m, b), m.one(b)), {"has_aux": True}),
  ("clip", plain, {"change": lambda grads: embed.clip_by_global_norm(grads, 1.0)}),
  ("map", plain, {"change": lambda grads: grads.map(lambda x: 2 * x)}),
  ("map_to_constants", plain, {"change": lambda grads: grads.map(jnp.ones_like)}),
):
  WAYS[name] = named(name, f, **options)


def way(f):
  """Registers a step `f(model, optimizer, batch) -> anything`."""
  WAYS[f.__name__] = f
  return f


@way
def a_prediction_before_the_step(model, optimizer, batch):
  before = model.one(batch)
  return before, train(plain, model, optimizer, batch)


@way
def a_prediction_before_the_update(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  between = model.one(batch)
  optimizer.update(model, grads)
  return value, between


@way
def a_prediction_after_the_update(model, optimizer, batch):
  return train(plain, model, optimizer, batch), model.one(batch)


@way
def a_prediction_by_nested_jit(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  between = nnx.jit(lambda m: m.one(batch))(model)
  optimizer.update(model, grads)
  return value, between


@way
def two_gradients_then_two_updates(model, optimizer, batch):
  a, first = embed.value_and_grad(plain)(model, batch)
  b, second = embed.value_and_grad(lambda m, b: total(m.one(b)))(model, batch)
  optimizer.update(model, first)
  optimizer.update(model, second)
  return a, b


@way
def a_step_after_a_step(model, optimizer, batch):
  return train(plain, model, optimizer, batch), train(plain, model, optimizer, batch)


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


def low_level(make):
  """A step by `lookup` and `apply_gradients`."""

  def step(model, optimizer, batch):
    acts, residual = model.embed.lookup(batch)
    model.embed.apply_gradients(jax.tree.map(make, acts), residual, step=0)
    return acts

  return step


WAYS["apply_gradients_of_ones"] = low_level(jnp.ones_like)
WAYS["apply_gradients_of_zeros"] = low_level(jnp.zeros_like)
WAYS["apply_gradients_of_activations"] = low_level(lambda x: x)
WAYS["apply_gradients_of_none"] = low_level(lambda x: None)


@way
def apply_gradients_of_the_first_of_two_lookups(model, optimizer, batch):
  acts, residual = model.embed.lookup(batch)
  more, _ = model.embed.lookup(batch)
  model.embed.apply_gradients(jax.tree.map(jnp.ones_like, acts), residual)
  return acts, more


@way
def apply_row_gradients_after_a_lookup(model, optimizer, batch):
  acts = model(batch)
  ids = batch["one"]["sgd"]
  rows = embed.RowGrads(ids, jnp.ones((ids.size, model.dim)))
  model.embed.apply_row_gradients(dict.fromkeys(OPTIMIZERS, rows), step=0)
  return acts


@way
def row_gradients_by_hand(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  rows = {key.split("/")[-1]: rows for key, rows in grads.rows.items()}
  model.embed.apply_row_gradients(rows, step=0)
  return value


@way
def accumulate(model, optimizer, batch):
  f = embed.value_and_grad(plain)
  (a, first), (b, second) = f(model, batch), f(model, batch)
  optimizer.update(model, embed.accumulate([first, second]))
  return a, b


@way
def a_norm_beside_the_update(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  optimizer.update(model, grads)
  return value, embed.global_norm(grads)


@way
def look_ahead(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  ahead = embed.look_ahead(plain)(model, batch)
  optimizer.update(model, grads)
  return value, ahead


@way
def switch_around_the_step(model, optimizer, batch):
  step = lambda model, optimizer: train(plain, model, optimizer, batch)
  return nnx.switch(jnp.int32(1), [lambda model, optimizer: 0.0, step], model, optimizer)


@way
def cond_around_the_update(model, optimizer, batch):
  value, grads = embed.value_and_grad(plain)(model, batch)
  update = lambda model, optimizer: optimizer.update(model, grads)
  nnx.cond(jnp.isfinite(value), update, lambda model, optimizer: None, model, optimizer)
  return value


@way
def fori_loop_of_steps(model, optimizer, batch):
  def body(_, carry):
    model, optimizer, value = carry
    return model, optimizer, value + train(plain, model, optimizer, batch)

  return nnx.fori_loop(0, 3, body, (model, optimizer, jnp.float32(0)))[-1]


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
