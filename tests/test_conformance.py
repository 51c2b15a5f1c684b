"""The recorded cases of TPUEmbedding in data/, through the public interface.

The same cases hold `reference.py` to the truth, so that what the properties compare with is right.
"""

import inspect
from collections import OrderedDict

import cases
import conformance
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
import reference
from conformance import LOOKUPS, lookup_config, lookup_inputs
from flax import nnx

import embed
from embed import structure

pytestmark = [
  pytest.mark.usefixtures("strict"),
  # Two cases set an option that has no effect; saying so is allowed.
  pytest.mark.filterwarnings("ignore:.*max_sequence_length"),
]

INVALID = [name for name, case in LOOKUPS.items() if conformance.raises(case)]
OPTIMIZERS = conformance.optimizer_cases()
BASE = conformance.load("tf_base_case")


# ----------------------------------------------------------------------------- lookups


def cotangents(case):
  """The recorded ones, or ones where only the forward pass was recorded."""
  if "grad" in case:
    return case["grad"]["cotangent"]
  return {name: np.ones(conformance.expected(case, name).shape) for name in case["features"]}


# Keeps the summed gradient of each row, and counts its steps.
RECORDER = embed.custom_optimizer(
  lambda g, w, slots, _: (w, {"gradient": g, "steps": slots["steps"] + 1}),
  {"gradient": embed.Slot(), "steps": embed.Slot(per_row=True)},
)


def check_lookup(case, activations, rows):
  """Activations by feature, and the gradients `{table: {row: gradient}}` of the touched rows."""
  for name in case["features"]:
    wanted = conformance.expected(case, name)
    assert activations[name].shape == wanted.shape
    np.testing.assert_allclose(activations[name], wanted, **case["tol"])
  for table, touched in case.get("grad", {}).get("touched", {}).items():
    wanted = {row: case["grad"]["table_grad"][table][row] for row in touched}
    harness.assert_rows(rows[table], wanted, **case["tol"])


def by_reference(case):
  activations, rows = {}, {name: {} for name in case["tables"]}
  for name, config in case["features"].items():
    table = case["tables"][config["table"]]
    occ = reference.occurrences(
      *conformance.inputs(case["inputs"][name]),
      table["combiner"],
      config["max_sequence_length"],
      config["output_shape"],
    )
    activations[name] = reference.lookup(table["params"], occ)
    gradients = reference.occurrence_gradients(occ, cotangents(case)[name])
    for row, gradient in reference.row_gradients(*gradients).items():
      rows[config["table"]][row] = rows[config["table"]].get(row, 0) + gradient
  return activations, rows


def test_reference_lookup():
  valid = {name: case for name, case in LOOKUPS.items() if name not in INVALID}
  cases.each({name: (case, *by_reference(case)) for name, case in valid.items()}, check_lookup)


def looked_up(names):
  """{case: (activations, rows)}; their features are those of one layer, each under a prefix."""
  features, tables, inputs, weights, given = {}, {}, {}, {}, {}
  prefixes = {name: f"{i:03d}_" for i, name in enumerate(names)}
  for name, prefix in prefixes.items():
    config, rows = lookup_config(LOOKUPS[name], prefix)
    x, w = lookup_inputs(LOOKUPS[name], prefix)
    features, tables, inputs, weights = features | config, tables | rows, inputs | x, weights | w
    given |= {prefix + feature: g for feature, g in cotangents(LOOKUPS[name]).items()}

  @nnx.jit
  def look_up_and_step(tables, *arguments):
    model = harness.Model(features, RECORDER)
    model.embed.load_tables(tables)
    (loss, activations), grads = harness.value_and_grad(model, *arguments)
    embed.Optimizer(model, optax.sgd(0.0)).update(model, grads)
    return loss, activations, grads.dense, model.embed.variables

  found = look_up_and_step(tables, inputs, weights, given)
  loss, activations, dense, variables = jax.tree.map(np.asarray, found)
  (scale,) = jax.tree.leaves(dense)
  np.testing.assert_allclose(scale, loss, rtol=1e-6)
  touched = {
    table: {row: x["gradient"][row] for row in np.flatnonzero(x["steps"])}
    for table, x in variables.items()
  }
  return {
    name: (
      {feature: activations[prefix + feature] for feature in LOOKUPS[name]["features"]},
      {table: touched[prefix + table] for table in LOOKUPS[name]["tables"]},
    )
    for name, prefix in prefixes.items()
  }


