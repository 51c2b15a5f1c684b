"""Two towers over one `SparseEmbed`, and what training remembers of past batches.

B is the number of queries, C of candidates, D the width of tables and towers, Q of a queue.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from ..training import layers
from .frequency import Frequency


class Tower(nnx.Module):
  """Turns the activations of one side, `{name: [B, D]}`, into one vector `[B, D]`.

  Without hidden layers the vector is the sum, each feature times a learned number; with them, an
  MLP of the concatenation and a linear layer.

  Args:
    names: of the features.
    dim: D.
    hidden: widths of the MLP.
    dropout: rate, of the activations and after the MLP's layers.
    normalize: whether to scale the result to length 1.
    dtype: of the computation; the result is float32.
  """

  def __init__(
    self,
    names: Sequence[str],
    dim: int,
    *,
    hidden: Sequence[int],
    dropout: float,
    normalize: bool,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.names, self.normalize, self.dtype = tuple(names), normalize, dtype
    self.dropout = nnx.Dropout(dropout, rngs=rngs)
    self.gains = None if hidden else nnx.Param(jnp.ones(len(names)))
    self.mlp = layers.MLP(len(names) * dim, hidden, dropout=dropout, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(self.mlp.out_features, dim, dtype=dtype, rngs=rngs) if hidden else None

  def __call__(self, activations: Mapping[str, jax.Array]) -> jax.Array:
    vectors = [self.dropout(activations[name].astype(self.dtype)) for name in self.names]
    if self.gains is not None:
      x = jnp.einsum("f,fbd->bd", self.gains[...].astype(self.dtype), jnp.stack(vectors))
    else:
      assert self.out is not None
      x = self.out(self.mlp(jnp.concatenate(vectors, axis=1)))
    x = x.astype(jnp.float32)
    if self.normalize:
      # Under the root, and not around it: a query without any feature has no direction.
      x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=1, keepdims=True) + 1e-12)
    return x


class Past(nnx.Variable):
  """The arrays of a `Queue`."""


class Queue(nnx.Module):
  """The candidates of past batches as negatives: Wang et al. 2021, "Cross-Batch Negative Sampling".

  Args:
    size: Q, a multiple of the batch.
    dim: D.
  """

  def __init__(self, size: int, dim: int):
    self.size = size
    self.past = Past(
      {
        "ids": jnp.full(size, -1, jnp.int32),
        "vectors": jnp.zeros((size, dim), jnp.float32),
        "rates": jnp.zeros(size, jnp.float32),
        "next": jnp.int32(0),
      }
    )

  def read(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ids `[Q]`, -1 where nothing has been put yet, vectors `[Q, D]` and rates `[Q]`."""
    state = self.past.get_value()
    return state["ids"], state["vectors"], state["rates"]

  def put(self, ids: jax.Array, vectors: jax.Array, rates: jax.Array) -> None:
    """Replaces the oldest entries by the ones of a batch; no gradient flows back into it."""
    state: dict[str, Any] = dict(self.past.get_value())
    start, vectors = state["next"], jax.lax.stop_gradient(vectors)
    self.past.set_value(
      {
        "ids": jax.lax.dynamic_update_slice(state["ids"], ids, (start,)),
        "vectors": jax.lax.dynamic_update_slice(state["vectors"], vectors, (start, 0)),
        "rates": jax.lax.dynamic_update_slice(state["rates"], rates, (start,)),
        "next": (start + ids.shape[0]) % self.size,
      }
    )


class TwoTower(nnx.Module):
  """Query and candidate tower; a score is the dot product of what they return.

  Args:
    tables: of the features `{"query": {name: FeatureConfig}, "candidate": {...}}`, of width `dim`.
    dim: D.
    num_items: the catalogue.
    query_hidden, candidate_hidden: widths of the towers' MLPs; none makes a tower a sum.
    dropout: rate in the query tower.
    normalize: whether both towers return vectors of length 1.
    buckets, rate: of the frequency estimate.
    queue: past candidates kept as negatives; 0 keeps none.
    dtype: of the computation in the towers.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    dim: int,
    num_items: int,
    *,
    query_hidden: Sequence[int],
    candidate_hidden: Sequence[int],
    dropout: float,
    normalize: bool,
    buckets: int,
    rate: float,
    queue: int,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.embed, features = tables, tables.spec.features
    tower = functools.partial(Tower, dim=dim, normalize=normalize, dtype=dtype, rngs=rngs)
    self.query_tower = tower(tuple(features["query"]), hidden=query_hidden, dropout=dropout)
    self.candidate_tower = tower(tuple(features["candidate"]), hidden=candidate_hidden, dropout=0.0)
    self.frequency = Frequency(buckets or num_items, num_items, rate=rate)
    self.queue = Queue(queue, dim) if queue else None

  def __call__(self, query: Any, candidate: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the vectors of queries `[B, D]` and candidates `[C, D]`, by one lookup."""
    activations = self.embed({"query": query, "candidate": candidate})
    queries = self.query_tower(activations["query"])
    return queries, self.candidate_tower(activations["candidate"])

  def queries(self, query: Any) -> jax.Array:
    """Returns `[B, D]`, without admitting raw ids."""
    return self.query_tower(self.embed(self.embed.translate({"query": query}))["query"])

  def candidates(self, candidate: Any) -> jax.Array:
    """Returns `[C, D]`, without admitting raw ids."""
    rows = self.embed.translate({"candidate": candidate})
    return self.candidate_tower(self.embed(rows)["candidate"])
