"""Deltas: the rows that have changed since an earlier state, to save and to send them alone.

A training step touches few rows of a large table. `fingerprint` remembers 64 bits of each row and
its slots, on the devices; `changes` compares them with the model some steps later, and returns a
`Delta`: the rows that differ, by their ids, and everything outside tables whole. Nothing is added
to the training step. A full checkpoint and the deltas after it make up the later state to the bit,
on any mesh.

`write` and `read` keep a delta in a folder, in one `.npz` file for each process that wrote it.
`apply` puts it into a model, of the same run or a server's without optimizers, and
`apply_to_tables` into plain NumPy tables.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from embed import autodiff, checkpoint
from embed.delta_files import Delta, read, write
from embed.engine.layout import Layout
from embed.steps import stored_arrays
from embed.storage import changes as changes_lib
from embed.storage.changes import TableRows
from embed.variables import changing, replace

__all__ = [
  "Delta",
  "Fingerprints",
  "apply",
  "apply_to_tables",
  "changes",
  "fingerprint",
  "read",
  "write",
]


@dataclasses.dataclass(frozen=True)
class Fingerprints:
  """Fingerprints of a state, 64 bits for each row, on the devices: the start of a later delta.

  Attributes:
    step: of the state.
    lanes: the fingerprints, in the order of storage; internal.
    layouts: which row each of them is of; internal.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> embed.deltas.fingerprint(10, model=layer).step
  10
  """

  step: int
  lanes: Mapping[str, Mapping[str, list[changes_lib.Lanes]]]
  layouts: Mapping[str, Mapping[str, list[Layout]]]


# --- making ---------------------------------------------------------------------------------------


def fingerprint(step: int, /, **nodes: Any) -> Fingerprints:
  """Remembers a state, to find out later which rows have changed.

  Takes one reading of all tables, and 8 bytes of device memory for each row.

  Args:
    step: the number of the state.
    **nodes: `nnx` modules and optimizers, by the names of `embed.checkpoint.to_tree`.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> before = embed.deltas.fingerprint(0, model=layer)
  >>> delta, before = embed.deltas.changes(before, 10, model=layer)
  >>> delta.num_rows
  0
  """
  lanes, layouts = {}, {}
  for name, node in nodes.items():
    layers = autodiff.sparse_embeds(node)
    lanes[name] = {path: _lanes(layer) for path, layer in layers.items()}
    layouts[name] = _layouts(layers)
  return Fingerprints(step, lanes, layouts)


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
    ValueError: if the fingerprints are of other nodes, layers or meshes.

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
    state[name] = {path: _on_host(x) for path, x in checkpoint.dense_arrays(node).items()}
    if jax.process_index():
      state[name] = {}
  return Delta(since.step, step, tables, state), new


def _layouts(layers: Mapping[str, Any]) -> dict[str, list[Layout]]:
  of = lambda layer: [stack.layout for stack in layer.spec.stacks.values()]
  return {path: of(layer) for path, layer in layers.items()}


def _lanes(layer: Any) -> list[changes_lib.Lanes]:
  stacks = tuple(layer.spec.stacks.values())
  return changes_lib.fingerprints(stacks, [stored_arrays(layer, stack) for stack in stacks])


def _changed_rows(layer: Any, old: Any, new: Any) -> dict[str, TableRows]:
  """The rows of each table of a layer whose fingerprints differ."""
  stacks = tuple(layer.spec.stacks.values())
  masks, counts = changes_lib.changed(stacks, old, new)
  rows: dict[str, TableRows] = {}
  for stack, mask, count in zip(stacks, masks, counts, strict=True):
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
  Tables are copied once and then replaced: requests that are being answered see the old ones.

  Args:
    delta: from `read`, or of a run of one process.
    at: the step of the state that the nodes hold.
    **nodes: some or all of the nodes of the delta.

  Raises:
    ValueError: before anything is changed: if the delta does not begin at that step, or holds other
      tables or arrays; names them.

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
  rows = {name: _fitting(delta, name, node) for name, node in nodes.items()}
  for name, node in nodes.items():
    checkpoint.load_dense_arrays(delta.state[name], node)
    by_layer: dict[int, dict[str, TableRows]] = {}
    for key, (layer, table) in autodiff.row_keys(node).items():
      by_layer.setdefault(id(layer), {})[table] = rows[name][key]
    for layer in autodiff.sparse_embeds(node).values():
      _put(layer, by_layer[id(layer)])
  return delta.step


def _check_step(delta: Delta, at: int) -> None:
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
    _check_alive(layer)
  expected = checkpoint.like(**{name: node})[name]
  untrained = checkpoint.untrained(node)
  tables = delta.tables[name]
  problems = [f"table {key!r} is missing" for key in expected["tables"] if key not in tables]
  problems += [f"table {key!r} is not in the model" for key in tables.keys() - expected["tables"]]
  fitting: dict[str, TableRows] = {}
  for key, arrays in expected["tables"].items():
    if key not in tables:
      continue
    rows = tables[key]
    names = [k for k in rows.values if k in arrays] if key in untrained else list(rows.values)
    if set(names) != set(arrays):
      problems.append(f"table {key!r} has {sorted(names)}, the model's has {sorted(arrays)}")
      continue
    shapes = {k: (rows.values[k].shape[1:], arrays[k].shape[1:]) for k in names}
    problems += [
      f"{k} of table {key!r} have rows of shape {a}, the model's have {b}"
      for k, (a, b) in shapes.items()
      if a != b
    ]
    size = arrays["parameters"].shape[0]
    if len(rows.ids) and not 0 <= rows.ids.min() <= rows.ids.max() < size:
      problems.append(f"table {key!r} has row {rows.ids.max()}, the model's has {size} rows")
    fitting[key] = TableRows(rows.ids, {k: rows.values[k] for k in names})
  state = delta.state[name]
  problems += [f"array {path!r} is missing" for path in expected["state"] if path not in state]
  problems += [f"array {path!r} is not in the model" for path in state.keys() - expected["state"]]
  problems += [
    f"array {path!r} has shape {state[path].shape}, the model's has {x.shape}"
    for path, x in expected["state"].items()
    if path in state and state[path].shape != x.shape
  ]
  if problems:
    raise ValueError(f"The delta does not fit {name!r}: {'; '.join(problems[:10])}.")
  return fitting


def _check_alive(layer: Any) -> None:
  """Raises ValueError if rows of a layer were donated."""
  for stack in layer.spec.stacks.values():
    if any(x.is_deleted() for x in stored_arrays(layer, stack).values()):
      raise ValueError(
        f"The rows of table {stack.tables[0]!r} are gone: the step of another model that shares "
        "them was compiled with donation. After nnx.clone(model) or nnx.update(server, "
        "nnx.state(model)), give one of the two its own arrays: nnx.update(server, jax.tree.map("
        "jnp.copy, nnx.state(server)))."
      )


def _put(layer: Any, rows: Mapping[str, TableRows]) -> None:
  """Replaces rows of a layer's tables."""
  for stack in layer.spec.stacks.values():
    stored = stored_arrays(layer, stack)
    new = stored
    for table in stack.tables:
      new = changes_lib.put(stack, new, table, rows[table])
    with changing("Applying a delta"):
      replace(layer.arrays[stack.name], new)


def apply_to_tables(
  delta: Delta, at: int, tables: Mapping[str, np.ndarray], /, *, node: str = "model"
) -> int:
  """Writes the changed rows into NumPy tables, in place; returns the step that they are at now.

  For servers without JAX devices, or caches of rows: only rows are read, not slots nor the dense
  part, which is in `delta.state`.

  Args:
    delta: from `read`.
    at: the step of the rows in `tables`.
    tables: `[vocabulary_size, dim]` by "<module path>/<table>", all of the delta's or some.
    node: the name of the model in the delta.

  Raises:
    ValueError: before anything is changed: for another step, an unknown table, or another shape.

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
    largest, dim = int(rows.ids.max(initial=-1)), rows.values["parameters"].shape[1:]
    if table.shape[1:] != dim or largest >= len(table):
      raise ValueError(
        f"Table {key!r} has shape {table.shape}, the delta's has rows of shape {dim} and ids up to "
        f"{largest}."
      )
  for key, table in tables.items():
    table[known[key].ids] = known[key].values["parameters"]
  return delta.step
