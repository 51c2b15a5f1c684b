"""Meshes: the axes that a table is split over, and the placement of arrays on them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embed.engine.xla import is_traced

Names = tuple[str, ...]


# --- collectives along mesh axes, inside `jax.shard_map` ------------------------------------------

# Without axes, `all_gather` and `all_to_all` return their argument, and `device_index` returns 0.


def device_index(axes: Names) -> jax.Array:
  """The position of this device along some axes, an int32 scalar."""
  return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def all_gather(tree: Any, axes: Names) -> Any:
  """Concatenates `[n, ...]` from every device along some axes."""
  if not axes:
    return tree
  with jax.named_scope("exchange"):
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), tree)


def all_to_all(x: jax.Array, axes: Names) -> jax.Array:
  """Sends each device its entry of `[n, ...]`; returns the entries sent to this device."""
  if not axes:
    return x
  with jax.named_scope("exchange"):
    return jax.lax.all_to_all(x, axes, 0, 0)


# --- axes and their types ------------------------------------------------------------------------


def as_names(axis: str | Sequence[str] | None) -> Names:
  """Converts mesh axes, given as one name, several names or None, to a tuple."""
  if axis is None:
    return ()
  return (axis,) if isinstance(axis, str) else tuple(axis)


def current_mesh() -> Any:
  """The mesh of `jax.set_mesh`, or None; inside a jitted function, its abstract mesh."""
  mesh: Mesh | AbstractMesh
  try:
    mesh = jax.sharding.get_mesh()
  except ValueError:  # inside a jitted function, where there is only an abstract one
    mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


@functools.lru_cache
def _retyped(mesh: Any, types: tuple[AxisType, ...]) -> Any:
  """The same mesh with other axis types."""
  if isinstance(mesh, AbstractMesh):
    return mesh.update_axis_types(dict(zip(mesh.axis_names, types, strict=True)))
  return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def explicit_sharding(x: Any) -> NamedSharding | None:
  """The sharding in the type of an array or `ShapeDtypeStruct`; None without Explicit axes."""
  if isinstance(x, jax.ShapeDtypeStruct):
    where, is_concrete = x.sharding, False
  else:
    where = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    is_concrete = not is_traced(x)
  if where is None or AxisType.Explicit not in where.mesh.axis_types:
    return None
  # The mesh in a type is abstract; outside jitted functions, arrays are moved to a concrete one.
  return x.sharding if is_concrete else where


def is_explicit(tree: Any) -> bool:
  """Returns True if any array of a tree has a sharding in its type."""
  return any(explicit_sharding(x) is not None for x in jax.tree.leaves(tree))


def _move(x: Any, where: NamedSharding) -> Any:
  """Moves an array, traced or not, to another sharding."""
  if not is_traced(x):
    return jax.device_put(x, where)
  if AxisType.Explicit in where.mesh.axis_types:
    return jax.sharding.reshard(x, where)
  return jax.lax.with_sharding_constraint(x, where)


def without_types(tree: Any) -> Any:
  """Moves arrays to Auto axes, so that outside `jax.set_mesh` the compiler shards what follows.

  JAX has no sharding rule for many operations on Explicit axes, such as the gradient of a matrix
  product over a split batch, and asks the caller for a sharding.
  """

  def auto(x):
    where = explicit_sharding(x)
    if where is None:
      return x
    mesh = _retyped(where.mesh, (AxisType.Auto,) * len(where.mesh.axis_names))
    return _move(x, NamedSharding(mesh, where.spec))

  return jax.tree.map(auto, tree)


def settled(tree: Any) -> Any:
  """Waits for arrays that are on several CPU devices, and returns them.

  XLA:CPU has one thread pool for all devices of a process. If programs that communicate are started
  one after another, as in eager code, it can happen that none gets enough threads to finish.
  """
  for x in jax.tree.leaves(tree):
    if isinstance(x, jax.Array) and not is_traced(x):
      devices: Any = x.sharding.device_set
      if len(devices) > 1 and next(iter(devices)).platform == "cpu":
        x.block_until_ready()
  return tree


def like(x: jax.Array, other: Any) -> jax.Array:
  """Gives an array or scalar the sharding type of `other`, for arithmetic with it."""
  where = explicit_sharding(other)
  if where is None:
    return without_types(x) if current_mesh() is None else x
  spec, own = where.spec if x.shape == other.shape else P(), explicit_sharding(x)
  return x if own is not None and own.spec == spec else _move(x, NamedSharding(where.mesh, spec))


@dataclasses.dataclass(frozen=True)
class Placement:
  """The devices that hold a stack's rows; `LOCAL` is one device.

  `row_axes` are the mesh axes that rows are split over, `batch_axes` the axes that activations are
  split over. Devices along other mesh axes hold copies. Inside a lookup, the batch is split over
  both, in the mesh's order: `axes`.
  """

  mesh: Mesh | AbstractMesh | None
  row_axes: Names = ()
  batch_axes: Names = ()

  @functools.cached_property
  def is_local(self) -> bool:
    """True for a single device, without a mesh."""
    return self.mesh is None

  @functools.cached_property
  def axes(self) -> Names:
    """The axes that the batch is split over inside a lookup."""
    used = {*self.row_axes, *self.batch_axes}
    return tuple(name for name in (self.mesh.shape if self.mesh else ()) if name in used)

  @functools.cached_property
  def replica_axes(self) -> Names:
    """The axes that split only the batch: devices along them store the same rows."""
    return tuple(name for name in self.axes if name not in self.row_axes)

  def _number(self, axes: Names) -> int:
    return math.prod(self.mesh.shape[name] for name in axes) if self.mesh else 1

  @functools.cached_property
  def shards(self) -> int:
    """The number of parts that rows are split into."""
    return self._number(self.row_axes)

  @functools.cached_property
  def replicas(self) -> int:
    """The number of devices that store the same rows."""
    return self._number(self.replica_axes)

  @functools.cached_property
  def devices(self) -> int:
    """The number of parts that the batch is split into."""
    return self._number(self.axes)

  @functools.cached_property
  def work(self) -> P:
    """The spec of the batch inside a lookup."""
    return P(self.axes)

  @property
  def device(self) -> jax.Device:
    """One of the devices; without a concrete mesh, the default device."""
    if isinstance(self.mesh, Mesh):
      return self.mesh.devices.flat[0]
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]

  @property
  def device_kind(self) -> str:
    """The device kind, such as "TPU v6 lite"."""
    return self.device.device_kind

  # --- meshes and shardings --------------------------------------------------------------------

  @property
  def active_mesh(self) -> Mesh | AbstractMesh:
    """The mesh, with the axis types of the current mesh; with Auto axes outside `jax.set_mesh`.

    Explicit axes put shardings into the types of arrays; the rest of a model has them only under
    `jax.set_mesh`.
    """
    assert self.mesh is not None
    current = current_mesh()
    if current is None:
      return _retyped(self.mesh, (AxisType.Auto,) * len(self.mesh.axis_names))
    is_same = current.axis_names == self.mesh.axis_names and current.shape == self.mesh.shape
    return _retyped(self.mesh, current.axis_types) if is_same else self.mesh

  def _explicit_mesh(self) -> Mesh | AbstractMesh:
    assert self.mesh is not None
    return _retyped(self.mesh, (AxisType.Explicit,) * len(self.mesh.axis_names))

  def _mesh_for(self, arrays: Any) -> Mesh | AbstractMesh:
    """The active mesh; outside `jax.set_mesh`, an Explicit one for arrays on Explicit axes."""
    if current_mesh() is None and is_explicit(arrays):
      return self._explicit_mesh()
    return self.active_mesh

  def stored_spec(self, ndim: int) -> P:
    """The spec of a table `[rows, columns]`, or of a slot with one value per row."""
    return P(*(self.row_axes, None)[:ndim]) if self.row_axes else P()

  def sharding(self, spec: P) -> NamedSharding:
    return NamedSharding(self.active_mesh, spec)

  # --- placing arrays ----------------------------------------------------------------------------

  def put(self, x: jax.Array, spec: P) -> jax.Array:
    """Moves an array to another sharding, also in its type if that already has one."""
    if self.mesh is None:
      return x
    where = explicit_sharding(x)
    return _move(x, self.sharding(spec) if where is None else NamedSharding(where.mesh, spec))

  def pad_batch(self, x: jax.Array, value: float) -> jax.Array:
    """Pads an array `[batch, ...]` with `value` to a multiple of the number of devices."""
    missing = -x.shape[0] % self.devices
    if not missing:
      return x
    return jnp.pad(
      self.put(x, P()), [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value
    )

  def _batch_spec(self, batch: int) -> P:
    return P(self.batch_axes) if batch % self._number(self.batch_axes) == 0 else P()

  def split_batch(self, x: jax.Array, batch: int) -> jax.Array:
    """The first `batch` entries of `[n, ...]`, split over the batch axes if these divide it."""
    if x.shape[0] != batch:
      x = self.put(x, P())[:batch]
    return self.put(x, self._batch_spec(batch))

  def zeros(self, aval: Any) -> jax.Array:
    """Zeros like an abstract value, with the sharding in its type."""
    if self.mesh is None:
      return jnp.zeros(aval.shape, aval.dtype)
    is_typed = aval.sharding is not None and AxisType.Explicit in aval.sharding.mesh.axis_types
    where = aval.sharding if is_typed else self.sharding(P())
    mesh = self.mesh if isinstance(self.mesh, Mesh) else current_mesh() or self.mesh
    where = NamedSharding(_retyped(mesh, where.mesh.axis_types), where.spec)
    return _move(jnp.zeros(aval.shape, aval.dtype), where)

  def typed(self, act: jax.Array) -> jax.Array:
    """Activations with their sharding in their type, even outside `jax.set_mesh`."""
    if self.mesh is None or is_explicit(act):
      return act
    return _move(act, NamedSharding(self._explicit_mesh(), self._batch_spec(act.shape[0])))

  # --- running functions -------------------------------------------------------------------------

  def run(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Makes `f` run per device, on arrays placed by `in_specs`, a tree of specs or a tree prefix.

    If any of the arrays has a sharding in its type, so do the results.
    """
    if self.mesh is None:
      return f

    def placed(*args):
      mesh = self._mesh_for(args)
      is_spec = lambda x: isinstance(x, P)
      put = lambda spec, tree: jax.tree.map(lambda x: _move(x, NamedSharding(mesh, spec)), tree)
      args = jax.tree.map(put, in_specs, args, is_leaf=is_spec)
      return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *args
      )

    return placed

  def prepare(self, f: Callable[[Any], Any], x: Any, like: Any = None) -> Any:
    """Runs `f(x)`, whatever the operations in `f` and the sharding of `x`.

    An Explicit mesh requires a sharding for each reshape and gather in `f`; here the compiler
    chooses, and results are split along their first dimension if it divides evenly. They have
    shardings in their types if the current mesh is Explicit or, without one, if `like` has them.
    """
    if self.mesh is None:
      return f(x)
    mesh = self._mesh_for(like)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if current_mesh() is None and not explicit:
      x = without_types(x)
    leaves, treedef = jax.tree.flatten(x)
    on_device = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    if not explicit or not on_device:
      return f(x)

    def of(arrays):  # other leaves are not converted: NumPy integers may have 64 bits
      by_index = dict(zip(on_device, arrays, strict=True))
      return f(jax.tree.unflatten(treedef, [by_index.get(i, x) for i, x in enumerate(leaves)]))

    arrays = [leaves[i] for i in on_device]
    shapes = jax.eval_shape(of, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
    even = lambda s: s.ndim and s.shape[0] % self.devices == 0
    spec = lambda s: NamedSharding(mesh, self.work if even(s) else P())
    return jax.sharding.auto_axes(of, axes=explicit, out_sharding=jax.tree.map(spec, shapes))(
      arrays
    )


LOCAL = Placement(None)


def check_inputs(placement: Placement, name: str, parts: Any) -> Any:
  """Checks the `bags.Parts` of a feature, and places them for a lookup."""
  if placement.is_local:
    for x in jax.tree.leaves(parts):
      if isinstance(x, jax.Array) and any(jax.typeof(x).sharding.spec):
        raise ValueError(
          f"Feature {name!r} is split over a mesh, {jax.typeof(x)}, but this SparseEmbed was made "
          "without one. Make it under jax.set_mesh(mesh), or pass mesh=mesh."
        )
    return parts
  splits = parts.layout
  if parts.kind != "ragged" or not isinstance(splits, jax.Array):
    return parts
  # Bags count all splits with a scatter-add: XLA's partitioner adds wrong elements if the indices
  # are split unevenly over some of several mesh axes (seen with jaxlib 0.10.2, in a scatter-add
  # with a slice of sharded indices).
  if is_traced(splits) or len(splits.sharding.device_set) > 1:
    splits = placement.put(splits, P())
  return dataclasses.replace(parts, layout=splits)
