"""The recorded cases of TPUEmbedding in data/, through the public interface.

The same cases hold `reference.py` to the truth, so that what the properties compare with is right.
"""

import functools
import inspect
import itertools
from collections import OrderedDict

import conformance
import harness
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from conformance import LOOKUPS, lookup_config, lookup_group, lookup_inputs
from flax import nnx
from suites import slow_unless

import embed
from embed.tools import reference

pytestmark = [
  pytest.mark.usefixtures("strict"),
  # Two cases set an option that has no effect; saying so is allowed.
  pytest.mark.filterwarnings("ignore:.*max_sequence_length"),
]

VALID = [name for name, case in LOOKUPS.items() if not conformance.raises(case)]
INVALID = [name for name, case in LOOKUPS.items() if conformance.raises(case)]
OPTIMIZERS = {case["id"]: case for case in conformance.load("optimizers")["cases"]}
BASE = conformance.load("tf_base_case")


# ----------------------------------------------------------------------------- lookups


def cotangents(case, prefix=""):
  """The recorded ones, or ones where only the forward pass was recorded."""
  if "grad" in case:
    return {prefix + name: value for name, value in case["grad"]["cotangent"].items()}
  return {
    prefix + name: np.ones(conformance.expected(case, name).shape, np.float32)
    for name in case["features"]
  }


def expected_rows(case):
  """{table: {row: gradient}}, recorded, or from `reference` where only the forward pass was."""
  if "grad" in case:
    return {
      table: {row: case["grad"]["table_grad"][table][row] for row in touched}
      for table, touched in case["grad"]["touched"].items()
    }
  return reference_rows(case)


def reference_rows(case):
  gradients = {table: ([], []) for table in case["tables"]}
  for name, cotangent in cotangents(case).items():
    occ = reference.occurrences(
      conformance.feature(case, name), conformance.inputs(case["inputs"][name])
    )
    for total, new in zip(
      gradients[case["features"][name]["table"]],
      reference.occurrence_gradients(occ, cotangent),
      strict=True,
    ):
      total.extend(new)
  return {table: reference.row_gradients(*pair) for table, pair in gradients.items()}


def check_lookup(case, activations, rows, prefix=""):
  for name in case["features"]:
    wanted = conformance.expected(case, name)
    assert activations[prefix + name].shape == wanted.shape
    np.testing.assert_allclose(activations[prefix + name], wanted, **case["tol"])
  for table, wanted in expected_rows(case).items():
    actual = harness.rows(
      rows[harness.key_of(rows, prefix + table)], case["tables"][table]["vocabulary_size"]
    )
    harness.assert_rows(actual, wanted, **case["tol"])


@pytest.mark.parametrize("name", LOOKUPS)
def test_reference_lookup(name):
  case = LOOKUPS[name]
  for feature, config in case["features"].items():
    wanted = conformance.expected(case, feature)
    arguments = (
      conformance.feature(case, feature),
      conformance.inputs(case["inputs"][feature]),
    )
    if isinstance(wanted, dict):
      with pytest.raises(ValueError, match="weights given"):
        reference.occurrences(*arguments)
      continue
    activations = reference.lookup(
      case["tables"][config["table"]]["params"], reference.occurrences(*arguments)
    )
    np.testing.assert_allclose(activations, wanted, **case["tol"])
  if "grad" in case:
    actual = reference_rows(case)
    for table, wanted in expected_rows(case).items():
      harness.assert_rows(actual[table], wanted, **case["tol"])


def prefix_of(name):
  """Before the names of a case's features and tables, where it shares a layer."""
  return name.replace("/", "_") + "_"  # a slash would end the module's path


