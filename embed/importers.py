"""Tables and optimizer states of other libraries, in and out.

Each `from_` reader returns `{table: {"parameters": array, slot: array}}` in NumPy, rows in order,
under the names of this library: `layer.load_variables` checks names and shapes, and takes it. The
libraries that wrote the files are not imported; `.weights.h5` needs h5py and Parquet needs pyarrow
(the extra `importers`).
"""

import functools
import json
import math
import numbers
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from embed import config as config_lib
from embed import initializers, structure
from embed.layer import SparseEmbed
from embed.optimizers import OPTIMIZERS, RowOptimizer, named

__all__ = [
  "from_fbgemm",
  "from_keras",
  "from_safetensors",
  "from_torch",
  "to_parquet",
  "to_safetensors",
]

Variables = dict[str, dict[str, np.ndarray]]

# --- torch, TorchRec and FBGEMM ------------------------------------------------------------------

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
    matches = [(_TORCHREC.search(key), key) for key in state_dict]
    found = [(match["table"], key) for match, key in matches if match]
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
  variables: Variables = {}
  has_state = False
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
  """Returns the state of one parameter, empty if the optimizer does not train it."""
  states, groups = optimizer_state.get("state", {}), optimizer_state.get("param_groups", [])
  if key in states:  # TorchRec's: {"movie.momentum1": ...}
    return {name.rpartition(".")[2]: x for name, x in states[key].items()}
  indices = [index for group in groups for index in group["params"]]
  names = [name for group in groups for name in group.get("param_names", [])] or order
  if indices and len(names) != len(indices):
    raise ValueError(
      f"from_torch: the optimizer has {len(indices)} parameters, and there are {len(names)} names. "
      "Write parameters=[...], their names in the optimizer's order."
    )
  return states.get(dict(zip(names, indices, strict=False)).get(key), {})


def _torch_slots(
  state: Mapping[str, Any], shape: tuple[int, ...], slots: Collection[str] | None
) -> dict[str, np.ndarray]:
  slot_of: dict[str, str] = _SLOTS | {"momentum1": "accumulators"}
  if "momentum2" in state:
    slot_of |= {"momentum1": "momenta", "momentum2": "velocities"}
  found = {}
  for name, x in state.items():
    slot = slot_of.get(name)
    if name == "step" and "exp_avg" not in state:
      continue  # Adagrad's, which does not use it
    if x is None or (slots is not None and slot not in slots):
      continue
    if slot is None:
      raise ValueError(
        f"from_torch: no optimizer here has a slot for {name!r}. Write slots=[...] with those to "
        f"keep, of {sorted(set(_SLOTS.values()))}."
      )
    array = _array(x)
    if slot == "steps":
      array = np.full(shape[:1], array, np.int32)
    elif array.shape[:1] != shape[:1]:
      raise ValueError(
        f"from_torch: the state {name!r} has the shape {array.shape}, and its table {shape}. Write "
        "parameters=[...], the names of the optimizer's parameters in its order."
      )
    elif array.shape == (shape[0], 1) and shape[1] != 1:  # one value a row
      array = array[:, 0]
    found[slot] = array
  return found


_STORES = {0: "dev", 1: "uvm", 2: "uvm", 3: "host"}  # of FBGEMM's EmbeddingLocation


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
    for (name, shape), place, first in zip(tables.items(), placements, offsets, strict=True):
      own = shape[:1] if per_row else shape
      flat = stores[_STORES[int(place)]][int(first) : int(first) + math.prod(own)]
      variables[name][ours] = flat.reshape(own).copy()
  return variables


# --- Keras, safetensors and Parquet --------------------------------------------------------------


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
    if len(arrays) == 1 and arrays[0].ndim == 2 and "embed" in name:
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


