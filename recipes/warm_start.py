"""Starts a run from the state of another one: tables, slots and dense parameters by name.

Rows of a table correspond by raw id where both runs have kept raw ids, as those on declared tables
do, and by number elsewhere. The dense optimizer, random streams and the schedule of the learning
rates start anew.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

import embed
import embed.checkpoint

from . import checkpoints, files
from . import mesh as mesh_lib
from .errors import MissingFileError, UserError
from .tables import row_ids

_DENSE = nnx.Any(nnx.Param, nnx.BatchStat)

Arrays = Mapping[str, Any]  # by name; of a table by slot


def take(config, model: nnx.Module, serve: Path | None) -> None:
  """Loads the state of the run `config.init_from`, if there is one, into a new model.

  It is the state that run has tested, or its last one while it has not ended.

  Args:
    config: of the run.
    model: on its devices.
    serve: the folder of what serving needs besides the model; None if there is none.

  Raises:
    UserError: there is no such run, or its tables and the model's do not correspond.
  """
  if not config.init_from:
    return
  source = _Source(epath.Path(config.init_from).expanduser().resolve())
  tree = embed.checkpoint.to_tree(model=model)
  tables, state = tree["model"]["tables"], tree["model"]["state"]
  by_name = {_name(key): key for key in source.tables}
  matches = {key: key if key in source.tables else by_name.get(_name(key)) for key in tables}
  mesh_lib.say(f"starting from step {source.step} of {source.workdir}")
  if not any(matches.values()):
    raise UserError(
      f"no table of {source.workdir} has the name of one of this run's: they are "
      f"{', '.join(sorted(by_name))} there and {', '.join(sorted(map(_name, tables)))} here"
    )
  rows = row_ids.read(serve) if serve is not None else {}
  for key, source_key in matches.items():
    if source_key is None:
      mesh_lib.say(f"  table {_name(key)} is new")
      continue
    tables[key] = _table(tables[key], source, key, source_key, rows)
    state |= _counts(state, source, key, source_key)
  if source.has_same_inputs(serve):
    state |= _dense(model, state, source)
  else:
    mesh_lib.say("  the features or their order differ there: no dense parameter is loaded")
  embed.checkpoint.from_tree(tree, model=model)


class _Source:
  """The state of the run to start from.

  Attributes:
    step: of the state.
    state, tables: shapes by key, and of tables by slot.
    rows: raw ids by table name, empty where the run keeps none.
  """

  def __init__(self, workdir: epath.Path):
    self.workdir, self._serve = workdir, Path(workdir) / "serve"
    steps, result = checkpoints.steps(workdir), workdir / "result.json"
    if not steps:
      raise MissingFileError(
        f"config.init_from is {str(workdir)!r}, which holds no checkpoint: give the --workdir of a "
        "run"
      )
    self.step = files.read_json(result)["tested_step"] if result.exists() else steps[-1]
    self._path = checkpoints.folder(workdir, self.step)
    tree = checkpoints.metadata(self._path)["model"]
    self.state, self.tables = tree["state"], tree["tables"]
    self.rows = row_ids.read(self._serve) if self._serve.is_dir() else {}

  def has_same_inputs(self, serve: Path | None) -> bool:
    """Returns whether the features and their order are the same.

    The first dense layers read a concatenation: with other features of the same widths, the
    parameters would fit, and mean something else.
    """
    if serve is None or not self._serve.is_dir():
      return True
    return row_ids.inputs(serve) == row_ids.inputs(self._serve)

  def read(self, part: str, like: Arrays) -> dict[str, Any]:
    """Reads arrays of "state" or "tables", onto the devices of `like` or, without any, as NumPy."""
    return checkpoints.read(self._path, {"model": {part: like}})["model"][part] if like else {}


def _name(key: str) -> str:
  """Returns the name of a table, of its key in checkpoints."""
  return key.rpartition("/")[2]


def _table(
  own: Arrays, source: _Source, key: str, source_key: str, ids: Mapping[str, row_ids.RowIds]
) -> dict[str, jax.Array]:
  """Returns a table and its slots, with the rows that the source has too."""
  name, old = _name(key), source.tables[source_key]
  (size, dim), (old_size, old_dim) = own["parameters"].shape, old["parameters"].shape
  if dim != old_dim:
    raise UserError(
      f"table {name} has {dim} columns, and {old_dim} in {source.workdir}: keep the dim, or train "
      "without config.init_from"
    )
  rows, old_rows = ids.get(name), source.rows.get(_name(source_key))
  if rows is not None and old_rows is not None:
    index = row_ids.correspondence(old_rows, old_size, rows, size)
  elif rows is old_rows and size == old_size:  # neither run has raw ids
    index = np.arange(size, dtype=np.int32)
  else:
    raise UserError(
      f"the {size:,} rows of table {name} cannot be matched with the {old_size:,} in "
      f"{source.workdir}, since raw ids are not known: declare config.columns for both runs"
    )
  slots = [slot for slot in own if slot in old and own[slot].shape[1:] == old[slot].shape[1:]]
  missing, new_rows = sorted(own.keys() - slots), int((index < 0).sum())
  notes = [f"{size - new_rows:,} of {size:,} rows, {new_rows:,} new"] * bool(new_rows)
  notes += [f"slots {', '.join(missing)} are new"] * bool(missing)
  if notes:
    mesh_lib.say(f"  table {name}: {'; '.join(notes)}")
  if size == old_size and (index == np.arange(size)).all():
    like = {slot: _struct(own[slot]) for slot in slots}
    return {**own, **source.read("tables", {source_key: like})[source_key]}
  # Every process reads all rows, since any row may move to any device.
  whole = {slot: jax.ShapeDtypeStruct(old[slot].shape, own[slot].dtype) for slot in slots}
  read = source.read("tables", {source_key: whole})[source_key]
  merge = lambda x, rows: jax.jit(_merged, out_shardings=x.sharding)(x, np.asarray(rows), index)
  return {**own, **{slot: merge(own[slot], read[slot]) for slot in slots}}


def _merged(own: jax.Array, old: jax.Array, index: jax.Array) -> jax.Array:
  """Returns `old[index]`, and the own rows where the index is -1."""
  is_old = (index >= 0).reshape(-1, *[1] * (own.ndim - 1))
  return jnp.where(is_old, old[index], own)


def _counts(own: Arrays, source: _Source, key: str, source_key: str) -> dict[str, Any]:
  """Returns the counts of a dynamic vocabulary, which the use of its rows refers to."""

  def prefix(key: str) -> str:
    module, _, name = key.rpartition("/")
    return f"{module}/vocabularies/{name}/admissions/value/".removeprefix("/")

  names = {prefix(source_key) + part: prefix(key) + part for part in ("step", "batch", "totals")}
  like = {
    old: _struct(own[new]) for old, new in names.items() if new in own and old in source.state
  }
  return {names[old]: x for old, x in source.read("state", like).items()}


def _dense(model: nnx.Module, own: Arrays, source: _Source) -> dict[str, Any]:
  """Returns the dense parameters that the source has, of the same shape."""
  leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, _DENSE))
  names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
  shapes = {name: own[name].shape for name in names if name in own}
  shared = [
    name for name in shapes.keys() & source.state if tuple(source.state[name].shape) == shapes[name]
  ]
  mesh_lib.say(f"  {len(shared)} of {len(shapes)} dense parameters")
  return source.read("state", {name: _struct(own[name]) for name in shared})


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
