"""Blocks of softmax attention, for every model with sequences.

B is rows, L columns of a row, D the width, H heads. A mask, bool `[B, L, L]`, says whether a column
(the second axis) looks at another (the third).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import linear, split_heads

_NEVER = -1e9  # not -inf: padding attends to nothing, and its softmax must not be NaN


class Attention(nnx.Module):
  """Softmax attention with H heads: `[B, L, D]` to `[B, L, D]`; the softmax is in float32.

  Queries are of `x`, keys and values of `memory` `[B, M, D]`, if there is one.
  """

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    dropout: float,
    init: str = "xavier",
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.heads = heads
    self.qkv = linear(dim, 3 * dim, dtype, rngs)  # PyTorch's attention too keeps Xavier here
    self.out = linear(dim, dim, dtype, rngs, init)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(self, x: jax.Array, mask: jax.Array, memory: jax.Array | None = None) -> jax.Array:
    query, key, value = split_heads(self.qkv(x), 3, self.heads)
    if memory is not None:
      _, key, value = split_heads(self.qkv(memory), 3, self.heads)
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) / math.sqrt(query.shape[-1])
    scores = scores.astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, _NEVER), axis=-1)
    weights = self.dropout(weights).astype(value.dtype)
    mixed = jnp.einsum("bhlm,bmhd->blhd", weights, value)
    return self.out(mixed.reshape(x.shape))


class FeedForward(nnx.Module):
  """Two linear layers on every position, with dropout after each."""

  def __init__(
    self,
    dim: int,
    inner: int,
    activation,
    *,
    dropout: float,
    init: str = "xavier",
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.inner = linear(dim, inner, dtype, rngs, init)
    self.out = linear(inner, dim, dtype, rngs, init)
    self.activation = activation
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.dropout(self.out(self.dropout(self.activation(self.inner(x)))))


class TransformerBlock(nnx.Module):
  """Attention and a feed-forward layer of an inner width, with a norm for each."""

  def __init__(
    self,
    dim: int,
    heads: int,
    *,
    inner: int,
    activation: Any,
    dropout: float,
    init: str = "xavier",
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    options: dict[str, Any] = {"dropout": dropout, "init": init, "dtype": dtype, "rngs": rngs}
    self.attention = Attention(dim, heads, **options)
    self.forward = FeedForward(dim, inner, activation, **options)
    self.norms = nnx.List([nnx.LayerNorm(dim, dtype=dtype, rngs=rngs) for _ in range(2)])
    self.dropout = nnx.Dropout(dropout, rngs=rngs)


class SASRecBlock(TransformerBlock):
  """Kang and McAuley 2018, section III.B: `x + dropout(f(norm(x)))`, with ReLU of width D.

  The residual "norm" is the authors' code (github.com/kang205/SASRec), and that of its ports: what
  follows a norm is added to its output, and keys and values are of what the norm is of.
  """

  causal, normed = True, True  # the encoder ends with a norm
  widening = 1

  def __init__(self, dim: int, heads: int, length: int, *, residual: str = "input", **options: Any):
    del length
    super().__init__(dim, heads, inner=self.widening * dim, activation=nnx.relu, **options)
    self.is_of_norm = residual == "norm"

  def __call__(self, x: jax.Array, mask: jax.Array, memory: jax.Array | None = None) -> jax.Array:
    if self.is_of_norm:
      query = self.norms[0](x)
      x = self.norms[1](query + self.attention(query, mask, x if memory is None else memory))
      return x + self.forward(x)
    memory = None if memory is None else self.norms[0](memory)
    x = x + self.dropout(self.attention(self.norms[0](x), mask, memory))
    return x + self.forward(self.norms[1](x))


class BERT4RecBlock(TransformerBlock):
  """Sun et al. 2019, section 3.3: `norm(x + dropout(f(x)))`, with GELU of width 4 D."""

  causal, normed = False, False

  def __init__(self, dim: int, heads: int, length: int, **options: Any):
    del length
    super().__init__(dim, heads, inner=4 * dim, activation=nnx.gelu, **options)

  def __call__(self, x: jax.Array, mask: jax.Array, memory: jax.Array | None = None) -> jax.Array:
    x = self.norms[0](x + self.dropout(self.attention(x, mask, memory)))
    return self.norms[1](x + self.forward(x))
