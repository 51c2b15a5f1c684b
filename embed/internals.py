"""Uses of private JAX: the version each was seen in, and the public API that would replace it."""

from jax._src import core


def is_differentiating() -> bool:
  """Whether the code runs right under `jax.grad`, `jax.jvp` or the like, not under a jit in it.

  Seen in JAX 0.10.2; `jax.extend.core.get_opaque_trace_state` could say so in public. False where
  JAX has no such thing any more.
  """
  context = getattr(core, "trace_ctx", None)
  return type(getattr(context, "trace", None)).__name__ in ("JVPTrace", "LinearizeTrace")
