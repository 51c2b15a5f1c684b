"""Deltas as files: a zip archive of `.npy` arrays for each process, which NumPy alone can read."""

import dataclasses
import json
import os
import pathlib
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from embed.storage.changes import TableRows
from embed.tools import text

_FORMAT = 1
_HEADER = "header"
_FILE = re.compile(r"rows-(\d{5})-of-(\d{5})\.npz")


@dataclasses.dataclass(frozen=True)
class Delta:
  """The difference between two states of models and optimizers, in NumPy.

  Attributes:
    since: the step of the earlier state.
    step: the step of the later state.
    tables: `{node: {"<module path>/<table>": (ids, values)}}`: ids int32 `[K]`, ascending, and
      values `{"parameters": [K, dim], slot: [K, dim] or [K]}`. K is 0 if no row has changed.
    state: `{node: {path: array}}`: all arrays outside tables, whole.

  In a run of several processes, `changes` returns each of them the rows of its own shards, and
  `state` to process 0; `read` returns everything to all.

  >>> movie = embed.TableConfig(4, 2, optimizer=embed.sgd(0.5), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> before = embed.deltas.fingerprint(0, model=layer)
  >>> layer.apply_row_gradients({"movie": embed.RowGrads(jnp.array([3]), jnp.ones((1, 2)))})
  >>> delta, _ = embed.deltas.changes(before, 1, model=layer)
  >>> delta.tables["model"]["movie"].ids.tolist(), delta.num_rows, delta.nbytes
  ([3], 1, 24)
  """

  since: int
  step: int
  tables: Mapping[str, Mapping[str, TableRows]]
  state: Mapping[str, Mapping[str, np.ndarray]]

  @property
  def num_rows(self) -> int:
    """The number of changed rows, of all tables."""
    return sum(len(rows.ids) for tables in self.tables.values() for rows in tables.values())

  @property
  def nbytes(self) -> int:
    """The size of all arrays in bytes."""
    return sum(x.nbytes for x in jax.tree.leaves((self.tables, self.state)))

  def __repr__(self) -> str:
    lines: list[tuple[str, ...]] = [("table", "changed rows", "bytes")]
    for tables in self.tables.values():
      for key, rows in tables.items():
        size = sum(x.nbytes for x in jax.tree.leaves(rows))
        lines.append((key, str(len(rows.ids)), text.size(size)))
    lines.append(
      ("other arrays", "", text.size(sum(x.nbytes for x in jax.tree.leaves(self.state))))
    )
    return f"delta of steps {self.since} to {self.step}\n\n{text.aligned(lines)}"


# The archive has a CRC for each array, which NumPy checks. bfloat16 and other types that
# .npy does not know are stored as unsigned integers of their bits; the header has their names.


def write(folder: str | os.PathLike[str], delta: Delta, /) -> None:
  """Writes a delta as `rows-<process>-of-<processes>.npz`, a file for each process.

  A file appears when all of it is on the disk. Its arrays are called `<node>/tables/<key>/ids`,
  `.../parameters` and the names of slots, and `<node>/state/<path>`; "header" is JSON as bytes.

  Args:
    folder: one folder per delta, made where it is missing. All processes name the same one.
    delta: from `changes`.

  >>> import os, tempfile
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> delta, _ = embed.deltas.changes(embed.deltas.fingerprint(0, model=layer), 10, model=layer)
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   embed.deltas.write(folder, delta)
  ...   print(os.listdir(folder), embed.deltas.read(folder).step)
  ['rows-00000-of-00001.npz'] 10
  """
  arrays = {f"{node}/state/{path}": x for node, of in delta.state.items() for path, x in of.items()}
  slots: dict[str, dict[str, list[str]]] = {}
  for node, tables in delta.tables.items():
    slots[node] = {key: list(rows.values) for key, rows in tables.items()}
    for key, rows in tables.items():
      arrays[f"{node}/tables/{key}/ids"] = rows.ids
      arrays |= {f"{node}/tables/{key}/{name}": x for name, x in rows.values.items()}
  header = {
    "format": _FORMAT,
    "since": delta.since,
    "step": delta.step,
    "tables": slots,
    "state": {node: list(of) for node, of in delta.state.items()},
    "dtypes": {name: x.dtype.name for name, x in arrays.items() if x.dtype.kind == "V"},
  }
  entries: dict[str, Any] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
  entries |= {name: _bits(x) for name, x in arrays.items()}
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  path /= f"rows-{jax.process_index():05}-of-{jax.process_count():05}.npz"
  partial = path.with_name(f"{path.name}.part")
  with partial.open("wb") as file:
    np.savez(file, **entries)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)


