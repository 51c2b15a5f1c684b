"""The same batch on a small and a large table: time and memory must not follow the vocabulary.

Two layers on CPU, one table each, step in turns in one process. The large table's ids are those of
the small one spread over all of it, so both batches have the same bags, repetitions and distinct
rows. What is left of a difference is the memory's own: caches hold much of a small table and little
of a large one. Memory is what the process holds at most while it steps the large table, beyond
table and slots; what compiling left behind counts in.

  python benchmarks/vocabulary.py --json vocabulary.json

The large table with Adam takes 8 GB; `--vocabularies 100000 1000000` is a smaller comparison.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from contenders import OPTIMIZERS, loss_of
from flax import nnx

import embed

MIB = 1 << 20


class Run(NamedTuple):
  """A layer being trained: `step` makes one step, `state_bytes` is table and slots."""

  step: Callable[[], None]
  state_bytes: int


def make_run(name: str, vocabulary: int, ids: np.ndarray, grads: np.ndarray) -> Run:
  """Trains a table with the optimizer `name` on the one batch."""
  table = embed.TableConfig(
    vocabulary,
    grads.shape[1],
    combiner="sum",
    optimizer=OPTIMIZERS[name](),
    initializer=jax.nn.initializers.constant(0.5),
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  batch = embed.Padded(jnp.asarray(ids)), jnp.asarray(grads)
  count = iter(range(1 << 31))

  @nnx.jit(donate_argnames=("layer",), graph=False)
  def train_step(layer, bags, grads, step):
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return activations

  def step():
    jax.block_until_ready(train_step(layer, *batch, next(count)))

  arrays = jax.tree.leaves(nnx.state(layer, (embed.Table, embed.SlotVariable)))
  return Run(step, sum(x.nbytes for x in arrays))


def resident(peak: bool = False) -> int | None:
  """Bytes of memory this process holds, or held at most since `forget_peak`; None if unknown."""
  key = "VmHWM:" if peak else "VmRSS:"
  try:
    lines = Path("/proc/self/status").read_text().splitlines()
  except OSError:
    return None
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def forget_peak() -> bool:
  """Makes `resident(peak=True)` start again; only Linux can."""
  try:
    Path("/proc/self/clear_refs").write_text("5")
  except OSError:
    return False
  return True


def time_in_turns(runs: list[Run], seconds: float, burst: int) -> list[list[float]]:
  """Milliseconds of every step, `burst` steps in a row for each run, until the time is over."""
  times: list[list[float]] = [[] for _ in runs]
  gc.collect()
  gc.disable()
  end = time.perf_counter() + seconds
  while len(times[-1]) < 3 * burst or time.perf_counter() < end:
    for run, mine in zip(runs, times, strict=True):
      for _ in range(burst):
        start = time.perf_counter()
        run.step()
        mine.append((time.perf_counter() - start) * 1e3)
  gc.enable()
  return times


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
  """One optimizer: measures and prints its line."""
  rng = np.random.default_rng(0)
  small, large = args.vocabularies
  shape = (args.ids // args.valency, args.valency)
  ids = (rng.zipf(args.zipf, size=shape) % small).astype(np.int32)
  grads = rng.normal(size=(shape[0], args.dim)).astype(np.float32)

  before = resident()
  runs = [make_run(name, large, ids * np.int32(large // small), grads)]
  runs[0].step()  # compiles
  gc.collect()
  overhead = None
  if before is not None and forget_peak():
    for _ in range(5):
      runs[0].step()
    peak = resident(peak=True)
    assert peak is not None
    overhead = (peak - before - runs[0].state_bytes) / MIB
  runs.insert(0, make_run(name, small, ids, grads))
  runs[0].step()

  times = time_in_turns(runs, args.seconds, args.burst)
  best = [min(t) for t in times]
  median = [float(np.median(t)) for t in times]
  state = runs[1].state_bytes / MIB
  memory = "not known here" if overhead is None else f"{state:8,.0f} {overhead:+8,.0f}"
  print(
    f"{name:18s} {best[0]:8.2f} {best[1]:8.2f} {best[1] / best[0]:6.2f}   "
    f"{median[0]:8.2f} {median[1]:8.2f} {median[1] / median[0]:6.2f}   {memory}"
  )
  return {
    "best_ms": best,
    "median_ms": median,
    "ratio_of_best": best[1] / best[0],
    "ratio_of_medians": median[1] / median[0],
    "table_and_slots_mib": state,
    "peak_beyond_mib": overhead,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument(
    "--vocabularies", type=int, nargs=2, default=[100_000, 10_000_000], metavar=("SMALL", "LARGE")
  )
  parser.add_argument("--dim", type=int, default=64)
  parser.add_argument("--ids", type=int, default=65_536, help="ids in a batch")
  parser.add_argument("--valency", type=int, default=8, help="ids in a bag")
  parser.add_argument("--zipf", type=float, default=1.2, help="exponent of the ids' power law")
  parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
  parser.add_argument("--seconds", type=float, default=15, help="time for each optimizer")
  parser.add_argument("--burst", type=int, default=5, help="steps in a row")
  parser.add_argument("--json", type=Path, help="write the figures there")
  args = parser.parse_args()

  # What JAX itself takes on first use is no optimizer's.
  jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))
  small, large = args.vocabularies
  print(f"{small:,} and {large:,} rows x {args.dim}, {args.ids:,} ids, bags of {args.valency}")
  print(f"{'':18s} {'best ms':>17s} {'ratio':>6s}   {'median ms':>17s} {'ratio':>6s}   "
        f"{'MiB of table and slots, and peak beyond'}")  # fmt: skip
  results = {name: compare(name, args) for name in args.optimizers}
  if args.json:
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    args.json.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
  main()
