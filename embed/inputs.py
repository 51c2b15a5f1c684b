"""The kinds of input and their checks on the host.

Every input becomes `engine.bags.Bags`: int32 ids, of which those that are no row of the table are
padding. JAX reads `table[-1]` as the last row, so the engine checks ids by `engine.bags.is_row`, or
indexes with `wrap_negative_indices=False`.
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
from embed.engine import admission
from embed.engine.bags import Bags, Form, Parts, from_input, narrow
from embed.engine.xla import is_traced

Array = Any  # a NumPy or JAX array, or nested lists of numbers

_logger = logging.getLogger("embed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
  """Bags of ids along the last axis; negative ids are padding.

  The native form on an accelerator. Values are checked by a lookup or `embed.validate`, not when
  the object is made. `Padded`, `Ragged` and `Sparse` are pytrees.

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
    max_valency: the length of the longest possible bag. With it the ids are laid out as `Padded`;
      without it bags are combined by segments and may have any length.

  >>> bags = embed.Ragged(values=[3, 7, 5], row_splits=[0, 2, 2, 3])  # [3, 7], [] and [5]
  >>> embed.to_padded(bags).values.tolist()
  [[3, 7], [-1, -1], [5, -1]]
  """

  values: Array
  row_splits: Array
  max_valency: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse:
  """Bags as coordinates: `values[n]` is at `indices[n]` of an array of shape `dense_shape`.

  Args:
    indices: integers `[N, rank]`, rank at least 2; the last coordinate is the position in the bag.
    values: integers `[N]` (floats for weights); negative ids are padding.
    dense_shape: the shape of the array, static under jit.

  Raises:
    ValueError: if `dense_shape` is traced.

  >>> bags = embed.Sparse(indices=[[0, 0], [1, 2]], values=[3, 7], dense_shape=(2, 4))
  >>> embed.to_padded(bags).values.tolist()
  [[3, -1, -1, -1], [-1, -1, 7, -1]]
  """

  indices: Array
  values: Array
  dense_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  def __post_init__(self):
    if is_traced(self.dense_shape):
      raise ValueError("embed.Sparse: dense_shape must be static; give a tuple of Python ints.")
    object.__setattr__(self, "dense_shape", tuple(int(d) for d in self.dense_shape))


KINDS = (Padded, Ragged, Sparse)


def _kind(value: Any) -> str:
  return f"embed.{type(value).__name__}" if isinstance(value, KINDS) else "a dense array"


def _is_concrete(*values: Any) -> bool:
  away = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
  return not is_traced(values) and not any(map(away, jax.tree.leaves(values)))


def as_array(value: Any, name: str) -> Any:
  """Returns arrays as they are and lists as NumPy arrays; an empty list becomes int32."""
  if isinstance(value, np.ma.MaskedArray):
    raise ValueError(
      f"Feature {name!r}: the mask of a masked array would be lost. Write ids.filled(-1), which is "
      "padding, and weights.filled(0)."
    )
  if isinstance(value, (jax.Array, np.ndarray)):
    return value
  try:
    array = np.asarray(value)
  except ValueError:
    array = None
  except jax.errors.TracerArrayConversionError:
    raise ValueError(
      f"Feature {name!r}: a list of traced values. Write np.asarray(...) before it enters jit."
    ) from None
  if array is None:
    raise ValueError(
      f"Feature {name!r}: rows of different lengths. Write embed.to_padded(rows) on the host, or "
      "embed.Ragged(values, row_splits)."
    )
  if array.dtype == object:
    raise TypeError(
      f"Feature {name!r}: expected an array of integers, embed.Padded, embed.Ragged or "
      f"embed.Sparse, got {type(value).__name__}. A batch has the structure of the feature config."
    )
  if isinstance(value, (list, tuple)) and any(
    isinstance(row, (jax.Array, np.ndarray)) and row.ndim for row in value
  ):
    raise TypeError(
      f"Feature {name!r}: got a {type(value).__name__} of arrays for one feature. Write np.stack "
      "if they are one batch; a batch of several has the structure of the feature config."
    )
  return array.astype(np.int32) if array.size == 0 else array


def _integers(value: Any, name: str, what: str = "ids") -> Any:
  array = as_array(value, name)
  if not np.issubdtype(array.dtype, np.integer) or array.dtype.kind == "m":  # timedelta64 is one
    raise ValueError(
      f"Feature {name!r}: {what} must be integers, got dtype {array.dtype}. Convert them with "
      "`.astype('int32')`, or map them to 0 .. vocabulary_size - 1 first."
    )
  return array


def _row_ids(value: Any, name: str, feature: config_lib.FeatureConfig) -> Any:
  """Integers; int32 for a table whose raw ids must have been given rows."""
  array = _integers(value, name)
  if feature.table.vocabulary is not None and array.dtype != np.int32 and array.size:
    raise ValueError(
      f"Feature {name!r} holds raw ids ({array.dtype}), and its table has a DynamicVocabulary. "
      "Before the loss write `batch = model.embed.admit(batch)`; to evaluate or serve, `batch = "
      "model.embed.translate(batch)`."
    )
  return array


def _floats(value: Any, name: str) -> Any:
  array = as_array(value, name)
  if not (jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.integer)):
    raise ValueError(f"Feature {name!r}: weights must be floats, got dtype {array.dtype}.")
  return array


# --- checks --------------------------------------------------------------------------------------


def _take_apart(name: str, feature: config_lib.FeatureConfig, x: Any, w: Any) -> Parts:
  """The arrays of an input; checks types, dtypes and shapes, and reads no value."""
  kind = type(x) if isinstance(x, KINDS) else None
  if x is None:
    raise ValueError(f"Feature {name!r} is None. Leave it out of the dict, or give empty bags.")
  if w is not None and type(w) is not kind:
    if kind is None:
      raise ValueError(
        f"Weight specified for {name!r}, but input is dense. Give the ids as embed.Padded to "
        "weight them."
      )
    raise ValueError(
      f"Weight for {name!r} is {_kind(w)}, but its ids are {_kind(x)}. Give weights in the kind of "
      "their ids."
    )
  if kind is None:
    ids = _row_ids(x, name, feature)
    if not ids.ndim:
      raise ValueError(
        f"Feature {name!r}: a single id has no batch. Write an array such as [{x}]; under vmap, "
        "look up the whole batch outside."
      )
    batch = ids.shape[:-1] if ids.ndim > 1 and ids.shape[-1] == 1 else ids.shape
    return Parts(ids, None, None, "dense", batch, 1)
  ids = _row_ids(x.values, name, feature)
  weights = None if w is None else _floats(w.values, name)
  if weights is not None and weights.shape != ids.shape:
    raise ValueError(
      f"Feature {name!r}: weights have shape {weights.shape}, but the ids {ids.shape}. Give each "
      "id one weight; embed.to_padded makes both alike with the same max_valency."
    )
  if kind is Padded:
    if ids.ndim < 2:
      raise ValueError(
        f"Feature {name!r}: embed.Padded takes [batch, ..., L] ids, got shape {ids.shape}. Write "
        "a dense array for one id per example."
      )
    return Parts(ids, weights, None, "padded", ids.shape[:-1], ids.shape[-1])
  if ids.ndim != 1:
    raise ValueError(f"Feature {name!r}: {_kind(x)} takes flat values [N], got shape {ids.shape}.")
  if kind is Ragged:
    splits = _integers(x.row_splits, name, "row_splits")
    if splits.ndim != 1 or splits.shape[0] < 1:
      raise ValueError(
        f"Feature {name!r}: only rank 2 ragged input is supported, with row_splits [batch + 1]; "
        f"got row_splits of shape {splits.shape}."
      )
    most = x.max_valency
    is_integer = isinstance(most, (int, np.integer)) and not isinstance(most, bool)
    if most is not None and not (is_integer and most > 0):
      raise ValueError(
        f"Feature {name!r}: max_valency must be a positive integer or None. Got {most!r}."
      )
    return Parts(ids, weights, splits, "ragged", (splits.shape[0] - 1,), int(most or 0))
  rank = len(x.dense_shape)
  if rank < 2:
    raise ValueError(f"Feature {name!r}: only rank 2 and above is supported, got rank {rank}.")
  indices = _integers(x.indices, name, "indices")
  if indices.size == 0:
    indices = indices.reshape(-1, rank)
  if indices.shape != (*ids.shape, rank):
    raise ValueError(
      f"Feature {name!r}: for a dense_shape of rank {rank} and {ids.shape[0]} values, indices are "
      f"[N, {rank}] with N = {ids.shape[0]}. Got shape {indices.shape}."
    )
  return Parts(ids, weights, indices, "sparse", x.dense_shape[:-1], x.dense_shape[-1])


def _form(name: str, feature: config_lib.FeatureConfig, parts: Parts, weighted: bool) -> Form:
  """The shape of the activations, checked against `output_shape` by TensorFlow's rules."""
  batch, stated = parts.batch, feature.output_shape
  if stated is None:
    length = feature.max_sequence_length
    if not length:
      return Form(batch)
    if parts.kind == "dense":
      raise ValueError(
        f"Feature {name!r} is a sequence feature but a dense array was passed. Write "
        "embed.Padded(ids)."
      )
    if len(batch) != 1:
      _logger.info("feature %r: max_sequence_length is ignored for rank %d", name, len(batch) + 1)
      return Form(batch)
    if weighted:
      raise ValueError(
        f"Weight specified for {name!r}, but this is a sequence feature. Leave it out, and "
        "multiply the activations."
      )
    return Form((*batch, length), length)
  same = len(stated) == len(batch) and all(
    s in (None, 0) or s == b for s, b in zip(stated, batch, strict=True)
  )
  if same:
    return Form(batch)
  size, bags = math.prod(s or 0 for s in stated), math.prod(batch)
  if None not in stated and len(batch) == 1 and len(stated) > 1 and bags:
    shape = tuple(int(s or 0) for s in stated)
    if size == bags:
      return Form(shape)
    if parts.kind == "ragged" and size % bags == 0 and size:
      length = size // bags
      if weighted and shape[-1] == length:
        raise ValueError(
          f"Weight specified for {name!r}, but its output_shape {shape} makes a batch of {bags} "
          f"a sequence feature of length {length}."
        )
      return Form(shape, length)
  raise ValueError(
    f"Feature {name!r}: inconsistent shape. Its output_shape is {tuple(stated)}, but the input has "
    f"a batch of {tuple(batch)}."
  )


