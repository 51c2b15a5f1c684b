"""MovieLens 1M: the three files, read strictly, or fetched from the publisher.

F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM
TiiS 5, 4: 19. The data may be used for research and not be redistributed.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipes import files
from recipes.errors import DamagedFileError

URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
SHA256 = "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
RATINGS = ("ratings.dat", "ratings_no_timestamp.csv")
_YEAR = re.compile(r"\((\d{4})\)\s*$")


class Ratings(NamedTuple):
  """One entry per rating, in the file's order; `user` and `movie` are positions in their files."""

  user: np.ndarray
  movie: np.ndarray
  rating: np.ndarray


class Users(NamedTuple):
  """One entry per line of users.dat; `gender`, `age` and `occupation` are the published texts."""

  key: dict[str, int]
  gender: list[str]
  age: list[str]
  occupation: list[str]


class Movies(NamedTuple):
  """One entry per line of movies.dat; `year` is "" where the title carries none."""

  key: dict[str, int]
  year: list[str]
  genres: list[list[str]]


def folder(data_dir: str, cache_dir: str) -> Path:
  """Returns the folder with the files: the user's, or a download whose hash is checked.

  Raises:
    FileNotFoundError: `data_dir` is given and does not exist.
  """
  members = ("ratings.dat", "users.dat", "movies.dat")
  return files.folder(
    data_dir, cache_dir, name="ml-1m-raw", url=URL, sha256=SHA256, members=members
  )


def sources(path: Path) -> dict[str, Path]:
  """Returns the files in the folder by role: `ratings`, `users`, `movies`.

  Raises:
    FileNotFoundError: names the file that is missing.
  """
  hint = f"They are in {URL}; leave --config.data_dir empty to have it downloaded."
  return {
    "ratings": files.require(path, *RATINGS, hint=hint),
    "users": files.require(path, "users.dat", hint=hint),
    "movies": files.require(path, "movies.dat", hint=hint),
  }


def read_users(path: Path) -> Users:
  """Reads `users.dat`: `user::gender::age::occupation::zip`."""
  users = Users({}, [], [], [])
  for number, (user, gender, age, occupation, _) in _records(path, "::", 5):
    _new(users.key, user, path, number)
    if gender not in ("F", "M"):
      raise _error(path, number, f"the gender is {gender!r}, expected F or M")
    for name, value in (("age", age), ("occupation", occupation)):
      _number(value, name, path, number)
    users.gender.append(gender)
    users.age.append(age)
    users.occupation.append(occupation)
  return users


def read_movies(path: Path) -> Movies:
  """Reads `movies.dat`: `movie::title (year)::genre|genre|...`."""
  movies = Movies({}, [], [])
  for number, (movie, title, genres) in _records(path, "::", 3):
    _new(movies.key, movie, path, number)
    if not title:
      raise _error(path, number, "the title is empty")
    year = _YEAR.search(title)
    movies.year.append(year.group(1) if year else "")
    movies.genres.append(genres.split("|") if genres else [])
  return movies


def read_ratings(path: Path, users: dict[str, int], movies: dict[str, int]) -> Ratings:
  """Reads `ratings.dat` (`user::movie::rating::timestamp`) or a CSV headed `user,movie,rating`.

  Raises:
    DamagedFileError: a truncated row, a rating that is not 1 to 5, a time that is not a number, a
      user or movie that the other files do not know, or a movie that a user rates twice; names the
      file and the line.
  """
  user, movie, rating = [], [], []
  lines: dict[int, int] = {}
  csv = path.suffix == ".csv"
  with files.progress(f"reading {path.name}", 1_000_209, "row") as bar:
    for number, fields in _records(path, "," if csv else "::", 3 if csv else 4):
      if csv and number == 1 and fields[0] == "user":
        continue
      if fields[2] not in ("1", "2", "3", "4", "5"):
        raise _error(path, number, f"the rating is {fields[2]!r}, expected 1 to 5")
      if not csv:
        _number(fields[3], "time", path, number)
      user.append(_known(users, fields[0], "user", "users.dat", path, number))
      movie.append(_known(movies, fields[1], "movie", "movies.dat", path, number))
      rating.append(int(fields[2]))
      line = lines.setdefault(user[-1] * len(movies) + movie[-1], number)
      if line != number:
        what = f"user {fields[0]} rates movie {fields[1]}, which line {line} does already"
        raise _error(path, number, what)
      bar.update()
  if not user:
    raise _error(path, 1, "there is no rating")
  return Ratings(np.array(user, np.int32), np.array(movie, np.int32), np.array(rating, np.int8))


def _records(path: Path, separator: str, count: int) -> Iterator[tuple[int, list[str]]]:
  # GroupLens publishes latin-1; as UTF-8 the accents in the titles fail to decode.
  number = 0
  with path.open(encoding="latin-1", newline="\n") as file:
    for number, line in enumerate(file, start=1):
      fields = line.rstrip("\r\n").split(separator)
      if len(fields) != count:
        raise _error(
          path, number, f"found {len(fields)} fields separated by {separator!r}, expected {count}"
        )
      yield number, fields
  if number == 0:
    raise _error(path, 1, "the file is empty")


def _number(text: str, name: str, path: Path, number: int) -> None:
  if files.whole(text) is None:
    raise _error(path, number, f"the {name} is {text!r}, expected a whole number")


def _new(key: dict[str, int], name: str, path: Path, number: int) -> None:
  _number(name, "id", path, number)
  if name in key:
    raise _error(path, number, f"{name!r} appears a second time")
  key[name] = len(key)


def _known(key: dict[str, int], name: str, kind: str, other: str, path: Path, number: int) -> int:
  if name not in key:
    raise _error(path, number, f"{kind} {name!r} is not in {other}")
  return key[name]


def _error(path: Path, number: int, what: str) -> DamagedFileError:
  return DamagedFileError(
    f"{path}, line {number}: {what}. Is the file complete? Unpack the archive again, or repair the "
    "line."
  )
