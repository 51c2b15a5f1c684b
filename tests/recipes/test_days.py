"""Day by day: rows and vocabularies that grow, tests before training, kills, and drift."""

import csv
import importlib
import itertools
import json
import types

import jax
import numpy as np
import pytest
from small_tables import completed, write_csv

from recipes import days, errors, export, serving
from recipes.run import journal
from recipes.tables import formats, row_ids

HEADER = ("user", "item", "price", "clicked")
COLUMNS = {"clicked": "label", "user": "category", "item": "category", "price": "number"}
SETTINGS = {
  "columns": COLUMNS,
  "dim": 4,
  "dcnv2": {"cross_layers": 1, "deep": [8]},
  "batch_size": 64,
  "epochs": 3,
  "baseline": {"max_rows": 0},
}


def write_days(folder, count, rows=600):
  """Writes days on which the taste of users drifts, and items come up that were not there."""
  draw = np.random.default_rng(0)
  taste, kind = draw.normal(size=(40, 2)), draw.normal(size=(30 + 10 * count, 2))
  folder.mkdir(parents=True)
  for day in range(count):
    taste += 0.2 * draw.normal(size=taste.shape)
    users, items = draw.integers(0, 40, rows), draw.integers(10 * day, 30 + 10 * day, rows)
    clicked = draw.random(rows) < 1 / (1 + np.exp(-2 * (taste[users] * kind[items]).sum(1)))
    price = draw.normal(5 + day, 1, rows)
    lines = zip(
      [f"u{u}" for u in users], [f"i{i}" for i in items], price.round(3), clicked.astype(int),
      strict=True,
    )  # fmt: skip
    write_csv(folder / f"2024-01-{day + 1:02d}.csv", HEADER, lines)
  return folder


def run(workdir, folder, **changes):
  config = completed("dlrm", workdir.parent / "cache", days=str(folder), **SETTINGS | changes)
  return days.run("dlrm", config, workdir)


def test_numbers_of_days_are_in_their_order(tmp_path):
  for number in range(12):
    (tmp_path / f"day_{number}.csv").touch()
  assert list(days.entries(str(tmp_path))) == [f"day_{number}" for number in range(12)]


def test_days_are_named_in_their_order(tmp_path):
  for name in ("b.csv.gz", "a.2.parquet", ".hidden", "c"):
    (tmp_path / name).touch()
  assert list(days.entries(str(tmp_path))) == ["a.2", "b", "c"]
  listed = [str(tmp_path / "b.csv"), "a.tsv"]
  assert list(days.entries(listed)) == ["b", "a"]
  (tmp_path / "b.csv").touch()
  with pytest.raises(errors.UserError, match=r"two days of config\.days are called 'b': "):
    days.entries(str(tmp_path))


