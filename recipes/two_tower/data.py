"""Users and the items they chose, as batches: a pair for training, a user with lists to rank.

`load` prepares a data set once (see `recipes.cache` and `recipes.two_tower.table`). B is the
number of examples of this process, H of items in a history, M of extra negatives.
"""

import functools
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np
import scipy.sparse

import embed

from .. import cache, pipeline
from .. import mesh as mesh_lib
from ..cache import DataSet
from ..evaluation import baselines, retrieval
from ..training.features import Feature

EARLIER = {"valid": ("train",), "test": ("train", "valid")}  # the splits that a split may see
# Larger than any history, so that a stride of them visits each of its items once.
_PRIMES = 1_000_000 + np.array([3, 33, 37, 39, 81, 99, 117, 121, 133, 151, 159, 171, 183, 187, 193])


def log_popularity(counts: np.ndarray) -> np.ndarray:
  """Returns the log of each item's share of all interactions, float32 like its counts, `[items]`.

  An item without any has the share of half of one, so that it is rare, not impossible.

  >>> np.exp(log_popularity(np.array([3, 1, 0])))
  array([0.75 , 0.25 , 0.125], dtype=float32)
  """
  return np.log(np.maximum(counts, 0.5) / max(counts.sum(), 1)).astype(np.float32)


class RetrievalData(cache.Prepared):
  """A prepared data set, with the columns and the meta that `table.write` writes."""

  @property
  def num_users(self) -> int:
    return self.meta["users"]

  @property
  def num_items(self) -> int:
    return self.meta["items"]

  @functools.cached_property
  def features(self) -> dict[str, tuple[Feature, ...]]:
    """The features of each "user" and "item" in addition to the id."""
    of_sides = self.meta["features"].items()
    return {side: tuple(Feature(**feature) for feature in own) for side, own in of_sides}

  def rows(self, *splits: str) -> np.ndarray:
    """Returns the numbers of the rows of the named splits."""
    return np.concatenate([np.arange(*self.splits[split]) for split in splits])

  @property
  def num_examples(self) -> int:
    """Pairs that train."""
    return len(range(*self.splits["train"]))

  @property
  def statistics(self) -> dict[str, float]:
    """Users, items, pairs of the splits, and the share of all pairs that there are."""
    names = {"train": "training pairs", "valid": "validation pairs", "test": "test pairs"}
    pairs = {words: len(range(*self.splits[split])) for split, words in names.items()}
    density = sum(pairs.values()) / (self.num_users * self.num_items)
    return {"users": self.num_users, "items": self.num_items, **pairs, "density": density}

  def matrix(self, *splits: str) -> scipy.sparse.csr_matrix:
    """Returns the pairs of the named splits as float32 `[users, items]` of ones."""
    rows = self.rows(*splits)
    user, item = self.columns["user"][rows], self.columns["item"][rows]
    return baselines.ones(user, item, (self.num_users, self.num_items))

  def counts(self, *splits: str) -> np.ndarray:
    """Returns how often each item is in the named splits, int64 `[items]`."""
    return np.bincount(self.columns["item"][self.rows(*splits)], minlength=self.num_items)

  def popularity(self, *splits: str) -> np.ndarray:
    """Returns `log_popularity` in the named splits, float32 `[items]`."""
    return log_popularity(self.counts(*splits))

  def baseline_tasks(self, config) -> Mapping[str, baselines.Task]:
    """Returns, by name, functions that fit a baseline and return its metrics."""
    histories = {split: self.matrix(*earlier) for split, earlier in EARLIER.items()}
    relevant = {split: self.matrix(split) for split in EARLIER}
    if config.examples == "rows":
      for split in EARLIER:
        user, item = (self.columns[name][self.rows(split)] for name in ("user", "item"))
        histories[split] = histories[split][user]
        relevant[split] = baselines.ones(np.arange(len(item)), item, (len(item), self.num_items))
    return baselines.tasks(self.matrix("train"), histories, relevant, config)

  def inputs(self, side: str, ids: np.ndarray) -> dict[str, Any]:
    """Returns a tower's features of "user" or "item" ids, but for histories."""
    inputs: dict[str, Any] = {side: ids}
    for place, feature in enumerate(self.features[side]):
      found = feature.ids(self.columns[f"{side}_{place}"][ids])
      inputs[feature.name] = embed.Padded(found) if feature.valency > 1 else found
    return inputs


