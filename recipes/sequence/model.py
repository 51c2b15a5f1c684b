"""SASRec and HSTU: two kinds of blocks between the same item table and itself.

B is rows, L columns of a row, D the width, N items, K samples. A row may hold several sequences
side by side (see `recipes.packing`): `segments` int `[B, L]` has one number for each, -1 being
padding. No output depends on another segment or on padding.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from ..training import build
from ..training.transformer import HSTUBlock, SASRecBlock

ITEM = "item"  # the table's name
MODELS = ("sasrec", "hstu")


def visible(segments_BxL: jax.Array) -> jax.Array:
  """Returns the columns that each column attends to, bool `[B, L, L]`.

  They are itself and those of its own segment before it.
  """
  mask_BxLxL = segments_BxL[:, :, None] == segments_BxL[:, None, :]
  return jnp.tril(mask_BxLxL & (segments_BxL >= 0)[:, None, :])


class SequenceModel(nnx.Module):
  """Blocks over the rows of the item table, scored against the rows of the same table.

  Blocks compute in `config.dtype`; outputs and scores are float32.

  Args:
    config: `model` names the kind of the blocks.
    num_items: N.
    mesh: of the table.
    inputs: returns the shapes of a batch's items, for a plan; see `build.tables`.
  """

  def __init__(
    self,
    config,
    num_items: int,
    mesh: jax.sharding.Mesh | None = None,
    inputs: Callable[[], Any] | None = None,
  ):
    self.num_items, self.dtype = num_items, build.dtype(config, "dtype")
    table = embed.TableConfig(
      num_items,
      config.dim,
      initializer=build.table_initializer(config),
      optimizer=build.table_optimizer(config),
      name=ITEM,
      dtype=build.dtype(config, "table_dtype"),
    )
    rngs, features = nnx.Rngs(config.seed), {ITEM: embed.FeatureConfig(table)}
    # Blocks before the table: published figures draw in this order.
    self.blocks = nnx.List([_block(config, self.dtype, rngs) for _ in range(config.blocks)])
    self.norm = nnx.LayerNorm(config.dim, dtype=self.dtype, rngs=rngs)
    self.embed = build.tables(config, features, None, rngs=rngs, mesh=mesh, inputs=inputs)
    places = jax.random.normal(rngs.params(), (config.max_length, config.dim))
    self.positions = nnx.Param(0.02 * places)
    self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

  def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns what item rows are multiplied with, `[B, L, D]`.

    Args:
      batch: `items`, `segments` and `positions`, `[B, L]`.
    """
    x_BxLxD = self.embed({ITEM: batch["items"]})[ITEM].astype(jnp.float32)
    x_BxLxD = x_BxLxD * math.sqrt(x_BxLxD.shape[-1]) + self.positions[...][batch["positions"]]
    x_BxLxD = self.dropout(x_BxLxD.astype(self.dtype))
    mask_BxLxL = visible(batch["segments"])
    for block in self.blocks:
      x_BxLxD = block(x_BxLxD, mask_BxLxL)
    return self.norm(x_BxLxD).astype(jnp.float32)

  def scores(self, queries: jax.Array, candidates: jax.Array | None = None) -> jax.Array:
    """Returns scores `[..., N]` of all items, or `[..., K]` of candidates; see `embed.attend`."""
    return self.embed.attend(queries, ITEM, candidates)


def _block(config, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
  options: dict[str, Any] = {"dropout": config.dropout, "dtype": dtype, "rngs": rngs}
  if config.model == "hstu":
    return HSTUBlock(config.dim, config.heads, config.max_length, **options)
  options |= {"init": config.init, "residual": config.residual}
  return SASRecBlock(config.dim, config.heads, **options)


def queries(model: SequenceModel, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the query of each row's column `last`, `[B, D]`."""
  return jnp.take_along_axis(model(batch), batch["last"][:, None, None], axis=1)[:, 0]
