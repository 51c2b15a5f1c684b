"""Batches of sequences by number, NumPy only: what is drawn for a training step, and histories.

Everything is a function of the seed and the batch number. Draws are made for the global batch and
cut, so that they do not depend on how many hosts there are.
"""

from collections.abc import Callable, Mapping

import numpy as np

from .. import pipeline, sampling
from ..errors import UserError
from ..evaluation import retrieval
from . import packing

Batch = dict[str, np.ndarray]
Draw = Callable[[Batch, np.random.Generator, tuple[int, int], int], Batch]


class DrawnBatches:
  """Batch number -> packed rows, and what `draws` add to them.

  Args:
    rows: batch number -> this host's part of the rows.
    draws: `(batch, generator, part, batch_size) -> what it adds`; `part` is the range of rows of
      the global batch that this host has.
    batch_size: of the global batch.
    seed: of the draws; batch n draws from `(seed, n, 1)`.
    shard: `(index, count)` of this host.
  """

  def __init__(
    self, rows, draws: list[Draw], *, batch_size: int, seed: int, shard: tuple[int, int] = (0, 1)
  ):
    self._rows, self._draws, self._seed, self._batch_size = rows, draws, seed, batch_size
    self._part = pipeline.part(batch_size, shard)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, number: int) -> Batch:
    batch = self._rows[number]
    generator = np.random.default_rng((self._seed, number, 1))
    for draw in self._draws:
      batch = batch | draw(batch, generator, self._part, self._batch_size)
    return batch

  def __repr__(self) -> str:
    return f"DrawnBatches({self._rows!r}, seed={self._seed})"


def draws(config, num_items: int, counts: np.ndarray) -> list[Draw]:
  """Returns the draws that the model and the loss of a config need.

  Raises:
    ValueError: an unknown loss or way to draw negatives, or numbers that make no sense.
  """
  chosen: list[Draw] = []
  if config.model == "bert4rec":
    chosen.append(Mask(config.mask_rate))
  if config.loss != "softmax":
    chosen.append(
      Negatives(
        config.negatives.number,
        item_probabilities(config.negatives.distribution, num_items, counts),
        shared=config.negatives.shared,
      )
    )
  return chosen


def item_probabilities(distribution: str, num_items: int, counts: np.ndarray) -> np.ndarray:
  """Returns how likely each item is drawn, float64 `[num_items]`: "uniform" or "popularity".

  Raises:
    ValueError: the name is another one.
  """
  if distribution == "uniform":
    return np.full(num_items, 1 / num_items)
  if distribution == "popularity":
    return counts / counts.sum()
  raise UserError(f"unknown distribution {distribution!r}: choose uniform or popularity")


class Mask:
  """Hides a share of the items of every row, at random: BERT4Rec's cloze task.

  Adds `items` with -1 where one is hidden, and for up to `ceil(rate * width)` of them per row
  `where`, the column (0 for none), and `targets`, the item (-1 for none).
  """

  def __init__(self, rate: float):
    if not 0 < rate < 1:
      raise UserError(f"mask_rate must be between 0 and 1, got {rate}")
    self._rate = rate

  def __call__(self, batch, generator, part, batch_size) -> Batch:
    present = batch["segments"] >= 0
    width = present.shape[1]
    most = int(np.ceil(self._rate * width))
    order = generator.random((batch_size, width))[part[0] : part[1]]
    where = np.argsort(np.where(present, order, 2.0), axis=1)[:, :most]
    number = np.maximum(np.round(self._rate * present.sum(axis=1)).astype(np.int64), 1)
    hidden = np.arange(most) < np.minimum(number, present.sum(axis=1))[:, None]
    targets = np.where(hidden, np.take_along_axis(batch["targets"], where, axis=1), -1)
    items = batch["items"].copy()
    row, place = np.nonzero(hidden)
    items[row, where[row, place]] = -1
    where = np.where(hidden, where, 0)
    return {
      "items": items,
      "where": where.astype(np.int32),
      "targets": targets.astype(np.int32),
    }


