"""One training step of one table: ours against torch, FBGEMM and JAX alone, on a CPU or a GPU.

A step is lookup, gradient and update of a batch of bags, whose activations have a given gradient;
"lookup" is the forward pass alone. (For JAX the loss is written so that it depends on the
activations, as it does in training. A program in which it does not is free to update first, and
then has to look up in a copy of the old table.)

Every step gets other ids, from a pool of batches: with the same ids again and again, caches would
hold their rows. All contenders start from the same table and accumulators and get the same ids and
gradients; their tables are compared after one step, and only then are they timed, in turns in one
process. What is missing is reported as missing.

  python benchmarks/step.py --json step.json

On a CPU, contenders make a few steps in each turn, so that what else the machine does hits all of
them, and all of them make the same number of steps, at least three turns of them. A step has ended
when all its results are there. Peers run with one thread and with one for each core, and the better
of the two counts, for the best and for the median. (The published FBGEMM for CPU is built without
OpenMP: it takes one core.) What other processes took of the machine meanwhile is in the file, and a
run that they disturbed says so.

"ours" is a layer's lookup and update, "ours, whole model" the same with `embed.value_and_grad` and
`embed.Optimizer`. They are compiled by `nnx.jit_partial`; "ours, nnx.jit" is called with the layer.
torch and FBGEMM are optional: `pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0`.

  python benchmarks/step.py --device=gpu --json docs/results/step_gpu.json

On an NVIDIA GPU, tables of three sizes get ids of a power law that are spread over the rows. "in a
row" is the time of a step when many are started and the last one is waited for, the best of four
turns; "each" is the median of steps that are waited for one by one. "ours, jit_step" is "ours,
whole model" by `embed.jit_step`; "plain JAX" adds up no row's gradients. The tables of all
contenders are on the GPU at once, 61 GB of them with Adam and the largest table; one that finds no
room is missing. torch and FBGEMM have to be built for one CUDA, as torch 2.11.0 and fbgemm-gpu
1.6.0 for CUDA 13.0 are: `pip install torch==2.11.0 fbgemm-gpu==1.6.0`, both from PyTorch's index of
that CUDA. With `--tiny`, the tables are small, and any device will do.
"""

import argparse
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import numpy as np
from common import CORES
from contenders import (
  BURST,
  CONTENDERS,
  LOOKUP,
  ON_GPUS,
  OPTIMIZERS,
  PEERS,
  RATE,
  Contender,
  Missing,
  Problem,
  make_problem,
  timed,
)

VOCABULARY = 1_000_000
# Rows of a table, its columns, ids of a batch and of a bag.
POINTS = (
  (10_000_000, 128, 1_048_576, 16),
  (1_048_576, 128, 524_288, 8),
  (1_048_576, 64, 65_536, 8),
)
TINY = ((2_000, 16, 512, 16), (500, 8, 256, 8))
SPREAD = 2_654_435_761  # a prime, so that ranks stay apart; Knuth's multiplier of hashes
STEPS, TURNS = 30, 4  # on a GPU


def set_threads(threads: int) -> None:
  """Sets the threads of torch and FBGEMM, which wait for each other."""
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


def gather(
  problem: Problem, name: str, makers: dict[str, Callable[[Problem, str], Contender]] = CONTENDERS
) -> tuple[dict[str, Contender], dict[str, str]]:
  """The contenders after one step each, all tables equal, and why the others are missing."""
  contenders: dict[str, Contender] = {}
  missing: dict[str, str] = {}
  touched, counts = np.unique(problem.ids[0], return_counts=True)
  # float32 rounds a sum of n gradients the more, the larger n; the commonest row has 100,000.
  rounding = 4 * np.finfo(np.float32).eps * RATE * counts[:, None]
  others = np.setdiff1d(np.arange(0, len(problem.rows), 97), touched)
  expected = None
  for label, make in makers.items():
    try:
      contender = make(problem, name)
      contender.set_up()
      contender.take(0)
    except Missing as reason:
      missing[label] = str(reason)
      continue
    except RuntimeError as error:  # of JAX and of torch
      if "out of memory" not in str(error).lower():
        raise
      missing[label] = "out of memory"
      continue
    contenders[label] = contender
    rows = np.asarray(contender.rows(touched))
    if not np.array_equal(contender.rows(others), problem.rows[others]):
      raise AssertionError(f"{name}: {label} moved a row that was not looked up.")
    if expected is None:
      expected = rows
    excess = np.abs(rows - expected) - 1e-4 * (1 + np.abs(expected)) - rounding
    # Adam's first step is a gradient's sign, which rounding turns where a sum is nearly 0.
    if not np.mean(excess > 0) <= 1e-6:
      raise AssertionError(f"{name}: {label} differs from ours by {excess.max()} too much.")
  return contenders, missing


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
        contenders[label].take(i)
        times[label].append((time.perf_counter() - start) * 1e3)
    batch += burst
  gc.enable()
  return times


class Load:
  """Measures other processes: `cores()` that they took on average since it was made."""

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


