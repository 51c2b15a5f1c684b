"""A layer at its edges: nothing to look up, eager calls, settings that contradict, refusals."""

import itertools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx
from nested_model import D, Model, V, dense
from recorded_calls import FC, SE, f32
from recorded_calls import dense as ids_of
from suites import slow_unless

import embed

pytestmark = pytest.mark.usefixtures("strict")

FEATURES = {
  name: embed.FeatureConfig(embed.TableConfig(size, 4, name=name))
  for name, size in (("t", 10), ("u", 12))
}
NOTHING = embed.Padded(np.zeros((0, 3), np.int32))
BATCHES = {
  "one": {"t": NOTHING, "u": np.arange(8)},
  "all": {"t": NOTHING},
  "empty bags": {"t": embed.Padded(np.zeros((8, 0), np.int32)), "u": np.arange(5)},
}


def step(batch, mesh):
  """One eager step, without `jax.set_mesh`."""
  layer = embed.SparseEmbed(FEATURES, embed.adagrad(0.1), rngs=nnx.Rngs(0), mesh=mesh)
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  loss_fn = lambda layer: sum(jnp.sum(a**2) for a in layer(batch).values())
  loss, grads = embed.value_and_grad(loss_fn)(layer)
  optimizer.update(layer, grads)
  return jax.device_get((loss, layer.variables)), layer.report.get_value()


@pytest.mark.ci
@pytest.mark.parametrize(
  ("batch", "kind"),
  slow_unless(
    itertools.product(BATCHES, ["auto", "explicit"]),
    lambda *case: case in (("one", "explicit"), ("all", "auto")),
  ),
)
def test_nothing_to_look_up(batch, kind):
  wanted, _ = step(BATCHES[batch], None)
  found, report = step(BATCHES[batch], meshes.make_mesh(kind))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, wanted)
  assert int(report["exchange_rounds"]) == (batch != "all")


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


def test_rows_by_hand_are_checked():
  layer = embed.SparseEmbed(FEATURES, embed.sgd(0.1), rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="'t' have 3 columns, its dim is 4"):
    layer.apply_row_gradients({"t": embed.RowGrads(np.array([1]), np.ones((1, 3)))})
  with pytest.raises(ValueError, match="complex64"):
    embed.RowGrads(np.array([1]), np.ones((1, 4), np.complex64))
  with pytest.raises(ValueError, match=r"'t' have id 11; its ids are 0 \.\. 9"):
    layer.apply_row_gradients({"t": embed.RowGrads(np.array([11]), np.ones((1, 4)))})


def test_load_tables_checks_names_and_shapes():
  layer = SE({"f": FC()}, embed.sgd())
  with pytest.raises(ValueError, match="unknown"):
    layer.load_tables({"unknown": np.zeros((4, 2), f32)})
  with pytest.raises(ValueError, match="t"):
    layer.load_tables({"t": np.zeros((5, 2), f32)})


@pytest.mark.parametrize(
  ("grads", "error", "message"),
  [
    ({"f": jnp.ones((3, 2))}, ValueError, r"have \(2, 2\)"),
    ({"f": jnp.ones((2, 3))}, ValueError, r"have \(2, 2\)"),
    ({"f": np.ones((2, 2), np.complex64)}, ValueError, "complex64; rows are real"),
    ({"f": "ones"}, ValueError, "non-array"),
    ({}, ValueError, "None for a zero gradient"),
    ({"g": jnp.ones((2, 2))}, ValueError, "unknown features"),
    ([jnp.ones((2, 2))], TypeError, "expected a dict"),
    (None, ValueError, "activation_grads is None"),
  ],
)
def test_bad_activation_gradients(grads, error, message):
  layer = SE({"f": FC()}, embed.sgd())
  _, residual = layer.lookup({"f": ids_of(1, 2)})
  with pytest.raises(error, match=message):
    layer.apply_gradients(grads, residual, step=0)


@pytest.mark.parametrize(
  "where", [{}, {"mesh": jax.make_mesh((1,), ("data",))}], ids=["one", "mesh"]
)
def test_tables_that_do_not_fit_are_named(where):
  movie = embed.TableConfig(2_000_000_000, 1 << 14, name="movie", optimizer=embed.adam(0.1))
  with pytest.raises(MemoryError, match=r"'movie'.*122070\.3G, 366210\.9G.*hbm_bytes") as caught:
    embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0), **where)
  assert "RESOURCE_EXHAUSTED" in str(caught.value.__cause__)


