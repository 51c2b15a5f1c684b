"""Checks and times the TPUs or GPUs of this host, and writes a report.

  python benchmarks/device.py --json device.json

Each way to store tables has a process of its own: plain rows, packed rows, and packed rows that
SparseCores read and write. In each of them, `python -m embed check` compares lookups, gradients and
optimizers with NumPy; then steps of one table on all devices of this host are timed. "lookup" is
the forward pass alone, the others are a training step: lookup, gradient and update. Every step gets
other ids, from a pool of batches that are on the devices already. Sizes are per device, so each
device does the same work however many there are.

"in a row" is the time of a step when many are started and the last one is waited for, the best
turn; "each" is the median time of steps that are waited for one by one, which adds what it takes
to start one.

The report has all that is printed. Ways that these devices do not support are skipped, with the
reason.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "")  # the devices; `contenders` would take the CPU

import common
import jax
import numpy as np
from contenders import BATCHES, LOOKUP, OPTIMIZERS, VALENCY, ZIPF, arrays_of, programs
from flax import nnx

import embed
from embed import check
from embed.engine import stack as stack_lib
from embed.kernels import sparse_core

WAYS = {  # environment variables by name
  "plain": {stack_lib.PACKING_SWITCH: "0", sparse_core.SWITCH: "0"},
  "packed": {stack_lib.PACKING_SWITCH: "1", sparse_core.SWITCH: "0"},
  "SparseCores": {stack_lib.PACKING_SWITCH: "1", sparse_core.SWITCH: "1"},
}


def main() -> int:
  parser = common.parser(__doc__)
  parser.set_defaults(json=Path("device.json"))
  parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
  parser.add_argument("--rows", type=int, default=1 << 20, help="of the table, per device")
  parser.add_argument("--dim", nargs="+", type=int, default=[16, 64, 128])
  parser.add_argument("--ids", type=int, default=1 << 16, help="of a batch, per device")
  parser.add_argument("--steps", type=int, default=50, help="in a row, five times")
  parser.add_argument("--minutes", type=float, default=30, help="until a way is given up")
  parser.add_argument("--cpu", action="store_true", help="run on the CPU, to try this program")
  parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # the process of a way
  args = parser.parse_args()
  if args.ids % VALENCY or args.ids <= 0:
    parser.error(f"--ids must be a multiple of {VALENCY}, the ids of a bag")
  if args.child:
    args.json.write_text(json.dumps(of_way(args.child, args)))
    return 0
  report = common.about() | {"commit": commit(), "ways": dict[str, Any]()}
  args.json.write_text(json.dumps(report))  # before any work, so that a wrong path is found
  # This process leaves the devices alone: a TPU serves one process at a time.
  for way in args.ways:
    print(f"\n=== {way}: " + " ".join(f"{k}={v}" for k, v in WAYS[way].items()), flush=True)
    report["ways"][way] = in_process(way, 60 * args.minutes, args.cpu)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["ways"][way].get("interrupted"):
      break
  failed = [way for way, of in report["ways"].items() if "failed" in of]
  for way in failed:
    print(f"\n{way} FAILED: {report['ways'][way]['failed']}", end="")
  print(f"\nThe report is {args.json}." + ("" if failed else " Nothing that could run has failed."))
  return 1 if failed else 0


def commit() -> str:
  """The commit of the checkout, with a "+" if files were changed; "" if git does not tell."""
  command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
  with contextlib.suppress(OSError):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
  return ""


def in_process(way: str, seconds: float, cpu: bool) -> dict[str, Any]:
  """The report of one way, by a process that has its environment variables."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "way.json"
    command = [sys.executable, __file__, *sys.argv[1:], f"--child={way}", f"--json={path}"]
    outcome: dict[str, Any] = {}
    printed, start = [], time.monotonic()
    variables = WAYS[way] | {"PYTHONUNBUFFERED": "1"} | ({"JAX_PLATFORMS": "cpu"} if cpu else {})
    with subprocess.Popen(
      command,
      env=os.environ | variables,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
    ) as process:
      assert process.stdout is not None
      timer = threading.Timer(seconds, process.kill)
      timer.daemon = True
      timer.start()
      try:
        for line in process.stdout:  # shown while it runs
          print(line, end="", flush=True)
          printed.append(line)
      except KeyboardInterrupt:
        process.kill()
        outcome = {"interrupted": True}
      status = process.wait()
    timer.cancel()
    # The process may have ended before it wrote its part, or meanwhile.
    with contextlib.suppress(OSError, json.JSONDecodeError):
      outcome |= json.loads(path.read_text())
    if status:
      late = "not done in time, " if time.monotonic() - start >= seconds else ""
      before = [outcome["failed"]] if "failed" in outcome else []
      outcome["failed"] = "; ".join([*before, f"{late}exit status {status}"])
    return outcome | {"printed": "".join(printed)}


