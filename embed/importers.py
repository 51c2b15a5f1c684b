"""Tables and optimizer states of torch, TorchRec, FBGEMM, Keras and safetensors, in and out.

Each reader returns `{table: {"parameters": array, slot: array}}` in NumPy, rows in order, under the
names of this library: `layer.load_variables` checks names and shapes, and takes it. The libraries
that wrote the files are not imported; `.weights.h5` needs h5py and Parquet needs pyarrow (the extra
`importers`).
"""

import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from embed.layer import SparseEmbed

__all__ = [
  "from_fbgemm",
  "from_keras",
  "from_safetensors",
  "from_torch",
  "to_parquet",
  "to_safetensors",
]

Variables = dict[str, dict[str, np.ndarray]]

_TORCHREC = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight$")
_SLOTS = {
  "sum": "accumulators",
  "exp_avg": "momenta",
  "exp_avg_sq": "velocities",
  "step": "steps",
}


def from_torch(
  state_dict: Mapping[str, Any],
  optimizer_state: Mapping[str, Any] | None = None,
  *,
  tables: Mapping[str, str] | None = None,
  parameters: Sequence[str] | None = None,
  slots: Collection[str] | None = None,
) -> Variables:
  """Reads tables of torch or TorchRec, and their optimizer's state.

  Adagrad's `sum` becomes `accumulators`, and Adam's `exp_avg`, `exp_avg_sq` and `step` become
  `momenta`, `velocities` and `steps`. TorchRec's `momentum1` is `accumulators`, or with a
  `momentum2` `momenta` and `velocities`.

  Args:
    state_dict: of the model, such as `model.state_dict()`; tensors or arrays, `[V, D]` each.
    optimizer_state: `optimizer.state_dict()` of torch, or of TorchRec, which is keyed by name.
    tables: `{our table: their parameter}`, such as `{"movie": "movie_embedding.weight"}`. By
      default the tables of each `EmbeddingBagCollection` and `EmbeddingCollection` of TorchRec.
    parameters: names in the order of torch's optimizer, by default that of `state_dict`. Write
      `[name for name, _ in model.named_parameters()]` if the model has buffers.
    slots: the names of the slots to keep, all by default.

  Raises:
    ValueError: for a parameter that is not there, if there is no table to read, if two have one
      name, or for a state that cannot be told apart, is of no table, or has no slot here.

  >>> weights = {"user.weight": np.ones((3, 2)), "head.weight": np.ones((1, 2))}
  >>> state = {0: {"sum": np.full((3, 2), 4.0), "step": 7.0}}
  >>> adagrad = {"state": state, "param_groups": [{"params": [0, 1]}]}
  >>> read = embed.importers.from_torch(weights, adagrad, tables={"user": "user.weight"})
  >>> {name: x[0].tolist() for name, x in read["user"].items()}
  {'parameters': [1.0, 1.0], 'accumulators': [4.0, 4.0]}
  """
  if tables is None:
    matches = {key: _TORCHREC.search(key) for key in state_dict}
    found = [(match["table"], key) for key, match in matches.items() if match]
    tables = dict(found)
    if len(tables) < len(found):
      raise ValueError(
        f"from_torch: several tables have one name. Write tables={{name: key}} with {found}."
      )
    if not tables:
      raise ValueError(
        "from_torch: there is no EmbeddingBagCollection in the state_dict. Write "
        'tables={"our table": "their parameter"} with parameters of '
        f"{_names(key for key, x in state_dict.items() if len(np.shape(x)) == 2)}."
      )
  order = list(state_dict) if parameters is None else list(parameters)
  variables, has_state = {}, False
  for table, key in tables.items():
    if key not in state_dict:
      raise ValueError(f"from_torch: there is no parameter {key!r}: {_names(state_dict)}.")
    rows = _array(state_dict[key])
    state = _torch_state(optimizer_state or {}, key, order)
    has_state |= bool(state)
    variables[table] = {"parameters": rows} | _torch_slots(state, rows.shape, slots)
  if optimizer_state and optimizer_state.get("state") and not has_state:
    raise ValueError(
      f"from_torch: the optimizer's state has nothing of {_names(tables.values())}, but has "
      f"{_names(map(str, optimizer_state['state']))}. Leave it out, or write parameters=[...]."
    )
  return variables


