"""Histories of rows to predict for: of lists in the rows, or of a log that is remembered."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..tables import spec
from ..tables.encoding import Encoder
from ..tables.histories import History, Log, Order, Part, log_of
from ..tables.values import (
  Problem,
  as_times,
  bits,
  indices_of,
  lengths_of,
  of_rows,
  same_value,
  shown,
)
from .rows import Wanted

Problems = list[tuple[str, Problem]]  # by column


class Lists:
  """Histories in the rows: a list of items, and one of the same length for each value beside them.

  Attributes:
    clocks: whether times are dates, as `as_times` has found it in training.
  """

  def __init__(self, encoder: Encoder, kinds: Mapping[str, spec.Kind]):
    self._encoder, self._kinds = encoder, kinds
    self._time = str(spec.only(kinds, spec.Time))
    column = lambda: kinds[self._time].sources(self._time)[0]
    self.clocks = {column(): int(history.has_dates) for history in encoder.histories}

  @property
  def wanted(self) -> Wanted:
    """What is read of the rows besides their own features."""
    lists: dict[str, Any] = {
      part.name: ((part.name,), ("aligned", history.separator))
      for history in self._encoder.histories
      for part in history.parts
      if part.by != "table"
    }
    has_ages = any(history.has_ages for history in self._encoder.histories)
    return lists | (spec.ways({self._time: self._kinds[self._time]}) if has_ages else {})

  def positions(self, values: Mapping[str, Any]) -> tuple[list[np.ndarray], Problems]:
    """Returns the histories' columns of `ids` for N rows, and what is wrong with rows."""
    blocks, problems = list[np.ndarray](), Problems()
    for history in self._encoder.histories:
      lengths = lengths_of(values[history.name])
      flat: dict[str, Any] = {}
      for part in history.parts:
        if part.by != "table":
          flat[part.name], found = self._flat(part, history, values, lengths)
          problems += [(part.name, problem) for problem in found]
      times = flat[history.parts[-1].name] if history.has_ages else None
      ends = np.cumsum(lengths, dtype=np.int64)
      spans = np.stack([ends - lengths, ends], axis=1)
      log = self._encoder.log(history, flat, times)
      blocks += log.positions(spans, values.get(self._time))
    return blocks, problems

  def _flat(
    self, part: Part, history: History, values: Mapping[str, Any], lengths: np.ndarray
  ) -> tuple[Any, list[Problem]]:
    """Returns the values of a part in all rows, one after the other; and what is wrong with rows.

    A row without any value beside its items has missing ones.
    """
    own, items = lengths_of(values[part.name]), values[part.name].flatten()
    row = np.repeat(np.arange(len(lengths)), lengths)
    shift = np.cumsum(own) - own - (np.cumsum(lengths) - lengths)
    places = np.where((own == lengths)[row], np.arange(len(row)) + shift[row], -1)
    texts = items.take(pa.array(places, mask=places < 0)) if len(items) else pa.nulls(len(row))
    texts = texts.cast(pa.string())
    count = lambda i: f"{own[i]} and {lengths[i]} values"
    what = f"are in the lists {part.name!r} and {history.name!r}"
    problems = [Problem((own != lengths) & (own > 0), what, count, "Give one for each item.")]
    if part.by == "row":
      return texts, problems
    if part.by == "time":
      column = self._kinds[self._time].sources(self._time)[0]
      found, wrong = as_times(texts, self.clocks, column)
    else:
      found = _label_of(same_value(texts), self._kinds[part.of])
      bad = (found < 0) & bits(texts.is_valid())
      text = lambda i: shown(texts[i].as_py())
      wrong = [Problem(bad, f"is no value of the label {part.of!r}", text)]
    return found, problems + of_rows(wrong, row, len(lengths))


