"""Sequences drawn from a known process, so that the best score anybody can reach is known.

What follows an item is one of its eight successors, each half as likely as the one before it, or,
with probability `noise`, any item. Nobody gets an item twice: what was drawn before is drawn again.
Popular items are successors of many, so that popularity is worth something, but order is worth
more. Ranking by the probabilities of the last item's successors is the bound.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from .. import cache, files
from ..evaluation.metrics import RankingMetrics

_SUCCESSORS, _SHORTEST, _LONGEST, _MEAN_MORE = 8, 4, 40, 8
_CHUNK = 1_000


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  return {
    "format": 1,
    "users": config.num_users,
    "items": config.num_items,
    "noise": config.noise,
    "seed": config.data_seed,
    "ks": list(config.ks),
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; see `recipes.sequence.data`."""
  process = Process(settings["items"], settings["noise"], settings["seed"])
  sequences, best = [], RankingMetrics(settings["ks"])
  with files.progress("drawing sequences", settings["users"], "user") as bar:
    for start in range(0, settings["users"], _CHUNK):
      number = min(_CHUNK, settings["users"] - start)
      drawn = process.draw(np.random.default_rng((settings["seed"], 1, start)), number)
      ranked = [process.best(sequence[:-1], max(settings["ks"])) for sequence in drawn]
      best.update(np.stack(ranked), np.array([sequence[-1:] for sequence in drawn]))
      sequences += drawn
      bar.update(number)
  items, offsets = np.concatenate(sequences), np.cumsum([0, *map(len, sequences)])
  cache.column(folder, "items", items.shape, np.int32)[:] = items
  cache.column(folder, "offsets", offsets.shape, np.int64)[:] = offsets
  return {
    "num_items": settings["items"],
    "sha256": {"generated": hashlib.sha256(items.tobytes() + offsets.tobytes()).hexdigest()},
    "best": {f"test_{name}": value for name, value in best.compute().items()},
  }


class Process:
  """The chain; `successors` int `[N, 8]` has the likeliest first."""

  def __init__(self, size: int, noise: float, seed: int):
    generator = np.random.default_rng((seed, 0))
    popularity = np.log(1 / np.arange(1, size + 1))[generator.permutation(size)]
    # Gumbel noise and the largest: draws without replacement, by popularity.
    keys = popularity + generator.gumbel(size=(size, size))
    np.fill_diagonal(keys, -np.inf)
    self.successors = np.argsort(-keys, axis=1)[:, :_SUCCESSORS]
    weights = 0.5 ** np.arange(_SUCCESSORS)
    self._cumulative = np.cumsum((1 - noise) * weights / weights.sum())
    self._size = size

  def draw(self, generator: np.random.Generator, users: int) -> list[np.ndarray]:
    """Returns a sequence for each user, int32."""
    lengths = np.minimum(_SHORTEST + generator.poisson(_MEAN_MORE, users), _LONGEST)
    drawn = np.full((users, _LONGEST), -1, np.int32)
    drawn[:, 0] = generator.integers(0, self._size, users)
    for step in range(1, int(lengths.max())):
      todo = np.flatnonzero(lengths > step)
      while todo.size:
        which = np.searchsorted(self._cumulative, generator.random(len(todo)), side="right")
        anything = generator.integers(0, self._size, len(todo))
        successor = self.successors[drawn[todo, step - 1], np.minimum(which, _SUCCESSORS - 1)]
        following = np.where(which < _SUCCESSORS, successor, anything)
        fresh = ~(drawn[todo, :step] == following[:, None]).any(axis=1)
        drawn[todo[fresh], step] = following[fresh]
        todo = todo[~fresh]
    return [row[:length] for row, length in zip(drawn, lengths, strict=True)]

  def best(self, history: np.ndarray, k: int) -> np.ndarray:
    """Returns the k likeliest items after a history, none of them in it."""
    likely = self.successors[history[-1]]
    anything = np.arange(k + len(likely) + len(history))  # equally likely: the lowest ids will do
    ranked = np.concatenate([likely, anything[~np.isin(anything, likely)]])
    return ranked[~np.isin(ranked, history)][:k]
