"""Ids that fall on devices as unevenly as can be: more rounds, and the same result to the last row.

Adagrad and Adam step on a row's whole gradient. A row that met only a part of it in a round, or was
stepped in two of them, would end elsewhere; so would one whose gradient came from one device alone.
"""

import functools

import harness
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
import ways
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import make_mesh, make_world, sixteenths

import embed

pytestmark = pytest.mark.usefixtures("strict")

N = 8  # devices
V, D = 61, 3  # eight rows on each of the first five devices, seven on the others
BAGS = (16, 3)  # six ids on each device


def planned(features, batch, mesh, **capacities):
  """A plan that spreads every table by "mod", with these capacities."""
  plan = embed.plan(features, mesh, batch)
  for name in plan:
    plan[name].strategy, plan[name].exchange = "mod", None
    plan[name].capacity = capacities[name]
  return plan


def one_bag(optimizer):
  return embed.FeatureConfig(embed.TableConfig(V, D, sixteenths, optimizer, "sum", name="a"))


def trained(layer, ids):
  """The loss of a step, and the table after it."""
  optimizer = embed.Optimizer(layer, optax.sgd(0.1))

  @nnx.jit
  def step(layer, optimizer, ids):
    loss, grads = embed.value_and_grad(lambda layer, ids: jnp.sum(layer(ids) ** 2))(layer, ids)
    optimizer.update(layer, grads)
    return loss

  return np.asarray(step(layer, optimizer, ids)), np.asarray(layer.tables["a"])


def padding():
  return embed.Padded(np.full(BAGS, -1, np.int32))


# Each is [16, 3]: two bags of three on each device.
SKEWED = {
  "one row": np.full(BAGS, 5),
  "the rows of one owner in mod": np.arange(48).reshape(BAGS) % 7 * N,
  "the rows of one owner in div": np.arange(48).reshape(BAGS) % 8,
  "the same rows from every device": np.tile(np.arange(6).reshape(2, 3) * 8 + 3, (8, 1)),
  "one device alone": np.where(np.arange(16)[:, None] < 2, np.arange(48).reshape(BAGS) * 8, -1),
  "one id each": np.where(np.arange(3) == 0, np.arange(16)[:, None], -1),
  "nothing": np.full(BAGS, -1),
}
OPTIMIZERS = {"adagrad": lambda: embed.adagrad(0.5), "adam": lambda: embed.adam(0.25, epsilon=1e-2)}
CASES = [
  ("rows", "mod", 1, "adagrad"),
  pytest.param("lines", "mod", 1, "adagrad", marks=pytest.mark.ci),
  pytest.param("sparse_cores", "mod", 1, "adagrad", marks=pytest.mark.weekly),
  pytest.param("rows", "div", 2, "adam", marks=pytest.mark.ci),
]


@functools.cache
def skewed(optimizer):
  """A world of one device; three batches of each kind, and what it makes of them."""
  cotangents = np.random.default_rng(0).integers(-8, 9, (3, BAGS[0], D)) / 8
  one, worst = make_world(one_bag(OPTIMIZERS[optimizer]()), rows=True), []
  for ids in SKEWED.values():
    bags = embed.Padded(ids.astype(np.int32))
    three = [(bags, None, c.astype(np.float32)) for c in cotangents]
    worst.append((three, one.run(three)))
  return one, worst


@pytest.fixture(scope="module")
def by_rows():
  """What plain rows give, before `way` begins; adam's is asked for by plain rows alone."""
  skewed("adagrad")


def small_buffers(strategy, capacity, optimizer):
  mesh, features = make_mesh(), one_bag(OPTIMIZERS[optimizer]())
  plan = planned(features, padding(), mesh, a=capacity)
  plan["a"].strategy = strategy
  return make_world(features, rows=True, mesh=mesh, plan=plan)


def owners(strategy, ids):
  """Which device owns a row, said another way than the library does."""
  if strategy == "mod":
    return ids % N
  parts = np.array_split(np.arange(V), N)
  return np.searchsorted([part[0] for part in parts], ids, side="right") - 1


def most_rows(strategy, ids):
  """The most distinct rows that one device asks of another."""
  most = 0
  for mine in np.split(ids.reshape(-1), N):
    rows = np.unique(mine[mine >= 0])
    most = max(most, np.bincount(owners(strategy, rows), minlength=1).max(initial=0))
  return most


