"""Back ends: compiled code that replaces the engine's JAX code and must give the same results.

The engine imports none; each module of `embed.kernels` registers itself. `StackSpec.back_end` is
the name of a stack's back end, or None for XLA. Where a plan does not choose one, environment
variables do; they are meant for tests.
"""

import os
from typing import Any, Protocol

import jax

BACK_ENDS: dict[str, "BackEnd"] = {}


class BackEnd(Protocol):
  """Compiled code that looks up and steps rows on a device, for the tables that it supports."""

  def look_up(self, stack: Any, table: Any, bags: Any) -> jax.Array | None:
    """Does the same as `lookup.gather_and_combine`, or returns None to leave the bags to XLA."""

  def step(self, stack: Any, scalars: Any, arrays: Any, parts: Any, is_distinct: bool) -> Any:
    """Does the same as `update.step_sorted`, for gradients with at least one id."""


def is_on(variable: str, default: bool) -> bool:
  """Reads a switch, 1 or 0, from an environment variable; `default` where it is unset or empty."""
  value = os.environ.get(variable) or f"{default:d}"
  if value not in ("0", "1"):
    raise ValueError(f"The environment variable {variable} is {value!r}: write 0 or 1.")
  return value == "1"
