"""Raw features to ids, on the host: what TensorFlow's feature columns did, in NumPy.

`Transforms` turns a batch of strings and numbers into what `SparseEmbed` reads. It and its parts
are small frozen objects that pickle and touch no device: the same one maps a Grain data set, in
worker processes too, and prepares the requests of a server.

**Kinds.** A column is the values of one raw feature for a batch. A NumPy array, or a list of
scalars, has one value per output and gives a dense int32 array of its shape. Bags come as a list of
lists (or of arrays; None is an empty one) and give `embed.Padded`, whatever their lengths; or they
come as `embed.Padded`, `embed.Ragged` or `embed.Sparse` of strings or numbers, and keep their kind.

**Padding.** The empty string, None and -1 are padding, as `''` and -1 are in TensorFlow, and become
-1. Id 0 is an id like any other. Other negative keys raise: taken for padding, signed 64-bit hashes
would lose half of their values; give them as `x.view(np.uint64)`. Nothing is dropped unasked: what
has no id raises, unless `default_value` says what becomes of it.

**Hashes** are XXH64 (https://github.com/Cyan4973/xxHash), of the UTF-8 of a string, of bytes as
they are, and of the 8 little-endian bytes of an integer of whatever dtype; they are the same in
every process and version. 42 and "42" are different keys, which TensorFlow hashes alike: convert
with `.astype(str)` where a feature comes as both. TensorFlow's own hash is another one, so that the
rows of its hashed tables do not carry over.
"""

import dataclasses
import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from embed import config as config_lib
from embed import inputs as ragged
from embed.transforms import hashing as keys_lib

__all__ = [
  "Bucketized",
  "Column",
  "Crossed",
  "HashBucket",
  "Identity",
  "Inputs",
  "Transforms",
  "Vocabulary",
  "Weighted",
]

_MAX = config_lib.MAX_VOCABULARY_SIZE
_OPTIONAL = ("default_value", "max_valency")


