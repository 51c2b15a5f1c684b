"""Configs and tables of TPUEmbedding, by hand.

TensorFlow is not installed: classes stand for its own, by name and attributes (those of
tpu_embedding_v2_utils.py and of its initializers).
"""

import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx

import embed


def numbers(*shape, first=0):
  return first + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# --- TPUEmbedding: what stands for TensorFlow -----------------------------------------------------


def tf(name, /, **attributes):
  """An object of TensorFlow's class of this name, with these attributes."""
  theirs = type(name, (), {})()
  vars(theirs).update(attributes)
  return theirs


def tf_table(vocabulary_size, dim, dtype=np.float32, **attributes):
  """TableConfig, whose constructor makes a missing initializer."""
  initializer = tf("TruncatedNormal", mean=0.0, stddev=1 / np.sqrt(dim))
  others = {"initializer": initializer, "optimizer": None, "combiner": "mean", "name": None}
  sizes = {"vocabulary_size": vocabulary_size, "dim": dim}
  return tf("TableConfig", dtype=tf("DType", as_numpy_dtype=dtype), **sizes | others | attributes)


def tf_feature(table, output_shape=None, **attributes):
  """FeatureConfig: a missing output shape is one of unknown rank, which has no list."""
  rank = None if output_shape is None else len(output_shape)
  shape = tf("TensorShape", rank=rank, as_list=lambda: list(output_shape))
  others = {"max_sequence_length": 0, "validate_weights_and_indices": True, "name": None}
  return tf("FeatureConfig", table=table, output_shape=shape, **others | attributes)


def tf_optimizer(name, *, clipvalue=None, **attributes):
  """An optimizer object: clipping is kept as two attributes."""
  low, high = clipvalue or (None, None)
  clip = {"clip_gradient_min": low, "clip_gradient_max": high}
  unset = dict.fromkeys(["clip_weight_min", "weight_decay_factor", "slot_variable_creation_fn"])
  common = {"learning_rate": 0.001, "use_gradient_accumulation": True}
  return tf(name, **clip | unset | common | attributes)


def imported(replace=None, **table):
  """The table that comes of one of TensorFlow's."""
  theirs = tf_table(**{"vocabulary_size": 6, "dim": 4, "name": "t"} | table)
  return embed.from_tpu_embedding(tf_feature(theirs), replace=replace).features.table


# --- configurations -------------------------------------------------------------------------------


def test_features_and_tables():
  video = tf_table(10, 4, combiner="sqrtn", name="video")
  pair = (tf_feature(video, validate_weights_and_indices=False), tf_feature(tf_table(7, 2)))
  config = {
    "watched": tf_feature(video, max_sequence_length=3, name="w"),
    "more": [tf_feature(tf_table(7, 2, combiner="sum")), tf_feature(video, output_shape=[2, None])],
    "pair": pair,
  }
  features, optimizer = embed.from_tpu_embedding(config)
  assert optimizer is None
  watched, (more, shaped), (unchecked, other) = (features[name] for name in config)
  table = watched.table
  assert (table.vocabulary_size, table.dim, table.combiner, table.name) == (10, 4, "sqrtn", "video")
  assert (table.dtype, watched.max_sequence_length, watched.name) == (np.float32, 3, "w")
  assert (watched.output_shape, shaped.output_shape) == (None, (2, None))
  assert (type(features["more"]), type(features["pair"])) == (list, tuple)
  assert not unchecked.validate_weights_and_indices
  assert shaped.table is unchecked.table is table
  assert more.table is not other.table  # equal, but two tables
  ours = tf_feature(tf_table(4, 2, optimizer=embed.adagrad(0.1)))
  features, optimizer = embed.from_tpu_embedding(ours, embed.adam(lambda step: 0.1))
  assert optimizer.learning_rate_at(3) == 0.1
  assert features.table.optimizer == embed.adagrad(0.1)


FTRL = {
  "learning_rate_power": -0.6, "l1_regularization_strength": 0.1,
  "l2_regularization_strength": 0.2, "beta": 0.3, "initial_accumulator_value": 0.4,
  "multiply_linear_by_learning_rate": True, "allow_zero_accumulator": False,
}  # fmt: skip
ADAGRAD_MOMENTUM = {
  "momentum": 0.9, "use_nesterov": True, "exponent": 3.0, "beta2": 0.8, "epsilon": 1e-6
}  # fmt: skip
ADAM = {"epsilon": 1e-5, "sum_inside_sqrt": False}
OPTIMIZERS = [
  ("SGD", embed.sgd, {}),
  ("Adagrad", embed.adagrad, {"initial_accumulator_value": 0.2}),
  ("AdagradMomentum", embed.adagrad_momentum, ADAGRAD_MOMENTUM),
  ("FTRL", embed.ftrl, FTRL),
  ("Adam", embed.adam, {"beta_1": 0.8, "beta_2": 0.9, **ADAM}),
]


