"""Trains a two-tower model: `run` reads from top to bottom; what it calls is below it.

A second loss, a teacher or a further metric is a change of this file. What `loss_function` returns
gives the loss to minimise, or `(loss, {name: scalar})`, whose scalars are logged beside it, as
means since the last line. `run.steps` takes a function that adds a teacher's outputs to each
batch, and `warm_start.take` loads the teacher from its run. `run.log` logs any further scalar.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

import embed

from .. import hosts
from ..errors import UserError, from_settings
from ..evaluation import retrieval
from ..evaluation.metrics import RankingMetrics, ranking_names
from ..run import settings, warm_start
from ..run import workdir as runs
from ..run.journal import Writer
from ..run.loop import Run, check_select
from ..training import build, train_step
from . import data as data_lib
from . import losses
from .model import TwoTower, build_model, with_all_features

LOSSES = ("softmax", "cosine_contrastive")


def run(config, workdir: str, writers: Sequence[Writer] = ()) -> dict[str, Any]:
  """Trains as configured, or reads the result of the run that the workdir holds; returns it.

  The same call on a laptop, a GPU node or in every process of a pod; see `hosts.start`.

  Args:
    config: of the run, or a plain dict that declares a table; see `settings.completed`.
    writers: get the metrics as well, and are closed at the end; see `journal.Writer`.

  Raises:
    UserError: a setting is wrong, a file of the data is missing or damaged; or as `Run`.
  """
  mesh, asked = hosts.start(), settings.completed("two_tower", config)
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
    "two_tower", config, workdir, asked=asked, model=model, optimizer=optimizer, mesh=mesh,
    data=data, writers=writers,
  ) as run:  # fmt: skip
    warm_start.start(run)
    train_objective, options = objective(config, data, mesh), train_step.options(config)
    step = train_step.Step(train_objective, model, optimizer, options, mesh)
    for batch in run.steps(data_lib.train_batches(data, config)):
      run.log(**step(batch), learning_rate=rate, epoch=epoch)
      if run.evaluates:
        run.score(evaluate(model, "valid"))
    return run.finish(evaluate(run.best(), "test") if config.test else {})


def inputs(config, batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the features of a batch's queries and candidates, the drawn ones after the others."""
  candidate = batch["positive_candidate"]
  if config.negatives.number:
    join = lambda *parts: jnp.concatenate(parts)
    candidate = jax.tree.map(join, candidate, batch["negative_candidate"])
  return {
    "query": {name: batch["query"][name] for name in config.query},
    "candidate": {name: candidate[name] for name in config.candidate},
  }


def loss_function(config, mesh: Mesh | None = None) -> train_step.LossFn:
  """Returns `(model, batch) -> loss`: the mean of `config.loss` over the whole batch.

  Under a mesh every query meets the candidates of all devices, not of its own alone.
  """
  dtype = build.dtype(config, "dtype")
  cosine = config.loss == "cosine_contrastive"

  def scores(queries: jax.Array, candidates: jax.Array) -> jax.Array:
    vectors = queries.astype(dtype), candidates.astype(dtype)
    return jnp.einsum("bd,cd->bc", *vectors, preferred_element_type=jnp.float32)

  def loss_fn(model: TwoTower, batch) -> Any:
    size = batch["positive"].shape[0]
    ids, rate = batch["positive"], batch["positive_rate"]
    if config.negatives.number:
      ids = jnp.concatenate([ids, batch["negative"]])
      rate = jnp.concatenate([rate, batch["negative_rate"]])
    queries, candidates = model(**inputs(config, batch))
    model.frequency.update(batch["positive"])
    if cosine:
      negatives, drawn = _placed(candidates[size:], mesh, PartitionSpec()), batch["negative"]
      return losses.cosine_contrastive(
        jnp.sum(queries * candidates[:size], axis=1),
        scores(queries, negatives),
        batch["positive"][:, None] == _placed(drawn, mesh, PartitionSpec()),
        **config.cosine,
      ).mean()
    batches, pool = 1.0, (ids, candidates, rate)
    if model.queue is not None:
      past = model.queue.read()
      model.queue.put(ids[:size], candidates[:size], rate[:size])
      batches += jnp.sum(past[0] >= 0) / size
      pool = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), pool, past)
    ids, candidates, rate = (_placed(x, mesh, PartitionSpec()) for x in pool)
    log_expected, weight = None, config.popularity.weight
    if config.logq or weight:
      own = model.frequency.expected(jnp.maximum(ids, 0))
      log_expected = config.logq * jnp.log(batches * own + rate) - weight * jnp.log(own)
    values = losses.sampled_softmax(
      scores(queries, candidates) / config.temperature,
      ids,
      log_expected=log_expected,
      remove_accidental_hits=config.remove_accidental_hits,
      hard_negatives=config.hard_negatives,
    )
    return values.mean()

  return loss_fn


