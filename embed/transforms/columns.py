"""Columns, which map one raw feature to ids, and `Transforms`, which maps a batch of features."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embed import config as config_lib
from embed import inputs as inputs_lib
from embed.transforms import hashing

MAX_SIZE = config_lib.MAX_VOCABULARY_SIZE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
  """A function from the strings or numbers of one raw feature to int32 ids.

  Subclass it to write your own, with `vocabulary_size` and `ids`.

  Args:
    key: the raw feature that a `Transforms` reads. None reads the feature of the same name.
    max_valency: lists and `Ragged` become `Padded` of exactly this many columns, so that all
      batches share one compiled step. None pads lists to the longest one.
    truncate: True cuts longer bags to their first `max_valency` values; False raises an error.

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
    _set_integers(self, max_valency=(1, MAX_SIZE))

  @property
  def vocabulary_size(self) -> int:
    """The number of ids, 0 .. vocabulary_size - 1, and of rows in their `TableConfig`."""
    raise NotImplementedError

  def ids(self, values: np.ndarray) -> np.ndarray:
    """Converts values `[N]` (objects if they came in lists) to int32 `[N]`; -1 is padding."""
    raise NotImplementedError

  def __call__(self, column: Any) -> Any:
    """Converts a column, of any kind that `embed.transforms` describes, to ids."""
    if isinstance(column, inputs_lib.KINDS):
      bags = dataclasses.replace(column, values=self._dense(column.values))
      if self.max_valency is None or not isinstance(bags, inputs_lib.Ragged):
        return bags
    elif _is_list_of_bags(column):
      values, splits = _join(column)
      if values.ndim != 1:
        raise ValueError(f"the values of bags must be flat, [N]. Got shape {values.shape}.")
      bags = inputs_lib.Ragged(self._dense(values), splits)
    else:
      return self._dense(column)
    return inputs_lib.to_padded(bags, self.max_valency, truncate=self.truncate)

  def _dense(self, values: Any) -> np.ndarray:
    """Returns the ids of an array, or nested lists, in the same shape."""
    array = hashing.to_array(values)
    return self.ids(array.reshape(-1)).reshape(array.shape)

  def read(self, batch: Mapping[str, Any], name: str) -> Any:
    """Returns the ids of the feature `name` of a batch; `Transforms` calls it."""
    key = self.key or name
    if key not in batch:
      raise ValueError(f"the batch has no {key!r}, only {sorted(map(str, batch))}.")
    return self(batch[key])


@dataclasses.dataclass(frozen=True)
class HashBucket(Column):
  """Hashes strings or integers: `XXH64(key) % num_buckets`; different keys may share an id.

  The counterpart of `tf.feature_column.categorical_column_with_hash_bucket`.

  >>> HashBucket(1000)(["drama", "comedy", ""]).tolist()
  [964, 893, -1]
  """

  num_buckets: int

  def __post_init__(self):
    super().__post_init__()
    _set_integers(self, num_buckets=(1, MAX_SIZE))

  @property
  def vocabulary_size(self) -> int:
    return self.num_buckets

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = hashing.to_keys(values)
    ids = hashing.buckets(hashing.hashes(keys), self.num_buckets)
    return np.where(hashing.is_padding(keys), np.int32(-1), ids)


