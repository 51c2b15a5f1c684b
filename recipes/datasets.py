"""The interface of a data set, and the data sets of a recipe by name.

A data set is prepared once into a folder of columns (see `recipes.cache`), which the batches of a
recipe read. A config declares the columns of a table; a published table is a function that returns
such a declaration, as `recipes.two_tower.published.gowalla`, wrapped by
`recipes.tables.settings.declared`; any other data set is a module with `settings` and `build`. Each
is a line in the `DATA_SETS` of its recipe.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import cache
from . import mesh as mesh_lib
from .errors import UserError


@dataclasses.dataclass(frozen=True)
class Prepared:
  """The columns of a data set, and what its `build` has returned about them.

  Attributes:
    columns: arrays by name, memory-mapped or computed when they are indexed.
    name: of the folder, which changes with everything that the columns depend on; "" for columns
      without rows.
  """

  columns: Mapping[str, Any]
  meta: Mapping[str, Any]
  name: str = ""

  @property
  def splits(self) -> dict[str, tuple[int, int]]:
    """Ranges of rows by split."""
    return {name: (start, stop) for name, (start, stop) in self.meta["splits"].items()}

  @property
  def sha256(self) -> Mapping[str, str]:
    """Hashes of the source files by name, or of the generated columns."""
    return self.meta["sha256"]

  @property
  def serve(self) -> Path | None:
    """The folder of what serving needs besides the model; None where there is none."""
    folder = self.columns.folder / "serve" if isinstance(self.columns, cache.Columns) else None
    return folder if folder is not None and folder.is_dir() else None

  @property
  def best(self) -> Mapping[str, float]:
    """Metrics of the probabilities that the data were drawn from, where they are known."""
    return self.meta.get("best", {})


@dataclasses.dataclass(frozen=True)
class DataSet:
  """The functions that prepare and read a data set.

  Attributes:
    settings: `(config) -> JSON values`, everything that the columns depend on, the stamps of the
      source files included. Raises UserError for a wrong setting or a missing file.
    build: `(settings, folder) -> meta`, writes the columns into the folder and returns the content
      of `meta.json`. Raises UserError for a damaged file. A change of what it writes raises
      `cache.FORMAT`.
    view: returns the columns as batches read them; by default as they are stored.
    describe: `(config) -> Prepared` with columns of no rows, if the config alone tells them; None
      if they are known only from the data.
    hint: what to do where a file cannot be read, added to errors that speak of `config.columns` and
      `config.format`, which the config of a published data set lacks.
  """

  settings: Callable[[Any], dict[str, Any]]
  build: Callable[[dict[str, Any], Path], dict[str, Any]]
  view: Callable[[Prepared], Prepared] = lambda prepared: prepared
  describe: Callable[[Any], Prepared] | None = None
  hint: str = ""


class Registry(dict[str, DataSet]):
  """The data sets of a recipe by the name that `config.dataset` gives them.

  >>> Registry({"toy": DataSet(dict, lambda settings, folder: {})})["toys"]
  Traceback (most recent call last):
  recipes.errors.UserError: unknown dataset 'toys': choose one of ['toy']
  """

  def __init__(self, data_sets: Mapping[str, DataSet], prefix: str = ""):
    super().__init__(data_sets)
    self._prefix = prefix

  def __missing__(self, name: str) -> DataSet:
    raise UserError(f"unknown dataset {name!r}: choose one of {sorted(self)}")

  def load(self, config) -> Prepared:
    """Prepares the data set `config.dataset`, or opens what an earlier run has prepared.

    Raises:
      UserError: the name is unknown, or a file is missing or damaged; names it.
    """
    data_set = self[config.dataset]
    settings = data_set.settings(config)
    try:
      columns, meta = cache.prepared(
        config.cache_dir,
        f"{self._prefix}{config.dataset}",
        settings,
        functools.partial(data_set.build, settings),
      )
    except UserError as error:
      if not data_set.hint:
        raise
      raise type(error)(f"{error} {data_set.hint}") from error
    for note in meta.get("notes", ()):
      mesh_lib.say(note)
    return data_set.view(Prepared(columns, meta, columns.folder.name))

  def describe(self, config) -> Prepared:
    """Returns the data set without rows if the config alone tells its columns; else loads it."""
    describe = self[config.dataset].describe
    return self.load(config) if describe is None else describe(config)
