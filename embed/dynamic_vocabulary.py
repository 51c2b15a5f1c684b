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
from embed.engine.stack import Arrays, StackSpec
from embed.inputs import RawInput
from embed.inputs import raw_ids as to_raw_ids
from embed.storage import changes, initial
from embed.storage import tables as stored_tables
from embed.structure import Path
from embed.variables import changing, check_array, replace


class Vocabulary(nnx.Variable):
  """The owners of the rows of a table with a `DynamicVocabulary`: a dictionary of arrays.

  An `nnx.Variable` type, for filters. It holds the storage by buckets; `SparseEmbed.variables` has
  the raw ids by row.
  """


class Admissions(nnx.Variable):
  """The counts of `SparseEmbed.admit` for a table, and the key of its initial rows."""


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
  """A dynamic table of a layer; `SparseEmbed` documents the methods that it has too."""

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
    """The state of `engine.admission`, and the key of initial rows."""
    return {**self.held["owners"].get_value(), **self.held["admissions"].get_value()}

  def _set(self, state: Mapping[str, Any]) -> None:
    """Sets the given arrays of a state."""
    for variable in self.held.values():
      before = variable.get_value()
      variable.set_value({key: state.get(key, x) for key, x in before.items()})

  @property
  def _stored(self) -> Arrays:
    return {key: variable.get_value() for key, variable in self.arrays.items()}

  @property
  def _new_rows(self) -> tuple[Any, ...]:
    """The static arguments of `_reset` and `_admit` that decide the initial value of a row."""
    made = self.config.initializer or initializers.truncated_normal_rows
    return self.stack, self.name, initializers.row_wise(made)

  @jax.named_scope("admit")
  def admit(self, inputs: Sequence[RawInput], ahead: bool) -> dict[Path, Any]:
    def rows_of(ids):
      state, arrays = self.state, self._stored
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

  def raw_ids(self, rows: jax.Array) -> jax.Array:
    buckets = self.state["buckets"]
    return admission.raw_ids(self.vocabulary, self.stack.placement, buckets, jnp.asarray(rows))

  def report(self) -> dict[str, jax.Array]:
    """An entry of `SparseEmbed.vocabulary_report`."""
    state = self.state
    counts = dict(zip(admission.COUNTS, state["batch"], strict=True))
    totals = state["totals"].astype(jnp.float32) @ jnp.array([2.0**32, 1.0])
    counts |= {f"total_{key}": x for key, x in zip(admission.COUNTS, totals, strict=True)}
    counts["hit_rate"] = counts["hits"] / jnp.maximum(counts["ids"], 1).astype(jnp.float32)
    counts["fill"] = state["filled"] / jnp.float32(self.vocabulary.capacity)
    return counts

  def owners(self) -> dict[str, Any]:
    """The owners of the rows, arrays by name as in `admission.read_owners`."""
    static, buckets = (self.vocabulary, self.stack.placement), self.state["buckets"]
    arrays = mesh_lib.settled(admission.read_owners(*static, buckets))
    return {name: arrays[name] for name in admission.owner_names(self.vocabulary)}  # sorted by jit

  def set_owners(self, arrays: Mapping[str, Any]) -> None:
    """Replaces the owners of all rows, by arrays in the form of `owners`."""
    self._set(_state_of(self.vocabulary, self.stack.placement, arrays))

  def store_apart(self) -> None:
    """Stores the owners as on one device."""
    on_host = lambda tree: jax.tree.map(np.asarray, tree)
    owners = _state_of(self.vocabulary, mesh_lib.LOCAL, on_host(self.owners()))
    self.held["owners"] = Vocabulary(owners)
    self.held["admissions"] = Admissions(on_host(self.held["admissions"].get_value()))

  def rows_by_raw_id(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {key: np.asarray(x) for key, x in variables.items()}
    last = arrays["last_used"]
    latest = np.argsort(-last, kind="stable")
    rows = {key: x[latest[last[latest] > 0]] for key, x in arrays.items()}
    high, low = rows["raw_ids"].astype(np.uint64).T
    return {**rows, "raw_ids": (high << np.uint64(32)) | low}

  def load_rows(self, raw_ids: Any, variables: Mapping[str, Any]) -> np.ndarray:
    stack, vocabulary, state, stored = self.stack, self.vocabulary, self.state, self._stored
    ids = np.asarray(raw_ids)
    ids = ids if ids.dtype == np.uint32 and ids.ndim == 2 else to_raw_ids(ids)
    shapes = {
      key: jax.ShapeDtypeStruct((len(ids), *x.shape[1:]), x.dtype)
      for key, x in stored_tables.shapes(stack, stored, self.name).items()
    }
    for key, value in variables.items():
      check_array(self.name, key, value, shapes)
    if len(np.unique(ids, axis=0)) < len(ids) or (ids == admission.EMPTY).all(axis=1).any():
      raise ValueError(f"Table {self.name!r}: raw ids must be distinct, and none of them padding.")
    rows = _rows_for(vocabulary, ids)
    kept = rows >= 0
    step = max(int(state["step"]), 1)  # the rows count as used once, in the current batch
    owners = {}
    for key, x in admission.owner_shapes(vocabulary, mesh_lib.LOCAL).items():
      owners[key] = np.full(x.shape, admission.EMPTY if key == "raw_ids" else 0, x.dtype)
      owners[key][rows[kept]] = {"raw_ids": ids[kept], "last_used": step, "uses": 1}[key]
    initial_rows = _reset(*self._new_rows, stored, state["key"], rows[kept], ids[kept])
    values = {key: np.asarray(x, shapes[key].dtype)[kept] for key, x in variables.items()}
    given = changes.TableRows(rows[kept].astype(np.int32), values)
    with changing("Loading rows"):
      replace(self.arrays, changes.put(stack, mesh_lib.settled(initial_rows), self.name, given))
      self.set_owners(owners)
      self._set({"step": mesh_lib.like(jnp.full_like(state["step"], step), state["step"])})
    return rows


def _state_of(
  vocabulary: DynamicVocabulary, placement: mesh_lib.Placement, owners: Mapping[str, Any]
) -> dict[str, Any]:
  """The part of a state that holds owners, from arrays by row."""
  spec = admission.owners_spec(vocabulary, placement)

  def place(x):
    if placement.is_local:
      return jnp.asarray(x)
    return stored_tables.place_whole(placement, x, stored_tables.dtype_of(x), spec)

  arrays = {name: place(owners[name]) for name in admission.owner_names(vocabulary)}
  return mesh_lib.settled(admission.from_owners(vocabulary, placement, arrays))


def _rows_for(vocabulary: DynamicVocabulary, ids: np.ndarray) -> np.ndarray:
  """Rows of distinct raw ids uint32 `[N, 2]`, int64 `[N]`, the first ids first; -1 for no room."""
  bucket = np.asarray(admission.bucket_of(vocabulary, jnp.asarray(ids))).astype(np.int64)
  by_bucket = np.argsort(bucket, kind="stable")
  ordered = bucket[by_bucket]
  lane = np.empty(len(bucket), np.int64)
  lane[by_bucket] = np.arange(len(bucket)) - np.searchsorted(ordered, ordered)
  room = np.full(vocabulary.buckets, vocabulary.bucket_width)
  room[-1] -= vocabulary.trains_unknown  # the last row of the last bucket
  return np.where(lane < room[bucket], bucket * vocabulary.bucket_width + lane, -1)


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
  """The rows of ids; the row of the unknown, if that is trained, for ids without one."""
  if not vocabulary.trains_unknown:
    return rows
  is_id = (ids != admission.EMPTY).any(axis=1)
  return jnp.where((rows < 0) & is_id, vocabulary.capacity - 1, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reset(stack, table, maker, arrays, key, rows, ids):
  return initial.reset(stack, table, maker, arrays, key, rows, ids) if rows.size else arrays
