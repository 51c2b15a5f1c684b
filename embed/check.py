"""`python -m embed check`: compares lookups, row gradients and optimizers with NumPy.

Each case, a combination of optimizer, combiner and kind of input, trains a table for three steps,
on one device and on all local devices with each strategy. Activations, row gradients, rows and
slots are compared after each step.

Initial rows, weights and cotangents are multiples of 1/8, so that their products and sums are exact
in any order: only divisions, roots and powers are rounded. The error of an array is its largest
difference divided by its largest value. The tolerances are:

- 2^-16 in float32. A division or a root has an error of 2^-24 to 2^-22, on accelerators too; three
  steps have about ten of them, and subtract their results. A wrong constant or a wrong order of
  operations gives a larger error.
- 2^-7 in bfloat16, which has 8 significant bits: each rounding has an error of up to 2^-9.

In the environment, `SPARSE_EMBED_PACKED=1` packs every table that can be packed, and
`SPARSE_EMBED_SPARSE_CORES=1` lets SparseCores read and write the rows.
"""

import importlib.metadata
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import embed
from embed.engine import backends
from embed.kernels import sparse_core
from embed.planning import Plan

TOLERANCE = {"float32": 2.0**-16, "bfloat16": 2.0**-7}
ROWS = 37  # a prime, so that it does not divide evenly by a number of devices
DIM = 16  # the fewest columns that SparseCores can sum
BATCH, VALENCY, LENGTH = 13, 5, 3
RATES = (0.125, 0.0625, 0.25)

# --- the reference, in float64 -------------------------------------------------------------------


