"""Columns to ids and numbers: what is fitted on the training rows, and what it does to any rows."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embed import transforms
from embed.transforms import hashing

from .. import arrays
from ..errors import UserError
from ..training.features import Feature
from . import spec
from .source import Stage
from .values import Spelling, bits, indices_of, spelled

Values = Mapping[str, Any]  # by declared name: texts, lists of texts, float64 or int64 `[N]`
SAMPLE = 1 << 16  # numbers that quantiles are taken of, at least half as many
_LONGEST = 64  # of a bag whose length is taken from the training rows
_INSERTED = 1 << 16  # values, at least
_FEW_KNOWN = 16  # known values for each one that is looked up
_FEW = 100  # values, below which each has a row of its own
_DRAWN, _DRAWN_SEED = 0.1, 20  # the share of values of one row that count as unknown
_NONE_COUNTED = pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})


class Counts:
  """Counts of texts in a table of the engine, which spills to disk.

  Args:
    engine: a connection to DuckDB.
    name: of the table.
  """

  def __init__(self, engine: Any, name: str):
    self._engine, self._name = engine, name
    self._parts: list[pa.Table] = []  # that wait: the engine has a price for each insertion
    engine.execute(f"CREATE OR REPLACE TEMP TABLE {name} (value VARCHAR, count BIGINT)")

  def add(self, texts: pa.Array, counts: np.ndarray) -> None:
    """Counts texts, each as often as `counts` say; nulls do not count."""
    self._parts.append(pa.table({"value": texts, "count": pa.array(counts, pa.int64())}))
    if sum(map(len, self._parts)) > _INSERTED:
      self._insert()

  def _insert(self) -> None:
    self._engine.register("waiting", pa.concat_tables([_NONE_COUNTED, *self._parts]))
    self._engine.execute(f"INSERT INTO {self._name} SELECT * FROM waiting WHERE value IS NOT NULL")
    self._parts = []

  def joined(self, parts: Sequence[tuple["Counts", str]]) -> "Counts":
    """Returns the counts of several columns, each in its spelling; removes their tables."""
    joined = Counts(self._engine, f"{self._name}_joined")
    for counts, spelling in parts:
      counted = counts.most_frequent().combine_chunks()
      texts = spelled(counted["value"].combine_chunks(), spelling)
      joined.add(texts, counted["count"].to_numpy())
    return joined

  def most_frequent(self, min_count: int = 1) -> pa.Table:
    """Removes the table; returns `value` and `count` of the texts seen that often, sorted by it."""
    self._insert()
    counted = self._engine.execute(
      f"SELECT value, sum(count)::BIGINT AS count FROM {self._name} GROUP BY value "
      f"HAVING sum(count) >= {min_count} ORDER BY count DESC, value"
    ).to_arrow_table()
    self._engine.execute(f"DROP TABLE {self._name}")
    return counted


@dataclasses.dataclass
class Moments:
  """Count, mean and deviation of numbers, and an even sample of them, added chunk by chunk.

  Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
  variances", equation 2.1.
  """

  count: int = 0
  missing: int = 0
  mean: float = 0.0
  squares: float = 0.0
  step: int = 1
  sample: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
  parts: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)

  def add(self, numbers: np.ndarray) -> None:
    """Adds the numbers of a chunk; nan is missing."""
    present = numbers[~np.isnan(numbers)]
    self.missing += len(numbers) - len(present)
    if not len(present):
      return
    offset = -self.count % self.step
    self.sample = np.concatenate([self.sample, present[offset :: self.step]])
    while len(self.sample) > SAMPLE:
      self.sample, self.step = self.sample[::2], 2 * self.step
    mean = float(present.mean())
    self._add(len(present), mean, float(((present - mean) ** 2).sum()))

  def __getstate__(self) -> dict[str, Any]:
    return self.__dict__ | {"sample": np.empty(0)}

  def join(self, other: "Moments") -> None:
    """Adds the numbers of later chunks, to the same digits as `add`; but not the sample."""
    self.missing += other.missing
    for part in other.parts:
      self._add(*part)

  def _add(self, size: int, mean: float, squares: float) -> None:
    self.parts.append((size, mean, squares))
    count, delta = self.count + size, mean - self.mean
    self.squares += squares
    self.squares += delta**2 * self.count * size / count
    self.mean += delta * size / count
    self.count = count

  @property
  def deviation(self) -> float:
    """The standard deviation; 1 where all numbers are equal but for rounding."""
    return 1.0 if self.is_constant else self._deviation

  @property
  def is_constant(self) -> bool:
    """Whether all numbers are equal but for rounding."""
    return self._deviation <= 1e-9 * abs(self.mean)

  @property
  def _deviation(self) -> float:
    return float((self.squares / max(self.count, 1)) ** 0.5)


def logarithm(numbers: np.ndarray) -> np.ndarray:
  """Returns `sign(x) * log(1 + |x|)`."""
  return np.sign(numbers) * np.log1p(np.abs(numbers))


def flat_texts(values: Any, kind: spec.Kind) -> pa.Array:
  """Returns the texts of a category or bag, one after the other, as its pattern cuts them."""
  flat = values.flatten() if isinstance(kind, spec.Bag) else values
  return extracted(flat, kind.pattern) if isinstance(kind, spec.Category) else flat


def extracted(texts: pa.Array, pattern: str) -> pa.Array:
  """Returns the group of a pattern in each text, null where it does not match."""
  if not pattern:
    return texts
  search = re.compile(pattern).search
  encoded = texts.dictionary_encode()
  matches = [search(text or "") for text in encoded.dictionary.to_pylist()]
  groups = [match.group(1) or None if match else None for match in matches]
  return pa.array(groups, pa.string()).take(encoded.indices)


class Fit:
  """Collects the statistics of training rows, and makes the transforms of them.

  Args:
    kinds: the declared columns; features alone are fitted.
    stage: with the engine; None makes one of its own.
    base: of an earlier run. A column of the same declaration keeps its numbers and values, and new
      values come after them, so that a model of that run can go on.
  """

  def __init__(
    self,
    kinds: Mapping[str, spec.Kind],
    base: "Fitted | None" = None,
    stage: Stage | None = None,
  ):
    self._stage = stage or Stage()
    self._kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Embedded)}
    self._base = base if base is not None else Fitted({}, {}, {}, {}, {})
    self._growing = {n for n, kind in self._kinds.items() if self._base.kinds.get(n) == kind}
    self._moments = {
      n: Moments() for n, kind in self._kinds.items() if isinstance(kind, spec.Number)
    }
    self._categories: dict[str, spec.Category] = {
      name: kind for name, kind in self._kinds.items() if isinstance(kind, spec.Category)
    }
    self._spellings = {name: Spelling() for name in self._categories}
    self._longest = {n: 0 for n, kind in self._kinds.items() if isinstance(kind, spec.Bag)}
    self._counts: dict[str, Any] = {}  # `Counts`, or what another engine has in their place
    # Neighbouring chunks of a file have one dictionary, and are counted together.
    self._counted: dict[str, tuple[pa.Array, np.ndarray]] = {}
    self._no_ids: dict[str, int] = {}
    self.rows = 0

  def add(self, values: Values, rows: int) -> None:
    """Adds training rows."""
    self.rows += rows
    for name, moments in self._moments.items():
      kind: Any = self._kinds[name]
      moments.add(logarithm(values[name]) if kind.log and not kind.buckets else values[name])
    for name, category in self._categories.items():
      if isinstance(category, spec.Bag):
        longest = pc.max(pc.list_value_length(values[name])).as_py() or 0
        self._longest[name] = max(self._longest[name], longest)
      encoded = flat_texts(values[name], category).dictionary_encode()
      indices = indices_of(encoded)
      counts = np.bincount(indices[indices >= 0], minlength=len(encoded.dictionary))
      known = self._counted.get(name)
      if known is not None and encoded.dictionary.equals(known[0]):
        counts += known[1]
      else:
        self._flush(name)
      self._counted[name] = (encoded.dictionary, counts)

  def _flush(self, name: str) -> None:
    """Adds the values that have been counted in the chunks of one dictionary."""
    texts, counts = self._counted.pop(name, (pa.array([], pa.string()), np.empty(0, np.int64)))
    seen, kind = (counts > 0) & bits(texts.is_valid()), self._categories[name]
    texts, counts = texts.filter(pa.array(seen)), counts[seen]
    self._spellings[name].add(texts)
    if kind.size:
      identity = transforms.Identity(kind.size, default_value=-1)
      wrong = _ids_of_texts(identity, spelled(texts, "whole"), whole=True) < 0
      self._no_ids[name] = self._no_ids.get(name, 0) + int(counts[wrong].sum())
    if len(texts) and _table_of(name, kind):
      if name not in self._counts:
        self._counts[name] = Counts(self._stage.engine, f"counts_{id(self)}_{len(self._counts)}")
      self._counts[name].add(texts, counts)

  def __getstate__(self) -> dict[str, Any]:
    """Leaves out the counts and the stage, for `join` elsewhere."""
    return self.__dict__ | {"_stage": None, "_counts": {}, "_counted": {}}

  def counts(self) -> dict[str, Counts]:
    """Returns the counts of the values of the columns that have a vocabulary."""
    for name in self._categories:
      self._flush(name)
    return self._counts

  def supply(self, counts: Mapping[str, Any], samples: Mapping[str, np.ndarray]) -> None:
    """Sets what `join` leaves out: by column, counts of values and samples of numbers."""
    self._counts = {n: each for n, each in counts.items() if not self._spellings[n].is_empty}
    for name, sample in samples.items():
      self._moments[name].sample = sample

  def join(self, other: "Fit") -> None:
    """Adds the statistics of later rows, but the counts of values and the samples of numbers."""
    self.rows += other.rows
    for name, moments in self._moments.items():
      moments.join(other._moments[name])
    for name in self._categories:
      self._spellings[name].join(other._spellings[name])
      self._no_ids[name] = self._no_ids.get(name, 0) + other._no_ids.get(name, 0)
    for name in self._longest:
      self._longest[name] = max(self._longest[name], other._longest[name])

  def finish(self) -> "Fitted":
    """Returns the transforms.

    Raises:
      UserError: a column has no value in the training rows; names it.
    """
    for name in self._categories:
      self._flush(name)
    spellings = {name: self._spelling(name) for name in self._categories}
    tables: dict[str, list[str]] = {}
    for name, kind in self._categories.items():
      if table := _table_of(name, kind):
        tables.setdefault(table, []).append(name)
    vocabularies = {table: self._vocabulary(names, spellings) for table, names in tables.items()}
    numbers = {name: self._number(name) for name in self._moments}
    for name, kind in self._categories.items():
      is_counted = _table_of(name, kind) or name in self._growing
      if not is_counted and self._spellings[name].is_empty:
        raise UserError(self._empty(name))
    return Fitted(self._kinds, vocabularies, numbers, self._widths(), spellings)

  def _spelling(self, name: str) -> str:
    if name in self._growing:
      return self._base.spellings[name]
    # Columns of one table are spelled alike.
    shared = _table_of(name, self._kinds[name]) or name
    spellings = {
      self._spellings[other].name
      for other, kind in self._categories.items()
      if (_table_of(other, kind) or other) == shared
    }
    return spellings.pop() if len(spellings) == 1 else ""

  @property
  def notes(self) -> list[str]:
    """Lines about values of the training rows that are not used."""
    notes = [
      f"{count:,} values of column {name!r} are no ids from 0 to its size, and have no vector"
      for name, count in self._no_ids.items()
      if count
    ]
    notes += [
      f"column {name!r} has the same number in all training rows, and tells nothing"
      for name, moments in self._moments.items()
      if moments.count and moments.is_constant and not moments.missing
      if name not in self._growing
    ]
    widths = self._widths()
    return notes + [
      f"column {name!r} has rows of up to {longest:,} values, of which {widths[name]} are used: "
      "its max_length says how many"
      for name, longest in self._longest.items()
      if longest > widths[name]
    ]

  def _vocabulary(self, names: Sequence[str], spellings: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the values of the columns of one table."""
    name, kind, counts = names[0], self._categories[names[0]], self._counts.get(names[0])
    known = self._base.vocabulary(name) if name in self._growing else ()
    if len(names) > 1 or spellings[name] == "flag" or self._spellings[name].has_whole:
      parts = [(self._counts.pop(each), spellings[each]) for each in names if each in self._counts]
      counts = parts[0][0].joined(parts) if parts else None
    if not known and all(self._spellings[each].is_empty for each in names):
      raise UserError(self._empty(name))
    kept = counts.most_frequent(kind.min_count) if counts else _NONE_COUNTED
    if kind.oov and kind.min_count == 1 and len(kept) >= _FEW:
      # The rows for unknown values learn from rare ones that are drawn into them.
      hashed = hashing.hashes(np.array(kept["value"].to_pylist(), object), _DRAWN_SEED) / 2.0**64
      kept = kept.filter(pa.array((hashed >= _DRAWN) | (kept["count"].to_numpy() > 1)))
    values = list(dict.fromkeys([*known, *kept["value"].to_pylist()]))
    if not values and not kind.oov:
      raise UserError(
        f"no value of column {name!r} is in {kind.min_count} training rows or more: lower its "
        "min_count, or hash it"
      )
    return tuple(values)

  def _number(self, name: str) -> dict[str, Any]:
    moments, kind = self._moments[name], self._kinds[name]
    assert isinstance(kind, spec.Number)
    if name in self._growing:
      return self._base.numbers[name]
    if not moments.count:
      raise UserError(self._empty(name))
    boundaries: tuple[float, ...] = ()
    if isinstance(kind.buckets, tuple):
      boundaries = kind.buckets
    elif kind.buckets:
      shares = np.arange(1, kind.buckets) / kind.buckets
      boundaries = tuple(np.unique(np.quantile(moments.sample, shares)).tolist())
    mean, deviation = (moments.mean, moments.deviation) if kind.standardize else (0.0, 1.0)
    fill = moments.mean  # of missing values
    return {"mean": mean, "deviation": deviation, "fill": fill, "boundaries": boundaries}

  def _widths(self) -> dict[str, int]:
    widths = {}
    for name, longest in self._longest.items():
      kind = self._kinds[name]
      assert isinstance(kind, spec.Bag)
      longest = max(longest, self._base.widths.get(name, 1))
      widths[name] = kind.max_length or min(longest, _LONGEST)
    return widths

  def _empty(self, name: str) -> str:
    return f"column {name!r} has no value in the {self.rows:,} training rows: remove it"