# https://github.com/huggingface/safetensors#format: the length of a header, the header, the arrays
_DTYPES: dict[str, Any] = {
  "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
  "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
  "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
_NAMES_OF = {str(np.dtype(dtype)): name for name, dtype in _DTYPES.items()}


def from_safetensors(path: str | os.PathLike[str]) -> Variables:
  """Reads tables and slots named `table/parameters` or `table`, and `table/slot`.

  Other names are tables of their own: `{"user.weight": {"parameters": array}}`.

  Raises:
    ValueError: for another or a cut file, an array of a dtype that NumPy does not have, or two
      arrays of one slot.
  """
  size = os.path.getsize(path)
  with open(path, "rb") as file:
    start = 8 + int.from_bytes(file.read(8), "little")
    try:
      header = json.loads(file.read(start - 8)) if start <= size else None
    except ValueError:
      header = None
  if not isinstance(header, dict):
    raise ValueError(f"from_safetensors: {os.fspath(path)} is no file of safetensors.")
  header.pop("__metadata__", None)
  variables: Variables = {}
  for name, entry in header.items():
    first, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
      raise ValueError(f"from_safetensors: {name!r} is {entry['dtype']}; there are {[*_DTYPES]}.")
    if not 0 <= first <= end <= size - start:
      raise ValueError(f"from_safetensors: {os.fspath(path)} ends before the array {name!r}.")
    table, slash, key = name.rpartition("/")
    table, key = (table, key) if slash else (name, "parameters")
    if key in variables.setdefault(table, {}):
      raise ValueError(f"from_safetensors: {table!r} has {key!r} twice, as {name!r} too.")
    data = np.fromfile(path, np.uint8, end - first, offset=start + first)
    variables[table][key] = data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
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


def to_parquet(layer: SparseEmbed, path: str | os.PathLike[str], table: str) -> None:
  """Writes a table: columns `id`, `parameters` and its slots, a list of D floats or one value each.

  Raises:
    ValueError: for an unknown table.
  """
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError:
    raise ImportError("Parquet is written by pyarrow: pip install -e '.[importers]'.") from None

  variables = layer.variables
  if table not in variables:
    raise ValueError(f"to_parquet: there is no table {table!r}: {_names(variables)}.")
  arrays = {key: _array(x) for key, x in variables[table].items()}
  columns: dict[str, Any] = {"id": np.arange(len(arrays["parameters"]))}
  for key, array in arrays.items():
    columns[key] = array
    if array.ndim == 2:
      flat = pyarrow.array(array.ravel())
      columns[key] = pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
  pyarrow.parquet.write_table(pyarrow.table(columns), os.fspath(path))


def _array(x: Any) -> np.ndarray:
  """Converts a tensor or an array to NumPy; bfloat16, which NumPy does not have, to float32."""
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


# --- TPUEmbedding: configurations ----------------------------------------------------------------
# TensorFlow is not imported: objects of `tf.tpu.experimental.embedding`, and the parameter classes
# of `tf.compat.v1.tpu`, are recognized by the names of their classes and attributes.


class Imported(NamedTuple):
  """The result of `from_tpu_embedding`: the first two arguments of `SparseEmbed`.

  Attributes:
    features: TensorFlow's containers, holding `embed.FeatureConfig`.
    optimizer: an `embed.RowOptimizer`, or None.
  """

  features: Any
  optimizer: RowOptimizer | None


def from_tpu_embedding(
  feature_config: Any,
  optimizer: Any = None,
  *,
  replace: Mapping[str, Mapping[str, Any]] | None = None,
) -> Imported:
  """Converts the arguments of a TPUEmbedding to those of `SparseEmbed`.

  Shared tables stay shared; names and structure are kept. Options that TPUEmbeddingV2 ignores, such
  as clipping, take effect here. Initial values have the same distribution as in TensorFlow, which
  draws them per host, but are other numbers.

  Args:
    feature_config: any nesting of `tf.tpu.experimental.embedding.FeatureConfig`.
    optimizer: one of `tf.tpu.experimental.embedding`, such as `Adagrad`, or one of the
      `*Parameters` of `tf.compat.v1.tpu.experimental`. An `embed.RowOptimizer` is kept.
    replace: by the name of a TensorFlow table, arguments of `embed.TableConfig` that replace its
      own, for those without a counterpart here.

  Returns:
    An `embed.Imported`, for `embed.SparseEmbed(*imported, rngs=rngs)`.

  Raises:
    ValueError: naming the table and what to write instead, for objects without a counterpart
      (custom optimizers and combiners, quantization, initializers that are functions, learning
      rates without argument), and for unknown tables in `replace`.
  """
  replacements = dict(replace or {})
  tables: dict[int, config_lib.TableConfig] = {}
  names = set()

  def table_of(theirs: Any) -> config_lib.TableConfig:
    if id(theirs) not in tables:
      names.add(theirs.name)
      tables[id(theirs)] = _table(theirs, dict(replacements.get(theirs.name, {})))
    return tables[id(theirs)]

  features = _features(feature_config, table_of)
  unknown = sorted(set(replacements) - names)
  if unknown:
    raise ValueError(
      f"replace: there are no tables {unknown}; there are {sorted(map(str, names))}."
    )
  return Imported(features, _optimizer(optimizer, "the default optimizer", "pass optimizer="))


def _features(theirs: Any, table_of: Callable[[Any], config_lib.TableConfig]) -> Any:
  """Converts the features in TensorFlow's containers, some of which are wrappers."""
  convert = functools.partial(_features, table_of=table_of)
  if isinstance(theirs, Mapping):
    return {key: convert(value) for key, value in theirs.items()}
  if structure.is_namedtuple(theirs):
    return type(theirs)(*map(convert, theirs))
  if isinstance(theirs, (list, tuple)):
    return (tuple if isinstance(theirs, tuple) else list)(map(convert, theirs))
  if not hasattr(theirs, "table"):
    raise ValueError(
      "from_tpu_embedding takes any nesting of dicts, lists, tuples and named tuples of "
      f"tf.tpu.experimental.embedding.FeatureConfig. Got {theirs!r}."
    )
  shape = theirs.output_shape
  if shape is not None and hasattr(shape, "as_list"):
    shape = None if shape.rank is None else shape.as_list()
  return config_lib.FeatureConfig(
    table=table_of(theirs.table),
    max_sequence_length=theirs.max_sequence_length,
    validate_weights_and_indices=theirs.validate_weights_and_indices,
    output_shape=shape,
    name=theirs.name,
  )


def _table(theirs: Any, replacements: dict[str, Any]) -> config_lib.TableConfig:
  """Converts a table, except for the arguments that are replaced."""
  where, instead = f"table {theirs.name!r}", f"pass replace={{{theirs.name!r}: "
  if getattr(theirs, "quantization_config", None) is not None:
    raise ValueError(
      f"Rows of {where} are quantized. Round the rows of a sequence feature yourself, and set "
      "quantization_config to None before."
    )
  arguments = {
    "vocabulary_size": theirs.vocabulary_size,
    "dim": theirs.dim,
    "name": theirs.name,
    "combiner": theirs.combiner,
    "dtype": getattr(getattr(theirs, "dtype", None), "as_numpy_dtype", np.float32),
  }
  if "optimizer" not in replacements:
    change = instead + '{"optimizer": ...}} with '
    arguments["optimizer"] = _optimizer(theirs.optimizer, where, change)
  if "initializer" not in replacements:
    arguments["initializer"] = _initializer(theirs, where, instead)
  arguments |= replacements
  if arguments["combiner"] not in config_lib.COMBINERS:
    raise ValueError(
      f"The combiner of {where}, {arguments['combiner']!r}, has no counterpart: {instead}"
      f'{{"combiner": ...}}}} with one of {config_lib.COMBINERS}, or combine the '
      "rows of a sequence feature yourself."
    )
  return config_lib.TableConfig(**arguments)


_SCALED = {
  "VarianceScaling",
  *(f"{name}{kind}" for name in ("Glorot", "He", "Lecun") for kind in ("Uniform", "Normal")),
}


def _initializer(theirs: Any, where: str, instead: str) -> Callable[..., Any] | None:
  """Converts a table's initializer of TensorFlow or Keras; None is the same default as here.

  Draws single elements, so that rows can be drawn one by one. The fans of VarianceScaling are the
  rows and columns of the whole table.
  """
  rows, dim, initializer = theirs.vocabulary_size, theirs.dim, theirs.initializer
  kind = type(initializer).__name__
  if initializer is None:
    return None
  if kind == "TruncatedNormal":
    draw, mean, scale = "truncated_normal", initializer.mean, initializer.stddev
    if mean == 0 and math.isclose(scale, 1 / math.sqrt(dim)):
      return None
  elif kind == "RandomNormal":
    draw, mean, scale = "untruncated_normal", initializer.mean, initializer.stddev
  elif kind == "RandomUniform":
    low, high = initializer.minval, 1.0 if initializer.maxval is None else initializer.maxval
    draw, mean, scale = "uniform", (low + high) / 2, (high - low) / 2
  elif kind in ("Zeros", "Ones", "Constant"):
    value = {"Zeros": 0.0, "Ones": 1.0}.get(kind, getattr(initializer, "value", None))
    if not isinstance(value, numbers.Real):
      raise ValueError(
        f"The initializer of {where} is a constant array: load it with `load_tables`, and "
        f'{instead}{{"initializer": None}}}}.'
      )
    draw, mean, scale = "zeros", float(value), 0.0
  elif kind in _SCALED:
    fans = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}
    draw, mean = initializer.distribution, 0.0
    scale = math.sqrt(initializer.scale / max(1.0, fans[initializer.mode])) / _DEVIATIONS[draw]
  else:
    raise ValueError(
      f"The initializer of {where}, {initializer!r}, has no counterpart: {instead}"
      '{"initializer": f}} with f(key, shape, dtype) as in jax.nn.initializers.'
    )
  return initializers.row_wise(functools.partial(_draw, draw=draw, mean=mean, scale=scale))


