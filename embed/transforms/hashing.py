"""Keys and numbers of raw features: their types, their padding, and the hashes of keys.

Keys are one array `[N]`: integers of any dtype, or str objects.
"""

import math
from typing import Any

import numpy as np
import xxhash


def to_array(values: Any) -> np.ndarray:
  """Converts lists and scalars to object arrays, so that [1, "a"] keeps its integer."""
  return np.asarray(values) if hasattr(values, "__array__") else np.asarray(values, object)


def to_keys(values: np.ndarray) -> np.ndarray:
  """Converts values `[N]` to keys `[N]`: None becomes '' or -1, and bytes become str."""
  if values.dtype.kind in "iu":
    return values
  if values.dtype.kind in "UST":
    values = values.astype(object)
  if values.dtype != object:
    raise ValueError(
      f"{values.dtype} values cannot be categories, which are strings, bytes and integers. Convert "
      "them with .astype('int64') or .astype(str), or put numbers in buckets with "
      "Bucketized(boundaries)."
    )
  items = values.tolist()
  types = set(map(type, items)) - {type(None)}
  if all(issubclass(t, (str, bytes)) for t in types):
    # Invalid UTF-8 survives: `hashes` encodes it back to the same bytes.
    decode = lambda x: x.decode("utf-8", "surrogateescape") if isinstance(x, bytes) else x or ""
    return np.array([decode(item) for item in items], object)
  if all(issubclass(t, (int, np.integer)) and t is not bool for t in types):
    return _to_integers([-1 if item is None else int(item) for item in items])
  raise ValueError(
    "a column holds strings and bytes, or integers, but not both. Got "
    f"{sorted(t.__name__ for t in types)}. A missing value is None or '', not NaN."
  )


def _to_integers(items: list[int]) -> np.ndarray:
  for dtype in (np.int64, np.uint64):
    try:
      return np.array(items, dtype)
    except OverflowError:
      pass
  raise ValueError(
    f"integers must all fit int64, or all uint64, which has no padding. Got {min(items)} and "
    f"{max(items)}; hash them as strings if they are longer."
  )


def is_padding(keys: np.ndarray) -> np.ndarray:
  """Marks the keys that are '' or -1, bool `[N]`."""
  if keys.dtype == object:
    return keys == ""
  if keys.dtype.kind == "i" and (keys < -1).any():
    raise ValueError(
      f"{int(keys.min())} is neither a key nor padding (-1). Give signed 64-bit hashes as "
      "x.view(np.uint64)."
    )
  return keys == -1


def to_numbers(values: np.ndarray) -> np.ndarray:
  """Converts values `[N]` to integers or floats `[N]`; None becomes NaN."""
  if values.dtype == object:
    items = [math.nan if item is None else item for item in values.tolist()]
    values = np.asarray(items, None if items else np.float64)
  if values.dtype.kind not in "iuf":
    raise ValueError(f"numbers must be integers or floats. Got values of dtype {values.dtype}.")
  return values


# --- hashes --------------------------------------------------------------------------------------


def hashes(keys: np.ndarray) -> np.ndarray:
  """Hashes strings as UTF-8, or integers as 8 little-endian bytes, by XXH64: uint64 `[N]`."""
  if keys.dtype != object:
    encoded = keys.astype("<u8").view("V8").tolist()
  else:
    encoded = [key.encode("utf-8", "surrogateescape") for key in keys.tolist()]
  return np.fromiter(map(xxhash.xxh64_intdigest, encoded), np.uint64, len(keys))


def buckets(hashes: np.ndarray, num_buckets: int) -> np.ndarray:
  """Returns `hashes % num_buckets` as int32."""
  n = np.uint64(num_buckets)
  return (hashes - hashes // n * n).astype(np.int32)  # NumPy vectorizes division, not remainders
