"""What a user declares: tables, features, and any nesting of features.

Plain Python, no JAX: a config can be built, pickled and validated in an input worker. Argument
names and defaults are those of ``tf.tpu.experimental.embedding``.
"""

import collections
import dataclasses
import logging
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

COMBINERS = ("mean", "sum", "sqrtn")
MAX_VOCABULARY_SIZE = 2**31 - 2  # row ids are int32 and `vocabulary_size` itself marks padding

_logger = logging.getLogger("embed")


def _integer(name: str, value: Any, minimum: int) -> int:
  """`value` as an int; anything with `__index__` is accepted (NumPy integers too), bool is not."""
  try:
    if isinstance(value, (bool, np.bool_)):
      raise TypeError
    result = operator.index(value)
  except TypeError:
    result = minimum - 1
  if result < minimum:
    raise ValueError(f"Argument `{name}` must be an int and must be >= {minimum}. Got {value!r}.")
  return result


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
  """Simulated quantization of looked-up rows, before the combiner; the gradient passes straight.

  `x = clip(x, lower, upper)`, then the nearest of `num_buckets` evenly spaced values, halves
  rounding up. Tables, slots and checkpoints stay in float.

  Args:
    num_buckets: how many values a quantized element can take, at least 2.
    lower: the smallest of them.
    upper: the largest of them.

  Raises:
    ValueError: for fewer than 2 buckets, or bounds that are not in order.

  >>> coarse = embed.QuantizationConfig(num_buckets=3, lower=-1.0, upper=1.0)  # -1, 0 or 1
  >>> config = embed.FeatureConfig(embed.TableConfig(1, 3, name="t", quantization_config=coarse))
  >>> layer = embed.SparseEmbed(config, rngs=nnx.Rngs(0))
  >>> layer.load_tables({"t": np.array([[0.2, 0.6, 7.0]])})
  >>> layer(np.array([0])).tolist()
  [[0.0, 1.0, 1.0]]
  """

  num_buckets: int
  lower: float
  upper: float

  def __post_init__(self):
    if self.num_buckets < 2:
      raise ValueError(
        f"num_buckets is {self.num_buckets}, must be at least 2 for simulated quantization."
      )
    if not self.lower < self.upper:
      raise ValueError(f"lower is {self.lower}, which must be less than upper, {self.upper}.")


