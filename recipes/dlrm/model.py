"""DLRM and DCN-V2: ways to let categorical and dense features meet.

A model looks up its features, a backbone makes hidden features of them, and a head makes logits of
these: `Ranker` reads from top to bottom, and its subclasses are the backbones.

B is the batch, F the number of vectors, K of dense features, D the width of the tables, H of the
hidden features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from ..training import build, layers
from ..training import features as features_lib
from . import histories as histories_lib
from .data import ClickData

Batch = Mapping[str, Any]
Vectors = Mapping[str, jax.Array]  # by feature, `[B, width]`


class Ranker(nnx.Module):
  """A click model: tables, a backbone and a head, `[B, H]` to float32 logits `[B]`."""

  embed: embed.SparseEmbed
  inputs: layers.Inputs
  head: Any
  histories: histories_lib.Histories | None = None  # None pools the positions of a history

  def __call__(self, batch: Batch) -> jax.Array:
    """Returns logits `[B]`.

    Args:
      batch: has `features` and `dense` `[B, K]`.
    """
    activations = self.embed(batch["features"])
    if self.histories is not None:
      activations = self.histories(activations, batch["features"])
    vectors, dense_BxK, linear_Bx1 = self.inputs(activations, batch["dense"])
    return (self.head(self.hidden(vectors, dense_BxK)) + linear_Bx1)[:, 0]

  def hidden(self, vectors: Vectors, dense_BxK: jax.Array) -> jax.Array:
    """Returns the backbone's features `[B, H]`."""
    raise NotImplementedError


class DLRM(Ranker):
  """Naumov et al. 2019: a bottom MLP on the dense features, dot products of all pairs, a top MLP.

  Without dense features there is no bottom MLP, and only the tables' vectors are paired.

  Args:
    dim: D; vectors of another width are projected to it.
    bottom: widths of the bottom MLP before its last layer, which has width D.
    top: widths of the top MLP before the logit.
    concat_tables: the top MLP also sees the tables' vectors, not only the dot products and the
      bottom MLP's output (False is as published). Without dense features it has little else.
    dropout: rate, after the top MLP's layers.
    options: `rngs` and `dtype` of the layers.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    inputs: layers.Inputs,
    dim: int,
    *,
    bottom: Sequence[int],
    top: Sequence[int],
    concat_tables: bool,
    dropout: float,
    **options: Any,
  ):
    self.embed, self.inputs, self.concat_tables = tables, inputs, concat_tables
    self.names, num_dense = tuple(inputs.widths), inputs.num_dense
    self.bottom = layers.MLP(num_dense, [*bottom, dim], **options) if num_dense else None
    num_vectors = len(inputs.widths) + (num_dense > 0)
    kept = num_vectors if concat_tables else int(num_dense > 0)
    width = kept * dim + num_vectors * (num_vectors - 1) // 2
    self.top = layers.MLP(width, top, dropout=dropout, **options)
    self.head = nnx.Linear(self.top.out_features, 1, rngs=options["rngs"])

  def hidden(self, vectors: Vectors, dense_BxK: jax.Array) -> jax.Array:
    tables = [vectors[name] for name in self.names]
    numbers = [self.bottom(dense_BxK)] if self.bottom is not None else []
    x_BxFxD = jnp.stack([*tables, *numbers], axis=1)
    kept = [*tables, *numbers] if self.concat_tables else numbers
    return self.top(jnp.concatenate([*kept, layers.dot_interaction(x_BxFxD)], axis=1))


class DCNV2(Ranker):
  """Wang et al. 2021: a cross network and a deep network, side by side or one after the other.

  Args:
    rank: of the cross layers' matrices; 0 for full matrices.
    deep: widths of the deep network, which has `dropout`.
    structure: "parallel" concatenates both outputs before the logit, "stacked" feeds the cross
      network's output to the deep one.
    bottom: widths of an MLP on the dense features before they meet the others, as in MLPerf's
      DLRM-DCNv2; () leaves it out.
    options: `rngs` and `dtype` of the layers.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    inputs: layers.Inputs,
    *,
    cross_layers: int,
    rank: int,
    deep: Sequence[int],
    structure: str,
    dropout: float,
    bottom: Sequence[int] = (),
    **options: Any,
  ):
    self.embed, self.inputs, self.names = tables, inputs, tuple(inputs.widths)
    self.is_stacked = structure == "stacked"
    self.bottom = layers.MLP(inputs.num_dense, bottom, **options) if bottom else None
    width = sum(inputs.widths.values()) + (bottom[-1] if bottom else inputs.num_dense)
    self.cross = layers.Cross(width, cross_layers, rank=rank, **options)
    self.deep = layers.MLP(width, deep, dropout=dropout, **options)
    seen = self.deep.out_features + (0 if self.is_stacked else width)
    self.head = nnx.Linear(seen, 1, rngs=options["rngs"])

  def hidden(self, vectors: Vectors, dense_BxK: jax.Array) -> jax.Array:
    numbers = dense_BxK if self.bottom is None else self.bottom(dense_BxK)
    x = jnp.concatenate([*(vectors[name] for name in self.names), numbers], axis=1)
    crossed = self.cross(x)
    if self.is_stacked:
      return self.deep(crossed)
    return jnp.concatenate([crossed, self.deep(x)], axis=1)


MODELS: dict[str, Any] = {"dlrm": DLRM, "dcnv2": DCNV2}
CHOICES: dict[str, Any] = {  # the known values by setting
  "model": MODELS,
  "start": ("regression", "random"),
  "dense_optimizer": ("adamw", "adagrad"),
  "dcnv2.structure": ("parallel", "stacked"),
  "history.model": histories_lib.MODELS,
}


def build_model(
  config,
  data: ClickData,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> nnx.Module:
  """Returns the model that `config.model` names, its tables with the configured optimizer.

  `inputs` returns the shapes of a batch's features, for a plan; see `build.tables`.
  """
  # First-order weights are the last column of the tables.
  linear = int(config.linear)
  features = features_lib.feature_configs(
    data.features,
    config.dim + linear,
    initializer=build.table_initializer(config),
    optimizer=lambda name: build.table_optimizer(config, name),
    dtype=build.dtype(config, "table_dtype"),
    positions=histories_lib.attends(config, data.features),
  )
  rngs, optimizer = nnx.Rngs(config.seed), build.table_optimizer(config)
  options: Any = {"dtype": build.dtype(config, "dtype"), "rngs": rngs}
  tables = build.tables(config, features, optimizer, rngs=rngs, mesh=mesh, inputs=inputs)
  sizes = {**config[config.model]} | ({"dim": config.dim} if config.model == "dlrm" else {})
  model: Ranker = MODELS[config.model](
    tables,
    layers.Inputs(tables, data.num_dense, linear=linear, **options),
    **sizes,
    dropout=config.dropout,
    **options,
  )
  if histories_lib.attends(config, data.features):
    model.histories = histories_lib.Histories(config, data.features, linear=linear, **options)
  return model
