"""One program on a laptop, a GPU node or a pod: who takes part, who writes, where a batch lives.

One process on one device has no mesh, and every function returns its argument unchanged. More
devices or processes get a mesh of all devices with the one axis `data`: examples are split over it,
and so are tables (`embed.SparseEmbed(mesh=...)`). Every process runs the same program on its own
part of every batch, and takes the same decisions.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from grain.experimental import ThreadPrefetchIterDataset
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .errors import UserError, terminal

AXIS = "data"
_AHEAD = 2  # batches on the devices that no step has asked for
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start() -> Mesh | None:
  """Joins the other processes where there are any, and returns the mesh of all their devices.

  The three variables `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and
  `JAX_PROCESS_ID` say it outright. Without them JAX asks a Cloud TPU's metadata or GKE's variables,
  Slurm's or Open MPI's. Call it before anything else uses JAX.

  Returns:
    The mesh, or None for one process on one device.

  Raises:
    ValueError: only some of the three variables are set.
  """
  if not jax.distributed.is_initialized():
    _join()
  if jax.device_count() == 1:
    return None
  # Auto axes: jit decides how the dense part is split. make_mesh would take Explicit ones.
  return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def _join() -> None:
  address, count, index = values = [os.environ.get(name) for name in _VARIABLES]
  if count == "1":
    return
  if count or index or (address and not _several()):
    if not all(values):
      missing = [name for name, value in zip(_VARIABLES, values, strict=True) if not value]
      raise UserError(
        f"{', '.join(missing)} is not set. A run of several processes needs all of "
        f"{', '.join(_VARIABLES)}; unset them all for one process."
      )
    # Deactivated, or under Slurm each process would see only the GPU of its own local number.
    jax.distributed.initialize(
      address,
      num_processes=int(count or 1),
      process_id=int(index or 0),
      cluster_detection_method="deactivate",
    )
  elif _several():
    jax.distributed.initialize()


def _several() -> bool:
  """Returns whether a launcher, or a TPU slice, may have started more processes than this one.

  Asked first because `initialize` in a Slurm task that is alone would hide all GPUs but one, and
  because it raises where it finds no cluster. The variables are those that JAX itself reads.
  """
  slurm = int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in os.environ
  mpi = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
  # JAX sets this itself where it finds TPU chips; a slice of one host works as well.
  platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
  tpu = "tpu" in (platforms or "").split(",")
  return slurm or mpi or tpu


def is_main() -> bool:
  """Returns whether this is process 0, which writes the run's files."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints a line on stderr, in the main process."""
  if is_main():
    print(terminal(text), file=sys.stderr, flush=True)


def shard() -> tuple[int, int]:
  """Returns `(index, count)`: which part of every batch this process reads, of how many."""
  return jax.process_index(), jax.process_count()


def num_devices(mesh: Mesh | None) -> int:
  """Returns the number of devices that share a batch."""
  return 1 if mesh is None else mesh.size


def check_batch_sizes(mesh: Mesh | None, **sizes: int) -> None:
  """Raises UserError where a global batch cannot be split evenly over the devices; names it."""
  count = num_devices(mesh)
  for name, size in sizes.items():
    if name.endswith("batch_size") and size < 1:
      raise UserError(f"{name} is {size}: choose {count} or more")
    if size % count:
      raise UserError(
        f"{name} is {size}, which must be a multiple of the {count} devices: choose "
        f"{max(size // count, 1) * count}"
      )


def to_global(mesh: Mesh | None, batch: Any) -> Any:
  """Returns global arrays `[examples of all processes, ...]`, split over the devices.

  Args:
    mesh: from `start`; None returns the batch as it is.
    batch: a pytree of NumPy arrays, `[examples of this process, ...]`; the parts are equally large.
  """
  if mesh is None:
    return batch
  return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXIS)), batch)


def over_examples(mesh: Mesh, batch: Any) -> Any:
  """Returns the shapes of a global batch, `jax.ShapeDtypeStruct`, split as by `to_global`."""
  split = NamedSharding(mesh, PartitionSpec(AXIS))
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)
  return jax.tree.map(shape, batch)


def put_ahead(mesh: Mesh | None, batches: grain.IterDataset) -> grain.IterDataset:
  """Returns the batches as `to_global` makes them, on the devices before they are asked for.

  Like `grain.experimental.device_put`, but each process gives only its own part of the batch. A
  thread puts up to two batches there while the model works on earlier ones; close an iterator that
  is not read to its end, to end its thread. An iterator's state is the position after the batches
  that it has returned, the same as of an iterator of `batches`.

  On one CPU device the batches stay NumPy arrays: the compiled step reads the same memory, and a
  second thread would only take time from it.
  """
  if mesh is None and jax.default_backend() == "cpu":
    return batches
  put = jax.device_put if mesh is None else functools.partial(to_global, mesh)
  return ThreadPrefetchIterDataset(batches.map(put), prefetch_buffer_size=_AHEAD)


def gather(tree: Any) -> Any:
  """Returns global arrays as NumPy arrays of all examples, the same in every process."""
  return multihost_utils.process_allgather(tree, tiled=True)


def replicate(mesh: Mesh | None, *nodes: nnx.Module) -> None:
  """Puts a copy of all state that is still on one device on every device, in place.

  Tables are on the mesh already, each row where it belongs, and stay as they are.
  """
  if mesh is None:
    return
  everywhere = NamedSharding(mesh, PartitionSpec())

  def place(x):
    if not isinstance(getattr(x, "sharding", None), SingleDeviceSharding):
      return x  # `nnx.eval_shape` has arrays without any
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(place(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(everywhere, np.asarray(x), x.shape)

  for node in nodes:
    nnx.update(node, jax.tree.map(place, nnx.state(node)))


def from_main(f: Callable[[], Any]) -> Any:
  """Calls `f` in the main process alone, and returns its JSON value in every process.

  For what must be decided once, as what a folder holds, and for work that need not be done twice.
  What `f` raises is raised here; in the other processes, which would wait forever for a value, a
  RuntimeError with its message, or a UserError for one.
  """
  if jax.process_count() == 1:
    return f()
  said: dict[str, Any] = {}
  error = None
  if is_main():
    try:
      said["value"] = f()
    except Exception as raised:
      error, said["error"] = raised, f"{type(raised).__name__}: {raised}"
      said["user"] = isinstance(raised, UserError)
  text = np.frombuffer(json.dumps(said).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
  if not is_main():
    text = np.zeros(size, np.uint8)
  said = json.loads(multihost_utils.broadcast_one_to_all(text).tobytes())
  if error is not None:
    raise error
  if "error" in said:
    kind = UserError if said["user"] else RuntimeError
    raise kind(f"the main process failed: {said['error']}")
  return said["value"]