def _table_of(name: str, kind: spec.Kind) -> str | None:
  """Returns the name of the vocabulary of a column; None of a column without."""
  if not isinstance(kind, spec.Category) or kind.hash or kind.size:
    return None
  return kind.table or name


class Fitted:
  """The transforms of declared columns: values to ids and numbers, the same in every process.

  Args:
    kinds: the declared features by name.
    vocabularies: the values of each table that has a vocabulary, the first being id 0.
    numbers: mean, deviation, what a missing value is, and boundaries of numbers by name.
    widths: the most values used of each bag by name.
    spellings: of categories by name; see `values.Spelling`.
  """

  def __init__(
    self,
    kinds: Mapping[str, spec.Kind],
    vocabularies: Mapping[str, tuple[str, ...]],
    numbers: Mapping[str, Mapping[str, Any]],
    widths: Mapping[str, int],
    spellings: Mapping[str, str],
  ):
    self.kinds, self.vocabularies = dict(kinds), dict(vocabularies)
    self.numbers = {name: dict(each) for name, each in numbers.items()}
    self.widths, self.spellings = dict(widths), dict(spellings)
    self._values = {table: pa.array(each, pa.string()) for table, each in vocabularies.items()}
    self._last: dict[str, tuple[pa.Array, np.ndarray]] = {}  # ids of a dictionary's values
    self._columns = {
      name: column
      for name, kind in self.kinds.items()
      if (column := self._column(name, kind)) is not None
    }

  def _column(self, name: str, kind: spec.Kind) -> Any:
    """Returns the transform of a feature to ids; None of a number that is used as it is."""
    if isinstance(kind, spec.Number):
      boundaries = self.numbers[name]["boundaries"]
      return transforms.Bucketized(boundaries, default_value=-1) if boundaries else None
    if isinstance(kind, spec.Cross):
      return transforms.HashBucket(kind.buckets)
    assert isinstance(kind, spec.Category)
    if kind.hash:
      return transforms.HashBucket(kind.hash)
    if kind.size:
      return transforms.Identity(kind.size, default_value=-1)
    values = self.vocabularies[kind.table or name]
    if not values:
      return transforms.HashBucket(kind.oov)
    if kind.oov:
      return transforms.Vocabulary(values, num_oov_buckets=kind.oov)
    return transforms.Vocabulary(values, default_value=-1)

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features, in the order of the declaration."""
    features = []
    for name, column in self._columns.items():
      kind: Any = self.kinds[name]
      features.append(
        Feature(
          name,
          column.vocabulary_size,
          valency=self.widths.get(name, 1),
          combiner=getattr(kind, "combiner", "mean"),
          table=getattr(kind, "table", ""),
          dim=kind.dim,
          optimizer=kind.optimizer,
        )
      )
    return tuple(features)

  def vocabulary(self, name: str) -> tuple[str, ...]:
    """Returns the values of the first rows of a feature's table; none if it has no vocabulary."""
    return self.vocabularies.get(_table_of(name, self.kinds[name]) or "", ())

  def rest_of_rows(self, name: str) -> str:
    """Returns what the rows after the vocabulary depend on, as in "hash 1000"."""
    kind, column = self.kinds[name], self._columns[name]
    if isinstance(kind, spec.Number):
      return f"buckets {column.boundaries}"
    if isinstance(kind, spec.Cross):
      return f"hash {kind.buckets} of {', '.join(kind.columns)}"
    assert isinstance(kind, spec.Category)
    if kind.size:
      return "identity"
    return f"hash {kind.hash}" if kind.hash else f"oov {kind.oov}"

  @property
  def dense_names(self) -> tuple[str, ...]:
    """The names of the columns of `dense`."""
    names = []
    for name, kind in self.kinds.items():
      if isinstance(kind, spec.Number) and name not in self._columns:
        names += [name, f"{name} is missing"] if kind.missing == "indicator" else [name]
    return tuple(names)

  def dense(self, values: Values, rows: int) -> np.ndarray:
    """Returns the numbers float32 `[rows, K]`, standardized as declared."""
    columns = []
    for name, kind in self.kinds.items():
      if isinstance(kind, spec.Number) and name not in self._columns:
        numbers = logarithm(values[name]) if kind.log else values[name]
        missing = np.isnan(numbers)
        about = self.numbers[name]
        filled = np.where(missing, about["fill"], numbers)
        columns.append((filled - about["mean"]) / about["deviation"])
        if kind.missing == "indicator":
          columns.append(missing)
    return (
      np.stack(columns, axis=1).astype(np.float32) if columns else np.empty((rows, 0), np.float32)
    )

  def ids(self, values: Values, name: str) -> np.ndarray:
    """Returns a feature's ids, int32 `[N]`, or of a bag `[N, valency]`; -1 is no value."""
    kind, column = self.kinds[name], self._columns[name]
    if isinstance(kind, spec.Number):
      return column.ids(values[name])
    if isinstance(kind, spec.Cross):
      return self._crossed(kind, column, values)
    assert isinstance(kind, spec.Category)
    texts = flat_texts(values[name], kind)
    ids = self._of_texts(name, texts)
    if not isinstance(kind, spec.Bag):
      return ids
    lengths = pc.list_value_length(values[name]).fill_null(0).to_numpy(zero_copy_only=False)
    return _padded(ids, lengths.astype(np.int64), self.widths[name], last=kind.last)

  def _of_texts(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of a category's texts, int32 `[N]`; -1 for null."""
    kind: Any = self.kinds[name]
    encoded = texts.dictionary_encode()
    distinct, ids = self._last.get(name, (None, None))
    # Neighbouring batches of a file have one dictionary.
    if distinct is None or not encoded.dictionary.equals(distinct):
      distinct = encoded.dictionary
      whole = "whole" if kind.size else self.spellings[name]
      ids = self._of_distinct(name, spelled(distinct, whole))
      self._last[name] = (distinct, ids)
    assert ids is not None
    return np.append(ids, np.int32(-1))[indices_of(encoded)]

  def _of_distinct(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of texts that are in one spelling, int32 `[N]`."""
    kind: Any = self.kinds[name]
    column, table = self._columns[name], _table_of(name, kind)
    known = self._values.get(table or "")
    # Arrow hashes all known values at every call; a transform has a dict of them.
    if known is None or len(known) > _FEW_KNOWN * len(texts):
      return _ids_of_texts(column, texts, whole=bool(kind.size))
    ids = pc.fill_null(pc.index_in(texts, known), -1).to_numpy(zero_copy_only=False).copy()
    unknown = (ids < 0) & bits(texts.is_valid())
    if kind.oov > 1:
      ids[unknown] = _ids_of_texts(column, texts.filter(pa.array(unknown)))
    elif kind.oov:
      ids[unknown] = len(known)
    return ids

  def _crossed(self, kind: spec.Cross, column: Any, values: Values) -> np.ndarray:
    parts, present = [], np.array(True)
    for name in kind.columns:
      part = self.kinds[name]
      if isinstance(part, spec.Number):
        ids = self.ids(values, name)
        texts = pa.array(ids, mask=ids < 0).cast(pa.string())
      else:
        texts = spelled(flat_texts(values[name], part), self.spellings[name])
        texts = texts.dictionary_decode() if isinstance(texts, pa.DictionaryArray) else texts
      present = present & texts.is_valid().to_numpy(zero_copy_only=False)
      parts.append(texts)
    joined = pc.binary_join_element_wise(*parts, "\x1f")  # null where a part is missing
    return np.where(present, _ids_of_texts(column, joined), -1).astype(np.int32)

  def merged(self, other: "Fitted") -> "Fitted":
    """Returns the transforms of both; no name is in both."""
    return Fitted(
      self.kinds | other.kinds,
      self.vocabularies | other.vocabularies,
      self.numbers | other.numbers,
      self.widths | other.widths,
      self.spellings | other.spellings,
    )

  def save(self, folder: Path, name: str) -> None:
    """Writes `<name>.json` and `<name>.parquet`, the vocabularies."""
    tables = [table for table, values in self.vocabularies.items() for _ in values]
    values = [value for values in self.vocabularies.values() for value in values]
    columns = {"table": pa.array(tables, pa.string()), "value": pa.array(values, pa.large_string())}
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    about = {
      "kinds": spec.as_dicts(self.kinds),
      "tables": list(self.vocabularies),
      "numbers": self.numbers,
      "widths": self.widths,
      "spellings": self.spellings,
    }
    arrays.write_json(folder / f"{name}.json", about)

  @classmethod
  def load(cls, folder: Path, name: str) -> "Fitted":
    """Returns what `save` has written."""
    about = json.loads((folder / f"{name}.json").read_text())
    table = pq.read_table(folder / f"{name}.parquet")
    vocabularies: dict[str, tuple[str, ...]] = {}
    for key in about["tables"]:
      values = table.filter(pc.equal(table["table"], key))["value"]
      vocabularies[key] = tuple(values.to_pylist())
    return cls(
      spec.parse(about["kinds"]),
      vocabularies,
      about["numbers"],
      about["widths"],
      about["spellings"],
    )


def _ids_of_texts(column: Any, texts: pa.Array, *, whole: bool = False) -> np.ndarray:
  """Returns the ids of texts, int32 `[N]`; -1 for null.

  Args:
    column: of `embed.transforms`; asked once for each distinct text.
    texts: text `[N]`.
    whole: whether the column takes whole numbers; a text that is none has no id.
  """
  encoded = texts.dictionary_encode()
  distinct = encoded.dictionary.to_pylist()
  if whole:
    keys = np.array(
      [int(t) if t and t.isascii() and t.isdecimal() and len(t) < 19 else -1 for t in distinct],
      np.int64,
    )
  else:
    keys = np.array([text or "" for text in distinct], object)  # "" is padding
  ids = column.ids(keys) if len(keys) else np.empty(0, np.int32)
  return np.append(ids, -1)[indices_of(encoded)].astype(np.int32)


def _padded(flat: np.ndarray, lengths: np.ndarray, width: int, *, last: bool) -> np.ndarray:
  """Returns bags as int32 `[N, width]`, -1 after each; of longer ones the first or last values."""
  starts = np.cumsum(lengths) - lengths
  kept = np.minimum(lengths, width)
  first = starts + (lengths - kept if last else 0)
  places = np.arange(width)
  index = np.minimum(first[:, None] + places, max(len(flat) - 1, 0))
  inside = places < kept[:, None]
  return np.where(inside, flat[index] if len(flat) else -1, -1).astype(np.int32)