def merged_lookups(names):
  """Cases as features of one layer: what is compiled is compiled for all."""
  merged = {"features": {}, "tables": {}, "inputs": {}, "weights": {}, "cotangents": {}}
  for name in names:
    features, tables = lookup_config(LOOKUPS[name], prefix_of(name))
    inputs, weights = lookup_inputs(LOOKUPS[name], prefix_of(name))
    merged["features"] |= features
    merged["tables"] |= tables
    merged["inputs"] |= inputs
    merged["weights"] |= weights
    merged["cotangents"] |= cotangents(LOOKUPS[name], prefix_of(name))
  model = harness.Model(merged["features"], embed.sgd(learning_rate=0.1))
  model.embed.load_tables(merged["tables"])
  return model, (merged["inputs"], merged["weights"], merged["cotangents"])


def looked_up(names, compiled):
  """(activations, row gradients) of cases; asserts that every way to look up gives the same."""
  model, arguments = merged_lookups(names)

  def differentiate(model, *arguments):
    outputs, grads = harness.value_and_grad(model, *arguments)
    # Sliced out of the stack here, in one program; outside, each table compiles one of its own.
    rows = {key: meshes.Rows(rows.ids, rows.values) for key, rows in grads.rows.items()}
    return outputs, grads.dense, rows

  differentiate = nnx.jit(differentiate) if compiled else differentiate
  (loss, activations), dense, rows = differentiate(model, *arguments)
  assert harness.dropped(model) == 0
  tables = {prefix_of(name) + table for name in names for table in LOOKUPS[name]["tables"]}
  assert {key.removeprefix("embed/") for key in rows} == tables
  (scale,) = jax.tree.leaves(dense)
  np.testing.assert_allclose(scale, loss, rtol=1e-6)
  if not compiled:
    alone, (middle, _) = model.embed(*arguments[:2]), model.embed.lookup(*arguments[:2])
    for feature, act in activations.items():
      np.testing.assert_array_equal(alone[feature], act)
      np.testing.assert_array_equal(middle[feature], act)
  return activations, rows


# In the quick suite lookups are compiled, and groups that take a program of their own are left out.
# Eagerly a group takes half a minute; `test_lookup_alone` does so in the full suite.
APART = ("negid/", "novalidate/", "grid/mean/", "grid/sqrtn/", "ragged_output_shape/")
BOTH = slow_unless(
  [(name, compiled) for name in VALID for compiled in (False, True)],
  lambda name, compiled: compiled,
  lambda name, compiled: compiled and not name.startswith(APART),
)


@functools.cache
def looked_up_together(group, compiled):
  return looked_up([name for name in VALID if lookup_group(name) == group], compiled)


@pytest.mark.parametrize(("name", "compiled"), BOTH, ids=str)
def test_lookup(name, compiled):
  check_lookup(LOOKUPS[name], *looked_up_together(lookup_group(name), compiled), prefix_of(name))


@pytest.mark.ci
@pytest.mark.parametrize("name", ["grid/mean/sparse/empty/w=neg", "shared/mixed_kinds"])
def test_lookup_alone(name):
  """As a layer of its own, where no other feature of the array has ids."""
  check_lookup(LOOKUPS[name], *looked_up([name], compiled=False), prefix_of(name))


@pytest.mark.parametrize("name", INVALID)
def test_lookup_raises(name):
  case = LOOKUPS[name]
  features, _ = lookup_config(case)
  model = harness.Model(features, embed.sgd(learning_rate=0.1))
  inputs, weights = lookup_inputs(case)
  (feature,) = features
  call = lambda model, inputs, weights: model.embed(inputs, weights)
  for attempt in (call, nnx.jit(call)):
    with pytest.raises(ValueError, match=feature):
      attempt(model, inputs, weights)
  with pytest.raises(ValueError, match=feature):
    embed.validate(features, inputs, weights)


# -------------------------------------------------------------------------- optimizers


def make_optimizer(case, learning_rate):
  config = dict(case["config"])
  if isinstance(config.get("clipvalue"), list):
    config["clipvalue"] = tuple(config["clipvalue"])
  return getattr(embed, conformance.OPTIMIZERS[case["optimizer"]])(
    learning_rate=learning_rate, **config
  )


def schedule(case):
  rates = np.array(case["lr"], np.float32)
  return lambda step: jnp.asarray(rates)[step]


