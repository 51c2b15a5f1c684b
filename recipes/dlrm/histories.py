"""Models of the positions of a history: pooled, DIN, a transformer, or HSTU.

`Histories` replaces the vectors of a sequence at all positions by one vector of the same width, so
that a backbone sees no difference between the models.

B is the batch, L the number of positions, D the width of a position.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError
from ..training import layers
from ..training.features import Feature
from ..training.transformer import HSTUBlock, PostNormBlock

MODELS = ("pooled", "din", "transformer", "hstu")


class DIN(nnx.Module):
  """Zhou et al. 2018, "Deep Interest Network", equation 3: a weighted sum of positions.

      v(q) = sum over l of a(k[l], q) k[l],   a(k, q) = MLP([k, q, k - q, k * q])

  Weights are not normalised: their sum tells how much of the history is like the candidate. The
  MLP has ReLU, the paper Dice; `k * q` is the authors' code, the paper's figure has an outer
  product.
  """

  def __init__(self, dim: int, hidden: Sequence[int] = (80, 40), *, dtype: Any, rngs: nnx.Rngs):
    self.mlp = layers.MLP(4 * dim, hidden, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(self.mlp.out_features, 1, dtype=dtype, rngs=rngs)

  def __call__(self, keys_BxLxD: jax.Array, query_BxD: jax.Array, mask_BxL: jax.Array) -> jax.Array:
    """Returns `[B, D]` for positions, a candidate, and a mask of the positions in use."""
    weights_BxL = self.weights(keys_BxLxD, query_BxD, mask_BxL)
    return jnp.einsum("bl,bld->bd", weights_BxL, keys_BxLxD)

  def weights(self, keys_BxLxD: jax.Array, query_BxD: jax.Array, mask_BxL: jax.Array) -> jax.Array:
    """Returns what each position is multiplied by, `[B, L]`."""
    query = jnp.broadcast_to(query_BxD[:, None], keys_BxLxD.shape)
    pairs = jnp.concatenate([keys_BxLxD, query, keys_BxLxD - query, keys_BxLxD * query], axis=-1)
    return jnp.where(mask_BxL, self.out(self.mlp(pairs))[..., 0], 0)


class Encoder(nnx.Module):
  """A block of attention over the positions and the candidate, whose output is the result.

  With `PostNormBlock` it is Chen et al. 2019, "Behavior Sequence Transformer": the block is
  `norm(x + f(x))`, as in the paper, with the GELU of BERT, and all columns see all others. With
  `HSTUBlock` (Zhai et al. 2024) a column sees the ones before it, and the candidate all of them.
  Places are counted from the latest position back, and have learned vectors.
  """

  HEADS = 2

  def __init__(self, model: str, dim: int, length: int, *, dropout: float, **options: Any):
    if dim % self.HEADS:
      raise UserError(
        f"a position is {dim} wide, and history.model={model!r} has {self.HEADS} heads: choose an "
        "even config.dim"
      )
    key = options["rngs"].params()
    self.places = nnx.Param(0.02 * jax.random.normal(key, (length, dim)))
    self.block: Any = (
      HSTUBlock(dim, self.HEADS, length + 1, distances=False, dropout=dropout, **options)
      if model == "hstu"
      else PostNormBlock(dim, self.HEADS, dropout=dropout, **options)
    )
    self.norm = nnx.LayerNorm(dim, **options)

  def __call__(self, keys_BxLxD: jax.Array, query_BxD: jax.Array, mask_BxL: jax.Array) -> jax.Array:
    """Returns `[B, D]`; see `DIN`."""
    back_BxL = jnp.maximum(jnp.cumsum(mask_BxL[:, ::-1], axis=1)[:, ::-1] - 1, 0)
    keys_BxLxD = keys_BxLxD + self.places[...][back_BxL].astype(keys_BxLxD.dtype)
    x_BxMxD = jnp.concatenate([keys_BxLxD, query_BxD[:, None]], axis=1)  # M is L + 1
    mask_BxM = jnp.concatenate([mask_BxL, jnp.ones_like(mask_BxL[:, :1])], axis=1)
    # The output of the candidate's column alone is used: an eighth of a transformer's time.
    return self.norm(self.block(x_BxMxD[:, -1:], mask_BxM[:, None], x_BxMxD)[:, 0])


class Histories(nnx.Module):
  """Attends to the positions of all histories of a model, each for the candidate of its row.

  The candidate is the row's own feature in the table of the history: the item for items.

  Args:
    linear: how many of the last columns are first-order weights, whose mean is taken.

  Raises:
    UserError: no feature of the row has the table of a history.
  """

  def __init__(
    self, config, features: Sequence[Feature], *, linear: int = 0, dtype: Any, rngs: nnx.Rngs
  ):
    self.dtype, self.linear, self.dim = dtype, linear, config.dim
    single = [f for f in features if f.valency == 1 and not f.history]
    own = {f.table or f.name: f.name for f in reversed(single)} | {f.name: f.name for f in single}
    model, options, models = config.history.model, {"dtype": dtype, "rngs": rngs}, {}
    self.candidates = {f.name: own.get(f.history, "") for f in features if f.history}  # by history
    for feature in (f for f in features if f.history):
      if not self.candidates[feature.name]:
        raise UserError(
          f"the sequence {feature.name!r} shares its table with no single value of the row, which "
          "config.history.model attends for: name its `table`, or declare it as a bag"
        )
      models[feature.name] = (
        DIN(self.dim, **options)
        if model == "din"
        else Encoder(model, self.dim, feature.valency, dropout=config.dropout, **options)
      )
    self.models = nnx.Dict(models)

  def __call__(
    self, activations: Mapping[str, jax.Array], inputs: Mapping[str, Any]
  ) -> dict[str, jax.Array]:
    """Returns activations with `[B, width]` for each history.

    Args:
      activations: of all features; of histories `[B, L, width]`.
      inputs: their ids, `embed.Padded` for those of several.
    """
    pooled = dict(activations)
    for name, model in self.models.items():
      keys_BxLxD, query_BxD, mask_BxL = self.arguments(name, activations, inputs)
      pooled[name] = model(keys_BxLxD, query_BxD, mask_BxL)
      if self.linear:
        weights = activations[name].reshape(*mask_BxL.shape, -1)[..., -self.linear :]
        count = jnp.maximum(mask_BxL.sum(axis=1, keepdims=True), 1)
        mean = jnp.where(mask_BxL[..., None], weights, 0).sum(axis=1) / count
        pooled[name] = jnp.concatenate([pooled[name], mean.astype(pooled[name].dtype)], axis=1)
    return pooled

  def arguments(
    self, name: str, activations: Mapping[str, jax.Array], inputs: Mapping[str, Any]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns positions `[B, L, D]`, the candidate `[B, D]` and the mask `[B, L]`."""
    ids = getattr(inputs[name], "values", inputs[name])
    mask_BxL = (ids if ids.ndim == 2 else ids[:, None]) >= 0
    keys_BxLxD = activations[name].reshape(*mask_BxL.shape, -1)[..., : self.dim]
    query_BxD = activations[self.candidates[name]][:, : self.dim]
    return keys_BxLxD.astype(self.dtype), query_BxD.astype(self.dtype), mask_BxL


def attends(config, features: Sequence[Feature]) -> bool:
  """Returns whether a model sees each position of a history, instead of one pooled vector."""
  return config.history.model != "pooled" and any(feature.history for feature in features)
