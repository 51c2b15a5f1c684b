"""The contenders of `step.py`: a table and batches, and what makes a step of them."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import embed

DIM, IDS, VALENCY = 64, 65_536, 8  # of a table, of a batch and of a bag
# Other ids in each of so many steps, by a power law; and steps of a contender in its turn.
BATCHES, ZIPF, BURST = 8, 1.2, 8
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


def make_problem(vocabulary: int) -> Problem:
  rng = np.random.default_rng(0)
  shape = (BATCHES, IDS // VALENCY, VALENCY)
  return Problem(
    rng.normal(size=(vocabulary, DIM)).astype(np.float32),
    (rng.zipf(ZIPF, size=shape) % vocabulary).astype(np.int32),
    rng.normal(size=(shape[1], DIM)).astype(np.float32),
  )


def loss_of(activations: jax.Array, grads: jax.Array) -> jax.Array:
  """A loss whose gradient is `grads`, by way of the activations."""
  return jnp.sum(activations * grads) + 0.0 * jnp.sum(activations * activations)


# --- ours ----------------------------------------------------------------------------------------


def make_layer(problem: Problem, optimizer: embed.RowOptimizer | None) -> embed.SparseEmbed:
  """A layer of one feature on one table that holds the problem's rows."""
  vocabulary, dim = problem.rows.shape
  table = embed.TableConfig(
    vocabulary,
    dim,
    combiner="sum",
    name="table",
    optimizer=optimizer,
    initializer=embed.row_wise(jax.nn.initializers.zeros),
  )
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  layer.load_tables({"table": problem.rows})
  return layer


def on_device(problem: Problem) -> tuple[list[embed.Padded], jax.Array]:
  """The batches and the gradient of their activations."""
  return [embed.Padded(jnp.asarray(ids)) for ids in problem.ids], jnp.asarray(problem.grads)


def arrays_of(layer: embed.SparseEmbed) -> list[jax.Array]:
  """A table and its slots as they are stored."""
  return [v.get_value() for stack in layer.arrays.values() for v in stack.values()]


Programs = tuple[Callable[..., Any], Callable[..., Any]]


def programs(layer: embed.SparseEmbed, bind: Callable[..., Any] = nnx.jit_partial) -> Programs:
  """The compiled step and the compiled lookup of a layer, traced when they are first called.

  `bind` is `nnx.jit_partial`, which flattens the layer once, or `call_jit`.
  """

  def train_step(layer, bags, grads, step):
    activations, residual = layer.lookup(bags)
    layer.apply_gradients(jax.grad(loss_of)(activations, grads), residual, step=step)
    return activations

  look_up = bind(lambda layer, bags: layer(bags), layer, graph=False)
  return bind(train_step, layer, graph=False, donate_argnums=0), look_up


def call_jit(function: Callable[..., Any], layer: Any, **options: Any) -> Callable[..., Any]:
  """Calls `nnx.jit` with the layer, which it flattens every time."""
  return functools.partial(nnx.jit(function, **options), layer)


def ours(problem: Problem, name: str, bind: Callable[..., Any] = nnx.jit_partial) -> Contender:
  """`lookup` and `apply_gradients`, compiled for the layer."""
  layer = make_layer(problem, OPTIMIZERS.get(name, embed.frozen)())
  (batches, grads), count = on_device(problem), iter(range(1 << 31))

  train_step, look_up = programs(layer, bind)

  def step(i):
    bags = batches[i % len(batches)]
    if name == LOOKUP:
      jax.block_until_ready(look_up(bags))
    else:
      jax.block_until_ready((train_step(bags, grads, next(count)), arrays_of(layer)))

  return Contender(step, lambda: layer.tables["table"])


def ours_by_nnx_jit(problem: Problem, name: str) -> Contender:
  """The same by calls of `nnx.jit` with the layer as an argument."""
  return ours(problem, name, bind=call_jit)


def ours_whole(problem: Problem, name: str) -> Contender:
  """`embed.value_and_grad` of a loss and `embed.Optimizer`, as a model is trained."""
  if name == LOOKUP:
    raise Missing("not measured")
  model = make_layer(problem, OPTIMIZERS[name]())
  optimizer = embed.Optimizer(model, optax.sgd(RATE))
  batches, grads = on_device(problem)

  def loss_fn(model, bags, grads):
    return loss_of(model(bags), grads)

  def train_step(model, optimizer, bags, grads):
    loss, gradients = embed.value_and_grad(loss_fn)(model, bags, grads)
    optimizer.update(model, gradients)
    return loss

  compiled = nnx.jit_partial(train_step, model, optimizer, donate_argnums=0, graph=False)

  def step(i):
    loss = compiled(batches[i % len(batches)], grads)
    jax.block_until_ready((loss, arrays_of(model)))

  return Contender(step, lambda: model.tables["table"])


# --- peers ---------------------------------------------------------------------------------------


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


def fbgemm_bags(tables: Sequence[np.ndarray], optimizer: str) -> Any:
  """FBGEMM's table batched embedding with the rows of some tables, and accumulators as ours have.

  Raises:
    Missing: FBGEMM is not installed, or has no such optimizer on CPU.
  """
  try:
    import torch
    from fbgemm_gpu import split_embedding_configs
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as places
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops
  except ImportError:
    raise Missing("fbgemm-gpu-cpu is not installed") from None
  if optimizer not in ("sgd", "rowwise_adagrad", "adagrad"):
    raise Missing("FBGEMM has no such optimizer on CPU")
  place = (places.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
  bags = ops.SplitTableBatchedEmbeddingBagsCodegen(
    [(*rows.shape, *place) for rows in tables],
    optimizer=split_embedding_configs.EmbOptimType[f"EXACT_{optimizer.upper()}"],
    learning_rate=RATE,
    eps=0.0,
  )
  for weights, rows in zip(bags.split_embedding_weights(), tables, strict=True):
    weights.copy_(torch.from_numpy(rows))
  for states in bags.split_optimizer_states():
    for state in states:
      state.fill_(ACCUMULATOR)
  return bags


def fbgemm(problem: Problem, name: str) -> Contender:
  """FBGEMM on CPU: the update is part of the backward pass."""
  bags = fbgemm_bags([problem.rows], "sgd" if name == LOOKUP else name)
  import torch

  weights = bags.split_embedding_weights()[0]
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
  "ours, nnx.jit": ours_by_nnx_jit,
  "ours, whole model": ours_whole,
  "torch": torch_sparse,
  "fbgemm": fbgemm,
}
PEERS = ("torch", "fbgemm")  # whose threads are set
