"""The embedding of a model out of one mapping, as in TPUEstimator's EmbeddingConfigSpec."""

import inspect

import ml_collections
import numpy as np
import pytest
from cases import refused
from flax import nnx
from meshes import make_mesh

import embed


def plain():
  """Two tables, three features, all that an entry can say."""
  return {
    "feature_to_config_dict": {
      "watched": {"table_id": "movie", "weight_key": "seconds"},
      "history": {"table_id": "movie", "max_sequence_length": 3},
      "user": {"table_id": "user", "validate_weights_and_indices": False},
    },
    "table_to_config_dict": {
      "movie": {
        "vocabulary_size": 20, "dimension": 4, "combiner": "sum", "hot_id_replication": True,
        "initializer": nnx.initializers.ones,
      },
      "user": {"vocabulary_size": 9, "dimension": 2, "learning_rate": 0.5},
    },
    "optimization_parameters": {"name": "adagrad", "learning_rate": 0.1},
  }  # fmt: skip


def batch():
  return {
    "watched": embed.Padded(np.array([[3, 7], [5, -1]])),
    "seconds": embed.Padded(np.array([[0.5, 2.0], [1.0, 0.0]])),
    "history": embed.Padded(np.array([[1, 2, 3, 4], [5, -1, -1, -1]])),
    "user": np.array([0, 8]),
    "label": np.array([1.0, 0.0]),
  }


def spec_of(**changes):
  """`plain()` with arguments replaced, or entries changed, as by `table__movie={...}`."""
  config = plain()
  for name, value in changes.items():
    kind, _, entry = name.partition("__")
    if entry:
      config[f"{kind}_to_config_dict"].setdefault(entry, {}).update(value)
    else:
      config[name] = value
  return embed.EmbeddingConfigSpec(**config)


@pytest.fixture(scope="module")
def layer():
  return embed.EmbeddingConfigSpec(**plain()).make(rngs=nnx.Rngs(0))


@nnx.jit
def look_up(layer, features, weights):
  return layer(features, weights)


def test_one_mapping_is_a_model(layer):
  spec = embed.EmbeddingConfigSpec(**plain())
  movie, user = spec.tables["movie"], spec.tables["user"]
  assert (movie.vocabulary_size, movie.dim, movie.combiner, movie.name) == (20, 4, "sum", "movie")
  assert (user.vocabulary_size, user.dim, user.combiner) == (9, 2, "mean")
  assert movie.optimizer == spec.optimizer == embed.adagrad(0.1)
  assert user.optimizer == embed.adagrad(0.5)  # another rate and nothing else
  assert spec.features["watched"].table is spec.features["history"].table is movie
  assert spec.features["history"].max_sequence_length == 3
  assert not spec.features["user"].validate_weights_and_indices
  activations = look_up(layer, *spec.inputs(batch()))
  shapes = {"watched": (2, 4), "history": (2, 3, 4), "user": (2, 2)}
  assert {name: a.shape for name, a in activations.items()} == shapes
  np.testing.assert_array_equal(activations["watched"], [[2.5] * 4, [1.0] * 4])
  rows = np.asarray(layer.tables["user"])[[0, 8]]  # TensorFlow's columns drop a dense id 0
  np.testing.assert_array_equal(activations["user"], rows)
  assert list(layer.variables["movie"]) == ["parameters", "accumulators"]
  frozen = embed.EmbeddingConfigSpec(**ml_collections.FrozenConfigDict(plain())).tables["user"]
  assert (frozen.vocabulary_size, frozen.dim, frozen.optimizer) == (9, 2, embed.adagrad(0.5))


def test_arguments_and_defaults_are_tensorflows():
  parameters = inspect.signature(embed.EmbeddingConfigSpec).parameters
  assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == {
    "optimization_parameters": None,
    "clipping_limit": None,
    "pipeline_execution_with_tensor_core": False,
    "gradient_multiplier_fn": None,
    "partition_strategy": "div",
  }
  spec = spec_of(pipeline_execution_with_tensor_core=True)
  assert (spec.partition_strategy, spec.pipeline_execution_with_tensor_core) == ("div", True)


def test_a_table_has_its_own_optimizer_or_its_own_rate():
  rate = lambda step: 0.5 / (1 + step)
  spec = spec_of(
    table__movie={"optimization_parameters": embed.sgd(0.3)},
    table__user={"learning_rate": None, "learning_rate_fn": rate},
  )
  assert spec.tables["movie"].optimizer == embed.sgd(0.3)
  assert spec.tables["user"].optimizer == embed.adagrad(rate)
  own = {"optimization_parameters": {"name": "adam", "beta_1": 0.5}, "learning_rate": 0.25}
  assert spec_of(table__movie=own).tables["movie"].optimizer == embed.adam(0.25, beta_1=0.5)


def test_without_an_optimizer_tables_can_only_be_looked_up():
  spec = spec_of(optimization_parameters=None, table__user={"learning_rate": None})
  layer = nnx.eval_shape(lambda: spec.make(rngs=nnx.Rngs(0)))
  assert list(layer.arrays["movie"]) == ["parameters"]


