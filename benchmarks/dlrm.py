"""One training step of a whole DLRM on CPU: ours against torch with FBGEMM and with EmbeddingBag.

26 tables of one width, a feature of one id each, 13 dense features, MLPs of the sizes in
`--bottom` and `--top`, dot interactions; Adagrad on the tables, SGD on the rest. All contenders
start from the same weights, train on the same batches, and must have the same losses over the
first steps; then they are timed as in `step.py`, in turns. Ours is the recipe's model, and the step
that `recipes.dlrm.train` takes.

  python benchmarks/dlrm.py --json dlrm.json

"first step" is the time from a model to the end of its first step: what is traced and compiled.
"""

import argparse
import itertools
import json
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import contenders as lib
import jax
import jax.numpy as jnp
import numpy as np
import optax
import step as timing
from contenders import Contender, Missing
from flax import nnx

import embed
from recipes.dlrm import model as dlrm
from recipes.dlrm import tasks, train
from recipes.training import layers

RATE, DENSE_RATE, ACCUMULATOR, DENSE = 0.01, 0.01, 0.1, 13


class Problem(NamedTuple):
  """Batches of ids `[P, B, F]`, dense features `[P, B, 13]` and labels `[P, B]`, and sizes."""

  ids: np.ndarray
  dense: np.ndarray
  labels: np.ndarray
  vocabulary: int
  dim: int
  bottom: tuple[int, ...]
  top: tuple[int, ...]


def make_problem(args: argparse.Namespace, dim: int, batch: int) -> Problem:
  rng = np.random.default_rng(0)
  shape = (args.batches, batch)
  ids = rng.zipf(args.zipf, size=(*shape, args.tables)) % args.vocabulary
  labels = rng.random(shape) < 0.3
  return Problem(
    ids.astype(np.int32),
    rng.normal(size=(*shape, DENSE)).astype(np.float32),
    labels.astype(np.float32),
    args.vocabulary,
    dim,
    tuple(args.bottom),
    tuple(args.top),
  )


def make_model(problem: Problem) -> dlrm.DLRM:
  """The recipe's model with weights of a fixed seed."""
  normal, features = embed.row_wise(jax.nn.initializers.normal(0.1)), {}
  for i in range(problem.ids.shape[-1]):
    name = f"c{i:02d}"
    table = embed.TableConfig(
      problem.vocabulary, problem.dim, combiner="sum", name=name, initializer=normal
    )
    features[name] = embed.FeatureConfig(table)
  rngs = nnx.Rngs(0)
  tables = embed.SparseEmbed(features, optimizer=embed.adagrad(RATE, ACCUMULATOR), rngs=rngs)
  sizes: dict[str, Any] = {"bottom": problem.bottom, "top": problem.top, "rngs": rngs}
  inputs = layers.Inputs(tables, range(DENSE), rngs=rngs)
  return dlrm.DLRM(tables, inputs, problem.dim, concat_tables=False, dropout=0.0, **sizes)


class Trained(NamedTuple):
  """A contender, and what gives the loss of its latest step."""

  contender: Contender
  loss: Callable[[], float]


def ours(problem: Problem, model: dlrm.DLRM) -> Trained:
  """The recipe's step."""
  model = nnx.clone(model, arrays=True)
  optimizer = embed.Optimizer(model, optax.sgd(DENSE_RATE))
  batches = [
    {
      "features": {name: jnp.asarray(ids[:, i]) for i, name in enumerate(model.names)},
      "dense": jnp.asarray(dense),
      "label": jnp.asarray(labels),
    }
    for ids, dense, labels in zip(problem.ids, problem.dense, problem.labels, strict=True)
  ]
  config, data = types.SimpleNamespace(clip_norm=0.0), types.SimpleNamespace(labels=tasks.ONE_CLICK)
  take_step = train.make_train_step(config, cast(Any, data))
  take, turn = embed.jit_step(take_step, model, optimizer), itertools.cycle(batches)
  loss: list[Any] = [0.0]

  def step(i):
    loss[0] = take(next(turn))["loss"]
    jax.block_until_ready((loss[0], lib.arrays_of(model.embed)))

  return Trained(Contender(step, lambda: None), lambda: float(loss[0]))


