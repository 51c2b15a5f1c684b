"""Tables with a DynamicVocabulary in a layer: raw ids in, rows out, and training between."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_cases import EXTRA, LAZY, OPTIMIZERS, is_plain, optimizer_id
from suites import slow_unless

import embed

DIM = 4


def table(capacity=64, name="user", optimizer=None, **policy):
  vocabulary = embed.DynamicVocabulary(capacity, bucket_width=4, **policy)
  return embed.TableConfig(vocabulary, DIM, optimizer=optimizer, combiner="sum", name=name)


def features_of(*tables):
  """Every kind of input, over shared tables."""
  first, last = tables[0], tables[-1]
  return {
    "dense": embed.FeatureConfig(first),
    "padded": embed.FeatureConfig(first),
    "ragged": embed.FeatureConfig(last),
    "sparse": embed.FeatureConfig(last),
    "sequence": embed.FeatureConfig(first, max_sequence_length=3),
    "static": embed.FeatureConfig(STATIC),
  }


STATIC = embed.TableConfig(10, DIM, combiner="sum", name="static")


def batches_of(steps, ids=40, seed=0, drift=0):
  """Batches of 8 in every kind, of so many raw ids of 64 bits."""
  draw = np.random.default_rng(seed)
  for step in range(steps):
    raw = lambda *shape, step=step: (
      (draw.integers(0, ids, shape) + step * drift).astype(np.uint64)
      * np.uint64(0x9E3779B97F4A7C15)
    )
    padded = raw(8, 3)
    padded[2:4, 1:] = 2**64 - 1
    indices = np.stack([np.arange(8), np.arange(8) % 2], axis=1)
    yield {
      "dense": raw(8),
      "padded": embed.Padded(padded),
      "ragged": embed.Ragged(raw(20), np.array([0, 3, 3, 4, 6, 9, 12, 14, 17])),
      "sparse": embed.Sparse(indices, raw(8), (8, 2)),
      "sequence": embed.Padded(raw(8, 5)),
      "static": np.arange(8),
    }


def on_device(batch):
  raw = {key: x if key == "static" else embed.raw_ids(x) for key, x in batch.items()}
  return jax.tree.map(jnp.asarray, raw)


def make(features, optimizer=None, **where):
  model = embed.SparseEmbed(features, optimizer or embed.adagrad(0.1), rngs=nnx.Rngs(0), **where)
  return model, embed.Optimizer(model, optax.sgd(0.1))


def loss_of(model, batch):
  return sum(jnp.sum((x - 0.5) ** 2) for x in model(batch).values())


def train_step(model, optimizer, batch):
  batch = model.admit(batch)
  loss, grads = embed.value_and_grad(loss_of)(model, batch)
  optimizer.update(model, grads)
  return loss, batch


def train(batches, model, optimizer):
  step = embed.jit_step(train_step, model, optimizer)
  return [jax.tree.map(np.asarray, step(on_device(batch))) for batch in batches]


def assert_equal(actual, expected):
  same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  jax.tree.map(same, actual, expected)


@pytest.mark.ci
def test_rows_of_ids_that_were_not_evicted_are_those_of_a_static_table():
  batches = list(batches_of(4, ids=20))
  model, optimizer = make(features_of(table(), table(name="other")))
  for batch in batches:
    model.admit(batch)
  keys = ("parameters", "accumulators")
  variables = model.variables
  initial = {
    name: {key: np.array(variables[name][key]) for key in keys} for name in ("user", "other")
  }
  rows = [model.translate(batch) for batch in batches]
  assert all(int(x["total_evictions"]) == 0 for x in model.vocabulary_report.values())

  static = [embed.TableConfig(64, DIM, combiner="sum", name=name) for name in ("user", "other")]
  expected, its_optimizer = make(features_of(*static))
  expected.load_variables(initial)
  model, optimizer = make(features_of(table(), table(name="other")))
  for batch, ids in zip(batches, rows, strict=True):
    loss, admitted = train_step(model, optimizer, batch)
    assert_equal(admitted, ids)
    wanted, grads = embed.value_and_grad(loss_of)(expected, ids)
    its_optimizer.update(expected, grads)
    assert float(loss) == float(wanted)
  assert_equal(model.translate(batches[0]), rows[0])
  for name in ("user", "other"):
    owned = np.asarray(model.variables[name]["last_used"]) > 0
    for key in ("parameters", "accumulators"):
      actual, wanted = (np.asarray(x.variables[name][key]) for x in (model, expected))
      np.testing.assert_array_equal(actual[owned], wanted[owned])


CASES = {
  optimizer_id(i): (
    lambda name=OPTIMIZERS[i][0], kw=OPTIMIZERS[i][1]: getattr(embed, name)(0.1, **kw)
  )
  for i in range(len(OPTIMIZERS))
} | EXTRA
QUICK = [optimizer_id(i) for i in LAZY if is_plain(i)]


@pytest.mark.parametrize("case", slow_unless(CASES, QUICK.__contains__))
def test_the_next_owner_of_a_row_starts_anew(case):
  """One bucket of 4 rows: ids 5 to 8 take the rows of 1 to 4."""
  optimizer = CASES[case]()
  features = {"id": embed.FeatureConfig(table(4, optimizer=optimizer))}
  model, updater = make(features)
  first, second = (np.arange(start, start + 4) for start in (1, 5))
  initial = {}
  for ids in (first, second):  # each alone in a new layer
    fresh = make(features)[0]
    rows = fresh.admit({"id": ids})["id"]
    for raw, row in zip(ids.tolist(), rows.tolist(), strict=True):
      initial[raw] = {key: np.array(x[row]) for key, x in fresh.variables["user"].items()}
  for _ in range(3):
    train_step(model, updater, {"id": first})
  trained = {key: np.array(x) for key, x in model.variables["user"].items()}
  rows = model.admit({"id": second})["id"]
  assert sorted(rows.tolist()) == [0, 1, 2, 3]
  for raw, row in zip(second.tolist(), rows.tolist(), strict=True):
    for key in ("parameters", *model.spec.stack_of["user"].slots):
      actual = np.asarray(model.variables["user"][key][row])
      np.testing.assert_array_equal(actual, initial[raw][key], err_msg=key)
    if optimizer.equation is not None:
      assert (
        np.asarray(model.variables["user"]["parameters"][row]) != trained["parameters"][row]
      ).any()
  np.testing.assert_array_equal(model.translate({"id": first})["id"], -1)


def on(devices, explicit):
  kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
  return jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])


@pytest.mark.ci
@pytest.mark.parametrize(
  ("devices", "explicit", "sharding"),
  slow_unless(
    [
      (*mesh, way)
      for mesh in ((8, True), (8, False), (2, True))
      for way in ("mod", "div", "column")
    ],
    lambda *case: case in ((8, True, "mod"), (8, False, "column")),
  ),
)
def test_a_stream_gives_the_same_table_on_every_mesh(devices, explicit, sharding):
  batches = list(batches_of(4, ids=60, drift=20))
  features = features_of(table(48))
  expected, optimizer = make(features)
  losses = train(batches, expected, optimizer)
  assert int(expected.vocabulary_report["user"]["total_evictions"]) > 0
  with jax.set_mesh(on(devices, explicit)):
    model, optimizer = make(features, sharding=sharding)
    actual = train(batches, model, optimizer)
    assert_equal([rows for _, rows in actual], [rows for _, rows in losses])
    variables = model.variables["user"]
    wanted = expected.variables["user"]
    for key in ("raw_ids", "last_used"):
      np.testing.assert_array_equal(np.asarray(variables[key]), np.asarray(wanted[key]))
    np.testing.assert_allclose(variables["parameters"], wanted["parameters"], atol=1e-6)
    assert_equal(model.vocabulary_report["user"], expected.vocabulary_report["user"])


@pytest.mark.ci
def test_eager_and_compiled_steps_admit_alike():
  batches = list(batches_of(3, drift=30))
  eager, compiled = make(features_of(table())), make(features_of(table()))
  rows = [train_step(*eager, batch)[1] for batch in batches]
  assert_equal([x for _, x in train(batches, *compiled)], rows)
  for key in ("raw_ids", "last_used"):
    assert_equal(compiled[0].variables["user"][key], eager[0].variables["user"][key])


def test_ids_that_find_no_room_are_padding_or_the_unknown():
  for trains_unknown, unknown in ((False, -1), (True, 7)):
    config = table(8, trains_unknown=trains_unknown)
    model, optimizer = make({"id": embed.FeatureConfig(config)})
    ids = np.arange(100)
    rows = np.asarray(model.admit({"id": ids})["id"])
    assert set(rows[rows != unknown].tolist()) == set(range(8)) - {unknown}
    assert int(model.vocabulary_report["user"]["turned_away"]) == 100 - (8 - trains_unknown)
    before = np.array(model.tables["user"])
    train_step(model, optimizer, {"id": ids})
    changed = (np.asarray(model.tables["user"]) != before).any(axis=1)
    assert changed.all()  # all rows were looked up, the unknown's too
    activations = model(model.translate({"id": np.array([10**9, -1])}))["id"]
    assert bool(activations[0].any()) == trains_unknown
    assert not activations[1].any()


def test_what_a_lookup_does_not_read_is_not_admitted():
  """Ids behind the last bag, behind a sequence's end, and padding."""
  model, _ = make(features_of(table()))
  raw = lambda *ids: np.array(ids, np.uint64)
  model.admit({"ragged": embed.Ragged(raw(1, 2, 3), np.array([0, 2])), "static": np.array([3])})
  model.admit({"sequence": embed.Padded(raw(5, 6, 7, 8, 9)[None])})
  known = np.asarray(model.translate({"dense": np.arange(10)})["dense"]) >= 0
  assert np.flatnonzero(known).tolist() == [1, 2, 5, 6, 7]


