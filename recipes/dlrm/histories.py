"""What a ranker makes of the positions of a history: pooled, DIN, a transformer, or HSTU.

A history has one part or several: the item at each position, and perhaps its genre, the action and
the age beside it. `Histories` replaces the vectors of each part at all positions by one vector of
the same width, so that a backbone sees no difference between the models.

B is the batch, L the number of positions, D the width of a position: that of its parts in all.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError
from ..training import layers
from ..training.features import Feature
from ..training.hstu import HSTUBlock
from ..training.transformer import BERT4RecBlock

BLOCKS: dict[str, Any] = {
  "transformer": BERT4RecBlock,
  "hstu": functools.partial(HSTUBlock, distances=False),
}
MODELS = ("pooled", "din", *BLOCKS)


class DIN(nnx.Module):
  """Zhou et al. 2018, "Deep Interest Network", equation 3: a weighted sum of positions.

      v(q) = sum over l of a(k[l], q) k[l],   a(k, q) = MLP([k, q, k - q, k * q])

  Weights are not normalised: their sum tells how much of the history is like the candidate. The
  MLP has ReLU, the paper Dice; `k * q` is the authors' code, the paper's figure has an outer
  product.

  Args:
    dim: D.
    hidden: widths of the MLP.
  """

  def __init__(self, dim: int, hidden: Sequence[int], *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
    self.mlp = layers.MLP(4 * dim, hidden, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(self.mlp.out_features, 1, dtype=dtype, rngs=rngs)

  def weights(self, keys: jax.Array, query: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the weight of each position, `[B, L]`, 0 where there is none; args as of a call."""
    query = jnp.broadcast_to(query[:, None], keys.shape)
    pairs = jnp.concatenate([keys, query, keys - query, keys * query], axis=-1)
    return jnp.where(mask, self.out(self.mlp(pairs))[..., 0], 0)

  def __call__(self, keys: jax.Array, query: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns `[B, D]`.

    Args:
      keys: the positions `[B, L, D]`.
      query: the candidate `[B, D]`.
      mask: which positions there are, bool `[B, L]`.
    """
    return jnp.einsum("bl,bld->bd", self.weights(keys, query, mask), keys)


class Encoder(nnx.Module):
  """Blocks of attention over the positions and the candidate, whose output is the result.

  With `BERT4RecBlock` it is Chen et al. 2019, "Behavior Sequence Transformer": blocks are
  `norm(x + f(x))`, as in the paper, with the GELU of BERT, and all columns see all others. With
  `HSTUBlock` (Zhai et al. 2024) a column sees the ones before it, and the candidate all of them.
  Places are counted from the latest position back, and have learned vectors.

  Args:
    block: `(D, heads, columns, dropout=, dtype=, rngs=)` -> `(x, mask)` -> x.
    dim: D, a multiple of the number of heads.
    length: L.
    blocks, heads: numbers of them.
    causal: whether a column sees only those before it.
    dropout: rate, within the blocks.
  """

  def __init__(
    self,
    block: Callable[..., Any],
    dim: int,
    length: int,
    *,
    blocks: int,
    heads: int,
    causal: bool,
    dropout: float,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    if dim % heads:
      raise UserError(
        f"a position is {dim} wide: config.history.heads must divide it, and is {heads}"
      )
    self.causal, options = causal, {"dtype": dtype, "rngs": rngs}
    self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, dim)))
    make = functools.partial(block, dim, heads, length + 1, dropout=dropout)
    self.blocks = nnx.List([make(**options) for _ in range(blocks)])
    self.norm = nnx.LayerNorm(dim, **options)

  def __call__(self, keys: jax.Array, query: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns `[B, D]`; args as of `DIN`."""
    back = jnp.maximum(jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] - 1, 0)
    keys = keys + self.places[...][back].astype(keys.dtype)
    x = jnp.concatenate([keys, query[:, None]], axis=1)
    there = jnp.concatenate([mask, jnp.ones_like(mask[:, :1])], axis=1)
    columns = jnp.arange(x.shape[1])
    seen = there[:, None] & ((columns[:, None] >= columns) | (not self.causal))
    *blocks, last = self.blocks
    for block in blocks:
      x = block(x, seen)
    # Of the last block the candidate's column alone is used, an eighth of a transformer's time.
    return self.norm(last(x[:, -1:], seen[:, -1:], x)[:, 0])


