"""Deltas: the rows that have changed since an earlier state, to save and to send them alone.

A training step touches few rows of a large table. `fingerprint` remembers 64 bits of each row and
its slots, on the devices; `changes` compares them with the model some steps later, and returns a
`Delta`: the rows that differ, by their ids, and everything outside tables whole. Nothing is added
to the training step. A full checkpoint and the deltas after it make up the later state to the bit,
on any mesh.

`write` and `read` keep a delta in a folder: a zip archive of `.npy` arrays for each process that
wrote it, which NumPy alone can read. `apply` puts it into a model, of the same run or a server's
without optimizers, and `apply_to_tables` into plain NumPy tables.
"""

import contextlib
import dataclasses
import hashlib
import json
import operator
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from embed import autodiff, checkpoint, planning
from embed.engine import cost
from embed.engine.stack import Layout
from embed.layer import dynamic_table, owned, stored_arrays
from embed.storage import changes as changes_lib
from embed.storage.changes import TableRows
from embed.storage.owners import BY_ROW, names
from embed.variables import WRITTEN_BACK, changing, replace, swap

__all__ = [
  "Delta",
  "Fingerprints",
  "Owners",
  "apply",
  "apply_to_rows",
  "apply_to_tables",
  "changes",
  "fingerprint",
  "read",
  "write",
]


_FORMAT = 3  # 1 has no digests, 2 no owners
_HEADER = "header"
_KILLED = 3600  # seconds without a byte, after which a partial file has no writer any more
_FILE = re.compile(r"rows-(\d{5})-of-(\d{5})\.npz")
Digests = Mapping[str, Mapping[str, str]]  # `{node: {"tables/<key>" or "state/<path>": digest}}`


@dataclasses.dataclass(frozen=True)
class Delta:
  """The difference between two states of models and optimizers, in NumPy.

  Attributes:
    since: the step of the earlier state.
    step: the step of the later state.
    tables: `{node: {"<module path>/<table>": (ids, values)}}`: ids int32 `[K]`, ascending, and
      values `{"parameters": [K, dim], slot: [K, dim] or [K]}`. K is 0 if no row has changed.
    state: `{node: {path: array}}`: all arrays outside tables, whole.
    owners: `{node: {"<module path>/<table>": Owners}}`, of the tables with a `DynamicVocabulary`.
    before: digests of the parameters at `since`, by node and "tables/<key>" or "state/<path>": 16
      hexadecimal digits of the rows of a table, the same on every mesh, or of an `nnx.Param`. Empty
      in files of earlier versions.
    after: the digests at `step`.

  In a run of several processes, `changes` returns each of them the rows of its own shards, and
  `state` to process 0; `read` returns everything to all.

  >>> movie = embed.TableConfig(4, 2, optimizer=embed.sgd(0.5), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> before = embed.deltas.fingerprint(0, model=layer)
  >>> layer.apply_row_gradients({"movie": embed.RowGrads(jnp.array([3]), jnp.ones((1, 2)))})
  >>> delta, _ = embed.deltas.changes(before, 1, model=layer)
  >>> delta.tables["model"]["movie"].ids.tolist(), delta.num_rows, delta.nbytes
  ([3], 1, 24)
  """

  since: int
  step: int
  tables: Mapping[str, Mapping[str, TableRows]]
  state: Mapping[str, Mapping[str, np.ndarray]]
  before: Digests = dataclasses.field(default_factory=dict)
  after: Digests = dataclasses.field(default_factory=dict)
  owners: Mapping[str, Mapping[str, "Owners"]] = dataclasses.field(default_factory=dict)

  @property
  def num_rows(self) -> int:
    """The number of changed rows, of all tables."""
    return sum(len(rows.ids) for tables in self.tables.values() for rows in tables.values())

  @property
  def nbytes(self) -> int:
    """The size of all arrays in bytes."""
    return sum(x.nbytes for x in jax.tree.leaves((self.tables, self.state, self.owners)))

  def __repr__(self) -> str:
    lines: list[tuple[str, ...]] = [("table", "changed rows", "bytes")]
    for tables in self.tables.values():
      for key, rows in tables.items():
        size = sum(x.nbytes for x in jax.tree.leaves(rows))
        lines.append((key, str(len(rows.ids)), cost.readable(size)))
    lines.append(
      ("other arrays", "", cost.readable(sum(x.nbytes for x in jax.tree.leaves(self.state))))
    )
    return f"delta of steps {self.since} to {self.step}\n\n{planning.aligned(lines)}"


