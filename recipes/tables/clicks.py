"""A table as clicks: labels, numbers and ids, in the columns that the dlrm recipe trains on."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import cache, files
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
  """Reads the rows of a table in this process, and writes their columns."""

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
    """Writes the columns; returns the hashes of the files, for the meta."""
    hashed = {  # while ids are written; one task a file, since an error cancels those to come
      name: self._stage.background.submit(files.digest, path)
      for path, name in self._table.names.items()
    }
    write_columns(self._store, self._table, encoder, self._folder, sizes)
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

  `label` is uint8 `[N]` of one label of clicks, else float32 `[N, labels]`: see `rows.RowReader`.
  The table is read once, and a copy of the rows is kept until vocabularies and means are known.

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
    sizes, rates = _counted(table, store, left_out)
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
    notes = [*about, *left_out, *lines, *[weighs] * bool(weight), *rates, _about(encoder)]
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
    "labels": spec.as_dicts(table.labels),
    "notes": notes,
    **written,
  }


def store_of(table: Table, stage: Stage, path: Path | None = None) -> Store:
  """Returns a store of the columns that are learned from, with `split` and `label`."""
  kept = {n: k for n, k in table.kinds.items() if isinstance(k, spec.Side | spec.Weight)}
  of_labels = dict.fromkeys(
    label_columns(table), pa.uint8() if table.is_one_click else pa.float32()
  )
  return Store(stage, kept, {"split": pa.int8()} | of_labels, path)


def label_columns(table: Table) -> list[str]:
  """Returns the names of the labels' columns in a store."""
  return (
    ["label"] if table.is_one_click else [f"label{place}" for place in range(len(table.labels))]
  )


def copy_rows(
  table: Table,
  reader: RowReader,
  store: Store,
  folder: Path,
  log: histories.Rows | None = None,
) -> None:
  """Copies all rows to a store, and writes their splits to a folder; adds them to a log."""
  names = label_columns(table)
  with split_file(folder, table.names) as write_split, store.writer() as write:
    for chunk, split, label in reader:
      assert label is not None  # `build` has asked for one
      write_split(chunk.file, chunk.rows, split)
      of_labels = zip(names, label.T.reshape(len(names), -1), strict=True)
      write(chunk.columns, split=split, **dict(of_labels))
      if log is not None:
        log.add(chunk.columns, split)


def _counted(table: Table, store: Store, left_out: Sequence[str]) -> tuple[np.ndarray, list[str]]:
  """Returns the rows by split, int64 `[3]`, and a line about those of each label."""
  also = "".join(f"; {line}" for line in left_out)
  sizes, lines = np.zeros(3, np.int64), []
  for column, (label, kind) in zip(label_columns(table), table.labels.items(), strict=True):
    counts, weights = _outcomes(table, store, column, kind)
    sizes, of_label = counts.sum(axis=1), "" if table.is_one_click else f" of {label!r}"
    parts = []
    for split, (misses, clicks, none), outcomes in zip(
      SPLITS, counts.tolist(), weights, strict=True
    ):
      rows, is_click = misses + clicks, kind.loss == "binary"
      parts.append(f"{rows:,} {split} rows{of_label}")
      parts[-1] += f" ({clicks / max(rows, 1):.1%} clicks)" * is_click
      if not rows + none and (split == "train" or table.split[split]):
        raise UserError(f"the {split} split has no rows: see config.split{also}")
      if not rows + none or (not is_click and outcomes.any()):
        continue
      if not is_click:
        raise UserError(f"no row{of_label} of the {split} split counts: see config.split{also}")
      if not (misses and clicks):
        raise UserError(
          f"{clicks} of the {rows} rows{of_label} of the {split} split are clicks, and both "
          f"outcomes are needed: see config.split and the label's positive or at_least{also}"
        )
      if not outcomes.all():
        which = "rows without a click" if outcomes[1] else "clicks" if outcomes[0] else "rows"
        name = table.name_of(spec.Weight)
        raise UserError(
          f"all {which}{of_label} of the {split} split have weight 0 in column {name!r}, and both "
          "outcomes are needed: see config.split, or do not declare the weight"
        )
    lines.append(", ".join(parts))
  return sizes, lines


def _outcomes(
  table: Table, store: Store, column: str, kind: spec.Label
) -> tuple[np.ndarray, np.ndarray]:
  """Returns by split the rows of outcomes 0 and 1 and without a label, `[3, 3]`; weights `[3, 2]`.

  What is no click is an outcome 0.
  """
  name = table.name_of(spec.Weight)
  weight = f"sum({store.columns[name]})" if name else "1.0"
  outcome = column if kind.loss == "binary" else f"0 * {column}"
  answer = store.query(
    f"SELECT split, CAST({outcome} AS INTEGER) AS label, count(*), {weight} FROM {store.scan} "
    "GROUP BY ALL"
  )
  counts, weights = np.zeros((3, 3), np.int64), np.zeros((3, 3))
  for split, label, rows, total in zip(*(x.to_pylist() for x in answer.columns), strict=True):
    at = split, 2 if label is None else label
    counts[at], weights[at] = rows, total
  return counts, weights[:, :2]


def write_columns(
  store: Store, table: Table, encoder: Encoder, folder: Path, sizes: np.ndarray
) -> None:
  """Writes the columns of stored rows, those of a split together; `sizes` are rows by split."""
  total, width = int(sizes.sum()), sum(feature.columns for feature in encoder.own_features)
  labels, weight = label_columns(table), table.name_of(spec.Weight)
  shape, dtype = ((), np.uint8) if table.is_one_click else ((len(labels),), np.float32)
  columns = {
    "label": cache.column(folder, "label", (total, *shape), dtype),
    "dense": cache.column(folder, "dense", (total, len(encoder.dense_names)), np.float32),
    "ids": cache.column(folder, "ids", (total, width), np.int32),
  }
  if weight:
    columns["weight"] = cache.column(folder, "weight", (total,), np.float32)
  at = np.cumsum(sizes) - sizes
  for values, of_row in store:
    rows = len(of_row["split"])
    label = np.stack([of_row[name] for name in labels], axis=1).reshape(rows, *shape)
    blocks = {"label": label, **encoder.encode(values, rows)}
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
  of_sides = {f"config.{side}_table": source.kinds for side, source in table.sides.items()}
  spec.check_between({"config": table.kinds} | of_sides)
  item = table.name_of(spec.Item)
  if item and table.kinds[item].read_as != "text":
    raise UserError(f"column {item!r} holds several items, and dlrm takes one a row: make it a bag")


def _id_name(table: Table, side: str) -> str:
  """Returns the name of the column with the ids of a table of its own; raises UserError if none."""
  return table.require(_SIDES[side], f"which config.{side}_table belongs to")


def _about(encoder: Encoder) -> str:
  rows = {feature.table or feature.name: feature.vocabulary_size for feature in encoder.features}
  sizes = ", ".join(f"{name} {size:,}" for name, size in rows.items())
  features = f"{len(encoder.dense_names)} numbers, {len(encoder.features)} features with vectors"
  return f"{features}; rows of their tables: {sizes}"
