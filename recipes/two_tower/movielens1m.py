"""MovieLens 1M by RecBole's protocol for general recommendation.

Ratings of 3 or more, then users and movies with fewer than 10 rows dropped repeatedly: 6,033 users,
3,123 movies, 834,449 rows, of which each user's are split at random .8/.1/.1.
"""

from typing import Any

from .. import movielens


def table(config) -> dict[str, Any]:
  """Returns the settings of the table; see `movielens.table`."""
  rating = {"kind": "label", "at_least": 3}
  return movielens.table(config, rating) | {"split": {"by": "user", "seed": config.split_seed}}
