"""HSTU's block, one for every model with sequences.

B is rows, L columns of a row, D the width, H heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError
from . import layers

_BASE = 0.301  # of the logarithm of buckets of time, as in the authors' code: exp(0.301) = 1.35


class HSTUBlock(nnx.Module):
  """Zhai et al. 2024, "Actions speak louder than words", equations 1 to 3.

  Attention without softmax, and a gate in place of the feed-forward layer:

      U, V, Q, K = silu(W norm(x))
      y = x + W' dropout(norm(silu(Q K^T + bias) / length V) * U)

  The bias is the same for all heads. It is the sum of one learned number for the distance of
  columns, and one for the time between them (see `time_buckets`); each is optional.

  Args:
    dim: D.
    heads: H; it divides D.
    length: what attention is divided by, and the number of distances.
    dropout: rate, after the gate.
    distances: whether there is a bias of distance.
    buckets: of the bias of time; 0 has none.
    dtype: of the computation; parameters are float32.
    rngs: draws parameters and dropout.

  >>> block = HSTUBlock(8, 2, 16, dropout=0.0, buckets=4, rngs=nnx.Rngs(0))
  >>> causal = jnp.tril(jnp.ones((3, 5, 5), bool))
  >>> block(jnp.ones((3, 5, 8)), causal, times=jnp.zeros((3, 5), jnp.int32)).shape
  (3, 5, 8)
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
    x: jax.Array,
    mask: jax.Array,
    memory: jax.Array | None = None,
    *,
    times: jax.Array | None = None,
  ) -> jax.Array:
    """Returns `[B, L, D]`.

    Args:
      x: `[B, L, D]`.
      mask: bool `[B, L, L]`, whether a column (the second axis) looks at another (the third).
      memory: `[B, M, D]`, the columns that those of `x` look at, in a block without biases; None is
        `x` itself.
      times: int32 `[B, L]`, in seconds, for the bias of time.

    Raises:
      UserError: the block has a bias of times, and gets none.
    """
    if self.time_bias is not None and times is None:
      raise UserError("hstu has a bias of times, and the data have none: leave the bias out")
    split = lambda x: layers.split_heads(nnx.silu(self.uvqk(self.norms[0](x))), 4, self.heads)
    gate, value, query, key = split(x)
    if memory is not None:
      _, value, _, key = split(memory)
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key)
    take = lambda bias, index: bias[...].astype(scores.dtype)[index]
    if self.bias is not None:
      distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(key.shape[1])
      scores += take(self.bias, jnp.clip(distance, 0, self.length - 1))  # the mask hides later ones
    if self.time_bias is not None and times is not None:
      between = times[:, :, None] - times[:, None]
      scores += take(self.time_bias, time_buckets(between, len(self.time_bias)))[:, None]
    weights = jnp.where(mask[:, None], nnx.silu(scores), 0) / self.length
    mixed = jnp.einsum("bhlm,bmhd->blhd", weights, value)
    return x + self.out(self.dropout(self.norms[1](mixed.reshape(x.shape)) * gate.reshape(x.shape)))


def time_buckets(seconds: jax.Array, buckets: int) -> jax.Array:
  """Returns `floor(log(|seconds|) / 0.301)`, at most `buckets - 1`: int32, of the same shape.

  The bucket of the authors' code (`hstu.py`, generative-recommenders): each is 1.35 times as wide
  as the one before it. No time and a second are bucket 0; 64 buckets reach past seven years.

  >>> time_buckets(jnp.array([0, 1, 2, -60, 3600, 86_400 * 365]), 64).tolist()
  [0, 0, 2, 13, 27, 57]
  >>> time_buckets(jnp.array([3600]), 8).tolist()
  [7]
  """
  apart = jnp.maximum(jnp.abs(seconds), 1).astype(jnp.float32)
  return jnp.minimum((jnp.log(apart) / _BASE).astype(jnp.int32), buckets - 1)
