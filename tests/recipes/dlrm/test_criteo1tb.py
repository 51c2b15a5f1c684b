"""Criteo 1 TB: splits and ids by hand, bags that are functions of their id, restarts, .gz files."""

import pickle

import numpy as np
import pytest
import recipe_runs
from small_data import write_criteo_days

import embed
from recipes.dlrm import criteo1tb, data
from recipes.tables import source


def config(folder, cache_dir, **changes):
  settings = recipe_runs.load("dlrm.criteo_1tb", "smoke")
  settings.update_from_flattened_dict({"data_dir": str(folder), "cache_dir": str(cache_dir)})
  settings.update_from_flattened_dict(changes)
  return settings


@pytest.fixture(scope="module")
def days(tmp_path_factory):
  """23 days of 11 rows and a last one of 13."""
  return write_criteo_days(tmp_path_factory.mktemp("days"), rows=11, last=13)


def test_days_follow_one_another_and_the_last_is_halved(days, tmp_path):
  settings = config(days, tmp_path)
  loaded = data.load(settings)
  assert loaded.splits == {"train": (0, 253), "valid": (253, 260), "test": (260, 266)}
  stage = source.connect()
  blocks = [block for i in range(24) for block in criteo1tb.read(days / f"day_{i}", stage)]
  np.testing.assert_array_equal(loaded.columns["label"], np.concatenate([b.label for b in blocks]))
  integers = np.concatenate([b.integers for b in blocks])
  logs = np.nan_to_num(np.sign(integers) * np.log1p(np.abs(integers)))
  np.testing.assert_array_equal(loaded.columns["dense"], logs)
  categories = np.concatenate([b.categories for b in blocks])
  first = np.cumsum([0, *settings.valencies[:-1]])  # a bag's first id is the published one
  expected = np.where(categories < 0, 0, categories % np.array(settings.vocabulary_sizes))
  np.testing.assert_array_equal(loaded.columns["ids"][:][:, first], expected)
  assert sorted(loaded.sha256) == sorted(f"day_{i}" for i in range(24))


def test_bags_by_hand():
  # Computed with Python's integers, from the definition in the docstring.
  mask = (1 << 64) - 1

  def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)

  drawn = lambda id, feature, k, size: (
    (splitmix64(id + (feature << 32) + (k << 40)) >> 32) * size >> 32
  )
  bags = criteo1tb.Bags(np.array([[7, 2], [39_999_999, 0]], np.int32), (40_000_000, 3), (3, 2))
  assert bags.shape == (2, 5)
  expected = [
    [
      i,
      *(drawn(i, 0, k, 40_000_000) for k in (1, 2)),
      j,
      drawn(j, 1, 1, 3),
    ]
    for i, j in ((7, 2), (39_999_999, 0))
  ]
  assert bags[:].tolist() == expected
  assert bags[:].dtype == bags.dtype == np.int32
  assert bags[np.array([1, 1])].tolist() == [expected[1]] * 2


def test_batches_hold_bags_and_pickle_without_the_data(days, tmp_path):
  settings = config(days, tmp_path)
  loaded = data.load(settings)
  batch = next(iter(data.train_batches(loaded, settings)))
  assert isinstance(batch["features"]["c01"], embed.Padded)
  assert batch["features"]["c01"].values.shape == (64, 3)
  assert batch["features"]["c03"].shape == (64,)
  last = list(data.eval_batches(loaded, "test", 4))[-1]
  assert last["mask"].tolist() == [True, True, False, False]
  assert (last["features"]["c01"].values[2:] == -1).all()
  assert len(pickle.dumps(loaded.columns)) < 2_000
  configs = data.feature_configs(loaded.features, 8)
  assert {feature.table.combiner for feature in configs.values()} == {"sum"}


@pytest.mark.ci
def test_damage_and_missing_days_are_named(days, tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no day_0 and no day_0\.gz.*--config\.data_dir"):
    data.load(config(tmp_path, tmp_path / "cache"))
  broken = tmp_path / "broken"
  broken.mkdir()
  for i in range(24):
    (broken / f"day_{i}").write_bytes((days / f"day_{i}").read_bytes())
  lines = (broken / "day_3").read_text().splitlines()
  (broken / "day_3").write_text("\n".join([*lines[:4], "1\t2", *lines[5:]]) + "\n")
  with pytest.raises(ValueError, match="day_3, line 5 has too few fields for 40"):
    data.load(config(broken, tmp_path / "cache"))
  (broken / "day_3").write_text("\n\n".join(lines) + "\n")
  with pytest.raises(ValueError, match="day_3 has empty lines, or has changed"):
    data.load(config(broken, tmp_path / "cache"))
