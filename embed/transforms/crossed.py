"""`Crossed`, ids of tuples of features, and `Transforms`, ids of all features of a batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embed import inputs as inputs_lib
from embed.transforms import hashing
from embed.transforms.columns import MAX_SIZE, Column, flatten, raw_feature, set_integers


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
  """

  keys: Sequence[str | Column]
  num_buckets: int
  salt: int = 0
  max_valency: int | None = None
  truncate: bool = False

  def __post_init__(self):
    keys = () if isinstance(self.keys, str) else tuple(self.keys)
    is_named = lambda key: isinstance(key, str) or (isinstance(key, Column) and key.key is not None)
    if len(keys) < 2 or not all(map(is_named, keys)):
      raise ValueError(
        "Argument `keys` must be two or more names of raw features, or columns that name theirs, "
        f"such as Bucketized([18, 65], key='age'). Got {self.keys!r}."
      )
    object.__setattr__(self, "keys", keys)
    sizes = (1, MAX_SIZE)
    set_integers(self, max_valency=sizes, num_buckets=sizes, salt=(0, 2**64 - 1))

  @property
  def vocabulary_size(self) -> int:
    """`num_buckets`, the number of rows of the table."""
    return self.num_buckets

  @property
  def _names(self) -> list[str]:
    return [str(key if isinstance(key, str) else key.key) for key in self.keys]

  def __call__(self, *columns: Any) -> Any:
    """Converts the columns of the keys, in order, to ids: dense if all columns are, else bags."""
    parts = [_words(*each) for each in zip(self._names, self.keys, columns, strict=True)]
    batches = {name: words.shape[:-1] for name, (words, *_) in zip(self._names, parts, strict=True)}
    if len(set(batches.values())) > 1:
      raise ValueError(f"the keys have batches of different shapes: {batches}.")
    batch = parts[0][0].shape[:-1]
    hashes = np.full((*batch, 1), self.salt, np.uint64)
    is_tuple = np.ones(hashes.shape, bool)
    for words, is_word, _ in parts:  # [*batch, L] of the keys before, times the values of this one
      width = hashes.shape[-1] * words.shape[-1]
      hashes = hashing.xxh64(words[..., None, :], hashes[..., None]).reshape(*batch, width)
      is_tuple = (is_tuple[..., None] & is_word[..., None, :]).reshape(*batch, width)

    ids = hashing.buckets(hashes, self.num_buckets)
    kinds = {kind for *_, kind in parts}
    if kinds == {np.ndarray}:
      return np.where(is_tuple, ids, np.int32(-1)).reshape(batch)
    lengths = is_tuple.sum(-1).reshape(-1)
    bags = inputs_lib.Ragged(ids[is_tuple], np.append(0, np.cumsum(lengths)))
    if self.max_valency is None and inputs_lib.Ragged in kinds:
      return bags
    width = self.max_valency or ids.shape[-1]
    padded = inputs_lib.to_padded(bags, width, truncate=self.truncate)
    return inputs_lib.Padded(padded.values.reshape(*batch, width))

  def read(self, batch: Mapping[str, Any], name: str) -> Any:
    """Returns the ids of a batch, as `Column.read` does; the keys name their raw features."""
    return self(*(raw_feature(batch, key) for key in self._names))


def _words(name: str, key: str | Column, column: Any) -> tuple[np.ndarray, np.ndarray, type]:
  """Returns the words of a key `[*batch, L]`, which of them are values, and the column's kind."""
  try:
    values, rebuild = flatten(column if isinstance(key, str) else key(column))
    keys = hashing.to_keys(values)
    positions = rebuild(np.arange(len(keys)))
    is_key = ~hashing.is_padding(keys)
  except ValueError as error:
    raise ValueError(f"key {name!r}: {error}") from error
  kind = type(positions)
  if kind in (inputs_lib.Ragged, inputs_lib.Sparse):
    positions = inputs_lib.to_padded(positions)
  if isinstance(positions, inputs_lib.Padded):
    positions = positions.values
  elif positions.ndim < 2 or positions.shape[-1] > 1:
    positions = positions[..., None]  # dense: one value per output; [B, 1] is squeezed to [B]
  words = hashing.hashes(keys, 0) if keys.dtype == object else keys.astype(np.uint64)
  # A row for the positions without a value, which are -1.
  words, is_key = np.append(words, np.uint64(0)), np.append(is_key, False)
  return words[positions], is_key[positions], kind


@dataclasses.dataclass(frozen=True)
class Transforms:
  """Converts batches of raw features to inputs of `SparseEmbed`.

  The counterpart of the `feature_columns` of TensorFlow's `EmbeddingConfigSpec`.

  Args:
    columns: the transform of each feature, by name. A `Column` without a `key` reads the raw
      feature of the same name. `columns[name].vocabulary_size` is the size of its table.

  Raises:
    ValueError: for an entry that is not a transform.

  >>> transforms = Transforms({
  ...   "genre": Vocabulary(["drama", "comedy"], num_oov_buckets=1),
  ...   "age": Bucketized([18, 65]),
  ...   "city_x_age": Crossed(["city", Bucketized([18, 65], key="age")], num_buckets=1000),
  ... })
  >>> ids = transforms({"genre": [["comedy"], []], "city": ["Rome", "Oslo"], "age": [17.5, 40]})
  >>> ids["genre"].values.tolist(), ids["age"].tolist()
  ([[1], [-1]], [0, 1])
  >>> features = {
  ...   name: embed.FeatureConfig(embed.TableConfig(column.vocabulary_size, dim=8, name=name))
  ...   for name, column in transforms.columns.items()
  ... }
  >>> embed.validate(features, ids)
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
    """Returns the ids of every feature by name, in NumPy.

    Args:
      batch: raw features by name; others than the columns name are ignored.

    Raises:
      ValueError: naming the feature whose raw feature is missing or whose transform raises.
    """
    ids = {}
    for name, column in self.columns.items():
      try:
        ids[name] = column.read(batch, name)
      except ValueError as error:
        raise ValueError(f"Feature {name!r}: {error}") from error
    return ids
