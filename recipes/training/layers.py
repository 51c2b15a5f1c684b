"""Layers that the recipes' models share.

A name ends in the axes of its array: B is the batch, F the features, D the width of a vector.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

INITIALIZERS = {  # of `linear`, by the setting `init`
  "xavier": nnx.initializers.xavier_uniform(),
  "normal": nnx.initializers.normal(0.02),
}


class Inputs(nnx.Module):
  """The inputs of a click model: vectors by name, numbers, and the logits of a linear model.

  Args:
    tables: of single ids and bags.
    num_dense: N, how many numbers there are.
    linear: O, the outputs of the linear model; 0 leaves it out. The first-order weights of an id
      are the last O columns of its row.

  Attributes:
    widths: of the vectors by name, in their order, without first-order weights.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    num_dense: int,
    *,
    linear: int = 0,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.num_dense, self.linear, self.dtype = num_dense, linear, dtype
    features = tables.spec.features
    self.widths = {name: feature.table.dim - linear for name, feature in features.items()}
    has_wide = linear and num_dense
    self.wide = nnx.Linear(num_dense, linear, use_bias=False, rngs=rngs) if has_wide else None

  def __call__(
    self, activations: Mapping[str, jax.Array], dense_BxN: jax.Array
  ) -> tuple[dict[str, jax.Array], jax.Array, Any]:
    """Returns vectors `[B, width]` by name, numbers `[B, N]` and logits `[B, O]`.

    Vectors and numbers are of `dtype`, logits of float32.

    Args:
      activations: the outputs of the tables by feature.
      dense_BxN: the numbers.
    """
    vectors = {name: activations[name] for name in self.widths}
    logits_BxO: Any = 0 if self.wide is None else self.wide(dense_BxN)
    if self.linear:
      logits_BxO += sum(x[:, -self.linear :].astype(jnp.float32) for x in vectors.values())
      vectors = {name: x[:, : -self.linear] for name, x in vectors.items()}
    vectors = {name: x.astype(self.dtype) for name, x in vectors.items()}
    return vectors, dense_BxN.astype(self.dtype), logits_BxO


def inverse_length(x: jax.Array) -> jax.Array:
  """Returns `1 / |x|`, `[..., 1]`, of vectors `[..., D]`; large and finite for zeros."""
  # The constant is under the root: a query without any feature has no direction.
  return jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


class MLP(nnx.Module):
  """Linear layers, each followed by ReLU and dropout; `[..., in_features]` to `[..., sizes[-1]]`.

  Without sizes it is the identity. It computes in `dtype`; parameters are float32.
  """

  def __init__(
    self,
    in_features: int,
    sizes: Sequence[int],
    *,
    dropout: float = 0.0,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    widths = [in_features, *sizes]
    initializer = nnx.initializers.he_normal()
    self.layers = nnx.List(
      nnx.Linear(before, after, kernel_init=initializer, dtype=dtype, rngs=rngs)
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

  Wang et al. 2021, "DCN V2: Improved Deep & Cross Network", equations 1 and 2. A rank above 0
  factors each matrix, `W = U V` with that many columns in U.
  """

  def __init__(
    self,
    features: int,
    num_layers: int,
    *,
    rank: int = 0,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
    self.down = nnx.List(
      [linear(features, rank, use_bias=False) for _ in range(num_layers)] if rank else []
    )
    self.up = nnx.List(linear(rank or features, features) for _ in range(num_layers))

  def __call__(self, x0: jax.Array) -> jax.Array:
    x = x0
    for layer, up in enumerate(self.up):
      x = x0 * up(self.down[layer](x) if self.down else x) + x
    return x


def linear(
  features: int, out_features: int, dtype: Any, rngs: nnx.Rngs, init: str = "xavier"
) -> nnx.Linear:
  """Returns a linear layer of attention with the initializer that `init` names."""
  initializer = INITIALIZERS[init]
  return nnx.Linear(features, out_features, kernel_init=initializer, dtype=dtype, rngs=rngs)


def split_heads(x: jax.Array, parts: int, heads: int) -> list[jax.Array]:
  """Cuts `[B, L, parts * D]` into that many `[B, L, H, D / H]`."""
  return [part.reshape(*part.shape[:-1], heads, -1) for part in jnp.split(x, parts, axis=-1)]


@jax.custom_vjp
def dot_interaction(x_FxD: jax.Array) -> jax.Array:
  """Returns the dot products of all pairs of vectors: `[..., F, D]` to `[..., F * (F - 1) / 2]`."""
  products_FxF = jnp.einsum("...fd,...gd->...fg", x_FxD, x_FxD)
  return products_FxF[..., *np.tril_indices(x_FxD.shape[-2], k=-1)]


def _interaction(x_FxD: jax.Array) -> tuple[jax.Array, jax.Array]:
  return dot_interaction(x_FxD), x_FxD


# JAX's own rule multiplies lower triangles twice. Symmetric matrices are multiplied once, which on
# CPU takes a third of the time.
def _interaction_grad(x_FxD: jax.Array, grads_P: jax.Array) -> tuple[jax.Array]:
  """Sums, for vector f, the gradient of each pair {f, g} times vector g."""
  count = x_FxD.shape[-2]
  pairs = np.full((count, count), grads_P.shape[-1])  # the diagonal gets the padded zero
  rows, columns = np.tril_indices(count, k=-1)
  pairs[rows, columns] = pairs[columns, rows] = np.arange(len(rows))
  padded = jnp.pad(grads_P, [(0, 0)] * (grads_P.ndim - 1) + [(0, 1)])
  return (jnp.einsum("...fg,...gd->...fd", padded[..., pairs], x_FxD),)


dot_interaction.defvjp(_interaction, _interaction_grad)
