"""Gradients one can look at, clip, accumulate and scale: dense ones and rows side by side."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embed.engine import jax_internals as internals
from embed.engine import mesh as sharding
from embed.engine import update
from embed.engine.exchange import Call, Owned
from embed.engine.lookup import Occurrences, Owner, Reads
from embed.engine.stack import Sent, Stack, of_table, scaled


def _only(sent: Sequence[Sent], stack: Stack, table: str) -> tuple[Sent, ...]:
  """What was sent of one table, and nothing of the others of its stack."""
  found = of_table(sent, table)
  alone = len(stack.tables) == 1
  own = lambda x: _own(stack, *_table_rows(stack, [x], table), table)
  return tuple(own(x) if isinstance(x, Owned) and not alone else x for x in found)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class RowGrads:
  """The gradient of a table, as rows: row `ids[i]` has gradient `values[i]`.

  Rows are summed over duplicates, features, calls and devices, so an id stands once, in no
  particular order; unused entries have id `vocabulary_size` and value 0. Sums are float32, one
  occurrence after another: of 100,000 equal gradients it is off by 0.01 %, of a million by 1 %.
  Where the table's optimizer has `use_gradient_accumulation=False` there is one entry per
  occurrence instead, in batch order. On a mesh, entries are with the owners of their rows.

  Made by `embed.value_and_grad`, which keeps the activations' gradients and sums them when `ids`
  or `values` is asked for (or inside the update). By hand, duplicates are allowed and summed by the
  update. A pytree.

  Args:
    ids: integers `[N]`.
    values: floats `[N, D]`.

  Raises:
    ValueError: for ids that are not integers, or other shapes.

  >>> rows = embed.RowGrads(jnp.array([4, 2]), jnp.ones((2, 3)))
  >>> rows.ids.tolist(), rows.values.shape
  ([4, 2], (2, 3))
  """

  sent: tuple[Sent, ...]
  stack: Stack | None  # None: made by hand, one call of one part
  table: str

  def __init__(self, ids: Any, values: Any):
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    wide = ids.dtype.itemsize > 4 and ids.size and not isinstance(ids, jax.core.Tracer)
    if wide and ids.max() > _INT32_MAX:  # int32 would make another row of it
      raise ValueError(f"RowGrads takes ids up to {_INT32_MAX}, got {ids.max()}.")
    ids, values = jnp.asarray(ids), jnp.asarray(values)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
      raise ValueError(f"RowGrads takes integer ids, got dtype {ids.dtype}.")
    if ids.ndim != 1 or values.ndim != 2 or ids.shape[0] != values.shape[0]:
      raise ValueError(
        f"RowGrads takes ids [N] and values [N, D]; got shapes {ids.shape} and {values.shape}."
      )
    self._set((_pairs(ids.astype(jnp.int32), values),), None, "")

  def _set(self, sent: Sequence[Sent], stack: Stack | None, table: str) -> "RowGrads":
    for name, value in (("sent", tuple(sent)), ("stack", stack), ("table", table)):
      object.__setattr__(self, name, value)
    return self

  @classmethod
  def of(cls, sent: Sequence[Sent], stack: Stack | None, table: str) -> "RowGrads":
    """From what was sent of a table."""
    return object.__new__(cls)._set(sent, stack, table)

  def __repr__(self) -> str:
    if not all(isinstance(x, (jax.Array, np.ndarray)) for x in jax.tree.leaves(self.sent)):
      return f"RowGrads({self.sent})"  # shapes, or whatever else a tree was mapped to
    return f"RowGrads(ids={self.ids}, values={self.values})"

  def tree_flatten(self):
    return internals.hide(self.sent), (self.stack, self.table)

  @classmethod
  def tree_unflatten(cls, static, sent) -> "RowGrads":
    return cls.of(internals.show(sent), *static)

  def _arrays(self) -> tuple[jax.Array, jax.Array]:
    if self.stack is None:
      (call,) = self.sent
      assert isinstance(call, Call)
      return call.reads.parts[0].ids[:, 0], call.grads[0]
    return _table_rows(self.stack, self.sent, self.table)

  @property
  def ids(self) -> jax.Array:
    """int32 `[N]`; `vocabulary_size` marks an unused entry."""
    return self._arrays()[0]

  @property
  def values(self) -> jax.Array:
    """float32 `[N, D]`, the gradients of these rows."""
    return self._arrays()[1]

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "RowGrads":
    """The same rows with `f(values)`, `[N, D]` to `[N, D]`.

    >>> rows = embed.RowGrads(jnp.array([4]), jnp.array([[3.0, -4.0]]))
    >>> rows.map(lambda g: jnp.clip(g, -1, 1)).values.tolist()
    [[1.0, -1.0]]
    """
    if not self.sent:
      return self
    ids, values = self._arrays()
    values = f(values)
    if self.stack is None or not self.stack.accumulates:
      return RowGrads.of([_pairs(ids, values, self.table)], self.stack, self.table)
    size = self.stack.tables[self.table].vocabulary_size
    values = jnp.where((ids < size)[:, None], values, 0)  # f of an unused entry is nothing
    return RowGrads.of([_own(self.stack, ids, values, self.table)], self.stack, self.table)

  def squared_norm(self) -> jax.Array:
    """The sum of the squares of the summed rows, a float32 scalar: of one table alone.

    >>> float(embed.RowGrads(jnp.array([4, 4]), jnp.array([[1.0], [2.0]])).squared_norm())
    9.0
    """
    if self.stack is not None:
      return _squared_norm(self.stack, self.sent)
    return _squared_norm_of_pairs(*self._arrays())


_INT32_MAX = 2**31 - 1


def _pairs(ids: jax.Array, values: jax.Array, table: str = "") -> Call:
  return Call((values,), Reads((Occurrences(ids[:, None], None, None),), (table,)))


def sent_to(stack: Stack, table: str, rows: RowGrads) -> list[Sent]:
  """What a table's `RowGrads` sends to its stack, made by hand or not."""
  if rows.stack == stack:
    return list(rows.sent)
  size, dim = stack.tables[table].vocabulary_size, stack.dim
  size_of_rows = size if rows.stack is None else rows.stack.tables[rows.table].vocabulary_size
  if size_of_rows != size:
    raise ValueError(
      f"The row gradients of table {table!r} are of a table of {size_of_rows} rows, it has {size}. "
      "Take them with embed.value_and_grad of this model."
    )
  if rows.sent and rows.values.shape[1] != dim:
    raise ValueError(
      f"The row gradients of table {table!r} have {rows.values.shape[1]} columns, its dim is {dim}."
    )
  ids = rows.ids
  if not isinstance(ids, jax.core.Tracer) and ids.is_fully_addressable and (ids > size).any():
    raise ValueError(
      f"The row gradients of table {table!r} have id {int(ids.max())}; its ids are 0 .. "
      f"{size - 1}, and {size} for unused entries."
    )
  return [_pairs(*rows._arrays(), table)] if rows.sent else []


