"""`Grads`: dense gradients and row gradients together, to read, clip, accumulate and scale."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from embed.config import integer
from embed.engine import jax_internals, mesh, update
from embed.engine.bags import UNUSED, Bags, LookupRecord, narrow
from embed.engine.grads import ActivationGrads, DistinctRows, GradRows, sum_per_row
from embed.engine.stack import StackSpec
from embed.engine.taps import Owner
from embed.engine.update import StackGrads


def _leaves(grads: Any) -> Any:
  """The leaves of row gradients."""
  if jax_internals.caller().startswith("optax."):
    raise TypeError(
      "optax cannot compute with the rows of embed.Grads. Write embed.global_norm(grads), "
      "embed.clip_by_global_norm(grads, max_norm), embed.accumulate([grads, ...]) or grads.map(f); "
      "optax takes `grads.dense`."
    )
  return jax_internals.hide(grads)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class RowGrads:
  """The gradient of a table, as rows: row `ids[i]` has gradient `values[i]`.

  Rows are summed over duplicates, features, calls and devices, so each id occurs once, in no
  particular order; unused entries have id `vocabulary_size` and value 0. Gradients are added in
  float32, one occurrence after another: the sum of 100,000 equal gradients is off by 0.01 %, the
  sum of a million by 1 %. On a mesh, each entry is on the devices that store its row.

  `embed.value_and_grad` keeps the gradients of activations, which the update sums, and sums them
  for `grads.rows[key]`. `RowGrads` made by hand may hold duplicates, which the update sums. A
  pytree.

  Args:
    ids: integers `[N]`; negative ones are unused entries.
    values: floats `[N, D]`.
    vocabulary_size: the table's; entries with this id are unused. The update knows it in any case.
      Without it, `global_norm` counts every entry with a non-negative id.

  Raises:
    ValueError: for ids that are not integers, do not fit int32 or are above `vocabulary_size`, for
      a `vocabulary_size` that is no int from 1 to 2**31 - 1, or for other shapes.

  >>> rows = embed.RowGrads(jnp.array([4, 2]), jnp.ones((2, 3)))
  >>> rows.ids.tolist(), rows.values.shape
  ([4, 2], (2, 3))
  >>> rows = embed.RowGrads(jnp.array([4, 10]), jnp.array([[3.0], [7.0]]), vocabulary_size=10)
  >>> float(rows.squared_norm())
  9.0
  """

  ids: jax.Array  # int32 `[N]`; `vocabulary_size` marks an unused entry
  values: jax.Array  # `[N, D]`, the gradients of these rows
  size: int  # of the table, `UNUSED` if it is not known
  stack: StackSpec | None  # in which each entry occurs once, on the devices that store its row
  trains: bool = True  # False for a frozen table

  def __init__(self, ids: Any, values: Any, vocabulary_size: int | None = None):
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.dtype.kind == "m":
      raise ValueError(f"RowGrads takes integer ids, got dtype {ids.dtype}.")
    size = UNUSED
    if vocabulary_size is not None:
      size = integer("vocabulary_size", vocabulary_size, 1, UNUSED)
    if _largest(ids) > size:
      raise ValueError(f"RowGrads takes ids up to {size}, got {_largest(ids)}.")
    ids, values = jnp.asarray(narrow(ids, size)), jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
      raise ValueError(f"RowGrads takes real values, got dtype {values.dtype}. Give the real part.")
    if ids.ndim != 1 or values.ndim != 2 or ids.shape[0] != values.shape[0]:
      raise ValueError(
        f"RowGrads takes ids [N] and values [N, D]; got shapes {ids.shape} and {values.shape}."
      )
    self.__dict__.update(ids=ids, values=values, size=size, stack=None, trains=True)

  @classmethod
  def of(
    cls, ids: Any, values: Any, size: int, stack: StackSpec | None, trains: bool = True
  ) -> "RowGrads":
    """Row gradients of arrays that are known to fit."""
    self = object.__new__(cls)
    self.__dict__.update(ids=ids, values=values, size=size, stack=stack, trains=trains)
    return self

  def __repr__(self) -> str:
    return f"RowGrads(ids={self.ids}, values={self.values})"

  def tree_flatten(self):
    return _leaves((self.ids, self.values)), (self.size, self.stack, self.trains)

  @classmethod
  def tree_unflatten(cls, static, arrays) -> "RowGrads":
    return cls.of(*jax_internals.show(arrays), *static)

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "RowGrads":
    """The same rows with `f(values)`, `[N, D]` to `[N, D]`.

    >>> rows = embed.RowGrads(jnp.array([4]), jnp.array([[3.0, -4.0]]))
    >>> rows.map(lambda g: jnp.clip(g, -1, 1)).values.tolist()
    [[1.0, -1.0]]
    """
    values = f(self.values)
    if self.stack is not None:  # f of an unused entry is nothing
      values = jnp.where((self.ids < self.size)[:, None], values, 0)
    return RowGrads.of(self.ids, values, self.size, self.stack, self.trains)

  def squared_norm(self) -> jax.Array:
    """The sum of the squares of the summed rows, a float32 scalar: of one table alone.

    >>> float(embed.RowGrads(jnp.array([4, 4]), jnp.array([[1.0], [2.0]])).squared_norm())
    9.0
    """
    if self.stack is not None:  # summed already
      return jnp.sum(jnp.square(self.values.astype(jnp.float32)))
    return _squared_norm_of_pairs(self.ids, self.values, self.size)


def _largest(ids: Any) -> int:
  """The largest id, -1 for none or as far as this process cannot see; also inside of jit."""
  is_known = not jax_internals.is_traced(ids) and getattr(ids, "is_fully_addressable", True)
  return int(np.asarray(ids).max()) if is_known and ids.size else -1


def _pairs(ids: jax.Array, values: jax.Array, table: str) -> ActivationGrads:
  return ActivationGrads((values,), LookupRecord((Bags(ids[:, None]),), (table,)))


def for_stack(stack: StackSpec, table: str, rows: RowGrads) -> StackGrads:
  """A table's `RowGrads` as gradients of a stack."""
  ids, values, size = rows.ids, rows.values, stack.size(table)
  if rows.stack == stack and rows.size == size:
    return _from_table_rows(stack, ids, values, table)
  if rows.size not in (size, UNUSED):
    raise ValueError(
      f"The row gradients of table {table!r} are of a table of {rows.size} rows, it has {size}. "
      "Take them with embed.value_and_grad of this model."
    )
  if values.shape[1] != stack.dim:
    raise ValueError(
      f"The row gradients of table {table!r} have {values.shape[1]} columns, its dim is "
      f"{stack.dim}."
    )
  if _largest(ids) > size:
    raise ValueError(
      f"The row gradients of table {table!r} have id {_largest(ids)}; its ids are 0 .. "
      f"{size - 1}, and {size} for unused entries."
    )
  return _pairs(ids, values, table)


