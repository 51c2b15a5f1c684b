"""The kinds of input and their checks on the host.

Every input becomes `engine.bags.Bags` of int32 ids; ids that are not rows of the table are padding.
JAX reads `table[-1]` as the last row, so the engine checks ids with `engine.bags.is_row` or indexes
with `wrap_negative_indices=False`.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from embed import config as config_lib
from embed import structure
from embed.engine.bags import Bags, Form, Parts, from_input, narrow
from embed.engine.xla import is_traced

Array = Any  # a NumPy or JAX array, or nested lists of numbers

_logger = logging.getLogger("embed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
  """Bags of ids along the last axis; negative ids are padding. The native form on an accelerator.

  Values are checked by a lookup or `embed.validate`, not when the object is made. `Padded`,
  `Ragged` and `Sparse` are pytrees.

  Args:
    values: integers `[batch, ..., L]`, a NumPy or JAX array or nested lists; for weights, floats of
      the same shape. Ids of 64 bits are checked on the host and become int32.

  >>> movie = embed.TableConfig(100, 4, combiner="sum", name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  >>> layer(embed.Padded([[3, 7], [5, -1]])).shape
  (2, 4)
  >>> layer(embed.Padded([[3, 7]]), embed.Padded([[0.5, 2.0]])).shape  # weighted
  (1, 4)
  """

  values: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ragged:
  """Bags of any length, one after another: bag `i` is `values[row_splits[i]:row_splits[i + 1]]`.

  Args:
    values: integers `[N]` (floats for weights). Values from `row_splits[-1]` on are padding, so
      that N can be a fixed buffer size.
    row_splits: integers `[batch + 1]` from 0, never decreasing.
    max_valency: the length of the longest possible bag. With it, ids are laid out as in `Padded`;
      without it, bags are combined by segments and may have any length.

  >>> bags = embed.Ragged(values=[3, 7, 5], row_splits=[0, 2, 2, 3])  # [3, 7], [] and [5]
  >>> embed.to_padded(bags).values.tolist()
  [[3, 7], [-1, -1], [5, -1]]
  """

  values: Array
  row_splits: Array
  max_valency: int | None = dataclasses.field(default=None, metadata={"static": True})

  def __post_init__(self):
    if self.max_valency is not None:
      most = config_lib.integer("max_valency", self.max_valency, 1)
      object.__setattr__(self, "max_valency", most)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse:
  """Bags as coordinates: `values[n]` is at `indices[n]` of an array of shape `dense_shape`.

  Args:
    indices: integers `[N, rank]`, rank at least 2; the last coordinate is the position in the bag.
    values: integers `[N]` (floats for weights); negative ids are padding.
    dense_shape: the shape of the array, static under jit.

  >>> bags = embed.Sparse(indices=[[0, 0], [1, 2]], values=[3, 7], dense_shape=(2, 4))  # [3], [7]
  """

  indices: Array
  values: Array
  dense_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  def __post_init__(self):
    if is_traced(self.dense_shape):
      raise ValueError("embed.Sparse: dense_shape must be static; give a tuple of Python ints.")
    object.__setattr__(self, "dense_shape", tuple(int(d) for d in self.dense_shape))


KINDS = (Padded, Ragged, Sparse)


def _values(x: Any) -> Any:
  return x.values if isinstance(x, KINDS) else x


def _with_values(x: Any, values: Any) -> Any:
  return dataclasses.replace(x, values=values) if isinstance(x, KINDS) else values


def _kind(value: Any) -> str:
  return f"embed.{type(value).__name__}" if isinstance(value, KINDS) else "a dense array"


# --- checks --------------------------------------------------------------------------------------
# `where` begins an error message, such as "Feature 'user': ".


def _require(where: str, *checks: tuple[Any, str]) -> None:
  """Raises ValueError with the text of the first check `(is_valid, text)` that fails."""
  for is_valid, text in checks:
    if not is_valid:
      raise ValueError(where + text)


def _is_concrete(*values: Any) -> bool:
  away = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
  return not is_traced(values) and not any(map(away, jax.tree.leaves(values)))


def _as_array(value: Any, where: str) -> Any:
  """Returns arrays as they are and lists as NumPy arrays; an empty list becomes int32."""
  if isinstance(value, np.ma.MaskedArray):
    raise ValueError(f"{where}a mask would be lost. Write ids.filled(-1), and weights.filled(0).")
  if isinstance(value, (jax.Array, np.ndarray)):
    return value
  is_array = lambda x: isinstance(x, (jax.Array, np.ndarray)) and x.ndim > 0
  has_arrays = isinstance(value, (list, tuple)) and any(map(is_array, value))
  try:
    array = np.asarray(value)
  except (ValueError, TypeError):  # lists of different lengths, or of traced values
    array = None
  if array is None or array.dtype == object or has_arrays:
    raise TypeError(
      f"{where}expected an array, or nested lists, of integers that fit 64 bits, or embed.Padded, "
      f"embed.Ragged or embed.Sparse of them. Got {type(value).__name__} {value!r:.60}. Write "
      "embed.to_padded(bags) for bags of different lengths, and np.stack(arrays) for arrays of one "
      "feature; a batch of several features has the structure of the feature config."
    )
  return array.astype(np.int32) if array.size == 0 else array


def _integers(value: Any, where: str, what: str = "ids") -> Any:
  array = _as_array(value, where)
  is_integer = np.issubdtype(array.dtype, np.integer) and array.dtype.kind != "m"  # no timedelta64
  text = f"{what} must be integers. Got dtype {array.dtype}; write .astype('int32')."
  _require(where, (is_integer, text))
  return array


def _row_ids(value: Any, where: str, feature: config_lib.FeatureConfig) -> Any:
  """Returns integer ids; for a table with a `DynamicVocabulary`, int32 rows instead of raw ids."""
  array = _integers(value, where)
  is_row = feature.table.vocabulary is None or array.dtype == np.int32 or not array.size
  text = (
    f"raw ids ({array.dtype}) of a table with a DynamicVocabulary. Before the loss write `ids = "
    "model.embed.admit(ids)`; to evaluate or serve, `ids = model.embed.translate(ids)`."
  )
  _require(where, (is_row, text))
  return array


def _take_apart(where: str, feature: config_lib.FeatureConfig, x: Any, w: Any) -> Parts:
  """Returns the arrays of an input; checks types, dtypes and shapes without reading values."""
  is_weighted, is_bags = w is not None, isinstance(x, KINDS)
  _require(
    where,
    (x is not None, "None has no ids. Leave the feature out of the dict, or give empty bags."),
    (
      not is_weighted or (is_bags and type(w) is type(x)),
      "weights are given in the kind of their ids, embed.Padded, embed.Ragged or embed.Sparse. Got "
      f"{_kind(w)} for {_kind(x)}.",
    ),
  )
  ids = _row_ids(_values(x), where, feature)
  if not is_bags:
    _require(where, (ids.ndim, "expected an array of ids, such as [3]. Got a single id."))
    batch = ids.shape[:-1] if ids.ndim > 1 and ids.shape[-1] == 1 else ids.shape
    return Parts(ids, None, None, "dense", batch, 1)
  weights = _as_array(w.values, where) if is_weighted else None
  if weights is not None:
    is_number = jnp.issubdtype(weights.dtype, jnp.floating) or weights.dtype.kind in "iu"
    text = f"weights must be floats {ids.shape}, like the ids. Got {weights.dtype} {weights.shape}."
    _require(where, (is_number and weights.shape == ids.shape, text))
  if isinstance(x, Padded):
    _require(where, (ids.ndim > 1, f"embed.Padded takes [batch, ..., L]. Got shape {ids.shape}."))
    return Parts(ids, weights, None, "padded", ids.shape[:-1], ids.shape[-1])
  _require(where, (ids.ndim == 1, f"{_kind(x)} takes flat values [N]. Got shape {ids.shape}."))
  if isinstance(x, Ragged):
    splits = _integers(x.row_splits, where, "row_splits")
    text = f"row_splits are [batch + 1], for bags of rank 2. Got shape {splits.shape}."
    _require(where, (splits.ndim == 1 and splits.size, text))
    return Parts(ids, weights, splits, "ragged", (splits.shape[0] - 1,), x.max_valency or 0)
  rank = len(x.dense_shape)
  _require(where, (rank > 1, f"dense_shape has 2 dimensions or more. Got {x.dense_shape}."))
  indices = _integers(x.indices, where, "indices")
  indices = indices if indices.size else indices.reshape(-1, rank)
  text = f"indices must be [N, {rank}] with N = {ids.shape[0]}. Got shape {indices.shape}."
  _require(where, (indices.shape == (*ids.shape, rank), text))
  return Parts(ids, weights, indices, "sparse", x.dense_shape[:-1], x.dense_shape[-1])


def _form(where: str, feature: config_lib.FeatureConfig, parts: Parts) -> Form:
  """Returns the shape of the activations, checked against `output_shape` by TensorFlow's rules."""
  batch, stated, length = parts.batch, feature.output_shape, feature.max_sequence_length
  advice = "weights of a sequence feature. Leave them out, and multiply the activations."
  not_weighted = parts.weights is None, advice
  if stated is None:
    _require(where, (not length or parts.kind != "dense", "a sequence takes embed.Padded(ids)."))
    if not length or len(batch) != 1:
      if length:
        _logger.info("%smax_sequence_length is ignored for rank %d", where, len(batch) + 1)
      return Form(batch)
    _require(where, not_weighted)
    return Form((*batch, length), length)
  if len(stated) == len(batch) and all(
    s in (None, 0) or s == b for s, b in zip(stated, batch, strict=True)
  ):
    return Form(batch)
  shape = tuple(size or 0 for size in stated)
  is_reshaped = len(batch) == 1 and len(shape) > 1 and None not in stated
  if is_reshaped and math.prod(shape) == batch[0] > 0:
    return Form(shape)
  raise ValueError(
    f"{where}inconsistent shape. The output_shape is {tuple(stated)}, but the input has a batch of "
    f"{tuple(batch)}."
  )


def _check_row_splits(splits: np.ndarray, number: int, where: str) -> None:
  if splits[0] != 0 or (splits[1:] < splits[:-1]).any() or splits[-1] > number:
    raise ValueError(
      f"{where}row_splits must start at 0, never decrease and end at most at {number}, the number "
      f"of values. Got {splits[:10].tolist()}."
    )


def _check_indices(indices: np.ndarray, shape: tuple[int, ...], where: str) -> None:
  bad = ((indices < 0) | (indices >= np.asarray(shape))).any(axis=1)
  if bad.any():
    index = indices[bad.argmax()].tolist()
    raise ValueError(f"{where}index {index} is outside the dense_shape {shape}.")


def _check_one_id_each(indices: np.ndarray, where: str) -> None:
  distinct, counts = np.unique(indices, axis=0, return_counts=True)
  if (counts > 1).any():
    index = distinct[counts.argmax()].tolist()
    raise ValueError(
      f"{where}{counts.max()} ids have the index {index}, which holds one. Give each id of a bag a "
      "column of its own."
    )


def _check_values(
  where: str, feature: config_lib.FeatureConfig, x: Any, parts: Parts, form: Form
) -> None:
  """Runs the checks that read values, in NumPy."""
  ids, size = np.asarray(parts.ids), feature.table.vocabulary_size
  if parts.kind == "ragged":
    _check_row_splits(np.asarray(parts.layout), ids.shape[0], where)
    splits = np.asarray(parts.layout, np.int64)
    lengths = np.diff(splits)
    if parts.length and not feature.max_sequence_length and lengths.max(initial=0) > parts.length:
      raise ValueError(
        f"{where}bag {int(lengths.argmax())} has {int(lengths.max())} ids, more than "
        f"max_valency={parts.length}. Raise max_valency, or cut the bag."
      )
    ids = ids[: splits[-1]]
  if parts.kind == "sparse":
    kept = ids >= 0  # padding may have any index
    indices = np.asarray(parts.layout)[kept]
    _check_indices(indices, x.dense_shape, where)
    if form.length:  # ids beyond the table are dropped and occupy no position
      _check_one_id_each(indices[ids[kept] < size].astype(np.int64), where)
  bad = ids > size - 1
  if feature.validate_weights_and_indices and bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
      f"{where}id {int(ids[at])} at position {at} is out of range for a table of vocabulary_size "
      f"{size} ({int(bad.sum())} such ids). Ids are 0 .. {size - 1}, negative ids are padding. "
      "Raise vocabulary_size, or map ids into the range."
    )


