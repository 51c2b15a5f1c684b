"""Users or items of a table: reads them, and fits the transforms of their features."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError
from . import spec
from .encoding import Codes, Entities, Fitted
from .fitting import fit
from .rows import open_source
from .settings import Source
from .source import Stage
from .store import Store
from .values import bits, spelled, spelling_of


def one_spelling(texts: pa.Array) -> pa.Array:
  """Returns ids without ".0" where all of a column have it; see `values.spelling`.

  Raises:
    UserError: two of them are one id then.
  """
  one = spelled(texts, spelling_of(texts))
  if len(one.unique()) < len(texts.unique()):
    raise UserError("two ids differ only in the zeros behind their points: write them in one way")
  return one


def encoded(
  texts: list[str],
  kinds: Mapping[str, spec.Kind],
  values: Mapping[str, Any],
  trained: np.ndarray,
  stage: Stage,
  *,
  bucketed: int = 0,
  base: Fitted | None = None,
) -> Entities:
  """Returns entities whose features are fitted on and computed of their values.

  Args:
    texts: raw ids, E of them.
    kinds: the declared features, and perhaps a title.
    values: E values by declared name.
    trained: bool `[E]`, those of training rows, which are fitted on.
    bucketed: a number without buckets gets as many; 0 leaves it a number.
    base: of `fit`.
  """
  title = spec.only(kinds, spec.Title)
  features = {
    name: dataclasses.replace(kind, buckets=kind.buckets or bucketed)
    if isinstance(kind, spec.Number)
    else kind
    for name, kind in kinds.items()
    if isinstance(kind, spec.Side)
  }
  if not features:
    fitted = Fitted({}, {}, {}, {}, {})
  else:
    store = Store(stage, features, {"split": pa.int8()})
    with store.writer() as write:
      write(values, split=np.where(trained, 0, 1).astype(np.int8))
    fitted, _ = fit(store, features, base)
  ids = {feature.name: fitted.ids(values, feature.name) for feature in fitted.features}
  titles = values[title].to_pylist() if title else None
  return Entities(texts, fitted, ids, fitted.dense(values, len(texts)), titles)


def read(
  source: Source,
  side: str,
  on_bad_row: str,
  trained: pa.Array,
  stage: Stage,
  *,
  bucketed: int = 0,
  base: Fitted | None = None,
) -> tuple[Entities, list[str]]:
  """Returns the users or items of a table of their own, and lines about bad and missing rows.

  Args:
    side: "user" or "item".
    on_bad_row: "raise" or "skip".
    trained: the raw ids of the training rows, each once, which features are fitted on.
    bucketed, base: as in `encoded`.

  Raises:
    UserError: an id is missing or appears twice; names file and row. Or no id of the training rows
      is in the table.
  """
  reader, file = open_source(source, on_bad_row, stage=stage), source.all_files[0]
  parts, seen, num_rows = list[dict[str, Any]](), dict[str, int](), 0
  for chunk in reader:
    chunk = reader.refuse(chunk, bits(chunk.columns[""].is_null()), "")
    keys = chunk.columns[""].to_pylist()
    places = range(num_rows, num_rows := num_rows + len(keys))
    is_again = [seen.setdefault(key, n) < n for n, key in zip(places, keys, strict=True)]
    kind = f"is that of an earlier row, and a {side} has one row"
    parts.append(reader.refuse(chunk, np.array(is_again, bool), "", kind).columns)
  columns = {name: joined([part[name] for part in parts]) for name in parts[0]} if parts else {}
  if not parts or not len(columns[""]):
    raise UserError(f"no row of {file} has a value in column {source.key!r}")
  if not len(trained):
    raise UserError(f"no training row has a {side}: see config.split")
  texts = one_spelling(columns.pop(""))
  codes, wanted = Codes(texts.to_pylist()), one_spelling(trained)
  at = codes.find(wanted)
  if (at < 0).all():
    raise UserError(
      f"no {side} of the training rows is in column {source.key!r} of {file}: rows have {side}s "
      f"like {wanted[0].as_py()!r}, the table has {side}s like {codes.texts[0]!r}"
    )
  notes, unknown = reader.ledger.lines(), np.flatnonzero(at < 0)
  if unknown.size:
    notes.append(
      f"{unknown.size:,} of {len(wanted):,} {side}s of the training rows are not in config.{side}_"
      f"table, as {wanted[int(unknown[0])].as_py()!r}"
    )
  is_trained = np.isin(np.arange(len(texts)), at)
  made = encoded(
    codes.texts, source.kinds, columns, is_trained, stage, bucketed=bucketed, base=base
  )
  return made, notes


def joined(parts: list[Any]) -> Any:
  """Returns the values of several chunks as one; texts as a plain array."""
  if isinstance(parts[0], np.ndarray):
    return np.concatenate(parts)
  is_coded = isinstance(parts[0], pa.DictionaryArray)
  return pa.concat_arrays([part.dictionary_decode() if is_coded else part for part in parts])
