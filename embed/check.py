"""`python -m embed check`: compares this installation on these devices with NumPy.

Lookups, row gradients and every registered optimizer, compiled as in a training step, on one device
and on all local devices: everything by "mod", and what differs there by the other strategies.

A lookup is a matrix product here, `activations = M @ table`, and a row's gradient is a row of
`M.T @ cotangents`, in float64. An optimizer's equation steps the touched rows one operation at a
time; the library's tests hold the equations to TensorFlow's.

Ids, weights and gradients are multiples of 1/8, so that their products and sums are exact in any
order: only divisions, roots and powers are rounded. An error is the largest difference in an array
over the largest value in it, and may be

- 2^-16 in float32. A division or a root has an error of 2^-24 to 2^-22, on accelerators too; three
  steps of an optimizer have about ten of them, and subtract their results. A wrong sum or order has
  a larger error.
- 2^-8 in bfloat16, which keeps 8 bits: one rounding has an error of up to 2^-9.

The environment variables that decide how tables are stored apply: with `SPARSE_EMBED_PACKED=1`, all
tables that can be packed are; with `SPARSE_EMBED_SPARSE_CORES=1`, SparseCores read and write the
rows that they can, and rows of 128 columns are compared as well.
"""

import dataclasses
import importlib.metadata
import math
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import embed
from embed import config as config_lib
from embed.engine import backends
from embed.kernels import sparse_core
from embed.optimizers import OPTIMIZERS, named
from embed.planning import Plan

TOLERANCE = {"float32": 2.0**-16, "bfloat16": 2.0**-8}
ROWS = 37  # a prime number: no number of devices divides it
DIM = 16  # the fewest columns that SparseCores sum
BATCH, VALENCY, LENGTH = 13, 5, 3
RATES = (0.125, 0.0625, 0.25)
# Arguments with which every term of an equation shows, by optimizer.
EXAMPLES: dict[str, dict[str, Any]] = {
  "adagrad_momentum": {"momentum": 0.5, "epsilon": 0.01, "exponent": 3.0},
  "ftrl": {"l1_regularization_strength": 0.125, "beta": 0.5},
  "adam": {"epsilon": 1e-3},
}
COMMON = {
  "clipvalue": 0.5,
  "weight_decay_factor": 0.125,
  "clip_weight_min": -0.5,
  "clip_weight_max": 1.0,
}
OTHER_WAYS = ("sgd", "rowwise_adagrad", "adam")


def optimizers() -> dict[str, tuple[str, dict[str, Any]]]:
  """Returns the names and arguments of the optimizers to check, by what is printed."""
  names = [name for name, make in named().items() if make().equation is not None]
  found = {name: (name, EXAMPLES.get(name, {})) for name in names}
  return found | {"common arguments": ("adagrad", COMMON)}


