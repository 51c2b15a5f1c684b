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
  user, movie = np.divmod(draw.permutation(users * movies)[:ratings], movies)
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


def write_sequences(path: Path, sequences: dict[int, list[int]], layout: str) -> Path:
  """Writes `user item item ...` a line ("lines"), or `user item` a line ("pairs")."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if layout == "lines":
    lines = [" ".join(map(str, [user, *items])) for user, items in sequences.items()]
  else:
    lines = [f"{user} {item}" for user, items in sequences.items() for item in items]
  path.write_text("\n".join(lines) + "\n")
  return path


def draw_sequences(*, users=120, items=60) -> dict[int, list[int]]:
  """Returns sequences in which an item is mostly followed by the next one."""
  draw = np.random.default_rng(5)
  found = {}
  for user in range(1, users + 1):
    steps = draw.choice([1, 1, 1, 7], draw.integers(4, 15)).cumsum()
    found[user] = (1 + (draw.integers(items) + steps) % items).tolist()
  return found


def write_movielens100k(folder: Path, *, users=50, movies=120, ratings=1_000) -> Path:
  """Writes u.data, u.user and u.item (latin-1)."""
  folder.mkdir(parents=True, exist_ok=True)
  draw = np.random.default_rng(5)
  files = {
    "u.user": [
      f"{i + 1}|{20 + i % 30}|{'MF'[i % 2]}|{('writer', 'other')[i % 2]}|85{i:03d}"
      for i in range(users)
    ],
    "u.item": [
      f"{i + 1}|Amélie ({1990 + i % 9})|01-Jan-{1990 + i % 9}||http://x/{i}|"
      + "|".join(str(int((i + j) % 3 == 0)) for j in range(19))
      for i in range(movies)
    ],
  }
  pairs = draw.permutation(users * movies)[:ratings]
  files["u.data"] = [
    f"{pair // movies + 1}\t{pair % movies + 1}\t{1 + pair % 5}\t{881_250_000 + i}"
    for i, pair in enumerate(pairs)
  ]
  for name, lines in files.items():
    (folder / name).write_text("\n".join(lines) + "\n", encoding="latin-1")
  return folder


def write_gowalla(folder: Path, *, users=80, items=60, valid=True) -> Path:
  """Writes train.txt, test.txt and valid.txt: a user a line, more items of the user's own third."""
  folder.mkdir(parents=True, exist_ok=True)
  draw = np.random.default_rng(6)
  lines: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
  for user in range(users):
    weights = np.where(np.arange(items) % 3 == user % 3, 5.0, 1.0)
    chosen = draw.choice(items, 20, replace=False, p=weights / weights.sum())
    for name, part in zip(lines, np.split(chosen, [14, 16]), strict=True):
      lines[name].append(" ".join(map(str, [user, *part])))
  for name, written in lines.items():
    if valid or name != "valid":
      (folder / f"{name}.txt").write_text("\n".join(written) + "\n")
  return folder
