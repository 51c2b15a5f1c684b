"""`plan`: how tables are stored and exchanged, and what that costs, before any is allocated."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from embed import config as config_lib
from embed import inputs, structure
from embed.engine import cost, route, storage
from embed.engine import mesh as mesh_lib
from embed.engine.bags import Bags
from embed.engine.cost import EXCHANGES
from embed.engine.layout import Layout
from embed.engine.mesh import LOCAL, Placement
from embed.engine.stack import StackSpec
from embed.row_optimizer import OPTIMIZERS, RowOptimizer
from embed.tools import text

ALONE = 1 << 24  # bytes of a table from which it is not stacked on one device
REPLICATED = 1 << 20  # bytes of the largest table that a plan replicates of its own accord
LANES = 128  # columns below which a plan does not split rows of its own accord


class TablePlan:
  """How one table is stored and exchanged. Set the fields before the layer is built.

  Tables with equal settings (and width, dtype, quantization and optimizer) are stored together.

  Args:
    strategy: "mod", "div", "column" or "replicated".
    axis: the mesh axes that it is split over.
    column_axis: axes that columns are split over besides.
    exchange: "all_to_all" or "gather". A plan suggests the one that moves less for its example
      batch; other batches choose anew, unless it is set. Used where rows are split; an optimizer
      that steps once per occurrence, or moves every row, always gathers.
    capacity: the rows that a pair of devices exchanges in a round of an all-to-all. A plan suggests
      the number that follows from its example batch; other batches follow their own, unless it is
      set. Too small a number costs rounds, never an id.

  Raises:
    ValueError: for a value that is none of these.
    AttributeError: for another field.

  >>> entry = embed.TablePlan(strategy="div")
  >>> entry.capacity = 512
  >>> entry
  TablePlan(strategy='div', axis=(), column_axis=(), exchange=None, capacity=512)
  """

  set: dict[str, Any]  # what was decided, and goes into JSON
  suggested: dict[str, Any]  # what the example batch asks for

  _FIELDS = ("strategy", "axis", "column_axis", "exchange", "capacity")

  def __init__(
    self,
    strategy: str = "mod",
    axis: str | Sequence[str] = (),
    column_axis: str | Sequence[str] = (),
    exchange: str | None = None,
    capacity: int | None = None,
  ):
    self.__dict__.update(set={}, suggested={})
    for name, value in zip(
      self._FIELDS, (strategy, axis, column_axis, exchange, capacity), strict=True
    ):
      setattr(self, name, value)

  def __setattr__(self, name: str, value: Any) -> None:
    if name not in self._FIELDS:
      raise AttributeError(f"TablePlan has no field {name!r}; its fields are {self._FIELDS}.")
    if name == "strategy" and value not in mesh_lib.STRATEGIES:
      raise ValueError(f"Sharding: strategy must be one of {mesh_lib.STRATEGIES}. Got {value!r}.")
    if name == "exchange" and value not in (None, *EXCHANGES):
      raise ValueError(f"exchange must be one of {EXCHANGES} or None. Got {value!r}.")
    if name == "capacity" and value is not None:
      if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"capacity must be a positive int or None. Got {value!r}.")
      value = int(value)
    if name in ("axis", "column_axis"):
      value = mesh_lib.as_names(value)
    self.set[name] = value

  def __getattr__(self, name: str) -> Any:
    if name not in self._FIELDS:
      raise AttributeError(f"TablePlan has no field {name!r}; its fields are {self._FIELDS}.")
    value = self.set[name]
    return self.suggested.get(name) if value is None else value

  def copy(self) -> "TablePlan":
    """The same decisions and suggestions."""
    new = TablePlan(**self.set)
    new.suggested.update(self.suggested)
    return new

  def __repr__(self) -> str:
    fields = (f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
    return f"TablePlan({', '.join(fields)})"


@dataclasses.dataclass(frozen=True)
class StackCost:
  """What a stack costs a device in a training step, an entry of `Plan.costs()`.

  Attributes:
    stack: its name.
    tables: the tables that it holds.
    exchange: "all_to_all", "gather", "sum" (of whole replicated tables), "columns" or "none".
    capacity: rows that a pair of devices exchanges in a round of an all-to-all, or None.
    rows: bytes of the tables.
    slots: bytes of the optimizer's state.
    buffers: bytes of the exchange's buffers.
    moved: bytes that are received per step.

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


