"""Stochastic rounding: rows narrower than float32 that learn from steps smaller than they resolve.

Rounded to the nearest, a bfloat16 weight of 1 forgets every step below 1/256. Rounded up or down at
random, up the more often the nearer the upper neighbour is, it is right on average: the expected
value of a rounded weight is the weight (Gupta et al. 2015, arXiv:1502.02551).

The random bits are a function of the step, the row and the column: a run is reproducible, and a row
gets the same ones on any mesh.
"""

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: spreads consecutive numbers
SCRAMBLE, LAST_SHIFT = ((16, 0x7FEB352D), (15, 0x846CA68B)), 16  # of `scramble`


def scramble(x: jax.Array) -> jax.Array:
  """A bijection of uint32 whose output bits look independent of its input.

  `lowbias32` of Christopher Wellons, "Prospecting for Hash Functions" (2018).
  """
  for shift, factor in SCRAMBLE:
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
  return x ^ (x >> jnp.uint32(LAST_SHIFT))


def noise(keys: jax.Array, columns: jax.Array) -> jax.Array:
  """Random bits uint32 `[..., D]` of rows with keys `[...]` and of columns with numbers `[D]`."""
  columns = columns.astype(jnp.uint32) * jnp.uint32(GOLDEN)
  columns = columns.reshape(*[1] * keys.ndim, -1)
  return scramble(scramble(keys.astype(jnp.uint32))[..., None] + columns)


def key(numbers: jax.Array, *more: jax.Array | int) -> jax.Array:
  """Keys uint32 `[...]` of integers `[...]`, such as ids, and of some more that they all share."""
  shared = jnp.uint32(0)
  for number in more:
    number = jnp.uint32(number) if isinstance(number, int) else number.astype(jnp.uint32)
    shared = scramble(shared ^ number) + jnp.uint32(GOLDEN)
  return numbers.astype(jnp.uint32) ^ shared


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
  """`x` as one of the two bfloat16 next to it, the farther one the less likely.

  Args:
    x: float32.
    bits: random uint32 of its shape.

  Returns:
    bfloat16; what bfloat16 holds exactly, zeros, infinities and NaN among it, is not changed.

  >>> x = jnp.full(4, 1 + 3 / 512)  # between 1 and 1 + 4/512
  >>> to_bfloat16(x, jnp.array([0, 0x3FFF, 0x4000, 0xFFFF], jnp.uint32)).tolist()
  [1.0, 1.0, 1.0078125, 1.0078125]
  """
  whole = jax.lax.bitcast_convert_type(x, jnp.uint32)
  # A float's bits count its magnitude: adding up to one unit of the shorter format carries into it.
  carried = (whole + (bits & jnp.uint32(0xFFFF))) >> jnp.uint32(16)
  rounded = jax.lax.bitcast_convert_type(carried.astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
