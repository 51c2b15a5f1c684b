"""Sequences of items: leave one out, packed for training, one history per user for evaluation.

`load` prepares a data set once (see `recipes.cache`): `items` int32 `[interactions]`, the users
one after the other, `offsets` int64 `[users + 1]`, and from them the packed rows that training
reads. The last item of a user is tested, the one before it validated, and the rest train; users
with fewer than three items train only.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import scipy.sparse

from .. import cache, packing, pipeline
from .. import mesh as mesh_lib
from ..cache import DataSet
from ..evaluation import retrieval

Batch = dict[str, np.ndarray]
_ROWS = 4096  # that are looked at at once
_HIDDEN = 0.2  # share of a sequence that BERT4Rec hides, as in the authors' `gen_data_fin.py`
HELD_OUT = {"train": 2, "valid": 2, "test": 1}  # items at the end that a split must not see


@dataclasses.dataclass(frozen=True)
class SequenceData:
  """A prepared data set.

  Attributes:
    columns: `items` int32 `[interactions]` and `offsets` int64 `[users + 1]`.
    packed: `items`, `targets`, `segments` and `positions`, int32 `[rows, max_length]`; see `pack`.
    sha256: hashes of the source files by name, or of the generated columns.
    best: metrics of the process that generated the data, where it is known.
    serve: the folder of what serving needs besides the model; None where there is none.
  """

  columns: Mapping[str, np.ndarray]
  packed: Mapping[str, np.ndarray]
  num_items: int
  sha256: Mapping[str, str]
  best: Mapping[str, float]
  serve: Path | None = None

  @property
  def num_examples(self) -> int:
    """Packed rows that train."""
    return len(self.packed["items"])

  @property
  def statistics(self) -> dict[str, float]:
    """Users, items, interactions, packed rows, and the share of all pairs that there are."""
    users, items = len(self.columns["offsets"]) - 1, len(self.columns["items"])
    return {
      "users": users,
      "items": self.num_items,
      "interactions": items,
      "packed rows": self.num_examples,
      "mean length": items / users,
      "density": items / (users * self.num_items),
    }

  @property
  def lengths(self) -> np.ndarray:
    """Items of each user, int64 `[users]`."""
    return np.diff(self.columns["offsets"])

  @property
  def evaluated(self) -> np.ndarray:
    """The users who are validated and tested, int64."""
    return np.flatnonzero(self.lengths >= 3)


def data_set(name: str) -> DataSet:
  """Returns the data set that `config.dataset` names; imports what prepares it."""
  from ..tables import settings as table_settings
  from . import synthetic, table

  if name == "synthetic":
    return DataSet(synthetic.settings, synthetic.build)
  if name == "table":
    return DataSet(table_settings.settings, table.build)
  return DataSet(table_settings.declared(table.published), table.build, hint=table.HINT)


def load(config) -> SequenceData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared."""
  prepared = cache.load(data_set(config.dataset), config, "sequences-")
  columns = prepared.columns
  layout = {
    "format": 4,
    "of": prepared.name,
    "max_length": config.max_length,
    "positions": config.positions,
    "windows": config.windows,
    "next": config.model != "bert4rec",
  }

  def build(folder: Path) -> dict[str, Any]:
    rows = pack(
      columns["items"],
      columns["offsets"],
      layout["max_length"],
      positions=layout["positions"],
      next_item=layout["next"],
      windows=layout["windows"],
    )
    for name, array in rows.items():
      cache.column(folder, name, array.shape, array.dtype)[:] = array
    return {"rows": len(rows["items"])}

  packed, _ = cache.prepared(config.cache_dir, "packed", layout, build)
  return SequenceData(
    columns,
    packed,
    prepared.meta["num_items"],
    prepared.sha256,
    prepared.best,
    prepared.serve,
  )


def train_lengths(lengths: np.ndarray, held_out: int = HELD_OUT["train"]) -> np.ndarray:
  """Returns how many items of each user train, of how many there are; few hold nothing out."""
  return np.where(lengths >= 3, lengths - held_out, lengths)


