"""One program on a laptop, a GPU node or a pod: the mesh, the processes, and where a batch lives.

One process on one device has no mesh. More get a mesh of all devices with the one axis `data`:
examples are split over it, and so are tables (`embed.SparseEmbed(mesh=...)`). Every process runs
the same program on its own part of every batch, and takes the same decisions.
"""

import functools
import os
import sys
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
_PREFETCHED = 2  # batches on the devices that no step has taken


def start() -> Mesh | None:
  """Joins the other processes, if any, and returns the mesh of all devices.

  `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name
  them. Without these variables JAX asks a Cloud TPU's metadata, GKE, Slurm or Open MPI. Call it
  before anything else uses JAX. One process on one device gets None.
  """
  count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
  if jax.distributed.is_initialized() or count == "1":
    pass
  elif count or index:
    # Deactivated, or under Slurm each process would see only the GPU of its own local number.
    jax.distributed.initialize(
      num_processes=int(count) if count else None,
      process_id=int(index) if index else None,
      cluster_detection_method="deactivate",
    )
  elif _is_launched():
    jax.distributed.initialize()
  if jax.device_count() == 1:
    return None
  # Auto axes: jit decides how the dense part is split. make_mesh would take Explicit ones.
  return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def _is_launched() -> bool:
  """Returns whether a launcher, or a TPU slice, may have started more processes than this one.

  `initialize` raises without a cluster, and in a lone Slurm task it would hide all GPUs but one.
  """
  slurm = int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in os.environ
  mpi = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
  # JAX sets this itself where it finds TPU chips; a slice of one host works as well.
  platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
  return slurm or mpi or "tpu" in (platforms or "").split(",")


def is_main() -> bool:
  """Returns whether this is process 0, which writes the run's files."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints a line on stderr, in the main process."""
  if is_main():
    print(terminal(text), file=sys.stderr, flush=True)


def shard() -> tuple[int, int]:
  """Returns `(index, count)`: the part of every batch that this process reads."""
  return jax.process_index(), jax.process_count()


def num_devices(mesh: Mesh | None) -> int:
  """Returns the number of devices that share a batch."""
  return 1 if mesh is None else mesh.size


def check_batch_sizes(mesh: Mesh | None, **sizes: int) -> None:
  """Raises UserError for a global batch that the devices cannot share evenly."""
  count = num_devices(mesh)
  for name, size in sizes.items():
    if size % count:
      raise UserError(
        f"{name} is {size}, which must be a multiple of the {count} devices: choose "
        f"{max(size // count, 1) * count}"
      )


def to_global(mesh: Mesh | None, batch: Any) -> Any:
  """Returns global arrays `[examples of all processes, ...]`, split over the devices.

  Every process gives a pytree of NumPy arrays with equally many examples.
  """
  if mesh is None:
    return batch
  return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXIS)), batch)


def prefetch_to_device(mesh: Mesh | None, batches: grain.IterDataset) -> grain.IterDataset:
  """Returns the batches as `to_global` makes them, copied by a thread ahead of the steps.

  Close an iterator that is not read to its end, to end its thread. On one CPU device the batches
  stay NumPy arrays: the compiled step reads the same memory.
  """
  if mesh is None and jax.default_backend() == "cpu":
    return batches
  put = jax.device_put if mesh is None else functools.partial(to_global, mesh)
  return ThreadPrefetchIterDataset(batches.map(put), prefetch_buffer_size=_PREFETCHED)


def gather(tree: Any) -> Any:
  """Returns global arrays as NumPy arrays of all examples, the same in every process."""
  return multihost_utils.process_allgather(tree, tiled=True)


def replicate(mesh: Mesh | None, *nodes: nnx.Module) -> None:
  """Copies all state that is still on one device to every device, in place.

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
