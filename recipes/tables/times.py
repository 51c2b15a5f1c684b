"""Columns of times, converted to integers that keep their order."""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .faults import Problem, shown
from .values import INTEGER, LIMIT, NUMBER, bits, numbers_of, where

_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_CLOCK = r"[T ]([01]\d|2[0-3])(:[0-5]\d(:[0-5]\d(\.\d{1,6})?)?)?"
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_ISO = f"^{_DATE}({_CLOCK}{_ZONE}?)?$"
_ZONED = f"{_CLOCK}{_ZONE}$"

# How a value gives its time.
_UNREADABLE, _NUMBER, _DATED, _BEYOND = range(4)
_KINDS = {_NUMBER: "a number", _DATED: "a date"}


def as_times(
  array: pa.Array, clocks: dict[str, int], column: str, missing: Sequence[str] = ()
) -> tuple[np.ndarray, list[Problem]]:
  """Converts N times to int64, or to float64 where numbers have fractions.

  Dates and timestamps become microseconds since 1970, in UTC where they name no zone. Numbers are
  taken as they are, whether they count seconds or days.

  Args:
    array: texts (trimmed, null where missing), numbers, dates or timestamps.
    clocks: by column, whether its first value is a number or a date; updated. The two have no
      common order, so that values of the other kind are refused.
    column: its name.
    missing: texts that mean no value; numbers are compared with those that are such.
  """
  if pa.types.is_string(array.type):
    times, kinds = _from_texts(array)
  elif pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
    stored = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)), safe=False)
    times = pc.fill_null(stored.cast(pa.int64()), 0).to_numpy()
    kinds = np.full(len(array), _DATED)
  else:
    times, kinds = _from_numbers(array)
  absent = ~bits(array.is_valid())
  if pa.types.is_floating(array.type):
    absent |= bits(pc.is_nan(array))
  if kinds.size and (kinds == _NUMBER).all():
    absent |= np.isin(times, numbers_of(missing))
  first = kinds[np.isin(kinds, list(_KINDS)) & ~absent][:1]
  for kind in first.tolist():
    clocks.setdefault(column, kind)
  value = lambda index: "" if absent[index] else shown(array[index].as_py())
  problems = []

  def refuse(bad: np.ndarray, kind: str, hint: str = "") -> None:
    if bad.any():
      problems.append(Problem(bad, kind, value, lambda index: hint))

  refuse(absent, "is missing", "Every row needs its time.")
  refuse(~absent & (kinds == _BEYOND), "is a time beyond 64 bits")
  refuse(
    ~absent & (kinds == _UNREADABLE),
    "is not a time",
    "Write a number or a date such as 2024-12-31 or 2024-12-31T23:59:59.",
  )
  for kind, name in _KINDS.items():
    if column in clocks and clocks[column] != kind:
      refuse(
        ~absent & (kinds == kind),
        f"is {name}, while the first time is {_KINDS[clocks[column]]}",
        "Write all times in one way.",
      )
  return times, problems


def are_dates(clocks: Mapping[str, int]) -> bool | None:
  """Returns whether the first times that `as_times` has seen are dates; None before any."""
  return any(kind != _NUMBER for kind in clocks.values()) if clocks else None


def _from_numbers(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
  numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
  inside = (numbers >= -LIMIT) & (numbers < LIMIT)
  if pa.types.is_integer(array.type):  # not by way of float64, which rounds beyond 2**53
    times = pc.fill_null(array.cast(pa.int64(), safe=False), 0).to_numpy()
  else:
    times = np.where(inside, numbers, 0)
    if (np.floor(times) == times).all():
      times = times.astype(np.int64)
  return times, np.where(inside, _NUMBER, _BEYOND)


def _from_texts(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
  for stored, kind in ((pa.timestamp("us"), _DATED), (pa.int64(), _NUMBER)):
    with contextlib.suppress(pa.ArrowInvalid):
      times = texts.cast(stored).cast(pa.int64())
      return pc.fill_null(times, 0).to_numpy(), np.full(len(texts), kind)
  is_number = bits(pc.match_substring_regex(texts, NUMBER))
  times, kinds = np.zeros(len(texts), np.int64), np.full(len(texts), _UNREADABLE)
  if is_number.any():
    floats = where(is_number, texts).cast(pa.float64())
    times, inside = _from_numbers(floats)
    kinds = np.where(is_number, inside, kinds)
    integer = bits(pc.match_substring_regex(texts, INTEGER)) & (inside == _NUMBER)
    plain = pc.replace_substring_regex(where(integer, texts), r"^\+", "")
    times = np.where(integer, pc.fill_null(plain.cast(pa.int64()), 0).to_numpy(), times)
  if not is_number.all():
    dates = pc.replace_substring_regex(where(~is_number, texts), r"^(\d{4})/(\d\d)/", r"\1-\2-")
    dates = pc.replace_substring_regex(dates, r"(:\d\d\.\d{6})\d+", r"\1")
    dates = pc.replace_substring_regex(dates, r" ?UTC$", "Z")
    read = _from_dates(where(bits(pc.match_substring_regex(dates, _ISO)), dates))
    dated = bits(read.is_valid())
    times = np.where(dated, pc.fill_null(read, 0).to_numpy(), times)
    kinds = np.where(dated, _DATED, kinds)
  return times, kinds


def _from_dates(dates: pa.StringArray) -> pa.Int64Array:
  """Returns microseconds since 1970 of ISO dates, null for days that no month has."""
  zoned = bits(pc.match_substring_regex(dates, _ZONED))
  try:
    plain = where(~zoned, dates).cast(pa.timestamp("us")).cast(pa.int64())
    in_zone = where(zoned, dates).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return pc.coalesce(plain, in_zone)
  except pa.ArrowInvalid:
    if len(dates) == 1:
      return pa.nulls(1, pa.int64())
    half = len(dates) // 2
    return pa.concat_arrays([_from_dates(dates[:half]), _from_dates(dates[half:])])
