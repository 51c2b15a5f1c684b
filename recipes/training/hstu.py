"""HSTU's block, for every model with sequences.

B is rows, L columns of a row, D the width, H heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers

_BASE = 0.301  # of the logarithm of buckets of time, as in the authors' code: exp(0.301) = 1.35


class HSTUBlock(nnx.Module):
  """Zhai et al. 2024, "Actions speak louder than words", equations 1 to 3.

  Attention without softmax, and a gate in place of the feed-forward layer:

      U, V, Q, K = silu(W norm(x))
      y = x + W' dropout(norm(silu(Q K^T + bias) / length V) * U)

  The bias, one for all heads, sums a learned number for the distance of two columns and one for the
  time between them; either is optional.

  Args:
    dim: D, a multiple of the number of heads.
    length: the divisor of the attention, and the number of distances.
    distances: whether there is a bias of distance.
    buckets: of the bias of time; 0 leaves it out.
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
    buckets: int = 0,
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
    self.time_bias = draw(buckets) if buckets else None

  def __call__(
    self,
    x_BxLxD: jax.Array,
    mask_BxLxM: jax.Array,
    memory_BxMxD: jax.Array | None = None,
    *,
    times_BxL: jax.Array | None = None,
  ) -> jax.Array:
    """Returns `[B, L, D]`.

    Args:
      mask_BxLxM: True where a column (the second axis) attends to another (the third).
      memory_BxMxD: the columns to attend to, in a block without biases; None is the input itself.
      times_BxL: int32, in seconds, for the bias of time.
    """
    split = lambda x: layers.split_heads(nnx.silu(self.uvqk(self.norms[0](x))), 4, self.heads)
    gate, value, query, key = split(x_BxLxD)
    if memory_BxMxD is not None:
      _, value, _, key = split(memory_BxMxD)
    scores_BxHxLxM = jnp.einsum("blhd,bmhd->bhlm", query, key)
    take = lambda bias, index: bias[...].astype(scores_BxHxLxM.dtype)[index]
    if self.bias is not None:
      distance_LxM = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
      # The mask hides later columns.
      scores_BxHxLxM += take(self.bias, jnp.clip(distance_LxM, 0, self.length - 1))
    if self.time_bias is not None:
      assert times_BxL is not None
      between_BxLxM = times_BxL[:, :, None] - times_BxL[:, None]
      bucket_BxLxM = time_buckets(between_BxLxM, len(self.time_bias))
      scores_BxHxLxM += take(self.time_bias, bucket_BxLxM)[:, None]
    weights_BxHxLxM = jnp.where(mask_BxLxM[:, None], nnx.silu(scores_BxHxLxM), 0) / self.length
    mixed_BxLxD = jnp.einsum("bhlm,bmhd->blhd", weights_BxHxLxM, value).reshape(x_BxLxD.shape)
    gated_BxLxD = self.norms[1](mixed_BxLxD) * gate.reshape(x_BxLxD.shape)
    return x_BxLxD + self.out(self.dropout(gated_BxLxD))


def time_buckets(seconds: jax.Array, buckets: int) -> jax.Array:
  """Returns `floor(log(|seconds|) / 0.301)`, at most `buckets - 1`: int32, of the same shape.

  The bucket of the authors' code (`hstu.py`, generative-recommenders): each is 1.35 times as wide
  as the one before it. No time and a second are bucket 0; 64 buckets reach past seven years.

  >>> time_buckets(jnp.array([0, 1, 2, -60, 3600, 86_400 * 365]), 64).tolist()
  [0, 0, 2, 13, 27, 57]
  """
  apart = jnp.maximum(jnp.abs(seconds), 1).astype(jnp.float32)
  return jnp.minimum((jnp.log(apart) / _BASE).astype(jnp.int32), buckets - 1)
