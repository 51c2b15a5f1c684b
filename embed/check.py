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

import dataclasses
import importlib.metadata
import math
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import embed
from embed.engine import backends
from embed.kernels import sparse_core
from embed.optimizers import OPTIMIZERS
from embed.planning import Plan

TOLERANCE = {"float32": 2.0**-16, "bfloat16": 2.0**-7}
ROWS = 37  # a prime, so that it does not divide evenly by a number of devices
DIM = 16  # the fewest columns that SparseCores can sum
BATCH, VALENCY, LENGTH = 13, 5, 3
RATES = (0.125, 0.0625, 0.25)

# --- the reference, in float64 -------------------------------------------------------------------


def gains(combiner: str, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Weights `[B, L]` normalized by the combiner, 0 for padding."""
  weights = np.where(ids >= 0, weights, 0.0)
  if combiner == "sum":
    return weights
  total = weights.sum(1) if combiner == "mean" else np.sqrt((weights**2).sum(1))
  return weights / np.where(total == 0, 1.0, total)[:, None]


def lookup(table: np.ndarray, ids: np.ndarray, gains: np.ndarray) -> np.ndarray:
  """Activations `[B, dim]` of bags `[B, L]`."""
  return np.einsum("bl,bld->bd", gains, table[ids])  # padding, -1, has a gain of 0


def row_gradients(ids: np.ndarray, gains: np.ndarray, cotangents: np.ndarray) -> np.ndarray:
  """Gradients `[ROWS, dim]` of all rows, from cotangents `[B, dim]`."""
  rows = np.zeros((ROWS, cotangents.shape[1]))
  np.add.at(rows, ids, gains[:, :, None] * cotangents[:, None])
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

  optimizer: str
  step: Callable[..., tuple[np.ndarray, ...]]  # (w, g, lr, *slots) -> (w, *slots), of rows
  slots: Mapping[str, float] = {}  # initial values
  arguments: Mapping[str, Any] = {}
  combiner: str = "sum"
  kind: str = "padded"
  is_weighted: bool = False
  dtype: str = "float32"
  is_per_row: bool = False  # slots `[V]` instead of `[V, dim]`


_COMMON = {
  "clipvalue": 0.5, "weight_decay_factor": 0.125, "clip_weight_min": -0.5, "clip_weight_max": 1.0,
}  # fmt: skip
_MOMENTUM = {"momentum": 0.5, "epsilon": 0.01, "exponent": 3.0}
_FTRL = {"l1_regularization_strength": 0.125, "beta": 0.5}
_A, _AM, _AZ, _MV = (
  {"accumulators": 0.1},
  {"accumulators": 0.0, "momenta": 0.0},
  {"accumulators": 0.1, "linears": 0.0},
  {"momenta": 0.0, "velocities": 0.0},
)
CASES = {
  "sgd": Case("sgd", sgd, combiner="mean"),
  "sgd, bfloat16": Case("sgd", sgd, kind="sparse", dtype="bfloat16"),
  "adagrad": Case("adagrad", adagrad, _A, combiner="mean", kind="ragged", is_weighted=True),
  "common arguments": Case(
    "adagrad", adagrad_with_common_arguments, _A, _COMMON, "mean", "sparse", is_weighted=True
  ),
  "rowwise_adagrad": Case("rowwise_adagrad", rowwise_adagrad, _A, kind="dense", is_per_row=True),
  "adagrad_momentum": Case(
    "adagrad_momentum", adagrad_momentum, _AM, _MOMENTUM, "sqrtn", is_weighted=True
  ),
  "ftrl": Case("ftrl", ftrl, _AZ, _FTRL, kind="sequence"),
  "adam": Case("adam", adam, _MV, {"epsilon": 1e-3}, "sqrtn", "max_valency"),
}

# --- the report ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
  """A comparison: `error` is the largest difference divided by the largest expected value.

  It is infinite if there is no difference to measure, such as for a wrong shape or an exception.
  """

  what: str
  where: str
  error: float
  tolerance: float = TOLERANCE["float32"]
  note: str = ""

  @property
  def ok(self) -> bool:
    return self.error <= self.tolerance


def main() -> int:
  """Prints a line for each check; returns the exit status, 1 if any check fails."""
  print(header(), flush=True)
  start, results = time.time(), []
  for result in run():
    results.append(result)
    verdict = "ok" if result.ok else f"FAILED: {result.note}"
    print(f"{result.what:<25}  {result.where:<22}  {result.error:8.1e}  {verdict}", flush=True)
  failed = [result for result in results if not result.ok]
  seconds = f"{time.time() - start:.0f} s"
  if not failed:
    print(f"\nAll {len(results)} checks passed in {seconds}.")
    return 0
  print(
    f"\n{len(failed)} of {len(results)} checks FAILED in {seconds}. This installation computes "
    "wrong results on these devices: do not train with it. A report should include all of this "
    "output."
  )
  return 1


def header() -> str:
  """The header of the report: versions, backend and devices."""
  packages = ("jax", "jaxlib", "flax", "optax", "numpy")
  versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
  devices = jax.local_devices()
  tables = [embed.FeatureConfig(embed.TableConfig(ROWS, dim)) for dim in (DIM, 128)]
  stacks = Plan.uniform(tables, embed.sgd(0.1), None, "data", "mod").stacks().values()
  packed = ", tables packed" if any(stack.is_packed for stack in stacks) else ""
  cores = ", rows by SparseCores" if any(stack.back_end for stack in stacks) else ""
  return (
    f"python {platform.python_version()} on {platform.system()} {platform.machine()}, "
    f"sparse-embed {embed.__version__}, {versions}\n"
    f"backend {jax.default_backend()}: {len(devices)} x {devices[0].device_kind}{packed}{cores}\n\n"
    f"{'what':<25}  {'where':<22}  {'error':>8}"
  )


def run() -> Iterator[Result]:
  """Checks all cases in all places; an exception becomes a failed result with a note."""
  for where, place in places().items():
    try:
      for result in check(place):
        yield dataclasses.replace(result, where=where)
    except Exception as error:  # the other places are still checked
      traceback.print_exc()
      message = str(error).split("\n")[0]
      yield Result("all", where, math.inf, note=f"{type(error).__name__}: {message}")


class Place(NamedTuple):
  """The mesh and strategy of a layer, and the number of columns of its tables."""

  mesh: Any = None
  strategy: str = "mod"
  dim: int = DIM


def places() -> dict[str, Place]:
  """Places by name: one device, and all local devices with each strategy."""
  by_name = {"one device": Place()}
  if backends.is_on(sparse_core.SWITCH, default=False):
    by_name["one device, 128 columns"] = Place(dim=128)  # has its own kernel
  devices = jax.local_devices()
  if len(devices) > 1:
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    for strategy in ("mod", "div", "replicated"):
      by_name[f"{len(devices)} devices, {strategy}"] = Place(mesh, strategy)
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


def _draw_ids(draw: np.random.Generator) -> np.ndarray:
  """Draws Zipf-distributed ids `[BATCH, VALENCY]`, with padding, an empty bag and unused rows."""
  ids = np.minimum(draw.zipf(1.3, (BATCH, VALENCY)) - 1, ROWS - 3)
  ids[draw.random(ids.shape) < 0.25] = -1
  ids[0] = -1
  return ids.astype(np.int32)


def as_kind(kind: str, ids: np.ndarray, values: np.ndarray) -> Any:
  """Lays out ids or weights `[BATCH, VALENCY]` as the given kind of input."""
  if kind == "padded":
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
  """The inputs of a case in one step, in the forms that the layer and the reference take."""

  inputs: Any
  weights: Any
  cotangents: np.ndarray  # `[N, dim]`
  ids: np.ndarray  # `[N, valency]`, of each activation
  gains: np.ndarray

  @classmethod
  def draw(cls, draw: np.random.Generator, case: Case, dim: int) -> "Batch":
    ids, weights = _draw_ids(draw), np.abs(_eighths(draw, (BATCH, VALENCY)))  # some are 0
    weights = weights if case.is_weighted else np.ones_like(weights)
    given = as_kind(case.kind, ids, ids)
    given_weights = as_kind(case.kind, ids, weights) if case.is_weighted else None
    if case.kind in ("dense", "sequence"):  # an activation for each id
      ids = (ids[:, 1] if case.kind == "dense" else ids[:, :LENGTH]).reshape(-1, 1)
      weights = np.ones(ids.shape)
    cotangents = _eighths(draw, (len(ids), dim))
    return cls(given, given_weights, cotangents, ids, gains(case.combiner, ids, weights))


def check(place: Place) -> Iterator[Result]:
  """Trains a layer with a table for each case, and compares each table with the reference."""
  draw, dim, rates = np.random.default_rng(0), place.dim, np.array(RATES, np.float32)
  features: dict[str, Any] = {}
  expected: dict[str, dict[str, np.ndarray]] = {}
  for name, case in CASES.items():
    rule = OPTIMIZERS[case.optimizer](lambda step: jnp.asarray(rates)[step], **case.arguments)
    table = embed.TableConfig(
      ROWS, dim, None, rule, case.combiner, name, case.dtype, stochastic_rounding=False
    )
    length = LENGTH if case.kind == "sequence" else 0
    features[name] = embed.FeatureConfig(table, max_sequence_length=length)
    shape = (ROWS,) if case.is_per_row else (ROWS, dim)
    expected[name] = {"parameters": _eighths(draw, (ROWS, dim), 16).astype(np.float64)}
    expected[name] |= {slot: np.full(shape, value) for slot, value in case.slots.items()}
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=place.mesh, sharding=place.strategy)
  layer.load_tables({name: variables["parameters"] for name, variables in expected.items()})
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

  worst: dict[str, Result] = {}
  looked_up = {name: np.zeros(ROWS, bool) for name in CASES}
  for rate in RATES:
    batch = {name: Batch.draw(draw, case, dim) for name, case in CASES.items()}
    inputs = {name: x.inputs for name, x in batch.items()}
    weights = {name: x.weights for name, x in batch.items()}
    cotangents = {name: x.cotangents for name, x in batch.items()}
    found = step(layer, optimizer, inputs, weights, cotangents)
    for name, case in CASES.items():
      ids, variables = batch[name].ids, expected[name]
      activations = lookup(variables["parameters"], ids, batch[name].gains)
      gradients = row_gradients(ids, batch[name].gains, cotangents[name])
      touched = np.unique(ids[ids >= 0])
      looked_up[name][touched] = True
      before = [x[touched] for x in variables.values()]
      after = case.step(before[0], gradients[touched], rate, *before[1:])
      for x, new in zip(variables.values(), after, strict=True):
        x[touched] = new
      errors = compare(
        [x[name] for x in found], activations, gradients, touched, variables, looked_up[name]
      )
      note, error = max(errors.items(), key=lambda item: item[1])
      if name not in worst or error > worst[name].error:
        worst[name] = Result(name, "", error, TOLERANCE[case.dtype], note)
  yield from worst.values()


def compare(
  found: Sequence[Any],
  activations: np.ndarray,
  gradients: np.ndarray,
  touched: np.ndarray,
  variables: Mapping[str, np.ndarray],
  looked_up: np.ndarray,
) -> dict[str, float]:
  """The errors of a table after a step, by the name of the compared quantity.

  `found` holds activations, `RowGrads` and variables; `touched` lists the rows that have gradients;
  `looked_up` marks the rows that any step has looked up: all others must not change at all.
  """
  ids, values = np.asarray(found[1].ids), np.asarray(found[1].values)
  order = np.argsort(ids)[: np.sum(ids < ROWS)]
  if ids[order].tolist() != touched.tolist():
    return {"other rows have gradients": math.inf}
  if set(found[2]) != set(variables):
    return {f"its slots are {sorted(set(found[2]) - {'parameters'})}": math.inf}
  parameters = np.asarray(found[2]["parameters"], np.float64)
  if (parameters != variables["parameters"])[~looked_up].any():
    return {"a row moved that was not looked up": math.inf}
  flat = np.asarray(found[0], np.float32).reshape(activations.shape)
  return {
    "activations": relative_error(flat, activations),
    "row gradients": relative_error(values[order], gradients[touched]),
    **{key: relative_error(found[2][key], x) for key, x in variables.items()},
  }