# Standard deviations of draws of scale 1; a normal is cut at two of its own, as in TensorFlow.
_DEVIATIONS = {
  "uniform": 1 / math.sqrt(3),
  "untruncated_normal": 1.0,
  "truncated_normal": 0.87962566103423978,
}


def _draw(key, shape, dtype, *, draw, mean, scale):
  draws = {
    "uniform": lambda: jax.random.uniform(key, shape, dtype, -1.0, 1.0),
    "untruncated_normal": lambda: jax.random.normal(key, shape, dtype),
    "truncated_normal": lambda: jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype),
    "zeros": lambda: jax.numpy.zeros(shape, dtype),
  }
  return mean + scale * draws[draw]()


_ALIASES = {"StochasticGradientDescent": "SGD"}  # of V1, whose classes are named `*Parameters`
_NAMES_IN_V1 = {
  "initial_accumulator_value": "initial_accumulator",
  "beta_1": "beta1",
  "beta_2": "beta2",
}


def _optimizer(theirs: Any, where: str, instead: str) -> RowOptimizer | None:
  """Converts an optimizer to the registered one of the same name."""
  if theirs is None or isinstance(theirs, RowOptimizer):
    return theirs
  kind = type(theirs).__name__
  plain = kind.removesuffix("Parameters")
  by_class = {name.replace("_", ""): name for name in named()}
  name = by_class.get(_ALIASES.get(plain, plain).lower())
  # Keras has optimizers of the same names with other formulas, without this attribute.
  is_known = name is not None and hasattr(theirs, "use_gradient_accumulation")
  refusals = [
    (
      not is_known,
      "There is no counterpart",
      "embed.custom_optimizer(update, slots) and the same equation, embed.from_optax(tx), or one "
      "of embed's others",
    ),
    (
      not getattr(theirs, "use_gradient_accumulation", True),
      "It steps once for each occurrence of an id",
      f"embed.{name}(...), which sums a row's gradients and steps once",
    ),
    (
      not getattr(theirs, "lazy_adam", True),
      "It steps every row, looked up or not",
      "embed.adam(...), which steps rows that were looked up",
    ),
    (
      callable(getattr(theirs, "learning_rate", None)),
      "The learning rate is a function without arguments, which a compiled step would read once",
      f"embed.{name}(learning_rate=f), f being a schedule f(step) such as optax's",
    ),
    (
      getattr(theirs, "slot_variable_creation_fn", None) is not None,
      "slot_variable_creation_fn has no counterpart",
      f"embed.{name}(slot_init={{name: f(key, shape, dtype)}})",
    ),
    (
      bool(getattr(theirs, "initial_linear_value", 0)),
      "initial_linear_value is not 0",
      "embed.ftrl(slot_init={'linears': jax.nn.initializers.constant(...)})",
    ),
  ]
  for is_so, what, write in refusals:
    if is_so:
      raise ValueError(f"{what} of {where}, a {kind}: {instead}{write}.")
  make, arguments = OPTIMIZERS[str(name)], {}
  for argument in make().arguments:
    attribute = argument if hasattr(theirs, argument) else _NAMES_IN_V1.get(argument, argument)
    if hasattr(theirs, attribute):
      arguments[argument] = getattr(theirs, attribute)
  clip = tuple(getattr(theirs, f"clip_gradient_{end}", None) for end in ("min", "max"))
  if clip != (None, None):
    arguments["clipvalue"] = clip
  return make(**arguments)


