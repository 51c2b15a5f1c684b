"""A full checkpoint and the deltas after it are the later state to the bit, wherever it is put."""

import concurrent.futures
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import cases
import jax
import jax.numpy as jnp
import kills
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import make_mesh

import embed
from embed.storage import changes

ROOT = pathlib.Path(__file__).parents[1]
ROWS = 61  # no multiple of any number of shards


class Model(nnx.Module):
  """Tables that share a stack, with slots by row and by value, bfloat16, and a dense part."""

  def __init__(self, seed=0, slots=True, **where):
    rngs = nnx.Rngs(seed)
    adam, rowwise = (embed.adam(0.1), embed.rowwise_adagrad(0.1)) if slots else (None, None)
    table = lambda name, rows, dim, optimizer, dtype=jnp.float32: embed.TableConfig(
      rows, dim, name=name, optimizer=optimizer, dtype=dtype
    )
    tables = {
      "a": table("a", ROWS, 8, adam),
      "b": table("b", 24, 8, adam),
      "c": table("c", 16, 6, rowwise),
      "d": table("d", 40, 8, adam, jnp.bfloat16),
    }
    self.embed = embed.SparseEmbed(
      {name: embed.FeatureConfig(config) for name, config in tables.items()}, rngs=rngs, **where
    )
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, batch):
    x = self.embed(batch)
    total = x["a"] + x["b"] + x["d"].astype(jnp.float32)
    return jnp.mean(self.head(self.dropout(total)) ** 2) + jnp.mean(x["c"] ** 2)


PLACES = {
  "one device": dict,
  "mod": lambda: {"mesh": make_mesh(), "sharding": "mod"},
  "div": lambda: {"mesh": make_mesh("explicit"), "sharding": "div"},
  "replicated": lambda: {"mesh": make_mesh(), "sharding": "replicated"},
  "plane": lambda: {"mesh": make_mesh(shape=(2, 4), names=("a", "b")), "axis": ("b", "a")},
}


def make(place, seed=0):
  model = Model(seed, **PLACES[place]())
  return {"model": model, "optimizer": embed.Optimizer(model, optax.adam(0.01))}


def batch(step):
  """Ids of few rows, others in each step."""
  draw = np.random.default_rng(step)
  sizes = {"a": ROWS, "b": 24, "c": 16, "d": 40}
  ids = {name: draw.integers(0, size, 3) for name, size in sizes.items()}
  return {name: np.resize(x, 24) for name, x in ids.items()}


@nnx.jit
def train_step(model, optimizer, batch):
  _, grads = embed.value_and_grad(lambda model, batch: model(batch))(model, batch)
  optimizer.update(model, grads)


def tree_of(nodes):
  return jax.tree.map(np.array, embed.checkpoint.to_tree(**nodes))


def bits(x):
  return x.view(f"uint{8 * x.dtype.itemsize}") if x.dtype.kind in "fV" else x


def assert_same_bits(actual, expected):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), actual, expected)


@pytest.mark.ci
@pytest.mark.parametrize(
  "place",
  ["mod", *(pytest.param(x, marks=pytest.mark.weekly) for x in ("div", "replicated", "plane"))],
)
def test_base_and_deltas_are_a_full_save(place, tmp_path):
  nodes = make(place)
  base, since = tree_of(nodes), embed.deltas.fingerprint(0, **nodes)
  for step in range(1, 4):
    train_step(nodes["model"], nodes["optimizer"], batch(step))
    delta, since = embed.deltas.changes(since, step, **nodes)
    embed.deltas.write(tmp_path / str(step), delta)
  expected = tree_of(nodes)
  for other in dict.fromkeys((place, "one device", "mod")):
    restored = make(other, seed=1)
    embed.checkpoint.from_tree(base, **restored)
    at = 0
    for step in range(1, 4):
      at = embed.deltas.apply(embed.deltas.read(tmp_path / str(step)), at, **restored)
    assert at == 3
    assert_same_bits(tree_of(restored), expected)


