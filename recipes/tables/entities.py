"""Users or items: their raw ids, their features, and the titles of items."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import files
from ..errors import UserError
from ..training.features import Feature
from . import spec
from .fitting import Fitted, fit
from .rows import open_source
from .settings import Source
from .source import Stage
from .store import Store
from .values import bits, indices_of, spelled, spelling_of


class Codes:
  """Finds the numbers of texts.

  Args:
    texts: in the order of their numbers, each once.
  """

  def __init__(self, texts: Iterable[str]):
    self.texts = list(texts)
    self._codes = {text: code for code, text in enumerate(self.texts)}
    self._spelling = "whole" if spelling_of(pa.array(self.texts, pa.string())) else ""

  def find(self, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, int32 `[N]`; -1 for null and unknown ones.

    An id with ".0" is the one without where no text has the ending.
    """
    encoded = spelled(texts.dictionary_encode(), self._spelling)
    codes = [self._codes.get(text, -1) for text in encoded.dictionary.to_pylist()]
    return np.array([*codes, -1], np.int32)[indices_of(encoded)]


def one_spelling(texts: pa.Array) -> pa.Array:
  """Returns ids without ".0" where all of a column have it; see `values.spelling`.

  Raises:
    UserError: two of them are one id then.
  """
  one = spelled(texts, spelling_of(texts))
  if len(one.unique()) < len(texts.unique()):
    raise UserError("two ids differ only in the zeros behind their points: write them in one way")
  return one


@dataclasses.dataclass(frozen=True)
class Entities:
  """Users or items by number.

  Attributes:
    texts: raw ids.
    fitted: the transforms of the features.
    ids: of each feature, int32 `[entities]` or, of bags, `[entities, valency]`.
    dense: the numbers, float32 `[entities, K]`.
    titles: texts to show, None where no title is declared.
  """

  texts: list[str]
  fitted: Fitted
  ids: Mapping[str, np.ndarray]
  dense: np.ndarray
  titles: list[str | None] | None = None

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features."""
    return self.fitted.features

  @functools.cached_property
  def codes(self) -> Codes:
    """Finds the numbers of raw ids."""
    return Codes(self.texts)

  def of_rows(self, at: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the features' ids and the numbers of entities by number, of -1 as if missing."""
    known = at >= 0
    pick = lambda x: np.where(known.reshape(-1, *[1] * (x.ndim - 1)), x[at], -1).astype(np.int32)
    none = {name: np.array([np.nan]) for name in self.fitted.numbers}
    dense = np.where(known[:, None], self.dense[at], self.fitted.dense(none, 1))
    return {name: pick(ids) for name, ids in self.ids.items()}, dense.astype(np.float32)

  def numbered(self, texts: list[str]) -> "Entities":
    """Returns the entities of these raw ids in their order; unknown ones have no features."""
    at = self.codes.find(pa.array(texts, pa.string()))
    titles = self.titles and [self.titles[i] if i >= 0 else None for i in at]
    return Entities(texts, self.fitted, *self.of_rows(at), titles)

  def save(self, folder: Path, name: str) -> None:
    """Writes the raw ids and titles to `<name>.parquet`, and the transforms beside them."""
    columns = {"id": pa.array(self.texts, pa.large_string())}
    if self.titles is not None:
      columns["title"] = pa.array(self.titles, pa.large_string())
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    self.fitted.save(folder, f"{name}_features")
    with files.replacing(folder / f"{name}_features.npz") as file:
      stored: dict[str, Any] = {f"ids/{key}": ids for key, ids in self.ids.items()}
      np.savez(file, dense=self.dense, **stored)

  @classmethod
  def load(cls, folder: Path, name: str) -> "Entities":
    """Returns what `save` has written."""
    columns = pq.read_table(folder / f"{name}.parquet").to_pydict()
    with np.load(folder / f"{name}_features.npz") as stored:
      ids = {key.removeprefix("ids/"): stored[key] for key in stored.files if key != "dense"}
      dense = stored["dense"]
    fitted = Fitted.load(folder, f"{name}_features")
    return cls(columns["id"], fitted, ids, dense, columns.get("title"))


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
    stage: where the values are kept.
    bucketed: a number without buckets gets as many; 0 leaves it a number.
    base: of `fit`.
  """
  title = spec.only(kinds, spec.Title)
  features = {
    name: dataclasses.replace(kind, buckets=kind.buckets or bucketed)
    if isinstance(kind, spec.Number)
    else kind
    for name, kind in kinds.items()
    if isinstance(kind, spec.Embedded)
  }
  if not features:
    fitted = Fitted({}, {}, {}, {}, {})
  else:
    store = Store(stage, features, {"split": pa.int8()})
    with store.writer() as write:
      write({**values, "split": np.where(trained, 0, 1).astype(np.int8)})
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
    source: the table.
    side: "user" or "item".
    on_bad_row: "raise" or "skip".
    trained: the raw ids of the training rows, each once, which features are fitted on.
    stage: where text is kept.
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
