"""A table as clicks: labels, numbers and ids, in the columns that the dlrm recipe trains on."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import arrays, files
from ..errors import UserError
from . import entities, sharing, spec
from .entities import Codes, Entities
from .fitting import Fit, Fitted
from .rows import RowReader, Rows, split_file, way
from .settings import SPLITS, Table, parsed, serve_folder
from .source import Stage
from .values import ReadAs

_SIDES = {"user": spec.User, "item": spec.Item}


@dataclasses.dataclass
class Counted:
  """Counts of rows.

  Attributes:
    rows: by split and label, int64 `[3, 2]`.
    weights: sums of the weights, float64 `[3, 2]`; zeros where none is declared.
    ids: of users and items of the training rows, whose features are in another table.
  """

  rows: np.ndarray
  weights: np.ndarray
  ids: dict[str, Codes]


class OneMachine:
  """Reads the rows of a table in this process, and writes their columns.

  Args:
    table: the settings.
    by: how rows are split; see `RowReader`.
    folder: of the columns.
    stage: with a folder for copies.
  """

  def __init__(self, table: Table, by: str, folder: Path, stage: Stage):
    self._table, self._folder, self._stage = table, folder, stage
    self._reader = RowReader(table, by, stage=stage)
    self._copy = Copy(stage.folder / "rows.arrow", table.kinds)

  def read(self, fit: Fit) -> tuple[Counted, list[str]]:
    """Copies all rows, fits the training rows, and writes the splits.

    Returns:
      The counts, and lines about rows that were left out.
    """
    counted = count(self._table, self._reader, fit, self._folder, self._copy)
    return counted, self._reader.notes

  def write(self, encoder: "Encoder", serve: Path, sizes: np.ndarray) -> dict[str, Any]:
    """Writes the columns; returns the hashes of the files, for the meta.

    Args:
      encoder: of the rows.
      serve: the folder that it has been saved to.
      sizes: rows by split.
    """
    hashed = {  # while ids are written; one task a file, since an error cancels those to come
      name: self._stage.background.submit(files.digest, path)
      for path, name in self._table.names.items()
    }
    write(self._table, self._copy, encoder, self._folder, sizes)
    return {"sha256": {name: digest.result() for name, digest in hashed.items()}}


def build(
  settings: dict[str, Any],
  folder: Path,
  engine: Callable[[Table, str, Path, Stage], Any] = OneMachine,
) -> dict[str, Any]:
  """Writes `label`, `dense`, `ids` and, where one is declared, `weight`; returns the meta.

  The table is read once, to fit the transforms on the training rows; a copy is then transformed.

  Args:
    settings: of the table.
    folder: of the columns.
    engine: `OneMachine`, or another class with its methods.

  Raises:
    UserError: nothing to predict or to learn from is declared, or a split is empty.
    DamagedFileError: a row cannot be read; names file, row and column.
  """
  table = parsed(settings)
  table.require(spec.Label, "and clicks need one")
  if not any(map(sharing.has_table, table.kinds.values())):
    raise UserError(
      "no column is a category, a user, an item or a number with buckets: declare at least one"
    )
  _check_names(table)
  by = table.split_by(timed="time", untimed="hash")
  if by in ("last", "user"):
    raise UserError(
      f"config.split.by is {by!r}, a protocol of rankings: choose hash, time, column or files"
    )
  with Stage(folder / "stage") as stage:
    rows = engine(table, by, folder, stage)
    # A run of another recipe has none of these transforms.
    has_base = table.base is not None and (table.base / "sides.json").exists()
    base = Encoder.load(table.base) if table.base is not None and has_base else None
    fit = Fit(table.kinds, base.fitted if base else None, stage)
    serve = serve_folder(settings, folder)
    counted, notes = rows.read(fit)
    counts, sizes = counted.rows, counted.rows.sum(axis=1)
    _check_sizes(counts, [name for name in SPLITS[1:] if not table.split[name]], notes)
    if weight_name := table.name_of(spec.Weight):
      _check_weights(weight_name, counted.weights, counts)
    sides, about = _sides(table, counted.ids, base, stage)
    encoder = Encoder(fit.finish(), sides)
    notes = [*about, *notes, *fit.notes]
    if weight_name:
      notes.append(
        f"column {weight_name!r} says how much a row counts, in the loss and in all metrics"
      )
    notes += _about(counts, encoder)
    encoder.save(serve)
    written = rows.write(encoder, serve, sizes)
  table.check_unchanged()
  ends = np.cumsum(sizes).tolist()
  splits = {name: (end - int(n), end) for name, end, n in zip(SPLITS, ends, sizes, strict=True)}
  if table.refit:
    end = splits["valid"][1]
    splits |= {"train": (0, end), "valid": (end, end)}
  return {
    "splits": splits,
    "features": [dataclasses.asdict(feature) for feature in encoder.features],
    "dense": list(encoder.dense_names),
    "notes": notes,
    **written,
  }


def count(table: Table, reader: RowReader, fit: Fit, folder: Path, copy: "Copy") -> Counted:
  """Copies and counts all rows, fits the training rows, and writes the splits to a folder."""
  weight = table.name_of(spec.Weight)
  ids = {side: Codes() for side in table.sides}
  id_names = {side: _id_name(table, side) for side in table.sides}
  counts, weights = np.zeros((3, 2), np.int64), np.zeros((3, 2))
  with split_file(folder, table.names) as write_split, copy.writer() as write_copy:
    for rows in reader:
      columns, cell = rows.chunk.columns, 2 * rows.split + rows.label
      counts += np.bincount(cell, minlength=6).reshape(3, 2)
      if weight:
        weights += np.bincount(cell, columns[weight], minlength=6).reshape(3, 2)
      write_split(rows.chunk.file, rows.chunk.rows, rows.split)
      write_copy(rows)
      training = rows.chunk.take(rows.split == 0)
      fit.add(training.columns, len(training.rows))
      for side, codes in ids.items():
        codes.add(training.columns[id_names[side]])
  return Counted(counts, weights, ids)


class Copy:
  """The rows as they have been read, in an Arrow stream: files are parsed once.

  Args:
    path: of the stream.
    kinds: the declared columns; features and weights are copied.
  """

  def __init__(self, path: Path, kinds: Mapping[str, spec.Kind]):
    types: dict[ReadAs, pa.DataType]
    types = {"number": pa.float64(), "text": pa.dictionary(pa.int32(), pa.string())}
    self._path = path
    self._types = {
      name: types.get(way(kind), pa.list_(pa.string()))
      for name, kind in kinds.items()
      if isinstance(kind, spec.Embedded | spec.Weight) and not isinstance(kind, spec.Cross)
    }
    fields = enumerate([pa.int8(), pa.uint8(), *self._types.values()])
    self._schema = pa.schema([(str(place), each) for place, each in fields])

  @contextlib.contextmanager
  def writer(self) -> Iterator[Callable[[Rows], None]]:
    """Yields a function that writes rows."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(str(self._path), self._schema, options=options) as stream:

      def write(rows: Rows) -> None:
        columns = rows.chunk.columns
        arrays = [pa.array(rows.split), pa.array(rows.label)]
        for name, stored in self._types.items():
          is_text = pa.types.is_dictionary(stored)
          arrays.append(columns[name].dictionary_encode() if is_text else pa.array(columns[name]))
        stream.write_batch(pa.record_batch(arrays, schema=self._schema))

      yield write

  def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, Any]]]:
    """Yields split, label and values by declared name."""
    with pa.memory_map(str(self._path)) as file, pa.ipc.open_stream(file) as stream:
      for batch in stream:
        split, label, *arrays = batch.columns
        values = {
          name: array.to_numpy() if pa.types.is_floating(array.type) else array
          for name, array in zip(self._types, arrays, strict=True)
        }
        yield split.to_numpy(), label.to_numpy(), values


