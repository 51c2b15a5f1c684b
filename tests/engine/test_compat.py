"""What JAX calls by different names in different versions."""

import jax
import jax.numpy as jnp

from embed.engine import compat


def test_the_inputs_of_a_scan():
  """Two constants, a carry of three arrays, and one array that is scanned over."""

  def loop(a, b, carry, xs):
    body = lambda carry, x: ((carry[0] + a * x, carry[1] + b, 2 * carry[2]), x)
    return jax.lax.scan(body, carry, xs)

  jaxpr = jax.make_jaxpr(loop)(1.0, 2.0, (0.0, 0.0, 0.0), jnp.ones(4)).jaxpr
  (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
  assert compat.scan_sizes(scan.params) == (2, 3)