@pytest.mark.ci
def test_attend_trains_all_rows_or_only_candidates():
  model, query = Model(), jnp.arange(6.0).reshape(2, D) / 6
  layer = model.inner["e"]
  table = layer.tables["t"]
  some = np.array([[1, 2], [2, -1]])

  def every(m):
    return jnp.sum(jnp.tanh(m.inner["e"].attend(query, "t")))

  def shared(m):
    return jnp.sum(jnp.tanh(m.inner["e"].attend(query, "t", np.array([4, 7, -1]))))

  def each(m):
    return jnp.sum(jnp.tanh(m.inner["e"].attend(query, "t", some)))

  wanted = {
    every: (lambda t: jnp.sum(jnp.tanh(query @ t.T)), range(V)),
    shared: (lambda t: jnp.sum(jnp.tanh(query @ t[jnp.array([4, 7])].T)), [4, 7]),
    each: (
      lambda t: (
        jnp.sum(jnp.tanh(jnp.einsum("d,kd->k", query[0], t[jnp.array([1, 2])])))
        + jnp.tanh(query[1] @ t[2])
      ),
      [1, 2],
    ),
  }
  for loss, (plain, touched) in wanted.items():
    _, grads = nnx.jit(embed.value_and_grad(loss))(model)
    rows = grads.rows["inner/e/t"]
    np.testing.assert_allclose(dense(rows), jax.grad(plain)(table), atol=1e-5)
    assert sorted(i for i in np.asarray(rows.ids).tolist() if i < V) == list(touched)
  np.testing.assert_allclose(layer.attend(query, "t")[:, 3], query @ table[3], rtol=1e-5)
  assert layer.attend(query, "t", np.array([4, -1])).shape == (2, 2)
  with pytest.raises(ValueError, match="no table 'x'"):
    layer.attend(query, "x")
  with pytest.raises(ValueError, match="dim"):
    layer.attend(jnp.ones((2, D + 1)), "t")
  with pytest.raises(ValueError, match="out of range"):
    layer.attend(query, "t", np.array([V]))


def test_weights_of_an_absent_feature_come_first():
  """Before any other feature is read: the batch is not what its sender thinks."""
  layer = embed.SparseEmbed(FEATURES, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="weights given for 'u', which has no ids"):
    layer({"t": np.ones(2, np.float32)}, {"u": np.ones((2, 1), np.float32)})


def test_a_printed_layer_names_its_tables_and_no_more():
  tables = {str(i): embed.FeatureConfig(embed.TableConfig(9, 4, name=f"t{i}")) for i in range(9)}
  graphdef, _ = nnx.split(embed.SparseEmbed(tables, embed.sgd(), rngs=nnx.Rngs(0)))
  assert "Spec(tables=['t0', 't1'," in repr(graphdef)
  assert "TableConfig" not in repr(graphdef)


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


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
def test_attend_quantizes_all_rows_as_it_does_candidates(dtype):
  """[0.2, 0.6] is [0, 1] and [7, -0.6] is [1, -1] then; gradients pass straight through."""
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


@pytest.mark.parametrize("start", [2**31 - 3, -5], ids=["full", "of an old checkpoint"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_the_count_of_dropped_ids_stays_at_its_largest(start, compiled):
  """Two ids a call; a checkpoint of before may hold a count that has wrapped around."""
  table = embed.TableConfig(10, 2, name="t")
  feature = embed.FeatureConfig(table, validate_weights_and_indices=False)
  source, layer = (embed.SparseEmbed(feature, rngs=nnx.Rngs(seed)) for seed in (0, 1))
  source.report.set_value({**source.report.get_value(), "dropped_ids": jnp.int32(start)})
  embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=source), model=layer)
  assert int(layer.report["dropped_ids"]) == start
  look_up = nnx.jit(lambda m, x: m(x), graph=False) if compiled else lambda m, x: m(x)
  counts = []
  for _ in range(3):
    look_up(layer, np.array([10, 3, 11]))
    counts.append(int(layer.report["dropped_ids"]))
  assert counts == [2**31 - 1] * 3


@pytest.mark.parametrize("name", ["items", "values", "a.b", "a/b"])
def test_a_table_may_have_any_name(name):
  """Also that of a method of the containers that hold its arrays and its rate."""
  table = embed.TableConfig(4, 2, name=name, optimizer=embed.sgd(nnx.Variable(0.5)))
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))
  before = np.array(layer.tables[name])
  _, grads = embed.value_and_grad(lambda layer: layer(np.array([1])).sum())(layer)
  optimizer.update(layer, grads)
  embed.checkpoint.from_tree(embed.checkpoint.to_tree(layer=layer), layer=layer)
  np.testing.assert_allclose(layer.tables[name][1], before[1] - 0.5)
  assert name in repr(layer)
