"""The registry of backends: compiled code that takes the place of XLA's own operations.

The engine defines what a lookup and an update mean, and imports no backend; `embed.kernels` has
two, "cpu" and "sparse_core", modules that register themselves. Each decides what it takes, and
environment variables, which are for tests, switch it on or off.
"""

import os
import types

_BACKENDS: dict[str, types.ModuleType] = {}


def register(name: str, backend: types.ModuleType) -> None:
  """Adds a backend, once its module is imported."""
  _BACKENDS[name] = backend


def backend(name: str) -> types.ModuleType:
  """The backend of a name; `import embed` registers all."""
  return _BACKENDS[name]


def is_on(variable: str, default: bool) -> bool:
  """Whether an environment variable is 1; the `default` where it is unset or empty.

  >>> is_on("SPARSE_EMBED_UNKNOWN", default=True)
  True
  """
  value = os.environ.get(variable) or f"{default:d}"
  if value not in ("0", "1"):
    raise ValueError(f"The environment variable {variable} is {value!r}: write 0 or 1.")
  return value == "1"
