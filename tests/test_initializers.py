"""Initial values of a table: drawn row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from embed import initializers

D = 3


def test_the_default_initializer_is_keyed_by_row(monkeypatch):
  """Rows do not depend on how many there are, nor on how many are made at a time."""
  key, make_rows = jax.random.key(0), initializers._rows.__wrapped__
  make_rows = functools.partial(make_rows, initializers.truncated_normal_rows)
  many = make_rows(key, (50, D), jnp.float32)
  np.testing.assert_array_equal(many[:20], make_rows(key, (20, D), jnp.float32))
  monkeypatch.setattr(initializers, "ROWS_AT_A_TIME", 16)
  np.testing.assert_array_equal(many, make_rows(key, (50, D), jnp.float32))