def test_rows_of_a_pending_update_are_not_taken():
  """As with `look_ahead`: the next batch is admitted before this one's update."""
  features = {"id": embed.FeatureConfig(table(4))}
  for ahead, expected in ((True, [-1] * 4), (False, [0, 1, 2, 3])):
    model, _ = make(features)
    model.admit({"id": np.arange(4)})
    rows = model.admit({"id": np.arange(10, 14)}, ahead=ahead)["id"]
    assert sorted(rows.tolist()) == expected


def test_row_gradients_by_raw_id():
  model, _ = make({"id": embed.FeatureConfig(table())})
  ids = np.array([2**40, 7, 7, -1])
  batch = model.admit({"id": ids})
  _, grads = embed.value_and_grad(lambda m, b: m(b)["id"].sum())(model, batch)
  rows = grads.rows["user"]
  high, low = np.asarray(model.raw_ids("user", rows.ids), np.uint64).T
  found = dict(
    zip((high * 2**32 + low).tolist(), np.asarray(rows.values)[:, 0].tolist(), strict=True)
  )
  assert {raw: value for raw, value in found.items() if raw < 2**63} == {2**40: 1.0, 7: 2.0}


def test_raw_ids_without_rows_and_ids_that_jax_has_cut_raise():
  model, _ = make({"id": embed.FeatureConfig(table())})
  with pytest.raises(ValueError, match=r"batch = model\.embed\.admit\(batch\)"):
    model({"id": np.array([3, 2**40])})
  with pytest.raises(ValueError, match=r"embed\.raw_ids\(ids\) on the host"):
    nnx.jit(lambda m, ids: m.admit({"id": ids}))(model, np.array([3, 2**40]))
  with pytest.raises(ValueError, match=r"view\(np\.uint64\)"):
    embed.raw_ids(np.array([-2]))
  with pytest.raises(ValueError, match="integers"):
    model.admit({"id": np.array([0.5])})
  with pytest.raises(ValueError, match=r"embed\.raw_ids"):
    embed.raw_ids(jnp.array([1]))
  embed.validate(model.spec.features, {"id": np.array([3, 2**40])})


