"""Blocks of attention, for every model with sequences.

B is rows, L columns of a row, D the width, H heads. A mask, bool `[B, L, M]`, is True where a
column (the second axis) attends to another (the third).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import linear, split_heads

_NEVER = -1e9  # not -inf: padding attends to nothing, and its softmax must not be NaN


class Attention(nnx.Module):
  """Softmax attention, `[B, L, D]` to `[B, L, D]`; keys and values may come from a memory."""

  def __init__(
    self, dim: int, heads: int, *, dropout: float, init: str = "xavier", dtype: Any, rngs: nnx.Rngs
  ):
    self.heads = heads
    self.qkv = linear(dim, 3 * dim, dtype, rngs)  # PyTorch's attention too keeps Xavier here
    self.out = linear(dim, dim, dtype, rngs, init)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(
    self, x_BxLxD: jax.Array, mask_BxLxM: jax.Array, memory_BxMxD: jax.Array | None = None
  ) -> jax.Array:
    query, key, value = split_heads(self.qkv(x_BxLxD), 3, self.heads)
    if memory_BxMxD is not None:
      _, key, value = split_heads(self.qkv(memory_BxMxD), 3, self.heads)
    scores_BxHxLxM = jnp.einsum("blhd,bmhd->bhlm", query, key) / math.sqrt(query.shape[-1])
    scores_BxHxLxM = scores_BxHxLxM.astype(jnp.float32)
    weights_BxHxLxM = jax.nn.softmax(jnp.where(mask_BxLxM[:, None], scores_BxHxLxM, _NEVER))
    weights_BxHxLxM = self.dropout(weights_BxHxLxM).astype(value.dtype)
    mixed_BxLxHxD = jnp.einsum("bhlm,bmhd->blhd", weights_BxHxLxM, value)
    return self.out(mixed_BxLxHxD.reshape(x_BxLxD.shape))


class FeedForward(nnx.Module):
  """Two linear layers at each position, each followed by dropout."""

  def __init__(
    self, dim: int, inner: int, activation: Callable, *,
    dropout: float, init: str = "xavier", dtype: Any, rngs: nnx.Rngs,
  ):  # fmt: skip
    self.inner = linear(dim, inner, dtype, rngs, init)
    self.out = linear(inner, dim, dtype, rngs, init)
    self.activation = activation
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.dropout(self.out(self.dropout(self.activation(self.inner(x)))))


class SASRecBlock(nnx.Module):
  """Kang and McAuley 2018, section III.B: `x + dropout(f(norm(x)))`, with ReLU of width D.

  The residual "norm" is the authors' code (github.com/kang205/SASRec) and its ports: a layer is
  added to its normed input, and keys and values are made from the input before the norm.
  """

  def __init__(
    self, dim: int, heads: int, *, dropout: float, init: str, residual: str, **options: Any
  ):
    self.adds_to_norm = residual == "norm"
    self.attention = Attention(dim, heads, dropout=dropout, init=init, **options)
    self.forward = FeedForward(dim, dim, nnx.relu, dropout=dropout, init=init, **options)
    self.norms = nnx.List([nnx.LayerNorm(dim, **options) for _ in range(2)])
    self.dropout = nnx.Dropout(dropout, rngs=options["rngs"])

  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    if self.adds_to_norm:
      query = self.norms[0](x)
      x = self.norms[1](query + self.attention(query, mask, x))
      return x + self.forward(x)
    x = x + self.dropout(self.attention(self.norms[0](x), mask))
    return x + self.forward(self.norms[1](x))


class PostNormBlock(nnx.Module):
  """Vaswani et al. 2017: `norm(x + dropout(f(x)))`, with the GELU of BERT, of width 4 D."""

  def __init__(self, dim: int, heads: int, *, dropout: float, **options: Any):
    self.attention = Attention(dim, heads, dropout=dropout, **options)
    self.forward = FeedForward(dim, 4 * dim, nnx.gelu, dropout=dropout, **options)
    self.norms = nnx.List([nnx.LayerNorm(dim, **options) for _ in range(2)])
    self.dropout = nnx.Dropout(dropout, rngs=options["rngs"])

  def __call__(self, x: jax.Array, mask: jax.Array, memory: jax.Array) -> jax.Array:
    x = self.norms[0](x + self.dropout(self.attention(x, mask, memory)))
    return self.norms[1](x + self.forward(x))


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
    self.uvqk = linear(dim, 4 * dim, dtype, rngs)
    self.out = linear(dim, dim, dtype, rngs)
    draw = lambda size: nnx.Param(0.02 * jax.random.normal(rngs.params(), (size,)))
    self.bias = draw(length) if distances else None
    self.norms = nnx.List([nnx.LayerNorm(dim, dtype=dtype, rngs=rngs) for _ in range(2)])
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(
    self, x_BxLxD: jax.Array, mask_BxLxM: jax.Array, memory_BxMxD: jax.Array | None = None
  ) -> jax.Array:
    """Returns `[B, L, D]`; a memory needs `distances=False`."""
    split = lambda x: split_heads(nnx.silu(self.uvqk(self.norms[0](x))), 4, self.heads)
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