def optimizer_table(case, name, learning_rate):
  vocabulary_size, dim = case["table"].shape
  return embed.TableConfig(
    vocabulary_size, dim, optimizer=make_optimizer(case, learning_rate), combiner="sum", name=name
  )


def steps(case):
  return range(len(case["ids"]))


def split(case, step, array):
  """One part per replica: two features of one table."""
  if "replica_split" not in case:
    return [array]
  return np.split(array, [case["replica_split"][step]])


def is_none(case, step):
  return case["id"].startswith("none_gradient") and step in (1, 3)


def check_optimizer(case, step, actual):
  wanted = case["after"][step]
  assert set(actual) == set(wanted)
  for key, value in wanted.items():
    what = f"{case['id']}: {key}, step {step}"
    np.testing.assert_allclose(actual[key], value, **case["tol"], err_msg=what)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reference_optimizer(name):
  case = OPTIMIZERS[name]
  optimizer = conformance.OPTIMIZERS[case["optimizer"]]
  variables = reference.initial_variables(optimizer, case["table"], **case["config"])
  assert list(variables) == ["parameters", *case["initial_slots"]]
  for step in steps(case):
    ids, grads, lr = case["ids"][step], case["grads"][step], case["lr"][step]
    variables = reference.apply_rows(optimizer, variables, ids, grads, lr, **case["config"])
    check_optimizer(case, step, variables)


# Each eager case compiles an update per batch size, so only what the compiled tests leave out:
# None itself, steps without a single id, two features that share rows, updates per occurrence.
EAGER = [
  name
  for name in OPTIMIZERS
  if name.split("/")[0] in ("none_gradient", "padding", "replicas", "ext")
  or name in ("adagrad/no_accumulation", "adam/non_lazy")
]


EAGER_FULL = (
  "none_gradient/adam",
  "padding/ftrl",
  "replicas/adagrad_sum",
  "adagrad/no_accumulation",
)


@pytest.mark.ci
@pytest.mark.parametrize("name", slow_unless(EAGER, EAGER_FULL.__contains__))
def test_optimizer_mid_level(name):
  """Eager, exact shapes, a None gradient as None, the rate from a schedule of the step."""
  case = OPTIMIZERS[name]
  table = optimizer_table(case, "t", schedule(case))
  parts = len(split(case, 0, case["grads"][0]))
  layer = embed.SparseEmbed([embed.FeatureConfig(table=table)] * parts, rngs=nnx.Rngs(0))
  layer.load_tables({"t": case["table"]})
  for slot, value in case["initial_slots"].items():
    np.testing.assert_allclose(layer.variables["t"][slot], value, rtol=1e-7)
  for step in steps(case):
    ids = split(case, step, np.array(case["ids"][step], np.int32))
    activations, residual = layer.lookup(ids)
    grads = [jnp.asarray(g) for g in split(case, step, case["grads"][step])]
    assert [a.shape for a in activations] == [g.shape for g in grads]
    if is_none(case, step):
      grads = [None] * parts
    layer.apply_gradients(grads, residual, step=step)
    check_optimizer(case, step, {k: np.asarray(v) for k, v in layer.variables["t"].items()})


