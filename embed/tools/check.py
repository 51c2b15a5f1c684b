"""`python -m embed check`: compares this installation on these devices with the NumPy reference.

Lookups, row gradients and every registered optimizer, compiled as in a training step, on one device
and on all local devices: everything by "mod", and what differs there by the other strategies.

Ids, weights and gradients are multiples of 1/8, so that their products and sums are exact in any
order: only divisions, roots and powers are rounded. An error is the largest difference in an array
over the largest value in it, and may be

- 2^-16 in float32. A division or a root has an error of 2^-24 to 2^-22, on accelerators too; three
  steps of an optimizer have about ten of them, and subtract their results. A wrong constant or
  order has a larger error.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from embed.tools import reference

TOLERANCE = {"float32": 2.0**-16, "bfloat16": 2.0**-8}
ROWS = 37  # a prime number: no number of devices divides it
DIM = 16  # the fewest columns that SparseCores sum
BATCH, VALENCY, LENGTH = 13, 5, 3
RATES = (0.125, 0.0625, 0.25)
# Ways to step that all optimizers share, each with one that takes it.
WAYS_TO_STEP: dict[str, tuple[str, dict[str, Any]]] = {
  "common arguments": (
    "adagrad",
    {
      "clipvalue": 0.5,
      "weight_decay_factor": 0.125,
      "clip_weight_min": -0.5,
      "clip_weight_max": 1.0,
    },
  ),
}
OTHER_WAYS = ("sgd", "rowwise_adagrad", "adam")


def optimizers() -> dict[str, tuple[str, dict[str, Any]]]:
  """The optimizers to check, by what is printed: their names and arguments.

  All registered ones that train, with the arguments of their line in the reference, and
  `WAYS_TO_STEP`.
  """
  names = [name for name, make in named().items() if make().equation is not None]
  unknown = [name for name in names if name not in reference.RULES]
  if unknown:
    raise LookupError(f"{', '.join(unknown)}: no line in RULES of embed/tools/reference.py")
  return {name: (name, dict(reference.RULES[name].example)) for name in names} | WAYS_TO_STEP


@dataclasses.dataclass(frozen=True)
class Result:
  """One comparison: its subject, its place and its error.

  Args:
    what: such as "lookup, mean" or "adagrad".
    where: such as "one device".
    error: the largest difference over the largest value, infinite if they cannot be compared.
    tolerance: the largest error that passes.
    note: the reason of a failure that the error does not tell.

  >>> Result("adagrad", "one device", error=1e-7, tolerance=1e-5).ok
  True
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
  cores = ", rows by SparseCores" if any(stack.sparse_core for stack in stacks) else ""
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
  """Draws ids `[BATCH, VALENCY]` of Zipf's law, with padding, an empty bag and unused rows."""
  ids = np.minimum(draw.zipf(1.3, (BATCH, VALENCY)) - 1, ROWS - 3)
  ids[draw.random(ids.shape) < 0.25] = -1
  ids[0] = -1
  return ids.astype(np.int32)


def as_given(inputs: Any, max_valency: int | None = None) -> tuple[Any, Any]:
  """Ids and weights as a layer takes them, of an input of the reference.

  Args:
    inputs: of the reference.
    max_valency: of a ragged one.
  """
  values, weights = np.asarray(inputs.values), inputs.weights
  if isinstance(inputs, reference.DenseIds):
    return values, weights
  if isinstance(inputs, reference.PaddedIds):
    wrap: Callable[[Any], Any] = embed.Padded
  elif isinstance(inputs, reference.RaggedIds):
    wrap = lambda v: embed.Ragged(v, np.asarray(inputs.row_splits), max_valency)
  else:
    wrap = lambda v: embed.Sparse(np.asarray(inputs.indices), v, tuple(inputs.dense_shape))
  return wrap(values), None if weights is None else wrap(np.asarray(weights, np.float32))


# --- lookups and row gradients -------------------------------------------------------------------


Inputs = dict[str, dict[str, Any]]  # by table and kind
KINDS = ("padded", "ragged", "max_valency", "sparse")


