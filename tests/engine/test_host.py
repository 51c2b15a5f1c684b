"""Tables in the memory of the host: the same numbers, and only rows of the batch on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from meshes import assert_close, make_mesh
from stored_tables import TwoTables, assert_in_host, fetched, stored, train_step, wave
from suites import full_unless

import embed
from embed.engine import mesh as mesh_lib

V = 64
OPTIMIZERS = {
  "adagrad": embed.adagrad(0.125),
  "sgd": embed.sgd(0.125),
  "rowwise_adagrad": embed.rowwise_adagrad(0.125),
  "adam": embed.adam(0.125),
  "in order": embed.adagrad(0.125, use_gradient_accumulation=False),
}
SETUP = TwoTables(V, below=20)
features, batch, made, train = SETUP.features, SETUP.batch, SETUP.made, SETUP.train


# --- by hand --------------------------------------------------------------------------------------


def test_one_step_by_hand():
  table = embed.TableConfig(
    4, 2, optimizer=embed.sgd(0.5), initializer=jax.nn.initializers.ones, name="t"
  )
  plan = embed.plan(embed.FeatureConfig(table), None, np.zeros(2, np.int32))
  plan["t"].storage = "host"
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  activations, residual = layer.lookup(np.array([3, -1]))
  assert activations.tolist() == [[1, 1], [0, 0]]
  assert activations.sharding.memory_kind != mesh_lib.HOST
  layer.apply_gradients(jnp.ones((2, 2)), residual)
  assert np.asarray(layer.tables["t"]).tolist() == [[1, 1], [1, 1], [1, 1], [0.5, 0.5]]
  assert_in_host(layer)


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_tables_on_the_device(name):
  """But for the order of sums."""
  given = features(OPTIMIZERS[name])
  layer = made(given, storage="host")
  assert_close(train(layer, 4), train(made(given), 4), scale=2e-5)
  assert_in_host(layer)


@pytest.mark.full
def test_rows_that_were_not_looked_up_keep_their_bits():
  given = features(embed.adagrad(0.5))
  (_, before), (_, after) = (train(made(given, storage="host"), n) for n in (1, 3))
  for key in ("parameters", "accumulators"):
    np.testing.assert_array_equal(after["a"][key][20:], before["a"][key][20:])
    assert (after["a"][key] != before["a"][key]).any()


@pytest.mark.full
def test_bfloat16_rows_are_rounded_as_on_the_device():
  given = features(embed.adagrad(0.5), dtype=jnp.bfloat16)
  layers = [made(given, storage=storage) for storage in ("host", "auto")]
  for layer in layers:
    activations, residual = layer.lookup(batch(0))
    layer.apply_gradients(jax.tree.map(jnp.ones_like, activations), residual, step=3)
  in_host, on_device = (layer.tables["a"] for layer in layers)
  assert in_host.dtype == jnp.bfloat16
  assert_close(in_host, on_device, scale=1e-2)


def all_avals(jaxpr):
  for eqn in jaxpr.eqns:
    yield from (v.aval for v in (*eqn.invars, *eqn.outvars))
    for sub in jaxprs_in_params(eqn.params):
      yield from all_avals(sub)


@pytest.mark.parametrize("devices", [1, 8])
def test_no_array_of_a_tables_size_is_on_the_device(devices):
  mesh = make_mesh() if devices == 8 else None
  rows = 40_000
  table = embed.TableConfig(rows, 8, optimizer=embed.adagrad(0.125), name="t")
  plan = embed.plan(embed.FeatureConfig(table), mesh, np.zeros(16, np.int32))
  plan["t"].storage, plan["t"].strategy = "host", "div"
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  graphdef, state = nnx.split((layer, embed.Optimizer(layer, optax.sgd(0.1))))

  def step(state, ids):
    layer, optimizer = nnx.merge(graphdef, state)
    _, grads = embed.value_and_grad(lambda layer, ids: wave(layer(ids)))(layer, ids)
    optimizer.update(layer, grads)
    return nnx.state((layer, optimizer))

  jaxpr = jax.make_jaxpr(step)(state, np.zeros(16, np.int32)).jaxpr
  large = [x for x in all_avals(jaxpr) if getattr(x, "size", 0) >= rows * 8 // devices]
  assert len(large) > 4
  assert {x.memory_space for x in large} == {jax.memory.Space.Host}


# --- tables as users see them ---------------------------------------------------------------------


def sources(dtype):
  """Equal rows and slots in the memory of the host, on a mesh and on another device."""
  rows, slots = np.arange(12.0).reshape(6, 2), np.arange(6.0)
  for where in ("host", "mesh", "other"):
    mesh = make_mesh() if where == "mesh" else None
    layer = small(dtype, mesh, "host" if where == "host" else "auto")
    layer.load_variables({"t": {"parameters": rows, "accumulators": slots}})
    if where == "other":
      state = nnx.state(layer, nnx.Any(embed.Table, embed.SlotVariable))
      nnx.update(layer, jax.device_put(state, jax.devices()[1]))
    yield layer


def small(dtype, mesh=None, storage="auto"):
  table = embed.TableConfig(6, 2, name="t", dtype=dtype, optimizer=embed.rowwise_adagrad(0.5))
  plan = embed.plan({"x": embed.FeatureConfig(table)}, mesh, {"x": np.zeros(8, np.int32)})
  plan["t"].storage = storage
  return embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))


ENTRIES = {
  "load_tables": lambda source, target: target.load_tables(source.tables),
  "load_variables": lambda source, target: target.load_variables(source.variables),
  "from_tree": lambda source, target: embed.checkpoint.from_tree(
    embed.checkpoint.to_tree(model=source), model=target
  ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("storage", full_unless(["auto", "host"], "host".__eq__))
def test_loaded_arrays_are_where_the_plan_says(storage, dtype):
  """A table kept the memory, and the devices, of the array that it was loaded from."""
  ids = {"x": np.array([5, 0], np.int32)}
  for source in sources(dtype):
    for entry in ENTRIES.values():
      target = small(dtype, storage=storage)
      before = [x.sharding for x in stored(target)]
      entry(source, target)
      assert [x.sharding for x in stored(target)] == before
      assert target(ids)["x"].tolist() == [[10, 11], [0, 1]]


def test_a_loaded_table_of_another_dtype_is_converted():
  (source, *_) = sources(jnp.bfloat16)
  target = small(jnp.float32)
  target.load_tables(source.tables)
  rows = target.tables["t"]
  assert (rows.dtype, rows.sharding.memory_kind) == (jnp.float32, "device")
  assert rows.tolist() == np.arange(12.0).reshape(6, 2).tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_in_host_memory_are_served(dtype):
  layer = next(sources(dtype))
  features, ids = layer.spec.features, {"x": np.array([5, 0])}
  serve = lambda tables: embed.serving_lookup(ids, None, tables, features)
  for act in (serve(layer.tables)["x"], jax.jit(serve)(layer.tables)["x"]):
    assert act.sharding.memory_kind == "device"
    assert act.tolist() == [[10, 11], [0, 1]]


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("devices", full_unless([1, 8], lambda devices: devices == 8))
def test_a_table_of_four_times_the_memory_trains_from_the_host(devices):
  """Of two tables, the one with most rows for an id."""
  mesh = make_mesh() if devices == 8 else None
  large = embed.TableConfig(80_000, 16, name="large")
  small = embed.TableConfig(100, 16, name="small")
  given = {"large": embed.FeatureConfig(large), "small": embed.FeatureConfig(small)}
  ids = {"large": np.arange(16, dtype=np.int32), "small": np.arange(16, dtype=np.int32)}
  hbm = 80_000 * 16 * 4 // devices // 4
  assert (
    embed.plan(given, mesh, ids, embed.adagrad(0.125), hbm_bytes=hbm * 9)["large"].storage == "auto"
  )
  plan = embed.plan(given, mesh, ids, embed.adagrad(0.125), hbm_bytes=hbm)
  assert (plan["large"].storage, plan["small"].storage) == ("host", "auto")
  assert plan.fits
  assert "large: in the memory of the host" in repr(plan)
  in_host = 2 * 80_000 * 16 * 4 // devices
  assert [c.rows + c.slots for c in plan.costs() if c.memory == "host"] == [in_host]
  again = embed.Plan.from_json(plan.to_json(), given, mesh, embed.adagrad(0.125))
  on_device = embed.plan(given, mesh, ids, embed.adagrad(0.125), hbm_bytes=1 << 40)
  results = []
  for chosen in (again, on_device):
    layer = embed.SparseEmbed(plan=chosen, rngs=nnx.Rngs(0))
    optimizer, step = embed.Optimizer(layer, optax.sgd(0.1)), nnx.jit(train_step)
    for _ in range(3):
      step(layer, optimizer, ids)
    results.append(fetched(layer.variables))
  assert_close(*results)


def test_what_does_not_fit_anywhere_is_said():
  """Adam that moves every row would bring the whole table to the device."""
  given = embed.FeatureConfig(embed.TableConfig(1000, 16, name="t"))
  dense = embed.adam(lazy_adam=False)
  plan = embed.plan(given, None, np.zeros(4, np.int32), dense, hbm_bytes=1000)
  assert plan["t"].storage == "auto"
  assert "does not fit 1000" in repr(plan)
  plan["t"].storage = "host"
  with pytest.raises(ValueError, match='storage="host": its optimizer moves every row'):
    embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"storage must be one of .*'host'.*Got 'disk'"):
    plan["t"].storage = "disk"


def test_gpus_are_refused(monkeypatch):
  monkeypatch.setattr(mesh_lib, "HOST_PLATFORMS", ("tpu",))
  plan = embed.plan(features(embed.sgd(0.5)), None, batch(0), hbm_bytes=1000)
  assert plan["a"].storage == "auto"
  plan["a"].storage = "host"
  with pytest.raises(
    ValueError, match='for TPUs and CPUs, and these devices are of the platform "cpu"'
  ):
    plan.stacks()


def test_only_what_helps_is_moved():
  """The large table alone is enough; if it cannot be moved, the small one stays as well."""
  tiny = embed.TableConfig(1000, 16, name="tiny")
  given = {"tiny": embed.FeatureConfig(tiny)}
  ids = {"tiny": np.zeros(1, np.int32), "big": np.zeros(100_000, np.int32)}
  for optimizer, memories in (
    (embed.sgd(0.1), {"big": "host", "tiny": "auto"}),
    (embed.adam(lazy_adam=False), {"big": "auto", "tiny": "auto"}),
  ):
    big = embed.TableConfig(100_000, 16, optimizer=optimizer, name="big")
    features = given | {"big": embed.FeatureConfig(big)}
    plan = embed.plan(features, None, ids, embed.sgd(0.1), hbm_bytes=1 << 20)
    assert {name: plan[name].storage for name in plan} == memories


@pytest.mark.parametrize("kind", full_unless(["auto", "explicit"], "auto".__eq__))
def test_stores_and_looks_ahead_under_jit(kind):
  """The rows stay where they are, whoever replaces or reads them."""
  mesh = make_mesh(kind)
  table = embed.TableConfig(V, 8, optimizer=embed.adagrad(0.125), name="t")
  plan = embed.plan(embed.FeatureConfig(table), mesh, np.zeros(16, np.int32))
  plan["t"].storage, plan["t"].strategy = "host", "div"
  with jax.set_mesh(mesh):
    layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
    nnx.jit(lambda layer, rows: layer.load_tables({"t": rows}))(layer, jnp.ones((V, 8)))
    assert_in_host(layer)
    assert np.asarray(layer.tables["t"]).min() == 1
    assert layer.attend(jnp.ones((2, 8)), "t").tolist() == [[8] * V] * 2
    loss_fn = lambda layer, ids: wave(layer(ids))
    step = lambda layer, ids: embed.value_and_grad(
      loss_fn, ahead=embed.look_ahead(loss_fn)(layer, ids)
    )(layer, ids)[0]
    ids = np.arange(16, dtype=np.int32)
    assert np.isfinite(nnx.jit(step)(layer, ids))
