"""Corners of the lookup that the recorded cases do not reach."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed

V, D = 11, 3


def make(combiner="mean", **table):
  config = embed.TableConfig(V, D, combiner=combiner, name="t", **table)
  return embed.SparseEmbed(embed.FeatureConfig(config), embed.adagrad(0.1), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 50])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_any_length(combiner, length, weighted):
  """Padding anywhere in the bag; longer bags go through a loop, with a remainder or without."""
  rng = np.random.default_rng(length)
  layer = make(combiner)
  table = np.asarray(layer.tables["t"], np.float64)
  ids = np.where(rng.random((4, length)) < 0.3, -1, rng.integers(0, V, (4, length)))
  ids[3] = -1
  weights = rng.normal(size=(4, length)).astype(np.float32) if weighted else None
  w = np.where(ids < 0, 0, np.ones(ids.shape) if weights is None else weights).astype(np.float64)
  norm = {"sum": np.ones(4), "mean": w.sum(1), "sqrtn": np.sqrt((w * w).sum(1))}[combiner]
  gains = w / np.where(norm == 0, 1, norm)[:, None]
  wanted = np.einsum("bl,bld->bd", gains, table[ids])
  given = None if weights is None else embed.Padded(weights)
  act = nnx.jit(lambda m, x, w: m(x, w))(layer, embed.Padded(ids), given)
  np.testing.assert_allclose(act, wanted, rtol=1e-4, atol=1e-5)

  cotangent = rng.normal(size=(4, D)).astype(np.float32)
  loss = lambda m, x, w: jnp.sum(m(x, w) * cotangent)
  _, grads = nnx.jit(embed.value_and_grad(loss))(layer, embed.Padded(ids), given)
  dense, expected = np.zeros((V + 1, D)), np.zeros((V + 1, D))
  rows = grads.rows["t"]
  np.add.at(dense, np.asarray(rows.ids), np.asarray(rows.values))
  np.add.at(expected, np.where(ids < 0, V, ids), gains[..., None] * cotangent[:, None])
  np.testing.assert_allclose(dense[:V], expected[:V], rtol=1e-4, atol=1e-4)


EMPTY = {
  "no bags": lambda: embed.Padded(np.zeros((0, 3), np.int32)),
  "no places": lambda: embed.Padded(np.zeros((2, 0), np.int32)),
  "no ids": lambda: embed.Ragged(np.zeros(0, np.int32), np.zeros(3, np.int32)),
  "no entries": lambda: embed.Sparse(np.zeros((0, 2), np.int32), [], (2, 3)),
  "a list": list,
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_look_up_trains_nothing(name):
  layer, x = make(), EMPTY[name]()
  before = jax.tree.map(np.asarray, layer.variables)
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  loss, grads = embed.value_and_grad(lambda m: jnp.sum(m(x)))(layer)
  assert loss == 0
  assert embed.global_norm(grads) == 0
  optimizer.update(layer, embed.clip_by_global_norm(grads, 1.0))
  optimizer.update(layer, grads)
  jax.tree.map(np.testing.assert_array_equal, before, dict(layer.variables))


QUANTIZED = conformance.load("quantization")["cases"]


@pytest.mark.parametrize(
  "case", [case for case in QUANTIZED if "x" in case], ids=lambda c: c["num_buckets"]
)
def test_quantized_rows(case):
  """Rows are quantized before the combiner; the gradient passes as if they were not."""
  x, wanted = case["x"], case["expected"]
  quantization = embed.QuantizationConfig(case["num_buckets"], case["lower"], case["upper"])
  table = embed.TableConfig(
    len(x), 1, combiner="sum", quantization_config=quantization, optimizer=embed.sgd(), name="t"
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  layer.load_tables({"t": x[:, None]})
  ids = embed.Padded(np.stack([np.arange(len(x)), np.full(len(x), -1)], axis=1))
  np.testing.assert_allclose(layer(ids)[:, 0], wanted, rtol=1e-6, atol=1e-6)
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m(ids)))(layer)
  assert (grads.rows["t"].values[: len(x)] == 1).all()
  np.testing.assert_array_equal(layer.tables["t"][:, 0], x)


def test_quantized_rows_are_combined():
  (case,) = [case["combined"] for case in QUANTIZED if "combined" in case]
  quantization = embed.QuantizationConfig(case["num_buckets"], case["lower"], case["upper"])
  vocabulary_size, dim = case["params"].shape
  table = embed.TableConfig(
    vocabulary_size, dim, combiner=case["combiner"], quantization_config=quantization, name="t"
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  layer.load_tables({"t": case["params"]})
  act = layer(embed.Padded(case["ids"]))
  np.testing.assert_allclose(act, case["expected"], rtol=1e-5, atol=1e-6)


def test_bfloat16_tables_keep_float32_slots_and_sums():
  layer = make("sum", dtype=jnp.bfloat16)
  assert layer.tables["t"].dtype == jnp.bfloat16
  assert layer.variables["t"]["accumulators"].dtype == jnp.float32
  ids = embed.Padded(np.full((1, 256), 3))
  wanted = jnp.asarray(256 * layer.tables["t"][3].astype(jnp.float32), jnp.bfloat16)
  np.testing.assert_array_equal(layer(ids)[0], wanted)  # bfloat16 sums would stall at 256 ulps
  before = np.asarray(layer.tables["t"].astype(jnp.float32))
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m(ids).astype(jnp.float32)))(layer)
  optimizer.update(layer, grads)
  after = np.asarray(layer.tables["t"].astype(jnp.float32))
  np.testing.assert_allclose(after[3], before[3] - 0.1, atol=0.01)
  np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


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


def test_load_tables_copies():
  layer = make()
  rows = jnp.ones((V, D))
  layer.load_tables({"t": rows})
  train = nnx.jit(
    lambda m: m.apply_row_gradients({"t": embed.RowGrads([1], np.ones((1, D)))}), donate_argnums=0
  )
  train(layer)
  assert (rows == 1).all(), "the caller's array was donated"