def _check_weights(where: str, combiner: str, x: Any, w: Any, parts: Parts) -> None:
  """Checks that weights are laid out as their ids, and are finite where the combiner divides."""
  divides = combiner in ("mean", "sqrtn")
  if divides and _is_concrete(w) and np.isinf(np.asarray(parts.weights)).any():
    raise ValueError(f"{where}infinite weights. The combiner {combiner!r} divides by their sum.")
  if parts.layout is not None and _is_concrete(x, w):
    layout = "row_splits" if parts.kind == "ragged" else "indices"
    theirs, own = np.asarray(getattr(w, layout)), np.asarray(parts.layout)
    is_same = theirs.size == own.size and (theirs.reshape(own.shape) == own).all()
    _require(where, (is_same, f"the weights have different {layout} from the ids."))


class Input(NamedTuple):
  """One feature of a batch, checked."""

  path: structure.Path
  name: str
  feature: config_lib.FeatureConfig
  parts: Parts
  form: Form


def matched(
  config: Any, features: Any, weights: Any = None
) -> Iterator[tuple[structure.Path, config_lib.FeatureConfig, Any, Any]]:
  """Yields path, config, input and weights (or None) of each feature, in the config's order."""
  inputs = list(structure.match(config, features, "features", none_allowed=False))
  weight_of = {path: w for path, _, w in structure.match(config, weights, "weights")}
  with_ids = {path for path, _, _ in inputs}
  for path, w in weight_of.items():
    if w is not None and path not in with_ids:
      raise ValueError(f"weights given for {structure.feature_name(path)!r}, which has no ids.")
  for path, feature, x in inputs:
    yield path, feature, x, weight_of.get(path)


