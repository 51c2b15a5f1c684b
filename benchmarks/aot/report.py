"""The report on a compiled training step: its parts, its problems, and its text."""

import collections
import math
import time
from typing import Any

import jax
from flax import nnx

import embed

from . import compile as aot
from . import hlo


def inspect(topology: str, recipe: str, config: Any) -> dict[str, Any]:
  """Compiles the training step of a recipe for one topology and returns the report."""
  mesh = aot.topology_mesh(topology)
  step, model, optimizer, batch = aot.training(recipe, config, mesh)
  traced = nnx.jit(step, donate_argnums=(0, 1)).trace(model, optimizer, batch)
  report: dict[str, Any] = {"devices": mesh.size}
  report["batch_size"] = jax.tree.leaves(batch)[0].shape[0]
  began = time.perf_counter()
  try:
    compiled = aot.compiled(traced, topology)
  except jax.errors.JaxRuntimeError as error:
    return report | {"problems": [f"does not compile: {error}"]}
  report["compile_seconds"] = time.perf_counter() - began
  program, arrays = hlo.Program(compiled.as_text()), aot.stored(model, optimizer)
  costs = compiled.cost_analysis() or {}  # None of GPUs
  estimates = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")
  report |= {
    "memory": memory(compiled.memory_analysis(), aot.memory(topology, mesh)),
    "tables": tables(model, arrays),
    "collectives": program.collectives(),
    "copies": copies(program, arrays),
    "sparse_core_calls": program.sparse_core_calls(),
    "row_gathers": program.row_gathers(),
    "cost_model": {name: costs[name] for name in estimates if name in costs},
  }
  return report | {"problems": problems(report, config)}


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


def tables(model: nnx.Module, arrays: list[Any]) -> dict[str, float]:
  """Returns the bytes per device of tables and slots, and of their rows alone.

  `expected` is rows x (dim + slots) x bytes / devices of the tables that are sharded.
  """
  whole = sum(aot.held(x) for x in arrays if x.sharding.is_fully_replicated)
  sharded = sum(map(aot.held, arrays)) - whole
  expected = (_logical(model) - whole) / arrays[0].sharding.mesh.size
  return {"sharded": sharded, "expected": expected, "replicated": whole}


def _logical(model: nnx.Module) -> int:
  """Returns the bytes of the rows and slots that the configs ask for, in no layout."""
  total = 0
  for _, layer in nnx.iter_modules(model):
    if not isinstance(layer, embed.SparseEmbed):
      continue
    for name, table in layer.spec.tables.items():
      optimizer = layer.spec.optimizers[name]
      slots = optimizer.slots(table.dim).values() if optimizer is not None else ()
      widths = [(table.dim, table.dtype)]
      widths += [(1 if slot.per_row else table.dim, slot.dtype) for slot in slots]
      row = sum(width * jax.numpy.dtype(dtype).itemsize for width, dtype in widths)
      total += table.vocabulary_size * row
  return total


def copies(program: hlo.Program, arrays: list[Any]) -> list[str]:
  """Returns the new arrays of the size of a table's or a slot's shard, or larger than all of them.

  Work that grows with the vocabulary shows as one: copies, other layouts, dense gradients.
  """
  shards = [x for x in arrays if not x.sharding.is_fully_replicated]
  sizes = {(aot.held(x), x.dtype.itemsize) for x in shards}
  largest = max(map(aot.held, shards), default=math.inf)
  # The buffers of an exchange follow the batch; with small tables they are the larger ones.
  exchanged = {array.size for i in program.exchanges for array in i.exchanged}

  def fits(array: hlo.Array) -> bool:
    beyond = array.nbytes >= largest and array.size not in exchanged
    return beyond or (array.nbytes, array.nbytes // max(array.size, 1)) in sizes

  return program.made(fits)


def problems(report: dict[str, Any], config: Any) -> list[str]:
  """Returns what makes the compiled step unfit, in words; nothing if it is as it should be."""
  need, table = report["memory"], report["tables"]
  reasons = []
  if need["needed"] > need["available"]:
    reasons.append(f"needs {need['needed']:,} bytes of a device that has {need['available']:,}")
  if need["aliased"] < table["sharded"] + table["replicated"]:
    reasons.append("tables and slots are not updated in place: less is aliased than they take")
  # An all-gather may be of 16 bits: a matrix product on TPUs rounds float32 operands to them.
  summed = [c for c in report["collectives"] if c["op"] != "all-gather"]
  if config.dtype == config.table_dtype == "float32":
    narrow = [c["op"] for c in summed if {"bf16", "f16"}.intersection(c["dtypes"])]
    reasons += [f"a float32 exchange has become narrower: {op}" for op in narrow]
  return reasons + [f"an array of a table's size is made: {text}" for text in report["copies"]]


def text(report: dict[str, Any]) -> str:
  """Returns a report as lines for a terminal."""
  lines = [f"{report['topology']}  " + "  ".join(f"{k} {v}" for k, v in report["versions"].items())]
  if "memory" in report:
    lines += _body(report)
  lines += [f"  PROBLEM  {problem}" for problem in report["problems"]]
  return "\n".join(lines if report["problems"] else [*lines, "  no problem found"])


def _body(report: dict[str, Any]) -> list[str]:
  mib = lambda x: f"{x / 2**20:,.1f} MiB"
  sizes = lambda of: ", ".join(f"{name} {mib(size)}" for name, size in of.items())
  per_step = sum(c["sent"] * (c["count"] or 0) for c in report["collectives"])
  kernels = collections.Counter(call["kernel"] for call in report["sparse_core_calls"])
  lines = [
    f"  {report['devices']} devices, a batch of {report['batch_size']:,} examples, compiled in "
    f"{report['compile_seconds']:.1f} s",
    f"  a device: {sizes(report['memory'])}",
    f"  its tables and slots: {sizes(report['tables'])}",
    f"  sends {mib(per_step)} a step at least, by",
  ]
  for c in report["collectives"]:
    count = f"{c['instructions']} x in extra rounds" if c["count"] is None else f"{c['count']} x"
    shapes = ", ".join([*c["shapes"][:3], *["..."] * (len(c["shapes"]) > 3)])
    lines.append(f"    {count} {c['op']} {shapes} over {c['devices']}: {mib(c['sent'])} each")
  costs = ", ".join(f"{k} {v:.4g}" for k, v in report["cost_model"].items()) or "none"
  return [
    *lines,
    f"  kernels on SparseCores: {dict(kernels)}; {report['row_gathers']} gathers of rows by XLA",
    f"  the compiler's cost model, which is no step time: {costs}",
  ]