class Owners(NamedTuple):
  """What has changed of the owners of a table's rows, see `apply_to_rows`.

  Attributes:
    evicted: uint32 `[E, 2]`, the raw ids that had a row before and have none now.
    changed: by the name of an array of `SparseEmbed.variables`, such as "raw_ids" and "last_used":
      the rows that differ, and those of the delta's `tables`, with their values. In a delta of
      several processes, process 0 has all of them.
    geometry: int32 `[2]`, the capacity and the bucket width.
  """

  evicted: np.ndarray
  changed: dict[str, TableRows]
  geometry: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fingerprints:
  """The result of `fingerprint`, 64 bits for each row, on the devices: the start of a later delta.

  Attributes:
    step: of the state.
    lanes: the fingerprints, in the order of storage; internal.
    layouts: which row each of them is of; internal.
    digests: of the parameters, as `Delta.before`.
    owners: the owners of the rows of dynamic tables, on the devices; internal.
  """

  step: int
  lanes: Mapping[str, Mapping[str, list[changes_lib.Lanes]]]
  layouts: Mapping[str, Mapping[str, list[Layout]]]
  digests: Digests
  owners: Mapping[str, Mapping[str, Mapping[str, jax.Array]]]


# --- making ---------------------------------------------------------------------------------------


def fingerprint(step: int, /, **nodes: Any) -> Fingerprints:
  """Remembers a state, for `changes` to find out later which rows have changed.

  Takes one reading of all tables, and 8 bytes of device memory for each row; of a table with a
  `DynamicVocabulary` a copy of its raw ids and scores as well.

  Args:
    step: the number of the state, an integer of Python, NumPy or JAX.
    **nodes: `nnx` modules and optimizers, by the names of `embed.checkpoint.to_tree`.

  Raises:
    ValueError: if the step is no integer.
  """
  step, lanes, layouts, digests, of_owners = _integer(step), {}, {}, {}, {}
  for name, node in nodes.items():
    layers = autodiff.sparse_embeds(node)
    found = {path: _fingerprints(layer, slots=True) for path, layer in layers.items()}
    lanes[name] = {path: of_rows for path, (of_rows, _) in found.items()}
    layouts[name] = _layouts(layers)
    digests[name] = _digests(node, {id(layers[path]): of for path, (_, of) in found.items()})
    of_owners[name] = _owners(node)
  return Fingerprints(step, lanes, layouts, digests, of_owners)


def _owners(node: Any) -> dict[str, dict[str, jax.Array]]:
  """The owners of the rows of each dynamic table, by key."""
  by_key = {key: owned(*of) for key, of in autodiff.row_keys(node).items()}
  return {key: arrays for key, arrays in by_key.items() if arrays}


