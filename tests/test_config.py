"""Bad configs and bad inputs end in an error that says which one and what."""

import operator
from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from recorded_calls import (
  CALLS,
  FC,
  NOT_APPLICABLE,
  RECORDED,
  SE,
  TC,
  dense,
  f32,
  ragged,
  sparse,
)

import embed

pytestmark = pytest.mark.usefixtures("strict")


def test_every_recorded_call_is_decided():
  assert set(RECORDED) == set(CALLS) | NOT_APPLICABLE
  differs = {
    call
    for call, (_, error) in CALLS.items()
    if RECORDED[call] != (error.__name__ if error else None)
  }
  assert differs == {
    "E.FTRL(learning_rate_power=0.5)",
    "E.FTRL(l1_regularization_strength=-1.)",
    "E.SGD(clip_weight_min=1., clip_weight_max=-1.)",
    "S([tf.constant([1,2])], None, (fc,))",
    "S((sp([1,2,9]),), None, (fc,))",
    "S((rg([1,-2,3]),), None, (fc,))",
    "S((tf.constant([-1]),), None, (fc,))",
    "S(([1,2],), None, (fc,))",
  }


@pytest.mark.parametrize("call", CALLS)
def test_recorded_call(call):
  ours, error = CALLS[call]
  if error is None:
    ours()
  else:
    with pytest.raises(error):
      ours()


# ------------------------------------------------------------------- more bad configs


@pytest.mark.parametrize(
  "make",
  [
    lambda: TC(vocabulary_size=True),
    lambda: TC(dim=True),
    lambda: TC(vocabulary_size=-1),
    lambda: TC(dim=2.0),
    lambda: TC(dtype=jnp.float64),
    lambda: embed.ftrl(l2_regularization_strength=-1.0),
    lambda: embed.ftrl(initial_accumulator_value=-0.1),
    lambda: embed.adam(beta_2=-0.1),
    lambda: embed.adam(epsilon=-1e-7),
    lambda: embed.adagrad_momentum(epsilon=-1e-10),
    lambda: embed.adagrad_momentum(exponent=-2.0),
    lambda: embed.proximal_adagrad(initial_accumulator_value=0.0),
    lambda: embed.rowwise_adagrad(initial_accumulator_value=0.0),
    lambda: embed.adagrad(use_gradient_accumulation=False, clipvalue=(None, None)),
  ],
)
def test_bad_config(make):
  with pytest.raises(ValueError, match=r"."):
    make()


def test_integers_of_any_kind_are_accepted():
  table = TC(vocabulary_size=np.int64(5), dim=np.int32(3))
  assert (operator.index(table.vocabulary_size), operator.index(table.dim)) == (5, 3)
  feature = FC(table, max_sequence_length=np.int64(2))
  layer = SE({"f": feature}, embed.sgd())
  assert layer({"f": ragged()})["f"].shape == (2, 2, 3)


def test_optimizer_errors_say_what_was_given():
  for optimizer in ("sgd", 3, object):
    with pytest.raises(ValueError, match="optimizer"):
      SE({"f": FC()}, optimizer)


def test_optax_transformation_is_not_an_optimizer_but_the_hint_is_there():
  optax = pytest.importorskip("optax")
  with pytest.raises(ValueError, match="from_optax"):
    SE({"f": FC()}, optax.sgd(0.1))


def test_training_without_an_optimizer_raises():
  layer = SE({"f": FC()})
  assert list(layer.variables["t"]) == ["parameters"]
  _, residual = layer.lookup({"f": dense(1)})
  with pytest.raises((ValueError, RuntimeError), match="optimizer"):
    layer.apply_gradients({"f": jnp.ones((1, 2))}, residual, step=0)


def test_load_tables_checks_names_and_shapes():
  layer = SE({"f": FC()}, embed.sgd())
  with pytest.raises(ValueError, match="unknown"):
    layer.load_tables({"unknown": np.zeros((4, 2), f32)})
  with pytest.raises(ValueError, match="t"):
    layer.load_tables({"t": np.zeros((5, 2), f32)})


# ------------------------------------------------------------------------- bad inputs


class Bad(NamedTuple):
  features: object
  weights: object = None
  error: type | tuple[type, ...] = ValueError
  says: tuple[str, ...] = ()
  config: object = None


def config():
  return {
    "clicks": FC(TC(vocabulary_size=10, name="items")),
    "history": FC(TC(vocabulary_size=10, name="pages"), max_sequence_length=3),
  }


