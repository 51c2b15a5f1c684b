"""Replaces files of a folder together: readers find all of one version, or all of the other."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence

_STAGE = ".replacing"  # inside the folder, whose parent may be read-only or another disk


@contextlib.contextmanager
def replacing(folder: pathlib.Path, names: Sequence[str]) -> Iterator[pathlib.Path]:
  """Yields an empty folder for new files, which then replace the old ones at one instant.

  To that end each name becomes a link through the link `current`, which leads to the old files and
  is renamed to lead to the new ones; then the names become plain files again. An error before that
  instant leaves the old files. After a kill readers find the old files or the new ones, and the
  next call replaces the links by them. Without symbolic links, as on some disks, only the first
  files of a folder can be written, one after the other.

  Args:
    folder: may hold other files, which stay. One process at a time replaces files in it; made if it
      does not exist, and removed after an error if it is empty.
    names: of all files to write.
  """
  is_new = not folder.exists()
  folder.mkdir(parents=True, exist_ok=True)
  stage = folder / _STAGE
  old, new, current = stage / "old", stage / "new", stage / "current"
  _finish(folder, names)
  try:
    new.mkdir(parents=True)
    yield new
    for name in names:
      with (new / name).open("rb") as file:
        os.fsync(file.fileno())
    old.mkdir()
    for name in names:
      if (folder / name).exists():
        _copy((folder / name).resolve(), old / name)
    try:
      _link(stage, current, "old")
    except OSError:  # a disk without symbolic links
      if any(os.path.lexists(folder / name) for name in names):
        raise
      for name in names:
        (new / name).rename(folder / name)
    else:
      for name in names:
        _link(stage, folder / name, f"{_STAGE}/current/{name}")
      _link(stage, current, "new")
  finally:
    _finish(folder, names)
    if is_new and not any(folder.iterdir()):
      folder.rmdir()


def _copy(path: pathlib.Path, copy: pathlib.Path) -> None:
  try:
    os.link(path, copy)
  except OSError:  # on another disk, or one without hard links
    shutil.copy2(path, copy)


def _link(stage: pathlib.Path, path: pathlib.Path, target: str) -> None:
  """Puts a symbolic link in the place of a file or a link, in one step."""
  (stage / "link").symlink_to(target)
  (stage / "link").replace(path)


def _finish(folder: pathlib.Path, names: Sequence[str]) -> None:
  """Replaces links by the files that they lead to, and removes what `replacing` has made."""
  stage = folder / _STAGE
  current = stage / "current"
  if stage.is_symlink():
    stage.unlink()
  elif stage.exists():
    for name in names:
      path = folder / name
      if path.is_symlink() and os.readlink(path) == f"{_STAGE}/current/{name}":
        if path.exists():
          (current / name).replace(path)
        else:
          path.unlink()  # there is no old file
    current.unlink(missing_ok=True)
    shutil.rmtree(stage)
