"""Tables with a `DynamicVocabulary`: their Variables, and the raw ids that own their rows."""

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
from embed.engine import admission
from embed.engine import mesh as mesh_lib
from embed.engine.stack import StackSpec
from embed.inputs import RawInput
from embed.storage import initial
from embed.storage import tables as stored_tables
from embed.structure import Path


class Vocabulary(nnx.Variable):
  """The owners of the rows of a table with a `DynamicVocabulary`: a dictionary of arrays.

  An `nnx.Variable` type, for filters. It stores the owners by bucket; `SparseEmbed.variables` has
  the raw ids by row.
  """


class Admissions(nnx.Variable):
  """The counts of `SparseEmbed.admit` for a table, and the random key for its initial rows."""


def make_variables(
  vocabulary: DynamicVocabulary, placement: mesh_lib.Placement, key: jax.Array
) -> nnx.Dict:
  """The Variables of a dynamic table: "owners" and "admissions"."""
  state = admission.empty(vocabulary, placement)
  owners = {name: state.pop(name) for name in ("buckets", "filled")}
  state["key"] = jax.random.key_data(initializers.threefry(key[None])[0])
  return nnx.Dict(owners=Vocabulary(owners), admissions=Admissions(state))


@dataclasses.dataclass(frozen=True)
class DynamicTable:
  """A dynamic table of a layer; `SparseEmbed` documents the methods of the same names."""

  name: str
  config: TableConfig
  stack: StackSpec
  held: Any  # the Variables of `make_variables`
  arrays: Mapping[str, nnx.Variable]  # of the stack

  @property
  def vocabulary(self) -> DynamicVocabulary:
    assert self.config.vocabulary is not None
    return self.config.vocabulary

  @property
  def state(self) -> dict[str, Any]:
    """The state of `engine.admission`, and the random key for initial rows."""
    return {**self.held["owners"].get_value(), **self.held["admissions"].get_value()}

  def _set(self, state: Mapping[str, Any]) -> None:
    """Sets the given arrays of a state."""
    for variable in self.held.values():
      before = variable.get_value()
      variable.set_value({key: state.get(key, x) for key, x in before.items()})

  @jax.named_scope("admit")
  def admit(self, inputs: Sequence[RawInput], ahead: bool) -> dict[Path, Any]:
    made = initializers.row_wise(self.config.initializer or initializers.truncated_normal_rows)

    def rows_of(ids):
      state, arrays = self.state, {key: x.get_value() for key, x in self.arrays.items()}
      static = self.stack, self.name, made, self.vocabulary, ahead
      rows, *new = _admit(*static, state, arrays, ids)
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
    """Inputs by path, with the int32 rows `[N]` that `rows_of` gives for raw ids `[N, 2]`."""
    placement = self.stack.placement
    parts = [
      (x.ids, mesh_lib.check_inputs(placement, x.stand_in.name, x.stand_in.parts)) for x in inputs
    ]

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
    by_input = placement.prepare(split, rows, like=rows)
    return {x.stand_in.path: x.with_rows(r) for x, r in zip(inputs, by_input, strict=True)}

  def report(self) -> dict[str, jax.Array]:
    """The table's entry in `SparseEmbed.vocabulary_report`."""
    state = self.state
    counts = dict(zip(admission.COUNTS, state["batch"], strict=True))
    counts["hit_rate"] = counts["hits"] / jnp.maximum(counts["ids"], 1).astype(jnp.float32)
    counts["fill"] = state["filled"] / jnp.float32(self.vocabulary.capacity)
    return counts

  def owners(self) -> dict[str, Any]:
    """The owners of the rows: arrays by name, as `admission.read_owners` returns them."""
    static, buckets = (self.vocabulary, self.stack.placement), self.state["buckets"]
    arrays = mesh_lib.settled(admission.read_owners(*static, buckets))
    return {name: arrays[name] for name in admission.owner_names(self.vocabulary)}  # sorted by jit

  def set_owners(self, arrays: Mapping[str, Any]) -> None:
    """Replaces the owners of all rows with arrays in the form that `owners` returns."""
    self._set(_state_of(self.vocabulary, self.stack.placement, arrays))

  def store_apart(self) -> None:
    """Stores the owners as a layer on one device does."""
    on_host = lambda tree: jax.tree.map(np.asarray, tree)
    owners = _state_of(self.vocabulary, mesh_lib.LOCAL, on_host(self.owners()))
    self.held["owners"] = Vocabulary(owners)
    self.held["admissions"] = Admissions(on_host(self.held["admissions"].get_value()))


def _state_of(
  vocabulary: DynamicVocabulary, placement: mesh_lib.Placement, owners: Mapping[str, Any]
) -> dict[str, Any]:
  """The part of a state that holds the owners, made from arrays by row."""
  spec = admission.owners_spec(vocabulary, placement)

  def place(x):
    if placement.is_local:
      return jnp.asarray(x)
    return stored_tables.place_whole(placement, x, stored_tables.dtype_of(x), spec)

  arrays = {name: place(owners[name]) for name in admission.owner_names(vocabulary)}
  return mesh_lib.settled(admission.from_owners(vocabulary, placement, arrays))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _admit(stack, table, maker, vocabulary, keeps_previous, state, arrays, ids):
  """The rows of raw ids, the new state, and the stack's arrays with initial rows for new owners."""
  key = state["key"]
  of_engine = {name: x for name, x in state.items() if name != "key"}
  admitted, new = admission.admit(vocabulary, stack.placement, of_engine, ids, keeps_previous)
  rows = jnp.where(admitted.is_new, admitted.rows, stack.size(table))
  if ids.shape[0]:
    arrays = initial.reset(stack, table, maker, arrays, key, rows, ids)
  return admitted.rows, new | {"key": key}, arrays


_translate = jax.jit(admission.translate, static_argnums=(0, 1))
