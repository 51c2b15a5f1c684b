"""Compiles a training step, and the evaluation of a batch, for TPUs that are not there.

The report says what the compiler made of them. It is the real one, out of libtpu, and needs no
chip; model and optimizer are shapes, so that nothing is allocated and no data is read. The step is
`loop.make_train_step`'s, the one that training calls. What compiles here and fits has still not
run: no time comes out of this.

A child process per topology compiles, because the compiler reads its environment once, has been
seen to bring its process down, and may take longer than anybody wants to wait.
SPARSE_EMBED_AOT_HLO=<file> in the environment keeps the compiled program's text there, and what was
compiled in <file>.stablehlo.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
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
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import embed
from recipes import arrays, hlo, hosts, loop
from recipes.errors import MissingPackageError

MIB = 1 << 20
_HLO = "SPARSE_EMBED_AOT_HLO"
_REPORT = "SPARSE_EMBED_AOT_REPORT"  # set for the child: the file it writes its report to
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",  # tracing needs a backend, and must not look for chips
  "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
  "TPU_ACCELERATOR_TYPE": "v5p-16",  # any value serves all topologies; without one it warns
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process aborts on the first one's lock file
}


@dataclasses.dataclass(frozen=True)
class Parts:
  """What is compiled, as shapes without arrays; see `nnx.eval_shape`.

  Attributes:
    model: built on the mesh it is given.
    optimizer: of the model.
    loss_fn: `(model, batch) -> scalar`.
    predict: the compiled `(model, batch) -> outputs` that evaluation calls.
    batch: a pytree of `jax.ShapeDtypeStruct`, global, `[examples, ...]`.
  """

  model: nnx.Module
  optimizer: embed.Optimizer
  loss_fn: Callable[[Any, Any], jax.Array]
  predict: Any
  batch: Any


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
    wanted: topologies, as "v5p:4x4x4".
    parts: builds what is compiled, on the mesh of a topology; called in the child.
    path: of the JSON, `{topology: report}`.
    timeout: seconds that one topology may take.

  Returns:
    The exit status: 0 if every step compiled and no report names a problem.

  Raises:
    MissingPackageError: libtpu is not installed.
  """
  if _REPORT in os.environ:
    arrays.write_json(Path(os.environ[_REPORT]), inspect(wanted[-1], parts))
    return 0
  if importlib.util.find_spec("libtpu") is None:
    raise MissingPackageError(
      "--aot needs libtpu, which holds the TPU compiler: pip install -e '.[tpu]'. No TPU is needed."
    )
  reports = {}
  for topology in wanted:
    print(f"compiling for {topology} ...", file=sys.stderr, flush=True)
    reports[topology] = _child(module, topology, timeout)
    print(text(reports[topology]), flush=True)
  path.parent.mkdir(parents=True, exist_ok=True)
  arrays.write_json(path, reports)
  return int(any(report["problems"] for report in reports.values()))


def _child(module: str, topology: str, timeout: float) -> dict[str, Any]:
  """Runs this program again for one topology and returns its report, whatever becomes of it."""
  with tempfile.TemporaryDirectory() as folder:
    path, log = Path(folder) / "report.json", Path(folder) / "log"
    with log.open("w") as file:
      try:
        code = subprocess.run(
          [sys.executable, "-m", module, *sys.argv[1:], f"--aot={topology}"],
          env=os.environ | _ENVIRONMENT | {_REPORT: str(path)},
          stdout=file,
          stderr=subprocess.STDOUT,
          timeout=timeout,
        ).returncode
      except subprocess.TimeoutExpired:
        return _failed(topology, f"did not end within {timeout:.0f} s")
    if path.exists():
      return json.loads(path.read_text())
    said = log.read_text(errors="replace")[-4000:]
  ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
  return _failed(topology, f"the process {ended}:\n{said}")


def _failed(topology: str, problem: str) -> dict[str, Any]:
  return {"topology": topology, "versions": versions(), "compiled": False, "problems": [problem]}


def versions() -> dict[str, str]:
  """Returns the versions that the compiled program depends on."""
  found = {}
  for name in ("jax", "jaxlib", "libtpu", "flax"):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  return found