def read(config: Any, features: Any, weights: Any = None) -> list[Input]:
  """Returns the checked features of a batch in the order of the config."""
  return [
    check(path, structure.feature_name(path, feature), feature, x, w)
    for path, feature, x, w in matched(config, features, weights)
  ]


def check(
  path: structure.Path, name: str, feature: config_lib.FeatureConfig, x: Any, w: Any = None
) -> Input:
  """Returns the checked input of one feature; values are checked if they are concrete."""
  where = f"Feature {name!r}: "
  parts = _take_apart(where, feature, x, w)
  form = _form(where, feature, parts)
  if _is_concrete(x):
    _check_values(where, feature, x, parts, form)
  if w is not None:
    _check_weights(where, feature.table.combiner, x, w, parts)
  return Input(path, name, feature, parts, form)


def to_bags(
  inputs: Sequence[Input], combiner: str | None, arrays: Sequence[Parts]
) -> tuple[tuple[Bags, ...], jax.Array]:
  """Returns the bags of `inputs`, with ids from `arrays`, and the number of dropped ids.

  Bags are normalized by `combiner`, or by each table's own combiner if it is None.
  """
  bags, dropped = [], []
  for x, parts in zip(inputs, arrays, strict=True):
    table = x.feature.table
    bag, lost = from_input(parts, x.form, table.vocabulary_size)
    bags.append(bag.normalized(combiner or table.combiner, table.vocabulary_size))
    dropped.append(lost)
  return tuple(bags), functools.reduce(jnp.add, dropped)


