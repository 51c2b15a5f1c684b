"""Tables over eight devices give what one device gives: lookups, gradients, three steps, values.

Nothing here divides by eight unless it says so: not the rows, the columns or the batch. Optimizers,
strategies, kinds of mesh and exchanges are paired so that each one meets the others somewhere.
"""

import functools
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
import reference
import ways
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, make_world, sixteenths
from optimizer_cases import CLIP, DECAY, LR_DECAY, SCHEDULE, TOLERANCE

import embed

# --- every optimizer -----------------------------------------------------------------------------


def across_the_row(g, w, s, lr):
  """An equation that an elementwise one could not be."""
  largest = jnp.max(jnp.abs(g), axis=-1, keepdims=True)
  mean = jnp.mean(g, axis=-1)
  return w - lr * g / (1 + largest), {"n": s["n"] + 1, "mean": s["mean"] + mean, "m": s["m"] + g}


EXTRA = {
  "from_optax": lambda rate: embed.from_optax(optax.adam(1.0, eps=1e-2), learning_rate=rate),
  "across the row": lambda rate: embed.custom_optimizer(
    across_the_row,
    {"n": embed.Slot(per_row=True), "mean": embed.Slot(per_row=True), "m": 0.0},
    learning_rate=rate,
    weight_decay_factor=0.125,
  ),
  "frozen": lambda rate: embed.frozen(),
}


class Case(NamedTuple):
  """An optimizer, and how its table is spread and exchanged over eight devices."""

  name: str
  config: dict[str, Any]
  strategy: str
  kind: str
  exchange: str | None = None
  capacity: int | None = None
  way: str = "rows"


CASES = [
  Case("sgd", {}, "mod", "auto", "all_to_all"),
  Case("adagrad", CLIP | DECAY, "div", "explicit", "gather"),
  Case("rowwise_adagrad", {}, "replicated", "auto"),
  Case("adam", {"epsilon": 1e-3}, "mod", "explicit", "all_to_all", 1),
]
CASES_OF_CI = [
  Case("rowwise_adagrad", CLIP | LR_DECAY, "div", "auto"),
  Case("across the row", {}, "mod", "explicit"),
  Case(
    "ftrl",
    {"multiply_linear_by_learning_rate": True, "l2_regularization_strength": 0.25, "beta": 0.5},
    "div", "auto", way="lines",
  ),
  Case(
    "adagrad_momentum",
    {"momentum": 0.5, "use_nesterov": True, "epsilon": 0.01},
    "mod", "explicit", "gather",
  ),
  Case("from_optax", {}, "replicated", "explicit"),
  Case("adam", {"epsilon": 1e-3}, "mod", "auto"),
  Case("frozen", {}, "mod", "auto"),
]  # fmt: skip
V, D = 21, 3
BAG = (10, 3)


def schedule(step):
  return jnp.asarray(SCHEDULE)[step]


def make_optimizer(case):
  if case.name in EXTRA:
    return EXTRA[case.name](schedule)
  return getattr(embed, case.name)(learning_rate=schedule, **case.config)


def one_bag(optimizer, combiner="sum"):
  return embed.FeatureConfig(embed.TableConfig(V, D, sixteenths, optimizer, combiner, name="t"))


def exact_batch(seed):
  """Ids of few rows, so that most repeat; weights and gradients of which sums are exact."""
  draw = np.random.default_rng(seed)
  eighths = lambda *shape: (draw.integers(-8, 9, shape) / 8).astype(np.float32)
  values = draw.choice(draw.permutation(V)[:14], BAG)
  values = np.where(draw.random(BAG) < 0.2, -1, values).astype(np.int32)
  return embed.Padded(values), embed.Padded(2 * eighths(*BAG)), eighths(BAG[0], D)


def lookup_of(ids, weights):
  """The reference's plan of a lookup."""
  inputs = reference.PaddedIds(ids.values, weights.values)
  return reference.occurrences(reference.Feature("sum"), inputs)


def occurrences_of(ids, weights, cotangents):
  return reference.occurrence_gradients(lookup_of(ids, weights), cotangents)


def expected(case, initial, three):
  """Table and slots after each step: of the reference where it has the rule, else of one device."""
  if case.name in EXTRA:
    world = make_world(one_bag(make_optimizer(case)))
    return [outcome.variables["t"] for outcome in world.run(three)]
  found = [reference.initial_variables(case.name, initial, **case.config)]
  for batch, rate in zip(three, SCHEDULE, strict=True):
    rows, gradients = occurrences_of(*batch)
    found.append(
      reference.apply_rows(case.name, found[-1], rows, gradients, float(rate), **case.config)
    )
  return found[1:]


