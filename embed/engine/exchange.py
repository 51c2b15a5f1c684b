"""Sends ids to the shards that store their rows, and later the gradients of those rows.

Functions that `placement.run` runs work per device, the others on the whole batch. There are two
ways to fetch rows and return their gradients, and one more for gradients only:

- **all-to-all**: shards send distinct rows on request, and later receive the summed gradient of
  each, in as many rounds as needed.
- **gather**: every shard gets all ids and sums the rows that it stores; the sums are added up. It
  has no capacity and no rounds. It moves less if bags have more ids than there are shards, and it
  preserves the batch's order.
- **sum**: gradients of small tables whose rows are not split are added up as whole tables.

Replicas, devices that hold the same rows, add up their gradients. On `mesh.LOCAL`, all that is left
of this is a gather from the one shard.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.engine import cost
from embed.engine import grads as grads_lib
from embed.engine import rows as rows_lib
from embed.engine.bags import Bags, LookupRecord
from embed.engine.grads import ActivationGrads, DistinctRows, GradRows, distinct_by_sort
from embed.engine.mesh import Placement, all_gather, all_to_all, device_index
from embed.engine.stack import Layout, StackSpec

# --- routes: which shard stores the row of each id, and in which round it goes --------------------


NO_KEY = np.uint32(2**32 - 1)  # sorts after every key
_ODD = np.uint32(0x9E3779B1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
  """The mapping from one call's ids to the shards that store their rows (per device).

  Attributes:
    sorted_keys: uint32 `[N]`, the sort keys of the distinct ids, then `NO_KEY`.
    shard_offsets: int32 `[S + 1]`, where the keys of each shard begin.
    key_positions: int32 `[m, L]` for each feature that has ids and is not ragged: the index of each
      id's key, N for padding.
    requested_rows: int32 `[S, C]`, the local rows that each device requested from this one in the
      first round.
    max_rows_per_pair: int32 `[1]`, the most keys for any pair of devices, the same on all devices.
  """

  sorted_keys: jax.Array
  shard_offsets: jax.Array
  key_positions: tuple[jax.Array, ...]
  requested_rows: jax.Array
  max_rows_per_pair: jax.Array

  @property
  def capacity(self) -> int:
    return self.requested_rows.shape[-1]

  def can_overflow(self, layout: Layout) -> bool:
    """Returns True if a pair of devices may exchange more rows than fit in one round."""
    return self.capacity < min(self.sorted_keys.shape[0], layout.shard_rows)

  def requests(self, start: jax.Array, layout: Layout, limit: jax.Array | None = None):
    """The rows that this device requests in a round: the keys from `start` on that fit in it.

    Args:
      start: int32 `[S]`, positions in `sorted_keys`.
      layout: the layout of the rows.
      limit: uint32 `[S]`, the keys at which the next round begins, or None.

    Returns:
      Local rows, int32 `[S, C]`, `layout.shard_rows` if unused, and their counts, int32 `[S]`.
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
    """The index of each id's row in a round's receive buffer `[S * C]`; out of range if not in it.

    `start` and `count`, int32 `[S]`, give the keys of the round. Handles all features at once,
    since the TPU compiler unrolls every single read of a short array.
    """
    shard = jnp.concatenate([s.reshape(-1) for s in shards])
    of = lambda x: x.at[shard].get(mode="promise_in_bounds")
    position = jnp.concatenate([p.reshape(-1) for p in self.key_positions]) - of(start)
    inside = (position >= 0) & (position < of(count))
    index = jnp.where(inside, shard * self.capacity + position, start.shape[0] * self.capacity)
    split = jnp.split(index, np.cumsum([s.size for s in shards])[:-1])
    return [p.reshape(s.shape) for p, s in zip(split, shards, strict=True)]


