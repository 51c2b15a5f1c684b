"""The protocols that split users' items, and the columns that a data set becomes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays
from ..errors import UserError

SPLITS = ("train", "valid", "test")
Pairs = tuple[np.ndarray, np.ndarray]  # users and items of the same length


def k_core(user: np.ndarray, item: np.ndarray, k: int) -> np.ndarray:
  """Returns the rows left when users and items with fewer than k rows are dropped, repeatedly.

  What is left does not depend on the order of dropping.
  """
  kept = np.arange(len(user))
  while True:
    frequent = np.ones(len(kept), bool)
    for ids in (user[kept], item[kept]):
      frequent &= np.bincount(ids, minlength=1)[ids] >= k
    if frequent.all():
      return kept
    kept = kept[frequent]


def per_user(user: np.ndarray, fraction: float, seed: int) -> np.ndarray:
  """Returns each row's split, 0 train, 1 valid, 2 test: at random within each user.

  RecBole's rounding (recbole/data/dataset/dataset.py, `_calcu_split_ids`): valid and test get
  `int(fraction * rows of the user)` rows each, and train the rest. A user with fewer than
  `1 / fraction` rows gets one row each in test and, while train keeps more than one, in valid.
  """
  shuffled = np.random.default_rng(seed).permutation(len(user))
  order = shuffled[np.argsort(user[shuffled], kind="stable")]
  counts = np.bincount(user, minlength=1)
  place = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
  each = (fraction * counts).astype(np.int64)
  small = (counts > 1) & (each == 0)
  test = each + small
  valid = each + (small & (counts > 2))
  left = np.repeat(counts, counts) - place  # how many of the user's rows come from here on
  split = np.empty(len(user), np.int8)
  split[order] = np.where(
    left <= np.repeat(test, counts), 2, np.where(left <= np.repeat(test + valid, counts), 1, 0)
  )
  return split


def write(
  folder: Path,
  pairs: Mapping[str, Pairs],
  sizes: tuple[int, int],
  features: Mapping[str, Mapping[str, tuple[np.ndarray, int]]],
  sha256: Mapping[str, str],
  *,
  seed: int,
  may_be_empty: Sequence[str] = (),
) -> dict[str, Any]:
  """Writes a data set's columns and returns its meta.

  `user`, `item` int32 hold the three splits one after another, each ordered by user, and a user's
  rows in random order; `<split>_offsets` int64 `[users + 1]` say where each user's begin.
  `place` int32 counts a user's rows of a split from 0. Features are `user_<name>` and
  `item_<name>`, int32 `[users or items]` or, of bags, `[..., valency]`.

  Args:
    folder: where to.
    pairs: by split.
    sizes: numbers of users and items.
    features: `{"user" or "item": {name: (ids, vocabulary size)}}`.
    sha256: hashes of the sources by name.
    seed: of the order of a user's rows.
    may_be_empty: splits that need no pairs.

  Raises:
    ValueError: a split is empty, or holds a pair twice.
  """
  rows = sum(len(pairs[split][0]) for split in SPLITS)
  columns = {
    name: arrays.column(folder, name, (rows,), np.int32) for name in ("user", "item", "place")
  }
  generator, start, splits = np.random.default_rng(seed), 0, {}
  for split in SPLITS:
    user, item = pairs[split]
    if not len(user) and split not in may_be_empty:
      raise UserError(f"the {split} split is empty: the data set is too small for it")
    keys = np.sort(user.astype(np.int64) * sizes[1] + item)
    if (again := keys[1:][keys[1:] == keys[:-1]]).size:
      who, what = divmod(int(again[0]), sizes[1])
      raise UserError(f"user {who} has item {what} twice in the {split} split: keep it once")
    order = generator.permutation(len(user))
    order = order[np.argsort(user[order], kind="stable")]
    counts = np.bincount(user, minlength=sizes[0])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    stop = start + len(user)
    columns["user"][start:stop], columns["item"][start:stop] = user[order], item[order]
    columns["place"][start:stop] = np.arange(len(user)) - np.repeat(offsets[:-1], counts)
    arrays.column(folder, f"{split}_offsets", offsets.shape, np.int64)[:] = start + offsets
    splits[split], start = (start, stop), stop
  described: dict[str, list[dict[str, Any]]] = {"user": [], "item": []}
  for side, owned in features.items():
    for name, (ids, size) in owned.items():
      arrays.column(folder, f"{side}_{name}", ids.shape, np.int32)[:] = ids
      valency = ids.shape[1] if ids.ndim == 2 else 1
      described[side].append({"name": name, "vocabulary_size": size, "valency": valency})
  return {
    "splits": splits,
    "users": sizes[0],
    "items": sizes[1],
    "features": described,
    "sha256": dict(sha256),
  }
