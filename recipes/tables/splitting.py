"""The splits of rows as a file, and the protocols that split users' items."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .source import Batch, Rows
from .values import SPLITS


def write_splits(
  rows: Rows,
  folder: Path,
  names: Mapping[str, str],
  place: np.ndarray | None = None,
  split: np.ndarray | None = None,
) -> None:
  """Writes the split of every row to `split.parquet`, so that other models can be fitted to them.

  The columns are `file`, its name, `row`, the number of the row in its file, and `part`, "train",
  "valid" or "test"; rows that were left out are not there.

  Args:
    names: of the files.
    place, split: of rows, both `[N]`; None takes all rows as they are split.
  """
  files = [names[path] for path in rows.source.all_files]
  schema = pa.schema(
    {"file": pa.dictionary(pa.int32(), pa.string()), "row": pa.int64(),
     "part": pa.dictionary(pa.int8(), pa.string())}
  )  # fmt: skip
  columns = [next(iter(rows.columns))]
  given: Any = Batch({}, place, split)  # type: ignore[arg-type]
  batches = rows.batches(columns) if place is None else [given]
  with pq.ParquetWriter(folder / "split.parquet", schema) as writer:
    for batch in batches:
      file, number = rows.numbers_of(batch.place)
      of_file = pa.DictionaryArray.from_arrays(file.astype(np.int32), files)
      part = pa.DictionaryArray.from_arrays(batch.split.astype(np.int8), [*SPLITS])
      writer.write_table(pa.table([of_file, number, part], schema=schema))


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


def per_user(
  user: np.ndarray, fraction: float, seed: int, *, test_fraction: float | None = None
) -> np.ndarray:
  """Returns each row's split, 0 train, 1 valid, 2 test: at random within each user.

  RecBole's rounding (recbole/data/dataset/dataset.py, `_calcu_split_ids`): valid and test get
  `int(fraction * rows of the user)` rows each, and train the rest. A user with fewer than
  `1 / fraction` rows gets one row each in test and, while train keeps more than one, in valid.

  Args:
    user: of each row.
    fraction: of a user's rows in valid, and in test; 0 leaves the split empty.
    seed: of the order.
    test_fraction: in test, where it differs.
  """
  test_fraction = fraction if test_fraction is None else test_fraction
  shuffled = np.random.default_rng(seed).permutation(len(user))
  order = shuffled[np.argsort(user[shuffled], kind="stable")]
  counts = np.bincount(user, minlength=1)
  part = lambda share, least: np.where(
    (share > 0) & (counts >= least) & (share * counts < 1), 1, (share * counts).astype(np.int64)
  )
  test, valid = part(test_fraction, 2), part(fraction, 3)
  # How many of the user's rows come from here on.
  left = np.repeat(np.cumsum(counts), counts) - np.arange(len(user))
  split = np.empty(len(user), np.int8)
  split[order] = np.where(
    left <= np.repeat(test, counts), 2, np.where(left <= np.repeat(test + valid, counts), 1, 0)
  )
  return split


def leave_one_out(user: np.ndarray) -> np.ndarray:
  """Returns each row's split: 2 for each user's last row, 1 for the one before, 0 for the rest.

  Args:
    user: of each row, the rows in the order of time; users with fewer than three rows train only.
  """
  order = np.argsort(user, kind="stable")
  counts = np.bincount(user, minlength=1)
  total, ends = np.repeat(counts, counts), np.repeat(np.cumsum(counts), counts)
  left = ends - np.arange(len(user))
  split = np.zeros(len(user), np.int8)
  split[order] = np.where((total >= 3) & (left <= 2), 3 - left, 0)
  return split


def first_of_pairs(
  user: np.ndarray, item: np.ndarray, split: np.ndarray | None = None
) -> np.ndarray:
  """Returns whether each row is the first with its user and item, bool `[N]`.

  Args:
    user, item: of each row.
    split: rows of different splits do not repeat each other; None compares all.
  """
  key = user.astype(np.int64) * (int(item.max(initial=0)) + 1) + item
  if split is not None:
    key = key * 3 + split
  first = np.zeros(len(key), bool)
  first[np.unique(key, return_index=True)[1]] = True
  return first
