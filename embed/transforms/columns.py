"""Columns: functions from one raw feature to ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embed import config as config_lib
from embed import inputs as inputs_lib
from embed.engine.bags import narrow
from embed.transforms import hashing, kinds

_OPTIONAL = ("default_value", "max_valency")


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
    set_integer(self, "max_valency", 1, config_lib.MAX_VOCABULARY_SIZE)

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
    flat = kinds.flatten(column, self.max_valency, self.truncate)
    return flat.rebuild(self.ids(flat.values))

  def read(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Returns the ids of the feature `name` of a batch, and its weights or None.

    `Transforms` calls it.

    Raises:
      ValueError: as in a call, or if the batch lacks the raw feature.

    >>> Identity(10).read({"user": [3, 7]}, "user")
    (array([3, 7], dtype=int32), None)
    """
    return self(raw_feature(batch, self.key or name)), None


@dataclasses.dataclass(frozen=True)
class _Buckets(Column):
  """A column with as many ids as `num_buckets`."""

  num_buckets: int

  def __post_init__(self):
    super().__post_init__()
    set_integer(self, "num_buckets", 1, config_lib.MAX_VOCABULARY_SIZE)

  @property
  def vocabulary_size(self) -> int:
    return self.num_buckets


@dataclasses.dataclass(frozen=True)
class Identity(_Buckets):
  """Takes integers as ids; negative ones are padding, as everywhere in `embed`.

  The counterpart of `tf.feature_column.categorical_column_with_identity`, where a negative id is
  out of range.

  Args:
    num_buckets: ids are 0 .. num_buckets - 1.
    default_value: the id of larger integers; -1 makes them padding, None raises an error.
    permuted: whether each integer becomes another one, by a fixed permutation of 0 ..
      num_buckets - 1. For integers that share a factor with the number of shards, such as
      multiples of 8: under the strategy "mod" a few shards would have all of the rows that are
      used.

  Raises:
    ValueError: naming the argument; in a call, naming an integer that is out of range or a string.

  >>> Identity(num_buckets=10)([0, 9, -1]).tolist()
  [0, 9, -1]
  """

  default_value: int | None = None
  permuted: bool = False

  def __post_init__(self):
    super().__post_init__()
    set_integer(self, "default_value", -1, self.vocabulary_size - 1)

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
class HashBucket(_Buckets):
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

  salt: int = 0

  def __post_init__(self):
    super().__post_init__()
    set_integer(self, "salt", 0, 2**64 - 1)

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = hashing.to_keys(values)
    ids = hashing.buckets(hashing.hashes(keys, self.salt), self.num_buckets)
    ids[hashing.is_padding(keys)] = -1
    return ids


@dataclasses.dataclass(frozen=True)
class MultiHash(_Buckets):
  """Hashes each value several times: a bag of as many ids, whose rows are summed.

  Two values that share one row rarely share all of them (Svenstrup et al. 2017,
  arXiv:1709.03933). Give the table the combiner "sum". `embed.DynamicVocabulary` gives ids rows of
  their own instead.

  Args:
    num_buckets: the number of ids, of all hashes together.
    num_hashes: the ids of each value.
    salt: of the first hash, as in `HashBucket`; the others have the next ones.

  Raises:
    ValueError: naming the argument; in a call, as `HashBucket`, or for `Sparse`.

  >>> MultiHash(1000, num_hashes=2)(["drama", ""]).values.tolist()
  [[964, 828], [-1, -1]]
  """

  num_hashes: int = 2
  salt: int = 0

  def __post_init__(self):
    super().__post_init__()
    set_integer(self, "num_hashes", 1, 64)
    set_integer(self, "salt", 0, 2**64 - 1 - self.num_hashes)

  def __call__(self, column: Any) -> Any:
    hashes = [HashBucket(self.num_buckets, self.salt + i) for i in range(self.num_hashes)]
    flat = kinds.flatten(column, self.max_valency, self.truncate)
    bags = [kinds.as_bags(flat.rebuild(each.ids(flat.values))) for each in hashes]
    if isinstance(bags[0], inputs_lib.Sparse):
      raise ValueError("MultiHash takes no embed.Sparse: give embed.Padded or embed.Ragged.")
    side_by_side = np.stack([bag.values for bag in bags], axis=-1)
    if isinstance(bags[0], inputs_lib.Ragged):
      splits, most = np.asarray(bags[0].row_splits) * self.num_hashes, bags[0].max_valency
      longest = None if most is None else most * self.num_hashes
      return inputs_lib.Ragged(side_by_side.reshape(-1), splits, longest)
    return inputs_lib.Padded(side_by_side.reshape(*side_by_side.shape[:-2], -1))


