"""Gradients as a tree: what may be done to it, clipping and microbatches, and rows by hand."""

import cases
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import make_mesh
from nested_model import A, B, D, Model, V, twice
from optimizer_cases import DECAY, OPTIMIZERS

import embed


@pytest.mark.programs(20, "trains a whole model")
def test_microbatches_clipping_and_loss_scaling_equal_dense_training():
  """Two microbatches of a scaled loss, unscaled and clipped together, in closed form."""
  model = Model()
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  table, kernel = np.asarray(model.inner["e"].tables["t"]), np.asarray(model.out.kernel[...])
  of_rows, of_kernel = np.zeros((V, D)), np.zeros((D, 1))
  for ids in (A, B):
    slope = 50 * (1 - np.tanh(table[ids] @ kernel) ** 2)
    np.add.at(of_rows, ids, slope * kernel.T)
    of_kernel += table[ids].T @ slope
  norm = np.sqrt((of_rows**2).sum() + (of_kernel**2).sum())
  wanted = table - 0.1 * 0.5 / norm * of_rows, kernel - 0.1 * 0.5 / norm * of_kernel

  scaled = embed.value_and_grad(
    lambda m, ids: 1024 * 50 * jnp.sum(jnp.tanh(m.out(m.encode("a", ids))))
  )

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


def test_narrow_rows_are_summed_and_stepped_in_float32():
  """300 squared is no float16, and the square of 1e-4 is 0 in it."""
  adagrad = embed.adagrad(0.1, initial_accumulator_value=1e-9)
  layer = layers.one_table(adagrad, rows=np.zeros((4, D), np.float32))

  @nnx.jit
  def step(layer):
    def narrow(scale):
      _, grads = embed.value_and_grad(lambda m: scale * jnp.sum(m(np.array([1, 2]))))(layer)
      return grads.map(lambda g: g.astype(jnp.float16))

    norm = embed.global_norm(narrow(300))
    layers.update(layer, narrow(1e-4).rows)
    return norm

  np.testing.assert_allclose(step(layer), 300 * np.sqrt(2 * D), rtol=1e-6)
  gradient = float(np.float16(1e-4))
  accumulator = 1e-9 + gradient**2
  variables = {key: np.asarray(x)[1] for key, x in layer.variables["t"].items()}
  np.testing.assert_allclose(variables["accumulators"], accumulator, rtol=1e-5)
  np.testing.assert_allclose(variables["parameters"], -0.1 * gradient / accumulator**0.5, rtol=1e-5)


def test_a_stack_is_summed_once():
  """The tables of a stack read one sum, each the entries of its own ids."""
  tables = {name: embed.TableConfig(7, D, name=name) for name in "ab"}
  features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
  layer = embed.SparseEmbed(features, embed.sgd(1.0), rngs=nnx.Rngs(0))
  ids = {"a": np.array([1, 1]), "b": np.array([2, 3, 3])}
  loss = lambda m: sum(x.sum() for x in m(ids).values())
  _, grads = nnx.jit(embed.value_and_grad(loss))(layer)
  read = lambda grads: [(r.ids, r.values) for r in grads.rows.values()]
  assert str(jax.make_jaxpr(read)(grads)).count("name=sum_rows") == 1
  pairs = lambda r: dict(zip(r.ids.tolist(), r.values[:, 0].tolist(), strict=True))
  rows = {name: pairs(r) for name, r in grads.rows.items()}
  assert rows == {"a": {1: 2.0, 7: 0.0}, "b": {2: 1.0, 3: 2.0, 7: 0.0}}


