"""Tables with a DynamicVocabulary in a layer: raw ids in, rows out, and training between."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import refused
from flax import nnx

import embed
from embed import DynamicVocabulary

DIM = 4


def table(capacity=64, name="user", optimizer=None, **policy):
  vocabulary = DynamicVocabulary(capacity, bucket_width=4, **policy)
  return embed.TableConfig(vocabulary, DIM, optimizer=optimizer, combiner="sum", name=name)


def features_of(*tables):
  """A bag and a single id of each table."""
  kinds = [(f"{kind}_{table.name}", table) for table in tables for kind in ("one", "bag")]
  return {name: embed.FeatureConfig(table) for name, table in kinds}


def batches_of(features, steps, ids=40, drift=0):
  """Batches of 8 examples, of raw ids of 64 bits."""
  draw = np.random.default_rng(0)
  splits = np.array([0, 3, 3, 4, 6, 9, 12, 14, 17])
  for step in range(steps):
    batch = {}
    for name in features:
      small = draw.integers(0, ids, 20 if name.startswith("bag") else 8) + step * drift
      raw = small.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
      batch[name] = embed.Ragged(raw, splits) if name.startswith("bag") else raw
    yield as_raw(batch)


def as_raw(batch):
  return {key: embed.raw_ids(x) for key, x in batch.items()}


def make(features):
  model = embed.SparseEmbed(features, embed.adagrad(0.1), rngs=nnx.Rngs(0))
  return model, embed.Optimizer(model, optax.sgd(0.1))


def loss_of(model, batch):
  return sum(jnp.sum((x - 0.5) ** 2) for x in model(batch).values())


def train_on_rows(model, optimizer, batch):
  loss, grads = embed.value_and_grad(loss_of)(model, batch)
  optimizer.update(model, grads)
  return loss


def train_step(model, optimizer, batch):
  batch = model.admit(batch)
  return train_on_rows(model, optimizer, batch), batch


def train(batches, model, optimizer):
  step = embed.jit_step(train_step, model, optimizer)
  return [jax.tree.map(np.asarray, step(batch)) for batch in batches]


@nnx.jit(static_argnames="ahead")
def admit(model, batch, ahead=False):
  return model.admit(batch, ahead=ahead)


@nnx.jit
def translate(model, batch):
  return model.translate(batch)


@nnx.jit
def variables_of(model):
  """All in one program; outside, each array compiles one of its own."""
  return model.variables


def rows_of(model, *ids):
  """Rows of raw ids of the feature "id", -1 for none."""
  return np.asarray(translate(model, as_raw({"id": np.array(ids, np.uint64)}))["id"])


def owned_rows(model):
  """The row of each raw id that has one, as lists by raw id."""
  arrays = jax.tree.map(np.asarray, model.variables["user"])
  ids = as_ints(arrays["raw_ids"])
  rows = dict(zip(ids, arrays["parameters"].tolist(), strict=True))
  rows.pop(2**64 - 1, None)  # rows without an owner
  return rows


def as_ints(pairs):
  return (pairs.astype(np.uint64) @ np.array([2**32, 1], np.uint64)).tolist()


def test_arguments_are_checked():
  wrong = [
    ({"capacity": 10}, "`capacity` must be a multiple of bucket_width=16. Got 10; write 16"),
    ({"capacity": True}, "`capacity` must be an int in 1"),
    ({"bucket_width": 512}, r"`bucket_width` must be an int in 1 \.\. 256. Got 512"),
    ({"eviction": "fifo"}, r"`eviction` must be one of \('lru', 'lfu'\). Got 'fifo'"),
    ({"half_life": 3}, '`half_life` must be None without "lfu". Got 3'),
    ({"time_to_live": 0.5}, "`time_to_live` must be an int in 1"),
  ]
  refused(wrong, lambda given: DynamicVocabulary(**{"capacity": 16, **given}))


def assert_equal(actual, expected):
  same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  jax.tree.map(same, actual, expected)


@pytest.mark.ci
def test_rows_of_ids_that_were_not_evicted_are_those_of_a_static_table():
  features = features_of(table())
  batches = list(batches_of(features, 4, ids=20))
  model, optimizer = make(features)
  rows, evictions = [], 0
  for batch in batches:
    rows.append(admit(model, batch))
    evictions += int(model.vocabulary_report["user"]["evictions"])
  assert evictions == 0
  initial = copied(variables_of(model)["user"])
  losses = train(batches, model, optimizer)

  static = features_of(embed.TableConfig(64, DIM, combiner="sum", name="user"))
  expected, its_optimizer = make(static)
  keys = ("parameters", "accumulators")
  expected.load_variables({"user": {key: initial[key] for key in keys}})
  its_step = embed.jit_step(train_on_rows, expected, its_optimizer)
  wanted = [float(its_step(ids)) for ids in rows]
  np.testing.assert_allclose([loss for loss, _ in losses], wanted, rtol=1e-6)
  owned = initial["last_used"] > 0
  for key in keys:
    actual, static = (np.asarray(x.variables["user"][key]) for x in (model, expected))
    np.testing.assert_allclose(actual[owned], static[owned], rtol=1e-6, err_msg=key)


@pytest.mark.programs(25, "compares two layers of two tables")
def test_the_next_owner_of_a_row_starts_anew():
  """One bucket of 4 rows: ids 5 to 8 take the rows of 1 to 4, of slots a row and an element."""
  tables = [table(4, "adam", embed.adam(0.1)), table(4, "rowwise", embed.rowwise_adagrad(0.1))]
  features = {config.name: embed.FeatureConfig(config) for config in tables}
  ids_from = lambda start: as_raw(dict.fromkeys(features, np.arange(start, start + 4)))

  def by_raw_id(model, start):
    """The rows and slots of the ids from `start` on, and all of them."""
    rows, variables = admit(model, ids_from(start)), copied(variables_of(model))
    is_slot = lambda key: key not in ("raw_ids", "last_used")
    return {
      name: {key: x[np.asarray(rows[name])] for key, x in variables[name].items() if is_slot(key)}
      for name in features
    }

  fresh, _ = make(features)
  initial = {start: by_raw_id(fresh, start) for start in (1, 5)}  # without a step between
  model, optimizer = make(features)
  step = embed.jit_step(train_step, model, optimizer)
  for _ in range(2):
    step(ids_from(1))
  trained = by_raw_id(model, 1)
  assert_equal(by_raw_id(model, 5), initial[5])
  same = jax.tree.map(np.array_equal, trained, initial[1])
  assert not any(jax.tree.leaves(same))
  for rows in translate(model, ids_from(1)).values():
    np.testing.assert_array_equal(rows, -1)


def mesh_of_8():
  return jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Explicit,))


@pytest.mark.weekly
def test_a_stream_gives_the_same_table_on_a_mesh():
  """12 buckets are whole on every device, 16 are split."""
  features = features_of(table(48), table(64, "other"))
  batches = list(batches_of(features, 2, ids=60, drift=40))
  expected, optimizer = make(features)
  outcomes = train(batches, expected, optimizer)
  wanted = expected.variables
  with jax.set_mesh(mesh_of_8()):
    model, optimizer = make(features)
    actual = train(batches, model, optimizer)
    assert_equal([rows for _, rows in actual], [rows for _, rows in outcomes])
    for name, variables in model.variables.items():
      for key in ("raw_ids", "last_used"):
        np.testing.assert_array_equal(variables[key], wanted[name][key])
      np.testing.assert_allclose(variables["parameters"], wanted[name]["parameters"], atol=1e-6)
    assert_equal(model.vocabulary_report, expected.vocabulary_report)


def test_ids_that_find_no_room_are_padding():
  model, optimizer = make({"id": embed.FeatureConfig(table(8))})
  _, rows = embed.jit_step(train_step, model, optimizer)(as_raw({"id": np.arange(100)}))
  given = np.asarray(rows["id"])
  assert sorted(given[given >= 0].tolist()) == list(range(8))
  assert int(model.vocabulary_report["user"]["turned_away"]) == 100 - 8
  assert rows_of(model, 10**9, 2**64 - 1).tolist() == [-1, -1]


def test_what_a_lookup_reads_is_admitted():
  """No ids behind the last bag or a sequence's end, and no padding, which is 2**64 - 1 alone."""
  config = table()
  features = {"id": embed.FeatureConfig(config), "ragged": embed.FeatureConfig(config)}
  model, _ = make(features | {"sequence": embed.FeatureConfig(config, max_sequence_length=3)})
  raw = lambda *ids: np.array(ids, np.uint64)
  halves = [2**32 - 1, (2**32 - 1) << 32]
  batch = {
    "id": raw(*halves, 2**64 - 1),
    "ragged": embed.Ragged(raw(1, 2, 3), np.array([0, 2])),
    "sequence": embed.Padded(raw(5, 6, 7, 8, 9)[None]),
  }
  rows = np.asarray(admit(model, as_raw(batch))["id"])
  assert [raw for raw in range(10) if rows_of(model, raw)[0] >= 0] == [1, 2, 5, 6, 7]
  assert (rows >= 0).tolist() == [True, True, False]
  np.testing.assert_array_equal([rows_of(model, raw)[0] for raw in (*halves, 2**64 - 1)], rows)
  assert set(owned_rows(model)) == {1, 2, 5, 6, 7, *halves}


