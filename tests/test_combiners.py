"""Custom combiners, and gradients of the user's weights."""

import contextlib
import dataclasses
import functools
import itertools

import conformance
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from suites import slow_unless

import embed
from embed.tools import check

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


def plain_mean(valency, vectors, weights):
  del weights
  return vectors.sum(0) / jnp.maximum(valency, 1)


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


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_the_ids_given(kind):
  """1 * row 7 + 2 * row 2; nothing; 1 * row 3."""
  found = make(learnt())({"x": KINDS[kind]})["x"]
  np.testing.assert_array_equal(found, [[14 + 2 * 4, 15 + 2 * 5], [0, 0], [6, 7]])
  found = make(embed.CustomCombiner(last, K))({"x": KINDS[kind]})["x"]
  np.testing.assert_array_equal(found, [[4, 5], [0, 0], [6, 7]])


def test_user_weights_multiply_the_rows():
  weights = embed.Padded(np.array([[9.0, 0.5, 9.0, 3.0], [9.0] * 4, [1.0, 9.0, 9.0, 9.0]]))
  found = make(learnt())({"x": KINDS["padded"]}, {"x": weights})["x"]
  np.testing.assert_array_equal(found, [[7 + 6 * 4, 7.5 + 6 * 5], [0, 0], [6, 7]])


LEVELS = ("lookup", "value_and_grad")


def step(model, inputs, level):
  """One step of the loss sum(activations), at either level."""
  if level == "lookup":
    act, residual = model.lookup(inputs)
    model.apply_gradients(jax.tree.map(jnp.ones_like, act), residual)
    return
  optimizer = embed.Optimizer(model, optax.adam(1.0))
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m(inputs)["x"]))(model)
  optimizer.update(model, grads)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("kind", "level"),
  slow_unless(
    itertools.product(KINDS, LEVELS),
    lambda *case: case in (("padded", "value_and_grad"), ("ragged", "lookup")),
  ),
)
def test_rows_and_learned_weights_train(kind, level):
  """Row 7 at place 1, row 2 at place 2, row 3 at place 1; weight i gets the sum of its rows."""
  model = make(learnt())
  step(model, {"x": KINDS[kind]}, level)
  wanted = ROWS.copy()
  wanted[[7, 3]] -= 0.25
  wanted[2] -= 0.5
  np.testing.assert_array_equal(model.tables["t"], wanted)
  of_weights = np.array([14 + 15 + 6 + 7, 4 + 5, 0.0])
  np.testing.assert_array_equal(
    model.combiner_weights["t"][...], np.array([1, 2, 3]) - 0.5 * of_weights
  )


@pytest.mark.ci
def test_without_a_rate_the_dense_optimizer_trains_them():
  model = make(learnt(rate=None))
  optimizer = embed.Optimizer(model, optax.sgd(1.0))
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m({"x": KINDS["padded"]})["x"]))(model)
  optimizer.update(model, grads)
  np.testing.assert_array_equal(model.combiner_weights["t"][...], [1 - 42, 2 - 9, 3])


def test_a_longer_bag_is_refused_or_counted():
  model = make(learnt())
  long = embed.Padded(np.array([[1, 2, 3, 4], [5, -1, -1, -1]]))
  with pytest.raises(ValueError, match=r"bag 0 has 4 ids, more than the max_valency=3"):
    model({"x": long})
  found = nnx.jit(lambda m, x: m({"x": x})["x"])(model, long)
  np.testing.assert_array_equal(found[0], 1 * ROWS[1] + 2 * ROWS[2] + 3 * ROWS[3])
  assert int(model.report["dropped_ids"]) == 1


def test_sequences_and_attention_are_not_combined():
  model = make(learnt(), max_sequence_length=2)
  np.testing.assert_array_equal(model({"x": embed.Padded([[4, 5]])})["x"], ROWS[None, 4:6])
  np.testing.assert_array_equal(
    model.attend(jnp.ones((1, D)), "t", candidates=np.array([4]))[0], ROWS[4].sum(keepdims=True)
  )


@pytest.mark.parametrize(
  ("message", "arguments"),
  [
    ("`initializer` must be a callable", {"num_weights": 3}),
    ("`computation` must be a callable", {"computation": None}),
    ("max_valency", {"max_valency": 0}),
    ("combiner_weights_learning_rate", {"combiner_weights_learning_rate": "fast"}),
  ],
)
def test_what_is_wrong_is_named(message, arguments):
  with pytest.raises(ValueError, match=message):
    embed.CustomCombiner(**({"computation": last, "max_valency": 3} | arguments))


