"""Storing tables together and spreading them over a mesh, and the cost of it.

A **strategy** says how a table is spread over mesh axes: "mod" and "div" split its rows, "column"
its columns, "replicated" nothing. Tables of equal width, dtype, quantization, optimizer and
settings are stacked.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from embed import combiners, inputs, structure
from embed.config import MAX_VOCABULARY_SIZE, FeatureConfig, TableConfig
from embed.engine import cost, host, packing, route
from embed.engine.bags import Bags
from embed.engine.cost import EXCHANGES
from embed.engine.layout import Layout
from embed.engine.mesh import LOCAL, Placement, as_names
from embed.engine.stack import StackSpec
from embed.kernels import sparse_core
from embed.optimizers import RowOptimizer

MEMORIES = ("device", "host")
STRATEGIES = ("mod", "div", "column", "replicated")
ALONE = 1 << 24  # bytes; a larger table is not stacked on one device
REPLICATED = 1 << 20  # bytes of the largest table that `embed.plan` replicates
LANES = 128  # columns that a device keeps at least where `embed.plan` splits columns


class TablePlan:
  """Storage and exchange of one table. Set the fields before the layer is built.

  Tables with equal settings (and width, dtype, quantization and optimizer) are stored together.

  Args:
    strategy: "mod", "div", "column" or "replicated".
    axis: the mesh axes that the table is split over.
    column_axis: mesh axes that columns are split over in addition.
    exchange: "all_to_all" or "gather". A plan suggests the one that moves less for its example
      batch, and each batch chooses for itself unless the field is set. It applies where rows are
      split. An optimizer that steps once per occurrence, or moves every row, always gathers.
    capacity: the rows that a pair of devices exchanges in a round of an all-to-all. A plan suggests
      the number for its example batch, and each batch computes its own unless the field is set. A
      number that is too small costs rounds, but never drops an id.
    sparse_core: whether the SparseCores of TPUs read and write the rows, where they can: on v5p,
      v6e and TPU7x, float32 rows of up to 2,048 columns on a device, packed or a multiple of 128
      wide. None is what the environment variable `SPARSE_EMBED_SPARSE_CORES` says, 1 or 0, and
      without it False: the kernels are compiled for these chips and checked by emulation, but no
      TPU has run them.
    packed: whether rows whose width is not a multiple of 128 columns are stored side by side, in
      lines of 128, as 8, 16, 32, 64 or a multiple of 128 columns each. That changes where rows are
      in memory, and nothing else. None is what the environment variable `SPARSE_EMBED_PACKED` says,
      1 or 0, and without it True on TPUs, which would copy such a table in every step. A table
      whose optimizer moves every row in a step is never packed.
    memory: "device", or "host" for a table and slots that stay in the memory of the host: only rows
      of the batch cross to the device and back, and `capacity` does not apply. Such a table is in
      no stack with others. Reading or loading all of it, as a checkpoint does, needs no memory of
      the device on one device, or with the strategy "div" and rows that divide by the shards.
      `embed.plan` chooses "host" where tables do not fit `hbm_bytes`.

  Raises:
    ValueError: for a value that a field does not accept.
    AttributeError: for an unknown field.

  >>> entry = embed.TablePlan(strategy="div")
  >>> entry.capacity = 512
  >>> entry.strategy, entry.capacity, entry.exchange
  ('div', 512, None)
  """

  set: dict[str, Any]  # decisions, which go into JSON
  suggested: dict[str, Any]  # values for the example batch, which do not

  _FIELDS = (
    "strategy", "axis", "column_axis", "exchange", "capacity", "sparse_core", "packed", "memory",
  )  # fmt: skip

  def __init__(
    self,
    strategy: str = "mod",
    axis: str | Sequence[str] = (),
    column_axis: str | Sequence[str] = (),
    exchange: str | None = None,
    capacity: int | None = None,
    sparse_core: bool | None = None,
    packed: bool | None = None,
    memory: str = "device",
  ):
    self.__dict__.update(set={}, suggested={})
    values = (strategy, axis, column_axis, exchange, capacity, sparse_core, packed, memory)
    for name, value in zip(self._FIELDS, values, strict=True):
      setattr(self, name, value)

  def __setattr__(self, name: str, value: Any) -> None:
    if name not in self._FIELDS:
      raise AttributeError(f"TablePlan has no field {name!r}; its fields are {self._FIELDS}.")
    if name == "strategy" and value not in STRATEGIES:
      raise ValueError(f"Sharding: strategy must be one of {STRATEGIES}. Got {value!r}.")
    if name == "exchange" and value not in (None, *EXCHANGES):
      raise ValueError(f"exchange must be one of {EXCHANGES} or None. Got {value!r}.")
    if name == "capacity" and value is not None:
      if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"capacity must be a positive int or None. Got {value!r}.")
      value = int(value)
    if name == "memory" and value not in MEMORIES:
      raise ValueError(f"memory must be one of {MEMORIES}. Got {value!r}.")
    if name in ("sparse_core", "packed") and value is not None:
      if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True, False or None. Got {value!r}.")
      value = bool(value)
    if name in ("axis", "column_axis"):
      value = as_names(value)
    self.set[name] = value

  def __getattr__(self, name: str) -> Any:
    if name not in self._FIELDS:
      raise AttributeError(f"TablePlan has no field {name!r}; its fields are {self._FIELDS}.")
    value = self.set[name]
    return self.suggested.get(name) if value is None else value

  def copy(self) -> "TablePlan":
    """A copy with the same decisions and suggestions."""
    new = TablePlan(**self.set)
    new.suggested.update(self.suggested)
    return new

  def __repr__(self) -> str:
    fields = (f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
    return f"TablePlan({', '.join(fields)})"


@dataclasses.dataclass(frozen=True)
class StackCost:
  """The cost of a stack on a device in a training step, an entry of `Plan.costs()`.

  Attributes:
    stack: the name of the stack.
    tables: the names of its tables.
    exchange: "all_to_all", "gather", "sum" (of whole replicated tables), "columns" or "none".
    capacity: rows that a pair of devices exchanges in a round of an all-to-all, or None.
    rows: bytes of the tables.
    slots: bytes of the optimizer's state.
    buffers: bytes of the exchange's buffers.
    moved: bytes that the device receives per step.
    memory: "device" or "host", where rows and slots are.

  >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
  >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
  >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
  >>> plan["movie"].strategy = "mod"
  >>> plan.costs()[0].rows  # 125 of the 1000 rows, 8 columns of 4 bytes
  4000
  """

  stack: str
  tables: tuple[str, ...]
  exchange: str
  capacity: int | None
  rows: int
  slots: int
  buffers: int
  moved: int
  memory: str = "device"


class Tables(NamedTuple):
  """The tables to store: configs and optimizers by name, and the mesh (None for one device)."""

  configs: Mapping[str, TableConfig]
  optimizers: Mapping[str, RowOptimizer | None]
  mesh: Any
  batch_axis: Sequence[str] | None

  def kind(self, name: str) -> Any:
    """A key that is equal for tables that can be stacked; a table that cannot has its own name."""
    table = self.configs[name]
    if self.mesh is None and table.vocabulary_size * table.dim * table.dtype.itemsize > ALONE:
      return name
    rows = (table.dim, table.dtype, table.quantization_config, table.stochastic_rounding)
    return (*rows, self.optimizers[name])

  def placement(self, entry: TablePlan) -> Placement:
    """The placement of a table that its entry decides."""
    if self.mesh is None:
      return LOCAL
    return place(self.mesh, entry.strategy, entry.axis, entry.column_axis, self.batch_axis)

  def stack(self, label: str, names: Sequence[str], entry: TablePlan) -> StackSpec:
    """The stack of these tables, with the settings of an entry."""
    table, placement = self.configs[names[0]], self.placement(entry)
    sizes = tuple(self.configs[name].vocabulary_size for name in names)
    storage = self._storage(names[0], entry)
    return StackSpec(
      label,
      tuple(names),
      Layout(sizes, placement.shards, entry.strategy == "div", self._unit(names[0], entry)),
      table.dim,
      table.dtype,
      self.optimizers[names[0]],
      placement,
      table.quantization_config,
      table.stochastic_rounding,
      entry.set["exchange"],
      entry.set["capacity"],
      **storage,
    )

  def _storage(self, name: str, entry: TablePlan) -> dict[str, bool]:
    """The fields of a table's stack that say how it is stored."""
    is_packed = packing.is_wanted(entry.set["packed"], self.placement(entry).device_kind)
    is_in_host = entry.set["memory"] == "host"
    if is_in_host and (reason := self.host_obstacle(name, entry)):
      raise ValueError(f'Table {name!r} cannot have memory="host": {reason}')
    is_packed = is_packed and self.packing_obstacle(name, entry) is None
    is_wanted = sparse_core.is_wanted(entry.set["sparse_core"])
    return {
      "sparse_core": is_wanted and self.sparse_core_obstacle(name, entry, is_packed) is None,
      "is_packed": is_packed,
      "is_in_host": is_in_host,
    }

  def host_obstacle(self, name: str, entry: TablePlan) -> str | None:
    """Why a table cannot be in the memory of the host, or None."""
    platform = self.placement(entry).platform
    if platform not in host.PLATFORMS:
      return (
        f'it is for TPUs and CPUs, and these devices are of the platform "{platform}". Write '
        f'plan["{name}"].memory = "device", and spread the table over more devices.'
      )
    if self._moves_every_row(name):
      return (
        "its optimizer moves every row in a step, which would bring all of them to the device. "
        "Take an optimizer that steps the rows of the batch."
      )
    return None

  def _unit(self, name: str, entry: TablePlan) -> int:
    """The local rows that a table takes are a multiple of this number."""
    width = self._width(name, entry)
    return packing.rows_per_line(width) if self._storage(name, entry)["is_packed"] else 1

  def _moves_every_row(self, name: str) -> bool:
    """Whether the optimizer of a table moves all of its rows in a step."""
    optimizer = self.optimizers[name]
    return optimizer is not None and not optimizer.lazy

  def _width(self, name: str, entry: TablePlan) -> int:
    """The columns of a table on a device."""
    return -(-self.configs[name].dim // self.placement(entry).column_shards)

  def sparse_core_obstacle(self, name: str, entry: TablePlan, is_packed: bool) -> str | None:
    """Why a table cannot be on SparseCores, or None."""
    if entry.set["memory"] == "host":
      return "its rows are in the memory of the host"
    kind, dtype = self.placement(entry).device_kind, self.configs[name].dtype
    return sparse_core.obstacle(kind, self._width(name, entry), dtype, is_packed)

  def packing_obstacle(self, name: str, entry: TablePlan) -> str | None:
    """Why a table cannot be packed, or None."""
    if entry.set["memory"] == "host":
      return "its rows are in the memory of the host"
    return packing.obstacle(self._width(name, entry), self._moves_every_row(name))

  def stacks(self, names: Sequence[str], entries: Mapping[str, TablePlan]) -> dict[str, StackSpec]:
    """The stacks of these tables by name, in the order of their first tables."""
    groups: dict[Any, list[str]] = {}
    for name in names:
      storage = self._storage(name, entries[name])
      decided = entries[name].set | {"packed": None} | storage
      kind = name if storage["is_in_host"] else self.kind(name)
      groups.setdefault((kind, tuple(decided.values())), []).append(name)
    stacks: dict[str, StackSpec] = {}
    for group in groups.values():
      entry = entries[group[0]]
      for part in self._numbered(group, entry):
        label = part[0] if len(part) == 1 else f"{part[0]}+{len(part) - 1}"
        while label in stacks or (len(part) > 1 and label in self.configs):
          label += "+"
        stacks[label] = self.stack(label, part, entry)
    return stacks

  def _numbered(self, names: Sequence[str], entry: TablePlan) -> Iterator[list[str]]:
    """Divides tables into groups whose rows fit the numbers of sort keys and ids."""
    shards, unit = self.placement(entry).shards, self._unit(names[0], entry)
    most = min(route.most_rows(shards), MAX_VOCABULARY_SIZE)
    part: list[str] = []
    height = 0
    for name in names:
      rows = -(-self.configs[name].vocabulary_size // (shards * unit)) * unit
      if part and height + rows > most:
        yield part
        part, height = [], 0
      part.append(name)
      height += rows
    yield part


def place(
  mesh: Any,
  strategy: str,
  axis: str | Sequence[str] | None,
  column_axis: str | Sequence[str] | None = None,
  batch_axis: str | Sequence[str] | None = None,
) -> Placement:
  """The placement of a strategy.

  Args:
    mesh: a mesh of devices.
    strategy: one of `STRATEGIES`.
    axis: the axes that the strategy splits over.
    column_axis: the axes that columns are split over, in addition to rows over `axis`.
    batch_axis: the axes of the batch; None is `axis`.

  Raises:
    ValueError: for an unknown strategy or axis.
  """
  if strategy not in STRATEGIES:
    raise ValueError(f"Invalid sharding strategy {strategy!r}: choose one of {STRATEGIES}.")
  axes, columns = as_names(axis), as_names(column_axis)
  batch = axes if batch_axis is None else as_names(batch_axis)
  for name in (*axes, *columns, *batch):
    if name not in mesh.axis_names:
      raise ValueError(
        f"The mesh has no axis {name!r}; its axes are {mesh.axis_names}. Pass axis=..."
      )
  if strategy == "column":
    axes, columns = (), tuple(dict.fromkeys((*axes, *columns)))
  elif strategy == "replicated":
    axes = columns = ()
  if set(axes) & set(columns):
    raise ValueError(f"Rows and columns cannot both be split over {set(axes) & set(columns)}.")
  if not (axes or columns or batch):
    raise ValueError("No mesh axis to split the batch over: pass axis=... or batch_axis=...")
  return Placement(mesh, axes, columns, batch)


# --- costs ---------------------------------------------------------------------------------------


def example_bags(features: Any, batch: Any) -> dict[structure.Path, Bags]:
  """The bags of each feature of a batch, as shapes."""
  by_feature: dict[structure.Path, Bags] = {}
  for path, feature, x, _ in inputs.matched(features, batch):
    looked_up = functools.partial(_looked_up, structure.feature_name(path, feature), feature)
    structs = jax.tree.map(_struct, x, is_leaf=lambda leaf: isinstance(leaf, (list, tuple)))
    by_feature[path] = jax.eval_shape(looked_up, structs)
  return by_feature


def _looked_up(name: str, feature: FeatureConfig, x: Any) -> Bags:
  """The bags that a lookup of a feature takes, weighted if weights can have a gradient."""
  unweighted = inputs.check((), name, feature, x)
  parts = unweighted.parts
  is_known = parts.kind != "ragged" or parts.length  # the length of a bag
  if feature.differentiate_weights and parts.kind != "dense" and is_known:
    parts = dataclasses.replace(parts, weights=jnp.ones(parts.ids.shape))
  return combiners.prepare([unweighted], None, [parts]).bags[0]


def _struct(x: Any) -> jax.ShapeDtypeStruct:
  if isinstance(x, jax.ShapeDtypeStruct):
    return x
  x = np.asarray(x) if not hasattr(x, "dtype") else x
  dtype = np.int32 if np.issubdtype(x.dtype, np.integer) else x.dtype
  return jax.ShapeDtypeStruct(x.shape, dtype)


def stack_cost(stack: StackSpec, bags: Mapping[str, Sequence[Bags]]) -> StackCost:
  """The bytes of a stack on a device, for the bags of a batch by table."""
  tables = [name for name in stack.tables for _ in bags[name]]
  demand = cost.batch_demand(stack, [b for name in stack.tables for b in bags[name]], tables)
  chosen = cost.choose_exchange(stack, demand)
  per_row = sum(
    (1 if slot.per_row else stack.row_width) * np.dtype(slot.dtype).itemsize
    for slot in stack.slots.values()
  )
  return StackCost(
    stack.name,
    stack.tables,
    chosen.kind,
    chosen.capacity,
    stack.layout.shard_rows * stack.row_width * stack.dtype.itemsize,
    stack.layout.shard_rows * per_row,
    cost.buffer_bytes(stack, demand, chosen),
    cost.moved_bytes(stack, demand, chosen),
    "host" if stack.is_in_host else "device",
  )


def best_strategies(
  tables: Tables, entries: Mapping[str, TablePlan], bags: Mapping[str, Sequence[Bags]]
) -> dict[str, str]:
  """The strategies with which the resulting stacks move the fewest bytes, by table.

  A candidate splits all tables of a group that can be stacked by rows, or by columns if they are
  wide enough, except for a number of its smallest tables, which it replicates.
  """
  groups: dict[Any, list[str]] = {}
  for name in tables.configs:
    groups.setdefault(tables.kind(name), []).append(name)
  best: dict[str, str] = {}
  for names in groups.values():
    moved = functools.partial(_moved, tables, entries, bags)
    best |= min(_candidates(tables, names, entries[names[0]]), key=moved)
  return best


def _candidates(tables: Tables, names: Sequence[str], entry: TablePlan) -> list[dict[str, str]]:
  table = tables.configs[names[0]]
  devices = math.prod(tables.mesh.shape[axis] for axis in entry.axis)
  is_wide = table.dim % devices == 0 and table.dim // devices >= LANES
  bytes_of = lambda name: tables.configs[name].vocabulary_size * table.dim * table.dtype.itemsize
  small = sorted((name for name in names if bytes_of(name) <= REPLICATED), key=bytes_of)
  tried = sorted({round(i * len(small) / 32) for i in range(33)})  # at most 33 candidates
  return [
    {name: "replicated" if name in small[:k] else strategy for name in names}
    for strategy in (("mod", "column") if is_wide else ("mod",))
    for k in tried
  ]


def _moved(
  tables: Tables,
  entries: Mapping[str, TablePlan],
  bags: Mapping[str, Sequence[Bags]],
  strategies: Mapping[str, str],
) -> int:
  """The bytes that a device receives in a step if tables are stored by these strategies."""
  tried = {name: entries[name].copy() for name in strategies}
  for name, strategy in strategies.items():
    tried[name].strategy = strategy
  stacks = tables.stacks(list(strategies), tried)
  return sum(stack_cost(stack, bags).moved for stack in stacks.values())
