"""A full checkpoint and the deltas after it are the later state to the bit, wherever it is put."""

import concurrent.futures
import dataclasses
import functools
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

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import make_mesh
from suites import slow_unless

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
  "column": lambda: {"mesh": make_mesh(), "sharding": "column"},
  "replicated": lambda: {"mesh": make_mesh(), "sharding": "replicated"},
  "three": lambda: {"mesh": make_mesh(shape=(3,)), "sharding": "mod"},
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
@pytest.mark.parametrize("place", slow_unless(PLACES, "mod".__eq__))
def test_base_and_ten_deltas_are_a_full_save(place, tmp_path):
  nodes = make(place)
  base, since = tree_of(nodes), embed.deltas.fingerprint(0, **nodes)
  for step in range(1, 11):
    train_step(nodes["model"], nodes["optimizer"], batch(step))
    delta, since = embed.deltas.changes(since, step, **nodes)
    embed.deltas.write(tmp_path / str(step), delta)
  expected = tree_of(nodes)
  for other in dict.fromkeys((place, "one device", "mod", "column")):
    restored = make(other, seed=1)
    embed.checkpoint.from_tree(base, **restored)
    at = 0
    for step in range(1, 11):
      at = embed.deltas.apply(embed.deltas.read(tmp_path / str(step)), at, **restored)
    assert at == 10
    assert_same_bits(tree_of(restored), expected)


@pytest.mark.parametrize("place", slow_unless(["mod", "column"], "mod".__eq__))
def test_every_bit_of_a_row_counts(place):
  """Also a lost sign of zero, two signs that change at once, and a row that takes the place of
  another."""
  layer = Model(**PLACES[place]()).embed
  rows = np.array(layer.tables["a"])
  rows[5] = 0
  layer.load_tables({"a": rows})
  since = embed.deltas.fingerprint(0, model=layer)
  draw = np.random.default_rng(0)
  for trial in range(40):
    new = rows.copy()
    row, column, bit = draw.integers((ROWS, 8, 32))
    new.view(np.uint32)[row, column] ^= np.uint32(1) << np.uint32(bit)
    if trial == 0:
      row, new = 5, rows.copy()
      new[5, 0] = -0.0
    elif trial == 1:
      row, new = 7, rows.copy()
      new[7, [0, 5]] *= -1
    elif trial == 2:
      row, new = 9, rows.copy()
      new[9] = new[9, ::-1]
    layer.load_tables({"a": new})
    delta, _ = embed.deltas.changes(since, 1, model=layer)
    assert delta.tables["model"]["a"].ids.tolist() == [row], trial
    assert delta.num_rows == 1


@pytest.mark.parametrize("place", ["one device", "mod"])
def test_a_slot_that_changes_alone_is_noticed(place):
  layer = Model(**PLACES[place]()).embed
  since = embed.deltas.fingerprint(0, model=layer)
  velocities, accumulators = np.zeros((24, 8)), np.array(layer.variables["c"]["accumulators"])
  velocities[11, 7], accumulators[3] = 1e-30, accumulators[3] + 1
  slots = {"b": {"velocities": velocities}, "c": {"accumulators": accumulators}}
  layer.load_variables(slots)
  delta, _ = embed.deltas.changes(since, 1, model=layer)
  ids = {key: rows.ids.tolist() for key, rows in delta.tables["model"].items()}
  assert ids == {"a": [], "b": [11], "c": [3], "d": []}


def test_fingerprints_do_not_collide_by_their_form():
  """Rows of few different words, whose sums would be equal, have fingerprints of their own."""
  config = embed.TableConfig(4096, 4, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))
  grid = np.stack(np.meshgrid(*[np.arange(8.0)] * 4, indexing="ij"), -1).reshape(-1, 4)
  layer.load_tables({"t": grid.astype(np.float32)})
  (lanes,) = embed.deltas.fingerprint(0, model=layer).lanes["model"][""]
  for lane in lanes:  # of 4096 random numbers of 32 bits, two are equal once in 500 times
    assert len(np.unique(lane)) >= 4094
  assert len(np.unique(np.stack(lanes), axis=1).T) == 4096


