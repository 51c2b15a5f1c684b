"""MovieLens as tables: ratings, joined with what is known of their users and movies.

F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM
TiiS 5, 4: 19. The data may be used for research and not be redistributed.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock

from . import files
from .tables.values import literal

URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
SHA256 = "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
# The second one is RecBole's, without times.
_RATINGS = ("ratings.dat", "ratings_no_timestamp.csv")


def rows(path: Path, names: str, delimiter: str) -> str:
  """Returns the SQL of the rows of a file, texts by these names."""
  columns = dict.fromkeys(names.split(), "VARCHAR")
  return (
    f"(FROM read_csv({literal(path)}, delim='{delimiter}', columns={columns}, quote='', escape='', "
    f"header={path.suffix == '.csv'}, encoding='latin-1', auto_detect=false, parallel=false))"
  )


def joined(query: str, cache_dir: str, sources: list[Path]) -> Path:
  """Returns a Parquet file with the answer to a query, which is asked once.

  Args:
    cache_dir: where the file is, in a folder of its own.
    sources: the files that the query reads.

  Raises:
    DamagedFileError: a file does not hold what the query reads.
  """
  from .tables import source  # training does without it

  about = [query, *map(files.stamp, sources)]
  name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
  folder = Path(cache_dir).expanduser() / f"movielens-{name}"
  folder.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(f"{folder}.lock"), source.reading(" and ".join(map(str, sources))):
    if not folder.exists():
      with files.replacing_folder(folder) as partial, source.connect() as con:
        con.execute(f"COPY ({query}) TO {literal(partial / 'ratings.parquet')}")
  return folder / "ratings.parquet"


def table(config, rating: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings of MovieLens 1M, `split` aside: see `recipes.tables.settings`.

  Args:
    config: `data_dir`, the user's folder, or "" for a checked download into `cache_dir`.
    rating: the declaration of the ratings, which are 1 to 5.

  Raises:
    UserError: `data_dir` lacks a file, or as `files.download`.
  """
  folder = files.folder(
    config.data_dir, config.cache_dir, url=URL, sha256=SHA256, member="ratings.dat"
  )
  hint = f"They are in {URL}; leave --config.data_dir empty to have it downloaded."
  ratings = files.require(folder, *_RATINGS, hint=hint)
  users, movies = (files.require(folder, f"{name}.dat", hint=hint) for name in ("users", "movies"))
  is_csv = ratings.suffix == ".csv"
  of_ratings = rows(ratings, "user movie rating" + " time" * (not is_csv), "," if is_csv else "::")
  query = (
    'SELECT r."user", movie, rating, gender, age, occupation, title, genres, '
    r"regexp_extract(title, '\((\d{4})\)$', 1) AS year "
    f"FROM (SELECT *, row_number() OVER () AS row FROM {of_ratings}) AS r "
    f'LEFT JOIN {rows(users, "user gender age occupation zip", "::")} AS u USING ("user") '
    f"LEFT JOIN {rows(movies, 'movie title genres', '::')} AS m USING (movie) ORDER BY row"
  )
  category = {"kind": "category", "side": "user"}
  return {
    "files": joined(query, config.cache_dir, [ratings, users, movies]),
    "columns": {
      "user": "user",
      "movie": "item",
      "rating": rating,
      **dict.fromkeys(("gender", "age", "occupation"), category),
      "title": "title",
      "year": {"kind": "category", "side": "item"},
      "genres": {"kind": "bag", "side": "item"},
    },
  }
