"""Published click data sets, declared as tables; see `recipes.tables.settings`."""

from typing import Any

from .. import files, movielens
from ..errors import UserError
from . import criteo1tb

_CRITEO = (
  "It is not downloaded because its licence has to be accepted: get the Criteo Display Advertising "
  "Challenge from Criteo's or Kaggle's page, unpack train.txt, and pass --config.data_dir=<folder> "
  "(and --config.data_file=<name> where the file is called otherwise)."
)
HINTS = {"criteo": _CRITEO, "criteo_1tb": "", "movielens1m": movielens.HINT}
criteo_1tb = criteo1tb.table


def criteo(config) -> dict[str, Any]:
  """Returns the declaration of Criteo's display advertising logs of the Kaggle challenge of 2014.

  The file is as a day of the 1 TB set (`recipes.dlrm.criteo1tb`), and split in the order of time.

  Raises:
    UserError: the vocabulary is unknown.
    MissingFileError: the file is missing; says where it comes from.
  """
  vocabularies = {"hash": {"hash": config.hash_size}, "min_count": {"min_count": config.min_count}}
  if config.vocabulary not in vocabularies:
    raise UserError(f"unknown vocabulary {config.vocabulary!r}: choose hash or min_count")
  path = files.require(config.data_dir, config.data_file, hint=_CRITEO)
  category = {"kind": "category", **vocabularies[config.vocabulary]}
  return {
    "files": path,
    "format": criteo1tb.FORMAT,
    "columns": {
      "label": "label",
      **dict.fromkeys(criteo1tb.INTEGERS, criteo1tb.NUMBER),
      **dict.fromkeys(criteo1tb.CATEGORIES, category),
    },
    "split": {"by": "order", "valid": config.valid_fraction, "test": config.test_fraction},
  }


def movielens1m(config) -> dict[str, Any]:
  """Returns MovieLens 1M as clicks, by RecBole's protocol for context-aware models, as a table.

  Ratings of 3 are dropped and 4 or more is a click: 739,012 rows, 78 % of them clicks, of a user
  with gender, age and occupation on a movie with year and genres, split at random 80/10/10.
  """
  rating = {"kind": "label", "at_least": 4, "drop": ("3",)}
  return movielens.table(config, rating) | {"split": {"by": "hash", "seed": config.split_seed}}
