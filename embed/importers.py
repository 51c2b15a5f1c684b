"""Importers for TPUEmbedding's configs, tables and slots. TensorFlow is not imported."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from embed import config as config_lib
from embed import initializers, structure
from embed.layer import SparseEmbed
from embed.optimizers import OPTIMIZERS, RowOptimizer, named

Variables = dict[str, dict[str, np.ndarray]]


def _names(names: Iterable[str]) -> str:
  names = sorted(names)
  return ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if names[20:] else "")


# --- TPUEmbedding: configurations ----------------------------------------------------------------
# TensorFlow is not imported: objects of `tf.tpu.experimental.embedding` are recognized by the names
# of their classes and attributes.


class Imported(NamedTuple):
  """The result of `from_tpu_embedding`: the first two arguments of `SparseEmbed`.

  Attributes:
    features: the nesting of the TensorFlow config, with `embed.FeatureConfig` in it.
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
  """Converts the arguments of a TPUEmbedding to arguments of `SparseEmbed`.

  Shared tables stay shared; names and structure are kept. Options that TPUEmbeddingV2 ignores, such
  as clipping, take effect here. Initial values have the same distribution as in TensorFlow, which
  draws them per host, but the numbers differ.

  Args:
    feature_config: any nesting of `tf.tpu.experimental.embedding.FeatureConfig`.
    optimizer: one of `tf.tpu.experimental.embedding`. An `embed.RowOptimizer` is kept.
    replace: `{TensorFlow table name: arguments}`: arguments of `embed.TableConfig` in place of the
      table's own, for settings without a counterpart here.

  Returns:
    An `embed.Imported`, for `embed.SparseEmbed(*imported, rngs=rngs)`.

  Raises:
    ValueError: naming the table and what to write instead, for objects without a counterpart.
  """
  replacements, tables = dict(replace or {}), {}

  def convert(theirs: Any) -> Any:
    if isinstance(theirs, Mapping):  # containers may be TensorFlow's wrappers
      return {key: convert(value) for key, value in theirs.items()}
    if structure.is_namedtuple(theirs):
      return type(theirs)(*map(convert, theirs))
    if isinstance(theirs, (list, tuple)):
      return (tuple if isinstance(theirs, tuple) else list)(map(convert, theirs))
    if not hasattr(theirs, "table"):
      raise ValueError(
        "from_tpu_embedding takes any nesting of dicts, lists, tuples and named tuples of "
        f"tf.tpu.experimental.embedding.FeatureConfig. Got {theirs!r}."
      )
    table, shape = theirs.table, theirs.output_shape
    if table not in tables:
      tables[table] = _table(table, dict(replacements.get(table.name, {})))
    if shape is not None and hasattr(shape, "as_list"):
      shape = None if shape.rank is None else shape.as_list()
    return config_lib.FeatureConfig(
      table=tables[table],
      max_sequence_length=theirs.max_sequence_length,
      validate_weights_and_indices=theirs.validate_weights_and_indices,
      output_shape=shape,
      name=theirs.name,
    )

  features = convert(feature_config)
  names = {table.name for table in tables}
  if unknown := sorted(set(replacements) - names):
    raise ValueError(
      f"replace: there are no tables {unknown}; there are {sorted(map(str, names))}."
    )
  return Imported(features, _optimizer(optimizer, "all tables", "pass optimizer="))


def _table(theirs: Any, replacements: dict[str, Any]) -> config_lib.TableConfig:
  """Converts a table, except for the arguments that are replaced."""
  where, instead = f"table {theirs.name!r}", f"pass replace={{{theirs.name!r}: "
  if getattr(theirs, "quantization_config", None) is not None:
    raise ValueError(
      f"Rows of {where} are quantized. Round the rows of a sequence feature yourself, and set "
      "quantization_config to None before."
    )
  arguments = {
    "vocabulary_size": theirs.vocabulary_size,
    "dim": theirs.dim,
    "name": theirs.name,
    "combiner": theirs.combiner,
    "dtype": getattr(getattr(theirs, "dtype", None), "as_numpy_dtype", np.float32),
  }
  if "optimizer" not in replacements:
    change = instead + '{"optimizer": ...}} with '
    arguments["optimizer"] = _optimizer(theirs.optimizer, where, change)
  if "initializer" not in replacements:
    arguments["initializer"] = _initializer(theirs, where, instead)
  arguments |= replacements
  if arguments["combiner"] not in config_lib.COMBINERS:
    raise ValueError(
      f"The combiner of {where}, {arguments['combiner']!r}, has no counterpart: {instead}"
      f'{{"combiner": ...}}}} with one of {config_lib.COMBINERS}, or combine the '
      "rows of a sequence feature yourself."
    )
  return config_lib.TableConfig(**arguments)


