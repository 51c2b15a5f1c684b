"""Tables as users and checkpoints see them: rows in order, the same from any mesh to any other."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import assert_close, assert_equal, make_mesh

import embed
from recipes import mesh as mesh_lib

PLACES = {
  "mod": {"mesh": {}, "sharding": "mod"},
  "div": {"mesh": {"kind": "explicit"}, "sharding": "div"},
  "plane": {"mesh": {"shape": (2, 4), "names": ("a", "b")}, "axis": ("b", "a")},
}


def at(place):
  """Arguments of `SparseEmbed`."""
  where = dict(PLACES[place])
  return where | {"mesh": make_mesh(**where["mesh"])}


def fetched(tree):
  return jax.tree.map(np.asarray, tree)


# --- initial values ------------------------------------------------------------------------------


def different_initializers():
  normal = jax.nn.initializers.normal(0.5)
  tables = {
    "default": embed.TableConfig(20_001, 3, name="default"),  # more rows than are made at a time
    "row_wise": embed.TableConfig(13, 3, embed.row_wise(normal), name="row_wise"),
    "whole": embed.TableConfig(21, 3, normal, name="whole"),
    "half": embed.TableConfig(16, 24, name="half", dtype=jnp.bfloat16),
  }
  optimizer = embed.adagrad_momentum()
  return {name: embed.FeatureConfig(table) for name, table in tables.items()}, optimizer


@pytest.fixture(scope="module")
def initial_values():
  """Those of plain rows on one device."""
  return fetched(harness.Model(*different_initializers()).embed.variables)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("way", "place"), [("rows", "mod"), ("lines", "mod"), ("rows", "plane")], indirect=["way"]
)
def test_initial_values_do_not_depend_on_the_mesh(initial_values, way, place):
  """Rows and slots, bit for bit, drawn per row or as a whole."""
  model = harness.Model(*different_initializers(), **at(place))
  found = jax.jit(lambda model: model.embed.variables)(model)
  assert_equal(fetched(found), initial_values)


# --- reading and loading -------------------------------------------------------------------------

# Rows that divide by 8 and not by 3; that divide by neither; columns that divide, and by 4 only.
SIZES = {"even": (40, 3), "odd": (37, 3), "wide": (21, 16), "some": (21, 12)}


def numbered_features():
  """The tables of one width share an array; a slot of one value per element and one per row."""
  slots = {"m": 0.0, "n": embed.Slot(per_row=True)}
  optimizer = embed.custom_optimizer(lambda g, w, s, lr: (w, s), slots)
  zeros = jax.nn.initializers.zeros
  tables = [embed.TableConfig(*shape, zeros, name=name) for name, shape in SIZES.items()]
  return [embed.FeatureConfig(table) for table in tables], optimizer


def numbered_model(**where):
  return harness.Model(*numbered_features(), **where)


def numbered():
  """Every element of every array has a value of its own."""
  found = {}
  for i, (name, shape) in enumerate(SIZES.items()):
    shapes = {"parameters": shape, "m": shape, "n": shape[:1]}
    count = lambda shape, start: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + start
    found[name] = {
      key: count(each, 1000 * (3 * i + j)) for j, (key, each) in enumerate(shapes.items())
    }
  return found


load = nnx.jit(lambda model, variables: model.embed.load_variables(variables))
read = jax.jit(lambda model: model.embed.variables)


@pytest.mark.programs(60, "tables and slots are made in a place of their own")
@pytest.mark.parametrize(
  ("way", "place"),
  [
    ("rows", "mod"),
    *[pytest.param("rows", place, marks=pytest.mark.ci) for place in PLACES if place != "mod"],
    pytest.param("lines", "mod", marks=pytest.mark.ci),
    pytest.param("sparse_cores", "mod", marks=pytest.mark.weekly),
  ],
  indirect=["way"],
)
def test_tables_are_read_as_they_are_loaded(way, place):
  model, wanted = numbered_model(**at(place)), numbered()
  load(model, wanted)
  assert_equal(fetched(read(model)), wanted)


@pytest.mark.ci
def test_load_tables_takes_any_array():
  """And leaves slots, and the other tables of an array, as they are."""
  mesh = make_mesh()
  model, wanted = numbered_model(mesh=mesh), numbered()
  load(model, wanted)
  rows = wanted["even"]["parameters"]
  split = jax.device_put(rows + 2, jax.NamedSharding(mesh, P("data")))
  for given in (rows + 1, split, (rows + 3).tolist()):
    wanted["even"]["parameters"] = np.asarray(given)
    model.embed.load_tables({"even": given})
    assert_equal(fetched(read(model)), wanted)


@pytest.mark.ci
def test_loaded_arrays_are_where_those_before_were():
  """Not where the array was that they are loaded from."""
  features = embed.FeatureConfig(embed.TableConfig(6, 2, name="t"))
  make = lambda: embed.SparseEmbed(features, embed.rowwise_adagrad(0.5), rngs=nnx.Rngs(0))
  stored = lambda layer: nnx.state(layer, nnx.Any(embed.Table, embed.SlotVariable))
  source = make()
  source.load_tables({"t": np.arange(12.0).reshape(6, 2)})
  nnx.update(source, jax.device_put(stored(source), jax.devices()[1]))
  tree = embed.checkpoint.to_tree(model=source)
  for load in (
    lambda target: target.load_variables(source.variables),
    lambda target: embed.checkpoint.from_tree(tree, model=target),
  ):
    target = make()
    before = [x.sharding for x in jax.tree.leaves(stored(target))]
    load(target)
    assert [x.sharding for x in jax.tree.leaves(stored(target))] == before
    assert target(np.array([5, 0])).tolist() == [[10, 11], [0, 1]]


# --- checkpoints ---------------------------------------------------------------------------------


class Ranker(nnx.Module):
  """Tables of two arrays, and dense layers with a state beside."""

  def __init__(self, seed, **where):
    rngs, adagrad = nnx.Rngs(seed), embed.rowwise_adagrad(0.1)
    movie = embed.TableConfig(37, 4, name="movie", optimizer=embed.adam(0.1))
    user = embed.TableConfig(11, 4, name="user", optimizer=adagrad)
    features = {"m": embed.FeatureConfig(movie), "u": embed.FeatureConfig(user)}
    self.embed = embed.SparseEmbed(features, rngs=rngs, **where)
    self.head = nnx.Linear(4, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)

  def __call__(self, ids):
    act = self.embed({"m": ids, "u": ids % 11})
    return jnp.mean((self.norm(self.head(act["m"])) * act["u"]) ** 2)


def run(devices, strategy="mod", seed=0, replicate=True):
  mesh = make_mesh("auto", (devices,))
  model = Ranker(seed, mesh=mesh, sharding=strategy)
  optimizer = embed.Optimizer(model, optax.adam(0.01))
  if replicate:
    mesh_lib.replicate(mesh, model, optimizer)
  return model, optimizer


def train(model, optimizer, steps, start=0):
  @nnx.jit(donate_argnames=("model", "optimizer"))
  def step(model, optimizer, ids):
    loss, grads = embed.value_and_grad(lambda model, ids: model(ids))(model, ids)
    optimizer.update(model, grads)
    return loss

  return [
    float(step(model, optimizer, np.arange(i, i + 12) * 5 % 37))
    for i in range(start, start + steps)
  ]


@pytest.mark.ci
def test_a_run_goes_on_elsewhere(tmp_path):
  """On other devices, by another strategy: all bits come back, and losses go on.

  From Orbax; and from a tree on other devices, into dense parameters that are on none.
  """
  model, optimizer = run(8)
  train(model, optimizer, 2)
  tree = embed.checkpoint.to_tree(model=model, optimizer=optimizer)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "c", tree)
  tree = fetched(tree)
  losses = train(model, optimizer, 2, start=2)
  model, optimizer = run(4, "div", seed=1)
  embed.checkpoint.restore(tmp_path / "c", model=model, optimizer=optimizer)
  assert_equal(fetched(embed.checkpoint.to_tree(model=model, optimizer=optimizer)), tree)
  assert_close(train(model, optimizer, 2, start=2), losses, scale=1e-5)
  tree = jax.device_put(tree, jax.NamedSharding(make_mesh(), P()))
  model, optimizer = run(4, seed=1, replicate=False)
  embed.checkpoint.from_tree(tree, model=model, optimizer=optimizer)
  assert_close(train(model, optimizer, 1, start=2), losses[:1], scale=1e-5)
