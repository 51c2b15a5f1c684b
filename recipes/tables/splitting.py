"""The protocols that split users' items."""

import numpy as np


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
  # The number of the user's rows from here on.
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
