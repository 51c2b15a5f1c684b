"""Checkpoints free of topology: logical tables in row order by name, whatever the mesh.

A checkpoint is a tree of plain arrays, for Orbax or anything that stores arrays. Tables and slots
stand in it as `tables/<module path>/<table>/<slot>`, unpadded; everything else of the model and
the optimizer by its path.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed import routing
from embed.module import SlotVariable, Table

Tree = dict[str, Any]


def _dense(node: Any) -> tuple[dict[str, jax.Array], Any]:
  """All other state by path, and the treedef that puts it back together."""
  state = nnx.state(node, nnx.Not(nnx.Any(Table, SlotVariable)))
  leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  is_array = lambda x: hasattr(x, "dtype")
  return {name(p): x if is_array(x) else jnp.asarray(x) for p, x in leaves}, treedef


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
  abstract = isinstance(key, jax.ShapeDtypeStruct)  # under nnx.eval_shape
  return jax.eval_shape(jax.random.key_data, key) if abstract else jax.random.key_data(key)


def to_tree(**nodes: Any) -> Tree:
  """The state of models and optimizers as nested dicts of arrays.

  They are the models' own arrays: save or copy them before a step that donates the model.

  Args:
    **nodes: `nnx` modules and optimizers by the name they get in the tree.

  >>> import embed
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> to_tree(model=layer)["model"]["tables"]["table_0"]["parameters"].shape
  (4, 2)
  """
  tree = {}
  for name, node in nodes.items():
    # Random keys as their data: not every store knows keys.
    dense = {k: _key_data(v) if _is_key(v) else v for k, v in _dense(node)[0].items()}
    tables = {
      key: module.variables[table] for key, (module, table) in routing.row_keys(node).items()
    }
    tree[name] = {"state": dense, "tables": tables}
  return tree


def from_tree(tree: Tree, **nodes: Any) -> None:
  """Puts a tree made by `to_tree` back into models and optimizers of the same configuration.

  Raises:
    ValueError: before anything is changed, naming what is missing, unknown or of another shape.
  """
  problems = []
  for name, node in nodes.items():
    here, there = _flat(to_tree(**{name: node})[name]), _flat(tree.get(name, {}))
    problems += [f"{name}/{k} is missing" for k in here if k not in there]
    problems += [f"{name}/{k} is not in the model" for k in there if k not in here]
    problems += [
      f"{name}/{k} has shape {np.shape(there[k])}, the model's has {v.shape}"
      for k, v in here.items()
      if k in there and np.shape(there[k]) != v.shape
    ]
    problems += [
      f"{name}/{k} was deleted by a step that donated its model: copy the tree before"
      for k, v in there.items()
      if isinstance(v, jax.Array) and v.is_deleted()
    ]
  if problems:
    raise ValueError("The checkpoint does not fit the model: " + "; ".join(problems[:10]) + ".")
  for name, node in nodes.items():
    _restore(tree[name], node)


def _flat(tree: Tree) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _restore(tree: Tree, node: Any) -> None:
  for key, (module, table) in routing.row_keys(node).items():
    for slot, value in tree["tables"][key].items():
      variable = module.arrays[table][slot]
      # Copied: a donated step deletes the model's arrays, which must not be the tree's.
      variable.set_value(jnp.array(value, variable.get_value().dtype, copy=True))
  dense, treedef = _dense(node)

  def restored(name, old):
    value = tree["state"][name]
    if _is_key(old):
      data = jnp.array(value, copy=True)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    return jnp.array(value, old.dtype, copy=True)

  nnx.update(node, jax.tree.unflatten(treedef, [restored(k, v) for k, v in dense.items()]))
