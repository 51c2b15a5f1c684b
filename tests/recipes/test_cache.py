"""Prepared columns: read as they were written, built once for each settings."""

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
