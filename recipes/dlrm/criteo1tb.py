"""Criteo's 1 TB click logs as MLPerf's DLRM-DCNv2 benchmark uses them: 24 days, bags of ids.

The files are `day_0` to `day_23`, unpacked or `.gz`. A row is a label, 13 integers and 26
categories of 8 hexadecimal digits, separated by tabs; integers and categories may be blank. Days 0
to 22 train; the first half of day 23 validates and the second tests. Days are read one after the
other, and preparation resumes at the day that a kill interrupted.

The id of a category is its 32 bits modulo the size of its table, and 0 where it is blank. (MLPerf
numbers the values of a feature by first appearance and takes that modulo the size, so its small
tables have no collisions.)

Only one id per feature is published. MLPerf draws the other ids of a bag at random, once for each
id of a table, which makes its multi-hot data synthetic; so are these. Here a bag of valency L is

    id, h(1), ..., h(L - 1)    with h(k) = floor(size * u / 2^32)

where u are the upper 32 bits of splitmix64(id + feature * 2^32 + k * 2^40), features counting from
0. One id always has one bag, uniform like MLPerf's, on every machine and without a file. Bags are
made when rows are read: stored, they would take 3.7 TB.
"""

import dataclasses
import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import cache, files
from ..datasets import Prepared
from ..errors import DamagedFileError, UserError
from ..tables import source
from ..tables.formats import Format
from ..tables.transforms import logarithm

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
INTEGERS = tuple(f"i{i + 1:02d}" for i in range(NUM_INTEGERS))
CATEGORIES = tuple(f"c{i + 1:02d}" for i in range(NUM_CATEGORIES))
FORMAT: dict[str, Any] = {
  "delimiter": "\t",
  "names": ("label", *INTEGERS, *CATEGORIES),
  "quote": "",
}
_DAYS = 24
_CHUNK = 512  # rows whose intermediate values stay in the inner caches: four times as fast
_HALF = np.uint64(32)
_HINT = (
  "The days are not downloaded because their licence has to be accepted: get Criteo's 1 TB Click "
  "Logs from Criteo's page and pass --config.data_dir=<folder of day_0 to day_23>, plain or .gz."
)


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  folder = files.data_folder(config.data_dir, _HINT)
  days = [files.require(folder, f"day_{i}", f"day_{i}.gz", hint=_HINT) for i in range(_DAYS)]
  return {
    "format": 1,
    "files": [files.stamp(path) for path in days],
    "features": features(config),
  }


def features(config) -> list[dict[str, Any]]:
  """Returns the 26 features, which are the config's alone and need no data.

  Raises:
    ValueError: the config does not name 26 sizes and valencies.
  """
  sizes, valencies = config.vocabulary_sizes, config.valencies
  if not len(sizes) == len(valencies) == NUM_CATEGORIES:
    raise UserError(
      f"vocabulary_sizes and valencies must have {NUM_CATEGORIES} entries each, found "
      f"{len(sizes)} and {len(valencies)}"
    )
  return [
    {"name": f"c{i + 1:02d}", "vocabulary_size": size, "valency": valency, "combiner": "sum"}
    for i, (size, valency) in enumerate(zip(sizes, valencies, strict=True))
  ]


