"""Warm starts: rows by raw id, slots and dense parameters by name, and what cannot correspond."""

import shutil

import jax
import numpy as np
import parts
import pytest
from cases import refused
from flax import nnx
from served_models import CLICKS

import embed
from recipes import config as config_lib
from recipes import errors, warm_start
from recipes import mesh as mesh_lib
from recipes.tables.transforms import RowIds, stored_rows


def test_rows_correspond_by_raw_id_and_those_without_one_by_number():
  rows = lambda *given: warm_start.correspondence(*given).tolist()
  old, new = RowIds(("b", "a"), "oov 2"), RowIds(("a", "c", "b"), "oov 2")
  assert rows(old, 4, new, 5) == [1, -1, 0, 2, 3]
  assert rows(old, 3, new, 5) == [1, -1, 0, -1, -1]  # fewer rows of the unknown
  assert rows(old, 4, RowIds(("a",), "hash 2"), 3) == [1, -1, -1]
  numbers = RowIds((), "identity")
  assert rows(numbers, 3, numbers, 5) == [0, 1, 2, -1, -1]
  assert rows(numbers, 5, numbers, 3) == [0, 1, 2]


def prepared(trained, tmp_path, **changes):
  """The parts of a new run like a trained one, with settings changed."""
  table = trained.table | {"cache_dir": str(tmp_path / "cache")} | changes
  config = config_lib.complete(trained.recipe, table | {"init_from": str(trained.workdir)})
  return config, parts.prepare(trained.recipe, config)


def tables(model):
  """The tables and slots of a model as NumPy."""
  tree = embed.checkpoint.to_tree(model=model)["model"]["tables"]
  return {k.rpartition("/")[2]: jax.tree.map(np.asarray, v) for k, v in tree.items()}


def dense(model):
  """The dense parameters of a model by name."""
  leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
  name_of = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name_of(path): np.asarray(x) for path, x in leaves}


def grown(path, folder):
  """Writes the rows of a table of clicks in another order, after rows with ids that it lacks."""
  header, *rows = path.read_text().splitlines()
  new = [f"{i % 2},1.0,30,new{i % 3},s{i % 12},t{i % 11},train" for i in range(300)]
  (folder / "grown.csv").write_text("\n".join([header, *new, *reversed(rows)]) + "\n")
  return str(folder / "grown.csv")


@pytest.mark.ci
def test_rows_follow_their_raw_ids(clicks, tmp_path, capsys):
  config, new = prepared(clicks, tmp_path, files=grown(clicks.file, tmp_path))
  before, was = tables(new.model), dense(new.model)
  old, slots = tables(clicks.model), ("parameters", "momenta", "velocities")
  capsys.readouterr()
  warm_start.take(config, new.model, new.serve)
  after = tables(new.model)
  ids = stored_rows(clicks.workdir / "serve")[0], stored_rows(new.serve)[0]
  num_kept = num_new = 0
  for name in ("city", "shop", "tags"):
    at = {text: row for row, text in enumerate(ids[0][name].texts)}
    index = np.array([at.get(text, -1) for text in ids[1][name].texts])
    kept, rest = np.flatnonzero(index >= 0), np.flatnonzero(index < 0)
    num_kept, num_new = num_kept + len(kept), num_new + len(rest)
    for slot in slots:
      assert old[name][slot].any()
      np.testing.assert_array_equal(after[name][slot][kept], old[name][slot][index[kept]])
      np.testing.assert_array_equal(after[name][slot][rest], before[name][slot][rest])
  assert num_kept > 20
  assert num_new > 2
  now, source = dense(new.model), dense(clicks.model)
  same = [name for name in was if was[name].shape == source[name].shape]
  assert len(same) > 3
  for name in same:
    np.testing.assert_array_equal(now[name], source[name])
  said = capsys.readouterr().err
  assert f"starting from step 8 of {clicks.workdir}" in said
  assert " rows, " in said


@pytest.mark.ci
def test_a_model_of_other_columns_takes_the_tables_that_it_shares(clicks, tmp_path, capsys):
  """Of a further column, other intervals, another optimizer; no dense parameter."""
  columns = {name: kind for name, kind in CLICKS.items() if name != "price"}
  columns |= {
    "age": {"kind": "number", "buckets": (30.0, 50.0, 60.0)},
    "cost": {"column": "price", "kind": "number"},
  }
  changes = {
    "columns": columns,
    "table": {"optimizer": "rowwise_adagrad"},
    "files": str(shutil.copy(clicks.file, tmp_path / "same.csv")),
  }
  config, new = prepared(clicks, tmp_path, **changes)
  before, was = tables(new.model), dense(new.model)
  warm_start.take(config, new.model, new.serve)
  after, old = tables(new.model), tables(clicks.model)
  for name in ("city", "shop", "tags"):
    np.testing.assert_array_equal(after[name]["parameters"], old[name]["parameters"])
    for slot in after[name].keys() - {"parameters"}:
      np.testing.assert_array_equal(after[name][slot], before[name][slot])
  np.testing.assert_array_equal(after["age"]["parameters"], before["age"]["parameters"])
  jax.tree.map(np.testing.assert_array_equal, dense(new.model), was)
  said = capsys.readouterr().err
  assert "slots accumulators are new" in said
  assert "the features or their order differ" in said  # though all shapes are the same


@pytest.mark.ci
def test_what_does_not_correspond_is_named(clicks, towers, tmp_path):
  config, new = prepared(clicks, tmp_path)
  config, model, serve = config_lib.copied(config), new.model, new.serve

  def call(changes):
    warm_start.take(config_lib.copied(config, **changes), model, serve)

  cases = [
    ({"init_from": str(tmp_path / "no")}, "holds no checkpoint: give the --workdir of a run"),
    ({"init_from": str(towers.workdir)}, "no table of .*run has the name of one of this run's: "),
  ]
  refused(cases, call, errors.UserError)
  config, wider = prepared(clicks, tmp_path, dim=4)
  with pytest.raises(errors.UserError, match=r"has 5 columns, and 9 in .*run: keep the dim"):
    warm_start.take(config, wider.model, wider.serve)


@pytest.mark.ci
def test_a_whole_run_starts_there(clicks, tmp_path, monkeypatch):
  """At a rate of nearly 0 it tests what the other run did."""
  monkeypatch.setattr(mesh_lib, "start", lambda: None)
  frozen = clicks.table["table"] | {"learning_rate": 1e-9}
  changes = {"learning_rate": 1e-9, "table": frozen, "init_from": str(clicks.workdir)}
  result = clicks.train(tmp_path / "warm", **changes)
  expected = clicks.result["metrics"]["test_logloss"]
  assert result["metrics"]["test_logloss"] == pytest.approx(expected, abs=1e-5)