def topology_mesh(topology: str) -> Mesh:
  """Returns the mesh that `hosts.start` would make on these chips, which need not be there."""
  description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  devices = description.devices
  return jax.make_mesh((len(devices),), (hosts.AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def inspect(topology: str, parts: Callable[[Mesh], Parts]) -> dict[str, Any]:
  """Compiles for one topology and returns the report; the environment must be set, see `main`."""
  mesh = topology_mesh(topology)
  part = parts(mesh)
  model, optimizer = place(part.model, mesh), place(part.optimizer, mesh)
  over_examples = NamedSharding(mesh, PartitionSpec(hosts.AXIS))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_examples), part.batch
  )
  began = time.perf_counter()
  step = loop.make_train_step(part.loss_fn)
  lowered = step.trace(model, optimizer, batch).lower(lowering_platforms=("tpu",))  # type: ignore[attr-defined]
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
    compiled = lowered.compile()
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
  program = hlo.Program(compiled.as_text())
  state = {"model": model, "optimizer": optimizer}
  report |= {
    "memory": memory(compiled.memory_analysis(), mesh),
    "tables": tables(state, program, mesh),
    "collectives": [c.to_json() for c in program.collectives()],
    "written_collectives": [[op, *dtypes] for op, dtypes in hlo.written(lowered.as_text())],
    "offloads": program.offloads(),
    "cost_model": cost(compiled.cost_analysis()),
  }
  report["evaluation"] = evaluation(part.predict, model, batch, mesh)
  return report | {"problems": problems(report, program, lowered.as_text(), state)}


def evaluation(predict: Any, model: nnx.Module, batch: Any, mesh: Mesh) -> dict[str, Any]:
  """Compiles what evaluation calls; returns its memory, and what it makes in a table's size."""
  view = nnx.view(model, deterministic=True)
  compiled = predict.trace(view, batch).lower(lowering_platforms=("tpu",)).compile()
  return {
    "memory": memory(compiled.memory_analysis(), mesh),
    "copies": copies(hlo.Program(compiled.as_text()), {"model": model}),
  }


def place(node: nnx.Module, mesh: Mesh) -> nnx.Module:
  """Returns a module of shapes with a sharding each: its Variables' own, or a copy everywhere."""
  graph, state = nnx.split(node)

  def put(_, variable):
    # A Variable that holds a tree has no spec of its own; a spec is None there.
    spec = nnx.get_partition_spec([variable])[0].get_value() or PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return variable.replace(jax.tree.map(shape, variable.get_value()))

  return nnx.merge(graph, nnx.map_state(put, state))


# --- what is in a report --------------------------------------------------------------------------


def memory(analysis: Any, mesh: Mesh) -> dict[str, int]:
  """Returns bytes of a device: what the compiler needs and what the device has.

  The device's memory is what JAX's own table says (jax.experimental.pallas.tpu.get_tpu_info), a
  little more than the compiler itself allows: a step that does not fit does not compile.
  """
  with jax.set_mesh(mesh):
    info = pltpu.get_tpu_info()
  found = {
    "arguments": analysis.argument_size_in_bytes,
    "temporaries": analysis.temp_size_in_bytes,
    "output": analysis.output_size_in_bytes,
    "aliased": analysis.alias_size_in_bytes,
    "code": analysis.generated_code_size_in_bytes,
  }
  need = found["arguments"] + found["temporaries"] + found["code"]
  need += found["output"] - found["aliased"]
  return found | {"needed": need, "available": info.hbm_capacity_bytes * info.num_cores}