@jax.named_scope("exchange")
def find_route(
  rows: Sequence[tuple[jax.Array, jax.Array]], layout: Layout, capacity: int, placement: Placement
) -> Route:
  """Finds the route of ids, given as shards and local rows `[m, L]` for each feature.

  Its `requested_rows` are a placeholder until the lookup fills them in.
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

# A key has the shard in the high bits and the hashed local row in the low bits, so a contiguous
# range of keys samples rows uniformly.


def _bits(layout: Layout) -> int:
  return max(1, (layout.shard_rows - 1).bit_length())


def make_key(shard: jax.Array, local_row: jax.Array, layout: Layout) -> jax.Array:
  """The sort keys of rows, uint32."""
  bits = _bits(layout)
  mask = jnp.uint32((1 << bits) - 1)
  return (shard.astype(jnp.uint32) << bits) | ((local_row.astype(jnp.uint32) * _ODD) & mask)


def _local_row(key: jax.Array, layout: Layout) -> jax.Array:
  mask = (1 << _bits(layout)) - 1
  return ((key * jnp.uint32(pow(int(_ODD), -1, mask + 1))) & jnp.uint32(mask)).astype(jnp.int32)


def first_keys(layout: Layout) -> jax.Array:
  """The first key of each shard, and the key just past the last shard: uint32 `[S + 1]`."""
  starts = np.arange(layout.shards + 1, dtype=np.uint64) << _bits(layout)
  return jnp.asarray(starts.astype(np.uint32))


def most_rows(shards: int) -> int:
  """The most rows that a shard can have if keys must fit in 32 bits."""
  return 1 << (31 - (shards - 1).bit_length())


def rounds_for(max_rows: jax.Array, capacity: int) -> jax.Array:
  """The number of rounds needed to exchange `max_rows` rows between a pair of devices."""
  return (max_rows + capacity - 1) // capacity


# --- looking up ----------------------------------------------------------------------------------


def look_up(
  stack: StackSpec, table: jax.Array, bags: Sequence[Bags], tables: Sequence[str]
) -> tuple[list[jax.Array], LookupRecord]:
  """Looks up features in the stored rows of a stack: the whole batch, on all devices.

  Returns:
    float32 activations `[*batch, D]` for each feature, and the record of the lookup.
  """
  placement = stack.placement
  acts: dict[int, jax.Array] = {}
  record = LookupRecord(tuple(bags), tuple(tables))
  padded, spec = pad_to_devices(stack, record)
  if padded.bags:
    capacity = None
    if not placement.is_local:
      # A lookup needs only the capacity; an update chooses once for all calls of a step.
      demand = cost.batch_demand(stack, padded.bags, padded.tables)
      capacity = cost.choose_exchange(stack, demand).capacity
    out_specs = (placement.work, None if capacity is None else _route_spec(stack))
    per_device = functools.partial(_look_up, stack=stack, capacity=capacity)
    looked_up, route = placement.run(per_device, (stack.specs[2], spec), out_specs)(table, padded)
    acts = dict(zip(record.used, looked_up, strict=True))
    record = dataclasses.replace(record, route=route)
  zeros = lambda bag: jnp.zeros((*bag.batch, stack.dim), jnp.float32)
  out = [acts[i] if i in acts else zeros(bag) for i, bag in enumerate(bags)]
  if not placement.is_local:  # removes the padding of the batch
    out = [placement.split_batch(act, bag.batch[0]) for act, bag in zip(out, bags, strict=True)]
  return out, record


def pad_to_devices(stack: StackSpec, record: LookupRecord) -> tuple[LookupRecord, Any]:
  """Pads the bags of a record for all devices; returns a new record and the specs of its arrays.

  Leaves out features whose bags have no entries: collectives need at least one id.
  """
  used, placement = record.used, stack.placement
  bags = tuple(record.bags[i].padded(placement) for i in used)
  # Ragged bags are whole on every device.
  bag_specs = tuple(P() if bag.is_ragged else placement.work for bag in bags)
  tables = tuple(record.tables[i] for i in used)
  route_spec = None if record.route is None else _route_spec(stack)
  spec = LookupRecord(bag_specs, tables, route_spec)  # type: ignore[arg-type]
  return LookupRecord(bags, tables, record.route), spec


def _route_spec(stack: StackSpec) -> Any:
  work = stack.placement.work
  return Route(work, work, work, work, P())  # type: ignore[arg-type]


def _look_up(table, record: LookupRecord, *, stack: StackSpec, capacity: int | None):
  """The activations of a device's part of the batch, and the route of the all-to-all or None.

  On a single device `capacity` is None, and only `_local` and `combine` have anything to do.
  """
  placement = stack.placement
  table = rows_lib.as_rows(stack, table)
  combine = functools.partial(rows_lib.gather_and_combine, stack, table)
  acts: Sequence[jax.Array] = ()
  route = None
  if capacity is not None:
    acts, route = _look_up_routed(stack, table, record, capacity)
  routed, out = iter(acts), []
  for bag, name in zip(record.bags, record.tables, strict=True):
    if bag.is_ragged:
      act = _add_up(combine(_local(bag, stack, name)), stack)
    else:
      if capacity is not None:
        act = next(routed)
      else:
        everybody = all_gather(bag.flat(), placement.row_axes)
        act = _scatter(combine(_local(everybody, stack, name)), placement)
      act = act.reshape(*bag.batch, act.shape[-1])
    out.append(act)
  return tuple(out), route


def _local(bags: Bags, stack: StackSpec, table: str) -> Bags:
  """Converts ids to local rows of this shard; out of range for ids that it does not store."""
  if stack.placement.is_local and stack.layout.shard_rows == stack.layout.sizes[0]:
    return bags  # a pass over the ids would cost a tenth of the lookup
  shard, local_row = stack.layout.locate(stack.indices[table], bags.ids)
  if stack.layout.shards > 1:
    is_own = shard == device_index(stack.placement.row_axes)
    local_row = jnp.where(is_own, local_row, stack.layout.shard_rows)
  return bags.with_ids(local_row)


def _look_up_routed(
  stack: StackSpec, table: rows_lib.Rows, record: LookupRecord, capacity: int
) -> tuple[list[jax.Array], Route]:
  """Looks up the bags that are not ragged, by all-to-all; returns their activations and the route.

  The route has the rows that were requested in the first round.
  """
  placement, layout = stack.placement, stack.layout
  features = [x for x in zip(record.bags, record.tables, strict=True) if not x[0].is_ragged]
  bags = [bag.flat() for bag, _ in features]
  indices = [stack.indices[name] for _, name in features]
  where = [layout.locate(i, bag.ids) for i, bag in zip(indices, bags, strict=True)]
  route = find_route(where, layout, capacity, placement)
  shards = [shard for shard, _ in where]

  def one_round(start):
    local_rows, count = route.requests(start, layout)
    requested = all_to_all(local_rows, placement.row_axes)
    sent = rows_lib.take(stack, table, requested.reshape(-1))
    received = all_to_all(sent.reshape(*requested.shape, -1), placement.row_axes)
    received = received.reshape(-1, table.shape[1])
    positions = route.buffer_positions(shards, start, count)
    acts = [
      rows_lib.gather_and_combine(stack, received, bag.with_ids(position))
      for bag, position in zip(bags, positions, strict=True)
    ]
    return acts, requested

  first, last = route.shard_offsets[:-1], route.shard_offsets[1:]
  acts, requested = one_round(first)
  if route.can_overflow(layout):
    more = lambda k, acts: jax.tree.map(
      jnp.add, acts, one_round(jnp.minimum(first + k * route.capacity, last))[0]
    )
    acts = lax.fori_loop(1, rounds_for(route.max_rows_per_pair[0], route.capacity), more, acts)
  return acts, dataclasses.replace(route, requested_rows=requested)


@jax.named_scope("exchange")
def _scatter(act: jax.Array, placement: Placement) -> jax.Array:
  """Adds up the shards' sums `[shards * batch, D]`; each shard gets its own part."""
  return lax.psum_scatter(act, placement.row_axes, tiled=True) if placement.row_axes else act


