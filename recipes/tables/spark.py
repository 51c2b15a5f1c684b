"""S."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import cache, files
_SHARDS="shards"
def build(s,f): raise NotImplementedError
def _shard(folder, number):
  return folder / _SHARDS / f"{number:05d}"
# --- in training ----------------------------------------------------------------------------------


class Shards(cache.Columns):
  """Columns in shards, memory-mapped on first use: the rows of train, then valid, then test.

  Each shard holds rows of all splits in this order. A column is read by a slice or an array of row
  numbers, which opens the shards that hold these rows and no others.
  """

  def __init__(self, folder: str | Path):
    super().__init__(folder)
    meta = files.read_json(self.folder / "meta.json")
    self._shards, self._formats = meta["shards"], meta["formats"]
    self._names = tuple(self._formats)
    self._opened: dict[int, cache.Columns] = {}
    sizes = np.array([shard["sizes"] for shard in self._shards])
    self.ends = np.cumsum(sizes.T)  # of each shard's rows of train, of valid, of test
    # What is added to a row's number for its place in the shard.
    self.shifts = (np.cumsum(sizes, axis=1) - sizes).T.ravel() - (self.ends - sizes.T.ravel())

  def __getitem__(self, name: str) -> Any:
    if name not in self._names:
      raise KeyError(f"{self.folder} has no column {name!r}; it has {list(self._names)}")
    return _Column(self, name, *self._formats[name])

  def shard(self, part: int) -> cache.Columns:
    """Returns the columns of the shard with a part of the rows."""
    number = part % len(self._shards)
    if number not in self._opened:
      shard = self._shards[number]
      path = _shard(self.folder, shard["number"])
      self._opened[number] = cache.Columns(path)
    return self._opened[number]


class _Column:
  """A column in shards: an array that is read by slices and by arrays of rows."""

  def __init__(self, shards: Shards, name: str, dtype: str, shape: Sequence[int]):
    self._shards, self._name, self.dtype = shards, name, np.dtype(dtype)
    self.shape = (int(shards.ends[-1]), *shape)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
    wanted = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
    found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
    parts = np.searchsorted(self._shards.ends, wanted, side="right")
    for part in np.unique(parts):
      at = parts == part
      array = self._shards.shard(int(part))[self._name]
      found[at] = array[wanted[at] + self._shards.shifts[part]]
    return found
