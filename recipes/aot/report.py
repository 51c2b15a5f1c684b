"""The report on a program compiled for TPUs or GPUs: its parts, its problems, and its text."""

import collections
import math
import string
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

import embed

from . import hlo

MIB = 1 << 20
_LETTERS = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}  # of XLA's dtypes
State = dict[str, nnx.Module]  # model and optimizer, as shapes with shardings


def step(compiled: Any, stablehlo: str, state: State, mesh: Mesh, available: int) -> dict[str, Any]:
  """Returns the report's part on a compiled training step."""
  program = hlo.Program(compiled.as_text())
  costs = compiled.cost_analysis() or {}  # None of GPUs
  estimates = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")
  return {
    "memory": memory(compiled.memory_analysis(), available),
    "tables": tables(state, program, mesh),
    "collectives": [c.to_json() for c in program.collectives()],
    "written_collectives": [[op, *dtypes] for op, dtypes in hlo.written(stablehlo)],
    "narrowed_collectives": program.narrowed(stablehlo),
    "copies": copies(program, state),
    "offloads": program.offloads(),
    "sparse_core_calls": [call._asdict() for call in program.sparse_core_calls()],
    "row_gathers": program.row_gathers(),
    "cost_model": {name: costs[name] for name in estimates if name in costs},
  }


def evaluation(compiled: Any, model: nnx.Module, available: int) -> dict[str, Any]:
  """Returns the report's part on the compiled evaluation of a batch."""
  return {
    "memory": memory(compiled.memory_analysis(), available),
    "copies": copies(hlo.Program(compiled.as_text()), {"model": model}),
  }


def memory(analysis: Any, available: int) -> dict[str, int]:
  """Returns bytes per device: what the program needs and what the device has."""
  sizes = {
    "arguments": analysis.argument_size_in_bytes,
    "temporaries": analysis.temp_size_in_bytes,
    "output": analysis.output_size_in_bytes,
    "aliased": analysis.alias_size_in_bytes,
    "code": analysis.generated_code_size_in_bytes,
  }
  need = sizes["arguments"] + sizes["temporaries"] + sizes["code"]
  need += sizes["output"] - sizes["aliased"]
  return sizes | {"needed": need, "available": available}


def _leaves(state: State) -> list[Any]:
  """Returns the arrays of all tables and slots, as shapes with shardings."""
  of_tables = nnx.Any(embed.Table, embed.SlotVariable)
  return [x for node in state.values() for x in jax.tree.leaves(nnx.state(node, of_tables))]


def _shard(leaf: Any) -> hlo.Array:
  """Returns the part of an array that a device holds."""
  letters = _LETTERS[leaf.dtype.name.rstrip(string.digits)]
  return hlo.Array(f"{letters}{8 * leaf.dtype.itemsize}", leaf.sharding.shard_shape(leaf.shape))


def _shards(state: State, *, replicated: bool) -> list[hlo.Array]:
  """Returns what a device holds of the tables and slots that are replicated, or are sharded."""
  leaves = [x for x in _leaves(state) if x.sharding.is_fully_replicated == replicated]
  return list(map(_shard, leaves))


def tables(state: State, program: hlo.Program, mesh: Mesh) -> dict[str, Any]:
  """Returns the bytes per device of tables and slots, and of their rows alone.

  `expected` is rows x (dim + slots) x bytes / devices of all tables. `laid_out` counts the tiles
  in which the compiler stores the arrays: narrow rows are filled up to 128 lanes.
  """
  sharded = _shards(state, replicated=False)
  layouts = {(array.dtype, array.shape): array for array in program.parameters}
  held = sum(shard.nbytes for shard in sharded)
  laid_out = sum(layouts.get(shard[:2], shard).padded_bytes for shard in sharded)
  whole = sum(array.nbytes for array in _shards(state, replicated=True))
  expected = (_logical(state) - whole) / mesh.size
  deviation = lambda x: 100 * (x / expected - 1) if expected else 0.0
  return {
    "sharded": held,
    "expected": expected,
    "deviation_percent": deviation(held),
    "laid_out": laid_out,
    "laid_out_deviation_percent": deviation(laid_out),
    "replicated": whole,
    "arrays": [
      {"shape": list(leaf.shape), "shard": list(_shard(leaf).shape), "dtype": leaf.dtype.name}
      for leaf in _leaves(state)
    ],
  }


