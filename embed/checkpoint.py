"""Checkpoints that do not depend on the mesh: tables by name, rows in order.

A checkpoint is a tree of plain arrays, for Orbax or any other store of arrays. Tables and slots are
at `tables/<module path>/<table>/<slot>`, without padding; all other arrays of the model and the
optimizer are at `state/<path>`.
"""

import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed.dynamic_vocabulary import Vocabulary
from embed.engine import admission
from embed.layer import SparseEmbed, row_keys, sparse_embeds
from embed.storage import tables as stored_tables
from embed.variables import SlotVariable, Table

__all__ = ["check", "from_tree", "like", "restore", "to_tree"]

Tree = dict[str, Any]


def to_tree(**nodes: Any) -> Tree:
  """Returns the state of models and optimizers as nested dicts of arrays.

  The arrays are the models' own: save or copy them before a step that donates the model. On a
  mesh, a table is split over the devices if its rows or columns divide evenly, and is whole on each
  device otherwise. Random keys are converted to key data.

  Args:
    **nodes: `nnx` modules and optimizers, by their names in the tree.

  Returns:
    A dict by name of dicts with two keys. "state" holds arrays by path, and "tables" holds
    `{"<module path>/<table>": {"parameters": array, slot: array}}`, with rows in order.
  """
  tables = lambda node: _by_key(node, lambda layer: layer.variables)
  return {name: {"state": dense_arrays(x), "tables": tables(x)} for name, x in nodes.items()}


def like(**nodes: Any) -> Tree:
  """Returns the tree of `to_tree` with `jax.ShapeDtypeStruct` leaves, as the target of a restore.

  Args:
    **nodes: as in `to_tree`. Models may be made under `nnx.eval_shape`, which allocates nothing.
  """
  struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
  state = lambda node: jax.tree.map(struct, dense_arrays(node))
  tables = lambda node: _by_key(node, lambda layer: layer.variable_shapes)
  return {name: {"state": state(x), "tables": tables(x)} for name, x in nodes.items()}


def _by_key(node: Any, by_table: Callable[[SparseEmbed], Mapping[str, Any]]) -> Tree:
  """The values that a function returns for the tables of each layer, by checkpoint key."""
  values = {id(layer): by_table(layer) for layer in sparse_embeds(node).values()}
  return {key: values[id(layer)][name] for key, (layer, name) in row_keys(node).items()}


def from_tree(tree: Tree, **nodes: Any) -> None:
  """Puts a tree made by `to_tree` into models and optimizers of the same configuration.

  The mesh may be a different one, or none. A table without an optimizer, or with `embed.frozen()`,
  takes the rows and ignores slots, so that a serving model can restore a training checkpoint.

  Args:
    tree: from `to_tree`, or NumPy or JAX arrays in the same structure. The arrays are copied.
    **nodes: the modules and optimizers to change, by their names in the tree.

  Raises:
    ValueError: before anything is changed, as in `check`, and for a table whose
      `DynamicVocabulary` was saved with a different bucket width.
  """
  check(tree, **nodes)
  _load(tree, nodes)


def _load(tree: Tree, nodes: Mapping[str, Any]) -> None:
  """Puts the arrays of a tree into the nodes; what the tree lacks stays as it is."""
  arrays: dict[SparseEmbed, Tree] = {}
  tree = {name: {"state": {}, "tables": {}} | tree.get(name, {}) for name in nodes}
  for name, node in nodes.items():
    for key, (layer, table) in row_keys(node).items():
      vocabulary, saved = layer.spec.tables[table].vocabulary, tree[name]["tables"].get(key, {})
      if vocabulary is not None and saved and not admission.fits(vocabulary, saved["raw_ids"]):
        raise ValueError(
          f"{name}/tables/{key} was saved with another bucket_width. Make its DynamicVocabulary as "
          "it was."
        )
      of_table = {slot: saved[slot] for slot in layer.variable_shapes[table] if slot in saved}
      arrays.setdefault(layer, {})[table] = of_table
  for name, node in nodes.items():
    load_dense_arrays(tree[name]["state"], node)  # first: it holds the batch counts
  for layer, tables in arrays.items():
    layer.load_variables(tables)