def _initializer(theirs: Any, where: str, instead: str) -> Callable[..., Any] | None:
  """Converts a table's TensorFlow or Keras initializer; returns None for the default of both."""
  dim, initializer = theirs.dim, theirs.initializer
  kind = type(initializer).__name__
  if initializer is None:
    return None
  if kind in ("TruncatedNormal", "RandomNormal"):
    mean, scale = initializer.mean, initializer.stddev
    if kind == "TruncatedNormal" and mean == 0 and math.isclose(scale, 1 / math.sqrt(dim)):
      return None
  elif kind == "RandomUniform":
    low, high = initializer.minval, 1.0 if initializer.maxval is None else initializer.maxval
    mean, scale = (low + high) / 2, (high - low) / 2
  else:
    mean, scale = {"Zeros": 0.0, "Ones": 1.0}.get(kind, getattr(initializer, "value", None)), 0.0
    if not isinstance(mean, numbers.Real):
      raise ValueError(
        f"The initializer of {where}, {initializer!r}, has no counterpart: {instead}"
        '{"initializer": f}} with f(key, shape, dtype) as in jax.nn.initializers. Load a constant '
        "array with `load_tables`."
      )
    kind = "Constant"
  return initializers.row_wise(functools.partial(_draw, kind=kind, mean=mean, scale=scale))


def _draw(key, shape, dtype, *, kind, mean, scale):
  draws = {
    "RandomUniform": lambda: jax.random.uniform(key, shape, dtype, -1.0, 1.0),
    "RandomNormal": lambda: jax.random.normal(key, shape, dtype),
    "TruncatedNormal": lambda: jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype),
    "Constant": lambda: jax.numpy.zeros(shape, dtype),
  }
  return mean + scale * draws[kind]()


def _optimizer(theirs: Any, where: str, instead: str) -> RowOptimizer | None:
  """Converts an optimizer to the registered one of the same name."""
  if theirs is None or isinstance(theirs, RowOptimizer):
    return theirs
  kind = type(theirs).__name__
  name = {name.replace("_", ""): name for name in named()}.get(kind.lower())
  # Keras has optimizers of the same names with other formulas, without this attribute.
  is_known = name is not None and hasattr(theirs, "use_gradient_accumulation")
  get = functools.partial(getattr, theirs)
  refusals = [
    (
      not is_known,
      "has no counterpart",
      "embed.custom_optimizer(update, slots) and the same equation, embed.from_optax(tx), or one "
      "of embed's others",
    ),
    (
      not get("use_gradient_accumulation", True) or not get("lazy_adam", True),
      "steps once for each occurrence of an id, or every row",
      f"embed.{name}(...), which steps the rows that were looked up, once a batch",
    ),
    (
      callable(get("learning_rate", None)),
      "has a learning rate without argument, which a compiled step would read once",
      f"embed.{name}(learning_rate=f), f being a schedule f(step) such as optax's",
    ),
    (
      get("slot_variable_creation_fn", None) is not None,
      "has its own initial values of slots",
      f"embed.{name}(...), and give the layer the slots by `load_variables`",
    ),
  ]
  for is_so, what, write in refusals:
    if is_so:
      raise ValueError(f"The {kind} of {where} {what}: {instead}{write}.")
  make = OPTIMIZERS[str(name)]
  arguments = {name: getattr(theirs, name) for name in make().arguments if hasattr(theirs, name)}
  clip = tuple(getattr(theirs, f"clip_gradient_{end}", None) for end in ("min", "max"))
  if clip != (None, None):
    arguments["clipvalue"] = clip
  return make(**arguments)