def _bits(x: np.ndarray) -> np.ndarray:
  return x.view(f"uint{8 * x.dtype.itemsize}") if x.dtype.kind == "V" else x


def read(folder: str | os.PathLike[str], /) -> Delta:
  """Reads the delta that all processes have written to a folder.

  Args:
    folder: as for `write`.

  Raises:
    FileNotFoundError: if the file of a process is missing; names it.
    ValueError: if a file is damaged, or none of `write`; names it.

  >>> import tempfile
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> delta, _ = embed.deltas.changes(embed.deltas.fingerprint(0, model=layer), 10, model=layer)
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   embed.deltas.write(folder, delta)
  ...   embed.deltas.read(folder).tables["model"]["table_0"].values["parameters"].shape
  (0, 2)
  """
  parts = [_read_file(path) for path in _files(pathlib.Path(folder))]
  first = parts[0]
  if any((part.since, part.step) != (first.since, first.step) for part in parts):
    raise ValueError(f"The files in {os.fspath(folder)} are of several deltas: write one to each.")

  def joined(*rows: TableRows) -> TableRows:
    ids = np.concatenate([each.ids for each in rows])
    order = np.argsort(ids)
    join = lambda key: np.concatenate([each.values[key] for each in rows])[order]
    return TableRows(ids[order], {key: join(key) for key in rows[0].values})

  tables = {
    node: {key: joined(*(part.tables[node][key] for part in parts)) for key in of}
    for node, of in first.tables.items()
  }
  return Delta(first.since, first.step, tables, first.state)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files of all processes."""
  names = sorted(path.name for path in folder.glob("*.npz")) if folder.is_dir() else []
  counts = {int(match[2]) for name in names if (match := _FILE.fullmatch(name))}
  if not counts:
    raise FileNotFoundError(f"{folder} holds no delta: it has no file rows-....npz.")
  paths = [folder / f"rows-{i:05}-of-{max(counts):05}.npz" for i in range(max(counts))]
  for path in paths:
    if not path.is_file():
      raise FileNotFoundError(f"{path} is missing, the rows of a process in the delta.")
  return paths


def _read_file(path: pathlib.Path) -> Delta:
  try:
    # NumPy does not close a file that is no archive.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop(_HEADER).tobytes())
    if header["format"] > _FORMAT:
      raise ValueError(f"its format {header['format']} is of a later version of this library")
    for name, dtype in header["dtypes"].items():
      arrays[name] = arrays[name].view(getattr(ml_dtypes, dtype))
    tables = {
      node: {
        key: TableRows(
          arrays[f"{node}/tables/{key}/ids"],
          {name: arrays[f"{node}/tables/{key}/{name}"] for name in names},
        )
        for key, names in of.items()
      }
      for node, of in header["tables"].items()
    }
    state = {
      node: {name: arrays[f"{node}/state/{name}"] for name in names}
      for node, names in header["state"].items()
    }
    return Delta(header["since"], header["step"], tables, state)
  # zipfile raises RuntimeError for flags and methods that it does not know, and OSError, without a
  # file's name, for offsets before the file.
  except (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    if isinstance(error, OSError) and error.filename is not None:
      raise
    reason = str(error).partition("\n")[0]
    raise ValueError(f"{path} is damaged, or no file of a delta ({reason}).") from error
