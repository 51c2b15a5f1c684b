"""Compiled kernels against XLA's own operations: lookups and updates of every kind of input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optimizer_cases import STEPS

import embed
from embed.engine import exchange, lookup, update
from embed.engine.bags import Bags
from embed.engine.grads import GradRows
from embed.engine.stack import Layout, StackSpec
from embed.kernels import cpu as cpu_kernels

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.ci]


def text_of(function, *args):
  return jax.jit(function).lower(*args).as_text()


# --- lookups --------------------------------------------------------------------------------------


def random_bags(rng, size, bags, length, gains, ragged):
  """Ids with duplicates and padding, also far outside of the table."""
  shape = (bags * length,) if ragged else (bags, length)
  ids = rng.choice([-(2**31), -1, size, 2**31 - 1, *range(size)], shape).astype(np.int32)
  if ragged:
    segments = jnp.asarray(rng.integers(0, bags + 1, shape), jnp.int32)
    gains = jnp.asarray(rng.normal(size=shape), jnp.float32) if gains else None
    return Bags(jnp.asarray(ids), gains, segments, (bags,))
  of = {"none": None, "bag": (bags, 1), "id": shape}[gains]
  return Bags(
    jnp.asarray(ids), None if of is None else jnp.asarray(rng.normal(size=of), jnp.float32)
  )


def check_lookup(rng, size, dim, bags, atol=1e-5):
  table = jnp.asarray(rng.normal(size=(size, dim)), jnp.float32)
  expected = lookup.gather_and_combine(table, bags)
  act = jax.jit(cpu_kernels.gather_and_combine)(table, bags)
  np.testing.assert_allclose(act, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
  ("size", "dim", "bags", "length", "gains", "ragged"),
  [
    (40, 19, 23, 6, "none", False),
    (40, 19, 23, 6, "bag", False),
    (500, 64, 3000, 7, "id", False),  # on several threads
    (500, 64, 3000, 7, "id", True),
  ],
)
def test_bags_by_kernel(size, dim, bags, length, gains, ragged):
  rng = np.random.default_rng(0)
  check_lookup(rng, size, dim, random_bags(rng, size, bags, length, gains, ragged))


@pytest.mark.parametrize(("dim", "ragged"), [(21, False), (64, True)])
def test_rows_of_bfloat16(dim, ragged):
  """Summed in float32, and rounded once."""
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(500, dim)), jnp.bfloat16)
  bags = random_bags(rng, 500, 3000, 7, "id", ragged)
  look_up = lambda f, dtype: jax.jit(functools.partial(f, dtype=dtype))(table, bags)
  act = look_up(cpu_kernels.gather_and_combine, jnp.float32)
  expected = look_up(lookup.gather_and_combine, jnp.float32)
  np.testing.assert_allclose(act, expected, rtol=1e-5, atol=2e-5)
  for dtype in (None, jnp.bfloat16):
    rounded = look_up(cpu_kernels.gather_and_combine, dtype)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, act.astype(jnp.bfloat16))


def test_ragged_bags_of_every_length_in_order():
  """As ragged inputs come: runs of a bag, short ones and longer than what a kernel reads ahead."""
  rng = np.random.default_rng(0)
  lengths = [0, 1, 2, 31, 32, 33, 5000, 0, 64, 65, 4096, 7] + [3] * 600 + [0, 9000, 0]
  segments = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
  ids = rng.integers(-1, 501, segments.shape).astype(np.int32)
  gains = jnp.asarray(rng.normal(size=ids.shape), jnp.float32)
  bags = Bags(jnp.asarray(ids), gains, jnp.asarray(segments), (len(lengths),))
  check_lookup(rng, 500, 72, bags, atol=1e-3)  # 9,000 terms, added up in another order


def test_a_lookup_takes_the_kernel_only_where_it_is_covered():
  table, bags = jnp.ones((4, 2)), Bags(jnp.zeros((3, 2), jnp.int32))
  act = lambda table, **settings: text_of(
    functools.partial(cpu_kernels.gather_and_combine, **settings), table, bags
  )
  assert "sparse_embed_bag_sum" in act(table)
  assert "sparse_embed_bag_sum" in act(table.astype(jnp.bfloat16))
  assert "sparse_embed_bag_sum" in act(table, dtype=jnp.bfloat16)
  assert "sparse_embed" not in act(table, quantization=embed.QuantizationConfig(3, 0.0, 1.0))
  stack = StackSpec("t", ("t",), Layout((9,)), 4, np.dtype(np.float32), embed.sgd())
  look_up = lambda table, bags: exchange.look_up(stack, table, [bags], ("t",))[0]
  text = text_of(look_up, jnp.ones((9, 4)), Bags(jnp.zeros((3, 2), jnp.int32)))
  assert text.count("sparse_embed_bag_sum") >= 1


# --- updates --------------------------------------------------------------------------------------


def make_arrays(rng, optimizer, size, dim):
  value = lambda *shape: jnp.asarray(rng.uniform(0.1, 1, shape), jnp.float32)
  slots = {
    name: value(*((size,) if slot.per_row else (size, dim))).astype(slot.dtype)
    for name, slot in optimizer.slots(dim).items()
  }
  return {"parameters": value(size, dim), **slots}


def make_parts(rng, size, dim, shapes):
  parts = []
  for bags, length, has_gains in shapes:
    ids = rng.choice([-(2**31), -1, size, 2**31 - 1, *range(size)], (bags, length))
    gains = jnp.asarray(rng.normal(size=(bags, length)), jnp.float32) if has_gains else None
    grads = jnp.asarray(rng.normal(size=(bags, dim)) / 30, jnp.float32)
    parts.append(GradRows(grads, jnp.asarray(ids, jnp.int32), gains))
  return parts


def check_step(monkeypatch, optimizer, size, dim, shapes, seed=0, **tolerance):
  """One step of a stack by kernel and by XLA; returns the kernel's program."""
  rng = np.random.default_rng(seed)
  arrays, parts = make_arrays(rng, optimizer, size, dim), make_parts(rng, size, dim, shapes)
  stack = StackSpec("t", ("t",), Layout((size,)), dim, np.dtype(np.float32), optimizer)
  scalars = update.StepScalars.at(stack, 0)

  def run(switch):
    monkeypatch.setenv(cpu_kernels.SWITCH, switch)
    step = lambda arrays, parts: update.step_table(stack, scalars, arrays, parts)
    lowered = jax.jit(step).lower(arrays, parts)
    return lowered.compile()(arrays, parts), lowered.as_text()

  new, text = run("1")
  expected, without = run("0")
  assert "sparse_embed" not in without
  tolerance = {"rtol": 1e-4, "atol": 1e-5} | tolerance
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), new, expected)
  touched = {i for part in parts for i in np.asarray(part.ids).flat if 0 <= i < size}
  untouched = sorted(set(range(size)) - touched)
  for old, current in zip(jax.tree.leaves(arrays), jax.tree.leaves(new), strict=True):
    np.testing.assert_array_equal(np.asarray(old)[untouched], np.asarray(current)[untouched])
  return text


