"""Columns to ids and numbers: what is fitted on the training rows, and what it does to any rows."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import embed
from embed import transforms
from embed.transforms import hashing

from .. import arrays
from ..errors import UserError
from ..training.features import Feature
from . import spec
from .source import literal
from .store import Store
from .values import FLAGS, WHOLE, indices_of, spelled, spelling

Values = Mapping[str, Any]  # by declared name: texts, lists of texts, float64 or int64 `[N]`
_SAMPLE = 1 << 16  # rows that quantiles are taken of
_DIGITS = 10  # of means and deviations
_LONGEST = 64  # of a bag whose length is taken from the training rows
_FEW_KNOWN = 16  # known values for each one that is looked up
_FEW = 100  # values, below which each has a row of its own
_DRAWN, _DRAWN_SEED = 0.1, 20  # the share of values of one row that count as unknown
_SPELLED = {
  "": "value",
  "flag": "lower(value)",
  "whole": rf"regexp_replace(value, {literal(WHOLE)}, '\1\2')",
}


def fit(
  store: Store, kinds: Mapping[str, spec.Kind], base: "Fitted | None" = None
) -> tuple["Fitted", list[str]]:
  """Returns the transforms of the rows with `split` 0, and lines about values that are not used.

  Args:
    store: the rows.
    kinds: the declared columns; features alone are fitted.
    base: of an earlier run. A column of the same declaration keeps its numbers and values, and new
      values come after them, so that a model of that run can resume.

  Raises:
    UserError: a column has no value in the training rows; names it.
  """
  kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Embedded)}
  work = _Fit(store, kinds, base or Fitted({}, {}, {}, {}, {}))
  return work.fitted(), work.notes


class _Fit:
  """Queries the statistics of training rows, and makes the transforms of them."""

  def __init__(self, store: Store, kinds: Mapping[str, spec.Kind], base: "Fitted"):
    self._store, self._kinds, self._base = store, kinds, base
    self._growing = {name for name, kind in kinds.items() if base.kinds.get(name) == kind}
    self.notes: list[str] = []

  def fitted(self) -> "Fitted":
    categories = {n: k for n, k in self._kinds.items() if isinstance(k, spec.Category)}
    bags = {n: k for n, k in categories.items() if isinstance(k, spec.Bag)}
    numbers = {n: k for n, k in self._kinds.items() if isinstance(k, spec.Number)}
    columns, aggregates = self._store.columns, ["count(*)"]
    new = [name for name in numbers if name not in self._growing]
    for name in new:
      raw, number = columns[name], numbers[name]
      x = f"sign({raw}) * ln(1 + abs({raw}))" if number.log and not number.buckets else raw
      aggregates += [f"count({x})", f"avg({x})", f"stddev_pop({x})"]
    aggregates += [f"max({self._store.LENGTH}({columns[name]}))" for name in bags]
    scan = f"{self._store.scan} WHERE split = 0"
    answer = self._store.query(f"SELECT {', '.join(aggregates)} FROM {scan}")
    self._rows, *others = (column[0].as_py() for column in answer.columns)
    found = iter(others)
    of_new = {name: self._number(name, numbers[name], *itertools.islice(found, 3)) for name in new}
    made = {name: of_new.get(name) or self._base.numbers[name] for name in numbers}
    widths = {name: self._width(name, bag, next(found)) for name, bag in bags.items()}
    tables: dict[str, list[str]] = {}
    for name, kind in categories.items():
      tables.setdefault(_vocabulary_of(name, kind) or name, []).append(name)
    vocabularies, spellings = dict[str, tuple[str, ...]](), dict[str, str]()
    for table, names in tables.items():
      values, of_names = self._values(names, categories[names[0]])
      spellings |= of_names
      if values is not None:
        vocabularies[table] = values
    in_order = {name: spellings[name] for name in categories}
    return Fitted(self._kinds, vocabularies, made, widths, in_order)

  def _empty(self, name: str) -> UserError:
    return UserError(f"column {name!r} has no value in the {self._rows:,} training rows: remove it")

  def _number(
    self, name: str, kind: spec.Number, count: int, *moments: float | None
  ) -> Mapping[str, Any]:
    if not count:
      raise self._empty(name)
    # The last digits depend on the order of the sum, which threads and engines choose.
    mean, deviation = (float(f"{moment:.{_DIGITS}g}") for moment in moments)
    boundaries = kind.buckets if isinstance(kind.buckets, tuple) else ()
    if isinstance(kind.buckets, int) and kind.buckets:
      raw, step = self._store.columns[name], -(-len(self._store) // _SAMPLE)
      shares = np.arange(1, kind.buckets) / kind.buckets
      sample = self._store.query(
        f"SELECT {raw} FROM {self._store.scan} WHERE split = 0 AND {raw} IS NOT NULL "
        f"AND file_row_number % {step} = 0"
      )
      if len(sample):
        boundaries = tuple(np.unique(np.quantile(sample[0].to_numpy(), shares)).tolist())
    if deviation <= 1e-9 * abs(mean):  # equal but for rounding
      deviation = 1.0
      if count == self._rows:
        note = "has the same number in all training rows, and tells nothing"
        self.notes.append(f"column {name!r} {note}")
    scale = {"mean": mean, "deviation": deviation} if kind.standardize else {}
    # `fill` is what a missing value is.
    return {"mean": 0.0, "deviation": 1.0, "fill": mean, "boundaries": boundaries} | scale

  def _width(self, name: str, kind: spec.Bag, longest: int | None) -> int:
    longest = max(longest or 0, self._base.widths.get(name, 1))
    width = kind.max_length or min(longest, _LONGEST)
    if longest > width:
      note = f"has rows of up to {longest:,} values, of which {width} are used"
      self.notes.append(f"column {name!r} {note}: its max_length says how many")
    return width

  def _values(
    self, names: Sequence[str], kind: spec.Category
  ) -> tuple[tuple[str, ...] | None, dict[str, str]]:
    """Returns the values of the columns of one table, None if it has no vocabulary; spellings."""
    engine, counts = self._store.stage.engine, self._counted(names, kind)
    whole = f"suffix(value, '0') AND regexp_matches(value, {literal(WHOLE)})"
    flags = ", ".join(map(literal, FLAGS))
    found = engine.execute(
      f"SELECT part, bool_or({whole}), bool_or(NOT ({whole})), bool_and(lower(value) IN ({flags})) "
      f"FROM {counts} GROUP BY part"
    ).fetchall()
    is_growing = names[0] in self._growing
    if not found and not is_growing:
      raise self._empty(names[0])
    # Columns of one table are spelled alike.
    alike = {spelling(*each[1:]) for each in found}
    common = alike.pop() if len(alike) == 1 else "" if found else "whole"
    common = "whole" if kind.size else common
    spellings = {n: self._base.spellings[n] if n in self._growing else common for n in names}
    if kind.size:
      is_id = rf"regexp_full_match({_SPELLED['whole']}, '\d{{1,18}}')"
      small = f"TRY_CAST({_SPELLED['whole']} AS BIGINT) < {kind.size}"
      (wrong,) = engine.execute(
        f"SELECT coalesce(sum(n), 0)::BIGINT FROM {counts} WHERE NOT ({is_id} AND {small})"
      ).fetchone()
      note = f"{wrong:,} values of column {names[0]!r} are no ids from 0 to its size"
      self.notes += [f"{note}, and have no vector"] * bool(wrong)
    if _vocabulary_of(names[0], kind) is None:
      return None, spellings
    value, by_part = "value", enumerate(_SPELLED[spellings[name]] for name in names)
    if any(each[1] for each in found) or "flag" in spellings.values():
      value = f"CASE part {' '.join(f'WHEN {part} THEN {how}' for part, how in by_part)} END"
    kept = engine.execute(
      f"SELECT {value} AS value, sum(n)::BIGINT AS count FROM {counts} GROUP BY 1 "
      f"HAVING count >= {kind.min_count} ORDER BY count DESC, value"
    ).to_arrow_table()
    if kind.oov and kind.min_count == 1 and len(kept) >= _FEW:
      # The rows for unknown values learn from rare ones that are drawn into them.
      hashed = hashing.hashes(np.array(kept["value"].to_pylist(), object), _DRAWN_SEED) / 2.0**64
      kept = kept.filter(pa.array((hashed >= _DRAWN) | (kept["count"].to_numpy() > 1)))
    known = self._base.vocabulary(names[0]) if is_growing else ()
    values = tuple(dict.fromkeys([*known, *kept["value"].to_pylist()]))
    if not values and not kind.oov:
      raise UserError(
        f"no value of column {names[0]!r} is in {kind.min_count} training rows or more: lower its "
        "min_count, or hash it"
      )
    return values, spellings

  def _counted(self, names: Sequence[str], kind: spec.Category) -> str:
    """Returns a relation of `part`, the column, `value`, and `n`, its rows; nulls are left out."""
    engine, parts = self._store.stage.engine, []
    for part, name in enumerate(names):
      column, is_list = self._store.columns[name], isinstance(self._kinds[name], spec.Bag)
      value = f"{self._store.EXPLODE}({column})" if is_list else column
      scan = f"{self._store.scan} WHERE split = 0"
      parts.append(f"SELECT {part} AS part, {value} AS value FROM {scan}")
    union = f"(SELECT * FROM ({' UNION ALL '.join(parts)}) WHERE value IS NOT NULL)"
    patterns = [getattr(self._kinds[name], "pattern", "") for name in names]
    # Perhaps there are as many values as rows.
    if (kind.hash or kind.is_dynamic) and self._store.IS_LOCAL and not any(patterns):
      return f"(SELECT *, 1 AS n FROM {union})"
    counts = self._store.table(
      "counts", f"SELECT part, value, count(*) AS n FROM {union} GROUP BY part, value"
    )
    if not any(patterns):
      return counts
    counted = engine.execute(f"FROM {counts} ORDER BY part").to_arrow_table()
    texts = [
      extracted(counted.filter(pc.equal(counted["part"], part))["value"].combine_chunks(), pattern)
      for part, pattern in enumerate(patterns)
    ]
    columns = [counted["part"], pa.chunked_array(texts), counted["n"]]
    engine.register("cut", pa.table(columns, ["part", "value", "n"]))
    return "(SELECT part, value, sum(n) AS n FROM cut WHERE value IS NOT NULL GROUP BY ALL)"


def logarithm(numbers: np.ndarray) -> np.ndarray:
  """Returns `sign(x) * log(1 + |x|)`."""
  return np.sign(numbers) * np.log1p(np.abs(numbers))


def flat_texts(values: Any, kind: spec.Kind) -> pa.Array:
  """Returns the texts of a category or bag, one after the other, as its pattern cuts them."""
  flat = values.flatten() if isinstance(kind, spec.Bag) else values
  return extracted(flat, getattr(kind, "pattern", ""))


def extracted(texts: pa.Array, pattern: str) -> pa.Array:
  """Returns the group of a pattern in each text, null where it does not match."""
  if not pattern:
    return texts
  search, encoded = re.compile(pattern).search, texts.dictionary_encode()
  matches = [search(text or "") for text in encoded.dictionary.to_pylist()]
  groups = [match.group(1) or None if match else None for match in matches]
  return pa.array(groups, pa.string()).take(encoded.indices)


def _vocabulary_of(name: str, kind: spec.Kind) -> str | None:
  """Returns the name of the vocabulary of a column; None of a column without."""
  if not isinstance(kind, spec.Category) or kind.hash or kind.size or kind.is_dynamic:
    return None
  return spec.table_of(name, kind)


class Fitted:
  """The transforms of declared columns: values to ids and numbers, the same in every process.

  Args:
    kinds: the declared features by name.
    vocabularies: the values of each table that has a vocabulary, the first being id 0.
    numbers: mean, deviation, what a missing value is, and boundaries of numbers by name.
    widths: the most values used of each bag by name.
    spellings: of categories by name; see `values.spelling`.
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
    columns = {name: self._column(name, kind) for name, kind in self.kinds.items()}
    self._columns = {name: column for name, column in columns.items() if column is not None}

  def _column(self, name: str, kind: Any) -> Any:
    """Returns the transform of a feature to ids; None of a number that is used as it is."""
    if isinstance(kind, spec.Number):
      boundaries = self.numbers[name]["boundaries"]
      return transforms.Bucketized(boundaries, default_value=-1) if boundaries else None
    if isinstance(kind, spec.Cross) or kind.hash:
      return transforms.HashBucket(kind.buckets if isinstance(kind, spec.Cross) else kind.hash)
    if kind.size:
      return transforms.Identity(kind.size, default_value=-1)
    if kind.is_dynamic:
      return transforms.RawIds()
    values = self.vocabularies[kind.table or name]
    if not values:
      return transforms.HashBucket(kind.oov)
    return transforms.Vocabulary(
      values, **({"num_oov_buckets": kind.oov} if kind.oov else {"default_value": -1})
    )

  @property
  def features(self) -> tuple[Feature, ...]:
    """The categorical features, in the order of the declaration."""
    return tuple(map(self._feature, self._columns))

  def _feature(self, name: str) -> Feature:
    kind: Any = self.kinds[name]
    is_dynamic = getattr(kind, "is_dynamic", False)
    return Feature(
      name,
      kind.capacity if is_dynamic else self._columns[name].vocabulary_size,
      valency=self.widths.get(name, 1),
      combiner=getattr(kind, "combiner", "mean"),
      table=getattr(kind, "table", ""),
      dim=kind.dim,
      optimizer=kind.optimizer,
      **({"eviction": kind.eviction, "half_life": kind.half_life} if is_dynamic else {}),
    )

  def vocabulary(self, name: str) -> tuple[str, ...]:
    """Returns the values of the first rows of a feature's table; none if it has no vocabulary."""
    return self.vocabularies.get(_vocabulary_of(name, self.kinds[name]) or "", ())

  def rest_of_rows(self, name: str) -> str:
    """Returns what the rows after the vocabulary depend on, as in "hash 1000"."""
    kind: Any = self.kinds[name]
    if isinstance(kind, spec.Number):
      return f"buckets {self._columns[name].boundaries}"
    if isinstance(kind, spec.Cross):
      return f"hash {kind.buckets} of {', '.join(kind.columns)}"
    if kind.is_dynamic:
      return f"dynamic {kind.capacity}"
    return "identity" if kind.size else f"hash {kind.hash}" if kind.hash else f"oov {kind.oov}"

  @property
  def _dense(self) -> list[tuple[str, spec.Number]]:
    numbers = [(n, k) for n, k in self.kinds.items() if isinstance(k, spec.Number)]
    return [(name, kind) for name, kind in numbers if name not in self._columns]

  @property
  def dense_names(self) -> tuple[str, ...]:
    """The names of the columns of `dense`."""
    names = [(n, f"{n} is missing")[: 1 + (k.missing == "indicator")] for n, k in self._dense]
    return tuple(name for each in names for name in each)

  def dense(self, values: Values, rows: int) -> np.ndarray:
    """Returns the numbers float32 `[rows, K]`, standardized as declared."""
    dense, place = np.empty((rows, len(self.dense_names)), np.float32), 0
    for name, kind in self._dense:
      numbers, about = values[name], self.numbers[name]
      numbers = logarithm(numbers) if kind.log else numbers
      missing = np.isnan(numbers)
      filled = np.where(missing, about["fill"], numbers)
      dense[:, place] = (filled - about["mean"]) / about["deviation"]
      place += 1
      if kind.missing == "indicator":
        dense[:, place] = missing
        place += 1
    return dense

  def ids(self, values: Values, name: str) -> np.ndarray:
    """Returns a feature's ids, int32 `[N]`, or of a bag `[N, valency]`; -1 is no value.

    Of a dynamic vocabulary the halves of raw ids, int32 `[..., 2]`.
    """
    kind, column = self.kinds[name], self._columns[name]
    if isinstance(kind, spec.Number):
      return column.ids(values[name])
    if isinstance(kind, spec.Cross):
      return self._crossed(kind, column, values)
    ids = self._of_texts(name, flat_texts(values[name], kind))
    if not isinstance(kind, spec.Bag):
      return ids
    lengths = pc.list_value_length(values[name]).fill_null(0).to_numpy(zero_copy_only=False)
    return _padded(ids, lengths.astype(np.int64), self.widths[name], last=kind.last)

  def _of_texts(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of a category's texts, int32 `[N]`, or halves `[N, 2]`; -1 for null."""
    encoded = texts.dictionary_encode()
    distinct, ids = self._last.get(name, (None, None))
    # Neighbouring batches of a file have one dictionary.
    if distinct is None or not encoded.dictionary.equals(distinct):
      distinct = encoded.dictionary
      ids = self._of_distinct(name, spelled(distinct, self.spellings[name]))
      self._last[name] = (distinct, ids)
    assert ids is not None
    return _with_none(ids)[indices_of(encoded)]

  def _of_distinct(self, name: str, texts: pa.Array) -> np.ndarray:
    """Returns the ids of texts that are in one spelling, int32 `[N]`, or halves `[N, 2]`."""
    kind: Any = self.kinds[name]
    column, known = self._columns[name], self._values.get(_vocabulary_of(name, kind) or "")
    if kind.size:
      is_id = lambda t: t.isascii() and t.isdecimal() and len(t) < 19
      numbers = [int(text) if is_id(text) else -1 for text in texts.to_pylist()]
      return column.ids(np.array(numbers, np.int64)).astype(np.int32)
    if kind.is_dynamic:
      return embed.raw_ids(column.ids(np.array(texts.to_pylist(), object))).view(np.int32)
    # Arrow hashes all known values at every call; a transform has a dict of them.
    if known is None or len(known) > _FEW_KNOWN * len(texts):
      return _looked_up(column, texts)
    ids = pc.fill_null(pc.index_in(texts, known), -1).to_numpy(zero_copy_only=False).copy()
    unknown = ids < 0
    if kind.oov == 1:
      ids[unknown] = len(known)
    elif kind.oov:
      ids[unknown] = _looked_up(column, texts.filter(pa.array(unknown)))
    return ids

  def _crossed(self, kind: spec.Cross, column: Any, values: Values) -> np.ndarray:
    parts = []
    for name in kind.columns:
      if isinstance(self.kinds[name], spec.Number):
        ids = self.ids(values, name)
        texts = pa.array(ids, mask=ids < 0).cast(pa.string())
      else:
        texts = spelled(flat_texts(values[name], self.kinds[name]), self.spellings[name])
        texts = texts.dictionary_decode() if isinstance(texts, pa.DictionaryArray) else texts
      parts.append(texts)
    encoded = pc.binary_join_element_wise(*parts, "\x1f").dictionary_encode()  # null if a part is
    return _with_none(_looked_up(column, encoded.dictionary))[indices_of(encoded)]

  def merged(self, other: "Fitted") -> "Fitted":
    """Returns the transforms of both; no name is in both."""
    names = ("kinds", "vocabularies", "numbers", "widths", "spellings")
    return Fitted(*(getattr(self, name) | getattr(other, name) for name in names))

  def save(self, folder: Path, name: str) -> None:
    """Writes `<name>.json` and `<name>.parquet`, the vocabularies."""
    tables = [table for table, values in self.vocabularies.items() for _ in values]
    values = [value for values in self.vocabularies.values() for value in values]
    columns = {"table": pa.array(tables, pa.string()), "value": pa.array(values, pa.large_string())}
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    about = {"kinds": spec.as_dicts(self.kinds), "tables": list(self.vocabularies)}
    about |= {"numbers": self.numbers, "widths": self.widths, "spellings": self.spellings}
    arrays.write_json(folder / f"{name}.json", about)

  @classmethod
  def load(cls, folder: Path, name: str) -> "Fitted":
    """Returns what `save` has written."""
    about = json.loads((folder / f"{name}.json").read_text())
    table = pq.read_table(folder / f"{name}.parquet")
    vocabularies = {
      key: tuple(table.filter(pc.equal(table["table"], key))["value"].to_pylist())
      for key in about["tables"]
    }
    fitted = (about[each] for each in ("numbers", "widths", "spellings"))
    return cls(spec.parse(about["kinds"]), vocabularies, *fitted)


def _looked_up(column: Any, texts: pa.Array) -> np.ndarray:
  """Returns the ids of texts by a transform, int32 `[N]`."""
  keys = np.array(texts.to_pylist(), object)
  return column.ids(keys).astype(np.int32) if len(keys) else np.empty(0, np.int32)


def _with_none(ids: np.ndarray) -> np.ndarray:
  """Returns ids int32 `[N, ...]` with those of null behind them."""
  return np.concatenate([ids, np.full_like(ids, -1, shape=(1, *ids.shape[1:]))])


def _padded(flat: np.ndarray, lengths: np.ndarray, width: int, *, last: bool) -> np.ndarray:
  """Returns bags as int32 `[N, width, ...]`, -1 after each; of longer ones the first or last."""
  starts = np.cumsum(lengths) - lengths
  kept = np.minimum(lengths, width)
  first = starts + (lengths - kept if last else 0)
  places = np.arange(width)
  index = np.minimum(first[:, None] + places, max(len(flat) - 1, 0))
  inside = (places < kept[:, None]).reshape(len(lengths), width, *[1] * (flat.ndim - 1))
  none = np.full((*index.shape, *flat.shape[1:]), -1, np.int32)
  return np.where(inside, flat[index], none) if len(flat) else none
