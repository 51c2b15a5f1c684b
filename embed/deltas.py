"""Deltas: the rows that have changed since an earlier state, to be saved or sent on their own.

A training step touches few rows of a large table. `fingerprint` keeps a 64-bit hash of each row and
its slots, on the devices; `changes` compares these with the model some steps later, and returns a
`Delta`: the rows that differ, by their ids, and all arrays outside tables. A full checkpoint and
the deltas after it reproduce the later state bit for bit, on any mesh.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from embed import checkpoint
from embed.config import integer
from embed.engine import admission
from embed.engine.stack import Layout
from embed.layer import dynamic_table, owned, row_keys, sparse_embeds, stored_arrays
from embed.storage import changes as changes_lib
from embed.storage.changes import TableRows
from embed.variables import replace

__all__ = ["Delta", "Fingerprints", "Owners", "apply", "changes", "fingerprint", "read", "write"]

_HEADER = "header"  # the entry of a file that describes the others, in JSON
_DESCRIBED = ("since", "step", "before", "after")
_FILE = re.compile(r"rows-(\d{5})-of-(\d{5})\.npz")
Digests = Mapping[str, Mapping[str, str]]


class Owners(NamedTuple):
  """The changed owners of the rows of a table with a `DynamicVocabulary`.

  Attributes:
    evicted: uint32 `[E, 2]`, the raw ids that had a row before and have none now.
    changed: the rows whose owner or scores differ: "raw_ids", "last_used" and, with "lfu", "uses",
      as in `SparseEmbed.variables`.
  """

  evicted: np.ndarray
  changed: TableRows


@dataclasses.dataclass(frozen=True, repr=False)
class Delta:
  """The difference between two states of models and optimizers, in NumPy.

  Attributes:
    since: the step of the earlier state.
    step: the step of the later state.
    tables: `{node: {"<module path>/<table>": (ids, values)}}`: ids int32 `[K]`, ascending, and
      values `{"parameters": [K, dim], slot: [K, dim] or [K]}`; a table with a `DynamicVocabulary`
      also has "raw_ids" `[K, 2]`. K is 0 if no row has changed.
    state: `{node: {path: array}}`: all arrays outside tables, whole.
    owners: `{node: {"<module path>/<table>": Owners}}`, for tables with a `DynamicVocabulary`.
    before: `{node: {"<module path>/<table>": digest}}` at `since`: a hash of a table's rows without
      their slots, in 16 hexadecimal digits, the same on every mesh.
    after: the digests at `step`.

  In a run of several processes, `changes` gives each process the rows of its own shards, and
  process 0 `state` and `owners` as well; `read` returns everything in every process.
  """

  since: int
  step: int
  tables: Mapping[str, Mapping[str, TableRows]]
  state: Mapping[str, Mapping[str, np.ndarray]]
  owners: Mapping[str, Mapping[str, Owners]]
  before: Digests
  after: Digests


@dataclasses.dataclass(frozen=True)
class Fingerprints:
  """The result of `fingerprint`: 64 bits for each row, on the devices, to base a later delta on.

  Attributes:
    step: the step of the state.
    digests: as in `Delta.before`.
    lanes, layouts, owners: internal, by node: the fingerprints of the stored rows, the layouts of
      the stacks, and the owners of the rows of dynamic tables.
  """

  step: int
  lanes: Mapping[str, Mapping[str, list[changes_lib.Lanes]]]
  layouts: Mapping[str, Mapping[str, list[Layout]]]
  digests: Digests
  owners: Mapping[str, Mapping[str, Mapping[str, jax.Array]]]


def fingerprint(step: int, /, **nodes: Any) -> Fingerprints:
  """Fingerprints a state, so that `changes` can find later which rows have changed.

  Reads all tables once, and takes 8 bytes of device memory for each row; for a table with a
  `DynamicVocabulary`, it also keeps a copy of the raw ids and scores.

  Args:
    step: the step of the state, a Python, NumPy or JAX integer.
    **nodes: `nnx` modules and optimizers, by name as in `embed.checkpoint.to_tree`.
  """
  step = integer("step", step, 0)
  lanes: dict[str, dict[str, list[changes_lib.Lanes]]] = {}
  digests: dict[str, dict[str, str]] = {}
  owners: dict[str, dict[str, Any]] = {}
  for name, node in nodes.items():
    lanes[name], of_layers = {}, {}
    for path, layer in sparse_embeds(node).items():
      lanes[name][path], of_layers[id(layer)] = _fingerprints(layer, slots=True)
    keys = row_keys(node)
    digests[name] = {key: of_layers[id(layer)][table] for key, (layer, table) in keys.items()}
    owners[name] = {key: x for key, (layer, table) in keys.items() if (x := owned(layer, table))}
  layouts = {name: _layouts(node) for name, node in nodes.items()}
  return Fingerprints(step, lanes, layouts, digests, owners)


def changes(since: Fingerprints, step: int, /, **nodes: Any) -> tuple[Delta, Fingerprints]:
  """Compares a state with an earlier one; returns the delta and the new fingerprints.

  Rows and slots are compared bit for bit, through fingerprints: a changed row is missed with a
  probability of 2**-64. All processes must call it. Keep the old fingerprints until the delta is
  stored: if it is lost, the next delta has to begin where this one began.

  Args:
    since: fingerprints of the earlier state, on the same mesh.
    step: the step of this state.
    **nodes: as for `fingerprint`, including the optimizers.
  """
  for name, node in nodes.items():
    if since.layouts.get(name) != _layouts(node):
      raise ValueError(
        f"The fingerprints are of other tables than {name!r} has, or of another mesh: make them "
        f"with embed.deltas.fingerprint(step, {name}=...) after the model is made or restored."
      )
  new = fingerprint(step, **nodes)
  tables: dict[str, dict[str, TableRows]] = {}
  state: dict[str, dict[str, np.ndarray]] = {}
  owners: dict[str, dict[str, Owners]] = {}
  for name, node in nodes.items():
    rows = {
      id(layer): _changed_rows(layer, since.lanes[name][path], new.lanes[name][path])
      for path, layer in sparse_embeds(node).items()
    }
    state[name] = {path: _on_host(x) for path, x in checkpoint.dense_arrays(node).items()}
    tables[name], owners[name] = {}, {}
    for key, (layer, table) in row_keys(node).items():
      tables[name][key] = of_table = rows[id(layer)][table]
      if key in new.owners[name]:
        before, after = (_on_host(x.owners[name][key]) for x in (since, new))
        of_table.values["raw_ids"] = after["raw_ids"][of_table.ids]
        owners[name][key] = _changed_owners(before, after)
    if jax.process_index():
      state[name], owners[name] = {}, {}
  before = {name: since.digests[name] for name in nodes}
  return Delta(since.step, new.step, tables, state, owners, before, new.digests), new


def _changed_owners(before: dict[str, Any], after: dict[str, Any]) -> Owners:
  differs = [(x != before[name]).reshape(len(x), -1).any(axis=1) for name, x in after.items()]
  ids = np.flatnonzero(np.any(differs, axis=0)).astype(np.int32)
  as_one = lambda arrays: np.ascontiguousarray(arrays["raw_ids"]).view(np.uint64)[:, 0]
  evicted = before["raw_ids"][~np.isin(as_one(before), as_one(after))]
  return Owners(evicted, TableRows(ids, {name: x[ids] for name, x in after.items()}))


def _layouts(node: Any) -> dict[str, list[Layout]]:
  layers = sparse_embeds(node)
  return {p: [stack.layout for stack in layer.spec.stacks.values()] for p, layer in layers.items()}


def _fingerprints(layer: Any, slots: bool) -> tuple[list[changes_lib.Lanes], dict[str, str]]:
  """Fingerprints of the stored rows, with or without their slots, and digests by table."""
  stacks = tuple(layer.spec.stacks.values())
  arrays = [stored_arrays(layer, stack) for stack in stacks]
  if not slots:
    arrays = [{"parameters": stored["parameters"]} for stored in arrays]
  lanes, digests = jax.block_until_ready(changes_lib.fingerprints(stacks, arrays))
  return lanes, {table: changes_lib.as_text(x) for table, x in digests.items()}


def _changed_rows(layer: Any, old: Any, new: Any) -> dict[str, TableRows]:
  """Rows whose fingerprints differ, for each table of a layer."""
  rows: dict[str, TableRows] = {}
  for stack, before, after in zip(layer.spec.stacks.values(), old, new, strict=True):
    mask, count = changes_lib.changed(stack, before, after)
    rows |= changes_lib.take(stack, stored_arrays(layer, stack), mask, int(count))
  return rows


def _on_host(tree: Any) -> Any:
  """NumPy copies of whole arrays; all processes must call it."""

  def copy(x):
    x = jnp.asarray(x)
    if not x.is_fully_addressable and not x.is_fully_replicated:
      return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.array(x)

  return jax.tree.map(copy, tree)


# --- applying -------------------------------------------------------------------------------------


def apply(delta: Delta, at: int, /, **nodes: Any) -> int:
  """Applies a delta to models and optimizers, and returns their new step.

  The mesh may differ from the delta's. A table without an optimizer, or with `embed.frozen()`,
  takes the rows and ignores slots, so that a server can follow a training run.

  All new arrays are computed, as copies, before the first is set, so that an error leaves the nodes
  as they were. Meanwhile, other threads may predict with functions under `nnx.jit(graph=False)`. Do
  not apply a delta during a call of any other function under `nnx.jit` or `embed.jit_step`: at its
  end, the call writes the model back, which would undo the delta.

  Args:
    delta: from `read`, or from `changes` in a run of one process.
    at: the step of the state that the nodes hold.
    **nodes: some or all of the nodes of the delta.

  Raises:
    ValueError: before anything is changed, if the delta does not begin at that step, holds other
      tables or arrays, or was made against other rows. The message names them.
  """
  if delta.since != (at := integer("at", at, 0)):
    raise ValueError(
      f"The delta holds the rows that changed from step {delta.since} to {delta.step}, and the "
      f"state is at step {at}: apply the deltas in between first, or load a full checkpoint."
    )
  for name, node in nodes.items():
    _check_fits(delta, name, node)
  copies = nnx.clone(nodes)  # new Variables that share the arrays
  for name, node in copies.items():
    checkpoint.load_dense_arrays(delta.state[name], node)
    for key, (layer, table) in row_keys(node).items():
      _put(layer, table, delta.tables[name][key], delta.owners[name].get(key))
  for variable, new in zip(_variables(nodes), _variables(copies), strict=True):
    variable.set_raw_value(new.get_raw_value())
  return delta.step


def _variables(nodes: Any) -> list[nnx.Variable]:
  return [x for _, x in nnx.iter_graph(nodes) if isinstance(x, nnx.Variable)]


def _put(layer: Any, table: str, rows: TableRows, owners: Owners | None) -> None:
  """Replaces rows of a table, and their owners."""
  stack = layer.spec.stack_of[table]
  stored = stored_arrays(layer, stack)
  values = {key: rows.values[key] for key in stored if key in rows.values}
  new = changes_lib.put(stack, stored, table, TableRows(rows.ids, values))
  replace(layer.arrays[stack.name], new)
  if owners is not None:
    arrays = _on_host(owned(layer, table))
    for key, x in owners.changed.values.items():
      arrays[key][owners.changed.ids] = x
    vocabulary = layer.spec.tables[table].vocabulary
    if not admission.fits(vocabulary, arrays["raw_ids"]):
      raise ValueError(f"The delta has another capacity or bucket_width for table {table!r}.")
    dynamic_table(layer, table).set_owners(arrays)


def _check_fits(delta: Delta, name: str, node: Any) -> None:
  """Raises ValueError unless a node has a delta's arrays, and the rows that it was made against."""
  if name not in delta.tables:
    raise ValueError(f"The delta has no {name!r}; it has {sorted(delta.tables)}.")
  tables, owners = delta.tables[name], delta.owners[name]
  expected = checkpoint.like(node=node)["node"]["tables"]
  given: dict[str, Any] = {"state": delta.state[name], "tables": {}}
  problems = []
  for key, rows in tables.items():
    parts = [rows, owners[key].changed] if key in owners else [rows]
    ids = np.concatenate([part.ids for part in parts])
    size = expected[key]["parameters"].shape[0] if key in expected else ids.max(initial=0) + 1
    given["tables"][key] = {
      array: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
      for part in parts
      for array, x in part.values.items()
    }
    outside = ids[(ids < 0) | (ids >= size)]
    problems += [f"{key} has row {i}, the model's has rows 0 .. {size - 1}" for i in outside[:1]]
  problems += checkpoint.problems({name: given}, {name: node})
  if problems:
    raise ValueError(f"The delta does not fit {name!r}: {'; '.join(problems[:10])}.")
  layers = sparse_embeds(node).values()
  digests = {id(layer): _fingerprints(layer, slots=False)[1] for layer in layers}
  dtype_of = lambda arrays: arrays["parameters"].dtype
  differing = [
    key
    for key, (layer, table) in row_keys(node).items()
    # A server may keep rows in another dtype.
    if dtype_of(tables[key].values) == dtype_of(expected[key])
    and digests[id(layer)][table] != delta.before[name][key]
  ]
  if differing:
    raise ValueError(
      f"The delta was made against other rows: tables {', '.join(differing[:10])} of {name!r} are "
      f"not as they were at step {delta.since}. The model is of another run, or a delta is "
      "missing: load a full checkpoint, and apply the deltas after it in order."
    )