@jax.tree_util.register_pytree_node_class
class Rows(Mapping[str, RowGrads]):
  """The row gradients of a model, `{"<module path>/<table>": RowGrads}`, kept by stack.

  Tables that are stored together went through one exchange, and go through one on the way back.
  """

  def __init__(self, sent: Mapping[Owner, Sequence[Sent]], stacks: Mapping[Owner, Stack]):
    self.sent = {key: tuple(sent[key]) for key in sorted(sent)}
    self.stacks = {key: stacks[key] for key in sorted(stacks)}

  def tree_flatten(self):
    if internals.is_called_by(internals.OPTIMIZER):
      raise TypeError(
        "nnx.Optimizer.update got embed.Grads, whose rows it cannot apply. Write embed.Optimizer("
        "model, tx) instead of nnx.Optimizer(model, tx, wrt=nnx.Param)."
      )
    return internals.hide(tuple(self.sent.values())), tuple(self.stacks.items())

  @classmethod
  def tree_unflatten(cls, static, sent) -> "Rows":
    stacks = dict(static)
    self = object.__new__(cls)
    self.sent, self.stacks = dict(zip(stacks, internals.show(sent), strict=True)), stacks
    return self

  def _keys(self) -> dict[str, tuple[Owner, str]]:
    """The stack and the table behind each key."""
    return {
      Owner(owner.path, table).key: (owner, table)
      for owner, stack in self.stacks.items()
      for table in stack.tables
    }

  def __getitem__(self, key: str) -> RowGrads:
    stack_key, table = self._keys()[key]
    stack = self.stacks[stack_key]
    return RowGrads.of(_only(self.sent[stack_key], stack, table), stack, table)

  def __iter__(self) -> Iterator[str]:
    return iter(self._keys())

  def __len__(self) -> int:
    return len(self._keys())

  def __repr__(self) -> str:
    return f"Rows({list(self)})"

  def summed(self) -> "Rows":
    """With the rows summed, at their owners."""
    sent = {
      key: ([_sum_rows(self.stacks[key], sent)] if sent and self.stacks[key].accumulates else sent)
      for key, sent in self.sent.items()
    }
    return Rows(sent, self.stacks)

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Rows":
    """With `f(values)` of each table, the other tables' entries of its stack being unused ones."""
    mapped: dict[Owner, Sequence[Sent]] = {}
    for key, sent in self.summed().sent.items():
      stack = self.stacks[key]
      if not sent:
        mapped[key] = ()
      elif not stack.accumulates:
        each = [RowGrads.of(_only(sent, stack, table), stack, table) for table in stack.tables]
        mapped[key] = [x for rows in each for x in rows.map(f).sent]
      else:
        mapped[key] = [_map_owned(sent[0], stack, f)]
    return Rows(mapped, self.stacks)

  def squared_norm(self) -> jax.Array:
    norms = [_squared_norm(self.stacks[key], sent) for key, sent in self.sent.items()]
    return sum(norms, jnp.zeros(()))

  def scale(self, factor: jax.Array) -> "Rows":
    """Times a number."""
    return Rows({k: scaled(sent, factor) for k, sent in self.sent.items()}, self.stacks)


