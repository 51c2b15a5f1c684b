"""Where tables and activations are on a mesh, and how a layer is told of its mesh."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, STRATEGIES, make_mesh, sixteenths
from suites import slow_unless

import embed

V, D = 21, 3
MATRIX = [(strategy, kind) for strategy in STRATEGIES for kind in KINDS]
SPECS = {
  "mod": P("data", None),
  "div": P("data", None),
  "column": P(None, "data"),
  "replicated": P(None, None),
}


@pytest.mark.parametrize(
  ("strategy", "kind"), slow_unless(MATRIX, lambda strategy, kind: kind == "explicit")
)
def test_metadata_is_where_the_arrays_are(strategy, kind):
  """NNX reads the sharding of tables and slots off their Variables."""
  mesh = make_mesh(kind)
  features = {
    "wide": embed.FeatureConfig(embed.TableConfig(24, 16, optimizer=embed.adam(), name="wide")),
    "thin": embed.FeatureConfig(
      embed.TableConfig(24, 16, optimizer=embed.rowwise_adagrad(), name="thin")
    ),
  }
  layer = harness.Model(features, mesh=mesh, sharding=strategy).embed
  named = nnx.get_named_sharding(nnx.state(layer, nnx.Any(embed.Table, embed.SlotVariable)), mesh)
  found = dict(nnx.to_flat_state(named))
  arrays = dict(nnx.to_flat_state(nnx.state(layer, nnx.Any(embed.Table, embed.SlotVariable))))
  assert len(found) == 5
  for path, variable in arrays.items():
    value, sharding = variable.get_value(), found[path].get_value()
    wanted = NamedSharding(mesh, P(*SPECS[strategy][: value.ndim]))
    assert sharding.is_equivalent_to(wanted, value.ndim), path
    assert value.sharding.is_equivalent_to(wanted, value.ndim), path


@pytest.mark.ci
@pytest.mark.parametrize("kind", slow_unless(KINDS, "explicit".__eq__))
def test_the_mesh_may_be_set_or_given(kind):
  """`jax.set_mesh`, `mesh=`, or both: one layer; activations come out split over the batch."""
  mesh = make_mesh(kind)
  batch = (embed.Padded(np.arange(32, dtype=np.int32).reshape(16, 2) % V), None)

  def layer(**where):
    table = embed.TableConfig(V, D, sixteenths, embed.sgd(0.25), "sum", name="t")
    return harness.Model(embed.FeatureConfig(table), **where)

  def trained(model):
    @nnx.jit
    def step(model, optimizer, *batch):
      (_, activations), grads = harness.value_and_grad(model, *batch)
      optimizer.update(model, grads)
      return activations

    activations = step(model, embed.Optimizer(model, optax.sgd(0.0)), *batch, jnp.ones((16, D)))
    stored = model.embed.arrays["t"]["parameters"].get_value()
    assert stored.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert activations.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3 - 1)
    return np.asarray(model.embed.tables["t"])

  given_ = trained(layer(mesh=mesh))
  with jax.set_mesh(mesh):
    set_ = trained(layer())
    both = trained(layer(mesh=mesh))
  np.testing.assert_array_equal(set_, given_)
  np.testing.assert_array_equal(both, given_)


def test_unknown_axes_and_strategies_are_named():
  mesh = make_mesh()
  features = embed.FeatureConfig(embed.TableConfig(V, D, optimizer=embed.sgd(), name="t"))
  with pytest.raises(ValueError, match=r"no axis 'model'; its axes are \('data',\)"):
    harness.Model(features, mesh=mesh, axis="model")
  with pytest.raises(ValueError, match=r"strategy must be one of .*'mod'.* Got 'rows'"):
    harness.Model(features, mesh=mesh, sharding="rows")
  with pytest.raises(ValueError, match="split the batch"):
    harness.Model(features, mesh=mesh, axis=None)