def changes(since: Fingerprints, step: int, /, **nodes: Any) -> tuple[Delta, Fingerprints]:
  """Compares a state with an earlier one; returns the delta and the new fingerprints.

  Rows and slots are compared by their bits, through fingerprints: a changed row is missed with a
  probability of 2**-64. All processes call it. Keep the old fingerprints until the delta is
  stored: without it, the next delta has to begin where this one began.

  Args:
    since: fingerprints of the earlier state, on the same mesh.
    step: the number of this state.
    **nodes: as for `fingerprint`; optimizers too.

  Raises:
    ValueError: if the fingerprints are of other nodes, layers or meshes, or the step is no integer.

  >>> movie = embed.TableConfig(1000, 2, optimizer=embed.sgd(0.5), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> since = embed.deltas.fingerprint(0, model=layer)
  >>> layer.apply_row_gradients({"movie": embed.RowGrads(jnp.array([7, 3]), jnp.ones((2, 2)))})
  >>> delta, since = embed.deltas.changes(since, 1, model=layer)
  >>> delta.tables["model"]["movie"].ids.tolist(), since.step
  ([3, 7], 1)
  """
  tables: dict[str, dict[str, TableRows]] = {}
  state: dict[str, dict[str, np.ndarray]] = {}
  owners: dict[str, dict[str, Owners]] = {}
  for name, node in nodes.items():  # before anything is computed
    layers = autodiff.sparse_embeds(node)
    old = since.lanes.get(name)
    if old is None or list(old) != list(layers):
      raise ValueError(
        f"The fingerprints have no {name!r} with the layers {list(layers)}: make them with "
        f"embed.deltas.fingerprint({step}, {name}=...) after the last full checkpoint."
      )
    if since.layouts[name] != _layouts(layers):
      raise ValueError(
        "The fingerprints are of other tables, or of another mesh: make them with "
        "embed.deltas.fingerprint after the model is restored."
      )
  new = fingerprint(step, **nodes)
  for name, node in nodes.items():
    rows = {
      id(layer): _changed_rows(layer, since.lanes[name][path], new.lanes[name][path])
      for path, layer in autodiff.sparse_embeds(node).items()
    }
    keys = autodiff.row_keys(node).items()
    tables[name] = {key: rows[id(layer)][table] for key, (layer, table) in keys}
    state[name] = {path: _on_host(x) for path, x in _dense(node).items()}
    owners[name] = {
      key: _changed_owners(layer, table, since.owners[name][key], arrays, tables[name][key].ids)
      for key, arrays in new.owners[name].items()
      for layer, table in [autodiff.row_keys(node)[key]]
    }
    if jax.process_index():
      state[name] = {}
      nothing = lambda x: x[:0]
      owners[name] = {
        key: x._replace(**jax.tree.map(nothing, {"evicted": x.evicted, "changed": x.changed}))
        for key, x in owners[name].items()
      }
  before = {name: since.digests[name] for name in nodes}
  return Delta(since.step, new.step, tables, state, before, new.digests, owners), new


def _changed_owners(layer: Any, table: str, old: Any, new: Any, rows: np.ndarray) -> Owners:
  """The difference between the owners of a table before and now; `rows` count as changed."""
  before, after = ({name: _on_host(x) for name, x in of.items()} for of in (old, new))
  if jax.process_count() > 1:
    every = np.zeros(len(after["raw_ids"]), np.int32)
    every[rows] = 1
    rows = np.flatnonzero(
      np.asarray(multihost_utils.process_allgather(every))
      .reshape(jax.process_count(), -1)
      .any(axis=0)
    )
  differs = {name: _differs(x, before[name]) for name, x in after.items()}
  by_row = [name for name in differs if name in BY_ROW]
  of_rows = np.union1d(np.flatnonzero(np.any([differs[name] for name in by_row], axis=0)), rows)
  changed = {}
  for name, x in after.items():
    ids = of_rows if name in BY_ROW else np.flatnonzero(differs[name])
    changed[name] = TableRows(ids.astype(np.int32), {"values": x[ids]})
  as_one = lambda of: np.ascontiguousarray(of["raw_ids"]).view(np.uint64)[:, 0]
  gone = ~np.isin(as_one(before), as_one(after))
  vocabulary = layer.spec.tables[table].vocabulary
  geometry = np.array([vocabulary.capacity, vocabulary.bucket_width], np.int32)
  return Owners(before["raw_ids"][gone], changed, geometry)


def _differs(x: np.ndarray, other: np.ndarray) -> np.ndarray:
  return (x != other).reshape(len(x), -1).any(axis=1)


def _integer(step: Any) -> int:
  try:
    return operator.index(step)
  except TypeError:
    raise ValueError(
      f"A step is an integer, such as int(optimizer.step[...]). Got {step!r}."
    ) from None


def _layouts(layers: Mapping[str, Any]) -> dict[str, list[Layout]]:
  of = lambda layer: [stack.layout for stack in layer.spec.stacks.values()]
  return {path: of(layer) for path, layer in layers.items()}


def _fingerprints(layer: Any, slots: bool) -> tuple[list[changes_lib.Lanes], dict[str, str]]:
  """The fingerprints of the stored rows, with their slots or without, and digests by table."""
  stacks = tuple(layer.spec.stacks.values())
  arrays = [stored_arrays(layer, stack) for stack in stacks]
  if not slots:
    arrays = [{"parameters": stored["parameters"]} for stored in arrays]
  lanes, digests = jax.block_until_ready(changes_lib.fingerprints(stacks, arrays))
  return lanes, {table: changes_lib.as_text(x) for table, x in digests.items()}


