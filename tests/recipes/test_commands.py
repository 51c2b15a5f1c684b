"""What is done with a run that has ended: measured again, and given baselines."""

import json

import pytest

from recipes import baselines, errors, evaluate
from recipes.dlrm import train


@pytest.mark.ci
def test_a_run_is_measured_on_other_files(clicks, tmp_path):
  header, *rows = clicks.file.read_text().splitlines()
  test = [row for row in rows if row.endswith(",test")]
  (tmp_path / "test.csv").write_text("\n".join([header, *test]) + "\n")
  found = evaluate.evaluate(clicks.workdir, str(tmp_path / "test.csv"))
  assert found["rows"] == len(test) == 50
  expected = {name: clicks.result["metrics"][f"test_{name}"] for name in ("auc", "logloss")}
  assert {name: found["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_run_of_rankings_is_not_measured_on_other_files(towers):
  with pytest.raises(errors.UserError, match="two_tower; other files measure runs of dlrm alone"):
    evaluate.evaluate(towers.workdir, "more.csv")


def test_baselines_are_added_once(clicks, tmp_path, monkeypatch):
  run, result = clicks.copy(tmp_path), clicks.result
  assert baselines.fit(run, most_rows=99)["baselines"] == {}  # 100 rows train
  found = baselines.fit(run, most_rows=100)
  assert list(found["baselines"]) == ["constant rate", "logistic regression"]
  assert {name: found[name] for name in result} == result | {"baselines": found["baselines"]}
  assert json.loads((run / "result.json").read_text()) == found
  monkeypatch.setattr(train.data_lib, "load", lambda config: pytest.fail("read again"))
  assert clicks.train(run) == found


def test_a_run_of_changed_data_is_named(clicks, tmp_path):
  run = clicks.copy(tmp_path, data_sha256={"clicks.csv": "0"})
  with pytest.raises(errors.UserError, match="have changed since it was trained"):
    baselines.fit(run)


def test_what_has_not_ended_is_named(clicks, tmp_path):
  with pytest.raises(errors.MissingFileError, match="give the --workdir of a run that has ended"):
    baselines.fit(tmp_path)
