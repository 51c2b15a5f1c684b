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
import numpy as np
import scipy.sparse

from .. import cache, packing, pipeline
from .. import mesh as mesh_lib
from ..cache import DataSet
from ..evaluation import baselines, retrieval

Batch = dict[str, np.ndarray]
HELD_OUT = {"train": 2, "valid": 2, "test": 1}  # items at the end that a split must not see


@dataclasses.dataclass(frozen=True)
class SequenceData(cache.Prepared):
  """A prepared data set: `items` int32 `[interactions]` and `offsets` int64 `[users + 1]`.

  Attributes:
    packed: `items`, `targets`, `segments` and `positions`, int32 `[rows, max_length]`; see `pack`.
  """

  packed: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def num_items(self) -> int:
    return self.meta["num_items"]

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

  def matrix(self, users: np.ndarray, held_out: int) -> scipy.sparse.csr_matrix:
    """Returns float32 `[users, num_items]`, 1 where a user has an item before the `held_out` last.

    Of users with fewer than three items, who hold nothing out, all items.
    """
    lengths = train_lengths(self.lengths[users], held_out)
    items = self.columns["items"][packing.ranges(self.columns["offsets"][users], lengths)]
    of_user = np.repeat(np.arange(len(users)), lengths)
    return baselines.ones(of_user, items, (len(users), self.num_items))

  def targets(self, users: np.ndarray, held_out: int) -> scipy.sparse.csr_matrix:
    """Returns float32 `[users, num_items]`, 1 at the first of each user's `held_out` last items."""
    items = self.columns["items"][self.columns["offsets"][users + 1] - held_out]
    return baselines.ones(np.arange(len(users)), items, (len(users), self.num_items))

  def baseline_tasks(self, config) -> Mapping[str, baselines.Task]:
    """Returns, by name, functions that fit a baseline on training items and return its metrics."""
    histories, relevant = (
      {split: of(self.evaluated, HELD_OUT[split]) for split in ("valid", "test")}
      for of in (self.matrix, self.targets)
    )
    train = self.matrix(np.arange(len(self.lengths)), HELD_OUT["train"])
    return baselines.tasks(train, histories, relevant, config)


def data_set(name: str) -> DataSet:
  """Returns the data set that `config.dataset` names; imports what prepares it."""
  from ..tables import settings as table_settings
  from . import synthetic, table

  if name == "synthetic":
    return DataSet(synthetic.settings, synthetic.build)
  if name == "table":
    return DataSet(table_settings.settings, table.build)
  return DataSet(table_settings.declared(table.published), table.build)


