"""`Crossed`: ids of tuples of values of several features."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from embed import config as config_lib
from embed import inputs as inputs_lib
from embed.transforms import hashing, kinds
from embed.transforms.columns import Column, raw_feature, set_integer


@dataclasses.dataclass(frozen=True)
class Crossed:
  """Hashes tuples, one value of each of several features.

  The counterpart of `tf.feature_column.crossed_column`. An example whose features are bags gives
  every combination of their values, the last key varying fastest, and none if a bag is empty. The
  id of a tuple is
  `functools.reduce(lambda seed, word: XXH64(word, seed), words, salt) % num_buckets`; the word of
  an integer is the integer, and the word of a string is its XXH64.

  Args:
    keys: two or more, each the name of a raw feature, or a `Column` with a `key`, whose ids are
      crossed.
    num_buckets: the number of ids.
    salt: as in `HashBucket`.
    max_valency, truncate: as in `Column`, for the bags of tuples. With None, bags of `Padded` have
      room for all combinations, the same in every batch, and bags of `Ragged` stay ragged.

  Raises:
    ValueError: naming the argument; in a call, naming the key whose value has no id, or the batch
      shapes that differ.

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
    set_integer(self, "max_valency", 1, config_lib.MAX_VOCABULARY_SIZE)
    set_integer(self, "num_buckets", 1, config_lib.MAX_VOCABULARY_SIZE)
    set_integer(self, "salt", 0, 2**64 - 1)

  @property
  def vocabulary_size(self) -> int:
    """`num_buckets`, the number of rows of the table."""
    return self.num_buckets

  @property
  def _names(self) -> list[str]:
    return [str(key if isinstance(key, str) else key.key) for key in self.keys]

  def __call__(self, *columns: Any) -> Any:
    """Converts the columns of the keys, in order, to ids: dense if all columns are, else bags.

    Raises:
      ValueError: naming the key whose value has no id, or the batch shapes that differ.
    """
    bags = [_key_bags(*each) for each in zip(self._names, self.keys, columns, strict=True)]
    batches = {name: bag.batch for name, bag in zip(self._names, bags, strict=True)}
    if len(set(batches.values())) > 1:
      raise ValueError(f"the keys have batches of different shapes: {batches}.")
    # sizes[k]: the number of tuples that keys k, k + 1, ... of an example make.
    lengths = np.stack([bag.lengths for bag in bags])
    sizes = np.cumprod(lengths[::-1], axis=0)[::-1]
    example = np.repeat(np.arange(sizes.shape[1]), sizes[0])
    position = np.arange(len(example)) - np.repeat(np.cumsum(sizes[0]) - sizes[0], sizes[0])
    hashes = np.full(len(example), self.salt, np.uint64)
    for bag, length, size in zip(bags, lengths, sizes, strict=True):
      start = np.cumsum(length) - length
      choice = position % size[example] // (size // np.maximum(length, 1))[example]
      hashes = hashing.xxh64(bag.words[start[example] + choice], hashes)
    ids = hashing.buckets(hashes, self.num_buckets)

    column_kinds, batch = {bag.kind for bag in bags}, bags[0].batch
    if column_kinds == {np.ndarray}:
      dense = np.full(sizes.shape[1], -1, np.int32)
      dense[example] = ids
      return dense.reshape(batch)
    tuples = inputs_lib.Ragged(ids, np.append(0, np.cumsum(sizes[0])))
    if self.max_valency is None and inputs_lib.Ragged in column_kinds:
      return tuples
    width = self.max_valency or math.prod(bag.width for bag in bags)
    padded = inputs_lib.to_padded(tuples, width, truncate=self.truncate)
    return inputs_lib.Padded(padded.values.reshape(*batch, width))

  def read(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Returns the ids of a batch and None, as it has no weights; `Transforms` calls it."""
    return self(*(raw_feature(batch, key) for key in self._names)), None


class _KeyBags(NamedTuple):
  """The words of one key of a cross, bag after bag, without padding."""

  words: np.ndarray  # uint64 [N]
  lengths: np.ndarray  # [bags]
  batch: tuple[int, ...]
  width: int  # positions of a bag
  kind: type  # of the column, as `value_positions` returns it


def _key_bags(name: str, key: str | Column, column: Any) -> _KeyBags:
  """Reads the column of a key, or the ids that its `Column` makes of it."""
  try:
    flat = kinds.flatten(column if isinstance(key, str) else key(column))
    keys = hashing.to_keys(flat.values)
    is_key = ~hashing.is_padding(keys)
    positions, kind = kinds.value_positions(flat)
  except ValueError as error:
    raise ValueError(f"key {name!r}: {error}") from error
  valid = positions >= 0
  valid[valid] = is_key[positions[valid]]
  keys = keys[positions[valid]]
  words = hashing.hashes(keys, 0) if keys.dtype == object else keys.astype(np.uint64)
  *batch, width = positions.shape
  return _KeyBags(words, valid.sum(-1).reshape(-1), tuple(batch), width, kind)
