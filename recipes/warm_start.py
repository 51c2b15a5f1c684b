"""Starts a run from the state of another one: tables, slots and dense parameters by name.

Rows of a table correspond by raw id where both runs have kept raw ids, as those on declared tables
do, and by number elsewhere. The dense optimizer, random streams and the schedule of the learning
rates start anew.
"""

import functools
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

_KEPT = nnx.Any(nnx.Param, nnx.BatchStat)  # of what is no table

Arrays = Mapping[str, Any]  # by name; of a table by slot


def take(config, model: nnx.Module, serve: Path | None) -> None:
  """Puts the state of the run `config.init_from`, if there is one, into a model that is new.

  It is the state that run has tested, or its last one while it has not ended.

  Args:
    config: of the run.
    model: on its devices.
    serve: the folder of what serving needs besides the model; None if there is none.

  Raises:
    UserError: there is no such run, or a table has another width there, or nothing corresponds.
  """
  if not config.init_from:
    return
  other = _Other(epath.Path(config.init_from).expanduser().resolve())
  rows = row_ids.read(serve) if serve is not None else {}
  tree = embed.checkpoint.to_tree(model=model)
  own = tree["model"]
  keys = _matches(own["tables"], other)
  mesh_lib.say(f"starting from step {other.step} of {other.workdir}: {len(keys)} tables")
  for key, old_key in keys.items():
    own["tables"][key] = _table(own["tables"][key], other, key, old_key, rows)
    own["state"] |= _admissions(own["state"], other, key, old_key)
  for key in own["tables"].keys() - keys.keys():
    mesh_lib.say(f"  table {_name(key)} is new")
  if other.reads_the_same(serve):
    own["state"] |= _dense(model, own["state"], other)
  else:
    mesh_lib.say("  the features or their order differ there: no dense parameter is taken")
  embed.checkpoint.from_tree(tree, model=model)


class _Other:
  """The state of another run: the one that it has tested, or its last one.

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

  def reads_the_same(self, serve: Path | None) -> bool:
    """Returns whether the dense part has the inputs that it has there, in their order.

    Its first layers read a concatenation: with other features of the same widths, the parameters
    would fit, and mean something else.
    """
    if serve is None or not self._serve.is_dir():
      return True
    return row_ids.inputs(serve) == row_ids.inputs(self._serve)

  def read(self, part: str, like: Arrays) -> dict[str, Any]:
    """Reads arrays of "state" or "tables", onto the devices of `like` or, without any, as NumPy."""
    return checkpoints.read(self._path, {"model": {part: like}})["model"][part]


def _matches(tables: Arrays, other: _Other) -> dict[str, str]:
  """Returns the key of the other run's table for each table that has one there."""
  matches = {}
  for key in tables:
    same = [old for old in other.tables if _name(old) == _name(key)]
    exact = [old for old in same if old.rpartition("/")[0] == key.rpartition("/")[0]]
    if exact or len(same) == 1:
      matches[key] = (exact or same)[0]
  if not matches:
    raise UserError(
      f"no table of {other.workdir} has the name of one of this run's: they are "
      f"{_listed(other.tables)} there and {_listed(tables)} here"
    )
  return matches


def _name(key: str) -> str:
  """Returns the name of a table, of its key in checkpoints."""
  return key.rpartition("/")[2]


def _listed(keys: Arrays) -> str:
  return ", ".join(sorted(map(_name, keys)))


def _table(
  own: Arrays,
  other: _Other,
  key: str,
  old_key: str,
  ids: Mapping[str, row_ids.RowIds],
) -> dict[str, jax.Array]:
  """Returns a table and its slots with the rows of the other run's, where there are any."""
  name, old = _name(key), other.tables[old_key]
  (size, dim), (old_size, old_dim) = own["parameters"].shape, old["parameters"].shape
  if dim != old_dim:
    raise UserError(
      f"table {name} has {dim} columns, and {_name(old_key)} in {other.workdir} has {old_dim}: "
      "keep the dim, or train without config.init_from"
    )
  rows, old_rows = ids.get(name), other.rows.get(_name(old_key))
  if (rows is None) != (old_rows is None):
    raise UserError(
      f"table {name} has raw ids in {'this run' if rows else other.workdir} only: rows correspond "
      "by raw id, or by number if neither run has kept raw ids"
    )
  if rows is not None and old_rows is not None:
    index = row_ids.correspondence(old_rows, old_size, rows, size)
  elif size == old_size:
    index = np.arange(size, dtype=np.int32)
  else:
    raise UserError(
      f"table {name} has {size:,} rows, and {old_size:,} in {other.workdir}, and their raw ids "
      "are not known: declare the data as config.columns, which keeps them"
    )
  slots = [slot for slot in own if slot in old and own[slot].shape[1:] == old[slot].shape[1:]]
  taken, missing = int((index >= 0).sum()), [slot for slot in own if slot not in slots]
  if taken < size:
    mesh_lib.say(f"  table {name}: {taken:,} of {size:,} rows, {size - taken:,} new")
  if old_size > taken:
    mesh_lib.say(f"  table {name}: {old_size - taken:,} rows of the other run have no counterpart")
  if missing:
    mesh_lib.say(f"  table {name}: slots {', '.join(missing)} are new")
  if size == old_size and (index == np.arange(size)).all():
    like = {slot: _struct(own[slot]) for slot in slots}
    return {**own, **other.read("tables", {old_key: like})[old_key]}
  # Every process reads all rows, since any row may move to any device.
  whole = {slot: jax.ShapeDtypeStruct(old[slot].shape, own[slot].dtype) for slot in slots}
  read = other.read("tables", {old_key: whole})[old_key]
  merge = lambda x, rows: jax.jit(_merged, out_shardings=x.sharding)(x, np.asarray(rows), index)
  return {**own, **{slot: merge(own[slot], read[slot]) for slot in slots}}


def _admissions(own: Arrays, other: _Other, key: str, old_key: str) -> dict[str, Any]:
  """Returns the counts of a dynamic vocabulary, which the use of its rows refers to."""

  def start(key: str) -> str:
    prefix, _, name = key.rpartition("/")
    return f"{prefix}/vocabularies/{name}/admissions/value/".removeprefix("/")

  names = {start(old_key) + part: start(key) + part for part in ("step", "batch", "totals")}
  like = {
    theirs: _struct(own[mine])
    for theirs, mine in names.items()
    if mine in own and theirs in other.state
  }
  read = other.read("state", like) if like else {}
  return {names[theirs]: x for theirs, x in read.items()}


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _merged(own: jax.Array, old: jax.Array, index: jax.Array) -> jax.Array:
  """Returns `old[index]`, and the own rows where the index is -1."""
  is_taken = (index >= 0).reshape(-1, *[1] * (own.ndim - 1))
  return jnp.where(is_taken, old[index], own)


def _dense(model: nnx.Module, own: Arrays, other: _Other) -> dict[str, Any]:
  """Returns the dense parameters that the other run has, of the same shape."""
  name_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, _KEPT))
  like = {}
  for name in (name for path, _ in leaves if (name := name_of(path)) in own):
    x, shape = own[name], tuple(other.state[name].shape) if name in other.state else None
    if shape == x.shape:
      like[name] = _struct(x)
    else:
      there = "has none" if shape is None else f"has one of shape {shape}"
      mesh_lib.say(f"  {name}, of shape {x.shape}, is new: the other run {there}")
  mesh_lib.say(f"  {len(like)} dense parameters")
  return other.read("state", like) if like else {}
