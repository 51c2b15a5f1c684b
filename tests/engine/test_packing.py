"""Packed tables: where rows are in lines, and that nobody sees it but the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from meshes import assert_close, assert_equal, make_mesh
from optimizer_cases import EXTRA, OPTIMIZERS, optimizer_id
from stored_tables import TwoTables
from suites import slow_unless

import embed
from embed.engine import mesh as mesh_lib
from embed.engine import rows as rows_lib
from embed.engine import stack as stack_lib
from embed.engine.rows import Lines

V = 61  # no multiple of the rows of a line
SETUP = TwoTables(V)
features, batch, made, train = SETUP.features, SETUP.batch, SETUP.made, SETUP.train


@pytest.fixture(params=[pytest.param("rows", marks=pytest.mark.weekly), "lines"])
def as_on(request, monkeypatch):
  """As CPUs and GPUs do it, and as TPUs do, which read and write parts of lines."""
  monkeypatch.setattr(rows_lib, "has_lines", lambda kind: request.param == "lines")
  return request.param


# --- by hand --------------------------------------------------------------------------------------


def test_four_rows_to_a_line():
  rows = jnp.arange(8.0)[:, None] * jnp.ones(32)
  lines = rows_lib.pack(rows)
  assert lines.shape == (2, 128)
  assert lines[0, ::32].tolist() == [0, 1, 2, 3]
  assert lines[1, ::32].tolist() == [4, 5, 6, 7]
  assert Lines(lines, 32).take(jnp.array([6, 1])).tolist() == [[6] * 32, [1] * 32]
  assert Lines(lines, 32).shape == (8, 32)


def test_rows_that_fill_no_power_of_two_are_filled_up():
  rows = jnp.arange(5 * 16.0).reshape(16, 5)
  lines = rows_lib.pack(rows)
  assert lines.shape == (1, 128)
  assert lines[0, :9].tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 5]
  assert rows_lib.unpack(lines, 5).tolist() == rows.tolist()


def test_wide_rows_take_whole_lines():
  rows = jnp.arange(2 * 200.0).reshape(2, 200)
  assert rows_lib.pack(rows).shape == (2, 256)
  assert Lines(rows_lib.pack(rows), 200).take(jnp.array([1])).tolist() == rows[1:].tolist()


# --- a property -----------------------------------------------------------------------------------


@given(st.sampled_from([1, 7, 8, 16, 33, 64, 100, 130]), st.integers(1, 4), st.data())
def test_lines_equal_rows(width, units, data):
  """Ids may repeat where rows are read or added, and be no row anywhere."""
  size = units * stack_lib.rows_per_line(width)
  draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
  table = draw.integers(-9, 9, (size, width)).astype(np.float32)
  ids = np.array(data.draw(st.lists(st.integers(-3, size + 3), min_size=1, max_size=20)), np.int32)
  rows = draw.integers(-9, 9, (len(ids), width)).astype(np.float32)
  lines, is_row = Lines(rows_lib.pack(table), width), (ids >= 0) & (ids < size)
  read = np.where(is_row[:, None], table[np.clip(ids, 0, size - 1)], 0)
  np.testing.assert_array_equal(lines.take(jnp.asarray(ids)), read)
  added = table.copy()
  np.add.at(added, ids[is_row], rows[is_row])
  found = rows_lib.unpack(lines.add(jnp.asarray(ids), rows).array, width)
  np.testing.assert_array_equal(found, added)
  distinct, first = np.unique(ids, return_index=True)
  written, chosen = table.copy(), is_row[first]
  written[distinct[chosen]] = rows[first][chosen]
  put = lines.put(jnp.asarray(distinct), rows[first])
  np.testing.assert_array_equal(rows_lib.unpack(put.array, width), written)


# --- steps ----------------------------------------------------------------------------------------


OF_NAME = {
  optimizer_id(i): getattr(embed, name)(0.125, **config)
  for i, (name, config) in enumerate(OPTIMIZERS)
} | {name: make() for name, make in EXTRA.items()}
# Every optimizer on one device and eight, and on rows that have to be filled up.
CASES = [(name, *at) for name in OF_NAME for at in ((1, 16), (8, 16), (1, 10), (8, 10))]
SLOTS = [("adam-epsilon", 1, 16), ("rowwise_adagrad", 1, 16), ("custom_optimizer", 1, 16)]
QUICK, FILLED = ("adagrad", 1, 16), ("adagrad", 8, 10)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("name", "devices", "dim"), slow_unless(CASES, lambda *case: case in (QUICK, FILLED))
)
def test_twenty_steps_equal_those_of_plain_tables_to_the_bit(name, devices, dim, monkeypatch):
  monkeypatch.setattr(rows_lib, "has_lines", lambda kind: False)
  mesh, optimizer = make_mesh() if devices == 8 else None, OF_NAME[name]
  given = features(optimizer, dim)
  layers = [made(given, mesh, storage=way) for way in ("packed", "rows")]
  is_packed = [stack.is_packed for stack in layers[0].spec.stacks.values()]
  assert all(is_packed) == optimizer.lazy
  (_, packed), (_, plain) = (train(layer, 20) for layer in layers)
  assert_equal(packed, plain)


@pytest.mark.parametrize(
  ("name", "devices", "dim"),
  slow_unless(CASES, lambda *case: case in (QUICK, FILLED, *SLOTS), lambda *case: case == QUICK),
)
def test_steps_on_lines_equal_those_on_rows(name, devices, dim, monkeypatch):
  """But for the order of sums, which accelerators choose themselves."""
  monkeypatch.setattr(rows_lib, "has_lines", lambda kind: True)
  mesh = make_mesh() if devices == 8 else None
  given = features(OF_NAME[name], dim)
  packed, plain = (train(made(given, mesh, storage=way), 3) for way in ("packed", "rows"))
  assert_close(packed, plain, scale=2e-5)


@pytest.mark.ci
def test_bfloat16_with_stochastic_rounding(as_on):
  given = features(embed.adagrad(0.5), dtype=jnp.bfloat16, stochastic_rounding=True)
  layers = [made(given, storage=way) for way in ("packed", "rows")]
  for layer in layers:
    activations, residual = nnx.jit(lambda layer, ids: layer.lookup(ids))(layer, batch(0))
    layer.apply_gradients(jax.tree.map(jnp.ones_like, activations), residual, step=3)
  packed, plain = (layer.tables["a"] for layer in layers)
  assert packed.dtype == jnp.bfloat16
  assert_equal(np.asarray(packed, np.float32), np.asarray(plain, np.float32))


def test_places_that_fill_up_a_line_are_never_read_nor_trained(as_on):
  """Padding is the first number that is no row, which in a packed array is a place."""
  table = embed.TableConfig(5, 4, optimizer=embed.sgd(1.0), combiner="sum", name="t")
  plan = embed.plan(embed.FeatureConfig(table), None, np.zeros(4, np.int32))
  plan["t"].storage = "packed"
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  look_up = nnx.jit(lambda layer, ids: layer.lookup(ids), graph=False)
  activations, residual = look_up(layer, np.array([4, 5, 6, -1]))
  assert not activations[1:].any()
  layer.apply_gradients(jnp.ones((4, 4)), residual)
  ((stored,),) = [jax.tree.leaves(nnx.state(layer, embed.Table))]
  assert stored.shape == (1, 128)
  assert not stored.reshape(16, 8)[5:].any()
  assert int(layer.report["dropped_ids"]) == 2


# --- plans ----------------------------------------------------------------------------------------


def test_the_default_follows_the_devices(monkeypatch):
  monkeypatch.delenv(stack_lib.PACKING_SWITCH, raising=False)
  plan = embed.plan(features(embed.adagrad(0.5)), None, batch(0))

  def stored(kind, storage="auto"):
    monkeypatch.setattr(mesh_lib.Placement, "device_kind", kind)
    plan["a"].storage = plan["b"].storage = storage
    (stack,) = plan.stacks().values()
    return "packed" if stack.is_packed else "rows"

  assert stored("TPU v5 lite") == "packed"
  assert stored("cpu") == stored("NVIDIA H100 80GB HBM3") == "rows"
  assert stored("cpu", "packed") == "packed"
  assert stored("TPU v6 lite", "rows") == "rows"
  monkeypatch.setenv(stack_lib.PACKING_SWITCH, "0")
  assert stored("TPU v6 lite") == "rows"
  assert stored("TPU v6 lite", "packed") == "packed"


@pytest.mark.parametrize(
  ("dim", "optimizer", "text"),
  [
    (16, embed.adagrad(0.5), "a, b: packed, 8 rows to a line of 128 columns"),
    (100, embed.adagrad(0.5), "a, b: packed, filled up to 128 columns"),
    (128, embed.adagrad(0.5), "a, b: not packed: its rows have 128 columns on a device"),
    (16, embed.adam(lazy_adam=False), "a, b: not packed: its optimizer moves every row in a step"),
  ],
)
def test_a_plan_says_how_tables_are_stored(dim, optimizer, text, monkeypatch):
  monkeypatch.delenv(stack_lib.PACKING_SWITCH, raising=False)
  plan = embed.plan(features(optimizer, dim), None, batch(0))
  assert "packed" not in repr(plan)
  plan["a"].storage = plan["b"].storage = "packed"
  assert text in repr(plan)
  again = embed.Plan.from_json(plan.to_json(), plan.features)
  assert again["a"].storage == "packed"
  with pytest.raises(ValueError, match=r"storage must be one of .*'packed'.*Got 'lines'"):
    plan["a"].storage = "lines"


def test_a_plan_counts_what_rows_take():
  """61 and 122 rows of 5 columns are 4 and 8 lines of 16 rows of 8 columns."""
  plan = embed.plan(features(embed.adagrad(0.5), 5), None, batch(0))
  plan["a"].storage = plan["b"].storage = "packed"
  (cost,) = plan.costs()
  assert (cost.rows, cost.slots) == (12 * 128 * 4,) * 2