# --- checkpoints, deltas, exports ----------------------------------------------------------------


def trained(config, steps=6, drift=15, **where):
  model, optimizer = make({"id": embed.FeatureConfig(config)}, **where)
  step = embed.jit_step(train_step, model, optimizer)
  for number in range(steps):
    step({"id": jnp.asarray(embed.raw_ids(np.arange(30) + number * drift))})
  return model, optimizer


def copied(tree):
  return jax.tree.map(np.array, tree)


def test_a_resumed_run_is_the_same_to_the_bit():
  policy = {"eviction": "lfu", "sightings": 2, "half_life": 3}
  expected, optimizer = trained(table(48, **policy), steps=8)
  model, _ = trained(table(48, **policy), steps=5)
  saved = copied(embed.checkpoint.to_tree(model=model))
  resumed, optimizer = make({"id": embed.FeatureConfig(table(48, **policy))})
  embed.checkpoint.from_tree(saved, model=resumed)
  step = embed.jit_step(train_step, resumed, optimizer)
  for number in range(5, 8):
    step({"id": jnp.asarray(embed.raw_ids(np.arange(30) + number * 15))})
  assert_equal(resumed.variables["user"], expected.variables["user"])
  assert_equal(resumed.vocabulary_report, expected.vocabulary_report)


