"""Steps of every kind of optimizer, however rows are stored and spread, against NumPy."""

import types
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from meshes import make_mesh, make_world
from optimizer_cases import CLIP, DECAY, LR_DECAY, SCHEDULE, STEPS, TOLERANCE

import embed

V, D, OTHERS = 61, 10, 30
RATE = 0.125  # of STEPS, "half" and "other"; of the others SCHEDULE
# The tables "half" and "other" are bfloat16, rounded at random, and stored together.
FEW = ["row", "half", "other"]
RULES = {
  "sum": ("sgd", {}),
  "summed": ("sgd", {"clipvalue": 0.25, "weight_decay_factor": 0.125}),
  "elements": ("adagrad", {}),
  "row": ("rowwise_adagrad", {"epsilon": 0.25}),
  "adagrad": ("adagrad", CLIP | DECAY),
  "rowwise_adagrad": ("rowwise_adagrad", CLIP | LR_DECAY),
  "adagrad_momentum": (
    "adagrad_momentum",
    {"momentum": 0.5, "use_nesterov": True, "epsilon": 0.01},
  ),
  "ftrl": (
    "ftrl",
    {"multiply_linear_by_learning_rate": True, "l2_regularization_strength": 0.25, "beta": 0.5},
  ),
  "adam": ("adam", {"epsilon": 1e-3}),
}
EXACT = ("sum", "half", "other", "frozen")  # all of their numbers are


def schedule(step):
  return jnp.asarray(SCHEDULE)[step]


def optimizer_of(kind):
  if kind in ("half", "other"):
    return embed.sgd(RATE)
  if kind in STEPS:
    return STEPS[kind]
  if kind == "optax":
    return embed.from_optax(optax.sgd(1.0, momentum=0.5), learning_rate=schedule)
  if kind == "frozen":
    return embed.frozen()
  name, config = RULES[kind]
  return getattr(embed, name)(schedule, **config)


def rate_of(kind, step):
  return RATE if kind in (*STEPS, "half", "other") else float(SCHEDULE[step])


def fractions(seed, *shape):
  return (np.random.default_rng(seed).integers(-8, 9, shape) / 8).astype(np.float32)


ROWS = fractions(0, V, D)


def size_of(kind):
  return OTHERS if kind == "other" else V


def features(kinds):
  def table(kind):
    size = size_of(kind)
    initializer = lambda key, shape, dtype: ROWS[:size].astype(dtype)
    dtype = "bfloat16" if kind in ("half", "other") else "float32"
    return embed.TableConfig(size, D, initializer, optimizer_of(kind), "sum", kind, dtype=dtype)

  of_tables = {kind: embed.FeatureConfig(table(kind)) for kind in kinds}
  return {"bag": of_tables, "weighted": of_tables, "ragged": of_tables}


def batch(step):
  """Inputs, weights and cotangents, with repeated ids, padding and ids that are no row."""
  draw = np.random.default_rng(step)
  ids = lambda *shape: draw.integers(-1, 17 + 3 * step, shape).astype(np.int32)
  bag, splits = ids(16, 3), np.array([0, 4, 4, 9, 12, 20], np.int32)
  bag[0] = V, V - 1, V + 5
  inputs = {  # four ids more than the ragged bags hold
    "bag": embed.Padded(bag),
    "ragged": embed.Ragged(ids(24), splits),
    "weighted": embed.Padded(ids(9, 2)),
  }
  weights = {
    "bag": None,
    "ragged": embed.Ragged(fractions(step, 24), splits),
    "weighted": embed.Padded(fractions(step, 9, 2)),
  }
  bags = {"bag": 16, "weighted": 9, "ragged": 5}
  cotangents = {name: fractions(7 + i + step, n, D) for i, (name, n) in enumerate(bags.items())}
  return inputs, weights, cotangents


def for_all(kinds, step):
  """The batch, given to all tables."""
  return tuple({name: dict.fromkeys(kinds, x) for name, x in of.items()} for of in batch(step))


# --- what is expected -----------------------------------------------------------------------------


def scramble(x):
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
  return x ^ (x >> np.uint32(16))


