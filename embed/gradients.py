"""`Grads`: dense gradients and row gradients together, to read, clip, accumulate and scale."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from embed.config import integer
from embed.engine import mesh, update
from embed.engine.bags import UNUSED, Bags, LookupRecord, narrow
from embed.engine.grads import ActivationGrads, DistinctRows, GradRows, sum_per_row
from embed.engine.stack import StackSpec
from embed.engine.update import StackGrads
from embed.engine.xla import is_traced

# --- rows as users see them -----------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class RowGrads:
  """The gradient of a table, as rows: row `ids[i]` has gradient `values[i]`. A pytree.

  From `grads.rows[key]`, rows are summed over duplicates, features, calls and devices: each id
  occurs once, in no particular order, and unused entries have id `vocabulary_size` and value 0. On
  a mesh, each entry is on the devices that store its row. The update sums duplicates of `RowGrads`
  made by hand.

  Args:
    ids: integers `[N]`; negative ones are unused entries.
    values: floats `[N, D]`.
    vocabulary_size: the table's; entries with this id are unused. The update knows it in any case.
      Without it, `global_norm` counts every entry with a non-negative id.

  Raises:
    ValueError: for ids that are not integers or do not fit, or for other shapes.

  >>> rows = embed.RowGrads(jnp.array([4, 10]), jnp.array([[3.0], [7.0]]), vocabulary_size=10)
  >>> float(rows.squared_norm())
  9.0
  """

  ids: jax.Array  # int32 `[N]`; `vocabulary_size` marks an unused entry
  values: jax.Array  # `[N, D]`, the gradients of these rows
  size: int  # of the table, `UNUSED` if it is not known
  stack: StackSpec | None  # if each entry occurs once, on the devices that store its row
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
    return (self.ids, self.values), (self.size, self.stack, self.trains)

  @classmethod
  def tree_unflatten(cls, static, arrays) -> "RowGrads":
    return cls.of(*arrays, *static)

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "RowGrads":
    """The same rows with `f(values)`, `[N, D]` to `[N, D]`."""
    values = f(self.values)
    if self.stack is not None:  # f of an unused entry is nothing
      values = jnp.where((self.ids < self.size)[:, None], values, 0)
    return RowGrads.of(self.ids, values, self.size, self.stack, self.trains)

  def squared_norm(self) -> jax.Array:
    """The sum of the squares of the summed rows, a float32 scalar."""
    if self.stack is not None:  # summed already
      return jnp.sum(jnp.square(self.values.astype(jnp.float32)))
    return _squared_norm_of_pairs(self.ids, self.values, self.size)


def _largest(ids: Any) -> int:
  """The largest id, -1 for none or as far as this process cannot see; also inside of jit."""
  is_known = not is_traced(ids) and getattr(ids, "is_fully_addressable", True)
  return int(np.asarray(ids).max()) if is_known and ids.size else -1


@functools.partial(jax.jit, static_argnums=2)
def _squared_norm_of_pairs(ids: jax.Array, values: jax.Array, size: int) -> jax.Array:
  grads = GradRows(values.astype(jnp.float32), ids[:, None])
  return jnp.sum(jnp.square(sum_per_row([grads], size).values))


def by_stack(
  stack_of: Mapping[str, StackSpec], rows: Mapping[str, RowGrads]
) -> dict[str, list[StackGrads]]:
  """The `RowGrads` of some tables as gradients of their stacks, by stack name.

  Raises:
    ValueError: if they do not fit a table.
  """
  grads: dict[str, list[StackGrads]] = {}
  for name, stack in stack_of.items():
    if name in rows:
      of_stack = grads.setdefault(stack.name, [])
      of_stack += [_for_stack(stack, name, rows[name])] if rows[name].ids.size else []
  return grads


def _for_stack(stack: StackSpec, table: str, rows: RowGrads) -> StackGrads:
  """A table's `RowGrads` as gradients of its stack."""
  ids, values, size = rows.ids, rows.values, stack.size(table)
  if ids.dtype != np.int32:
    raise ValueError(f"The row gradients of table {table!r} have ids of {ids.dtype}: {ARITHMETIC}")
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
  return ActivationGrads((values,), LookupRecord((Bags(ids[:, None]),), (table,)))


# --- rows as they are kept ------------------------------------------------------------------------


class Owner(NamedTuple):
  """A stack or a table of a model: the path of its module, "a/b", and its own name."""

  path: str
  name: str

  @property
  def key(self) -> str:
    return f"{self.path}/{self.name}" if self.path else self.name


ARITHMETIC = (
  "arithmetic such as jax.tree.map(jnp.add, g1, g2) or 2 * x has changed the ids of rows as well. "
  "Write embed.accumulate([g1, g2]) or grads.map(lambda g: 2 * g)."
)


