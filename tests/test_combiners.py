"""Custom combiners, and gradients of the user's weights."""

import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from flax import nnx

import embed

pytestmark = pytest.mark.filterwarnings("ignore:.*JAX's own differentiation")

V, D, K = 10, 2, 3
ROWS = np.arange(V * D, dtype=np.float32).reshape(V, D)


def by_position(valency, vectors, weights):
  del valency
  return weights @ vectors


def last(valency, vectors, weights):
  """The row of the last id."""
  del weights
  return jnp.where(valency > 0, vectors[jnp.maximum(valency - 1, 0)], 0)


def learnt(rate=0.5, number=K):
  initializer = lambda key, shape, dtype: jnp.arange(1, shape[0] + 1, dtype=dtype)
  return embed.CustomCombiner(by_position, K, number, initializer, rate)


def make(combiner, optimizer=None, where=None, **feature):
  table = embed.TableConfig(
    V, D, lambda *_: jnp.asarray(ROWS), optimizer or embed.sgd(0.25), combiner, "t"
  )
  config = {"x": embed.FeatureConfig(table, **feature)}
  return embed.SparseEmbed(config, rngs=nnx.Rngs(0), **(where or {}))


# Bags [7, 2], [], [3]: in every kind, with holes where there can be some.
KINDS = {
  "padded": embed.Padded(np.array([[-1, 7, -1, 2], [-1] * 4, [3, -1, -1, -1]])),
  "ragged": embed.Ragged(np.array([7, 2, 3, 0]), np.array([0, 2, 2, 3])),
  "sparse": embed.Sparse(np.array([[0, 5], [0, 9], [2, 0]]), np.array([7, 2, 3]), (3, 50)),
}


# --- numbers --------------------------------------------------------------------------------------


def test_positions_are_those_of_the_ids_given():
  """1 * row 7 + 2 * row 2; nothing; 1 * row 3. Or the last row of each bag."""
  table = lambda combiner, name: embed.TableConfig(
    V, D, lambda *_: jnp.asarray(ROWS), embed.sgd(0.25), combiner, name
  )
  tables = [table(learnt(), "t"), table(embed.CustomCombiner(last, K), "u")]
  features = {
    (kind, config.name): embed.FeatureConfig(config) for kind in KINDS for config in tables
  }
  features = {" ".join(key): feature for key, feature in features.items()}
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  found = layers.predict(layer, {key: KINDS[key.split()[0]] for key in features})
  wanted = {
    "t": [[14 + 2 * 4, 15 + 2 * 5], [0, 0], [6, 7]],
    "u": [[4, 5], [0, 0], [6, 7]],
  }
  for key, act in found.items():
    np.testing.assert_array_equal(act, wanted[key.split()[1]], err_msg=key)


def test_rows_and_learned_weights_train():
  """Row 7 at place 1, row 2 at place 2, row 3 at place 1; weight i gets the sum of its rows."""
  model = make(learnt())
  optimizer = embed.Optimizer(model, optax.adam(1.0))

  @nnx.jit
  def step(model, optimizer):
    inputs = {"x": KINDS["padded"]}
    _, grads = embed.value_and_grad(lambda m: jnp.sum(m(inputs)["x"]))(model)
    optimizer.update(model, grads)

  step(model, optimizer)
  wanted = ROWS.copy()
  wanted[[7, 3]] -= 0.25
  wanted[2] -= 0.5
  np.testing.assert_array_equal(model.tables["t"], wanted)
  of_weights = np.array([14 + 15 + 6 + 7, 4 + 5, 0.0])
  np.testing.assert_array_equal(
    model.combiner_weights["t"][...], np.array([1, 2, 3]) - 0.5 * of_weights
  )


def test_a_longer_bag_is_refused_or_counted():
  model = make(learnt())
  long = embed.Padded(np.array([[1, 2, 3, 4], [5, -1, -1, -1]]))
  with pytest.raises(ValueError, match=r"bag 0 has 4 ids, more than the max_valency=3"):
    model({"x": long})
  found = layers.predict(model, {"x": long})["x"]
  np.testing.assert_array_equal(found[0], 1 * ROWS[1] + 2 * ROWS[2] + 3 * ROWS[3])
  assert int(model.report["dropped_ids"]) == 1


def test_sequences_and_attention_are_not_combined():
  model = make(learnt(), max_sequence_length=2)
  attend = lambda m: m.attend(jnp.ones((1, D)), "t", candidates=np.array([4]))
  found, scores = nnx.jit(lambda m: (m({"x": embed.Padded([[4, 5]])})["x"], attend(m)))(model)
  np.testing.assert_array_equal(found, ROWS[None, 4:6])
  np.testing.assert_array_equal(scores[0], ROWS[4].sum(keepdims=True))


def test_another_shape_is_named():
  combiner = embed.CustomCombiner(lambda valency, vectors, weights: vectors, K)
  with pytest.raises(ValueError, match=r"returned shape \(3, 2\) for a bag"):
    nnx.eval_shape(lambda: make(combiner)({"x": KINDS["padded"]}))


# --- on a mesh ------------------------------------------------------------------------------------


# --- gradients of the user's weights --------------------------------------------------------------

# Where TensorFlow, on CPU, leaves no id out of the bag for its weight.


def test_weights_that_the_model_makes_are_trained():
  """Weights of rows, and of a custom combiner that asks for it; others are constants."""

  def model_of(combiner, asked):
    return make(combiner, differentiate_weights=asked)

  models = {
    "a sum, not asked": model_of("sum", False),
    "a sum": model_of("sum", True),
    "learnt, not asked": model_of(learnt(), False),
    "learnt": model_of(learnt(), True),
  }
  ids = {"x": embed.Padded(np.array([[1, 2], [-1, -1]]))}

  @nnx.jit
  def gradients(models):
    def total(w, model):
      return jnp.sum(model(ids, {"x": embed.Padded(w)})["x"])

    return {name: jax.grad(total)(jnp.ones((2, 2)), model) for name, model in models.items()}

  found = {name: of_weights.tolist() for name, of_weights in gradients(models).items()}
  assert found == {
    "a sum, not asked": [[0, 0], [0, 0]],
    "a sum": [[2 + 3, 4 + 5], [0, 0]],
    "learnt, not asked": [[0, 0], [0, 0]],
    "learnt": [[2 + 3, 2 * (4 + 5)], [0, 0]],
  }
