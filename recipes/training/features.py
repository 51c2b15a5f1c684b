"""Categorical features of a data set, and the tables that hold their vectors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import embed


@dataclasses.dataclass(frozen=True)
class Feature:
  """A categorical feature: one id per example, or a bag of up to `valency` ids.

  Attributes:
    name: of the feature.
    vocabulary_size: rows of its table.
    valency: the most ids of an example; 1 is a single id, -1 being none.
    combiner: of the vectors of a bag.
    table: the name of the table, which features may share; "" is the feature's own name.
    dim: the width of the table; 0 is the width of the model.
    optimizer: of the table, by name; "" is the one of the model.
    eviction: of the table's dynamic vocabulary; "" is a vocabulary that does not change. With one,
      an id is two int32 columns, the halves of a raw id.
    half_life: of the counts of "lfu", in batches; 0 never forgets.
    history: of ids in the order of time, the name of the sequence that they are the positions of,
      or beside; "" is a bag in no order.
    candidate: the row's own feature that a history is attended for; "" is one in its table.
  """

  name: str
  vocabulary_size: int
  valency: int = 1
  combiner: str = "mean"
  table: str = ""
  dim: int = 0
  optimizer: str = ""
  eviction: str = ""
  half_life: int = 0
  history: str = ""
  candidate: str = ""

  @property
  def is_dynamic(self) -> bool:
    """Whether ids are raw, and get rows while training."""
    return bool(self.eviction)

  @property
  def columns(self) -> int:
    """The columns of int32 that its ids take."""
    return self.valency * (2 if self.is_dynamic else 1)

  def ids(self, columns: np.ndarray) -> np.ndarray:
    """Returns `[N]`, or of bags `[N, valency]`; of a dynamic vocabulary uint32 `[..., 2]`.

    >>> Feature("user", 16, eviction="lru").ids(np.array([[0, 7], [-1, -1]], np.int32)).tolist()
    [[0, 7], [4294967295, 4294967295]]
    """
    shape = () if self.valency == 1 else (self.valency,)
    if self.is_dynamic:
      return columns.reshape(-1, *shape, 2).view(np.uint32)
    return columns.reshape(-1, *shape)


def cut_ids(ids: np.ndarray, features: Sequence[Feature]) -> dict[str, np.ndarray]:
  """Returns the ids of each feature, as `Feature.ids`, out of neighbouring columns.

  >>> cut_ids(np.array([[7, 1, 2]]), [Feature("city", 10), Feature("tags", 5, valency=2)])
  {'city': array([7]), 'tags': array([[1, 2]])}
  """
  blocks, column = {}, 0
  for feature in features:
    block = np.ascontiguousarray(ids[:, column : column + feature.columns])
    blocks[feature.name] = feature.ids(block)
    column += feature.columns
  return blocks


def feature_configs(
  features: Sequence[Feature],
  dim: int,
  *,
  initializer: Any = None,
  optimizer: Callable[[str], Any] | None = None,
  dtype: Any = np.float32,
  prefix: str = "",
  positions: bool = False,
) -> dict[str, embed.FeatureConfig]:
  """Returns the configs of features by name; features of one table share its `TableConfig`.

  Args:
    dim: the width of tables that have none of their own.
    initializer, dtype: of the tables.
    optimizer: returns a sparse optimizer by name, for tables that have one of their own.
    prefix: of the names of tables.
    positions: whether sequences have a vector for each of their ids, in place of one for all.

  >>> city, home = Feature("city", 10), Feature("home", 10, table="city")
  >>> configs = feature_configs([city, home], 8)
  >>> configs["city"].table is configs["home"].table
  True
  """
  tables: dict[str, embed.TableConfig] = {}
  configs = {}
  for feature in features:
    name = f"{prefix}{feature.table or feature.name}"
    if name not in tables:
      # A single id adopts the combiner of the bags that share its table.
      shared = [f for f in features if (f.table or f.name) == (feature.table or feature.name)]
      bags = [f.combiner for f in shared if f.valency > 1]
      own = optimizer(feature.optimizer) if optimizer and feature.optimizer else None
      size: Any = feature.vocabulary_size
      if feature.is_dynamic:
        half_life = (feature.half_life or None) if feature.eviction == "lfu" else None
        size = embed.DynamicVocabulary(size, eviction=feature.eviction, half_life=half_life)
      tables[name] = embed.TableConfig(
        size,
        feature.dim or dim,
        initializer=initializer,
        optimizer=own,
        combiner=bags[0] if bags else feature.combiner,
        name=name,
        dtype=dtype,
      )
    is_sequence = positions and feature.history and feature.valency > 1
    configs[feature.name] = embed.FeatureConfig(
      tables[name], max_sequence_length=feature.valency if is_sequence else 0
    )
  return configs
