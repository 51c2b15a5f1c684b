"""Feature transforms: numbers a reader can check, padding, every kind of column, and pickles."""

import functools
import itertools
import json
import os
import pathlib
import pickle
import subprocess
import sys

import grain
import numpy as np
import pytest
import xxhash
from absl import flags
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st

import embed
from embed.transforms import (
  Bucketized,
  Crossed,
  HashBucket,
  Identity,
  Transforms,
  Vocabulary,
  Weighted,
)

ROOT = pathlib.Path(__file__).parents[1]


def xxh64(word, seed=0):
  data = word.to_bytes(8, "little") if isinstance(word, int) else word.encode()
  return xxhash.xxh64_intdigest(data, seed)


def cross(*values, salt=0):
  words = [value if isinstance(value, int) else xxh64(value) for value in values]
  return functools.reduce(lambda seed, word: xxh64(word, seed), words, salt)


def bags(column):
  """Ids of any kind as lists without padding."""
  if not isinstance(column, embed.Padded):
    column = embed.to_padded(column)
  return [[i for i in bag if i >= 0] for bag in column.values.tolist()]


# --- by hand -------------------------------------------------------------------------------------


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


def test_vocabulary():
  column = Vocabulary(["drama", "comedy"])
  assert column([b"comedy", "", "drama"]).tolist() == [1, -1, 0]
  with pytest.raises(ValueError, match=r"'war' is not among the 2 tokens: give num_oov_buckets, or"):
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


def test_bucketized():
  """The example of `tf.raw_ops.Bucketize`."""
  column = Bucketized([0, 10, 100])
  found = column(np.array([[-5, 10000], [150, 10], [5, 100]]))
  assert found.tolist() == [[0, 3], [3, 2], [1, 3]]
  assert column.vocabulary_size == 4
  assert column([-0.5, 0.0, np.inf]).tolist() == [0, 1, 3]
  with pytest.raises(ValueError, match="nan lies in no bucket: fill it in, or give default_value"):
    column([1.0, np.nan])
  assert Bucketized([0.0], default_value=-1)([1.0, None, np.nan]).tolist() == [1, -1, -1]
  with pytest.raises(ValueError, match=r"which numbers of embed\.Padded are padding"):
    column(embed.Padded([[5, -1]]))
  filled = embed.Padded([[5, np.nan]])
  assert Bucketized([0, 10], default_value=-1)(filled).values.tolist() == [[1, -1]]


@pytest.mark.parametrize("boundary", [0.1, 0.3, 0.7, 1e-3, 16777217.0])
def test_a_boundary_is_reached_in_any_precision(boundary):
  """0.7 in float32 is below 0.7 in float64: a batch from a file and a request must agree."""
  column = Bucketized([boundary])
  for dtype in (np.float16, np.float32, np.float64):
    with np.errstate(over="ignore"):
      assert column(np.array([boundary]).astype(dtype)).tolist() == [1], dtype


def test_integers_are_bucketized_exactly():
  column = Bucketized([2**60, 2**60 + 1])
  assert column(np.array([2**60 - 1, 2**60, 2**60 + 1])).tolist() == [0, 1, 2]


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


def test_crossed_takes_the_last_key_fastest():
  column = Crossed(["x", "y", "z"], num_buckets=1 << 20)
  values = [["a", "b"]], [["c"]], [[5, 6, 7]]
  expected = [cross(*each) % (1 << 20) for each in itertools.product(*(v[0] for v in values))]
  assert bags(column(*values)) == [expected]


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


def test_weighted():
  column = Weighted(HashBucket(10), "score")
  ids, weights = column([["a", ""], ["b"], None], [[0.5, 9], [2], []])
  assert ids.values.tolist() == [[xxh64("a") % 10, -1], [xxh64("b") % 10, -1], [-1, -1]]
  assert weights.values.dtype == np.float32
  assert weights.values.tolist() == [[0.5, 0], [2, 0], [0, 0]]
  ids, weights = column(np.array(["a", "b"]), np.array([1, 2]))
  assert ids.values.shape == weights.values.shape == (2, 1)
  ids, weights = column(np.array([["a", "b"]]), np.array([[1.0, 2.0]]))
  assert ids.values.shape == (1, 2)
  ids, weights = column(embed.Ragged(["a", "b", ""], [0, 1, 2]), [[1.0], [2.0]])
  assert weights.values.tolist() == [1, 2, 0]
  short = Weighted(HashBucket(10, max_valency=1, truncate=True), "score")
  assert short([["a", "b"]], [[1, 2]])[1].values.tolist() == [[1]]


