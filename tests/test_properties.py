"""Random features, ids, weights and gradients against `reference.py`.

Values are small binary fractions, so that sums are exact in float32 and what is compared is the
arithmetic of a rule and not the order of a sum. Shapes come from a short list: each costs a
compilation.
"""

from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import fractions
from optimizer_cases import OPTIMIZERS, SCHEDULE, TOLERANCE, optimizer_id

import embed

pytestmark = pytest.mark.usefixtures("strict")

VOCABULARY = 6
DIM = 2
EXACT = {"rtol": 1e-6, "atol": 1e-6}


def ids(shape):
  """Every row, and padding."""
  return meshes.ids(shape, VOCABULARY)


tables = fractions((VOCABULARY, DIM), -16, 16)


# --------------------------------------------------------- any structure, eagerly


class Pair(NamedTuple):
  left: Any
  right: Any


class Leaf(NamedTuple):
  """One feature: how it is configured and what it is given."""

  table: int
  kind: str
  max_sequence_length: int
  values: np.ndarray
  weights: np.ndarray | None


@st.composite
def leaves(draw):
  kind = draw(st.sampled_from(["dense", "padded", "ragged", "sparse"]))
  batch, length = draw(st.sampled_from([(1, 1), (3, 2)]))
  if kind == "dense":
    return Leaf(draw(st.integers(0, 1)), kind, 0, draw(ids((batch, length))), None)
  sequence = draw(st.sampled_from([0, 0, 2]))
  weighted = not sequence and draw(st.booleans())
  weights = draw(fractions((batch, length), -4, 8, 4)) if weighted else None
  return Leaf(draw(st.integers(0, 1)), kind, sequence, draw(ids((batch, length))), weights)


structures = st.recursive(
  leaves().map(lambda leaf: ("leaf", leaf)),
  lambda child: st.one_of(
    st.tuples(st.just("list"), st.lists(child, min_size=1, max_size=2)),
    st.tuples(st.just("tuple"), st.lists(child, min_size=1, max_size=2)),
    st.tuples(st.just("pair"), st.tuples(child, child)),
    st.tuples(st.just("dict"), st.dictionaries(st.sampled_from("zam"), child, min_size=1)),
  ),
  max_leaves=3,
)


def build(structure, f):
  """The nested containers, with f(leaf) at the leaves."""
  kind, content = structure
  if kind == "leaf":
    return f(content)
  if kind == "dict":
    return {key: build(child, f) for key, child in content.items()}
  children = [build(child, f) for child in content]
  return {"list": list, "tuple": tuple, "pair": lambda c: Pair(*c)}[kind](children)


def flatten(structure):
  """Leaves in the order of the features: dict keys sorted."""
  kind, content = structure
  if kind == "leaf":
    return [content]
  children = [content[key] for key in sorted(content)] if kind == "dict" else content
  return [leaf for child in children for leaf in flatten(child)]


def inputs_of_kind(kind, values, weights):
  """Ids and weights as a layer takes them; dense ids of bags of one id are `[batch]`."""
  return (values, None) if kind == "dense" else reference.as_kind(kind, values, weights)


def inputs_of(leaf):
  return inputs_of_kind(leaf.kind, leaf.values, leaf.weights)


def cotangent_for(shape):
  """Fixed, distinct, and exact in float32."""
  return ((np.arange(np.prod(shape)) * 5 % 17 - 8) / 8).reshape(shape).astype(np.float32)


@pytest.mark.ci
@given(structures, st.tuples(tables, tables), st.sampled_from(["sum", "mean", "sqrtn"]))
@settings(max_examples=8)  # each structure compiles
def test_any_structure(structure, values, combiner):
  """Activations in the structure given, one summed gradient per touched row of every table."""
  configs = [
    embed.TableConfig(VOCABULARY, DIM, combiner=combiner, name=name) for name in ("t0", "t1")
  ]
  features = build(
    structure,
    lambda leaf: embed.FeatureConfig(
      table=configs[leaf.table], max_sequence_length=leaf.max_sequence_length
    ),
  )
  model = harness.Model(features, embed.sgd(learning_rate=0.1))
  used = sorted({leaf.table for leaf in flatten(structure)})
  assert set(model.embed.tables) == {f"t{i}" for i in used}
  model.embed.load_tables({f"t{i}": values[i] for i in used})

  plan = lambda leaf: reference.occurrences(*inputs_of(leaf), combiner, leaf.max_sequence_length)
  given_features = build(structure, lambda leaf: inputs_of(leaf)[0])
  given_weights = build(structure, lambda leaf: inputs_of(leaf)[1])
  cotangents = build(structure, lambda leaf: cotangent_for((*plan(leaf).shape, DIM)))
  (_, activations), grads = harness.value_and_grad(model, given_features, given_weights, cotangents)
  wanted = build(structure, lambda leaf: reference.lookup(values[leaf.table], plan(leaf)))
  assert jax.tree.structure(activations) == jax.tree.structure(wanted)
  jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, **EXACT), activations, wanted)
  for i in used:
    pairs = [
      reference.occurrence_gradients(plan(leaf), cotangent_for((*plan(leaf).shape, DIM)))
      for leaf in flatten(structure)
      if leaf.table == i
    ]
    gradients = reference.row_gradients(*map(np.concatenate, zip(*pairs, strict=True)))
    actual = harness.rows(grads.rows[f"embed/t{i}"], VOCABULARY)
    harness.assert_rows(actual, gradients, **EXACT)


