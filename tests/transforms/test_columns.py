"""Identities, hashes and buckets: numbers a reader can check, padding, and properties."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from raw_features import bags, cross, xxh64

import embed
from embed.transforms import (
  Bucketized,
  Crossed,
  HashBucket,
  Identity,
  MultiHash,
  QuotientRemainder,
  RawIds,
  Transforms,
  Vocabulary,
  Weighted,
)


def test_identity():
  column = Identity(num_buckets=5)
  ids = column(np.array([0, 4, -1, -7]))
  assert ids.dtype == np.int32
  assert ids.tolist() == [0, 4, -1, -1]
  with pytest.raises(ValueError, match=r"9 is not in 0 .. 4: raise num_buckets.*\(2 such values\)"):
    column([1, 9, 7])
  assert Identity(5, default_value=2)([1, 9, 2**63]).tolist() == [1, 2, 2]
  assert Identity(5, default_value=-1)([1, 2**40]).tolist() == [1, -1]
  with pytest.raises(ValueError, match=r"Identity takes integers\. Got '3'"):
    column(["", "3"])


def test_hash_bucket():
  assert HashBucket(1000)("drama") == xxh64("drama") % 1000
  assert HashBucket(1000, salt=9)(["drama", b"drama"]).tolist() == [xxh64("drama", 9) % 1000] * 2
  assert HashBucket(1000)([42, 2**64 - 1]).tolist() == [xxh64(42) % 1000, xxh64(2**64 - 1) % 1000]
  assert HashBucket(1 << 30)(42) != HashBucket(1 << 30)("42")
  with pytest.raises(ValueError, match="float64 values cannot be categories"):
    HashBucket(1000)(np.array([1.0]))


def test_bucketized():
  """The example of `tf.raw_ops.Bucketize`."""
  column = Bucketized([0, 10, 100])
  found = column(np.array([[-5, 10000], [150, 10], [5, 100]]))
  assert found.tolist() == [[0, 3], [3, 2], [1, 3]]
  assert column.vocabulary_size == 4
  assert column([-0.5, 0.0, np.inf]).tolist() == [0, 1, 3]
  large = Bucketized([2**60, 2**60 + 1])
  assert large(np.array([2**60 - 1, 2**60, 2**60 + 1])).tolist() == [0, 1, 2]
  with pytest.raises(ValueError, match="nan lies in no bucket: fill it in, or give default_value"):
    column([1.0, np.nan])
  assert Bucketized([0.0], default_value=-1)([1.0, None, np.nan]).tolist() == [1, -1, -1]
  with pytest.raises(ValueError, match=r"which numbers of embed\.Padded are padding"):
    column(embed.Padded([[5, -1]]))
  filled = embed.Padded([[5, np.nan]])
  assert Bucketized([0, 10], default_value=-1)(filled).values.tolist() == [[1, -1]]


def test_a_boundary_is_reached_in_any_precision():
  """0.7 in float32 is below 0.7 in float64: a batch from a file and a request must agree."""
  for boundary in (0.1, 0.7, 16777217.0):
    for dtype in (np.float16, np.float32, np.float64):
      with np.errstate(over="ignore"):
        number = np.array([boundary]).astype(dtype)
      assert Bucketized([boundary])(number).tolist() == [1], (boundary, dtype)


def test_id_zero_is_an_id():
  """TensorFlow's estimators took 0 in a dense input for padding."""
  assert Identity(3)(np.array([[0, 1]])).tolist() == [[0, 1]]
  assert Vocabulary([0, 5])(np.array([0])).tolist() == [0]
  assert HashBucket(10)(np.array([0])).tolist() == [xxh64(0) % 10]
  assert Crossed(["x", "y"], 10)([0], [0]).tolist() == [cross(0, 0) % 10]
  assert Weighted(Identity(3), "w")([[0]], [[0.5]])[1].values.tolist() == [[0.5]]


