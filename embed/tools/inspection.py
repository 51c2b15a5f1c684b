"""`python -m embed inspect`: the tables of a checkpoint or a profile, without its model."""

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from embed import planning
from embed.engine import cost, jax_internals
from embed.tools.profiling import Profile


def main(path: str, shapes_only: bool = False) -> int:
  """Prints the description of a path; returns the exit status."""
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs each step of a restore
  try:
    print(describe(path, shapes_only))
  except (ImportError, OSError, ValueError) as error:
    print(error, file=sys.stderr)
    return 1
  return 0


def describe(path: str | Path, shapes_only: bool = False) -> str:
  """Describes a checkpoint, one line per table, or a profile.

  A line has the rows, dim, dtype, bytes including slots, names of the slots, mean norm of the rows,
  and the fraction of rows that seem untouched: those that have the most common value in every slot.
  Tables are read one at a time.

  Args:
    path: the `.npz` of a profile; or a folder written by Orbax from `embed.checkpoint.to_tree`: the
      workdir of a run, the folder of a checkpoint manager, whose latest full checkpoint is taken, a
      step, or its state.
    shapes_only: whether to read only the metadata of a checkpoint, and no array.

  Raises:
    FileNotFoundError: if there is neither at this path.
    ValueError: if it was not written by `embed`.
    ImportError: if Orbax, which reads checkpoints, is not installed.
  """
  path = Path(path)
  if not path.exists() and Path(f"{path}.npz").exists():
    path = Path(f"{path}.npz")
  if path.suffix == ".npz":
    return repr(Profile.load(path))
  return _checkpoint(find(path.resolve()), shapes_only)


def find(path: Path) -> Path:
  """The folder of a tree of arrays: this one, or the one of the latest step in it."""
  if (path / jax_internals.ORBAX_METADATA).is_file():
    return path
  for name in ("state", "checkpoints"):
    if (path / name).is_dir():
      return find(path / name)
  steps = [int(p.name) for p in path.iterdir() if p.name.isdigit()] if path.is_dir() else []
  full = [step for step in steps if not (path / str(step) / "delta").is_dir()]  # of a recipe's run
  if full:
    return find(path / str(max(full)))
  raise FileNotFoundError(
    f"{path} holds no checkpoint: give a run's workdir, a folder that Orbax wrote, or the .npz of "
    "embed.profile."
  )


def _checkpoint(path: Path, shapes_only: bool) -> str:
  """Describes the tree of arrays in a folder."""
  try:
    import orbax.checkpoint as ocp
  except ImportError:
    raise ImportError(
      "Checkpoints are read by Orbax: pip install -e '.[recipes]', or orbax-checkpoint."
    ) from None
  with ocp.PyTreeCheckpointer() as reader:
    tree = reader.metadata(path).item_metadata.tree
    tree = tree if isinstance(tree, Mapping) else {}
    nodes = {name: node["tables"] for name, node in tree.items() if _has_tables(node)}
    if not nodes:
      raise ValueError(f"{path} has no tables: it was not written from embed.checkpoint.to_tree.")

    def read(node: str, table: str) -> dict[str, np.ndarray]:
      item = {node: {"tables": {table: dict.fromkeys(nodes[node][table], 0)}}}
      as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
      args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
      return reader.restore(path, args=args)[node]["tables"][table]

    lines: list[tuple[str, ...]] = [_HEADER]
    for node, tables in nodes.items():
      for name, arrays in tables.items():
        label = name if len(nodes) == 1 else f"{node}/{name}"
        columns = ("", "") if shapes_only else statistics(read(node, name))
        lines.append((label, *_shapes(arrays), *columns))
  leaves = jax.tree.leaves(tree)
  of_tables = [
    x for tables in nodes.values() for arrays in tables.values() for x in arrays.values()
  ]
  total = (
    f"tables: {len(lines) - 1}, {cost.readable(sum(map(_bytes, of_tables)))} with their slots; "
    f"other arrays: {len(leaves) - len(of_tables)}, "
    f"{cost.readable(sum(map(_bytes, leaves)) - sum(map(_bytes, of_tables)))}"
  )
  return f"{path}\n\n{planning.aligned(lines, left=(0, 5))}\n\n{total}"


_HEADER = ("table", "rows", "dim", "dtype", "bytes", "slots", "row norm", "untouched")


def _has_tables(node: Any) -> bool:
  """Whether the metadata of a node has the tables of `to_tree`."""
  tables = node.get("tables") if isinstance(node, Mapping) else None
  is_table = lambda x: (
    isinstance(x, Mapping) and len(getattr(x.get("parameters"), "shape", ())) == 2
  )
  return isinstance(tables, Mapping) and bool(tables) and all(map(is_table, tables.values()))


def _bytes(x: Any) -> int:
  return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def _shapes(arrays: Mapping[str, Any]) -> tuple[str, ...]:
  """The cells of a table that its metadata tells: rows, dim, dtype, bytes and slots."""
  rows, dim = arrays["parameters"].shape
  slots = ", ".join(name for name in arrays if name != "parameters")
  total = cost.readable(sum(map(_bytes, arrays.values())))
  return str(rows), str(dim), str(arrays["parameters"].dtype), total, slots


def statistics(arrays: Mapping[str, np.ndarray]) -> tuple[str, str]:
  """The mean norm of the rows, and the fraction of untouched rows; "" without slots.

  >>> statistics({"parameters": np.array([[3.0, 4.0], [0.0, 1.0]])})
  ('3', '')
  >>> statistics({"parameters": np.eye(4), "momenta": np.diag([0.0, 0.0, 0.0, 0.5])})
  ('1', '75%')
  """
  rows = arrays["parameters"].astype(np.float32)
  norm = f"{np.linalg.norm(rows, axis=1).mean(dtype=np.float64):.4g}"
  slots = [x.reshape(len(rows), -1) for name, x in arrays.items() if name != "parameters"]
  if not slots:
    return norm, ""
  untouched = np.ones(len(rows), bool)
  for slot in slots:
    values, counts = np.unique(slot[:, 0], return_counts=True)
    # Rows that all differ in a slot are all touched: no value is common.
    common = values[counts.argmax()] if counts.max() > 1 else np.nan
    untouched &= (slot == common).all(axis=1)
  return norm, f"{untouched.mean():.0%}"