class Plan:
  """How the tables of a feature config are spread over a mesh: `plan["movie"].strategy = "div"`.

  Made by `embed.plan`, or by `Plan.from_json`. A mapping-like object, a `TablePlan` by table name.
  Printing it shows the costs for the example batch that it was made for. Tables of equal width,
  dtype, quantization, optimizer and settings are stacked: stored in one array, exchanged together.

  Attributes:
    features: the feature config.
    optimizer: of the tables that have none.
    mesh: the devices, or None.
    tables: `{table name: TableConfig}`.
    optimizers: `{table name: RowOptimizer or None}`.
    batch_axis: the mesh axes that the batch is split over.
    hbm_bytes: the memory of a device, or None.

  >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
  >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
  >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
  >>> plan["movie"].strategy = "mod"
  >>> list(plan), len(plan), plan["movie"].axis
  (['movie'], 1, ('data',))
  """

  def __init__(
    self,
    features: Any,
    optimizer: RowOptimizer | None = None,
    mesh: Any = None,
    batch_axis: Sequence[str] | None = None,
  ):
    self.features, self.optimizer, self.mesh = features, optimizer, mesh
    self.tables = structure.name_tables(features)
    self.optimizers = {n: _resolve(n, t, optimizer) for n, t in self.tables.items()}
    self.batch_axis = batch_axis
    self.entries = {name: TablePlan() for name in self.tables}
    self.hbm_bytes: int | None = None
    self._bags: dict[str, list[Bags]] = {}  # of each table in the example batch, as shapes

  @classmethod
  def uniform(cls, features, optimizer, mesh, axis, strategy: str) -> "Plan":
    """Every table by one strategy, as `SparseEmbed` without a plan has it."""
    mesh = mesh if mesh is not None else mesh_lib.current_mesh()
    axes = mesh_lib.as_names(axis)
    found = cls(features, optimizer, mesh, axes)
    for entry in found.entries.values():
      entry.strategy, entry.axis = strategy, axes
    return found

  def with_features(self, features: Any, optimizer: RowOptimizer | None) -> "Plan":
    """The same decisions for another feature config of the same tables."""
    found = Plan(features, optimizer or self.optimizer, self.mesh, self.batch_axis)
    if set(found.tables) != set(self.tables):
      raise ValueError(
        f"The plan is for the tables {sorted(self.tables)}, the feature config has "
        f"{sorted(found.tables)}."
      )
    found.entries = {name: entry.copy() for name, entry in self.entries.items()}
    found.hbm_bytes, found._bags = self.hbm_bytes, self._bags
    return found

  def adopt(self, profile: Any, headroom: float = 1.25) -> "Plan":
    """Sizes the buffers of the exchange by what a sample of batches needed; returns the plan.

    Each stack whose rows are split gets the capacity of the fullest pair of devices in the sample
    times `headroom`, rounded up to a multiple of 8, unless gathering still moves less. A batch that
    needs more takes another round.

    Args:
      profile: `embed.profile(features, batches, plan=self)`.
      headroom: factor, at least 1.

    Raises:
      ValueError: the profile is of other stacks, or the headroom is below 1.

    >>> movie = embed.TableConfig(vocabulary_size=100_000, dim=8, name="movie")
    >>> features, mesh = embed.FeatureConfig(movie), jax.sharding.AbstractMesh((8,), ("data",))
    >>> batch = embed.Padded(np.arange(8192).reshape(1024, 8))
    >>> plan = embed.plan(features, mesh, batch, embed.adagrad(0.1), hbm_bytes=16 << 30)
    >>> plan.adopt(embed.profile(features, [batch], plan))["movie"].capacity  # 1.25 * 128
    160
    """
    if headroom < 1:
      raise ValueError(f"headroom must be at least 1. Got {headroom}.")
    split = {n: s for n, s in self.stacks().items() if s.is_split}
    if {n: s.tables for n, s in split.items()} != {n: s.tables for n, s in profile.stacks.items()}:
      raise ValueError(
        f"The profile is of the stacks {sorted(profile.stacks)}, the plan has {sorted(split)}. "
        "Write embed.profile(features, batches, plan=plan) with this plan."
      )
    for name, stack in split.items():
      most = int(profile.stacks[name].pairs.max())
      for table in stack.tables:
        self[table].capacity = max(8, -(-math.ceil(headroom * most) // 8) * 8)
      if self._bags and not self._is_worth(stack):
        for table in stack.tables:
          self[table].capacity = None
    return self

  def _is_worth(self, stack: StackSpec) -> bool:
    """Whether the capacity of a stack makes an all-to-all that moves less than gathering."""
    sized = _cost(self._stack(stack.name, list(stack.tables), self.entries), self._bags)
    gathered = dataclasses.replace(stack, capacity=None, exchange="gather")
    return sized.exchange == "all_to_all" and sized.moved <= _cost(gathered, self._bags).moved

  def __getitem__(self, table: str) -> TablePlan:
    if table not in self.entries:
      raise KeyError(f"There is no table {table!r}; the tables are {sorted(self.entries)}.")
    return self.entries[table]

  def __iter__(self) -> Iterator[str]:
    return iter(self.entries)

  def __len__(self) -> int:
    return len(self.entries)

  # --- stacks ------------------------------------------------------------------------------------

  def stacks(self) -> dict[str, StackSpec]:
    """The stacks by name, in the order of their first tables."""
    return self._stacks(list(self.tables), self.entries)

  def _stacks(
    self, tables: Sequence[str], entries: Mapping[str, TablePlan]
  ) -> dict[str, StackSpec]:
    """The stacks of some tables, if they were stored as the entries say."""
    groups: dict[Any, list[str]] = {}
    for name in tables:
      decided = tuple(entries[name].set.values())
      groups.setdefault((self._kind(name), decided), []).append(name)
    stacks: dict[str, StackSpec] = {}
    for names in groups.values():
      for part in self._numbered(names, entries[names[0]]):
        label = part[0] if len(part) == 1 else self._free_name(part, stacks)
        stacks[label] = self._stack(label, part, entries)
    return stacks

  def _kind(self, name: str) -> Any:
    """Equal for tables that can be stacked; a table's own name where it stays alone."""
    table = self.tables[name]
    if self.mesh is None and table.vocabulary_size * table.dim * table.dtype.itemsize > ALONE:
      return name
    rows = (table.dim, table.dtype, table.quantization_config, table.stochastic_rounding)
    return (*rows, self.optimizers[name])

  def _numbered(self, names: Sequence[str], entry: TablePlan) -> Iterator[list[str]]:
    """Tables cut into groups whose rows can be numbered."""
    shards = self._placement(entry).shards
    most = min(route.most_rows(shards), config_lib.MAX_VOCABULARY_SIZE)
    part: list[str] = []
    height = 0
    for name in names:
      rows = -(-self.tables[name].vocabulary_size // shards)
      if part and height + rows > most:
        yield part
        part, height = [], 0
      part.append(name)
      height += rows
    yield part

  def _placement(self, entry: TablePlan) -> Placement:
    if self.mesh is None:
      return LOCAL
    return mesh_lib.place(self.mesh, entry.strategy, entry.axis, entry.column_axis, self.batch_axis)

  def _free_name(self, names: list[str], taken: Mapping[str, Any]) -> str:
    label = f"{names[0]}+{len(names) - 1}"
    while label in taken or label in self.tables:
      label += "+"
    return label

  def _stack(self, label: str, names: Sequence[str], entries: Mapping[str, TablePlan]) -> StackSpec:
    entry, table = entries[names[0]], self.tables[names[0]]
    placement = self._placement(entry)
    sizes = tuple(self.tables[name].vocabulary_size for name in names)
    return StackSpec(
      label,
      tuple(names),
      Layout(sizes, placement.shards, entry.strategy == "div"),
      table.dim,
      table.dtype,
      self.optimizers[names[0]],
      placement,
      table.quantization_config,
      table.stochastic_rounding,
      entry.set["exchange"],
      entry.set["capacity"],
    )

  # --- costs -------------------------------------------------------------------------------------

  def costs(self) -> list[StackCost]:
    """What each stack costs a device in the example batch, a list of `embed.StackCost`.

    Raises:
      ValueError: for a plan without an example batch, as one from `from_json`.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> [cost.tables for cost in plan.costs()]
    [('movie',)]
    """
    if not self._bags:
      raise ValueError("this plan has no example batch to cost: make one with embed.plan(...)")
    return [_cost(stack, self._bags) for stack in self.stacks().values()]

  @property
  def bytes_per_device(self) -> int:
    """Bytes of rows, slots and buffers on each device, for the example batch.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> plan.bytes_per_device == sum(c.rows + c.slots + c.buffers for c in plan.costs())
    True
    """
    return sum(c.rows + c.slots + c.buffers for c in self.costs())

  @property
  def fits(self) -> bool | None:
    """Whether `bytes_per_device` fit `hbm_bytes`; None where that is not known.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> plan.fits
    True
    """
    return None if self.hbm_bytes is None else self.bytes_per_device <= self.hbm_bytes

  def __repr__(self) -> str:
    if not self._bags:
      return f"Plan({self.entries})"
    lines: list[tuple[str, ...]] = [_HEADER]
    for of_stack in self.costs():
      capacity = "" if of_stack.capacity is None else str(of_stack.capacity)
      numbers = map(text.size, (of_stack.rows, of_stack.slots, of_stack.buffers, of_stack.moved))
      for i, name in enumerate(of_stack.tables):  # the last table's line has the stack's costs
        table, strategy = self.tables[name], self.entries[name].strategy
        last = i == len(of_stack.tables) - 1
        costs = (of_stack.exchange, capacity, *numbers) if last else ("",) * 6
        size = (str(table.vocabulary_size), str(table.dim))
        lines.append((name, *size, strategy, of_stack.stack, *costs))
    devices = 1 if self.mesh is None else self.mesh.size
    total = f"{text.size(self.bytes_per_device)} on each of {devices} devices"
    moved = f"{text.size(sum(c.moved for c in self.costs()))} received by each in a step"
    fits = {None: "", True: "; fits", False: "; does not fit"}[self.fits]
    limit = "" if self.hbm_bytes is None else f"{fits} {text.size(self.hbm_bytes)}"
    return f"{text.aligned(lines, left=(0, 3, 4, 5))}\n{total}, {moved}{limit}{self._warning()}"

  def _warning(self) -> str:
    """Tables that no view splits, which are whole on every device while saved or restored."""
    whole = [
      name
      for stack in self.stacks().values()
      if stack.is_split
      for name in stack.tables
      if storage.view(stack, name, 2, compact=True).kind == "whole"
    ]
    number = sum(self.tables[n].vocabulary_size * self.tables[n].dim * 4 for n in whole)
    if number <= ALONE:
      return ""
    return (
      f"\nWhole on every device while saved or restored: {', '.join(whole)} "
      f"({text.size(number)} and their slots), because neither rows nor columns divide by the "
      "shards. Round vocabulary_size up."
    )

  # --- as text -----------------------------------------------------------------------------------

  def to_json(self) -> str:
    """The decisions as JSON; `from_json` reads them.

    Neither the feature config nor the mesh is in it, nor what the example batch suggested.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> plan["movie"].strategy = "div"
    >>> again = embed.Plan.from_json(plan.to_json(), plan.features, mesh, embed.adagrad(0.1))
    >>> again["movie"].strategy
    'div'
    """
    tables = {name: entry.set for name, entry in self.entries.items()}
    return json.dumps({"batch_axis": self.batch_axis, "tables": tables}, indent=2)

  @classmethod
  def from_json(
    cls, text: str, features: Any, mesh: Any = None, optimizer: RowOptimizer | None = None
  ) -> "Plan":
    """A plan from the decisions of another, for the same tables. It has no example batch.

    Args:
      text: what `to_json` returned.
      features: the feature config.
      mesh: the devices; None is the mesh of `jax.set_mesh`, or one device.
      optimizer: of the tables that have none.

    Raises:
      ValueError: if the tables differ.
    """
    read = json.loads(text)
    mesh = mesh if mesh is not None else mesh_lib.current_mesh()
    axis = read["batch_axis"]
    found = cls(features, optimizer, mesh, None if axis is None else tuple(axis))
    if set(found.entries) != set(read["tables"]):
      raise ValueError(
        f"The plan is for the tables {sorted(read['tables'])}, the feature config has "
        f"{sorted(found.entries)}."
      )
    found.entries = {name: TablePlan(**read["tables"][name]) for name in found.tables}
    return found


_HEADER = (
  "table", "rows", "dim", "strategy", "stored in", "exchange", "capacity",
  "rows, B", "slots, B", "buffers, B", "moved, B",
)  # fmt: skip


def plan(
  features: Any,
  mesh: Any,
  batch: Any,
  optimizer: RowOptimizer | None = None,
  hbm_bytes: int | None = None,
  *,
  axis: str | Sequence[str] | None = None,
) -> Plan:
  """Decides for each table how to spread it over a mesh, and counts what that costs.

  Small tables are replicated where that moves fewer bytes, tables so wide that a device keeps 128
  columns are split by columns where that does, all others by rows. Nothing is allocated.

  Args:
    features: the feature config.
    mesh: the devices, a `jax.sharding.Mesh`; also one of devices that are not here, from
      `jax.experimental.topologies`, or as a `jax.sharding.AbstractMesh`. None is the mesh of
      `jax.set_mesh`, or one device.
    batch: example inputs of a whole batch in the structure of the feature config, or their shapes
      (`jax.ShapeDtypeStruct` in place of arrays).
    optimizer: of the tables that have none.
    hbm_bytes: the memory of a device; None is what the mesh's devices say, if they do.
    axis: the mesh axes to split over; None is all of them.

  Returns:
    A `Plan`, to print, to change (`plan["movie"].capacity = 512`), to keep (`to_json`), and to
    pass to `SparseEmbed(plan=plan, rngs=rngs)`.

  Raises:
    ValueError: for inputs that do not fit the feature config.

  >>> movie = embed.TableConfig(vocabulary_size=1_000_000, dim=64, name="movie")
  >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
  >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
  >>> plan["movie"].strategy, plan.costs()[0].rows, plan.costs()[0].slots  # bytes on each device
  ('mod', 32000000, 32000000)
  """
  mesh = mesh_lib.current_mesh() if mesh is None else mesh
  axes = mesh_lib.as_names(axis) or (() if mesh is None else tuple(mesh.axis_names))
  found = Plan(features, optimizer, mesh, axes)
  found.hbm_bytes = _memory(mesh) if hbm_bytes is None else hbm_bytes
  found._bags = _bags(found, batch)
  for entry in found.entries.values():
    entry.axis = axes
  if mesh is not None:
    for names in _stackable(found):
      for name, strategy in _best_strategies(found, names).items():
        found.entries[name].strategy = strategy
  for stack in found.stacks().values():
    chosen = _cost(stack, found._bags)
    for name in stack.tables if chosen.exchange in EXCHANGES else ():
      found.entries[name].suggested.update(exchange=chosen.exchange, capacity=chosen.capacity)
  return found


def _memory(mesh: Any) -> int | None:
  """The memory of a device of the mesh, as the same number in every process."""
  if not isinstance(mesh, jax.sharding.Mesh):
    return None  # no mesh, or an AbstractMesh, which has no devices
  try:
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    stats = mine[0].memory_stats()
  except (AttributeError, IndexError, NotImplementedError, jax.errors.JaxRuntimeError):
    return None  # devices that are not here, or that do not say
  return None if stats is None else stats.get("bytes_limit")


def _bags(plan: Plan, batch: Any) -> dict[str, list[Bags]]:
  """The bags of a batch by table, as shapes."""
  by_table: dict[str, list[Bags]] = {name: [] for name in plan.tables}
  names = {id(table): name for name, table in plan.tables.items()}
  for path, feature, x, _ in inputs.matched(plan.features, batch):
    to_bags = functools.partial(inputs.to_bags, structure.feature_name(path, feature), feature)
    bags, _ = jax.eval_shape(to_bags, jax.tree.map(_struct, x))
    by_table[names[id(feature.table)]].append(bags)
  return by_table


def _struct(x: Any) -> jax.ShapeDtypeStruct:
  if isinstance(x, jax.ShapeDtypeStruct):
    return x
  x = np.asarray(x) if not hasattr(x, "dtype") else x
  dtype = np.int32 if np.issubdtype(x.dtype, np.integer) else x.dtype
  return jax.ShapeDtypeStruct(x.shape, dtype)


def _stackable(plan: Plan) -> list[list[str]]:
  """Groups of tables that can be stacked."""
  groups: dict[Any, list[str]] = {}
  for name in plan.tables:
    groups.setdefault(plan._kind(name), []).append(name)
  return list(groups.values())


def _best_strategies(plan: Plan, names: Sequence[str]) -> dict[str, str]:
  """The strategies of tables that can be stacked, by name, whose stacks move least together.

  Candidates split all tables by rows, or by columns if they are wide enough, but for the k smallest
  that are replicated.
  """
  table = plan.tables[names[0]]
  devices = math.prod(plan.mesh.shape[axis] for axis in plan.entries[names[0]].axis)
  is_wide = table.dim % devices == 0 and table.dim // devices >= LANES
  bytes_of = lambda name: plan.tables[name].vocabulary_size * table.dim * table.dtype.itemsize
  small = sorted((name for name in names if bytes_of(name) <= REPLICATED), key=bytes_of)
  tried = {round(i * len(small) / 32) for i in range(33)}  # of many tables not every number
  candidates = [
    {name: "replicated" if name in small[:k] else strategy for name in names}
    for strategy in (("mod", "column") if is_wide else ("mod",))
    for k in sorted(tried)
  ]
  return min(candidates, key=functools.partial(_moved, plan, names))


def _moved(plan: Plan, names: Sequence[str], strategies: Mapping[str, str]) -> int:
  """What a device receives in a step if tables are stored by these strategies."""
  entries = {name: plan.entries[name].copy() for name in names}
  for name, strategy in strategies.items():
    entries[name].strategy = strategy
  return sum(_cost(stack, plan._bags).moved for stack in plan._stacks(names, entries).values())


def _cost(stack: StackSpec, bags: Mapping[str, Sequence[Bags]]) -> StackCost:
  """The bytes of a stack on a device, for the bags of a batch by table."""
  tables = [name for name in stack.tables for _ in bags[name]]
  demand = cost.batch_demand(stack, [b for name in stack.tables for b in bags[name]], tables)
  chosen = cost.choose_exchange(stack, demand)
  per_row = sum(
    (1 if slot.per_row else stack.width) * np.dtype(slot.dtype).itemsize
    for slot in stack.slots.values()
  )
  return StackCost(
    stack.name,
    stack.tables,
    chosen.kind,
    chosen.capacity,
    stack.layout.rows * stack.width * stack.dtype.itemsize,
    stack.layout.rows * per_row,
    cost.buffer_bytes(stack, demand, chosen),
    cost.moved_bytes(stack, demand, chosen),
  )


def _resolve(name: str, table: config_lib.TableConfig, default: Any) -> RowOptimizer | None:
  """A table's own optimizer, or the default: completely, and without writing to the config."""
  optimizer = default if table.optimizer is None else table.optimizer
  if optimizer is not None and not isinstance(optimizer, RowOptimizer):
    hint = "embed.adam(1e-3)"
    if hasattr(optimizer, "update") and hasattr(optimizer, "init"):
      hint = "embed.from_optax(tx), which runs an optax transformation on rows"
    raise ValueError(
      f"Table {name!r}: {type(optimizer)} is an unsupported optimizer class. Write {hint}; embed "
      f"has {', '.join(sorted(OPTIMIZERS))}."
    )
  return optimizer
