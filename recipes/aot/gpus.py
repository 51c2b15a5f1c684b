"""GPUs to compile for: what XLA asks about a device that is not there."""

import importlib.util
import re
from typing import Any

from jax.experimental import topologies

from ..errors import MissingPackageError, UserError

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Without measuring kernels, which needs a GPU, XLA takes its defaults.
OPTIONS = {"xla_gpu_autotune_level": 0}

# XLA's `GpuTargetConfigProto` of an H100 SXM with 80 GB, as a device query of CUDA returns it.
_H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_CONFIGS = {"h100": _H100}
_SHAPE = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)")  # nodes, and GPUs of each


def is_gpu(topology: str) -> bool:
  """Whether a topology is one of GPUs, as "h100:8"."""
  return topology.partition(":")[0] in _CONFIGS


def check(topology: str) -> None:
  """Checks, before anything is built, that a topology can be compiled for.

  Raises:
    UserError: it is neither like "h100:8", a node of 8, nor like "h100:4x8", four of them.
    MissingPackageError: JAX's CUDA plugin, which holds the compiler, is not installed.
  """
  kind, _, shape = topology.partition(":")
  if not _SHAPE.fullmatch(shape):
    raise UserError(
      f"--devices={topology}: write {kind}:8 for 8 GPUs, {kind}:4x8 for four nodes of 8"
    )
  if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
    raise MissingPackageError(
      f"--devices={topology} needs JAX's CUDA plugin, which holds the compiler: pip install -e "
      "'.[cuda]'. No GPU is needed."
    )


def devices(topology: str) -> list[Any]:
  """Returns the devices of a topology that `check` accepts."""
  kind, _, shape = topology.partition(":")
  sizes = _SHAPE.fullmatch(shape)
  assert sizes is not None
  nodes = f"1x{sizes[1] or 1}x{sizes[2]}"
  return topologies.get_topology_desc(
    "", platform="cuda", topology=nodes, target_config=_CONFIGS[kind]
  ).devices


def memory(topology: str) -> int:
  """Returns the bytes of memory of a device."""
  size = re.search(r"device_memory_size: (\d+)", _CONFIGS[topology.partition(":")[0]])
  assert size is not None
  return int(size[1])
