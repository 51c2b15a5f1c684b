"""Columns: numbers a reader can check, kinds of values, vocabularies, and properties."""

import functools
import itertools
import pickle

import numpy as np
import pytest
import xxhash
from cases import refused
from hypothesis import assume, given
from hypothesis import strategies as st

import embed
from embed.transforms import Bucketized, HashBucket, RawIds, Transforms, Vocabulary, hashing


def xxh64(word):
  data = word.to_bytes(8, "little") if isinstance(word, int) else word.encode()
  return xxhash.xxh64_intdigest(data)


def bags(ids):
  """Ids of any kind as lists without padding."""
  if isinstance(ids, embed.Sparse):
    rows = ids.indices[:, 0]
    return [[i for i in ids.values[rows == row] if i >= 0] for row in range(ids.dense_shape[0])]
  padded = ids if isinstance(ids, embed.Padded) else embed.to_padded(ids)
  return [[i for i in bag if i >= 0] for bag in padded.values.tolist()]


def test_hash_bucket():
  assert HashBucket(1000)("drama") == xxh64("drama") % 1000
  assert HashBucket(1000)(["drama", b"drama"]).tolist() == [xxh64("drama") % 1000] * 2
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
  # 0.7 in float32 is below 0.7 in float64: a batch from a file and a request must agree.
  for dtype in (np.float16, np.float32, np.float64):
    assert Bucketized([0.7])(np.array([0.7], dtype)).tolist() == [1]
  large = Bucketized([2**60, 2**60 + 1])
  assert large(np.array([2**60 - 1, 2**60, 2**60 + 1])).tolist() == [0, 1, 2]
  with pytest.raises(ValueError, match="nan lies in no bucket: fill it in, or give default_value"):
    column([1.0, np.nan])
  with pytest.raises(ValueError, match=r"which numbers of embed\.Padded are padding"):
    column(embed.Padded([[5, -1]]))
  filled = embed.Padded([[5, np.nan, None]])
  assert Bucketized([0, 10], default_value=-1)(filled).values.tolist() == [[1, -1, -1]]


def test_id_zero_is_an_id():
  """TensorFlow's estimators took 0 in a dense input for padding."""
  assert Vocabulary([0, 5])(np.array([0])).tolist() == [0]
  assert HashBucket(10)(np.array([0])).tolist() == [xxh64(0) % 10]


def test_raw_ids_of_strings_and_integers():
  pairs = RawIds()(["drama", "", b"drama"])
  assert pairs.dtype == np.uint32
  expected = xxh64("drama") >> 1
  drama = [expected >> 32, expected & 2**32 - 1]
  assert pairs.tolist() == [drama, [2**32 - 1] * 2, drama]
  assert RawIds()(np.array([2**62 + 5])).tolist() == [[2**30, 5]]
  table = embed.TableConfig(embed.DynamicVocabulary(16), 2)
  inputs = Transforms({"user": RawIds()})({"user": ["a", "b"]})
  embed.validate({"user": embed.FeatureConfig(table)}, inputs)


def test_vocabulary():
  column = Vocabulary(["drama", "comedy"])
  assert column([b"comedy", "", "drama"]).tolist() == [1, -1, 0]
  with pytest.raises(ValueError, match="'war' is not among the 2 tokens: give num_oov_buckets, or"):
    column(["drama", "war", "war"])
  assert Vocabulary(["drama"], default_value=0)(["war"]).tolist() == [0]
  assert Vocabulary([2**62, 7])(np.array([7, 2**62, -1])).tolist() == [1, 0, -1]
  buckets = Vocabulary(["drama", "comedy"], num_oov_buckets=3)
  assert buckets.vocabulary_size == 5
  assert buckets(["comedy", "war", ""]).tolist() == [1, 2 + xxh64("war") % 3, -1]
  with pytest.raises(ValueError, match=r"tokens are like 'drama', the values like 3. Convert"):
    buckets([3, -1])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
UINT64 = st.integers(0, 2**64 - 1)


@given(
  st.lists(TEXT, min_size=1, unique=True) | st.lists(UINT64, min_size=1, unique=True), st.data()
)
def test_tokens_are_the_inverse_of_ids(tokens, data):
  column = Vocabulary(tokens)
  values = data.draw(st.lists(st.sampled_from(tokens)))
  assert [column.tokens[i] for i in column(values)] == values
  assert pickle.loads(pickle.dumps(column)) == column


# --- kinds of columns -----------------------------------------------------------------------------

KEYS = st.one_of(
  st.lists(st.lists(st.sampled_from(["drama", "comedy", "wär", "", "x" * 40])), min_size=1),
  st.lists(st.lists(st.sampled_from([0, 1, 7, 2**40, 2**63 - 1, -1])), min_size=1),
)
CATEGORIES = [
  HashBucket(97),
  Vocabulary(["drama", "comedy"], num_oov_buckets=3),
  Vocabulary([7, 0], num_oov_buckets=1),
]


