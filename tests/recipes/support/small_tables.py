"""Small tables of one's own, and the settings of a run on them."""

import csv
from pathlib import Path

from recipes import config


def write_csv(path: Path, header, rows) -> Path:
  """Writes rows below a header, and returns the path."""
  with path.open("w", newline="") as file:
    csv.writer(file).writerows([header, *rows])
  return path


def completed(recipe: str, cache_dir: Path | str, **given):
  """Returns the config of a recipe on a table."""
  given = {"columns": {}, "cache_dir": str(cache_dir)} | given
  return config.complete(recipe, given)