@pytest.mark.parametrize("capacity", slow_unless([24, 48, 96], (24).__eq__))
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_another_geometry_keeps_the_most_valuable_rows(capacity, eviction):
  """All of them where each bucket has room: the last used first."""
  model, _ = trained(table(48))
  saved = copied(embed.checkpoint.to_tree(model=model))
  vocabulary = embed.DynamicVocabulary(capacity, bucket_width=capacity, eviction=eviction)
  config = embed.TableConfig(vocabulary, DIM, combiner="sum", name="user")
  other, _ = make({"id": embed.FeatureConfig(config)})
  embed.checkpoint.from_tree(saved, model=other)
  before, after = (x.rows_by_raw_id("user") for x in (model, other))
  count = min(capacity, len(before["raw_ids"]))
  assert len(after["raw_ids"]) == count
  ranked = dict(zip(before["raw_ids"].tolist(), range(len(before["raw_ids"])), strict=True))
  assert {ranked[raw] for raw in after["raw_ids"].tolist()} == set(range(count))
  for key in ("last_used", "parameters", "accumulators"):
    wanted = dict(zip(before["raw_ids"].tolist(), before[key].tolist(), strict=True))
    for raw, value in zip(after["raw_ids"].tolist(), after[key].tolist(), strict=True):
      assert value == wanted[raw]
  assert float(other.vocabulary_report["user"]["fill"]) == np.float32(count / capacity)
  other.admit({"id": np.arange(30)})  # and goes on


@pytest.mark.ci
def test_a_checkpoint_moves_to_a_mesh_and_back():
  model, _ = trained(table(60, sightings=2))  # 15 buckets
  saved = copied(embed.checkpoint.to_tree(model=model))
  with jax.set_mesh(on(8, explicit=True)):
    other, _ = make({"id": embed.FeatureConfig(table(60, sightings=2))})
    embed.checkpoint.from_tree(saved, model=other)
    assert_equal(embed.checkpoint.to_tree(model=other)["model"], saved["model"])


