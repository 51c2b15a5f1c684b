"""Criteo: both vocabularies by hand, and files that are missing or damaged."""

import gzip

import numpy as np
import pytest
from cases import each
from ml_collections import ConfigDict
from small_data import write_criteo

from recipes.dlrm import data


def line(label="0", integers=(), categories=()):
  integers = [*integers, *[""] * (13 - len(integers))]
  categories = [*categories, *[""] * (26 - len(categories))]
  return "\t".join([label, *integers, *categories])


def config(path, cache_dir, **changes):
  values = {
    "dataset": "criteo", "data_dir": str(path.parent), "data_file": path.name,
    "cache_dir": str(cache_dir), "vocabulary": "hash", "hash_size": 50, "min_count": 2,
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
  loaded = data.load(config(path, tmp_path / "cache", vocabulary="min_count", **unvalidated))
  assert loaded.splits == {"train": (0, 8), "valid": (8, 8), "test": (8, 10)}
  assert loaded.features[0].vocabulary_size == 3  # a, b, rare or new
  assert loaded.columns["ids"][:, 0].tolist() == [0, 1, 0, -1, 2, 1, 0, 2, 2, 2]
  np.testing.assert_allclose(loaded.columns["dense"][:, 0], np.log(4), rtol=1e-6)
  hashed = data.load(config(path, tmp_path / "cache", **unvalidated))
  assert hashed.features[0].vocabulary_size == 50
  assert hashed.columns["ids"][3, 0] == -1


@pytest.mark.ci
def test_settings_are_checked(tmp_path):
  path = write_criteo(tmp_path / "train.txt", rows=10)
  with pytest.raises(ValueError, match="choose hash or min_count"):
    data.load(config(path, tmp_path / "cache", vocabulary="count"))
