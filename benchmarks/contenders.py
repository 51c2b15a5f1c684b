"""The contenders of `step.py`: a table and batches, and what makes a step of them."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# By default JAX reserves most of a GPU's memory, which leaves none for torch and FBGEMM.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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
  """A table and batches: `rows` `[V, D]`, `ids` `[P, B, L]`, and `grads` `[B, D]` of the bags.

  `device` is that of torch and FBGEMM, "cpu" or "cuda"; JAX takes its first one.
  """

  rows: np.ndarray
  ids: np.ndarray
  grads: np.ndarray
  device: str = "cpu"


class Contender(NamedTuple):
  """Something to time.

  Attributes:
    step: starts one step, or one lookup, of the batch with a number; returns what to wait for.
    rows: returns the current rows with the given numbers.
    set_up: called before its turn.
    wait: waits for what `step` has returned.
  """

  step: Callable[[int], Any]
  rows: Callable[[np.ndarray], Any] = lambda numbers: None
  set_up: Callable[[], None] = lambda: None
  wait: Callable[[Any], Any] = jax.block_until_ready

  def take(self, i: int) -> None:
    """Makes a step, and waits for its end."""
    self.wait(self.step(i))


class Missing(Exception):
  """Says why a contender cannot take part."""


def make_problem(
  vocabulary: int,
  dim: int = DIM,
  ids: int = IDS,
  valency: int = VALENCY,
  spread: int = 1,
  device: str = "cpu",
) -> Problem:
  """Draws a problem whose id of rank r is `r * spread` modulo the vocabulary."""
  rng = np.random.default_rng(0)
  shape = (BATCHES, ids // valency, valency)
  # No more rows are drawn than take seconds; a larger table repeats them.
  drawn = rng.normal(size=(min(vocabulary, 1_000_000), dim)).astype(np.float32)
  return Problem(
    np.resize(drawn, (vocabulary, dim)),
    (rng.zipf(ZIPF, size=shape) % vocabulary * spread % vocabulary).astype(np.int32),
    rng.normal(size=(shape[1], dim)).astype(np.float32),
    device,
  )


def timed(contenders: dict[str, Contender], steps: int, turns: int) -> dict[str, dict[str, float]]:
  """Milliseconds of a step of each contender, after `BATCHES` steps that may compile.

  "in_a_row_ms" is that of many steps, started at once, of which the last is waited for: the best of
  some turns. "each_ms" is the median of steps that are waited for one by one.
  """
  for contender in contenders.values():
    for i in range(BATCHES):
      contender.take(i)
  rows: dict[str, list[float]] = {label: [] for label in contenders}
  each: dict[str, list[float]] = {label: [] for label in contenders}
  for _ in range(turns):
    for label, contender in contenders.items():
      start = time.perf_counter()
      for i in range(steps):
        last = contender.step(i)
      contender.wait(last)
      rows[label].append((time.perf_counter() - start) / steps * 1e3)
  for label, contender in contenders.items():
    for i in range(steps):
      start = time.perf_counter()
      contender.take(i)
      each[label].append((time.perf_counter() - start) * 1e3)
  return {
    label: {"in_a_row_ms": min(rows[label]), "each_ms": float(np.median(each[label]))}
    for label in contenders
  }


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
      return look_up(bags)
    return train_step(bags, grads, next(count)), arrays_of(layer)

  return Contender(step, lambda numbers: layer.tables["table"][numbers])


def ours_by_nnx_jit(problem: Problem, name: str) -> Contender:
  """The same by calls of `nnx.jit` with the layer as an argument."""
  return ours(problem, name, bind=call_jit)


bind_whole = functools.partial(nnx.jit_partial, donate_argnums=0, graph=False)


def ours_whole(problem: Problem, name: str, bind: Callable[..., Any] = bind_whole) -> Contender:
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

  compiled = bind(train_step, model, optimizer)
  step = lambda i: (compiled(batches[i % len(batches)], grads), arrays_of(model))
  return Contender(step, lambda numbers: model.tables["table"][numbers])


def ours_by_jit_step(problem: Problem, name: str) -> Contender:
  """The same by `embed.jit_step`."""
  return ours_whole(problem, name, bind=embed.jit_step)


# --- peers ---------------------------------------------------------------------------------------


def plain_jax(problem: Problem, name: str) -> Contender:
  """JAX without this library: the update adds to a row as often as the row was looked up."""
  if name not in (LOOKUP, "sgd"):
    raise Missing("takes the sum of each row's gradients")
  batches, grads = jnp.asarray(problem.ids), jnp.asarray(problem.grads)
  look_up = jax.jit(lambda table, ids: table[ids].sum(1))

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(table, ids, grads):
    activations = table[ids].sum(1)
    updates = -RATE * jax.grad(loss_of)(activations, grads)
    return table.at[ids].add(updates[:, None]), activations

  held = {"table": jnp.asarray(problem.rows)}

  def step(i):
    ids = batches[i % len(batches)]
    if name == LOOKUP:
      return look_up(held["table"], ids)
    held["table"], activations = train_step(held["table"], ids, grads)
    return held["table"], activations

  return Contender(step, lambda numbers: held["table"][numbers])


def torch_of(device: str = "cpu") -> Any:
  """Returns torch, or raises Missing if it is not installed, or not for the device."""
  try:
    import torch
  except (ImportError, OSError) as error:
    raise Missing(f"torch: {error}") from None
  if device == "cuda" and not torch.cuda.is_available():
    raise Missing("this torch has found no CUDA")
  return torch


def in_torch(problem: Problem, step: Callable[[int], None], weights: Any) -> Contender:
  """A contender that steps in torch, whose work on a GPU goes on after a call."""
  torch = torch_of(problem.device)
  wait = (lambda _: None) if problem.device == "cpu" else (lambda _: torch.cuda.synchronize())
  return Contender(step, lambda numbers: weights.detach()[numbers].cpu().numpy(), wait=wait)


def torch_sparse(problem: Problem, name: str) -> Contender:
  """`EmbeddingBag(sparse=True)` with the optimizers of torch that take sparse gradients."""
  torch = torch_of(problem.device)
  make = {
    "sgd": lambda p: torch.optim.SGD(p, RATE),
    "adagrad": lambda p: torch.optim.Adagrad(
      p, RATE, initial_accumulator_value=ACCUMULATOR, eps=0.0
    ),
    "adam": lambda p: torch.optim.SparseAdam(p, RATE, eps=EPSILON),
  }
  if name not in (LOOKUP, *make):
    raise Missing("torch has no such optimizer")
  shape, device = problem.rows.shape, problem.device
  bags = torch.nn.EmbeddingBag(*shape, mode="sum", sparse=True, device=device)
  with torch.no_grad():
    bags.weight.copy_(torch.from_numpy(problem.rows))
  optimizer = None if name == LOOKUP else make[name](list(bags.parameters()))
  batches = torch.from_numpy(problem.ids).long().to(device)
  grads = torch.from_numpy(problem.grads).to(device)

  def step(i):
    ids = batches[i % len(batches)]
    if optimizer is None:
      with torch.no_grad():
        bags(ids)
      return
    optimizer.zero_grad()
    bags(ids).backward(grads)
    optimizer.step()

  return in_torch(problem, step, bags.weight)


def fbgemm_bags(tables: Sequence[np.ndarray], optimizer: str, device: str = "cpu") -> Any:
  """FBGEMM's table batched embedding with the rows of some tables, and accumulators as ours have.

  Raises:
    Missing: FBGEMM is not installed, or has no such optimizer on the device.
  """
  torch = torch_of(device)
  try:
    from fbgemm_gpu import split_embedding_configs
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as places
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops
  except (ImportError, OSError) as error:
    raise Missing(f"FBGEMM: {error}") from None
  kinds = {name: f"EXACT_{name.upper()}" for name in ("sgd", "rowwise_adagrad", "adagrad")}
  place: tuple[Any, ...] = (places.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
  options: dict[str, Any] = {"eps": 0.0}
  if device == "cuda":
    kinds["adam"] = "ADAM"
    place = (places.EmbeddingLocation.DEVICE, ops.ComputeDevice.CUDA)
    options |= {"device": torch.device(device), "bounds_check_mode": places.BoundsCheckMode.NONE}
  if optimizer not in kinds:
    raise Missing("FBGEMM has no such optimizer on CPU")
  if optimizer == "adam":
    # FBGEMM adds it to the corrected root, torch and ours to the root: the first step is the same.
    options["eps"] = EPSILON / (1 - 0.999) ** 0.5
  bags = ops.SplitTableBatchedEmbeddingBagsCodegen(
    [(*rows.shape, *place) for rows in tables],
    optimizer=split_embedding_configs.EmbOptimType[kinds[optimizer]],
    learning_rate=RATE,
    **options,
  )
  for weights, rows in zip(bags.split_embedding_weights(), tables, strict=True):
    weights.copy_(torch.from_numpy(rows))
  for states in bags.split_optimizer_states() if "adagrad" in optimizer else ():
    for state in states:
      state.fill_(ACCUMULATOR)
  return bags


def fbgemm(problem: Problem, name: str) -> Contender:
  """FBGEMM, whose update is part of the backward pass."""
  device = problem.device
  bags = fbgemm_bags([problem.rows], "sgd" if name == LOOKUP else name, device)
  torch = torch_of(device)
  _, count, valency = problem.ids.shape
  batches = torch.from_numpy(problem.ids).long().reshape(len(problem.ids), -1).to(device)
  offsets = torch.arange(0, (count + 1) * valency, valency, device=device)
  grads = torch.from_numpy(problem.grads).to(device)

  def step(i):
    ids = batches[i % len(batches)]
    if name == LOOKUP:
      with torch.no_grad():
        bags(ids, offsets)
    else:
      bags(ids, offsets).backward(grads)

  return in_torch(problem, step, bags.split_embedding_weights()[0])


CONTENDERS: dict[str, Callable[[Problem, str], Contender]] = {
  "ours": ours,
  "ours, nnx.jit": ours_by_nnx_jit,
  "ours, whole model": ours_whole,
  "torch": torch_sparse,
  "fbgemm": fbgemm,
}
PEERS = ("torch", "fbgemm")  # whose threads are set
ON_GPUS: dict[str, Callable[[Problem, str], Contender]] = {
  "ours": ours,
  "ours, jit_step": ours_by_jit_step,
  "FBGEMM": fbgemm,
  "torch": torch_sparse,
  "plain JAX": plain_jax,
}
