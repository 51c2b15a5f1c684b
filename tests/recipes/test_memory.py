"""Evaluation costs the batch, nothing of a table's size; input costs the same for any rows."""

import dataclasses
import re
import tracemalloc

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import recipe_runs
from flax import nnx
from ml_collections import ConfigDict

import embed
from recipes import pipeline
from recipes.dlrm import data as clicks
from recipes.dlrm import train as dlrm
from recipes.two_tower import data as pairs
from recipes.two_tower import train as two_tower

ROWS, DIM, BATCH = 80_000, 8, 16
# What hands an array on without making a new one.
PASSED_ON = "parameter|tuple|get-tuple-element|while|bitcast|call|conditional|opt-barrier"


def config(name):
  settings = recipe_runs.load(f"{name}", "smoke")
  settings.dim = DIM
  return settings


def tables(model):
  return [x for x in jax.tree.leaves(nnx.state(model, embed.Table)) if x.size >= ROWS * DIM]


def made(compiled, model):
  """The instructions of a compiled program that make an array of a table's or a shard's shape."""
  shapes = {x.shape for x in tables(model)}
  shapes |= {x.sharding.shard_shape(x.shape) for x in tables(model)}
  assert shapes, "the check is about large tables"
  either = "|".join(f"{rows},{dim}" for rows, dim in shapes)
  line = re.compile(rf"= f32\[({either})\]\S* (?!({PASSED_ON})\()[\w\-]+\(")
  return [text for text in compiled.as_text().splitlines() if line.search(text)]


def assert_no_table(function, model, *args):
  compiled = function.trace(nnx.view(model, deterministic=True), *args).lower().compile()
  assert made(compiled, model) == []
  smallest = min(x.addressable_shards[0].data.nbytes for x in tables(model))
  assert compiled.memory_analysis().output_size_in_bytes < smallest


@pytest.fixture
def mesh():
  return meshes.make_mesh()


@pytest.mark.ci
def test_clicks(mesh):
  settings = config("dlrm.criteo_1tb")
  data = clicks.describe(settings)
  features = [f | {"vocabulary_size": ROWS // 8} for f in data.meta["features"]]
  data = dataclasses.replace(data, meta=data.meta | {"features": features})
  model = dlrm.build_model(settings, data, mesh)
  assert_no_table(dlrm.predict, model, clicks.batch_shapes(data, ConfigDict({"batch_size": BATCH})))


@pytest.mark.ci
def test_candidates(mesh):
  settings = config("two_tower.synthetic")
  meta = {"splits": {"train": (0, 0)}, "users": ROWS, "items": ROWS}
  meta["features"] = {"user": (), "item": ()}
  data = pairs.RetrievalData({"item": np.zeros(0, np.int32)}, meta)
  settings.query, settings.candidate = ("user",), ("item",)
  model, ids = two_tower.build_model(settings, data, mesh), jnp.zeros(BATCH, jnp.int32)
  encode = two_tower.make_encode(mesh)
  batch = {"candidate": {"item": ids}, "popularity": jnp.zeros(BATCH)}
  assert_no_table(encode, model, batch)
  vectors, seen = jnp.zeros((ROWS, DIM)), jnp.zeros((BATCH, 3), jnp.int32)
  # Every device encodes its part of a batch, and scores its own candidates.
  split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
  batch = jax.device_put(batch, split)
  encoded = encode(nnx.view(model, deterministic=True), batch)
  assert encoded.sharding.is_equivalent_to(split, 2)
  vectors = jax.device_put(vectors, split)
  assert_no_table(two_tower.make_rank(settings, ROWS, mesh), model, vectors, {"user": ids}, seen)


class Computed:
  """A column of any length, computed where it is indexed."""

  def __init__(self, size):
    self.shape, self.dtype = (size,), np.dtype(np.int64)

  def __getitem__(self, rows):
    return rows % 1000


def input_memory(size):
  """Returns the bytes that batches of so many rows take at their peak."""
  source = pipeline.ShuffledBatches(
    {"x": Computed(size)}, (0, size), batch_size=8192, seed=0, num_batches=10**9
  )
  tracemalloc.start()
  try:
    for number in (0, 1, 3 * size // 8192):  # in the fourth epoch, too
      assert source[number]["x"].shape == (8192,)
    return tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


def test_shuffled_input_is_as_large_for_a_billion_rows():
  one_window, windows, billion, most = (input_memory(10**n) for n in (6, 7, 9, 10))
  assert max(one_window, windows, billion, most) < 40e6
  assert billion < 1.25 * windows
