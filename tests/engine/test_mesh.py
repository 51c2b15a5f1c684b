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
from meshes import make_mesh, sixteenths

import embed

V, D = 21, 3
zeros = jax.nn.initializers.zeros
SPECS = {"mod": P("data", None), "div": P("data", None), "replicated": P(None, None)}


@pytest.mark.programs(40, "tables and slots of three strategies are made where they are")
@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.ci)])
def test_metadata_is_where_the_arrays_are(kind):
  """NNX reads the sharding of tables and slots off their Variables."""
  mesh = make_mesh(kind)
  table = lambda name: embed.TableConfig(24, 16, zeros, embed.rowwise_adagrad(), name=name)
  features = {name: embed.FeatureConfig(table(name)) for name in SPECS}
  plan = embed.plan(features, mesh, dict.fromkeys(features, np.zeros(8, np.int32)))
  for name in SPECS:
    plan[name].strategy = name
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  for name, variables in layer.arrays.items():
    assert set(variables) == {"parameters", "accumulators"}
    for variable in variables.values():
      value = variable.get_value()
      wanted = NamedSharding(mesh, P(*SPECS[name][: value.ndim]))
      named = nnx.get_named_sharding(nnx.state({"x": variable}), mesh)["x"].get_value()
      assert named.is_equivalent_to(wanted, value.ndim), name
      assert value.sharding.is_equivalent_to(wanted, value.ndim), name


@pytest.mark.ci
def test_the_mesh_may_be_set_or_given():
  """`jax.set_mesh` or `mesh=`: one layer; activations come out split over the batch."""
  mesh = make_mesh("explicit")
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
    assert activations.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    return np.asarray(model.embed.tables["t"])

  given = trained(layer(mesh=mesh))
  with jax.set_mesh(mesh):
    np.testing.assert_array_equal(trained(layer()), given)


def test_unknown_axes_and_strategies_are_named():
  mesh = make_mesh()
  features = embed.FeatureConfig(embed.TableConfig(V, D, optimizer=embed.sgd(), name="t"))
  with pytest.raises(ValueError, match=r"no axis 'model'; its axes are \('data',\)"):
    harness.Model(features, mesh=mesh, axis="model")
  with pytest.raises(ValueError, match=r"`strategy` must be one of .*'mod'.* Got 'rows'"):
    harness.Model(features, mesh=mesh, sharding="rows")
  with pytest.raises(ValueError, match="split the batch"):
    harness.Model(features, mesh=mesh, axis=None)