@pytest.mark.ci
def test_a_delta_of_many_rows_goes_in_pieces(monkeypatch):
  monkeypatch.setattr(changes, "_CHUNK", 16)
  monkeypatch.setattr(changes, "_LEAST", 4)
  jax.clear_caches()
  for place in ("one device", "mod"):
    source, target = Model(0, **PLACES[place]()), Model(0, **PLACES[place]())
    since = embed.deltas.fingerprint(0, model=source)
    source.embed.load_tables({"a": np.ones((ROWS, 8)), "b": np.full((24, 8), 2.0)})
    delta, _ = embed.deltas.changes(since, 1, model=source)
    assert delta.num_rows == ROWS + 24
    embed.deltas.apply(delta, 0, model=target)
    assert_same_bits(tree_of({"model": target}), tree_of({"model": source}))


@pytest.mark.ci
def test_the_size_follows_the_changed_rows(tmp_path):
  config = embed.TableConfig(100_000, 16, name="t", optimizer=embed.adagrad(0.1))
  layer = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))
  since = embed.deltas.fingerprint(0, model=layer)
  sizes = {}
  for count in (10, 100, 1000, 10_000):
    grads = embed.RowGrads(jnp.arange(count), jnp.ones((count, 16)))
    layer.apply_row_gradients({"t": grads})
    delta, since = embed.deltas.changes(since, count, model=layer)
    embed.deltas.write(tmp_path / str(count), delta)
    (file,) = (tmp_path / str(count)).iterdir()
    sizes[count] = file.stat().st_size
    row = 4 + 2 * 16 * 4  # an id, the row and its slot
    assert delta.tables["model"]["t"].ids.tolist() == list(range(count))
    assert count * row <= delta.nbytes <= sizes[count] < count * row + 4000
    assert f"{count}" in repr(delta)
  assert sizes[10_000] < 100_000 * 2 * 16 * 4 / 9


@pytest.mark.ci
def test_a_server_follows_a_training_run(tmp_path):
  nodes = make("mod")
  served = Model(1, slots=False)
  embed.checkpoint.from_tree(tree_of(nodes), model=served)
  plain = {key: x["parameters"] for key, x in tree_of(nodes)["model"]["tables"].items()}
  del plain["embed/c"]  # a server may keep some of the tables only
  since, at, plain_at = embed.deltas.fingerprint(0, **nodes), 0, 0
  for step in (1, 2, 3):
    train_step(nodes["model"], nodes["optimizer"], batch(step))
    delta, since = embed.deltas.changes(since, step, **nodes)
    embed.deltas.write(tmp_path / "delta", delta)  # over the last one, which has been read
    delta = embed.deltas.read(tmp_path / "delta")
    at = embed.deltas.apply(delta, at, model=served)
    plain_at = embed.deltas.apply_to_tables(delta, plain_at, plain)
  assert at == plain_at == 3
  expected = tree_of(nodes)["model"]
  actual = tree_of({"model": served})["model"]
  assert_same_bits(actual["state"], expected["state"])
  for key, arrays in expected["tables"].items():
    assert_same_bits(actual["tables"][key]["parameters"], arrays["parameters"])
    if key in plain:
      assert_same_bits(plain[key], arrays["parameters"])


def test_a_server_that_shares_donated_arrays_is_told():
  """A clone holds the arrays of the model, which the next step donates."""
  table = embed.TableConfig(8, 2, name="t", optimizer=embed.sgd(0.1))
  model = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  shared, own = nnx.clone(model), nnx.clone(model, arrays=True)
  before = embed.deltas.fingerprint(0, model=model)
  rows = {"t": embed.RowGrads(np.array([3]), np.ones((1, 2), np.float32))}
  embed.jit_step(lambda model: model.apply_row_gradients(rows), model)()
  delta, _ = embed.deltas.changes(before, 1, model=model)
  embed.deltas.apply(delta, 0, model=own)
  np.testing.assert_array_equal(own.tables["t"], model.tables["t"])
  with pytest.raises(ValueError, match="arrays=True"):
    embed.deltas.apply(delta, 0, model=shared)


def test_a_delta_that_does_not_follow_is_refused():
  nodes = make("one device")
  since = embed.deltas.fingerprint(3, **nodes)
  delta, _ = embed.deltas.changes(since, 5, **nodes)
  tables = {"embed/a": np.zeros((ROWS, 8), np.float32)}
  message = "from step 3 to 5, and the state is at step 4: apply the deltas in between first"
  with pytest.raises(ValueError, match=message):
    embed.deltas.apply(delta, 4, **nodes)
  with pytest.raises(ValueError, match=message):
    embed.deltas.apply_to_tables(delta, 4, tables)