@pytest.mark.parametrize(
  ("weights", "message"),
  [
    ([[1.0], [1.0]], "'score' must have a weight where there is a value"),
    ([[1.0, 2.0, 3.0], []], "'score' must have a weight where there is a value"),
    ([[1.0, np.nan], [1.0]], "'score' holds a weight of nan"),
    ([[1.0, None], [1.0]], "'score' holds a weight of nan"),
    ([[1.0, 1e300], [1.0]], "'score' holds a weight of inf"),
    ([["1", "2"], ["3"]], "numbers must be integers or floats"),
  ],
)
def test_weights_must_fit(weights, message):
  with pytest.raises(ValueError, match=message):
    Weighted(HashBucket(10), "score")([["a", "b"], ["c"]], weights)


def test_id_zero_is_an_id():
  """TensorFlow's estimators took 0 in a dense input for padding."""
  assert Identity(3)(np.array([[0, 1]])).tolist() == [[0, 1]]
  assert Vocabulary([0, 5])(np.array([0])).tolist() == [0]
  assert HashBucket(10)(np.array([0])).tolist() == [xxh64(0) % 10]
  assert Crossed(["x", "y"], 10)([0], [0]).tolist() == [cross(0, 0) % 10]
  assert Weighted(Identity(3), "w")([[0]], [[0.5]])[1].values.tolist() == [[0.5]]


# --- kinds ---------------------------------------------------------------------------------------

GENRES = Vocabulary(["drama", "comedy"])


@pytest.mark.parametrize(
  ("column", "expected"),
  [
    ("comedy", 1),
    (["drama", None], [0, -1]),
    (np.array(["comedy", ""]), [1, -1]),
    (np.array([b"comedy", b""]), [1, -1]),
    (np.array(["comedy", ""], np.dtypes.StringDType()), [1, -1]),
    (np.array([["comedy"], [None]], object), [[1], [-1]]),
    ([], []),
    ([None], [-1]),
  ],
)
def test_dense(column, expected):
  ids = GENRES(column)
  assert isinstance(ids, np.ndarray)
  assert ids.dtype == np.int32
  assert ids.tolist() == expected


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


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Identity(0), "`num_buckets` must be an int in 1 .. 2147483646. Got 0"),
    (lambda: HashBucket(2**31), "`num_buckets` must be an int in 1 .. 2147483646"),
    (lambda: HashBucket(10, salt=-1), "`salt` must be an int in 0"),
    (lambda: HashBucket(True), "`num_buckets` must be an int"),
    (lambda: HashBucket(10.0), "`num_buckets` must be an int"),
    (lambda: HashBucket(None), "`num_buckets` must be an int"),
    (lambda: Identity(5, default_value=5), "`default_value` must be an int in -1 .. 4. Got 5"),
    (lambda: Identity(5, max_valency=0), "`max_valency` must be an int in 1"),
    (lambda: Vocabulary([]), "at least one token"),
    (lambda: Vocabulary("genres.txt"), r"write Vocabulary.from_file\('genres.txt'\)"),
    (lambda: Vocabulary(["a", "b", "a"]), "Token 'a' is repeated, at 0 and 2"),
    (lambda: Vocabulary(["a", ""]), "Token 1 is padding"),
    (lambda: Vocabulary([5, -1]), "Token 1 is padding"),
    (lambda: Vocabulary(["a", 1]), "not strings mixed with integers"),
    (lambda: Vocabulary(["a"], num_oov_buckets=1, default_value=0), "not both"),
    (lambda: Vocabulary(["a"], default_value=1), "`default_value` must be an int in -1 .. 0"),
    (lambda: Vocabulary(["a"], num_oov_buckets=-1), "`num_oov_buckets` must be an int in 0"),
    (lambda: Bucketized([]), "`boundaries` must be strictly increasing"),
    (lambda: Bucketized([1, 1]), "`boundaries` must be strictly increasing"),
    (lambda: Bucketized([float("nan")]), "`boundaries` must be strictly increasing"),
    (lambda: Bucketized(["1"]), "numbers must be"),
    (lambda: Crossed(["a"], 10), "`keys` must be two or more"),
    (lambda: Crossed("ab", 10), "`keys` must be two or more"),
    (lambda: Crossed(["a", Bucketized([1])], 10), "columns that name theirs"),
    (lambda: Crossed(["a", "b"], 0), "`num_buckets` must be an int"),
    (lambda: Weighted("tag", "score"), r"such as Weighted\(HashBucket\(1000\), 'score'\)"),
    (lambda: Transforms({"a": 5}), "Feature 'a': expected a transform"),
  ],
)
def test_arguments(make, message):
  with pytest.raises(ValueError, match=message):
    make()


