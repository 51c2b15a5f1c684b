"""Trains a sequence model: `run` reads from top to bottom; what it calls is below it."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath
from flax import nnx

import embed

from .. import checkpoints
from .. import config as config_lib
from .. import mesh as mesh_lib
from .. import run as run_lib
from ..errors import from_settings
from ..evaluation import retrieval
from ..evaluation.metrics import RankingMetrics, ranking_names
from ..run import check_select, scalars
from ..training import build, layers
from . import data as data_lib
from . import model as model_lib

_NEVER = -1e9  # not -inf: a position whose samples are all hits would get NaN gradients


def run(config, workdir: str) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call resumes a run that was stopped, on any number of devices and processes.

  Raises:
    UserError: a setting or a file of the data is wrong, or the workdir holds another run.
    Preempted: after a SIGTERM, once the state is saved.
  """
  mesh, folder = mesh_lib.start(), epath.Path(workdir).resolve()
  config = run_lib.resumed(config_lib.complete("sequence", config), folder)
  if (result := run_lib.finished(config, folder)) is not None:
    return result
  check(config, mesh)
  data = data_lib.load(config)
  config = decide(config, data, mesh)
  model, optimizer = make_state(config, data, mesh)
  step_fn = embed.jit_step(make_train_step(config, data, mesh), model, optimizer)
  evaluate, rate = evaluator(data, config, mesh), build.rate(config)

  with run_lib.begun(config, folder, data, model, optimizer) as (writer, manager, stops):
    batches = data_lib.train_batches(data, config, writer.step)
    for step, batch in enumerate(mesh_lib.prefetch_to_device(mesh, batches), writer.step + 1):
      if writer.has_stalled(config.select, config.patience):
        break
      writer.train(step, model, step_fn(batch) | {"learning_rate": rate(step)})
      evaluates = step == config.steps or run_lib.is_due(step, config.eval_every)
      metrics = scalars("valid", evaluate(model, "valid")) if evaluates else {}
      writer.eval(step, metrics)
      is_last = stops(step)
      if evaluates or is_last or run_lib.is_due(step, config.checkpoint_every):
        checkpoints.save(manager, step, model, optimizer, metrics, writer.memory(step))
      if is_last:
        raise run_lib.Preempted(step)
    return run_lib.finish("sequence", config, folder, data, model, writer, manager, evaluate)


def make_train_step(
  config, data: data_lib.SequenceData, mesh: jax.sharding.Mesh | None = None
) -> Callable[..., dict[str, jax.Array]]:
  """Returns `(model, optimizer, batch) -> {"loss": ...}`, which trains in place, not compiled.

  Every scalar that it returns is logged, as its mean since the last line.
  """
  del data, mesh
  loss_fn = loss_function(config)

  def train_step(model, optimizer, batch):
    with jax.named_scope("dense"):
      loss, grads = embed.value_and_grad(loss_fn)(model, batch)
    grads, norm = build.clipped(grads, config.clip_norm)
    optimizer.update(model, grads)
    return {"loss": loss} | norm

  return train_step


def loss_function(config) -> Callable[[Any, Any], jax.Array]:
  """Returns `(model, batch) -> loss`, the mean of `config.loss` over the targets of a batch.

  The sampled softmax looks up the rows of the targets and the samples only.
  """

  def loss_fn(model, batch) -> jax.Array:
    queries, targets = model(batch), batch["targets"]
    if config.loss == "softmax":
      # Padding, whose target is -1, has a finite loss, which is masked below.
      scores = model.scores(queries)
      by_target = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    else:
      positive = model.scores(queries, targets[..., None])[..., 0]
      negative = model.scores(queries, batch["negatives"])
      hits = targets[..., None] == batch["negatives"]
      log_expected = math.log(len(batch["negatives"]) / model.num_items)  # drawn uniformly
      by_target = sampled_softmax(positive, negative, hits, log_expected)
    return mean(by_target, targets >= 0)

  return loss_fn


