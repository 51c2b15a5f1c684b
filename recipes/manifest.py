"""The manifest of a checkpoint: the size and the checksum of each of its files, written last.

    checkpoints/30/manifest.json

A folder without a manifest was not finished, or comes from a version that wrote none. A folder
whose files differ from its manifest is damaged, and `check` names the files. The checksums are
XXH3 of 128 bits: `xxhsum -H2 FILE` prints the same. They notice accidents at the speed of the disk,
and do not keep out an attacker.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from . import arrays
from .errors import DamagedFileError, MissingFileError

NAME = "manifest.json"
_OWN = "xxh3_128_of_manifest"
_BLOCK = 4 << 20
_THREADS = 4  # a network disk reads several files at once faster than one
_NAMED = 5  # files in one message


def write(folder: Path, about: Mapping[str, Any]) -> int:
  """Writes the manifest of a folder whose files are finished; returns their bytes in all.

  Args:
    folder: of the files, at any depth.
    about: further entries, JSON values.

  Raises:
    OSError: the disk is full, or a file has gone.
  """
  names = _names(folder)
  with ThreadPoolExecutor(_THREADS) as pool:
    files = dict(zip(names, pool.map(lambda name: _entry(folder / name), names), strict=True))
  content = {**about, "files": files}
  arrays.write_json(folder / NAME, content | {_OWN: _checksum_of(content)})
  return sum(entry["size"] for entry in files.values())


def read(folder: Path) -> dict[str, Any]:
  """Returns the manifest of a folder, without a look at the files.

  Raises:
    MissingFileError: it has none.
    DamagedFileError: the manifest is not what was written.
  """
  path = folder / NAME
  if not path.is_file():
    raise MissingFileError(f"{path} is missing")
  content = arrays.read_json(path)
  if not isinstance(content, dict) or content.pop(_OWN, None) != _checksum_of(content):
    raise DamagedFileError(f"{path} is not what was written")
  return content


def check(folder: Path) -> dict[str, Any]:
  """Returns the manifest of a folder, all files of which are as they were written.

  Reads every file. Time: that of the disk; 12 GB/s of checksums per core where files are cached.

  Raises:
    MissingFileError: it has no manifest.
    DamagedFileError: a file is missing, cut, changed, or unknown to the manifest; names them.
  """
  content = read(folder)
  wanted = content["files"]
  with ThreadPoolExecutor(_THREADS) as pool:
    faults = list(pool.map(lambda name: _fault(folder / name, wanted[name]), wanted))
  unknown = [name for name in _names(folder) if name not in wanted]
  faults += [f"{folder / name} is not one of its files" for name in unknown]
  if problems := [fault for fault in faults if fault]:
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    raise DamagedFileError("; ".join(problems[:_NAMED]) + more)
  return content


def _names(folder: Path) -> list[str]:
  """Every file of a folder but its manifest, relative to it."""
  files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
  return sorted(name for name in files if name not in (NAME, f"{NAME}.part"))


def _entry(path: Path) -> dict[str, Any]:
  return {"size": path.stat().st_size, "xxh3_128": _checksum(path)}


def _fault(path: Path, wanted: Mapping[str, Any]) -> str | None:
  """The fault of a file, or None."""
  try:
    size = path.stat().st_size
    if size != wanted["size"]:
      return f"{path} has {size} bytes instead of {wanted['size']}"
    is_same = _checksum(path) == wanted["xxh3_128"]
  except FileNotFoundError:
    return f"{path} is missing"
  except OSError as error:
    return f"{path} cannot be read ({error.strerror})"
  return None if is_same else f"{path} has another checksum than the one in {NAME}"


def _checksum(path: Path) -> str:
  checksum = xxhash.xxh3_128()
  with path.open("rb", buffering=0) as file:
    while block := file.read(_BLOCK):
      checksum.update(block)
  return checksum.hexdigest()


def _checksum_of(content: Mapping[str, Any]) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