BIG = 2**33 + 5  # becomes 5, a valid id, if it is cast to int32 unchecked
BAD = {
  "id-dense": Bad({"clicks": dense(1, 10)}, says=("clicks", "10")),
  "id-padded": Bad({"clicks": embed.Padded(dense([1, -1], [37, 2]))}, says=("clicks", "37")),
  "id-ragged": Bad({"clicks": ragged((1, 2, 44))}, says=("clicks", "44")),
  "id-sparse": Bad({"clicks": sparse((1, 55, 3))}, says=("clicks", "55")),
  "id-sequence": Bad({"history": ragged((1, 2, 66))}, says=("history", "66")),
  "id-list": Bad({"clicks": [1, 77]}, says=("clicks", "77")),
  "id-jax": Bad({"clicks": jnp.array([3, 88])}, says=("clicks", "88")),
  "int64-dense": Bad({"clicks": np.array([1, BIG])}, says=("clicks", str(BIG))),
  "int64-padded": Bad({"clicks": embed.Padded(np.array([[1, BIG]]))}, says=("clicks", str(BIG))),
  "int64-ragged": Bad({"clicks": ragged((1, 2, BIG), dtype=np.int64)}, says=("clicks", str(BIG))),
  "int64-sparse": Bad({"clicks": sparse((1, 2, BIG), dtype=np.int64)}, says=("clicks", str(BIG))),
  "uint64": Bad({"clicks": np.array([1, 2**64 - 1], np.uint64)}, says=("clicks", str(2**64 - 1))),
  "float-dense": Bad(
    {"clicks": np.array([1.0, 2.5], f32)}, error=(TypeError, ValueError), says=("clicks", "float32")
  ),
  "float-ragged": Bad(
    {"clicks": ragged(dtype=np.float64)}, error=(TypeError, ValueError), says=("clicks", "float64")
  ),
  "bool-dense": Bad(
    {"clicks": np.array([True, False])}, error=(TypeError, ValueError), says=("clicks", "bool")
  ),
  "string": Bad({"clicks": np.array(["a"])}, error=(TypeError, ValueError), says=("clicks",)),
  "none": Bad({"clicks": None}, error=(TypeError, ValueError), says=("clicks",)),
  "scalar": Bad({"clicks": np.int32(3)}, says=("clicks",)),
  "unknown-feature": Bad({"clicks": dense(1), "klicks": dense(1)}, says=("klicks",)),
  "unknown-weights": Bad({"clicks": ragged()}, {"klicks": ragged(dtype=f32)}, says=("klicks",)),
  "weights-dense": Bad({"clicks": dense(1, 2)}, {"clicks": np.ones(2, f32)}, says=("clicks",)),
  "weights-sequence": Bad({"history": ragged()}, {"history": ragged(dtype=f32)}, says=("history",)),
  "weights-kind": Bad(
    {"clicks": embed.Padded(dense([1, 2]))}, {"clicks": ragged(dtype=f32)}, says=("clicks",)
  ),
  "weights-array-for-padded": Bad(
    {"clicks": embed.Padded(dense([1, 2]))}, {"clicks": np.ones((1, 2), f32)}, says=("clicks",)
  ),
  "weights-shape-padded": Bad(
    {"clicks": embed.Padded(dense([1, 2]))},
    {"clicks": embed.Padded(np.ones((1, 3), f32))},
    says=("clicks",),
  ),
  "weights-shape-ragged": Bad(
    {"clicks": ragged()}, {"clicks": ragged((1, 1), (0, 2, 2), f32)}, says=("clicks",)
  ),
  "dense-sequence": Bad({"history": dense(1, 2)}, says=("history",)),
  "list-for-tuple": Bad([dense(1)], error=TypeError, config=(FC(),)),
  "tuple-for-list": Bad((dense(1),), error=TypeError, config=[FC()]),
  "list-for-tuple-inside": Bad(
    {"a": ([dense(1)],)}, error=TypeError, says=("a",), config={"a": ((FC(),),)}
  ),
  "short-tuple": Bad((dense(1),), error=ValueError, config=(FC(), FC(TC(name="u")))),
  "long-tuple": Bad((dense(1), dense(1)), error=ValueError, config=(FC(),)),
  "weights-list-for-tuple": Bad((ragged(),), [ragged(dtype=f32)], error=TypeError, config=(FC(),)),
  "weights-short-tuple": Bad(
    (ragged(), ragged()),
    (ragged(dtype=f32),),
    error=ValueError,
    config=(FC(), FC(TC(name="u"))),
  ),
  "nested-path": Bad(
    {"user": [dense(0), dense(11)]},
    says=("user", "1", "11"),
    config={"user": [FC(), FC(TC(vocabulary_size=10, name="u"))]},
  ),
}


def differentiate(model, bad):
  loss = lambda model: model.scale[...] + 0 * len(str(model.embed(bad.features, bad.weights)))
  return embed.value_and_grad(loss)(model)


WAYS = {
  "call": lambda model, _, bad: model.embed(bad.features, bad.weights),
  "lookup": lambda model, _, bad: model.embed.lookup(bad.features, bad.weights),
  "validate": lambda _, features, bad: embed.validate(features, bad.features, bad.weights),
  "value_and_grad": lambda model, _, bad: differentiate(model, bad),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, way):
  bad = BAD[name]
  features = config() if bad.config is None else bad.config
  model = harness.Model(features, embed.sgd())
  with pytest.raises(bad.error) as error:
    WAYS[way](model, features, bad)
  for word in bad.says:
    assert word in str(error.value), f"{word!r} is missing from: {error.value}"


