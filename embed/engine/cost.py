"""How many bytes the ways of an exchange move, and which one to take: plain arithmetic."""

import math
from typing import NamedTuple

from embed.engine.layout import Layout


class Demand(NamedTuple):
  """What a device asks of a stack in one call: ids of each table, and activations in all.

  Devices that hold other columns of the same rows ask together.
  """

  ids: tuple[int, ...]
  activations: int


class Way(NamedTuple):
  """What the bytes of an exchange depend on beside the demand.

  `width`: the columns on a device; `itemsize`: bytes of an element of a row, gradients having 4;
  `replicas`: devices with the same rows and columns.
  """

  layout: Layout
  width: int
  itemsize: int
  replicas: int


def capacity(demand: Demand, layout: Layout) -> int:
  """The rows for a pair of devices that a round has room for.

  Six standard deviations above the mean of ids that fall on shards at random, in eights. An id
  that repeats is sent once, so a table cannot ask for more rows than it has.
  """
  distinct = sum(map(min, demand.ids, layout.sizes))
  mean = distinct / layout.shards
  return min(-(-math.ceil(mean + 6 * math.sqrt(mean)) // 8) * 8, sum(demand.ids), layout.rows)


def all_to_all_bytes(capacity: int, way: Way) -> int:
  """What a device receives in a step of one round: ids, rows, and gradients of rows.

  Replicas receive the gradients of each other as well, and the ids that they belong to.
  """
  shards = way.layout.shards
  row, grads = way.width * way.itemsize, 4 * way.width
  beside = (way.replicas - 1) * shards * capacity * (4 + grads)
  return (shards - 1) * capacity * (4 + row + grads) + beside


def gather_bytes(demand: Demand, way: Way) -> int:
  """What a device receives in a step: ids and activations, then ids and gradients of them."""
  others = way.layout.shards - 1
  everybody = way.layout.shards * way.replicas - 1
  return 4 * (others + everybody) * (sum(demand.ids) + demand.activations * way.width)


def sum_bytes(way: Way) -> int:
  """What a device receives where whole tables, and which rows were touched, are added up."""
  return 2 * 4 * way.layout.rows * (way.width + 1) * (way.replicas - 1) // way.replicas


def columns_bytes(demand: Demand, width: int, columns: int) -> int:
  """What a device receives of others with the same rows: ids and slices of activations, twice."""
  return 2 * 4 * (sum(demand.ids) + demand.activations * width) * (columns - 1) // columns


def loose_bytes(activations: int, dim: int, devices: int) -> int:
  """What a device receives for ragged bags whose values are anywhere: their sums and gradients."""
  return 3 * 4 * activations * dim * (devices - 1) // devices


def choose(demand: Demand, way: Way, exchange: str | None, forced: int | None) -> int | None:
  """The capacity of an all-to-all, or None where gathering is asked for or moves less.

  Args:
    demand: of a device.
    way: of the tables.
    exchange: "all_to_all", "gather", or None for the one that moves less.
    forced: the capacity, or None for `capacity`.
  """
  layout = way.layout
  if layout.shards == 1 or not sum(demand.ids) or exchange == "gather":
    return None
  room = min(forced or capacity(demand, layout), sum(demand.ids), layout.rows)
  if exchange is None and forced is None:
    return None if gather_bytes(demand, way) < all_to_all_bytes(room, way) else room
  return room
