"""The bytes that each kind of exchange moves, and the choice of a kind: plain arithmetic.

Only `choose_exchange` makes that choice, both for a plan and at run time.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embed.engine.bags import Bags
from embed.engine.stack import StackSpec

EXCHANGES = ("all_to_all", "gather")  # the kinds that a user may choose


@dataclasses.dataclass(frozen=True)
class BatchDemand:
  """The numbers of ids and activations that a device requests.

  Attributes:
    ids: the number of ids in bags that are not ragged, for each table of the stack.
    activations: the number of activations of bags that are not ragged, for all tables together.
    ragged_ids: the number of ids in ragged bags of the whole batch, for all tables together.
    ragged_activations: the number of activations of ragged bags in the whole batch.
  """

  ids: tuple[int, ...]
  activations: int
  ragged_ids: int = 0
  ragged_activations: int = 0


class Exchange(NamedTuple):
  """A method of moving ids, rows and gradients between devices.

  `kind` is "all_to_all" (of distinct rows), "gather" (of ids and activations), "sum" (no gather; an
  update adds up whole replicated tables) or "none". `capacity` is the most rows that a pair of
  devices exchanges in a round of an all-to-all.
  """

  kind: str
  capacity: int | None = None


def batch_demand(stack: StackSpec, bags: Sequence[Bags], tables: Sequence[str]) -> BatchDemand:
  """The demand of the whole batch's bags, arrays or shapes, each padded for all devices."""
  placement = stack.placement
  share = lambda x: -(-x // placement.devices)
  ids, activations, ragged_ids, ragged_activations = [0] * len(stack.tables), 0, 0, 0
  for bag, table in zip(bags, tables, strict=True):
    first, *rest = bag.batch
    batch = (first + -first % placement.devices, *rest)
    if bag.is_ragged:
      ragged_ids += math.prod(bag.ids.shape)
      ragged_activations += math.prod(batch)
    else:
      ids[stack.indices[table]] += math.prod(batch) * bag.ids.shape[-1]
      activations += math.prod(batch)
  return BatchDemand(tuple(map(share, ids)), share(activations), ragged_ids, ragged_activations)


def choose_exchange(stack: StackSpec, demand: BatchDemand) -> Exchange:
  """Chooses the exchange of a stack for a demand.

  Follows the stack's own `exchange` and `capacity`; without them, the kind that moves fewer bytes.
  """
  layout, placement, ids = stack.layout, stack.placement, sum(demand.ids)
  if layout.shards == 1:
    if placement.replicas == 1:
      return Exchange("none")
    is_small = layout.shard_rows <= (ids + demand.ragged_ids) * placement.replicas
    return Exchange("sum" if is_small else "gather")
  if not ids or stack.exchange == "gather":
    return Exchange("gather")
  capacity = min(stack.capacity or default_capacity(stack, demand), ids, layout.shard_rows)
  is_free = stack.exchange is None and stack.capacity is None
  if is_free and gather_bytes(stack, demand) < all_to_all_bytes(stack, capacity):
    return Exchange("gather")
  return Exchange("all_to_all", capacity)


def default_capacity(stack: StackSpec, demand: BatchDemand) -> int:
  """The default number of rows that a round has room for, per pair of devices.

  Six standard deviations above the mean for ids spread randomly over shards, rounded up to a
  multiple of 8. No more rows of a table are requested than it has: a repeated id is sent once.
  """
  layout = stack.layout
  distinct = sum(map(min, demand.ids, layout.sizes))
  mean = distinct / layout.shards
  return min(-(-math.ceil(mean + 6 * math.sqrt(mean)) // 8) * 8, sum(demand.ids), layout.shard_rows)


# --- bytes that a device receives in a step ------------------------------------------------------


def moved_bytes(stack: StackSpec, demand: BatchDemand, exchange: Exchange) -> int:
  """Bytes that a device receives in a step: forward, backward and update."""
  # Ragged bags: sums of the whole batch, and their gradients.
  devices = stack.placement.devices
  moved = 3 * 4 * demand.ragged_activations * stack.dim * (devices - 1) // devices
  if exchange.capacity is not None:
    moved += all_to_all_bytes(stack, exchange.capacity)
  elif exchange.kind == "gather":
    moved += gather_bytes(stack, demand)
  elif exchange.kind == "sum":
    moved += sum_bytes(stack)
  return moved


def buffer_bytes(stack: StackSpec, demand: BatchDemand, exchange: Exchange) -> int:
  """Bytes of the exchange's buffers on a device."""
  layout, width, ids = stack.layout, stack.dim, sum(demand.ids)
  buffers = 8 * demand.ragged_activations * stack.dim if stack.placement.devices > 1 else 0
  if exchange.capacity is not None:
    buffers += 4 * layout.shards * exchange.capacity * (2 + 2 * width)
  elif exchange.kind == "sum":
    buffers += 4 * layout.shard_rows * (width + 1)
  elif exchange.kind == "gather" and layout.shards > 1:
    everybody = layout.shards * stack.placement.replicas
    buffers += 8 * everybody * (ids + demand.activations * width)
  elif exchange.kind == "gather":
    buffers += gather_bytes(stack, demand)
  return buffers


def all_to_all_bytes(stack: StackSpec, capacity: int) -> int:
  """Bytes of one round: ids, rows, and gradients of rows.

  Replicas also receive each other's gradients, with their ids.
  """
  shards = stack.layout.shards
  row, grads = stack.dim * np.dtype(stack.dtype).itemsize, 4 * stack.dim
  replicas = (stack.placement.replicas - 1) * shards * capacity * (4 + grads)
  return (shards - 1) * capacity * (4 + row + grads) + replicas


def gather_bytes(stack: StackSpec, demand: BatchDemand) -> int:
  """Bytes of ids and activations, then of ids and gradients of activations."""
  others = stack.layout.shards - 1
  everybody = stack.layout.shards * stack.placement.replicas - 1
  return 4 * (others + everybody) * (sum(demand.ids) + demand.activations * stack.dim)


def sum_bytes(stack: StackSpec) -> int:
  """Bytes of whole tables, and of one flag per row, to add them up over replicas."""
  replicas = stack.placement.replicas
  return 2 * 4 * stack.layout.shard_rows * (stack.dim + 1) * (replicas - 1) // replicas


def readable(num_bytes: int) -> str:
  """Formats a number of bytes with a unit: 1536 as 1.5k."""
  for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
    if num_bytes >= factor:
      return f"{num_bytes / factor:.1f}{unit}"
  return str(num_bytes)