def jitted_optimizers(path):
  """Every case is a table of one layer, all trained by one compiled step.

  Ids are padded to one length with -1 and garbage gradients, so that five steps share a program.
  Returns {case: [variables after each step]}.
  """
  features, tables = {}, {}
  for index, (name, case) in enumerate(OPTIMIZERS.items()):
    constant = case["lr"][0] if len(set(case["lr"])) == 1 else schedule(case)
    table = optimizer_table(case, f"table{index:03d}", constant)
    tables[table.name] = case["table"]
    for part in range(len(split(case, 0, case["grads"][0]))):
      features[f"{name}:{part}"] = embed.FeatureConfig(table=table)
  model = harness.Model(features)
  model.embed.load_tables(tables)
  optimizer = embed.Optimizer(model, optax.sgd(0.0))

  @nnx.jit
  def mid_level(model, ids, grads, step):
    _, residual = model.embed.lookup(ids)
    model.embed.apply_gradients(grads, residual, step=step)

  train_step = nnx.jit(harness.train_step)
  history = {name: [] for name in OPTIMIZERS}
  for step in range(5):
    ids, grads = {}, {}
    for name, case in OPTIMIZERS.items():
      for part, (i, g) in enumerate(
        zip(
          split(case, step, np.array(case["ids"][step], np.int32)),
          split(case, step, case["grads"][step]),
          strict=True,
        )
      ):
        ids[f"{name}:{part}"] = np.full(5, -1, np.int32)
        grads[f"{name}:{part}"] = np.full((5, g.shape[1]), 7.0, np.float32)
        ids[f"{name}:{part}"][: len(i)] = i
        grads[f"{name}:{part}"][: len(g)] = g
    if path == "mid_level":
      mid_level(model, ids, grads, jnp.asarray(step))
    else:
      train_step(model, optimizer, ids, None, grads)
    for index, name in enumerate(OPTIMIZERS):
      history[name].append(harness.variables(model, f"table{index:03d}"))
  np.testing.assert_array_equal(model.scale[...], 1.0)
  return history


@pytest.mark.ci
@pytest.mark.parametrize(
  "path", ["value_and_grad", pytest.param("mid_level", marks=pytest.mark.weekly)]
)
def test_optimizer_jit(path):
  for name, history in jitted_optimizers(path).items():
    for step, variables in enumerate(history):
      check_optimizer(OPTIMIZERS[name], step, variables)


@pytest.mark.ci
def test_unused_activation_touches_its_rows():
  """A lookup that the loss ignores is a zero gradient for its rows, not a skipped update."""
  case = OPTIMIZERS["none_gradient/adam"]
  features = {"f": embed.FeatureConfig(table=optimizer_table(case, "t", schedule(case)))}
  model = harness.Model(features)
  model.embed.load_tables({"t": case["table"]})
  optimizer = embed.Optimizer(model, optax.sgd(0.0))

  def ignoring(model, ids):
    model.embed({"f": ids})
    return jnp.zeros(()) * model.scale[...]

  @nnx.jit
  def ignored_step(model, optimizer, ids):
    _, grads = embed.value_and_grad(ignoring)(model, ids)
    optimizer.update(model, grads)

  train_step = nnx.jit(harness.train_step)
  for step in steps(case):
    ids = np.array(case["ids"][step], np.int32)
    if is_none(case, step):
      ignored_step(model, optimizer, ids)
    else:
      train_step(model, optimizer, {"f": ids}, None, {"f": case["grads"][step]})
    check_optimizer(case, step, harness.variables(model, "t"))


# ---------------------------------------------------------------- TensorFlow's own test


def ragged(rows):
  flat = np.array([i for row in rows for i in row], np.int32)
  return embed.Ragged(flat, np.cumsum([0] + [len(row) for row in rows], dtype=np.int32))


def base_model(optimizer, max_sequence_lengths=(0, 0, 0)):
  """watched and favorited share the video table; friends has the user table."""
  tables = {
    name: embed.TableConfig(*table["params"].shape, combiner=table["combiner"], name=name)
    for name, table in BASE["tables"].items()
  }
  features = {
    name: embed.FeatureConfig(table=tables[feature["table"]], max_sequence_length=length)
    for (name, feature), length in zip(BASE["features"].items(), max_sequence_lengths, strict=True)
  }
  model = harness.Model(features, optimizer)
  model.embed.load_tables({name: table["params"] for name, table in BASE["tables"].items()})
  return model


def base_batch(replicas):
  """`replicas` copies of the two examples one replica sees."""
  return {
    name: ragged(feature["rows"][:2] * replicas) for name, feature in BASE["features"].items()
  }


