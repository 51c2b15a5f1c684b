"""Brings ids to the shards that store their rows, and gradients after them.

What `placement.run` runs is per device, the rest is for the whole batch. There are two ways to a
row and back, and one more for gradients:

- **all-to-all** (`route`): shards are asked for distinct rows, send them, and later get the summed
  gradient of each, in as many rounds as it takes.
- **gather**: every shard gets all ids and sums the rows that it stores; the sums are added up. It
  has no capacity and no rounds. It moves less where bags are longer than there are shards, and it
  keeps the batch's order.
- **sum**: gradients of small tables whose rows are not split are added up as whole tables.

Columns and replicas surround both: devices that hold different columns of the same rows look up
each other's ids and exchange the slices of activations; devices that hold the same rows add up
their gradients. On `mesh.LOCAL` nothing of this is left but a gather from the one shard.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.engine import access, cost, row_sums
from embed.engine import grads as grads_lib
from embed.engine import route as route_lib
from embed.engine.bags import Bags, pad_all
from embed.engine.collectives import all_gather, all_to_all, device_index
from embed.engine.grads import ActivationGrads, DistinctRows, GradRows
from embed.engine.lookup import LookupRecord
from embed.engine.mesh import Placement
from embed.engine.route import Route
from embed.engine.stack import StackSpec

# --- looking up ----------------------------------------------------------------------------------


def look_up(
  stack: StackSpec, table: jax.Array, bags: Sequence[Bags], tables: Sequence[str]
) -> tuple[list[jax.Array], LookupRecord]:
  """Looks up the features of a stack: the whole batch, on all devices.

  Args:
    stack: the tables.
    table: the stored rows.
    bags: of each feature.
    tables: the name of each feature's table.

  Returns:
    Activations `[*batch, D]` of each feature, and the record of what was looked up.
  """
  placement = stack.placement
  acts: dict[int, jax.Array] = {}
  record = LookupRecord(tuple(bags), tuple(tables))
  padded, spec = spread(stack, record)
  if padded.bags:
    # A lookup needs only the capacity; an update chooses for all calls of a step together.
    demand = cost.batch_demand(stack, padded.bags, padded.tables)
    capacity = cost.choose_exchange(stack, demand).capacity
    out_specs = (placement.work, None if capacity is None else _route_spec(stack))
    per_device = functools.partial(_look_up, stack=stack, capacity=capacity)
    looked_up, route = placement.run(per_device, (stack.specs[2], spec), out_specs)(table, padded)
    acts = dict(zip(record.used, looked_up, strict=True))
    record = dataclasses.replace(record, route=route)
  zeros = lambda bag: jnp.zeros((*bag.batch, stack.dim), table.dtype)
  out = [acts[i] if i in acts else zeros(bag) for i, bag in enumerate(bags)]
  if not placement.is_local:
    out = [_cut(act, bag.batch, placement) for act, bag in zip(out, bags, strict=True)]
  return out, record


def spread(stack: StackSpec, record: LookupRecord) -> tuple[LookupRecord, Any]:
  """Pads the bags of a record to all devices; returns it with the specs of its arrays.

  Features that take no part are left out: collectives need an id.
  """
  used = record.used
  bags, bag_specs = pad_all([record.bags[i] for i in used], stack.placement)
  tables = tuple(record.tables[i] for i in used)
  route_spec = None if record.route is None else _route_spec(stack)
  spec = LookupRecord(bag_specs, tables, route_spec)  # type: ignore[arg-type]
  return LookupRecord(bags, tables, record.route), spec


def _cut(act: jax.Array, batch: tuple[int, ...], placement: Placement) -> jax.Array:
  """Cuts off the padding of the batch."""
  if batch:
    return placement.split_batch(act, batch[0])
  return placement.split_batch(act, 1)[0] if act.ndim > 1 else act  # one bag, padded


def _route_spec(stack: StackSpec) -> Any:
  work = stack.placement.work
  return Route(work, work, work, work, P())  # type: ignore[arg-type]


def _look_up(table, record: LookupRecord, *, stack: StackSpec, capacity: int | None):
  """Activations of a device's part of the batch, and the route of the all-to-all, or None."""
  placement = stack.placement
  table = access.opened(stack, table)
  combine = functools.partial(access.gather_and_combine, stack, table)
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
        everybody = all_gather(_union(bag, placement), placement.row_axes)
        act = _scatter(combine(_local(everybody, stack, name)), placement)
      act = _swap_columns(act, placement)
      act = act.reshape(*bag.batch, act.shape[-1])
    out.append(act[..., : stack.dim].astype(table.dtype))
  return tuple(out), route


