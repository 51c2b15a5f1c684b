"""An integer hash on devices, for buckets of raw ids, rounding noise, and fingerprints."""

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads out consecutive numbers


def scramble(x: jax.Array) -> jax.Array:
  """Maps uint32 one to one to uint32, so that its bits look independent of the argument.

  `lowbias32` by Christopher Wellons, "Prospecting for Hash Functions" (2018).
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
