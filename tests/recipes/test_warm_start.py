"""Warm starts: rows by raw id, slots and dense parameters by name, and what cannot correspond."""

import shutil

import jax
import numpy as np
import parts
import pytest
from flax import nnx
from served_models import CLICKS, LOG, run_of, write_clicks, write_log
from small_tables import completed
from suites import slow_unless

import embed
from recipes import errors
from recipes.dlrm import train
from recipes.run import checkpoints, loop, warm_start
from recipes.run import workdir as runs
from recipes.tables import row_ids

pytestmark = pytest.mark.ci

TABLES = {
  "dlrm": {"columns": CLICKS, "dim": 4, "dcnv2": {"cross_layers": 1, "deep": [8]}, "refit": False},
  "two_tower": {"columns": LOG, "dim": 8, "history": 4},
  "sequence": {
    "columns": {"who": "user", "what": "item", "when": "time"},
    "dim": 8,
    "blocks": 1,
    "max_length": 16,
    "negatives": {"number": 16},
  },
}


def write(recipe, path, **changes):
  return write_clicks(path, **changes) if recipe == "dlrm" else write_log(path, **changes)


def prepared(recipe, table, cache_dir):
  config = completed(recipe, cache_dir, epochs=1, **table)
  return config, parts.prepare(recipe, config)


def grown(recipe, path):
  """Writes the rows of `path` in another order, after rows with ids that those have not."""
  header, *rows = path.read_text().splitlines()
  if recipe == "dlrm":
    new = [f"{i % 2},1.0,30,new{i % 3},s{i % 12},t{i % 11},train" for i in range(300)]
  else:
    new = [f"new{i % 9},i{i // 9 + 20},{i},k1,g1,no" for i in range(300)]
    new = [line.replace("i4", "new_i4") for line in new]
  other = path.with_name("grown.csv")
  other.write_text("\n".join([header, *new, *reversed(rows)]) + "\n")
  return other


def tables(training):
  """The tables and slots of a model as NumPy."""
  tree = embed.checkpoint.to_tree(model=training.model)["model"]["tables"]
  return {k.rpartition("/")[2]: jax.tree.map(np.asarray, v) for k, v in tree.items()}


def dense(training):
  return jax.tree.map(np.asarray, embed.checkpoint.to_tree(model=training.model)["model"]["state"])


@pytest.mark.parametrize("recipe", slow_unless(TABLES, "dlrm".__eq__))
def test_rows_follow_their_raw_ids(recipe, tmp_path, capsys):
  first = write(recipe, tmp_path / "first.csv")
  old = run_of(recipe, {"files": str(first), **TABLES[recipe]}, tmp_path / "run")
  second = {"files": str(grown(recipe, first)), **TABLES[recipe]}
  config, new = prepared(recipe, second, tmp_path / "cache")
  before, was, config.init_from = tables(new), dense(new), str(tmp_path / "run")
  capsys.readouterr()
  warm_start.take(config, new.model, new.serve)
  ids = {"old": row_ids.read(old.serve), "new": row_ids.read(new.serve)}
  kept, num_new = 0, 0
  for name, after in tables(new).items():
    texts = {which: ids[which][name].texts for which in ids}
    for slot, rows in after.items():
      for row, text in enumerate(texts["new"]):
        at = texts["old"].index(text) if text in texts["old"] else None
        expected = before[name][slot][row] if at is None else tables(old)[name][slot][at]
        np.testing.assert_array_equal(rows[row], expected)
        kept, num_new = kept + (at is not None), num_new + (at is None)
  assert kept > 20
  assert num_new > 2
  moved = [name for name in was if (dense(new)[name] != was[name]).any()]
  assert set(moved) <= set(dense(old))
  leaves = jax.tree_util.tree_leaves_with_path(nnx.state(new.model, nnx.Param))
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
  same = [n for n in names if n in was and was[n].shape == dense(old)[n].shape]
  assert same
  for name in same:
    np.testing.assert_array_equal(dense(new)[name], dense(old)[name])
  said = capsys.readouterr().err
  assert f"starting from step 3 of {tmp_path / 'run'}: " in said
  assert " rows, " in said


