"""`Grads`: dense gradients and row gradients together, to read, clip, accumulate and scale."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx

from embed.engine import mesh, update
from embed.engine.grads import ActivationGrads, DistinctRows
from embed.engine.stack import StackSpec
from embed.engine.update import StackGrads
from embed.engine.xla import is_traced

# --- rows as users see them -----------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGrads:
  """The gradient of a table, as rows: row `ids[i]` has gradient `values[i]`. A pytree.

  `grads.rows[key]` returns it. Gradients are summed over duplicates, features, calls and devices:
  each id occurs once, in any order. On a mesh, each entry is on the devices that store its row.

  Attributes:
    ids: int32 `[N]`; unused entries have the id `vocabulary_size`, and value 0.
    values: float32 `[N, D]`.
  """

  ids: jax.Array
  values: jax.Array

  def squared_norm(self) -> jax.Array:
    """The sum of the squared values, a float32 scalar."""
    return jnp.sum(jnp.square(self.values))


# --- rows as they are kept ------------------------------------------------------------------------


class Owner(NamedTuple):
  """A stack or a table of a model: the path of its module, such as "a/b", and its own name."""

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
    self._sums: nnx.Variable[dict[Owner, DistinctRows]] = nnx.Variable({})

  def tree_flatten(self):
    return (self.one, *self.grads.values()), tuple(self.stacks.items())

  @classmethod
  def tree_unflatten(cls, static, leaves) -> "Rows":
    self, stacks = object.__new__(cls), dict(static)
    one, *grads = leaves
    self.grads, self.stacks = dict(zip(stacks, grads, strict=True)), stacks
    self.one, self._sums = one, nnx.Variable({})
    return self

  def checked(self) -> "Rows":
    """The same gradients, or NaN if arithmetic has changed the ids in a jitted function.

    Raises:
      ValueError: if arithmetic has changed them elsewhere.
    """
    is_integer = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.integer)
    calls = [x for x in itertools.chain(*self.grads.values()) if isinstance(x, ActivationGrads)]
    ids = [bag.ids for x in calls for bag in x.record.bags]
    is_changed = not is_traced(self.one) and np.asarray(self.one) != 1
    if is_changed or not all(map(is_integer, [self.one, *ids])):
      raise ValueError(f"These are not gradients: {ARITHMETIC}")
    return self.scale(jnp.where(self.one == 1, 1.0, jnp.nan)) if is_traced(self.one) else self

  @property
  def is_summed(self) -> bool:
    """True if the gradients of each row are summed, as after `map`."""
    return any(isinstance(x, DistinctRows) for x in itertools.chain(*self.grads.values()))

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
      return RowGrads(*_pick(stack, self._sum(owner), table, number))
    return RowGrads(jnp.zeros(0, jnp.int32), jnp.zeros((0, stack.dim), jnp.float32))

  def __iter__(self) -> Iterator[str]:
    return iter(self._tables)

  def __len__(self) -> int:
    return len(self._tables)

  def __repr__(self) -> str:
    return f"Rows({list(self)})"

  def _sum(self, owner: Owner) -> DistinctRows:
    """The summed gradients of a stack's rows, on the devices that store them."""
    sums = self._sums.get_value()
    if owner not in sums:
      sums = {**sums, owner: _sum_rows(self.stacks[owner], self.grads[owner])}
      with contextlib.suppress(errors.TraceContextError):  # in an inner trace, the sum ends with it
        self._sums.set_value(sums)
    return sums[owner]

  def summed(self) -> "Rows":
    """Sums the gradients of each row, on the devices that store the rows."""
    summed = {key: [self._sum(key)] if grads else () for key, grads in self.grads.items()}
    return Rows(summed, self.stacks, self.one)

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Rows":
    """Applies `f` to the values of each table in turn: `[N, D]`, 0 in entries of other tables."""
    return self._changed(dict.fromkeys(self, functools.partial(_mapped, f)))

  def filter(self, keep: Mapping[str, Callable[[jax.Array], jax.Array]]) -> "Rows":
    """Turns the entries of tables whose ids are not kept into unused ones."""
    if unknown := sorted(keep.keys() - self._tables.keys()):
      raise ValueError(f"filter: there is no table {unknown[0]!r}; the tables are {list(self)}.")
    return self._changed({key: functools.partial(_filtered, f) for key, f in keep.items()})

  def _changed(self, changes: Mapping[str, Callable[..., DistinctRows]]) -> "Rows":
    """Sums the gradients of some tables' stacks, and changes them by `f(stack, table, summed)`."""
    sums: dict[Owner, DistinctRows] = {}
    for key, change in changes.items():
      owner, table = self._tables[key]
      if self.grads[owner]:
        summed = sums[owner] if owner in sums else self._sum(owner)
        sums[owner] = change(self.stacks[owner], table, summed)
    return Rows(self.grads | {owner: (x,) for owner, x in sums.items()}, self.stacks, self.one)

  def squared_norm(self) -> jax.Array:
    """The sum of the squared values of all rows that are trained."""
    is_frozen = lambda optimizer: optimizer is not None and optimizer.equation is None
    norms = [
      _squared_norm(stack, self.grads[key])
      for key, stack in self.stacks.items()
      if not is_frozen(stack.optimizer)
    ]
    return sum(norms, jnp.zeros(()))

  def scale(self, factor: jax.Array) -> "Rows":
    """Multiplies all gradients by a scalar."""
    scaled = {key: update.scaled(grads, factor) for key, grads in self.grads.items()}
    return Rows(scaled, self.stacks, self.one)


