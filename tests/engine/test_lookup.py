"""Corners of the lookup that the recorded cases do not reach."""

import functools
import itertools

import conformance
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from suites import slow_unless

import embed

V, D = 11, 3


def make(combiner="mean", **table):
  config = embed.TableConfig(V, D, combiner=combiner, name="t", **table)
  return embed.SparseEmbed(embed.FeatureConfig(config), embed.adagrad(0.1), rngs=nnx.Rngs(0))


@pytest.mark.ci
@pytest.mark.parametrize(
  ("weighted", "length", "combiner"),
  slow_unless(
    itertools.product([False, True], [1, 2, 8, 9, 50], ["sum", "mean", "sqrtn"]),
    lambda *case: case in ((True, 2, "mean"), (True, 9, "sqrtn"), (False, 50, "sum")),
  ),
)
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


@pytest.mark.ci
@pytest.mark.parametrize("name", slow_unless(EMPTY, ("no bags", "no ids").__contains__))
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


def custom_mean(valency, vectors, weights):
  del weights
  return vectors.sum(0) / valency


@pytest.mark.ci
@pytest.mark.parametrize(
  ("combiner", "settings"),
  slow_unless(
    [
      ("mean", {}),
      ("sqrtn", {"use_gradient_accumulation": False}),
      (embed.CustomCombiner(custom_mean, max_valency=3), {}),
    ],
    lambda combiner, settings: combiner == "mean",
  ),
  ids=["mean", "sqrtn", "custom"],
)
def test_features_without_ids_beside_one_that_has_some(combiner, settings):
  table = embed.TableConfig(
    V, D, optimizer=embed.adagrad(0.1, **settings), combiner=combiner, name="t"
  )
  inputs = harness.without_ids()
  features = {name: embed.FeatureConfig(table, **kw) for name, (_, _, kw) in inputs.items()}
  features["some"] = embed.FeatureConfig(table)
  some = {"some": embed.Padded(np.arange(16).reshape(8, 2) % V)}
  batch = {name: x for name, (x, _, _) in inputs.items()} | some
  weights = {name: w for name, (_, w, _) in inputs.items()}
  make = lambda: embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  loss_fn = lambda layer, batch, weights: sum(
    jnp.sum(act**2) for act in layer(batch, weights).values()
  )

  @nnx.jit
  def step(layer, batch, weights):
    ahead = embed.look_ahead(loss_fn)(layer, batch, weights)
    loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(layer, batch, weights)
    grads = embed.accumulate([embed.clip_by_global_norm(grads, 1.0)] * 2).map(lambda g: g / 2)
    embed.Optimizer(layer, optax.sgd(0.1)).update(layer, grads)
    activations, residual = layer.lookup(batch, weights)
    layer.apply_gradients(jax.tree.map(jnp.ones_like, activations), residual)
    return loss, activations, grads.rows["t"].values

  embed.validate(features, batch, weights)
  layer, alone = make(), make()
  loss, activations, _ = step(layer, batch, weights)
  wanted, found, _ = step(alone, some, None)
  assert loss == wanted != 0
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  close(activations["some"], found["some"])
  for name, act in activations.items():
    assert name == "some" or not np.any(act), name
  jax.tree.map(close, layer.variables, alone.variables)
  assert layer.report["dropped_ids"] == 0
  served = embed.serving_lookup(batch, weights, layer.tables, features)
  close(served["some"], layer(some)["some"])
  exported = embed.export(lambda layer, batch: layer(batch), layer, batch)
  shapes = [act.shape for act in jax.tree.leaves(activations)]
  assert [aval.shape for aval in exported.program.out_avals] == shapes


@pytest.mark.ci
def test_scores_of_no_candidates():
  layer, query = make("sum"), jnp.ones((2, D))

  def loss_fn(layer):
    shared = layer.attend(query, "t", np.zeros(0, np.int32))
    own = layer.attend(query, "t", np.zeros((2, 0), np.int32))
    nobody = layer.attend(query[:0], "t", np.zeros((0, 3), np.int32))
    assert (shared.shape, own.shape, nobody.shape) == ((2, 0), (2, 0), (0, 3))
    rest = layer.attend(query[:0], "t")
    return shared.sum() + own.sum() + nobody.sum() + rest.sum() + layer(np.array([3])).sum()

  _, grads = embed.value_and_grad(loss_fn)(layer)
  assert embed.global_norm(grads) == np.float32(np.sqrt(D))


QUANTIZED = conformance.load("quantization")["cases"]
ROWS = [case for case in QUANTIZED if "x" in case]


