"""Data sets by name: one error for all recipes, one way to load, and columns without rows."""

import time
from concurrent import futures
from types import SimpleNamespace

import numpy as np
import pytest
from cases import each

from recipes import cache, datasets, errors
from recipes.dlrm import data as clicks
from recipes.sequence import data as sequences
from recipes.two_tower import data as pairs


def settings(config):
  return {"rows": config.rows}


def build(settings, folder):
  rows = settings["rows"]
  cache.column(folder, "x", (rows,), np.int32)[:] = np.arange(rows)
  return {"splits": cache.cut(rows, 0.25, 0.25), "sha256": {"generated": "0" * 64}}


def doubled(prepared):
  return datasets.Prepared({"x": 2 * prepared.columns["x"]}, prepared.meta)


def empty(config):
  return datasets.Prepared({"x": np.zeros(0, np.int32)}, {"splits": {}, "sha256": {}})


TOYS = datasets.Registry(
  {
    "plain": datasets.DataSet(settings, build),
    "made": datasets.DataSet(settings, build, view=doubled, describe=empty),
  },
  prefix="toys-",
)


def config(name, folder):
  return SimpleNamespace(dataset=name, rows=4, cache_dir=str(folder))


def test_a_data_set_is_prepared_once_and_read_through_its_view(tmp_path):
  plain = TOYS.load(config("plain", tmp_path))
  assert plain.columns["x"].tolist() == [0, 1, 2, 3]
  assert plain.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
  assert (plain.sha256, plain.best) == ({"generated": "0" * 64}, {})
  assert (tmp_path / plain.name / "meta.json").exists()
  assert plain.name.startswith("toys-plain-")
  assert TOYS.load(config("made", tmp_path)).columns["x"].tolist() == [0, 2, 4, 6]


@pytest.mark.weekly
def test_of_processes_that_share_a_cache_one_prepares_and_the_others_wait(tmp_path):
  started = []

  def slowly(folder):
    started.append(folder)
    time.sleep(0.3)
    return build({"rows": 4}, folder)

  prepare = lambda _: cache.prepared(tmp_path, "toy", {}, slowly)[0]["x"].tolist()
  with futures.ThreadPoolExecutor(3) as pool:
    assert list(pool.map(prepare, range(3))) == [[0, 1, 2, 3]] * 3
  assert len(started) == 1


def test_a_data_set_is_described_without_its_data_or_loaded(tmp_path):
  assert TOYS.describe(config("made", tmp_path)).columns["x"].shape == (0,)
  assert not list(tmp_path.iterdir())
  assert TOYS.describe(config("plain", tmp_path)).columns["x"].shape == (4,)


def test_an_unknown_name_is_the_users_error_and_lists_the_names():
  def check(recipe):
    names = sorted(recipe.DATA_SETS)
    assert "synthetic" in names
    with pytest.raises(errors.UserError) as error:
      recipe.load(SimpleNamespace(dataset="movies"))
    assert str(error.value) == f"unknown dataset 'movies': choose one of {names}"

  each({recipe.__name__: (recipe,) for recipe in (clicks, pairs, sequences)}, check)