def table_leaves(state: dict[str, nnx.Module]) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays of all tables and slots."""
  return [
    leaf
    for node in state.values()
    for leaf in jax.tree.leaves(nnx.state(node, nnx.Any(embed.Table, embed.SlotVariable)))
  ]


def is_sharded(leaf: jax.ShapeDtypeStruct) -> bool:
  return leaf.sharding is not None and not leaf.sharding.is_fully_replicated


def _shard(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  assert leaf.sharding is not None
  return leaf.sharding.shard_shape(leaf.shape)


def tables(state: dict[str, nnx.Module], program: hlo.Program, mesh: Mesh) -> dict[str, Any]:
  """Returns what tables and slots take on a device, beside what their rows must take.

  `expected` is rows x (dim + slots) x bytes / devices of all tables. `laid_out` counts the tiles
  that the compiler stores the arrays in: narrow rows are filled up to 128 lanes.
  """
  leaves = table_leaves(state)
  sharded = [leaf for leaf in leaves if is_sharded(leaf)]
  layouts = {(p.dtype, p.shape): p for p in program.parameters}
  laid_out = 0.0
  for leaf in sharded:
    shard = _array(leaf)
    laid_out += layouts.get((shard.dtype, shard.shape), shard).padded_bytes
  held = sum(_nbytes(_shard(leaf), leaf.dtype) for leaf in sharded)
  replicated = sum(_nbytes(leaf.shape, leaf.dtype) for leaf in leaves if not is_sharded(leaf))
  expected = (_logical(state) - replicated) / mesh.size
  deviation = lambda x: 100 * (x / expected - 1) if expected else 0.0
  return {
    "sharded": held,
    "expected": expected,
    "deviation_percent": deviation(held),
    "laid_out": laid_out,
    "laid_out_deviation_percent": deviation(laid_out),
    "replicated": replicated,
    "arrays": [
      {"shape": list(leaf.shape), "shard": list(_shard(leaf)), "dtype": leaf.dtype.name}
      for leaf in leaves
    ],
  }


_DTYPES = {"float32": "f32", "bfloat16": "bf16", "int32": "s32"}


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
  return jax.ShapeDtypeStruct(tuple(shape), dtype).size * dtype.itemsize


def _logical(state: dict[str, nnx.Module]) -> int:
  """Bytes of the rows and slots that the configs ask for, whatever the layout."""
  total = 0
  for _, module in nnx.iter_modules(state["model"]):
    if not isinstance(module, embed.SparseEmbed):
      continue
    for name, table in module.spec.tables.items():
      optimizer = module.spec.optimizers[name]
      slots = optimizer.slots(table.dim).values() if optimizer is not None else ()
      row = table.dim * jax.numpy.dtype(table.dtype).itemsize
      for slot in slots:
        row += (1 if slot.per_row else table.dim) * jax.numpy.dtype(slot.dtype).itemsize
      total += table.vocabulary_size * row
  return total


def cost(analysis: Any) -> dict[str, float]:
  """Returns what the compiler's cost model estimates, of which a step time is no part."""
  names = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")
  return {name: analysis[name] for name in names if name in analysis}


def problems(
  report: dict[str, Any], program: hlo.Program, stablehlo: str, state: dict[str, nnx.Module]
) -> list[str]:
  """Returns what makes the compiled step unfit, in words; nothing if it is as it should be."""
  found = []
  need = report["memory"]
  if need["needed"] > need["available"]:
    found.append(f"needs {need['needed']:,} bytes of a device that has {need['available']:,}")
  if need["aliased"] < report["tables"]["sharded"] + report["tables"]["replicated"]:
    found.append("tables and slots are not updated in place: less is aliased than they take")
  evaluated = report["evaluation"]
  largest = max((_array(leaf).nbytes for leaf in table_leaves(state)), default=math.inf)
  if evaluated["memory"]["output"] >= largest:
    found.append("evaluation returns as much as a table: it returns the model")
  made = "evaluation makes an array of a table's size"
  found += [f"{made}: {what}" for what in evaluated["copies"]]
  narrow = hlo.narrowed(program.collectives(), stablehlo)
  found += [f"a float32 exchange has become narrower: {what}" for what in narrow]
  return found + [f"an array of a table's size is made: {what}" for what in copies(program, state)]