@pytest.mark.parametrize(
  ("recipe", "changes", "message"),
  [
    ("sequence", {"columns": {"a": "item"}}, "no column is declared as 'user', by which a day's"),
    (
      "two_tower",
      {"columns": {"a": "user"}, "split": {"by": "hash"}},
      "rows that an earlier day trained on",
    ),
    ("dlrm", {"days_window": -1}, "config.days_window is -1: choose a number of days, or 0"),
    ("dlrm", {"split": {"by": "column"}}, "split.by is 'column', and days have no such split"),
    (
      "dlrm",
      {"columns": COLUMNS | {"part": "split"}},
      "column .part. splits rows once",
    ),
    ("dlrm", {"split": {"by": "time", "test_from": "2024-01-01"}}, "test_from splits rows once"),
    ("dlrm", {"days": "nowhere"}, "config.days is 'nowhere', which is no folder"),
    ("dlrm", {"days": []}, "which has no files"),
    ("dlrm", {"days": ["a.csv", "days.csv"]}, "a day is called 'days'"),
  ],
)
def test_what_days_cannot_do_is_said(recipe, changes, message, tmp_path):
  config = completed(recipe, tmp_path, **{"days": str(tmp_path), "columns": COLUMNS} | changes)
  if changes.get("days") == []:
    config.days = []
  with pytest.raises(errors.UserError, match=message):
    days.run(recipe, config, tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp("days")
  data = write_days(folder / "data", 3)
  return types.SimpleNamespace(data=data, workdir=folder / "run", days=run(folder / "run", data))


@pytest.mark.weekly
def test_tables_grow_and_keep_their_rows(undisturbed):
  ids = [row_ids.read(p / "serve") for p in sorted(undisturbed.workdir.glob("*/"))]
  assert len(ids) == 3
  for before, after in itertools.pairwise(ids):
    old, new = before["item"].texts, after["item"].texts
    assert new[: len(old)] == old
    assert len(new) > len(old)
  mean = lambda day: json.loads((undisturbed.workdir / day / "serve/columns.json").read_text())[
    "numbers"
  ]["price"]["mean"]
  assert mean("2024-01-03") == mean("2024-01-01")


@pytest.mark.weekly
def test_a_day_is_tested_by_the_export_of_the_day_before(undisturbed, tmp_path):
  with (undisturbed.data / "2024-01-03.csv").open() as file:
    rows = list(csv.DictReader(file))
  model = serving.load(undisturbed.workdir / "2024-01-02" / "served")
  scores = model.predict(rows)
  labels = np.array([int(row["clicked"]) for row in rows])
  loss = -np.log(np.where(labels == 1, scores, 1 - scores.astype(np.float64))).mean()
  metrics = undisturbed.days[2]["metrics"]
  assert metrics["logloss"] == pytest.approx(loss, abs=1e-6)
  wins = scores[labels == 1][:, None] - scores[labels == 0]
  assert metrics["auc"] == pytest.approx(((wins > 0) + 0.5 * (wins == 0)).mean(), abs=1e-9)
  assert undisturbed.days[0]["metrics"] == {}
  assert [day["day"] for day in undisturbed.days] == [f"2024-01-0{i}" for i in (1, 2, 3)]
  assert json.loads((undisturbed.workdir / "days.json").read_text()) == undisturbed.days
  assert (undisturbed.workdir / "days.png").stat().st_size > 1000
  assert "2024-01-02   600" in days.table(undisturbed.days, ("auc", "logloss"))


@pytest.mark.weekly
def test_a_run_and_its_days_are_measured_by_weight(tmp_path):
  """Rows of weight 0 have the wrong outcome: only metrics that leave them out are good."""
  draw = np.random.default_rng(1)
  (tmp_path / "days").mkdir()
  for day in (1, 2):
    user, wrong = draw.integers(0, 20, 600), draw.random(600) < 0.7
    clicked = (user % 2) ^ wrong
    weight = np.where(wrong, 0, draw.integers(1, 9, 600))
    lines = zip([f"u{u}" for u in user], clicked, weight, strict=True)
    write_csv(tmp_path / "days" / f"{day}.csv", ("user", "clicked", "weight"), lines)
  columns = {"clicked": "label", "user": "category", "weight": "weight"}
  baseline = {"max_rows": 1000, "inverse_penalties": (1.0,)}
  last = run(tmp_path / "run", tmp_path / "days", columns=columns, epochs=10, baseline=baseline)[1]
  assert last["metrics"]["auc"] > 0.99
  result = json.loads((tmp_path / "run" / "2" / "result.json").read_text())
  assert result["metrics"]["valid_auc"] > 0.99


@pytest.mark.weekly
def test_days_that_are_done_stay_as_they_are(undisturbed, monkeypatch):
  monkeypatch.chdir(undisturbed.workdir.parent)
  monkeypatch.setattr(export, "export", lambda *args: pytest.fail("exported again"))
  assert run(undisturbed.workdir, "data", epochs=5) == undisturbed.days


@pytest.mark.weekly
def test_kills_and_days_that_come_later_change_nothing(undisturbed, tmp_path, monkeypatch):
  workdir, data = tmp_path / "run", tmp_path / "data"
  data.mkdir()
  files = sorted(undisturbed.data.iterdir())
  for file in files[:2]:  # the third day is not there yet
    (data / file.name).write_bytes(file.read_bytes())
  real, steps = journal.Journal.stepped, []

  def stopping(self):
    real(self)
    steps.append(None)
    if len(steps) == 35:  # on the second day
      raise KeyboardInterrupt

  monkeypatch.setattr(journal.Journal, "stepped", stopping)
  with pytest.raises(errors.Stopped):
    run(workdir, data)
  monkeypatch.setattr(journal.Journal, "stepped", real)
  with monkeypatch.context() as patch:
    patch.setattr(export, "export", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
      run(workdir, data)
  assert run(workdir, data) == undisturbed.days[:2]
  (data / files[2].name).write_bytes(files[2].read_bytes())
  assert run(workdir, data) == undisturbed.days
  served = lambda where: dict(np.load(where / "2024-01-03" / "served" / "arrays.npz"))
  jax.tree.map(np.testing.assert_array_equal, served(workdir), served(undisturbed.workdir))


RANKINGS = {
  "columns": {"clicked": "label", "user": "user", "item": "item"},
  "dim": 8,
  "batch_size": 64,
  "epochs": 2,
  "ks": (5, 10),
}
OF_RECIPE = {
  "two_tower": {"query": ("user", "history"), "negatives": {"number": 16}},
  "sequence": {"max_length": 16, "blocks": 1},
}


def ranked(recipe, workdir, folder, **changes):
  given = RANKINGS | OF_RECIPE[recipe] | changes
  config = completed(recipe, workdir.parent / "cache", days=str(folder), **given)
  return days.run(recipe, config, workdir)


def clicks(path):
  """Returns the items that each user has clicked on, in the order of the file."""
  found = {}
  with path.open() as file:
    for row in csv.DictReader(file):
      if row["clicked"] == "1":
        found.setdefault(row["user"], []).append(row["item"])
  return found


@pytest.mark.weekly
@pytest.mark.parametrize(("recipe", "exclude_seen"), [("two_tower", False), ("sequence", True)])
def test_a_day_is_ranked_by_the_export_of_the_day_before(recipe, exclude_seen, tmp_path):
  """Recall by hand; ranking asks for all that a user has on a day, and new items are misses."""
  data = write_days(tmp_path / "data", 3, rows=300)
  history = ranked(recipe, tmp_path / "run", data, exclude_seen=exclude_seen)
  files = sorted(data.iterdir())
  before = {user: set(items) for user, items in clicks(files[0]).items()}
  for user, items in clicks(files[1]).items():
    before.setdefault(user, set()).update(items)
  model = serving.load(tmp_path / "run" / "2024-01-02" / "served")
  recalls, count = [], 0
  for user, items in clicks(files[2]).items():
    wanted = set(items) - (before.get(user, set()) if exclude_seen else set())
    best = model.recommend([{"user": user}], top=10).items[0]
    count += len(wanted)
    if wanted:
      recalls.append(len(wanted & set(best[:5])) / len(wanted))
  grown = row_ids.read(tmp_path / "run" / "2024-01-02" / "serve")["item"].texts
  assert set(grown) == {
    item for path in files[:2] for items in clicks(path).values() for item in items
  }
  assert history[0]["metrics"] == {}
  assert history[2]["rows"] == count
  assert history[2]["metrics"]["recall@5"] == pytest.approx(np.mean(recalls), abs=1e-9)
  assert "recall@5  ndcg@5" in days.table(history, ("recall@5", "ndcg@5"))


@pytest.mark.parametrize(
  ("recipe", "window", "expected"),
  [
    ("dlrm", 0, ["a", "b", "c"]),
    ("dlrm", 2, ["a", "ab", "bc"]),
    ("sequence", 0, ["a", "ab", "abc"]),
  ],
)
def test_each_day_trains_on_its_window(recipe, window, expected, tmp_path, monkeypatch):
  (tmp_path / "data").mkdir()
  for name in "abc":
    write_csv(tmp_path / "data" / f"{name}.csv", HEADER, [("u", "i", 1, 1)])
  trained, tested = [], []
  names = lambda config: "".join(p.stem for p in formats.paths(config.files))
  test = lambda served, config: tested.append(names(config)) or {"rows": 1, "metrics": {}}
  train = lambda config, workdir: trained.append(names(config)) or {"metrics": {}}
  monkeypatch.setattr(days.evaluate, "of_export", test)
  module = importlib.import_module(f"recipes.{recipe}.train")
  monkeypatch.setattr(module, "run", train)
  monkeypatch.setattr(export, "export", lambda *args: None)
  columns = RANKINGS["columns"] if recipe == "sequence" else COLUMNS
  data = [str(tmp_path / "data" / f"{name}.csv") for name in "abc"]
  config = completed(recipe, tmp_path, days=data, days_window=window, columns=columns)
  days.run(recipe, config, tmp_path / "run")
  assert trained == expected
  assert tested == ["b", "c"]


@pytest.mark.weekly
def test_a_warm_model_beats_a_cold_one_on_every_later_day(tmp_path):
  data = write_days(tmp_path / "data", 5, rows=1000)
  learning = {"dim": 16, "epochs": 8, "learning_rate": 5e-3, "table": {"learning_rate": 1e-2}}
  warm = run(tmp_path / "warm", data, **learning)
  names = list(days.entries(str(data)))
  for day, before in zip(warm[2:], names[1:], strict=False):
    only = tmp_path / f"cold_{before}"
    only.mkdir()
    for name in (before, day["day"]):
      (only / f"{name}.csv").write_bytes((data / f"{name}.csv").read_bytes())
    cold = run(tmp_path / f"run_{before}", only, **learning)[1]
    assert cold["rows"] == day["rows"]
    assert day["metrics"]["auc"] > cold["metrics"]["auc"]
    assert day["metrics"]["logloss"] < cold["metrics"]["logloss"]
    print(day["day"], day["metrics"], cold["metrics"])
