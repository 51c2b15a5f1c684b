"""Collectives along mesh axes, inside `jax.shard_map`.

Without axes, `all_gather` and `all_to_all` return their argument, and `device_index` returns 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

Names = tuple[str, ...]


def device_index(axes: Names) -> jax.Array:
  """int32 scalar: this device's position along some axes."""
  return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def all_gather(tree: Any, axes: Names) -> Any:
  """`[n, ...]` of every device along some axes, one after another."""
  if not axes:
    return tree
  with jax.named_scope("exchange"):
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), tree)


def all_to_all(x: jax.Array, axes: Names) -> jax.Array:
  """`[n, ...]`, an entry for each device, to the entries that the devices had for this one."""
  if not axes:
    return x
  with jax.named_scope("exchange"):
    return jax.lax.all_to_all(x, axes, 0, 0)
