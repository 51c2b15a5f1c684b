"""Whole runs on a table: all recipes from one declaration, and going on bit for bit."""

import importlib
import json
import shutil

import numpy as np
import pytest
import ways
from ml_collections import ConfigDict

from recipes import config as config_lib
from recipes import errors, log
from recipes import mesh as mesh_lib

RECIPES = ("dlrm", "two_tower", "sequence")
EACH = ["clicks", *ways.ci("towers", "sequences")]


@pytest.mark.parametrize("trained", EACH, indirect=True)
def test_a_run_on_a_table_ends_with_metrics_of_its_split(trained):
  result = trained.result
  assert result["config"]["steps"] == result["steps"] == trained.table["steps"]
  assert {path.name for path in trained.workdir.iterdir()} >= {"serve", "config.json"}
  assert {name.partition("_")[0] for name in result["metrics"]} == {"valid", "test"}
  assert all(np.isfinite(value) for value in result["metrics"].values())


def test_a_plain_dict_is_a_config(tmp_path, monkeypatch):
  class PreparedError(Exception):
    pass

  def load(config):
    assert (config.columns.who.kind, config.dim, config.steps) == ("user", 4, 0)
    raise PreparedError

  monkeypatch.setattr(mesh_lib, "start", lambda: None)
  columns = {"who": "user", "what": "item", "liked": "label"}
  table = {"files": "log.csv", "columns": columns, "dim": 4}
  for recipe in RECIPES:
    train = importlib.import_module(f"recipes.{recipe}.train")
    monkeypatch.setattr(train.data_lib, "load", load)
    with pytest.raises(PreparedError):
      train.run(table, str(tmp_path / "run"))
    with pytest.raises(errors.UserError, match="config has no setting 'dimm'; did you mean 'dim'"):
      train.run(table | {"dimm": 4}, str(tmp_path / "run"))
    with pytest.raises(errors.UserError, match="the config declares no columns"):
      train.run({"files": "log.csv"}, str(tmp_path / "run"))
    with pytest.raises(errors.UserError, match="a dataset and columns"):
      train.run(table | {"dataset": "synthetic"}, str(tmp_path / "run"))


def lines(workdir):
  """What a run has logged, but for the speed."""
  logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in line.items() if "per_second" not in k} for line in logged]


@pytest.mark.parametrize("trained", EACH, indirect=True)
@pytest.mark.programs(120, "trains a run and resumes it, each with its own model and step")
def test_a_run_that_is_stopped_goes_on_bit_for_bit(trained, tmp_path, monkeypatch):
  monkeypatch.setattr(mesh_lib, "start", lambda: None)
  real = log.Log.train

  def stopping(self, step, *args):
    real(self, step, *args)
    if step == 5:
      raise KeyboardInterrupt

  monkeypatch.setattr(log.Log, "train", stopping)
  with pytest.raises(KeyboardInterrupt):
    trained.train(tmp_path / "run")
  monkeypatch.setattr(log.Log, "train", real)
  assert trained.train(tmp_path / "run")["metrics"] == trained.result["metrics"]
  assert lines(tmp_path / "run") == lines(trained.workdir)


def test_files_may_move_after_a_run_has_begun(clicks, tmp_path, monkeypatch):
  monkeypatch.setattr(mesh_lib, "start", lambda: None)
  run, moved = clicks.copy(tmp_path), tmp_path / "moved.csv"
  (run / "result.json").unlink()  # it has taken all steps, and not been tested
  shutil.copy(clicks.file, moved)
  result = clicks.train(run, files=str(moved))
  assert result["metrics"] == clicks.result["metrics"]
  assert result["config"]["files"] == str(moved)
  (run / "result.json").unlink()
  moved.write_text(moved.read_text().replace("c1", "c2"))
  with pytest.raises(errors.UserError, match="data have changed"):
    clicks.train(run, files=str(moved))
  with pytest.raises(errors.UserError, match="data have changed"):
    clicks.train(run, files={"train": str(clicks.file), "test": str(moved)})


def test_the_configs_of_a_run_can_be_read_back(clicks):
  config = config_lib.complete("dlrm", clicks.table)
  again = config_lib.complete("dlrm", json.loads(json.dumps(config.to_dict())))
  as_dict = lambda config: ConfigDict(config.to_dict(), allow_dotted_keys=True)
  assert as_dict(again) == as_dict(config)
