"""Click data sets in one form: a label, dense features and categorical ids per row.

`load` prepares a data set once (see `recipes.datasets`); `train_batches` and `eval_batches` are
Grain pipelines over it. The columns are `label` uint8 `[N]`, `dense` float32 `[N, K]` and `ids`
int32 `[N, W]`, in which a feature of valency L owns L neighbouring columns, padded with -1.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from sklearn.metrics import roc_auc_score

import embed

from .. import baselines, hosts, movielens, pipeline
from ..datasets import DataSet, Prepared, Registry
from ..features import Feature, cut_ids, feature_configs
from ..tables import clicks
from ..tables import settings as table_settings
from . import criteo, criteo1tb, movielens1m, synthetic

DATA_SETS = Registry(
  {
    "criteo": DataSet(table_settings.declared(criteo.table), clicks.build, hint=criteo.HINT),
    "criteo_1tb": DataSet(
      criteo1tb.settings, criteo1tb.build, view=criteo1tb.view, describe=criteo1tb.describe
    ),
    "movielens1m": DataSet(
      table_settings.declared(movielens1m.table), clicks.build, hint=movielens.HINT
    ),
    "synthetic": DataSet(synthetic.settings, synthetic.build),
    "table": DataSet(table_settings.settings, clicks.build),
  }
)

_ROWS = 1 << 22  # labels that are read at once


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
  """

  columns: Mapping[str, Any]
  splits: Mapping[str, tuple[int, int]]
  features: tuple[Feature, ...]
  sha256: Mapping[str, str]
  best: Mapping[str, float]
  serve: Path | None = None
  dense_names: tuple[str, ...] = ()

  @property
  def num_dense(self) -> int:
    return self.columns["dense"].shape[1]


def load(config) -> ClickData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared.

  Raises:
    UserError: as `Registry.load`.
  """
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
  )


def batch_shapes(data: ClickData, batch_size: int) -> dict[str, Any]:
  """Returns a training batch as `jax.ShapeDtypeStruct`s."""
  row = {
    name: np.full((1, *column.shape[1:]), -1 if name == "ids" else 0, column.dtype)
    for name, column in data.columns.items()
  }
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype), _transform(data)(row)
  )


def train_batches(data: ClickData, config) -> grain.IterDataset:
  """Returns `config.steps` shuffled batches: `label` `[B]`, `dense` `[B, K]`, `features`.

  B is this process's part of `config.batch_size`.
  """
  source = pipeline.ShuffledBatches(
    data.columns,
    data.splits["train"],
    batch_size=config.batch_size,
    seed=config.seed,
    num_batches=config.steps,
    shard=hosts.shard(),
  )
  return pipeline.batches(source, _transform(data), num_workers=config.num_workers)


def eval_batches(
  data: ClickData, split: str, batch_size: int, *, num_workers: int = 0
) -> grain.IterDataset:
  """Returns the split once, in order; `mask` `[B]` is False where the last batch is filled up.

  B is this process's part of `batch_size`; `num_workers` is as for `pipeline.batches`.
  """
  source = pipeline.SequentialBatches(
    data.columns, data.splits[split], batch_size=batch_size, fill={"ids": -1}, shard=hosts.shard()
  )
  return pipeline.batches(source, _transform(data), num_workers=num_workers)


def _transform(data: ClickData):
  # Validation reads names and sizes only, so the widths of the tables do not matter here.
  return functools.partial(
    split_features, features=data.features, configs=feature_configs(data.features, dim=1)
  )


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
  inputs = {
    name: ids if ids.ndim == 1 else embed.Padded(ids)
    for name, ids in cut_ids(batch["ids"], features).items()
  }
  embed.validate(configs, inputs)
  rest = {name: array for name, array in batch.items() if name != "ids"}
  return rest | {"label": batch["label"].astype(np.float32), "features": inputs}


def constant_rate(data: ClickData) -> dict[str, float]:
  """Returns the metrics of predicting the training rows' rate of clicks for every row."""
  rates = {split: _rate(data, *rows) for split, rows in data.splits.items() if len(range(*rows))}
  odds = np.clip(rates.pop("train"), 1e-15, 1 - 1e-15)
  scores: dict[str, float] = {}
  for split, rate in rates.items():
    logloss = -rate * np.log(odds) - (1 - rate) * np.log1p(-odds)
    scores |= {f"{split}_auc": 0.5, f"{split}_logloss": float(logloss)}
  return scores


