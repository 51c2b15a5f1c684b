"""A full checkpoint and the deltas after it are the later state to the bit, wherever it is put."""

import dataclasses
import io
import re
import threading

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import make_mesh

import embed
from embed.storage import changes

ROWS = 61  # no multiple of any number of shards


class Small(nnx.Module):
  """One table and a dense part, as a server has them."""

  def __init__(self, rows=4, dim=2, name="t", optimizer=None, dtype=jnp.float32, seed=0, **where):
    rngs = nnx.Rngs(seed)
    table = embed.TableConfig(rows, dim, name=name, optimizer=optimizer, dtype=dtype)
    self.embed = embed.SparseEmbed(embed.FeatureConfig(table), rngs=rngs, **where)
    self.bias = nnx.Param(jnp.zeros(1))


def bits(x):
  return x.view(f"uint{8 * x.dtype.itemsize}") if x.dtype.kind in "fV" else x


def assert_same_bits(actual, expected):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), actual, expected)


def tree_of(nodes):
  return jax.tree.map(np.array, embed.checkpoint.to_tree(**nodes))


# --- by hand --------------------------------------------------------------------------------------


def after(since, **variables):
  """Loads arrays into a new model of four rows, and returns its delta."""
  model = Small(optimizer=embed.adam(0.1))
  fingerprints = embed.deltas.fingerprint(since, model=model)
  model.embed.load_variables({"t": {key: np.array(x, np.float32) for key, x in variables.items()}})
  return embed.deltas.changes(fingerprints, since + 1, model=model)[0]


def test_the_changed_rows_and_their_slots():
  """Rows 1 and 3 change: one by a slot that takes another one's values, one by a tiny slot."""
  momenta, velocities = np.zeros((4, 2)), np.zeros((4, 2))
  momenta[1], velocities[3, 1] = [1, 2], 1e-30
  delta = after(7, momenta=momenta, velocities=velocities)
  rows = delta.tables["model"]["embed/t"]
  assert (delta.since, delta.step, rows.ids.tolist()) == (7, 8, [1, 3])
  assert sorted(rows.values) == ["momenta", "parameters", "velocities"]
  assert rows.values["momenta"].tolist() == [[1, 2], [0, 0]]
  assert delta.state["model"]["bias/value"].tolist() == [0]


def test_every_bit_of_a_row_counts():
  """Of many rows of few different words; a lost sign of zero and words that change places, too."""
  config = embed.TableConfig(4096, 4, jax.nn.initializers.zeros, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))
  grid = np.stack(np.meshgrid(*[np.arange(8.0, dtype=np.float32)] * 4, indexing="ij"), -1)
  rows = grid.reshape(-1, 4).copy()
  layer.load_tables({"t": rows})
  before = embed.deltas.fingerprint(0, model=layer)
  for k in range(128):  # bit k of the row 8 * k + 1
    rows.view(np.uint32)[8 * k + 1, k // 32] ^= np.uint32(1) << np.uint32(k % 32)
  rows[0, 0] = -0.0
  rows[2047, :2] *= -1
  rows[2046] = rows[2046, ::-1]
  layer.load_tables({"t": rows})
  delta, _ = embed.deltas.changes(before, 1, model=layer)
  assert delta.tables["model"]["t"].ids.tolist() == sorted([0, 2046, 2047, *range(1, 1024, 8)])


@pytest.mark.ci
def test_many_rows_go_in_pieces(monkeypatch):
  monkeypatch.setattr(changes, "_CHUNK", 16)
  monkeypatch.setattr(changes, "_LEAST", 4)
  jax.clear_caches()
  source, target = Small(ROWS), Small(ROWS)
  since = embed.deltas.fingerprint(0, model=source)
  source.embed.load_tables({"t": np.ones((ROWS, 2))})
  delta, _ = embed.deltas.changes(since, 1, model=source)
  assert len(delta.tables["model"]["embed/t"].ids) == ROWS
  embed.deltas.apply(delta, 0, model=target)
  assert_same_bits(tree_of({"model": target}), tree_of({"model": source}))


# --- a run and its server -------------------------------------------------------------------------


class Model(nnx.Module):
  """Tables that share a stack, slots by row and by value, bfloat16, and a dense part."""

  def __init__(self, seed=0, slots=True, **where):
    rngs = nnx.Rngs(seed)
    adam, rowwise = (embed.adam(0.1), embed.rowwise_adagrad(0.1)) if slots else (None, None)
    tables = {
      "a": embed.TableConfig(ROWS, 8, name="a", optimizer=adam),
      "b": embed.TableConfig(24, 8, name="b", optimizer=adam),
      "c": embed.TableConfig(16, 8, name="c", optimizer=rowwise),
      "d": embed.TableConfig(40, 8, name="d", optimizer=adam, dtype=jnp.bfloat16),
    }
    features = {name: embed.FeatureConfig(config) for name, config in tables.items()}
    self.embed = embed.SparseEmbed(features, rngs=rngs, **where)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, batch):
    total = sum(x.astype(jnp.float32) for x in self.embed(batch).values())
    return jnp.mean(self.head(self.dropout(total)) ** 2)


