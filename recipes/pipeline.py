"""Grain pipelines that read whole batches from memory-mapped columns.

One element of these pipelines is one batch, because an element per row would spend more time in
Python than the model spends computing. A batch is a function of its number alone, so the position
in the data is one integer, and a pipeline that is moved there goes on exactly as before.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grain
import numpy as np

from .errors import UserError

Arrays = Mapping[str, np.ndarray]


class Source(Protocol):
  """Batch number -> batch, as the classes here; picklable, and a function of the number alone."""

  def __len__(self) -> int: ...

  def __getitem__(self, number: int) -> Any: ...


class ShuffledBatches:
  """Batch number -> rows of a split, in a new order every epoch.

  Batches run across the end of an epoch, so that every row is seen exactly once per epoch with
  any batch size, and all batches have one shape.

  Args:
    columns: arrays with equally many rows.
    rows: the split as a range of rows, `(start, stop)`.
    batch_size: rows of a global batch.
    seed: of the order; epoch `e` is ordered by `(seed, e)`. The permutation is held in memory, 8
      bytes a row.
    num_batches: the length of the source.
    shard: `(index, count)`; this host's part of every global batch. The parts of all hosts
      concatenated are the batch that a single host would read.
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
    if rows[1] <= rows[0]:
      raise UserError(f"the training split is empty: rows {rows[0]} to {rows[1]}")
    self._columns, self._rows, self._seed = columns, rows, seed
    self._batch_size, self._num_batches = batch_size, num_batches
    self._start, self._stop = part(batch_size, shard)
    self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

  def __len__(self) -> int:
    return self._num_batches

  def __getitem__(self, number: int) -> dict[str, np.ndarray]:
    base = number * self._batch_size
    positions = np.arange(base + self._start, base + self._stop)
    epochs, offsets = np.divmod(positions, self._rows[1] - self._rows[0])
    picked = np.empty_like(positions)
    for epoch in np.unique(epochs):
      inside = epochs == epoch
      picked[inside] = self._rows[0] + self._permutation(int(epoch))[offsets[inside]]
    return {name: array[picked] for name, array in self._columns.items()}

  def _permutation(self, epoch: int) -> np.ndarray:
    cached, order = self._order  # one assignment, one read: threads may race but never mix epochs
    if cached != epoch:
      generator = np.random.default_rng((self._seed, epoch))
      order = generator.permutation(self._rows[1] - self._rows[0])
      self._order = (epoch, order)
    return order

  def __getstate__(self) -> dict[str, Any]:
    return self.__dict__ | {"_order": (-1, np.empty(0, np.int64))}

  def __repr__(self) -> str:
    return f"ShuffledBatches({self._rows}, batch_size={self._batch_size}, seed={self._seed})"


class SequentialBatches:
  """Batch number -> rows of a split in order, once, the last batch filled up to the full size.

  Every batch carries `mask`, bool `[batch_size]`: False where the row is filling. Filling rows hold
  `fill[name]`, or 0.
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
    self._columns, self._rows, self._batch_size = columns, rows, batch_size
    self._fill = dict(fill or {})
    self._start, self._stop = part(batch_size, shard)

  def __len__(self) -> int:
    return -(-(self._rows[1] - self._rows[0]) // self._batch_size)

  def __getitem__(self, number: int) -> dict[str, np.ndarray]:
    base = self._rows[0] + number * self._batch_size
    start = min(base + self._start, self._rows[1])
    stop = min(base + self._stop, self._rows[1])
    size = self._stop - self._start
    batch = {"mask": np.arange(size) < stop - start}
    for name, array in self._columns.items():
      batch[name] = np.full((size, *array.shape[1:]), self._fill.get(name, 0), array.dtype)
      batch[name][: stop - start] = array[start:stop]
    return batch

  def __repr__(self) -> str:
    return f"SequentialBatches({self._rows}, batch_size={self._batch_size})"


def part(size: int, shard: tuple[int, int], name: str = "batch_size") -> tuple[int, int]:
  """Returns the first and last place, exclusive, of a global batch that `(index, count)` reads.

  Raises:
    ValueError: the hosts cannot share it evenly; says so of `name`.
  """
  index, count = shard
  if size % count:
    raise UserError(f"{name} {size} must be a multiple of the {count} hosts")
  return index * size // count, (index + 1) * size // count


def batches(
  source: Source,
  transform: Callable[[Any], Any],
  *,
  num_threads: int = 1,
  num_workers: int = 0,
) -> grain.IterDataset:
  """Returns a Grain dataset whose elements are `transform(batch)`, read ahead in the background.

  Args:
    source: where the batches come from.
    transform: NumPy to NumPy; must be picklable where `num_workers > 0`. It runs on the host, in a
      thread or a worker process, and must not touch a device.
    num_threads: threads that read ahead.
    num_workers: worker processes, each with its own threads; 0 reads in this process. Grain's
      workers need absl's flags parsed: outside of `app.run`, call `flags.FLAGS.mark_as_parsed()`.
  """
  dataset = grain.MapDataset.source(source).map(transform)
  options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=4 * num_threads)
  iterable = dataset.to_iter_dataset(options)
  if num_workers:
    iterable = iterable.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
  return iterable
