"""Columns as Arrow stores them, converted to text, numbers, times or lists of text.

The same code reads the rows of training and those that are predicted for.
"""

import contextlib
import datetime
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# How a column is read: "text", "number", "time", "any", or ("list", separator); of lists whose
# items belong to those of other lists, ("aligned", separator), which keeps missing items; of
# numbers that another model has computed ("vector", separator, width).
ReadAs = str | tuple[str, ...]

INTEGER = r"^[+-]?\d+$"
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
WHOLE = r"^-?(0)\.0+$|^(-?[1-9]\d*)\.0+$"  # as files write an integer column with gaps
FLAGS = ("true", "false")
_LIMIT, _LARGEST = float(1 << 63), float(np.finfo(np.float32).max)
_NO_NUMBERS = (  # what is wrong with the text of a bad number, and what to do
  (r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$", "has a comma", "Remove it, or write a decimal point."),
  (r"^[+-]?[\d.]*\d,\d+$", "has a decimal comma", "Write a decimal point."),
  (r"(?i)^[+-]?(nan|inf(inity)?)$", "is not finite", ""),
  (INTEGER, "is an integer beyond 64 bits", "An id of so many digits is a category, not a number."),
  (NUMBER, "is beyond float32", ""),
  ("", "is not a number", ""),
)
_NO_TIMES = (
  (NUMBER, "is a time beyond 64 bits", ""),
  ("", "is not a time", "Write a number or a date such as 2024-12-31 or 2024-12-31T23:59:59."),
)
_DATE = r"^\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?$"
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_CLOCKS = ("a number", "a date")


def shown(value: object) -> str:
  """Returns a value for an error text, cut to 60 characters.

  >>> shown("abc"), shown(2.5)
  ("'abc'", '2.5')
  """
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


class Problem(NamedTuple):
  """Values of one column that cannot be used."""

  bad: np.ndarray  # bool [N], the rows
  kind: str  # the fault as a predicate, such as "is not UTF-8"; faults are counted by it
  value: Callable[[int], str]  # of a row's index, for the error text
  hint: str = ""  # says what to write

  def at(self, places: np.ndarray) -> "Problem":
    """Returns the problem of values of which each is one of these, by place; -1 is of none."""
    bad = np.append(self.bad, False)[places]
    return self._replace(bad=bad, value=lambda row: self.value(int(places[row])))


def _problems(values: pa.Array, bad: np.ndarray, table: Sequence[tuple[str, str, str]]):
  """Returns a problem for each line of a table whose pattern is the first to match a bad value."""
  rows: dict[tuple[str, str], list[int]] = {}
  for index in np.flatnonzero(bad).tolist():
    text = str(values[index].as_py())
    kind = next(line[1:] for line in table if re.search(line[0], text))
    rows.setdefault(kind, []).append(index)
  value = lambda index: shown(values[index].as_py())
  return [
    Problem(np.isin(np.arange(len(values)), each), kind, value, hint)
    for (kind, hint), each in rows.items()
  ]


def _is_list(stored: pa.DataType) -> bool:
  return hasattr(stored, "value_type") and not pa.types.is_dictionary(stored)


def _is_text(stored: pa.DataType) -> bool:
  return any(name in str(stored) for name in ("string", "binary")) and not pa.types.is_nested(
    stored
  )


def refusal(stored: pa.DataType, read_as: ReadAs) -> str | None:
  """Returns what is wrong with reading a stored column so, or None.

  >>> refusal(pa.list_(pa.string()), "text")
  'holds lists: declare it as a bag, a sequence or an item with a separator'
  """
  if pa.types.is_dictionary(stored):
    stored = stored.value_type
  if read_as == "any" or pa.types.is_null(stored):
    return None
  if _is_list(stored) and isinstance(read_as, tuple):
    is_nested = pa.types.is_nested(stored.value_type)
    return f"holds {stored}: store lists of numbers or texts" if is_nested else None
  if _is_list(stored):
    return "holds lists: declare it as a bag, a sequence or an item with a separator"
  if pa.types.is_nested(stored):
    return f"holds {stored}: store its fields as columns"
  if isinstance(read_as, tuple) and not (_is_text(stored) and read_as[1]):
    return f"holds single values ({stored}), not lists: declare a separator, or another kind"
  is_time = pa.types.is_timestamp(stored) or pa.types.is_date(stored)
  if read_as == "number" and pa.types.is_temporal(stored):
    return f"holds times ({stored}), not numbers: declare it as time"
  is_number = pa.types.is_integer(stored) or pa.types.is_floating(stored)
  if read_as == "time" and not (_is_text(stored) or is_number or is_time):
    return f"holds {stored}, not times: store numbers, dates or timestamps"
  return None


def plain(array: pa.Array) -> pa.Array:
  """Returns an array without dictionaries, views, extensions and 64-bit offsets."""
  if isinstance(array, pa.ExtensionArray):
    array = array.storage
  if isinstance(array, pa.DictionaryArray):
    array = array.dictionary_decode()
  if _is_text(array.type):
    return array.cast(pa.binary() if "binary" in str(array.type) else pa.string())
  return array.cast(pa.list_(array.type.value_type)) if _is_list(array.type) else array


def bits(array: pa.Array) -> np.ndarray:
  """Returns booleans as bool [N], False where null."""
  return pc.fill_null(array, False).to_numpy(zero_copy_only=False)


def indices_of(array: pa.DictionaryArray) -> np.ndarray:
  """Returns the place of each value in the dictionary, `[N]`; -1 where null."""
  indices = pc.fill_null(array.indices, -1) if array.indices.null_count else array.indices
  return indices.to_numpy(zero_copy_only=False)


def lengths_of(lists: pa.Array) -> np.ndarray:
  """Returns how many items each list has, `[N]`; 0 where null."""
  return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def as_texts(array: pa.Array, missing: Sequence[str]) -> tuple[pa.DictionaryArray, list[Problem]]:
  """Converts N values to a dictionary of trimmed texts, null where missing.

  Texts stay as they are; 12.0 becomes "12", True "true", and times ISO 8601. Values that cannot be
  read are null, too.

  Args:
    array: of values of any type but lists.
    missing: texts that mean no value, besides "".
  """
  if not isinstance(array, pa.DictionaryArray):
    array = plain(array)
    half = pa.types.is_float16(array.type) or pa.types.is_null(array.type)
    array = (array.cast(pa.float32()) if half else array).dictionary_encode()
  texts, problems = _trimmed(plain(array.dictionary), {"", *missing, *map(as_text, missing)})
  if not texts.null_count:
    return pa.DictionaryArray.from_arrays(array.indices, texts), []
  places = indices_of(array)
  codes = np.append(np.where(bits(texts.is_valid()), np.arange(len(texts)), -1), -1)[places]
  indices = pa.array(codes.astype(np.int32), mask=codes < 0)
  texts = pc.fill_null(texts, "")  # which no index is of; Parquet takes no null among them
  return pa.DictionaryArray.from_arrays(indices, texts), [each.at(places) for each in problems]


def _trimmed(array: pa.Array, missing: set[str]) -> tuple[pa.StringArray, list[Problem]]:
  """Converts plain values to trimmed texts, null where they mean no value."""
  problems = []
  if pa.types.is_binary(array.type):
    stored = array
    try:
      array = stored.cast(pa.string())
    except pa.ArrowInvalid:
      values = stored.to_pylist()
      is_text = lambda value: value is None or value.decode("utf-8", "replace").encode() == value
      bad = np.array([not is_text(value) for value in values], bool)
      array = pa.array(
        [b"" if b else v for v, b in zip(values, bad, strict=True)], pa.string(), mask=bad
      )
      problems = _problems(stored, bad, [("", "is not UTF-8", "Store text as UTF-8.")])
  texts = pc.utf8_trim_whitespace(array) if pa.types.is_string(array.type) else _written(array)
  absent = pc.is_in(texts, value_set=pa.array(sorted(missing), pa.string()))
  texts = pc.if_else(absent, pa.scalar(None, pa.string()), texts) if absent.true_count else texts
  return texts, problems


def _written(array: pa.Array) -> pa.StringArray:
  """Writes values as text: 12.0 as "12", True as "true", times in ISO 8601."""
  if pa.types.is_timestamp(array.type):
    # One text for one time, whether a file stores seconds or nanoseconds.
    zone = None if array.type.tz is None else "UTC"
    array = array.cast(pa.timestamp("us", zone), safe=False).cast(pa.string())
    array = pc.replace_substring_regex(array, r"\.0+(Z?)$", r"\1")
    return pc.replace_substring(array, " ", "T")
  if not pa.types.is_floating(array.type):
    texts = array.cast(pa.string())
    return spelled(texts, "whole") if pa.types.is_decimal(array.type) else texts
  numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False)  # nan where null
  whole = (np.abs(numbers) < 1 << 53) & (np.trunc(numbers) == numbers)
  integers = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string())
  texts = pc.if_else(pa.array(whole), integers, array.cast(pa.string()))
  return pc.if_else(pa.array(np.isnan(numbers)), pa.scalar(None, pa.string()), texts)