# --- files ----------------------------------------------------------------------------------------

# The archive has a CRC for each array, which is checked on reading. bfloat16 and other dtypes that
# .npy does not know are stored as unsigned integers of the same bits; the header names them.


def write(folder: str | os.PathLike[str], delta: Delta, /) -> None:
  """Writes a delta as `rows-<process>-of-<processes>.npz`, one file per process.

  A file appears once all of it is on disk, and replaces an earlier one; files for another number
  of processes are removed. Arrays are named `tables/<node>/<key>/ids`,
  `tables/<node>/<key>/values/parameters` (or a slot) and `state/<node>/<path>`; "header" is JSON as
  bytes.

  Args:
    folder: one folder per delta, created if missing. All processes must pass the same one.
    delta: from `changes`.

  Raises:
    OSError: if the file cannot be written. The message names it; no partial file remains.
  """
  tree = {"tables": delta.tables, "state": delta.state, "owners": delta.owners}
  name_of = lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/")
  names = jax.tree_util.tree_map_with_path(name_of, tree)
  arrays = dict(zip(jax.tree.leaves(names), jax.tree.leaves(tree), strict=True))
  header = {
    **{key: getattr(delta, key) for key in _DESCRIBED},
    "names": names,
    "dtypes": {name: x.dtype.name for name, x in arrays.items() if x.dtype.kind == "V"},
  }
  for name in header["dtypes"]:
    arrays[name] = arrays[name].view(f"uint{8 * arrays[name].itemsize}")
  arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
  folder, count = pathlib.Path(folder), jax.process_count()
  for path in folder.glob("rows-*-of-*.npz*"):
    if f"-of-{count:05}" not in path.name:
      path.unlink(missing_ok=True)  # another process may remove it too
  checkpoint.write_npz(folder / _name(jax.process_index(), count), arrays)


