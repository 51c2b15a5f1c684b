"""SASRec, BERT4Rec and HSTU: three encoders between the same item table and itself.

B is rows, L columns of a row, D the width, H heads, N items, K samples. A row may hold several
sequences side by side (see `recipes.packing`): `segments` int `[B, L]` says which is
where, -1 being padding. No output depends on another segment or on padding.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from ..training import build
from ..training.hstu import HSTUBlock
from ..training.layers import inverse_length, linear
from ..training.transformer import BERT4RecBlock, SASRecBlock, TransformerBlock

ITEM = "item"  # the table's name


def visible(segments: jax.Array, *, causal: bool) -> jax.Array:
  """Returns which columns each column may look at, bool `[B, L, L]`: the ones of its own segment.

  If causal, only itself and the columns before it.
  """
  mask = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
  if causal:
    places = jnp.arange(segments.shape[1])
    mask &= places[:, None] >= places
  return mask


BLOCKS: dict[str, Any] = {"sasrec": SASRecBlock, "bert4rec": BERT4RecBlock, "hstu": HSTUBlock}


class Encoder(nnx.Module):
  """A stack of blocks of one kind: `[B, L, D]` of `dtype` and segments `[B, L]` to `[B, L, D]`.

  `times` int32 `[B, L]`, in seconds, are for HSTU with `time_buckets`. With `where` int `[B, W]`,
  the result is `[B, W, D]`, of these columns.
  """

  def __init__(self, config, *, block: Any = None, rngs: nnx.Rngs):
    dim, heads = config.dim, config.heads
    block = block or BLOCKS[config.model]
    options = {"dtype": build.dtype(config, "dtype"), "rngs": rngs}
    make = functools.partial(block, dim, heads, config.max_length, dropout=config.dropout)
    if issubclass(block, TransformerBlock):
      make = functools.partial(make, init=config.init)
    if issubclass(block, SASRecBlock):
      make = functools.partial(make, residual=config.residual)
    if block is HSTUBlock:
      make = functools.partial(make, buckets=config.time_buckets)
    self.causal = block.causal
    self.blocks = nnx.List([make(**options) for _ in range(config.blocks)])
    self.norm = nnx.LayerNorm(dim, **options) if block.normed else None

  def __call__(
    self,
    x: jax.Array,
    segments: jax.Array,
    times: jax.Array | None = None,
    where: jax.Array | None = None,
  ) -> jax.Array:
    mask = visible(segments, causal=self.causal)
    for number, block in enumerate(self.blocks, 1):
      if isinstance(block, HSTUBlock):
        x = block(x, mask, times=times)
      elif where is None or number < len(self.blocks):
        x = block(x, mask)
      else:  # the last one computes no other columns
        x, where = block(_columns(x, where), _columns(mask, where), x), None
    x = x if where is None else _columns(x, where)
    return x if self.norm is None else self.norm(x)


def _columns(x: jax.Array, where: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x, where[..., None], axis=1)


class Projection(nnx.Module):
  """Sun et al. 2019, equation 7: `[..., D]` to `[..., D + 1]`, which meets an item's row and bias.

  The result is `norm(gelu(W x + b))`, with the norm of the authors' code (FeiSun/BERT4Rec), and a 1
  for the bias, which is the last column of the item's row.
  """

  def __init__(self, dim: int, *, init: str = "xavier", dtype: Any = jnp.float32, rngs: nnx.Rngs):
    self.linear = linear(dim, dim, dtype, rngs, init)
    self.norm = nnx.LayerNorm(dim, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.norm(nnx.gelu(self.linear(x))).astype(jnp.float32)
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)


class SequenceModel(nnx.Module):
  """An encoder over the rows of the item table, scored against the rows of the same table.

  Args:
    tables: of the items, `ITEM`.
    encoder: between lookup and scores.
    config: of the run. L of the longest row is `max_length`, the number of learned positions; the
      computation is of `dtype`, outputs and scores are float32.
  """

  def __init__(self, tables: embed.SparseEmbed, encoder: Encoder, config, *, rngs: nnx.Rngs):
    self.embed, self.encoder, dim = tables, encoder, config.dim
    self.dtype, self.temperature = build.dtype(config, "dtype"), config.temperature
    draw = lambda shape: nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
    self.positions = draw((config.max_length, dim))
    self.hidden = draw((dim,)) if not encoder.causal else None  # in place of a hidden item
    self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
    # A hidden item can ask for its neighbours by position only, which a scaled item would drown:
    # the paper adds both as they are, and the authors' code, which is BERT's, normalises the sum.
    self.scale = math.sqrt(dim) if encoder.causal else 1.0
    self.norm = None if encoder.causal else nnx.LayerNorm(dim, dtype=self.dtype, rngs=rngs)
    options: dict[str, Any] = {"init": config.init, "dtype": self.dtype, "rngs": rngs}
    self.projection = None if encoder.causal else Projection(dim, **options)

  def __call__(self, batch: Mapping[str, jax.Array], where: jax.Array | None = None) -> jax.Array:
    """Returns the encoder's outputs `[B, L, D]` of `items`, `segments` and `positions` `[B, L]`.

    With `where` int `[B, W]`, those of these columns, `[B, W, D]`.
    HSTU with `time_buckets` also needs `times` int32 `[B, L]`, in seconds.
    An item of -1 within a segment is a hidden one.
    """
    items, segments = batch["items"], batch["segments"]
    x = self.vectors(items)
    if self.hidden is not None:
      x = x[..., :-1]  # without the item's bias
      x = jnp.where(((items < 0) & (segments >= 0))[..., None], self.hidden[...], x)
    x = x * self.scale + self.positions[...][batch["positions"]]
    if self.norm is not None:
      x = self.norm(x)
    x = self.dropout(x.astype(self.dtype))
    return self.encoder(x, segments, batch.get("times"), where).astype(jnp.float32)

  def vectors(self, items: jax.Array) -> jax.Array:
    """Returns the vectors of items, float32 `[..., D]`; 0 of those that are negative."""
    return self.embed({ITEM: items})[ITEM].astype(jnp.float32)

  def queries(self, outputs: jax.Array) -> jax.Array:
    """Returns what candidates are multiplied with, of the encoder's outputs `[..., D]`."""
    if self.temperature:
      return outputs * inverse_length(outputs) / self.temperature
    return outputs if self.projection is None else self.projection(outputs)

  def candidates(self, rows: jax.Array) -> jax.Array:
    """Returns what queries are multiplied with, of rows of the item table `[..., D]`."""
    if not self.temperature:
      return rows
    rows = rows.astype(jnp.float32)
    return rows * inverse_length(rows)

  def scores(self, hidden: jax.Array, candidates: jax.Array | None = None) -> jax.Array:
    """Returns scores `[..., N]` of all items, or `[..., K]` of candidates; see `embed.attend`."""
    scores = self.embed.attend(hidden, ITEM, candidates)
    if not self.temperature:
      return scores
    ids = jnp.arange(scores.shape[-1]) if candidates is None else candidates
    # A second lookup of the candidates. It takes a last axis of 1 as no axis.
    return scores * inverse_length(self.vectors(ids.ravel())).reshape(ids.shape)


def build_model(
  config,
  num_items: int,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> SequenceModel:
  """Returns the model that `config.model` names, its table with the configured optimizer.

  `inputs` returns the shapes of a batch's items, for a plan; see `build.tables`.
  """
  table = embed.TableConfig(
    num_items,
    config.dim + (config.model == "bert4rec"),  # its bias, see `Projection`
    initializer=build.table_initializer(config),
    optimizer=build.table_optimizer(config),
    name=ITEM,
    dtype=build.dtype(config, "table_dtype"),
  )
  rngs, features = nnx.Rngs(config.seed), {ITEM: embed.FeatureConfig(table)}
  encoder = Encoder(config, rngs=rngs)  # before the tables: published figures draw in this order
  tables = build.tables(config, features, None, rngs=rngs, mesh=mesh, inputs=inputs)
  return SequenceModel(tables, encoder, config, rngs=rngs)


def predictions(model: SequenceModel, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the queries of the outputs that have `targets`: all, or the hidden items'."""
  return model.queries(model(batch, batch.get("where")))


def queries(model: SequenceModel, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the query of each row's column `last`, `[B, D]`, or `[B, D + 1]` for bert4rec."""
  return model.queries(model(batch, batch["last"][:, None])[:, 0])