@dataclasses.dataclass(frozen=True, eq=False)
class CustomCombiner:
  """A combiner of one's own, with weights that it learns if it wants some.

  Args:
    computation: `f(valency, vectors, weights)` of one bag: the number of its ids, an int32 scalar;
      their rows float32 `[max_valency, dim]` in the order given, times the user's weights if there
      are some, zeros from `valency` on; and the learned weights float32 `[num_weights]`. Returns
      `[dim]`. In JAX operations: it is differentiated, and mapped over the batch. It never sees an
      empty bag, which gives zeros; a dense array is bags of one id; sequences are not combined.
    max_valency: the longest bag. Eager calls raise for a longer one; under jit the ids that do not
      fit are dropped and counted.
    num_weights: how many learned weights there are.
    initializer: of these, `f(key, shape, dtype)`.
    combiner_weights_learning_rate: they are trained by gradient descent at this rate, whatever the
      dense optimizer is. None makes each an ordinary `nnx.Param`, for the dense optimizer.

  Raises:
    ValueError: naming the argument that is wrong.

  Learned weights by position in the bag:

  >>> by_position = embed.CustomCombiner(
  ...   lambda valency, vectors, weights: weights @ vectors,
  ...   max_valency=8, num_weights=8, initializer=jax.nn.initializers.ones)
  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, combiner=by_position, name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> layer(embed.Padded([[3, 7, 7], [5, -1, -1]])).shape
  (2, 4)
  """

  computation: Callable[..., Any]
  max_valency: int
  num_weights: int = 0
  initializer: Callable[..., Any] | None = None
  combiner_weights_learning_rate: float | None = 0.01

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    if not callable(self.computation):
      raise ValueError(
        "Argument `computation` must be a callable f(valency, vectors, weights). "
        f"Got {self.computation!r}."
      )
    set_("max_valency", _integer("max_valency", self.max_valency, 1))
    set_("num_weights", _integer("num_weights", self.num_weights, 0))
    if self.num_weights and not callable(self.initializer):
      raise ValueError(
        f"num_weights is {self.num_weights}, so `initializer` must be a callable "
        f"f(key, shape, dtype). Got {self.initializer!r}."
      )
    rate = self.combiner_weights_learning_rate
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, numbers.Real)):
      raise ValueError(
        f"Argument `combiner_weights_learning_rate` must be a number or None. Got {rate!r}."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class TableConfig:
  """One embedding table. Compared by identity: share a table by passing the same object.

  It takes `vocabulary_size * dim` times 4 bytes, 2 in bfloat16, and its optimizer's slots besides.

  Args:
    vocabulary_size: number of rows, V. Ids are 0 .. V - 1.
    dim: length of a row, D.
    initializer: `f(key, shape, dtype)` as in `jax.nn.initializers`, called with `(V, D)`. None is
      a normal of standard deviation `1 / sqrt(dim)` cut at two standard deviations, drawn per row.
    optimizer: this table's optimizer, such as `embed.adagrad(0.05)`; replaces the default given
      to `SparseEmbed` completely. None takes that default.
    combiner: how a bag becomes one vector: "mean" (weighted, divides by the sum of weights),
      "sum", "sqrtn" (divides by the root of the sum of squared weights), or a `CustomCombiner`.
    name: the key in `tables`, `variables` and checkpoints. None becomes `table_{i}`, the position
      by first use among the features.
    quantization_config: a `QuantizationConfig`, or None.
    dtype: storage of the rows, float32 or bfloat16; sums and slots are float32. (On CPU, XLA
      updates a bfloat16 table by way of a float32 copy of it.)
    stochastic_rounding: whether new bfloat16 rows are rounded up or down at random, right on
      average, rather than to the nearest, which loses small steps (Gupta et al. 2015,
      arXiv:1502.02551). A row may pass `clip_weight_max` by as much as it was rounded.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> movie = embed.TableConfig(
  ...   vocabulary_size=60_000, dim=64, optimizer=embed.adagrad(0.05), name="movie")
  >>> movie.combiner, movie.dtype
  ('mean', dtype('float32'))
  """

  vocabulary_size: int
  dim: int
  initializer: Callable[..., Any] | None = None
  optimizer: Any = None
  combiner: str | CustomCombiner = "mean"
  name: str | None = None
  quantization_config: QuantizationConfig | None = None
  dtype: Any = np.float32
  stochastic_rounding: bool = True

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    set_("vocabulary_size", _integer("vocabulary_size", self.vocabulary_size, 1))
    set_("dim", _integer("dim", self.dim, 1))
    if self.vocabulary_size > MAX_VOCABULARY_SIZE:
      raise ValueError(
        f"Argument `vocabulary_size` must be at most {MAX_VOCABULARY_SIZE}: row ids are int32. "
        f"Got {self.vocabulary_size}; split the table, or hash its ids into fewer rows."
      )
    if self.initializer is not None and not callable(self.initializer):
      raise ValueError(
        "Argument `initializer` must be a callable f(key, shape, dtype) (or None). "
        f"Got {self.initializer!r}."
      )
    if not isinstance(self.combiner, CustomCombiner) and self.combiner not in COMBINERS:
      raise ValueError(
        f"Argument `combiner` must be one of {COMBINERS}, or an embed.CustomCombiner. "
        f"Got {self.combiner!r}."
      )
    if self.name is not None and (not isinstance(self.name, str) or not self.name):
      raise ValueError(f"Argument `name` must be a non-empty str or None. Got {self.name!r}.")
    if self.quantization_config is not None and not isinstance(
      self.quantization_config, QuantizationConfig
    ):
      raise ValueError(
        "Argument `quantization_config` must be an embed.QuantizationConfig or None. "
        f"Got {self.quantization_config!r}."
      )
    try:
      dtype = np.dtype(self.dtype)
    except TypeError:
      dtype = None
    if dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
      raise ValueError(f"Argument `dtype` must be float32 or bfloat16. Got {self.dtype!r}.")
    set_("dtype", dtype)
    if not isinstance(self.stochastic_rounding, bool):
      raise ValueError(
        f"Argument `stochastic_rounding` must be a bool. Got {self.stochastic_rounding!r}."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureConfig:
  """One input and the table it reads.

  Args:
    table: the `TableConfig`; several features may share one.
    max_sequence_length: 0 combines the ids of an example into one vector. L > 0 keeps the first L
      ids apart, output `[batch, L, dim]`, zeros where there is no id; it applies to bags of rank
      2 and is ignored (with a log message) for higher ranks or where `output_shape` is given.
    validate_weights_and_indices: whether eager calls and `embed.validate` raise for ids out of
      range; without it, such ids are dropped and counted, as they are under jit.
    output_shape: the shape of the activations without `dim`; entries may be None. It is checked,
      and a flat batch of bags is reshaped to it.
    name: a label used in error messages.
    differentiate_weights: whether the user's weights get a gradient. It costs a vector per id
      instead of one per bag, and wants bags of known length: anything but a `Ragged` without
      max_valency. Without it weights are constants.

  Raises:
    ValueError: naming the argument that is wrong.
    TypeError: if `output_shape` is not a shape.

  >>> movie = embed.TableConfig(100, 4, name="movie")
  >>> features = {
  ...   "watched": embed.FeatureConfig(movie),
  ...   "history": embed.FeatureConfig(movie, max_sequence_length=5),
  ... }
  >>> layer, ids = embed.SparseEmbed(features, rngs=nnx.Rngs(0)), embed.Padded([[3, 7]])
  >>> {name: x.shape for name, x in layer({"watched": ids, "history": ids}).items()}
  {'watched': (1, 4), 'history': (1, 5, 4)}
  """

  table: TableConfig
  max_sequence_length: int = 0
  validate_weights_and_indices: bool = True
  output_shape: Sequence[int | None] | None = None
  name: str | None = None
  differentiate_weights: bool = False

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    if not isinstance(self.table, TableConfig):
      raise ValueError(
        f"Argument `table` has invalid type {type(self.table)}. Expected embed.TableConfig."
      )
    set_("max_sequence_length", _integer("max_sequence_length", self.max_sequence_length, 0))
    for name in ("validate_weights_and_indices", "differentiate_weights"):
      if not isinstance(getattr(self, name), bool):
        raise ValueError(f"Argument `{name}` must be a bool. Got {getattr(self, name)!r}.")
    if self.output_shape is not None:
      set_("output_shape", _shape(self.output_shape))
      if self.max_sequence_length:
        _logger.warning("max_sequence_length is ignored where output_shape is given: %r", self)


def _shape(value: Any) -> tuple[int | None, ...]:
  try:
    dims = [value] if isinstance(value, int) else list(value)
    return tuple(None if d is None else operator.index(d) for d in dims)
  except TypeError:
    raise TypeError(
      f"Argument `output_shape` must be a sequence of ints (or None entries). Got {value!r}."
    ) from None


# --- nested structures ---------------------------------------------------------------------------
# The structure is that of the feature config, walked explicitly: `jax.tree` would keep an
# OrderedDict's insertion order, lose None leaves, and raise one error type for two mistakes.

Path = tuple[str, ...]


def is_namedtuple(value: Any) -> bool:
  return isinstance(value, tuple) and hasattr(value, "_fields")


def _children(config: Any) -> list[tuple[str, Any]]:
  """The (key, child) pairs of a container, dict keys sorted."""
  if isinstance(config, Mapping):
    return [(str(key), config[key]) for key in sorted(config)]
  if is_namedtuple(config):
    return list(zip(config._fields, config, strict=True))
  if isinstance(config, (list, tuple)):
    return [(str(i), child) for i, child in enumerate(config)]
  raise ValueError(
    "A feature config is any nesting of dicts, lists, tuples and named tuples of "
    f"embed.FeatureConfig. Found {config!r}."
  )


def flatten_features(config: Any, path: Path = ()) -> Iterator[tuple[Path, FeatureConfig]]:
  """The features of a nested config in order: dict keys sorted, sequences as they stand."""
  if isinstance(config, FeatureConfig):
    yield path, config
    return
  for key, child in _children(config):
    yield from flatten_features(child, (*path, key))


def feature_name(path: Path, feature: FeatureConfig | None = None) -> str:
  """How errors name a feature: its own name, or its path in the config ("a/0")."""
  return (feature.name if feature is not None else None) or "/".join(path) or "<the feature>"


def match(
  config: Any, values: Any, what: str, path: Path = (), *, none_allowed: bool = True
) -> Iterator[tuple[Path, Any]]:
  """Pairs each feature's path with its entry of `values`, which has the structure of `config`.

  A dict may hold any subset of the keys. With `none_allowed`, None may stand for a container.

  Raises:
    TypeError: where the kinds of containers differ.
    ValueError: where their sizes or keys differ.
  """
  if isinstance(config, FeatureConfig):
    yield path, values
    return
  where = f" at {'/'.join(path)!r}" if path else ""
  if values is None and none_allowed:
    return
  if isinstance(config, Mapping):
    if not isinstance(values, Mapping):
      raise TypeError(f"{what}{where}: expected a dict like the feature config, got {type(values)}")
    unknown = sorted(str(key) for key in values if key not in config)
    if unknown:
      raise ValueError(
        f"{what}{where}: unknown features {unknown}; the feature config has "
        f"{sorted(map(str, config))}. Pass those alone."
      )
    for key in sorted(values):
      inner = (*path, str(key))
      yield from match(config[key], values[key], what, inner, none_allowed=none_allowed)
    return
  kind = type(config)
  if type(values) is not kind:
    raise TypeError(
      f"{what}{where}: expected a {kind.__name__} like the feature config, got "
      f"{type(values).__name__}."
    )
  if len(values) != len(config):
    raise ValueError(
      f"{what}{where}: expected {len(config)} entries like the feature config, got {len(values)}."
    )
  for (key, child), value in zip(_children(config), values, strict=True):
    yield from match(child, value, what, (*path, key), none_allowed=none_allowed)


def pack(config: Any, like: Any, flat: Mapping[Path, Any], path: Path = ()) -> Any:
  """The entries of `flat`, by feature path, in the containers of `like` (those the user gave)."""
  if isinstance(config, FeatureConfig):
    return flat[path]
  if isinstance(config, Mapping):
    return {key: pack(config[key], like[key], flat, (*path, str(key))) for key in like}
  packed = [
    pack(child, value, flat, (*path, key))
    for (key, child), value in zip(_children(config), like, strict=True)
  ]
  return type(config)(*packed) if is_namedtuple(config) else type(config)(packed)


def name_tables(config: Any) -> dict[str, TableConfig]:
  """Every table by name, in the order of first use; unnamed ones become `table_{position}`.

  Raises:
    ValueError: if there is no feature, or if two tables have one name.
  """
  features = list(flatten_features(config))
  paths = collections.Counter("/".join(path) for path, _ in features)
  if paths and max(paths.values()) > 1:
    raise ValueError(f"Two features have one path, {max(paths, key=lambda p: paths[p])!r}.")
  tables = list(dict.fromkeys(feature.table for _, feature in features))
  if not tables:
    raise ValueError("The feature config holds no embed.FeatureConfig.")
  names = [table.name or f"table_{i}" for i, table in enumerate(tables)]
  for name, count in collections.Counter(names).items():
    if count > 1:
      raise ValueError(f"Tables must have a unique name. Multiple tables with name {name} found.")
  return dict(zip(names, tables, strict=True))
