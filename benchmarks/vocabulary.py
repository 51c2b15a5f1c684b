"""The same batches on a small and a large table: time and memory must not follow the vocabulary.

Tables of both sizes step in turns in one process on CPU, ours and the peers'. The large table gets
the ids of the small one spread over all of its rows, so both have the same bags, repetitions and
distinct rows. The difference that is left comes from the memory, and everybody has it: in the large
table rows lie far apart, and the address of each page has to be looked up. Memory is what the
process holds at most while ours steps the large table, beyond table and slots: what compiling left
behind counts in, and memory that was free already does not.

  python benchmarks/vocabulary.py --json vocabulary.json

The large tables with Adagrad take 20 GB.
"""

import gc
from pathlib import Path
from typing import Any

import common
import contenders as lib
import jax
import jax.numpy as jnp
import numpy as np
import step as timing
from common import MIB
from contenders import BATCHES, BURST, DIM, IDS, OPTIMIZERS, VALENCY, ZIPF, Contender, Missing

SIZES = (100_000, 10_000_000)
LABELS = ("ours", *lib.PEERS)


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


def make(problem: lib.Problem, name: str, label: str) -> dict[str, Contender]:
  """The contenders of a name, one for each number of threads, after a step each."""
  contender = lib.CONTENDERS[label](problem, name)
  contender.take(0)  # compiles
  return timing.with_threads({label: contender})


def peak_beyond(contender: Contender, before: int | None, state: int) -> float | None:
  """MiB that the process holds at most in steps, beyond what it held before and the state."""
  gc.collect()
  if before is None or not forget_peak():
    return None
  for i in range(5):
    contender.take(i)
  peak = resident(peak=True)
  assert peak is not None
  return (peak - before - state) / MIB


def compare(name: str, seconds: float) -> dict[str, Any]:
  """One optimizer: measures and prints its lines."""
  rng = np.random.default_rng(0)
  small, large = SIZES
  shape = (BATCHES, IDS // VALENCY, VALENCY)
  ids = (rng.zipf(ZIPF, size=shape) % small).astype(np.int32)
  grads = rng.normal(size=(shape[1], DIM)).astype(np.float32)
  slots = OPTIMIZERS[name]().slots(DIM).values()
  state = 4 * large * (DIM + sum(1 if slot.per_row else DIM for slot in slots))
  contenders: dict[str, Contender] = {}
  beyond = None
  for size, spread in ((large, ids * np.int32(large // small)), (small, ids)):
    problem = lib.Problem(np.full((size, DIM), 0.5, np.float32), spread, grads)
    for label in LABELS:
      before = resident()
      try:
        made = make(problem, name, label)
      except Missing:
        continue
      if label == "ours" and size == large:
        beyond = peak_beyond(made[label], before, state)
      contenders |= {f"{variant}|{size}": contender for variant, contender in made.items()}
    del problem
  load = timing.Load()
  times = timing.time_in_turns(contenders, seconds, BURST)
  others = load.cores()
  result: dict[str, Any] = {
    "table_and_slots_mib": state / MIB,
    "peak_beyond_mib": beyond,
    "cores_taken_by_others": others,
    "busy": others is None or others >= timing.BUSY,
  }
  mark = f"   BUSY: others took {others} cores" if result["busy"] else ""
  memory = "" if beyond is None else f"   {state / MIB:8,.0f} MiB {beyond:+8,.0f}"
  for label in LABELS:
    best, median = [], []
    for size in (small, large):  # the better number of threads
      of = [t for key, t in times.items() if key.startswith(label) and key.endswith(f"|{size}")]
      if of:
        best.append(min(map(min, of)))
        median.append(min(float(np.median(steps)) for steps in of))
    if not best:
      continue
    result[label] = {
      "best_ms": best,
      "median_ms": median,
      "ratio_of_best": best[1] / best[0],
      "ratio_of_medians": median[1] / median[0],
    }
    print(
      f"{name:18s} {label:8s} {best[0]:8.2f} {best[1]:8.2f} {best[1] / best[0]:6.2f}   "
      f"{median[0]:8.2f} {median[1]:8.2f} {median[1] / median[0]:6.2f}{memory}{mark}"
    )
    memory = ""
  return result


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--seconds", type=float, default=15, help="time for each optimizer")
  args = parser.parse_args()

  # Memory that JAX takes on first use is no optimizer's.
  jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))
  print("{:,} and {:,} rows".format(*SIZES) + f" x {DIM}, {IDS:,} ids, bags of {VALENCY}")
  print(f"{'':27s} {'best ms':>17s} {'ratio':>6s}   {'median ms':>17s} {'ratio':>6s}   "
        f"{'table and slots, and peak beyond'}")  # fmt: skip
  common.write(args.json, {"results": {name: compare(name, args.seconds) for name in OPTIMIZERS}})


if __name__ == "__main__":
  main()