def _in_torch(problem: Problem, model: dlrm.DLRM, look_up: Callable, parameters: list) -> Any:
  """The dense part in torch around `look_up(ids) -> [B, F, D]`: `(ids, dense, labels) -> loss`."""
  import torch

  def copied(linear):
    made = torch.nn.Linear(linear.in_features, linear.out_features)
    with torch.no_grad():
      made.weight.copy_(torch.from_numpy(np.array(linear.kernel[...]).T))
      made.bias.copy_(torch.from_numpy(np.array(linear.bias[...])))
    return made

  def mlp(made: layers.MLP):
    pairs = [(copied(linear), torch.nn.ReLU()) for linear in made.layers]
    return torch.nn.Sequential(*itertools.chain(*pairs))

  assert model.bottom is not None
  bottom, top, head = mlp(model.bottom), mlp(model.top), copied(model.head)
  rows, columns = (
    torch.from_numpy(np.array(x)) for x in np.tril_indices(1 + problem.ids.shape[-1], k=-1)
  )
  dense_parameters = [p for part in (bottom, top, head) for p in part.parameters()]
  optimizer = torch.optim.SGD(dense_parameters, DENSE_RATE)
  sparse = (
    torch.optim.Adagrad(parameters, RATE, initial_accumulator_value=ACCUMULATOR, eps=0.0)
    if parameters
    else None
  )

  def train_on(ids, dense, labels):
    for each in filter(None, (optimizer, sparse)):
      each.zero_grad()
    x = bottom(dense)
    vectors = torch.cat([look_up(ids), x[:, None]], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    logits = head(top(torch.cat([x, products[:, rows, columns]], dim=1)))[:, 0]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    for each in filter(None, (optimizer, sparse)):
      each.step()
    return loss

  return train_on


def _trained(problem: Problem, train_on: Callable, ids: list) -> Trained:
  import torch

  dense, labels = torch.from_numpy(problem.dense), torch.from_numpy(problem.labels)
  loss: list[Any] = [None]

  def step(i):
    k = i % len(ids)
    loss[0] = train_on(ids[k], dense[k], labels[k])

  return Trained(Contender(step, lambda: None), lambda: float(loss[0]))


def torch_sparse(problem: Problem, model: dlrm.DLRM) -> Trained:
  """`EmbeddingBag(sparse=True)` for each table, with torch's Adagrad."""
  try:
    import torch
  except ImportError:
    raise Missing("torch is not installed") from None
  bags = []
  for name in model.names:
    weight = torch.from_numpy(np.array(model.embed.tables[name]))
    bags.append(
      torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)
    )
  look_up = lambda ids: torch.stack(
    [bag(column) for bag, column in zip(bags, ids, strict=True)], dim=1
  )
  weights = [bag.weight for bag in bags]
  train_on = _in_torch(problem, model, look_up, weights)
  columns = [
    [torch.from_numpy(ids[:, i : i + 1].copy()).long() for i in range(ids.shape[1])]
    for ids in problem.ids
  ]
  return _trained(problem, train_on, columns)


