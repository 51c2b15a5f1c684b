"""Exported models: the same bits in a process that has only JAX, for any batch."""

import collections
import contextlib
import os
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import embed


def small(combiner="sum", vocabulary_size=4, dim=1, **feature):
  """A layer with one table, whose row i is 10 ** i."""
  powers = lambda key, shape, dtype: (10.0 ** np.arange(shape[0])[:, None] * np.ones(dim)).astype(
    dtype
  )
  table = embed.TableConfig(vocabulary_size, dim, powers, None, combiner, "t")
  return embed.SparseEmbed({"f": embed.FeatureConfig(table, **feature)}, rngs=nnx.Rngs(0))


def call(model, *args):
  return model(*args)


# ------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize("way", ["rows", "lines"], indirect=True)
def test_numbers(way):
  """Ids that are rows and others, and arrays that are trained later."""
  exported = embed.export(call, small(), {"f": embed.Padded([[1, 2]])})
  assert list(exported.arrays) == ["t"]
  assert exported.arrays["t"].tolist() == [[1], [10], [100], [1000]]
  serve = lambda arrays, ids: exported.program.call(arrays, {"f": np.array([ids])})["f"].tolist()
  assert serve(exported.arrays, [0, 3]) == [[1001]]
  assert serve(exported.arrays, [9, -9]) == [[0]]
  assert serve({"t": 2 * exported.arrays["t"]}, [1, 1]) == [[40]]


def test_any_batch():
  layer = small(max_sequence_length=3)
  exported = embed.export(call, layer, {"f": embed.Padded([[1, 2]])}, any_batch=True)
  for batch in (1, 3):
    act = exported.program.call(exported.arrays, {"f": np.full((batch, 2), 2)})["f"]
    assert np.asarray(act)[..., 0].tolist() == [[100, 100, 0]] * batch


@pytest.mark.parametrize("max_valency", [None, 2])
def test_ragged(max_valency):
  """Any batch, the values being a buffer; or any number of values as well."""
  ragged = lambda values, row_splits: embed.Ragged(values, row_splits, max_valency)
  layer, platforms = small("mean"), ("cpu", "cuda", "tpu")
  example = {"f": ragged([1, 2, 3], [0, 1, 3])}
  exported = embed.export(call, layer, example, any_batch=True, platforms=platforms)
  assert exported.program.platforms == platforms
  plain = {"values": np.array([2, 1, 0]), "row_splits": np.array([0, 0, 2, 2, 2])}
  act = exported.program.call(exported.arrays, {"f": plain})["f"]
  assert act.tolist() == [[0], [55], [0], [0]]
  batch, number = jax.export.symbolic_shape("batch, number")
  struct = lambda size: jax.ShapeDtypeStruct((size,), jnp.int32)
  exported = embed.export(call, layer, {"f": ragged(struct(number), struct(batch + 1))})
  plain = {"values": np.array([2, 1, 0, 0, 3]), "row_splits": np.array([0, 2, 4])}
  assert exported.program.call(exported.arrays, {"f": plain})["f"].tolist() == [[55], [1]]


def test_sparse_and_weights():
  ids = embed.Sparse([[0, 0], [1, 0], [1, 1]], [1, 2, 3], (2, 2))
  weights = embed.Sparse(ids.indices, [1.0, 1.0, 1.0], (2, 2))
  exported = embed.export(call, small("mean"), {"f": ids}, {"f": weights})
  plain = {"indices": np.array([[0, 0], [0, 1], [1, 1]]), "values": np.array([0, 1, 2])}
  halves = plain | {"values": np.array([0.5, 0.5, 2], np.float32)}
  act = exported.program.call(exported.arrays, {"f": plain}, {"f": halves})["f"]
  assert act.tolist() == [[5.5], [100]]


def test_structures_are_plain():
  Pair = collections.namedtuple("Pair", "ids weights")

  def function(layer, inputs):
    act = layer({"f": inputs["z"][0].ids}, {"f": inputs["z"][0].weights})["f"]
    return Pair(
      act, (collections.OrderedDict(z=act + inputs["scalar"], a=None), [embed.Padded(act)])
    )

  pair = Pair(embed.Padded([[1, 2]]), embed.Padded([[1.0, 2.0]]))
  inputs = collections.OrderedDict(z=(pair,), scalar=np.float32(1))
  exported = embed.export(function, small(), inputs, any_batch=True)
  plain = {"ids": np.array([[0, 1]]), "weights": np.array([[2, 3]], np.float32)}
  out = exported.program.call(exported.arrays, {"z": (plain,), "scalar": np.float32(5)})
  assert type(out) is dict
  assert out["ids"].tolist() == [[32]]
  assert out["weights"][0]["z"].tolist() == [[37]]
  assert out["weights"][0]["a"] is None
  assert out["weights"][1][0].tolist() == [[32]]
  exported.program.serialize()  # JAX refuses structures that it could not read back


