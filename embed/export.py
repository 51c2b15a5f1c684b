"""Models exported to files that need only JAX: a program, and the arrays that it reads.

The program takes the arrays as an argument, so that its size does not depend on the tables, and an
older program can serve rows that were trained later.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed import checkpoint, structure
from embed import inputs as inputs_lib
from embed.engine import mesh as sharding
from embed.layer import sparse_embeds, store_apart
from embed.variables import Report

_PROGRAM = "program.bin"  # the entry of a file that holds the program's bytes


class Exported(NamedTuple):
  """An exported model: `program.call(arrays, *args)` calls its function.

  Attributes:
    program: a `jax.export.Exported`; `serialize()` returns its bytes.
    arrays: the arrays of the model that the program reads, NumPy by name. Tables are named
      `<module path>/<table>`, whole and in row order; other arrays are named by path, such as
      `head/kernel`. bfloat16 is stored as uint16, since NumPy lacks it; the program converts it.
  """

  program: jax.export.Exported
  arrays: dict[str, np.ndarray]

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the arrays and the program to one `.npz` file; replaces an earlier one atomically.

    The folder is created if missing. Only one process may write a file at a time. An `OSError`
    names the file, which then stays as it was.
    """
    program = np.frombuffer(self.program.serialize(), np.uint8)
    checkpoint.write_npz(pathlib.Path(path), {_PROGRAM: program, **self.arrays})


