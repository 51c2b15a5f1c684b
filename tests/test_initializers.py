"""Initial values of a table: drawn row by row."""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx

import embed
from embed import initializers

D = 3


def test_the_default_initializer_is_keyed_by_row(monkeypatch):
  """Rows do not depend on how many there are, nor on how many are made at a time."""
  key, make_rows = jax.random.key(0), initializers._rows.__wrapped__
  make_rows = functools.partial(make_rows, initializers.truncated_normal_rows)
  many = make_rows(key, (50, D), jnp.float32)
  np.testing.assert_array_equal(many[:20], make_rows(key, (20, D), jnp.float32))
  monkeypatch.setattr(initializers, "ROWS_AT_A_TIME", 16)
  np.testing.assert_array_equal(many, make_rows(key, (50, D), jnp.float32))


@pytest.mark.parametrize(
  ("kind", "partitionable"),
  [
    ("threefry2x32", True),
    pytest.param("rbg", True, marks=pytest.mark.ci),
    pytest.param("threefry2x32", False, marks=pytest.mark.ci),
  ],
)
def test_rows_do_not_depend_on_the_mesh(kind, partitionable):
  """Keys of "rbg" draw a whole batch from the first one's key: no two rows may be equal either."""
  tables = [embed.TableConfig(size, 4, name=name) for name, size in (("few", 3), ("many", 800))]
  features = {table.name: embed.FeatureConfig(table) for table in tables}

  def rows(**where):
    with jax.threefry_partitionable(partitionable):
      rngs = nnx.Rngs(jax.random.key(0, impl=kind))
      layer = embed.SparseEmbed(features, rngs=rngs, **where)
    return np.concatenate([np.asarray(layer.tables[name]) for name in ("few", "many")])

  alone = rows()
  assert len(np.unique(alone, axis=0)) == 803
  # XLA vectorizes loops of another length differently: two units in the last place (JAX 0.12).
  np.testing.assert_allclose(rows(mesh=meshes.make_mesh(), axis="data"), alone, rtol=3e-7)


def test_a_slot_draws_nothing_that_a_row_has_drawn():
  """One draw `[1, D]` would have been row 0 of the table, and of the slot; rows are as recorded."""
  normal = jax.nn.initializers.normal(1.0)
  slot = embed.row_wise(normal)
  optimizer = embed.adam(slot_init={"momenta": slot, "velocities": slot})
  table = embed.TableConfig(5, 3, embed.row_wise(normal), optimizer, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  every = np.concatenate([np.asarray(x).reshape(-1) for x in layer.variables["t"].values()])
  assert len(set(every.tolist())) == 3 * 5 * 3
  wanted = [-0.57478017, 0.79983664, -0.25960687]
  np.testing.assert_allclose(np.asarray(layer.tables["t"])[0], wanted, rtol=1e-6)


def test_what_may_look_at_the_whole_table_draws_it_at_once():
  every = np.arange(12.0, dtype=np.float32).reshape(4, D)
  of_rows = jax.nn.initializers.constant(every)
  table = embed.TableConfig(4, D, of_rows, name="t")
  make = lambda: embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  np.testing.assert_array_equal(make().tables["t"], every)


def test_a_slot_of_another_shape_is_refused():
  """One row for four would set row 0 alone."""
  wrong = lambda key, shape, dtype: np.ones((1, *shape[1:]), dtype)
  table = embed.TableConfig(4, 2, name="t", optimizer=embed.adam(slot_init={"momenta": wrong}))
  with pytest.raises(ValueError, match="'momenta' of table 't'"):
    embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