def check(tree: Tree, **nodes: Any) -> None:
  """Checks that a tree, or the metadata of a stored one, fits models and optimizers.

  `restore` calls this before it reads any array.

  Args:
    tree: as in `from_tree`; its leaves may be anything with a shape, such as the metadata
      `checkpointer.metadata(folder).item_metadata.tree` of Orbax.
    **nodes: as in `from_tree`.

  Raises:
    ValueError: naming up to 10 arrays that are missing, unknown, deleted, misshapen or not real.
  """
  if found := problems(tree, nodes):
    raise ValueError(
      f"The checkpoint does not fit the model: {'; '.join(found[:10])}. Make the model with the "
      "names, sizes and optimizers that were saved, or take what fits by `restore(..., "
      "partial=True)`. For another vocabulary, restore that model, and copy its rows and slots to "
      "the new one with `load_variables`."
    )


def problems(tree: Tree, nodes: Mapping[str, Any]) -> list[str]:
  """Names each array of a tree that does not fit the nodes, and each that is missing."""
  found = []
  for name, node in nodes.items():
    expected, saved = _flat(like(node=node)["node"]), _flat(tree.get(name, {}))
    optimizers = _by_key(node, lambda layer: layer.spec.optimizers)
    untrained = {key for key, x in optimizers.items() if x is None or x.equation is None}
    misfits = {path: _misfit(saved, path, x) for path, x in expected.items()}
    found += [f"{name}/{path} {misfit}" for path, misfit in misfits.items() if misfit]
    for path in saved:
      is_slot = path.removeprefix("tables/").rpartition("/")[0] in untrained  # ignored for serving
      if path not in expected and not is_slot:
        found.append(f"{name}/{path} is not in the model")
  return found


def _misfit(saved: Mapping[str, Any], path: str, wanted: Any) -> str | None:
  """The reason that the model cannot take an array of a tree, or None."""
  if path not in saved:
    return "is missing"
  if isinstance(saved[path], jax.Array) and saved[path].is_deleted():
    return "was deleted by a step that donated its model: copy the tree before"
  return stored_tables.misfit(saved[path], wanted)


def _fitting(tree: Tree, nodes: Mapping[str, Any]) -> Tree:
  """The part of `like` that a tree, or the metadata of a stored one, fits.

  It has the rows of a table with the raw ids and counts that belong to them, or nothing of them,
  and all slots or none: another optimizer would read some of them differently.
  """
  fitting, model = {}, like(**nodes)
  for name, own in model.items():
    given = {"state": {}, "tables": {}} | tree.get(name, {})
    fits = lambda saved, own: {k: x for k, x in own.items() if not _misfit(saved, k, x)}
    state, tables = fits(given["state"], own["state"]), {}
    for key, (layer, table) in row_keys(nodes[name]).items():
      wanted, saved = own["tables"][key], given["tables"].get(key, {})
      slots, found = layer.spec.stack_of[table].slots, fits(saved, wanted)
      prefix = f"{key.removesuffix(table)}vocabularies/{table}/admissions/"
      counts = {path for path in own["state"] if path.startswith(prefix)}
      is_whole = found.keys() >= wanted.keys() - slots and state.keys() >= counts
      if is_whole and ("raw_ids" in wanted) == ("raw_ids" in saved):
        has_slots = found.keys() >= slots.keys()
        tables[key] = {k: x for k, x in found.items() if has_slots or k not in slots}
      else:
        state = {path: x for path, x in state.items() if path not in counts}
    # Orbax would take an empty dict for an array.
    fitting[name] = {part: x for part, x in (("state", state), ("tables", tables)) if x}
  # Scalars and random keys, such as those of dropout, fit almost any model.
  is_content = lambda x: x.shape and jnp.issubdtype(x.dtype, jnp.floating)
  if not any(map(is_content, jax.tree.leaves(fitting))):
    names = lambda tree: {name: list(x.get("tables", {})) for name, x in tree.items()}
    raise ValueError(
      f"No table or parameter of the checkpoint fits the model: the tables are {names(tree)} there "
      f"and {names(model)} here. Make the model with names and sizes that were saved."
    )
  return {name: x for name, x in fitting.items() if x}


def _flat(tree: Tree) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


# --- arrays outside tables ------------------------------------------------------------------------


def is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def dense_arrays(node: Any) -> dict[str, Any]:
  """The arrays outside tables, by path; random keys as key data."""

  def data(x):
    if not is_key(x):
      return x
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)  # under nnx.eval_shape
    return jax.eval_shape(jax.random.key_data, x) if is_abstract else jax.random.key_data(x)

  return {path: data(x) for path, x in _dense(node)[0].items()}


