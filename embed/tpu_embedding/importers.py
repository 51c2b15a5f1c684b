"""Importers of TensorFlow's TPUEmbedding: its configuration objects, tables and slots.

TensorFlow is not imported: objects of `tf.tpu.experimental.embedding`, and the parameter classes of
`tf.compat.v1.tpu`, are recognized by the names of their classes and attributes.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from embed import config as config_lib
from embed import initializers, structure
from embed.engine.stack import Layout
from embed.layer import SparseEmbed
from embed.optimizers import OPTIMIZERS, RowOptimizer, named

# --- configurations -------------------------------------------------------------------------------


class Imported(NamedTuple):
  """The result of `from_tpu_embedding`: the first two arguments of `SparseEmbed`.

  Attributes:
    features: TensorFlow's containers, holding `embed.FeatureConfig`.
    optimizer: an `embed.RowOptimizer`, or None.
  """

  features: Any
  optimizer: RowOptimizer | None


def from_tpu_embedding(
  feature_config: Any,
  optimizer: Any = None,
  *,
  replace: Mapping[str, Mapping[str, Any]] | None = None,
) -> Imported:
  """Converts the arguments of a TPUEmbedding to those of `SparseEmbed`.

  Shared tables stay shared; names and structure are kept. Options that TPUEmbeddingV2 ignores, such
  as clipping, take effect here. Initial values have the same distribution as in TensorFlow, which
  draws them per host, but are other numbers.

  Args:
    feature_config: any nesting of `tf.tpu.experimental.embedding.FeatureConfig`.
    optimizer: one of `tf.tpu.experimental.embedding`, such as `Adagrad`, or one of the
      `*Parameters` of `tf.compat.v1.tpu.experimental`. An `embed.RowOptimizer` is kept.
    replace: by the name of a TensorFlow table, arguments of `embed.TableConfig` that replace its
      own, for those without a counterpart here.

  Returns:
    An `embed.Imported`, for `embed.SparseEmbed(*imported, rngs=rngs)`.

  Raises:
    ValueError: naming the table and what to write instead, for objects without a counterpart
      (custom optimizers and combiners, initializers that are functions, learning rates without
      argument), and for unknown tables in `replace`.

  >>> class TableConfig:  # in place of TensorFlow's
  ...   vocabulary_size, dim, combiner, name, optimizer = 10, 4, "sum", "movie", None
  ...   initializer = quantization_config = None
  >>> class FeatureConfig:
  ...   table, max_sequence_length, validate_weights_and_indices = TableConfig(), 0, True
  ...   output_shape = name = None
  >>> class Adagrad:
  ...   learning_rate, initial_accumulator_value, use_gradient_accumulation = 0.05, 0.1, True
  >>> features, optimizer = embed.from_tpu_embedding({"watched": FeatureConfig()}, Adagrad())
  >>> features["watched"].table.combiner, optimizer.name, optimizer.learning_rate
  ('sum', 'adagrad', 0.05)
  """
  replacements = dict(replace or {})
  tables: dict[int, config_lib.TableConfig] = {}
  names = set()

  def table_of(tf_table: Any) -> config_lib.TableConfig:
    if id(tf_table) not in tables:
      names.add(tf_table.name)
      tables[id(tf_table)] = _table(tf_table, dict(replacements.get(tf_table.name, {})))
    return tables[id(tf_table)]

  features = _features(feature_config, table_of)
  unknown = sorted(set(replacements) - names)
  if unknown:
    raise ValueError(
      f"replace: there are no tables {unknown}; there are {sorted(map(str, names))}."
    )
  return Imported(features, _optimizer(optimizer, "the default optimizer", "pass optimizer="))


def _features(tf_config: Any, table_of: Callable[[Any], config_lib.TableConfig]) -> Any:
  """Converts the features in TensorFlow's containers, some of which are wrappers."""
  convert = functools.partial(_features, table_of=table_of)
  if isinstance(tf_config, Mapping):
    return {key: convert(value) for key, value in tf_config.items()}
  if structure.is_namedtuple(tf_config):
    return type(tf_config)(*map(convert, tf_config))
  if isinstance(tf_config, (list, tuple)):
    return (tuple if isinstance(tf_config, tuple) else list)(map(convert, tf_config))
  if hasattr(tf_config, "table"):
    return config_lib.FeatureConfig(
      table=table_of(tf_config.table),
      max_sequence_length=tf_config.max_sequence_length,
      validate_weights_and_indices=tf_config.validate_weights_and_indices,
      output_shape=_shape(tf_config.output_shape),
      name=tf_config.name,
    )
  raise ValueError(
    "from_tpu_embedding takes any nesting of dicts, lists, tuples and named tuples of "
    f"tf.tpu.experimental.embedding.FeatureConfig. Got {tf_config!r}."
  )


