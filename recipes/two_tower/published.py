"""Published data sets of users and items, declared as tables; see `recipes.tables.settings`.

MovieLens may be used for research and not be redistributed (Harper and Konstan 2015, see
`recipes.movielens`). Gowalla's check-ins are SNAP's (Cho, Myers and Leskovec 2011), in the split of
He et al. 2020, "LightGCN".

Each function takes a config and returns a declaration; it raises MissingFileError for a folder or
file that is not there, and UserError as `files.download`.
"""

from typing import Any

from .. import files, movielens
from ..tables.values import literal

GOWALLA_URL = "https://github.com/kuandeng/LightGCN, Data/gowalla"
MOVIELENS100K_URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
MOVIELENS100K_SHA256 = "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"
_GENRES = (
  "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
  "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller",
  "War", "Western",
)  # fmt: skip
_TENS = tuple(range(10, 80, 10))  # a table needs several users of an age to learn of it


def gowalla(config) -> dict[str, Any]:
  """Declares `train.txt`, `test.txt` and, if there is one, `valid.txt`.

  Without it `config.valid` of each user's training items validate; 0 trains on those of it as well.
  """
  hint = (
    f"Get train.txt and test.txt from {GOWALLA_URL}, and pass --config.data_dir=<their folder>."
  )
  find = lambda name: files.require(config.data_dir, f"{name}.txt", hint=hint)
  sources: dict[str, Any] = {name: find(name) for name in ("train", "test")}
  if (valid := sources["train"].with_name("valid.txt")).is_file():
    sources |= {"valid": valid} if config.valid else {"train": [sources["train"], valid]}
  return {
    "files": sources,
    "format": {"delimiter": " ", "names": ("user", "items"), "rest": True},
    "columns": {"user": "user", "items": {"kind": "item", "separator": " "}},
    "split": {"seed": config.split_seed, "valid": config.valid},
  }


def movielens100k(config) -> dict[str, Any]:
  """Declares what retrieval tutorials use: every rating is a positive, random .72/.08/.2."""
  folder = files.folder(
    config.data_dir,
    config.cache_dir,
    url=MOVIELENS100K_URL,
    sha256=MOVIELENS100K_SHA256,
    member="u.data",
  )
  hint = f"They are in {MOVIELENS100K_URL}; leave --config.data_dir empty to have it downloaded."
  ratings, users, items = sources = [
    files.require(folder, f"u.{name}", hint=hint) for name in ("data", "user", "item")
  ]
  flags = " ".join(f"g{place}" for place in range(len(_GENRES)))
  named = (f"CASE g{n} WHEN '1' THEN {literal(genre)} END" for n, genre in enumerate(_GENRES))
  query = (
    'SELECT r."user", movie, gender, age, occupation, title, date[-4:] AS year, '
    f"list_filter([{', '.join(named)}], lambda genre: genre IS NOT NULL) AS genres "
    "FROM (SELECT *, row_number() OVER () AS row FROM "
    f"{movielens.rows(ratings, 'user movie rating time', chr(9))}) AS r "
    f'LEFT JOIN {movielens.rows(users, "user age gender occupation zip", "|")} AS u USING ("user") '
    f"LEFT JOIN {movielens.rows(items, f'movie title date video url {flags}', '|')} AS m "
    "USING (movie) ORDER BY row"
  )
  return {
    "files": movielens.joined(query, config.cache_dir, sources),
    "columns": {
      "user": "user",
      "movie": "item",
      "gender": {"kind": "category", "side": "user"},
      "age": {"kind": "number", "buckets": _TENS, "side": "user"},
      "occupation": {"kind": "category", "side": "user"},
      "title": "title",
      "genres": {"kind": "bag", "side": "item"},
      "year": {"kind": "category", "side": "item"},
    },
    "split": {"by": "hash", "valid": 0.08, "test": 0.2, "seed": config.split_seed},
  }


def movielens1m(config) -> dict[str, Any]:
  """Declares RecBole's protocol for general recommendation.

  Ratings of 3 or more, then users and movies with fewer than 10 rows dropped repeatedly: 6,033
  users, 3,123 movies, 834,449 rows, of which each user's are split at random .8/.1/.1.
  """
  rating = {"kind": "label", "at_least": 3}
  return movielens.table(config, rating) | {"split": {"by": "user", "seed": config.split_seed}}
