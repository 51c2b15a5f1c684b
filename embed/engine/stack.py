"""A stack: tables that are stored in one array, and everything that is done to that array.

Its rows may be split over a mesh; then each operation runs per device and the exchange brings ids
and gradients to the rows. Without a mesh the same operations work on the one shard there is.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from embed import config as config_lib
from embed import initializers
from embed.engine import cost as traffic
from embed.engine import exchange, rounding, update
from embed.engine import lookup as lookup_lib
from embed.engine import mesh as sharding
from embed.engine import storage as views
from embed.engine.exchange import Call, Owned
from embed.engine.layout import Columns, Layout
from embed.engine.lookup import Occurrences, Reads
from embed.engine.mesh import Placement
from embed.row_optimizer import RowOptimizer, Slot
from embed.tools import text

Arrays = dict[str, jax.Array]  # "parameters" and the slots, as stored
Sent = Call | Owned
Makers = tuple[tuple[str, initializers.RowWise], ...]  # of rows, by table


class Load(NamedTuple):
  """How full the buffers of one exchange were."""

  most: jax.Array  # int32 [1]: the most rows of a pair of devices
  capacity: int


class Moment(NamedTuple):
  """What the number of a step decides: the learning rate, the multiplier of gradients or None, and
  the number itself for a stack that `rounds`, or None."""

  rate: jax.Array
  multiplier: jax.Array | None
  number: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
  """Tables of one width, dtype and optimizer in one array.

  A value: stacks whose compiled programs would be the same are equal, and share them, though their
  `TableConfig`s, which compare by identity, are others. Initial values are no part of it.

  `capacity_given`: the rows that a pair of devices exchanges in a round, None for a number that
  follows from the shapes of each call. `exchange`: "all_to_all", "gather", or None for the one that
  moves less.
  """

  name: str
  tables: Mapping[str, config_lib.TableConfig]
  optimizer: RowOptimizer | None
  layout: Layout
  placement: Placement | None = None
  capacity_given: int | None = None
  exchange: str | None = None

  @functools.cached_property
  def _value(self) -> tuple[Any, ...]:
    tables = tuple((name, table.vocabulary_size) for name, table in self.tables.items())
    config = self.config
    rows = (config.dim, config.dtype, config.quantization_config, config.stochastic_rounding)
    where = (self.layout, self.placement, self.capacity_given, self.exchange)
    return (self.name, tables, rows, self.optimizer, where)

  @functools.cached_property
  def _hash(self) -> int:  # asked for at every call of a compiled function
    return hash(self._value)

  def __eq__(self, other: object) -> bool:
    return self is other or (isinstance(other, Stack) and self._value == other._value)

  def __hash__(self) -> int:
    return self._hash

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    return tuple(self.tables)

  @property
  def config(self) -> config_lib.TableConfig:
    return next(iter(self.tables.values()))

  @property
  def dim(self) -> int:
    return self.config.dim

  @property
  def accumulates(self) -> bool:
    """Whether duplicates are summed before the update."""
    return self.optimizer is None or self.optimizer.use_gradient_accumulation

  @property
  def is_split(self) -> bool:
    """Whether rows are on several devices, and have to be exchanged."""
    return self.layout.shards > 1

  @property
  def slots(self) -> dict[str, Slot]:
    return {} if self.optimizer is None else self.optimizer.slots(self.dim)

  def number(self, table: str) -> int:
    """A table's number in the layout."""
    return self.names.index(table)

  # --- arrays --------------------------------------------------------------------------------

  def make(self, keys: Mapping[str, jax.Array]) -> Arrays:
    """Initial rows and slots, each device's own rows made by it; `keys` by table.

    Raises:
      MemoryError: if they do not fit.
    """
    try:
      return {"parameters": self._make_rows(keys), **self._make_slots(keys)}
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      raise MemoryError(self._does_not_fit()) from error

  def _does_not_fit(self) -> str:
    rows = self.layout.rows * self.width * self.config.dtype.itemsize
    places = [self.layout.rows * (1 if s.per_row else self.width) for s in self.slots.values()]
    itemsizes = [np.dtype(slot.dtype).itemsize for slot in self.slots.values()]
    total = rows + sum(n * size for n, size in zip(places, itemsizes, strict=True))
    slots = f", {text.size(total)} with slots ({', '.join(self.slots)})" if self.slots else ""
    tables = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
    return (
      f"Out of memory while making {'tables' if len(self.names) > 1 else 'table'} {tables}: rows "
      f"take {text.size(rows)}{slots}, on each device. Print embed.plan(features, mesh, batch, "
      "optimizer, hbm_bytes=...) to see what every table takes, and SparseEmbed(plan=...) spreads "
      "them over the mesh so that they fit. Rows of bfloat16, or an optimizer of fewer slots, such "
      "as embed.rowwise_adagrad, take less."
    )

  def _make_rows(self, keys: Mapping[str, jax.Array]) -> jax.Array:
    row_wise: dict[str, initializers.RowWise] = {}
    whole = {}
    for name, table in self.tables.items():
      if table.initializer is None:
        row_wise[name] = initializers.truncated_normal_rows
      elif isinstance(table.initializer, initializers.RowWise):
        row_wise[name] = table.initializer
      else:
        shape = (table.vocabulary_size, table.dim)
        rows = table.initializer(keys[name], shape, table.dtype)
        if np.shape(rows) != shape:
          raise ValueError(
            f"Table {name!r}: its initializer returned {np.shape(rows)}, not {shape}."
          )
        whole[name] = rows
    makers = tuple(row_wise.items())
    rows = _drawing(self, makers, self.config.dtype)({name: keys[name] for name in row_wise})
    return store_all([self], [{"rows": rows}], [{"rows": whole}])[0]["rows"]

  def _own_rows(self, makers: Makers, dtype: Any, keys: Mapping[str, jax.Array]) -> jax.Array:
    """This device's rows, of the tables that are made row by row."""
    rows = jnp.zeros((self.layout.rows, self.width), dtype)
    for name, maker in makers:
      number, table = self.number(name), self.tables[name]
      ids = self.layout.own_ids(number, self._shard())
      draw = lambda ids, maker=maker, key=keys[name]: self.columns.own(
        maker.rows(key, ids, self.dim, dtype)
      )
      start = self.layout.offsets[number]
      rows = initializers.fill(rows, start, draw, ids, table.vocabulary_size)
    return rows

  def _make_slots(self, keys: Mapping[str, jax.Array]) -> Arrays:
    made = {}
    inits = dict(self.optimizer.slot_init) if self.optimizer is not None else {}
    for i, (slot_name, slot) in enumerate(self.slots.items()):
      init = inits.get(slot_name)
      seeds = {name: jax.random.fold_in(key, i) for name, key in keys.items()}
      if isinstance(init, initializers.RowWise) and not slot.per_row:
        makers = tuple((name, init) for name in self.tables)
        made[slot_name] = _drawing(self, makers, slot.dtype)(seeds)
        continue
      value = _filling(self, slot)()
      if init is not None:
        whole = {}
        for name, table in self.tables.items():
          shape = (table.vocabulary_size,) if slot.per_row else (table.vocabulary_size, self.dim)
          whole[name] = jnp.asarray(init(seeds[name], shape, slot.dtype), slot.dtype)
        value = store_all([self], [{"slot": value}], [{"slot": whole}])[0]["slot"]
      made[slot_name] = value
    return made

  def read(self, stored: jax.Array, table: str, compact: bool = False) -> jax.Array:
    """A table or slot as users see it, its rows in order: `[V, D]` or `[V]`.

    On a mesh the result is split over devices as evenly as its shape allows; see `views`. In a
    compact view the columns stand as often as there are copies of them: see `reshaped`.
    """
    number, size = self.number(table), self.tables[table].vocabulary_size
    if self.placement is None:
      start = self.layout.offsets[number]
      return stored if len(self.tables) == 1 else stored[start : start + size]
    view = self.view(number, stored.ndim, compact)
    f = functools.partial(views.read, self.layout, number, self.dim, view)
    return self.placement.run(f, (self._spec(stored.ndim),), view.spec)(stored)

  def store(self, stored: jax.Array, tables: Mapping[str, Any], compact: bool = False) -> jax.Array:
    """The stored array with some tables replaced by arrays in the form of `read`."""
    for name, value in tables.items():
      number = self.number(name)
      if self.placement is None:
        value = jnp.array(value, stored.dtype, copy=True)  # a donated step deletes what we store
        start = self.layout.offsets[number]
        whole = len(self.tables) == 1
        stored = value if whole else jax.lax.dynamic_update_slice_in_dim(stored, value, start, 0)
      else:
        view, spec = self.view(number, stored.ndim, compact), self._spec(stored.ndim)
        f = functools.partial(views.write, self.layout, number, self.dim, view)
        stored = self.placement.run(f, (spec, view.spec), spec)(stored, value)
    return stored

  def shapes(
    self, arrays: Arrays, table: str, compact: bool = False
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """What `read_all` gives of a table and its slots, as shapes with shardings."""
    number, size = self.number(table), self.tables[table].vocabulary_size

    def shape(stored: Any) -> jax.ShapeDtypeStruct:
      where: Any
      if self.placement is not None:
        where = self._where(self.view(number, stored.ndim, compact))
        where = self.placement.sharding(where) if isinstance(where, P) else where
      else:
        where = getattr(stored, "sharding", None)
      dims = (size, self.dim)[: stored.ndim]
      return jax.ShapeDtypeStruct(dims, stored.dtype, sharding=where)

    return {key: shape(arrays[key]) for key in ("parameters", *self.slots)}

  def view(self, number: int, ndim: int, compact: bool = False) -> views.View:
    """How a table, or a slot of one value per row, is split where users see it."""
    assert self.placement is not None
    return views.choose(self.layout, number, self.dim, ndim, self.placement, compact)

  def _where(self, view: views.View) -> Any:
    """A view's spec, or its sharding where the mesh of the storage has none for it."""
    assert self.placement is not None
    if view.kind != "columns" or view.parts == self.layout.shards:
      return view.spec
    return self.placement.compact(view.kept, view.parts)

  def reshaped(self, x: jax.Array, table: str) -> jax.Array:
    """`[V, D]` or `[V]` of what `read` gives of a compact view; outside of jitted functions."""
    assert self.placement is not None
    where = self._where(self.view(self.number(table), x.ndim, compact=True))
    return x if isinstance(where, P) else self.placement.same_parts(x, self.dim, where)

  def place(self, value: Any, table: str, stored: jax.Array, compact: bool) -> jax.Array:
    """A table or slot as `store` takes it."""
    assert self.placement is not None
    view = self.view(self.number(table), stored.ndim, compact)
    where = self._where(view)
    value = self.placement.place_whole(value, stored.dtype, where)
    if isinstance(where, P):
      return value
    columns = self.dim // view.parts * self.layout.shards
    return self.placement.same_parts(value, columns, view.spec)

  def whole(self, stored: jax.Array, table: str) -> jax.Array:
    """A table on every device, for scores against all of its rows."""
    return self.everywhere(self.read(stored, table))

  def everywhere(self, x: jax.Array) -> jax.Array:
    """The same array on every device."""
    return x if self.placement is None else self.placement.put(x, P())

  # --- lookup ----------------------------------------------------------------------------------

  def look_up(
    self, rows: jax.Array, parts: Sequence[Occurrences], tables: Sequence[str]
  ) -> tuple[list[jax.Array], Reads, Load | None]:
    """Activations `[*batch, D]` of each part, what was read, and how full the buffers were."""
    quantization = self.config.quantization_config
    numbers = [self.number(name) for name in tables]
    reads = Reads(tuple(parts), tuple(tables))
    if self.placement is None:
      acts = [
        lookup_lib.lookup(rows, self._in_stack(occ, t), occ.batch, quantization)
        for occ, t in zip(parts, numbers, strict=True)
      ]
      return acts, reads, None
    some = [i for i, occ in enumerate(parts) if occ.ids.size]
    if len(some) < len(parts):  # nothing to exchange, and collectives want something
      return self._look_up_some(rows, parts, tables, some)
    padded = [self._pad(occ) for occ in parts]
    capacity = self.capacity(self._demand(padded, numbers))
    find = functools.partial(
      exchange.look_up,
      numbers=numbers,
      layout=self.layout,
      axes=self.placement.axes,
      dim=self.dim,
      capacity=capacity,
      quantization=quantization,
    )
    work = self.placement.work
    specs = tuple(P() if occ.segments is not None else work for occ in padded)
    out_specs = exchange.Found(work, self._route_spec(), P())  # type: ignore[arg-type]
    if capacity is None:
      out_specs = out_specs._replace(route=None)
    found = self.placement.run(find, (self._spec(2), specs), out_specs)(rows, tuple(padded))
    acts = [self._cut(act, occ.batch) for act, occ in zip(found.activations, parts, strict=True)]
    load = None if capacity is None else Load(found.most, capacity)
    return acts, dataclasses.replace(reads, route=found.route), load

  def _look_up_some(self, rows, parts, tables, some: Sequence[int]):
    """As `look_up`, where only `some` of the parts have ids."""
    acts = [jnp.zeros((*occ.batch, self.dim), self.config.dtype) for occ in parts]
    reads, load = Reads(tuple(parts), tuple(tables)), None
    if some:
      found, mine, load = self.look_up(rows, [parts[i] for i in some], [tables[i] for i in some])
      reads = dataclasses.replace(reads, route=mine.route)
      for i, act in zip(some, found, strict=True):
        acts[i] = act
    return acts, reads, load

  def beside(self, arrays: Any) -> Any:
    """Arrays `[batch, ...]` that are computed with activations, split over devices as these."""
    if self.placement is None:
      return arrays
    return jax.tree.map(lambda x: self._cut(x, x.shape[:1]), arrays)

  def _in_stack(self, occ: Occurrences, table: int) -> Occurrences:
    if len(self.tables) == 1:
      return occ
    return dataclasses.replace(occ, ids=self.layout.locate(table, occ.ids)[1])

  def capacity(self, demand: traffic.Demand) -> int | None:
    """The capacity of an exchange; None gathers."""
    keeps_order = self.optimizer is not None and not (self.optimizer.lazy and self.accumulates)
    way = "gather" if keeps_order else self.exchange
    return traffic.choose(demand, self.way, way, self.capacity_given)

  @property
  def way(self) -> traffic.Way:
    """What the bytes of an exchange depend on."""
    assert self.placement is not None
    size = self.config.dtype.itemsize
    return traffic.Way(self.layout, self.width, size, self.placement.replicas)

  def _demand(self, parts: Sequence[Occurrences], numbers: Sequence[int]) -> traffic.Demand:
    """What a device asks of this stack, segments apart."""
    assert self.placement is not None
    ids, activations = [0] * len(self.tables), 0
    for occ, number in zip(parts, numbers, strict=True):
      if occ.segments is None:
        ids[number] += occ.ids.size
        activations += math.prod(occ.batch)
    return self.placement.demand(ids, activations)

  # --- update ----------------------------------------------------------------------------------

  @property
  def rounds(self) -> bool:
    """Whether new rows are rounded at random."""
    return self.config.stochastic_rounding and self.config.dtype != np.float32

  def at(self, step: Any) -> Moment:
    """What the number of a step decides; None where nothing depends on it."""
    assert self.optimizer is not None
    rate = jnp.asarray(self.optimizer.learning_rate_at(step), jnp.float32)
    multiplier = self.optimizer.gradient_multiplier_at(step)
    return Moment(
      rate,
      None if multiplier is None else jnp.asarray(multiplier, jnp.float32),
      jnp.asarray(step, jnp.int32) if self.rounds else None,
    )

  def step(self, arrays: Arrays, sent: Sequence[Sent], moment: Moment) -> Arrays:
    """One optimizer step from gradients; rows that were not looked up keep their bits."""
    assert self.optimizer is not None
    optimizer = self.optimizer
    slots = {k: v for k, v in arrays.items() if k != "parameters"}
    sent = _not_empty(sent)
    sent = sent if moment.multiplier is None else scaled(sent, moment.multiplier)

    def step(table, slots, moment, *sent):
      write = functools.partial(self._round, moment.number) if self.rounds else None
      rule = update.Rule(optimizer, moment.rate, write, self.columns)

      def body(state, pieces, distinct):
        table, slots = state
        return update.step(table, slots, pieces, rule, distinct_ids=distinct)

      return self._fold(sent, body, (table, slots))

    if self.placement is not None:
      sent, specs = self._inputs(sent)
      state = (self._spec(2), {k: self._spec(v.ndim) for k, v in slots.items()})
      step = self.placement.run(step, (*state, P(), *specs), state)
    table, slots = step(arrays["parameters"], slots, moment, *sent)
    return {"parameters": table, **slots}

  def _round(self, number, rows: jax.Array, places: jax.Array, time: jax.Array | int) -> jax.Array:
    """New rows float32 `[n, width]` as they are stored at some places of this device."""
    keys = jnp.zeros(places.shape, jnp.uint32)
    for i, (name, table) in enumerate(self.tables.items()):
      ids = self.layout.ids(i, self._shard(), places)
      mine = rounding.key(ids, zlib.crc32(name.encode()), number, time)
      keys = jnp.where(ids < table.vocabulary_size, mine, keys)
    columns = jnp.arange(self.width, dtype=jnp.uint32)
    if self.columns.axes:
      columns += jax.lax.axis_index(self.columns.axes).astype(jnp.uint32) * self.width
    return rounding.to_bfloat16(rows, rounding.noise(keys, columns))

  def squared_norm(self, sent: Sequence[Sent]) -> jax.Array:
    """The sum of the squares of the summed rows."""

    def body(total, pieces, distinct):
      rows = _summed(pieces, self.layout.rows, distinct)
      return total + jnp.sum(jnp.square(rows.values))

    def norm(*sent):
      total = self._fold(sent, body, jnp.zeros(()), in_order=False)
      placement = self.placement
      names = () if placement is None else (*placement.rows, *placement.columns)
      return jax.lax.psum(total, names) if names else total

    sent = _not_empty(sent)
    if not sent:
      return jnp.zeros(())
    if self.placement is None:
      return norm(*sent)
    given, specs = self._inputs(sent)
    return self.placement.run(norm, specs, P())(*given)

  def sum_rows(self, sent: Sequence[Sent]) -> Owned:
    """The summed gradients of all touched rows, at their owners."""
    sent = _not_empty(sent)
    if not sent:
      return Owned(jnp.zeros(0, jnp.int32), jnp.zeros((0, self.width), jnp.float32))
    if self.placement is None:
      once = lambda _, pieces, distinct: Owned(*_summed(pieces, self.layout.rows, distinct)[:2])
      return self._fold_here(sent, once, None)
    size = self._most_touched(sent)

    def body(carry, pieces, distinct):
      owned, number = carry
      if distinct:  # in one call, so that there is nothing to add to
        return Owned(pieces[0].occurrences.ids[:, 0], pieces[0].grads), number
      rows = _summed(pieces, self.layout.rows, distinct)
      put = lambda to, x: jax.lax.dynamic_update_slice_in_dim(
        jnp.pad(to, [(0, x.shape[0])] + [(0, 0)] * (x.ndim - 1)), x, number, 0
      )[:size]
      values = jnp.where((rows.ids < self.layout.rows)[:, None], rows.values, 0)
      owned = Owned(
        # Behind the entries so far there is nothing yet; of a round's, the first ones are used.
        put(owned.places, rows.ids),
        put(owned.values, values),
      )
      return owned, number + rows.number

    def total(*sent):
      places = jnp.full(size, self.layout.rows, jnp.int32)
      none = Owned(places, jnp.zeros((size, self.width), jnp.float32))
      return self._fold(sent, body, (none, jnp.int32(0)), in_order=False)[0]

    given, specs = self._inputs(sent)
    return self.placement.run(total, specs, self._owned_spec())(*given)

  def table_rows(self, sent: Sequence[Sent], table: str) -> tuple[jax.Array, jax.Array]:
    """A table's row gradients as users see them: ids `[N]` and values `[N, D]`."""
    number, size = self.number(table), self.tables[table].vocabulary_size
    sent = _not_empty(of_table(sent, table))
    if not sent:
      return jnp.zeros(0, jnp.int32), jnp.zeros((0, self.dim), jnp.float32)
    calls = [call for call in sent if isinstance(call, Call)]
    if len(calls) == len(sent) and not self.accumulates:
      expand = lambda calls: update.expand_rows(_pieces(calls), size)[:2]
      return self._per_device(expand, (P(),), P())(calls)
    if len(calls) == len(sent) and self.placement is None:
      return update.sum_rows(_pieces(calls), size)[:2]
    owned = sent[0] if len(sent) == 1 and isinstance(sent[0], Owned) else self.sum_rows(sent)

    def pick(owned):
      ids = self.layout.ids(number, self._shard(), owned.places)
      return ids, jnp.where((ids < size)[:, None], owned.values, 0)

    if self.placement is None:
      return pick(owned)
    spec = self._owned_spec()
    ids, values = self.placement.run(pick, (spec,), (spec.places, spec.values))(owned)
    if values.shape[1] != self.dim:  # columns that fill up the last device's
      values = self.placement.put(values, spec.places)[:, : self.dim]
    return ids, values

  def own(self, ids: jax.Array, values: jax.Array, table: str) -> Owned:
    """The inverse of `table_rows`, for values that were changed and ids that were not."""
    number = self.number(table)
    put = lambda ids, values: Owned(self.layout.locate(number, ids)[1], values)
    if self.placement is None:
      return put(ids, values)
    spec = self._owned_spec()
    filling = self.width * self.placement.column_shards - self.dim
    if filling:
      values = jnp.pad(self.placement.put(values, spec.places), ((0, 0), (0, filling)))
    return self.placement.run(put, (spec.places, spec.values), spec)(ids, values)

  def _most_touched(self, sent: Sequence[Sent]) -> int:
    size = lambda x: (
      x.places.size if isinstance(x, Owned) else sum(occ.ids.size for occ in x.reads.parts)
    )
    return min(self.layout.rows, sum(map(size, sent)))

  def _fold_here(self, sent: Sequence[Sent], body, carry):
    """`exchange.fold` without a mesh."""
    pieces = []
    for call in sent:
      if isinstance(call, Owned):
        pieces.append(exchange.owned_piece(call))
        continue
      for grads, occ, name in zip(call.grads, call.reads.parts, call.reads.tables, strict=True):
        pieces.append(update.Piece(grads, self._in_stack(occ, self.number(name))))
    distinct = len(sent) == 1 and isinstance(sent[0], Owned)
    return body(carry, pieces, distinct)

  def _fold(self, sent, body, carry, in_order: bool | None = None):
    if self.placement is None:
      return self._fold_here(sent, body, carry)
    numbers = [
      () if isinstance(x, Owned) else [self.number(name) for name in x.reads.tables] for x in sent
    ]
    in_order = not self.accumulates if in_order is None else in_order
    way = exchange.Way(self.layout, self.placement.axes, in_order)
    return exchange.fold(sent, numbers, way, body, carry)

  # --- per device --------------------------------------------------------------------------------

  def _inputs(self, sent: Sequence[Sent]) -> tuple[list[Any], tuple[Any, ...]]:
    """What is sent, padded to all devices, and the specs of its arrays."""
    assert self.placement is not None
    given: list[Any] = []
    specs: list[Any] = []
    for x in sent:
      if isinstance(x, Owned):
        given.append(x)
        specs.append(self._owned_spec())
        continue
      some = [i for i, occ in enumerate(x.reads.parts) if occ.ids.size]
      parts = tuple(self._pad(x.reads.parts[i]) for i in some)
      grads = tuple(self._pad_grads(x.grads[i]) for i in some)
      tables, work = tuple(x.reads.tables[i] for i in some), self.placement.work
      given.append(Call(grads, Reads(parts, tables, x.reads.route)))
      part_specs = tuple(P() if occ.segments is not None else work for occ in parts)
      route_spec = None if x.reads.route is None else self._route_spec()
      reads_spec = Reads(part_specs, tables, route_spec)  # type: ignore[arg-type]
      specs.append(Call(work, reads_spec))  # type: ignore[arg-type]
    return given, tuple(specs)

  def _pad(self, occ: Occurrences) -> Occurrences:
    """Occurrences of a batch of which every device has an equal part."""
    if occ.segments is not None:
      batch, *rest = occ.batch
      return dataclasses.replace(occ, shape=(batch + self._missing(batch), *rest))
    lead = lambda x: x[None] if x.ndim == 1 else x
    pad = lambda x, value: self._pad_array(lead(x), value)
    gains = None if occ.gains is None else pad(occ.gains, 0)
    return Occurrences(pad(occ.ids, np.iinfo(np.int32).max), gains, None)

  def _pad_grads(self, grads: jax.Array) -> jax.Array:
    return self._pad_array(grads[None] if grads.ndim == 1 else grads, 0)

  def _pad_array(self, x: jax.Array, value: float) -> jax.Array:
    assert self.placement is not None
    missing = self._missing(x.shape[0])
    if not missing:
      return x
    x = self.placement.put(x, P())
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

  def _cut(self, act: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Without the padding, split over the batch's axes if they divide it."""
    assert self.placement is not None
    first = batch[0] if batch else 1
    if act.shape[0] != first:
      act = self.placement.put(act, P())[:first]
    parts = math.prod(self.placement.mesh.shape[name] for name in self.placement.batch)
    split = batch and first % parts == 0
    act = self.placement.put(act, P(self.placement.batch) if split else P())
    return act if batch else act[0]

  def _missing(self, batch: int) -> int:
    assert self.placement is not None
    return -batch % self.placement.devices()

  def _per_device(self, f, in_specs, out_specs):
    return f if self.placement is None else self.placement.run(f, in_specs, out_specs)

  def _spec(self, ndim: int) -> Any:
    return None if self.placement is None else self.placement.array(ndim)

  def _route_spec(self) -> Any:
    assert self.placement is not None
    work = self.placement.work
    return exchange.Route(work, work, work, work, P())  # type: ignore[arg-type]

  def _owned_spec(self) -> Any:
    return Owned(self._spec(1), self._spec(2))

  def _shard(self) -> jax.Array | int:
    rows = () if self.placement is None else self.placement.rows
    return jax.lax.axis_index(rows) if rows else 0

  @property
  def width(self) -> int:
    """The columns on a device."""
    return self.dim if self.placement is None else -(-self.dim // self.placement.column_shards)

  @property
  def columns(self) -> Columns:
    """The columns of a row on several devices, if they are."""
    return Columns(() if self.placement is None else self.placement.columns, self.dim)


# Compiled once for equal stacks. Initializers are often made with their config, for one layer: only
# the last few programs are kept.


@functools.lru_cache(maxsize=16)
def _drawing(
  stack: Stack, makers: Makers, dtype: Any
) -> Callable[[Mapping[str, jax.Array]], jax.Array]:
  """A function of keys by table: stored rows that are made row by row, zeros of other tables."""
  own = functools.partial(stack._own_rows, makers, dtype)
  return jax.jit(stack._per_device(own, (P(),), stack._spec(2)))


@functools.lru_cache(maxsize=16)
def _filling(stack: Stack, slot: Slot) -> Callable[[], jax.Array]:
  """A function that returns a slot as it is stored, full of its initial value."""
  shape = (stack.layout.rows,) if slot.per_row else (stack.layout.rows, stack.width)
  make = lambda: jnp.full(shape, slot.initial, slot.dtype)
  return jax.jit(stack._per_device(make, (), stack._spec(len(shape))))


def _summed(pieces: list[update.Piece], rows: int, distinct: bool) -> update.SummedRows:
  if not distinct:
    return update.sum_rows(pieces, rows)
  ids = pieces[0].occurrences.ids[:, 0]
  return update.SummedRows(ids, pieces[0].grads, jnp.int32(ids.shape[0]))


def of_table(sent: Sequence[Sent], table: str) -> list[Sent]:
  """What was sent of one table; what is with the owners stays together."""
  found: list[Sent] = []
  for x in sent:
    if isinstance(x, Owned) or set(x.reads.tables) == {table}:
      found.append(x)
    elif table in x.reads.tables:
      mine = [i for i, name in enumerate(x.reads.tables) if name == table]
      # Without the route, which is that of all tables together.
      reads = Reads(tuple(x.reads.parts[i] for i in mine), (table,) * len(mine))
      found.append(Call(tuple(x.grads[i] for i in mine), reads))
  return found


def scaled(sent: Sequence[Sent], factor: jax.Array) -> list[Sent]:
  """Gradients times a number, in float32: before the sum or after it is the same."""
  times = lambda x: x.astype(jnp.float32) * sharding.scalar_for(x, factor)

  def one(x: Sent) -> Sent:
    if isinstance(x, Owned):
      return dataclasses.replace(x, values=times(x.values))
    return dataclasses.replace(x, grads=tuple(map(times, x.grads)))

  return [one(x) for x in sent]


def _not_empty(sent: Sequence[Sent]) -> list[Sent]:
  """Without calls that looked up nothing at all."""
  is_empty = lambda x: isinstance(x, Call) and not any(occ.ids.size for occ in x.reads.parts)
  return [x for x in sent if not is_empty(x)]


def _pieces(sent: Sequence[Call]) -> list[update.Piece]:
  pairs = [pair for x in sent for pair in zip(x.grads, x.reads.parts, strict=True)]
  return [update.Piece(grads, occ) for grads, occ in pairs if occ.ids.size]


# All tables in one program: of many that communicate, started one after another, XLA:CPU may run
# so many at a time that none has threads enough to end.


def read_all(
  stacks: Sequence[Stack], arrays: Sequence[Arrays], compact: bool = False
) -> dict[str, Arrays]:
  """Every table and slot as users see it, `{table: {"parameters": array, slot: array}}`.

  `compact`: in a view of less memory, where there is one, outside of jitted functions.
  """
  found: dict[str, Arrays] = {}
  spread = [i for i, stack in enumerate(stacks) if stack.placement is not None]
  compact = compact and not _traced(arrays)
  for stack, stored in zip(stacks, arrays, strict=True):
    if stack.placement is None:
      found |= _read_stack(stack, stored)
  if spread:
    mine = tuple(stacks[i] for i in spread)
    read = _read_spread(mine, [arrays[i] for i in spread], compact)
    if compact:
      of = {name: stack for stack in mine for name in stack.tables}
      read = {
        name: {key: of[name].reshaped(x, name) for key, x in table.items()}
        for name, table in read.items()
      }
    found |= read
  return found


def _traced(arrays: Any) -> bool:
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))


def _read_stack(stack: Stack, stored: Arrays, compact: bool = False) -> dict[str, Arrays]:
  keys = ("parameters", *stack.slots)
  return {name: {k: stack.read(stored[k], name, compact) for k in keys} for name in stack.tables}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _read_spread(
  stacks: tuple[Stack, ...], arrays: Sequence[Arrays], compact: bool
) -> dict[str, Arrays]:
  pairs = zip(stacks, arrays, strict=True)
  read = [_read_stack(stack, stored, compact) for stack, stored in pairs]
  return {name: tables[name] for tables in read for name in tables}


Given = Mapping[str, Mapping[str, Any]]  # for "parameters" and each slot, arrays by table


def store_all(
  stacks: Sequence[Stack], arrays: Sequence[Arrays], given: Sequence[Given]
) -> list[Arrays]:
  """The stored arrays with some tables and slots replaced by arrays in the form of `read_all`."""
  found = [dict(stored) for stored in arrays]
  compact = not _traced((arrays, given))
  places: list[tuple[int, str]] = []
  olds, news = [], []
  for i, stack in enumerate(stacks):
    for key, tables in given[i].items():
      old = arrays[i][key]
      if stack.placement is None:
        found[i][key] = stack.store(old, tables)
      elif tables:
        places.append((i, key))
        olds.append(old)
        news.append({name: stack.place(x, name, old, compact) for name, x in tables.items()})
  if places:
    spread = _store_spread(tuple(stacks[i] for i, _ in places), olds, news, compact)
    for (i, key), value in zip(places, spread, strict=True):
      found[i][key] = value
  return found


@functools.partial(jax.jit, static_argnums=(0, 3))
def _store_spread(
  stacks: tuple[Stack, ...], stored: Any, given: Any, compact: bool
) -> list[jax.Array]:
  each = zip(stacks, stored, given, strict=True)
  return [stack.store(old, tables, compact) for stack, old, tables in each]