@pytest.mark.parametrize(
  "case",
  [*CASES, *(pytest.param(case, marks=pytest.mark.ci) for case in CASES_OF_CI)],
  ids=lambda case: "-".join([case.name, case.strategy, case.kind, case.exchange or "chosen"]),
)
def test_every_optimizer(case):
  """Activations and tables of three steps; rows that were not looked up keep every bit."""
  features, mesh = one_bag(make_optimizer(case)), make_mesh(case.kind)
  three = [exact_batch(seed) for seed in range(3)]
  plan = embed.plan(features, mesh, three[0][0])
  plan["t"].strategy = case.strategy
  plan["t"].exchange, plan["t"].capacity = case.exchange, case.capacity
  with ways.stored(case.way):
    world = make_world(features, mesh=mesh, plan=plan)
    initial = jax.tree.map(np.asarray, world.model.embed.variables["t"])
    outcomes = world.run(three)
    assert world.step._cache_size() == 1  # where a step puts its results is where it wants them
  if case.exchange:
    assert {of_stack.exchange for of_stack in plan.costs()} == {case.exchange}
  if case.capacity:
    assert outcomes[-1].report["exchange_rounds"] > 1
  tolerance = TOLERANCE.get(case.name, {"rtol": 1e-5, "atol": 2e-6})
  before = initial
  for i, wanted in enumerate(expected(case, initial["parameters"], three)):
    after = outcomes[i].variables["t"]
    activations = reference.lookup(before["parameters"], lookup_of(*three[i][:2]))
    np.testing.assert_allclose(outcomes[i].activations, activations, rtol=1e-5, atol=1e-5)
    assert set(after) == set(wanted)
    for key in wanted:
      np.testing.assert_allclose(after[key], wanted[key], **tolerance, err_msg=f"{key}, {i}")
    untouched = np.setdiff1d(np.arange(V), occurrences_of(*three[i])[0])
    assert untouched.size
    for key, value in after.items():
      np.testing.assert_array_equal(value[untouched], before[key][untouched])
    before = after


# --- every kind of input -------------------------------------------------------------------------


class Given(NamedTuple):
  """A feature: its table, kind, sequence length, batch, longest bag and whether it has weights."""

  table: str
  kind: str
  sequence: int
  batch: int
  length: int
  weighted: bool = False


FEATURES = {
  "bag": Given("sum", "padded", 0, 10, 3, True),
  "history": Given("mean", "padded", 2, 9, 3),
  "id": Given("sum", "dense", 0, 13, 1),
  "ragged": Given("sqrtn", "ragged", 0, 7, 3, True),
  "sparse": Given("sum", "sparse", 0, 6, 4, True),
  "valency": Given("mean", "valency", 0, 16, 3),
}
SIZES = {"sum": 21, "mean": 13, "sqrtn": 16}  # of three tables that share an array


def every_kind():
  tables = {
    name: embed.TableConfig(size, D, combiner=name, name=name) for name, size in SIZES.items()
  }
  return {
    name: embed.FeatureConfig(tables[f.table], max_sequence_length=f.sequence)
    for name, f in FEATURES.items()
  }


def kinds_batch(seed):
  """Any row, padding, and two ids that are no row of the table; bags of any length."""
  draw = np.random.default_rng(seed)
  features, weights, cotangents = {}, {}, {}
  for name, f in FEATURES.items():
    values = draw.integers(-1, SIZES[f.table] + 2, (f.batch, f.length)).astype(np.int32)
    of_ids = draw.normal(size=values.shape).astype(np.float32) if f.weighted else None
    lengths = draw.integers(0, f.length + 1, f.batch)
    features[name], weights[name] = to_kind(f, values, of_ids, lengths)
    shape = f.batch, *([f.sequence] if f.sequence else []), D
    cotangents[name] = draw.normal(size=shape).astype(np.float32)
  return features, weights, cotangents


def to_kind(f, values, weights, lengths):
  if f.kind == "dense":
    return (values[:, 0] if f.length == 1 else values), None
  if f.kind == "padded":
    wrap = embed.Padded
  elif f.kind == "sparse":
    order = np.random.default_rng(0).permutation(values.size)  # in no order
    indices = np.argwhere(np.ones(values.shape))[order].astype(np.int32)
    wrap = lambda v: embed.Sparse(indices, v.reshape(-1)[order], values.shape)
  else:  # what lies behind the last split must not matter
    splits = np.cumsum([0, *lengths]).astype(np.int32)
    wrap = lambda v: embed.Ragged(
      v.reshape(-1), splits, max_valency=f.length if f.kind == "valency" else None
    )
  return wrap(values), None if weights is None else wrap(weights)