def _local(bags: Bags, stack: StackSpec, table: str) -> Bags:
  """Bags of local rows of this shard; out of range for ids that this shard does not store."""
  if stack.placement.is_local and stack.layout.shard_rows == stack.layout.sizes[0]:
    return bags  # a pass over the ids would cost a tenth of the lookup
  shard, local_row = stack.layout.locate(stack.indices[table], bags.ids)
  if stack.layout.shards > 1:
    is_own = shard == device_index(stack.placement.row_axes)
    local_row = jnp.where(is_own, local_row, stack.layout.shard_rows)
  return bags.with_ids(local_row)


def _union(bags: Bags, placement: Placement) -> Bags:
  """The bags `[m, L]` of all devices that hold other columns of the same rows."""
  return all_gather(bags.flat(), placement.column_axes)


def _look_up_routed(
  stack: StackSpec, table: access.Rows, record: LookupRecord, capacity: int
) -> tuple[list[jax.Array], Route]:
  """Activations of the bags that are not ragged, by all-to-all.

  The route has what was requested in the first round.
  """
  placement, layout = stack.placement, stack.layout
  features = [x for x in zip(record.bags, record.tables, strict=True) if not x[0].is_ragged]
  bags = [_union(bag, placement) for bag, _ in features]
  indices = [stack.indices[name] for _, name in features]
  where = [layout.locate(i, bag.ids) for i, bag in zip(indices, bags, strict=True)]
  route = route_lib.find(where, layout, capacity, placement)
  shards = [shard for shard, _ in where]

  def one_round(start):
    local_rows, count = route.requests(start, layout)
    requested = all_to_all(local_rows, placement.row_axes)
    sent = access.take(stack, table, requested.reshape(-1))
    received = all_to_all(sent.reshape(*requested.shape, -1), placement.row_axes)
    received = received.reshape(-1, table.shape[1])
    positions = route.buffer_positions(shards, start, count)
    acts = [
      access.gather_and_combine(stack, received, bag.with_ids(position))
      for bag, position in zip(bags, positions, strict=True)
    ]
    return acts, requested

  first, last = route.shard_offsets[:-1], route.shard_offsets[1:]
  acts, requested = one_round(first)
  if route.can_overflow(layout):
    more = lambda k, acts: jax.tree.map(
      jnp.add, acts, one_round(jnp.minimum(first + k * route.capacity, last))[0]
    )
    acts = lax.fori_loop(
      1, route_lib.rounds(route.max_rows_per_pair[0], route.capacity), more, acts
    )
  return acts, dataclasses.replace(route, requested_rows=requested)


@jax.named_scope("exchange")
def _scatter(act: jax.Array, placement: Placement) -> jax.Array:
  """Adds up the shards' sums `[shards * batch, columns of D]`, to each its own part."""
  return lax.psum_scatter(act, placement.row_axes, tiled=True) if placement.row_axes else act


def _swap_columns(act: jax.Array, placement: Placement) -> jax.Array:
  """`[columns * batch, some of D]` to `[batch, D]`."""
  if not placement.column_axes:
    return act
  act = act.reshape(placement.column_shards, -1, act.shape[-1])
  act = all_to_all(act, placement.column_axes)
  return jnp.moveaxis(act, 0, 1).reshape(act.shape[1], -1)


