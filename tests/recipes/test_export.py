"""Exported models answer raw rows as the model in the run's process answers the prepared data."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from cases import refused
from flax import nnx
from pages import blocks
from recipe_runs import two_tower_smoke
from served_models import (
  LOG,
  asked_sequences,
  asked_towers,
  own_probabilities,
  own_sequences,
  own_towers,
  run_of,
  write_log,
)  # fmt: skip

import embed
from recipes import export, predict, serving
from recipes.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"batch_size": 64, "dim": 8, "columns": LOG, "ks": (5,), "select": "valid_ndcg@5"}


def check_ranked(answers, ids, scores, items):
  """The answers have these scores, and the items wherever no score is nearly that of the next."""
  np.testing.assert_allclose(answers.scores, scores, atol=1e-6, rtol=1e-6)
  gaps = np.diff(scores, axis=1, prepend=np.inf, append=-np.inf)
  is_clear = (np.abs(gaps) > 1e-5)[:, 1:] & (np.abs(gaps) > 1e-5)[:, :-1]
  is_clear[:, -1] = False  # what comes after the last one is not known
  assert is_clear.mean() > 0.7
  np.testing.assert_array_equal(answers.items[is_clear], np.array(items, object)[ids][is_clear])


@pytest.mark.programs(40, "it builds a model again that another process may have trained")
def test_a_click_model_scores_raw_rows_as_its_run_does(clicks):
  expected = own_probabilities(clicks)
  assert np.ptp(expected) > 0.1
  scores = clicks.answering.predict(clicks.rows)
  np.testing.assert_allclose(scores, expected, atol=1e-6, rtol=0)


@pytest.mark.ci
def test_two_towers_rank_raw_rows_as_their_run_does(towers):
  served = towers.answering
  users, scores, ids = own_towers(towers, top=5)
  texts, histories = asked_towers(towers, served, users)
  answers = served.recommend({"who": texts, "history": histories}, top=5)
  assert len(users) == 51
  check_ranked(answers, ids, scores, served._items.texts)
  assert answers.titles[0, 0] == f"No. {answers.items[0, 0][1:]}, the film"


@pytest.mark.ci
def test_candidates_are_split_over_the_devices_and_ranked_as_on_one(towers, monkeypatch):
  spread, rows = towers.answering, {"who": [f"u{user}" for user in range(40)]}
  candidates = spread.served.candidates
  assert len(candidates.sharding.device_set) == 8
  assert candidates.sharding.shard_shape(candidates.shape)[0] == len(candidates) // 8
  monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
  alone = serving.load(spread.served.transforms.parent)
  assert len(alone.served.candidates.sharding.device_set) == 1
  expected, answers = alone.recommend(rows, top=5), spread.recommend(rows, top=5)
  np.testing.assert_array_equal(answers.items, expected.items)
  # How a dot product is rounded may depend on the number of candidates of a device.
  np.testing.assert_allclose(answers.scores, expected.scores, rtol=1e-6, atol=1e-6)


@pytest.mark.ci
def test_a_sequence_model_ranks_raw_rows_as_its_run_does(sequences):
  served = sequences.answering
  users, scores, ids = own_sequences(sequences, top=5)
  histories = asked_sequences(sequences, served, users)
  answers = served.recommend({"history": histories}, top=5)
  assert len(users) == 51
  check_ranked(answers, ids, scores, served._items.texts)


SEQUENCES = {
  "hstu": {"model": "hstu"},
  "bfloat16": {"model": "sasrec", "table_dtype": "bfloat16"},
}


@pytest.mark.ci
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_models_rank_histories_that_are_cut_as_their_run_does(name, tmp_path):
  file, model = write_log(tmp_path / "log.csv", users=100), SEQUENCES[name]
  table = SMALL | {"files": str(file), "max_length": 5} | model
  training = run_of("sequence", table, tmp_path / "run")
  users, scores, ids = own_sequences(training)
  served = serving.load(export.export(tmp_path / "run", tmp_path / "served", platforms=("cpu",)))
  histories = asked_sequences(training, served, users)
  answers = served.recommend({"history": histories}, top=10)
  check_ranked(answers, ids, scores, served._items.texts)


@pytest.mark.ci
def test_tables_are_exported_from_all_devices_as_from_one(clicks, tmp_path, monkeypatch):
  whole, real = [], embed.export

  def exporting(function, model, *args, **kwargs):
    tables = jax.tree.leaves(nnx.state(model, embed.Table))
    whole.append(all(table.sharding.is_fully_replicated for table in tables))
    return real(function, model, *args, **kwargs)

  monkeypatch.setattr(embed, "export", exporting)
  out = export.export(clicks.workdir, tmp_path / "spread")  # for all platforms
  spread, alone = serving.load(out), clicks.answering
  assert whole == [False]
  with np.load(out / "model.npz") as stored, np.load(clicks.served / "model.npz") as expected:
    for name in set(expected) - {"program.bin"}:
      np.testing.assert_array_equal(stored[name], expected[name])
  np.testing.assert_array_equal(spread.predict(clicks.rows[:50]), alone.predict(clicks.rows[:50]))


@pytest.mark.ci
def test_a_run_on_a_published_table_answers_with_its_ids_and_titles(tmp_path, capfd):
  run_of("two_tower", two_tower_smoke("movielens1m", tmp_path), tmp_path / "run")
  out = export.export(tmp_path / "run", tmp_path / "served", platforms=("cpu",))
  answers = serving.load(out).recommend([{"user": "11"}, {"history": ["5", "8"]}], top=3)
  movies = (tmp_path / "movielens1m-raw" / "movies.dat").read_text(encoding="latin-1")
  titles = dict(line.split("::")[:2] for line in movies.splitlines())
  assert answers.items.shape == (2, 3)
  assert all(titles[i] == t for i, t in zip(answers.items.flat, answers.titles.flat, strict=True))
  # The training file has no header, and rows to predict for may have one.
  (tmp_path / "rows.dat").write_text("history\n5|8\n")
  predict.main([str(out), str(tmp_path / "rows.dat"), "--top=1"])
  shown = capfd.readouterr().out.splitlines()
  assert shown[1].startswith(f"5|8,{answers.items[1, 0]},")


@pytest.mark.ci
def test_a_run_is_exported_by_the_command_without_its_data(clicks, tmp_path, capsys):
  cache, table = tmp_path / "cache", tmp_path / "clicks.csv"
  run = clicks.copy(tmp_path, files=str(table), cache_dir=str(cache))  # neither is there
  export.main([str(run), f"--out={tmp_path / 'served'}"])
  assert str(tmp_path / "served") in capsys.readouterr().out
  rows = [row for row in clicks.rows if row["part"] == "test"]
  scores = serving.load(tmp_path / "served").predict(rows)
  labels = np.array([float(row["clicked"]) for row in rows])
  logloss = -np.mean(np.log(np.where(labels == 1, scores, 1 - scores)))
  np.testing.assert_allclose(logloss, clicks.result["metrics"]["test_logloss"], rtol=1e-5)
  again = export.export(run, tmp_path / "served", platforms=("cpu",))  # replaces it
  np.testing.assert_array_equal(serving.load(again).predict(rows), scores)
  assert not list(tmp_path.glob("*.partial"))


@pytest.mark.ci
def test_the_server_of_the_page_ranks_the_candidates_of_a_row(tmp_path, monkeypatch):
  client = pytest.importorskip("fastapi.testclient").TestClient
  file = write_log(tmp_path / "log.csv", items=120)
  file.write_text(file.read_text().replace("who,what,", "user,movie,", 1))
  columns = {"user": "user", "movie": "item"}
  liked = {"kind": "label", "column": "genre", "positive": ("g0",)}
  retriever = SMALL | {"files": str(file), "columns": columns}
  ranker = {"files": str(file), "columns": columns | {"liked": liked}, "batch_size": 64, "dim": 8}
  for name, recipe, table in (("retriever", "two_tower", retriever), ("ranker", "dlrm", ranker)):
    run_of(recipe, table, tmp_path / f"{name}_run")
    export.export(tmp_path / f"{name}_run", tmp_path / name, platforms=("cpu",))
  monkeypatch.chdir(tmp_path)
  scope = {}
  for _, code in blocks("serving.md", "py"):
    exec(code, scope)
  ask = lambda row, top: client(scope["app"]).post(f"/recommend?top={top}", json=row)
  row = {"user": "u3", "deny": ["i5"]}
  answer = ask(row, 100).json()
  found = serving.load("retriever").recommend([row], top=100).items[0]
  expected = serving.load("ranker").predict({"user": ["u3"] * 100, "movie": found})
  assert {each["movie"]: each["score"] for each in answer} == dict(
    zip(found, expected, strict=True)
  )
  assert [each["score"] for each in answer] == sorted(expected, reverse=True)
  assert ask(row, 3).json() == answer[:3]
  assert ask(row | {"allow": []}, 3).json() == []
  assert "none of the columns user" in ask({}, 3).json()["detail"]


def test_a_run_that_cannot_be_exported_is_a_line_that_says_why(clicks, tmp_path, capsys):
  def edited(name, **changes):
    (tmp_path / name).mkdir()
    return clicks.copy(tmp_path / name, **changes)

  no_table, unfinished = edited("no_table"), edited("unfinished")
  shutil.rmtree(no_table / "serve")
  (unfinished / "result.json").unlink()
  (tmp_path / "occupied").mkdir()
  (tmp_path / "occupied" / "thesis.txt").write_text("mine")
  run, out = clicks.workdir, tmp_path / "served"
  cases = [
    ((tmp_path, out), "give the --workdir of a run that has ended"),
    ((run, tmp_path / "occupied"), "holds other files"),
    ((no_table, out), "no folder serve, of transforms and raw ids, as only runs on tables"),
    ((unfinished, out), "give the --workdir of a run that has ended"),
  ]
  call = lambda given: export.export(*given)
  refused([(given, rf"^[^\n]*{text}[^\n]*$") for given, text in cases], call, UserError)
  for given in ([str(tmp_path)], [str(run), "--vectors=items.parquet"]):
    with pytest.raises(SystemExit):
      export.main([*given, f"--out={out}"])
    assert capsys.readouterr().err.startswith("error: ")
  assert not out.exists()
