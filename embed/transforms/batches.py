"""`Transforms`: ids of all features of a batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from embed.transforms.columns import Column


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
