"""Criteo's display advertising logs, as of the Kaggle challenge of 2014 and the 1 TB set.

A row is a label, 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs; integers
and categories may be blank. Rows are in the order of time and split in that order.

The Kaggle file is declared as a table. The days of the 1 TB set (`recipes.dlrm.criteo1tb`), plain
or `.gz`, are read one after the other, and preparation resumes at the day that a kill interrupted.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, files
from ..errors import DamagedFileError, UserError
from ..tables.formats import Format
from ..tables.reading import Ledger
from ..tables.source import Stage, TextFile, scan

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
_INTEGERS = tuple(f"i{i + 1:02d}" for i in range(NUM_INTEGERS))
_CATEGORIES = tuple(f"c{i + 1:02d}" for i in range(NUM_CATEGORIES))
_FORMAT: dict[str, Any] = {
  "delimiter": "\t",
  "names": ("label", *_INTEGERS, *_CATEGORIES),
  "quote": "",
}
HINT = (
  "It is not downloaded because its licence has to be accepted: get the Criteo Display Advertising "
  "Challenge from Criteo's or Kaggle's page, unpack train.txt, and pass --config.data_dir=<folder> "
  "(and --config.data_file=<name> where the file is called otherwise)."
)


class Rows(NamedTuple):
  """A block of rows: `label` uint8 `[N]`, `integers` float32 `[N, 13]`, nan where blank, and
  `categories` int64 `[N, 26]`, -1 where blank."""

  label: np.ndarray
  integers: np.ndarray
  categories: np.ndarray


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
  number = {"kind": "number", "log": True, "standardize": False}
  return {
    "files": path,
    "format": _FORMAT,
    "columns": {
      "label": "label",
      **dict.fromkeys(_INTEGERS, number),
      **{key: {"kind": "category", **vocabularies[config.vocabulary]} for key in _CATEGORIES},
    },
    "split": {"by": "order", "valid": config.valid_fraction, "test": config.test_fraction},
  }


def write(
  folder: Path, sources: Sequence[tuple[Path, int]], ids: Callable[[np.ndarray], np.ndarray]
) -> None:
  """Writes the columns of files that follow one another.

  Args:
    folder: holds the columns, and which files are written, for a start after a kill.
    sources: the files, each with its number of rows.
    ids: categories to ids, int64 to int32 `[N, 26]`.

  Raises:
    DamagedFileError: as `read`, or a file has another number of rows.
  """
  total = sum(rows for _, rows in sources)
  label = arrays.column(folder, "label", (total,), np.uint8)
  dense = arrays.column(folder, "dense", (total, NUM_INTEGERS), np.float32)
  written = arrays.column(folder, "ids", (total, NUM_CATEGORIES), np.int32)
  position = folder / "position.json"
  done = arrays.read_json(position)["files"] if position.exists() else 0
  at = sum(rows for _, rows in sources[:done])
  with files.progress("preparing", total, "row") as bar, Stage(folder / "stage") as stage:
    bar.update(at)
    for number, (path, rows) in enumerate(sources[done:], start=done + 1):
      bar.set_description(f"preparing {path.name}")
      end = at + rows
      for block in read(path, stage):
        part = slice(at, at + len(block.label))
        if part.stop > end:
          break
        label[part], dense[part] = block.label, squash(block.integers)
        written[part], at = ids(block.categories), part.stop
        bar.update(len(block.label))
      if at != end:
        raise DamagedFileError(f"{path} has empty lines, or has changed. Get it again.")
      for column in (label, dense, written):
        column.flush()
      arrays.write_json(position, {"files": number})


def squash(integers: np.ndarray) -> np.ndarray:
  """Returns `sign(x) * log(1 + |x|)`, blanks as 0: counts span decades, and a few are negative."""
  return np.nan_to_num(np.sign(integers) * np.log1p(np.abs(integers))).astype(np.float32)


def count_rows(path: Path) -> int:
  """Returns the number of lines, a last one without its newline included."""
  lines, last = 0, b"\n"
  with TextFile(path, Format(**_FORMAT)).open() as file:
    while block := file.read(1 << 24):
      lines, last = lines + block.count(b"\n"), block[-1:]
  return lines + (last != b"\n")


def read(path: Path, stage: Stage) -> Iterator[Rows]:
  """Yields the rows of a file in blocks.

  Args:
    path: a file of tab-separated rows.
    stage: where the text is kept while it is read.

  Raises:
    DamagedFileError: a row is truncated or a field is not what it should be; names file and row.
  """
  stored, faults, _ = TextFile(path, Format(**_FORMAT)).stored(stage)
  Ledger("raise").add(path, faults)
  integers = [f"TRY_CAST(c{1 + i} AS BIGINT)" for i in range(NUM_INTEGERS)]
  first = 1 + NUM_INTEGERS
  categories = [f"TRY_CAST('0x' || c{first + i} AS UINTEGER)" for i in range(NUM_CATEGORIES)]
  good = ["c0 IN ('0', '1')", *(f"{n}::VARCHAR = c{1 + i}" for i, n in enumerate(integers))]
  good += [f"{n} IS NOT NULL AND NOT contains(c{first + i}, '_')" for i, n in enumerate(categories)]
  good[1:] = [f"c{i} IS NULL OR coalesce({each}, false)" for i, each in enumerate(good[1:], 1)]
  rows = ", ".join(f"min(file_row_number) FILTER (NOT coalesce({each}, false))" for each in good)
  bad = stage.table(f"SELECT {rows} FROM {scan(stored)}").to_pylist()[0].values()
  found = [(row, place) for place, row in enumerate(bad) if row is not None]
  if found:
    row, place = min(found)
    value = stage.table(f"SELECT c{place} FROM {scan(stored)} WHERE file_row_number = {row}")
    kinds = ["0 or 1", *["an integer"] * NUM_INTEGERS, *["up to 8 hexadecimal digits"] * 26]
    raise DamagedFileError(
      f"{path}, row {row + 1}, column {_FORMAT['names'][place]!r} is {value[0][0].as_py()!r}, "
      f"expected {kinds[place]}. Is the file complete and unpacked? Repair or remove the row."
    )
  columns = ["c0::UTINYINT", *(f"{each}::FLOAT" for each in integers)]
  columns += [f"coalesce({each}::BIGINT, -1)" for each in categories]
  query = f"SELECT {', '.join(columns)} FROM {scan(stored)}"
  for batch in stage.engine.execute(query).to_arrow_reader(1 << 16):
    label, *arrays_of = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
    numbers, ids = arrays_of[:NUM_INTEGERS], arrays_of[NUM_INTEGERS:]
    yield Rows(label, np.stack(numbers, axis=1), np.stack(ids, axis=1))
  stored.unlink()


def splitmix64(x: np.ndarray) -> np.ndarray:
  """Mixes the bits of uint64s: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
  generators", the mixing function."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
