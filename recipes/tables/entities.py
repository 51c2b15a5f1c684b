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
from .fitting import Fit, Fitted
from .rows import open_source
from .settings import Source
from .source import Stage
from .values import plain, spelled, spelling_of


class Codes:
  """Numbers texts in the order of their first appearance."""

  def __init__(self, texts: Iterable[str] = ()):
    self._codes = {text: code for code, text in enumerate(texts)}

  def __len__(self) -> int:
    return len(self._codes)

  @property
  def texts(self) -> list[str]:
    """The texts by number."""
    return list(self._codes)

  @functools.cached_property
  def array(self) -> pa.Array:
    """The texts by number, once all are added."""
    return pa.array(self.texts, pa.string())

  def add(self, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, int32 `[N]`, new ones included; -1 for null."""
    return self._numbers(texts, lambda text: self._codes.setdefault(text, len(self._codes)))

  def find(self, texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, int32 `[N]`; -1 for null and unknown ones.

    An id with ".0" is the one without where no text has the ending, once all are added.
    """
    texts = spelled(texts, self._spelling)
    return self._numbers(texts, lambda text: self._codes.get(text, -1))

  @functools.cached_property
  def _spelling(self) -> str:
    return "whole" if spelling_of(self.array) else ""

  @staticmethod
  def _numbers(texts: pa.Array, number) -> np.ndarray:
    encoded = texts.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    codes = np.array([*(-1 if text is None else number(text) for text in values), -1], np.int32)
    indices = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
    return codes[indices]


def one_spelling(codes: Codes) -> Codes:
  """Returns the numbers of ids without ".0" where all of a column have it; see `Spelling`.

  Raises:
    UserError: two of them are one id then.
  """
  one = Codes(spelled(codes.array, spelling_of(codes.array)).to_pylist())
  if len(one) < len(codes):
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

  def numbered(self, texts: list[str]) -> "Entities":
    """Returns the entities of these raw ids in their order; unknown ones have no features."""
    at = Codes(self.texts).find(pa.array(texts, pa.string()))
    pick = lambda x, empty: np.where((at >= 0).reshape(-1, *[1] * (x.ndim - 1)), x[at], empty)
    titles = None
    if self.titles is not None:
      titles = [self.titles[i] if i >= 0 else None for i in at]
    ids = {name: pick(x, -1).astype(np.int32) for name, x in self.ids.items()}
    return (
      Entities(texts, self.fitted, ids, pick(self.dense, 0.0).astype(np.float32), titles)
      if len(self.texts)
      else _without(texts, self.fitted)
    )

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


def _without(texts: list[str], fitted: Fitted) -> Entities:
  return Entities(texts, fitted, {}, np.zeros((len(texts), 0), np.float32))


class Collected:
  """The values of the features of users or items, from the first row of each."""

  def __init__(self, kinds: Mapping[str, spec.Kind]):
    self.kinds = dict(kinds)
    self._seen = 0
    read = [name for name, kind in self.kinds.items() if not isinstance(kind, spec.Cross)]
    self._parts: dict[str, list[Any]] = {name: [] for name in read}

  def add(self, codes: np.ndarray, values: Mapping[str, Any]) -> None:
    """Adds rows of the entities `codes`, numbered in the order of their first appearance."""
    if not self.kinds:
      return
    new, first = np.unique(codes, return_index=True)
    first = first[new >= self._seen]
    self._seen = max(self._seen, int(new.max(initial=-1)) + 1)
    for name, parts in self._parts.items():
      is_array = isinstance(values[name], np.ndarray)
      parts.append(values[name][first] if is_array else plain(values[name].take(pa.array(first))))

  def entities(
    self, texts: list[str], trained: np.ndarray, bucketed: int = 0, base: Fitted | None = None
  ) -> Entities:
    """Returns the entities with these raw ids; see `encoded`."""
    return encoded(texts, self.kinds, self.values(), trained, bucketed, base)

  def values(self) -> dict[str, Any]:
    """Returns the values of all entities by declared name."""
    return {name: joined(parts) for name, parts in self._parts.items()}


def joined(parts: list[Any]) -> Any:
  """Returns the values of several chunks as one."""
  if parts and isinstance(parts[0], pa.Array):
    return pa.concat_arrays(parts)
  return np.concatenate(parts) if parts else np.empty(0)


def encoded(
  texts: list[str],
  kinds: Mapping[str, spec.Kind],
  values: Mapping[str, Any],
  trained: np.ndarray,
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
    base: the transforms of an earlier run; see `Fit`.
  """
  title = spec.only(kinds, spec.Title)
  features = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Embedded)}
  if bucketed:
    features = {
      name: dataclasses.replace(kind, buckets=bucketed)
      if isinstance(kind, spec.Number) and not kind.buckets
      else kind
      for name, kind in features.items()
    }
  fit, rows = Fit(features, base), np.flatnonzero(trained)
  at = lambda x: x.take(pa.array(rows)) if isinstance(x, pa.Array) else x[rows]
  fit.add({name: at(x) for name, x in values.items()}, len(rows))
  fitted = fit.finish()
  ids = {feature.name: fitted.ids(values, feature.name) for feature in fitted.features}
  titles = values[title].to_pylist() if title else None
  return Entities(texts, fitted, ids, fitted.dense(values, len(texts)), titles)


def read(
  source: Source,
  side: str,
  on_bad_row: str,
  trained: Codes,
  bucketed: int = 0,
  base: Fitted | None = None,
  stage: Stage | None = None,
) -> tuple[Entities, list[str]]:
  """Returns the users or items of a table of their own, and lines about bad and missing rows.

  Args:
    source: the table.
    side: "user" or "item".
    on_bad_row: "raise" or "skip".
    trained: the raw ids of the training rows, which features are fitted on.
    bucketed, base: as in `encoded`.
    stage: where text is kept; None makes one of its own.

  Raises:
    UserError: an id is missing or appears twice; names file and row. Or no id of the training rows
      is in the table.
  """
  reader = open_source(source, on_bad_row, stage=stage)
  read = [name for name, kind in source.kinds.items() if not isinstance(kind, spec.Cross)]
  codes = Codes()
  parts: dict[str, list[Any]] = {name: [] for name in read}
  for chunk in reader:
    missing = chunk.columns[""].is_null().to_numpy(zero_copy_only=False)
    chunk = reader.refuse(chunk, missing, source.key, lambda row: "has no value")
    known = len(codes)
    numbers = codes.add(chunk.columns[""])
    first = np.zeros(len(numbers), bool)
    first[np.unique(numbers, return_index=True)[1]] = True
    again, keys = ~first | (numbers < known), chunk.columns[""]
    problem = lambda row, keys=keys: (
      f"is {keys[row].as_py()!r}, which an earlier row has: a {side} has one row"
    )
    chunk = reader.refuse(chunk, again, source.key, problem)
    for name, part in parts.items():
      part.append(chunk.columns[name])
  notes, wanted = list(reader.skipped), trained.texts
  codes = one_spelling(codes)
  at = codes.find(one_spelling(trained).array)
  if not len(codes):
    raise UserError(f"no row of {source.all_files[0]} has a value in column {source.key!r}")
  if not wanted:
    raise UserError(f"no training row has a {side}: see config.split")
  if (at < 0).all():
    raise UserError(
      f"no {side} of the training rows is in column {source.key!r} of {source.all_files[0]}: the "
      f"rows have {side}s like {wanted[0]!r}, the table has {side}s like {codes.texts[0]!r}"
    )
  if (missing := np.flatnonzero(at < 0)).size:
    notes.append(
      f"{missing.size:,} of {len(wanted):,} {side}s of the training rows are not in config.{side}_"
      f"table, as {wanted[missing[0]]!r}"
    )
  is_trained = np.zeros(len(codes), bool)
  is_trained[at[at >= 0]] = True
  values = {name: joined(part) for name, part in parts.items()}
  return encoded(codes.texts, source.kinds, values, is_trained, bucketed, base), notes
