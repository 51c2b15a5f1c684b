"""Interaction files as other projects publish them, read strictly into one array and offsets.

    pairs    `user item` a line, as SASRec's ml-1m.txt and BERT4Rec's beauty.txt
    lines    `user item item ...` a line, as S3-Rec's Beauty.txt

Both are in the order of time within a user. The columns are `items` int32 `[interactions]`, the
users one after the other, and `offsets` int64 `[users + 1]`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes import arrays, files
from recipes.errors import DamagedFileError, UserError


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on.

  Raises:
    ValueError: the layout is unknown.
    FileNotFoundError: the file is missing; says where it comes from.
  """
  if config.layout not in ("pairs", "lines"):
    raise UserError(f"unknown layout {config.layout!r}: choose pairs or lines")
  hint = (
    f"It is not downloaded because the data's licence does not allow it to be passed on: get it "
    f"from {config.source}, and pass --config.data_dir=<folder>."
  )
  path = files.require(files.given(config.data_dir, hint), config.data_file, hint=hint)
  return {
    "format": 1,
    "file": files.stamp(path),
    "layout": config.layout,
    "counts": list(config.counts),
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; items and users are numbered in the order of their published numbers.

  Raises:
    ValueError: a line is damaged, or the file has other counts than the published ones.
  """
  path = Path(settings["file"][0])
  users, items = (read_pairs if settings["layout"] == "pairs" else read_lines)(path)
  _, user = np.unique(users, return_inverse=True)
  names, item = np.unique(items, return_inverse=True)
  lengths = np.bincount(user)
  counts = [len(lengths), len(names), len(items)]
  if settings["counts"] and counts != settings["counts"]:
    raise UserError(
      f"{path} has {counts[0]:,} users, {counts[1]:,} items and {counts[2]:,} interactions; the "
      f"published file has {', '.join(f'{n:,}' for n in settings['counts'])}. Get the file again, "
      "or pass --config.counts='()' for another one."
    )
  by_user = np.argsort(user, kind="stable")
  arrays.column(folder, "items", item.shape, np.int32)[:] = item[by_user]
  offsets = arrays.column(folder, "offsets", (len(lengths) + 1,), np.int64)
  offsets[:] = np.concatenate([[0], np.cumsum(lengths)])
  return {"num_items": len(names), "sha256": {path.name: files.digest(path)}}


def read_pairs(path: Path) -> tuple[np.ndarray, np.ndarray]:
  """Returns the numbers of users and items, int64 `[interactions]`, in the file's order.

  Raises:
    ValueError: a line has not two whole numbers; names the file and the line.
  """
  users, items = [], []
  for number, fields in _records(path):
    if len(fields) != 2:
      raise _error(path, number, f"found {len(fields)} fields, expected `user item`")
    users.append(fields[0])
    items.append(fields[1])
  return np.array(users, np.int64), np.array(items, np.int64)


def read_lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
  """As `read_pairs`, of a file with a line per user.

  Raises:
    ValueError: a line has no item, or a user has two lines; names the file and the line.
  """
  seen: set[int] = set()
  users, items = [], []
  for number, (user, *bought) in _records(path):
    if not bought:
      raise _error(path, number, "found no item, expected `user item item ...`")
    if user in seen:
      raise _error(path, number, f"user {user} appears a second time")
    seen.add(user)
    users += [user] * len(bought)
    items += bought
  return np.array(users, np.int64), np.array(items, np.int64)


def _records(path: Path) -> Iterator[tuple[int, list[int]]]:
  number, bar = 0, files.progress(f"reading {path.name}", path.stat().st_size, "B")
  with path.open(encoding="ascii", errors="replace") as file, bar:
    for number, line in enumerate(file, start=1):
      fields = line.split()
      numbers = [value for field in fields if (value := files.whole(field)) is not None]
      if not fields or len(numbers) < len(fields):
        found = line.strip()[:40]
        raise _error(path, number, f"found {found!r}, expected whole numbers up to 2**63 - 1")
      yield number, numbers
      bar.update(len(line))
  if number == 0:
    raise _error(path, 1, "the file is empty")


def _error(path: Path, number: int, what: str) -> DamagedFileError:
  return DamagedFileError(f"{path}, line {number}: {what}. Is the file complete? Get it again.")