def pack(
  items: np.ndarray,
  offsets: np.ndarray,
  width: int,
  *,
  positions: str,
  next_item: bool,
  windows: bool = True,
) -> dict[str, np.ndarray]:
  """Returns the training items of all users in rows of `width`, int32 `[rows, width]` each.

  Args:
    items, offsets: the columns of a data set.
    width: of a row.
    positions: see `packing.positions`.
    next_item: every item but the first is the target of the one before it. Otherwise `targets` are
      the items themselves, of which a masked model hides a part.
    windows: cuts longer sequences into windows, the last of which ends with the sequence, so that
      every item is the target of one window. Otherwise only the last `width` items are kept.

  Returns:
    `items` and `targets`, -1 where there is none; `segments`, which of the row's sequences it is,
    -1 for none; and `positions`, the place in the sequence.
  """
  starts = offsets[:-1] + next_item
  ends = offsets[:-1] + train_lengths(np.diff(offsets))
  more = -(-np.maximum(ends - starts - width, 0) // width) if windows else np.zeros_like(ends)
  counts = np.where(ends > starts, 1 + more, 0)
  user, earlier = np.repeat(np.arange(len(counts)), counts), packing.ranges(0 * counts, counts)
  ends = ends[user] - width * earlier
  first = np.maximum(starts[user], ends - width)
  lengths = ends - first
  row, column = packing.place(lengths, width)
  rows = int(row.max(initial=-1)) + 1
  where = packing.ranges(row * width + column, lengths)
  order = np.argsort(row * width + column)
  numbers = np.empty(len(row), np.int64)  # of a sequence within its row
  numbers[order] = np.arange(len(row)) - np.searchsorted(row[order], row[order])

  def laid(values: np.ndarray, fill: int) -> np.ndarray:
    flat = np.full(rows * width, fill, np.int32)
    flat[where] = values
    return flat.reshape(rows, width)

  last = packing.ranges(first, lengths)
  return {
    "items": laid(items[last - next_item], -1),
    "targets": laid(items[last], -1),
    "segments": laid(np.repeat(numbers, lengths), -1),
    "positions": laid(packing.positions(lengths, width, positions), 0),
  }


def matrix(data: SequenceData, users: np.ndarray, held_out: int) -> scipy.sparse.csr_matrix:
  """Returns float32 `[users, num_items]`, 1 where a user has an item before the `held_out` last.

  Of users with fewer than three items, who hold nothing out, all items.
  """
  lengths = train_lengths(data.lengths[users], held_out)
  items = data.columns["items"][packing.ranges(data.columns["offsets"][users], lengths)]
  return _ones(np.repeat(np.arange(len(users)), lengths), items, len(users), data.num_items)


def targets(data: SequenceData, users: np.ndarray, held_out: int) -> scipy.sparse.csr_matrix:
  """Returns float32 `[users, num_items]`, 1 at the first of each user's `held_out` last items."""
  items = data.columns["items"][data.columns["offsets"][users + 1] - held_out]
  return _ones(np.arange(len(users)), items, len(users), data.num_items)


def _ones(rows, columns, *shape: int) -> scipy.sparse.csr_matrix:
  matrix = scipy.sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=shape)
  matrix.data[:] = 1  # an item that came twice was added up
  return matrix


def train_batches(data: SequenceData, config, start: int = 0) -> grain.IterDataset:
  """Returns the batches of `TrainBatches` from number `start` on."""
  source = TrainBatches(data, config, shard=mesh_lib.shard())
  return pipeline.batches(source, dict, start=start, num_workers=config.num_workers)


def batch_shapes(data: SequenceData, config) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns a global training batch of `TrainBatches` as `jax.ShapeDtypeStruct`s."""
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.tree.map(shape, TrainBatches(data, config)[0])


class TrainBatches:
  """Batch number -> packed rows, and what the model and the loss of a config draw for them.

  A batch is the packed columns and
    for bert4rec `where`, `targets`, and `items` without the hidden ones; see `masked`;
    for a loss with samples `negatives` int32 `[number]`, drawn with replacement for all positions
      of the global batch, and `log_expected` float32 `[number]`, the log of how often each was
      expected to be drawn; a host has its part of both.

  Everything is a function of the seed and the number. Draws are made for the global batch and cut,
  so that they do not depend on how many hosts there are.

  Args:
    config: `batch_size`, `seed`, `steps`, `model`, `loss` and `negatives`.
    shard: `(index, count)`; this host's part of every batch.

  """

  def __init__(self, data: SequenceData, config, *, shard: tuple[int, int] = (0, 1)):
    self._rows = pipeline.ShuffledBatches(
      data.packed,
      (0, data.num_examples),
      batch_size=config.batch_size,
      seed=config.seed,
      num_batches=config.steps,
      shard=shard,
    )
    self._batch_size, self._seed = config.batch_size, config.seed
    self._part = slice(*pipeline.part(config.batch_size, shard))
    self._hides = config.model == "bert4rec"
    if self._hides:
      self._most_hidden = most_hidden(data.packed)
    self._num_items = data.num_items
    self._negatives = 0 if config.loss == "softmax" else config.negatives.number

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, number: int) -> Batch:
    batch, draw = self._rows[number], np.random.default_rng((self._seed, number, 1))
    if self._hides:
      order = draw.random((self._batch_size, batch["items"].shape[1]))[self._part]
      batch = masked(batch, order, self._most_hidden)
    if self._negatives:
      negatives = (draw.random(self._negatives) * self._num_items).astype(np.int32)
      first, last = (
        self._negatives * row // self._batch_size for row in (self._part.start, self._part.stop)
      )
      negatives = negatives[first:last]
      log_expected = np.full(negatives.shape, np.log(self._negatives / self._num_items), np.float32)
      batch = batch | {"negatives": negatives, "log_expected": log_expected}
    return batch

  def __repr__(self) -> str:
    return f"TrainBatches({self._rows!r}, negatives={self._negatives})"


def masked(batch: Batch, order: np.ndarray, most: int) -> Batch:
  """Hides a fifth of every sequence, at least one item: BERT4Rec's cloze task.

  Args:
    batch: packed rows, `[B, L]`.
    order: random `[B, L]`; the least of a sequence are hidden.
    most: the width of `where`; see `most_hidden`.

  Returns:
    `items` with -1 where one is hidden, and for up to `most` of them per row `where`, the column
    (0 for none), and `targets`, the item (-1 for none).
  """
  sequence, number = _sequences(batch)
  by_order = np.lexsort((order.ravel(), sequence.ravel()))
  rank = np.empty(len(by_order), np.int64)  # of an item within its sequence
  in_turn = sequence.ravel()[by_order]
  rank[by_order] = np.arange(len(in_turn)) - np.searchsorted(in_turn, in_turn)
  hidden = rank.reshape(order.shape) < _hidden(number)[sequence]
  where = np.argsort(~hidden, axis=1, kind="stable")[:, :most]
  is_hidden = np.take_along_axis(hidden, where, axis=1)
  targets = np.where(is_hidden, np.take_along_axis(batch["targets"], where, axis=1), -1)
  return batch | {
    "items": np.where(hidden, -1, batch["items"]).astype(np.int32),
    "where": np.where(is_hidden, where, 0).astype(np.int32),
    "targets": targets.astype(np.int32),
  }


def most_hidden(packed: Mapping[str, np.ndarray]) -> int:
  """Returns how many items `masked` hides in a row at most, of all packed rows."""
  most, length = 1, packed["segments"].shape[1]
  for start in range(0, len(packed["segments"]), _ROWS):
    part = {name: packed[name][start : start + _ROWS] for name in ("segments", "targets")}
    hidden = _hidden(_sequences(part)[1])[:-1].reshape(-1, length).sum(axis=1)
    most = max(most, int(hidden.max()))
  return most


def _sequences(batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the number of each target's sequence, int `[B, L]`, and the sequences' sizes.

  Sequence s of row b is `b * L + s`; the last entry collects non-targets, and has size 0.
  """
  rows, length = batch["segments"].shape
  sequence = np.arange(rows)[:, None] * length + batch["segments"]
  sequence = np.where(batch["targets"] >= 0, sequence, rows * length)
  return sequence, np.append(np.bincount(sequence.ravel(), minlength=rows * length + 1)[:-1], 0)


