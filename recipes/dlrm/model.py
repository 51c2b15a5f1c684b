"""DLRM, DCN-V2, Wide & Deep and DeepFM: ways to let categorical and dense features meet.

A model looks up its features, a backbone makes hidden features of them, and a head makes logits of
these: `Ranker` reads from top to bottom, and its subclasses are the backbones.

B is the batch, F the number of categorical features, K of dense ones, D the width of the tables, H
of the hidden features, O the number of outputs: one of a label, or as many as its classes.
"""

import dataclasses
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
from . import histories as histories_lib
from . import tasks
from .data import ClickData

Batch = Mapping[str, Any]
Activations = Mapping[str, jax.Array]  # by feature, `[B, width of its table]`
Head = Callable[..., nnx.Module]  # `(H, rngs=rngs)` -> a module from `[B, H]` to `[B, O]`
ONE_LOGIT: Head = functools.partial(nnx.Linear, out_features=1)


class Ranker(nnx.Module):
  """A click model: tables, a backbone and a head.

  Attributes:
    inputs: of what the tables return, and K numbers.
    head: `[B, H]` to `[B, O]`.
    dtype: of the computation; logits are float32.
    histories: makes vectors of the positions of histories; None where they are pooled.
  """

  embed: embed.SparseEmbed
  inputs: layers.Inputs
  head: Any
  dtype: Any
  histories: histories_lib.Histories | None = None

  def __call__(self, batch: Batch) -> jax.Array:
    """Returns logits `[B]`, or of several outputs `[B, O]`.

    Args:
      batch: has `features` and `dense` `[B, K]`.
    """
    activations = self.embed(batch["features"])
    if self.histories is not None:
      activations = self.histories(activations, batch["features"])
    vectors, dense, linear = self.inputs(activations, batch["dense"])
    outputs = self.outputs(vectors, dense) + linear
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs

  def outputs(self, activations: Activations, dense: jax.Array) -> jax.Array:
    """Returns `[B, O]`, without the linear model of `inputs`."""
    return self.head(self.hidden(activations, dense))

  def hidden(self, activations: Activations, dense: jax.Array) -> jax.Array:
    """Returns the backbone's features `[B, H]`."""
    raise NotImplementedError


class DLRM(Ranker):
  """Naumov et al. 2019: a bottom MLP on the dense features, dot products of all pairs, a top MLP.

  Without dense features there is no bottom MLP and the pairs are of the tables alone.

  Args:
    tables: of single ids and bags; those that are not of width `dim` are projected to it.
    inputs: of what the tables return, and K numbers.
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
    inputs: layers.Inputs,
    dim: int,
    *,
    bottom: Sequence[int],
    top: Sequence[int],
    concat_tables: bool,
    dropout: float,
    head: Head = ONE_LOGIT,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.embed, self.inputs, self.dtype = tables, inputs, dtype
    num_dense, widths = inputs.num_dense, inputs.widths
    mlp = functools.partial(layers.MLP, dtype=dtype, rngs=rngs)
    self.bottom = mlp(num_dense, [*bottom, dim]) if num_dense else None
    self.names, self.concat_tables = tuple(widths), concat_tables
    self.projections = _projections(widths, dim, dtype, rngs)
    vectors = len(widths) + (num_dense > 0)
    seen = vectors if concat_tables else int(num_dense > 0)
    width = seen * dim + vectors * (vectors - 1) // 2
    self.top = mlp(width, top, dropout=dropout)
    self.head = head(self.top.out_features, rngs=rngs)

  def hidden(self, activations: Activations, dense: jax.Array) -> jax.Array:
    tables = [
      _projected(self.projections, name, activations[name].astype(self.dtype))
      for name in self.names
    ]
    numbers = [self.bottom(dense)] if self.bottom is not None else []
    pairs = layers.dot_interaction(jnp.stack([*tables, *numbers], axis=1))
    seen = [*tables, *numbers] if self.concat_tables else numbers
    return self.top(jnp.concatenate([*seen, pairs], axis=1))


def _projections(widths: Mapping[str, int], dim: int, dtype: Any, rngs: nnx.Rngs) -> nnx.Dict:
  """Returns linear maps to width `dim` of the vectors that have another one."""
  linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
  return nnx.Dict({name: linear(width, dim) for name, width in widths.items() if width != dim})


def _projected(projections: nnx.Dict, name: str, x: jax.Array) -> jax.Array:
  return projections[name](x) if name in set(projections) else x  # `in` alone finds methods


class DCNV2(Ranker):
  """Wang et al. 2021: a cross network and a deep network, side by side or one after the other.

  Args:
    tables, inputs, head, dtype: as for `DLRM`; tables are of any width.
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
    inputs: layers.Inputs,
    *,
    cross_layers: int,
    rank: int,
    deep: Sequence[int],
    structure: str,
    dropout: float,
    bottom: Sequence[int] = (),
    head: Head = ONE_LOGIT,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    if structure not in ("parallel", "stacked"):
      raise UserError(f"unknown structure {structure!r}: choose parallel or stacked")
    self.embed, self.inputs, self.dtype = tables, inputs, dtype
    of_dtype = {"dtype": dtype, "rngs": rngs}
    self.bottom = layers.MLP(inputs.num_dense, bottom, **of_dtype) if bottom else None
    self.names = tuple(inputs.widths)
    width = sum(inputs.widths.values()) + (bottom[-1] if bottom else inputs.num_dense)
    self.cross = layers.Cross(width, cross_layers, rank=rank or None, **of_dtype)
    self.deep = layers.MLP(width, deep, dropout=dropout, **of_dtype)
    self.structure = structure
    both = self.deep.out_features + (width if structure == "parallel" else 0)
    self.head = head(both, rngs=rngs)

  def hidden(self, activations: Activations, dense: jax.Array) -> jax.Array:
    dense = dense if self.bottom is None else self.bottom(dense)
    parts = [*(activations[name] for name in self.names), dense]
    x = jnp.concatenate([part.astype(self.dtype) for part in parts], axis=1)
    crossed = self.cross(x)
    if self.structure == "stacked":
      return self.deep(crossed)
    return jnp.concatenate([crossed, self.deep(x)], axis=1)


