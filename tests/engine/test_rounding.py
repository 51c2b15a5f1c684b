"""Stochastic rounding: unbiased, reproducible, other noise for each row, column, step and table.

The rows that a step makes of it are those of test_steps, to the bit.
"""

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest

import embed
from embed.engine import update

ULP = 2.0**-7  # of bfloat16 from 1 to 2
TO_BFLOAT16 = jax.jit(lambda x, bits: update.to_bfloat16(x, bits).astype(jnp.float32))


def ones(optimizer, **settings):
  rows = np.ones((64, 8), jnp.bfloat16)
  return layers.one_table(optimizer, rows, dtype=jnp.bfloat16, **settings)


def test_one_of_the_two_neighbours_and_what_fits_stays():
  draw = np.random.default_rng(0)
  not_numbers = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]  # that a carry would make something else
  bits = np.append(draw.integers(0, 2**32, 256, np.uint32), np.array(not_numbers, np.uint32))
  is_subnormal = (bits & 0x7F800000 == 0) & (bits & 0x7FFFFF > 0)
  special = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, 2.0**-126, 1.5, -3.0]
  x = np.concatenate([bits[~is_subnormal].view(np.float32), np.array(special, np.float32)])
  down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards zero
  up = ((x.view(np.uint32) >> 16) + 1 << 16).astype(np.uint32).view(np.float32)
  stays = ~np.isfinite(x) | (x == down)
  for noise in (0, 1, 0x8000, 2**32 - 1):
    found = np.asarray(TO_BFLOAT16(x, np.full(x.shape, noise, np.uint32)))
    np.testing.assert_array_equal(found[stays], x[stays])
    is_zero = x == 0
    np.testing.assert_array_equal(np.signbit(found[is_zero]), np.signbit(x[is_zero]))
    assert ((found == down) | (found == up))[~stays].all()


def test_the_mean_is_the_number():
  """Over all values of the noise, each number grows as often as it is far from the smaller one."""
  parts = np.array([1, 19661, 32768, 58982]) / 2**16  # of the way
  x = (1 + parts[:, None] * ULP).astype(np.float32)
  assert ((x - 1) / ULP * 2**16 == parts[:, None] * 2**16).all()
  noise = np.arange(2**16, dtype=np.uint32)
  for sign in (1, -1):
    found = TO_BFLOAT16(sign * np.broadcast_to(x, (4, 2**16)), np.broadcast_to(noise, (4, 2**16)))
    np.testing.assert_array_equal((sign * np.asarray(found) > 1).sum(1), parts * 2**16)


def test_noise_differs_by_row_column_step_and_table():
  """The share of equal bits of any two is a half, within five standard deviations."""

  @jax.jit
  def noise_of(numbers):
    keys = jnp.arange(512, dtype=jnp.uint32) ^ update.rounding_key(*numbers)
    return update.rounding_noise(keys, jnp.arange(32))

  base = np.asarray(noise_of((7, 3)))
  others = {
    "row": np.roll(base, 1, axis=0),
    "column": np.roll(base, 1, axis=1),
    "step": noise_of((7, 4)),
    "table": noise_of((8, 3)),
  }
  for name, other in others.items():
    share = np.mean(np.bitwise_count(base ^ np.asarray(other))) / 32
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(base.size * 32), name


@pytest.mark.ci
def test_steps_below_the_resolution_count():
  """100 steps of 1/64 ulp: to the nearest nothing ever moves, at random it does on average."""
  ids, g = np.arange(64), np.full((64, 8), ULP / 64, np.float32)
  exact, random = ones(embed.sgd(1.0), stochastic_rounding=False), ones(embed.sgd(1.0))
  for number in range(100):
    layers.step(exact, ids, g, np.int32(number))
    layers.step(random, ids, g, np.int32(number))
  np.testing.assert_array_equal(exact.tables["t"].astype(np.float32), 1.0)
  rows = np.asarray(random.tables["t"]).astype(np.float32)
  # Below 1 the spacing is half as wide; a walk of variance under 100 * (1/64) * (63/64) ulp^2.
  deviation = ULP * np.sqrt(100 / 64 / rows.size)
  assert abs(rows.mean() - (1 - 100 * ULP / 64)) < 4 * deviation
