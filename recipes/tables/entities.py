"""Users or items of a table: reads them, and fits the transforms of their features."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DamagedFileError, UserError
from . import source, spec
from .fit import fit
from .source import Relation, Source
from .transforms import Codes, Entities, Transforms


def of_values(
  con: Any,
  texts: list[str],
  kinds: Mapping[str, spec.Kind],
  values: Mapping[str, pa.Array],
  trained: np.ndarray,
  *,
  bucketed: int = 0,
  base: Transforms | None = None,
) -> Entities:
  """Returns the entities of E raw ids, whose features are fitted on and computed of their values.

  Args:
    kinds: the declared features, and perhaps a title.
    values: E values by declared name.
    trained: bool `[E]`, the entities of training rows, which are fitted on.
    bucketed: a number without buckets gets as many; 0 leaves it a number.
    base: as of `fit`.
  """
  features = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Side)}
  for name, kind in features.items():
    if isinstance(kind, spec.Number):
      features[name] = dataclasses.replace(kind, buckets=kind.buckets or bucketed)
  transforms = Transforms({}, {}, {}, {})
  if features:
    columns = {name: f"c{place}" for place, name in enumerate(values)}
    split, place = (~trained).astype(np.int8), np.arange(len(texts))
    con.register(
      "entities", pa.table([*values.values(), split, place], [*columns.values(), "split", "place"])
    )
    transforms, _ = fit(Relation(con, "entities", columns), features, base)
  ids = {feature.name: transforms.ids(values, feature.name) for feature in transforms.features}
  title = spec.only(kinds, spec.Title)
  titles = values[title].to_pylist() if title else None
  return Entities(texts, transforms, ids, transforms.dense(values, len(texts)), titles)


def read(
  con: Any,
  table: Source,
  side: str,
  on_bad_row: str,
  trained: pa.Array,
  *,
  bucketed: int = 0,
  base: Transforms | None = None,
) -> tuple[Entities, list[str]]:
  """Returns the users or items of a table of their own, and lines about bad and missing rows.

  Args:
    side: "user" or "item".
    on_bad_row: "raise" or "skip".
    trained: the raw ids of the training rows, each once, which features are fitted on.
    bucketed, base: as in `of_values`.

  Raises:
    UserError: an id is missing or appears twice; or no id of the training rows is in the table.
  """
  file = table.all_files[0]
  rows = source.read(con, table, on_bad_row, name=f"{side}_table")
  key = rows.columns[""]
  again = con.execute(
    f"SELECT place, {key} FROM {rows.view} "
    f"QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY place) > 1 ORDER BY place"
  ).fetchall()
  if again:
    number = rows.numbers_of(np.array([again[0][0]]))[1][0]
    problem = f"{file}, row {number}, column {table.key!r}: {again[0][1]!r} is in an earlier row"
    if on_bad_row == "raise":
      raise DamagedFileError(f"{problem}. Repair it, or write config.on_bad_row='skip'")
    places = ", ".join(str(row) for row, _ in again)
    con.execute(f"UPDATE {rows.table} SET bad = 0 WHERE rowid IN ({places})")
    rows.leave_out(f"their {side} is in an earlier row", len(again), problem)
  if not len(trained):
    raise UserError(f"no training row has a {side}: see config.split")
  texts = con.execute(f"SELECT {key} FROM {rows.view}").to_arrow_table()[0].to_pylist()
  at, notes = Codes(texts).find(trained), [*rows.notes]
  if (at < 0).all():
    raise UserError(
      f"no {side} of the training rows is in column {table.key!r} of {file}: rows have {side}s "
      f"like {trained[0].as_py()!r}, the table has {side}s like {texts[0]!r}"
    )
  if (unknown := np.flatnonzero(at < 0)).size:
    notes.append(
      f"{unknown.size:,} of {len(trained):,} {side}s of the training rows are not in config.{side}_"
      f"table, as {trained[int(unknown[0])].as_py()!r}"
    )
  parts = [part.values for part in rows.batches()]
  names = [name for name in table.read_kinds if name]
  values = {name: pa.concat_arrays([part[name] for part in parts]) for name in names}
  is_trained = np.isin(np.arange(len(texts)), at)
  made = of_values(con, texts, table.kinds, values, is_trained, bucketed=bucketed, base=base)
  return made, notes
