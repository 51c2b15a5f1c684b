"""Rows on the way from a file to a chunk."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from .faults import Fault

# "text", "number", "time", "any", or ("list", separator)
Way = str | tuple[str, str]


class Batch(NamedTuple):
  """Some rows of a file.

  Attributes:
    rows: int64 [N], their numbers in the file; the first is 1.
    arrays: by column, N values as they are stored.
    faults: rows among and before them that were dropped.
    size: bytes of the file since the previous batch.
  """

  rows: np.ndarray
  arrays: dict[str, pa.Array]
  faults: list[Fault]
  size: int


class Source(Protocol):
  """A file of rows."""

  names: tuple[str, ...]
  types: Mapping[str, pa.DataType]  # empty where every value has its own

  def advice(self) -> str:
    """Returns what to try where a column is missing, or ""."""

  def batches(self, ways: Mapping[str, Way], chunk_rows: int) -> Iterator[Batch]:
    """Yields the rows in their order, with the columns of `ways`."""


def rebatched(batches: Iterable[Batch], num_rows: int) -> Iterator[Batch]:
  """Yields the same rows in batches of `num_rows`; the last may be shorter."""
  held: list[Batch] = []
  for batch in batches:
    held.append(batch)
    if sum(len(batch.rows) for batch in held) < num_rows:
      continue
    joined = _joined(held)
    start = 0
    while len(joined.rows) - start >= num_rows:
      yield _cut(joined, start, start + num_rows)
      start += num_rows
    held = [_cut(joined, start, None)]
  if held and (len((last := _joined(held)).rows) or last.faults):
    yield last


def _joined(batches: list[Batch]) -> Batch:
  if len(batches) == 1:
    return batches[0]
  return Batch(
    np.concatenate([batch.rows for batch in batches]),
    {
      name: pa.concat_arrays([batch.arrays[name] for batch in batches])
      for name in batches[0].arrays
    },
    [fault for batch in batches for fault in batch.faults],
    sum(batch.size for batch in batches),
  )


def _cut(batch: Batch, start: int, stop: int | None) -> Batch:
  """Returns rows from `start` to `stop`, with the faults before the last of them."""
  first = 0 if start == 0 else batch.rows[start - 1]
  last = np.inf if stop is None else batch.rows[stop - 1]
  return Batch(
    batch.rows[start:stop],
    {name: array[start:stop] for name, array in batch.arrays.items()},
    [fault for fault in batch.faults if first < fault.row <= last],
    batch.size if start == 0 else 0,
  )
