"""One training step of one table on CPU: ours against torch, FBGEMM and dense-gradient JAX.

A step is lookup, gradient and update of a batch of bags, whose activations have a given gradient;
"lookup" is the forward pass alone. (For JAX the loss is written so that it depends on the
activations, as it does in training. A program in which it does not is free to update first, and
then has to look up in a copy of the old table.)

Every step gets other ids, from a pool of batches: with the same ids again and again, caches would
hold their rows. All contenders start from the same table and accumulators and get the same ids and
gradients; their tables are compared after one step, and only then are they timed: in turns, a few
steps each, in one process, so that what else the machine does hits all of them, and all of them
make the same number of steps. A step has ended when all its results are there. Peers run with one
thread and with one for each core, and the better of the two counts. What other processes took of
the machine meanwhile is in the file, and a run that they disturbed says so.

  python benchmarks/step.py --json step.json
  python benchmarks/step.py --dim 16 64 128 --ids 4096 65536 524288 --json grid.json

Ours is there twice: with the compiled kernels of the extra `cpu`, and by XLA's own operations.
torch and FBGEMM are optional: `pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0`. What is missing is
reported as missing.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout as it is

import embed
from embed.engine import native, update

RATE, ACCUMULATOR, EPSILON = 0.01, 0.1, 1e-8
OPTIMIZERS: dict[str, Callable[[], embed.RowOptimizer]] = {
  "sgd": lambda: embed.sgd(RATE),
  "rowwise_adagrad": lambda: embed.rowwise_adagrad(RATE, ACCUMULATOR),
  "adagrad": lambda: embed.adagrad(RATE, ACCUMULATOR),
  # With bias correction, as torch has it.
  "adam": lambda: embed.adam(embed.bias_corrected(RATE), epsilon=EPSILON, sum_inside_sqrt=False),
}


LOOKUP = "lookup"  # instead of an optimizer: the forward pass alone


class Problem(NamedTuple):
  """A table and batches: `rows` `[V, D]`, `ids` `[P, B, L]`, and `grads` `[B, D]` of the bags."""

  rows: np.ndarray
  ids: np.ndarray
  grads: np.ndarray


class Contender(NamedTuple):
  """Something to time.

  Attributes:
    step: makes one step, or one lookup, of the batch with a number.
    rows: returns the table as it stands.
    set_up: called before its turn.
  """

  step: Callable[[int], None]
  rows: Callable[[], Any]
  set_up: Callable[[], None] = lambda: None


class Missing(Exception):
  """Why a contender cannot take part."""


def make_problem(
  vocabulary: int, dim: int, ids: int, valency: int, zipf: float, batches: int = 8
) -> Problem:
  rng = np.random.default_rng(0)
  shape = (batches, ids // valency, valency)
  return Problem(
    rng.normal(size=(vocabulary, dim)).astype(np.float32),
    (rng.zipf(zipf, size=shape) % vocabulary).astype(np.int32),
    rng.normal(size=(shape[1], dim)).astype(np.float32),
  )


def loss_of(activations: jax.Array, grads: jax.Array) -> jax.Array:
  """A loss whose gradient is `grads`, by way of the activations."""
  return jnp.sum(activations * grads) + 0.0 * jnp.sum(activations * activations)


# --- ours ----------------------------------------------------------------------------------------


def make_layer(
  problem: Problem, optimizer: embed.RowOptimizer | None, name: str = "table"
) -> embed.SparseEmbed:
  """A layer of one feature on one table that holds the problem's rows."""
  vocabulary, dim = problem.rows.shape
  table = embed.TableConfig(
    vocabulary,
    dim,
    combiner="sum",
    name=name,
    optimizer=optimizer,
    initializer=jax.nn.initializers.zeros,
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  layer.load_tables({name: problem.rows})
  return layer


def on_device(problem: Problem) -> tuple[list[embed.Padded], jax.Array]:
  """The batches and the gradient of their activations."""
  return [embed.Padded(jnp.asarray(ids)) for ids in problem.ids], jnp.asarray(problem.grads)


def arrays_of(layer: embed.SparseEmbed) -> list[jax.Array]:
  """A table and its slots as they are stored."""
  return [v.get_value() for stack in layer.arrays.values() for v in stack.values()]


def switch(kernels: bool) -> Callable[[], None]:
  """A `set_up` that takes the compiled kernels or not, in what is traced after it."""
  return lambda: os.environ.update({native.SWITCH: f"{kernels:d}"})


def ours(problem: Problem, name: str, kernels: bool = True) -> Contender:
  """`lookup` and `apply_gradients`, the module through `nnx.jit`."""
  switch(kernels)()
  if kernels and not native.is_on():
    raise Missing("the extra `cpu` is not installed")
  key = f"table_{kernels:d}"  # layers of one table's name share the programs they were traced to
  layer = make_layer(problem, OPTIMIZERS.get(name, embed.frozen)(), key)
  (batches, grads), count = on_device(problem), iter(range(1 << 31))

  @nnx.jit(donate_argnames=("layer",), graph=False)
  def train_step(layer, bags, grads, step):
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return activations

  look_up = nnx.jit(lambda layer, bags: layer(bags), graph=False)

  def step(i):
    bags = batches[i % len(batches)]
    if name == LOOKUP:
      jax.block_until_ready(look_up(layer, bags))
    else:
      jax.block_until_ready((train_step(layer, bags, grads, next(count)), arrays_of(layer)))

  return Contender(step, lambda: layer.tables[key], switch(kernels))


def ours_by_xla(problem: Problem, name: str) -> Contender:
  """The same without compiled kernels."""
  return ours(problem, name, kernels=False)


def ours_functional(problem: Problem, name: str) -> Contender:
  """The same through `jax.jit`, the state carried by hand: without the cost of `nnx.jit`'s call."""
  if name == LOOKUP:
    raise Missing("not measured")
  layer = make_layer(problem, OPTIMIZERS[name]())
  graph, state = nnx.split(layer)
  del layer
  (batches, grads), count = on_device(problem), iter(range(1 << 31))

  def train_step(state, bags, grads, step):
    layer = nnx.merge(graph, state)
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return activations, nnx.state(layer)

  jitted = jax.jit(train_step, donate_argnums=0)
  held = [state]

  def step(i):
    activations, held[0] = jitted(held[0], batches[i % len(batches)], grads, next(count))
    jax.block_until_ready((activations, held[0]))

  return Contender(step, lambda: nnx.merge(graph, held[0]).tables["table"], switch(True))


def ours_whole(problem: Problem, name: str) -> Contender:
  """`embed.value_and_grad` of a loss and `embed.Optimizer`, as a model is trained."""
  if name == LOOKUP:
    raise Missing("not measured")
  model = make_layer(problem, OPTIMIZERS[name]())
  optimizer = embed.Optimizer(model, optax.sgd(RATE))
  batches, grads = on_device(problem)

  def loss_fn(model, bags, grads):
    return loss_of(model(bags), grads)

  @nnx.jit(donate_argnames=("model", "optimizer"), graph=False)
  def train_step(model, optimizer, bags, grads):
    loss, gradients = embed.value_and_grad(loss_fn)(model, bags, grads)
    optimizer.update(model, gradients)
    return loss

  def step(i):
    loss = train_step(model, optimizer, batches[i % len(batches)], grads)
    jax.block_until_ready((loss, arrays_of(model)))

  return Contender(step, lambda: model.tables["table"], switch(True))


# --- peers ---------------------------------------------------------------------------------------


def dense_jax(problem: Problem, name: str) -> Contender:
  """`jax.grad` of the table, hence a gradient `[V, D]`, and the same equation for all rows."""
  if name == LOOKUP:
    raise Missing("not measured")
  optimizer = OPTIMIZERS[name]()
  table = jnp.array(problem.rows)
  slots = {
    key: jnp.full(table.shape[: 1 if slot.per_row else 2], slot.initial, jnp.float32)
    for key, slot in optimizer.slots(table.shape[1]).items()
  }
  (batches, grads), count = on_device(problem), iter(range(1 << 31))

  def train_step(state, ids, grads, step):
    table, slots = state
    loss = lambda table: loss_of(table[ids].sum(axis=1), grads)
    value, g = jax.value_and_grad(loss)(table)
    rate = optimizer.learning_rate_at(step)
    return value, update.step_rows(optimizer, g, table, slots, rate)

  jitted = jax.jit(train_step, donate_argnums=0)
  held = [(table, slots)]

  def step(i):
    value, held[0] = jitted(held[0], batches[i % len(batches)].values, grads, next(count))
    jax.block_until_ready((value, held[0]))

  return Contender(step, lambda: held[0][0])


def torch_sparse(problem: Problem, name: str) -> Contender:
  """`EmbeddingBag(sparse=True)` with the optimizers of torch that take sparse gradients."""
  try:
    import torch
  except ImportError:
    raise Missing("torch is not installed") from None
  make = {
    "sgd": lambda p: torch.optim.SGD(p, RATE),
    "adagrad": lambda p: torch.optim.Adagrad(
      p, RATE, initial_accumulator_value=ACCUMULATOR, eps=0.0
    ),
    "adam": lambda p: torch.optim.SparseAdam(p, RATE, eps=EPSILON),
  }
  if name not in (LOOKUP, *make):
    raise Missing("torch has no such optimizer")
  vocabulary, dim = problem.rows.shape
  bags = torch.nn.EmbeddingBag(vocabulary, dim, mode="sum", sparse=True)
  with torch.no_grad():
    bags.weight.copy_(torch.from_numpy(problem.rows))
  optimizer = None if name == LOOKUP else make[name](list(bags.parameters()))
  batches, grads = torch.from_numpy(problem.ids).long(), torch.from_numpy(problem.grads)

  def step(i):
    ids = batches[i % len(batches)]
    if optimizer is None:
      with torch.no_grad():
        bags(ids)
      return
    optimizer.zero_grad()
    bags(ids).backward(grads)
    optimizer.step()

  return Contender(step, lambda: bags.weight.detach().numpy())


def fbgemm(problem: Problem, name: str) -> Contender:
  """FBGEMM's table batched embedding on CPU: the update is part of the backward pass."""
  try:
    import torch
    from fbgemm_gpu import split_embedding_configs, split_table_batched_embeddings_ops_training
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
  except ImportError:
    raise Missing("fbgemm-gpu-cpu is not installed") from None
  kinds = {
    "sgd": split_embedding_configs.EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": split_embedding_configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": split_embedding_configs.EmbOptimType.EXACT_ADAGRAD,
  }
  if name not in (LOOKUP, *kinds):
    raise Missing("FBGEMM has no such optimizer on CPU")
  host = (common.EmbeddingLocation.HOST, split_table_batched_embeddings_ops_training.ComputeDevice)
  bags = split_table_batched_embeddings_ops_training.SplitTableBatchedEmbeddingBagsCodegen(
    [(*problem.rows.shape, host[0], host[1].CPU)],
    optimizer=kinds["sgd" if name == LOOKUP else name],
    learning_rate=RATE,
    eps=0.0,
  )
  weights = bags.split_embedding_weights()[0]
  weights.copy_(torch.from_numpy(problem.rows))
  for states in bags.split_optimizer_states():
    for state in states:
      state.fill_(ACCUMULATOR)
  _, count, valency = problem.ids.shape
  batches = torch.from_numpy(problem.ids).long().reshape(len(problem.ids), -1)
  offsets = torch.arange(0, (count + 1) * valency, valency)
  grads = torch.from_numpy(problem.grads)

  def step(i):
    ids = batches[i % len(batches)]
    if name == LOOKUP:
      with torch.no_grad():
        bags(ids, offsets)
    else:
      bags(ids, offsets).backward(grads)

  return Contender(step, lambda: weights.numpy())


CONTENDERS: dict[str, Callable[[Problem, str], Contender]] = {
  "ours": ours,
  "ours, XLA": ours_by_xla,
  "ours, jax.jit": ours_functional,
  "ours, whole model": ours_whole,
  "torch": torch_sparse,
  "fbgemm": fbgemm,
  "dense jax": dense_jax,
}
DEFAULT = tuple(label for label in CONTENDERS if label != "dense jax")
PEERS = ("torch", "fbgemm")  # whose threads are set


# --- timing --------------------------------------------------------------------------------------


def set_threads(threads: int) -> None:
  """Of torch and FBGEMM, whose threads wait for each other."""
  import torch

  torch.set_num_threads(threads)


def gather(
  problem: Problem, name: str, labels: Sequence[str]
) -> tuple[dict[str, Contender], dict[str, str]]:
  """The contenders after one step each, all tables equal, and why the others are missing."""
  contenders: dict[str, Contender] = {}
  missing: dict[str, str] = {}
  for label in labels:
    try:
      contenders[label] = CONTENDERS[label](problem, name)
    except Missing as reason:
      missing[label] = str(reason)
  touched = np.unique(problem.ids[0])
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
      np.testing.assert_allclose(
        rows[touched], expected, rtol=1e-4, atol=1e-4, err_msg=f"{name}: {label} against ours"
      )
  for label in [label for label in contenders if label in PEERS]:
    contender = contenders.pop(label)
    for threads in sorted({1, os.cpu_count() or 1}):
      set_up = lambda threads=threads: set_threads(threads)
      contenders[f"{label}, {threads} threads"] = contender._replace(set_up=set_up)
  return contenders, missing


def time_in_turns(
  contenders: dict[str, Contender], seconds: float, burst: int
) -> dict[str, list[float]]:
  """Milliseconds of every step, as many for each contender; in its turn it makes `burst` steps."""
  times: dict[str, list[float]] = {label: [] for label in contenders}
  turns, batch = list(contenders), 0
  gc.collect()
  gc.disable()
  end = time.perf_counter() + seconds
  while not batch or time.perf_counter() < end:
    for label in turns:
      contenders[label].set_up()
      for i in range(batch, batch + burst):
        start = time.perf_counter()
        contenders[label].step(i)
        times[label].append((time.perf_counter() - start) * 1e3)
    turns, batch = turns[1:] + turns[:1], batch + burst
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

  def cores(self) -> float:
    (wall, busy, own), (wall_0, busy_0, own_0) = self._now(), self.start
    return max(0.0, ((busy - busy_0) - (own - own_0)) / (wall - wall_0))


BUSY = 0.1  # cores that others took, from which on a run is marked


def report(
  name: str, times: dict[str, list[float]], missing: dict[str, str], others: float
) -> dict[str, Any]:
  """Prints one optimizer's lines; `ratio_to_ours` is a contender's best to that of `ours`."""
  for peer in PEERS:  # the better number of threads
    of_peer = {label: min(of) for label, of in times.items() if label.startswith(f"{peer}, ")}
    if of_peer:
      times[peer] = times[min(of_peer, key=of_peer.__getitem__)]
  first = next(iter(times))
  best = {label: min(values) for label, values in times.items()}
  result: dict[str, Any] = {"cores_taken_by_others": others, "busy": not others < BUSY}
  mark = f"   BUSY: others took {others:.1f} cores" if result["busy"] else ""
  print(f"\n{name:20s} {'best ms':>9s} {'median ms':>10s} {'steps':>6s}   best / {first}{mark}")
  for label, values in times.items():
    median, ratio = float(np.median(values)), best[label] / best[first]
    print(f"  {label:18s} {best[label]:9.3f} {median:10.3f} {len(values):6d}   {ratio:.2f}")
    result[label] = {
      "best_ms": best[label],
      "median_ms": median,
      "steps": len(values),
      "ratio_to_ours": ratio,
    }
  for label, why in missing.items():
    print(f"  {label:18s} {'-':>9s} {'-':>10s} {'-':>6s}   {why}")
    result[label] = {"missing": why}
  return result


def versions() -> dict[str, str]:
  found = {"python": platform.python_version()}
  for package in ("jax", "flax", "numpy", "numba", "torch", "fbgemm-gpu-cpu"):
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def measure(args: argparse.Namespace, vocabulary: int, dim: int, ids: int) -> dict[str, Any]:
  """All optimizers at one point of the grid."""
  problem = make_problem(vocabulary, dim, ids, args.valency, args.zipf, args.batches)
  distinct = len(np.unique(problem.ids[0]))
  print(
    f"\ntable {vocabulary:,} x {dim}, {ids:,} ids in {problem.ids.shape[1]:,} bags, {distinct:,} "
    f"distinct; {os.cpu_count()} cores"
  )
  results = {}
  for name in args.optimizers:
    contenders, missing = gather(problem, name, args.contenders)
    load = Load()
    times = time_in_turns(contenders, args.seconds, args.burst)
    results[name] = report(name, times, missing, load.cores())
    del contenders
  point = {"vocabulary": vocabulary, "dim": dim, "ids": ids, "distinct": distinct}
  return point | {"results": results}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  many = {"type": int, "nargs": "+"}
  parser.add_argument("--vocabulary", **many, default=[1_000_000], help="rows of the table")
  parser.add_argument("--dim", **many, default=[64])
  parser.add_argument("--ids", **many, default=[65_536], help="ids in a batch")
  parser.add_argument("--valency", type=int, default=8, help="ids in a bag")
  parser.add_argument("--batches", type=int, default=8, help="other ids in each of so many steps")
  parser.add_argument("--zipf", type=float, default=1.2, help="exponent of the ids' power law")
  choices = (LOOKUP, *OPTIMIZERS)
  parser.add_argument("--optimizers", nargs="+", choices=choices, default=list(choices))
  parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(DEFAULT))
  parser.add_argument("--seconds", type=float, default=20, help="time for each optimizer")
  parser.add_argument("--burst", type=int, default=4, help="steps in a row")
  parser.add_argument("--json", type=Path, help="write the figures there")
  args = parser.parse_args()
  warnings.filterwarnings("ignore", module="torch|fbgemm_gpu")

  print("versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()))
  points = [
    measure(args, *point) for point in itertools.product(args.vocabulary, args.dim, args.ids)
  ]
  if args.json:
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    summary = {"settings": settings, "versions": versions(), "cores": os.cpu_count()}
    summary |= {"points": points} if len(points) > 1 else points[0]
    args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
  main()
