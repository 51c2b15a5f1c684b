"""SparseCore kernels in Pallas: read rows of a table, write rows of tables in place, and sum bags.

A SparseCore has 16 vector subcores, each with its own memory. A kernel splits its ids into
windows, which the subcores take in turn: a subcore reads the ids of a window and copies their rows
between the table in HBM and its own memory. Ids outside the table are skipped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from embed.engine import stack as stack_lib

WIDEST = 2048  # columns: a window of such rows fits in a subcore's memory on all chips
_NO_ROW = -1  # in place of an id outside the table
_WINDOW = 128  # ids; the most that one indirect copy takes


def take(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Reads rows `[N, D]` of a table `[V, D]` at int32 `ids` `[N]`; undefined for ids outside it."""
  (size, dim), count = table.shape, ids.shape[0]
  window = _window(dim)
  ids = _whole_windows(ids, size, window)

  def kernel(table, ids, out, at, rows):
    def copy(start):
      pltpu.sync_copy(ids.at[pl.ds(start, window)], at)
      pltpu.sync_copy(table.at[_rows(at)], rows)
      pltpu.sync_copy(rows, out.at[pl.ds(start, window)])

    _in_turn(ids.shape[0] // window, lambda i: copy(i * window))

  out = jax.ShapeDtypeStruct((ids.shape[0], dim), table.dtype)
  scratch = [pltpu.VMEM((window,), jnp.int32), pltpu.VMEM((window, dim), table.dtype)]
  return _call("take_rows", kernel, out, scratch, dim)(table, ids)[:count]


def put(tables: Sequence[jax.Array], ids: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
  """Writes new rows to tables `[V, D]`, in place if they are donated.

  Args:
    tables: one or more tables of the same shape.
    ids: int32 `[N]`, without repeated rows; ids outside the tables are skipped.
    rows: `[N, D]` for each table.
  """
  (size, dim), count = tables[0].shape, ids.shape[0]
  window = _window(dim)
  ids = _whole_windows(ids, size, window)
  filling = ((0, ids.shape[0] - count), (0, 0))
  pairs = zip(rows, tables, strict=True)
  rows = [jnp.pad(new.astype(table.dtype), filling) for new, table in pairs]
  refs = [jax.new_ref(table) for table in tables]

  def kernel(ids, rows, refs, at, buffer):
    def copy(start):
      pltpu.sync_copy(ids.at[pl.ds(start, window)], at)
      for new, ref in zip(rows, refs, strict=True):
        pltpu.sync_copy(new.at[pl.ds(start, window)], buffer)
        pltpu.sync_copy(buffer, ref.at[_rows(at)])

    _in_turn(ids.shape[0] // window, lambda i: copy(i * window))

  scratch = [pltpu.VMEM((window,), jnp.int32), pltpu.VMEM((window, dim), tables[0].dtype)]
  _call("put_rows", kernel, (), scratch, dim)(ids, rows, refs)
  return [jax.freeze(ref) for ref in refs]


def bag_sum(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Sums the rows of bags, int32 `[B, L]`, to float32 `[B, D]`; other ids add nothing."""
  (size, dim), (count, length) = table.shape, ids.shape
  window = _window(dim)
  # Ordered by position in the bag, so that the ids of a window are contiguous.
  ids = jax.vmap(lambda x: _whole_windows(x, size, window), in_axes=1)(ids)
  bags = ids.shape[1]

  def kernel(table, ids, out, at, sums):
    def add(start):
      _clear(sums)

      @pl.loop(0, length)
      def _(position):
        pltpu.sync_copy(ids.at[pl.ds(position * bags + start, window)], at)
        pltpu.sync_copy(table.at[_rows(at)], sums, add=True)

      pltpu.sync_copy(sums, out.at[pl.ds(start, window)])

    _in_turn(bags // window, lambda i: add(i * window))

  out = jax.ShapeDtypeStruct((bags, dim), table.dtype)
  scratch = [pltpu.VMEM((window,), jnp.int32), pltpu.VMEM((window, dim), table.dtype)]
  return _call("sum_bags", kernel, out, scratch, dim)(table, ids.reshape(-1))[:count]


def _clear(rows: Any) -> None:
  lanes = plsc.get_sparse_core_info().num_lanes

  @pl.loop(0, rows.shape[0])
  def _(row):
    @pl.loop(0, rows.shape[1], step=lanes)
    def _(column):
      rows[row, pl.ds(column, lanes)] = jnp.zeros((lanes,), rows.dtype)


# --- windows of ids -------------------------------------------------------------------------------


def _window(dim: int) -> int:
  """The number of ids whose rows fill at most half of a subcore's memory."""
  room = plsc.get_sparse_core_info().vmem_capacity_bytes // 4 // 2
  window = _WINDOW
  while window > 8 and window * dim > room:
    window //= 2
  return window


def _whole_windows(ids: jax.Array, size: int, window: int) -> jax.Array:
  """Pads ids to whole int32 windows; -1 for padding and for ids not in a table of `size` rows."""
  ids = jnp.where((ids >= 0) & (ids < size), ids, _NO_ROW).astype(jnp.int32)
  return jnp.pad(ids, (0, -ids.shape[0] % window), constant_values=_NO_ROW)


def _rows(at: Any) -> Any:
  """Indexes the rows of a table in HBM by the ids in a subcore's memory."""
  return plsc.Indices(at, ignored_value=_NO_ROW)


def _subcores() -> Any:
  return plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")


def _in_turn(windows: int, body: Callable[[jax.Array], None]) -> None:
  """Runs `body(i)` for this subcore's share of the windows."""
  mesh = _subcores()
  own = jax.lax.axis_index("subcore") * mesh.num_cores + jax.lax.axis_index("core")
  workers = mesh.num_cores * mesh.num_subcores

  @pl.loop(0, pl.cdiv(windows, workers))
  def _(turn):
    i = turn * workers + own
    pl.when(i < windows)(lambda: body(i))


def _call(
  name: str, kernel: Callable[..., None], out: Any, scratch: Sequence[Any], dim: int
) -> Callable[..., Any]:
  """Makes a kernel that runs on all subcores of the chip."""
  # Rows that fill whole tiles are read in place; for others, the compiler copies the table.
  tiled = dim % stack_lib.LANES == 0
  params = pltpu.CompilerParams(needs_layout_passes=False, use_tc_tiling_on_sc=tiled)
  return pl.kernel(
    kernel,
    out_type=out,
    mesh=_subcores(),
    name=f"sparse_core_{name}",
    scratch_types=list(scratch),
    compiler_params=params,
  )