def _map_owned(owned: Sent, stack: Stack, f: Callable[[jax.Array], jax.Array]) -> Owned:
  assert isinstance(owned, Owned)
  total = jnp.zeros_like(owned.values)
  for table, config in stack.tables.items():
    ids, values = _table_rows(stack, [owned], table)
    new = jnp.where((ids < config.vocabulary_size)[:, None], f(values), 0)
    total += _own(stack, ids, new, table).values
  return Owned(owned.places, total)


# Compiled once for eager calls, which would otherwise compile their loops at every call; within
# somebody's jit, a part of it.
def _compiled(f: Callable[..., Any], *static: int) -> Callable[..., Any]:
  jitted = jax.jit(f, static_argnums=(0, *static))
  return lambda *args: sharding.settled(jitted(*args))


_table_rows = _compiled(Stack.table_rows, 2)
_sum_rows = _compiled(Stack.sum_rows)
_own = _compiled(Stack.own, 3)
_squared_norm = _compiled(Stack.squared_norm)


@jax.jit
def _squared_norm_of_pairs(ids: jax.Array, values: jax.Array) -> jax.Array:
  occ = Occurrences(ids[:, None], None, None)
  return jnp.sum(jnp.square(update.sum_rows([update.Piece(values, occ)], _INT32_MAX).values))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grads:
  """What `embed.value_and_grad` returns and `embed.Optimizer.update` takes.

  A pytree, so it goes through jit. Its ids are leaves without arithmetic: `jax.tree.map(jnp.add,
  g1, g2)`, `2 * x` and `optax.tree.norm` raise an error instead of changing them. Write `map`,
  `embed.accumulate`, `embed.global_norm` and `embed.clip_by_global_norm`, which treat rows as the
  gradients they are.

  Attributes:
    dense: an `nnx.State` of the gradients of every `nnx.Param`, for optax.
    rows: a mapping of `"<module path>/<table name>"` (of the model itself, `"<table name>"`) to
      `RowGrads`, an entry for every table, empty where nothing was looked up.

  >>> movie = embed.TableConfig(100, 2, combiner="sum", name="movie")
  >>> model = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> loss_fn = lambda model, ids: model(ids).sum()
  >>> loss, grads = embed.value_and_grad(loss_fn)(model, embed.Padded([[3, 7], [3, -1]]))
  >>> rows = grads.rows["movie"]
  >>> rows.values[rows.ids == 3].tolist()  # looked up twice
  [[2.0, 2.0]]
  """

  dense: Any
  rows: Mapping[str, RowGrads]

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Grads":
    """Applies `f` to every float array: dense gradients and each table's rows, never ids.

    Args:
      f: keeps the shape; it gets dense gradients as they are, and rows `[N, D]`.

    >>> rows = {"movie": embed.RowGrads(jnp.array([3]), jnp.array([[8.0]]))}
    >>> grads = embed.Grads({"bias": jnp.array([4.0])}, rows).map(lambda g: g / 2)
    >>> grads.dense["bias"].tolist(), grads.rows["movie"].values.tolist()
    ([2.0], [[4.0]])
    """
    rows = self.rows
    mapped = rows.map(f) if isinstance(rows, Rows) else {k: r.map(f) for k, r in rows.items()}
    return Grads(jax.tree.map(f, self.dense), mapped)


