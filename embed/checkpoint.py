"""Checkpoints free of topology: logical tables in row order by name, whatever the mesh.

A checkpoint is a tree of plain arrays, for Orbax or anything that stores arrays. Tables and slots
stand in it as `tables/<module path>/<table>/<slot>`, unpadded; everything else of the model and
the optimizer by its path.
"""

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed import autodiff as routing
from embed.engine.taps import Owner
from embed.layer import SparseEmbed, read_variables, variable_shapes
from embed.variables import SlotVariable, Table

__all__ = ["check", "from_tree", "like", "restore", "to_tree"]

Tree = dict[str, Any]


def _dense(node: Any) -> tuple[dict[str, jax.Array], Any]:
  """All other state by path, and the treedef that puts it back together."""
  state = nnx.state(node, nnx.Not(nnx.Any(Table, SlotVariable)))
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


def _by_layer(node: Any, of: Callable[[SparseEmbed], Tree]) -> Tree:
  """`of` every layer, a dict by table name, as one by the tables' keys in a checkpoint."""
  values = {id(module): of(module) for module in routing.sparse_embeds(node).values()}
  return {key: values[id(module)][name] for key, (module, name) in routing.row_keys(node).items()}


def is_key(x: Any) -> bool:
  """Whether an array holds random keys."""
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
  abstract = isinstance(key, jax.ShapeDtypeStruct)  # under nnx.eval_shape
  return jax.eval_shape(jax.random.key_data, key) if abstract else jax.random.key_data(key)


def to_tree(**nodes: Any) -> Tree:
  """The state of models and optimizers as nested dicts of arrays.

  They are the models' own arrays: save or copy them before a step that donates the model. On a mesh
  tables come split over its devices, or, where neither rows nor columns divide by the shards, whole
  on each, of which a printed `embed.plan` warns. Random keys are in it as their data, since not
  every store knows keys.

  Args:
    **nodes: `nnx` modules and optimizers by the name they get in the tree.

  Returns:
    A dict by name, of dicts of two parts. "state" holds arrays by path, "tables" holds
    `{"<module path>/<table>": {"parameters": array, slot: array}}`, rows in order.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> embed.checkpoint.to_tree(model=layer)["model"]["tables"]["table_0"]["parameters"].shape
  (4, 2)
  """
  tree = {}
  for name, node in nodes.items():
    # Random keys as their data: not every store knows keys.
    dense = {k: _key_data(v) if is_key(v) else v for k, v in _dense(node)[0].items()}
    tables = _by_layer(node, functools.partial(read_variables, compact=True))
    tree[name] = {"state": dense, "tables": tables}
  return tree


def like(**nodes: Any) -> Tree:
  """What `to_tree` would return, as shapes, dtypes and shardings, for a store to restore into.

  Args:
    **nodes: as of `to_tree`; also of a model made under `nnx.eval_shape`, which allocates nothing.

  Returns:
    The same nested dicts, of `jax.ShapeDtypeStruct`.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> embed.checkpoint.like(model=layer)["model"]["tables"]["table_0"]["parameters"].shape
  (4, 2)
  """

  def struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

  tree = {}
  for name, node in nodes.items():
    data = lambda x: struct(_key_data(x)) if is_key(x) else struct(x)
    tables = _by_layer(node, functools.partial(variable_shapes, compact=True))
    tree[name] = {"state": {k: data(v) for k, v in _dense(node)[0].items()}, "tables": tables}
  return tree


def from_tree(tree: Tree, **nodes: Any) -> None:
  """Puts a tree made by `to_tree` back into models and optimizers of the same configuration.

  The mesh may be another one, or none: the tree holds logical tables. A table without an optimizer,
  or with `embed.frozen()`, takes the rows and leaves slots that the tree has: so a model for
  serving, without optimizer, restores what was trained with one.

  Args:
    tree: from `to_tree`, or NumPy or JAX arrays in that structure, as a store restored them. They
      are copied.
    **nodes: the modules and optimizers to change, by their names in the tree.

  Raises:
    ValueError: before anything is changed, naming what is missing, unknown or of another shape.

  >>> config = embed.FeatureConfig(embed.TableConfig(4, 2, name="movie"))
  >>> trained, fresh = (embed.SparseEmbed(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
  >>> embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=trained), model=fresh)
  >>> bool((fresh.tables["movie"] == trained.tables["movie"]).all())
  True
  """
  check(tree, **nodes)
  for name, node in nodes.items():
    _restore(tree[name], node)