GROUPS = [
  ("grid/mean/ragged/", "seq/", "shared/", "dense/3x2"),
  pytest.param(("grid/sum/", "grid/mean/", "rank3/"), marks=pytest.mark.ci),
  pytest.param(("grid/sqrtn/", "negid/", "dense/", "oov/"), marks=pytest.mark.ci),
  pytest.param(("novalidate/", "ragged_output_shape/"), marks=pytest.mark.ci),
]


@pytest.mark.parametrize("groups", GROUPS, ids=" ".join)
def test_lookup(groups):
  names = [name for name in LOOKUPS if name.startswith(groups) and name not in INVALID]
  found = looked_up(names)
  cases.each({name: (LOOKUPS[name], *found[name]) for name in names}, check_lookup)


def check_that_a_lookup_raises(case):
  features, _ = lookup_config(case)
  inputs, weights = lookup_inputs(case)
  (feature,) = features
  with pytest.raises(ValueError, match=f"'{feature}'"):
    nnx.eval_shape(lambda: embed.SparseEmbed(features, rngs=nnx.Rngs(0))(inputs, weights))
  with pytest.raises(ValueError, match=f"'{feature}'"):
    embed.validate(features, inputs, weights)


def test_lookup_raises():
  cases.each({name: (LOOKUPS[name],) for name in INVALID}, check_that_a_lookup_raises)


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


def check_optimizer(case, step, actual):
  wanted = case["after"][step]
  assert set(actual) == set(wanted)
  for key, value in wanted.items():
    what = f"{case['id']}: {key}, step {step}"
    np.testing.assert_allclose(actual[key], value, **case["tol"], err_msg=what)


def check_reference_optimizer(case):
  optimizer = conformance.OPTIMIZERS[case["optimizer"]]
  variables = reference.initial_variables(optimizer, case["table"], **case["config"])
  assert list(variables) == ["parameters", *case["initial_slots"]]
  for step, ids in enumerate(case["ids"]):
    grads, lr = case["grads"][step], case["lr"][step]
    variables = reference.apply_rows(optimizer, variables, ids, grads, lr, **case["config"])
    check_optimizer(case, step, variables)


def test_reference_optimizer():
  cases.each({name: (case,) for name, case in OPTIMIZERS.items()}, check_reference_optimizer)


def split(case, step, array):
  """One part per replica: two features of one table."""
  if "replica_split" not in case:
    return [array]
  return np.split(array, [case["replica_split"][step]])


@pytest.mark.ci
def test_optimizer_jit():
  """Cases are tables of one layer, all trained by one compiled step.

  Ids are padded to one length with -1 and garbage gradients, so that five steps share a program.
  """
  names = {name: f"table{index:03d}" for index, name in enumerate(OPTIMIZERS)}
  features = {}
  for name, case in OPTIMIZERS.items():
    constant = case["lr"][0] if len(set(case["lr"])) == 1 else schedule(case)
    table = embed.TableConfig(
      *case["table"].shape,
      optimizer=make_optimizer(case, constant),
      initializer=lambda *_, case=case: jnp.asarray(case["table"]),
      combiner="sum",
      name=names[name],
    )
    for part in range(len(split(case, 0, case["grads"][0]))):
      features[f"{name}:{part}"] = embed.FeatureConfig(table=table)
  model = harness.Model(features)
  optimizer = embed.Optimizer(model, optax.sgd(0.0))
  train_step = nnx.jit(harness.train_step)
  for step in range(5):
    ids = {name: np.full(5, -1, np.int32) for name in features}
    grads = {name: np.full((5, 3), 7.0, np.float32) for name in features}
    for name, case in OPTIMIZERS.items():
      for part, some in enumerate(split(case, step, np.array(case["ids"][step], np.int32))):
        ids[f"{name}:{part}"][: len(some)] = some
      for part, some in enumerate(split(case, step, case["grads"][step])):
        grads[f"{name}:{part}"][: len(some)] = some
    train_step(model, optimizer, ids, None, grads)
    after = {name: harness.variables(model, names[name]) for name in OPTIMIZERS}
    cases.each({n: (case, step, after[n]) for n, case in OPTIMIZERS.items()}, check_optimizer)
  np.testing.assert_array_equal(model.scale[...], 1.0)


