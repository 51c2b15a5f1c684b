"""Gradients one can look at, clip, accumulate and scale: dense ones and rows side by side."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from embed import update
from embed.lookup import Occurrences


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class RowGrads:
  """The gradient of a table, as rows: row `ids[i]` has gradient `values[i]`.

  `ids` int32 `[N]`, `values` float32 `[N, D]`. Rows are summed over duplicates, features and
  calls, so an id stands once, in no particular order; unused entries have id `vocabulary_size` and
  value 0. Where the table's optimizer has `use_gradient_accumulation=False` there is one entry per
  occurrence instead, in batch order.

  Made by `embed.value_and_grad`, which keeps the activations' gradients and sums them when `ids`
  or `values` is asked for (or inside the update). `RowGrads(ids, values)` makes one by hand;
  duplicates are allowed and summed by the update.

  >>> RowGrads(jnp.array([4, 2]), jnp.ones((2, 3))).values.shape
  (2, 3)
  """

  pieces: tuple[update.Piece, ...]
  vocabulary_size: int | None
  dim: int
  kind: str  # "pending": evaluated on demand; "summed": distinct rows; "pairs": any rows
  each: bool  # one entry per occurrence: duplicates are not to be summed

  def __init__(self, ids: Any, values: Any):
    ids, values = jnp.asarray(ids), jnp.asarray(values)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
      raise ValueError(f"RowGrads takes integer ids, got dtype {ids.dtype}.")
    if ids.ndim != 1 or values.ndim != 2 or ids.shape[0] != values.shape[0]:
      raise ValueError(
        f"RowGrads takes ids [N] and values [N, D]; got shapes {ids.shape} and {values.shape}."
      )
    occurrences = Occurrences(ids[:, None], None, None)
    self._set((update.Piece(values, occurrences),), None, values.shape[1], "pairs", False)

  def _set(self, pieces, *static):
    names = ("pieces", "vocabulary_size", "dim", "kind", "each")
    for name, value in zip(names, (tuple(pieces), *static), strict=True):
      object.__setattr__(self, name, value)
    return self

  @classmethod
  def _make(cls, pieces, *static) -> "RowGrads":
    return object.__new__(cls)._set(pieces, *static)

  @classmethod
  def pending(
    cls, pieces: Sequence[update.Piece], vocabulary_size: int, dim: int, accumulate: bool
  ) -> "RowGrads":
    """From activation gradients; `accumulate` says whether duplicates are to be summed."""
    some = [p for p in pieces if p.occurrences.ids.size]
    return cls._make(some, vocabulary_size, dim, "pending", not accumulate)

  def tree_flatten(self):
    return self.pieces, (self.vocabulary_size, self.dim, self.kind, self.each)

  @classmethod
  def tree_unflatten(cls, static, pieces) -> "RowGrads":
    return cls._make(pieces, *static)

  def _arrays(self) -> tuple[jax.Array, jax.Array]:
    if not self.pieces:
      return jnp.zeros(0, jnp.int32), jnp.zeros((0, self.dim), jnp.float32)
    if self.kind != "pending":
      return self.pieces[0].occurrences.ids[:, 0], self.pieces[0].grads
    return _evaluate(self.pieces, self.vocabulary_size, not self.each)

  @property
  def ids(self) -> jax.Array:
    """int32 `[N]`."""
    return self._arrays()[0]

  @property
  def values(self) -> jax.Array:
    """float32 `[N, D]`."""
    return self._arrays()[1]

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "RowGrads":
    """The same rows with `f(values)`."""
    if not self.pieces:
      return self
    ids, values = self._arrays()
    piece = update.Piece(f(values), Occurrences(ids[:, None], None, None))
    kind = "pairs" if self.each or self.kind == "pairs" else "summed"
    return self._make((piece,), self.vocabulary_size, self.dim, kind, self.each)

  def squared_norm(self) -> jax.Array:
    """The sum of the squares of the summed rows."""
    if self.kind == "summed" or not any(p.occurrences.ids.size for p in self.pieces):
      return jnp.sum(jnp.square(self.values))
    size = self.vocabulary_size if self.vocabulary_size is not None else _INT32_MAX
    return jnp.sum(jnp.square(_evaluate(self.pieces, size, True)[1]))


_INT32_MAX = 2**31 - 1


@functools.partial(jax.jit, static_argnums=(1, 2))
def _evaluate(pieces, vocabulary_size, summed):
  make = update.sum_rows if summed else update.expand_rows
  rows = make(pieces, vocabulary_size)
  return rows.ids, rows.values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grads:
  """What `embed.value_and_grad` returns and `embed.Optimizer.update` takes.

  `dense`: an `nnx.State` of the gradients of the `nnx.Param`s, for optax. `rows`: `RowGrads` by
  `"<module path>/<table name>"`, an entry for every table, empty where nothing was looked up.

  Do not `jax.tree.map` over the whole: ids and gains are leaves too. `map`, `embed.accumulate`,
  `embed.global_norm` and `embed.clip_by_global_norm` treat rows as the gradients they are.
  """

  dense: Any
  rows: dict[str, RowGrads]

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Grads":
    """Applies `f` to every float array: dense gradients and row values, never ids.

    >>> unscaled = lambda grads, scale: grads.map(lambda g: g / scale)
    """
    return Grads(jax.tree.map(f, self.dense), {k: r.map(f) for k, r in self.rows.items()})


def global_norm(grads: Grads) -> jax.Array:
  """The norm of all gradients together, dense and rows: that of the equal dense gradients."""
  square = lambda g: jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32)))
  squares = sum(map(square, jax.tree.leaves(grads.dense)), jnp.zeros((), jnp.float32))
  return jnp.sqrt(sum((r.squared_norm() for r in grads.rows.values()), squares))


def clip_by_global_norm(grads: Grads, max_norm: float) -> Grads:
  """Scales all gradients by `min(1, max_norm / global_norm(grads))`, as optax does for dense ones.

  Raises:
    ValueError: if `max_norm` is a number that is not positive.
  """
  if isinstance(max_norm, (int, float)) and not max_norm > 0:
    raise ValueError(f"max_norm must be positive. Got {max_norm!r}.")
  grads = grads.map(lambda g: g)  # sums the rows once, for the norm and for the result
  norm = global_norm(grads)
  scale = jnp.minimum(1, max_norm / jnp.maximum(norm, max_norm))
  return grads.map(lambda g: g * scale.astype(g.dtype))


def accumulate(grads: Sequence[Grads]) -> Grads:
  """The sum of the gradients of microbatches: that of the losses' sum.

  For the mean, divide the losses by their number, or `.map(lambda g: g / n)`.

  Raises:
    ValueError: for an empty list, or gradients of different models.
  """
  if not grads:
    raise ValueError("accumulate takes at least one embed.Grads.")
  first = grads[0]
  if any(set(g.rows) != set(first.rows) for g in grads):
    raise ValueError("accumulate: the gradients are of different models (their tables differ).")
  dense = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(g.dense for g in grads))
  return Grads(dense, {key: _concatenate([g.rows[key] for g in grads]) for key in first.rows})


def _concatenate(rows: Sequence[RowGrads]) -> RowGrads:
  first = rows[0]
  each = any(r.each for r in rows)
  sizes = [r.vocabulary_size for r in rows if r.vocabulary_size is not None]
  if sizes:
    return RowGrads.pending([p for r in rows for p in r.pieces], sizes[0], first.dim, not each)
  ids, values = (jnp.concatenate(x) for x in zip(*(r._arrays() for r in rows), strict=True))
  return RowGrads(ids, values)
