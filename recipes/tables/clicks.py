"""A table as clicks: labels, numbers and ids, in the columns that the dlrm recipe trains on."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import arrays, files
from ..errors import UserError
from . import entities, histories, spec
from .encoding import Encoder
from .fitting import fit
from .rows import RowReader, split_file
from .settings import SPLITS, Table, parsed, serve_folder
from .source import Stage
from .store import Store

_SIDES = {"user": spec.User, "item": spec.Item}


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
    self._reader, self._store = RowReader(table, by, stage=stage), store_of(table, stage)
    declared = histories.declared(table)
    self.log = histories.Rows(table, declared) if declared else None

  def read(self) -> tuple[Store, list[str]]:
    """Copies all rows, and writes their splits; returns them, and what was left out in lines."""
    copy_rows(self._table, self._reader, self._store, self._folder, self.log)
    if self.log is not None:
      self.log.has_dates = bool(self._reader.account.has_dates)
    return self._store, self._reader.notes

  def write(self, encoder: Encoder, serve: Path, sizes: np.ndarray) -> dict[str, Any]:
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
    write_columns(self._store, self._table.name_of(spec.Weight), encoder, self._folder, sizes)
    about: dict[str, Any] = {}
    if self.log is not None:
      about["histories"] = self.log.write(self._folder, encoder.histories, encoder.places)
    return about | {"sha256": {name: digest.result() for name, digest in hashed.items()}}


def build(
  settings: dict[str, Any],
  folder: Path,
  engine: Callable[[Table, str, Path, Stage], Any] = OneMachine,
) -> dict[str, Any]:
  """Writes `label`, `dense`, `ids` and, where one is declared, `weight`; returns the meta.

  The table is read once, and a copy of the rows is kept until vocabularies and means are known.

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
  if not any(map(spec.has_table, table.kinds.values())):
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
    serve = serve_folder(settings, folder)
    store, left_out = rows.read()
    sides, columns = {side: _id_name(table, side) for side in table.sides}, store.columns
    counts = _counted(table, store, left_out)
    made, about = {}, list[str]()
    for side, name in sides.items():
      ids = store.query(
        f"SELECT {columns[name]} AS id FROM {store.scan} WHERE split = 0 "
        f"AND {columns[name]} IS NOT NULL GROUP BY {columns[name]} ORDER BY min(file_row_number)"
      )["id"].combine_chunks()
      known = base.sides[name].fitted if base and name in base.sides else None
      source = table.sides[side]
      made[name], lines = entities.read(source, side, table.on_bad_row, ids, stage, base=known)
      about += lines
    fitted, lines = fit(store, table.kinds, base.fitted if base else None)
    of_rows: list[histories.History] = []
    if histories.declared(table):
      widths = {history.name: history.width for history in base.histories} if base else {}
      of_rows, more = rows.log.ordered(fitted.same, widths)
      lines += more
    encoder = Encoder(fitted, made, of_rows)
    weight = table.name_of(spec.Weight)
    weighs = f"column {weight!r} says how much a row counts, in the loss and in all metrics"
    notes = [*about, *left_out, *lines, *[weighs] * bool(weight), *_about(counts, encoder)]
    sizes = counts.sum(axis=1)
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
    "vectors": encoder.vectors,
    "notes": notes,
    **written,
  }


def store_of(table: Table, stage: Stage, path: Path | None = None) -> Store:
  """Returns a store of the columns that are learned from, with `split` and `label`."""
  kept = {n: k for n, k in table.kinds.items() if isinstance(k, spec.Side | spec.Weight)}
  return Store(stage, kept, {"split": pa.int8(), "label": pa.uint8()}, path)


def copy_rows(
  table: Table,
  reader: RowReader,
  store: Store,
  folder: Path,
  log: histories.Rows | None = None,
) -> None:
  """Copies all rows to a store, and writes their splits to a folder; adds them to a log."""
  with split_file(folder, table.names) as write_split, store.writer() as write:
    for chunk, split, label in reader:
      write_split(chunk.file, chunk.rows, split)
      write(chunk.columns, split=split, label=label)
      if log is not None:
        log.add(chunk.columns, split)