@pytest.mark.ci
@pytest.mark.parametrize(
  ("name", "compiled"),
  slow_unless(
    [(name, True) for name in BASE["optimizers"]] + [("Adam", False)],
    lambda *case: case == ("Adam", True),
  ),
)
def test_base_case(name, compiled):
  recorded = BASE["optimizers"][name]
  optimizer = getattr(embed, conformance.OPTIMIZERS[name])(
    learning_rate=recorded["learning_rate"], **recorded["config"]
  )
  model = base_model(optimizer)
  batch = {feature: ragged(BASE["features"][feature]["rows"]) for feature in BASE["features"]}

  def loss_fn(model, batch):
    activations = model.embed(batch)
    losses = [jnp.mean(jnp.sum(a**2, axis=-1)) for a in activations.values()]
    return jnp.sum(jnp.stack(losses)) * model.scale[...], activations

  def step(model, optimizer, batch):
    (loss, activations), grads = embed.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return loss, activations

  run = nnx.jit(step) if compiled else step
  loss, activations = run(model, embed.Optimizer(model, optax.sgd(0.0)), batch)
  np.testing.assert_allclose(loss, np.mean(BASE["loss_per_replica"]), rtol=1e-6)
  for feature, wanted in BASE["activations"].items():
    np.testing.assert_allclose(activations[feature], wanted, rtol=1e-6)
  for table, after in recorded["after"].items():
    variables = harness.variables(model, table)
    assert set(variables) == set(after)
    for key, wanted in after.items():
      np.testing.assert_allclose(
        variables[key], wanted, rtol=recorded["rtol"], atol=1e-6, err_msg=f"{table} {key}"
      )


def test_variable_learning_rate():
  table = embed.TableConfig(4, 1, combiner="sum", name="t")
  optimizer = embed.sgd(learning_rate=lambda step: jnp.maximum(0.5, 1.0 - 0.05 * jnp.float32(step)))
  model = harness.Model({"f": embed.FeatureConfig(table=table)}, optimizer)
  model.embed.load_tables({"t": np.zeros((4, 1), np.float32)})
  tables = embed.Optimizer(model, optax.sgd(0.0))
  run = nnx.jit(harness.train_step)
  seen = []
  ids, ones = {"f": np.array([0])}, {"f": np.ones((1, 1), np.float32)}
  for _ in range(10):
    activations, _ = run(model, tables, ids, None, ones)
    seen.append(float(activations["f"][0, 0]))
  wanted = BASE["other_tf_goldens"]["test_variable_learning_rate"]["expected"]
  np.testing.assert_allclose(seen, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("given", "replicas"), [(("friends",), 1), (("watched", "favorited", "friends"), 2)]
)
def test_ones_gradients(given, replicas):
  """Only friends gets a gradient (the others None), or every feature gets ones."""
  model = base_model(embed.sgd(learning_rate=0.1))
  batch = base_batch(replicas)
  before, residual = model.embed.lookup(batch)
  grads = {name: jnp.ones_like(a) if name in given else None for name, a in before.items()}
  model.embed.apply_gradients(grads, residual, step=0)
  after = model.embed(batch)
  videos = "watched" in given
  drops = {
    "watched": [[0.3], [0.6]] if videos else [[0.0], [0.0]],
    "favorited": [[0.6], [0.3]] if videos else [[0.0], [0.0]],
    "friends": [[0.1], [0.1 / 3]],
  }
  for name, drop in drops.items():
    wanted = before[name] - replicas * np.tile(np.array(drop, np.float32), (replicas, 1))
    np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.ci
