"""`Transforms`: a batch of raw features to ids and weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from embed.inputs import raw_ids
from embed.transforms import hashing, kinds
from embed.transforms.columns import Column, MultiHash, RawIds, raw_feature
from embed.transforms.crossed import Crossed


class Inputs(NamedTuple):
  """Ids and weights, as `Transforms` returns them; `sparse_embed(*inputs)` looks them up.

  Attributes:
    features: ids by feature name, in NumPy.
    weights: weights of the `Weighted` features, by name.

  >>> inputs = Transforms({"tag": Weighted(Identity(10), "score")})({"tag": [[3]], "score": [[2]]})
  >>> inputs.features["tag"].values.tolist(), inputs.weights["tag"].values.tolist()
  ([[3]], [[2.0]])
  """

  features: dict[str, Any]
  weights: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Weighted:
  """Pairs the ids of a column with weights from another raw feature.

  The counterpart of `tf.feature_column.weighted_categorical_column`.

  Args:
    column: makes the ids.
    weights: the raw feature that holds a number for each value of the column.

  Raises:
    ValueError: naming the argument; in a call, for weights at other positions than the values, or
      weights that are not finite.

  >>> ids, weights = Weighted(Identity(10), "score")([[3, 7], [5]], [[0.5, 2], [1]])
  >>> ids.values.tolist(), weights.values.tolist()
  ([[3, 7], [5, -1]], [[0.5, 2.0], [1.0, 0.0]])
  >>> Weighted(Identity(10), "score").vocabulary_size
  10
  """

  column: Column
  weights: str

  def __post_init__(self):
    is_column = isinstance(self.column, Column) and not isinstance(self.column, MultiHash)
    if not is_column or not isinstance(self.weights, str):
      raise ValueError(
        "Write a column and the raw feature of its weights, such as "
        f"Weighted(HashBucket(1000), 'score'). Got {self.column!r} and {self.weights!r}."
      )

  @property
  def vocabulary_size(self) -> int:
    """The vocabulary size of the column, the number of rows of the table."""
    return self.column.vocabulary_size

  def __call__(self, column: Any, weights: Any) -> tuple[Any, Any]:
    """Converts two columns to ids and float32 weights of one kind; weights of padding are 0.

    An array `[batch, L]` holds bags, as `Padded` does; an array `[batch]` holds bags of one value.

    Raises:
      ValueError: for weights at other positions than the values, or weights that are not finite.
    """
    layout = self.column.max_valency, self.column.truncate
    flat, flat_weights = kinds.flatten(column, *layout), kinds.flatten(weights, *layout)
    if not np.array_equal(kinds.value_positions(flat)[0], kinds.value_positions(flat_weights)[0]):
      raise ValueError(
        f"{self.weights!r} must have a weight where there is a value, and nowhere else."
      )
    ids = self.column.ids(flat.values)
    with np.errstate(over="ignore"):  # infinite weights are reported below
      numbers = np.where(ids < 0, 0, hashing.to_numbers(flat_weights.values)).astype(np.float32)
    if not (finite := np.isfinite(numbers)).all():
      raise ValueError(f"{self.weights!r} holds a weight of {numbers[~finite][0]}.")
    bags = kinds.as_bags(flat.rebuild(ids))
    if isinstance(self.column, RawIds):
      bags = raw_ids(bags)
    return bags, kinds.as_bags(flat.rebuild(numbers))

  def read(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Returns the ids and weights of the feature `name` of a batch; `Transforms` calls it."""
    return self(raw_feature(batch, self.column.key or name), raw_feature(batch, self.weights))


@dataclasses.dataclass(frozen=True)
class Transforms:
  """Converts batches of raw features to inputs of `SparseEmbed`.

  The counterpart of the `feature_columns` of TensorFlow's `EmbeddingConfigSpec`.

  Args:
    columns: the transform of each feature, by name. A `Column` without a `key` reads the raw
      feature of the same name. `columns[name].vocabulary_size` is the size of its table.

  Raises:
    ValueError: for an entry that is not a transform; in a call, naming the feature whose raw
      feature is missing or whose transform raises.

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
    """Returns the ids of every feature, and the weights of the weighted ones.

    Args:
      batch: raw features by name; others than the columns name are ignored.

    Returns:
      An `Inputs`, on the host.

    Raises:
      ValueError: naming the feature whose raw feature is missing or whose transform raises.
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
