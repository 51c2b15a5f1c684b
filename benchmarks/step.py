"""One training step of one table on CPU: ours against torch, FBGEMM and dense-gradient JAX.

A step is lookup, gradient and update of a batch of bags, whose activations have a given gradient;
"lookup" is the forward pass alone. (For JAX the loss is written so that it depends on the
activations, as it does in training. A program in which it does not is free to update first, and
then has to look up in a copy of the old table.)

Every step gets other ids, from a pool of batches: with the same ids again and again, caches would
hold their rows. All contenders start from the same table and accumulators and get the same ids and
gradients; their tables are compared after one step, and only then are they timed: in turns, a few
steps each, in one process, so that what else the machine does hits all of them, and all of them
make the same number of steps, at least three turns of them. A step has ended when all its results
are there. Peers run with one thread and with one for each core, and the better of the two counts,
for the best and for the median. (The published FBGEMM for CPU is built without OpenMP: it takes one
core.) What other processes took of the machine meanwhile is in the file, and a run that they
disturbed says so.

  python benchmarks/step.py --json step.json

"ours" is a layer's lookup and update, "ours, whole model" the same with `embed.value_and_grad` and
`embed.Optimizer`. They are compiled by `nnx.jit_partial`; "ours, nnx.jit" is called with the layer.
torch and FBGEMM are optional: `pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0`. What is missing is
reported as missing.
"""

import gc
import os
import time
import warnings
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import CORES
from contenders import (
  BURST,
  CONTENDERS,
  DIM,
  IDS,
  LOOKUP,
  OPTIMIZERS,
  PEERS,
  RATE,
  Contender,
  Missing,
  Problem,
  make_problem,
)

VOCABULARY = 1_000_000


def set_threads(threads: int) -> None:
  """Of torch and FBGEMM, whose threads wait for each other."""
  import torch

  torch.set_num_threads(threads)


def with_threads(contenders: dict[str, Contender]) -> dict[str, Contender]:
  """Ours, and then each peer once for each number of threads."""
  made = {label: contender for label, contender in contenders.items() if label not in PEERS}
  for label in [label for label in contenders if label in PEERS]:
    for threads in sorted({1, CORES}):
      set_up = lambda threads=threads: set_threads(threads)
      made[f"{label}, {threads} threads"] = contenders[label]._replace(set_up=set_up)
  return made


def gather(problem: Problem, name: str) -> tuple[dict[str, Contender], dict[str, str]]:
  """The contenders after one step each, all tables equal, and why the others are missing."""
  contenders: dict[str, Contender] = {}
  missing: dict[str, str] = {}
  for label, make in CONTENDERS.items():
    try:
      contenders[label] = make(problem, name)
    except Missing as reason:
      missing[label] = str(reason)
  touched, counts = np.unique(problem.ids[0], return_counts=True)
  # float32 rounds a sum of n gradients the more, the larger n; the commonest row has 100,000.
  rounding = 4 * np.finfo(np.float32).eps * RATE * counts[:, None]
  others = np.setdiff1d(np.arange(0, len(problem.rows), 97), touched)
  expected = None
  for label, contender in contenders.items():
    contender.set_up()
    contender.step(0)
    rows = np.asarray(contender.rows())
    if not np.array_equal(rows[others], problem.rows[others]):
      raise AssertionError(f"{name}: {label} moved a row that was not looked up.")
    if expected is None:
      expected = rows[touched]
    else:
      excess = np.abs(rows[touched] - expected) - 1e-4 * (1 + np.abs(expected)) - rounding
      if not np.all(excess <= 0):
        raise AssertionError(f"{name}: {label} differs from ours by {excess.max()} too much.")
  return with_threads(contenders), missing


# Seconds between turns. Threads of OpenMP spin for a while after their last work, on cores that the
# next contender needs.
REST = 0.01


