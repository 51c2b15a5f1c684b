"""`plan` decides how tables are stored and exchanged, and counts bytes before any allocation.

A **strategy** says how a table is spread over mesh axes: "mod" and "div" split its rows;
"replicated" does not. Tables of equal width, dtype, optimizer and settings are stacked.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from embed import config as config_lib
from embed import inputs, structure
from embed.config import MAX_VOCABULARY_SIZE, TableConfig
from embed.engine import admission, backends, cost, exchange
from embed.engine import mesh as mesh_lib
from embed.engine import stack as stack_lib
from embed.engine.bags import Bags
from embed.engine.cost import EXCHANGES
from embed.engine.mesh import LOCAL, Placement, as_names
from embed.engine.stack import Layout, StackSpec
from embed.kernels import sparse_core
from embed.optimizers import OPTIMIZERS, RowOptimizer
from embed.storage import tables as stored_tables

STORAGES = ("auto", "rows", "packed", "sparse_core")
STRATEGIES = ("mod", "div", "replicated")
ALONE = 1 << 24  # bytes; a larger table is not stacked on one device
REPLICATED = 1 << 20  # bytes of the largest table that `embed.plan` replicates


@dataclasses.dataclass(slots=True)
class TablePlan:
  """Storage and exchange of one table. Set the fields before the layer is built.

  Args:
    strategy: "mod", "div" or "replicated".
    axis: the mesh axes that the table is split over, one name or several.
    exchange: "all_to_all" or "gather", for a table whose rows are split. None chooses, for each
      batch, the one that moves fewer bytes.
    capacity: the rows that a pair of devices exchanges in a round of an all-to-all; None computes
      it for each batch. A number that is too small costs rounds, but never drops an id.
    storage: how rows are laid out in memory, which changes nothing else:

      - "rows": an array of rows.
      - "packed": side by side in lines of 128 columns, each row padded to 8, 16, 32, 64 or a
        multiple of 128 columns. TPUs would copy a table of any other width in every step. CPUs gain
        nothing from it, and GPUs lose their kernel.
      - "sparse_core": read and written by the SparseCores of TPU v5p, v6e and TPU7x, packed unless
        the width is a multiple of 128. The kernels are compiled for these chips and checked by
        emulation, but have not run on a TPU.
      - "auto": "packed" on TPUs and "rows" elsewhere.

      If SparseCores cannot take a table, the printed plan says why, and the table is stored as with
      "auto". Rows whose width is a multiple of 128 are lines already.

  Raises:
    ValueError: naming the invalid argument.
    AttributeError: for an unknown field.
  """

  strategy: str = "mod"
  axis: str | Sequence[str] = ()
  exchange: str | None = None
  capacity: int | None = None
  storage: str = "auto"

  def __setattr__(self, name: str, value: Any) -> None:
    choices = {"strategy": STRATEGIES, "exchange": (*EXCHANGES, None), "storage": STORAGES}
    if name in choices:
      config_lib.check(name, value, value in choices[name], f"one of {choices[name]}")
    elif name == "capacity" and value is not None:
      value = config_lib.integer("capacity", value, 1)
    elif name == "axis":
      value = as_names(value)
    object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class StackCost:
  """The cost of a stack on a device in a training step, an entry of `Plan.costs()`.

  Attributes:
    stack: the name of the stack.
    tables: the names of its tables.
    exchange: "all_to_all", "gather", "sum" (of whole replicated tables) or "none".
    capacity: rows that a pair of devices exchanges in a round of an all-to-all, or None.
    rows: bytes of the tables.
    slots: bytes of the optimizer's state.
    buffers: bytes of the exchange's buffers.
    moved: bytes that the device receives per step.
    keys: bytes of the raw ids and scores of tables with a `DynamicVocabulary`.
  """

  stack: str
  tables: tuple[str, ...]
  exchange: str
  capacity: int | None
  rows: int
  slots: int
  buffers: int
  moved: int
  keys: int


def example_bags(features: Any, batch: Any) -> dict[structure.Path, Bags]:
  """The bags of each feature of a batch, as shapes."""

  def bags_of(path, feature, x):
    given = inputs.check((), structure.feature_name(path, feature), feature, x)
    return inputs.to_bags([given], None, [given.parts])[0][0]

  is_array = lambda x: isinstance(x, (list, tuple))  # nested lists are arrays too
  return {
    path: jax.eval_shape(
      functools.partial(bags_of, path, feature), jax.tree.map(_shape_of, x, is_leaf=is_array)
    )
    for path, feature, x, _ in inputs.matched(features, inputs.with_stand_ins(features, batch))
  }


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
  x = x if hasattr(x, "dtype") else np.asarray(x)
  return jax.ShapeDtypeStruct(x.shape, np.int32 if np.issubdtype(x.dtype, np.integer) else x.dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
  """Decisions about how the tables of a feature config are spread over a mesh.

  `embed.plan` makes plans. A plan maps each table name to a `TablePlan`, which can be changed:
  `plan["movie"].strategy = "div"`. Printing a plan shows the costs for its example batch. Tables of
  equal width, dtype, optimizer and `TablePlan` are stacked: stored in one array and exchanged
  together.

  Attributes:
    features: the feature config.
    optimizer: the optimizer of tables that have none of their own.
    mesh: the devices, or None.
    batch_axis: the mesh axes that the batch is split over.
    hbm_bytes: the memory of a device, or None.
    example: the bags of the example batch by table, as shapes, or None; internal.
    tables: `{table name: TableConfig}`.
    optimizers: `{table name: RowOptimizer or None}`.
    entries: `{table name: TablePlan}`.
  """

  features: Any
  optimizer: RowOptimizer | None = None
  mesh: Any = None
  batch_axis: tuple[str, ...] | None = None
  hbm_bytes: int | None = None
  example: Mapping[str, Sequence[Bags]] | None = None
  tables: dict[str, TableConfig] = dataclasses.field(init=False)
  optimizers: dict[str, RowOptimizer | None] = dataclasses.field(init=False)
  entries: dict[str, TablePlan] = dataclasses.field(init=False)

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    set_("features", structure.own(self.features))
    set_("tables", structure.name_tables(self.features))
    resolved = {name: _resolve(name, x, self.optimizer) for name, x in self.tables.items()}
    set_("optimizers", resolved)
    set_("entries", {name: TablePlan() for name in self.tables})

  @classmethod
  def uniform(cls, features, optimizer, mesh, axis, strategy: str) -> "Plan":
    """A plan with one strategy for all tables, for a `SparseEmbed` without a plan."""
    axes = as_names(axis)
    result = cls(features, optimizer, mesh_lib.current_mesh() if mesh is None else mesh, axes)
    for entry in result.entries.values():
      entry.strategy, entry.axis = strategy, axes
    return result

  def with_features(self, features: Any, optimizer: RowOptimizer | None) -> "Plan":
    """The same decisions for another feature config of the same tables, without an example."""
    result = Plan(features, optimizer or self.optimizer, self.mesh, self.batch_axis, self.hbm_bytes)
    if set(self.entries) != set(result.entries):
      raise ValueError(
        f"The plan is for the tables {sorted(self.entries)}, the feature config has "
        f"{sorted(result.entries)}."
      )
    result.entries.update({name: dataclasses.replace(x) for name, x in self.entries.items()})
    return result

  def __getitem__(self, table: str) -> TablePlan:
    if table not in self.entries:
      raise KeyError(f"There is no table {table!r}; the tables are {sorted(self.entries)}.")
    return self.entries[table]

  def __iter__(self) -> Iterator[str]:
    return iter(self.entries)

  def __len__(self) -> int:
    return len(self.entries)

  # --- stacks ------------------------------------------------------------------------------------

  def _bytes(self, name: str) -> int:
    table = self.tables[name]
    return table.vocabulary_size * table.dim * table.dtype.itemsize

  def _stacking_key(self, name: str) -> Any:
    """A key that is equal for tables that may share a stack."""
    if self.mesh is None and self._bytes(name) > ALONE:
      return name
    table = self.tables[name]
    return (table.dim, table.dtype, table.stochastic_rounding, self.optimizers[name])

  def _placement(self, entry: TablePlan) -> Placement:
    """The devices that hold the rows of a table."""
    mesh, strategy, axes = self.mesh, entry.strategy, as_names(entry.axis)
    if mesh is None:
      return LOCAL
    batch = axes if self.batch_axis is None else self.batch_axis
    for name in (*axes, *batch):
      if name not in mesh.axis_names:
        raise ValueError(
          f"The mesh has no axis {name!r}; its axes are {mesh.axis_names}. Pass axis=..."
        )
    axes = () if strategy == "replicated" else axes
    if not (axes or batch):
      raise ValueError("No mesh axis to split the batch over: pass axis=...")
    return Placement(mesh, axes, batch)

  def _stack(self, label: str, names: Sequence[str], entry: TablePlan) -> StackSpec:
    """The stack of some tables, with the settings of an entry."""
    table, placement = self.tables[names[0]], self._placement(entry)
    sizes = tuple(self.tables[name].vocabulary_size for name in names)
    storage, width = self._storage(names[0], entry), table.dim
    is_packed = storage == "packed" or (storage == "sparse_core" and width % stack_lib.LANES > 0)
    unit = stack_lib.rows_per_line(width) if is_packed else 1
    return StackSpec(
      label,
      tuple(names),
      Layout(sizes, placement.shards, entry.strategy == "div", unit),
      table.dim,
      table.dtype,
      self.optimizers[names[0]],
      placement,
      table.stochastic_rounding,
      entry.exchange,
      entry.capacity,
      back_end=_back_end(storage, placement),
      is_packed=is_packed,
    )

  def _storage(self, name: str, entry: TablePlan) -> str:
    """Chooses the storage of a table: "rows", "packed" or "sparse_core"."""
    wanted, is_tpu = entry.storage, self._placement(entry).device_kind.startswith("TPU")
    if wanted == "auto" and backends.is_on(sparse_core.SWITCH, default=False):
      wanted = "sparse_core"
    if wanted == "sparse_core" and self._not_on_sparse_cores(name, entry) is None:
      return "sparse_core"
    is_packed = wanted == "packed" or (
      wanted != "rows" and backends.is_on(stack_lib.PACKING_SWITCH, default=is_tpu)
    )
    return "packed" if is_packed and self.tables[name].dim % stack_lib.LANES else "rows"

  def _not_on_sparse_cores(self, name: str, entry: TablePlan) -> str | None:
    """The reason why SparseCores cannot take the rows of a table, or None."""
    table, kind = self.tables[name], self._placement(entry).device_kind
    return sparse_core.unsupported_reason(kind, table.dim, table.dtype)

  def stacks(self, entries: Mapping[str, TablePlan] | None = None) -> dict[str, StackSpec]:
    """The stacks by name, in the order of their first tables, from `entries` or the plan's own."""
    entries = self.entries if entries is None else entries
    groups: dict[Any, list[str]] = {}
    for name, entry in entries.items():
      resolved = dataclasses.replace(entry, storage=self._storage(name, entry))
      groups.setdefault((self._stacking_key(name), dataclasses.astuple(resolved)), []).append(name)
    stacks: dict[str, StackSpec] = {}
    for group in groups.values():
      entry = entries[group[0]]
      for part in self._numbered(group, entry):
        label = part[0] if len(part) == 1 else f"{part[0]}+{len(part) - 1}"
        while (
          label in stacks
          or hasattr(nnx.Dict, label)  # which holds arrays by label, and has methods
          or (label != part[0] and label in self.tables)
        ):
          label += "+"
        stacks[label] = self._stack(label, part, entry)
    return stacks

  def _numbered(self, names: Sequence[str], entry: TablePlan) -> Iterator[list[str]]:
    """Divides tables into groups with few enough rows for 32-bit sort keys and ids."""
    alone = self._stack("", names[:1], entry).layout
    shards, unit = alone.shards, alone.unit
    most = min(exchange.most_rows(shards), MAX_VOCABULARY_SIZE)
    part: list[str] = []
    height = 0
    for name in names:
      rows = -(-self.tables[name].vocabulary_size // (shards * unit)) * unit
      if part and height + rows > most:
        yield part
        part, height = [], 0
      part.append(name)
      height += rows
    yield part

  # --- costs -------------------------------------------------------------------------------------

  def costs(self) -> list[StackCost]:
    """The cost of each stack on a device for the example batch, a list of `embed.StackCost`.

    Raises:
      ValueError: if the plan has no example batch.
    """
    return [self._cost(stack) for stack in self.stacks().values()]

  def _cost(self, stack: StackSpec) -> StackCost:
    if self.example is None:
      raise ValueError("this plan has no example batch to cost: make one with embed.plan(...)")
    bags = [(x, name) for name in stack.tables for x in self.example[name]]
    demand = cost.batch_demand(stack, [x for x, _ in bags], [name for _, name in bags])
    chosen = cost.choose_exchange(stack, demand)
    rows, slots = stored_tables.stored_bytes(stack)
    return StackCost(
      stack.name,
      stack.tables,
      chosen.kind,
      chosen.capacity,
      rows,
      slots,
      buffers=cost.buffer_bytes(stack, demand, chosen),
      moved=cost.moved_bytes(stack, demand, chosen),
      keys=self._key_bytes(stack),
    )

  def _key_bytes(self, stack: StackSpec) -> int:
    """The bytes of the owners of a stack's dynamic tables, on a device."""
    vocabularies = [self.tables[name].vocabulary for name in stack.tables]
    return sum(admission.bytes_on_device(x, stack.placement) for x in vocabularies if x is not None)

  @property
  def bytes_per_device(self) -> int:
    """Bytes of rows, slots, buffers and keys on each device, for the example batch."""
    return sum(c.rows + c.slots + c.buffers + c.keys for c in self.costs())

  @property
  def fits(self) -> bool | None:
    """True if `bytes_per_device` fits in `hbm_bytes`; None if the memory is not known."""
    return None if self.hbm_bytes is None else self.bytes_per_device <= self.hbm_bytes

  def __repr__(self) -> str:
    if self.example is None:
      return f"Plan({self.entries})"
    lines: list[tuple[str, ...]] = [_HEADER]
    costs = self.costs()
    for x in costs:
      numbers = map(cost.readable, (x.rows, x.slots, x.buffers, x.moved))
      of_stack = (x.exchange, "" if x.capacity is None else str(x.capacity), *numbers)
      for name in x.tables:  # the last table's line has the stack's costs
        table, is_last = self.tables[name], name == x.tables[-1]
        size = (str(table.vocabulary_size), str(table.dim))
        shown = of_stack if is_last else ("",) * len(of_stack)
        lines.append((name, *size, self[name].strategy, x.stack, *shown))
    devices = 1 if self.mesh is None else self.mesh.size
    total = f"{cost.readable(self.bytes_per_device)} on each of {devices} devices"
    moved = f"{cost.readable(sum(x.moved for x in costs))} received by each in a step"
    limit = ""
    if self.hbm_bytes is not None:
      limit = f"; {'fits' if self.fits else 'does not fit'} {cost.readable(self.hbm_bytes)}"
    notes = "\n".join(self._notes())
    return f"{aligned(lines, left=(0, 3, 4, 5))}\n{total}, {moved}{limit}\n{notes}".rstrip()

  def _notes(self) -> Iterator[str]:
    """Lines about how tables are stored and why, and a warning about tables saved whole."""
    whole: list[str] = []
    for stack in self.stacks().values():
      notes = []
      if keys := self._key_bytes(stack):
        notes.append(f"raw ids and scores take {cost.readable(keys)} on each device")
      if stack.is_packed:
        notes.append(f"packed, {stack.row_width} columns to a row")
      if stack.back_end == sparse_core.NAME:
        notes.append("on SparseCores")
      elif self[stack.tables[0]].storage == "sparse_core":
        reason = self._not_on_sparse_cores(stack.tables[0], self[stack.tables[0]])
        notes.append(f"not on SparseCores: {reason}")
      if notes:
        yield f"{', '.join(stack.tables)}: {'; '.join(notes)}"
      if stack.is_split:
        whole += [x for x in stack.tables if stored_tables.view(stack, x, 2).kind == "whole"]
    if (number := sum(self._bytes(name) for name in whole)) > ALONE:
      yield (
        f"Whole on every device while saved or restored: {', '.join(whole)} "
        f"({cost.readable(number)} and their slots), because neither rows nor columns divide by "
        "the shards. Round vocabulary_size up."
      )

  # --- what `embed.plan` decides -----------------------------------------------------------------

  def choose_strategies(self) -> None:
    """Sets the candidate strategies whose stacks move the fewest bytes."""

    def moved(strategies):
      tried = {n: dataclasses.replace(self[n], strategy=s) for n, s in strategies.items()}
      return sum(self._cost(stack).moved for stack in self.stacks(tried).values())

    groups: dict[Any, list[str]] = {}
    for name in self.tables:
      groups.setdefault(self._stacking_key(name), []).append(name)
    for names in groups.values():  # no group changes what another moves
      for name, strategy in min(self._candidates(names), key=moved).items():
        self[name].strategy = strategy

  def _candidates(self, names: Sequence[str]) -> list[dict[str, str]]:
    """Candidates by table: "replicated" for the k smallest tables, "mod" for the rest."""
    small = [name for name in names if self._bytes(name) <= REPLICATED]
    small.sort(key=self._bytes)
    counts = sorted({round(i * len(small) / 32) for i in range(33)})  # at most 33 candidates
    return [{name: "replicated" if name in small[:k] else "mod" for name in names} for k in counts]


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
  """Decides how to spread tables over a mesh, and counts the bytes that this takes and moves.

  Strategies are chosen jointly for tables that can be stored together. Rows are split, except for
  small tables, which are replicated where that moves fewer bytes. If the plan then exceeds
  `hbm_bytes`, no table is replicated, and `Plan.fits` says if it now fits. Nothing is allocated.

  Args:
    features: the feature config.
    mesh: the devices, a `jax.sharding.Mesh`. It may consist of devices that are not attached, from
      `jax.experimental.topologies`, or be a `jax.sharding.AbstractMesh`. None is the mesh of
      `jax.set_mesh`, or one device.
    batch: example inputs for a whole batch in the structure of the feature config, or their shapes
      (`jax.ShapeDtypeStruct` in place of arrays).
    optimizer: the optimizer of tables that have none of their own.
    hbm_bytes: the memory of a device, such as `device.memory_stats()["bytes_limit"]`, or None.
    axis: the mesh axes to split over; None takes all of them.

  Returns:
    A `Plan`, to print, to change (`plan["movie"].capacity = 512`), and to pass to
    `SparseEmbed(plan=plan, rngs=rngs)`.

  Raises:
    ValueError: for inputs that do not fit the feature config.

  >>> movie = embed.TableConfig(vocabulary_size=1_000_000, dim=64, name="movie")
  >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
  >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
  >>> plan["movie"].strategy, plan.costs()[0].rows, plan.costs()[0].slots  # bytes on each device
  ('mod', 32000000, 32000000)
  """
  mesh = mesh_lib.current_mesh() if mesh is None else mesh
  axes = as_names(axis) or (() if mesh is None else tuple(mesh.axis_names))
  names = {id(table): name for name, table in structure.name_tables(features).items()}
  example: dict[str, list[Bags]] = {name: [] for name in names.values()}
  by_path = dict(structure.flatten_features(features))
  for path, bags in example_bags(features, batch).items():
    example[names[id(by_path[path].table)]].append(bags)
  result = Plan(features, optimizer, mesh, axes, hbm_bytes, example)
  for entry in result.entries.values():
    entry.axis = axes
  if mesh is not None:
    result.choose_strategies()
  if result.fits is False:
    for entry in result.entries.values():
      entry.strategy = "mod" if entry.strategy == "replicated" else entry.strategy
  return result


def _back_end(storage: str, placement: Placement) -> str | None:
  """The name of the back end that looks up and steps rows, or None for XLA."""
  if storage == "sparse_core":
    return sparse_core.NAME
  if storage == "rows" and placement.device.platform == "gpu":
    from embed.kernels import gpu  # Pallas takes a while to import

    return gpu.NAME
  return None


def _resolve(name: str, table: TableConfig, default: Any) -> RowOptimizer | None:
  """A table's own optimizer, or the default; the config is not changed."""
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


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
  """Formats lines of cells as a text table, aligned right except for the columns in `left`."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  align = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
  return "\n".join("  ".join(align(*c) for c in enumerate(line)).rstrip() for line in lines)
