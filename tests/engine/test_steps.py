"""Steps of every kind of optimizer, however rows are stored and spread, against NumPy."""

import zlib
from typing import NamedTuple

import harness
import jax
import numpy as np
import pytest
import reference
from meshes import make_mesh, make_world
from optimizer_cases import STEPS

import embed

V, D, OTHERS = 61, 10, 30
RATE = 0.125
# The tables "half" and "other" are bfloat16, rounded at random, and stored together.
ALL = [*STEPS, "half", "other"]
FEW = ["row", "half", "other"]
# Every kind on one device; on more those for which it matters where their rows are.
KINDS = {"one": ALL, "div": ["sum", *FEW]}
RULES = {
  "sum": ("sgd", {}),
  "summed": ("sgd", {"clipvalue": 0.25, "weight_decay_factor": 0.125}),
  "elements": ("adagrad", {}),
  "row": ("rowwise_adagrad", {"epsilon": 0.25}),
}
EXACT = ("sum", "half", "other")  # all of their numbers are


def fractions(seed, *shape):
  return (np.random.default_rng(seed).integers(-8, 9, shape) / 8).astype(np.float32)


ROWS = fractions(0, V, D)


def size_of(kind):
  return OTHERS if kind == "other" else V


def features(kinds):
  def table(kind):
    size, is_half = size_of(kind), kind in ("half", "other")
    initializer = lambda key, shape, dtype: ROWS[:size].astype(dtype)
    optimizer = embed.sgd(RATE) if is_half else STEPS[kind]
    dtype = "bfloat16" if is_half else "float32"
    return embed.TableConfig(size, D, initializer, optimizer, "sum", kind, dtype=dtype)

  of_tables = {kind: embed.FeatureConfig(table(kind)) for kind in kinds}
  return {"bag": of_tables, "weighted": of_tables, "ragged": of_tables}


def batch(step, kinds):
  """Inputs that all tables share, with repeated ids, padding and ids that are no row."""
  draw = np.random.default_rng(step)
  ids = lambda *shape: draw.integers(-1, 17 + 3 * step, shape).astype(np.int32)
  bag, splits = ids(16, 3), np.array([0, 4, 4, 9, 12, 20], np.int32)
  bag[0] = V, V - 1, V + 5
  inputs = {  # in the order in which features are looked up
    "bag": (bag, None),
    "ragged": (ids(24), fractions(step, 24)),  # four more than the bags hold
    "weighted": (ids(9, 2), fractions(step, 9, 2)),
  }
  kind_of = dict.fromkeys(inputs, embed.Padded)
  kind_of["ragged"] = lambda x: embed.Ragged(x, splits)
  of_each = lambda x: dict.fromkeys(kinds, x)
  given = {name: of_each(kind_of[name](ids)) for name, (ids, _) in inputs.items()}
  weights = {name: of_each(w if w is None else kind_of[name](w)) for name, (_, w) in inputs.items()}
  cotangents = {"bag": fractions(7 + step, 16, D), "weighted": fractions(8 + step, 9, D)}
  cotangents["ragged"] = fractions(9 + step, 5, D)
  of_reference = {
    "bag": reference.PaddedIds(bag),
    "ragged": reference.RaggedIds(inputs["ragged"][0], splits, inputs["ragged"][1]),
    "weighted": reference.PaddedIds(*inputs["weighted"]),
  }
  return (
    (given, weights, {name: of_each(x) for name, x in cotangents.items()}),
    of_reference,
    cotangents,
  )


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
  if kind in RULES:
    name, config = RULES[kind]
    return reference.apply_rows(name, before, ids, gradients, RATE, **config)
  of_rows = reference.row_gradients(ids, gradients)
  rows, g = np.array(sorted(of_rows)), np.array([of_rows[row] for row in sorted(of_rows)])
  after = {name: x.copy() for name, x in before.items()}
  if kind == "both":
    scale = np.abs(g).max(axis=1) + 1
    after["n"][rows] += scale
    after["m"][rows] += g / scale[:, None]
    after["k"][rows] += 1
    after["parameters"][rows] -= RATE * after["m"][rows]
  else:
    after["parameters"][rows] = rounded(before["parameters"][rows] - RATE * g, rows, kind, step)
  return after


def initial(kind):
  rows = ROWS[: size_of(kind)].astype(np.float64)
  slots = {
    "both": {"n": np.zeros(V), "m": np.zeros((V, D)), "k": np.zeros((V, D))},
  }
  if kind in RULES:
    return reference.initial_variables(RULES[kind][0], rows)
  return {"parameters": rows} | slots.get(kind, {})


class Step(NamedTuple):
  activations: dict[tuple[str, str], np.ndarray]
  norm: float
  rows: dict[str, list[int]]  # that were looked up
  variables: dict[str, dict[str, np.ndarray]]


