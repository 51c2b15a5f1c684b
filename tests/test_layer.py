"""A layer at its edges: nothing to look up, eager calls, settings that contradict, refusals."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from cases import refused
from flax import nnx
from nested_model import D, Model, V, dense
from recorded_calls import FC, SE, f32
from recorded_calls import dense as ids_of

import embed

pytestmark = pytest.mark.usefixtures("strict")

FEATURES = {
  name: embed.FeatureConfig(embed.TableConfig(size, 4, name=name))
  for name, size in (("t", 10), ("u", 12))
}


def step(batch, mesh):
  """One step, without `jax.set_mesh`."""
  layer = embed.SparseEmbed(FEATURES, embed.adagrad(0.1), rngs=nnx.Rngs(0), mesh=mesh)
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  loss_fn = lambda layer: sum(jnp.sum(a**2) for a in layer(batch).values())

  @nnx.jit
  def train(layer, optimizer):
    loss, grads = embed.value_and_grad(loss_fn)(layer)
    optimizer.update(layer, grads)
    return loss

  loss = train(layer, optimizer)
  return jax.device_get((loss, layer.variables)), layer.report.get_value()


@pytest.mark.ci
def test_nothing_to_look_up():
  """One feature without bags beside one with some, on eight devices as on one."""
  batch = {"t": embed.Padded(np.zeros((0, 3), np.int32)), "u": np.arange(8)}
  wanted, _ = step(batch, None)
  found, report = step(batch, meshes.make_mesh("explicit"))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, wanted)
  assert int(report["exchange_rounds"]) == 1


def test_a_plan_takes_an_optimizer_and_nothing_that_it_decides():
  mesh = meshes.make_mesh("auto")
  plan = embed.plan(FEATURES, mesh, {"t": np.arange(8), "u": np.arange(8)})
  layer = embed.SparseEmbed(plan=plan, optimizer=embed.sgd(0.5), rngs=nnx.Rngs(0))
  assert layer.spec.optimizers == {"t": embed.sgd(0.5), "u": embed.sgd(0.5)}
  for contradiction in (
    {"sharding": "div"},
    {"axis": "model"},
    {"mesh": meshes.make_mesh("explicit")},
  ):
    with pytest.raises(ValueError, match="A plan has its mesh, axes and strategies already"):
      embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0), **contradiction)


def test_a_split_input_wants_a_mesh():
  mesh = meshes.make_mesh("explicit")
  ids = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, jax.P(mesh.axis_names[0])))
  layer = embed.SparseEmbed(FEATURES, embed.sgd(0.1), rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"'u' is split over a mesh.*pass mesh=mesh"):
    layer({"u": ids})


def test_load_tables_checks_names_and_shapes():
  layer = SE({"f": FC()}, embed.sgd())
  with pytest.raises(ValueError, match="unknown"):
    layer.load_tables({"unknown": np.zeros((4, 2), f32)})
  with pytest.raises(ValueError, match=r"'t' has shape \(4, 2\), got \(5, 2\)"):
    layer.load_tables({"t": np.zeros((5, 2), f32)})


def test_bad_activation_gradients():
  layer = SE({"f": FC()}, embed.sgd())
  _, residual = layer.lookup({"f": ids_of(1, 2)})
  ones = np.ones((2, 2), f32)
  cases = [
    ({"f": np.ones((3, 2), f32)}, r"have \(2, 2\)"),
    ({"f": np.ones((2, 3), f32)}, r"have \(2, 2\)"),
    ({"f": np.ones((2, 2), np.complex64)}, "complex64; rows are real"),
    ({"f": "ones"}, "non-array"),
    ({}, "None for a zero gradient"),
    ({"g": ones}, "unknown features"),
    ([ones], "expected a dict"),
    (None, "activation_grads is None"),
  ]
  apply = lambda grads: layer.apply_gradients(grads, residual, step=0)
  refused(cases, apply, (TypeError, ValueError))


@pytest.mark.parametrize(
  "where", [{}, pytest.param({"mesh": jax.make_mesh((1,), ("data",))}, marks=pytest.mark.ci)]
)
def test_tables_that_do_not_fit_are_named(where):
  movie = embed.TableConfig(2_000_000_000, 1 << 14, name="movie", optimizer=embed.adam(0.1))
  with pytest.raises(MemoryError, match=r"'movie'.*122070\.3G, 366210\.9G.*hbm_bytes") as caught:
    embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0), **where)
  assert "RESOURCE_EXHAUSTED" in str(caught.value.__cause__)


@pytest.mark.programs(60, "a whole model is made")
def test_attend_trains_all_rows_or_only_candidates():
  model = Model()
  query = np.arange(6, dtype=f32).reshape(2, D) / 6
  shared, own = np.array([4, 7, -1]), np.array([[1, 2], [2, -1]])
  attend = lambda m, *ids: m.inner["e"].attend(query, "t", *ids)

  @nnx.jit
  def both(model):
    gradients = [
      embed.value_and_grad(lambda m, ids=ids: jnp.sum(jnp.tanh(attend(m, *ids))))(model)[1]
      for ids in ((), (shared,), (own,))
    ]
    return [grads.rows["inner/e/t"] for grads in gradients], attend(model), attend(model, shared)

  rows, scores, of_candidates = both(model)
  table = np.asarray(model.inner["e"].tables["t"], np.float64)
  slope = 1 / np.cosh(query @ table.T) ** 2  # of each query's score of each row
  every = slope.T @ query
  only = lambda ids: np.where(np.isin(np.arange(V), ids)[:, None], every, 0)
  of_own = np.zeros((V, D))
  for asked, row in ((0, 1), (0, 2), (1, 2)):
    of_own[row] += slope[asked, row] * query[asked]
  for found, wanted, ids in zip(
    rows, (every, only([4, 7]), of_own), (range(V), [4, 7], [1, 2]), strict=True
  ):
    np.testing.assert_allclose(dense(found), wanted, atol=1e-5)
    assert sorted(i for i in np.asarray(found.ids).tolist() if i < V) == list(ids)
  np.testing.assert_allclose(scores, query @ table.T, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(of_candidates[:, :2], query @ table[[4, 7]].T, rtol=1e-5, atol=1e-6)
  for wrong, text in (
    ((query, "x"), "no table 'x'"),
    ((np.ones((2, D + 1)), "t"), r"'t' has dim 3"),
    ((query, "t", np.array([V])), "out of range"),
  ):
    with pytest.raises(ValueError, match=text):
      model.inner["e"].attend(*wrong)


@pytest.mark.ci
def test_tabulate():
  movie = embed.TableConfig(5, 2, optimizer=embed.adam(0.1), name="movie")
  layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  text = nnx.tabulate(
    layer, np.array([1, 2]), console_kwargs={"force_terminal": False, "width": 200}
  )
  assert "SparseEmbed" in text
  assert "float32[2,2]" in text


# --- what a layer is made of, and what it is given ------------------------------------------------


def test_a_layer_keeps_its_features_when_the_config_changes():
  small, large = (embed.FeatureConfig(embed.TableConfig(n, 4, name=f"t{n}")) for n in (10, 1000))
  features = {"a": small, "b": [large]}
  plan = embed.plan(features, None, {"a": np.array([1]), "b": [np.array([1])]}, embed.sgd())
  layers = [SE(features, embed.sgd()), embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))]
  features["a"] = large
  features["b"].clear()
  for layer in layers:
    assert layer({"b": [np.array([500])]})["b"][0].shape == (1, 4)
    with pytest.raises(ValueError, match="id 500"):
      layer({"a": np.array([500])})


def test_a_residual_of_another_layer_is_refused():
  small, large = (SE(FC(embed.TableConfig(size, 4, name="t")), embed.sgd()) for size in (10, 1000))
  before = np.asarray(small.tables["t"])
  activations, residual = large.lookup(np.array([1, 400]))
  with pytest.raises(ValueError, match="residual is of another layer"):
    small.apply_gradients(jnp.ones_like(activations), residual)
  np.testing.assert_array_equal(small.tables["t"], before)


@pytest.mark.ci
def test_attend_quantizes_all_rows_as_it_does_candidates():
  """[0.2, 0.6] is [0, 1] and [7, -0.6] is [1, -1] then; gradients pass straight through."""
  dtype = np.float32
  coarse = embed.QuantizationConfig(num_buckets=3, lower=-1.0, upper=1.0)
  table = embed.TableConfig(2, 2, name="t", dtype=dtype, quantization_config=coarse)
  layer = embed.SparseEmbed(embed.FeatureConfig(table), embed.sgd(1.0), rngs=nnx.Rngs(0))
  layer.load_tables({"t": np.array([[0.2, 0.6], [7.0, -0.6]])})
  query = jnp.array([[1.0, 10.0]], dtype)
  every = lambda m: m.attend(query, "t")
  some = lambda m: m.attend(query, "t", np.array([0, 1]))
  assert every(layer).tolist() == some(layer).tolist() == [[10.0, -9.0]]
  for scores in (every, some):
    _, grads = embed.value_and_grad(lambda m, scores=scores: scores(m).sum())(layer)
    assert sorted(grads.rows["t"].ids.tolist()) == [0, 1]
    assert grads.rows["t"].values.tolist() == [[1.0, 10.0], [1.0, 10.0]]


def test_the_count_of_dropped_ids_stays_at_its_largest():
  """Two ids a call; a checkpoint of before may hold a count that has wrapped around."""
  table = embed.TableConfig(10, 2, jax.nn.initializers.zeros, name="t")
  feature = embed.FeatureConfig(table, validate_weights_and_indices=False)
  layer = embed.SparseEmbed(feature, rngs=nnx.Rngs(0))
  look_up = nnx.jit(lambda m, x: m(x), graph=False)
  for start, counts in ((0, [2, 4]), (2**31 - 3, [2**31 - 1] * 2), (-5, [2**31 - 1] * 2)):
    layer.report.set_value({**layer.report.get_value(), "dropped_ids": np.int32(start)})
    for count in counts:
      look_up(layer, np.array([10, 3, 11]))
      assert int(layer.report["dropped_ids"]) == count


@pytest.mark.parametrize("name", ["items", "a/b"])
def test_a_table_may_have_any_name(name):
  """Also that of a method of the containers that hold its arrays and its rate."""
  table = embed.TableConfig(4, 2, name=name, optimizer=embed.sgd(nnx.Variable(0.5)))
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  before = np.array(layer.tables[name])

  @nnx.jit
  def step(layer, optimizer):
    _, grads = embed.value_and_grad(lambda layer: layer(np.array([1])).sum())(layer)
    optimizer.update(layer, grads)

  step(layer, optimizer)
  embed.checkpoint.from_tree(embed.checkpoint.to_tree(layer=layer), layer=layer)
  np.testing.assert_allclose(layer.tables[name][1], before[1] - 0.5)
  assert name in repr(layer)
