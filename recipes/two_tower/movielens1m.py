"""MovieLens 1M by RecBole's protocol for general recommendation.

Ratings of 3 or more, then users and movies with fewer than 10 rows dropped repeatedly: 6,033 users,
3,123 movies, 834,449 rows, of which each user's are split at random .8/.1/.1.
"""

from pathlib import Path
from typing import Any

import numpy as np

from .. import categories, files, movielens
from ..tables import splitting
from ..tables.settings import SPLITS
from . import splits


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  source = movielens.sources(movielens.folder(config.data_dir, config.cache_dir))
  return {
    "format": 1,
    "files": {role: files.stamp(path) for role, path in source.items()},
    "min_rating": 3,
    "core": config.core,
    "split_seed": config.split_seed,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; users have gender, age and occupation, items genres and year."""
  source = {role: Path(stamp[0]) for role, stamp in settings["files"].items()}
  users, movies = movielens.read_users(source["users"]), movielens.read_movies(source["movies"])
  ratings = movielens.read_ratings(source["ratings"], users.key, movies.key)
  liked = np.flatnonzero(ratings.rating >= settings["min_rating"])
  kept = liked[splitting.k_core(ratings.user[liked], ratings.movie[liked], settings["core"])]
  who, user = np.unique(ratings.user[kept], return_inverse=True)
  what, item = np.unique(ratings.movie[kept], return_inverse=True)
  split = splitting.per_user(user, 0.1, settings["split_seed"])
  at = lambda values, rows: [values[row] for row in rows]
  by_user = {"gender": users.gender, "age": users.age, "occupation": users.occupation}
  features = {
    "user": {name: categories.codes(at(values, who)) for name, values in by_user.items()},
    "item": {
      "genres": categories.bags(at(movies.genres, what)),
      "year": categories.codes(at(movies.year, what)),
    },
  }
  return splits.write(
    folder,
    {name: (user[split == i], item[split == i]) for i, name in enumerate(SPLITS)},
    (len(who), len(what)),
    features,
    {path.name: files.digest(path) for path in source.values()},
    seed=settings["split_seed"],
  )