def test_sequence_embeddings():
  replicas = 2
  model = base_model(embed.sgd(learning_rate=0.1), max_sequence_lengths=(2, 2, 3))
  batch = base_batch(replicas)
  before, residual = model.embed.lookup(batch)
  model.embed.apply_gradients(jax.tree.map(jnp.ones_like, before), residual, step=0)
  after = model.embed(batch)
  masks = BASE["other_tf_goldens"]["test_sequence_embeddings"]["masks"]
  drops = dict(zip(("watched", "favorited", "friends"), (0.3, 0.3, 0.1), strict=True))
  for (name, drop), mask in zip(drops.items(), masks, strict=True):
    mask = np.tile(mask, (replicas, 1, 1)).astype(np.float32)
    np.testing.assert_allclose(
      after[name], before[name] - mask * np.float32(replicas * drop), rtol=1e-5, atol=1e-5
    )
    padding = np.broadcast_to(mask == 0, after[name].shape)
    np.testing.assert_array_equal(np.asarray(after[name])[padding], 0.0)


def test_constant_weights():
  model = base_model(embed.sgd(learning_rate=0.1))
  batch = base_batch(1)
  halves = {
    name: None if name == "favorited" else embed.Ragged(np.full(3, 0.5, np.float32), r.row_splits)
    for name, r in batch.items()
  }
  halves["friends"] = embed.Ragged(np.full(4, 0.5, np.float32), batch["friends"].row_splits)
  plain, weighted = model.embed(batch), model.embed(batch, halves)
  for name, scale in (("watched", 0.5), ("favorited", 1.0), ("friends", 1.0)):
    np.testing.assert_allclose(weighted[name], plain[name] * scale, rtol=1e-6)


# ------------------------------------------------------------------- names and defaults


def structures():
  """The structures naming.json describes in words, in its order."""
  a, b, c = (embed.TableConfig(4, 2) for _ in range(3))
  named = embed.TableConfig(4, 2, name="named")
  f = lambda table: embed.FeatureConfig(table=table)
  return [
    {"z": f(a), "m": f(b), "a": f(a)},
    OrderedDict([("z", f(a)), ("a", f(b))]),
    (f(a), [f(named), {"k": f(c)}], f(a)),
    (f(embed.TableConfig(4, 2)), f(embed.TableConfig(4, 2))),
    f(a),
  ]


def at(tree, path):
  for part in filter(None, path.split("/")):
    tree = tree[int(part)] if isinstance(tree, list | tuple) else tree[part]
  return tree


def fill(structure, leaf):
  if isinstance(structure, dict):
    return type(structure)((key, fill(value, leaf)) for key, value in structure.items())
  if isinstance(structure, list | tuple):
    return type(structure)(fill(value, leaf) for value in structure)
  return leaf


@pytest.mark.parametrize("index", range(len(conformance.load("naming")["cases"])))
def test_naming(index):
  case = conformance.load("naming")["cases"][index]
  structure = structures()[index]
  layer = embed.SparseEmbed(structure, embed.sgd(), rngs=nnx.Rngs(0))
  assert list(layer.tables) == case["table_order"]
  assert list(layer.variables) == case["table_order"]
  layer.load_tables(
    {name: np.full((4, 2), i, np.float32) for i, name in enumerate(case["table_order"])}
  )
  activations = layer(fill(structure, np.array([3])))
  for path, table in zip(case["flat_paths"], case["table_of_feature"], strict=True):
    np.testing.assert_array_equal(at(activations, path), [[case["table_order"].index(table)] * 2])


def test_config_is_not_changed():
  """TensorFlow writes the global optimizer and the automatic name into the user's config."""
  table = embed.TableConfig(4, 2)
  embed.SparseEmbed(embed.FeatureConfig(table=table), embed.adam(), rngs=nnx.Rngs(0))
  assert table.optimizer is None
  assert table.name is None
  assert embed.TableConfig(4, 2) != embed.TableConfig(4, 2)
  assert embed.adam(learning_rate=0.1) == embed.adam(learning_rate=0.1)
  assert embed.adam(learning_rate=0.1) != embed.adam(learning_rate=0.2)


DEFAULTS = conformance.load("defaults")["classes"]
# Memory hints and a TensorFlow-only callback have no counterpart.
NOT_PORTED = {"low_dimensional_packing_status", "slot_variable_creation_fn", "layout"}


