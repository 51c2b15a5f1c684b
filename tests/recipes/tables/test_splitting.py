"""The protocols of splits, by hand and by their properties."""

import numpy as np
import scipy.stats
from cases import each

from recipes.tables import splitting


def test_k_core_by_hand():
  # User 2 falls with item 9, which leaves user 1 one row short, and then item 8.
  user = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
  item = np.array([5, 6, 7, 5, 6, 8, 9, 8, 5, 5, 6, 7])
  assert splitting.k_core(user, item, 2).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
  assert splitting.k_core(user, item, 3).tolist() == []
  assert splitting.k_core(user[:0], item[:0], 3).tolist() == []


def test_k_core_leaves_a_core():
  draw = np.random.default_rng(0)
  user, item = draw.integers(0, 60, 600), draw.zipf(1.6, 600) % 80
  kept = splitting.k_core(user, item, 4)
  assert 0 < len(kept) < 600
  for ids in (user[kept], item[kept]):
    assert np.unique(ids, return_counts=True)[1].min() >= 4


def test_rounding_is_recboles():
  cases = [
    (10, 1, 1),
    (19, 1, 1),
    (20, 2, 2),
    (834, 83, 83),
    (9, 1, 1),
    (3, 1, 1),
    (2, 0, 1),
    (1, 0, 0),
  ]

  def check(rows, valid, test):
    user = np.concatenate([np.full(rows, 4), np.full(30, 1)])
    split = splitting.per_user(user, 0.1, seed=0)
    assert np.bincount(split[:rows], minlength=3).tolist() == [rows - valid - test, valid, test]
    assert np.bincount(split[rows:]).tolist() == [24, 3, 3]

  each(cases, check)


def test_the_split_is_random_within_a_user_and_repeatable():
  user = np.repeat(np.arange(300), 20)
  split = splitting.per_user(user, 0.1, seed=0)
  np.testing.assert_array_equal(split, splitting.per_user(user, 0.1, seed=0))
  assert (split != splitting.per_user(user, 0.1, seed=1)).any()
  place = np.tile(np.arange(20), 300)
  tested = np.bincount(place[split == 2], minlength=20)
  assert scipy.stats.chisquare(tested).pvalue > 1e-3


def test_valid_and_test_may_differ():
  user = np.repeat(np.arange(3), 20)
  split = splitting.per_user(user, 0.0, seed=0, test_fraction=0.25)
  assert np.bincount(split, minlength=3).tolist() == [45, 0, 15]


def test_leave_one_out_by_hand():
  user = np.array([7, 3, 7, 7, 3, 3, 3, 5, 5])
  assert splitting.leave_one_out(user).tolist() == [0, 0, 1, 2, 0, 1, 2, 0, 0]


def test_first_of_pairs_by_hand():
  user, item = np.array([1, 1, 2, 1, 2]), np.array([0, 1, 0, 0, 0])
  assert splitting.first_of_pairs(user, item).tolist() == [True, True, True, False, False]
  split = np.array([0, 0, 0, 0, 1])
  assert splitting.first_of_pairs(user, item, split).tolist() == [True, True, True, False, True]
  user, item = np.zeros(2, np.int32), np.array([0, 1])  # keys beside each other
  assert splitting.first_of_pairs(user, item, np.array([2, 0])).all()
