"""Clicks drawn from a known teacher, so that the best AUC anybody can reach is known.

Ids follow a power law, as in logs: few are seen often, most hardly ever. The teacher is a
factorization machine over them, whose pairwise terms a linear model cannot follow, and the labels
are drawn from its probabilities. Scoring the test rows by those probabilities themselves gives the
bound; a model stays below it because it sees most ids too rarely to learn them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from .. import cache, files
from ..evaluation.metrics import click_metrics
from ..run import scalars

_SIZES = {"user": 10_000, "item": 5_000, "brand": 500, "category": 50, "city": 200, "hour": 24}
_TAGS, _MAX_TAGS, _NUM_DENSE, _RANK = 300, 5, 4, 4
_EXPONENT = 1.05  # of the popularity of ids
_CHUNK = 1 << 16


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  return {"format": 1, "rows": config.rows, "seed": config.data_seed, "zipf_exponent": _EXPONENT}


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; `ids` are six single ids and a bag of up to five tags."""
  rows, seed = settings["rows"], settings["seed"]
  teacher, splits = _Teacher(np.random.default_rng((seed, 0))), cache.cut(rows, valid=0.1, test=0.1)
  label = cache.column(folder, "label", (rows,), np.uint8)
  dense = cache.column(folder, "dense", (rows, _NUM_DENSE), np.float32)
  ids = cache.column(folder, "ids", (rows, len(_SIZES) + _MAX_TAGS), np.int32)
  digest, logits = hashlib.sha256(), []
  with files.progress("drawing clicks", rows, "row") as bar:
    for start in range(0, rows, _CHUNK):
      stop = min(start + _CHUNK, rows)
      generator = np.random.default_rng((seed, 1, start))
      drawn = draw(generator, stop - start, teacher)
      label[start:stop], dense[start:stop], ids[start:stop], of_chunk = drawn
      for array in drawn[:3]:
        digest.update(np.ascontiguousarray(array).tobytes())
      logits.append(of_chunk[max(splits["test"][0] - start, 0) :])
      bar.update(stop - start)
  best = click_metrics(np.concatenate(logits), label[splits["test"][0] :])
  features: list[dict[str, Any]] = [
    {"name": name, "vocabulary_size": size} for name, size in _SIZES.items()
  ]
  return {
    "splits": splits,
    "features": [*features, {"name": "tags", "vocabulary_size": _TAGS, "valency": _MAX_TAGS}],
    "sha256": {"generated": digest.hexdigest()},
    "best": scalars("test", best),
  }


class _Teacher:
  """A factorization machine (Rendle 2010) with random weights over power-law ids."""

  def __init__(self, generator: np.random.Generator):
    sizes = _SIZES | {"tags": _TAGS}
    sums = {n: np.cumsum(np.arange(1.0, size + 1) ** -_EXPONENT) for n, size in sizes.items()}
    self.popularity = {name: x / x[-1] for name, x in sums.items()}  # cumulative; the last is 1
    normal = generator.normal
    self._weights = {name: normal(0.0, 0.5, size) for name, size in sizes.items()}
    self._vectors = {name: normal(0.0, 0.4, (size, _RANK)) for name, size in sizes.items()}
    self._dense = normal(0.0, 0.3, _NUM_DENSE)

  def logits(self, dense, columns: Mapping[str, np.ndarray], tags, present) -> np.ndarray:
    """Returns `[N]` for numbers `[N, 4]`, ids `[N]` and tags `[N, 5]`, some of them present."""
    logits, vectors = -1.5 + dense @ self._dense, []
    for name, ids in columns.items():
      vectors.append(self._vectors[name][ids])
      logits += self._weights[name][ids]
    share = present / np.maximum(present.sum(axis=1, keepdims=True), 1)
    logits += (self._weights["tags"][tags] * share).sum(axis=1)
    vectors.append((self._vectors["tags"][tags] * share[..., None]).sum(axis=1))
    # The sum over pairs, by Rendle's identity: half of (square of the sum - sum of the squares).
    stacked = np.stack(vectors, axis=1)
    pairs = stacked.sum(axis=1) ** 2 - (stacked**2).sum(axis=1)
    return logits + 0.5 * pairs.sum(axis=1)


def draw(generator: np.random.Generator, rows: int, teacher: _Teacher) -> tuple[np.ndarray, ...]:
  """Returns labels `[N]`, dense `[N, 4]`, ids `[N, 11]` and logits `[N]`."""
  dense = generator.normal(size=(rows, _NUM_DENSE)).astype(np.float32)
  popularity = teacher.popularity
  ids_of: Any = lambda name, *shape: np.searchsorted(popularity[name], generator.random(shape))
  columns = {name: ids_of(name, rows) for name in _SIZES}
  tags = ids_of("tags", rows, _MAX_TAGS)
  present = np.arange(_MAX_TAGS) < generator.integers(0, _MAX_TAGS + 1, (rows, 1))
  logits = teacher.logits(dense, columns, tags, present)
  labels = (generator.random(rows) < expit(logits)).astype(np.uint8)
  ids = np.column_stack([*columns.values(), np.where(present, tags, -1)]).astype(np.int32)
  return labels, dense, ids, logits
