"""A table as clicks: labels, numbers and ids, in the columns that the dlrm recipe trains on."""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import cache
from ..errors import UserError
from . import histories, source, spec
from .fit import fit
from .settings import Table, parsed, serve_folder
from .source import Rows
from .splitting import write_splits
from .transforms import Encoder, numbers_of
from .values import SPLITS


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes `label`, `dense`, `ids` and, where one is declared, `weight`; returns the meta.

  `label` is uint8 `[N]` of one label, else float32 `[N, labels]`, NaN where a label has no value.

  Raises:
    UserError: nothing to predict or to learn from is declared, or a split is empty.
    DamagedFileError: a row cannot be read; names file, row and column.
  """
  table = parsed(settings)
  by, declared = check(table), histories.declared(table)
  with (
    source.connect() as con,
    futures.ThreadPoolExecutor(1) as background,
    tempfile.TemporaryDirectory(dir=folder) as stage,
  ):
    digests = background.submit(table.digests)
    rows = source.read(con, table.rows, Path(stage), table.on_bad_row, **hashing(table, by))
    rows.split(by, table.split)
    write_splits(rows, folder, table.names)
    base = base_of(table)
    encoder, notes, sizes = fitted(table, rows, base)
    log = None
    if declared:
      widths = {each.name: each.width for each in base.histories} if base else {}
      log = histories.Rows(table, declared, rows, widths)
      encoder = Encoder(encoder.transforms, log.histories)
      notes += log.notes
    notes.append(summary(encoder))
    encoder.save(serve_folder(settings, folder))
    write_columns(rows, table, encoder, folder, sizes)
    about: dict[str, Any] = {"sha256": digests.result()}
    if log is not None:
      about["histories"] = log.write(folder, encoder.own_features)
  table.check_unchanged()
  return meta(table, encoder, notes, sizes) | about


def check(table: Table) -> str:
  """Returns how the rows are split; raises UserError for declarations that clicks cannot have."""
  table.require(spec.Label, "and clicks need one")
  if not any(map(spec.has_table, table.kinds.values())):
    raise UserError(
      "no column is a category, a user, an item or a number with buckets: declare at least one"
    )
  item = table.name_of(spec.Item)
  if item and table.kinds[item].is_list:
    raise UserError(f"column {item!r} holds several items, and dlrm takes one a row: make it a bag")
  by = table.split_by(timed="time", untimed="hash")
  if by in ("last", "user"):
    raise UserError(
      f"config.split.by is {by!r}, a protocol of rankings: choose hash, time or column"
    )
  return by


def hashing(table: Table, by: str) -> dict[str, Any]:
  """Returns `seed` and `on` of `source.read`."""
  seed = table.split["seed"] if by in ("hash", "files") else None
  return {"seed": seed, "on": table.split["on"] if seed is not None else ""}


def base_of(table: Table) -> Encoder | None:
  """Returns the encoder that grows; a run of another recipe has none."""
  has_base = table.base is not None and (table.base / "encoder.json").exists()
  return Encoder.load(table.base) if table.base is not None and has_base else None


def fitted(table: Table, rows: Rows, base: Encoder | None) -> tuple[Encoder, list[str], np.ndarray]:
  """Returns the encoder of split rows, lines about them, and their number by split, `[3]`.

  `base` is an encoder that grows.
  """
  sizes, rates = _counted(table, rows)
  transforms, lines = fit(rows, table.kinds, base.transforms if base else None)
  weight = table.name_of(spec.Weight)
  weighs = f"column {weight!r} says how much a row counts, in the loss and in all metrics"
  notes = [*rows.notes, *lines, *[weighs] * bool(weight), *rates]
  return Encoder(transforms), notes, sizes


def meta(table: Table, encoder: Encoder, notes: Sequence[str], sizes: np.ndarray) -> dict[str, Any]:
  """Returns what `cache.prepared` keeps beside the columns."""
  ends = np.cumsum(sizes).tolist()
  splits = {name: (end - int(n), end) for name, end, n in zip(SPLITS, ends, sizes, strict=True)}
  if table.refit:
    end = splits["valid"][1]
    splits |= {"train": (0, end), "valid": (end, end)}
  return {
    "splits": splits,
    "features": [dataclasses.asdict(feature) for feature in encoder.features],
    "dense": list(encoder.transforms.dense_names),
    "vectors": encoder.transforms.vectors,
    "labels": spec.as_dicts(table.labels),
    "notes": list(notes),
  }


def _counted(table: Table, rows: Rows) -> tuple[np.ndarray, list[str]]:
  """Returns the rows by split, int64 `[3]`, and a line about those of each label."""
  also = "".join(f"; {line}" for line in rows.notes)
  sizes, lines = np.zeros(3, np.int64), []
  for label in table.labels:
    counts, weights = _outcomes(table, rows, label)
    sizes, of_label = counts.sum(axis=1), f" of {label!r}" * (len(table.labels) > 1)
    parts = []
    for split, (misses, clicks, none), totals in zip(SPLITS, counts.tolist(), weights, strict=True):
      known = misses + clicks
      parts.append(f"{known:,} {split} rows{of_label} ({clicks / max(known, 1):.1%} clicks)")
      if not known + none and (split == "train" or table.split[split]):
        raise UserError(f"the {split} split has no rows: see config.split{also}")
      if known + none and not totals[:2].all():
        raise UserError(
          f"{clicks} of the {known} rows{of_label} of the {split} split are clicks, and both "
          "outcomes are needed, with weights above 0: see config.split and the label's positive "
          f"or at_least{also}"
        )
    lines.append(", ".join(parts))
  return sizes, lines


def _outcomes(table: Table, rows: Rows, label: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns by split the rows without and with a click and without a label, `[3, 3]`; weights."""
  name, column = table.name_of(spec.Weight), rows.columns[label]
  weight = f"sum({rows.columns[name]})" if name else "count(*)"
  answer = rows.query(
    f"SELECT split, {column} AS outcome, count(*) AS n, {weight} AS weight FROM {rows.view} "
    f"GROUP BY split, {column}"
  )
  counts, weights = np.zeros((3, 3), np.int64), np.zeros((3, 3))
  for split, value, number, total in zip(*(x.to_pylist() for x in answer.columns), strict=True):
    at = split, 2 if value is None else value
    counts[at], weights[at] = number, total
  return counts, weights


