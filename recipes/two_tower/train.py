"""Trains a two-tower model: `run` reads from top to bottom; what it calls is below it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

import embed

from .. import checkpoints
from .. import config as config_lib
from .. import mesh as mesh_lib
from .. import run as run_lib
from ..errors import from_settings
from ..evaluation import retrieval
from ..evaluation.metrics import RankingMetrics, ranking_names
from ..run import check_select, scalars
from ..training import build
from . import data as data_lib
from .model import TwoTower, build_model, with_all_features

_NEVER = -1e9  # not -inf: where everything else is left out, gradients would not be numbers


def run(config, workdir: str) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call resumes a run that was stopped, on any number of devices and processes.

  Raises:
    UserError: a setting or a file of the data is wrong, or the workdir holds another run.
    Preempted: after a SIGTERM, once the state is saved.
  """
  mesh, folder = mesh_lib.start(), epath.Path(workdir).resolve()
  config = run_lib.resumed(config_lib.complete("two_tower", config), folder)
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
    return run_lib.finish("two_tower", config, folder, data, model, writer, manager, evaluate)


def make_train_step(
  config, data: data_lib.RetrievalData, mesh: Mesh | None = None
) -> Callable[..., dict[str, jax.Array]]:
  """Returns `(model, optimizer, batch) -> {"loss": ...}`, which trains in place, not compiled.

  Every scalar that it returns is logged, as its mean since the last line.
  """
  loss_fn = loss_function(config, data.num_items, mesh)

  def train_step(model, optimizer, batch):
    with jax.named_scope("dense"):
      loss, grads = embed.value_and_grad(loss_fn)(model, batch)
    grads, norm = build.clipped(grads, config.clip_norm)
    optimizer.update(model, grads)
    return {"loss": loss} | norm

  return train_step


