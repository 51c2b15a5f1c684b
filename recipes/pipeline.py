"""Grain pipelines that read whole batches from memory-mapped columns.

One element of these pipelines is one batch, because an element per row would spend more time in
Python than the model spends computing. A batch is a function of its number alone, so a run that
resumes starts its pipeline at a number, and goes on exactly as before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from . import packing

Arrays = Mapping[str, np.ndarray]

# Neighbouring rows that stay together in a shuffled order: some 100 kB to 1 MB of a click log.
_CHUNK = 1 << 13
_MAX_CHUNKS = 1 << 19  # with more rows, from 4.3 billion on, the chunks are longer
# Rows that are shuffled among each other: their order takes 8 MB.
_WINDOW = 1 << 20


class ShuffledBatches:
  """Batch number -> rows of a split, in a new order every epoch.

  Batches run across the end of an epoch, so that every row is seen exactly once per epoch with
  any batch size, and all batches have one shape.

  Args:
    columns: arrays with equally many rows.
    rows: the split as a range of rows, `(start, stop)`.
    batch_size: rows of a global batch.
    seed: of the order; see `ShuffledRows`.
    num_batches: the length of the source.
    shard: `(index, count)`; this host's part of every global batch. The parts of all hosts
      concatenated are the batch that a single host would read.

  >>> columns = {"x": np.arange(10)}
  >>> source = ShuffledBatches(columns, (5, 10), batch_size=5, seed=0, num_batches=2)
  >>> sorted(source[1]["x"].tolist())
  [5, 6, 7, 8, 9]
  """

  def __init__(
    self,
    columns: Arrays,
    rows: tuple[int, int],
    *,
    batch_size: int,
    seed: int,
    num_batches: int,
    shard: tuple[int, int] = (0, 1),
  ):
    self._batch_size, self._part = batch_size, part(batch_size, shard)
    self._columns, self._rows, self._num_batches = columns, rows, num_batches
    self._order = ShuffledRows(rows[1] - rows[0], seed)

  def __len__(self) -> int:
    return self._num_batches

  def __getitem__(self, number: int) -> dict[str, np.ndarray]:
    base = number * self._batch_size
    start, stop = self._part
    rows = self._rows[0] + self._order.rows(base + start, base + stop)
    return {name: column[rows] for name, column in self._columns.items()}


class ShuffledRows:
  """Orders rows at random, a new order in every epoch, in 40 MB at most for any number of rows.

  Up to 2**20 rows have a random permutation. More rows are cut into chunks of 2**13 neighbours or a
  few more, which are shuffled, and then the rows within windows of about a million. So a reader
  needs the rows of one window at a time, in pieces of a chunk.

  Grain's `index_shuffle` would hold nothing, but takes 5 microseconds for one of a million numbers;
  a row of these permutations takes tens of nanoseconds.

  Args:
    size: the number of rows, at least 1.
    seed: of the order. Epoch `e` is ordered by `(seed, e)`, and window `w` by `(seed, e, w)`.

  >>> order = ShuffledRows(5, seed=0)
  >>> sorted(order.rows(0, 5).tolist()), order.rows(3, 7).shape
  ([0, 1, 2, 3, 4], (4,))
  """

  def __init__(self, size: int, seed: int):
    self._size, self._seed = size, seed
    self._window = (-1, 0, 0, np.empty(0, np.int64))  # the last one, as `_shuffled` returns it

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows at the positions from `start` on, int64 `[stop - start]`.

    Position `size` is the first of the second epoch, and so on.
    """
    parts = [np.empty(0, np.int64)]
    while start < stop:
      epoch, position = divmod(start, self._size)
      # One read, and one assignment: threads may race but never mix windows.
      of_epoch, first, end, order = self._window
      if epoch != of_epoch or not first <= position < end:
        self._window = _, first, _, order = self._shuffled(epoch, position)
      parts.append(order[position - first :][: stop - start])
      start += len(parts[-1])
    return np.concatenate(parts)

  def _shuffled(self, epoch: int, position: int) -> tuple[int, int, int, np.ndarray]:
    """Returns the epoch, the first position, the end and the rows of the window of a position."""
    generator = np.random.default_rng((self._seed, epoch))
    if self._size <= _WINDOW:
      return epoch, 0, self._size, generator.permutation(self._size)
    count = min(self._size // _CHUNK, _MAX_CHUNKS)
    edges = self._size * np.arange(count + 1) // count
    chunks = generator.permutation(count)
    ends = np.cumsum(edges[chunks + 1] - edges[chunks])
    per_window = max(_WINDOW * count // self._size, 1)
    window = int(np.searchsorted(ends, position, side="right")) // per_window
    chosen = chunks[window * per_window : (window + 1) * per_window]
    order = packing.ranges(edges[chosen], edges[chosen + 1] - edges[chosen])
    # A seed that ends in zeros equals the one without them.
    np.random.default_rng((self._seed, epoch, window, 1)).shuffle(order)
    first = int(ends[window * per_window - 1]) if window else 0
    return epoch, first, first + len(order), order


class SequentialBatches:
  """Batch number -> rows of a split in order, once, the last batch filled up to the full size.

  Every batch has a `mask`, bool `[batch_size]`: False at rows that fill it up, whose values are
  `fill[name]`, or 0. For `shard` see `ShuffledBatches`; all hosts have equally many
  batches.
  """

  def __init__(
    self,
    columns: Arrays,
    rows: tuple[int, int],
    *,
    batch_size: int,
    fill: Mapping[str, Any] | None = None,
    shard: tuple[int, int] = (0, 1),
  ):
    self._num_batches = -(-(rows[1] - rows[0]) // batch_size)
    self._rows, self._batch_size, self._part = rows, batch_size, part(batch_size, shard)
    self._columns = columns
    self._fill = dict(fill or {})

  def __len__(self) -> int:
    return self._num_batches

  def __getitem__(self, number: int) -> dict[str, np.ndarray]:
    base = self._rows[0] + number * self._batch_size
    start, stop = (min(base + place, self._rows[1]) for place in self._part)
    size = self._part[1] - self._part[0]
    batch = {"mask": np.arange(size) < stop - start}
    for name, array in self._columns.items():
      batch[name] = np.full((size, *array.shape[1:]), self._fill.get(name, 0), array.dtype)
      batch[name][: stop - start] = array[start:stop]
    return batch


def part(size: int, shard: tuple[int, int]) -> tuple[int, int]:
  """Returns the first and last place, exclusive, of a global batch that `(index, count)` reads."""
  index, count = shard  # `mesh.check_batch_sizes` has seen that the parts are equal
  return index * size // count, (index + 1) * size // count


def batches(source: Any, transform: Callable[[Any], Any], *, start: int = 0) -> grain.IterDataset:
  """Returns a Grain dataset whose elements are `transform(batch)`, read ahead in the background.

  Args:
    source: batch number -> batch, as the classes here.
    transform: NumPy to NumPy, without touching a device.
    start: the number of the first batch; those before it are not read.
  """
  dataset = grain.MapDataset.source(source)[start:].map(transform)
  return dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