def write_columns(
  rows: Rows, table: Table, encoder: Encoder, folder: Path, sizes: np.ndarray
) -> None:
  """Writes the columns of rows, those of a split together; `sizes` are rows by split."""
  total, num_dense = int(sizes.sum()), len(encoder.transforms.dense_names)
  width = sum(feature.columns for feature in encoder.own_features)
  weight = table.name_of(spec.Weight)
  one, labels = ((), np.uint8), len(table.labels)
  shape, dtype = one if labels == 1 else ((labels,), np.float32)
  columns = {
    "label": cache.column(folder, "label", (total, *shape), dtype),
    "dense": cache.column(folder, "dense", (total, num_dense), np.float32),
    "ids": cache.column(folder, "ids", (total, width), np.int32),
  }
  if weight:
    columns["weight"] = cache.column(folder, "weight", (total,), np.float32)
  ends = np.cumsum(sizes) - sizes
  for values, _, split in rows.batches():
    blocks = {"label": labels_of(table, values), **encoder.encode(values, len(split))}
    if weight:
      blocks["weight"] = numbers_of(values[weight])
    for part in range(3):
      chosen = np.flatnonzero(split == part)
      for name, block in blocks.items():
        columns[name][ends[part] : ends[part] + len(chosen)] = block[chosen]
      ends[part] += len(chosen)


def labels_of(table: Table, values: Mapping[str, pa.Array]) -> np.ndarray:
  """Returns the label of rows; see `build`."""
  columns = [numbers_of(values[name]) for name in table.labels]
  if len(columns) == 1:
    return columns[0].astype(np.uint8)
  return np.stack(columns, axis=1).astype(np.float32)


def encoded(table: Table, rows: Rows, encoder: Encoder) -> Iterator[dict[str, np.ndarray]]:
  """Yields `dense` and `ids` of each batch of rows, with histories that are built of all rows."""
  batches = (encoder.encode(values, len(place)) for values, place, _ in rows.batches())
  if not encoder.histories:
    yield from batches
    return
  held, start = [*batches], 0
  log = histories.Rows(table, encoder.histories, rows, {})
  logs = [*log.logs(encoder.own_features, np.concatenate([batch["ids"] for batch in held]))]
  for batch in held:
    part = slice(start, start := start + len(batch["ids"]))
    ids = [batch["ids"], *(each.positions(part) for each in logs)]
    yield batch | {"ids": np.concatenate(ids, axis=1)}


def summary(encoder: Encoder) -> str:
  """Returns a line about the features, and the rows of their tables."""
  rows = {feature.table or feature.name: feature.vocabulary_size for feature in encoder.features}
  sizes = ", ".join(f"{name} {size:,}" for name, size in rows.items())
  features = (
    f"{len(encoder.transforms.dense_names)} numbers, {len(encoder.features)} features with vectors"
  )
  return f"{features}; rows of their tables: {sizes}"
