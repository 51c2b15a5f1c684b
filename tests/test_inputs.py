"""Inputs: what is taken, in which types; bad ones end in an error that says which one and what."""

import functools
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from recorded_calls import FC, SE, TC, dense, f32, ragged, sparse

import embed
from embed.engine.bags import narrow

pytestmark = pytest.mark.usefixtures("strict")

V, D = layers.V, layers.D


class Bad(NamedTuple):
  features: object
  weights: object = None
  error: type = ValueError
  says: tuple[str, ...] = ()
  config: object = None


def config():
  return {
    "clicks": FC(TC(vocabulary_size=10, name="items")),
    "history": FC(TC(vocabulary_size=10, name="pages"), max_sequence_length=3),
  }


BIG = 2**33 + 5  # becomes 5, a valid id, if it is cast to int32 unchecked
OF_IDS = {  # ids 1, 2 and a bad one
  "dense": lambda x: x,
  "padded": lambda x: embed.Padded(x[None]),
  "ragged": lambda x: embed.Ragged(x, [0, 1, 3]),
  "sparse": lambda x: embed.Sparse([[0, 0], [1, 0], [1, 1]], x, (2, 2)),
}
VALUES = {"id": 10, "int64": BIG, "uint64": 2**64 - 1, "float": 2.5}
BAD = {
  **{
    f"{what}-{kind}": Bad(
      {"clicks": make(np.array([1, 2, x], np.uint64 if x > 2**63 else None))},
      says=("clicks", "float64" if what == "float" else str(x)),
    )
    for kind, make in OF_IDS.items()
    for what, x in VALUES.items()
  },
  "bool": Bad({"clicks": np.array([True, False])}, says=("clicks", "bool")),
  "timedelta": Bad({"clicks": np.array([3], "m8[s]")}, says=("clicks", "timedelta64")),
  "huge": Bad({"clicks": [2**70]}, error=TypeError, says=("clicks", "fit 64 bits", str(2**70))),
  "unequal": Bad({"clicks": [[1], [2, 3]]}, error=TypeError, says=("clicks", "embed.to_padded")),
  "masked": Bad(
    {"clicks": np.ma.masked_array([1, 2], [False, True])}, says=("clicks", "filled(-1)")
  ),
  "one-id-too-many": Bad(
    {"clicks": embed.Ragged(dense(1, 2, 3, 4, 5), dense(0, 2, 5), max_valency=2)},
    says=("clicks", "bag 1 has 3 ids", "max_valency=2"),
  ),
  "sparse-transposed": Bad(
    {"clicks": embed.Sparse(np.array([[0, 0, 1], [0, 1, 0]]), dense(1, 2, 3), (2, 2))},
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
  "string": Bad({"clicks": np.array(["a"])}, says=("clicks",)),
  "unknown-feature": Bad({"clicks": dense(1), "klicks": dense(1)}, says=("klicks",)),
  "unknown-weights": Bad({"clicks": ragged()}, {"klicks": ragged(dtype=f32)}, says=("klicks",)),
  "weights-dense": Bad({"clicks": dense(1, 2)}, {"clicks": np.ones(2, f32)}, says=("clicks",)),
  "weights-sequence": Bad({"history": ragged()}, {"history": ragged(dtype=f32)}, says=("history",)),
  "weights-kind": Bad(
    {"clicks": embed.Padded(dense([1, 2]))}, {"clicks": ragged(dtype=f32)}, says=("clicks",)
  ),
  "dense-sequence": Bad({"history": dense(1, 2)}, says=("history",)),
  "weights-other-splits": Bad(
    {"clicks": embed.Ragged([1, 2, 3], [0, 1, 3])},
    {"clicks": embed.Ragged(np.ones(3), [0, 2, 3])},
    says=("clicks", "different row_splits"),
  ),
  "weights-other-indices": Bad(
    {"clicks": embed.Sparse([[0, 0], [1, 1]], [1, 2], (2, 2))},
    {"clicks": embed.Sparse([[0, 0], [1, 0]], np.ones(2), (2, 2))},
    says=("clicks", "different indices"),
  ),
  # Differences of unsigned integers are never negative.
  "splits-decrease": Bad(
    {"clicks": embed.Ragged(np.array([5, 6, 7]), np.array([0, 2, 1], np.uint8))},
    says=("clicks", "never decrease", "Got [0, 2, 1]"),
  ),
  "weights-of-an-absent-feature": Bad(
    {"clicks": dense(1)}, {"history": ragged(dtype=f32)}, says=("history",)
  ),
  "nested-path": Bad(
    {"user": [dense(0), dense(11)]},
    says=("user", "1", "11"),
    config={"user": [FC(), FC(TC(vocabulary_size=10, name="u"))]},
  ),
}


def check_bad_input(bad):
  with pytest.raises(bad.error) as error:
    embed.validate(config() if bad.config is None else bad.config, bad.features, bad.weights)
  for word in bad.says:
    assert word in str(error.value), f"{word!r} is missing from: {error.value}"


def test_bad_input():
  cases.each({name: (bad,) for name, bad in BAD.items()}, check_bad_input)


GOOD = [
  ({"clicks": dense(1, 9)}, None),
  ({"clicks": [1, 9]}, None),
  ({"clicks": []}, None),
  ({"clicks": np.zeros(0, np.int32)}, {"clicks": None}),
  ({"clicks": embed.Padded([[1, -1], [2, 9]])}, {"clicks": embed.Padded([[1.0, 0.0], [2, 3]])}),
  ({"clicks": ragged(np.int64((1, 2, 9)), dtype=np.int64)}, None),
  ({"history": sparse()}, None),
  ({"clicks": dense(-7, -1)}, None),
  ({}, None),
]


def check_good_input(features, weights):
  embed.validate(config(), features, weights)
  activations = nnx.eval_shape(lambda: SE(config(), embed.sgd())(features, weights))
  assert set(activations) == set(features)


def test_good_input():
  cases.each(GOOD, check_good_input)


def test_bad_ids_are_dropped_and_counted_under_jit():
  """Two too large ids and one padding id: zeros out, no gradient, a count of two."""
  layer = layers.one_table()
  values = np.array([[1, V], [2**31 - 1, -1], [3, 4]], np.int32)
  cotangents = np.array([[1, 2, 0], [4, 8, 0], [16, 32, 0]], f32)

  def loss_fn(layer, values):
    activations = layer(embed.Padded(values))
    return jnp.sum(activations * cotangents), activations

  @nnx.jit
  def differentiate(layer, values):
    (_, activations), grads = embed.value_and_grad(loss_fn, has_aux=True)(layer, values)
    return activations, grads.rows["t"].ids, grads.rows["t"].values

  activations, ids, values = differentiate(layer, values)
  assert int(layer.report["dropped_ids"]) == 2
  rows = layers.ROWS
  np.testing.assert_array_equal(activations, [rows[1], np.zeros(D), rows[3] + rows[4]])
  used = {
    row: value.tolist() for row, value in zip(np.asarray(ids), values, strict=True) if row < V
  }
  assert used == {1: [1, 2, 0], 3: [16, 32, 0], 4: [16, 32, 0]}


def test_numpy_jax_and_lists_are_one():
  layer = layers.one_table()
  ids = [[1, 2], [3, -1]]
  padded = (ids, np.array(ids, np.int8), np.array(ids, np.int64), jnp.array(ids))
  single = ([1, 2], np.array([1, 2], np.uint64), jnp.array([1, 2], jnp.uint32))

  @nnx.jit
  def look_up(layer):
    return [layer(embed.Padded(x)) for x in padded], [layer(x) for x in single]

  of_padded, of_single = look_up(layer)
  for act in of_padded:
    np.testing.assert_array_equal(act, [layers.ROWS[1] + layers.ROWS[2], layers.ROWS[3]])
  for act in of_single:
    np.testing.assert_array_equal(act, layers.ROWS[1:3])


def test_int64_ids_without_validation_are_dropped_not_wrapped():
  """2**33 + 5 would become 5 on the way to the device."""
  layer = layers.one_table(feature={"validate_weights_and_indices": False})
  assert not layer(np.array([BIG])).any()
  assert int(layer.report["dropped_ids"]) == 1


def test_to_padded_checks_its_bags_and_keeps_the_kind_of_no_values():
  cases_of_bags = [
    ([3, 7], r"takes a list of bags, such as \[\[3, 7\], \[5\]\]. Got 3"),
    ([[[3], [7]]], "takes a list of bags"),
    ([[2**70]], "floats, or integers that fit int64"),
    ([["a"]], "floats, or integers that fit int64. Got dtype <U1"),
  ]
  cases.refused(cases_of_bags, embed.to_padded)
  wrong = [(most, "`max_valency` must be an int") for most in (-1, 0, 2.0, "2", True)]
  cases.refused(wrong, lambda most: embed.Ragged([1], [0, 1], most))
  cases.refused(wrong, lambda most: embed.to_padded([[1]], most))
  padded = embed.to_padded(embed.Ragged([], [0, 0, 0]))
  assert (padded.values.dtype, padded.values.tolist()) == (np.int32, [[-1], [-1]])


def test_activations_do_not_depend_on_the_size_of_the_weights():
  """Their sum and the sum of their squares are no float32 for some of these; a bag may weigh 0."""
  exponents = np.array([-126, -100, -64, 0, 64, 100, 126])
  weights = np.ldexp(np.array([1, 2, 1.5], f32), exponents[:, None])
  weights = np.concatenate([weights, np.zeros((1, 3), f32)])
  ids, splits = np.tile([1, 2, 3], (len(weights), 1)), np.arange(0, 25, 3)
  exact = weights.astype(np.float64)
  totals = {"mean": exact.sum(1), "sqrtn": np.sqrt((exact**2).sum(1))}
  for combiner, total in totals.items():
    layer = layers.one_table(combiner=combiner)
    gains = exact / np.where(total == 0, 1, total)[:, None]
    wanted = gains @ layers.ROWS[1:4]
    padded = layers.predict(layer, embed.Padded(ids), embed.Padded(weights))
    flat = embed.Ragged(ids.reshape(-1), splits), embed.Ragged(weights.reshape(-1), splits)
    for act in (padded, layers.predict(layer, *flat)):
      np.testing.assert_allclose(act, wanted, rtol=1e-6, err_msg=combiner)


# --- one conversion to int32 ----------------------------------------------------------------------

narrow_on_device = jax.jit(lambda ids: narrow(ids, V))


@given(st.data(), st.sampled_from([np.int8, np.uint8, np.uint32, np.int64, np.uint64]))
def test_no_id_becomes_another_one(data, dtype):
  """Rows stay, negative ids stay negative, and what is beyond the table stays beyond it."""
  limits = np.iinfo(dtype)
  edges = [0, 5, V - 1, V, 2**31 - 1, 2**31, 2**32 + 5, 5 - 2**32, limits.min, limits.max]
  some = st.sampled_from([n for n in edges if limits.min <= n <= limits.max])
  one = some | st.integers(int(limits.min), int(limits.max))
  ids = data.draw(st.lists(one, min_size=8, max_size=8))  # of one length: one program a type
  given = np.array(ids, dtype)
  with jax.enable_x64(True):
    on_device = narrow_on_device(given)
  for narrowed in (narrow(given, V), np.asarray(on_device), narrow(given)):
    assert narrowed.dtype == np.int32
    for before, after in zip(ids, narrowed.tolist(), strict=True):
      assert after == before if 0 <= before < V else after < 0 if before < 0 else after >= V


def test_to_padded_makes_no_row_of_an_id_that_is_none():
  assert embed.to_padded([[5 - 2**32, 7]]).values.tolist() == [[-1, 7]]
  wide = embed.to_padded([[2**32 + 5, 7]]).values
  assert (wide.dtype, wide.tolist()) == (np.int64, [[2**32 + 5, 7]])
  large = np.array([2**63 + 5, 7], np.uint64)
  for bags in ([large], [large, [3]], embed.Ragged(large, [0, 2])):
    with pytest.raises(ValueError, match=r"fit int64\. Got 9223372036854775813"):
      embed.to_padded(bags)
  small = np.array([2, 7], np.uint64)
  both = embed.to_padded([small, [3]]).values
  assert (both.dtype, both.tolist()) == (np.int32, [[2, 7], [3, -1]])


# Row splits and indices, as ids, may be integers of any kind.
BAGS = {  # bags [5, 6] and [7]
  "ragged": lambda x: embed.Ragged(x([5, 6, 7]), x([0, 2, 3])),
  "max_valency": lambda x: embed.Ragged(x([5, 6, 7]), x([0, 2, 3]), 2),
  "sparse": lambda x: embed.Sparse(x([[0, 0], [0, 1], [1, 1]]), x([5, 6, 7]), (2, 400)),
  "long sparse": lambda x: embed.Sparse(x([[0, 0], [0, 1], [1, 1]]), x([5, 6, 7]), (2, 2**40)),
}


def test_positions_are_integers_of_any_kind():
  config = embed.TableConfig(V, D, lambda *_: jnp.asarray(layers.ROWS), combiner="sum", name="t")
  layer = SE({kind: FC(config) for kind in BAGS})
  expected = np.stack([layers.ROWS[5] + layers.ROWS[6], layers.ROWS[7]])
  for dtype in (np.uint8, np.uint64):
    bags = {name: make(functools.partial(np.array, dtype=dtype)) for name, make in BAGS.items()}
    for kind, act in layers.predict(layer, bags).items():
      np.testing.assert_array_equal(act, expected, err_msg=kind)


def test_no_position_becomes_another_one():
  """NumPy positions of 64 bits beside ids that have no value yet, so that none is checked."""
  table = TC(vocabulary_size=V, initializer=jax.nn.initializers.ones, combiner="sum")
  layer = SE({name: FC(table) for name in ("column", "bag", "splits")})

  @nnx.jit
  def look_up(layer, ids):
    return layer(
      {
        "column": embed.Sparse(np.array([[0, 0], [0, 2**32 + 1]]), ids, (2, 4)),
        "bag": embed.Sparse(np.array([[0, 0], [2**32, 1]]), ids, (2, 4)),
        "splits": embed.Ragged(ids, np.array([0, 2**32 + 1, 2**32 + 2])),
      }
    )

  acts = {name: act[:, 0].tolist() for name, act in look_up(layer, np.array([5, 6])).items()}
  assert acts == {"column": [1, 0], "bag": [1, 0], "splits": [2, 0]}
  assert int(layer.report["dropped_ids"]) == 2


FEATURE = embed.FeatureConfig(
  embed.TableConfig(V, 1, initializer=jax.nn.initializers.ones, combiner="sum", name="t")
)
ONES = np.ones((V, 1), f32)
WAYS_IN = {
  "dense": lambda layer, x: layer(x),
  "ragged": lambda layer, x: layer(embed.Ragged(x, np.arange(len(x) + 1))),
  "padded": lambda layer, x: layer(embed.Padded(x[None])),
  "sparse": lambda layer, x: layer(
    embed.Sparse(np.stack([np.arange(len(x))] * 2, 1), x, (len(x), len(x)))
  ),
  "attend": lambda layer, x: layer.attend(np.ones((1, 1), f32), "t", x),
  "serving": lambda _, x: embed.serving_lookup(x, None, {"t": ONES}, FEATURE),
}


def test_every_way_in_leaves_row_5_alone():
  """Under jit large ids are counted, where nothing reads them; negative ones are none."""
  layer = SE(FEATURE, embed.sgd(1.0))
  ids = np.array([2**32 + 5, 2**63 - 1, 5 - 2**32, -(2**63), -1])  # cut to 32 bits, row 5 or -1
  run = nnx.jit(lambda layer, ids: [way(layer, ids) for way in WAYS_IN.values()])
  with jax.enable_x64(True):  # else jit itself cuts its arguments to 32 bits
    for result in jax.tree.leaves(run(layer, jnp.asarray(ids))):
      assert not np.any(result)
  assert int(layer.report["dropped_ids"]) == 2 * 5  # not the update, nor serving
  np.testing.assert_array_equal(layer.tables["t"], ONES)
