"""Kinds of columns: each is flattened to its values, and rebuilt from an id or weight per value."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from embed import inputs as inputs_lib
from embed.transforms import hashing


class FlatColumn(NamedTuple):
  """The values of a column, and the function that makes a column of its kind out of new ones."""

  values: np.ndarray  # [N]
  rebuild: Callable[[np.ndarray], Any]


def flatten(column: Any, max_valency: int | None = None, truncate: bool = False) -> FlatColumn:
  """Flattens a column of any kind; it is rebuilt with the kind and shape that `Column` documents.

  Args:
    column: the raw feature.
    max_valency: columns of the `Padded` that bags become; None keeps what has no fixed length.
    truncate: whether longer bags are cut, rather than refused when they are rebuilt.

  >>> flat = flatten([["a"], ["b", "c"]])
  >>> flat.values.tolist(), flat.rebuild(np.array([4, 5, 6])).values.tolist()
  (['a', 'b', 'c'], [[4, -1], [5, 6]])
  """
  if is_list := _is_list_of_bags(column):
    column = _join(column)

  def pad(bags):
    if max_valency is None and not is_list:
      return bags
    return inputs_lib.to_padded(bags, max_valency, truncate=truncate)

  if isinstance(column, (inputs_lib.Ragged, inputs_lib.Sparse)):
    values = hashing.to_array(column.values)
    if values.ndim != 1:
      raise ValueError(f"the values of bags must be flat, [N]. Got shape {values.shape}.")
    used = len(values)
    if isinstance(column, inputs_lib.Ragged):
      used = _last_split(column.row_splits, values)

    def rebuild(x):
      unused = np.full(len(values) - used, 0 if x.dtype.kind == "f" else -1, x.dtype)
      return pad(dataclasses.replace(column, values=np.concatenate([x, unused])))

    return FlatColumn(values[:used], rebuild)
  if isinstance(column, inputs_lib.Padded):
    array = hashing.to_array(column.values)
    return FlatColumn(array.reshape(-1), lambda x: inputs_lib.Padded(x.reshape(array.shape)))
  array = hashing.to_array(column)
  return FlatColumn(array.reshape(-1), lambda x: x.reshape(array.shape))


def _is_list_of_bags(column: Any) -> bool:
  """Whether a column is a list of lists, or an object array of them, as in data frames."""
  if isinstance(column, np.ndarray):
    if column.dtype != object or column.ndim != 1:
      return False
  elif not isinstance(column, (list, tuple)):
    return False
  return not {list, tuple, np.ndarray}.isdisjoint(map(type, column))


def _join(column: Iterable[Any]) -> inputs_lib.Ragged:
  """A list of bags as one `Ragged`."""
  bags = [() if bag is None else bag for bag in column]
  if not all(isinstance(bag, (list, tuple, np.ndarray)) for bag in bags):
    raise ValueError("a list of bags holds lists and None; write [value] for a bag of one value.")
  splits = np.cumsum([0, *map(len, bags)])
  filled = [bag for bag in bags if len(bag)]
  arrays = [bag for bag in filled if isinstance(bag, np.ndarray)]
  if arrays and len(arrays) == len(filled) and len({array.dtype.kind for array in arrays}) == 1:
    return inputs_lib.Ragged(np.concatenate(arrays), splits)
  values = hashing.to_array(list(itertools.chain.from_iterable(filled)))
  return inputs_lib.Ragged(values, splits)


def _last_split(row_splits: Any, values: np.ndarray) -> int:
  """The number of values that are in bags; a buffer may be longer."""
  splits = np.asarray(row_splits)
  inputs_lib.check_row_splits(splits, len(values))
  return int(splits[-1])


def as_bags(ids: Any) -> Any:
  """A dense array as `Padded`, one of `[batch]` as bags of one value; bags as they are."""
  if isinstance(ids, np.ndarray):
    return inputs_lib.Padded(ids if ids.ndim > 1 else ids[..., None])
  return ids


def value_positions(flat: FlatColumn) -> tuple[np.ndarray, type]:
  """The index of the value at each position of each bag, and the type of the rebuilt column.

  Returns:
    int `[*batch, L]`, -1 for a position without a value, and `Padded`, `Ragged`, `Sparse` or
    `np.ndarray`.

  >>> positions, kind = value_positions(flatten([["a"], ["b", "c"]]))
  >>> positions.tolist(), kind.__name__
  ([[0, -1], [1, 2]], 'Padded')
  """
  indices = flat.rebuild(np.arange(len(flat.values)))
  kind = type(indices)
  if kind in (inputs_lib.Ragged, inputs_lib.Sparse):
    indices = inputs_lib.to_padded(indices)
  if isinstance(indices, inputs_lib.Padded):
    return indices.values, kind
  is_column = indices.ndim > 1 and indices.shape[-1] == 1
  return (indices if is_column else indices[..., None]), kind