@pytest.mark.ci
@pytest.mark.parametrize(
  "case",
  slow_unless(ROWS, lambda case: case is ROWS[0]),
  ids=lambda c: c["num_buckets"],
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


@pytest.mark.ci
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


def test_load_tables_copies():
  layer = make()
  rows = jnp.ones((V, D))
  layer.load_tables({"t": rows})
  train = nnx.jit(
    lambda m: m.apply_row_gradients({"t": embed.RowGrads([1], np.ones((1, D)))}), donate_argnums=0
  )
  train(layer)
  assert (rows == 1).all(), "the caller's array was donated"


def sparse_by_hand(x, combiner, length):
  """What a `Sparse` means, entry by entry: (rows summed or apart, `to_padded`); None is refused.

  A negative id is no entry, whatever its index; a sequence and `to_padded` have one place for each
  index.
  """
  entries = [(tuple(i), v) for i, v in zip(x.indices.tolist(), x.values.tolist(), strict=True)]
  entries = [(index, v) for index, v in entries if v >= 0]
  table, batch = np.eye(V, D, dtype=np.float32) + np.arange(V)[:, None], x.dense_shape[0]
  padded = np.full(x.dense_shape, -1)
  for index, v in entries:
    padded[index] = v
  padded = padded if len({index for index, _ in entries}) == len(entries) else None
  if length:
    rows = np.where(padded[..., None] >= 0, table[padded], 0) if padded is not None else None
    return table, rows if rows is None else rows[:, :length], padded
  sums, number = np.zeros((batch, D)), np.zeros((batch, 1))
  for (bag, _), v in entries:
    sums[bag] += table[v]
    number[bag] += 1
  return table, sums / np.maximum(number, 1) if combiner == "mean" else sums, padded


def refusal(f):
  """The result of `f`, None if it is refused."""
  try:
    return f()
  except ValueError as e:
    assert "holds one" in str(e)  # noqa: PT017
    return None


@pytest.mark.ci
@pytest.mark.parametrize(("combiner", "length"), [("mean", 0), ("sum", 3)])
def test_a_sparse_means_the_same_everywhere(combiner, length):
  """Eagerly, under jit, to_padded, validate and served; padding at the place of an id included."""
  rng = np.random.default_rng(0)
  table = embed.TableConfig(V, D, combiner=combiner, name="t")
  features = embed.FeatureConfig(table, max_sequence_length=length)
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  jitted = nnx.jit(lambda layer, x: layer(x))
  refused = 0
  for trial in range(24):
    cells = rng.permutation(20)[:9]
    cells[-1] = cells[0]  # two values of one index
    values = rng.integers(-1, V, 9)
    if trial % 3:
      values[(0, -1)[trial % 2]] = -1
    x = embed.Sparse(np.argwhere(np.ones((5, 4)))[cells], values, (5, 4))
    if trial % 4 == 0:
      x.values[4], x.indices[4] = -1, (-1, 99)
    rows, wanted, padded = sparse_by_hand(x, combiner, length)
    layer.load_tables({"t": rows})
    before = int(layer.report["dropped_ids"])
    found = np.asarray(jitted(layer, x))
    dropped = int(layer.report["dropped_ids"]) - before
    eager = refusal(lambda x=x: layer(x))
    served = refusal(lambda x=x: embed.serving_lookup(x, None, layer.tables, features))
    valid = refusal(lambda x=x: embed.validate(features, x) or True)
    laid_out = refusal(lambda x=x: embed.to_padded(x).values)
    assert (laid_out is None) == (padded is None)
    if padded is not None:
      np.testing.assert_array_equal(laid_out, padded)
    assert (eager is None) == (served is None) == (valid is None) == (wanted is None)
    if wanted is None:
      refused += 1
      assert dropped == (x.indices[0, 1] < length)  # beyond it, both are cut
    else:
      assert dropped == 0
      for act in (found, eager, served):
        np.testing.assert_allclose(act, wanted, rtol=1e-5)
  assert (refused > 0) == (length > 0)


IDS = np.arange(4)
WRONG = {
  "a dict for a feature": (
    None,
    {"a": IDS},
    TypeError,
    "got dict.*structure of the feature config",
  ),
  "a tuple for a feature": (None, (IDS, IDS), TypeError, "tuple of arrays for one feature"),
  "a list for a feature": (["a"], [[IDS, IDS]], TypeError, "list of arrays for one feature"),
  "one of two": (["a", "b"], [IDS], ValueError, "expected 2 entries"),
  "a dict below a padded": (None, embed.Padded({"a": IDS}), TypeError, "got dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_structure_is_refused(name):
  names, batch, error, message = WRONG[name]
  feature = embed.FeatureConfig(embed.TableConfig(V, D, name="t"))
  features = feature if names is None else [feature for _ in names]
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  with pytest.raises(error, match=message):
    layer(batch)
  with pytest.raises(error, match=message):
    embed.validate(features, batch)