def assert_exact(world, strategy, capacity, three, wanted):
  """Three steps equal those of one device, the rows' gradients to the bit; the report is right."""
  found = world.run(three)
  meshes.assert_same_outcomes(found, wanted, {"a": V})
  for a, b, (ids, _, _) in zip(found, wanted, three, strict=True):
    meshes.assert_equal(harness.rows(a.rows["a"], V), harness.rows(b.rows["a"], V))
    most = most_rows(strategy, ids.values)
    assert a.report["exchange_rounds"] == -(-most // capacity)
    assert a.report["buffer_fill"] == most / capacity


@pytest.mark.parametrize(("way", "strategy", "capacity", "optimizer"), CASES, indirect=["way"])
def test_skewed_ids(by_rows, way, strategy, capacity, optimizer):
  """All the worst cases; and any other, where one device is asked in the same way."""
  one, worst = skewed(optimizer)
  world = small_buffers(strategy, capacity, optimizer)
  for three, wanted in worst:
    assert_exact(world, strategy, capacity, three, wanted)
  if optimizer == "adam":
    batch = st.tuples(meshes.ids(BAGS, V).map(embed.Padded), st.none(), meshes.fractions((16, D)))

    @given(st.lists(batch, min_size=3, max_size=3))
    @settings(max_examples=8)
    def check(three):
      assert_exact(world, strategy, capacity, three, one.run(three))

    check()


@pytest.mark.ci
def test_rows_that_nobody_asks_for_reach_nothing():
  """The last local row of the shards that have eight is NaN: unused requests may read it."""
  features, mesh = one_bag(embed.adagrad(0.5)), make_mesh()
  ids = embed.Padded(np.array(SKEWED["one id each"], np.int32))
  found = []
  for last in (np.nan, 1.0):
    layer = embed.SparseEmbed(plan=planned(features, ids, mesh, a=2), rngs=nnx.Rngs(0))
    rows = np.ones((V, D), np.float32)
    rows[-(V % N) :] = last
    layer.load_tables({"a": rows})
    found.append(trained(layer, ids))
  (loss, table), (expected_loss, expected) = found
  np.testing.assert_array_equal(loss, expected_loss)
  np.testing.assert_array_equal(table[:16], expected[:16])
  assert np.isnan(table[-5:]).all()


def test_the_report_by_hand():
  """Of the fullest pair of devices of the last call, over all tables."""
  mesh = make_mesh()
  features = {
    "a": embed.FeatureConfig(embed.TableConfig(64, 2, name="a")),
    "b": embed.FeatureConfig(embed.TableConfig(64, 4, name="b")),
  }
  example = {"a": embed.Padded(np.zeros((8, 6), np.int32)), "b": np.zeros(16, np.int32)}
  plan = planned(features, example, mesh, a=4, b=1)
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  look_up = nnx.jit(lambda layer, batch: layer(batch))
  reports = []
  for a, b in (
    # Device 0 asks device 0 for rows 0, 8, .. 40: 6 rows in rounds of 4. Table b: 1 row in 1.
    (np.where(np.arange(8)[:, None] == 0, np.arange(6) * 8, -1), np.zeros(16)),
    # Every device asks device 3 for row 3 alone. Table b: device 7 asks device 1 for 1 and 9.
    (np.full((8, 6), 3), np.where(np.arange(16) < 14, -1, np.arange(16) * 8 - 111)),
    (np.full((8, 6), -1), np.full(16, -1)),
  ):
    look_up(layer, {"a": embed.Padded(a.astype(np.int32)), "b": b.astype(np.int32)})
    report = layer.report.get_value()
    reports.append((int(report["exchange_rounds"]), float(report["buffer_fill"])))
  assert reports == [(2, 6 / 4), (2, 2 / 1), (0, 0.0)]


# --- everything at once, row by row --------------------------------------------------------------


def one_table(optimizer):
  table = embed.TableConfig(V, D, sixteenths, optimizer, "sum", name="a")
  return {name: embed.FeatureConfig(table) for name in ("bag", "ragged", "more")}


def two_calls_and_a_branch(model, features, weights, cotangents):
  """Calls that overflow by different numbers, one with segments, one that is not always made."""
  first = {name: features[name] for name in ("bag", "ragged")}
  loss, _ = harness.loss_fn(model, first, None, {name: cotangents[name] for name in first})
  more = {"more": embed.Padded(features["more"])}
  look_up = lambda model: jnp.sum(model.embed(more)["more"] * cotangents["more"])
  made = features["more"][0, 0] >= 0
  return loss + nnx.cond(made, look_up, lambda model: 0 * look_up(model), model), None


def at_once(model, *batch):
  """And gradients of another batch, which are at their owners already."""
  _, grads = embed.value_and_grad(two_calls_and_a_branch, has_aux=True)(model, *batch)
  _, others = embed.value_and_grad(lambda m: jnp.sum(m.embed({"bag": batch[0]["bag"]})["bag"]))(
    model
  )
  grads = embed.accumulate([grads, others.map(lambda g: g * g + 1)])
  return (jnp.zeros(()), embed.global_norm(grads)), grads


def everything(seed):
  """A batch of ids that are any row or padding; of the odd ones, the branch makes no call."""
  draw = np.random.default_rng(seed)
  ids = lambda *shape: draw.integers(-1, V, shape).astype(np.int32)
  splits = np.cumsum([0, *draw.integers(0, 3, 7)]).astype(np.int32)
  features = {"bag": embed.Padded(ids(16, 3)), "ragged": embed.Ragged(ids(20), splits)}
  features["more"] = ids(9, 4)
  features["more"][0, 0] = -1 if seed % 2 else 0
  cotangents = {"bag": (16, D), "ragged": (7, D), "more": (9, D)}
  return features, None, meshes.normal(seed, cotangents)


@pytest.mark.parametrize(
  "way", [*ways.ci("rows"), *ways.weekly("lines", "sparse_cores")], indirect=True
)
def test_everything_at_once(way):
  one = make_world(one_table(embed.adagrad(0.5)), rows=True, gradients=at_once)
  mesh, features = make_mesh(), one_table(embed.adagrad(0.5))
  plan = planned(features, {"bag": padding()}, mesh, a=1)
  world = make_world(features, rows=True, gradients=at_once, mesh=mesh, plan=plan)
  batches = list(map(everything, range(8)))
  meshes.assert_same_outcomes(world.run(batches), one.run(batches), {"a": V})