@pytest.mark.ci
def test_rows_of_a_pending_update_are_not_taken():
  """The next batch may be admitted before this one's update."""
  for ahead, expected in ((True, [-1] * 4), (False, [0, 1, 2, 3])):
    model, _ = make({"id": embed.FeatureConfig(table(4))})
    admit(model, as_raw({"id": np.arange(4)}))
    rows = admit(model, as_raw({"id": np.arange(10, 14)}), ahead=ahead)["id"]
    assert sorted(rows.tolist()) == expected


def test_raw_ids_without_rows_and_ids_that_jax_has_cut_raise():
  model, _ = make({"id": embed.FeatureConfig(table())})
  ids = np.array([3, 2**40])
  wrong = [
    (lambda: model({"id": ids}), r"ids = model\.embed\.admit\(ids\)"),
    (
      lambda: nnx.jit(lambda m, ids: m.admit({"id": ids}))(model, ids),
      r"embed\.raw_ids\(ids\) on the host",
    ),
    (lambda: model.admit({"id": np.array([0.5])}), "integers"),
    (lambda: embed.raw_ids(np.array([-2])), r"view\(np\.uint64\)"),
    (lambda: embed.raw_ids(jnp.array([1])), r"embed\.raw_ids"),
  ]
  refused(wrong, lambda call: call())
  embed.validate(model.spec.features, {"id": ids})