def load(config) -> SequenceData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared."""
  prepared = cache.load(data_set(config.dataset), config, "sequences-")
  how = {"positions": config.positions, "windows": config.windows}

  def build(folder: Path) -> dict[str, Any]:
    columns = prepared.columns
    rows = pack(columns["items"], columns["offsets"], config.max_length, **how)
    for name, array in rows.items():
      cache.column(folder, name, array.shape, array.dtype)[:] = array
    return {}

  layout = {"format": 6, "of": prepared.name, "max_length": config.max_length, **how}
  packed, _ = cache.prepared(config.cache_dir, "packed", layout, build)
  return SequenceData(**vars(prepared), packed=packed)


def train_lengths(lengths: np.ndarray, held_out: int = HELD_OUT["train"]) -> np.ndarray:
  """Returns how many items of each user train, of how many there are; few hold nothing out."""
  return np.where(lengths >= 3, lengths - held_out, lengths)


def pack(
  items: np.ndarray, offsets: np.ndarray, width: int, *, positions: str, windows: bool = True
) -> dict[str, np.ndarray]:
  """Returns the training items of all users in rows of `width`, int32 `[rows, width]` each.

  Args:
    items, offsets: the columns of a data set.
    width: of a row.
    positions: see `packing.positions`.
    windows: cuts longer sequences into windows, the last of which ends with the sequence, so that
      every item but the first is the target of one window. Otherwise only the last `width` targets
      are kept.

  Returns:
    `items` and `targets`, which follow them, -1 where there is none; `segments`, the column where
    the sequence begins, -1 for none; and `positions`, the place in the sequence.
  """
  starts, ends = offsets[:-1] + 1, offsets[:-1] + train_lengths(np.diff(offsets))  # of targets
  if not windows:
    starts = np.maximum(starts, ends - width)
  counts = np.maximum(-(-(ends - starts) // width), 0)
  ends = np.repeat(ends, counts) - width * packing.ranges(0 * counts, counts)
  starts = np.maximum(np.repeat(starts, counts), ends - width)
  lengths = ends - starts
  row, column = packing.place(lengths, width)
  where, targets = packing.ranges(row * width + column, lengths), packing.ranges(starts, lengths)

  def laid(values: np.ndarray, fill: int) -> np.ndarray:
    rows = np.full((int(row.max(initial=-1)) + 1, width), fill, np.int32)
    rows.reshape(-1)[where] = values
    return rows

  return {
    "items": laid(items[targets - 1], -1),
    "targets": laid(items[targets], -1),
    "segments": laid(np.repeat(column, lengths), -1),
    "positions": laid(packing.positions(lengths, width, positions), 0),
  }


def train_batches(data: SequenceData, config, start: int = 0) -> grain.IterDataset:
  """Returns the batches of `TrainBatches` from number `start` on."""
  source = TrainBatches(data, config, shard=mesh_lib.shard())
  return pipeline.batches(source, dict, start=start)


class TrainBatches:
  """Batch number -> packed rows, and the items that the loss of a config samples.

  A loss with samples has `negatives` int32 `[number]` as well, drawn uniformly with replacement for
  all positions of the global batch, of which a host has its part.

  Everything is a function of the seed and the number. Draws are made for the global batch and cut,
  so that they do not depend on how many hosts there are.

  Args:
    config: `batch_size`, `seed`, `steps`, `loss` and `negatives`.
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
    self._seed, self._shard, self._num_items = config.seed, shard, data.num_items
    self._negatives = 0 if config.loss == "softmax" else config.negatives.number

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, number: int) -> Batch:
    batch = self._rows[number]
    if self._negatives:
      draw = np.random.default_rng((self._seed, number, 1))
      negatives = (draw.random(self._negatives) * self._num_items).astype(np.int32)
      batch["negatives"] = negatives[slice(*pipeline.part(self._negatives, self._shard))]
    return batch


def eval_batches(data: SequenceData, split: str, config) -> grain.IterDataset:
  """Returns the evaluated users once; see `EvalBatches`."""
  source = EvalBatches(data, split, config, shard=mesh_lib.shard())
  return pipeline.batches(source, dict)


class EvalBatches:
  """Batch number -> users with their histories, of similar length within a batch.

  A batch holds, for B users, the `packing.inference_batch` of their last items, of width W, `seen`
  int32 `[B, E]`, all items of the history (-1 for none), `target` `[B, 1]`, the held-out item, and
  `user` `[B]`; both are -1 where a row fills up the last batch.
  W and E are of few sizes, so that few shapes are compiled.

  Args:
    split: what was held out for it is the target, and hidden with all that comes later.
    config: `eval_batch_size`, `max_length` and `positions`; see `packing.positions`.
    shard: `(index, count)`; this host's part of every batch.
  """

  def __init__(self, data: SequenceData, split: str, config, *, shard: tuple[int, int] = (0, 1)):
    users, offsets = data.evaluated, data.columns["offsets"]
    self._items, self._config = data.columns["items"], config
    start, stop = offsets[users], offsets[users + 1] - HELD_OUT[split]
    self._lengths, order = np.sort(stop - start), np.argsort(stop - start, kind="stable")
    examples = {"user": users[order], "start": start[order], "stop": stop[order]}
    self._examples = pipeline.SequentialBatches(
      examples, (0, len(order)), batch_size=config.eval_batch_size, fill={"user": -1}, shard=shard
    )

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, number: int) -> Batch:
    config, batch = self._config, self._examples[number]
    # The longest of all hosts, the last one of the global batch: one shape.
    width = retrieval.list_width(int(self._lengths[: (number + 1) * config.eval_batch_size][-1]))
    start, stop = batch["start"], batch["stop"]
    seen = self._items[packing.ranges(start, stop - start)]
    places, aligned = config.max_length, config.positions
    kept = np.minimum(stop - start, places)
    items = self._items[packing.ranges(stop - kept, kept)]
    rows = packing.padded(items, kept, min(width, places))
    return packing.inference_batch(rows, places=places, aligned=aligned) | {
      "seen": packing.padded(seen, stop - start, width),
      "target": np.where(batch["mask"], self._items[stop], -1)[:, None].astype(np.int32),
      "user": batch["user"].astype(np.int32),
    }
