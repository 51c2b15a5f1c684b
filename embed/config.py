"""Configs of tables and features.

Plain Python without JAX, so that an input worker can build, pickle and validate them. Argument
names and defaults follow ``tf.tpu.experimental.embedding``.
"""

import contextlib
import dataclasses
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

COMBINERS = ("mean", "sum", "sqrtn")
EVICTIONS = ("lru", "lfu")
MAX_VOCABULARY_SIZE = 2**31 - 2  # row ids are int32, and `vocabulary_size` itself can mark padding

_logger = logging.getLogger("embed")


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
  """Returns a value with `__index__`, such as a NumPy integer, as an int; checks its bounds."""
  try:
    if isinstance(value, (bool, np.bool_)):
      raise TypeError
    result = operator.index(value)
  except TypeError:
    result = minimum - 1
  if result < minimum or (maximum is not None and result > maximum):
    bounds = f" in {minimum} .. {maximum}" if maximum is not None else f" and must be >= {minimum}"
    raise ValueError(f"Argument `{name}` must be an int{bounds}. Got {value!r}.")
  return result


def check(name: str, value: Any, is_valid: bool, expected: str) -> None:
  """Raises a ValueError that names an argument unless its value is valid."""
  if not is_valid:
    raise ValueError(f"Argument `{name}` must be {expected}. Got {value!r}.")


def setting(name: str, value: Any) -> Any:
  """Converts a NumPy or JAX scalar to a Python number; returns other settings as they are.

  Settings are compared and hashed by value, which arrays cannot be.

  >>> setting("upper", np.float32(0.5))
  0.5
  """
  if type(value) in (tuple, list):
    return type(value)(setting(name, x) for x in value)
  if isinstance(value, dict):
    return {key: setting(f"{name}[{key!r}]", x) for key, x in value.items()}
  if not hasattr(value, "item"):
    return value
  if not np.ndim(value):
    with contextlib.suppress(TypeError):  # from a traced value
      return value.item()
  raise ValueError(
    f"{name} must be one number that is known when the config is made. Got {value!r}. "
    "Write float(x) outside of jit; rates may be functions of the step."
  )


