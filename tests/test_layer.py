"""What is at the edges of a mesh: nothing to look up, eager calls, settings that contradict."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx

import embed

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


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("batch", BATCHES)
def test_nothing_to_look_up(batch, kind):
  wanted, _ = step(BATCHES[batch], None)
  found, report = step(BATCHES[batch], meshes.make_mesh(kind))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, wanted)
  assert int(report["exchange_rounds"]) == (batch != "all")


def test_the_report_is_of_the_last_call():
  mesh = meshes.make_mesh("auto")
  layer = embed.SparseEmbed(FEATURES, embed.adagrad(0.1), rngs=nnx.Rngs(0), mesh=mesh)
  layer({"u": np.arange(8)})
  assert int(layer.report["exchange_rounds"]) == 1
  layer({"t": NOTHING})
  assert int(layer.report["exchange_rounds"]) == 0
  assert float(layer.report["buffer_fill"]) == 0


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
  with pytest.raises(ValueError, match=r"'t' have id 11; its ids are 0 \.\. 9"):
    layer.apply_row_gradients({"t": embed.RowGrads(np.array([11]), np.ones((1, 4)))})