def _rate(data: ClickData, start: int, stop: int) -> float:
  clicks = total = 0.0
  for first in range(start, stop, _ROWS):
    part = slice(first, min(first + _ROWS, stop))
    weights = _weights(data, part).astype(np.float64)
    clicks, total = clicks + weights @ data.columns["label"][part], total + weights.sum()
  return clicks / total


def _weights(data: ClickData, rows: slice) -> np.ndarray:
  if "weight" in data.columns:
    return np.asarray(data.columns["weight"][rows])
  return np.ones(rows.stop - rows.start, np.float32)


def most_telling(data: ClickData, max_rows: int = 1_000_000) -> tuple[str, float]:
  """Returns the column that ranks held-out rows best by itself, and the AUC of its ranking.

  A number ranks by its size, in either direction; ids by the rates of clicks of their training
  rows.

  Args:
    data: the data set; of each split the last rows are used.
    max_rows: how many.
  """
  held_out = next(name for name in ("test", "valid") if len(range(*data.splits[name])))
  train, test = (
    slice(max(start, stop - max_rows), stop)
    for start, stop in (data.splits["train"], data.splits[held_out])
  )
  label, weights = np.asarray(data.columns["label"][train]), _weights(data, train)
  clicks, mean = weights * label, np.average(label, weights=weights)
  names = data.dense_names or [f"number {i + 1}" for i in range(data.num_dense)]
  scores = dict(zip(names, np.asarray(data.columns["dense"][test]).T, strict=True))
  known, asked = (cut_ids(data.columns["ids"][rows], data.features) for rows in (train, test))
  for feature in data.features:
    ids, size = known[feature.name].reshape(len(label), -1) + 1, feature.vocabulary_size + 1
    sums = lambda x, ids=ids, size=size: sum(np.bincount(each, x, size) for each in ids.T)
    rates = (sums(clicks) + mean) / (sums(weights) + 1)  # of no value at 0
    at = asked[feature.name] + 1
    scores[feature.name] = rates[at] if at.ndim == 1 else rates[at].mean(axis=1)
  label, weights = np.asarray(data.columns["label"][test]), _weights(data, test)
  aucs = {name: roc_auc_score(label, x, sample_weight=weights) for name, x in scores.items()}
  aucs = {name: float(max(auc, 1 - auc)) for name, auc in aucs.items()}
  best = max(aucs, key=lambda name: aucs[name])
  return best, aucs[best]


def logistic_regression(
  data: ClickData, *, max_rows: int, inverse_penalties: Sequence[float]
) -> dict[str, float]:
  """Returns the metrics of a linear model on the same rows; see `baselines.logistic_regression`.

  At most `max_rows` rows of each split are used, the last ones, because the one-hot matrix is held
  in memory; the `rows` in the result say how many there were.
  """
  blocks = [
    size
    for feature in data.features
    for size in (feature.vocabulary_size, *[0] * (feature.valency - 1))
  ]
  matrices, labels, weights = {}, {}, {}
  for split, (start, stop) in data.splits.items():
    first = max(start, stop - max_rows)
    dense = np.asarray(data.columns["dense"][first:stop])
    matrices[split] = baselines.one_hot(data.columns["ids"][first:stop], blocks, dense)
    labels[split] = np.asarray(data.columns["label"][first:stop])
    weights[split] = _weights(data, slice(first, stop))
  return baselines.logistic_regression(
    matrices, labels, weights, inverse_penalties=inverse_penalties
  )
