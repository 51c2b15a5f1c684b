"""Fits the transforms of columns to ids and numbers on the training rows."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ..errors import UserError
from . import spec
from .encoding import Fitted, extracted, vocabulary_of
from .source import literal
from .store import Store
from .values import FLAGS, WHOLE, spelling

_SAMPLE = 1 << 16  # rows that quantiles are taken of
_DIGITS = 10  # of means and deviations
_LONGEST = 64  # of a bag whose length is taken from the training rows
_FEW = 100  # values, below which each has a row of its own
_DRAWN, _DRAWN_SEED = 0.1, 20  # the share of values of one row that count as unknown
_SPELLED = {
  "": "value",
  "flag": "lower(value)",
  "whole": rf"regexp_replace(value, {literal(WHOLE)}, '\1\2')",
}


def fit(
  store: Store, kinds: Mapping[str, spec.Kind], base: Fitted | None = None
) -> tuple[Fitted, list[str]]:
  """Returns the transforms of the rows with `split` 0, and lines about values that are not used.

  Args:
    kinds: the declared columns; features alone are fitted.
    base: of an earlier run. A column of the same declaration keeps its numbers and values, and new
      values come after them, so that a model of that run can resume.

  Raises:
    UserError: a column has no value in the training rows; names it.
  """
  is_fitted = lambda kind: isinstance(kind, spec.Side) and not spec.is_history(kind)
  kinds = {name: kind for name, kind in kinds.items() if is_fitted(kind)}
  work = _Fit(store, kinds, base or Fitted({}, {}, {}, {}, {}))
  return work.fitted(), work.notes


class _Fit:
  """Queries the statistics of training rows, and makes the transforms of them."""

  def __init__(self, store: Store, kinds: Mapping[str, spec.Kind], base: Fitted):
    self._store, self._kinds, self._base = store, kinds, base
    self._growing = {name for name, kind in kinds.items() if base.kinds.get(name) == kind}
    self.notes: list[str] = []

  def fitted(self) -> Fitted:
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
      tables.setdefault(vocabulary_of(name, kind) or name, []).append(name)
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
    if vocabulary_of(names[0], kind) is None:
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
      digest = lambda value: xxhash.xxh64_intdigest(value.encode(), _DRAWN_SEED)
      hashed = np.array(list(map(digest, kept["value"].to_pylist())), np.uint64) / 2.0**64
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