@functools.cache
def kinds_on_one_device():
  world = make_world(every_kind(), embed.adagrad(0.5), rows=True)
  return world.run(map(kinds_batch, range(8)))


@pytest.mark.ci
@pytest.mark.parametrize(("strategy", "kind"), [("mod", "explicit"), ("replicated", "auto")])
def test_every_kind_of_input(strategy, kind):
  """Activations, the row gradients of every table, and eight steps."""
  # A user may run with these settings on; silent broadcasting and promotion become errors.
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    world = make_world(
      every_kind(), embed.adagrad(0.5), rows=True, mesh=make_mesh(kind), sharding=strategy
    )
    found = world.run(map(kinds_batch, range(8)))
    meshes.assert_same_outcomes(found, kinds_on_one_device(), SIZES)


# --- bit for bit ---------------------------------------------------------------------------------


@pytest.mark.ci
@given(
  st.lists(st.tuples(meshes.ids((16, 2), 24), meshes.fractions((16, 8))), min_size=3, max_size=3)
)
@settings(max_examples=8)
def test_exact_values_are_exact(three):
  """Where no sum rounds, its order is all that a mesh changes: nothing is left to tolerate."""
  batches = [(embed.Padded(ids), None, cotangents) for ids, cotangents in three]
  one, eight = (world.run(batches) for world in even_worlds())
  for a, b in zip(eight, one, strict=True):
    meshes.assert_equal(a.activations, b.activations)
    meshes.assert_equal(a.variables, b.variables)
    meshes.assert_equal(harness.rows(a.rows["t"], 24), harness.rows(b.rows["t"], 24))


@functools.cache
def even_worlds():
  """Of one device and of eight; everything divides by eight."""
  table = embed.TableConfig(24, 8, sixteenths, embed.sgd(0.25), "sum", name="t")
  places = {}, {"mesh": make_mesh(), "sharding": "mod"}
  return [make_world(embed.FeatureConfig(table), rows=True, **where) for where in places]


@pytest.mark.ci
@pytest.mark.parametrize(("strategy", "kind"), [("mod", "explicit"), ("div", "auto")])
def test_a_table_smaller_than_the_mesh(strategy, kind):
  """Three rows, one column, one example: most devices have nothing."""

  def features():
    table = embed.TableConfig(3, 1, sixteenths, combiner="sum", name="t")
    return embed.FeatureConfig(table)

  batch = (embed.Padded(np.array([[2, 0, 2]], np.int32)), None, np.ones((1, 1), np.float32))
  one = make_world(features(), embed.adagrad(0.5), rows=True)
  world = make_world(
    features(), embed.adagrad(0.5), rows=True, mesh=make_mesh(kind), sharding=strategy
  )
  wanted = one.run([batch] * 2)
  assert harness.rows(wanted[0].rows["t"], 3) == {0: 1, 2: 2}
  meshes.assert_same_outcomes(world.run([batch] * 2), wanted, {"t": 3})


# --- two axes ------------------------------------------------------------------------------------


def plane_features(optimizer):
  table = embed.TableConfig(V, D, sixteenths, optimizer, "mean", name="t")
  return {name: embed.FeatureConfig(table) for name in ("bag", "ragged")}


def plane_batch(seed):
  draw = np.random.default_rng(seed)
  lengths = draw.integers(0, 4, 7)
  ragged = embed.Ragged(
    draw.integers(0, V, 24).astype(np.int32), np.cumsum([0, *lengths]).astype(np.int32)
  )
  bag = embed.Padded(draw.integers(-1, V, BAG).astype(np.int32))
  cotangents = meshes.normal(seed, {"bag": (BAG[0], D), "ragged": (7, D)})
  return {"bag": bag, "ragged": ragged}, None, cotangents