def test_optimizers():
  """Every argument differs from its default."""
  table = tf_feature(tf_table(4, 2, name="t"))
  for name, ours, attributes in OPTIMIZERS:
    theirs = tf_optimizer(name, learning_rate=0.5, **attributes)
    wanted = ours(0.5, **attributes)
    assert imported(optimizer=theirs).optimizer == wanted, name
    assert embed.from_tpu_embedding(table, theirs).optimizer == wanted, name


def test_arguments_of_all_optimizers():
  common = {
    "clipvalue": (-2.0, None),
    "clip_weight_min": -1.0,
    "clip_weight_max": 3.0,
    "weight_decay_factor": 0.01,
    "multiply_weight_decay_factor_by_learning_rate": True,
  }
  theirs = tf_optimizer("SGD", learning_rate=0.5, low_dimensional_packing_status=True, **common)
  assert imported(optimizer=theirs).optimizer == embed.sgd(0.5, **common)


def test_defaults_of_tensorflow_are_ours():
  """The recorded defaults, as attributes, are equal to our optimizers without arguments."""
  for name, arguments in conformance.load("defaults")["classes"].items():
    if name in conformance.OPTIMIZERS:
      theirs = tf_optimizer(name, **arguments)
      ours = getattr(embed, conformance.OPTIMIZERS[name])
      assert imported(optimizer=theirs).optimizer == ours(), name


# --- initializers ---------------------------------------------------------------------------------


DISTRIBUTIONS = [  # an initializer; the least, the largest, the mean and the deviation of its draws
  (tf("Zeros"), 0, 0, 0, 0),
  (tf("Ones"), 1, 1, 1, 0),
  (tf("Constant", value=2.5), 2.5, 2.5, 2.5, 0),
  (tf("RandomUniform", minval=-1.0, maxval=3.0), -1, 3, 1, 4 / np.sqrt(12)),
  (tf("RandomUniform", minval=0.0, maxval=None), 0, 1, 0.5, 1 / np.sqrt(12)),
  (tf("RandomNormal", mean=2.0, stddev=0.5), -1, 5, 2, 0.5),
  (tf("TruncatedNormal", mean=2.0, stddev=0.5), 1, 3, 2, 0.8796 * 0.5),
]


def test_distributions():
  assert imported().initializer is None  # the default there is the default here
  tables = [imported(initializer=theirs) for theirs, *_ in DISTRIBUTIONS]
  shape = (5000, tables[0].dim)
  draws = jax.jit(lambda key: [table.initializer(key, shape, jnp.float32) for table in tables])
  pairs = zip(draws(jax.random.key(0)), DISTRIBUTIONS, strict=True)
  for x, (theirs, low, high, mean, stddev) in pairs:
    name, x = type(theirs).__name__, np.asarray(x, np.float64)
    assert low <= x.min() <= x.max() <= high, name
    np.testing.assert_allclose(x.mean(), mean, atol=0.03, err_msg=name)
    np.testing.assert_allclose(x.std(), stddev, rtol=0.03, err_msg=name)


# --- errors ---------------------------------------------------------------------------------------


def rate():
  return 0.1


def test_what_has_no_counterpart():
  cases = [
    (
      {"optimizer": tf_optimizer("CustomOptimizer")},
      "The CustomOptimizer of table 't' has no counterpart: pass replace.*custom_optimizer",
    ),
    (
      {"optimizer": tf_optimizer("Adam", learning_rate=rate)},
      r"The Adam of table 't' has a learning rate without arg.*learning_rate=f\).*f\(step\)",
    ),
    ({"optimizer": tf_optimizer("Adagrad", slot_variable_creation_fn=rate)}, "load_variables"),
    (
      {"optimizer": tf_optimizer("SGD", use_gradient_accumulation=False)},
      r"The SGD of table 't' steps once for each occurrence.*embed\.sgd",
    ),
    ({"optimizer": tf_optimizer("Adam", lazy_adam=False)}, "Adam of table 't' steps.* every row"),
    ({"optimizer": tf_optimizer("RMSProp")}, "no counterpart.*embed.from_optax"),
    ({"optimizer": "sgd"}, "The str of table 't' has no counterpart"),
    ({"initializer": rate}, r"initializer of table 't'.*f\(key, shape, dtype\)"),
    ({"initializer": tf("Constant", value=[1, 2])}, "initializer of table 't'.*load_tables"),
    ({"initializer": tf("GlorotUniform")}, "initializer of table 't'"),
    ({"combiner": tf("CustomCombiner")}, "combiner of table 't'.*replace"),
    ({"dtype": np.int32}, "`dtype` must be float32"),
    ({"quantization_config": tf("QuantizationConfig")}, "Rows of table 't' are quantized"),
  ]
  refused(cases, lambda table: imported(**table))


