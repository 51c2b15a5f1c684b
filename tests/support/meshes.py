"""A model on eight simulated devices, as one compiled function: what the tests of sharding share.

Ids, weights and gradients are arguments of the compiled step, so that a test can try many of them
for one compilation, and the state goes in and comes out, so that every try starts from the same.
"""

import math
from typing import Any, NamedTuple

import harness
import jax
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import embed


def make_mesh(kind="auto", shape=(8,), names=("data",)):
  types = ({"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind],) * len(names)
  devices = jax.devices()[: math.prod(shape)]
  return jax.make_mesh(shape, names, axis_types=types, devices=devices)


@embed.row_wise
def sixteenths(key, shape, dtype):
  """Rows of which sums are exact."""
  return (jax.random.randint(key, shape, -16, 17) / 16).astype(dtype)


class Rows(NamedTuple):
  ids: Any
  values: Any


class Outcome(NamedTuple):
  """What a training step did; `rows` by table, None if they were not asked for."""

  activations: Any
  rows: dict[str, Rows] | None
  variables: dict[str, dict[str, Any]]
  report: dict[str, Any]


class World(NamedTuple):
  """A model as it was made, and `step(state, features, weights, cotangents)`."""

  model: harness.Model
  state: Any
  step: Any

  def run(self, batches):
    """The outcomes of some steps from the initial state."""
    state, outcomes = self.state, []
    for batch in batches:
      state, outcome = self.step(state, *batch)
      outcomes.append(jax.tree.map(np.asarray, outcome))
    return outcomes


def make_world(features, optimizer=None, *, rows=False, gradients=harness.value_and_grad, **where):
  """A model and its training step, compiled at the first call of each shape.

  Args:
    features: the feature config.
    optimizer: of the tables that have none.
    rows: whether the step returns the row gradients.
    gradients: `(model, features, weights, cotangents)` to `((loss, activations), grads)`.
    **where: arguments of `SparseEmbed`: mesh, axis and sharding, or mesh and plan.
  """
  if where.get("plan") is not None:
    model = harness.Model(plan=where["plan"])
  else:
    model = harness.Model(features, optimizer, **where)
  updater = embed.Optimizer(model, optax.sgd(0.0))
  graphdef, state = nnx.split((model, updater))
  if where.get("mesh") is not None:
    state = on_mesh(where["mesh"], state)  # where a step leaves it: it is compiled once

  @jax.jit
  def step(state, features, weights, cotangents):
    model, updater = nnx.merge(graphdef, state)
    (_, activations), grads = gradients(model, features, weights, cotangents)
    updater.update(model, grads)
    found = {name: grads.rows[f"embed/{name}"] for name in model.embed.tables} if rows else None
    outcome = Outcome(
      activations,
      found and {name: Rows(r.ids, r.values) for name, r in found.items()},
      model.embed.variables,
      model.embed.report.get_value(),
    )
    return nnx.state((model, updater)), outcome

  return World(model, state, step)


def on_mesh(mesh, state):
  """With everything that is on one device copied to all."""
  put = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
  return jax.tree.map(lambda x: x if len(x.sharding.device_set) > 1 else put(x), state)


def assert_close(found, wanted, scale=1e-6):
  """Equal but for the order of sums: to some units in the last place of the largest value."""

  def check(path, a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    atol = scale * max(1.0, np.max(np.abs(b), initial=0.0))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=jax.tree_util.keystr(path))

  jax.tree_util.tree_map_with_path(check, found, wanted)


def assert_equal(found, wanted):
  """Bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def assert_same_rows(found, wanted, sizes, scale=1e-6):
  """The same rows are touched, each listed once, with the same gradients."""
  for name, size in sizes.items():
    a, b = harness.rows(found[name], size), harness.rows(wanted[name], size)
    largest = max((float(np.abs(g).max()) for g in b.values()), default=0.0)
    harness.assert_rows(a, b, rtol=1e-5, atol=scale * max(1.0, largest))


def assert_same_outcomes(found, wanted, sizes):
  """Activations, row gradients and everything stored, step by step."""
  for a, b in zip(found, wanted, strict=True):
    assert_close(a.activations, b.activations)
    assert_close(a.variables, b.variables)
    assert a.report["dropped_ids"] == b.report["dropped_ids"]
    if a.rows is not None:
      assert_same_rows(a.rows, b.rows, sizes)


# --- random inputs --------------------------------------------------------------------------------


def ids(shape, size, low=-1):
  """Every row, and padding."""
  return arrays(np.int32, shape, elements=st.integers(low, size - 1))


def fractions(shape, low=-8, high=8, unit=8):
  """Values of which sums are exact in float32."""
  whole = arrays(np.int32, shape, elements=st.integers(low, high))
  return whole.map(lambda x: (x / unit).astype(np.float32))


def normal(seed, shapes):
  """Values of which sums are not exact."""
  draw = np.random.default_rng(seed)
  return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