_ONE = np.int32(1)


@jax.tree_util.register_pytree_node_class
class Rows(Mapping[str, RowGrads]):
  """The row gradients of a model, `{"<module path>/<table>": RowGrads}`, kept by stack. A pytree.

  They stay gradients of activations until they are read. The gradients of tables that are stored
  together go through one exchange in the update, as their ids did in the lookup.

  One leaf, `one`, is the number 1: arithmetic on leaves, which would change ids, changes it too.
  """

  def __init__(
    self,
    grads: Mapping[Owner, Sequence[StackGrads]],
    stacks: Mapping[Owner, StackSpec],
    one: Any = _ONE,
  ):
    self.grads = {key: tuple(grads[key]) for key in sorted(grads)}
    self.stacks = {key: stacks[key] for key in sorted(stacks)}
    self.one = one
    self._sums: dict[Owner, DistinctRows] = {}

  def tree_flatten(self):
    return (self.one, *self.grads.values()), tuple(self.stacks.items())

  @classmethod
  def tree_unflatten(cls, static, leaves) -> "Rows":
    self, stacks = object.__new__(cls), dict(static)
    one, *grads = leaves
    self.grads, self.stacks = dict(zip(stacks, grads, strict=True)), stacks
    self.one, self._sums = one, {}
    return self

  def checked(self) -> "Rows":
    """The same gradients, or NaN if arithmetic has changed the ids in a jitted function.

    Raises:
      ValueError: if arithmetic has changed them elsewhere.
    """
    is_integer = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.integer)
    ids = [bag.ids for x in self._calls() for bag in x.record.bags]
    if not all(map(is_integer, [self.one, *ids])) or (not is_traced(self.one) and self.one != 1):
      raise ValueError(f"These are no gradients: {ARITHMETIC}")
    return self.scale(jnp.where(self.one == 1, 1.0, jnp.nan)) if is_traced(self.one) else self

  def _calls(self) -> list[ActivationGrads]:
    return [x for grads in self.grads.values() for x in grads if isinstance(x, ActivationGrads)]

  @functools.cached_property
  def _tables(self) -> dict[str, tuple[Owner, str]]:
    """The stack and the table of each key."""
    return {
      Owner(owner.path, table).key: (owner, table)
      for owner, stack in self.stacks.items()
      for table in stack.tables
    }

  def __getitem__(self, key: str) -> RowGrads:
    owner, table = self._tables[key]
    stack, grads = self.stacks[owner], self.grads[owner]
    number = update.most_rows(stack, grads, table)
    if number:
      ids, values = _pick(stack, self._sum(owner), table, number)
    else:
      ids, values = jnp.zeros(0, jnp.int32), jnp.zeros((0, stack.dim), jnp.float32)
    return RowGrads.of(ids, values, stack.size(table), stack, not _is_frozen(stack))

  def __iter__(self) -> Iterator[str]:
    return iter(self._tables)

  def __len__(self) -> int:
    return len(self._tables)

  def __repr__(self) -> str:
    return f"Rows({list(self)})"

  def _sum(self, owner: Owner) -> DistinctRows:
    """The summed gradients of a stack's rows, on the devices that store them."""
    if owner not in self._sums:
      self._sums[owner] = _sum_rows(self.stacks[owner], self.grads[owner])
    return self._sums[owner]

  def summed(self) -> "Rows":
    """Sums the gradients of each row, on the devices that store the rows."""
    summed = {key: [self._sum(key)] if grads else () for key, grads in self.grads.items()}
    return Rows(summed, self.stacks, self.one)

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Rows":
    """Applies `f` to the values of each table; `f` sees entries of other tables as unused."""
    mapped = {
      key: [_map_distinct(self._sum(key), self.stacks[key], f)] if grads else ()
      for key, grads in self.grads.items()
    }
    return Rows(mapped, self.stacks, self.one)

  def squared_norm(self) -> jax.Array:
    """The sum of the squares of all rows that train."""
    trained = {key: stack for key, stack in self.stacks.items() if not _is_frozen(stack)}
    norms = [_squared_norm(stack, self.grads[key]) for key, stack in trained.items()]
    return sum(norms, jnp.zeros(()))

  def scale(self, factor: jax.Array) -> "Rows":
    """Multiplies all gradients by a scalar."""
    scaled = {key: update.scaled(grads, factor) for key, grads in self.grads.items()}
    return Rows(scaled, self.stacks, self.one)


def _is_frozen(stack: StackSpec) -> bool:
  return stack.optimizer is not None and stack.optimizer.equation is None