def test_replacements():
  theirs = {
    "initializer": rate,
    "optimizer": tf_optimizer("Adam", learning_rate=rate),
    "combiner": tf("CustomCombiner"),
  }
  mine = {"initializer": None, "optimizer": embed.adam(lambda step: 0.1), "combiner": "sum"}
  table = imported(**theirs, replace={"t": mine | {"dtype": jnp.bfloat16}})
  assert (table.initializer, table.optimizer, table.combiner) == tuple(mine.values())
  assert table.dtype == jnp.bfloat16
  with pytest.raises(ValueError, match=r"no tables \['u'\]; there are \['t'\]"):
    imported(replace={"u": {}})
  with pytest.raises(ValueError, match=r"The Adam of all tables .*: pass optimizer=embed\.adam"):
    embed.from_tpu_embedding(tf_feature(tf_table(4, 2)), tf_optimizer("Adam", learning_rate=rate))
  with pytest.raises(ValueError, match="Got 3"):
    embed.from_tpu_embedding({"a": 3})


# --- tables and slots -----------------------------------------------------------------------------


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


ARRAYS = {"a/b": numbers(5, 2), "a/b/accumulators": numbers(5), "a/parameters": numbers(3, 2)}


@pytest.mark.programs(60, "the rows of each number of shards have shapes of their own")
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_shards_come_back_in_order(strategy):
  """Of tables and of slots of one value per row; rows of padding behind them are cut."""
  for case in conformance.load("sharding")["div_mod"]:
    size = case["vocabulary_size"]
    arrays = {
      "a/b/parameters": [numbers(size, 2)[ids] for ids in case[strategy]],
      "a/b/accumulators": [numbers(size)[ids] for ids in case[strategy]],
      "a": numbers(3, 2),
    }
    found = embed.import_variables(arrays, a_layer(size), partition_strategy=strategy)
    np.testing.assert_array_equal(found["a/b"]["parameters"], numbers(size, 2))
    np.testing.assert_array_equal(found["a/b"]["accumulators"], numbers(size))
  table = numbers(3, 2)
  padding = np.full((1, 2), -1.0)
  shards = [*table[:, None], padding, padding]  # five hosts, three rows
  arrays = {"a/b": shards, "a": table}
  layer = a_layer(3, embed.sgd())
  found = embed.import_variables(arrays, layer, partition_strategy=strategy)
  np.testing.assert_array_equal(found["a/b"]["parameters"], table)


def test_whole_arrays():
  found = embed.import_variables(ARRAYS, a_layer())
  np.testing.assert_array_equal(found["a/b"]["parameters"], ARRAYS["a/b"])
  np.testing.assert_array_equal(found["a/b"]["accumulators"], ARRAYS["a/b/accumulators"])
  np.testing.assert_array_equal(found["a"]["parameters"], ARRAYS["a/parameters"])
  without = embed.import_variables(ARRAYS, a_layer(), slots=False)
  assert [list(without[table]) for table in ("a/b", "a")] == [["parameters"]] * 2


def test_arrays_that_do_not_fit():
  cases = [
    ({"a/b": None}, "Missing: 'a/b/parameters'; unknown, or given twice: none"),
    ({"a/b/accumulators": None}, "Missing: 'a/b/accumulators'"),
    ({"a": numbers(3, 2)}, "given twice: 'a'"),
    ({"a/b/momenta": numbers(5), "b/x": numbers(5)}, "Missing: none.*: 'a/b/momenta', 'b/x'"),
    ({"a/b": numbers(4, 2)}, r"'a/b' has shape \(4, 2\), the layer's has \(5, 2\)"),
    ({"a/b": [numbers(3, 2)] * 2}, r"has shape \(3, 2\) on shard 1 of 2; with 'div'"),
    ({"a/b": []}, "'a/b' has no shards"),
  ]
  given = lambda change: {key: x for key, x in (ARRAYS | change).items() if x is not None}
  refused(cases, lambda change: embed.import_variables(given(change), a_layer()))
  with pytest.raises(ValueError, match="`partition_strategy` must be 'div' or 'mod'"):
    embed.import_variables(ARRAYS, a_layer(), partition_strategy="Div")
