"""MovieLens 100K as the retrieval tutorials take it: every rating is a positive, random 80/20.

Eight hundredths are held out for validation. The data may be used for research and not be
redistributed (Harper and Konstan 2015, see `recipes.movielens`).
"""

from typing import Any

from .. import files

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
SHA256 = "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"
HINT = f"The files of MovieLens 100K have a fixed format: get them again from {URL}"
_GENRES = (
  "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
  "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller",
  "War", "Western",
)  # fmt: skip
_TENS = tuple(range(10, 80, 10))  # a table needs several users of an age to learn of it


def table(config) -> dict[str, Any]:
  """Returns the settings of the table; see `recipes.tables.settings`.

  Raises:
    MissingFileError: `data_dir` is no folder, or lacks a file; names it.
    DownloadError: as `files.download`.
  """
  names = ("u.data", "u.user", "u.item")
  folder = files.folder(
    config.data_dir, config.cache_dir, name="ml-100k-raw", url=URL, sha256=SHA256, members=names
  )
  hint = f"They are in {URL}; leave --config.data_dir empty to have it downloaded."
  ratings, users, items = (files.require(folder, name, hint=hint) for name in names)
  in_columns = lambda *names: {"delimiter": "|", "names": names, "encoding": "latin-1", "quote": ""}
  return {
    "files": ratings,
    "format": {"delimiter": "\t", "names": ("user", "movie", "rating", "timestamp")},
    "columns": {"user": "user", "movie": "item"},
    "user_table": {
      "files": users,
      "format": in_columns("id", "age", "gender", "occupation", "zip"),
      "key": "id",
      "columns": {
        "gender": "category",
        "age": {"kind": "number", "buckets": _TENS},
        "occupation": "category",
      },
    },
    "item_table": {
      "files": items,
      "format": in_columns("id", "title", "date", "video", "url", *_GENRES),
      "key": "id",
      "columns": {
        "title": "title",
        "genres": {"kind": "bag", "columns": _GENRES},
        "year": {"kind": "category", "column": "date", "pattern": r"(\d{4})$"},
      },
    },
    "split": {"by": "hash", "valid": 0.08, "test": 0.2, "seed": config.split_seed},
    "counts": config.counts,
  }