def export(
  function: Callable[..., Any],
  model: Any,
  *args: Any,
  any_batch: bool = False,
  platforms: Sequence[str] | None = None,
) -> Exported:
  """Exports a function of a model, as StableHLO, for processes that have only JAX.

  Arrays that the function does not read, such as optimizer slots, are left out. A model on a mesh
  is exported with whole tables, for one device. Call `model.eval()` first if its layers support it.

  Inputs and outputs of the program are dicts, lists and tuples of arrays: `Padded` becomes its
  `values`, `Ragged` becomes `{"values": ..., "row_splits": ...}`, `Sparse` becomes
  `{"indices": ..., "values": ...}` (`max_valency` and `dense_shape` are taken from the example),
  and a named tuple becomes a dict. Ids are int32: JAX silently truncates wider ones, and ids out
  of range are dropped.

  Args:
    function: `f(model, *args)`, traceable.
    model: an `nnx.Module`, or a dict of arrays.
    *args: example inputs as `function` takes them, arrays or `jax.ShapeDtypeStruct`. Their
      dimensions may come from `jax.export.symbolic_shape`.
    any_batch: lets the first dimension, the same for all arrays, vary. The `values` of a
      `Ragged` keep their length, as a buffer that a batch need not fill.
    platforms: the platforms to compile for, among "cpu", "cuda", "rocm" and "tpu"; None means the
      current one.

  Raises:
    ValueError: for an input or output of any other form, a `Sparse` with `any_batch`, a function
      that draws random numbers, a mesh set by `jax.set_mesh`, or arrays that are not all on this
      host.
  """
  if sharding.current_mesh() is not None:
    raise ValueError("export: leave jax.set_mesh first; the program is for one device.")
  copy = nnx.merge(*nnx.split(model))
  for layer in sparse_embeds(copy).values():
    store_apart(layer)
  # The report stays a constant: nothing is counted, and no update has to wait for a lookup.
  graphdef, *states = nnx.split(copy, Report, ...)
  reports, state = states
  leaves, treedef = jax.tree.flatten(state)
  names = _names(model, state)
  inputs, input_tree = jax.tree.flatten(_specs(args, any_batch))
  # The index of each input, at its position in the plain arguments.
  indices = _plain(jax.tree.unflatten(input_tree, range(len(inputs))))

  def call(arrays, *plain):
    by_index = dict(zip(jax.tree.leaves(indices), jax.tree.leaves(plain), strict=True))
    args = jax.tree.unflatten(input_tree, [by_index[i] for i in range(len(inputs))])
    values = [_read(arrays, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    merged = nnx.merge(graphdef, reports, jax.tree.unflatten(treedef, values), copy=True)
    return _plain(function(merged, *args))

  stored = dict(zip(names, map(_stored, leaves), strict=True))
  if len({_PROGRAM, *stored}) <= len(names):
    repeated = next(name for name in names if name == _PROGRAM or names.count(name) > 1)
    raise ValueError(f"export: two arrays of the model are called {repeated!r}; rename the table.")
  plain = jax.tree.map(lambda i: inputs[i], indices)
  jaxpr = jax.make_jaxpr(call)(_shapes(stored), *plain).jaxpr
  is_used = _used_inputs(jaxpr, [True] * len(jaxpr.outvars))  # of the arrays, then of the inputs
  arrays = {name: stored[name] for name, used in zip(sorted(stored), is_used, strict=False) if used}
  for name, x in arrays.items():
    if checkpoint.is_key(x):
      raise ValueError(
        f"export: the function draws random numbers, by {name!r}: call model.eval()."
      )
  program = jax.export.export(jax.jit(call), platforms=platforms)(_shapes(arrays), *plain)
  return Exported(program, arrays)


def _shapes(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


# `jax.export` drops unused arguments itself (`module_kept_var_idx`), but keeps all of them where a
# dimension is symbolic.
def _used_inputs(jaxpr: Any, used_outputs: Sequence[bool]) -> list[bool]:
  """A bool for each input of a jaxpr: True if used outputs depend on it. Enters inner jits."""
  live = {id(x) for x, is_used in zip(jaxpr.outvars, used_outputs, strict=True) if is_used}
  for equation in reversed(jaxpr.eqns):
    outputs = [id(x) in live for x in equation.outvars]
    if not any(outputs):
      continue
    inputs = [True] * len(equation.invars)
    if equation.primitive.name == "jit":
      inputs = _used_inputs(equation.params["jaxpr"].jaxpr, outputs)
    live |= {id(x) for x, is_used in zip(equation.invars, inputs, strict=True) if is_used}
  return [id(x) in live for x in jaxpr.invars]


def _names(model: Any, state: Any) -> list[str]:
  """The name of each leaf of a state: the key of a table, or a path."""
  tables = {}
  for layer_path, layer in sparse_embeds(model).items():
    prefix = f"{layer_path}/" if layer_path else ""
    for table in layer.spec.tables:
      tables[f"{prefix}arrays/{table}/parameters"] = f"{prefix}{table}"
  names = []
  for path, _ in jax.tree_util.tree_leaves_with_path(state):
    keys = tuple(k for k in path if not isinstance(k, jax.tree_util.GetAttrKey))  # of a Variable
    name = jax.tree_util.keystr(keys, simple=True, separator="/")
    names.append(tables.get(name, name))
  return names


def _stored(x: Any) -> Any:
  """A leaf as a NumPy array, of a dtype that NumPy itself has."""
  if checkpoint.is_key(x):
    return x  # `export` refuses programs that read keys
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    raise ValueError(
      "export: an array of the model is split over several hosts. Restore the checkpoint into a "
      "model without a mesh, on one host, and export that."
    )
  x = np.asarray(x)
  return x.view(f"uint{8 * x.itemsize}") if x.dtype.kind == "V" else x


def _read(arrays: Mapping[str, Any], name: str, leaf: Any) -> Any:
  """A leaf of the model: from the program's arrays, or as it is if the program does not read it."""
  if name not in arrays:
    return leaf
  x = arrays[name]
  return x if x.dtype == leaf.dtype else jax.lax.bitcast_convert_type(x, leaf.dtype)


def _is_input(x: Any) -> bool:
  return isinstance(x, inputs_lib.KINDS)


def _parts(x: Any) -> dict[str, Any]:
  """The arrays of a `Padded`, `Ragged` or `Sparse`."""
  fields = [f.name for f in dataclasses.fields(x) if not f.metadata.get("static")]
  return {name: getattr(x, name) for name in fields}


def _plain(x: Any) -> Any:
  """Converts a structure to dicts, lists and tuples, which `jax.export` can serialize."""
  if _is_input(x):
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
  """The shapes and dtypes of the inputs, with symbolic first dimensions if `any_batch`."""
  (batch,) = jax.export.symbolic_shape("batch")

  def spec(x: Any, beyond_batch: int = 0, is_free: bool = any_batch) -> jax.ShapeDtypeStruct:
    x = np.asarray(x) if isinstance(x, (list, tuple)) else x
    shape = np.shape(x)
    if is_free and shape:
      shape = (batch + beyond_batch, *shape[1:])
    return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

  def specs(x: Any) -> Any:
    if not _is_input(x):
      return spec(x)
    if any_batch and isinstance(x, inputs_lib.Sparse):
      raise ValueError(
        "export: a Sparse has the batch in its dense_shape, which is static. Take embed.Padded or "
        "embed.Ragged, or leave any_batch out."
      )
    if isinstance(x, inputs_lib.Ragged):
      values, row_splits = spec(x.values, is_free=False), spec(x.row_splits, beyond_batch=1)
      return dataclasses.replace(x, values=values, row_splits=row_splits)
    return dataclasses.replace(x, **{name: spec(part) for name, part in _parts(x).items()})

  return jax.tree.map(specs, args, is_leaf=_is_input)