@jax.named_scope("exchange")
def _add_up(act: jax.Array, stack: StackSpec) -> jax.Array:
  """Adds up the shards' sums of ragged bags of the whole batch; returns this device's part."""
  placement = stack.placement
  if placement.devices == 1:
    return act
  if placement.row_axes:
    act = lax.psum(act, placement.row_axes)
  own = act.shape[0] // placement.devices
  return lax.dynamic_slice_in_dim(act, device_index(placement.axes) * own, own)


# --- gradients -----------------------------------------------------------------------------------

Received = DistinctRows | list[GradRows]  # of local rows of this shard
Body = Callable[[Any, Received], Any]


def for_each_round(
  grads: Sequence[ActivationGrads | DistinctRows],
  stack: StackSpec,
  sums_tables: bool,
  body: Body,
  carry: Any,
) -> Any:
  """Sends gradients to the shards that store their rows; runs `carry = body(carry, received)`.

  Args:
    grads: this device's gradients, either all of activations or all of distinct rows.
    stack: the stack of the tables.
    sums_tables: whether `cost.choose_exchange` chose "sum". Otherwise, calls whose record has a
      route use the all-to-all, and the others are gathered.
    body: receives float32 gradients of this shard's local rows, all gradients of a row in one call:
      `DistinctRows` if already summed, else parts to sum. Each round has different rows.
    carry: the first argument of the first call.
  """
  narrow = [x for x in grads if isinstance(x, DistinctRows)]
  summed = [dataclasses.replace(x, values=x.values.astype(jnp.float32)) for x in narrow]
  calls = [x for x in grads if isinstance(x, ActivationGrads)]
  assert not (summed and calls), "`gradients.accumulate` makes them the same kind"
  if not calls:
    return body(carry, summed[0] if len(summed) == 1 else [x.as_grad_rows() for x in summed])
  routed = [call for call in calls if call.record.route is not None]
  others = [  # gradients, bags and table of a feature
    part
    for call in calls
    for part in zip(call.grads, call.record.bags, call.record.tables, strict=True)
    if part[1].is_ragged or call.record.route is None
  ]
  if others and sums_tables:
    return body(carry, _summed_over_replicas(others, stack))
  gathered = [_gathered(g, bags, table, stack) for g, bags, table in others]
  return _rounds(routed, gathered, stack, body, carry) if routed else body(carry, gathered)