def describe(config) -> Prepared:
  """Returns the columns without rows, and the features: all that a model has to know."""
  columns: dict[str, np.ndarray] = {
    "label": np.zeros(0, np.uint8),
    "dense": np.zeros((0, NUM_INTEGERS), np.float32),
    "ids": np.zeros((0, NUM_CATEGORIES), np.int32),
  }
  return view(Prepared(columns, {"splits": {}, "features": features(config), "sha256": {}}))


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns, of which `ids` are the 26 single ids.

  Raises:
    DamagedFileError: as `read`, or a file has another number of rows than were counted.
  """
  paths = [Path(stamp[0]) for stamp in settings["files"]]
  days = _survey(paths, folder)
  sizes = np.array([feature["vocabulary_size"] for feature in settings["features"]])
  total = sum(day["rows"] for day in days)
  label = cache.column(folder, "label", (total,), np.uint8)
  dense = cache.column(folder, "dense", (total, NUM_INTEGERS), np.float32)
  ids = cache.column(folder, "ids", (total, NUM_CATEGORIES), np.int32)
  position = folder / "position.json"  # days that are written, for a start after a kill
  done = files.read_json(position)["files"] if position.exists() else 0
  at = sum(day["rows"] for day in days[:done])
  with files.progress("preparing", total, "row") as bar, source.connect() as con:
    bar.update(at)
    for number, (path, day) in enumerate(zip(paths[done:], days[done:], strict=True), done + 1):
      bar.set_description(f"preparing {path.name}")
      end = at + day["rows"]
      for block in read(path, con):
        part = slice(at, at + len(block.label))
        if part.stop > end:
          break
        label[part], dense[part] = block.label, np.nan_to_num(logarithm(block.integers))
        ids[part], at = np.maximum(block.categories, 0) % sizes, part.stop
        bar.update(len(block.label))
      if at != end:
        raise DamagedFileError(f"{path} has empty lines, or has changed. Get it again.")
      for column in (label, dense, ids):
        column.flush()
      files.write_json(position, {"files": number})
  last = days[-1]["rows"]
  train, valid = total - last, total - last // 2  # the odd row validates, as in MLPerf
  return {
    "splits": {"train": (0, train), "valid": (train, valid), "test": (valid, total)},
    "features": settings["features"],
    "sha256": {path.name: day["sha256"] for path, day in zip(paths, days, strict=True)},
  }


def _survey(paths: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
  """Returns rows and hash of every file, saved file by file: reading them all takes hours."""
  saved = folder / "days.json"
  days = files.read_json(saved) if saved.exists() else []
  with files.progress("counting rows", len(paths), "file") as bar:
    bar.update(len(days))
    for path in paths[len(days) :]:
      days.append({"rows": count_rows(path), "sha256": files.digest(path)})
      files.write_json(saved, days)
      bar.update()
  return days


class Rows(NamedTuple):
  """A block of rows: `label` uint8 `[N]`, `integers` float32 `[N, 13]`, nan where blank, and
  `categories` int64 `[N, 26]`, -1 where blank."""

  label: np.ndarray
  integers: np.ndarray
  categories: np.ndarray


def count_rows(path: Path) -> int:
  """Returns the number of lines, a last one without its newline included."""
  lines, last = 0, b"\n"
  with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
    while block := file.read(1 << 24):
      lines, last = lines + block.count(b"\n"), block[-1:]
  return lines + (last != b"\n")


def read(path: Path, con: Any) -> Iterator[Rows]:
  """Yields the rows of a file in blocks.

  Raises:
    DamagedFileError: a row is truncated or a field is not what it should be; names file and row.
  """
  format, row = Format(**FORMAT), 0
  source.check_whole(str(path))
  file = source.open_file(con, str(path), format)
  texts = [file.column(name).raw for name in format.names]
  first = 1 + NUM_INTEGERS
  values = [f"TRY_CAST({text} AS BIGINT)" for text in texts[:first]]
  values += [f"TRY_CAST('0x' || {text} AS UINTEGER)" for text in texts[first:]]
  good = ["x0 BETWEEN 0 AND 1"]
  good += [f"CAST(x{i} AS VARCHAR) = {text}" for i, text in enumerate(texts[1:first], 1)]
  good += [
    f"x{i} IS NOT NULL AND NOT contains({text}, '_')" for i, text in enumerate(texts[first:], first)
  ]
  absent = ["false", *(f"{text} IS NULL" for text in texts[1:])]
  cases = zip(good, absent, strict=True)
  bad = " ".join(f"WHEN NOT coalesce({g} OR {a}, false) THEN {i}" for i, (g, a) in enumerate(cases))
  typed = ", ".join(f"{value} AS x{i}" for i, value in enumerate(values))
  columns = ["x0::UTINYINT", *(f"x{i}::FLOAT" for i in range(1, first))]
  columns += [f"coalesce(x{i}::BIGINT, -1)" for i in range(first, len(texts))]
  shown = " ".join(f"WHEN {i} THEN {text}" for i, text in enumerate(texts))
  query = (
    f"SELECT {', '.join(columns)}, bad, CASE bad {shown} END FROM "
    f"(SELECT *, CASE {bad} END AS bad FROM (SELECT *, {typed} FROM {file.relation}))"
  )
  for batch in con.execute(query).to_arrow_reader(1 << 16):
    *arrays, found, text = batch.columns
    if len(found) > found.null_count:
      index = found.is_valid().index(True).as_py()
      place = found[index].as_py()
      kinds = ["0 or 1", *["an integer"] * NUM_INTEGERS, *["up to 8 hexadecimal digits"] * 26]
      raise DamagedFileError(
        f"{path}, row {row + index + 1}, column {format.names[place]!r} is "
        f"{text[index].as_py()!r}, expected {kinds[place]}. Is the file complete and unpacked? "
        "Repair or remove the row."
      )
    label, *numbers = (array.to_numpy(zero_copy_only=False) for array in arrays)
    integers, ids = numbers[:NUM_INTEGERS], numbers[NUM_INTEGERS:]
    yield Rows(label, np.stack(integers, axis=1), np.stack(ids, axis=1))
    row += len(batch)
  source.rejected(con, file, format, "raise")


def splitmix64(x: np.ndarray) -> np.ndarray:
  """Mixes the bits of uint64s: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
  generators", the mixing function."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def view(prepared: Prepared) -> Prepared:
  """Returns the data set with `ids` as bags, which are made when rows are read."""
  columns = BagColumns(prepared.columns, prepared.meta["features"])
  return dataclasses.replace(prepared, columns=columns)


