"""Columns as Arrow stores them, converted to text, numbers, times or lists of text.

The same code reads the rows of training and those that are predicted for.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .faults import Problem, shown

# How a column is read: "text", "number", "time", "any", or ("list", separator).
ReadAs = str | tuple[str, str]

INTEGER = r"^[+-]?\d+$"
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_NOT_FINITE = r"(?i)^[+-]?(nan|inf(inity)?)$"
_DECIMAL_COMMA = r"^[+-]?[\d.]*\d,\d+$"
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$"  # 1,234 may be a decimal comma as well
_WHOLE = r"^-?(0)\.0+$|^(-?[1-9]\d*)\.0+$"  # as files write an integer column with gaps
_FLAGS = ("true", "false")
LIMIT = float(1 << 63)


def refusal(stored: pa.DataType, read_as: ReadAs) -> str | None:
  """Returns what is wrong with reading a stored column so, or None.

  >>> refusal(pa.list_(pa.string()), "text")
  'holds lists: declare it as a bag, a sequence or an item with a separator'
  """
  if pa.types.is_dictionary(stored):
    stored = stored.value_type
  if read_as == "any" or pa.types.is_null(stored):
    return None
  if _is_list(stored):
    if not isinstance(read_as, tuple):
      return "holds lists: declare it as a bag, a sequence or an item with a separator"
    if pa.types.is_nested(stored.value_type):
      return f"holds lists of {stored.value_type}: store lists of numbers or texts"
    return None
  if pa.types.is_nested(stored):
    return f"holds {stored}: store its fields as columns"
  if isinstance(read_as, tuple) and not _is_text(stored):
    return f"holds single values ({stored}), not lists: declare it as a category or a number"
  if isinstance(read_as, tuple) and not read_as[1]:
    return "holds text: declare the separator of its items"
  if read_as == "number" and pa.types.is_temporal(stored):
    return f"holds times ({stored}), not numbers: declare it as time"
  if read_as == "time" and not (
    _is_text(stored)
    or pa.types.is_integer(stored)
    or pa.types.is_floating(stored)
    or pa.types.is_timestamp(stored)
    or pa.types.is_date(stored)
  ):
    return f"holds {stored}, not times: store numbers, dates or timestamps"
  return None


def _is_list(stored: pa.DataType) -> bool:
  return (
    pa.types.is_list(stored)
    or pa.types.is_large_list(stored)
    or pa.types.is_fixed_size_list(stored)
    or pa.types.is_list_view(stored)
    or pa.types.is_large_list_view(stored)
  )


def _is_text(stored: pa.DataType) -> bool:
  return (
    pa.types.is_string(stored)
    or pa.types.is_large_string(stored)
    or pa.types.is_string_view(stored)
    or _is_bytes(stored)
  )


def _is_bytes(stored: pa.DataType) -> bool:
  return (
    pa.types.is_binary(stored)
    or pa.types.is_large_binary(stored)
    or pa.types.is_binary_view(stored)
    or pa.types.is_fixed_size_binary(stored)
  )


def plain(array: pa.Array) -> pa.Array:
  """Returns an array without dictionaries, views, extensions and 64-bit offsets."""
  if isinstance(array, pa.ExtensionArray):
    array = array.storage
  if isinstance(array, pa.DictionaryArray):
    array = array.dictionary_decode()
  if _is_bytes(array.type):
    return array.cast(pa.binary())
  if _is_text(array.type):
    return array.cast(pa.string())
  if _is_list(array.type):
    return array.cast(pa.list_(array.type.value_type))
  return array


def bits(array: pa.Array) -> np.ndarray:
  """Returns booleans as bool [N], False where null."""
  if array.null_count:
    array = pc.fill_null(array, False)
  return array.to_numpy(zero_copy_only=False)


def indices_of(array: pa.DictionaryArray) -> np.ndarray:
  """Returns the place of each value in the dictionary, `[N]`; -1 where null."""
  indices = pc.fill_null(array.indices, -1) if array.indices.null_count else array.indices
  return indices.to_numpy(zero_copy_only=False)


def where(kept: np.ndarray, texts: pa.StringArray) -> pa.StringArray:
  """Returns the texts that are kept, and null for the others."""
  return pc.if_else(pa.array(kept), texts, pa.scalar(None, pa.string()))


def decode(array: pa.BinaryArray) -> tuple[pa.StringArray, np.ndarray | None]:
  """Returns bytes as text, null where they are not UTF-8, and where that is, bool [N]."""
  try:
    return array.cast(pa.string()), None
  except pa.ArrowInvalid:
    texts = [_decoded(value) for value in array.to_pylist()]
    decoded = pa.array(texts, pa.string())
    return decoded, bits(decoded.is_null()) & bits(array.is_valid())


def _decoded(value: bytes | None) -> str | None:
  try:
    return None if value is None else value.decode("utf-8")
  except UnicodeDecodeError:
    return None


def as_texts(array: pa.Array, missing: Sequence[str]) -> tuple[pa.Array, list[Problem]]:
  """Converts N values to trimmed text, null where missing; numbers and times as they are written.

  Args:
    array: as `plain` returns it, or a dictionary, which stays one.
    missing: texts that mean no value, besides "".

  Returns:
    The texts, and the values that cannot be read; the texts of these rows are undefined.
  """
  if isinstance(array, pa.DictionaryArray):
    texts, problems = as_texts(plain(array.dictionary), missing)
    indices = array.indices
    if texts.null_count:  # rows of such a value have none
      indices = pc.if_else(texts.is_valid().take(indices), indices, pa.scalar(None, indices.type))
    array = pa.DictionaryArray.from_arrays(indices, texts)
    return array, [problem.at(indices_of(array)) for problem in problems]
  array, problems = trimmed(array, ())
  return _without(array, {*missing, *map(as_text, missing)}), problems


@dataclasses.dataclass
class Spelling:
  """How the values of a column are spelled, added part by part.

  If all values end in ".0", as files write integers with gaps, or none do, two spellings of a
  number are one value; true and false are read in any case in a column that holds only these.
  Otherwise different spellings are different values.
  """

  has_whole: bool = False  # a value ends in ".0"
  has_others: bool = False
  are_flags: bool = True

  def add(self, texts: pa.Array) -> None:
    """Adds the texts of a part."""
    present = texts.drop_null()
    if not len(present):
      return
    num_whole = pc.match_substring_regex(present, _WHOLE).true_count
    self.has_whole |= num_whole > 0
    self.has_others |= num_whole < len(present)
    self.are_flags &= pc.all(pc.is_in(pc.ascii_lower(present), pa.array(_FLAGS))).as_py()

  def join(self, other: "Spelling") -> None:
    """Adds the texts of another part."""
    self.has_whole |= other.has_whole
    self.has_others |= other.has_others
    self.are_flags &= other.are_flags

  @property
  def is_empty(self) -> bool:
    """Whether no value was added."""
    return not (self.has_whole or self.has_others)

  @property
  def name(self) -> str:
    """Returns "whole", "flag" or "", for `spelled`."""
    if self.are_flags and self.has_others:
      return "flag"
    return "" if self.has_whole and self.has_others else "whole"


def spelling_of(texts: pa.Array) -> str:
  """Returns the name of the `Spelling` of all values of a column."""
  spelling = Spelling()
  spelling.add(texts)
  return spelling.name


def spelled(texts: pa.Array, spelling: str) -> pa.Array:
  """Returns texts in one spelling: without ".0" if "whole", in lower case if "flag"."""
  if not spelling:
    return texts
  if isinstance(texts, pa.DictionaryArray):
    return pa.DictionaryArray.from_arrays(texts.indices, spelled(texts.dictionary, spelling))
  if spelling == "flag":
    return pc.ascii_lower(texts)
  has_point = pc.match_substring(texts, ".0").true_count
  return pc.replace_substring_regex(texts, _WHOLE, r"\1\2") if has_point else texts


def same_value(texts: pa.Array) -> pa.Array:
  """Returns texts so that two are equal if they spell one number or truth value: of labels."""
  flags = pc.is_in(pc.ascii_lower(texts), pa.array(_FLAGS))
  return spelled(pc.if_else(flags, pc.ascii_lower(texts), texts), "whole")


def as_text(value: str | int | float) -> str:
  """Returns a value of a setting as `same_value` writes the values of files.

  >>> as_text("4.0"), as_text(5.0), as_text(True)
  ('4', '5', 'true')
  """
  text = str(value).strip()
  return text.lower() if text.lower() in _FLAGS else re.sub(_WHOLE, r"\1\2", text)


def trimmed(array: pa.Array, missing: Sequence[str]) -> tuple[pa.StringArray, list[Problem]]:
  """Converts as `as_texts`, but leaves numbers and booleans of a text as they are spelled."""
  problems = []
  if pa.types.is_binary(array.type):
    stored = array
    array, bad = decode(stored)
    if bad is not None:
      hint = lambda index: "Store text as UTF-8."
      value = lambda index: shown(stored[index].as_py())
      problems.append(Problem(bad, "is not UTF-8", value, hint))
  elif not pa.types.is_string(array.type):
    return _written(array), problems
  return _without(pc.utf8_trim_whitespace(array), ("", *missing)), problems


def _without(texts: pa.StringArray, missing: Iterable[str]) -> pa.StringArray:
  """Returns the texts, null where they mean no value."""
  absent = pc.is_in(texts, value_set=pa.array(list(missing), pa.string()))
  return pc.if_else(absent, pa.scalar(None, pa.string()), texts) if absent.true_count else texts


def _written(array: pa.Array) -> pa.StringArray:
  """Writes values as text: 12.0 as "12", True as "true", times in ISO 8601."""
  if pa.types.is_floating(array.type):
    array = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array
    numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False)  # nan where null
    whole = (np.abs(numbers) < 1 << 53) & (np.trunc(numbers) == numbers)
    integers = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string())
    texts = pc.if_else(pa.array(whole), integers, array.cast(pa.string()))
    return pc.if_else(pa.array(np.isnan(numbers)), pa.scalar(None, pa.string()), texts)
  if pa.types.is_timestamp(array.type):
    # One text for one time, whether a file stores seconds or nanoseconds.
    zone = None if array.type.tz is None else "UTC"
    array = array.cast(pa.timestamp("us", zone), safe=False).cast(pa.string())
    array = pc.replace_substring_regex(array, r"\.0+(Z?)$", r"\1")
    return pc.replace_substring(array, " ", "T")
  texts = array.cast(pa.string())
  return spelled(texts, "whole") if pa.types.is_decimal(array.type) else texts


def as_numbers(array: pa.Array, missing: Sequence[str]) -> tuple[np.ndarray, list[Problem]]:
  """Converts N values to float64 [N], nan where missing; the arguments are of `as_texts`."""
  value = lambda index: shown(array[index].as_py())
  if _is_text(array.type):
    texts, problems = trimmed(array, missing)
    numbers, unreadable = _parsed(texts)
    problems = problems + unreadable
    absent = np.isin(numbers, numbers_of(missing))
  else:
    exact = pa.types.is_integer(array.type) or pa.types.is_decimal(array.type)
    numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    absent = np.isin(numbers, numbers_of(missing))
    beyond = (np.abs(numbers) >= LIMIT) & ~absent if exact else np.zeros(len(numbers), bool)
    problems = _problem(beyond, "is an integer beyond 64 bits", value, _beyond)
    problems += _problem(np.isinf(numbers), "is not finite", value)
  if absent.any():
    numbers = np.where(absent, np.nan, numbers)
  large = np.isfinite(numbers) & (np.abs(numbers) > np.finfo(np.float32).max)
  return numbers, problems + _problem(large, "is beyond float32", value)


def numbers_of(texts: Sequence[str]) -> list[float]:
  """Returns the texts that are finite numbers, as such."""
  return [float(text) for text in texts if re.match(NUMBER, text)]


def _problem(bad: np.ndarray, kind: str, value, hint=lambda index: "") -> list[Problem]:
  return [Problem(bad, kind, value, hint)] if bad.any() else []


def _beyond(index: int) -> str:
  return "An id of so many digits is a category, not a number."


def _parsed(texts: pa.StringArray) -> tuple[np.ndarray, list[Problem]]:
  """Parses trimmed texts; true and false are 1 and 0."""
  value = lambda index: shown(texts[index].as_py())
  problems = []
  try:
    numbers = texts.cast(pa.float64())
  except pa.ArrowInvalid:
    lower = pc.utf8_lower(texts)
    read = pc.if_else(
      pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", texts)
    )
    good = pc.or_(
      pc.match_substring_regex(read, NUMBER), pc.match_substring_regex(read, _NOT_FINITE)
    )
    comma = bits(pc.match_substring_regex(texts, _DECIMAL_COMMA))
    bad = ~bits(good) & bits(texts.is_valid())
    thousands = bits(pc.match_substring_regex(texts, _THOUSANDS))
    point = lambda index: f"Write {texts[index].as_py().replace('.', '').replace(',', '.')}."
    remove = lambda index: "Remove the thousands comma, or write a decimal point."
    problems += _problem(bad & thousands, "has a comma", value, remove)
    problems += _problem(bad & comma & ~thousands, "has a decimal comma", value, point)
    problems += _problem(bad & ~comma & ~thousands, "is not a number", value)
    numbers = pc.if_else(good, read, pa.scalar(None, pa.string())).cast(pa.float64())
  numbers = numbers.to_numpy(zero_copy_only=False)
  if (large := np.abs(numbers) >= LIMIT).any():
    infinite = bits(pc.match_substring_regex(texts, _NOT_FINITE)) & large
    integer = bits(pc.match_substring_regex(texts, INTEGER)) & large
    problems += _problem(infinite, "is not finite", value)
    problems += _problem(integer, "is an integer beyond 64 bits", value, _beyond)
    problems += _problem(np.isinf(numbers) & ~infinite & ~integer, "is beyond float64", value)
  return numbers, problems


def as_lists(
  array: pa.Array, separator: str, missing: Sequence[str]
) -> tuple[pa.ListArray, list[Problem]]:
  """Converts N lists, or texts that a separator cuts, to lists of text without missing items.

  Args:
    array, missing: of `as_texts`.
    separator: of the items of a text; "" leaves it in one piece.
  """
  problems: list[Problem] = []
  if pa.types.is_binary(array.type):
    array, problems = trimmed(array, ())
  if pa.types.is_string(array.type) and separator:
    array = pc.split_pattern(pc.fill_null(array, ""), separator)
  elif pa.types.is_string(array.type):
    array = pa.ListArray.from_arrays(np.arange(len(array) + 1, dtype=np.int32), array)
  elif pa.types.is_null(array.type):
    array = array.cast(pa.list_(pa.string()))
  lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
  row_of_item = np.repeat(np.arange(len(array)), lengths)
  items, item_problems = as_texts(plain(array.flatten()), missing)
  lengths = np.bincount(row_of_item[bits(items.is_valid())], minlength=len(array))
  offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
  for problem in item_problems:
    rows, first = np.unique(row_of_item[problem.bad], return_index=True)
    item_of_row = dict(zip(rows.tolist(), np.flatnonzero(problem.bad)[first].tolist(), strict=True))
    bad = np.isin(np.arange(len(array)), rows)
    value = lambda index, items=item_of_row, problem=problem: problem.value(items[index])
    problems.append(Problem(bad, problem.kind, value, problem.hint))
  return pa.ListArray.from_arrays(offsets, items.drop_null()), problems


# --- times ---------------------------------------------------------------------------------------

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


# --- all ways -------------------------------------------------------------------------------------


def converted(
  arrays: Sequence[pa.Array],
  read_as: ReadAs,
  missing: Sequence[str],
  clocks: dict[str, int],
  names: Sequence[str],
) -> tuple[Any, list[Problem]]:
  """Returns N values of a stored column, or of several, and what cannot be read.

  Args:
    arrays: N values each: one column, or for "time" year, month, day and so on, and for lists
      columns of flags, whose names are the items of a row that are set.
    read_as: how; see `reading.Reader`.
    missing: texts that mean no value.
    clocks: as of `as_times`.
    names: of the columns.
  """
  if len(arrays) > 1:
    numbers, problems = zip(*(as_numbers(plain(array), missing) for array in arrays), strict=True)
    if read_as == "time":
      clocks.setdefault(names[0], _DATED)
    values, more = (_dates if read_as == "time" else _flagged)(numbers, names)
    return values, [*(problem for each in problems for problem in each), *more]
  (array,), (name,) = arrays, names
  if read_as == "any":
    return array, []
  if read_as == "text" and isinstance(array, pa.DictionaryArray):
    return as_texts(array, missing)
  array = plain(array)
  if isinstance(read_as, tuple):
    return as_lists(array, read_as[1], missing)
  if read_as == "text":
    return as_texts(array, missing)
  if read_as == "number":
    return as_numbers(array, missing)
  if read_as != "time":
    raise ValueError(
      f"{read_as!r} is unknown: use 'text', 'number', 'time', 'any' or ('list', separator)"
    )
  if not pa.types.is_binary(array.type) and not pa.types.is_string(array.type):
    return as_times(array, clocks, name, missing)
  texts, problems = trimmed(array, missing)
  times, unreadable = as_times(texts, clocks, name)
  return times, problems + unreadable


def _dates(numbers: Sequence[np.ndarray], names: Sequence[str]) -> tuple[np.ndarray, list[Problem]]:
  """Returns dates in columns of year, month, day, hour, minute and second as microseconds."""
  filled = [np.nan_to_num(part).astype(np.int64) for part in numbers]
  year, month, day, *clock = filled
  year = np.clip(year, -9999, 9999)
  months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
  days = months.astype("datetime64[D]") + (day - 1)
  times = days.astype("datetime64[us]").astype(np.int64)
  for part, seconds in zip(clock, (3600, 60, 1), strict=False):
    times = times + part * seconds * 1_000_000
  bad = np.any(np.isnan(numbers) | (np.trunc(numbers) != numbers), axis=0) | (year != filled[0])
  bad |= (days.astype("datetime64[M]") != months) | (day < 1) | (month < 1) | (month > 12)
  for part, limit in zip(clock, (24, 60, 61), strict=False):
    bad |= (part < 0) | (part >= limit)
  value = lambda row: ", ".join(
    f"{n} {part[row]:g}" for n, part in zip(names, numbers, strict=True)
  )
  return times, _problem(bad, "is no date", value)


def _flagged(
  numbers: Sequence[np.ndarray], names: Sequence[str]
) -> tuple[pa.ListArray, list[Problem]]:
  """Returns the names of the columns that are not 0 in each row."""
  rows, items = np.nonzero(np.nan_to_num(np.stack(numbers, axis=1)))
  offsets = np.searchsorted(rows, np.arange(len(numbers[0]) + 1)).astype(np.int32)
  return pa.ListArray.from_arrays(offsets, pa.array(names, pa.string()).take(pa.array(items))), []
