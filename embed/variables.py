"""The `nnx.Variable`s of a layer."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from embed.config import TableConfig
from embed.engine import jax_internals
from embed.engine import mesh as mesh_lib
from embed.engine.stack import Arrays, StackSpec
from embed.storage import initial
from embed.storage import tables as stored_tables

_LARGE_COPY = 16 << 20  # bytes of a copy

HOW_TO_PREDICT = (
  "to predict, `@nnx.jit(graph=False)` above `def predict(model, batch)` (graph_updates=False if "
  "the model shares a module)"
)


class Table(nnx.Variable):
  """The rows of a table. Not an `nnx.Param`: no dense optimizer ever sees it.

  An `nnx.Variable` type, for filters. What it holds is the storage, several tables in one array
  and in another order where that is cheaper; `SparseEmbed.tables` has the tables.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> len(jax.tree.leaves(nnx.state(layer, embed.Table))), nnx.state(layer, nnx.Param)
  (1, State({}))
  """


def warn_of_step(before: Any, after: Any) -> None:
  """Warns of a step that made a new table because nothing was donated."""
  arrays = (before, after)
  if jax_internals.is_traced(arrays) or not all(isinstance(x, jax.Array) for x in arrays):
    return
  if before is not after and before.nbytes >= _LARGE_COPY and not before.is_deleted():
    _warn_of_copy(before, "was copied by a step outside of a jitted function")


def warn_of_constant(table: Any, inputs: Any) -> None:
  """Warns of a lookup in a jitted function that closes over the model."""
  is_constant = isinstance(table, jax.Array) and not jax_internals.is_traced(table)
  if is_constant and table.nbytes >= _LARGE_COPY and jax_internals.is_staged(inputs):
    _warn_of_copy(
      table,
      "is a constant of a jitted function that closes over its model: later steps do not change "
      "what the function returns, and every call may copy the table",
    )


def _warn_of_copy(table: jax.Array, what: str) -> None:
  warnings.warn(
    f"A table of {table.nbytes >> 20} MiB {what}. To train, write `step = "
    f"embed.jit_step(train_step, model, optimizer)`, then `step(batch)`; {HOW_TO_PREDICT}.",
    stacklevel=3,
  )


class SlotVariable(nnx.Variable):
  """An optimizer's state per row of a table.

  An `nnx.Variable` type, for filters, that holds the storage as `Table` does;
  `SparseEmbed.variables` has the slots.

  >>> features = embed.FeatureConfig(embed.TableConfig(4, 2, optimizer=embed.adam(1e-3)))
  >>> layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  >>> len(jax.tree.leaves(nnx.state(layer, embed.SlotVariable)))  # momenta and velocities
  2
  """


class Report(nnx.Variable):
  """What happened in the lookups: an `nnx.Variable` that holds a dictionary of scalars.

  - `dropped_ids`, int32: counted since the start, up to 2**31 - 1.
  - `exchange_rounds`, int32: the rounds that the exchange of ids and rows took in the last call, at
    most; 1 where buffers were large enough, 0 where nothing was exchanged, as without a mesh.
  - `buffer_fill`, float32: the share of a buffer that was used in the last call, at most; above 1
    there was more than one round. 0 without a mesh.

  A dropped id is one that was given and could not be looked up: `>= vocabulary_size`, beyond a
  `max_valency`, or outside a `dense_shape`. Eager calls raise for these instead. Like all NNX state
  it comes out of `nnx.jit` and the other nnx transformations with the module as an argument; plain
  `jax.jit`, with the module closed over or as a pytree, counts nothing.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> look_up = nnx.jit(lambda layer, ids: layer(ids), graph=False)
  >>> activations = look_up(layer, np.array([3, 4, 5]))
  >>> int(layer.report["dropped_ids"])
  2
  """


def make_variables(
  stack: StackSpec, tables: Mapping[str, TableConfig], keys: Mapping[str, jax.Array], axis: Any
) -> nnx.Dict:
  """The Variables of a stack, each with its place on a mesh."""
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
  """Variable metadata of a table `[V, D]` (ndim 2) or of a slot `[V]`, for NNX to read.

  >>> metadata(mesh_lib.LOCAL, ("data",), 2)["out_sharding"]
  ('data', None)
  """
  local = placement.mesh is None  # an annotation of one device says how to split it elsewhere
  rows = axis if local else placement.row_axes
  short = lambda names: (names[0] if len(names) == 1 else names) or None
  # Not eager: the array is placed where it is made, not when it is wrapped.
  return {"out_sharding": (short(rows), None)[:ndim], "eager_sharding": False}


@contextlib.contextmanager
def changing(what: str) -> Iterator[None]:
  """Says what to write where a model has to change that a JAX transformation closes over."""
  try:
    yield
  except jax_internals.TraceContextError:
    raise ValueError(
      f"{what} changes the model, which jax.jit or another JAX transformation closes over, so that "
      "the change would be lost. Pass the model as an argument to nnx.jit: "
      "`step = nnx.jit(lambda model, batch: ...)`, then `step(model, batch)`."
    ) from None


def check_alive(what: str, arrays: Iterable[Any]) -> None:
  """Raises ValueError if one of some arrays was deleted by a step that donated it."""
  for x in arrays:
    # Compiled steps ask at every call, which `isinstance(x, jax.Array)` would make slow.
    if not isinstance(x, jax.core.Tracer) and getattr(x, "is_deleted", bool)():
      raise ValueError(
        f"{what} are gone: a step of another model that shares them, as nnx.clone(model) does, has "
        "deleted them. Write nnx.clone(model, arrays=True), which copies them (since Flax 0.12.8)."
      )


def check_array(name: str, key: str, value: Any, wanted: Mapping[str, Any]) -> None:
  """Raises ValueError unless a value fits the array of this name among `wanted`, of a table."""
  if key not in wanted:
    slots = [kept for kept in wanted if kept != "parameters"]
    raise ValueError(f"Table {name!r} has no slot {key!r}; its slots are {slots}.")
  what = f"Table {name!r}" if key == "parameters" else f"Slot {key!r} of table {name!r}"
  shape, dtype = np.shape(value), wanted[key].dtype
  if shape != wanted[key].shape:
    raise ValueError(f"{what} has shape {wanted[key].shape}, got {shape}.")
  if not stored_tables.converts(value, dtype):
    raise ValueError(
      f"{what} has dtype {dtype}, got {stored_tables.dtype_of(value)}: give real numbers."
    )
