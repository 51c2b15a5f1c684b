"""Batches of raw features: arguments of transforms, processes and pipelines."""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import grain
import numpy as np
import pytest
from cases import refused
from flax import nnx

import embed
from embed.transforms import Bucketized, HashBucket, Transforms, Vocabulary

ROOT = pathlib.Path(__file__).parents[2]


def test_arguments():
  cases = [
    (lambda: HashBucket(2**31), "num_buckets"),
    (lambda: Vocabulary(range(5), default_value=5), "default_value.*5"),
    (lambda: HashBucket(5, max_valency=True), "max_valency"),
    (lambda: Vocabulary([]), "at least one token"),
    (lambda: Vocabulary("genres.txt"), "splitlines"),
    (lambda: Vocabulary(["a", "b", "a"]), r"`tokens` must be distinct.*'a' at 0"),
    (lambda: Vocabulary(["a", None]), r"not padding.*'' at 1"),
    (lambda: Vocabulary(["a", 1]), "strings and bytes, or integers, but not both"),
    (lambda: Vocabulary(["a"], num_oov_buckets=1, default_value=0), "not both"),
    (lambda: Bucketized([1, 1]), "`boundaries` must be strictly increasing"),
    (lambda: Bucketized([float("nan")]), "boundaries"),
    (lambda: Transforms({"a": "b"}), "'a': expected a transform.*'b'"),
  ]
  refused(cases, lambda make: make())


TRANSFORMS = Transforms(
  {
    "user": HashBucket(1000),
    "user_again": HashBucket(100, key="user"),
    "genre": Vocabulary(["drama", "comedy"], num_oov_buckets=2, max_valency=3),
    "age": Bucketized([18, 30, 65]),
    "store": Vocabulary(range(4)),
    "tag": HashBucket(50, max_valency=2),
  }
)


BATCH = {
  "user": np.array([2**40 + 7, 12, -1]),
  "genre": [["comedy", "drama"], [], ["western"]],
  "age": np.array([17.0, 30.0, 80.0], np.float32),
  "store": [0, 3, None],
  "tag": [["new", "dvd"], ["new"], None],
  "label": np.array([1, 0, 1]),
}


GOLDEN = {  # by xxhash alone; a change here changes every table that was trained
  "user": [743, 385, -1],
  "user_again": [43, 85, -1],
  "genre": [[1, 0, -1], [-1, -1, -1], [3, -1, -1]],
  "age": [0, 2, 3],
  "store": [0, 3, -1],
  "tag": [[33, 36], [33, -1], [-1, -1]],
}


def plain(inputs):
  lists = lambda x: (x.values if isinstance(x, embed.Padded) else x).tolist()
  return {name: lists(x) for name, x in inputs.items()}


def test_a_batch():
  assert plain(TRANSFORMS(BATCH)) == GOLDEN
  sizes = [column.vocabulary_size for column in TRANSFORMS.columns.values()]
  assert sizes == [1000, 100, 4, 4, 4, 50]


@pytest.mark.ci
def test_another_process_finds_the_same_and_starts_no_device():
  """Python's own hash differs between processes; a worker must not take an accelerator."""
  code = """
import json, pickle, sys
transforms, batch = pickle.load(sys.stdin.buffer)
inputs = transforms(batch)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print(json.dumps({k: getattr(x, "values", x).tolist() for k, x in inputs.items()}))
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


def test_errors_name_the_feature():
  cases = [
    ({"store": [1, 4, 2]}, "'store': 4 is not among the 4 tokens"),
    ({"age": [1, None, 3]}, "'age': nan"),
    ({"user": np.ones(3)}, "'user': float64"),
    ({"genre": [["a"] * 4, [], []]}, "'genre': Bag 0.*max_valency=3"),
  ]
  refused(cases, lambda change: TRANSFORMS(BATCH | change))
  batch = {name: column for name, column in BATCH.items() if name != "user"}
  refused([(batch, "'user': the batch has no 'user'")], TRANSFORMS)


def test_in_a_grain_pipeline():
  dataset = grain.MapDataset.source([BATCH] * 3).map(TRANSFORMS).to_iter_dataset()
  assert [plain(inputs) for inputs in dataset] == [GOLDEN] * 3


def test_single_examples_can_be_batched_by_grain():
  """A bag of one example is `Padded` of one axis."""
  transforms = Transforms({"genre": Vocabulary(["drama", "comedy"]), "age": Bucketized([18])})
  examples = [
    {"genre": embed.Padded(["drama", ""]), "age": 17},
    {"genre": embed.Padded(["comedy", "drama"]), "age": 18.0},
  ]
  inputs = next(iter(grain.MapDataset.source(examples).map(transforms).batch(2)))
  assert inputs["genre"].values.tolist() == [[0, -1], [1, 0]]
  assert inputs["age"].tolist() == [0, 1]


@pytest.mark.ci
def test_a_layer_reads_it():
  """One table per column, sized by it."""
  tables = {
    name: embed.TableConfig(column.vocabulary_size, 4, combiner="sum", name=name)
    for name, column in TRANSFORMS.columns.items()
  }
  features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
  ids = TRANSFORMS(BATCH)
  weights = {"tag": embed.to_padded([[0.5, 2.0], [1.0], []], max_valency=2)}
  embed.validate(features, ids, weights)
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  act = nnx.jit(lambda layer, *inputs: layer(*inputs))(layer, ids, weights)
  rows = {name: np.asarray(table) for name, table in layer.tables.items()}
  first, second = ids["tag"].values[0]
  expected = 0.5 * rows["tag"][first] + 2 * rows["tag"][second]
  np.testing.assert_allclose(act["tag"][0], expected, rtol=1e-6)
  np.testing.assert_array_equal(act["age"], rows["age"][[0, 2, 3]])