def check_row_splits(splits: np.ndarray, number: int, where: str = "") -> None:
  """Raises ValueError if row splits do not fit `number` values; `where` begins the message."""
  if splits[0] != 0 or (splits[1:] < splits[:-1]).any() or splits[-1] > number:
    raise ValueError(
      f"{where}row_splits must start at 0, never decrease and end at most at {number}, the number "
      f"of values. Got {splits.tolist()[:10]}."
    )


def check_indices(indices: np.ndarray, shape: tuple[int, ...], where: str) -> None:
  """Raises ValueError if an index of a `Sparse` is outside of its dense_shape."""
  bad = ((indices < 0) | (indices >= np.asarray(shape))).any(axis=1)
  if bad.any():
    raise ValueError(
      f"{where}index {indices[bad.argmax()].tolist()} is outside the dense_shape {shape}."
    )


def check_one_id_each(indices: np.ndarray, where: str) -> None:
  """Raises ValueError if two ids of a `Sparse` have the same index, for uses that allow one."""
  distinct, counts = np.unique(indices, axis=0, return_counts=True)
  if (counts > 1).any():
    index = distinct[counts.argmax()].tolist()
    raise ValueError(
      f"{where}{counts.max()} ids have the index {index}, which holds one. Give each id of a bag a "
      "column of its own."
    )