class Negatives:
  """Draws wrong items with replacement.

  Adds `negatives` int32 and `log_expected` float32, the log of how often each was expected to be
  drawn. Shared: `[number]`, the same for all positions of the global batch; a host has its part of
  them. Else `[rows, positions, number]`, none of which is in the row where that can be had.
  """

  _TRIES = 8

  def __init__(self, number: int, probabilities: np.ndarray, *, shared: bool):
    if number < 1:
      raise UserError(f"negatives.number must be at least 1, got {number}")
    self._number, self._shared = number, shared
    self._log_expected = np.log(np.maximum(number * probabilities, 1e-30)).astype(np.float32)
    self._cumulative = sampling.cumulative(probabilities)

  def __call__(self, batch, generator, part, batch_size) -> Batch:
    if self._shared:
      first, last = (self._number * end // batch_size for end in part)
      negatives = sampling.draw(generator, self._cumulative, self._number)[first:last]
    else:
      shape = (batch_size, batch["targets"].shape[1], self._number)
      negatives = self._unseen(batch, generator, shape, part)
    return {"negatives": negatives, "log_expected": self._log_expected[negatives]}

  def _unseen(self, batch, generator, shape, part) -> np.ndarray:
    size = len(self._cumulative)
    row = np.arange(part[1] - part[0]) * size
    seen = np.concatenate([batch["items"], batch["targets"]], axis=1)
    seen = np.unique((row[:, None] + seen)[seen >= 0])
    # Drawn for all hosts every time, so that the draws of one do not depend on another's.
    draw = lambda: sampling.draw(generator, self._cumulative, shape)[part[0] : part[1]]
    negatives = draw()
    for _ in range(self._TRIES):
      bad = np.isin(row[:, None, None] + negatives, seen)
      if not bad.any():
        break
      negatives = np.where(bad, draw(), negatives)
    return negatives


class Histories:
  """Batch number -> users with their histories, of similar length within a batch.

  A batch holds, for B users, `items` int32 `[B, W]` (the last ones, from column 0 on, -1 after
  them), `segments` `[B, W]` (0, or -1 for none), `positions` `[B, W]`, `last` `[B]`, the column
  whose output is the prediction, `seen` `[B, E]`, all items of the history (-1 for none), `target`
  `[B, 1]`, the held-out item (-1 where the row fills up the last batch), and `user` `[B]`.
  W and E are of few sizes, so that few shapes are compiled.

  Args:
    columns: `items` and `offsets`.
    users: whom to ask for, int `[users]`.
    held_out: the last items that are hidden; the first of them is the target.
    batch_size: users of a global batch.
    max_length: the model's.
    positions: see `packing.positions`.
    ask: the prediction is the output of one more column, which has no item (a mask), instead of
      the output of the last item.
    shard: `(index, count)` of this host.
  """

  def __init__(
    self,
    columns: Mapping[str, np.ndarray],
    users: np.ndarray,
    *,
    held_out: int,
    batch_size: int,
    max_length: int,
    positions: str,
    ask: bool,
    shard: tuple[int, int] = (0, 1),
  ):
    self._columns, self._batch_size = columns, batch_size
    self._part = pipeline.part(batch_size, shard, "eval_batch_size")
    self._max_length, self._positions, self._ask = max_length, positions, ask
    start, stop = columns["offsets"][users], columns["offsets"][users + 1] - held_out
    order = np.argsort(stop - start, kind="stable")
    self._users, self._start, self._stop = users[order], start[order], stop[order]

  def __len__(self) -> int:
    return -(-len(self._users) // self._batch_size)

  def __getitem__(self, number: int) -> Batch:
    every = slice(number * self._batch_size, (number + 1) * self._batch_size)
    longest = int((self._stop[every] - self._start[every]).max())  # of all hosts: one shape
    first, last = self._part
    own = slice(every.start + first, every.start + last)
    users, start, stop = self._users[own], self._start[own], self._stop[own]
    filled = last - first - len(users)
    seen = self._cut(start, stop, retrieval.list_width(longest))
    kept = np.minimum(stop - start, self._max_length - self._ask)
    width = min(retrieval.list_width(longest + self._ask), self._max_length)
    lengths = kept + self._ask
    columns = np.arange(width)
    batch = {
      "items": self._cut(stop - kept, stop, width),
      "segments": np.where(columns < lengths[:, None], 0, -1).astype(np.int32),
      "positions": _rows(
        packing.positions(lengths, self._max_length, self._positions), lengths, width, 0
      ),
      "last": (lengths - 1).astype(np.int32),
      "seen": seen,
      "target": self._columns["items"][stop][:, None].astype(np.int32),
      "user": users.astype(np.int32),
    }
    fill = {"items": -1, "segments": -1, "seen": -1, "target": -1, "user": -1}
    return {
      name: np.pad(
        array,
        [(0, filled)] + [(0, 0)] * (array.ndim - 1),
        constant_values=fill.get(name, 0),
      )
      for name, array in batch.items()
    }

  def _cut(self, start: np.ndarray, stop: np.ndarray, width: int) -> np.ndarray:
    items = self._columns["items"][packing.ranges(start, stop - start)]
    return _rows(items, stop - start, width, -1)

  def __repr__(self) -> str:
    return f"Histories({len(self._users)} users, batch_size={self._batch_size})"


def _rows(values: np.ndarray, lengths: np.ndarray, width: int, fill: int) -> np.ndarray:
  """Returns flat values as int32 rows, `[len(lengths), width]`, filled up at the end."""
  rows = np.full((len(lengths), width), fill, np.int32)
  rows[np.arange(width) < lengths[:, None]] = values
  return rows
