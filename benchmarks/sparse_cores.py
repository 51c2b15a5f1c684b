"""Compiles the SparseCore kernels for TPUs, without having any, and prints what they need.

    pip install -e '.[tpu]'
    python benchmarks/sparse_cores.py --json=sparse_cores.json

For each topology and width of rows: bytes of a device's arguments, of those written in place, and
of temporaries. A kernel fails if it does not compile, or if an array of the table's size is made.
"""

import itertools
from typing import Any

import common
import jax
import jax.numpy as jnp
from aot import compile as aot
from aot import hlo
from common import MIB
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from embed.kernels import sparse_core_pallas as kernels
from recipes import mesh as mesh_lib

TOPOLOGIES, WIDTHS = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"), (128, 256, 512, 1024, 2048)
ROWS, IDS, BAGS = 1 << 18, 10_000, (1024, 20)  # of a device


def programs(width: int) -> dict[str, tuple[Any, list[tuple[tuple[int, ...], Any]], int]]:
  """Each kernel by name: the function, its arguments on a device, and how many are donated."""
  table, ids, rows = ((ROWS, width), "f4"), ((IDS,), "i4"), ((IDS, width), "f4")
  put = lambda table, slot, ids, rows: kernels.put([table, slot], ids, [rows, rows])
  return {
    "take": (kernels.take, [table, ids], 0),
    "put": (put, [table, table, ids, rows], 2),
    "bag_sum": (kernels.bag_sum, [table, (BAGS, "i4")], 0),
  }


def compiled(topology: str, width: int, name: str) -> dict[str, Any]:
  """Compiles a kernel; returns its bytes.

  Raises:
    AssertionError: it makes an array of the table's size, or does not write in place.
  """
  mesh = aot.topology_mesh(topology)
  function, shapes, donated = programs(width)[name]
  over = lambda shape, dtype: jax.ShapeDtypeStruct(
    (shape[0] * mesh.size, *shape[1:]),
    jnp.dtype(dtype),
    sharding=NamedSharding(mesh, P(mesh_lib.AXIS)),
  )
  part = P(mesh_lib.AXIS)
  run = jax.shard_map(function, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)
  traced = jax.jit(run, donate_argnums=range(donated)).trace(*(over(*x) for x in shapes))
  program = aot.compiled(traced, topology)
  memory = program.memory_analysis()
  made = hlo.Program(program.as_text()).made(lambda array: array.nbytes >= ROWS * width * 4)
  assert not made, made
  assert memory.alias_size_in_bytes == donated * ROWS * width * 4, memory
  return {
    "arguments": memory.argument_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
  }


def main() -> None:
  args = common.parser(__doc__).parse_args()
  aot.without_devices()
  results: dict[str, Any] = {}
  print(
    f"{'':14}{'columns':>8}  {'kernel':20}{'arguments':>12}{'in place':>10}{'temporaries, MiB':>18}"
  )
  for topology, width in itertools.product(TOPOLOGIES, WIDTHS):
    for name in programs(width):
      of = compiled(topology, width, name)
      sizes = [of[key] / MIB for key in ("arguments", "aliased", "temporaries")]
      print(f"{topology:14}{width:8}  {name:20}{sizes[0]:12.1f}{sizes[1]:10.1f}{sizes[2]:18.1f}")
      results.setdefault(topology, {}).setdefault(str(width), {})[name] = of
  common.write(args.json, {"bytes": results})


if __name__ == "__main__":
  main()