def validate(feature_config: Any, features: Any, weights: Any = None) -> None:
  """Checks a batch on the host, in NumPy, for input pipelines.

  Args:
    feature_config: a `FeatureConfig` or any nesting of them.
    features: the batch, in the same structure (a dict may hold a subset).
    weights: weights in the same structure, or None; entries may be None.

  Raises:
    ValueError, TypeError: naming the feature and the value, for an id that is not in `0 ..
      vocabulary_size - 1` (negative ids are padding), or an input that does not fit the config.

  >>> movie = embed.TableConfig(vocabulary_size=10, dim=4)
  >>> embed.validate({"watched": embed.FeatureConfig(movie)}, {"watched": np.array([3, 10])})
  Traceback (most recent call last):
  ValueError: Feature 'watched': id 10 at position (1,) is out of range for a table of ...
  """
  read(feature_config, with_stand_ins(feature_config, features), weights)


# --- raw ids -------------------------------------------------------------------------------------


_NO_ID = np.uint32(2**32 - 1)  # both halves of padding


def raw_ids(values: Any) -> Any:
  """Converts raw 64-bit ids to pairs of uint32, on the host: the form that devices take.

  JAX truncates 64-bit integers to their low halves, so convert a batch before it enters a jitted
  function. In eager calls, `SparseEmbed.admit` and `translate` convert it themselves.

  Args:
    values: the ids of one feature: a NumPy array or nested lists of integers, or `Padded`, `Ragged`
      or `Sparse` of them. -1, or 2**64 - 1 as unsigned, is padding.

  Returns:
    The same kind, with uint32 `[..., 2]`, high half first, in place of integers `[...]`.

  Raises:
    ValueError: for other negative integers (give signed hashes as `x.view(np.uint64)`), for values
      that are not integers, and for JAX arrays.

  >>> embed.raw_ids(np.array([7, 2**40 + 3, -1])).tolist()
  [[0, 7], [256, 3], [4294967295, 4294967295]]
  """
  if isinstance(values, KINDS):
    return _with_values(values, raw_ids(values.values))
  if isinstance(values, jax.Array):
    raise ValueError(
      "raw_ids takes NumPy arrays, and JAX has cut these to 32 bits. Write embed.raw_ids(ids) "
      "where the batch is made."
    )
  array = _as_array(values, "raw_ids: ")
  is_signed = array.dtype.kind == "i"
  _require(
    "raw_ids takes ",
    (
      array.dtype.kind in "iu",
      f"integers. Got dtype {array.dtype}; hash strings by embed.transforms.RawIds.",
    ),
    (
      not is_signed or array.min(initial=0) >= -1,
      f"ids of 0 and more, and -1 for padding. Got {array.min(initial=0)}; give signed 64-bit "
      "hashes as x.view(np.uint64).",
    ),
  )
  wide = array.astype(np.int64 if is_signed else np.uint64).view(np.uint64)
  return np.stack([wide >> np.uint64(32), wide & np.uint64(_NO_ID)], axis=-1).astype(np.uint32)


