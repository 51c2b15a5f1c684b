"""Folders of memory-mapped columns, into which every data set is turned once, before training.

A prepared dataset is one folder of `.npy` files with equally many rows and a `meta.json`, which is
written last: a folder without it was interrupted. It holds the sizes and hashes of the files, and
one of itself. Splits are ranges of rows.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import escaping, files, schemas
from .errors import DamagedFileError, MissingFileError, UserError

# Of prepared data: raise it with a change of what any data set's `build` writes.
FORMAT = 1

# A file up to this size is hashed whenever it is opened; that takes a second. A larger one is
# hashed where it has been written to since.
_HASHED = 1 << 30


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
  """Opens a column for writing; one that exists already with this shape keeps what it holds.

  Raises:
    OSError: the disk is too full for it; names the file.
  """
  path = folder / f"{name}.npy"
  array = None
  if path.is_symlink():  # in a cache that others can write to, to a file that they cannot
    path.unlink()
  if path.exists():
    with contextlib.suppress(ValueError):  # a header cut off by a kill: start this column again
      array = np.load(path, mmap_mode="r+")
  if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
  _allocate(path)
  return array


def subfolder(folder: Path, name: str) -> Path:
  """Returns a new, empty folder in a folder."""
  return files.new_folder(folder / name)


def _allocate(path: Path) -> None:
  """Takes the blocks of a file from the disk: a full disk would be a bus error at a later write.

  A file system that cannot allocate takes them when they are written.
  """
  if not hasattr(os, "posix_fallocate"):
    return
  try:
    with path.open("r+b") as file:
      os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
  except OSError as error:
    if error.errno in (
      errno.ENOSPC,
      errno.EDQUOT,
      errno.EFBIG,
    ):
      raise OSError(error.errno, error.strerror, str(path)) from error


def prepared(
  cache_dir: str | Path, name: str, settings: Mapping[str, Any], build: Callable[[Path], dict]
) -> tuple[Columns, dict[str, Any]]:
  """Returns the prepared dataset for these settings, building it first where it is missing.

  It is built again when `FORMAT` has changed, and when a file is not the one that was built.

  Args:
    cache_dir: where prepared datasets live, `~` allowed.
    name: readable prefix of the folder's name.
    settings: JSON values; everything that the arrays depend on, the source files' `stamp` included.
    build: writes the columns into the folder and returns the `meta.json` content. After
      a kill it is called again on the same folder and may go on from what it finds there.

  Two processes may prepare the same data set at once: the second waits for the first.

  Raises:
    UserError: as `build`, which begins from nothing the next time.
  """
  about = {"settings": dict(settings), "format": FORMAT}
  text = json.dumps(about, sort_keys=True)
  cache = Path(cache_dir).expanduser()
  cache.mkdir(parents=True, exist_ok=True)
  final = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
  with files.locked(cache / f"{final.name}.lock"):
    try:
      if final.exists():
        meta = _opened(final)
        check(final, meta["columns"])
        return Columns(final), meta
    except (DamagedFileError, MissingFileError) as error:
      note = escaping.terminal(f"{error}: preparing the data set again")
      print(note, file=sys.stderr, flush=True)
      shutil.rmtree(final)
    partial = final.with_suffix(".partial")
    if partial.is_symlink():
      partial.unlink()
    partial.mkdir(exist_ok=True)
    try:
      built = build(partial)
    except UserError:  # of a source or a setting; mended, it is another data set
      shutil.rmtree(partial)
      raise
    _seal(partial, about | built)
    partial.rename(final)
    return Columns(final), _opened(final)


def _seal(folder: Path, meta: dict[str, Any]) -> None:
  """Writes `meta.json`: the meta, what the files of the folder are, and a hash of all that."""
  meta["columns"] = stamped(folder)
  write_json(folder / "meta.json", meta | {"sha256_of_meta": _digest_of(meta)})


def stamped(folder: Path) -> dict[str, dict[str, Any]]:
  """Returns size, modification time and hash of the `.npy` files in a folder, for `check`."""
  stats = {path.name: path.stat() for path in sorted(folder.glob("*.npy"))}
  return {
    name: {
      "size": stat.st_size,
      "mtime_ns": stat.st_mtime_ns,
      "sha256": files.digest(folder / name),
    }
    for name, stat in stats.items()
  }


def _digest_of(meta: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _opened(folder: Path) -> dict[str, Any]:
  """Returns the meta of a prepared folder.

  Raises:
    MissingFileError: it has none.
    DamagedFileError: the meta is not what was written.
  """
  path = folder / "meta.json"
  return read_sealed(path, "sha256_of_meta", _digest_of, schemas.PREPARED)


def check(folder: Path, columns: Mapping[str, Mapping[str, Any]]) -> None:
  """Raises DamagedFileError where a file is not the one that was built; names the first."""
  for name, wanted in columns.items():
    path = files.inside(folder, name)
    with files.opened(path) as file:
      stat = os.fstat(file.fileno())
    if stat.st_size != wanted["size"]:
      raise DamagedFileError(f"{path} has {stat.st_size} bytes instead of {wanted['size']}")
    if stat.st_size > _HASHED and stat.st_mtime_ns == wanted["mtime_ns"]:
      continue
    if files.digest(path) != wanted["sha256"]:
      raise DamagedFileError(f"{path} does not have the SHA-256 that was recorded")


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
  text = json.dumps(value, indent=2, allow_nan=False)
  files.write(path, text + "\n")


def read_json(path: Path, hint: str = "", schema: Any = object) -> Any:
  """Returns the content of a JSON file.

  Args:
    path: of the file.
    hint: ends every error; says what to do.
    schema: see `schemas.check`.

  Raises:
    MissingFileError: it does not exist.
    DamagedFileError: it is no regular file, not JSON, or not of the schema; names it.
  """
  return parse_json(files.read(path), str(path), hint, schema)


def parse_json(content: bytes | str, source: str, hint: str = "", schema: Any = object) -> Any:
  """Returns the value of a JSON text; arguments and errors are as of `read_json`."""
  try:
    value = json.loads(content, parse_constant=_refuse)
    schemas.check(value, schema)
  except (ValueError, RecursionError) as error:
    reason = str(error).partition("\n")[0]
    raise DamagedFileError(f"{source} is damaged ({reason}){hint}") from error
  return value


def read_sealed(
  path: Path, key: str, digest: Callable[[dict[str, Any]], str], schema: Any
) -> dict[str, Any]:
  """Returns the content of a JSON object that holds a digest of its other parts at `key`.

  Raises:
    MissingFileError: it does not exist.
    DamagedFileError: it is not what was written, or not of the schema; names the file.
  """
  content = read_json(path)
  try:
    if not isinstance(content, dict) or content.pop(key, None) != digest(content):
      raise DamagedFileError(f"{path} is not what was written")
    schemas.check(content, schema)
  except DamagedFileError:
    raise
  except (ValueError, RecursionError) as error:
    raise DamagedFileError(f"{path} is damaged ({error})") from error
  return content


def _refuse(name: str) -> None:
  raise ValueError(f"{name} is no value of JSON")