def test_every_bit_of_a_row_counts():
  """Of many rows of few different words, a lost sign of zero and words that change places, too."""
  config = embed.TableConfig(4096, 4, jax.nn.initializers.zeros, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))
  grid = np.stack(np.meshgrid(*[np.arange(8.0, dtype=np.float32)] * 4, indexing="ij"), -1)
  rows = grid.reshape(-1, 4).copy()
  layer.load_tables({"t": rows})
  before = embed.deltas.fingerprint(0, model=layer)
  for lane in before.lanes["model"][""][0]:
    # Of 4096 random numbers of 32 bits, two are equal once in 500 times.
    assert len(np.unique(lane)) >= 4094
  assert len(np.unique(np.stack(before.lanes["model"][""][0]), axis=1).T) == 4096
  for k in range(128):  # bit k of the row 8 * k + 1
    rows.view(np.uint32)[8 * k + 1, k // 32] ^= np.uint32(1) << np.uint32(k % 32)
  rows[0, 0] = -0.0
  rows[2047, :2] *= -1
  rows[2046] = rows[2046, ::-1]
  layer.load_tables({"t": rows})
  delta, _ = embed.deltas.changes(before, 1, model=layer)
  changed = sorted([0, 2046, 2047, *range(1, 1024, 8)])
  assert delta.tables["model"]["t"].ids.tolist() == changed
  assert delta.num_rows == len(changed)


def test_a_row_has_changed_if_one_half_of_its_fingerprint_has():
  config = embed.TableConfig(4, 2, jax.nn.initializers.zeros, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))
  before = (np.uint32([1, 2, 3, 4]), np.uint32([5, 6, 7, 8]))
  after = (np.uint32([1, 0, 3, 0]), np.uint32([5, 6, 0, 0]))
  (mask,), counts = changes.changed(tuple(layer.spec.stacks.values()), [before], [after])
  assert mask.tolist() == [False, True, True, True]
  assert counts.tolist() == [3]


def test_a_slot_that_changes_alone_is_noticed():
  """Also two that change places, as words of one row."""
  layer = Other(optimizer=embed.adam(0.1)).embed
  momenta, velocities = np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)
  momenta[1] = [1, 2]
  layer.load_variables({"t": {"momenta": momenta, "velocities": velocities}})
  since = embed.deltas.fingerprint(0, model=layer)
  velocities[3, 1] = 1e-30
  momenta[1], velocities[1] = 0, [1, 2]
  layer.load_variables({"t": {"momenta": momenta, "velocities": velocities}})
  delta, _ = embed.deltas.changes(since, 1, model=layer)
  assert delta.tables["model"]["t"].ids.tolist() == [1, 3]


@pytest.mark.ci
def test_a_delta_of_many_rows_goes_in_pieces(monkeypatch):
  monkeypatch.setattr(changes, "_CHUNK", 16)
  monkeypatch.setattr(changes, "_LEAST", 4)
  jax.clear_caches()
  source, target = Model(0), Model(0)
  since = embed.deltas.fingerprint(0, model=source)
  source.embed.load_tables({"a": np.ones((ROWS, 8)), "b": np.full((24, 8), 2.0)})
  delta, _ = embed.deltas.changes(since, 1, model=source)
  assert delta.num_rows == ROWS + 24
  embed.deltas.apply(delta, 0, model=target)
  assert_same_bits(tree_of({"model": target}), tree_of({"model": source}))


def test_the_size_follows_the_changed_rows(tmp_path):
  layer = Other(1000, 4, optimizer=embed.adagrad(0.1)).embed
  rows, accumulators = np.zeros((1000, 4), np.float32), np.zeros((1000, 4), np.float32)
  since, sizes, files = embed.deltas.fingerprint(0, model=layer), {}, {}
  for step, count in enumerate((1000, 10)):
    rows[:count], accumulators[:count] = 9 + step, 7 + step
    layer.load_variables({"t": {"parameters": rows, "accumulators": accumulators}})
    delta, since = embed.deltas.changes(since, step + 1, model=layer)
    embed.deltas.write(tmp_path / str(count), delta)
    (file,) = (tmp_path / str(count)).iterdir()
    assert delta.tables["model"]["t"].ids.tolist() == list(range(count))
    assert f"{count}" in repr(delta)
    sizes[count], files[count] = delta.nbytes, file.stat().st_size
  of_a_row = 4 + 2 * 4 * 4  # an id, the row and its slot
  assert sizes[1000] - sizes[10] == 990 * of_a_row
  assert 0 <= sizes[10] - 10 * of_a_row <= 100  # other arrays
  assert abs(files[1000] - files[10] - 990 * of_a_row) <= 100