@given(st.sampled_from(CATEGORIES), KEYS)
def test_every_kind_of_bags_gives_the_ids_of_its_values(column, values):
  flat = list(itertools.chain.from_iterable(values))
  is_text = any(isinstance(v, str) for v in flat)
  takes_text = isinstance(column, Vocabulary) and isinstance(column.tokens[0], str)
  assume(isinstance(column, HashBucket) or is_text == takes_text)
  empty = "" if is_text else -1
  splits = np.cumsum([0, *map(len, values)])
  longest = max(map(len, values))
  places = [[i, k] for i, bag in enumerate(values) for k in range(len(bag))]
  kinds = [
    values,
    embed.Padded([bag + [empty] * (longest + 1 - len(bag)) for bag in values]),
    embed.Ragged(flat, splits),
    embed.Ragged([*flat, empty, empty], splits),
    embed.Sparse(np.array(places).reshape(-1, 2), flat, (len(values), longest)),
  ]
  one_by_one = [[i for i in map(int, map(column, bag)) if i >= 0] for bag in values]
  for x in kinds:
    assert bags(column(x)) == one_by_one


GENRES = Vocabulary(["drama", "comedy"])


def test_dense_values():
  for column, expected in (
    ("comedy", 1),
    (["drama", None], [0, -1]),
    (np.array([b"comedy", b""]), [1, -1]),
    (np.array(["comedy", ""], np.dtypes.StringDType()), [1, -1]),
    (np.array([["comedy"], [None]], object), [[1], [-1]]),
    ([], []),
  ):
    ids = GENRES(column)
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.tolist()) == (np.int32, expected)


def test_lists_of_lists_are_bags_whatever_their_lengths():
  """Or the kind of a feature would depend on the batch."""
  frame = np.empty(2, object)
  frame[:] = [np.array(["drama"]), np.array(["comedy", "drama"])]
  assert GENRES(frame).values.tolist() == [[0, -1], [1, 0]]
  assert GENRES([["drama"], ["comedy"]]).values.tolist() == [[0], [1]]
  assert GENRES([[], None]).values.tolist() == [[-1], [-1]]
  cases = [
    ([["drama"], "comedy"], r"holds lists and None; write \[value\]"),
    ([[["drama"]]], "must be flat"),
  ]
  refused(cases, GENRES)


def test_max_valency_makes_lists_and_ragged_bags_padded():
  lists = [["drama"], ["comedy", "drama"]]
  ragged = embed.Ragged(["drama", "comedy", "drama"], [0, 1, 3], max_valency=2)
  sparse = embed.Sparse([[0, 0], [1, 0], [1, 1]], ["drama", "comedy", "drama"], (2, 2))
  assert GENRES(ragged).max_valency == 2
  assert GENRES(sparse).dense_shape == (2, 2)
  column = Vocabulary(["drama", "comedy"], max_valency=3)
  assert column(sparse).dense_shape == (2, 2)
  for each in (lists, ragged):
    assert column(each).values.tolist() == [[0, -1, -1], [1, 0, -1]]
  short = functools.partial(Vocabulary, ["drama", "comedy"], max_valency=1)
  with pytest.raises(ValueError, match="Bag 1 is longer than max_valency=1"):
    short()(lists)
  assert short(truncate=True)(lists).values.tolist() == [[0], [1]]


# --- keys and hashes ------------------------------------------------------------------------------


def objects(*items):
  return np.array(items, object)


def test_the_published_hashes():
  """The test vectors that implementations of xxHash are checked by."""
  found = hashing.hashes(objects("", "a", "abc")).tolist()
  assert found == [0xEF46DB3751D8E999, 0xD24EC4F1A98C6E5B, 0x44BC2CF5AD770999]
  assert hashing.hashes(np.array([7], np.int8)).tolist() == [xxh64(7)]


@given(st.lists(UINT64), st.lists(TEXT), st.lists(st.binary()))
def test_every_key_hashes_as_its_bytes(words, strings, items):
  assert hashing.hashes(np.array(words, np.uint64)).tolist() == list(map(xxh64, words))
  assert hashing.hashes(objects(*strings)).tolist() == list(map(xxh64, strings))
  expected = list(map(xxhash.xxh64_intdigest, items))
  assert hashing.hashes(hashing.to_keys(objects(*items))).tolist() == expected


def test_keys():
  """NumPy would make floats of some of these integers."""
  for items, expected in (
    ((2**63 + 1, 1), [2**63 + 1, 1]),
    ((2**62 + 1, None), [2**62 + 1, -1]),
    ((np.uint64(2**63 + 1),), [2**63 + 1]),
    (("a", "", None, b"b"), ["a", "", "", "b"]),
  ):
    assert hashing.to_keys(objects(*items)).tolist() == expected
  assert not hashing.is_padding(np.array([2**64 - 1], np.uint64)).any()
  with pytest.raises(ValueError, match=r"-7 is neither a key nor padding.*view\(np.uint64\)"):
    hashing.is_padding(np.array([0, -7]))
  cases = [(objects(*x), "all fit int64, or all uint64") for x in ((-1, 2**63), (None, 2**63))]
  cases += [
    (np.array([1.5]), "float64.*Bucketized"),
    (np.array([True]), "bool"),
    (objects(1, "1"), r"\['int', 'str'\]"),
  ]
  refused(cases, hashing.to_keys)
  numbers = [(x, "numbers must be integers or floats") for x in (objects("1"), np.array([True]))]
  refused(numbers, hashing.to_numbers)