@pytest.mark.ci
@pytest.mark.parametrize(
  ("optimizer", "kind", "axis", "capacity"),
  [
    pytest.param(embed.adam(0.5, epsilon=1e-2), "auto", ("data", "model"), None, id="replicas"),
    pytest.param(embed.rowwise_adagrad(0.5), "explicit", ("data", "model"), 1, id="rounds"),
    pytest.param(embed.adam(0.5, epsilon=1e-2), "explicit", "data", None, id="copies"),
  ],
)
def test_two_axes(optimizer, kind, axis, capacity):
  """Rows over one axis, copies over the other, the batch over both or one (`axis`)."""
  mesh = make_mesh(kind, (4, 2), ("data", "model"))
  features, batches = plane_features(optimizer), list(map(plane_batch, range(3)))
  plan = embed.plan(features, mesh, batches[0][0], axis=axis)
  entry = plan["t"]
  entry.strategy, entry.axis, entry.exchange, entry.capacity = "mod", "data", None, capacity
  found = make_world(features, rows=True, mesh=mesh, plan=plan).run(batches)
  meshes.assert_same_outcomes(found, make_world(features, rows=True).run(batches), {"t": V})
  if capacity:
    assert found[-1].report["exchange_rounds"] > 1


# --- every way through a loss ---------------------------------------------------------------------


def two_tables(optimizer):
  """In one array."""
  t = embed.TableConfig(V, D, sixteenths, optimizer, "mean", name="t")
  u = embed.TableConfig(9, D, sixteenths, optimizer, "sum", name="u")
  return {"bag": embed.FeatureConfig(t), "id": embed.FeatureConfig(u)}


def ways_batch(seed):
  draw = np.random.default_rng(seed)
  features = {
    "bag": embed.Padded(draw.integers(-1, V, BAG).astype(np.int32)),
    "id": draw.integers(-1, 9, 11).astype(np.int32),
  }
  return features, None, meshes.normal(seed, {"bag": (BAG[0], D), "id": (11, D)})


def against_every_row(model, features, weights, cotangents):
  loss, _ = harness.loss_fn(model, features, weights, cotangents)
  scores = model.embed.attend(cotangents["id"], "t")
  return loss + jnp.sum(jnp.tanh(scores)), scores


def against_candidates(model, features, weights, cotangents):
  shared = model.embed.attend(cotangents["id"], "u", np.array([3, 0, 3, -1], np.int32))
  each = model.embed.attend(cotangents["bag"], "t", features["bag"].values)
  return jnp.sum(jnp.tanh(shared)) + jnp.sum(jnp.tanh(each)), (shared, each)


def accumulated(model, features, weights, cotangents):
  """Of two microbatches, one of them changed in between."""
  parts = []
  for part in (slice(0, 4), slice(4, None)):
    cut = lambda x, part=part: x[part]
    parts.append(harness.value_and_grad(model, *jax.tree.map(cut, (features, weights, cotangents))))
  (loss, _), first = parts[0]
  grads = embed.accumulate([first, parts[1][1].map(lambda g: g * jnp.abs(g))])
  return (loss, embed.global_norm(grads)), grads


def clipped(model, *batch):
  (loss, _), grads = harness.value_and_grad(model, *batch)
  norm = embed.global_norm(grads)
  grads = embed.clip_by_global_norm(grads, 0.5)
  return (loss, (norm, embed.global_norm(grads))), grads


def differentiated(loss):
  return embed.value_and_grad(loss, has_aux=True)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("way", "strategy", "kind"),
  [
    (differentiated(against_every_row), "mod", "auto"),
    (differentiated(against_candidates), "div", "explicit"),
    (clipped, "replicated", "auto"),
    (accumulated, "mod", "explicit"),
  ],
  ids=["attend", "candidates", "clip", "accumulate"],
)
def test_every_way_through_a_loss(way, strategy, kind):
  train = lambda **where: make_world(
    two_tables(embed.adagrad(0.5)), rows=True, gradients=way, **where
  ).run(map(ways_batch, range(3)))
  found = train(mesh=make_mesh(kind), sharding=strategy)
  meshes.assert_same_outcomes(found, train(), {"t": V, "u": 9})


# --- at the mid level ----------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(("form", "kind"), [("segments", "auto"), ("max_valency", "explicit")])
def test_row_splits_on_some_of_the_axes(form, kind):
  """XLA's partitioner adds wrong elements where splits are split over one of two axes."""
  features = embed.FeatureConfig(embed.TableConfig(V, D, sixteenths, name="t"))
  max_valency = 9 if form == "max_valency" else None
  batch = embed.Ragged(
    np.arange(16, dtype=np.int32), np.array([0, 0, 3, 3, 9, 14, 15, 16], np.int32), max_valency
  )
  mesh = make_mesh(kind, (4, 2), ("data", "model"))
  layer = harness.Model(features, mesh=mesh, axis="data").embed
  look_up = nnx.jit(lambda layer, batch: layer(batch), graph=False)
  activations = look_up(layer, jax.device_put(batch, NamedSharding(mesh, P("data"))))
  meshes.assert_close(activations, look_up(harness.Model(features).embed, batch))