def _mapped(f: Any, stack: StackSpec, table: str, summed: DistinctRows) -> DistinctRows:
  ids, values = _pick(stack, summed, table, None)
  is_own = (ids < stack.size(table))[:, None]
  return DistinctRows(summed.ids, jnp.where(is_own, f(values), summed.values))


def _filtered(keep: Any, stack: StackSpec, table: str, summed: DistinctRows) -> DistinctRows:
  ids, _ = _pick(stack, summed, table, None)
  kept = stack.placement.prepare(keep, ids, like=ids)
  if jnp.shape(kept) != ids.shape or jnp.result_type(kept) != jnp.bool_:
    raise ValueError(
      f"filter: the function of table {table!r} must return a bool for each id, {ids.shape}, as "
      f"`lambda ids: ids >= 1000` does. Got {kept!r}."
    )
  is_removed = ~mesh.like(kept, ids) & (ids < stack.size(table))
  values = jnp.where(is_removed[:, None], 0, summed.values)
  return DistinctRows(jnp.where(is_removed, stack.layout.shard_rows, summed.ids), values)


# Eager calls are compiled once, or their loops would be compiled at every call. Under a user's jit
# these functions are part of that program.
def _compiled(f: Callable[..., Any], *static: int) -> Callable[..., Any]:
  jitted = jax.jit(f, static_argnums=(0, *static))
  return lambda *args: mesh.settled(jitted(*args))


_pick = _compiled(update.pick_table, 2, 3)
_sum_rows = _compiled(update.sum_rows)
_squared_norm = _compiled(update.squared_norm)


