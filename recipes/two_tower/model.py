"""Two towers over one `SparseEmbed`, their features, and how often items are in a batch.

B is the number of queries, C of candidates, F of features, D the width of tables and towers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

import embed

from .. import config as config_lib
from ..errors import UserError
from ..training import build, layers
from ..training import features as features_lib
from .data import RetrievalData

SIDES = {"query": "user", "candidate": "item"}  # the features of each tower
_RATE = 0.02  # of the moving averages of `Frequency`


class Tower(nnx.Module):
  """Turns the vectors of one side, `{name: [B, D]}`, into one vector `[B, D]` of length 1.

  Vectors of a data set, `[B, width]`, are projected to width D first, without a bias. Without
  hidden layers the result is the sum, each feature times a learned number; with them, an MLP of the
  concatenation and a linear layer.

  Args:
    dim: D.
    vectors: the widths of a data set's vectors by name.
    hidden: widths of the MLP.
    dropout: rate, of the activations and after the MLP's layers.
    dtype: of the computation; the result is float32.
  """

  def __init__(
    self,
    names: Sequence[str],
    dim: int,
    *,
    vectors: Mapping[str, int],
    hidden: Sequence[int],
    dropout: float,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.names, self.dtype = tuple(names), dtype
    self.dropout = nnx.Dropout(dropout, rngs=rngs)
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
    self.projections = nnx.Dict({name: linear(width, dim) for name, width in vectors.items()})
    self.gains = None if hidden else nnx.Param(jnp.ones(len(names)))
    self.mlp = layers.MLP(len(names) * dim, hidden, dropout=dropout, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(self.mlp.out_features, dim, dtype=dtype, rngs=rngs) if hidden else None

  def __call__(self, activations: Mapping[str, jax.Array]) -> jax.Array:
    projected = {name: self.projections[name](activations[name]) for name in self.projections}
    activations = {**activations, **projected}
    vectors = [self.dropout(activations[name].astype(self.dtype)) for name in self.names]
    if self.gains is not None:
      x_BxD = jnp.einsum("f,fbd->bd", self.gains[...].astype(self.dtype), jnp.stack(vectors))
    else:
      assert self.out is not None
      x_BxD = self.out(self.mlp(jnp.concatenate(vectors, axis=1)))
    x_BxD = x_BxD.astype(jnp.float32)
    return x_BxD * layers.inverse_length(x_BxD)


class TwoTower(nnx.Module):
  """Query and candidate tower; a score is the dot product of what they return.

  Args:
    tables: of the features `{"query": {name: FeatureConfig}, "candidate": {...}}`, of width `dim`.
  """

  def __init__(self, tables: embed.SparseEmbed, config, data: RetrievalData, *, rngs: nnx.Rngs):
    self.embed = tables
    self._vectors = {side: tuple(data.vectors[of]) for side, of in SIDES.items()}

    def tower(side: str, hidden: Sequence[int], dropout: float) -> Tower:
      own = {n: width for n, width in data.vectors[SIDES[side]].items() if n in config[side]}
      options: dict[str, Any] = {"dtype": build.dtype(config, "dtype"), "rngs": rngs}
      names = config[side]
      return Tower(names, config.dim, vectors=own, hidden=hidden, dropout=dropout, **options)

    self.query_tower = tower("query", config.query_hidden, config.dropout)
    self.candidate_tower = tower("candidate", config.candidate_hidden, 0.0)
    self.frequency = Frequency(data.num_items)
    # A score is a cosine, divided by the temperature in training alone. With popularity, an item
    # that no batch has had counts by its popularity and features: its own row is noise.
    self.popularity = config.popularity * config.temperature
    # The counts tell which items this run has trained, not an earlier one.
    self._knows_items = bool(self.popularity) and not config.init_from

  def __call__(self, query: Any, candidate: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the vectors of queries `[B, D]` and candidates `[C, D]`, by one lookup."""
    inputs = {"query": query, "candidate": candidate}
    activations = self.embed(self._of_tables(inputs))
    queries_BxD = self.query_tower({**query, **activations["query"]})
    return queries_BxD, self.candidate_tower({**candidate, **activations["candidate"]})

  def _of_tables(self, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the inputs, by tower and name, without vectors."""
    return {
      side: {name: x for name, x in features.items() if name not in self._vectors[side]}
      for side, features in inputs.items()
    }

  def queries(self, query: Any) -> jax.Array:
    """Returns `[B, D]`, or with the weight of popularity `[B, D + 1]`."""
    if self._knows_items and "history" in query:
      items = query["history"].values
      query = dict(query) | {"history": embed.Padded(self.frequency.known(items))}
    vectors_BxD = self.query_tower(self._activations("query", query))
    if not self.popularity:
      return vectors_BxD
    return jnp.pad(vectors_BxD, ((0, 0), (0, 1)), constant_values=self.popularity)

  def candidates(self, candidate: Any, popularity: jax.Array) -> jax.Array:
    """Returns `[C, D]`, or with log popularity `[C, D + 1]`."""
    if self._knows_items and "item" in candidate:
      candidate = dict(candidate) | {"item": self.frequency.known(candidate["item"])}
    vectors_CxD = self.candidate_tower(self._activations("candidate", candidate))
    if not self.popularity:
      return vectors_CxD
    return jnp.concatenate([vectors_CxD, popularity[:, None]], axis=1)

  def _activations(self, side: str, features: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {**features, **self.embed(self._of_tables({side: features}))[side]}


class Estimate(nnx.Variable):
  """The arrays of a `Frequency`, by name."""


class Frequency(nnx.Module):
  """The streaming estimator of Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling".

  It keeps the batch that had an item last, and a moving average of the intervals between the
  batches that have the item; the item's rate is one over that. A large batch may have an item
  several times, for which the paper has no room: a second moving average keeps how often, and the
  expected number of an item in a batch is this count over the interval. Both averages weigh all
  observations equally until there are `1 / _RATE` of them, so that the first interval does not
  linger.

  Args:
    num_items: the size of the catalogue.
  """

  def __init__(self, num_items: int):
    self.num_items = num_items
    self.estimate = Estimate(
      {
        "batch": jnp.int32(0),
        "seen": jnp.zeros(num_items, jnp.int32),  # batches that had the item
        "last": jnp.full(num_items, -1, jnp.int32),  # the batch before the first one
        "interval": jnp.ones(num_items, jnp.float32),
        "count": jnp.zeros(num_items, jnp.float32),
      }
    )

  def update(self, ids_B: jax.Array) -> None:
    """Counts a batch's items in place."""
    state = dict(self.estimate.get_value())
    batch, seen_B = state["batch"], state["seen"][ids_B] + 1
    counts_B = jnp.zeros_like(state["count"]).at[ids_B].add(1.0)[ids_B]
    rate_B = jnp.maximum(1.0 / seen_B.astype(jnp.float32), _RATE)
    interval_B = (batch - state["last"][ids_B]).astype(jnp.float32)
    # Several of one item write the same values, so their order does not matter.
    average = lambda old, new: old.at[ids_B].set((1 - rate_B) * old[ids_B] + rate_B * new)
    self.estimate.set_value(
      {
        "batch": batch + 1,
        "seen": state["seen"].at[ids_B].set(seen_B),
        "last": state["last"].at[ids_B].set(batch),
        "interval": average(state["interval"], interval_B),
        "count": average(state["count"], counts_B),
      }
    )

  def known(self, ids: jax.Array) -> jax.Array:
    """Returns the ids `[...]`, -1 in place of items that no batch has had."""
    return jnp.where(self.estimate.get_value()["seen"][jnp.maximum(ids, 0)] > 0, ids, -1)

  def expected(self, ids: jax.Array) -> jax.Array:
    """Returns how often each item `[...]` is expected in a batch, float32.

    An item that was never seen is taken to come in the next batch, once.
    """
    state = self.estimate.get_value()
    waited = (state["batch"] + 1).astype(jnp.float32)
    rates = state["count"][ids] / state["interval"][ids]
    return jnp.where(state["seen"][ids] > 0, rates, 1.0 / waited)


def build_model(
  config,
  data: RetrievalData,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> TwoTower:
  """Returns the model, its tables with the configured optimizer and, under a mesh, split over it.

  `inputs` returns the shapes of a batch's features, for a plan; see `build.tables`.
  """
  features, optimizer = feature_configs(config, data), build.table_optimizer(config)
  rngs = nnx.Rngs(config.seed)
  tables = build.tables(config, features, optimizer, rngs=rngs, mesh=mesh, inputs=inputs)
  return TwoTower(tables, config, data, rngs=rngs)


def with_all_features(config, data: RetrievalData) -> ConfigDict:
  """Returns the config with the features of the data in a tower whose setting names none.

  Leaves out the user's own vector, which training learns by heart where users have few rows.
  """
  names = lambda side: (*(feature.name for feature in data.features[side]), *data.vectors[side])
  query = config.query or ("history", *names("user"))
  candidate = config.candidate or ("item", *names("item"))
  return config_lib.copied(config, query=query, candidate=candidate)


def feature_configs(config, data: RetrievalData) -> dict[str, dict[str, embed.FeatureConfig]]:
  """Returns the features of both towers that the config names.

  `config.query` may hold `user`, `history` and the user's features, `config.candidate` `item` and
  the item's features. Histories read the items' own table, or with `config.share_history` False
  one of their own.

  Raises:
    UserError: there is no such feature.
  """
  options: dict[str, Any] = {
    "dim": config.dim,
    "initializer": build.table_initializer(config),
    "dtype": build.dtype(config, "table_dtype"),
  }
  table: Any = functools.partial(embed.TableConfig, combiner="mean", **options)
  item = embed.FeatureConfig(table(data.num_items, name="item"))
  own = {"query": {"user": embed.FeatureConfig(table(data.num_users, name="user"))}}
  own["query"]["history"] = (
    item if config.share_history else embed.FeatureConfig(table(data.num_items, name="history"))
  )
  own["candidate"] = {"item": item}
  chosen: dict[str, dict[str, embed.FeatureConfig]] = {}
  for side, of in SIDES.items():
    declared = features_lib.feature_configs(
      data.features[of],
      optimizer=lambda name: build.table_optimizer(config, name),
      prefix=f"{of}_",
      **options,
    )
    known, names, vectors = own[side] | declared, set(config[side]), set(data.vectors[of])
    if names - set(known) - vectors or not names - vectors:
      raise UserError(
        f"config.{side} is {tuple(config[side])}: choose some of {sorted(known)} of this data "
        "set" + f", and vectors {sorted(vectors)}" * bool(vectors)
      )
    chosen[side] = {name: known[name] for name in config[side] if name in known}
  return chosen