def _shape(tf_shape: Any) -> list[int | None] | None:
  """Converts a TensorShape to a list, or to None if its rank is unknown."""
  if tf_shape is None or getattr(tf_shape, "rank", 0) is None:
    return None
  return tf_shape.as_list() if hasattr(tf_shape, "as_list") else list(tf_shape)


def _table(tf_table: Any, replacements: dict[str, Any]) -> config_lib.TableConfig:
  """Converts a table, except for the arguments that are replaced."""
  where, instead = f"table {tf_table.name!r}", f"pass replace={{{tf_table.name!r}: "
  size, dim = tf_table.vocabulary_size, tf_table.dim
  convert = {
    "optimizer": lambda x: _optimizer(x, where, instead + '{"optimizer": ...}} with '),
    "initializer": lambda x: _initializer(x, size, dim, where, instead),
    "combiner": lambda x: _combiner(x, where, instead),
  }
  _refuse_quantization(getattr(tf_table, "quantization_config", None), where)
  converted = {
    key: f(getattr(tf_table, key, None)) for key, f in convert.items() if key not in replacements
  }
  dtype = getattr(getattr(tf_table, "dtype", None), "as_numpy_dtype", np.float32)
  arguments = {"vocabulary_size": size, "dim": dim, "name": tf_table.name, "dtype": dtype}
  return config_lib.TableConfig(**arguments | converted | replacements)


def _combiner(combiner: Any, where: str, instead: str) -> str:
  """Returns a combiner that exists here under the same name."""
  if combiner in config_lib.COMBINERS:
    return combiner
  raise ValueError(
    f"The combiner of {where}, {combiner!r}, has no counterpart: {instead}"
    f'{{"combiner": ...}}}} with one of {config_lib.COMBINERS}, or combine the '
    "rows of a sequence feature yourself."
  )


def _refuse_quantization(tf_config: Any, where: str) -> None:
  """Raises ValueError for a quantization config."""
  if tf_config is not None:
    raise ValueError(
      f"Rows of {where} are quantized. Round the rows of a sequence feature yourself, and set "
      "quantization_config to None before."
    )


# --- initializers: of single elements, so that rows can be drawn one by one -----------------------


def _uniform(key, shape, dtype, *, low, high):
  return jax.random.uniform(key, shape, dtype, low, high)


def _normal(key, shape, dtype, *, mean, stddev):
  return mean + stddev * jax.random.normal(key, shape, dtype)


def _truncated_normal(key, shape, dtype, *, mean, stddev):
  """A normal truncated at two of its standard deviations, as in TensorFlow."""
  return mean + stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)


def _constant(key, shape, dtype, *, value):
  del key
  return jax.numpy.full(shape, value, dtype)


def _scaled(initializer: Any, vocabulary_size: int, dim: int) -> Callable[..., Any]:
  """Converts VarianceScaling, whose fans are the rows and columns of the whole table."""
  fans = {"fan_in": vocabulary_size, "fan_out": dim, "fan_avg": (vocabulary_size + dim) / 2}
  variance = initializer.scale / max(1.0, fans[initializer.mode])
  if initializer.distribution == "uniform":
    limit = math.sqrt(3 * variance)
    return functools.partial(_uniform, low=-limit, high=limit)
  if initializer.distribution == "untruncated_normal":
    return functools.partial(_normal, mean=0.0, stddev=math.sqrt(variance))
  # The standard deviation of a standard normal truncated at 2.
  stddev = math.sqrt(variance) / 0.87962566103423978
  return functools.partial(_truncated_normal, mean=0.0, stddev=stddev)


def _initializer(
  initializer: Any, vocabulary_size: int, dim: int, where: str, instead: str
) -> Callable[..., Any] | None:
  """Converts an initializer of TensorFlow or Keras; None is the same default there and here."""
  if initializer is None:
    return None
  kind = type(initializer).__name__
  make: Callable[..., Any]
  if kind == "TruncatedNormal":
    if initializer.mean == 0 and math.isclose(initializer.stddev, 1 / math.sqrt(dim)):
      return None
    make = functools.partial(_truncated_normal, mean=initializer.mean, stddev=initializer.stddev)
  elif kind == "RandomNormal":
    make = functools.partial(_normal, mean=initializer.mean, stddev=initializer.stddev)
  elif kind == "RandomUniform":
    high = 1.0 if initializer.maxval is None else initializer.maxval
    make = functools.partial(_uniform, low=initializer.minval, high=high)
  elif kind in ("Zeros", "Ones", "Constant"):
    value = {"Zeros": 0.0, "Ones": 1.0}.get(kind, getattr(initializer, "value", None))
    if not isinstance(value, numbers.Real):
      raise ValueError(
        f"The initializer of {where} is a constant array: load it with `load_tables`, and "
        f'{instead}{{"initializer": None}}}}.'
      )
    make = functools.partial(_constant, value=float(value))
  elif kind in _SCALED:
    make = _scaled(initializer, vocabulary_size, dim)
  else:
    raise ValueError(
      f"The initializer of {where}, {initializer!r}, has no counterpart: {instead}"
      '{"initializer": f}} with f(key, shape, dtype) as in jax.nn.initializers.'
    )
  return initializers.row_wise(make)


