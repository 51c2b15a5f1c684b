"""Random features, ids, weights and gradients against `reference.py`.

Values are small binary fractions, so that sums are exact in float32 and what is compared is the
arithmetic of a rule and not the order of a sum. Shapes come from a short list: each costs a
compilation.
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
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import fractions
from optimizer_cases import LR_DECAY, OPTIMIZERS, SCHEDULE, TOLERANCE, optimizer_id

import embed

pytestmark = pytest.mark.usefixtures("strict")

VOCABULARY = 6
DIM = 2
EXACT = {"rtol": 1e-6, "atol": 1e-6}


def ids(shape):
  """Every row, and padding."""
  return meshes.ids(shape, VOCABULARY)


STRATEGIES = ("mod", "div", "replicated")
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


def inputs_of(leaf):
  if leaf.kind == "dense":
    return reference.DenseIds(leaf.values)
  return reference.as_kind(leaf.kind, leaf.values, leaf.weights)


def cotangent_for(shape):
  """Fixed, distinct, and exact in float32."""
  return ((np.arange(np.prod(shape)) * 5 % 17 - 8) / 8).reshape(shape).astype(np.float32)


combiners = st.sampled_from(["sum", "mean", "sqrtn"])


@pytest.mark.ci
@given(structures, st.tuples(tables, tables), combiners)
@settings(max_examples=8)  # each structure compiles
def test_any_structure(structure, values, combiner):
  check_structure(structure, values, combiner)


@pytest.mark.weekly
@given(structures, st.tuples(tables, tables), combiners, st.sampled_from(STRATEGIES), st.booleans())
@settings(max_examples=100)
def test_any_structure_on_any_mesh(structure, values, combiner, strategy, explicit):
  mesh = meshes.make_mesh("explicit" if explicit else "auto")
  check_structure(structure, values, combiner, mesh=mesh, sharding=strategy)


def check_structure(structure, values, combiner, **where):
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
  model = harness.Model(features, embed.sgd(learning_rate=0.1), **where)
  used = sorted({leaf.table for leaf in flatten(structure)})
  assert set(model.embed.tables) == {f"t{i}" for i in used}
  model.embed.load_tables({f"t{i}": values[i] for i in used})

  plan = lambda leaf: reference.occurrences(
    reference.Feature(combiner, leaf.max_sequence_length), inputs_of(leaf)
  )
  given_features = build(structure, lambda leaf: reference.as_given(inputs_of(leaf))[0])
  given_weights = build(structure, lambda leaf: reference.as_given(inputs_of(leaf))[1])
  cotangents = build(structure, lambda leaf: cotangent_for((*plan(leaf).shape, DIM)))
  (_, activations), grads = harness.value_and_grad(model, given_features, given_weights, cotangents)
  wanted = build(structure, lambda leaf: reference.lookup(values[leaf.table], plan(leaf)))
  assert jax.tree.structure(activations) == jax.tree.structure(wanted)
  jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, **EXACT), activations, wanted)
  for i in used:
    gradients = {}
    for leaf in flatten(structure):
      if leaf.table == i:
        pairs = zip(
          *reference.occurrence_gradients(plan(leaf), cotangent_for((*plan(leaf).shape, DIM))),
          strict=True,
        )
        for row, gradient in pairs:
          gradients[int(row)] = gradients.get(int(row), 0.0) + gradient
    actual = harness.rows(grads.rows[harness.key_of(grads.rows, f"t{i}")], VOCABULARY)
    harness.assert_rows(actual, gradients, **EXACT)


# ------------------------------------------------------ one world, compiled once per optimizer


class World(NamedTuple):
  """Two tables, four features of every kind: two share a table, one is a sequence."""

  model: harness.Model
  optimizer: embed.Optimizer
  initial: nnx.State
  step: Any
  gradients: Any


PLANS = {  # feature: (table, sequence length, batch, valency, weighted)
  "bag": ("shared", 0, 3, 2, True),
  "history": ("shared", 2, 2, 3, False),
  "id": ("own", 0, 4, 1, False),
  "other": ("own", 0, 2, 2, False),
}


def make_world(optimizer, combiner):
  configs = {
    name: embed.TableConfig(VOCABULARY, DIM, combiner=combiner, name=name)
    for name in ("shared", "own")
  }
  features = {
    name: embed.FeatureConfig(table=configs[table], max_sequence_length=sequence)
    for name, (table, sequence, *_) in PLANS.items()
  }
  model = harness.Model(features, optimizer)
  dense = embed.Optimizer(model, optax.sgd(0.0))
  return World(model, dense, state_of((model, dense)), nnx.jit(step_of), nnx.jit(gradients_of))


def state_of(modules):
  """Their arrays, in Variables that no step changes."""
  return jax.tree.map(lambda x: x, nnx.state(modules))


def step_of(model, optimizer, *arguments):
  harness.train_step(model, optimizer, *arguments)
  return model.embed.variables


def gradients_of(model, *arguments):
  """(activations, rows by table); read inside, so that no table compiles a program of its own."""
  (_, activations), grads = harness.value_and_grad(model, *arguments)
  rows = {key.split("/")[-1]: meshes.Rows(x.ids, x.values) for key, x in grads.rows.items()}
  return activations, rows


def reset(world, values):
  """As constructed, with these tables."""
  nnx.update((world.model, world.optimizer), world.initial)
  world.model.embed.load_tables(dict(zip(("shared", "own"), values, strict=True)))


def world_inputs(batch):
  """{feature: `reference` input}; the shapes are the same for every batch."""
  return {
    "bag": reference.PaddedIds(batch["bag"], batch["weights"]),
    "history": reference.as_kind("ragged", batch["history"], None),
    "id": reference.DenseIds(batch["id"]),
    "other": reference.as_kind("padded", batch["other"], None),
  }


def batches():
  shapes = {name: (b, l) for name, (_, _, b, l, _) in PLANS.items()}
  fields = {name: ids(shape) for name, shape in shapes.items()}
  fields["weights"] = fractions(shapes["bag"], -4, 8, 4)
  fields |= {f"{name}_cotangent": fractions(output_shape(name)) for name in PLANS}
  return st.fixed_dictionaries(fields)


def output_shape(name):
  _, sequence, batch, _, _ = PLANS[name]
  return (batch, sequence, DIM) if sequence else (batch, DIM)


def arguments(batch):
  """(features, weights, cotangents) as the model takes them."""
  pairs = {name: reference.as_given(inputs) for name, inputs in world_inputs(batch).items()}
  return (
    {name: f for name, (f, _) in pairs.items()},
    {name: w for name, (_, w) in pairs.items()},
    {name: batch[f"{name}_cotangent"] for name in PLANS},
  )


def plans(batch, combiner):
  return {
    name: reference.occurrences(reference.Feature(combiner, PLANS[name][1]), inputs)
    for name, inputs in world_inputs(batch).items()
  }


def occurrences_of(batch, table, combiner):
  """(ids [N], gradients [N, dim]) of one table in batch order."""
  found = [
    reference.occurrence_gradients(occ, batch[f"{name}_cotangent"])
    for name, occ in sorted(plans(batch, combiner).items())
    if PLANS[name][0] == table
  ]
  return np.concatenate([i for i, _ in found]), np.concatenate([g for _, g in found])


@functools.cache
def optimizer_world(index):
  name, config = OPTIMIZERS[index]
  optimizer = getattr(embed, name)(learning_rate=lambda step: jnp.asarray(SCHEDULE)[step], **config)
  return make_world(optimizer, "sum")


QUICK = [("sgd", {}), ("sgd", {"clipvalue": 0.5} | LR_DECAY), ("adagrad", {})]


@pytest.mark.parametrize(
  "index",
  [
    pytest.param(i, marks=() if case in QUICK else pytest.mark.weekly)
    for i, case in enumerate(OPTIMIZERS)
  ],
  ids=optimizer_id,
)
def test_three_steps(index):
  """Parameters and slots after each step; rows that were not looked up keep every bit."""
  name, config = OPTIMIZERS[index]
  world = optimizer_world(index)

  @given(st.lists(batches(), min_size=3, max_size=3), st.tuples(tables, tables))
  @settings(max_examples=8)
  def check(three, values):
    reset(world, values)
    wanted = {
      table: reference.initial_variables(name, value, **config)
      for table, value in zip(("shared", "own"), values, strict=True)
    }
    after = wanted
    for step, batch in enumerate(three):
      before, after = after, world.step(world.model, world.optimizer, *arguments(batch))
      after = jax.tree.map(np.asarray, after)
      for table in wanted:
        rows, gradients = occurrences_of(batch, table, "sum")
        wanted[table] = reference.apply_rows(
          name, wanted[table], rows, gradients, float(SCHEDULE[step]), **config
        )
        actual = after[table]
        assert set(actual) == set(wanted[table])
        for key, value in wanted[table].items():
          np.testing.assert_allclose(
            actual[key],
            value,
            **TOLERANCE.get(name, {"rtol": 1e-5, "atol": 2e-6}),
            err_msg=f"{table} {key}, step {step}",
          )
        untouched = np.setdiff1d(np.arange(VOCABULARY), rows)
        for key, value in actual.items():
          kept = np.float32(before[table][key])
          np.testing.assert_array_equal(value[untouched], kept[untouched])

  check()


@functools.cache
def combiner_world(combiner):
  return make_world(embed.adagrad(learning_rate=0.125), combiner)


@pytest.mark.parametrize(
  "combiner", ["mean", *(pytest.param(x, marks=pytest.mark.ci) for x in ("sum", "sqrtn"))]
)
@given(batches(), st.tuples(tables, tables))
def test_jit_equals_reference(combiner, batch, values):
  world = combiner_world(combiner)
  reset(world, values)
  activations, rows = world.gradients(world.model, *arguments(batch))
  parameters = dict(zip(("shared", "own"), values, strict=True))
  for name, occ in plans(batch, combiner).items():
    wanted = reference.lookup(parameters[PLANS[name][0]], occ)
    np.testing.assert_allclose(activations[name], wanted, **EXACT)
  for table in parameters:
    wanted = reference.row_gradients(*occurrences_of(batch, table, combiner))
    harness.assert_rows(harness.rows(rows[table], VOCABULARY), wanted, **EXACT)


# ------------------------------------------------------------- what must not matter


@given(ids((3, 3)), fractions((3, 3), -4, 8, 4), st.booleans())
def test_to_padded(values, weights, weighted):
  """The host's conversion keeps the lookup, with a valency that cuts and one that fills up."""
  weights = weights if weighted else None
  for kind in ("ragged", "sparse"):
    inputs = reference.as_kind(kind, values, weights)
    features, given_weights = reference.as_given(inputs)
    padded = embed.to_padded(features)
    assert isinstance(padded, embed.Padded)
    lead, wanted = reference.entries(inputs)
    _, actual = reference.entries(reference.PaddedIds(np.asarray(padded.values)))
    assert np.asarray(padded.values).shape[0] == lead[0]
    assert [(b, i) for b, _, i, _ in actual] == [(b, i) for b, _, i, _ in wanted]
    if weighted:
      weights_padded = np.asarray(embed.to_padded(given_weights).values)
      found = [float(weights_padded[b, c]) for b, c, _, _ in actual]
      assert found == [w for _, _, _, w in wanted]


