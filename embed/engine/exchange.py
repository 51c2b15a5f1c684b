"""Rows over shards: how ids find the shard that owns their row, and how gradients follow them.

Everything here runs per device, inside `jax.shard_map`. Two ways lead to a row and back:

- **all-to-all**: the distinct ids of a device are sorted by owner; owners get asked for rows, send
  them, and later get the summed gradient of each. A pair of devices exchanges at most `capacity`
  rows at a time. Where more are needed, further rounds follow: in a round, an owner is asked for a
  range of its rows, the same range by everybody, so that all gradients of a row meet in one round
  and an optimizer steps every row once. Any ids end, whatever the capacity.
- **gather**: every shard gets all ids and sums what it owns; the sums are added up. No capacity, no
  rounds. It moves less where bags are longer than there are shards, and it keeps the batch's order.

Columns and replicas surround both: devices that hold different columns of the same rows look up
each other's ids and exchange the pieces of activations; devices that hold the same rows add up
their gradients.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from embed.engine import lookup as lookup_lib
from embed.engine import update
from embed.engine.layout import Columns, Layout
from embed.engine.lookup import Occurrences, Reads

Names = tuple[str, ...]
NONE = np.uint32(2**32 - 1)  # a key behind all others
_ODD = np.uint32(0x9E3779B1)


@dataclasses.dataclass(frozen=True)
class Axes:
  """The mesh axes a table is spread over, with their numbers of devices.

  `rows`, `columns`: rows and columns are split over these; `replicas`: the batch is, the table is
  not. `order`: all of them as the batch is split over them.
  """

  rows: tuple[tuple[str, int], ...] = ()
  columns: tuple[tuple[str, int], ...] = ()
  replicas: tuple[tuple[str, int], ...] = ()
  order: Names = ()

  @staticmethod
  def names(axes: Sequence[tuple[str, int]]) -> Names:
    return tuple(name for name, _ in axes)

  @staticmethod
  def number(axes: Sequence[tuple[str, int]]) -> int:
    return math.prod(size for _, size in axes)


def _gather(x: jax.Array, axes: Sequence[tuple[str, int]]) -> jax.Array:
  return lax.all_gather(x, Axes.names(axes), tiled=True) if axes else x


def _index(axes: Sequence[tuple[str, int]]) -> jax.Array:
  return lax.axis_index(Axes.names(axes)) if axes else jnp.int32(0)


def _swap(x: jax.Array, axes: Sequence[tuple[str, int]]) -> jax.Array:
  """`[n, ...]`, one entry for each device, to the entries that each device had for this one."""
  return lax.all_to_all(x, Axes.names(axes), 0, 0) if axes else x


# --- the way of the ids --------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
  """The way of one call's ids to their owners, on one device; N ids, n owners, C capacity.

  `keys` uint32 `[N]`: the distinct ids as sorted keys, then NONE; `edges` int32 `[n + 1]`: where
  the keys of each owner begin; `ranks`, int32 like each part's ids: where an id's key is, or a
  number behind all of them; `asked` int32 `[n, C]`: the places that each device asked of this one
  in the first round; `most` int32 `[1]`: the most keys of any pair of devices, the same everywhere.
  """

  keys: jax.Array
  edges: jax.Array
  ranks: tuple[jax.Array, ...]
  asked: jax.Array
  most: jax.Array

  @property
  def capacity(self) -> int:
    return self.asked.shape[-1]

  def unused(self) -> "Route":
    """The route of no ids, from the shapes of another."""
    full = lambda value: lambda x: jnp.full_like(x, value)
    last = full(np.iinfo(np.int32).max)
    return Route(
      full(NONE)(self.keys),
      full(0)(self.edges),
      tuple(map(last, self.ranks)),
      last(self.asked),
      full(0)(self.most),
    )


class _Keys(NamedTuple):
  """A key is an owner and, scrambled, a place: ranges of keys spread over any set of places."""

  bits: int

  @classmethod
  def of(cls, layout: Layout) -> "_Keys":
    return cls(max(1, (layout.rows - 1).bit_length()))

  def make(self, shard: jax.Array, place: jax.Array) -> jax.Array:
    mask = jnp.uint32((1 << self.bits) - 1)
    return (shard.astype(jnp.uint32) << self.bits) | ((place.astype(jnp.uint32) * _ODD) & mask)

  def place(self, key: jax.Array) -> jax.Array:
    mask = (1 << self.bits) - 1
    return ((key * jnp.uint32(pow(int(_ODD), -1, mask + 1))) & jnp.uint32(mask)).astype(jnp.int32)

  def starts(self, shards: int) -> jax.Array:
    """The first key of each shard and, behind the last, of none: uint32 `[shards + 1]`."""
    return jnp.asarray((np.arange(shards + 1, dtype=np.uint64) << self.bits).astype(np.uint32))


def largest_layout(shards: int) -> int:
  """The most places a shard can have, for keys to fit 32 bits."""
  return 1 << (31 - (shards - 1).bit_length())


def overflows(layout: Layout, ids: int, capacity: int) -> bool:
  """Whether there can be more rows for a pair of devices than fit one round."""
  return capacity < min(ids, layout.rows)


def _find_route(places: Sequence[tuple[jax.Array, jax.Array]], layout: Layout, capacity: int, axes):
  """The route of ids given as (shard, place), each `[m, L]`; all but `asked`, and what to ask."""
  keys_of = _Keys.of(layout)
  key = jnp.concatenate(
    [
      jnp.where(p < layout.rows, keys_of.make(s, jnp.minimum(p, layout.rows - 1)), NONE).reshape(-1)
      for s, p in places
    ]
  )
  n = key.shape[0]
  ordered, order = lax.sort((key, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=False)
  new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != NONE)
  rank = update.cumsum(new.astype(jnp.int32)) - 1
  keys = jnp.full(n, NONE, jnp.uint32).at[jnp.where(new, rank, n)].set(ordered, mode="drop")
  rank = jnp.where(ordered == NONE, n, rank)
  rank = jnp.zeros(n, jnp.int32).at[order].set(rank, unique_indices=True)
  starts = keys_of.starts(layout.shards)
  edges = jnp.searchsorted(keys, starts[:-1]).astype(jnp.int32)
  edges = jnp.concatenate([edges, jnp.sum(new, dtype=jnp.int32)[None]])
  sizes = [p.size for _, p in places]
  ranks = [
    r.reshape(p.shape)
    for r, (_, p) in zip(jnp.split(rank, np.cumsum(sizes)[:-1]), places, strict=True)
  ]
  most = jnp.max(edges[1:] - edges[:-1])
  most = lax.pmax(most, axes.order)
  nothing = jnp.zeros((layout.shards, capacity), jnp.int32)
  return Route(keys, edges, tuple(ranks), nothing, most[None])


class _Window(NamedTuple):
  """What a device asks of each owner in one round."""

  asks: jax.Array  # int32 [n, C], places; `rows` for none
  first: jax.Array  # int32 [n], the position in `keys` of the first one
  number: jax.Array  # int32 [n]


def _window(route: Route, first: jax.Array, layout: Layout, limit: jax.Array | None) -> _Window:
  """The keys from `first` on that fit a round and are below `limit` `[n]`."""
  position = first[:, None] + jnp.arange(route.capacity, dtype=jnp.int32)[None]
  key = route.keys.at[position].get(mode="fill", fill_value=NONE)
  wanted = position < route.edges[1:, None]
  if limit is not None:
    wanted &= key < limit[:, None]
  asks = jnp.where(wanted, _Keys.of(layout).place(key), layout.rows)
  return _Window(asks, first, jnp.sum(wanted, axis=1, dtype=jnp.int32))


def _buffer_places(route: Route, shards: Sequence[jax.Array], window: _Window) -> list[jax.Array]:
  """Where in the buffer `[n * C]` of a round each id's row is; behind it for those in another.

  For all parts at once: the TPU compiler writes a read of a short array out, for each one anew.
  """
  n, capacity = window.asks.shape
  shard = jnp.concatenate([s.reshape(-1) for s in shards])
  of = lambda x: x.at[shard].get(mode="promise_in_bounds")
  position = jnp.concatenate([r.reshape(-1) for r in route.ranks]) - of(window.first)
  there = (position >= 0) & (position < of(window.number))
  place = jnp.where(there, shard * capacity + position, n * capacity)
  split = jnp.split(place, np.cumsum([s.size for s in shards])[:-1])
  return [p.reshape(s.shape) for p, s in zip(split, shards, strict=True)]


# --- looking up ----------------------------------------------------------------------------------


class Found(NamedTuple):
  """What a lookup of several features gives, on one device."""

  activations: tuple[jax.Array, ...]  # [batch, ..., D] each
  route: Route | None
  most: jax.Array  # int32 [1]: the most rows of a pair of devices, of `capacity` a round


def look_up(
  table: jax.Array,
  parts: Sequence[Occurrences],
  numbers: Sequence[int],
  *,
  layout: Layout,
  axes: Axes,
  dim: int,
  capacity: int | None,
  quantization: Any = None,
) -> Found:
  """The activations of a device's part of the batch.

  Args:
    table: this device's shard, `[rows, columns]`.
    parts: the occurrences of each feature, ids `[batch, ..., L]`, of this device's part of the
      batch; those with segments are whole, the same on every device.
    numbers: each part's table, as a number in the layout.
    layout: which row stands where.
    axes: what the table is spread over.
    dim: D.
    capacity: rows that a pair of devices exchanges in a round; None gathers.
    quantization: of rows, before they are summed.
  """
  flat = [_flat(occ) for occ in parts]
  find = functools.partial(lookup_lib.lookup, quantization=quantization, dtype=jnp.float32)
  route = None
  acts: dict[int, jax.Array] = {}
  routed = [i for i, occ in enumerate(parts) if capacity is not None and occ.segments is None]
  if routed:
    union = [jax.tree.map(lambda x: _gather(x, axes.columns), flat[i]) for i in routed]
    assert capacity is not None
    tables = [numbers[i] for i in routed]
    found, route = _look_up_routed(table, union, tables, find, layout, axes, capacity)
    acts = dict(zip(routed, found, strict=True))
  for i, occ in enumerate(flat):
    if i in acts:
      continue
    if occ.segments is None:
      occ = jax.tree.map(lambda x: _gather(_gather(x, axes.columns), axes.rows), occ)
    shard, place = layout.locate(numbers[i], occ.ids)
    own = jnp.where(shard == _index(axes.rows), place, layout.rows)
    act = find(table, dataclasses.replace(occ, ids=own), occ.batch)
    acts[i] = _add_up(act, occ, axes, dim) if occ.segments is not None else _scatter(act, axes)
  out = []
  for i, occ in enumerate(parts):
    act = acts[i]
    if occ.segments is None:
      act = _swap_columns(act, axes)
      act = act.reshape(*occ.batch, act.shape[-1])
    out.append(act[..., :dim].astype(table.dtype))
  return Found(tuple(out), route, jnp.zeros(1, jnp.int32) if route is None else route.most)


def _flat(occ: Occurrences) -> Occurrences:
  """The bags of a part one after another: ids `[m, L]`."""
  if occ.segments is not None:
    return occ
  m = math.prod(occ.batch)
  return jax.tree.map(lambda x: x.reshape(m, x.shape[-1]), occ)


def _look_up_routed(table, parts, numbers, find, layout: Layout, axes: Axes, capacity: int):
  places = [layout.locate(t, occ.ids) for t, occ in zip(numbers, parts, strict=True)]
  route = _find_route(places, layout, capacity, axes)
  total = sum(occ.ids.size for occ in parts)

  def round_(first):
    window = _window(route, first, layout, None)
    asked = _swap(window.asks, axes.rows)
    rows = table.at[asked.reshape(-1)].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    rows = _swap(rows.reshape(*asked.shape, -1), axes.rows).reshape(-1, table.shape[1])
    acts = []
    shards = [shard for shard, _ in places]
    for occ, here in zip(parts, _buffer_places(route, shards, window), strict=True):
      acts.append(find(rows, dataclasses.replace(occ, ids=here), occ.batch))
    return acts, asked

  acts, asked = round_(route.edges[:-1])
  if overflows(layout, total, capacity):
    more = lambda k, acts: jax.tree.map(
      jnp.add, acts, round_(jnp.minimum(route.edges[:-1] + k * capacity, route.edges[1:]))[0]
    )
    acts = lax.fori_loop(1, rounds(route.most[0], capacity), more, acts)
  return acts, dataclasses.replace(route, asked=asked)


def rounds(most: jax.Array, capacity: int) -> jax.Array:
  """How many rounds it takes to exchange `most` rows."""
  return (most + capacity - 1) // capacity


def _scatter(act: jax.Array, axes: Axes) -> jax.Array:
  """Adds up the shards' sums `[rows, columns, batch, columns of D]`, to each its own part."""
  if not axes.rows:
    return act
  return lax.psum_scatter(act, Axes.names(axes.rows), tiled=True)


