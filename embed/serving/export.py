"""Whole models as files that need only JAX: a program, and beside it the arrays it reads.

The program takes the arrays as an argument, so it stays small whatever the tables, and rows trained
later can be served by the program of before.
"""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters import partial_eval as pe

from embed import autodiff as routing
from embed import checkpoint, structure
from embed import inputs as ragged
from embed.engine import mesh as sharding
from embed.engine.taps import Owner
from embed.layer import store_apart

_KINDS = (ragged.Padded, ragged.Ragged, ragged.Sparse)


class Exported(NamedTuple):
  """What `embed.export` returns: `program.call(arrays, *args)` is the model's function.

  Attributes:
    program: a `jax.export.Exported`; `serialize()` gives its bytes.
    arrays: what it reads of the model, NumPy by name. Tables are `<module path>/<table>`, whole
      and in row order; everything else has its path, such as `head/kernel`. Bfloat16 is held as
      uint16, which every NumPy can store; the program knows.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> exported = embed.export(lambda layer, ids: layer(ids), layer, np.array([0, 1]))
  >>> exported.program.call(exported.arrays, np.array([2, 3])).shape, list(exported.arrays)
  ((2, 2), ['table_0'])
  """

  program: jax.export.Exported
  arrays: dict[str, np.ndarray]

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes `program.bin` and `arrays.npz`, for `jax.export.deserialize` and `numpy.load`.

    Args:
      folder: made if it is not there.

    >>> import pathlib, tempfile
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> embed.export(lambda layer, ids: layer(ids), layer, np.array([0, 1])).save(folder)
    >>> program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    >>> program.call(dict(np.load(folder / "arrays.npz")), np.array([2, 3])).shape
    (2, 2)
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "program.bin").write_bytes(self.program.serialize())
    # As numpy.savez, whose own arguments some names would clash with.
    with zipfile.ZipFile(path / "arrays.npz", "w") as archive:
      for name, array in self.arrays.items():
        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
          np.lib.format.write_array(file, array, allow_pickle=False)


