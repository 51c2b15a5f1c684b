"""Stochastic rounding: unbiased, reproducible, other noise for each row, column, step and table.

The rows that a step makes of it are those of test_steps, to the bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed
from embed.engine import update

ULP = 2.0**-7  # of bfloat16 from 1 to 2
TO_BFLOAT16 = jax.jit(lambda x, bits: update.to_bfloat16(x, bits).astype(jnp.float32))


def make(optimizer, v=64, d=8, value=1.0, **settings):
  settings = {"dtype": jnp.bfloat16, "combiner": "sum", "name": "t"} | settings
  initializer = lambda key, shape, dtype: np.full(shape, value, dtype)
  table = embed.TableConfig(v, d, initializer, optimizer, **settings)
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))


def stepper(model):
  """`(ids, gradient)` to one optimizer step, compiled."""
  optimizer = embed.Optimizer(model, optax.sgd(0.0))

  @nnx.jit
  def step(model, optimizer, ids, g):
    loss = lambda m: jnp.sum(m(ids).astype(jnp.float32) * g)
    _, grads = embed.value_and_grad(loss)(model)
    optimizer.update(model, grads)

  return lambda ids, g: step(model, optimizer, ids, g)


def rows(model):
  return np.asarray(model.tables["t"]).astype(np.float32)


# --- numbers --------------------------------------------------------------------------------------


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


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.ci
def test_steps_below_the_resolution_count():
  """100 steps of 1/64 ulp: to the nearest nothing ever moves, at random it does on average."""
  ids = embed.Padded(np.arange(64)[:, None])
  g = jnp.float32(ULP / 64)
  exact = make(embed.sgd(1.0), stochastic_rounding=False)
  random = make(embed.sgd(1.0))
  move, wander = stepper(exact), stepper(random)
  for _ in range(100):
    move(ids, g)
    wander(ids, g)
  np.testing.assert_array_equal(rows(exact), 1.0)
  # Below 1 the spacing is half as wide; a walk of variance under 100 * (1/64) * (63/64) ulp^2.
  deviation = ULP * np.sqrt(100 / 64 / rows(random).size)
  assert abs(rows(random).mean() - (1 - 100 * g)) < 4 * deviation


def test_the_step_is_asked_for_where_rows_are_rounded():
  ids, g = np.array([1, 2]), np.ones((2, 8), np.float32)

  def apply(optimizer, **settings):
    model = make(optimizer)
    _, residual = model.lookup(ids)
    model.apply_gradients(g, residual, **settings)

  with pytest.raises(ValueError, match="step="):
    nnx.eval_shape(lambda: apply(embed.sgd(0.1)))
  nnx.eval_shape(lambda: apply(embed.sgd(0.1), step=0))
  nnx.eval_shape(lambda: apply(embed.frozen()))
