"""Compiles training steps of tables that are stored in several ways for TPUs, without having any.

    pip install -e '.[tpu]'
    python benchmarks/tables_on_tpus.py --json=tables_on_tpus.json

For each topology, dtype, width and way to store the rows: a step of Adagrad on one table, on all
devices of the topology. Printed are the bytes of a device's table and slots, how much of them is
written in place, the temporaries, how these change if the table has twice as many rows, and the
arrays of the table's size that the step makes, which should be none.
"""

import itertools
from typing import Any

import common
import jax
import jax.numpy as jnp
import optax
from aot import compile as aot
from aot import hlo
from common import MIB
from flax import nnx

import embed
from recipes import mesh as mesh_lib

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
DIMS = (8, 16, 32, 64, 100, 128, 256)
ROWS, BAGS, LENGTH = 1 << 18, 512, 8  # of a device
WAYS = {"plain": "rows", "packed": "packed", "SparseCores": "sparse_core"}  # storages


def compiled(topology: str, dtype: str, dim: int, way: str, rows: int) -> tuple[Any, Any, Any]:
  """The compiled step of a table of `rows` rows on a device, its layer and the layer's stack."""
  mesh = aot.topology_mesh(topology)
  table = embed.TableConfig(
    rows * mesh.size, dim, dtype=dtype, name="table", stochastic_rounding=False
  )
  features = embed.FeatureConfig(table)
  batch = embed.Padded(jax.ShapeDtypeStruct((BAGS * mesh.size, LENGTH), jnp.int32))
  plan = embed.plan(features, mesh, batch, embed.adagrad(0.1), axis=mesh_lib.AXIS)
  plan["table"].strategy, plan["table"].storage = "mod", WAYS[way]
  make = lambda: embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
  layer = aot.shapes(make, mesh)
  optimizer = aot.shapes(lambda: embed.Optimizer(make(), optax.sgd(0.1)), mesh)

  @nnx.jit(donate_argnames=("layer", "optimizer"))
  def step(layer, optimizer, ids):
    loss_fn = lambda layer, ids: jnp.mean(jnp.square(layer(ids).astype(jnp.float32)))
    loss, grads = embed.value_and_grad(loss_fn)(layer, ids)
    optimizer.update(layer, grads)
    return loss

  traced = step.trace(layer, optimizer, aot.over_examples(mesh, batch))
  return aot.compiled(traced, topology), layer, plan.stacks()["table"]


def figures(topology: str, dtype: str, dim: int, way: str) -> dict[str, Any]:
  """Returns the memory that a step needs, in bytes of a device."""
  program, layer, stack = compiled(topology, dtype, dim, way, ROWS)
  memory = program.memory_analysis()
  least = ROWS * min(dim, stack.row_width) * stack.dtype.itemsize
  made = hlo.Program(program.as_text()).made(lambda array: array.nbytes >= least)
  twice = compiled(topology, dtype, dim, way, 2 * ROWS)[0].memory_analysis()
  return {
    "tables and slots": sum(map(aot.held, aot.stored(layer))),
    "arguments": memory.argument_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "temporaries of twice the rows": twice.temp_size_in_bytes,
    "made": [str(x) for x in made],
  }


def ways_of(topology: str, dtype: str, dim: int) -> list[str]:
  """The ways to store rows that differ here."""
  with_sparse_cores = dtype == "float32" and not topology.startswith("v5e")
  return [*(["plain"] if dim % 128 else []), "packed", *(["SparseCores"] * with_sparse_cores)]


def main() -> None:
  args = common.parser(__doc__).parse_args()
  aot.without_devices()
  results: list[dict[str, Any]] = []
  print(
    f"{'':12}{'':9}{'dim':>4} {'':12}{'held, MiB':>10}{'in place':>9}{'temp., MiB':>11}"
    f"{'twice the rows':>15}  made"
  )
  for topology, dtype, dim in itertools.product(TOPOLOGIES, ("float32", "bfloat16"), DIMS):
    for way in ways_of(topology, dtype, dim):
      of = figures(topology, dtype, dim, way)
      results.append({"topology": topology, "dtype": dtype, "dim": dim, "way": way} | of)
      temporaries, twice = of["temporaries"], of["temporaries of twice the rows"]
      change = 100 * (twice - temporaries) / max(temporaries, 1)
      print(
        f"{topology:12}{dtype:9}{dim:4} {way:12}{of['tables and slots'] / MIB:10.1f}"
        f"{of['aliased'] / MIB:9.1f}{temporaries / MIB:11.1f}{change:14.1f}%"
        f"  {', '.join(of['made']) or '-'}",
        flush=True,
      )
  common.write(args.json, {"steps": results})


if __name__ == "__main__":
  main()
