"""Histories in rows to predict for: a list of items, and lists of the same length for `beside`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..tables import spec
from ..tables.histories import History, Log
from ..tables.transforms import Encoder, lengths_of, numbers_of
from ..tables.values import Value, among, outcome


class Beside(NamedTuple):
  """A list in the rows, of one value for each item of a history, or the history itself."""

  history: History
  of: str  # the column whose values training has put there
  number: str  # the SQL of what a model reads, given a text `x`
  bad: str  # a condition of texts `x` that have no meaning

  def read(self, value: Value, items: str) -> Value:
    """Returns how a list of texts is read beside items; if it is empty, all values are missing."""
    none = f"list_transform({items}, lambda x: CAST(NULL AS VARCHAR))"
    texts = f"CASE WHEN coalesce(len({value.sql}), 0) = 0 THEN {none} ELSE {value.sql} END"
    return value._replace(
      sql=f"list_transform({texts}, lambda x: {self.number})",
      bad=f"len({texts}) <> coalesce(len({items}), 0) OR "
      f"len(list_filter({texts}, lambda x: {self.bad})) > 0",
      problem=f"is not one value of {self.of!r} for each item of {self.history.name!r}",
    )


def lists(histories: Sequence[History], kinds: Mapping[str, Any]) -> dict[str, Beside]:
  """Returns the lists that rows hold by name, each history before the values beside it."""
  by_name = {}
  for history in histories:
    for part in history.parts:
      number, bad = "x", "false"
      if part.by == "time":
        time = "epoch_us(TRY_CAST(x AS TIMESTAMPTZ))"
        number = f"CAST({time} AS DOUBLE)" if history.has_dates else "TRY_CAST(x AS DOUBLE)"
        bad = f"NOT coalesce(isfinite({number}), false)"
      elif part.by == "label":
        label: spec.Label = kinds[part.of]
        number = outcome(label, "x")
        bad = f"x IS NOT NULL AND ({number}) IS NULL"
        bad += f" AND NOT {among('x', label.drop)}" if label.drop else ""
      by_name[part.name] = Beside(history, part.of, number, bad)
  return by_name


def positions(encoder: Encoder, values: Mapping[str, Any], time: str) -> list[np.ndarray]:
  """Returns the histories' columns of `ids` for N rows, given their lists and the time's name."""
  blocks = list[np.ndarray]()
  for history in encoder.histories:
    flat = {part.name: values[part.name].flatten() for part in history.parts}
    parts, times, now = list[np.ndarray](), None, None
    for part in history.parts:
      if part.by == "time":
        times, now = numbers_of(flat[part.name]), numbers_of(values[time])
        continue
      if part.by == "row":
        ids = encoder.transforms.ids({part.of: flat[part.name]}, part.of)
      else:
        ids = np.nan_to_num(numbers_of(flat[part.name]), nan=-1).astype(np.int32)
      parts.append(ids if ids.ndim == 2 else ids[:, None])
    lengths = lengths_of(values[history.name])
    ends = np.cumsum(lengths, dtype=np.int64)
    spans = np.stack([ends - lengths, ends], axis=1)
    blocks += Log(history.width, parts, spans, times, now).positions(slice(None))
  return blocks