class Inputs(NamedTuple):
  """What `Transforms` returns: `sparse_embed(*inputs)` looks it up.

  Attributes:
    features: ids by the name of their feature, in NumPy.
    weights: those of the `Weighted` ones, by name.

  >>> inputs = Transforms({"tag": Weighted(Identity(10), "score")})({"tag": [[3]], "score": [[2]]})
  >>> inputs.features["tag"].values.tolist(), inputs.weights["tag"].values.tolist()
  ([[3]], [[2.0]])
  """

  features: dict[str, Any]
  weights: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
  """A function of one raw feature: strings or numbers to int32 ids.

  Subclass it for a function of your own, with a `vocabulary_size` and `ids`.

  Args:
    key: the raw feature that it reads in a `Transforms`. None reads the one of its own name.
    max_valency: lists of lists, `Ragged` and `Sparse` become `Padded` of exactly so many columns,
      which keeps shapes, and the compiled step, the same from batch to batch. None takes the
      longest list, and leaves `Ragged` and `Sparse` what they are.
    truncate: whether longer bags are cut to their first `max_valency` values; else they raise.

  >>> class Parity(Column):
  ...   vocabulary_size = 2
  ...   def ids(self, values):
  ...     return np.where(values < 0, -1, values % 2).astype(np.int32)
  >>> Parity(max_valency=3)([np.array([4, 7]), np.array([5])]).values.tolist()
  [[0, 1, -1], [1, -1, -1]]
  """

  key: str | None = None
  max_valency: int | None = None
  truncate: bool = False

  def __post_init__(self):
    _check(self, "max_valency", 1, _MAX)

  @property
  def vocabulary_size(self) -> int:
    """The number of ids, 0 .. vocabulary_size - 1, and so the rows of their `TableConfig`."""
    raise NotImplementedError

  def ids(self, values: np.ndarray) -> np.ndarray:
    """Values `[N]`, objects where they came in lists, to int32 `[N]`; -1 is padding."""
    raise NotImplementedError

  def __call__(self, column: Any) -> Any:
    """A column to ids, see the module for its kinds.

    Raises:
      ValueError: naming a value that has no id or the wrong type, or a bag that is too long.
    """
    parts = _take_apart(column, self.max_valency, self.truncate)
    return parts.place(self.ids(parts.values))

  def read(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The ids of the feature `name` of a batch, and its weights, None: how `Transforms` calls it.

    Raises:
      ValueError: as a call, or if the batch has no such raw feature.

    >>> Identity(10).read({"user": [3, 7]}, "user")
    (array([3, 7], dtype=int32), None)
    """
    return self(_get(batch, self.key or name)), None


@dataclasses.dataclass(frozen=True)
class Identity(Column):
  """Integers that are ids already; negative ones are padding, as everywhere in `embed`.

  After `tf.feature_column.categorical_column_with_identity`, for which a negative id is out of
  range.

  Args:
    num_buckets: ids are 0 .. num_buckets - 1.
    default_value: the id of larger integers; -1 makes them padding, None raises.

  Raises:
    ValueError: naming the argument; in a call, naming an integer out of range, or a string.

  >>> Identity(num_buckets=10)([0, 9, -1]).tolist()
  [0, 9, -1]
  """

  num_buckets: int
  default_value: int | None = None

  def __post_init__(self):
    super().__post_init__()
    _check(self, "num_buckets", 1, _MAX)
    _check(self, "default_value", -1, self.vocabulary_size - 1)

  @property
  def vocabulary_size(self) -> int:
    return self.num_buckets

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = keys_lib.to_keys(values)
    if keys.dtype == object:
      if not (padding := keys == "").all():
        raise ValueError(f"Identity takes integers. Got {keys[~padding][0]!r}.")
      return np.full(keys.shape, -1, np.int32)
    beyond = keys >= self.num_buckets
    ids = np.where(beyond, 0, keys).astype(np.int64)
    problem = f"is not in 0 .. {self.num_buckets - 1}: raise num_buckets,"
    _replace(ids, beyond, keys, self.default_value, problem)
    return np.maximum(ids, -1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class HashBucket(Column):
  """Strings or integers by their hash: `XXH64(key, seed=salt) % num_buckets`.

  After `tf.feature_column.categorical_column_with_hash_bucket`.

  Args:
    num_buckets: the number of ids; different keys may share one.
    salt: another one spreads the keys in another way, such as for two hashes of one feature.

  Raises:
    ValueError: naming the argument; in a call, for floats and for integers below -1.

  >>> HashBucket(1000)(["drama", "comedy", ""]).tolist()
  [964, 893, -1]
  >>> HashBucket(1000)(np.array([7, 2**62, -1])).tolist()
  [877, 955, -1]
  """

  num_buckets: int
  salt: int = 0

  def __post_init__(self):
    super().__post_init__()
    _check(self, "num_buckets", 1, _MAX)
    _check(self, "salt", 0, 2**64 - 1)

  @property
  def vocabulary_size(self) -> int:
    return self.num_buckets

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = keys_lib.to_keys(values)
    ids = keys_lib.buckets(keys_lib.hashes(keys, self.salt), self.num_buckets)
    ids[keys_lib.is_padding(keys)] = -1
    return ids


@dataclasses.dataclass(frozen=True)
class Vocabulary(Column):
  """The tokens of a list, by their positions.

  After `tf.feature_column.categorical_column_with_vocabulary_list`, which drops what is not in the
  list unless told otherwise; here it raises.

  Args:
    tokens: strings (or their UTF-8), or integers. They are part of a pickle, so that workers and
      servers need no file. `tokens[id]` is the way back.
    num_oov_buckets: ids behind the tokens, for what is not in the list:
      `len(tokens) + XXH64(key) % num_oov_buckets`.
    default_value: instead, one id for all that is not in the list; -1 makes it padding. With
      neither, it raises.

  Raises:
    ValueError: naming the argument, or the token that is there twice or is padding; in a call,
      naming a key that is not in the list.

  >>> genre = Vocabulary(["drama", "comedy"], num_oov_buckets=2)
  >>> genre.vocabulary_size
  4
  >>> genre([["comedy", "drama"], ["western"]]).values.tolist()
  [[1, 0], [3, -1]]
  """

  tokens: Sequence[Any] = dataclasses.field(repr=False)
  num_oov_buckets: int = 0
  default_value: int | None = None

  def __post_init__(self):
    super().__post_init__()
    if isinstance(self.tokens, (str, bytes, os.PathLike)):
      raise ValueError(
        "Argument `tokens` is a list. For a file with a token on each line, write "
        f"Vocabulary.from_file({self.tokens!r})."
      )
    keys = keys_lib.to_keys(keys_lib.to_array(list(self.tokens)))
    if not keys.size:
      raise ValueError("Argument `tokens` is empty; a vocabulary has at least one token.")
    if (padding := keys_lib.is_padding(keys)).any():
      raise ValueError(f"Token {padding.argmax()} is padding; '', None and -1 are no tokens.")
    object.__setattr__(self, "tokens", tuple(keys.tolist()))
    if again := _repeated(self.tokens):
      raise ValueError(
        f"Token {self.tokens[again[0]]!r} is there twice, at {again[0]} and {again[1]}."
      )
    _check(self, "num_oov_buckets", 0, _MAX - len(self.tokens))
    _check(self, "default_value", -1, self.vocabulary_size - 1)
    if self.num_oov_buckets and self.default_value is not None:
      raise ValueError("Give `num_oov_buckets` or `default_value`, not both.")

  @classmethod
  def from_file(
    cls, path: str | os.PathLike[str], *, dtype: type[str] | type[int] = str, **arguments: Any
  ) -> "Vocabulary":
    """The lines of a file in UTF-8; the first one is id 0.

    After `tf.feature_column.categorical_column_with_vocabulary_file`.

    Args:
      path: the file. Newlines, carriage returns before them and a byte order mark are no part of a
        token; a last newline starts no line.
      dtype: `int` for tokens that are decimal integers.
      **arguments: of `Vocabulary` and `Column`.

    Raises:
      ValueError: naming the file and the line, where a token is empty, there already, no UTF-8 or
        no integer.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "genres.txt"
    >>> size = path.write_text("drama\\ncomedy\\n")
    >>> Vocabulary.from_file(path)(["comedy", "drama"]).tolist()
    [1, 0]
    """
    with open(path, "rb") as file:
      lines = file.read().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    tokens: list[str | int] = []
    for number, line in enumerate(lines, start=1):
      try:
        tokens.append(dtype(line.removesuffix(b"\r").decode()))
      except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}.") from None
      if tokens[-1] in ("", -1):
        raise ValueError(f"{path}, line {number}: {tokens[-1]!r} is padding, and no token.")
    if again := _repeated(tokens):
      first, second = again
      raise ValueError(
        f"{path}, line {second + 1}: {tokens[second]!r} stands on line {first + 1} already."
      )
    return cls(tokens, **arguments)

  @property
  def vocabulary_size(self) -> int:
    return len(self.tokens) + self.num_oov_buckets

  @functools.cached_property
  def _position(self) -> dict[str, int]:
    return {token: i for i, token in enumerate(self.tokens)}

  @functools.cached_property
  def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array(self.tokens, np.uint64)
    order = np.argsort(tokens)
    return tokens[order], order

  def __getstate__(self) -> dict[str, Any]:
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = keys_lib.to_keys(values)
    padding = keys_lib.is_padding(keys)
    if (keys.dtype == object) != isinstance(self.tokens[0], str) and not padding.all():
      raise ValueError(
        f"the tokens are like {self.tokens[0]!r}, the values like {keys[~padding].tolist()[0]!r}. "
        "Convert the values with .astype(str) or .astype('int64'); from_file(path, dtype=int) "
        "reads tokens as integers."
      )
    ids = self._find(keys)
    ids[padding] = -1
    unknown = (ids < 0) & ~padding
    if self.num_oov_buckets:
      hashed = keys_lib.hashes(keys[unknown], 0)
      ids[unknown] = len(self.tokens) + keys_lib.buckets(hashed, self.num_oov_buckets)
      return ids
    problem = f"is none of the {len(self.tokens)} tokens: give num_oov_buckets,"
    _replace(ids, unknown, keys, self.default_value, problem)
    return ids

  def _find(self, keys: np.ndarray) -> np.ndarray:
    """Positions among the tokens, int32 `[N]`, -1 where a key is none of them."""
    if keys.dtype == object:
      found = map(self._position.get, keys.tolist(), itertools.repeat(-1))
      return np.fromiter(found, np.int32, len(keys))
    tokens, order = self._sorted  # a binary search misses the caches less than a dict of ints does
    words = keys.astype(np.uint64)
    at = np.minimum(np.searchsorted(tokens, words), len(tokens) - 1)
    return np.where(tokens[at] == words, order[at], -1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Bucketized(Column):
  """Numbers by the interval they lie in: id i is `boundaries[i - 1] <= x < boundaries[i]`.

  After `tf.feature_column.bucketized_column`. No number means padding, not -1 either: give bags as
  lists of lists or `Ragged`; or as `Padded`, filled with NaN, and write `default_value=-1`.

  Args:
    boundaries: strictly increasing numbers; K of them make K + 1 ids. For floats they are rounded
      to the precision of the column, so that 0.7 reaches the boundary 0.7 in float32 as in float64.
      Integers and integers are compared exactly.
    default_value: the id of NaN and None; -1 makes them padding, None raises.

  Raises:
    ValueError: naming the argument; in a call, for NaN, for what is no number, and for `Padded`
      without a `default_value`.

  >>> Bucketized([0, 10, 100])([[-5, 10000], [150, 10], [5, 100]]).values.tolist()
  [[0, 3], [3, 2], [1, 3]]
  """

  boundaries: Sequence[float]
  default_value: int | None = None

  def __post_init__(self):
    super().__post_init__()
    boundaries = keys_lib.to_numbers(keys_lib.to_array(list(self.boundaries)))
    if not boundaries.size or np.isnan(boundaries).any() or (np.diff(boundaries) <= 0).any():
      raise ValueError(
        f"Argument `boundaries` must be strictly increasing numbers. Got {self.boundaries!r}."
      )
    object.__setattr__(self, "boundaries", tuple(boundaries.tolist()))
    _check(self, "default_value", -1, self.vocabulary_size - 1)

  @property
  def vocabulary_size(self) -> int:
    return len(self.boundaries) + 1

  def __call__(self, column: Any) -> Any:
    if isinstance(column, ragged.Padded) and self.default_value is None:
      raise ValueError(
        "which numbers of embed.Padded are padding? Give bags as lists of lists or embed.Ragged; "
        "or fill them with NaN and write default_value=-1."
      )
    return super().__call__(column)

  def ids(self, values: np.ndarray) -> np.ndarray:
    numbers, boundaries = keys_lib.to_numbers(values), np.asarray(self.boundaries)
    if numbers.dtype.kind == "f":
      with np.errstate(over="ignore"):  # what float16 cannot reach is infinite
        boundaries = boundaries.astype(numbers.dtype)
    ids = np.searchsorted(boundaries, numbers, side="right").astype(np.int32)
    _replace(ids, np.isnan(numbers), numbers, self.default_value, "lies in no bucket: fill it in,")
    return ids


@dataclasses.dataclass(frozen=True)
class Crossed:
  """Tuples of one value of each of several features, by their hash.

  After `tf.feature_column.crossed_column`. Of bags, all tuples of an example are taken, the last
  key fastest; where one is empty there is none. The id of a tuple is
  `functools.reduce(lambda seed, word: XXH64(word, seed), words, salt) % num_buckets`; the word of
  an integer is itself, that of a string its XXH64.

  Args:
    keys: two or more of: the name of a raw feature, or a `Column` with a `key`, whose ids are
      crossed.
    num_buckets: the number of ids.
    salt: as of `HashBucket`.
    max_valency, truncate: as of `Column`, for the bags of tuples. None leaves room for as many as
      the bags could make, the same in every batch for `Padded`, and leaves `Ragged` ragged.

  Raises:
    ValueError: naming the argument; in a call, naming the key whose value has no id, or the batches
      that differ.

  >>> cross = Crossed(["city", Bucketized([18, 65], key="age")], num_buckets=100)
  >>> cross(["Rome", "Oslo"], [17.5, 40.0]).tolist()
  [97, 89]
  >>> cross([["Rome", "Oslo"], []], [17.5, 40.0]).values.tolist()
  [[97, 95], [-1, -1]]
  >>> cross.vocabulary_size
  100
  """

  keys: Sequence[str | Column]
  num_buckets: int
  salt: int = 0
  max_valency: int | None = None
  truncate: bool = False

  def __post_init__(self):
    keys = () if isinstance(self.keys, str) else tuple(self.keys)
    named = lambda key: isinstance(key, str) or (isinstance(key, Column) and key.key is not None)
    if len(keys) < 2 or not all(map(named, keys)):
      raise ValueError(
        "Argument `keys` must be two or more names of raw features, or columns that name theirs, "
        f"such as Bucketized([18, 65], key='age'). Got {self.keys!r}."
      )
    object.__setattr__(self, "keys", keys)
    _check(self, "max_valency", 1, _MAX)
    _check(self, "num_buckets", 1, _MAX)
    _check(self, "salt", 0, 2**64 - 1)

  @property
  def vocabulary_size(self) -> int:
    """`num_buckets`, the rows of the table."""
    return self.num_buckets

  @property
  def _names(self) -> list[str]:
    return [str(key if isinstance(key, str) else key.key) for key in self.keys]

  def __call__(self, *columns: Any) -> Any:
    """The columns of the keys, in their order, to ids: dense where all of them are, else bags.

    Raises:
      ValueError: naming the key whose value has no id, or the batches that differ.
    """
    bags = [_bags(*each) for each in zip(self._names, self.keys, columns, strict=True)]
    batches = {name: bag.batch for name, bag in zip(self._names, bags, strict=True)}
    if len(set(batches.values())) > 1:
      raise ValueError(f"the keys have batches of different shapes: {batches}.")
    # sizes[k]: how many tuples the values of keys k, k + 1, ... of an example make.
    lengths = np.stack([bag.lengths for bag in bags])
    sizes = np.cumprod(lengths[::-1], axis=0)[::-1]
    row = np.repeat(np.arange(sizes.shape[1]), sizes[0])
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes[0]) - sizes[0], sizes[0])
    hashed = np.full(len(row), self.salt, np.uint64)
    for bag, length, size in zip(bags, lengths, sizes, strict=True):
      start = np.cumsum(length) - length
      choice = place % size[row] // (size // np.maximum(length, 1))[row]
      hashed = keys_lib.xxh64(bag.words[start[row] + choice], hashed)
    ids = keys_lib.buckets(hashed, self.num_buckets)

    kinds, batch = {bag.kind for bag in bags}, bags[0].batch
    if kinds == {np.ndarray}:
      dense = np.full(sizes.shape[1], -1, np.int32)
      dense[row] = ids
      return dense.reshape(batch)
    tuples = ragged.Ragged(ids, np.append(0, np.cumsum(sizes[0])))
    if self.max_valency is None and ragged.Ragged in kinds:
      return tuples
    width = self.max_valency or math.prod(bag.width for bag in bags)
    padded = ragged.to_padded(tuples, width, truncate=self.truncate)
    return ragged.Padded(padded.values.reshape(*batch, width))

  def read(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The ids of a batch and their weights, None: how `Transforms` calls it."""
    return self(*(_get(batch, key) for key in self._names)), None


@dataclasses.dataclass(frozen=True)
class Weighted:
  """The ids of a column, and beside them the weights that another raw feature holds.

  After `tf.feature_column.weighted_categorical_column`.

  Args:
    column: makes the ids.
    weights: the raw feature with a number for each of its values.

  Raises:
    ValueError: naming the argument; in a call, where weights do not stand where the values stand,
      or are not finite.

  >>> ids, weights = Weighted(Identity(10), "score")([[3, 7], [5]], [[0.5, 2], [1]])
  >>> ids.values.tolist(), weights.values.tolist()
  ([[3, 7], [5, -1]], [[0.5, 2.0], [1.0, 0.0]])
  >>> Weighted(Identity(10), "score").vocabulary_size
  10
  """

  column: Column
  weights: str

  def __post_init__(self):
    if not isinstance(self.column, Column) or not isinstance(self.weights, str):
      raise ValueError(
        "Write a column and the raw feature of its weights, such as "
        f"Weighted(HashBucket(1000), 'score'). Got {self.column!r} and {self.weights!r}."
      )

  @property
  def vocabulary_size(self) -> int:
    """That of the column, the rows of the table."""
    return self.column.vocabulary_size

  def __call__(self, column: Any, weights: Any) -> tuple[Any, Any]:
    """Two columns to ids and float32 weights, of one kind; weights of padding are 0.

    An array `[batch, L]` holds bags, as does `Padded`; one of `[batch]` holds bags of one value.

    Raises:
      ValueError: where weights do not stand where the values stand, or are not finite.
    """
    layout = self.column.max_valency, self.column.truncate
    values, given = _take_apart(column, *layout), _take_apart(weights, *layout)
    if not np.array_equal(_slots(values)[0], _slots(given)[0]):
      raise ValueError(
        f"{self.weights!r} must have a weight where there is a value, and nowhere else."
      )
    ids = self.column.ids(values.values)
    with np.errstate(over="ignore"):  # found below
      numbers = np.where(ids < 0, 0, keys_lib.to_numbers(given.values)).astype(np.float32)
    if not (finite := np.isfinite(numbers)).all():
      raise ValueError(f"{self.weights!r} holds a weight of {numbers[~finite][0]}.")
    return _as_bags(values.place(ids)), _as_bags(values.place(numbers))

  def read(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The ids of the feature `name` of a batch and its weights: how `Transforms` calls it."""
    return self(_get(batch, self.column.key or name), _get(batch, self.weights))


@dataclasses.dataclass(frozen=True)
class Transforms:
  """A batch of raw features to what `SparseEmbed` reads.

  After the `feature_columns` of TensorFlow's `EmbeddingConfigSpec`.

  Args:
    columns: what becomes of each feature, by name. A `Column` without a `key` reads the raw feature
      of the same name. `columns[name].vocabulary_size` is the size of its table.

  Raises:
    ValueError: for what is no transform; in a call, naming the feature, where a raw feature is
      missing or a transform raises.

  >>> transforms = Transforms({
  ...   "genre": Vocabulary(["drama", "comedy"], num_oov_buckets=1),
  ...   "age": Bucketized([18, 65]),
  ...   "city_x_age": Crossed(["city", Bucketized([18, 65], key="age")], num_buckets=1000),
  ... })
  >>> inputs = transforms({"genre": [["comedy"], []], "city": ["Rome", "Oslo"], "age": [17.5, 40]})
  >>> inputs.features["genre"].values.tolist(), inputs.features["age"].tolist()
  ([[1], [-1]], [0, 1])
  >>> features = {
  ...   name: embed.FeatureConfig(embed.TableConfig(column.vocabulary_size, dim=8, name=name))
  ...   for name, column in transforms.columns.items()
  ... }
  >>> embed.validate(features, *inputs)
  """

  columns: Mapping[str, Column | Crossed | Weighted]

  def __post_init__(self):
    object.__setattr__(self, "columns", dict(self.columns))
    for name, column in self.columns.items():
      if not isinstance(column, (Column, Crossed, Weighted)):
        raise ValueError(
          f"Feature {name!r}: expected a transform, such as HashBucket(1000). Got {column!r}."
        )

  def __call__(self, batch: Mapping[str, Any]) -> Inputs:
    """The ids of every feature, and the weights of the weighted ones; other keys are not read.

    Args:
      batch: raw features by name.

    Returns:
      An `Inputs`, on the host.

    Raises:
      ValueError: naming the feature, where a raw feature is missing or a transform raises.
    """
    inputs = Inputs({}, {})
    for name, column in self.columns.items():
      try:
        ids, weights = column.read(batch, name)
      except ValueError as error:
        raise ValueError(f"Feature {name!r}: {error}") from error
      inputs.features[name] = ids
      if weights is not None:
        inputs.weights[name] = weights
    return inputs


def _get(batch: Mapping[str, Any], key: str) -> Any:
  if key not in batch:
    raise ValueError(f"the batch has no {key!r}, only {sorted(map(str, batch))}.")
  return batch[key]


def _check(of: Any, name: str, minimum: int, maximum: int) -> None:
  """Makes an argument an int within its bounds; some may be None."""
  value = getattr(of, name)
  if value is None and name in _OPTIONAL:
    return
  try:
    number = minimum - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
  except TypeError:
    number = minimum - 1
  if not minimum <= number <= maximum:
    raise ValueError(f"Argument `{name}` must be an int in {minimum} .. {maximum}. Got {value!r}.")
  object.__setattr__(of, name, number)


def _repeated(tokens: Sequence[Any]) -> tuple[int, int] | None:
  """The positions of the first repetition of a token and of what it repeats, in order."""
  if len(set(tokens)) == len(tokens):
    return None
  seen: dict[Any, int] = {}
  return next((seen[t], i) for i, t in enumerate(tokens) if seen.setdefault(t, i) != i)


def _replace(
  ids: np.ndarray, where: np.ndarray, values: np.ndarray, default: int | None, problem: str
) -> None:
  """Gives the default to values that have no id, or raises naming one."""
  if default is not None:
    ids[where] = default
  elif where.any():
    raise ValueError(
      f"{values[where].tolist()[0]!r} {problem} or give default_value, an id or -1 for padding "
      f"({int(where.sum())} such values)."
    )


# --- kinds ---------------------------------------------------------------------------------------


class _Parts(NamedTuple):
  """A column taken apart: its values, and the way of ids or weights back to a column."""

  values: np.ndarray  # [N]
  place: Callable[[np.ndarray], Any]


def _take_apart(column: Any, max_valency: int | None = None, truncate: bool = False) -> _Parts:
  if listed := _is_list_of_bags(column):
    column = _join(column)

  def lay_out(bags):
    if max_valency is None and not listed:
      return bags
    return ragged.to_padded(bags, max_valency, truncate=truncate)

  if isinstance(column, (ragged.Ragged, ragged.Sparse)):
    values = keys_lib.to_array(column.values)
    if values.ndim != 1:
      raise ValueError(f"the values of bags must be flat, [N]. Got shape {values.shape}.")
    used = len(values) if isinstance(column, ragged.Sparse) else _used(column.row_splits, values)

    def place(x):
      behind = np.full(len(values) - used, 0 if x.dtype.kind == "f" else -1, x.dtype)
      return lay_out(dataclasses.replace(column, values=np.concatenate([x, behind])))

    return _Parts(values[:used], place)
  if isinstance(column, ragged.Padded):
    array = keys_lib.to_array(column.values)
    return _Parts(array.reshape(-1), lambda x: ragged.Padded(x.reshape(array.shape)))
  array = keys_lib.to_array(column)
  return _Parts(array.reshape(-1), lambda x: x.reshape(array.shape))


def _is_list_of_bags(column: Any) -> bool:
  """A list that holds lists, or an object array that does, as columns of data frames are."""
  if isinstance(column, np.ndarray):
    if column.dtype != object or column.ndim != 1:
      return False
  elif not isinstance(column, (list, tuple)):
    return False
  return not {list, tuple, np.ndarray}.isdisjoint(map(type, column))


def _join(column: Iterable[Any]) -> ragged.Ragged:
  bags = [() if bag is None else bag for bag in column]
  if not all(isinstance(bag, (list, tuple, np.ndarray)) for bag in bags):
    raise ValueError("a list of bags holds lists and None; write [value] for a bag of one value.")
  splits = np.cumsum([0, *map(len, bags)])
  full = [bag for bag in bags if len(bag)]
  arrays = [bag for bag in full if isinstance(bag, np.ndarray)]
  if arrays and len(arrays) == len(full) and len({array.dtype.kind for array in arrays}) == 1:
    return ragged.Ragged(np.concatenate(arrays), splits)
  return ragged.Ragged(keys_lib.to_array(list(itertools.chain.from_iterable(full))), splits)


def _used(row_splits: Any, values: np.ndarray) -> int:
  splits = np.asarray(row_splits)
  ragged.check_row_splits(splits, len(values))
  return int(splits[-1])


def _as_bags(ids: Any) -> Any:
  if isinstance(ids, np.ndarray):
    return ragged.Padded(ids if ids.ndim > 1 else ids[..., None])
  return ids


def _slots(parts: _Parts) -> tuple[np.ndarray, type]:
  """Which value stands at each place of each bag, `[*batch, L]`, -1 for none; and the kind."""
  placed = parts.place(np.arange(len(parts.values)))
  kind = type(placed)
  if kind in (ragged.Ragged, ragged.Sparse):
    placed = ragged.to_padded(placed)
  if isinstance(placed, ragged.Padded):
    return placed.values, kind
  return (placed if placed.ndim > 1 and placed.shape[-1] == 1 else placed[..., None]), kind


class _Bags(NamedTuple):
  """A key of a cross: the words of its values, bag after bag, without padding."""

  words: np.ndarray  # uint64 [N]
  lengths: np.ndarray  # [bags]
  batch: tuple[int, ...]
  width: int  # the places of a bag
  kind: type


def _bags(name: str, key: str | Column, column: Any) -> _Bags:
  try:
    parts = _take_apart(column if isinstance(key, str) else key(column))
    keys = keys_lib.to_keys(parts.values)
    there = ~keys_lib.is_padding(keys)
    slots, kind = _slots(parts)
  except ValueError as error:
    raise ValueError(f"key {name!r}: {error}") from error
  valid = slots >= 0
  valid[valid] = there[slots[valid]]
  keys = keys[slots[valid]]
  words = keys_lib.hashes(keys, 0) if keys.dtype == object else keys.astype(np.uint64)
  return _Bags(words, valid.sum(-1).reshape(-1), slots.shape[:-1], slots.shape[-1], kind)