def objective(
  config, data: data_lib.RetrievalData, mesh: Mesh | None = None
) -> train_step.Objective:
  """Returns what training minimises; with `accumulate` each part has all drawn negatives."""
  del data
  drawn = ("negative", "negative_rate", "negative_candidate")
  return train_step.Objective(
    loss_function(config, mesh), shared=drawn, prepare=functools.partial(admit, config)
  )


def admit(config, model: TwoTower, batch, ahead: bool = False):
  """Returns the batch with rows for raw ids, of columns with a dynamic vocabulary."""
  if not model.embed.vocabularies:
    return batch
  asked = inputs(config, batch)
  rows = model.embed.admit(model.of_tables(asked), ahead=ahead)
  rows = {side: asked[side] | each for side, each in rows.items()}
  size = batch["positive"].shape[0]
  of = lambda part: jax.tree.map(lambda x: x[part], rows["candidate"])
  batch = batch | {"query": rows["query"], "positive_candidate": of(slice(size))}
  drawn = {"negative_candidate": of(slice(size, None))} if config.negatives.number else {}
  return batch | drawn


def _placed(x: jax.Array, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def make_encode(mesh: Mesh | None):
  """Returns the compiled `(model, batch of catalogue) -> vectors [B, D]`, split over the mesh."""

  @nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
  def encode(model, batch):
    vectors = model.candidates(batch["candidate"], batch["popularity"])
    return _placed(vectors, mesh, PartitionSpec(hosts.AXIS))

  return encode


def make_rank(config, mesh: Mesh | None, num_items: int | None = None):
  """Returns the compiled `(model, candidates, query, seen) -> (queries [B, D], ids [B, k])`.

  Of the candidates the first `num_items` are ranked, or all.
  """

  @nnx.jit(graph=False)
  def rank(model, candidates, query, seen):
    queries = model.queries({name: query[name] for name in config.query})
    best = retrieval.top_k(queries, candidates, max(config.ks), seen, mesh, size=num_items)
    return queries, best[1]

  return rank


def evaluator(data: data_lib.RetrievalData, config, mesh: Mesh | None = None):
  """Returns `(model, split) -> {metric: value}`, full rankings of the catalogue, in every process.

  A split in which nothing is held out has no metrics.
  With `config.ann` the test split has `ann_recall@k` as well: how many of the exact best an
  approximate index finds.
  """

  encode, rank = make_encode(mesh), make_rank(config, mesh, data.num_items)
  empty = RankingMetrics.empty(config.ks, popularity=data.train_counts())

  def evaluate(model, split: str) -> dict[str, float]:
    if len(range(*data.splits[split])) == 0:
      return {}
    metrics, view = empty, train_step.evaluated(model)
    earlier = ("train",) if split == "valid" else ("train", "valid")
    popularity = data.popularity(config.popularity.half_life, *earlier)
    items = (hosts.to_global(mesh, batch) for batch in catalogue(data, config, popularity, mesh))
    candidates = retrieval.joined([encode(view, batch) for batch in items], mesh)
    approximate, shares = None, []
    if config.ann and split == "test":
      approximate = retrieval.Approximate(hosts.gather(candidates)[: data.num_items])
    for batch in hosts.put_ahead(mesh, data_lib.eval_batches(data, split, config)):
      queries, top_ids = rank(view, candidates, batch["query"], batch["seen"])
      queries, top_ids, relevant, seen, mask = hosts.gather(
        (queries, top_ids, batch["relevant"], batch["seen"], batch["mask"])
      )
      metrics = metrics.update(top_ids, relevant, mask)
      if approximate is not None:
        approximate_ids = approximate.top_k(queries[mask], max(config.ks), seen[mask])[1]
        shares.append(retrieval.recall(approximate_ids, top_ids[mask]))
    extra = {f"ann_recall@{max(config.ks)}": float(np.mean(shares))} if shares else {}
    return metrics.compute() | extra

  return evaluate


def catalogue(
  data: data_lib.RetrievalData, config, popularity: np.ndarray, mesh: Mesh | None = None
):
  """Yields `candidate`, the tower's features, and `popularity` of all items, `[items]`, in batches.

  A batch has `config.eval_batch_size` items.

  Every process yields its own part. The order is by `retrieval.catalogue_batches`; without a mesh
  it is by item.
  """
  index, count = hosts.shard()
  for items in retrieval.catalogue_batches(data.num_items, config.eval_batch_size, mesh):
    own = np.split(items, count)[index]
    features = data_lib.candidate_inputs(data, own)
    candidate = {name: features[name] for name in config.candidate}
    yield {"candidate": candidate, "popularity": popularity[own]}


# --- what is trained ------------------------------------------------------------------------------


def check(config, mesh: Mesh | None) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  settings.check(config)
  train_step.check(config, mesh)
  if config.loss not in LOSSES:
    raise UserError(f"unknown loss {config.loss!r}: choose one of {LOSSES}")
  if not config.temperature > 0:
    raise UserError(f"config.temperature is {config.temperature}: choose a number above 0")
  least = {"history": 1, "eval_history": 1, "queue": 0, "hard_negatives": 0, "negatives.number": 0}
  settings.at_least(config, least)
  if not -1 <= config.cosine.margin < 1 or not config.cosine.weight > 0:
    raise UserError(
      f"config.cosine is {dict(config.cosine)}: choose a margin of -1 to 1, and a weight above 0"
    )
  if config.loss == "cosine_contrastive" and not (config.negatives.number and config.normalize):
    raise UserError(
      "cosine_contrastive compares cosines with the ones of drawn items: set negatives.number, as "
      "to 1000, and leave normalize on"
    )
  if config.loss == "cosine_contrastive" and config.popularity.weight:
    raise UserError(
      "cosine_contrastive learns popularity in its vectors: set popularity.weight to 0"
    )
  if config.loss == "cosine_contrastive" and (config.queue or config.hard_negatives):
    raise UserError("queue and hard_negatives are for the loss softmax: set both to 0")
  hosts.check_batch_sizes(mesh, **{"negatives.number": config.negatives.number})


def decide(config, data: data_lib.RetrievalData, mesh: Mesh | None = None) -> ConfigDict:
  """Returns the config with what the data decide; checks what they tell."""
  names = ranking_names(config.ks, data.num_items)
  has_valid = len(range(*data.splits["valid"])) > 0
  check_select(config.select, [f"valid_{name}" for name in names] if has_valid else [])
  config = with_all_features(train_step.with_schedule(config, data.num_examples, mesh), data)
  if config.popularity.half_life > 0 and not data.ordered:
    raise UserError("popularity.half_life is for a log with a time: leave it out, or declare one")
  if config.popularity.half_life < 0:
    if data.ordered and not has_valid and config.popularity.weight:
      raise UserError(
        "popularity.half_life is chosen on validation, and there is none: set it, as to the one in "
        "config.json of a run with validation"
      )
    popularity = ConfigDict({**config.popularity, "half_life": data.half_life()})
    config = settings.copied(config, popularity=popularity)
  return config


def make_state(
  config, data: data_lib.RetrievalData, mesh: Mesh | None = None
) -> tuple[nnx.Module, embed.Optimizer]:
  """Returns the model on its devices, and the optimizer of its dense parameters and tables."""
  with from_settings():
    of_batch = lambda: jax.eval_shape(
      functools.partial(inputs, config), data_lib.batch_shapes(data, config)
    )
    model = build_model(config, data, mesh, of_batch)
    train_step.keep_averages(model, config.ema)
    return model, embed.Optimizer(model, build.dense_optimizer(config))