def of_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
  """Checks and times one way in this process."""
  devices = jax.local_devices()
  kind = devices[0].device_kind
  about = {
    "kind": kind,
    "devices": len(devices),
    "runtime": getattr(devices[0].client, "platform_version", ""),
  }
  if devices[0].platform == "cpu" and not args.cpu:
    print("JAX has found no TPU and no GPU")
    return about | {"failed": "JAX has found no TPU and no GPU"}
  reason = sparse_core.unsupported_reason(kind) if way == "SparseCores" else None
  if reason:
    print(f"not run: {reason}")
    return about | {"not run": reason}
  failed = ["python -m embed check"] if check.main() else []
  print(
    f"\na table of {args.rows:,} rows and {args.ids:,} ids in bags of {VALENCY} per device, "
    f"milliseconds per step\n{'columns':>8} {'step':16} {'in a row':>9} {'each':>9}"
  )
  times: dict[str, Any] = {}
  mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
  for dim in args.dim:
    for name in (LOOKUP, *OPTIMIZERS):
      label = f"{dim}, {name}"
      try:
        with jax.set_mesh(mesh):
          times[label] = timed(make_step(name, dim, args), args.steps)
      except Exception as error:  # the others still run
        traceback.print_exc()
        times[label] = {"failed": f"{type(error).__name__}: {error}"}
        failed.append(label)
        continue
      print("{:8} {:16} {:9.3f} {:9.3f}".format(dim, name, *times[label].values()), flush=True)
  return about | {"ms": times} | ({"failed": "; ".join(failed)} if failed else {})


Step = Callable[[int], Any]  # starts the step of a number; returns what to wait for


def make_step(name: str, dim: int, args: argparse.Namespace) -> Step:
  """A step of a new table on all devices of this host."""
  mesh = jax.sharding.get_mesh()
  rows, bags = args.rows * mesh.size, args.ids * mesh.size // VALENCY
  table = embed.TableConfig(
    rows, dim, combiner="sum", optimizer=OPTIMIZERS.get(name, embed.frozen)(), name="table"
  )
  draw = np.random.default_rng(0)
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  pool = [
    embed.Padded(jax.device_put(ids.astype(np.int32), sharding))
    for ids in draw.zipf(ZIPF, (BATCHES, bags, VALENCY)) % rows
  ]
  grads = jax.device_put(draw.normal(size=(bags, dim)).astype(np.float32), sharding)
  plan = embed.plan(embed.FeatureConfig(table), mesh, pool[0])
  if mesh.size > 1:
    plan["table"].strategy = "mod"
  layer = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))

  train_step, look_up = programs(layer)

  def step(i):
    if name == LOOKUP:
      return look_up(pool[i % BATCHES])
    return train_step(pool[i % BATCHES], grads, i), arrays_of(layer)

  return step


def timed(step: Step, count: int) -> dict[str, float]:
  """Milliseconds of a step: in a row, the best of five turns, and one by one, the median."""
  for i in range(BATCHES):  # the first compiles
    jax.block_until_ready(step(i))
  turns, each = [], []
  for _ in range(5):
    start = time.perf_counter()
    for i in range(count):
      last = step(i)
    jax.block_until_ready(last)
    turns.append((time.perf_counter() - start) / count)
  for i in range(count):
    start = time.perf_counter()
    jax.block_until_ready(step(i))
    each.append(time.perf_counter() - start)
  return {"in_a_row": min(turns) * 1e3, "each": sorted(each)[count // 2] * 1e3}


if __name__ == "__main__":
  sys.exit(main())