def make(seed=0, **where):
  model = Model(seed, **where)
  return {"model": model, "optimizer": embed.Optimizer(model, optax.adam(0.01))}


@nnx.jit
def train_step(model, optimizer, batch):
  _, grads = embed.value_and_grad(lambda model, batch: model(batch))(model, batch)
  optimizer.update(model, grads)


def train(nodes, step):
  """Updates few rows, others in each step."""
  draw = np.random.default_rng(step)
  sizes = {"a": ROWS, "b": 24, "c": 16, "d": 40}
  batch = {name: np.resize(draw.integers(0, size, 3), 24) for name, size in sizes.items()}
  train_step(nodes["model"], nodes["optimizer"], batch)


@pytest.mark.ci
def test_base_and_deltas_are_a_full_save(tmp_path):
  """On the same mesh and on one device; a server without optimizers takes the rows."""
  where = {"mesh": make_mesh(), "sharding": "mod"}
  nodes = make(**where)
  base, since = tree_of(nodes), embed.deltas.fingerprint(0, **nodes)
  for step in range(1, 4):
    train(nodes, step)
    delta, since = embed.deltas.changes(since, step, **nodes)
    embed.deltas.write(tmp_path / str(step), delta)
  expected = tree_of(nodes)
  served = {"model": Model(1, slots=False)}
  for restored in (make(seed=1, **where), make(seed=1), served):
    embed.checkpoint.from_tree(base, **restored)
    at = 0
    for step in range(1, 4):
      at = embed.deltas.apply(embed.deltas.read(tmp_path / str(step)), at, **restored)
    assert at == 3
    if restored is not served:
      assert_same_bits(tree_of(restored), expected)
  actual = tree_of(served)["model"]
  assert_same_bits(actual["state"], expected["model"]["state"])
  for key, arrays in expected["model"]["tables"].items():
    assert_same_bits(actual["tables"][key], {"parameters": arrays["parameters"]})


def test_a_failure_in_the_middle_changes_nothing(monkeypatch):
  model, delta = Small(optimizer=embed.adam(0.1)), delta_of(optimizer=embed.adam(0.1))
  before, put = tree_of({"model": model}), changes.put

  def put_and_fail(*args):
    put(*args)
    raise MemoryError

  monkeypatch.setattr(changes, "put", put_and_fail)
  with pytest.raises(MemoryError):
    embed.deltas.apply(delta, 0, model=model)
  assert_same_bits(tree_of({"model": model}), before)
  monkeypatch.undo()
  embed.deltas.apply(delta, 0, model=model)
  assert (np.asarray(model.embed.tables["t"]) == 7).all()


# --- what does not fit ----------------------------------------------------------------------------


def delta_of(value=7.0, **arguments):
  model = Small(**arguments)
  since = embed.deltas.fingerprint(0, model=model)
  model.embed.load_tables({"t": np.full((4, 2), value)})
  return embed.deltas.changes(since, 1, model=model)[0]


def test_what_does_not_fit_is_named_and_nothing_changes():
  trained = delta_of(optimizer=embed.adam(0.1))
  for model, message in [
    (Small(rows=3), r"embed/t has row 3, the model's has rows 0 .. 2"),
    (Small(dim=3), r"embed/t/parameters has shape \(4, 2\), the model's has \(4, 3\)"),
    (Small(name="u"), r"tables/embed/u/parameters is missing; .*embed/t/parameters is not in the"),
    (Small(optimizer=embed.adagrad(0.1)), "t/accumulators is missing; .*t/momenta is not in the"),
    (Small(seed=1), r"against other rows: tables embed/t of 'model'.*load a full checkpoint"),
  ]:
    before = nnx.state(model)
    with pytest.raises(ValueError, match=message):
      embed.deltas.apply(trained, 0, model=model)
    after = nnx.state(model)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, after, before)))
  with pytest.raises(ValueError, match=r"The delta has no 'tower'; it has \['model'\]"):
    embed.deltas.apply(trained, 0, tower=Small())
  with pytest.raises(ValueError, match="`at` must be an int"):
    embed.deltas.apply(trained, None, model=Small())
  since = embed.deltas.fingerprint(np.int64(0), model=Small())
  for other in ({"tower": Small()}, {"model": Small(rows=5)}, {"model": Small(mesh=make_mesh())}):
    with pytest.raises(ValueError, match=r"are of other tables .* or of another mesh"):
      embed.deltas.changes(since, 1, **other)


