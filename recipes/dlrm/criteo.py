"""Criteo's display advertising logs, as of the Kaggle challenge of 2014 and the 1 TB set.

A row is a label, 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs; integers
and categories may be blank. Rows are in the order of time and split in that order.

The Kaggle file is declared as a table. The days of the 1 TB set (`recipes.dlrm.criteo1tb`), plain
or `.gz`, are read in blocks, with NumPy, in constant memory, and preparation continues where a
kill interrupted it.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from .. import arrays, files
from ..errors import DamagedFileError, UserError

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES
_BLOCK = 1 << 24
HINT = (
  "It is not downloaded because its licence has to be accepted: get the Criteo Display Advertising "
  "Challenge from Criteo's or Kaggle's page, unpack train.txt, and pass --config.data_dir=<folder> "
  "(and --config.data_file=<name> where the file is called otherwise)."
)


class Rows(NamedTuple):
  """A block of rows: `label` uint8 `[N]`, `integers` float32 `[N, 13]`, nan where blank, and
  `categories` int64 `[N, 26]`, -1 where blank; `end` is the offset of the next block."""

  label: np.ndarray
  integers: np.ndarray
  categories: np.ndarray
  end: int


def table(config) -> dict[str, Any]:
  """Returns the settings of the Kaggle file as a table; see `recipes.tables.settings`.

  Raises:
    UserError: the vocabulary is unknown.
    MissingFileError: the file is missing; says where it comes from.
  """
  vocabularies = {"hash": {"hash": config.hash_size}, "min_count": {"min_count": config.min_count}}
  if config.vocabulary not in vocabularies:
    raise UserError(f"unknown vocabulary {config.vocabulary!r}: choose hash or min_count")
  path = files.require(files.data_folder(config.data_dir, HINT), config.data_file, hint=HINT)
  integers = [f"i{i + 1:02d}" for i in range(NUM_INTEGERS)]
  categories = [f"c{i + 1:02d}" for i in range(NUM_CATEGORIES)]
  number = {"kind": "number", "log": True, "standardize": False}
  return {
    "files": path,
    "format": {"delimiter": "\t", "names": ("label", *integers, *categories), "quote": ""},
    "columns": {
      "label": "label",
      **dict.fromkeys(integers, number),
      **{key: {"kind": "category", **vocabularies[config.vocabulary]} for key in categories},
    },
    "split": {"by": "order", "valid": config.valid_fraction, "test": config.test_fraction},
  }


def write(
  folder: Path, sources: Sequence[tuple[Path, int]], ids: Callable[[np.ndarray], np.ndarray]
) -> None:
  """Writes the columns of files that follow one another.

  Args:
    folder: holds the columns, and how far they are written, for a start after a kill.
    sources: the files, each with its number of rows.
    ids: categories to ids, int64 to int32 `[N, 26]`.
  """
  total = sum(rows for _, rows in sources)
  label = arrays.column(folder, "label", (total,), np.uint8)
  dense = arrays.column(folder, "dense", (total, NUM_INTEGERS), np.float32)
  written = arrays.column(folder, "ids", (total, NUM_CATEGORIES), np.int32)

  position = folder / "position.json"
  at = {"file": 0, "offset": 0, "rows": 0}
  if position.exists():
    at |= arrays.read_json(position)
  with files.progress("preparing", total, "row") as bar:
    bar.update(at["rows"])
    for number in range(at["file"], len(sources)):
      path, before = sources[number][0], sum(rows for _, rows in sources[:number])
      bar.set_description(f"preparing {path.name}")
      for block in read(path, at["offset"], at["rows"] - before):
        rows = slice(at["rows"], at["rows"] + len(block.label))
        label[rows] = block.label
        dense[rows] = squash(block.integers)
        written[rows] = ids(block.categories)
        for column in (label, dense, written):
          column.flush()
        at = {"file": number, "offset": block.end, "rows": rows.stop}
        arrays.write_json(position, at)
        bar.update(len(block.label))
      at |= {"file": number + 1, "offset": 0}


def squash(integers: np.ndarray) -> np.ndarray:
  """Returns `sign(x) * log(1 + |x|)`, blanks as 0: counts span decades, and a few are negative."""
  return np.nan_to_num(np.sign(integers) * np.log1p(np.abs(integers))).astype(np.float32)


def count_rows(path: Path) -> int:
  """Returns the number of lines, a last one without its newline included."""
  lines, last = 0, b"\n"
  for block in _blocks(path, _BLOCK):
    lines, last = lines + block.count(b"\n"), block[-1:]
  if lines == 0 and last == b"\n":
    raise DamagedFileError(f"{path} is empty. Is it complete? Get it again.")
  return lines + (last != b"\n")


def read(path: Path, offset: int = 0, line: int = 0, block: int = _BLOCK) -> Iterator[Rows]:
  """Yields the file's rows in blocks of about `block` bytes, from a byte offset on.

  Args:
    path: a file of tab-separated rows.
    offset: where a line starts, in the unpacked text.
    line: the number of lines before it, for messages.
    block: bytes to read at once.

  Raises:
    ValueError: a row is truncated or a field is not what it should be; names the file and the line.
  """
  rest = b""
  for data in _blocks(path, block, offset):
    data = rest + data
    end = data.rfind(b"\n") + 1
    data, rest = data[:end], data[end:]
    offset += len(data)
    if data:
      yield _parse(data, path, line)._replace(end=offset)
      line += data.count(b"\n")
  if rest:
    yield _parse(rest + b"\n", path, line)._replace(end=offset + len(rest))


def _blocks(path: Path, size: int, offset: int = 0) -> Iterator[bytes]:
  """Yields the unpacked text from an offset on; raises DamagedFileError where it is cut off."""
  try:
    with _open(path) as file:
      file.seek(offset)
      while block := file.read(size):
        yield block
  except (EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise DamagedFileError(
      f"{path} is damaged or cut off ({error}). Get the file again; `gzip -t` tests it."
    ) from error


def _open(path: Path) -> IO[bytes]:
  return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _parse(data: bytes, path: Path, line: int) -> Rows:
  text = np.frombuffer(data, np.uint8)
  breaks = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
  newlines = np.flatnonzero(text[breaks] == ord("\n"))
  fields = np.diff(newlines, prepend=-1)
  if (wrong := np.flatnonzero(fields != _FIELDS)).size:
    raise _error(
      path,
      line + wrong[0],
      f"found {fields[wrong[0]]} fields separated by tabs, expected a label, {NUM_INTEGERS} "
      f"integers and {NUM_CATEGORIES} categories ({_FIELDS})",
    )
  ends = breaks.reshape(-1, _FIELDS)
  starts = np.concatenate([[0], breaks[:-1] + 1]).reshape(-1, _FIELDS)

  def column(i: int, base: int) -> np.ndarray:
    values, bad = _numbers(text, starts[:, i], ends[:, i], base)
    if bad.any():
      at = int(np.argmax(bad))
      field = data[starts[at, i] : ends[at, i]].decode("latin-1")
      name = "label" if i == 0 else f"integer {i}" if base == 10 else f"category {i - NUM_INTEGERS}"
      kind = "an integer" if base == 10 else "up to 8 hexadecimal digits"
      raise _error(path, line + at, f"{name} is {field!r}, expected {kind}")
    return values

  label = column(0, 10)
  if (wrong := np.flatnonzero((label != 0) & (label != 1))).size:
    raise _error(path, line + wrong[0], "the label is not 0 or 1")
  integers = np.stack([column(1 + i, 10) for i in range(NUM_INTEGERS)], axis=1)
  categories = np.stack([column(1 + NUM_INTEGERS + i, 16) for i in range(NUM_CATEGORIES)], axis=1)
  return Rows(
    label.astype(np.uint8), integers.astype(np.float32), categories.astype(np.int64), end=0
  )


def _numbers(
  text: np.ndarray, starts: np.ndarray, ends: np.ndarray, base: int
) -> tuple[np.ndarray, np.ndarray]:
  """Reads one field of every row; returns the numbers, blanks as nan or -1, and which are bad."""
  digits = np.full(256, 255, np.uint8)
  digits[np.frombuffer(b"0123456789abcdef"[:base], np.uint8)] = np.arange(base)
  digits[np.frombuffer(b"0123456789ABCDEF"[:base], np.uint8)] = np.arange(base)
  blank = starts == ends
  negative = (text[starts] == ord("-")) & (base == 10)
  starts = starts + negative
  length = ends - starts
  bad = (length > (8 if base == 16 else 18)) | (negative & (length == 0))
  value = np.zeros(len(starts), np.int64)
  for k in range(int(length[~bad].max(initial=0))):
    inside = k < length
    digit = digits[text[np.minimum(starts + k, len(text) - 1)]]
    bad |= inside & (digit == 255)
    value = np.where(inside, value * base + digit, value)
  if base == 16:
    return np.where(blank, -1, value), bad
  return np.where(blank, np.nan, np.where(negative, -value, value)), bad


def splitmix64(x: np.ndarray) -> np.ndarray:
  """Mixes the bits of uint64s: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
  generators", the mixing function."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def _error(path: Path, index: int, what: str) -> DamagedFileError:
  return DamagedFileError(
    f"{path}, line {index + 1}: {what}. Is the file complete and unpacked? Repair or remove the "
    "line."
  )