class Other(nnx.Module):
  def __init__(self, rows=4, dim=2, name="t", optimizer=None):
    config = embed.TableConfig(rows, dim, name=name, optimizer=optimizer)
    self.embed = embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))


def delta_of(**arguments):
  model = Other(**arguments)
  since = embed.deltas.fingerprint(0, model=model)
  model.embed.load_tables({arguments.get("name", "t"): np.full(model.embed.tables["t"].shape, 7.0)})
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
    before = tree_of({"model": model})
    with pytest.raises(ValueError, match=message):
      embed.deltas.apply(trained, 0, model=model)
    assert_same_bits(tree_of({"model": model}), before)
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
  model = Model(slots=False)
  since = embed.deltas.fingerprint(0, model=model)
  rows = np.asarray(model.embed.tables["d"]).copy()
  rows[7] = 3
  model.embed.load_tables({"d": rows})
  delta, _ = embed.deltas.changes(since, 1, model=model)
  embed.deltas.write(tmp_path, delta)
  with np.load(tmp_path / "rows-00000-of-00001.npz") as file:
    assert file["model/tables/embed/d/ids"].tolist() == [7]
    values = file["model/tables/embed/d/parameters"]
    assert values.dtype == np.uint16
    np.testing.assert_array_equal(values.view(ml_dtypes.bfloat16), np.full((1, 8), 3.0))
    assert "model/state/head/kernel/value" in file.files
  again = embed.deltas.read(tmp_path)
  assert_same_bits(again.tables, delta.tables)
  assert_same_bits(again.state, delta.state)