@pytest.mark.ci
def test_orbax_restores_into_another_capacity(tmp_path):
  ocp = pytest.importorskip("orbax.checkpoint")
  model, _ = trained(table(48))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "1", embed.checkpoint.to_tree(model=model))
  for capacity in (24, 48):
    other, _ = make({"id": embed.FeatureConfig(table(capacity))})
    embed.checkpoint.restore(tmp_path / "1", model=other)
    kept = other.rows_by_raw_id("user")["raw_ids"]
    assert set(kept.tolist()) <= set(model.rows_by_raw_id("user")["raw_ids"].tolist())
    assert len(kept) > 3 * capacity // 4


@pytest.mark.ci
def test_deltas_follow_rows_that_change_hands(tmp_path):
  config = table(32, optimizer=embed.adagrad(0.1), eviction="lfu", half_life=2)
  model, optimizer = make({"id": embed.FeatureConfig(config)})
  served = embed.SparseEmbed({"id": embed.FeatureConfig(config)}, rngs=nnx.Rngs(1))
  embed.checkpoint.from_tree(copied(embed.checkpoint.to_tree(model=model)), model=served)
  since, by_id, evicted = embed.deltas.fingerprint(0, model=model), {}, 0
  for number in range(4):
    train_step(model, optimizer, {"id": np.arange(30) + number * 15})
    delta, since = embed.deltas.changes(since, number + 1, model=model)
    embed.deltas.write(tmp_path / str(number), delta)
    delta = embed.deltas.read(tmp_path / str(number))
    embed.deltas.apply(delta, number, model=served)
    for _ in range(2):  # once more changes nothing
      embed.deltas.apply_to_rows(delta, by_id, "user")
    evicted += len(delta.owners["model"]["user"].evicted)
    assert_equal(served.variables["user"], model.variables["user"])
    expected = model.rows_by_raw_id("user")
    wanted = dict(zip(expected["raw_ids"].tolist(), expected["parameters"].tolist(), strict=True))
    assert {raw: row.tolist() for raw, row in by_id.items()} == wanted
  assert evicted > 0
  other = embed.SparseEmbed({"id": embed.FeatureConfig(table(64))}, rngs=nnx.Rngs(1))
  with pytest.raises(ValueError, match="capacity and bucket width"):
    embed.deltas.apply(delta, 3, model=other)


def test_an_export_answers_raw_ids():
  model, _ = trained(table(48))
  batch = {"id": embed.raw_ids(np.array([75, 80, 10**9, -1]))}
  predict = lambda model, batch: model(model.translate(batch))["id"]
  exported = embed.export(predict, model, batch, any_batch=True)
  expected = np.asarray(predict(model, batch))
  assert expected[:2].any()
  assert not expected[2:].any()
  np.testing.assert_array_equal(exported.program.call(exported.arrays, batch), expected)


def test_rows_of_a_static_table_are_imported_by_raw_id():
  rows = np.arange(20, dtype=np.float32).reshape(5, DIM)
  model, _ = make({"id": embed.FeatureConfig(table(16))})
  raw = np.array([2**60, 3, 4, 5, 6], np.uint64)
  placed = model.load_rows("user", raw, {"parameters": rows})
  kept = placed >= 0
  found = model(model.translate({"id": raw}))["id"]
  np.testing.assert_array_equal(found, np.where(kept[:, None], rows, 0))
  assert (
    np.asarray(model.variables["user"]["accumulators"])[placed[kept]] == np.float32(0.1)
  ).all()
  with pytest.raises(ValueError, match="distinct"):
    model.load_rows("user", np.array([1, 1]), {"parameters": rows[:2]})


def test_a_plan_counts_raw_ids_and_scores():
  config = table(1024, sightings=2)
  plan = embed.plan(
    {"id": embed.FeatureConfig(config)}, None, {"id": np.arange(8)}, embed.sgd(0.1), 1 << 30
  )
  (of_stack,) = plan.costs()
  assert (of_stack.rows, of_stack.keys) == (1024 * DIM * 4, 1024 * (12 + 16))
  assert plan.bytes_per_device == of_stack.rows + of_stack.buffers + of_stack.keys