@pytest.mark.ci
def test_a_server_follows_a_training_run(tmp_path):
  nodes = make("mod")
  served = Model(1, slots=False)
  embed.checkpoint.from_tree(tree_of(nodes), model=served)
  plain = {key: x["parameters"] for key, x in tree_of(nodes)["model"]["tables"].items()}
  del plain["embed/c"]  # a server may keep some of the tables only
  since, at, plain_at = embed.deltas.fingerprint(0, **nodes), 0, 0
  for step in (1, 2):
    train_step(nodes["model"], nodes["optimizer"], batch(step))
    delta, since = embed.deltas.changes(since, step, **nodes)
    embed.deltas.write(tmp_path / "delta", delta)  # over the last one, which has been read
    delta = embed.deltas.read(tmp_path / "delta")
    at = embed.deltas.apply(delta, at, model=served)
    plain_at = embed.deltas.apply_to_tables(delta, plain_at, plain)
  assert at == plain_at == 2
  expected = tree_of(nodes)["model"]
  actual = tree_of({"model": served})["model"]
  assert_same_bits(actual["state"], expected["state"])
  for key, arrays in expected["tables"].items():
    assert_same_bits(actual["tables"][key]["parameters"], arrays["parameters"])
    if key in plain:
      assert_same_bits(plain[key], arrays["parameters"])


def test_a_server_that_shares_donated_arrays_is_told():
  """A clone holds the arrays of the model, which the next step donates."""
  model = Other(optimizer=embed.sgd(0.1)).embed
  shared, own = nnx.clone(model), nnx.clone(model)
  nnx.update(own, jax.tree.map(jnp.copy, nnx.state(own)))  # `arrays=True` came with Flax 0.12.8
  before = embed.deltas.fingerprint(0, model=model)
  rows = {"t": embed.RowGrads(np.array([3]), np.ones((1, 2), np.float32))}
  embed.jit_step(lambda model: model.apply_row_gradients(rows), model)()
  delta, _ = embed.deltas.changes(before, 1, model=model)
  embed.deltas.apply(delta, 0, model=own)
  np.testing.assert_array_equal(own.tables["t"], model.tables["t"])
  with pytest.raises(ValueError, match="arrays=True"):
    embed.deltas.apply(delta, 0, model=shared)


def test_a_delta_that_does_not_follow_is_refused():
  nodes = {"model": Other()}
  since = embed.deltas.fingerprint(3, **nodes)
  delta, _ = embed.deltas.changes(since, 5, **nodes)
  tables = {"embed/t": np.zeros((4, 2), np.float32)}
  message = "from step 3 to 5, and the state is at step 4: apply the deltas in between first"
  with pytest.raises(ValueError, match=message):
    embed.deltas.apply(delta, 4, **nodes)
  with pytest.raises(ValueError, match=message):
    embed.deltas.apply_to_tables(delta, 4, tables)


class Other(nnx.Module):
  def __init__(self, rows=4, dim=2, name="t", optimizer=None):
    config = embed.TableConfig(rows, dim, name=name, optimizer=optimizer)
    self.embed = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))


def delta_of(value=7.0, **arguments):
  model = Other(**arguments)
  since = embed.deltas.fingerprint(0, model=model)
  model.embed.load_tables({"t": np.full((4, 2), value)})
  return embed.deltas.changes(since, 1, model=model)[0]


def test_what_does_not_fit_is_named_and_nothing_changes():
  trained = delta_of(optimizer=embed.adam(0.1))
  for model, message in [
    (Other(rows=3), r"table 'embed/t' has row 3, the model's has rows 0 .. 2"),
    (
      Other(dim=3),
      r"of parameters of table 'embed/t' has shape \(2,\), the model's has \(3,\)",
    ),
    (Other(name="u"), r"table 'embed/u' is missing; table 'embed/t' is not in the model"),
    (
      Other(optimizer=embed.adagrad(0.1)),
      "row of accumulators of table 'embed/t' is missing; a row of momenta .* not in the model",
    ),
  ]:
    before = nnx.state(model)
    with pytest.raises(ValueError, match=message):
      embed.deltas.apply(trained, 0, model=model)
    after = nnx.state(model)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, after, before)))
  with pytest.raises(ValueError, match=r"The delta has no 'tower'; it has \['model'\]"):
    embed.deltas.apply(trained, 0, tower=Other())
  for tables, message in [
    ({"t": np.zeros((4, 2))}, r"no table 't'; it has \['embed/t'\]"),
    ({"embed/t": np.zeros((3, 2))}, "'embed/t' has row 3, .* rows 0 .. 2"),
    ({"embed/t": np.broadcast_to(np.zeros(2), (4, 2))}, "'embed/t' is read-only"),
  ]:
    with pytest.raises(ValueError, match=message):
      embed.deltas.apply_to_tables(trained, 0, tables)
    assert not any(x.any() for x in tables.values())
  with pytest.raises(ValueError, match=r"The fingerprints have no 'tower'"):
    embed.deltas.changes(embed.deltas.fingerprint(0, model=Other()), 1, tower=Other())
  with pytest.raises(ValueError, match="The fingerprints are of other tables, or of another mesh"):
    embed.deltas.changes(embed.deltas.fingerprint(0, model=Other()), 1, model=Other(rows=5))