@jax.named_scope("exchange")
def _add_up(act: jax.Array, stack: StackSpec) -> jax.Array:
  """The shards' sums of ragged bags of the whole batch, to this device's part of it."""
  placement = stack.placement
  if placement.devices == 1:
    return act
  if placement.row_axes:
    act = lax.psum(act, placement.row_axes)
  if placement.column_axes:
    act = lax.all_gather(act, placement.column_axes, axis=act.ndim - 1, tiled=True)
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
  """Brings gradients to the shards that store their rows: `carry = body(carry, received)`.

  Args:
    grads: this device's.
    stack: the tables.
    sums_tables: whether `cost.choose_exchange` says "sum". Otherwise calls whose record has a route
      go by all-to-all, and the others are gathered. If the optimizer steps once for each occurrence
      of an id, all are gathered, in the order of the batch.
    body: gets float32 gradients of local rows of this shard, all gradients of a row in one call:
      `DistinctRows` if they are summed already, else parts to sum. It is called once, or once for
      every round, in each of which there are other rows.
    carry: what it starts from.
  """
  summed = [
    dataclasses.replace(x, values=x.values.astype(jnp.float32))
    for x in grads
    if isinstance(x, DistinctRows)
  ]
  routed: list[ActivationGrads] = []
  others: list[tuple[jax.Array, Bags, str]] = []  # gradients, bags and table of a feature
  for call in grads:
    if isinstance(call, DistinctRows):
      continue
    is_routed = call.record.route is not None and stack.accumulates
    routed += [call] if is_routed else []
    others += [
      part
      for part in zip(call.grads, call.record.bags, call.record.tables, strict=True)
      if part[1].is_ragged or not is_routed
    ]
  local = [x.as_grad_rows() for x in summed]
  if not routed and not others:
    return body(carry, summed[0] if len(summed) == 1 else local)
  if others and sums_tables:
    return body(carry, _summed_over_replicas(others, local, stack))
  gathered = [_gathered(g, bags, table, stack) for g, bags, table in others]
  if not routed:
    return body(carry, local + gathered)
  return _rounds(routed, local + gathered, stack, body, carry)


def _own_columns(grads: jax.Array, stack: StackSpec) -> jax.Array:
  """`[batch, ..., D]` to this device's columns of all who share its rows, `[m, width]`."""
  placement = stack.placement
  grads = grads.astype(jnp.float32).reshape(-1, grads.shape[-1])
  if not placement.column_axes:
    return grads
  n = placement.column_shards
  grads = jnp.pad(grads, ((0, 0), (0, n * stack.width - grads.shape[1])))
  grads = jnp.moveaxis(grads.reshape(-1, n, stack.width), 1, 0)
  return all_to_all(grads, placement.column_axes).reshape(-1, stack.width)


def _gathered(grads: jax.Array, bags: Bags, table: str, stack: StackSpec) -> GradRows:
  """A feature's gradients of all devices, with the ids of other shards as padding."""
  placement = stack.placement
  # The batch is split over all axes in the mesh's order: one gather over all of them keeps it.
  if bags.is_ragged or not stack.accumulates:  # ragged bags are whole everywhere
    grads = stack.columns.own(all_gather(grads.astype(jnp.float32), placement.axes))
    bags = bags if bags.is_ragged else all_gather(bags, placement.axes)
  else:
    every = lambda tree: all_gather(all_gather(tree, placement.row_axes), placement.replica_axes)
    grads = every(_own_columns(grads, stack))
    bags = every(_union(bags, placement))
  return grads_lib.from_activations(grads, _local(bags, stack, table))


def _summed_over_replicas(others: Any, local: list[GradRows], stack: StackSpec) -> DistinctRows:
  """The gradients of a small table, row by row, added up over the replicas."""
  size, axes = stack.layout.shard_rows, stack.placement.replica_axes
  sums, touched = _dense([_own_part(g, bags, table, stack) for g, bags, table in others], size)
  with jax.named_scope("exchange"):
    sums, touched = lax.psum(sums, axes), lax.pmax(touched, axes)
  if local:
    more, touched_too = _dense(local, size)
    sums, touched = sums + more, jnp.maximum(touched, touched_too)
  ids = jnp.where(touched > 0, jnp.arange(size, dtype=jnp.int32), size)
  return DistinctRows(ids, sums)


def _dense(parts: list[GradRows], size: int) -> tuple[jax.Array, jax.Array]:
  ids = jnp.concatenate([part.ids.reshape(-1) for part in parts])
  touched = jnp.zeros(size, jnp.int32).at[ids].max(1, mode="drop")
  sums = jnp.zeros((size, parts[0].grads.shape[-1]), jnp.float32)
  return row_sums.add_rows(sums, parts), touched