@dataclasses.dataclass(frozen=True)
class Result:
  """One comparison: its subject, its place and its error.

  Args:
    what: such as "lookup, mean" or "adagrad".
    where: such as "one device".
    error: the largest difference over the largest value, infinite if they cannot be compared.
    tolerance: the largest error that passes.
    note: the reason of a failure that the error does not tell.
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
  """Prints a line for each check; returns the exit status, 1 if any of them fails."""
  print(header(), flush=True)
  start, results = time.time(), []
  for result in run():
    results.append(result)
    verdict = "ok" if result.ok else f"FAILED {result.note}".rstrip()
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
  """The head of a report: versions, backend and devices."""
  packages = ("sparse-embed", "jax", "jaxlib", "flax", "optax", "numpy")
  versions = ", ".join(f"{name} {_version(name)}" for name in packages)
  devices = jax.local_devices()
  tables = [embed.FeatureConfig(embed.TableConfig(ROWS, dim)) for dim in (DIM, 128)]
  stacks = Plan.uniform(tables, embed.sgd(0.1), None, "data", "mod").stacks().values()
  packed = ", tables packed" if any(stack.is_packed for stack in stacks) else ""
  cores = ", rows by SparseCores" if any(stack.back_end for stack in stacks) else ""
  return (
    f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {versions}\n"
    f"backend {jax.default_backend()}: {len(devices)} x {devices[0].device_kind}{packed}{cores}\n\n"
    f"{'what':<25}  {'where':<22}  {'error':>8}"
  )


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return embed.__version__ if package == "sparse-embed" else "?"


def run() -> Iterator[Result]:
  """Checks everything in all of `places()`, one result after the other.

  A check that raises is a failed result, with the error as its note.
  """
  for name, place in places().items():
    yield from _guarded("lookups", name, _check_lookups, place)
    yield from _guarded("optimizers", name, _check_optimizers, place)


def places() -> dict[str, dict[str, Any]]:
  """Arguments of `_make` by name: of one device, and of all local ones."""
  arguments: dict[str, dict[str, Any]] = {"one device": {}}
  if backends.is_on(sparse_core.SWITCH, default=False):
    arguments["one device, 128 columns"] = {"dim": 128}  # a kernel of its own
  devices = jax.local_devices()
  if len(devices) > 1:
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    for strategy in ("mod", "div", "replicated"):
      arguments[f"{len(devices)} devices, {strategy}"] = {"mesh": mesh, "sharding": strategy}
  return arguments


def _make(features: Any, place: Mapping[str, Any], optimizer: Any = None) -> embed.SparseEmbed:
  mesh, strategy = place.get("mesh"), place.get("sharding", "mod")
  return embed.SparseEmbed(features, optimizer, rngs=nnx.Rngs(0), mesh=mesh, sharding=strategy)


Check = Callable[[dict[str, Any]], Iterator[Result]]


def _is_brief(place: Mapping[str, Any]) -> bool:
  return place.get("sharding", "mod") != "mod"


def _guarded(what: str, where: str, check: Check, place: dict[str, Any]) -> Iterator[Result]:
  try:
    for result in check(place):
      yield dataclasses.replace(result, where=where)
  except Exception as error:  # the other checks still run
    traceback.print_exc()
    message = str(error).split("\n")[0]
    yield Result(what, where, math.inf, note=f"{type(error).__name__}: {message}")


def relative_error(actual: Any, expected: Any) -> float:
  """The largest difference over the largest value; infinite for other shapes and for NaN."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  if actual.shape != expected.shape:
    return math.inf
  largest = np.max(np.abs(expected), initial=0.0)
  error = np.max(np.abs(actual - expected), initial=0.0) / (largest or 1.0)
  return float(error) if np.isfinite(error) else math.inf


# --- inputs --------------------------------------------------------------------------------------


def _eighths(draw: np.random.Generator, shape: tuple[int, ...], most: int = 8) -> np.ndarray:
  return (draw.integers(-most, most + 1, shape) / 8).astype(np.float32)


def _bags(draw: np.random.Generator) -> np.ndarray:
  """Draws ids `[BATCH, VALENCY]` of Zipf's law: bags of 0 to VALENCY ids, and unused rows."""
  ids = np.minimum(draw.zipf(1.3, (BATCH, VALENCY)) - 1, ROWS - 3)
  lengths = draw.integers(0, VALENCY + 1, (BATCH, 1))
  lengths[0] = 0
  return np.where(np.arange(VALENCY) < lengths, ids, -1).astype(np.int32)


def as_kind(kind: str, ids: np.ndarray, values: np.ndarray) -> Any:
  """Lays values `[BATCH, VALENCY]`, the ids or their weights, out as an input of this kind."""
  if kind == "dense":
    return values[:, 0]
  if kind == "padded":
    return embed.Padded(values)
  used = ids >= 0
  if kind == "sparse":
    return embed.Sparse(np.argwhere(used).astype(np.int32), values[used], values.shape)
  splits = np.append(0, np.cumsum(used.sum(1))).astype(np.int32)
  most = VALENCY if kind == "max_valency" else None
  return embed.Ragged(np.append(values[used], values[~used]), splits, most)  # with a tail