# --- TPUEmbedding: tables and slots --------------------------------------------------------------


def import_variables(
  arrays: Mapping[str, Any],
  layer: SparseEmbed,
  *,
  partition_strategy: str = "div",
  slots: bool = True,
) -> Variables:
  """Converts tables and slots of a TPUEmbedding to arrays for `layer.load_variables`.

  Args:
    arrays: the rows of each table, named `table` or `table/parameters`, and of its slots, named
      `table/slot`. Each is one array with the rows in order, or a list of arrays, one per shard;
      `numpy.array_split(array, n)` splits an array of n concatenated shards.
    layer: the `SparseEmbed` to load; it determines tables, slots and shapes.
    partition_strategy: the split of V rows over n shards. "div": consecutive rows, one more on each
      of the first `V % n` shards. "mod": row r is on shard `r % n`. Padding rows at the end of a
      shard are dropped; TensorFlow adds them with "mod", or if there are fewer rows than shards.
    slots: whether to convert slots.

  Returns:
    NumPy arrays, rows in order, by table name and then by "parameters" or the name of a slot.

  Raises:
    ValueError: naming the arrays that are missing, unknown, given twice or of another shape.

  >>> config = embed.FeatureConfig(embed.TableConfig(3, 1, name="movie"))
  >>> layer = embed.SparseEmbed(config, embed.sgd(), rngs=nnx.Rngs(0))
  >>> halves = [np.array([[0.0], [2.0]]), np.array([[1.0]])]
  >>> variables = embed.import_variables({"movie": halves}, layer, partition_strategy="mod")
  >>> variables["movie"]["parameters"].tolist()
  [[0.0], [1.0], [2.0]]
  """
  is_strategy = partition_strategy in ("div", "mod")
  config_lib.check("partition_strategy", partition_strategy, is_strategy, "'div' or 'mod'")
  shapes = {
    f"{table}/{key}": struct.shape
    for table, by_key in layer.variable_shapes.items()
    for key, struct in by_key.items()
    if slots or key == "parameters"
  }
  variables: Variables = {table: {} for table in layer.variable_shapes}
  unknown = []
  for given, array in arrays.items():
    name = f"{given}/parameters" if given in variables else given
    table, _, key = name.rpartition("/")
    if name not in shapes or key in variables[table]:
      if slots or table not in variables:
        unknown.append(given)
      continue
    try:
      variables[table][key] = _in_order(array, shapes[name], partition_strategy)
    except ValueError as error:
      raise ValueError(f"{given!r} {error}.") from None
  missing = [x for x in shapes if x.rpartition("/")[2] not in variables[x.rpartition("/")[0]]]
  if unknown or missing:
    raise ValueError(
      f"The layer's arrays are {_names(shapes)}. Missing: {_names(missing) or 'none'}; unknown, or "
      f"given twice: {_names(unknown) or 'none'}."
    )
  return variables


def _in_order(array: Any, shape: tuple[int, ...], strategy: str) -> np.ndarray:
  """Returns all rows of a table or slot, in order."""
  if not isinstance(array, (list, tuple)):
    if np.shape(array) != shape:
      raise ValueError(f"has shape {np.shape(array)}, the layer's has {shape}")
    return np.asarray(array)
  size, shards = shape[0], len(array)
  if not shards:
    raise ValueError("has no shards")
  if strategy == "mod":
    rows_of = [np.arange(shard, size, shards) for shard in range(shards)]
  else:
    rows_of = np.array_split(np.arange(size), shards)
  parts = list(map(np.asarray, array))
  may_have_padding = strategy == "mod" or shards > size
  result = np.empty(shape, parts[0].dtype)
  for shard, (rows, part) in enumerate(zip(rows_of, parts, strict=True)):
    extra = part.shape[0] - len(rows) if part.ndim == len(shape) else -1
    if part.shape[1:] != shape[1:] or extra < 0 or (extra and not may_have_padding):
      raise ValueError(
        f"has shape {part.shape} on shard {shard} of {shards}; with {strategy!r} it would be "
        f"{(len(rows), *shape[1:])}"
      )
    result[rows] = part[: len(rows)]
  return result