def _own_part(grads: jax.Array, bags: Bags, table: str, stack: StackSpec) -> GradRows:
  """A feature's gradients of this device's own batch, and of those with other columns."""
  placement, padding = stack.placement, stack.layout.shard_rows
  if not bags.is_ragged:
    bags = _union(bags, placement)
    return grads_lib.from_activations(_own_columns(grads, stack), _local(bags, stack, table))
  # Bags of the whole batch: those of the other devices are left out.
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
  """Row gradients by all-to-all; in each round the rows of a range of keys, the same everywhere."""
  layout, placement = stack.layout, stack.placement
  first_keys = route_lib.first_keys(layout)
  ends = first_keys[1:]
  routes = [call.record.route for call in routed]
  starts = tuple(r.shard_offsets[:-1] for r in routes)
  sends = [_sender(call, stack) for call in routed]

  def next_limit(starts):
    """The first key of each shard that does not fit the next round, of any device."""
    limit = ends
    for r, start in zip(routes, starts, strict=True):
      behind = start + r.capacity
      key = r.sorted_keys.at[behind].get(mode="fill", fill_value=route_lib.NO_KEY)
      limit = jnp.minimum(limit, jnp.where(behind < r.shard_offsets[1:], key, ends))
    return lax.pmin(limit, placement.axes)

  def one_round(low, limit, starts, carry, is_first):
    parts, next_starts = [], []
    for send, r, start in zip(sends, routes, starts, strict=True):
      local_rows, count = r.requests(start, layout, limit)
      requested = r.requested_rows if is_first else all_to_all(local_rows, placement.row_axes)
      part = send(start, count, requested)
      # No lower limit is needed: rows of earlier rounds are not requested again.
      parts.append(part if limit is None else _between(part, first_keys[:-1], limit, stack))
      next_starts.append(start + count)
    parts += fixed if limit is None else [_between(p, low, limit, stack) for p in fixed]
    return body(carry, parts), tuple(next_starts)

  if not any(r.can_overflow(layout) for r in routes):
    return one_round(None, None, starts, carry, True)[0]
  fits = functools.reduce(jnp.logical_and, [r.max_rows_per_pair[0] <= r.capacity for r in routes])
  limit = lax.cond(fits, lambda: ends, lambda: next_limit(starts))
  carry, starts = one_round(first_keys[:-1], limit, starts, carry, True)

  def more(state):
    low, starts, carry = state
    limit = next_limit(starts)
    carry, starts = one_round(low, limit, starts, carry, False)
    return limit, starts, carry

  return lax.while_loop(lambda state: jnp.any(state[0] < ends), more, (limit, starts, carry))[2]


def _sender(call: ActivationGrads, stack: StackSpec) -> Callable[..., GradRows]:
  """A function that sends a round's gradients, summed per row, and returns what was received."""
  placement, record = stack.placement, call.record
  parts, shards = [], []
  for grads, bags, table in zip(call.grads, record.bags, record.tables, strict=True):
    if bags.is_ragged:
      continue
    bags = _union(bags, placement)
    parts.append(grads_lib.from_activations(_own_columns(grads, stack), bags))
    shards.append(stack.layout.locate(stack.indices[table], bags.ids)[0])

  def send(start, count, requested) -> GradRows:
    positions = record.route.buffer_positions(shards, start, count)
    flat = jnp.concatenate([p.reshape(-1) for p in positions])
    sums = jnp.zeros((requested.size, stack.width), jnp.float32)
    sums = row_sums.add_rows(sums, grads_lib.with_ids(parts, flat))
    sums = all_to_all(sums.reshape(*requested.shape, stack.width), placement.row_axes)
    ids = all_gather(requested.reshape(-1), placement.replica_axes)
    sums = all_gather(sums.reshape(-1, stack.width), placement.replica_axes)
    return GradRows(sums, ids[:, None])

  return send


def _between(part: GradRows, low: jax.Array, limit: jax.Array, stack: StackSpec) -> GradRows:
  """Of the rows of this shard, those of a range of keys."""
  me, size = device_index(stack.placement.row_axes), stack.layout.shard_rows
  key = route_lib.make_key(
    jnp.full_like(part.ids, me), jnp.minimum(part.ids, size - 1), stack.layout
  )
  keep = (part.ids < size) & (key >= low[me]) & (key < limit[me])
  return part._replace(ids=jnp.where(keep, part.ids, size))