# --- vocabulary files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("content", "tokens"),
  [
    (b"drama\ncomedy\n", ("drama", "comedy")),
    (b"drama\ncomedy", ("drama", "comedy")),
    (b"\xef\xbb\xbfdrama\r\nfilm noir\r\n", ("drama", "film noir")),
    ("kömödie\x85\u2028x\n".encode(), ("kömödie\x85\u2028x",)),  # no line breaks to anybody else
  ],
)
def test_a_file_has_a_token_on_each_line(tmp_path, content, tokens):
  (tmp_path / "genres.txt").write_bytes(content)
  column = Vocabulary.from_file(tmp_path / "genres.txt", num_oov_buckets=1, key="genre")
  assert column == Vocabulary(tokens, num_oov_buckets=1, key="genre")
  assert column.tokens == tokens


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"a\nb\na\n", "genres.txt, line 3: 'a' is already on line 1"),
    (b"a\n\nb\n", "genres.txt, line 2: '' is padding"),
    (b"", "genres.txt, line 1: '' is padding"),
    (b"a\n\xff\n", "genres.txt, line 2: 'utf-8' codec can't decode"),
  ],
)
def test_a_damaged_file_names_the_line(tmp_path, content, message):
  (tmp_path / "genres.txt").write_bytes(content)
  with pytest.raises(ValueError, match=message):
    Vocabulary.from_file(tmp_path / "genres.txt")


def test_a_file_of_integers(tmp_path):
  (tmp_path / "users.txt").write_text("9007199254740993\n0\n")
  column = Vocabulary.from_file(tmp_path / "users.txt", dtype=int)
  assert column(np.array([0, 9007199254740993])).tolist() == [1, 0]
  (tmp_path / "users.txt").write_text("1\n1.0\n")
  with pytest.raises(ValueError, match=r"users.txt, line 2: invalid literal for int"):
    Vocabulary.from_file(tmp_path / "users.txt", dtype=int)


# --- a batch -------------------------------------------------------------------------------------

TRANSFORMS = Transforms(
  {
    "user": HashBucket(1000),
    "user_again": HashBucket(100, salt=1, key="user"),
    "genre": Vocabulary(["drama", "comedy"], num_oov_buckets=2, max_valency=3),
    "age": Bucketized([18, 30, 65]),
    "store": Identity(4),
    "city_x_age": Crossed(["city", Bucketized([18, 65], key="age")], num_buckets=1000),
    "tag": Weighted(HashBucket(50, max_valency=2), "tag_score"),
  }
)
BATCH = {
  "user": np.array([2**40 + 7, 12, -1]),
  "genre": [["comedy", "drama"], [], ["western"]],
  "age": np.array([17.0, 30.0, 80.0], np.float32),
  "store": [0, 3, None],
  "city": ["Rome", "", "Oslo"],
  "tag": [["new", "dvd"], ["new"], None],
  "tag_score": [[0.5, 2.0], [1.0], None],
  "label": np.array([1, 0, 1]),
}
GOLDEN = {  # by xxhash alone; a change here changes every table that was trained
  "user": [743, 385, -1],
  "user_again": [55, 54, -1],
  "genre": [[1, 0, -1], [-1, -1, -1], [3, -1, -1]],
  "age": [0, 2, 3],
  "store": [0, 3, -1],
  "city_x_age": [697, -1, 184],
  "tag": [[33, 36], [33, -1], [-1, -1]],
}


def plain(inputs):
  lists = lambda x: (x.values if isinstance(x, embed.Padded) else x).tolist()
  return {name: lists(x) for name, x in inputs.features.items()}


def test_a_batch():
  inputs = TRANSFORMS(BATCH)
  assert plain(inputs) == GOLDEN
  assert list(inputs.weights) == ["tag"]
  assert inputs.weights["tag"].values.tolist() == [[0.5, 2], [1, 0], [0, 0]]
  sizes = {name: column.vocabulary_size for name, column in TRANSFORMS.columns.items()}
  assert list(sizes.values()) == [1000, 100, 4, 4, 4, 1000, 50]


