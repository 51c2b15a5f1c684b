"""`embed.Optimizer`: dense parameters are optax's, tables are not, and what it refuses."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nested_model import D, Model, V, twice

import embed


@pytest.mark.programs(20, "makes the first model, whose programs the others share")
def test_the_dense_optimizer_never_sees_a_table():
  """No state of optax is of a table's size, and its update moves none."""
  model = Model()
  optimizer = embed.Optimizer(model, optax.adam(1.0))
  shapes = {x.shape for x in jax.tree.leaves(nnx.state(optimizer.dense))}
  assert {(V, D), (D, 1)} & shapes == {(D, 1)}
  before = np.asarray(model.inner["e"].tables["t"])

  @nnx.jit
  def step(model, optimizer):
    _, grads = embed.value_and_grad(twice)(model)
    optimizer.dense.update(model, grads.dense)

  step(model, optimizer)
  np.testing.assert_array_equal(model.inner["e"].tables["t"], before)


def test_an_optimizer_that_holds_updates_back_or_is_of_tables_is_refused():
  multi_steps = optax.MultiSteps(optax.sgd(0.1), 2)
  held = [
    (multi_steps, r"embed\.accumulate"),
    (optax.chain(optax.clip(1.0), multi_steps.gradient_transformation()), r"embed\.accumulate"),
    (optax.apply_if_finite(optax.sgd(0.1), 3), "on the host whether"),
    (optax.chain(optax.apply_every(4), optax.sgd(0.1)), r"embed\.accumulate"),
  ]
  make = lambda tx: nnx.eval_shape(lambda: embed.Optimizer(Model(), tx))
  cases.refused(held, make)
  cases.refused([(embed.adam(), r"got embed\.adam\. Give that to embed\.Table")], make, TypeError)


def train(model, optimizer):
  loss, grads = embed.value_and_grad(twice)(model)
  optimizer.update(model, grads)
  return loss


def make():
  model = Model()
  return model, embed.Optimizer(model, optax.sgd(0.1, momentum=0.9))


def test_a_bound_step_is_the_step_and_sees_what_is_loaded():
  (model, optimizer), (other, others) = make(), make()
  step, jitted = embed.jit_step(train, model, optimizer), nnx.jit(train)
  start = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
  losses = [float(step()) for _ in range(3)]
  assert losses == [float(jitted(other, others)) for _ in range(3)]
  states = [nnx.state(nodes) for nodes in ((model, optimizer), (other, others))]
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert losses[1] != losses[0]
  nnx.update((model, optimizer), start)
  assert float(step()) == losses[0]


@pytest.mark.ci
def test_an_average_of_the_parameters_may_begin_as_the_parameters():
  """Both hold the same arrays then, and XLA takes a donated array once; also after a reset."""
  model, optimizer = make()
  average = nnx.clone(model)

  def train_and_average(model, optimizer, average):
    loss = train(model, optimizer)
    mix = lambda old, new: 0.5 * old + 0.5 * new
    nnx.update(average, jax.tree.map(mix, *(nnx.state(m, nnx.Param) for m in (average, model))))
    return loss

  step = embed.jit_step(train_and_average, model, optimizer, average)
  kernel = lambda m: np.asarray(jax.tree.leaves(nnx.state(m, nnx.Param))[0])
  before = kernel(model)
  step()
  np.testing.assert_allclose(kernel(average), (before + kernel(model)) / 2, rtol=1e-6)
  nnx.update(average, nnx.state(model, nnx.Param))
  step()


class TwoLayers(nnx.Module):
  """The first layer can be trained; the second one only if `second` is an optimizer."""

  def __init__(self, second=None):
    ones = jax.nn.initializers.ones
    make = lambda name, optimizer: embed.SparseEmbed(
      embed.FeatureConfig(embed.TableConfig(4, 2, ones, combiner="sum", name=name)),
      optimizer, rngs=nnx.Rngs(0),
    )  # fmt: skip
    self.a, self.b = make("a", embed.sgd(1.0)), make("b", second)
    self.scale = nnx.Param(jnp.ones(()))

  def __call__(self, ids):
    return self.scale[...] * (self.a(ids).sum() + self.b(ids).sum())


def other_rows(grads):
  model = TwoLayers(embed.sgd(2.0))
  return nnx.jit(embed.value_and_grad(lambda m: m(np.array([1, 2]))))(model)[1]


@pytest.mark.parametrize(
  ("second", "change", "says"),
  [
    (None, lambda grads: grads, "'b' has no optimizer"),
    (embed.sgd(1.0), other_rows, "'b' are of another model"),
    (embed.sgd(1.0), lambda grads: embed.Grads(nnx.State({}), grads.rows), "scale"),
  ],
  ids=["no optimizer", "other rows", "no dense"],
)
def test_a_step_that_cannot_be_made_whole_moves_nothing(second, change, says):
  model = TwoLayers(second)
  optimizer = embed.Optimizer(model, optax.adam(1.0))
  grads = nnx.jit(embed.value_and_grad(lambda m: m(np.array([1, 2]))))(model)[1]
  state = lambda: jax.tree.map(np.asarray, nnx.state((model, optimizer)))
  before = state()
  with pytest.raises(ValueError, match=says):
    optimizer.update(model, change(grads))
  jax.tree.map(np.testing.assert_array_equal, state(), before)