def time_in_turns(
  contenders: dict[str, Contender], seconds: float, burst: int
) -> dict[str, list[float]]:
  """Milliseconds of every step, as many for each contender; in its turn it makes `burst` steps."""
  times: dict[str, list[float]] = {label: [] for label in contenders}
  turns, batch, order = list(contenders), 0, np.random.default_rng(0)
  gc.collect()
  gc.disable()
  end = time.perf_counter() + seconds
  while batch < 3 * burst or time.perf_counter() < end:
    for label in order.permutation(turns).tolist():
      contenders[label].set_up()
      time.sleep(REST)
      for i in range(batch, batch + burst):
        start = time.perf_counter()
        contenders[label].step(i)
        times[label].append((time.perf_counter() - start) * 1e3)
    batch += burst
  gc.enable()
  return times


class Load:
  """What other processes take of the machine: `cores()` on average since it was made."""

  def __init__(self) -> None:
    self.start = self._now()

  def _now(self) -> tuple[float, float, float]:
    try:
      fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:  # not Linux
      return time.perf_counter(), np.nan, time.process_time()
    ticks = [int(field) for field in fields]
    busy = sum(ticks) - ticks[3] - ticks[4]  # less idle and waiting for disks
    return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()

  def cores(self) -> float | None:
    """None where the machine does not tell."""
    (wall, busy, own), (wall_0, busy_0, own_0) = self._now(), self.start
    if np.isnan(busy):
      return None
    return max(0.0, ((busy - busy_0) - (own - own_0)) / (wall - wall_0))


BUSY = 0.1  # cores that others took, from which on a run is marked


def report(
  name: str, times: dict[str, list[float]], missing: dict[str, str], others: float | None
) -> dict[str, Any]:
  """Prints one optimizer's lines; `ratio_to_ours` is a contender's best to that of `ours`."""
  best = {label: min(values) for label, values in times.items()}
  median = {label: float(np.median(values)) for label, values in times.items()}
  steps = {label: len(values) for label, values in times.items()}
  for peer in PEERS:  # the better number of threads
    variants = [label for label in times if label.startswith(f"{peer}, ")]
    if variants:
      best[peer] = min(best[label] for label in variants)
      median[peer] = min(median[label] for label in variants)
      steps[peer] = min(steps[label] for label in variants)
  first = next(iter(best))
  result: dict[str, Any] = {
    "cores_taken_by_others": others,
    "busy": others is None or others >= BUSY,
  }
  taken = "an unknown number of" if others is None else f"{others:.1f}"
  mark = f"   BUSY: others took {taken} cores" if result["busy"] else ""
  print(f"\n{name:20s} {'best ms':>9s} {'median ms':>10s} {'steps':>6s}   best / {first}{mark}")
  for label in best:
    ratio = best[label] / best[first]
    print(f"  {label:18s} {best[label]:9.3f} {median[label]:10.3f} {steps[label]:6d}   {ratio:.2f}")
    result[label] = {
      "best_ms": best[label],
      "median_ms": median[label],
      "steps": steps[label],
      "ratio_to_ours": ratio,
    }
  for label, why in missing.items():
    print(f"  {label:18s} {'-':>9s} {'-':>10s} {'-':>6s}   {why}")
    result[label] = {"missing": why}
  return result


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--seconds", type=float, default=20, help="time for each optimizer")
  args = parser.parse_args()
  warnings.filterwarnings("ignore", module="torch|fbgemm_gpu")
  print("versions: " + ", ".join(f"{k} {v}" for k, v in common.versions().items()))
  problem = make_problem(VOCABULARY)
  distinct = len(np.unique(problem.ids[0]))
  print(
    f"\ntable {VOCABULARY:,} x {DIM}, {IDS:,} ids in {problem.ids.shape[1]:,} bags, {distinct:,} "
    f"distinct; {CORES} cores"
  )
  results = {}
  for name in (LOOKUP, *OPTIMIZERS):
    contenders, missing = gather(problem, name)
    load = Load()
    times = time_in_turns(contenders, args.seconds, BURST)
    results[name] = report(name, times, missing, load.cores())
    del contenders
  point = {"vocabulary": VOCABULARY, "dim": DIM, "ids": IDS, "distinct": distinct}
  common.write(args.json, point | {"results": results})


if __name__ == "__main__":
  main()