class RawInput(NamedTuple):
  """The raw ids of one feature, checked: uint32 `[..., 2]`, and an input of stand-ins for them.

  The stand-ins are int32, -1 for padding and 0 otherwise, with the kind and shape of the input.
  """

  ids: Any
  given: Any
  stand_in: Input

  def used(self) -> jax.Array:
    """Returns the raw ids `[N, 2]`, with padding in place of ids that a lookup does not read.

    Examples are ids after the last bag of a `Ragged`, or past the end of a sequence.
    """
    ids, (parts, form) = jnp.asarray(self.ids).reshape(-1, 2), self.stand_in[3:]
    if parts.kind in ("dense", "padded") and not form.length:
      return ids
    n = ids.shape[0]
    position = jnp.arange(n, dtype=jnp.int32).reshape(parts.ids.shape)
    position = jnp.where(jnp.asarray(parts.ids) < 0, -1, position)
    bags, _ = from_input(dataclasses.replace(parts, ids=position), form, n)
    is_read = jnp.zeros(n, bool).at[bags.ids.reshape(-1)].set(True, mode="drop")
    return jnp.where(is_read[:, None], ids, _NO_ID)

  def with_rows(self, rows: Any) -> Any:
    """Returns the input with int32 rows in place of raw ids."""
    return _with_values(self.given, rows.reshape(self.ids.shape[:-1]))


def read_raw(path: structure.Path, feature: config_lib.FeatureConfig, x: Any) -> RawInput:
  """Returns the checked raw ids of a feature of a dynamic table."""
  name = structure.feature_name(path, feature)
  ids = _values(x)
  if not isinstance(ids, jax.Array) and getattr(ids, "dtype", None) != np.uint32:
    try:
      ids = raw_ids(ids)
    except ValueError as error:
      raise ValueError(f"Feature {name!r}: {error}") from None
  least = 3 if isinstance(x, Padded) else 2
  if ids.dtype != np.uint32 or ids.ndim < least or ids.shape[-1] != 2:
    raise ValueError(
      f"Feature {name!r}: raw ids are uint32 pairs [..., 2] on a device, got {ids.dtype} "
      f"{list(ids.shape)}. Write embed.raw_ids(ids) on the host, before the batch enters a jitted "
      "function: JAX has cut 64-bit ids to their low halves."
    )
  is_padding = (ids[..., 0] == _NO_ID) & (ids[..., 1] == _NO_ID)
  stand_ins = -is_padding.astype(np.int32)
  return RawInput(ids, x, check(path, name, feature, _with_values(x, stand_ins)))