def test_unused_activation_touches_its_rows():
  """A lookup without a gradient is a zero gradient for its rows, not a skipped update.

  Momentum of one half at rate 1, by hand: a gradient of 1, a loss that ignores the lookup, and None
  at the mid level.
  """
  table = embed.TableConfig(2, 1, lambda *_: jnp.zeros((2, 1)), combiner="sum", name="t")
  optimizer = embed.adagrad_momentum(1.0, momentum=0.5)
  layer = embed.SparseEmbed({"f": embed.FeatureConfig(table)}, optimizer, rngs=nnx.Rngs(0))
  ids = {"f": np.array([1])}

  def summed(layer, ids):
    loss = lambda layer: jnp.sum(layer(ids)["f"])
    layers.update(layer, embed.value_and_grad(loss)(layer)[1].rows)

  def ignored(layer, ids):
    loss = lambda layer: layer(ids) and jnp.zeros(())
    layers.update(layer, embed.value_and_grad(loss)(layer)[1].rows)

  def mid_level(layer, ids):
    _, residual = layer.lookup(ids)
    layer.apply_gradients({"f": None}, residual)

  seen = []
  for run in (summed, ignored, mid_level):
    nnx.jit(run)(layer, ids)
    seen.append(np.asarray(layer.tables["t"])[:, 0].tolist())
  assert seen == [[0, -1], [0, -1.5], [0, -1.75]]


# ---------------------------------------------------------------- TensorFlow's own test


def ragged(rows):
  flat = np.array([i for row in rows for i in row], np.int32)
  return embed.Ragged(flat, np.cumsum([0] + [len(row) for row in rows], dtype=np.int32))


def check_base_case(name, activations, variables):
  for feature, wanted in BASE["activations"].items():
    np.testing.assert_allclose(activations[f"{name}_{feature}"], wanted, rtol=1e-6)
  recorded = BASE["optimizers"][name]
  for table, after in recorded["after"].items():
    actual = variables[f"{name}_{table}"]
    assert set(actual) == set(after)
    for key, wanted in after.items():
      np.testing.assert_allclose(
        actual[key], wanted, rtol=recorded["rtol"], atol=1e-6, err_msg=f"{table} {key}"
      )


@pytest.mark.ci
def test_base_case():
  """Each of the five optimizers has a copy of the tables in one layer."""
  features, batch = {}, {}
  for name, recorded in BASE["optimizers"].items():
    make = getattr(embed, conformance.OPTIMIZERS[name])
    optimizer = make(learning_rate=recorded["learning_rate"], **recorded["config"])
    tables = {
      table: embed.TableConfig(
        *of_table["params"].shape,
        initializer=lambda *_, rows=of_table["params"]: jnp.asarray(rows),
        optimizer=optimizer,
        combiner=of_table["combiner"],
        name=f"{name}_{table}",
      )
      for table, of_table in BASE["tables"].items()
    }
    for feature, of_feature in BASE["features"].items():
      features[f"{name}_{feature}"] = embed.FeatureConfig(tables[of_feature["table"]])
      batch[f"{name}_{feature}"] = ragged(of_feature["rows"])
  model = harness.Model(features)

  def loss_fn(model, batch):
    activations = model.embed(batch)
    losses = [jnp.mean(jnp.sum(a**2, axis=-1)) for a in activations.values()]
    return jnp.sum(jnp.stack(losses)) * model.scale[...], activations

  @nnx.jit
  def step(model, optimizer, batch):
    (loss, activations), grads = embed.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return loss, activations

  loss, activations = step(model, embed.Optimizer(model, optax.sgd(0.0)), batch)
  number = len(BASE["optimizers"])
  np.testing.assert_allclose(loss, number * np.mean(BASE["loss_per_replica"]), rtol=1e-6)
  variables = jax.tree.map(np.asarray, model.embed.variables)
  cases.each({name: (name, activations, variables) for name in BASE["optimizers"]}, check_base_case)


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


def check_names(case, config):
  tables = structure.name_tables(config)
  assert list(tables) == case["table_order"]
  names = {id(table): name for name, table in tables.items()}
  flat = {
    "/".join(path): names[id(feature.table)] for path, feature in structure.flatten_features(config)
  }
  assert flat == dict(zip(case["flat_paths"], case["table_of_feature"], strict=True))


