"""A full checkpoint and the deltas after it are the later state to the bit, wherever it is put."""

import os
import re
import shutil
import zipfile

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


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
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


@pytest.mark.parametrize("place", ["one device", "mod"])
def test_a_delta_holds_the_rows_that_differ_and_no_others(place):
  nodes = make(place)
  since = embed.deltas.fingerprint(0, **nodes)
  for step in (1, 2):
    before = tree_of(nodes)["model"]["tables"]
    train_step(nodes["model"], nodes["optimizer"], batch(step))
    after = tree_of(nodes)["model"]["tables"]
    delta, since = embed.deltas.changes(since, step, **nodes)
    assert (delta.since, delta.step) == (step - 1, step)
    for key, rows in delta.tables["model"].items():
      differs = lambda a, b: (bits(a) != bits(b)).reshape(len(a), -1).any(axis=1)
      masks = [differs(before[key][name], after[key][name]) for name in after[key]]
      np.testing.assert_array_equal(rows.ids, np.flatnonzero(np.any(masks, axis=0)))
      assert 0 < len(rows.ids) <= 24
      for name, values in rows.values.items():
        np.testing.assert_array_equal(bits(values), bits(after[key][name][rows.ids]))
  delta, _ = embed.deltas.changes(since, 3, **nodes)
  assert delta.num_rows == 0


@pytest.mark.parametrize("place", ["one device", "mod", "column"])
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


def test_requests_keep_the_tables_that_they_read():
  nodes, served = make("one device"), Model(0, slots=False)
  since = embed.deltas.fingerprint(0, model=nodes["model"])
  train_step(nodes["model"], nodes["optimizer"], batch(1))
  delta, _ = embed.deltas.changes(since, 1, model=nodes["model"])
  before = served.embed.tables["c"]
  kept = np.array(before)
  embed.deltas.apply(delta, 0, model=served)
  np.testing.assert_array_equal(before, kept)  # raises if deleted
  assert (served.embed.tables["c"] != before).any()


def test_a_server_that_shares_donated_arrays_is_told():
  """A clone holds the arrays of the model, which the next step donates."""
  table = embed.TableConfig(8, 2, name="t", optimizer=embed.sgd(0.1))
  model = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  shared, own = nnx.clone(model), nnx.clone(model)
  nnx.update(own, jax.tree.map(jnp.copy, nnx.state(own)))
  before = embed.deltas.fingerprint(0, model=model)
  rows = {"t": embed.RowGrads(np.array([3]), np.ones((1, 2), np.float32))}
  embed.jit_step(lambda model: model.apply_row_gradients(rows), model)()
  delta, _ = embed.deltas.changes(before, 1, model=model)
  embed.deltas.apply(delta, 0, model=own)
  np.testing.assert_array_equal(own.tables["t"], model.tables["t"])
  with pytest.raises(ValueError, match=r"shares them.*jnp\.copy"):
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
    (Other(rows=3), r"table 'embed/t' has row 3, the model's has 3 rows"),
    (Other(dim=3), r"parameters of table 'embed/t' have rows of shape \(2,\), the model's \(3,\)"),
    (Other(name="u"), r"table 'embed/u' is missing; table 'embed/t' is not in the model"),
    (Other(optimizer=embed.adagrad(0.1)), r"'embed/t' has \['momenta', .*has \['accumulators'"),
  ]:
    before = tree_of({"model": model})
    with pytest.raises(
      ValueError, match=message.replace(", the model's \\(", ", the model's have \\(")
    ):
      embed.deltas.apply(trained, 0, model=model)
    assert_same_bits(tree_of({"model": model}), before)
  with pytest.raises(ValueError, match=r"The delta has no 'tower'; it has \['model'\]"):
    embed.deltas.apply(trained, 0, tower=Other())
  for tables, message in [
    ({"t": np.zeros((4, 2))}, r"no table 't'; it has \['embed/t'\]"),
    ({"embed/t": np.zeros((3, 2))}, r"has shape \(3, 2\), .* ids up to 3"),
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


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "remove"])
def test_damage_is_named(tmp_path, kind):
  nodes = make("one device")
  delta, _ = embed.deltas.changes(embed.deltas.fingerprint(0, **nodes), 1, **nodes)
  embed.deltas.write(tmp_path, delta)
  path = tmp_path / "rows-00000-of-00001.npz"
  content = path.read_bytes()
  with zipfile.ZipFile(path) as archive:  # the bytes of arrays; the manifest of a run has them all
    entries = [(info.header_offset, info.file_size) for info in archive.infolist()]
  positions = [offset + 200 for offset, size in entries if size > 128 + 200]
  for position in positions if kind == "flip" else [len(content) // 2]:
    if kind == "flip":
      path.write_bytes(
        content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :]
      )
    elif kind == "remove":
      path.unlink()
    else:
      path.write_bytes(content[:position] if kind == "cut" else b"")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(str(tmp_path))):
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
