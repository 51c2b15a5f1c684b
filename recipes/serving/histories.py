"""Histories of rows to predict for: lists of the items, and of the values beside them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError
from ..tables import spec
from ..tables.histories import History, Part
from ..tables.transforms import Encoder, lengths_of, numbers_of
from ..tables.values import outcome
from .rows import Reader


class Lists:
  """Histories in the rows: a list of items, and one of the same length for each value beside them.

  Attributes:
    kinds: what is read of the rows besides their own features.
  """

  def __init__(self, encoder: Encoder, kinds: Mapping[str, spec.Kind], missing: tuple[str, ...]):
    self._encoder, self._time = encoder, str(spec.only(kinds, spec.Time))
    self.kinds: dict[str, spec.Kind] = {
      part.name: spec.Bag(separator=history.separator)
      for history in encoder.histories
      for part in history.parts
      if part.by != "table"
    }
    self.lists = tuple(self.kinds)
    self.has_dates = any(history.has_dates for history in encoder.histories)
    self._flat: dict[str, Reader] = {}  # of single values of times and labels
    for history in encoder.histories:
      if history.has_ages:
        self.kinds[self._time] = kinds[self._time]
      for part in history.parts:
        if part.by in ("label", "time"):
          kind = spec.Time() if part.by == "time" else kinds[part.of]
          self._flat[part.name] = Reader({"value": kind}, missing, has_dates=history.has_dates)

  def positions(
    self, values: Mapping[str, Any], on_bad_row: str, source: str, first_row: int
  ) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the histories' columns of `ids` for N rows, and which rows are bad, bool `[N]`."""
    blocks, bad = list[np.ndarray](), np.zeros(0, bool)
    for history in self._encoder.histories:
      lengths = lengths_of(values[history.name])
      bad = bad if len(bad) else np.zeros(len(lengths), bool)
      flat: dict[str, Any] = {}
      for part in history.parts:
        if part.by != "table":
          flat[part.name], wrong = self._values(part, history, values, lengths)
          if wrong.any() and on_bad_row == "raise":
            row = int(np.argmax(wrong))
            raise UserError(
              f"{source}, row {first_row + row}: {part.name!r} needs one value for each item of "
              f"{history.name!r}, as training reads {part.of!r}"
            )
          bad |= wrong
      times = flat[history.parts[-1].name] if history.has_ages else None
      ends = np.cumsum(lengths, dtype=np.int64)
      spans = np.stack([ends - lengths, ends], axis=1)
      now = numbers_of(values[self._time]) if history.has_ages else None
      blocks += self._encoder.log(history, flat, times).positions(spans, now)
    return blocks, bad

  def _values(
    self, part: Part, history: History, values: Mapping[str, Any], lengths: np.ndarray
  ) -> tuple[Any, np.ndarray]:
    """Returns the values of a part in all rows, one after the other; and which rows are bad.

    A row without any value beside its items has missing ones.
    """
    own, items = lengths_of(values[part.name]), values[part.name].flatten()
    row = np.repeat(np.arange(len(lengths)), lengths)
    shift = np.cumsum(own) - own - (np.cumsum(lengths) - lengths)
    places = np.where((own == lengths)[row], np.arange(len(row)) + shift[row], -1)
    texts = items.take(pa.array(places, mask=places < 0)) if len(items) else pa.nulls(len(row))
    texts, wrong = texts.cast(pa.string()), (own != lengths) & (own > 0)
    if part.name not in self._flat:
      return texts, wrong
    reader = self._flat[part.name]
    found, bad_items = reader.read(pa.table({"value": texts}), "skip")
    if part.by == "label":  # a missing one says nothing
      bad_items &= texts.is_valid().to_numpy(zero_copy_only=False)
    wrong[row[bad_items]] = True
    number = numbers_of(found["value"]) if part.by == "time" else _labels(found["value"], reader)
    return np.nan_to_num(number, nan=-1), wrong


def _labels(texts: pa.Array, reader: Reader) -> np.ndarray:
  """Returns what labels are trained on, int `[N]`, -1 where missing."""
  with reader.connection() as con:
    con.register("labels", pa.table({"text": texts}))
    kind: Any = reader.kinds["value"]
    answer = con.execute(f"SELECT {outcome(kind, 'text')} FROM labels").to_arrow_table()
  return np.nan_to_num(numbers_of(answer[0].combine_chunks()), nan=-1).astype(np.int64)
