"""Bags of ids, the common form of all inputs: built-in combiners, and dropping of invalid ids.

No other file reads `segments`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

UNUSED = np.iinfo(np.int32).max  # an id, or a row, that is in no table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bags:
  """The rows that are summed into each activation, and their gains.

  Either every bag has L positions, `[*batch, L]`, or bags have any length, with their ids
  concatenated, `[N]`; then `segments` holds the bag of each id.

  Attributes:
    ids: int32 `[*batch, L]` or `[N]`; any number that is not a row is padding. Rows of a table,
      until `with_ids` replaces them with local rows of a shard or with positions in a buffer.
    gains: factors of the rows, float32, of the shape of `ids`, or `[*batch, 1]`, one for each bag;
      None means 1. Before `normalized`, the user's weights.
    segments: int32 `[N]`, the flat index of each id's bag, `prod(batch)` for padding; or None.
    shape: the batch shape of ragged bags; None for other bags.
  """

  ids: jax.Array
  gains: jax.Array | None = None
  segments: jax.Array | None = None
  shape: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def batch(self) -> tuple[int, ...]:
    """The shape of the activations without their last dimension."""
    return self.ids.shape[:-1] if self.shape is None else self.shape

  @property
  def is_ragged(self) -> bool:
    """True for ragged bags, which can have any length."""
    return self.segments is not None

  def with_ids(self, ids: jax.Array) -> "Bags":
    return dataclasses.replace(self, ids=ids)

  def flat(self) -> "Bags":
    """Flattens the batch to one dimension: ids `[B, L]`; ragged bags stay as they are."""
    if self.is_ragged:
      return self
    bags = math.prod(self.batch)
    return jax.tree.map(lambda x: x.reshape(bags, x.shape[-1]), self)

  def padded(self, placement: Any) -> "Bags":
    """Pads the batch with empty bags to a multiple of the placement's number of devices."""
    if placement.devices == 1:
      return self
    if self.is_ragged:
      batch, *rest = self.batch  # the segment of padding may now be a bag, but adds nothing to it
      return dataclasses.replace(self, shape=(batch + -batch % placement.devices, *rest))
    gains = None if self.gains is None else placement.pad_batch(self.gains, 0)
    return Bags(placement.pad_batch(self.ids, UNUSED), gains)

  def normalized(self, combiner: str, vocabulary_size: int) -> "Bags":
    """Folds the combiner into the weights: an activation is then the sum of gain * row.

    "mean" divides by the sum of the weights, "sqrtn" by the square root of the sum of their
    squares. Where the divisor is 0, gains are 0. No gradient reaches the weights.
    """
    weights = None if self.gains is None else jax.lax.stop_gradient(self.gains)
    if combiner == "sum" or (weights is None and not self.is_ragged and self.ids.shape[-1] == 1):
      return dataclasses.replace(self, gains=weights)
    if weights is None:
      w = is_row(self.ids, vocabulary_size).astype(jnp.float32)
    else:
      w = scaled(weights, self._largest(jnp.abs(weights)))
    power = w if combiner == "mean" else w * w
    if self.segments is None:
      scale = inverse_norm(jnp.sum(power, axis=-1, keepdims=True), combiner)
      return dataclasses.replace(self, gains=scale if weights is None else w * scale)
    total = jnp.zeros(math.prod(self.batch), jnp.float32).at[self.segments].add(power, mode="drop")
    total = total.at[self.segments].get(mode="fill", fill_value=0)
    return dataclasses.replace(self, gains=w * inverse_norm(total, combiner))

  def _largest(self, sizes: jax.Array) -> jax.Array:
    """The largest of `sizes` in each id's bag."""
    if self.segments is None:
      return jnp.max(sizes, axis=-1, keepdims=True, initial=0)
    none = jnp.zeros(math.prod(self.batch), jnp.float32)
    largest = none.at[self.segments].max(sizes, mode="drop")
    return largest.at[self.segments].get(mode="fill", fill_value=0)

  def sum_segments(self, rows: jax.Array) -> jax.Array:
    """Sums each bag's rows, `[N, D]` to `[prod(batch), D]`; only for ragged bags."""
    sums = jnp.zeros((math.prod(self.batch), rows.shape[-1]), rows.dtype)
    return sums.at[self.segments].add(rows, mode="drop")

  def per_id(self, grads: jax.Array) -> jax.Array:
    """Gathers the gradient of each id's bag, `[*batch, D]` to `[N, D]`; only for ragged bags."""
    grads = grads.reshape(-1, grads.shape[-1])
    return grads.at[self.segments].get(mode="fill", fill_value=0)

  def part(self, start: jax.Array, batch: tuple[int, ...], padding: int) -> "Bags":
    """The `prod(batch)` consecutive ragged bags that start at the flat index `start`."""
    assert self.segments is not None
    count = math.prod(batch)
    segments = self.segments - start
    inside = (segments >= 0) & (segments < count)
    ids = jnp.where(inside, self.ids, padding)
    return Bags(ids, self.gains, jnp.where(inside, segments, count), batch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupRecord:
  """The lookups of one call in a stack: the unit of an exchange.

  Attributes:
    bags: the bags of each feature, with ids of its own table; `exchange.pad_to_devices` pads them.
    tables: the name of each feature's table.
    route: the `exchange.Route` of the features that have ids and are not ragged, or None.
  """

  bags: tuple[Bags, ...]
  tables: tuple[str, ...] = dataclasses.field(metadata={"static": True})
  route: Any = None

  @property
  def used(self) -> tuple[int, ...]:
    """The indices of the features whose bags have at least one entry, an id or padding."""
    return tuple(i for i, bags in enumerate(self.bags) if bags.ids.size)


def scaled(weights: jax.Array, largest: jax.Array) -> jax.Array:
  """Multiplies weights by a power of two, so that sums of their squares do not over- or underflow.

  The factor changes no bit of a normalized weight, and is 1 if `largest` is from 2**-48 to 2**48.
  Both products are computed before one is chosen: else XLA would move the square out of the sum.
  """
  up, down = weights * jnp.float32(2.0**96), weights * jnp.float32(2.0**-96)
  return jnp.where(largest < 2.0**-48, up, jnp.where(largest > 2.0**48, down, weights))


def inverse_norm(total: jax.Array, combiner: str) -> jax.Array:
  """Computes 1 / total, or 1 / sqrt(total) for "sqrtn"; 0 where `total` is 0."""
  # Guarded inside: with only an outer `where`, 1 / 0 would still turn gradients into NaN.
  safe = jnp.where(total == 0, 1, total)
  return jnp.where(total == 0, 0, 1 / (safe if combiner == "mean" else jnp.sqrt(safe)))


# --- from inputs ---------------------------------------------------------------------------------


def _static() -> Any:
  return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
  """The arrays of an input, and static facts about them.

  Attributes:
    ids: integers, `[*batch]` or `[*batch, 1]` (dense), `[*batch, L]` (padded) or `[N]` (others).
    weights: floats of the shape of `ids`, or None; always None for a dense input.
    layout: row splits `[batch + 1]`, indices `[N, rank]`, or None.
    kind: "dense", "padded", "ragged" or "sparse".
    batch: the batch shape of the bags, or the shape of a dense array without a trailing 1.
    length: the number of positions in a bag; 1 for a dense array, 0 if unknown (ragged).
  """

  ids: Any
  weights: Any
  layout: Any
  kind: str = _static()
  batch: tuple[int, ...] = _static()
  length: int = _static()


class Form(NamedTuple):
  """The form of a feature's activations: `shape` is their shape without the last dimension.

  A positive `length` keeps the first `length` ids of a bag separate, as a sequence; 0 combines ids.
  """

  shape: tuple[int, ...]
  length: int = 0


def is_row(ids: Any, size: Any) -> Any:
  """Marks the ids that are rows of a table of `size` rows."""
  return (ids >= 0) & (ids < size)


def narrow(ids: Any, size: int = UNUSED) -> Any:
  """Converts ids, row splits or indices of any integer dtype to int32, both in NumPy and in JAX.

  Negative numbers stay negative, and numbers of at least `size` stay at least `size`: none wraps
  around to another number.
  """
  if ids.dtype == np.int32:
    return ids
  limits = jnp.iinfo(ids.dtype)
  return ids.clip(max(limits.min, -1), min(limits.max, size)).astype(np.int32)


def _count(mask: jax.Array) -> jax.Array:
  return jnp.sum(mask, dtype=jnp.int32)


def from_input(parts: Parts, form: Form, size: int) -> tuple[Bags, jax.Array]:
  """Makes the bags of an input to a table of `size` rows; counts dropped ids, an int32 scalar.

  The gains of the bags are the user's weights, 0 at padding. Sequences have bags of one id,
  `[batch, length, 1]`.
  """
  ids = jnp.asarray(narrow(parts.ids, size))
  weights = None
  if parts.weights is not None and not form.length:
    weights = jnp.where(is_row(ids, size), jnp.asarray(parts.weights, jnp.float32), 0)
  if parts.kind == "dense":
    return Bags(ids.reshape(*form.shape, 1)), _count(ids >= size)
  if parts.kind == "padded":
    if form.length:
      pad = max(form.length - parts.length, 0)
      given = ids[:, : form.length]
      ids = jnp.pad(ids, ((0, 0), (0, pad)), constant_values=size)[:, : form.length, None]
      return Bags(ids), _count(given >= size)
    shape = (*form.shape, parts.length)
    weights = None if weights is None else weights.reshape(shape)
    return Bags(ids.reshape(shape), weights), _count(ids >= size)
  positions = _ragged_positions if parts.kind == "ragged" else _sparse_positions
  bag, column, inside, behind = positions(parts)
  given = (ids >= 0) & ~behind
  length = form.length or (parts.length if parts.kind == "ragged" else 0)
  if length:
    where = (jnp.where(inside, bag, math.prod(parts.batch)), column)
    kept, laid, weights = _lay_out(ids, weights, where, (math.prod(parts.batch), length), size)
    if form.length:  # ids past the end of a sequence do not count as dropped
      given &= ~(inside & (column >= length))
      return Bags(laid.reshape(*form.shape, 1)), _count(given) - kept
    laid = laid.reshape(*form.shape, length)
    weights = None if weights is None else weights.reshape(laid.shape)
    return Bags(laid, weights), _count(given) - kept
  valid = is_row(ids, size)
  dropped = _count(given & ~(inside & valid))
  segments = jnp.where(valid, bag, math.prod(form.shape))
  ids = jnp.where(inside, ids, size)
  weights = None if weights is None else jnp.where(inside, weights, 0)
  if 0 in form.shape:  # JAX cannot gather from an empty array
    weights = None if weights is None else weights[:0]
    return Bags(ids[:0], weights, segments[:0], form.shape), dropped
  return Bags(ids, weights, segments, form.shape), dropped


# For each of N flat values: the flat index of its bag, int32, or the number of bags if it is in
# none; its position in the bag, int32; whether it is in bounds; and whether it is padding after the
# last bag.
_Positions = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _ragged_positions(parts: Parts) -> _Positions:
  n, bags = parts.ids.shape[0], parts.batch[0]
  splits = jnp.asarray(narrow(parts.layout))
  index = jnp.arange(n, dtype=jnp.int32)
  behind = index >= splits[-1]
  # Counts the splits at or before each index, since empty bags repeat a split. Counts all of them,
  # including the first: see mesh.check_inputs.
  splits_at = jnp.zeros(n, jnp.int32).at[splits].add(1, mode="drop")
  bag = jnp.where(behind, bags, jnp.clip(jnp.cumsum(splits_at) - 1, 0, max(bags - 1, 0)))
  column = index - splits.at[bag].get(mode="clip")
  return bag, column, ~behind if bags else jnp.zeros(n, bool), behind


def _sparse_positions(parts: Parts) -> _Positions:
  # If a dense_shape exceeds int32, indices beyond int32 count as in bounds.
  shape = np.minimum((*parts.batch, parts.length), UNUSED).astype(np.int32)
  indices = jnp.asarray(narrow(parts.layout, UNUSED - 1))
  inside = jnp.all(is_row(indices, shape[None]), axis=1)
  strides = np.cumprod([1, *parts.batch[:0:-1]])[::-1].astype(np.int32)
  bag = jnp.where(inside, indices[:, :-1] @ strides, math.prod(parts.batch))
  return bag, indices[:, -1], inside, jnp.zeros(inside.shape, bool)


def _lay_out(ids, weights, where, shape: tuple[int, int], size: int):
  """Lays out ids and weights as `[bags, length]`; returns the number of ids that fit, and both."""
  bag, column = where
  bags, length = shape
  fits = is_row(ids, size) & (column < length) & (column >= 0)
  bag = jnp.where(fits, bag, bags)  # padding must not overwrite an id
  to = lambda fill, values: (
    jnp.full(shape, fill, values.dtype).at[bag, column].set(values, mode="drop")
  )
  laid = to(size, ids)
  return _count(is_row(laid, size)), laid, None if weights is None else to(0, weights)
