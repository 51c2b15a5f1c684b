"""The protocols that split rows, and users' items, into train, valid and test."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .source import File, Stage, identifier, literal


def by_content(
  stage: Stage,
  files: Sequence[File],
  shares: tuple[float, float],
  *,
  seed: int,
  on: str = "",
) -> dict[Path, np.ndarray]:
  """Returns the split of each row by file, int8: by an MD5 of its values.

  A row keeps its split wherever it is, in a file of another name or beside other rows, and equal
  rows have one. Hashed are the seed and the values that are not missing, in the order of the names
  of their columns, with a unit separator (0x1F) between two; the first eight hexadecimal digits,
  as a fraction, are compared with the shares.

  Args:
    stage: with the engine.
    files: the rows.
    shares: of the rows in valid and in test.
    seed: of the hash.
    on: a column whose equal values stay together; "" takes all columns of the file.
  """
  parts: dict[Path, np.ndarray] = {}
  valid, test = shares
  # One scan of files that are alike takes half the time of a union of scans.
  for _, alike in itertools.groupby(files, lambda file: dict(file.types)):
    group = list(alike)
    names = [on] if on else sorted(group[0].names)
    values = ", ".join(_as_text(name, group[0].types[name]) for name in names)
    stored = [file.stored(stage)[0] for file in group]
    # MD5 and not the engine's hash, which its next version may change.
    found = stage.engine.execute(
      f"SELECT CASE WHEN hash < {literal(_bound(test))} THEN 2 "
      f"WHEN hash < {literal(_bound(valid + test))} THEN 1 ELSE 0 END::TINYINT AS part FROM "
      f"(SELECT substr(md5(concat_ws(chr(31), {literal(seed)}, {values})), 1, 8) AS hash "
      f"FROM read_parquet([{', '.join(map(literal, stored))}]))"
    )
    part = found.to_arrow_table()["part"].to_numpy()
    sizes = [pq.read_metadata(path).num_rows for path in stored]
    pieces = np.split(part, np.cumsum(sizes)[:-1])
    parts |= {file.path: piece for file, piece in zip(group, pieces, strict=True)}
  return parts


def _bound(share: float) -> str:
  """Returns the least digits of a hash that are not in a share of all; "g" is behind all."""
  number = round(share * 2**32)
  return f"{number:08x}" if number < 2**32 else "g"


def _as_text(name: str, stored: pa.DataType) -> str:
  """Returns SQL that writes a value as text in the same way on every engine."""
  column = identifier(name)
  if pa.types.is_floating(stored):
    return f"TRY_CAST(TRY_CAST({column} AS DECIMAL(38, 9)) AS VARCHAR)"
  if pa.types.is_timestamp(stored):
    return f"CAST(epoch_us({column}) AS VARCHAR)"
  if pa.types.is_binary(stored) or pa.types.is_large_binary(stored):
    return f"hex({column})"
  return column if pa.types.is_string(stored) else f"CAST({column} AS VARCHAR)"


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
  place = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
  part = lambda share, least: np.where(
    (share > 0) & (counts >= least) & (share * counts < 1), 1, (share * counts).astype(np.int64)
  )
  test, valid = part(test_fraction, 2), part(fraction, 3)
  left = np.repeat(counts, counts) - place  # how many of the user's rows come from here on
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
  total = np.repeat(counts, counts)
  left = total - (np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts))
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
