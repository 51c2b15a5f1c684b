"""TPUEmbedding's objects and arrays become ours.

TensorFlow is not installed: these classes stand for its own, by name and attributes (those of
tpu_embedding_v2_utils.py, of V1's tpu_embedding.py, and of its initializers).
"""

import collections
import functools
import pickle

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import each, refused
from flax import nnx

import embed

# ------------------------------------------------------------- what stands for TensorFlow


class TensorShape:
  def __init__(self, dims):
    self.dims = None if dims is None else list(dims)

  @property
  def rank(self):
    return None if self.dims is None else len(self.dims)

  def as_list(self):
    if self.dims is None:
      raise ValueError("as_list() is not defined on an unknown TensorShape.")
    return self.dims


class DType:
  def __init__(self, as_numpy_dtype):
    self.as_numpy_dtype = as_numpy_dtype


class Object:
  """A class of TensorFlow's by name, with these attributes."""

  def __new__(cls, name, **attributes):
    return type(name, (), {"__init__": lambda self: self.__dict__.update(attributes)})()


class TFTable:
  """TableConfig: a missing initializer is made in its constructor."""

  def __init__(
    self, vocabulary_size, dim, initializer=None, optimizer=None, combiner="mean", name=None,
    quantization_config=None, layout=None, dtype=np.float32,
  ):  # fmt: skip
    if initializer is None:
      initializer = Object("TruncatedNormal", mean=0.0, stddev=1 / np.sqrt(dim), seed=None)
    self.vocabulary_size, self.dim, self.initializer = vocabulary_size, dim, initializer
    self.optimizer, self.combiner, self.name = optimizer, combiner, name
    self.quantization_config, self.layout, self.dtype = quantization_config, layout, DType(dtype)


class TFFeature:
  """FeatureConfig: a missing output shape is one of unknown rank."""

  def __init__(
    self, table, max_sequence_length=0, validate_weights_and_indices=True, output_shape=None,
    name=None,
  ):  # fmt: skip
    self.table, self.max_sequence_length, self.name = table, max_sequence_length, name
    self.validate_weights_and_indices = validate_weights_and_indices
    self.output_shape = TensorShape(output_shape)


def tf_optimizer(name, *, learning_rate=0.001, clipvalue=None, **attributes):
  """An optimizer object: clipping is kept as two attributes."""
  if clipvalue is None:
    clipvalue = (None, None)
  elif not isinstance(clipvalue, tuple):
    clipvalue = (-clipvalue, clipvalue)
  common = {
    "learning_rate": learning_rate,
    "use_gradient_accumulation": True,
    "clip_weight_min": None,
    "clip_weight_max": None,
    "clip_gradient_min": clipvalue[0],
    "clip_gradient_max": clipvalue[1],
    "weight_decay_factor": None,
    "multiply_weight_decay_factor_by_learning_rate": None,
    "slot_variable_creation_fn": None,
    "low_dimensional_packing_status": False,
  }
  return Object(name, **common | attributes)


def imported(initializer=None, optimizer=None, replace=None, **table):
  """The table that comes of one of TensorFlow's."""
  theirs = TFTable(**{"vocabulary_size": 6, "dim": 4, "name": "t"} | table)
  theirs.initializer = initializer or theirs.initializer
  theirs.optimizer = optimizer
  return embed.from_tpu_embedding(TFFeature(theirs), replace=replace).features.table


# ------------------------------------------------------------------------ configurations


def test_features_and_tables():
  video = TFTable(
    10, 4, combiner="sqrtn", name="video", quantization_config=Object(
      "QuantizationConfig", num_buckets=16, lower=-1.0, upper=1.0
    )
  )  # fmt: skip
  Pair = collections.namedtuple("Pair", "table other")  # a field may be called as an attribute
  config = {
    "watched": TFFeature(video, max_sequence_length=3, name="w"),
    "more": [TFFeature(TFTable(7, 2, combiner="sum")), (TFFeature(video, output_shape=[2, None]),)],
    "pair": Pair(TFFeature(video, validate_weights_and_indices=False), TFFeature(video)),
  }
  features, optimizer = embed.from_tpu_embedding(config)
  assert optimizer is None
  table = features["watched"].table
  assert (table.vocabulary_size, table.dim, table.combiner, table.name) == (10, 4, "sqrtn", "video")
  assert table.quantization_config == embed.QuantizationConfig(16, -1.0, 1.0)
  assert table.dtype == np.float32
  assert features["watched"].max_sequence_length == 3
  assert features["watched"].name == "w"
  assert features["watched"].output_shape is None
  assert type(features["more"]) is list
  assert features["more"][0].table.name is None
  assert features["more"][1][0].output_shape == (2, None)
  assert type(features["pair"]) is Pair
  assert not features["pair"].table.validate_weights_and_indices
  others = (features["more"][1][0], features["pair"].table, features["pair"].other)
  assert all(f.table is table for f in others)
  layer = nnx.eval_shape(lambda: embed.SparseEmbed(features, optimizer, rngs=nnx.Rngs(0)))
  assert list(layer.spec.tables) == ["table_0", "video"]


