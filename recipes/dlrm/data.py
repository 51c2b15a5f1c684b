"""Click data sets in one form: a label, dense features and categorical ids per row.

`load` prepares a data set once (see `recipes.datasets`); `train_batches` and `eval_batches` are
Grain pipelines over it. The columns are `label` uint8 `[N]` (of several labels
float32 `[N, labels]`: see `tasks`), `dense` float32 `[N, K]` and `ids`
int32 `[N, W]`, in which a feature of valency L owns L neighbouring columns, padded with -1.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

import embed

from .. import cache, pipeline
from .. import mesh as mesh_lib
from ..datasets import DataSet, Prepared, Registry
from ..tables import clicks, histories, spark, spec
from ..tables import settings as table_settings
from ..training.features import Feature, cut_ids, feature_configs
from . import criteo1tb, published, synthetic, tasks

_FILL = {"ids": -1}  # of columns; others get 0


def _build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  on_cluster = settings["engine"] == "spark"
  return (spark.build if on_cluster else clicks.build)(settings, folder)


def _view(prepared: Prepared) -> Prepared:
  assert isinstance(prepared.columns, cache.Columns)
  folder = prepared.columns.folder
  if "shards" in prepared.meta:
    return dataclasses.replace(prepared, columns=spark.Shards(folder))
  if prepared.meta.get("histories"):
    return dataclasses.replace(prepared, columns=histories.Columns(folder))
  return prepared


_table = functools.partial(DataSet, build=_build, view=_view)
DATA_SETS = Registry(
  {
    "criteo_1tb": DataSet(
      criteo1tb.settings, criteo1tb.build, view=criteo1tb.view, describe=criteo1tb.describe
    ),
    "synthetic": DataSet(synthetic.settings, synthetic.build),
    "table": _table(table_settings.settings),
  }
  | {
    name: _table(table_settings.declared(getattr(published, name)), hint=hint)
    for name, hint in published.HINTS.items()
  }
)


@dataclasses.dataclass(frozen=True)
class ClickData:
  """A prepared data set.

  Attributes:
    columns: memory-mapped, or computed when they are indexed.
    splits: `train`, `valid` and `test` as ranges of rows.
    features: in the order of their columns in `ids`.
    sha256: hashes of the source files by name, or of the generated columns.
    best: metrics of the probabilities that the labels were drawn from, where they are known.
    serve: the folder of what serving needs besides the model; None where there is none.
    dense_names: of the columns of `dense`, where they are known.
    vectors: by name, the first and past the last column of `dense` of vectors.
    labels: what is predicted, by name, in the order of the columns of `label`.
  """

  columns: Mapping[str, Any]
  splits: Mapping[str, tuple[int, int]]
  features: tuple[Feature, ...]
  sha256: Mapping[str, str]
  best: Mapping[str, float]
  serve: Path | None = None
  dense_names: tuple[str, ...] = ()
  vectors: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
  labels: tasks.Labels = dataclasses.field(default_factory=lambda: tasks.ONE_CLICK)

  @property
  def num_examples(self) -> int:
    """Rows that train."""
    return len(range(*self.splits["train"]))

  @property
  def num_dense(self) -> int:
    return self.columns["dense"].shape[1] if "dense" in self.columns else 0

  @property
  def numbers(self) -> tuple[int, ...]:
    """The columns of `dense` that are no vector's."""
    of_vectors = {i for start, stop in self.vectors.values() for i in range(start, stop)}
    return tuple(i for i in range(self.num_dense) if i not in of_vectors)

  @property
  def statistics(self) -> dict[str, float]:
    """Rows of the splits, features, ids they have in all, and the rate of clicks in training.

    The rate is of the first 100 million rows.
    """
    start, stop = self.splits["train"]
    rows = slice(start, min(stop, start + 100_000_000))
    labels, weights = self.columns["label"][rows], self.columns.get("weight")
    weights = None if weights is None else weights[rows]
    rates = {"label rate": float(np.average(labels, weights=weights))}
    if len(self.labels) > 1:
      columns = zip(self.labels, labels.T, strict=True)
      rates = {f"{name} rate": float(np.nanmean(column)) for name, column in columns}
    return {
      **{
        f"{words} rows": len(range(*self.splits[name]))
        for name, words in (("train", "training"), ("valid", "validation"), ("test", "test"))
      },
      "numbers": len(self.numbers),
      "categories": len(self.features),
      "rows of tables": sum({f.table or f.name: f.vocabulary_size for f in self.features}.values()),
      **rates,
    }


def load(config) -> ClickData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared."""
  return _click_data(DATA_SETS.load(config))


def describe(config) -> ClickData:
  """Returns the data set without rows if the config alone tells its columns; else loads it."""
  return _click_data(DATA_SETS.describe(config))


def _click_data(prepared: Prepared) -> ClickData:
  features = tuple(Feature(**feature) for feature in prepared.meta["features"])
  return ClickData(
    prepared.columns,
    prepared.splits,
    features,
    prepared.sha256,
    prepared.best,
    prepared.serve,
    tuple(prepared.meta.get("dense", ())),
    {name: (start, stop) for name, (start, stop) in prepared.meta.get("vectors", {}).items()},
    spec.labels(spec.parse(prepared.meta.get("labels", {}))) or tasks.ONE_CLICK,
  )


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
    apart=isinstance(data.columns, spark.Shards),
  )
  transform = _transform(data)
  return pipeline.batches(source, transform, start=start, num_workers=config.num_workers)


def eval_batches(
  data: ClickData, split: str, batch_size: int, *, num_workers: int = 0
) -> grain.IterDataset:
  """Returns the split once, in order; `mask` `[B]` is False where the last batch is filled up.

  B is this process's part of `batch_size`; `num_workers` is as for `pipeline.batches`.
  """
  source = pipeline.SequentialBatches(
    data.columns,
    data.splits[split],
    batch_size=batch_size,
    fill=_FILL,
    shard=mesh_lib.shard(),
    apart=isinstance(data.columns, spark.Shards),
  )
  return pipeline.batches(source, _transform(data), num_workers=num_workers)


def _transform(data: ClickData):
  # Validation reads names and sizes only, so the widths of the tables do not matter here.
  configs = feature_configs(data.features, dim=1)
  return functools.partial(split_features, features=data.features, configs=configs)


def split_features(
  batch: dict[str, np.ndarray],
  *,
  features: tuple[Feature, ...],
  configs: Mapping[str, embed.FeatureConfig],
) -> dict[str, Any]:
  """Cuts `ids` into one input per feature and checks them on the host.

  Raises:
    ValueError: an id is outside its vocabulary; names the feature.
  """
  ids = cut_ids(batch["ids"], features)
  inputs = {
    feature.name: embed.Padded(ids[feature.name]) if feature.valency > 1 else ids[feature.name]
    for feature in features
  }
  embed.validate(configs, inputs)
  rest = {name: array for name, array in batch.items() if name != "ids"}
  return rest | {"label": batch["label"].astype(np.float32), "features": inputs}
