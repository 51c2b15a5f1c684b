"""The columns that a data set of users and items becomes."""

import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays
from ..errors import UserError
from ..tables.settings import SPLITS

Pairs = tuple[np.ndarray, np.ndarray]  # users and items of the same length


def column_name(side: str, feature: str) -> str:
  """Returns the name of the column of a feature of "user" or "item", which is one of a file.

  >>> column_name("item", "price/unit")
  'item_price%2Funit'
  """
  return f"{side}_{urllib.parse.quote(feature, safe=' ')}"


def write(
  folder: Path,
  pairs: Mapping[str, Pairs],
  sizes: tuple[int, int],
  features: Mapping[str, Mapping[str, tuple[np.ndarray, int]]],
  sha256: Mapping[str, str],
  *,
  seed: int,
  may_be_empty: Sequence[str] = (),
  may_repeat: Sequence[str] = (),
  ordered: bool = False,
) -> dict[str, Any]:
  """Writes a data set's columns and returns its meta.

  `user`, `item` int32 hold the three splits one after another, each ordered by user, and a user's
  rows in random order, or if `ordered` in that of `pairs`; `<split>_offsets` int64 `[users + 1]`
  say where each user's begin. `place` int32 counts a user's rows of a split from 0. Features are
  `user_<name>` and `item_<name>`, int32 `[users or items]` or, of bags, `[..., valency]`.

  Args:
    folder: where to.
    pairs: by split.
    sizes: numbers of users and items.
    features: `{"user" or "item": {name: (ids, vocabulary size)}}`.
    sha256: hashes of the sources by name.
    seed: of the order of a user's rows.
    may_be_empty: splits that need no pairs.
    may_repeat: splits that may hold a pair more than once.
    ordered: whether pairs are in the order of time, in which a user's rows then stay.

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
    if (again := keys[1:][keys[1:] == keys[:-1]]).size and split not in may_repeat:
      who, what = divmod(int(again[0]), sizes[1])
      raise UserError(f"user {who} has item {what} twice in the {split} split: keep it once")
    order = np.arange(len(user)) if ordered else generator.permutation(len(user))
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
      arrays.column(folder, column_name(side, name), ids.shape, np.int32)[:] = ids
      valency = ids.shape[1] if ids.ndim == 2 else 1
      described[side].append({"name": name, "vocabulary_size": size, "valency": valency})
  return {
    "splits": splits,
    "users": sizes[0],
    "items": sizes[1],
    "features": described,
    "ordered": ordered,
    "sha256": dict(sha256),
  }
