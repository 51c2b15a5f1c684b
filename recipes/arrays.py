"""Folders that are written once and checked when they are read: JSON, checksums, columns.

A **manifest** is a JSON file that holds the size and the checksum of each file of its folder, and a
checksum of itself. Checkpoints and exports have a `manifest.json`; the `meta.json` of a prepared
data set is one as well. The checksums are XXH3 of 128 bits: `xxhsum -H2 FILE` prints the same. They
notice accidents at the speed of the disk, and do not keep out an attacker.

A **prepared data set** is a folder of `.npy` files with equally many rows, into which every data
set is turned once, before training. A folder without `meta.json` was interrupted. Splits are ranges
of rows.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from . import files
from .errors import DamagedFileError, MissingFileError, UserError, terminal

# Of prepared data: raise it with a change of what any data set's `build` writes.
FORMAT = 3

MANIFEST = "manifest.json"
_OWN = "xxh3_128_of_manifest"
_ENTRIES = {str: {"size": int, "xxh3_128": str, "mtime_ns?": int}}
# Orbax writes these while it renames a checkpoint, after its manifest; nothing here reads them.
_UNLISTED = (MANIFEST, f"{MANIFEST}.part", "_CHECKPOINT_METADATA", "commit_success.txt")
_BLOCK = 4 << 20
_THREADS = 4  # a network disk reads several files at once faster than one
_NAMED = 5  # files in one message

# A column up to this size is read and compared whenever it is opened; that takes a second. A larger
# one is compared where it has been written to since.
_TRUSTED = 1 << 30


# --- JSON -----------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
  """Writes a JSON file so that a reader sees the old content or all of the new, never a part."""
  files.write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, hint: str = "", schema: Any = object) -> Any:
  """Returns the content of a JSON file.

  Args:
    hint: ends every error; says what to do.
    schema: see `check_schema`.

  Raises:
    MissingFileError: it does not exist.
    DamagedFileError: it is no regular file, not JSON, or not of the schema.
  """
  return parse_json(files.read(path), str(path), hint, schema)


def parse_json(content: bytes | str, source: str, hint: str = "", schema: Any = object) -> Any:
  """Returns the value of a JSON text; arguments and errors are as of `read_json`."""
  try:
    value = json.loads(content, parse_constant=_refuse)
    check_schema(value, schema)
  except (ValueError, RecursionError) as error:
    reason = str(error).partition("\n")[0]
    raise DamagedFileError(f"{source} is damaged ({reason}){hint}") from error
  return value


def _refuse(name: str) -> None:
  raise ValueError(f"{name} is no value of JSON")


def check_schema(value: Any, schema: Any, name: str = "the content") -> None:
  """Checks a value of JSON against types of its parts.

  Args:
    schema: a type or a tuple of types, None being null; `[schema]` of lists; or of objects `{name:
      schema}`, where a name that ends in "?" may be missing, and `str` is any other name.
    name: of the value, for errors.

  Raises:
    ValueError: a part is missing or of another type; names it.

  >>> check_schema({"step": 1, "files": {"a": 2}}, {"step": int, "files": {str: int}, "best?": int})
  >>> check_schema({"step": "1"}, {"step": int})
  Traceback (most recent call last):
  ValueError: step is '1', expected int
  """
  if isinstance(schema, dict | list):
    types: tuple[Any, ...] = (type(schema),)
  else:
    types = schema if isinstance(schema, tuple) else (schema,)
  is_of = isinstance(value, tuple(type(None) if each is None else each for each in types))
  is_flag = isinstance(value, bool) and bool not in types and object not in types
  is_huge = isinstance(value, int | float) and abs(value) > sys.float_info.max
  if not is_of or is_flag or is_huge:
    known = " or ".join(sorted("null" if each is None else each.__name__ for each in types))
    raise ValueError(f"{name} is {value!r:.60}, expected {known}")
  if isinstance(schema, list):
    for index, each in enumerate(value):
      check_schema(each, schema[0], f"{name}[{index}]")
  elif isinstance(schema, dict):
    named = {key.removesuffix("?"): each for key, each in schema.items() if key is not str}
    for key in named:
      if key not in value and key in schema:
        raise ValueError(f"{name} has no {key!r}")
    for key, each in value.items():
      if (part := named.get(key, schema.get(str))) is not None:
        check_schema(each, part, key)


# --- manifests ------------------------------------------------------------------------------------


def write_manifest(folder: Path, about: Mapping[str, Any]) -> int:
  """Writes the manifest of a folder of finished files, and `about`; returns their bytes in all."""
  entries = _entries(folder, _listed(folder))
  _write_sealed(folder / MANIFEST, {**about, "files": entries})
  return sum(entry["size"] for entry in entries.values())


def read_manifest(folder: Path, schema: Mapping[str, Any] = {}) -> dict[str, Any]:
  """Returns the manifest of a folder, without a look at the files.

  Args:
    schema: of the further entries; errors are as of `read_json`.
  """
  return _read_sealed(folder / MANIFEST, {"files": _ENTRIES, **schema})


def check_manifest(folder: Path, schema: Mapping[str, Any] = {}) -> dict[str, Any]:
  """Returns the manifest of a folder, all files of which are as they were written.

  Reads every file. Time: that of the disk; 12 GB/s of checksums per core where files are cached.

  Raises:
    MissingFileError: it has no manifest.
    DamagedFileError: files are missing, cut, changed, or unknown to the manifest; names them.
  """
  content = read_manifest(folder, schema)
  unknown = [name for name in _listed(folder) if name not in content["files"]]
  check(folder, content["files"], [f"{folder / name} is not one of its files" for name in unknown])
  return content


def stamped(folder: Path) -> dict[str, dict[str, Any]]:
  """Returns size, checksum and modification time of the `.npy` files in a folder, for `check`."""
  entries = _entries(folder, sorted(path.name for path in folder.glob("*.npy")))
  for name, entry in entries.items():
    entry["mtime_ns"] = (folder / name).stat().st_mtime_ns
  return entries


def check(folder: Path, entries: Mapping[str, Mapping[str, Any]], more: Sequence[str] = ()) -> None:
  """Raises DamagedFileError where files are not as their entries say; names them.

  A large file whose entry has its modification time still is not read.

  Args:
    entries: by the name of the file, as of a manifest or of `stamped`.
  """
  with ThreadPoolExecutor(_THREADS) as pool:
    found = pool.map(lambda name: _fault(folder, name, entries[name]), entries)
    faults = [*filter(None, found), *more]
  if faults:
    rest = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
    raise DamagedFileError("; ".join(faults[:_NAMED]) + rest)


def _listed(folder: Path) -> list[str]:
  return [name for name in files.names(folder) if name not in _UNLISTED]


def _entries(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
  def entry(name: str) -> dict[str, Any]:
    with files.opened(folder / name) as file:
      return {"size": os.fstat(file.fileno()).st_size, "xxh3_128": _checksum(file)}

  with ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(names, pool.map(entry, names), strict=True))


def _fault(folder: Path, name: str, wanted: Mapping[str, Any]) -> str | None:
  """The fault of a file, or None."""
  path = folder / name
  try:
    with files.opened(files.inside(folder, name)) as file:
      stat = os.fstat(file.fileno())
      if stat.st_size != wanted["size"]:
        return f"{path} has {stat.st_size} bytes instead of {wanted['size']}"
      if stat.st_size > _TRUSTED and stat.st_mtime_ns == wanted.get("mtime_ns"):
        return None
      is_same = _checksum(file) == wanted["xxh3_128"]
  except UserError as error:
    return str(error)
  except OSError as error:
    return f"{path} cannot be read ({error.strerror})"
  return None if is_same else f"{path} has another checksum than the one that was recorded"


def _checksum(file: Any) -> str:
  checksum = xxhash.xxh3_128()
  while block := file.read(_BLOCK):
    checksum.update(block)
  return checksum.hexdigest()


def _write_sealed(path: Path, content: Mapping[str, Any]) -> None:
  write_json(path, {**content, _OWN: _checksum_of(content)})


def _read_sealed(path: Path, schema: Mapping[str, Any]) -> dict[str, Any]:
  content = read_json(path, schema=dict)
  try:
    is_same = content.pop(_OWN, None) == _checksum_of(content)
  except (ValueError, RecursionError):
    is_same = False
  if not is_same:
    raise DamagedFileError(f"{path} is not what was written")
  try:
    check_schema(content, schema)
  except ValueError as error:
    raise DamagedFileError(f"{path} is damaged ({error})") from error
  return content


def _checksum_of(content: Mapping[str, Any]) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


# --- columns --------------------------------------------------------------------------------------


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
  if hasattr(os, "posix_fallocate"):
    # Takes the blocks from the disk now: later a full disk would be a bus error at a write. A file
    # system that cannot allocate takes them when they are written.
    try:
      with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
      if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(error.errno, error.strerror, str(path)) from error
  return array


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
  """Returns the prepared dataset for these settings, building it first where it is missing.

  It is built again when `FORMAT` has changed, and when a file is not the one that was built. Of two
  processes that prepare the same data set at once, the second waits for the first.

  Args:
    cache_dir: where prepared datasets live, `~` allowed.
    name: readable prefix of the folder's name.
    settings: JSON values; everything that the arrays depend on, the source files' `stamp` included.
    build: writes the columns into the folder and returns the `meta.json` content. After
      a kill it is called again on the same folder and may go on from what it finds there.

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
        meta = _read_sealed(final / "meta.json", {"columns": _ENTRIES})
        check(final, meta["columns"])
        return Columns(final), meta
    except (DamagedFileError, MissingFileError) as error:
      print(terminal(f"{error}: preparing the data set again"), file=sys.stderr, flush=True)
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
    # JSON, as it will be read: pairs are lists.
    meta = json.loads(json.dumps(about | built | {"columns": stamped(partial)}))
    _write_sealed(partial / "meta.json", meta)
    partial.rename(final)
    return Columns(final), meta
