"""HSTU as a ranker: logits for all targets of a user in one sequence.

B is rows, S sequences of a row, C contexts of a sequence, L columns of a row, T targets of a row, D
the width. A row is computed as `S C` contextual tokens and then its L columns.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

from ..errors import UserError
from ..training import build
from ..training.hstu import HSTUBlock
from ..training.layers import linear
from . import listens

_DAY = 86_400
_CLOCK = (_DAY, 7 * _DAY)  # periods of the time of a target


class HSTURanker(nnx.Module):
  """Zhai et al. 2024, section 2.2, with the layers of MLPerf's `recommendation_v4`.

  A token is the sum of an MLP over its vectors, a vector of its action, one of its position and one
  of its age; contextual tokens have a linear layer each. Events see the contexts and the events
  before them; a target sees these and itself, and nobody sees a target. A target's logit comes from
  the product of its output, beside sine and cosine of its time of day and week, with an MLP over
  its own vectors.

  Args:
    tables: of the features that `recipes.dlrm.listens` names, all of width D.
    config: of the run; its `hstu` group describes the encoder.
    head: makes what returns the logit.
  """

  def __init__(self, tables: embed.SparseEmbed, config, head: Any, *, rngs: nnx.Rngs):
    dim, about = config.dim, config.hstu
    tokens, contexts, actions = listens.TOKENS, listens.CONTEXTS, listens.ACTIONS
    if dim % about.heads:
      raise UserError(f"the width {dim} must be a multiple of the {about.heads} heads")
    self.embed, self.tokens, self.contexts = tables, tokens, contexts
    self.dtype = build.dtype(config, "dtype")
    of_dtype: Any = {"dtype": self.dtype, "rngs": rngs}
    draw = lambda size: nnx.Param(0.02 * jax.random.normal(rngs.params(), (size, dim)))
    self.actions, self.positions = draw(actions), draw(about.length)
    self.ages = draw(about.ages) if about.ages else None
    self.content = _MLP(len(tokens) * dim, about.hidden, dim, **of_dtype)
    self.context = nnx.List([linear(dim, dim, **of_dtype) for _ in contexts])
    self.dropout = nnx.Dropout(about.input_dropout, rngs=rngs)
    self.blocks = nnx.List(
      HSTUBlock(
        dim,
        about.heads,
        about.length,
        dropout=config.dropout,
        distances=False,  # they would tell the targets of one moment apart
        buckets=about.time_buckets,
        actions=actions if about.action_bias else 0,
        query_block=about.query_block,
        **of_dtype,
      )
      for _ in range(about.blocks)
    )
    self.user = linear(dim + 2 * len(_CLOCK), dim, **of_dtype)
    self.norm = nnx.LayerNorm(dim, **of_dtype)
    self.item = _MLP(len(tokens) * dim, dim, dim, **of_dtype)
    self.meet, self.meet_norm = linear(dim, dim, **of_dtype), nnx.LayerNorm(dim, **of_dtype)
    self.head = head(dim, rngs=rngs)

  def __call__(self, batch: Mapping[str, Any]) -> jax.Array:
    """Returns logits `[B T]`, row by row.

    Args:
      batch: as `recipes.dlrm.listens.inputs` returns it.
    """
    vectors = jax.tree.map(lambda x: x.astype(self.dtype), self.embed(batch["features"]))
    tokens = jnp.concatenate([vectors[name] for name in self.tokens], axis=-1)
    rows, sequences = batch["features"][self.contexts[0]].shape
    number, dim = len(self.contexts), tokens.shape[-1] // len(self.tokens)
    contexts = [
      layer(vectors[name].reshape(rows, sequences, dim))
      for name, layer in zip(self.contexts, self.context, strict=True)
    ]
    front = jnp.stack(contexts, axis=2).reshape(rows, sequences * number, dim)
    x = jnp.concatenate([front, self._events(batch, tokens)], axis=1)
    ahead = lambda values: jnp.broadcast_to(jnp.repeat(values, number), (rows, sequences * number))
    joined = lambda values, rest: jnp.concatenate([ahead(values), rest], axis=1)
    segments = joined(jnp.arange(sequences), batch["segments"])
    is_target = joined(jnp.zeros(sequences, bool), batch["actions"] < 0)
    times = joined(jnp.zeros(sequences, jnp.int32), batch["times"])
    actions = joined(jnp.full(sequences, -1), batch["actions"])
    mask, x = visible(segments, is_target), self.dropout(x)
    for block in self.blocks:
      x = block(x, mask, times=times, actions=actions)
    at = lambda x, column: jnp.take_along_axis(x, column[..., None], axis=1)
    users = at(x, batch["where"] + sequences * number)
    angles = batch["clock"][..., None] % np.array(_CLOCK) * (2 * np.pi / np.array(_CLOCK))
    clock = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(self.dtype)
    users = self.norm(self.user(jnp.concatenate([users, clock], axis=-1)))
    met = self.meet(users * self.item(at(tokens, batch["where"])))
    return self.head(met * nnx.sigmoid(self.meet_norm(met))).reshape(-1)

  def _events(self, batch: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
    """Returns `[B, L, D]`."""
    take = lambda table, index: table[...].astype(self.dtype)[jnp.clip(index, 0, len(table) - 1)]
    actions = batch["actions"][..., None]
    x = self.content(tokens) + take(self.positions, batch["positions"])
    x += jnp.where(actions >= 0, take(self.actions, batch["actions"]), 0)
    if self.ages is not None:
      # Square roots of minutes, as in the authors' code.
      minutes = jnp.maximum(-batch["times"], 0) / 60
      x += take(self.ages, jnp.sqrt(minutes).astype(jnp.int32))
    return x


def visible(segments: jax.Array, is_target: jax.Array) -> jax.Array:
  """Returns which columns each column may look at, bool `[B, L, L]`.

  Those of its segment that are before it and no targets, and itself; -1 is no segment.
  """
  columns = jnp.arange(segments.shape[1])
  events = (columns[:, None] > columns) & ~is_target[:, None, :]
  same = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
  return same & (events | (columns[:, None] == columns))


class _MLP(nnx.Module):
  """A hidden layer with swish of a norm, and a norm."""

  def __init__(self, features: int, hidden: int, out: int, *, dtype: Any, rngs: nnx.Rngs):
    self.hidden = linear(features, hidden, dtype, rngs)
    self.out = linear(hidden, out, dtype, rngs)
    self.norms = nnx.List(nnx.LayerNorm(n, dtype=dtype, rngs=rngs) for n in (hidden, out))

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.hidden(x)
    return self.norms[1](self.out(x * nnx.sigmoid(self.norms[0](x))))