def _check_values(
  name: str, feature: config_lib.FeatureConfig, x: Any, parts: Parts, form: Form
) -> None:
  """Checks that read values, in NumPy."""
  splits = indices = None
  ids = np.asarray(parts.ids)
  if parts.kind == "ragged":
    check_row_splits(np.asarray(parts.layout), ids.shape[0], f"Feature {name!r}: ")
    splits = np.asarray(parts.layout, np.int64)
    lengths = np.diff(splits)
    if parts.length and not feature.max_sequence_length and lengths.max(initial=0) > parts.length:
      raise ValueError(
        f"Feature {name!r}: bag {int(lengths.argmax())} has {int(lengths.max())} ids, more than "
        f"max_valency={parts.length}. Raise max_valency, or cut the bag."
      )
    ids = ids[: splits[-1]]
  if parts.kind == "sparse":
    kept = ids >= 0  # padding has no index
    indices = np.asarray(parts.layout)[kept]
    check_indices(indices, x.dense_shape, f"Feature {name!r}: ")
    indices = indices.astype(np.int64)
    if form.length:  # ids beyond the table are dropped and occupy no position
      in_table = ids[kept] < feature.table.vocabulary_size
      check_one_id_each(indices[in_table], f"Feature {name!r}: ")
  if not feature.validate_weights_and_indices:
    return
  size = feature.table.vocabulary_size
  bad = ids > size - 1
  if bad.any():
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
      f"Feature {name!r}: id {int(ids[where])} at position {where} is out of range for a table of "
      f"vocabulary_size {size} ({int(bad.sum())} such ids). Ids are 0 .. {size - 1}, negative ids "
      "are padding. Raise vocabulary_size, or map ids into the range (hash, or one row for "
      "unknown ids)."
    )


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
  """The path, config, input and weights (or None) of each feature, in the order of the config."""
  inputs = list(structure.match(config, features, "features", none_allowed=False))
  weight_of = {path: w for path, _, w in structure.match(config, weights, "weights")}
  with_ids = {path for path, _, _ in inputs}
  for path, w in weight_of.items():
    if w is not None and path not in with_ids:
      raise ValueError(f"weights given for {structure.feature_name(path)!r}, which has no ids.")
  for path, feature, x in inputs:
    yield path, feature, x, weight_of.get(path)


