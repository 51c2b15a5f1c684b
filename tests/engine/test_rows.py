"""A layer of packed rows has the numbers of plain rows, however devices read and write them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from meshes import assert_close, assert_equal, make_mesh
from stored_tables import TwoTables, fetched
from suites import slow_unless

import embed
from embed.engine import rows as rows_lib

V = 61  # no multiple of the rows of a line
SETUP = TwoTables(V)
features, made, train = SETUP.features, SETUP.made, SETUP.train


@pytest.fixture(autouse=True, params=["lines", pytest.param("rows", marks=pytest.mark.weekly)])
def as_on(request, monkeypatch):
  """As TPUs do it, which read and write parts of lines, and as CPUs and GPUs do."""
  monkeypatch.setattr(rows_lib, "has_lines", lambda kind: request.param == "lines")


SETTINGS = {
  "mod": {"exchange": "all_to_all", "capacity": 3},
  "div": {"exchange": "gather"},
  "column": {},
  "replicated": {},
}


@pytest.mark.ci
@pytest.mark.parametrize(
  ("strategy", "kind"),
  slow_unless(
    itertools.product(SETTINGS, ["auto", "explicit"]),
    lambda *case: case in (("mod", "auto"), ("column", "auto")),
  ),
)
def test_steps_on_a_mesh(strategy, kind):
  settings = {"strategy": strategy} | SETTINGS[strategy]
  given, mesh = features(embed.adagrad(0.125), 32), make_mesh(kind)
  with jax.set_mesh(mesh):
    layers = [made(given, mesh, storage=way, **settings) for way in ("packed", "rows")]
    packed, plain = (train(layer, 3) for layer in layers)
  assert_close(packed, plain, scale=2e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
  "strategy", slow_unless([None, "div", "mod", "column"], lambda name: name == "mod")
)
def test_checkpoints_and_deltas_go_both_ways(strategy, tmp_path):
  settings = {"strategy": strategy} if strategy else {}
  mesh = make_mesh() if strategy else None
  given = features(embed.rowwise_adagrad(0.5))
  for ways in (("packed", "rows"), ("rows", "packed")):
    source, target = (made(given, mesh, storage=way, **settings) for way in ways)
    train(source, 2)
    with ocp.StandardCheckpointer() as checkpointer:
      path = tmp_path / ways[0]
      checkpointer.save(path, embed.checkpoint.to_tree(model=source))
      checkpointer.wait_until_finished()
      tree = checkpointer.restore(path, embed.checkpoint.like(model=target))
    embed.checkpoint.from_tree(tree, model=target)
    assert_equal(fetched(target.variables), fetched(source.variables))
    before = embed.deltas.fingerprint(0, model=source)
    train(source, 3)
    delta, _ = embed.deltas.changes(before, 3, model=source)
    assert 0 < delta.num_rows < 3 * V
    embed.deltas.apply(delta, 0, model=target)
    assert_equal(fetched(target.variables), fetched(source.variables))


def test_attend_export_and_loaded_rows():
  given = features(embed.adagrad(0.5), 10)
  layers = packed, plain = [made(given, storage=way) for way in ("packed", "rows")]
  rows = np.random.default_rng(0).normal(size=(V, 10)).astype(np.float32)
  for layer in layers:
    layer.load_variables({"a": {"parameters": rows, "accumulators": rows**2}})
  assert_equal(fetched(packed.variables), fetched(plain.variables))
  query = jnp.ones((2, 10))
  for candidates in (None, np.array([0, V - 1, -1])):
    assert_close(packed.attend(query, "a", candidates), plain.attend(query, "a", candidates))
  ids = {"x": np.array([[0], [V - 1]], np.int32)}
  exported = embed.export(lambda layer, ids: layer(ids), packed, ids)
  assert exported.arrays["a"].shape == (V, 10)
  assert_close(exported.program.call(exported.arrays, ids), plain(ids))


def test_initial_values_are_those_of_plain_tables():
  normal = jax.nn.initializers.normal(0.5)
  for initializer in (None, embed.row_wise(normal), normal):
    given = features(embed.adagrad_momentum(slot_init={"momenta": normal}), initializer=initializer)
    packed, plain = (made(given, storage=way) for way in ("packed", "rows"))
    assert_equal(fetched(packed.variables), fetched(plain.variables))
