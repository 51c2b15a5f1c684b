"""The config of a run: what was asked for, and the defaults of its recipe."""

import importlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ..errors import UserError
from ..tables import settings as table_settings
from . import settings


def completed(recipe: str, config) -> Any:
  """Returns the config of a run: as given, and defaults for what it leaves out.

  Args:
    recipe: its name.
    config: a ConfigDict, or a plain dict; with `columns`, of a table, it needs `files` besides.

  Raises:
    UserError: as `tables.settings.complete`, or a plain dict has neither columns nor a data set.
  """
  if "columns" in config:
    defaults = importlib.import_module(f"..{recipe}.defaults", __package__).DEFAULTS
    return table_settings.complete(config, defaults)
  if isinstance(config, Mapping):
    if "dataset" not in config:
      raise UserError(
        'the config declares no columns: give {"files": ..., "columns": {...}}, or a config of '
        "`configs`"
      )
    config = ConfigDict(config)
  settings.add(config)
  return config
