"""Probabilities of clicks by an exported dlrm model."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..features import cut_ids
from ..tables import rows as rows_lib
from ..tables import spec
from ..tables.clicks import Encoder
from . import columns as columns_lib
from .folder import Served, batches

_BATCH = 4096


class ClickModel:
  """Predicts the probability of a click.

  Args:
    served: of the recipe dlrm.
  """

  def __init__(self, served: Served):
    self.served = served
    self._encoder = Encoder.load(served.transforms)
    kinds = {n: kind for n, kind in served.kinds.items() if isinstance(kind, spec.Embedded)}
    self._wanted = rows_lib.ways(kinds)

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that rows must have."""
    return tuple(dict.fromkeys(column for column, _ in self._wanted.values()))

  def predict(
    self, rows: Any, *, on_bad_row: str = "raise", source: str = "rows", first_row: int = 1
  ) -> np.ndarray:
    """Returns the probability of a click for every row, float32 `[N]`.

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
    scores = self.scores(values, count)
    scores[bad] = np.nan
    return scores

  def scores(self, values: Mapping[str, Any], count: int) -> np.ndarray:
    """Returns as `predict`, for values as training reads them.

    Args:
      values: N texts, numbers or lists by declared name; see `tables.rows.values_of`.
      count: N.
    """
    if not count:
      return np.empty(0, np.float32)
    encoded = self._encoder.encode(values, count)
    features = cut_ids(encoded["ids"], self._encoder.features)
    inputs = {"dense": encoded["dense"], "features": features}
    scores = np.empty(count, np.float32)
    for part, index in batches(count, _BATCH):
      batch = jax.tree.map(lambda x, part=part, index=index: x[part][index], inputs)
      scores[part] = np.asarray(self.served.run(batch))[: part.stop - part.start]
    return scores
