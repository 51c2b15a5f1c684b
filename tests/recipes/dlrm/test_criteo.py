"""Criteo: fields by hand, both vocabularies, blocks, restarts, and errors that name the line."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from small_data import write_criteo

from recipes.dlrm import criteo, data


def line(label="0", integers=(), categories=()):
  integers = [*integers, *[""] * (13 - len(integers))]
  categories = [*categories, *[""] * (26 - len(categories))]
  return "\t".join([label, *integers, *categories])


def config(path, cache_dir, **changes):
  values = {
    "dataset": "criteo", "data_dir": str(path.parent), "data_file": path.name,
    "cache_dir": str(cache_dir), "vocabulary": "hash", "hash_size": 50, "min_count": 2,
    "valid_fraction": 0.1, "test_fraction": 0.2,
  }  # fmt: skip
  return SimpleNamespace(**values | changes)


def test_fields_by_hand(tmp_path):
  path = tmp_path / "train.txt"
  rows = [line("1", ["3", "-2", ""], ["0000000a", "", "ffffffff"]), line("0", ["0", "", "7"])]
  path.write_text("\n".join(rows) + "\n")
  (block,) = criteo.read(path)
  assert block.label.tolist() == [1, 0]
  np.testing.assert_array_equal(block.integers[:, :3], [[3, -2, np.nan], [0, np.nan, 7]])
  assert block.categories[:, :3].tolist() == [[10, -1, 0xFFFFFFFF], [-1, -1, -1]]
  np.testing.assert_allclose(
    criteo.squash(block.integers)[:, :3],
    [[np.log(4), -np.log(3), 0], [0, 0, np.log(8)]],
    rtol=1e-6,
  )
  path.write_text("\n".join(rows))
  assert [block.label.tolist() for block in criteo.read(path)] == [[1], [0]]
  assert criteo.count_rows(path) == 2


def test_blocks_do_not_change_what_is_read(tmp_path):
  path = write_criteo(tmp_path / "train.txt", rows=200)
  (whole,) = criteo.read(path)
  parts = list(criteo.read(path, block=1000))
  assert len(parts) > 10
  for name in ("label", "integers", "categories"):
    joined = np.concatenate([getattr(part, name) for part in parts])
    np.testing.assert_array_equal(joined, getattr(whole, name))
  assert parts[-1].end == whole.end == path.stat().st_size
  lines = path.read_text().splitlines()
  for row in (0, 77, 199):
    fields = lines[row].split("\t")
    assert whole.label[row] == int(fields[0])
    expected = [float(x) if x else np.nan for x in fields[1:14]]
    np.testing.assert_array_equal(whole.integers[row], expected)
    assert whole.categories[row].tolist() == [int(x, 16) if x else -1 for x in fields[14:]]


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    (line()[:-3], r"line 3: found 37 fields .*\(40\)"),
    ("", "line 3: found 1 fields"),
    (line("2"), "line 3: the label is not 0 or 1"),
    (line(""), "line 3: the label is not 0 or 1"),
    (line("0", ["1", "x2"]), "line 3: integer 2 is 'x2', expected an integer"),
    (line("0", ["-"]), "line 3: integer 1 is '-'"),
    (line("0", ["1.5"]), "line 3: integer 1 is '1.5'"),
    (line("0", [], ["", "0000000g"]), "line 3: category 2 is '0000000g', expected up to 8 hex"),
    (line("0", [], ["123456789"]), "line 3: category 1 is '123456789'"),
  ],
)
def test_damage_is_named(tmp_path, bad, message):
  path = tmp_path / "train.txt"
  path.write_text("\n".join([line(), line("1"), bad, line()]) + "\n")
  for block in (1 << 24, 100):
    with pytest.raises(ValueError, match=f"train.txt, {message}"):
      list(criteo.read(path, block=block))


def test_a_missing_or_empty_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no train\.txt.*--config\.data_dir"):
    data.load(config(tmp_path / "train.txt", tmp_path / "cache"))
  (tmp_path / "train.txt").touch()
  with pytest.raises(ValueError, match=r"train\.txt is empty"):
    data.load(config(tmp_path / "train.txt", tmp_path / "cache"))


def test_an_empty_data_dir_is_named(tmp_path):
  settings = config(tmp_path / "train.txt", tmp_path / "cache", data_dir="")
  with pytest.raises(FileNotFoundError, match=r"--config\.data_dir is empty\. .*Kaggle's page"):
    data.load(settings)


@pytest.mark.parametrize("damage", [lambda packed: packed[:-40], lambda packed: b"no" + packed])
def test_a_gzip_file_that_is_cut_off_or_another_is_named(tmp_path, damage):
  path = tmp_path / "train.txt.gz"
  path.write_bytes(damage(gzip.compress(write_criteo(tmp_path / "train.txt").read_bytes())))
  with pytest.raises(ValueError, match=r"train\.txt\.gz is damaged or cut off .* Get the file"):
    data.load(config(path, tmp_path / "cache"))
  assert not list((tmp_path / "cache").rglob("meta.json"))


def test_the_hash_is_the_same_everywhere():
  categories = np.full((1, 26), 0x68FD1E64)
  categories[0, 1] = -1
  ids = criteo.HashVocabulary(1000).ids(categories)
  assert ids[0, 1] == 0
  assert len(set(ids[0])) > 20  # each feature hashes on its own
  # Computed with Python's integers, from the published constants.
  mask = (1 << 64) - 1

  def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)

  expected = [1 + splitmix64(0x68FD1E64 ^ (i << 32)) % 999 for i in range(26)]
  expected[1] = 0
  assert ids[0].tolist() == expected
  with pytest.raises(ValueError, match="hash_size must be at least 2"):
    criteo.HashVocabulary(1)


def test_counts_come_from_the_training_rows_only(tmp_path):
  values = ["a", "b", "a", "", "c", "b", "a", "d", "d", "d"]  # 7 train, 1 valid, 2 test
  path = tmp_path / "train.txt"
  path.write_text("\n".join(line(categories=[value]) for value in values) + "\n")
  loaded = data.load(config(path, tmp_path / "cache", vocabulary="min_count"))
  assert loaded.splits == {"train": (0, 7), "valid": (7, 8), "test": (8, 10)}
  assert loaded.features[0].vocabulary_size == 4  # blank, rare or new, a, b
  assert loaded.features[1].vocabulary_size == 2
  assert loaded.columns["ids"][:, 0].tolist() == [2, 3, 2, 0, 1, 3, 2, 1, 1, 1]
  assert (loaded.columns["ids"][:, 1:] == 0).all()


def test_counting_in_blocks_equals_counting_at_once(tmp_path, monkeypatch):
  path = write_criteo(tmp_path / "train.txt", rows=300)
  (block,) = criteo.read(path)
  real = criteo.read
  monkeypatch.setattr(criteo, "read", lambda path: real(path, block=2000))
  for i, known in enumerate(criteo.count_values(path, 200, 3)):
    values, counts = np.unique(block.categories[:200, i], return_counts=True)
    np.testing.assert_array_equal(known, values[(counts >= 3) & (values >= 0)])


@pytest.mark.parametrize("vocabulary", ["hash", "min_count"])
def test_preparation_goes_on_after_a_kill(tmp_path, monkeypatch, vocabulary):
  path = write_criteo(tmp_path / "train.txt", rows=300)
  whole = data.load(config(path, tmp_path / "whole", vocabulary=vocabulary))
  real, reads = criteo.read, []

  def killed(path, offset=0, line=0):
    reads.append(line)
    for i, block in enumerate(real(path, offset, line, block=5000)):
      yield block
      if i == 3:
        raise KeyboardInterrupt

  # Counting, where there is any, ends before; the writing pass is cut off.
  monkeypatch.setattr(criteo, "count_values", lambda *a, f=criteo.count_values: with_real(f, a))

  def with_real(count, arguments):
    with monkeypatch.context() as patch:
      patch.setattr(criteo, "read", real)
      return count(*arguments)

  monkeypatch.setattr(criteo, "read", killed)
  again = config(path, tmp_path / "again", vocabulary=vocabulary)
  with pytest.raises(KeyboardInterrupt):
    data.load(again)
  (position,) = (tmp_path / "again").glob("*.partial/position.json")
  done = json.loads(position.read_text())["rows"]
  assert 0 < done < 300
  with pytest.raises(KeyboardInterrupt):
    data.load(again)
  assert reads == [0, done]
  monkeypatch.setattr(criteo, "read", real)
  resumed = data.load(again)
  for name in ("label", "dense", "ids"):
    np.testing.assert_array_equal(resumed.columns[name], whole.columns[name])


def test_settings_are_checked(tmp_path):
  path = write_criteo(tmp_path / "train.txt", rows=10)
  with pytest.raises(ValueError, match="choose hash or min_count"):
    data.load(config(path, tmp_path / "cache", vocabulary="count"))