def check(tree: Tree, **nodes: Any) -> None:
  """Raises ValueError unless a tree, or what a store knows of one before it is read, fits.

  Orbax, asked for arrays of other shapes than it has, advises `strict=False`, which pads or cuts
  tables. `restore` asks here first.

  Args:
    tree: as of `from_tree`; its leaves may be anything with a shape, such as the metadata
      `checkpointer.metadata(folder).item_metadata.tree` of Orbax.
    **nodes: as of `from_tree`.

  Raises:
    ValueError: naming what is missing, unknown or of another shape, and what to do about it.

  >>> table = lambda size: embed.FeatureConfig(embed.TableConfig(size, 2, name="movie"))
  >>> saved, other = (embed.SparseEmbed(table(size), rngs=nnx.Rngs(0)) for size in (4, 5))
  >>> embed.checkpoint.check(embed.checkpoint.like(model=saved), model=other)
  Traceback (most recent call last):
  ValueError: The checkpoint does not fit the model: model/tables/movie/parameters has shape ...
  """
  problems: list[str] = []
  tables: dict[str, tuple[int, ...]] = {}
  for name, node in nodes.items():
    here, there = _flat(like(**{name: node})[name]), _flat(tree.get(name, {}))
    rows_alone = {f"tables/{table}" for table in _not_trained(node)}
    unknown = [k for k in there if k not in here and k.rpartition("/")[0] not in rows_alone]
    problems += [f"{name}/{k} is missing" for k in here if k not in there]
    problems += [f"{name}/{k} is not in the model" for k in unknown]
    differing = {
      k: _shape(there[k]) for k in here if k in there if _shape(there[k]) != here[k].shape
    }
    problems += [
      f"{name}/{k} has shape {shape}, the model's has {here[k].shape}"
      for k, shape in differing.items()
    ]
    is_table = lambda k, shape: (
      k.startswith("tables/") and k.endswith("/parameters") and len(shape) == 2
    )
    tables |= {k: shape for k, shape in differing.items() if is_table(k, shape)}
    problems += [
      f"{name}/{k} was deleted by a step that donated its model: copy the tree before"
      for k, v in there.items()
      if isinstance(v, jax.Array) and v.is_deleted()
    ]
  if not problems:
    return
  advice = ""
  if tables:
    key, (size, dim) = next(iter(tables.items()))
    advice = (
      f" Make table {key.split('/', 1)[1].removesuffix('/parameters')!r} with "
      f"vocabulary_size={size} and dim={dim}, as it was saved. For another vocabulary, restore "
      "that model, and copy its rows and slots to the new one with `load_variables`."
    )
  raise ValueError(
    "The checkpoint does not fit the model: " + "; ".join(problems[:10]) + "." + advice
  )


def restore(folder: str | os.PathLike[str], **nodes: Any) -> None:
  """Reads a checkpoint that Orbax wrote of `to_tree` into models and optimizers.

  What fits is checked before anything is read. Each device reads its own part; of a model without
  optimizer, slots are not read. Otherwise it is `like`, Orbax's restore and `from_tree`.

  Args:
    folder: that Orbax wrote.
    **nodes: as of `from_tree`.

  Raises:
    ValueError: as `check`.
    ImportError: Orbax is not installed.

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
      "Checkpoints are read by Orbax: pip install 'sparse-embed[recipes]', or orbax-checkpoint."
    ) from None
  path, wanted = pathlib.Path(folder).absolute(), like(**nodes)
  restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
  with ocp.PyTreeCheckpointer() as reader:
    check(reader.metadata(path).item_metadata.tree, **nodes)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    tree = reader.restore(path, args=args)
  from_tree(tree, **nodes)


def _shape(x: Any) -> tuple[int, ...]:
  shape = getattr(x, "shape", None)
  return np.shape(x) if shape is None else tuple(shape)


def _not_trained(node: Any) -> list[str]:
  """The names in the tree of the tables that have no slots because they are not trained."""
  optimizers = _by_layer(node, lambda layer: layer.spec.optimizers)
  return [key for key, opt in optimizers.items() if opt is None or opt.equation is None]


def _flat(tree: Tree) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _placed(value: Any, old: jax.Array) -> jax.Array:
  """A copy of a value, on the devices of the array it replaces or, like that, on any."""
  if old.committed:
    return jax.device_put(jnp.array(value, old.dtype, copy=True), old.sharding)
  return jnp.array(np.asarray(value), old.dtype)


def _restore(tree: Tree, node: Any) -> None:
  for path, module in routing.sparse_embeds(node).items():
    saved = {table: tree["tables"][Owner(path, table).key] for table in module.spec.tables}
    wanted = module.variable_shapes  # of a table that is not trained, the rows alone
    module.load_variables({t: {key: saved[t][key] for key in wanted[t]} for t in saved})
  dense, treedef = _dense(node)

  def restored(name, old):
    value = tree["state"][name]
    if is_key(old):
      data = _placed(value, jax.random.key_data(old))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    return _placed(value, old)

  nnx.update(node, jax.tree.unflatten(treedef, [restored(k, v) for k, v in dense.items()]))