def _counted(table: Table, store: Store, left_out: Sequence[str]) -> np.ndarray:
  """Returns the rows by split and label, int64 `[3, 2]`.

  Raises:
    UserError: a split has no rows, or one outcome alone, or no weight on one; says what was left
      out.
  """
  name = table.name_of(spec.Weight)
  weight = f"sum({store.columns[name]})" if name else "1.0"
  counts, weights = np.zeros((3, 2), np.int64), np.zeros((3, 2))
  query = f"SELECT split, label, count(*), {weight} FROM {store.scan} GROUP BY ALL"
  answer = store.query(query)
  for split, label, rows, total in zip(*(x.to_pylist() for x in answer.columns), strict=True):
    counts[split, label], weights[split, label] = rows, total
  also = "".join(f"; {line}" for line in left_out)
  for split, (misses, clicks), outcomes in zip(SPLITS, counts.tolist(), weights, strict=True):
    size = misses + clicks
    if not size and (split == "train" or table.split[split]):
      raise UserError(f"the {split} split has no rows: see config.split{also}")
    if size and not (misses and clicks):
      raise UserError(
        f"{clicks} of the {size} rows of the {split} split are clicks, and both outcomes "
        f"are needed: see config.split and the label's positive or at_least{also}"
      )
    if size and not outcomes.all():
      which = "rows without a click" if outcomes[1] else "clicks" if outcomes[0] else "rows"
      raise UserError(
        f"all {which} of the {split} split have weight 0 in column {name!r}, and both outcomes are "
        "needed: see config.split, or do not declare the weight"
      )
  return counts


def write_columns(
  store: Store, weight: str | None, encoder: Encoder, folder: Path, sizes: np.ndarray
) -> None:
  """Writes the columns of stored rows, those of a split together; `sizes` are rows by split."""
  total, width = int(sizes.sum()), sum(feature.columns for feature in encoder.own_features)
  columns = {
    "label": arrays.column(folder, "label", (total,), np.uint8),
    "dense": arrays.column(folder, "dense", (total, len(encoder.dense_names)), np.float32),
    "ids": arrays.column(folder, "ids", (total, width), np.int32),
  }
  if weight:
    columns["weight"] = arrays.column(folder, "weight", (total,), np.float32)
  at = np.cumsum(sizes) - sizes
  for values, of_row in store:
    label = of_row["label"]
    blocks = {"label": label, **encoder.encode(values, len(label))}
    if weight:
      blocks["weight"] = values[weight]
    for split in range(3):
      chosen = of_row["split"] == split
      count = int(chosen.sum())
      for name, block in blocks.items():
        columns[name][at[split] : at[split] + count] = block[chosen]
      at[split] += count


def _check_names(table: Table) -> None:
  """Raises UserError where a name is declared twice, or an item column holds several items."""
  declared = set(table.kinds)
  for side, source in table.sides.items():
    _id_name(table, side)
    if both := [name for name in source.kinds if name in declared]:
      raise UserError(f"{both[0]!r} is declared twice, also in config.{side}_table: keep one")
    declared |= set(source.kinds)
  for name, kind in table.kinds.items():
    if isinstance(kind, spec.Codes):
      table.require(_SIDES[kind.side], f"whose codes {name!r} holds")
  of_sides = {f"config.{side}_table": source.kinds for side, source in table.sides.items()}
  spec.check_between({"config": table.kinds} | of_sides)
  item = table.name_of(spec.Item)
  if item and table.kinds[item].read_as != "text":
    raise UserError(f"column {item!r} holds several items, and dlrm takes one a row: make it a bag")


def _id_name(table: Table, side: str) -> str:
  """Returns the name of the column with the ids of a table of its own; raises UserError if none."""
  return table.require(_SIDES[side], f"which config.{side}_table belongs to")


def _about(counts: np.ndarray, encoder: Encoder) -> list[str]:
  parts = [
    f"{misses + clicks:,} {name} rows ({clicks / max(misses + clicks, 1):.1%} clicks)"
    for name, (misses, clicks) in zip(SPLITS, counts.tolist(), strict=True)
  ]
  rows = {feature.table or feature.name: feature.vocabulary_size for feature in encoder.features}
  sizes = ", ".join(f"{name} {size:,}" for name, size in rows.items())
  features = f"{len(encoder.dense_names)} numbers, {len(encoder.features)} features with vectors"
  return [", ".join(parts), f"{features}; rows of their tables: {sizes}"]