def _digests(node: Any, of_layers: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
  """`Delta.before` of a node, from the digests of its layers' tables; all processes call it."""
  tables = {
    f"tables/{key}": of_layers[id(layer)][table]
    for key, (layer, table) in autodiff.row_keys(node).items()
  }
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  params = [name(path) for path, _ in jax.tree.leaves_with_path(nnx.state(node, nnx.Param))]
  digest = lambda x: hashlib.blake2b(_on_host(x).tobytes(), digest_size=8).hexdigest()
  return tables | {f"state/{k}": digest(x) for k, x in _dense(node).items() if k in params}


def _dense(node: Any) -> dict[str, jax.Array]:
  return {path: jnp.asarray(x) for path, x in checkpoint.dense_arrays(node).items()}


def _changed_rows(layer: Any, old: Any, new: Any) -> dict[str, TableRows]:
  """The rows of each table of a layer whose fingerprints differ."""
  stacks = tuple(layer.spec.stacks.values())
  masks, counts = changes_lib.changed(stacks, old, new)
  rows: dict[str, TableRows] = {}
  for stack, mask, count in zip(stacks, masks, np.asarray(counts), strict=True):
    rows |= changes_lib.take(stack, stored_arrays(layer, stack), mask, int(count))
  return rows


def _on_host(x: jax.Array) -> np.ndarray:
  """A copy of a whole array; all processes call it."""
  if not x.is_fully_addressable and not x.is_fully_replicated:
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
  return np.array(x)


# --- applying -------------------------------------------------------------------------------------


def apply(delta: Delta, at: int, /, **nodes: Any) -> int:
  """Puts a delta into models and optimizers, and returns the step that they are at now.

  The mesh may be another one than the delta's. A table without an optimizer, or with
  `embed.frozen()`, takes the rows and ignores slots, so that a server follows a training run.

  All new arrays are computed, as copies, before the first is set: requests that are being answered
  keep the arrays that they have read, and an error leaves the nodes as they were. Other threads may
  predict meanwhile, by functions under `nnx.jit(graph=False)`. New arrays are not set while another
  thread calls a step of `embed.jit_step`; `apply` raises if the step has changed tables.

  Args:
    delta: from `read`, or of a run of one process.
    at: the step of the state that the nodes hold.
    **nodes: some or all of the nodes of the delta.

  Raises:
    ValueError: before anything is changed: if the delta does not begin at that step, holds other
      tables or arrays, or was made against other parameters. The message names them.
    RuntimeError: if another thread replaced a table during the call. A later write-back from a call
      that began earlier raises it in its own thread.

  >>> movie = embed.TableConfig(4, 2, name="movie")
  >>> trained = embed.SparseEmbed(embed.FeatureConfig(movie), embed.sgd(0.5), rngs=nnx.Rngs(0))
  >>> served = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> since = embed.deltas.fingerprint(0, model=trained)
  >>> trained.apply_row_gradients({"movie": embed.RowGrads(jnp.array([3]), jnp.ones((1, 2)))})
  >>> delta, since = embed.deltas.changes(since, 1, model=trained)
  >>> embed.deltas.apply(delta, 0, model=served)
  1
  >>> bool((served.tables["movie"] == trained.tables["movie"]).all())
  True
  """
  _check_step(delta, at)
  copies, live, read = _copied(nodes)
  rows = {name: _fitting(delta, name, node) for name, node in copies.items()}
  for name, node in copies.items():
    checkpoint.load_dense_arrays(delta.state[name], node)
    by_layer: dict[int, dict[str, TableRows]] = {}
    for key, (layer, table) in autodiff.row_keys(node).items():
      by_layer.setdefault(id(layer), {})[table] = rows[name][key]
      if of_table := delta.owners.get(name, {}).get(key):
        dynamic_table(layer, table).put_owners(of_table.changed)
    for layer in autodiff.sparse_embeds(node).values():
      _put(layer, by_layer[id(layer)])
  new = _variables(copies)
  with changing("Applying a delta"):
    swap([(live[path], read[path], new[path].get_raw_value()) for path in live])
  return delta.step


def _copied(
  nodes: dict[str, Any],
) -> tuple[dict[str, Any], dict[Any, nnx.Variable], dict[Any, Any]]:
  """Copies of nodes that share their arrays; by path the nodes' Variables, and what they held."""
  try:
    copies, live = nnx.clone(nodes), _variables(nodes)
    for node in copies.values():
      autodiff.row_keys(node)
    read = {path: variable.get_raw_value() for path, variable in _variables(copies).items()}
    if list(read) != list(live):
      raise LookupError("Variables have come or gone.")
  # Another thread has cleared a module, and may be filling it again.
  except (AttributeError, LookupError, RuntimeError) as error:
    raise RuntimeError(f"The model has lost its attributes: {WRITTEN_BACK}") from error
  return copies, live, read


def _variables(nodes: Any) -> dict[Any, nnx.Variable]:
  return {path: x for path, x in nnx.iter_graph(nodes) if isinstance(x, nnx.Variable)}


def _check_step(delta: Delta, at: int) -> None:
  at = _integer(at)
  if delta.since != at:
    raise ValueError(
      f"The delta holds the rows that changed from step {delta.since} to {delta.step}, and the "
      f"state is at step {at}: apply the deltas in between first, or load a full checkpoint."
    )


def _fitting(delta: Delta, name: str, node: Any) -> dict[str, TableRows]:
  """The rows for each table of a node, without the slots that it does not have."""
  if name not in delta.tables:
    raise ValueError(f"The delta has no {name!r}; it has {sorted(delta.tables)}.")
  for layer in autodiff.sparse_embeds(node).values():
    for stack in layer.spec.stacks.values():
      stored_arrays(layer, stack)  # raises before any layer changes
  expected = checkpoint.like(**{name: node})[name]
  untrained = checkpoint.untrained(node)
  tables = delta.tables[name]
  saved: dict[str, tuple[int, ...]] = {f"table {key!r}": () for key in tables}
  wanted: dict[str, tuple[int, ...]] = {f"table {key!r}": () for key in expected["tables"]}
  fitting: dict[str, TableRows] = {}
  problems: list[str] = []
  of_keys = autodiff.row_keys(node)
  for key in filter(tables.__contains__, expected["tables"]):
    rows, (layer, table) = tables[key], of_keys[key]
    vocabulary = layer.spec.tables[table].vocabulary
    problems += _unlike(key, vocabulary, delta.owners.get(name, {}).get(key))
    arrays = {k: x for k, x in expected["tables"][key].items() if k not in (*BY_ROW, "sightings")}
    names = [k for k in rows.values if k in arrays] if key in untrained else list(rows.values)
    row = f"a row of {{}} of table {key!r}".format
    saved |= {row(k): rows.values[k].shape[1:] for k in names}
    wanted |= {row(k): x.shape[1:] for k, x in arrays.items()}
    problems += _outside(key, rows.ids, arrays["parameters"].shape[0])
    fitting[key] = TableRows(rows.ids, {k: rows.values[k] for k in names})
  state = delta.state[name]
  saved |= {f"array {path!r}": x.shape for path, x in state.items()}
  wanted |= {f"array {path!r}": x.shape for path, x in expected["state"].items()}
  problems += checkpoint.differences(saved, wanted)
  if problems:
    raise ValueError(
      f"The delta does not fit {name!r}: {'; '.join(problems[:10])}. If other threads call it: "
      f"{WRITTEN_BACK}"
    )
  if delta.before:  # a server may keep parameters in another dtype, which is not compared
    same = {
      f"tables/{k}": tables[k].values["parameters"].dtype == x["parameters"].dtype
      for k, x in expected["tables"].items()
    }
    same |= {f"state/{k}": state[k].dtype == x.dtype for k, x in expected["state"].items()}
    layers = autodiff.sparse_embeds(node).values()
    of_layers = {id(layer): _fingerprints(layer, slots=False)[1] for layer in layers}
    _check_before(delta, name, {k: x for k, x in _digests(node, of_layers).items() if same[k]})
  return fitting


def _unlike(key: str, vocabulary: Any, owners: Owners | None) -> list[str]:
  """Says if a table and a delta's do not both have a vocabulary of the same geometry and scores."""
  own = None if vocabulary is None else (vocabulary.capacity, vocabulary.bucket_width)
  of_delta = None if owners is None else tuple(owners.geometry.tolist())
  if own != of_delta:
    return [f"table {key!r} has the capacity and bucket width {of_delta}, the model's {own}"]
  if owners is not None and set(owners.changed) != set(names(vocabulary)):
    return [f"table {key!r} has {sorted(owners.changed)}, the model's has {names(vocabulary)}"]
  return []


def _outside(key: str, ids: np.ndarray, size: int) -> list[str]:
  """Describes the first id that is not a row of the table; [] if all are."""
  bad = ids[(ids < 0) | (ids >= size)]
  return (
    [f"table {key!r} has row {bad[0]}, the model's has rows 0 .. {size - 1}"] if bad.size else []
  )


def _check_before(delta: Delta, name: str, digests: Mapping[str, str]) -> None:
  """Raises ValueError for parameters that differ from those that the delta was made against."""
  known = delta.before.get(name, {})
  differing = [key for key, digest in digests.items() if digest != known.get(key, digest)]
  if differing:
    raise ValueError(
      f"The delta was made against other parameters: {', '.join(differing[:10])} of {name!r} are "
      f"not as they were at step {delta.since}. The model is of another run, or was changed since: "
      f"load a full checkpoint. If other threads call the model: {WRITTEN_BACK}"
    )


def _put(layer: Any, rows: Mapping[str, TableRows]) -> None:
  """Replaces rows of a layer's tables."""
  for stack in layer.spec.stacks.values():
    stored = stored_arrays(layer, stack)
    new = stored
    for table in stack.tables:
      new = changes_lib.put(stack, new, table, rows[table])
    replace(layer.arrays[stack.name], new)


def apply_to_tables(
  delta: Delta, at: int, tables: Mapping[str, np.ndarray], /, *, node: str = "model"
) -> int:
  """Writes the changed rows into NumPy tables, in place; returns the step that they are at now.

  For servers without JAX devices, or caches of rows: only rows are read, not slots nor the dense
  part, which is in `delta.state`. The tables are read once, to compare their digests.

  Args:
    delta: from `read`.
    at: the step of the rows in `tables`.
    tables: `[vocabulary_size, dim]` by "<module path>/<table>", all of the delta's or some.
      Each has exactly the rows of the model's table.
    node: the name of the model in the delta.

  Raises:
    ValueError: before anything is changed: for another step, an unknown table, another shape,
      a read-only array, or other rows than the delta was made against.

  >>> movie = embed.TableConfig(4, 2, optimizer=embed.sgd(0.5), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> served = {"movie": np.array(layer.tables["movie"])}
  >>> since = embed.deltas.fingerprint(0, model=layer)
  >>> layer.apply_row_gradients({"movie": embed.RowGrads(jnp.array([3]), jnp.ones((1, 2)))})
  >>> delta, since = embed.deltas.changes(since, 1, model=layer)
  >>> embed.deltas.apply_to_tables(delta, 0, served)
  1
  >>> bool((served["movie"] == layer.tables["movie"]).all())
  True
  """
  _check_step(delta, at)
  if node not in delta.tables:
    raise ValueError(f"The delta has no {node!r}; it has {sorted(delta.tables)}.")
  known = delta.tables[node]
  for key, table in tables.items():
    if key not in known:
      raise ValueError(f"The delta has no table {key!r}; it has {sorted(known)}.")
    rows = known[key]
    dim = rows.values["parameters"].shape[1:]
    if table.shape[1:] != dim:
      raise ValueError(f"Table {key!r} has rows of shape {table.shape[1:]}, the delta's {dim}.")
    if problems := _outside(key, rows.ids, len(table)):
      raise ValueError(f"The delta does not fit {node!r}: {problems[0]}.")
    if not table.flags.writeable:
      raise ValueError(f"Table {key!r} is read-only: give a copy of it, as np.array makes one.")
  dtype = lambda key: known[key].values["parameters"].dtype
  digest = changes_lib.digest_of
  same = {
    f"tables/{k}": digest(x) for k, x in tables.items() if delta.before and x.dtype == dtype(k)
  }
  _check_before(delta, node, same)
  for key, table in tables.items():
    table[known[key].ids] = known[key].values["parameters"]
  return delta.step


def apply_to_rows(
  delta: Delta, rows: MutableMapping[int, np.ndarray], table: str, /, *, node: str = "model"
) -> None:
  """Brings a store of rows by raw id up to a delta, in place: for servers without the tables.

  New and changed rows are set, and the evicted removed. To do it twice changes nothing.

  Args:
    delta: from `read`.
    rows: float `[dim]` by raw id, any mapping.
    table: the "<module path>/<table>", which has a `DynamicVocabulary`.
    node: the name of the model in the delta.

  Raises:
    ValueError: if the delta has no such table.

  >>> user = embed.TableConfig(embed.DynamicVocabulary(1, bucket_width=1), 2, name="user")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(user), rngs=nnx.Rngs(0))
  >>> since, rows = embed.deltas.fingerprint(0, model=layer), {7: np.zeros(2)}
  >>> for raw_id in (7, 8):
  ...   batch = layer.admit(np.array([raw_id]))
  ...   delta, since = embed.deltas.changes(since, raw_id, model=layer)
  ...   embed.deltas.apply_to_rows(delta, rows, "user")
  >>> list(rows), delta.owners["model"]["user"].evicted.tolist()
  ([8], [[0, 7]])
  """
  if table not in delta.owners.get(node, {}):
    raise ValueError(f"The delta has no table {table!r} of {node!r} with a DynamicVocabulary.")
  as_ints = lambda pairs: ((pairs[:, 0].astype(np.uint64) << np.uint64(32)) | pairs[:, 1]).tolist()
  owners, changed = delta.owners[node][table], delta.tables[node][table]
  raw_ids = owners.changed["raw_ids"]
  at = np.searchsorted(raw_ids.ids, changed.ids)
  owner = raw_ids.values["values"][at]
  is_owned = (owner != np.uint32(2**32 - 1)).any(axis=1)
  for raw_id in as_ints(owners.evicted):
    rows.pop(raw_id, None)
  values = changed.values["parameters"][is_owned]
  rows.update(zip(as_ints(owner[is_owned]), values, strict=True))


# --- files ----------------------------------------------------------------------------------------

# The archive has a CRC for each array, which NumPy checks. bfloat16 and other types that
# .npy does not know are stored as unsigned integers of their bits; the header has their names.


def _contents(header: Mapping[str, Any], array: Callable[[str], Any]) -> tuple[Any, Any, Any]:
  """The tables, state and owners of the delta of a header, from its arrays by name in a file."""
  by_node = lambda kind, make: {
    node: {key: make(f"{node}/{kind}/{key}", names) for key, names in of.items()}
    for node, of in header.get(kind, {}).items()
  }
  rows = lambda at, names: TableRows(array(f"{at}/ids"), {x: array(f"{at}/{x}") for x in names})
  entries = lambda at: TableRows(array(f"{at}/rows"), {"values": array(f"{at}/values")})
  owners = lambda at, names: Owners(
    array(f"{at}/evicted"), {x: entries(f"{at}/{x}") for x in names}, array(f"{at}/geometry")
  )
  state = {n: {x: array(f"{n}/state/{x}") for x in of} for n, of in header["state"].items()}
  return by_node("tables", rows), state, by_node("owners", owners)


def write(folder: str | os.PathLike[str], delta: Delta, /) -> None:
  """Writes a delta as `rows-<process>-of-<processes>.npz`, a file for each process.

  A file appears when all of it is on the disk, in place of an earlier one. The last process removes
  what another number of processes has written, and partial files that are an hour old. Arrays are
  called `<node>/tables/<key>/ids`, `.../parameters` and the names of slots, and
  `<node>/state/<path>`; "header" is JSON as bytes.

  Args:
    folder: one folder per delta, made where it is missing. All processes name the same one.
    delta: from `changes`.

  Raises:
    OSError: if the file cannot be written. The message names it; no partial file remains.

  >>> import os, tempfile
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> delta, _ = embed.deltas.changes(embed.deltas.fingerprint(0, model=layer), 10, model=layer)
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   embed.deltas.write(folder, delta)
  ...   print(os.listdir(folder), embed.deltas.read(folder).step)
  ['rows-00000-of-00001.npz'] 10
  """
  header: dict[str, Any] = {
    "format": _FORMAT,
    "since": delta.since,
    "step": delta.step,
    "before": delta.before,
    "after": delta.after,
    "tables": {n: {key: list(x.values) for key, x in of.items()} for n, of in delta.tables.items()},
    "state": {node: list(of) for node, of in delta.state.items()},
    "owners": {n: {k: list(x.changed) for k, x in of.items()} for n, of in delta.owners.items()},
  }
  names = jax.tree.leaves(_contents(header, lambda name: name))
  values = jax.tree.leaves((delta.tables, delta.state, delta.owners))
  arrays: dict[str, np.ndarray] = dict(zip(names, values, strict=True))
  header["dtypes"] = {name: x.dtype.name for name, x in arrays.items() if x.dtype.kind == "V"}
  entries: dict[str, Any] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
  for name, x in arrays.items():
    entries[name] = x.view(f"uint{8 * x.dtype.itemsize}") if name in header["dtypes"] else x
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  path /= _name(jax.process_index(), jax.process_count())
  partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")  # of this writer alone
  try:
    with partial.open("xb") as file:
      np.savez(file, **entries)
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), str(path)) from error
  finally:
    partial.unlink(missing_ok=True)
  sets, count = _sets(path.parent), jax.process_count()
  if sets.pop(count, set()).issuperset(range(count)):
    for others, indices in sets.items():
      for index in indices:
        (path.parent / _name(index, others)).unlink(missing_ok=True)
    for left in path.parent.glob("rows-*.part"):
      with contextlib.suppress(FileNotFoundError):  # a writer has just renamed it
        if time.time() - left.stat().st_mtime > _KILLED:
          left.unlink()


