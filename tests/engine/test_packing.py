"""Packed tables: where rows are in lines, and which tables are packed."""

import jax
import numpy as np
import pytest
from flax import nnx
from stored_tables import TwoTables

import embed
from embed.engine import mesh as mesh_lib
from embed.engine import rows as rows_lib
from embed.engine import stack as stack_lib
from embed.engine.rows import Lines

SETUP = TwoTables(61)  # rows, no multiple of those of a line
features, batch = SETUP.features, SETUP.batch


@pytest.mark.parametrize("width", [32, 5, 200])
def test_lines_by_hand(width):
  """Four rows to a line, rows of 5 columns that are filled up to 8, and rows of two lines."""
  size = {32: 8, 5: 16, 200: 2}[width]
  table = 1 + np.arange(size * width, dtype=np.float32).reshape(size, width)

  lines = jax.jit(rows_lib.pack)(table)
  filled = {32: 32, 5: 8, 200: 256}[width]
  expected = np.zeros((size, filled), np.float32)
  expected[:, :width] = table
  np.testing.assert_array_equal(lines, expected.reshape(-1, max(filled, 128)))
  back = jax.jit(rows_lib.unpack, static_argnums=1)(lines, width)
  np.testing.assert_array_equal(back, table)


@pytest.mark.parametrize("width", [5, 64, 130])
def test_lines_equal_rows(width):
  """Ids may repeat where rows are read or added, and be no row anywhere."""
  size, draw = 3 * stack_lib.rows_per_line(width), np.random.default_rng(width)
  numbers = lambda count: draw.integers(-9, 9, (count, width)).astype(np.float32)
  ids = np.array([-3, -1, 0, 1, size - 1, size, size + 3, 2, 0, 1, 1, -1], np.int32)
  distinct = np.array([-3, 1, size - 1, size, size + 3, 0], np.int32)
  table, rows, new = numbers(size), numbers(len(ids)), numbers(len(distinct))
  is_row = lambda ids: (ids >= 0) & (ids < size)

  @jax.jit
  def run(table, rows, new):
    lines = Lines(rows_lib.pack(table), width)
    changed = lines.add(ids, rows), lines.put(distinct, new)
    return lines.take(ids), *(rows_lib.unpack(x.array, width) for x in changed)

  read = np.where(is_row(ids)[:, None], table[np.clip(ids, 0, size - 1)], 0)
  added, written = table.copy(), table.copy()
  np.add.at(added, ids[is_row(ids)], rows[is_row(ids)])
  written[distinct[is_row(distinct)]] = new[is_row(distinct)]
  for found, wanted in zip(run(table, rows, new), (read, added, written), strict=True):
    np.testing.assert_array_equal(found, wanted)


def test_places_that_fill_up_a_line_are_never_read_nor_trained():
  """Padding is the first number that is no row, which in a packed array is a place."""
  ones = lambda key, shape, dtype: np.ones(shape, dtype)
  table = embed.TableConfig(5, 4, ones, embed.sgd(1.0), "sum", "t")
  plan = embed.plan(embed.FeatureConfig(table), None, np.zeros(4, np.int32))
  plan["t"].storage = "packed"
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))

  @nnx.jit
  def step(layer, ids, grads):
    activations, residual = layer.lookup(ids)
    layer.apply_gradients(grads, residual)
    return activations

  activations = np.asarray(step(layer, np.array([4, 5, 6, -1]), np.ones((4, 4), np.float32)))
  assert activations.tolist() == [[1] * 4, *[[0] * 4] * 3]
  (stored,) = jax.tree.leaves(nnx.state(layer, embed.Table))
  rows = np.asarray(stored).reshape(16, 8)
  assert rows[:, 0].tolist() == [1, 1, 1, 1, 0, *[0] * 11]
  assert not rows[:, 4:].any()
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


@pytest.mark.parametrize(("dim", "is_packed"), [(100, True), (128, False)])  # a row is a line
def test_rows_of_whole_lines_are_not_packed(dim, is_packed):
  plan = embed.plan(features(embed.adagrad(0.5), dim), None, batch(0))
  plan["a"].storage = plan["b"].storage = "packed"
  (stack,) = plan.stacks().values()
  assert stack.is_packed == is_packed


def test_a_plan_counts_what_rows_take():
  """61 and 122 rows of 5 columns are 4 and 8 lines of 16 rows of 8 columns."""
  plan = embed.plan(features(embed.adagrad(0.5), 5), None, batch(0))
  plan["a"].storage = plan["b"].storage = "packed"
  (cost,) = plan.costs()
  assert (cost.rows, cost.slots) == (12 * 128 * 4,) * 2