class Histories(nnx.Module):
  """Attends to the positions of all histories of a model, each for the candidate of its row.

  The candidate is the row's own feature in the table of a part: the item for the items of the
  history. For a part without, such as an action or an age, it is zeros.

  Args:
    widths: of their vectors by name.
    make: returns the module for a width and a length.
    wide: how many of the last columns are first-order weights, whose mean is taken.

  Raises:
    UserError: no feature of the row has the table of a history.
  """

  def __init__(
    self,
    features: Sequence[Feature],
    widths: Mapping[str, int],
    make: Callable[[int, int], Callable[..., jax.Array]],
    dtype: Any = jnp.float32,
    *,
    wide: int = 0,
  ):
    self.dtype, self.wide = dtype, wide
    self.widths = {name: width - wide for name, width in widths.items()}
    table = lambda feature: feature.table or feature.name
    single = [f for f in features if f.valency == 1 and not f.history]
    candidates = {table(feature): feature.name for feature in reversed(single)}
    candidates |= {feature.name: feature.name for feature in single}
    self.parts: dict[str, dict[str, str | None]] = {}  # of a history: the candidates by part
    for feature in features:
      if feature.history:
        parts = self.parts.setdefault(feature.history, {})
        parts[feature.name] = candidates.get(feature.candidate or table(feature))
        if parts[feature.history] is None:
          raise UserError(
            f"the sequence {feature.history!r} shares its table with no single value of the row, "
            "which config.history.model attends for: set `of`, or declare it as a bag"
          )
    lengths = {feature.name: feature.valency for feature in features}
    width = lambda parts: sum(self.widths[part] for part in parts)
    self.models = nnx.Dict(
      {name: make(width(parts), lengths[name]) for name, parts in self.parts.items()}
    )

  def __call__(
    self, activations: Mapping[str, jax.Array], inputs: Mapping[str, Any]
  ) -> dict[str, jax.Array]:
    """Returns activations with `[B, width]` for each part of a history.

    Args:
      activations: of all features; of parts `[B, L, width]`.
      inputs: their ids, `embed.Padded` for those of several.
    """
    made = dict(activations)
    for name, parts in self.parts.items():
      keys, query, mask = self.arguments(name, activations, inputs)
      vectors, start = self.models[name](keys, query, mask), 0
      for part in parts:
        made[part] = vectors[:, start : start + self.widths[part]]
        start += self.widths[part]
        if self.wide:
          weights = activations[part].reshape(*mask.shape, -1)[..., -self.wide :]
          count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
          mean = jnp.where(mask[..., None], weights, 0).sum(axis=1) / count
          made[part] = jnp.concatenate([made[part], mean.astype(vectors.dtype)], axis=1)
    return made

  def arguments(
    self, name: str, activations: Mapping[str, jax.Array], inputs: Mapping[str, Any]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns positions `[B, L, D]`, the candidate `[B, D]` and which positions there are."""
    ids = getattr(inputs[name], "values", inputs[name])
    ids = ids if ids.ndim == 2 else ids[:, None]
    mask = ids >= 0
    keys, queries = [], []
    for part, candidate in self.parts[name].items():
      width = self.widths[part]
      key = activations[part].reshape(*mask.shape, -1)[..., :width].astype(self.dtype)
      keys.append(key)
      own = jnp.zeros_like(key[:, 0]) if candidate is None else activations[candidate][:, :width]
      queries.append(own.astype(self.dtype))
    return jnp.concatenate(keys, axis=-1), jnp.concatenate(queries, axis=-1), mask


def check(config) -> None:
  """Raises UserError for a model that is unknown."""
  if config.history.model not in MODELS:
    raise UserError(
      f"unknown history.model {config.history.model!r}: choose {', '.join(MODELS[:-1])} or "
      f"{MODELS[-1]}"
    )


def make(
  config,
  features: Sequence[Feature],
  widths: Mapping[str, int],
  dtype: Any,
  rngs: nnx.Rngs,
  wide: int = 0,
):
  """Returns the `Histories` that `config.history` describes; None where vectors are pooled."""
  about, of_dtype = config.history, {"dtype": dtype, "rngs": rngs}
  model: Callable[..., Any]
  if not attends(config, features):
    return None
  if about.model == "din":
    model = lambda dim, length: DIN(dim, about.hidden, **of_dtype)
  else:
    sizes = {"blocks": about.blocks, "heads": about.heads, "causal": about.model == "hstu"}
    model = functools.partial(
      Encoder, BLOCKS[about.model], **sizes, dropout=config.dropout, **of_dtype
    )
  return Histories(features, widths, model, dtype, wide=wide)


def attends(config, features: Sequence[Feature]) -> bool:
  """Whether a model sees each position of a history, in place of one pooled vector."""
  return config.history.model != "pooled" and any(feature.history for feature in features)