def test_two_tables_of_equal_fields_stay_two():
  a, b = (TFFeature(TFTable(4, 2, name=name)) for name in ("a", "b"))
  features, _ = embed.from_tpu_embedding((a, b, a))
  assert features[0].table is features[2].table
  assert features[0].table is not features[1].table


OPTIMIZERS = [
  ("SGD", {}, embed.sgd(0.5)),
  ("Adagrad", {"initial_accumulator_value": 0.2}, embed.adagrad(0.5, 0.2)),
  (
    "AdagradMomentum",
    {"momentum": 0.9, "use_nesterov": True, "exponent": 3.0, "beta2": 0.8, "epsilon": 1e-6},
    embed.adagrad_momentum(0.5, 0.9, True, 3.0, 0.8, 1e-6),
  ),
  (
    "FTRL",
    {
      "learning_rate_power": -0.6,
      "l1_regularization_strength": 0.1,
      "l2_regularization_strength": 0.2,
      "beta": 0.3,
      "initial_accumulator_value": 0.4,
      "multiply_linear_by_learning_rate": True,
      "allow_zero_accumulator": False,
    },
    embed.ftrl(0.5, -0.6, 0.1, 0.2, 0.3, 0.4, True, False),
  ),
  (
    "Adam",
    {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-5, "lazy_adam": False, "sum_inside_sqrt": False},
    embed.adam(0.5, 0.8, 0.9, 1e-5, False, False),
  ),
  ("StochasticGradientDescentParameters", {}, embed.sgd(0.5)),
  ("AdagradParameters", {"initial_accumulator": 0.2}, embed.adagrad(0.5, 0.2)),
  (
    "ProximalAdagradParameters",
    {
      "initial_accumulator": 0.2,
      "l1_regularization_strength": 0.3,
      "l2_regularization_strength": 0.4,
    },
    embed.proximal_adagrad(0.5, 0.2, 0.3, 0.4),
  ),
  (
    "AdagradMomentumParameters",
    {"momentum": 0.9, "use_nesterov": False, "exponent": 2, "beta2": 1, "epsilon": 1e-10},
    embed.adagrad_momentum(0.5, 0.9, exponent=2, beta2=1),
  ),
  (
    "AdamParameters",
    {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-8, "lazy_adam": True, "sum_inside_sqrt": True},
    embed.adam(0.5, 0.8, 0.9, 1e-8),
  ),
  (
    "FtrlParameters",
    {
      "learning_rate_power": -0.5,
      "initial_accumulator_value": 0.1,
      "initial_linear_value": 0.0,
      "l1_regularization_strength": 0.0,
      "l2_regularization_strength": 0.0,
      "multiply_linear_by_learning_rate": False,
      "beta": 0,
      "allow_zero_accumulator": False,
    },
    embed.ftrl(0.5),
  ),
  ("MomentumParameters", {"momentum": 0.7, "use_nesterov": True}, embed.momentum(0.5, 0.7, True)),
  (
    "RMSPropParameters",
    {"rho": 0.8, "momentum": 0.7, "epsilon": 1e-3},
    embed.rmsprop(0.5, 0.8, 0.7, 1e-3),
  ),
]


def test_optimizers():
  """Every argument differs from its default, or is V1's."""
  table = TFFeature(TFTable(4, 2, name="t"))
  for name, attributes, wanted in OPTIMIZERS:
    theirs = tf_optimizer(name, learning_rate=0.5, **attributes)
    assert imported(optimizer=theirs).optimizer == wanted, name
    assert embed.from_tpu_embedding(table, theirs).optimizer == wanted, name


