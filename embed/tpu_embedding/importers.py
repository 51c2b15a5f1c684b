"""From TensorFlow's TPUEmbedding: its configuration objects, and its tables and slots as arrays.

TensorFlow is not imported: its objects are known by the names of their classes and attributes,
those of `tf.tpu.experimental.embedding` and of the parameter classes of `tf.compat.v1.tpu`.
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
from embed.engine.layout import Layout
from embed.layer import SparseEmbed
from embed.row_optimizer import OPTIMIZERS, RowOptimizer, named

# --- configurations -------------------------------------------------------------------------------


class Imported(NamedTuple):
  """What `from_tpu_embedding` returns: the first two arguments of `SparseEmbed`.

  Attributes:
    features: the containers of TensorFlow with `embed.FeatureConfig` in them.
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
  """The arguments of a TPUEmbedding as those of `SparseEmbed`.

  Tables shared by identity stay shared, names and structure stay. Options that TPUEmbeddingV2
  ignores, such as clipping, take effect here. TensorFlow draws initial values per host, so they are
  of the same distribution and not the same.

  Args:
    feature_config: any nesting of `tf.tpu.experimental.embedding.FeatureConfig`.
    optimizer: of `tf.tpu.experimental.embedding`, such as `Adagrad`, or one of the `*Parameters` of
      `tf.compat.v1.tpu.experimental`. One of ours is taken as it is.
    replace: by the name of a TensorFlow table, arguments of our `TableConfig` to be used instead of
      what that table has: for what has no counterpart here.

  Returns:
    An `embed.Imported`, for `embed.SparseEmbed(*imported, rngs=rngs)`.

  Raises:
    ValueError: naming the table and saying what to write instead, for what has no counterpart
      (custom optimizers and combiners, initializers that are functions, learning rates without
      argument) and for tables in `replace` that there are not.

  >>> class TableConfig:  # stands for TensorFlow's
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
  given = dict(replace or {})
  tables: dict[int, config_lib.TableConfig] = {}
  names = set()

  def table_of(theirs: Any) -> config_lib.TableConfig:
    if id(theirs) not in tables:
      names.add(theirs.name)
      tables[id(theirs)] = _table(theirs, dict(given.get(theirs.name, {})))
    return tables[id(theirs)]

  features = _features(feature_config, table_of)
  unknown = sorted(set(given) - names)
  if unknown:
    raise ValueError(
      f"replace: there are no tables {unknown}; there are {sorted(map(str, names))}."
    )
  return Imported(features, _optimizer(optimizer, "the default optimizer", "pass optimizer="))


def _features(theirs: Any, table_of: Callable[[Any], config_lib.TableConfig]) -> Any:
  """The containers of TensorFlow, which wraps some of them, with our features in them."""
  inner = functools.partial(_features, table_of=table_of)
  if isinstance(theirs, Mapping):
    return {key: inner(value) for key, value in theirs.items()}
  if structure.is_namedtuple(theirs):
    return type(theirs)(*map(inner, theirs))
  if isinstance(theirs, (list, tuple)):
    return (tuple if isinstance(theirs, tuple) else list)(map(inner, theirs))
  if hasattr(theirs, "table"):
    return config_lib.FeatureConfig(
      table=table_of(theirs.table),
      max_sequence_length=theirs.max_sequence_length,
      validate_weights_and_indices=theirs.validate_weights_and_indices,
      output_shape=_shape(theirs.output_shape),
      name=theirs.name,
    )
  raise ValueError(
    "from_tpu_embedding takes any nesting of dicts, lists, tuples and named tuples of "
    f"tf.tpu.experimental.embedding.FeatureConfig. Found {theirs!r}."
  )


def _shape(theirs: Any) -> list[int | None] | None:
  """A TensorShape as a list; one of unknown rank is None."""
  if theirs is None or getattr(theirs, "rank", 0) is None:
    return None
  return theirs.as_list() if hasattr(theirs, "as_list") else list(theirs)


def _table(theirs: Any, given: dict[str, Any]) -> config_lib.TableConfig:
  where, instead = f"table {theirs.name!r}", f"pass replace={{{theirs.name!r}: "
  convert = {
    "optimizer": lambda x: _optimizer(x, where, instead + '{"optimizer": ...}} with '),
    "initializer": lambda x: _initializer(x, theirs.vocabulary_size, theirs.dim, where, instead),
    "combiner": lambda x: _combiner(x, where, instead),
    "quantization_config": _quantization,
  }
  arguments = {
    key: given[key] if key in given else f(getattr(theirs, key, None)) for key, f in convert.items()
  }
  mine = {"vocabulary_size": theirs.vocabulary_size, "dim": theirs.dim, "name": theirs.name}
  dtype = getattr(getattr(theirs, "dtype", None), "as_numpy_dtype", np.float32)
  return config_lib.TableConfig(**mine | {"dtype": dtype} | arguments | given)


def _combiner(theirs: Any, where: str, instead: str) -> str:
  if theirs in config_lib.COMBINERS:
    return theirs
  raise ValueError(
    f"The combiner of {where}, {theirs!r}, has no counterpart: {instead}"
    f'{{"combiner": ...}}}} with one of {config_lib.COMBINERS}, or an embed.CustomCombiner with '
    "the same computation in JAX."
  )


def _quantization(theirs: Any) -> config_lib.QuantizationConfig | None:
  if theirs is None:
    return None
  return config_lib.QuantizationConfig(theirs.num_buckets, theirs.lower, theirs.upper)


# --- initializers: an element's distribution, so that rows can be drawn one by one ----------------


def _uniform(key, shape, dtype, *, low, high):
  return jax.random.uniform(key, shape, dtype, low, high)


def _normal(key, shape, dtype, *, mean, stddev):
  return mean + stddev * jax.random.normal(key, shape, dtype)


def _truncated_normal(key, shape, dtype, *, mean, stddev):
  """Cut at two standard deviations of the normal before the cut, as TensorFlow's."""
  return mean + stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)


