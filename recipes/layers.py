"""Layers, and the initializer of tables, that the recipes' models share."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed


def table_initializer(config) -> Any:
  """Returns the initializer of tables: normal, with the deviation `config.table.init_scale`.

  Row-wise: a process draws only the rows that it keeps, and they are the same on any mesh.
  """
  return embed.row_wise(jax.nn.initializers.normal(config.table.init_scale))


class MLP(nnx.Module):
  """Linear layers, each followed by ReLU and dropout; `[..., in_features]` to `[..., sizes[-1]]`.

  No size at all makes it the identity.
  """

  def __init__(
    self, in_features: int, sizes: Sequence[int], *, dropout: float = 0.0, rngs: nnx.Rngs
  ):
    widths = [in_features, *sizes]
    initializer = nnx.initializers.he_normal()
    self.layers = nnx.List(
      nnx.Linear(before, after, kernel_init=initializer, rngs=rngs)
      for before, after in itertools.pairwise(widths)
    )
    self.dropout = nnx.Dropout(dropout, rngs=rngs)
    self.out_features = widths[-1]

  def __call__(self, x: jax.Array) -> jax.Array:
    for layer in self.layers:
      x = self.dropout(nnx.relu(layer(x)))
    return x


class Cross(nnx.Module):
  """The cross network of DCN-V2: `x[l+1] = x[0] * (W[l] x[l] + b[l]) + x[l]`.

  Wang et al. 2021, "DCN V2: Improved Deep & Cross Network", equations 1 and 2.

  Args:
    features: the width, of input and output: `[..., features]`.
    num_layers: how often to cross; the output holds products of up to `num_layers + 1` inputs.
    rank: None for full matrices W; a number for `W = U V` with that many columns in U.
  """

  def __init__(self, features: int, num_layers: int, *, rank: int | None = None, rngs: nnx.Rngs):
    self.down = nnx.List(
      [nnx.Linear(features, rank, use_bias=False, rngs=rngs) for _ in range(num_layers)]
      if rank
      else []
    )
    self.up = nnx.List(nnx.Linear(rank or features, features, rngs=rngs) for _ in range(num_layers))

  def __call__(self, x0: jax.Array) -> jax.Array:
    x = x0
    for layer, up in enumerate(self.up):
      x = x0 * up(self.down[layer](x) if self.down else x) + x
    return x


def dot_interaction(vectors: jax.Array) -> jax.Array:
  """Returns the dot products of all pairs of vectors: `[..., F, D]` to `[..., F * (F - 1) / 2]`."""
  products = jnp.einsum("...fd,...gd->...fg", vectors, vectors)
  rows, columns = jnp.tril_indices(vectors.shape[-2], k=-1)
  return products[..., rows, columns]
