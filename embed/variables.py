"""The `nnx.Variable`s of a layer."""

import contextvars
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx

from embed.config import TableConfig
from embed.engine import mesh as mesh_lib
from embed.engine.stack import Arrays, StackSpec
from embed.storage import initial
from embed.storage import tables as stored_tables


class Table(nnx.Variable):
  """The rows of a table. Not an `nnx.Param`: no dense optimizer ever sees it.

  An `nnx.Variable` type, for filters. It holds an array as stored, in which several tables may be
  combined and rows reordered; `SparseEmbed.tables` has each table, with its rows in order.
  """


class SlotVariable(nnx.Variable):
  """An optimizer's state per row of a table, an `nnx.Variable` type, for filters.

  It holds the storage as `Table` does; `SparseEmbed.variables` has the slots.
  """


class Report(nnx.Variable):
  """Counts from the lookups: an `nnx.Variable` that holds a dictionary of scalars.

  - `dropped_ids`, int32: counted since the start, up to 2**31 - 1.
  - `exchange_rounds`, int32: the most rounds of an all-to-all in the last call; 1 where buffers
    were large enough, 0 without an all-to-all.
  - `buffer_fill`, float32: the largest used share of a buffer in the last call; above 1, there was
    more than one round. 0 without a mesh.

  A dropped id is one that was given and could not be looked up: `>= vocabulary_size`, beyond a
  `max_valency`, or outside a `dense_shape`. By default, eager calls raise for these instead. Like
  all NNX state, the report comes out of `nnx.jit` and other nnx transformations that take the
  module as an argument; plain `jax.jit`, with it closed over or as a pytree, counts nothing.
  """


def make_variables(
  stack: StackSpec, tables: Mapping[str, TableConfig], keys: Mapping[str, jax.Array], axis: Any
) -> nnx.Dict:
  """The Variables of a stack, each annotated with its sharding."""
  of = lambda x: metadata(stack.placement, mesh_lib.as_names(axis), x.ndim)
  kind = lambda key: Table if key == "parameters" else SlotVariable
  arrays = initial.make(stack, tables, {name: keys[name] for name in stack.tables})
  return nnx.Dict({key: kind(key)(value, **of(value)) for key, value in arrays.items()})


def replace(variables: Mapping[str, nnx.Variable], arrays: Arrays) -> None:
  """Sets the Variables of a stack to arrays that were made outside of a step."""
  new = {key: x for key, x in arrays.items() if x is not variables[key].get_value()}
  for key, value in new.items():
    variables[key].set_value(value)


def metadata(placement: mesh_lib.Placement, axis: mesh_lib.Names, ndim: int) -> dict[str, Any]:
  """Variable metadata of a table `[V, D]` (ndim 2) or of a slot `[V]`, for NNX to read."""
  local = placement.mesh is None  # on one device, the annotation says how to split elsewhere
  rows = axis if local else placement.row_axes
  short = lambda names: (names[0] if len(names) == 1 else names) or None
  # Not eager: the array is placed where it is made, not when it is wrapped.
  return {"out_sharding": (short(rows), None)[:ndim], "eager_sharding": False}


# --- inside a loss -------------------------------------------------------------------------------

# The number of lookups that each `value_and_grad` being traced has seen, the outermost first.
LOSSES: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("losses", default=())


class Tap(nnx.Variable):
  """Zeros whose gradients are the gradients of a lookup's activations, and a zero for its mark.

  A pair: arrays of the activations' shapes, and a float32 scalar. The gradient of the scalar is the
  sum of the marks of all uses of the activations.
  """


class Record(nnx.Variable):
  """The `LookupRecord` of a lookup, and its mark, a float32 scalar."""


class Tape(nnx.Module):
  """The lookups of a layer in a loss that is differentiated.

  Args:
    lookups: the taps, and the record and mark, of each lookup, once the first pass has found them.
    outer: the tape of a loss around this one.
  """

  def __init__(self, lookups: Sequence[tuple[Any, Any]] | None = None, outer: "Tape | None" = None):
    self.is_first_pass, self.outer, self.calls = lookups is None, outer, 0
    self.lookups = nnx.List(
      [nnx.Dict(tap=Tap(tap), record=Record(record)) for tap, record in lookups or ()]
    )

  def add(self, activations: Sequence[jax.Array], record: Any) -> list[jax.Array]:
    """Adds the tap of the next lookup to its activations, and keeps the record.

    Raises:
      ValueError: where the gradient would be lost.
    """
    number, lost = self.calls, f"A lookup of table {record.tables[0]!r} is"
    mark = float(next(_MARKS) % 2**23 + 1)  # an exact float32
    try:
      self.calls = number + 1
      if self.is_first_pass:
        shapes = (list(activations), jnp.float32(0))  # and types: no value is known
        self.lookups.append(nnx.Dict(tap=Tap(shapes), record=Record((record, jnp.float32(0)))))
      elif number == len(self.lookups):
        raise ValueError(
          f"{lost} made in a copy of the model, or under nnx.jit(graph=False), where its row "
          "gradient would be lost. Look up in the model that the loss gets."
        )
      self.lookups[number]["record"].set_value((record, jnp.float32(mark)))
    except errors.TraceContextError:
      raise ValueError(
        f"{lost} under a transformation such as jax.jit, scan, vmap or a loop, where its row "
        "gradient would be lost. Look up outside of it, and pass the activations in; nnx.jit, "
        "nnx.remat and nnx.cond with the model as an argument are fine."
      ) from None
    tapped = _attach(mark, list(activations), self.lookups[number]["tap"].get_value())
    return tapped if self.outer is None else self.outer.add(tapped, record)

  def read(self) -> list[tuple[Any, Any]]:
    """The tap, and the record and mark, of each lookup."""
    return [(x["tap"].get_value(), x["record"].get_value()) for x in self.lookups]


# A lookup keeps its mark, and the gradient of its tap returns it. The two differ if a lookup in a
# copy of the layer has used the tap as well, or if a loop has used it several times.
_MARKS = itertools.count(0xC5A3F, 0x9E3779B1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(mark: float, activations: list[jax.Array], tap: Any) -> list[jax.Array]:
  """Returns the activations; the tap gets their gradient as well, and its scalar gets the mark."""
  del mark
  return [x + zeros for x, zeros in zip(activations, tap[0], strict=True)]


def _attach_forward(mark, activations, tap):
  # The sum, so that a loss around this one can be differentiated with respect to its own taps.
  return _attach(mark, activations, tap), None


def _attach_backward(mark, _, grads):
  return grads, (grads, jnp.float32(mark))


_attach.defvjp(_attach_forward, _attach_backward)


def refuse_in_loss(what: str) -> None:
  """Raises ValueError inside a loss that is differentiated."""
  if LOSSES.get():
    raise ValueError(
      f"{what} inside the loss, where no gradient comes back from the tables. Write "
      "`layer.attend(query, table_name)` to score against rows; read, replace and update "
      "tables outside."
    )


# --- checks --------------------------------------------------------------------------------------


def check_array(name: str, key: str, value: Any, wanted: Mapping[str, Any]) -> None:
  """Raises ValueError unless a value fits `wanted[key]`, the array of that name in a table."""
  if key not in wanted:
    slots = [kept for kept in wanted if kept != "parameters"]
    raise ValueError(f"Table {name!r} has no slot {key!r}; its slots are {slots}.")
  if misfit := stored_tables.misfit(value, wanted[key]):
    what = f"table {name!r}" if key == "parameters" else f"slot {key!r} of table {name!r}"
    raise ValueError(f"The array for {what} {misfit}: give real numbers of its shape.")