def _map_distinct(
  summed: DistinctRows, stack: StackSpec, f: Callable[[jax.Array], jax.Array]
) -> DistinctRows:
  total = jnp.zeros_like(summed.values)
  for table, size in zip(stack.tables, stack.layout.sizes, strict=True):
    ids, values = _pick(stack, summed, table, None)
    new = jnp.where((ids < size)[:, None], f(values), 0)
    total += _from_table_rows(stack, ids, new, table).values
  return DistinctRows(summed.ids, total)


# Eager calls are compiled once, or their loops would be compiled at every call. Under a user's jit
# these functions are part of that program.
def _compiled(f: Callable[..., Any], *static: int) -> Callable[..., Any]:
  jitted = jax.jit(f, static_argnums=(0, *static))
  return lambda *args: mesh.settled(jitted(*args))


_pick = _compiled(update.pick_table, 2, 3)
_sum_rows = _compiled(update.sum_rows)
_from_table_rows = _compiled(update.from_table_rows, 3)
_squared_norm = _compiled(update.squared_norm)


# --- all gradients of a model ---------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grads:
  """Gradients of a model, from `embed.value_and_grad` and for `embed.Optimizer.update`. A pytree.

  Use `map`, `embed.accumulate`, `embed.global_norm` and `embed.clip_by_global_norm`, which change
  the gradients of rows and never their ids. The update refuses gradients whose ids arithmetic on
  the leaves has changed, such as `jax.tree.map(jnp.add, g1, g2)`; in a jitted function, they are
  NaN.

  Attributes:
    dense: an `nnx.State` of the gradients of every `nnx.Param`, for optax.
    rows: a mapping from `"<module path>/<table name>"` (`"<table name>"` if the model itself is
      the layer) to `RowGrads`. Every table has an entry, empty if nothing was looked up.
  """

  dense: Any
  rows: Mapping[str, RowGrads]

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Grads":
    """Applies `f` to every float array: dense gradients and each table's rows, never ids.

    Args:
      f: a function that keeps the shape. It gets dense gradients as they are, and rows as
        `[N, D]`.
    """
    rows = self.rows
    mapped = rows.map(f) if isinstance(rows, Rows) else {k: r.map(f) for k, r in rows.items()}
    return Grads(jax.tree.map(f, self.dense), mapped)


def global_norm(grads: Grads) -> jax.Array:
  """The norm of all gradients together, a float32 scalar.

  It is `sqrt(sum of g²)` over all dense gradients and all rows, where rows are summed over
  duplicates before they are squared. Dense gradients of the tables would have the same norm. Rows
  of `frozen` tables do not count.
  """
  square = lambda g: jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32)))
  squares = sum(map(square, jax.tree.leaves(grads.dense)), jnp.zeros((), jnp.float32))
  rows = grads.rows
  each = [rows] if isinstance(rows, Rows) else [r for r in rows.values() if r.trains]
  of_rows = sum((r.squared_norm() for r in each), jnp.zeros(()))
  return jnp.sqrt(squares + mesh.like(of_rows, squares))


def clip_by_global_norm(grads: Grads, max_norm: float) -> Grads:
  """Scales all gradients by `min(1, max_norm / global_norm(grads))`, as optax does for dense ones.

  NaN in any of them makes all of them NaN.

  Args:
    grads: from `embed.value_and_grad`.
    max_norm: a positive number, or a traced scalar.

  Raises:
    TypeError: if `grads` are no `embed.Grads`.
    ValueError: if `max_norm` is a number that is not positive.
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
  norm = global_norm(Grads(grads.dense, rows))
  is_clipped = ~(norm <= max_norm)  # True for NaN
  factor = jnp.where(is_clipped, max_norm / jnp.where(is_clipped, norm, 1.0), 1.0)
  scale = lambda g: g * mesh.like(factor, g).astype(g.dtype)
  if isinstance(rows, Rows):
    return Grads(jax.tree.map(scale, grads.dense), rows.scale(factor))
  return Grads(grads.dense, rows).map(scale)


def accumulate(grads: Sequence[Grads]) -> Grads:
  """Adds up the gradients of microbatches: the gradient of the sum of their losses.

  For the mean of n losses, write `.map(lambda g: g / n)`. An optimizer steps once from the result,
  as from one large batch.

  Raises:
    ValueError: for an empty list, or gradients of different models.
  """
  if not grads:
    raise ValueError("accumulate takes at least one embed.Grads.")
  first = grads[0]
  if any(set(g.rows) != set(first.rows) for g in grads):
    raise ValueError("accumulate: the gradients are of different models (their tables differ).")
  dense = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(g.dense for g in grads))
  rows = [g.rows for g in grads]
  kept = [r.checked() for r in rows if isinstance(r, Rows)]
  if len(kept) == len(rows) and all(r.stacks == kept[0].stacks for r in kept):
    together = {key: [x for r in kept for x in r.grads[key]] for key in kept[0].grads}
    return Grads(dense, Rows(together, kept[0].stacks))
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
