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


def test_rows_are_as_recorded():
  normal = embed.row_wise(jax.nn.initializers.normal(1.0))
  layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(5, 3, normal)), rngs=nnx.Rngs(0))
  rows = np.asarray(layer.tables["table_0"])
  assert len(np.unique(rows)) == 5 * 3
  np.testing.assert_allclose(rows[0], [-0.57478017, 0.79983664, -0.25960687], rtol=1e-6)


def test_what_may_look_at_the_whole_table_draws_it_at_once():
  every = np.arange(12.0, dtype=np.float32).reshape(4, D)
  of_rows = jax.nn.initializers.constant(every)
  table = embed.TableConfig(4, D, of_rows, name="t")
  make = lambda: embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  np.testing.assert_array_equal(make().tables["t"], every)