def _torch_state(
  optimizer_state: Mapping[str, Any], key: str, order: Sequence[str]
) -> Mapping[str, Any]:
  """The state of one parameter, empty if the optimizer does not train it."""
  states, groups = optimizer_state.get("state", {}), optimizer_state.get("param_groups", [])
  if key in states:  # TorchRec's: {"movie.momentum1": ...}
    return {name.rpartition(".")[2]: x for name, x in states[key].items()}
  numbers = [number for group in groups for number in group["params"]]
  names = [name for group in groups for name in group.get("param_names", [])] or order
  if numbers and len(names) != len(numbers):
    raise ValueError(
      f"from_torch: the optimizer has {len(numbers)} parameters, and there are {len(names)} names. "
      "Write parameters=[...], their names in the optimizer's order."
    )
  if key not in names or names.index(key) >= len(numbers):
    return {}
  return states.get(numbers[names.index(key)], {})


def _torch_slots(
  state: Mapping[str, Any], shape: tuple[int, ...], slots: Collection[str] | None
) -> dict[str, np.ndarray]:
  found = {}
  for name, x in state.items():
    slot = _SLOTS.get(name)
    if name in ("momentum1", "momentum2"):
      both = ("momenta", "velocities") if "momentum2" in state else ("accumulators",)
      slot = both[int(name[-1]) - 1]
    if slot == "steps" and "exp_avg" not in state:
      continue  # Adagrad's, which does not use it
    if x is None or (slots is not None and slot not in slots):
      continue
    if slot is None:
      raise ValueError(
        f"from_torch: no optimizer here has a slot for {name!r}. Write slots=[...] with those to "
        f"keep, of {sorted(set(_SLOTS.values()))}."
      )
    array = _array(x)
    if slot != "steps" and array.shape[:1] != shape[:1]:
      raise ValueError(
        f"from_torch: the state {name!r} has the shape {array.shape}, and its table {shape}. Write "
        "parameters=[...], the names of the optimizer's parameters in its order."
      )
    if slot == "steps":
      array = np.full(shape[:1], array, np.int32)
    elif array.shape == (shape[0], 1) and shape[1] != 1:  # one value a row
      array = array[:, 0]
    found[slot] = array
  return found


def from_fbgemm(
  state_dict: Mapping[str, Any],
  tables: Mapping[str, tuple[int, int]],
  *,
  momenta: Sequence[str] = ("accumulators",),
) -> Variables:
  """Reads the split tables of FBGEMM, and their optimizer's state.

  Args:
    state_dict: of a `SplitTableBatchedEmbeddingBagsCodegen`, on any device, without a cache
      (call `flush()` before).
    tables: `{name: (rows, columns)}`, in the order of its `embedding_specs`.
    momenta: our names of `momentum1` and `momentum2`, such as `("momenta", "velocities")`.

  Raises:
    ValueError: if the arrays do not hold that many elements.

  >>> state = {"weights_host": np.arange(8.0), "momentum1_host": np.array([5.0, 6.0, 7.0, 8.0])}
  >>> state |= {f"{x}_placements": np.array([3]) for x in ("weights", "momentum1")}
  >>> state |= {f"{x}_offsets": np.array([0]) for x in ("weights", "momentum1")}
  >>> read = embed.importers.from_fbgemm(state, {"movie": (4, 2)})
  >>> read["movie"]["parameters"].tolist(), read["movie"]["accumulators"].tolist()
  ([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], [5.0, 6.0, 7.0, 8.0])
  """
  variables: Variables = {name: {} for name in tables}
  names = {"weights": "parameters"} | {f"momentum{i + 1}": x for i, x in enumerate(momenta)}
  for theirs, ours in names.items():
    if f"{theirs}_placements" not in state_dict:
      continue  # SGD has no state
    placements, offsets = (_array(state_dict[f"{theirs}_{x}"]) for x in ("placements", "offsets"))
    stores = {x: _array(state_dict.get(f"{theirs}_{x}", ())).ravel() for x in _STORES.values()}
    total = sum(x.size for x in stores.values())
    per_row = theirs != "weights" and total == sum(rows for rows, _ in tables.values())
    if not per_row and total != sum(math.prod(shape) for shape in tables.values()):
      raise ValueError(
        f"from_fbgemm: {theirs} has {total} elements, which are neither the rows nor the elements "
        f"of {dict(tables)}. Write tables in the order of embedding_specs, with their sizes."
      )
    for i, (name, shape) in enumerate(tables.items()):
      own = shape[:1] if per_row else shape
      store, first = stores[_STORES[int(placements[i])]], int(offsets[i])
      variables[name][ours] = store[first : first + math.prod(own)].reshape(own).copy()
  return variables