KEYS = st.one_of(
  st.lists(st.lists(st.sampled_from(["drama", "comedy", "wär", "", "x" * 40])), min_size=1),
  st.lists(st.lists(st.sampled_from([0, 1, 7, 2**40, 2**63 - 1, -1])), min_size=1),
)


CATEGORIES = [
  HashBucket(97, salt=5),
  HashBucket(1),
  Vocabulary(["drama", "comedy"], num_oov_buckets=3),
  Vocabulary([7, 0], num_oov_buckets=1),
  Identity(5, default_value=4),
]


def fits(column, values):
  """Whether a column takes these values: text or integers."""
  text = any(isinstance(v, str) for bag in values for v in bag)
  if isinstance(column, HashBucket):
    return True
  return text == (isinstance(column, Vocabulary) and isinstance(column.tokens[0], str))


@given(st.sampled_from(CATEGORIES), KEYS)
def test_a_batch_is_its_examples_one_by_one(column, values):
  assume(fits(column, values))
  whole = bags(column(values))
  assert whole == [bags(column([bag]))[0] for bag in values]
  assert whole == [[i for i in map(int, map(column, bag)) if i >= 0] for bag in values]


@given(st.sampled_from([*CATEGORIES, Crossed(["x", "y"], 997)]), KEYS)
def test_every_kind_of_bags_gives_the_same(column, values):
  if isinstance(column, Crossed):
    crossed, dense = column, np.array([f"example {i}" for i in range(len(values))])
    column = lambda bags: crossed(bags, dense)
  else:
    assume(fits(column, values))
  flat = list(itertools.chain.from_iterable(values))
  empty = "" if any(isinstance(v, str) for v in flat) else -1
  splits = np.cumsum([0, *map(len, values)])
  longest = max(map(len, values))
  places = [[i, k] for i, bag in enumerate(values) for k in range(len(bag))]
  kinds = {
    "lists": values,
    "padded": embed.Padded([bag + [empty] * (longest + 1 - len(bag)) for bag in values]),
    "ragged": embed.Ragged(flat, splits),
    "ragged with a tail": embed.Ragged([*flat, empty, empty], splits),
    "sparse": embed.Sparse(np.array(places).reshape(-1, 2), flat, (len(values), longest)),
  }
  found = {name: bags(column(x)) for name, x in kinds.items()}
  assert found == dict.fromkeys(found, found["lists"])


def test_a_permutation_is_one_and_spreads_multiples_over_shards():
  for size in (1, 64, 1000):
    column = Identity(size, permuted=True)
    assert sorted(column(np.arange(size)).tolist()) == list(range(size))
    assert column([-1]).tolist() == [-1]
  shards = np.bincount(column(np.arange(0, 1000, 8)) % 8, minlength=8)
  # A change here changes every table that was trained.
  assert shards.tolist() == [13, 18, 20, 22, 13, 15, 10, 14]


def test_ids_of_several_tables():
  single = [HashBucket(1000, salt=salt) for salt in (3, 4)]
  found = MultiHash(1000, num_hashes=2, salt=3)(["a", "b"])
  assert found.values.tolist() == [[h(x).item() for h in single] for x in ("a", "b")]
  digits = [QuotientRemainder(97, 10, remainder=part)([-1, 96]) for part in (False, True)]
  assert [ids.tolist() for ids in digits] == [[-1, 9], [-1, 6]]


def test_raw_ids_of_strings_and_integers():
  pairs = RawIds()(["drama", "", b"drama"])
  assert pairs.dtype == np.uint32
  expected = xxh64("drama") >> 1
  drama = [expected >> 32, expected & 2**32 - 1]
  assert pairs.tolist() == [drama, [2**32 - 1] * 2, drama]
  assert RawIds()(np.array([2**62 + 5])).tolist() == [[2**30, 5]]
  table = embed.TableConfig(embed.DynamicVocabulary(16), 2)
  inputs = Transforms({"user": RawIds()})({"user": ["a", "b"]})
  embed.validate({"user": embed.FeatureConfig(table)}, inputs.features)
