"""MovieLens 1M: the three files, read strictly, or fetched from the publisher.

F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM
TiiS 5, 4: 19. The data may be used for research and not be redistributed.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import files
from .textfile import TextFile

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
  """Reads `users.dat`: `user::gender::age::occupation::zip`.

  Raises:
    DamagedFileError: a field does not hold what it should; names the file and the line.
  """
  file, users = TextFile(path), Users({}, [], [], [])
  for line, (user, gender, age, occupation, _) in file.records("::", 5):
    file.add_id(line, users.key, user)
    if gender not in ("F", "M"):
      raise file.error(line, f"the gender is {gender!r}, expected F or M")
    file.number(line, "age", age)
    file.number(line, "occupation", occupation)
    users.gender.append(gender)
    users.age.append(age)
    users.occupation.append(occupation)
  return users


def read_movies(path: Path) -> Movies:
  """Reads `movies.dat`: `movie::title (year)::genre|genre|...`.

  Raises:
    DamagedFileError: a field does not hold what it should; names the file and the line.
  """
  file, movies = TextFile(path), Movies({}, [], [])
  for line, (movie, title, genres) in file.records("::", 3):
    file.add_id(line, movies.key, movie)
    if not title:
      raise file.error(line, "the title is empty")
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
  file, csv = TextFile(path), path.suffix == ".csv"
  with files.progress(f"reading {path.name}", 1_000_209, "row") as bar:
    for line, fields in file.records("," if csv else "::", 3 if csv else 4):
      if csv and line == 1 and fields[0] == "user":
        continue
      check_rating(file, line, fields[2])
      if not csv:
        file.number(line, "time", fields[3])
      if fields[0] not in users:
        raise file.error(line, f"user {fields[0]!r} is not in users.dat")
      if fields[1] not in movies:
        raise file.error(line, f"movie {fields[1]!r} is not in movies.dat")
      user.append(users[fields[0]])
      movie.append(movies[fields[1]])
      rating.append(int(fields[2]))
      first = lines.setdefault(user[-1] * len(movies) + movie[-1], line)
      if first != line:
        raise file.error(line, rated_twice(fields[0], fields[1], first))
      bar.update()
  if not user:
    raise file.error(1, "there is no rating")
  return Ratings(np.array(user, np.int32), np.array(movie, np.int32), np.array(rating, np.int8))


def check_rating(file: TextFile, line: int, rating: str) -> None:
  """Raises DamagedFileError if a rating is not 1 to 5."""
  if rating not in ("1", "2", "3", "4", "5"):
    raise file.error(line, f"the rating is {rating!r}, expected 1 to 5")


def rated_twice(user: str, movie: str, first: int) -> str:
  """Returns the problem of a line whose rating the line `first` has given already."""
  return f"user {user} rates movie {movie}, which line {first} does already"
