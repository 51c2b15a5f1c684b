"""Prepared columns: read as they were written, built once, and again where a setting changes."""

import pickle

import numpy as np
import pytest

from recipes import cache


def test_columns_travel_as_a_path(tmp_path):
  for name in ("x", "ids"):
    cache.column(tmp_path, name, (30,), np.int64)[:] = np.arange(30)
  columns = cache.Columns(tmp_path)
  columns["x"]
  data = pickle.dumps(columns)
  assert len(data) < 1000
  np.testing.assert_array_equal(pickle.loads(data)["x"], columns["x"])
  with pytest.raises(KeyError, match=r"no column 'y'; it has \['ids', 'x'\]"):
    columns["y"]


def test_preparation_goes_on_after_a_kill(tmp_path, monkeypatch):
  calls = []

  def build(folder):
    calls.append(folder)
    column = cache.column(folder, "x", (4,), np.int32)
    if len(calls) == 1:
      column[:2] = 7
      column.flush()
      raise KeyboardInterrupt
    column[2:] = 8
    return {"splits": cache.cut(4, 0.25, 0.25)}

  with pytest.raises(KeyboardInterrupt):
    cache.prepared(tmp_path, "toy", {"a": 1}, build)
  columns, meta = cache.prepared(tmp_path, "toy", {"a": 1}, build)
  assert columns["x"].tolist() == [7, 7, 8, 8]
  assert meta["splits"] == {"train": [0, 2], "valid": [2, 3], "test": [3, 4]}
  cache.prepared(tmp_path, "toy", {"a": 1}, build)
  assert len(calls) == 2
  cache.prepared(tmp_path, "toy", {"a": 2}, build)
  assert len(calls) == 3
  monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
  cache.prepared(tmp_path, "toy", {"a": 2}, build)
  assert len(calls) == 4
