"""Source files of datasets: where they are, whether they are the right ones, how to get them."""

import hashlib
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes import arrays

_BLOCK = 1 << 20


def digest(path: Path, algorithm: str = "sha256") -> str:
  """Returns a file's hash in hexadecimal, reading it in constant memory."""
  found = hashlib.new(algorithm)
  with path.open("rb") as file, progress(f"hashing {path.name}", path.stat().st_size, "B") as bar:
    while block := file.read(_BLOCK):
      found.update(block)
      bar.update(len(block))
  return found.hexdigest()


def stamp(path: Path) -> list[Any]:
  """Returns what tells a changed file apart without reading it: path, size, modification time."""
  stat = path.stat()
  return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def require(folder: Path, *names: str, hint: str) -> Path:
  """Returns the first of `names` that the folder holds.

  Raises:
    FileNotFoundError: none is there; names the folder, the files and, through `hint`, the remedy.
  """
  for name in names:
    if (folder / name).is_file():
      return folder / name
  raise FileNotFoundError(f"{folder} has no {' and no '.join(names)}. {hint}")


def folder(
  data_dir: str, cache_dir: str, *, name: str, url: str, md5: str, members: Sequence[str]
) -> Path:
  """Returns the folder with a data set's files: the user's, or a checked download.

  Args:
    data_dir: the user's folder; "" downloads the archive.
    cache_dir: where the download goes, `~` allowed.
    name: of the folder in there.
    url, md5: of the archive.
    members: the files that are needed of it.

  Raises:
    FileNotFoundError: `data_dir` is given and does not exist.
    OSError, ValueError: as `download`.
  """
  if data_dir:
    path = Path(data_dir).expanduser()
    if not path.is_dir():
      raise FileNotFoundError(
        f"--config.data_dir={data_dir} is not a folder. Leave it empty to download {url}"
      )
    return path
  raw = Path(cache_dir).expanduser() / name
  raw.mkdir(parents=True, exist_ok=True)
  # The processes of a run share their machine's cache: one downloads, the others wait.
  with arrays.locked(raw / "lock"):
    if not all((raw / member).exists() for member in members):
      unpack(download(url, raw / url.rsplit("/", 1)[1], md5=md5), raw)
  return raw


def progress(description: str, total: int, unit: str) -> tqdm:
  """Returns a progress bar that shows on a terminal only."""
  return tqdm(
    desc=description, total=total, unit=unit, unit_scale=True, disable=None, leave=False, miniters=1
  )


def download(url: str, path: Path, *, md5: str) -> Path:
  """Downloads `url` to `path` unless a file with the right hash is already there.

  Raises:
    ValueError: what came back has another hash; the file is removed.
    OSError: the server cannot be reached; names the url.
  """
  if path.exists() and digest(path, "md5") == md5:
    return path
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".part")
  try:
    with urllib.request.urlopen(url, timeout=60) as response, partial.open("wb") as file:
      total = int(response.headers.get("Content-Length", 0))
      with progress(f"downloading {path.name}", total, "B") as bar:
        while block := response.read(_BLOCK):
          file.write(block)
          bar.update(len(block))
  except OSError as error:
    raise OSError(
      f"Could not download {url} ({error}). Download it by other means, unpack it, and pass the "
      "folder as --config.data_dir=<folder>."
    ) from error
  found = digest(partial, "md5")
  if found != md5:
    partial.unlink()
    raise ValueError(
      f"{url} has md5 {found}, expected {md5}: the download is damaged or the archive has changed. "
      "Try again; if it persists, check the publisher's page."
    )
  partial.replace(path)
  return path


def unpack(archive: Path, folder: Path) -> None:
  """Unpacks a zip archive's files, without their folders, into `folder`; each appears whole."""
  folder.mkdir(parents=True, exist_ok=True)
  with zipfile.ZipFile(archive) as packed:
    for member in packed.infolist():
      if member.is_dir():
        continue
      target = folder / Path(member.filename).name
      partial = target.with_name(target.name + ".part")
      partial.write_bytes(packed.read(member))
      partial.replace(target)
