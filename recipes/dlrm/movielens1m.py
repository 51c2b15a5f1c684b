"""MovieLens 1M as clicks, by RecBole's protocol for context-aware models.

Ratings of 3 are dropped and 4 or more is a click: 739,012 rows, 78 % of them clicks, of a user with
gender, age and occupation on a movie with year and genres, split at random 80/10/10.
"""

from typing import Any

from .. import movielens


def table(config) -> dict[str, Any]:
  """Returns the settings of the table; see `movielens.table`."""
  rating = {"kind": "label", "at_least": 4, "drop": ("3",)}
  return movielens.table(config, rating) | {"split": {"by": "hash", "seed": config.split_seed}}