def lookup_inputs(draw: np.random.Generator, brief: bool) -> Inputs:
  inputs: Inputs = {}

  def of_kinds(kinds: Sequence[str], weights: np.ndarray | None = None) -> dict[str, Any]:
    ids = _bags(draw)
    kind_of = lambda name: "ragged" if name == "max_valency" else name
    return {name: reference.as_kind(kind_of(name), ids, weights) for name in kinds}

  for combiner in config_lib.COMBINERS:
    inputs[combiner] = of_kinds(KINDS if combiner == "mean" and not brief else KINDS[:1])
    weights = np.abs(_eighths(draw, (BATCH, VALENCY)))  # some are 0
    inputs[f"{combiner}, weights"] = of_kinds(KINDS, weights)
  inputs["mean, bfloat16"] = of_kinds(KINDS[:1])
  inputs["sequences"] = of_kinds(KINDS)
  inputs["single ids"] = {"dense": reference.DenseIds(_bags(draw)[:, 1])}
  return inputs


def _check_lookups(place: dict[str, Any]) -> Iterator[Result]:
  """Compares lookups and row gradients, all from one compiled function."""
  draw, dim = np.random.default_rng(0), place.get("dim", DIM)
  features: dict[str, Any] = {}
  inputs: dict[str, Any] = {}
  weights: dict[str, Any] = {}
  cotangents: dict[str, np.ndarray] = {}
  expected: dict[str, dict[str, reference.Occurrences]] = {}  # by table and feature
  tables: dict[str, np.ndarray] = {}
  for name, kinds in lookup_inputs(draw, _is_brief(place)).items():
    combiner = next((c for c in config_lib.COMBINERS if name.startswith(c)), "mean")
    length = LENGTH if name == "sequences" else 0
    dtype = jnp.bfloat16 if "bfloat16" in name else np.float32
    table = embed.TableConfig(ROWS, dim, combiner=combiner, name=name, dtype=dtype)
    tables[name], expected[name] = _eighths(draw, (ROWS, dim), 16), {}
    for kind, x in kinds.items():
      feature = f"{name}, {kind}"
      features[feature] = embed.FeatureConfig(table, max_sequence_length=length)
      inputs[feature], weights[feature] = as_given(x, VALENCY if kind == "max_valency" else None)
      occ = reference.occurrences(reference.Feature(combiner, length), x)
      expected[name][feature] = occ
      cotangents[feature] = _eighths(draw, (*occ.shape, dim))
  layer = _make(features, place, embed.sgd(0.1))
  layer.load_tables(tables)

  def loss(layer, inputs, weights, cotangents):
    activations = layer(inputs, weights)
    product = lambda a, c: jnp.sum(a.astype(jnp.float32) * c)
    products = jax.tree.map(product, activations, cotangents)
    return sum(products.values(), jnp.zeros(())), activations

  gradients = nnx.jit(embed.value_and_grad(loss, has_aux=True))
  (_, activations), grads = gradients(layer, inputs, weights, cotangents)
  for name, occurrences in expected.items():
    tolerance = TOLERANCE["bfloat16" if "bfloat16" in name else "float32"]
    errors = [
      relative_error(activations[feature], reference.lookup(tables[name], occ))
      for feature, occ in occurrences.items()
    ]
    yield Result(f"lookup, {name}", "", max(errors), tolerance)
  for name, occurrences in expected.items():
    pairs = [reference.occurrence_gradients(o, cotangents[f]) for f, o in occurrences.items()]
    ids, values = (np.concatenate(x) for x in zip(*pairs, strict=True))
    yield compare_rows(f"rows, {name}", grads.rows[name], reference.row_gradients(ids, values))


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

  expected = {
    name: reference.initial_variables(kind, tables[name], **config)
    for name, (kind, config) in cases.items()
  }
  looked_up = np.zeros(ROWS, bool)
  for rate in RATES:
    ids = _bags(draw)
    looked_up[ids[ids >= 0]] = True
    cotangents = {name: _eighths(draw, (BATCH, dim)) for name in cases}
    step(layer, optimizer, dict.fromkeys(cases, embed.Padded(ids)), cotangents)
    occ = reference.occurrences(reference.Feature("sum"), reference.PaddedIds(ids))
    for name, (kind, config) in cases.items():
      rows, gradients = reference.occurrence_gradients(occ, cotangents[name])
      expected[name] = reference.apply_rows(kind, expected[name], rows, gradients, rate, **config)
  actual = layer.variables
  for name in cases:
    yield compare_variables(name, actual[name], expected[name], tables[name], looked_up)


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