# ------------------------------------------------------------------------ what is in it


class Towers(nnx.Module):
  """A weighted feature, and a ragged one of a table in bfloat16."""

  def __init__(self):
    rngs, rows = nnx.Rngs(0), lambda key, shape, dtype: np.linspace(-1, 1, 32).reshape(shape)
    user = embed.TableConfig(8, 4, rows, name="user")
    item = embed.TableConfig(8, 4, rows, combiner="sqrtn", name="item", dtype=jnp.bfloat16)
    self.query = embed.SparseEmbed({"user": embed.FeatureConfig(user)}, embed.adam(), rngs=rngs)
    self.items = embed.SparseEmbed({"item": embed.FeatureConfig(item)}, embed.adam(), rngs=rngs)
    self.head = nnx.Linear(4, 4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def user(self, batch, weights=None):
    return self.dropout(self.head(self.query(batch, weights)["user"]))

  def __call__(self, batch, weights=None):
    users = self.user({"user": batch["user"]}, weights)
    return {"score": users @ self.items({"item": batch["item"]})["item"].T}


@pytest.mark.parametrize("any_batch", [False, True])
def test_only_what_is_read_is_there(any_batch):
  """Also below a jitted function. The model is left as it was, with its slots."""
  model = Towers()
  model.eval()
  ids, before = np.array([1, 2]), jax.tree.leaves(nnx.state(model))
  names = lambda f, example: sorted(embed.export(f, model, example, any_batch=any_batch).arrays)
  of_user = ["head/bias", "head/kernel", "query/user"]
  assert names(Towers.user, {"user": ids}) == of_user
  assert names(nnx.jit(Towers.user, graph=False), {"user": ids}) == of_user
  assert names(Towers.__call__, {"user": ids, "item": ids}) == sorted([*of_user, "items/item"])
  query = np.ones((2, 4), np.float32)
  assert names(lambda m, q: m.items.attend(q, "item"), query) == ["items/item"]
  assert names(lambda m, q: q @ m.items.tables["item"].T, query) == ["items/item"]
  assert list(model.query.variables["user"]) == ["parameters", "momenta", "velocities"]
  assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_the_program_does_not_grow_with_the_tables():
  exported = embed.export(call, small(vocabulary_size=30, dim=1000), {"f": np.array([1])})
  assert len(exported.program.serialize()) < 20_000 < exported.arrays["t"].nbytes


def test_a_bfloat16_table_is_not_copied():
  """It is stored as uint16, and the gather reads it as such."""
  halves = lambda key, shape, dtype: np.full(shape, 0.5, dtype)
  table = embed.TableConfig(100_000, 8, halves, name="t", dtype=jnp.bfloat16)
  layer = embed.SparseEmbed({"f": embed.FeatureConfig(table)}, rngs=nnx.Rngs(0))
  exported = embed.export(call, layer, {"f": np.array([7])})
  assert exported.arrays["t"].dtype == np.uint16
  inputs = {"f": np.array([9])}
  act = exported.program.call(exported.arrays, inputs)["f"]
  assert act.dtype == jnp.float32
  assert np.asarray(act).tolist() == [[0.5] * 8]
  compiled = jax.jit(exported.program.call).lower(exported.arrays, inputs).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 10_000


@pytest.mark.ci
def test_a_model_on_a_mesh_is_exported_as_on_one_device():
  """Five rows and three columns: nothing divides by eight."""
  table = embed.TableConfig(5, 3, name="t", optimizer=embed.adam())
  make = lambda **where: embed.SparseEmbed(
    {"f": embed.FeatureConfig(table)}, rngs=nnx.Rngs(0), **where
  )
  batch = {"f": embed.Padded([[1, 4, -1], [0, 2, 2]])}
  layers = (make(), make(mesh=jax.make_mesh((8,), ("data",))))
  one, spread = (embed.export(call, layer, batch, any_batch=True) for layer in layers)
  np.testing.assert_array_equal(one.arrays["t"], spread.arrays["t"])
  assert spread.program.nr_devices == 1
  assert one.program.mlir_module() == spread.program.mlir_module()


def test_errors_say_what_to_write():
  layer, ids = small(), np.array([1, 2])
  sparse = embed.Sparse([[0, 0]], [1], (2, 2))
  with pytest.raises(ValueError, match=r"random numbers, by 'dropout/rngs/key': call model.eval"):
    embed.export(Towers.user, Towers(), {"user": ids})
  with pytest.raises(ValueError, match="dense_shape, which is static"):
    embed.export(call, layer, {"f": sparse}, any_batch=True)
  with pytest.raises(ValueError, match=r"arrays. Got <class 'embed.gradients.Grads'>"):
    embed.export(lambda m, ids: embed.Grads(m({"f": ids}), {}), layer, ids)
  with pytest.raises(ValueError, match=r"called 'program.bin'; rename the table"):
    embed.export(lambda m, ids: ids, {"program.bin": np.ones(1)}, ids)
  with (
    jax.set_mesh(jax.make_mesh((8,), ("data",))),
    pytest.raises(ValueError, match=r"leave jax\.set_mesh"),
  ):
    embed.export(call, layer, {"f": ids})


# -------------------------------------------------------------------------------- files


def towers_batch(size):
  draw = np.random.default_rng(size)
  ids = draw.integers(-1, 8, (size, 4)).astype(np.int32)
  weights = draw.uniform(0.5, 2, (size, 4)).astype(np.float32)
  values, splits = draw.integers(0, 8, 12).astype(np.int32), np.arange(size + 1, dtype=np.int32)
  return {"ids": ids, "weights": weights, "values": values, "row_splits": splits * (12 // size)}


def as_given(ids, weights, values, row_splits):
  batch = {"user": embed.Padded(ids), "item": embed.Ragged(values, row_splits)}
  return batch, {"user": embed.Padded(weights)}


SERVE = """
import sys
for name in ("embed", "flax", "optax", "orbax"):
  sys.modules[name] = None  # importing it raises
import jax, numpy as np

arrays = dict(np.load("model.npz"))
program = jax.export.deserialize(bytearray(arrays.pop("program.bin")))
for size in (2, 4):
  given = dict(np.load(f"batch_{size}.npz"))
  items = {name: given[name] for name in ("values", "row_splits")}
  out = program.call(arrays, {"user": given["ids"], "item": items}, {"user": given["weights"]})
  np.savez(f"out_{size}.npz", **out)
"""


@pytest.mark.ci
def test_a_fresh_process_gives_the_same_numbers(tmp_path):
  """A model, exported for batches of any size, against the model itself under jit."""
  model = Towers()
  model.eval()
  exported = embed.export(call, model, *as_given(**towers_batch(2)), any_batch=True)
  exported.save(tmp_path / "model.npz")
  for size in (2, 4):
    np.savez(tmp_path / f"batch_{size}.npz", **towers_batch(size))
  environment = os.environ | {"PYTHONPATH": ""}
  subprocess.run([sys.executable, "-c", SERVE], cwd=tmp_path, env=environment, check=True)
  for size in (2, 4):
    wanted = nnx.jit(call)(model, *as_given(**towers_batch(size)))
    with np.load(tmp_path / f"out_{size}.npz") as out:
      np.testing.assert_allclose(out["score"], wanted["score"], rtol=1e-6, atol=1e-6)
      assert np.unique(out["score"]).size > size


def save(path, factor, size=4):
  """Saves an export that answers `factor`."""
  tables = {"file": np.full((size, 1), factor, np.float32)}  # numpy.savez would refuse this name
  embed.export(lambda tables, ids: tables["file"][ids], tables, np.array([0])).save(path)


@contextlib.contextmanager
def full_disk(size):
  """Writing a byte after the first `size` bytes of a file raises OSError."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_there(tmp_path):
  path = tmp_path / "new folder" / "model.npz"
  for factor in (3, 5):
    save(path, factor)
  with full_disk(1 << 15), pytest.raises(OSError, match=r"too large.*model\.npz"):
    save(path, 7, size=1 << 16)
  arrays = dict(np.load(path))
  program = jax.export.deserialize(bytearray(arrays.pop("program.bin")))
  assert program.call(arrays, np.array([0])).item() == 5
  assert [x.name for x in path.parent.iterdir()] == ["model.npz"]
