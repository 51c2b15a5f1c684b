"""The update of rows on GPUs, interpreted on CPU, and lowered for a GPU that is not there."""

import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import pytest
from flax import nnx

import embed
from embed.engine import mesh, rows, update
from embed.engine.grads import GradRows
from embed.engine.stack import Layout, StackSpec
from embed.kernels import gpu

OPTIMIZERS = optimizer_cases.STEPS | {
  "adagrad_momentum": embed.adagrad_momentum(0.125, momentum=0.5, exponent=3.0),
  "ftrl": embed.ftrl(0.125, l1_regularization_strength=0.125),
  "adam": embed.adam(0.125, bias_correction=True),
  "optax": embed.from_optax(optax.adam(0.125)),
  "optax, per row": embed.from_optax(optax.lamb(0.125), per_row=True),
}
DIMS = (1, 3, 16, 64, 100, 128, 1024)
IDS = ("power law", "one id", "all distinct", "empty", "out of range")
SIZE = 170

by_kernel = jax.jit(functools.partial(gpu.step_runs, interpret=True), static_argnums=(0, 4))
by_xla = jax.jit(update.step_table, static_argnums=0)


def stack_of(optimizer, dim, dtype="float32", rounded=False):
  return StackSpec(
    "t", ("t",), Layout((SIZE,)), dim, jnp.dtype(dtype), optimizer, stochastic_rounding=rounded
  )


def draw(stack, kind, weighted):
  """Rows, slots and gradients, whose products and sums are exact in any order."""
  rng = np.random.default_rng(0)
  eighths = lambda *shape: (rng.integers(-8, 9, shape) / 8).astype(np.float32)
  arrays = {"parameters": eighths(SIZE, stack.dim).astype(stack.dtype)}
  shape = lambda slot: (SIZE,) if slot.per_row else (SIZE, stack.dim)
  arrays |= {k: np.full(shape(slot), slot.initial, slot.dtype) for k, slot in stack.slots.items()}
  parts = []
  for bags, length in ((24, 3), (30, 1), (6, 8)) if weighted else ((36, 4),):
    shape = (bags, length)
    ids = {
      "power law": lambda shape: rng.zipf(1.2, shape) % SIZE,
      "one id": lambda shape: np.full(shape, 7),
      "all distinct": lambda shape: rng.permutation(SIZE + 9)[: np.prod(shape)].reshape(shape),
      "empty": lambda shape: np.full(shape, -1),
      "out of range": lambda shape: rng.choice([-5, 3, 9, SIZE, SIZE + 1, 2**31 - 1], shape),
    }[kind](shape)
    gains = eighths(*shape) if weighted else None
    parts.append(GradRows(eighths(bags, stack.dim), ids.astype(np.int32), gains))
  return arrays, parts


def check(name, dim, kind, weighted, dtype, rounded=False):
  stack = stack_of(OPTIMIZERS[name], dim, dtype, rounded)
  arrays, parts = draw(stack, kind, weighted)
  scalars = update.StepScalars.at(stack, 5)
  is_distinct = kind == "all distinct" and not weighted
  found, again = (by_kernel(stack, scalars, arrays, parts, is_distinct) for _ in range(2))
  tolerance = {"rtol": 2.0**-7} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
  assert (np.asarray(found["parameters"]) != arrays["parameters"]).any() == (kind != "empty")
  for key, x in by_xla(stack, scalars, arrays, parts).items():
    assert found[key].dtype == x.dtype
    as_float = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(as_float(found[key]), as_float(x), err_msg=key, **tolerance)
    np.testing.assert_array_equal(as_float(found[key]), as_float(again[key]), key)


def test_a_step_by_hand():
  """Row 1 in all but one of 20 positions, which are three blocks, and row 3 in the other."""
  ids = np.ones((20, 1), np.int32)
  ids[5], ids[6] = 3, 4  # 4 is no row
  grads = np.tile(np.array([[1.0, 2.0]], np.float32), (20, 1))
  stack = StackSpec("t", ("t",), Layout((4,)), 2, np.dtype(np.float32), embed.sgd(0.5))
  arrays = {"parameters": np.zeros((4, 2), np.float32)}
  new = by_kernel(stack, update.StepScalars.at(stack, 0), arrays, [GradRows(grads, ids)])
  np.testing.assert_array_equal(new["parameters"], [[0, 0], [-9, -18], [0, 0], [-0.5, -1]])


def ci(*cases):
  return [pytest.param(case, marks=pytest.mark.ci) for case in cases]


@pytest.mark.parametrize(
  "case",
  [
    ("row", 3, "power law", True, "float32"),
    ("both", 4, "out of range", True, "float32"),
    ("sum", 4, "one id", False, "float32"),
    *ci(("summed", 2, "all distinct", False, "bfloat16"), ("row", 4, "empty", True, "float32")),
    *ci(*((name, 5, "power law", True, "float32") for name in OPTIMIZERS)),
    *ci(*(("row", dim, "power law", False, "float32") for dim in DIMS)),
  ],
  ids=str,
)
def test_kernels_step_as_xla_does(case):
  """One factor at a time."""
  check(*case)


