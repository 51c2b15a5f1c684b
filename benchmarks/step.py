"""One training step of one table on CPU: ours against torch, FBGEMM and dense-gradient JAX.

A step is lookup, gradient and update of a batch of bags, whose activations have a given gradient.
(For JAX it is written so that it depends on the activations, as it does in training. A program in
which it does not is free to update first, and then has to look up in a copy of the old table.)
All contenders start from the same table and accumulators and get the same ids and gradients; their
tables are compared after one step, and only then are they timed: in turns, a few steps each, in one
process, so that what else the machine does hits all of them.

  python benchmarks/step.py --json step.json

torch and FBGEMM are optional: `pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0`. What is missing
is reported as missing.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
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
from embed.engine import update

RATE, ACCUMULATOR, EPSILON = 0.01, 0.1, 1e-8
OPTIMIZERS: dict[str, Callable[[], embed.RowOptimizer]] = {
  "sgd": lambda: embed.sgd(RATE),
  "rowwise_adagrad": lambda: embed.rowwise_adagrad(RATE, ACCUMULATOR),
  "adagrad": lambda: embed.adagrad(RATE, ACCUMULATOR),
  # With bias correction, as torch has it.
  "adam": lambda: embed.adam(embed.bias_corrected(RATE), epsilon=EPSILON, sum_inside_sqrt=False),
}


class Problem(NamedTuple):
  """A table and a batch: `rows` `[V, D]`, `ids` `[B, L]`, `grads` `[B, D]` of the activations."""

  rows: np.ndarray
  ids: np.ndarray
  grads: np.ndarray


class Contender(NamedTuple):
  """Something to time: `step` makes one step, `rows` is the table as it stands.

  For JAX, a step has ended when one of its results is there: it is one program on one device.
  """

  step: Callable[[], None]
  rows: Callable[[], Any]


class Missing(Exception):
  """Why a contender cannot take part."""


def make_problem(vocabulary: int, dim: int, ids: int, valency: int, zipf: float) -> Problem:
  rng = np.random.default_rng(0)
  shape = (ids // valency, valency)
  return Problem(
    rng.normal(size=(vocabulary, dim)).astype(np.float32),
    (rng.zipf(zipf, size=shape) % vocabulary).astype(np.int32),
    rng.normal(size=(shape[0], dim)).astype(np.float32),
  )


def loss_of(activations: jax.Array, grads: jax.Array) -> jax.Array:
  """A loss whose gradient is `grads`, by way of the activations."""
  return jnp.sum(activations * grads) + 0.0 * jnp.sum(activations * activations)


# --- ours ----------------------------------------------------------------------------------------


def make_layer(problem: Problem, optimizer: embed.RowOptimizer) -> embed.SparseEmbed:
  """A layer of one feature on one table that holds the problem's rows."""
  vocabulary, dim = problem.rows.shape
  table = embed.TableConfig(
    vocabulary,
    dim,
    combiner="sum",
    name="table",
    optimizer=optimizer,
    initializer=jax.nn.initializers.zeros,
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  layer.load_tables({"table": problem.rows})
  return layer


def ours(problem: Problem, name: str) -> Contender:
  """`lookup` and `apply_gradients`, the module through `nnx.jit`."""
  layer = make_layer(problem, OPTIMIZERS[name]())
  bags, grads = embed.Padded(jnp.asarray(problem.ids)), jnp.asarray(problem.grads)
  count = iter(range(1 << 31))

  @nnx.jit(donate_argnames=("layer",), graph=False)  # no references are shared: a cheaper call
  def train_step(layer, bags, grads, step):
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return activations

  def step():
    jax.block_until_ready(train_step(layer, bags, grads, next(count)))

  return Contender(step, lambda: layer.tables["table"])


def ours_functional(problem: Problem, name: str) -> Contender:
  """The same through `jax.jit`, the state carried by hand: without the cost of `nnx.jit`'s call."""
  layer = make_layer(problem, OPTIMIZERS[name]())
  graph, state = nnx.split(layer)
  del layer
  bags, grads = embed.Padded(jnp.asarray(problem.ids)), jnp.asarray(problem.grads)
  count = iter(range(1 << 31))

  def train_step(state, bags, grads, step):
    layer = nnx.merge(graph, state)
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return activations, nnx.state(layer)

  jitted = jax.jit(train_step, donate_argnums=0)
  held = [state]

  def step():
    activations, held[0] = jitted(held[0], bags, grads, next(count))
    jax.block_until_ready(activations)

  return Contender(step, lambda: nnx.merge(graph, held[0]).tables["table"])


def ours_whole(problem: Problem, name: str) -> Contender:
  """`embed.value_and_grad` of a loss and `embed.Optimizer`, as a model is trained."""
  model = make_layer(problem, OPTIMIZERS[name]())
  optimizer = embed.Optimizer(model, optax.sgd(RATE))
  bags, grads = embed.Padded(jnp.asarray(problem.ids)), jnp.asarray(problem.grads)

  def loss_fn(model, bags, grads):
    return loss_of(model(bags), grads)

  @nnx.jit(donate_argnames=("model", "optimizer"), graph=False)
  def train_step(model, optimizer, bags, grads):
    loss, gradients = embed.value_and_grad(loss_fn)(model, bags, grads)
    optimizer.update(model, gradients)
    return loss

  def step():
    jax.block_until_ready(train_step(model, optimizer, bags, grads))

  return Contender(step, lambda: model.tables["table"])


# --- peers ---------------------------------------------------------------------------------------


def dense_jax(problem: Problem, name: str) -> Contender:
  """`jax.grad` of the table, hence a gradient `[V, D]`, and the same equation for all rows."""
  optimizer = OPTIMIZERS[name]()
  table = jnp.array(problem.rows)
  slots = {
    key: jnp.full(table.shape[: 1 if slot.per_row else 2], slot.initial, jnp.float32)
    for key, slot in optimizer.slots(table.shape[1]).items()
  }
  ids, grads = jnp.asarray(problem.ids), jnp.asarray(problem.grads)
  count = iter(range(1 << 31))

  def train_step(state, ids, grads, step):
    table, slots = state
    loss = lambda table: loss_of(table[ids].sum(axis=1), grads)
    value, g = jax.value_and_grad(loss)(table)
    rate = optimizer.learning_rate_at(step)
    return value, update.step_rows(optimizer, g, table, slots, rate)

  jitted = jax.jit(train_step, donate_argnums=0)
  held = [(table, slots)]

  def step():
    value, held[0] = jitted(held[0], ids, grads, next(count))
    jax.block_until_ready(value)

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
  if name not in make:
    raise Missing("torch has no such optimizer")
  vocabulary, dim = problem.rows.shape
  bags = torch.nn.EmbeddingBag(vocabulary, dim, mode="sum", sparse=True)
  with torch.no_grad():
    bags.weight.copy_(torch.from_numpy(problem.rows))
  optimizer = make[name](list(bags.parameters()))
  ids, grads = torch.from_numpy(problem.ids).long(), torch.from_numpy(problem.grads)

  def step():
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
  if name not in kinds:
    raise Missing("FBGEMM has no such optimizer on CPU")
  host = (common.EmbeddingLocation.HOST, split_table_batched_embeddings_ops_training.ComputeDevice)
  bags = split_table_batched_embeddings_ops_training.SplitTableBatchedEmbeddingBagsCodegen(
    [(*problem.rows.shape, host[0], host[1].CPU)],
    optimizer=kinds[name],
    learning_rate=RATE,
    eps=0.0,
  )
  weights = bags.split_embedding_weights()[0]
  weights.copy_(torch.from_numpy(problem.rows))
  for states in bags.split_optimizer_states():
    for state in states:
      state.fill_(ACCUMULATOR)
  count, valency = problem.ids.shape
  ids = torch.from_numpy(problem.ids).long().reshape(-1)
  offsets = torch.arange(0, (count + 1) * valency, valency)
  grads = torch.from_numpy(problem.grads)

  def step():
    bags(ids, offsets).backward(grads)

  return Contender(step, lambda: weights.numpy())


CONTENDERS: dict[str, Callable[[Problem, str], Contender]] = {
  "ours": ours,
  "ours, jax.jit": ours_functional,
  "ours, whole model": ours_whole,
  "torch": torch_sparse,
  "fbgemm": fbgemm,
  "dense jax": dense_jax,
}


# --- timing --------------------------------------------------------------------------------------


def gather(problem: Problem, name: str) -> tuple[dict[str, Contender], dict[str, str]]:
  """The contenders after one step each, all tables equal, and why the others are missing."""
  contenders: dict[str, Contender] = {}
  missing: dict[str, str] = {}
  for label, make in CONTENDERS.items():
    try:
      contenders[label] = make(problem, name)
    except Missing as reason:
      missing[label] = str(reason)
  touched = np.unique(problem.ids)
  others = np.setdiff1d(np.arange(0, len(problem.rows), 97), touched)
  expected = None
  for label, contender in contenders.items():
    contender.step()
    rows = np.asarray(contender.rows())
    if not np.array_equal(rows[others], problem.rows[others]):
      raise AssertionError(f"{name}: {label} moved a row that was not looked up.")
    if expected is None:
      expected = rows[touched]
    else:
      np.testing.assert_allclose(
        rows[touched], expected, rtol=1e-4, atol=1e-4, err_msg=f"{name}: {label} against ours"
      )
  return contenders, missing


def time_in_turns(
  contenders: dict[str, Contender], seconds: float, burst: int
) -> dict[str, list[float]]:
  """Milliseconds of every step; in its turn a contender makes `burst` steps.

  Nobody gets more than an equal share of the time, so that slow ones do not use it up.
  """
  times: dict[str, list[float]] = {label: [] for label in contenders}
  share = seconds * 1e3 / len(contenders)
  turns = list(contenders)
  gc.collect()
  gc.disable()
  while turns:
    for label in turns:
      for _ in range(burst):
        start = time.perf_counter()
        contenders[label].step()
        times[label].append((time.perf_counter() - start) * 1e3)
    turns = [label for label in turns if sum(times[label]) < share]
    turns = turns[1:] + turns[:1]
  gc.enable()
  return times


def report(name: str, times: dict[str, list[float]], missing: dict[str, str]) -> dict[str, Any]:
  """Prints one optimizer's lines; `ratio` is a contender's best to that of `ours`."""
  best = {label: min(values) for label, values in times.items()}
  result: dict[str, Any] = {}
  print(f"\n{name:20s} {'best ms':>9s} {'median ms':>10s} {'steps':>6s}   best / ours")
  for label in CONTENDERS:
    if label in missing:
      print(f"  {label:18s} {'-':>9s} {'-':>10s} {'-':>6s}   {missing[label]}")
      result[label] = {"missing": missing[label]}
      continue
    median, ratio = float(np.median(times[label])), best[label] / best["ours"]
    print(f"  {label:18s} {best[label]:9.2f} {median:10.2f} {len(times[label]):6d}   {ratio:.2f}")
    result[label] = {
      "best_ms": best[label],
      "median_ms": median,
      "steps": len(times[label]),
      "ratio_to_ours": ratio,
    }
  return result


def limit_threads(threads: int | None) -> None:
  """Their threads wait for each other: with other work on the machine, fewer can be faster."""
  if threads is not None and importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(threads)


def versions() -> dict[str, str]:
  found = {"python": platform.python_version()}
  for package in ("jax", "flax", "numpy", "torch", "fbgemm-gpu-cpu"):
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--vocabulary", type=int, default=1_000_000, help="rows of the table")
  parser.add_argument("--dim", type=int, default=64)
  parser.add_argument("--ids", type=int, default=65_536, help="ids in a batch")
  parser.add_argument("--valency", type=int, default=8, help="ids in a bag")
  parser.add_argument("--zipf", type=float, default=1.2, help="exponent of the ids' power law")
  parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
  parser.add_argument("--seconds", type=float, default=20, help="time for each optimizer")
  parser.add_argument("--burst", type=int, default=5, help="steps in a row")
  parser.add_argument("--threads", type=int, help="of torch and FBGEMM; their own choice if absent")
  parser.add_argument("--json", type=Path, help="write the figures there")
  args = parser.parse_args()
  warnings.filterwarnings("ignore", module="torch|fbgemm_gpu")
  limit_threads(args.threads)

  problem = make_problem(args.vocabulary, args.dim, args.ids, args.valency, args.zipf)
  distinct = len(np.unique(problem.ids))
  print(
    f"table {args.vocabulary:,} x {args.dim}, {problem.ids.size:,} ids in {len(problem.ids):,} "
    f"bags, {distinct:,} distinct; {os.cpu_count()} cores"
  )
  print("versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()))
  results = {}
  for name in args.optimizers:
    contenders, missing = gather(problem, name)
    results[name] = report(name, time_in_turns(contenders, args.seconds, args.burst), missing)
    del contenders
  if args.json:
    settings = {k: v for k, v in vars(args).items() if k != "json"} | {"distinct": distinct}
    summary = {"settings": settings, "versions": versions(), "results": results}
    args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
  main()
