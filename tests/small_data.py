"""Tiny data sets in the published formats, made by hand or drawn; never the real ones."""

from pathlib import Path

import numpy as np

GENRES = ("Action", "Children's", "Drama", "Sci-Fi")


def write_movielens(folder: Path, *, users=60, movies=40, ratings=2_000, csv=False) -> Path:
  """Writes users.dat, movies.dat (latin-1) and the ratings; every rating depends on its movie."""
  folder.mkdir(parents=True, exist_ok=True)
  draw = np.random.default_rng(7)
  user_lines = [
    f"{10 * i + 1}::{'FM'[i % 2]}::{(1, 18, 25)[i % 3]}::{i % 5}::0{i:04d}" for i in range(users)
  ]
  movie_lines = [
    f"{3 * i + 2}::Amélie, Part {i} ({1960 + i % 40})::{'|'.join(GENRES[: 1 + i % 4])}"
    for i in range(movies)
  ]
  (folder / "users.dat").write_text("\n".join(user_lines) + "\n", encoding="latin-1")
  (folder / "movies.dat").write_text("\n".join(movie_lines) + "\n", encoding="latin-1")
  user, movie = draw.integers(0, users, ratings), draw.integers(0, movies, ratings)
  rating = np.clip(1 + movie % 5 + draw.integers(-1, 2, ratings), 1, 5)
  rows = zip(10 * user + 1, 3 * movie + 2, rating, strict=True)
  if csv:
    lines = ["user,movie,rating", *(f"{u},{m},{r}" for u, m, r in rows)]
    (folder / "ratings_no_timestamp.csv").write_text("\n".join(lines) + "\n")
  else:
    lines = [f"{u}::{m}::{r}::{978300000 + i}" for i, (u, m, r) in enumerate(rows)]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n", encoding="latin-1")
  return folder


def write_criteo(path: Path, *, rows=1_000, seed=11) -> Path:
  """Writes rows of a label, 13 integers and 26 categories; a tenth of the fields is blank."""
  path.parent.mkdir(parents=True, exist_ok=True)
  draw = np.random.default_rng(seed)
  integers = draw.geometric(0.05, (rows, 13)) - 3
  categories = draw.geometric(0.2, (rows, 26)) * 0x01234567 % 0xFFFFFFFF
  blank = draw.random((rows, 39)) < 0.1
  label = (draw.random(rows) < 1 / (1 + np.exp(1.5 - 0.1 * integers[:, 0]))).astype(int)
  with path.open("w") as file:
    for i in range(rows):
      fields = [str(x) for x in integers[i]] + [f"{x:08x}" for x in categories[i]]
      shown = ["" if empty else field for field, empty in zip(fields, blank[i], strict=True)]
      file.write("\t".join([str(label[i]), *shown]) + "\n")
  return path


def write_criteo_days(folder: Path, *, rows=40, last=400) -> Path:
  """Writes day_0 to day_23, of `rows` rows each, the last one of `last`."""
  for day in range(24):
    write_criteo(folder / f"day_{day}", rows=last if day == 23 else rows, seed=day)
  return folder