def lookup_matrix(
  ids: np.ndarray, weights: np.ndarray, combiner: str, length: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns M `[positions, ROWS]` of `activations = M @ table`, and the rows that are looked up.

  A sequence has `length` positions for each bag, and is not combined.
  """
  if length:
    ids, weights = ids[:, :length].reshape(-1, 1), weights[:, :length].reshape(-1, 1)
  weights = np.where(ids >= 0, weights, 0.0)
  norms = {"sum": 1.0, "mean": weights.sum(1), "sqrtn": np.sqrt((weights**2).sum(1))}
  norm = np.broadcast_to(norms[combiner], len(ids))[:, None]
  gains = np.divide(weights, norm, out=np.zeros(ids.shape), where=norm != 0)
  matrix = np.zeros((len(ids), ROWS))
  np.add.at(matrix, (np.arange(len(ids))[:, None], ids), gains)  # padding, -1, adds 0
  return matrix, np.unique(ids[ids >= 0])


# --- lookups and row gradients -------------------------------------------------------------------

KINDS = ("padded", "ragged", "max_valency", "sparse")


class Lookup(NamedTuple):
  """Ids of one table, looked up as inputs of several kinds."""

  kinds: tuple[str, ...]
  ids: np.ndarray  # [BATCH, VALENCY]
  weights: np.ndarray | None = None
  combiner: str = "mean"
  length: int = 0
  dtype: str = "float32"

  def matrix(self) -> tuple[np.ndarray, np.ndarray]:
    ids = self.ids[:, :1] if "dense" in self.kinds else self.ids
    weights = np.ones(ids.shape) if self.weights is None else self.weights
    return lookup_matrix(ids, weights, self.combiner, self.length)


def lookups(draw: np.random.Generator, brief: bool) -> dict[str, Lookup]:
  """Returns what to look up, by what is printed."""
  found = {}
  for combiner in config_lib.COMBINERS:
    kinds = KINDS if combiner == "mean" and not brief else KINDS[:1]
    found[combiner] = Lookup(kinds, _bags(draw), combiner=combiner)
    weights = np.abs(_eighths(draw, (BATCH, VALENCY)))  # some are 0
    found[f"{combiner}, weights"] = Lookup(KINDS, _bags(draw), weights, combiner)
  found["mean, bfloat16"] = Lookup(KINDS[:1], _bags(draw), dtype="bfloat16")
  found["sequences"] = Lookup(KINDS, _bags(draw), length=LENGTH)
  found["single ids"] = Lookup(("dense",), _bags(draw))
  return found


def _check_lookups(place: dict[str, Any]) -> Iterator[Result]:
  """Compares lookups and row gradients, all from one compiled function."""
  draw, dim = np.random.default_rng(0), place.get("dim", DIM)
  cases = lookups(draw, _is_brief(place))
  features: dict[str, Any] = {}
  inputs: dict[str, Any] = {}
  weights: dict[str, Any] = {}
  cotangents: dict[str, np.ndarray] = {}
  tables = {name: _eighths(draw, (ROWS, dim), 16) for name in cases}
  for name, case in cases.items():
    dtype = jnp.dtype(case.dtype)
    table = embed.TableConfig(ROWS, dim, combiner=case.combiner, name=name, dtype=dtype)
    shape = (BATCH, case.length, dim) if case.length else (BATCH, dim)
    for kind in case.kinds:
      feature = f"{name}, {kind}"
      features[feature] = embed.FeatureConfig(table, max_sequence_length=case.length)
      inputs[feature] = as_kind(kind, case.ids, case.ids)
      weights[feature] = case.weights
      if case.weights is not None:
        weights[feature] = as_kind(kind, case.ids, case.weights)
      cotangents[feature] = _eighths(draw, shape)
  layer = _make(features, place, embed.sgd(0.1))
  layer.load_tables(tables)

  def loss(layer, inputs, weights, cotangents):
    activations = layer(inputs, weights)
    product = lambda a, c: jnp.sum(a.astype(jnp.float32) * c)
    products = jax.tree.map(product, activations, cotangents)
    return sum(products.values(), jnp.zeros(())), activations

  gradients = nnx.jit(embed.value_and_grad(loss, has_aux=True))
  (_, activations), grads = gradients(layer, inputs, weights, cotangents)
  for name, case in cases.items():
    matrix, _ = case.matrix()
    wanted = (matrix @ tables[name]).reshape(cotangents[f"{name}, {case.kinds[0]}"].shape)
    errors = [relative_error(activations[f"{name}, {kind}"], wanted) for kind in case.kinds]
    yield Result(f"lookup, {name}", "", max(errors), TOLERANCE[case.dtype])
  for name, case in cases.items():
    matrix, touched = case.matrix()
    total = np.sum([cotangents[f"{name}, {kind}"].reshape(-1, dim) for kind in case.kinds], axis=0)
    sums = matrix.T @ total
    yield compare_rows(f"rows, {name}", grads.rows[name], {row: sums[row] for row in touched})


def compare_rows(what: str, rows: embed.RowGrads, expected: Mapping[int, np.ndarray]) -> Result:
  ids, values = np.asarray(rows.ids), np.asarray(rows.values)
  order = np.argsort(ids)[: np.sum(ids < ROWS)]
  if ids[order].tolist() != sorted(expected):
    return Result(what, "", math.inf, note="other rows were touched")
  return Result(
    what, "", relative_error(values[order], [expected[row] for row in sorted(expected)])
  )


# --- optimizers ----------------------------------------------------------------------------------


def _check_optimizers(place: dict[str, Any]) -> Iterator[Result]:
  cases = optimizers()
  if _is_brief(place):
    cases = {name: cases[name] for name in OTHER_WAYS}
  draw, dim = np.random.default_rng(1), place.get("dim", DIM)
  rates = np.array(RATES, np.float32)
  schedule = lambda step: jnp.asarray(rates)[step]
  features, tables = {}, {}
  for name, (kind, config) in cases.items():
    make = OPTIMIZERS[kind]
    rule = make(learning_rate=schedule, **config)
    table = embed.TableConfig(ROWS, dim, optimizer=rule, combiner="sum", name=name)
    features[name], tables[name] = embed.FeatureConfig(table), _eighths(draw, (ROWS, dim), 16)
  layer = _make(features, place)
  layer.load_tables(tables)
  optimizer = embed.Optimizer(layer, optax.identity())

  def loss(layer, inputs, cotangents):
    products = jax.tree.map(lambda a, c: jnp.sum(a * c), layer(inputs), cotangents)
    return sum(products.values(), jnp.zeros(()))

  @nnx.jit
  def step(layer, optimizer, inputs, cotangents):
    optimizer.update(layer, embed.value_and_grad(loss)(layer, inputs, cotangents)[1])

  expected = layer.variables
  looked_up = np.zeros(ROWS, bool)
  for rate in RATES:
    ids = _bags(draw)
    matrix, touched = lookup_matrix(ids, np.ones(ids.shape), "sum")
    looked_up[touched] = True
    cotangents = {name: _eighths(draw, (BATCH, dim)) for name in cases}
    step(layer, optimizer, dict.fromkeys(cases, embed.Padded(ids)), cotangents)
    for name, feature in features.items():
      gradients = (matrix.T @ cotangents[name])[touched]
      expected[name] = stepped(feature.table.optimizer, expected[name], touched, gradients, rate)
  actual = layer.variables
  for name in cases:
    yield compare_variables(name, actual[name], expected[name], tables[name], looked_up)


def stepped(
  optimizer: embed.RowOptimizer,
  variables: Mapping[str, Any],
  touched: np.ndarray,
  gradients: np.ndarray,
  rate: float,
) -> dict[str, np.ndarray]:
  """Returns variables after one step of rows with these summed gradients `[N, dim]`."""
  variables = {key: np.array(x) for key, x in variables.items()}
  slots = {key: jnp.asarray(x[touched]) for key, x in variables.items()}
  g = _clip(gradients, *(optimizer.clipvalue or (None, None)))
  w = slots.pop("parameters") * (1 - (optimizer.weight_decay_factor or 0.0))
  assert optimizer.equation is not None
  w, slots = optimizer.equation(jnp.asarray(g, jnp.float32), w, slots, jnp.float32(rate))
  clipped = _clip(w, optimizer.clip_weight_min, optimizer.clip_weight_max)
  for key, x in {"parameters": clipped, **slots}.items():
    variables[key][touched] = x
  return variables


def _clip(x: Any, low: float | None, high: float | None) -> np.ndarray:
  return np.clip(x, -np.inf if low is None else low, np.inf if high is None else high)


def compare_variables(
  name: str,
  actual: Mapping[str, Any],
  expected: Mapping[str, np.ndarray],
  initial: np.ndarray,
  looked_up: np.ndarray,
) -> Result:
  if set(actual) != set(expected):
    return Result(name, "", math.inf, note=f"its slots are {sorted(set(actual) - {'parameters'})}")
  moved = (np.asarray(actual["parameters"]) != initial).any(axis=1)
  if moved[~looked_up].any():
    return Result(name, "", math.inf, note="a row moved that was not looked up")
  return Result(name, "", max(relative_error(actual[key], expected[key]) for key in expected))
