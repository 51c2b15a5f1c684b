"""Trains a two-tower model: what to train, on what, and how it is measured."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

import embed

from .. import baselines as baselines_lib
from .. import features as features_lib
from .. import hosts, layers, loop, optimizers, placement, retrieval, train_step
from ..errors import UserError, from_settings
from ..metrics import RankingMetrics, ranking_names
from ..tables.settings import steps_of_data
from . import data as data_lib
from . import losses
from . import model as model_lib


def run(config, workdir: str, writers: Sequence[loop.Writer] = ()) -> dict[str, Any]:
  """Trains as configured, or reports the run that the workdir holds; see `loop.run`."""
  return loop.run("two_tower", config, workdir, prepare, writers)


def prepare(config, mesh: Mesh | None) -> loop.Training:
  """Returns the parts of a run: loads the data, builds the model and its optimizer.

  Raises:
    UserError: a setting is wrong, or a file of the data is missing or damaged.
  """
  units = train_step.units(config, mesh)
  check(config, mesh)
  data = data_lib.load(config)
  metrics = ranking_names(config.ks, data.num_items)
  start, stop = data.splits["train"]
  config = with_all_features(steps_of_data(config, stop - start, units), data)
  with from_settings():
    of_batch = lambda: inputs(config, data_lib.batch_shapes(data, config))
    model = build_model(config, data, mesh, of_batch)
    optimizer = embed.Optimizer(model, optimizers.dense_optimizer(config))
  return loop.Training(
    model=model,
    optimizer=optimizer,
    loss_fn=objective(config, mesh),
    batches=data_lib.train_batches(data, config),
    evaluate=evaluator(data, config, mesh),
    baselines=functools.partial(baselines, data, config),
    data_sha256=data.sha256,
    metrics=metrics if len(range(*data.splits["valid"])) else (),
    config=config,
    serve=data.serve,
  )


def check(config, mesh: Mesh | None) -> None:
  """Checks sizes that must fit the devices.

  Raises:
    UserError: one does not; names it.
  """
  train_step.check(config, mesh)
  hosts.check_batch_sizes(
    mesh,
    batch_size=config.batch_size or train_step.units(config, mesh),
    eval_batch_size=config.eval_batch_size,
    **{"negatives.number": config.negatives.number},
  )


def build_model(
  config,
  data: data_lib.RetrievalData,
  mesh: Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> model_lib.TwoTower:
  """Returns the model, its tables with the configured optimizer and, under a mesh, split over it.

  `inputs` returns the shapes of a batch's features, for a plan; see `placement.make_tables`.

  Raises:
    ValueError: a queue that is not a multiple of the batch, or an unknown option.
  """
  if config.queue % config.batch_size:
    raise UserError(
      f"queue is {config.queue}: choose a multiple of the batch size {config.batch_size}"
    )
  features, optimizer = feature_configs(config, data), optimizers.table_optimizer(config)
  rngs = nnx.Rngs(config.seed)
  return model_lib.TwoTower(
    placement.make_tables(config, features, optimizer, rngs=rngs, mesh=mesh, inputs=inputs),
    config.dim,
    data.num_items,
    query_hidden=config.query_hidden,
    candidate_hidden=config.candidate_hidden,
    dropout=config.dropout,
    normalize=config.normalize,
    buckets=config.frequency.buckets,
    rate=config.frequency.rate,
    queue=config.queue,
    dtype=layers.dtype(config, "dtype"),
    rngs=rngs,
  )


def with_all_features(config, data: data_lib.RetrievalData) -> ConfigDict:
  """Returns the config with all features of the data in a tower whose setting names none."""
  if config.query and config.candidate:
    return config
  config = config.copy_and_resolve_references()
  config.query = config.query or ("user", "history", *(f.name for f in data.user_features))
  config.candidate = config.candidate or ("item", *(f.name for f in data.item_features))
  return config


def feature_configs(
  config, data: data_lib.RetrievalData
) -> dict[str, dict[str, embed.FeatureConfig]]:
  """Returns the features of both towers that the config names.

  `config.query` may hold `user`, `history` and the user's features; `config.candidate` may hold
  `item` and the item's features. Histories read the items' own table, or with
  `config.share_history` False one of their own.

  Raises:
    ValueError: there is no such feature; names those that there are.
  """
  initializer = layers.table_initializer(config)
  dtype = layers.dtype(config, "table_dtype")
  table = functools.partial(
    embed.TableConfig, dim=config.dim, initializer=initializer, combiner="mean", dtype=dtype
  )
  config_of = embed.FeatureConfig
  item = table(data.num_items, name="item")
  history = item if config.share_history else table(data.num_items, name="history")
  of = functools.partial(
    features_lib.feature_configs,
    dim=config.dim,
    initializer=initializer,
    optimizer=lambda name: optimizers.table_optimizer(config, name),
    dtype=dtype,
  )
  known = {
    "query": {"user": config_of(table(data.num_users, name="user")), "history": config_of(history)}
    | of(data.user_features, prefix="user_"),
    "candidate": {"item": config_of(item)} | of(data.item_features, prefix="item_"),
  }
  chosen: dict[str, dict[str, embed.FeatureConfig]] = {}
  for side, names in (("query", config.query), ("candidate", config.candidate)):
    unknown = set(names) - set(known[side])
    if unknown or not names:
      raise UserError(
        f"config.{side} is {tuple(names)}: choose some of {sorted(known[side])} of this data set"
      )
    chosen[side] = {name: known[side][name] for name in names}
  return chosen


def inputs(config, batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the features of a batch's queries and candidates, the drawn ones after the others.

  Of a batch of shapes, `jax.ShapeDtypeStruct`, the shapes.
  """
  candidate = batch["positive_candidate"]
  if config.negatives.number:
    both = lambda x, y: jax.tree.map(lambda *pair: jnp.concatenate(pair), x, y)
    is_abstract = isinstance(jax.tree.leaves(candidate)[0], jax.ShapeDtypeStruct)
    join = functools.partial(jax.eval_shape, both) if is_abstract else both
    candidate = join(candidate, batch["negative_candidate"])
  return {
    "query": {name: batch["query"][name] for name in config.query},
    "candidate": {name: candidate[name] for name in config.candidate},
  }