def fbgemm(problem: Problem, model: dlrm.DLRM) -> Trained:
  """FBGEMM's table batched embedding for all tables, with its exact Adagrad."""
  try:
    import torch
    from fbgemm_gpu import split_embedding_configs, split_table_batched_embeddings_ops_training
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
  except ImportError:
    raise Missing("fbgemm-gpu-cpu is not installed") from None
  ops = split_table_batched_embeddings_ops_training
  count, dim = problem.ids.shape[-1], problem.dim
  one = (problem.vocabulary, dim, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
  bags = ops.SplitTableBatchedEmbeddingBagsCodegen(
    [one] * count,
    optimizer=split_embedding_configs.EmbOptimType.EXACT_ADAGRAD,
    learning_rate=RATE,
    eps=0.0,
  )
  for weight, name in zip(bags.split_embedding_weights(), model.names, strict=True):
    weight.copy_(torch.from_numpy(np.array(model.embed.tables[name])))
  for states in bags.split_optimizer_states():
    for state in states:
      state.fill_(ACCUMULATOR)
  batch = problem.ids.shape[1]
  offsets = torch.arange(count * batch + 1)  # a bag of one id for each table and example
  look_up = lambda ids: bags(ids, offsets).reshape(batch, count, dim)
  train_on = _in_torch(problem, model, look_up, [])
  flat = [torch.from_numpy(ids.T.reshape(-1).copy()).long() for ids in problem.ids]
  return _trained(problem, train_on, flat)


CONTENDERS: dict[str, Callable[[Problem, dlrm.DLRM], Trained]] = {
  "ours": ours,
  "torch": torch_sparse,
  "fbgemm": fbgemm,
}


def measure(args: argparse.Namespace, dim: int, batch: int) -> dict[str, Any]:
  """All contenders at one point."""
  problem = make_problem(args, dim, batch)
  model = make_model(problem)
  print(f"\n{problem.ids.shape[-1]} tables {args.vocabulary:,} x {dim}, batch {batch:,}")
  losses: dict[str, list[float]] = {}
  made: dict[str, Contender] = {}
  missing: dict[str, str] = {}
  first: dict[str, float] = {}
  for label in args.contenders:
    start = time.perf_counter()
    try:
      trained = CONTENDERS[label](problem, model)
    except Missing as reason:
      missing[label] = str(reason)
      continue
    losses[label] = []
    for i in range(args.batches):
      trained.contender.step(i)
      first.setdefault(label, time.perf_counter() - start)
      losses[label].append(trained.loss())
    made[label] = trained.contender
  expected = next(iter(losses.values()))
  for label, values in losses.items():
    np.testing.assert_allclose(values, expected, rtol=1e-4, err_msg=f"{label} against ours")
  print("first step, s: " + ", ".join(f"{label} {s:.1f}" for label, s in first.items()))
  load = timing.Load()
  times = timing.time_in_turns(timing.with_threads(made), args.seconds, args.burst)
  results = timing.report("DLRM", times, missing, load.cores())
  point = {"dim": dim, "batch": batch, "first_step_s": first, "losses": expected}
  return point | {"results": results}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--dim", type=int, nargs="+", default=[16, 64])
  parser.add_argument("--batch", type=int, nargs="+", default=[2048, 8192])
  parser.add_argument("--tables", type=int, default=26)
  parser.add_argument("--vocabulary", type=int, default=100_000, help="rows of each table")
  parser.add_argument("--bottom", type=int, nargs="*", default=[512, 256], help="and then dim")
  parser.add_argument("--top", type=int, nargs="+", default=[512, 256])
  parser.add_argument("--batches", type=int, default=8, help="other ids in each of so many steps")
  parser.add_argument("--zipf", type=float, default=1.2, help="exponent of the ids' power law")
  parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
  parser.add_argument("--seconds", type=float, default=20, help="time for each point")
  parser.add_argument("--burst", type=int, default=4, help="steps in a row")
  parser.add_argument("--json", type=Path, help="write the figures there")
  args = parser.parse_args()
  print("versions: " + ", ".join(f"{k} {v}" for k, v in timing.versions().items()))
  points = [measure(args, dim, batch) for dim, batch in itertools.product(args.dim, args.batch)]
  if args.json:
    args.json.write_text(json.dumps(timing.about() | {"points": points}, indent=2) + "\n")


if __name__ == "__main__":
  main()
