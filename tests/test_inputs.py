"""Inputs: what is taken, in which types; bad ones end in an error that says which one and what."""

from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from recorded_calls import FC, SE, TC, dense, f32, ragged, sparse

import embed
from embed.engine.bags import narrow

pytestmark = pytest.mark.usefixtures("strict")

V, D = 11, 3


def make(combiner="mean", **table):
  config = embed.TableConfig(V, D, combiner=combiner, name="t", **table)
  return embed.SparseEmbed(embed.FeatureConfig(config), embed.adagrad(0.1), rngs=nnx.Rngs(0))


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
  "timedelta": Bad({"clicks": np.array([3], "m8[s]")}, says=("clicks", "timedelta64")),
  "masked": Bad(
    {"clicks": np.ma.masked_array([1, 2], [False, True])}, says=("clicks", "filled(-1)")
  ),
  **{
    f"max-valency-{most!r}": Bad(
      {"clicks": embed.Ragged(dense(1, 2), dense(0, 2), max_valency=most)},
      says=("clicks", "positive integer", repr(most)),
    )
    for most in (-1, 0, 2.0, "2", True)
  },
  "sparse-transposed": Bad(
    {"clicks": embed.Sparse(np.array([[0, 0, 1], [0, 1, 0]]), dense(1, 2, 3), (2, 2))},
    says=("clicks", "[N, 2] with N = 3", "(2, 3)"),
  ),
  "sparse-rank-3": Bad(
    {"clicks": embed.Sparse(np.zeros((2, 3), np.int32), dense(1, 2, 3), (2, 2))},
    says=("clicks", "[N, 2] with N = 3", "(2, 3)"),
  ),
  "infinite-weight": Bad(
    {"clicks": ragged((1, 2, 3))},
    {"clicks": ragged((1, np.inf, 1), dtype=f32)},
    says=("clicks", "infinite"),
  ),
  "keys-of-several-types": Bad(
    {"a": dense(1)}, says=("int", "str"), config={"a": FC(), 1: FC(TC(name="u"))}
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
  with pytest.raises(bad.error) as error:
    WAYS[way](harness.Model(features, embed.sgd()), features, bad)
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


def test_weights_have_the_layout_of_their_ids():
  layer = make()
  ids = embed.Ragged([1, 2, 3], [0, 1, 3])
  with pytest.raises(ValueError, match="other row_splits"):
    layer(ids, embed.Ragged(np.ones(3), [0, 2, 3]))
  ids = embed.Sparse([[0, 0], [1, 1]], [1, 2], (2, 2))
  with pytest.raises(ValueError, match="other indices"):
    layer(ids, embed.Sparse([[0, 0], [1, 0]], np.ones(2), (2, 2)))


def test_numpy_jax_and_lists_are_one():
  layer = make()
  ids = [[1, 2], [3, -1]]
  wanted = layer(embed.Padded(ids))
  for x in (np.array(ids, np.int8), np.array(ids, np.int64), jnp.array(ids)):
    np.testing.assert_array_equal(layer(embed.Padded(x)), wanted)
  np.testing.assert_array_equal(layer([1, 2]), layer(np.array([1, 2], np.uint64)))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int32])
