"""Crosses: every tuple of values, by the published hash."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_features import bags, cross

import embed
from embed.transforms import Bucketized, Crossed


def test_crossed():
  """The example of `tf.feature_column.crossed_column`, and padding in it."""
  column = Crossed(["x", "y"], num_buckets=1000)
  found = column([["a"], ["b", "c"], ["a", "b"], []], [["d"], ["e"], None, ["d"]])
  assert bags(found) == [
    [cross("a", "d") % 1000],
    [cross("b", "e") % 1000, cross("c", "e") % 1000],
    [],
    [],
  ]
  dense = column(np.array(["a", ""]), np.array([5, 5]))
  assert dense.dtype == np.int32
  assert dense.tolist() == [cross("a", 5) % 1000, -1]
  assert Crossed(["x", "y"], 1000, salt=3)("a", 5) == cross("a", 5, salt=3) % 1000
  assert column("a", "b") != column("b", "a")


def test_crossed_with_a_column():
  age = Bucketized([18, 65], key="age")
  found = Crossed(["zip", age], 1000)(["8001", "8002"], [17, 80])
  assert found.tolist() == [cross("8001", 0) % 1000, cross("8002", 2) % 1000]
  with pytest.raises(ValueError, match="key 'age': nan lies in no bucket"):
    Crossed(["zip", age], 1000)(["8001"], [np.nan])
  with pytest.raises(ValueError, match=r"different shapes: \{'x': \(1,\), 'y': \(2,\)\}"):
    Crossed(["x", "y"], 10)(["a"], ["b", "c"])


def test_crossed_shapes():
  x, y = embed.Padded([["a", "", "b"], ["", "", ""]]), embed.Padded([[1, -1], [2, 3]])
  found = Crossed(["x", "y"], 100)(x, y)
  assert found.values.shape == (2, 6)  # whatever is padding
  assert [len(bag) for bag in bags(found)] == [2, 0]
  assert Crossed(["x", "y"], 100, max_valency=4)(x, y).values.shape == (2, 4)
  with pytest.raises(ValueError, match="longer than max_valency=1"):
    Crossed(["x", "y"], 100, max_valency=1)(x, y)
  cut = Crossed(["x", "y"], 100, max_valency=1, truncate=True)(x, y)
  assert bags(cut) == [bags(found)[0][:1], []]
  deep = Crossed(["x", "y"], 100)(embed.Padded([[["a", "b"]]]), np.array([["c"]]).reshape(1, 1, 1))
  assert deep.values.shape == (1, 1, 2)
  ragged = Crossed(["x", "y"], 100)(embed.Ragged(["a", "b"], [0, 2]), np.array(["c"]))
  assert ragged.row_splits.tolist() == [0, 2]
  assert Crossed(["x", "y"], 100)(np.zeros(0, int), np.zeros(0, int)).shape == (0,)
  assert Crossed(["x", "y"], 100)(np.array([["a"]]), np.array(["b"])).shape == (1,)


BAG = st.lists(st.text("ab"), max_size=3)


@given(
  st.lists(st.lists(BAG, min_size=3, max_size=3), min_size=2, max_size=3),
  st.integers(0, 2**64 - 1),
)
def test_a_cross_is_the_hash_of_each_tuple(columns, salt):
  column = Crossed([f"key {i}" for i in range(len(columns))], 12345, salt)
  expected = [
    [cross(*each, salt=salt) % 12345 for each in itertools.product(*example) if all(each)]
    for example in zip(*columns, strict=True)
  ]
  assert bags(column(*columns)) == expected
