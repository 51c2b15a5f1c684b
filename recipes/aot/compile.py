"""Compiles a training step, and the evaluation of a batch, for TPUs or GPUs without having any.

The compiler is the real one, from libtpu or JAX's CUDA plugin, and needs no chip; model and
optimizer are shapes, so that nothing is allocated and no data is read. The step is the one that
training calls, from `recipes.training.train_step`. Nothing runs, so the report
(`recipes.aot.report`) has no times of a step.

Each topology is compiled in a child process, because the compiler reads its environment once, may
crash its process, and may take longer than anybody can wait. SPARSE_EMBED_AOT_HLO=<file> in the
environment writes the text of the compiled program to the file, and its input to <file>.stablehlo.
"""

import importlib.metadata
import importlib.util
import json
import os
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .. import arrays, hosts
from ..errors import MissingPackageError
from ..training import train_step
from . import gpus
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
    arrays.write_json(Path(os.environ[_REPORT]), inspect(wanted[-1], parts))
    return 0
  for topology in filter(gpus.is_gpu, wanted):
    gpus.check(topology)
  if not all(map(gpus.is_gpu, wanted)) and importlib.util.find_spec("libtpu") is None:
    raise MissingPackageError(
      "TPUs need libtpu, which holds the TPU compiler: pip install -e '.[tpu]'. No TPU is needed."
    )
  reports = {}
  for topology in wanted:
    print(f"compiling for {topology} ...", file=sys.stderr, flush=True)
    reports[topology] = _child(module, topology, timeout)
    print(report_lib.text(reports[topology]), flush=True)
  path.parent.mkdir(parents=True, exist_ok=True)
  arrays.write_json(path, reports)
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


def topology_mesh(topology: str) -> Mesh:
  """Returns the mesh that `hosts.start` would make on the chips of a topology."""
  if gpus.is_gpu(topology):
    devices = gpus.devices(topology)
  else:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  return jax.make_mesh((len(devices),), (hosts.AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def inspect(topology: str, parts: Callable[[Mesh], Parts]) -> dict[str, Any]:
  """Compiles for one topology and returns the report; the environment must be set, see `main`."""
  mesh = topology_mesh(topology)
  part = parts(mesh)
  model, optimizer = place(part.model, mesh), place(part.optimizer, mesh)
  batch = hosts.over_examples(mesh, part.batch)
  began = time.perf_counter()
  step = train_step.make_train_step(part.loss_fn, part.options, mesh)
  if gpus.is_gpu(topology):
    platforms, options, available = ("cuda",), gpus.OPTIONS, gpus.memory(topology)
  else:
    platforms, options, available = ("tpu",), None, report_lib.tpu_memory(mesh)
  lowered = step.trace(model, optimizer, batch).lower(lowering_platforms=platforms)  # type: ignore[attr-defined]
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
    sharding = NamedSharding(mesh, spec, memory_kind=variable.get_metadata().get("memory_kind"))
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return variable.replace(jax.tree.map(shape, variable.get_value()))

  return nnx.merge(graph, nnx.map_state(put, state))
