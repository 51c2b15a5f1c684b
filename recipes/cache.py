"""Prepared data sets: folders of columns, one `.npy` file each, into which data are turned once.

All columns of a folder have equally many rows, and splits are ranges of rows. A folder is written
under another name, and gets its own when it is complete.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from . import files

FORMAT = 10  # raise it with a change of what the `build` of any data set writes
META = "meta.json"


class Columns(Mapping[str, np.ndarray]):
  """The `.npy` files of a folder by name, memory-mapped on first use."""

  def __init__(self, folder: str | Path):
    self.folder = Path(folder)
    self._files = {path.stem: path for path in sorted(self.folder.glob("*.npy"))}
    self._open: dict[str, np.ndarray] = {}

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._open:
      self._open[name] = np.load(self._files[name], mmap_mode="r")
    return self._open[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._files)

  def __len__(self) -> int:
    return len(self._files)


def column(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> np.memmap:
  """Opens a new column for writing."""
  path = folder / f"{name}.npy"
  return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def cut(rows: int, valid: float, test: float) -> dict[str, tuple[int, int]]:
  """Returns train, valid and test as neighbouring ranges of rows; the last two are fractions."""
  train = rows - round(rows * valid) - round(rows * test)
  return {
    "train": (0, train),
    "valid": (train, train + round(rows * valid)),
    "test": (train + round(rows * valid), rows),
  }


def prepared(
  cache_dir: str | Path, name: str, settings: Mapping[str, Any], build: Callable[[Path], dict]
) -> tuple[Columns, dict[str, Any]]:
  """Returns the prepared data set for these settings, building it first where it is missing.

  Of two processes that prepare the same data set at once, the second waits for the first.

  Args:
    cache_dir: where prepared data sets live, `~` allowed.
    name: readable prefix of the folder's name.
    settings, build: as of a `DataSet`.
  """
  about = {"settings": dict(settings), "format": FORMAT, "package": __package__}
  text = json.dumps(about, sort_keys=True)
  cache = Path(cache_dir).expanduser()
  cache.mkdir(parents=True, exist_ok=True)
  final = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
  with filelock.FileLock(cache / f"{final.name}.lock"):
    if not final.exists():
      with files.replacing_folder(final) as partial:
        files.write_json(partial / META, about | build(partial))
  return Columns(final), files.read_json(final / META)


# --- data sets ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prepared:
  """The columns of a data set, memory-mapped or computed when they are indexed, and its `meta`.

  `name` is the folder's, which changes with everything that the columns depend on.
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
    """The folder of the files that serving reads in addition to the model, or None."""
    folder = self.columns.folder / "serve" if isinstance(self.columns, Columns) else None
    return folder if folder is not None and folder.is_dir() else None

  @property
  def best(self) -> Mapping[str, float]:
    """Metrics of the probabilities that the data were drawn from, where they are known."""
    return self.meta.get("best", {})


@dataclasses.dataclass(frozen=True)
class DataSet:
  """Functions that prepare and read a data set, or raise UserError for wrong settings or files.

  Attributes:
    settings: `(config) -> JSON values`, everything that the columns depend on, the stamps of the
      source files included.
    build: `(settings, folder) -> meta`, writes the columns into the folder and returns the content
      of `meta.json`. A change of what it writes raises `FORMAT`.
    view: `(prepared, config) -> Prepared`, the columns as batches read them.
    describe: `(config) -> Prepared` with columns of no rows, if the config alone tells them; None
      if they are known only from the data.
  """

  settings: Callable[[Any], dict[str, Any]]
  build: Callable[[dict[str, Any], Path], dict[str, Any]]
  view: Callable[[Prepared, Any], Prepared] = lambda prepared, config: prepared
  describe: Callable[[Any], Prepared] | None = None


def load(data_set: DataSet, config, prefix: str = "") -> Prepared:
  """Prepares a data set in a folder `<prefix><dataset>-…`, or opens what an earlier run has."""
  settings = data_set.settings(config)
  build = functools.partial(data_set.build, settings)
  columns, meta = prepared(config.cache_dir, f"{prefix}{config.dataset}", settings, build)
  from . import mesh  # imports Grain, which predictions do without

  for note in meta.get("notes", ()):
    mesh.say(note)
  return data_set.view(Prepared(columns, meta, columns.folder.name), config)