@dataclasses.dataclass(frozen=True)
class RawIds(Column):
  """Makes raw 64-bit ids, for a table with an `embed.DynamicVocabulary`.

  A string is hashed to the upper 63 bits of its XXH64; the probability that two strings share a
  hash is 5 in 100 million among a million strings, and 1 in 19 among a billion. An integer is its
  own raw id. The result has uint32 pairs, as `embed.raw_ids` makes them.
  """

  @property
  def vocabulary_size(self) -> int:
    """Raises ValueError: the size of the table is the capacity of its vocabulary."""
    raise ValueError(
      "RawIds has no vocabulary_size. Give the table an embed.DynamicVocabulary(capacity)."
    )

  def __call__(self, column: Any) -> Any:
    return inputs_lib.raw_ids(super().__call__(column))

  def ids(self, values: np.ndarray) -> np.ndarray:
    """Converts values `[N]` to int64 `[N]`; -1 is padding."""
    keys = hashing.to_keys(values)
    padding = hashing.is_padding(keys)
    if keys.dtype == object:
      keys = hashing.hashes(keys) >> np.uint64(1)
    elif keys.size and keys.max() > np.iinfo(np.int64).max:
      raise ValueError(f"raw id {keys.max()} does not fit int64. Give it to embed.raw_ids itself.")
    return np.where(padding, -1, keys.astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Vocabulary(Column):
  """Looks tokens up in a list; the id of a token is its position.

  The counterpart of `tf.feature_column.categorical_column_with_vocabulary_list`, which drops
  unknown keys by default; here they raise an error.

  Args:
    tokens: strings (or their UTF-8), or integers. They are pickled with the column, so that workers
      and servers need no file. `tokens[id]` turns an id back into its token.
    num_oov_buckets: the number of ids after the tokens, for unknown keys:
      `len(tokens) + XXH64(key) % num_oov_buckets`.
    default_value: one id for all unknown keys, instead of buckets; -1 makes them padding.

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
    is_list = not isinstance(self.tokens, (str, bytes, os.PathLike))
    keys = hashing.to_keys(hashing.to_array(list(self.tokens) if is_list else []))
    if not keys.size:
      raise ValueError(
        "Argument `tokens` must be a list of at least one token. For a file with one token per "
        f"line, write pathlib.Path(file).read_text().splitlines(). Got {self.tokens!r}."
      )
    object.__setattr__(self, "tokens", tuple(keys.tolist()))
    is_padding = hashing.is_padding(keys)
    for i, token in enumerate(self.tokens):
      if is_padding[i] or self._position_of[token] != i:
        expected = "distinct and not padding ('', None or -1)"
        raise ValueError(f"Argument `tokens` must be {expected}. Got {token!r} at {i}.")
    _set_integers(self, num_oov_buckets=(0, MAX_SIZE - len(self.tokens)))
    _set_integers(self, default_value=(-1, self.vocabulary_size - 1))
    if self.num_oov_buckets and self.default_value is not None:
      raise ValueError("Give `num_oov_buckets` or `default_value`, not both.")

  @property
  def vocabulary_size(self) -> int:
    return len(self.tokens) + self.num_oov_buckets

  @functools.cached_property
  def _position_of(self) -> dict[str | int, int]:
    return {token: i for i, token in enumerate(self.tokens)}

  def __getstate__(self) -> dict[str, Any]:  # without the dict of positions
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = hashing.to_keys(values)
    padding = hashing.is_padding(keys)
    if (keys.dtype == object) != isinstance(self.tokens[0], str) and not padding.all():
      raise ValueError(
        f"the tokens are like {self.tokens[0]!r}, the values like {keys[~padding].tolist()[0]!r}. "
        "Convert the values with .astype(str) or .astype('int64')."
      )
    positions = map(self._position_of.get, keys.tolist(), itertools.repeat(-1))
    ids = np.fromiter(positions, np.int32, len(keys))
    unknown = (ids < 0) & ~padding
    if not self.num_oov_buckets:
      problem = f"is not among the {len(self.tokens)} tokens: give num_oov_buckets,"
      return _fill_missing(self, ids, unknown, keys, problem)
    hashed = hashing.buckets(hashing.hashes(keys[unknown]), self.num_oov_buckets)
    ids[unknown] = len(self.tokens) + hashed
    return ids


@dataclasses.dataclass(frozen=True)
class Bucketized(Column):
  """Maps numbers to intervals: id i means `boundaries[i - 1] <= x < boundaries[i]`.

  The counterpart of `tf.feature_column.bucketized_column`. Every number is data, including -1, and
  none is padding: give bags as lists of lists or `Ragged`, or as `Padded` filled with NaN, with
  `default_value=-1`.

  Args:
    boundaries: K strictly increasing numbers, which make K + 1 ids. For a column of floats, they
      are rounded to its dtype, so that 0.7 reaches the boundary 0.7 in float32 as in float64.
      Integers are compared with integers exactly.
    default_value: the id of NaN and None; -1 makes them padding, None raises an error.

  >>> Bucketized([0, 10, 100])([[-5, 10000], [150, 10], [5, 100]]).values.tolist()
  [[0, 3], [3, 2], [1, 3]]
  """

  boundaries: Sequence[float]
  default_value: int | None = None

  def __post_init__(self):
    super().__post_init__()
    boundaries = hashing.to_numbers(hashing.to_array(list(self.boundaries)))
    increases = boundaries.size and not np.isnan(boundaries[0]) and (np.diff(boundaries) > 0).all()
    expected = "strictly increasing numbers"
    config_lib.check("boundaries", self.boundaries, bool(increases), expected)
    object.__setattr__(self, "boundaries", tuple(boundaries.tolist()))
    _set_integers(self, default_value=(-1, len(boundaries)))

  @property
  def vocabulary_size(self) -> int:
    return len(self.boundaries) + 1

  def __call__(self, column: Any) -> Any:
    if isinstance(column, inputs_lib.Padded) and self.default_value is None:
      raise ValueError(
        "which numbers of embed.Padded are padding? Give bags as lists of lists or embed.Ragged; "
        "or fill them with NaN and write default_value=-1."
      )
    return super().__call__(column)

  def ids(self, values: np.ndarray) -> np.ndarray:
    numbers, boundaries = hashing.to_numbers(values), np.asarray(self.boundaries)
    if numbers.dtype.kind == "f":
      with np.errstate(over="ignore"):  # beyond the range of float16 a boundary is infinite
        boundaries = boundaries.astype(numbers.dtype)
    ids = np.searchsorted(boundaries, numbers, side="right").astype(np.int32)
    problem = "lies in no bucket: fill it in,"
    return _fill_missing(self, ids, np.isnan(numbers), numbers, problem)


@dataclasses.dataclass(frozen=True)
class Transforms:
  """Converts batches of raw features to inputs of `SparseEmbed`.

  The counterpart of the `feature_columns` of TensorFlow's `EmbeddingConfigSpec`.

  Args:
    columns: the transform of each feature, by name. A `Column` without a `key` reads the raw
      feature of the same name. `columns[name].vocabulary_size` is the size of its table.

  >>> transforms = Transforms({
  ...   "genre": Vocabulary(["drama", "comedy"], num_oov_buckets=1),
  ...   "age": Bucketized([18, 65]),
  ... })
  >>> ids = transforms({"genre": [["comedy"], []], "age": [17.5, 40]})
  >>> ids["genre"].values.tolist(), ids["age"].tolist()
  ([[1], [-1]], [0, 1])
  """

  columns: Mapping[str, Column]

  def __post_init__(self):
    object.__setattr__(self, "columns", dict(self.columns))
    for name, column in self.columns.items():
      if not isinstance(column, Column):
        raise ValueError(
          f"Feature {name!r}: expected a transform, such as HashBucket(1000). Got {column!r}."
        )

  def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of every feature by name, in NumPy; errors name the feature."""
    ids = {}
    for name, column in self.columns.items():
      try:
        ids[name] = column.read(batch, name)
      except ValueError as error:
        raise ValueError(f"Feature {name!r}: {error}") from error
    return ids


# --- what columns share --------------------------------------------------------------------------


def _is_list_of_bags(column: Any) -> bool:
  """Returns True for a list of lists, or an object array of them, as in data frames."""
  if isinstance(column, np.ndarray):
    if column.dtype != object or column.ndim != 1:
      return False
  elif not isinstance(column, (list, tuple)):
    return False
  return not {list, tuple, np.ndarray}.isdisjoint(map(type, column))


def _join(column: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
  """Joins a list of bags into values `[N]` and row splits."""
  bags = [() if bag is None else bag for bag in column]
  if not all(isinstance(bag, (list, tuple, np.ndarray)) for bag in bags):
    raise ValueError("a list of bags holds lists and None; write [value] for a bag of one value.")
  splits = np.cumsum([0, *map(len, bags)])
  filled = [bag for bag in bags if len(bag)]
  kinds = {bag.dtype.kind if isinstance(bag, np.ndarray) else None for bag in filled}
  if len(kinds) == 1 and None not in kinds:  # keeps the dtype
    return np.concatenate(filled), splits
  return hashing.to_array(list(itertools.chain.from_iterable(filled))), splits


def _set_integers(column: Any, **bounds: tuple[int, int]) -> None:
  """Converts arguments of a frozen column to ints within `bounds`; keeps None if it is allowed."""
  for name, (minimum, maximum) in bounds.items():
    value = getattr(column, name)
    if value is not None or name not in ("default_value", "max_valency"):
      object.__setattr__(column, name, config_lib.integer(name, value, minimum, maximum))


def _fill_missing(
  column: Any, ids: np.ndarray, is_missing: np.ndarray, values: np.ndarray, problem: str
) -> np.ndarray:
  """Returns ids `[N]`, the column's `default_value` where missing; raises if that is None."""
  if column.default_value is not None:
    return np.where(is_missing, np.int32(column.default_value), ids)
  if is_missing.any():
    raise ValueError(
      f"{values[is_missing].tolist()[0]!r} {problem} or give default_value, an id or -1 for "
      f"padding ({int(is_missing.sum())} such values)."
    )
  return ids