def mean(losses: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean over the positions where `mask` is True; 0 if there are none."""
  return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def sampled_softmax(
  positive: jax.Array, negative: jax.Array, hits: jax.Array, log_expected: jax.Array | float
) -> jax.Array:
  """Returns the cross-entropy of a softmax over the right item and the sampled ones.

  Args:
    positive: `[...]`, scores of the right items.
    negative: `[..., K]`, scores of the sampled items.
    hits: bool like `negative`, samples that are the right item; they are left out.
    log_expected: a number, `[K]` or like `negative`, the log of the expected number of draws of
      each sample (the logQ correction, Bengio and Senecal 2008): the sum over samples becomes an
      unbiased estimate of the sum over all wrong items. The right item, always there, is not
      corrected.
  """
  negative = jnp.where(hits, _NEVER, negative - log_expected)
  return jnp.logaddexp(positive, jax.nn.logsumexp(negative, axis=-1)) - positive


def make_recommend(config, num_items: int, mesh: jax.sharding.Mesh | None):
  """Returns the compiled `(model, batch) -> ids [B, k]` of the best items, for the largest cutoff.

  With `config.exclude_seen` none of them is in the batch's `seen`.
  """
  k = max(config.ks)

  @nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
  def recommend(model, batch):
    query = model_lib.queries(model, batch)
    seen = batch["seen"] if config.exclude_seen else jnp.full_like(batch["seen"][:, :1], -1)
    if mesh is None:
      return retrieval.top_k(query, model.embed.tables[model_lib.ITEM], k, seen)[1]
    # Each device looks up its own part of the catalogue, and scores it.
    every = jnp.minimum(jnp.arange(-(-num_items // mesh.size) * mesh.size), num_items - 1)
    rows = model.embed({model_lib.ITEM: every.astype(jnp.int32)})[model_lib.ITEM]
    return retrieval.top_k(query, rows, k, seen, mesh, size=num_items)[1]

  return recommend


def evaluator(data: data_lib.SequenceData, config, mesh: jax.sharding.Mesh | None = None):
  """Returns `(model, split) -> metrics`, full rankings for all users, in every process."""
  recommend = make_recommend(config, data.num_items, mesh)

  def evaluate(model, split: str) -> dict[str, float]:
    metrics = RankingMetrics(config.ks)
    view = nnx.view(model, deterministic=True, raise_if_not_found=False)
    for batch in mesh_lib.prefetch_to_device(mesh, data_lib.eval_batches(data, split, config)):
      metrics.update(*mesh_lib.gather((recommend(view, batch), batch["target"])))
    return metrics.compute()

  return evaluate


# --- what is trained ------------------------------------------------------------------------------


def check(config, mesh: jax.sharding.Mesh | None) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  config_lib.check(config, mesh)
  build.check_choice("model", config.model, model_lib.MODELS)
  build.check_choice("positions", config.positions, ("end", "start"))
  build.check_choice("loss", config.loss, ("softmax", "sampled_softmax"))
  build.check_choice("residual", config.residual, ("input", "norm"))
  build.check_choice("init", config.init, layers.INITIALIZERS)
  if config.loss != "softmax":
    mesh_lib.check_batch_sizes(mesh, **{"negatives.number": config.negatives.number})


def decide(config, data: data_lib.SequenceData, mesh: jax.sharding.Mesh | None = None):
  """Returns the config with what the data decide; checks what they tell."""
  names = ranking_names(config.ks, data.num_items)
  check_select(config.select, [f"valid_{name}" for name in names])
  return config_lib.with_schedule(config, data.num_examples, mesh, smallest_batch=8)


def make_state(
  config, data: data_lib.SequenceData, mesh: jax.sharding.Mesh | None = None
) -> tuple[nnx.Module, embed.Optimizer]:
  """Returns the model on its devices, and the optimizer of its dense parameters and tables."""
  with from_settings():
    first = lambda: {model_lib.ITEM: data_lib.TrainBatches(data, config)[0]["items"]}
    shapes = lambda: jax.eval_shape(first)
    model = model_lib.SequenceModel(config, data.num_items, mesh, shapes)
    optimizer = embed.Optimizer(model, build.dense_optimizer(config))
  mesh_lib.replicate(mesh, model, optimizer)
  return model, optimizer
