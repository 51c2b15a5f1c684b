"""Fits the transforms of columns on the training rows, by queries for counts and moments."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from . import spec
from .transforms import Transforms, vocabulary_of
from .values import literal

_SAMPLE = 1 << 16  # rows that quantiles are taken of
_DIGITS = 10  # of means and deviations
_LONGEST = 64  # of a bag whose length is taken from the training rows
_FEW = 100  # values, below which each has a row of its own
_DRAWN = "19"  # the values of one row whose MD5 is below it, a tenth, count as unknown


def fit(
  con: Any,
  view: str,
  columns: Mapping[str, str],
  kinds: Mapping[str, spec.Kind],
  base: Transforms | None = None,
) -> tuple[Transforms, list[str]]:
  """Returns the transforms of the rows with `split` 0, and lines about values that are not used.

  Args:
    con, view: DuckDB's, with the columns `place` and `split`.
    columns: of the view by declared name.
    kinds: the declared columns; features alone are fitted.
    base: of an earlier run. A column of the same declaration keeps its numbers and values, and new
      values come after them, so that a model of that run can resume.

  Raises:
    UserError: a column has no value in the training rows; names it.
  """
  kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, spec.Side)}
  work = _Fit(con, view, columns, kinds, base or Transforms({}, {}, {}, {}))
  return work.transforms(), work.notes


class _Fit:
  """Queries the statistics of training rows, and makes the transforms of them."""

  def __init__(self, con: Any, view: str, columns: Any, kinds: Any, base: Transforms):
    self._query = lambda sql: con.execute(sql).to_arrow_table()
    self._columns, self._relation = columns, f"{view} WHERE split = 0"
    self._kinds, self._base = kinds, base
    self._growing = {name for name, kind in kinds.items() if base.kinds.get(name) == kind}
    self.notes: list[str] = []

  def transforms(self) -> Transforms:
    bags = {n: k for n, k in self._kinds.items() if isinstance(k, spec.Bag)}
    numbers = {n: k for n, k in self._kinds.items() if isinstance(k, spec.Number)}
    new = [name for name in numbers if name not in self._growing]
    answers = self._moments(new, numbers, bags)
    made = {name: self._number(name, numbers[name], answers) for name in new}
    made = {name: made.get(name) or self._base.numbers[name] for name in numbers}
    widths = {name: self._width(name, bag, next(answers)) for name, bag in bags.items()}
    tables: dict[str, list[str]] = {}
    for name, kind in self._kinds.items():
      if isinstance(kind, spec.Category):
        tables.setdefault(vocabulary_of(name, kind) or name, []).append(name)
    vocabularies = dict[str, tuple[str, ...]]()
    for table, names in tables.items():
      values = self._values(names, self._kinds[names[0]])
      if values is not None:
        vocabularies[table] = values
    return Transforms(self._kinds, vocabularies, made, widths)

  def _moments(
    self, new: Sequence[str], numbers: Mapping[str, spec.Number], bags: Mapping[str, spec.Bag]
  ) -> Iterator[Any]:
    """Returns count, mean and deviation of new numbers, then the longest row of each bag."""
    aggregates = ["count(*)"]
    for name in new:
      x = self._columns[name]
      x = f"sign({x}) * ln(1 + abs({x}))" if numbers[name].log and not numbers[name].buckets else x
      aggregates += [f"count({x})", f"avg({x})", f"stddev_pop({x})"]
    aggregates += [f"max(array_length({self._columns[name]}))" for name in bags]
    answer = self._query(f"SELECT {', '.join(aggregates)} FROM {self._relation}")
    self._rows, *others = (column[0].as_py() for column in answer.columns)
    return iter(others)

  def _empty(self, name: str) -> UserError:
    return UserError(f"column {name!r} has no value in the {self._rows:,} training rows: remove it")

  def _number(self, name: str, kind: spec.Number, answers: Iterator[Any]) -> Mapping[str, Any]:
    count, *moments = itertools.islice(answers, 3)
    if not count:
      raise self._empty(name)
    # The last digits depend on the order of the sum, which threads choose.
    mean, deviation = (float(f"{moment:.{_DIGITS}g}") for moment in moments)
    boundaries = kind.buckets if isinstance(kind.buckets, tuple) else ()
    if isinstance(kind.buckets, int) and kind.buckets:
      shares = np.arange(1, kind.buckets) / kind.buckets
      known = f"FROM {self._relation} AND {self._columns[name]} IS NOT NULL"
      numbered = f"(SELECT {self._columns[name]}, row_number() OVER (ORDER BY place) AS n {known})"
      sample = self._query(f"FROM {numbered} WHERE n % {-(-count // _SAMPLE)} = 0")
      boundaries = tuple(np.unique(np.quantile(sample[0].to_numpy(), shares)).tolist())
    if deviation <= 1e-9 * abs(mean):  # equal but for rounding
      deviation = 1.0
      if count == self._rows:
        self.notes.append(f"column {name!r} has the same number in all training rows")
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

  def _values(self, names: Sequence[str], kind: Any) -> tuple[str, ...] | None:
    """Returns the values of the columns of one table, the most frequent first, or None."""
    parts = [f"SELECT {self._exploded(name)} AS value FROM {self._relation}" for name in names]
    union = f"(SELECT value FROM ({' UNION ALL '.join(parts)}) WHERE value IS NOT NULL)"
    is_growing = names[0] in self._growing
    has_any = lambda: self._query(f"SELECT value FROM {union} LIMIT 1").num_rows
    if vocabulary_of(names[0], kind) is None:
      if not is_growing and not has_any():
        raise self._empty(names[0])
      return None
    counted = f"SELECT value, count(*) AS n FROM {union} GROUP BY value"
    having = f" HAVING count(*) >= {kind.min_count}" if kind.min_count > 1 else ""
    ordered = f"SELECT value, n FROM ({counted}{having}) ORDER BY n DESC, value"
    kept = self._query(ordered)
    if kind.oov and kind.min_count == 1 and len(kept) >= _FEW:
      # The rows for unknown values learn from rare ones that are drawn into them.
      drawn = f"n = 1 AND md5(value) < {literal(_DRAWN)}"
      kept = self._query(ordered.replace(" ORDER BY", f" WHERE NOT ({drawn}) ORDER BY"))
    values = kept["value"].to_pylist()
    if not values and not is_growing:
      if not has_any():
        raise self._empty(names[0])
      if not kind.oov:
        raise UserError(
          f"no value of column {names[0]!r} is in {kind.min_count} training rows or more: lower "
          "its min_count, or hash it"
        )
    known = self._base.vocabulary(names[0]) if is_growing else ()
    return tuple(dict.fromkeys([*known, *values]))

  def _exploded(self, name: str) -> str:
    column = self._columns[name]
    return f"unnest({column})" if isinstance(self._kinds[name], spec.Bag) else column
