"""Times many ways to write a training step at two sizes of the tables, or compiles them.

    python benchmarks/in_place.py --json=in_place.json
    pip install -e '.[tpu]' && python benchmarks/in_place.py --topologies v5p:2x2x1 h100:8

The first prints the milliseconds of each step at 25,000 and at 1,000,000 rows, and their ratio: a
step that copies its tables takes forty times as long. The second compiles the steps for devices
that are not there, and prints which of them make an array of a table's size.
"""

import sys
import time
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from aot import compile as aot
from aot import hlo
from flax import nnx

import embed

sys.path.insert(0, str(common.ROOT / "tests" / "support"))
from step_ways import WAYS, Model, batch_of

ROWS, DIM, BAGS, LENGTH = (25_000, 1_000_000), 64, 512, 8
RUNS = 30


def times(rows: int) -> dict[str, float]:
  """The best time of each step, in milliseconds."""
  model = Model(rows, DIM)
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  ids = np.random.default_rng(0).integers(0, rows, (BAGS, LENGTH)).astype(np.int32)
  batch = jax.tree.map(jnp.asarray, batch_of(ids))
  best = {}
  for name, way in WAYS.items():
    step = embed.jit_step(way, model, optimizer)
    taken = []
    for _ in range(RUNS):
      start = time.perf_counter()
      jax.block_until_ready((step(batch), nnx.state(model)))
      taken.append(time.perf_counter() - start)
    best[name] = 1e3 * min(taken[1:])
    jax.clear_caches()
  return best


def made(topology: str, way: Any) -> list[str]:
  """The arrays of a table's size that a step makes on a device, and tables that it copies."""
  mesh = aot.topology_mesh(topology)
  make = lambda: Model(2**15 * mesh.size, 128, mesh)
  model = aot.shapes(make, mesh)
  optimizer = aot.shapes(lambda: embed.Optimizer(make(), optax.sgd(0.1)), mesh)
  ids = jax.ShapeDtypeStruct((8 * mesh.size, LENGTH), jnp.int32)
  batch = jax.eval_shape(batch_of, ids)
  step = nnx.jit(way, donate_argnums=(0, 1))
  with jax.set_mesh(mesh):
    traced = step.trace(model, optimizer, aot.over_examples(mesh, batch))
  compiled = aot.compiled(traced, topology)
  large = hlo.Program(compiled.as_text()).made(lambda x: x.nbytes >= 2**15 * 128 * 4)
  missing = sum(map(aot.held, aot.stored(model))) - compiled.memory_analysis().alias_size_in_bytes
  return [*large, *([f"{missing} bytes are not in place"] if missing > 0 else [])]


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--topologies", nargs="*", default=[])
  args = parser.parse_args()
  results: dict[str, Any] = {}
  if args.topologies:
    aot.without_devices()
  for topology in args.topologies:
    results[topology] = {name: made(topology, way) for name, way in WAYS.items()}
    for name, arrays in results[topology].items():
      print(f"{topology:12}{name:50}{', '.join(arrays) or '-'}")
  if not args.topologies:
    small, large = (times(rows) for rows in ROWS)
    results["milliseconds"] = {name: [small[name], large[name]] for name in WAYS}
    for name in WAYS:
      print(f"{name:50}{small[name]:8.2f}{large[name]:8.2f}{large[name] / small[name]:6.1f} x")
  common.write(args.json, results)


if __name__ == "__main__":
  main()
