"""Checkpoints that do not depend on the mesh: tables by name, rows in order.

A checkpoint is a tree of plain arrays, for Orbax or any other store of arrays. Tables and slots are
at `tables/<module path>/<table>/<slot>`, without padding; all other arrays of the model and the
optimizer are at their paths.
"""

import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed import autodiff
from embed.dynamic_vocabulary import Vocabulary
from embed.layer import SparseEmbed, dynamic_table, read_variables, variable_shapes
from embed.storage import owners
from embed.storage import tables as stored_tables
from embed.variables import SlotVariable, Table

__all__ = ["check", "from_tree", "like", "restore", "to_tree"]

Tree = dict[str, Any]


def _dense(node: Any) -> tuple[dict[str, jax.Array], Any]:
  """The arrays outside tables by path, and the treedef that makes a state of them."""
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


def _by_key(node: Any, by_table: Callable[[SparseEmbed], Mapping[str, Any]]) -> Tree:
  """The values that a function returns for the tables of each layer, by key in a checkpoint."""
  values = {id(layer): by_table(layer) for layer in autodiff.sparse_embeds(node).values()}
  return {key: values[id(layer)][name] for key, (layer, name) in autodiff.row_keys(node).items()}


def is_key(x: Any) -> bool:
  """Whether an array, which may be abstract, holds random keys."""
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
  """The integers of random keys: not every store knows keys."""
  is_abstract = isinstance(key, jax.ShapeDtypeStruct)  # under nnx.eval_shape
  return jax.eval_shape(jax.random.key_data, key) if is_abstract else jax.random.key_data(key)


def dense_arrays(node: Any) -> dict[str, Any]:
  """The arrays outside tables by path, random keys as their data."""
  return {path: _key_data(x) if is_key(x) else x for path, x in _dense(node)[0].items()}


def to_tree(**nodes: Any) -> Tree:
  """Returns the state of models and optimizers as nested dicts of arrays.

  They are the models' own arrays: save or copy them before a step that donates the model. On a
  mesh, tables are split over its devices; a table of which neither the rows nor the columns divide
  by the shards is whole on each device, and a printed `embed.plan` warns of it. Random keys are
  converted to their data, since not every store knows keys.

  Args:
    **nodes: `nnx` modules and optimizers, by their names in the tree.

  Returns:
    A dict by name, of dicts with two keys. "state" holds arrays by path, "tables" holds
    `{"<module path>/<table>": {"parameters": array, slot: array}}`, rows in order.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> embed.checkpoint.to_tree(model=layer)["model"]["tables"]["table_0"]["parameters"].shape
  (4, 2)
  """
  tables_of = read_variables
  return {
    name: {"state": dense_arrays(node), "tables": _by_key(node, tables_of)}
    for name, node in nodes.items()
  }


def like(**nodes: Any) -> Tree:
  """Returns the shapes, dtypes and shardings of `to_tree`, for a store to restore into.

  Args:
    **nodes: as in `to_tree`. Models may be made under `nnx.eval_shape`, which allocates nothing.

  Returns:
    The same nested dicts, of `jax.ShapeDtypeStruct`.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> embed.checkpoint.like(model=layer)["model"]["tables"]["table_0"]["parameters"].shape
  (4, 2)
  """

  def struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

  shapes_of = variable_shapes
  return {
    name: {
      "state": {path: struct(x) for path, x in dense_arrays(node).items()},
      "tables": _by_key(node, shapes_of),
    }
    for name, node in nodes.items()
  }


def from_tree(tree: Tree, **nodes: Any) -> None:
  """Puts a tree made by `to_tree` into models and optimizers of the same configuration.

  The mesh may be another one, or none: tables in the tree do not depend on it. A table with a
  `DynamicVocabulary` may have another capacity, bucket width or policy than the saved one; then it
  is filled by raw id, the most valuable rows first, and sightings start anew. A table without an
  optimizer, or with `embed.frozen()`, takes the rows of the tree and ignores its slots, so that a
  model for serving, made without optimizers, restores a trained one.

  Args:
    tree: from `to_tree`, or NumPy or JAX arrays in the same structure, as a store restores them.
      They are copied.
    **nodes: the modules and optimizers to change, by their names in the tree.

  Raises:
    ValueError: before anything is changed, as in `check`.

  >>> config = embed.FeatureConfig(embed.TableConfig(4, 2, name="movie"))
  >>> trained, fresh = (embed.SparseEmbed(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
  >>> embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=trained), model=fresh)
  >>> bool((fresh.tables["movie"] == trained.tables["movie"]).all())
  True
  """
  _check(tree, nodes)
  for name, node in nodes.items():
    _restore(tree[name], node)


