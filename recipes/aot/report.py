"""The report on a program compiled for TPUs or GPUs: its parts, its problems, and its text.

Programs are read by `recipes.aot.hlo`; `recipes.aot` compiles them.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

import embed

from . import hlo

MIB = 1 << 20
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "int32": "s32"}


def step(
  compiled: Any, stablehlo: str, state: dict[str, nnx.Module], mesh: Mesh, available: int
) -> dict[str, Any]:
  """Returns the report's part on a compiled training step.

  Args:
    compiled: the `jax.stages.Compiled`.
    stablehlo: the text that was compiled.
    state: model and optimizer, as shapes with shardings.
    mesh: that it was compiled for.
    available: bytes of memory of a device.
  """
  program = hlo.Program(compiled.as_text())
  collectives = program.collectives()
  return {
    "memory": memory(compiled.memory_analysis(), available),
    "tables": tables(state, program, mesh),
    "collectives": [c.to_json() for c in collectives],
    "written_collectives": [[op, *dtypes] for op, dtypes in hlo.written(stablehlo)],
    "narrowed_collectives": hlo.narrowed(program, stablehlo),
    "copies": copies(program, state),
    "offloads": program.offloads(),
    "sparse_core_calls": [call._asdict() for call in program.sparse_core_calls()],
    "row_gathers": program.row_gathers(),
    "cost_model": cost(compiled.cost_analysis()),
  }


def evaluation(compiled: Any, model: nnx.Module, available: int) -> dict[str, Any]:
  """Returns the report's part on the compiled evaluation of a batch."""
  return {
    "memory": memory(compiled.memory_analysis(), available),
    "copies": copies(hlo.Program(compiled.as_text()), {"model": model}),
  }


def tpu_memory(mesh: Mesh) -> int:
  """Returns the bytes of memory of a TPU.

  They come from JAX's own table (jax.experimental.pallas.tpu.get_tpu_info), a little more than the
  compiler allows: a step that does not fit does not compile.
  """
  with jax.set_mesh(mesh):
    info = pltpu.get_tpu_info()
  return info.hbm_capacity_bytes * info.num_cores


def memory(analysis: Any, available: int) -> dict[str, int]:
  """Returns bytes per device: what the program needs and what the device has."""
  sizes = {
    "arguments": analysis.argument_size_in_bytes,
    "temporaries": analysis.temp_size_in_bytes,
    "output": analysis.output_size_in_bytes,
    "aliased": analysis.alias_size_in_bytes,
    "code": analysis.generated_code_size_in_bytes,
    "host_arguments": analysis.host_argument_size_in_bytes,
    "host_aliased": analysis.host_alias_size_in_bytes,
    "host_temporaries": analysis.host_temp_size_in_bytes,
  }
  need = sizes["arguments"] + sizes["temporaries"] + sizes["code"]
  need += sizes["output"] - sizes["aliased"]
  return sizes | {"needed": need, "available": available}


def table_leaves(state: dict[str, nnx.Module]) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays of all tables and slots."""
  return [
    leaf
    for node in state.values()
    for leaf in jax.tree.leaves(nnx.state(node, nnx.Any(embed.Table, embed.SlotVariable)))
  ]


def is_sharded(leaf: jax.ShapeDtypeStruct) -> bool:
  """Returns whether a device holds only a part of the array."""
  return leaf.sharding is not None and not leaf.sharding.is_fully_replicated


def _shard(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  assert leaf.sharding is not None
  return leaf.sharding.shard_shape(leaf.shape)


def tables(state: dict[str, nnx.Module], program: hlo.Program, mesh: Mesh) -> dict[str, Any]:
  """Returns the bytes per device of tables and slots, and of their rows alone.

  `expected` is rows x (dim + slots) x bytes / devices of all tables. `laid_out` counts the tiles
  in which the compiler stores the arrays: narrow rows are filled up to 128 lanes.
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


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
  return jax.ShapeDtypeStruct(tuple(shape), dtype).size * dtype.itemsize


def _logical(state: dict[str, nnx.Module]) -> int:
  """Returns the bytes of the rows and slots that the configs ask for, in no layout."""
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
  """Returns the estimates of the compiler's cost model, which has no time of a step."""
  names = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")
  return {name: analysis[name] for name in names if name in (analysis or {})}  # None of GPUs


def problems(report: dict[str, Any], state: dict[str, nnx.Module]) -> list[str]:
  """Returns what makes the compiled step unfit, in words; nothing if it is as it should be."""
  reasons = []
  need, evaluated = report["memory"], report["evaluation"]
  if need["needed"] > need["available"]:
    reasons.append(f"needs {need['needed']:,} bytes of a device that has {need['available']:,}")
  in_place = need["aliased"] + need["host_aliased"]
  if in_place < report["tables"]["sharded"] + report["tables"]["replicated"]:
    reasons.append("tables and slots are not updated in place: less is aliased than they take")
  largest = max((_array(leaf).nbytes for leaf in table_leaves(state)), default=math.inf)
  if need["host_temporaries"] >= largest:
    reasons.append("as much as a table is copied in the memory of the host")
  if evaluated["memory"]["output"] >= largest:
    reasons.append("evaluation returns as much as a table: it returns the model")
  made = "an array of a table's size"
  reasons += [f"evaluation makes {made}: {text}" for text in evaluated["copies"]]
  narrowed = report["narrowed_collectives"]
  reasons += [f"a float32 exchange has become narrower: {text}" for text in narrowed]
  return reasons + [f"{made} is made: {text}" for text in report["copies"]]


def copies(program: hlo.Program, state: dict[str, nnx.Module]) -> list[str]:
  """Returns the new arrays of the size of a table's or a slot's shard, or larger than all of them.

  Work that grows with the vocabulary shows as one: copies, other layouts, dense gradients.
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


def text(report: dict[str, Any]) -> str:
  """Returns a report as lines for a terminal."""
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
    f"({100 * need['needed'] / need['available']:.1f} % of the device's memory)",
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
  lines += _sparse_core(report["sparse_core_calls"], report["row_gathers"])
  estimates = ", ".join(f"{name} {value:.4g}" for name, value in model.items()) or "none"
  lines.append(f"  the compiler's cost model, which is no step time: {estimates}")
  return lines


def _sparse_core(calls: list[dict[str, Any]], gathers: int) -> list[str]:
  if not calls:
    return []
  counts = collections.Counter(call["kernel"] for call in calls)
  kernels = ", ".join(f"{name} x {count}" for name, count in counts.items())
  reads = sum(count for name, count in counts.items() if name != "put_rows")
  lines = [f"  SparseCore kernels: {kernels}; {reads} of {reads + gathers} gathers of rows"]
  longest = sorted(calls, key=lambda call: call["start"] - call["done"])[:3]
  for call in longest:
    lines.append(
      f"    {call['kernel']} starts at {call['start']:,} and is waited for at {call['done']:,} of "
      f"{call['length']:,} instructions"
    )
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