@dataclasses.dataclass(frozen=True)
class DynamicVocabulary:
  """A vocabulary learned during training: a fixed number of rows, given to raw 64-bit ids.

  Pass it to `TableConfig` in place of a size. The ids of the table's features are then raw ids (see
  `embed.raw_ids`), and `SparseEmbed.admit` or `translate` maps them to rows before a lookup. Rows
  lie in buckets of `bucket_width`; a raw id hashes to one bucket, and a new one takes the row there
  that the policy values least. Two raw ids never share a row. The result is the same on every mesh,
  and depends on the batches alone.

  Raw ids and scores take 12 bytes per row, 16 with "lfu". On a mesh, they are split as the rows are
  if the number of buckets divides evenly; otherwise every device holds them all.

  Args:
    capacity: the number of rows, a multiple of `bucket_width`.
    eviction: "lru" evicts the least recently used row of a bucket, "lfu" the least frequently used.
    half_life: the number of batches after which the counts of "lfu" halve. None never halves them.
    time_to_live: rows unused for this many batches are freed. None keeps rows until they are
      needed.
    bucket_width: rows per bucket, at most 256. Wider buckets follow the policy better, at a cost.

  Raises:
    ValueError: naming the invalid argument.

  >>> user = embed.TableConfig(embed.DynamicVocabulary(capacity=1024), dim=8, name="user")
  >>> user.vocabulary_size, user.vocabulary.eviction, user.vocabulary.buckets
  (1024, 'lru', 64)
  """

  capacity: int
  _: dataclasses.KW_ONLY
  eviction: str = "lru"
  half_life: int | None = None
  time_to_live: int | None = None
  bucket_width: int = 16

  def __post_init__(self):
    given = [x for x in ("half_life", "time_to_live") if getattr(self, x) is not None]
    for name in ("capacity", "bucket_width", *given):
      most = 256 if name == "bucket_width" else MAX_VOCABULARY_SIZE
      object.__setattr__(self, name, integer(name, getattr(self, name), 1, most))
    for name, is_valid, expected in (
      ("eviction", self.eviction in EVICTIONS, f"one of {EVICTIONS}"),
      ("half_life", "half_life" not in given or self.eviction == "lfu", 'None without "lfu"'),
    ):
      check(name, getattr(self, name), is_valid, expected)
    if self.capacity % self.bucket_width:
      most = -(-self.capacity // self.bucket_width) * self.bucket_width
      raise ValueError(
        f"Argument `capacity` must be a multiple of bucket_width={self.bucket_width}. Got "
        f"{self.capacity}; write {most}."
      )

  @property
  def buckets(self) -> int:
    """The number of buckets."""
    return self.capacity // self.bucket_width


@dataclasses.dataclass(frozen=True, eq=False)
class TableConfig:
  """One embedding table. Compared by identity: features with the same object share a table.

  A table takes `vocabulary_size * dim` times 4 bytes, or 2 in bfloat16, plus the slots of its
  optimizer.

  Args:
    vocabulary_size: the number of rows, V, for ids 0 .. V - 1. Or a `DynamicVocabulary`, for raw
      ids: V is then its capacity, and the attribute `vocabulary` holds the object.
    dim: the length of a row, D.
    initializer: `f(key, shape, dtype)` as in `jax.nn.initializers`, called with `(V, D)`; wrap it
      in `embed.row_wise` for a large table. None draws each row from a normal distribution with
      standard deviation `1 / sqrt(dim)`, truncated at two standard deviations.
    optimizer: the table's optimizer, such as `embed.adagrad(0.05)`. None takes the default of
      `SparseEmbed`.
    combiner: turns a bag into one vector: "mean" (divides by the sum of weights), "sum" or "sqrtn"
      (divides by the root of the sum of squared weights).
    name: the key in `tables`, `variables` and checkpoints. None gives `table_{i}`, where i is the
      table's position in the order in which features first use tables.
    dtype: the dtype of the rows, float32 or bfloat16; sums and slots are float32. On CPU, XLA
      updates a bfloat16 table through a float32 copy of it.
    stochastic_rounding: whether new bfloat16 rows are rounded up or down at random, without bias.
      Rounding to nearest loses small steps (Gupta et al. 2015, arXiv:1502.02551). Rounding may
      take a row past `clip_weight_max`.

  >>> movie = embed.TableConfig(
  ...   vocabulary_size=60_000, dim=64, optimizer=embed.adagrad(0.05), name="movie")
  >>> movie.combiner, movie.dtype
  ('mean', dtype('float32'))
  """

  vocabulary_size: Any  # an int, once made
  dim: int
  initializer: Callable[..., Any] | None = None
  optimizer: Any = None
  combiner: str = "mean"
  name: str | None = None
  dtype: Any = np.float32
  stochastic_rounding: bool = True
  vocabulary: DynamicVocabulary | None = None

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    if isinstance(given := self.vocabulary_size, DynamicVocabulary):
      set_("vocabulary", given)
      set_("vocabulary_size", given.capacity)
    set_(
      "vocabulary_size", integer("vocabulary_size", self.vocabulary_size, 1, MAX_VOCABULARY_SIZE)
    )
    set_("dim", integer("dim", self.dim, 1))
    is_size = self.vocabulary is None or self.vocabulary.capacity == self.vocabulary_size
    try:
      dtype = np.dtype(self.dtype)
    except TypeError:
      dtype = None
    for name, is_valid, expected in (
      ("vocabulary", is_size, "given in place of vocabulary_size"),
      (
        "initializer",
        self.initializer is None or callable(self.initializer),
        "a callable f(key, shape, dtype), or None",
      ),
      (
        "name",
        self.name is None or (isinstance(self.name, str) and self.name),
        "a non-empty str or None",
      ),
      ("combiner", self.combiner in COMBINERS, f"one of {COMBINERS}"),
      ("dtype", dtype in (np.float32, ml_dtypes.bfloat16), "float32 or bfloat16"),
      ("stochastic_rounding", isinstance(self.stochastic_rounding, bool), "a bool"),
    ):
      check(name, getattr(self, name), bool(is_valid), expected)
    set_("dtype", dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureConfig:
  """One input and the table it reads.

  Args:
    table: the `TableConfig`; several features may share one.
    max_sequence_length: 0 combines the ids of an example into one vector. L > 0 gives a sequence of
      the rows of the first L ids, `[batch, L, dim]`, padded with zeros. It applies to bags of rank
      2, and is ignored (with a log message) for higher ranks or with an `output_shape`.
    validate_weights_and_indices: whether eager calls and `embed.validate` raise for ids out of
      range; otherwise such ids are dropped and counted, as they are under jit.
    output_shape: the shape of the activations without `dim`; entries may be None. It is checked,
      and a flat batch of bags is reshaped to it.
    name: a label used in error messages.

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

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    set_("max_sequence_length", integer("max_sequence_length", self.max_sequence_length, 0))
    validates = self.validate_weights_and_indices
    check("table", self.table, isinstance(self.table, TableConfig), "an embed.TableConfig")
    check("validate_weights_and_indices", validates, isinstance(validates, bool), "a bool")
    if self.output_shape is not None:
      set_("output_shape", _shape(self.output_shape))
      if self.max_sequence_length:
        _logger.warning("max_sequence_length is ignored because of output_shape: %r", self)


def _shape(value: Any) -> tuple[int | None, ...]:
  """Returns the entries of an `output_shape`, each an int or None."""
  try:
    dims = [value] if isinstance(value, int) else list(value)
    return tuple(None if d is None else operator.index(d) for d in dims)
  except TypeError:
    raise TypeError(
      f"Argument `output_shape` must be a sequence of ints (or None entries). Got {value!r}."
    ) from None