def check(tree: Tree, **nodes: Any) -> None:
  """Raises ValueError unless a tree, or the metadata of a stored one, fits models and optimizers.

  `restore` calls it before it reads anything. Orbax's own advice for arrays of another shape is
  `strict=False`, which would pad or cut tables. A warning names the tables that would be rounded:
  those saved with more precision than the model's, such as float32 for bfloat16.

  Args:
    tree: as in `from_tree`; its leaves may be anything with a shape, such as the metadata
      `checkpointer.metadata(folder).item_metadata.tree` of Orbax.
    **nodes: as in `from_tree`.

  Raises:
    ValueError: naming each array that is missing, unknown, of another shape, or of objects, texts
      or complex numbers, and the remedy.

  >>> table = lambda size: embed.FeatureConfig(embed.TableConfig(size, 2, name="movie"))
  >>> saved, other = (embed.SparseEmbed(table(size), rngs=nnx.Rngs(0)) for size in (4, 5))
  >>> embed.checkpoint.check(embed.checkpoint.like(model=saved), model=other)
  Traceback (most recent call last):
  ValueError: The checkpoint does not fit the model: model/tables/movie/parameters has shape ...
  """
  _check(tree, nodes)


def _check(tree: Tree, nodes: Mapping[str, Any]) -> None:
  """Checks as `check` does; the warning points at the caller of the public function."""
  problems: list[str] = []
  rounded: list[str] = []
  advice = ""
  for name, node in nodes.items():
    expected, saved = _flat(_like_saved(node, tree.get(name, {}))), _flat(tree.get(name, {}))
    without_slots = {f"tables/{table}" for table in untrained(node)}
    is_ignored = lambda k, ignored=without_slots: (
      k.rpartition("/")[0] in ignored or k.endswith("/sightings")
    )
    given = {k: x for k, x in saved.items() if k in expected or not is_ignored(k)}
    problems += differences(
      {f"{name}/{k}": _shape(x) for k, x in given.items()},
      {f"{name}/{k}": x.shape for k, x in expected.items()},
    )
    for k, x in saved.items():
      if isinstance(x, jax.Array) and x.is_deleted():
        problems.append(
          f"{name}/{k} was deleted by a step that donated its model: copy the tree before"
        )
      if k not in expected:
        continue
      dtype, shape = stored_tables.dtype_of(x), _shape(x)
      if not stored_tables.converts(x, expected[k].dtype):
        problems.append(f"{name}/{k} has dtype {dtype}, the model's is {expected[k].dtype}")
      if not (k.startswith("tables/") and k.endswith("/parameters")):
        continue
      table = k.removeprefix("tables/").removesuffix("/parameters")
      if dtype.itemsize > expected[k].dtype.itemsize == 2:
        rounded.append(f"{name}/tables/{table}")
      if shape != expected[k].shape and len(shape) == 2 and not advice:
        advice = (
          f" Make table {table!r} with vocabulary_size={shape[0]} and dim={shape[1]}, as it was "
          "saved. For another vocabulary, restore that model, and copy its rows and slots to the "
          "new one with `load_variables`."
        )
  if not problems:
    if rounded:
      warnings.warn(
        f"Tables of the checkpoint are rounded to the dtype of the model's: {', '.join(rounded)}. "
        "Give their TableConfigs the dtype that was saved to keep the values.",
        stacklevel=3,
      )
    return
  raise ValueError(
    "The checkpoint does not fit the model: " + "; ".join(problems[:10]) + "." + advice
  )


def differences(
  saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
  """Says which saved arrays a model does not have or has in another shape, and which are missing.

  Both are shapes by the names that the messages use.
  """
  missing = [f"{name} is missing" for name in expected if name not in saved]
  unknown = [f"{name} is not in the model" for name in saved if name not in expected]
  differing = [
    f"{name} has shape {saved[name]}, the model's has {shape}"
    for name, shape in expected.items()
    if saved.get(name, shape) != shape
  ]
  return [*missing, *unknown, *differing]


def restore(folder: str | os.PathLike[str], **nodes: Any) -> None:
  """Reads a tree of `to_tree` that Orbax saved into models and optimizers.

  `check` runs before anything is read, and `from_tree` afterwards. Each device reads its own part.
  Slots are not read for a model without optimizers.

  Args:
    folder: the folder that Orbax wrote, a step of a `CheckpointManager`, or the folder of a manager
      for its latest step.
    **nodes: as in `from_tree`.

  Raises:
    FileNotFoundError: if there is no such folder, or no checkpoint in it.
    ValueError: as in `check`, or if a step holds several items; the message lists them.
    ImportError: if Orbax is not installed.

  >>> import pathlib, tempfile
  >>> import orbax.checkpoint as ocp
  >>> config = embed.FeatureConfig(embed.TableConfig(4, 2, name="movie"))
  >>> trained, fresh = (embed.SparseEmbed(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
  >>> folder = pathlib.Path(tempfile.mkdtemp()) / "1"
  >>> with ocp.StandardCheckpointer() as checkpointer:
  ...   checkpointer.save(folder, embed.checkpoint.to_tree(model=trained))
  >>> embed.checkpoint.restore(folder, model=fresh)
  >>> bool((fresh.tables["movie"] == trained.tables["movie"]).all())
  True
  """
  try:
    import orbax.checkpoint as ocp
  except ImportError:
    raise ImportError(
      "Checkpoints are read by Orbax: pip install -e '.[recipes]', or orbax-checkpoint."
    ) from None
  path = _tree_folder(pathlib.Path(folder).absolute(), ocp)
  with ocp.PyTreeCheckpointer() as reader:
    # Of the tree alone: the checkpointer's would warn of the file that a step's folder has instead.
    saved = ocp.PyTreeCheckpointHandler().metadata(path).tree
    _check(saved, nodes)
    expected = {name: _like_saved(node, saved[name]) for name, node in nodes.items()}
    restore_args = ocp.checkpoint_utils.construct_restore_args(expected)
    args = ocp.args.PyTreeRestore(expected, restore_args=restore_args, partial_restore=True)
    tree = reader.restore(path, args=args)
  from_tree(tree, **nodes)


def _tree_folder(folder: pathlib.Path, ocp: Any) -> pathlib.Path:
  """Finds the folder that holds a tree: this one, a step's only item, or the latest step's."""
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder} is no folder: give one that Orbax has written.")
  is_tree = lambda path: (path / "_METADATA").is_file()
  if is_tree(folder):
    return folder
  is_step = lambda path: is_tree(path) or (path.is_dir() and any(map(is_tree, path.iterdir())))
  items = sorted(x for x in folder.iterdir() if is_step(x) and not ocp.utils.is_tmp_checkpoint(x))
  steps = [re.fullmatch(r"(?:(.+)_)?(\d+)", path.name) for path in items]
  prefixes = {step and step[1] for step in steps}
  if all(steps) and len(prefixes) == 1:
    return _tree_folder(max(items, key=lambda x: ocp.utils.step_from_checkpoint_name(x.name)), ocp)
  if len(items) > 1:
    raise ValueError(f"{folder} holds several trees: give one of {', '.join(map(str, items))}.")
  if not items:
    raise FileNotFoundError(
      f"{folder} holds no checkpoint: give the folder that Orbax saved a tree to, or the folder of "
      "a CheckpointManager."
    )
  return _tree_folder(items[0], ocp)