def test_rows_that_have_no_raw_id_follow_their_number(tmp_path):
  path = write_clicks(tmp_path / "clicks.csv")
  columns = CLICKS | {
    "city": {"kind": "category", "oov": 3},
    "tags": {"kind": "bag", "hash": 30},
    "age": {"kind": "number", "buckets": (30.0, 50.0)},
  }
  table = {"files": str(path)} | TABLES["dlrm"] | {"columns": columns}
  old = run_of("dlrm", table, tmp_path / "run")
  columns["age"] = {"kind": "number", "buckets": (30.0, 60.0)}
  config, new = prepared("dlrm", table | {"files": str(grown("dlrm", path))}, tmp_path / "cache")
  before, config.init_from = tables(new), str(tmp_path / "run")
  warm_start.take(config, new.model, new.serve)
  after, source = tables(new), tables(old)
  rows = lambda of, name: of[name]["parameters"]
  np.testing.assert_array_equal(rows(after, "tags"), rows(source, "tags"))
  np.testing.assert_array_equal(rows(after, "city_shop"), rows(source, "city_shop"))
  np.testing.assert_array_equal(rows(after, "city")[-3:], rows(source, "city")[-3:])
  np.testing.assert_array_equal(rows(after, "age"), rows(before, "age"))  # other intervals


def test_slots_of_the_same_name_and_shape_are_kept(tmp_path, capsys):
  path = write_clicks(tmp_path / "clicks.csv", rows=200)
  table = {"files": str(path), **TABLES["dlrm"]}
  old = run_of("dlrm", table | {"table": {"optimizer": "adagrad"}}, tmp_path / "run")
  trained = {
    key: {slot: np.asarray(x) + (slot != "parameters") for slot, x in of.items()}
    for key, of in tables(old).items()
  }
  tree = embed.checkpoint.to_tree(**old.state)
  for key, of in tree["model"]["tables"].items():
    of |= trained[key.rpartition("/")[2]]
  embed.checkpoint.from_tree(tree, **old.state)
  again = tmp_path / "again"
  save(old, again, tmp_path / "run")
  for optimizer, kept in (("adagrad", True), ("rowwise_adagrad", False), ("adam", False)):
    new_table = table | {"table": {"optimizer": optimizer}}
    config, new = prepared("dlrm", new_table, tmp_path / "cache")
    before, config.init_from = tables(new), str(again)
    warm_start.take(config, new.model, new.serve)
    for name, of in tables(new).items():
      for slot, x in of.items():
        taken = kept or slot == "parameters"
        np.testing.assert_array_equal(x, trained[name][slot] if taken else before[name][slot])
    said = capsys.readouterr().err
    assert ("are new" in said) == (not kept)


def save(training, workdir, like):
  """Writes a run of that state, otherwise as the run in the folder `like`."""
  shutil.copytree(like, workdir, ignore=shutil.ignore_patterns("checkpoints"))
  progress = checkpoints.Progress(step=3, best_step=3)
  with checkpoints.Manager(workdir / "checkpoints") as manager:
    manager.save(progress, **training.state)


def test_tables_alone_and_tables_of_another_name(tmp_path):
  path = write_clicks(tmp_path / "clicks.csv", rows=200)
  table = {"files": str(path), **TABLES["dlrm"]}
  old = run_of("dlrm", table, tmp_path / "run")
  columns = {name: kind for name, kind in CLICKS.items() if name not in ("city", "city_shop")}
  columns["town"] = {"kind": "category", "column": "city"}
  changes = {"columns": columns, "init_parts": "tables", "init_rename": "town=city"}
  config, new = prepared("dlrm", table | changes, tmp_path / "cache")
  was, config.init_from = dense(new), str(tmp_path / "run")
  warm_start.take(config, new.model, new.serve)
  jax.tree.map(np.testing.assert_array_equal, dense(new), was)
  assert (tables(new)["town"]["parameters"] == tables(old)["city"]["parameters"]).all()
  assert (tables(new)["shop"]["parameters"] == tables(old)["shop"]["parameters"]).all()


def test_dense_parameters_of_other_features_are_not_taken(tmp_path, capsys):
  path = write_clicks(tmp_path / "clicks.csv", rows=200)
  table = {"files": str(path), **TABLES["dlrm"]}
  old = run_of("dlrm", table, tmp_path / "run")
  renamed = {"cost": {"column": "price", **CLICKS["price"]}}
  columns = {name: kind for name, kind in CLICKS.items() if name != "price"}
  config, new = prepared("dlrm", table | {"columns": columns | renamed}, tmp_path / "cache")
  was, config.init_from = dense(new), str(tmp_path / "run")
  warm_start.take(config, new.model, new.serve)
  jax.tree.map(np.testing.assert_array_equal, dense(new), was)  # though all shapes are the same
  assert (tables(new)["shop"]["parameters"] == tables(old)["shop"]["parameters"]).all()
  assert "the features or their order differ" in capsys.readouterr().err


