"""Trains a sequence model: what to train, by which loss, and how it is measured."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

from .. import baselines as baselines_lib
from .. import hosts, layers, loop, losses, optimizers, placement, retrieval, train_step
from ..errors import UserError, from_settings
from ..metrics import RankingMetrics, ranking_names
from ..tables.settings import steps_of_data
from . import data as data_lib
from . import model as model_lib

LOSSES = ("softmax", "sampled_softmax", "bce", "gbce")


def run(config, workdir: str, writers: Sequence[loop.Writer] = ()) -> dict[str, Any]:
  """Trains as configured, or reports the run that the workdir holds; see `loop.run`."""
  return loop.run("sequence", config, workdir, prepare, writers)


def prepare(config, mesh: jax.sharding.Mesh | None) -> loop.Training:
  """Returns the parts of a run: loads the data, builds the model and its optimizer.

  Raises:
    UserError: a setting is wrong, or a file of the data is missing or damaged.
  """
  units = train_step.units(config, mesh)
  check(config, mesh)
  data = data_lib.load(config)
  metrics = ranking_names(config.ks, data.num_items)
  config = steps_of_data(config, len(data.packed["items"]), units, smallest_batch=8)
  with from_settings():
    inputs = lambda: {model_lib.ITEM: data_lib.batch_shapes(data, config)["items"]}
    model = build_model(config, data.num_items, mesh, inputs)
    optimizer = embed.Optimizer(model, optimizers.dense_optimizer(config))
  return loop.Training(
    model=model,
    optimizer=optimizer,
    loss_fn=objective(config, data.num_items),
    batches=data_lib.train_batches(data, config),
    evaluate=evaluator(data, config, mesh),
    baselines=functools.partial(baselines, data, config),
    data_sha256=data.sha256,
    metrics=metrics,
    config=config,
    serve=data.serve,
  )


def check(config, mesh: jax.sharding.Mesh | None) -> None:
  """Raises ValueError for an unknown model or loss, or sizes that do not fit the devices."""
  train_step.check(config, mesh)
  if config.model not in model_lib.BLOCKS:
    raise UserError(f"unknown model {config.model!r}: choose one of {sorted(model_lib.BLOCKS)}")
  if config.loss not in LOSSES:
    raise UserError(f"unknown loss {config.loss!r}: choose one of {LOSSES}")
  hosts.check_batch_sizes(
    mesh,
    batch_size=config.batch_size or (1 if mesh is None else mesh.size),
    eval_batch_size=config.eval_batch_size,
  )
  if config.loss != "softmax" and config.negatives.shared:
    hosts.check_batch_sizes(mesh, **{"negatives.number": config.negatives.number})


def build_model(
  config,
  num_items: int,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> model_lib.SequenceModel:
  """Returns the model that `config.model` names, its table with the configured optimizer.

  `inputs` returns the shapes of a batch's items, for a plan; see `placement.make_tables`.
  """
  rngs, dtype = nnx.Rngs(config.seed), layers.dtype(config, "dtype")
  table = embed.TableConfig(
    num_items,
    config.dim,
    initializer=layers.table_initializer(config),
    optimizer=optimizers.table_optimizer(config),
    name=model_lib.ITEM,
    dtype=layers.dtype(config, "table_dtype"),
  )
  encoder = model_lib.Encoder(
    model_lib.BLOCKS[config.model],
    dim=config.dim,
    blocks=config.blocks,
    heads=config.heads,
    max_length=config.max_length,
    dropout=config.dropout,
    dtype=dtype,
    rngs=rngs,
  )
  features = {model_lib.ITEM: embed.FeatureConfig(table)}
  return model_lib.SequenceModel(
    placement.make_tables(config, features, None, rngs=rngs, mesh=mesh, inputs=inputs),
    encoder,
    max_length=config.max_length,
    dropout=config.dropout,
    dtype=dtype,
    rngs=rngs,
  )


def loss_function(config, num_items: int) -> Callable[[Any, Any], jax.Array]:
  """Returns `(model, batch) -> scalar`, the mean of `config.loss` over the targets of a batch.

  All but "softmax" look up the rows of the targets and the samples only.
  """
  beta = losses.gbce_beta(config.negatives.number, num_items, config.negatives.calibration)

  def loss_fn(model, batch) -> jax.Array:
    hidden, targets = model_lib.predictions(model, batch), batch["targets"]
    if config.loss == "softmax":
      each = losses.cross_entropy(model.scores(hidden), targets)
    else:
      each = _sampled(model, hidden, targets, batch)
    return losses.mean(each, targets >= 0)

  def _sampled(model, hidden, targets, batch) -> jax.Array:
    positive = model.scores(hidden, targets[..., None])[..., 0]
    negative = model.scores(hidden, batch["negatives"])
    hits = targets[..., None] == batch["negatives"]
    if config.loss == "sampled_softmax":
      correction = batch["log_expected"] if config.negatives.logq else None
      return losses.sampled_softmax(positive, negative, hits, correction)
    if config.loss == "bce":
      return losses.binary_cross_entropy(positive, negative, hits)
    return losses.generalized_bce(positive, negative, hits, beta=beta)

  return loss_fn


def objective(config, num_items: int) -> train_step.Objective:
  """Returns the loss, the number of targets of a batch, and the samples that all of them share."""
  has_shared = config.loss != "softmax" and config.negatives.shared
  return train_step.Objective(
    loss_function(config, num_items),
    weight=lambda batch: jnp.sum(batch["targets"] >= 0, dtype=jnp.float32),
    shared=("negatives", "log_expected") if has_shared else (),
  )


def make_recommend(
  num_items: int, k: int, mesh: jax.sharding.Mesh | None, *, exclude_seen: bool = True
):
  """Returns the compiled `(model, batch) -> ids [B, k]` of the best items.

  With `exclude_seen` none of them is in the batch's `seen`.
  """

  @nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
  def recommend(model, batch):
    query = model_lib.queries(model, batch)
    seen = batch["seen"] if exclude_seen else jnp.full_like(batch["seen"][:, :1], -1)
    if mesh is None:
      items = jax.device_put(model.embed.tables[model_lib.ITEM], jax.memory.Space.Device)
      return retrieval.top_k(query, items, k, seen)[1]
    rows = lambda ids: model.embed({model_lib.ITEM: ids})[model_lib.ITEM]
    return retrieval.top_k_of_rows(query, rows, num_items, k, seen, mesh)[1]

  return recommend


def evaluator(data: data_lib.SequenceData, config, mesh: jax.sharding.Mesh | None = None):
  """Returns `(model, split) -> metrics` over all evaluated users, in every process.

  Every item of the catalogue is ranked; with `config.exclude_seen` all but those that the user
  has had before.
  """
  recommend = make_recommend(data.num_items, max(config.ks), mesh, exclude_seen=config.exclude_seen)

  def evaluate(model, split: str) -> dict[str, float]:
    metrics, view = RankingMetrics(config.ks), nnx.view(model, deterministic=True)
    for batch in hosts.put_ahead(mesh, data_lib.eval_batches(data, split, config)):
      metrics.update(*hosts.gather((recommend(view, batch), batch["target"])))
    return metrics.compute()

  return evaluate


def baselines(data: data_lib.SequenceData, config) -> dict[str, loop.Baseline]:
  """Returns what fits popularity, item kNN and EASE, and the best possible metrics where known.

  `config.baseline.ease_l2` is EASE's penalty; 0 leaves it out. Item kNN is fitted where the users'
  lists are short enough.
  """
  fit = functools.partial(fit_baseline, data, ks=tuple(config.ks), exclude_seen=config.exclude_seen)
  chosen: dict[str, loop.Baseline] = {"popularity": functools.partial(fit, "popularity")}
  if baselines_lib.can_fit_knn(data_lib.train_lengths(data.lengths)):
    chosen["item kNN"] = functools.partial(fit, "item kNN")
  if config.baseline.ease_l2:
    chosen["EASE"] = functools.partial(fit, "EASE", l2=config.baseline.ease_l2)
  if data.best:
    chosen["best possible"] = dict(data.best)
  return chosen


def fit_baseline(
  data: data_lib.SequenceData,
  name: str,
  *,
  ks: tuple[int, ...],
  exclude_seen: bool,
  l2: float = 0.0,
) -> dict[str, float]:
  """Returns the metrics of a baseline that is asked with all earlier items, as the models are.

  Args:
    data: the data set; the baseline learns from its training items.
    name, l2: as for `baselines.scorer`.
    ks, exclude_seen: as in the config.
  """
  everyone, users = np.arange(len(data.lengths)), data.evaluated
  train = data_lib.matrix(data, everyone, data_lib.HELD_OUT["train"])
  score, scores = baselines_lib.scorer(name, train, l2), dict[str, float]()
  for split in ("valid", "test"):
    histories = data_lib.matrix(data, users, data_lib.HELD_OUT[split])
    relevant = data_lib.targets(data, users, data_lib.HELD_OUT[split])
    ask = lambda start, stop, histories=histories: score(histories[start:stop])
    metrics = baselines_lib.ranking(ask, relevant, histories if exclude_seen else None, ks)
    scores |= {f"{split}_{metric}": value for metric, value in metrics.items()}
  return scores
