"""Kinds of columns: dense arrays, lists of lists, and `embed`'s own."""

import numpy as np
import pytest

import embed
from embed.transforms import Bucketized, Vocabulary

GENRES = Vocabulary(["drama", "comedy"])


def test_dense():
  cases = [
    ("comedy", 1),
    (["drama", None], [0, -1]),
    (np.array(["comedy", ""]), [1, -1]),
    (np.array([b"comedy", b""]), [1, -1]),
    (np.array(["comedy", ""], np.dtypes.StringDType()), [1, -1]),
    (np.array([["comedy"], [None]], object), [[1], [-1]]),
    ([], []),
    ([None], [-1]),
  ]
  for column, expected in cases:
    ids = GENRES(column)
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.tolist()) == (np.int32, expected)


def test_lists_of_lists_are_bags_whatever_their_lengths():
  """Or the kind of a feature would depend on the batch."""
  frame = np.empty(2, object)
  frame[:] = [np.array(["drama"]), np.array(["comedy", "drama"])]
  for column in ([["drama"], ["comedy", "drama"]], [("drama",), np.array(["comedy", "drama"])]):
    assert GENRES(column).values.tolist() == [[0, -1], [1, 0]]
  assert GENRES(frame).values.tolist() == [[0, -1], [1, 0]]
  assert GENRES([["drama"], ["comedy"]]).values.tolist() == [[0], [1]]
  assert GENRES([[], None]).values.tolist() == [[-1], [-1]]
  found = Bucketized([0.7])([np.array([0.7, 1], np.float32), np.array([], np.float64)])
  assert found.values.tolist() == [[1, 1], [-1, -1]]
  with pytest.raises(ValueError, match=r"holds lists and None; write \[value\]"):
    GENRES([["drama"], "comedy"])
  with pytest.raises(ValueError, match="must be flat"):
    GENRES([[["drama"]]])


def test_bags_keep_their_kind():
  padded = GENRES(embed.Padded([["drama", ""], ["comedy", "drama"]]))
  assert padded.values.tolist() == [[0, -1], [1, 0]]
  ragged = GENRES(embed.Ragged(["drama", "comedy", "behind"], [0, 0, 2], max_valency=2))
  assert ragged.values.tolist() == [0, 1, -1]
  assert ragged.max_valency == 2
  sparse = GENRES(embed.Sparse([[1, 0]], ["comedy"], (2, 3)))
  assert sparse.values.tolist() == [1]
  assert sparse.dense_shape == (2, 3)
  for bad in ([1, 2], [0, 2, 1], [0, 4]):
    with pytest.raises(ValueError, match="row_splits must start at 0"):
      GENRES(embed.Ragged(["drama", "comedy"], bad))


def test_max_valency_keeps_shapes():
  column = Vocabulary(["drama", "comedy"], max_valency=3)
  lists = [["drama"], ["comedy", "drama"]]
  ragged = embed.Ragged(["drama", "comedy", "drama", "behind"], [0, 1, 3])
  sparse = embed.Sparse([[0, 0], [1, 0], [1, 1]], ["drama", "comedy", "drama"], (2, 2))
  for each in (lists, ragged, sparse):
    assert column(each).values.tolist() == [[0, -1, -1], [1, 0, -1]]
  with pytest.raises(ValueError, match="Bag 1 is longer than max_valency=1"):
    Vocabulary(["drama", "comedy"], max_valency=1)(lists)
  cut = Vocabulary(["drama", "comedy"], max_valency=1, truncate=True)
  assert cut(lists).values.tolist() == [[0], [1]]