def data_set(name: str) -> DataSet:
  """Returns the data set that `config.dataset` names; imports what prepares it."""
  from ..tables import settings as table_settings
  from . import published, synthetic, table

  if name == "synthetic":
    return DataSet(synthetic.settings, synthetic.build)
  if name == "table":
    return DataSet(table_settings.settings, table.build)
  settings = table_settings.declared(getattr(published, name))
  return DataSet(settings, table.build)


def load(config) -> RetrievalData:
  """Prepares the data set `config.dataset`, or opens what an earlier run has prepared."""
  return RetrievalData(**vars(cache.load(data_set(config.dataset), config, "retrieval-")))


def train_batches(data: RetrievalData, config, start: int = 0) -> grain.IterDataset:
  """Returns the batches of `TrainBatches` from number `start` on."""
  source = TrainBatches(data, config, shard=mesh_lib.shard())
  return pipeline.batches(source, dict, start=start)


class TrainBatches:
  """Batch number -> pairs of the training split and extra negatives.

  A batch is
    `query`: `user` `[B]`, `history` `Padded` `[B, H]` (the user's other training items, in data
      that are `ordered` those before this one; a new random choice every time if there are more
      than H) and the user's features;
    `positive`, `negative`: `candidate`, which is `item` int32 `[B]`, `[M]` and the items' features,
      and `popularity`, float32 like the items, their `log_popularity` in training.

  Args:
    config: `batch_size`, `seed`, `steps`, `history` and `negatives.number`.
    shard: `(index, count)`; this process's part of every batch.
  """

  def __init__(self, data: RetrievalData, config, *, shard: tuple[int, int] = (0, 1)):
    self._data, self._seed = data, config.seed
    self._batch_size, self._history = config.batch_size, config.history
    self._ordered = data.meta["ordered"]
    self._extra, self._popularity = config.negatives.number, data.popularity("train")
    self._rows = pipeline.ShuffledBatches(
      {name: data.columns[name] for name in ("user", "item", "place")},
      data.splits["train"],
      batch_size=config.batch_size,
      seed=config.seed,
      num_batches=config.steps,
      shard=shard,
    )
    self._part = slice(*pipeline.part(config.batch_size, shard))
    self._extra_part = slice(*pipeline.part(config.negatives.number, shard))

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, number: int) -> dict[str, Any]:
    rows, draw = self._rows[number], np.random.default_rng((self._seed, 1, number))
    # Drawn for the whole batch, whoever reads it, so that it does not depend on the processes.
    turn = draw.random(self._batch_size)[self._part]
    stride = draw.choice(_PRIMES, self._batch_size)[self._part]
    negative = (draw.random(self._extra) * self._data.num_items).astype(np.int32)
    user, positive = rows["user"].astype(np.int32), rows["item"].astype(np.int32)
    history = self._history_without(user, rows["place"], turn, stride)
    batch: dict[str, Any] = {
      "query": self._data.inputs("user", user) | {"history": embed.Padded(history)}
    }
    for name, items in (("positive", positive), ("negative", negative[self._extra_part])):
      if name == "positive" or self._extra:
        candidate = self._data.inputs("item", items)
        batch[name] = {"candidate": candidate, "popularity": self._popularity[items]}
    return batch

  def _history_without(self, user, place, turn, stride) -> np.ndarray:
    """Up to H training items of each user before or around the one at `place`; -1 fills up."""
    offsets, items = self._data.columns["train_offsets"], self._data.columns["item"]
    first, size = offsets[user], (offsets[user + 1] - offsets[user]).astype(np.int32)
    count = place.astype(np.int32) if self._ordered else size - 1
    rest = np.maximum(count, 1)
    steps = np.arange(self._history, dtype=np.int32)
    # The stride has no divisor in common with their number: no item is met twice. In int32 and with
    # one division, since these numbers are most of what a batch costs. They do not overflow while
    # `history` times the longest history is below 2**31.
    start, stride = (turn * rest).astype(np.int32), (stride % rest).astype(np.int32)
    picked = (start[:, None] + steps * stride[:, None]) % rest[:, None]
    if not self._ordered:
      picked += (place + 1).astype(np.int32)[:, None]
      picked -= np.where(picked >= size[:, None], size[:, None], 0)
    history = items[first[:, None] + picked]
    history[steps >= count[:, None]] = -1
    return history.astype(np.int32, copy=False)


