"""SASRec, BERT4Rec and HSTU: three encoders between the same item table and itself.

B is rows, L columns of a row, D the width, N items, K samples. A row may hold several sequences
side by side (see `recipes.packing`): `segments` int `[B, L]` numbers them, -1 being padding. No
output depends on another segment or on padding.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from ..training import build
from ..training.layers import linear
from ..training.transformer import BERT4RecBlock, HSTUBlock, SASRecBlock

ITEM = "item"  # the table's name
MODELS = ("sasrec", "bert4rec", "hstu")


def visible(segments_BxL: jax.Array, *, causal: bool) -> jax.Array:
  """Returns the columns that each column attends to, bool `[B, L, L]`: those of its own segment.

  If causal, only itself and the columns before it.
  """
  mask_BxLxL = segments_BxL[:, :, None] == segments_BxL[:, None, :]
  mask_BxLxL &= (segments_BxL >= 0)[:, None, :]
  if causal:
    places_L = jnp.arange(segments_BxL.shape[1])
    mask_BxLxL &= places_L[:, None] >= places_L
  return mask_BxLxL


class Encoder(nnx.Module):
  """A stack of blocks of one kind: `[B, L, D]` of `dtype` and segments `[B, L]` to `[B, L, D]`."""

  def __init__(self, config, *, rngs: nnx.Rngs):
    dtype, shape = build.dtype(config, "dtype"), [config.dim, config.heads]
    make: Any = HSTUBlock
    options: dict[str, Any] = {"dropout": config.dropout, "dtype": dtype, "rngs": rngs}
    if config.model == "sasrec":
      make, options = SASRecBlock, options | {"init": config.init, "residual": config.residual}
    elif config.model == "bert4rec":
      make, options = BERT4RecBlock, options | {"init": config.init}
    else:
      shape.append(config.max_length)
    self.blocks = nnx.List([make(*shape, **options) for _ in range(config.blocks)])
    self.causal = config.model != "bert4rec"
    has_norm = self.blocks[0].normed
    self.norm = nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs) if has_norm else None

  def __call__(
    self,
    x_BxLxD: jax.Array,
    segments_BxL: jax.Array,
    where_BxW: jax.Array | None = None,
  ) -> jax.Array:
    """Returns `[B, L, D]`, or `[B, W, D]` of the columns `where_BxW`."""
    x, where = x_BxLxD, where_BxW
    mask_BxLxL = visible(segments_BxL, causal=self.causal)
    for number, block in enumerate(self.blocks, 1):
      if where is None or number < len(self.blocks) or isinstance(block, HSTUBlock):
        x = block(x, mask_BxLxL)
      else:  # the last one computes no other columns
        x, where = block(_columns(x, where), _columns(mask_BxLxL, where), x), None
    x = x if where is None else _columns(x, where)
    return x if self.norm is None else self.norm(x)


def _columns(x: jax.Array, where_BxW: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x, where_BxW[..., None], axis=1)


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
    num_items: N.
    encoder: between lookup and scores. It computes in `dtype`; outputs and scores are float32.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    num_items: int,
    encoder: Encoder,
    config,
    *,
    rngs: nnx.Rngs,
  ):
    self.embed, self.num_items, self.encoder, dim = tables, num_items, encoder, config.dim
    self.dtype = build.dtype(config, "dtype")
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

  def __call__(
    self, batch: Mapping[str, jax.Array], where_BxW: jax.Array | None = None
  ) -> jax.Array:
    """Returns what item rows are multiplied with, `[B, L, D]`, for bert4rec `[B, L, D + 1]`.

    With `where_BxW` of these columns alone, `[B, W, ...]`.

    Args:
      batch: `items`, `segments` and `positions`, `[B, L]`. An item of -1 within a segment is a
        hidden one.
    """
    items_BxL, segments_BxL = batch["items"], batch["segments"]
    x_BxLxD = self.embed({ITEM: items_BxL})[ITEM].astype(jnp.float32)
    if self.hidden is not None:
      x_BxLxD = x_BxLxD[..., :-1]  # without the item's bias
      is_hidden_BxL = (items_BxL < 0) & (segments_BxL >= 0)
      x_BxLxD = jnp.where(is_hidden_BxL[..., None], self.hidden[...], x_BxLxD)
    x_BxLxD = x_BxLxD * self.scale + self.positions[...][batch["positions"]]
    if self.norm is not None:
      x_BxLxD = self.norm(x_BxLxD)
    x_BxLxD = self.dropout(x_BxLxD.astype(self.dtype))
    outputs = self.encoder(x_BxLxD, segments_BxL, where_BxW).astype(jnp.float32)
    return outputs if self.projection is None else self.projection(outputs)

  def scores(self, queries: jax.Array, candidates: jax.Array | None = None) -> jax.Array:
    """Returns scores `[..., N]` of all items, or `[..., K]` of candidates; see `embed.attend`."""
    return self.embed.attend(queries, ITEM, candidates)


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
  return SequenceModel(tables, num_items, encoder, config, rngs=rngs)


def queries(model: SequenceModel, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the query of each row's column `last`, `[B, D]`, or `[B, D + 1]` for bert4rec."""
  return model(batch, batch["last"][:, None])[:, 0]
