"""Trains a sequence model: `run` reads from top to bottom; what it calls is below it.

A second loss, a teacher or a further metric is a change of this file. What `loss_function` returns
gives the loss to minimise, or `(loss, {name: scalar})`, whose scalars are logged beside it, as
means since the last line. `run.steps` takes a function that adds a teacher's outputs to each
batch, and `warm_start.take` loads the teacher from its run. `run.log` logs any further scalar.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from .. import hosts
from ..errors import UserError, from_settings
from ..evaluation import retrieval
from ..evaluation.metrics import RankingMetrics, ranking_names
from ..run import settings, warm_start
from ..run import workdir as runs
from ..run.journal import Writer
from ..run.loop import Run, check_select
from ..training import build, layers, losses, train_step
from . import data as data_lib
from . import model as model_lib
from .model import build_model

MODELS = tuple(model_lib.BLOCKS)
LOSSES = ("softmax", "sampled_softmax", "bce", "gbce")


def run(config, workdir: str, writers: Sequence[Writer] = ()) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call on a laptop, a GPU node or in every process of a pod; see `hosts.start`.

  Args:
    config: of the run, or a plain dict that declares a table; see `settings.completed`.
    writers: get the metrics as well, and are closed at the end; see `journal.Writer`.

  Raises:
    UserError: a setting is wrong, a file of the data is missing or damaged; or as `Run`.
  """
  mesh, asked = hosts.start(), settings.completed("sequence", config)
  if (result := runs.finished(asked, workdir)) is not None:
    return result
  config = runs.resumed(asked, workdir)
  check(config, mesh)

  data = data_lib.load(config)
  config = decide(config, data, mesh)
  model, optimizer = make_state(config, data, mesh)
  evaluate = evaluator(data, config, mesh)
  rate = build.rate(config)
  epoch = lambda steps: steps * config.batch_size / data.num_examples

  with Run(
    "sequence", config, workdir, asked=asked, model=model, optimizer=optimizer, mesh=mesh,
    data=data, writers=writers,
  ) as run:  # fmt: skip
    warm_start.start(run)
    train_objective, options = objective(config, data), train_step.options(config)
    step = train_step.Step(train_objective, model, optimizer, options, mesh)
    for batch in run.steps(data_lib.train_batches(data, config)):
      run.log(**step(batch), learning_rate=rate, epoch=epoch)
      if run.evaluates:
        run.score(evaluate(model, "valid"))
    return run.finish(evaluate(run.best(), "test") if config.test else {})


def loss_function(config, num_items: int) -> train_step.LossFn:
  """Returns `(model, batch) -> loss`, the mean of `config.loss` over the targets of a batch.

  All but "softmax" look up the rows of the targets and the samples only.
  """
  beta, negatives = 1.0, config.negatives
  if config.loss == "gbce":
    beta = losses.gbce_beta(negatives.number, num_items, negatives.calibration)

  def loss_fn(model, batch) -> Any:
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
      correction = batch["log_expected"] if negatives.logq else None
      return losses.sampled_softmax(positive, negative, hits, correction)
    return losses.generalized_bce(positive, negative, hits, beta=beta)

  return loss_fn


def objective(
  config, data: data_lib.SequenceData, mesh: jax.sharding.Mesh | None = None
) -> train_step.Objective:
  """Returns the loss, the number of targets of a batch, and the samples that all of them share."""
  del mesh
  has_shared = config.loss != "softmax" and config.negatives.shared
  return train_step.Objective(
    loss_function(config, data.num_items),
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
      items = model.candidates(model.embed.tables[model_lib.ITEM])
      return retrieval.top_k(query, items, k, seen)[1]
    rows = lambda ids: model.candidates(model.embed({model_lib.ITEM: ids})[model_lib.ITEM])
    return retrieval.top_k_of_rows(query, rows, num_items, k, seen, mesh)[1]

  return recommend


def evaluator(data: data_lib.SequenceData, config, mesh: jax.sharding.Mesh | None = None):
  """Returns `(model, split) -> metrics` over all evaluated users, in every process.

  Every item of the catalogue is ranked; with `config.exclude_seen` all but those that the user
  has had before.
  """
  recommend = make_recommend(data.num_items, max(config.ks), mesh, exclude_seen=config.exclude_seen)
  empty = RankingMetrics.empty(config.ks, popularity=data_lib.train_counts(data))

  def evaluate(model, split: str) -> dict[str, float]:
    metrics, view = empty, train_step.evaluated(model)
    for batch in hosts.put_ahead(mesh, data_lib.eval_batches(data, split, config)):
      metrics = metrics.update(*hosts.gather((recommend(view, batch), batch["target"])))
    return metrics.compute()

  return evaluate


# --- what is trained ------------------------------------------------------------------------------


def check(config, mesh: jax.sharding.Mesh | None) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  settings.check(config)
  train_step.check(config, mesh)
  if config.model not in MODELS:
    raise UserError(f"unknown model {config.model!r}: choose one of {sorted(MODELS)}")
  if config.loss not in LOSSES:
    raise UserError(f"unknown loss {config.loss!r}: choose one of {LOSSES}")
  for name, known in (("residual", ("input", "norm")), ("init", layers.INITIALIZERS)):
    if config[name] not in known:
      raise UserError(f"unknown {name} {config[name]!r}: choose {' or '.join(known)}")
  settings.at_least(config, {"heads": 1, "blocks": 1, "max_length": 1})
  if config.dim % config.heads:
    raise UserError(f"the width {config.dim} must be a multiple of the {config.heads} heads")
  if not 0 <= config.overlap < config.max_length or (config.overlap and not config.windows):
    raise UserError(
      f"config.overlap is {config.overlap}: choose 0 to {config.max_length - 1}, below max_length, "
      "and leave windows on"
    )
  if config.time_buckets < 0 or (config.time_buckets and config.model != "hstu"):
    raise UserError("time_buckets is for the model hstu, and 0 or more: leave it out")
  if config.temperature < 0 or (config.temperature and config.model not in ("sasrec", "hstu")):
    raise UserError("temperature is for the models sasrec and hstu, and 0 or more: leave it out")
  if config.loss != "softmax" and config.negatives.shared:
    hosts.check_batch_sizes(mesh, **{"negatives.number": config.negatives.number})


def decide(config, data: data_lib.SequenceData, mesh: jax.sharding.Mesh | None = None):
  """Returns the config with what the data decide; checks what they tell."""
  names = ranking_names(config.ks, data.num_items)
  check_select(config.select, [f"valid_{name}" for name in names])
  return train_step.with_schedule(config, data.num_examples, mesh, smallest_batch=8)


def make_state(
  config, data: data_lib.SequenceData, mesh: jax.sharding.Mesh | None = None
) -> tuple[nnx.Module, embed.Optimizer]:
  """Returns the model on its devices, and the optimizer of its dense parameters and tables."""
  with from_settings():
    inputs = lambda: {model_lib.ITEM: data_lib.batch_shapes(data, config)["items"]}
    model = build_model(config, data.num_items, mesh, inputs)
    train_step.keep_averages(model, config.ema)
    return model, embed.Optimizer(model, build.dense_optimizer(config))
