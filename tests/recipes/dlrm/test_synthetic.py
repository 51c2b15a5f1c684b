"""The teacher's clicks: what is known about them holds, and chunks do not show."""

from types import SimpleNamespace

import numpy as np
import pytest

from recipes.dlrm import data


def config(cache_dir, **changes):
  values = {
    "dataset": "synthetic", "cache_dir": str(cache_dir), "rows": 4_000, "data_seed": 0
  }  # fmt: skip
  return SimpleNamespace(**values | changes)


def test_columns_are_what_the_features_say(tmp_path):
  loaded = data.load(config(tmp_path))
  ids, start = loaded.columns["ids"], 0
  for feature in loaded.features:
    block = ids[:, start : start + feature.valency]
    assert block.max() < feature.vocabulary_size
    assert block.min() >= (0 if feature.valency == 1 else -1)
    start += feature.valency
  assert start == ids.shape[1]
  assert loaded.features[-1].valency > 1  # a bag, with empty ones among them
  assert (ids[:, -loaded.features[-1].valency :] == -1).all(axis=1).any()
  assert 0.1 < loaded.columns["label"].mean() < 0.5


@pytest.mark.ci
def test_ids_follow_a_power_law(tmp_path):
  loaded = data.load(config(tmp_path))
  counts = np.bincount(loaded.columns["ids"][:, 0], minlength=loaded.features[0].vocabulary_size)
  known = np.arange(1.0, len(counts) + 1) ** -1.05
  top = np.sort(counts)[::-1][:20]  # the ids are numbered in another order
  expected = len(loaded.columns["label"]) * (known / known.sum())[:20]
  assert np.abs(top - expected).max() < 5 * np.sqrt(expected.max())


def test_same_seed_same_data(tmp_path):
  one, two = data.load(config(tmp_path / "a")), data.load(config(tmp_path / "b"))
  other = data.load(config(tmp_path / "a", data_seed=1))
  for name in ("ids", "dense", "label"):
    np.testing.assert_array_equal(one.columns[name], two.columns[name])
  assert one.sha256 == two.sha256 != other.sha256