class BagColumns(Mapping[str, Any]):
  """The stored columns, of which `ids` are seen as `Bags`."""

  def __init__(self, columns: Mapping[str, np.ndarray], features: Sequence[Mapping[str, Any]]):
    self._columns = columns
    self._sizes = [feature["vocabulary_size"] for feature in features]
    self._valencies = [feature["valency"] for feature in features]

  def __getitem__(self, name: str) -> Any:
    column = self._columns[name]
    return Bags(column, self._sizes, self._valencies) if name == "ids" else column

  def __iter__(self) -> Iterator[str]:
    return iter(self._columns)

  def __len__(self) -> int:
    return len(self._columns)


class Bags:
  """Single ids `[N, 26]` seen as bags, int32 `[N, sum(valencies)]`; indexing makes them."""

  def __init__(self, ids: np.ndarray, sizes: Sequence[int], valencies: Sequence[int]):
    self._ids, self._sizes, self._valencies = ids, sizes, valencies
    self.shape, self.dtype = (len(ids), sum(valencies)), np.dtype(np.int32)

  def __len__(self) -> int:
    return len(self._ids)

  def __getitem__(self, rows: Any) -> np.ndarray:
    ids = self._ids[rows]
    bags = np.empty((len(ids), self.shape[1]), np.int32)
    for start in range(0, len(ids), _CHUNK):
      self._make(ids[start : start + _CHUNK], bags[start : start + _CHUNK])
    return bags

  def _make(self, ids: np.ndarray, bags: np.ndarray) -> None:
    column = 0
    for feature, (size, valency) in enumerate(zip(self._sizes, self._valencies, strict=True)):
      bags[:, column] = ids[:, feature]
      drawn = (np.arange(1, valency, dtype=np.uint64) << np.uint64(40)) + np.uint64(feature << 32)
      mixed = splitmix64(ids[:, feature, None].astype(np.uint64) + drawn)
      bags[:, column + 1 : column + valency] = (mixed >> _HALF) * np.uint64(size) >> _HALF
      column += valency
