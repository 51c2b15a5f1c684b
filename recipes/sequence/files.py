"""Interaction files as other projects publish them, read strictly into one array and offsets.

    pairs    `user item` a line, as SASRec's ml-1m.txt and BERT4Rec's beauty.txt
    lines    `user item item ...` a line, as S3-Rec's Beauty.txt

Both are in the order of time within a user. The columns are `items` int32 `[interactions]`, the
users one after the other, and `offsets` int64 `[users + 1]`.
"""

from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays, files
from ..errors import UserError
from ..textfile import TextFile

_HINT = "Is the file complete? Get it again."


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
  path = files.require(files.data_folder(config.data_dir, hint), config.data_file, hint=hint)
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
    DamagedFileError: a line has not two whole numbers; names the file and the line.
  """
  file, users, items = TextFile(path, _HINT), [], []
  for line, numbers in file.numbers():
    if len(numbers) != 2:
      raise file.error(line, f"found {len(numbers)} fields, expected `user item`")
    users.append(numbers[0])
    items.append(numbers[1])
  return np.array(users, np.int64), np.array(items, np.int64)


def read_lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
  """Does the same as `read_pairs` for a file with a line per user.

  Raises:
    DamagedFileError: a line has no item, or a user has two lines; names the file and the line.
  """
  file, seen = TextFile(path, _HINT), set()
  users, items = [], []
  for line, numbers in file.numbers():
    if len(numbers) < 2:
      raise file.error(line, "found no item, expected `user item item ...`")
    user, *chosen = numbers
    if user in seen:
      raise file.error(line, f"user {user} appears a second time")
    seen.add(user)
    users += [user] * len(chosen)
    items += chosen
  return np.array(users, np.int64), np.array(items, np.int64)
