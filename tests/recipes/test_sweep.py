"""Sweeps: what is tried, that no test row is read before the choice, and how one resumes."""

import importlib
import json
import runpy

import pytest
import recipe_runs
from cases import each, refused

from recipes import errors, sweep


def test_mistakes_end_before_the_first_trial(tmp_path):
  config = recipe_runs.sequence_smoke("synthetic", tmp_path)
  cases = [
    ({}, "no trials"),
    ({"dropout": 0.1}, "a dict of lists"),
    ([{"dropuot": 0.1}], r"config has no setting 'dropuot'; did you mean 'dropout'"),
    ([{"loss": "hinge"}], "unknown loss 'hinge'"),
  ]
  call = lambda wrong: sweep.run("sequence", config, tmp_path / "sweep", wrong)
  refused(cases, call, errors.UserError)
  assert not (tmp_path / "sweep").exists()


@pytest.mark.ci
def test_sweeps_of_configs_name_settings_that_there_are():
  def check(recipe, file):
    config = recipe_runs.load(f"{recipe}.{file}", "")
    made = runpy.run_path(f"configs/{recipe}/{file}.py")
    module = importlib.import_module(f"recipes.{recipe}.train")
    for trial in sweep.trials(made["get_sweep"]()):
      module.check(sweep.config_of(recipe, config, trial), None)

  names = ("sequence.beauty", "sequence.beauty_bert4rec", "two_tower.gowalla")
  each({name: name.split(".") for name in (*names, "two_tower.movielens1m")}, check)


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
def test_no_test_row_is_read_before_the_choice(tmp_path, monkeypatch):
  recipe, workdir = "sequence", tmp_path / "sweep"
  config = recipe_runs.sequence_smoke("synthetic", tmp_path)
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


def test_the_best_trial_is_the_one_that_a_run_would_choose():
  of = lambda ne, calibration, auc: {
    "metrics": {"valid_ne": ne, "valid_calibration": calibration, "valid_auc": auc}
  }
  trials = [of(0.7, 3.0, 0.6), of(0.9, 1.1, 0.8)]
  best = {"valid_ne": 0, "valid_calibration": 1, "valid_auc": 1}
  assert {select: sweep.best(trials, select) for select in best} == best