def spelling(has_whole: bool, has_others: bool, are_flags: bool) -> str:
  """Returns how the values of a column are spelled, for `spelled`.

  If all values end in ".0", as files write integers with gaps, or none do, two spellings of a
  number are one value; true and false are read in any case in a column that holds only these.
  Otherwise different spellings are different values.

  Args:
    has_whole, has_others: whether a value ends in ".0", and whether one does not.
    are_flags: whether all values are true or false.
  """
  if are_flags and has_others:
    return "flag"
  return "" if has_whole and has_others else "whole"


def spelling_of(texts: pa.Array) -> str:
  """Returns the `spelling` of all values of a column."""
  present = texts.drop_null()
  whole = pc.match_substring_regex(present, WHOLE).true_count
  are_flags = bool(pc.all(pc.is_in(pc.ascii_lower(present), pa.array(FLAGS))).as_py())
  return spelling(whole > 0, whole < len(present), are_flags)


def spelled(texts: pa.Array, name: str) -> pa.Array:
  """Returns texts in one spelling: without ".0" if "whole", in lower case if "flag"."""
  if isinstance(texts, pa.DictionaryArray) and name:
    return pa.DictionaryArray.from_arrays(texts.indices, spelled(texts.dictionary, name))
  if name == "flag":
    return pc.ascii_lower(texts)
  if not name or not pc.any(pc.match_substring(texts, ".0")).as_py():  # much faster
    return texts
  return pc.replace_substring_regex(texts, WHOLE, r"\1\2")