def _logical(state: State) -> int:
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


def copies(program: hlo.Program, state: State) -> list[str]:
  """Returns the new arrays of the size of a table's or a slot's shard, or larger than all of them.

  Work that grows with the vocabulary shows as one: copies, other layouts, dense gradients.
  """
  shards = _shards(state, replicated=False)
  sizes = {(shard.dtype, shard.size) for shard in shards}
  largest = max((shard.nbytes for shard in shards), default=math.inf)
  # The buffers of an exchange follow the batch; with small tables they are the larger ones.
  exchanged = {array.size for c in program.collectives() for array in c.results}

  def fits(array: hlo.Array) -> bool:
    beyond = array.nbytes >= largest and array.size not in exchanged
    return (array.dtype, array.size) in sizes or beyond

  return program.made(fits)


def problems(report: dict[str, Any], state: State) -> list[str]:
  """Returns what makes the compiled step unfit, in words; nothing if it is as it should be."""
  reasons = []
  need, evaluated = report["memory"], report["evaluation"]
  if need["needed"] > need["available"]:
    reasons.append(f"needs {need['needed']:,} bytes of a device that has {need['available']:,}")
  if need["aliased"] < report["tables"]["sharded"] + report["tables"]["replicated"]:
    reasons.append("tables and slots are not updated in place: less is aliased than they take")
  largest = max((_shard(leaf).nbytes for leaf in _leaves(state)), default=math.inf)
  if evaluated["memory"]["output"] >= largest:
    reasons.append("evaluation returns as much as a table: it returns the model")
  made = "an array of a table's size"
  reasons += [f"evaluation makes {made}: {text}" for text in evaluated["copies"]]
  narrowed = report["narrowed_collectives"]
  reasons += [f"a float32 exchange has become narrower: {text}" for text in narrowed]
  return reasons + [f"{made} is made: {text}" for text in report["copies"]]


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
  sizes = ("arguments", "temporaries", "output", "aliased", "code")
  always = [c for c in report["collectives"] if c["count"] is not None]
  extra = [c for c in report["collectives"] if c["count"] is None]
  evaluated = report["evaluation"]["memory"]
  listed = lambda texts: ", ".join(texts) or "none"
  lines = [
    f"  {report['devices']} devices of kind {report['device_kind']}, global batch "
    f"{report['batch_size']:,}; compiled in {report['compile_seconds']:.1f} s, "
    f"{report['peak_rss'] / MIB:,.0f} MiB of host memory",
    f"  MiB per device: {'  '.join(f'{name} {mib(need[name])}' for name in sizes)}",
    f"    needed {mib(need['needed'])} of {mib(need['available'])} "
    f"({100 * need['needed'] / need['available']:.1f} % of the device's memory)",
    f"    tables and slots, sharded: {mib(table['sharded'])}, as laid out "
    f"{mib(table['laid_out'])}; rows x (dim + slots) / devices: {mib(table['expected'])} "
    f"({table['deviation_percent']:+.2f} %, {table['laid_out_deviation_percent']:+.2f} %)",
    f"    tables and slots, replicated: {mib(table['replicated'])}",
    "  exchanges per device and step (bytes of the result; to send at least):",
    *(f"    {_exchange(c)}" for c in always),
    f"    in all {mib(sum(c['count'] * c['bytes'] for c in always))} MiB; "
    f"to send {mib(sum(c['count'] * c['sent'] for c in always))} MiB",
  ]
  if extra:
    lines.append("  only in extra exchange rounds (loops whose length the data decides):")
    lines += [f"    {_exchange(c)}" for c in extra]
  return [
    *lines,
    f"  evaluation of a batch, MiB per device: temporaries {mib(evaluated['temporaries'])}, output "
    f"{mib(evaluated['output'])}",
    f"  SparseCore offloads: {listed(f'{k} x {v}' for k, v in report['offloads'].items())}",
    *_sparse_core(report["sparse_core_calls"], report["row_gathers"]),
    "  the compiler's cost model, which is no step time: "
    + listed(f"{name} {value:.4g}" for name, value in model.items()),
  ]


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