def rounded(rows, ids, table, step):
  """Rows as bfloat16 by the noise of their table, step, id and columns."""
  golden, key = np.uint32(0x9E3779B9), np.zeros(1, np.uint32)
  for number in (zlib.crc32(table.encode()), step):
    key = scramble(key ^ np.uint32(number)) + golden
  noise = scramble(ids.astype(np.uint32) ^ key)[:, None] + np.arange(D, dtype=np.uint32) * golden
  bits = rows.astype(np.float32).view(np.uint32) + (scramble(noise) & np.uint32(0xFFFF))
  return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def stepped(kind, step, before, ids, gradients):
  """A table and its slots after a step on the gradients of these occurrences of rows."""
  rate = rate_of(kind, step)
  if kind in RULES:
    name, config = RULES[kind]
    return reference.apply_rows(name, before, ids, gradients, rate, **config)
  of_rows = reference.row_gradients(ids, gradients)
  rows, g = np.array(sorted(of_rows)), np.array([of_rows[row] for row in sorted(of_rows)])
  after = {name: x.copy() for name, x in before.items()}
  if kind == "both":
    scale = np.abs(g).max(axis=1) + 1
    after["n"][rows] += scale
    after["m"][rows] += g / scale[:, None]
    after["k"][rows] += 1
    after["parameters"][rows] -= rate * after["m"][rows]
  elif kind == "optax":
    after["0.trace"][rows] = after["0.trace"][rows] / 2 + g
    after["parameters"][rows] -= rate * after["0.trace"][rows]
  elif kind != "frozen":
    after["parameters"][rows] = rounded(before["parameters"][rows] - rate * g, rows, kind, step)
  return after


def initial(kind):
  rows = ROWS[: size_of(kind)].astype(np.float64)
  slots = {
    "both": {"n": np.zeros(V), "m": np.zeros((V, D)), "k": np.zeros((V, D))},
    "optax": {"0.trace": np.zeros((V, D))},
  }
  if kind in RULES:
    return reference.initial_variables(RULES[kind][0], rows)
  return {"parameters": rows} | slots.get(kind, {})


class Step(NamedTuple):
  activations: dict[tuple[str, str], np.ndarray]
  norm: float
  rows: dict[str, dict[int, np.ndarray]]  # the gradients of those that were looked up
  variables: dict[str, dict[str, np.ndarray]]


def expected(kinds):
  """Three steps of all tables."""
  variables = {kind: initial(kind) for kind in kinds}
  for step in range(3):
    inputs, weights, cotangents = batch(step)
    activations, touched, squares = {}, {}, 0.0
    for kind in kinds:
      found = []
      for name, given in inputs.items():
        occ = reference.occurrences(given, weights[name])
        kept = occ.ids < size_of(kind)
        occ = occ._replace(positions=occ.positions[kept], ids=occ.ids[kept], gains=occ.gains[kept])
        activations[name, kind] = reference.lookup(variables[kind]["parameters"], occ)
        found.append(reference.occurrence_gradients(occ, cotangents[name]))
      ids, gradients = (np.concatenate(x) for x in zip(*found, strict=True))
      touched[kind] = reference.row_gradients(ids, gradients)
      if kind != "frozen":
        squares += np.sum(np.square(list(touched[kind].values())))
      variables = variables | {kind: stepped(kind, step, variables[kind], ids, gradients)}
    yield Step(activations, np.sqrt(squares), touched, variables)


# --- ways and places ------------------------------------------------------------------------------


class Place(NamedTuple):
  """Tables on a mesh: its kind and shape, the batch's axes, and settings of all in the plan."""

  kinds: list[str]
  mesh: tuple[Any, ...] = ()
  settings: Mapping[str, Any] = types.MappingProxyType({})
  axis: str | None = None


