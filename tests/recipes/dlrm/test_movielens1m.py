"""MovieLens: both formats, RecBole's click protocol, and errors that name the file and the line."""

import hashlib
import zipfile
from types import SimpleNamespace

import http_server
import numpy as np
import pytest
from small_data import write_movielens

from recipes import files, movielens
from recipes.dlrm import data


def config(data_dir, cache_dir):
  return SimpleNamespace(
    dataset="movielens1m", data_dir=str(data_dir), cache_dir=str(cache_dir), split_seed=0
  )


def write_by_hand(folder, ratings="1::20::5::9\n1::30::3::9\n7::20::1::9\n7::30::4::9\n"):
  folder.mkdir(exist_ok=True)
  (folder / "users.dat").write_text("1::F::1::10::48067\n7::M::56::16::70072\n")
  (folder / "movies.dat").write_text(
    "20::Été (1995)::Drama|Comedy\n30::Untitled::Comedy\n", encoding="latin-1"
  )
  (folder / "ratings.dat").write_text(ratings)
  return folder


def test_protocol_by_hand(tmp_path):
  loaded = data.load(config(write_by_hand(tmp_path / "raw"), tmp_path / "cache"))
  sizes = {feature.name: feature.vocabulary_size for feature in loaded.features}
  assert sizes == {
    "user": 2, "gender": 2, "age": 2, "occupation": 2, "movie": 2, "year": 2, "genres": 2
  }  # fmt: skip
  # user, gender, age, occupation, movie, year ("" sorts before "1995"), genres: Comedy 0, Drama 1
  expected = {
    (0, 0, 0, 0, 0, 1, 1, 0): 1,
    (1, 1, 1, 1, 0, 1, 1, 0): 0,
    (1, 1, 1, 1, 1, 0, 0, -1): 1,
  }  # the rating of 3 is gone
  rows = map(tuple, loaded.columns["ids"].tolist())
  assert dict(zip(rows, loaded.columns["label"].tolist(), strict=True)) == expected
  assert loaded.num_dense == 0
  name = tmp_path / "raw" / "ratings.dat"
  assert loaded.sha256["ratings.dat"] == hashlib.sha256(name.read_bytes()).hexdigest()


def test_dat_and_csv_are_the_same_data(tmp_path):
  dat = data.load(config(write_movielens(tmp_path / "dat"), tmp_path / "cache"))
  csv = data.load(config(write_movielens(tmp_path / "csv", csv=True), tmp_path / "cache"))
  for name in ("ids", "label"):
    np.testing.assert_array_equal(dat.columns[name], csv.columns[name])
  assert dat.splits == csv.splits
  rows = len(dat.columns["label"])
  assert [stop - start for start, stop in dat.splits.values()] == [
    rows - 2 * round(rows / 10), round(rows / 10), round(rows / 10)
  ]  # fmt: skip


