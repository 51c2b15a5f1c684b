"""Vocabularies: tokens of a list and of a file, and back."""

import pickle

import numpy as np
import pytest
from cases import refused
from hypothesis import given
from hypothesis import strategies as st
from raw_features import xxh64

from embed.transforms import Vocabulary


def test_vocabulary():
  column = Vocabulary(["drama", "comedy"])
  assert column([b"comedy", "", "drama"]).tolist() == [1, -1, 0]
  with pytest.raises(ValueError, match="'war' is not among the 2 tokens: give num_oov_buckets, or"):
    column(["drama", "war", "war"])
  assert Vocabulary(["drama"], default_value=0)(["war"]).tolist() == [0]
  assert Vocabulary(["drama"], default_value=-1)(["war"]).tolist() == [-1]
  assert Vocabulary([2**62, 7])(np.array([7, 2**62, -1])).tolist() == [1, 0, -1]
  largest = Vocabulary([2**64 - 1, 7], num_oov_buckets=1)
  assert largest(np.array([2**64 - 1, 8], np.uint64)).tolist() == [0, 2]
  assert largest(np.array([-1, 8])).tolist() == [-1, 2]
  buckets = Vocabulary(["drama", "comedy"], num_oov_buckets=3)
  assert buckets.vocabulary_size == 5
  assert buckets(["comedy", "war", ""]).tolist() == [1, 2 + xxh64("war") % 3, -1]
  with pytest.raises(ValueError, match=r"tokens are like 'drama', the values like 3. Convert"):
    buckets([3, -1])
  with pytest.raises(ValueError, match=r"tokens are like 7, the values like 'a'.*dtype=int"):
    Vocabulary([7], num_oov_buckets=1)(["a"])


def test_a_file_has_a_token_on_each_line(tmp_path):
  path = tmp_path / "genres.txt"
  for content, tokens in (
    (b"drama\ncomedy\n", ("drama", "comedy")),
    (b"drama\ncomedy", ("drama", "comedy")),
    (b"\xef\xbb\xbfdrama\r\nfilm noir\r\n", ("drama", "film noir")),
    ("kömödie\x85\u2028x\n".encode(), ("kömödie\x85\u2028x",)),  # no line breaks to others
  ):
    path.write_bytes(content)
    column = Vocabulary.from_file(path, num_oov_buckets=1, key="genre")
    assert column == Vocabulary(tokens, num_oov_buckets=1, key="genre")
    assert column.tokens == tokens


def test_a_damaged_file_names_the_line(tmp_path):
  cases = [
    (b"a\nb\na\n", "line 3: 'a' is already on line 1"),
    (b"a\n\nb\n", "line 2: '' is padding"),
    (b"", "line 1: '' is padding"),
    (b"a\n\xff\n", "line 2: 'utf-8'"),
  ]
  path = tmp_path / "genres.txt"
  refused(cases, lambda content: (path.write_bytes(content), Vocabulary.from_file(path)))


def test_a_file_of_integers(tmp_path):
  (tmp_path / "users.txt").write_text("9007199254740993\n0\n")
  column = Vocabulary.from_file(tmp_path / "users.txt", dtype=int)
  assert column(np.array([0, 9007199254740993])).tolist() == [1, 0]
  (tmp_path / "users.txt").write_text("1\n1.0\n")
  with pytest.raises(ValueError, match=r"users.txt, line 2: invalid literal for int"):
    Vocabulary.from_file(tmp_path / "users.txt", dtype=int)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(
  st.lists(TEXT, min_size=1, unique=True)
  | st.lists(st.integers(0, 2**64 - 1), min_size=1, unique=True),
  st.data(),
)
def test_tokens_are_the_inverse_of_ids(tokens, data):
  column = Vocabulary(tokens)
  fresh = pickle.dumps(column)
  values = data.draw(st.lists(st.sampled_from(tokens)))
  assert [column.tokens[i] for i in column(values)] == values
  assert pickle.dumps(column) == fresh  # workers get no index
  assert pickle.loads(fresh) == column
