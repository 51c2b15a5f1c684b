"""Source files of data sets: their folders, hashes, downloads, locks and replacement."""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import filelock
from tqdm import tqdm

from .errors import DamagedFileError, DownloadError, MissingFileError, UserError

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


def inside(folder: Path, name: str) -> Path:
  """Returns the path of a folder's file by a name that somebody else has written.

  Raises DamagedFileError for one that leads out of the folder, or through a link.
  """
  path = PurePosixPath(name)
  if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
    raise DamagedFileError(f"{folder} names {name!r}, which is not the name of a file in it")
  for parent in list(path.parents)[:-1]:
    if (folder / parent).is_symlink():
      raise DamagedFileError(f"{folder / parent} is a symbolic link, which is not followed")
  return folder / path


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
  """Opens a file of a run, an export or a cache, whoever wrote the folder.

  A symbolic link, a device or a pipe, which could lead elsewhere or never end, is a
  DamagedFileError; what does not exist is a MissingFileError.
  """
  try:
    # Without O_NONBLOCK the call waits for the other end of a pipe.
    number = _open(path, os.O_RDONLY | os.O_NONBLOCK)
  except (FileNotFoundError, NotADirectoryError) as error:
    raise MissingFileError(f"{path} is missing") from error
  with os.fdopen(number, "rb", buffering=0) as file:
    if not stat.S_ISREG(os.fstat(number).st_mode):
      raise DamagedFileError(f"{path} is no regular file")
    yield file


def read(path: Path, *, at_most: int = 64 << 20) -> bytes:
  """Returns the content of a file; errors are as of `opened`, or it has too many bytes."""
  with opened(path) as file:
    content = file.read(at_most + 1) if os.fstat(file.fileno()).st_size <= at_most else None
  if content is None or len(content) > at_most:
    raise DamagedFileError(f"{path} has more than {at_most:,} bytes")
  return content


def names(folder: Path) -> list[str]:
  """Returns what a folder holds at any depth, relative to it, but folders; sorted."""
  paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
  return sorted(path.relative_to(folder).as_posix() for path in paths)


def copy_folder(source: Path, target: Path) -> None:
  """Copies the regular files of a folder into a new one; errors are as of `opened`."""
  if source.is_symlink():
    raise DamagedFileError(f"{source} is a symbolic link, which is not followed")
  new_folder(target)
  for name in names(source):
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    with opened(inside(source, name)) as file, (target / name).open("xb") as copy:
      shutil.copyfileobj(file, copy, _BLOCK)


def new_folder(path: Path) -> Path:
  """Returns a new, empty folder in place of what has its name; a link is removed, not followed."""
  if path.is_symlink() or path.is_file():
    path.unlink()
  shutil.rmtree(path, ignore_errors=True)
  path.mkdir()
  return path


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
  """Yields a new folder that takes the place of `path` when all of it is written.

  Nothing is left of it after an error. A folder cannot be renamed over another: between two renames
  `path` is missing, also after a kill there, and `latest` finds the earlier folder.
  """
  path = path.absolute()
  partial, old = path.with_name(f"{path.name}.partial"), _earlier(path)
  try:
    yield new_folder(partial)
    if os.path.lexists(path):
      path.rename(new_folder(old.parent) / old.name)
    partial.rename(path)
  except BaseException:
    if not os.path.lexists(path) and old.is_dir():
      old.rename(path)
    shutil.rmtree(partial, ignore_errors=True)
    raise
  shutil.rmtree(old.parent, ignore_errors=True)


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


def latest(path: Path) -> Path:
  """Returns a folder that `replacing_folder` writes, or the earlier one while there is none."""
  return _earlier(path) if not os.path.lexists(path) and _earlier(path).is_dir() else path


def _earlier(path: Path) -> Path:
  return path.with_name(f"{path.name}.removed") / "old"


def append(path: Path) -> IO[str]:
  """Opens a file to add lines to, which a link does not lead elsewhere."""
  return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def _open(path: Path, flags: int) -> int:
  try:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
  except OSError as error:
    if error.errno != errno.ELOOP:
      raise
    raise DamagedFileError(f"{path} is a symbolic link, which is not followed") from error


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


def acquire(path: Path, *, wait: bool) -> filelock.BaseFileLock:
  """Takes a lock among the processes of a machine; a process that ends loses its locks.

  Raises filelock.Timeout if another process holds it and `wait` is False.
  """
  lock = filelock.FileLock(path)
  try:
    lock.acquire(blocking=wait)
  except OSError as error:
    if error.errno != errno.ELOOP:
      raise
    raise UserError(f"the lock file {path} is a symbolic link: remove it") from error
  return lock


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Makes the processes of a machine take turns; says so on stderr if this one has to wait."""
  try:
    lock = acquire(path, wait=False)
  except filelock.Timeout:
    print(f"waiting for another process, which holds {path}", file=sys.stderr, flush=True)
    lock = acquire(path, wait=True)
  try:
    yield
  finally:
    lock.release()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
  """Opens a new file that takes the place of `path` when all of it is on the disk.

  A link that has the name of the new file is removed, not followed.
  """
  partial = path.with_name(path.name + ".part")
  partial.unlink(missing_ok=True)
  try:
    with partial.open("xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def write(path: Path, content: str | bytes) -> None:
  """Writes a new file, UTF-8, in place of what has its name; a link is replaced, not followed."""
  with replacing(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)
