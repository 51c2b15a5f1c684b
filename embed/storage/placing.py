"""Places whole tables on the devices of a placement."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from embed.engine import host, jax_internals
from embed.engine.collectives import Names
from embed.engine.mesh import Placement, current_mesh


def place_whole(placement: Placement, x: Any, dtype: Any, where: P | NamedSharding) -> jax.Array:
  """A whole array, the same on every host, split over devices without a copy of it on any."""
  if jax_internals.is_traced(x):
    assert isinstance(where, P)
    return placement.put(x.astype(dtype), where)
  sharding = _on_devices(placement, where)
  if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
    return jax.device_put(x.astype(dtype), sharding)
  whole = np.asarray(x)
  part = lambda index: whole[index].astype(dtype)
  return jax.make_array_from_callback(whole.shape, sharding, part)


def dtype_of(x: Any) -> Any:
  """The dtype of an array, of nested lists, or of the metadata of a stored array."""
  is_known = isinstance(x, jax.Array) or isinstance(getattr(x, "dtype", None), np.dtype)
  return x.dtype if is_known else np.asarray(x).dtype


def converts(x: Any, dtype: Any) -> bool:
  """Whether all values of an array are numbers of a dtype, but for their rounding."""
  given = dtype_of(x)
  if jnp.issubdtype(given, jnp.complexfloating):
    return jnp.issubdtype(dtype, jnp.complexfloating)
  return given == np.bool_ or jnp.issubdtype(given, jnp.number)


def copied_like(value: Any, old: jax.Array) -> jax.Array:
  """A copy of a value, in the memory and on the devices of the array that it replaces."""
  in_host = host.is_in_host(old)
  if jax_internals.is_traced((value, old)):
    new = jnp.array(host.to_device(value), old.dtype, copy=True)
    return host.to_host(new) if in_host else new
  if isinstance(value, jax.Array) and value.sharding != old.sharding and value.is_fully_addressable:
    value = np.asarray(value)
  # To the host not by way of the device, which may have no room for it; and NumPy arrays by an
  # explicit transfer, which jax_transfer_guard allows.
  is_numpy = in_host or not isinstance(value, jax.Array)
  copied = np.array(value, old.dtype) if is_numpy else jnp.array(value, old.dtype, copy=True)
  return jax.device_put(copied, old.sharding if old.committed or in_host else None)


def same_parts(
  placement: Placement, x: jax.Array, columns: int, where: P | NamedSharding
) -> jax.Array:
  """An array `[V, columns]` of which each device has its part of `x`.

  For use outside of jitted functions.
  """
  sharding = _on_devices(placement, where)
  parts = [shard.data for shard in x.addressable_shards]
  return jax.make_array_from_single_device_arrays((x.shape[0], columns), sharding, parts)


def in_host(placement: Placement, spec: P) -> Any:
  """The sharding of an array in the memory of the host; outside of jitted functions."""
  if placement.mesh is None:
    return SingleDeviceSharding(jax_internals.default_device(), memory_kind=host.KIND)
  return _on_devices(placement, spec).with_memory_kind(host.KIND)


def compact(placement: Placement, columns: Names, parts: int) -> NamedSharding:
  """Columns over `columns` and `parts`, of which shard r of the rows has number `r % parts`.

  That is no sharding of this mesh, but of its devices in another shape.
  """
  mesh = _devices_mesh(placement)
  other_axes = tuple(name for name in mesh.axis_names if name not in placement.row_axes)
  order = [mesh.axis_names.index(name) for name in (*other_axes, *placement.row_axes)]
  shape = [mesh.shape[name] for name in other_axes]
  devices = mesh.devices.transpose(order).reshape(*shape, placement.shards // parts, parts)
  # Named after the axes they are cut from, so that they differ from all others.
  copies, cut = (f"{kind} of {', '.join(placement.row_axes)}" for kind in ("copies", "parts"))
  return NamedSharding(Mesh(devices, (*other_axes, copies, cut)), P(None, (*columns, cut)))


def _on_devices(placement: Placement, where: P | NamedSharding) -> NamedSharding:
  return NamedSharding(_devices_mesh(placement), where) if isinstance(where, P) else where


def _devices_mesh(placement: Placement) -> Any:
  """Outside of jitted functions, where a layer made inside of one only knows an abstract mesh."""
  mesh = current_mesh() if isinstance(placement.mesh, AbstractMesh) else placement.active_mesh
  if mesh is None:
    raise ValueError(
      "This SparseEmbed was made inside a jitted function, under jax.set_mesh. Use it under "
      "jax.set_mesh too, or pass mesh=... where it is made."
    )
  return mesh
