"""Whole runs on a table: all recipes from one declaration, and going on bit for bit."""

import importlib
import json

import numpy as np
import pytest
from ml_collections import ConfigDict
from small_tables import completed, write_csv
from suites import slow_unless

from recipes import errors, hosts
from recipes.run import journal

HEADER = ("who", "what", "when", "liked", "age", "genre")
COLUMNS = {
  "who": "user",
  "what": "item",
  "when": "time",
  "liked": "label",
  "age": {"kind": "number", "side": "user"},
  "genre": {"kind": "category", "side": "item"},
}
SMALL = {
  "dlrm": {"dim": 4, "dcnv2": {"cross_layers": 1, "deep": [8]}, "batch_size": 64, "epochs": 5},
  "two_tower": {"dim": 8, "history": 4, "eval_batch_size": 64, "batch_size": 64},
  "sequence": {
    "dim": 8,
    "blocks": 1,
    "max_length": 16,
    "negatives": {"number": 16},
    "batch_size": 8,
  },
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
  """A log in which people like items of the genre that their age suggests."""
  draw = np.random.default_rng(0)
  users, items = draw.integers(0, 60, 3000), draw.integers(0, 40, 3000)
  age = 20 + users % 50
  suits = (age > 45) == (items % 2 == 0)
  liked = draw.random(3000) < np.where(suits, 0.8, 0.3)
  when = draw.permutation(3000)
  rows = [
    (f"u{u}", f"i{i}", f"2024-01-{1 + t // 110:02d} 10:{t % 60:02d}", int(y), a, f"g{i % 2}")
    for u, i, t, y, a in zip(users, items, when, liked, age, strict=True)
  ]
  return write_csv(tmp_path_factory.mktemp("log") / "log.csv", HEADER, rows)


def config(recipe, log, tmp_path, **given):
  settings = {"files": str(log), "columns": COLUMNS, "epochs": 2, "checkpoint_every": 5}
  return completed(recipe, tmp_path / "cache", **settings | SMALL[recipe] | given)


def run(recipe, settings, workdir):
  return importlib.import_module(f"recipes.{recipe}.train").run(settings, str(workdir))


@pytest.mark.ci
@pytest.mark.parametrize(
  "recipe", slow_unless(["dlrm", "two_tower", "sequence"], "sequence".__eq__)
)
def test_one_declaration_serves_all_recipes(recipe, log, tmp_path):
  result = run(recipe, config(recipe, log, tmp_path), tmp_path / "run")
  assert result["steps"] > 10
  assert result["config"]["steps"] == 0
  assert {path.name for path in (tmp_path / "run").iterdir()} >= {"serve", "config.json"}
  assert all(np.isfinite(value) for value in result["metrics"].values())
  if recipe == "dlrm":
    assert result["metrics"]["test_auc"] > 0.7


@pytest.mark.parametrize("recipe", ["dlrm", "two_tower", "sequence"])
def test_a_plain_dict_is_a_config(recipe, tmp_path, monkeypatch):
  class PreparedError(Exception):
    pass

  def load(config):
    assert (config.columns.who.kind, config.dim, config.steps) == ("user", 4, 0)
    raise PreparedError

  train = importlib.import_module(f"recipes.{recipe}.train")
  monkeypatch.setattr(train.data_lib, "load", load)
  table = {"files": "log.csv", "columns": COLUMNS, "dim": 4}
  with pytest.raises(PreparedError):
    train.run(table, str(tmp_path / "run"))
  with pytest.raises(errors.UserError, match="config has no setting 'dimm'; did you mean 'dim'"):
    train.run(table | {"dimm": 4}, str(tmp_path / "run"))
  with pytest.raises(errors.UserError, match="the config declares no columns"):
    train.run({"files": "log.csv"}, str(tmp_path / "run"))


@pytest.mark.ci
@pytest.mark.parametrize(
  "recipe", slow_unless(["dlrm", "two_tower", "sequence"], "two_tower".__eq__)
)
def test_a_run_that_is_stopped_goes_on_bit_for_bit(recipe, log, tmp_path, monkeypatch):
  settings = config(recipe, log, tmp_path)
  whole = run(recipe, settings, tmp_path / "whole")
  real, steps = journal.Journal.stepped, []

  def stopping(self):
    real(self)
    steps.append(None)
    if len(steps) == whole["steps"] // 2 + 2:
      raise KeyboardInterrupt

  monkeypatch.setattr(journal.Journal, "stepped", stopping)
  with pytest.raises(errors.Stopped, match="resumes from step"):
    run(recipe, settings, tmp_path / "run")
  monkeypatch.setattr(journal.Journal, "stepped", real)
  assert run(recipe, settings, tmp_path / "run")["metrics"] == whole["metrics"]


def test_files_may_move_before_a_run_goes_on(log, tmp_path, monkeypatch):
  def moved(path, text):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    return str(tmp_path / path)

  def go_on(files, items):
    side = {"files": items, "key": "what", "columns": {"kind": "category"}}
    given = {"files": files, "item_table": side, "columns": columns, "epochs": 1, "test": False}
    return run("dlrm", config("dlrm", log, tmp_path, **given), tmp_path / "run")

  columns = {name: COLUMNS[name] for name in ("who", "what", "liked")}
  rows = log.read_bytes().decode()
  kinds = "what,kind\n" + "".join(f"i{i},k{i % 3}\n" for i in range(40))
  monkeypatch.setattr(hosts, "start", lambda: None)
  first = go_on(str(log), moved("a/items.csv", kinds))
  where = moved("b/new_log.csv", rows), moved("b/new_items.csv", kinds)
  second = go_on(*where)
  assert second["metrics"] == first["metrics"]
  assert second["config"]["files"] == where[0]
  with pytest.raises(errors.UserError, match="data have changed"):
    go_on(moved("c/log.csv", rows.replace("g1", "g2")), where[1])
  with pytest.raises(errors.UserError, match="splits of files"):
    go_on({"train": str(log), "test": where[0]}, where[1])


def test_the_configs_of_a_run_can_be_read_back(log, tmp_path):
  settings = config("dlrm", log, tmp_path)
  again = json.loads(json.dumps(settings.to_dict()))
  completed_again = completed("dlrm", **again)
  assert ConfigDict(completed_again.to_dict(), allow_dotted_keys=True) == ConfigDict(
    settings.to_dict(), allow_dotted_keys=True
  )
