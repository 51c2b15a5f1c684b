"""`plan` decides how tables are stored and exchanged, and counts the bytes before allocation."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from embed import config as config_lib
from embed import structure
from embed.engine import mesh as mesh_lib
from embed.engine import packing
from embed.engine.bags import Bags
from embed.engine.cost import EXCHANGES
from embed.engine.stack import StackSpec
from embed.kernels import sparse_core
from embed.optimizers import OPTIMIZERS, RowOptimizer
from embed.stacking import (
  ALONE,
  StackCost,
  TablePlan,
  Tables,
  best_strategies,
  example_bags,
  stack_cost,
)
from embed.storage import tables as stored_tables
from embed.tools import text


class Plan:
  """Decisions about how the tables of a feature config are spread over a mesh.

  `embed.plan` and `Plan.from_json` make plans. A plan maps each table name to a `TablePlan`, which
  can be changed: `plan["movie"].strategy = "div"`. Printing a plan shows the costs of its example
  batch. Tables of equal width, dtype, quantization, optimizer and settings are stacked: stored in
  one array and exchanged together.

  Attributes:
    features: the feature config.
    optimizer: the optimizer of tables that have none of their own.
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

  features: Any
  optimizer: RowOptimizer | None
  mesh: Any
  tables: dict[str, config_lib.TableConfig]
  optimizers: dict[str, RowOptimizer | None]
  batch_axis: Sequence[str] | None
  entries: dict[str, TablePlan]

  def __init__(
    self,
    features: Any,
    optimizer: RowOptimizer | None = None,
    mesh: Any = None,
    batch_axis: Sequence[str] | None = None,
  ):
    features = structure.own(features)
    tables = structure.name_tables(features)
    self.__dict__.update(
      features=features,
      optimizer=optimizer,
      mesh=mesh,
      tables=tables,
      optimizers={n: _resolve(n, t, optimizer) for n, t in tables.items()},
      batch_axis=batch_axis,
      entries={name: TablePlan() for name in tables},
    )
    self.hbm_bytes: int | None = None
    self._stored = Tables(self.tables, self.optimizers, mesh, batch_axis)
    # The example batch: shapes by feature, None for one that is left out of it.
    self._bags: dict[structure.Path, Bags | None] = {}

  def __setattr__(self, name: str, value: Any) -> None:
    if name != "hbm_bytes" and not name.startswith("_"):
      raise AttributeError(
        f"The attribute {name!r} of a plan is fixed. Make a plan with embed.plan(...); what it "
        'decides of a table can be changed, as in plan["movie"].strategy = "div".'
      )
    super().__setattr__(name, value)

  @classmethod
  def uniform(cls, features, optimizer, mesh, axis, strategy: str) -> "Plan":
    """A plan with one strategy for all tables, for a `SparseEmbed` without a plan."""
    mesh = mesh if mesh is not None else mesh_lib.current_mesh()
    axes = mesh_lib.as_names(axis)
    result = cls(features, optimizer, mesh, axes)
    for entry in result.entries.values():
      entry.strategy, entry.axis = strategy, axes
    return result

  def with_features(self, features: Any, optimizer: RowOptimizer | None) -> "Plan":
    """The same decisions for another feature config of the same tables.

    Costs are computed for the new features, and are unavailable if it has a feature that the
    example batch does not have, or that looks up in another way.
    """
    result = Plan(features, optimizer or self.optimizer, self.mesh, self.batch_axis)
    if set(result.tables) != set(self.tables):
      raise ValueError(
        f"The plan is for the tables {sorted(self.tables)}, the feature config has "
        f"{sorted(result.tables)}."
      )
    result.entries.update({name: entry.copy() for name, entry in self.entries.items()})
    result.hbm_bytes = self.hbm_bytes
    before = dict(structure.flatten_features(self.features))
    result._bags = {
      path: self._bags[path]
      for path, feature in structure.flatten_features(result.features)
      if path in self._bags and self._facts(before[path]) == result._facts(feature)
    }
    result._suggest()
    return result

  def _facts(self, feature: config_lib.FeatureConfig) -> tuple[Any, ...]:
    """The table name and the settings that determine a feature's bags, besides its inputs."""
    table = next(name for name, table in self.tables.items() if table is feature.table)
    form = (feature.max_sequence_length, feature.output_shape, feature.differentiate_weights)
    return (table, feature.table.combiner, *form)

  @property
  def _unknown(self) -> list[str]:
    """The features whose inputs the example batch does not tell; without a batch all of them."""
    features = structure.flatten_features(self.features)
    return [structure.feature_name(path, x) for path, x in features if path not in self._bags]

  def _example(self) -> dict[str, list[Bags]]:
    """The bags of the example batch by table.

    Raises:
      ValueError: if there are features that it does not tell.
    """
    if unknown := self._unknown:
      what = f"inputs of {unknown}" if self._bags else "batch"
      raise ValueError(f"this plan has no example {what} to cost: make one with embed.plan(...)")
    by_table: dict[str, list[Bags]] = {name: [] for name in self.tables}
    for path, feature in structure.flatten_features(self.features):
      if (bags := self._bags[path]) is not None:
        by_table[self._facts(feature)[0]].append(bags)
    return by_table

  def _suggest(self) -> None:
    """Sets the suggestions of the entries for the example batch."""
    for entry in self.entries.values():
      entry.suggested.clear()
    for chosen in [] if self._unknown else self.costs():
      for name in chosen.tables if chosen.exchange in EXCHANGES else ():
        self[name].suggested.update(exchange=chosen.exchange, capacity=chosen.capacity)

  def adopt(self, profile: Any, headroom: float = 1.25) -> "Plan":
    """Sizes the buffers of the exchange by the needs of a sample of batches; returns the plan.

    Each stack whose rows are split gets a capacity: the rows of the fullest pair of devices in the
    sample times `headroom`, rounded up to a multiple of 8, unless gathering still moves less. A
    batch that needs more takes another round.

    Args:
      profile: the result of `embed.profile(features, batches, plan=self)`.
      headroom: a factor of at least 1.

    Raises:
      ValueError: if the profile has other stacks, or the headroom is below 1.

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
      if not self._unknown and not self._is_worth(stack):
        for table in stack.tables:
          self[table].capacity = None
    return self

  def _is_worth(self, stack: StackSpec) -> bool:
    """Whether an all-to-all with the capacity of a stack moves no more than gathering."""
    bags = self._example()
    sized = stack_cost(self._stored.stack(stack.name, stack.tables, self[stack.tables[0]]), bags)
    gathered = dataclasses.replace(stack, capacity=None, exchange="gather")
    return sized.exchange == "all_to_all" and sized.moved <= stack_cost(gathered, bags).moved

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
    return self._stored.stacks(list(self.tables), self.entries)

  # --- costs -------------------------------------------------------------------------------------

  def costs(self) -> list[StackCost]:
    """The cost of each stack on a device for the example batch, a list of `embed.StackCost`.

    Raises:
      ValueError: if the plan has no example batch, as after `from_json`, or a feature that the
        batch does not have, as with other `features` than the plan was made for.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> [cost.tables for cost in plan.costs()]
    [('movie',)]
    """
    bags = self._example()
    return [stack_cost(stack, bags) for stack in self.stacks().values()]

  @property
  def bytes_per_device(self) -> int:
    """Bytes of rows, slots and buffers on each device, for the example batch.

    Rows and slots in the memory of the host do not count.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> plan.bytes_per_device == sum(c.rows + c.slots + c.buffers for c in plan.costs())
    True
    """
    costs = self.costs()
    stored = sum(c.rows + c.slots for c in costs if c.memory == "device")
    return stored + sum(c.buffers for c in costs)

  @property
  def fits(self) -> bool | None:
    """Whether `bytes_per_device` fit into `hbm_bytes`; None if the memory is not known.

    >>> movie = embed.TableConfig(vocabulary_size=1000, dim=8, name="movie")
    >>> mesh, ids = jax.sharding.AbstractMesh((8,), ("data",)), embed.Padded(np.zeros((64, 4), int))
    >>> plan = embed.plan(embed.FeatureConfig(movie), mesh, ids, embed.adagrad(0.1), 16 << 30)
    >>> plan.fits
    True
    """
    return None if self.hbm_bytes is None else self.bytes_per_device <= self.hbm_bytes

  def __repr__(self) -> str:
    if unknown := self._unknown:
      note = f", no example inputs of {unknown}" if self._bags else ""
      return f"Plan({self.entries}{note})"
    lines: list[tuple[str, ...]] = [_HEADER]
    every = self.costs()
    for of_stack in every:
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
    moved = f"{text.size(sum(c.moved for c in every))} received by each in a step"
    fits = {None: "", True: "; fits", False: "; does not fit"}[self.fits]
    limit = "" if self.hbm_bytes is None else f"{fits} {text.size(self.hbm_bytes)}"
    in_host = sum(c.rows + c.slots for c in every if c.memory == "host")
    if in_host:
      total += f", {text.size(in_host)} of each in the memory of its host"
    notes = self._about_storage() + self._warning()
    return f"{text.aligned(lines, left=(0, 3, 4, 5))}\n{total}, {moved}{limit}{notes}"

  def _about_storage(self) -> str:
    """Lines on the tables that are in the host's memory, packed or on SparseCores, or why not."""
    lines = ""
    for stack in self.stacks().values():
      notes = ["in the memory of the host"] if stack.is_in_host else []
      if stack.is_in_host and stack.placement.platform == "tpu" and stack.placement.devices > 1:
        notes.append("copied there in every step, unless axes are Explicit under jax.set_mesh")
      if stack.is_packed:
        notes.append(packing.describe(stack.width))
      elif wanted := [name for name in stack.tables if self[name].set["packed"]]:
        reason = self._stored.packing_obstacle(wanted[0], self[wanted[0]])
        notes.append(f"not packed: {reason}")
      if stack.sparse_core:
        notes.append("on SparseCores")
      elif wanted := [n for n in stack.tables if sparse_core.is_wanted(self[n].set["sparse_core"])]:
        name, packed = wanted[0], stack.is_packed
        reason = self._stored.sparse_core_obstacle(name, self[name], packed)
        notes.append(f"not on SparseCores: {reason}")
      if notes:
        lines += f"\n{', '.join(stack.tables)}: {'; '.join(notes)}"
    return lines

  def _warning(self) -> str:
    """A warning about tables that are whole on every device while saved or restored, or ""."""
    whole = [
      name
      for stack in self.stacks().values()
      if stack.is_split
      for name in stack.tables
      if stored_tables.view(stack, name, 2, compact=True).kind == "whole"
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
    """The decisions as JSON, for `from_json`.

    The feature config, the mesh and the suggestions of the example batch are left out.

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
    """Reads the decisions of another plan for the same tables. The plan has no example batch.

    Args:
      text: the result of `to_json`.
      features: the feature config.
      mesh: the devices; None is the mesh of `jax.set_mesh`, or one device.
      optimizer: the optimizer of tables that have none of their own.

    Raises:
      ValueError: if the tables differ.
    """
    read = json.loads(text)
    mesh = mesh if mesh is not None else mesh_lib.current_mesh()
    axis = read["batch_axis"]
    result = cls(features, optimizer, mesh, None if axis is None else tuple(axis))
    if set(result.entries) != set(read["tables"]):
      raise ValueError(
        f"The plan is for the tables {sorted(read['tables'])}, the feature config has "
        f"{sorted(result.entries)}."
      )
    result.entries.update({name: TablePlan(**read["tables"][name]) for name in result.tables})
    return result


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

  Tables that can be stored together are decided together. Their rows are split, with two
  exceptions that apply where they move fewer bytes: small tables are replicated, and tables so wide
  that a device keeps 128 columns are split by columns. If they do not fit `hbm_bytes`, no table is
  replicated, and if they still do not, tables stay in the memory of the host, those with most rows
  for each id of the batch first. Nothing is allocated.

  Args:
    features: the feature config.
    mesh: the devices, a `jax.sharding.Mesh`. It may consist of devices that are not attached, from
      `jax.experimental.topologies`, or be a `jax.sharding.AbstractMesh`. None is the mesh of
      `jax.set_mesh`, or one device.
    batch: example inputs of a whole batch in the structure of the feature config, or their shapes
      (`jax.ShapeDtypeStruct` in place of arrays).
    optimizer: the optimizer of tables that have none of their own.
    hbm_bytes: the memory of a device; None asks the mesh's devices.
    axis: the mesh axes to split over; None takes all of them.

  Returns:
    A `Plan`, to print, to change (`plan["movie"].capacity = 512`), to save (`to_json`), and to
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
  result = Plan(features, optimizer, mesh, axes)
  result.hbm_bytes = _memory(mesh) if hbm_bytes is None else hbm_bytes
  paths = [path for path, _ in structure.flatten_features(features)]
  result._bags = dict.fromkeys(paths) | example_bags(features, batch)
  for entry in result.entries.values():
    entry.axis = axes
  if mesh is not None:
    for name, strategy in best_strategies(
      result._stored, result.entries, result._example()
    ).items():
      result.entries[name].strategy = strategy
  if result.fits is False:
    for entry in result.entries.values():
      entry.strategy = "mod" if entry.strategy == "replicated" else entry.strategy
  if result.fits is False:
    _move_to_host(result)
  result._suggest()
  return result


def _move_to_host(plan: Plan) -> None:
  """Keeps tables in the memory of the host until the others fit; none if that is in vain.

  Those with most rows for each id of the batch go first, and come back if they are not needed. On
  several devices their rows are split into consecutive ones, which is how they are saved.
  """
  assert plan.hbm_bytes is not None
  before = {name: entry.copy() for name, entry in plan.entries.items()}
  ids = {
    name: sum(math.prod(bag.ids.shape) for bag in bags) for name, bags in plan._example().items()
  }
  rows_per_id = lambda name: plan.tables[name].vocabulary_size / max(ids[name], 1)
  stored: dict[str, float] = {}  # bytes of a device, by table
  for of_stack in plan.costs():
    rows = sum(plan.tables[name].vocabulary_size for name in of_stack.tables)
    for name in of_stack.tables:
      share = plan.tables[name].vocabulary_size / rows
      stored[name] = share * (of_stack.rows + of_stack.slots)
  excess: float = plan.bytes_per_device - plan.hbm_bytes
  moved: list[str] = []
  for name in sorted(plan, key=rows_per_id, reverse=True):
    if excess > 0 and plan._stored.host_obstacle(name, plan[name]) is None:
      moved.append(name)
      excess -= stored[name]
  for name in reversed(list(moved)):
    if excess + stored[name] <= 0:
      moved.remove(name)
      excess += stored[name]
  for name in moved:
    plan[name].memory = "host"
    plan[name].strategy = "mod" if plan.mesh is None else "div"
  if not plan.fits:
    plan.entries.update(before)


def _memory(mesh: Any) -> int | None:
  """The memory of a device, the same number in every process; None if devices do not report it."""
  if not isinstance(mesh, jax.sharding.Mesh):
    return None  # no mesh, or an AbstractMesh, which has no devices
  try:
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    stats = mine[0].memory_stats()
  except (AttributeError, IndexError, NotImplementedError, jax.errors.JaxRuntimeError):
    return None  # devices that are not attached, or that do not report their memory
  return None if stats is None else stats.get("bytes_limit")


def _resolve(name: str, table: config_lib.TableConfig, default: Any) -> RowOptimizer | None:
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
