"""Day by day: rows and vocabularies that grow, and tests before training."""

import importlib

import pytest
from cases import refused
from small_tables import completed, write_csv

from recipes import days, errors, export
from recipes.tables import formats

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