_STORES = {0: "dev", 1: "uvm", 2: "uvm", 3: "host"}  # of FBGEMM's EmbeddingLocation


def from_keras(
  path: str | os.PathLike[str], *, slots: Mapping[str, Sequence[str]] | None = None
) -> Variables:
  """Reads the embedding layers of a `.weights.h5` of Keras, those of keras-rs included.

  Args:
    path: of a file by `model.save_weights`.
    slots: `{table: names of its slots}` in the order in which the optimizer keeps them, such as
      `("accumulators",)` for Adagrad and `("momenta", "velocities")` for Adam. By default none is
      read.

  Returns:
    The tables by the names of their layers, which for keras-rs are those of each `TableConfig`.

  Raises:
    ValueError: if there is no such table, or if arrays of its shape cannot be told apart: the file
      has no names for the variables of an optimizer.

  >>> read = embed.importers.from_keras(  # doctest: +SKIP
  ...   "model.weights.h5", slots={"movie": ["accumulators"]}
  ... )
  >>> layer.load_variables(read)  # doctest: +SKIP
  """
  try:
    import h5py
  except ImportError:
    raise ImportError("Files of Keras are read by h5py: pip install -e '.[importers]'.") from None

  variables: Variables = {}
  shapes: list[tuple[int, ...]] = []  # of all weights

  def read(name: str, node: Any) -> None:
    if not isinstance(node, h5py.Group) or not name.endswith("vars") or "optimizer" in name:
      return
    arrays = [np.asarray(node[key]) for key in node]
    shapes.extend(x.shape for x in arrays)
    if len(arrays) == 1 and arrays[0].ndim == 2 and re.search("embed", name):
      variables[str(node.attrs.get("name", name))] = {"parameters": arrays[0]}

  with h5py.File(path) as file:
    file.visititems(read)
    stored = file.get("optimizer/vars", {})
    state = [np.asarray(stored[key]) for key in sorted(stored, key=int)]
  for table, names in (slots or {}).items():
    if table not in variables:
      raise ValueError(f"from_keras: there is no table {table!r}: {_names(variables)}.")
    shape = variables[table]["parameters"].shape
    found = [x for x in state if x.shape == shape]
    if len(found) != len(names) or shapes.count(shape) != 1:
      raise ValueError(
        f"from_keras: {len(found)} arrays of the optimizer and {shapes.count(shape)} weights have "
        f"the shape {shape} of {table!r}, whose slots are to be {list(names)}. Leave {table!r} out "
        "of slots, and set them with layer.load_variables."
      )
    variables[table] |= zip(names, found, strict=True)
  return variables


def from_safetensors(path: str | os.PathLike[str]) -> Variables:
  """Reads tables and slots named `table/parameters` or `table`, and `table/slot`.

  Other names are tables of their own: `{"user.weight": {"parameters": array}}`.

  Raises:
    ValueError: for another or a cut file, an array of a dtype that NumPy does not have, or two
      arrays of one slot.

  >>> import json, struct, tempfile
  >>> path = f"{tempfile.mkdtemp()}/tables.safetensors"
  >>> entry = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
  >>> header = json.dumps({"movie/accumulators": entry}).encode()
  >>> with open(path, "wb") as file:
  ...   written = file.write(struct.pack("<Q", len(header)) + header + np.float32([3, 4]).tobytes())
  >>> embed.importers.from_safetensors(path)["movie"]["accumulators"].tolist()
  [[3.0, 4.0]]
  """
  size = os.path.getsize(path)
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    try:
      header = json.loads(file.read(length)) if 8 + length <= size else None
    except ValueError:
      header = None
  if not isinstance(header, dict):
    raise ValueError(f"from_safetensors: {os.fspath(path)} is no file of safetensors.")
  header.pop("__metadata__", None)
  variables: Variables = {}
  for name, entry in header.items():
    if entry["dtype"] not in _DTYPES:
      raise ValueError(f"from_safetensors: {name!r} is {entry['dtype']}; there are {[*_DTYPES]}.")
    table, slash, key = name.rpartition("/")
    first, end = entry["data_offsets"]
    if not 0 <= first <= end <= size - 8 - length:
      raise ValueError(f"from_safetensors: {os.fspath(path)} ends before the array {name!r}.")
    data = np.fromfile(path, np.uint8, end - first, offset=8 + length + first)
    array = data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    table, key = (table, key) if slash else (name, "parameters")
    if key in variables.setdefault(table, {}):
      raise ValueError(f"from_safetensors: {table!r} has {key!r} twice, as {name!r} too.")
    variables[table][key] = array
  return variables


