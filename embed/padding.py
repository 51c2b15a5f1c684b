"""`to_padded`: bags of any form laid out in a rectangle, in NumPy."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from embed.engine.bags import narrow
from embed.inputs import Padded, Ragged, Sparse, as_array, check_indices, check_one_id_each


def to_padded(
  bags: Ragged | Sparse | Iterable[Sequence[Any]],
  max_valency: int | None = None,
  *,
  truncate: bool = False,
) -> Padded:
  """Lays bags out as `Padded`, in NumPy, for input pipelines.

  Args:
    bags: a `Ragged`, a `Sparse` (the place in the bag is the column index), or a list of lists:
      int ids give int32 (int64 where they need it) padded with -1, floats give float32 padded
      with 0 (as weights).
    max_valency: L of the result; None takes the longest bag. A fixed one keeps shapes, and so the
      compiled step, the same from batch to batch.
    truncate: whether longer bags are cut to their first `max_valency` ids.

  Returns:
    `Padded` with values `[batch, L]` (for a `Sparse` of higher rank `[..., L]`).

  Raises:
    ValueError: if a bag is longer than `max_valency` and `truncate` is False, an id does not fit
      int64, or values are neither integers nor floats.

  >>> embed.to_padded([[3, 7], [5]]).values.tolist()
  [[3, 7], [5, -1]]
  >>> embed.to_padded([[0.5, 2.0], [1.0]], max_valency=3).values.tolist()  # weights
  [[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]
  """
  if isinstance(bags, Sparse):
    values, shape = _flat(np.asarray(as_array(bags.values, "to_padded"))), bags.dense_shape[:-1]
    indices = np.asarray(bags.indices, np.int64).reshape(-1, len(bags.dense_shape))
    if values.dtype.kind != "f":  # of weights, none is padding
      values, indices = values[values >= 0], indices[values >= 0]
    check_indices(indices, bags.dense_shape, "to_padded: ")
    check_one_id_each(indices, "to_padded: ")
    rows = np.ravel_multi_index(tuple(indices[:, :-1].T), shape) if len(values) else indices[:, 0]
    columns, longest = indices[:, -1], bags.dense_shape[-1]
  else:
    if isinstance(bags, Ragged):
      splits = np.asarray(bags.row_splits)
      values = _flat(np.asarray(as_array(bags.values, "to_padded"))[: splits[-1]])
      lengths = np.diff(splits)
    else:
      arrays = [np.asarray(bag) for bag in bags]
      lengths = np.array([len(a) for a in arrays], np.int64)
      full = [a for a in arrays if len(a)]
      if any(a.dtype == np.uint64 for a in full):  # NumPy makes floats of them beside int64
        full = list(map(_flat, full))
      values = _flat(np.concatenate(full)) if full else np.zeros(0, np.int32)
    shape = (len(lengths),)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    longest = int(lengths.max(initial=0))
  length = max(longest, 1) if max_valency is None else max_valency
  keep = columns < length
  if not truncate and not keep.all():
    raise ValueError(
      f"Bag {int(rows[~keep][0])} is longer than max_valency={length}. Raise max_valency, or pass "
      "truncate=True to cut it."
    )
  out = np.full((math.prod(shape), length), 0 if values.dtype.kind == "f" else -1, values.dtype)
  out[rows[keep], columns[keep]] = values[keep]
  return Padded(out.reshape(*shape, length))


def _flat(values: np.ndarray) -> np.ndarray:
  """Weights as float32, or ids as int32, int64 where one of them needs it."""
  if np.issubdtype(values.dtype, np.floating):
    return values.astype(np.float32)
  if not values.size:
    return values.astype(np.int32)
  if values.dtype.kind not in "iu":
    raise ValueError(f"to_padded takes integers or floats, got dtype {values.dtype}.")
  largest = int(values.max())
  if largest > np.iinfo(np.int64).max:
    raise ValueError(
      f"to_padded: id {largest} does not fit int64, and uint64 has no padding. Map ids to rows of "
      "a table first, as by a hash."
    )
  return narrow(values) if largest <= np.iinfo(np.int32).max else values.astype(np.int64)
