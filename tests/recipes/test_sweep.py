"""Sweeps: what is tried, that no test row is read before the choice, and how one resumes."""

import doctest
import importlib
import json
import runpy
from pathlib import Path

import pytest
import recipe_runs

from recipes import errors, sweep
from recipes.run import checkpoints
from recipes.sequence import train as sequence


def test_docstrings():
  assert not doctest.testmod(sweep).failed


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({}, "no trials"),
    ([], "no trials"),
    ({"dropout": []}, "no trials"),
    ({"dropout": 0.1}, "a dict of lists"),
    ([{"dropout": [0.1]}, "x"], "a list of dicts"),
    ([{"dropuot": 0.1}], r"config has no setting 'dropuot'; did you mean 'dropout'"),
    ([{"table.dropout": 0.1}], r"config\.table has no setting 'dropout'"),
    ([{"dropout": "much"}], r"config\.dropout is 'much'"),
    ([{"loss": "hinge"}], "unknown loss 'hinge'"),
  ],
)
def test_mistakes_end_before_the_first_trial(tmp_path, wrong, message):
  config = recipe_runs.sequence_smoke("synthetic", tmp_path)
  with pytest.raises(errors.UserError, match=message):
    sweep.run("sequence", config, tmp_path / "sweep", wrong)
  assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
  "name",
  ["sequence.beauty", "sequence.beauty_bert4rec", "two_tower.gowalla", "two_tower.movielens1m"],
)
def test_sweeps_of_configs_name_settings_that_there_are(name):
  recipe, _, file = name.partition(".")
  config, made = recipe_runs.load(name, ""), runpy.run_path(f"configs/{recipe}/{file}.py")
  check = importlib.import_module(f"recipes.{recipe}.train").check
  for trial in sweep.trials(made["get_sweep"]()):
    check(sweep.config_of(recipe, config, trial), None)


def test_a_table_by_hand():
  trial = lambda loss, auc: {
    "settings": {"loss": loss}, "metrics": {"valid_auc": auc}, "steps": 40, "tested_step": 20,
    "seconds": 61.0,
  }  # fmt: skip
  rows = [trial("bce", 0.7), trial("a|b", 0.8), {"settings": {"loss": "x"}, "error": "nan"}]
  lines = sweep.table({"trials": rows, "select": "valid_auc", "chosen": 1}).splitlines()
  assert [line.count("|") - line.count("\\|") for line in lines] == [7] * 5
  assert lines[2] == "| 0 | bce | 0.7000 | 40 | 20 | 2 |"
  assert lines[3].startswith("| **1** | ")
  assert "**0.8000**" in lines[3]
  assert "diverged" in lines[4]


SMOKE = {
  "sequence": lambda folder: recipe_runs.sequence_smoke("synthetic", folder),
  "dlrm": lambda folder: recipe_runs.dlrm_smoke("synthetic", folder),
  "two_tower": lambda folder: recipe_runs.two_tower_smoke("synthetic", folder),
}


def guard_test_rows(recipe, workdir, monkeypatch):
  """Lets nothing read test rows before `sweep.json` has a choice; returns the splits read."""
  module = importlib.import_module(f"recipes.{recipe}.data")
  read, splits = module.eval_batches, []

  def guarded(data, split, *args, **options):
    if split == "test":
      assert "chosen" in json.loads((workdir / "sweep.json").read_text()), "read too early"
    splits.append(split)
    return read(data, split, *args, **options)

  monkeypatch.setattr(module, "eval_batches", guarded)
  return splits


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", sorted(SMOKE))
def test_no_test_row_is_read_before_the_choice(recipe, tmp_path, monkeypatch):
  config, workdir = SMOKE[recipe](tmp_path), tmp_path / "sweep"
  splits = guard_test_rows(recipe, workdir, monkeypatch)
  about = sweep.run(recipe, config, workdir, {"table.learning_rate": [1e-9, 0.05]})
  assert splits.count("test") == 1
  results = [json.loads((workdir / f"trial_{i}/result.json").read_text()) for i in range(2)]
  chosen = about["chosen"]
  assert results[chosen]["baselines"]
  assert not results[1 - chosen]["baselines"]
  for number, (row, result) in enumerate(zip(about["trials"], results, strict=True)):
    has_test = any(name.startswith("test_") for name in result["metrics"])
    assert has_test == (number == chosen)
    assert result["metrics"] == row["metrics"] | (about["test"] if has_test else {})
  sign = -1 if config.select.endswith("loss") else 1
  scores = [sign * row["metrics"][config.select] for row in about["trials"]]
  assert scores[chosen] == max(scores)
  assert json.loads((workdir / "sweep.json").read_text()) == about
  assert (workdir / "sweep.md").read_text().count("\n") == 4