def test_another_shape_is_named():
  model = make(embed.CustomCombiner(lambda valency, vectors, weights: vectors, K))
  with pytest.raises(ValueError, match=r"returned shape \(3, 2\) for a bag"):
    model({"x": KINDS["padded"]})


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.ci
@given(meshes.ids((4, K), V), meshes.fractions((4, D)))
def test_a_mean_of_ones_own_is_the_mean(ids, cotangents):
  found = []
  for combiner in (embed.CustomCombiner(plain_mean, K), "mean"):
    model = make(combiner, embed.adagrad(0.1))
    act, residual = model.lookup({"x": embed.Padded(ids)})
    model.apply_gradients({"x": jnp.asarray(cotangents)}, residual)
    found.append((act, model.variables))
  meshes.assert_close(*found)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("strategy", "kind"),
  slow_unless(
    itertools.product(["mod", "column"], meshes.KINDS),
    lambda *case: case == ("mod", "explicit"),
  ),
)
def test_sharded_equals_unsharded(strategy, kind):
  draw = np.random.default_rng(0)
  ids = embed.Padded(draw.integers(-1, V, (16, K)))
  weights = embed.Padded(draw.uniform(0.5, 2, size=(16, K)).astype(np.float32))
  outcomes = []
  for where in ({}, {"mesh": meshes.make_mesh(kind), "sharding": strategy}):
    table = embed.TableConfig(V, 8, None, embed.adagrad(0.1), learnt(), "t")
    other = embed.TableConfig(V, 8, None, embed.adagrad(0.1), "mean", "u")
    features = {
      "x": embed.FeatureConfig(table),
      "y": embed.FeatureConfig(other, differentiate_weights=True),
    }
    model = embed.SparseEmbed(features, rngs=nnx.Rngs(0), **where)
    optimizer = embed.Optimizer(model, optax.sgd(0.1))
    state = nnx.split((model, optimizer))
    state = (state[0], meshes.on_mesh(where["mesh"], state[1])) if where else state

    @jax.jit
    def step(state, w, graphdef=state[0]):
      model, optimizer = nnx.merge(graphdef, state)

      def loss(model, w):
        act = model({"x": ids, "y": ids}, {"x": weights, "y": embed.Padded(w)})
        return sum(jnp.sum(jnp.sin(a)) for a in act.values())

      of_weights = jax.grad(lambda w: loss(model, w))(w)
      _, grads = embed.value_and_grad(loss)(model, w)
      optimizer.update(model, grads)
      return of_weights, model.variables, model.combiner_weights["t"][...]

    outcomes.append(step(state[1], jnp.asarray(weights.values)))
  meshes.assert_close(*outcomes)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("kind", "is_set", "level"),
  slow_unless(
    itertools.product(meshes.KINDS, [False, True], LEVELS),
    lambda *case: case == ("explicit", False, "value_and_grad"),
  ),
)
def test_eagerly_on_a_mesh(kind, is_set, level):
  """Any operation may be in a combiner, also on a mesh whose types have to agree."""
  middle = lambda valency, vectors, weights: jnp.sort(vectors, axis=0)[valency // 2] + weights[1]
  bags = embed.Padded(np.arange(24).reshape(8, 3) % 11 - 1)
  found = []
  for mesh in (None, meshes.make_mesh(kind)):
    one, two = learnt(), dataclasses.replace(learnt(), computation=middle)
    features = {
      name: embed.FeatureConfig(embed.TableConfig(V, D, None, embed.sgd(0.25), combiner, name))
      for name, combiner in (("x", one), ("y", two))
    }
    with jax.set_mesh(mesh) if mesh is not None and is_set else contextlib.nullcontext():
      model = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh)
      if level == "lookup":
        act, residual = model.lookup({"x": bags, "y": bags})
        model.apply_gradients({"x": jnp.ones((8, D)), "y": None}, residual)
      else:
        optimizer = embed.Optimizer(model, optax.sgd(0.1))
        loss = lambda m: sum(jnp.sum(a**2) for a in m({"x": bags, "y": bags}).values())
        act, grads = embed.value_and_grad(loss)(model)
        optimizer.update(model, grads)
      learned = {name: model.combiner_weights[name][...] for name in features}
      found.append(jax.tree.map(np.asarray, (act, model.tables, learned)))
  meshes.assert_close(*found)


def test_an_empty_bag_gives_zeros_and_no_nan():
  """A mean as one would write it, 0 / 0 for an empty bag."""
  mean = lambda valency, vectors, weights: weights[0] * vectors.sum(0) / valency
  model = make(embed.CustomCombiner(mean, K, 1, jax.nn.initializers.ones))
  bags = {"x": embed.Padded(np.array([[1, 3], [-1, -1]]))}
  loss = lambda m: jnp.sum(m(bags)["x"])
  value, grads = embed.value_and_grad(loss)(model)
  assert float(value) == 4 + 5
  assert grads.dense["combiner_weights"]["t"][...].tolist() == [9]


