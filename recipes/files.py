"""Source files of data sets: their folders, hashes, downloads and replacement."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from tqdm import tqdm

from .errors import MissingFileError, UserError


def digest(path: Path) -> str:
  """Returns a file's SHA-256 in hexadecimal."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: Path) -> list[Any]:
  """Returns path, size and modification time, which tell a changed file without reading it."""
  status = path.stat()
  return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def new_folder(path: Path) -> Path:
  """Returns a new, empty folder in place of what has its name."""
  shutil.rmtree(path, ignore_errors=True)
  path.mkdir()
  return path


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
  """Yields a new folder that takes the place of `path` unless an error ends its writing."""
  partial = path.with_name(f"{path.name}.partial")
  try:
    yield new_folder(partial)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def check_out(out: Path, marker: str) -> None:
  """Makes the parent of a folder to write; UserError for files in it, unless one is `marker`."""
  if out.exists() and any(out.iterdir()) and not (out / marker).exists():
    raise UserError(f"--out={out} holds other files: choose a new folder")
  out.absolute().parent.mkdir(parents=True, exist_ok=True)


def require(folder: str | Path, *names: str, hint: str) -> Path:
  """Returns the first of `names` in a folder, `~` allowed; `hint` ends the error if it has none."""
  folder = Path(folder).expanduser()
  for name in names:
    if (folder / name).is_file():
      return folder / name
  raise MissingFileError(f"{folder} has no {' and no '.join(names)}. {hint}")


def folder(data_dir: str, cache_dir: str, *, url: str, sha256: str, member: str) -> Path:
  """Returns the folder with a data set's files: the user's, or of the archive at `url`.

  Args:
    member: a file of the archive, in whose folder all files are.
  """
  if data_dir:
    return Path(data_dir).expanduser()
  cache = Path(cache_dir).expanduser()
  cache.mkdir(parents=True, exist_ok=True)
  archive = cache / url.rpartition("/")[2]
  unpacked = archive.with_suffix("")
  # The processes of a run share their machine's cache: one downloads, the others wait.
  with filelock.FileLock(archive.with_suffix(".lock")):
    if not unpacked.exists():
      download(url, archive, sha256=sha256)
      with replacing_folder(unpacked) as partial:
        shutil.unpack_archive(archive, partial)
  return next(unpacked.rglob(member)).parent


def progress(description: str, total: int, unit: str) -> tqdm:
  """Returns a progress bar that shows on a terminal only."""
  return tqdm(
    desc=description, total=total, unit=unit, unit_scale=True, disable=None, leave=False, miniters=1
  )


def download(url: str, path: Path, *, sha256: str) -> None:
  """Downloads `url` to `path`, whole or not at all, unless the right file is already there."""
  import pooch  # here, since it loads tqdm's notebook bar, which warns where ipywidgets is missing

  with progress(f"downloading {path.name}", 1, "B") as bar:  # pooch sets the bar's total
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 20, timeout=60)
    try:
      pooch.retrieve(url, f"sha256:{sha256}", path.name, path.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # of the network, or of pooch, with both hashes
      raise UserError(
        f"Could not download {url} ({error}). Download it by other means, unpack it, and pass the "
        "folder as --config.data_dir=<folder>."
      ) from error


def write(path: Any, content: str) -> None:
  """Writes a file, UTF-8, so that a reader sees the old content or all of the new, never a part."""
  partial = path.with_name(f"{path.name}.part")
  partial.write_bytes(content.encode())
  partial.replace(path)


def write_json(path: Any, value: Any) -> None:
  """Writes a value as JSON; see `write`."""
  write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Any) -> Any:
  """Returns the value of a JSON file."""
  return json.loads(path.read_text())