@pytest.mark.weekly
def test_a_list_may_be_mended_before_the_choice_and_data_may_not_change(tmp_path, monkeypatch):
  config, workdir = SMOKE["sequence"](tmp_path), tmp_path / "sweep"

  def fails(trial, *args):
    if trial.dropout == 0.2:
      raise errors.UserError("a wrong setting")
    return run(trial, *args)

  run = sequence.run
  monkeypatch.setattr(sequence, "run", fails)
  with pytest.raises(errors.UserError, match="a wrong setting"):
    sweep.run("sequence", config, workdir, {"dropout": [0.1, 0.2]})
  result = json.loads((workdir / "trial_0" / "result.json").read_text())
  (workdir / "trial_0" / "result.json").write_text(
    json.dumps(result | {"data_sha256": {"items": "0" * 64}})
  )
  with pytest.raises(errors.UserError, match="data have changed before trial 1"):
    sweep.run("sequence", config, workdir, {"dropout": [0.1, 0.3]})
  (workdir / "trial_0" / "result.json").write_text(json.dumps(result))
  assert len(sweep.run("sequence", config, workdir, {"dropout": [0.1, 0.3]})["trials"]) == 2


@pytest.mark.parametrize(
  ("select", "best"), [("valid_ne", 0), ("valid_calibration", 1), ("valid_auc", 1)]
)
def test_the_best_trial_is_the_one_that_a_run_would_choose(select, best):
  of = lambda ne, calibration, auc: {
    "metrics": {"valid_ne": ne, "valid_calibration": calibration, "valid_auc": auc}
  }
  assert sweep.best([of(0.7, 3.0, 0.6), of(0.9, 1.1, 0.8)], select) == best


@pytest.mark.weekly
def test_a_workdir_is_of_one_sweep_and_one_config(tmp_path):
  config, workdir = SMOKE["sequence"](tmp_path), tmp_path / "sweep"
  about = sweep.run("sequence", config, workdir, {"dropout": [0.1]})
  assert sweep.run("sequence", config, workdir, {"dropout": [0.1]}) == about
  for change, tried in ({}, {"dropout": [0.2]}), ({"steps": 12}, {"dropout": [0.1]}):
    changed = recipe_runs.sequence_smoke("synthetic", tmp_path, **change)
    with pytest.raises(errors.UserError, match="choose another --workdir"):
      sweep.run("sequence", changed, workdir, tried)
  assert json.loads((workdir / "sweep.json").read_text()) == about


@pytest.mark.weekly
def test_a_stopped_sweep_goes_on_and_trains_nothing_twice(tmp_path, monkeypatch):
  config, workdir = SMOKE["sequence"](tmp_path), tmp_path / "sweep"
  tried = [{"dropout": 0.1}, {"dropout": 0.2}, {"learning_rate": 1e30}]
  saved, save = [], checkpoints.Manager.save

  def recorded(self, progress, **state):
    if "trial_1" in str(self.folder) and progress.step == 6 and stops:
      raise errors.Stopped
    saved.append((Path(self.folder).parent.name, progress.step))
    save(self, progress, **state)

  monkeypatch.setattr(checkpoints.Manager, "save", recorded)
  stops = True
  with pytest.raises(errors.Stopped):
    sweep.run("sequence", config, workdir, tried)
  assert saved == [("trial_0", 3), ("trial_0", 6), ("trial_1", 3)]
  assert "chosen" not in json.loads((workdir / "sweep.json").read_text())
  stops = False
  about = sweep.run("sequence", config, workdir, tried)
  assert saved[3:] == [("trial_1", 6)]
  assert "metrics" not in about["trials"][2]
  assert about["chosen"] in (0, 1)
  assert about["trials"][0]["settings"] == {"dropout": 0.1, "learning_rate": config.learning_rate}
  # The choice stays, and with it the test.
  assert sweep.run("sequence", config, workdir, tried) == about
  with pytest.raises(errors.UserError, match="has chosen among other trials"):
    sweep.run("sequence", config, workdir, tried[:2])
