"""Probabilities of clicks by an exported dlrm model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from scipy.special import expit

from ..tables import spec
from ..tables.clicks import Encoder
from ..tables.entities import Codes
from ..tables.store import ways
from ..training.features import cut_ids
from . import columns as columns_lib
from .folder import Served, batches

_BATCH = 4096


@dataclasses.dataclass(frozen=True)
class Scored:
  """Probabilities of N rows, and how many rows have values that say little about them.

  Attributes:
    scores: float64 `[N]`, above 0 and below 1; NaN of rows that cannot be read.
    is_bad: bool `[N]`, rows that cannot be read and are left out.
    unknown: by column, how many rows have a value that training has not seen, or, of users and
      items with features in a table of their own, that this table lacks.
    missing: by column, how many rows have no value.
  """

  scores: np.ndarray
  is_bad: np.ndarray
  unknown: Mapping[str, int]
  missing: Mapping[str, int]


class ClickModel:
  """Predicts the probability of a click.

  Args:
    served: of the recipe dlrm.
  """

  def __init__(self, served: Served):
    self.served = served
    self._encoder = Encoder.load(served.transforms)
    kinds = {n: kind for n, kind in served.kinds.items() if isinstance(kind, spec.Embedded)}
    self._wanted = ways(kinds)
    self._codes = {name: Codes(side.texts) for name, side in self._encoder.sides.items()}

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that rows must have."""
    return tuple(dict.fromkeys(column for names, _ in self._wanted.values() for column in names))

  def predict(
    self, rows: Any, *, on_bad_row: str = "raise", source: str = "rows", first_row: int = 1
  ) -> np.ndarray:
    """Returns the probability of a click for every row, float64 `[N]`: `scores` of `score`."""
    return self.score(rows, on_bad_row=on_bad_row, source=source, first_row=first_row).scores

  def score(
    self, rows: Any, *, on_bad_row: str = "raise", source: str = "rows", first_row: int = 1
  ) -> Scored:
    """Returns the probability of a click for every row, and counts of unknown and missing values.

    Args:
      rows: N of them; see `columns.as_columns`.
      on_bad_row: "raise", or "skip", which makes the score of a row that cannot be read NaN.
      source, first_row: what error texts call the rows, and the number of the first.

    Raises:
      UserError: a column is missing, or a row cannot be read; names row and column.
    """
    arrays = columns_lib.as_columns(rows)
    columns_lib.require(list(arrays), self.columns, source)
    missing = self.served.text_format.missing
    values, problems = columns_lib.read(arrays, self._wanted, missing, source)
    count = len(next(iter(arrays.values())))
    bad = columns_lib.bad_rows(problems, count, on_bad_row, source, first_row)
    return self.answers(values, bad)

  def answers(self, values: Mapping[str, Any], bad: np.ndarray) -> Scored:
    """Returns as `score`, for values as training reads them.

    Args:
      values: N texts, numbers or lists by declared name; see `tables.reading.Chunk`.
      bad: bool `[N]`, rows to leave out.
    """
    absent = {name: columns_lib.absent(values[name]) for name in self._wanted}
    unseen = {name: self._unseen(name, values) for name in self._wanted}
    return Scored(
      np.where(bad, np.nan, self._probabilities(values, len(bad))),
      bad,
      columns_lib.rows_by_column(unseen, self._wanted, bad),
      columns_lib.rows_by_column(absent, self._wanted, bad),
    )

  def _unseen(self, name: str, values: Mapping[str, Any]) -> np.ndarray:
    """Returns which rows have a value that training, or the table of its own, has not."""
    unseen = columns_lib.unseen(self._encoder.fitted, name, values)
    if name in self._codes:
      unseen |= ~columns_lib.absent(values[name]) & (self._codes[name].find(values[name]) < 0)
    return unseen

  def _probabilities(self, values: Mapping[str, Any], count: int) -> np.ndarray:
    if not count:
      return np.empty(0)
    encoded = self._encoder.encode(values, count)
    features = cut_ids(encoded["ids"], self._encoder.features)
    inputs = {"dense": encoded["dense"], "features": features}
    logits = np.empty(count)
    for part, index in batches(count, _BATCH):
      batch = jax.tree.map(lambda x, part=part, index=index: x[part][index], inputs)
      logits[part] = np.asarray(self.served.run(batch))[: part.stop - part.start]
    # float32 has no number between 1 - 6e-8 and 1, and a log loss takes a 1 for a certainty.
    return np.clip(expit(logits), np.finfo(float).tiny, 1 - np.finfo(float).epsneg)