def show(
  name: str, measured: dict[str, dict[str, float]], missing: dict[str, str], mark: str = ""
) -> dict[str, Any]:
  """Prints a line for each contender; returns all, with `ratio_to_ours` of the first figure."""
  first, titles = next(iter(measured)), list(next(iter(measured.values())))
  header = "".join(f"{title.replace('_', ' '):>14}" for title in titles)
  print(f"\n{name:20}{header}   {titles[0].removesuffix('_ms')} / {first}{mark}")
  result: dict[str, Any] = {}
  for label, of in measured.items():
    ratio = of[titles[0]] / measured[first][titles[0]]
    result[label] = of | {"ratio_to_ours": ratio}
    print(f"  {label:18}{''.join(f'{figure:14.6g}' for figure in of.values())}   {ratio:.2f}")
  for label, why in missing.items():
    result[label] = {"missing": why}
    print(f"  {label:18}{'-':>14}   {why}")
  return result


def report(
  name: str, times: dict[str, list[float]], missing: dict[str, str], others: float | None
) -> dict[str, Any]:
  """Prints one optimizer's lines; a peer counts with the better number of threads."""
  keys = ("best_ms", "median_ms", "steps")
  of = lambda values: (min(values), float(np.median(values)), len(values))
  measured = {label: dict(zip(keys, of(values), strict=True)) for label, values in times.items()}
  for peer in PEERS:
    variants = [of for label, of in measured.items() if label.startswith(f"{peer}, ")]
    if variants:
      measured[peer] = {key: min(variant[key] for variant in variants) for key in keys}
  busy = {"cores_taken_by_others": others, "busy": others is None or others >= BUSY}
  taken = "an unknown number of" if others is None else f"{others:.1f}"
  mark = f"   BUSY: others took {taken} cores" if busy["busy"] else ""
  return busy | show(name, measured, missing, mark)


def described(problem: Problem) -> dict[str, Any]:
  """Prints the sizes of a problem; returns them."""
  print("versions: " + ", ".join(f"{k} {v}" for k, v in common.versions().items()))
  (vocabulary, dim), (_, bags, valency) = problem.rows.shape, problem.ids.shape
  ids, distinct = bags * valency, len(np.unique(problem.ids[0]))
  print(f"\ntable {vocabulary:,} x {dim}, {ids:,} ids in {bags:,} bags, {distinct:,} distinct")
  return {"vocabulary": vocabulary, "dim": dim, "ids": ids, "distinct": distinct}


def on_cpu(args: argparse.Namespace) -> int:
  """Times the contenders on the CPU."""
  problem = make_problem(VOCABULARY)
  point, results = described(problem), {}
  for name in (LOOKUP, *OPTIMIZERS):
    contenders, missing = gather(problem, name)
    load = Load()
    times = time_in_turns(with_threads(contenders), args.seconds, BURST)
    results[name] = report(name, times, missing, load.cores())
    del contenders
  common.write(args.json, point | {"results": results})
  return 0


def on_gpu(args: argparse.Namespace) -> int:
  """Times the contenders on a GPU; returns 1 if an operation failed, and the others still run."""
  jax.config.update("jax_platforms", "")  # of which the contenders have chosen the CPU
  device = jax.devices()[0]
  if device.platform != "gpu" and not args.tiny:
    sys.exit(
      f"JAX has found no GPU, but {device.device_kind}. Install the extra `cuda` on a machine with "
      "an NVIDIA GPU, or try the program with --tiny."
    )
  driver = common.said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i0")
  points: list[dict[str, Any]] = []
  about = {"device": device.device_kind, "driver": driver, "points": points}
  failed = 0
  for point in TINY if args.tiny else POINTS:
    problem = make_problem(*point, SPREAD, "cuda" if device.platform == "gpu" else "cpu")
    points.append(described(problem) | {"valency": point[-1], "results": {}})
    for name in (LOOKUP, *OPTIMIZERS):
      contenders: dict[str, Contender] = {}
      release_memory()
      try:
        contenders, missing = gather(problem, name, ON_GPUS)
        result = show(name, timed(contenders, STEPS, TURNS), missing)
      except Exception as error:
        traceback.print_exc()
        result, failed = {"failed": f"{type(error).__name__}: {error}"}, 1
      points[-1]["results"][name] = result
      common.write(args.json, about)  # a run that is stopped leaves what it has
  return failed


def release_memory() -> None:
  """Frees what contenders held, and gives back what torch keeps of a GPU."""
  gc.collect()
  if torch := sys.modules.get("torch"):
    torch.cuda.empty_cache()


def main() -> int:
  parser = common.parser(__doc__)
  parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
  parser.add_argument("--seconds", type=float, default=20, help="time for each optimizer, on a CPU")
  parser.add_argument("--tiny", action="store_true", help="tiny tables in place of a GPU's")
  args = parser.parse_args()
  warnings.filterwarnings("ignore", module="torch|fbgemm_gpu")
  return on_gpu(args) if args.device == "gpu" else on_cpu(args)


if __name__ == "__main__":
  sys.exit(main())