def to_safetensors(layer: SparseEmbed, path: str | os.PathLike[str]) -> None:
  """Writes tables and slots, named `table/parameters` and `table/slot`.

  >>> import tempfile
  >>> movie = embed.TableConfig(3, 2, name="movie", optimizer=embed.adagrad(0.1))
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> path = f"{tempfile.mkdtemp()}/tables.safetensors"
  >>> embed.importers.to_safetensors(layer, path)
  >>> {name: list(x) for name, x in embed.importers.from_safetensors(path).items()}
  {'movie': ['parameters', 'accumulators']}
  """
  header: dict[str, Any] = {"__metadata__": {"format": "np"}}
  arrays, end = [], 0
  for table, by_key in layer.variables.items():
    for key, x in by_key.items():
      arrays.append(np.ascontiguousarray(x))
      first, end = end, end + arrays[-1].nbytes
      dtype = _NAMES_OF[str(arrays[-1].dtype)]
      entry = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [first, end]}
      header[f"{table}/{key}"] = entry
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # arrays are aligned
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for array in arrays:
      file.write(array.tobytes())


# https://github.com/huggingface/safetensors#format: the length of a header, the header, the arrays
_DTYPES: dict[str, Any] = {
  "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
  "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
  "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
_NAMES_OF = {str(np.dtype(dtype)): name for name, dtype in _DTYPES.items()}


def to_parquet(layer: SparseEmbed, path: str | os.PathLike[str], table: str) -> None:
  """Writes a table: columns `id`, `parameters` and its slots, a list of D floats or one value each.

  Raises:
    ValueError: for an unknown table.

  >>> import pyarrow.parquet, tempfile
  >>> movie = embed.TableConfig(3, 2, name="movie", optimizer=embed.rowwise_adagrad(0.1))
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> path = f"{tempfile.mkdtemp()}/movie.parquet"
  >>> embed.importers.to_parquet(layer, path, "movie")
  >>> pyarrow.parquet.read_table(path).column_names
  ['id', 'parameters', 'accumulators']
  """
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError:
    raise ImportError("Parquet is written by pyarrow: pip install -e '.[importers]'.") from None

  variables = layer.variables
  if table not in variables:
    raise ValueError(f"to_parquet: there is no table {table!r}: {_names(variables)}.")
  columns: dict[str, Any] = {}
  for key, x in variables[table].items():
    array = _array(x)
    columns.setdefault("id", np.arange(len(array)))
    columns[key] = array
    if array.ndim == 2:
      values = pyarrow.array(array.ravel())
      columns[key] = pyarrow.FixedSizeListArray.from_arrays(values, array.shape[1])
  pyarrow.parquet.write_table(pyarrow.table(columns), os.fspath(path))


def _array(x: Any) -> np.ndarray:
  """A tensor or an array in NumPy; bfloat16, which NumPy does not have, as float32."""
  if hasattr(x, "full_tensor"):  # a torch.distributed DTensor
    x = x.full_tensor()
  if hasattr(x, "detach"):
    x = x.detach().cpu()
    x = x.float() if "bfloat16" in str(x.dtype) else x
  array = np.asarray(x)
  return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def _names(names: Iterable[str]) -> str:
  names = sorted(names)
  return ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if names[20:] else "")
