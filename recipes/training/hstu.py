"""HSTU's block, for every model with sequences.

B is rows, L columns of a row, D the width, H heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers


class HSTUBlock(nnx.Module):
  """Zhai et al. 2024, "Actions speak louder than words", equations 1 to 3.

  Attention without softmax, and a gate in place of the feed-forward layer:

      U, V, Q, K = silu(W norm(x))
      y = x + W' dropout(norm(silu(Q K^T + bias) / length V) * U)

  The bias, one for all heads, is a learned number for the distance of two columns, and optional.

  Args:
    dim: D, a multiple of the number of heads.
    length: the divisor of the attention, and the number of distances.
    distances: whether there is a bias of distance.
  """

  causal, normed = True, True  # the encoder ends with a norm

  def __init__(
    self,
    dim: int,
    heads: int,
    length: int,
    *,
    dropout: float,
    distances: bool = True,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.heads, self.length = heads, length
    self.uvqk = layers.linear(dim, 4 * dim, dtype, rngs)
    self.out = layers.linear(dim, dim, dtype, rngs)
    draw = lambda size: nnx.Param(0.02 * jax.random.normal(rngs.params(), (size,)))
    self.bias = draw(length) if distances else None
    self.norms = nnx.List([nnx.LayerNorm(dim, dtype=dtype, rngs=rngs) for _ in range(2)])
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(
    self, x_BxLxD: jax.Array, mask_BxLxM: jax.Array, memory_BxMxD: jax.Array | None = None
  ) -> jax.Array:
    """Returns `[B, L, D]`; the mask is as in `transformer`; a memory needs `distances=False`."""
    split = lambda x: layers.split_heads(nnx.silu(self.uvqk(self.norms[0](x))), 4, self.heads)
    gate, value, query, key = split(x_BxLxD)
    if memory_BxMxD is not None:
      _, value, _, key = split(memory_BxMxD)
    scores_BxHxLxM = jnp.einsum("blhd,bmhd->bhlm", query, key)
    if self.bias is not None:
      distance_LxM = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
      # The mask hides later columns.
      bias = self.bias[...].astype(scores_BxHxLxM.dtype)
      scores_BxHxLxM += bias[jnp.clip(distance_LxM, 0, self.length - 1)]
    weights_BxHxLxM = jnp.where(mask_BxLxM[:, None], nnx.silu(scores_BxHxLxM), 0) / self.length
    mixed_BxLxD = jnp.einsum("bhlm,bmhd->blhd", weights_BxHxLxM, value).reshape(x_BxLxD.shape)
    gated_BxLxD = self.norms[1](mixed_BxLxD) * gate.reshape(x_BxLxD.shape)
    return x_BxLxD + self.out(self.dropout(gated_BxLxD))
