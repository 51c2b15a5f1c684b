"""Tables with a `DynamicVocabulary`: which raw id owns which row."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed import initializers
from embed.config import DynamicVocabulary, TableConfig
from embed.engine import admission, taps
from embed.engine import mesh as mesh_lib
from embed.engine.stack import Arrays, StackSpec
from embed.inputs import RawInput
from embed.inputs import raw_ids as to_raw_ids
from embed.storage import changes, initial, owners
from embed.storage import tables as stored_tables
from embed.structure import Path
from embed.variables import changing, check_array, replace

_OWNERS = ("buckets", "filled", "sightings")  # of an admission's state, what a `Vocabulary` holds


class Vocabulary(nnx.Variable):
  """The owners of the rows of a table with a `DynamicVocabulary`: a dictionary of arrays.

  An `nnx.Variable` type, for filters. What it holds is the storage, by buckets;
  `SparseEmbed.variables` has the raw ids by row.

  >>> table = embed.TableConfig(embed.DynamicVocabulary(16), 2)
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> jax.tree.leaves(nnx.state(layer, embed.Vocabulary))[0].shape  # one bucket
  (1, 48)
  """


class Admissions(nnx.Variable):
  """What `SparseEmbed.admit` counts for a table, and the key of its initial rows."""


def make_variables(
  vocabulary: DynamicVocabulary, placement: mesh_lib.Placement, key: jax.Array
) -> nnx.Dict:
  """The Variables of a dynamic table: "owners" and "admissions"."""
  state = admission.empty(vocabulary, placement)
  held = {name: state.pop(name) for name in _OWNERS if name in state}
  state["key"] = jax.random.key_data(initializers.threefry(key[None])[0])
  return nnx.Dict(owners=Vocabulary(held), admissions=Admissions(state))


@dataclasses.dataclass(frozen=True)
class DynamicTable:
  """A dynamic table of a layer; `SparseEmbed` explains the methods that it has too.

  Attributes:
    name: of the table.
    config: of the table.
    stack: where its rows are stored.
    held: its Variables, the `nnx.Dict` of `make_variables`.
    arrays: the Variables of the stack.
  """

  name: str
  config: TableConfig
  stack: StackSpec
  held: Any
  arrays: Mapping[str, nnx.Variable]

  @property
  def vocabulary(self) -> DynamicVocabulary:
    assert self.config.vocabulary is not None
    return self.config.vocabulary

  @property
  def state(self) -> dict[str, Any]:
    """The state of `engine.admission`, and the key of initial rows."""
    return {**self.held["owners"].get_value(), **self.held["admissions"].get_value()}

  def _set(self, state: Mapping[str, Any]) -> None:
    """Sets the arrays of a state that are given."""
    for variable in self.held.values():
      before = variable.get_value()
      variable.set_value({key: state.get(key, x) for key, x in before.items()})

  @property
  def _stored(self) -> Arrays:
    return {key: variable.get_value() for key, variable in self.arrays.items()}

  @property
  def _new_rows(self) -> tuple[Any, ...]:
    """What decides the initial value of a row: static arguments of `_reset` and `_admit`."""
    made = self.config.initializer or initializers.truncated_normal_rows
    return self.stack, self.name, initializers.row_wise(made)

  # --- raw ids of a batch ------------------------------------------------------------------------

  @jax.named_scope("admit")
  def admit(self, inputs: Sequence[RawInput], ahead: bool) -> dict[Path, Any]:

    def rows_of(ids):
      state, arrays = self.state, taps.read_tables(self._stored, "update")
      rows, *new = _admit(*self._new_rows, self.vocabulary, ahead, state, arrays, ids)
      with changing("SparseEmbed.admit"):
        typed = lambda new, old: {k: mesh_lib.like(new[k], x) for k, x in old.items()}
        self._set(typed(new[0], state))
        for key, value in typed(new[1], arrays).items():
          self.arrays[key].set_value(value)
      return rows

    return self._with_rows(inputs, rows_of)

  def translate(self, inputs: Sequence[RawInput]) -> dict[Path, Any]:
    static = self.vocabulary, self.stack.placement
    return self._with_rows(inputs, lambda ids: _translate(*static, self.state, ids))

  def _with_rows(
    self, inputs: Sequence[RawInput], rows_of: Callable[[jax.Array], jax.Array]
  ) -> dict[Path, Any]:
    """Inputs by path with `rows_of(raw ids [N, 2])`, int32 `[N]`, in place of their raw ids."""
    placement = self.stack.placement
    parts = [(x.ids, mesh_lib.accept(placement, x.stand_in.name, x.stand_in.parts)) for x in inputs]

    def used(parts):
      given = zip(inputs, parts, strict=True)
      each = [x._replace(ids=ids, stand_in=x.stand_in._replace(parts=p)) for x, (ids, p) in given]
      return jnp.concatenate([x.used() for x in each])

    rows = mesh_lib.settled(rows_of(placement.prepare(used, parts)))
    shapes = [x.ids.shape[:-1] for x in inputs]
    ends = list(itertools.accumulate(map(math.prod, shapes)))[:-1]
    split = lambda rows: [
      part.reshape(shape) for part, shape in zip(jnp.split(rows, ends), shapes, strict=True)
    ]
    of_inputs = placement.prepare(split, rows, like=rows)
    return {x.stand_in.path: x.with_rows(r) for x, r in zip(inputs, of_inputs, strict=True)}

  def raw_ids(self, rows: jax.Array) -> jax.Array:
    buckets = self.state["buckets"]
    return admission.owners(self.vocabulary, self.stack.placement, buckets, jnp.asarray(rows))

  def report(self) -> dict[str, jax.Array]:
    """An entry of `SparseEmbed.vocabulary_report`."""
    state = self.state
    counts = dict(zip(admission.COUNTS, state["batch"], strict=True))
    totals = state["totals"].astype(jnp.float32) @ jnp.array([2.0**32, 1.0])
    counts |= {f"total_{key}": x for key, x in zip(admission.COUNTS, totals, strict=True)}
    counts["hit_rate"] = counts["hits"] / jnp.maximum(counts["ids"], 1).astype(jnp.float32)
    counts["fill"] = state["filled"] / jnp.float32(self.vocabulary.capacity)
    return counts

  # --- the owners by row ------------------------------------------------------------------------

  def owners(self) -> dict[str, Any]:
    """The owners of the rows, arrays by name as `storage.owners` describes them."""
    placement, held = self.stack.placement, self.held["owners"].get_value()
    arrays = mesh_lib.settled(owners.read(self.vocabulary, placement, held))
    return {key: arrays[key] for key in owners.names(self.vocabulary)}

  def set_owners(self, arrays: Mapping[str, Any]) -> None:
    """Replaces the owners of all rows, by arrays in the form of `owners`."""
    given = {key: arrays[key] for key in owners.names(self.vocabulary)}
    self._set(owners.store(self.vocabulary, self.stack.placement, given))

  def store_apart(self) -> None:
    """Stores the owners as on one device."""
    on_host = lambda tree: jax.tree.map(np.asarray, tree)
    kept = owners.store(self.vocabulary, mesh_lib.LOCAL, on_host(self.owners()))
    self.held["owners"] = Vocabulary(kept)
    self.held["admissions"] = Admissions(on_host(self.held["admissions"].get_value()))

  # --- rows by raw id, on the host --------------------------------------------------------------

  def rows_by_raw_id(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rows = self._by_value(variables)
    high, low = rows["raw_ids"].astype(np.uint64).T
    return {**rows, "raw_ids": (high << np.uint64(32)) | low}

  def _by_value(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The owned rows of arrays as in `SparseEmbed.variables`, the most valuable first."""
    arrays = {key: np.asarray(x) for key, x in variables.items() if key != "sightings"}
    best = owners.order(self.vocabulary, arrays, int(self.state["step"]))
    return {key: x[best] for key, x in arrays.items()}

  def load_rows(
    self, raw_ids: Any, variables: Mapping[str, Any], scores: Mapping[str, Any]
  ) -> np.ndarray:
    """As in the layer, with "last_used" and "uses" `[N]` by name, or those of the current batch."""
    stack, vocabulary, state, stored = self.stack, self.vocabulary, self.state, self._stored
    ids = np.asarray(raw_ids)
    ids = ids if ids.dtype == np.uint32 and ids.ndim == 2 else to_raw_ids(ids)
    count = len(ids)
    of_rows = {
      key: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)
      for key, x in stored_tables.shapes(stack, stored, self.name).items()
    }
    for key, value in variables.items():
      check_array(self.name, key, value, of_rows)
    if len(np.unique(ids, axis=0)) < count or (ids == admission.EMPTY).all(axis=1).any():
      raise ValueError(f"Table {self.name!r}: raw ids must be distinct, and none of them padding.")
    rows = owners.rows_for(vocabulary, ids)
    kept = rows >= 0
    step = max(int(state["step"]), 1)
    of_owners = owners.shapes(vocabulary, stack.placement)
    new = {key: np.zeros(x.shape, x.dtype) for key, x in of_owners.items()}
    new["raw_ids"][:] = admission.EMPTY
    new["raw_ids"][rows[kept]] = ids[kept]
    for key, default in (("last_used", step), ("uses", 1)):
      if key in new:
        new[key][rows[kept]] = np.broadcast_to(scores.get(key, default), count)[kept]
    initial_rows = _reset(*self._new_rows, stored, state["key"], rows[kept], ids[kept])
    values = {key: np.asarray(x, of_rows[key].dtype)[kept] for key, x in variables.items()}
    given = changes.TableRows(rows[kept].astype(np.int32), values)
    with changing("Loading rows"):
      replace(self.arrays, changes.put(stack, mesh_lib.settled(initial_rows), self.name, given))
      self.set_owners(new)
      self._set({"step": mesh_lib.like(jnp.full_like(state["step"], step), state["step"])})
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _admit(stack, table, maker, vocabulary, keeps_previous, state, arrays, ids):
  """The rows of raw ids, the new state, and the stack's arrays with the rows of new owners."""
  key = state["key"]
  of_engine = {name: x for name, x in state.items() if name != "key"}
  admitted, new = admission.admit(vocabulary, stack.placement, of_engine, ids, keeps_previous)
  rows = jnp.where(admitted.is_new, admitted.rows, stack.size(table))
  if ids.shape[0]:
    arrays = initial.reset(stack, table, maker, arrays, key, rows, ids)
  return _or_unknown(vocabulary, admitted.rows, ids), new | {"key": key}, arrays


@functools.partial(jax.jit, static_argnums=(0, 1))
def _translate(vocabulary, placement, state, ids):
  return _or_unknown(vocabulary, admission.translate(vocabulary, placement, state, ids), ids)


def _or_unknown(vocabulary: DynamicVocabulary, rows: jax.Array, ids: jax.Array) -> jax.Array:
  """Rows of ids, that of the unknown where an id has none and the unknown is trained."""
  if not vocabulary.trains_unknown:
    return rows
  is_id = (ids != admission.EMPTY).any(axis=1)
  return jnp.where((rows < 0) & is_id, vocabulary.capacity - 1, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reset(stack, table, maker, arrays, key, rows, ids):
  return initial.reset(stack, table, maker, arrays, key, rows, ids) if rows.size else arrays