def test_the_file_is_numpys(tmp_path):
  """Of a model without JAX: names, dtypes, and the bits of bfloat16."""
  model = Served(jnp.bfloat16)
  since = embed.deltas.fingerprint(0, model=model)
  rows = np.asarray(model.embed.tables["a"]).copy()
  rows[7] = 3
  model.embed.load_tables({"a": rows})
  delta, _ = embed.deltas.changes(since, 1, model=model)
  embed.deltas.write(tmp_path, delta)
  with np.load(tmp_path / "rows-00000-of-00001.npz") as file:
    assert file["model/tables/embed/a/ids"].tolist() == [7]
    values = file["model/tables/embed/a/parameters"]
    assert values.dtype == np.uint16
    np.testing.assert_array_equal(values.view(ml_dtypes.bfloat16), np.full((1, 8), 3.0))
    assert "model/state/head/kernel/value" in file.files
  again = embed.deltas.read(tmp_path)
  assert_same_bits(again.tables, delta.tables)
  assert_same_bits(again.state, delta.state)


def test_damage_is_named(tmp_path):
  embed.deltas.write(tmp_path, delta_of())
  (path,) = tmp_path.iterdir()
  content = path.read_bytes()
  headers = [[], {"format": 9}, {"format": 1, "dtypes": []}, {"format": 1, "dtypes": {"x": "no"}}]
  damaged = {
    "cut": content[: len(content) // 2],
    "empty": b"",
    "flip": content[:500] + bytes([content[500] ^ 16]) + content[501:],
    **{str(header): with_header(header) for header in headers},
  }

  def check(content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
      embed.deltas.read(tmp_path)

  cases.each({name: (content,) for name, content in damaged.items()}, check)


def with_header(header):
  file = io.BytesIO()
  np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), x=np.zeros(1))
  return file.getvalue()


def test_a_file_of_a_process_that_is_missing_is_named(tmp_path):
  delta = delta_of()
  embed.deltas.write(tmp_path, delta)
  first, second = (f"rows-0000{i}-of-00002.npz" for i in range(2))
  os.rename(tmp_path / "rows-00000-of-00001.npz", tmp_path / first)
  with pytest.raises(FileNotFoundError, match=rf"{second} is missing"):
    embed.deltas.read(tmp_path)
  shutil.copy(tmp_path / first, tmp_path / second)
  both = embed.deltas.read(tmp_path).tables["model"]["embed/t"]
  np.testing.assert_array_equal(both.ids, np.repeat(np.arange(4), 2))
  assert both.values["parameters"].shape == (8, 2)
  with pytest.raises(FileNotFoundError, match="holds no delta"):
    embed.deltas.read(tmp_path / "nothing")


# --- other threads --------------------------------------------------------------------------------


class Served(nnx.Module):
  """One table and a dense part, as a server has them."""

  def __init__(self, dtype=jnp.float32, seed=0, **where):
    rngs = nnx.Rngs(seed)
    table = embed.TableConfig(ROWS, 8, name="a", dtype=dtype)
    self.embed = embed.SparseEmbed({"a": embed.FeatureConfig(table)}, rngs=rngs, **where)
    self.head = nnx.Linear(8, 1, param_dtype=dtype, rngs=rngs)


def served_and_deltas(count, **where):
  """A server, `count` deltas after its state, and the rows of table "a" at the end."""
  trained, served = Served(**where), Served(**where)
  since, deltas = embed.deltas.fingerprint(0, model=trained), []
  rows, draw = np.array(trained.embed.tables["a"]), np.random.default_rng(0)
  for step in range(1, count + 1):
    rows[draw.integers(0, ROWS, 4)] = draw.normal(size=(4, 8))
    trained.embed.load_tables({"a": rows})
    trained.head.bias[...] = np.full(1, step, np.float32)
    delta, since = embed.deltas.changes(since, step, model=trained)
    deltas.append(delta)
  return served, deltas, rows


IDS = {"a": np.arange(24)}