def test_clipping_limit_clips_the_summed_gradient():
  """TensorFlow stores the limit and never uses it. Two ids of one row, a step of rate 1."""
  table = {"vocabulary_size": 4, "dimension": 2, "initializer": nnx.initializers.zeros}
  spec = embed.EmbeddingConfigSpec(
    {"f": {"table_id": "t"}}, {"t": table}, embed.sgd(1.0), clipping_limit=1.5
  )
  layer = spec.make(rngs=nnx.Rngs(0))
  _, residual = layer.lookup({"f": np.array([2, 2])})
  layer.apply_gradients({"f": np.array([[1, -1], [1, 0.25]], np.float32)}, residual)
  assert layer.tables["t"].tolist() == [[0, 0], [0, 0], [-1.5, 0.75], [0, 0]]


def test_an_optimizer_keeps_what_it_says_itself():
  own = {"optimization_parameters": embed.sgd(0.1, clipvalue=3.0)}
  spec = spec_of(table__movie=own, clipping_limit=np.float32(1.0))
  assert spec.tables["movie"].optimizer == embed.sgd(0.1, clipvalue=3.0)
  assert spec.optimizer == embed.adagrad(0.1, clipvalue=1.0)


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_partition_strategy(strategy):
  spec = spec_of(partition_strategy=strategy)
  layer = nnx.eval_shape(lambda: spec.make(rngs=nnx.Rngs(0), mesh=make_mesh()))
  contiguous = {stack.layout.contiguous for stack in layer.spec.stacks.values()}
  assert contiguous == {strategy == "div"}  # rows are where TensorFlow has them: test_layout.py


def test_columns_become_inputs():
  spec = embed.EmbeddingConfigSpec(**plain())
  features, weights = spec.inputs(batch())
  assert list(features) == ["watched", "history", "user"]
  assert list(weights) == ["watched"]
  assert weights["watched"].values.tolist() == [[0.5, 2.0], [1.0, 0.0]]
  assert spec_of(feature__watched={"weight_key": None}).inputs(batch())[1] is None
  for column in ("user", "seconds"):
    left = {name: value for name, value in batch().items() if name != column}
    with pytest.raises(ValueError, match=f"The batch has no column '{column}'"):
      spec.inputs(left)


def test_weights_are_for_bags_and_become_float32(layer):
  spec = embed.EmbeddingConfigSpec(**plain())
  whole = batch() | {"seconds": embed.Padded(np.array([[1, 2], [3, 4]]))}
  activations = look_up(layer, *spec.inputs(whole))
  assert activations["watched"].tolist() == [[3.0] * 4, [3.0] * 4]
  weighted = spec_of(feature__user={"weight_key": "seconds"})
  with pytest.raises(ValueError, match="kind of their ids"):
    embed.validate(weighted.features, *weighted.inputs(batch()))


ERRORS = [  # what is changed, and what is said of it
  ({"feature__user": {"table_id": "users"}}, "'user' has table_id 'users'"),
  ({"table__item": {"vocabulary_size": 3, "dimension": 2}}, "'item' is used by no feature"),
  ({"feature__user": {"max_sequence_lenght": 3}}, "'max_sequence_lenght'. There are max_seq"),
  ({"table__user": {"dim": 3}}, "'user': unknown key 'dim'.*dimension"),
  ({"table__x": {"vocabulary_size": 3}}, "'x' has no 'dimension'"),
  ({"table__user": {"learning_rate_fn": lambda step: 0.1}}, "learning_rate and learning_rate_fn"),
  ({"optimization_parameters": None}, "'user' has a learning rate, but no optimizer"),
  ({"table__user": {"optimization_parameters": {"name": "frozen"}}}, "no optimizer that takes one"),
  ({"table__movie": {"optimization_parameters": {"name": "adagrd"}}}, "'movie': .*'adagrd'"),
  (
    {"optimization_parameters": {"name": "adagrad", "learning_rate": "0.1"}},
    r"optimization_parameters: Argument `learning_rate` must be .*'0\.1'",
  ),
  (
    {"table__movie": {"optimization_parameters": {"name": "sgd", "rate": 1}}},
    "'movie': .*'rate'.* It takes",
  ),
  ({"table__movie": {"initializer": {"name": "constant"}}}, "'movie': .*`initializer`"),
  ({"clipping_limit": 0.0}, "clipping_limit` must be a positive number"),
  ({"clipping_limit": "1"}, "clipping_limit` must be a positive number"),
  ({"gradient_multiplier_fn": lambda step: 0.5}, r"gradient_multiplier_fn.*grads\.map"),
  ({"optimization_parameters": {"name": "adam", "lazy_adam": False}}, "lazy_adam=False has no"),
  ({"partition_strategy": "hash"}, "partition_strategy` must be 'div' or 'mod'.*'hash'"),
  ({"feature__user": {"weight_key": "watched"}}, "weight_key 'watched' is a feature"),
]


def test_errors_name_what_is_wrong():
  refused(ERRORS, lambda changes: spec_of(**changes))
  with pytest.raises(TypeError, match="table_to_config_dict must be a mapping"):
    spec_of(table_to_config_dict=[3])
  with pytest.raises(TypeError, match="feature_columns"):
    embed.EmbeddingConfigSpec(feature_columns=[])
