"""Checks and times the TPUs or GPUs of this host, trains the recipes there, and writes a report.

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

On a GPU, whose kernels sum gradients in an order of their own, a step of sgd is also compared with
NumPy in float64: for rows of several widths and dtypes, and ids by a power law, one id alone,
distinct ids, and ids out of range. The error is given as a part of what rounding allows. The same
step from the same rows has to give the same bits.

Last, each recipe takes some steps on its generated data; `--recipes` without a name leaves them
out. The report has all that is printed. Ways that these devices do not support are skipped, with
the reason.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "")  # the devices; `contenders` would take the CPU

import common
import jax
import jax.numpy as jnp
import numpy as np
from contenders import (
  BATCHES,
  LOOKUP,
  OPTIMIZERS,
  VALENCY,
  ZIPF,
  Contender,
  arrays_of,
  programs,
  timed,
)
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


RECIPES = ("dlrm", "two_tower", "sequence")
WIDTHS, DTYPES = (1, 3, 16, 64, 100, 128, 1024), ("float32", "bfloat16")  # of rows that are summed


def main() -> int:
  parser = common.parser(__doc__)
  parser.set_defaults(json=Path("device.json"))
  parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
  parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
  parser.add_argument("--rows", type=int, default=1 << 20, help="of the table, per device")
  parser.add_argument("--dim", nargs="+", type=int, default=[16, 64, 128])
  parser.add_argument("--ids", type=int, default=1 << 16, help="of a batch, per device")
  parser.add_argument("--steps", type=int, default=50, help="in a row, five times")
  parser.add_argument("--minutes", type=float, default=30, help="until a way or recipe is given up")
  parser.add_argument("--cpu", action="store_true", help="run on the CPU, to try this program")
  parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # the process of a way
  args = parser.parse_args()
  if args.ids % VALENCY or args.ids <= 0:
    parser.error(f"--ids must be a multiple of {VALENCY}, the ids of a bag")
  if args.child:
    args.json.write_text(json.dumps(of_way(args.child, args)))
    return 0
  report = common.about() | {"commit": commit(), "ways": dict[str, Any](), "recipes": {}}
  args.json.write_text(json.dumps(report))  # before any work, so that a wrong path is found
  # This process leaves the devices alone: a TPU serves one process at a time.
  parts = [("ways", name, way_in_process) for name in args.ways]
  for part, name, run in [*parts, *(("recipes", name, recipe_in_process) for name in args.recipes)]:
    print(f"\n=== {name}", flush=True)
    outcome = report[part][name] = run(name, args)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    if outcome.get("interrupted"):
      break
  failed = any("failed" in of for part in ("ways", "recipes") for of in report[part].values())
  print(f"\nThe report is {args.json}." + ("" if failed else " Nothing that could run has failed."))
  print("".join(f"\n{where:12} {what:28} {found}" for where, what, found in summary(report)))
  return 1 if failed else 0


def summary(report: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
  """Yields the lines of the last table: a way or recipe, what was done, and what came out."""
  yield "", "", "in a row   each, ms"
  for way, of in report["ways"].items():
    for label, ms in of.get("ms", {}).items():
      yield way, label, "{:8.3f}  {:8.3f}".format(*ms.values()) if len(ms) == 2 else "FAILED"
    for label, found in of.get("sums", {}).items():
      yield way, f"sums, {label}", found
    whole = f"not run: {of['not run']}" if "not run" in of else "ok"
    yield way, "as a whole", f"FAILED: {of['failed']}" if "failed" in of else whole
  for recipe, of in report["recipes"].items():
    rate = of.get("examples_per_second")
    found = f"FAILED: {of['failed']}" if "failed" in of else "ok"
    yield recipe, "recipe", found + (f", {rate:,} examples/s" if rate else "")


def commit() -> str:
  """The commit of the checkout, with a "+" if files were changed; "" if git does not tell."""
  return common.said("git", "-C", str(common.ROOT), "describe", "--always", "--dirty=+")


def way_in_process(way: str, args: argparse.Namespace) -> dict[str, Any]:
  """The report of one way, by a process that has its environment variables."""
  print(" ".join(f"{k}={v}" for k, v in WAYS[way].items()), flush=True)
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "way.json"
    command = [__file__, *sys.argv[1:], f"--child={way}", f"--json={path}"]
    outcome, found = in_process(command, WAYS[way], args), dict[str, Any]()
    # The process may have ended before it wrote its part, or meanwhile.
    with contextlib.suppress(OSError, json.JSONDecodeError):
      found = json.loads(path.read_text())
  failed = [of["failed"] for of in (found, outcome) if "failed" in of]
  return found | outcome | ({"failed": "; ".join(failed)} if failed else {})


def recipe_in_process(recipe: str, args: argparse.Namespace) -> dict[str, Any]:
  """The report of some steps of a recipe on its generated data, with its best rate."""
  with tempfile.TemporaryDirectory() as folder:
    config = f"--config=configs/{recipe}/synthetic.py"
    sizes = [f"{config}:smoke"] if args.cpu else [config, "--config.steps=200"]
    command = ["-m", f"recipes.{recipe}", *sizes, "--config.test=False", f"--workdir={folder}"]
    outcome = in_process(command, {}, args)
  rates = re.findall(r"examples ([\d,]+)/s", outcome["printed"])
  best = max((int(rate.replace(",", "")) for rate in rates), default=None)
  return outcome | {"examples_per_second": best}


def in_process(
  command: list[str], variables: dict[str, str], args: argparse.Namespace
) -> dict[str, Any]:
  """Returns the output of a Python program, shown as well, and its failure, if it failed."""
  outcome: dict[str, Any] = {}
  printed, start, seconds = [], time.monotonic(), 60 * args.minutes
  variables = variables | {"PYTHONUNBUFFERED": "1"} | ({"JAX_PLATFORMS": "cpu"} if args.cpu else {})
  with subprocess.Popen(
    [sys.executable, *command],
    cwd=common.ROOT,
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
  if status:
    late = "not done in time, " if time.monotonic() - start >= seconds else ""
    outcome["failed"] = f"{late}exit status {status}"
  return outcome | {"printed": "".join(printed)}


def of_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
  """Checks and times one way in this process."""
  devices = jax.local_devices()
  kind, platform = devices[0].device_kind, devices[0].platform
  about = {
    "kind": kind,
    "devices": len(devices),
    "runtime": getattr(devices[0].client, "platform_version", ""),
  }
  if platform == "cpu" and not args.cpu:
    print("JAX has found no TPU and no GPU")
    return about | {"failed": "JAX has found no TPU and no GPU"}
  reason = sparse_core.unsupported_reason(kind) if way == "SparseCores" else None
  if way == "packed" and platform == "gpu":
    reason = "rows are packed into lines of 128 columns for TPUs, whose tiles have so many"
  if reason:
    print(f"not run: {reason}")
    return about | {"not run": reason}
  failed = ["python -m embed check"] if check.main() else []
  sums: dict[str, str] = {}
  for dtype, dim in itertools.product(
    DTYPES, WIDTHS if way == "plain" and platform != "tpu" else ()
  ):
    wrong, sums[f"{dtype}, {dim}"] = sums_of_a_step(dim, dtype, min(args.ids, 1 << 13))
    print(f"sums, {dtype}, {dim}: {sums[f'{dtype}, {dim}']}", flush=True)
    failed += [f"sums, {dtype}, {dim}, {what}" for what in wrong]
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
          times[label] = timed({name: make_step(name, dim, args)}, args.steps, turns=5)[name]
      except Exception as error:  # the others still run
        traceback.print_exc()
        times[label] = {"failed": f"{type(error).__name__}: {error}"}
        failed.append(label)
        continue
      print("{:8} {:16} {:9.3f} {:9.3f}".format(dim, name, *times[label].values()), flush=True)
  found = about | {"ms": times, "sums": sums}
  return found | ({"failed": "; ".join(failed)} if failed else {})


def sums_of_a_step(dim: int, dtype: str, count: int) -> tuple[list[str], str]:
  """Compares steps of sgd, of `count` weighted ids each, with NumPy.

  Returns:
    What is wrong, in words; and that or the largest error, as a part of what rounding allows.
  """
  draw, shape, rows = np.random.default_rng(0), (count // VALENCY, VALENCY), 2 * count
  batches = {
    "a power law": draw.zipf(ZIPF, shape) % rows,
    "one id": np.full(shape, rows // 2),
    "distinct ids": draw.permutation(rows)[:count].reshape(shape),
    "ids out of range": draw.integers(-rows, 2 * rows, shape),
  }
  start = np.asarray(jnp.asarray(draw.normal(size=(rows, dim)), dtype))
  weights = draw.uniform(size=shape).astype(np.float32)
  grads = draw.normal(size=(len(weights), dim)).astype(np.float32)
  table = embed.TableConfig(
    rows, dim, None, embed.sgd(1.0), "sum", "table", dtype, stochastic_rounding=False
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))

  def train_step(layer, ids, weights, grads):
    layer.apply_gradients(grads, layer.lookup(embed.Padded(ids), embed.Padded(weights))[1])

  compiled = embed.jit_step(train_step, layer)

  def after(ids: np.ndarray) -> np.ndarray:
    layer.load_tables({"table": start})
    compiled(ids.astype(np.int32), weights, grads)
    return np.asarray(layer.tables["table"])

  wrong, worst = [], 0.0
  for name, ids in batches.items():
    try:
      first, second = after(ids), after(ids)
    except Exception as problem:  # the others still run
      traceback.print_exc()
      wrong.append(f"{name}: {type(problem).__name__}: {problem}")
      continue
    error = error_of(first, start, ids, weights, grads)
    worst = max(worst, error)
    if not error <= 1:
      wrong.append(f"{name}: the error is {error:.3g} times what rounding allows")
    if first.tobytes() != second.tobytes():
      wrong.append(f"{name}: the same step has other bits")
  return wrong, "; ".join(wrong) or f"{worst:.2f} of what rounding allows"


def error_of(
  after: np.ndarray, before: np.ndarray, ids: np.ndarray, weights: np.ndarray, grads: np.ndarray
) -> float:
  """The largest error of rows after a step of sgd at rate 1, as a part of what rounding allows.

  It is infinite if a row moved that was not looked up.
  """
  is_row, start = (ids >= 0) & (ids < len(before)), before.astype(np.float64)
  terms = (weights[..., None].astype(np.float64) * grads[:, None])[is_row]
  sums, sizes = np.zeros(before.shape), np.zeros(before.shape)
  np.add.at(sums, ids[is_row], terms)
  np.add.at(sizes, ids[is_row], np.abs(terms))
  counts = np.bincount(ids[is_row], minlength=len(before))
  unused = counts == 0
  if not np.array_equal(after[unused], before[unused]):
    return np.inf
  # A sum of n float32 terms, by Higham and Mary, 2019; the new row is rounded to its dtype.
  allowed = float(jnp.finfo("float32").eps) * np.sqrt(counts)[:, None] * (sizes + np.abs(start))
  allowed += float(jnp.finfo(before.dtype).eps) * np.abs(start - sums)
  return float(np.max(np.abs(after.astype(np.float64) - (start - sums)) / allowed))


def make_step(name: str, dim: int, args: argparse.Namespace) -> Contender:
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

  return Contender(step)


if __name__ == "__main__":
  sys.exit(main())