_SCALED = {
  "VarianceScaling",
  *(f"{name}{kind}" for name in ("Glorot", "He", "Lecun") for kind in ("Uniform", "Normal")),
}

# --- optimizers -----------------------------------------------------------------------------------

_ALIASES = {"StochasticGradientDescent": "SGD"}  # of V1, whose classes are named `*Parameters`
_NAMES_IN_V1 = {
  "initial_accumulator_value": "initial_accumulator",
  "beta_1": "beta1",
  "beta_2": "beta2",
}


def _registered_name(kind: str) -> str | None:
  """The name of our optimizer for a class of TensorFlow's, as "sgd" for "SGD"."""
  by_class = {name.replace("_", ""): name for name in named()}
  return by_class.get(_ALIASES.get(kind, kind).lower())


def _optimizer(theirs: Any, where: str, instead: str) -> RowOptimizer | None:
  if theirs is None or isinstance(theirs, RowOptimizer):
    return theirs
  kind = type(theirs).__name__
  name = _registered_name(kind.removesuffix("Parameters"))
  refuse = lambda what, write: ValueError(f"{what} of {where}, a {kind}: {instead}{write}.")
  # Keras has optimizers of the same names with other formulas, without this attribute.
  if name is None or not hasattr(theirs, "use_gradient_accumulation"):
    raise refuse(
      "There is no counterpart",
      "embed.custom_optimizer(update, slots) and the same equation, embed.from_optax(tx),"
      " or one of embed's others",
    )
  if not theirs.use_gradient_accumulation:
    raise refuse(
      "It steps once for each occurrence of an id",
      f"embed.{name}(...), which sums a row's gradients and steps once",
    )
  if not getattr(theirs, "lazy_adam", True):
    raise refuse(
      "It steps every row, looked up or not",
      "embed.adam(...), which steps rows that were looked up",
    )
  if callable(theirs.learning_rate):
    raise refuse(
      "The learning rate is a function without arguments, which a compiled step would read once",
      f"embed.{name}(learning_rate=f), f being a schedule f(step) such as optax's",
    )
  if getattr(theirs, "slot_variable_creation_fn", None) is not None:
    raise refuse(
      "slot_variable_creation_fn has no counterpart",
      f"embed.{name}(slot_init={{name: f(key, shape, dtype)}})",
    )
  if getattr(theirs, "initial_linear_value", 0):
    raise refuse(
      "initial_linear_value is not 0",
      "embed.ftrl(slot_init={'linears': jax.nn.initializers.constant(...)})",
    )
  make, arguments = OPTIMIZERS[name], {}
  for argument in inspect.signature(make).parameters:
    attribute = argument if hasattr(theirs, argument) else _NAMES_IN_V1.get(argument, argument)
    if hasattr(theirs, attribute):
      arguments[argument] = getattr(theirs, attribute)
  clip = tuple(getattr(theirs, f"clip_gradient_{end}", None) for end in ("min", "max"))
  if clip != (None, None):
    arguments["clipvalue"] = clip
  return make(**arguments)


# --- tables and slots -----------------------------------------------------------------------------


