"""One training step of a whole DLRM on CPU: ours against torch with FBGEMM and with EmbeddingBag.

26 tables of one width, a feature of one id each, 13 dense features, MLPs of the sizes in
`BOTTOM` and `TOP`, dot interactions; Adagrad on the tables, SGD on the rest. All contenders
start from the same weights, train on the same batches, and must have the same losses over the
first steps; then they are timed as in `step.py`, in turns. Ours is the recipe's model, and the step
that `recipes.dlrm.train` takes.

  python benchmarks/dlrm.py --json dlrm.json

"first step" is the time from a model to the end of its first step: what is traced and compiled.
"""

import itertools
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import common
import contenders as lib
import jax
import jax.numpy as jnp
import numpy as np
import optax
import step as timing
from contenders import ACCUMULATOR, BATCHES, RATE, ZIPF, Contender, Missing
from flax import nnx

import embed
from recipes.dlrm import model as dlrm
from recipes.dlrm import train
from recipes.training import layers

DENSE_RATE = 0.01
TABLES, VOCABULARY, DENSE = 26, 100_000, 13
BOTTOM, TOP = (512, 256), (512, 256)  # and then the width of the tables, and 1
BURST = 4  # steps of a contender in its turn


class Problem(NamedTuple):
  """Batches of ids `[P, B, F]`, dense features `[P, B, 13]` and labels `[P, B]`, and a width."""

  ids: np.ndarray
  dense: np.ndarray
  labels: np.ndarray
  dim: int


def make_problem(dim: int, batch: int) -> Problem:
  rng = np.random.default_rng(0)
  shape = (BATCHES, batch)
  ids = rng.zipf(ZIPF, size=(*shape, TABLES)) % VOCABULARY
  labels = (rng.random(shape) < 0.3).astype(np.float32)
  dense = rng.normal(size=(*shape, DENSE)).astype(np.float32)
  return Problem(ids.astype(np.int32), dense, labels, dim)


def make_model(problem: Problem) -> dlrm.DLRM:
  """The recipe's model with weights of a fixed seed."""
  normal, features = embed.row_wise(jax.nn.initializers.normal(0.1)), {}
  for i in range(problem.ids.shape[-1]):
    name = f"c{i:02d}"
    table = embed.TableConfig(VOCABULARY, problem.dim, normal, combiner="sum", name=name)
    features[name] = embed.FeatureConfig(table)
  rngs = nnx.Rngs(0)
  tables = embed.SparseEmbed(features, optimizer=embed.adagrad(RATE, ACCUMULATOR), rngs=rngs)
  sizes: dict[str, Any] = {"bottom": BOTTOM, "top": TOP, "rngs": rngs}
  inputs = layers.Inputs(tables, DENSE, rngs=rngs)
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
  take_step = train.make_train_step(types.SimpleNamespace(clip_norm=0.0), cast(Any, None))
  take, turn = embed.jit_step(take_step, model, optimizer), itertools.cycle(batches)
  loss: list[Any] = [0.0]

  def step(i):
    loss[0] = take(next(turn))["loss"]
    return loss[0], lib.arrays_of(model.embed)

  return Trained(Contender(step), lambda: float(loss[0]))


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

  return Trained(Contender(step), lambda: float(loss[0]))


def torch_sparse(problem: Problem, model: dlrm.DLRM) -> Trained:
  """`EmbeddingBag(sparse=True)` for each table, with torch's Adagrad."""
  torch = lib.torch_of()
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
  bags = lib.fbgemm_bags([np.array(model.embed.tables[name]) for name in model.names], "adagrad")
  import torch

  count, dim = problem.ids.shape[-1], problem.dim
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


def measure(dim: int, batch: int, seconds: float) -> dict[str, Any]:
  """All contenders at one point."""
  problem = make_problem(dim, batch)
  model = make_model(problem)
  print(f"\n{TABLES} tables {VOCABULARY:,} x {dim}, batch {batch:,}")
  losses: dict[str, list[float]] = {}
  made: dict[str, Contender] = {}
  missing: dict[str, str] = {}
  first: dict[str, float] = {}
  for label, make in CONTENDERS.items():
    start = time.perf_counter()
    try:
      trained = make(problem, model)
    except Missing as reason:
      missing[label] = str(reason)
      continue
    losses[label] = []
    for i in range(BATCHES):
      trained.contender.take(i)
      first.setdefault(label, time.perf_counter() - start)
      losses[label].append(trained.loss())
    made[label] = trained.contender
  expected = next(iter(losses.values()))
  for label, values in losses.items():
    np.testing.assert_allclose(values, expected, rtol=1e-4, err_msg=f"{label} against ours")
  print("first step, s: " + ", ".join(f"{label} {s:.1f}" for label, s in first.items()))
  load = timing.Load()
  times = timing.time_in_turns(timing.with_threads(made), seconds, BURST)
  results = timing.report("DLRM", times, missing, load.cores())
  point = {"dim": dim, "batch": batch, "first_step_s": first, "losses": expected}
  return point | {"results": results}


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--seconds", type=float, default=20, help="time for each point")
  args = parser.parse_args()
  print("versions: " + ", ".join(f"{k} {v}" for k, v in common.versions().items()))
  points = [measure(*point, args.seconds) for point in itertools.product((16, 64), (2048, 8192))]
  common.write(args.json, {"points": points})


if __name__ == "__main__":
  main()