def test_weights_in_a_custom_combiner_are_constants_unless_asked():
  bags = {"x": embed.Padded(np.array([[1, 2]]))}
  for asked, wanted in ((False, [[0, 0]]), (True, [[2 + 3, 2 * (4 + 5)]])):
    model = make(learnt(), differentiate_weights=asked)
    of = lambda w, model=model: jnp.sum(model(bags, {"x": embed.Padded(w)})["x"])
    assert jax.grad(of)(jnp.ones((1, 2))).tolist() == wanted


def test_the_mid_level_differentiates_at_the_weights_of_the_lookup():
  model = make(learnt())
  act, residual = model.lookup({"x": KINDS["padded"]})
  model.combiner_weights["t"].set_value(jnp.full(K, 100.0))
  model.apply_gradients(jax.tree.map(jnp.ones_like, act), residual)
  np.testing.assert_array_equal(model.tables["t"][7], ROWS[7] - 0.25)


def test_nothing_is_trained_where_something_is_missing():
  model = make(learnt(rate=None))
  act, residual = model.lookup({"x": KINDS["padded"]})
  with pytest.raises(ValueError, match="trained by the dense optimizer"):
    model.apply_gradients(act, residual)
  np.testing.assert_array_equal(model.tables["t"], ROWS)
  model = make(learnt())
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m({"x": KINDS["padded"]})["x"]))(model)
  with pytest.raises(ValueError, match="The dense gradients have none for combiner_weights/t"):
    optimizer.update(model, embed.Grads(nnx.State({}), grads.rows))


def test_a_wide_sparse_input_costs_what_it_holds():
  model = make("sum", differentiate_weights=True)
  at, shape = np.array([[0, 5], [1, 999_999]]), (2, 10**6)
  weights = embed.Sparse(at, np.array([2.0, 3.0], np.float32), shape)
  _, residual = model.lookup({"x": embed.Sparse(at, np.array([1, 2]), shape)}, {"x": weights})
  assert residual.uncombined[("x",)].rows.shape == (2, 2, D)


# --- gradients of the user's weights --------------------------------------------------------------

LOOKUPS = {case["id"]: case for case in conformance.load("lookups")["cases"]}
# Where TensorFlow, on CPU, leaves no id out of the bag for its weight.
RECORDED = [
  name
  for name, case in LOOKUPS.items()
  if "weights_grad_tf_cpu" in case.get("grad", {})
  and len(case["inputs"]) == 1
  and all(expected["train"] == "same" for expected in case["expected"].values())
]


def of_known_length(x):
  if not isinstance(x, embed.Ragged):
    return x
  longest = int(np.diff(x.row_splits).max(initial=1))
  return embed.Ragged(x.values, x.row_splits, max_valency=max(longest, 1))


def recorded(name):
  """A case's feature, inputs, weights, and what is to come out: all in one table of one feature."""
  case = LOOKUPS[name]
  ((feature, inputs),) = case["inputs"].items()
  (table,) = case["tables"].values()
  config = embed.TableConfig(
    table["vocabulary_size"],
    table["dim"],
    lambda *_: jnp.asarray(table["params"]),
    embed.sgd(1.0),
    table["combiner"],
    name,
  )
  ids, weights = map(of_known_length, check.as_given(conformance.inputs(inputs)))
  (rows,) = case["grad"]["table_grad"].values()
  return {
    "feature": embed.FeatureConfig(config, differentiate_weights=True),
    "ids": ids,
    "weights": weights,
    "cotangent": case["grad"]["cotangent"][feature],
    "activations": conformance.expected(case, feature),
    "of_weights": case["grad"]["weights_grad_tf_cpu"],
    "of_rows": rows,
  }


@pytest.mark.ci
def test_recorded_gradients_of_weights():
  """Every case is a feature of one layer: one compilation for all."""
  cases = {name: recorded(name) for name in RECORDED}
  of = lambda key: {name: case[key] for name, case in cases.items()}
  model = embed.SparseEmbed(of("feature"), rngs=nnx.Rngs(0))
  ids, weights = of("ids"), of("weights")

  def loss(model, values):
    again = lambda name: dataclasses.replace(weights[name], values=values[name])
    act = model(ids, {name: again(name) for name in cases})
    return sum(jnp.sum(act[n] * c) for n, c in of("cotangent").items()), act

  values = {name: jnp.asarray(w.values) for name, w in weights.items()}
  (_, act), grads = nnx.jit(embed.value_and_grad(loss, has_aux=True))(model, values)
  found = jax.jit(jax.grad(lambda v: loss(model, v)[0]))(values)
  for name, case in cases.items():
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5, err_msg=name)
    close(act[name], case["activations"])
    # On CPU, TensorFlow prunes ids of weight 0 from mean and sqrtn, so that these get no gradient.
    kept = (np.asarray(values[name]) != 0) | (case["of_weights"] != 0)
    assert kept.any() or not kept.size
    close(np.asarray(found[name])[kept], case["of_weights"][kept])
    rows = np.zeros((len(case["of_rows"]) + 1, case["of_rows"].shape[1]))
    np.add.at(rows, np.asarray(grads.rows[name].ids), np.asarray(grads.rows[name].values))
    close(rows[:-1], case["of_rows"])