@pytest.mark.parametrize(
  "name", ["SGD", "Adagrad", "AdagradMomentum", "FTRL", "Adam", "TableConfig", "FeatureConfig"]
)
def test_defaults(name):
  ours = getattr(embed, conformance.OPTIMIZERS.get(name, name))
  parameters = inspect.signature(ours).parameters
  for argument, default in DEFAULTS[name].items():
    if argument in NOT_PORTED:
      continue
    actual = parameters[argument].default
    if default == "<required>":
      assert actual is inspect.Parameter.empty, argument
    elif argument == "dtype":
      assert jnp.dtype(actual) == jnp.float32
    else:
      assert actual == default, argument
      assert (actual is None) == (default is None), argument
  # Calls by position move over too.
  ported = [a for a in DEFAULTS[name] if a not in NOT_PORTED]
  if name in ("TableConfig", "FeatureConfig"):
    assert list(parameters)[: len(ported)] == ported
  else:
    assert next(iter(parameters)) == "learning_rate"


COMMON = [
  "learning_rate",
  "gradient_multiplier",
  "clipvalue",
  "weight_decay_factor",
  "multiply_weight_decay_factor_by_learning_rate",
  "clip_weight_min",
  "clip_weight_max",
  "use_gradient_accumulation",
]


@pytest.mark.parametrize("name", reference.RULES)
def test_every_optimizer_takes_the_common_arguments(name):
  parameters = inspect.signature(getattr(embed, name)).parameters
  assert [a for a in COMMON if a not in parameters] == []


REQUIRED = {"rmsprop": {"rho": 0.9, "momentum": 0.5, "epsilon": 1e-3}}
REQUIRED |= {"momentum": {"momentum": 0.9}, "lion": {"beta1": 0.9, "beta2": 0.99}}


@pytest.mark.parametrize("name", reference.RULES)
def test_slots_exist_from_construction(name):
  table = embed.TableConfig(5, 3, name="t")
  optimizer = getattr(embed, name)(learning_rate=0.1, **REQUIRED.get(name, {}))
  layer = embed.SparseEmbed(embed.FeatureConfig(table=table), optimizer, rngs=nnx.Rngs(0))
  wanted = reference.initial_variables(name, np.asarray(layer.tables["t"]))
  assert list(layer.variables["t"]) == list(wanted)
  for key, value in wanted.items():
    assert layer.variables["t"][key].shape == value.shape
    np.testing.assert_allclose(layer.variables["t"][key], value, rtol=1e-7)


def test_variables_keep_their_order():
  """A table's keys are the same list before and after a compiled step."""
  table = embed.TableConfig(4, 2, name="t")
  layer = embed.SparseEmbed(
    embed.FeatureConfig(table=table), embed.rmsprop(0.1, **REQUIRED["rmsprop"]), rngs=nnx.Rngs(0)
  )

  @nnx.jit
  def step(layer, ids):
    activations, residual = layer.lookup(ids)
    layer.apply_gradients(activations, residual, step=0)

  step(layer, np.array([1]))
  assert list(layer.variables["t"]) == ["parameters", "ms", "mom"]


def test_recorded_slots():
  for name, slots in DEFAULTS["slots"].items():
    rule = reference.RULES[conformance.OPTIMIZERS[name]]
    assert list(rule.slots) == [slot["name"] for slot in slots]
    np.testing.assert_allclose(
      list(rule.slots.values()), [slot["initial"] for slot in slots], rtol=1e-7
    )


def test_default_initializer():
  """A normal of deviation 1/sqrt(dim), cut at two deviations and not corrected for the cut."""
  dim, stddev = 16, DEFAULTS["default_initializer"]["stddev"]
  table = embed.TableConfig(4000, dim, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table=table), rngs=nnx.Rngs(0))
  values = np.asarray(layer.tables["t"], np.float64)
  assert values.shape == (4000, dim)
  assert np.abs(values).max() <= 2 * stddev
  assert np.abs(values).max() > 1.98 * stddev
  np.testing.assert_allclose(values.std(), 0.8796 * stddev, rtol=0.01)
  np.testing.assert_allclose(values.mean(), 0.0, atol=0.005)
  assert len(np.unique(values[:, 0])) > 3900
  other = embed.SparseEmbed(embed.FeatureConfig(table=table), rngs=nnx.Rngs(1))
  assert not np.allclose(values, other.tables["t"])


