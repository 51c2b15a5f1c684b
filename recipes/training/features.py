"""Categorical features of a data set, and the tables of their vectors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import embed


@dataclasses.dataclass(frozen=True)
class Feature:
  """A categorical feature: one id per example, or a bag of up to `valency` ids.

  Attributes:
    vocabulary_size: rows of its table.
    valency: the most ids of an example; 1 is a single id, -1 being none.
    combiner: of the vectors of a bag.
    table: the name of the table, which features may share; "" is the feature's own name.
    optimizer: the name of the table's optimizer; "" is the model's.
    history: the table of ids in the order of time; "" is a bag.
  """

  name: str
  vocabulary_size: int
  valency: int = 1
  combiner: str = "mean"
  table: str = ""
  optimizer: str = ""
  history: str = ""

  def ids(self, columns: np.ndarray) -> np.ndarray:
    """Returns `[N]`, or `[N, valency]` of a bag."""
    return columns.reshape(-1) if self.valency == 1 else columns.reshape(-1, self.valency)


def cut_ids(ids: np.ndarray, features: Sequence[Feature]) -> dict[str, np.ndarray]:
  """Cuts neighbouring columns into the ids of each feature; see `Feature.ids`.

  >>> cut_ids(np.array([[7, 1, 2]]), [Feature("city", 10), Feature("tags", 5, valency=2)])
  {'city': array([7]), 'tags': array([[1, 2]])}
  """
  by_name, start = {}, 0
  for feature in features:
    stop = start + feature.valency
    by_name[feature.name] = feature.ids(np.ascontiguousarray(ids[:, start:stop]))
    start = stop
  return by_name


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
    dim: the width of the tables.
    optimizer: returns a sparse optimizer by name, for tables that have one of their own.
    positions: whether each id of a sequence gets a vector, instead of one vector for all.
  """
  tables: dict[str, embed.TableConfig] = {}
  configs = {}
  table_name = lambda feature: feature.table or feature.name
  for feature in features:
    name = f"{prefix}{table_name(feature)}"
    if name not in tables:
      # A single id adopts the combiner of the bags that share its table.
      bags = [f for f in features if table_name(f) == table_name(feature) and f.valency > 1]
      tables[name] = embed.TableConfig(
        feature.vocabulary_size,
        dim,
        initializer=initializer,
        optimizer=optimizer(feature.optimizer) if optimizer and feature.optimizer else None,
        combiner=(bags or [feature])[0].combiner,
        name=name,
        dtype=dtype,
      )
    is_sequence = positions and feature.history and feature.valency > 1
    configs[feature.name] = embed.FeatureConfig(
      tables[name], max_sequence_length=feature.valency if is_sequence else 0
    )
  return configs