def write(table: Table, rows: Copy, encoder: "Encoder", folder: Path, sizes: np.ndarray) -> None:
  """Writes the columns of copied rows, those of a split together; `sizes` are rows by split."""
  total, width = int(sizes.sum()), sum(feature.valency for feature in encoder.features)
  weight = table.name_of(spec.Weight)
  columns = {
    "label": arrays.column(folder, "label", (total,), np.uint8),
    "dense": arrays.column(folder, "dense", (total, len(encoder.dense_names)), np.float32),
    "ids": arrays.column(folder, "ids", (total, width), np.int32),
  }
  if weight:
    columns["weight"] = arrays.column(folder, "weight", (total,), np.float32)
  at = np.cumsum(sizes) - sizes
  for parts, label, values in rows:
    blocks: dict[str, Any] = {"label": label, **encoder.encode(values, len(label))}
    if weight:
      blocks["weight"] = values[weight].astype(np.float32)
    for split in range(3):
      chosen = parts == split
      count = int(chosen.sum())
      for name, block in blocks.items():
        columns[name][at[split] : at[split] + count] = block[chosen]
      at[split] += count


class Encoder:
  """Turns rows into `dense` and `ids`: their own features, and those of their user and item.

  Args:
    fitted: the transforms of the rows' columns.
    sides: users and items of tables of their own by the name of the column with their ids.

  Attributes:
    fitted, sides: the same.
  """

  def __init__(self, fitted: Fitted, sides: Mapping[str, Entities]):
    self.fitted, self.sides = fitted, dict(sides)
    self._codes = {name: Codes(side.texts) for name, side in self.sides.items()}
    # The numbers of a user or item that the table of its own lacks are missing.
    self._no_numbers = {
      name: side.fitted.dense({key: np.array([np.nan]) for key in side.fitted.numbers}, 1)
      for name, side in self.sides.items()
    }

  @property
  def features(self):
    """The categorical features, in the order of their columns in `ids`."""
    return (*self.fitted.features, *(f for side in self.sides.values() for f in side.features))

  @property
  def dense_names(self) -> tuple[str, ...]:
    """The names of the columns of `dense`."""
    return tuple(name for fitted in self.all_fitted for name in fitted.dense_names)

  @property
  def all_fitted(self) -> tuple[Fitted, ...]:
    """The transforms of the rows' columns, of users and of items."""
    return (self.fitted, *(side.fitted for side in self.sides.values()))

  def encode(self, values: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
    """Returns `dense` float32 `[rows, K]` and `ids` int32 `[rows, W]`."""
    ids = [self.fitted.ids(values, feature.name) for feature in self.fitted.features]
    dense = [self.fitted.dense(values, rows)]
    for name, side in self.sides.items():
      at = self._codes[name].find(values[name])
      known = at >= 0
      for feature in side.features:
        block = side.ids[feature.name][at]
        ids.append(np.where(known if block.ndim == 1 else known[:, None], block, -1))
      dense.append(np.where(known[:, None], side.dense[at], self._no_numbers[name]))
    wide = [block[:, None] if block.ndim == 1 else block for block in ids]
    return {
      "dense": np.concatenate(dense, axis=1).astype(np.float32),
      "ids": np.concatenate(wide, axis=1).astype(np.int32),
    }

  def save(self, folder: Path) -> None:
    """Writes the transforms and the tables of users and items, for `load`."""
    self.fitted.save(folder, "columns")
    for number, side in enumerate(self.sides.values()):
      side.save(folder, f"side_{number}")
    arrays.write_json(folder / "sides.json", list(self.sides))

  @classmethod
  def load(cls, folder: Path) -> "Encoder":
    """Returns what `save` has written."""
    names = arrays.read_json(folder / "sides.json")
    sides = {name: Entities.load(folder, f"side_{n}") for n, name in enumerate(names)}
    return cls(Fitted.load(folder, "columns"), sides)


def _check_names(table: Table) -> None:
  """Raises UserError where a name is declared twice, or an item column holds several items."""
  declared = set(table.kinds)
  for side, source in table.sides.items():
    _id_name(table, side)
    for name in source.kinds:
      if name in declared:
        raise UserError(f"{name!r} is declared twice, also in config.{side}_table: keep one")
    declared |= set(source.kinds)
  sharing.check_between(
    {"config": table.kinds}
    | {f"config.{side}_table": source.kinds for side, source in table.sides.items()}
  )
  item = table.name_of(spec.Item)
  if item and way(table.kinds[item]) != "text":
    raise UserError(f"column {item!r} holds several items, and dlrm takes one a row: make it a bag")


def _id_name(table: Table, side: str) -> str:
  """Returns the name of the column with the ids of a table of its own; raises UserError if none."""
  return table.require(_SIDES[side], f"which config.{side}_table belongs to")


def _sides(
  table: Table, ids: Mapping[str, Codes], base: "Encoder | None", stage: Stage
) -> tuple[dict[str, Entities], list[str]]:
  """Returns users and items of tables of their own by column, and lines about them."""
  sides, notes = {}, []
  for side, source in table.sides.items():
    name = _id_name(table, side)
    known = base.sides[name].fitted if base and name in base.sides else None
    sides[name], about = entities.read(
      source, side, table.on_bad_row, ids[side], base=known, stage=stage
    )
    notes += about
  return sides, notes


def _check_sizes(counts: np.ndarray, may_be_empty: Sequence[str], left_out: Sequence[str]) -> None:
  """Raises UserError for a split without rows or outcomes, with lines about what was left out."""
  also = "".join(f"; {line}" for line in left_out)
  for name, (misses, count) in zip(SPLITS, counts.tolist(), strict=True):
    size = misses + count
    if not size and name in may_be_empty:
      continue
    if not size:
      raise UserError(f"the {name} split has no rows: see config.split{also}")
    if count in (0, size):
      raise UserError(
        f"{count} of the {size} rows of the {name} split are clicks, and both outcomes "
        f"are needed: see config.split and the label's positive or at_least{also}"
      )


def _check_weights(name: str, weights: np.ndarray, counts: np.ndarray) -> None:
  """Raises UserError where all rows of an outcome in a split count nothing."""
  for split, rows, (misses, clicks) in zip(SPLITS, counts, weights, strict=True):
    if rows.any() and not (misses and clicks):
      which = "clicks" if misses else "rows without a click" if clicks else "rows"
      raise UserError(
        f"all {which} of the {split} split have weight 0 in column {name!r}, and both outcomes are "
        "needed: see config.split, or do not declare the weight"
      )


def _about(counts: np.ndarray, encoder: Encoder) -> list[str]:
  notes = [
    ", ".join(
      f"{misses + clicks:,} {name} rows ({clicks / max(misses + clicks, 1):.1%} clicks)"
      for name, (misses, clicks) in zip(SPLITS, counts.tolist(), strict=True)
    )
  ]
  rows = {feature.table or feature.name: feature.vocabulary_size for feature in encoder.features}
  notes.append(
    f"{len(encoder.dense_names)} numbers, {len(encoder.features)} features with vectors; rows of "
    "their tables: " + ", ".join(f"{name} {size:,}" for name, size in rows.items())
  )
  return notes