def _gathered(grads: jax.Array, bags: Bags, table: str, stack: StackSpec) -> GradRows:
  """A feature's gradients from all devices, with the ids of other shards as padding."""
  placement = stack.placement
  if bags.is_ragged:  # the bags are whole on every device
    grads = all_gather(grads.astype(jnp.float32), placement.axes)
  else:
    every = lambda tree: all_gather(all_gather(tree, placement.row_axes), placement.replica_axes)
    grads, bags = every(grads.astype(jnp.float32).reshape(-1, grads.shape[-1])), every(bags.flat())
  return grads_lib.from_activations(grads, _local(bags, stack, table))


def _summed_over_replicas(others: Any, stack: StackSpec) -> DistinctRows:
  """The gradients of a small table, row by row, added up over the replicas."""
  size, axes = stack.layout.shard_rows, stack.placement.replica_axes
  parts = [_own_part(grads, bags, table, stack) for grads, bags, table in others]
  ids = jnp.concatenate([part.ids.reshape(-1) for part in parts])
  touched = jnp.zeros(size, jnp.int32).at[ids].max(1, mode="drop")
  sums = grads_lib.add_rows(jnp.zeros((size, stack.dim), jnp.float32), parts)
  with jax.named_scope("exchange"):
    sums, touched = lax.psum(sums, axes), lax.pmax(touched, axes)
  return DistinctRows(jnp.where(touched > 0, jnp.arange(size, dtype=jnp.int32), size), sums)


def _own_part(grads: jax.Array, bags: Bags, table: str, stack: StackSpec) -> GradRows:
  """A feature's gradients from this device's own part of the batch."""
  placement, padding = stack.placement, stack.layout.shard_rows
  if not bags.is_ragged:
    return grads_lib.from_activations(grads, _local(bags.flat(), stack, table))
  # The bags are of the whole batch: leave out the bags of other devices.
  start = device_index(placement.axes) * math.prod(grads.shape[:-1])
  own = _local(bags, stack, table).part(start, grads.shape[:-1], padding)
  return grads_lib.from_activations(grads, own)


# --- rounds --------------------------------------------------------------------------------------