def test_any_integer_type_under_jit(dtype):
  table = embed.TableConfig(1000, 2, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  ids = np.array([0, 100], dtype)
  act = nnx.jit(lambda m, x: m(x))(layer, ids)
  np.testing.assert_array_equal(act, layer.tables["t"][jnp.array([0, 100])])
  if dtype == np.uint32:
    nnx.jit(lambda m, x: m(x))(layer, np.array([2**32 - 1, 1000], dtype))
    assert int(layer.report["dropped_ids"]) == 2


def test_int64_ids_without_validation_are_dropped_not_wrapped():
  """2**33 + 5 would become 5 on the way to the device."""
  feature = embed.FeatureConfig(
    embed.TableConfig(V, D, name="t"), validate_weights_and_indices=False
  )
  layer = embed.SparseEmbed(feature, rngs=nnx.Rngs(0))
  assert not layer(np.array([2**33 + 5])).any()
  assert int(layer.report["dropped_ids"]) == 1


def test_to_padded_checks_indices_and_keeps_the_kind_of_no_values():
  with pytest.raises(ValueError, match=r"index \[0, -1\] is outside"):
    embed.to_padded(embed.Sparse([[0, -1]], [3], (2, 2)))
  for bags in (embed.Sparse([], [], (2, 3)), embed.Ragged([], [0, 0, 0])):
    padded = embed.to_padded(bags)
    assert padded.values.dtype == np.int32
    assert (padded.values == -1).all()


@pytest.mark.parametrize("kind", ["padded", "ragged", "later"])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("exponent", [-126, -100, -64, 0, 64, 100, 126])
def test_a_mean_does_not_depend_on_the_size_of_the_weights(kind, combiner, exponent):
  """Their sum and the sum of their squares are no float32 for most of these."""
  table = embed.TableConfig(V, D, combiner=combiner, name="t")
  features = embed.FeatureConfig(table, differentiate_weights=kind == "later")
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  ids, weights = np.array([[1, 2, 3], [4, 4, -1]]), np.array([[1, 2, 1.5], [1, 1, 0]], f32)

  def look_up(weights):
    if kind == "ragged":
      splits = np.array([0, 3, 5])
      bags = lambda x: embed.Ragged(x.reshape(-1)[:5], splits)
    else:
      bags = embed.Padded
    return np.asarray(layer(bags(ids), bags(weights)))

  expected = look_up(weights)
  assert np.abs(expected).min() > 0
  np.testing.assert_array_equal(look_up(np.ldexp(weights, exponent)), expected)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_of_zero_give_zero_though_the_compiler_knows_them(combiner):
  layer, ids = make(combiner), jnp.ones((2, 3), jnp.int32)
  look_up = nnx.jit(lambda m, x: m(embed.Padded(x), embed.Padded(jnp.zeros((2, 3)))), graph=False)
  np.testing.assert_array_equal(look_up(layer, ids), np.zeros((2, D)))


# --- one conversion to int32 ----------------------------------------------------------------------

# An id of each width that is row 5 if it is cut to its low 32 bits, or below 0; all are out of
# every table.
TOO_LARGE = [
  np.array([2**32 + 5]), np.array([2**31 + 5], np.uint32), np.array([2**63 + 5], np.uint64),
  np.array([2**63 - 1]), np.array([2**64 - 1], np.uint64),
]  # fmt: skip
NEGATIVE = [np.array([5 - 2**32]), np.array([-(2**63)]), np.array([-1], np.int8)]


@given(st.data(), st.sampled_from([np.int8, np.uint8, np.uint32, np.int64, np.uint64]))
def test_no_id_becomes_another_one(data, dtype):
  """Rows stay, negative ids stay negative, and what is beyond the table stays beyond it."""
  limits = np.iinfo(dtype)
  edges = [0, 5, V - 1, V, 2**31 - 1, 2**31, 2**32 + 5, 5 - 2**32, limits.min, limits.max]
  some = st.sampled_from([n for n in edges if limits.min <= n <= limits.max])
  ids = data.draw(st.lists(some | st.integers(int(limits.min), int(limits.max)), min_size=1))
  given = np.array(ids, dtype)
  with jax.enable_x64(True):
    on_device = jax.jit(lambda x: narrow(x, V))(jnp.asarray(given))
  for narrowed in (narrow(given, V), np.asarray(on_device), narrow(given)):
    assert narrowed.dtype == np.int32
    for before, after in zip(ids, narrowed.tolist(), strict=True):
      assert after == before if 0 <= before < V else after < 0 if before < 0 else after >= V


def test_to_padded_makes_no_row_of_an_id_that_is_none():
  assert embed.to_padded([[5 - 2**32, 7]]).values.tolist() == [[-1, 7]]
  wide = embed.to_padded([[2**32 + 5, 7]]).values
  assert (wide.dtype, wide.tolist()) == (np.int64, [[2**32 + 5, 7]])
  large = np.array([2**63 + 5, 7], np.uint64)
  pairs = lambda x: embed.Sparse([[0, 0], [0, 1]], x, (1, 2))
  for bags in ([large], [large, [3]], embed.Ragged(large, [0, 2]), pairs(large)):
    with pytest.raises(ValueError, match="id 9223372036854775813 does not fit int64"):
      embed.to_padded(bags)
  small = np.array([2, 7], np.uint64)
  both = embed.to_padded([small, [3]]).values
  assert (both.dtype, both.tolist()) == (np.int32, [[2, 7], [3, -1]])
  mixed = embed.to_padded([[1, 2], [0.5]]).values
  assert (mixed.dtype, mixed.tolist()) == (np.float32, [[1.0, 2.0], [0.5, 0.0]])


# Row splits and indices, as ids, may be integers of any kind.
BAGS = {  # bags [5, 6] and [7]
  "ragged": lambda x: embed.Ragged(x([5, 6, 7]), x([0, 2, 3])),
  "max_valency": lambda x: embed.Ragged(x([5, 6, 7]), x([0, 2, 3]), 2),
  "sparse": lambda x: embed.Sparse(x([[0, 0], [0, 1], [1, 1]]), x([5, 6, 7]), (2, 400)),
  "long sparse": lambda x: embed.Sparse(x([[0, 0], [0, 1], [1, 1]]), x([5, 6, 7]), (2, 2**40)),
}
SUM_OF_EACH = embed.CustomCombiner(lambda n, vectors, _: vectors.sum(0), max_valency=2)


@pytest.mark.parametrize("combiner", ["sum", SUM_OF_EACH], ids=["sum", "custom"])
@pytest.mark.parametrize("kind", BAGS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
def test_positions_are_integers_of_any_kind(dtype, kind, combiner):
  layer, bags = make(combiner), BAGS[kind](lambda x: np.array(x, dtype))
  layer.load_tables({"t": np.repeat(2.0 ** np.arange(V)[:, None], D, 1)})
  expected = np.array([[96.0] * D, [128.0] * D])
  np.testing.assert_array_equal(layer(bags), expected)
  np.testing.assert_array_equal(nnx.jit(lambda layer, bags: layer(bags))(layer, bags), expected)
  if kind != "long sparse":
    padded = embed.to_padded(bags, 2, truncate=True).values[..., :2].tolist()
    assert padded == ([[5, 6], [-1, 7]] if kind == "sparse" else [[5, 6], [7, -1]])


@pytest.mark.parametrize(
  ("bags", "expected", "dropped"),
  [
    (lambda ids: embed.Sparse(np.array([[0, 0], [0, 2**32 + 1]]), ids, (2, 4)), [1, 0], 1),
    (lambda ids: embed.Sparse(np.array([[0, 0], [2**32, 1]]), ids, (2, 4)), [1, 0], 1),
    (lambda ids: embed.Ragged(ids, np.array([0, 2**32 + 1, 2**32 + 2])), [2, 0], 0),
  ],
  ids=["column", "bag", "splits"],
)
def test_no_position_becomes_another_one(bags, expected, dropped):
  """NumPy positions of 64 bits beside ids that have no value yet, so that none is checked."""
  layer = make("sum")
  layer.load_tables({"t": np.ones((V, D))})
  acts = nnx.jit(lambda layer, ids: layer(bags(ids)))(layer, jnp.array([5, 6]))
  assert (acts[:, 0].tolist(), int(layer.report["dropped_ids"])) == (expected, dropped)


def test_splits_that_decrease_are_named_whatever_their_type():
  """Differences of unsigned integers are never negative."""
  bags = embed.Ragged(np.array([5, 6, 7]), np.array([0, 2, 1], np.uint8))
  for check in (make(), lambda bags: embed.validate(FEATURE, bags), embed.to_padded):
    with pytest.raises(ValueError, match=r"never decrease .* Got \[0, 2, 1\]"):
      check(bags)


FEATURE = embed.FeatureConfig(
  embed.TableConfig(V, 1, initializer=jax.nn.initializers.ones, combiner="sum", name="t")
)
WAYS_IN = {
  "dense": lambda layer, x: layer(x),
  "padded": lambda layer, x: layer(embed.Padded(x[None])),
  "ragged": lambda layer, x: layer(embed.Ragged(x, np.arange(2))),
  "sparse": lambda layer, x: layer(embed.Sparse(np.zeros((1, 2), int), x, (1, 1))),
  "attend": lambda layer, x: layer.attend(np.ones((1, 1), f32), "t", x),
  "serving": lambda layer, x: embed.serving_lookup(x, None, layer.tables, FEATURE),
  "update": lambda layer, x: layer.apply_row_gradients(
    {"t": embed.RowGrads(x, np.ones((1, 1), f32))}
  ),
}


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("ids", [*TOO_LARGE, *NEGATIVE], ids=lambda ids: f"{ids[0]}")
def test_every_way_in_leaves_row_5_alone(ids, way):
  """Large ids raise, or are counted under jit, where nothing reads them; negative ones are none."""
  layer, is_large = embed.SparseEmbed(FEATURE, embed.sgd(1.0), rngs=nnx.Rngs(0)), ids[0] >= V
  if is_large:
    for check in (WAYS_IN[way], lambda _, x: embed.validate(FEATURE, x)):
      with pytest.raises(ValueError, match=str(ids[0])):
        check(layer, ids)
  else:
    assert not np.any(WAYS_IN[way](layer, ids))
  with jax.enable_x64(True):  # else jit itself cuts its arguments to 32 bits
    assert not np.any(nnx.jit(WAYS_IN[way])(layer, jnp.asarray(ids)))
  counts = is_large and way not in ("serving", "update")
  assert int(layer.report["dropped_ids"]) == counts
  np.testing.assert_array_equal(layer.tables["t"], np.ones((V, 1)))
