"""Starts a run from the state of another one: tables, slots and dense parameters by name.

Rows of a table correspond by raw id where both runs have kept raw ids, as those on declared tables
do, and by number elsewhere. The dense optimizer, random streams and whatever else a model remembers
of past batches start as in a run of their own, and so does the schedule of the learning rates.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import embed
import embed.checkpoint

from .. import hosts
from ..errors import MissingFileError, UserError
from ..tables import row_ids
from . import checkpoints, keeping, settings
from . import workdir as runs
from .loop import Run

_KEPT = nnx.Any(nnx.Param, nnx.BatchStat)  # of what is no table
_ALL, _TABLES = "all", "tables"


@dataclasses.dataclass
class _Report:
  """What was taken from the other run, and what was not, for the log."""

  dense: int = 0
  lines: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Source:
  """A checkpoint of another run.

  Attributes:
    workdir: of the run.
    step: of the checkpoint.
    chain: the full checkpoint and the deltas that make up its state.
    state: path and the shapes of the dense arrays.
    tables: shapes by key and slot.
    rows: raw ids by table name, empty where the run keeps none.
  """

  workdir: Path
  step: int
  chain: Sequence[int]
  state: Mapping[str, Any]
  tables: Mapping[str, Mapping[str, Any]]
  rows: Mapping[str, row_ids.RowIds]

  @property
  def path(self) -> Path:
    """The arrays of the full checkpoint."""
    return checkpoints.base(self.workdir / "checkpoints", self.chain)

  @functools.cached_property
  def deltas(self) -> list[embed.deltas.Delta]:
    """The deltas after it, in their order."""
    return checkpoints.deltas(self.workdir / "checkpoints", self.chain)

  @classmethod
  def open(cls, workdir: Path) -> "_Source":
    """Reads what a run holds: its tested state, or its latest one if it has not ended.

    Raises:
      MissingFileError: the folder holds no run, or one without a checkpoint.
      UserError: the checkpoint is damaged; names the file.
    """

    def choose() -> list[int]:
      result, folder = runs.result(workdir), workdir / "checkpoints"
      if result is None:
        return checkpoints.newest(folder)
      step = result["tested_step"]
      return checkpoints.of_step(folder, step) if (folder / str(step)).is_dir() else []

    chain = hosts.from_main(choose)
    if not chain:
      raise MissingFileError(
        f"config.init_from is {str(workdir)!r}, which holds no checkpoint: give the --workdir of a "
        "run"
      )
    with ocp.PyTreeCheckpointer() as reader:
      path = checkpoints.base(workdir / "checkpoints", chain)
      tree = reader.metadata(path).item_metadata.tree["model"]
    serve = workdir / "serve"
    rows = row_ids.read(serve) if serve.is_dir() else {}
    return cls(workdir, chain[-1], chain, tree["state"], tree["tables"], rows)


def start(run: Run) -> None:
  """Puts the state of the run `config.init_from`, if there is one, into a run that is new.

  The other run may then train on, or be removed: this one does not need it any more.

  Raises:
    UserError: as `take`.
  """
  if not run.is_new or not settings.value(run.asked, "init_from"):
    return
  hosts.from_main(lambda: keeping.keep_base(_source(run.asked), run.workdir))
  take(run.asked, run.model, run.serve)
  run.save()


def _source(config) -> Path:
  """Returns the workdir of the run `config.init_from`."""
  return Path(settings.value(config, "init_from")).expanduser().resolve()


def take(config, model: nnx.Module, serve: Path | None) -> None:
  """Puts the state of the run `config.init_from` into a model that has not been trained.

  Args:
    config: with settings of `settings.RUN`: `init_from`, `init_parts`, `init_rename`.
    model: on its devices.
    serve: the folder of what serving needs besides the model; None if there is none.

  Raises:
    UserError: there is no such run, or a table has another width there, or nothing corresponds.
  """
  other = _Source.open(_source(config))
  parts = settings.value(config, "init_parts")
  if parts not in (_ALL, _TABLES):
    raise UserError(f"config.init_parts is {parts!r}: choose {_ALL} or {_TABLES}")
  rows = row_ids.read(serve) if serve is not None else {}
  tree = embed.checkpoint.to_tree(model=model)
  own, report = tree["model"], _Report()
  keys = _matches(own["tables"], other, settings.value(config, "init_rename"))
  for key, old_key in keys.items():
    ids = rows.get(_name(key))
    own["tables"][key] = _table(own["tables"][key], other, key, old_key, ids, report)
  report.lines += [f"table {_name(key)} is new" for key in own["tables"] if key not in keys]
  if parts == _ALL and _reads_the_same(serve, other, report):
    own["state"] |= _dense(model, own["state"], other, report)
  embed.checkpoint.from_tree(tree, model=model)
  hosts.say(
    f"starting from step {other.step} of {other.workdir}: {len(keys)} tables, {report.dense} "
    "dense parameters"
  )
  for line in report.lines:
    hosts.say(f"  {line}")


def _reads_the_same(serve: Path | None, other: _Source, report: _Report) -> bool:
  """Returns whether the dense part has the inputs that it has in the other run, in their order.

  Its first layers read a concatenation: with other features of the same widths, the parameters
  would fit, and mean something else.
  """
  kept = other.workdir / "serve"
  if serve is None or not kept.is_dir() or row_ids.inputs(serve) == row_ids.inputs(kept):
    return True
  report.lines.append(
    "the features or their order differ from the other run's: no dense parameter is taken"
  )
  return False


def _matches(tables: Mapping[str, Any], source: _Source, rename: str) -> dict[str, str]:
  """Returns the key of the other run's table for each table that has one there.

  Raises:
    UserError: a renamed table is in neither run, or no table corresponds.
  """
  renamed = dict(_pair(text) for text in filter(None, rename.split(",")))
  for new, old in renamed.items():
    for name, held, where in ((new, tables, "this run"), (old, source.tables, source.workdir)):
      if name not in map(_name, held):
        raise UserError(
          f"config.init_rename names a table {name!r}, and those of {where} are "
          f"{', '.join(sorted(map(_name, held)))}"
        )
  matches = {}
  for key in tables:
    name = renamed.get(_name(key), _name(key))
    same = [old for old in source.tables if _name(old) == name]
    exact = [old for old in same if old.rpartition("/")[0] == key.rpartition("/")[0]]
    if exact or len(same) == 1:
      matches[key] = (exact or same)[0]
  if not matches:
    raise UserError(
      f"no table of {source.workdir} has the name of one of this run's: they are "
      f"{', '.join(sorted(map(_name, source.tables)))} there and "
      f"{', '.join(sorted(map(_name, tables)))} here. config.init_rename=new=old maps them"
    )
  return matches


def _name(key: str) -> str:
  """Returns the name of a table, of its key in checkpoints."""
  return key.rpartition("/")[2]


def _pair(text: str) -> tuple[str, str]:
  new, equals, old = text.partition("=")
  if not (new and equals and old):
    raise UserError(f"config.init_rename has {text!r}: write new=old, several with commas between")
  return new.strip(), old.strip()


def _table(
  own: Mapping[str, jax.Array],
  source: _Source,
  key: str,
  old_key: str,
  rows: row_ids.RowIds | None,
  report: _Report,
) -> dict[str, jax.Array]:
  """Returns a table and its slots with the rows of the other run's, where there are any."""
  name, old = _name(key), source.tables[old_key]
  size, dim = own["parameters"].shape
  old_size, old_dim = old["parameters"].shape
  if dim != old_dim:
    raise UserError(
      f"table {name} has {dim} columns, and {_name(old_key)} in {source.workdir} has {old_dim}: "
      "keep the dim, or train without config.init_from"
    )
  old_rows = source.rows.get(_name(old_key))
  if (rows is None) != (old_rows is None):
    raise UserError(
      f"table {name} has raw ids in {'this run' if rows else source.workdir} only: rows correspond "
      "by raw id, or by number if neither run has kept raw ids"
    )
  if rows is not None and old_rows is not None:
    index = row_ids.correspondence(old_rows, old_size, rows, size)
  elif size == old_size:
    index = np.arange(size, dtype=np.int32)
  else:
    raise UserError(
      f"table {name} has {size:,} rows, and {old_size:,} in {source.workdir}, and their raw ids "
      "are not known: declare the data as config.columns, which keeps them"
    )
  slots = [slot for slot in own if slot in old and own[slot].shape[1:] == old[slot].shape[1:]]
  read = _read(source, old_key, {slot: own[slot] for slot in slots}, index)
  taken = int((index >= 0).sum())
  if taken < size:
    report.lines.append(f"table {name}: {taken:,} of {size:,} rows, {size - taken:,} new")
  if old_size > taken:
    report.lines.append(
      f"table {name}: {old_size - taken:,} rows of the other run have no counterpart"
    )
  missing = [slot for slot in own if slot not in slots]
  if missing:
    report.lines.append(f"table {name}: slots {', '.join(missing)} are new")
  return {**own, **read}