def test_initializer_is_called_as_in_jax():
  calls = []

  def counting(key, shape, dtype):
    calls.append(tuple(shape))
    return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

  table = embed.TableConfig(5, 3, initializer=counting, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table=table), rngs=nnx.Rngs(0))
  assert set(calls) == {(5, 3)}
  np.testing.assert_array_equal(layer.tables["t"], np.arange(15.0).reshape(5, 3))


# ------------------------------------------------------------------------------ shapes


def shape_input(kind, shape):
  if kind == "dense":
    return np.zeros(shape, np.int32)
  if kind == "ragged":
    return embed.Ragged(np.zeros(shape[0], np.int32), np.arange(shape[0] + 1))
  indices = np.zeros((1, len(shape)), np.int32)
  return embed.Sparse(indices, np.zeros(1, np.int32), tuple(shape))


def shape_cases():
  """Detected shapes, where an input of one ragged level can express them.

  Two rules differ from TensorFlow's: dense [B, L > 1] gives [B, L, dim], and a dense input of rank
  1 or 2 to a sequence feature is an error.
  """
  for case in conformance.load("shapes")["cases"]:
    dense, ragged = case["kind"] == "dense", case["kind"] == "ragged"
    sequence = case["max_sequence_length"] > 0 and case["output_shape"] is None
    if case["label"] == "detect" and not (ragged and len(case["input_shape"]) > 2):
      case = dict(case)
      if dense and sequence:
        if len(case["input_shape"]) > 2:
          continue  # a sequence ends at rank 2, so this is neither stated nor useful
        case["error"] = "ValueError"
      elif dense and case["input_shape"] == [4, 2] and case["output_shape"] is None:
        case.pop("error")
        case["result"] = [4, 2]
      yield case
    if case["label"] == "FeatureConfig then enqueue" and case["output_shape"] != [8]:
      yield case


def shape_id(case):
  shape, stated = case["input_shape"], case["output_shape"]
  return f"{case['kind']}-{shape}-L{case['max_sequence_length']}-{stated}".replace(" ", "")


@pytest.mark.parametrize("case", list(shape_cases()), ids=shape_id)
def test_shapes(case):
  table = embed.TableConfig(4, 3, name="t")

  def call():
    feature = embed.FeatureConfig(
      table=table,
      max_sequence_length=case["max_sequence_length"],
      output_shape=case["output_shape"],
      name="clicks",
    )
    layer = embed.SparseEmbed({"clicks": feature}, embed.sgd(), rngs=nnx.Rngs(0))
    return layer({"clicks": shape_input(case["kind"], case["input_shape"])})["clicks"]

  if "error" in case:
    with pytest.raises(ValueError, match="clicks"):
      call()
  else:
    assert call().shape == (*case["result"], 3)


@pytest.mark.ci
def test_shapes_are_free_per_call():
  table = embed.TableConfig(6, 2, name="t")
  layer = embed.SparseEmbed({"f": embed.FeatureConfig(table=table)}, embed.sgd(), rngs=nnx.Rngs(0))
  for batch, length in itertools.product((0, 1, 3), (0, 1, 2)):
    values = np.zeros((batch, length), np.int32)
    assert layer({"f": embed.Padded(values)})["f"].shape == (batch, 2)
  stated = embed.FeatureConfig(table=table, output_shape=[3])
  layer = embed.SparseEmbed({"f": stated}, embed.sgd(), rngs=nnx.Rngs(0))
  assert layer({"f": embed.Padded(np.zeros((3, 2), np.int32))})["f"].shape == (3, 2)
  with pytest.raises(ValueError, match="f"):
    layer({"f": embed.Padded(np.zeros((4, 2), np.int32))})
