"""Compiles functions of shapes for TPUs and GPUs that are not there.

The compiler is the real one, from libtpu or JAX's CUDA plugin. Nothing is allocated, and nothing
runs.
"""

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import embed
from recipes import mesh as mesh_lib

_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",  # tracing needs a backend, and must not look for chips
  "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
  "TPU_ACCELERATOR_TYPE": "v5p-16",  # any value serves all topologies; without one it warns
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process aborts on the first one's lock file
}
# No kernel is measured without a GPU. XLA then takes its defaults, and Triton's tiles do not fit
# every product.
_CUDA_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_H100_MEMORY = 84_942_979_072
# XLA's `GpuTargetConfigProto` of an H100 SXM with 80 GB, as a device query of CUDA returns it.
_H100 = f"""
gpu_device_info {{
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: {_H100_MEMORY} memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def over_examples(mesh: Mesh, batch: Any) -> Any:
  """Returns the shapes of a global batch, `jax.ShapeDtypeStruct`, split over the devices."""
  split = NamedSharding(mesh, PartitionSpec(mesh_lib.AXIS))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), batch)


def without_devices() -> None:
  """Keeps this process off devices; call it before the first topology."""
  os.environ.update(_ENVIRONMENT)
  jax.config.update("jax_platforms", "cpu")  # JAX read the variable when it was imported


def topology_mesh(topology: str) -> Mesh:
  """Returns the mesh that `mesh_lib.start` would make on the devices of a topology.

  It is "v5p:4x4x4" or another one of TPUs, "h100:8" for 8 GPUs, or "h100:4x8" for 4 nodes of them.
  """
  if _is_gpu(topology):
    *nodes, gpus = topology.partition(":")[2].split("x")
    shape = f"1x{nodes[0] if nodes else 1}x{gpus}"
    described = topologies.get_topology_desc(
      "", platform="cuda", topology=shape, target_config=_H100
    )
  else:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  devices = described.devices
  return jax.make_mesh((len(devices),), (mesh_lib.AXIS,), (AxisType.Auto,), devices=devices)


def _is_gpu(topology: str) -> bool:
  return topology.startswith("h100:")


def memory(topology: str, mesh: Mesh) -> int:
  """Returns the bytes of memory of a device.

  A TPU's come from JAX's own table, a little more than the compiler allows: a step that does not
  fit does not compile.
  """
  if _is_gpu(topology):
    return _H100_MEMORY
  with jax.set_mesh(mesh):
    info = pltpu.get_tpu_info()
  return info.hbm_capacity_bytes * info.num_cores


def shapes(make: Callable[[], Any], mesh: Mesh) -> Any:
  """Returns the modules that a function makes as shapes with shardings, without arrays.

  Shardings are the Variables' own; what has none is copied to every device.
  """

  def put(_, variable):
    # A Variable that holds a tree has no spec of its own; a spec is None there.
    spec = nnx.get_partition_spec([variable])[0].get_value() or PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return variable.replace(jax.tree.map(shape, variable.get_value()))

  graph, state = nnx.split(nnx.eval_shape(make))
  return nnx.merge(graph, nnx.map_state(put, state))


def compiled(traced: Any, topology: str) -> Any:
  """Returns a traced function compiled for the devices of a topology.

  Raises:
    jax.errors.JaxRuntimeError: it does not compile, or does not fit.
  """
  if _is_gpu(topology):
    return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=_CUDA_OPTIONS)
  return traced.lower(lowering_platforms=("tpu",)).compile()


def stored(*nodes: nnx.Module) -> list[Any]:
  """Returns the tables and slots of modules, as shapes with shardings."""
  of_tables = nnx.Any(embed.Table, embed.SlotVariable)
  return [x for node in nodes for x in jax.tree.leaves(nnx.state(node, of_tables))]


def held(array: Any) -> int:
  """Returns the bytes of an array that one device holds."""
  return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def training(recipe: str, config: Any, mesh: Mesh) -> tuple[Any, nnx.Module, nnx.Module, Any]:
  """Returns what `train.run` of a recipe compiles on a mesh: step, model, optimizer and batch.

  Loads the data, but for a data set of dlrm whose columns the config tells.
  """
  train, is_dlrm = importlib.import_module(f"recipes.{recipe}.train"), recipe == "dlrm"
  train.check(config, mesh)
  data_lib = train.data_lib
  data = data_lib.describe(config) if is_dlrm else data_lib.load(config)
  config = config if is_dlrm and config.steps else train.decide(config, data, mesh)
  model, optimizer = shapes(lambda: train.make_state(config, data, mesh), mesh)
  batch = data_lib.batch_shapes(data, config) if is_dlrm else data_lib.TrainBatches(data, config)[0]
  step = train.make_train_step(config, data, mesh)
  return step, model, optimizer, over_examples(mesh, batch)