def test_naming():
  recorded = conformance.load("naming")["cases"]
  cases.each(dict(enumerate(zip(recorded, structures(), strict=True))), check_names)


def test_config_is_not_changed():
  """TensorFlow writes the global optimizer and the automatic name into the user's config."""
  table = embed.TableConfig(4, 2)
  nnx.eval_shape(
    lambda: embed.SparseEmbed(embed.FeatureConfig(table=table), embed.adam(), rngs=nnx.Rngs(0))
  )
  assert table.optimizer is None
  assert table.name is None
  assert embed.TableConfig(4, 2) != embed.TableConfig(4, 2)


DEFAULTS = conformance.load("defaults")["classes"]
# Memory hints and a TensorFlow-only callback have no counterpart.
NOT_PORTED = {
  "low_dimensional_packing_status", "slot_variable_creation_fn", "layout", "quantization_config",
}  # fmt: skip
NOT_PORTED |= set(conformance.LET_GO)
COMMON = {
  "learning_rate",
  "clipvalue",
  "weight_decay_factor",
  "multiply_weight_decay_factor_by_learning_rate",
  "clip_weight_min",
  "clip_weight_max",
}


def check_defaults(name):
  if name in conformance.OPTIMIZERS:
    defaults = getattr(embed, conformance.OPTIMIZERS[name])().arguments
  else:
    parameters = inspect.signature(getattr(embed, name)).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
  for argument, default in DEFAULTS[name].items():
    if argument in NOT_PORTED:
      continue
    actual = defaults[argument]
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
    assert list(defaults)[: len(ported)] == ported
  else:
    assert next(iter(defaults)) == "learning_rate"


def test_defaults():
  names = ["SGD", "Adagrad", "AdagradMomentum", "FTRL", "Adam", "TableConfig", "FeatureConfig"]
  cases.each({name: (name,) for name in names}, check_defaults)
  for name in reference.RULES:
    assert set(getattr(embed, name)().arguments) >= COMMON, name


def test_slots_exist_from_construction():
  """A table's keys are one list before and after a compiled step, and start as recorded."""
  for name, recorded in DEFAULTS["slots"].items():
    slots = getattr(embed, conformance.OPTIMIZERS[name])(0.1).slots(3)
    assert list(slots) == [slot["name"] for slot in recorded]
    for slot, wanted in zip(slots.values(), recorded, strict=True):
      np.testing.assert_allclose(slot.initial, wanted["initial"], rtol=1e-7)
  layer = layers.one_table(embed.adagrad_momentum(0.1))
  names = list(layer.variables["t"])
  layers.step(layer, np.array([1]), np.ones((1, layers.D), np.float32))
  assert names == list(layer.variables["t"]) == ["parameters", "accumulators", "momenta"]


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
  if kind == "padded":
    return embed.Padded(np.zeros(shape, np.int32))
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


# One layer takes any batch: input, stated shape or None, and the shape, or None for an error.
PADDED_SHAPES = [((b, length), None, [b]) for b in (0, 1, 3) for length in (0, 1, 2)]
PADDED_SHAPES += [((3, 2), [3], [3]), ((4, 2), [3], None)]


def shape_of(kind, shape, max_sequence_length, output_shape):
  feature = embed.FeatureConfig(
    table=embed.TableConfig(4, 3, name="t"),
    max_sequence_length=max_sequence_length,
    output_shape=output_shape,
    name="clicks",
  )

  def call():
    layer = embed.SparseEmbed({"clicks": feature}, rngs=nnx.Rngs(0))
    return layer({"clicks": shape_input(kind, shape)})

  return nnx.eval_shape(call)["clicks"].shape


def check_shape(arguments, result):
  if result is None:
    with pytest.raises(ValueError, match="clicks"):
      shape_of(*arguments)
  else:
    assert shape_of(*arguments) == (*result, 3)


def test_shapes():
  table = {}
  for case in shape_cases():
    arguments = (
      case["kind"], case["input_shape"], case["max_sequence_length"], case["output_shape"],
    )  # fmt: skip
    table[str(arguments)] = arguments, None if "error" in case else case["result"]
  for shape, stated, result in PADDED_SHAPES:
    arguments = ("padded", shape, 0, stated)
    table[str(arguments)] = arguments, result
  cases.each(table, check_shape)
