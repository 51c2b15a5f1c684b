"""Environment variables of the library, each 1 or 0."""

import os


def is_on(variable: str, default: bool) -> bool:
  """Whether an environment variable is 1; unset or empty, it is what the `default` says.

  Raises:
    ValueError: for values other than 1 and 0.

  >>> is_on("SPARSE_EMBED_UNKNOWN", default=True)
  True
  """
  value = os.environ.get(variable) or f"{default:d}"
  if value not in ("0", "1"):
    raise ValueError(f"The environment variable {variable} is {value!r}: write 0 or 1.")
  return value == "1"
