"""Click data sets in one form: a label, dense features and categorical ids per row.

`load` prepares a data set once (see `recipes.cache`); `train_batches` and `eval_batches` are
Grain pipelines over it. The columns are `label` uint8 `[N]`, `dense` float32 `[N, K]` and `ids`
int32 `[N, W]`, in which a feature of valency L owns L neighbouring columns, padded with -1.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np

import embed

from .. import cache, pipeline
from .. import mesh as mesh_lib
from ..cache import DataSet
from ..training.features import Feature, cut_ids, feature_configs

_FILL = {"ids": -1}  # of columns; others get 0


def data_set(name: str) -> DataSet:
  """Returns the data set that `config.dataset` names; imports what prepares it."""
  from ..tables import clicks
  from ..tables import settings as table_settings
  from . import published, synthetic

  if name == "synthetic":
    return DataSet(synthetic.settings, synthetic.build)
  if name == "table":
    return DataSet(table_settings.settings, clicks.build)
  settings = table_settings.declared(getattr(published, name))
  if name == "criteo_1tb":
    return DataSet(settings, clicks.build, published.with_bags, published.describe_bags)
  return DataSet(settings, clicks.build)


class ClickData(cache.Prepared):
  """A prepared data set, with what `tables.clicks.meta_of` says in its meta."""

  @functools.cached_property
  def features(self) -> tuple[Feature, ...]:
    """The features, in the order of their columns in `ids`."""
    return tuple(Feature(**feature) for feature in self.meta["features"])

  @property
  def num_examples(self) -> int:
    """Rows that train."""
    return len(range(*self.splits["train"]))

  @property
  def num_dense(self) -> int:
    return self.columns["dense"].shape[1] if "dense" in self.columns else 0

  @property
  def statistics(self) -> dict[str, float]:
    """Rows of the splits, features, ids they have in all, and the rate of clicks in training.

    The rate is of the first 100 million rows.
    """
    start, stop = self.splits["train"]
    rows = slice(start, min(stop, start + 100_000_000))
    labels, weights = self.columns["label"][rows], self.columns.get("weight")
    weights = None if weights is None else weights[rows]
    return {
      "training rows": self.num_examples,
      "validation rows": len(range(*self.splits["valid"])),
      "test rows": len(range(*self.splits["test"])),
      "numbers": self.num_dense,
      "categories": len(self.features),
      "rows of tables": sum({f.table or f.name: f.vocabulary_size for f in self.features}.values()),
      "label rate": float(np.average(labels, weights=weights)),
    }

  def baseline_tasks(self, config) -> Mapping[str, Callable[[], Mapping[str, float]]]:
    """Returns, by name, functions that fit a baseline and return its metrics."""
    from . import baselines  # scikit-learn's models take time to import

    return baselines.tasks(self, config)


def load(config) -> ClickData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared."""
  return ClickData(**vars(cache.load(data_set(config.dataset), config)))


def describe(config) -> ClickData:
  """Returns the data set without rows if the config alone tells its columns; else loads it."""
  known = data_set(config.dataset).describe
  return load(config) if known is None else ClickData(**vars(known(config)))


def batch_shapes(data: ClickData, config) -> dict[str, Any]:
  """Returns a global training batch as `jax.ShapeDtypeStruct`s."""
  row = {
    name: np.full((1, *column.shape[1:]), _FILL.get(name, 0), column.dtype)
    for name, column in data.columns.items()
  }
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((config.batch_size * len(x), *x.shape[1:]), x.dtype),
    _transform(data)(row),
  )


def train_batches(data: ClickData, config, start: int = 0) -> grain.IterDataset:
  """Returns the batches of `config.steps` from `start` on: `label`, `dense` `[B, K]`, `features`.

  Rows are shuffled. B is this process's part of `config.batch_size`.
  """
  source = pipeline.ShuffledBatches(
    data.columns,
    data.splits["train"],
    batch_size=config.batch_size,
    seed=config.seed,
    num_batches=config.steps,
    shard=mesh_lib.shard(),
  )
  transform = _transform(data)
  return pipeline.batches(source, transform, start=start)


def eval_batches(data: ClickData, split: str, batch_size: int) -> grain.IterDataset:
  """Returns the split once, in order; `mask` `[B]` is False where the last batch is filled up."""
  source = pipeline.SequentialBatches(
    data.columns,
    data.splits[split],
    batch_size=batch_size,
    fill=_FILL,
    shard=mesh_lib.shard(),
  )
  return pipeline.batches(source, _transform(data))


def _transform(data: ClickData) -> Callable[[Mapping[str, np.ndarray]], dict[str, Any]]:
  """Returns a function that cuts `ids` into one input per feature.

  It raises ValueError for an id outside its vocabulary.
  """
  # Validation reads names and sizes only, so the widths of the tables do not matter here.
  configs = feature_configs(data.features, dim=1)

  def transform(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    rest: dict[str, Any] = dict(batch)
    inputs: dict[str, Any] = dict(cut_ids(rest.pop("ids"), data.features))
    for feature in data.features:
      if feature.valency > 1:
        inputs[feature.name] = embed.Padded(inputs[feature.name])
    embed.validate(configs, inputs)
    return rest | {"label": batch["label"].astype(np.float32), "features": inputs}

  return transform
