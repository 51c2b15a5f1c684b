"""Columns: functions from one raw feature to ids."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from embed import config as config_lib
from embed import inputs as inputs_lib
from embed.engine.bags import narrow
from embed.transforms import hashing

MAX_SIZE = config_lib.MAX_VOCABULARY_SIZE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
  """A function from the strings or numbers of one raw feature to int32 ids.

  Subclass it to write your own, with a `vocabulary_size` and `ids`.

  Args:
    key: the raw feature to read in a `Transforms`. None reads the feature of the same name.
    max_valency: lists of lists, `Ragged` and `Sparse` become `Padded` of exactly this many columns,
      so that all batches have one shape and share one compiled step. None pads lists to the longest
      one, and keeps `Ragged` and `Sparse` as they are.
    truncate: whether longer bags are cut to their first `max_valency` values; otherwise they raise.

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
    set_integers(self, max_valency=(1, MAX_SIZE))

  @property
  def vocabulary_size(self) -> int:
    """The number of ids, 0 .. vocabulary_size - 1, and of rows in their `TableConfig`."""
    raise NotImplementedError

  def ids(self, values: np.ndarray) -> np.ndarray:
    """Converts values `[N]` (objects if they came in lists) to int32 `[N]`; -1 is padding."""
    raise NotImplementedError

  def __call__(self, column: Any) -> Any:
    """Converts a column, of any kind that the module describes, to ids.

    Raises:
      ValueError: naming a value that has no id or the wrong type, or a bag that is too long.
    """
    values, rebuild = flatten(column, self.max_valency, self.truncate)
    return rebuild(self.ids(values))

  def read(self, batch: Mapping[str, Any], name: str) -> Any:
    """Returns the ids of the feature `name` of a batch; `Transforms` calls it.

    Raises:
      ValueError: as in a call, or if the batch lacks the raw feature.
    """
    return self(raw_feature(batch, self.key or name))


@dataclasses.dataclass(frozen=True)
class Identity(Column):
  """Takes integers as ids; negative ones are padding, as everywhere in `embed`.

  The counterpart of `tf.feature_column.categorical_column_with_identity`, where a negative id is
  out of range.

  Args:
    num_buckets: ids are 0 .. num_buckets - 1.
    default_value: the id of larger integers; -1 makes them padding, None raises an error.
    permuted: whether a fixed permutation of 0 .. num_buckets - 1 is applied. For integers that
      share a factor with the number of shards, such as multiples of 8: under the strategy "mod" a
      few shards would have all of the rows that are used.

  Raises:
    ValueError: naming the argument; in a call, naming an integer that is out of range or a string.

  >>> Identity(num_buckets=10)([0, 9, -1]).tolist()
  [0, 9, -1]
  """

  num_buckets: int
  default_value: int | None = None
  permuted: bool = False

  def __post_init__(self):
    super().__post_init__()
    set_integers(self, num_buckets=(1, MAX_SIZE))
    set_integers(self, default_value=(-1, self.num_buckets - 1))

  @property
  def vocabulary_size(self) -> int:
    return self.num_buckets

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = hashing.to_keys(values)
    if keys.dtype == object:
      if not (padding := keys == "").all():
        raise ValueError(f"Identity takes integers. Got {keys[~padding][0]!r}.")
      return np.full(keys.shape, -1, np.int32)
    is_too_large = keys >= self.num_buckets
    ids = np.where(is_too_large, 0, keys).astype(np.int64)
    problem = f"is not in 0 .. {self.num_buckets - 1}: raise num_buckets,"
    fill_missing(ids, is_too_large, keys, self.default_value, problem)
    ids = narrow(ids)
    if self.permuted:
      ids[ids >= 0] = hashing.permuted(ids[ids >= 0], self.num_buckets)
    return ids


