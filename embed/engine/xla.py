"""Ordering for XLA: a data dependency that makes a table's update come after its reads.

XLA updates an array in place if all reads of it provably come before the update, and otherwise
copies the array at every step. Where a gradient does not depend on what was looked up, as in the
loss `x.sum()`, nothing proves this. Here the order is part of the data flow: a lookup returns a
**token**, an integer that depends on all of its activations, and an update depends on the token.
The token of a layer is the number of dropped ids in its report, which each lookup adds to.
"""

from typing import Any

import jax
import jax.numpy as jnp


def is_traced(tree: Any) -> bool:
  """Returns True if a leaf of a tree has no value yet, inside a transformed or jitted function."""
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def zero_of(token: jax.Array) -> jax.Array:
  """An int32 zero that depends on an int32 scalar in a way that XLA does not simplify away."""
  return (token & 1) * ((token + 1) & 1)


def zero_after(x: jax.Array) -> jax.Array:
  """An int32 zero that depends on a float32 scalar."""
  return zero_of(jax.lax.bitcast_convert_type(x, jnp.int32))


def with_token(arrays: Any, token: jax.Array) -> tuple[Any, jax.Array]:
  """Returns the same arrays and token; whatever uses the token runs after all the arrays exist.

  If the token is known, there is nothing to order: no update in this program depends on it.

  Args:
    arrays: a tree. Use the returned tree in its place: for another use of the given one, XLA may
      compute it again from the table.
    token: an int32 scalar.
  """
  if not is_traced(token):
    return arrays, token

  def on_cpu(arrays, token):
    # XLA:CPU drops barriers early. It cannot tell that this loop never runs.
    flip = lambda x: ~x if jnp.issubdtype(x.dtype, jnp.integer) else -x
    body = lambda _, both: jax.tree.map(flip, both)
    return jax.lax.fori_loop(0, zero_of(token), body, (arrays, token))

  barrier = lambda arrays, token: jax.lax.optimization_barrier((arrays, token))
  return jax.lax.platform_dependent(arrays, token, cpu=on_cpu, default=barrier)
