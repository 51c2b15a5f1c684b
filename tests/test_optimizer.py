"""`embed.Optimizer`: dense parameters are optax's, tables are not, and what it refuses."""

import harness
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from nested_model import D, Model, V, twice
from recorded_calls import FC

import embed


def test_the_dense_optimizer_never_sees_a_table():
  """No state of optax is of a table's size, and its update moves none."""
  model = Model()
  optimizer = embed.Optimizer(model, optax.adam(1.0))
  shapes = [x.shape for x in jax.tree.leaves(nnx.state(optimizer.dense))]
  assert (V, D) not in shapes
  assert (D, 1) in shapes
  before = np.asarray(model.inner["e"].tables["t"])
  _, grads = embed.value_and_grad(twice)(model)
  optimizer.dense.update(model, grads.dense)
  np.testing.assert_array_equal(model.inner["e"].tables["t"], before)
  assert not any(isinstance(v, nnx.Param) for v in model.inner["e"].arrays["t"].values())


@pytest.mark.parametrize(
  ("tx", "instead"),
  [
    (optax.MultiSteps(optax.sgd(0.1), 2), r"embed\.accumulate"),
    (
      optax.chain(optax.clip(1.0), optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
      r"embed\.accumulate",
    ),
    (optax.apply_if_finite(optax.sgd(0.1), 3), "isfinite"),
    (optax.chain(optax.apply_every(4), optax.sgd(0.1)), r"embed\.accumulate"),
  ],
)
def test_an_optimizer_that_holds_updates_back_is_refused(tx, instead):
  with pytest.raises(ValueError, match=instead):
    embed.Optimizer(Model(), tx)


def test_row_gradients_of_a_table_of_another_size_are_refused():
  def layer(size):
    table = embed.TableConfig(size, D, name="t", optimizer=embed.sgd(0.1))
    return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))

  large, small = layer(V), layer(5)
  take = lambda m: embed.value_and_grad(lambda m: m(np.array([1, 2])).sum())(m)[1]
  with pytest.raises(ValueError, match="of a table of 20 rows, it has 5"):
    embed.Optimizer(small, optax.sgd(0.1)).update(small, take(large))


def test_a_tables_optimizer_is_none_for_the_dense_parameters():
  layer = embed.SparseEmbed(
    embed.FeatureConfig(embed.TableConfig(4, 2)), embed.adam(), rngs=nnx.Rngs(0)
  )
  with pytest.raises(TypeError, match=r"got embed\.adam\. Give that to embed\.TableConfig"):
    embed.Optimizer(layer, embed.adam())


@pytest.mark.usefixtures("strict")
def test_plain_value_and_grad_is_refused():
  """jax or nnx gradients know nothing of the rows: the optimizer says what to write instead."""
  model = harness.Model({"f": FC()}, embed.sgd())
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  grads = nnx.grad(lambda model: model.scale[...] * 2.0)(model)
  with pytest.raises((TypeError, ValueError), match="value_and_grad"):
    optimizer.update(model, grads)
