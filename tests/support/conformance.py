"""Loads the recorded cases of TPUEmbedding in data/, as NumPy arrays and inputs of a layer.

Each file's `_about` says what its fields mean and how they were obtained.
"""

import functools
import json
import math
import pathlib

import jax
import numpy as np

import embed

_DATA = pathlib.Path(__file__).parents[1] / "data"
_DTYPES = {"f4": np.float32, "i4": np.int32}

# TensorFlow's class -> the function here. Cases of other classes (Momentum, RMSProp,
# ProximalAdagrad, Lion) are let go.
OPTIMIZERS = {
  "SGD": "sgd",
  "Adagrad": "adagrad",
  "AdagradMomentum": "adagrad_momentum",
  "FTRL": "ftrl",
  "Adam": "adam",
}

# TensorFlow's arguments that embed does not have, each with its default, which embed does; cases
# that ask for something else are let go.
LET_GO = {"use_gradient_accumulation": True, "lazy_adam": True}


def optimizer_cases():
  """The recorded steps by their ids, without those that are let go."""
  is_kept = lambda case: (
    case["optimizer"] in OPTIMIZERS
    and all(case["config"].get(key, default) == default for key, default in LET_GO.items())
  )
  return {case["id"]: case for case in load("optimizers")["cases"] if is_kept(case)}


@functools.cache
def load(name):
  """A file of data/, with every {dtype, shape, data} turned into an array."""
  return _decode(json.loads((_DATA / f"{name}.json").read_text()))


def _decode(x):
  if isinstance(x, dict):
    if set(x) == {"dtype", "shape", "data"}:
      return np.array(x["data"], _DTYPES[x["dtype"]]).reshape(x["shape"])
    return {key: _decode(value) for key, value in x.items()}
  return [_decode(value) for value in x] if isinstance(x, list) else x


def inputs(recorded):
  """The `inputs` entry of a lookup case -> ids and weights as a layer takes them."""
  values, weights = recorded["values"], recorded["weights"]
  if recorded["kind"] == "dense":
    return values, weights
  if recorded["kind"] == "ragged":
    wrap = lambda x: embed.Ragged(x, np.array(recorded["row_splits"], np.int32))
  else:
    wrap = lambda x: embed.Sparse(recorded["indices"], x, tuple(recorded["dense_shape"]))
  return wrap(values), None if weights is None else wrap(weights)


def expected(case, name):
  """What training gives: an array, or {"error": type name}."""
  train = case["expected"][name]["train"]
  if isinstance(train, str):
    assert train == "same"
    return case["expected"][name]["serve"]
  return train


def raises(case):
  is_raised = lambda f: isinstance(expected(case, f), dict) or has_sequence_by_shape(case, f)
  return any(map(is_raised, case["features"]))


def has_sequence_by_shape(case, name):
  """True for an `output_shape` of several ids for each bag, which is no form here."""
  shape, recorded = case["features"][name]["output_shape"], case["inputs"][name]
  if shape is None or recorded["kind"] != "ragged":
    return False
  return math.prod(shape) != len(recorded["row_splits"]) - 1


LOOKUPS = {case["id"]: case for case in load("lookups")["cases"]}


def lookup_config(case, prefix=""):
  """Feature configs and tables of a case; the prefix lets many cases share one layer."""
  tables = {
    name: embed.TableConfig(
      vocabulary_size=table["vocabulary_size"],
      dim=table["dim"],
      combiner=table["combiner"],
      initializer=jax.nn.initializers.zeros,  # quick to compile; the recorded table replaces it
      name=prefix + name,
    )
    for name, table in case["tables"].items()
  }
  features = {
    prefix + name: embed.FeatureConfig(
      table=tables[feature["table"]],
      max_sequence_length=feature["max_sequence_length"],
      validate_weights_and_indices=feature["validate_weights_and_indices"],
      output_shape=feature["output_shape"],
    )
    for name, feature in case["features"].items()
  }
  return features, {prefix + name: table["params"] for name, table in case["tables"].items()}


def lookup_inputs(case, prefix=""):
  pairs = {prefix + name: inputs(recorded) for name, recorded in case["inputs"].items()}
  return {name: f for name, (f, _) in pairs.items()}, {name: w for name, (_, w) in pairs.items()}
