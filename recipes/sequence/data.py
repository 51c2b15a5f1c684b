"""Sequences of items: leave one out, packed for training, one history per user for evaluation.

`load` prepares a data set once (see `recipes.datasets`): `items` int32 `[interactions]`, the users
one after the other, `offsets` int64 `[users + 1]`, and from them the packed rows that training
reads. The last item of a user is tested, the one before it validated, and the rest train; users
with fewer than three items train only.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import scipy.sparse

from .. import arrays, hosts, pipeline
from ..datasets import DataSet, Registry
from ..tables import settings as table_settings
from . import batches, files, packing, synthetic, table

DATA_SETS = Registry(
  {
    "file": DataSet(table_settings.declared(files.table), table.build, hint=files.HINT),
    "synthetic": DataSet(synthetic.settings, synthetic.build),
    "table": DataSet(table_settings.settings, table.build),
  },
  prefix="sequences-",
)
HELD_OUT = {"train": 2, "valid": 2, "test": 1}  # items at the end that a split must not see


@dataclasses.dataclass(frozen=True)
class SequenceData:
  """A prepared data set.

  Attributes:
    columns: `items` int32 `[interactions]` and `offsets` int64 `[users + 1]`.
    packed: `items`, `targets`, `segments` and `positions`, int32 `[rows, max_length]`; see `pack`.
    num_items: the size of the catalogue.
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


def load(config) -> SequenceData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared.

  Raises:
    UserError: as `Registry.load`.
  """
  prepared = DATA_SETS.load(config)
  columns = prepared.columns
  layout = {
    "format": 1,
    "of": prepared.name,
    "max_length": config.max_length,
    "positions": config.positions,
    "next": config.model != "bert4rec",
  }
  packed, _ = arrays.prepared(
    config.cache_dir, "packed", layout, functools.partial(_build_packed, columns, layout)
  )
  return SequenceData(
    columns, packed, prepared.meta["num_items"], prepared.sha256, prepared.best, prepared.serve
  )


def train_lengths(lengths: np.ndarray, held_out: int = HELD_OUT["train"]) -> np.ndarray:
  """Returns how many items of each user train, of how many there are; few hold nothing out."""
  return np.where(lengths >= 3, lengths - held_out, lengths)


def _build_packed(columns, layout: dict[str, Any], folder: Path) -> dict[str, Any]:
  built = pack(
    columns["items"],
    columns["offsets"],
    layout["max_length"],
    positions=layout["positions"],
    next_item=layout["next"],
  )
  for name, array in built.items():
    arrays.column(folder, name, array.shape, array.dtype)[:] = array
  return {"rows": len(built["items"])}


def pack(
  items: np.ndarray, offsets: np.ndarray, width: int, *, positions: str, next_item: bool
) -> dict[str, np.ndarray]:
  """Returns the training items of all users in rows of `width`, int32 `[rows, width]` each.

  Args:
    items, offsets: the columns of a data set.
    width: of a row; of longer sequences the last items are kept.
    positions: see `packing.positions`.
    next_item: every item but the first is the target of the one before it. Otherwise `targets` are
      the items themselves, of which a masked model hides a part.

  Returns:
    `items` and `targets`, -1 where there is none; `segments`, which of the row's sequences it is,
    -1 for none; `positions`, the place in the sequence.
  """
  ends = offsets[:-1] + train_lengths(np.diff(offsets))
  lengths = np.minimum(ends - offsets[:-1] - next_item, width)
  kept = lengths > 0
  ends, lengths = ends[kept], lengths[kept]
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

  last = packing.ranges(ends - lengths, lengths)
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


def train_counts(data: SequenceData) -> np.ndarray:
  """Returns how often each item occurs in the training items, int64 `[num_items]`."""
  first, lengths = data.columns["offsets"][:-1], train_lengths(data.lengths)
  items = data.columns["items"][packing.ranges(first, lengths)]
  return np.bincount(items, minlength=data.num_items)


def train_batches(data: SequenceData, config) -> grain.IterDataset:
  """Returns `config.steps` batches of `config.batch_size` packed rows, this process's part of each.

  They hold the packed columns, and what `batches.draws` adds for the model and the loss.
  """
  source = _drawn(data, config, hosts.shard())
  return pipeline.batches(source, dict, num_workers=config.num_workers)


def batch_shapes(data: SequenceData, config) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns a global training batch as `jax.ShapeDtypeStruct`s."""
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.tree.map(shape, _drawn(data, config, (0, 1))[0])


def _drawn(data: SequenceData, config, shard: tuple[int, int]) -> batches.DrawnBatches:
  rows = pipeline.ShuffledBatches(
    data.packed,
    (0, len(data.packed["items"])),
    batch_size=config.batch_size,
    seed=config.seed,
    num_batches=config.steps,
    shard=shard,
  )
  draws = batches.draws(config, data.num_items, train_counts(data))
  return batches.DrawnBatches(
    rows, draws, batch_size=config.batch_size, seed=config.seed, shard=shard
  )


def histories(data: SequenceData, split: str, config) -> batches.Histories:
  """Returns the histories of all evaluated users before the item of `split`."""
  return batches.Histories(
    data.columns,
    data.evaluated,
    held_out=HELD_OUT[split],
    batch_size=config.eval_batch_size,
    max_length=config.max_length,
    positions=config.positions,
    ask=config.model == "bert4rec",
    shard=hosts.shard(),
  )


def eval_batches(data: SequenceData, split: str, config) -> grain.IterDataset:
  """Returns the evaluated users once; see `batches.Histories`."""
  return pipeline.batches(histories(data, split, config), dict, num_workers=config.num_workers)