def eval_batches(data: RetrievalData, split: str, config) -> grain.IterDataset:
  """Returns the examples of a split once, in order, as batches of `EvalBatches`."""
  source = EvalBatches(data, split, config, shard=mesh_lib.shard())
  return pipeline.batches(source, dict)


class EvalBatches:
  """Batch number -> users to rank the catalogue for.

  A batch is `query` as in training, but with all items of the splits before it as the history,
  evenly thinned out if they are more than `config.eval_history`; `relevant` int32 `[B, R]`, the
  split's items of the user; `seen` int32 `[B, E]`, the items of the splits before it, nothing if
  `config.exclude_seen` is False; and `mask` bool `[B]`, False where the last batch is filled up.
  With `config.examples` "users" an example is a user, with "rows" a row of the split, with one
  relevant item.

  Users with as many items are together, and widths follow the longest list of a batch: the last
  batch is the widest. They are of few sizes, so that few shapes are compiled.
  """

  def __init__(self, data: RetrievalData, split: str, config, *, shard: tuple[int, int] = (0, 1)):
    self._data, self._split, self._batch_size = data, split, config.eval_batch_size
    self._exclude_seen, self._eval_history = config.exclude_seen, config.eval_history
    rows = data.rows(split)
    examples = {name: data.columns[name][rows] for name in ("user", "item")}
    if config.examples == "users":
      examples = {"user": np.unique(examples["user"])}
    order = np.argsort(self._counts(examples["user"], *EARLIER[split]), kind="stable")
    examples = {name: column[order] for name, column in examples.items()}
    self._users = examples["user"]
    self._examples = pipeline.SequentialBatches(
      examples, (0, len(order)), batch_size=config.eval_batch_size, shard=shard
    )

  def _counts(self, user: np.ndarray, *names: str) -> np.ndarray:
    """Returns how many items users `[B]` have in these splits, int64 `[B]`."""
    offsets = [self._data.columns[f"{name}_offsets"] for name in names]
    return np.sum([each[user + 1] - each[user] for each in offsets], axis=0)

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, number: int) -> dict[str, Any]:
    every = slice(number * self._batch_size, (number + 1) * self._batch_size)  # of all hosts
    width = lambda *names: retrieval.list_width(int(self._counts(self._users[every], *names).max()))
    batch, earlier = self._examples[number], EARLIER[self._split]
    user = batch["user"]
    if "item" in batch:
      relevant = batch["item"][:, None]
    else:
      relevant = self._lists(user, width(self._split), self._split)
    history = self._lists(user, min(width(*earlier), self._eval_history), *earlier)
    seen = self._lists(user, width(*earlier), *earlier)
    return {
      "query": self._data.inputs("user", user) | {"history": embed.Padded(history)},
      "relevant": relevant,
      "seen": seen if self._exclude_seen else np.full_like(seen[:, :1], -1),
      "mask": batch["mask"],
    }

  def _lists(self, user: np.ndarray, width: int, *names: str) -> np.ndarray:
    """Each user's items of splits, one after the other, int32 `[B, width]`; -1 fills up.

    They are evenly thinned out if there are more.
    """
    size, steps = self._counts(user, *names)[:, None], np.arange(width)
    place = np.where(size > width, steps * size // width, steps)
    lists, items = np.full(place.shape, -1, np.int32), self._data.columns["item"]
    for name in names:
      offsets = self._data.columns[f"{name}_offsets"]
      index = offsets[user][:, None] + place
      inside = (place >= 0) & (index < offsets[user + 1][:, None])
      lists[inside] = items[index[inside]]
      place = place - self._counts(user, name)[:, None]
    return lists