def _swap_columns(act: jax.Array, axes: Axes) -> jax.Array:
  """`[columns, batch, some of D]` to `[batch, D]`."""
  if not axes.columns:
    return act
  n = Axes.number(axes.columns)
  act = _swap(act.reshape(n, -1, act.shape[-1]), axes.columns)
  return jnp.moveaxis(act, 0, 1).reshape(act.shape[1], -1)


def _add_up(act: jax.Array, occ: Occurrences, axes: Axes, dim: int) -> jax.Array:
  """The shards' sums over segments of the whole batch, to this device's part of it."""
  if axes.rows:
    act = lax.psum(act, Axes.names(axes.rows))
  if axes.columns:
    act = lax.all_gather(act, Axes.names(axes.columns), axis=act.ndim - 1, tiled=True)
  own = act.shape[0] // lax.axis_size(axes.order)
  act = lax.dynamic_slice_in_dim(act, lax.axis_index(axes.order) * own, own)
  return act[..., :dim]


# --- the way back --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
  """The gradients of a lookup's activations, `[batch, ..., D]` of each part, and what it read."""

  grads: tuple[jax.Array, ...]
  reads: Reads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
  """Gradients that are at the owners of their rows already.

  `places` int32 `[M]` on each shard, every row at most once, `rows` for unused entries; `values`
  float32 `[M, D]`.
  """

  places: jax.Array
  values: jax.Array