def loss(config, mesh: Mesh | None = None) -> Callable[[Any, Any], jax.Array]:
  """Returns `(model, batch) -> scalar`: the mean sampled softmax of the whole batch.

  Under a mesh every query meets the candidates of all devices, not of its own alone.
  """
  dtype = layers.dtype(config, "dtype")

  def loss_fn(model: model_lib.TwoTower, batch) -> jax.Array:
    size = batch["positive"].shape[0]
    ids, rate = batch["positive"], batch["positive_rate"]
    if config.negatives.number:
      ids = jnp.concatenate([ids, batch["negative"]])
      rate = jnp.concatenate([rate, batch["negative_rate"]])
    queries, candidates = model(**inputs(config, batch))
    model.frequency.update(batch["positive"])
    batches, pool = 1.0, (ids, candidates, rate)
    if model.queue is not None:
      past = model.queue.read()
      model.queue.put(ids[:size], candidates[:size], rate[:size])
      batches += jnp.sum(past[0] >= 0) / size
      pool = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), pool, past)
    ids, candidates, rate = (_placed(x, mesh, PartitionSpec()) for x in pool)
    log_expected = None
    if config.logq:
      expected = batches * model.frequency.expected(jnp.maximum(ids, 0)) + rate
      log_expected = config.logq * jnp.log(expected)
    values = losses.sampled_softmax(
      _scores(queries, candidates, dtype) / config.temperature,
      ids,
      log_expected=log_expected,
      remove_accidental_hits=config.remove_accidental_hits,
      hard_negatives=config.hard_negatives,
    )
    return values.mean()

  return loss_fn


def objective(config, mesh: Mesh | None = None) -> train_step.Objective:
  """Returns the loss, and what its parts are if a batch is cut: each has all drawn negatives."""
  drawn = ("negative", "negative_rate", "negative_candidate")
  return train_step.Objective(loss(config, mesh), shared=drawn)


def _scores(queries: jax.Array, candidates: jax.Array, dtype: Any) -> jax.Array:
  """Dot products `[B, C]`, of `dtype` and added up in float32."""
  queries, candidates = queries.astype(dtype), candidates.astype(dtype)
  return jnp.einsum("bd,cd->bc", queries, candidates, preferred_element_type=jnp.float32)