def act(model, batch=IDS):
  return model.embed(batch)["a"] @ model.head.kernel[...] + model.head.bias[...]


def serving_lookup(model):
  """As docs/serving.md has it: the tables of a model, without the model."""
  features = model.embed.spec.features
  look_up = jax.jit(functools.partial(embed.serving_lookup, feature_config=features))
  return lambda model: look_up(IDS, None, {"a": model.embed.tables["a"]})


WAYS = {  # of predicting, as the pages show them
  "graph=False": lambda model: nnx.jit(act, graph=False),
  "graph_updates=False": lambda model: nnx.jit(act, graph_updates=False),
  "view": lambda model: functools.partial(
    lambda predict, view, _: predict(view),
    nnx.jit(act, graph=False),
    nnx.view(model),
  ),
  "eager": lambda model: act,
  "serving_lookup": serving_lookup,
}


def under_readers(served, predict, deltas, readers=3):
  """Applies deltas while threads predict; returns the step, and the errors of apply and threads."""
  predict(served)  # compiled
  stop, errors, calls, error, at = threading.Event(), [], itertools.count(), None, 0

  def read():
    try:
      while not stop.is_set():
        jax.block_until_ready(predict(served))
        next(calls)
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=read) for _ in range(readers)]
  for thread in threads:
    thread.start()
  try:
    for delta in deltas:
      at = embed.deltas.apply(delta, at, model=served)
  except Exception as raised:
    error = raised
  while next(calls) < 20 and not errors:  # requests after the last delta
    time.sleep(0.01)
  stop.set()
  for thread in threads:
    thread.join()
  return at, error, errors


@pytest.mark.weekly
@pytest.mark.parametrize(
  ("way", "place"), [*((way, "one device") for way in WAYS), ("graph=False", "mod")]
)
def test_readers_lose_no_delta(way, place):
  count = 100
  served, deltas, rows = served_and_deltas(count, **PLACES[place]())
  at, error, errors = under_readers(served, WAYS[way](served), deltas)
  assert (at, error, errors) == (count, None, [])
  assert_same_bits(np.array(served.embed.tables["a"]), rows)
  assert served.head.bias[...].tolist() == [count]


def in_flight(model, jitted, meanwhile):
  """Calls `meanwhile` while a call of another thread has read a model and not yet returned."""
  began, go_on, errors = threading.Event(), threading.Event(), []

  def body(model):
    began.set()
    go_on.wait()
    return act(model)

  def call():
    try:
      jitted(body)(model)
    except RuntimeError as error:
      errors.append(str(error))

  thread = threading.Thread(target=call)
  thread.start()
  began.wait()
  try:
    meanwhile()
  finally:
    go_on.set()
    thread.join()
  return errors


@pytest.mark.programs(20, "makes the first server, whose programs the others share")
def test_a_request_in_flight_does_not_undo_the_last_delta():
  served, (delta,), rows = served_and_deltas(1)
  apply = lambda: embed.deltas.apply(delta, 0, model=served)
  assert in_flight(served, functools.partial(nnx.jit, graph=False), apply) == []
  assert_same_bits(np.array(served.embed.tables["a"]), rows)


def with_shardings(f):  # states of Variables go in and out
  shardings = nnx.StateSharding({...: jax.sharding.SingleDeviceSharding(jax.devices()[0])})
  return nnx.jit(f, in_shardings=(shardings,))


@pytest.mark.parametrize(
  ("jitted", "count"), [(nnx.jit, 2), pytest.param(with_shardings, 1, marks=pytest.mark.ci)]
)
def test_a_request_that_would_undo_a_delta_raises(jitted, count):
  served, deltas, _ = served_and_deltas(count)

  def apply():
    for at, delta in enumerate(deltas):
      embed.deltas.apply(delta, at, model=served)

  (error,) = in_flight(served, jitted, apply)
  assert re.search(r"would replace a table that a delta has changed.*graph=False", error)


@pytest.mark.ci
def test_calls_of_the_thread_that_applies_may_write_back():
  served, deltas, rows = served_and_deltas(3)
  predict, at = nnx.jit(act), 0
  for delta in deltas:
    at = embed.deltas.apply(delta, at, model=served)
    predict(served)
  assert_same_bits(np.array(served.embed.tables["a"]), rows)


def in_a_thread(f):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(f).result()