# ------------------------------------------------------------------ three steps, compiled once


class Plan(NamedTuple):
  """A feature: its table, kind, sequence length, batch, longest bag and whether it has weights."""

  table: str
  kind: str
  sequence: int
  batch: int
  length: int
  weighted: bool = False


PLANS = {
  "bag": Plan("shared", "padded", 0, 3, 2, True),
  "history": Plan("shared", "ragged", 2, 2, 3),
  "id": Plan("own", "dense", 0, 4, 1),
  "other": Plan("own", "padded", 0, 2, 2),
}
SIZES = dict.fromkeys(("shared", "own"), VOCABULARY)


def batches():
  """{feature: (ids, weights, gradients of activations)}."""
  found = {}
  for name, plan in PLANS.items():
    shape = (plan.batch, plan.length)
    weights = fractions(shape, -4, 8, 4) if plan.weighted else st.none()
    inputs = st.builds(inputs_of_kind, st.just(plan.kind), ids(shape), weights)
    cotangents = fractions((plan.batch, *([plan.sequence] if plan.sequence else []), DIM))
    found[name] = st.builds(lambda pair, cotangent: (*pair, cotangent), inputs, cotangents)
  return st.fixed_dictionaries(found)


def arguments(batch):
  """As a model takes them."""
  return [{name: of[i] for name, of in batch.items()} for i in range(3)]


def make_world(optimizer, combiner):
  configs = {
    name: embed.TableConfig(VOCABULARY, DIM, meshes.sixteenths, combiner=combiner, name=name)
    for name in SIZES
  }
  features = {
    name: embed.FeatureConfig(configs[plan.table], max_sequence_length=plan.sequence)
    for name, plan in PLANS.items()
  }
  return meshes.make_world(features, optimizer, rows=True)


QUICK = {0: "sum", 1: "mean", 3: "sqrtn"}  # of OPTIMIZERS, with their combiners


@pytest.mark.parametrize(
  "index",
  [pytest.param(i, marks=() if i in QUICK else pytest.mark.weekly) for i in range(len(OPTIMIZERS))],
  ids=optimizer_id,
)
def test_three_steps(index):
  """Activations, row gradients, parameters and slots; rows not looked up keep every bit."""
  optimizer, config = OPTIMIZERS[index]
  combiner = QUICK.get(index, "sum")
  rate = lambda step: jnp.asarray(SCHEDULE)[step]
  world = make_world(getattr(embed, optimizer)(learning_rate=rate, **config), combiner)
  initial = jax.tree.map(np.asarray, dict(world.model.embed.variables))
  tolerance = TOLERANCE.get(optimizer, {"rtol": 1e-5, "atol": 2e-6})

  @given(st.lists(batches(), min_size=3, max_size=3))
  def check(three):
    before = initial
    wanted = {
      table: reference.initial_variables(optimizer, initial[table]["parameters"], **config)
      for table in SIZES
    }
    outcomes = world.run(map(arguments, three))
    for step, (batch, found) in enumerate(zip(three, outcomes, strict=True)):
      gradients = {table: [] for table in SIZES}
      for name, (of_ids, weights, cotangents) in batch.items():
        table = PLANS[name].table
        occ = reference.occurrences(of_ids, weights, combiner, PLANS[name].sequence)
        activations = reference.lookup(before[table]["parameters"], occ)
        np.testing.assert_allclose(found.activations[name], activations, **EXACT)
        gradients[table].append(reference.occurrence_gradients(occ, cotangents))
      for table, size in SIZES.items():
        rows, g = map(np.concatenate, zip(*gradients[table], strict=True))
        of_rows = harness.rows(found.rows[table], size)
        harness.assert_rows(of_rows, reference.row_gradients(rows, g), **EXACT)
        rate = float(SCHEDULE[step])
        wanted[table] = reference.apply_rows(optimizer, wanted[table], rows, g, rate, **config)
        untouched = np.setdiff1d(np.arange(size), rows)
        actual = found.variables[table]
        assert set(actual) == set(wanted[table])
        for key, value in wanted[table].items():
          message = f"{table} {key}, step {step}"
          np.testing.assert_allclose(actual[key], value, **tolerance, err_msg=message)
          np.testing.assert_array_equal(actual[key][untouched], before[table][key][untouched])
      before = found.variables

  check()


# ------------------------------------------------------------- what must not matter


@given(ids((3, 3)), fractions((3, 3), -4, 8, 4), st.booleans())
def test_to_padded(values, weights, weighted):
  """The host's conversion keeps the lookup, with a valency that cuts and one that fills up."""
  weights = weights if weighted else None
  inputs, given_weights = reference.as_kind("ragged", values, weights)
  padded = embed.to_padded(inputs)
  assert isinstance(padded, embed.Padded)
  weights_padded = embed.to_padded(given_weights) if weighted else None
  lead, wanted = reference.entries(inputs, given_weights)
  same, actual = reference.entries(padded, weights_padded)
  assert same == lead
  assert [(b, i, w) for b, _, i, w in actual] == [(b, i, w) for b, _, i, w in wanted]
