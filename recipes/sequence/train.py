"""Trains a sequence model: `run` reads from top to bottom; what it calls is below it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx

import embed

from .. import checkpoints, log, warm_start
from .. import config as config_lib
from .. import mesh as mesh_lib
from .. import run as run_lib
from ..errors import from_settings
from ..evaluation import retrieval
from ..evaluation.metrics import RankingMetrics, ranking_names
from ..run import check_select, scalars
from ..training import build, layers, losses
from . import data as data_lib
from . import model as model_lib
from .model import build_model


def run(config, workdir: str) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call resumes a run that was stopped, on any number of devices and processes.

  Args:
    config: of the run, or a plain dict that declares a table; see `config.complete`.
    workdir: the folder of the run; see `recipes.run`.

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

  run_lib.begin(config, folder, data, model)
  with run_lib.stop_signal() as stops, checkpoints.opened(folder, config.select) as manager:
    start, memory = checkpoints.restore(manager, model=model, optimizer=optimizer)
    if start == 0:
      warm_start.take(config, model, data.serve)
    with log.Log(folder, config, start, memory) as writer:
      batches = data_lib.train_batches(data, config, start)
      for step, batch in enumerate(mesh_lib.prefetch_to_device(mesh, batches), start + 1):
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
      chosen = manager.best_step() if config.select else manager.latest_step()
      tested, _ = checkpoints.restore(manager, chosen, model=model)
      metrics = evaluate(model, "test") if config.test else {}
      return run_lib.finish("sequence", config, folder, data, writer, tested, metrics)


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
    queries, targets = model(batch, batch.get("where")), batch["targets"]
    if config.loss == "softmax":
      by_target = losses.cross_entropy(model.scores(queries), targets)
    else:
      positive = model.scores(queries, targets[..., None])[..., 0]
      negative = model.scores(queries, batch["negatives"])
      hits = targets[..., None] == batch["negatives"]
      by_target = losses.sampled_softmax(positive, negative, hits, batch["log_expected"])
    return losses.mean(by_target, targets >= 0)

  return loss_fn


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
  build.check_choice("loss", config.loss, ("softmax", "sampled_softmax"))
  build.check_choice("residual", config.residual, ("input", "norm"))
  build.check_choice("init", config.init, layers.INITIALIZERS)
  config_lib.at_least(config, {"heads": 1, "blocks": 1, "max_length": 1})
  if config.loss != "softmax":
    config_lib.at_least(config, {"negatives.number": 1})
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
    first = lambda: jax.eval_shape(lambda x: x, data_lib.TrainBatches(data, config)[0]["items"])
    inputs = lambda: {model_lib.ITEM: first()}
    model = build_model(config, data.num_items, mesh, inputs)
    optimizer = embed.Optimizer(model, build.dense_optimizer(config))
  mesh_lib.replicate(mesh, model, optimizer)
  return model, optimizer