def same_value(texts: pa.Array) -> pa.Array:
  """Returns texts so that two are equal if they spell one number or truth value: of labels."""
  if isinstance(texts, pa.DictionaryArray):
    return pa.DictionaryArray.from_arrays(texts.indices, same_value(texts.dictionary))
  flags = pc.is_in(pc.ascii_lower(texts), pa.array(FLAGS))
  return spelled(pc.if_else(flags, pc.ascii_lower(texts), texts), "whole")


def as_text(value: str | int | float) -> str:
  """Returns a value of a setting as `same_value` writes the values of files.

  >>> as_text("4.0"), as_text(5.0), as_text(True)
  ('4', '5', 'true')
  """
  text = str(value).strip()
  return text.lower() if text.lower() in FLAGS else re.sub(WHOLE, r"\1\2", text)


def as_numbers(array: pa.Array, missing: Sequence[str]) -> tuple[np.ndarray, list[Problem]]:
  """Converts N plain values to float64 [N], nan where missing; true and false are 1 and 0."""
  problems: list[Problem] = []
  if _is_text(array.type):
    array, problems = _trimmed(array, {"", *missing})
    try:
      numbers, bad = array.cast(pa.float64()).to_numpy(zero_copy_only=False), np.array(False)
    except pa.ArrowInvalid:
      texts = array.dictionary_encode()
      parsed = [_number(text) for text in texts.dictionary.to_pylist()]
      numbers = np.array([*parsed, None], float)[indices_of(texts)]
      bad = np.isnan(numbers) & bits(array.is_valid())
  else:
    numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad = np.array(False)
  absent = np.isin(numbers, _numbers_among(missing))
  size = np.where(absent, 0, np.abs(numbers))
  bad = bad | (size > _LARGEST)
  for index in np.flatnonzero((size >= _LIMIT) & ~bad).tolist():
    bad[index] = bool(re.match(INTEGER, str(array[index].as_py())))
  numbers = np.where(absent, np.nan, numbers)
  return numbers, problems + _problems(array, bad, _NO_NUMBERS)


