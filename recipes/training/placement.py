"""The tables of a recipe on its devices: one strategy, one for each table, or a plan."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import embed

from .. import hosts
from ..errors import UserError


def make_tables(
  config,
  features: Any,
  optimizer: embed.RowOptimizer | None,
  *,
  rngs: nnx.Rngs,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> embed.SparseEmbed:
  """Returns the layer of a model's tables, placed as the config says, and prints the plan of it.

  `config.table.sharding` is a strategy for all tables, or a dict of strategies by table; a table
  that it leaves out is as the plan has it, or "mod". With `config.hbm_bytes`, `embed.plan` chooses
  in place of one strategy for all, and keeps tables that do not fit in the memory of the host.

  Args:
    config: of the run.
    features: the feature config.
    optimizer: of tables that have none of their own.
    rngs: draws the rows.
    mesh: the devices; None is one device.
    inputs: returns the layer's inputs for a whole batch, of `jax.ShapeDtypeStruct`; None for a
      model that is not trained, which needs no plan.

  Raises:
    UserError: the sharding names no table of the model, or the tables need more than `hbm_bytes`.
    ValueError: there is no such strategy.
  """
  strategies, limit = config.table.sharding, config.hbm_bytes
  if limit < 0:
    raise UserError(f"hbm_bytes is {limit}: write the bytes of a device, or 0 to plan nothing")
  is_planned = limit > 0 and inputs is not None
  if isinstance(strategies, str) and not is_planned:
    return embed.SparseEmbed(features, optimizer, rngs=rngs, mesh=mesh, sharding=strategies)
  if limit and inputs is not None:
    plan = embed.plan(features, mesh, inputs(), optimizer, hbm_bytes=limit)
  else:
    plan = embed.Plan.uniform(features, optimizer, mesh, hosts.AXIS, "mod")
  by_table = {} if isinstance(strategies, str) else dict(strategies)
  if unknown := sorted(by_table.keys() - set(plan)):
    raise UserError(
      f"table.sharding names {', '.join(unknown)}, and the tables are {', '.join(sorted(plan))}: "
      "write one of these"
    )
  for name, strategy in by_table.items():
    plan[name].strategy = strategy
  if is_planned:
    hosts.say(str(plan))
    if not plan.fits:
      raise UserError(
        f"the tables need {plan.bytes_per_device:,} bytes on each device, more than "
        f"hbm_bytes={limit:,}: use more devices, table_dtype='bfloat16' or a table.optimizer of "
        "fewer slots"
      )
  return embed.SparseEmbed(plan=plan, rngs=rngs)