def by_stack(
  stack_of: Mapping[str, StackSpec], rows: Mapping[str, RowGrads]
) -> dict[str, list[StackGrads]]:
  """The `RowGrads` of some tables as gradients of their stacks, by stack name.

  Raises:
    ValueError: as `for_stack`.
  """
  grads: dict[str, list[StackGrads]] = {}
  for name, stack in stack_of.items():
    if name in rows:
      of_stack = grads.setdefault(stack.name, [])
      of_stack += [for_stack(stack, name, rows[name])] if rows[name].ids.size else []
  return grads


@jax.tree_util.register_pytree_node_class
class Rows(Mapping[str, RowGrads]):
  """The row gradients of a model, `{"<module path>/<table>": RowGrads}`, kept by stack.

  The gradients of tables that are stored together go through one exchange in the update, as their
  ids did in the lookup.
  """

  def __init__(
    self, grads: Mapping[Owner, Sequence[StackGrads]], stacks: Mapping[Owner, StackSpec]
  ):
    self.grads = {key: tuple(grads[key]) for key in sorted(grads)}
    self.stacks = {key: stacks[key] for key in sorted(stacks)}

  def tree_flatten(self):
    if jax_internals.is_called_by(jax_internals.OPTIMIZER):
      raise TypeError(
        "nnx.Optimizer.update got embed.Grads, whose rows it cannot apply. Write embed.Optimizer("
        "model, tx) instead of nnx.Optimizer(model, tx, wrt=nnx.Param)."
      )
    return _leaves(tuple(self.grads.values())), tuple(self.stacks.items())

  @classmethod
  def tree_unflatten(cls, static, grads) -> "Rows":
    stacks = dict(static)
    self = object.__new__(cls)
    self.grads, self.stacks = dict(zip(stacks, jax_internals.show(grads), strict=True)), stacks
    return self

  def _keys(self) -> dict[str, tuple[Owner, str]]:
    """The stack and the table of each key."""
    return {
      Owner(owner.path, table).key: (owner, table)
      for owner, stack in self.stacks.items()
      for table in stack.tables
    }

  def __getitem__(self, key: str) -> RowGrads:
    stack_key, table = self._keys()[key]
    stack = self.stacks[stack_key]
    ids, values = _table_rows(stack, self.grads[stack_key], table)
    return RowGrads.of(ids, values, stack.size(table), stack, not _is_frozen(stack))

  def __iter__(self) -> Iterator[str]:
    return iter(self._keys())

  def __len__(self) -> int:
    return len(self._keys())

  def __repr__(self) -> str:
    return f"Rows({list(self)})"

  def summed(self) -> "Rows":
    """Sums the gradients of each row, on the devices that store the rows."""
    summed: dict[Owner, Sequence[StackGrads]] = {}
    for key, grads in self.grads.items():
      summed[key] = [_sum_rows(self.stacks[key], grads)] if grads else grads
    return Rows(summed, self.stacks)

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Rows":
    """Applies `f` to the values of each table; `f` sees entries of other tables as unused."""
    mapped: dict[Owner, Sequence[StackGrads]] = {}
    for key, grads in self.summed().grads.items():
      mapped[key] = [_map_distinct(grads[0], self.stacks[key], f)] if grads else ()
    return Rows(mapped, self.stacks)

  def squared_norm(self) -> jax.Array:
    """The sum of the squares of all rows that train."""
    trained = {key: stack for key, stack in self.stacks.items() if not _is_frozen(stack)}
    norms = [_squared_norm(stack, self.grads[key]) for key, stack in trained.items()]
    return sum(norms, jnp.zeros(()))

  def scale(self, factor: jax.Array) -> "Rows":
    """Multiplies all gradients by a scalar."""
    return Rows({k: update.scaled(x, factor) for k, x in self.grads.items()}, self.stacks)