def test_arguments_of_all_optimizers():
  theirs = tf_optimizer(
    "Adagrad",
    learning_rate=0.5,
    initial_accumulator_value=0.1,
    clipvalue=2.0,
    clip_weight_min=-1.0,
    clip_weight_max=3.0,
    weight_decay_factor=0.01,
    multiply_weight_decay_factor_by_learning_rate=True,
  )
  assert imported(optimizer=theirs).optimizer == embed.adagrad(
    0.5,
    clipvalue=2.0,
    clip_weight_min=-1.0,
    clip_weight_max=3.0,
    weight_decay_factor=0.01,
    multiply_weight_decay_factor_by_learning_rate=True,
  )
  open_end = tf_optimizer("SGD", clipvalue=(None, 1.0))
  assert imported(optimizer=open_end).optimizer.clipvalue == (None, 1.0)
  once = tf_optimizer("SGD", use_gradient_accumulation=False)
  assert not imported(optimizer=once).optimizer.use_gradient_accumulation


def test_defaults_of_tensorflow_are_ours():
  """The recorded defaults, as attributes, are equal to our optimizers without arguments."""
  for name, arguments in conformance.load("defaults")["classes"].items():
    if name in conformance.OPTIMIZERS:
      theirs = tf_optimizer(name, **arguments)
      ours = getattr(embed, conformance.OPTIMIZERS[name])
      assert imported(optimizer=theirs).optimizer == ours(), name


def test_ours_pass_through():
  table = TFFeature(TFTable(4, 2, optimizer=embed.lion(0.1)))
  features, optimizer = embed.from_tpu_embedding(table, embed.adam(lambda step: 0.1))
  assert features.table.optimizer == embed.lion(0.1)
  assert optimizer.learning_rate_at(3) == 0.1


# -------------------------------------------------------------------------- initializers


