"""`Crossed`, ids of tuples of features, and `Transforms`, ids of all features of a batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embed import config as config_lib
from embed import inputs as inputs_lib
from embed.transforms import hashing
from embed.transforms.columns import MAX_SIZE, Column, is_list_of_bags, raw_feature, set_integers


@dataclasses.dataclass(frozen=True)
class Crossed:
  """Hashes tuples of values, one of each of several features.

  The counterpart of `tf.feature_column.crossed_column`, for features with one value per example; of
  bags, join the values that belong together to strings, and use `HashBucket`. The id of a tuple is
  `functools.reduce(lambda seed, word: XXH64(word, seed), words, 0) % num_buckets`; the word of an
  integer is the integer, and the word of a string is its XXH64.

  Args:
    keys: two or more, each the name of a raw feature, or a `Column` with a `key`, whose ids are
      crossed.
    num_buckets: the number of ids.

  >>> cross = Crossed(["city", Bucketized([18, 65], key="age")], num_buckets=100)
  >>> cross(["Rome", "Oslo", ""], [17.5, 40.0, 40.0]).tolist()
  [97, 89, -1]
  """

  keys: Sequence[str | Column]
  num_buckets: int

  def __post_init__(self):
    keys = () if isinstance(self.keys, str) else tuple(self.keys)
    is_named = lambda key: isinstance(key, str) or (isinstance(key, Column) and key.key is not None)
    config_lib.check(
      "keys",
      self.keys,
      len(keys) > 1 and all(map(is_named, keys)),
      "two or more names of raw features, or columns that name theirs, such as "
      "Bucketized([18, 65], key='age')",
    )
    object.__setattr__(self, "keys", keys)
    set_integers(self, num_buckets=(1, MAX_SIZE))

  @property
  def vocabulary_size(self) -> int:
    """`num_buckets`, the number of rows of the table."""
    return self.num_buckets

  @property
  def _names(self) -> list[str]:
    return [str(key if isinstance(key, str) else key.key) for key in self.keys]

  def __call__(self, *columns: Any) -> np.ndarray:
    """Returns the ids of the columns of the keys, in order: int32 of their shape."""
    words = {n: _words(n, *x) for n, *x in zip(self._names, self.keys, columns, strict=True)}
    shapes = {name: word.shape for name, (word, _) in words.items()}
    shape, *others = set(shapes.values())
    if others:
      raise ValueError(f"the keys have batches of different shapes: {shapes}.")
    hashes, is_tuple = np.zeros(shape, np.uint64), np.ones(shape, bool)
    for word, is_word in words.values():
      hashes, is_tuple = hashing.xxh64(word, hashes), is_tuple & is_word
    return np.where(is_tuple, hashing.buckets(hashes, self.num_buckets), np.int32(-1))

  def read(self, batch: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns the ids of a batch, as `Column.read` does; the keys name their raw features."""
    return self(*(raw_feature(batch, key) for key in self._names))


def _words(name: str, key: str | Column, column: Any) -> tuple[np.ndarray, np.ndarray]:
  """Returns the words of a key, uint64, and which of them are not padding."""
  try:
    if isinstance(column, inputs_lib.KINDS) or is_list_of_bags(column):
      raise ValueError("bags cannot be crossed. Join their values to strings for a HashBucket.")
    values = hashing.to_array(column if isinstance(key, str) else key(column))
    keys = hashing.to_keys(values.reshape(-1))
    is_word = ~hashing.is_padding(keys)
  except ValueError as error:
    raise ValueError(f"key {name!r}: {error}") from error
  words = hashing.hashes(keys) if keys.dtype == object else keys.astype(np.uint64)
  return words.reshape(values.shape), is_word.reshape(values.shape)


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
  ...   "city_x_age": Crossed(["city", Bucketized([18, 65], key="age")], num_buckets=1000),
  ... })
  >>> ids = transforms({"genre": [["comedy"], []], "city": ["Rome", "Oslo"], "age": [17.5, 40]})
  >>> ids["genre"].values.tolist(), ids["age"].tolist()
  ([[1], [-1]], [0, 1])
  """

  columns: Mapping[str, Column | Crossed]

  def __post_init__(self):
    object.__setattr__(self, "columns", dict(self.columns))
    for name, column in self.columns.items():
      if not isinstance(column, (Column, Crossed)):
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