def _constant(key, shape, dtype, *, value):
  del key
  return jax.numpy.full(shape, value, dtype)


def _scaled(theirs: Any, vocabulary_size: int, dim: int) -> Callable[..., Any]:
  """VarianceScaling, whose fans are the rows and columns of the whole table."""
  fans = {"fan_in": vocabulary_size, "fan_out": dim, "fan_avg": (vocabulary_size + dim) / 2}
  variance = theirs.scale / max(1.0, fans[theirs.mode])
  if theirs.distribution == "uniform":
    limit = math.sqrt(3 * variance)
    return functools.partial(_uniform, low=-limit, high=limit)
  if theirs.distribution == "untruncated_normal":
    return functools.partial(_normal, mean=0.0, stddev=math.sqrt(variance))
  # The deviation of a standard normal cut at two.
  stddev = math.sqrt(variance) / 0.87962566103423978
  return functools.partial(_truncated_normal, mean=0.0, stddev=stddev)


def _initializer(
  theirs: Any, vocabulary_size: int, dim: int, where: str, instead: str
) -> Callable[..., Any] | None:
  """Ours of TensorFlow's or Keras' initializer object; None is the default of both."""
  if theirs is None:
    return None
  kind = type(theirs).__name__
  make: Callable[..., Any]
  if kind == "TruncatedNormal":
    if theirs.mean == 0 and math.isclose(theirs.stddev, 1 / math.sqrt(dim)):
      return None
    make = functools.partial(_truncated_normal, mean=theirs.mean, stddev=theirs.stddev)
  elif kind == "RandomNormal":
    make = functools.partial(_normal, mean=theirs.mean, stddev=theirs.stddev)
  elif kind == "RandomUniform":
    high = 1.0 if theirs.maxval is None else theirs.maxval
    make = functools.partial(_uniform, low=theirs.minval, high=high)
  elif kind in ("Zeros", "Ones", "Constant"):
    value = {"Zeros": 0.0, "Ones": 1.0}.get(kind, getattr(theirs, "value", None))
    if not isinstance(value, numbers.Real):
      raise ValueError(
        f"The initializer of {where} is a constant array: load it with `load_tables`, and "
        f'{instead}{{"initializer": None}}}}.'
      )
    make = functools.partial(_constant, value=float(value))
  elif kind in _SCALED:
    make = _scaled(theirs, vocabulary_size, dim)
  else:
    raise ValueError(
      f"The initializer of {where}, {theirs!r}, has no counterpart: {instead}"
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
  """The name of our optimizer for a class of TensorFlow's: "rmsprop" for "RMSProp"."""
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
      "embed.custom_optimizer(update, slots) and the same equation, or one of embed's others",
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
  """Tables and slots of a TPUEmbedding, read as arrays, as `layer.load_variables` takes them.

  Args:
    arrays: the rows by table, named `table` or `table/parameters`, and its slots, named
      `table/slot`. Each is an array of all rows, or a list of the arrays of the shards.
    layer: the `SparseEmbed` they are for, which knows tables, slots and shapes.
    partition_strategy: which rows a shard has. "div": consecutive ones, the first `V % n` shards
      one more than the others. "mod": row r is on shard `r % n`. Rows of padding, which TensorFlow
      adds where there are fewer rows than shards, and in "mod" at the end of any shard, are cut.
    shards: None means that the rows of a single array are in order. A number means that it is the
      shards in a row, that many, without padding.
    slots: whether slots are wanted. They never are for tables that are not trained.

  Returns:
    NumPy arrays, rows in order, by table name and then by "parameters" or the name of a slot.

  Raises:
    ValueError: naming what is missing, what no table or slot of the layer is, what there is twice,
      what has another shape, and for another `partition_strategy`.

  >>> config = embed.FeatureConfig(embed.TableConfig(3, 1, name="movie"))
  >>> layer = embed.SparseEmbed(config, embed.sgd(), rngs=nnx.Rngs(0))
  >>> halves = [np.array([[0.0], [2.0]]), np.array([[1.0]])]
  >>> found = embed.import_variables({"movie": halves}, layer, partition_strategy="mod")
  >>> found["movie"]["parameters"].tolist()
  [[0.0], [1.0], [2.0]]
  >>> layer.load_variables(found)
  """
  if partition_strategy not in ("div", "mod"):
    raise ValueError(f"Invalid partition_strategy {partition_strategy!r}: write 'div' or 'mod'.")
  wanted = {
    (table, key): shape
    for table, shapes in layer.variable_shapes.items()
    for key, shape in shapes.items()
    if slots or key == "parameters"
  }
  names, problems = _find(arrays, layer, list(wanted), slots)
  found: dict[str, dict[str, Any]] = {}
  for (table, key), name in names.items():
    try:
      rows = _in_order(arrays[name], wanted[table, key].shape, partition_strategy, shards)
      found.setdefault(table, {})[key] = rows
    except ValueError as error:
      problems.append(f"{name!r} {error}")
  if problems:
    raise ValueError("These arrays do not fit the layer: " + "; ".join(problems[:10]) + ".")
  return found


def _find(
  arrays: Mapping[str, Any], layer: SparseEmbed, wanted: Sequence[tuple[str, str]], slots: bool
) -> tuple[dict[tuple[str, str], str], list[str]]:
  """The array of each table and slot that is wanted, and what is wrong with the names."""
  found, problems = {}, []
  left = set(arrays)
  for table, key in wanted:
    names = [f"{table}/{key}"] + [table] * (key == "parameters")
    there = [name for name in names if name in arrays]
    if not there:
      problems.append(f"{' or '.join(map(repr, names))} is missing")
    elif len(there) > 1:
      problems.append(f"{there[0]!r} and {there[1]!r} are the same table")
    else:
      found[table, key] = there[0]
    left.difference_update(there)
  idle = layer.spec.optimizers
  trained = {t for t, o in idle.items() if slots and o is not None and o.equation is not None}
  for name in sorted(left):
    table = name.rpartition("/")[0]
    if table not in idle:
      problems.append(f"{name!r} is of no table of the layer, {sorted(idle)}")
    elif table in trained:
      known = [key for t, key in wanted if t == table and key != "parameters"]
      problems.append(f"{name!r} is no slot of table {table!r}, whose slots are {known}")
  return found, problems


def _in_order(given: Any, shape: tuple[int, ...], strategy: str, shards: int | None) -> np.ndarray:
  """All rows of a table or slot, in order."""
  size, row = shape[0], shape[1:]
  if shards is not None and shards < 1:
    raise ValueError(f"cannot be on shards={shards}; write at least 1")
  if isinstance(given, (list, tuple)):
    parts = [np.atleast_1d(np.asarray(part)) for part in given]
    if not parts:
      raise ValueError("has no shards")
    if shards not in (None, len(parts)):
      raise ValueError(f"is a list of {len(parts)} shards, and shards={shards} is given")
  elif shards is None:
    if np.shape(given) != shape:
      raise ValueError(f"has shape {np.shape(given)}, the layer's has {shape}")
    return np.asarray(given)
  else:
    whole = np.asarray(given)
    if whole.shape != shape:
      raise ValueError(f"has shape {whole.shape}, the layer's has {shape}")
    heights = [len(_rows_of(size, shards, s, strategy)) for s in range(shards)]
    parts = np.split(whole, np.cumsum(heights)[:-1])
  result = np.empty(shape, parts[0].dtype)
  for shard, part in enumerate(parts):
    rows = _rows_of(size, len(parts), shard, strategy)
    # Padded to a row per shard, TensorFlow's tables have one on each.
    height = len(rows) if strategy == "div" and len(parts) <= size else max(len(rows), len(part))
    if part.shape != (height, *row):
      raise ValueError(
        f"has shape {part.shape} on shard {shard} of {len(parts)}, by {strategy!r} it would have "
        f"{(len(rows), *row)}"
      )
    result[rows] = part[: len(rows)]
  return result


def _rows_of(size: int, shards: int, shard: int, strategy: str) -> np.ndarray:
  """The rows of a shard, in the order in which they stand there."""
  layout = Layout((size,), shards, contiguous=strategy == "div")
  ids = np.asarray(layout.own_ids(0, shard))
  return ids[ids < size]