@dataclasses.dataclass(frozen=True)
class HashBucket(Column):
  """Hashes strings or integers: `XXH64(key, seed=salt) % num_buckets`.

  The counterpart of `tf.feature_column.categorical_column_with_hash_bucket`.

  Args:
    num_buckets: the number of ids; different keys may share one.
    salt: seed of the hash; different salts give independent hashes of one feature.

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
    set_integers(self, num_buckets=(1, MAX_SIZE), salt=(0, 2**64 - 1))

  @property
  def vocabulary_size(self) -> int:
    return self.num_buckets

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = hashing.to_keys(values)
    ids = hashing.buckets(hashing.hashes(keys, self.salt), self.num_buckets)
    return np.where(hashing.is_padding(keys), np.int32(-1), ids)


@dataclasses.dataclass(frozen=True)
class RawIds(Column):
  """Takes strings and integers as raw 64-bit ids, for a table with an `embed.DynamicVocabulary`.

  A string is hashed, to the upper 63 bits of `XXH64(key, seed=salt)`; among a million strings two
  have the same hash with a probability of 5 in 100 million, among a billion of 1 in 19. An integer
  is its own raw id. The result is uint32 pairs, as `embed.raw_ids` makes them.

  Args:
    salt: seed of the hash.

  Raises:
    ValueError: naming the argument; in a call, for floats, for integers below -1, and for those
      above 2**63 - 1.

  >>> RawIds()(np.array([7, -1])).tolist()
  [[0, 7], [4294967295, 4294967295]]
  """

  salt: int = 0

  def __post_init__(self):
    super().__post_init__()
    set_integers(self, salt=(0, 2**64 - 1))

  @property
  def vocabulary_size(self) -> int:
    """Raises ValueError: the size of the table is the capacity of its vocabulary."""
    raise ValueError("RawIds have no number. Give the table an embed.DynamicVocabulary(capacity).")

  def __call__(self, column: Any) -> Any:
    return inputs_lib.raw_ids(super().__call__(column))

  def ids(self, values: np.ndarray) -> np.ndarray:
    """Converts values `[N]` to int64 `[N]`; -1 is padding."""
    keys = hashing.to_keys(values)
    padding = hashing.is_padding(keys)
    if keys.dtype == object:
      keys = hashing.hashes(keys, self.salt) >> np.uint64(1)
    elif keys.size and keys.max() > np.iinfo(np.int64).max:
      raise ValueError(f"raw id {keys.max()} does not fit int64. Give it to embed.raw_ids itself.")
    return np.where(padding, -1, keys.astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Bucketized(Column):
  """Maps numbers to intervals: id i is `boundaries[i - 1] <= x < boundaries[i]`.

  The counterpart of `tf.feature_column.bucketized_column`. Every number is data, -1 too, and none
  is padding: give bags as lists of lists or `Ragged`; or as `Padded` filled with NaN, and write
  `default_value=-1`.

  Args:
    boundaries: strictly increasing numbers; K of them make K + 1 ids. For a column of floats they
      are rounded to its dtype, so that 0.7 reaches the boundary 0.7 in float32 as in float64.
      Integers are compared with integers exactly.
    default_value: the id of NaN and None; -1 makes them padding, None raises an error.

  Raises:
    ValueError: naming the argument; in a call, for NaN, for values that are not numbers, and for
      `Padded` without a `default_value`.

  >>> Bucketized([0, 10, 100])([[-5, 10000], [150, 10], [5, 100]]).values.tolist()
  [[0, 3], [3, 2], [1, 3]]
  """

  boundaries: Sequence[float]
  default_value: int | None = None

  def __post_init__(self):
    super().__post_init__()
    boundaries = hashing.to_numbers(hashing.to_array(list(self.boundaries)))
    increases = boundaries.size and not np.isnan(boundaries).any() and (np.diff(boundaries) > 0)
    config_lib.check(
      "boundaries", self.boundaries, bool(np.all(increases)), "strictly increasing numbers"
    )
    object.__setattr__(self, "boundaries", tuple(boundaries.tolist()))
    set_integers(self, default_value=(-1, len(boundaries)))

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
    fill_missing(ids, np.isnan(numbers), numbers, self.default_value, problem)
    return ids


# --- kinds of columns ----------------------------------------------------------------------------


def flatten(
  column: Any, max_valency: int | None = None, truncate: bool = False
) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
  """Returns the values `[N]` of a column, and the function from their ids `[N]` to its kind.

  >>> values, rebuild = flatten([["a"], ["b", "c"]])
  >>> values.tolist(), rebuild(np.array([4, 5, 6])).values.tolist()
  (['a', 'b', 'c'], [[4, -1], [5, 6]])
  """
  if is_list := _is_list_of_bags(column):
    column = _join(column)
  if not isinstance(column, (inputs_lib.Ragged, inputs_lib.Sparse)):
    is_padded = isinstance(column, inputs_lib.Padded)
    array = hashing.to_array(column.values if is_padded else column)
    wrap = inputs_lib.Padded if is_padded else lambda ids: ids
    return array.reshape(-1), lambda ids: wrap(ids.reshape(array.shape))
  values = hashing.to_array(column.values)
  if values.ndim != 1:
    raise ValueError(f"the values of bags must be flat, [N]. Got shape {values.shape}.")
  used = len(values)
  if isinstance(column, inputs_lib.Ragged):  # a buffer may be longer than its bags
    splits = np.asarray(column.row_splits)
    inputs_lib.check_row_splits(splits, len(values))
    used = int(splits[-1])

  def rebuild(ids: np.ndarray) -> Any:
    unused = np.full(len(values) - used, -1, ids.dtype)
    bags = dataclasses.replace(column, values=np.concatenate([ids, unused]))
    if max_valency is None and not is_list:
      return bags
    return inputs_lib.to_padded(bags, max_valency, truncate=truncate)

  return values[:used], rebuild


def _is_list_of_bags(column: Any) -> bool:
  """Returns True for a list of lists, or an object array of them, as in data frames."""
  if isinstance(column, np.ndarray):
    if column.dtype != object or column.ndim != 1:
      return False
  elif not isinstance(column, (list, tuple)):
    return False
  return not {list, tuple, np.ndarray}.isdisjoint(map(type, column))


def _join(column: Sequence[Any]) -> inputs_lib.Ragged:
  """Joins a list of bags to one `Ragged`."""
  bags = [() if bag is None else bag for bag in column]
  if not all(isinstance(bag, (list, tuple, np.ndarray)) for bag in bags):
    raise ValueError("a list of bags holds lists and None; write [value] for a bag of one value.")
  splits = np.cumsum([0, *map(len, bags)])
  filled = [bag for bag in bags if len(bag)]
  kinds = {bag.dtype.kind if isinstance(bag, np.ndarray) else None for bag in filled}
  if len(kinds) == 1 and None not in kinds:  # keeps the dtype
    return inputs_lib.Ragged(np.concatenate(filled), splits)
  values = hashing.to_array(list(itertools.chain.from_iterable(filled)))
  return inputs_lib.Ragged(values, splits)


# --- what columns share --------------------------------------------------------------------------


def raw_feature(batch: Mapping[str, Any], key: str) -> Any:
  """Returns a raw feature of a batch; raises ValueError if there is none of this name."""
  if key not in batch:
    raise ValueError(f"the batch has no {key!r}, only {sorted(map(str, batch))}.")
  return batch[key]


def set_integers(column: Any, **bounds: tuple[int, int]) -> None:
  """Makes arguments of a frozen column ints in `(minimum, maximum)`; None may be a default."""
  for name, (minimum, maximum) in bounds.items():
    value = getattr(column, name)
    if value is not None or name not in ("default_value", "max_valency"):
      object.__setattr__(column, name, config_lib.integer(name, value, minimum, maximum))


def fill_missing(
  ids: np.ndarray,
  is_missing: np.ndarray,
  values: np.ndarray,
  default_value: int | None,
  problem: str,
) -> None:
  """Sets the ids `[N]` of values that have none to `default_value`, in place.

  Raises:
    ValueError: naming such a value and its `problem`, if `default_value` is None.
  """
  if default_value is not None:
    ids[is_missing] = default_value
  elif is_missing.any():
    raise ValueError(
      f"{values[is_missing].tolist()[0]!r} {problem} or give default_value, an id or -1 for "
      f"padding ({int(is_missing.sum())} such values)."
    )