def _numbers_among(texts: Sequence[str]) -> list[float]:
  return [float(text) for text in texts if re.match(NUMBER, text)]


def _number(text: str | None) -> float | None:
  """Returns the number of a text, true and false being 1 and 0; None if it is none."""
  if text is not None and re.match(NUMBER, text):
    return float(text)
  return {"true": 1.0, "false": 0.0}.get((text or "").lower())


def as_lists(
  array: pa.Array, separator: str, missing: Sequence[str], *, keeps_missing: bool = False
) -> tuple[pa.ListArray, list[Problem]]:
  """Converts N plain lists, or texts that a separator cuts, to lists of text, no item missing.

  A missing list is empty.

  Args:
    array, missing: of `as_texts`.
    separator: of the items of a text; "" leaves it in one piece.
    keeps_missing: leaves a missing item where it is, as null.
  """
  array, row_of_item, problems = _lists(array, separator, missing)
  items, bad_items = as_texts(array.flatten(), missing)
  problems += of_rows(bad_items, row_of_item, len(array))
  texts = items.dictionary_decode()
  if not keeps_missing:
    row_of_item, texts = row_of_item[bits(items.is_valid())], texts.drop_null()
  return _list_array(np.bincount(row_of_item, minlength=len(array)), texts), problems


def _lists(
  array: pa.Array, separator: str, missing: Sequence[str]
) -> tuple[pa.Array, np.ndarray, list[Problem]]:
  """Returns lists, those of texts cut at the separator, and the row of each item."""
  problems: list[Problem] = []
  if _is_text(array.type) or pa.types.is_null(array.type):
    texts, problems = _trimmed(array.cast(pa.binary()), {"", *missing})
    whole = np.arange(len(texts) + 1, dtype=np.int32)
    array = (
      pc.split_pattern(texts, separator) if separator else pa.ListArray.from_arrays(whole, texts)
    )
  return array, np.repeat(np.arange(len(array)), lengths_of(array)), problems


def of_rows(problems: Sequence[Problem], row_of_item: np.ndarray, rows: int) -> list[Problem]:
  """Returns the problems of items as those of their rows: a row has that of its first bad item."""
  found = []
  for problem in problems:
    bad_rows, first = np.unique(row_of_item[problem.bad], return_index=True)
    item_of_row = np.full(rows, -1)
    item_of_row[bad_rows] = np.flatnonzero(problem.bad)[first]
    found.append(problem.at(item_of_row))
  return found


def _list_array(lengths: np.ndarray, items: pa.Array) -> pa.ListArray:
  offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
  return pa.ListArray.from_arrays(offsets, items)


