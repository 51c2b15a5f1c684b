"""Folders of memory-mapped columns: what every dataset is turned into once, before training.

A prepared dataset is one folder of `.npy` files with equally many rows and a `meta.json`, which is
written last: a folder without it was interrupted. Splits are ranges of rows.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Columns(Mapping[str, np.ndarray]):
  """The `.npy` files of a folder by name, memory-mapped on first use.

  Pickles as the folder's path: a pickled `np.memmap` carries all of its data, which would send a
  whole dataset to every worker process.
  """

  def __init__(self, folder: str | Path):
    self.folder = Path(folder)
    self._names = tuple(sorted(path.stem for path in self.folder.glob("*.npy")))
    self._open: dict[str, np.ndarray] = {}

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._names:
      raise KeyError(f"{self.folder} has no column {name!r}; it has {list(self._names)}")
    if name not in self._open:
      self._open[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
    return self._open[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)

  def __getstate__(self) -> Path:
    return self.folder

  def __setstate__(self, folder: Path) -> None:
    self.__init__(folder)  # type: ignore[misc]


def column(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> np.memmap:
  """Opens a column for writing; one that exists already with this shape keeps what it holds."""
  path = folder / f"{name}.npy"
  if path.exists():
    with contextlib.suppress(ValueError):  # a header cut off by a kill: start this column again
      found = np.load(path, mmap_mode="r+")
      if found.shape == shape and found.dtype == np.dtype(dtype):
        return found
  return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def prepared(
  cache_dir: str | Path, name: str, settings: Mapping[str, Any], build: Callable[[Path], dict]
) -> tuple[Columns, dict[str, Any]]:
  """Returns the prepared dataset for these settings, building it first where it is missing.

  Args:
    cache_dir: where prepared datasets live, `~` allowed.
    name: readable prefix of the folder's name.
    settings: JSON values; everything that the arrays depend on, the source files' `stamp` included.
    build: writes the columns into the folder it is given and returns the `meta.json` content. After
      a kill it is called again on the same folder and may go on from what it finds there.

  Two processes that want the same dataset at once are fine: the second waits for the first.
  """
  text = json.dumps(settings, sort_keys=True)
  cache = Path(cache_dir).expanduser()
  cache.mkdir(parents=True, exist_ok=True)
  final = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
  with locked(cache / f"{final.name}.lock"):
    if not (final / "meta.json").exists():
      partial = final.with_suffix(".partial")
      partial.mkdir(exist_ok=True)
      meta = build(partial)
      write_json(partial / "meta.json", {"settings": dict(settings)} | meta)
      partial.rename(final)
  return Columns(final), json.loads((final / "meta.json").read_text())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Makes the processes of a machine take turns; the lock file stays behind, empty."""
  with path.open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def cut(rows: int, valid: float, test: float) -> dict[str, tuple[int, int]]:
  """Returns train, valid and test as neighbouring ranges of rows; the last two are fractions."""
  train = rows - round(rows * valid) - round(rows * test)
  return {
    "train": (0, train),
    "valid": (train, train + round(rows * valid)),
    "test": (train + round(rows * valid), rows),
  }


def write_json(path: Path, value: Any) -> None:
  """Writes a JSON file so that a reader sees the old content or all of the new, never a part."""
  temporary = path.with_name(path.name + ".tmp")
  with temporary.open("w") as file:
    json.dump(value, file, indent=2, allow_nan=False)
    file.write("\n")
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