def row_gains(combiner: str, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """The gain of each row in each activation, `[B, ROWS]`, for bags `[B, L]`; -1 is padding."""
  gains = np.where(ids >= 0, weights, 0.0)
  if combiner != "sum":
    total = gains.sum(1) if combiner == "mean" else np.sqrt((gains**2).sum(1))
    gains = gains / np.where(total == 0, 1.0, total)[:, None]
  rows = np.zeros((len(ids), ROWS))
  np.add.at(rows, (np.arange(len(ids))[:, None], ids), gains)  # padding adds 0
  return rows


def sgd(w, g, lr):
  return (w - lr * g,)


def adagrad(w, g, lr, a):
  a = a + g**2
  return w - lr * g / np.sqrt(a), a


def adagrad_with_common_arguments(w, g, lr, a):
  w, a = adagrad(w * (1 - 0.125), np.clip(g, -0.5, 0.5), lr, a)
  return np.clip(w, -0.5, 1.0), a


def rowwise_adagrad(w, g, lr, a):
  a = a + np.mean(g**2, axis=1)
  return w - lr * g / np.sqrt(a)[:, None], a


def adagrad_momentum(w, g, lr, a, m):
  a = a + g**2
  m = 0.5 * m + (a + 0.01) ** (-1 / 3) * g
  return w - lr * m, a, m


def ftrl(w, g, lr, a, z):
  old, a = np.sqrt(a), a + g**2
  z = z + g - (np.sqrt(a) - old) * w / lr
  return (np.clip(z, -0.125, 0.125) - z) / ((np.sqrt(a) + 0.5) / lr), a, z


def adam(w, g, lr, m, v):
  m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
  return w - lr * m / np.sqrt(v + 1e-3**2), m, v


class Case(NamedTuple):
  """A table to check: its optimizer, with arguments that exercise every term, and its inputs."""

  optimizer: embed.RowOptimizer
  step: Callable[..., tuple[np.ndarray, ...]]  # (w, g, lr, *slots) -> (w, *slots), of rows
  slots: Mapping[str, float] = {}  # initial values
  combiner: str = "sum"
  kind: str = "padded"
  is_weighted: bool = False
  dtype: str = "float32"


def rate(step: Any) -> jax.Array:
  """The learning rate of all optimizers."""
  return jnp.array(RATES, jnp.float32)[step]


_COMMON: Mapping[str, Any] = {
  "clipvalue": 0.5, "weight_decay_factor": 0.125, "clip_weight_min": -0.5, "clip_weight_max": 1.0,
}  # fmt: skip
_A, _AM, _AZ, _MV = (
  {"accumulators": 0.1},
  {"accumulators": 0.0, "momenta": 0.0},
  {"accumulators": 0.1, "linears": 0.0},
  {"momenta": 0.0, "velocities": 0.0},
)
_momentum = embed.adagrad_momentum(rate, momentum=0.5, epsilon=0.01, exponent=3.0)
_ftrl = embed.ftrl(rate, l1_regularization_strength=0.125, beta=0.5)
CASES = {
  "sgd": Case(embed.sgd(rate), sgd, combiner="mean"),
  "sgd, bfloat16": Case(embed.sgd(rate), sgd, kind="sparse", dtype="bfloat16"),
  "adagrad": Case(embed.adagrad(rate), adagrad, _A, "mean", "ragged", is_weighted=True),
  "common arguments": Case(
    embed.adagrad(rate, **_COMMON), adagrad_with_common_arguments, _A, "mean", "sparse", True
  ),
  "rowwise_adagrad": Case(embed.rowwise_adagrad(rate), rowwise_adagrad, _A, kind="dense"),
  "adagrad_momentum": Case(_momentum, adagrad_momentum, _AM, "sqrtn", is_weighted=True),
  "ftrl": Case(_ftrl, ftrl, _AZ, kind="sequence"),
  "adam": Case(embed.adam(rate, epsilon=1e-3), adam, _MV, "sqrtn", "max_valency"),
}

# --- the report ----------------------------------------------------------------------------------


def main() -> int:
  """Prints a line for each check; returns the exit status, 1 if any check fails."""
  print(header(), flush=True)
  start, failed, count = time.time(), 0, 0
  for where, place in places().items():
    try:
      errors = check(*place)
    except Exception:  # the other places are still checked
      errors = {"all": (math.inf, 0.0, traceback.format_exc())}
    for name, (error, tolerance, what) in errors.items():
      count += 1
      failed += error > tolerance
      verdict = f"FAILED: {what}" if error > tolerance else "ok"
      print(f"{name:<18}  {where:<24}  {error:8.1e}  {verdict}", flush=True)
  seconds = f"{time.time() - start:.0f} s"
  if not failed:
    print(f"\nAll {count} checks passed in {seconds}.")
    return 0
  print(
    f"\n{failed} of {count} checks FAILED in {seconds}. This installation computes wrong results "
    "on these devices: do not train with it. A report should include all of this output."
  )
  return 1


def header() -> str:
  """The header of the report: versions, devices, and how rows are stored and stepped."""
  versions = (f"{name} {importlib.metadata.version(name)}" for name in ("flax", "optax"))
  tables = [embed.FeatureConfig(embed.TableConfig(ROWS, dim)) for dim in (DIM, 128)]
  stacks = Plan.uniform(tables, embed.sgd(0.1), None, "data", "mod").stacks().values()
  storage = {"rows packed" for stack in stacks if stack.is_packed}
  storage |= {f"rows by {stack.back_end}" for stack in stacks if stack.back_end}
  ours = ", ".join([f"sparse-embed {embed.__version__}", *versions, *sorted(storage)])
  return f"{ours}\n{jax.print_environment_info(return_string=True)}"


def places() -> dict[str, tuple[Any, str, int]]:
  """The mesh, strategy and number of columns of each place: one device, and all local devices."""
  by_name: dict[str, tuple[Any, str, int]] = {"one device": (None, "mod", DIM)}
  if backends.is_on(sparse_core.SWITCH, default=False):
    by_name["one device, 128 columns"] = (None, "mod", 128)  # has its own kernel
  devices = jax.local_devices()
  if len(devices) > 1:
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    for strategy in ("mod", "div", "replicated"):
      by_name[f"{len(devices)} devices, {strategy}"] = (mesh, strategy, DIM)
  return by_name


def relative_error(actual: Any, expected: Any) -> float:
  """The largest difference over the largest value; infinite if shapes differ, and for NaN."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  if actual.shape != expected.shape:
    return math.inf
  largest = np.max(np.abs(expected), initial=0.0)
  error = np.max(np.abs(actual - expected), initial=0.0) / (largest or 1.0)
  return float(error) if np.isfinite(error) else math.inf


# --- the steps -----------------------------------------------------------------------------------


def _eighths(draw: np.random.Generator, shape: tuple[int, ...], most: int = 8) -> np.ndarray:
  return (draw.integers(-most, most + 1, shape) / 8).astype(np.float32)


def as_kind(kind: str, ids: np.ndarray, values: np.ndarray) -> Any:
  """Lays out ids or weights `[BATCH, VALENCY]` as the given kind of input."""
  if kind in ("padded", "sequence"):
    return embed.Padded(values)
  if kind == "dense":
    return values[:, 1]
  if kind == "sparse":  # with padding, so that shapes are the same in each step
    return embed.Sparse(np.argwhere(np.ones_like(ids)).astype(np.int32), values.ravel(), ids.shape)
  lengths = VALENCY - np.argmax(ids[:, ::-1] >= 0, axis=1)  # padding inside a bag stays
  is_used, splits = np.arange(VALENCY) < lengths[:, None], np.cumsum([0, *lengths], dtype=np.int32)
  values = np.append(values[is_used], values[~is_used])  # after the last split: padding
  return embed.Ragged(values, splits, VALENCY if kind == "max_valency" else None)


class Batch(NamedTuple):
  """The inputs of a table in one step, for the layer and for NumPy."""

  inputs: Any
  weights: Any
  cotangents: np.ndarray  # `[N, dim]`, of the activations
  gains: np.ndarray  # `[N, ROWS]`
  looked_up: np.ndarray  # the rows that the batch looks up, sorted


def draw_batch(draw: np.random.Generator, case: Case, dim: int) -> Batch:
  """Draws Zipf-distributed ids, with padding, an empty bag and unused rows."""
  ids = np.minimum(draw.zipf(1.3, (BATCH, VALENCY)) - 1, ROWS - 3).astype(np.int32)
  ids[draw.random(ids.shape) < 0.25] = -1
  ids[0] = -1
  weights = np.abs(_eighths(draw, ids.shape)) if case.is_weighted else np.ones(ids.shape)
  inputs = as_kind(case.kind, ids, ids)
  input_weights = as_kind(case.kind, ids, weights) if case.is_weighted else None
  if case.kind in ("dense", "sequence"):  # an activation for each id
    ids = (ids[:, 1] if case.kind == "dense" else ids[:, :LENGTH]).reshape(-1, 1)
    weights = np.ones(ids.shape)
  gains, cotangents = row_gains(case.combiner, ids, weights), _eighths(draw, (len(ids), dim))
  return Batch(inputs, input_weights, cotangents, gains, np.unique(ids[ids >= 0]))


def check(mesh: Any, strategy: str, dim: int) -> dict[str, tuple[float, float, str]]:
  """Trains a layer with a table for each case, and compares each table with the reference.

  Returns:
    The largest error of each case, its tolerance, and the name of the array.
  """
  draw = np.random.default_rng(0)
  features: dict[str, Any] = {}
  truth: dict[str, dict[str, np.ndarray]] = {}
  for name, case in CASES.items():
    settings = (ROWS, dim, None, case.optimizer, case.combiner, name, case.dtype)
    table = embed.TableConfig(*settings, stochastic_rounding=False)
    length = LENGTH if case.kind == "sequence" else 0
    features[name] = embed.FeatureConfig(table, max_sequence_length=length)
    shape = (ROWS,) if case.step is rowwise_adagrad else (ROWS, dim)
    truth[name] = {"parameters": _eighths(draw, (ROWS, dim), 16).astype(np.float64)}
    truth[name] |= {slot: np.full(shape, value) for slot, value in case.slots.items()}
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh, sharding=strategy)
  layer.load_tables({name: variables["parameters"] for name, variables in truth.items()})
  optimizer = embed.Optimizer(layer, optax.identity())

  def loss(layer, inputs, weights, cotangents):
    activations = layer(inputs, weights)
    product = lambda a, c: jnp.sum(a.astype(jnp.float32).reshape(c.shape) * c)
    return sum(jax.tree.leaves(jax.tree.map(product, activations, cotangents))), activations

  @nnx.jit
  def step(layer, optimizer, *batch):
    (_, activations), grads = embed.value_and_grad(loss, has_aux=True)(layer, *batch)
    optimizer.update(layer, grads)
    return activations, grads.rows, layer.variables

  worst = dict.fromkeys(CASES, (0.0, 0.0, ""))
  untouched = {name: np.ones(ROWS, bool) for name in CASES}
  for rate in RATES:
    batches = {name: draw_batch(draw, case, dim) for name, case in CASES.items()}
    inputs = {name: batch.inputs for name, batch in batches.items()}
    weights = {name: batch.weights for name, batch in batches.items()}
    cotangents = {name: batch.cotangents for name, batch in batches.items()}
    found = step(layer, optimizer, inputs, weights, cotangents)
    for name, case in CASES.items():
      batch, variables, ids = batches[name], truth[name], batches[name].looked_up
      untouched[name][ids] = False
      activations = batch.gains @ variables["parameters"]
      gradients = (batch.gains.T @ batch.cotangents)[ids]
      before = [x[ids] for x in variables.values()]
      after = case.step(before[0], gradients, rate, *before[1:])
      for x, new in zip(variables.values(), after, strict=True):
        x[ids] = new
      expected = {"activations": activations, "ids": ids, "row gradients": gradients, **variables}
      errors = compare([x[name] for x in found], expected, untouched[name])
      what, error = max(errors.items(), key=lambda item: item[1])
      worst[name] = max(worst[name], (error, TOLERANCE[case.dtype], what))
  return worst


def compare(
  found: Sequence[Any], expected: Mapping[str, np.ndarray], untouched: np.ndarray
) -> dict[str, float]:
  """The error of each array of a table after a step; infinite for other rows and other slots.

  `found` holds activations, `RowGrads` and variables. Rows that no step has looked up, which
  `untouched` marks, must not change at all.
  """
  activations, grads, variables = found
  order = np.argsort(grads.ids)[: np.sum(np.asarray(grads.ids) < ROWS)]
  arrays = {"activations": np.reshape(activations, expected["activations"].shape)}
  arrays |= {"ids": grads.ids[order], "row gradients": grads.values[order], **variables}
  missing = np.nan  # its shape, (), is another
  errors = {
    name: relative_error(arrays.get(name, missing), expected.get(name, missing))
    for name in {**arrays, **expected}
  }
  moved = (np.asarray(variables["parameters"], np.float64) != expected["parameters"])[untouched]
  return errors | {"rows never looked up": math.inf if moved.any() else 0.0}
