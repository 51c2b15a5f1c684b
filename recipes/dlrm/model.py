"""DLRM and DCN-V2: two ways to let categorical and dense features meet.

B is the batch, F the number of categorical features, K of dense ones, D the width of the tables.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from ..errors import UserError
from ..training import build, layers
from ..training import features as features_lib
from . import listens
from .data import ClickData
from .hstu import HSTURanker

Batch = Mapping[str, jax.Array]


class DLRM(nnx.Module):
  """Naumov et al. 2019: a bottom MLP on the dense features, dot products of all pairs, a top MLP.

  Without dense features there is no bottom MLP and the pairs are of the tables alone.

  Args:
    tables: of single ids and bags; those that are not of width `dim` are projected to it.
    num_dense: K.
    dim: D.
    bottom: widths of the bottom MLP before its last layer, which has width D.
    top: widths of the top MLP before the logit.
    concat_tables: the top MLP also sees what the tables return, not only the dot products and the
      bottom MLP's output (False is as published). Without dense features it has little else.
    dropout: rate, after the top MLP's layers.
    dtype: of the computation; logits are float32.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    num_dense: int,
    dim: int,
    *,
    bottom: Sequence[int],
    top: Sequence[int],
    concat_tables: bool,
    dropout: float,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.embed, self.dtype, features = tables, dtype, tables.spec.features
    mlp = functools.partial(layers.MLP, dtype=dtype, rngs=rngs)
    self.bottom = mlp(num_dense, [*bottom, dim]) if num_dense else None
    self.names, self.concat_tables = tuple(features), concat_tables
    self.projections = nnx.Dict(
      {
        name: nnx.Linear(feature.table.dim, dim, use_bias=False, dtype=dtype, rngs=rngs)
        for name, feature in features.items()
        if feature.table.dim != dim
      }
    )
    vectors = len(features) + (num_dense > 0)
    seen = vectors if concat_tables else int(num_dense > 0)
    width = seen * dim + vectors * (vectors - 1) // 2
    self.top = mlp(width, top, dropout=dropout)
    self.head = nnx.Linear(self.top.out_features, 1, rngs=rngs)

  def __call__(self, batch: Batch) -> jax.Array:
    """Returns logits `[B]` of a batch with `features` and `dense` `[B, K]`."""
    activations = jax.tree.map(lambda x: x.astype(self.dtype), self.embed(batch["features"]))
    tables = [
      self.projections[name](activations[name]) if name in self.projections else activations[name]
      for name in self.names
    ]
    dense = [self.bottom(batch["dense"])] if self.bottom is not None else []
    pairs = layers.dot_interaction(jnp.stack([*tables, *dense], axis=1))
    seen = [*tables, *dense] if self.concat_tables else dense
    return self.head(self.top(jnp.concatenate([*seen, pairs], axis=1)))[:, 0]  # promoted


class DCNV2(nnx.Module):
  """Wang et al. 2021: a cross network and a deep network, side by side or one after the other.

  Args:
    tables, num_dense, dtype: as for `DLRM`; tables are of any width.
    cross_layers: number of cross layers.
    rank: of the cross layers' matrices; 0 for full matrices.
    deep: widths of the deep network.
    structure: "parallel" concatenates both outputs before the logit, "stacked" feeds the cross
      network's output to the deep one.
    dropout: rate, after the deep network's layers.
    bottom: widths of an MLP on the dense features before they meet the others, as in MLPerf's
      DLRM-DCNv2; none leaves them as they are.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    num_dense: int,
    *,
    cross_layers: int,
    rank: int,
    deep: Sequence[int],
    structure: str,
    dropout: float,
    bottom: Sequence[int] = (),
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    if structure not in ("parallel", "stacked"):
      raise UserError(f"unknown structure {structure!r}: choose parallel or stacked")
    self.embed, self.dtype, features = tables, dtype, tables.spec.features
    of_dtype = {"dtype": dtype, "rngs": rngs}
    self.bottom = layers.MLP(num_dense, bottom, **of_dtype) if bottom else None
    self.names = tuple(features)
    width = sum(feature.table.dim for feature in features.values())
    width += bottom[-1] if bottom else num_dense
    self.cross = layers.Cross(width, cross_layers, rank=rank or None, **of_dtype)
    self.deep = layers.MLP(width, deep, dropout=dropout, **of_dtype)
    self.structure = structure
    both = self.deep.out_features + (width if structure == "parallel" else 0)
    self.head = nnx.Linear(both, 1, rngs=rngs)

  def __call__(self, batch: Batch) -> jax.Array:
    """Returns logits `[B]` of a batch with `features` and `dense` `[B, K]`."""
    activations = self.embed(batch["features"])
    dense = batch["dense"] if self.bottom is None else self.bottom(batch["dense"])
    parts = [*(activations[name] for name in self.names), dense]
    x = jnp.concatenate([part.astype(self.dtype) for part in parts], axis=1)
    crossed = self.cross(x)
    if self.structure == "stacked":
      return self.head(self.deep(crossed))[:, 0]
    return self.head(jnp.concatenate([crossed, self.deep(x)], axis=1))[:, 0]


def build_model(
  config,
  data: ClickData,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> nnx.Module:
  """Returns the model that `config.model` names, its tables with the configured optimizer.

  `inputs` returns the shapes of a batch's features, for a plan; see `build.tables`.
  """
  initializer = build.table_initializer(config)
  features = features_lib.feature_configs(
    data.features,
    config.dim,
    initializer=initializer,
    optimizer=lambda name: build.table_optimizer(config, name),
    dtype=build.dtype(config, "table_dtype"),
  )
  rngs, optimizer = nnx.Rngs(config.seed), build.table_optimizer(config)
  if (config.model == "hstu") != ("tokens" in data.columns):
    raise UserError(
      f"model is {config.model!r} and dataset {config.dataset!r}: write model='hstu' for the "
      "sequences of 'listens', and another model for other data"
    )
  common: Any = {
    "tables": build.tables(config, features, optimizer, rngs=rngs, mesh=mesh, inputs=inputs),
    "dropout": config.dropout,
    "dtype": build.dtype(config, "dtype"),
    "rngs": rngs,
  }
  if config.model == "hstu":
    of_log = {"tokens": listens.TOKENS, "contexts": listens.CONTEXTS, "actions": listens.ACTIONS}
    return HSTURanker(**common, **of_log, dim=config.dim, **config.hstu)
  common["num_dense"] = data.num_dense
  if config.model == "dlrm":
    return DLRM(**common, dim=config.dim, **config.dlrm)
  if config.model == "dcnv2":
    return DCNV2(**common, **config.dcnv2)
  raise UserError(f"unknown model {config.model!r}: choose dlrm, dcnv2 or hstu")