def _is_frozen(stack: StackSpec) -> bool:
  return stack.optimizer is not None and stack.optimizer.equation is None


def _map_distinct(
  grads: StackGrads, stack: StackSpec, f: Callable[[jax.Array], jax.Array]
) -> DistinctRows:
  assert isinstance(grads, DistinctRows)
  total = jnp.zeros_like(grads.values)
  for table, size in zip(stack.tables, stack.layout.sizes, strict=True):
    ids, values = _table_rows(stack, [grads], table)
    new = jnp.where((ids < size)[:, None], f(values), 0)
    total += _from_table_rows(stack, ids, new, table).values
  return DistinctRows(grads.ids, total)


# Eager calls are compiled once, or their loops would be compiled at every call. Under a user's jit
# these functions are part of that program.
def _compiled(f: Callable[..., Any], *static: int) -> Callable[..., Any]:
  jitted = jax.jit(f, static_argnums=(0, *static))
  return lambda *args: mesh.settled(jitted(*args))


_table_rows = _compiled(update.table_rows, 2)
_sum_rows = _compiled(update.sum_rows)
_from_table_rows = _compiled(update.from_table_rows, 3)
_squared_norm = _compiled(update.squared_norm)


@functools.partial(jax.jit, static_argnums=2)
def _squared_norm_of_pairs(ids: jax.Array, values: jax.Array, size: int) -> jax.Array:
  grads = GradRows(values.astype(jnp.float32), ids[:, None])
  return jnp.sum(jnp.square(sum_per_row([grads], size).values))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grads:
  """Gradients of a model, from `embed.value_and_grad` and for `embed.Optimizer.update`.

  A pytree, so it goes through jit. Its ids are leaves without arithmetic: `jax.tree.map(jnp.add,
  g1, g2)`, `2 * x` and `optax.tree.norm` raise an error instead of changing them. Use `map`,
  `embed.accumulate`, `embed.global_norm` and `embed.clip_by_global_norm`, which change the
  gradients of rows and never their ids.

  Attributes:
    dense: an `nnx.State` of the gradients of every `nnx.Param`, for optax.
    rows: a mapping from `"<module path>/<table name>"` (`"<table name>"` if the model itself is
      the layer) to `RowGrads`. Every table has an entry, empty if nothing was looked up.

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
      f: a function that keeps the shape. It gets dense gradients as they are, and rows as
        `[N, D]`.

    >>> rows = {"movie": embed.RowGrads(jnp.array([3]), jnp.array([[8.0]]))}
    >>> grads = embed.Grads({"bias": jnp.array([4.0])}, rows).map(lambda g: g / 2)
    >>> grads.dense["bias"].tolist(), grads.rows["movie"].values.tolist()
    ([2.0], [[4.0]])
    """
    rows = self.rows
    mapped = rows.map(f) if isinstance(rows, Rows) else {k: r.map(f) for k, r in rows.items()}
    return Grads(jax.tree.map(f, self.dense), mapped)


