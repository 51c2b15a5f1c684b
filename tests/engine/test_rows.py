"""A layer of packed rows has the numbers of plain rows, where they go in and out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import assert_close, assert_equal, make_mesh
from stored_tables import TwoTables, fetched

import embed

V = 61  # no multiple of the rows of a line
SETUP = TwoTables(V)


def numbered(layer, first):
  """Tables and slots of other numbers each."""
  count = lambda x: first + np.arange(x.size, dtype=np.float32).reshape(x.shape)
  return jax.tree.map(count, fetched(dict(layer.variables)))


@pytest.mark.ci
def test_checkpoints_and_deltas_go_both_ways():
  given = SETUP.features(embed.rowwise_adagrad(0.5))
  for kinds in (("packed", "rows"), ("rows", "packed")):
    source, target = (
      SETUP.made(given, make_mesh(), storage=kind, strategy="mod") for kind in kinds
    )
    rows = numbered(source, 0)
    source.load_variables(rows)
    embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=source), model=target)
    assert_equal(fetched(dict(target.variables)), rows)
    before = embed.deltas.fingerprint(0, model=source)
    rows["a"]["parameters"][[3, V - 1]] = -1
    rows["b"]["accumulators"][7] = -1
    source.load_variables(rows)
    delta, _ = embed.deltas.changes(before, 3, model=source)
    assert [len(table.ids) for table in delta.tables["model"].values()] == [2, 1]
    embed.deltas.apply(delta, 0, model=target)
    assert_equal(fetched(dict(target.variables)), rows)


@pytest.mark.ci
def test_attend_export_and_loaded_rows():
  given = SETUP.features(embed.adagrad(0.5), 10)
  layers = packed, plain = [SETUP.made(given, storage=way) for way in ("packed", "rows")]
  rows = np.random.default_rng(0).normal(size=(V, 10)).astype(np.float32)
  for layer in layers:
    layer.load_variables({"a": {"parameters": rows, "accumulators": rows**2}})
  assert_equal(fetched(dict(packed.variables["a"])), {"parameters": rows, "accumulators": rows**2})
  query, ids = jnp.ones((2, 10)), {"x": np.array([[0], [V - 1]], np.int32)}
  some = np.array([0, V - 1, -1])

  @nnx.jit
  def read(layer):
    return layer.attend(query, "a"), layer.attend(query, "a", some), layer(ids)

  assert_close(read(packed), read(plain))
  exported = embed.export(lambda layer, ids: layer(ids), packed, ids)
  assert exported.arrays["a"].shape == (V, 10)
  assert_close(exported.program.call(exported.arrays, ids)["x"], rows[[0, V - 1]])
