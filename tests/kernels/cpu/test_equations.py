"""What is read of an equation, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused

import embed
from embed.engine import update

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

from embed.kernels.cpu import equations

pytestmark = pytest.mark.ci


def program_of(optimizer, dim, rate=None):
  slots = optimizer.slots(dim)

  def step(g, w, arrays, rate):
    w, new = update.step_rows(optimizer, g, w, dict(zip(slots, arrays, strict=True)), rate)
    return w, [new[name] for name in slots]

  return equations.program(step, dim, [(not s.per_row, s.dtype) for s in slots.values()])


def test_sgd_is_two_operations():
  made, numbers = program_of(embed.sgd(), 8)
  assert [op.op for op in made.operations] == ["mul of float32", "sub of float32"]
  assert made.slots == ()
  assert numbers.size == 0


def test_numbers_are_no_part_of_a_program():
  """So that another hyperparameter, or another width, is not compiled again."""
  a, of_a = program_of(embed.adam(beta_1=0.5), 8)
  b, of_b = program_of(embed.adam(beta_1=0.75), 32)
  assert a == b
  assert not np.array_equal(of_a, of_b)
  assert program_of(embed.rowwise_adagrad(), 8)[0] == program_of(embed.rowwise_adagrad(), 64)[0]


def test_rows_of_one_element_are_numbers():
  made, _ = program_of(embed.rowwise_adagrad(), 1)
  assert not made.has_rows
  assert not any(op.is_row for op in made.operations)


def test_what_is_refused():
  cases = [
    (lambda g, w, s, lr: (w - jnp.sort(g), s), "sort"),
    (lambda g, w, s, lr: (w - jnp.tanh(g), s), "tanh"),
    (lambda g, w, s, lr: (w - jnp.cumsum(g), s), "cumsum"),
    (lambda g, w, s, lr: (w - jnp.arange(4.0), s), "iota"),
    (lambda g, w, s, lr: (w - np.arange(4, dtype=np.float32), s), "constant of shape"),
    (lambda g, w, s, lr: (w - g[::-1], s), "rev"),
    (lambda g, w, s, lr: (w - jnp.outer(g, g).sum(0), s), "shape"),
    (lambda g, w, s, lr: (w - g / jnp.ones_like(g).sum(), s), "the sum of a constant row"),
  ]
  program = lambda equation: program_of(embed.custom_optimizer(equation), 4)
  refused(cases, program, equations.Unsupported)


def test_a_jaxpr_that_returns_its_arguments():
  made, _ = equations.program(lambda g, w, slots, rate: (w, slots), 4, [(True, np.float32)])
  assert made.operations == ()
  assert made.results == ("w", "s0")
  assert jax.tree.leaves(made.slots) == [True]