def _name(index: int, count: int) -> str:
  return f"rows-{index:05}-of-{count:05}.npz"


def _sets(folder: pathlib.Path) -> dict[int, set[int]]:
  """The numbers of the processes whose files are in a folder, by how many processes there were."""
  sets: dict[int, set[int]] = {}
  for path in folder.glob("*.npz"):
    if match := _FILE.fullmatch(path.name):
      sets.setdefault(int(match[2]), set()).add(int(match[1]))
  return sets


def read(folder: str | os.PathLike[str], /) -> Delta:
  """Reads the delta that all processes have written to a folder by `write`.

  Args:
    folder: as for `write`.

  Raises:
    FileNotFoundError: if the file of a process is missing. The message names it.
    ValueError: if a file is damaged, or none of `write`, or if there are files of two deltas. The
      message names them.
  """
  paths = _files(pathlib.Path(folder))
  parts = [_read_file(path) for path in paths]
  first = parts[0]
  made = lambda part: (part.since, part.step, part.before, part.after)
  for path, part in zip(paths, parts, strict=True):
    if made(part) != made(first):
      raise ValueError(
        f"{paths[0]} and {path} are of two deltas, or of two attempts to write one: write it "
        "again, from all processes."
      )

  def joined(*rows: TableRows) -> TableRows:
    ids = np.concatenate([each.ids for each in rows])
    order = np.argsort(ids)
    join = lambda key: np.concatenate([each.values[key] for each in rows])[order]
    return TableRows(ids[order], {key: join(key) for key in rows[0].values})

  tables = {
    node: {key: joined(*(part.tables[node][key] for part in parts)) for key in of}
    for node, of in first.tables.items()
  }
  return dataclasses.replace(first, tables=tables)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files of all processes."""
  sets = _sets(folder)
  if not sets:
    raise FileNotFoundError(f"{folder} holds no delta: it has no file rows-....npz.")
  complete = [count for count, indices in sets.items() if indices.issuperset(range(count))]
  if len(complete) > 1:
    first, second = (folder / _name(0, count) for count in sorted(complete)[:2])
    raise ValueError(f"{first} and {second} are of two deltas: remove the files of the older one.")
  (count,) = complete or [max(sets)]
  for index in range(count):
    if index not in sets[count]:
      missing = folder / _name(index, count)
      raise FileNotFoundError(f"{missing} is missing, the rows of a process in the delta.")
  return [folder / _name(index, count) for index in range(count)]


def _read_file(path: pathlib.Path) -> Delta:
  try:
    # NumPy does not close a file that is no archive.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop(_HEADER).tobytes())
    if header["format"] > _FORMAT:
      raise ValueError(f"its format {header['format']} is of a later version of this library")
    for name, dtype in header["dtypes"].items():
      arrays[name] = arrays[name].view(getattr(ml_dtypes, dtype))
    tables, state, owners = _contents(header, arrays.__getitem__)
    digests = header.get("before", {}), header.get("after", {})
    return Delta(header["since"], header["step"], tables, state, *digests, owners)
  # NumPy, zipfile, zlib and json raise errors of many kinds, most without the file's name.
  except Exception as error:
    if isinstance(error, OSError) and error.filename is not None:
      raise
    reason = str(error).partition("\n")[0]
    raise ValueError(f"{path} is damaged, or no file of a delta ({reason}).") from error
