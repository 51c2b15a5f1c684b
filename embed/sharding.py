"""Meshes: which axes a table is split over, and how arrays get there. The only place that knows.

A **strategy** says how a table is spread over mesh axes: "mod" and "div" split its rows, "column"
its columns, "replicated" nothing. The batch is split over all axes involved, inside the lookup.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embed.exchange import Axes
from embed.traffic import Demand

STRATEGIES = ("mod", "div", "column", "replicated")

Names = tuple[str, ...]


def as_names(axis: str | Sequence[str] | None) -> Names:
  """Mesh axes given as one name, several or None."""
  if axis is None:
    return ()
  return (axis,) if isinstance(axis, str) else tuple(axis)


def current_mesh() -> Any:
  """The mesh of `jax.set_mesh`, if any; inside a jitted function its abstract one."""
  mesh: Mesh | AbstractMesh
  try:
    mesh = jax.sharding.get_mesh()
  except ValueError:  # inside a jitted function, which is the only one there is
    mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def _is_traced() -> bool:
  return isinstance(jnp.zeros(()), jax.core.Tracer)


def check_whole(name: str, x: Any) -> None:
  """Refuses an input that is split over an Explicit mesh, for a layer that knows no mesh."""
  for leaf in jax.tree.leaves(x):
    if isinstance(leaf, jax.Array) and any(jax.typeof(leaf).sharding.spec):
      raise ValueError(
        f"Feature {name!r} is split over a mesh, {jax.typeof(leaf)}, but this SparseEmbed was made "
        "without one. Make it under jax.set_mesh(mesh), or pass mesh=mesh."
      )


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where the arrays of some tables are: rows over some axes of a mesh, columns over others.

  `batch`: the axes that activations come out split over. Other axes of the mesh hold copies.
  """

  mesh: Mesh | AbstractMesh
  rows: Names
  columns: Names
  batch: Names

  @property
  def axes(self) -> Axes:
    """The axes for the exchange; the batch is split over all of them, in the mesh's order."""
    involved = {*self.rows, *self.columns, *self.batch}
    order = tuple(name for name in self.mesh.axis_names if name in involved)
    sized = lambda names: tuple((name, self.mesh.shape[name]) for name in names)
    others = [name for name in order if name not in (*self.rows, *self.columns)]
    return Axes(sized(self.rows), sized(self.columns), sized(others), order)

  @property
  def shards(self) -> int:
    """The number of shards that rows are split into."""
    return math.prod(self.mesh.shape[name] for name in self.rows)

  @property
  def column_shards(self) -> int:
    return math.prod(self.mesh.shape[name] for name in self.columns)

  @property
  def work(self) -> P:
    """The batch inside a lookup."""
    return P(self.axes.order)

  @property
  def replicas(self) -> int:
    """How many devices have the same rows and columns, and a part of the batch of their own."""
    return self.devices() // (self.shards * self.column_shards)

  def demand(self, ids: Sequence[int], activations: int) -> Demand:
    """What a device asks for, with those that have other columns, of what the batch asks for."""
    share = lambda x: -(-x * self.column_shards // self.devices())
    return Demand(tuple(map(share, ids)), share(activations))

  def devices(self) -> int:
    """How many parts the batch is split into."""
    return math.prod(self.mesh.shape[name] for name in self.axes.order)

  def askers(self) -> np.ndarray:
    """int64 `[devices]`: which group of devices that look up together each part of a batch is of.

    Those hold different columns of the same rows.
    """
    names = self.axes.order
    index = np.indices([self.mesh.shape[name] for name in names]).reshape(len(names), -1)
    apart = [i for i, name in enumerate(names) if name not in self.columns]
    sizes = [self.mesh.shape[names[i]] for i in apart]
    return np.ravel_multi_index(tuple(index[apart]), sizes) if apart else index[0] * 0

  def array(self, ndim: int) -> P:
    """A table `[rows, columns]`, or a slot of one value per row."""
    return P(self.rows or None, self.columns or None) if ndim == 2 else P(self.rows or None)

  def sharding(self, spec: P) -> NamedSharding:
    return NamedSharding(self.mesh, spec)

  def _devices_mesh(self) -> Mesh:
    """Outside of jitted functions, where a layer made inside of one only knows an abstract mesh."""
    mesh = current_mesh() if isinstance(self.mesh, AbstractMesh) else self.mesh
    if mesh is None:
      raise ValueError(
        "This SparseEmbed was made inside a jitted function, under jax.set_mesh. Use it under "
        "jax.set_mesh too, or pass mesh=... where it is made."
      )
    return mesh

  def _on_devices(self, spec: P) -> NamedSharding:
    return NamedSharding(self._devices_mesh(), spec)

  def compact(self, columns: Names, parts: int) -> NamedSharding:
    """Columns over `columns` and `parts`, of which shard r of the rows has number `r % parts`.

    That is no sharding of this mesh, but of its devices in another shape.
    """
    mesh = self._devices_mesh()
    others = tuple(name for name in mesh.axis_names if name not in self.rows)
    order = [mesh.axis_names.index(name) for name in (*others, *self.rows)]
    shape = [mesh.shape[name] for name in others]
    devices = mesh.devices.transpose(order).reshape(*shape, self.shards // parts, parts)
    # Named after the axes they are cut from, so that they differ from all others.
    copies, cut = (f"{kind} of {', '.join(self.rows)}" for kind in ("copies", "parts"))
    return NamedSharding(Mesh(devices, (*others, copies, cut)), P(None, (*columns, cut)))

  def put(self, x: jax.Array, spec: P) -> jax.Array:
    """An array inside a jitted function, with another sharding."""
    if self._is_explicit():
      return jax.sharding.reshard(x, self.sharding(spec))
    return jax.lax.with_sharding_constraint(x, self.sharding(spec))

  def place_whole(self, x: Any, dtype: Any, where: P | NamedSharding) -> jax.Array:
    """A whole array, the same on every host, split over devices without a copy of it on any."""
    if isinstance(x, jax.core.Tracer):
      assert isinstance(where, P)
      return self.put(x.astype(dtype), where)
    sharding = where if isinstance(where, NamedSharding) else self._on_devices(where)
    if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
      return jax.device_put(x.astype(dtype), sharding)
    host = np.asarray(x)
    part = lambda index: host[index].astype(dtype)
    return jax.make_array_from_callback(host.shape, sharding, part)

  def same_parts(self, x: jax.Array, columns: int, where: P | NamedSharding) -> jax.Array:
    """An array `[V, columns]` of which each device has the part that it has of `x`."""
    sharding = where if isinstance(where, NamedSharding) else self._on_devices(where)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays((x.shape[0], columns), sharding, parts)

  def needs_jit(self) -> bool:
    """Whether eager JAX does not know the mesh: an Explicit one, and not that of `jax.set_mesh`."""
    return self._is_explicit() and not _is_traced() and current_mesh() is None

  def zeros(self, aval: Any) -> jax.Array:
    """Zeros like an abstract value, on an Explicit mesh with its sharding."""
    spec = aval.sharding.spec if self._is_explicit() else P()
    traced = aval.sharding if self._is_explicit() else self.sharding(spec)  # of an abstract mesh
    sharding = traced if _is_traced() else self._on_devices(spec)
    return jnp.zeros(aval.shape, aval.dtype, device=sharding)

  def run(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f` per device, on arrays that are put where `in_specs` says, a tree of specs or prefixes."""
    mapped = jax.shard_map(
      f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

    def placed(*args):
      is_spec = lambda x: isinstance(x, P)
      put = lambda spec, tree: jax.tree.map(lambda x: self.put(x, spec), tree)
      return mapped(*jax.tree.map(put, in_specs, args, is_leaf=is_spec))

    return placed

  def prepare(self, f: Callable[[Any], Any], x: Any) -> Any:
    """`f(x)` for any operations and any sharding of x.

    An Explicit mesh wants to be told the sharding of each reshape and gather in between; here the
    compiler chooses, as on an Auto mesh. Results are split by their first dimension if it divides.
    """
    leaves, treedef = jax.tree.flatten(x)
    on_device = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    if not self._is_explicit() or not on_device:
      return f(x)

    def of(arrays):  # the others stay what they are: NumPy integers may have 64 bits
      given = dict(zip(on_device, arrays, strict=True))
      return f(jax.tree.unflatten(treedef, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))

    arrays = [leaves[i] for i in on_device]
    shapes = jax.eval_shape(of, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
    even = lambda s: s.ndim and s.shape[0] % self.devices() == 0
    specs = jax.tree.map(lambda s: self.sharding(self.work if even(s) else P()), shapes)
    return jax.sharding.auto_axes(of, axes=self._explicit(), out_sharding=specs)(arrays)

  def _explicit(self) -> Names:
    kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)

  def _is_explicit(self) -> bool:
    return bool(self._explicit())


def place(
  mesh: Mesh,
  strategy: str,
  axis: str | Sequence[str] | None,
  column_axis: str | Sequence[str] | None = None,
  batch_axis: str | Sequence[str] | None = None,
) -> Placement:
  """The placement of a strategy.

  Args:
    mesh: of devices.
    strategy: one of `STRATEGIES`.
    axis: the axes that the strategy splits over.
    column_axis: besides, with rows over `axis`, the axes that columns are split over.
    batch_axis: the axes of the batch; None is `axis`.

  Raises:
    ValueError: for an unknown strategy or axis.
  """
  if strategy not in STRATEGIES:
    raise ValueError(f"Invalid sharding strategy {strategy!r}: choose one of {STRATEGIES}.")
  axes, columns = as_names(axis), as_names(column_axis)
  batch = axes if batch_axis is None else as_names(batch_axis)
  for name in (*axes, *columns, *batch):
    if name not in mesh.axis_names:
      raise ValueError(
        f"The mesh has no axis {name!r}; its axes are {mesh.axis_names}. Pass axis=..."
      )
  if strategy == "column":
    axes, columns = (), tuple(dict.fromkeys((*axes, *columns)))
  elif strategy == "replicated":
    axes = columns = ()
  if set(axes) & set(columns):
    raise ValueError(f"Rows and columns cannot both be split over {set(axes) & set(columns)}.")
  if not (axes or columns or batch):
    raise ValueError("No mesh axis to split the batch over: pass axis=... or batch_axis=...")
  return Placement(mesh, axes, columns, batch)


def metadata(placement: Placement | None, axis: Names, ndim: int) -> dict[str, Any]:
  """Variable metadata of a table `[V, D]` (ndim 2) or of a slot `[V]`, for NNX to read.

  >>> metadata(None, ("data",), 2)["out_sharding"]
  ('data', None)
  """
  rows, columns = (axis, ()) if placement is None else (placement.rows, placement.columns)
  short = lambda names: (names[0] if len(names) == 1 else names) or None
  # Not eager: the array is placed where it is made, not when it is wrapped.
  return {"out_sharding": (short(rows), short(columns))[:ndim], "eager_sharding": False}