@dataclasses.dataclass(frozen=True)
class QuotientRemainder(_Buckets):
  """One of the two digits of an integer: `id // divisor`, or with `remainder` `id % divisor`.

  Two features of one raw feature, each with a small table, in place of one with a large one (Shi et
  al. 2020, arXiv:1909.02107): add or multiply their activations. No two integers have both digits
  in common.

  Args:
    num_buckets: integers are 0 .. num_buckets - 1.
    divisor: about the root of `num_buckets` makes both tables smallest.
    remainder: whether ids are the remainders.

  Raises:
    ValueError: naming the argument; in a call, as `Identity`.

  >>> quotient = QuotientRemainder(1000, divisor=32, key="user")
  >>> remainder = QuotientRemainder(1000, divisor=32, remainder=True, key="user")
  >>> quotient([999, 32]).tolist(), remainder([999, 32]).tolist()
  ([31, 1], [7, 0])
  >>> quotient.vocabulary_size, remainder.vocabulary_size
  (32, 32)
  """

  divisor: int
  remainder: bool = False

  def __post_init__(self):
    super().__post_init__()
    set_integer(self, "divisor", 1, config_lib.MAX_VOCABULARY_SIZE)

  @property
  def vocabulary_size(self) -> int:
    return self.divisor if self.remainder else -(-self.num_buckets // self.divisor)

  def ids(self, values: np.ndarray) -> np.ndarray:
    ids = Identity(self.num_buckets).ids(values)
    digits = ids % self.divisor if self.remainder else ids // self.divisor
    return np.where(ids < 0, -1, digits).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class RawIds(Column):
  """Takes strings and integers as raw 64-bit ids, for a table with an `embed.DynamicVocabulary`.

  A string is hashed, to the upper 63 bits of `XXH64(key, seed=salt)`; among a million strings two
  have the same hash with a probability of 5 in 100 million, among a billion of 1 in 19. An integer
  is its own raw id.

  Args:
    salt: seed of the hash.

  Raises:
    ValueError: naming the argument; in a call, for floats, for integers below -1, and for those
      above 2**63 - 1.

  >>> RawIds()(np.array([7, -1])).tolist()  # uint32 pairs, as `embed.raw_ids` makes them
  [[0, 7], [4294967295, 4294967295]]
  >>> RawIds()([["drama", "comedy"], []]).values.shape
  (2, 2, 2)
  """

  salt: int = 0

  def __post_init__(self):
    super().__post_init__()
    set_integer(self, "salt", 0, 2**64 - 1)

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
      ids = (hashing.hashes(keys, self.salt) >> np.uint64(1)).astype(np.int64)
    elif keys.size and keys.max() > np.iinfo(np.int64).max:
      raise ValueError(f"raw id {keys.max()} does not fit int64. Give it to embed.raw_ids itself.")
    else:
      ids = keys.astype(np.int64)
    ids[padding] = -1
    return ids


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
    if not boundaries.size or np.isnan(boundaries).any() or (np.diff(boundaries) <= 0).any():
      raise ValueError(
        f"Argument `boundaries` must be strictly increasing numbers. Got {self.boundaries!r}."
      )
    object.__setattr__(self, "boundaries", tuple(boundaries.tolist()))
    set_integer(self, "default_value", -1, self.vocabulary_size - 1)

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
    fill_missing(
      ids, np.isnan(numbers), numbers, self.default_value, "lies in no bucket: fill it in,"
    )
    return ids


def raw_feature(batch: Mapping[str, Any], key: str) -> Any:
  """Returns a raw feature of a batch; raises ValueError if there is none of this name."""
  if key not in batch:
    raise ValueError(f"the batch has no {key!r}, only {sorted(map(str, batch))}.")
  return batch[key]


def set_integer(column: Any, name: str, minimum: int, maximum: int) -> None:
  """Makes an argument of a frozen column an int; `default_value` and `max_valency` may be None.

  Raises:
    ValueError: if it is not an integer in `minimum` .. `maximum`.
  """
  value = getattr(column, name)
  if value is None and name in _OPTIONAL:
    return
  object.__setattr__(column, name, config_lib.integer(name, value, minimum, maximum))


def fill_missing(
  ids: np.ndarray,
  is_missing: np.ndarray,
  values: np.ndarray,
  default_value: int | None,
  problem: str,
) -> None:
  """Sets the ids `[N]` of values that have none, in place.

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