ROUNDS = {"exchange": "all_to_all", "capacity": 1}
PLACES = {
  "one": Place([*STEPS, "half", "other"]),
  "mod, rounds": Place([*FEW, "adam"], ("auto", (8,)), {"strategy": "mod"} | ROUNDS),
  "div": Place(
    [*FEW, "sum", "adagrad"], ("explicit", (8,)), {"strategy": "div", "exchange": "all_to_all"}
  ),
  "gather": Place(
    [*FEW, "adagrad_momentum"], ("auto", (8,)), {"strategy": "mod", "exchange": "gather"}
  ),
  "replicated": Place(
    [*FEW, "rowwise_adagrad", "optax"], ("explicit", (8,)), {"strategy": "replicated"}
  ),
  "turned": Place([*FEW, "ftrl"], ("auto", (4, 2)), {"strategy": "div", "axis": ("b", "a")}),
  "three": Place([*FEW, "both", "frozen"], ("explicit", (3,)), {"strategy": "mod"}),
  # Rows over one axis, copies over the other; the batch over both, or over one.
  "replicas": Place([*FEW, "adam"], ("auto", (4, 2)), {"strategy": "mod", "axis": "a"}),
  "replicas, rounds": Place(FEW, ("explicit", (4, 2)), {"strategy": "mod", "axis": "a"} | ROUNDS),
  "copies": Place([*FEW, "adam"], ("explicit", (4, 2)), {"strategy": "mod", "axis": "a"}, "a"),
}
QUICK = [("rows", "one")]
CI = [
  *[("rows", place) for place in PLACES if ("rows", place) not in QUICK],
  ("lines", "one"),
  ("packed", "one"),
  ("lines", "three"),
]
WEEKLY = [("lines", "gather"), ("sparse_cores", "one"), ("sparse_cores", "mod, rounds")]
CASES = [
  *QUICK,
  *[pytest.param(*case, marks=pytest.mark.ci) for case in CI],
  *[pytest.param(*case, marks=pytest.mark.weekly) for case in WEEKLY],
]


def world(place):
  """A model in this place; its step returns activations and the norm of all gradients."""

  def gradients(model, *of_batch):
    (loss, activations), grads = harness.value_and_grad(model, *of_batch)
    norm = embed.global_norm(embed.Grads({}, grads.rows))
    return (loss, (activations, norm)), grads

  given = features(place.kinds)
  if not place.mesh:
    return make_world(given, rows=True, gradients=gradients)
  kind, shape = place.mesh
  mesh = make_mesh(kind, shape, ("a", "b")[: len(shape)])
  where = {"axis": place.axis} if place.axis else {}
  plan = embed.plan(given, mesh, for_all(place.kinds, 0)[0], **where)
  for name in plan:
    for key, value in place.settings.items():
      setattr(plan[name], key, value)
  if "exchange" in place.settings:
    assert {cost.exchange for cost in plan.costs()} == {place.settings["exchange"]}
  return make_world(given, rows=True, mesh=mesh, plan=plan, gradients=gradients)


@pytest.mark.programs(40, "the slots of ten tables are made in places of their own")
@pytest.mark.parametrize(("way", "place"), CASES, indirect=["way"])
def test_steps_by_each_way(way, place):
  """Activations, gradients and their norm, rows and slots; other rows keep their bits."""
  kinds = PLACES[place].kinds
  made = world(PLACES[place])
  before = {kind: initial(kind) for kind in kinds}
  outcomes = made.run([for_all(kinds, step) for step in range(3)])
  assert made.step._cache_size() == 1  # a step puts its results where it wants them
  if "capacity" in PLACES[place].settings:
    assert outcomes[-1].report["exchange_rounds"] > 1
  for step, (found, wanted) in enumerate(zip(outcomes, expected(kinds), strict=True)):
    for (name, kind), act in wanted.activations.items():
      new = found.activations[0][name][kind].astype(np.float32)
      rtol = 2**-8 if kind in ("half", "other") else 1e-5
      np.testing.assert_allclose(new, act, rtol, 1e-5, err_msg=f"{name}, {kind}, {step}")
    np.testing.assert_allclose(found.activations[1], wanted.norm, rtol=1e-6)
    for kind in kinds:
      of_rows = harness.rows(found.rows[kind], size_of(kind))
      harness.assert_rows(of_rows, wanted.rows[kind], rtol=0, atol=0)
      variables = jax.tree.map(lambda x: x.astype(np.float32), found.variables[kind])
      assert set(variables) == set(wanted.variables[kind])
      untouched = np.setdiff1d(np.arange(size_of(kind)), list(wanted.rows[kind]))
      assert untouched.size
      tolerance = TOLERANCE.get(kind, {"rtol": 1e-5, "atol": 2e-6})
      close = {"rtol": 0, "atol": 0} if kind in EXACT else tolerance
      for key, value in wanted.variables[kind].items():
        message = f"{kind}, {key}, {step}"
        np.testing.assert_allclose(variables[key], value, **close, err_msg=message)
        old = before[kind][key].astype(np.float32)
        np.testing.assert_array_equal(variables[key][untouched], old[untouched], message)
    before = found.variables