# --- TPUEmbedding: tables and slots --------------------------------------------------------------


def import_variables(
  arrays: Mapping[str, Any],
  layer: SparseEmbed,
  *,
  partition_strategy: str = "div",
  shards: int | None = None,
  slots: bool = True,
) -> Variables:
  """Converts tables and slots of a TPUEmbedding to arrays for `layer.load_variables`.

  Args:
    arrays: the rows of each table, named `table` or `table/parameters`, and of its slots, named
      `table/slot`. Each is one array of all rows, or a list with the array of each shard.
    layer: the `SparseEmbed` to load; it determines tables, slots and shapes.
    partition_strategy: the rows of a shard. "div": consecutive rows, one more on each of the first
      `V % n` shards. "mod": row r is on shard `r % n`. Rows of padding are cut; TensorFlow adds
      them if there are fewer rows than shards, and with "mod" at the end of any shard.
    shards: None if the rows of a single array are in order; else the number of shards that are
      concatenated in it, without padding.
    slots: whether to convert slots. Slots of untrained tables are never converted.

  Returns:
    NumPy arrays, rows in order, by table name and then by "parameters" or the name of a slot.

  Raises:
    ValueError: naming each array that is missing, unknown, ambiguous or of another shape, and for
      an invalid argument.

  >>> config = embed.FeatureConfig(embed.TableConfig(3, 1, name="movie"))
  >>> layer = embed.SparseEmbed(config, embed.sgd(), rngs=nnx.Rngs(0))
  >>> halves = [np.array([[0.0], [2.0]]), np.array([[1.0]])]
  >>> variables = embed.import_variables({"movie": halves}, layer, partition_strategy="mod")
  >>> variables["movie"]["parameters"].tolist()
  [[0.0], [1.0], [2.0]]
  >>> layer.load_variables(variables)
  """
  is_strategy = partition_strategy in ("div", "mod")
  config_lib.check("partition_strategy", partition_strategy, is_strategy, "'div' or 'mod'")
  if shards is not None:
    shards = config_lib.integer("shards", shards, 1)
  wanted = {
    (table, key): struct
    for table, by_key in layer.variable_shapes.items()
    for key, struct in by_key.items()
    if slots or key == "parameters"
  }
  names, problems = _find(arrays, layer, list(wanted), slots)
  variables: Variables = {}
  for (table, key), name in names.items():
    try:
      rows = _in_order(arrays[name], wanted[table, key].shape, partition_strategy, shards)
      variables.setdefault(table, {})[key] = rows
    except ValueError as error:
      problems.append(f"{name!r} {error}")
  if problems:
    raise ValueError("These arrays do not fit the layer: " + "; ".join(problems[:10]) + ".")
  return variables