def _name(index: int, count: int) -> str:
  return f"rows-{index:05}-of-{count:05}.npz"


def read(folder: str | os.PathLike[str], /) -> Delta:
  """Reads the delta that all processes have written to a folder with `write`.

  Args:
    folder: as for `write`.

  Raises:
    FileNotFoundError: if the file of a process is missing. The message names it.
    ValueError: if a file is damaged or was not made by `write`, or if the files are of two deltas.
      The message names them.
  """
  folder = pathlib.Path(folder)
  found = {match[0]: int(match[2]) for x in folder.glob("*") if (match := _FILE.fullmatch(x.name))}
  if not found:
    raise FileNotFoundError(f"{folder} holds no delta: it has no file rows-....npz.")
  count = max(found.values())
  paths = [folder / _name(index, count) for index in range(count)]
  if missing := [path for path in paths if path.name not in found]:
    raise FileNotFoundError(
      f"{missing[0]} is missing: it holds the rows of a process in the delta."
    )
  parts = [_read_file(path) for path in paths]
  made = lambda part: [getattr(part, key) for key in _DESCRIBED]
  others = [folder / name for name in found if folder / name not in paths]
  others += [path for path, x in zip(paths, parts, strict=True) if made(x) != made(parts[0])]
  if others:
    raise ValueError(
      f"{paths[0]} and {others[0]} are of two deltas, or of two attempts to write one: write it "
      "again, from all processes."
    )

  def joined(*rows: TableRows) -> TableRows:
    together = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    order = np.argsort(together.ids)
    return jax.tree.map(lambda x: x[order], together)

  tables = {
    node: {key: joined(*(part.tables[node][key] for part in parts)) for key in of_node}
    for node, of_node in parts[0].tables.items()
  }
  return dataclasses.replace(parts[0], tables=tables)


def _read_file(path: pathlib.Path) -> Delta:
  try:
    # NumPy does not close a file that is not an archive.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop(_HEADER).tobytes())
    for name, dtype in header["dtypes"].items():
      arrays[name] = arrays[name].view(getattr(ml_dtypes, dtype))
    tree = jax.tree.map(arrays.__getitem__, header["names"])  # named tuples are lists in JSON
    tables = {
      node: {key: TableRows(*rows) for key, rows in x.items()} for node, x in tree["tables"].items()
    }
    owners = {
      node: {key: Owners(evicted, TableRows(*changed)) for key, (evicted, changed) in x.items()}
      for node, x in tree["owners"].items()
    }
    described = {key: header[key] for key in _DESCRIBED}
    return Delta(tables=tables, state=tree["state"], owners=owners, **described)
  # NumPy, zipfile, zlib and json raise many kinds of errors, most without the file's name.
  except Exception as error:
    if isinstance(error, OSError) and error.filename is not None:
      raise
    reason = str(error).partition("\n")[0]
    raise ValueError(f"{path} is damaged, or not a file of a delta ({reason}).") from error