@pytest.mark.parametrize(
  ("features", "weights"),
  [
    ({"clicks": dense(1, 9)}, None),
    ({"clicks": [1, 9]}, None),
    ({"clicks": []}, None),
    ({"clicks": np.zeros(0, np.int32)}, {"clicks": None}),
    ({"clicks": embed.Padded([[1, -1], [2, 9]])}, {"clicks": embed.Padded([[1.0, 0.0], [2, 3]])}),
    ({"clicks": ragged(np.int64((1, 2, 9)), dtype=np.int64)}, None),
    ({"history": sparse()}, None),
    ({"clicks": dense(-7, -1)}, None),
    ({}, None),
  ],
)
def test_good_input(features, weights):
  embed.validate(config(), features, weights)
  activations = SE(config(), embed.sgd())(features, weights)
  assert set(activations) == set(features)


def test_bad_ids_are_dropped_and_counted_under_jit():
  """Two too large ids and one padding id: zeros out, no gradient, a count of two."""
  model = harness.Model(config(), embed.sgd())
  values = np.array([[1, 10], [2**31 - 1, -1], [3, 4]], np.int32)
  good = np.array([[1, -1], [-1, -1], [3, 4]], np.int32)
  cotangents = {"clicks": np.array([[1, 2], [4, 8], [16, 32]], np.float32)}
  run = nnx.jit(harness.value_and_grad)
  (_, activations), grads = run(model, {"clicks": embed.Padded(values)}, None, cotangents)
  assert harness.dropped(model) == 2
  (_, wanted), wanted_grads = run(model, {"clicks": embed.Padded(good)}, None, cotangents)
  np.testing.assert_array_equal(activations["clicks"], wanted["clicks"])
  assert not np.any(activations["clicks"][1])
  actual = harness.rows(grads.rows["embed/items"], 10)
  harness.assert_rows(actual, harness.rows(wanted_grads.rows["embed/items"], 10), rtol=0, atol=0)
  assert sorted(actual) == [1, 3, 4]


@pytest.mark.parametrize(
  "features",
  [
    {"clicks": dense(1, 10, 3, 12)},
    {"clicks": ragged((1, 10, 12))},
    {"clicks": sparse((10, 2, 11))},
    {"history": embed.Padded(dense([1, 10, 11], [-1, 2, -5]))},
  ],
  ids=["dense", "ragged", "sparse", "sequence"],
)
def test_every_kind_counts_what_it_drops(features):
  model = harness.Model(config(), embed.sgd())
  call = nnx.jit(lambda model, features: model.embed(features))
  activations = call(model, features)
  assert harness.dropped(model) == 2
  assert all(np.all(np.isfinite(a)) for a in activations.values())


def test_dropped_ids_do_not_move_the_table():
  """id = vocabulary_size would be the last row if it were clamped; -1 wraps to it."""
  table = TC(vocabulary_size=4, optimizer=embed.adam(learning_rate=0.1, weight_decay_factor=0.1))
  layer = SE({"f": FC(table)})
  before = {key: np.asarray(value) for key, value in layer.variables["t"].items()}

  @nnx.jit
  def step(layer, ids, grads):
    _, residual = layer.lookup({"f": ids})
    layer.apply_gradients({"f": grads}, residual, step=0)

  step(layer, dense(4, -1, 5, 2**31 - 1), jnp.ones((4, 2)))
  for key, value in layer.variables["t"].items():
    np.testing.assert_array_equal(value, before[key], err_msg=key)


# ------------------------------------------------------------- gradients of the mid level


@pytest.mark.parametrize(
  ("grads", "error"),
  [
    ({"f": jnp.ones((3, 2))}, ValueError),
    ({"f": jnp.ones((2, 3))}, ValueError),
    ({"g": jnp.ones((2, 2))}, ValueError),
    ({"f": "ones"}, (TypeError, ValueError)),
    ([jnp.ones((2, 2))], (TypeError, ValueError)),
    (None, (TypeError, ValueError)),
  ],
)
def test_bad_activation_gradients(grads, error):
  layer = SE({"f": FC()}, embed.sgd())
  _, residual = layer.lookup({"f": dense(1, 2)})
  with pytest.raises(error):
    layer.apply_gradients(grads, residual, step=0)


def test_plain_value_and_grad_is_refused():
  """jax or nnx gradients know nothing of the rows: the optimizer says what to write instead."""
  import optax

  model = harness.Model({"f": FC()}, embed.sgd())
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  grads = nnx.grad(lambda model: model.scale[...] * 2.0)(model)
  with pytest.raises((TypeError, ValueError), match="value_and_grad"):
    optimizer.update(model, grads)


@pytest.mark.parametrize(
  "where", [{}, {"mesh": jax.make_mesh((1,), ("data",))}], ids=["one", "mesh"]
)
def test_tables_that_do_not_fit_are_named(where):
  movie = embed.TableConfig(2_000_000_000, 1 << 14, name="movie", optimizer=embed.adam(0.1))
  with pytest.raises(MemoryError, match=r"'movie'.*122070\.3G, 366210\.9G.*hbm_bytes") as caught:
    embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0), **where)
  assert "RESOURCE_EXHAUSTED" in str(caught.value.__cause__)