@pytest.mark.ci
@pytest.mark.parametrize(
  "call", [lambda model: nnx.jit(act)(model), lambda model: nnx.cond(True, act, act, model)]
)
def test_calls_after_a_delta_of_another_thread_may_write_back(call):
  served, (delta,), rows = served_and_deltas(1)
  earlier = nnx.state(served)  # keeps the arrays that are replaced
  in_a_thread(lambda: embed.deltas.apply(delta, 0, model=served))
  call(served)
  assert_same_bits(np.array(served.embed.tables["a"]), rows)
  del earlier


def test_a_table_that_is_replaced_meanwhile_is_noticed(monkeypatch):
  served, (delta,), _ = served_and_deltas(1)
  put, zeros = changes.put, np.zeros((ROWS, 8), np.float32)

  def replace_first(*args):
    served.embed.load_tables({"a": zeros})
    return put(*args)

  monkeypatch.setattr(changes, "put", replace_first)
  with pytest.raises(RuntimeError, match="replaced while a delta was applied"):
    embed.deltas.apply(delta, 0, model=served)
  assert_same_bits(np.array(served.embed.tables["a"]), zeros)
  assert served.head.bias[...].tolist() == [0]


def test_a_model_that_is_taken_apart_is_named():
  """Flax clears the modules that it writes back, and fills them again."""
  served, (delta,), _ = served_and_deltas(1)
  clone = nnx.clone(served)
  for part in (served, clone.embed):
    vars(part).clear()
  for model in (served, clone):
    with pytest.raises((RuntimeError, ValueError), match="graph=False"):
      embed.deltas.apply(delta, 0, model=model)


@pytest.mark.programs(30, "trains and compares whole models")
def test_a_failure_in_the_middle_changes_nothing(monkeypatch):
  nodes = make("one device")
  since = embed.deltas.fingerprint(0, **nodes)
  restored, before = make("one device"), tree_of(nodes)
  train_step(nodes["model"], nodes["optimizer"], batch(1))
  delta, _ = embed.deltas.changes(since, 1, **nodes)
  put, calls = changes.put, itertools.count()

  def fail_late(*args):
    if next(calls) == 2:
      raise MemoryError
    return put(*args)

  monkeypatch.setattr(changes, "put", fail_late)
  with pytest.raises(MemoryError):
    embed.deltas.apply(delta, 0, **restored)
  assert_same_bits(tree_of(restored), before)
  monkeypatch.undo()
  embed.deltas.apply(delta, 0, **restored)
  assert_same_bits(tree_of(restored), tree_of(nodes))


# --- digests --------------------------------------------------------------------------------------


def test_a_delta_of_another_model_is_refused():
  _, (first, second), _ = served_and_deltas(2)
  other = Served(seed=7)
  before = tree_of({"model": other})
  with pytest.raises(ValueError, match=r"other parameters: tables/embed/a, .*of another run"):
    embed.deltas.apply(first, 0, model=other)
  assert_same_bits(tree_of({"model": other}), before)
  tables = {"embed/a": np.array(other.embed.tables["a"])}
  with pytest.raises(ValueError, match="other parameters: tables/embed/a of 'model'"):
    embed.deltas.apply_to_tables(first, 0, tables)
  assert_same_bits(tables["embed/a"], before["model"]["tables"]["embed/a"]["parameters"])
  # Of a lost delta, too, though the step fits, and for one bit of one row.
  skipped = dataclasses.replace(second, since=0)
  with pytest.raises(ValueError, match=r"other parameters: tables/embed/a, state/head/bias"):
    embed.deltas.apply(skipped, 0, model=Served())
  flipped = Served()
  changed = np.array(flipped.embed.tables["a"])
  changed.view(np.uint32)[ROWS - 1, 7] ^= 1
  flipped.embed.load_tables({"a": changed})
  with pytest.raises(ValueError, match="other parameters: tables/embed/a of 'model'"):
    embed.deltas.apply(first, 0, model=flipped)


@pytest.mark.ci
def test_digests_are_of_the_rows_wherever_they_are():
  by_place = []
  for place in ("one device", "mod"):
    model = Model(0, slots=False)
    placed = Model(1, slots=place == "mod", **PLACES[place]())
    tree = tree_of({"model": model})
    placed.embed.load_tables(
      {name: tree["model"]["tables"][f"embed/{name}"]["parameters"] for name in "abcd"}
    )
    nnx.update(placed, nnx.state(model, nnx.Param))
    digests = embed.deltas.fingerprint(0, model=placed).digests["model"]
    by_place.append(digests)
    for name in "abcd":
      key = f"tables/embed/{name}"
      assert digests[key] == changes.digest_of(tree["model"]["tables"][key[7:]]["parameters"])
  assert all(digests == by_place[0] for digests in by_place)
  assert set(by_place[0]) == {
    *(f"tables/embed/{name}" for name in "abcd"), "state/head/kernel/value", "state/head/bias/value"
  }  # fmt: skip
  rows = np.arange(8, dtype=np.float32).reshape(4, 2)
  of = [changes.digest_of(x) for x in (rows, rows[::-1].copy(), rows[:3], rows[:, ::-1].copy())]
  assert len(set(of)) == 4


