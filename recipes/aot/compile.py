"""Compiles a training step, and the evaluation of a batch, for TPUs or GPUs without having any.

The compiler is the real one, from libtpu or JAX's CUDA plugin, and needs no chip; model and
optimizer are shapes, so that nothing is allocated and no data is read. The step is the one that
training compiles. Nothing runs, so the report
(`recipes.aot.report`) has no times of a step.

Each topology is compiled in a child process, because the compiler reads its environment once, may
crash its process, and may take longer than anybody can wait. SPARSE_EMBED_AOT_HLO=<file> in the
environment writes the text of the compiled program to the file, and its input to <file>.stablehlo.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .. import files
from .. import mesh as mesh_lib
from ..errors import MissingPackageError, UserError
from . import report as report_lib
from .parts import Parts

_HLO = "SPARSE_EMBED_AOT_HLO"
_REPORT = "SPARSE_EMBED_AOT_REPORT"  # set for the child: the file it writes its report to
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",  # tracing needs a backend, and must not look for chips
  "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
  "TPU_ACCELERATOR_TYPE": "v5p-16",  # any value serves all topologies; without one it warns
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process aborts on the first one's lock file
}
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# No kernel is measured without a GPU. XLA then takes its defaults, and Triton's tiles do not fit
# every product.
_CUDA_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

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
_GPUS = {"h100": _H100}
_GPU_SHAPE = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)")  # nodes, and GPUs of each


def main(
  module: str,
  wanted: Sequence[str],
  parts: Callable[[Mesh], Parts],
  path: Path,
  *,
  timeout: float,
) -> int:
  """Compiles for every topology, prints the reports and writes them to `path` as JSON.

  Args:
    module: the program that calls this, started again with the same arguments as a child.
    wanted: topologies, as "v5p:4x4x4" or "h100:8".
    parts: builds what is compiled, on the mesh of a topology; called in the child.
    path: of the JSON, `{topology: report}`.
    timeout: seconds that one topology may take.

  Returns:
    The exit status: 0 if every step compiled and no report names a problem.

  Raises:
    UserError: a topology of GPUs is written wrongly.
    MissingPackageError: libtpu, or for GPUs JAX's CUDA plugin, is not installed.
  """
  if _REPORT in os.environ:
    files.write_json(Path(os.environ[_REPORT]), inspect(wanted[-1], parts))
    return 0
  for topology in wanted:
    _check(topology)
  reports = {}
  for topology in wanted:
    print(f"compiling for {topology} ...", file=sys.stderr, flush=True)
    reports[topology] = _child(module, topology, timeout)
    print(report_lib.text(reports[topology]), flush=True)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, reports)
  return int(any(report["problems"] for report in reports.values()))


def _child(module: str, topology: str, timeout: float) -> dict[str, Any]:
  """Runs this program again for one topology; returns its report, or one of how it failed."""
  with tempfile.TemporaryDirectory() as folder:
    path, log = Path(folder) / "report.json", Path(folder) / "log"
    with log.open("w") as file:
      try:
        code = subprocess.run(
          [sys.executable, "-m", module, *sys.argv[1:], f"--devices={topology}"],
          env=os.environ | ENVIRONMENT | {_REPORT: str(path)},
          stdout=file,
          stderr=subprocess.STDOUT,
          timeout=timeout,
        ).returncode
      except subprocess.TimeoutExpired:
        return _failed(topology, f"did not end within {timeout:.0f} s")
    if path.exists():
      return json.loads(path.read_text())
    output = log.read_text(errors="replace")[-4000:]
  ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
  return _failed(topology, f"the process {ended}:\n{output}")


def _failed(topology: str, problem: str) -> dict[str, Any]:
  return {"topology": topology, "versions": versions(), "compiled": False, "problems": [problem]}


def versions() -> dict[str, str]:
  """Returns the versions that the compiled program depends on."""
  installed = {}
  for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax"):
    try:
      installed[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      installed[name] = "not installed"
  return installed


def _is_gpu(topology: str) -> bool:
  return topology.partition(":")[0] in _GPUS


def _check(topology: str) -> None:
  """Raises, before anything is built, where a topology cannot be compiled for; see `main`."""
  kind, _, shape = topology.partition(":")
  if not _is_gpu(topology):
    if importlib.util.find_spec("libtpu") is None:
      raise MissingPackageError(
        "TPUs need libtpu, which holds the TPU compiler: pip install -e '.[tpu]'. No TPU is needed."
      )
  elif not _GPU_SHAPE.fullmatch(shape):
    raise UserError(
      f"--devices={topology}: write {kind}:8 for 8 GPUs, {kind}:4x8 for four nodes of 8"
    )
  elif not any(map(importlib.util.find_spec, _CUDA_PLUGINS)):
    raise MissingPackageError(
      f"--devices={topology} needs JAX's CUDA plugin, which holds the compiler: pip install -e "
      "'.[cuda]'. No GPU is needed."
    )


def topology_mesh(topology: str) -> Mesh:
  """Returns the mesh that `mesh.start` would make on the chips of a topology."""
  kind, _, shape = topology.partition(":")
  if _is_gpu(topology):
    nodes = "x".join(["1", *shape.split("x")] if "x" in shape else ["1", "1", shape])
    described = topologies.get_topology_desc(
      "", platform="cuda", topology=nodes, target_config=_GPUS[kind]
    )
  else:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  devices = described.devices
  return jax.make_mesh(
    (len(devices),), (mesh_lib.AXIS,), axis_types=(AxisType.Auto,), devices=devices
  )


def _memory(topology: str, mesh: Mesh) -> int:
  """Returns the bytes of memory of a device.

  A TPU's come from JAX's own table, a little more than the compiler allows: a step that does not
  fit does not compile.
  """
  if _is_gpu(topology):
    config = _GPUS[topology.partition(":")[0]]
    return int(config.partition("device_memory_size: ")[2].partition("\n")[0])
  with jax.set_mesh(mesh):
    info = pltpu.get_tpu_info()
  return info.hbm_capacity_bytes * info.num_cores


def inspect(topology: str, parts: Callable[[Mesh], Parts]) -> dict[str, Any]:
  """Compiles for one topology and returns the report; the environment must be set, see `main`."""
  mesh = topology_mesh(topology)
  available, part = _memory(topology, mesh), parts(mesh)
  platforms, options = (("cuda",), _CUDA_OPTIONS) if _is_gpu(topology) else (("tpu",), None)
  model, optimizer = place(part.model, mesh), place(part.optimizer, mesh)
  batch = mesh_lib.over_examples(mesh, part.batch)
  began = time.perf_counter()
  step: Any = nnx.jit(part.step, donate_argnums=(0, 1))
  lowered = step.trace(model, optimizer, batch).lower(lowering_platforms=platforms)
  traced = time.perf_counter()
  report: dict[str, Any] = {
    "topology": topology,
    "devices": mesh.size,
    "device_kind": mesh.devices.flat[0].device_kind,
    "versions": versions(),
    "batch_size": jax.tree.leaves(batch)[0].shape[0],
    "trace_seconds": traced - began,
  }
  try:
    compiled = lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    return report | {"compiled": False, "problems": [f"does not compile: {error}"]}
  report |= {
    "compiled": True,
    "compile_seconds": time.perf_counter() - traced,
    "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  }
  if dump := os.environ.get(_HLO):
    Path(dump).write_text(compiled.as_text())
    Path(dump + ".stablehlo").write_text(lowered.as_text())
  state = {"model": model, "optimizer": optimizer}
  report |= report_lib.step(compiled, lowered.as_text(), state, mesh, available)
  view = nnx.view(model, deterministic=True)
  eval_batch = batch if part.eval_batch is None else part.eval_batch
  predict = part.predict.trace(view, eval_batch).lower(lowering_platforms=platforms)
  evaluation = predict.compile(compiler_options=options)
  report["evaluation"] = report_lib.evaluation(evaluation, model, available)
  return report | {"problems": report_lib.problems(report, state)}


def place(node: nnx.Module, mesh: Mesh) -> nnx.Module:
  """Returns a module of shapes with shardings: the Variables' own, or copied to every device."""
  graph, state = nnx.split(node)

  def put(_, variable):
    # A Variable that holds a tree has no spec of its own; a spec is None there.
    spec = nnx.get_partition_spec([variable])[0].get_value() or PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return variable.replace(jax.tree.map(shape, variable.get_value()))

  return nnx.merge(graph, nnx.map_state(put, state))