def _find(
  arrays: Mapping[str, Any], layer: SparseEmbed, variables: Sequence[tuple[str, str]], slots: bool
) -> tuple[dict[tuple[str, str], str], list[str]]:
  """Returns the name of the array of each (table, slot), and the problems with other names."""
  name_of, problems = {}, []
  unused = set(arrays)
  for table, key in variables:
    names = [f"{table}/{key}"] + [table] * (key == "parameters")
    present = [name for name in names if name in arrays]
    if not present:
      problems.append(f"{' or '.join(map(repr, names))} is missing")
    elif len(present) > 1:
      problems.append(f"{present[0]!r} and {present[1]!r} are the same table")
    else:
      name_of[table, key] = present[0]
    unused.difference_update(present)
  optimizers = layer.spec.optimizers
  for name in sorted(unused):
    table = name.rpartition("/")[0]
    if table not in optimizers:
      problems.append(f"{name!r} is not of a table of the layer, {sorted(optimizers)}")
    elif slots and (own := optimizers[table]) is not None and own.equation is not None:
      known = [key for t, key in variables if t == table and key != "parameters"]
      problems.append(f"{name!r} is not a slot of table {table!r}, whose slots are {known}")
  return name_of, problems


def _in_order(array: Any, shape: tuple[int, ...], strategy: str, shards: int | None) -> np.ndarray:
  """Returns all rows of a table or slot, in order."""
  size = shape[0]
  if is_list := isinstance(array, (list, tuple)):
    if not array:
      raise ValueError("has no shards")
    if shards not in (None, len(array)):
      raise ValueError(f"is a list of {len(array)} shards, and shards={shards} is given")
    shards = len(array)
  elif np.shape(array) != shape:
    raise ValueError(f"has shape {np.shape(array)}, the layer's has {shape}")
  if shards is None:
    return np.asarray(array)
  if strategy == "mod":
    rows_of = [np.arange(shard, size, shards) for shard in range(shards)]
  else:
    rows_of = np.array_split(np.arange(size), shards)
  ends = np.cumsum([len(rows) for rows in rows_of])
  parts = list(map(np.asarray, array)) if is_list else np.split(np.asarray(array), ends[:-1])
  may_have_padding = strategy == "mod" or shards > size
  result = np.empty(shape, parts[0].dtype)
  for shard, (rows, part) in enumerate(zip(rows_of, parts, strict=True)):
    extra = part.shape[0] - len(rows) if part.ndim == len(shape) else -1
    if part.shape[1:] != shape[1:] or extra < 0 or (extra and not may_have_padding):
      raise ValueError(
        f"has shape {part.shape} on shard {shard} of {shards}; with {strategy!r} it would be "
        f"{(len(rows), *shape[1:])}"
      )
    result[rows] = part[: len(rows)]
  return result