def read(config: Any, features: Any, weights: Any = None) -> list[Input]:
  """The features of a batch in the order of the config. Values are checked if they are concrete.

  Raises:
    TypeError, ValueError: as `matched`, or if an input does not fit its feature.
  """
  return [
    check(path, structure.feature_name(path, feature), feature, x, w)
    for path, feature, x, w in matched(config, features, weights)
  ]


def check(
  path: structure.Path, name: str, feature: config_lib.FeatureConfig, x: Any, w: Any = None
) -> Input:
  """The input of one feature. Values are checked if they are concrete.

  Raises:
    ValueError: if the input does not fit the feature.
  """
  parts = _take_apart(name, feature, x, w)
  form = _form(name, feature, parts, weighted=w is not None)
  if _is_concrete(x):
    _check_values(name, feature, x, parts, form)
  divides = feature.table.combiner in ("mean", "sqrtn")
  if divides and w is not None and _is_concrete(w) and np.isinf(np.asarray(parts.weights)).any():
    raise ValueError(
      f"Feature {name!r}: a weight is infinite, and the combiner {feature.table.combiner!r} "
      "divides by the sum of the weights. Give finite weights."
    )
  if w is not None and parts.layout is not None and _is_concrete(x, w):
    layout = "row_splits" if parts.kind == "ragged" else "indices"
    of_weights, of_ids = np.asarray(getattr(w, layout)), np.asarray(parts.layout)
    same = of_weights.size == of_ids.size and (of_weights.reshape(of_ids.shape) == of_ids).all()
    if not same:
      raise ValueError(f"Feature {name!r}: the weights have other {layout} than the ids.")
  return Input(path, name, feature, parts, form)


def to_bags(
  inputs: Sequence[Input], combiner: str | None, arrays: Sequence[Parts]
) -> tuple[tuple[Bags, ...], jax.Array]:
  """Bags of some features, normalized by one combiner or each table's, and a count of dropped ids.

  Args:
    inputs: the features.
    combiner: in place of the tables' own, or None.
    arrays: the parts of each input, traced or not.
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
    ValueError: naming the feature and the value, for an id that is not in `0 ..
      vocabulary_size - 1` (negative ids are padding), ids that are not integers, weights on a
      dense or sequence feature, shapes that do not fit, or keys that are not in the config.
    TypeError: if the kind of a container differs from the config's.

  >>> movie = embed.TableConfig(vocabulary_size=10, dim=4)
  >>> embed.validate({"watched": embed.FeatureConfig(movie)}, {"watched": embed.Padded([[3, -1]])})
  >>> embed.validate({"watched": embed.FeatureConfig(movie)}, {"watched": np.array([3, 10])})
  Traceback (most recent call last):
  ValueError: Feature 'watched': id 10 at position (1,) is out of range for a table of ...
  """
  read(feature_config, with_stand_ins(feature_config, features), weights)


# --- raw ids -------------------------------------------------------------------------------------


_NO_ID = np.uint32(2**32 - 1)  # both halves of padding


