"""Corners of the lookup that the recorded cases do not reach."""

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


def test_load_tables_copies():
  layer = layers.one_table(embed.adagrad(0.1))
  rows = jnp.ones((V, D))
  layer.load_tables({"t": rows})
  train = nnx.jit(lambda m: layers.step(m, np.array([1]), np.ones((1, D))), donate_argnums=0)
  train(layer)
  assert (rows == 1).all(), "the caller's array was donated"


NUMBERED = (np.eye(V, D) + np.arange(V)[:, None]).astype(np.float32)


def sparse_by_hand(x, combiner, length):
  """What a `Sparse` means, entry by entry: (rows summed or apart, `to_padded`); None is refused.

  A negative id is no entry, whatever its index; a sequence and `to_padded` have one place for each
  index.
  """
  entries = [(tuple(i), v) for i, v in zip(x.indices.tolist(), x.values.tolist(), strict=True)]
  entries = [(index, v) for index, v in entries if v >= 0]
  padded = np.full(x.dense_shape, -1)
  for index, v in entries:
    padded[index] = v
  padded = padded if len({index for index, _ in entries}) == len(entries) else None
  if length:
    rows = np.where(padded[..., None] >= 0, NUMBERED[padded], 0) if padded is not None else None
    return rows if rows is None else rows[:, :length], padded
  sums, number = np.zeros((x.dense_shape[0], D)), np.zeros((x.dense_shape[0], 1))
  for (bag, _), v in entries:
    sums[bag] += NUMBERED[v]
    number[bag] += 1
  return sums / np.maximum(number, 1) if combiner == "mean" else sums, padded


def refusal(f):
  """The result of `f`, None if it is refused."""
  try:
    return f()
  except ValueError as e:
    assert "holds one" in str(e)  # noqa: PT017
    return None


@pytest.mark.parametrize(
  ("way", "combiner", "length"),
  [
    ("rows", "mean", 0),
    *[
      pytest.param(*case, marks=pytest.mark.ci)
      for case in (("rows", "sum", 3), ("lines", "mean", 0))
    ],
    pytest.param("sparse_cores", "mean", 0, marks=pytest.mark.weekly),
  ],
  indirect=["way"],
)
def test_a_sparse_means_the_same_everywhere(way, combiner, length):
  """Under jit, to_padded, validate and served; padding at the place of an id included."""
  rng = np.random.default_rng(0)
  initializer = lambda key, shape, dtype: NUMBERED.astype(dtype)
  table = embed.TableConfig(V, D, initializer, embed.sgd(), combiner, "t")
  features = embed.FeatureConfig(table, max_sequence_length=length)
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))

  @nnx.jit
  def look_up(layer, x):
    dropped = layer.report["dropped_ids"][...]
    return layer(x), layer.report["dropped_ids"][...] - dropped

  refused, serve = 0, lambda x: embed.serving_lookup(x, None, {"t": NUMBERED}, features)
  for trial in range(8):
    cells = rng.permutation(20)[:9]
    cells[-1] = cells[0]  # two values of one index
    values = rng.integers(-1, V, 9)
    if trial % 3:
      values[(0, -1)[trial % 2]] = -1
    x = embed.Sparse(np.argwhere(np.ones((5, 4)))[cells], values, (5, 4))
    if trial % 4 == 0:
      x.values[4], x.indices[4] = -1, (-1, 99)
    wanted, padded = sparse_by_hand(x, combiner, length)
    found, dropped = look_up(layer, x)
    valid = refusal(lambda x=x: embed.validate(features, x) or True)
    laid_out = refusal(lambda x=x: embed.to_padded(x).values)
    assert (laid_out is None) == (padded is None)
    if padded is not None:
      np.testing.assert_array_equal(laid_out, padded)
    assert (valid is None) == (wanted is None)
    if wanted is None:
      refused += 1
      assert dropped == (x.indices[0, 1] < length)  # beyond it, both are cut
      assert refusal(lambda x=x: serve(x)) is None
    else:
      assert dropped == 0
      np.testing.assert_allclose(found, wanted, rtol=1e-5)
      if trial == 7:
        np.testing.assert_allclose(jax.jit(serve)(x), wanted, rtol=1e-5)
  assert (refused > 0) == (length > 0)
