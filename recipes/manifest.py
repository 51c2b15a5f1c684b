"""The manifest of a checkpoint: the size and the checksum of each of its files, written last.

    checkpoints/30/manifest.json

A folder without a manifest was not finished, or comes from a version that wrote none. A folder
whose files differ from its manifest is damaged, and `check` names the files. The checksums are
XXH3 of 128 bits: `xxhsum -H2 FILE` prints the same. They notice accidents at the speed of the disk,
and do not keep out an attacker.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import xxhash

from . import arrays, files, schemas
from .errors import DamagedFileError, UserError

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
    entries = dict(zip(names, pool.map(lambda name: _entry(folder / name), names), strict=True))
  content = {**about, "files": entries}
  arrays.write_json(folder / NAME, content | {_OWN: _checksum_of(content)})
  return sum(entry["size"] for entry in entries.values())


def read(folder: Path, schema: Mapping[str, Any] = {}) -> dict[str, Any]:
  """Returns the manifest of a folder, without a look at the files.

  Args:
    folder: of the files.
    schema: of the further entries; see `schemas.check`.

  Raises:
    MissingFileError: it has none.
    DamagedFileError: the manifest is not what was written.
  """
  return arrays.read_sealed(folder / NAME, _OWN, _checksum_of, {**schemas.MANIFEST, **schema})


def check(folder: Path, schema: Mapping[str, Any] = {}) -> dict[str, Any]:
  """Returns the manifest of a folder, all files of which are as they were written.

  Reads every file. Time: that of the disk; 12 GB/s of checksums per core where files are cached.

  Raises:
    MissingFileError: it has no manifest.
    DamagedFileError: a file is missing, cut, changed, or unknown to the manifest; names them.
  """
  content = read(folder, schema)
  wanted = content["files"]
  with ThreadPoolExecutor(_THREADS) as pool:
    faults = list(pool.map(lambda name: _fault(folder, name, wanted[name]), wanted))
  unknown = [name for name in _names(folder) if name not in wanted]
  faults += [f"{folder / name} is not one of its files" for name in unknown]
  if problems := [fault for fault in faults if fault]:
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    raise DamagedFileError("; ".join(problems[:_NAMED]) + more)
  return content


def _names(folder: Path) -> list[str]:
  """Every file of a folder but its manifest, relative to it."""
  return [name for name in files.names(folder) if name not in (NAME, f"{NAME}.part")]


def _entry(path: Path) -> dict[str, Any]:
  with files.opened(path) as file:
    return {"size": os.fstat(file.fileno()).st_size, "xxh3_128": _checksum(file)}


def _fault(folder: Path, name: str, wanted: Mapping[str, Any]) -> str | None:
  """The fault of a file, or None."""
  path = folder / name
  try:
    with files.opened(files.inside(folder, name)) as file:
      size = os.fstat(file.fileno()).st_size
      if size != wanted["size"]:
        return f"{path} has {size} bytes instead of {wanted['size']}"
      is_same = _checksum(file) == wanted["xxh3_128"]
  except UserError as error:
    return str(error)
  except OSError as error:
    return f"{path} cannot be read ({error.strerror})"
  return None if is_same else f"{path} has another checksum than the one in {NAME}"


def _checksum(file: IO[bytes]) -> str:
  checksum = xxhash.xxh3_128()
  while block := file.read(_BLOCK):
    checksum.update(block)
  return checksum.hexdigest()


def _checksum_of(content: Mapping[str, Any]) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
