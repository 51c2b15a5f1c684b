"""Day by day: rows and vocabularies that grow, and tests before training."""

import csv
import importlib
import json

import numpy as np
import pytest
from cases import refused
from sklearn.metrics import log_loss
from small_tables import completed, write_csv

from recipes import days, errors, export, serving
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


def test_days_are_named_in_their_order(tmp_path):
  (tmp_path / "numbers").mkdir()
  for number in range(12):
    (tmp_path / "numbers" / f"day_{number}.csv").touch()
  found = days.entries(str(tmp_path / "numbers"))
  assert list(found) == [f"day_{number}" for number in range(12)]
  folder = tmp_path / "names"
  folder.mkdir()
  for name in ("b.csv.gz", "a.2.parquet", ".hidden", "c"):
    (folder / name).touch()
  assert list(days.entries(str(folder))) == ["a.2", "b", "c"]
  assert list(days.entries([str(folder / "b.csv"), "a.tsv"])) == ["b", "a"]
  (folder / "b.csv").touch()
  with pytest.raises(errors.UserError, match=r"two days of config\.days are called 'b': "):
    days.entries(str(folder))


def test_what_days_cannot_do_is_said(tmp_path):
  cases = [
    (("sequence", {"columns": {"a": "item"}}), "no column is declared as 'user', by which a day"),
    (("dlrm", {"days_window": -1}), "config.days_window is -1: choose a number of days, or 0"),
    (("dlrm", {"split": {"by": "column"}}), "split.by is 'column', and days have no such split"),
    (("dlrm", {"days": "nowhere"}), "config.days is 'nowhere', which is no folder"),
  ]

  def call(given):
    recipe, changes = given
    table = {"days": str(tmp_path), "columns": COLUMNS} | changes
    days.run(recipe, completed(recipe, tmp_path, **table), tmp_path / "run")

  refused(cases, call, errors.UserError)


@pytest.mark.weekly
def test_tables_grow_and_a_day_is_tested_by_the_export_of_the_day_before(tmp_path):
  data, workdir = write_days(tmp_path / "data", 2, rows=300), tmp_path / "run"
  history = run(workdir, data)
  first, second = (
    row_ids.read(path / "serve")["item"].texts for path in sorted(workdir.glob("*/"))
  )
  assert second[: len(first)] == first
  assert len(second) > len(first)
  with (data / "2024-01-02.csv").open() as file:
    rows = list(csv.DictReader(file))
  scores = serving.load(workdir / "2024-01-01" / "served").predict(rows)
  labels = [int(row["clicked"]) for row in rows]
  assert history[0]["metrics"] == {}
  assert history[1]["metrics"]["logloss"] == pytest.approx(log_loss(labels, scores), abs=1e-9)
  assert json.loads((workdir / "days.json").read_text()) == history
  assert run(workdir, data) == history  # days that are done stay as they are


@pytest.mark.ci
@pytest.mark.parametrize(
  ("recipe", "window", "expected"),
  [("dlrm", 2, ["a", "ab", "bc"]), ("sequence", 0, ["a", "ab", "abc"])],
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
  columns = COLUMNS
  if recipe == "sequence":
    columns = {"clicked": "label", "user": "user", "item": "item"}
  data = [str(tmp_path / "data" / f"{name}.csv") for name in "abc"]
  config = completed(recipe, tmp_path, days=data, days_window=window, columns=columns)
  days.run(recipe, config, tmp_path / "run")
  assert trained == expected
  assert tested == ["b", "c"]
