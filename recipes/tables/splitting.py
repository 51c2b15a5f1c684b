"""The protocols that split rows, and users' items, into train, valid and test."""

import hashlib
from concurrent import futures

import numpy as np
import pyarrow as pa

from .source import File, Stage, literal, scan
from .values import indices_of


def by_content(
  stage: Stage, file: File, shares: tuple[float, float], seed: int, limit: int = 0
) -> futures.Future[np.ndarray]:
  """Returns the split of each row of a file, int8 `[N]`, once known: by an MD5 of its values.

  A row keeps its split wherever it is, in a file of another name or beside other rows, and equal
  rows have one. The hash covers the seed and the values that are not missing, in the order of the
  column names, joined by a unit separator (0x1F). Its first eight hexadecimal digits, read as a
  fraction, are compared with the shares.

  Args:
    stage: with the engine, which works in the background.
    file: the rows.
    shares: of the rows in valid and in test.
    seed: of the hash.
    limit: of the rows; 0 takes all.
  """
  path = file.stored(stage, limit).path
  places = {name: f"v{place}" for place, name in enumerate(file.names)}  # equal in any case there
  values = ", ".join(_as_text(places[name], file.types[name]) for name in sorted(file.names))
  # MD5 and not the engine's hash, which its next version may change.
  query = (
    f"SELECT (hash < {_bound(sum(shares))})::TINYINT + (hash < {_bound(shares[1])})::TINYINT "
    f"AS part FROM (SELECT substr(md5(concat_ws(chr(31), {literal(seed)}, {values})), 1, 8) "
    f"AS hash FROM {scan(path)} AS rows({', '.join(places.values())}))"
  )
  return stage.background.submit(lambda: stage.table(query)["part"].to_numpy())


def by_value(texts: pa.Array, shares: tuple[float, float], seed: int) -> np.ndarray:
  """Returns the split of each text, int8 `[N]`: as `by_content`, of rows with this value alone."""
  encoded = texts.dictionary_encode()
  contents = (f"{seed}\x1f{text or ''}" for text in [*encoded.dictionary.to_pylist(), None])
  digits = [int(hashlib.md5(content.encode()).hexdigest()[:8], 16) for content in contents]
  hashed = np.array(digits)[indices_of(encoded)] / 2**32
  return (hashed < sum(shares)).astype(np.int8) + (hashed < shares[1])


def _bound(share: float) -> str:
  """Returns the exclusive upper bound of hashes in a share; "g" sorts after every hash."""
  number = round(share * 2**32)
  return literal(f"{number:08x}" if number < 2**32 else "g")


def _as_text(column: str, stored: pa.DataType) -> str:
  """Returns SQL that writes the value of a column as text; floats by their shortest digits."""
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