def _read(
  source: _Source, key: str, own: Mapping[str, jax.Array], index: np.ndarray
) -> dict[str, jax.Array]:
  """Returns arrays of a table, row i being the other run's row `index[i]`, or as it was if -1."""
  if (
    len(index) == source.tables[key]["parameters"].shape[0]
    and (index == np.arange(len(index))).all()
  ):
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in own.items()}
    return _restored(source, {"tables": {key: like}})["tables"][key]
  # Every process reads all rows, since any row may move to any device.
  whole = {n: jax.ShapeDtypeStruct(source.tables[key][n].shape, x.dtype) for n, x in own.items()}
  old = _restored(source, {"tables": {key: whole}})["tables"][key]
  return {
    name: jax.jit(_merged, out_shardings=x.sharding)(x, np.asarray(old[name]), index)
    for name, x in own.items()
  }


def _merged(own: jax.Array, old: jax.Array, index: jax.Array) -> jax.Array:
  is_taken = (index >= 0).reshape(-1, *[1] * (own.ndim - 1))
  return jnp.where(is_taken, old[index], _on_device(own))


def _dense(
  model: nnx.Module, own: Mapping[str, jax.Array], source: _Source, report: _Report
) -> dict[str, jax.Array]:
  """Returns the dense parameters that the other run has, of the same shape."""
  leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, _KEPT))
  name_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  kept = [name for path, _ in leaves if (name := name_of(path)) in own]
  like = {}
  for name in kept:
    shape = tuple(source.state[name].shape) if name in source.state else None
    if shape == own[name].shape:
      x = own[name]
      like[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    else:
      there = "has none" if shape is None else f"has one of shape {shape}"
      report.lines.append(f"{name}, of shape {own[name].shape}, is new: the other run {there}")
  report.dense = len(like)
  return _restored(source, {"state": like})["state"] if like else {}


def _restored(source: _Source, like: dict[str, Any]) -> dict[str, Any]:
  """Reads the arrays that `like` names, onto its devices or, without a sharding, as NumPy."""
  tree = {"model": like}
  restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
  with ocp.PyTreeCheckpointer() as reader:
    args = ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=True)
    restored = reader.restore(source.path, args=args)["model"]
  for delta in source.deltas:
    for key, arrays in restored.get("tables", {}).items():
      rows = delta.tables["model"][key]
      for name, x in arrays.items():
        arrays[name] = _with_rows(x, rows.ids, rows.values[name])
    for name, x in restored.get("state", {}).items():
      restored["state"][name] = jax.device_put(delta.state["model"][name], x.sharding)
  return restored


def _with_rows(x: Any, ids: np.ndarray, rows: np.ndarray) -> Any:
  """Returns an array with some rows replaced, where it was."""
  if not isinstance(x, jax.Array):
    x = np.array(x)
    x[ids] = rows
    return x
  put = jax.jit(_with_rows_at, out_shardings=x.sharding, donate_argnums=0)
  return put(x, ids, rows)


def _with_rows_at(x: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
  return _on_device(x).at[ids].set(rows)


def _on_device(x: jax.Array) -> jax.Array:
  """An array that may be in the memory of the host."""
  return jax.device_put(x, jax.memory.Space.Device)