def _hidden(sizes: np.ndarray) -> np.ndarray:
  return np.where(sizes > 0, np.maximum(np.round(_HIDDEN * sizes).astype(np.int64), 1), 0)


def eval_batches(data: SequenceData, split: str, config) -> grain.IterDataset:
  """Returns the evaluated users once; see `EvalBatches`."""
  source = EvalBatches(data, split, config, shard=mesh_lib.shard())
  return pipeline.batches(source, dict, num_workers=config.num_workers)


class EvalBatches:
  """Batch number -> users with their histories, of similar length within a batch.

  A batch holds, for B users, the `packing.inference_batch` of their last items, of width W, `seen`
  int32 `[B, E]`, all items of the history (-1 for none), `target` `[B, 1]`, the held-out item (-1
  where the row fills up the last batch), and `user` `[B]`.
  W and E are of few sizes, so that few shapes are compiled.

  Args:
    data: the data set, of which the evaluated users are asked for.
    split: what was held out for it is the target, and hidden with all that comes later.
    config: `eval_batch_size`, `max_length`, `positions`, see `packing.positions`, and `model`:
      bert4rec predicts at one more column, which has no item (a mask), the others at the last item.
    shard: `(index, count)`; this host's part of every batch.
  """

  def __init__(self, data: SequenceData, split: str, config, *, shard: tuple[int, int] = (0, 1)):
    users, offsets = data.evaluated, data.columns["offsets"]
    self._items, self._batch_size = data.columns["items"], config.eval_batch_size
    self._part = pipeline.part(config.eval_batch_size, shard, "eval_batch_size")
    self._max_length, self._positions = config.max_length, config.positions
    self._ask = config.model == "bert4rec"
    start, stop = offsets[users], offsets[users + 1] - HELD_OUT[split]
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
    seen = self._items[packing.ranges(start, stop - start)]
    kept = np.minimum(stop - start, self._max_length - self._ask)
    width = min(retrieval.list_width(longest + self._ask), self._max_length)
    items = self._items[packing.ranges(stop - kept, kept)]
    how = {"places": self._max_length, "aligned": self._positions, "ask": self._ask}
    batch = packing.inference_batch(items, kept, width, **how) | {
      "seen": packing.padded(seen, stop - start, retrieval.list_width(longest)),
      "target": self._items[stop][:, None].astype(np.int32),
      "user": users.astype(np.int32),
    }
    fill = {"items": -1, "segments": -1, "seen": -1, "target": -1, "user": -1}
    return {
      name: np.pad(x, [(0, filled)] + [(0, 0)] * (x.ndim - 1), constant_values=fill.get(name, 0))
      for name, x in batch.items()
    }

  def __repr__(self) -> str:
    return f"EvalBatches({len(self._users)} users, batch_size={self._batch_size})"
