"""What is done with a run that has ended: measured again, and given baselines."""

import json
import shutil

import jax
import pytest
from recipe_runs import dlrm_smoke
from served_models import CLICKS, write_clicks
from small_tables import completed

from recipes import baselines, errors, evaluate, hosts
from recipes.dlrm import baselines as click_baselines
from recipes.dlrm import train
from recipes.run import results


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A finished run on a table of 200 rows."""
  folder = tmp_path_factory.mktemp("commands")
  path = write_clicks(folder / "clicks.csv", rows=200)
  config = completed(
    "dlrm", folder / "cache", files=str(path), columns=CLICKS, epochs=1, batch_size=64
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(hosts, "start", lambda: None)
    result = train.run(config, str(folder / "run"))
  return folder, result


@pytest.mark.ci
def test_a_run_is_measured_again(run, monkeypatch):
  monkeypatch.setattr(hosts, "start", lambda: None)
  folder, result = run
  assert evaluate.evaluate(folder / "run") == result["metrics"]


def test_a_run_is_measured_on_devices_that_its_batches_do_not_divide(run, monkeypatch):
  folder, result = run
  monkeypatch.setattr(hosts, "start", lambda: jax.make_mesh((6,), ("data",)))
  found = evaluate.evaluate(folder / "run")
  assert found == pytest.approx(result["metrics"], abs=1e-5)


@pytest.mark.ci
def test_a_run_is_measured_on_other_files(run):
  folder, result = run
  header, *rows = (folder / "clicks.csv").read_text().splitlines()
  test = [row for row in rows if row.endswith(",test")]
  (folder / "test.csv").write_text("\n".join([header, *test]) + "\n")
  found = evaluate.evaluate_files(folder / "run", str(folder / "test.csv"))
  assert found["rows"] == len(test) == 50
  for name in ("auc", "logloss"):
    assert found["metrics"][name] == pytest.approx(result["metrics"][f"test_{name}"], abs=1e-5)


def test_baselines_are_added_once(run, monkeypatch):
  folder, result = run
  assert baselines.fit(folder / "run", most_rows=99)["baselines"] == {}  # 100 rows train
  found = baselines.fit(folder / "run", most_rows=100)
  assert list(found["baselines"]) == ["constant rate", "logistic regression"]
  assert {name: found[name] for name in result if name != "baselines"} == {
    name: value for name, value in result.items() if name != "baselines"
  }
  assert json.loads((folder / "run" / "result.json").read_text()) == found
  monkeypatch.setattr(train.data_lib, "load", lambda config: pytest.fail("read again"))
  assert train.run(dict(found["config"]), str(folder / "run")) == found


def test_a_baseline_that_fails_hides_nothing(run, monkeypatch, capsys):
  folder, _ = run
  copy = folder / "failing"
  shutil.copytree(folder / "run", copy)
  result = json.loads((copy / "result.json").read_text()) | {"baselines": {}}
  (copy / "result.json").write_text(json.dumps(result))

  def fail(*args, **kwargs):
    raise MemoryError("no memory")

  monkeypatch.setattr(click_baselines, "logistic_regression", fail)
  found = baselines.fit(copy, most_rows=baselines.SMALL)
  assert found["baselines"]["logistic regression"] == {}
  assert (
    "the baseline logistic regression failed: MemoryError: no memory" in capsys.readouterr().err
  )
  assert "logistic" not in results.report(found)
  monkeypatch.undo()
  again = baselines.fit(copy, most_rows=baselines.SMALL)  # as the same command does
  assert again["baselines"]["logistic regression"] == {}
  assert baselines.fit(copy)["baselines"]["logistic regression"]["test_auc"] > 0


def test_a_run_of_changed_data_is_named(run):
  folder, _ = run
  path = folder / "run" / "result.json"
  content = path.read_text()
  path.write_text(json.dumps(json.loads(content) | {"data_sha256": {"clicks.csv": "0"}}))
  try:
    with pytest.raises(errors.UserError, match="have changed since it was trained"):
      evaluate.evaluate(folder / "run")
  finally:
    path.write_text(content)


def test_what_has_not_ended_is_named(tmp_path):
  with pytest.raises(errors.MissingFileError, match=r"is no run: it has no config\.json"):
    baselines.fit(tmp_path)
  config = dlrm_smoke("synthetic", tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
  with pytest.raises(errors.UserError, match=r"the run has not ended\. Its command resumes it"):
    baselines.fit(tmp_path)