def as_vectors(
  array: pa.Array, separator: str, width: int, missing: Sequence[str]
) -> tuple[pa.ListArray, list[Problem]]:
  """Converts N plain lists of numbers, or texts that a separator cuts, to lists of float32.

  A missing vector, of which no number is given, is empty; the others have `width` numbers.
  """
  lists, row_of_item, problems = _lists(array, separator, missing)
  numbers, bad_items = as_numbers(lists.flatten(), missing)
  problems += of_rows(bad_items, row_of_item, len(array))
  lengths, is_given = np.bincount(row_of_item, minlength=len(array)), ~np.isnan(numbers)
  given = np.bincount(row_of_item[is_given], minlength=len(array))
  is_whole = (given == width) & (lengths == width)
  wrong = (given > 0) & ~is_whole
  for problem in problems:
    wrong &= ~problem.bad
  value = lambda row: shown(array[row].as_py())
  problems += [Problem(wrong, f"is not {width} numbers", value)] * bool(wrong.any())
  items = pa.array(numbers[is_whole[row_of_item]], pa.float32())
  return _list_array(np.where(is_whole, width, 0), items), problems


def as_times(
  array: pa.Array, clocks: dict[str, int], column: str, missing: Sequence[str] = ()
) -> tuple[np.ndarray, list[Problem]]:
  """Converts N plain values to int64, or to float64 where numbers have fractions.

  Dates and timestamps become microseconds since 1970, in UTC where they name no zone. Numbers are
  taken as they are, whether they count seconds or days.

  Args:
    array: texts, numbers, dates or timestamps.
    clocks: by column, whether its first value is a number (0) or a date (1); updated. The two have
      no common order, so that values of the other kind are refused.
    missing: texts that mean no value; numbers are compared with those that are such.
  """
  problems: list[Problem] = []
  bad, dated = np.zeros(len(array), bool), np.full(len(array), pa.types.is_temporal(array.type))
  if _is_text(array.type):
    array, problems = _trimmed(array, {"", *missing})
    times, dated, bad = _times_of(array)
    absent = ~bits(array.is_valid())
  elif pa.types.is_temporal(array.type):
    stored = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)), safe=False)
    times, absent = pc.fill_null(stored.cast(pa.int64()), 0).to_numpy(), ~bits(array.is_valid())
  else:
    numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    absent = np.isnan(numbers)
    bad = ~absent & ~((numbers >= -_LIMIT) & (numbers < _LIMIT))
    times = np.where(absent | bad, 0, numbers)
    if pa.types.is_integer(array.type):  # not by way of float64, which rounds beyond 2**53
      times = pc.fill_null(array.cast(pa.int64(), safe=False), 0).to_numpy()
    elif (np.floor(times) == times).all():
      times = times.astype(np.int64)
    absent |= np.isin(times, _numbers_among(missing))
  usable = ~absent & ~bad
  if usable.any():
    clocks.setdefault(column, int(dated[usable][0]))
  clock = clocks.get(column, 0)
  other = f"is {_CLOCKS[1 - clock]}, while the first time is {_CLOCKS[clock]}"
  value = lambda index: "" if absent[index] else shown(array[index].as_py())
  problems += _problems(array, ~absent & bad, _NO_TIMES)
  if absent.any():
    problems.append(Problem(absent, "is missing", value, "Every row needs its time."))
  if (mixed := usable & (dated != bool(clock))).any():
    problems.append(Problem(mixed, other, value, "Write all times in one way."))
  return times, problems


