"""Checks and times the TPUs or GPUs of this machine, and prints what to report.

  python benchmarks/device.py --json device.json

Each way to store tables has a process of its own: plain rows, packed rows, and packed rows that
SparseCores read and write. In each, `python -m embed check` compares lookups, gradients and all
optimizers with NumPy; if that passes, steps of one table on all devices of this machine are timed.
"lookup" is the forward pass alone, the others are a training step: lookup, gradient and update.
Every step gets other ids, from a pool of batches that are on the devices already.

"in a row" is the time of a step when many are started and the last one is waited for, the best
turn; "each" is the median time of steps that are waited for one by one, which adds what it takes
to start one. Tables in the memory of the host are timed with packed rows, as "host".

The file has all that is printed. A way that these devices do not have is in it with the reason.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "")  # the devices; `contenders` would take the CPU
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout as it is

import jax
import jax.numpy as jnp
import numpy as np
from contenders import LOOKUP, OPTIMIZERS, loss_of
from flax import nnx

import embed
from embed.engine import host, sparse_core
from embed.tools import check

WAYS = {  # environment variables by name
  "plain": {"SPARSE_EMBED_PACKED": "0", "SPARSE_EMBED_SPARSE_CORES": "0"},
  "packed": {"SPARSE_EMBED_PACKED": "1", "SPARSE_EMBED_SPARSE_CORES": "0"},
  "SparseCores": {"SPARSE_EMBED_PACKED": "1", "SPARSE_EMBED_SPARSE_CORES": "1"},
}
# On a device; what it stores of them, and a batch, is the same on one and on many.
VALENCY, ZIPF, BATCHES = 8, 1.2, 8


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
  parser.add_argument("--rows", type=int, default=1 << 20, help="of a table, a device")
  parser.add_argument("--dim", nargs="+", type=int, default=[16, 64, 128])
  parser.add_argument("--ids", type=int, default=1 << 16, help="in a batch, a device")
  parser.add_argument("--steps", type=int, default=50, help="in a row, five times")
  parser.add_argument(
    "--json", type=Path, default=Path("device.json"), help="where the report goes"
  )
  parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # a process for one of them
  args = parser.parse_args()
  if args.way:
    args.json.write_text(json.dumps(of_way(args.way, args)))
    return 0
  # This process does not touch the devices: a TPU serves one process at a time.
  report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "ways": {}}
  report["date"] = time.strftime("%Y-%m-%d")
  for way in args.ways:
    print(f"\n=== {way}: " + " ".join(f"{k}={v}" for k, v in WAYS[way].items()), flush=True)
    report["ways"][way] = in_process(way)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
  failed = [way for way, of in report["ways"].items() if of.get("failed")]
  outcome = f"FAILED: {', '.join(failed)}." if failed else "All that could run passed."
  print(f"\n{outcome} Please report the file {args.json}, which has all of this.")
  return 1 if failed else 0


def in_process(way: str) -> dict[str, Any]:
  """The report of one way, by a process that has its environment variables."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "way.json"
    command = [sys.executable, __file__, *sys.argv[1:], f"--way={way}", f"--json={path}"]
    process = subprocess.Popen(
      command,
      env=os.environ | WAYS[way],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:  # shown while it runs
      print(line, end="", flush=True)
      printed.append(line)
    status = process.wait()
    found = json.loads(path.read_text()) if path.exists() else {"failed": f"exit status {status}"}
    return found | {"printed": "".join(printed)}


def of_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
  """Checks and times one way in this process."""
  devices = jax.local_devices()
  about = {"kind": devices[0].device_kind, "devices": len(devices)}
  if way == "SparseCores" and (reason := sparse_core.obstacle_of(about["kind"])):
    print(f"not run: {reason}")
    return about | {"not run": reason}
  if check.main():
    return about | {"failed": "python -m embed check"}
  print(
    f"\na table of {args.rows:,} rows and {args.ids:,} ids in bags of {VALENCY} a device, ms of a "
    f"step\n{'columns':>8} {'step':20} {'in a row':>9} {'each':>9}"
  )
  times: dict[str, Any] = {}
  mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
  for dim in args.dim:
    for name, step in steps(way, dim, args).items():
      label = f"{dim}, {name}"
      try:
        with jax.set_mesh(mesh):
          times[label] = timed(step(), args.steps)
      except Exception as error:  # the others still run, and the report has the reason
        times[label] = {"failed": f"{type(error).__name__}: {error}".split("\n")[0]}
        print(f"{dim:8} {name:20} {times[label]['failed']}", flush=True)
        continue
      print("{:8} {:20} {:9.3f} {:9.3f}".format(dim, name, *times[label].values()), flush=True)
  failed = [label for label, of in times.items() if "failed" in of]
  return about | {"ms": times} | ({"failed": "; ".join(failed)} if failed else {})


Step = Callable[[int], Any]  # starts the step of a number; returns what to wait for


def steps(way: str, dim: int, args: argparse.Namespace) -> Mapping[str, Callable[[], Step]]:
  """What makes each step that is timed, by name."""
  made = {name: partial(step_of, name, dim, args) for name in (LOOKUP, *OPTIMIZERS)}
  if way == "packed" and jax.default_backend() in host.PLATFORMS:
    made["rowwise_adagrad, host"] = partial(step_of, "rowwise_adagrad", dim, args, "host")
  return made


def step_of(name: str, dim: int, args: argparse.Namespace, memory: str = "device") -> Step:
  """A step of a new table on all devices of this machine."""
  mesh = jax.sharding.get_mesh()
  rows, bags = args.rows * mesh.size, args.ids * mesh.size // VALENCY
  table = embed.TableConfig(
    rows, dim, combiner="sum", optimizer=OPTIMIZERS.get(name, embed.frozen)(), name="table"
  )
  draw = np.random.default_rng(0)
  over = jax.NamedSharding(mesh, jax.P("data"))
  pool = [
    embed.Padded(jax.device_put(ids.astype(np.int32), over))
    for ids in draw.zipf(ZIPF, (BATCHES, bags, VALENCY)) % rows
  ]
  grads = jax.device_put(draw.normal(size=(bags, dim)).astype(np.float32), over)
  features = embed.FeatureConfig(table)
  plan = embed.plan(features, mesh, pool[0])
  plan["table"].memory = memory
  if mesh.size > 1:
    plan["table"].strategy = "mod"
  layer = embed.SparseEmbed(features, plan=plan, rngs=nnx.Rngs(0))

  @nnx.jit(donate_argnames=("layer",), graph=False)
  def train_step(layer, bags, grads, step):
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return jnp.sum(activations)

  look_up = nnx.jit(lambda layer, bags: layer(bags), graph=False)

  def step(i):
    if name == LOOKUP:
      return look_up(layer, pool[i % BATCHES])
    loss = train_step(layer, pool[i % BATCHES], grads, i)
    return loss, [v.get_value() for stack in layer.arrays.values() for v in stack.values()]

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
