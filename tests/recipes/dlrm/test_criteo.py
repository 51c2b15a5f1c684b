"""Criteo: vocabularies, splits and bags by hand, and files that are missing or damaged."""

import gzip

import numpy as np
import pytest
import recipe_runs
from cases import each
from ml_collections import ConfigDict
from small_data import write_criteo, write_criteo_days

import embed
from recipes.dlrm import data, published


def line(label="0", integers=(), categories=()):
  integers = [*integers, *[""] * (13 - len(integers))]
  categories = [*categories, *[""] * (26 - len(categories))]
  return "\t".join([label, *integers, *categories])


def config(path, cache_dir, **changes):
  values = {
    "dataset": "criteo", "data_dir": str(path.parent), "data_file": path.name,
    "cache_dir": str(cache_dir), "min_count": 2,
    "valid_fraction": 0.1, "test_fraction": 0.2, "select": "valid_auc",
  }  # fmt: skip
  return ConfigDict(values | changes)


@pytest.mark.ci
def test_a_missing_or_empty_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no train\.txt.*--config\.data_dir"):
    data.load(config(tmp_path / "train.txt", tmp_path / "cache"))
  (tmp_path / "train.txt").touch()
  with pytest.raises(ValueError, match=r"train\.txt is empty"):
    data.load(config(tmp_path / "train.txt", tmp_path / "cache"))


@pytest.mark.ci
def test_a_gzip_file_that_is_cut_off_or_another_is_named(tmp_path):
  cases = [lambda packed: packed[:-40], lambda packed: b"no" + packed]

  def check(damage):
    path = tmp_path / "train.txt.gz"
    path.write_bytes(damage(gzip.compress(write_criteo(tmp_path / "train.txt").read_bytes())))
    with pytest.raises(ValueError, match=r"train\.txt\.gz (breaks off|cannot be read)"):
      data.load(config(path, tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("meta.json"))

  each([(case,) for case in cases], check)


def test_the_kaggle_file_by_hand(tmp_path):
  values = ["a", "b", "a", "", "c", "b", "a", "d", "d", "d"]  # 7 train, 1 valid, 2 test
  path = tmp_path / "train.txt"
  rows = [
    line(str(i % 2), ["3", *["1"] * 12], [value, *["x"] * 25]) for i, value in enumerate(values)
  ]
  path.write_text("\n".join(rows) + "\n")
  unvalidated = {"valid_fraction": 0.0, "select": ""}
  loaded = data.load(config(path, tmp_path / "cache", **unvalidated))
  assert loaded.splits == {"train": (0, 8), "valid": (8, 8), "test": (8, 10)}
  assert loaded.features[0].vocabulary_size == 3  # a, b, rare or new
  assert loaded.columns["ids"][:, 0].tolist() == [0, 1, 0, -1, 2, 1, 0, 2, 2, 2]
  np.testing.assert_allclose(loaded.columns["dense"][:, 0], np.log(4), rtol=1e-6)


# --- 1 TB -----------------------------------------------------------------------------------------


def days_config(folder, cache_dir, **changes):
  settings = recipe_runs.load("dlrm.criteo_1tb", "smoke")
  settings.update_from_flattened_dict({"data_dir": str(folder), "cache_dir": str(cache_dir)})
  settings.update_from_flattened_dict(changes)
  return settings


@pytest.fixture(scope="module")
def days(tmp_path_factory):
  """23 days of 11 rows and a last one of 13."""
  return write_criteo_days(tmp_path_factory.mktemp("days"), rows=11, last=13)


def test_days_follow_one_another_and_the_last_rows_are_held_out(days, tmp_path):
  settings = days_config(days, tmp_path, valid_fraction=7 / 266, test_fraction=6 / 266)
  loaded = data.load(settings)
  assert loaded.splits == {"train": (0, 253), "valid": (253, 260), "test": (260, 266)}
  texts = [(days / f"day_{i}").read_text() for i in range(24)]
  lines = [line.split("\t") for text in texts for line in text.splitlines()]
  assert loaded.columns["label"].tolist() == [int(label) for label, *_ in lines]
  filled = [[place for place, text in enumerate(line[1:14]) if text] for line in lines]
  row, place = next((row, places[0]) for row, places in enumerate(filled) if places)
  number = float(lines[row][1 + place])
  expected = np.sign(number) * np.log1p(abs(number))
  assert loaded.columns["dense"][row, place] == pytest.approx(expected)
  ids = loaded.columns["ids"][:]
  assert ids.shape == (266, sum(settings.valencies))
  blank = [line[14] == "" for line in lines]  # of the first category, a bag of three
  assert (ids[:, :3] < 0).all(axis=1).tolist() == blank
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
  ids = np.array([[7, 2], [39_999_999, 0], [-1, 1]], np.int32)
  bags = published.Bags(ids, ((40_000_000, 3), (3, 2)))
  assert bags.shape == (3, 5)
  expected = [
    [
      i,
      *(drawn(i, 0, k, 40_000_000) for k in (1, 2)),
      j,
      drawn(j, 1, 1, 3),
    ]
    for i, j in ((7, 2), (39_999_999, 0))
  ]
  assert bags[:2].tolist() == expected
  assert bags[2:].tolist() == [[-1, -1, -1, 1, drawn(1, 1, 1, 3)]]
  assert bags[:].dtype == bags.dtype == np.int32
  assert bags[np.array([1, 1])].tolist() == [expected[1]] * 2


def test_batches_hold_bags(days, tmp_path):
  settings = days_config(days, tmp_path)
  loaded = data.load(settings)
  batch = next(iter(data.train_batches(loaded, settings)))
  assert isinstance(batch["features"]["c01"], embed.Padded)
  assert batch["features"]["c01"].values.shape == (64, 3)
  assert batch["features"]["c03"].shape == (64,)
  last = list(data.eval_batches(loaded, "test", 4))[-1]
  assert last["mask"].tolist() == [True, False, False, False]
  assert (last["features"]["c01"].values[1:] == -1).all()
  configs = data.feature_configs(loaded.features, 8)
  assert {feature.table.combiner for feature in configs.values()} == {"sum"}


@pytest.mark.ci
def test_missing_days_are_named(days, tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no day_0 and no day_0\.gz.*--config\.data_dir"):
    data.load(days_config(tmp_path, tmp_path / "cache"))