def global_norm(grads: Grads) -> jax.Array:
  """The norm of all gradients together, dense and rows.

  It is `sqrt(sum of g²)` over all dense gradients and all rows, where rows are summed over
  duplicates before they are squared. Dense gradients of the tables would have the same norm. Rows
  of `frozen` tables do not count.

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
  each = [rows] if isinstance(rows, Rows) else [r for r in rows.values() if r.trains]
  of_rows = sum((r.squared_norm() for r in each), jnp.zeros(()))
  return jnp.sqrt(squares + mesh.like(of_rows, squares))


def clip_by_global_norm(grads: Grads, max_norm: float) -> Grads:
  """Scales all gradients by `min(1, max_norm / global_norm(grads))`, as optax does for dense ones.

  Args:
    grads: an `embed.Grads`.
    max_norm: a positive number, or a traced scalar.

  Returns:
    The scaled `embed.Grads`. NaN in any of them makes all of them NaN.

  Raises:
    TypeError: if `grads` are no `embed.Grads`.
    ValueError: if `max_norm` is a number that is not positive.

  >>> rows = {"movie": embed.RowGrads(jnp.array([3]), jnp.array([[3.0]]))}
  >>> grads = embed.clip_by_global_norm(embed.Grads({"bias": jnp.array([4.0])}, rows), 2.5)
  >>> grads.dense["bias"].tolist(), grads.rows["movie"].values.tolist()
  ([2.0], [[1.5]])
  """
  if not isinstance(grads, Grads):
    raise TypeError(
      f"clip_by_global_norm takes embed.Grads, got {type(grads)}. Write `loss, grads = "
      "embed.value_and_grad(loss_fn)(model, ...)`, then clip `grads`."
    )
  if isinstance(max_norm, (int, float)) and not max_norm > 0:
    raise ValueError(f"max_norm must be positive. Got {max_norm!r}.")
  rows = grads.rows
  if isinstance(rows, Rows) and all(s.placement.is_local for s in rows.stacks.values()):
    rows = rows.summed()  # once, for the norm and for the result
  grads = Grads(grads.dense, rows)
  norm = global_norm(grads)
  is_clipped = ~(norm <= max_norm)  # True for NaN
  factor = jnp.where(is_clipped, max_norm / jnp.where(is_clipped, norm, 1.0), 1.0)
  scale = lambda g: g * mesh.like(factor, g).astype(g.dtype)
  if isinstance(rows, Rows):
    return Grads(jax.tree.map(scale, grads.dense), rows.scale(factor))
  return grads.map(scale)


def accumulate(grads: Sequence[Grads]) -> Grads:
  """Adds up the gradients of microbatches: the gradient of the sum of their losses.

  For the mean of n losses, write `.map(lambda g: g / n)`.

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
    together = {key: [x for r in whole for x in r.grads[key]] for key in whole[0].grads}
    return Grads(dense, Rows(together, whole[0].stacks))
  return Grads(dense, {key: _concatenate([r[key] for r in rows]) for key in first.rows})


def _concatenate(rows: Sequence[RowGrads]) -> RowGrads:
  sizes = {r.size for r in rows}
  if len(sizes - {UNUSED}) > 1:
    raise ValueError(f"accumulate: row gradients of tables of {sorted(sizes)} rows.")
  # An array that is split by its type cannot be concatenated along its rows.
  whole = lambda r, x: x if r.stack is None else r.stack.placement.put(x, P())
  ids = jnp.concatenate([whole(r, r.ids) for r in rows])
  values = jnp.concatenate([whole(r, r.values) for r in rows])
  if _largest(ids) > min(sizes):
    raise ValueError(
      f"accumulate: row gradients of a table of {min(sizes)} rows, and id {_largest(ids)} of "
      "another one."
    )
  return RowGrads.of(ids, values, min(sizes), None, all(r.trains for r in rows))