def test_unused_entries_count_nowhere():
  """Gradients of 3 and 1 + 3 for two rows, 100 for none; and rows that are filtered out.

  Clipped to 2, the step of the one row that is left is 8 / 2 - 2: it decays once.
  """
  sgd = embed.sgd(1.0, weight_decay_factor=0.5)
  layer = layers.one_table(sgd, rows=np.full((6, 1), 8, np.float32))
  given = np.array([[3.0], [100.0], [1.0], [100.0], [3.0]], np.float32)

  @nnx.jit
  def step(layer, ids):
    _, grads = embed.value_and_grad(lambda m: jnp.sum(m(ids) * given))(layer)
    kept, clipped = grads.filter({"t": lambda ids: ids > 3}), embed.clip_by_global_norm(grads, 2.5)
    layers.update(layer, embed.clip_by_global_norm(kept, 2.0).rows)
    more = [grads, clipped, embed.clip_by_global_norm(grads, float("inf")), kept]
    more += [grads.map(lambda g: g + 1), kept.map(lambda g: g + 1), clipped.filter({})]
    more += [embed.accumulate([grads, grads]), embed.accumulate([kept, grads])]
    return [embed.global_norm(x) for x in more]

  norms = step(layer, np.array([3, 10, 4, -1, 4]))
  wanted = [5, 2.5, 5, 4, 41**0.5, 5, 2.5, 10, 73**0.5]
  np.testing.assert_allclose(norms, wanted, rtol=1e-6)
  assert layer.tables["t"][:, 0].tolist() == [8, 8, 8, 8, 2, 8]


def test_a_sum_inside_of_jit_does_not_outlive_it():
  """Gradients from outside of a jitted function are read inside of it, then outside."""
  layer = layers.one_table()
  grads = nnx.jit(embed.value_and_grad(lambda m: m(np.array([3, 3])).sum()))(layer)[1]
  norm = lambda: grads.rows["t"].squared_norm()
  inside = jax.jit(norm)()
  np.testing.assert_allclose([inside, norm(), jax.jit(norm)()], 4 * layers.D, rtol=1e-6)


def test_gradients_are_a_tree_that_goes_anywhere():
  """Through jit, conditionals and copies of its structure, the same to the bit."""
  model = Model()
  _, grads = nnx.jit(embed.value_and_grad(twice))(model)
  same = jax.jit(lambda g: jax.lax.cond(True, lambda g: g, lambda g: g, g))
  wanted = grads.rows["inner/e/t"]
  for f in (same, lambda g: jax.tree.map(np.asarray, g)):
    rows = f(grads).rows["inner/e/t"]
    np.testing.assert_array_equal(rows.ids, wanted.ids)
    np.testing.assert_array_equal(rows.values, wanted.values)
  shapes = nnx.eval_shape(lambda m: embed.value_and_grad(twice)(m)[1], model)
  assert jax.tree.structure(shapes) == jax.tree.structure(grads)


@pytest.mark.programs(40, "eager arithmetic compiles each operation")
def test_arithmetic_on_the_whole_tree_is_refused():
  """It would change ids: the wrong rows would be trained. The error says what to write."""
  layer = layers.one_table()
  optimizer = embed.Optimizer(layer, optax.identity())
  grads = embed.value_and_grad(lambda m: m(np.array([1, 2])).sum())(layer)[1]
  arithmetic = [
    lambda g: jax.tree.map(lambda x: 2 * x, g),
    lambda g: jax.tree.map(lambda x: x / 2, g),
    lambda g: jax.tree.map(jnp.add, g, g),
    lambda g: jax.tree.map(jnp.zeros_like, g),
  ]
  update = lambda f: optimizer.update(layer, f(grads))
  cases.refused([(f, "write|Write embed.accumulate") for f in arithmetic], update)
  np.testing.assert_array_equal(layer.tables["t"], layers.ROWS)

  @nnx.jit
  def step(layer, optimizer, grads):
    optimizer.update(layer, jax.tree.map(jnp.add, grads, grads))

  step(layer, optimizer, grads)
  assert np.isnan(layer.tables["t"]).any(axis=1).sum() == 2
  with pytest.raises(TypeError, match=r"takes embed\.Grads, got <class 'tuple'>"):
    embed.clip_by_global_norm((jnp.float32(0), embed.Grads({}, {})), 1.0)


def test_nan_in_one_row_is_nan_everywhere_after_clipping():
  """As with optax: a step that is not finite can be told by the norm, and left out."""
  layer = layers.one_table()
  optimizer = embed.Optimizer(layer, optax.identity())

  @nnx.jit
  def step(layer, optimizer, scale):
    _, grads = embed.value_and_grad(lambda m: jnp.sum(m(np.array([1, 2])) * scale))(layer)
    norm, clipped = embed.global_norm(grads), embed.clip_by_global_norm(grads, 1.0)
    optimizer.update(layer, clipped.map(lambda g: jnp.where(jnp.isfinite(norm), g, 0)))
    return norm, (clipped.rows["t"].values, clipped.rows["t"].ids)

  norm, (values, ids) = step(layer, optimizer, np.array([[1.0], [np.nan]], np.float32))
  assert np.isnan(norm)
  assert np.isnan(np.asarray(values)[np.asarray(ids) < layers.V]).all()
  np.testing.assert_array_equal(layer.tables["t"], layers.ROWS)