def raw_ids(values: Any) -> Any:
  """Converts raw 64-bit ids to pairs of uint32, on the host: the form that devices have.

  JAX cuts 64-bit integers to their low halves, so convert a batch before it enters a jitted
  function. `SparseEmbed.admit` and `translate` do so themselves in eager calls.

  Two keys that are hashed to 64 bits are the same id with a probability of `n**2 / 2**65` for n
  keys: 3 in 100 million for a million of them, 1 in 37 for a billion.

  Args:
    values: the ids of one feature: a NumPy array or nested lists of integers, or `Padded`, `Ragged`
      or `Sparse` of them. -1, or 2**64 - 1 as unsigned, is padding.

  Returns:
    The same kind, with uint32 `[..., 2]`, high half first, in place of integers `[...]`.

  Raises:
    ValueError: for other negative integers (give signed hashes as `x.view(np.uint64)`), for values
      that are no integers, and for jax.Arrays.

  >>> embed.raw_ids(np.array([7, 2**40 + 3, -1])).tolist()
  [[0, 7], [256, 3], [4294967295, 4294967295]]
  """
  if isinstance(values, KINDS):
    return dataclasses.replace(values, values=raw_ids(values.values))
  if isinstance(values, jax.Array):
    raise ValueError(
      "raw_ids takes NumPy arrays: JAX has no 64-bit integers by default, and has cut these. Write "
      "embed.raw_ids(ids) where the batch is made."
    )
  array = as_array(values, "raw_ids")
  if array.dtype.kind not in "iu":
    raise ValueError(
      f"raw_ids takes integers, got dtype {array.dtype}. Hash strings by embed.transforms.RawIds."
    )
  if array.dtype.kind == "i" and array.size and array.min() < -1:
    raise ValueError(
      f"{int(array.min())} is neither a raw id nor padding (-1). Give signed 64-bit hashes as "
      "x.view(np.uint64)."
    )
  wide = array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array
  wide = wide.astype(np.uint64)
  return np.stack([wide >> np.uint64(32), wide & np.uint64(_NO_ID)], axis=-1).astype(np.uint32)