def import_variables(
  arrays: Mapping[str, Any],
  layer: SparseEmbed,
  *,
  partition_strategy: str = "div",
  shards: int | None = None,
  slots: bool = True,
) -> dict[str, dict[str, Any]]:
  """Converts tables and slots of a TPUEmbedding to arrays for `layer.load_variables`.

  Args:
    arrays: the rows of each table, named `table` or `table/parameters`, and of its slots, named
      `table/slot`. Each is one array of all rows, or a list with the array of each shard.
    layer: the `SparseEmbed` to load; it determines tables, slots and shapes.
    partition_strategy: the rows of a shard. "div": consecutive rows, one more on each of the first
      `V % n` shards. "mod": row r is on shard `r % n`. Rows of padding are cut; TensorFlow adds
      them if there are fewer rows than shards, and with "mod" at the end of any shard.
    shards: None if the rows of a single array are in order; else the number of shards that are
      concatenated in it, without padding.
    slots: whether to convert slots. Slots of untrained tables are never converted.

  Returns:
    NumPy arrays, rows in order, by table name and then by "parameters" or the name of a slot.

  Raises:
    ValueError: naming each array that is missing, unknown, ambiguous or of another shape, and for
      an invalid `partition_strategy`.

  >>> config = embed.FeatureConfig(embed.TableConfig(3, 1, name="movie"))
  >>> layer = embed.SparseEmbed(config, embed.sgd(), rngs=nnx.Rngs(0))
  >>> halves = [np.array([[0.0], [2.0]]), np.array([[1.0]])]
  >>> variables = embed.import_variables({"movie": halves}, layer, partition_strategy="mod")
  >>> variables["movie"]["parameters"].tolist()
  [[0.0], [1.0], [2.0]]
  >>> layer.load_variables(variables)
  """
  if partition_strategy not in ("div", "mod"):
    raise ValueError(f"Invalid partition_strategy {partition_strategy!r}: write 'div' or 'mod'.")
  structs = {
    (table, key): struct
    for table, by_key in layer.variable_shapes.items()
    for key, struct in by_key.items()
    if slots or key == "parameters"
  }
  names, problems = _find(arrays, layer, list(structs), slots)
  variables: dict[str, dict[str, Any]] = {}
  for (table, key), name in names.items():
    try:
      rows = _in_order(arrays[name], structs[table, key].shape, partition_strategy, shards)
      variables.setdefault(table, {})[key] = rows
    except ValueError as error:
      problems.append(f"{name!r} {error}")
  if problems:
    raise ValueError("These arrays do not fit the layer: " + "; ".join(problems[:10]) + ".")
  return variables


def _find(
  arrays: Mapping[str, Any], layer: SparseEmbed, variables: Sequence[tuple[str, str]], slots: bool
) -> tuple[dict[tuple[str, str], str], list[str]]:
  """The name of the array of each (table, slot), and the problems with other names."""
  name_of, problems = {}, []
  unused = set(arrays)
  for table, key in variables:
    names = [f"{table}/{key}"] + [table] * (key == "parameters")
    present = [name for name in names if name in arrays]
    if not present:
      problems.append(f"{' or '.join(map(repr, names))} is missing")
    elif len(present) > 1:
      problems.append(f"{present[0]!r} and {present[1]!r} are the same table")
    else:
      name_of[table, key] = present[0]
    unused.difference_update(present)
  optimizers_of = layer.spec.optimizers
  is_trained = lambda optimizer: optimizer is not None and optimizer.equation is not None
  for name in sorted(unused):
    table = name.rpartition("/")[0]
    if table not in optimizers_of:
      problems.append(f"{name!r} is not of a table of the layer, {sorted(optimizers_of)}")
    elif slots and is_trained(optimizers_of[table]):
      known = [key for t, key in variables if t == table and key != "parameters"]
      problems.append(f"{name!r} is not a slot of table {table!r}, whose slots are {known}")
  return name_of, problems


def _in_order(array: Any, shape: tuple[int, ...], strategy: str, shards: int | None) -> np.ndarray:
  """All rows of a table or slot, in order."""
  size, row = shape[0], shape[1:]
  if shards is not None and shards < 1:
    raise ValueError(f"cannot be on shards={shards}; write at least 1")
  if isinstance(array, (list, tuple)):
    parts = [np.atleast_1d(np.asarray(part)) for part in array]
    if not parts:
      raise ValueError("has no shards")
    if shards not in (None, len(parts)):
      raise ValueError(f"is a list of {len(parts)} shards, and shards={shards} is given")
  elif shards is None:
    if np.shape(array) != shape:
      raise ValueError(f"has shape {np.shape(array)}, the layer's has {shape}")
    return np.asarray(array)
  else:
    joined = np.asarray(array)
    if joined.shape != shape:
      raise ValueError(f"has shape {joined.shape}, the layer's has {shape}")
    heights = [len(_rows_of(size, shards, s, strategy)) for s in range(shards)]
    parts = np.split(joined, np.cumsum(heights)[:-1])
  result = np.empty(shape, parts[0].dtype)
  for shard, part in enumerate(parts):
    rows = _rows_of(size, len(parts), shard, strategy)
    # TensorFlow pads a table with fewer rows than shards to one row per shard.
    height = len(rows) if strategy == "div" and len(parts) <= size else max(len(rows), len(part))
    if part.shape != (height, *row):
      raise ValueError(
        f"has shape {part.shape} on shard {shard} of {len(parts)}; with {strategy!r} it would be "
        f"{(len(rows), *row)}"
      )
    result[rows] = part[: len(rows)]
  return result


def _rows_of(size: int, shards: int, shard: int, strategy: str) -> np.ndarray:
  """The rows of a shard, in its order."""
  layout = Layout((size,), shards, contiguous=strategy == "div")
  ids = np.asarray(layout.own_ids(0, shard))
  return ids[ids < size]