def test_there_are_recorded_cases():
  assert len(RECORDED) > 20


def test_weights_that_the_model_makes_are_trained():
  """Attention: the weights of a bag are a softmax of scores that the model learns."""

  class Attention(nnx.Module):
    def __init__(self):
      self.embed = make("sum", differentiate_weights=True)
      self.scores = nnx.Param(jnp.zeros(V))

    def __call__(self, ids):
      return self.embed({"x": embed.Padded(ids)}, {"x": embed.Padded(self.scores[...][ids])})["x"]

  model = Attention()
  loss = lambda model, ids: jnp.sum(model(ids))
  _, grads = embed.value_and_grad(loss)(model, jnp.array([[1, 2]]))
  np.testing.assert_array_equal(grads.dense["scores"][...][:4], [0, 2 + 3, 4 + 5, 0])


def test_bags_of_unknown_length_are_refused():
  model = make("mean", differentiate_weights=True)
  bags = KINDS["ragged"]
  weights = embed.Ragged(np.ones(4, np.float32), bags.row_splits)
  with pytest.raises(ValueError, match="needs bags of known length"):
    model({"x": bags}, {"x": weights})


def test_constant_weights_get_none():
  model = make("sum")
  w = jnp.ones((1, 2))
  of_weights = jax.grad(
    lambda w: jnp.sum(model({"x": embed.Padded([[1, 2]])}, {"x": embed.Padded(w)})["x"])
  )
  np.testing.assert_array_equal(of_weights(w), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_serving_combines_alike(kind):
  model = make(learnt())
  wanted = model({"x": KINDS[kind]})["x"]
  weights = {"t": model.combiner_weights["t"][...]}
  serve = functools.partial(embed.serving_lookup, {"x": KINDS[kind]}, None, model.tables)
  found = serve(model.spec.features, combiner_weights=weights)["x"]
  np.testing.assert_array_equal(found, wanted)
  with pytest.raises(ValueError, match=r"combiner_weights=\{'t': sparse_embed"):
    serve(model.spec.features)


def test_serving_counts_positions_as_training():
  """Ids of weight 0 are pruned from means, and keep their place where positions count."""
  at, shape = np.array([[0, 0], [0, 1]]), (1, 2)
  ids = {"x": embed.Sparse(at, np.array([1, 2]), shape)}
  weights = {"x": embed.Sparse(at, np.array([0.0, 1.0], np.float32), shape)}
  model = make(learnt())
  learned = {"t": model.combiner_weights["t"][...]}
  found = embed.serving_lookup(
    ids, weights, model.tables, model.spec.features, combiner_weights=learned
  )
  np.testing.assert_array_equal(found["x"], model(ids, weights)["x"])


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.weekly)])
def test_steps_outside_of_jit_compile_a_combiner_once(devices):
  """A computation with a loop: JAX compiles loops for each new function object."""

  def looped(valency, vectors, weights):
    add = lambda k, total: total + weights[k] * vectors[k]
    return jax.lax.fori_loop(0, K, add, jnp.zeros(D))

  combiner = embed.CustomCombiner(looped, K, K, jax.nn.initializers.ones, 0.5)
  table = embed.TableConfig(V, D, lambda *_: jnp.asarray(ROWS), embed.sgd(0.25), combiner, "t")
  mesh = None if devices == 1 else jax.make_mesh((devices,), ("data",))
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0), mesh=mesh)
  dense = embed.Optimizer(layer, optax.identity())
  ids, compiled = embed.Padded(np.array([[1, 2, -1]] * 4)), []

  def step():
    act, residual = layer.lookup(ids)
    layer.apply_gradients(jnp.ones_like(act), residual)
    _, grads = embed.value_and_grad(lambda m: m(ids).sum())(layer)
    dense.update(layer, grads)

  for _ in range(2):
    step()
  count = lambda event, _, **__: "backend_compile" in event and compiled.append(event)
  jax.monitoring.register_event_duration_secs_listener(count)
  for _ in range(2):
    step()
  jax.monitoring.unregister_event_duration_listener(count)
  assert not compiled