def draw(table, size=20_000):
  rows = table.initializer(jax.random.key(0), (size // table.dim, table.dim), jnp.float32)
  return np.asarray(rows, np.float64)


def test_the_default_initializer_is_ours():
  assert imported().initializer is None
  assert imported(Object("TruncatedNormal", mean=0.0, stddev=0.5), dim=4).initializer is None


def test_constants():
  constant = Object("Constant", value=2.5)
  for theirs, value in ((Object("Zeros"), 0), (Object("Ones"), 1), (constant, 2.5)):
    assert (draw(imported(theirs), 8) == value).all()


DISTRIBUTIONS = [  # an initializer; the least, the largest, the mean and the deviation of its draws
  (Object("RandomUniform", minval=-1.0, maxval=3.0), -1, 3, 1, 4 / np.sqrt(12)),
  (Object("RandomUniform", minval=0.0, maxval=None), 0, 1, 0.5, 1 / np.sqrt(12)),
  (Object("RandomNormal", mean=2.0, stddev=0.5), -1, 5, 2, 0.5),
  (Object("TruncatedNormal", mean=2.0, stddev=0.5), 1, 3, 2, 0.8796 * 0.5),
  # fan_in 6 rows, fan_out 4 columns: variances 2/6, 1/5 (as uniform in ±sqrt(3/5)), 1/4.
  (
    Object("VarianceScaling", scale=2.0, mode="fan_in", distribution="untruncated_normal"),
    -3, 3, 0, np.sqrt(2 / 6),
  ),
  (
    Object("GlorotUniform", scale=1.0, mode="fan_avg", distribution="uniform"),
    -np.sqrt(3 / 5), np.sqrt(3 / 5), 0, np.sqrt(1 / 5),
  ),
  (
    Object("VarianceScaling", scale=1.0, mode="fan_out", distribution="truncated_normal"),
    -1.14, 1.14, 0, 0.5,
  ),
]  # fmt: skip


def test_distributions():
  tables = [imported(theirs) for theirs, *_ in DISTRIBUTIONS]
  shape = (5000, tables[0].dim)
  draws = jax.jit(lambda key: [table.initializer(key, shape, jnp.float32) for table in tables])

  def check(values, low, high, mean, stddev):
    assert low <= values.min()
    assert values.max() <= high
    np.testing.assert_allclose(values.mean(), mean, atol=0.03)
    np.testing.assert_allclose(values.std(), stddev, rtol=0.03)

  drawn = [np.asarray(x, np.float64) for x in draws(jax.random.key(0))]
  pairs = enumerate(zip(drawn, DISTRIBUTIONS, strict=True))
  each({str(i): (values, *numbers) for i, (values, (_, *numbers)) in pairs}, check)


def test_imported_configs_go_to_input_workers():
  theirs = TFFeature(
    TFTable(6, 4, Object("RandomUniform", minval=0.0, maxval=1.0), tf_optimizer("SGD"), name="t")
  )
  features, _ = embed.from_tpu_embedding({"f": theirs})
  copy = pickle.loads(pickle.dumps(features))["f"].table
  np.testing.assert_array_equal(draw(copy, 8), draw(features["f"].table, 8))


# -------------------------------------------------------------------------------- errors


def rate():
  return 0.1


def test_what_has_no_counterpart():
  cases = [
    (
      {"optimizer": tf_optimizer("CustomOptimizer")},
      "no counterpart of table 't', a CustomOptimizer: pass replace.*custom_optimizer",
    ),
    ({"optimizer": tf_optimizer("FrequencyEstimatorParameters")}, "no counterpart of table 't'"),
    ({"optimizer": Object("Adam", learning_rate=0.1, beta_1=0.9)}, "no counterpart.*an? Adam"),
    (
      {"optimizer": tf_optimizer("Adam", learning_rate=rate)},
      r"function without arguments.*table 't', a Adam.*embed.adam\(learning_rate=f\).*f\(step\)",
    ),
    ({"optimizer": tf_optimizer("Adagrad", slot_variable_creation_fn=rate)}, "slot_init="),
    ({"optimizer": tf_optimizer("FtrlParameters", initial_linear_value=0.5)}, "slot_init="),
    ({"optimizer": "sgd"}, "no counterpart of table 't', a str"),
    ({"initializer": rate}, r"initializer of table 't'.*f\(key, shape, dtype\)"),
    ({"initializer": Object("Constant", value=[1, 2])}, "constant array.*load_tables"),
    ({"combiner": Object("CustomCombiner")}, "combiner of table 't'.*replace"),
    ({"dtype": np.int32}, "`dtype` must be float32"),
  ]
  refused(cases, lambda table: imported(**table))


def test_replacements():
  theirs = {
    "initializer": rate,
    "optimizer": tf_optimizer("Adam", learning_rate=rate),
    "combiner": Object("CustomCombiner"),
  }
  mine = {"initializer": None, "optimizer": embed.adam(lambda step: 0.1), "combiner": "sum"}
  table = imported(**theirs, replace={"t": mine | {"dtype": jnp.bfloat16}})
  assert (table.initializer, table.optimizer, table.combiner) == tuple(mine.values())
  assert table.dtype == jnp.bfloat16
  with pytest.raises(ValueError, match=r"no tables \['u'\]; there are \['t'\]"):
    imported(replace={"u": {}})
  with pytest.raises(
    ValueError, match=r"the default optimizer, a Adam: pass optimizer=embed\.adam"
  ):
    embed.from_tpu_embedding(TFFeature(TFTable(4, 2)), tf_optimizer("Adam", learning_rate=rate))
  with pytest.raises(ValueError, match="Got 3"):
    embed.from_tpu_embedding({"a": 3})


# ---------------------------------------------------------------------- tables and slots


@functools.cache
def a_layer(vocabulary_size=5, optimizer=None, name="a/b"):
  """What is known of a layer without its arrays."""
  optimizer = embed.rowwise_adagrad() if optimizer is None else optimizer
  tables = [
    embed.TableConfig(vocabulary_size, 2, name=name, optimizer=optimizer),
    embed.TableConfig(3, 2, name="a", optimizer=embed.sgd()),
  ]
  features = [embed.FeatureConfig(t) for t in tables]
  return nnx.eval_shape(lambda: embed.SparseEmbed(features, rngs=nnx.Rngs(0)))


def rows(*shape):
  return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


ARRAYS = {"a/b": rows(5, 2), "a/b/accumulators": rows(5), "a/parameters": rows(3, 2)}


def by_strategy(array, shards, strategy):
  if strategy == "mod":
    return [array[s::shards] for s in range(shards)]
  return np.array_split(array, shards)  # the first ones have a row more


def test_whole_arrays():
  found = embed.import_variables(ARRAYS, a_layer())
  assert {table: list(of) for table, of in found.items()} == {
    "a/b": ["parameters", "accumulators"],
    "a": ["parameters"],
  }
  for name, wanted in ARRAYS.items():
    table, _, key = name.rpartition("/") if name != "a/b" else (name, "", "parameters")
    np.testing.assert_array_equal(found[table][key], wanted)


@pytest.mark.programs(60, "the rows of each number of shards have shapes of their own")
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_recorded_row_maps(strategy):
  for recorded in conformance.load("sharding")["div_mod"]:
    size, shards = recorded["vocabulary_size"], recorded["num_shards"]
    layer, table = a_layer(size, embed.sgd()), rows(size, 2)
    split = [table[ids] for ids in recorded[strategy]]
    other = np.concatenate(by_strategy(rows(3, 2), shards, strategy))
    for parts, of_a, n in ((split, rows(3, 2), None), (np.concatenate(split), other, shards)):
      arrays = {"a/b": parts, "a": of_a}
      found = embed.import_variables(arrays, layer, partition_strategy=strategy, shards=n)
      np.testing.assert_array_equal(found["a/b"]["parameters"], table)


def test_rows_of_padding_are_cut():
  layer, table = a_layer(3, embed.sgd()), rows(3, 2)
  one_each = [*table[:, None], -np.ones((1, 2)), -np.ones((1, 2))]  # five hosts, three rows
  for strategy in ("div", "mod"):
    arrays = {"a/b": one_each, "a": table}
    found = embed.import_variables(arrays, layer, partition_strategy=strategy)
    np.testing.assert_array_equal(found["a/b"]["parameters"], table)
  longer = [np.pad(table[s::2], ((0, 6), (0, 0))) for s in range(2)]
  found = embed.import_variables({"a/b": longer, "a": table}, layer, partition_strategy="mod")
  np.testing.assert_array_equal(found["a/b"]["parameters"], table)


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_shards_come_back_in_order(strategy):
  """Of tables and of slots of one value per row; no layer is made, only what it knows."""
  for size, shards in ((1, 1), (1, 9), (8, 4), (13, 5), (40, 9), (7, 8)):
    layer = a_layer(size)
    arrays = {
      "a/b/parameters": by_strategy(rows(size, 2), shards, strategy),
      "a/b/accumulators": tuple(by_strategy(rows(size), shards, strategy)),
      "a": by_strategy(rows(3, 2), shards, strategy),
    }
    found = embed.import_variables(arrays, layer, partition_strategy=strategy)
    joined = {name: np.concatenate(parts) for name, parts in arrays.items()}
    whole = embed.import_variables(joined, layer, partition_strategy=strategy, shards=shards)
    for result in (found, whole):
      np.testing.assert_array_equal(result["a/b"]["parameters"], rows(size, 2))
      np.testing.assert_array_equal(result["a/b"]["accumulators"], rows(size))
      np.testing.assert_array_equal(result["a"]["parameters"], rows(3, 2))


def test_slots_that_are_not_wanted():
  found = embed.import_variables(ARRAYS, a_layer(), slots=False)
  assert list(found["a/b"]) == ["parameters"]
  rows_alone = {"a/b": ARRAYS["a/b"], "a": ARRAYS["a/parameters"]}
  assert list(embed.import_variables(rows_alone, a_layer(), slots=False)) == ["a/b", "a"]
  frozen = embed.import_variables(ARRAYS, a_layer(optimizer=embed.frozen()))
  assert list(frozen["a/b"]) == ["parameters"]


def test_arrays_that_do_not_fit():
  cases = [
    ({"a/b": None}, {}, "'a/b/parameters' or 'a/b' is missing"),
    ({"a/b/accumulators": None}, {}, "'a/b/accumulators' is missing"),
    ({"a": rows(3, 2)}, {}, "'a/parameters' and 'a' are the same table"),
    (
      {"a/b/momenta": rows(5)},
      {},
      r"'a/b/momenta' is not a slot of table 'a/b'.*\['accumulators'\]",
    ),
    ({"b/x": rows(5)}, {}, r"'b/x' is not of a table of the layer, \['a', 'a/b'\]"),
    ({"a/b": rows(4, 2)}, {}, r"'a/b' has shape \(4, 2\), the layer's has \(5, 2\)"),
    ({"a/b": rows(4, 2)}, {"shards": 2}, r"'a/b' has shape \(4, 2\), the layer's has \(5, 2\)"),
    ({"a/b": [rows(2, 2), rows(3, 2)]}, {}, r"'a/b' has shape \(2, 2\) on shard 0 of 2.*\(3, 2\)"),
    ({"a/b": [rows(3, 3), rows(2, 3)]}, {}, r"has shape \(3, 3\) on shard 0"),
    ({"a/b": [rows(3, 2), rows(3, 2)]}, {}, r"has shape \(3, 2\) on shard 1 of 2; with 'div'"),
    ({"a/b": []}, {}, "'a/b' has no shards"),
    ({}, {"partition_strategy": "Div"}, "Invalid partition_strategy 'Div': write 'div' or 'mod'"),
  ]

  def check(change, arguments, says):
    arrays = {name: value for name, value in (ARRAYS | change).items() if value is not None}
    with pytest.raises(ValueError, match=says):
      embed.import_variables(arrays, a_layer(), **arguments)

  each({case[2]: case for case in cases}, check)