# ---------------------------------------------------------------- gradients as values


SPLIT_SHAPES = {"bag": (4, 2), "id": (4,)}


@functools.cache
def split_world():
  """A bag and dense ids over one table, a batch that splits in two."""
  table = embed.TableConfig(VOCABULARY, DIM, combiner="mean", name="t")
  features = {name: embed.FeatureConfig(table=table) for name in SPLIT_SHAPES}
  model = harness.Model(features, embed.adagrad(learning_rate=0.125))
  optimizer = embed.Optimizer(model, optax.sgd(0.0))
  return model, optimizer, state_of((model, optimizer))


def read(grads):
  """(rows, dense gradient, norm) as arrays."""
  (dense,) = jax.tree.leaves(grads.dense)
  rows = grads.rows["embed/t"]
  return meshes.Rows(rows.ids, rows.values), dense, embed.global_norm(grads)


@nnx.jit
def step_in_parts(model, optimizer, parts):
  grads = [harness.value_and_grad(model, *part)[1] for part in parts]
  total = grads[0] if len(grads) == 1 else embed.accumulate(grads)
  found = read(total)
  optimizer.update(model, total)
  return found, model.embed.variables["t"]


@nnx.jit
def norms_and_scales(model, arguments, max_norm):
  grads = harness.value_and_grad(model, *arguments)[1]
  scaled = grads.map(lambda g: g * np.float32(0.25))
  return [read(x) for x in (grads, embed.clip_by_global_norm(grads, max_norm), scaled)]


