"""Prepared data sets: read as they were written, built once for each settings, seen by a view."""

import time
from concurrent import futures
from types import SimpleNamespace

import numpy as np
import pytest

from recipes import cache


def test_preparation_begins_from_nothing_after_an_error_and_is_done_once(tmp_path):
  calls = []

  def build(folder):
    calls.append(list(folder.iterdir()))
    cache.column(folder, "x", (4,), np.int32)[:] = 8
    if len(calls) == 1:
      raise KeyboardInterrupt
    return {"splits": cache.cut(4, 0.25, 0.25)}

  with pytest.raises(KeyboardInterrupt):
    cache.prepared(tmp_path, "toy", {"a": 1}, build)
  for _ in range(2):
    columns, meta = cache.prepared(tmp_path, "toy", {"a": 1}, build)
  assert calls == [[], []]
  assert columns["x"].tolist() == [8] * 4
  assert meta["splits"] == {"train": [0, 2], "valid": [2, 3], "test": [3, 4]}
  cache.prepared(tmp_path, "toy", {"a": 2}, build)
  assert len(calls) == 3


# --- data sets ------------------------------------------------------------------------------------


def settings(config):
  return {"rows": config.rows}


def build(settings, folder):
  rows = settings["rows"]
  cache.column(folder, "x", (rows,), np.int32)[:] = np.arange(rows)
  return {"splits": cache.cut(rows, 0.25, 0.25), "sha256": {"generated": "0" * 64}}


def doubled(prepared, config):
  return cache.Prepared({"x": 2 * prepared.columns["x"]}, prepared.meta)


TOYS = {
  "plain": cache.DataSet(settings, build),
  "made": cache.DataSet(settings, build, view=doubled),
}


def load(name, folder):
  config = SimpleNamespace(dataset=name, rows=4, cache_dir=str(folder))
  return cache.load(TOYS[name], config, "toys-")


def test_a_data_set_is_prepared_once_and_read_through_its_view(tmp_path):
  plain = load("plain", tmp_path)
  assert plain.columns["x"].tolist() == [0, 1, 2, 3]
  assert plain.splits == {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}
  assert (plain.sha256, plain.best) == ({"generated": "0" * 64}, {})
  assert (tmp_path / plain.name / "meta.json").exists()
  assert plain.name.startswith("toys-plain-")
  assert load("made", tmp_path).columns["x"].tolist() == [0, 2, 4, 6]


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