class WideDeep(Ranker):
  """Cheng et al. 2016: adds an MLP to the linear model of `inputs`. With pairs, DeepFM.

  `logits = sum_f w[f] + W dense + head(MLP([vectors, dense]))`, w[f] the first-order weights of the
  ids of feature f. Declared crosses are features as well.

  DeepFM (Guo et al. 2017, equations 2 to 4) adds the dot products of all pairs of vectors, as
  `sum_d p[d] ((sum_f v[f, d])^2 - sum_f v[f, d]^2) / 2`. A dense feature's vector is a learned one
  times the number. p is 1 at first, as in the paper, and learned, so that each output has its own
  (He and Chua 2017, "Neural Factorization Machines", equation 4).

  Args:
    tables, inputs, dropout, head, dtype: as for `DLRM`.
    deep: widths of the MLP.
    pairs: the width D to which vectors are projected where theirs is another one; 0 for no pairs.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    inputs: layers.Inputs,
    *,
    deep: Sequence[int],
    pairs: int,
    dropout: float,
    head: Head = ONE_LOGIT,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.embed, self.inputs, self.dtype, num_dense = tables, inputs, dtype, inputs.num_dense
    width = sum(inputs.widths.values()) + num_dense
    self.deep = layers.MLP(width, deep, dropout=dropout, dtype=dtype, rngs=rngs)
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    self.projections = _projections(inputs.widths if pairs else {}, pairs, dtype, rngs)
    small, ones = nnx.initializers.normal(0.01), nnx.initializers.ones
    self.numbers = linear(num_dense, pairs, kernel_init=small) if pairs and num_dense else None
    self.pairs = linear(pairs, inputs.linear, kernel_init=ones) if pairs else None
    self.head = head(self.deep.out_features, rngs=rngs)

  def outputs(self, activations: Activations, dense: jax.Array) -> jax.Array:
    outputs = super().outputs(activations, dense)
    if self.pairs is None:
      return outputs
    vectors = [_projected(self.projections, n, x) for n, x in activations.items()]
    total, squares = sum(vectors), sum(map(jnp.square, vectors))
    if self.numbers is not None:
      total += self.numbers(dense)
      squares += jnp.square(dense) @ jnp.square(self.numbers.kernel[...])
    return outputs + self.pairs((jnp.square(total) - squares) / 2)

  def hidden(self, activations: Activations, dense: jax.Array) -> jax.Array:
    parts = [*activations.values(), dense]
    return self.deep(jnp.concatenate([part.astype(self.dtype) for part in parts], axis=1))


MODELS = ("dlrm", "dcnv2", "wide_deep", "deepfm")


def build_model(
  config,
  data: ClickData,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> nnx.Module:
  """Returns the model that `config.model` names, its tables with the configured optimizer.

  `inputs` returns the shapes of a batch's features, for a plan; see `build.tables`.
  """
  if config.model not in MODELS:
    raise UserError(f"unknown model {config.model!r}: choose {', '.join(MODELS)}")
  is_wide = config.linear or config.model in ("wide_deep", "deepfm")
  more = tasks.num_outputs(data.labels) if is_wide else 0  # columns of first-order weights
  features = features_lib.feature_configs(
    [dataclasses.replace(each, dim=(each.dim or config.dim) + more) for each in data.features],
    config.dim,
    initializer=build.table_initializer(config),
    optimizer=lambda name: build.table_optimizer(config, name),
    dtype=build.dtype(config, "table_dtype"),
    positions=histories_lib.attends(config, data.features),
  )
  rngs, optimizer = nnx.Rngs(config.seed), build.table_optimizer(config)
  of_dtype: Any = {"dtype": build.dtype(config, "dtype"), "rngs": rngs}
  tables = build.tables(config, features, optimizer, rngs=rngs, mesh=mesh, inputs=inputs)
  head = tasks.head(data.labels, **config.tasks, dropout=config.dropout, dtype=of_dtype["dtype"])
  common: Any = {"tables": tables, "head": head, "dropout": config.dropout, **of_dtype}
  common["inputs"] = layers.Inputs(
    tables,
    data.numbers,
    dim=config.dim,
    vectors=data.vectors,
    linear=more,
    **of_dtype,
  )
  if config.model == "dlrm":
    model: Ranker = DLRM(**common, dim=config.dim, **config.dlrm)
  elif config.model == "dcnv2":
    model = DCNV2(**common, **config.dcnv2)
  else:
    pairs = config.dim if config.model == "deepfm" else 0
    model = WideDeep(**common, **config.wide_deep, pairs=pairs)
  widths = {name: feature.table.dim for name, feature in features.items()}
  model.histories = histories_lib.make(config, data.features, widths, **of_dtype, wide=more)
  return model
