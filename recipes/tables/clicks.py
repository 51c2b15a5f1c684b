"""A table as clicks: a label, numbers and ids, in the columns that the dlrm recipe trains on."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from .. import cache
from ..errors import UserError
from . import source, spec
from .fit import fit
from .settings import Table, parsed, serve_folder
from .source import Rows
from .transforms import Transforms, numbers_of
from .values import SPLITS


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes `label`, `dense`, `ids` and, where one is declared, `weight`; returns the meta.

  Raises:
    UserError: nothing to predict or to learn from is declared, or a split is empty.
    DamagedFileError: a row cannot be read; names file, row and column.
  """
  table = parsed(settings)
  by = _check(table)
  with (
    source.connect() as con,
    futures.ThreadPoolExecutor(1) as background,
    tempfile.TemporaryDirectory(dir=folder) as stage,
  ):
    digests = background.submit(table.digests)
    rows = source.read(con, table.rows, Path(stage), table.on_bad_row, **hashing(table, by))
    rows.split(by, table.split)
    transforms, notes, sizes = _fitted(table, rows)
    transforms.save(serve_folder(settings, folder))
    write_columns(rows, transforms, folder, sizes)
    sha256 = digests.result()
  table.check_unchanged()
  ends = np.cumsum(sizes).tolist()
  return {
    "splits": {name: (end - int(n), end) for name, end, n in zip(SPLITS, ends, sizes, strict=True)},
    "notes": notes,
    "sha256": sha256,
    **meta_of(table.kinds, transforms),
  }


def meta_of(kinds: Mapping[str, spec.Kind], transforms: Transforms) -> dict[str, Any]:
  """Returns what the meta says of the columns: `features`, and `user` if there is one."""
  meta: dict[str, Any] = {
    "features": [dataclasses.asdict(feature) for feature in transforms.features],
  }
  if user := spec.only(kinds, spec.User):  # see `evaluation.metrics.Users`
    meta["user"] = {"feature": user, "known": len(transforms.vocabulary(user))}
  return meta


def _check(table: Table) -> str:
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


def _fitted(table: Table, rows: Rows) -> tuple[Transforms, list[str], np.ndarray]:
  """Returns the transforms of split rows, lines about them, and their number by split, `[3]`."""
  sizes, rates = _counted(table, rows)
  base = None
  if table.base is not None and (table.base / "columns.json").exists():  # not of another recipe
    base = Transforms.load(table.base)
  transforms, lines = fit(rows.con, rows.view, rows.columns, table.kinds, base)
  return transforms, [*rows.notes, *lines, *rates, _summary(transforms)], sizes


def _counted(table: Table, rows: Rows) -> tuple[np.ndarray, list[str]]:
  """Returns the rows by split, int64 `[3]`, and a line about them."""
  also = "".join(f"; {line}" for line in rows.notes)
  counts, weights = _outcomes(table, rows)
  parts = []
  for split, (misses, clicks), totals in zip(SPLITS, counts.tolist(), weights, strict=True):
    number = misses + clicks
    parts.append(f"{number:,} {split} rows ({clicks / max(number, 1):.1%} clicks)")
    if not number and (split == "train" or table.split[split]):
      raise UserError(f"the {split} split has no rows: see config.split{also}")
    if number and not totals.all():
      raise UserError(
        f"{clicks} of the {number} rows of the {split} split are clicks, and both outcomes are "
        "needed, with weights above 0: see config.split and the label's positive or at_least"
        f"{also}"
      )
  return counts.sum(axis=1), [", ".join(parts)]


def _outcomes(table: Table, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rows without and with a click by split, `[3, 2]`, and their weights."""
  name, label = table.name_of(spec.Weight), rows.columns[str(table.name_of(spec.Label))]
  weight = f"sum({rows.columns[name]})" if name else "count(*)"
  answer = rows.query(
    f"SELECT split, {label} AS clicked, count(*) AS n, {weight} AS weight FROM {rows.view} "
    "GROUP BY split, clicked"
  )
  counts, weights = np.zeros((3, 2), np.int64), np.zeros((3, 2))
  for split, clicked, *found in zip(*(x.to_pylist() for x in answer.columns), strict=True):
    counts[split, clicked], weights[split, clicked] = found
  return counts, weights


def write_columns(rows: Rows, transforms: Transforms, folder: Path, sizes: np.ndarray) -> None:
  """Writes the columns of rows, those of a split together; `sizes` are rows by split."""
  total, num_dense = int(sizes.sum()), len(transforms.dense_names)
  width = sum(feature.valency for feature in transforms.features)
  kinds = rows.source.kinds
  weight, label = spec.only(kinds, spec.Weight), str(spec.only(kinds, spec.Label))
  cache.column(folder, "label", (total,), np.uint8)
  cache.column(folder, "dense", (total, num_dense), np.float32)
  cache.column(folder, "ids", (total, width), np.int32)
  if weight:
    cache.column(folder, "weight", (total,), np.float32)
  names = [*transforms.kinds, label, *([weight] if weight else [])]

  def write(parts: Sequence[Path], split: np.ndarray, starts: np.ndarray) -> None:
    values = rows.values(parts, names)
    blocks = {"label": numbers_of(values[label]), **transforms.encode(values, len(split))}
    if weight:
      blocks["weight"] = numbers_of(values[weight])
    # Opened for each part: what is mapped counts as memory of the process.
    columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in blocks}
    for index, start in enumerate(starts):
      chosen = np.flatnonzero(split == index)
      for name, block in blocks.items():
        columns[name][start : start + len(chosen)] = block[chosen]

  parts, splits = zip(*rows.parts(), strict=True)
  counts = [np.bincount(split, minlength=3) for split in splits]
  starts = np.cumsum([np.cumsum(sizes) - sizes, *counts[:-1]], axis=0)
  with futures.ThreadPoolExecutor(source.WORKERS) as pool:
    list(pool.map(write, parts, splits, starts))  # an error cancels what is left


def _summary(transforms: Transforms) -> str:
  """Returns a line about the features, and the rows of their tables."""
  rows = {feature.table or feature.name: feature.vocabulary_size for feature in transforms.features}
  sizes = ", ".join(f"{name} {size:,}" for name, size in rows.items())
  numbers, features = len(transforms.dense_names), len(transforms.features)
  return f"{numbers} numbers, {features} features with vectors; rows of their tables: {sizes}"
