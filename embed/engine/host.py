"""Rows in the memory of the host, for tables that the memory of the devices has no room for.

An array says in its type where it is. Gathers and scatters run where the rows are, and only the
rows that are looked up or updated cross to the device and back.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on

from embed.engine.bags import Bags, is_row

KIND = "pinned_host"  # the kind of memory, as shardings name it
PLATFORMS = ("cpu", "tpu")  # for GPUs JAX 0.10.2 forgets in which memory an argument is


def is_in_host(x: Any) -> bool:
  """Whether an array, traced or not, is in the memory of the host."""
  return isinstance(x, jax.Array) and getattr(jax.typeof(x), "memory_space", None) == _HOST


_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_CLIP: Any = {"mode": "clip", "wrap_negative_indices": False}
_DROP: Any = {"mode": "drop", "wrap_negative_indices": False, "unique_indices": True}

_take = compute_on("device_host")(jax.jit(lambda rows, ids: rows.at[ids].get(**_CLIP)))
_put = compute_on("device_host")(jax.jit(lambda rows, ids, new: rows.at[ids].set(new, **_DROP)))


def to_device(x: jax.Array) -> jax.Array:
  """An array, or all of it that a device has, in the memory of the device."""
  return jax.device_put(x, _DEVICE) if is_in_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
  """The inverse of `to_device`."""
  return jax.device_put(x, _HOST)


def full(shape: tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
  """An array of one value in the memory of the host, inside a jitted function.

  TPUs make it on the device first. Outside of jitted functions NumPy's arrays avoid that.
  """
  spread = compute_on("device_host")(jax.jit(lambda x: jnp.broadcast_to(x, shape)))
  return spread(to_host(jnp.asarray(value, dtype)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRows:
  """Rows `[V, D]` or `[V]` that stay in the memory of the host.

  Attributes:
    array: the rows.
  """

  array: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape

  @property
  def dtype(self) -> Any:
    return self.array.dtype

  @property
  def ndim(self) -> int:
    return self.array.ndim

  def take(self, ids: jax.Array) -> jax.Array:
    """The rows `[N, ...]` of ids int32 `[N]`, on the device; undefined for ids outside."""
    return to_device(_take(self.array, to_host(ids)))

  def of_bags(self, bags: Bags) -> tuple[jax.Array, Bags]:
    """The rows `[N, D]` of all ids in one transfer, and bags of their positions in it."""
    ids, size = bags.ids.reshape(-1), self.shape[0]
    position = jnp.where(is_row(ids, size), jnp.arange(ids.size, dtype=jnp.int32), ids.size)
    return self.take(ids), bags.with_ids(position.reshape(bags.ids.shape))

  def put(self, ids: jax.Array, rows: jax.Array) -> "HostRows":
    """Replaces the rows at distinct ids; ids outside are skipped."""
    return HostRows(_put(self.array, to_host(ids), to_host(rows.astype(self.dtype))))