def _rounds(
  routed: Sequence[ActivationGrads],
  fixed: list[GradRows],
  stack: StackSpec,
  body: Body,
  carry: Any,
) -> Any:
  """Sends row gradients by all-to-all; each round has a range of keys, the same on all devices."""
  layout, placement = stack.layout, stack.placement
  keys_of_shards = first_keys(layout)
  ends = keys_of_shards[1:]
  routes = [call.record.route for call in routed]
  starts = tuple(r.shard_offsets[:-1] for r in routes)
  sends = [_sender(call, stack) for call in routed]

  def next_limit(starts):
    """The first key of each shard that does not fit in the next round on some device."""
    limit = ends
    for r, start in zip(routes, starts, strict=True):
      behind = start + r.capacity
      key = r.sorted_keys.at[behind].get(mode="fill", fill_value=NO_KEY)
      limit = jnp.minimum(limit, jnp.where(behind < r.shard_offsets[1:], key, ends))
    return lax.pmin(limit, placement.axes)

  def one_round(low, limit, starts, carry, is_first):
    parts, next_starts = [], []
    for send, r, start in zip(sends, routes, starts, strict=True):
      local_rows, count = r.requests(start, layout, limit)
      requested = r.requested_rows if is_first else all_to_all(local_rows, placement.row_axes)
      part = send(start, count, requested)
      # No lower limit is needed: rows of earlier rounds are not requested again.
      parts.append(part if limit is None else _between(part, keys_of_shards[:-1], limit, stack))
      next_starts.append(start + count)
    parts += fixed if limit is None else [_between(p, low, limit, stack) for p in fixed]
    return body(carry, parts), tuple(next_starts)

  if not any(r.can_overflow(layout) for r in routes):
    return one_round(None, None, starts, carry, True)[0]
  fits = functools.reduce(jnp.logical_and, [r.max_rows_per_pair[0] <= r.capacity for r in routes])
  limit = lax.cond(fits, lambda: ends, lambda: next_limit(starts))
  carry, starts = one_round(keys_of_shards[:-1], limit, starts, carry, True)

  def more(state):
    low, starts, carry = state
    limit = next_limit(starts)
    carry, starts = one_round(low, limit, starts, carry, False)
    return limit, starts, carry

  return lax.while_loop(lambda state: jnp.any(state[0] < ends), more, (limit, starts, carry))[2]


def _sender(call: ActivationGrads, stack: StackSpec) -> Callable[..., GradRows]:
  """Makes a function that sends a round's gradients, summed per row, and returns those received."""
  placement, record = stack.placement, call.record
  parts, shards = [], []
  for grads, bags, table in zip(call.grads, record.bags, record.tables, strict=True):
    if bags.is_ragged:
      continue
    bags = bags.flat()
    parts.append(grads_lib.from_activations(grads, bags))
    shards.append(stack.layout.locate(stack.indices[table], bags.ids)[0])

  def send(start, count, requested) -> GradRows:
    positions = record.route.buffer_positions(shards, start, count)
    flat = jnp.concatenate([p.reshape(-1) for p in positions])
    sums = jnp.zeros((requested.size, stack.dim), jnp.float32)
    sums = grads_lib.add_rows(sums, grads_lib.with_ids(parts, flat))
    sums = all_to_all(sums.reshape(*requested.shape, stack.dim), placement.row_axes)
    ids = all_gather(requested.reshape(-1), placement.replica_axes)
    sums = all_gather(sums.reshape(-1, stack.dim), placement.replica_axes)
    return GradRows(sums, ids[:, None])

  return send


def _between(part: GradRows, low: jax.Array, limit: jax.Array, stack: StackSpec) -> GradRows:
  """Keeps the gradients whose keys lie in [low, limit); the others become padding."""
  me, size = device_index(stack.placement.row_axes), stack.layout.shard_rows
  key = make_key(jnp.full_like(part.ids, me), jnp.minimum(part.ids, size - 1), stack.layout)
  keep = (part.ids < size) & (key >= low[me]) & (key < limit[me])
  return part._replace(ids=jnp.where(keep, part.ids, size))
