"""What is read of an equation, and what is refused."""

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


def test_numbers_are_no_part_of_a_program():
  """So that another hyperparameter, or another width, is not compiled again."""
  a, of_a = program_of(embed.adam(beta_1=0.5), 8)
  b, of_b = program_of(embed.adam(beta_1=0.75), 32)
  assert a == b
  assert not np.array_equal(of_a, of_b)
  assert program_of(embed.rowwise_adagrad(), 8)[0] == program_of(embed.rowwise_adagrad(), 64)[0]


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
