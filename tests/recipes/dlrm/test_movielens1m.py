"""MovieLens: both formats, RecBole's click protocol, and errors that name the file and the row."""

import zipfile

import http_server
import pytest
import recipe_runs
from cases import each
from small_data import write_movielens

from recipes import files, movielens
from recipes.dlrm import data
from recipes.tables.transforms import stored_rows


def config(data_dir, cache_dir):
  config = recipe_runs.load("dlrm.movielens1m", "")
  config.data_dir, config.cache_dir = str(data_dir), str(cache_dir)
  return config


def rows_of(loaded):
  """The rows as raw ids of user and movie, the user's gender, and whether it is a click; sorted."""
  texts = [stored_rows(loaded.serve)[0][name].texts for name in ("user", "movie", "gender")]
  rows = zip(loaded.columns["ids"][:, :3].tolist(), loaded.columns["label"].tolist(), strict=True)
  named = lambda ids: [names[id] for names, id in zip(texts, ids, strict=True)]
  return sorted((*named(ids), label) for ids, label in rows)


def test_ratings_are_clicks_with_the_features_of_users_and_movies(tmp_path):
  raw = write_movielens(tmp_path / "raw")
  loaded = data.load(config(raw, tmp_path / "cache"))
  assert [feature.name for feature in loaded.features] == [
    "user", "movie", "gender", "age", "occupation", "year", "genres"
  ]  # fmt: skip
  assert loaded.num_dense == 0
  fields = lambda name: [line.split("::") for line in (raw / name).read_text().splitlines()]
  gender = {user: gender for user, gender, *_ in fields("users.dat")}
  assert rows_of(loaded) == sorted(
    (user, movie, gender[user], int(rating > "3"))
    for user, movie, rating, _ in fields("ratings.dat")
    if rating != "3"
  )


@pytest.mark.ci
def test_dat_and_csv_are_the_same_data(tmp_path):
  dat = data.load(config(write_movielens(tmp_path / "dat"), tmp_path / "cache"))
  csv = data.load(config(write_movielens(tmp_path / "csv", csv=True), tmp_path / "cache"))
  assert rows_of(dat) == rows_of(csv)


def replace(path, line, text):
  """Replaces a line of a file, or all of it."""
  lines = path.read_text(encoding="latin-1").splitlines()
  lines[slice(None) if line is None else slice(line - 1, line)] = [text] if text else []
  path.write_text("".join(f"{line}\n" for line in lines), encoding="latin-1")


@pytest.mark.ci
def test_damage_is_named(tmp_path):
  cases = [
    ("ratings.dat", 2, "1::30::3", r"Line: 2"),
    ("ratings.dat", 2, "1::2::x::9", r"row 2, column 'rating': 'x' is no number"),
    ("users.dat", 2, "7::M", r"Line: 2"),
  ]

  def check(name, line, text, message):
    raw = write_movielens(tmp_path / name / str(line) / text.replace(":", "-"))
    replace(raw / name, line, text)
    for _ in range(2):  # it is not taken for prepared after the first time
      with pytest.raises(ValueError, match=message):
        data.load(config(raw, tmp_path / "cache"))

  each(cases, check)


@pytest.mark.ci
def test_missing_files_are_named(tmp_path):
  raw = write_movielens(tmp_path / "raw")
  (raw / "movies.dat").unlink()
  with pytest.raises(FileNotFoundError, match=r"has no movies\.dat.*ml-1m\.zip"):
    data.load(config(raw, tmp_path / "cache"))


@pytest.fixture
def archive(tmp_path, monkeypatch):
  """A small archive, laid out as the published one, and served by this machine."""
  raw, published = write_movielens(tmp_path / "raw"), tmp_path / "published"
  published.mkdir()
  with zipfile.ZipFile(published / "ml-1m.zip", "w") as packed:
    for path in raw.iterdir():
      packed.write(path, f"ml-1m/{path.name}")
  monkeypatch.setattr(movielens, "SHA256", files.digest(published / "ml-1m.zip"))
  with http_server.serving(published) as address:
    monkeypatch.setattr(movielens, "URL", f"{address}/ml-1m.zip")
    yield published / "ml-1m.zip"


@pytest.mark.ci
def test_downloads(tmp_path, archive, monkeypatch):
  rows = len(data.load(config("", tmp_path / "cache")).columns["label"])
  with monkeypatch.context() as patch:
    patch.setattr(movielens, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="does not match the known hash"):
      data.load(config("", tmp_path / "other"))
  assert not list((tmp_path / "other").rglob("*.zip*"))
  archive.unlink()  # what is there is not fetched again
  assert len(data.load(config("", tmp_path / "cache")).columns["label"]) == rows
  with pytest.raises(ValueError, match=r"--config\.data_dir"):
    data.load(config("", tmp_path / "other"))