def test_a_changed_file_is_prepared_again(tmp_path):
  raw = write_by_hand(tmp_path / "raw")
  before = data.load(config(raw, tmp_path / "cache"))
  write_by_hand(raw, ratings="1::20::5::9\n")
  after = data.load(config(raw, tmp_path / "cache"))
  assert len(before.columns["label"]) == 3
  assert len(after.columns["label"]) == 1


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("ratings.dat", "1::20::5::9\n1::30::3", "ratings.dat, line 2: found 3 fields .* expected 4"),
    ("ratings.dat", "1::20::9::9\n", "ratings.dat, line 1: the rating is '9', expected 1 to 5"),
    ("ratings.dat", "1::20::5::9\n2::20::5::9\n", "line 2: user '2' is not in users.dat"),
    ("ratings.dat", "1::21::5::9\n", "line 1: movie '21' is not in movies.dat"),
    ("users.dat", "1::F::1::10::4\n7::M\n", "users.dat, line 2: found 2 fields"),
    ("users.dat", "1::F::1::10::4\n1::F::1::10::4\n", "line 2: '1' appears a second time"),
    ("movies.dat", "20::Heat (1995)\n", "movies.dat, line 1: found 2 fields"),
    ("ratings.dat", "", "ratings.dat, line 1: the file is empty"),
    ("users.dat", "", "users.dat, line 1: the file is empty"),
    ("movies.dat", "", "movies.dat, line 1: the file is empty"),
    (
      "ratings.dat",
      "1::20::5::9\n1::30::5::9\n1::20::4::9\n",
      "line 3: user 1 rates movie 20, which line 1 does already",
    ),
    ("ratings.dat", "1::20::5::never\n", "line 1: the time is 'never', expected a whole number"),
    ("ratings.dat", f"1::20::5::{2**63}\n", "line 1: the time is '9223372036854775808'"),
    ("users.dat", "::F::1::10::4\n", "users.dat, line 1: the id is '', expected a whole number"),
    ("users.dat", "1::F::old::10::4\n", "users.dat, line 1: the age is 'old'"),
    ("users.dat", "1::::1::10::4\n", "users.dat, line 1: the gender is ''"),
  ],
)
def test_damage_is_named(tmp_path, name, content, message):
  raw = write_by_hand(tmp_path / "raw")
  (raw / name).write_text(content)
  for _ in range(2):  # it is not taken for prepared after the first time
    with pytest.raises(ValueError, match=message):
      data.load(config(raw, tmp_path / "cache"))


def test_missing_files_are_named(tmp_path):
  raw = write_by_hand(tmp_path / "raw")
  (raw / "movies.dat").unlink()
  with pytest.raises(FileNotFoundError, match=r"has no movies\.dat.*ml-1m\.zip"):
    data.load(config(raw, tmp_path / "cache"))
  with pytest.raises(FileNotFoundError, match="is not a folder"):
    data.load(config(tmp_path / "nowhere", tmp_path / "cache"))


@pytest.fixture
def archive(tmp_path, monkeypatch):
  """A small archive, laid out as the published one, and served by this machine."""
  raw, published = write_by_hand(tmp_path / "raw"), tmp_path / "published"
  published.mkdir()
  with zipfile.ZipFile(published / "ml-1m.zip", "w") as packed:
    for path in raw.iterdir():
      packed.write(path, f"ml-1m/{path.name}")
  monkeypatch.setattr(movielens, "SHA256", files.digest(published / "ml-1m.zip"))
  with http_server.serving(published) as address:
    monkeypatch.setattr(movielens, "URL", f"{address}/ml-1m.zip")
    yield published / "ml-1m.zip"


def test_a_csv_of_nothing_but_its_head_is_refused(tmp_path):
  raw = write_movielens(tmp_path / "csv", csv=True)
  (raw / "ratings_no_timestamp.csv").write_text("user,movie,rating\n")
  with pytest.raises(ValueError, match="there is no rating"):
    data.load(config(raw, tmp_path / "cache"))


def test_download(tmp_path, archive):
  assert len(data.load(config("", tmp_path / "cache")).columns["label"]) == 3
  archive.unlink()  # what is there is not fetched again
  assert len(data.load(config("", tmp_path / "cache")).columns["label"]) == 3


@pytest.mark.usefixtures("archive")
def test_a_download_with_another_hash_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(movielens, "SHA256", "0" * 64)
  with pytest.raises(ValueError, match="the download is damaged or the archive has changed"):
    data.load(config("", tmp_path / "cache"))
  assert not list((tmp_path / "cache").rglob("*.zip*"))


def test_no_network_says_what_to_do(tmp_path, archive):
  archive.unlink()
  with pytest.raises(OSError, match=r"--config\.data_dir"):
    data.load(config("", tmp_path / "cache"))


def test_unknown_dataset(tmp_path):
  with pytest.raises(ValueError, match=r"choose one of .*criteo.*movielens1m.*synthetic"):
    data.load(SimpleNamespace(dataset="movielens"))
