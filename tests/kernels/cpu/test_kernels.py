"""Compiled kernels are taken, mean what XLA's operations mean, and stay out of exports.

What they compute is held by the tests of lookups and steps with the way "kernels".
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import ROWS, one_table

import embed
from embed.engine import lookup, update
from embed.engine.bags import Bags
from embed.engine.grads import GradRows
from embed.engine.stack import Layout, StackSpec
from embed.kernels import cpu as cpu_kernels

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.ci]


def test_long_ragged_bags_on_several_threads():
  """Runs of a bag, short ones and longer than what a kernel reads ahead; ids outside as well."""
  rng = np.random.default_rng(0)
  lengths = [0, 1, 2, 31, 32, 33, 5000, 0, 64, 65, 4096, 7] + [3] * 600 + [0, 9000, 0]
  segments = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
  ids = rng.integers(-1, 501, segments.shape).astype(np.int32)
  gains = jnp.asarray(rng.normal(size=ids.shape), jnp.float32)
  bags = Bags(jnp.asarray(ids), gains, jnp.asarray(segments), (len(lengths),))
  table = jnp.asarray(rng.normal(size=(500, 72)), jnp.float32)
  expected = lookup.gather_and_combine(table, bags)
  act = jax.jit(cpu_kernels.gather_and_combine)(table, bags)
  np.testing.assert_allclose(act, expected, rtol=1e-5, atol=1e-3)  # 9,000 terms in another order


def test_a_step_does_not_depend_on_the_threads():
  """Gradients of a row are added in the order of the batch: to the bit."""
  rng = np.random.default_rng(0)
  optimizer = embed.adagrad()
  stack = StackSpec("t", ("t",), Layout((50,)), 8, np.dtype(np.float32), optimizer)
  scalars = update.StepScalars(jnp.float32(0.1), None, None)
  step = jax.jit(lambda arrays, part: update.step_table(stack, scalars, arrays, [part]))
  arrays = {"parameters": jnp.ones((50, 8)), "accumulators": jnp.ones((50, 8))}
  ids = rng.integers(-1, 51, (3000, 5)).astype(np.int32)
  part = GradRows(rng.normal(size=(3000, 8)).astype(np.float32), ids, np.ones((3000, 5), "f4"))
  assert "sparse_embed_row_equation" in step.lower(arrays, part).as_text()
  first = step(arrays, part)
  for _ in range(5):
    jax.tree.map(np.testing.assert_array_equal, step(arrays, part), first)


def test_only_programs_for_this_machine_have_kernels():
  ids = embed.Padded(np.array([[1, 2], [3, -1]], np.int32))
  layer = one_table()
  assert "sparse_embed_bag_sum" in nnx.jit(lambda m, x: m(x)).lower(layer, ids).as_text()
  exported = embed.export(lambda layer, ids: layer(ids), layer, ids)
  assert "sparse_embed_bag_sum" not in exported.program.mlir_module()
  act = exported.program.call(exported.arrays, ids.values)
  np.testing.assert_allclose(act, [ROWS[1] + ROWS[2], ROWS[3]], rtol=1e-6)
  traced = jax.jit(cpu_kernels.gather_and_combine).trace(ROWS, Bags(ids.values))
  assert "sparse_embed" not in traced.lower(lowering_platforms=("tpu",)).as_text()
