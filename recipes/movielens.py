"""MovieLens 1M as a table: ratings of users with features, on movies with features and titles.

F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM
TiiS 5, 4: 19. The data may be used for research and not be redistributed.
"""

from collections.abc import Mapping
from typing import Any

from . import files

URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
SHA256 = "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
HINT = f"The files of MovieLens 1M have a fixed format: get them again from {URL}"
# The second one is RecBole's, with the header user,movie,rating. A random split by hash depends on
# the name of the file, so the two have different ones.
_RATINGS = ("ratings.dat", "ratings_no_timestamp.csv")


def table(config, rating: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings of the table, `split` aside: see `recipes.tables.settings`.

  Args:
    config: `data_dir`, the user's folder, or "" for a checked download into `cache_dir`.
    rating: the declaration of the ratings, which are 1 to 5.

  Raises:
    UserError: `data_dir` lacks a file, or as `files.download`.
  """
  folder = files.folder(
    config.data_dir,
    config.cache_dir,
    url=URL,
    sha256=SHA256,
    member="ratings.dat",
  )
  hint = f"They are in {URL}; leave --config.data_dir empty to have it downloaded."
  ratings = files.require(folder, *_RATINGS, hint=hint)
  in_columns = lambda *names: {"delimiter": "::", "names": names, "encoding": "latin-1"}
  return {
    "files": ratings,
    "format": {} if ratings.suffix == ".csv" else in_columns("user", "movie", "rating", "time"),
    "columns": {"user": "user", "movie": "item", "rating": rating},
    "user_table": {
      "files": files.require(folder, "users.dat", hint=hint),
      "format": in_columns("id", "gender", "age", "occupation", "zip"),
      "key": "id",
      "columns": dict.fromkeys(("gender", "age", "occupation"), "category"),
    },
    "item_table": {
      "files": files.require(folder, "movies.dat", hint=hint),
      "format": in_columns("id", "title", "genres"),
      "key": "id",
      "columns": {
        "title": "title",
        "year": {"kind": "category", "column": "title", "pattern": r"\((\d{4})\)$"},
        "genres": {"kind": "bag", "separator": "|"},
      },
    },
  }
