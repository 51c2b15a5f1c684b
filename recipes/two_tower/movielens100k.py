"""MovieLens 100K as the retrieval tutorials take it: every rating is a positive, random 80/20.

A tenth of the training rows is held out for validation. The data may be used for research and not
be redistributed (Harper and Konstan 2015, see `recipes.movielens`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import categories, files
from ..textfile import TextFile
from . import splits

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
SHA256 = "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"
_DATE = re.compile(r"\d{1,2}-[A-Z][a-z]{2}-\d{4}")
_MEMBERS = ("u.data", "u.user", "u.item", "u.genre")


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  where = files.folder(
    config.data_dir, config.cache_dir, name="ml-100k-raw", url=URL, sha256=SHA256, members=_MEMBERS
  )
  hint = f"They are in {URL}; leave --config.data_dir empty to have it downloaded."
  return {
    "format": 1,
    "files": {name: files.stamp(files.require(where, name, hint=hint)) for name in _MEMBERS},
    "split_seed": config.split_seed,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; users have gender, age and occupation, items genres and year."""
  source = {name: Path(stamp[0]) for name, stamp in settings["files"].items()}
  genre_file = TextFile(source["u.genre"])
  # u.genre ends with an empty line.
  genre_names = [name for _, (name, _) in genre_file.records("|", 2, skip_empty=True) if name]
  users, about = _users(TextFile(source["u.user"]))
  movies, year, genres = _movies(TextFile(source["u.item"]), genre_names)
  user, item = _ratings(TextFile(source["u.data"]), users, movies)
  order = np.random.default_rng(settings["split_seed"]).permutation(len(user))
  test, valid = np.split(order, [len(user) // 5])[0], order[len(user) // 5 :][: len(user) * 2 // 25]
  train = order[len(test) + len(valid) :]
  rows = {"train": train, "valid": valid, "test": test}
  return splits.write(
    folder,
    {split: (user[picked], item[picked]) for split, picked in rows.items()},
    (len(users), len(movies)),
    {
      "user": {name: categories.codes(values) for name, values in about.items()},
      "item": {"genres": categories.bags(genres), "year": categories.codes(year)},
    },
    {name: files.digest(path) for name, path in source.items()},
    seed=settings["split_seed"],
  )


def _users(file: TextFile) -> tuple[dict[str, int], dict[str, list[str]]]:
  """Returns the rows of the users by their numbers, and their features as texts."""
  users: dict[str, int] = {}
  about: dict[str, list[str]] = {"gender": [], "age": [], "occupation": []}
  for line, (user, age, gender, occupation, _) in file.records("|", 5):
    file.add_id(line, users, user)
    # In tens: a table needs several users of an age to learn anything about it.
    about["age"].append(str(file.number(line, "age", age) // 10))
    if gender not in ("F", "M"):
      raise file.error(line, f"the gender is {gender!r}, expected F or M")
    if not occupation:
      raise file.error(line, "the occupation is empty")
    about["gender"].append(gender)
    about["occupation"].append(occupation)
  return users, about


def _movies(
  file: TextFile, genre_names: Sequence[str]
) -> tuple[dict[str, int], list[str], list[list[str]]]:
  """Returns the rows of the movies by their numbers, their years and their genres."""
  movies: dict[str, int] = {}
  years, genres = [], []
  for line, fields in file.records("|", 5 + len(genre_names)):
    file.add_id(line, movies, fields[0])
    date, flags = fields[2], fields[5:]
    if date and not _DATE.fullmatch(date):
      raise file.error(line, f"the date is {date!r}, expected one as 01-Jan-1995")
    if wrong := set(flags) - {"0", "1"}:
      raise file.error(line, f"a genre is {min(wrong)!r}, expected 0 or 1")
    years.append(date[-4:])
    genres.append([name for name, flag in zip(genre_names, flags, strict=True) if flag == "1"])
  return movies, years, genres


def _ratings(file: TextFile, users: dict[str, int], movies: dict[str, int]) -> splits.Pairs:
  rows, items = [], []
  lines: dict[tuple[str, str], int] = {}
  with files.progress(f"reading {file.path.name}", 100_000, "row") as bar:
    for line, (user, movie, rating, time) in file.records("\t", 4):
      if user not in users or movie not in movies:
        raise file.error(line, f"user {user!r} or movie {movie!r} is in no other file")
      if rating not in ("1", "2", "3", "4", "5"):
        raise file.error(line, f"the rating is {rating!r}, expected 1 to 5")
      file.number(line, "time", time)
      first = lines.setdefault((user, movie), line)
      if first != line:
        raise file.error(line, f"user {user} rates movie {movie}, which line {first} does already")
      rows.append(users[user])
      items.append(movies[movie])
      bar.update()
  return np.array(rows, np.int32), np.array(items, np.int32)
