"""`to_padded`: bags of any form laid out in a rectangle, in NumPy."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
    ValueError: if a bag is longer than `max_valency` and `truncate` is False, or values are
      neither integers nor floats.

  >>> embed.to_padded([[3, 7], [5]]).values.tolist()
  [[3, 7], [5, -1]]
  >>> embed.to_padded([[0.5, 2.0], [1.0]], max_valency=3).values.tolist()  # weights
  [[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]
  """
  if isinstance(bags, Sparse):
    values, shape = np.asarray(as_array(bags.values, "to_padded")), bags.dense_shape[:-1]
    indices = np.asarray(bags.indices, np.int64).reshape(-1, len(bags.dense_shape))
    if not np.issubdtype(values.dtype, np.floating):  # of weights, none is padding
      values, indices = values[values >= 0], indices[values >= 0]
    check_indices(indices, bags.dense_shape, "to_padded: ")
    check_one_id_each(indices, "to_padded: ")
    rows = np.ravel_multi_index(tuple(indices[:, :-1].T), shape) if len(values) else indices[:, 0]
    columns, longest = indices[:, -1], bags.dense_shape[-1]
  else:
    if isinstance(bags, Ragged):
      splits = np.asarray(bags.row_splits)
      values = np.asarray(as_array(bags.values, "to_padded"))[: splits[-1]]
      lengths = np.diff(splits)
    else:
      arrays = [np.asarray(bag) for bag in bags]
      lengths = np.array([len(a) for a in arrays], np.int64)
      full = [a for a in arrays if len(a)]
      values = np.concatenate(full) if full else np.zeros(0, np.int32)
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
  is_float = np.issubdtype(values.dtype, np.floating)
  if not is_float and values.size and not np.issubdtype(values.dtype, np.integer):
    raise ValueError(f"to_padded takes integers or floats, got dtype {values.dtype}.")
  wide = not is_float and values.size and values.max() > np.iinfo(np.int32).max
  dtype = np.float32 if is_float else (np.int64 if wide else np.int32)
  out = np.full((math.prod(shape), length), 0 if is_float else -1, dtype)
  out[rows[keep], columns[keep]] = values[keep]
  return Padded(out.reshape(*shape, length))