Body = Callable[[Any, list[update.Piece], bool], Any]


class Way(NamedTuple):
  """Where gradients go."""

  layout: Layout
  axes: Axes
  in_order: bool  # one entry per occurrence, in the order of the batch


def fold(
  sent: Sequence[Call | Owned],
  numbers: Sequence[Sequence[int]],
  way: Way,
  body: Body,
  carry: Any,
) -> Any:
  """Brings gradients to the shards that own their rows: `carry = body(carry, pieces, distinct)`.

  Args:
    sent: this device's.
    numbers: the table of each part of each call; nothing for an `Owned`.
    way: the layout, the axes and the order.
    body: gets pieces whose ids are places of this shard, all gradients of a row in one call; and
      whether they are one piece in which no place stands twice. It is called once, or once for
      every round, in each of which there are other rows.
    carry: what it starts from.
  """
  owned = [owned_piece(x) for x in sent if isinstance(x, Owned)]
  routed, others = [], []
  for call, tables in zip(sent, numbers, strict=True):
    if isinstance(call, Owned):
      continue
    for i, (grads, occ) in enumerate(zip(call.grads, call.reads.parts, strict=True)):
      apart = call.reads.route is None or occ.segments is not None or way.in_order
      if apart:
        others.append((grads, occ, tables[i]))
    if call.reads.route is not None and not way.in_order:
      routed.append((call, tables))
  if routed:
    fixed = owned + [_gathered(*other, way) for other in others]
    return _rounds(routed, fixed, way, body, carry)
  if not others:
    return body(carry, owned, len(owned) == 1)
  if not way.in_order and _is_small(others, way):
    return body(carry, [_summed_over_replicas(others, owned, way)], True)
  return body(carry, owned + [_gathered(*other, way) for other in others], False)