def test_frozen_rows_do_not_move_and_clip_no_other():
  """Gradients of 3 and 4 for rows that train, 12 for a frozen one: the norm is 5."""
  optimizers = {"a": embed.sgd(), "b": embed.sgd(0.2), "f": embed.frozen()}
  features = {
    name: embed.FeatureConfig(embed.TableConfig(4, 1, name=name, optimizer=optimizer))
    for name, optimizer in optimizers.items()
  }
  model = embed.SparseEmbed(features, rngs=nnx.Rngs(0))

  def loss_fn(model):
    act = model({name: np.array([1]) for name in features})
    return 3 * act["a"].sum() + 4 * act["b"].sum() + 12 * act["f"].sum()

  @nnx.jit
  def norms(model):
    grads = embed.value_and_grad(loss_fn)(model)[1]
    accumulated = embed.accumulate([grads, grads]).map(lambda g: g / 2)
    layers.update(model, grads.rows)
    return grads.rows["f"].values, [embed.global_norm(grads), embed.global_norm(accumulated)]

  before = np.asarray(model.tables["f"])
  values, of_all = norms(model)
  assert values.tolist() == [[12]]
  np.testing.assert_allclose(of_all, 5, rtol=1e-6)
  np.testing.assert_array_equal(model.tables["f"], before)


def test_a_filter_that_says_nothing_of_rows_is_refused():
  layer = layers.one_table()
  grads = nnx.eval_shape(embed.value_and_grad(lambda m: m(np.array([1])).sum()), layer)[1]
  wrong = [
    ({"u": lambda ids: ids > 1}, r"no table 'u'; the tables are \['t'\]"),
    ({"t": lambda ids: ids}, r"a bool for each id, \(1,\), as `lambda ids: ids >= 1000`"),
    ({"t": lambda ids: True}, "a bool for each id"),
  ]
  cases.refused(wrong, lambda keep: jax.eval_shape(lambda g: g.filter(keep), grads))


@pytest.mark.ci
def test_rows_that_are_filtered_out_keep_every_bit():
  """Whatever the optimizer, on one device and on eight; all other rows train as ever."""
  settings = dict(OPTIMIZERS).items()  # the last ones of each optimizer
  optimizers = [getattr(embed, name)(0.125, **given | DECAY) for name, given in settings]
  optimizers += [embed.from_optax(optax.adamw(0.1)), embed.from_optax(optax.sgd(0.1, 0.9))]
  features = {  # two tables of each, in one stack
    name: embed.FeatureConfig(embed.TableConfig(layers.V, 2, optimizer=optimizer, name=name))
    for i, optimizer in enumerate(optimizers)
    for name in (f"some {i}", f"all {i}")
  }
  is_new = np.arange(layers.V) % 3 == 0
  some = {name: lambda ids: jnp.asarray(is_new)[ids] for name in features if "some" in name}
  loss = lambda m, ids: sum(jnp.sum(x**2) for x in m(dict.fromkeys(features, ids)).values())

  def trained(steps, keep, **where):
    layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0), **where)

    @nnx.jit
    def step(layer, ids):
      layers.update(layer, embed.value_and_grad(loss)(layer, ids)[1].filter(keep).rows)

    for i in range(steps):
      step(layer, (np.arange(16) * 5 + i) % 9)
    return jax.tree.map(np.asarray, dict(layer.variables))

  before, wanted = trained(0, {}), trained(3, {})
  for where in ({}, {"mesh": make_mesh("explicit"), "sharding": "div"}):
    for name, arrays in trained(3, some, **where).items():
      learns = is_new if name in some else np.ones(layers.V, bool)
      for key, x in arrays.items():
        np.testing.assert_array_equal(x[~learns], before[name][key][~learns], f"{name} {key}")
        np.testing.assert_allclose(x[learns], wanted[name][key][learns], rtol=1e-5, atol=1e-6)
        assert (wanted[name][key][:9] != before[name][key][:9]).any(), (name, key)
