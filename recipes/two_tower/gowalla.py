"""Gowalla check-ins in LightGCN's split: `train.txt`, `test.txt` and, if there is one, `valid.txt`.

A user a line: `user item item ...`, numbers from 0. Without `valid.txt` a tenth of each user's
training items is held out for validation. The published split has no validation, and published
figures are of models that have learned from all that is not tested: `config.refit` does the same,
for a last run with settings and steps that were chosen on validation before. The check-ins are
SNAP's (Cho, Myers and Leskovec 2011); the split is the one of He et al. 2020, "LightGCN".
"""

from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import UserError
from ..tables import splitting
from ..textfile import TextFile
from . import splits

SOURCE = "https://github.com/kuandeng/LightGCN, Data/gowalla"
_HINT = (
  f"A line is `user item item ...`, and every pair is in the data once. Get the files again from "
  f"{SOURCE}, or repair the line."
)


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on.

  Raises:
    FileNotFoundError: no folder is given, or it lacks a file; says where they come from.
    ValueError: a state is to be selected where nothing is held out to select it on.
  """
  if config.refit and config.select:
    raise UserError(
      f"config.refit trains on the validation pairs too, and config.select={config.select!r} has "
      "nothing left to look at: pass --config.select= to test the state of the last step"
    )
  hint = f"Get train.txt and test.txt from {SOURCE}, and pass --config.data_dir=<their folder>."
  folder = files.data_folder(config.data_dir, hint)
  sources = {name: files.require(folder, f"{name}.txt", hint=hint) for name in ("train", "test")}
  if (folder / "valid.txt").is_file():
    sources["valid"] = folder / "valid.txt"
  return {
    "format": 1,
    "files": {name: files.stamp(path) for name, path in sources.items()},
    "split_seed": config.split_seed,
    "refit": config.refit,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; there are ids and nothing else."""
  source = {name: Path(stamp[0]) for name, stamp in settings["files"].items()}
  seen: dict[tuple[int, int], str] = {}
  read = {name: _read(path, seen) for name, path in source.items()}
  # Numbered in their order, so that nobody takes an id for a size.
  users, items = (np.unique(np.concatenate([pair[i] for pair in read.values()])) for i in (0, 1))
  pairs = {
    name: (_positions(users, user), _positions(items, item)) for name, (user, item) in read.items()
  }
  if "valid" not in pairs:
    user, item = pairs["train"]
    split = splitting.per_user(user, 0.1, settings["split_seed"])
    pairs["valid"] = user[split == 1], item[split == 1]
    pairs["train"] = user[split != 1], item[split != 1]
  if settings["refit"]:
    (user, item), (more_users, more_items) = pairs["train"], pairs["valid"]
    pairs["train"] = np.concatenate([user, more_users]), np.concatenate([item, more_items])
    pairs["valid"] = more_users[:0], more_items[:0]
  return splits.write(
    folder,
    pairs,
    (len(users), len(items)),
    {},
    {path.name: files.digest(path) for path in source.values()},
    seed=settings["split_seed"],
    may_be_empty=("valid",) if settings["refit"] else (),
  )


def _positions(names: np.ndarray, ids: np.ndarray) -> np.ndarray:
  return np.searchsorted(names, ids).astype(np.int32)


def _read(path: Path, seen: dict[tuple[int, int], str]) -> splits.Pairs:
  """Reads a file's pairs as int64; `seen` collects the place of each pair, through all files."""
  file, users, items = TextFile(path, _HINT), [], []
  for line, numbers in file.numbers():
    for item in numbers[1:]:
      user = numbers[0]
      if (user, item) in seen:
        place = seen[user, item]
        raise file.error(line, f"item {item} of user {user} is in {place} already")
      seen[user, item] = f"line {line} of {path.name}"
      users.append(user)
      items.append(item)
  if not users:
    raise file.error(1, "the file has no pair")
  return np.array(users, np.int64), np.array(items, np.int64)
