"""Two towers over one `SparseEmbed`, and their features.

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


class Tower(nnx.Module):
  """Turns the vectors of one side, `{name: [B, D]}`, into one vector `[B, D]` of length 1.

  Without hidden layers the result is the sum, each feature times a learned number; with them, an
  MLP of the concatenation and a linear layer.

  Args:
    dim: D.
    hidden: widths of the MLP.
    dropout: rate, of the activations and after the MLP's layers.
    dtype: of the computation; the result is float32.
  """

  def __init__(
    self,
    names: Sequence[str],
    dim: int,
    *,
    hidden: Sequence[int],
    dropout: float,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.names, self.dtype = tuple(names), dtype
    self.dropout = nnx.Dropout(dropout, rngs=rngs)
    self.gains = None if hidden else nnx.Param(jnp.ones(len(names)))
    self.mlp = layers.MLP(len(names) * dim, hidden, dropout=dropout, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(self.mlp.out_features, dim, dtype=dtype, rngs=rngs) if hidden else None

  def __call__(self, activations: Mapping[str, jax.Array]) -> jax.Array:
    vectors = [self.dropout(activations[name].astype(self.dtype)) for name in self.names]
    if self.gains is not None:
      x_BxD = jnp.einsum("f,fbd->bd", self.gains[...].astype(self.dtype), jnp.stack(vectors))
    else:
      assert self.out is not None
      x_BxD = self.out(self.mlp(jnp.concatenate(vectors, axis=1)))
    x_BxD = x_BxD.astype(jnp.float32)
    return x_BxD * layers.inverse_length(x_BxD)


class Trained(nnx.Variable):
  """Marks items with training interactions, bool `[items]`; exports read it from the checkpoint."""


class TwoTower(nnx.Module):
  """Query and candidate tower; a score is the dot product of what they return.

  Args:
    tables: of the features `{"query": {name: FeatureConfig}, "candidate": {...}}`, of width `dim`.
  """

  def __init__(self, tables: embed.SparseEmbed, config, data: RetrievalData, *, rngs: nnx.Rngs):
    self.embed = tables
    options: Any = {"hidden": config.hidden, "dtype": build.dtype(config, "dtype"), "rngs": rngs}
    self.query_tower = Tower(config.query, config.dim, dropout=config.dropout, **options)
    self.candidate_tower = Tower(config.candidate, config.dim, dropout=0.0, **options)
    # A score is a cosine, divided by the temperature in training alone.
    self.popularity = config.popularity * config.temperature
    # With popularity, an item without training interactions counts by its popularity and features:
    # its own row is noise, unless an earlier run has trained it.
    reads_all = not self.popularity or bool(config.init_from)
    self.trained = Trained(jnp.asarray(data.counts("train") > 0) | reads_all)

  def __call__(self, query: Any, candidate: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the vectors of queries `[B, D]` and candidates `[C, D]`, by one lookup."""
    activations = self.embed({"query": query, "candidate": candidate})
    return self.query_tower(activations["query"]), self.candidate_tower(activations["candidate"])

  def queries(self, query: Any) -> jax.Array:
    """Returns `[B, D]`, or with the weight of popularity `[B, D + 1]`."""
    if "history" in query:
      items = embed.Padded(self._known(query["history"].values))
      query = {**query, "history": items}
    vectors_BxD = self.query_tower(self.embed({"query": query})["query"])
    if not self.popularity:
      return vectors_BxD
    return jnp.pad(vectors_BxD, ((0, 0), (0, 1)), constant_values=self.popularity)

  def candidates(self, candidate: Any, popularity: jax.Array) -> jax.Array:
    """Returns `[C, D]`, or with log popularity `[C, D + 1]`."""
    if "item" in candidate:
      candidate = {**candidate, "item": self._known(candidate["item"])}
    vectors_CxD = self.candidate_tower(self.embed({"candidate": candidate})["candidate"])
    if not self.popularity:
      return vectors_CxD
    return jnp.concatenate([vectors_CxD, popularity[:, None]], axis=1)

  def _known(self, items: jax.Array) -> jax.Array:
    """Returns the items `[...]`, -1 in place of those without a trained row."""
    return jnp.where(self.trained[jnp.maximum(items, 0)], items, -1)


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
  names = lambda side: (feature.name for feature in data.features[side])
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
    known = own[side] | declared
    if set(config[side]) - set(known):
      raise UserError(
        f"config.{side} is {tuple(config[side])}: choose some of {sorted(known)} of this data set"
      )
    chosen[side] = {name: known[name] for name in config[side]}
  return chosen