def with_stand_ins(config: Any, features: Any) -> Any:
  """Returns a batch with int32 stand-ins for raw ids: -1 for padding, and 0 otherwise."""

  def replaced(feature, path, x):
    ids = _values(x)
    if feature.table.vocabulary is None or getattr(ids, "dtype", None) == np.int32:
      return x
    if isinstance(ids, jax.ShapeDtypeStruct):
      return _with_values(x, jax.ShapeDtypeStruct(ids.shape[:-1], np.int32))
    raw = read_raw(path, feature, x)
    return raw.with_rows(raw.stand_in.parts.ids)

  if all(feature.table.vocabulary is None for _, feature in structure.flatten_features(config)):
    return features
  flat = {path: replaced(feature, path, x) for path, feature, x, _ in matched(config, features)}
  return structure.pack(config, features, flat)


# --- bags of any form in a rectangle, in NumPy ----------------------------------------------------


def to_padded(
  bags: Ragged | Iterable[Sequence[Any]],
  max_valency: int | None = None,
  *,
  truncate: bool = False,
) -> Padded:
  """Lays bags out as `Padded`, in NumPy, for input pipelines.

  Args:
    bags: a `Ragged`, or a list of lists: int ids give int32 (int64 where needed) padded with -1,
      and floats give float32 padded with 0 (as weights).
    max_valency: L of the result; None takes the longest bag. A fixed L keeps shapes, and so the
      compiled step, the same from batch to batch.
    truncate: whether longer bags are cut to their first `max_valency` ids; otherwise they raise.

  Returns:
    `Padded` with values `[batch, L]`.

  >>> embed.to_padded([[3, 7], [5]]).values.tolist()
  [[3, 7], [5, -1]]
  >>> embed.to_padded([[0.5, 2.0], [1.0]], max_valency=3).values.tolist()  # weights
  [[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]
  """
  if isinstance(bags, Ragged):
    values = np.asarray(_as_array(bags.values, "to_padded: "))
    splits = np.asarray(bags.row_splits)
    _check_row_splits(splits, len(values), "to_padded: ")
    values, splits = _flat(values[: splits[-1]]), splits.astype(np.int64)
    lengths = splits[1:] - splits[:-1]
  else:
    values, lengths = _joined(bags)
  rows = np.repeat(np.arange(len(lengths)), lengths)
  columns = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
  length = int(lengths.max(initial=1))
  if max_valency is not None:
    length = config_lib.integer("max_valency", max_valency, 1)
  keep = columns < length
  if not truncate and not keep.all():
    raise ValueError(
      f"Bag {int(rows[~keep][0])} is longer than max_valency={length}. Raise max_valency, or pass "
      "truncate=True to cut it."
    )
  out = np.full((len(lengths), length), 0 if values.dtype.kind == "f" else -1, values.dtype)
  out[rows[keep], columns[keep]] = values[keep]
  return Padded(out)


def _joined(bags: Iterable[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values `[N]` of a list of bags, and their lengths."""
  arrays = [np.asarray(bag) for bag in bags]
  for array in arrays:
    if array.ndim != 1:
      raise ValueError(
        f"to_padded takes a list of bags, such as [[3, 7], [5]]. Got {array.tolist()!r:.60} for a "
        "bag."
      )
  full = [array for array in arrays if len(array)]
  if any(array.dtype == np.uint64 for array in full):  # NumPy promotes them to floats beside int64
    full = list(map(_flat, full))
  values = _flat(np.concatenate(full)) if full else np.zeros(0, np.int32)
  return values, np.array([len(array) for array in arrays], np.int64)


def _flat(values: np.ndarray) -> np.ndarray:
  """Converts weights to float32, and ids to int32, or to int64 where one of them needs it."""
  if np.issubdtype(values.dtype, np.floating):
    return values.astype(np.float32)
  if not values.size:
    return values.astype(np.int32)
  largest = values.max() if values.dtype.kind in "iu" else None
  if largest is None or largest > np.iinfo(np.int64).max:
    text = f"dtype {values.dtype}" if largest is None else f"{largest}"
    raise ValueError(
      f"to_padded takes floats, or integers that fit int64. Got {text}; map ids to rows of a table "
      "first, as by a hash."
    )
  return narrow(values) if largest <= np.iinfo(np.int32).max else values.astype(np.int64)