def export(
  function: Callable[..., Any],
  model: Any,
  *args: Any,
  any_batch: bool = False,
  platforms: Sequence[str] | None = None,
) -> Exported:
  """A function of a model, compiled as far as StableHLO, for processes that have only JAX.

  Optimizer slots, and whatever else the function does not read, stay behind. A model on a mesh is
  exported as on one device, its tables whole. Call `model.eval()` first where layers know it.

  Inputs and outputs of the program are dicts, lists and tuples of arrays: a `Padded` is spelled as
  its `values`, a `Ragged` as `{"values": ..., "row_splits": ...}`, a `Sparse` as
  `{"indices": ..., "values": ...}` (`max_valency` and `dense_shape` are those of the example), a
  named tuple as a dict. Ids are int32: JAX cuts wider ones, silently, so check them before. Those
  out of range are dropped. The rules are those of the model's calls, not of `serving_lookup`.

  Args:
    function: `f(model, *args)`, traceable.
    model: an `nnx.Module`, or a dict of arrays.
    *args: examples of the inputs, arrays or `jax.ShapeDtypeStruct`, as `function` takes them. Their
      dimensions may be those of `jax.export.symbolic_shape`.
    any_batch: leaves the first dimension of all arrays free, the same for all. The values of a
      `Ragged` keep their number, as a buffer that a batch need not fill.
    platforms: of "cpu", "cuda", "rocm" and "tpu", those to compile for; None is the current one.

  Raises:
    ValueError: for an input or output that cannot be spelled so, a `Sparse` or examples of
      different sizes with `any_batch`, a function that draws random numbers, a mesh that is set,
      and arrays that are not all on this host.

  >>> table = embed.TableConfig(vocabulary_size=3, dim=1, combiner="sum", name="movie")
  >>> layer = embed.SparseEmbed({"watched": embed.FeatureConfig(table)}, rngs=nnx.Rngs(0))
  >>> layer.load_tables({"movie": np.array([[1.0], [10.0], [100.0]])})
  >>> batch = {"watched": embed.Padded(np.array([[0, 2]]))}
  >>> exported = embed.export(lambda layer, batch: layer(batch), layer, batch, any_batch=True)
  >>> sorted(exported.arrays)
  ['movie']
  >>> ids = np.array([[0, 1], [2, -1]])
  >>> exported.program.call(exported.arrays, {"watched": ids})["watched"].tolist()
  [[11.0], [100.0]]
  """
  if sharding.current_mesh() is not None:
    raise ValueError("export: leave jax.set_mesh first; the program is for one device.")
  graphdef, state = nnx.split(_on_one_device(model))
  leaves, treedef = jax.tree.flatten(state)
  names = _names(model, state)
  args = _specs(jax.tree.map(_with_arrays, args, is_leaf=_is_input), any_batch)
  inputs, input_tree = jax.tree.flatten(args)
  # The number of each input where it stands in the plain arguments.
  numbers = _plain(jax.tree.unflatten(input_tree, range(len(inputs))))

  def call(arrays, *plain):
    given = dict(zip(jax.tree.leaves(numbers), jax.tree.leaves(plain), strict=True))
    args = jax.tree.unflatten(input_tree, [given[i] for i in range(len(inputs))])
    values = [_read(arrays, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    return _plain(function(nnx.merge(graphdef, jax.tree.unflatten(treedef, values)), *args))

  everything = dict(zip(names, map(_stored, leaves), strict=True))
  if len(everything) < len(names):
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"export: two arrays of the model are called {twice!r}; rename the table.")
  plain = jax.tree.map(lambda i: inputs[i], numbers)
  arrays = {name: everything[name] for name in _used(call, everything, plain)}
  for name, x in arrays.items():
    if checkpoint.is_key(x):
      raise ValueError(
        f"export: the function draws random numbers, by {name!r}: call model.eval()."
      )
  program = jax.export.export(jax.jit(call), platforms=platforms)(_shapes(arrays), *plain)
  return Exported(program, arrays)


def _shapes(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def _used(call: Callable[..., Any], arrays: Mapping[str, Any], plain: Any) -> list[str]:
  """The names of the arrays that a result depends on."""
  jaxpr = jax.make_jaxpr(call)(_shapes(arrays), *plain).jaxpr
  _, used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return [name for name, is_used in zip(sorted(arrays), used, strict=False) if is_used]


# --- the model ------------------------------------------------------------------------------------


def _on_one_device(model: Any) -> Any:
  """A copy of a model in which every table is an array of its own, whole, and has no slots."""
  model = nnx.merge(*nnx.split(model))
  for layer in routing.sparse_embeds(model).values():
    store_apart(layer)
  return model


def _names(model: Any, state: Any) -> list[str]:
  """What the leaves of a state are called."""
  tables = {}
  for where, layer in routing.sparse_embeds(model).items():
    for table in layer.spec.tables:
      inside = f"{where}/arrays" if where else "arrays"
      tables[f"{inside}/{table}/parameters"] = Owner(where, table).key
  names = []
  for path, _ in jax.tree_util.tree_leaves_with_path(state):
    keys = tuple(k for k in path if not isinstance(k, jax.tree_util.GetAttrKey))  # of a Variable
    name = jax.tree_util.keystr(keys, simple=True, separator="/")
    names.append(tables.get(name, name))
  return names


def _stored(x: Any) -> Any:
  """A leaf as the program takes it: a NumPy array of a dtype that every NumPy has."""
  if checkpoint.is_key(x):
    return x  # they do not come so far as to be stored
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    raise ValueError(
      "export: an array of the model is spread over several hosts. Restore the checkpoint into a "
      "model without a mesh, on one host, and export that."
    )
  x = np.asarray(x)
  return x.view(f"uint{8 * x.itemsize}") if x.dtype.kind == "V" else x


def _read(arrays: Mapping[str, Any], name: str, leaf: Any) -> Any:
  """The leaf from the program's arrays; what the program does not read is not among them."""
  if name not in arrays:
    return leaf
  x = arrays[name]
  return x if x.dtype == leaf.dtype else jax.lax.bitcast_convert_type(x, leaf.dtype)


# --- inputs and outputs ---------------------------------------------------------------------------


def _is_input(x: Any) -> bool:
  return isinstance(x, _KINDS)


def _parts(x: Any) -> dict[str, Any]:
  """The arrays of a Padded, Ragged or Sparse."""
  fields = [f.name for f in dataclasses.fields(x) if not f.metadata.get("static")]
  return {name: getattr(x, name) for name in fields}


def _with_arrays(x: Any) -> Any:
  """An input without lists of numbers, which would look like a structure."""
  if not _is_input(x):
    return x
  array = lambda v: np.asarray(v) if isinstance(v, (list, tuple)) else v
  return dataclasses.replace(x, **{name: array(v) for name, v in _parts(x).items()})


def _plain(x: Any) -> Any:
  """Any structure in dicts, lists and tuples, which JAX can read back on its own."""
  if isinstance(x, _KINDS):
    parts = _parts(x)
    return parts["values"] if len(parts) == 1 else parts
  if isinstance(x, Mapping):
    return {str(key): _plain(value) for key, value in x.items()}
  if structure.is_namedtuple(x):
    return {key: _plain(value) for key, value in zip(x._fields, x, strict=True)}
  if isinstance(x, (list, tuple)):
    return type(x)(_plain(value) for value in x)
  if x is not None and not jax.tree_util.all_leaves([x]):
    raise ValueError(
      f"export: inputs and outputs are dicts, lists and tuples of arrays. Got {type(x)}: return or "
      "take its arrays."
    )
  return x


def _specs(args: Any, any_batch: bool) -> Any:
  """The inputs as shapes and dtypes, their first dimensions free with `any_batch`."""
  sizes = set()

  def spec(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))

  def first(x: Any, more: int = 0) -> jax.ShapeDtypeStruct:
    shape = np.shape(x)
    if not shape:
      return spec(x)
    sizes.add(shape[0] - more)
    return jax.ShapeDtypeStruct((batch + more, *shape[1:]), jnp.result_type(x))

  def free(x: Any) -> Any:
    if isinstance(x, ragged.Sparse):
      raise ValueError(
        "export: a Sparse has the batch in its dense_shape, which is static. Take embed.Padded or "
        "embed.Ragged, or leave any_batch out."
      )
    if isinstance(x, ragged.Ragged):
      return dataclasses.replace(x, values=spec(x.values), row_splits=first(x.row_splits, 1))
    return jax.tree.map(first, x)

  if not any_batch:
    return jax.tree.map(spec, args)
  (batch,) = jax.export.symbolic_shape("batch")
  specs = jax.tree.map(free, args, is_leaf=_is_input)
  if len(sizes) > 1:
    raise ValueError(
      f"export: any_batch, and examples of batches {sorted(sizes)}. Give jax.ShapeDtypeStruct with "
      "dimensions of jax.export.symbolic_shape instead, and leave any_batch out."
    )
  return specs