def copies(program: hlo.Program, state: dict[str, nnx.Module]) -> list[str]:
  """Returns what is made anew in the size of a table's or a slot's shard, or beyond all of them.

  Whatever costs the vocabulary at every step shows here: copies, other layouts, dense gradients.
  """
  shards = [_array(leaf) for leaf in table_leaves(state) if is_sharded(leaf)]
  sizes = {(shard.dtype, shard.size) for shard in shards}
  largest = max((shard.nbytes for shard in shards), default=math.inf)
  # The buffers of an exchange follow the batch; with small tables they are the larger ones.
  exchanged = {array.size for c in program.collectives() for array in c.results}

  def fits(array: hlo.Array) -> bool:
    beyond = array.nbytes >= largest and array.size not in exchanged
    return (array.dtype, array.size) in sizes or beyond

  return program.made(fits)


def _array(leaf: jax.ShapeDtypeStruct) -> hlo.Array:
  return hlo.Array(_DTYPES.get(leaf.dtype.name, "f32"), _shard(leaf))


# --- for people -----------------------------------------------------------------------------------


def text(report: dict[str, Any]) -> str:
  """Returns a report as lines for people."""
  lines = [f"{report['topology']}  " + "  ".join(f"{k} {v}" for k, v in report["versions"].items())]
  if report["compiled"]:
    lines += _body(report)
  lines += [f"  PROBLEM  {problem}" for problem in report["problems"]]
  return "\n".join(lines if report["problems"] else [*lines, "  no problem found"])


def _body(report: dict[str, Any]) -> list[str]:
  need, table, model = report["memory"], report["tables"], report["cost_model"]
  mib = lambda x: f"{x / MIB:,.1f}"
  sizes = "  ".join(
    f"{name} {mib(need[name])}"
    for name in ("arguments", "temporaries", "output", "aliased", "code")
  )
  lines = [
    f"  {report['devices']} devices of kind {report['device_kind']}, global batch "
    f"{report['batch_size']:,}; compiled in {report['compile_seconds']:.1f} s, "
    f"{report['peak_rss'] / MIB:,.0f} MiB of host memory",
    f"  MiB per device: {sizes}",
    f"    needed {mib(need['needed'])} of {mib(need['available'])} "
    f"({100 * need['needed'] / need['available']:.1f} %; the device's memory by get_tpu_info)",
    f"    tables and slots, sharded: {mib(table['sharded'])}, as laid out "
    f"{mib(table['laid_out'])}; rows x (dim + slots) / devices: {mib(table['expected'])} "
    f"({table['deviation_percent']:+.2f} %, {table['laid_out_deviation_percent']:+.2f} %)",
    f"    tables and slots, replicated: {mib(table['replicated'])}",
    "  exchanges per device and step (bytes of the result; to send at least):",
  ]
  always = [c for c in report["collectives"] if c["count"] is not None]
  for c in always:
    lines.append(f"    {_exchange(c)}")
  lines.append(
    f"    in all {mib(sum(c['count'] * c['bytes'] for c in always))} MiB; "
    f"to send {mib(sum(c['count'] * c['sent'] for c in always))} MiB"
  )
  if extra := [c for c in report["collectives"] if c["count"] is None]:
    lines.append("  only in extra exchange rounds (loops whose length the data decides):")
    lines += [f"    {_exchange(c)}" for c in extra]
  evaluated = {name: mib(value) for name, value in report["evaluation"]["memory"].items()}
  lines.append(
    f"  evaluation of a batch, MiB per device: temporaries {evaluated['temporaries']}, output "
    f"{evaluated['output']}"
  )
  offloads = ", ".join(f"{k} x {v}" for k, v in report["offloads"].items()) or "none"
  lines.append(f"  SparseCore offloads: {offloads}")
  estimates = ", ".join(f"{name} {value:.4g}" for name, value in model.items())
  lines.append(f"  the compiler's cost model, which is no step time: {estimates}")
  return lines


def _exchange(c: dict[str, Any]) -> str:
  shapes = ", ".join(c["shapes"][:3])
  if len(c["shapes"]) > 3:
    shapes += f", ... {len(c['shapes'])} arrays"
  count = c["instructions"] if c["count"] is None else c["count"]
  return (
    f"{count} x {c['op']} {shapes} over {c['devices']}: {c['bytes'] / MIB:,.2f}; "
    f"{c['sent'] / MIB:,.2f} MiB each"
  )