def _placed(x: jax.Array, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def make_encode(mesh: Mesh | None):
  """Returns the compiled `(model, candidate) -> vectors [B, D]`, split over the mesh."""

  @nnx.jit(graph=False)  # with Flax's default every call returns a copy of the tables
  def encode(model, candidate):
    return _placed(model.candidates(candidate), mesh, PartitionSpec(hosts.AXIS))

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

  def evaluate(model, split: str) -> dict[str, float]:
    if len(range(*data.splits[split])) == 0:
      return {}
    metrics, view = RankingMetrics(config.ks), nnx.view(model, deterministic=True)
    items = (hosts.to_global(mesh, batch) for batch in catalogue(data, config, mesh))
    candidates = retrieval.joined([encode(view, batch) for batch in items], mesh)
    approximate, shares = None, []
    if config.ann and split == "test":
      approximate = retrieval.Approximate(hosts.gather(candidates)[: data.num_items])
    for batch in hosts.put_ahead(mesh, data_lib.eval_batches(data, split, config)):
      queries, top_ids = rank(view, candidates, batch["query"], batch["seen"])
      queries, top_ids, relevant, seen, mask = hosts.gather(
        (queries, top_ids, batch["relevant"], batch["seen"], batch["mask"])
      )
      metrics.update(top_ids, relevant, mask)
      if approximate is not None:
        approximate_ids = approximate.top_k(queries[mask], max(config.ks), seen[mask])[1]
        shares.append(retrieval.recall(approximate_ids, top_ids[mask]))
    extra = {f"ann_recall@{max(config.ks)}": float(np.mean(shares))} if shares else {}
    return metrics.compute() | extra

  return evaluate


def catalogue(data: data_lib.RetrievalData, config, mesh: Mesh | None = None):
  """Yields the candidate tower's features of all items in batches of `config.eval_batch_size`.

  Every process yields its own part. The order is by `retrieval.catalogue_batches`; without a mesh
  it is by item.
  """
  index, count = hosts.shard()
  for items in retrieval.catalogue_batches(data.num_items, config.eval_batch_size, mesh):
    own = np.split(items, count)[index]
    features = data_lib.candidate_inputs(data, own)
    yield {name: features[name] for name in config.candidate}


def examples(
  data: data_lib.RetrievalData, split: str, by: str
) -> tuple[np.ndarray, scipy.sparse.csr_matrix]:
  """Returns the user of each of a split's examples and their relevant items `[examples, items]`.

  `by` is the config's `examples`: "users" or "rows".
  """
  if by == "users":
    return np.arange(data.num_users), data.matrix(split)
  start, stop = data.splits[split]
  items = np.asarray(data.columns["item"][start:stop])
  pairs = np.arange(stop - start), items
  shape = (stop - start, data.num_items)
  matrix = scipy.sparse.csr_matrix((np.ones(stop - start, np.float32), pairs), shape)
  return np.asarray(data.columns["user"][start:stop]), matrix


def baselines(data: data_lib.RetrievalData, config) -> dict[str, loop.Baseline]:
  """Returns what fits popularity, item kNN, EASE and iALS, and the best possible metrics.

  EASE and iALS are fitted as configured, item kNN where the users' lists are short enough.
  """
  settings = config.baseline
  fit = functools.partial(
    fit_baseline,
    data,
    examples_by=config.examples,
    exclude_seen=config.exclude_seen,
    ks=tuple(config.ks),
    select=settings.select,
    ials=dict(settings.ials),
  )
  lengths = np.diff(data.columns["train_offsets"])
  penalties = {
    "popularity": (0.0,),
    "item kNN": (0.0,) if baselines_lib.can_fit_knn(lengths) else (),
    "EASE": settings.ease_l2,
    "iALS": settings.ials_l2,
  }
  chosen: dict[str, loop.Baseline] = {
    name: functools.partial(fit, name, tuple(values))
    for name, values in penalties.items()
    if values
  }
  if data.best:
    chosen["best possible"] = dict(data.best)
  return chosen


def fit_baseline(
  data: data_lib.RetrievalData,
  name: str,
  penalties: tuple[float, ...],
  *,
  examples_by: str,
  exclude_seen: bool,
  ks: tuple[int, ...],
  select: str,
  ials: Mapping[str, Any],
) -> dict[str, float]:
  """Returns the metrics of a baseline, by the models' own ranking.

  Args:
    data: the data set.
    name: as for `baselines.scorer`.
    penalties: of which the one is tested that validation prefers by the metric `select`.
    examples_by, exclude_seen, ks: as in the config.
    ials: its other arguments.
  """
  relevant, histories = {}, {}
  for split, earlier in (("valid", ("train",)), ("test", ("train", "valid"))):
    users, relevant[split] = examples(data, split, examples_by)
    histories[split] = data.matrix(*earlier)[users]
  fit = functools.partial(baselines_lib.scorer, name, data.matrix("train"), **ials)
  candidates = {l2: functools.partial(fit, l2) for l2 in penalties}
  return baselines_lib.best_ranking(
    candidates, histories, relevant, ks, exclude_seen=exclude_seen, select=select
  )