def load_dense_arrays(arrays: Mapping[str, Any], node: Any) -> None:
  """Replaces the arrays outside tables with those of `dense_arrays` of another node, by path."""
  dense, treedef = _dense(node)

  def restored(path, old):
    if path not in arrays:
      return old
    if not is_key(old):
      return stored_tables.copied_like(arrays[path], old)
    data = stored_tables.copied_like(arrays[path], jax.random.key_data(old))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))

  nnx.update(node, jax.tree.unflatten(treedef, [restored(k, v) for k, v in dense.items()]))


def _dense(node: Any) -> tuple[dict[str, jax.Array], Any]:
  """The arrays outside tables by path, and the treedef that turns them into a state."""
  state = nnx.state(node, nnx.Not(nnx.Any(Table, SlotVariable, Vocabulary)))
  leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
  arrays: dict[str, jax.Array] = {}
  for path, x in leaves:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name in arrays:
      raise ValueError(
        f"Two arrays of the model have the path {name!r} of checkpoints. Rename one of the keys "
        'that have a "/" in them.'
      )
    arrays[name] = x if hasattr(x, "dtype") else jnp.asarray(x)
  return arrays, treedef


# --- Orbax ----------------------------------------------------------------------------------------


def restore(
  folder: str | os.PathLike[str], *, partial: bool = False, **nodes: Any
) -> dict[str, list[str]]:
  """Restores models and optimizers from a tree of `to_tree` that Orbax saved.

  Each device reads its own part. Slots are not read for a model without optimizers.

  Args:
    folder: where Orbax saved the tree; for a `CheckpointManager`, `<step>/default` in its folder.
    partial: True takes the arrays that fit by name and shape, and leaves the model's others
      as they are. The rows of a table, and the raw ids of its `DynamicVocabulary`, are taken
      together or not at all; so are its slots, and only with the rows.
    **nodes: as in `from_tree`.

  Returns:
    Three lists of the paths of arrays, "taken", "new" and "unused". New ones are the model's that
    were not taken, and unused ones the tree's that the model lacks.

  Raises:
    FileNotFoundError: if the folder holds no tree; the message lists the trees below it.
    ValueError: as in `from_tree`; if `partial`, for a tree of which no table or parameter fits.
  """
  import orbax.checkpoint as ocp  # an extra: the library runs without it

  path = pathlib.Path(folder).absolute()
  if not (path / "_METADATA").exists():
    below = sorted(str(x.parent) for part in ("*", "*/*") for x in path.glob(f"{part}/_METADATA"))
    raise FileNotFoundError(
      f"{path} holds no tree that Orbax has saved. Give its folder: {', '.join(below) or 'none'}."
    )
  with ocp.PyTreeCheckpointer() as reader:
    # The tree's own metadata: the checkpointer's would warn of a file that only step folders have.
    saved = ocp.PyTreeCheckpointHandler().metadata(path).tree
    if not partial:
      check(saved, **nodes)
    expected = _fitting(saved, nodes) if partial else like(**nodes)
    restore_args = ocp.checkpoint_utils.construct_restore_args(expected)
    args = ocp.args.PyTreeRestore(expected, restore_args=restore_args, partial_restore=True)
    tree = reader.restore(path, args=args)
  _load(tree, nodes)
  taken, known = _flat(expected), _flat(like(**nodes))
  saved = _flat({name: x for name, x in saved.items() if name in nodes})
  return {
    "taken": list(taken),
    "new": [path for path in known if path not in taken],
    "unused": [path for path in saved if path not in known],
  }


# --- files without Orbax ------------------------------------------------------------------------


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes arrays by name, for `numpy.load`; the file appears once all of it is on disk.

  One process may write at a time. If killed, it leaves `<name>.part`; the next call overwrites it.

  Raises:
    OSError: naming the file, which is left unchanged.
  """
  part = path.with_name(f"{path.name}.part")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as file:
      # `numpy.savez` writes the same, but refuses the names of its own arguments, such as "file".
      with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
          with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
            np.lib.format.write_array(entry, array, allow_pickle=False)
      file.flush()
      os.fsync(file.fileno())
    part.replace(path)
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), str(path)) from error
  finally:
    part.unlink(missing_ok=True)