# --- checkpoints, deltas, exports ----------------------------------------------------------------


def trained(config, steps=6):
  model, optimizer = make({"id": embed.FeatureConfig(config)})
  step = embed.jit_step(train_step, model, optimizer)
  for number in range(steps):
    step(as_raw({"id": np.arange(30) + number * 15}))
  return model, optimizer


def copied(tree):
  return jax.tree.map(np.array, tree)


@pytest.mark.ci
@pytest.mark.programs(35, "saves and restores four layers")
def test_a_resumed_run_is_the_same_to_the_bit():
  """And a checkpoint moves to a mesh and back."""
  policy = {"eviction": "lfu", "half_life": 3}
  expected, _ = trained(table(48, **policy), steps=5)
  model, _ = trained(table(48, **policy), steps=3)
  saved = copied(embed.checkpoint.to_tree(model=model))
  resumed, optimizer = make({"id": embed.FeatureConfig(table(48, **policy))})
  embed.checkpoint.from_tree(saved, model=resumed)
  step = embed.jit_step(train_step, resumed, optimizer)
  for number in range(3, 5):
    step(as_raw({"id": np.arange(30) + number * 15}))
  assert_equal(variables_of(resumed), variables_of(expected))
  assert_equal(resumed.vocabulary_report, expected.vocabulary_report)
  with jax.set_mesh(mesh_of_8()):
    other, _ = make({"id": embed.FeatureConfig(table(48, **policy))})
    embed.checkpoint.from_tree(saved, model=other)
    assert_equal(embed.checkpoint.to_tree(model=other)["model"], saved["model"])


@pytest.mark.ci
def test_deltas_follow_rows_that_change_hands(tmp_path):
  config = table(32, optimizer=embed.adagrad(0.1), eviction="lfu", half_life=2)
  model, optimizer = make({"id": embed.FeatureConfig(config)})
  served = embed.SparseEmbed({"id": embed.FeatureConfig(config)}, rngs=nnx.Rngs(1))
  embed.checkpoint.from_tree(copied(embed.checkpoint.to_tree(model=model)), model=served)
  since, by_id, evicted = embed.deltas.fingerprint(0, model=model), {}, 0
  step = embed.jit_step(train_step, model, optimizer)
  for number in range(3):
    step(as_raw({"id": np.arange(30, dtype=np.uint64) + number * 15}))
    delta, since = embed.deltas.changes(since, number + 1, model=model)
    embed.deltas.write(tmp_path / str(number), delta)
    delta = embed.deltas.read(tmp_path / str(number))
    embed.deltas.apply(delta, number, model=served)
    rows, owners = delta.tables["model"]["user"], delta.owners["model"]["user"]
    for raw_id in as_ints(owners.evicted):
      by_id.pop(raw_id, None)
    by_id.update(zip(as_ints(rows.values["raw_ids"]), rows.values["parameters"], strict=True))
    by_id.pop(2**64 - 1, None)  # rows without an owner
    evicted += len(owners.evicted)
    assert_equal(served.variables["user"], model.variables["user"])
    assert {raw: row.tolist() for raw, row in by_id.items()} == owned_rows(model)
  assert evicted > 0
  other = embed.SparseEmbed({"id": embed.FeatureConfig(table(64))}, rngs=nnx.Rngs(1))
  with pytest.raises(ValueError, match="made against other rows"):
    embed.deltas.apply(delta, 2, model=other)


@pytest.mark.ci
def test_an_export_answers_raw_ids():
  model, _ = trained(table(48), steps=2)
  batch = {"id": embed.raw_ids(np.array([20, 10**9, -1]))}
  predict = lambda model, batch: model(model.translate(batch))["id"]
  exported = embed.export(predict, model, batch, any_batch=True)
  expected = np.asarray(predict(model, batch))
  assert expected.any(axis=1).tolist() == [True, False, False]
  np.testing.assert_array_equal(exported.program.call(exported.arrays, batch), expected)
