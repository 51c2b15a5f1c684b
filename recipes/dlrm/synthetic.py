"""Clicks drawn from a known teacher, so that the best AUC anybody can reach is known.

Ids follow a power law, as in logs: few are seen often, most hardly ever. The teacher is a
factorization machine over them, whose pairwise terms a linear model cannot follow, and the labels
are drawn from its probabilities. Scoring the test rows by those probabilities themselves gives the
bound; a model stays below it because it sees most ids too rarely to learn them.

The logits of a second label mix those of the first one with those of an independent teacher on the
same ids: `logits = c first + sqrt(1 - c^2) other`, c being about their correlation.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from .. import cache, files, sampling
from ..errors import UserError
from ..evaluation.metrics import click_metrics
from ..tables import spec
from . import tasks

_SIZES = {"user": 10_000, "item": 5_000, "brand": 500, "category": 50, "city": 200, "hour": 24}
_TAGS, _MAX_TAGS, _NUM_DENSE, _RANK = 300, 5, 4, 4
_CHUNK = 1 << 16


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  more = {"labels": config.labels, "correlation": config.correlation}
  if config.labels not in (1, 2) or not -1 <= config.correlation <= 1:
    raise UserError(
      f"config.labels is {config.labels} and config.correlation {config.correlation}: choose 1 or "
      "2 labels, and a correlation from -1 to 1"
    )
  return (more if config.labels == 2 else {}) | {
    "format": 1,
    "rows": config.rows,
    "seed": config.data_seed,
    "zipf_exponent": config.zipf_exponent,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; `ids` are six single ids and a bag of up to five tags."""
  rows, seed = settings["rows"], settings["seed"]
  teacher, *others = (
    _Teacher(np.random.default_rng((seed, *place)), settings["zipf_exponent"])
    for place in ((0,), (2,))[: settings.get("labels", 1)]
  )
  splits = cache.cut(rows, valid=0.1, test=0.1)
  labels: dict[str, Any] = dict.fromkeys(
    ["clicked", "liked"] if others else ["label"], spec.Label()
  )
  shape, dtype = ((2,), np.float32) if others else ((), np.uint8)
  label = cache.column(folder, "label", (rows, *shape), dtype)
  dense = cache.column(folder, "dense", (rows, _NUM_DENSE), np.float32)
  ids = cache.column(folder, "ids", (rows, len(_SIZES) + _MAX_TAGS), np.int32)
  digest, tested = hashlib.sha256(), []
  with files.progress("drawing clicks", rows, "row") as bar:
    for start in range(0, rows, _CHUNK):
      stop = min(start + _CHUNK, rows)
      generator = np.random.default_rng((seed, 1, start))
      drawn = teacher.draw(generator, stop - start, others, settings.get("correlation", 1.0))
      label[start:stop], dense[start:stop], ids[start:stop], logits = drawn
      for array in drawn[:3]:
        digest.update(np.ascontiguousarray(array).tobytes())
      tested.append(logits[max(splits["test"][0] - start, 0) :])
      bar.update(stop - start)
  logits, truth = np.concatenate(tested), label[splits["test"][0] :]
  of_labels = (x.T.reshape(len(labels), -1) for x in (logits, truth))
  each = {name: click_metrics(*x) for name, *x in zip(labels, *of_labels, strict=True)}
  best = tasks.named(labels, each)
  features = [{"name": name, "vocabulary_size": size} for name, size in _SIZES.items()]
  features.append({"name": "tags", "vocabulary_size": _TAGS, "valency": _MAX_TAGS})
  return {
    "splits": splits,
    "features": features,
    "labels": spec.as_dicts(labels),
    "sha256": {"generated": digest.hexdigest()},
    "best": {f"test_{name}": value for name, value in best.items()},
  }


class _Teacher:
  """A factorization machine (Rendle 2010) with random weights over power-law ids."""

  def __init__(self, generator: np.random.Generator, exponent: float):
    self._popularity = {
      name: sampling.cumulative(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
      for name, size in (_SIZES | {"tags": _TAGS}).items()
    }
    self._weights = {
      name: generator.normal(0.0, 0.5, size) for name, size in (_SIZES | {"tags": _TAGS}).items()
    }
    self._vectors = {
      name: generator.normal(0.0, 0.4, (size, _RANK))
      for name, size in (_SIZES | {"tags": _TAGS}).items()
    }
    self._dense = generator.normal(0.0, 0.3, _NUM_DENSE)

  def draw(
    self,
    generator: np.random.Generator,
    rows: int,
    others: Sequence["_Teacher"] = (),
    correlation: float = 1.0,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns labels `[N]`, dense `[N, 4]`, ids `[N, 11]` and the logits the labels came from.

    With another teacher, labels and logits are `[N, 2]`.
    """
    dense = generator.normal(size=(rows, _NUM_DENSE)).astype(np.float32)
    uniform = generator.random
    draw: Any = lambda name, *shape: np.searchsorted(self._popularity[name], uniform(shape))
    columns = {name: draw(name, rows) for name in _SIZES}
    tags = draw("tags", rows, _MAX_TAGS)
    present = np.arange(_MAX_TAGS) < generator.integers(0, _MAX_TAGS + 1, (rows, 1))
    logits = self._logits(dense, columns, tags, present)
    labels = (generator.random(rows) < expit(logits)).astype(np.uint8)
    for other in others:
      second = correlation * logits
      second += np.sqrt(1 - correlation**2) * other._logits(dense, columns, tags, present)
      drawn = (generator.random(rows) < expit(second)).astype(np.uint8)
      labels, logits = np.column_stack([labels, drawn]), np.column_stack([logits, second])
    bag = np.where(present, tags, -1)
    ids = np.column_stack([*columns.values(), bag]).astype(np.int32)
    return labels, dense, ids, logits

  def _logits(
    self,
    dense: np.ndarray,
    columns: Mapping[str, np.ndarray],
    tags: np.ndarray,
    present: np.ndarray,
  ) -> np.ndarray:
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
