"""Exported models answer raw rows as the model in the run's process answers the prepared data."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from kills import full_disk
from recipe_runs import sequence_smoke, two_tower_smoke
from served_models import (
  CLICKS,
  LOG,
  asked_sequences,
  asked_towers,
  own_probabilities,
  own_sequences,
  own_towers,
  run_of,
  write_clicks,
  write_log,
)  # fmt: skip
from suites import slow_unless

import embed
from recipes import export, hosts, serving
from recipes.errors import UserError
from recipes.run import settings

SMALL = {"batch_size": 64, "dim": 8}


def read_rows(path):
  header, *lines = path.read_text().splitlines()
  return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]


ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("clicks")
  file = write_clicks(folder / "clicks.csv")
  training = run_of("dlrm", SMALL | {"files": str(file), "columns": CLICKS}, folder / "run")
  return training, folder / "run", file


@pytest.mark.parametrize(
  "changes",
  [
    {},
    pytest.param({"model": "dlrm"}, marks=pytest.mark.weekly),
    pytest.param({"ema": 0.9}, marks=pytest.mark.ci),
  ],
  ids=["dcnv2", "dlrm", "averages"],
)
def test_a_click_model_scores_raw_rows_as_its_run_does(changes, clicks, tmp_path):
  training, run, file = clicks
  if changes:
    run = tmp_path / "run"
    table = SMALL | {"files": str(file), "columns": CLICKS} | changes
    training = run_of("dlrm", table, run)
  expected = own_probabilities(training)
  rows = read_rows(file)
  scores = serving.load(export.export(run, tmp_path / "served")).predict(rows)

  assert len(rows) == 1000
  assert np.ptp(expected) > 0.1
  np.testing.assert_allclose(scores, expected, atol=1e-6, rtol=0)


def test_tables_are_exported_from_all_devices_as_from_one(clicks, tmp_path, monkeypatch):
  _, run, file = clicks
  whole, real = [], embed.export

  def exporting(function, model, *args, **kwargs):
    tables = jax.tree.leaves(nnx.state(model, embed.Table))
    whole.append(all(table.sharding.is_fully_replicated for table in tables))
    return real(function, model, *args, **kwargs)

  monkeypatch.setattr(embed, "export", exporting)
  spread = serving.load(export.export(run, tmp_path / "spread", platforms=("cpu",)))
  monkeypatch.setattr(hosts, "start", lambda: None)
  alone = serving.load(export.export(run, tmp_path / "alone", platforms=("cpu",)))
  assert whole == [False, True]
  for name, x in alone.served.arrays.items():
    np.testing.assert_array_equal(x, spread.served.arrays[name])
  rows = read_rows(file)[:50]
  np.testing.assert_array_equal(spread.predict(rows), alone.predict(rows))


@pytest.mark.ci
@pytest.mark.parametrize(
  "query", [pytest.param((), marks=pytest.mark.weekly), ("user", "history", "country")]
)
def test_two_towers_rank_raw_rows_as_their_run_does(query, tmp_path):
  file = write_log(tmp_path / "log.csv")
  # Names that no file can have, and that a column of the prepared data is called in another way.
  again = {f"{name}/again": LOG[name] | {"column": name} for name in ("country", "genre")}
  table = SMALL | {"files": str(file), "columns": LOG | again, "query": query}
  training = run_of("two_tower", table | {"query_hidden": (16,)}, tmp_path / "run")
  users, scores, ids = own_towers(training)

  served = serving.load(export.export(tmp_path / "run", tmp_path / "served"))
  texts, histories = asked_towers(training, served, users)
  answers = served.recommend({"who": texts, "history": histories}, top=10)
  items = np.array(served._items.texts, object)

  assert len(users) == 1000
  np.testing.assert_allclose(answers.scores, scores, atol=1e-6, rtol=0)
  assert np.mean(answers.items == items[ids]) > 0.999
  assert answers.titles[0, 0] == f"No. {answers.items[0, 0][1:]}, the film"


@pytest.mark.ci
def test_a_run_on_a_published_table_answers_with_its_ids_and_titles(tmp_path):
  from recipes.two_tower import train

  config = two_tower_smoke("movielens1m", tmp_path)
  train.run(config, str(tmp_path / "run"))
  served = serving.load(export.export(tmp_path / "run", tmp_path / "served"))
  answers = served.recommend([{"user": "11"}, {"history": ["5", "8"]}], top=3)
  movies = (tmp_path / "movielens1m-raw" / "movies.dat").read_text(encoding="latin-1")
  titles = dict(line.split("::")[:2] for line in movies.splitlines())
  assert answers.items.shape == (2, 3)
  assert all(titles[i] == t for i, t in zip(answers.items.flat, answers.titles.flat, strict=True))
  # The training file has no header, and rows to predict for may have one.
  command = [sys.executable, "-m", "recipes.predict", str(tmp_path / "served"), "--top=1"]
  text = b"history\n5|8\n"
  done = subprocess.run(command, input=text, capture_output=True, timeout=300, check=True)
  assert done.stdout.decode("utf-8").splitlines()[1].startswith(f"5|8::{answers.items[1, 0]}::")


# Models, one of them on histories that are cut, and every published data set.
SEQUENCES = {
  "sasrec": {"model": "sasrec"},
  "bfloat16": {"model": "sasrec", "table_dtype": "bfloat16"},
  "hstu": {"model": "hstu"},
  "cosines": {"model": "hstu", "temperature": 0.05},
  "bert4rec": {"model": "bert4rec"},
  "beauty": None,
  "beauty_bert4rec": None,
  "movielens1m": None,
}


@pytest.mark.ci
@pytest.mark.parametrize(
  "name", slow_unless(SEQUENCES, ("sasrec", "cosines", "bert4rec").__contains__)
)
def test_sequence_models_rank_raw_rows_as_their_run_does(name, tmp_path):
  if (model := SEQUENCES[name]) is None:
    config = sequence_smoke(name, tmp_path)
  else:
    file = write_log(tmp_path / "log.csv")
    config = SMALL | {"files": str(file), "columns": LOG, "max_length": 5} | model
  training = run_of("sequence", config, tmp_path / "run")
  users, scores, ids = own_sequences(training)

  served = serving.load(export.export(tmp_path / "run", tmp_path / "served"))
  answers = served.recommend({"history": asked_sequences(training, served, users)}, top=10)
  items = np.array(served._items.texts, object)

  assert len(users) == 1000 or model is None
  # Scores of cosines are these divided by the temperature, which float32 rounds before.
  scale = (model or {}).get("temperature", 1.0)
  np.testing.assert_allclose(scale * answers.scores, scale * scores, atol=1e-6, rtol=1e-6)
  assert np.mean(answers.items == items[ids]) > (0.99 if model is None else 0.999)


@pytest.mark.ci
def test_an_approximate_index_finds_what_the_exact_one_does(tmp_path):
  pytest.importorskip("usearch")
  file = write_log(tmp_path / "log.csv", users=60)
  run_of("two_tower", SMALL | {"files": str(file), "columns": LOG}, tmp_path / "run")
  exact, near = (
    serving.load(export.export(tmp_path / "run", tmp_path / str(ann), ann=ann))
    for ann in (False, True)
  )
  assert near.served.about["install"].endswith("[serving,ann]'")
  rows = {"who": [f"u{i}" for i in range(20)] + ["new"]}
  answers, expected = near.recommend(rows, top=40), exact.recommend(rows, top=40)
  np.testing.assert_array_equal(answers.items, expected.items)
  np.testing.assert_allclose(answers.scores, expected.scores, atol=1e-6)


@pytest.mark.ci
def test_a_trained_run_is_exported_by_the_command(tmp_path, capsys):
  from recipes.dlrm import train

  table = {
    "files": str(write_clicks(tmp_path / "clicks.csv", rows=400)),
    "columns": CLICKS,
    "epochs": 2,
    "cache_dir": str(tmp_path / "cache"),
    "baseline": {"max_rows": 0},
  }
  result = train.run(settings.completed("dlrm", table), str(tmp_path / "run"))
  shutil.rmtree(tmp_path / "cache")
  (tmp_path / "clicks.csv").rename(tmp_path / "rows.csv")
  export.main([str(tmp_path / "run"), f"--out={tmp_path / 'served'}", "--platforms=cpu"])
  assert str(tmp_path / "served") in capsys.readouterr().out
  rows = read_rows(tmp_path / "rows.csv")
  scores = serving.load(tmp_path / "served").predict(rows)
  test = [i for i, row in enumerate(rows) if row["part"] == "test"]
  labels = np.array([float(rows[i]["clicked"]) for i in test])
  logloss = -np.mean(np.log(np.where(labels == 1, scores[test], 1 - scores[test])))
  np.testing.assert_allclose(logloss, result["metrics"]["test_logloss"], rtol=1e-5)


def test_the_folder_says_what_it_holds_and_needs(clicks, tmp_path):
  _, run, _ = clicks
  out = export.export(run, tmp_path / "served")
  about = json.loads((out / "served.json").read_text())
  assert about["recipe"] == "dlrm"
  assert about["step"] == 3
  assert about["num_columns"] == 8
  assert set(about["header"]) == set(CLICKS) - {"city_shop"}
  assert re.fullmatch(r"pip install '\./sparse_embed-\S+\.whl\[serving\]'", about["install"])
  assert "recipes.predict" in (out / "README.md").read_text()
  assert export.export(run, out) == out  # an earlier export is replaced
  assert not list(tmp_path.glob("*.partial"))


# --- replaced -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(clicks):
  """A run on the same file, whose model is another."""
  table = SMALL | {"files": str(clicks[2]), "columns": CLICKS, "dim": 4}
  run_of("dlrm", table, clicks[1].with_name("other"))
  return clicks[1].with_name("other")


def scores(out, file):
  return serving.load(out).predict(read_rows(file)[:3]).tolist()


@pytest.mark.weekly
def test_a_full_disk_leaves_the_earlier_export(clicks, other, tmp_path, monkeypatch):
  _, run, file = clicks
  monkeypatch.setattr(hosts, "start", lambda: None)  # nothing is compiled, and kept on the disk
  out = export.export(run, tmp_path / "served", platforms=("cpu",))
  before = scores(out, file)
  with full_disk(1 << 12), pytest.raises(OSError, match="too large"):
    export.export(other, out, platforms=("cpu",))
  assert scores(out, file) == before
  assert [path.name for path in tmp_path.iterdir()] == ["served"]


EXPORT = """
import sys
import kills
from recipes import export
step, *arguments = sys.argv[1:]
steps = kills.kill_at(int(step), "/served")
export.main(arguments)
print("steps", next(steps))
"""


@pytest.mark.weekly
def test_a_kill_leaves_the_earlier_export_or_the_new_one(clicks, other, tmp_path):
  _, run, file = clicks
  out = tmp_path / "served"
  environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}

  def export_by_command(step):
    arguments = [str(step), str(other), f"--out={out}", "--platforms=cpu"]
    command = [sys.executable, "-c", EXPORT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

  export.export(run, out, platforms=("cpu",))
  before = scores(out, file)
  done = export_by_command(-1)
  after, steps = scores(out, file), int(done.stdout.rpartition("steps")[2])
  assert before != after
  # From the last rename on the new export is there; files of the old one are removed in the end.
  found = []
  for step in np.linspace(0, steps - 1, 20).astype(int):
    export.export(run, out, platforms=("cpu",))
    assert scores(out, file) == before
    assert export_by_command(step).returncode == -signal.SIGKILL
    found.append(scores(out, file))
  assert found == sorted(found, key=[before, after].index)
  assert (found[0], found[-1]) == (before, after)
  export.export(run, out, platforms=("cpu",))
  assert [path.name for path in tmp_path.iterdir()] == ["served"]


def edited(run, folder, **changes):
  """Copies a run, with other values in its config.json and result.json; returns the copy."""
  copy = folder / "copy"
  shutil.copytree(run, copy)
  for name in ("config.json", "result.json"):
    values = json.loads((copy / name).read_text())
    values |= {key: value for key, value in changes.items() if key in values}
    (copy / name).write_text(json.dumps(values))
  return copy


def test_a_run_that_cannot_be_exported_is_a_line_that_says_why(clicks, tmp_path, capsys):
  _, run, _ = clicks

  def error(folder, **options):
    with pytest.raises(UserError) as caught:
      export.export(folder, tmp_path / "served", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)

  assert "is no run" in error(tmp_path)
  assert "--ann is for the items" in error(run, ann=True)
  assert "--platforms is 'gpu'" in error(run, platforms=("gpu",))
  other = edited(run, tmp_path / "1", dataset="criteo")
  shutil.rmtree(other / "serve")
  assert "no folder serve, of transforms and raw ids, as only runs on tables" in error(other)
  unfinished = edited(run, tmp_path / "2")
  (unfinished / "result.json").unlink()
  assert "the run has not ended" in error(unfinished)
  without = edited(run, tmp_path / "3", tested_step=4)
  assert "checkpoints/4, the tested state, is missing" in error(without)
  changed = edited(run, tmp_path / "4", dim=16)
  assert "cannot be restored" in error(changed)
  damaged = edited(run, tmp_path / "5")
  (damaged / "serve" / "columns.json").unlink()
  assert "serve is damaged" in error(damaged)
  (damaged / "config.json").write_text("{")
  assert "config.json is damaged" in error(damaged)
  (tmp_path / "occupied").mkdir()
  (tmp_path / "occupied" / "thesis.txt").write_text("mine")
  with pytest.raises(UserError, match="holds other files"):
    export.export(run, tmp_path / "occupied")
  with pytest.raises(SystemExit):
    export.main([str(tmp_path), f"--out={tmp_path / 'served'}"])
  assert capsys.readouterr().err.startswith("error: ")
  assert not (tmp_path / "served").exists()


@pytest.mark.ci
def test_a_damaged_checkpoint_is_named(clicks, tmp_path):
  broken = edited(clicks[1], tmp_path)
  for path in (broken / "checkpoints" / "3" / "state").rglob("*"):
    if path.is_file() and "metadata" not in path.name.lower():
      path.write_bytes(b"")
  command = [sys.executable, "-m", "recipes.export", str(broken), f"--out={tmp_path / 'served'}"]
  ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
  assert ended.returncode != 0
  errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
  assert len(errors) == 1
  assert "the checkpoint of step 3 is damaged: " in errors[0]
  assert ended.stderr.splitlines() == errors  # none of Orbax's tracebacks