def test_a_server_in_another_dtype_takes_deltas():
  trained, served = Served(), Served(jnp.bfloat16)
  since = embed.deltas.fingerprint(0, model=trained)
  trained.embed.load_tables({"a": np.full((ROWS, 8), 7.0)})
  delta, _ = embed.deltas.changes(since, 1, model=trained)
  embed.deltas.apply(delta, 0, model=served)
  assert set(np.asarray(served.embed.tables["a"]).ravel().tolist()) == {7.0}
  tables = {"embed/a": np.zeros((ROWS, 8), np.float16)}
  embed.deltas.apply_to_tables(delta, 0, tables)
  assert set(tables["embed/a"].ravel().tolist()) == {7.0}


def test_steps_are_integers_of_any_kind(tmp_path):
  model, served = Other(), Other()
  tables = {"embed/t": np.array(served.embed.tables["t"])}
  for integer in (np.int64, np.uint32, jnp.int32, jnp.uint32):
    since = embed.deltas.fingerprint(integer(3), model=model)
    delta, since = embed.deltas.changes(since, integer(5), model=model)
    embed.deltas.write(tmp_path, delta)
    again = embed.deltas.read(tmp_path)
    assert (again.since, again.step, since.step) == (3, 5, 5)
    assert all(type(x) is int for x in (delta.since, delta.step, since.step))
    assert embed.deltas.apply(again, integer(3), model=served) == 5
    assert embed.deltas.apply_to_tables(again, integer(3), tables) == 5


def test_a_step_that_is_no_integer_is_refused():
  delta, model = delta_of(), Other()
  for call in (
    lambda: embed.deltas.fingerprint(1.0, model=model),
    lambda: embed.deltas.changes(embed.deltas.fingerprint(0, model=model), "1", model=model),
    lambda: embed.deltas.apply(delta, 0.0, model=model),
    lambda: embed.deltas.apply_to_tables(delta, None, {}),
  ):
    with pytest.raises(ValueError, match="A step is an integer"):
      call()


# --- files of several attempts --------------------------------------------------------------------


@functools.cache
def of_rows(value):
  """A delta of `Other` whose rows all hold a value."""
  return delta_of(value)


def values(delta):
  return set(delta.tables["model"]["embed/t"].values["parameters"].ravel().tolist())


def write_as(monkeypatch, folder, delta, index, count):
  monkeypatch.setattr(jax, "process_index", lambda: index)
  monkeypatch.setattr(jax, "process_count", lambda: count)
  embed.deltas.write(folder, delta)
  monkeypatch.undo()


def write_by_two(monkeypatch, folder, delta):
  """As two processes do, each with its half of the rows."""
  for index in (0, 1):
    rows = delta.tables["model"]["embed/t"]
    half = changes.TableRows(rows.ids[index::2], {k: x[index::2] for k, x in rows.values.items()})
    part = dataclasses.replace(delta, tables={"model": {"embed/t": half}})
    write_as(monkeypatch, folder, part, index, 2)


def test_the_delta_that_was_written_last_is_read(tmp_path, monkeypatch):
  old, new = of_rows(1.0), of_rows(2.0)
  write_by_two(monkeypatch, tmp_path, old)
  assert values(embed.deltas.read(tmp_path)) == {1.0}
  assert embed.deltas.read(tmp_path).num_rows == 4
  embed.deltas.write(tmp_path, new)  # by one process
  assert values(embed.deltas.read(tmp_path)) == {2.0}
  write_by_two(monkeypatch, tmp_path, old)
  assert values(embed.deltas.read(tmp_path)) == {1.0}
  assert len(list(tmp_path.iterdir())) == 2
  # A set that is not complete counts for nothing.
  write_as(monkeypatch, tmp_path / "killed", old, 1, 2)  # process 0 was killed
  embed.deltas.write(tmp_path / "killed", new)
  assert values(embed.deltas.read(tmp_path / "killed")) == {2.0}
  write_as(monkeypatch, tmp_path / "killed", old, 1, 2)
  assert values(embed.deltas.read(tmp_path / "killed")) == {2.0}


