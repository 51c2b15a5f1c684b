"""Starts a run from the state of another one: tables, slots and dense parameters by name.

Rows of a table correspond by raw id where both runs have kept raw ids, as those on declared tables
do, and by number elsewhere. The dense optimizer, random streams and the schedule of the learning
rates start anew.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:  # reads tables, which a run on a published data set does without
  from .tables.transforms import RowIds

_DENSE = nnx.Any(nnx.Param, nnx.BatchStat)

Arrays = Mapping[str, Any]  # by name; of a table by slot


def correspondence(old: "RowIds", old_size: int, new: "RowIds", new_size: int) -> np.ndarray:
  """Returns the old row of each new row, int32 `[new_size]`; -1 for rows that have none.

  >>> from recipes.tables.transforms import RowIds
  >>> correspondence(RowIds(("b", "a"), "oov 1"), 3, RowIds(("a", "c", "b"), "oov 1"), 4).tolist()
  [1, -1, 0, 2]
  """
  rows = np.full(new_size, -1, np.int32)
  at = {text: row for row, text in enumerate(old.texts)}
  rows[: len(new.texts)] = [at.get(text, -1) for text in new.texts]
  old_rest, new_rest = old_size - len(old.texts), new_size - len(new.texts)
  count = min(old_rest, new_rest)
  if old.rest == new.rest and (old_rest == new_rest or new.rest == "identity"):
    rows[len(new.texts) : len(new.texts) + count] = np.arange(count) + len(old.texts)
  return rows


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
  workdir = epath.Path(config.init_from).expanduser().resolve()
  steps, result = checkpoints.steps(workdir), workdir / "result.json"
  if not steps:
    raise MissingFileError(
      f"config.init_from: {workdir} holds no checkpoint: give the --workdir of a run"
    )
  step = files.read_json(result)["tested_step"] if result.exists() else steps[-1]
  mesh_lib.say(f"starting from step {step} of {workdir}")
  path = checkpoints.folder(workdir, step)
  from .tables.transforms import stored_rows  # here, since it imports what reads tables

  source = checkpoints.metadata(path)["model"]

  def read(part: str, like: Arrays) -> dict[str, Any]:
    """Reads arrays of "state" or "tables", onto the devices of `like` or, without any, as NumPy."""
    return checkpoints.read(path, {"model": {part: like}})["model"][part] if like else {}

  old_serve = Path(workdir) / "serve"
  own_ids, own_inputs = stored_rows(serve) if serve else ({}, None)
  old_ids, old_inputs = stored_rows(old_serve) if old_serve.is_dir() else ({}, None)
  tree = embed.checkpoint.to_tree(model=model)
  tables, state = tree["model"]["tables"], tree["model"]["state"]
  if not tables.keys() & source["tables"]:
    known, own = (", ".join(sorted(map(_name, keys))) for keys in (source["tables"], tables))
    raise UserError(
      f"no table of {workdir} has the name of one of this run's: they are {known} there and {own} "
      "here"
    )
  for key in tables:
    if key not in source["tables"]:
      mesh_lib.say(f"  table {_name(key)} is new")
      continue
    own, old, name = tables[key], source["tables"][key], _name(key)
    shapes = own["parameters"].shape, old["parameters"].shape
    index = _index(name, *shapes, own_ids.get(name), old_ids.get(name), workdir)
    tables[key] = own | _table(key, own, old, index, read)
  if own_inputs is None or old_inputs in (None, own_inputs):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, _DENSE))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    like = _like(state, source["state"], names)
    state |= read("state", like)
    mesh_lib.say(f"  {len(like)} of {len(names)} dense parameters")
  else:
    # The first dense layers read a concatenation: with other features of the same widths, the
    # parameters would fit, and mean something else.
    mesh_lib.say("  the features or their order differ there: no dense parameter is loaded")
  embed.checkpoint.from_tree(tree, model=model)


def _like(own: Arrays, old: Arrays, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of the arrays, by name, that both have in one shape."""
  shared = [x for x in names if x in own and x in old and own[x].shape == tuple(old[x].shape)]
  return {
    name: jax.ShapeDtypeStruct(own[name].shape, own[name].dtype, sharding=own[name].sharding)
    for name in shared
  }


def _name(key: str) -> str:
  """Returns the name of a table, of its key in checkpoints."""
  return key.rpartition("/")[2]


def _index(
  name: str,
  shape: tuple[int, int],
  old_shape: tuple[int, int],
  ids: "RowIds | None",
  old_ids: "RowIds | None",
  workdir: epath.Path,
) -> np.ndarray:
  """Returns the other run's row of each row of a table, int32; -1 of a new one."""
  (size, dim), (old_size, old_dim) = shape, old_shape
  if dim != old_dim:
    raise UserError(
      f"table {name} has {dim} columns, and {old_dim} in {workdir}: keep the dim, or train without "
      "config.init_from"
    )
  if ids is not None and old_ids is not None:
    return correspondence(old_ids, old_size, ids, size)
  if ids is old_ids and size == old_size:  # neither run has raw ids
    return np.arange(size, dtype=np.int32)
  raise UserError(
    f"the {size:,} rows of table {name} cannot be matched with the {old_size:,} in {workdir}, "
    "since raw ids are not known: declare config.columns for both runs"
  )


def _table(
  key: str, own: Arrays, old: Arrays, index: np.ndarray, read: Any
) -> dict[str, jax.Array]:
  """Returns the table and the slots that both runs have, with the rows that the other one has."""
  slots = [slot for slot in own if slot in old and own[slot].shape[1:] == old[slot].shape[1:]]
  missing, new_rows = sorted(own.keys() - slots), int((index < 0).sum())
  notes = [f"{len(index) - new_rows:,} of {len(index):,} rows, {new_rows:,} new"] * bool(new_rows)
  notes += [f"slots {', '.join(missing)} are new"] * bool(missing)
  if notes:
    mesh_lib.say(f"  table {_name(key)}: {'; '.join(notes)}")
  if (
    own["parameters"].shape == tuple(old["parameters"].shape)
    and (index == np.arange(len(index))).all()
  ):
    return read("tables", {key: _like(own, old, slots)})[key]
  # Every process reads all rows, since any row may move to any device.
  whole = {slot: jax.ShapeDtypeStruct(old[slot].shape, own[slot].dtype) for slot in slots}
  rows = read("tables", {key: whole})[key]
  merge = lambda x, rows: jax.jit(_merged, out_shardings=x.sharding)(x, np.asarray(rows), index)
  return {slot: merge(own[slot], rows[slot]) for slot in slots}


def _merged(own: jax.Array, old: jax.Array, index: jax.Array) -> jax.Array:
  """Returns `old[index]`, and the own rows where the index is -1."""
  is_old = (index >= 0).reshape(-1, *[1] * (own.ndim - 1))
  return jnp.where(is_old, old[index], own)
