"""Source files of data sets: their folders, hashes, downloads, locks and replacement."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import filelock
from tqdm import tqdm

from .errors import DownloadError, MissingFileError, UserError

_BLOCK = 1 << 20


def digest(path: Path) -> str:
  """Returns a file's SHA-256 in hexadecimal, reading it in constant memory."""
  sha256 = hashlib.sha256()
  with path.open("rb") as file, progress(f"hashing {path.name}", path.stat().st_size, "B") as bar:
    while block := file.read(_BLOCK):
      sha256.update(block)
      bar.update(len(block))
  return sha256.hexdigest()


def stamp(path: Path) -> list[Any]:
  """Returns path, size and modification time, which tell a changed file without reading it."""
  status = path.stat()
  return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def new_folder(path: Path) -> Path:
  """Returns a new, empty folder in place of what has its name."""
  shutil.rmtree(path, ignore_errors=True)
  path.mkdir()
  return path


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
  """Yields a new folder that takes the place of `path` when all of it is written.

  An error leaves an earlier folder as it was.
  """
  path = path.absolute()
  partial, old = (path.with_name(f"{path.name}.{name}") for name in ("partial", "old"))
  try:
    yield new_folder(partial)
    if path.exists():
      path.rename(new_folder(old) / path.name)
    partial.rename(path)
  finally:
    shutil.rmtree(partial, ignore_errors=True)
    if path.exists():
      shutil.rmtree(old, ignore_errors=True)


def check_out(out: Path, marker: str) -> None:
  """Makes the parent of a folder to write; raises UserError where that cannot be.

  A folder with files is replaced only if `marker`, the name of one, says that it is an earlier one.
  """
  is_empty = out.is_dir() and not any(out.iterdir())
  if out.exists() and not (out / marker).exists() and not is_empty:
    raise UserError(f"--out={out} holds other files: choose a new folder")
  parent = next(path for path in out.absolute().parents if path.exists())
  if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
    raise UserError(f"--out={out} cannot be written to, because {parent} cannot: choose another")
  out.absolute().parent.mkdir(parents=True, exist_ok=True)


def require(folder: Path, *names: str, hint: str) -> Path:
  """Returns the first of `names` that the folder holds; `hint` ends the error if it has none."""
  for name in names:
    if (folder / name).is_file():
      return folder / name
  raise MissingFileError(f"{folder} has no {' and no '.join(names)}. {hint}")


def data_folder(data_dir: str, hint: str) -> Path:
  """Returns the user's folder, `~` allowed; `hint` ends the error if there is none."""
  if not data_dir:
    raise MissingFileError(f"--config.data_dir is empty. {hint}")
  path = Path(data_dir).expanduser()
  if not path.is_dir():
    raise MissingFileError(f"--config.data_dir={data_dir} is not a folder. {hint}")
  return path


def folder(
  data_dir: str, cache_dir: str, *, name: str, url: str, sha256: str, members: Sequence[str]
) -> Path:
  """Returns the folder with a data set's files: the user's, or a checked download.

  Args:
    data_dir: the user's folder; "" downloads the archive.
    cache_dir: where the download goes, `~` allowed.
    url, sha256: of the archive.
  """
  if data_dir:
    return data_folder(data_dir, f"Leave it empty to download {url}")
  raw = Path(cache_dir).expanduser() / name
  raw.mkdir(parents=True, exist_ok=True)
  # The processes of a run share their machine's cache: one downloads, the others wait.
  with locked(raw / "lock"):
    if not all((raw / member).exists() for member in members):
      archive = download(url, raw / url.rsplit("/", 1)[1], sha256=sha256)
      with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
          if (file_name := Path(member.filename).name) in members:  # without its folders
            with packed.open(member) as source, replacing(raw / file_name) as target:
              shutil.copyfileobj(source, target)
  return raw


def progress(description: str, total: int, unit: str) -> tqdm:
  """Returns a progress bar that shows on a terminal only."""
  return tqdm(
    desc=description, total=total, unit=unit, unit_scale=True, disable=None, leave=False, miniters=1
  )


def download(url: str, path: Path, *, sha256: str) -> Path:
  """Downloads `url` to `path` unless a file with the right hash is already there.

  The file appears whole or not at all.

  Raises:
    DownloadError: the server cannot be reached, or sends a file with another hash; names the url.
  """
  import pooch  # here, since it loads tqdm's notebook bar, which warns where ipywidgets is missing
  import requests

  with progress(f"downloading {path.name}", 1, "B") as bar:  # pooch sets the bar's total
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=_BLOCK, timeout=60)
    try:
      pooch.retrieve(url, f"sha256:{sha256}", path.name, path.parent, downloader=downloader)
    except requests.RequestException as error:
      raise DownloadError(
        f"Could not download {url} ({error}). Download it by other means, unpack it, and pass the "
        "folder as --config.data_dir=<folder>."
      ) from error
    except ValueError as error:  # of pooch, with both hashes
      raise DownloadError(
        f"{url}: the download is damaged or the archive has changed ({error}). Try again; if it "
        "persists, check the publisher's page."
      ) from error
  return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Makes the processes of a machine take turns; says so on stderr if this one has to wait."""
  lock = filelock.FileLock(path)
  try:
    lock.acquire(blocking=False)
  except filelock.Timeout:
    print(f"waiting for another process, which holds {path}", file=sys.stderr, flush=True)
    lock.acquire()
  try:
    yield
  finally:
    lock.release()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
  """Opens a new file that takes the place of `path` when all of it is written."""
  partial = path.with_name(f"{path.name}.part")
  with partial.open("wb") as file:
    yield file
  partial.replace(path)


def write(path: Any, content: str | bytes) -> None:
  """Writes a file, UTF-8, so that a reader sees the old content or all of the new, never a part.

  Args:
    path: a `Path`, or one of etils, which may be in a bucket.
    content: of the file.
  """
  partial = path.with_name(f"{path.name}.part")
  partial.write_bytes(content.encode() if isinstance(content, str) else content)
  partial.replace(path)


def write_json(path: Any, value: Any) -> None:
  """Writes a value as JSON; see `write`."""
  write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Any) -> Any:
  """Returns the value of a JSON file."""
  return json.loads(path.read_text())