def candidates_of(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the items that the queries of a batch choose from, the drawn ones after the others."""
  if "negative" not in batch:
    return batch["positive"]
  return jax.tree.map(lambda *x: jnp.concatenate(x), batch["positive"], batch["negative"])


def inputs(config, batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the features of a batch's queries and candidates that the towers read."""
  candidate = candidates_of(batch)["candidate"]
  return {
    "query": {name: batch["query"][name] for name in config.query},
    "candidate": {name: candidate[name] for name in config.candidate},
  }


def loss_function(
  config, num_items: int, mesh: Mesh | None = None
) -> Callable[[Any, Any], jax.Array]:
  """Returns `(model, batch) -> loss`: the mean sampled softmax over the whole batch.

  Under a mesh every query meets the candidates of all devices, not of its own alone.
  """
  dtype = build.dtype(config, "dtype")

  def loss_fn(model: TwoTower, batch) -> jax.Array:
    queries, candidates = model(**inputs(config, batch))
    items = candidates_of(batch)
    ids, log_share, candidates = (
      _placed(x, mesh, PartitionSpec())
      for x in (items["candidate"]["item"], items["popularity"], candidates)
    )
    # The expected number of times that a batch has an item: as a positive, and drawn.
    expected = config.batch_size * jnp.exp(log_share) + config.negatives.number / num_items
    log_expected = config.logq * jnp.log(expected) - config.popularity * log_share
    vectors = queries.astype(dtype), candidates.astype(dtype)
    scores_BxC = jnp.einsum("bd,cd->bc", *vectors, preferred_element_type=jnp.float32)
    logits_BxC = scores_BxC / config.temperature
    return sampled_softmax(logits_BxC, ids, log_expected=log_expected).mean()

  return loss_fn


def sampled_softmax(
  logits_BxC: jax.Array,
  ids_C: jax.Array,
  *,
  log_expected: jax.Array | None = None,
  remove_accidental_hits: bool = True,
) -> jax.Array:
  """Returns the cross-entropy of each query's positive among all candidates, float32 `[B]`.

  Args:
    logits_BxC: the candidates after the first B are negatives for all queries.
    ids_C: the candidates' items.
    log_expected: `[C]`, the log of how often each candidate's item is expected among them.
      Subtracted, also for the positive, it makes the loss equal a softmax over the whole catalogue,
      however unevenly items are sampled (the logQ correction: Bengio and Senecal 2008, Yi et al.
      2019). None corrects nothing.
    remove_accidental_hits: leaves out candidates that are the positive's item once more.
  """
  batch, candidates = logits_BxC.shape
  if log_expected is not None:
    logits_BxC = logits_BxC - log_expected
  left_out_BxC = jnp.arange(batch)[:, None] == jnp.arange(candidates)
  if remove_accidental_hits:
    left_out_BxC |= ids_C[:batch, None] == ids_C
  positive_B = jnp.diagonal(logits_BxC)
  negative_BxC = jnp.where(left_out_BxC, _NEVER, logits_BxC)
  return jnp.logaddexp(positive_B, jax.nn.logsumexp(negative_BxC, axis=1)) - positive_B


def _placed(x: jax.Array, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def make_encode(mesh: Mesh | None):
  """Returns the compiled `(model, batch of catalogue) -> vectors [B, D]`, split over the mesh."""

  @nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
  def encode(model, batch):
    vectors = model.candidates(batch["candidate"], batch["popularity"])
    return _placed(vectors, mesh, PartitionSpec(mesh_lib.AXIS))

  return encode


def make_rank(config, num_items: int, mesh: Mesh | None):
  """Returns the compiled `(model, candidates, query, seen) -> ids [B, k]` of the best items."""

  @nnx.jit(graph=False)
  def rank(model, candidates, query, seen):
    queries = model.queries({name: query[name] for name in config.query})
    return retrieval.top_k(queries, candidates, max(config.ks), seen, mesh, size=num_items)[1]

  return rank


def evaluator(data: data_lib.RetrievalData, config, mesh: Mesh | None = None):
  """Returns `(model, split) -> {metric: value}`, full rankings of the catalogue, in every process.

  A split without rows has no metrics.
  """
  encode, rank = make_encode(mesh), make_rank(config, data.num_items, mesh)

  def evaluate(model, split: str) -> dict[str, float]:
    if not len(data.rows(split)):
      return {}
    metrics = RankingMetrics(config.ks)
    view = nnx.view(model, deterministic=True, raise_if_not_found=False)
    popularity = data.popularity(*data_lib.EARLIER[split])
    items = (mesh_lib.to_global(mesh, batch) for batch in catalogue(data, config, popularity, mesh))
    candidates = retrieval.joined([encode(view, batch) for batch in items], mesh)
    for batch in mesh_lib.prefetch_to_device(mesh, data_lib.eval_batches(data, split, config)):
      top_ids = rank(view, candidates, batch["query"], batch["seen"])
      metrics.update(*mesh_lib.gather((top_ids, batch["relevant"], batch["mask"])))
    return metrics.compute()

  return evaluate


def catalogue(
  data: data_lib.RetrievalData, config, popularity: np.ndarray, mesh: Mesh | None = None
):
  """Yields `candidate`, the tower's features, and `popularity` of all items, `[items]`, in batches.

  Every process yields its own part, in the order of `retrieval.catalogue_batches`.
  """
  index, count = mesh_lib.shard()
  for items in retrieval.catalogue_batches(data.num_items, config.eval_batch_size, mesh):
    part = np.split(items, count)[index]
    features = data.inputs("item", part)
    candidate = {name: features[name] for name in config.candidate}
    yield {"candidate": candidate, "popularity": popularity[part]}


# --- what is trained ------------------------------------------------------------------------------


def check(config, mesh: Mesh | None) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  config_lib.check(config, mesh)
  build.check_choice("examples", config.examples, ("users", "rows"))
  mesh_lib.check_batch_sizes(mesh, **{"negatives.number": config.negatives.number})


def decide(config, data: data_lib.RetrievalData, mesh: Mesh | None = None) -> ConfigDict:
  """Returns the config with what the data decide; checks what they tell."""
  names = ranking_names(config.ks, data.num_items)
  has_valid = len(data.rows("valid")) > 0
  check_select(config.select, [f"valid_{name}" for name in names] if has_valid else [])
  return with_all_features(config_lib.with_schedule(config, data.num_examples, mesh), data)


def make_state(
  config, data: data_lib.RetrievalData, mesh: Mesh | None = None
) -> tuple[nnx.Module, embed.Optimizer]:
  """Returns the model on its devices, and the optimizer of its dense parameters and tables."""
  with from_settings():
    first = lambda: inputs(config, data_lib.TrainBatches(data, config)[0])
    model = build_model(config, data, mesh, lambda: jax.eval_shape(first))
    optimizer = embed.Optimizer(model, build.dense_optimizer(config))
  mesh_lib.replicate(mesh, model, optimizer)
  return model, optimizer