def test_rows_are_rounded_with_the_same_noise():
  check("elements", 4, "power law", True, "bfloat16", rounded=True)


@pytest.mark.weekly
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", DIMS)
def test_all_ids_and_dtypes(name, dim):
  for kind, weighted, dtype in itertools.product(IDS, (False, True), ("float32", "bfloat16")):
    check(name, dim, kind, weighted, dtype)
  jax.clear_caches()  # a process cannot map the code of all of them


def test_a_gradient_that_is_not_finite_stays_in_its_row():
  stack = stack_of(OPTIMIZERS["row"], 4)
  arrays, (part,) = draw(stack, "power law", False)
  grads, scalars = part.grads.copy(), update.StepScalars.at(stack, 0)
  clean = by_kernel(stack, scalars, arrays, [GradRows(grads, part.ids)])
  grads[0], grads[1] = np.nan, np.inf
  found = by_kernel(stack, scalars, arrays, [GradRows(grads, part.ids)])
  others = np.setdiff1d(np.arange(SIZE), part.ids[:2])
  for name, x in found.items():
    np.testing.assert_array_equal(x[others], clean[name][others])
    assert not np.isfinite(np.asarray(x)[part.ids[:2]]).any()


# --- lowered for a GPU ----------------------------------------------------------------------------

H100 = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")


@pytest.fixture
def on_h100():
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=H100)
  gpu.is_supported.cache_clear()
  with jax.sharding.use_abstract_mesh(mesh):
    yield
  gpu.is_supported.cache_clear()


def lowered(stack):
  arrays, parts = draw(stack, "power law", True)
  step = jax.jit(functools.partial(gpu.step, stack, is_distinct=False), donate_argnums=1)
  traced = step.trace(update.StepScalars.at(stack, 1), arrays, parts)
  return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ci("row", *OPTIMIZERS))
@pytest.mark.parametrize("dims", [(3, 4, 128), pytest.param(DIMS, marks=pytest.mark.weekly)])
def test_every_optimizer_is_lowered(name, dims, on_h100):
  """It writes rows and slots in place, and has no array of a row for each id."""
  for dim, dtype in itertools.product(dims, ("float32", "bfloat16")):
    if name in ("both", "optax, per row") and dim in (3, 100):
      continue  # these are never padded
    stack = stack_of(OPTIMIZERS[name], dim, dtype, rounded=dtype == "bfloat16")
    text = lowered(stack)
    assert text.count("output_operand_alias<") == 1 + len(stack.slots)
    assert not re.search(rf"tensor<(150|152)x{dim}x(f32|bf16)", text)  # 150 ids fill 19 blocks of 8


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_what_triton_cannot_compile_is_left_to_xla(on_h100):
  """A sort in an equation, and a mean over a row that is no power of two wide."""
  sorts = lambda g, w, s, lr: (w - lr * jnp.sort(g, axis=-1), s)
  means = lambda g, w, s, lr: (w - lr * g / (1 + jnp.mean(g * g, -1, keepdims=True)), s)
  for equation, dim, is_supported in ((sorts, 4, False), (means, 5, False), (means, 4, True)):
    text = lowered(stack_of(embed.custom_optimizer(equation), dim))
    assert ("_step_kernel" in text) == is_supported


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_plan_for_a_gpu_takes_the_kernels(on_h100, monkeypatch):
  """For two tables of a stack, whose gradients are summed before they are clipped."""
  device = types.SimpleNamespace(platform="gpu", device_kind=H100.device_kind)
  monkeypatch.setattr(mesh.Placement, "device", device)
  features = [embed.FeatureConfig(embed.TableConfig(40, 8, name=name)) for name in "ab"]
  layer = embed.SparseEmbed(features, embed.adam(), rngs=nnx.Rngs(0))
  optimizer = embed.Optimizer(layer, optax.identity())

  @nnx.jit
  def step(layer, optimizer, ids):
    _, grads = embed.value_and_grad(lambda layer, ids: sum(x.sum() for x in layer(ids)))(layer, ids)
    optimizer.update(layer, embed.clip_by_global_norm(grads, 1.0))

  traced = step.trace(layer, optimizer, [embed.to_padded([[1, 2], [3]]), np.array([4, 5])])
  assert "_step_kernel" in traced.lower(lowering_platforms=("cuda",)).as_text()
  sent = rows.take(*layer.spec.stacks.values(), jnp.ones((80, 8), jnp.bfloat16), jnp.array([1]))
  assert sent.dtype == jnp.bfloat16  # as it is stored