def test_files_of_two_deltas_are_named(tmp_path, monkeypatch):
  old, new = of_rows(1.0), of_rows(2.0)
  write_by_two(monkeypatch, tmp_path / "two", old)
  embed.deltas.write(tmp_path / "one", new)
  (single,) = (tmp_path / "one").iterdir()
  shutil.copy(single, tmp_path / "two")  # killed before the older ones were removed
  with pytest.raises(ValueError, match=r"rows-00000-of-00001.*rows-00000-of-00002.*two deltas"):
    embed.deltas.read(tmp_path / "two")
  write_by_two(monkeypatch, tmp_path / "mixed", old)
  write_as(monkeypatch, tmp_path / "mixed", new, 0, 2)  # the attempt ended here
  with pytest.raises(ValueError, match=r"rows-00000-of-00002.*rows-00001-of-00002.*two deltas"):
    embed.deltas.read(tmp_path / "mixed")


def test_partial_files_of_killed_writers_are_removed(tmp_path):
  old, new = (tmp_path / f"rows-00000-of-00001.npz.{x}.part" for x in ("old", "new"))
  for path in (old, new):
    path.write_bytes(b"PK")
  os.utime(old, (1, 1))
  embed.deltas.write(tmp_path, of_rows(1.0))
  assert not old.exists()
  assert new.exists()  # its writer may be alive


def test_rows_that_a_numpy_table_does_not_have_are_refused():
  delta = delta_of()
  rows = delta.tables["model"]["embed/t"]
  for row in (-1, 4):
    bad = rows._replace(ids=np.where(rows.ids == 2, row, rows.ids))
    beyond = dataclasses.replace(delta, tables={"model": {"embed/t": bad}}, before={})
    table = np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match=f"has row {row}"):
      embed.deltas.apply_to_tables(beyond, 0, {"embed/t": table})
    assert not table.any()


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
  embed.deltas.write(tmp_path, of_rows(1.0))
  file = str(tmp_path / "rows-00000-of-00001.npz")
  with kills.full_disk(1000), pytest.raises(OSError, match=re.escape(file)):
    embed.deltas.write(tmp_path, of_rows(2.0))
  assert [path.name for path in tmp_path.iterdir()] == ["rows-00000-of-00001.npz"]
  assert values(embed.deltas.read(tmp_path)) == {1.0}


_WRITER = """
import sys
import embed
first, second = (embed.deltas.read(folder) for folder in sys.argv[1:3])
print("ready", flush=True)
while True:
  embed.deltas.write(sys.argv[3], first)
  embed.deltas.write(sys.argv[3], second)
"""


@pytest.mark.weekly
def test_a_killed_write_leaves_the_old_delta_or_the_new_one(tmp_path):
  for value in (1.0, 2.0):
    embed.deltas.write(tmp_path / str(value), of_rows(value))
  folder, draw, known = tmp_path / "delta", np.random.default_rng(0), ({1.0}, {2.0}, {3.0})
  for _ in range(20):
    embed.deltas.write(folder, of_rows(3.0))
    assert values(embed.deltas.read(folder)) == {3.0}
    command = [sys.executable, "-c", _WRITER, tmp_path / "1.0", tmp_path / "2.0", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
      assert process.stdout.readline() == b"ready\n"
      time.sleep(draw.uniform(0, 0.1))
      process.kill()
    delta = embed.deltas.read(folder)
    assert values(delta) in known
    assert delta.num_rows == 4


def read_or_named(path):
  """The delta of a file; None if the error names the file."""
  try:
    return embed.deltas.read(path.parent)
  except ValueError as error:
    if str(path) not in str(error):
      raise
    return None


@pytest.mark.weekly
def test_every_bit_of_a_file_is_checked_or_means_nothing(tmp_path):
  delta = of_rows(1.0)
  embed.deltas.write(tmp_path, delta)
  (path,) = tmp_path.iterdir()
  content = path.read_bytes()
  draw = np.random.default_rng(0)
  for position, bit in draw.integers((len(content), 8), size=(500, 2)).tolist():
    flipped = bytes([content[position] ^ (1 << bit)])
    path.write_bytes(content[:position] + flipped + content[position + 1 :])
    again = read_or_named(path)
    if again is not None:
      assert_same_bits((again.tables, again.state), (delta.tables, delta.state))
      assert (again.since, again.step, again.before) == (delta.since, delta.step, delta.before)
