"""Ways to store and step rows: a test whose outcome could depend on them takes a `way`."""

import contextlib

import jax
import pytest

from embed.engine import stack as stack_lib
from embed.kernels import sparse_core


def ci(*ways):
  return [pytest.param(way, marks=pytest.mark.ci) for way in ways]


def weekly(*ways):
  return [pytest.param(way, marks=pytest.mark.weekly) for way in ways]


# rows          plain rows by XLA: what tests run by default
# lines         lines of 128, as on TPUs
# sparse_cores  lines on an emulated chip
EACH = ["rows", *ci("lines"), *weekly("sparse_cores")]


@contextlib.contextmanager
def stored(way):
  """Programs that are traced inside store and step rows in this way, where their plan says nothing.

  What is expected is NumPy or was computed before: what was jitted is traced anew inside.
  """
  if way == "rows":
    yield
    return
  with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
    patch.setenv(stack_lib.PACKING_SWITCH, "1")
    if way == "sparse_cores":
      import sparse_cores  # skips with another JAX than it was written for

      patch.setenv(sparse_core.SWITCH, "1")
      patch.setattr(sparse_core, "KINDS", (*sparse_core.KINDS, "cpu"))
      stack.enter_context(sparse_cores.emulated())
      assert sparse_core.unsupported_reason("cpu") is None
    # The switches are read while tracing, and are no part of a program's key.
    jax.clear_caches()
    yield
    jax.clear_caches()