def global_norm(grads: Grads) -> jax.Array:
  """The norm of all gradients together, dense and rows: that of the equal dense gradients.

  `sqrt(sum of g²)` over all dense gradients and all rows, which are summed over duplicates before
  they are squared.

  Args:
    grads: an `embed.Grads`.

  Returns:
    A float32 scalar.

  >>> rows = {"movie": embed.RowGrads(jnp.array([3, 3]), jnp.array([[1.0], [2.0]]))}
  >>> float(embed.global_norm(embed.Grads({"bias": jnp.array([4.0])}, rows)))  # 1 + 2 and 4
  5.0
  """
  square = lambda g: jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32)))
  squares = sum(map(square, jax.tree.leaves(grads.dense)), jnp.zeros((), jnp.float32))
  rows = grads.rows
  each = [rows] if isinstance(rows, Rows) else list(rows.values())
  of_rows = sum((r.squared_norm() for r in each), jnp.zeros(()))
  return jnp.sqrt(squares + sharding.scalar_for(squares, of_rows))


def clip_by_global_norm(grads: Grads, max_norm: float) -> Grads:
  """Scales all gradients by `min(1, max_norm / global_norm(grads))`, as optax does for dense ones.

  Args:
    grads: an `embed.Grads`.
    max_norm: a positive number, or a traced scalar.

  Returns:
    The scaled `embed.Grads`. NaN in any of them makes all of them NaN.

  Raises:
    ValueError: if `max_norm` is a number that is not positive.

  >>> rows = {"movie": embed.RowGrads(jnp.array([3]), jnp.array([[3.0]]))}
  >>> grads = embed.clip_by_global_norm(embed.Grads({"bias": jnp.array([4.0])}, rows), 2.5)
  >>> grads.dense["bias"].tolist(), grads.rows["movie"].values.tolist()
  ([2.0], [[1.5]])
  """
  if isinstance(max_norm, (int, float)) and not max_norm > 0:
    raise ValueError(f"max_norm must be positive. Got {max_norm!r}.")
  rows = grads.rows
  if isinstance(rows, Rows) and not any(s.placement for s in rows.stacks.values()):
    rows = rows.summed()  # once, for the norm and for the result
  grads = Grads(grads.dense, rows)
  norm = global_norm(grads)
  factor = jnp.minimum(1, max_norm / jnp.maximum(norm, max_norm))
  scale = lambda g: g * sharding.scalar_for(g, factor).astype(g.dtype)
  if isinstance(rows, Rows):
    return Grads(jax.tree.map(scale, grads.dense), rows.scale(factor))
  return grads.map(scale)


def accumulate(grads: Sequence[Grads]) -> Grads:
  """The sum of the gradients of microbatches: that of the losses' sum.

  For the mean, divide the losses by their number, or `.map(lambda g: g / n)`.

  Args:
    grads: a sequence of `embed.Grads` of one model.

  Returns:
    One `embed.Grads`. An optimizer steps once from it, as from one large batch.

  Raises:
    ValueError: for an empty list, or gradients of different models.

  >>> one = embed.Grads({}, {"movie": embed.RowGrads(jnp.array([3]), jnp.array([[1.0]]))})
  >>> rows = embed.accumulate([one, one]).rows["movie"]  # summed by the update
  >>> rows.ids.tolist(), rows.values.tolist()
  ([3, 3], [[1.0], [1.0]])
  """
  if not grads:
    raise ValueError("accumulate takes at least one embed.Grads.")
  first = grads[0]
  if any(set(g.rows) != set(first.rows) for g in grads):
    raise ValueError("accumulate: the gradients are of different models (their tables differ).")
  dense = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(g.dense for g in grads))
  rows = [g.rows for g in grads]
  whole = [r for r in rows if isinstance(r, Rows)]
  if len(whole) == len(rows) and all(r.stacks == whole[0].stacks for r in whole):
    sent = {key: [x for r in whole for x in r.sent[key]] for key in whole[0].sent}
    return Grads(dense, Rows(sent, whole[0].stacks))
  return Grads(dense, {key: _concatenate([r[key] for r in rows]) for key in first.rows})


def _concatenate(rows: Sequence[RowGrads]) -> RowGrads:
  first = next((r for r in rows if r.stack is not None), rows[0])
  if first.stack is None:
    ids, values = (jnp.concatenate(x) for x in zip(*(r._arrays() for r in rows), strict=True))
    return RowGrads(ids, values)
  sent = [x for r in rows for x in sent_to(first.stack, first.table, r)]
  return RowGrads.of(sent, first.stack, first.table)