def _times_of(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns times, whether they are dates, and which are no times, `[N]` each."""
  none = np.zeros(len(texts), bool)
  for stored in (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.int64()):
    with contextlib.suppress(pa.ArrowInvalid):
      times = pc.fill_null(texts.cast(stored).cast(pa.int64()), 0).to_numpy()
      return times, none | pa.types.is_timestamp(stored), none
  encoded = texts.dictionary_encode()
  places = indices_of(encoded)
  parsed = [*map(time_of, encoded.dictionary.to_pylist()), (0, False, False)]
  times, dated, bad = (np.array(each)[places] for each in zip(*parsed, strict=True))
  return times, dated, bad


def time_of(text: str | None) -> tuple[int | float, bool, bool]:
  """Returns the time of a text, whether it is a date, and whether it is none; see `as_times`."""
  if text is None:
    return 0, False, False
  if re.match(NUMBER, text):
    number = int(text) if re.match(INTEGER, text) else float(text)
    if not -_LIMIT <= number < _LIMIT:
      return 0, False, True
    return int(number) if number == int(number) else number, False, False
  text = re.sub(r" ?UTC$", "Z", re.sub(r"^(\d{4})/(\d\d)/", r"\1-\2-", text))
  with contextlib.suppress(ValueError):
    if re.match(_DATE, text):
      time = datetime.datetime.fromisoformat(text)
      since = time.replace(tzinfo=time.tzinfo or datetime.UTC) - _EPOCH
      return since // datetime.timedelta(microseconds=1), True, False
  return 0, False, True


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
    read_as: "text", a dictionary as of `as_texts`; "number", float64 `[N]`, see `as_numbers`;
      "time", int64 or float64 `[N]`, none missing, see `as_times`; ("list", separator)
      and ("aligned", separator), a `pa.ListArray`, see `as_lists`; ("vector", separator, width),
      see `as_vectors`; or "any", the array as stored.
  """
  if len(arrays) > 1:
    numbers, problems = zip(*(as_numbers(plain(array), missing) for array in arrays), strict=True)
    if read_as == "time":
      clocks.setdefault(names[0], 1)
    values, more = (_dates if read_as == "time" else _flagged)(numbers, names)
    return values, [*(problem for each in problems for problem in each), *more]
  (array,) = arrays
  if read_as == "any":
    return array, []
  if isinstance(read_as, tuple):
    kind, separator, *width = read_as
    if kind == "vector":
      return as_vectors(plain(array), separator, int(width[0]), missing)
    return as_lists(plain(array), separator, missing, keeps_missing=kind == "aligned")
  if read_as == "time":
    return as_times(plain(array), clocks, names[0], missing)
  return as_texts(array, missing) if read_as == "text" else as_numbers(plain(array), missing)


def _dates(numbers: Sequence[np.ndarray], names: Sequence[str]) -> tuple[np.ndarray, list[Problem]]:
  """Returns dates in columns of year, month, day, hour, minute and second as microseconds."""
  filled = [np.nan_to_num(part).astype(np.int64) for part in numbers]
  year, month, day, *clock = filled
  year = np.clip(year, -9999, 9999)
  months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
  days = months.astype("datetime64[D]") + (day - 1)
  times = days.astype("datetime64[us]").astype(np.int64)
  bad = np.any(np.isnan(numbers) | (np.trunc(numbers) != numbers), axis=0) | (year != filled[0])
  bad |= (days.astype("datetime64[M]") != months) | (day < 1) | (month < 1) | (month > 12)
  for part, seconds, limit in zip(clock, (3600, 60, 1), (24, 60, 61), strict=False):
    times = times + part * seconds * 1_000_000
    bad |= (part < 0) | (part >= limit)
  value = lambda row: ", ".join(
    f"{n} {part[row]:g}" for n, part in zip(names, numbers, strict=True)
  )
  return times, [Problem(bad, "is no date", value)] * bool(bad.any())


def _flagged(
  numbers: Sequence[np.ndarray], names: Sequence[str]
) -> tuple[pa.ListArray, list[Problem]]:
  """Returns the names of the columns that are not 0 in each row."""
  rows, items = np.nonzero(np.nan_to_num(np.stack(numbers, axis=1)))
  offsets = np.searchsorted(rows, np.arange(len(numbers[0]) + 1)).astype(np.int32)
  return pa.ListArray.from_arrays(offsets, pa.array(names, pa.string()).take(pa.array(items))), []
