"""Small tables of one's own, and the settings of a run on them."""

import csv
from pathlib import Path

from recipes.dlrm import defaults as dlrm
from recipes.sequence import defaults as sequence
from recipes.tables import settings
from recipes.two_tower import defaults as two_tower

_DEFAULTS = {"dlrm": dlrm, "two_tower": two_tower, "sequence": sequence}


def write_csv(path: Path, header, rows) -> Path:
  """Writes rows below a header, and returns the path."""
  with path.open("w", newline="") as file:
    csv.writer(file).writerows([header, *rows])
  return path


def completed(recipe: str, cache_dir: Path | str, **given):
  """Returns the config of a recipe on a table."""
  given = {"cache_dir": str(cache_dir)} | given
  return settings.complete(given, _DEFAULTS[recipe].DEFAULTS)
