"""Which shard stores the row of each id, and in which round it is exchanged. Per device.

N ids, S shards, C rows for a pair of devices in a round. The distinct ids of a device are sorted by
shard. In a round a device requests up to C rows of every shard. Where more are needed, further
rounds follow: in each one a shard is asked for a range of its rows, the same range by every device,
so that all gradients of a row meet in one round and an optimizer steps every row once. The exchange
always finishes, whatever the ids and the capacity.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from embed.engine.bags import UNUSED
from embed.engine.layout import Layout
from embed.engine.mesh import Placement
from embed.engine.row_sums import distinct_by_sort

NO_KEY = np.uint32(2**32 - 1)  # sorts behind every key
_ODD = np.uint32(0x9E3779B1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
  """How one call's ids map to the shards that store their rows (per device).

  Attributes:
    sorted_keys: uint32 `[N]`, the sort keys of the distinct ids, then `NO_KEY`.
    shard_offsets: int32 `[S + 1]`, where the keys of each shard begin.
    key_positions: int32 `[m, L]` of each feature with positions and ids, of all devices that hold
      other columns of the same rows: where an id's key is, N for padding.
    requested_rows: int32 `[S, C]`, the local rows that each device requested of this one in the
      first round.
    max_rows_per_pair: int32 `[1]`, the most keys of any pair of devices, the same everywhere.
  """

  sorted_keys: jax.Array
  shard_offsets: jax.Array
  key_positions: tuple[jax.Array, ...]
  requested_rows: jax.Array
  max_rows_per_pair: jax.Array

  @property
  def capacity(self) -> int:
    return self.requested_rows.shape[-1]

  def unused(self) -> "Route":
    """A route of the same shapes without an id."""
    full = lambda value, x: jnp.full_like(x, value)
    return Route(
      full(NO_KEY, self.sorted_keys),
      full(0, self.shard_offsets),
      tuple(full(UNUSED, x) for x in self.key_positions),
      full(UNUSED, self.requested_rows),
      full(0, self.max_rows_per_pair),
    )

  def can_overflow(self, layout: Layout) -> bool:
    """Whether there can be more rows for a pair of devices than fit one round."""
    return self.capacity < min(self.sorted_keys.shape[0], layout.shard_rows)

  def requests(self, start: jax.Array, layout: Layout, limit: jax.Array | None = None):
    """What this device requests in a round: the keys from `start` on that fit it.

    Args:
      start: int32 `[S]`, positions in `sorted_keys`.
      layout: of the rows.
      limit: uint32 `[S]`, keys that later rounds begin with, or None.

    Returns:
      Local rows int32 `[S, C]`, `layout.shard_rows` for none, and how many of each shard, int32
      `[S]`.
    """
    position = start[:, None] + jnp.arange(self.capacity, dtype=jnp.int32)[None]
    key = self.sorted_keys.at[position].get(mode="fill", fill_value=NO_KEY)
    is_requested = position < self.shard_offsets[1:, None]
    if limit is not None:
      is_requested &= key < limit[:, None]
    local_rows = jnp.where(is_requested, _local_row(key, layout), layout.shard_rows)
    return local_rows, jnp.sum(is_requested, axis=1, dtype=jnp.int32)

  def buffer_positions(
    self, shards: Sequence[jax.Array], start: jax.Array, count: jax.Array
  ) -> list[jax.Array]:
    """Index of each id's row in a round's receive buffer `[S * C]`.

    Out of range if the id belongs to another round. `start` and `count` int32 `[S]` say which keys
    the round requests. For all features at once: the TPU compiler writes out a read of a short
    array, each time again.
    """
    shard = jnp.concatenate([s.reshape(-1) for s in shards])
    of = lambda x: x.at[shard].get(mode="promise_in_bounds")
    position = jnp.concatenate([p.reshape(-1) for p in self.key_positions]) - of(start)
    inside = (position >= 0) & (position < of(count))
    index = jnp.where(inside, shard * self.capacity + position, start.shape[0] * self.capacity)
    split = jnp.split(index, np.cumsum([s.size for s in shards])[:-1])
    return [p.reshape(s.shape) for p, s in zip(split, shards, strict=True)]


@jax.named_scope("exchange")
def find(
  rows: Sequence[tuple[jax.Array, jax.Array]], layout: Layout, capacity: int, placement: Placement
) -> Route:
  """The route of ids, given as shards and local rows `[m, L]` of each feature.

  Its `requested_rows` are a placeholder until the lookup fills it.
  """
  last_row = layout.shard_rows - 1
  key_of = lambda shard, row: jnp.where(
    row <= last_row, make_key(shard, jnp.minimum(row, last_row), layout), NO_KEY
  )
  key = jnp.concatenate([key_of(shard, row).reshape(-1) for shard, row in rows])
  position, keys, count = distinct_by_sort(key, NO_KEY)
  offsets = jnp.searchsorted(keys, first_keys(layout)[:-1]).astype(jnp.int32)
  offsets = jnp.concatenate([offsets, count[None]])
  split = jnp.split(position, np.cumsum([row.size for _, row in rows])[:-1])
  positions = tuple(r.reshape(row.shape) for r, (_, row) in zip(split, rows, strict=True))
  most = lax.pmax(jnp.max(offsets[1:] - offsets[:-1]), placement.axes)
  nothing = jnp.zeros((layout.shards, capacity), jnp.int32)
  return Route(keys, offsets, positions, nothing, most[None])


# --- sort keys -----------------------------------------------------------------------------------

# The shard in the high bits, the hashed local row in the low bits, so that a contiguous range of
# keys samples rows uniformly.


def _bits(layout: Layout) -> int:
  return max(1, (layout.shard_rows - 1).bit_length())


def make_key(shard: jax.Array, local_row: jax.Array, layout: Layout) -> jax.Array:
  """The sort key of rows, uint32."""
  bits = _bits(layout)
  mask = jnp.uint32((1 << bits) - 1)
  return (shard.astype(jnp.uint32) << bits) | ((local_row.astype(jnp.uint32) * _ODD) & mask)


def _local_row(key: jax.Array, layout: Layout) -> jax.Array:
  mask = (1 << _bits(layout)) - 1
  return ((key * jnp.uint32(pow(int(_ODD), -1, mask + 1))) & jnp.uint32(mask)).astype(jnp.int32)


def first_keys(layout: Layout) -> jax.Array:
  """The first key of each shard and the one behind the last shard: uint32 `[S + 1]`."""
  starts = np.arange(layout.shards + 1, dtype=np.uint64) << _bits(layout)
  return jnp.asarray(starts.astype(np.uint32))


def most_rows(shards: int) -> int:
  """The most rows that a shard can have, for keys to fit 32 bits."""
  return 1 << (31 - (shards - 1).bit_length())


def rounds(max_rows: jax.Array, capacity: int) -> jax.Array:
  """How many rounds it takes to exchange `max_rows` rows of a pair of devices."""
  return (max_rows + capacity - 1) // capacity
