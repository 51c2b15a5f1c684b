"""Which tables SparseCores read and write, and steps on them against XLA's; emulated on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import make_mesh
from optimizer_cases import OPTIMIZERS, optimizer_id
from sparse_cores import CHIPS, emulated
from stored_tables import TwoTables, fetched, wave

import embed
from embed.engine import grads as grads_lib
from embed.engine import rows as rows_lib
from embed.engine import stack as stack_lib
from embed.kernels import sparse_core
from embed.kernels.sparse_core import kernels
from embed.tools import check

V, D = 61, 128


@pytest.fixture
def used(monkeypatch):
  """The CPU as a chip with SparseCores; the names of the kernels that were traced."""
  names = set()
  monkeypatch.setenv(stack_lib.PACKING_SWITCH, "0")
  monkeypatch.setattr(rows_lib, "has_lines", lambda kind: True)

  def noted(name):
    kernel = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *args: names.add(name) or kernel(*args))

  for name in ("take", "put", "bag_sum"):
    noted(name)
  monkeypatch.setattr(sparse_core, "KINDS", (*sparse_core.KINDS, "cpu"))
  with emulated():
    yield names


SETUP = TwoTables(V)
batch = SETUP.batch


def features(optimizer, dim=D, **settings):
  return SETUP.features(optimizer, dim, **settings)


def weights(step, size=16):
  draw = np.random.default_rng(step)
  return {"x": None, "y": embed.Padded(draw.random((size, 4)).astype(np.float32)), "z": None}


def trained(given, mesh=None, steps=3, **settings):
  """Loss, activations, and all rows and slots after some steps."""
  layer = SETUP.made(given, mesh, **settings)
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))

  def loss_fn(layer, ids, weights):
    return sum(map(wave, layer(ids, weights).values()))

  @nnx.jit
  def step(layer, optimizer, ids, weights):
    loss, grads = embed.value_and_grad(loss_fn)(layer, ids, weights)
    optimizer.update(layer, grads)
    return loss, layer(ids, weights)

  for i in range(steps):
    loss, activations = step(layer, optimizer, batch(i), weights(i))
  return fetched((loss, activations, layer.variables))


def assert_close(x, y):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), x, y)


@pytest.mark.weekly
@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=optimizer_id)
def test_three_steps_of_every_optimizer_equal_xlas(used, index):
  name, arguments = OPTIMIZERS[index]
  given = features(getattr(embed, name)(0.125, **arguments))
  off = trained(given, storage="rows")
  assert not used
  on = trained(given, storage="sparse_core")
  assert_close(on, off)
  in_order = arguments.get("use_gradient_accumulation") is False
  dense = arguments.get("lazy_adam") is False
  assert used == ({"bag_sum"} if in_order or dense else {"take", "put", "bag_sum"})


def test_rows_that_were_not_looked_up_keep_their_bits(used):
  given = features(embed.adagrad(0.5))
  (_, _, before), (_, _, after) = (trained(given, steps=n, storage="sparse_core") for n in (1, 3))
  looked_up = [np.asarray(batch(i)[name].values) for i in (1, 2) for name in "xz"]
  others = np.setdiff1d(np.arange(V), np.concatenate([x.ravel() for x in looked_up]))
  assert len(others) > 5
  for key in ("parameters", "accumulators"):
    np.testing.assert_array_equal(after["a"][key][others], before["a"][key][others])
    assert (after["a"][key] != before["a"][key]).any()


@pytest.mark.weekly
def test_steps_in_several_chunks_equal_one(used, monkeypatch):
  given = features(embed.adagrad(0.5))
  at_once = trained(given, storage="sparse_core")
  monkeypatch.setattr(grads_lib, "CHUNK", 0)
  monkeypatch.setattr(grads_lib, "_SMALLEST", 24)
  jax.clear_caches()
  assert_close(trained(given, storage="sparse_core"), at_once)


@pytest.mark.weekly
@pytest.mark.parametrize(
  ("settings", "kind"),
  [
    ({"strategy": "mod", "exchange": "all_to_all"}, "auto"),
    ({"strategy": "div", "exchange": "all_to_all", "capacity": 1}, "explicit"),
    ({"strategy": "mod", "exchange": "gather"}, "explicit"),
    ({"strategy": "replicated"}, "auto"),
  ],
)
def test_steps_on_a_mesh_equal_xlas(used, settings, kind):
  mesh = make_mesh(kind)
  given = features(embed.adagrad(0.5))
  with jax.set_mesh(mesh):
    on, off = (trained(given, mesh, storage=way, **settings) for way in ("sparse_core", "rows"))
  assert_close(on, off)
  assert used >= {"take", "put"}


@pytest.mark.weekly
def test_columns_of_each_device(used):
  """256 columns on two devices are 128 on each; of 128 columns, the 64 on each are packed."""
  mesh = make_mesh("auto", (2,))
  for dim in (256, 128):
    used.clear()
    given = features(embed.adagrad(0.5), dim=dim)
    on, off = (
      trained(given, mesh, storage=way, strategy="column") for way in ("sparse_core", "rows")
    )
    assert_close(on, off)
    assert used == {"take", "put", "bag_sum"}


@pytest.mark.weekly
@pytest.mark.parametrize("dim", [16, 8, 10, 64, 100])
def test_packed_tables(used, dim):
  """Rows of 8 columns are too narrow for the sums of bags on TPU7x."""
  given = features(embed.adagrad(0.5), dim=dim)
  on, off = (trained(given, storage=way) for way in ("sparse_core", "rows"))
  assert_close(on, off)
  assert used == ({"take", "put"} if dim == 8 else {"take", "put", "bag_sum"})


@pytest.mark.weekly
def test_a_packed_slot_of_integers_is_read_and_written_by_xla(used):
  """The kernels take float32: the table is theirs, and its slot `[V, D]` of int32 is not."""
  count = lambda g, w, s, lr: (w - lr * g, {"n": s["n"] + 1})
  slot = embed.Slot(0, dtype=jnp.int32)
  given = features(embed.custom_optimizer(count, {"n": slot}, 0.5), dim=16)
  on, off = (trained(given, storage=way) for way in ("sparse_core", "rows"))
  assert_close(on, off)
  assert on[2]["a"]["n"].dtype == jnp.int32
  assert on[2]["a"]["n"].max() == 3
  assert used == {"take", "put", "bag_sum"}


@pytest.mark.weekly
@pytest.mark.parametrize("exchange", ["all_to_all", "gather"])
@pytest.mark.parametrize("chip", CHIPS)
def test_packed_tables_on_a_mesh(used, exchange, chip):
  given, mesh = features(embed.adagrad(0.5), dim=32), make_mesh()
  settings = {"strategy": "mod", "exchange": exchange}
  off = trained(given, mesh, storage="rows", **settings)
  with emulated(chip):
    on = trained(given, mesh, storage="sparse_core", **settings)
  assert_close(on, off)
  assert used >= {"take", "put"}


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"dim": 2176}, "its rows have 2176 columns on a device, more than 2048"),
    pytest.param(
      {"dtype": jnp.bfloat16}, "its rows are bfloat16, not float32", marks=pytest.mark.weekly
    ),
  ],
)
def test_a_plan_says_why_a_table_is_not_on_sparse_cores(used, changes, reason):
  given = features(embed.adagrad(0.5), **changes)
  plan = embed.plan(given, None, batch(0))
  assert "SparseCores" not in repr(plan)
  plan["a"].storage = plan["b"].storage = "sparse_core"
  assert f"a, b: not on SparseCores: {reason}" in repr(plan)
  on, off = (trained(given, storage=way, steps=1) for way in ("sparse_core", "rows"))
  jax.tree.map(np.testing.assert_array_equal, on, off)
  assert not used


@pytest.mark.weekly
def test_the_self_test_passes_on_sparse_cores(used, monkeypatch):
  monkeypatch.setenv(sparse_core.SWITCH, "1")
  assert "rows by SparseCores" in check.header()
  results = [
    result
    for kind in ("_check_lookups", "_check_optimizers")
    for result in getattr(check, kind)(check.places()["one device, 128 columns"])
  ]
  assert [result for result in results if not result.ok] == []
  assert used == {"take", "put", "bag_sum"}


@pytest.mark.weekly
def test_linear_optimizers_step_in_the_order_of_the_batch_as_before(used):
  """Each id on its own would be a step of a loop; sums in any order are the same for them."""
  given = features(embed.sgd(0.125, use_gradient_accumulation=False))
  on, off = (trained(given, storage=way) for way in ("sparse_core", "rows"))
  assert_close(on, off)
  assert used == {"bag_sum"}


def test_devices_without_sparse_cores_go_on_as_before():
  given = features(embed.adagrad(0.5))
  plan = embed.plan(given, None, batch(0))
  plan["a"].storage = "sparse_core"
  assert "a, b: not on SparseCores: devices of kind cpu are not known to have any" in repr(plan)
  layer = embed.SparseEmbed(given, plan=plan, rngs=nnx.Rngs(0))
  assert nnx.jit(lambda layer, ids: layer(ids))(layer, batch(0))["x"].shape == (16, D)


def test_the_environment_decides_where_a_plan_does_not(used, monkeypatch):
  given = features(embed.adagrad(0.5))
  plan = embed.plan(given, None, batch(0))
  plan["b"].storage = "rows"
  monkeypatch.setenv(sparse_core.SWITCH, "1")
  assert "a: on SparseCores" in repr(plan)
  assert "b: " not in repr(plan).partition("received")[2]
  again = embed.Plan.from_json(plan.to_json(), plan.features)
  assert (again["a"].storage, again["b"].storage) == ("auto", "rows")