class RawInput(NamedTuple):
  """The raw ids of one feature, checked: uint32 `[..., 2]`, and an input of stand-ins for them.

  The stand-ins are int32, -1 for padding and else 0, in the kind of the input and of its shape.
  """

  ids: Any
  given: Any
  stand_in: Input

  def used(self) -> jax.Array:
    """The raw ids that a lookup reads, uint32 `[N, 2]`, and padding in place of all others.

    Those are behind the last bag of a `Ragged`, or behind the end of a sequence.
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
    """The input with int32 rows in place of raw ids."""
    rows = rows.reshape(self.ids.shape[:-1])
    return dataclasses.replace(self.given, values=rows) if isinstance(self.given, KINDS) else rows


def read_raw(path: structure.Path, feature: config_lib.FeatureConfig, x: Any) -> RawInput:
  """The raw ids of a feature of a dynamic table.

  Raises:
    ValueError: if they are no raw ids, or do not fit the feature.
  """
  name = structure.feature_name(path, feature)
  ids = x.values if isinstance(x, KINDS) else x
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
  given = dataclasses.replace(x, values=stand_ins) if isinstance(x, KINDS) else stand_ins
  return RawInput(ids, x, check(path, name, feature, given))


def with_stand_ins(config: Any, features: Any) -> Any:
  """A batch with rows in place of raw ids, for what only looks at shapes and at demand.

  A raw id stands for a row that follows from its hash; `jax.ShapeDtypeStruct` for one of int32.
  """

  def replaced(path, feature, x):
    vocabulary, ids = feature.table.vocabulary, x.values if isinstance(x, KINDS) else x
    if vocabulary is None or getattr(ids, "dtype", None) == np.int32:
      return x
    if isinstance(ids, jax.ShapeDtypeStruct):
      rows: Any = jax.ShapeDtypeStruct(ids.shape[:-1], np.int32)
    else:
      raw = read_raw(path, feature, x)
      high, low = (np.asarray(raw.ids)[..., half] for half in (0, 1))
      hashed = admission.mixed(jnp.asarray(high), jnp.asarray(low))[0]
      rows = np.asarray(admission.scaled_to(hashed, vocabulary.capacity))
      rows = np.where(np.asarray(raw.stand_in.parts.ids) < 0, -1, rows).astype(np.int32)
    return dataclasses.replace(x, values=rows) if isinstance(x, KINDS) else rows

  if all(f.table.vocabulary is None for _, f in structure.flatten_features(config)):
    return features
  flat = {path: replaced(path, f, x) for path, f, x, _ in matched(config, features)}
  return structure.pack(config, features, flat)


# --- bags of any form in a rectangle, in NumPy ----------------------------------------------------


def to_padded(
  bags: Ragged | Sparse | Iterable[Sequence[Any]],
  max_valency: int | None = None,
  *,
  truncate: bool = False,
) -> Padded:
  """Lays bags out as `Padded`, in NumPy, for input pipelines.

  Args:
    bags: a `Ragged`, a `Sparse` (the place in the bag is the column index), or a list of lists:
      int ids give int32 (int64 where they need it) padded with -1, floats give float32 padded
      with 0 (as weights).
    max_valency: L of the result; None takes the longest bag. A fixed one keeps shapes, and so the
      compiled step, the same from batch to batch.
    truncate: whether longer bags are cut to their first `max_valency` ids.

  Returns:
    `Padded` with values `[batch, L]` (for a `Sparse` of higher rank `[..., L]`).

  Raises:
    ValueError: if a bag is longer than `max_valency` and `truncate` is False, an id does not fit
      int64, or values are neither integers nor floats.

  >>> embed.to_padded([[3, 7], [5]]).values.tolist()
  [[3, 7], [5, -1]]
  >>> embed.to_padded([[0.5, 2.0], [1.0]], max_valency=3).values.tolist()  # weights
  [[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]
  """
  if isinstance(bags, Sparse):
    values, shape = _flat(np.asarray(as_array(bags.values, "to_padded"))), bags.dense_shape[:-1]
    indices = np.asarray(bags.indices, np.int64).reshape(-1, len(bags.dense_shape))
    if values.dtype.kind != "f":  # of weights, none is padding
      values, indices = values[values >= 0], indices[values >= 0]
    check_indices(indices, bags.dense_shape, "to_padded: ")
    check_one_id_each(indices, "to_padded: ")
    rows = np.ravel_multi_index(tuple(indices[:, :-1].T), shape) if len(values) else indices[:, 0]
    columns, longest = indices[:, -1], bags.dense_shape[-1]
  else:
    if isinstance(bags, Ragged):
      values, splits = np.asarray(as_array(bags.values, "to_padded")), np.asarray(bags.row_splits)
      check_row_splits(splits, len(values), "to_padded: ")
      values, splits = _flat(values[: splits[-1]]), splits.astype(np.int64)
      lengths = np.diff(splits)
    else:
      arrays = [np.asarray(bag) for bag in bags]
      lengths = np.array([len(a) for a in arrays], np.int64)
      full = [a for a in arrays if len(a)]
      if any(a.dtype == np.uint64 for a in full):  # NumPy makes floats of them beside int64
        full = list(map(_flat, full))
      values = _flat(np.concatenate(full)) if full else np.zeros(0, np.int32)
    shape = (len(lengths),)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    longest = int(lengths.max(initial=0))
  length = max(longest, 1) if max_valency is None else max_valency
  keep = columns < length
  if not truncate and not keep.all():
    raise ValueError(
      f"Bag {int(rows[~keep][0])} is longer than max_valency={length}. Raise max_valency, or pass "
      "truncate=True to cut it."
    )
  out = np.full((math.prod(shape), length), 0 if values.dtype.kind == "f" else -1, values.dtype)
  out[rows[keep], columns[keep]] = values[keep]
  return Padded(out.reshape(*shape, length))


def _flat(values: np.ndarray) -> np.ndarray:
  """Weights as float32, or ids as int32, int64 where one of them needs it."""
  if np.issubdtype(values.dtype, np.floating):
    return values.astype(np.float32)
  if not values.size:
    return values.astype(np.int32)
  if values.dtype.kind not in "iu":
    raise ValueError(f"to_padded takes integers or floats, got dtype {values.dtype}.")
  largest = int(values.max())
  if largest > np.iinfo(np.int64).max:
    raise ValueError(
      f"to_padded: id {largest} does not fit int64, and uint64 has no padding. Map ids to rows of "
      "a table first, as by a hash."
    )
  return narrow(values) if largest <= np.iinfo(np.int32).max else values.astype(np.int64)