def expected(kinds):
  """Three steps of all tables."""
  variables = {kind: initial(kind) for kind in kinds}
  for step in range(3):
    _, inputs, cotangents = batch(step, kinds)
    activations, touched, squares = {}, {}, 0.0
    for kind in kinds:
      found = []
      for name, given in inputs.items():
        occ = reference.occurrences(reference.Feature("sum"), given)
        kept = occ.ids < size_of(kind)
        occ = occ._replace(positions=occ.positions[kept], ids=occ.ids[kept], gains=occ.gains[kept])
        activations[name, kind] = reference.lookup(variables[kind]["parameters"], occ)
        found.append(reference.occurrence_gradients(occ, cotangents[name]))
      ids, gradients = (np.concatenate(x) for x in zip(*found, strict=True))
      rows = reference.row_gradients(ids, gradients)
      touched[kind] = list(rows)
      squares += np.sum(np.square(list(rows.values())))
      variables = variables | {kind: stepped(kind, step, variables[kind], ids, gradients)}
    yield Step(activations, np.sqrt(squares), touched, variables)


# --- ways and places ------------------------------------------------------------------------------

PLACES = {  # kind of the mesh and its shape; settings of all tables in the plan
  "one": None,
  "mod, rounds": ("auto", (8,), {"strategy": "mod", "exchange": "all_to_all", "capacity": 1}),
  "div": ("explicit", (8,), {"strategy": "div", "exchange": "all_to_all"}),
  "gather": ("auto", (8,), {"strategy": "mod", "exchange": "gather"}),
  "replicated": ("explicit", (8,), {"strategy": "replicated"}),
  "turned": ("auto", (4, 2), {"strategy": "div", "axis": ("b", "a")}),
  "three": ("explicit", (3,), {"strategy": "mod"}),
}
QUICK = [("rows", "one")]
CI = [
  ("lines", "one"),
  ("rows", "mod, rounds"),
  ("packed", "one"),
  ("rows", "div"),
  ("rows", "gather"),
  ("rows", "replicated"),
  ("rows", "turned"),
  ("lines", "three"),
]
WEEKLY = [("lines", "gather"), ("sparse_cores", "one"), ("sparse_cores", "mod, rounds")]
CASES = [
  *QUICK,
  *[pytest.param(*case, marks=pytest.mark.ci) for case in CI],
  *[pytest.param(*case, marks=pytest.mark.weekly) for case in WEEKLY],
]


def world(place, kinds):
  """A model in this place; its step returns activations and the norm of all gradients."""

  def gradients(model, *of_batch):
    (loss, activations), grads = harness.value_and_grad(model, *of_batch)
    norm = embed.global_norm(embed.Grads({}, grads.rows))
    return (loss, (activations, norm)), grads

  if PLACES[place] is None:
    return make_world(features(kinds), gradients=gradients)
  kind, shape, settings = PLACES[place]
  mesh = make_mesh(kind, shape, ("a", "b")[: len(shape)])
  plan = embed.plan(features(kinds), mesh, batch(0, kinds)[0][0])
  for name in plan:
    for key, value in settings.items():
      setattr(plan[name], key, value)
  return make_world(features(kinds), mesh=mesh, plan=plan, gradients=gradients)


@pytest.mark.programs(40, "the slots of ten tables are made in places of their own")
@pytest.mark.parametrize(("way", "place"), CASES, indirect=["way"])
def test_steps_by_each_way(way, place):
  """Activations, the norm of the gradients, rows and slots; other rows keep their bits."""
  kinds = KINDS.get(place, FEW)
  made = world(place, kinds)
  before = {kind: initial(kind) for kind in kinds}
  outcomes = made.run([batch(step, kinds)[0] for step in range(3)])
  for step, (found, wanted) in enumerate(zip(outcomes, expected(kinds), strict=True)):
    for (name, kind), act in wanted.activations.items():
      new = found.activations[0][name][kind].astype(np.float32)
      rtol = 2**-8 if kind in ("half", "other") else 1e-5
      np.testing.assert_allclose(new, act, rtol, 1e-5, err_msg=f"{name}, {kind}, {step}")
    np.testing.assert_allclose(found.activations[1], wanted.norm, rtol=1e-6)
    for kind in kinds:
      variables = jax.tree.map(lambda x: x.astype(np.float32), found.variables[kind])
      assert set(variables) == set(wanted.variables[kind])
      untouched = np.setdiff1d(np.arange(size_of(kind)), wanted.rows[kind])
      assert untouched.size
      close = {"rtol": 0, "atol": 0} if kind in EXACT else {"rtol": 1e-5, "atol": 2e-6}
      for key, value in wanted.variables[kind].items():
        message = f"{kind}, {key}, {step}"
        np.testing.assert_allclose(variables[key], value, **close, err_msg=message)
        old = before[kind][key].astype(np.float32)
        np.testing.assert_array_equal(variables[key][untouched], old[untouched], message)
    before = found.variables