def owned_piece(owned: Owned) -> update.Piece:
  """Gradients as a step takes them."""
  return update.Piece(owned.values, Occurrences(owned.places[:, None], None, None))


def _flat_grads(grads: jax.Array, way: Way, width: int) -> jax.Array:
  """`[batch, ..., D]` to this device's columns of all who share its rows, `[m, columns of D]`."""
  axes = way.axes
  grads = grads.astype(jnp.float32).reshape(-1, grads.shape[-1])
  if not axes.columns:
    return grads
  n = Axes.number(axes.columns)
  grads = jnp.pad(grads, ((0, 0), (0, n * width - grads.shape[1])))
  grads = jnp.moveaxis(grads.reshape(-1, n, width), 1, 0)
  return _swap(grads, axes.columns).reshape(-1, width)


def _width(dim: int, axes: Axes) -> int:
  """The columns of a device."""
  return -(-dim // Axes.number(axes.columns))


def _gathered(grads: jax.Array, occ: Occurrences, table: int, way: Way) -> update.Piece:
  """A part as every owner gets it: of all devices, the ids of other owners as padding."""
  axes = way.axes
  if occ.segments is not None or way.in_order:  # segments are whole everywhere
    every = lambda x: lax.all_gather(x, axes.order, tiled=True)
    columns = Columns(Axes.names(axes.columns), grads.shape[-1])
    grads = columns.own(every(grads.astype(jnp.float32)))
    occ = occ if occ.segments is not None else jax.tree.map(every, occ)
  else:
    beyond = lambda x: _gather(_gather(x, axes.rows), axes.replicas)
    grads = beyond(_flat_grads(grads, way, _width(grads.shape[-1], axes)))
    occ = jax.tree.map(lambda x: beyond(_gather(x, axes.columns)), _flat(occ))
  shard, place = way.layout.locate(table, occ.ids)
  ids = jnp.where(shard == _index(axes.rows), place, way.layout.rows)
  return update.Piece(grads, dataclasses.replace(occ, ids=ids))


def _is_small(others, way: Way) -> bool:
  """Whether adding up whole tables over the replicas moves less than their rows would."""
  if way.axes.rows or not way.axes.replicas:
    return False
  if way.axes.columns and any(occ.segments is not None for _, occ, _ in others):
    return False
  ids = sum(occ.ids.size for _, occ, _ in others)
  return way.layout.rows <= ids * Axes.number(way.axes.replicas)


def _summed_over_replicas(
  others: Sequence[tuple[jax.Array, Occurrences, int]], owned: list[update.Piece], way: Way
) -> update.Piece:
  """The gradients of a small table, row by row, added up over the replicas."""
  axes, rows = way.axes, way.layout.rows
  names = Axes.names(axes.replicas)
  pieces = [_own_part(*other, way) for other in others]
  sums, touched = _dense(pieces, rows)
  sums, touched = lax.psum(sums, names), lax.pmax(touched, names)
  if owned:
    more, touched_too = _dense(owned, rows)
    sums, touched = sums + more, jnp.maximum(touched, touched_too)
  ids = jnp.where(touched > 0, jnp.arange(rows, dtype=jnp.int32), rows)
  return update.Piece(sums, Occurrences(ids[:, None], None, None))


def _dense(pieces: list[update.Piece], rows: int) -> tuple[jax.Array, jax.Array]:
  ids = jnp.concatenate([p.occurrences.ids.reshape(-1) for p in pieces])
  touched = jnp.zeros(rows, jnp.int32).at[ids].max(1, mode="drop")
  sums = jnp.zeros((rows, pieces[0].grads.shape[-1]), jnp.float32)
  return update.add_rows(sums, update.addends_of(pieces, ids)), touched


def _own_part(grads: jax.Array, occ: Occurrences, table: int, way: Way) -> update.Piece:
  """A part of this device's own batch, and of those that have other columns of the same rows."""
  axes = way.axes
  if occ.segments is None:
    grads = _flat_grads(grads, way, _width(grads.shape[-1], axes))
    occ = jax.tree.map(lambda x: _gather(x, axes.columns), _flat(occ))
    return update.Piece(grads, _replace_ids(occ, way.layout.locate(table, occ.ids)[1]))
  # The whole batch's occurrences: those of the others are left out.
  own = math.prod(grads.shape[:-1])
  segments = occ.segments - lax.axis_index(axes.order) * own
  inside = (segments >= 0) & (segments < own)
  place = jnp.where(inside, way.layout.locate(table, occ.ids)[1], way.layout.rows)
  occ = Occurrences(place, occ.gains, jnp.where(inside, segments, own), grads.shape[:-1])
  return update.Piece(grads.astype(jnp.float32), occ)


def _replace_ids(occ: Occurrences, ids: jax.Array) -> Occurrences:
  return dataclasses.replace(occ, ids=ids)


# --- rounds --------------------------------------------------------------------------------------


def _rounds(routed, fixed: list[update.Piece], way: Way, body: Body, carry: Any) -> Any:
  """Row gradients by all-to-all; in each round the rows of a range of keys, the same everywhere."""
  layout, axes = way.layout, way.axes
  starts = _Keys.of(layout).starts(layout.shards)
  ends = starts[1:]
  firsts = tuple(call.reads.route.edges[:-1] for call, _ in routed)
  sends = [_sender(call, tables, way) for call, tables in routed]

  def next_limit(firsts):
    """The first key of each owner that does not fit the next round, of any device."""
    limit = ends
    for (call, _), first in zip(routed, firsts, strict=True):
      route = call.reads.route
      behind = first + route.capacity
      key = route.keys.at[behind].get(mode="fill", fill_value=NONE)
      limit = jnp.minimum(limit, jnp.where(behind < route.edges[1:], key, ends))
    return lax.pmin(limit, axes.order)

  def take(low, limit, firsts, carry, is_first):
    pieces, next_firsts = [], []
    for send, (call, _), first in zip(sends, routed, firsts, strict=True):
      window = _window(call.reads.route, first, layout, limit)
      asked = call.reads.route.asked if is_first else _swap(window.asks, axes.rows)
      piece = send(window, asked)
      pieces.append(piece if limit is None else _between(piece, starts[:-1], limit, way))
      next_firsts.append(first + window.number)
    pieces += fixed if limit is None else [_between(p, low, limit, way) for p in fixed]
    return body(carry, pieces, False), tuple(next_firsts)

  if not any(_can_overflow(call, layout) for call, _ in routed):
    return take(None, None, firsts, carry, True)[0]
  fits = functools.reduce(
    jnp.logical_and,
    [call.reads.route.most[0] <= call.reads.route.capacity for call, _ in routed],
  )
  limit = lax.cond(fits, lambda: ends, lambda: next_limit(firsts))
  carry, firsts = take(starts[:-1], limit, firsts, carry, True)

  def more(state):
    low, firsts, carry = state
    limit = next_limit(firsts)
    carry, firsts = take(low, limit, firsts, carry, False)
    return limit, firsts, carry

  return lax.while_loop(lambda state: jnp.any(state[0] < ends), more, (limit, firsts, carry))[2]


def _can_overflow(call: Call, layout: Layout) -> bool:
  route = call.reads.route
  return overflows(layout, route.keys.shape[0], route.capacity)


def _sender(call: Call, tables: Sequence[int], way: Way) -> Callable[..., update.Piece]:
  """A function that sends a round's gradients, summed per row, and returns what was received."""
  layout, axes = way.layout, way.axes
  pieces, shards = [], []
  for grads, occ, table in zip(call.grads, call.reads.parts, tables, strict=True):
    if occ.segments is not None:
      continue
    occ = jax.tree.map(lambda x: _gather(x, axes.columns), _flat(occ))
    grads = _flat_grads(grads, way, _width(grads.shape[-1], axes))
    pieces.append(update.Piece(grads, occ))
    shards.append(layout.locate(table, occ.ids)[0])

  def send(window: _Window, asked: jax.Array) -> update.Piece:
    places = [p.reshape(-1) for p in _buffer_places(call.reads.route, shards, window)]
    width = pieces[0].grads.shape[-1]
    sums = jnp.zeros((window.asks.size, width), jnp.float32)
    sums = update.add_rows(sums, update.addends_of(pieces, jnp.concatenate(places)))
    sums = _swap(sums.reshape(*window.asks.shape, width), axes.rows).reshape(-1, width)
    ids = _gather(asked.reshape(-1), axes.replicas)
    return update.Piece(_gather(sums, axes.replicas), Occurrences(ids[:, None], None, None))

  return send


def _between(piece: update.Piece, low: jax.Array, limit: jax.Array, way: Way) -> update.Piece:
  """Of the rows of this shard, those of a range of keys."""
  me, ids = _index(way.axes.rows), piece.occurrences.ids
  inside = jnp.minimum(ids, way.layout.rows - 1)
  key = _Keys.of(way.layout).make(jnp.full_like(ids, me), inside)
  keep = (ids < way.layout.rows) & (key >= low[me]) & (key < limit[me])
  ids = jnp.where(keep, ids, way.layout.rows)
  return update.Piece(piece.grads, _replace_ids(piece.occurrences, ids))