SHAPES = [(20, 5, True), (7, 1, False), (40, 9, False)]


@pytest.mark.parametrize(
  ("kind", "dim"), [("elements", 1), ("row", 5), ("summed", 16), ("both", 5)]
)
def test_optimizers_have_a_kernel(monkeypatch, kind, dim):
  assert "sparse_embed_row_equation" in check_step(monkeypatch, STEPS[kind], 70, dim, SHAPES)


def test_a_sum_does_not_depend_on_the_threads():
  """Gradients of a row are added in the order of the batch: to the bit."""
  rng = np.random.default_rng(0)
  optimizer = embed.adagrad()
  stack = StackSpec("t", ("t",), Layout((50,)), 8, np.dtype(np.float32), optimizer)
  scalars = update.StepScalars(jnp.float32(0.1), None, None)
  step = jax.jit(lambda arrays, parts: update.step_table(stack, scalars, arrays, parts))
  arrays, parts = make_arrays(rng, optimizer, 50, 8), make_parts(rng, 50, 8, [(3000, 5, True)])
  first = step(arrays, parts)
  for _ in range(5):
    jax.tree.map(np.testing.assert_array_equal, step(arrays, parts), first)


def test_what_has_no_kernel_runs_by_xla():
  tanh = embed.custom_optimizer(lambda g, w, s, lr: (w - lr * jnp.tanh(g), s))
  for optimizer, dtype in (
    (STEPS["each"], np.float32), (embed.adagrad(), np.float16), (tanh, np.float32)
  ):  # fmt: skip
    rng = np.random.default_rng(0)
    arrays, parts = make_arrays(rng, optimizer, 9, 4), make_parts(rng, 9, 4, SHAPES)
    arrays["parameters"] = arrays["parameters"].astype(dtype)
    stack = StackSpec("t", ("t",), Layout((9,)), 4, np.dtype(dtype), optimizer)
    step = functools.partial(update.step_table, stack, update.StepScalars.at(stack, 0))
    assert "sparse_embed" not in text_of(step, arrays, parts)


# --- what JAX makes of a kernel -------------------------------------------------------------------


def test_a_kernel_is_differentiated_and_batched_as_what_it_means():
  rng = np.random.default_rng(0)
  table, ids = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), jnp.array([[0, 4], [4, 5]])
  loss = lambda f: lambda table: jnp.sum(jnp.sin(f(table, Bags(ids))))
  slope = jax.grad(loss(cpu_kernels.gather_and_combine))(table)
  expected = jax.grad(loss(lookup.gather_and_combine))(table)
  np.testing.assert_allclose(slope, expected, rtol=1e-6)
  tables = jnp.stack([table, 2 * table])
  batched = jax.jit(jax.vmap(lambda t: cpu_kernels.gather_and_combine(t, Bags(ids))))(tables)
  np.testing.assert_allclose(batched[1], 2 * batched[0], rtol=1e-6)


def test_exported_programs_have_no_kernel():
  table = embed.TableConfig(9, 3, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  ids = embed.Padded(np.array([[1, 2], [3, -1]]))
  act = layer(ids)
  for any_batch in (False, True):
    exported = embed.export(lambda layer, ids: layer(ids), layer, ids, any_batch=any_batch)
    assert "sparse_embed_bag_sum" not in exported.program.mlir_module()
    np.testing.assert_allclose(exported.program.call(exported.arrays, ids.values), act, rtol=1e-6)


def test_other_platforms_have_no_kernel():
  traced = jax.jit(cpu_kernels.gather_and_combine).trace(
    jnp.ones((4, 2)), Bags(jnp.zeros((3, 2), jnp.int32))
  )
  for platform in ("cuda", "tpu"):
    assert "sparse_embed" not in traced.lower(lowering_platforms=(platform,)).as_text()
