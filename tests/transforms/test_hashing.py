"""Keys: XXH64 as published, the vectorised one bit for bit, and what is and is not a category."""

import numpy as np
import pytest
import xxhash
from cases import refused
from hypothesis import given
from hypothesis import strategies as st

from embed.transforms import hashing as keys

UINT64 = st.integers(0, 2**64 - 1)


def objects(*items):
  return np.array(items, object)


def test_the_published_hashes():
  """The test vectors that implementations of xxHash are checked by."""
  found = keys.hashes(objects("", "a", "abc"), seed=0).tolist()
  assert found == [0xEF46DB3751D8E999, 0xD24EC4F1A98C6E5B, 0x44BC2CF5AD770999]


@given(st.lists(st.tuples(UINT64, UINT64)), UINT64)
def test_integers_hash_as_their_eight_bytes(pairs, seed):
  words, seeds = np.array(pairs, np.uint64).reshape(-1, 2).T
  expected = [xxhash.xxh64_intdigest(w.to_bytes(8, "little"), s) for w, s in pairs]
  assert keys.xxh64(words, seeds).tolist() == expected
  expected = [xxhash.xxh64_intdigest(w.to_bytes(8, "little"), seed) for w, _ in pairs]
  assert keys.hashes(words, seed).tolist() == expected


def test_the_dtype_of_an_integer_does_not_matter():
  expected = xxhash.xxh64_intdigest((7).to_bytes(8, "little"))
  for dtype in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64):
    assert keys.hashes(np.array([7], dtype), 0).tolist() == [expected], dtype


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.lists(st.binary()))
def test_strings_hash_as_their_utf8_and_bytes_as_they_are(strings, items):
  expected = [xxhash.xxh64_intdigest(item.encode(), 5) for item in strings]
  assert keys.hashes(keys.to_keys(objects(*strings)), 5).tolist() == expected
  expected = [xxhash.xxh64_intdigest(item, 5) for item in items]
  assert keys.hashes(keys.to_keys(objects(*items)), 5).tolist() == expected


def test_lists_of_64_bit_integers_stay_exact():
  """NumPy would make floats of these."""
  assert keys.to_keys(objects(2**63 + 1, 1)).tolist() == [2**63 + 1, 1]
  assert keys.to_keys(objects(2**62 + 1, None)).tolist() == [2**62 + 1, -1]
  assert keys.to_keys(objects(np.uint64(2**63 + 1))).tolist() == [2**63 + 1]
  for beyond in ([-1, 2**63], [None, 2**63], [2**64]):
    with pytest.raises(ValueError, match="must all fit int64, or all uint64"):
      keys.to_keys(objects(*beyond))


def test_what_is_no_category_raises():
  cases = [
    (np.array([1.5]), "float64.*Bucketized"),
    (np.array([True]), "bool"),
    (objects(1, "1"), r"\['int', 'str'\]"),
    (objects("a", float("nan")), r"\['float', 'str'\]"),
    (objects(True, 1), r"\['bool', 'int'\]"),
    (objects(["a"], "b"), r"\['list', 'str'\]"),
  ]
  refused(cases, keys.to_keys)


def test_padding_is_empty_or_minus_one():
  text = keys.to_keys(objects("a", "", None, b"", b"b"))
  assert text.tolist() == ["a", "", "", "", "b"]
  assert keys.is_padding(text).tolist() == [False, True, True, True, False]
  assert keys.is_padding(np.array([0, -1, 2])).tolist() == [False, True, False]
  assert not keys.is_padding(np.array([2**64 - 1], np.uint64)).any()
  with pytest.raises(ValueError, match=r"-7 is neither a key nor padding.*view\(np.uint64\)"):
    keys.is_padding(np.array([0, -7]))


def test_what_is_no_number_raises():
  cases = [np.array(["1"]), objects("1"), objects(None, "1"), np.array([True])]
  refused([(values, "numbers must be integers or floats") for values in cases], keys.to_numbers)