def test_a_broken_chain_is_refused():
  """By the step; and by the rows, where the step fits, for one bit of one row."""
  first, second = delta_of(1.0), dataclasses.replace(after(1, parameters=np.ones((4, 2))), since=0)
  with pytest.raises(ValueError, match="from step 0 to 1, and the state is at step 1: apply the"):
    embed.deltas.apply(first, 1, model=Small())
  model = Small()
  rows = np.array(model.embed.tables["t"])
  rows.view(np.uint32)[3, 1] ^= 1
  model.embed.load_tables({"t": rows})
  for delta in (first, second):
    with pytest.raises(ValueError, match="made against other rows"):
      embed.deltas.apply(delta, 0, model=model)
  assert_same_bits(np.array(model.embed.tables["t"]), rows)


def test_a_server_in_another_dtype_takes_deltas():
  served = Small(dtype=jnp.bfloat16)
  embed.deltas.apply(delta_of(), 0, model=served)
  assert set(np.asarray(served.embed.tables["t"]).ravel().tolist()) == {7.0}


# --- other threads --------------------------------------------------------------------------------


def test_a_request_in_flight_does_not_undo_a_delta():
  """It has read the model when the delta is applied, and returns afterwards."""
  served, delta = Small(), delta_of()
  began, go_on = threading.Event(), threading.Event()

  @nnx.jit(graph=False)
  def predict(model):
    began.set()
    go_on.wait()
    return model.embed(np.arange(4))

  thread = threading.Thread(target=predict, args=(served,))
  thread.start()
  began.wait()
  embed.deltas.apply(delta, 0, model=served)
  go_on.set()
  thread.join()
  assert served.embed(np.arange(4)).tolist() == [[7, 7]] * 4


# --- files ----------------------------------------------------------------------------------------


def test_the_file_is_numpys(tmp_path):
  """Names, dtypes, and the bits of bfloat16."""
  delta = delta_of(dtype=jnp.bfloat16)
  embed.deltas.write(tmp_path, delta)
  with np.load(tmp_path / "rows-00000-of-00001.npz") as file:
    assert file["tables/model/embed/t/ids"].tolist() == [0, 1, 2, 3]
    values = file["tables/model/embed/t/values/parameters"]
    assert values.dtype == np.uint16
    assert (values.view(ml_dtypes.bfloat16) == 7).all()
    assert "state/model/bias/value" in file.files
  again = embed.deltas.read(tmp_path)
  assert_same_bits((again.tables, again.state), (delta.tables, delta.state))
  assert (again.since, again.step, again.before, again.after) == (0, 1, delta.before, delta.after)


def test_damage_is_named(tmp_path):
  embed.deltas.write(tmp_path, delta_of())
  (path,) = tmp_path.iterdir()
  content = path.read_bytes()
  other = io.BytesIO()
  np.savez(other, header=np.frombuffer(b"[]", np.uint8))
  flipped = content[:500] + bytes([content[500] ^ 16]) + content[501:]

  def read(content):
    path.write_bytes(content)
    embed.deltas.read(tmp_path)

  damaged = (content[: len(content) // 2], b"", flipped, other.getvalue())
  cases.refused([(x, re.escape(str(path))) for x in damaged], read)
  with pytest.raises(FileNotFoundError, match="holds no delta"):
    embed.deltas.read(tmp_path / "nothing")


def write_as(monkeypatch, folder, delta, index, count):
  """Writes the rows of a process, one of `count`."""
  half = lambda x: x[index::count]
  rows = delta.tables["model"]["embed/t"]
  part = changes.TableRows(half(rows.ids), jax.tree.map(half, rows.values))
  monkeypatch.setattr(jax, "process_index", lambda: index)
  monkeypatch.setattr(jax, "process_count", lambda: count)
  embed.deltas.write(folder, dataclasses.replace(delta, tables={"model": {"embed/t": part}}))
  monkeypatch.undo()


def test_files_of_several_processes_are_one_delta(tmp_path, monkeypatch):
  """All of them, and of one attempt; a later write of another number of processes replaces them."""
  old, new = delta_of(1.0), delta_of(2.0)
  embed.deltas.write(tmp_path, new)
  write_as(monkeypatch, tmp_path, old, 0, 2)
  with pytest.raises(FileNotFoundError, match=r"rows-00001-of-00002.npz is missing"):
    embed.deltas.read(tmp_path)
  write_as(monkeypatch, tmp_path, old, 1, 2)
  assert_same_bits(embed.deltas.read(tmp_path).tables, old.tables)
  write_as(monkeypatch, tmp_path, new, 0, 2)  # this attempt was killed
  with pytest.raises(ValueError, match=r"rows-00000-of-00002.*rows-00001-of-00002.*two deltas"):
    embed.deltas.read(tmp_path)
  embed.deltas.write(tmp_path, new)
  assert [path.name for path in tmp_path.glob("*.npz")] == ["rows-00000-of-00001.npz"]
  assert_same_bits(embed.deltas.read(tmp_path).tables, new.tables)
