"""MovieLens 1M as clicks, by RecBole's protocol for context-aware models.

Ratings of 3 are dropped and 4 or more is a click: 739,012 rows, 78 % of them clicks, of a user with
gender, age and occupation on a movie with year and genres, split at random 80/10/10.
"""

from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays, categories, files, movielens


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  source = movielens.sources(movielens.folder(config.data_dir, config.cache_dir))
  return {
    "format": 1,
    "files": {role: files.stamp(path) for role, path in source.items()},
    "split_seed": config.split_seed,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; `ids` are user, gender, age, occupation, movie, year and the genres."""
  source = {role: Path(stamp[0]) for role, stamp in settings["files"].items()}
  users, movies = movielens.read_users(source["users"]), movielens.read_movies(source["movies"])
  ratings = movielens.read_ratings(source["ratings"], users.key, movies.key)

  genres, num_genres = categories.bags(movies.genres)
  by_user = [categories.codes(column) for column in (users.gender, users.age, users.occupation)]
  year, num_years = categories.codes(movies.year)
  user_ids = np.stack([np.arange(len(users.key)), *(codes for codes, _ in by_user)], axis=1)
  movie_ids = np.column_stack([np.arange(len(movies.key)), year, genres])

  kept = np.flatnonzero(ratings.rating != 3)
  kept = np.random.default_rng(settings["split_seed"]).permutation(kept)
  rows = len(kept)
  width = user_ids.shape[1] + movie_ids.shape[1]
  ids = arrays.column(folder, "ids", (rows, width), np.int32)
  ids[:, : user_ids.shape[1]] = user_ids[ratings.user[kept]]
  ids[:, user_ids.shape[1] :] = movie_ids[ratings.movie[kept]]
  arrays.column(folder, "label", (rows,), np.uint8)[:] = ratings.rating[kept] >= 4
  arrays.column(folder, "dense", (rows, 0), np.float32)

  names = ("user", "gender", "age", "occupation", "movie", "year")
  sizes = (len(users.key), *(size for _, size in by_user), len(movies.key), num_years)
  features = [{"name": n, "vocabulary_size": s} for n, s in zip(names, sizes, strict=True)]
  features.append({"name": "genres", "vocabulary_size": num_genres, "valency": genres.shape[1]})
  return {
    "splits": arrays.cut(rows, valid=0.1, test=0.1),
    "features": features,
    "sha256": {path.name: files.digest(path) for path in source.values()},
  }