def split_arguments(values, cotangents, part):
  features = {"bag": embed.Padded(values["bag"][part]), "id": values["id"][part]}
  return features, None, {name: c[part] for name, c in cotangents.items()}


split_batches = st.tuples(
  st.fixed_dictionaries({name: ids(shape) for name, shape in SPLIT_SHAPES.items()}),
  st.fixed_dictionaries({name: fractions((4, DIM)) for name in SPLIT_SHAPES}),
)


@pytest.mark.ci
@given(split_batches, tables)
def test_microbatches_add_up_to_the_batch(batch, values):
  """Row gradients of two halves, accumulated, are those of the whole, and so is the update."""
  model, optimizer, initial = split_world()
  after = []
  for parts in ([slice(0, 4)], [slice(0, 2), slice(2, 4)]):
    nnx.update((model, optimizer), initial)
    model.embed.load_tables({"t": values})
    arguments = [split_arguments(*batch, part) for part in parts]
    after.append(step_in_parts(model, optimizer, arguments))
  ((rows, *numbers), variables), ((halves, *half_numbers), half_variables) = after
  harness.assert_rows(harness.rows(halves, VOCABULARY), harness.rows(rows, VOCABULARY), **EXACT)
  np.testing.assert_allclose(half_numbers, numbers, rtol=1e-5, atol=1e-5)
  for key, value in variables.items():
    np.testing.assert_allclose(half_variables[key], value, rtol=1e-5, atol=2e-6)