@pytest.mark.parametrize(
  "damage",
  [
    lambda content: content[: len(content) // 2],
    lambda content: b"",
    lambda content: content[:500] + bytes([content[500] ^ 16]) + content[501:],
  ],
  ids=["cut", "empty", "flip"],
)
def test_damage_is_named(tmp_path, damage):
  embed.deltas.write(tmp_path, delta_of())
  (path,) = tmp_path.iterdir()
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(ValueError, match=re.escape(str(path))):
    embed.deltas.read(tmp_path)


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


def served_and_deltas(count, **where):
  """A server, `count` deltas after its state, and the rows of table "a" at the end."""
  trained, served = Model(0, slots=False, **where), Model(0, slots=False, **where)
  since, deltas = embed.deltas.fingerprint(0, model=trained), []
  rows, draw = np.array(trained.embed.tables["a"]), np.random.default_rng(0)
  for step in range(1, count + 1):
    rows[draw.integers(0, ROWS, 4)] = draw.normal(size=(4, 8))
    trained.embed.load_tables({"a": rows})
    trained.head.bias[...] = jnp.full(1, step, jnp.float32)
    delta, since = embed.deltas.changes(since, step, model=trained)
    deltas.append(delta)
  return served, deltas, rows


IDS = {"a": np.arange(24), "b": np.arange(24), "c": np.arange(24) % 16, "d": np.arange(24)}


def act(model, batch=IDS):
  return model.embed(batch)["a"] @ model.head.kernel[...] + model.head.bias[...]


def serving_lookup(model):
  """As docs/serving.md has it: the tables of a model, without the model."""
  features = {"a": model.embed.spec.features["a"]}
  look_up = jax.jit(functools.partial(embed.serving_lookup, feature_config=features))
  return lambda model: look_up({"a": IDS["a"]}, None, {"a": model.embed.tables["a"]})


WAYS = {  # of predicting, as the pages show them
  "graph=False": lambda model: nnx.jit(act, graph=False),
  "graph_updates=False": lambda model: nnx.jit(act, graph_updates=False),
  "view": lambda model: functools.partial(
    lambda predict, view, _: predict(view),
    nnx.jit(act, graph=False),
    nnx.view(model, deterministic=True),
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
@pytest.mark.parametrize("place", ["one device", "mod"])
@pytest.mark.parametrize("way", WAYS)
def test_readers_lose_no_delta(way, place):
  if (way, place) == ("serving_lookup", "mod"):
    pytest.skip("a lookup in plain arrays is on one device")
  count = 400
  served, deltas, rows = served_and_deltas(count, **PLACES[place]())
  at, error, errors = under_readers(served, WAYS[way](served), deltas)
  assert (at, error, errors) == (count, None, [])
  assert_same_bits(np.array(served.embed.tables["a"]), rows)
  assert served.head.bias[...].tolist() == [count]


@pytest.mark.weekly
@pytest.mark.parametrize("place", ["one device", "mod"])
@pytest.mark.parametrize("readers", [1, 3])
def test_readers_that_write_back_are_told(place, readers):
  """By default `nnx.jit` writes back all that a call has read, and clears modules meanwhile."""
  served, deltas, _ = served_and_deltas(400, **PLACES[place]())
  _, error, errors = under_readers(served, nnx.jit(act), deltas, readers)
  told = [error, *errors]
  # A module that is cleared when `apply` reads it looks like another model: a ValueError.
  assert any(isinstance(x, RuntimeError | ValueError) and "graph=False" in str(x) for x in told), (
    told
  )
  assert error is None or "graph=False" in str(error), error


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


@pytest.mark.parametrize("place", ["one device", pytest.param("mod", marks=pytest.mark.weekly)])
def test_a_request_in_flight_does_not_undo_the_last_delta(place):
  served, (delta,), rows = served_and_deltas(1, **PLACES[place]())
  apply = lambda: embed.deltas.apply(delta, 0, model=served)
  assert in_flight(served, functools.partial(nnx.jit, graph=False), apply) == []
  assert_same_bits(np.array(served.embed.tables["a"]), rows)


def with_shardings(f):  # states of Variables go in and out
  shardings = nnx.StateSharding({...: jax.sharding.SingleDeviceSharding(jax.devices()[0])})
  return nnx.jit(f, in_shardings=(shardings,))


@pytest.mark.parametrize(("jitted", "count"), [(nnx.jit, 1), (with_shardings, 1), (nnx.jit, 2)])
def test_a_request_that_would_undo_a_delta_raises(jitted, count):
  served, deltas, _ = served_and_deltas(count)

  def apply():
    for at, delta in enumerate(deltas):
      embed.deltas.apply(delta, at, model=served)

  (error,) = in_flight(served, jitted, apply)
  assert re.search(r"would replace a table that a delta has changed.*graph=False", error)


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


@pytest.mark.parametrize(
  "call",
  [
    lambda model: nnx.jit(act)(model),
    lambda model: nnx.jit(act, donate_argnums=0)(model),
    lambda model: nnx.remat(act)(model),
    lambda model: nnx.cond(True, act, act, model),
    lambda model: nnx.jit(lambda x, *, model: act(model))(1, model=model),
  ],
)
def test_calls_after_a_delta_of_another_thread_may_write_back(call):
  served, (delta,), rows = served_and_deltas(1)
  earlier = nnx.state(served)  # keeps the arrays that are replaced
  in_a_thread(lambda: embed.deltas.apply(delta, 0, model=served))
  call(served)
  assert_same_bits(np.array(served.embed.tables["a"]), rows)
  del earlier


def test_a_compiled_step_in_flight_does_not_undo_a_delta():
  served, (delta,), rows = served_and_deltas(1)
  delta = dataclasses.replace(delta, before={})  # the step changes the head
  began, go_on = threading.Event(), threading.Event()

  def body(model):
    began.set()
    go_on.wait()
    model.head.bias[...] += 1
    for _, variable in nnx.iter_graph(model):
      if isinstance(variable, embed.Table):
        variable.set_value(variable.get_value() * 2)

  step = embed.jit_step(body, served)

  def apply():
    try:
      return embed.deltas.apply(delta, 0, model=served)
    except RuntimeError as error:
      return error

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    stepped = pool.submit(step)
    began.wait()
    applied = pool.submit(apply)
    concurrent.futures.wait([applied], timeout=2)
    go_on.set()
    stepped.result()
    result = applied.result()
  if isinstance(result, RuntimeError):
    assert "replaced while a delta was applied" in str(result)
    result = embed.deltas.apply(delta, 0, model=served)
  assert result == 1
  ids = delta.tables["model"]["embed/a"].ids
  assert_same_bits(np.array(served.embed.tables["a"])[ids], rows[ids])


@pytest.mark.weekly
def test_a_run_that_is_restored_by_deltas_trains_in_any_thread():
  nodes, restored = make("one device"), make("one device")
  since = embed.deltas.fingerprint(0, **nodes)
  train_step(nodes["model"], nodes["optimizer"], batch(1))
  delta, _ = embed.deltas.changes(since, 1, **nodes)
  embed.deltas.apply(delta, 0, **restored)

  def step(model, optimizer, batch):
    _, grads = embed.value_and_grad(lambda model, batch: model(batch))(model, batch)
    optimizer.update(model, grads)

  def train(nodes):
    nnx.jit(step, donate_argnums=(0, 1))(nodes["model"], nodes["optimizer"], batch(2))
    embed.jit_step(step, nodes["model"], nodes["optimizer"])(batch(3))

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(train, restored).result()
  train(nodes)
  assert_same_bits(tree_of(restored), tree_of(nodes))


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


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.embed])
def test_a_model_that_is_taken_apart_is_named(part):
  """Flax clears the modules that it writes back, and fills them again."""
  served, (delta,), _ = served_and_deltas(1)
  vars(part(served)).clear()
  with pytest.raises((RuntimeError, ValueError), match="graph=False"):
    embed.deltas.apply(delta, 0, model=served)


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


def test_a_clone_takes_a_delta_for_its_model():
  """So that no request sees two steps: a request takes one model, or the other."""
  served, (delta,), rows = served_and_deltas(1)
  before = np.array(served.embed.tables["a"])
  clone = nnx.clone(served)
  errors = in_flight(served, nnx.jit, lambda: embed.deltas.apply(delta, 0, model=clone))
  assert errors == []
  assert_same_bits(np.array(served.embed.tables["a"]), before)
  assert_same_bits(np.array(clone.embed.tables["a"]), rows)


# --- digests --------------------------------------------------------------------------------------


def test_a_delta_of_another_model_is_refused():
  _, (first, second), _ = served_and_deltas(2)
  other = Model(7, slots=False)
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
    embed.deltas.apply(skipped, 0, model=Model(0, slots=False))
  flipped = Model(0, slots=False)
  changed = np.array(flipped.embed.tables["a"])
  changed.view(np.uint32)[ROWS - 1, 7] ^= 1
  flipped.embed.load_tables({"a": changed})
  with pytest.raises(ValueError, match="other parameters: tables/embed/a of 'model'"):
    embed.deltas.apply(first, 0, model=flipped)


@pytest.mark.ci
def test_digests_are_of_the_rows_wherever_they_are():
  by_place = []
  for place in PLACES:
    model = Model(0, slots=False)
    placed = Model(1, slots=place != "div", **PLACES[place]())
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
  class Served(nnx.Module):
    def __init__(self, dtype):
      table = embed.TableConfig(4, 2, name="t", dtype=dtype)
      self.embed = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
      self.head = nnx.Linear(2, 1, rngs=nnx.Rngs(0), param_dtype=dtype)

  trained, served = Served(jnp.float32), Served(jnp.bfloat16)
  since = embed.deltas.fingerprint(0, model=trained)
  trained.embed.load_tables({"t": np.full((4, 2), 7.0)})
  delta, _ = embed.deltas.changes(since, 1, model=trained)
  embed.deltas.apply(delta, 0, model=served)
  assert served.embed.tables["t"].tolist() == [[7.0, 7.0]] * 4
  tables = {"embed/t": np.zeros((4, 2), np.float16)}
  embed.deltas.apply_to_tables(delta, 0, tables)
  assert tables["embed/t"].tolist() == [[7.0, 7.0]] * 4


@pytest.mark.parametrize("integer", [np.int64, np.uint32, jnp.int32, jnp.uint32])
def test_steps_are_integers_of_any_kind(tmp_path, integer):
  model, served = Other(), Other()
  since = embed.deltas.fingerprint(integer(3), model=model)
  delta, since = embed.deltas.changes(since, integer(5), model=model)
  embed.deltas.write(tmp_path, delta)
  again = embed.deltas.read(tmp_path)
  assert (again.since, again.step, since.step) == (3, 5, 5)
  assert all(type(x) is int for x in (delta.since, delta.step, since.step))
  assert embed.deltas.apply(again, integer(3), model=served) == 5
  tables = {"embed/t": np.array(served.embed.tables["t"])}
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


def of_rows(value):
  """A delta of `Other` whose rows all hold a value."""
  model = Other()
  since = embed.deltas.fingerprint(0, model=model)
  model.embed.load_tables({"t": np.full((4, 2), value)})
  return embed.deltas.changes(since, 1, model=model)[0]


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


def test_a_set_that_is_not_complete_counts_for_nothing(tmp_path, monkeypatch):
  old, new = of_rows(1.0), of_rows(2.0)
  write_as(monkeypatch, tmp_path, old, 1, 2)  # process 0 was killed
  embed.deltas.write(tmp_path, new)
  assert values(embed.deltas.read(tmp_path)) == {2.0}
  write_as(monkeypatch, tmp_path, old, 1, 2)
  assert values(embed.deltas.read(tmp_path)) == {2.0}


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


def test_two_writers_at_once_leave_one_of_their_deltas(tmp_path):
  deltas = of_rows(1.0), of_rows(2.0)
  for _ in range(20):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      list(pool.map(lambda i: embed.deltas.write(tmp_path, deltas[i % 2]), range(8)))
    assert values(embed.deltas.read(tmp_path)) in ({1.0}, {2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["rows-00000-of-00001.npz"]


def test_partial_files_of_killed_writers_are_removed(tmp_path):
  old, new = (tmp_path / f"rows-00000-of-00001.npz.{x}.part" for x in ("old", "new"))
  for path in (old, new):
    path.write_bytes(b"PK")
  os.utime(old, (1, 1))
  embed.deltas.write(tmp_path, of_rows(1.0))
  assert not old.exists()
  assert new.exists()  # its writer may be alive


@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_that_a_numpy_table_does_not_have_are_refused(row):
  served, (delta,), _ = served_and_deltas(1)
  rows = delta.tables["model"]["embed/a"]
  bad = rows._replace(ids=np.where(rows.ids == rows.ids[0], row, rows.ids))
  delta = dataclasses.replace(delta, tables={"model": {"embed/a": bad}}, before={})
  table = np.array(served.embed.tables["a"])
  before = table.copy()
  with pytest.raises(ValueError, match=f"has row {row}"):
    embed.deltas.apply_to_tables(delta, 0, {"embed/a": table})
  assert_same_bits(table, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of file sizes are POSIX's")
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
  import resource

  delta = of_rows(1.0)
  embed.deltas.write(tmp_path, delta)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # bytes
  try:
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "rows-00000-of-00001.npz"))):
      embed.deltas.write(tmp_path, of_rows(2.0))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
  for position, bit in itertools.product(range(len(content)), range(8)):
    flipped = bytes([content[position] ^ (1 << bit)])
    path.write_bytes(content[:position] + flipped + content[position + 1 :])
    again = read_or_named(path)
    if again is not None:
      assert_same_bits((again.tables, again.state), (delta.tables, delta.state))
      assert (again.since, again.step, again.before) == (delta.since, delta.step, delta.before)


@pytest.mark.parametrize(
  "header", [[], {"format": 9}, {"format": 1, "dtypes": []}, {"format": 1, "dtypes": {"x": "no"}}]
)
def test_a_header_of_another_kind_is_named(tmp_path, header):
  path = tmp_path / "rows-00000-of-00001.npz"
  np.savez(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8), x=np.zeros(1))
  with pytest.raises(ValueError, match=re.escape(str(path))):
    embed.deltas.read(tmp_path)


def test_a_file_of_the_first_format_is_read(tmp_path):
  """It has no digests, so that a model of any content takes it."""
  delta = of_rows(7.0)
  embed.deltas.write(tmp_path, delta)
  (path,) = tmp_path.iterdir()
  with np.load(path) as file:
    arrays = dict(file)
  header = json.loads(arrays["header"].tobytes())
  assert header["format"] == 3
  assert header.pop("before") == delta.before
  assert header.pop("after") == delta.after
  header["format"] = 1
  np.savez(path, **arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)})
  model = Other()
  model.embed.load_tables({"t": np.ones((4, 2))})
  assert embed.deltas.apply(embed.deltas.read(tmp_path), 0, model=model) == 1
  assert model.embed.tables["t"].tolist() == [[7.0, 7.0]] * 4