# --- all gradients of a model ---------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grads:
  """Gradients of a model, from `embed.value_and_grad` and for `embed.Optimizer.update`. A pytree.

  Use `map`, `embed.accumulate`, `embed.global_norm` and `embed.clip_by_global_norm`, which never
  change the ids of rows. Arithmetic on the leaves, such as `jax.tree.map(jnp.add, g1, g2)`, does:
  the update refuses such gradients; in a jitted function, they become NaN.

  Attributes:
    dense: an `nnx.State` of the gradients of every `nnx.Param`, for optax.
    rows: a mapping from `"<module path>/<table name>"` (`"<table name>"` if the model itself is
      the layer) to `RowGrads`, to read. Every table has an entry, empty if nothing was looked up.
  """

  dense: Any
  rows: Rows

  def map(self, f: Callable[[jax.Array], jax.Array]) -> "Grads":
    """Applies `f` to every float array: dense gradients and each table's rows, never ids.

    Args:
      f: a function that keeps the shape. It gets dense gradients as they are, and rows as
        `[N, D]`.
    """
    return Grads(jax.tree.map(f, self.dense), self.rows.map(f))

  def filter(self, keep: Mapping[str, Callable[[jax.Array], jax.Array]]) -> "Grads":
    """Keeps the gradients of some rows of a table; the update never touches its other rows.

    These rows and their slots stay bit-identical, where weight decay and momentum would move rows
    with a gradient of 0, and count in no norm. Tables that are not named train as before.

    Args:
      keep: `f(ids)` for some of the keys of `rows`: it gets int32 `[N]`, with `vocabulary_size` in
        unused entries, and returns bool `[N]`, True for the rows to train.

    Raises:
      ValueError: for an unknown key, or a function that returns anything else.
    """
    return Grads(self.dense, self.rows.filter(keep))


def global_norm(grads: Grads) -> jax.Array:
  """The L2 norm of all gradients together, a float32 scalar.

  It is `sqrt(sum of g²)` over all dense gradients and all rows, where rows are summed over
  duplicates before they are squared. Dense gradients of the tables would have the same norm. Rows
  of `frozen` tables do not count.
  """
  square = lambda g: jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32)))
  squares = sum(map(square, jax.tree.leaves(grads.dense)), jnp.zeros((), jnp.float32))
  return jnp.sqrt(squares + mesh.like(grads.rows.squared_norm(), squares))


def clip_by_global_norm(grads: Grads, max_norm: float) -> Grads:
  """Scales all gradients by `min(1, max_norm / global_norm(grads))`, as optax does for dense ones.

  A NaN in any gradient makes all gradients NaN.

  Args:
    grads: from `embed.value_and_grad`.
    max_norm: a positive number, or a traced scalar.

  Raises:
    TypeError: if `grads` is not an `embed.Grads`.
    ValueError: if `max_norm` is a number that is not positive.
  """
  if not isinstance(grads, Grads):
    raise TypeError(
      f"clip_by_global_norm takes embed.Grads, got {type(grads)}. Write `loss, grads = "
      "embed.value_and_grad(loss_fn)(model, ...)`, then clip `grads`."
    )
  if not is_traced(max_norm) and not max_norm > 0:
    raise ValueError(f"max_norm must be positive. Got {max_norm!r}.")
  rows = grads.rows
  if all(stack.placement.is_local for stack in rows.stacks.values()):
    rows = rows.summed()  # once, for the norm and the step; a mesh's sums would be too large
  norm = global_norm(Grads(grads.dense, rows))
  is_clipped = ~(norm <= max_norm)  # True for NaN
  factor = jnp.where(is_clipped, max_norm / jnp.where(is_clipped, norm, 1.0), 1.0)
  scale = lambda g: g * mesh.like(factor, g).astype(g.dtype)
  return Grads(jax.tree.map(scale, grads.dense), rows.scale(factor))


def accumulate(grads: Sequence[Grads]) -> Grads:
  """Adds up the gradients of microbatches: the gradient of the sum of their losses.

  For the mean of n losses, write `.map(lambda g: g / n)`. An optimizer takes one step with the
  result, as with one large batch.

  Raises:
    ValueError: for an empty list, or gradients of different models.
  """
  if not grads:
    raise ValueError("accumulate takes at least one embed.Grads.")
  rows = [g.rows.checked() for g in grads]
  if any(r.stacks != rows[0].stacks for r in rows):
    raise ValueError(
      "accumulate takes gradients of one model, with the same tables, optimizers and mesh."
    )
  if any(r.is_summed for r in rows):
    rows = [r.summed() for r in rows]  # an update takes gradients of one form
  dense = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(g.dense for g in grads))
  together = {key: [x for r in rows for x in r.grads[key]] for key in rows[0].grads}
  return Grads(dense, Rows(together, rows[0].stacks))
