"""A stack: tables of one width, dtype and optimizer that are stored in one array."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from embed.config import QuantizationConfig
from embed.engine import packing
from embed.engine.layout import Columns, Layout
from embed.engine.mesh import LOCAL, Placement
from embed.optimizers import RowOptimizer, Slot

# "parameters" and slots: `[rows, width]`, packed `[lines, columns]`, or one value per row `[rows]`.
Arrays = dict[str, Any]
# `f(local_rows, gradients, arrays, occurrence=0) -> new arrays`, see `row_step.step_stored`.
RowStep = Callable[..., Arrays]


@dataclasses.dataclass(frozen=True)
class StackSpec:
  """What decides the compiled programs of a stack: static, hashable, equal by value.

  Layers with equal stacks share their compiled lookups and steps. Initial values are no part of it.

  Attributes:
    name: of the stack in its layer.
    tables: their names, in the order of `layout.sizes`.
    layout: which row is where.
    dim: D.
    dtype: of the rows.
    optimizer: of the tables, or None.
    placement: the devices.
    quantization: of rows before they are summed, or None.
    stochastic_rounding: whether new rows narrower than float32 are rounded at random.
    exchange: "all_to_all", "gather", or None for the one that moves less.
    capacity: the rows that a pair of devices exchanges in a round; None follows from each call.
    sparse_core: whether SparseCores read and write the rows.
    is_packed: whether narrow rows are stored side by side, in lines: see `packing`.
    is_in_host: whether rows and slots are in the memory of the host: see `host`.
    indices: the position of each table in the layout.
    width: the columns on a device.
    row_width: the columns that a row takes on a device as it is stored.
    columns: the columns of a row, on one device or several.
    specs: the PartitionSpecs of stored rows (2) and of slots of one value per row (1).
    accumulates: whether the gradients of a row are summed before one step.
    uses_stochastic_rounding: whether new rows are rounded at random.
    slots: what the optimizer keeps for each row, by name.
  """

  name: str
  tables: tuple[str, ...]
  layout: Layout
  dim: int
  dtype: np.dtype
  optimizer: RowOptimizer | None = None
  placement: Placement = LOCAL
  quantization: QuantizationConfig | None = None
  stochastic_rounding: bool = False
  exchange: str | None = None
  capacity: int | None = None
  sparse_core: bool = False
  is_packed: bool = False
  is_in_host: bool = False
  indices: dict[str, int] = dataclasses.field(init=False, compare=False)
  width: int = dataclasses.field(init=False, compare=False)
  row_width: int = dataclasses.field(init=False, compare=False)
  columns: Columns = dataclasses.field(init=False, compare=False)
  specs: dict[int, Any] = dataclasses.field(init=False, compare=False)
  slots: dict[str, Slot] = dataclasses.field(init=False, compare=False)
  accumulates: bool = dataclasses.field(init=False, compare=False)
  uses_stochastic_rounding: bool = dataclasses.field(init=False, compare=False)

  def __post_init__(self) -> None:
    optimizer, width = self.optimizer, -(-self.dim // self.placement.column_shards)
    derived = {
      "indices": {table: i for i, table in enumerate(self.tables)},
      "width": width,
      "row_width": packing.row_width(width) if self.is_packed else width,
      "columns": Columns(self.placement.column_axes, self.dim),
      "specs": {ndim: self.placement.stored_spec(ndim) for ndim in (1, 2)},
      "slots": {} if optimizer is None else optimizer.slots(self.dim),
      "accumulates": optimizer is None or optimizer.use_gradient_accumulation,
      "uses_stochastic_rounding": self.stochastic_rounding and self.dtype != np.float32,
    }
    for name, value in derived.items():
      object.__setattr__(self, name, value)

  def size(self, table: str) -> int:
    """The vocabulary_size of a table."""
    return self.layout.sizes[self.indices[table]]

  @functools.cached_property
  def _hash(self) -> int:  # compiled functions ask for it at every call
    compared = (field.name for field in dataclasses.fields(self) if field.compare)
    return hash(tuple(getattr(self, name) for name in compared))

  def __hash__(self) -> int:
    return self._hash

  def __getstate__(self) -> dict[str, Any]:  # another process hashes strings differently
    return {name: value for name, value in vars(self).items() if name != "_hash"}

  @property
  def stored_shape(self) -> tuple[int, int]:
    """The shape of the rows on a device as they are stored."""
    each = packing.rows_per_line(self.width) if self.is_packed else 1
    return self.layout.shard_rows // each, self.row_width * each

  @property
  def is_split(self) -> bool:
    """Whether rows are on several devices, and have to be exchanged."""
    return self.layout.shards > 1
