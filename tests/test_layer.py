"""A layer at its edges: settings that contradict, candidates, and what is refused."""

import cases
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from nested_model import D, Model, V, dense
from recorded_calls import FC, SE, f32

import embed

pytestmark = pytest.mark.usefixtures("strict")


def test_a_plan_takes_features_and_an_optimizer_and_nothing_that_it_decides():
  mesh = meshes.make_mesh("auto")
  plan = embed.plan({"f": FC()}, mesh, {"f": np.arange(8)})
  make = lambda **given: embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0), **given)
  features = dict.fromkeys("fg", FC())
  layer = nnx.eval_shape(lambda: make(optimizer=embed.sgd(0.5), features=features))
  assert layer.spec.optimizers == {"t": embed.sgd(0.5)}
  assert list(layer.spec.features) == ["f", "g"]
  for decided in ({"sharding": "div"}, {"axis": "model"}, {"mesh": meshes.make_mesh("explicit")}):
    with pytest.raises(ValueError, match="A plan has its mesh, axes and strategies already"):
      make(**decided)
  other = embed.FeatureConfig(embed.TableConfig(4, 2, name="other"))
  with pytest.raises(ValueError, match=r"the tables \['t'\], the feature config has \['other'\]"):
    make(features={"f": other})


def test_a_split_input_wants_a_mesh():
  mesh = meshes.make_mesh("explicit")
  ids = jax.device_put(np.zeros(8, np.int32), jax.NamedSharding(mesh, jax.P(mesh.axis_names[0])))
  with pytest.raises(ValueError, match=r"'u' is split over a mesh.*pass mesh=mesh"):
    SE({"u": FC()}, embed.sgd())({"u": ids})


def test_load_tables_checks_names_and_shapes():
  layer = SE({"f": FC()}, embed.sgd())
  with pytest.raises(ValueError, match="unknown"):
    layer.load_tables({"unknown": np.zeros((4, 2), f32)})
  with pytest.raises(ValueError, match=r"'t' has shape \(5, 2\), the model's has \(4, 2\)"):
    layer.load_tables({"t": np.zeros((5, 2), f32)})


def test_bad_activation_gradients():
  layer = SE({"f": FC()}, embed.sgd())
  ones = lambda *shape: np.ones(shape, f32)

  def apply(grads):
    def step(layer):
      _, residual = layer.lookup({"f": np.array([1, 2])})
      layer.apply_gradients(grads, residual, step=0)

    nnx.eval_shape(step, layer)

  refused = [
    ({"f": ones(3, 2)}, r"have \(2, 2\)"),
    ({"f": ones(2, 3)}, r"have \(2, 2\)"),
    ({"f": np.ones((2, 2), np.complex64)}, "complex64; rows are real"),
    ({"f": "ones"}, "non-array"),
    ({}, "None for a zero gradient"),
    ({"g": ones(2, 2)}, "unknown features"),
    (None, "No gradient given for 'f'"),
  ]
  cases.refused(refused, apply)
  cases.refused([([ones(2, 2)], "expected a dict")], apply, TypeError)


def test_attend_trains_all_rows_or_only_candidates():
  model, query = Model(), np.arange(6, dtype=f32).reshape(2, D) / 6
  table = np.asarray(model.inner["e"].tables["t"])
  some = np.array([[1, 2], [2, -1]])
  candidates = {"every": None, "shared": np.array([4, 7, -1]), "each": some}
  rows = {"every": [range(V)] * 2, "shared": [[4, 7]] * 2, "each": [[1, 2], [2]]}

  @nnx.jit
  def differentiate(model):
    found = {}
    for name, ids in candidates.items():
      loss = lambda m, ids=ids: jnp.sum(jnp.tanh(m.inner["e"].attend(query, "t", ids)))
      grads = embed.value_and_grad(loss)(model)[1].rows["inner/e/t"]
      found[name] = meshes.Rows(grads.ids, grads.values)
    scores = model.inner["e"].attend(query, "t"), model.inner["e"].attend(query, "t", some)
    return found, scores

  found, (every, each) = differentiate(model)
  for name, of_queries in rows.items():
    wanted = np.zeros((V, D))
    for vector, of_query in zip(query, of_queries, strict=True):
      for row in of_query:
        wanted[row] += (1 - np.tanh(vector @ table[row]) ** 2) * vector
    np.testing.assert_allclose(dense(found[name]), wanted, atol=1e-5, err_msg=name)
    touched = {i for i in np.asarray(found[name].ids).tolist() if i < V}
    assert touched == set().union(*of_queries), name
  np.testing.assert_allclose(every, query @ table.T, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(np.asarray(each)[0], table[[1, 2]] @ query[0], rtol=1e-5, atol=1e-6)
  assert each.shape == (2, 2)
  layer = model.inner["e"]
  cases.refused(
    [
      ((query, "x", None), "no table 'x'"),
      ((np.ones((2, D + 1), f32), "t", None), f"'t' has dim {D}"),
      ((query, "t", np.array([V])), "out of range"),
    ],
    lambda arguments: layer.attend(*arguments),
  )


@pytest.mark.ci
def test_tabulate():
  movie = embed.TableConfig(5, 2, optimizer=embed.adam(0.1), name="movie")
  layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  text = nnx.tabulate(
    layer, np.array([1, 2]), console_kwargs={"force_terminal": False, "width": 200}
  )
  assert "SparseEmbed" in text
  assert "float32[2,2]" in text


def test_a_layer_keeps_its_features_when_the_config_changes():
  small, large = (embed.FeatureConfig(embed.TableConfig(n, 4, name=f"t{n}")) for n in (10, 1000))
  features = {"a": small, "b": [large]}
  plan = embed.plan(features, None, {"a": np.array([1]), "b": [np.array([1])]}, embed.sgd())
  made = [SE(features, embed.sgd()), embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))]
  features["a"] = large
  features["b"].clear()
  for layer in made:
    assert nnx.eval_shape(lambda m: m({"b": [np.array([500])]}), layer)["b"][0].shape == (1, 4)
    with pytest.raises(ValueError, match="id 500"):
      layer({"a": np.array([500])})


def test_a_residual_of_another_layer_is_refused():
  small, large = (SE(FC(embed.TableConfig(size, 4, name="t")), embed.sgd()) for size in (10, 1000))
  before = np.asarray(small.tables["t"])

  def step(small, large):
    activations, residual = large.lookup(np.array([1, 400]))
    small.apply_gradients(jnp.ones_like(activations), residual)

  with pytest.raises(ValueError, match="residual is of another layer"):
    nnx.eval_shape(step, small, large)
  np.testing.assert_array_equal(small.tables["t"], before)