def _label_of(texts: pa.Array, kind: Any) -> np.ndarray:
  """Returns labels of texts, int `[N]`; -1 of a text that says nothing."""
  from ..tables.rows import label_of  # not for models without histories, which need less

  return np.nan_to_num(label_of(texts, kind), nan=-1).astype(np.int64)


def _labels(values: Any, kind: Any) -> np.ndarray:
  """Returns the labels of rows, int `[N]`: -1 where it is missing, -2 of those training drops."""
  if isinstance(values, np.ndarray):
    return np.nan_to_num(values, nan=-1).astype(np.int64)
  encoded = same_value(values)
  found = _label_of(encoded.dictionary, kind)
  found[bits(pc.is_in(encoded.dictionary, pa.array(kind.drop, pa.string())))] = _DROPPED
  return np.append(found, -1)[indices_of(encoded)]


_DROPPED = -2


class Memory:
  """A log of rows, of which the histories of the next ones are."""

  def __init__(self, encoder: Encoder, kinds: Mapping[str, spec.Kind]):
    self._encoder, self._kinds = encoder, kinds
    self._user, self._time = (str(spec.only(kinds, cls)) for cls in (spec.User, spec.Time))
    self._ids: list[np.ndarray] = []
    self._users: list[pa.Array] = []
    self._numbers: dict[str, list[np.ndarray]] = {n: [] for n in (self._time, *self.labels)}
    self._made: tuple[pa.Array, list[tuple[Order, Log]]] | None = None

  @property
  def wanted(self) -> Wanted:
    """What is read of the rows besides their own features."""
    return spec.ways({self._time: self._kinds[self._time]})

  @property
  def labels(self) -> Wanted:
    """The labels that rows of the log need: those that histories are of, or that drop rows."""
    names = {name for history in self._encoder.histories for name in history.labels}
    needed = lambda name, kind: name in names or (isinstance(kind, spec.Label) and kind.drop)
    return spec.ways({name: kind for name, kind in self._kinds.items() if needed(name, kind)})

  def add(self, values: Mapping[str, Any]) -> None:
    """Adds rows.

    Args:
      values: by declared name, as training reads them; of labels as texts, or 0 and 1.
    """
    self._ids.append(self._encoder.encode(values, len(values[self._time]))["ids"])
    self._users.append(self._user_of(values))
    for name, parts in self._numbers.items():
      is_label = name != self._time
      parts.append(_labels(values[name], self._kinds[name]) if is_label else values[name])
    self._made = None

  @property
  def is_empty(self) -> bool:
    """Whether no rows have been added."""
    return not self._ids

  def positions(self, values: Mapping[str, Any]) -> tuple[list[np.ndarray], Problems]:
    """Returns as `Lists.positions` for N rows with a user and a time, which have no problems."""
    known, logs = self._made = self._made or self._in_order()
    users = pc.fill_null(pc.index_in(self._user_of(values), known), -1).to_numpy()
    now = values[self._time]
    spans = [(log, order.before(users, now)) for order, log in logs]
    return [part for log, each in spans for part in log.positions(each, now)], []

  def _user_of(self, values: Mapping[str, Any]) -> pa.Array:
    return self._encoder.fitted.same(self._user, values[self._user]).dictionary_decode()

  def _in_order(self) -> tuple[pa.Array, list[tuple[Order, Log]]]:
    users = pa.concat_arrays(self._users).dictionary_encode()
    ids = np.concatenate(self._ids)
    numbers = {name: np.concatenate(parts) for name, parts in self._numbers.items()}
    times, logs, places = numbers[self._time], list[tuple[Order, Log]](), self._encoder.places
    dropped = np.any([numbers[name] == _DROPPED for name in self.labels], axis=0)
    for history in self._encoder.histories:
      kept = ~dropped & (numbers[history.where] == 1 if history.where else True)
      order = Order(indices_of(users), times, kept)
      logs.append((order, log_of(history, places, ids, numbers, times, order.rows)))
    return users.dictionary, logs
