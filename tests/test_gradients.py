"""Gradients as a tree: what may be done to it, clipping and microbatches, and rows by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nested_model import A, B, D, Model, V, twice

import embed


def one_table(size, dim, optimizer=None, **config):
  """A layer of one table "t"."""
  table = embed.TableConfig(size, dim, optimizer=optimizer or embed.sgd(), name="t", **config)
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))


@pytest.mark.ci
def test_microbatches_clipping_and_loss_scaling_equal_dense_training():
  """Two microbatches of a scaled loss, unscaled and clipped together, against plain JAX."""
  model = Model()
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  table, kernel = model.inner["e"].tables["t"], model.out.kernel[...]

  def plain(params, ids):
    t, k = params
    return jnp.sum(jnp.tanh(t[ids] @ k)) * 50

  parts = [jax.grad(plain)((table, kernel), ids) for ids in (A, B)]
  g = jax.tree.map(jnp.add, *parts)
  norm = optax.tree.norm(g)
  scale = jnp.minimum(1, 0.5 / norm)
  wanted = jax.tree.map(lambda p, g: p - 0.1 * scale * g, (table, kernel), g)

  scaled = embed.value_and_grad(
    lambda m, ids: 1024 * 50 * jnp.sum(jnp.tanh(m.out(m.encode("a", ids))))
  )
  model.out.bias.set_value(jnp.zeros(1))

  @nnx.jit
  def step(model, optimizer):
    grads = embed.accumulate([scaled(model, ids)[1] for ids in (A, B)]).map(lambda g: g / 1024)
    bias = grads.dense["out"]["bias"]
    bias.set_value(jnp.zeros_like(bias[...]))  # the reference has no bias
    clipped = embed.clip_by_global_norm(grads, 0.5)
    optimizer.update(model, clipped)
    return embed.global_norm(grads), embed.global_norm(clipped)

  before, after = step(model, optimizer)
  np.testing.assert_allclose(before, norm, rtol=1e-5)
  np.testing.assert_allclose(after, 0.5, rtol=1e-5)
  np.testing.assert_allclose(model.inner["e"].tables["t"], wanted[0], atol=1e-6)
  np.testing.assert_allclose(model.out.kernel[...], wanted[1], atol=1e-6)


@pytest.mark.ci
def test_clipped_gradients_train():
  """A step of clipped gradients is a step of the clipped dense gradient, for touched rows."""
  ids, scale = np.array([1, 2, 2]), np.array([[3.0], [4.0], [-1.0]], np.float32)

  def step(grads_of):
    layer = one_table(V, D, embed.adagrad(0.1))
    updater = embed.Optimizer(layer, optax.sgd(0.1))
    nnx.jit(lambda m, o: o.update(m, grads_of(m)))(layer, updater)
    return layer.variables["t"]

  f = embed.value_and_grad(lambda m: jnp.sum(m(ids) * scale))
  norm = np.sqrt(D * (3.0**2 + 3.0**2))
  clipped = step(lambda m: embed.clip_by_global_norm(f(m)[1], 0.5))
  rows = embed.RowGrads([1, 2], np.full((2, D), 3.0 * 0.5 / norm, np.float32))
  by_hand = step(lambda m: embed.Grads(f(m)[1].dense, {"t": rows}))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), clipped, by_hand)


def test_occurrences_stay_apart_when_mapped_and_accumulated():
  layer = one_table(V, D, embed.adagrad(0.1, use_gradient_accumulation=False))
  f = embed.value_and_grad(lambda m: jnp.sum(m(np.array([1, 1]))))
  parts = [f(layer)[1], f(layer)[1].map(lambda g: 2 * g)]
  rows = embed.accumulate(parts).rows["t"]
  assert rows.ids.tolist() == [1, 1, 1, 1]
  assert rows.values[:, 0].tolist() == [1, 1, 2, 2]


def test_rows_by_hand_may_be_none():
  none = embed.RowGrads(np.zeros(0, np.int32), np.zeros((0, D), np.float32))
  assert embed.global_norm(embed.Grads(nnx.State({}), {"t": none})) == 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_rows_are_summed_in_float32(dtype):
  """300 squared is no float16, and sums of it are no bfloat16."""
  layer = one_table(V, D)
  _, grads = embed.value_and_grad(lambda m: 300 * jnp.sum(m(np.array([1, 2]))))(layer)
  rows = {"t": grads.rows["t"].map(lambda g: g.astype(dtype))}
  narrow = embed.Grads(grads.dense, rows)
  np.testing.assert_allclose(embed.global_norm(narrow), 300 * np.sqrt(2 * D), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_arithmetic_on_the_whole_tree_is_refused(compiled):
  """It would change ids: the wrong rows would be trained."""
  model = Model()
  take = embed.value_and_grad(twice)
  _, grads = (nnx.jit(take) if compiled else take)(model)
  for wrong in (
    lambda g: jax.tree.map(lambda x: x * 2, g),
    lambda g: jax.tree.map(lambda x: x / 2, g.rows["inner/e/t"]),
    lambda g: jax.tree.map(jnp.add, g, g),
    lambda g: optax.tree.add(g, g),
    lambda g: optax.tree.norm(g),
    lambda g: optax.tree.norm(g.rows),
  ):
    with pytest.raises((TypeError, NotImplementedError)):
      wrong(grads)
    with pytest.raises((TypeError, NotImplementedError)):
      jax.jit(wrong)(grads)
  by_hand = embed.RowGrads(np.array([1, 2]), np.ones((2, D)))
  for each in (grads, by_hand):
    with pytest.raises(TypeError, match=r"grads\.map\(f\) or embed\.accumulate"):
      jax.tree.map(lambda x: x * 2, each)
  with pytest.raises(ValueError, match="integer ids"):
    embed.RowGrads([1.5], np.ones((1, D)))


def test_gradients_are_a_tree_that_goes_anywhere():
  """Through jit, conditionals, loops and copies of its structure, the same to the bit."""
  model = Model()
  _, grads = embed.value_and_grad(twice)(model)
  same = lambda g: jax.lax.cond(True, lambda g: g, lambda g: g, g)
  loop = lambda g: jax.lax.fori_loop(0, 2, lambda _, g: g, g)
  for f in (jax.jit(lambda g: g), jax.jit(same), jax.jit(loop), lambda g: jax.device_put(g)):
    rows, wanted = f(grads).rows["inner/e/t"], grads.rows["inner/e/t"]
    np.testing.assert_array_equal(rows.ids, wanted.ids)
    np.testing.assert_array_equal(rows.values, wanted.values)
  zeros = jax.tree.map(jnp.zeros_like, grads).rows["inner/e/t"]
  assert set(zeros.ids.tolist()) == {V}, "no row is touched"
  shapes = jax.eval_shape(lambda m: embed.value_and_grad(twice)(m)[1], model)
  assert jax.tree.structure(shapes) == jax.tree.structure(grads)


def test_row_grads_by_hand():
  model = Model()
  before = np.asarray(model.inner["e"].tables["t"])
  rows = embed.RowGrads(jnp.array([4, 4, V]), jnp.ones((3, D)))  # a duplicate, and padding
  model.inner["e"].apply_row_gradients({"t": rows}, step=0)
  after = np.asarray(model.inner["e"].tables["t"])
  np.testing.assert_allclose(after[4], before[4] - 0.2, rtol=1e-6)
  np.testing.assert_array_equal(np.delete(after, 4, 0), np.delete(before, 4, 0))


def test_row_gradients_can_be_looked_at():
  layer = one_table(9, 1)
  _, grads = embed.value_and_grad(lambda layer: layer(np.array([4, 4])).sum())(layer)
  assert repr(grads.rows["t"]) == "RowGrads(ids=[4 9], values=[[2.]\n [0.]])"
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grads.rows["t"])
  assert "ShapeDtypeStruct" in repr(shapes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_row_gradients_step_in_float32(dtype):
  """The square of 1e-4 is 0 in float16."""
  zeros, adagrad = jax.nn.initializers.zeros, embed.adagrad(0.1, initial_accumulator_value=1e-9)
  layer = one_table(4, 2, adagrad, initializer=zeros)
  _, grads = embed.value_and_grad(lambda layer: 1e-4 * layer(np.array([1])).sum())(layer)
  layer.apply_row_gradients({"t": grads.rows["t"].map(lambda g: g.astype(dtype))})
  gradient = float(jnp.asarray(1e-4, dtype))
  accumulator = 1e-9 + gradient**2
  np.testing.assert_allclose(layer.variables["t"]["accumulators"][1], accumulator, rtol=1e-5)
  np.testing.assert_allclose(layer.tables["t"][1], -0.1 * gradient / accumulator**0.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_ids_beyond_int32_become_no_other_row(dtype):
  """`2**32 + 5`, cut to 32 bits, is 5, and `5 - 2**32` too; narrow ids are widened."""
  assert embed.RowGrads(np.array([1, 2], np.int16), np.ones((2, D))).ids.dtype == jnp.int32
  values = np.ones((1, 2), np.float32)
  with pytest.raises(ValueError, match="up to 2147483647"):
    embed.RowGrads(np.array([2**32 - 1 if dtype == np.uint32 else 2**32 + 5], dtype), values)
  if dtype == np.int64:
    assert embed.RowGrads(np.array([5 - 2**32]), values).ids.tolist() == [-1]


def test_gradients_of_another_kind_are_not_clipped():
  with pytest.raises(TypeError, match=r"takes embed\.Grads, got <class 'tuple'>"):
    embed.clip_by_global_norm((jnp.float32(0), embed.Grads({}, {})), 1.0)


def test_unused_entries_by_hand_count_nowhere():
  """3 and 4 of a table of 10 rows; 100 is at an unused entry, whatever is mapped there."""
  values = jnp.array([[3.0], [100.0], [4.0], [100.0]])
  rows = embed.RowGrads(jnp.array([3, 10, 4, -1]), values, vocabulary_size=10)
  grads = embed.Grads({}, {"t": rows})
  assert float(embed.global_norm(grads)) == 5.0
  assert float(embed.global_norm(grads.map(lambda g: g + 1))) == np.float32(41**0.5)
  assert float(embed.global_norm(embed.accumulate([grads, grads]))) == 10.0
  assert float(jax.jit(embed.global_norm)(grads)) == 5.0
  clipped = embed.clip_by_global_norm(grads, 2.5).rows["t"]
  assert clipped.values[:3:2].tolist() == [[1.5], [2.0]]
  layer = one_table(10, 1, embed.sgd(1.0), initializer=jax.nn.initializers.zeros)
  layer.apply_row_gradients({"t": clipped})
  assert layer.tables["t"][:, 0].tolist() == [0, 0, 0, -1.5, -2.0, 0, 0, 0, 0, 0]


def test_row_gradients_by_hand_are_of_one_size_of_table():
  rows = lambda size: embed.RowGrads(np.array([3]), np.ones((1, 2)), vocabulary_size=size)
  with pytest.raises(ValueError, match="up to 2, got 3"):
    rows(2)
  layer = one_table(9, 2)
  with pytest.raises(ValueError, match="of a table of 8 rows, it has 9"):
    layer.apply_row_gradients({"t": rows(8)})
  with pytest.raises(ValueError, match=r"of \[8, 9\] rows"):
    embed.accumulate([embed.Grads({}, {"t": rows(8)}), embed.Grads({}, {"t": rows(9)})])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  "wrong",
  [
    optax.tree.norm,
    optax.global_norm,
    lambda grads: optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0],
    lambda grads: optax.tree.add(grads, grads),
    lambda grads: optax.sgd(0.1).update(grads.rows["t"], optax.sgd(0.1).init({}))[0],
  ],
  ids=["norm", "global_norm", "clip", "add", "one table"],
)
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
def test_optax_says_what_to_write(wrong, compiled):
  by_hand = embed.Grads({}, {"t": embed.RowGrads(np.array([3]), np.ones((1, 2)))})
  layer = one_table(9, 2)
  _, grads = embed.value_and_grad(lambda m: m(np.array([3])).sum())(layer)
  for each in (by_hand, grads):
    with pytest.raises(TypeError, match=r"embed\.global_norm\(grads\)"):
      (jax.jit(wrong) if compiled else wrong)(each)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_nan_in_one_row_is_nan_everywhere_after_clipping(compiled):
  """As with optax: a step that is not finite can be told by the norm, and left out."""
  layer = one_table(9, 2, embed.sgd(1.0), initializer=jax.nn.initializers.ones, combiner="sum")
  optimizer = embed.Optimizer(layer, optax.identity())

  def step(layer, optimizer, scale):
    loss = lambda m: jnp.sum(m(np.array([1, 2])) * scale[:, None])
    _, grads = embed.value_and_grad(loss)(layer)
    norm, clipped = embed.global_norm(grads), embed.clip_by_global_norm(grads, 1.0)
    ok = jnp.isfinite(norm)
    optimizer.update(layer, clipped.map(lambda g: jnp.where(ok, g, 0)))
    return norm, (clipped.rows["t"].values, clipped.rows["t"].ids)

  step = nnx.jit(step) if compiled else step
  norm, (values, ids) = step(layer, optimizer, jnp.array([1.0, jnp.nan]))
  assert np.isnan(norm)
  assert np.isnan(values[np.asarray(ids) < 9]).all()
  np.testing.assert_array_equal(layer.tables["t"], np.ones((9, 2)))
  norm, _ = step(layer, optimizer, jnp.array([3.0, 4.0]))  # of two columns each: norm sqrt(50)
  np.testing.assert_allclose(norm, 50**0.5, rtol=1e-6)
  np.testing.assert_allclose(layer.tables["t"][1], 1 - 3 / 50**0.5, rtol=1e-6)


@pytest.mark.parametrize("size", [2.5, 2**40, -5, 0, True, "10"])
def test_a_size_that_is_no_size_is_named(size):
  with pytest.raises(ValueError, match="`vocabulary_size` must be an int"):
    embed.RowGrads(jnp.array([0]), jnp.ones((1, 1)), vocabulary_size=size)


def test_a_size_may_be_an_array():
  rows = embed.RowGrads(jnp.array([4, 10]), jnp.array([[3.0], [7.0]]), jnp.int32(10))
  assert hash(jax.tree.structure(rows)) is not None
  assert float(rows.squared_norm()) == 9


def test_ids_beyond_the_known_size_are_named():
  known = embed.RowGrads(jnp.array([3]), jnp.ones((1, 1)), vocabulary_size=10)
  other = embed.RowGrads(jnp.array([50]), jnp.ones((1, 1)))
  with pytest.raises(ValueError, match=r"of 10 rows, and id 50"):
    embed.accumulate([embed.Grads({}, {"t": rows}) for rows in (known, other)])


def test_an_infinite_norm_clips_nothing():
  grads = embed.Grads({"bias": jnp.array([4.0])}, {"t": embed.RowGrads([3], [[3.0]])})
  clipped = embed.clip_by_global_norm(grads, float("inf"))
  assert clipped.dense["bias"].tolist() == [4.0]
  assert clipped.rows["t"].values.tolist() == [[3.0]]


@pytest.mark.parametrize("how", ["by stack", "by table", "accumulated"])
def test_frozen_rows_clip_no_other(how):
  """Gradients of 3 and 4 for rows that train, 12 for a frozen one: the norm is 5."""
  table = lambda name, rule: embed.TableConfig(4, 1, name=name, optimizer=rule)
  tables = {
    "a": table("a", embed.sgd()),
    "b": table("b", embed.sgd(0.2)),
    "f": table("f", embed.frozen()),
  }
  features = {name: embed.FeatureConfig(t) for name, t in tables.items()}
  model = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  factors = {"a": 3.0, "b": 4.0, "f": 12.0}

  def loss_fn(model):
    act = model({name: np.array([1]) for name in features})
    return sum(factor * act[name].sum() for name, factor in factors.items())

  _, grads = embed.value_and_grad(loss_fn)(model)
  if how != "by stack":
    grads = embed.Grads(grads.dense, dict(grads.rows))
  if how == "accumulated":
    grads = embed.accumulate([grads, grads]).map(lambda g: g / 2)
  assert float(embed.global_norm(grads)) == 5.0