@given(split_batches, tables, st.sampled_from([0.125, 0.5, 100.0]))
def test_norms_and_scales(batch, values, max_norm):
  """global_norm and clipping see dense and row gradients together; map scales values, not ids."""
  model, optimizer, initial = split_world()
  nnx.update((model, optimizer), initial)
  model.embed.load_tables({"t": values})
  arguments = split_arguments(*batch, slice(0, 4))
  found = norms_and_scales(model, arguments, np.float32(max_norm))
  (rows, dense, norm), clipped, scaled = found
  rows = harness.rows(rows, VOCABULARY)
  wanted = np.sqrt(float(dense) ** 2 + sum(np.sum(np.float64(g) ** 2) for g in rows.values()))
  np.testing.assert_allclose(norm, wanted, rtol=1e-5, atol=1e-6)
  scale = min(1.0, max_norm / wanted) if wanted else 1.0
  for (changed, its_dense, its_norm), factor in ((clipped, scale), (scaled, 0.25)):
    of_rows = {row: g * factor for row, g in rows.items()}
    harness.assert_rows(harness.rows(changed, VOCABULARY), of_rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(its_dense, dense * factor, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(its_norm, wanted * factor, rtol=1e-5, atol=1e-6)


@functools.cache
def kinds_world(combiner, sequence):
  """The same content thrice: one feature per kind, each with a table of its own."""
  kinds = ("padded", "ragged", "sparse")
  features = {
    kind: embed.FeatureConfig(
      table=embed.TableConfig(VOCABULARY, DIM, combiner=combiner, name=kind),
      max_sequence_length=sequence,
    )
    for kind in kinds
  }
  return harness.Model(features, embed.sgd(learning_rate=0.1)), nnx.jit(gradients_of)


@pytest.mark.ci
@given(
  st.sampled_from([("mean", 0), ("sum", 2)]),
  st.booleans(),
  ids((3, 3)),
  fractions((3, 3), -4, 8, 4),
  tables,
)
def test_kinds_agree(rule, weighted, values, weights, table):
  """Padded, Ragged and Sparse of the same content are the same lookup."""
  combiner, sequence = rule
  weighted = weighted and not sequence
  model, gradients = kinds_world(combiner, sequence)
  kinds = ("padded", "ragged", "sparse")
  model.embed.load_tables(dict.fromkeys(kinds, table))
  pairs = {
    kind: reference.as_given(reference.as_kind(kind, values, weights if weighted else None))
    for kind in kinds
  }
  cotangent = cotangent_for((3, sequence, DIM) if sequence else (3, DIM))
  activations, found = gradients(
    model,
    {kind: f for kind, (f, _) in pairs.items()},
    {kind: w for kind, (_, w) in pairs.items()},
    dict.fromkeys(kinds, cotangent),
  )
  rows = {kind: harness.rows(found[kind], VOCABULARY) for kind in kinds}
  for kind in ("ragged", "sparse"):
    np.testing.assert_allclose(activations[kind], activations["padded"], **EXACT)
    harness.assert_rows(rows[kind], rows["padded"], **EXACT)
