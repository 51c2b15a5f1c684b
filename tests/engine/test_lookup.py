"""Corners of the lookup that the recorded cases do not reach."""

import functools

import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
import ways
from flax import nnx
from layers import D, V

import embed

# Longer bags than 8 go through a loop, with a remainder or without.
LENGTHS = {1: "mean", 2: "mean", 8: "sqrtn", 9: "sqrtn", 50: "sum"}


@pytest.mark.parametrize("way", ways.EACH, indirect=True)
def test_bags_of_any_length(way):
  """Padding anywhere in the bag; all but the longest are weighted."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(V, D)).astype(np.float32)
  initializer = lambda key, shape, dtype: rows.astype(dtype)
  tables = [
    embed.TableConfig(V, D, initializer, embed.adagrad(0.1), combiner, f"t{length}")
    for length, combiner in LENGTHS.items()
  ]
  layer = embed.SparseEmbed([embed.FeatureConfig(t) for t in tables], rngs=nnx.Rngs(0))
  bags, weights, cotangents, activations, gradients = [], [], [], [], []
  for length, combiner in LENGTHS.items():
    ids = np.where(rng.random((4, length)) < 0.3, -1, rng.integers(0, V, (4, length)))
    ids[3] = -1
    w = rng.normal(size=(4, length)) if length < 50 else np.ones((4, length))
    cotangent = rng.normal(size=(4, D)).astype(np.float32)
    bags.append(embed.Padded(ids.astype(np.int32)))
    weights.append(embed.Padded(w.astype(np.float32)) if length < 50 else None)
    w = np.where(ids < 0, 0, w)
    norm = {"sum": np.ones(4), "mean": w.sum(1), "sqrtn": np.sqrt((w * w).sum(1))}[combiner]
    gains = (w / np.where(norm == 0, 1, norm)[:, None])[..., None]
    activations.append((gains * rows.astype(np.float64)[ids]).sum(1))
    dense = np.zeros((V + 1, D))
    np.add.at(dense, ids, gains * cotangent[:, None])  # padding's, the last, is 0
    cotangents.append(cotangent)
    gradients.append(dense[:V])

  @nnx.jit
  def run(layer, bags, weights):
    def loss_fn(layer):
      found = layer(bags, weights)
      return sum(jnp.sum(act * c) for act, c in zip(found, cotangents, strict=True)), found

    (_, found), grads = embed.value_and_grad(loss_fn, has_aux=True)(layer)
    return found, {name: (g.ids, g.values) for name, g in grads.rows.items()}

  found, of_rows = jax.tree.map(np.asarray, run(layer, bags, weights))
  for table, act, wanted, gradient in zip(tables, found, activations, gradients, strict=True):
    np.testing.assert_allclose(act, wanted, rtol=1e-4, atol=1e-5, err_msg=table.name)
    dense, (ids, values) = np.zeros((V + 1, D)), of_rows[table.name]
    np.add.at(dense, ids, values)
    np.testing.assert_allclose(dense[:V], gradient, rtol=1e-4, atol=1e-4, err_msg=table.name)


EMPTY = [
  embed.Padded(np.zeros((0, 3), np.int32)),
  embed.Ragged(np.zeros(0, np.int32), np.zeros(3, np.int32)),
  [],
]


@pytest.mark.parametrize("way", ways.ci("rows", "lines"), indirect=True)
def test_nothing_to_look_up_trains_nothing(way):
  tables = [embed.TableConfig(V, D, optimizer=embed.adagrad(0.1), name=name) for name in "abc"]
  layer = embed.SparseEmbed([embed.FeatureConfig(t) for t in tables], rngs=nnx.Rngs(0))
  before = jax.tree.map(np.asarray, dict(layer.variables))

  @nnx.jit
  def step(layer, optimizer, bags):
    bags = [*bags, EMPTY[2]]
    loss, grads = embed.value_and_grad(lambda m: sum(jnp.sum(act) for act in m(bags)))(layer)
    optimizer.update(layer, embed.clip_by_global_norm(grads, 1.0))
    optimizer.update(layer, grads)
    return loss, embed.global_norm(grads)

  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  assert [float(x) for x in step(layer, optimizer, EMPTY[:2])] == [0, 0]
  jax.tree.map(np.testing.assert_array_equal, before, dict(layer.variables))


@pytest.mark.ci
def test_scores_of_no_candidates():
  layer, query = layers.one_table(embed.adagrad(0.1)), np.ones((2, D), np.float32)

  def loss_fn(layer):
    shared = layer.attend(query, "t", np.zeros(0, np.int32))
    own = layer.attend(query, "t", np.zeros((2, 0), np.int32))
    nobody = layer.attend(query[:0], "t", np.zeros((0, 3), np.int32))
    assert (shared.shape, own.shape, nobody.shape) == ((2, 0), (2, 0), (0, 3))
    rest = layer.attend(query[:0], "t")
    return shared.sum() + own.sum() + nobody.sum() + rest.sum() + layer(np.array([3])).sum()

  norm = nnx.jit(lambda layer: embed.global_norm(embed.value_and_grad(loss_fn)(layer)[1]))
  assert norm(layer) == np.float32(np.sqrt(D))


@pytest.mark.parametrize("way", ["rows", *ways.ci("lines")], indirect=True)
def test_bfloat16_tables_keep_float32_slots_and_sums(way):
  initializer = lambda key, shape, dtype: np.full(shape, 0.75, dtype)
  table = embed.TableConfig(
    V, D, initializer, embed.adagrad(0.1), "sum", "t", dtype=jnp.bfloat16, stochastic_rounding=False
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  assert layer.variables["t"]["accumulators"].dtype == jnp.float32

  @nnx.jit
  def step(layer, ids):
    def loss_fn(layer):
      found = layer(ids)
      return jnp.sum(found), found

    (_, found), grads = embed.value_and_grad(loss_fn, has_aux=True)(layer)
    embed.Optimizer(layer, optax.identity()).update(layer, grads)
    return found

  found = step(layer, embed.Padded(np.full((1, 256), 3, np.int32)))
  assert found.dtype == jnp.float32
  assert found.tolist() == [[192.0] * D]  # bfloat16 sums would stall before
  rows = np.asarray(layer.tables["t"])
  wanted = np.full((V, D), 0.75, np.float32)
  wanted[3] -= np.float32(0.1) * 256 / np.sqrt(np.float32(0.1 + 256**2))
  np.testing.assert_array_equal(rows, wanted.astype(rows.dtype))
  np.testing.assert_allclose(layer.variables["t"]["accumulators"][3], 0.1 + 256**2, rtol=1e-6)


def test_row_gradients_of_a_bfloat16_table_are_float32():
  """Three times 1.003, which bfloat16 would round to 1."""
  layer = layers.one_table(dtype=jnp.bfloat16)
  loss = lambda layer: 1.003 * jnp.sum(layer(np.array([2, 2, 2])))
  values = nnx.jit(lambda layer: embed.value_and_grad(loss)(layer)[1].rows["t"].values)(layer)
  np.testing.assert_allclose(values[0], 3.009, rtol=1e-6)


NUMBERED = (np.eye(V, D) + np.arange(V)[:, None]).astype(np.float32)


# Pairs of index and value of a `Sparse` of shape (2, 4): the rows of bag 0 that are meant, and of
# its sequence; None where two values have one place, which a sequence refuses.
SPARSE = {
  "in no order": ([((0, 2), 5), ((0, 0), 3)], [3, 5], [3, -1, 5, -1]),
  "twice one value": ([((0, 0), 3), ((0, 1), 3)], [3, 3], [3, 3, -1, -1]),
  "padding beside an id": ([((0, 1), -1), ((0, 1), 4)], [4], [-1, 4, -1, -1]),
  "padding outside": ([((-1, 99), -1), ((0, 3), 7)], [7], [-1, -1, -1, 7]),
  "two ids at one place": ([((0, 1), 3), ((0, 1), 5)], [3, 5], None),
}


def refusal(f):
  """The result of `f`, None if it is refused."""
  try:
    return f()
  except ValueError as e:
    assert "holds one" in str(e)  # noqa: PT017
    return None


@pytest.mark.parametrize(
  "way", ["rows", *ways.ci("lines"), *ways.weekly("sparse_cores")], indirect=True
)
def test_a_sparse_means_the_same_everywhere(way):
  """Under jit, validate and served; as bags and as sequences of three."""
  initializer = lambda key, shape, dtype: NUMBERED.astype(dtype)
  table = embed.TableConfig(V, D, initializer, embed.sgd(), "mean", "t")
  bags = {"bag": embed.FeatureConfig(table)}
  sequences = {"sequence": embed.FeatureConfig(table, max_sequence_length=3)}
  layer = embed.SparseEmbed(bags | sequences, rngs=nnx.Rngs(0))

  @nnx.jit
  def look_up(layer, x):
    before = layer.report["dropped_ids"][...]
    return layer({"bag": x, "sequence": x}), layer.report["dropped_ids"][...] - before

  def serve(features, x):
    (name,) = features
    return embed.serving_lookup({name: x}, None, {"t": NUMBERED}, features)[name]

  serve_bags, serve_sequences = (
    jax.jit(functools.partial(serve, features)) for features in (bags, sequences)
  )
  for name, (entries, rows, padded) in SPARSE.items():
    indices, values = (np.array(x) for x in zip(*entries, strict=True))
    x = embed.Sparse(indices, values, (2, 4))
    act, dropped = look_up(layer, x)
    np.testing.assert_allclose(act["bag"][0], NUMBERED[rows].mean(0), rtol=1e-5, err_msg=name)
    assert not np.any(act["bag"][1]), name
    np.testing.assert_allclose(serve_bags(x), act["bag"], rtol=1e-5, err_msg=name)
    embed.validate(bags, {"bag": x})
    one = {"sequence": x}
    assert dropped == (padded is None), name
    if padded is None:
      assert refusal(lambda one=one: embed.validate(sequences, one) or True) is None
      assert refusal(lambda x=x: serve(sequences, x)) is None
      continue
    wanted = [NUMBERED[row] if row >= 0 else np.zeros(D) for row in padded[:3]]
    np.testing.assert_allclose(act["sequence"][0], wanted, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(serve_sequences(x)[0], wanted, rtol=1e-5, err_msg=name)
    embed.validate(sequences, one)