def test_another_process_finds_the_same_and_starts_no_device():
  """Python's own hash differs between processes; a worker must not take an accelerator."""
  code = """
import json, pickle, sys
transforms, batch = pickle.load(sys.stdin.buffer)
inputs = transforms(batch)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print(json.dumps({k: getattr(x, "values", x).tolist() for k, x in inputs.features.items()}))
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    input=pickle.dumps((TRANSFORMS, BATCH)),
    capture_output=True,
    check=True,
    cwd=ROOT,
    env=os.environ | {"PYTHONHASHSEED": "123"},
  )
  assert json.loads(done.stdout) == GOLDEN


def test_a_layer_reads_it():
  """One table per column, sized by it; columns of one vocabulary may share theirs."""
  tables = {
    name: embed.TableConfig(column.vocabulary_size, 4, combiner="sum", name=name)
    for name, column in TRANSFORMS.columns.items()
  }
  features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
  features["again"] = embed.FeatureConfig(tables["genre"])
  inputs = TRANSFORMS(BATCH)
  inputs.features["again"] = TRANSFORMS.columns["genre"](["drama", "comedy", ""])
  embed.validate(features, *inputs)
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  act = nnx.jit(lambda layer, inputs: layer(*inputs))(layer, inputs)
  rows = {name: np.asarray(table) for name, table in layer.tables.items()}
  first, second = inputs.features["tag"].values[0]
  expected = 0.5 * rows["tag"][first] + 2 * rows["tag"][second]
  np.testing.assert_allclose(act["tag"][0], expected, rtol=1e-6)
  np.testing.assert_array_equal(act["age"], rows["age"][[0, 2, 3]])
  np.testing.assert_array_equal(act["again"][:2], rows["genre"][[0, 1]])
  np.testing.assert_array_equal(act["again"][2], np.zeros(4))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"store": [1, 4, 2]}, r"Feature 'store': 4 is not in 0 .. 3"),
    ({"age": [1, None, 3]}, "Feature 'age': nan lies in no bucket"),
    ({"user": np.ones(3)}, "Feature 'user': float64 values cannot be categories"),
    ({"genre": [["a"] * 4, [], []]}, "Feature 'genre': Bag 0 is longer than max_valency=3"),
    ({"city": [1.5, 2, 3]}, "Feature 'city_x_age': key 'city': a column holds strings"),
    ({"tag_score": [[1], [1], []]}, "Feature 'tag': 'tag_score' must have a weight where"),
  ],
)
def test_errors_name_the_feature(change, message):
  with pytest.raises(ValueError, match=message):
    TRANSFORMS(BATCH | change)


def test_a_missing_raw_feature_raises():
  batch = {name: column for name, column in BATCH.items() if name != "city"}
  with pytest.raises(ValueError, match=r"Feature 'city_x_age': the batch has no 'city', only \["):
    TRANSFORMS(batch)


# --- pickles and pipelines -----------------------------------------------------------------------


def test_pickles_hold_no_index():
  column = Vocabulary([f"token {i}" for i in range(1000)])
  fresh = pickle.dumps(column)
  column(["token 7"])
  assert pickle.dumps(column) == fresh
  copy = pickle.loads(fresh)
  assert copy == column
  assert copy(["token 999"]).tolist() == [999]
  copy = pickle.loads(pickle.dumps(TRANSFORMS))
  assert copy == TRANSFORMS
  assert plain(copy(BATCH)) == GOLDEN


def test_everything_is_frozen():
  for column in TRANSFORMS.columns.values():
    with pytest.raises(AttributeError):
      column.vocabulary_size = 3


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_in_a_grain_pipeline(num_workers, request):
  if num_workers:
    flags.FLAGS.mark_as_parsed()  # a program that starts with app.run has done so
    request.addfinalizer(flags.FLAGS.unparse_flags)
  dataset = grain.MapDataset.source([BATCH] * 3).map(TRANSFORMS).to_iter_dataset()
  if num_workers:
    options = grain.MultiprocessingOptions(num_workers=num_workers)
    dataset = dataset.mp_prefetch(options)
  found = list(dataset)
  assert [plain(inputs) for inputs in found] == [GOLDEN] * 3


def test_single_examples_can_be_batched_by_grain():
  """A bag of one example is `Padded` of one axis."""
  transforms = Transforms({"genre": GENRES, "age": Bucketized([18])})
  examples = [
    {"genre": embed.Padded(["drama", ""]), "age": 17},
    {"genre": embed.Padded(["comedy", "drama"]), "age": 18.0},
  ]
  inputs = next(iter(grain.MapDataset.source(examples).map(transforms).batch(2)))
  assert inputs.features["genre"].values.tolist() == [[0, -1], [1, 0]]
  assert inputs.features["age"].tolist() == [0, 1]


# --- properties ----------------------------------------------------------------------------------

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


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(
  st.lists(TEXT, min_size=1, unique=True)
  | st.lists(st.integers(0, 2**64 - 1), min_size=1, unique=True),
  st.data(),
)
def test_tokens_are_the_inverse_of_ids(tokens, data):
  column = Vocabulary(tokens)
  values = data.draw(st.lists(st.sampled_from(tokens)))
  assert pickle.loads(pickle.dumps(column)) == column
  assert [column.tokens[i] for i in column(values)] == values


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


@given(
  st.lists(st.floats(-100, 100), min_size=1, max_size=5, unique=True),
  st.lists(st.floats(-200, 200)),
)
def test_buckets_are_those_of_digitize(boundaries, numbers):
  boundaries = sorted(boundaries)
  column = Bucketized(boundaries)
  numbers = np.array([*numbers, *boundaries])
  assert column(numbers).tolist() == np.digitize(numbers, boundaries).tolist()