def test_transforms_that_differ_from_the_first_ones_of_a_run_are_refused(tmp_path):
  path = write_clicks(tmp_path / "clicks.csv", rows=200)
  table = {"files": str(path), **TABLES["dlrm"]}
  first, second = (
    prepared("dlrm", table | {"columns": columns}, tmp_path / "cache")[1]
    for columns in (CLICKS, CLICKS | {"city": {"kind": "category", "min_count": 9}})
  )
  sha256 = dict(first.data.sha256)
  with pytest.raises(errors.MissingFileError, match=r"data\.json is missing"):
    runs.keep(second.serve, sha256, tmp_path, is_new=False)
  runs.keep(second.serve, sha256, tmp_path, is_new=True)
  runs.keep(first.serve, sha256, tmp_path, is_new=True)  # nothing has been trained
  runs.keep(first.serve, sha256, tmp_path, is_new=False)
  with pytest.raises(errors.UserError, match="the data have changed since the run in "):
    runs.keep(second.serve, sha256, tmp_path, is_new=False)


def test_a_run_of_another_recipe_lends_its_rows_alone(tmp_path):
  log = write_log(tmp_path / "log.csv", users=200)
  run_of("two_tower", {"files": str(log), **TABLES["two_tower"]}, tmp_path / "run")
  table = {"files": str(log), **TABLES["sequence"], "init_from": str(tmp_path / "run")}
  config, new = prepared("sequence", table, tmp_path / "cache")
  warm_start.take(config, new.model, new.serve)
  clicks = {"files": str(write_clicks(tmp_path / "clicks.csv", rows=200)), **TABLES["dlrm"]}
  clicks["init_from"] = str(tmp_path / "run")
  config, other = prepared("dlrm", clicks, tmp_path / "cache")
  with pytest.raises(errors.UserError, match=r"no table of .*run has the name of one of"):
    warm_start.take(config, other.model, other.serve)


def test_what_does_not_correspond_is_named(tmp_path):
  path = write_clicks(tmp_path / "clicks.csv", rows=200)
  table = {"files": str(path), **TABLES["dlrm"]}
  run_of("dlrm", table, tmp_path / "run")
  cases = {
    r"holds no checkpoint: give the --workdir of a run": {"init_from": str(tmp_path / "no")},
    r"has 9 columns, and age in .*run has 5: keep the dim": {"dim": 8},
    r"init_parts is 'dense': choose all or tables": {"init_parts": "dense"},
    r"init_rename has 'town': write new=old": {"init_rename": "town"},
    r"names a table 'town', and those of this run are age, city,": {"init_rename": "town=city"},
    r"names a table 'town', and those of .*run are age, city,": {"init_rename": "city=town"},
    r"no table of .*run has the name of one of this run's: they are age, city, .* and who here": {
      "columns": {"clicked": "label", "who": {"kind": "category", "column": "city"}}
    },
  }
  for message, changes in cases.items():
    changed = table | {"init_from": str(tmp_path / "run")} | changes
    config, new = prepared("dlrm", changed, tmp_path / "cache")
    with pytest.raises(errors.UserError, match=message):
      warm_start.take(config, new.model, new.serve)


def test_a_whole_run_starts_there_and_needs_the_other_one_no_more(tmp_path, monkeypatch, capsys):
  path = write_clicks(tmp_path / "clicks.csv", rows=400)
  table = {"files": str(path), **TABLES["dlrm"], "steps": 6, "eval_every": 6, "warmup_steps": 1}
  table["learning_rate"] = table["final_rate"] = 1e-9  # trains the dense part next to nothing
  old = run_of("dlrm", table, tmp_path / "run")
  config = completed("dlrm", tmp_path / "cache", init_from=str(tmp_path / "run"), **table)
  config.table.learning_rate = 1e-9
  config.baseline.max_rows = 0
  run = lambda: train.run(config, str(tmp_path / "warm"))
  expected = old.evaluate(old.model, "test")

  with monkeypatch.context() as patch:
    patch.setattr(loop.Run, "steps", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(errors.Stopped, match="resumes from step 0"):
      run()
  shutil.rmtree(tmp_path / "run")
  result = run()
  assert "resuming from step 0" in capsys.readouterr().err
  assert result["metrics"]["test_logloss"] == pytest.approx(expected["logloss"], abs=1e-5)