def _shape(x: Any) -> tuple[int, ...]:
  """The shape of an array, of nested lists, or of the metadata of a stored array."""
  shape = getattr(x, "shape", None)
  return np.shape(x) if shape is None else tuple(shape)


def untrained(node: Any) -> list[str]:
  """The keys of tables without slots: they have no optimizer, or are frozen."""
  optimizers = _by_key(node, lambda layer: layer.spec.optimizers)
  return [key for key, opt in optimizers.items() if opt is None or opt.equation is None]


def _flat(tree: Tree) -> dict[str, Any]:
  """The leaves of a tree by path, "a/b"."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _like_saved(node: Any, saved: Tree) -> Tree:
  """`like` of a node; dynamic tables that were saved in another geometry as they were saved."""
  expected = like(node=node)["node"]
  for key, arrays in expected["tables"].items():
    of_table = saved.get("tables", {}).get(key, {})
    if "raw_ids" in arrays and "raw_ids" in of_table and not _is_alike(arrays, of_table):
      rows = _shape(of_table["raw_ids"])[0]
      kept = {k: x for k, x in arrays.items() if k not in ("uses", "sightings")}
      kept |= {"uses": kept["last_used"]} if "uses" in of_table else {}
      struct = lambda x, rows=rows: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
      expected["tables"][key] = {k: struct(x) for k, x in kept.items()}
  return expected


def _is_alike(arrays: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
  """Whether a dynamic table was saved with the same capacity, and the same kinds of scores."""
  of_owners = lambda x: {k: _shape(x[k]) for k in (*owners.BY_ROW, "sightings") if k in x}
  return of_owners(arrays) == of_owners(saved)


def _restore(tree: Tree, node: Any) -> None:
  """Puts the tree of one node into it; the tree has been checked."""
  saved: dict[int, Tree] = {}
  for key, (layer, table) in autodiff.row_keys(node).items():
    saved.setdefault(id(layer), {})[table] = tree["tables"][key]
  load_dense_arrays(tree["state"], node)  # first: it has the numbers of batches
  for layer in autodiff.sparse_embeds(node).values():
    arrays = saved[id(layer)]
    kept = layer.variable_shapes  # only the rows of an untrained table
    in_place = {}
    for table, of_table in arrays.items():
      vocabulary = layer.spec.tables[table].vocabulary
      if vocabulary is None or (
        _is_alike(kept[table], of_table) and owners.fits(vocabulary, of_table["raw_ids"])
      ):
        in_place[table] = {key: of_table[key] for key in kept[table]}
      else:
        dynamic_table(layer, table).load_by_value(of_table)
    layer.load_variables(in_place)


def load_dense_arrays(arrays: Mapping[str, Any], node: Any) -> None:
  """Replaces the arrays outside tables by `dense_arrays` of a node of the same configuration."""
  dense, treedef = _dense(node)

  def restored(path, old):
    value = arrays[path]
    if is_key(old):
      data = stored_tables.copied_like(value, jax.random.key_data(old))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    return stored_tables.copied_like(value, old)

  nnx.update(node, jax.tree.unflatten(treedef, [restored(k, v) for k, v in dense.items()]))
