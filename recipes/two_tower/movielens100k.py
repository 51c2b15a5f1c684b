"""MovieLens 100K as the retrieval tutorials take it: every rating is a positive, random 80/20.

A tenth of the training rows is held out for validation. The data may be used for research and not
be redistributed (Harper and Konstan 2015, see `recipes.movielens`).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes import files
from recipes.errors import DamagedFileError
from recipes.two_tower import splits

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
  genre_names = [fields[0] for _, fields in _records(source["u.genre"], 2) if fields[0]]
  users: dict[str, int] = {}
  about: dict[str, list[str]] = {"gender": [], "age": [], "occupation": []}
  for number, (name, age, gender, occupation, _) in _records(source["u.user"], 5):
    _new(users, name, source["u.user"], number)
    # In tens: a table needs several users of an age to learn anything about it.
    about["age"].append(str(_integer(age, source["u.user"], number) // 10))
    if gender not in ("F", "M"):
      raise _error(source["u.user"], number, f"the gender is {gender!r}, expected F or M")
    if not occupation:
      raise _error(source["u.user"], number, "the occupation is empty")
    about["gender"].append(gender)
    about["occupation"].append(occupation)
  movies: dict[str, int] = {}
  year: list[str] = []
  genres: list[list[str]] = []
  for number, fields in _records(source["u.item"], 5 + len(genre_names)):
    _new(movies, fields[0], source["u.item"], number)
    date, flags = fields[2], fields[5:]
    if date and not _DATE.fullmatch(date):
      raise _error(source["u.item"], number, f"the date is {date!r}, expected one as 01-Jan-1995")
    if wrong := set(flags) - {"0", "1"}:
      raise _error(source["u.item"], number, f"a genre is {min(wrong)!r}, expected 0 or 1")
    year.append(date[-4:])
    genres.append([n for n, flag in zip(genre_names, flags, strict=True) if flag == "1"])
  user, item = _ratings(source["u.data"], users, movies)
  order = np.random.default_rng(settings["split_seed"]).permutation(len(user))
  test, valid = np.split(order, [len(user) // 5])[0], order[len(user) // 5 :][: len(user) * 2 // 25]
  train = order[len(test) + len(valid) :]
  rows = {"train": train, "valid": valid, "test": test}
  return splits.write(
    folder,
    {split: (user[picked], item[picked]) for split, picked in rows.items()},
    (len(users), len(movies)),
    {
      "user": {name: splits.codes(values) for name, values in about.items()},
      "item": {"genres": splits.bags(genres), "year": splits.codes(year)},
    },
    {name: files.digest(path) for name, path in source.items()},
    seed=settings["split_seed"],
  )


def _ratings(path: Path, users: dict[str, int], movies: dict[str, int]) -> splits.Pairs:
  user, item = [], []
  lines: dict[tuple[str, str], int] = {}
  with files.progress(f"reading {path.name}", 100_000, "row") as bar:
    for number, (name, movie, rating, time) in _records(path, 4, "\t"):
      if name not in users or movie not in movies:
        raise _error(path, number, f"user {name!r} or movie {movie!r} is in no other file")
      if rating not in ("1", "2", "3", "4", "5"):
        raise _error(path, number, f"the rating is {rating!r}, expected 1 to 5")
      _integer(time, path, number)
      line = lines.setdefault((name, movie), number)
      if line != number:
        what = f"user {name} rates movie {movie}, which line {line} does already"
        raise _error(path, number, what)
      user.append(users[name])
      item.append(movies[movie])
      bar.update()
  return np.array(user, np.int32), np.array(item, np.int32)


def _records(path: Path, count: int, separator: str = "|") -> Iterator[tuple[int, list[str]]]:
  number = 0
  with path.open(encoding="latin-1", newline="\n") as file:
    for number, line in enumerate(file, start=1):
      fields = line.rstrip("\r\n").split(separator)
      if fields == [""]:  # u.genre ends with an empty line
        continue
      if len(fields) != count:
        raise _error(
          path, number, f"found {len(fields)} fields separated by {separator!r}, expected {count}"
        )
      yield number, fields
  if number == 0:
    raise _error(path, 1, "the file is empty")


def _new(key: dict[str, int], name: str, path: Path, number: int) -> None:
  _integer(name, path, number)
  if name in key:
    raise _error(path, number, f"{name!r} appears a second time")
  key[name] = len(key)


def _integer(text: str, path: Path, number: int) -> int:
  value = files.whole(text)
  if value is None:
    raise _error(path, number, f"{text!r} is not a number from 0 to 2**63 - 1")
  return value


def _error(path: Path, number: int, what: str) -> DamagedFileError:
  return DamagedFileError(
    f"{path}, line {number}: {what}. Is the file complete? Unpack the archive again, or repair the "
    "line."
  )
